"""Named users of a page, by token or by the hospital's log-in; several studies on one page; history, hook, metrics."""

import base64
import http.client
import http.server
import json
import re
import stat
import subprocess
import sys
import threading
import time

import pytest

from cloister.cells.demo import demo_sites
from cloister.cells.files import write_cells
from cloister.deploy import control_socket, notify, status
from cloister.deploy.approval.history import history
from cloister.deploy.kit import Kit
from cloister.deploy.logs import Teller
from cloister.deploy.notify import Notifier, read_hook, send
from cloister.deploy.provision import provision
from cloister.deploy.service import Service
from cloister.errors import ParameterError, RefusedError
from cloister.mpc.net.events import Event
from cloister.page import server, users
from cloister.page.server import TOKEN
from cloister.study import Party, Study

ANN, BEA, SSO = "Dr. A. Muster", "B. Beispiel", "c.esempio@hospital.example"


def add(kit, name, *, decides=True, sso=False):
    token = "" if sso else users.new_token()
    users.add(kit, name, token, decides=decides)
    return token


@pytest.fixture
def named(page):
    """A page with a user who decides and one who looks; their tokens."""
    return page, add(page.kit, ANN), add(page.kit, BEA, decides=False)


# ---- named users -----------------------------------------------------------------------------------------------------


def test_with_named_users_the_common_token_opens_nothing(named):
    page, ann, bea = named
    assert page.get()[0] == 401  # the common one
    for name, token in ((ANN, bea), (BEA, ann), ("Nobody", ann), (ANN, ""), ("", ann), (ANN, users.digest(ann))):
        assert page.get(**page.login(token, name))[0] == 401
    for name, token in ((ANN, ann), (BEA, bea)):
        assert page.get(**page.login(token, name))[0] == 200
    users.remove(page.kit, BEA)
    assert page.get(**page.login(bea, BEA))[0] == 401  # at once, without a restart


def test_a_token_is_stored_as_a_hash_for_the_owner_only(named):
    page, ann, _ = named
    file = page.kit.path / "local" / users.FILE
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert ann not in file.read_text()
    assert users.digest(ann) in file.read_text()


def test_a_decision_is_kept_under_the_name_that_logged_in(named):
    page, ann, _ = named
    login = page.login(ann, ANN)
    text = page.get(**login)[2]
    assert f"You decide as {ANN}." in text
    assert "Who decides" not in text
    assert page.post("/refuse", {"by": "Somebody Else"}, **login)[0] == 303
    with pytest.raises(RefusedError, match=re.escape(f"refused '{page.kit.study.name}' on ") + f".* by {ANN}"):
        page.kit.check_approved(page.kit.policy())


def test_who_may_only_look_sees_no_button_and_changes_nothing(named):
    page, _, bea = named
    login = page.login(bea, BEA)
    text = page.get(**login)[2]
    assert "<form" not in text
    for path in ("/approve", "/refuse", "/halt"):
        assert page.post(path, **login)[0] == 403
    assert not page.kit.approvals.path.exists()


def test_damaged_users_let_nobody_in(named):
    page, ann, _ = named
    file = page.kit.path / "local" / users.FILE
    for text in ("{", "[]", '{"x": 1}', json.dumps({ANN: {"name": BEA, "decides": True, "token": users.digest(ann)}})):
        file.write_text(text)
        assert page.get(**page.login(ann, ANN))[0] in (401, 409)
        assert page.get()[0] in (401, 409)
    for name in ("", "a:b", "two\nlines", "x" * 101):
        with pytest.raises(ParameterError, match="one line"):
            users.add(page.kit, name, "", decides=True)


# ---- the hospital's log-in -------------------------------------------------------------------------------------------


@pytest.fixture
def sso(page):
    """A page behind a log-in proxy; returns the page and what the proxy adds to a request."""
    page.kit.policy_file.write_text(
        page.kit.policy_file.read_text()
        + '\n[page]\nsso_header = "X-Remote-User"\nhosts = ["cloister.basel.example"]\n'
    )
    add(page.kit, SSO, sso=True)
    secret = page.kit.path / users.SECRET
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    yield page, {users.PROXY: secret.read_text().strip(), "X-Remote-User": SSO, "login": False}
    secret.unlink()


def test_a_user_of_the_log_in_proxy_decides_under_his_own_name(sso):
    page, proxy = sso
    host = {"Host": "cloister.basel.example", "Origin": "https://cloister.basel.example"}
    assert page.get(**proxy, **{"Host": "cloister.basel.example"})[0] == 200
    assert page.post("/refuse", **proxy, **host)[0] == 303
    (last,) = page.kit.approvals.history.decisions
    assert (last.what, last.by, last.how) == ("refused", SSO, "page")


