import json
import os
import signal
import subprocess
import sys
import tempfile
import time

import numpy as np
import pytest
from anndata import AnnData
from scipy import sparse

from cloister.errors import ProtocolAbort
from cloister.rehearsal.rehearsal import Fault, rehearse
from cloister.rehearsal.results import save_run
from cloister.workflows.saved_models.cell_classifier import CellClassifier

OPTIONS = {"n_bins": 8, "min_values": 50}
LONG = 600.0  # seconds of silence; processes take a while to come up on a busy machine, and nobody may wait for these


def sites():
    rng, made = np.random.default_rng(0), {}
    for n, name in ((40, "basel"), (50, "lugano"), (60, "vienna")):
        adata = AnnData(sparse.csr_matrix(rng.poisson(1.5, (n, 12)).astype(np.float32)))
        adata.var_names = [f"g{i}" for i in range(12)]
        adata.obs_names = [f"c{i}" for i in range(n)]
        made[name] = adata
    return made


@pytest.fixture
def children(tmp_path, monkeypatch):
    """The party processes that are alive, found by the folder of this test that they were started in."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def alive():
        found = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
        return [row for row in found.splitlines() if "-m cloister.rehearsal.processes" in row and str(tmp_path) in row]

    return alive


@pytest.fixture(scope="module")
def both():
    data = sites()
    threads = rehearse("bin-values", data, **OPTIONS)
    apart = rehearse("bin-values", data, processes=True, timeout=LONG, **OPTIONS)
    return data, threads, apart


def test_processes_give_the_same_results_as_threads(both):
    data, threads, apart = both
    assert apart.errors == {}
    assert apart.results == threads.results
    for site in data:
        one, two = threads.data[site], apart.data[site]
        assert (one.layers["binned"] != two.layers["binned"]).nnz == 0
        np.testing.assert_array_equal(one.uns["cloister"]["bin_edges"], two.uns["cloister"]["bin_edges"])
        assert two.layers["binned"].dtype == one.layers["binned"].dtype
        assert "binned" not in data[site].layers


def test_processes_send_the_same_messages_as_threads(both):
    _, threads, apart = both

    def sent(run):
        return {
            p: [(r["name"], r["to"], r["count"]) for r in x.summary() if r["kind"] == "sent"]
            for p, x in run.receipts.items()
        }

    assert sent(apart) == sent(threads)
    for p, receipt in apart.receipts.items():
        receipt.check()
        assert receipt.status == "done"
        assert apart.cost[p]["messages"] == threads.cost[p]["messages"]
        assert abs(apart.cost[p]["bytes"] - threads.cost[p]["bytes"]) < 50
    assert {(e.party, e.kind) for e in apart.events} == {(e.party, e.kind) for e in threads.events}


def test_the_receipt_travels_in_the_cells(both):
    _, _, apart = both
    brief = json.loads(apart.data["basel"].uns["cloister"]["bin-values"])
    assert brief["head"] == apart.receipts["basel"].head


def test_the_model_and_its_files_come_back_from_the_processes(tmp_path):
    data = sites()
    for a in data.values():
        a.obs["cell_type"] = np.where(a.X[:, :3].sum(axis=1).A1 > 4, "much", "little")
    options = {"n_top_genes": 10, "validation": 0.0, "min_label_cells": 2, "min_cells": 30}
    runs = {p: rehearse("train-classifier", data, processes=p, timeout=LONG, **options) for p in (False, True)}
    np.testing.assert_array_equal(runs[True].model.model.coefficients, runs[False].model.model.coefficients)
    saved = {p: {path.name for path in save_run(run, tmp_path / str(p))} for p, run in runs.items()}
    assert saved[True] == saved[False] > {"basel.model.npz", "lugano.model.npz"}
    assert CellClassifier.load(tmp_path / "True" / "basel.model.npz").digest == runs[True].model.digest


@pytest.mark.parametrize("name", ["common_seed.Key", pytest.param("checked_sum.Masked", marks=pytest.mark.slow)])
def test_a_killed_process_is_left_out_at_once(name, children):
    faults = [Fault("kill", "vienna", "coordinator", name)]
    began = time.monotonic()
    run = rehearse("bin-values", sites(), processes=True, faults=faults, check=False, timeout=LONG, **OPTIONS)
    assert run.errors == {}
    assert run.outcomes.keys() == {"coordinator", "basel", "lugano"}
    assert time.monotonic() - began < LONG / 2  # the others hear that it died; nobody waits for the timeout
    assert children() == []


@pytest.mark.slow
def test_a_killed_coordinator_ends_everyone_by_name():
    faults = [Fault("kill", "coordinator", "basel", "checked_sum.Total")]
    run = rehearse("bin-values", sites(), processes=True, faults=faults, check=False, timeout=LONG, **OPTIONS)
    assert run.errors.keys() == {"basel", "lugano", "vienna"}
    assert all(isinstance(e, ProtocolAbort) for e in run.errors.values())
    assert "lost" in {e.code for e in run.errors.values()}
    assert all(r.status.startswith("aborted") for p, r in run.receipts.items() if p != "coordinator")


@pytest.mark.slow
def test_a_fault_in_processes_is_raised_as_in_threads():
    """Half a message of lugano: it is left out and hears why, the others go on; the same in both."""
    fault = Fault("truncate", "lugano", "coordinator", "Measured")
    ended = []
    for processes in (False, True):
        run = rehearse("bin-values", sites(), processes=processes, faults=[fault], check=False, timeout=LONG, **OPTIONS)
        assert run.outcomes.keys() == {"coordinator", "basel", "vienna"}
        with pytest.raises(ProtocolAbort, match="'coordinator' stopped .malformed: it was sent something"):
            run.check()
        ended.append({p: (type(e), str(e), e.code, e.heard) for p, e in run.errors.items()})
    assert ended[0] == ended[1]
    assert ended[0].keys() == {"lugano"}


@pytest.mark.slow
def test_inplace_writes_into_what_was_given():
    data = sites()
    rehearse("bin-values", data, processes=True, inplace=True, timeout=LONG, **OPTIONS)
    assert all("binned" in a.layers for a in data.values())


def test_when_the_parent_fails_no_child_is_left(children):
    def stop(event):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rehearse("bin-values", sites(), processes=True, on_event=stop, timeout=LONG, **OPTIONS)
    assert children() == []


@pytest.mark.slow
def test_when_the_parent_is_killed_the_children_end(children, tmp_path):
    code = (
        "import os, runpy, signal, sys\n"
        "from cloister.rehearsal.rehearsal import rehearse\n"
        "test = runpy.run_path(sys.argv[1])\n"
        "rehearse('bin-values', test['sites'](), processes=True, timeout=600.0, **test['OPTIONS'],\n"
        "         on_event=lambda e: os.kill(os.getpid(), signal.SIGKILL))\n"
    )
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code, __file__], env=env, timeout=200, check=False)
    assert done.returncode == -signal.SIGKILL
    end = time.monotonic() + 60
    while children():
        assert time.monotonic() < end, "a child outlives its parent"
        time.sleep(0.2)
