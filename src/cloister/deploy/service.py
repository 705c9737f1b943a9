"""A party's service: holds the kit, starts the carrier and the processes of runs, and passes packets between them.

            cloister run ── Unix socket ──┐                     (coordinator only)
    run's process ── pipe ── service ── pipe ── carrier ── TLS ── the coordinator's carrier
    keys, cells, protocol    kit, policy        FLARE, confined

A run begins with the coordinator's signed invitation (`cloister.deploy.invitation`), and only if this party's own
policy allows it. Nothing else that comes from the network makes the service do anything but pass it on or drop it. A
carrier that ends is replaced, and its runs go on as after any other break of the line. One that says what is no packet
is replaced, too, and its runs end by name.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cloister.deploy.approval.approval import Refusal
from cloister.deploy.approval.recovery import keep_late, note_begun, recover
from cloister.deploy.course import is_paid
from cloister.deploy.invitation import COME, Invitation, Seen, say_word
from cloister.deploy.kit import Kit
from cloister.deploy.launch import find_addresses, open_carrier
from cloister.deploy.logs import clean
from cloister.deploy.notify import Notifier
from cloister.deploy.party import Ended, failed, results_folder
from cloister.deploy.pipe import (
    ABSENT,
    ADDRESSES,
    ANSWER,
    CONNECTED,
    ENDED,
    GONE,
    HALT,
    LOG,
    NO_PACKET,
    NOBODY,
    OUTCOME,
    PLAN,
    READY,
    REQUEST,
    SERVICE,
    STOP,
    TWICE,
    Asker,
    BrokenPipe,
    Packet,
    Pipe,
)
from cloister.deploy.proxy import Proxy
from cloister.deploy.ready import tls_files
from cloister.errors import CloisterError, DiskError, ProtocolAbort
from cloister.study import Party

PING, INVITE = b"P", b"I"  # what services ask each other
HERE = b"+"
RUNS_AT_ONCE = 4
ONCE = "CLOISTER_ONCE"  # in the environment of a service that ends with its first run
REMEMBERED = 64  # runs that ended here, of which others are told so
REFUSALS = 20  # runs that did not begin, whose outcome is kept
LINES = 100  # lines of a carrier that are logged in a minute
RESTART, RESTART_MOST = 1.0, 30.0  # seconds before a carrier that ended is replaced
STUDIES = 30.0  # seconds between two looks at the study in the kit
RESOLVE = 20.0  # seconds after which a coordinator that is not reached is looked up again

TWICE_TEXT = (
    "%s is connected twice, from %s: two services use its kit; ask that party to stop one of them."
    " If it runs only one, somebody else has its kit: stop the study and agree on new keys"
)

log = logging.getLogger("cloister.deploy")


@dataclass
class Running:
    """A run's process, and this end of its pipe."""

    run: bytes
    process: subprocess.Popen[bytes]
    pipe: Pipe
    over: threading.Event = field(default_factory=threading.Event)
    ended: Ended | None = None  # how it ended, once its process has said so


