"""Files as hospitals bring them, made from public cells by this script: each case works, or ends in one clear sentence.

Synonyms, another vocabulary, missing genes, mixed ids, fractional counts, `adata.raw`, a site of 12 genes, a mouse,
a 10x file, upper-case names. The cells are those of the demo; `make_case` writes the files of one case.
"""

from __future__ import annotations

import json
import sys

import h5py
import numpy as np
import pandas as pd
import pytest
from anndata import AnnData
from scipy import sparse

from cloister.cells.demo import demo_sites
from cloister.cells.files import read_cells, write_cells
from cloister.cells.genes import gene_tables
from cloister.cells.ontology import cell_ontology
from cloister.cli import main as cli
from cloister.rehearsal.rehearsal import rehearse
from cloister.study import parse_study

SITES = ("USZ", "PW030", "basel")
LABELS = {"T": "CD3+ T_cells", "macrophage": "Macrophages", "B": "B lymphocytes", "dendritic": "DC", "NK/NKT": "NK/NKT"}
FIT = {"l2": 0.01, "validation": 0.0, "min_cells": 20, "n_top_genes": 200}
ONTOLOGY = f"""
name = "walk"
workflow = "train-classifier"
[parameters]
l2 = 0.01
validation = 0.0
min_cells = 20
n_top_genes = 200
[parties]
hub = "coordinator"
USZ = "site"
PW030 = "site"
basel = "site"
[ontology]
version = "{cell_ontology().version}"
"""


@pytest.fixture(scope="module")
def cells():
    found = dict(zip(SITES, demo_sites().values(), strict=True))
    for adata in found.values():
        del adata.obsm["X_pca"], adata.obs["cell_type_fine"]
    return found


def same(adata):
    return adata


def synonyms(adata):
    adata.obs["cell_type"] = adata.obs["cell_type"].astype(str).replace(LABELS).astype("category")
    return adata


def missing_genes(adata):
    return adata[:, 40:].copy()


def half_the_genes(adata):
    return adata[:, :280].copy()


def ensembl(adata):
    table = gene_tables()["human"]
    adata.var_names = [f"{table.by_symbol[n]}.7" if n in table.by_symbol else n for n in adata.var_names]
    return adata


def mixed_ids(adata):
    table = gene_tables()["human"]
    adata.var_names = [table.by_symbol.get(n, n) if i % 3 else n for i, n in enumerate(adata.var_names)]
    return adata


def soup(adata):
    x = sparse.csr_matrix(adata.X).astype(np.float64)
    rows, columns = x.nonzero()
    profile = np.asarray(x.sum(0)).ravel() / x.sum()
    x.data = np.maximum(x.data - 0.03 * np.asarray(x.sum(1)).ravel()[rows] * profile[columns], 1e-3)
    adata.X = x
    return adata


def in_raw(adata):
    adata.raw = adata.copy()
    adata.X = np.log1p(adata.X)
    return adata[:, :150].copy()


def twelve_genes(adata):
    return adata[:, :12].copy()


def mouse(adata):
    adata.var_names = [name.capitalize() for name in adata.var_names]
    return adata


def make_case(cells, folder, **changes):
    """Write the files of one case; returns site → file."""
    made = {}
    for site, adata in cells.items():
        made[site] = folder / f"{site}.h5ad"
        write_cells(changes.get(site, same)(adata.copy()), made[site])
    return made


@pytest.fixture
def call(monkeypatch, capsys):
    def call(*words):
        monkeypatch.setattr(sys, "argv", ["cloister", *map(str, words)])
        code = 0
        try:
            cli.main()
        except SystemExit as e:
            code = e.code or 0
        text = capsys.readouterr()
        return code, " ".join(text.out.split()), " ".join(text.err.split())

    return call


def test_upper_case_names_and_plain_files_work(cells, tmp_path, call):
    files = make_case(cells, tmp_path)
    code, out, err = call("check", *files.values(), "--for", "train-classifier")
    assert (code, "ready for train-classifier" in out) == (0, True), err
    run = rehearse("train-classifier", files, **FIT)
    assert set(run.data) == set(SITES)


def test_synonyms_end_in_one_sentence_and_work_with_the_ontology(cells, tmp_path, call):
    files = make_case(cells, tmp_path, USZ=synonyms)
    code, out, err = call("check", *files.values(), "--for", "train-classifier")
    assert code == 1
    assert "3 labels are written in several ways, and a model would learn the site" in err
    assert '"Macrophages" = "macrophage"' in out
    run = rehearse("train-classifier", files, check=False, **FIT)
    assert {reason for _, reason in run.origins.values()} == {"spelling"}
    (tmp_path / "study.toml").write_text(ONTOLOGY)
    code, out, err = call("check", *(f"{s}={f}" for s, f in files.items()), "--for", tmp_path / "study.toml", "--json")
    suggested = json.loads(call("check", *files.values(), "--json")[1])["suggested_labels"]
    assert suggested["B lymphocytes"] == "B"
    run = rehearse(parse_study(ONTOLOGY), files)
    labels = run.results["basel"]["labels"]
    assert {"B cell", "macrophage", "T cell"} <= set(labels)
    assert not {"B", "B lymphocytes", "DC", "Macrophages"} & set(labels)
    assert set(run.data["USZ"].obs["cell_type_original"]) >= {"Macrophages", "DC"}


