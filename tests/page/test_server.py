"""Who may look at a party's page, and who may change something by it: nobody but its owner, on this machine."""

import contextlib
import os
import re
import socket
import stat
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from cloister.deploy import sandbox
from cloister.deploy.approval import halting
from cloister.deploy.logs import Teller, standing_of
from cloister.errors import RefusedError, UsageError
from cloister.mpc.net.events import Event
from cloister.page import server, view
from cloister.page.server import TOKEN
from cloister.page.state import State
from cloister.rehearsal.progress import Standing
from cloister.study import Party, Step, Study

RUN = "20260131T120000Z-3f2a9c1e"
CHANGES = ("/approve", "/refuse", "/halt")


def untouched(page):
    return not page.kit.approvals.path.exists()


# ---- who may look ----------------------------------------------------------------------------------------------------


def test_it_listens_on_this_machine_only(page):
    assert page.served.socket.getsockname()[0] == "127.0.0.1"
    assert page.served.address == f"http://127.0.0.1:{page.port}/"


@pytest.mark.parametrize("path", ["/", "/now", "/style.css", "/page.js", f"/runs/{RUN}", "/nothing"])
def test_without_the_token_nothing_is_shown(page, path):
    right = page.served.token
    wrong = ("", "0" * 64, right[:-1], right * 2)
    for login in ({"login": False}, *(page.login(token) for token in wrong)):
        status, headers, text = page.get(path, **login)
        assert status == 401
        assert headers["WWW-Authenticate"].startswith("Basic ")
        assert right not in text
        assert "basel" not in text
    for odd in ("Basic", "Basic !!!", f"Bearer {right}", f"Basic {right}", "Basic w7/Dvw=="):
        assert page.get(path, login=False, Authorization=odd)[0] == 401
    assert page.get(path)[0] == (404 if path == "/nothing" else 200)


def test_the_token_is_in_a_file_for_its_owner_only_and_new_at_every_start(page):
    """A file that others could read, or a link that somebody else laid there, does not stay."""
    file, elsewhere = page.kit.path / TOKEN, page.kit.path / "elsewhere"
    elsewhere.write_text("known\n")
    file.unlink(missing_ok=True)
    file.symlink_to(elsewhere)
    before = os.umask(0)  # the most careless one
    try:
        with server.serve(page.service, 0) as other:
            assert not file.is_symlink()
            assert file.read_text().strip() == other.token
            assert stat.S_IMODE(file.stat().st_mode) == 0o600
            assert re.fullmatch(r"[0-9a-f]{64}", other.token)
            assert other.token not in (page.served.token, other.form)
            assert elsewhere.read_text() == "known\n"
    finally:
        os.umask(before)
        elsewhere.unlink()
    assert not file.exists()  # it goes with the page
    assert page.get(**page.login(other.token))[0] == 401


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:{port}", "127.0.0.1.evil.example", "localhost.evil:80", "10.0.0.7", "", None]
)
def test_another_host_is_not_answered_even_with_the_token(page, host):
    """A name of an attacker that points at 127.0.0.1 makes his page and ours one origin; but for this."""
    said = {"Host": host.format(port=page.port) if host else host}
    status, _, text = page.get(**said)
    assert status == 421
    assert "basel" not in text
    assert page.post("/halt", **said)[0] == 421
    assert page.post("/refuse", **said)[0] == 421
    assert untouched(page)


def test_a_tunnel_to_another_port_is_answered(page):
    for host in ("localhost", "localhost:9000", "127.0.0.1:80"):
        assert page.get(Host=host)[0] == 200


def test_two_hosts_are_none(page):
    link = socket.create_connection(("127.0.0.1", page.port), timeout=30)
    login = page.login()["Authorization"]
    with link:
        link.sendall(f"GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil\r\nAuthorization: {login}\r\n\r\n".encode())
        assert b" 421 " in link.recv(100)


def test_what_stands_in_the_answer_keeps_other_pages_out(page):
    for path in ("/", f"/runs/{RUN}", f"/runs/{RUN}/report", f"/runs/{RUN}/receipt/0", "/nothing", "/page.js"):
        headers = page.get(path)[1]
        policy = headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "http" not in policy
        assert headers["Cache-Control"] == "no-store"
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
        assert "Access-Control-Allow-Origin" not in headers
        assert "Python" not in headers["Server"]


