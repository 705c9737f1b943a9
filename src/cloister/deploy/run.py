"""The process of one run at one party: opens the kit, takes the party's turn, and tells the coordinator how it ended.

    python -m cloister.deploy.run KIT RUN FD [anew]

The service starts it and holds the other end of FD. Frames go from here through the service and its carrier to the
other parties' processes; who carries them can delay or drop them. When the service ends, so does this.
"""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import sys
import threading
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

from cloister import errors
from cloister.deploy import link
from cloister.deploy.course import close_course
from cloister.deploy.invitation import DONE, read_word, say_word
from cloister.deploy.kit import Kit
from cloister.deploy.link import PING, REFUSED, TAKEN, WINDOW, Absent, Over, Unreachable
from cloister.deploy.logs import log_beside
from cloister.deploy.party import Ended, Turn, lost
from cloister.deploy.pipe import (
    ABSENT,
    ANSWER,
    ENDED,
    HALT,
    HEARD,
    MOST,
    NOBODY,
    OUTCOME,
    REQUEST,
    STOP,
    Asker,
    BrokenPipe,
    Packet,
    Pipe,
)
from cloister.errors import CloisterError, PeerLost, ProtocolAbort
from cloister.mpc.net.mailbox import Failure, told_by
from cloister.study import Party

WORD = b"W"  # a request: how it ended there
AT_ONCE = 2 * WINDOW  # requests of one party that are taken in at a time
GRACE = 5.0  # seconds to tell the others, once the service is gone
LAST_WORD = 2.0  # seconds for a coordinator that seems to be gone already

log = logging.getLogger("cloister.deploy")


class Attendee:
    """A party's place in one run, at the end of the pipe."""

    def __init__(self, kit: Kit, run: bytes, pipe: Pipe, *, anew: bool = False) -> None:
        self.kit, self.run, self._pipe = kit, run, pipe
        self._asker = Asker(pipe, run)
        self.turn = Turn(kit, run.hex(), self.ask, anew=anew)
        self.words: dict[Party, str] = {}
        self.peers = [p for p in kit.study.parties if p != kit.me]
        self._waiting: dict[str, int] = defaultdict(int)
        self._lock = threading.Lock()
        self._workers = ThreadPoolExecutor(AT_ONCE * len(self.peers), "answer")  # one party holds up no other

    def ask(self, to: Party, request: bytes, seconds: float) -> bytes:
        packet = self._asker.ask(to, request, seconds)
        if packet.kind == ANSWER:
            return packet.data
        if packet.kind == ABSENT:
            raise Absent
        raise link.Ended if packet.data == ENDED else Over

    def read(self) -> None:
        """Take in what comes, until the service closes the pipe."""
        while True:
            try:
                packet = self._pipe.read()
            except BrokenPipe:
                break
            if packet.kind == REQUEST:
                self._take(packet)
            elif packet.kind in (ANSWER, NOBODY, ABSENT):
                self._asker.settle(packet)
            elif packet.kind == HEARD:
                self._heard(Party(packet.name), packet.data.decode())
            elif packet.kind == STOP:
                if packet.data == HALT:
                    self._halt()
                self.turn.link.stop(packet.data.decode(), packet.name or "stopped")
        self.turn.link.stop("this party's service was stopped")
        self.turn.over.wait(GRACE)
        os._exit(0)

    def _take(self, packet: Packet) -> None:
        with self._lock:
            if self._waiting[packet.name] >= AT_ONCE:
                return  # it asks again
            self._waiting[packet.name] += 1
        self._workers.submit(self._answer, packet)

    def _answer(self, packet: Packet) -> None:
        sender = Party(packet.name)
        try:
            if packet.data[:1] == WORD:
                answer = self._ended(sender, packet.data[1:])
            else:
                answer = self.turn.link.answer(sender, packet.data)
        except Exception as e:
            log.error("a frame of '%s' could not be taken in (%s)", sender, type(e).__name__)
            return
        finally:
            with self._lock:
                self._waiting[packet.name] -= 1
        self._pipe.post(Packet(ANSWER, packet.name, packet.ticket, self.run, answer))

    def _ended(self, sender: Party, said: bytes) -> bytes:
        """Another party says how it ended; only the coordinator asks."""
        if self.kit.role != "coordinator" or sender not in self.peers:
            return REFUSED
        try:
            word = read_word(self.kit.study.keys[sender], self.run, sender, said)
        except ProtocolAbort:
            return REFUSED
        self.words.setdefault(sender, word)
        if word != DONE:
            self.turn.mailbox.fail(sender, failure_of(sender, word))
        return TAKEN

    def _heard(self, party: Party, word: str) -> None:
        """A party does not come, and said why; the service has checked that it did."""
        self.words[party] = word
        failure, why = failure_of(party, word), f"'{party}' does not take part ({word})"
        if failure.code == "mismatch":
            why = f"{party} came with another study file than {self.kit.me}; nothing was sent"
        self.turn.mailbox.fail(party, replace(failure, detail=why))
        self.turn.link.give_up(party, "it does not take part")

    def _halt(self) -> None:
        """End the run because this party's owner took its approval back; everyone hears that word."""
        why = f"the run was halted at {self.kit.me}, and its approval withdrawn"
        for party in self.peers:
            self.turn.mailbox.fail(party, Failure("policy", "-", "halted", why, own=True))

    # -- the end ---------------------------------------------------------------------------------------------------

    def tell(self, ended: Ended) -> None:
        """Say the word to the coordinator, for as long as it is there."""
        request = WORD + say_word(self.kit.identity, self.run, self.kit.me, ended.word)
        hub = self.kit.study.coordinator
        end = time.monotonic() + (LAST_WORD if self.turn.link.lost(hub) else self.turn.link.away)
        while time.monotonic() < end:
            try:
                if self.ask(hub, request, LAST_WORD) == TAKEN:
                    return
            except link.Ended:
                return  # nobody is left to be told
            except (TimeoutError, Unreachable):
                pass
            time.sleep(0.2)

    def see_off(self) -> None:
        """At the coordinator: wait until everyone has ended, or has been out of reach for a while."""
        seen = {p: float("-inf") if self.turn.link.lost(p) else time.monotonic() for p in self.peers}
        end = time.monotonic() + self.kit.study.patience
        while time.monotonic() < end:
            waiting = [p for p in self.peers if p not in self.words]
            waiting = [p for p in waiting if time.monotonic() - seen[p] < self.turn.link.away]
            if not waiting:
                return
            for p in waiting:
                try:
                    self.ask(p, PING, 2.0)
                    seen[p] = time.monotonic()
                except Over:
                    seen[p] = float("-inf")
                except (Unreachable, TimeoutError):
                    pass
            time.sleep(0.3)

    def conclude(self, ended: Ended, dropped: set[Party]) -> Ended:
        """At the coordinator: how it ended for everyone. It is done only if it is at all who came to the last message.

        Parties that the protocol went on without (`dropped`) are named, and that is all.
        """
        words = {str(p): self.words.get(p, "lost") for p in self.peers}
        failed = {p: word for p, word in words.items() if word != DONE and p not in dropped}
        if ended.status == "done" and failed:
            why = ", ".join(f"{p}: {word}" for p, word in failed.items())
            error = PeerLost("local", "-", "lost", f"everything was computed, but not everyone has a result ({why})")
            ended = replace(ended, status="aborted", error=errors.to_json(error))
        ended = replace(ended, parties=words)
        ended.keep()
        if ended.status == "done":
            close_course(self.kit)
        return ended


