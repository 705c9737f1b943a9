"""Sandbox: a process that gives up what it does not need, before it loads a line of FLARE.

    python -I -B -c "..." PROGRAM FD                        confine this process, then run PROGRAM in it
    python -I -B -m cloister.deploy.sandbox PROGRAM PATH   the same, where a unit of systemd confines it as well

The carrier talks to the network, so it is the process that an attacker may take over. Three layers limit what that
process can do, whatever program it runs:

- *seccomp*: starts no program and no process, opens no file to write, makes no socket but a TCP one, reads no other
  process. At the coordinator it makes no socket at all, because its listener is opened before.
- *Landlock*: reads the interpreter, the installed packages and its three TLS files, and nothing else (ABI 1, Linux
  5.13); connects to one TCP port (ABI 4, Linux 6.7). Later ABIs add nothing that seccomp does not refuse already.
- *User and mount namespaces*, where Landlock is missing: a root folder that contains only those files, read-only.

Besides, `no_new_privs`, no core file, no file grows, and a limit on memory.

Kernels report Landlock ABIs that they do not implement, so `confine` does not compare versions. It applies what the
kernel takes, then tries every forbidden action. The result is a level:

    full       no file but those, and no connection but to the one port
    files      no file but those; a site's carrier may connect to any TCP address
    seccomp    reads whatever the service's user may read, keys and cells included

A site accepts a level in `local/site.toml` (`sandbox`). The service does not start below it. No level limits *which
host* has the port (the unit file in docs/deploy.md does), nor hides that a known path exists.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import importlib
import json
import os
import platform
import resource
import runpy
import socket
import struct
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cloister.deploy.pipe import LOG, PLAN, BrokenPipe, Packet, Pipe
from cloister.deploy.seccomp import ARCHITECTURES, build_filter

SECCOMP_ONLY, FILES, FULL = "seccomp", "files", "full"
LEVELS = (SECCOMP_ONLY, FILES, FULL)  # from the weakest
OPEN = {  # what a taken-over carrier can do where a protection is missing
    "files": "read every file that the service's user may read, identity.key and cells included",
    "ports": "connect to any TCP address, not only to the coordinator's port",
}
MEMORY = 4 << 30  # bytes of address space; a hundred threads take one of them

_libc = ctypes.CDLL(None, use_errno=True)


class SandboxError(Exception):
    """The kernel cannot confine the carrier, or did not."""


@dataclass(frozen=True)
class Confined:
    """What confines a process: the level, the layers in use, and what stays possible, in words."""

    level: str
    by: tuple[str, ...]
    open: tuple[str, ...]

    def __str__(self) -> str:
        left = f"; a carrier that is taken over could {' and '.join(self.open)}" if self.open else ""
        return f"level '{self.level}' by {', '.join(self.by)}{left}"

    @property
    def note(self) -> str:
        """What a lower level leaves open, for the log; empty at the highest level."""
        return str(self) if self.open else ""

    def covers(self, least: str) -> bool:
        return LEVELS.index(self.level) >= LEVELS.index(least)


# ---- Landlock --------------------------------------------------------------------------------------------------------

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # the same numbers on every architecture
READ_FILE, READ_DIR = 1 << 2, 1 << 3
BIND, CONNECT = 1, 2
ABSTRACT_SOCKETS, SIGNALS = 1, 2
BENEATH, PORT = 1, 2  # kinds of rules


@dataclass(frozen=True)
class Rung:
    """One set of Landlock's features: how many rights of files, whether TCP ports, whether scopes."""

    rights: int
    ports: bool
    scopes: bool

    @property
    def about(self) -> str:
        return f"Landlock ({self.rights} rights of files{', ports' * self.ports}{', scopes' * self.scopes})"


# ABI 6, ABI 5, ABI 4, ABI 3, ABI 2, ABI 1. Some kernels report ABI 6 and refuse its scopes.
RUNGS = (
    Rung(16, ports=True, scopes=True),
    Rung(16, ports=True, scopes=False),
    Rung(15, ports=True, scopes=False),
    Rung(15, ports=False, scopes=False),
    Rung(14, ports=False, scopes=False),
    Rung(13, ports=False, scopes=False),
)


