"""The workflow against a pooled forest, on generated rows; the ODDS sets are in benchmarks/outliers.py."""

import json
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from anndata import AnnData
from scipy import sparse

from cloister import workflows
from cloister.cells.files import read_cells, write_cells
from cloister.errors import DataError, ParameterError
from cloister.models import isolation_forest as iforest
from cloister.models.disguise import disguise
from cloister.mpc.crypto import paillier
from cloister.papers import masked_forest
from cloister.rehearsal.rehearsal import Fault, rehearse
from cloister.workflows.find_outliers import workflow as find_outliers

NAMES = [f"v{i}" for i in range(5)]


@pytest.fixture(autouse=True)
def _short_keys(monkeypatch):
    """1024 bits here: the published mode is slow with full keys, and they have tests of their own."""
    monkeypatch.setattr(paillier, "LEAST_BITS", 1024)
    make = masked_forest.Params
    monkeypatch.setattr(masked_forest, "Params", lambda *args, **kw: make(*args, **{**kw, "key_bits": 1024}))


def planted(n=600, outliers=24, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, 5)) * [1, 10, 0.1, 1, 1000]
    where = rng.permutation(n)[:outliers]
    X[where] += rng.choice([-1, 1], (outliers, 5)) * rng.uniform(3, 6, (outliers, 5)) * [1, 10, 0.1, 1, 1000]
    truth = np.zeros(n, bool)
    truth[where] = True
    return X, truth


def sites(X, truth, parts=None):
    parts = np.array_split(np.arange(len(X)), 3) if parts is None else parts
    made = {}
    for name, rows in zip(("basel", "lugano", "vienna"), parts, strict=True):
        obs = pd.DataFrame({"truth": truth[rows]}, index=[f"r{i}" for i in rows])
        made[name] = AnnData(X[rows].copy(), obs=obs, var=pd.DataFrame(index=NAMES))
    return made


def auroc(run, key="outlier_score"):
    from sklearn.metrics import roc_auc_score

    obs = pd.concat([a.obs for a in run.data.values()])
    return float(roc_auc_score(obs["truth"], obs[key].astype(float)))


def pooled(X, truth, kind="standard"):
    from sklearn.metrics import roc_auc_score

    Z = (X - X.mean(axis=0)) / X.std(axis=0)
    return float(roc_auc_score(truth, iforest.fit(Z, kind=kind, rng=np.random.default_rng(0)).score(Z)))


@pytest.mark.parametrize("forest", ["standard", "extended"])
def test_hardened_is_as_good_as_pooled(forest):
    X, truth = planted()
    run = rehearse("find-outliers", sites(X, truth), forest=forest, contamination=0.04)
    assert auroc(run) > pooled(X, truth, forest) - 0.03  # 100 trees of 256 rows: noise of about 0.01
    obs = pd.concat([a.obs for a in run.data.values()])
    assert obs["outlier"].dtype == bool
    assert 20 <= obs["outlier"].sum() <= 24
    assert (obs["outlier_score"][obs["outlier"]].min()) >= obs["outlier_score"][~obs["outlier"]].max()
    assert len({a.uns["cloister"]["outlier_cut"] for a in run.data.values()}) == 1
    json.dumps(run.results)


@pytest.mark.parametrize(
    "options", [{}, {"give": "regions", "repeats": 3}, {"standardise": True, "forest": "extended"}]
)
def test_published_finds_them_too(options, caplog):
    X, truth = planted()
    run = rehearse("find-outliers", sites(X, truth), mode="published", contamination=0.04, **options)
    assert "with a few known rows, the rows of all sites" in caplog.text  # before anything is sent, in plain words
    obs = pd.concat([a.obs for a in run.data.values()])
    assert (obs["outlier"] & obs["truth"]).sum() >= (16 if options.get("standardise") else 8)
    assert obs["outlier"].sum() <= (24 if options.get("repeats", 1) == 1 else 3 * 24 / 2)  # two of three must flag it
    assert ("outlier_score" in obs) == ("give" not in options)
    assert set(run.outcomes) == {"coordinator", "auxiliary", "basel", "lugano", "vienna"}
    if "give" not in options:
        assert auroc(run) > 0.8
        assert run.data["basel"].uns["cloister"]["outlier_cut"] > 0.35  # over 5 runs 0.565 ± 0.032
        everyone = run.data["basel"].uns["cloister"]["outlier_everyone"]
        np.testing.assert_array_equal(everyone, np.sort(obs["outlier_score"]))
        drawn = find_outliers.WORKFLOW.figures(run.outcomes, None)
        assert "all sites" in drawn[0]["alt"]


