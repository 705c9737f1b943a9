"""Sandbox: a process that gives up what it does not need, before it loads a line of FLARE.

    python -I -B -c "..." PROGRAM FD                        confine this process, then run PROGRAM in it
    python -I -B -m cloister.runtime.sandbox PROGRAM PATH   the same, where a unit of systemd confines it

The carrier talks to the network, so it is the process that somebody may take over. It may then do what this page leaves
it, whatever program it runs:

- *Landlock* (ABI 6 or newer): read the interpreter, the installed packages and its three TLS files; write nothing;
  connect to one TCP port (a site) or none (the coordinator, whose listening socket is opened here first); trace,
  signal or address by an abstract socket nobody outside.
- *seccomp*: no program is started, no process, no socket but a TCP one; nothing that reads another process or makes a
  descriptor out of memory. Landlock cannot say these.
- `no_new_privs`, no core file, no file grows, and a bound on memory.

`confine` tries what must not work, and raises if it does. What it cannot say: *which host* has the port (the unit file
in docs/deploy.md can), and that a path that is known exists.
"""

from __future__ import annotations

import ctypes
import errno
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
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from cloister.runtime.pipe import LOG, PLAN, BrokenPipe, Packet, Pipe
from cloister.runtime.seccomp import ARCHITECTURES, build_filter

LEAST_ABI = 6
MEMORY = 4 << 30  # bytes of address space; a hundred threads take one of them

_libc = ctypes.CDLL(None, use_errno=True)


class SandboxError(Exception):
    """The kernel cannot confine the carrier, or did not."""


# ---- Landlock --------------------------------------------------------------------------------------------------------

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # the same numbers on every architecture
ALL_FILES, READ_FILE, READ_DIR = (1 << 16) - 1, 1 << 2, 1 << 3  # all rights of ABI 6: execute ... ioctl
BIND, CONNECT = 1, 2
ABSTRACT_SOCKETS, SIGNALS = 1, 2
BENEATH, PORT = 1, 2  # kinds of rules


def landlock_abi() -> int:
    """The kernel's version of Landlock; 0 if there is none."""
    return max(0, int(_libc.syscall(CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(1))))


def _landlock(readable: Iterable[Path], connect: int | None) -> None:
    """Give up all files but `readable` (to read), and all TCP ports but `connect` (to connect to)."""
    rules = struct.pack("=QQQ", ALL_FILES, BIND | CONNECT, ABSTRACT_SOCKETS | SIGNALS)
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
        if connect is not None:
            _call(ADD_RULE, ruleset, PORT, struct.pack("=QQ", CONNECT, connect), 0)
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
    libraries = ["/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", "/etc/ssl/openssl.cnf"]
    small = ["/dev/null", "/dev/urandom", "/etc/localtime", "/usr/share/zoneinfo"]
    return [ours, *(Path(p) for p in dict.fromkeys([*places, *libraries, *small]) if p)]


# ---- seccomp ---------------------------------------------------------------------------------------------------------

SECCOMP, SET_FILTER, ALL_THREADS = {"x86_64": 317, "aarch64": 277}, 1, 1


