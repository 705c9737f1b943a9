"""`fine-tune` on FLARE: a coordinator and three sites, each a service of its own on loopback."""

from __future__ import annotations

import io
import json
import threading
from pathlib import Path

import numpy as np
import pytest
from federation import serving

from cloister.cells.demo import demo_sites
from cloister.cells.files import read_cells
from cloister.rehearsal.rehearsal import rehearse

pytest.importorskip("torch")
pytestmark = [pytest.mark.xdist_group("flare"), pytest.mark.slow]
OPTIONS = {"label_key": "cell_type", "use_rep": "X_pca", "rounds": 3, "lr": 0.01, "hidden": (16,), "batch_size": 32}


@pytest.fixture(scope="module")
def sites():
    return {name: adata[::3].copy() for name, adata in demo_sites().items()}


@pytest.fixture(scope="module")
def federation(tmp_path_factory, sites):
    with serving(tmp_path_factory.mktemp("training"), "fine-tune", sites, OPTIONS) as made:
        yield made


def test_a_run_gives_what_the_rehearsal_gives(federation, sites):
    federation.agree(mode="published")  # without noise from the operating system
    federation.run(limit=240.0)
    wanted = rehearse("fine-tune", sites, mode="published", **OPTIONS)
    for site in sites:
        folder = Path(federation.ended(site).folder)
        found = read_cells(folder / f"{site}.h5ad")
        seen = wanted.data[site]
        np.testing.assert_array_equal(found.obs["predicted"].astype(str), seen.obs["predicted"].astype(str))
        assert json.loads(found.uns["predicted"])["history"] == wanted.results[site]["history"]
        assert (folder / f"{site}.model.npz").read_bytes() == wanted.outcomes[site].model.to_bytes()


def test_a_hardened_run_gives_all_sites_the_same_model(federation, sites):
    federation.agree()
    federation.run(limit=240.0)
    folders = {site: Path(federation.ended(site).folder) for site in sites}
    models = {(folder / f"{site}.model.npz").read_bytes() for site, folder in folders.items()}
    assert len(models) == 1
    told = [json.loads(read_cells(folder / f"{site}.h5ad").uns["predicted"]) for site, folder in folders.items()]
    assert told[0] == told[1] == told[2]
    assert told[0]["privacy"]["epsilon"] > 0


def rounds_done(checkpoint: Path) -> int:
    if not checkpoint.exists():
        return 0
    with np.load(io.BytesIO(checkpoint.read_bytes()), allow_pickle=False) as kept:
        return int(json.loads(kept["meta"].tobytes())["t"])


def test_a_killed_site_is_left_out_and_the_others_finish(federation, sites, tmp_path):
    checkpoint = tmp_path / "kept.npz"
    federation.agree(mode="published", parameters={**OPTIONS, "rounds": 40, "checkpoint": str(checkpoint)})
    before = set((federation.kits["lugano"] / "results").glob("*/lugano.model.npz"))
    ends = []

    def go():
        try:
            ends.append(federation.run(300.0))
        except Exception as e:
            ends.append(e)

    runner = threading.Thread(target=go)
    runner.start()
    federation.wait_until(lambda: rounds_done(checkpoint) >= 2 or bool(ends), 180.0)
    assert runner.is_alive(), ends
    federation.kill("lugano")
    runner.join(240.0)
    assert ends[0].status == "done", ends
    assert rounds_done(checkpoint) == 40
    told = json.loads(read_cells(Path(federation.ended("basel").folder) / "basel.h5ad").uns["predicted"])
    clients = [row["clients"] for row in told["history"] if "clients" in row]
    assert clients[0] == 3
    assert clients[-1] == 2
    assert told["history"][-1]["accuracy"] > told["history"][0]["accuracy"]
    assert set((federation.kits["lugano"] / "results").glob("*/lugano.model.npz")) == before