def test_published_with_kept_back_and_made_up_inliers():
    X, truth = planted()
    run = rehearse("find-outliers", sites(X, truth), mode="published", thin=0.5, smote=0.5, standardise=True)
    obs = pd.concat([a.obs for a in run.data.values()])
    missing = obs["outlier_score"].isna()
    assert missing.sum() == 150  # half of the inner half was never sent
    assert not obs["outlier"][missing].any()
    assert run.results["coordinator"]["rows"] == 600 - 150 + 300
    assert (obs["outlier"] & obs["truth"]).sum() >= 16


def test_published_rows_kept_back_do_not_follow_from_the_seed_of_the_study():
    """Everybody knows the seed: with it, made-up rows and the order of the others could be told."""
    X, truth = planted(n=90, outliers=4)
    kept = []
    for _ in range(2):
        run = rehearse("find-outliers", sites(X, truth), mode="published", thin=0.5, smote=0.5, standardise=True)
        kept.append(np.concatenate([a.obs["outlier_score"].isna() for a in run.data.values()]))
    assert kept[0].sum() == kept[1].sum() > 0
    assert (kept[0] != kept[1]).any()


def test_sites_of_very_different_size_and_all_outliers_at_one():
    X, truth = planted()
    outliers, rest = np.flatnonzero(truth), np.flatnonzero(~truth)
    uneven = [np.concatenate([outliers, rest[:6]]), rest[6:30], rest[30:]]
    run = rehearse("find-outliers", sites(X, truth, uneven), contamination=0.04)
    assert auroc(run) > pooled(X, truth) - 0.03
    assert run.data["basel"].obs["outlier"].mean() > 0.6  # a site of outliers knows: they are common here, not there
    assert run.results["basel"]["flagged_alone"] < 5


def test_global_against_local_outliers():
    """A group that is rare at one site and common at another is an outlier at the first only."""
    rng = np.random.default_rng(0)
    common, rare = rng.normal(size=(200, 5)), rng.normal(size=(6, 5)) * 0.3 + 5
    X = np.concatenate([common, rare, rng.normal(size=(200, 5)) * 0.3 + 5, rng.normal(size=(200, 5))])
    parts = [np.arange(206), np.arange(206, 406), np.arange(406, 606)]
    run = rehearse("find-outliers", sites(X, np.zeros(606, bool), parts), contamination=0.03, trees=60)
    basel = run.data["basel"]
    assert basel.obs["outlier"][200:].sum() <= 1
    plot = basel.uns["cloister"]["outlier_plot"]
    assert np.asarray(plot["alone"])[-6:].sum() >= 4


def test_repeats_vote_and_threshold_replaces_the_share():
    X, truth = planted(300)
    run = rehearse("find-outliers", sites(X, truth), repeats=3, trees=30, contamination=0.05)
    assert auroc(run) > 0.9
    run = rehearse("find-outliers", sites(X, truth), threshold=0.55, trees=30)
    obs = pd.concat([a.obs for a in run.data.values()])
    np.testing.assert_array_equal(obs["outlier"], obs["outlier_score"] >= 0.55)


@pytest.mark.parametrize(("key", "value", "says"), [("drop", True, "adata.obs"), ("min_count", 12, "min_cells")])
def test_options_of_earlier_versions_are_refused_with_what_to_do_instead(key, value, says):
    X, truth = planted(300)
    with pytest.raises(ParameterError, match=f"has no option '{key}' any more.*{says}"):
        rehearse("find-outliers", sites(X, truth), **{key: value})


def test_options_of_the_paper_are_refused_in_hardened_mode():
    X, truth = planted(300)
    with pytest.raises(ParameterError, match="option 'thin' = 0.5 exists in mode published only, found mode hardened"):
        rehearse("find-outliers", sites(X, truth), thin=0.5)


def test_a_site_that_drops_out_of_a_sum_ends_the_run_by_name():
    X, truth = planted(300)
    fault = Fault("kill", "vienna", "coordinator", "Masked", nth=7)
    run = rehearse("find-outliers", sites(X, truth), faults=[fault], timeout=3.0, trees=20, check=False)
    assert {"basel", "lugano"} <= set(run.errors)