def test_the_header_alone_opens_nothing(sso):
    """Any program on this machine can write it; only the proxy knows the secret."""
    page, proxy = sso
    for changed in (
        {users.PROXY: None},
        {users.PROXY: ""},
        {users.PROXY: "0" * 64},
        {"X-Remote-User": None},
        {"X-Remote-User": ANN},
        {"X-Remote-User": ""},
    ):
        assert page.get(**{**proxy, **changed})[0] == 401, changed
    ann = add(page.kit, ANN)
    assert page.get(**{**proxy, "X-Remote-User": ANN})[0] == 401  # who has a token comes by the token
    assert page.get(**page.login(ann, ANN))[0] == 200
    assert page.get(**page.login("", SSO))[0] == 401  # and nobody without one by an empty one
    secret = page.kit.path / users.SECRET
    kept = secret.read_text()
    secret.write_text("")
    assert page.get(**{**proxy, users.PROXY: ""})[0] == 401
    secret.write_text(kept)


def test_another_host_than_those_agreed_on_is_not_answered(sso):
    page, proxy = sso
    assert page.get(**proxy, Host="cloister.lugano.example")[0] == 421
    status, _, _ = page.post("/refuse", **proxy, Host="cloister.basel.example", Origin="https://evil.example")
    assert status == 403


def test_without_the_setting_the_headers_are_not_read(page):
    add(page.kit, SSO, sso=True)
    secret = page.kit.path / users.SECRET
    proxy = {users.PROXY: secret.read_text().strip(), "X-Remote-User": SSO, "login": False}
    assert page.get(**proxy)[0] == 401
    secret.unlink()


@pytest.mark.parametrize(
    "line", ['sso_header = "X Remote"', "sso_header = 3", 'hosts = "x"', 'hosts = ["a b"]', "x = 1"]
)
def test_a_wrong_setting_is_named(page, line):
    page.kit.policy_file.write_text(page.kit.policy_file.read_text() + f"\n[page]\n{line}\n")
    with pytest.raises(ParameterError, match=r"\[page\]"):
        page.kit.policy()


# ---- several studies -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    parties = {"hub": "coordinator", "basel": "site", "lugano": "site", "vienna": "site"}
    kits = []
    for name in ("first", "second"):
        network = {"host": "localhost", "port": 18784}
        study = Study(name, "bin-values", parties, governance={"purpose": f"why {name}"}, network=network)
        kits.append(provision(study, tmp_path_factory.mktemp(name) / "kits")["basel"])
        write_cells(demo_sites()["basel"], kits[-1] / "cells.h5ad")
    return [Kit.open(kit) for kit in kits]


@pytest.fixture
def several(two, page_of):
    with server.serve([kit.path for kit in two], 0) as served:
        yield page_of(Service(two[1]), served)
    for kit in two:
        for name in ("approvals.json", "decisions.jsonl", users.FILE):
            (kit.path / "local" / name).unlink(missing_ok=True)


def test_one_page_shows_all_studies_and_decides_each(several, two):
    text = several.get()[2]
    assert "2 studies, 2 waiting for a decision." in text
    for path, name in (("/study/1/", "first"), ("/study/2/", "second")):
        assert f'href="{path}"' in text
        assert f"why {name}" in several.get(path)[2]
    assert several.post("/study/2/refuse")[0] == 303
    assert [kit.approvals.path.exists() for kit in two] == [False, True]
    text = several.get()[2]
    assert "1 waiting" in text
    assert text.index("first") < text.index("second")  # what waits comes first
    for path in ("/study/3/", "/study/0/", "/study/99999/", "/study/1/study/2/", "/now", "/runs/x", "/study/"):
        assert several.get(path)[0] == 404
    assert several.post("/refuse")[0] == 404
    assert several.post("/study/1/refuse", {"study": two[1].study.digest.hex()})[0] == 409  # the other one was read


def test_a_user_sees_only_the_studies_he_is_named_in(several, two):
    ann, bea = add(two[0], ANN), add(two[1], BEA, decides=False)
    text = several.get(**several.login(ann, ANN))[2]
    assert "first" in text
    assert "second" not in text
    assert several.get("/study/2/", **several.login(ann, ANN))[0] == 404
    assert several.get("/study/2/now", **several.login(ann, ANN))[0] == 404
    assert several.post("/study/2/refuse", **several.login(ann, ANN))[0] == 404
    assert several.post("/study/2/refuse", **several.login(bea, BEA))[0] == 403
    assert 'study="second"' not in several.get("/metrics", **several.login(ann, ANN))[2]
    assert several.get()[0] == 401