def _landlock(readable: Iterable[Path], connect: int | None) -> str | None:
    """Give up all files but `readable` (to read), and all TCP ports but `connect`, as far as the kernel takes it.

    Returns what was applied; None if the kernel has no Landlock.
    """
    paths = [*readable]
    for rung in RUNGS:
        try:
            _apply(rung, paths, connect)
        except SandboxError:
            continue  # nothing of this rung is in force
        return rung.about
    return None


def _apply(rung: Rung, readable: Iterable[Path], connect: int | None) -> None:
    parts = [(1 << rung.rights) - 1]
    if rung.ports:
        parts.append(BIND | CONNECT)
    if rung.scopes:
        parts.append(ABSTRACT_SOCKETS | SIGNALS)
    rules = struct.pack(f"={len(parts)}Q", *parts)
    ruleset = _call(CREATE_RULESET, rules, len(rules), 0)
    try:
        for path in readable:
            try:
                fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
            except OSError:  # not on this machine
                continue
            rights = READ_FILE | READ_DIR if path.is_dir() else READ_FILE
            try:
                _call(ADD_RULE, ruleset, BENEATH, struct.pack("=Qi", rights, fd), 0)
            finally:
                os.close(fd)
        if rung.ports and connect is not None:
            _call(ADD_RULE, ruleset, PORT, struct.pack("=QQ", CONNECT, connect), 0)
        _no_new_privileges()
        _call(RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)


def _call(number: int, *args: Any) -> int:
    """A system call; raises `SandboxError` where it fails."""
    given = [ctypes.c_char_p(a) if isinstance(a, bytes) else ctypes.c_long(a) for a in args]
    result = int(_libc.syscall(ctypes.c_long(number), *given))
    if result < 0:
        raise SandboxError(f"system call {number}: {os.strerror(ctypes.get_errno())}")
    return result


def readable_code() -> list[Path]:
    """Where the interpreter, the installed packages and the system's libraries are."""
    ours = Path(__file__).resolve().parents[1]
    places = [sysconfig.get_paths()[k] for k in ("stdlib", "platstdlib", "purelib", "platlib")]
    places += [sysconfig.get_config_var("LIBDIR") or "", sysconfig.get_config_var("DESTSHARED") or ""]
    places += [p for p in sys.path if p.endswith(("site-packages", "dist-packages"))]  # those of a .pth file, too
    libraries = ["/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", "/etc/ssl/openssl.cnf"]
    small = ["/dev/null", "/dev/urandom", "/etc/localtime", "/usr/share/zoneinfo"]
    return [ours, *(Path(p) for p in dict.fromkeys([*places, *libraries, *small]) if p)]


# ---- namespaces ------------------------------------------------------------------------------------------------------

NEW_MOUNTS, NEW_USERS, NEW_IPC, NEW_NAMES = 0x00020000, 0x10000000, 0x08000000, 0x04000000
READ_ONLY, NO_SUID, NO_DEVICES, NO_EXEC, REMOUNT, BIND_MOUNT, RECURSIVE, PRIVATE = 1, 2, 4, 8, 32, 4096, 16384, 1 << 18
DETACH = 2
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}


