"""Find-markers: the genes that tell kinds apart, beside the pooled cells; few cells and donors, bad input."""

import numpy as np
import pandas as pd
import pytest

import cloister as cl
from cloister.errors import DataError, ParameterError
from cloister.rehearsal.check_disclosure import check_disclosure
from cloister.rehearsal.rehearsal import rehearse
from cloister.workflows.find_markers.workflow import Options, check

ad = pytest.importorskip("anndata")

QUICK = {"label_key": "cell_type"}
KINDS = np.array(["B", "NK", "T"])


def site(seed, n=150, kinds=3, donors=5):
    rng = np.random.default_rng(seed)
    kind = np.arange(n) % kinds
    rate = np.full((n, 30), 1.0)
    for k in range(3):
        rate[np.ix_(kind == k, range(3 * k, 3 * k + 3))] = 6.0
    a = ad.AnnData(rng.poisson(rate).astype(np.float32))
    a.var_names = [f"G{i:02d}" for i in range(30)]
    a.obs_names = [f"{seed}-{i}" for i in range(n)]
    a.obs["cell_type"] = pd.Categorical(KINDS[kind])
    a.obs["donor"] = [f"d{seed}-{i}" for i in rng.integers(0, donors, n)]
    a.obs["total"] = np.asarray(a.X.sum(axis=1)).ravel() + 1.0
    return a


@pytest.fixture(scope="module")
def sites():
    """One site lacks a kind, one has forty cells."""
    return {"basel": site(0), "lugano": site(1, kinds=2), "vienna": site(2, n=40)}


@pytest.fixture(scope="module")
def run(sites):
    return rehearse("find-markers", {p: a.copy() for p, a in sites.items()}, donor_key="donor", **QUICK)


def test_every_kind_has_its_genes(run):
    for k, kind in enumerate(KINDS):
        table = run.data["basel"].uns["markers"]
        mine = table[table["label"] == kind]
        assert set(mine["gene"][:3]) == {f"G{i:02d}" for i in range(3 * k, 3 * k + 3)}
        assert (mine["fdr"][:3] < 0.01).all()
        assert (mine["log_fold_change"][:3] > 1).all()
        assert mine["t"].is_monotonic_decreasing
        assert run.results["coordinator"]["markers"][kind][:3] == list(mine["gene"][:3])


def test_all_sites_have_one_table(run):
    for a in run.data.values():
        pd.testing.assert_frame_equal(a.uns["markers"], run.data["basel"].uns["markers"])
    assert run.results["lugano"] == run.results["coordinator"]


def test_donors_stand_beside_cells(run):
    table = run.data["basel"].uns["markers"]
    best = table[(table["label"] == "B") & table["gene"].isin(["G00", "G01", "G02"])]
    assert (best["donors"] >= 6).all()
    assert (best["donor_change"] > 1).all()
    assert (best["donor_fdr"] < 0.05).all()
    assert run.results["coordinator"]["over_donors"]["B"] == 3


def test_beside_the_pooled_cells(sites):
    one = rehearse("find-markers", {p: a.copy() for p, a in sites.items()}, **QUICK).data["basel"].uns["markers"]
    assert "donors" not in one
    x = np.concatenate([a.X for a in sites.values()])
    kinds = np.concatenate([a.obs["cell_type"].astype(str) for a in sites.values()])
    logs = np.log1p(1e4 * x / x.sum(axis=1, keepdims=True))
    for kind in KINDS:
        mine = one[one["label"] == kind].set_index("gene")["t"]
        a, b = logs[kinds == kind], logs[kinds != kind]
        t = (a.mean(axis=0) - b.mean(axis=0)) / np.sqrt(a.var(axis=0, ddof=1) / len(a) + b.var(axis=0, ddof=1) / len(b))
        order = [f"G{i:02d}" for i in np.argsort(-t)]
        assert mine[order[:3]].min() > 5
        assert (
            np.corrcoef(mine[[f"G{i:02d}" for i in range(30)]], t)[0, 1] > 0.98
        )  # a site of 40 cells adds its small entries to the rest


@pytest.mark.parametrize(
    "options", [{"library_key": "total"}, {"labels": ("B", "NK", "T", "plasma")}, {"target_sum": 1e6}]
)
def test_options(sites, options):
    done = rehearse("find-markers", {p: a.copy() for p, a in sites.items()}, **QUICK | options)
    assert next(g[0] for g in done.results["coordinator"]["markers"].values()) in ("G00", "G01", "G02")


