"""`integrate` on FLARE: a coordinator and three sites, each a service of its own on loopback."""

from __future__ import annotations

from pathlib import Path

import anndata as ad
import numpy as np
import pytest
from federation import SIZES, serving

from cloister.cells.files import read_cells
from cloister.rehearsal.rehearsal import rehearse
from cloister.workflows.saved_models.integration import Integration

pytestmark = [pytest.mark.xdist_group("flare"), pytest.mark.slow]
OPTIONS = {"use_rep": "X_pca", "batch_key": "batch", "n_clusters": 4, "rounds": 2, "updates": 2, "sweeps": 2}


def cells(seed: int, n: int = 80) -> ad.AnnData:
    rng = np.random.default_rng(seed)
    made = ad.AnnData(np.zeros((n, 2), np.float32))
    made.obs_names = [f"{seed}-{i}" for i in range(n)]
    made.obs["batch"] = [f"run {i % 2}" for i in range(n)]
    made.obsm["X_pca"] = 8 * np.eye(3, 4)[np.arange(n) % 3] + rng.normal(0, 2, 4) + rng.normal(0, 0.5, (n, 4))
    made.uns["X_pca"] = {"space": "ab12"}
    return made


def test_a_run_gives_what_the_rehearsal_gives(tmp_path):
    sites = {name: cells(i) for i, name in enumerate(SIZES)}
    with serving(tmp_path, "integrate", sites, OPTIONS) as federation:
        ended = federation.run(limit=240.0)
        wanted = rehearse("integrate", sites, **OPTIONS)
        assert ended.result["sums"] == wanted.results["coordinator"]["sums"]
        spaces = set()
        for site in sites:
            folder = Path(federation.ended(site).folder)
            found = read_cells(folder / f"{site}.h5ad")
            np.testing.assert_allclose(found.obsm["X_integrated"], wanted.data[site].obsm["X_integrated"], atol=1e-9)
            spaces.add(found.uns["X_integrated"]["space"])
            late = sites[site][:3].copy()
            Integration.load(folder / f"{site}.model.npz").transform(late)
            np.testing.assert_allclose(late.obsm["X_integrated"], found.obsm["X_integrated"][:3], atol=1e-9)
        assert len(spaces) == 1
