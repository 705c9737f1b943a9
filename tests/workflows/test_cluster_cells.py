"""Cluster-cells: one name for a kind of cells at every site, beside the pooled clusters; few cells, bad input."""

import numpy as np
import pytest

import cloister as cl
from cloister.errors import DataError, ParameterError
from cloister.models import leiden
from cloister.rehearsal.check_disclosure import check_disclosure
from cloister.rehearsal.rehearsal import rehearse
from cloister.workflows.cluster_cells.workflow import Options, check

ad = pytest.importorskip("anndata")
metrics = pytest.importorskip("sklearn.metrics", reason="an oracle only")
pytest.importorskip("igraph", reason="the extra `cluster`")

KINDS = np.array(["B", "Mono", "NK", "T"])
QUICK = {"use_rep": "X_pca", "resolution": 0.3}


def site(seed, n=150, kinds=4, donors=6):
    rng = np.random.default_rng(seed)
    kind = np.arange(n) % kinds
    a = ad.AnnData(np.zeros((n, 2), np.float32))
    a.obs_names = [f"{seed}-{i}" for i in range(n)]
    a.obsm["X_pca"] = 6 * np.eye(4, 6)[kind] + rng.normal(0, 1, (n, 6))
    a.uns["X_pca"] = {"space": "ab12"}
    a.obs["cell_type"] = KINDS[kind]
    a.obs["donor"] = [f"d{seed}-{i}" for i in rng.integers(0, donors, n)]
    return a


@pytest.fixture(scope="module")
def sites():
    """One site lacks a kind, one has forty cells."""
    return {"basel": site(0), "lugano": site(1, kinds=3), "vienna": site(2, n=40)}


@pytest.fixture(scope="module")
def run(sites):
    return rehearse("cluster-cells", {p: a.copy() for p, a in sites.items()}, **QUICK)


def together(run, column):
    return np.concatenate([a.obs[column].astype(str) for a in run.data.values()])


def test_a_kind_has_one_name_at_every_site(run):
    found, kinds = together(run, "cluster"), together(run, "cell_type")
    assert metrics.adjusted_rand_score(kinds, found) > 0.95
    name = {k: max(set(found), key=lambda c, k=k: np.sum((found == c) & (kinds == k))) for k in KINDS}
    assert len(set(name.values())) == 4
    for a in run.data.values():
        for k in set(a.obs["cell_type"]):
            assert (a.obs["cluster"][a.obs["cell_type"] == k] == name[k]).mean() > 0.9
    assert (run.data["lugano"].obs["cluster"] == name["T"]).sum() <= 3  # the kind that this site lacks
    assert all(a.obs["cluster"].cat.categories.tolist() == [str(k) for k in range(4)] for a in run.data.values())


def test_beside_clusters_of_the_pooled_cells(sites, run):
    x = np.concatenate([a.obsm["X_pca"] for a in sites.values()])
    pooled = leiden.partition(leiden.neighbour_graph(x, 15), 0.3, 0)
    assert metrics.adjusted_rand_score(pooled, together(run, "cluster")) > 0.95


def test_other_seeds_find_the_same(sites, run):
    other = rehearse("cluster-cells", {p: a.copy() for p, a in sites.items()}, seed=17, **QUICK)
    assert metrics.adjusted_rand_score(together(run, "cluster"), together(other, "cluster")) > 0.95


def test_what_is_written(run):
    said = run.results["coordinator"]
    assert said["clusters"] == 4
    assert said["cells"] == 340
    assert sum(said["sizes"].values()) == pytest.approx(340, abs=4)
    for p, a in run.data.items():
        assert run.results[p] == said
        assert np.all((a.obs["cluster_votes"] > 0) & (a.obs["cluster_votes"] <= 1))
        assert a.uns["cluster"]["resolution"] == 0.3
        assert len(a.uns["cluster"]["sizes"]) == 4
    titles = [f["title"] for f in run.figures()] if hasattr(run, "figures") else []
    assert not titles or "Clusters by site" in titles