def _seccomp(*, may_connect: bool) -> None:
    machine = platform.machine()
    if machine not in ARCHITECTURES:
        raise SandboxError(f"there is no seccomp filter for {machine}")
    program = ctypes.create_string_buffer(build_filter(machine, may_connect=may_connect))
    header = struct.pack("@HP", (len(program) - 1) // 8, ctypes.addressof(program))
    if _libc.syscall(ctypes.c_long(SECCOMP[machine]), SET_FILTER, ALL_THREADS, ctypes.c_char_p(header)) != 0:
        raise SandboxError(f"seccomp: {os.strerror(ctypes.get_errno())}")


# ---- all of it -------------------------------------------------------------------------------------------------------

NO_NEW_PRIVS, DUMPABLE = 38, 4  # of prctl


def why_not() -> str | None:
    """What this machine lacks to confine a carrier, in words; None if nothing."""
    if sys.platform != "linux" or platform.machine() not in ARCHITECTURES:
        return f"the sandbox is for Linux on {' and '.join(ARCHITECTURES)}, and this is {platform.machine()}"
    if (abi := landlock_abi()) < LEAST_ABI:
        return f"this kernel has {f'Landlock {abi}' if abi else 'no Landlock'}, and Landlock {LEAST_ABI} is needed"
    if not os.path.exists("/proc/sys/kernel/seccomp/actions_avail"):
        return "this kernel has no seccomp filters"
    return None


def limit() -> None:
    """What needs no newer kernel: no privileges to be gained, no core file, nothing written, a bound on memory."""
    for option, value in ((NO_NEW_PRIVS, 1), (DUMPABLE, 0)):
        if _libc.prctl(option, ctypes.c_ulong(value), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0)) != 0:
            raise SandboxError(f"prctl {option}: {os.strerror(ctypes.get_errno())}")
    limits = {resource.RLIMIT_CORE: 0, resource.RLIMIT_FSIZE: 0, resource.RLIMIT_AS: MEMORY}
    for which, most in limits.items():
        hard = resource.getrlimit(which)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(which, (most, most))


def confine(readable: Iterable[str | Path], connect: int | None) -> None:
    """Confine this process for good, and make sure of it.

    Parameters
    ----------
    readable
        Files and folders to read, besides the interpreter and the packages.
    connect
        The one TCP port to connect to, on whatever host; None: no new socket at all.
    """
    if reason := why_not():
        raise SandboxError(reason)
    if threading.active_count() > 1 or len(os.listdir("/proc/self/task")) > 1:
        raise SandboxError("Landlock confines one thread, and there are several")
    limit()
    _landlock([*readable_code(), *map(Path, readable)], connect)
    _seccomp(may_connect=connect is not None)
    check_confined(connect)


def check_confined(connect: int | None) -> None:
    """Try what must not work; raise `SandboxError` if any of it does."""

    def socket_to(port: int) -> None:
        with socket.socket() as s:
            s.settimeout(1.0)
            s.connect(("127.0.0.1", port))

    other = 9 if connect != 9 else 7
    tries: dict[str, Callable[[], object]] = {
        "read /etc/passwd": lambda: open("/etc/passwd", "rb").close(),
        "list /": lambda: os.listdir("/"),
        "write a file": lambda: open(f"/tmp/cloister-{os.getpid()}", "wb").close(),
        "start a program": lambda: os.execv("/cloister-no-such-program", ["none"]),
        "start a process": _fork,
        "open a Unix socket": lambda: socket.socket(socket.AF_UNIX).close(),
        "open a datagram socket": lambda: socket.socket(type=socket.SOCK_DGRAM).close(),
        "connect to another port": lambda: socket_to(other),
    }
    for what, attempt in tries.items():
        try:
            attempt()
        except PermissionError:
            continue
        except OSError as e:
            raise SandboxError(
                f"the sandbox does not hold: to {what} failed by {errno.errorcode.get(e.errno or 0)}"
            ) from None
        raise SandboxError(f"the sandbox does not hold: to {what} worked")


def _fork() -> None:
    if os.fork() == 0:
        os._exit(0)


# ---- the process -----------------------------------------------------------------------------------------------------


def open_listener(host: str, port: int) -> socket.socket:
    """The coordinator's one listening socket; a loopback name: there only."""
    loopback = host == "localhost" or host.startswith("127.")
    if loopback or not socket.has_dualstack_ipv6():
        return socket.create_server(("127.0.0.1" if loopback else "", port), backlog=128)
    return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=128)


def _open_pipe(where: str) -> Pipe:
    """The inherited socket, by its number; or the service's, by its path."""
    if where.isdigit():
        return Pipe(socket.socket(fileno=int(where)))
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(where)
    return Pipe(sock)


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
        listener = open_listener(plan["host"], plan["port"]) if plan["listen"] else None
        own = [program] if program.endswith(".py") else []
        if plan["sandbox"] == "landlock":
            confine([*plan["tls"].values(), *own], None if listener else plan["port"])
        else:
            limit()
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
