"""TLS for FLARE's communicator: sockets, handshakes and frames, with bounds that FLARE's own drivers do not have.

Mutual TLS 1.2 or newer with the kit's certificates. A handshake runs in a thread of its own and ends within seconds,
so that a stranger who connects and says nothing holds up nobody; who shows no certificate of the study's authority, or
one of nobody in the study, is gone before FLARE sees a byte. A frame is at most `MOST_FRAME` long, and of each
connection at most `AT_ONCE` frames are in the carrier: then it is not read from.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from nvflare.fuel.f3.comm_error import CommError
from nvflare.fuel.f3.connection import BytesAlike, Connection
from nvflare.fuel.f3.drivers.base_driver import BaseDriver
from nvflare.fuel.f3.drivers.connector_info import ConnectorInfo
from nvflare.fuel.f3.drivers.driver_params import DriverCap, DriverParams
from nvflare.fuel.f3.sfm.prefix import PREFIX_LEN, Prefix

from cloister.deploy.pipe import MOST
from cloister.deploy.proxy import open_tunnel

MOST_FRAME = MOST + (1 << 12)
AT_ONCE = 16
CONNECT, HANDSHAKE, SENDING = 2.0, 10.0, 30.0  # seconds
UNANSWERED = 20_000  # milliseconds until a line on which nothing arrives is given up, and made anew
HALF_OPEN, HALF_OPEN_EACH = 256, 16  # handshakes at a time, of all and of one address
OVERLAP, OVERLAPS = 180.0, 3  # seconds, and how often within them, before a party on one host counts as two
OPEN_EACH = 4  # connections of one party; FLARE keeps the last
_WATCH = (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 2), ("TCP_USER_TIMEOUT", UNANSWERED))
Address = tuple[str, int]  # an IP address and a port


def tls_context(tls: dict[str, str], *, server: bool) -> ssl.SSLContext:
    """Both sides show a certificate of the study's authority; no other authority counts."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = False  # the name is compared below, with the certificate's one common name
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(tls["authority"])
    context.load_cert_chain(tls["certificate"], tls["key"])
    return context


def common_name(sock: ssl.SSLSocket) -> str:
    subject: Any = (sock.getpeercert() or {}).get("subject", ())
    names = [value for part in subject for key, value in part if key == "commonName"]
    return str(names[0]) if len(names) == 1 else ""


class TlsConnection(Connection):
    """Frames over one TLS connection; one thread reads, any may send."""

    def __init__(self, sock: ssl.SSLSocket, connector: ConnectorInfo, peer: str) -> None:
        super().__init__(connector)
        self._sock, self._turn = sock, threading.Lock()  # OpenSSL wants one thread at a time
        self._closed, self.peer = False, peer
        self.room = threading.BoundedSemaphore(AT_ONCE)
        sock.settimeout(0.0)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, seconds in _WATCH:
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), seconds)
        self.address = ":".join(map(str, sock.getpeername()[:2]))
        self._about = {
            DriverParams.PEER_CN.value: peer,
            DriverParams.PEER_ADDR.value: self.address,
            DriverParams.LOCAL_ADDR.value: ":".join(map(str, sock.getsockname()[:2])),
        }

    @property
    def closed(self) -> bool:
        return self._closed

    def get_conn_properties(self) -> dict[str, str]:
        return self._about

    def close(self) -> None:
        self._closed = True
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # wakes the reader, which closes it

    def send_frame(self, frame: BytesAlike) -> None:
        view, end = memoryview(frame), time.monotonic() + SENDING
        try:
            while len(view):
                view = view[self._when_ready(self._sock.send, view, end) :]
        except (OSError, ValueError) as e:
            self.close()  # half a frame may be out
            raise CommError(CommError.CLOSED, f"nothing more can be sent ({type(e).__name__})") from None

    def read_frames(self) -> None:
        """Hand every frame to FLARE, until the connection ends."""
        try:
            while not self._closed:
                head = self._read(bytearray(PREFIX_LEN), 0)
                length = Prefix.from_bytes(head).length
                if not PREFIX_LEN <= length <= MOST_FRAME:
                    return
                frame = head + bytearray(length - PREFIX_LEN)
                self.process_frame(self._read(frame, PREFIX_LEN))
        except (OSError, ValueError, CommError):
            return
        finally:
            self._closed = True
            with self._turn:
                self._sock.close()

    def _read(self, buffer: bytearray, at: int) -> bytearray:
        view = memoryview(buffer)[at:]
        while len(view):
            if not (n := self._when_ready(self._sock.recv_into, view, None)):
                raise ConnectionResetError
            view = view[n:]
        return buffer

    def _when_ready(self, step: Callable[[memoryview], int], view: memoryview, end: float | None) -> int:
        """Do a step of TLS as soon as the socket allows it."""
        while True:
            try:
                with self._turn:
                    return step(view)
            except ssl.SSLWantReadError:
                wanted = select.POLLIN
            except ssl.SSLWantWriteError:
                wanted = select.POLLOUT
            poll = select.poll()
            poll.register(self._sock.fileno(), wanted)
            left = None if end is None else max(0.0, end - time.monotonic()) * 1e3
            if not poll.poll(left):
                raise TimeoutError


