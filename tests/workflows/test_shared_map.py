"""Shared-map: one map for all sites beside UMAP of the pooled cells, the saved model, few cells, bad input."""

import sys

import numpy as np
import pytest

import cloister as cl
from cloister.errors import DataError, MissingExtra, ParameterError
from cloister.models import umap_map
from cloister.rehearsal.check_disclosure import check_disclosure
from cloister.rehearsal.rehearsal import rehearse
from cloister.workflows.saved_models.shared_map import BINS, SharedMap
from cloister.workflows.shared_map.workflow import Options, check

ad = pytest.importorskip("anndata")

KINDS = np.array(["B", "Mono", "NK", "T"])
QUICK = {"use_rep": "X_pca", "timeout": 120.0}


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
    pytest.importorskip("umap", reason="the extra `map`")
    return rehearse("shared-map", {p: a.copy() for p, a in sites.items()}, **QUICK)


@pytest.fixture
def flat(monkeypatch):
    """Principal components in the place of UMAP, which takes seconds."""
    monkeypatch.setattr(umap_map, "check_umap", lambda: None)
    monkeypatch.setattr(umap_map, "fitted", lambda points, *_: umap_map.principal(points))


def test_a_kind_has_one_place_at_every_site(run):
    y = np.concatenate([a.obsm["X_shared_map"] for a in run.data.values()])
    kinds = np.concatenate([a.obs["cell_type"].to_numpy() for a in run.data.values()])
    of = np.repeat([*run.data], [a.n_obs for a in run.data.values()])
    far = np.linalg.norm(y[:, None] - y, axis=2)
    for p in run.data:
        other = np.where((of == p)[:, None] & (of != p), far, np.inf)[of == p].argmin(axis=1)
        assert (kinds[other] == kinds[of == p]).mean() > 0.95  # the nearest cell of another site


def test_beside_umap_of_the_pooled_cells(sites, run):
    x = np.concatenate([a.obsm["X_pca"] for a in sites.values()])
    pooled, ours = umap_map.fitted(x, 15, 0.5, 0), np.concatenate([a.obsm["X_shared_map"] for a in run.data.values()])
    for k in (15, 50):
        assert umap_map.recall(x, ours, k) > 0.8 * umap_map.recall(x, pooled, k)  # 0.86 and 1.0 for so few cells


def test_what_is_written(run):
    said = run.results["coordinator"]
    assert said["cells"] == 340
    assert said["points"] == 340
    for p, a in run.data.items():
        assert run.results[p] == said
        assert a.obsm["X_shared_map"].shape == (a.n_obs, 2)
        notes = a.uns["X_shared_map"]
        assert notes["cells"] == 340
        assert notes["density"].shape == (BINS, BINS)
        assert notes["density"].sum() == pytest.approx(1.0)
        assert notes["space"] == run.data["basel"].uns["X_shared_map"]["space"]


def test_figures(run):
    pytest.importorskip("matplotlib")
    from cloister.workflows.shared_map.figures import figures

    made = figures(run.outcomes, Options(use_rep="X_pca"))
    assert [f["title"] for f in made] == [
        f"Cells of {p} on the common map, all sites in grey" for p in ("basel", "lugano", "vienna")
    ]
    assert all(f["png"].startswith(b"\x89PNG") for f in made)
    assert "150 cells of basel by 4 labels, over the density of 340 cells" in made[0]["alt"]
    assert figures({}, Options()) == []
    assert cl.pl.embedding(run, color="cell_type").axes[0].get_xlabel() == "shared map 1"


def test_the_saved_map_places_new_cells_as_the_run_did(run, sites, tmp_path):
    model = run.outcomes["basel"].model
    path = model.save(tmp_path / "model.npz")
    again = cl.load_model(path)
    assert isinstance(again, SharedMap)
    a = sites["basel"].copy()
    np.testing.assert_array_equal(again.place(a, own_neighbors=15), run.data["basel"].obsm["X_shared_map"])
    again.place(a)
    some = sites["basel"][:7].copy()
    np.testing.assert_allclose(again.place(some, key_added="m"), a.obsm["X_shared_map"][:7], atol=1e-9)
    assert again.origin["sites"] == ["basel", "lugano", "vienna"]
    assert "340 points in 6 columns" in repr(again)
    a.uns["X_pca"] = {"space": "cd34"}
    with pytest.raises(DataError, match="another model"):
        again.place(a)
    a.uns["X_pca"], a.obsm["X_pca"] = {"space": "ab12"}, np.zeros((150, 3))
    with pytest.raises(DataError, match="3 columns; the run had 6"):
        again.place(a)
    path.write_bytes(b"nothing")
    with pytest.raises(DataError, match="is not a map of Cloister"):
        SharedMap.load(path)
    with pytest.raises(DataError, match="no model file"):
        SharedMap.load(tmp_path / "none.npz")
    with pytest.raises(DataError, match="do not fit together"):
        SharedMap(model.points, model.positions[1:], "X_pca", "")


