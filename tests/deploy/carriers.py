"""Carriers without services: a test plays the party at the other end of each pipe."""

from __future__ import annotations

import contextlib
import json
import queue
import socket
import ssl
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgpack
from federation import free_port

from cloister.deploy import launch, ready
from cloister.deploy.kit import Kit
from cloister.deploy.pipe import LOG, PLAN, BrokenPipe, Packet, Pipe
from cloister.deploy.provision import provision
from cloister.study import Study

PREFIX = struct.Struct(">IHBBHHHH")
DATA, HELLO, READY = 1, 4, 5  # kinds of FLARE's frames


class End:
    """The party's end of a carrier's pipe; what comes is kept."""

    def __init__(self, kit: Path, program: str, port: int) -> None:
        self.kit = Kit.open(kit)
        ours, theirs = socket.socketpair()
        kept, launch.PROGRAM = launch.PROGRAM, program
        try:
            with theirs:
                self.process: subprocess.Popen[bytes] = launch.spawn_carrier(theirs)
        finally:
            launch.PROGRAM = kept
        self.pipe, self.came = Pipe(ours), queue.Queue[Packet]()
        self.kept: list[Packet] = []
        hub = self.kit.role == "coordinator"
        plan = {
            "me": self.kit.me,
            "hub": "hub",
            "parties": [*self.kit.study.parties],
            "host": "localhost",
            "port": port,
            "listen": hub,
            "addresses": [] if hub else [("127.0.0.1", port)],
            "tls": ready.tls_files(self.kit),
            "sandbox": "full",
        }
        self.pipe.post(Packet(PLAN, data=json.dumps(plan).encode()))
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        with contextlib.suppress(BrokenPipe):
            while True:
                self.came.put(self.pipe.read())

    def wait_for(self, wanted: Callable[[Packet], bool], seconds: float = 90.0) -> Packet:
        """The first packet of that kind; those before it are kept in `kept`."""
        end = time.monotonic() + seconds
        while True:
            packet = self.came.get(timeout=max(0.01, end - time.monotonic()))
            if wanted(packet):
                return packet
            self.kept.append(packet)

    def logged(self) -> str:
        while not self.came.empty():
            self.kept.append(self.came.get())
        return "\n".join(p.data.decode() for p in self.kept if p.kind == LOG)

    def close(self) -> None:
        self.pipe.close()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@contextlib.contextmanager
def carriers(folder: Path, program: str = "cloister.deploy.carrier") -> Iterator[tuple[int, dict[str, End], dict]]:
    """The coordinator's and basel's carriers, connected; and the kits, lugano's without a carrier."""
    port = free_port()
    parties = {"hub": "coordinator", "basel": "site", "lugano": "site"}
    kits = provision(Study("s", "bin-values", parties, network={"host": "localhost", "port": port}), folder / "kits")
    ends: dict[str, End] = {}
    try:
        for party in ("hub", "basel"):
            ends[party] = End(kits[party], program, port)
        yield port, ends, kits
    finally:
        for end in ends.values():
            end.close()


def frame(kind: int, headers: dict | None = None, payload: bytes = b"", app: int = 1) -> bytes:
    """A frame as FLARE's communicator sends it."""
    head = msgpack.packb(headers) if headers else b""
    return PREFIX.pack(PREFIX.size + len(head) + len(payload), len(head), kind, 0, 0, app, 17, 1) + head + payload


def context(kit: Path | None, trust: Path) -> ssl.SSLContext:
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    made.check_hostname = False
    made.load_verify_locations(trust / "startup" / "rootCA.pem")
    if kit is not None:
        made.load_cert_chain(kit / "startup" / "client.crt", kit / "startup" / "client.key")
    return made


def call(port: int, tls: ssl.SSLContext, *frames: bytes, seconds: float = 60.0) -> bytes:
    """What a coordinator says to these frames, until it hangs up or stays silent for `seconds` after its greeting."""
    got = b""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=60.0) as plain, tls.wrap_socket(plain) as s:
            for i, each in enumerate(frames):
                s.sendall(each)
                if i == 0 and len(frames) > 1:
                    got += s.recv(1 << 16)  # the greeting is answered before anything else is said
            s.settimeout(seconds)
            while more := s.recv(1 << 16):
                got += more
    except TimeoutError:
        return got + b" ..."
    except OSError:
        pass
    return got


def hello(name: str) -> bytes:
    return frame(HELLO, None, msgpack.packb({"endpoint_name": name, "timestamp": time.time()}), app=0)
