"""Orders: how `cloister run` has the coordinator's running service do a run, and `cloister halt` any service stop.

A Unix socket in the kit, for the service's own user only. The order is one line; lines of JSON come back while it is
carried out, and at the end how it ended. A run goes on when the connection is closed, with a terminal for example, and
`watch_run` looks at it again. `cancel` stops it: as a line on the same connection, or as an order of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cloister import errors, governance
from cloister.deploy.invitation import COME, Invitation, read_word
from cloister.deploy.kit import Kit
from cloister.deploy.logs import last_event
from cloister.deploy.party import Ended, lost
from cloister.deploy.pipe import HEARD, STOP, Packet
from cloister.deploy.ready import is_running
from cloister.deploy.service import HERE, INVITE, PING, RUNS_AT_ONCE, Running, Service
from cloister.deploy.status import Status, of_service, to_json
from cloister.errors import CloisterError, PeerLost, ProtocolAbort, RefusedError, UsageError
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.net.events import Event
from cloister.study import Party

SOCKET = "service.sock"
CANCEL = b"cancel\n"
CONNECT = 60.0  # seconds that a run waits for parties that are not connected
START = 60.0  # seconds until a service that is starting takes orders
ORDERS = 8  # connections at a time
LOOK = 0.3  # seconds between two looks at how far a run is


@contextlib.contextmanager
def _path(home: Path) -> Iterator[str]:
    """The socket's path, short enough for the kernel wherever the kit is."""
    folder = os.open(home, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{SOCKET}"
    finally:
        os.close(folder)


# ---- the service's side ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def take_orders(service: Service) -> Iterator[None]:
    """Take orders in the background."""
    home = service.kit.path
    (home / SOCKET).unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as server:
        umask = os.umask(0o177)
        try:
            with _path(home) as path:
                server.bind(path)
        finally:
            os.umask(umask)
        server.listen(ORDERS)
        threading.Thread(target=_accept, args=(server, service), name="orders", daemon=True).start()
        try:
            yield
        finally:
            (home / SOCKET).unlink(missing_ok=True)


def _accept(server: socket.socket, service: Service) -> None:
    places = threading.BoundedSemaphore(ORDERS)
    while True:
        try:
            client, _ = server.accept()
        except OSError:  # the service stops
            return
        credentials = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        user = struct.unpack("3i", credentials)[1]
        if user not in (os.getuid(), 0) or not places.acquire(blocking=False):
            client.close()
            continue
        threading.Thread(target=_obey, args=(client, service, places.release), daemon=True).start()


def _obey(client: socket.socket, service: Service, done: Callable[[], None]) -> None:
    try:
        with client:
            client.settimeout(10.0)
            order = client.recv(64)
            if order == b"halt\n":
                client.settimeout(60.0)
                client.sendall(json.dumps({"halted": service.halt()}).encode() + b"\n")
                return
            if order == b"status\n":
                client.sendall(json.dumps(to_json(of_service(service))).encode() + b"\n")
                return
            if order == CANCEL:
                client.settimeout(60.0)
                client.sendall(json.dumps({"cancelled": service.cancel()}).encode() + b"\n")
                return
            if order not in (b"run\n", b"run anew\n") or service.kit.role != "coordinator":
                return
            before, attached = service.cancelled, True

            def gone() -> bool:
                nonlocal attached
                if attached and select.select([client], [], [], 0)[0]:
                    try:
                        if client.recv(64) == CANCEL:
                            return True
                    except OSError:
                        pass
                    attached = False  # the run goes on without anybody who looks
                return service.cancelled != before

            def tell(line: str) -> None:
                with contextlib.suppress(OSError):
                    client.sendall(json.dumps({"status": line}).encode() + b"\n")

            try:
                last: dict[str, Any] = {"ended": asdict(conduct_run(service, tell, gone, anew=order == b"run anew\n"))}
            except CloisterError as e:
                last = {"error": errors.to_json(e)}
            with contextlib.suppress(OSError):
                client.settimeout(60.0)
                client.sendall(json.dumps(last).encode() + b"\n")
    except OSError:
        pass
    finally:
        done()


# ---- the run ---------------------------------------------------------------------------------------------------------


def conduct_run(
    service: Service, tell: Callable[[str], None], gone: Callable[[], bool], *, anew: bool = False
) -> Ended:
    """Have the study in the kit run once by all parties; stops it when `gone`. Raises if it cannot begin.

    It continues behind the steps that all have finished, unless it is to begin `anew`.
    """
    kit = Kit.open(service.kit.path)
    if governance.expired(kit.study.governance):
        raise RefusedError(
            f"the study '{kit.study.name}' ended on {kit.study.governance['expires']}; agree on a new one"
        )
    guests = [p for p in kit.study.parties if p != kit.me]
    _wait_for(service, guests, tell, gone)
    if len(service.runs) >= RUNS_AT_ONCE:
        raise UsageError(f"{len(service.runs)} runs are going on already; wait for one to end")
    run = Entropy().bytes(16)
    running = service.begin(run, anew=anew)
    tell(f"run {run.hex()[:8]} submitted")
    with ThreadPoolExecutor(len(guests)) as pool:
        words = dict(zip(guests, pool.map(lambda p: _invite(service, kit, running, p), guests), strict=True))
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
    if running.ended is not None:
        return running.ended
    return lost(kit.me, run.hex(), f"the run's process at {kit.me} ended; see {kit.path / 'log.txt'}")


def _wait_for(service: Service, guests: list[Party], tell: Callable[[str], None], gone: Callable[[], bool]) -> None:
    end, told = time.monotonic() + CONNECT, ""
    while True:
        with ThreadPoolExecutor(len(guests)) as pool:
            here = dict(zip(guests, pool.map(lambda p: service.ask(p, PING, 3.0) == HERE, guests), strict=True))
        names = ", ".join(sorted(p for p in guests if not here[p]))
        if not names:
            return
        if time.monotonic() > end:
            raise PeerLost("flare", "-", "lost", f"not connected: {names}; ask them to run: cloister site KIT")
        if gone() or service.ending.is_set():
            raise PeerLost("flare", "-", "lost", "the run was stopped")
        if names != told:
            tell(f"waiting for {names}")
            told = names
        time.sleep(0.5)


def _invite(service: Service, kit: Kit, running: Running, party: Party) -> str:
    """The party's word; an answer that is lost, or is not the party's own, is asked for again."""
    request = INVITE + Invitation(running.run, kit.study.digest, party, int(time.time())).sign(kit.identity)
    end = time.monotonic() + CONNECT / 2
    while time.monotonic() < end and not running.over.is_set():
        if answer := service.ask(party, request, 5.0):
            with contextlib.suppress(ProtocolAbort):
                return read_word(kit.study.keys[party], running.run, party, answer)
        time.sleep(0.3)
    return "aborted invitation I2 lost"


# ---- the caller's side -----------------------------------------------------------------------------------------------


def run_study(
    kit_dir: str | Path,
    *,
    limit: float | None = None,
    on_status: Callable[[str], None] | None = None,
    on_event: Callable[[Event], None] | None = None,
    anew: bool = False,
) -> Ended:
    """Have the study in a coordinator's kit run once, by all parties; the coordinator's service must be running.

    A study of several steps continues behind the last step that all parties have finished.

    Parameters
    ----------
    limit
        Seconds after which the run is stopped, whatever its state; by default the study's `patience`.
    on_status
        Gets a line of text when something changes.
    on_event
        Hears now and then how far the run is at the coordinator.
    anew
        Begin with the first step, whatever is finished.

    Returns
    -------
    How it ended at the coordinator, with one word for each other party in `parties`. Raises the `ProtocolAbort`,
    `PeerLost` or other error by which it ended otherwise.
    """
    kit = _coordinators(kit_dir)
    end = time.monotonic() + (limit or kit.study.patience)
    with _connect(kit) as server:
        server.sendall(b"run anew\n" if anew else b"run\n")
        try:
            ended = _follow(kit, server, end, on_status or (lambda _: None), on_event)
        except BaseException:  # Ctrl-C, or it took too long; a process that is killed leaves the run to itself
            with contextlib.suppress(OSError):
                server.sendall(CANCEL)
            raise
    if ended.status != "done" and on_status is not None:
        for party, word in ended.parties.items():
            on_status(f"{party}: {word}")
        on_status(f"next: {ended.error['next']}")
    ended.check()
    return ended


def start_run(kit_dir: str | Path, *, on_status: Callable[[str], None] | None = None, anew: bool = False) -> str:
    """Have the study in a coordinator's kit run, and return the run's id when it has begun."""
    kit, begun = _coordinators(kit_dir), list[str]()

    def tell(line: str) -> None:
        if on_status is not None:
            on_status(line)
        if line.endswith("submitted"):
            begun.append(line.split(" ")[1])
            raise _Begun

    with _connect(kit) as server:
        server.sendall(b"run anew\n" if anew else b"run\n")
        with contextlib.suppress(_Begun):
            _follow(kit, server, time.monotonic() + CONNECT + START, tell, None).check()
    return begun[0]


class _Begun(Exception):
    """The run is under way; nobody need look."""


def watch_run(kit_dir: str | Path, *, on_event: Callable[[Event], None] | None = None) -> Ended:
    """Follow the run that is going on at a party until it ends there. Whoever stops looking ends nothing."""
    kit, began = Kit.open(kit_dir), time.time()
    now = status_of(kit)
    if not now.running:
        raise _silent(kit, "it is not running")
    if not now.runs:
        last = f"; the latest ended so: {now.last['text']}" if now.last.get("text") else ""
        raise UsageError(f"no run is going on at {kit.me}{last}")
    run = [*now.runs][-1]
    while run in now.runs:
        if on_event is not None and (event := last_event(kit, began)) is not None:
            on_event(event)
        time.sleep(LOOK)
        now = status_of(kit)
    found = next(kit.policy().out.glob(f"*-{run[:8]}/outcome.json"), None)
    if found is None:
        raise _silent(kit, "it ended with the run; how that ended is written when it starts again")
    ended = Ended.load(found)
    ended.check()
    return ended


def cancel(kit_dir: str | Path) -> int:
    """Stop the runs at a party, for all of their parties; what is approved stays so. Returns how many there were."""
    return int(json.loads(give_order(Kit.open(kit_dir), CANCEL))["cancelled"])


def _coordinators(kit_dir: str | Path) -> Kit:
    kit = Kit.open(kit_dir)
    if kit.role != "coordinator":
        raise UsageError(f"{kit.me} is a {kit.role}; the coordinator {kit.study.coordinator} starts runs")
    return kit


def give_order(kit: Kit, order: bytes) -> bytes:
    """Give the running service of a kit an order that one line answers."""
    with _connect(kit) as server:
        server.settimeout(60.0)
        server.sendall(order)
        answer = b""
        while not answer.endswith(b"\n"):
            try:
                more = server.recv(1 << 12)
            except OSError as e:
                raise _silent(kit, type(e).__name__) from None
            if not more:
                raise _silent(kit, "it ended")
            answer += more
    return answer


def status_of(kit: Kit) -> Status:
    """The status of a kit's service, by its socket; one that is not running is no error."""
    if not is_running(kit):
        return Status()
    try:
        return Status.load(json.loads(give_order(kit, b"status\n")))
    except (CloisterError, ValueError, TypeError):
        return Status()


def _connect(kit: Kit) -> socket.socket:
    end = time.monotonic() + START
    while True:
        server = socket.socket(socket.AF_UNIX)
        try:
            with _path(kit.path) as path:
                server.connect(path)
            return server
        except OSError as e:
            server.close()
            if not is_running(kit) or time.monotonic() > end:
                raise _silent(kit, type(e).__name__) from None
            time.sleep(0.2)


def _silent(kit: Kit, what: str) -> PeerLost:
    whose = "the coordinator's service" if kit.role == "coordinator" else f"the service of '{kit.me}'"
    why = f"{whose} does not answer ({what}); start it: cloister site {kit.path}"
    return PeerLost("flare", "-", "lost", why)


def _follow(
    kit: Kit,
    server: socket.socket,
    end: float,
    tell: Callable[[str], None],
    on_event: Callable[[Event], None] | None,
) -> Ended:
    buffer, started, began = b"", False, time.time()
    while True:
        server.settimeout(max(0.01, min(LOOK, end - time.monotonic())))
        try:
            more = server.recv(1 << 16)
        except TimeoutError:
            if on_event is not None and (event := last_event(kit, began)) is not None:
                on_event(event)
            if time.monotonic() < end:
                continue
            what = "end" if started else "start"
            raise PeerLost("flare", "-", "timeout", f"the run did not {what} in time") from None
        except OSError as e:
            raise _silent(kit, type(e).__name__) from None
        if not more:
            raise _silent(kit, "it ended")
        *lines, buffer = (buffer + more).split(b"\n")
        for line in map(json.loads, lines):
            if "status" in line:
                started = started or line["status"].endswith("running")
                tell(line["status"])
            elif "error" in line:
                raise errors.from_json(line["error"])
            else:
                return Ended(**line["ended"])


__all__ = ["cancel", "give_order", "run_study", "start_run", "status_of", "take_orders", "watch_run"]
