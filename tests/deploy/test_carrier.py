"""The carrier, as a process: what FLARE has registered in it, and what strangers and changed parties can do to it."""

from __future__ import annotations

import json
import re
import socket
import ssl
from pathlib import Path

import psutil
import pytest
from carriers import DATA, PREFIX, End, call, carriers, context, frame, hello

from cloister.deploy import sandbox
from cloister.deploy.carrier import NEEDED
from cloister.deploy.driver import TlsDriver
from cloister.deploy.pipe import ABSENT, ANSWER, CONNECTED, LOG, NOBODY, REQUEST, SERVICE, TWICE, Packet
from cloister.deploy.provision import provision
from cloister.study import Study

pytest.importorskip("nvflare")
pytestmark = pytest.mark.skipif(sandbox.why_not() is not None, reason=str(sandbox.why_not()))
LISTER = str(Path(__file__).parent / "hostile" / "lister.py")

# Everything that takes something in from the network or the machine, and why it is there. A FLARE with one more door
# fails here.
INVENTORY = {
    "receivers": {"1": "Relay"},  # messages, by FLARE's application number: the relay, which knows four headers
    "monitors": ["Relay"],  # told who connects and who is gone
    "resolver": "Names",  # says which name a certificate may use: its own
    "cells": [],  # no cell, so no (channel, topic), no callback, no agent, no administration
    "others": [],  # nothing that starts programs or decodes objects
}
CONNECTORS = {"hub": [["TlsDriver", "PASSIVE"]], "basel": [["TlsDriver", "ACTIVE"]]}  # one listener; one connection
ENDPOINTS = {"hub": ["basel"], "basel": ["hub"]}


def test_what_is_registered_in_a_running_carrier(tmp_path):
    with carriers(tmp_path, LISTER) as (port, ends, _):
        for party, end in ends.items():
            told = end.wait_for(lambda p: p.kind == LOG and p.data.startswith(b"INVENTORY"))
            found = json.loads(told.data.removeprefix(b"INVENTORY"))
            assert {key: found[key] for key in INVENTORY} == INVENTORY, party
            assert found["connectors"] == CONNECTORS[party]
            assert found["endpoints"] == ENDPOINTS[party]
            strangers = [m for m in found["modules"] if not inside(m)]
            assert strangers == [], party
            assert not any(m.startswith(("nvflare.private", "nvflare.app_", "nvflare.job")) for m in found["modules"])
            assert "nvflare.fuel.f3.cellnet.core_cell" not in found["modules"]
            listening = {
                c.laddr.port for c in psutil.Process(end.process.pid).net_connections() if c.status == "LISTEN"
            }
            assert listening == ({port} if party == "hub" else set()), party


def inside(module: str) -> bool:
    return any(module == n or module.startswith(f"{n}.") or n.startswith(f"{module}.") for n in NEEDED)


def test_frames_go_through_and_the_absent_are_named(tmp_path):
    with carriers(tmp_path) as (_, ends, _):
        hub, basel = ends["hub"], ends["basel"]
        hub.wait_for(lambda p: p.kind == CONNECTED and p.name == "basel")
        basel.wait_for(lambda p: p.kind == CONNECTED and p.name == "hub")
        run, large = bytes(range(16)), bytes(1 << 20)
        basel.pipe.post(Packet(REQUEST, "hub", 7, run, large))
        assert hub.wait_for(lambda p: p.kind == REQUEST) == Packet(REQUEST, "basel", 7, run, large)
        hub.pipe.post(Packet(ANSWER, "basel", 7, run, b"+"))
        assert basel.wait_for(lambda p: p.kind == ANSWER) == Packet(ANSWER, "hub", 7, run, b"+")
        for asker in (hub, basel):
            asker.pipe.post(Packet(REQUEST, "lugano", 8, run, b"?"))
            assert asker.wait_for(lambda p: p.kind == ABSENT) == Packet(ABSENT, "lugano", 8, run)
        basel.close()
        hub.wait_for(lambda p: p.name == "basel" and p.kind != CONNECTED)
        hub.pipe.post(Packet(REQUEST, "basel", 9, run, b"?"))
        assert hub.wait_for(lambda p: p.kind == ABSENT) == Packet(ABSENT, "basel", 9, run)


def test_strangers_and_false_names_do_not_get_in(tmp_path):
    others = provision(
        Study("t", "bin-values", {"hub": "coordinator", "lugano": "site"}, network={"host": "localhost", "port": 1}),
        tmp_path / "others",
    )
    with carriers(tmp_path) as (port, ends, kits):
        ends["hub"].wait_for(lambda p: p.kind == CONNECTED)
        trust = kits["hub"]
        assert call(port, context(None, trust), hello("lugano")) == b""  # no certificate
        assert call(port, context(others["lugano"], trust), hello("lugano")) == b""  # of another authority
        lugano = context(kits["lugano"], trust)
        for name in ("basel", "server", "lugano.child", "lugano.-client_api_x", "x" * 5000):
            assert not call(port, lugano, hello(name)).endswith(b"..."), name  # hung up
        for name in ("hub", ""):  # FLARE keeps these waiting, and nothing that they say is heard
            said = frame(DATA, {"k": REQUEST, "f": "lugano", "t": "basel", "n": 1}, bytes(16))
            call(port, lugano, hello(name) + said, seconds=1.0)
        for bad in (
            PREFIX.pack(2**31 - 1, 0, DATA, 0, 0, 1, 0, 0),  # two gigabytes, it says
            PREFIX.pack(3, 0, DATA, 0, 0, 1, 0, 0),
            b"\xff" * 100,
        ):
            assert not call(port, lugano, hello("lugano"), bad).endswith(b"...")
        before = psutil.Process(ends["hub"].process.pid).memory_info().rss
        assert before < 300 << 20
        ends["basel"].logged()
        assert not any(p.kind == REQUEST for end in ends.values() for p in end.kept)
        said = ends["hub"].logged()
        assert "'lugano' calls itself 'basel'; it is not let in" in said
        ends["basel"].pipe.post(Packet(REQUEST, "hub", 1, SERVICE, b"still there"))
        ends["hub"].wait_for(lambda p: p.data == b"still there")


