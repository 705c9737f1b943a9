"""Who is to blame on FLARE: whichever process dies, at whichever stage, all others end soon and name the same party."""

from __future__ import annotations

import contextlib
import threading
import time

import chat
import psutil
import pytest
from federation import PARTIES, Federation

from cloister.deploy.party import Ended
from cloister.errors import CloisterError

chat.register()

FOREVER = {"rounds": 1_000_000, "pause": 0.01}
BEGUN, STARTING = 20.0, 60.0  # seconds within which everyone has ended, once a run has begun and before
AWAY = 40.0  # and so many more, if a party does not connect any more: its line may only be down


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    made = Federation(tmp_path_factory.mktemp("origin"), timeout=60.0)
    made.agree(parameters=FOREVER)
    made.start(*PARTIES)
    try:
        yield made
    finally:
        made.close()


def outcomes(federation):
    return {p: set((federation.kits[p] / "results").glob("*/outcome.json")) for p in PARTIES}


def run_processes(federation, *parties):
    """The processes of runs, without services and carriers."""
    found = []
    for process in federation.processes(*parties):
        with contextlib.suppress(psutil.Error):
            if "cloister.deploy.run" in process.cmdline():
                found.append(process)
    return found


def begin(federation, stage):
    """Order a run, and wait until it has come to `stage`."""
    federation.clear_marks()
    ends = []

    def order():
        try:
            ends.append(federation.run())
        except CloisterError as e:
            ends.append(e)

    thread = threading.Thread(target=order)
    thread.start()
    if stage == "starting":
        federation.wait_until(lambda: len(run_processes(federation, *PARTIES)) == len(PARTIES))
    else:
        for p in ("vienna", "basel"):
            federation.wait_for_mark(p, ends)
    return thread, ends


def new_outcomes(federation, before, parties):
    after = outcomes(federation)
    return {p: Ended.load(max(after[p] - before[p])) for p in parties if after[p] - before[p]}


def strike(federation, stage, victim, blow):
    """Kill `victim` at `stage`; how the others ended, and after how many seconds their processes were gone."""
    before = outcomes(federation)
    thread, ends = begin(federation, stage)
    others = [p for p in PARTIES if p != victim]
    struck = time.monotonic()
    blow(federation, victim)
    limit = BEGUN if stage == "begun" else STARTING
    federation.wait_until(lambda: len(new_outcomes(federation, before, others)) == len(others), limit + AWAY + 20)
    ended_after = time.monotonic() - struck
    federation.wait_until(lambda: not run_processes(federation, *others), 60)
    gone_after = time.monotonic() - struck
    thread.join()
    return new_outcomes(federation, before, others), ends[0], ended_after, gone_after


def kill_run(federation, party):
    for process in run_processes(federation, party):
        process.kill()


def kill_all(federation, party):
    federation.kill(party)


def stop(federation, party):
    federation.stop(party)


def back(federation, party):
    """Have a party that was killed or stopped come back."""
    if party not in federation.services:
        federation.start(party)


def check(found, victim, reason, stage, times, blow=None):
    ended, order, after, gone = found
    said = {p: (e.error["origin"], e.error["reason"]) for p, e in ended.items()}
    assert said == dict.fromkeys(ended, (victim, reason)), said
    more = AWAY if blow is kill_all else 0.0
    assert after < more + (BEGUN if stage == "begun" else STARTING), times
    assert gone < more + (30.0 if stage == "begun" else STARTING + 10.0), times
    if victim != "hub":
        assert (order.origin, order.began or order.code) == (victim, reason)


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["begun", "starting"])
@pytest.mark.parametrize("victim", ["vienna", "helper", "hub"])
@pytest.mark.parametrize("blow", [kill_run, kill_all])
def test_a_death_is_blamed_on_who_died(federation, stage, victim, blow):
    found = strike(federation, stage, victim, blow)
    print(f"{stage} {victim} {blow.__name__}: ended after {found[2]:.1f} s, gone after {found[3]:.1f} s")
    back(federation, victim)
    check(found, victim, "lost", stage, found[2:], blow)


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["vienna", "hub"])
def test_who_was_stopped_says_so(federation, victim):
    found = strike(federation, "begun", victim, stop)
    print(f"stop {victim}: ended after {found[2]:.1f} s, gone after {found[3]:.1f} s")
    back(federation, victim)
    check(found, victim, "stopped", "begun", found[2:])


@pytest.mark.slow
def test_data_that_do_not_fit_are_blamed_on_their_site(federation):
    """The coordinator's outcome lists each party with its own; before, the coordinator was blamed at the others."""
    cells, before = federation.kits["vienna"] / "cells.h5ad", outcomes(federation)
    kept = cells.read_bytes()
    cells.write_bytes(b"no file of cells")
    try:
        with pytest.raises(CloisterError, match="'vienna'"):
            federation.run()
    finally:
        cells.write_bytes(kept)
    federation.wait_until(lambda: len(new_outcomes(federation, before, PARTIES)) == len(PARTIES))
    ended = new_outcomes(federation, before, PARTIES)
    assert {p: (e.error["origin"], e.error["reason"]) for p, e in ended.items()} == dict.fromkeys(
        PARTIES, ("vienna", "data")
    )
    assert "cells.h5ad" in ended["vienna"].error["text"]
    assert all("cells.h5ad" not in e.error["text"] for p, e in ended.items() if p != "vienna")
