"""Names as hospitals write them, labels and layers of their own, between machines on FLARE."""

from __future__ import annotations

from pathlib import Path

import federation
import numpy as np
import pytest
from anndata import AnnData
from federation import Federation

from cloister.cells.files import read_cells, write_cells
from cloister.cells.ontology import cell_ontology
from cloister.deploy.kit import Kit

NAMES = {"USZ": ("T_CD4", "B"), "PW030": ("CD4 T cells", "cluster 2"), "basel": ("CD4+ T", "B cells")}


def made(names, seed):
    rng = np.random.default_rng(seed)
    kinds = np.arange(60) % 2
    adata = AnnData(rng.poisson(1.0 + 4.0 * kinds[:, None] * (np.arange(60) < 20), (60, 60)).astype(np.float32))
    adata.var_names = [f"GENE{i}" for i in range(60)]
    adata.obs_names = [f"c{i}" for i in range(60)]
    adata.obs["cell_type"] = [names[k] for k in kinds]
    adata.obs["donor"] = [f"d{i % 6}" for i in range(60)]
    return adata


@pytest.mark.slow
def test_upper_case_sites_with_their_own_labels_and_layers(tmp_path, monkeypatch):
    parties = {"hub": "coordinator", **dict.fromkeys(NAMES, "site")}
    monkeypatch.setattr(federation, "PARTIES", parties)
    sites = {site: made(names, i) for i, (site, names) in enumerate(NAMES.items())}
    monkeypatch.setattr(federation, "cells", lambda: sites)
    group = Federation(tmp_path, timeout=20.0)
    try:
        layered = sites["USZ"].copy()
        layered.layers["counts"], layered.X = layered.X.copy(), np.log1p(layered.X)
        write_cells(layered, group.kits["USZ"] / "cells.h5ad")
        for site, more in {"USZ": 'layer = "counts"\n', "PW030": ""}.items():
            policy = Kit.open(group.kits[site]).policy_file
            text = policy.read_text()
            labels = '[labels]\n"cluster 2" = "B cell"\n' if site == "PW030" else "[labels]\n"
            policy.write_text(more + text.replace("[labels]\n", labels))
        group.agree(
            workflow="train-classifier",
            ontology={"version": cell_ontology().version},
            parameters={"min_cells": 10, "n_top_genes": 30},
        )
        group.start(*parties)
        ended = group.run()
        assert sorted(ended.result["labels"]) == ["B cell", "CD4-positive, alpha-beta T cell"]
        for site in NAMES:
            found = read_cells(Path(group.ended(site).folder) / f"{site}.h5ad")
            assert set(found.obs["predicted_ontology_id"]) == {"CL:0000236", "CL:0000624"}
            assert set(found.obs["cell_type_original"]) == set(NAMES[site])
    finally:
        group.close()
