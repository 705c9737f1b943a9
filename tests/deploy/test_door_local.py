"""A local user without a certificate, and an authority that issues itself what it likes: neither gets anything."""

from __future__ import annotations

import datetime
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import chat
import psutil
import pytest
from carriers import DATA, call, context, frame, hello
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from federation import PARTIES, Federation, cells
from plain_flare import requests

from cloister.deploy import sandbox
from cloister.deploy.pipe import REQUEST, SERVICE
from cloister.deploy.service import INVITE
from cloister.rehearsal.rehearsal import rehearse

pytest.importorskip("nvflare")
chat.register()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sandbox.why_not() is not None, reason=str(sandbox.why_not())),
]
NOBODY = 65534
PARAMETERS = {"n_bins": 9, "min_values": 50}

# What another user of the machine tries; prints what worked.
INTRUDER = """
import encodings.idna, json, os, socket, sys  # all of it, while the interpreter can still be read
plan = json.loads(sys.argv[1])
os.setgroups([]); os.setgid(plan["user"]); os.setuid(plan["user"])
got = []
def attempt(what, f):
    try:
        got.append([what, str(f())[:200]])
    except OSError as e:
        pass
for path in plan["files"]:
    attempt("read " + path, lambda: open(path, "rb").read())
def order():
    s = socket.socket(socket.AF_UNIX)
    s.settimeout(5)
    s.connect(plan["socket"])
    s.sendall(b"run\\n")
    return s.recv(100) or (_ for _ in ()).throw(OSError("closed"))
attempt("order a run", order)
for port in plan["ports"]:
    for said in map(bytes.fromhex, plan["said"]):
        def talk():
            s = socket.socket()
            s.settimeout(3)
            s.connect(("127.0.0.1", port))
            s.sendall(said)
            answer = b""
            while more := s.recv(1000):
                answer += more
            if b"PRIVATE" in answer or len(answer) > 20:
                return answer
            raise OSError
        attempt("talk to %d" % port, talk)
for pid in plan["processes"]:
    attempt("memory of %d" % pid, lambda: open("/proc/%d/mem" % pid, "rb").read(1))
    attempt("environment of %d" % pid, lambda: open("/proc/%d/environ" % pid, "rb").read(1))
    attempt("signal %d" % pid, lambda: os.kill(pid, 0) or "sent")
print(json.dumps(got))
"""


@pytest.fixture
def federation(tmp_path):
    made = Federation(tmp_path, timeout=20.0)
    parties = {p: role for p, role in PARTIES.items() if p != "helper"}
    keys = {p: k for p, k in made.study.keys.items() if p in parties}
    made.study = made.agree(workflow="bin-values", parties=parties, keys=keys, parameters=PARAMETERS)
    made.start(*parties)
    try:
        yield made
    finally:
        made.close()


def check_honest_run(federation: Federation) -> None:
    ended = federation.run()
    rehearsed = rehearse("bin-values", cells(), **PARAMETERS)
    assert ended.result["bin_edges"] == rehearsed.results["coordinator"]["bin_edges"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_of_the_machine_gets_nothing(federation, tmp_path):
    check_honest_run(federation)
    processes = federation.processes(*federation.study.parties)
    processes += [c for p in list(processes) for c in p.children(recursive=True)]
    ports: dict[str, set[int]] = {}
    for party, service in federation.services.items():
        family = [psutil.Process(service.pid), *psutil.Process(service.pid).children(recursive=True)]
        ports[party] = {c.laddr.port for p in family for c in p.net_connections() if c.status == "LISTEN"}
    assert ports.pop("hub") == {federation.port}
    assert set().union(*ports.values()) == set()  # sites listen nowhere, on loopback neither
    basel = federation.kits["basel"]
    wanted = {"key": str(basel / "identity.key"), "cells": str(basel / "cells.h5ad"), "results": "results", "mark": "x"}
    said = [hello(name) for name in ("basel", "server", "admin")]
    said += [hello("basel") + frame(DATA, *request) for request in requests("server", "basel", wanted).values()]
    for folder in [*basel.parents][: len(basel.parts) - 2]:
        folder.chmod(0o755)
    shown = federation.kits["hub"] / "service.sock"  # as if its owner had opened the kit to everybody
    federation.kits["hub"].chmod(0o755)
    shown.chmod(0o666)
    plan = {
        "user": NOBODY,
        "files": [str(f) for kit in federation.kits.values() for f in kit.rglob("*") if f.is_file()],
        "socket": str(shown),
        "ports": [federation.port],
        "said": [s.hex() for s in said],
        "processes": [p.pid for p in processes],
    }
    plan["files"] = [f for f in plan["files"] if not f.startswith(str(federation.kits["hub"]))]
    done = subprocess.run(
        [sys.executable, "-I", "-c", INTRUDER, json.dumps(plan)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []
    check_honest_run(federation)


def issue(authority: Path, name: str, folder: Path, role: str) -> Path:
    """A kit with a certificate of the study's own authority, for whomever the authority likes."""
    kept = json.loads((authority / "cert.json").read_text())
    root = x509.load_pem_x509_certificate(kept["root_cert"].encode())
    signer = serialization.load_pem_private_key(kept["root_pri_key"].encode(), None)
    key = rsa.generate_private_key(65537, 2048)
    attributes = [(x509.NameOID.COMMON_NAME, name), (x509.NameOID.UNSTRUCTURED_NAME, role)]
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(*a) for a in attributes]))
        .issuer_name(root.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=30))
        .sign(signer, hashes.SHA256())
    )
    startup = folder / name / "startup"
    startup.mkdir(parents=True)
    (startup / "client.crt").write_bytes(made.public_bytes(serialization.Encoding.PEM))
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (startup / "client.key").write_bytes(pem)
    return folder / name