@pytest.mark.parametrize(
    "path",
    [
        "/../local/site.toml",
        "/runs/../identity.key",
        "/runs/..",
        "/runs/../../identity.key",
        "/runs/%2e%2e/identity.key",
        "/runs/..%2f..%2fidentity.key",
        f"/runs/{RUN}/../../../identity.key",
        f"/runs/{RUN}/receipt/../../../identity.key",
        f"/runs/{RUN}/receipt/-1",
        f"/runs/{RUN}/receipt/9",
        f"/runs/{RUN}/outcome.json",
        f"/runs/{RUN}\n",
        "/runs/",
        "/runs//etc/passwd",
        "/etc/passwd",
        "/identity.key",
        f"/{TOKEN}",
        "http://127.0.0.1/",
    ],
)
def test_no_path_leads_to_another_file(page, path):
    if "\n" in path:
        path = path.replace("\n", "%0a")
    status, _, text = page.get(path)
    assert status in (400, 404)
    key = (page.kit.path / "identity.key").read_text()
    assert key.strip()[:40] not in text
    assert "[approve]" not in text


def test_a_link_in_the_results_folder_is_not_followed(page):
    outside = page.kit.path / "local"
    (outside / "outcome.json").write_text((page.kit.path / "results" / RUN / "outcome.json").read_text())
    link = page.kit.path / "results" / "20260131T130000Z-aaaaaaaa"
    link.symlink_to(outside)
    receipt = page.kit.path / "results" / RUN / "01-x"
    receipt.symlink_to(outside)
    (outside / "basel.receipt.json").write_text("{}")
    try:
        assert page.get(f"/runs/{link.name}")[0] == 404
        assert link.name not in page.get()[2]
        assert page.get(f"/runs/{RUN}/receipt/1")[0] == 404
    finally:
        link.unlink()
        receipt.unlink()
        (outside / "outcome.json").unlink()
        (outside / "basel.receipt.json").unlink()


# ---- who may change something ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", CHANGES)
def test_opening_a_link_changes_nothing(page, path):
    page.kit.refuse("Bea")
    before = page.kit.approvals.path.read_bytes()
    for method in ("GET", "HEAD", "PUT", "DELETE", "OPTIONS", "PATCH"):
        query = f"?form={page.served.form}&study={page.kit.study.digest.hex()}&read=yes&by=x"
        status, headers, _ = page.ask(method, path + query)
        assert status in (405, 501)
        assert method != "GET" or headers["Allow"] == "POST"
    assert page.kit.approvals.path.read_bytes() == before


@pytest.mark.parametrize("path", CHANGES)
def test_another_page_cannot_post_in_the_owners_name(page, path):
    """The browser adds the log-in by itself: what another page lacks is the form's secret, and the right origin."""
    assert page.post(path, {"form": None})[0] == 403
    assert page.post(path, {"form": "0" * 64})[0] == 403
    assert page.post(path, {"form": page.served.token})[0] == 403
    for origin in ("http://evil.example", "null", f"https://127.0.0.1:{page.port}", "http://127.0.0.1:9", ""):
        assert page.post(path, Origin=origin)[0] == 403
    for site in ("cross-site", "same-site"):
        assert page.post(path, Sec_Fetch_Site=site)[0] == 403
    assert page.post(path, login=False)[0] == 401
    assert untouched(page)


@pytest.mark.parametrize("path", CHANGES)
def test_what_is_no_form_is_not_read(page, path):
    for body, headers in (
        (b'{"form": 1}', {"Content-Type": "application/json"}),
        (b"form=x", {"Content-Type": "text/plain"}),
        (b"form=x", {"Content-Length": None}),
        (b"form=x", {"Content-Length": "-1"}),
        (b"x" * 9000, {}),
        (b"form=%ff\xff", {}),
        (b"&".join(b"a=b" for _ in range(50)), {}),
    ):
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it may not read on
            assert page.post(path, body=body, **headers)[0] == 400
    assert untouched(page)


def test_only_the_three_forms_are_taken(page):
    for path in ("/", "/now", f"/runs/{RUN}", "/_alone", "/__init__", "/approve/"):
        assert page.post(path)[0] == 405