def test_under_scanpys_name():
    assert cl.tl.umap is cl.shared_map
    assert cl.shared_map.__module__ == "cloister.workflows.shared_map.workflow"


def test_without_umap_learn_the_coordinator_ends_the_run_before_a_sum(sites, monkeypatch):
    monkeypatch.setitem(sys.modules, "umap", None)
    with pytest.raises(MissingExtra, match=r"cloister\[map\]"):
        rehearse("shared-map", {p: a.copy() for p, a in sites.items()}, **QUICK | {"timeout": 5.0})


# ---- few cells -------------------------------------------------------------------------------------------------------


def inflated(a):
    made = ad.AnnData(
        np.zeros((600, 2), np.float32),
        obs=a.obs.iloc[np.tile(np.arange(20), 30)].set_axis([f"c{i}" for i in range(600)]),
    )
    made.obsm["X_pca"], made.uns["X_pca"] = np.tile(a.obsm["X_pca"][:20], (30, 1)), dict(a.uns["X_pca"])
    return made


@pytest.mark.parametrize("options", [{}, {"donor_key": "donor"}], ids=["cells", "donors"])
def test_what_a_site_discloses_is_based_on_enough_cells_and_donors(sites, flat, options):
    some = {p: a.copy() for p, a in sites.items()}
    some["basel"].obsm["X_pca"][:3] = [0, 0, 0, 0, 0, 30.0]  # three cells that are like no others
    seen = check_disclosure("shared-map", some, "basel", attacks=[inflated], **QUICK | options)
    assert seen.runs == 2
    assert seen.cells >= 10
    assert seen.donors is None if not options else seen.donors >= 3


def test_a_site_with_few_cells_or_donors_receives_the_map(sites, flat):
    some = {p: a.copy() for p, a in sites.items()} | {"vienna": site(2, n=8), "lugano": site(1, donors=2)}
    run = rehearse("shared-map", some, donor_key="donor", **QUICK)
    assert run.results["coordinator"]["cells"] == 150
    assert np.isfinite(run.data["vienna"].obsm["X_shared_map"]).all()
    assert "fewer than min_cells = 10 cells here" in check(some["vienna"], Options(use_rep="X_pca"))[0]
    assert "fewer than min_donors = 3" in check(some["lugano"], Options(donor_key="donor", use_rep="X_pca"))[0]


@pytest.mark.parametrize(
    ("change", "options", "kind", "message"),
    [
        (lambda a: a.obsm.pop("X_pca"), {}, DataError, "'X_pca'] is missing"),
        (lambda a: a.obsm.update(X_pca=a.obsm["X_pca"] * np.nan), {}, DataError, "missing or infinite"),
        (lambda a: None, {"donor_key": "person"}, DataError, "person"),
        (lambda a: None, {"min_dist": -0.1}, ParameterError, "min_dist"),
        (lambda a: None, {"n_neighbors": 1}, ParameterError, "n_neighbors"),
        (lambda a: None, {"own_neighbors": -1}, ParameterError, "own_neighbors"),
        (lambda a: None, {"n_prototypes": 1}, ParameterError, "n_prototypes"),
        (lambda a: None, {"min_cells": 1}, ParameterError, "min_cells"),
        (lambda a: None, {"min_donors": 1}, ParameterError, "min_donors"),
        (lambda a: a.uns.update(X_pca={"space": "cd34"}), {"timeout": 3.0}, Exception, "another model"),
    ],
)
def test_bad_input(sites, flat, change, options, kind, message):
    bad = {p: a.copy() for p, a in sites.items()}
    change(bad["basel"])
    with pytest.raises(kind, match=message):
        rehearse("shared-map", bad, **QUICK | options)


def test_a_space_that_nobody_wrote_down_is_said(sites):
    a = sites["basel"].copy()
    a.uns.pop("X_pca")
    assert "cannot be checked" in check(a, Options(use_rep="X_pca"))[0]
