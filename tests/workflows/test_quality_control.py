"""Quality-control: common cut-offs, flags and scores in obs, and what is dropped."""

import numpy as np
import pandas as pd
import pytest

import cloister as cl
from cloister.errors import DataError, ParameterError
from cloister.rehearsal.check_disclosure import check_disclosure
from cloister.rehearsal.rehearsal import rehearse
from cloister.workflows.quality_control.workflow import Options, check, warnings

ad = pytest.importorskip("anndata")

QUICK = {"doublet_rate": 0.0}
DOUBLETS = 12  # of each site, the first cells
COLUMNS = ["total_counts", "n_genes_by_counts", "pct_counts_mt", "qc_pass"]


def site(seed, n=150, dead=15, donors=5, g=60):
    """Three kinds of cells. The first are doublets of two kinds, the last are dying."""
    rng = np.random.default_rng(seed)
    rate = np.tile(np.random.default_rng(9).gamma(1.0, 2.0, g), (n, 1))
    kind = np.arange(n) % 3
    for k in range(3):
        rate[:, 10 * k : 10 * k + 10] *= np.where(kind == k, 8.0, 0.1)[:, None]
    rate[:, -3:] = 1.0
    x = rng.poisson(rate * rng.gamma(20, 0.05, (n, 1)))
    x[:DOUBLETS] += x[DOUBLETS + 1 : 2 * DOUBLETS + 1]
    if dead:
        x[-dead:] = rng.binomial(x[-dead:], 0.1)
        x[-dead:, -3:] = rng.poisson(30, (dead, 3))
    a = ad.AnnData(x.astype(np.float32))
    a.var_names = [f"G{i:02d}" for i in range(g - 3)] + ["MT-ND1", "MT-CO1", "mt-CYB"]
    a.obs_names = [f"{seed}-{i}" for i in range(n)]
    a.obs["donor"] = [f"d{seed}-{i}" for i in rng.integers(0, donors, n)]
    return a


@pytest.fixture(scope="module")
def sites():
    """One site has forty cells, of which few are dying, and lacks a kind."""
    small = site(2, n=60, dead=4)
    return {"basel": site(0), "lugano": site(1), "vienna": small[np.arange(60) % 3 < 2].copy()}


def copies(sites):
    return {p: a.copy() for p, a in sites.items()}


@pytest.fixture(scope="module")
def run(sites):
    return rehearse("quality-control", copies(sites))


def test_obs_has_measures_flags_and_scores(run, sites):
    for p, a in run.data.items():
        x = sites[p].X
        np.testing.assert_allclose(a.obs["total_counts"], x.sum(axis=1))
        np.testing.assert_allclose(a.obs["n_genes_by_counts"], (x > 0).sum(axis=1))
        np.testing.assert_allclose(a.obs["pct_counts_mt"], 100 * x[:, -3:].sum(axis=1) / x.sum(axis=1), rtol=1e-5)
        assert a.obs["qc_pass"].dtype == a.obs["predicted_doublet"].dtype == bool
        assert a.n_obs == sites[p].n_obs  # nothing is dropped
        assert ((a.obs["doublet_score"] > 0) & (a.obs["doublet_score"] < 1)).all()
    assert run.results["coordinator"]["cells"] == {"basel": 150, "lugano": 150, "vienna": 40}
    for p in run.data:
        assert {k: run.results[p][k] for k in run.results["coordinator"]} == run.results["coordinator"]


def test_dying_cells_fail_at_every_site_and_others_pass(run):
    for p, dead in (("basel", 15), ("lugano", 15), ("vienna", 2)):
        ok = run.data[p].obs["qc_pass"].to_numpy()
        assert not ok[-dead:].any()
        assert ok[:-dead].mean() > 0.9
        assert run.results[p]["failed"] == (~ok).sum()


def test_doublets_have_the_highest_scores(run):
    for p in ("basel", "lugano"):
        scores = run.data[p].obs["doublet_score"].to_numpy()
        away = scores[:DOUBLETS][:, None] - scores[DOUBLETS:-15]
        assert np.mean(away > 0) + 0.5 * np.mean(away == 0) > 0.85
    found = np.stack([run.data[p].obs["predicted_doublet"][:-15] for p in ("basel", "lugano")])
    assert found[:, :DOUBLETS].mean() > 3 * found[:, DOUBLETS:].mean()


def test_cutoffs_are_near_those_of_pooled_cells(run):
    every = np.concatenate([a.obs["pct_counts_mt"] for a in run.data.values()])
    middle = np.median(every)
    wanted = middle + 5 * np.median(np.abs(every - middle))
    assert run.results["basel"]["cutoffs"]["pct_counts_mt"] == pytest.approx([0, wanted], rel=0.15)
    found = run.data["basel"].uns["quality_control"]
    assert found["sites"].tolist() == ["basel", "lugano", "vienna"]
    for p, a in run.data.items():
        assert a.uns["quality_control"]["cutoffs"]["total_counts"].tolist() == found["cutoffs"]["total_counts"].tolist()
        here = found["histograms"]["total_counts"][found["sites"].tolist().index(p)]
        assert here.sum() == a.n_obs
        assert here[here > 0].min() >= 10


def test_quantiles_and_no_doublets(sites):
    done = rehearse("quality-control", copies(sites), cutoff=0.05, **QUICK)
    every = np.concatenate([a.obs["total_counts"] for a in done.data.values()])
    low, high = done.results["basel"]["cutoffs"]["total_counts"]
    np.testing.assert_allclose([low, high], np.quantile(every, [0.05, 0.95]), rtol=0.15)
    assert "doublet_score" not in done.data["basel"].obs
    assert "doublet_threshold" not in done.results["basel"]