def test_figures(run):
    pytest.importorskip("matplotlib")
    from cloister.workflows.cluster_cells.figures import figures

    made = figures(run.outcomes, Options(**QUICK))
    assert [f["title"] for f in made] == ["Clusters by site", "Clusters against cell_type"]
    assert all(f["png"].startswith(b"\x89PNG") for f in made)
    assert "4 clusters" in made[0]["alt"]
    assert figures({}, Options()) == []


def test_resolution_is_that_of_scanpy(sites):
    more = rehearse("cluster-cells", {p: a.copy() for p, a in sites.items()}, **QUICK | {"resolution": 3.0})
    assert more.results["coordinator"]["clusters"] > 6


def test_as_a_function(sites):
    assert cl.cluster_cells.__module__ == "cloister.workflows.cluster_cells.workflow"


# ---- few cells -------------------------------------------------------------------------------------------------------


def inflated(a):
    made = ad.AnnData(
        np.zeros((600, 2), np.float32),
        obs=a.obs.iloc[np.tile(np.arange(20), 30)].set_axis([f"c{i}" for i in range(600)]),
    )
    made.obsm["X_pca"], made.uns["X_pca"] = np.tile(a.obsm["X_pca"][:20], (30, 1)), dict(a.uns["X_pca"])
    return made


def elsewhere(a):
    made = a.copy()
    made.obsm["X_pca"] = made.obsm["X_pca"] * 100
    return made


@pytest.mark.parametrize("options", [{}, {"donor_key": "donor"}], ids=["cells", "donors"])
def test_what_a_site_discloses_is_based_on_enough_cells_and_donors(sites, options):
    some = {p: a.copy() for p, a in sites.items()}
    some["basel"].obsm["X_pca"][:3] = [0, 0, 0, 0, 0, 30.0]  # three cells that are like no others
    seen = check_disclosure("cluster-cells", some, "basel", attacks=[inflated, elsewhere], **QUICK | options)
    assert seen.runs == 3
    assert seen.cells >= 10
    assert seen.donors is None if not options else seen.donors >= 3


def test_a_site_with_few_cells_or_donors_receives_the_clusters(sites):
    some = {p: a.copy() for p, a in sites.items()} | {"vienna": site(2, n=8), "lugano": site(1, donors=2)}
    run = rehearse("cluster-cells", some, donor_key="donor", **QUICK)
    assert run.results["coordinator"]["cells"] == 150
    assert run.data["vienna"].obs["cluster"].notna().all()
    notes = check(some["vienna"], Options(**QUICK))
    assert "fewer than min_cells = 10 cells here" in notes[0]
    assert "fewer than min_donors = 3" in check(some["lugano"], Options(donor_key="donor", **QUICK))[0]


@pytest.mark.parametrize(
    ("change", "options", "kind", "message"),
    [
        (lambda a: a.obsm.pop("X_pca"), {}, DataError, "'X_pca'] is missing"),
        (lambda a: a.obsm.update(X_pca=a.obsm["X_pca"] * np.nan), {}, DataError, "missing or infinite"),
        (lambda a: None, {"donor_key": "person"}, DataError, "person"),
        (lambda a: None, {"resolution": 0.0}, ParameterError, "resolution"),
        (lambda a: None, {"n_neighbors": 1}, ParameterError, "n_neighbors"),
        (lambda a: None, {"n_prototypes": 1}, ParameterError, "n_prototypes"),
        (lambda a: None, {"min_cells": 1}, ParameterError, "min_cells"),
        (lambda a: None, {"min_donors": 1}, ParameterError, "min_donors"),
        (lambda a: a.uns.update(X_pca={"space": "cd34"}), {"timeout": 3.0}, Exception, "another model"),
    ],
)
def test_bad_input(sites, change, options, kind, message):
    bad = {p: a.copy() for p, a in sites.items()}
    change(bad["basel"])
    with pytest.raises(kind, match=message):
        rehearse("cluster-cells", bad, **QUICK | options)


def test_a_space_that_nobody_wrote_down_is_said(sites):
    a = sites["basel"].copy()
    a.uns.pop("X_pca")
    assert "cannot be checked" in check(a, Options(**QUICK))[0]
