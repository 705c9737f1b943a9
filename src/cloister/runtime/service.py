"""A party's service: holds the kit, starts the carrier and the processes of runs, and passes packets between them.

            cloister run ── Unix socket ──┐                     (coordinator only)
    run's process ── pipe ── service ── pipe ── carrier ── TLS ── the coordinator's carrier
    keys, cells, protocol    kit, policy        FLARE, confined

A run begins with the coordinator's signed invitation (`cloister.runtime.invitation`), and only if this party's own
policy allows it. Nothing else that comes from the network makes the service do anything but pass it on or drop it. A
carrier that ends, or says what is no packet, is replaced; runs that it carried end by name.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from cloister.crypto.entropy import Entropy
from cloister.errors import CloisterError, MissingExtra, ParameterError, PeerLost, ProtocolAbort, UsageError
from cloister.runtime import sandbox
from cloister.runtime.invitation import COME, Invitation, Seen, read_word, say_word
from cloister.runtime.kit import RUNS, Kit, Refusal
from cloister.runtime.logs import clean, log_to, rotate
from cloister.runtime.party import Ended, failed, lost, results_folder
from cloister.runtime.pipe import (
    ABSENT,
    ADDRESSES,
    ANSWER,
    CONNECTED,
    GONE,
    HEARD,
    LOG,
    NOBODY,
    PLAN,
    READY,
    REQUEST,
    SERVICE,
    STOP,
    Asker,
    BrokenPipe,
    Packet,
    Pipe,
)
from cloister.study import Party

PROGRAM = "cloister.runtime.carrier"  # what runs in the sandbox
PING, INVITE = b"P", b"I"  # what services ask each other
HERE = b"+"
CONNECT = 60.0  # seconds that a run waits for parties that are not connected
RUNS_AT_ONCE = 4
LINES = 100  # lines of a carrier that are logged in a minute
RESTART, RESTART_MOST = 1.0, 30.0  # seconds before a carrier that ended is replaced
RESOLVE = 60.0  # seconds after which a coordinator that is not reached is looked up again

log = logging.getLogger("cloister.runtime")


class _Stop(Exception):
    """SIGTERM or Ctrl-C."""


# ---- starting --------------------------------------------------------------------------------------------------------


def start_party(kit_dir: str | Path) -> NoReturn:
    """Run a party's service until SIGTERM or Ctrl-C; must be called in the main thread, and ends the process."""
    from cloister.runtime.order import take_orders

    kit = Kit.open(kit_dir)
    check_ready(kit)
    os.umask(0o077)  # logs and results are for their owner
    with only_one(kit):
        hub = kit.role == "coordinator"
        if hub:
            _check_port(kit)
        rotate(kit.path / "service.out")
        log_to(kit.path)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _on_signal)
        service = Service(kit)
        orders = take_orders(service) if hub else contextlib.nullcontext()
        network = f"{kit.study.network.get('host')}:{kit.study.network.get('port')}"
        say(f"{kit.me} ({kit.role}) {'listens at' if hub else 'connects to'} {network}; Ctrl-C stops it")
        say(f"log: {kit.path / 'log.txt'}")
        try:
            with orders:
                service.start()
                while True:
                    signal.pause()
        except _Stop:
            say(f"{kit.me} stops")
            service.stop()
    os._exit(0)


def check_ready(kit: Kit) -> None:
    """Raise unless a service can be started from this kit on this machine."""
    import importlib.util

    policy = kit.policy()
    check_certificate(kit)
    if not kit.study.network.get("host") or not kit.study.network.get("port"):
        raise ParameterError("study.toml: [network] must name host and port of the coordinator")
    if importlib.util.find_spec("nvflare") is None:
        raise MissingExtra("nvflare", "flare")
    if policy.sandbox == "landlock":
        if reason := sandbox.why_not():
            raise UsageError(
                f"{reason}, so FLARE cannot be kept away from this party's keys and cells. With the unit file of"
                ' docs/deploy.md, systemd does it: then write sandbox = "systemd" in local/site.toml'
            )
        for path in (kit.path, policy.out, *([policy.data] if policy.data else [])):
            if place := next((p for p in sandbox.readable_code() if path.resolve().is_relative_to(p.resolve())), None):
                raise ParameterError(f"{path} lies in {place}, which the carrier may read; move it elsewhere")


def _on_signal(*_: object) -> NoReturn:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    raise _Stop


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def only_one(kit: Kit, tries: int = 10) -> Iterator[None]:
    """Hold the kit's lock; `is_running` may have it for a moment, hence the tries."""
    with open(kit.path / "running.lock", "w") as file:
        for left in reversed(range(tries)):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if not left:
                    raise UsageError(f"{kit.me} is running already from {kit.path}; stop that process first") from None
                time.sleep(0.1)
        yield


