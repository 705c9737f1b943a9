"""Choose-genes: the genes that tell kinds apart within batches, and not those that tell batches apart."""

import numpy as np
import pandas as pd
import pytest

import cloister as cl
from cloister.errors import DataError, ParameterError
from cloister.rehearsal.check_disclosure import check_disclosure
from cloister.rehearsal.rehearsal import rehearse
from cloister.workflows.choose_genes.workflow import Options, check

ad = pytest.importorskip("anndata")

QUICK = {"n_top_genes": 6, "min_batch_cells": 30}


def site(seed, n=120, factor=1.0, donors=5):
    rng = np.random.default_rng(seed)
    mean = np.random.default_rng(9).gamma(1.0, 3.0, 40)
    rate = np.tile(mean, (n, 1)) * rng.gamma(8, 0.125, (n, 1))
    kind = np.arange(n) % 3
    for k in range(3):
        rate[:, 2 * k : 2 * k + 2] = np.where(kind == k, 9.0, 0.3)[:, None]
    rate[:, 30:] *= factor  # the batch
    a = ad.AnnData(rng.poisson(rate).astype(np.float32))
    a.var_names = [f"G{i:02d}" for i in range(40)]
    a.obs_names = [f"{seed}-{i}" for i in range(n)]
    a.obs["batch"] = np.where(np.arange(n) < n // 2, "one", "two")
    a.obs["donor"] = [f"d{seed}-{i}" for i in rng.integers(0, donors, n)]
    return a


@pytest.fixture(scope="module")
def sites():
    """One site has forty cells."""
    return {"basel": site(0), "lugano": site(1, factor=8.0), "vienna": site(2, n=40)}


@pytest.fixture(scope="module")
def run(sites):
    return rehearse("choose-genes", {p: a.copy() for p, a in sites.items()}, **QUICK)


def test_genes_of_kinds_are_chosen_and_those_of_batches_are_not(run):
    for a in run.data.values():
        assert list(a.var_names[a.var["highly_variable"]]) == [f"G{i:02d}" for i in range(6)]
        assert (a.var["highly_variable_nbatches"][:6] >= 2).all()
        assert a.var["highly_variable_rank"][:6].notna().all()
        assert a.var["highly_variable"].dtype == bool
    assert run.results["coordinator"] == run.results["basel"]
    by_batches = run.results["basel"]["chosen_by_batches"]
    assert sum(by_batches.values()) == 6
    assert by_batches["3"] >= 4


def test_batches_of_a_site(sites):
    done = rehearse("choose-genes", {p: a.copy() for p, a in sites.items()}, batch_key="batch", **QUICK)
    assert done.results["basel"]["batches"] == 4  # those of the small site have twenty cells
    notes = check(sites["vienna"], Options(batch_key="batch", **QUICK))
    assert "2 batches have fewer than 30 cells (e.g. 'one')" in notes[0]


def test_sites_with_other_genes(sites):
    some = {p: a.copy() for p, a in sites.items()}
    some["basel"] = some["basel"][:, ::-1][:, :38].copy()  # lacks G00 and G01
    done = rehearse("choose-genes", some, **QUICK)
    assert not done.data["lugano"].var["highly_variable"].iloc[:2].any()
    assert set(done.data["basel"].var_names[done.data["basel"].var["highly_variable"]]) >= {"G02", "G03", "G04", "G05"}


def test_later_steps_take_the_chosen_genes(run):
    done = rehearse("shared-pca", {p: a.copy() for p, a in run.data.items()}, genes_key="highly_variable",
                    n_components=3, n_top_genes=30, min_cells=40)  # fmt: skip
    assert set(done.data["basel"].uns["X_shared_pca"]["genes"]) == {f"G{i:02d}" for i in range(6)}
    whole = np.log1p(1e4 * run.data["basel"].X[:, :6] / run.data["basel"].X.sum(axis=1, keepdims=True))
    space = done.data["basel"].uns["X_shared_pca"]
    every = np.concatenate([np.log1p(1e4 * a.X[:, :6] / a.X.sum(axis=1, keepdims=True)) for a in run.data.values()])
    np.testing.assert_allclose(space["mean"], every.mean(axis=0), rtol=1e-5)
    assert whole.shape == (120, 6)
    later = run.data["basel"][:7].copy()
    del later.obsm
    cl.place_in_space(later, like=done.data["basel"])
    np.testing.assert_allclose(later.obsm["X_shared_pca"], done.data["basel"].obsm["X_shared_pca"][:7], atol=1e-6)


@pytest.mark.parametrize(
    ("key", "message"),
    [("none", "'none'] must be there"), ("highly_variable_rank", "must be there"), ("few", "names 2 genes")],
)
def test_a_column_that_names_no_genes(run, key, message):
    bad = {p: a.copy() for p, a in run.data.items()}
    for a in bad.values():
        a.var["few"] = np.arange(40) < 2
    with pytest.raises(DataError, match=message):
        rehearse("shared-pca", bad, genes_key=key, n_components=3, n_top_genes=30, min_cells=40)


def test_figures(run):
    pytest.importorskip("matplotlib")
    from cloister.workflows.choose_genes.figures import figures

    made = figures(run.outcomes, Options(**QUICK))
    assert made[0]["alt"].startswith("6 chosen genes; ")
    assert made[0]["alt"].endswith(" of them rank high in all 3 batches.")
    assert figures({}, Options()) == []


def test_as_a_function():
    assert cl.choose_genes.__module__ == "cloister.workflows.choose_genes.workflow"


def inflated(a):
    made = a.copy()
    made.X = made.X * 1000
    return made


@pytest.mark.parametrize("options", [{}, {"donor_key": "donor"}], ids=["cells", "donors"])
def test_what_a_site_discloses_is_based_on_enough_cells_and_donors(sites, options):
    some = {p: a.copy() for p, a in sites.items()}
    some["basel"].X[:, 20] = np.where(np.arange(120) < 4, 300, 0)
    seen = check_disclosure("choose-genes", some, "basel", attacks=[inflated], **QUICK | options)
    assert seen.cells >= 10
    assert seen.donors is None if not options else seen.donors >= 3


@pytest.mark.parametrize(
    ("change", "options", "kind", "message"),
    [
        (lambda a: setattr(a, "X", np.log1p(a.X)), {}, DataError, "expected counts, found log"),
        (lambda a: a.obs.__setitem__("donor", "one"), {"donor_key": "donor"}, DataError, "1 donors, fewer than 3"),
        (lambda a: None, {"batch_key": "lane"}, DataError, "'lane'] is missing"),
        (lambda a: setattr(a, "var_names", pd.Index(["G"] * 40)), {}, DataError, "unique"),
        (lambda a: None, {"n_top_genes": 1}, ParameterError, "n_top_genes"),
        (lambda a: None, {"min_cells": 1}, ParameterError, "min_cells"),
        (lambda a: None, {"min_batch_cells": 5}, ParameterError, "min_batch_cells"),
        (lambda a: None, {"min_donors": 1}, ParameterError, "min_donors"),
    ],
)
def test_bad_input(sites, change, options, kind, message):
    bad = {p: a.copy() for p, a in sites.items()}
    change(bad["basel"])
    with pytest.raises(kind, match=message):
        rehearse("choose-genes", bad, **QUICK | options)