def test_log_values(sites):
    logs = {}
    for p, a in sites.items():
        logs[p] = a.copy()
        logs[p].X = np.log1p(1e4 * a.X / a.X.sum(axis=1, keepdims=True))
    done = rehearse("find-markers", logs, kind="log", **QUICK)
    counts = rehearse("find-markers", {p: a.copy() for p, a in sites.items()}, **QUICK)
    one, two = (r.data["basel"].uns["markers"].set_index(["label", "gene"])["t"] for r in (done, counts))
    np.testing.assert_allclose(one, two[one.index], rtol=1e-3, atol=1e-2)


def test_figures(run):
    pytest.importorskip("matplotlib")
    from cloister.workflows.find_markers.figures import figures

    made = figures(run.outcomes, Options(**QUICK))
    assert [f["title"] for f in made] == ["Markers"]
    assert made[0]["png"].startswith(b"\x89PNG")
    assert "B: G0" in made[0]["alt"]
    assert figures({}, Options()) == []


def test_the_table_survives_a_file(run, tmp_path):
    a = run.data["basel"]
    cl.write_cells(a, tmp_path / "a.h5ad")
    back = cl.read_cells(tmp_path / "a.h5ad").uns["markers"]
    pd.testing.assert_frame_equal(back, a.uns["markers"], check_dtype=False, check_categorical=False)


def test_as_a_function():
    assert cl.find_markers.__module__ == "cloister.workflows.find_markers.workflow"


# ---- few cells -------------------------------------------------------------------------------------------------------


def inflated(a):
    made = a.copy()
    made.X = made.X * 1000
    return made


def other_labels(a):
    made = a.copy()
    made.obs["cell_type"] = pd.Categorical(np.array(["T", "B"])[np.arange(a.n_obs) % 2])
    return made


@pytest.mark.parametrize("options", [{}, {"donor_key": "donor"}], ids=["cells", "donors"])
def test_what_a_site_discloses_is_based_on_enough_cells_and_donors(sites, options):
    some = {p: a.copy() for p, a in sites.items()}
    some["basel"].X[5:, 29] = 0  # a gene of five cells
    seen = check_disclosure("find-markers", some, "basel", attacks=[inflated, other_labels], **QUICK | options)
    assert seen.runs == 3
    assert seen.cells >= 10
    assert seen.withheld > 0
    assert seen.donors is None if not options else seen.donors >= 3


def test_a_label_that_no_site_has_enough_of_is_left_out(sites):
    some = {p: a.copy() for p, a in sites.items()}
    for a in some.values():
        a.obs["cell_type"] = a.obs["cell_type"].astype(str)
        a.obs.iloc[:5, a.obs.columns.get_loc("cell_type")] = "rare"
    done = rehearse("find-markers", some, **QUICK)
    assert "rare" not in done.results["coordinator"]["cells"]
    named = rehearse("find-markers", {p: a.copy() for p, a in some.items()}, labels=("B", "NK", "T", "rare"), **QUICK)
    assert named.results["coordinator"]["left_out"] == ["rare"]
    assert "fewer than 10 cells here (e.g. 'rare')" in check(some["basel"], Options(**QUICK))[0]


@pytest.mark.parametrize(
    ("change", "options", "kind", "message"),
    [
        (lambda a: a.obs.pop("cell_type"), {}, DataError, "'cell_type'] is missing"),
        (lambda a: setattr(a, "X", np.log1p(a.X)), {}, DataError, "expected counts values, found log"),
        (lambda a: None, {"kind": "log"}, DataError, "expected log values, found counts"),
        (lambda a: None, {"library_key": "size"}, DataError, "'size'] must be there"),
        (lambda a: None, {"labels": ("B", "T")}, DataError, "not in the study's vocabulary"),
        (lambda a: a.obs.__setitem__("donor", "one"), {"donor_key": "donor"}, DataError, "1 donors, fewer than 3"),
        (lambda a: None, {"labels": ("B",)}, ParameterError, "labels"),
        (lambda a: None, {"target_sum": 0.0}, ParameterError, "target_sum"),
        (lambda a: None, {"min_cells": 1}, ParameterError, "min_cells"),
        (lambda a: None, {"min_donors": 1}, ParameterError, "min_donors"),
    ],
)
def test_bad_input(sites, change, options, kind, message):
    bad = {p: a.copy() for p, a in sites.items()}
    change(bad["basel"])
    with pytest.raises(kind, match=message):
        rehearse("find-markers", bad, **QUICK | options)


def test_without_donors_p_values_are_warned_of(sites):
    assert any("p values are far too small" in note for note in check(sites["basel"], Options(**QUICK)))
