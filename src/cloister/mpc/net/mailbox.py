"""Mailbox: what arrived for one party and is not yet read, and what is known of who sent it.

A transport puts frames in as they come, from any thread. Here they are unpacked and sorted by sender and scope; what
is no frame, comes from somebody else than it says or in floods is refused, and nothing more is read of its sender:
whoever waits for that party stops, or goes on without it where a quorum is enough. What comes twice or out of order
ends the run at whoever reads next, since a protocol may have spent something on the first of the two. Pulses, aborts
and farewells are not kept: they change what is known of their sender.
"""

from __future__ import annotations

import dataclasses
import hashlib
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable

from cloister.errors import GONE, WireError, in_words
from cloister.mpc.net import wire
from cloister.mpc.net.wire import Frame
from cloister.mpc.parties import Party

WAITING, PATIENT, COMPUTING = 0, 1, 2  # what a pulse says; patient: will go on without the missing
MAX_WAITING = 1 << 16  # messages of one party that arrived and are not yet asked for
ROOM = 1 << 33  # bytes that all parties together may make this one hold, as they lie in memory; one of them half of it
MAX_WORD = 64  # letters of each part of an abort


@dataclasses.dataclass(frozen=True, slots=True)
class Failure:
    """Why nothing more will come from a party."""

    protocol: str
    line: str
    code: str
    detail: str = ""
    own: bool = False  # this party's own finding, and nothing that it was told
    origin: str = ""  # the party where it began, if that is another one
    began: str = ""  # that party's own code


