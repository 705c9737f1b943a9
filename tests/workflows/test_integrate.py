"""`integrate`: batches mix, kinds stay apart, other workflows take the result, and later cells find their place."""

import dataclasses

import numpy as np
import pandas as pd
import pytest

from cloister.cells import tables as cells
from cloister.cells import values as cell_values
from cloister.cells.spaces import space_of
from cloister.errors import DataError, ParameterError
from cloister.rehearsal.check_disclosure import check_disclosure
from cloister.rehearsal.rehearsal import rehearse
from cloister.workflows.saved_models import load_model
from cloister.workflows.saved_models.integration import Integration

ad = pytest.importorskip("anndata")

SITES = ("basel", "lugano", "vienna")
QUICK = {"use_rep": "X_pca", "n_clusters": 6, "rounds": 2, "updates": 2, "sweeps": 2}


def site(seed, n=90, batches=2, d=5):
    """Three kinds of cells; every batch is shifted in a way of its own."""
    rng = np.random.default_rng(seed)
    kind, batch = np.arange(n) % 3, (np.arange(n) // 3) % batches
    x = 8 * np.eye(3, d)[kind] + rng.normal(0, 3.0, (batches, d))[batch] + rng.normal(0, 0.6, (n, d))
    a = ad.AnnData(np.zeros((n, 3), np.float32))
    a.obs_names = [f"{seed}-{i}" for i in range(n)]
    a.obsm["X_pca"] = x
    a.uns["X_pca"] = {"space": "ab12"}
    a.obs["cell_type"] = np.array(["B", "T", "NK"])[kind]
    a.obs["batch"] = [f"run {b}" for b in batch]
    a.obs["donor"] = [f"d{seed}-{i % 4}" for i in range(n)]
    return a


@pytest.fixture(scope="module")
def sites():
    return {name: site(i) for i, name in enumerate(SITES)}


@pytest.fixture(scope="module")
def run(sites):
    return rehearse("integrate", sites, batch_key="batch", **QUICK)


def own_share(xs, k=10):
    """Share of a cell's nearest cells that are of its own site."""
    x, of = np.concatenate(xs), np.repeat(np.arange(len(xs)), [len(one) for one in xs])
    near = np.argsort(((x[:, None] - x) ** 2).sum(axis=2), axis=1)[:, 1 : k + 1]
    return float(np.mean(of[near] == of[:, None]))


def test_batches_mix_and_kinds_stay_apart(sites, run):
    before, after = (own_share([run.data[p].obsm[key] for p in SITES]) for key in ("X_pca", "X_integrated"))
    assert before > 0.8
    assert after < 0.5
    x = np.concatenate([run.data[p].obsm["X_integrated"] for p in SITES])
    kinds = np.concatenate([sites[p].obs["cell_type"] for p in SITES])
    near = np.argsort(((x[:, None] - x) ** 2).sum(axis=2), axis=1)[:, 1:11]
    assert np.mean(kinds[near] == kinds[:, None]) > 0.95
    assert "X_integrated" not in sites["basel"].obsm  # copies were annotated


def test_every_site_has_the_same_space_and_says_how_far_it_is_mixed(run):
    notes = [run.data[p].uns["X_integrated"] for p in SITES]
    assert len({n["space"] for n in notes}) == 1
    assert {n["cells"] for n in notes} == {270}
    for p in SITES:
        result = run.results[p]
        assert result["own_site"] == run.results["coordinator"]["own_site"]
        assert result["own_site"]["after"] < result["own_site"]["before"]
        assert result["own_site"]["if_mixed"] == pytest.approx(1 / 3, abs=1e-6)
        assert set(result["own_batch_here"]) == {"run 0", "run 1"}
        near = result["neighbours_of_own_batch"]
        assert near["after"] < near["before"]
        assert near["if_mixed"] == pytest.approx(0.5)
        scores = result["scores_here"]
        assert set(scores) == {"ilisi", "clisi", "label_asw", "batch_asw"}
        assert scores["ilisi"]["after"] > scores["ilisi"]["before"]
        assert scores["batch_asw"]["after"] > scores["batch_asw"]["before"]
        assert scores["clisi"]["after"] > 0.9
    assert "own_site_here" not in run.results["coordinator"]


def test_published_moves_cells_too(sites, run):
    again = rehearse("integrate", sites, mode="published", batch_key="batch", **QUICK)
    assert own_share([again.data[p].obsm["X_integrated"] for p in SITES]) < 0.5
    assert again.data["basel"].uns["X_integrated"]["space"] != run.data["basel"].uns["X_integrated"]["space"]


def test_others_are_counts_in_places_and_never_few_of_a_site(sites, run):
    others = run.data["basel"].uns["X_integrated"]["others"]
    assert others.shape == (24, 24)
    assert others.sum() <= 180
    assert others[others > 0].min() >= 10


def test_figures(run):
    pytest.importorskip("matplotlib")
    drawn = run.draw()
    assert not drawn.note
    titles = ["Mixing before and after", *(f"Cells of {p} in the joint space, the others in grey" for p in SITES)]
    assert [f.title for f in drawn.figures] == titles
    assert "90 cells of basel by 3 labels" in drawn.figures[1].alt


def test_result_survives_a_file(run, tmp_path):
    cells.write_cells(run.data["lugano"], tmp_path / "a.h5ad")
    back = cells.read_cells(tmp_path / "a.h5ad")
    np.testing.assert_array_equal(back.obsm["X_integrated"], run.data["lugano"].obsm["X_integrated"])
    assert space_of(back, "X_integrated") == space_of(run.data["lugano"], "X_integrated")


def test_only_the_embedding_is_read(sites, monkeypatch, tmp_path):
    """Cells on disk: X is opened for nobody."""
    paths = {}
    for p in SITES:
        cells.write_cells(sites[p], tmp_path / f"{p}.h5ad")
        paths[p] = cells.open_cells(tmp_path / f"{p}.h5ad")

    def refuse(*args, **more):
        raise AssertionError("X was read")

    monkeypatch.setattr(cell_values, "_read", refuse)
    opened = rehearse("integrate", paths, **QUICK | {"rounds": 1, "updates": 1})
    assert opened.data["basel"].obsm["X_integrated"].shape == (90, 5)


# ---- cells that come later -------------------------------------------------------------------------------------------


def test_a_later_cell_lies_where_the_run_would_have_put_it(sites, run):
    model = run.outcomes["basel"].model
    some = sites["basel"][[4, 17, 50]].copy()
    placed = model.transform(some)
    np.testing.assert_allclose(placed, run.data["basel"].obsm["X_integrated"][[4, 17, 50]], atol=1e-10)
    assert space_of(some, "X_integrated") == space_of(run.data["basel"], "X_integrated")


def test_the_model_survives_a_file(sites, run, tmp_path):
    model = run.outcomes["vienna"].model
    back = load_model(model.save(tmp_path / "model.npz"))
    assert isinstance(back, Integration)
    assert back.to_bytes() == model.to_bytes()
    a, b = sites["vienna"].copy(), sites["vienna"].copy()
    np.testing.assert_array_equal(back.transform(a), model.transform(b))
    assert "270 cells, 6 clusters in 5 columns, 2 batches here" in repr(back)


def test_a_batch_that_took_no_part_is_placed_among_the_others(sites, run):
    fourth = site(9, batches=1)
    fourth.obs["batch"] = "a fourth machine"
    model = run.outcomes["basel"].model
    placed = model.transform(fourth)
    others = [run.data[p].obsm["X_integrated"] for p in SITES]
    assert own_share([np.concatenate(others), placed]) < own_share([np.concatenate(others), fourth.obsm["X_pca"]])
    by_others = model.shared()
    assert by_others.batches == ()
    np.testing.assert_allclose(by_others.transform(fourth.copy(), new_batch=True), placed)
    with pytest.raises(DataError, match="a new batch needs at least 50"):
        model.transform(fourth[:10].copy())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a.obsm.pop("X_pca"), "'X_pca'] is missing"),
        (lambda a: a.uns.update(X_pca={"space": "cd34"}), "comes from another model"),
        (lambda a: a.obsm.update(X_pca=a.obsm["X_pca"][:, :4]), "has 4 columns; the run had 5"),
        (lambda a: a.obs.pop("batch"), "'batch'] is missing"),
    ],
)
def test_cells_that_cannot_be_placed(sites, run, change, message):
    a = sites["basel"].copy()
    change(a)
    with pytest.raises(DataError, match=message):
        run.outcomes["basel"].model.transform(a)