def _namespaces(readable: Iterable[Path]) -> str | None:
    """Move into a root folder that has only `readable`, read-only; None where the kernel or its settings refuse it."""
    uid, gid = os.geteuid(), os.getegid()
    if _libc.unshare(NEW_USERS | NEW_MOUNTS | NEW_IPC | NEW_NAMES) != 0:
        return None
    try:
        for file, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            Path(f"/proc/self/{file}").write_text(text)
        _mount(None, "/", None, RECURSIVE | PRIVATE)
    except (OSError, SandboxError):  # AppArmor, for one, grants the namespace and no right in it
        return None
    held: dict[Path, int] = {}
    for path in readable:
        with contextlib.suppress(OSError):  # not on this machine
            held[path.absolute()] = os.open(path, os.O_PATH | os.O_CLOEXEC)
    root = Path("/tmp")
    _mount("tmpfs", str(root), "tmpfs", NO_SUID | NO_DEVICES)
    os.chdir(root)
    for path, fd in held.items():
        place, source = root / path.relative_to("/"), f"/proc/self/fd/{fd}"
        if any(other in path.parents and other.is_dir() for other in held):
            continue  # is inside another one
        place.parent.mkdir(parents=True, exist_ok=True)
        place.mkdir(exist_ok=True) if Path(source).is_dir() else place.touch()
        _mount(source, str(place), None, BIND_MOUNT | RECURSIVE)
        _mount(None, str(place), None, REMOUNT | BIND_MOUNT | READ_ONLY | _locked_flags(place))
    for fd in held.values():
        os.close(fd)
    _mount(None, str(root), None, REMOUNT | BIND_MOUNT | READ_ONLY | NO_SUID | NO_DEVICES)
    os.chdir(root)
    dot = ctypes.c_char_p(b".")
    if _libc.syscall(ctypes.c_long(PIVOT_ROOT[platform.machine()]), dot, dot) != 0 or _libc.umount2(b".", DETACH) != 0:
        raise SandboxError(f"pivot_root: {os.strerror(ctypes.get_errno())}")
    os.chdir("/")
    _drop_capabilities()
    return "user and mount namespaces"


def _mount(source: str | None, target: str, kind: str | None, flags: int) -> None:
    words = [None if word is None else word.encode() for word in (source, target, kind)]
    if _libc.mount(words[0], words[1], words[2], ctypes.c_ulong(flags), None) != 0:
        raise SandboxError(f"mount at {target}: {os.strerror(ctypes.get_errno())}")


def _locked_flags(place: Path) -> int:
    """Flags of the original mount that a namespace may not drop."""
    flags = os.statvfs(place).f_flag
    pairs = {os.ST_NOSUID: NO_SUID, os.ST_NODEV: NO_DEVICES, os.ST_NOEXEC: NO_EXEC}
    pairs |= {os.ST_NOATIME: 1024, os.ST_NODIRATIME: 2048, os.ST_RELATIME: 1 << 21}
    return sum(mount for stat, mount in pairs.items() if flags & stat)


def _drop_capabilities() -> None:
    header, none = struct.pack("=Ii", 0x20080522, 0), bytes(24)
    if _libc.syscall(ctypes.c_long({"x86_64": 126, "aarch64": 91}[platform.machine()]), header, none) != 0:
        raise SandboxError(f"capset: {os.strerror(ctypes.get_errno())}")


# ---- seccomp ---------------------------------------------------------------------------------------------------------

SECCOMP, SET_FILTER, ALL_THREADS = {"x86_64": 317, "aarch64": 277}, 1, 1


def _seccomp(*, may_connect: bool) -> None:
    machine = platform.machine()
    program = ctypes.create_string_buffer(build_filter(machine, may_connect=may_connect, pid=os.getpid()))
    header = struct.pack("@HP", (len(program) - 1) // 8, ctypes.addressof(program))
    if _libc.syscall(ctypes.c_long(SECCOMP[machine]), SET_FILTER, ALL_THREADS, ctypes.c_char_p(header)) != 0:
        raise SandboxError(f"seccomp: {os.strerror(ctypes.get_errno())}")


# ---- all of it -------------------------------------------------------------------------------------------------------

NO_NEW_PRIVS, DUMPABLE = 38, 4  # of prctl


def _control(option: int, value: int) -> None:
    if _libc.prctl(option, ctypes.c_ulong(value), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0)) != 0:
        raise SandboxError(f"prctl {option}: {os.strerror(ctypes.get_errno())}")


def _no_new_privileges() -> None:
    _control(NO_NEW_PRIVS, 1)


