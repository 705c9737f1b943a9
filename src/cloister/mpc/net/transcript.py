"""Transcript: what the parties of a channel were told alike, as one hash that every later sub-channel depends on.

    own_0 = ∅,   own_{i+1} = H(own_i, message told to all)
    digest       H(own, {id of sub-channel: its digest})         ∅ as long as nothing was told

`Channel.sub` puts the digest into the id of the sub-channel, and keys are signed, shares sealed and masks derived under
that id. Two parties that were told different things therefore cannot finish a later step together: whoever checks a
signature or opens a box first stops. A sub-channel that not all parties of its parent take part in, or that may be
given up and begun again, is opened `apart`: what is told there binds its own sub-channels, and not those of the parent.
"""

from __future__ import annotations

from typing import Any

from cloister.mpc.net import wire


class Transcript:
    """The transcript of one channel; what enters it enters those of the channels above, unless it stands apart."""

    def __init__(self, run_id: bytes, above: Transcript | None = None) -> None:
        self._run_id, self._above = run_id, above
        self._own = b""
        self._below: dict[str, Transcript] = {}  # by id: the order in which parallel steps finish does not matter
        self._digest: bytes | None = b""  # None: something was told since

    @property
    def digest(self) -> bytes:
        if self._digest is None:
            below = {run_id: one.digest for run_id, one in self._below.items()}
            self._digest = wire.digest("transcript", self._own, below)
        return self._digest

    def absorb(self, *what: Any) -> None:
        self._own = wire.digest("told", self._own, *what)
        self._rise()

    def _rise(self) -> None:
        self._digest = None
        if self._above is not None:
            self._above._below[self._run_id.hex()] = self
            self._above._rise()