def test_what_a_changed_site_may_say_through_the_coordinator(tmp_path):
    """Lugano's certificate is good; its program says what it likes."""
    with carriers(tmp_path) as (port, ends, kits):
        hub, basel = ends["hub"], ends["basel"]
        hub.wait_for(lambda p: p.kind == CONNECTED)
        basel.wait_for(lambda p: p.kind == CONNECTED)
        good = {"k": REQUEST, "f": "lugano", "t": "basel", "n": 5}
        run = bytes(16)
        dropped = [
            ({**good, "f": "hub"}, run),  # in the coordinator's name
            ({**good, "f": "vienna"}, run),
            ({**good, "t": "vienna"}, run),
            ({**good, "t": "lugano"}, run),
            ({**good, "k": ABSENT}, run),  # only carriers say that
            ({**good, "k": LOG}, run),
            ({**good, "k": True}, run),
            ({**good, "n": -1}, run),
            ({**good, "n": "5"}, run),
            ({**good, "x": 1}, run),
            ({**good, "t": ["basel"]}, run),
            (good, b"short"),
            ({"channel": "admin", "topic": "sys.shell", "origin": "lugano", "destination": "basel"}, run),
        ]
        frames = [frame(DATA, headers, payload) for headers, payload in dropped]
        frames += [frame(DATA, good, run + b"wrong application", app=n) for n in (0, 2, 3)]
        frames += [frame(DATA, None, b""), frame(9, good, run), frame(DATA, good, b"")]
        frames.append(frame(DATA, good, run + b"this one"))
        call(port, context(kits["lugano"], kits["hub"]), hello("lugano"), *frames, seconds=2.0)
        came = basel.wait_for(lambda p: p.kind not in (LOG, CONNECTED))
        assert came == Packet(REQUEST, "lugano", 5, run, b"this one")
        basel.logged()
        assert {p.kind for p in basel.kept} <= {LOG, CONNECTED, 7}
        assert not any(p.kind in (REQUEST, ANSWER, NOBODY) for p in hub.kept)


def test_who_connects_and_says_nothing_holds_up_nobody(tmp_path):
    with carriers(tmp_path) as (port, ends, kits):
        ends["hub"].wait_for(lambda p: p.kind == CONNECTED)
        idle = []
        try:
            for _ in range(14):
                idle.append(socket.create_connection(("127.0.0.1", port)))
            said = call(port, context(kits["lugano"], kits["hub"]), hello("lugano"), b"", seconds=0.1)
            assert said.removesuffix(b" ...")  # greeted; one after the other, the idle would have kept it for minutes
        finally:
            for s in idle:
                s.close()


def test_a_site_takes_no_other_for_the_coordinator(tmp_path):
    """Lugano has a certificate of the same authority, and answers at the coordinator's address."""
    with carriers(tmp_path) as (_, _, kits), socket.create_server(("127.0.0.1", 0)) as false:
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(kits["lugano"] / "startup" / "client.crt", kits["lugano"] / "startup" / "client.key")
        tls.load_verify_locations(kits["hub"] / "startup" / "rootCA.pem")
        tls.verify_mode = ssl.CERT_REQUIRED
        end = End(kits["basel"], "cloister.deploy.carrier", false.getsockname()[1])
        try:
            plain, _ = false.accept()
            with tls.wrap_socket(plain, server_side=True) as s:
                s.settimeout(60.0)
                assert s.recv(1000) == b""  # not a word
            refused = end.wait_for(lambda p: p.kind == LOG)
            assert b"the certificate is of 'lugano'" in refused.data
        finally:
            end.close()


def test_a_kit_that_is_used_twice_is_reported_with_both_addresses(tmp_path):
    """FLARE keeps the last connection of a party, so two services of one kit take each other's place for ever."""
    with carriers(tmp_path) as (port, ends, kits):
        hub = ends["hub"]
        first = hub.wait_for(lambda p: p.kind == CONNECTED and p.name == "basel")
        assert first.data.startswith(b"127.0.0.1:")
        second = End(kits["basel"], "cloister.deploy.carrier", port)
        try:
            told = hub.wait_for(lambda p: p.kind == TWICE, 120.0)
        finally:
            second.close()
    assert told.name == "basel"
    assert re.fullmatch(rb"127\.0\.0\.1:\d+ and 127\.0\.0\.1:\d+", told.data)


def test_a_line_that_breaks_once_is_no_second_service():
    driver = TlsDriver({}, [], print)
    assert not driver._twice("basel", "192.0.2.1:50000", "192.0.2.1:50001")
    assert driver._twice("basel", "192.0.2.1:50001", "192.0.2.2:50000")  # from another host at the same time
    assert not driver._twice("lugano", "192.0.2.3:1", "192.0.2.3:2")
    assert not driver._twice("lugano", "192.0.2.3:2", "192.0.2.3:3")
    assert driver._twice("lugano", "192.0.2.3:3", "192.0.2.3:4")  # again and again
