from pathlib import Path

import numpy as np
import pytest

from cloister.errors import DataError
from cloister.protocols.sums import pooled_scaling
from cloister.run.rehearsal import Fault
from cloister.study import Party
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


def awkward(seed=0, rows=(30, 1, 12)):
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
    np.testing.assert_allclose(Z[:, [0, 1, 2, 5]].mean(axis=0), 0, atol=1e-3)
    np.testing.assert_allclose(Z[:, [0, 1, 2, 5]].std(axis=0), 1, rtol=1e-4)
    assert (Z[:, [3, 4]] == 0).all()


def test_missing_entries_do_not_count():
    parts = awkward(1)
    parts[0][::3, 0] = np.nan
    parts[1][:] = np.nan
    c = case(parts)
    run = run_protocol(pooled_scaling, c)
    check_no_errors(run)
    wanted = pooled_scaling.ideal(c.params, {u: x for u, (x,) in c.inputs.items()})[HUB]
    check_scaling(values(run)[HUB], wanted)
    assert (wanted.apply(parts[1]) == 0).all()


def test_vectors():
    check_vectors(pooled_scaling, case(awkward()), Path(__file__).parents[2] / "vectors" / "pooled_scaling.json")


def test_view_does_not_depend_on_values_or_rows():
    check_view(pooled_scaling, case(awkward(1)), case(awkward(2)))
    one, two = (run_protocol(pooled_scaling, case(awkward(1, rows))) for rows in ((5, 5, 5), (500, 3, 40)))
    assert transcript(one) == transcript(two)


def test_cost():
    check_cost(pooled_scaling, case(awkward()))


@pytest.mark.parametrize("nth", [0, 1, 2, 3])
def test_a_site_may_drop_at_each_sum(nth):
    c = case(awkward())
    fault = Fault("kill", "site-2", "hub", "MaskedInput", nth=nth)
    run = run_protocol(pooled_scaling, c, faults=[fault], timeout=2.0)
    check_no_errors(run)
    left = pooled_scaling.ideal(c.params, {u: c.inputs[u][0] for u in SITES[:2]})[HUB]
    assert values(run)[HUB].rows == left.rows
    if nth < 2:  # later, the mean still has the dropped site's rows in it
        check_scaling(values(run)[HUB], left)


def test_too_few_rows_and_values_that_are_no_numbers():
    run = run_protocol(pooled_scaling, case(awkward(), least=1000), timeout=2.0)
    assert {e.code for e in run.errors.values()} == {"too-few-rows"}
    assert len(run.errors) == 4
    for bad in (np.inf, 2.0**64):
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


def test_who_drops_out_between_the_sums_shows_its_rows_as_reveals_says(monkeypatch):
    """Two sums of rows are opened, over all sites and over those who are left."""
    seen, kept = [], pooled_scaling._sums

    async def note(ask, width, mine, of):
        found = await kept(ask, width, mine, of)
        if ask.ch.me == SITES[0]:
            seen.append(found)
        return found

    monkeypatch.setattr(pooled_scaling, "_sums", note)
    fault = Fault("kill", "site-2", "hub", "MaskedInput", nth=3)
    run = run_protocol(pooled_scaling, case(awkward(rows=(30, 5, 12))), faults=[fault], timeout=3.0)
    assert {HUB, *SITES[:2]} <= set(run.outcomes)
    (before, entries, _), (after, fewer, _) = seen
    assert before - after == 12
    np.testing.assert_array_equal(entries - fewer, 12)
    assert "If one drops out between L2 and L4, all\n    can subtract" in pooled_scaling.__doc__
