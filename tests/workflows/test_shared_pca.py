from pathlib import Path

import anndata as ad
import numpy as np
import pytest
from scipy.linalg import subspace_angles

from cloister.cells import demo as demo_data
from cloister.cells import tables as cells
from cloister.errors import DataError, ParameterError
from cloister.rehearsal.rehearsal import rehearse
from cloister.workflows.shared_pca.workflow import place_in_space

DATA = Path(__file__).parents[2].parent / "shared" / "data" / "scrna"
SIZE = {"n_top_genes": 200, "n_components": 10}


@pytest.fixture(scope="module")
def sites():
    return demo_data.demo_sites()


@pytest.fixture(scope="module")
def run(sites):
    return rehearse("shared-pca", sites, **SIZE)


def pooled(sites):
    """Scanpy's steps on the pooled cells, written out: seurat dispersions in pandas, PCA by a full SVD."""
    import pandas as pd

    x = np.vstack([np.asarray(a.X.todense() if hasattr(a.X, "todense") else a.X, dtype=float) for a in sites.values()])
    x = 1e4 * x / x.sum(axis=1, keepdims=True)
    mean, variance = x.mean(axis=0), x.var(axis=0, ddof=1)
    frame = pd.DataFrame({"mean": np.log1p(np.where(mean == 0, 1e-12, mean))})
    with np.errstate(divide="ignore", invalid="ignore"):
        frame["dispersion"] = np.log(np.where(variance == 0, np.nan, variance / np.where(mean == 0, 1e-12, mean)))
    groups = frame.groupby(pd.cut(frame["mean"], 20), observed=True)["dispersion"]
    spread = (frame["dispersion"] - groups.transform("mean")) / groups.transform("std")
    spread[groups.transform("count") == 1] = 1.0
    top = np.sort(np.argsort(-spread.fillna(-np.inf).to_numpy(), kind="stable")[: SIZE["n_top_genes"]])
    log = np.log1p(x[:, top])
    z = np.clip((log - log.mean(axis=0)) / log.std(axis=0, ddof=1), -10, 10)
    u, s, _ = np.linalg.svd(z - z.mean(axis=0), full_matrices=False)
    return top, (u * s)[:, : SIZE["n_components"]], s**2 / (len(x) - 1)


def test_equals_the_pooled_pca_where_no_gene_is_withheld(sites):
    """Genes that ten cells of every site express and none dominates; up to the few cells that are not clipped."""
    common = np.ones(600, bool)
    for _ in range(4):  # totals change with the genes that are left
        for a in sites.values():
            y = np.asarray(a.X.todense())[:, common]
            square = np.square(y / y.sum(axis=1, keepdims=True))
            here = ((y > 0).sum(axis=0) >= 10) & (square.max(axis=0) < 0.75 * square.sum(axis=0))
            common[np.flatnonzero(common)[~here]] = False
    kept = {p: a[:, common].copy() for p, a in sites.items()}
    top, scores, variance = pooled(kept)
    run = rehearse("shared-pca", kept, **SIZE, min_expressing=2)
    first = run.data["basel"]
    assert list(first.uns["X_shared_pca"]["genes"]) == list(kept["basel"].var_names[top])
    found = np.vstack([run.data[p].obsm["X_shared_pca"] for p in kept])
    assert np.cos(subspace_angles(found[:, :8], scores)).min() > 0.99  # the last two are close to the eleventh
    usual = rehearse("shared-pca", kept, **SIZE)  # without products of genes that few cells express together
    found = np.vstack([usual.data[p].obsm["X_shared_pca"] for p in kept])
    assert np.cos(subspace_angles(found[:, :5], scores)).min() > 0.9
    np.testing.assert_allclose(first.uns["X_shared_pca"]["variance"], variance[: SIZE["n_components"]], rtol=0.05)


def test_every_site_gets_the_same_space(sites, run):
    spaces = [run.data[p].uns["X_shared_pca"] for p in sites]
    for other in spaces[1:]:
        np.testing.assert_array_equal(spaces[0]["mean"], other["mean"])
    assert run.results["coordinator"] == run.results["basel"]
    assert run.results["basel"]["cells"] == sum(a.n_obs for a in sites.values())


def test_genes_in_another_order_and_number(sites, run):
    changed = dict(sites)
    a = sites["vienna"]
    changed["vienna"] = a[:, np.random.default_rng(0).permutation(a.n_vars)].copy()
    again = rehearse("shared-pca", changed, **SIZE)
    found = [r.data["basel"].obsm["X_shared_pca"] for r in (run, again)]
    np.testing.assert_allclose(np.abs(found[0]), np.abs(found[1]), atol=1e-6)
    fewer = rehearse("shared-pca", {**sites, "vienna": a[:, 50:].copy()}, **SIZE)
    hidden = set(a.var_names[:50])
    assert not hidden & set(fewer.data["basel"].uns["X_shared_pca"]["genes"])


