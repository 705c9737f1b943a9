"""Runs that nobody looks at: closing a terminal ends nothing; `attach` looks again, `cancel` stops."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import chat
import pytest
from federation import CHAT, PARTIES, SIZES, Federation

from cloister.deploy.control_socket import cancel, start_run, status_of, watch_run
from cloister.deploy.join import detach
from cloister.deploy.kit import Kit
from cloister.deploy.party import Ended
from cloister.deploy.ready import is_running
from cloister.errors import CloisterError, UsageError

pytest.importorskip("nvflare")
chat.register()
pytestmark = [pytest.mark.xdist_group("flare"), pytest.mark.slow]
LONG = {"rounds": 150, "pause": 0.05}
FOREVER = {"rounds": 1_000_000, "pause": 0.01}


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    made = Federation(tmp_path_factory.mktemp("detached"), timeout=30.0)
    made.agree(parameters=LONG)
    made.start(*PARTIES)
    try:
        yield made
    finally:
        made.close()


def order_from_a_terminal(federation):
    code = "import sys; from cloister.deploy.control_socket import run_study; run_study(sys.argv[1])"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(CHAT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-c", code, str(federation.kits["hub"])]
    return subprocess.Popen(command, env=env, stderr=subprocess.DEVNULL, start_new_session=True)


def test_a_detached_run_goes_on_and_can_be_looked_at_from_every_party(federation):
    federation.agree(parameters=LONG)
    federation.clear_marks()
    said = []
    run = start_run(federation.kits["hub"], on_status=said.append)
    assert said[-1] == f"run {run} submitted"
    federation.wait_for_mark("basel", [])
    seen = []
    ends = [watch_run(federation.kits[p], on_event=seen.append) for p in ("basel", "hub")]
    assert [e.status for e in ends] == ["done", "done"]
    assert ends[1].parties == dict.fromkeys((p for p in PARTIES if p != "hub"), "done")
    assert seen
    with pytest.raises(UsageError, match="no run is going on at basel"):
        watch_run(federation.kits["basel"])


@pytest.mark.parametrize("sent", [signal.SIGHUP, signal.SIGKILL])
def test_a_terminal_that_is_closed_ends_nothing(federation, sent):
    federation.agree(parameters=LONG)
    federation.clear_marks()
    terminal = order_from_a_terminal(federation)
    federation.wait_for_mark("basel", [])
    os.killpg(terminal.pid, sent)
    terminal.wait()
    assert status_of(Kit.open(federation.kits["hub"])).runs
    assert watch_run(federation.kits["hub"]).status == "done"


@pytest.mark.parametrize("party", ["hub", "vienna"])
def test_a_cancelled_run_ends_for_all_and_approvals_stay(federation, party):
    federation.agree(parameters=FOREVER)
    federation.clear_marks()
    start_run(federation.kits["hub"])
    federation.wait_for_mark("basel", [])
    errors = []

    def look():
        try:
            watch_run(federation.kits["basel"])
        except CloisterError as e:
            errors.append(e)

    looking = threading.Thread(target=look)
    looking.start()
    assert cancel(federation.kits[party]) == 1
    looking.join(60)
    assert (errors[0].origin, errors[0].began) == (party, "stopped")
    federation.wait_until(lambda: not status_of(Kit.open(federation.kits["hub"])).runs, 60)
    assert Kit.open(federation.kits["vienna"]).decision == "approved"


def test_ctrl_c_at_the_terminal_stops_the_run(federation):
    federation.agree(parameters=FOREVER)
    federation.clear_marks()
    terminal = order_from_a_terminal(federation)
    federation.wait_for_mark("basel", [])
    terminal.send_signal(signal.SIGINT)
    terminal.wait(60)
    federation.wait_until(lambda: not status_of(Kit.open(federation.kits["hub"])).runs, 60)
    assert federation.ended("basel").error["reason"] == "stopped"


def test_services_of_a_detached_run_end_with_it(federation, monkeypatch):
    federation.agree(parameters={})
    federation.stop(*PARTIES)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(CHAT), os.environ.get("PYTHONPATH", "")]))
    said = []
    for party in PARTIES:
        if party != "hub":
            assert detach(federation.kits[party], say=said.append) == ""
    assert f"cloister attach {federation.kits['basel']}" in said[0]
    run = detach(federation.kits["hub"], say=said.append)
    ends = {}
    for party in PARTIES:
        folder = federation.kits[party] / "results"
        federation.wait_until(lambda folder=folder: any(folder.glob(f"*-{run}/outcome.json")), 120)
        ends[party] = Ended.load(next(folder.glob(f"*-{run}/outcome.json"))).status
    assert ends == dict.fromkeys(PARTIES, "done")
    federation.wait_until(lambda: not any(is_running(Kit.open(kit)) for kit in federation.kits.values()), 60)
    assert not federation.processes(*SIZES)
