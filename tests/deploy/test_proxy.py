"""A site behind a proxy: the tunnel, what the sandbox then allows, errors by name, and whole runs."""

from __future__ import annotations

import base64
import re
import shutil
import socket
import tempfile
import time
from pathlib import Path
from urllib.parse import quote

import chat
import pytest
from federation import PARTIES, Federation
from proxies import PASSWORD, PLAIN, SQUID_HELPERS, USER, pass_through, serving, small_proxy, squid, tinyproxy
from test_sandbox import goods, steal  # noqa: F401

from cloister.cli.doctor import _coordinator_answers
from cloister.deploy import ready, sandbox
from cloister.deploy.kit import Kit
from cloister.deploy.provision import provision
from cloister.deploy.proxy import Proxy, ProxyError, open_tunnel
from cloister.errors import DataError, ParameterError
from cloister.study import Study

pytest.importorskip("nvflare")
pytestmark = pytest.mark.skipif(sandbox.why_not() is not None, reason=str(sandbox.why_not()))
chat.register()
LINE = f"http://{USER}:{quote(PASSWORD, safe='')}@127.0.0.1"
STUDY = Study("s", "bin-values", {"hub": "coordinator", "basel": "site"}, network={"host": "localhost", "port": 443})


def with_line(kit: Path, line: str) -> Path:
    """Put a line at the beginning of a kit's site.toml."""
    file = kit / "local" / "site.toml"
    old = "\n".join(x for x in file.read_text().splitlines() if not x.startswith(line.partition("=")[0]))
    file.write_text(f"{line}\n{old}\n")
    file.chmod(0o600)
    return file


# ---- the line in site.toml -------------------------------------------------------------------------------------------


def test_a_proxy_is_read_and_its_password_is_never_shown():
    found = Proxy.parse(f"{LINE}:3128")
    assert (found.host, found.port) == ("127.0.0.1", 3128)
    assert found.authorization == "Basic " + base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
    assert Proxy.parse("http://proxy:3128/").authorization == ""
    shown = f"{found} {found!r}"
    assert USER not in shown
    assert found.authorization not in shown


@pytest.mark.parametrize(
    "line",
    [
        "proxy:3128",
        "socks5://proxy:1080",
        "https://proxy:3128",
        "http://proxy",
        "http://proxy:0",
        "http://proxy:99999",
        "http://proxy:3128/path",
        f"http://{USER}%0d%0aX:{PASSWORD}@proxy:3128".replace(" ", "%20").replace("/", "%2F"),
        "http://:nobody@proxy:3128",
    ],
)
def test_another_line_is_refused_without_repeating_it(line):
    with pytest.raises(ParameterError, match="proxy must be as") as e:
        Proxy.parse(line)
    assert "s3cret" not in str(e.value)


def test_a_password_that_others_can_read_is_refused(tmp_path):
    kits = provision(STUDY, tmp_path / "kits")
    file = with_line(kits["basel"], f'proxy = "{LINE}:3128"')
    kit = Kit.open(kits["basel"])
    policy = kit.policy()
    assert policy.proxy is not None
    assert "s3cret" not in f"{policy} {kit.terms(policy)}"
    assert policy.proxy.authorization not in f"{policy} {kit.terms(policy)}"
    file.chmod(0o644)
    with pytest.raises(DataError, match="contains a password and can be read by other users.*chmod 600") as e:
        kit.policy()
    assert "s3cret" not in str(e.value)
    with_line(kits["hub"], 'proxy = "http://proxy:3128"')
    with pytest.raises(ParameterError, match="'proxy' is of no use here, since hub opens no connection"):
        Kit.open(kits["hub"]).policy()


# ---- the tunnel ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"HTTP/1.1 407 Proxy Authentication Required\r\n\r\n", "answered 407 .* requires a user name and a password"),
        (b"HTTP/1.1 403 Forbidden\r\n\r\n", "answered 403 .* have it allow CONNECT"),
        (b"HTTP/1.0 502 x\r\n\r\n", "answered 502 .* cannot reach the coordinator"),
        (b"HTTP/1.0 302 x\r\nLocation: http://evil\r\n\r\n", "answered 302 .* opens no tunnel"),
        (b"SSH-2.0-OpenSSH_9.6\r\n\r\n", "no valid answer"),
        (b"HTTP/1.1 200 \x1b[31mOK\r\nX: " + bytes(9000), "no valid answer"),
        (b"", "did not answer within 0.5 s"),
    ],
)
def test_a_proxy_that_opens_no_tunnel_is_named(answer, words):
    with small_proxy(answer=answer) as heard, socket.create_connection(("127.0.0.1", heard.port)) as sock:
        with pytest.raises(ProxyError, match=words) as e:
            open_tunnel(sock, "hub.example.org", 443, "Basic c2VjcmV0", 0.5)
        assert "c2VjcmV0" not in str(e.value)
        assert str(e.value).isprintable()
    lines = [b"CONNECT hub.example.org:443 HTTP/1.1", b"Host: hub.example.org:443"]
    assert heard.heads == [b"\r\n".join([*lines, b"Proxy-Authorization: Basic c2VjcmV0", b"", b""])]