def test_with_donor_key_donors_are_counted_and_the_receipt_says_so():

    X, truth = planted(300)
    data = sites(X, truth)
    for k, adata in enumerate(data.values()):
        adata.obs["donor"] = [f"{k}-{i % 6}" for i in range(adata.n_obs)]
    run = rehearse("find-outliers", data, donor_key="donor", trees=20, contamination=0.05)
    assert auroc(run) > 0.85
    assert sum(int(a.obs["outlier"].sum()) for a in run.data.values()) <= 30
    assert run.results["coordinator"]["ranges"] > 20
    assert all(r.header["counted"] == "donors" for r in run.receipts.values())
    groups = [e.name for e, _ in run.receipts["basel"].entries if e.kind == "contributed"]
    assert all(int(g.split("donors ")[1].split(" ")[0]) >= 3 for g in groups if "donors " in g)
    assert any("donors " in g for g in groups)
    options = find_outliers.Options(donor_key="donor", min_cells=14, min_donors=6)
    agreed = find_outliers.hardened_params(SimpleNamespace(sites=tuple(data), coordinator="coordinator"), options)
    assert (agreed.min_cells, agreed.min_donors, agreed.by_donor) == (14, 6, True)


# ---- input -----------------------------------------------------------------------------------------------------------


def test_trees_have_512_rows_and_as_published_those_of_the_paper():
    session = SimpleNamespace(sites=("a", "b", "c"), coordinator="hub", study=SimpleNamespace(auxiliaries=("aux",)))
    made = find_outliers.hardened_params, find_outliers.published_params
    assert [params(session, find_outliers.Options()).sample for params in made] == [512, 256]
    assert [params(session, find_outliers.Options(sample=300)).sample for params in made] == [300, 300]
    with pytest.raises(ParameterError, match="'sample' must be from 8 to 65536, found 4"):
        find_outliers.Options(sample=4)


def test_layers_representations_sparse_and_files(tmp_path):
    X, truth = planted(200)
    data = sites(X, truth)
    for adata in data.values():
        adata.layers["scaled"] = adata.X * 2
        adata.obsm["X_pca"] = np.asarray(adata.X)[:, :3]
    for options in ({"layer": "scaled"}, {"use_rep": "X_pca"}):
        assert "outlier" in rehearse("find-outliers", data, trees=10, **options).data["basel"].obs
    for suffix in (".csv", ".npz", ".h5ad"):
        files = {}
        for name, adata in data.items():
            write_cells(adata, tmp_path / f"{name}{suffix}")
            files[name] = read_cells(tmp_path / f"{name}{suffix}")
        assert auroc(rehearse("find-outliers", files, trees=30)) > 0.9
    rng = np.random.default_rng(0)
    counts = {p: AnnData(sparse.random(60, 20, 0.3, "csr", rng=rng).ceil().astype(np.float32)) for p in data}
    assert "outlier" in rehearse("find-outliers", counts, trees=10).data["basel"].obs


def test_columns_are_matched_by_name_and_missing_ones_named():
    X, truth = planted(200)
    data = sites(X, truth)
    data["vienna"] = data["vienna"][:, ["v4", "v0", "v2", "v3", "v1"]].copy()
    assert auroc(rehearse("find-outliers", data, trees=60)) > 0.9
    data["vienna"].var_names = ["v4", "v0", "v2", "v3", "weight"]
    with pytest.raises(DataError, match=r"'v1'|'weight'"):
        rehearse("find-outliers", data, trees=10, timeout=3.0)


def test_bad_rows_are_refused_before_anything_is_sent():
    X, truth = planted(90)
    options = find_outliers.Options()
    adata = sites(X, truth)["basel"]
    adata.X[3, 1] = np.nan
    with pytest.raises(DataError, match=r"1 values are missing, in 1 columns \('v1'\)"):
        find_outliers.check(adata, options)
    filled = find_outliers.check(adata, find_outliers.Options(impute="mean"))
    assert any("missing" in note for note in filled)
    adata.X[3, 1] = np.inf
    with pytest.raises(DataError, match="infinite"):
        find_outliers.check(adata, options)
    with pytest.raises(DataError, match="adata.obsm\\['X_umap'\\] is missing"):
        find_outliers.check(adata, find_outliers.Options(use_rep="X_umap"))
    with pytest.raises(DataError, match="layers"):
        find_outliers.check(adata, find_outliers.Options(layer="counts"))
    few = sites(X, truth)["basel"][:5].copy()
    with pytest.raises(DataError, match="5 rows, fewer than min_cells = 10"):
        find_outliers.check(few, options)
    text = AnnData(obs=pd.DataFrame(index=list("abcdefghijkl")), var=pd.DataFrame(index=["g"]))
    with pytest.raises(DataError, match="missing"):
        find_outliers.check(text, options)


