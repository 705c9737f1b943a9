import json
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from anndata import AnnData
from scipy import sparse

from cloister.cells import demo as demo_data
from cloister.cells import tables as cells
from cloister.cells import values as cell_values
from cloister.errors import DataError

COUNTS = np.array([[0, 3, 0], [1, 0, 0], [0, 0, 2], [5, 1, 0]], dtype=np.float32)
STORAGES = ["dense", "csr", "csc", "backed dense", "backed csr", "backed csc"]


@pytest.fixture
def stored(tmp_path):
    """Return a function that puts an array into an AnnData in one of the ways we meet."""

    def make(X, storage):
        form = {"dense": np.array, "csr": sparse.csr_matrix, "csc": sparse.csc_matrix}[storage.split()[-1]]
        adata = AnnData(X=form(X), var=pd.DataFrame(index=[f"g{i}" for i in range(np.shape(X)[1])]))
        if not storage.startswith("backed"):
            return adata
        cells.write_cells(adata, tmp_path / "backed.h5ad")
        return cells.read_cells(tmp_path / "backed.h5ad", backed=True)

    return make


@pytest.fixture(params=[cell_values._BLOCK, 4])
def small_blocks(request, monkeypatch):
    """Run with one block, and with blocks of a row or so."""
    default = cell_values.blocks.__kwdefaults__
    monkeypatch.setitem(default, "entries", request.param)