def is_running(kit: Kit) -> bool:
    """Whether a service was started from this kit and has not ended."""
    try:
        with only_one(kit, tries=1):
            return False
    except UsageError:
        return True


def tls_files(kit: Kit) -> dict[str, str]:
    folder, name = kit.path / "startup", "server" if kit.role == "coordinator" else "client"
    files = {"authority": "rootCA.pem", "certificate": f"{name}.crt", "key": f"{name}.key"}
    return {what: str(folder / file) for what, file in files.items()}


def check_certificate(kit: Kit) -> None:
    """Raise if the certificate in the kit cannot be accepted by anyone: the others only say that a handshake failed."""
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature

    files = tls_files(kit)
    file = Path(files["certificate"])
    try:
        mine, root = (x509.load_pem_x509_certificate(Path(f).read_bytes()) for f in (file, files["authority"]))
        mine.verify_directly_issued_by(root)
    except FileNotFoundError as e:
        raise ParameterError(f"{e.filename} is missing; ask for a new kit") from None
    except (ValueError, TypeError, InvalidSignature):
        raise ParameterError(f"{file} was not issued by the authority in rootCA.pem; ask for a new kit") from None
    names = [a.value for a in mine.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)]
    due = str(kit.study.network.get("host"))[:64] if kit.role == "coordinator" else kit.me
    if names != [due]:
        raise ParameterError(f"{file} was issued to {', '.join(map(str, names))}, and this is the kit of {due}")
    if mine.not_valid_after_utc < datetime.datetime.now(datetime.UTC):
        raise ParameterError(f"{file} ended on {mine.not_valid_after_utc:%Y-%m-%d}; ask for a new kit")


def _check_port(kit: Kit) -> None:
    port = kit.study.network["port"]
    try:
        sandbox.open_listener(str(kit.study.network["host"]), port).close()
    except OSError as e:
        raise UsageError(f"port {port} cannot be opened ({e.strerror}); is another coordinator running?") from None


# ---- the service -----------------------------------------------------------------------------------------------------


@dataclass
class Running:
    """A run's process, and this end of its pipe."""

    run: bytes
    process: subprocess.Popen[bytes]
    pipe: Pipe
    over: threading.Event = field(default_factory=threading.Event)