def test_notes_on_rows_that_work_but_should_be_known():
    X = np.ones((3, 5))
    adata = AnnData(X, var=pd.DataFrame(index=NAMES))
    notes = " ".join(find_outliers.check(adata, find_outliers.Options(min_cells=2)))
    assert "5 columns have one value" in notes
    assert "3 rows and 5 columns" in notes
    assert "come close to single rows" in notes


def test_missing_values_are_imputed_on_request_in_both_modes():
    X, truth = planted(200)
    X[::17, 2] = np.nan
    data = sites(X, truth)
    with pytest.raises(DataError, match="site 'basel'.*missing"):
        rehearse("find-outliers", data, trees=10)
    for mode in ("hardened", "published"):
        run = rehearse("find-outliers", data, trees=30, impute="mean", mode=mode)
        assert auroc(run) > 0.8


def test_few_rows_at_a_site():
    X, truth = planted(200)
    parts = [np.arange(12), np.arange(12, 100), np.arange(100, 200)]
    run = rehearse("find-outliers", sites(X, truth, parts), trees=10)
    assert run.data["basel"].obs["outlier_score"].shape == (12,)
    with pytest.raises(DataError, match="1 rows, fewer than min_cells = 10"):
        rehearse("find-outliers", sites(X, truth, [np.arange(1), *parts[1:]]), trees=10, timeout=3.0)


@pytest.mark.parametrize(
    "options",
    [
        {"trees": 0},
        {"contamination": 0.6},
        {"threshold": 1.5},
        {"contamination": 0.1, "threshold": 0.5},
        {"forest": "random"},
        {"stretch": 0.5},
        {"layer": "a", "use_rep": "b"},
        {"thin": 1.0},
        {"extension": 0},
        {"thin_below": 0.0},
        {"key_bits": 1024},
        {"bound": 0.5},
    ],
)
def test_bad_options_are_named(options):
    with pytest.raises(ParameterError):
        workflows.options_of(find_outliers.WORKFLOW, options)


def test_figures_show_scores_with_the_cut_and_rows_twice():
    pytest.importorskip("matplotlib")
    X, truth = planted(300)
    for mode, options in (("hardened", {}), ("published", {"give": "flags"})):
        run = rehearse("find-outliers", sites(X, truth), mode=mode, trees=20, **options)
        drawn = find_outliers.WORKFLOW.figures(run.outcomes, None)
        assert len(drawn) == (4 if mode == "hardened" else 3)
        for figure in drawn:
            assert figure["png"].startswith(b"\x89PNG")
            assert len(figure["alt"]) > 40
        assert "this site's rows alone" in drawn[-1]["alt"]


@pytest.mark.parametrize(("rare", "warned"), [(8, True), (1, False)])
def test_flags_on_one_label_are_said_aloud(rare, warned):
    labels = np.array(["NK"] * 20 + ["T"] * 180)
    flags = np.zeros(200, bool)
    flags[:rare] = True  # 8 of 20 NK cells, or the one that chance would give
    flags[100:109] = True
    adata = AnnData(np.zeros((200, 1)), obs=pd.DataFrame({"kind": labels}, index=[str(i) for i in range(200)]))
    found = find_outliers.by_label(adata, flags, find_outliers.Options(label_key="kind"))
    assert found["flagged_per_label"] == {"NK": rare, "T": 9}
    assert ("warning" in found) == warned
    if warned:
        assert "40% of the rows labelled 'NK'" in found["warning"]
    assert find_outliers.by_label(adata, flags, find_outliers.Options()) == {}
    with pytest.raises(DataError, match="label_key="):
        find_outliers.check(adata, find_outliers.Options(label_key="type"))


def test_plain_inliers_may_be_fewer_than_half():
    X, _ = planted()
    for below, gone in ((0.5, 150), (0.2, 60)):
        sent, mine = disguise(X, 0.5, 0.0, np.random.default_rng(0), below)
        assert len(sent) == len(mine) == 600 - gone
