"""Many rehearsals in a row with random faults: each ends in a result or by name, and nothing is left behind."""

import os
import random
import threading
import time

import numpy as np
import psutil  # comes with the extra flare
import pytest

from cloister.cells.demo import demo_sites
from cloister.errors import CloisterError
from cloister.rehearsal.rehearsal import Fault, rehearse

KINDS = ("drop", "delay", "duplicate", "swap", "truncate", "kill")
SMALL = {p: a[:40, :60].copy() for p, a in demo_sites().items()}
PLAYS = [
    ("bin-values", {"min_values": 10}),
    ("bin-values", {"min_values": 10, "mode": "published"}),
    ("integrate", {"use_rep": "X_pca", "n_clusters": 3, "rounds": 1, "updates": 1, "sweeps": 1, "min_cells": 20}),
    ("shared-pca", {"n_components": 3, "n_top_genes": 20, "min_cells": 20}),
    ("find-outliers", {"use_rep": "X_pca", "trees": 4, "sample": 32, "contamination": 0.1}),
    ("map-labels", {"query": "vienna", "use_rep": "X_pca", "n_neighbors": 3}),
]


def one(rng):
    """A random workflow with up to two random faults; returns how it ended."""
    workflow, options = rng.choice(PLAYS)
    parties = ["coordinator", *SMALL]
    faults = [
        Fault(rng.choice(KINDS), rng.choice([None, *parties]), rng.choice([None, *parties]), nth=rng.randrange(30))
        for _ in range(rng.choice([0, 1, 1, 1, 2]))
    ]
    run = rehearse(workflow, SMALL, timeout=2.5, faults=faults, check=False, **options)
    for party, error in run.errors.items():
        assert isinstance(error, CloisterError), f"{workflow} {faults}: {party} ended by {error!r}"
        assert str(error)
    ended = {p for p in run.study.parties if p in run.outcomes or p in run.errors}
    killed = set(run.study.parties) - ended
    assert not killed or any(f.kind == "kill" for f in faults), f"{workflow} {faults}: {killed} said nothing"
    edges = [run.results[p]["bin_edges"] for p in SMALL if "bin_edges" in run.results.get(p, {})]
    assert all(np.array_equal(edges[0], e) for e in edges[1:])
    return "result" if not run.errors else "named"


def left_behind():
    me = psutil.Process()
    return {
        "threads": {t.name for t in threading.enumerate() if t.name in ("coordinator", *SMALL)},
        "children": [c.pid for c in me.children(recursive=True) if c.status() != psutil.STATUS_ZOMBIE],
        "sockets": len(me.net_connections()) if hasattr(me, "net_connections") else len(me.connections()),
        "files": len(os.listdir("/proc/self/fd")),
    }


def soak(count, seed, folder, monkeypatch):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("TMPDIR", str(folder))
    rng = random.Random(seed)
    one(random.Random(0))  # what the first run imports and opens for good
    before, ends = left_behind(), {"result": 0, "named": 0}
    for _ in range(count):
        began = time.monotonic()
        ends[one(rng)] += 1
        assert time.monotonic() - began < 600  # it hangs
    time.sleep(1.0)  # delayed frames still on their way
    after = left_behind()
    assert after["threads"] == before["threads"] == set()
    assert set(after["children"]) <= set(before["children"])
    assert after["sockets"] <= before["sockets"]
    assert after["files"] <= before["files"] + 4
    assert not list(folder.iterdir())
    return ends


def test_a_few_runs_with_faults(tmp_path, monkeypatch):
    assert sum(soak(4, 11, tmp_path, monkeypatch).values()) == 4


@pytest.mark.slow
@pytest.mark.parametrize("shard", range(4))
def test_two_hundred_runs_with_faults(tmp_path, monkeypatch, shard):
    ends = soak(50, shard, tmp_path, monkeypatch)
    assert min(ends.values()) > 5
