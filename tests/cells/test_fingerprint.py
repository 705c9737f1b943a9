"""Cells are known again by their fingerprint, in memory and on disk; any other cells have another."""

import anndata as ad
import numpy as np
import pandas as pd
import pytest
from scipy import sparse

from cloister.cells import values
from cloister.cells.files import read_cells, write_cells
from cloister.cells.fingerprint import Fingerprint, fingerprint

READ = ("obs['label']", "layers['counts']", "obsm['X_pca']", "obs['not there']")


def cells(seed=0):
    rng = np.random.default_rng(seed)
    X = sparse.csr_matrix(rng.poisson(0.7, (40, 12)).astype(np.float32))
    adata = ad.AnnData(X, obs=pd.DataFrame(index=[f"c{i}" for i in range(40)]))
    adata.var_names = [f"G{i}" for i in range(12)]
    adata.obs["label"] = rng.choice(["B", "T", None], 40)
    adata.obs["donor"] = [f"d{i % 5}" for i in range(40)]
    adata.layers["counts"] = X.copy()
    adata.obsm["X_pca"] = rng.normal(size=(40, 3))
    return adata


def test_the_same_cells_have_the_same_fingerprint_wherever_they_are(tmp_path, monkeypatch):
    adata = cells()
    known = fingerprint(adata, READ, "donor")
    assert (known.cells, known.genes, known.donors) == (40, 12, 5)
    write_cells(adata, tmp_path / "a.h5ad")
    assert fingerprint(read_cells(tmp_path / "a.h5ad"), READ, "donor") == known
    stored = read_cells(tmp_path / "a.h5ad", backed=True)
    assert fingerprint(stored, READ, "donor") == known
    dense = adata.copy()
    dense.X = dense.X.toarray()
    assert fingerprint(dense, READ, "donor") == known
    assert Fingerprint.load(vars(known)) == known


def test_a_large_file_is_read_in_blocks_and_never_loaded(tmp_path, monkeypatch):
    write_cells(cells(), tmp_path / "a.h5ad")
    stored = read_cells(tmp_path / "a.h5ad", backed=True)
    seen = []
    read = values._read
    monkeypatch.setattr(values, "_read", lambda m, part, where: seen.append(part) or read(m, part, where))
    monkeypatch.setattr(values.blocks, "__kwdefaults__", {"entries": 5 * 12, "most": None})
    in_blocks = fingerprint(stored)
    assert [part[0] for part in seen] == [slice(i, i + 5) for i in range(0, 40, 5)]
    assert in_blocks == fingerprint(cells())


def test_explicit_zeros_do_not_count_and_the_cells_stay_as_they_were():
    adata, padded = cells(), cells()
    rows, columns = padded.X.nonzero()
    free = next(c for c in range(12) if c not in columns[rows == 0])
    where = (np.append(rows, 0), np.append(columns, free))
    padded.X = sparse.csr_matrix((np.append(padded.X.tocoo().data, 0.0), where), shape=(40, 12))
    stored = padded.X.nnz
    assert stored == adata.X.nnz + 1
    assert fingerprint(padded).matrix == fingerprint(adata).matrix
    assert padded.X.nnz == stored


def change(name, adata):
    if name == "value":
        adata.X[3, 4] += 1
    elif name == "place":
        adata.X = adata.X[:, [1, 0, *range(2, 12)]]
    elif name == "cell":
        adata = adata[:-1].copy()
    elif name == "gene":
        adata = adata[:, :-1].copy()
    elif name == "cell's name":
        adata.obs_names = ["x", *adata.obs_names[1:]]
    elif name == "gene's name":
        adata.var_names = ["x", *adata.var_names[1:]]
    elif name == "order":
        adata = adata[::-1].copy()
    elif name == "donor":
        adata.obs["donor"] = ["one", *adata.obs["donor"][1:]]
    elif name == "label":
        adata.obs["label"] = ["NK", *adata.obs["label"][1:]]
    elif name == "layer":
        adata.layers["counts"][0, 0] += 1
    elif name == "embedding":
        adata.obsm["X_pca"][7, 1] += 1e-9
    return adata


@pytest.mark.parametrize(("name", "says"), [
    ("value", "other values in adata.X"),
    ("place", "other values in adata.X"),
    ("cell", "40 cells then, 39 now"),
    ("gene", "12 genes then, 11 now"),
    ("cell's name", "or other names"),
    ("gene's name", "or other names"),
    ("order", "other values in adata.X"),
    ("donor", "5 donors then, 6 now"),
    ("label", "other labels"),
    ("layer", "layers or embeddings"),
    ("embedding", "layers or embeddings"),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore::scipy.sparse.SparseEfficiencyWarning")
def test_any_other_cells_have_another(name, says):
    known = fingerprint(cells(), READ, "donor")
    assert says in known.difference(fingerprint(change(name, cells()), READ, "donor"))


def test_what_no_study_reads_may_change():
    adata = cells()
    adata.obs["note"] = "x"
    adata.obsm["X_umap"] = np.zeros((40, 2))
    assert fingerprint(adata, READ, "donor") == fingerprint(cells(), READ, "donor")


def test_names_that_run_together_are_told_apart():
    one, two = cells(), cells()
    one.obs_names = ["ab", "c", *one.obs_names[2:]]
    two.obs_names = ["a", "bc", *two.obs_names[2:]]
    assert fingerprint(one).matrix != fingerprint(two).matrix