def test_a_kit_that_cannot_be_opened_does_not_hide_the_others(several, two):
    file = two[0].path / "study.toml"
    kept = file.read_text()
    file.write_text("oops = [")
    try:
        status, _, text = several.get()
        assert status == 200
        assert "second" in text
        assert str(two[0].path) in text
    finally:
        file.write_text(kept)


@pytest.mark.slow
def test_the_commands_add_a_user_and_serve_the_page(two):
    command = [sys.executable, "-m", "cloister.cli.main", "page", *(str(kit.path) for kit in two)]
    said = subprocess.run([*command, "--add-user", ANN], capture_output=True, text=True, check=True).stdout
    token = re.search(r"token: ([0-9a-f]{64})", said)[1]
    with subprocess.Popen([*command, "--port", "0"], stderr=subprocess.PIPE, text=True) as process:
        try:
            line = process.stderr.readline()
            port = int(re.search(r"127\.0\.0\.1:(\d+)/; log in with your name and your own token", line)[1])
            link = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            word = base64.b64encode(f"{ANN}:{token}".encode()).decode()
            link.request("GET", "/", headers={"Authorization": f"Basic {word}"})
            assert "2 studies" in link.getresponse().read().decode()
        finally:
            process.terminate()
            rest = process.communicate(timeout=60)[1]
    assert token not in line + rest
    assert not (two[0].path / TOKEN).exists()
    subprocess.run([*command, "--remove-user", ANN], check=True, capture_output=True)
    assert users.load(two[0].path) == {}


# ---- history ---------------------------------------------------------------------------------------------------------


def test_every_decision_stays_in_the_history(page):
    page.kit.refuse("Bea")
    page.kit.approve("Ann")
    page.kit.withdraw("Cleo")
    found = page.kit.approvals.history
    assert found.whole
    assert [(d.what, d.by, d.how) for d in found.decisions] == [
        ("refused", "Bea", "command"),
        ("approved", "Ann", "command"),
        ("withdrawn", "Cleo", "command"),
    ]
    assert "480 cells" in found.decisions[1].on
    text = page.get()[2]
    assert text.index("by Cleo") < text.index("by Ann,") < text.index("by Bea")
    assert 'class="box bad"' not in text


@pytest.mark.parametrize("change", ["edit", "remove", "torn", "nonsense"])
def test_a_changed_history_is_shown_as_one(page, change):
    for who in ("Ann", "Bea", "Cleo"):
        page.kit.approvals.add(page.kit.study, who, None, {})
        page.kit.approvals.withdraw(page.kit.study, who)
    file = page.kit.path / "local" / "decisions.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    changed = {
        "edit": [lines[0], lines[1].replace("Ann", "Eve"), *lines[2:]],
        "remove": lines[1:],
        "torn": [*lines[:-1], lines[-1][:30]],
        "nonsense": [*lines, "[1, 2]\n"],
    }
    file.write_text("".join(changed[change]))
    assert not history(file).whole
    assert "was changed or removed" in page.get()[2]


def test_what_is_approved_is_shown_with_cells_file_and_terms(page):
    first = page.get()[2]
    assert first.index("Legal basis") < first.index("Results are kept") < first.index("In short")
    assert "none is named" in first  # no legal basis in this study
    end = time.monotonic() + 120
    while "being counted" in (text := page.get()[2]):
        assert time.monotonic() < end
        time.sleep(0.2)
    for word in ("480 cells", "cells.h5ad", "Consents", "Minimum group", "10 cells and 3 donors", "Runs allowed"):
        assert word in text
    kept = page.kit.policy_file.read_text()
    page.kit.policy_file.write_text(kept.replace("consent = []", 'consent = ["open-model"]'))
    assert "kits are delivered without any: open-model" in page.get()[2]
    page.kit.policy_file.write_text(kept)
    page.kit.approve("Ann")
    page.kit.policy_file.write_text(page.kit.policy_file.read_text().replace("study = 20", "study = 30"))
    assert "Runs allowed, when it was approved" in page.get()[2]


def test_a_party_that_connects_twice_is_shown(hub):
    hub.service.twice["basel"] = (time.time(), "192.0.2.1:5 and 192.0.2.2:6")
    try:
        text = hub.get()[2]
    finally:
        hub.service.twice.clear()
    assert "basel was connected twice" in text
    assert "192.0.2.1:5 and 192.0.2.2:6" in text


# ---- the hook --------------------------------------------------------------------------------------------------------