class Service:
    """What a party does while it waits for runs, and during them."""

    def __init__(self, kit: Kit) -> None:
        self.kit = kit
        self.connected: dict[str, str] = {}  # party → the address that it connects from, "" if not known
        self.twice: dict[str, tuple[float, str]] = {}  # party → when it was last connected twice, and from where
        self._carrier: tuple[subprocess.Popen[bytes] | None, Pipe] | None = None
        self._asker: Asker | None = None
        self.runs: dict[bytes, Running] = {}
        self.since, self.confined = time.time(), ""
        self._stale: dict[bytes, Ended] = {}  # runs whose invitation came too late, or too early
        self._notifier, self._told = Notifier(), set[str]()
        self.last: Ended | None = None  # how the latest run ended here, even if no disk could keep it
        self._unsaved: dict[str, Ended] = {}  # outcomes of runs that ended while the disk was full
        self._ended: deque[bytes] = deque(maxlen=REMEMBERED)
        self._lock, self.ending = threading.Lock(), threading.Event()
        self._doors = ThreadPoolExecutor(2, "door")  # invitations are looked at here, a few at a time
        self._at_door = threading.BoundedSemaphore(8)
        self._lines = (0.0, 0)
        self.cancelled = 0  # how often its owner cancelled what is going on
        self.once = bool(os.environ.get(ONCE))

    @property
    def is_over(self) -> bool:
        """Whether this was started for one run, and that has ended."""
        return self.once and (bool(self.cancelled) or (bool(self._ended) and not self.runs))

    def start(self) -> None:
        threading.Thread(target=self._keep_carrier, name="carrier", daemon=True).start()
        if self.kit.role != "coordinator":
            threading.Thread(target=self._watch_studies, name="studies", daemon=True).start()

    def _watch_studies(self) -> None:
        """Notify once of every study file in the kit that waits for a decision, after a restart once more."""
        while True:
            try:
                kit = Kit.open(self.kit.path)
                if kit.decision == "waits" and kit.study.digest.hex() not in self._told:
                    self._told.add(kit.study.digest.hex())
                    self.notify("waiting", f"the study '{kit.study.name}' waits for a decision of {kit.me}", kit)
            except (CloisterError, OSError):
                pass  # whoever starts a run is told what is wrong with the kit
            if self.ending.wait(STUDIES):
                return

    def notify(self, event: str, text: str, kit: Kit | None = None) -> None:
        """Send a notification to this party's own hook, if it has one."""
        kit = kit or self.kit
        facts = {"event": event, "party": str(kit.me), "study": kit.study.name, "digest": kit.study.digest.hex()}
        try:
            self._notifier.post(kit.policy().notify, {**facts, "text": text})
        except CloisterError as e:
            log.warning("no notification can be sent: %s", e)

    def stop(self) -> None:
        """End runs and carrier."""
        self.ending.set()
        self._end_runs(b"this party's service was stopped")
        if self._carrier is not None:
            process, pipe = self._carrier
            pipe.close()
            if process is None:
                return
            try:
                process.wait(2.0)
            except subprocess.TimeoutExpired:
                process.kill()

    def halt(self) -> int:
        """End every run here at once, as its owner wants; returns how many there were."""
        log.warning("halted: every run here is stopped")
        return self._end_runs(HALT)

    def cancel(self) -> int:
        """End every run here, and orders that wait for parties; returns how many runs there were."""
        log.warning("cancelled: every run here is stopped")
        self.cancelled += 1
        return self._end_runs(b"the run was cancelled")

    def _end_runs(self, why: bytes) -> int:
        """Have the processes of runs tell the others and end; then make sure."""
        with self._lock:
            runs = [*self.runs.values()]
        for running in runs:
            running.pipe.post(Packet(STOP, data=why))
        end = time.monotonic() + 8.0
        for running in runs:
            if not running.over.wait(max(0.0, end - time.monotonic())):
                running.process.kill()
                running.over.wait(5.0)
        return len(runs)

    # -- the carrier -----------------------------------------------------------------------------------------------

    def _keep_carrier(self) -> None:
        pause = RESTART
        while not self.ending.is_set():
            began, whole = time.monotonic(), True
            try:
                whole = self._carry()
            except (OSError, CloisterError) as e:
                log.error("the carrier could not be started: %s", e)
            if self.ending.is_set():
                return
            if not whole:
                self._tell_runs("this party's carrier ended")
            pause = RESTART if time.monotonic() - began > 60.0 else min(2 * pause, RESTART_MOST)
            log.error("the carrier ended; a new one starts in %g s", pause)
            self.ending.wait(pause)

    def _carry(self) -> bool:
        """One carrier's life; whether all that it said were packets."""
        kit = Kit.open(self.kit.path)  # parties may have joined
        process, ours = open_carrier(kit, self.ending)
        pipe = Pipe(ours)
        pipe.post(Packet(PLAN, data=json.dumps(self._plan(kit)).encode()))
        with self._lock:
            self._carrier, self._asker = (process, pipe), Asker(pipe, SERVICE)
        if kit.role != "coordinator" and kit.policy().carrier is None:
            threading.Thread(target=self._keep_address, args=(pipe,), name="address", daemon=True).start()
        try:
            while True:
                self._from_carrier(pipe, pipe.read())
        except BrokenPipe as e:
            if not self.ending.is_set():
                log.error("the carrier's pipe broke: %s", e)
            return str(e) != NO_PACKET
        finally:
            with self._lock:
                self._carrier = None
            self.connected.clear()
            self.confined = ""
            pipe.close()
            if process is not None and not self.ending.is_set():
                process.kill()
                process.wait()

    def _plan(self, kit: Kit) -> dict[str, Any]:
        hub, policy = kit.role == "coordinator", kit.policy()
        if policy.carrier is not None:  # it is another program's user: no path, no proxy's password
            return {"me": kit.me, "hub": kit.study.coordinator, "parties": [*kit.study.parties]}
        host, port = str(kit.study.network["host"]), int(kit.study.network["port"])
        proxy = policy.proxy
        return {
            "me": kit.me,
            "hub": kit.study.coordinator,
            "parties": [*kit.study.parties],
            "host": host,
            "port": port,
            "listen": hub,
            "at": policy.listen,
            "addresses": [] if hub else _way_out(kit, proxy),
            "connect": port if proxy is None else proxy.port,
            "proxy": None if proxy is None else proxy.authorization,
            "tls": tls_files(kit),
            "sandbox": policy.sandbox,
        }

    def _keep_address(self, pipe: Pipe) -> None:
        """While the coordinator is not reached, look its name up again: the carrier cannot."""
        proxy = self.kit.policy().proxy
        while not self.ending.wait(RESOLVE):
            addresses = [] if self.connected else _way_out(self.kit, proxy)
            if addresses and not pipe.post(Packet(ADDRESSES, data=json.dumps(addresses).encode())):
                return  # another carrier has its own

    def _from_carrier(self, pipe: Pipe, packet: Packet) -> None:
        if packet.kind == LOG:
            self._log_line(packet.data)
        elif packet.kind == READY:
            log.info("the carrier is confined and ready")
            note = clean(packet.data.decode(errors="replace"), 500)
            self.confined = note or "confined: no file of this party, one port"
            if note:
                log.warning("a lower level of confinement: %s", note)
        elif packet.name not in self.kit.study.parties or packet.name == self.kit.me:
            return
        elif packet.kind in (CONNECTED, GONE):
            self._connection(packet)
        elif packet.kind == TWICE:
            self._note_twice(packet)
        elif packet.run != SERVICE:
            with self._lock:
                running = self.runs.get(packet.run)
            if running is not None:
                running.pipe.post(packet)
            elif packet.kind == REQUEST:
                ended = ENDED if packet.run in self._ended else b""
                pipe.post(Packet(NOBODY, packet.name, packet.ticket, packet.run, ended))
        elif packet.kind == REQUEST:
            if packet.data == PING:
                pipe.post(Packet(ANSWER, packet.name, packet.ticket, SERVICE, HERE))
            elif packet.data[:1] == INVITE and packet.name == self.kit.study.coordinator:
                self._knock(pipe, packet)
        elif packet.kind in (ANSWER, NOBODY, ABSENT) and self._asker is not None:
            self._asker.settle(packet)

    def _connection(self, packet: Packet) -> None:
        hub = self.kit.role == "coordinator"
        if packet.kind == CONNECTED:
            address = clean(packet.data.decode(errors="replace"), 60)
            self.connected[packet.name] = address
            at = f", {'from' if hub else 'at'} {address}" if address else ""
            log.info(f"{packet.name} is connected{at}" if hub else f"connected to the coordinator{at}")
        elif packet.name in self.connected:
            del self.connected[packet.name]
            log.info(f"{packet.name} is no longer connected" if hub else "the connection to the coordinator ended")

    def _note_twice(self, packet: Packet) -> None:
        """Two services connect in one party's name: its kit was copied, or somebody else has it."""
        where, now = clean(packet.data.decode(errors="replace"), 130), time.time()
        before, _ = self.twice.get(packet.name, (0.0, ""))
        self.twice[packet.name] = now, where
        if now - before > 60.0:
            log.warning(TWICE_TEXT, packet.name, where)
            self.notify("twice", TWICE_TEXT % (packet.name, where))

    def _log_line(self, data: bytes) -> None:
        since, lines = self._lines
        self._lines = (since, lines + 1) if time.monotonic() - since < 60.0 else (time.monotonic(), 1)
        if self._lines[1] <= LINES:
            log.info("carrier: %s", clean(data.decode(errors="replace")))

    # -- runs ------------------------------------------------------------------------------------------------------

    def begin(self, run: bytes, *, anew: bool = False) -> Running:
        """Start a run's process; `anew` if it is to begin with the study's first step."""
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "cloister.deploy.run", str(self.kit.path), run.hex(), str(theirs.fileno())]
        with theirs:
            note_begun(self.kit, run.hex())
            process = subprocess.Popen(
                [*command, *(["anew"] if anew else [])], pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
            )
        running = Running(run, process, Pipe(ours))
        with self._lock:
            self.runs[run] = running
        threading.Thread(target=self._from_run, args=(running,), name=f"run-{run.hex()[:8]}", daemon=True).start()
        return running

    def _from_run(self, running: Running) -> None:
        """Pass on what a run's process sends, until it ends."""
        try:
            while True:
                packet = running.pipe.read()
                carrier = self._carrier
                if packet.kind == OUTCOME:
                    with contextlib.suppress(ValueError, TypeError):
                        running.ended = self.last = Ended(**json.loads(packet.data))
                if packet.kind not in (REQUEST, ANSWER):
                    continue
                if carrier is not None:
                    carrier[1].post(Packet(packet.kind, packet.name, packet.ticket, running.run, packet.data))
                elif packet.kind == REQUEST:
                    running.pipe.post(Packet(ABSENT, packet.name, packet.ticket, running.run))
        except BrokenPipe:
            pass
        try:
            running.process.wait(10.0)
        except subprocess.TimeoutExpired:
            running.process.kill()
            running.process.wait()
        if running.ended is not None:
            self._unsaved[running.run.hex()] = running.ended
        keep_late(self.kit, self._unsaved)
        recover(self.kit, running.run.hex())
        if (ended := running.ended) is None or ended.status != "done":
            why = "its process ended" if ended is None else str(ended.error.get("text", ended.status))
            self.notify("failed", f"run {running.run.hex()[:8]}: {why}")
        with self._lock:
            self.runs.pop(running.run, None)
            self._ended.append(running.run)
        running.pipe.close()
        running.over.set()

    def _tell_runs(self, why: str) -> None:
        with self._lock:
            runs = [*self.runs.values()]
        for running in runs:
            running.pipe.post(Packet(STOP, "lost", data=why.encode()))

    # -- invitations -----------------------------------------------------------------------------------------------

    def _knock(self, pipe: Pipe, packet: Packet) -> None:
        if self._at_door.acquire(blocking=False):  # or else it is dropped, and comes again
            self._doors.submit(self._at_the_door, pipe, packet)

    def _at_the_door(self, pipe: Pipe, packet: Packet) -> None:
        """Answer an invitation: come, or say why not."""
        try:
            kit = Kit.open(self.kit.path)
            run, word = self._consider(kit, packet.data[1:])
            answer = say_word(kit.identity, run, kit.me, word)
            pipe.post(Packet(ANSWER, packet.name, packet.ticket, SERVICE, answer))
        except CloisterError as e:
            log.error("an invitation could not be considered: %s", e)
        finally:
            self._at_door.release()

    def _consider(self, kit: Kit, data: bytes) -> tuple[bytes, str]:
        now, run = time.time(), data[:16]
        try:
            if kit.role == "coordinator":
                raise ProtocolAbort("invitation", "I1", "unexpected", "a coordinator is not invited")
            invitation = Invitation.check(data, kit, now)
            if run in self.runs:  # its answer was lost
                return run, COME
            Seen(kit.path / "local" / "invitations.json").admit(run, now)
        except ProtocolAbort as e:
            log.warning("an invitation was refused: %s", e)
            if e.code == "stale" and self._stale.get(run) is None:  # the coordinator signed it: its people wait for it
                self._stale[run] = self._keep_refusal(kit, run, e)
                while len(self._stale) > REMEMBERED:
                    del self._stale[next(iter(self._stale))]
            return run, f"refused {e.protocol} {e.line} {e.code}"
        except OSError as e:
            full = DiskError(f"{kit.path} cannot be written ({e.strerror or type(e).__name__})")
            return run, self._keep_refusal(kit, run, full).word
        try:
            if invitation.study != kit.study.digest:
                raise ProtocolAbort(
                    "channel",
                    "H2",
                    "mismatch",
                    f"{kit.study.coordinator} came with another study file than {kit.me}; nothing was sent",
                )
            policy = kit.policy()
            kit.check_approved(policy)
            if not is_paid(kit):
                kit.check_limits(policy)
            if len(self.runs) >= RUNS_AT_ONCE:
                raise Refusal(f"{len(self.runs)} runs are going on at '{kit.me}'")
            if self.ending.is_set():
                raise Refusal(f"the service of '{kit.me}' stops")
        except CloisterError as e:
            return run, self._keep_refusal(kit, run, e).word
        self.begin(run)
        return run, COME

    def _keep_refusal(self, kit: Kit, run: bytes, e: CloisterError) -> Ended:
        ended = failed(kit, run.hex(), e, results_folder(kit, run.hex()))
        self.last = ended
        ended.keep()
        with contextlib.suppress(OSError):
            forget_refusals(Path(ended.folder).parent)
        log.warning("run %s: %s; next: %s", run.hex()[:8], e, ended.error["next"])
        return ended

    def ask(self, to: Party, request: bytes, seconds: float) -> bytes | None:
        """Ask another party's service; None if it is not reached."""
        asker = self._asker
        if asker is None or self._carrier is None:
            return None
        try:
            packet = asker.ask(to, request, seconds)
        except TimeoutError:
            return None
        return packet.data if packet.kind == ANSWER else None


def _way_out(kit: Kit, proxy: Proxy | None) -> list[tuple[str, int]]:
    """The addresses that the carrier connects to: the coordinator's, or those of the proxy on the way to it."""
    if proxy is not None:
        return find_addresses(proxy.host, proxy.port)
    return find_addresses(str(kit.study.network["host"]), int(kit.study.network["port"]))


def forget_refusals(results: Path, most: int = REFUSALS) -> None:
    """Keep the latest runs that did not begin: a coordinator that asks for ever must not fill the disk."""
    refused = [f for f in results.iterdir() if f.is_dir() and [x.name for x in f.iterdir()] == ["outcome.json"]]
    for folder in sorted(refused)[: max(0, len(refused) - most)]:  # their names begin with the time
        (folder / "outcome.json").unlink()
        folder.rmdir()