class Mailbox:
    """Frames that arrived for one party; filled by the transport's threads, emptied by the party's event loop."""

    def __init__(self, me: Party, room: int = ROOM) -> None:
        self.me, self.room = me, room
        self.failed: dict[Party, Failure] = {}
        self.fatal: Failure | None = None
        self.heard: dict[Party, int] = defaultdict(int)  # frames and pulses from a party
        self.last: dict[Party, float] = {}  # when
        self.busy = {WAITING: 0, PATIENT: 0, COMPUTING: 0}  # pulses of anyone, by what they said
        self.progress = 0  # messages that arrived, and pieces of some that are not yet whole
        self._queues: dict[tuple[Party, str], deque[tuple[Frame, int, str]]] = {}
        self._waiting: dict[Party, int] = defaultdict(int)  # messages in the queues
        self._held: dict[Party, int] = defaultdict(int)  # bytes in the queues, and of what has not come whole
        self._next: dict[tuple[Party, str], int] = defaultdict(int)
        self._deaf: set[Party] = set()
        self._lock = threading.Lock()
        self._wake: Callable[[], None] = lambda: None

    def put(self, sender: Party, data: bytes) -> None:
        """Take a frame in; never raises. `sender` is who the transport authenticated, not who the frame says."""
        if sender in self._deaf or sender in self.failed:
            return
        frame, wrong, sha256 = None, None, ""
        try:
            frame = wire.unpack(data)  # outside the lock: a large frame of one party holds up no other
            if frame.kind == "data":
                sha256 = hashlib.sha256(data).hexdigest()
        except WireError as e:
            wrong = Failure("channel", "-", "malformed", f"from '{sender}': {e}")
        except MemoryError:
            wrong = Failure("channel", "-", "memory", f"no memory for a frame of '{sender}'")
        with self._lock:
            if sender in self._deaf or sender in self.failed:
                return
            self.heard[sender] += 1
            self.last[sender] = time.monotonic()
            try:
                if frame is not None:
                    self._sort_in(sender, frame, len(data), sha256)
            except WireError as e:
                wrong = Failure("channel", "-", "malformed", f"from '{sender}': {e}")
            if wrong is not None:
                self._spoil(sender, wrong)
        self._wake()

    def _spoil(self, sender: Party, failure: Failure) -> None:
        """Nothing more is read of `sender`, who sent what no honest party sends."""
        self.failed.setdefault(sender, dataclasses.replace(failure, own=True))

    def fail(self, party: Party, failure: Failure) -> None:
        """The transport knows why nothing more will come from `party`."""
        with self._lock:
            self.failed.setdefault(party, failure)
        self._wake()

    def hold(self, sender: Party, size: int) -> bool:
        """Count `size` bytes of a frame that is not yet whole; False, and its sender fails, if there is no room."""
        with self._lock:
            if not (fits := self._fits(sender, size)):
                self._spoil(sender, Failure("channel", "-", "flood", f"'{sender}' sends more than there is room for"))
            else:
                self._held[sender] += size
                self.progress += 1
                self.heard[sender] += 1  # on a slow line a large message may take longer than the timeout
                self.last[sender] = time.monotonic()
        if not fits:
            self._wake()
        return fits

    def release(self, sender: Party, size: int) -> None:
        """The frame is whole, or its sender has failed."""
        with self._lock:
            self._held[sender] -= size

    def _fits(self, sender: Party, size: int) -> bool:
        return self._held[sender] + size <= self.room // 2 and sum(self._held.values()) + size <= self.room

    def _sort_in(self, sender: Party, frame: Frame, size: int, sha256: str) -> None:
        if frame.sender != sender or frame.to != self.me:
            raise WireError(f"a frame of '{_word(frame.sender)}' to '{_word(frame.to)}' came from '{sender}'")
        if frame.kind == "pulse":
            if type(frame.body) is not int or frame.body not in self.busy:
                raise WireError("a pulse that says nothing known")
            self.busy[frame.body] += 1
        elif frame.kind == "bye":
            self.failed[sender] = Failure("channel", "-", "finished", f"'{sender}' finished and sends nothing more")
        elif frame.kind == "abort":
            if type(frame.body) is not list or [type(x) for x in frame.body] not in ([str] * 3, [str] * 5):
                raise WireError("an abort that is no (protocol, line, code), nor (..., origin, its code)")
            self.failed[sender] = told_by(sender, *map(_word, frame.body))
        else:
            key = (sender, frame.scope)
            if frame.seq != self._next[key]:
                code = "replay" if frame.seq < self._next[key] else "gap"
                why = f"message {frame.seq} of '{sender}' where {self._next[key]} was due: lost, replayed or reordered"
                self.fatal = self.fatal or Failure(_word(frame.name.partition(".")[0]), "-", code, why)
                return
            count = self._waiting[sender]
            if count >= MAX_WAITING or not self._fits(sender, frame.weight):
                why = f"'{sender}' sent {count} messages that no protocol here expects"
                self._spoil(sender, Failure("channel", "-", "flood", why))
                return
            self.progress += 1
            self._waiting[sender] = count + 1
            self._held[sender] += frame.weight
            self._next[key] += 1
            self._queues.setdefault(key, deque()).append((frame, size, sha256))

    def take(self, sender: Party, scope: str) -> tuple[Frame, int, str] | None:
        """The next message of `sender` in this scope, its size and its SHA-256."""
        with self._lock:
            queue = self._queues.get((sender, scope))
            if queue is None:
                return None
            frame, size, sha256 = queue.popleft()
            if not queue:
                del self._queues[sender, scope]
            self._waiting[sender] -= 1
            self._held[sender] -= frame.weight
            return frame, size, sha256

    def gone(self, party: Party, why: str) -> None:
        """The transport knows that nothing more can come from `party`."""
        with self._lock:
            self.failed.setdefault(party, Failure("channel", "-", "lost", f"'{party}' dropped out: {why}"))
        self._wake()

    @property
    def dropped(self) -> set[Party]:
        """Who stopped, or was left out, before it had finished."""
        return {p for p, failure in self.failed.items() if failure.code != "finished"}

    def fading(self, now: float, after: float, until: float) -> bool:
        """Whether some party has been silent for a while, and not for so long that all must have noticed."""
        with self._lock:
            return any(after < now - t < until for p, t in self.last.items() if p not in self.failed)

    def ignore(self, party: Party) -> bool:
        """Read nothing more of `party`, not even what has already arrived; whether that is new."""
        with self._lock:
            first = party not in self._deaf
            self._deaf.add(party)
            self._waiting.pop(party, None)
            for key in [key for key in self._queues if key[0] == party]:
                self._held[party] -= sum(frame.weight for frame, _, _ in self._queues.pop(key))
            return first

    def on_change(self, wake: Callable[[], None]) -> None:
        self._wake = wake


def told_by(sender: Party, protocol: str, line: str, code: str, origin: str = "", began: str = "") -> Failure:
    """What an abort says; with `origin`, that of a party that stopped because another one had."""
    if not origin or origin == sender:
        return Failure(protocol, line, code, f"'{sender}' stopped ({in_words(code)})")
    why = GONE.get(began) or f"stopped ({in_words(began)})"
    return Failure(protocol, line, code, f"'{origin}' {why}, as '{sender}' tells", origin=origin, began=began)


def _word(x: str) -> str:
    """What a peer calls something, short enough to be shown."""
    return "".join(c for c in x[:MAX_WORD] if c.isprintable()) or "-"
