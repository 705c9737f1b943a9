"""Proxies for tests: a small one that is always there, and those of Debian; and a TLS pass-through by server name."""

from __future__ import annotations

import base64
import contextlib
import os
import shutil
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from federation import free_port

USER, PASSWORD = "kispi", "s3cret/pass word"
PLAIN = "s3cret-pass"  # tinyproxy takes no other characters
SQUID_HELPERS = [Path("/usr/lib/squid/basic_ncsa_auth"), Path("/usr/lib64/squid/basic_ncsa_auth")]


@dataclass
class Heard:
    """What went through: the requests' heads, without TLS."""

    port: int
    heads: list[bytes] = field(default_factory=list)


def _carry(one: socket.socket, other: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := one.recv(1 << 16):
            other.sendall(data)
    for each in (one, other):
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)


def _join(client: socket.socket, server: socket.socket) -> None:
    thread = threading.Thread(target=_carry, args=(client, server), daemon=True)
    thread.start()
    _carry(server, client)
    thread.join()


@contextlib.contextmanager
def serving(handle) -> Iterator[int]:
    """Serve each connection in a thread; returns the port."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    client, _ = server.accept()
                    threading.Thread(target=one, args=(client,), daemon=True).start()

        def one(client: socket.socket) -> None:
            with client, contextlib.suppress(OSError):
                handle(client)

        threading.Thread(target=accept, daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def small_proxy(*, auth: bool = False, answer: bytes | None = None) -> Iterator[Heard]:
    """A proxy for CONNECT. `answer` instead of opening a tunnel; b"" for a proxy that stays silent."""
    wanted = b"Proxy-Authorization: Basic " + base64.b64encode(f"{USER}:{PASSWORD}".encode())
    heard = Heard(0)

    def handle(client: socket.socket) -> None:
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            if not (more := client.recv(1)):
                return
            head += more
        heard.heads.append(head)
        if answer is not None:
            if answer:
                client.sendall(answer)
            client.recv(1)
        elif auth and wanted not in head.split(b"\r\n"):
            client.sendall(b"HTTP/1.1 407 Proxy Authentication Required\r\nContent-Length: 0\r\n\r\n")
        else:
            host, _, port = head.split()[1].decode().rpartition(":")
            with socket.create_connection((host, int(port))) as server:
                client.sendall(b"HTTP/1.1 200 Connection established\r\nVia: 1.1 small\r\n\r\n")
                _join(client, server)

    with serving(handle) as heard.port:
        yield heard


@contextlib.contextmanager
def pass_through(routes: dict[str, int]) -> Iterator[Heard]:
    """Passes a TLS connection on by the name in its first message, and decrypts nothing, as on port 443."""
    heard = Heard(0)

    def handle(client: socket.socket) -> None:
        record = client.recv(1 << 14, socket.MSG_PEEK)
        name = server_name(record)
        heard.heads.append(name.encode())
        with socket.create_connection(("127.0.0.1", routes[name])) as server:
            _join(client, server)

    with serving(handle) as heard.port:
        yield heard


def server_name(record: bytes) -> str:
    """The server name in a ClientHello (RFC 6066); "" if it has none."""
    at = 5 + 4 + 2 + 32
    at += 1 + record[at]
    at += 2 + struct.unpack_from(">H", record, at)[0]
    at += 1 + record[at]
    end = at + 2 + struct.unpack_from(">H", record, at)[0]
    at += 2
    while at + 4 <= end:
        kind, size = struct.unpack_from(">HH", record, at)
        if kind == 0:
            return record[at + 9 : at + 4 + size].decode()
        at += 4 + size
    return ""


@contextlib.contextmanager
def _program(command: list[str], port: int) -> Iterator[None]:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            assert process.poll() is None, command
            assert time.monotonic() < end, command
            time.sleep(0.1)
        yield
    finally:
        process.terminate()
        process.wait(30)


@contextlib.contextmanager
def tinyproxy(folder: Path, allowed: int) -> Iterator[int]:
    port = free_port()
    config = folder / "tinyproxy.conf"
    lines = [f"Port {port}", "Listen 127.0.0.1", "Timeout 60", f"BasicAuth {USER} {PLAIN}"]
    config.write_text("\n".join([*lines, f"ConnectPort {allowed}", "MaxClients 50", ""]))
    with _program([shutil.which("tinyproxy") or "", "-d", "-c", str(config)], port):
        yield port


@contextlib.contextmanager
def squid(folder: Path, allowed: int) -> Iterator[int]:
    port, helper = free_port(), next(p for p in SQUID_HELPERS if p.exists())
    folder.chmod(0o755)
    users = folder / "users"
    made = subprocess.run(["openssl", "passwd", "-apr1", PASSWORD], capture_output=True, text=True, check=True)
    users.write_text(f"{USER}:{made.stdout}")
    logs = folder / "squid"
    logs.mkdir()
    config = folder / "squid.conf"
    config.write_text(f"""
http_port 127.0.0.1:{port}
auth_param basic program {helper} {users}
acl known proxy_auth REQUIRED
acl there port {allowed}
http_access allow CONNECT there known
http_access deny all
access_log none
cache_log {logs}/cache.log
pid_filename none
coredump_dir {logs}
cache deny all
shutdown_lifetime 0 seconds
netdb_filename none
""")
    if os.geteuid() == 0:
        shutil.chown(logs, "proxy")
        for place in (folder, *folder.parents[:-1]):  # squid gives up root, and reads these as another user
            if not place.stat().st_mode & 0o005:
                place.chmod(place.stat().st_mode | 0o055)
    with _program([shutil.which("squid") or "", "-N", "-f", str(config)], port):
        yield port


@dataclass
class Line:
    """A TCP line to a server that a test can break: `cut` resets all connections and refuses new ones, `hang` carries
    nothing and says nothing, `heal` ends both."""

    target: int
    port: int = 0
    _up: threading.Event = field(default_factory=threading.Event)
    _cut: bool = False
    _open: set[socket.socket] = field(default_factory=set)

    def cut(self) -> None:
        self._cut = True
        for each in [*self._open]:
            with contextlib.suppress(OSError):
                each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                each.shutdown(socket.SHUT_RDWR)

    def hang(self) -> None:
        self._up.clear()

    def heal(self) -> None:
        self._cut = False
        self._up.set()

    def handle(self, client: socket.socket) -> None:
        if self._cut:
            return
        with socket.create_connection(("127.0.0.1", self.target)) as server:
            self._open |= {client, server}
            try:
                back = threading.Thread(target=self._carry, args=(server, client), daemon=True)
                back.start()
                self._carry(client, server)
                back.join()
            finally:
                self._open -= {client, server}

    def _carry(self, one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(1 << 16):
                self._up.wait()
                other.sendall(data)
        for each in (one, other):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def line(target: int) -> Iterator[Line]:
    made = Line(target)
    made.heal()
    with serving(made.handle) as made.port:
        yield made
        made.heal()
        made.cut()
