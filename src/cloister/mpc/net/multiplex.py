"""One link for all steps of a study: each step has a mailbox and a session of its own, as if it were the only one.

    u → v   number of the step (one byte) ‖ frame

A party begins a step when it has ended the one before. Whoever is faster waits in the next step's hello, to which
everyone must come; so nothing but a hello, and word that a party is there or has stopped, can honestly arrive early:

- *Skipped or exchanged.* Of who sends any other message of a step that this party has not come to, nothing more is
  read: whoever waits for that party here stops, and names it and both steps.
- *Repeated.* So it is with a hello of a step that has ended here. Other late messages of such a step are dropped, as
  they would be at the end of a run.
- *Pulses and aborts* count for the later steps, too: who is busy with one is not silent, and who stopped in any, be
  it one that this party has not come to, does not come to the others.

The digests that the hellos compare (H1, H2) are of the whole study and of the step's place in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from cloister.errors import WireError
from cloister.mpc.net import wire
from cloister.mpc.net.mailbox import ROOM, Failure, Mailbox
from cloister.mpc.parties import Agreement, Party

HELLOS = ("channel.Hello", "channel.Welcome")
SHORT = 1 << 16  # bytes; pulses, aborts and hellos are shorter
EARLY = 1 << 24  # bytes that all parties together may leave here for a step that has not begun


class Tagged(Protocol):
    """A link that carries one byte beside each frame."""

    def post(self, to: Party, frame: bytes, tag: bytes = b"") -> None: ...


@dataclass(frozen=True)
class StepLink:
    """One step's end of the link; the link itself stays open when the step ends."""

    link: Tagged
    number: int

    def post(self, to: Party, frame: bytes) -> None:
        self.link.post(to, frame, bytes((self.number,)))

    def close(self) -> None:
        """The next step goes on with the same link."""


class Mailboxes:
    """The mailboxes of one party, one for each step; a transport fills it as it would fill a `Mailbox`."""

    def __init__(self, parts: Sequence[Agreement], me: Party, room: int = ROOM) -> None:
        self.parts, self.me, self.room = tuple(parts), me, room
        self._whole = Mailbox(me, room)  # counts what has not come whole, and knows who is gone
        self._boxes = [Mailbox(me, EARLY) for _ in self.parts]
        self._at = 1  # the step that is going on

    @property
    def failed(self) -> dict[Party, Failure]:
        """Who stopped, as far as is known to the transport or by an abort in the step that is going on."""
        return {**self._boxes[self._at - 1].failed, **self._whole.failed}

    @property
    def dropped(self) -> set[Party]:
        """Who stopped, or was left out, before it had finished a step."""
        return set().union(*(box.dropped for box in (self._whole, *self._boxes)))

    def begin(self, number: int) -> Mailbox:
        """The mailbox of the step that begins now."""
        self._at, box = number, self._boxes[number - 1]
        box.room = self.room
        return box

    def put(self, sender: Party, data: bytes) -> None:
        """Take a frame in; never raises."""
        number, frame = data[0] if data else 0, data[1:]
        if not 1 <= number <= len(self.parts):
            why = f"from '{sender}': a message of a step that there is not"
            self.fail(sender, Failure("channel", "-", "malformed", why, own=True))
            return
        at, known = self._at, _short(frame)
        if number != at and known is not None and self._out_of_turn(sender, number, at, known):
            return
        if number > at and known is None:
            self._refuse(sender, number, at, "went on to")
            return
        kind = known.kind if known is not None else "data"
        first = at if kind == "abort" else max(number, at)
        for box in self._boxes[first - 1 : len(self.parts) if kind in ("pulse", "abort") else number]:
            box.put(sender, frame)

    def _out_of_turn(self, sender: Party, number: int, at: int, frame: wire.Frame) -> bool:
        """Whether a short frame of another step was dealt with: refused by name, or left to itself."""
        if frame.kind != "data":
            return number < at and frame.kind == "bye"  # it has ended that step, as this party has
        hello = frame.name in HELLOS
        if number > at and not (hello and self.me == self.parts[0].coordinator):
            self._refuse(sender, number, at, "went on to")
            return True
        if number < at and hello:
            self._refuse(sender, number, at, "repeats")
        return number < at

    def _refuse(self, sender: Party, number: int, at: int, does: str) -> None:
        theirs, ours = (self.parts[i - 1].place for i in (number, at))
        why = f"'{sender}' {does} {theirs}, and '{self.me}' is at {ours}; nothing more was sent"
        self.fail(sender, Failure("channel", "H2", "order", why, own=True))

    def fail(self, party: Party, failure: Failure) -> None:
        for box in (self._whole, *self._boxes):
            box.fail(party, failure)

    def gone(self, party: Party, why: str) -> None:
        for box in (self._whole, *self._boxes):
            box.gone(party, why)

    def hold(self, sender: Party, size: int) -> bool:
        if fits := self._whole.hold(sender, size):
            return fits
        self.fail(sender, self._whole.failed[sender])
        return False

    def release(self, sender: Party, size: int) -> None:
        self._whole.release(sender, size)


def _short(frame: bytes) -> Any:
    """What a short frame says; None if it is long or says nothing."""
    try:
        return wire.unpack(frame) if len(frame) <= SHORT else None
    except (WireError, MemoryError):
        return None