def test_some_missing_genes_work_and_half_of_them_are_noted(cells, tmp_path, call):
    files = make_case(cells, tmp_path, basel=missing_genes)
    code, out, err = call("check", *files.values(), "--for", "train-classifier")
    assert (code, "560 genes in common" in out) == (0, True), err
    assert "fewer than half" not in out
    files = make_case(cells, tmp_path, basel=half_the_genes)
    code, out, _ = call("check", *files.values(), "--for", "train-classifier")
    assert code == 0
    assert "only 280 genes are in common, fewer than half of those of some sites" in out
    assert "it has 280 genes only" in out


@pytest.mark.parametrize("change", [ensembl, mixed_ids])
def test_other_ids_end_in_one_sentence_and_work_with_one_kind_of_name(cells, tmp_path, call, change):
    files = make_case(cells, tmp_path, PW030=change)
    words = ("check", *files.values(), "--for", "train-classifier")
    code, out, err = call(*words)
    if change is ensembl:
        assert code == 1
        assert "Ensembl ids" in err
        assert "--names" in err
    else:
        assert "it uses Ensembl ids and symbols side by side" in out + err
    for kind in ("symbol", "ensembl"):
        code, out, err = call(*words, "--names", kind)
        assert (code, "600 genes in common" in out) == (0, True), err
    run = rehearse("train-classifier", files, names="symbol", **FIT)
    assert run.results["basel"]["genes"] >= 100  # at most one for every two labelled cells of a site


def test_fractional_counts_work_and_are_reported(cells, tmp_path, call):
    files = make_case(cells, tmp_path, USZ=soup)
    code, out, err = call("check", *files.values(), "--for", "train-classifier")
    assert (code, "ready" in out) == (0, True), err
    assert "taken as counts (SoupX, alevin, RSEM)" in out
    run = rehearse("shared-pca", files, n_components=3, n_top_genes=100)
    assert run.data["USZ"].obsm["X_shared_pca"].shape[1] == 3


def test_counts_in_raw_are_found_by_a_setting(cells, tmp_path, call):
    files = make_case(cells, tmp_path, PW030=in_raw)
    code, _, err = call("check", *files.values(), "--for", "train-classifier")
    assert code in (1, 2)
    assert "expected counts values, found log values" in err
    files["PW030"] = f"{files['PW030']}?raw=1"
    code, out, err = call("check", *files.values(), "--for", "train-classifier")
    assert (code, "600 genes in common" in out) == (0, True), err
    data = [word for site, file in files.items() for word in ("--data", f"{site}={file}")]
    options = [word for key, value in FIT.items() for word in (f"--{key.replace('_', '-')}", value)]
    code, out, err = call("rehearse", "train-classifier", *data, *options, "--out", tmp_path / "out", "--quiet")
    assert code == 0, err
    assert "predicted" in read_cells(tmp_path / "out" / "PW030.h5ad").obs


def test_a_site_of_twelve_genes_is_refused_by_name(cells, tmp_path, call):
    files = make_case(cells, tmp_path, basel=twelve_genes)
    code, _, err = call("check", *files.values(), "--for", "bin-values")
    assert code == 1
    assert "only 12 genes in common, fewer than 200" in err
    assert "basel" in err
    run = rehearse("bin-values", files, check=False)
    assert set(run.origins.values()) == {("basel", "few-common-genes")}


def test_a_mouse_among_humans(cells, tmp_path, call):
    files = make_case(cells, tmp_path, basel=mouse)
    code, _, err = call("check", *files.values(), "--for", "bin-values")
    assert code == 1
    assert "mouse" in err


def test_a_10x_file_without_labels_takes_part(cells, tmp_path):
    files = make_case(cells, tmp_path)
    adata = read_cells(files["USZ"])
    x, ids = sparse.csr_matrix(adata.X), gene_tables()["human"].by_symbol
    with h5py.File(tmp_path / "USZ.h5", "w") as file:
        group = file.create_group("matrix")
        for name, values in {"data": x.data, "indices": x.indices, "indptr": x.indptr}.items():
            group[name] = values
        group["shape"] = [adata.n_vars, adata.n_obs]
        group["barcodes"] = np.array(adata.obs_names, "S")
        group["features/id"] = np.array([ids.get(n, n) for n in adata.var_names], "S")
        group["features/name"] = np.array(adata.var_names, "S")
    run = rehearse("train-classifier", {**files, "USZ": tmp_path / "USZ.h5"}, **FIT)
    truth = adata.obs["cell_type"].astype(str).to_numpy()
    assert (run.data["USZ"].obs["predicted"].astype(str).to_numpy() == truth).mean() > 0.6


def test_all_problems_come_at_once(cells, tmp_path, call):
    files = make_case(cells, tmp_path, USZ=twelve_genes, basel=synonyms)
    bare = AnnData(np.ones((3, 2)), obs=pd.DataFrame(index=list("abc")))
    write_cells(bare, tmp_path / "bare.h5ad")
    more = (tmp_path / "bare.h5ad", tmp_path / "none.h5ad")
    code, _, err = call("check", *files.values(), *more, "--for", "train-classifier")
    assert code == 1
    for sentence in ("3 cells, fewer than 50", "none.h5ad does not exist", "labels are written in several ways"):
        assert sentence in err
    assert "no gene in common" in err
    assert "problems; not ready for train-classifier" in err