class TlsDriver(BaseDriver):
    """What FLARE calls a driver: makes connections, and tells FLARE of them.

    Parameters
    ----------
    peers
        Common names of those who may be at the other end.
    tell
        Gets a line when something about the connection changes.
    """

    def __init__(self, tls: dict[str, str], peers: Iterable[str], tell: Callable[[str], None]) -> None:
        super().__init__()
        self._tls, self._peers, self._tell = tls, frozenset(peers), tell
        self._shaking: Counter[str] = Counter()  # handshakes by address
        self._open: Counter[str] = Counter()  # connections by common name
        self._lock = threading.Lock()
        self.listener: socket.socket | None = None  # the coordinator's
        self.addresses: list[Address] = []  # where a site finds the coordinator, or its proxy
        self.host, self.port = "", 0
        self.proxy: str | None = None  # the Authorization line for a proxy, "" for one that wants none
        self.on_twice: Callable[[str, str, str], None] = lambda peer, old, new: None
        self._overlaps: dict[str, list[float]] = {}  # party → when it connected while it was connected
        self._live: dict[str, list[TlsConnection]] = {}

    @staticmethod
    def supported_transports() -> list[str]:
        return ["stcp"]

    @staticmethod
    def capabilities() -> dict[str, Any]:
        return {DriverCap.SEND_HEARTBEAT.value: True, DriverCap.SUPPORT_SSL.value: True}

    @staticmethod
    def get_urls(scheme: str, resources: dict[str, Any]) -> tuple[str, str]:
        raise CommError(CommError.NOT_SUPPORTED, "no listener is made on demand")

    def listen(self, connector: ConnectorInfo) -> None:
        assert self.listener is not None
        context = tls_context(self._tls, server=True)
        while not connector.stopped.is_set():
            try:
                sock, (address, *_) = self.listener.accept()
            except OSError:  # it was gone again, or there are too many descriptors
                time.sleep(0.1)
                continue
            with self._lock:
                fits = self._shaking.total() < HALF_OPEN and self._shaking[address] < HALF_OPEN_EACH
                self._shaking[address] += fits
            if fits:
                threading.Thread(target=self._admit, args=(sock, address, context, connector), daemon=True).start()
            else:
                sock.close()

    def _admit(self, sock: socket.socket, address: str, context: ssl.SSLContext, connector: ConnectorInfo) -> None:
        try:
            connection = self._shake(sock, context, connector, server=True)
        except (OSError, ValueError) as e:
            self._tell(f"a connection from {address} was refused: {_reason(e)}")
            sock.close()
            return
        finally:
            with self._lock:
                self._shaking -= Counter([address])
        self._serve(connection)

    def connect(self, connector: ConnectorInfo) -> None:
        context, failure = tls_context(self._tls, server=False), "no address"
        for address in self.addresses:
            try:
                sock = socket.create_connection(address, timeout=CONNECT)
                try:
                    if self.proxy is not None:
                        open_tunnel(sock, self.host, self.port, self.proxy, HANDSHAKE)
                    connection = self._shake(sock, context, connector, server=False)
                except BaseException:
                    sock.close()
                    raise
            except (OSError, ValueError) as e:
                failure = _reason(e)
                continue
            self._serve(connection)
            return
        through = " through the proxy" if self.proxy is not None else ""
        self._tell(f"no connection to {self.host}:{self.port}{through}: {failure}")

    def _shake(
        self, sock: socket.socket, context: ssl.SSLContext, connector: ConnectorInfo, *, server: bool
    ) -> TlsConnection:
        sock.settimeout(HANDSHAKE)
        timer = threading.Timer(HANDSHAKE, lambda: _shut(sock))  # a peer that sends a byte now and then
        timer.daemon = True
        timer.start()
        try:
            name = None if server else self.host
            secure = context.wrap_socket(sock, server_side=server, server_hostname=name)
        finally:
            timer.cancel()
        peer = common_name(secure)
        if peer not in self._peers:
            secure.close()
            raise ConnectionRefusedError(f"the certificate is of '{peer[:64]}', who is not expected here")
        return TlsConnection(secure, connector, peer)

    def _serve(self, connection: TlsConnection) -> None:
        with self._lock:
            fits = self._open[connection.peer] < OPEN_EACH
            self._open[connection.peer] += fits
            live = self._live.setdefault(connection.peer, [])
            before = next((c.address for c in live if not c.closed), None)
            if fits:
                live.append(connection)
        if not fits:
            connection.close()
            return
        if before is not None and self._twice(connection.peer, before, connection.address):
            self.on_twice(connection.peer, before, connection.address)
        elif before is not None:
            self._tell(f"'{connection.peer[:64]}' connects again, from {connection.address} in place of {before}")
        try:
            self.add_connection(connection)
            connection.read_frames()
            self.close_connection(connection)
        finally:
            with self._lock:
                self._open[connection.peer] -= 1
                live.remove(connection)

    def _twice(self, peer: str, old: str, new: str) -> bool:
        """Whether a party that connects while it is connected runs twice, and has not only lost its line.

        A line that broke is replaced once, from the same host. Two services of one kit take each other's place again
        and again, because FLARE keeps only the last connection of a party.
        """
        now = time.monotonic()
        times = [t for t in self._overlaps.get(peer, []) if now - t < OVERLAP] + [now]
        self._overlaps[peer] = times[-OVERLAPS:]
        return old.rpartition(":")[0] != new.rpartition(":")[0] or len(times) >= OVERLAPS

    def shutdown(self) -> None:
        self.close_all()


def _shut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def _reason(e: Exception) -> str:
    if isinstance(e, ssl.SSLCertVerificationError):
        return f"CERTIFICATE_VERIFY_FAILED: {e.verify_message}"
    if isinstance(e, ssl.SSLError) and e.reason:
        return str(e.reason)
    return (e.strerror if isinstance(e, OSError) else None) or str(e) or type(e).__name__
