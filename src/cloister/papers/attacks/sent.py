"""What a rehearsal's parties were sent, kept for attacks: the very messages of the run, as their receivers got them.

    sent = Sent(*MASKED)
    run = rehearse(..., on_frame=sent)
    sent.by_sender(MASKED, to="coordinator", scope="coarse/0")      # party → message

A message that a protocol protects reads here as it does to whoever receives it: as a masked vector or a ciphertext.
"""

from __future__ import annotations

import threading
from typing import Any, TypeVar

from cloister.mpc.net import wire
from cloister.mpc.sums import checked_sum, secure_sum
from cloister.study import Party

T = TypeVar("T")
# the masked vector of a site, in either secure sum
MASKED: tuple[type[secure_sum.MaskedInput | checked_sum.Masked], ...] = (secure_sum.MaskedInput, checked_sum.Masked)


class Sent:
    """Listens to a run and keeps the messages of some kinds; all others are dropped unread."""

    def __init__(self, *kinds: type[Any]) -> None:
        self._kinds = {kind.__message__.name: kind for kind in kinds}
        self._needles = [name.encode() for name in self._kinds]
        self._kept: list[tuple[wire.Frame, Any]] = []
        self._lock = threading.Lock()

    def __call__(self, data: bytes) -> None:
        if not any(needle in data[:512] for needle in self._needles):  # the name stands before the body
            return
        frame = wire.unpack(data)
        if frame.kind != "data" or frame.name not in self._kinds:
            return
        message = wire.from_fields(self._kinds[frame.name], frame.body)
        with self._lock:
            self._kept.append((frame, message))

    def of(self, kind: type[T] | tuple[type[T], ...], *, sender: str = "", to: str = "", scope: str = "") -> list[T]:
        """Messages of that kind in their order, by sender, receiver and the end of their scope where given."""
        return [m for f, m in self._of(kind) if sender in ("", f.sender) and to in ("", f.to) and _ends(f, scope)]

    def by_sender(self, kind: type[T] | tuple[type[T], ...], *, to: str = "", scope: str = "") -> dict[Party, T]:
        """The first message of that kind from every party that sent one, as it came to `to`."""
        latest: dict[Party, T] = {}
        for f, m in self._of(kind):
            if to in ("", f.to) and _ends(f, scope):
                latest.setdefault(f.sender, m)
        return latest

    def _of(self, kind: Any) -> list[tuple[wire.Frame, Any]]:
        with self._lock:
            return [(f, m) for f, m in self._kept if isinstance(m, kind)]


def _ends(frame: wire.Frame, scope: str) -> bool:
    return not scope or frame.scope == scope or frame.scope.endswith(f"/{scope}")
