"""One origin and one reason word at every party, for failures that are no lies (FLARE: tests/deploy)."""

from __future__ import annotations

import json
import subprocess
import tempfile
import time

import numpy as np
import pytest
from anndata import AnnData

from cloister.errors import DataError, DiskError, PeerLost, ProtocolAbort
from cloister.rehearsal.rehearsal import plan, rehearse, run_parties
from cloister.session import Outcome
from cloister.study import Party

SITES = ("basel", "lugano", "zurich")
OPTIONS = {"query": "zurich", "use_rep": "X_pca", "n_neighbors": 3}
EVERYONE = ("coordinator", *SITES)


def sites():
    rng, made = np.random.default_rng(0), {}
    for name in SITES:
        adata = AnnData(np.zeros((12, 1), np.float32))
        adata.obs_names = [f"{name}{i}" for i in range(12)]
        kinds = np.arange(12) % 2
        adata.obsm["X_pca"] = rng.normal(size=(12, 4)) + 5.0 * kinds[:, None]
        adata.obs["cell_type"] = np.where(kinds, "B cell", "T cell")
        made[name] = adata
    return made


# ---- threads ---------------------------------------------------------------------------------------------------------


def fails_with(error, victim):
    """Parts that greet each other and talk once; one of them fails after the first greeting."""
    from cloister.workflows.common import common_genes

    study = plan("bin-values", SITES, timeout=20.0)
    params = common_genes.Params(study.sites, study.coordinator)

    def part(session, _):
        session.attend(params)
        if session.me == victim:
            raise error
        if session.me == study.coordinator:
            return Outcome(result={"x": session.run(coordinator, params)})
        return Outcome(result={"x": session.run(site, params)})

    async def coordinator(ch, params):
        from cloister.workflows.common.common_genes import Measured

        return await ch.gather(params.sites, Measured)

    async def site(ch, params):
        from cloister.workflows.common.common_genes import Common, Measured, join

        await ch.send(params.coordinator, Measured("counts", join(["a"])))
        return await ch.recv(params.coordinator, Common)

    return run_parties(study, dict.fromkeys(study.parties, part), {})


FAILURES = {
    "data": DataError("the labels are missing: 31415926"),
    "disk": DiskError("results cannot be written (No space left on device)"),
    "stopped": KeyboardInterrupt(),
    "memory": MemoryError(),
}


@pytest.mark.parametrize("victim", ["basel", "coordinator"])
@pytest.mark.parametrize("reason", [*FAILURES, "a bare OSError"])
def test_every_party_names_the_same_origin_and_reason(reason, victim):
    error = FAILURES.get(reason) or OSError(28, "No space left on device")
    error.__dict__.clear()  # used for both victims
    run = fails_with(error, Party(victim))
    word = reason if reason in FAILURES else "disk"
    assert run.origins == dict.fromkeys(EVERYONE, (victim, word))
    others = {str(e) for p, e in run.errors.items() if p != victim}
    assert all(f"'{victim}'" in text and "31415926" not in text for text in others)
    assert (run.abort.party, run.abort.origin, run.abort.reason) == (victim, victim, word)


def test_without_an_origin_on_the_wire_the_messenger_would_be_blamed(monkeypatch):
    """The old abort had three words: lugano then hears of basel's failure as one of the coordinator."""
    from cloister.mpc.net import mailbox

    def old(sender, protocol, line, code, *_):
        return mailbox.Failure(protocol, line, code, f"'{sender}' stopped")

    monkeypatch.setattr(mailbox, "told_by", old)
    run = fails_with(DataError("x"), Party("basel"))
    assert run.errors["lugano"].origin == "coordinator"


def test_labels_that_are_missing_at_one_site_are_blamed_on_it():
    """In the run itself: the rehearsal looks at the cells before, a site of its own does so after the greeting."""
    data = sites()
    del data["basel"].obs["cell_type"]
    with pytest.raises(DataError, match="cell_type") as e:
        rehearse("map-labels", data, mode="plain", **OPTIONS)
    assert "basel" in str(e.value)


def test_a_party_cannot_be_blamed_under_a_name_that_is_none():
    from cloister.mpc.net.channel import _lost
    from cloister.mpc.net.mailbox import told_by
    from cloister.workflows.common.common_genes import Measured

    study = plan("bin-values", SITES)
    told = told_by(Party("basel"), "p", "L1", "DataError", "nobody", "DataError")
    e = _lost(Party("basel"), told, 0.0, Measured.__message__, study)
    assert (e.origin, e.began) == ("basel", "DataError")


# ---- processes -------------------------------------------------------------------------------------------------------


LONG = 600.0  # seconds of silence; nobody may wait for them


def killed(tmp_path, monkeypatch, victim, stage):
    """Kill the process of `victim` when its first message of `stage` is out: all others end at once, and name it."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    children, struck, spawn = {}, [], subprocess.Popen

    def keep(words, **how):
        children[words[4]] = spawn(words, **how)
        return children[words[4]]

    def strike(event):
        if not struck and event.party == victim and event.protocol == stage:
            children[victim].kill()
            struck.append(time.monotonic())

    monkeypatch.setattr(subprocess, "Popen", keep)
    options = {"mode": "plain", "timeout": LONG, **OPTIONS}
    run = rehearse("map-labels", sites(), processes=True, check=False, on_event=strike, **options)
    assert time.monotonic() - struck[0] < LONG / 2
    assert run.origins == dict.fromkeys(EVERYONE, (victim, "lost"))
    with pytest.raises(PeerLost, match=f"'{victim}'"):
        run.check()
    assert run.outcomes == {}
    for receipt in run.receipts.values():
        receipt.check()
        assert receipt.status.startswith("aborted")
    assert list(tmp_path.iterdir()) == []


def test_a_killed_process_is_named_by_all_others(tmp_path, monkeypatch):
    killed(tmp_path, monkeypatch, "basel", "mapping_terms")


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["channel", "mapping_terms", "plain_knn"])
@pytest.mark.parametrize("victim", EVERYONE)
def test_every_process_at_every_stage(tmp_path, monkeypatch, victim, stage):
    killed(tmp_path, monkeypatch, victim, stage)


def test_the_page_and_run_json_name_the_origin(tmp_path):
    from cloister.rehearsal.results import load_run, save_run
    from cloister.report.page import write_report

    run = fails_with(DataError("x"), Party("basel"))
    save_run(run, tmp_path / "out")
    told = json.loads((tmp_path / "out" / "run.json").read_text())["abort"]
    assert (told["origin"], told["reason"]) == ("basel", "data")
    again = load_run(tmp_path / "out")
    assert (again.abort.origin, again.abort.reason) == ("basel", "data")
    text = write_report(tmp_path / "r.html", [run]).read_text()
    assert "aborted in the computation at basel" in text
    assert isinstance(again.errors["basel"], ProtocolAbort)