def failure_of(party: Party, word: str) -> Failure:
    """What a party's word says of its end: `aborted PROTOCOL LINE CODE`, `(CODE at PARTY)` if it began elsewhere."""
    _, protocol, line, code = (word.split(" ") + ["-"] * 4)[:4]
    elsewhere = re.search(r"\((\S+) at (\S+)\)", word)
    began, origin = elsewhere.groups() if elsewhere else ("", "")
    return told_by(party, protocol, line, code, origin, began)


def _report(pipe: Pipe, run: bytes, ended: Ended) -> None:
    """Hand the ending to the service, by the pipe and not by a file, because the disk may be the reason."""
    data = json.dumps(asdict(ended), default=lambda x: x.tolist() if hasattr(x, "tolist") else str(x)).encode()
    if len(data) > MOST:  # results are in its folder
        data = json.dumps(asdict(replace(ended, result={})), default=str).encode()
    pipe.post(Packet(OUTCOME, run=run, data=data))


def main() -> None:
    path, run, fd = Path(sys.argv[1]), bytes.fromhex(sys.argv[2]), int(sys.argv[3])
    pipe = Pipe(socket.socket(fileno=fd))
    os.umask(0o077)
    log_beside(path)
    try:
        me = Attendee(Kit.open(path), run, pipe, anew="anew" in sys.argv[4:])
    except CloisterError as e:  # the kit itself is broken
        log.error("run %s: %s", run.hex()[:8], e)
        _report(pipe, run, lost("", run.hex(), str(e)))
        pipe.flush(2.0)
        return
    threading.Thread(target=me.read, name="read", daemon=True).start()
    ended = me.turn.take()
    if me.kit.role == "coordinator":
        dropped = me.turn.mailbox.dropped
        me.see_off()
        ended = me.conclude(ended, dropped)
    else:
        me.tell(ended)
    _report(pipe, run, ended)
    pipe.flush(2.0)
    os._exit(0)


if __name__ == "__main__":
    main()
