"""Cloister on FLARE with real processes on loopback: a coordinator, three sites, an auxiliary.

The workflow is `chat` (tests/deploy/chat), which every service finds on its path; `bin-values` runs in the slow part.
"""

from __future__ import annotations

import dataclasses
import shutil
import socket
import threading
from pathlib import Path

import chat
import pytest
from federation import IMPATIENT, PARTIES, UNCHECKED, Federation, cells

from cloister.deploy.provision import provision
from cloister.errors import PeerLost, ProtocolAbort
from cloister.mpc.crypto.agreement import check_signature
from cloister.rehearsal.rehearsal import rehearse
from cloister.rehearsal.results import load_runs
from cloister.session import SIGNED
from cloister.study import format_study

chat.register()

SITES = [p for p, role in PARTIES.items() if role == "site"]
FOREVER = {"rounds": 1_000_000, "pause": 0.01}


def test_a_study_between_machines(tmp_path):
    """One consortium for all of it; with a fixture, every test worker would start its own."""
    federation = Federation(tmp_path, timeout=16.0)
    federation.agree()
    federation.start(*PARTIES)
    try:
        a_run_gives_what_the_rehearsal_gives(federation)
        a_site_refuses_what_it_has_not_approved(federation)
        parties_with_different_studies_stop_before_data_moves(federation)
        a_wrong_certificate_is_refused(federation)
        a_killed_site_ends_the_run_by_name_and_the_next_one_works(federation)
        services_stop_at_once_and_leave_nothing(federation)
    finally:
        federation.close()


def run_aside(federation: Federation, limit: float = 180.0) -> tuple[threading.Thread, list]:
    """A run in a thread; the list gets how it ended, or the error."""
    ends: list = []

    def go() -> None:
        try:
            ends.append(federation.run(limit))
        except Exception as e:
            ends.append(e)

    thread = threading.Thread(target=go)
    thread.start()
    return thread, ends


def a_run_gives_what_the_rehearsal_gives(federation):
    study = federation.agree()
    ended = federation.run()
    rehearsed = rehearse("chat", cells())
    assert ended.result == rehearsed.results["coordinator"] == {"total": 23.0}
    assert ended.parties == dict.fromkeys([*SITES, "helper"], "done")
    for site in SITES:
        at_home = federation.ended(site)
        assert at_home.result == rehearsed.results[site]
        (kept,) = load_runs(at_home.folder)
        assert [*kept.outcomes] == [*kept.receipts] == [site]
        assert kept.receipts[site].header["study_digest"] == study.digest.hex()
        kept.receipts[site].check(lambda public, head, signature: check_signature(public, SIGNED, head, signature))
        assert kept.receipts[site].signature["public"] == study.keys[site].hex()


def a_site_refuses_what_it_has_not_approved(federation):
    study = federation.agree()
    asked = dataclasses.replace(study, parameters={"rounds": 5})
    for p in PARTIES:
        (federation.kits[p] / "study.toml").write_text(format_study(asked))
        if p != "vienna" and p != "hub":
            federation.hand_over(p, asked)
    with pytest.raises(ProtocolAbort) as caught:
        federation.run()
    assert caught.value.code == "refused"
    assert "digest" not in str(caught.value)
    at_home = federation.ended("vienna")
    assert at_home.status == "refused"
    assert "'vienna' has not approved the study" in at_home.error["text"]
    for p in ("basel", "lugano", "helper"):
        assert federation.ended(p).status == "aborted"


def parties_with_different_studies_stop_before_data_moves(federation):
    study = federation.agree()
    federation.hand_over("lugano", dataclasses.replace(study, parameters={"rounds": 4}))
    with pytest.raises(ProtocolAbort) as caught:
        federation.run()
    assert caught.value.code == "mismatch"
    assert "lugano came with another study file" in str(caught.value)
    for p in [*SITES, "helper"]:
        ended = federation.ended(p)
        assert ended.status == "aborted", p
        assert ended.error["code"] == "mismatch"
        sent = Path(ended.folder) / f"{p}.receipt.json"
        assert "chat.Input" not in (sent.read_text() if p != "lugano" else "")  # lugano did not even come


def a_wrong_certificate_is_refused(federation):
    """A whole kit for vienna, with the right host and port, of an authority that nobody here knows."""
    strangers = provision(dataclasses.replace(federation.study, keys={}), federation.folder / "strangers")
    said = federation.folder / "stranger.out"
    service = federation.spawn(strangers["vienna"], said)
    try:
        federation.wait_until(lambda: "CERTIFICATE_VERIFY_FAILED" in said.read_text())
    finally:
        service.terminate()
        assert service.wait(timeout=60) == 0
    log = (federation.kits["hub"] / "log.txt").read_text()
    assert log.count("vienna is connected") == 1  # the true one


