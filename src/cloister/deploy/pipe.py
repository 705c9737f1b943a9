"""Pipe: packets between the processes of one party, over a stream socket that one of them inherited.

    length u32 · kind u8 · ticket u64 · run 16 bytes · size of name u8 · name · data

Neither end has to trust the other: what is read is bounded before memory is taken for it, what is sent never blocks,
and what the other end does not take in is dropped once `ROOM` bytes wait. A request that was dropped is asked again.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

REQUEST, ANSWER = 1, 2  # from party to party
NOBODY = 3  # an answer: the party is there, the run is not; with `ENDED`, no longer
ENDED = b"ended"
ABSENT = 4  # of a carrier: there is no connection to that party
PLAN = 5  # service → carrier, once: what to be
ADDRESSES = 6  # service → carrier: where the coordinator is now
READY, CONNECTED, GONE, LOG = 7, 8, 9, 10  # carrier → service
STOP, HEARD = 11, 12  # service → a run's process: end; that party does not come, and why
TWICE = 13  # carrier → service: a party connects while it is connected, from where
OUTCOME = 14  # a run's process → service: how it ended, as JSON
HALT = b"this party halted the run"  # what a STOP says when the party's owner wants it
KINDS = range(REQUEST, OUTCOME + 1)

TRAVELS = (REQUEST, ANSWER, NOBODY, ABSENT)  # between parties

NO_PACKET = "what came is not a packet"
RUN = 16  # bytes of a run's id
SERVICE = bytes(RUN)  # the run of what services say to each other
HEAD = struct.Struct(">IBQ16sB")
MOST = 1 << 20  # bytes of a packet's data; a batch of `cloister.deploy.link` has half of that
ROOM = 1 << 26  # bytes that may wait for the other end


class BrokenPipe(Exception):
    """The other end is gone, or says what is not a packet."""


@dataclass(frozen=True, slots=True)
class Packet:
    kind: int
    name: str = ""  # the other party
    ticket: int = 0
    run: bytes = SERVICE
    data: bytes = b""


class Pipe:
    """One end; `read` is for one thread, `post` for any."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * MOST)  # as far as the system allows: fewer switches
        self._news = threading.Condition()
        self._waiting: deque[memoryview] = deque()
        self._bytes, self._closed = 0, False
        self._writer: threading.Thread | None = None

    def read(self) -> Packet:
        """The next packet; `BrokenPipe` at the end, or at what is none."""
        length, kind, ticket, run, size = HEAD.unpack(self._exactly(HEAD.size))
        if kind not in KINDS or not size <= length <= size + MOST:
            raise BrokenPipe(NO_PACKET)
        rest = self._exactly(length)
        try:
            return Packet(kind, rest[:size].decode("ascii"), ticket, run, rest[size:])
        except UnicodeDecodeError:
            raise BrokenPipe(NO_PACKET) from None

    def _exactly(self, n: int) -> bytes:
        try:
            got = self._sock.recv(n, socket.MSG_WAITALL) if n else b""
            while len(got) < n:  # a signal came between
                if not (more := self._sock.recv(n - len(got), socket.MSG_WAITALL)):
                    raise BrokenPipe("the other end closed the pipe")
                got += more
        except (OSError, ValueError):
            raise BrokenPipe("the other end closed the pipe") from None
        return got

    def post(self, packet: Packet) -> bool:
        """Send without waiting; False if it was dropped, since too much waits already or nobody is there."""
        name = packet.name.encode("ascii")
        if len(packet.data) > MOST:
            raise ValueError(f"a packet of {len(packet.data)} bytes")
        size = len(name) + len(packet.data)
        head = HEAD.pack(size, packet.kind, packet.ticket, packet.run, len(name)) + name
        with self._news:
            if self._closed or self._bytes + size > ROOM:
                return False
            whole = [memoryview(head), memoryview(packet.data)]
            left = whole if self._waiting else self._try(head, packet.data)
            if left:
                self._waiting.extend(left)
                self._bytes += sum(map(len, left))
                if self._writer is None:
                    self._writer = threading.Thread(target=self._write, name="pipe", daemon=True)
                    self._writer.start()
                self._news.notify()
        return not self._closed

    def _try(self, head: bytes, data: bytes) -> list[memoryview]:
        """Send what goes at once; returns the rest."""
        try:
            sent = self._sock.sendmsg([head, data], [], socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except BlockingIOError:
            sent = 0
        except (OSError, ValueError):
            self._closed = True
            return []
        parts = memoryview(head)[sent:], memoryview(data)[max(0, sent - len(head)) :]
        return [part for part in parts if len(part)]

    def _write(self) -> None:
        while True:
            with self._news:
                while not self._waiting and not self._closed:
                    self._news.wait()
                if not self._waiting or self._closed:
                    return
                part = self._waiting[0]
            try:
                while len(part):
                    part = part[self._sock.send(part, socket.MSG_NOSIGNAL) :]
            except (OSError, ValueError):
                with self._news:
                    self._closed = True
                return
            with self._news:
                self._bytes -= len(self._waiting.popleft())

    def flush(self, seconds: float) -> None:
        """Give what waits some time to go."""
        end = time.monotonic() + seconds
        while self._waiting and not self._closed and time.monotonic() < end:
            time.sleep(0.01)

    def close(self) -> None:
        with self._news:
            self._closed = True
            self._news.notify_all()
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # wakes whoever reads
        self._sock.close()


class Asker:
    """Requests that wait for their answers; many threads ask, one brings what comes back."""

    def __init__(self, pipe: Pipe, run: bytes) -> None:
        self._pipe, self._run = pipe, run
        self._lock, self._next = threading.Lock(), 0
        self._open: dict[int, tuple[str, threading.Event, list[Packet]]] = {}

    def ask(self, to: str, data: bytes, seconds: float) -> Packet:
        """An ANSWER, NOBODY or ABSENT; `TimeoutError` without any."""
        came = threading.Event()
        box: list[Packet] = []
        with self._lock:
            self._next += 1
            ticket = self._next
            self._open[ticket] = (to, came, box)
        try:
            self._pipe.post(Packet(REQUEST, to, ticket, self._run, data))
            if not came.wait(seconds):
                raise TimeoutError
            return box[0]
        finally:
            with self._lock:
                del self._open[ticket]

    def settle(self, packet: Packet) -> None:
        """Hand an answer to whoever waits for it; what nobody asked for is dropped."""
        with self._lock:
            to, came, box = self._open.get(packet.ticket, ("", None, []))
            if came is not None and to == packet.name and not box:
                box.append(packet)
                came.set()


def well_formed(headers: Any, payload: Any) -> bool:
    """Whether this is a message at all; a peer may have sent anything."""
    if not isinstance(headers, dict) or headers.keys() != {"k", "f", "t", "n"}:
        return False
    if not isinstance(payload, bytes | bytearray) or not RUN <= len(payload) <= RUN + MOST:
        return False
    if type(headers["k"]) is not int or headers["k"] not in TRAVELS:
        return False
    if type(headers["n"]) is not int or not 0 <= headers["n"] < 1 << 64:
        return False
    return type(headers["f"]) is str and type(headers["t"]) is str
