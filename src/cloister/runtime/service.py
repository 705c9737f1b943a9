"""A party's service, and a coordinator's order to run.

`start_party` is FLARE's process of one party, in the foreground: it connects to the coordinator and waits for runs.
`run_study` is what the coordinator calls, beside its own service, to have one run done; it returns how that ended, or
raises the named error that ended it.

Both leave FLARE's settings to `cloister.runtime.settings`, which writes them anew before every start.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import io
import logging
import os
import signal
import socket
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, NoReturn

from cloister.errors import MissingExtra, ParameterError, PeerLost, UsageError
from cloister.runtime.kit import RUNS, STOPPING, TASK, Kit
from cloister.runtime.party import Ended
from cloister.runtime.provision import ORGANISATION, USER
from cloister.runtime.settings import BEAT, GUEST, HUB, settle, tidy, write

CONNECT, SCHEDULE = 60.0, 120.0  # seconds that `run_study` waits for answers, and for FLARE to start the job


class _Stop(Exception):
    """SIGTERM or Ctrl-C."""


# ---- a party ---------------------------------------------------------------------------------------------------------


def start_party(kit_dir: str | Path) -> NoReturn:
    """Run a party's service until SIGTERM or Ctrl-C; must be called in the main thread, and ends the process."""
    kit = Kit.open(kit_dir)
    kit.policy()
    _check_certificate(kit)
    client, server, monitor = _flare_mains()
    os.umask(0o077)  # logs, results and what FLARE writes are for their owner
    with _only_one(kit):
        (kit.path / STOPPING).unlink(missing_ok=True)
        settle(kit)
        tidy(kit.path)
        os.environ["NVFLARE_SECURE_LOGGING"] = "true"
        hub = kit.role == "coordinator"
        options = ["secure_train=true", f"org={ORGANISATION}", "config_folder=config"]
        args = Namespace(workspace=str(kit.path), set=options, local_rank=0)
        if hub:
            _check_port(kit)
            args.fed_server, main = "fed_server.json", server
        else:
            args.fed_client, main = "fed_client.json", client
            args.set = [f"uid={kit.me}", f"heart_beat_interval={BEAT}", *options]
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _on_signal)
        network = f"{kit.study.network.get('host')}:{kit.study.network.get('port')}"
        say(f"{kit.me} ({kit.role}) {'listens at' if hub else 'connects to'} {network}; Ctrl-C stops it")
        say(f"log: {kit.path / 'log.txt'}")

        def run() -> int:
            try:
                main(args)
            except _Stop:
                say(f"{kit.me} stops")
                _end_runs(kit)
            except Exception as e:
                say(f"{kit.me}: FLARE gave up ({type(e).__name__}); the coordinator may not know it. See the log.")
                return PeerLost.exit_code
            return 0

        code = monitor.run(main_func=run, run_dir=str(kit.path), shutdown_grace_time=0, cleanup_grace_time=5)
        os._exit(code or 0)  # FLARE leaves threads behind that would keep the process


def _flare_mains() -> tuple[Callable[..., Any], Callable[..., Any], Any]:
    try:
        from nvflare.fuel.f3.mpm import MainProcessMonitor
        from nvflare.private.fed.app.client.client_train import main as client
        from nvflare.private.fed.app.server.server_train import main as server
    except ImportError:
        raise MissingExtra("nvflare", "flare") from None
    return client, server, MainProcessMonitor


def _on_signal(*_: object) -> NoReturn:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    raise _Stop


def _end_runs(kit: Kit) -> None:
    """Have the processes of runs tell the others and end; then make sure."""
    import psutil  # comes with nvflare

    (kit.path / STOPPING).touch()
    _, alive = psutil.wait_procs(psutil.Process().children(recursive=True), timeout=8.0)
    for process in alive:
        with contextlib.suppress(psutil.Error):
            process.kill()


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def _only_one(kit: Kit, tries: int = 10) -> Iterator[None]:
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


def _check_certificate(kit: Kit) -> None:
    """Raise if the certificate in the kit cannot be accepted by anyone: the others only say that a handshake failed."""
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature

    folder = kit.path / "startup"
    file = folder / ("server.crt" if kit.role == "coordinator" else "client.crt")
    try:
        mine, root = (x509.load_pem_x509_certificate(f.read_bytes()) for f in (file, folder / "rootCA.pem"))
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


def is_running(kit: Kit) -> bool:
    """Whether a service was started from this kit and has not ended."""
    try:
        with _only_one(kit, tries=1):
            return False
    except UsageError:
        return True


def _check_port(kit: Kit) -> None:
    port = kit.study.network["port"]
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as e:
            raise UsageError(f"port {port} cannot be opened ({e.strerror}); is another coordinator running?") from None


# ---- a run -----------------------------------------------------------------------------------------------------------


