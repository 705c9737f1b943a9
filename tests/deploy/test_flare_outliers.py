"""`find-outliers` as published on FLARE: two servers, coordinator and auxiliary, and three sites on loopback."""

from __future__ import annotations

from pathlib import Path

import anndata as ad
import numpy as np
import pytest
from federation import serving

from cloister.cells.files import read_cells

pytestmark = [pytest.mark.xdist_group("flare"), pytest.mark.slow]
OPTIONS = {"contamination": 0.1, "trees": 50, "standardise": True}


@pytest.fixture(scope="module")
def sites():
    """Thirty rows a site, of which the first three lie far away, on columns of very different scales."""
    made, rng = {}, np.random.default_rng(0)
    for site in ("basel", "lugano", "vienna"):
        x = rng.normal(size=(30, 4))
        x[:3] += 12 * rng.choice([-1, 1], (3, 4))
        made[site] = ad.AnnData((x * [1.0, 1e-5, 1e4, 3.0]).astype(np.float64))
        made[site].var_names = [f"GENE{i}" for i in range(4)]
        made[site].obs_names = [f"{site}{i}" for i in range(30)]
    return made


@pytest.fixture(scope="module")
def federation(tmp_path_factory, sites):
    folder = tmp_path_factory.mktemp("outliers")
    with serving(folder, "find-outliers", sites, OPTIONS, published=True) as made:
        yield made


def test_two_servers_find_what_is_far_away(federation, sites):
    federation.agree()
    federation.run(limit=300.0)
    found = {s: read_cells(Path(federation.ended(s).folder) / f"{s}.h5ad") for s in sites}
    everyone = [np.asarray(a.uns["cloister"]["outlier_everyone"]) for a in found.values()]
    for site, adata in found.items():
        assert adata.obs["outlier"].to_numpy()[:3].all(), site
        assert adata.obs["outlier"].sum() <= 5
        np.testing.assert_array_equal(everyone[0], everyone[list(found).index(site)])
    assert federation.ended("helper").folder  # the second server has a receipt of its own
