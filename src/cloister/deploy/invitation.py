"""Invitations: how a run begins, and what a party says to one.

    I1  S → u   run, digest of the study, time, sign_S("invitation", run, u, digest, time)
    I2  u → S   word, sign_u("word", run, u, word)           "come", or why not
    I3  u → S   the same, at the end: "done", or how it ended

Only the coordinator's identity starts anything. A site answers an invitation once: it must be signed with the key in
the site's own `study.toml`, be for this site, be of now, and name a run that was never seen here. Whoever carries it
cannot make, change or repeat one; nor can it say a party's word for it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from cloister import files
from cloister.deploy.kit import Kit
from cloister.errors import ParameterError, ProtocolAbort
from cloister.mpc.crypto.agreement import Identity, bind, check_signature
from cloister.study import Party

FRESH = 600.0  # seconds by which the clocks of two parties may differ, a slow line included
MOST_SEEN = 1000  # invitations of the last `FRESH` seconds that are remembered; more are refused
RUN, DIGEST, TIME, SIGNATURE = 16, 32, 8, 64  # bytes
COME, DONE = "come", "done"
MOST_WORD = 200


@dataclass(frozen=True)
class Invitation:
    run: bytes
    study: bytes  # digest
    to: Party
    time: int  # seconds since 1970

    def sign(self, identity: Identity) -> bytes:
        return self._said() + identity.sign("invitation", self._bound())

    @classmethod
    def check(cls, data: bytes, kit: Kit, now: float) -> Invitation:
        """What the coordinator of `kit`'s study says to its party; raises `ProtocolAbort` if it is not that."""
        if len(data) != RUN + DIGEST + TIME + SIGNATURE:
            raise ProtocolAbort("invitation", "I1", "malformed", "an invitation of another length")
        said, signature = data[:-SIGNATURE], data[-SIGNATURE:]
        made = cls(said[:RUN], said[RUN : RUN + DIGEST], kit.me, int.from_bytes(said[RUN + DIGEST :], "big"))
        check_signature(kit.study.keys[kit.study.coordinator], "invitation", made._bound(), signature)
        if abs(now - made.time) > FRESH:
            raise ProtocolAbort(
                "invitation", "I1", "stale", f"an invitation of {made.time - now:+.0f} s from now; compare the clocks"
            )
        return made

    def _said(self) -> bytes:
        return self.run + self.study + self.time.to_bytes(TIME, "big")

    def _bound(self) -> bytes:
        return bind("invitation", self.run, self.to.encode(), self.study, self.time.to_bytes(TIME, "big"))


class Seen:
    """Runs that this party was invited to lately, in a file, so that a restart forgets none of them."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def admit(self, run: bytes, now: float) -> None:
        """Remember `run`, or raise `ProtocolAbort` if it was seen before."""
        seen = {r: t for r, t in self._load().items() if abs(now - t) <= 2 * FRESH}
        if run.hex() in seen:
            raise ProtocolAbort("invitation", "I1", "replay", "this run was here already")
        if len(seen) >= MOST_SEEN:
            raise ProtocolAbort("invitation", "I1", "flood", f"{len(seen)} invitations within minutes")
        seen[run.hex()] = now
        files.write(self._path, json.dumps(seen))

    def _load(self) -> dict[str, float]:
        try:
            return {str(r): float(t) for r, t in json.loads(self._path.read_text(encoding="utf-8")).items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError, AttributeError):
            raise ParameterError(
                f"{self._path} is damaged; wait {2 * FRESH / 60:.0f} minutes, then delete it"
            ) from None


def say_word(identity: Identity, run: bytes, me: Party, word: str) -> bytes:
    said = word.encode()[:MOST_WORD]
    return identity.sign("word", bind("word", run, me.encode(), said)) + said


def read_word(public: bytes, run: bytes, party: Party, data: bytes) -> str:
    """A party's word; raises `ProtocolAbort` if it is not its own."""
    signature, said = data[:SIGNATURE], data[SIGNATURE:]
    if len(said) > MOST_WORD:
        raise ProtocolAbort("invitation", "I2", "malformed", "a word that is too long")
    check_signature(public, "word", bind("word", run, party.encode(), said), signature)
    return "".join(c for c in said.decode(errors="replace") if c.isprintable())