def test_result_survives_a_file(run, tmp_path):
    cells.write_cells(run.data["lugano"], tmp_path / "a.h5ad")
    back = cells.read_cells(tmp_path / "a.h5ad")
    np.testing.assert_array_equal(back.obsm["X_shared_pca"], run.data["lugano"].obsm["X_shared_pca"])
    assert list(back.uns["X_shared_pca"]["genes"]) == list(run.data["lugano"].uns["X_shared_pca"]["genes"])


def test_later_cells_are_placed_where_the_run_would_have_put_them(sites, run, tmp_path):
    cells.write_cells(run.data["basel"], tmp_path / "run.h5ad")
    for like in (run.data["basel"], cells.read_cells(tmp_path / "run.h5ad")):
        later = sites["basel"][5:9, ::-1].copy()
        place_in_space(later, like)
        np.testing.assert_allclose(later.obsm["X_shared_pca"], like.obsm["X_shared_pca"][5:9], atol=1e-9)
        assert later.uns["X_shared_pca"]["space"] == like.uns["X_shared_pca"]["space"]
    place_in_space(few := sites["basel"][5:9, 6:].copy(), like)
    assert np.abs(few.obsm["X_shared_pca"] - like.obsm["X_shared_pca"][5:9]).max() < 5
    with pytest.raises(DataError, match=r"300 of the 600 genes of the space are not here .* 50% of it, more than 30%"):
        place_in_space(sites["basel"][:, 300:].copy(), like)
    with pytest.raises(DataError, match="do not hold the space"):
        place_in_space(sites["basel"].copy(), sites["basel"])


def test_figures(run):
    pytest.importorskip("matplotlib")
    drawn = run.draw()
    assert not drawn.note
    assert [f.title for f in drawn.figures] == ["Cells in the shared space, by site", "Variance explained"]
    assert "3 labels: basel" in drawn.figures[0].alt


def test_library_sizes_from_a_column(sites):
    sized = {p: a.copy() for p, a in sites.items()}
    for a in sized.values():
        a.obs["size"] = np.asarray(a.X.sum(axis=1)).ravel()
    plain, keyed = (rehearse("shared-pca", sized, library_key=key, **SIZE) for key in (None, "size"))
    np.testing.assert_allclose(*(r.data["basel"].obsm["X_shared_pca"] for r in (plain, keyed)), atol=1e-6)


@pytest.mark.parametrize(
    ("change", "options", "kind", "message"),
    [
        (lambda a: setattr(a, "X", a.X.astype(np.float64) * 0.5), {}, DataError, "expected counts values, found log"),
        (lambda a: None, {"kind": "log"}, DataError, "expected log values, found counts"),
        (lambda a: None, {"library_key": "depth"}, DataError, "'depth'] is missing"),
        (lambda a: a.obs.__setitem__("depth", 0.0), {"library_key": "depth"}, DataError, "above 0"),
        (lambda a: None, {"layer": "raw"}, DataError, "'raw'] is missing"),
        (lambda a: None, {"min_cells": 10_000}, DataError, "fewer than 10000"),
        (lambda a: None, {"n_components": 200}, ParameterError, "n_components"),
        (lambda a: None, {"n_top_genes": 20_000}, ParameterError, "n_top_genes"),
        (lambda a: None, {"target_sum": 1e5}, ParameterError, "has no option 'target_sum' any more: it is 10,000"),
        (lambda a: a._inplace_subset_obs(np.arange(10)), {}, DataError, "site 'basel'"),
    ],
)
def test_bad_input(sites, change, options, kind, message):
    bad = {p: a.copy() for p, a in sites.items()}
    change(bad["basel"])
    with pytest.raises(kind, match=message):
        rehearse("shared-pca", bad, **{**SIZE, **options})


@pytest.mark.slow
def test_equals_scanpy_on_four_batches():
    sc = pytest.importorskip("scanpy", reason="scanpy is an oracle only")
    path = DATA / "pbmc_federation.h5ad"
    if not path.exists():
        pytest.skip(f"{path.name} is not here")
    whole = ad.read_h5ad(path)
    sites = {str(b).replace("_", "-"): whole[whole.obs["batch"] == b].copy() for b in whole.obs["batch"].unique()}
    run = rehearse("shared-pca", sites, n_top_genes=1000, n_components=30)
    pool = ad.concat(list(sites.values()))
    pool.X = pool.X.astype(np.float64)
    sc.pp.normalize_total(pool, target_sum=1e4)
    sc.pp.log1p(pool)
    sc.pp.highly_variable_genes(pool, n_top_genes=1000)
    pool = pool[:, pool.var["highly_variable"]].copy()
    pool.X = pool.X.toarray()  # scaling would do so with a warning
    sc.pp.scale(pool, max_value=10)
    sc.pp.pca(pool, n_comps=30, svd_solver="arpack")
    found = np.vstack([run.data[p].obsm["X_shared_pca"] for p in sites])
    assert set(run.data["pbmc3k"].uns["X_shared_pca"]["genes"]) == set(pool.var_names)
    assert subspace_angles(found, pool.obsm["X_pca"]).max() < 1e-3