def test_a_proxy_that_sends_a_byte_now_and_then_does_not_hold_the_carrier():
    def drip(client):
        client.recv(1 << 12)
        while True:
            client.sendall(b"H")
            time.sleep(0.1)

    with serving(drip) as port, socket.create_connection(("127.0.0.1", port)) as sock, pytest.raises(ProxyError):
        open_tunnel(sock, "hub", 443, "", 0.5)


def test_doctor_tries_the_way_through_the_proxy():
    with small_proxy(auth=True) as heard, socket.create_server(("127.0.0.1", 0)) as there:
        port = there.getsockname()[1]
        good, bad = Proxy.parse(f"{LINE}:{heard.port}"), Proxy.parse(f"http://127.0.0.1:{heard.port}")
        assert _coordinator_answers("127.0.0.1", port, good).state == "ok"
        found = _coordinator_answers("127.0.0.1", port, bad)
    assert (found.state, "answered 407" in found.detail) == ("note", True)


# ---- the sandbox -----------------------------------------------------------------------------------------------------


def test_behind_a_proxy_the_carrier_reaches_the_proxys_port_and_not_the_coordinators(goods, monkeypatch):  # noqa: F811
    """The thief tries `other_port`, where something listens: here the coordinator's own port."""
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        port = proxy.getsockname()[1]
        said = steal(goods, monkeypatch, listen=False, plan={"port": goods["other_port"], "connect": port})
        assert said["connect to another port"].startswith("refused")
    with small_proxy() as heard:
        plan = {"port": heard.port, "connect": goods["other_port"]}
        said = steal(goods, monkeypatch, listen=False, plan=plan)
        assert said["connect to another port"].startswith("WORKED")  # the control: that port is the one allowed


# ---- whole runs ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    made = Federation(tmp_path_factory.mktemp("proxy"))
    made.agree()
    made.start(*(p for p in PARTIES if p != "basel"))
    yield made
    made.close()


def run_through(federation, line):
    """A run in which basel reaches the coordinator by this proxy; returns what basel has written."""
    with_line(federation.kits["basel"], f'proxy = "{line}"')
    federation.start("basel")
    try:
        ended = federation.run()
        assert ended.status == "done"
        assert federation.ended("basel").status == "done"
    finally:
        federation.stop("basel")
    kit = federation.kits["basel"]
    return "".join(p.read_text(errors="replace") for p in (kit / "log.txt", *kit.rglob("*.json"), *kit.rglob("*.out")))


def test_a_run_through_a_proxy_that_wants_a_password(federation):
    with small_proxy(auth=True) as heard:
        written = run_through(federation, f"{LINE}:{heard.port}")
    target = f"CONNECT localhost:{federation.port} HTTP/1.1".encode()
    assert heard.heads
    assert all(head.startswith(target) for head in heard.heads)
    log = (federation.kits["hub"] / "log.txt").read_text()
    assert re.search(r"basel is connected, from 127\.0\.0\.1:\d+", log)  # the proxy's address, in fact
    for secret in ("s3cret", base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()):
        assert secret not in written


def test_a_wrong_password_is_named_in_the_log(federation):
    log = federation.kits["basel"] / "log.txt"
    with small_proxy(auth=True) as heard:
        with_line(federation.kits["basel"], f'proxy = "http://{USER}:s3cret-wrong@127.0.0.1:{heard.port}"')
        federation.start("basel")
        federation.wait_until(lambda: "answered 407" in log.read_text())
        federation.stop("basel")
    assert "s3cret" not in log.read_text()
    assert "write them as http://user:password@host:port" in log.read_text()


@pytest.mark.skipif(shutil.which("tinyproxy") is None, reason="tinyproxy is not installed")
def test_a_run_through_tinyproxy(federation, tmp_path):
    with tinyproxy(tmp_path, federation.port) as port:
        assert "s3cret" not in run_through(federation, f"http://{USER}:{PLAIN}@127.0.0.1:{port}")


@pytest.mark.skipif(shutil.which("squid") is None, reason="squid is not installed")
@pytest.mark.skipif(not any(p.exists() for p in SQUID_HELPERS), reason="squid has no helper for basic authentication")
def test_a_run_through_squid(federation):
    folder = Path(tempfile.mkdtemp(prefix="cloister-squid-"))
    try:
        with squid(folder, federation.port) as port:
            assert "s3cret" not in run_through(federation, f"{LINE}:{port}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def test_a_run_by_a_pass_through_with_the_coordinator_at_another_port(tmp_path):
    """Port 443 outside, another one inside: TLS is passed on by its server name, and not broken open."""
    made = Federation(tmp_path)
    inside = made.port
    with_line(made.kits["hub"], f'listen = "127.0.0.1:{inside}"')
    with pass_through({"localhost": inside}) as heard:
        made.agree(network={"host": "localhost", "port": heard.port})
        try:
            made.start(*PARTIES)
            assert made.run().status == "done"
        finally:
            made.close()
    assert set(heard.heads) == {b"localhost"}


def test_a_port_below_1024_without_the_privilege_says_what_to_do(tmp_path, monkeypatch):
    kit = Kit.open(provision(STUDY, tmp_path / "kits")["hub"])

    def denied(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(sandbox, "open_listener", denied)
    with pytest.raises(Exception, match=r"port 443 cannot be opened: ports below 1024.*listen = "):
        ready.check_port(kit)
