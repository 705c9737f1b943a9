"""How a carrier comes to its service: started here and confined by itself, or started and confined by systemd."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

from cloister.deploy.kit import Kit
from cloister.errors import ParameterError

PROGRAM = "cloister.deploy.carrier"  # what runs in the sandbox
RUNTIME = "RUNTIME_DIRECTORY"  # systemd's name for the folder that a unit's processes meet in


def open_carrier(kit: Kit, ending: threading.Event) -> tuple[subprocess.Popen[bytes] | None, socket.socket]:
    """Start a carrier, or wait for the one that systemd starts; returns our end of its pipe."""
    policy = kit.policy()
    if policy.sandbox != "systemd" and policy.carrier is None:
        ours, theirs = socket.socketpair()
        with theirs:
            return spawn_carrier(theirs), ours
    with carrier_socket(policy.carrier) as server:
        while not ending.is_set():
            with contextlib.suppress(TimeoutError):
                return None, server.accept()[0]
    raise ParameterError("the service stops")


def carrier_socket(path: Path | None = None) -> socket.socket:
    """Where a carrier of another user finds its service: in a folder that only its group enters.

    Without `path`, in the runtime folder of the service's unit.
    """
    if path is None:
        folder = os.environ.get(RUNTIME)
        if not folder:
            raise ParameterError(
                f'sandbox = "systemd", but there is no {RUNTIME}: start the service by the unit files of docs/deploy.md'
            )
        path = Path(folder.partition(":")[0]) / "carrier.sock"
    if not path.parent.is_dir():
        raise ParameterError(f"{path.parent} is no folder; make it, for this user and the carrier's group only")
    if path.parent.stat().st_mode & 0o002:
        raise ParameterError(
            f"every user may write in {path.parent} and could take the carrier's place; run: chmod 750 {path.parent}"
        )
    if path.exists() and not path.is_socket():
        raise ParameterError(f"{path} is no socket; name another place")
    path.unlink(missing_ok=True)
    server = socket.socket(socket.AF_UNIX)
    server.settimeout(1.0)
    umask = os.umask(0o177)
    try:
        server.bind(str(path))
    finally:
        os.umask(umask)
    group = path.parent.stat().st_gid
    try:
        os.chown(path, -1, group)  # a new socket has this process's first group, which the carrier's user is not in
    except PermissionError:
        server.close()
        raise ParameterError(
            f"{path.parent} belongs to group {group}, and this user is not in it, so its carrier cannot connect;"
            " add the user to that group, or SupplementaryGroups= to the unit (docs/deploy.md)"
        ) from None
    path.chmod(0o660)
    server.listen(1)
    return server


def spawn_carrier(end: socket.socket) -> subprocess.Popen[bytes]:
    """A Python that takes nothing from its surroundings: no environment, no folder, no descriptor but one."""
    root = str(Path(__file__).resolve().parents[2])
    code = (
        "import sys; root = sys.argv.pop(1); root in sys.path or sys.path.insert(0, root);"  # the same code as here
        "from cloister.deploy.sandbox import main; main()"
    )
    return subprocess.Popen(
        [sys.executable, "-I", "-B", "-c", code, root, PROGRAM, str(end.fileno())],
        pass_fds=[end.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={},
        cwd="/",
    )


def find_addresses(host: str, port: int) -> list[tuple[str, int]]:
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return list(dict.fromkeys((str(sockaddr[0]), port) for *_, sockaddr in addresses))
