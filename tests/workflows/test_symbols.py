"""Genes named by Ensembl id: tables have the symbols beside them, and findings and figures show symbols."""

from __future__ import annotations

import numpy as np
import pytest

import cloister as cl
from cloister.cells import genes


@pytest.fixture(scope="module")
def by_id():
    """The demo cells, named by Ensembl id with a version."""
    table, sites = genes.gene_tables()["human"], {}
    for site, adata in cl.demo_sites().items():
        known = np.array([name in table.by_symbol for name in adata.var_names])
        sites[site] = adata[:, known].copy()
        sites[site].var_names = [f"{table.by_symbol[name]}.3" for name in sites[site].var_names]
    return sites


def test_markers_of_ids_have_symbols(by_id):
    run = cl.rehearse("find-markers", data=by_id, label_key="cell_type")
    table = run.data["basel"].uns["markers"]
    known = genes.gene_tables()["human"].by_id
    assert list(table.columns)[:3] == ["label", "gene", "symbol"]
    assert all(known[gene] == symbol for gene, symbol in zip(table["gene"], table["symbol"], strict=True))
    best = run.results["coordinator"]["markers"]
    assert set(best["endothelial"]) <= set(known.values())
    assert any(name in line for line in run.findings for name in best["AT2"][:1])
    assert len(run.draw().figures) == 1


def test_symbols_need_no_second_column():
    names = ["CD3E", "CD19", "MS4A1"]
    assert genes.readable(names) == names
    assert genes.readable([]) == []
    assert genes.readable(["ENSG00000198851", "ENSG00000177455"]) == ["CD3E", "CD19"]
    import pandas as pd

    table = pd.DataFrame({"gene": names, "p": 0.5})
    assert genes.with_symbols(table) is table
    assert genes.for_people(table) is table
    ids = pd.DataFrame({"gene": ["ENSG00000198851"], "p": 0.5})
    assert list(genes.with_symbols(ids).columns) == ["gene", "symbol", "p"]
    assert list(genes.for_people(genes.with_symbols(ids))["gene"]) == ["CD3E"]