def run_study(
    kit_dir: str | Path, *, limit: float | None = None, on_status: Callable[[str], None] | None = None
) -> Ended:
    """Have the study in a coordinator's kit run once, by all parties; the coordinator's service must be running.

    Parameters
    ----------
    limit
        Seconds after which the run is stopped, whatever its state; by default the study's `patience`.
    on_status
        Gets a line of text when something changes.

    Returns
    -------
    How it ended at the coordinator, with one word for each other party in `parties`. Raises the `ProtocolAbort`,
    `PeerLost` or other error by which it ended otherwise.
    """
    kit = Kit.open(kit_dir)
    if kit.role != "coordinator":
        raise UsageError(f"{kit.me} is a {kit.role}; the coordinator {kit.study.coordinator} starts runs")
    tell = on_status or (lambda _: None)
    end = time.monotonic() + (limit or kit.study.patience)
    with _session(kit) as session:
        _wait_for_parties(kit, session, tell)
        with tempfile.TemporaryDirectory(prefix="cloister-") as work:
            job = _write_job(Path(work), kit)
            try:
                run = session.submit_job(str(job))
            except Exception as e:
                raise _silent(kit, e) from None
        tell(f"run {run[:8]} submitted")
        try:
            ended = _follow(kit, session, run, end, tell)
        except BaseException:
            with contextlib.suppress(Exception):
                session.abort_job(run)
            raise
    ended.check()
    return ended


@contextlib.contextmanager
def _session(kit: Kit) -> Iterator[Any]:
    try:
        from nvflare.fuel.flare_api.flare_api import new_secure_session
    except ImportError:
        raise MissingExtra("nvflare", "flare") from None
    logging.getLogger("nvflare").addHandler(logging.NullHandler())
    end = time.monotonic() + CONNECT
    while True:
        try:
            with _quiet():
                session = new_secure_session(USER, str(kit.path / "admin"), timeout=10.0)
            break
        except Exception as e:  # no connection, or a login that took too long
            if not is_running(kit) or time.monotonic() > end:
                raise _silent(kit, e) from None
            time.sleep(0.5)
    try:
        yield session
    finally:
        with contextlib.suppress(Exception), _quiet():
            session.close()


def _silent(kit: Kit, e: Exception) -> PeerLost:
    why = f"the coordinator's service does not answer ({type(e).__name__}); start it: cloister site {kit.path}"
    return PeerLost("flare", "-", "lost", why)


def _quiet() -> contextlib.AbstractContextManager[IO[str]]:
    return contextlib.redirect_stdout(io.StringIO())  # FLARE prints what it does


def _wait_for_parties(kit: Kit, session: Any, tell: Callable[[str], None]) -> None:
    wanted = set(kit.study.parties) - {kit.me}
    end, told = time.monotonic() + CONNECT, ""
    while True:
        missing = sorted(wanted - _answering(session))
        if not missing:
            return
        names = ", ".join(missing)
        if time.monotonic() > end:
            raise PeerLost("flare", "-", "lost", f"not connected: {names}; ask them to run: cloister site KIT")
        if names != told:
            tell(f"waiting for {names}")
            told = names
        time.sleep(1.0)


def _answering(session: Any) -> set[str]:
    """Who answers now; the server's own list still has parties that died less than half a minute ago."""
    try:
        rows = session.get_client_job_status() or []
    except Exception:  # nobody is connected
        return set()
    return {row["client_name"] for row in rows if row.get("status") not in ("no_reply", "error")}


def _write_job(folder: Path, kit: Kit) -> Path:
    """FLARE's job: names of our classes and of the parties, nothing else."""
    job = folder / "cloister"
    config = job / "app" / "config"
    config.mkdir(parents=True)
    common = {"format_version": 2, "task_data_filters": [], "task_result_filters": [], "components": []}
    guests = [p for p in kit.study.parties if p != kit.me]
    write(
        job / "meta.json",
        {"name": "cloister", "resource_spec": {}, "min_clients": 1, "deploy_map": {"app": ["server", *guests]}},
    )
    write(
        config / "config_fed_server.json",
        {**common, "server": {"task_request_interval": 1}, "workflows": [{"id": "hub", "path": HUB, "args": {}}]},
    )
    write(
        config / "config_fed_client.json",
        {**common, "executors": [{"tasks": [TASK], "executor": {"path": GUEST, "args": {}}}]},
    )
    return job


def _follow(kit: Kit, session: Any, run: str, end: float, tell: Callable[[str], None]) -> Ended:
    file, told = kit.path / RUNS / f"{run}.json", "SUBMITTED"
    heard = time.monotonic()
    starts = heard + SCHEDULE
    while True:
        if file.exists():
            return Ended.load(file)
        try:
            status = str(session.get_job_meta(run).get("status", ""))
            heard = time.monotonic()
        except Exception as e:  # whatever FLARE makes of a server that is away
            if not is_running(kit) or time.monotonic() - heard > CONNECT:
                raise _silent(kit, e) from None
            status = told
        if status != told:
            tell(f"run {run[:8]} {status.lower()}")
            told = status
        if status.startswith("FINISHED"):
            time.sleep(0.5)
            if file.exists():
                continue
            raise PeerLost("flare", "-", "lost", f"FLARE ended the run ({status}); see {kit.path / 'log.txt'}")
        if status == "RUNNING":
            starts = end
        if time.monotonic() > min(end, starts):
            raise PeerLost("flare", "-", "timeout", f"the run did not {'end' if starts == end else 'start'} in time")
        time.sleep(0.5)


__all__ = ["run_study", "start_party"]