def test_a_waiting_study_calls_the_command_once(page, tmp_path):
    told = tmp_path / "told"
    script = tmp_path / "hook"
    script.write_text(f'#!/bin/sh\ncat >> {told}\necho "$1" >> {told}\n')
    script.chmod(0o700)
    page.kit.policy_file.write_text(
        f'notify = ["{script}", "one word; not a shell"]\n' + page.kit.policy_file.read_text()
    )
    service = Service(page.kit)
    service.ending.set()  # one look
    for _ in range(2):
        service._watch_studies()
    end = time.monotonic() + 30
    while not (told.exists() and told.read_text().endswith("shell\n")):
        assert time.monotonic() < end
        time.sleep(0.05)
    time.sleep(0.3)
    raw, word = told.read_text().split("\n")[:2] if "\n" in told.read_text() else (told.read_text(), "")
    event = json.loads(raw.removesuffix("one word; not a shell"))
    assert (event["event"], event["party"], event["digest"]) == ("waiting", "basel", page.kit.study.digest.hex())
    assert told.read_text().count("waiting") >= 1
    assert told.read_text().count('"event"') == 1
    assert word == ""


def test_a_webhook_gets_json_and_a_redirect_is_not_followed():
    heard = []

    class Hook(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            heard.append((self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"])))))
            self.send_response(302 if self.path == "/moved" else 200)
            self.send_header("Location", "http://127.0.0.1:1/")
            self.end_headers()

        def log_message(self, *_):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Hook) as hook:
        threading.Thread(target=hook.serve_forever, daemon=True).start()
        base = f"http://127.0.0.1:{hook.server_address[1]}"
        assert send(f"{base}/secret-path", {"event": "waiting"}) == ""
        assert send(f"{base}/moved", {"event": "waiting"}) == "127.0.0.1 answered 302"
        hook.shutdown()
    assert heard[0] == ("/secret-path", {"event": "waiting"})
    why = send("http://127.0.0.1:9/secret-path", {"event": "waiting"})
    assert "127.0.0.1" in why
    assert "secret" not in why


def test_a_hook_that_fails_or_hangs_stops_nothing(monkeypatch, caplog):
    monkeypatch.setattr(notify, "SECONDS", 0.3)
    assert send(("/bin/sleep", "60"), {}) == "/bin/sleep did not end within 0.3 s"
    assert send(("/bin/false",), {}) == "/bin/false ended with 1"
    assert send(("/no/such",), {}).startswith("/no/such: No such file")
    notifier = Notifier()
    notifier.post("", {"event": "waiting"})
    assert notifier._thread is None
    for wrong in ("ftp://x", "relative", ["relative"], [], [1], {"a": 1}, "https://"):
        with pytest.raises(ParameterError, match="'notify' must be"):
            read_hook(wrong, "site.toml")


# ---- status and metrics ----------------------------------------------------------------------------------------------


def test_status_without_a_service_says_how_to_start_it(page):
    shown = dict(status.lines(page.kit, control_socket.status_of(page.kit)))
    assert "not running; start it: cloister site" in shown["service"]
    assert shown["study"] == "waits"


def test_metrics_are_what_prometheus_reads(page):
    run = bytes.fromhex("3f2a9c1e" + "0" * 24)
    page.service.runs[run] = None
    page.service.connected["hub"] = "192.0.2.17:8002"
    tell = Teller(page.kit, run.hex())
    tell(Event(Party("basel"), "sent", "pooled_quantiles", "L2", "pooled_quantiles.Cut", "hub", 10, 1_200_000, 7))
    try:
        code, headers, text = page.get("/metrics")
    finally:
        del page.service.runs[run]
        page.service.connected.clear()
        tell.end()
    assert code == 200
    assert headers["Content-Type"].startswith("text/plain; version=0.0.4")
    found = {}
    for name, inside, value in re.findall(
        r'^(cloister_\w+)\{((?:\w+="(?:[^"\\]|\\.)*",?)*)\} (\S+)$', text, re.MULTILINE
    ):
        labels = dict(re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', inside))
        found[(name, *(v for k, v in sorted(labels.items()) if k not in ("party", "study")))] = float(value)
    assert len(found) == len([line for line in text.splitlines() if not line.startswith("#")])
    assert found["cloister_up",] == 1
    assert found["cloister_connected", "hub"] == 1
    assert found["cloister_run_rounds", "3f2a9c1e"] == 7
    assert found["cloister_runs", "aborted"] == 1
    assert found["cloister_runs_left", "study"] == 20
    assert found["cloister_study_waiting",] == 1
    assert found["cloister_certificate_end_seconds",] > time.time()


def test_metrics_of_several_studies_name_each_metric_once(several):
    text = several.get("/metrics")[2]
    kinds = re.findall(r"^# TYPE (\S+)", text, re.MULTILINE)
    assert len(kinds) == len(set(kinds))
    assert text.count("cloister_up{") == 2
    assert several.get("/metrics", login=False)[0] == 401
