"""Relay: what a carrier does with a message, between the pipe to its party and FLARE's communicator.

A message has four headers and bytes:

    k   REQUEST, ANSWER, NOBODY or ABSENT       f, t   sender and recipient, parties of the study
    n   the asker's number for its request      payload: the run's 16 bytes, and what only the parties can read

At the coordinator the sender must be whom the connection's certificate names, and what is for another site is passed
on. At a site everything comes from the coordinator, and is for that site. All else is dropped.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from socket import socket
from typing import Any

from nvflare.fuel.f3.cellnet.identity import CellIdentityResolver
from nvflare.fuel.f3.communicator import Communicator
from nvflare.fuel.f3.connection import Connection
from nvflare.fuel.f3.drivers.driver_params import DriverParams
from nvflare.fuel.f3.endpoint import Endpoint, EndpointMonitor, EndpointState
from nvflare.fuel.f3.message import Message, MessageReceiver
from nvflare.fuel.f3.sfm import conn_manager
from nvflare.fuel.utils.constants import Mode

from cloister.deploy.driver import TlsDriver
from cloister.deploy.pipe import (
    ABSENT,
    ADDRESSES,
    CONNECTED,
    GONE,
    READY,
    REQUEST,
    RUN,
    TRAVELS,
    TWICE,
    BrokenPipe,
    Packet,
    Pipe,
    well_formed,
)

APP = 1  # whom FLARE hands a message to: there is one receiver
WORKERS = 100  # threads that take in what came
QUEUE = 64  # messages that may wait for one site's line
AT_FIRST, AT_MOST = 0.1, 2.0  # seconds until a line that broke is made anew: at once, then twice as long each time

log = logging.getLogger("cloister.carrier")


class Names(CellIdentityResolver):
    """Who may be at the other end, and by which name: the certificate's own, and none beneath it."""

    def __init__(self, certificates: Mapping[str, str]) -> None:
        super().__init__()
        self._certificates = certificates  # party → common name

    def require_match(self, fqcn: str, peer_cn: str, peer_desc: str) -> None:
        if self._certificates.get(fqcn) != peer_cn:
            raise ValueError(f"'{str(peer_cn)[:64]}' calls itself '{str(fqcn)[:64]}'; it is not let in")


class Workers(ThreadPoolExecutor):
    """FLARE's workers, with a bound: a connection whose frames are not done yet is not read from."""

    def submit(self, task: Any, connection: Any, frame: Any) -> Future[Any]:  # type: ignore[override]
        room = connection.conn.room
        room.acquire()
        try:
            done = super().submit(task, connection, frame)
        except BaseException:
            room.release()
            raise
        done.add_done_callback(lambda _: room.release())
        return done


class Relay(MessageReceiver, EndpointMonitor):
    """Listens (with `listener`) or connects from the start; `work` reads the pipe."""

    def __init__(self, pipe: Pipe, plan: dict[str, Any], listener: socket | None, tell: Callable[[str], None]) -> None:
        self._pipe, self._me, self._hub = pipe, plan["me"], plan["hub"]
        self._parties = frozenset(plan["parties"])
        self._confined = str(plan.get("confined", ""))
        host = plan["host"]
        names = {p: p for p in self._parties - {self._me}} if listener else {self._hub: host[:64]}
        self._driver = TlsDriver(plan["tls"], names.values(), tell)
        self._driver.listener, self._driver.host, self._driver.port = listener, host, plan["port"]
        self._driver.proxy = plan.get("proxy")
        self._driver.on_twice = self._report_twice
        self._driver.addresses = [(a, p) for a, p in plan["addresses"]]
        self._lines = {p: queue.Queue[tuple[dict[str, Any], bytes]](QUEUE) for p in names}
        for party in names:
            threading.Thread(target=self._carry, args=(party,), name=f"to-{party}", daemon=True).start()
        conn_manager.INIT_WAIT, conn_manager.MAX_WAIT = AT_FIRST, AT_MOST
        self.communicator = Communicator(Endpoint(self._me), Names(names))
        manager = self.communicator.conn_manager
        manager.frame_mgr_executor.shutdown()
        manager.frame_mgr_executor = Workers(WORKERS, "frames")
        self.communicator.register_message_receiver(APP, self)
        self.communicator.register_monitor(self)
        where = {"scheme": "stcp", "url": f"stcp://{host}:{plan['port']}"}
        mode = Mode.PASSIVE if listener else Mode.ACTIVE
        self.communicator.add_connector_advanced(self._driver, mode, where, secure=True)
        self.communicator.start()

    # -- from the party --------------------------------------------------------------------------------------------

    def work(self) -> None:
        """Carry what the party sends, until it closes the pipe."""
        self._pipe.post(Packet(READY, data=self._confined.encode()))
        while True:
            try:
                packet = self._pipe.read()
            except BrokenPipe:
                return
            if packet.kind == ADDRESSES:
                self._driver.addresses = [(a, p) for a, p in json.loads(packet.data)]
            elif packet.kind in TRAVELS and packet.name in self._parties - {self._me}:
                headers = {"k": packet.kind, "f": self._me, "t": packet.name, "n": packet.ticket}
                line = self._lines[packet.name if self._me == self._hub else self._hub]
                try:
                    line.put_nowait((headers, packet.run + packet.data))
                except queue.Full:
                    log.info("a message for '%s' was dropped: its line is full", packet.name)

    def _carry(self, party: str) -> None:
        """One party's line at the coordinator, the only line of a site: a slow one holds up no other."""
        while True:
            headers, payload = self._lines[party].get()
            self._send(headers, payload)

    # -- to the network --------------------------------------------------------------------------------------------

    def _send(self, headers: dict[str, Any], payload: bytes) -> None:
        to = self.communicator.find_endpoint(headers["t"] if self._me == self._hub else self._hub)
        try:
            if to is not None and to.state == EndpointState.READY:
                self.communicator.send(to, APP, Message(headers, payload))
                return
        except Exception as e:  # whatever FLARE makes of a connection that ends just now
            log.info("not sent: %s", type(e).__name__)
        if headers["k"] == REQUEST:
            back = {"k": ABSENT, "f": headers["t"], "t": headers["f"], "n": headers["n"]}
            (self._deliver if back["t"] == self._me else self._send)(back, payload[:RUN])

    # -- from the network ------------------------------------------------------------------------------------------

    def process_message(self, endpoint: Endpoint, connection: Connection, app_id: int, message: Message) -> None:
        headers, payload = message.headers, message.payload
        if not well_formed(headers, payload):
            return
        sender, to = headers["f"], headers["t"]
        if sender not in self._parties or to not in self._parties or sender == to:
            return
        if self._me == self._hub:
            if sender != endpoint.name or headers["k"] == ABSENT:
                return
        elif endpoint.name != self._hub or to != self._me:
            return
        (self._deliver if to == self._me else self._send)(headers, bytes(payload))

    def _deliver(self, headers: dict[str, Any], payload: bytes) -> None:
        self._pipe.post(Packet(headers["k"], headers["f"], headers["n"], payload[:RUN], payload[RUN:]))

    def state_change(self, endpoint: Endpoint) -> None:
        kind = CONNECTED if endpoint.state == EndpointState.READY else GONE
        address = str((endpoint.conn_props or {}).get(DriverParams.PEER_ADDR.value, ""))
        self._pipe.post(Packet(kind, endpoint.name, data=address.encode()))

    def _report_twice(self, party: str, old: str, new: str) -> None:
        self._pipe.post(Packet(TWICE, party, data=f"{old} and {new}".encode()))
