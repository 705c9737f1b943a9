from pathlib import Path

import numpy as np
import pytest

from cloister.errors import DataError
from cloister.mpc.parties import Party
from cloister.mpc.sums import pooled_scaling
from cloister.rehearsal.rehearsal import Fault
from cloister.testing import (
    Case,
    check_cost,
    check_no_errors,
    check_vectors,
    check_view,
    run_protocol,
    transcript,
    values,
)

HUB = Party("hub")
SITES = tuple(Party(f"site-{i}") for i in range(3))


def case(parts, least=2):
    return Case(pooled_scaling.Params(SITES, HUB, parts[0].shape[1], least), dict(zip(SITES, zip(parts), strict=True)))


def awkward(seed=0, rows=(60, 40, 50)):
    """Units from 1e-12 to 1e12, a constant column, a column of zeros, and 1000 with digits far behind the point."""
    rng = np.random.default_rng(seed)
    units = np.array([1e-12, 1e12, 1.0, 1.0, 0.0, 1e-4])
    shift = np.array([0.0, 5e12, -3.0, 0.0, 0.0, 1000.0])
    parts = [rng.normal(size=(n, 6)) * units + shift for n in rows]
    for part in parts:
        part[:, 3] = 7.25
    return parts


def check_scaling(found, wanted):
    assert found.rows == wanted.rows
    np.testing.assert_allclose(found.mean, wanted.mean, rtol=1e-7, atol=1e-18)
    np.testing.assert_allclose(found.scale, wanted.scale, rtol=1e-5)


def test_ideal_whatever_the_unit():
    c = case(awkward())
    run = run_protocol(pooled_scaling, c)
    check_no_errors(run)
    wanted = pooled_scaling.ideal(c.params, {u: x for u, (x,) in c.inputs.items()})
    assert wanted[HUB].scale[3] == wanted[HUB].scale[4] == 0
    for party, found in values(run).items():
        check_scaling(found, wanted[party])
        np.testing.assert_array_equal(found.usable, [0, 1, 2, 5])
    Z = values(run)[SITES[0]].apply(np.concatenate(awkward()))
    np.testing.assert_allclose(Z[:, [0, 1, 2, 5]].mean(axis=0), 0, atol=0.05)  # values beyond a fence are held to it
    np.testing.assert_allclose(Z[:, [0, 1, 2, 5]].std(axis=0), 1, rtol=0.05)
    assert (Z[:, [3, 4]] == 0).all()


def test_missing_entries_do_not_count():
    parts = awkward(1)
    parts[0][::3, 0] = np.nan
    parts[1][:, 1] = np.nan
    c = case(parts)
    run = run_protocol(pooled_scaling, c)
    check_no_errors(run)
    wanted = pooled_scaling.ideal(c.params, {u: x for u, (x,) in c.inputs.items()})[HUB]
    check_scaling(values(run)[HUB], wanted)
    assert (wanted.apply(parts[1])[:, 1] == 0).all()


def test_vectors():
    check_vectors(pooled_scaling, case(awkward()), Path(__file__).parents[2] / "vectors" / "pooled_scaling.json")


def test_view_does_not_depend_on_values_or_rows():
    check_view(pooled_scaling, case(awkward(1)), case(awkward(2)))
    one, two = (run_protocol(pooled_scaling, case(awkward(1, rows))) for rows in ((15, 15, 15), (500, 13, 40)))
    assert transcript(one) == transcript(two)


def test_cost():
    check_cost(pooled_scaling, case(awkward()))


@pytest.mark.parametrize("nth", [0, 1, 2, 3])
def test_a_site_that_drops_at_a_sum_ends_the_run_by_name(nth):
    fault = Fault("kill", "site-2", "hub", "Masked", nth=nth)
    run = run_protocol(pooled_scaling, case(awkward()), faults=[fault], timeout=2.0)
    assert {HUB, *SITES[:2]} <= set(run.errors)
    assert all(all((e.protocol, e.line, e.code)) for e in run.errors.values())


def test_few_values_far_from_all_others_are_held_to_the_fence():
    """A value of 10^9 in one row, and a column in which three rows are not zero: neither mean nor scale shows them."""
    rng = np.random.default_rng(0)
    parts = [rng.normal(size=(40, 3)) for _ in range(3)]
    parts[0][3, 0] = 1e9
    for part in parts:
        part[:, 1] = 0.0
    parts[1][:3, 1] = 7.0
    run = run_protocol(pooled_scaling, case(parts))
    check_no_errors(run)
    found = values(run)[HUB]
    assert found.scale[0] < 2
    assert found.scale[1] == found.mean[1] == 0
    plain = pooled_scaling.scaling_of(np.concatenate(parts))
    assert plain.scale[0] > 1e6
    np.testing.assert_allclose([found.mean[2], found.scale[2]], [plain.mean[2], plain.scale[2]], rtol=1e-5)


def test_a_site_with_too_few_rows_is_refused_before_anything_is_sent():
    run = run_protocol(pooled_scaling, case(awkward(rows=(30, 5, 12))), timeout=1.0)
    assert "fewer than min_cells = 10" in str(run.errors[SITES[1]])


def test_too_few_rows_and_values_that_are_no_numbers():
    run = run_protocol(pooled_scaling, case(awkward(), least=1000), timeout=2.0)
    assert {e.code for e in run.errors.values()} == {"too-few-rows"}
    assert len(run.errors) == 4
    for bad in (np.inf, 2.0**60):
        with pytest.raises(DataError, match="finite"):
            pooled_scaling.check_values(np.array([[1.0, bad]]))


def test_rows_that_are_taken_some_at_a_time_give_the_same(monkeypatch):
    monkeypatch.setattr(pooled_scaling, "BLOCK", 7)
    c = case(awkward())
    run = run_protocol(pooled_scaling, c)
    check_no_errors(run)
    wanted = pooled_scaling.ideal(c.params, {u: x for u, (x,) in c.inputs.items()})[HUB]
    for found in values(run).values():
        check_scaling(found, wanted)