def test_a_file_that_is_no_integration(tmp_path, run):
    bad = tmp_path / "model.npz"
    for data in (b"", b"PK\x03\x04", run.outcomes["basel"].model.to_bytes()[:-50]):
        bad.write_bytes(data)
        with pytest.raises(DataError, match="is not an integration of Cloister"):
            Integration.load(bad)
    with pytest.raises(DataError, match="no model file"):
        Integration.load(tmp_path / "none.npz")
    model = run.outcomes["basel"].model
    with pytest.raises(DataError, match="do not fit together"):
        dataclasses.replace(model, batches=("one",))


# ---- other workflows take it -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("map-labels", {"query": "basel", "n_neighbors": 3}),
        ("propagate-labels", {"bits": 256, "n_neighbors": 3}),
        ("fine-tune", {"rounds": 2, "hidden": (4,)}),
        ("train-classifier", {"l2": 0.1}),
    ],
)
def test_other_workflows_take_the_result(run, name, options):
    if name == "fine-tune":
        pytest.importorskip("torch")
    data = {p: a.copy() for p, a in run.data.items()}
    if name in ("propagate-labels", "fine-tune"):
        for a in data.values():
            a.obs["cell_type"] = pd.Series(a.obs["cell_type"]).where(np.arange(a.n_obs) % 3 != 1, other=np.nan)
            a.obs["cell_type"] = np.where(np.arange(a.n_obs) % 2, a.obs["cell_type"], np.nan)
    done = rehearse(name, data, use_rep="X_integrated", timeout=300.0, **options)
    assert not done.errors
    data["vienna"].uns["X_integrated"] = {"space": "another"}
    with pytest.raises(Exception, match="another (model|kind)"):
        rehearse(name, data, use_rep="X_integrated", timeout=20.0, **options)