class Service:
    """What a party does while it waits for runs, and during them."""

    def __init__(self, kit: Kit) -> None:
        self.kit = kit
        self.connected: set[str] = set()
        self._carrier: tuple[subprocess.Popen[bytes], Pipe] | None = None
        self._asker: Asker | None = None
        self._runs: dict[bytes, Running] = {}
        self._lock, self._ending = threading.Lock(), threading.Event()
        self._doors = ThreadPoolExecutor(2, "door")  # invitations are looked at here, a few at a time
        self._at_door = threading.BoundedSemaphore(8)
        self._lines = (0.0, 0)

    def start(self) -> None:
        threading.Thread(target=self._keep_carrier, name="carrier", daemon=True).start()

    def stop(self) -> None:
        """Have the processes of runs tell the others and end; then make sure."""
        self._ending.set()
        with self._lock:
            runs = [*self._runs.values()]
        for running in runs:
            running.pipe.post(Packet(STOP, data=b"this party's service was stopped"))
        end = time.monotonic() + 8.0
        for running in runs:
            if not running.over.wait(max(0.0, end - time.monotonic())):
                running.process.kill()
        if self._carrier is not None:
            process, pipe = self._carrier
            pipe.close()
            try:
                process.wait(2.0)
            except subprocess.TimeoutExpired:
                process.kill()

    # -- the carrier -----------------------------------------------------------------------------------------------

    def _keep_carrier(self) -> None:
        pause = RESTART
        while not self._ending.is_set():
            began = time.monotonic()
            try:
                self._carry()
            except (OSError, CloisterError) as e:
                log.error("the carrier could not be started: %s", e)
            if self._ending.is_set():
                return
            self._tell_runs("this party's carrier ended")
            pause = RESTART if time.monotonic() - began > 60.0 else min(2 * pause, RESTART_MOST)
            log.error("the carrier ended; a new one starts in %g s", pause)
            self._ending.wait(pause)

    def _carry(self) -> None:
        """One carrier's life."""
        kit = Kit.open(self.kit.path)  # parties may have joined
        ours, theirs = socket.socketpair()
        with theirs:
            process = _spawn_carrier(theirs)
        pipe = Pipe(ours)
        pipe.post(Packet(PLAN, data=json.dumps(self._plan(kit)).encode()))
        with self._lock:
            self._carrier, self._asker = (process, pipe), Asker(pipe, SERVICE)
        if kit.role != "coordinator":
            threading.Thread(target=self._keep_address, args=(pipe,), name="address", daemon=True).start()
        try:
            while True:
                self._from_carrier(pipe, pipe.read())
        except BrokenPipe as e:
            if not self._ending.is_set():
                log.error("the carrier's pipe broke: %s", e)
        finally:
            with self._lock:
                self._carrier = None
            self.connected.clear()
            pipe.close()
            if not self._ending.is_set():
                process.kill()
                process.wait()

    def _plan(self, kit: Kit) -> dict[str, Any]:
        host, port = str(kit.study.network["host"]), int(kit.study.network["port"])
        hub = kit.role == "coordinator"
        return {
            "me": kit.me,
            "hub": kit.study.coordinator,
            "parties": [*kit.study.parties],
            "host": host,
            "port": port,
            "listen": hub,
            "addresses": [] if hub else _addresses(host, port),
            "tls": tls_files(kit),
            "sandbox": kit.policy().sandbox,
        }

    def _keep_address(self, pipe: Pipe) -> None:
        """While the coordinator is not reached, look its name up again: the carrier cannot."""
        host, port = str(self.kit.study.network["host"]), int(self.kit.study.network["port"])
        while not self._ending.wait(RESOLVE):
            found = [] if self.connected else _addresses(host, port)
            if found and not pipe.post(Packet(ADDRESSES, data=json.dumps(found).encode())):
                return  # another carrier has its own

    def _from_carrier(self, pipe: Pipe, packet: Packet) -> None:
        if packet.kind == LOG:
            self._log_line(packet.data)
        elif packet.kind == READY:
            log.info("the carrier is confined and ready" if self.confined else "the carrier is ready")
        elif packet.name not in self.kit.study.parties or packet.name == self.kit.me:
            return
        elif packet.kind in (CONNECTED, GONE):
            self._connection(packet)
        elif packet.run != SERVICE:
            with self._lock:
                running = self._runs.get(packet.run)
            if running is not None:
                running.pipe.post(packet)
            elif packet.kind == REQUEST:
                pipe.post(Packet(NOBODY, packet.name, packet.ticket, packet.run))
        elif packet.kind == REQUEST:
            if packet.data == PING:
                pipe.post(Packet(ANSWER, packet.name, packet.ticket, SERVICE, HERE))
            elif packet.data[:1] == INVITE and packet.name == self.kit.study.coordinator:
                self._knock(pipe, packet)
        elif packet.kind in (ANSWER, NOBODY, ABSENT) and self._asker is not None:
            self._asker.settle(packet)

    @property
    def confined(self) -> bool:
        return self.kit.policy().sandbox == "landlock"

    def _connection(self, packet: Packet) -> None:
        hub = self.kit.role == "coordinator"
        if packet.kind == CONNECTED:
            self.connected.add(packet.name)
            log.info(f"{packet.name} is connected" if hub else "connected to the coordinator")
        elif packet.name in self.connected:
            self.connected.discard(packet.name)
            log.info(f"{packet.name} is no longer connected" if hub else "the connection to the coordinator ended")

    def _log_line(self, data: bytes) -> None:
        since, lines = self._lines
        self._lines = (since, lines + 1) if time.monotonic() - since < 60.0 else (time.monotonic(), 1)
        if self._lines[1] <= LINES:
            log.info("carrier: %s", clean(data.decode(errors="replace")))

    # -- runs ------------------------------------------------------------------------------------------------------

    def begin(self, run: bytes) -> Running:
        """Start a run's process."""
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "cloister.runtime.run", str(self.kit.path), run.hex()]
        with theirs:
            process = subprocess.Popen(
                [*command, str(theirs.fileno())], pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
            )
        running = Running(run, process, Pipe(ours))
        with self._lock:
            self._runs[run] = running
        threading.Thread(target=self._from_run, args=(running,), name=f"run-{run.hex()[:8]}", daemon=True).start()
        return running

    def _from_run(self, running: Running) -> None:
        """Pass on what a run's process sends, until it ends."""
        try:
            while True:
                packet = running.pipe.read()
                carrier = self._carrier
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
        with self._lock:
            self._runs.pop(running.run, None)
        running.pipe.close()
        running.over.set()

    def _tell_runs(self, why: str) -> None:
        with self._lock:
            runs = [*self._runs.values()]
        for running in runs:
            running.pipe.post(Packet(STOP, data=why.encode()))

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
            if run in self._runs:  # its answer was lost
                return run, COME
            Seen(kit.path / "local" / "invitations.json").admit(run, now)
        except ProtocolAbort as e:
            log.warning("an invitation was refused: %s", e)
            return run, f"refused {e.protocol} {e.line} {e.code}"
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
            kit.check_limits(policy)
            if len(self._runs) >= RUNS_AT_ONCE:
                raise Refusal(f"{len(self._runs)} runs are going on at '{kit.me}'")
            if self._ending.is_set():
                raise Refusal(f"the service of '{kit.me}' stops")
        except CloisterError as e:
            ended = failed(kit, run.hex(), e, results_folder(kit, run.hex()))
            ended.keep()
            log.warning("run %s: %s", run.hex()[:8], e)
            return run, ended.word
        self.begin(run)
        return run, COME

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

    # -- the coordinator's runs ------------------------------------------------------------------------------------

    def order(self, tell: Callable[[str], None], gone: Callable[[], bool]) -> Ended:
        """Have the study in the kit run once by all parties; stops it when `gone`. Raises if it cannot begin."""
        kit = Kit.open(self.kit.path)
        guests = [p for p in kit.study.parties if p != kit.me]
        self._wait_for(guests, tell, gone)
        if len(self._runs) >= RUNS_AT_ONCE:
            raise UsageError(f"{len(self._runs)} runs are going on already; wait for one to end")
        run = Entropy().bytes(16)
        running = self.begin(run)
        tell(f"run {run.hex()[:8]} submitted")
        with ThreadPoolExecutor(len(guests)) as pool:
            words = dict(zip(guests, pool.map(lambda p: self._invite(kit, running, p), guests), strict=True))
        for party, word in words.items():
            if word != COME:
                running.pipe.post(Packet(HEARD, party, run=run, data=word.encode()))
        if all(word == COME for word in words.values()):
            tell(f"run {run.hex()[:8]} running")
        while not running.over.wait(0.2):
            if gone():
                running.pipe.post(Packet(STOP, data=b"the run was stopped"))
                running.over.wait(30.0)
                break
        file = kit.path / RUNS / f"{run.hex()}.json"
        try:
            return Ended.load(file)
        except OSError:
            return lost(kit.me, run.hex(), f"the run's process at {kit.me} ended; see {kit.path / 'log.txt'}")
        finally:
            file.unlink(missing_ok=True)

    def _wait_for(self, guests: list[Party], tell: Callable[[str], None], gone: Callable[[], bool]) -> None:
        end, told = time.monotonic() + CONNECT, ""
        while True:
            with ThreadPoolExecutor(len(guests)) as pool:
                here = dict(zip(guests, pool.map(lambda p: self.ask(p, PING, 3.0) == HERE, guests), strict=True))
            names = ", ".join(sorted(p for p in guests if not here[p]))
            if not names:
                return
            if time.monotonic() > end:
                raise PeerLost("flare", "-", "lost", f"not connected: {names}; ask them to run: cloister site KIT")
            if gone() or self._ending.is_set():
                raise PeerLost("flare", "-", "lost", "the run was stopped")
            if names != told:
                tell(f"waiting for {names}")
                told = names
            time.sleep(0.5)

    def _invite(self, kit: Kit, running: Running, party: Party) -> str:
        """The party's word; an answer that is lost, or is not the party's own, is asked for again."""
        request = INVITE + Invitation(running.run, kit.study.digest, party, int(time.time())).sign(kit.identity)
        end = time.monotonic() + CONNECT / 2
        while time.monotonic() < end and not running.over.is_set():
            if answer := self.ask(party, request, 5.0):
                with contextlib.suppress(ProtocolAbort):
                    return read_word(kit.study.keys[party], running.run, party, answer)
            time.sleep(0.3)
        return "aborted invitation I2 lost"


def _addresses(host: str, port: int) -> list[tuple[str, int]]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return list(dict.fromkeys((str(sockaddr[0]), port) for *_, sockaddr in found))


def _spawn_carrier(end: socket.socket) -> subprocess.Popen[bytes]:
    """A Python that takes nothing from its surroundings: no environment, no folder, no descriptor but one."""
    root = str(Path(__file__).resolve().parents[2])
    code = "import sys; sys.path.append(sys.argv.pop(1)); from cloister.runtime.sandbox import main; main()"
    return subprocess.Popen(
        [sys.executable, "-I", "-B", "-c", code, root, PROGRAM, str(end.fileno())],
        pass_fds=[end.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={},
        cwd="/",
    )


__all__ = ["Service", "start_party"]
