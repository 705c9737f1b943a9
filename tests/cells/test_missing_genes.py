"""Models on files that lack some of their genes."""

import logging

import numpy as np
import pytest
from anndata import AnnData

from cloister.cells.genes import current_symbols
from cloister.cells.missing_genes import fill_missing
from cloister.cells.values import rows_of
from cloister.errors import DataError
from cloister.models.linear import LinearModel
from cloister.workflows.saved_models.cell_classifier import CellClassifier

GENES = [f"GENE{i}" for i in range(100)]


def cells(names, seed=0):
    adata = AnnData(np.random.default_rng(seed).poisson(1.0, (6, len(names))).astype(np.float32))
    adata.var_names = names
    return adata


def test_zeros_stand_for_missing_genes():
    adata = cells(GENES[:98])
    names, rows = fill_missing(GENES[:98], rows_of(adata), GENES, dict.fromkeys(GENES, 1.0))
    assert sorted(names) == sorted(GENES)
    found = rows[1:4].toarray()
    assert rows.shape == (6, 100)
    np.testing.assert_array_equal(found[:, :98], adata.X[1:4])
    assert not found[:, 98:].any()


@pytest.mark.parametrize(
    ("missing", "heavy", "logged"),
    [(0, 0, False), (5, 0, False), (6, 0, True), (30, 0, True), (1, 0.04, False), (1, 0.2, True)],
)
def test_what_is_missing_is_weighed(missing, heavy, logged, caplog):
    weights = {name: heavy * 100 / (1 - heavy) if i == 99 and heavy else 1.0 for i, name in enumerate(GENES)}
    here = GENES[: 100 - missing]
    with caplog.at_level(logging.WARNING, "cloister"):
        fill_missing(here, rows_of(cells(here)), GENES, weights)
    assert ("count as not expressed" in caplog.text) == logged


@pytest.mark.parametrize(("missing", "heavy"), [(31, 0.0), (1, 0.35)])
def test_too_much_is_an_error_with_its_cause(missing, heavy):
    weights = {name: heavy * 100 / (1 - heavy) if i == 99 and heavy else 1.0 for i, name in enumerate(GENES)}
    here = GENES[: 100 - missing]
    with pytest.raises(DataError, match=rf"{missing} of the 100 genes of the model are not here .*more than 30%"):
        fill_missing(here, rows_of(cells(here)), GENES, weights)
    ids = [f"ENSG{i:011d}" for i in range(100)]
    with pytest.raises(DataError, match="it uses Ensembl ids and the others symbols"):
        fill_missing(ids, rows_of(cells(ids)), GENES, weights)


def test_a_gene_that_changed_its_symbol_is_not_missing():
    old, new = ["GNB2L1", "IGJ", "CD19"], current_symbols(["GNB2L1", "IGJ", "CD19"])
    assert new[:2] == ["RACK1", "JCHAIN"]
    for here, needed in ((old, new), (new, old)):
        names, rows = fill_missing(here, rows_of(cells(here)), needed, dict.fromkeys(needed, 1.0))
        assert list(names) == needed
        assert rows.shape == (6, 3)


def test_a_model_remembers_layer_and_library_sizes():
    rng = np.random.default_rng(4)
    genes = tuple(GENES)
    origin = {"layer": "counts", "library_key": "size"}
    told = CellClassifier(LinearModel(("a", "b"), rng.normal(size=(100, 2)), np.zeros(2), genes, genes, origin=origin))
    silent = CellClassifier(
        LinearModel(*(getattr(told.model, k) for k in ("labels", "coefficients", "intercept")), genes, genes)
    )
    adata = cells(GENES)
    adata.layers["counts"], adata.X = adata.X.copy(), np.log1p(adata.X)
    with pytest.raises(DataError, match=r"trained with library sizes, and adata.obs\['size'\] is missing"):
        told.predict_proba(adata)
    adata.obs["size"] = adata.obs["total"] = np.arange(50, 56) * 3.0
    wanted = silent.predict_proba(adata, layer="counts", library_key="size")
    np.testing.assert_array_equal(told.predict_proba(adata), wanted)
    again = CellClassifier(LinearModel.from_bytes(told.to_bytes(), "again"))
    np.testing.assert_array_equal(again.predict_proba(adata), wanted)
    del adata.obs["size"]
    np.testing.assert_array_equal(told.predict_proba(adata, library_key="total"), wanted)


def test_a_classifier_labels_cells_that_lack_a_gene():
    rng = np.random.default_rng(3)
    genes = tuple(GENES)
    model = LinearModel(("a", "b"), rng.normal(size=(100, 2)), np.zeros(2), genes, genes)
    whole = cells(GENES)
    short = whole[:, ::-1][:, :97].copy()
    p, q = CellClassifier(model).predict_proba(whole), CellClassifier(model).predict_proba(short)
    zeroed = whole.copy()
    zeroed.X[:, :3] = 0
    np.testing.assert_allclose(q, CellClassifier(model).predict_proba(zeroed), rtol=1e-9)
    assert p.shape == q.shape
