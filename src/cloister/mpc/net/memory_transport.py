"""What carries frames between the parties of a rehearsal, and what may happen to them on the way."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from cloister.errors import WireError
from cloister.mpc.net import wire
from cloister.mpc.parties import Party


class Killed(BaseException):
    """An injected death: the party stops without a word."""


@dataclass(frozen=True)
class Fault:
    """What happens to the `nth` data message that fits: `name` is the message class, None fits any."""

    kind: Literal["drop", "delay", "duplicate", "swap", "truncate", "kill"]
    sender: str | None = None
    to: str | None = None
    name: str | None = None
    nth: int = 0
    seconds: float = 0.5  # of delay

    def fits(self, frame: wire.Frame) -> bool:
        return (
            self.sender in (None, frame.sender)
            and self.to in (None, frame.to)
            and self.name in (None, frame.name, frame.name.rpartition(".")[2])
        )


class Wires:
    """Carries frames between parties, and does to them what the faults say."""

    def __init__(self, deliver: Callable[[Party, Party, bytes], None], faults: Iterable[Fault] = ()) -> None:
        self._deliver = deliver
        self._faults = {f: f.nth for f in faults}
        self._held: dict[tuple[Party, Party], bytes] = {}
        self._lock = threading.Lock()
        self.dead: set[Party] = set()

    def carry(self, sender: Party, to: Party, data: bytes) -> None:
        """Deliver one frame; raises `Killed` in the sender if a fault says that it dies here."""
        if sender in self.dead:
            return
        fault = self._match(data) if self._faults else None
        late = None
        if self._held and wire.unpack(data).kind == "data":
            late = self._held.pop((sender, to), None)
        if fault is None:
            self._deliver(sender, to, data)
        elif fault.kind == "kill":
            self.dead.add(sender)
            raise Killed
        elif fault.kind == "delay":
            timer = threading.Timer(fault.seconds, self._deliver, (sender, to, data))
            timer.daemon = True
            timer.start()
        elif fault.kind == "swap":
            self._held[sender, to] = data
        elif fault.kind == "duplicate":
            self._deliver(sender, to, data)
            self._deliver(sender, to, data)
        elif fault.kind == "truncate":
            self._deliver(sender, to, data[: len(data) // 2])
        if late is not None:
            self._deliver(sender, to, late)

    def _match(self, data: bytes) -> Fault | None:
        try:
            frame = wire.unpack(data)
        except WireError:
            return None
        if frame.kind != "data":
            return None
        with self._lock:
            for fault, left in self._faults.items():
                if fault.fits(frame) and left >= 0:
                    self._faults[fault] = left - 1
                    if left == 0:
                        return fault
        return None


@dataclass(frozen=True)
class MemoryLink:
    me: Party
    wires: Wires

    def post(self, to: Party, frame: bytes) -> None:
        self.wires.carry(self.me, to, frame)

    def close(self) -> None:
        """Nothing is held open."""
