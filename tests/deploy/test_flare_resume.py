"""A study of several steps between machines: after any crash, the next run continues at the first unfinished step."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import chat
import pytest
from federation import PARTIES, SIZES, Federation
from test_origin import new_outcomes, outcomes

from cloister.cells.files import read_cells
from cloister.deploy.approval.halting import halt
from cloister.deploy.kit import Kit
from cloister.errors import CloisterError, ProtocolAbort
from cloister.mpc.net.receipts import Receipt
from cloister.rehearsal.results import load_runs
from cloister.study import Step

pytest.importorskip("nvflare")
chat.register()
pytestmark = [pytest.mark.xdist_group("flare"), pytest.mark.slow]
FINE = Step("bin-values", options={"n_bins": 9, "min_values": 50}, name="fine")
TALK = Step("chat", options={"rounds": 60, "pause": 0.05}, name="talk")
COARSE = Step(
    "bin-values", options={"n_bins": 4, "min_values": 50, "layer": "binned", "key_added": "coarse"}, name="coarse"
)
STEPS = (FINE, TALK, COARSE)
SITES = [*SIZES]


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    made = Federation(tmp_path_factory.mktemp("resume"), timeout=16.0)
    made.agree(workflow="", steps=STEPS)
    made.start(*PARTIES)
    try:
        yield made
    finally:
        made.close()


def begin(federation, name, steps=STEPS):
    """A new study under this name, begun, with all sites in step 2."""
    federation.agree(name=name, workflow="", steps=steps)
    return continue_to_talk(federation)


def continue_to_talk(federation):
    federation.clear_marks()
    ends = []

    def go():
        try:
            ends.append(federation.run(limit=200.0))
        except CloisterError as e:
            ends.append(e)

    thread = threading.Thread(target=go)
    thread.start()
    for site in SITES:
        federation.wait_for_mark(site, ends)
    return thread, ends


def counts(federation, site):
    kit = Kit.open(federation.kits[site])
    return kit.runs_so_far()


def heads(federation, site, label):
    """Last hashes of the receipts of a step, over all runs of the latest study."""
    study = Kit.open(federation.kits[site]).study
    found = set()
    for path in (federation.kits[site] / "results").glob(f"*/[0-9][0-9]-{label}/{site}.receipt.json"):
        receipt = Receipt.load(path)
        if receipt.header["study"] == study.name:
            found.add((receipt.head, receipt.status))
    return found


@pytest.mark.parametrize("victim", ["vienna", "helper", "hub"])
def test_a_study_continues_at_the_step_in_which_a_party_was_killed(federation, victim):
    before, counted = outcomes(federation), {site: counts(federation, site) for site in SITES}
    thread, ends = begin(federation, f"kill {victim}")
    federation.kill(victim)
    thread.join()
    assert isinstance(ends[0], CloisterError)
    federation.start(victim)
    federation.wait_until(lambda: len(new_outcomes(federation, before, PARTIES)) == len(PARTIES), 60)
    ended = federation.run()
    assert ended.status == "done"
    assert [*ended.result] == ["fine", "talk", "coarse"]
    for site in SITES:
        done = {head for head, status in heads(federation, site, "fine") if status == "done"}
        assert len(done) == 1  # answered once, in the first run
        talks = heads(federation, site, "talk")
        assert sorted(status == "done" for _, status in talks) == [False, True]  # answered twice
        folder = Path(federation.ended(site).folder)
        assert [run.study.label for run in load_runs(folder)] == ["fine", "talk", "coarse"]
        assert "coarse" in read_cells(folder / "03-coarse" / f"{site}.h5ad").layers
        now = counts(federation, site)
        more = {key: now[key] - counted[site].get(key, 0) for key in now if key != "study"}
        assert (now["study"], more) == (2, {"bin-values": 2, "chat": 2})
    again = federation.run()  # what is finished everywhere is not continued: a new answer, counted as one
    assert again.status == "done"
    assert counts(federation, "basel")["study"] == 3
    assert len({head for head, status in heads(federation, "basel", "fine") if status == "done"}) == 2


def test_a_halted_study_continues_once_it_is_approved_again(federation):
    thread, ends = begin(federation, "halt")
    halt(federation.kits["vienna"], "Dr. D. Vorlage")
    thread.join()
    assert ends[0].code == "halted"
    with pytest.raises(ProtocolAbort, match="withdrew its approval|does not take part"):
        federation.run()
    Kit.open(federation.kits["vienna"]).approve("Dr. D. Vorlage")
    assert federation.run().status == "done"
    assert len({h for h, status in heads(federation, "vienna", "fine") if status == "done"}) == 1


def test_a_refusal_reaches_every_party_within_seconds(federation):
    """The others waited 124 s for the party that does not come."""
    federation.agree(name="refusal", workflow="", steps=STEPS)
    halt(federation.kits["vienna"], "Dr. D. Vorlage")
    before = outcomes(federation)
    with pytest.raises(CloisterError):
        federation.run()
    refused = max(f.stat().st_mtime for f in outcomes(federation)["vienna"] - before["vienna"])
    federation.wait_until(lambda: len(new_outcomes(federation, before, PARTIES)) == len(PARTIES), 60)
    ended = {p: max(f.stat().st_mtime for f in outcomes(federation)[p] - before[p]) for p in PARTIES}
    said = {p: (e.error["reason"], e.error["origin"]) for p, e in new_outcomes(federation, before, PARTIES).items()}
    assert said == dict.fromkeys(PARTIES, ("refused", "vienna"))
    late = {p: t - refused for p, t in ended.items()}
    print("seconds after the refusal:", {p: round(t, 1) for p, t in late.items()})
    assert max(late.values()) < 15.0  # a process starts at each party first


def test_a_failure_in_a_later_step_reaches_every_party_within_5_seconds(federation):
    before = outcomes(federation)
    thread, _ = begin(federation, "cut", (FINE, Step("chat", options={"rounds": 10**6, "pause": 0.01}, name="talk")))
    struck = time.time()
    halt(federation.kits["vienna"], "Dr. D. Vorlage")
    thread.join()
    federation.wait_until(lambda: len(new_outcomes(federation, before, PARTIES)) == len(PARTIES), 60)
    late = {p: max(f.stat().st_mtime for f in outcomes(federation)[p] - before[p]) - struck for p in PARTIES}
    print("seconds after the halt:", {p: round(t, 1) for p, t in late.items()})
    assert max(late[p] for p in PARTIES if p != "hub") < 5.0
    Kit.open(federation.kits["vienna"]).approve("Dr. D. Vorlage")


def test_an_outcome_is_written_at_the_next_start_wherever_a_service_was_killed(federation):
    """Before a journal is there, between two steps, and after the last receipt."""
    before = outcomes(federation)
    federation.agree(name="early", workflow="", steps=STEPS)
    federation.clear_marks()
    failures = []

    def go():
        try:
            federation.run(limit=100.0)
        except CloisterError as e:
            failures.append(e)

    thread = threading.Thread(target=go)
    thread.start()
    marks = federation.kits["vienna"] / "runs"
    federation.wait_until(lambda: any(marks.glob("*.begun")), 60)
    federation.kill("vienna")
    thread.join()
    assert failures
    federation.start("vienna")
    federation.wait_until(lambda: new_outcomes(federation, before, ["vienna"]), 30)
    federation.wait_until(lambda: not any(marks.glob("*.begun")), 30)
    ended = new_outcomes(federation, before, ["vienna"])["vienna"]
    assert (ended.status, ended.error["reason"]) == ("aborted", "lost")


# ---- attacks ---------------------------------------------------------------------------------------------------------


def forget_a_step(kit):
    """A coordinator that claims not to have the last finished step."""
    path = kit / "local" / "course.json"
    whole = json.loads(path.read_text())
    state = whole[Kit.open(kit).study.digest.hex()]
    state["finished"].pop()
    path.write_text(json.dumps(whole))


def test_a_claimed_loss_repeats_a_step_at_the_price_of_an_answer_and_only_as_often_as_allowed(federation):
    """The coordinator wants another answer of step 1: every site counts it, and the limit ends it."""
    thread, _ = begin(federation, "claim")
    federation.kill("hub")
    thread.join()
    federation.start("hub")
    spent = {site: counts(federation, site) for site in SITES}
    forget_a_step(federation.kits["hub"])
    thread, _ = continue_to_talk(federation)
    federation.kill("hub")
    thread.join()
    federation.start("hub")
    for site in SITES:
        assert counts(federation, site)["study"] == spent[site]["study"] + 1  # steps 1 and 2 were answered twice
        assert counts(federation, site)["bin-values"] == spent[site]["bin-values"] + 1
        assert len({h for h, status in heads(federation, site, "fine") if status == "done"}) == 2
    file = federation.kits["vienna"] / "local" / "site.toml"
    text = file.read_text()
    file.write_text(text.replace("study = 20", f"study = {counts(federation, 'vienna')['study']}"))
    forget_a_step(federation.kits["hub"])
    try:
        with pytest.raises(CloisterError):
            federation.run()
        assert "allows" in federation.ended("vienna").error["text"]
        assert federation.ended("vienna").error["reason"] == "refused"
        assert len({h for h, status in heads(federation, "vienna", "fine") if status == "done"}) == 2
    finally:
        file.write_text(text)


def test_results_that_changed_on_the_disk_are_made_again(federation):
    thread, _ = begin(federation, "changed")
    federation.kill("hub")
    thread.join()
    federation.start("hub")
    for file in (federation.kits["vienna"] / "results").glob("*/01-fine/vienna.h5ad"):
        file.write_bytes(b"other cells")
    ended = federation.run()
    assert len({h for h, status in heads(federation, "vienna", "fine") if status == "done"}) == 2
    assert ended.status == "done"
    for site in SITES:
        assert "coarse" in read_cells(Path(federation.ended(site).folder) / "03-coarse" / f"{site}.h5ad").layers
