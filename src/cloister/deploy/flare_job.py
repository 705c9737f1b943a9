"""A FLARE job that carries the frames of a study, for consortia that run FLARE already and want no second port.

    python -m cloister.deploy.flare_job cloister-job --socket '/run/cloister-{site}/carrier.sock'

writes a job folder for FLARE's own `submit_job`. In `local/site.toml` of each kit, `carrier = "/run/.../carrier.sock"`.

    run's process ── service ── Unix socket ── FLARE's client (job process) ── FLARE's server (job process) ── ...
    keys, cells      kit, policy               as another user: sealed frames and their sender, recipient, size

The job does what a carrier does (`cloister.deploy.relay`) and nothing else: it takes packets from the service, hands
them to FLARE as auxiliary messages, and the other way round. It has no key, no cell and no path to a kit. The service
believes nothing of what comes from it: runs begin with the coordinator's signed invitation, and frames are sealed
between the parties' own identity keys. FLARE's administrators, and whoever may submit jobs, can delay and drop frames
and see who sends how many bytes to whom and when. What else they can do at a site, FLARE decides: run FLARE as a user
of its own that cannot read the kit.

FLARE's name of a client is the name of its party, unless `names` says otherwise.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from nvflare.apis.controller_spec import Task
from nvflare.apis.executor import Executor
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal

from cloister.deploy.pipe import (
    ABSENT,
    CONNECTED,
    GONE,
    PLAN,
    READY,
    REQUEST,
    RUN,
    TRAVELS,
    BrokenPipe,
    Packet,
    Pipe,
    well_formed,
)

TOPIC, TASK = "cloister.frame", "carry"
SOCKET = "/run/cloister-{site}/carrier.sock"
HELLO, SILENT = 3.0, 15.0  # seconds between two words of a client, and without one until it counts as gone
RETRY = 1.0  # seconds until the service's socket is tried again
OPENED = "CLOISTER_CARRIER_SOCKET"  # in the environment of a site's FLARE, if its socket is elsewhere


class Bridge:
    """Between one service's Unix socket and `send`; survives restarts of the service.

    Parameters
    ----------
    path
        The service's socket.
    send
        Takes (headers, payload) for other parties; returns False if the recipient is not there.
    """

    def __init__(self, path: str, send: Callable[[dict[str, Any], bytes], bool]) -> None:
        self._path, self._send = path, send
        self._pipe: Pipe | None = None
        self.me, self.hub, self.parties = "", "", frozenset[str]()
        self._there: set[str] = set()
        self._ending = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._keep, name="cloister", daemon=True).start()

    def stop(self) -> None:
        self._ending.set()
        if (pipe := self._pipe) is not None:
            pipe.close()

    def _keep(self) -> None:
        while not self._ending.is_set():
            try:
                sock = socket.socket(socket.AF_UNIX)
                sock.connect(self._path)
            except OSError:
                sock.close()
                self._ending.wait(RETRY)
                continue
            pipe = Pipe(sock)
            with contextlib.suppress(BrokenPipe, ValueError, KeyError, TypeError):
                self._serve(pipe)
            self._pipe = None
            pipe.close()
            self._ending.wait(RETRY)

    def _serve(self, pipe: Pipe) -> None:
        packet = pipe.read()
        if packet.kind != PLAN:
            return
        plan = json.loads(packet.data)
        self.me, self.hub, self.parties = str(plan["me"]), str(plan["hub"]), frozenset(map(str, plan["parties"]))
        pipe.post(Packet(READY, data=b"carried by FLARE, which this service does not confine"))
        self._pipe = pipe
        for party in [*self._there]:
            pipe.post(Packet(CONNECTED, party, data=b"FLARE"))
        while True:
            packet = pipe.read()
            if packet.kind not in TRAVELS or packet.name not in self.parties - {self.me}:
                continue
            headers = {"k": packet.kind, "f": self.me, "t": packet.name, "n": packet.ticket}
            if not self._send(headers, packet.run + packet.data) and packet.kind == REQUEST:
                pipe.post(Packet(ABSENT, packet.name, packet.ticket, packet.run))

    def deliver(self, headers: Mapping[str, Any], payload: bytes) -> None:
        """A well-formed message for this party."""
        if (pipe := self._pipe) is not None:
            pipe.post(Packet(headers["k"], headers["f"], headers["n"], payload[:RUN], payload[RUN:]))

    @property
    def there(self) -> bool:
        """Whether the service is at the other end."""
        return self._pipe is not None

    def see(self, party: str, *, there: bool) -> None:
        """Tell the service that a party is there, or no longer."""
        if there == (party in self._there):
            return
        (self._there.add if there else self._there.discard)(party)
        if (pipe := self._pipe) is not None:
            pipe.post(Packet(CONNECTED if there else GONE, party, data=b"FLARE"))


def _message(headers: Mapping[str, Any], payload: bytes) -> Shareable:
    message = Shareable()
    message["h"], message["p"] = dict(headers), payload
    return message


def _read(message: Shareable) -> tuple[dict[str, Any], bytes] | None:
    headers, payload = message.get("h"), message.get("p")
    return (headers, bytes(payload)) if well_formed(headers, payload) else None


class CarryExecutor(Executor):  # type: ignore[misc]
    """At a site: FLARE's client, between its service and FLARE's server."""

    def __init__(self, socket: str = SOCKET, names: dict[str, str] | None = None) -> None:
        super().__init__()
        self._socket, self._names = socket, names or {}

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        if task_name != TASK:
            return make_reply(ReturnCode.TASK_UNKNOWN)
        engine, site = fl_ctx.get_engine(), str(fl_ctx.get_identity_name())
        party = self._names.get(site, site)

        def send(headers: dict[str, Any], payload: bytes) -> bool:
            with engine.new_context() as context:
                engine.fire_and_forget_aux_request(TOPIC, _message(headers, payload), context, optional=True)
            return True

        bridge = Bridge(os.environ.get(OPENED) or self._socket.replace("{site}", party), send)

        def take(topic: str, request: Shareable, fl_ctx: FLContext) -> Shareable:
            if (said := _read(request)) is not None and bridge.there:
                headers, payload = said
                if headers["t"] == bridge.me and headers["f"] in bridge.parties - {bridge.me}:
                    bridge.deliver(headers, payload)
            return make_reply(ReturnCode.OK)

        engine.register_aux_message_handler(TOPIC, take)
        bridge.start()
        try:
            heard = 0.0
            while not abort_signal.triggered:
                if bridge.there:
                    with engine.new_context() as context:
                        hello = Shareable()
                        hello["hello"] = party
                        replies = engine.send_aux_request(None, TOPIC, hello, HELLO, context, optional=True)
                    if any(r.get("there") for r in replies.values() if isinstance(r, Shareable)):
                        heard = time.monotonic()
                    bridge.see(bridge.hub, there=time.monotonic() - heard < SILENT)
                for _ in range(int(HELLO * 5)):
                    if abort_signal.triggered:
                        break
                    time.sleep(0.2)
        finally:
            bridge.stop()
        return make_reply(ReturnCode.OK)


class CarryController(Controller):  # type: ignore[misc]
    """At the coordinator: FLARE's server, between its service and FLARE's clients."""

    def __init__(self, socket: str = SOCKET, names: dict[str, str] | None = None, party: str = "hub") -> None:
        super().__init__()
        self._socket, self._names, self._party = socket, names or {}, party
        self._sites = {party: site for site, party in self._names.items()}

    def start_controller(self, fl_ctx: FLContext) -> None:
        engine = self._engine = fl_ctx.get_engine()
        self._seen: dict[str, float] = {}
        self._bridge = Bridge(os.environ.get(OPENED) or self._socket.replace("{site}", self._party), self._pass_on)
        engine.register_aux_message_handler(TOPIC, self._take)

    def stop_controller(self, fl_ctx: FLContext) -> None:
        self._bridge.stop()

    def control_flow(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        self._bridge.start()
        self.broadcast(Task(TASK, Shareable()), fl_ctx, targets=None, min_responses=0, wait_time_after_min_received=0)
        while not abort_signal.triggered:
            now = time.monotonic()
            for party, last in [*self._seen.items()]:
                self._bridge.see(party, there=now - last < SILENT)
            time.sleep(0.5)

    def _pass_on(self, headers: dict[str, Any], payload: bytes) -> bool:
        """Send to the client of a party; False if nothing was heard of it lately."""
        party = headers["t"]
        if time.monotonic() - self._seen.get(party, float("-inf")) > SILENT:
            return False
        with self._engine.new_context() as context:
            site = self._sites.get(party, party)
            self._engine.send_aux_request([site], TOPIC, _message(headers, payload), 0.0, context, optional=True)
        return True

    def _take(self, topic: str, request: Shareable, fl_ctx: FLContext) -> Shareable:
        """What a client sends: that its service is there, or a message of its own party."""
        peer = fl_ctx.get_peer_context()
        site = str(peer.get_identity_name()) if peer is not None else ""
        party, bridge = self._names.get(site, site), self._bridge
        reply = make_reply(ReturnCode.OK)
        if "hello" in request:
            if request["hello"] == party and (not bridge.parties or party in bridge.parties):
                self._seen[party] = time.monotonic()
                reply["there"] = bridge.there
            return reply
        if (said := _read(request)) is None:
            return reply
        headers, payload = said
        if headers["f"] != party or headers["k"] == ABSENT or not bridge.there:
            return reply
        if headers["t"] == bridge.me:
            bridge.deliver(headers, payload)
        elif headers["t"] in bridge.parties - {party}:
            passed = self._pass_on(headers, payload)
            if not passed and headers["k"] == REQUEST:
                back = {"k": ABSENT, "f": headers["t"], "t": party, "n": headers["n"]}
                self._pass_on(back, payload[:RUN])
        return reply

    def process_result_of_unknown_task(self, *args: Any, **kwargs: Any) -> None:
        """A task that this job did not give."""


def write_job(folder: Path, sock: str = SOCKET, names: Mapping[str, str] | None = None, hub: str = "hub") -> None:
    """Write a job folder that FLARE's `submit_job` and simulator take."""
    config = folder / "app" / "config"
    config.mkdir(parents=True)
    args: dict[str, Any] = {"socket": sock, "names": dict(names or {})}
    here = "cloister.deploy.flare_job"
    client = {"tasks": [TASK], "executor": {"path": f"{here}.CarryExecutor", "args": args}}
    server = {"id": "carry", "path": f"{here}.CarryController", "args": {**args, "party": hub}}
    files: dict[Path, Any] = {
        folder / "meta.json": {"name": "cloister", "deploy_map": {"app": ["@ALL"]}, "min_clients": 1},
        config / "config_fed_client.json": {"format_version": 2, "executors": [client], "components": []},
        config / "config_fed_server.json": {"format_version": 2, "workflows": [server], "components": []},
    }
    for path, content in files.items():
        path.write_text(json.dumps(content, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m cloister.deploy.flare_job", description="Write the FLARE job.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--socket", default=SOCKET, help="the services' sockets; {site} stands for the party's name")
    parser.add_argument(
        "--name", action="append", default=[], metavar="CLIENT=PARTY", help="where FLARE's name differs"
    )
    parser.add_argument("--hub", default="hub", help="name of the coordinator's party")
    args = parser.parse_args()
    names = dict(pair.split("=", 1) for pair in args.name)
    write_job(args.folder, args.socket, names, args.hub)
    print(args.folder)


if __name__ == "__main__":
    main()