def a_killed_site_ends_the_run_by_name_and_the_next_one_works(federation):
    federation.agree(parameters=FOREVER)
    federation.clear_marks()
    thread, ends = run_aside(federation)
    federation.wait_for_mark("vienna", ends)
    federation.kill("vienna")
    thread.join()
    assert isinstance(ends[0], ProtocolAbort)
    assert ends[0].protocol == "chat"  # before the order's own limit, which would say "flare"
    assert ends[0].code in ("lost", "timeout")
    for p in ("basel", "lugano", "helper"):
        ended = federation.ended(p)
        assert ended.status == "aborted"
        assert ended.error["protocol"] == "chat"
        assert ended.error["code"] in ("lost", "timeout")
    federation.agree()
    federation.start("vienna")
    assert federation.run().result == {"total": 23.0}


def services_stop_at_once_and_leave_nothing(federation):
    assert federation.stop(*PARTIES) == dict.fromkeys(PARTIES, 0)
    assert federation.processes(*PARTIES) == []
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        s.bind(("127.0.0.1", federation.port))
    for p in PARTIES:
        said = (federation.folder / f"{p}.out").read_text()
        assert f"{p} stops" in said
        assert "Traceback" not in said


# -- slower ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def another(tmp_path):
    made = Federation(tmp_path, timeout=12.0)
    made.agree()
    try:
        yield made
    finally:
        made.close()


@pytest.mark.slow
def test_a_certificate_of_another_party_is_refused(another):
    """The certificate is good, but lugano's service says that it is basel."""
    for name in ("client.crt", "client.key"):
        shutil.copy(another.kits["basel"] / "startup" / name, another.kits["lugano"] / "startup" / name)
    another.start("hub", patch=IMPATIENT)
    another.start("vienna", "helper")
    another.wait_for_connection("vienna", "helper")
    another.start("lugano", patch=UNCHECKED)
    with pytest.raises(PeerLost, match="not connected: basel, lugano;"):
        another.run()
    log = (another.kits["hub"] / "log.txt").read_text()
    assert "'basel' calls itself 'lugano'; it is not let in" in log
    assert "lugano is connected" not in log


@pytest.mark.slow
def test_what_else_can_end_a_run(another):
    another.agree(parameters=FOREVER)
    another.start(*PARTIES)

    thread, ends = run_aside(another)  # a service is stopped
    another.wait_for_mark("vienna", ends)
    another.stop("vienna")
    thread.join()
    assert isinstance(ends[0], PeerLost)
    assert "service was stopped" in another.ended("vienna").error["text"]
    assert another.ended("basel").status == "aborted"

    another.start("vienna")  # only the run's process dies, as when memory is short
    another.clear_marks()
    thread, ends = run_aside(another)
    another.wait_for_mark("vienna", ends)
    for process in another.processes("vienna"):
        if process.pid != another.services["vienna"].pid:
            process.kill()
    thread.join()
    assert isinstance(ends[0], ProtocolAbort)
    assert another.ended("basel").error["code"] in ("lost", "timeout")

    with pytest.raises(PeerLost, match="did not end in time"):  # it takes too long
        another.run(limit=15.0)
    another.wait_until(lambda: another.ended("basel").run == another.ended("hub").run)

    another.clear_marks()  # the coordinator dies, and comes back
    thread, ends = run_aside(another)
    another.wait_for_mark("vienna", ends)
    another.kill("hub")
    thread.join()
    assert isinstance(ends[0], PeerLost)
    another.wait_until(lambda: another.ended("basel").error.get("text", "").startswith("chat L3: 'hub' dropped out"))
    another.agree()
    another.start("hub")
    assert another.run().result == {"total": 23.0}


@pytest.mark.slow
def test_bin_values_on_flare_equals_its_rehearsal(another):
    from cloister.cells.files import read_cells

    parties = {p: role for p, role in PARTIES.items() if p != "helper"}
    keys = {p: k for p, k in another.study.keys.items() if p in parties}
    another.agree(workflow="bin-values", parties=parties, keys=keys, parameters={"n_bins": 9, "min_values": 50})
    another.start(*parties)
    ended = another.run()
    run = rehearse("bin-values", cells(), n_bins=9, min_values=50)
    assert ended.result["bin_edges"] == run.results["coordinator"]["bin_edges"]
    for site in SITES:
        made = read_cells(Path(another.ended(site).folder) / f"{site}.h5ad")
        assert (made.layers["binned"] != run.data[site].layers["binned"]).sum() == 0