def test_an_authority_that_makes_itself_super_gets_nothing(federation, tmp_path):
    """It may pass as a party's *connection*, which it could cut anyway; it has no party's identity."""
    check_honest_run(federation)
    authority, trust = tmp_path / "kits" / "authority", federation.kits["hub"]
    basel = federation.kits["basel"]
    wanted = {"key": str(basel / "identity.key"), "cells": str(basel / "cells.h5ad"), "results": "results"}
    wanted["mark"] = str(tmp_path / "mark")
    asked = [frame(DATA, *r) for r in requests("server", "basel", wanted).values()]
    for name in ("super@cloister.local", "localhost", "hub", "admin"):
        kit = issue(authority, name, tmp_path / "issued", "super")
        assert call(federation.port, context(kit, trust), hello(name)) == b"", name  # not even greeted
    lugano = issue(authority, "lugano", tmp_path / "issued", "super")
    ours = {"k": REQUEST, "f": "lugano", "t": "basel", "n": 1}
    words = [frame(DATA, ours, SERVICE + INVITE + bytes(120)), frame(DATA, {**ours, "f": "hub"}, SERVICE + b"P")]
    answered = call(federation.port, context(lugano, trust), hello("lugano"), *asked, *words, seconds=4.0)
    secrets = [f.read_bytes() for f in basel.rglob("*.key")]
    assert not any(secret.splitlines()[:2][-1] in answered for secret in secrets)
    assert b"cells" not in answered
    assert b"etc" not in answered
    assert (basel / "results").is_dir()
    assert not (tmp_path / "mark").exists()
    federation.wait_until(lambda: _connected(federation, "lugano"))
    check_honest_run(federation)


def _connected(federation: Federation, party: str) -> bool:
    said = (federation.folder / "hub.out").read_text()
    return said.rfind(f"{party} is connected") > said.rfind(f"{party} is no longer connected")


def test_nobody_listens_on_loopback_while_a_run_is_on(tmp_path):
    """FLARE's own client opens a port without credentials for its runs; here there is none."""
    federation = Federation(tmp_path, timeout=20.0)
    federation.agree(parameters={"rounds": 1_000_000, "pause": 0.01})
    federation.start(*PARTIES)
    ends: list = []

    def go() -> None:
        try:
            ends.append(federation.run(60.0))
        except Exception as e:
            ends.append(e)

    thread = threading.Thread(target=go)
    thread.start()
    try:
        federation.wait_for_mark("basel", ends)
        for party, service in federation.services.items():
            family = [psutil.Process(service.pid), *psutil.Process(service.pid).children(recursive=True)]
            family = [p for p in family if p.status() != psutil.STATUS_ZOMBIE]
            assert len(family) >= 3, party  # service, carrier, run; and perhaps the process that tries .h5ad files
            found = {c.laddr.port for p in family for c in p.net_connections() if c.status == "LISTEN"}
            assert found == ({federation.port} if party == "hub" else set()), party
            kinds = {c.type for p in family for c in p.net_connections()}
            assert kinds <= {socket.SOCK_STREAM}, party
    finally:
        federation.close()
        thread.join(30)
