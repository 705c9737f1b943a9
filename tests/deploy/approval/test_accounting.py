"""Privacy over all runs on the same cells: against the accountant of `dp_accounting`, with and without it."""

import math
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloister.deploy.approval import accounting
from cloister.deploy.approval.accounting import Release, Total, compose, releases_of
from cloister.deploy.approval.budget import read_budget
from cloister.errors import ParameterError
from cloister.study import Study
from cloister.workflows.options import privacy_budget

PARTIES = {"hub": "coordinator", "a": "site", "b": "site", "c": "site"}
NOISY = {"dp_noise": 4.0, "solver": "logistic", "l2": 0.1, "validation": 0.0, "class_weight": "none"}
RELEASES = st.lists(
    st.builds(Release, st.just("cell"), st.floats(1.0, 50.0), st.integers(1, 100)), min_size=1, max_size=5
)


def test_the_total_is_that_of_the_general_accountant():
    """The PLD accountant composes each sum by itself, numerically, with its own discretisation."""
    dp = pytest.importorskip("dp_accounting")
    releases = [Release("cell", 5.0, 60), Release("cell", 9.0, 25)]
    accountant = dp.pld.PLDAccountant()
    for r in releases:
        accountant.compose(dp.SelfComposedDpEvent(dp.GaussianDpEvent(r.noise), r.sums))
    exact, total = accountant.get_epsilon(1e-5), compose(releases, 1e-5, runs=2)
    assert total.accountant == "dp-accounting"
    assert exact - 1e-3 <= total.epsilon <= exact + 0.011


@settings(max_examples=40, deadline=None)
@given(RELEASES, st.sampled_from([1e-7, 1e-5, 1e-3]))
def test_the_bound_without_the_library_is_above_and_near(releases, delta):
    pytest.importorskip("dp_accounting")
    exact = compose(releases, delta)
    saved = sys.modules.get("dp_accounting")
    sys.modules["dp_accounting"] = None
    try:
        bound = compose(releases, delta)
    finally:
        sys.modules["dp_accounting"] = saved
    assert bound.accountant == "Rényi bound"
    assert exact.epsilon <= bound.epsilon <= 1.3 * exact.epsilon + 0.1


def test_several_runs_cost_less_than_their_sum_and_more_than_one():
    one = Release("cell", 5.0, 30)
    single, four = compose([one]).epsilon, compose([one] * 4).epsilon
    assert single < four < 4 * single
    assert single <= privacy_budget(5.0, 1e-5, 30)


def test_a_larger_unit_counts_for_a_smaller_one_with_half_its_noise():
    cell, donor = Release("cell", 5.0, 30), Release("donor", 8.0, 10)
    both = compose([cell, donor])
    assert both.unit == "cell"
    assert both.epsilon == compose([cell, Release("cell", 4.0, 10)]).epsilon
    assert (compose([donor]).unit, compose([donor]).epsilon) == ("donor", compose([Release("cell", 8.0, 10)]).epsilon)


def test_nothing_is_spent_without_noise():
    assert compose([]) == Total(0.0, 1e-5, "cell", 0, "dp-accounting")
    assert compose([], earlier=2.0).epsilon == 2.0
    for bad in (("cells", 1.0, 1), ("cell", 0.0, 1), ("cell", math.inf, 1), ("cell", 1.0, -1)):
        with pytest.raises(ValueError, match="not a release"):
            Release(*bad)


@pytest.mark.parametrize(("workflow", "options", "unit"), [
    ("fine-tune", {}, "cell"),
    ("fine-tune", {"donor_key": "donor"}, "donor"),
    ("train-classifier", NOISY, "site"),
    ("bin-values", {}, None),
])  # fmt: skip
def test_what_a_run_releases_agrees_with_the_epsilon_it_states(workflow, options, unit):
    from cloister.workflows import pipeline

    study = Study("s", workflow, PARTIES, parameters=options)
    found = releases_of(study)
    ((_, flow, agreed),) = pipeline.check_steps(study)
    stated = flow.privacy(agreed)
    assert [r.unit for r in found] == ([unit] if unit else [])
    assert bool(stated) == bool(found)
    for release in found:
        assert stated["epsilon"] == privacy_budget(release.noise, stated["delta"], release.sums)


def test_delta_of_a_site_is_checked():
    assert read_budget({})["delta"] == accounting.DELTA
    for wrong in (0, 1, True, "1e-5"):
        with pytest.raises(ParameterError, match="delta"):
            read_budget({"delta": wrong})