def limit() -> None:
    """What needs no newer kernel: no privileges to be gained, no core file, nothing written, a bound on memory."""
    _no_new_privileges()
    _control(DUMPABLE, 0)
    limits = {resource.RLIMIT_CORE: 0, resource.RLIMIT_FSIZE: 0, resource.RLIMIT_AS: MEMORY}
    for which, most in limits.items():
        hard = resource.getrlimit(which)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(which, (most, most))


def confine(readable: Iterable[str | Path], connect: int | None, *, least: str = FULL) -> Confined:
    """Confine this process for good by all that the kernel offers, and test it.

    Parameters
    ----------
    readable
        Files and folders to read, besides the interpreter and the packages.
    connect
        The one TCP port to connect to, on whatever host; None: no new socket at all.
    least
        The level below which this raises `SandboxError`.
    """
    if sys.platform != "linux" or platform.machine() not in ARCHITECTURES:
        raise SandboxError(
            f"the sandbox is for Linux on {' and '.join(ARCHITECTURES)}, and this is {platform.machine()}"
        )
    if threading.active_count() > 1 or len(os.listdir("/proc/self/task")) > 1:
        raise SandboxError("Landlock confines one thread, and there are several")
    places = [*readable_code(), *map(Path, readable)]
    held = _landlock(places, connect) or _namespaces(places)
    limit()
    _seccomp(may_connect=connect is not None)
    open_ways = check_confined(connect)
    level = SECCOMP_ONLY if "files" in open_ways else FILES if open_ways else FULL
    confined = Confined(level, (*([held] if held else []), "seccomp"), tuple(OPEN[way] for way in open_ways))
    if not confined.covers(least):
        raise SandboxError(f"the sandbox does not hold: {confined}; this site accepts '{least}' or better")
    return confined


def check_confined(connect: int | None) -> list[str]:
    """Try what must not work. Raises `SandboxError` for what seccomp refuses on any kernel; returns what else works."""

    def socket_to(port: int) -> None:
        with socket.socket() as s:
            s.settimeout(1.0)
            s.connect(("127.0.0.1", port))

    other = 9 if connect != 9 else 7
    always: dict[str, Callable[[], object]] = {
        "write a file": lambda: os.close(os.open(f"/tmp/cloister-{os.getpid()}", os.O_WRONLY | os.O_CREAT, 0o600)),
        "cut a file short": lambda: os.truncate(__file__, 0),
        "delete a file": lambda: os.unlink(f"/tmp/cloister-{os.getpid()}"),
        "start a program": lambda: os.execv("/cloister-no-such-program", ["none"]),
        "start a process": _fork,
        "open a Unix socket": lambda: socket.socket(socket.AF_UNIX).close(),
        "open a datagram socket": lambda: socket.socket(type=socket.SOCK_DGRAM).close(),
    }
    for what, attempt in always.items():
        if (failure := _errno_of(attempt)) not in (errno.EPERM, errno.EACCES):
            came = f"failed by {errno.errorcode.get(failure, failure)}" if failure else "worked"
            raise SandboxError(f"the sandbox does not hold: to {what} {came}")
    found = []
    hidden = (errno.EPERM, errno.EACCES, errno.ENOENT)  # in a namespace of its own there is no such file
    if _errno_of(lambda: open("/etc/passwd", "rb").close()) not in hidden or _errno_of(_see_others) not in hidden:
        found.append("files")
    if _errno_of(lambda: socket_to(other)) not in (errno.EPERM, errno.EACCES):
        found.append("ports")
    return found


def _errno_of(attempt: Callable[[], object]) -> int:
    """The number of the error by which an attempt fails; 0 if it works, -1 for an error without a number."""
    try:
        attempt()
    except OSError as e:
        return e.errno or -1
    return 0


def _see_others() -> None:
    """List a folder that no carrier needs."""
    os.listdir("/proc" if os.path.exists("/proc/1") else "/etc/init.d")


def _fork() -> None:
    if os.fork() == 0:
        os._exit(0)


# ---- what this machine offers ----------------------------------------------------------------------------------------