@pytest.fixture
def never_dense(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a sparse matrix was made dense")

    for name in ("csr_matrix", "csc_matrix"):
        monkeypatch.setattr(getattr(sparse, name), "toarray", refuse)
        monkeypatch.setattr(getattr(sparse, name), "todense", refuse)


def test_import_is_fast_because_heavy_libraries_wait():
    code = (
        "import sys, cloister.cells.tables; print({'anndata', 'h5py', 'pandas', 'scipy'} & set(sys.modules) or 'light')"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "light"


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.usefixtures("small_blocks", "never_dense")
def test_check_cells_finds_bad_values_in_any_storage(stored, storage):
    cells.check_cells(stored(COUNTS, storage))
    for bad, says in ((np.nan, "missing or infinite"), (np.inf, "missing or infinite"), (-1, "negative values")):
        X = COUNTS.copy()
        X[3, 2] = bad
        with pytest.raises(DataError, match=f"adata.X has {says}"):
            cells.check_cells(stored(X, storage))
    cells.check_cells(stored(-COUNTS, storage), allow_negative=True)


def test_check_cells_looks_at_the_layer_only(stored):
    adata = stored(-COUNTS, "csr")
    adata.layers["counts"] = sparse.csr_matrix(COUNTS)
    cells.check_cells(adata, layer="counts")
    with pytest.raises(DataError, match=r"layers\['raw'\] is missing; there is 'counts'"):
        cells.check_cells(adata, layer="raw")


def test_x_is_no_layer_even_where_anndata_lists_it_as_one(stored):
    adata = stored(COUNTS, "csr")
    assert cells.layer_names(adata) == cells.describe(adata)["layers"] == []
    adata.layers["counts"] = adata.X
    assert cells.layer_names(adata) == cells.describe(adata)["layers"] == ["counts"]
    assert cells.layer_names(SimpleNamespace(layers={None: COUNTS, "counts": COUNTS})) == ["counts"]  # anndata 0.13


def test_check_cells_names_repeated_genes(stored):
    adata = stored(np.ones((2, 14)), "dense")
    adata.var_names = [f"g{i % 7}" for i in range(14)]
    with pytest.raises(DataError, match=r"7 of them occur more than once \('g0', .* 'g4', \.\.\.\)"):
        cells.check_cells(adata)
    cells.check_cells(adata, need_names=False)
    adata = stored(COUNTS, "dense")
    adata.obs_names = ["same"] * 4
    cells.check_cells(adata)


def test_check_cells_wants_cells_genes_and_numbers():
    for shape in ((0, 3), (3, 0)):
        with pytest.raises(DataError, match=f"found {shape[0]} cells and {shape[1]} genes"):
            cells.check_cells(AnnData(X=np.zeros(shape)))
    with pytest.raises(DataError, match=r"adata\.X is missing"):
        cells.check_cells(AnnData(shape=(2, 2)))
    with pytest.raises(DataError, match="must hold numbers"):
        cells.check_cells(AnnData(X=np.ones((2, 2), dtype=complex)))


def test_check_cells_wants_labels(stored):
    adata = stored(COUNTS, "csr")
    adata.obs["cell_type"] = pd.Categorical(["T", None, None, None])
    adata.obs["empty"] = np.nan
    cells.check_cells(adata, label_key="cell_type")
    with pytest.raises(DataError, match="holds no label"):
        cells.check_cells(adata, label_key="empty")
    with pytest.raises(DataError, match="'celltype'.* is missing; there is 'cell_type', 'empty'"):
        cells.check_cells(adata, label_key="celltype")


def test_check_cells_with_an_embedding_leaves_x_alone(stored):
    adata = stored(-COUNTS, "csr")
    adata.obsm["X_pca"] = -np.ones((4, 2))
    cells.check_cells(adata, use_rep="X_pca")
    adata.obsm["X_pca"][2, 1] = np.nan
    with pytest.raises(DataError, match=r"obsm\['X_pca'\] has missing"):
        cells.check_cells(adata, use_rep="X_pca")


@pytest.mark.parametrize("storage", STORAGES)
def test_expression_kind(stored, storage):
    assert cells.expression_kind(stored(COUNTS, storage)) == "counts"
    assert cells.expression_kind(stored(np.log1p(COUNTS), storage)) == "log"
    assert cells.expression_kind(stored(COUNTS - COUNTS.mean(axis=0), storage)) == "scaled"
    assert cells.expression_kind(stored(COUNTS * 0, storage)) == "counts"


def test_expression_kind_reads_a_bounded_sample(stored, monkeypatch):
    monkeypatch.setattr(cell_values, "_SAMPLE", 10)
    adata = stored(np.ones((500, 10)), "csr")
    seen = []
    monkeypatch.setattr(cell_values, "_stored", lambda block: seen.append(block.shape) or block.data)
    assert cells.expression_kind(adata) == "counts"
    assert seen == [(1, 10)] * 16


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.usefixtures("small_blocks", "never_dense")
def test_nonzero_values(stored, storage):
    values = list(cells.nonzero_values(stored(COUNTS, storage)))
    assert all(part.dtype == np.float64 and part.ndim == 1 for part in values)
    assert sorted(np.concatenate(values)) == [1, 1, 2, 3, 5]


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.usefixtures("small_blocks")
def test_map_values_leaves_zeros_alone(stored, storage):
    binned = cells.map_values(stored(COUNTS, storage), lambda x, at: x + 10 * at, dtype=np.int16)
    assert binned.dtype == np.int16
    assert getattr(binned, "format", "dense") == storage.split()[-1]
    binned = binned[:]  # on disk it is computed when it is read
    full = binned.toarray() if sparse.issparse(binned) else binned
    np.testing.assert_array_equal(full, np.where(COUNTS != 0, COUNTS + 10 * np.arange(12).reshape(4, 3), 0))


def test_values_of_a_matrix_with_stored_zeros_and_repeated_entries():
    matrix = sparse.csr_matrix((np.array([0.0, 4, 1, 2]), [0, 1, 2, 2], [0, 2, 4]), shape=(2, 3))
    adata = AnnData(X=matrix)
    assert np.concatenate(list(cells.nonzero_values(adata))).tolist() == [4, 3]  # 1 + 2 is one entry
    mapped = cells.map_values(adata, lambda x, at: x * 2)
    assert mapped.toarray().tolist() == [[0, 8, 0], [0, 0, 6]]
    assert mapped.nnz == 3  # the stored zero is still stored
    assert adata.X.data.tolist() == [0, 4, 1, 2]  # and the data as it was


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.usefixtures("small_blocks")
def test_embedding_of_x(stored, storage):
    for use_rep in (None, "X"):
        dense = cells.embedding(stored(COUNTS, storage), use_rep)
        assert dense.dtype == np.float64
        np.testing.assert_array_equal(dense, COUNTS)


def test_embedding_of_obsm(stored):
    adata = stored(COUNTS, "csr")
    rows = np.arange(8.0).reshape(4, 2)
    adata.obsm["array"] = rows.astype(np.float32)
    adata.obsm["table"] = pd.DataFrame(rows, index=adata.obs_names, columns=["a", "b"])
    adata.obsm["sparse"] = sparse.csr_matrix(rows)
    adata.obsm["words"] = pd.DataFrame({"a": list("wxyz")}, index=adata.obs_names)
    for use_rep in ("array", "table", "sparse"):
        found = cells.embedding(adata, use_rep)
        assert found.dtype == np.float64
        np.testing.assert_array_equal(found, rows)
        found[:] = 0
        np.testing.assert_array_equal(cells.embedding(adata, use_rep), rows)
    with pytest.raises(DataError, match="table of numbers"):
        cells.embedding(adata, "words")
    with pytest.raises(DataError, match=r"obsm\['X_pca'\] is missing; there is 'array', 'table', 'sparse', 'words'"):
        cells.embedding(adata, "X_pca")


def test_embedding_refuses_to_fill_the_memory():
    wide = sparse.csr_matrix((100_000, 20_000), dtype=np.float32)  # 16 GB as float64
    with pytest.raises(DataError, match="too large to be made dense.*use_rep="):
        cells.embedding(AnnData(X=wide), None)


@pytest.mark.parametrize("storage", STORAGES)
def test_describe(stored, storage):
    adata = stored(COUNTS, storage)
    adata.obs["cell_type"] = pd.Categorical(["T", "B", None, "T"])
    adata.obs["score"] = [0.1, 0.2, 0.3, 0.4]
    adata.obsm["X_pca"] = np.ones((4, 2))
    found = cells.describe(adata)
    assert json.loads(json.dumps(found)) == {
        "cells": 4,
        "genes": 3,
        "sparse": "cs" in storage,
        "backed": "backed" in storage,
        "gene_ids": "symbol",
        "expression": "counts",
        "zeros": pytest.approx(7 / 12),
        "layers": [],
        "obsm": {"X_pca": 2},
        "obs": {"cell_type": 2, "score": None},
        "groups": {"cell_type": {"T": 2, "B": 1}},
        "warnings": [],
    }


def test_describe_warns_and_never_raises(stored):
    def warnings(X, names=None):
        adata = stored(X, "dense")
        adata.var_names = names or adata.var_names
        return " ".join(cells.describe(adata)["warnings"])

    assert "missing or infinite" in warnings(np.where(COUNTS == 5, np.nan, COUNTS))
    assert "negative" in warnings(-COUNTS)
    assert "linear scale" in warnings(COUNTS * 33.3)
    assert "not unique" in warnings(COUNTS, ["a", "a", "b"])
    assert "mix" in warnings(COUNTS, ["ENSG00000141510", "ENSG00000198851", "CD19"])
    assert "numbers instead of names" in warnings(COUNTS, ["0", "1", "2"])
    assert cells.describe(AnnData(shape=(2, 2)))["warnings"][0] == "adata.X is missing"
    assert cells.describe(AnnData(X=np.zeros((0, 2))))["zeros"] is None


def test_write_labels(stored, tmp_path):
    adata = stored(COUNTS, "csr")
    cells.write_labels(adata, "mapped", ["T", None, "B", "T"], [1, 0, 0.5, 1])
    cells.write_labels(adata, "spread", np.array(["T", "T", "B", "B"]), np.ones(4), share_name="confidence")
    cells.write_cells(adata, tmp_path / "a.h5ad")
    obs = cells.read_cells(tmp_path / "a.h5ad").obs
    assert list(obs) == ["mapped", "mapped_share", "spread", "spread_confidence"]
    assert obs["mapped"].dtype == "category"
    assert obs["mapped"].isna().tolist() == [False, True, False, False]
    assert obs["mapped_share"].tolist() == [1, 0, 0.5, 1]
    with pytest.raises(DataError, match=r"Expected 4 labels, one per cell, found shape \(3,\)"):
        cells.write_labels(adata, "bad", ["T", "T", "B"])
    with pytest.raises(DataError, match="Expected 4 shares"):
        cells.write_labels(adata, "bad", ["T"] * 4, [1.0])
    assert "bad" not in adata.obs


def test_attach_receipt_survives_the_file(stored, tmp_path):
    adata = stored(COUNTS, "csr")
    receipt = json.dumps({"study": "lung", "sent": {"vienna": 17}})
    cells.attach_receipt(adata, "mapped", receipt)
    cells.attach_receipt(adata, "outlier", "{}")
    cells.write_cells(adata, tmp_path / "a.h5ad")
    assert dict(cells.read_cells(tmp_path / "a.h5ad").uns["cloister"]) == {"mapped": receipt, "outlier": "{}"}
    with pytest.raises(DataError, match="not JSON"):
        cells.attach_receipt(adata, "mapped", "{")
    adata.uns["cloister"] = "mine"
    with pytest.raises(DataError, match="taken"):
        cells.attach_receipt(adata, "mapped", "{}")


def test_demo_sites_make_a_federation():
    sites = demo_data.demo_sites()
    assert list(sites) == ["basel", "lugano", "vienna"]
    genes = cells.genes_in_common({site: list(adata.var_names) for site, adata in sites.items()})
    assert len(genes) == 600
    donors = [set(adata.obs["donor"]) for adata in sites.values()]
    assert sum(map(len, donors)) == len(set.union(*donors))  # nobody is at two sites
    for adata in sites.values():
        cells.check_cells(adata, label_key="cell_type")
        assert cells.expression_kind(adata) == "counts"
        assert cells.describe(adata)["warnings"] == []
        assert 300 <= adata.n_obs <= 500
        logs = np.log1p(1e4 * adata.X.toarray() / adata.obs["n_counts"].to_numpy()[:, None])
        projected = (logs - adata.var["pca_mean"].to_numpy()) @ adata.varm["PCs"]
        np.testing.assert_allclose(cells.embedding(adata, "X_pca"), projected, atol=1e-3)  # stored as float32
    known = set(sites["basel"].obs["cell_type"]) | set(sites["lugano"].obs["cell_type"])
    assert set(sites["vienna"].obs["cell_type"]) <= known
