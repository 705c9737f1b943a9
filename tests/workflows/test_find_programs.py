import json

import numpy as np
import pytest

import cloister as cl
from cloister.errors import DataError, ParameterError
from cloister.rehearsal.check_disclosure import check_disclosure
from cloister.rehearsal.rehearsal import rehearse
from cloister.rehearsal.results import save_run
from cloister.session import Outcome
from cloister.workflows.find_programs.workflow import WORKFLOW, Options, check, profiles_of
from cloister.workflows.options import read_options

BASE = {"donor_key": "donor", "labels": ("macrophage", "endothelial", "AT2", "T"), "n_programs": 3, "n_columns": 80}


@pytest.fixture(scope="module")
def sites():
    return cl.demo_cohort()


@pytest.fixture(scope="module")
def run(sites):
    return rehearse("find-programs", sites, **BASE)


def options(**given):
    return read_options(Options, BASE | given, "find-programs")


def test_every_site_has_the_same_programs_and_its_own_scores(run, sites):
    first = run.data["basel"].uns["program"]["loadings"]
    assert list(first)[:3] == ["cell_type", "gene", "program_1"]
    for p, adata in run.data.items():
        assert adata.uns["program"]["loadings"].equals(first)
        per_donor = adata.obs.groupby("donor", observed=True)["program_1"].nunique()
        assert (per_donor == 1).all()
        assert adata.obs["program_1"].nunique() == sites[p].obs["donor"].nunique()
        told = json.loads(adata.uns["program"]["summary"])
        assert told["donors"] == 36
        assert len(told["strongest"]["program_2"]) == 8


def test_it_is_closer_to_the_pooled_programs_than_a_site_alone(run, sites):
    """The span of the first program against that of the pooled donors' three."""
    beside = cl.program_baselines(sites, **BASE)

    def near(table):
        both = table.merge(beside["pooled"], on=["cell_type", "gene"], suffixes=("", "_p"))
        a = both[["program_1"]].to_numpy()
        b = np.linalg.qr(both[[f"program_{k}_p" for k in (1, 2, 3)]].to_numpy())[0]
        return np.linalg.norm(b.T @ a) / np.linalg.norm(table[["program_1"]].to_numpy())

    together = near(run.data["basel"].uns["program"]["loadings"])
    alone = [near(table) for name, table in beside.items() if name != "pooled"]
    assert together > max(np.mean(alone), 0.8)


def test_scores_are_features_of_model_outcome(run):
    found = rehearse(
        "model-outcome", run.data, model="linear", outcome_key="age", donor_key="donor", features=("program_1",)
    )
    assert found.data["basel"].uns["outcome"]["coefficients"]["term"].tolist() == ["program_1"]


def test_files_and_figures(run, tmp_path):
    names = {p.name for p in save_run(run, tmp_path / "out")}
    assert {"basel.loadings.csv", "coordinator.loadings.csv"} <= names
    drawn = WORKFLOW.figures({p: Outcome(a) for p, a in run.data.items()}, options())
    assert [f["title"] for f in drawn] == ["Program 1", "Program 2", "Program 3"]


def test_profiles_are_log_counts_of_a_donors_cells_of_a_type(sites):
    adata = sites["basel"]
    mine, of_cell = profiles_of(adata, options())
    at = (of_cell == 0) & (adata.obs["cell_type"] == "macrophage").to_numpy()
    counts = np.asarray(adata.X[at].sum(axis=0)).ravel()
    np.testing.assert_allclose(mine.x[0, 0], np.log1p(1e4 * counts / counts.sum()), rtol=1e-6)
    assert mine.present[0, 0] == (at.sum() >= 10)


def test_what_is_refused(sites):
    adata = sites["basel"]
    for given, words in (
        ({"labels": ()}, "option 'labels'"),
        ({"n_programs": 100}, "n_programs"),
        ({"min_donors": 1}, "2"),
    ):
        with pytest.raises(ParameterError, match=words):
            options(**given)
    two = adata[adata.obs["donor"].isin(adata.obs["donor"].unique()[:2])].copy()
    with pytest.raises(DataError, match="2 donors here"):
        check(two, options())
    with pytest.raises(DataError, match="is missing"):
        check(adata, options(label_key="nothing"))
    assert check(adata, options(labels=("macrophage", "nobody"))) == [
        "fewer than 3 donors here have enough cells of 'nobody'"
    ]


def inflated(adata):
    adata = adata.copy()
    adata.X = adata.X * 1000
    return adata


def test_what_a_site_discloses_is_based_on_enough_donors(sites):
    seen = check_disclosure("find-programs", sites, "basel", attacks=[inflated], **BASE)
    assert seen.donors >= 3
    assert seen.cells >= 30