TRY = "import sys; sys.path.insert(0, sys.argv.pop(1)); import cloister.deploy.sandbox as s; s.report()"


def report() -> None:
    """Confine this process, and print what confines it."""
    connect = None if sys.argv[1] == "listen" else 1
    try:
        print(json.dumps(asdict(confine([], connect, least=SECCOMP_ONLY))))
    except SandboxError as e:
        print(json.dumps({"error": str(e)}))


@functools.cache
def offered(*, listen: bool = False) -> Confined | str:
    """What a carrier on this machine would be confined by, tried in a process of its own; or why it cannot be."""
    import subprocess  # a carrier has no use for it

    root = str(Path(__file__).resolve().parents[2])
    command = [sys.executable, "-I", "-B", "-c", TRY, root, "listen" if listen else "connect"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd="/", env={})
        told = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired) as e:
        return f"a process could not be confined ({type(e).__name__})"
    if "error" in told:
        return str(told["error"])
    return Confined(told["level"], tuple(told["by"]), tuple(told["open"]))


def why_not(least: str = FULL, *, listen: bool = False) -> str | None:
    """Why a carrier on this machine cannot be confined at this level, in words; None if it can."""
    found = offered(listen=listen)
    if isinstance(found, str):
        return found
    if found.covers(least):
        return None
    return f"this machine offers {found}. This site accepts '{least}' or better"


# ---- the process -----------------------------------------------------------------------------------------------------


def open_listener(host: str, port: int, at: Sequence[Any] | None = None) -> socket.socket:
    """The coordinator's one listening socket; a loopback name: there only. `at`: at this very address instead."""
    if at is not None:
        host, port = at
        return socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=128
        )
    loopback = host == "localhost" or host.startswith("127.")
    if loopback or not socket.has_dualstack_ipv6():
        return socket.create_server(("127.0.0.1" if loopback else "", port), backlog=128)
    return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=128)


def _open_pipe(where: str, patience: float = 60.0) -> Pipe:
    """The inherited socket, by its number; or the service's, by its path. The service may start after this process."""
    if where.isdigit():
        return Pipe(socket.socket(fileno=int(where)))
    end = time.monotonic() + patience
    while True:
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.connect(where)
            return Pipe(sock)
        except (FileNotFoundError, ConnectionRefusedError):
            sock.close()
            if time.monotonic() > end:
                raise SystemExit(f"no service listens at {where} after {patience:.0f} s; is it running?") from None
        except PermissionError:
            raise SystemExit(f"user {os.getuid()} may not connect to {where}; is it in the socket's group?") from None
        time.sleep(0.2)


def main() -> None:
    """Read the plan from the service, confine, and run the program named in the command line."""
    program, where = sys.argv[1:3]
    pipe = _open_pipe(where)
    try:
        packet = pipe.read()
        if packet.kind != PLAN:
            raise BrokenPipe("a plan comes first")
        plan = json.loads(packet.data)
        if folder := os.environ.get("CREDENTIALS_DIRECTORY"):  # of systemd: this process may not even see the kit
            plan["tls"] = {what: os.path.join(folder, what) for what in plan["tls"]}
        listener = open_listener(plan["host"], plan["port"], plan.get("at")) if plan["listen"] else None
        own = [program] if program.endswith(".py") else []
        if plan["sandbox"] == "none":  # for tests: what the sandbox keeps out
            limit()
        else:
            connect = None if listener else plan.get("connect", plan["port"])
            least = SECCOMP_ONLY if plan["sandbox"] == "systemd" else plan["sandbox"]
            plan["confined"] = confine([*plan["tls"].values(), *own], connect, least=least).note
        start = runpy.run_path(program)["serve"] if own else importlib.import_module(program).serve
        start(pipe, plan, listener)
    except BrokenPipe:
        pass
    except BaseException as e:
        pipe.post(Packet(LOG, data=f"the carrier failed: {type(e).__name__}: {e}".encode()[:500]))
        pipe.flush(1.0)
    os._exit(0)


if __name__ == "__main__":
    main()