def test_cells_are_dropped_only_if_they_are_enough(sites):
    done = rehearse("quality-control", copies(sites), drop=True, **QUICK)
    assert done.results["basel"]["dropped"] == done.results["basel"]["failed"] >= 15
    assert done.data["basel"].n_obs == 150 - done.results["basel"]["dropped"]
    assert done.data["basel"].obs["qc_pass"].all()
    assert done.results["vienna"]["failed"] < 10
    assert done.results["vienna"]["dropped"] == 0
    assert done.data["vienna"].n_obs == 40
    one = copies(sites)
    for a in one.values():
        a.obs["donor"] = np.where(np.arange(a.n_obs) >= a.n_obs - 30, "odd", a.obs["donor"])
    done = rehearse("quality-control", one, drop=True, donor_key="donor", **QUICK)
    assert done.results["basel"]["failed"] >= 15
    assert done.results["basel"]["dropped"] == 0  # they are of one donor


def test_drop_is_warned_of():
    assert not warnings(None, Options())
    assert "open finding" in warnings(None, Options(drop=True))[0]


def test_genes_without_the_prefix(sites):
    some = copies(sites)
    for a in some.values():
        a.var_names = [f"G{i:02d}" for i in range(60)]
    notes = check(some["basel"], Options(**QUICK))
    assert "no gene name begins with 'MT-'" in notes[0]
    done = rehearse("quality-control", some, **QUICK)
    assert set(done.results["basel"]["cutoffs"]) == {"total_counts", "n_genes_by_counts"}
    assert done.data["basel"].obs["pct_counts_mt"].isna().all()
    some["lugano"] = sites["lugano"].copy()
    done = rehearse("quality-control", some, **QUICK)
    assert not done.data["lugano"].obs["qc_pass"][-15:].any()
    assert "pct_counts_mt" in done.results["basel"]["cutoffs"]


def test_a_small_site_is_told_what_its_scores_rest_on(sites):
    assert "fewer than 250 cells" in check(sites["vienna"], Options())[0]
    assert not check(site(5, n=260), Options())


def test_later_steps_take_the_cells_that_are_left(sites, tmp_path):
    text = """name = "two"
seed = 0
[parties]
hub = "coordinator"
basel = "site"
lugano = "site"
vienna = "site"
[[step]]
name = "quality-control"
workflow = "quality-control"
[step.options]
drop = true
doublet_rate = 0
[[step]]
name = "choose-genes"
workflow = "choose-genes"
[step.options]
n_top_genes = 6
min_batch_cells = 30
"""
    (tmp_path / "study.toml").write_text(text)
    series = cl.rehearse(tmp_path / "study.toml", data=copies(sites))
    assert series.data["basel"].n_obs < 150
    assert series.data["basel"].var["highly_variable"].sum() == 6


def test_figures(run):
    pytest.importorskip("matplotlib")
    from cloister.workflows.quality_control.figures import figures

    made = figures(run.outcomes, Options())
    assert [f["title"] for f in made] == ["Cells by site, and common cut-offs", "Quality of cells"]
    assert "Histograms of 3 sites" in made[0]["alt"]
    assert "mitochondrial counts, % at most" in made[0]["alt"]
    assert "doublet score at most" in made[0]["alt"]
    assert "basel: " in made[1]["alt"]
    assert figures({}, Options()) == []
    assert len(cl.pl.quality(run).axes) == 4
    with pytest.raises(DataError, match="quality-control writes it"):
        cl.pl.quality(site(0))


def test_as_a_function():
    assert cl.quality_control.__module__ == "cloister.workflows.quality_control.workflow"
    assert cl.pp.quality_control is cl.quality_control


def inflated(a):
    made = a.copy()
    made.X = made.X * 1000
    return made


def alike(a):
    """All cells are the same one."""
    made = a.copy()
    made.X = np.tile(made.X[:1], (a.n_obs, 1))
    return made


@pytest.mark.parametrize("options", [{}, {"donor_key": "donor"}], ids=["cells", "donors"])
def test_what_a_site_discloses_is_based_on_enough_cells_and_donors(sites, options):
    some = copies(sites)
    some["basel"].X[7] = 3000
    some["basel"].X[:, 20] = np.where(np.arange(150) < 4, 300, 0)
    attacks = [inflated, alike] if not options else [inflated]
    seen = check_disclosure("quality-control", some, "basel", attacks=attacks, **options)
    assert seen.cells >= 10
    assert seen.donors is None if not options else seen.donors >= 3


@pytest.mark.parametrize(
    ("change", "options", "kind", "message"),
    [
        (lambda a: setattr(a, "X", np.log1p(a.X)), {}, DataError, "expected counts, found log"),
        (lambda a: setattr(a, "X", a.X - 1), {}, DataError, "negative values"),
        (lambda a: a.obs.__setitem__("donor", "one"), {"donor_key": "donor"}, DataError, "1 donors, fewer than 3"),
        (lambda a: setattr(a, "var_names", pd.Index(["G"] * 60)), {}, DataError, "unique"),
        (lambda a: a._inplace_subset_obs(np.arange(9)), {}, DataError, "9 cells, fewer than 10"),
        (lambda a: a._inplace_subset_var(np.arange(20)), {}, DataError, "20 genes are too few for doublet scores"),
        (lambda a: None, {"layer": "raw"}, DataError, "raw"),
        (lambda a: None, {"cutoff": 0.5}, ParameterError, "cutoff"),
        (lambda a: None, {"doublet_rate": 0.7}, ParameterError, "doublet_rate"),
        (lambda a: None, {"mito_prefix": ""}, ParameterError, "mito_prefix"),
    ],
)
def test_bad_input(sites, change, options, kind, message):
    bad = copies(sites)
    change(bad["basel"])
    with pytest.raises(kind, match=message):
        rehearse("quality-control", bad, **options)