# ---- decisions -------------------------------------------------------------------------------------------------------


def test_approve_and_halt_by_click_are_what_they_are_by_command(page):
    assert "waits for your approval" in page.get()[2]
    status, _, text = page.post("/approve", {"read": None})
    assert status == 409
    assert "have read who learns what" in text
    assert untouched(page)
    status, headers, _ = page.post("/approve", Origin=f"http://127.0.0.1:{page.port}", Sec_Fetch_Site="same-origin")
    assert (status, headers["Location"]) == (303, "/?done=approved")
    entry = page.kit.approvals.current(page.kit.study)
    assert (entry.by, entry.data.cells) == ("Dr. A. Muster", 480)
    page.kit.check_approved(page.kit.policy())
    text = page.get("/?done=approved")[2]
    assert "The study is approved." in text
    assert "Approved by Dr. A. Muster" in text
    assert 'formaction="/refuse"' not in text
    status, _, text = page.post("/refuse")
    assert status == 409
    assert "cloister halt" in text
    assert page.post("/halt")[0] == 303
    with pytest.raises(RefusedError, match=r"withdrew .* by Dr\. A\. Muster"):
        page.kit.check_approved(page.kit.policy())
    assert "approval withdrawn" in page.get()[2]


@pytest.mark.slow
def test_the_command_serves_it_until_it_is_stopped(page):
    """With the service's own process: halt goes through it, and the token is not in what it prints."""
    if reason := sandbox.why_not():
        pytest.skip(reason)
    command = [sys.executable, "-m", "cloister.cli.main", "site", str(page.kit.path), "--page", "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as party:
        try:
            said = []
            while not (found := re.search(r"page: http://127\.0\.0\.1:(\d+)/; ", "".join(said))):
                said.append(party.stderr.readline())
                assert said[-1], said
            token = (page.kit.path / TOKEN).read_text().strip()
            page.port = int(found[1])
            login = page.login(token)
            status, _, text = page.get(**login)
            assert status == 200
            form = re.search(r'name="form" value="([0-9a-f]{64})"', text)[1]
            assert page.post("/halt", {"form": form}, **login)[0] == 303
            assert page.get("/now", **page.login())[0] == 401  # the token of another page
        finally:
            party.terminate()
            said.append(party.stderr.read())
    assert token not in "".join(said)
    assert form not in "".join(said)
    assert "halted: every run here is stopped" in "".join(said)
    assert not (page.kit.path / TOKEN).exists()


def test_a_refusal_by_click_is_kept(page):
    assert page.post("/refuse", {"read": None})[0] == 303
    with pytest.raises(RefusedError, match=r"'basel' refused .* by Dr\. A\. Muster"):
        page.kit.check_approved(page.kit.policy())
    assert "Refused on " in page.get()[2]


def test_what_was_not_read_is_not_approved(page):
    status, _, text = page.post("/approve", {"study": "0" * 64})
    assert status == 409
    assert "has changed since it was read" in text
    for by in ("two\nlines", "x" * 201):
        assert page.post("/approve", {"by": by})[0] == 409
    assert untouched(page)


def test_a_mistake_in_the_kit_is_shown_and_nothing_is_approved(page):
    page.kit.policy_file.write_text(page.kit.policy_file.read_text().replace("cells.h5ad", "gone.h5ad"))
    status, _, text = page.post("/approve", {"by": "--help"})  # a name, not an option
    assert status == 409
    assert "nothing was approved" in text
    assert "gone.h5ad" in text
    page.kit.policy_file.write_text("oops = [")
    status, _, text = page.get()
    assert status == 200
    assert "cannot be read as TOML" in text
    assert untouched(page)


def test_a_second_decision_waits_for_the_first(page):
    page.served.decisions._one.acquire()
    status, _, text = page.post("/refuse")
    page.served.decisions._one.release()
    assert status == 409
    assert "another decision" in text
    assert untouched(page)


def test_halt_stops_runs_also_if_the_approval_cannot_be_withdrawn(page, monkeypatch):
    stopped = []
    monkeypatch.setattr(page.service, "halt", lambda: stopped.append(1) or 2)
    (page.kit.path / "local" / "approvals.json").write_text("{")
    status, _, text = page.post("/halt")
    assert status == 409
    assert "2 run(s) stopped, but the approval could not be withdrawn" in text
    assert stopped == [1]


def test_halt_is_told_to_the_service_that_runs(page, monkeypatch):
    orders = []
    monkeypatch.setattr(halting, "is_running", lambda kit: True)
    monkeypatch.setattr(halting, "give_order", lambda kit, order: orders.append(order) or b'{"halted": 1}')
    assert page.post("/halt", {"by": "two\nlines"})[0] == 303  # no name is a reason not to stop
    assert orders == [b"halt\n"]


def test_a_coordinator_sees_runs_and_approves_nothing(hub):
    status, _, text = hub.get()
    assert status == 200
    assert "the other parties approve the studies of this one" in text
    assert 'action="/approve"' not in text
    assert 'action="/halt"' in text
    for path in ("/approve", "/refuse"):
        status, _, text = hub.post(path)
        assert status == 409
        assert "the other parties decide on its studies" in text
    assert untouched(hub)


# ---- what is shown ---------------------------------------------------------------------------------------------------


def test_texts_of_the_study_are_texts(page):
    page.kit.refuse("<b>Bea</b>")
    for path in ("/", "/?done=<b>x</b>", f"/runs/{RUN}", f"/runs/{RUN}/report", "/<b>x</b>"):
        text = page.get(path, **page.login(name='"><b>x</b>'))[2]
        assert "<b>" not in text
        assert "<img src=x" not in text
        assert "<script>" not in text
    home = page.get()[2]
    assert "three &lt;script&gt;" in home
    assert re.findall(r"<script[^>]*>", home) == ['<script src="/page.js" defer>']


def test_what_waits_is_shown_with_who_learns_what(page):
    text = page.get()[2]
    assert "In short" in text
    assert "bin-values, mode hardened" in text
    assert page.kit.study.digest.hex() in text
    assert "EK 7" in text
    assert 'value="Dr. A. Muster"' in text


def test_of_a_study_of_several_steps_each_is_shown():
    steps = (Step("bin-values"), Step("find-outliers", name="odd-cells", options={"n_trees": 50}))
    parties = {"hub": "coordinator", "basel": "site", "lugano": "site"}
    kit = SimpleNamespace(study=Study("two", "", parties, steps=steps), me="basel", role="site")
    text = view.home(State(kit, {}, [], None, [], []), "secret", "Ann")
    assert text.count("<h4>In short</h4>") == 2
    assert "Options of odd-cells" in text
    assert "n_trees = 50" in text
    assert text.index("bin-values, mode hardened") < text.index("find-outliers, mode hardened")


def test_what_runs_now_is_told_as_it_goes_on(page):
    assert page.get("/now")[2] == "<p>Nothing is running.</p>"
    run = bytes.fromhex("3f2a9c1e" + "0" * 24)
    before = page.get("/now")[1]["X-State"]
    page.service.runs[run] = None
    try:
        assert "It begins." in page.get("/now")[2]
        tell = Teller(page.kit, run.hex())
        tell.begin(page.kit.study.parts[0])
        tell(Event(Party("basel"), "sent", "pooled_quantiles", "L2", "pooled_quantiles.Cut", "hub", 10, 1_200_000, 7))
        status, headers, text = page.get("/now")
        assert status == 200
        for word in ("Run 3f2a9c1e", "pooled_quantiles L2 Cut", "binning values, round 7<", "1.2 MB"):
            assert word in text
        assert "left" not in text  # no guess at the time
        assert headers["X-State"] != before
        tell.end()
    finally:
        del page.service.runs[run]
    assert page.get("/now")[1]["X-State"] == before


def test_how_far_a_run_is_in_words():
    now = Standing("pooled_pca L5 Round", 30, 100, "step", 124, 2_000_000, 90.0, "step 2 of 3 (integrate)")
    now.task, now.about = "integrating cells", 146
    text = view.now({"ab" * 16: now})
    assert "step 2 of 3 (integrate), integrating cells, round 124 of about 146<" in text
    assert '<progress max="146" value="124" aria-label="How far run abababab is">' in text
    assert "90 s" not in text
    now.about = 100  # it takes longer than the last one: nothing is claimed
    assert "integrating cells, round 124<" in view.now({"ab" * 16: now})
    assert "<progress" not in view.now({"ab" * 16: now})
    now.about = 0  # the first run of a study: only what the protocol itself counts
    assert "integrating cells, round 124, iteration 30 of 100<" in view.now({"ab" * 16: now})


def test_a_finished_run_tells_the_next_how_many_rounds_there_are(page):
    part = page.kit.study.parts[0]
    first = Teller(page.kit, "ab" * 16)
    first.begin(part)
    first.finish(146)
    (page.kit.path / "runs").mkdir(exist_ok=True)
    tell = Teller(page.kit, "cd" * 16)
    tell.begin(part)
    tell(Event(Party("basel"), "sent", "pooled_quantiles", "L2", "pooled_quantiles.Cut", "hub", 10, 1_200_000, 7))
    assert standing_of(page.kit, "cd" * 16).words == "binning values, round 7 of about 146"
    tell.end()
    (page.kit.path / "local" / "rounds.json").unlink()


def test_runs_and_receipts_so_far(page):
    home = page.get()[2]
    assert f'href="/runs/{RUN}"' in home
    assert "2026-01-31 12:00:00 UTC" in home
    text = page.get(f"/runs/{RUN}")[2]
    assert "its process ended before the run did" in text
    assert "The hash chain is complete and signed with this kit&#x27;s key." in text
    assert "secure_sum.Keys" in text
    _, headers, receipt = page.get(f"/runs/{RUN}/receipt/0")
    assert headers.get_content_type() == "application/json"
    file = page.kit.path / "results" / RUN / "basel.receipt.json"
    assert receipt == file.read_text()
    assert "This run was aborted" in page.get(f"/runs/{RUN}/report")[2]
    try:
        file.write_text(receipt.replace('"bytes": 100', '"bytes": 101'))
        text = page.get(f"/runs/{RUN}")[2]
        assert "The hash chain is complete" not in text
        assert 'class="box bad"' in text
    finally:
        file.write_text(receipt)


def test_what_is_left_is_counted_as_the_kit_counts(page):
    page.kit.approve("Ann")
    page.kit.count_run(page.kit.policy())
    text = page.get()[2]
    rows = re.findall(r'<th scope="row">([^<]*)</th>((?:<td[^>]*>[^<]*</td>)+)', text)
    cells = {what: re.findall(r"<td[^>]*>([^<]*)<", rest) for what, rest in rows}
    assert cells["runs of this study"] == ["19", "1", "20"]
    assert cells["runs on these cells, all studies"] == ["99", "1", "100"]
    assert cells["workflows computed on these cells, all studies"] == ["299", "1", "300"]
    assert cells["ε on these cells, all studies"] == ["–", "0", "no limit"]


# ---- bad company -----------------------------------------------------------------------------------------------------


def test_who_says_nothing_is_sent_away_and_many_do_not_fill_the_service(page, monkeypatch):
    monkeypatch.setattr(server.Answer, "timeout", 0.5)
    silent = [socket.create_connection(("127.0.0.1", page.port), timeout=60) for _ in range(3 * server.AT_ONCE)]
    most = 0
    for link in reversed(silent):  # the last are closed at once, the first after a while
        most = max(most, sum("process_request_thread" in t.name for t in threading.enumerate()))
        with link, contextlib.suppress(ConnectionResetError):
            assert link.recv(1) == b""
    assert most <= server.AT_ONCE
    assert page.get()[0] == 200


NO_REQUESTS = [b"\x16\x03\x01\x02\x00\x01\r\n\r\n", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\r\n"]


@pytest.mark.parametrize("said", NO_REQUESTS)
def test_what_is_no_request_is_answered_with_no_more_than_that(page, said):
    with socket.create_connection(("127.0.0.1", page.port), timeout=30) as link:
        link.sendall(said)
        link.shutdown(socket.SHUT_WR)
        text = b"".join(iter(lambda: link.recv(4096), b""))
    assert b"basel" not in text
    assert page.get()[0] == 200


def test_a_port_that_is_taken_is_named(page):
    for port in (page.port, 70_000):
        with pytest.raises(UsageError, match=f"port {port} .*--port"), server.serve(page.service, port):
            pass
    assert page.get()[0] == 200
