"""`map-labels` on FLARE: a coordinator and three sites, each a service of its own on loopback."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest
from federation import serving

from cloister.cells.demo import demo_sites
from cloister.cells.files import read_cells
from cloister.errors import PeerLost, ProtocolAbort
from cloister.rehearsal.rehearsal import rehearse

pytestmark = [pytest.mark.xdist_group("flare"), pytest.mark.slow]
SITES = ("basel", "lugano", "vienna")
OPTIONS = {"query": "vienna", "label_key": "cell_type", "use_rep": "X_pca", "n_neighbors": 10, "share": True}


@pytest.fixture(scope="module")
def sites():
    return {name: adata[::2].copy() for name, adata in demo_sites().items()}


@pytest.fixture(scope="module")
def federation(tmp_path_factory, sites):
    with serving(tmp_path_factory.mktemp("mapping"), "map-labels", sites, OPTIONS) as made:
        yield made


def test_a_run_gives_what_the_rehearsal_gives(federation, sites):
    federation.agree()
    began = time.monotonic()
    federation.run(limit=240.0)
    print(f"{time.monotonic() - began:.1f} s from start to end")
    wanted = rehearse("map-labels", sites, **OPTIONS).data["vienna"].obs
    found = read_cells(Path(federation.ended("vienna").folder) / "vienna.h5ad").obs
    np.testing.assert_array_equal(found["mapped"].astype(str), wanted["mapped"].astype(str))
    np.testing.assert_array_equal(found["mapped_share"], wanted["mapped_share"])


def test_a_killed_site_ends_the_run_by_name_and_nothing_is_written(federation, sites):
    """Published takes thousands of rounds, so that there is a middle to be killed in."""
    federation.agree(mode="published", parameters={k: v for k, v in OPTIONS.items() if k != "share"})
    before = {p: set((federation.kits[p] / "results").glob("*/*.h5ad")) for p in SITES}
    ends = []

    def go():
        try:
            ends.append(federation.run(240.0))
        except Exception as e:
            ends.append(e)

    runner = threading.Thread(target=go)
    runner.start()
    federation.wait_until(lambda: len(federation.processes("lugano")) > 1, 120.0)  # FLARE has started its run
    time.sleep(15.0)
    assert runner.is_alive()
    federation.kill("lugano")
    runner.join(120.0)
    assert isinstance(ends[0], ProtocolAbort)
    federation.wait_until(lambda: federation.ended("vienna").status != "done", 60.0)
    told = federation.ended("vienna")
    assert "lugano" in str(told) or isinstance(ends[0], PeerLost)
    assert {p: set((federation.kits[p] / "results").glob("*/*.h5ad")) for p in SITES} == before