# ---- floors and bad input --------------------------------------------------------------------------------------------


def inflated(a):
    """What an attacker makes of its cells: many copies of few, so that it outweighs all others."""
    at = np.tile(np.arange(40), 30)
    obs = a.obs.iloc[at].set_index(pd.Index([f"c{i}" for i in range(len(at))]))
    made = ad.AnnData(np.zeros((len(at), 3), np.float32), obs=obs)
    made.obsm["X_pca"], made.uns["X_pca"] = a.obsm["X_pca"][at], dict(a.uns["X_pca"])
    return made


def zeroed(a):
    made = a.copy()
    made.obsm["X_pca"] = np.full_like(a.obsm["X_pca"], 1e-3)
    return made


@pytest.mark.parametrize(
    "options", [{}, {"donor_key": "donor"}, {"batch_key": "batch"}], ids=["cells", "donors", "batches"]
)
def test_what_a_site_discloses_is_based_on_enough_cells_and_donors(sites, options):
    some = dict(sites)
    rare = sites["basel"].copy()
    rare.obsm["X_pca"][:3] = [0, 0, 0, 0, 30.0]  # three cells that are like no others
    some["basel"] = rare
    seen = check_disclosure("integrate", some, "basel", attacks=[inflated, zeroed], **QUICK | options)
    assert seen.runs == 3
    assert seen.cells >= 10
    assert seen.donors is None if "donor_key" not in options else seen.donors >= 3


def test_donors_are_counted_where_they_are_named(sites):
    done = rehearse("integrate", sites, donor_key="donor", **QUICK | {"rounds": 1, "updates": 1})
    assert done.receipts["basel"].header["counted"] == "donors"
    few = {p: a.copy() for p, a in sites.items()}
    few["basel"].obs["donor"] = "one"
    with pytest.raises(DataError, match="1 donors, fewer than 3"):
        rehearse("integrate", few, donor_key="donor", **QUICK)


@pytest.mark.parametrize(
    ("change", "options", "kind", "message"),
    [
        (lambda a: a.obsm.pop("X_pca"), {}, DataError, "'X_pca'] is missing"),
        (lambda a: a.obsm.update(X_pca=a.obsm["X_pca"][:, :1]), {}, DataError, "1 columns; from 2"),
        (lambda a: a._inplace_subset_obs(np.arange(20)), {}, DataError, "20 cells, fewer than 50"),
        (lambda a: None, {"batch_key": "lane"}, DataError, "'lane'] is missing"),
        (lambda a: a.obs.__setitem__("batch", None), {"batch_key": "batch"}, DataError, "no batch for 90 cells"),
        (lambda a: a.obsm.update(X_pca=a.obsm["X_pca"] * np.nan), {}, DataError, "missing or infinite"),
        (lambda a: None, {"n_clusters": 1}, ParameterError, "n_clusters"),
        (lambda a: None, {"rounds": 0}, ParameterError, "rounds"),
        (lambda a: None, {"sigma": 0.0}, ParameterError, "sigma"),
        (lambda a: None, {"min_cluster_cells": 1}, ParameterError, "min_cluster_cells"),
        (lambda a: a.uns.update(X_pca={"space": "cd34"}), {"timeout": 3.0}, Exception, "another model"),
    ],
)
def test_bad_input(sites, change, options, kind, message):
    bad = {p: a.copy() for p, a in sites.items()}
    change(bad["basel"])
    with pytest.raises(kind, match=message):
        rehearse("integrate", bad, **{**QUICK, **options})


def test_small_batches_are_told_of(sites):
    a = sites["basel"].copy()
    a.obs["batch"] = ["rare"] * 5 + ["usual"] * 85
    from cloister.workflows.integrate.workflow import Options, check

    assert "fewer than 30 cells (e.g. 'rare')" in check(a, Options(use_rep="X_pca", batch_key="batch"))[0]
    a.uns.pop("X_pca")
    assert "cannot be checked" in check(a, Options(use_rep="X_pca"))[0]


def test_beside_harmonypy():
    """Sites of 240 cells and five rounds; with 90 cells, clusters that are closed at a site cost mixing."""
    hm = pytest.importorskip("harmonypy", reason="an oracle only")
    sites = {name: site(i, n=240) for i, name in enumerate(SITES)}
    run = rehearse("integrate", sites, batch_key="batch", use_rep="X_pca", n_clusters=6)
    x = np.concatenate([sites[p].obsm["X_pca"] for p in SITES])
    batch = np.concatenate([[f"{p} {b}" for b in sites[p].obs["batch"]] for p in SITES])
    peer = np.asarray(hm.run_harmony(x, pd.DataFrame({"batch": batch}), ["batch"], nclust=6, verbose=False).Z_corr)
    peer = peer if peer.shape == x.shape else peer.T
    ours = own_share([run.data[p].obsm["X_integrated"] for p in SITES])
    assert ours <= own_share(np.split(peer, 3)) + 0.05
