import json

import numpy as np
import pandas as pd
import pytest

import cloister as cl
from cloister.cells import files
from cloister.errors import DataError, ParameterError
from cloister.rehearsal.check_disclosure import check_disclosure
from cloister.rehearsal.rehearsal import rehearse
from cloister.rehearsal.results import save_run
from cloister.workflows.model_outcome import Options, features
from cloister.workflows.model_outcome.workflow import WORKFLOW, check, donors_of
from cloister.workflows.options import read_options

TYPES = ("AT1", "AT2", "B", "NK/NKT", "T", "macrophage", "monocyte")
BASE = {"donor_key": "donor"}
SHARES = BASE | {"label_key": "cell_type", "labels": TYPES}
COX = SHARES | {
    "model": "cox",
    "outcome_key": "died",
    "time_key": "years",
    "horizon": 6.0,
    "features": ("share:T",),
    "covariates": ("age",),
}
KM = BASE | {
    "model": "km",
    "outcome_key": "died",
    "time_key": "years",
    "horizon": 6.0,
    "group_key": "condition",
    "groups": ("control", "case"),
}
LOGISTIC = BASE | {"model": "logistic", "outcome_key": "response", "features": ("age",)}


def options(given):
    return read_options(Options, given, "model-outcome")


@pytest.fixture(scope="module")
def sites():
    return cl.demo_outcomes(20)


@pytest.fixture(scope="module")
def cox(sites):
    return rehearse("model-outcome", sites, **COX)


def coefficients(adata):
    return adata.uns["outcome"]["coefficients"].set_index("term")


def test_cox_finds_what_was_planted_and_is_close_to_the_pooled_fit(cox, sites):
    pooled = cl.outcome_baselines(sites, **COX)["pooled"]["coefficients"].set_index("term")
    for adata in cox.data.values():
        table = coefficients(adata)
        assert table.loc["share:T", "coefficient"] < 0
        assert np.abs((table["coefficient"] - pooled["coefficient"]) / pooled["error"]).max() < 1.5
        np.testing.assert_allclose(table["ratio"], np.exp(table["coefficient"]))
        told = json.loads(adata.uns["outcome"]["summary"])
        assert told["donors"] == 60
        assert 0.5 < told["regressions"]["all"]["concordance"] < 1


def test_a_linear_model_equals_the_pooled_fit():
    sites = cl.demo_outcomes(40)
    given = BASE | {"model": "linear", "outcome_key": "score", "features": ("age", "sex=female|male")}
    given |= {"interactions": ("age * sex",), "contrasts": ("age + 2 sex:male",)}
    run = rehearse("model-outcome", sites, **given)
    pooled = cl.outcome_baselines(sites, **given)["pooled"]
    for adata in run.data.values():
        for name, keys in (("coefficients", ["term"]), ("contrasts", ["contrast"])):
            found, wanted = (t.set_index(keys) for t in (adata.uns["outcome"][name], pooled[name]))
            for column in ("coefficient", "error", "p"):
                np.testing.assert_allclose(found[column], wanted[column], rtol=1e-6)
    table = coefficients(run.data["basel"])
    assert list(table.index) == ["age", "sex:male", "age * sex:male"]
    one, two = table.loc["age"], table.loc["sex:male"]
    contrast = run.data["basel"].uns["outcome"]["contrasts"].iloc[0]
    assert contrast["coefficient"] == pytest.approx(one["coefficient"] + 2 * two["coefficient"])


def test_curves_and_their_files(sites, tmp_path):
    run = rehearse("model-outcome", sites, **KM)
    table = run.data["basel"].uns["outcome"]["curves"]
    for arm in ("control", "case"):
        part = table[table["arm"] == arm]
        assert part["survival"].is_monotonic_decreasing
        assert part["at_risk"].min() >= 3  # fewer are not shown
        assert ((part["low"] <= part["survival"]) & (part["survival"] <= part["high"])).all()
    names = {p.name for p in save_run(run, tmp_path / "out")}
    assert {"basel.curves.csv", "coordinator.curves.csv"} <= names
    assert "basel.coefficients.csv" not in names
    again = files.read_cells(tmp_path / "out" / "basel.h5ad").uns["outcome"]["curves"]
    pd.testing.assert_frame_equal(again, table, check_dtype=False)
    drawn = [f["title"] for f in WORKFLOW.figures({p: o for p, o in outcomes(run).items()}, options(KM))]
    assert drawn == ["Survival"]


def outcomes(run):
    from cloister.session import Outcome

    return {p: Outcome(adata) for p, adata in run.data.items()}


def test_forest_and_calibration_are_drawn(cox):
    drawn = WORKFLOW.figures(outcomes(cox), options(COX))
    assert [f["title"] for f in drawn] == ["Hazard ratios", "Calibration"]
    assert all(f["png"].startswith(b"\x89PNG") and f["alt"] for f in drawn)


def test_a_regression_for_each_feature_has_false_discovery_rates(sites):
    given = SHARES | {"model": "negbin", "outcome_key": "infections", "features": ("share:T", "share:B"), "each": True}
    run = rehearse("model-outcome", sites, **given)
    table = run.data["basel"].uns["outcome"]["coefficients"]
    assert list(table["regression"]) == ["share:T", "share:B"]
    assert (table["fdr"] >= table["p"] - 1e-12).all()


def test_expression_means_and_signatures_are_features(sites):
    adata = sites["basel"]
    genes = list(adata.var_names[:2])
    adata = adata.copy()
    adata.obs["scored"] = np.arange(adata.n_obs, dtype=float)
    texts = (f"gene:{genes[0]}@macrophage", f"signature:two={'+'.join(genes)}", "mean:scored", "age")
    made = options(SHARES | {"model": "linear", "outcome_key": "score", "features": texts})
    mine, _ = donors_of(adata, made)
    assert made.design.columns == (texts[0], "signature:two", "mean:scored", "age")
    donor = adata.obs["donor"].to_numpy() == np.sort(adata.obs["donor"].unique())[0]
    counts = np.asarray(adata.X[donor].sum(axis=0)).ravel()
    wanted = np.log2(1e6 * counts[:2] / counts.sum() + 1).mean()
    of = donor & (adata.obs["cell_type"] == "macrophage").to_numpy()
    if of.sum() >= 10:
        some = np.asarray(adata.X[of].sum(axis=0)).ravel()
        assert np.isclose(mine.x[:, 0], np.log2(1e6 * some[0] / some.sum() + 1)).any()
    assert np.isclose(mine.x[:, 1], wanted).any()
    assert np.isclose(mine.x[:, 2], adata.obs["scored"][donor].mean()).any()


def test_contrasts_are_read():
    names = ("a", "b c", "sex:male")
    np.testing.assert_allclose(features.weights_of("a - 2 b c + sex:male", names), [1, -2, 1])
    np.testing.assert_allclose(features.weights_of("-a", names), [-1, 0, 0])
    with pytest.raises(ParameterError, match="'d' is none of the terms"):
        features.weights_of("a - d", names)


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (COX | {"horizon": 0.0}, "'time_key' and 'horizon'"),
        (COX | {"labels": ("B", "NK")}, "need the option 'labels'"),
        (KM | {"features": ("age",)}, "no features"),
        (LOGISTIC | {"features": ()}, "name at least one feature"),
        (LOGISTIC | {"features": ("sex=a",)}, "COLUMN=reference"),
        (LOGISTIC | {"interactions": ("age * nothing",)}, "two of the features"),
        (LOGISTIC | {"exposure_key": "years"}, "poisson and negbin"),
        (LOGISTIC | {"min_donors": 1}, "at least 2"),
    ],
)
def test_options_are_checked(given, words):
    with pytest.raises(ParameterError, match=words):
        options(given)


def test_a_site_of_two_donors_is_refused(sites):
    adata = sites["basel"]
    two = adata[adata.obs["donor"].isin(adata.obs["donor"].unique()[:2])].copy()
    with pytest.raises(DataError, match="2 donors here, fewer than 6"):
        check(two, options(LOGISTIC))
    with pytest.raises(DataError, match="no arm has min_donors = 3 donors"):
        check(two, options(KM))


def test_data_are_checked(sites):
    adata = sites["basel"]
    for given, words in (
        (LOGISTIC | {"outcome_key": "nothing"}, "is missing"),
        (LOGISTIC | {"outcome_key": "condition"}, "pass event="),
        (LOGISTIC | {"features": ("cell_type=T|B",)}, "differs between cells of one donor"),
        (LOGISTIC | {"features": ("sex=female|other",)}, "does not list"),
        (LOGISTIC | {"features": ("sex",)}, "holds names"),
        (LOGISTIC | {"features": ("gene:no such gene",)}, "not among the genes"),
        (LOGISTIC | {"model": "poisson", "outcome_key": "score"}, "a count of 0, 1, 2"),
    ):
        with pytest.raises(DataError, match=words):
            check(adata, options(given))
    assert not check(adata, options(LOGISTIC | {"outcome_key": "condition", "event": "case"}))


def test_a_hospital_without_events_is_told(sites):
    adata = sites["basel"].copy()
    adata.obs["died"] = 0
    assert any("no donor here has an event" in note for note in check(adata, options(COX)))
    run = rehearse("model-outcome", sites | {"basel": adata}, **COX)
    assert coefficients(run.data["vienna"])["error"].notna().all()


def test_donors_that_lack_something_are_left_out_and_told(sites):
    adata = sites["basel"].copy()
    adata.obs["age"] = adata.obs["age"].astype(float)
    adata.obs.loc[adata.obs["donor"] == adata.obs["donor"].iloc[0], "age"] = np.nan
    mine, notes = donors_of(adata, options(LOGISTIC))
    assert len(mine.y) == 19
    assert notes == ["1 donors lack a feature, the outcome or its time, and are left out"]


# ---- what is disclosed -----------------------------------------------------------------------------------------------


def one_outcome(adata):
    adata = adata.copy()
    adata.obs["died"], adata.obs["response"] = 1, 1
    return adata


def huge(adata):
    adata = adata.copy()
    adata.obs["age"] = adata.obs["age"] * 1e6
    return adata


@pytest.mark.parametrize("given", [COX, KM, LOGISTIC], ids=["cox", "km", "logistic"])
def test_what_a_site_discloses_is_based_on_enough_donors(sites, given):
    seen = check_disclosure("model-outcome", sites, "basel", attacks=[one_outcome, huge], **given)
    assert seen.donors >= 3
    assert seen.cells >= 30
