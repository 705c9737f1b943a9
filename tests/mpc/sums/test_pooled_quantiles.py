import dataclasses
import types
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.old_steps import pooled_quantiles as old

from cloister.errors import DataError, ParameterError, ProtocolAbort
from cloister.mpc.parties import Party
from cloister.mpc.sums import pooled_quantiles, secure_sum
from cloister.mpc.sums.pooled_quantiles import Edges, Params, Refine
from cloister.mpc.sums.value_counts import Table, distinct
from cloister.rehearsal.rehearsal import Fault
from cloister.testing import Case, check_abort, check_cost, check_ideal, check_vectors, check_view, run_protocol, values

VECTORS = Path(__file__).parents[2] / "vectors" / "pooled_quantiles.json"
HUB = Party("hub")
STEP = 2.0 ** (1 / 64) - 1  # a coarse cell, relative to its lower end


def sites(n):
    return tuple(Party(f"site-{i}") for i in range(n))


def case(arrays, B=10, whole=False, least=1, **options):
    names = sites(len(arrays))
    return Case(
        Params(names, HUB, B, whole, least, **options),
        {u: (np.asarray(x, dtype=np.float64),) for u, x in zip(names, arrays, strict=True)},
    )


def lognormal(n=3, seed=0, size=200, **options):
    rng = np.random.default_rng(seed)
    return case([rng.lognormal(0.3 * i, 0.5 + 0.2 * i, size + 50 * i) for i in range(n)], **options)


def poisson(n=3, seed=0, size=200, mean=5.0, **options):
    rng = np.random.default_rng(seed)
    return case([rng.poisson(mean * (i + 1), size) + 1 for i in range(n)], whole=True, **options)


def pooled(c, of=None):
    return np.concatenate([x for u, (x,) in c.inputs.items() if of is None or u in of])


def wanted(c, of=None):
    x, k = np.sort(pooled(c, of)), c.params.least
    return np.clip(np.quantile(x, np.linspace(0, 1, c.params.n_quantiles)), x[k - 1], x[-k])


def exactly(found, ideal):
    np.testing.assert_array_equal(found, ideal)


def nearly(found, ideal):
    np.testing.assert_allclose(found, ideal, rtol=1.01 * STEP / 4096, atol=0)  # one part of a refined cell
    assert np.all(found <= ideal)


# ---- the five questions ----------------------------------------------------------------------------------------------


@settings(max_examples=8, deadline=None)
@given(n=st.integers(2, 4), B=st.integers(2, 50), seed=st.integers(0, 2**20), least=st.sampled_from([1, 2, 10, 40]))
def test_ideal_for_whole_numbers_is_met_to_the_last_bit(n, B, seed, least):
    check_ideal(pooled_quantiles, [poisson(n, seed, B=B, least=least)], agree=exactly)


@settings(max_examples=8, deadline=None)
@given(n=st.integers(2, 4), B=st.integers(2, 50), seed=st.integers(0, 2**20), least=st.sampled_from([1, 2, 10, 40]))
def test_ideal_for_other_numbers_is_met_within_one_part(n, B, seed, least):
    check_ideal(pooled_quantiles, [lognormal(n, seed, B=B, least=least)], agree=nearly)


@pytest.mark.parametrize("draw", [lognormal, poisson])
def test_edges_are_those_of_the_values_to_about_a_value_per_site_in_rank(draw):
    c = draw(B=20, least=10, size=2000)
    edges = pooled_quantiles.ideal(c.params, {u: x for u, (x,) in c.inputs.items()})[HUB]
    x = np.sort(pooled(c))
    ranks = np.linspace(0, 1, 20)[1:-1] * (len(x) - 1)
    first, last = np.searchsorted(x, edges[1:-1], side="left"), np.searchsorted(x, edges[1:-1], side="right")
    off = np.maximum(np.maximum(first - ranks, ranks - last), 0)
    assert off.mean() < 2.5
    assert off.max() < 12


def test_values_that_enough_cells_share_stay_where_they_are():
    params = poisson(least=10).params
    x = np.repeat([1.0, 2.0, 3.0, 50.0, 60.0], [400, 4, 200, 5, 6])
    runs = pooled_quantiles.Runs.of(params, x, params.thresholds)
    np.testing.assert_allclose(runs.value, [1.0, 3.0, 60.0])  # the last is a median
    assert runs.shared.tolist() == [True, True, False]
    assert runs.sizes.values.tolist() == [400, 204, 11]


@pytest.mark.parametrize("least", [2, 10])
def test_every_count_its_difference_and_complement_is_of_enough_values_and_donors(least):
    """F5, G7: whatever intervals are counted, by whomever, they hold none or enough of the site's values."""
    rng = np.random.default_rng(0)
    x, donor = rng.lognormal(0, 1, 3000), rng.integers(0, 6, 3000)
    params = dataclasses.replace(lognormal(least=least).params, min_donors=3)
    runs = pooled_quantiles.Runs.of(params, [(x[:1000], donor[:1000]), (x[1000:], donor[1000:])], params.thresholds)
    coarse = pooled_quantiles.count_coarse(params, runs)
    fine = pooled_quantiles.count_fine(params, np.arange(1400, 1700), runs)
    for part in (runs.sizes, coarse, fine):
        assert part.cells >= least
        assert part.donors >= 3
    assert coarse.values.sum() == 3000
    means = np.bincount(runs.code, runs.value[runs.code] * runs.rows.cells) / np.bincount(runs.code, runs.rows.cells)
    moved, whose = means[runs.code], runs.rows.donor  # other values, with the same sizes and means of runs
    again = pooled_quantiles.Runs(runs.rows, runs.code, means, runs.shared)
    assert np.isin(moved[(runs.code > 0) & (runs.code < runs.code.max())], x).mean() < 0.01
    assert len(whose) == len(moved)
    np.testing.assert_array_equal(pooled_quantiles.count_fine(params, np.arange(1400, 1700), again).values, fine.values)
    assert (old.count_fine(params, np.arange(1400, 1700), x) == 1).sum() > 2000  # most values alone in their interval


def test_invented_values_do_not_turn_the_outer_edges_into_the_others_extremes():
    """F5: the attacker invents nine values at each end, so that the tenth of all is the smallest of the others."""
    rng = np.random.default_rng(3)
    honest = rng.lognormal(0, 0.5, 500)
    invented = np.concatenate([np.full(9, 1e-6), np.full(9, 1e6)])
    np.testing.assert_array_equal(old.outer_edges([honest, invented], 10), [honest.min(), honest.max()])
    params = Params(sites(2), HUB, 10, whole=False, least=10)
    runs = pooled_quantiles.Runs.of(params, honest, params.thresholds)
    x = np.linspace(runs.value[0] / 2, 2 * runs.value[-1], 100_001)
    total = np.concatenate([[0], np.cumsum(runs.counts(x, whole=False).values)]) + 9  # those invented below, and these
    new = x[np.searchsorted(total, 10)], x[np.searchsorted(total, 9 + len(honest))]
    first, last = runs.value[:2], runs.value[-2:]
    np.testing.assert_allclose(new[0], first[0] - (first[1] - first[0]) / 2, rtol=0.2)  # by means of runs alone
    np.testing.assert_allclose(new[1], last[1] + (last[1] - last[0]) / 2, rtol=0.02)
    assert abs(new[1] - honest.max()) > 0.02


def test_values_in_pieces_give_the_same_as_all_at_once():
    whole = lognormal(B=20, least=3)
    pieces = Case(whole.params, {u: (np.array_split(x, 7),) for u, (x,) in whole.inputs.items()})
    one, many = (values(run_protocol(pooled_quantiles, c)) for c in (whole, pieces))
    np.testing.assert_array_equal(one[HUB], many[HUB])


@pytest.mark.parametrize("draw", [poisson, lognormal])
def test_a_table_of_how_often_values_occur_gives_the_same_sums_and_edges(draw):
    plain = draw(B=20, least=3)
    tables = {u: (distinct(x),) for u, (x,) in plain.inputs.items()}
    for u, (x,) in plain.inputs.items():
        one, other = (pooled_quantiles.Runs.of(plain.params, v, plain.params.thresholds) for v in (x, *tables[u]))
        np.testing.assert_allclose(one.value, other.value)
        np.testing.assert_array_equal(one.sizes.values, other.sizes.values)
    counted = Case(plain.params, tables)
    one, other = (values(run_protocol(pooled_quantiles, c)) for c in (plain, counted))
    np.testing.assert_array_equal(one[HUB], other[HUB])
    check_ideal(pooled_quantiles, [counted], agree=exactly if plain.params.whole else nearly)


def test_vectors():
    """Inputs without random numbers, so that the bytes are the same on every machine."""
    arrays = [[1, 1, 3, 5], [3, 3, 7, 11, 100], [1, 6, 6]]
    check_vectors(pooled_quantiles, case(arrays, B=4, whole=True, cells=2, parts=16), VECTORS)


def small(seed=0):
    """Few cells and parts, so that runs are short."""
    return poisson(seed=seed, B=4, cells=2, parts=16)


def test_view_does_not_depend_on_the_values():
    """The refined cells are the only thing that shows; here both inputs need the same number of them."""
    first, second = (case([[2, 2, 9], [2, 9, 9], [x, 2, 9]], B=3, whole=True, cells=1, parts=8) for x in (2, 9))
    check_view(pooled_quantiles, first, second)


def test_cost():
    c = case([[2.0, 2.0, 9.0], [2.0, 9.0, 9.0], [2.0, 2.0, 9.0]], B=3, whole=True)
    refined = len(np.unique(np.searchsorted(c.params.grid, pooled(c), side="right")))
    module = types.SimpleNamespace(**vars(pooled_quantiles) | {"cost": lambda p: pooled_quantiles.cost(p, refined)})
    check_cost(module, c)
    most = pooled_quantiles.cost(c.params)
    assert all(most[p][1] > pooled_quantiles.cost(c.params, refined)[p][1] for p in most)


MESSAGES = [
    ("site-1", "hub", "secure_sum.Keys"),
    ("site-1", "hub", "secure_sum.MaskedInput"),
    ("site-1", "hub", "secure_sum.Unmask"),
    ("hub", "site-1", "pooled_quantiles.Refine"),
    ("hub", "site-1", "pooled_quantiles.Edges"),
]


@pytest.mark.parametrize("kind", ["drop", "delay", "duplicate", "swap", "truncate", "kill"])
def test_abort_or_survive(kind):
    c = small()

    def survived(run):
        check_survivors(c, run)

    done = check_abort(pooled_quantiles, c, survived=survived, kinds=[kind], messages=MESSAGES, within=40.0)
    assert done == len(MESSAGES)


def check_survivors(c, run):
    """The edges are those of all sites, or of all but the one that was lost."""
    found = values(run)[HUB]
    fits = [wanted(c), *(wanted(c, set(c.params.sites) - {u}) for u in c.params.sites)]
    assert any(np.array_equal(found, w) for w in fits)
    for u, v in values(run).items():
        np.testing.assert_array_equal(v, found, err_msg=u)


# ---- who drops, and when ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nth", [0, 1])
@pytest.mark.parametrize("name", ["Keys", "Shares", "MaskedInput", "Vouch", "Unmask"])
def test_a_site_that_dies_at_any_step_of_either_sum_is_left_out(name, nth):
    c = small()
    run = run_protocol(pooled_quantiles, c, faults=[Fault("kill", "site-1", "hub", name, nth)], timeout=1.0)
    assert run.errors == {}
    found = values(run)
    assert found.keys() == {HUB, "site-0", "site-2"}
    stayed = wanted(c, {"site-0", "site-2"})
    late = name in ("Vouch", "Unmask")  # its input was in by then
    if late and nth == 1:
        np.testing.assert_array_equal(found[HUB], wanted(c))
    else:
        np.testing.assert_array_equal(found[HUB], stayed)
    for v in found.values():
        np.testing.assert_array_equal(v, found[HUB])


def test_too_many_gone_is_a_named_abort():
    faults = [Fault("kill", s, "hub", "MaskedInput") for s in ("site-1", "site-2")]
    run = run_protocol(pooled_quantiles, small(), faults=faults, timeout=1.0)
    assert {e.code for e in run.errors.values()} == {"too-few"}


# ---- values of many kinds --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arrays",
    [
        [[1], [1], [1, 1, 1]],  # all the same
        [[1, 2], [1], [3]],
        [[2**18], [1] * 5, [2**17 + 1]],
        [[1] * 1000, [1] * 1000, [7]],  # heavy ties
        [list(range(1, 100)), [2**k for k in range(18)], [2**k - 1 for k in range(1, 19)]],  # ends of cells
    ],
)
def test_whole_numbers_are_exact(arrays):
    c = case(arrays, B=4, whole=True)
    run = run_protocol(pooled_quantiles, c)
    assert run.errors == {}
    np.testing.assert_array_equal(values(run)[HUB], wanted(c))


def test_floats_of_single_precision_and_the_ends_of_the_range():
    tiny, most = 2.0**-24, np.nextafter(2.0**24, 0)
    c = case([[tiny, most], np.float32([0.1, 0.1, 0.7]), [1e-7, 3.3, 1e7]], B=8)
    run = run_protocol(pooled_quantiles, c)
    assert run.errors == {}
    nearly(values(run)[HUB], wanted(c))


@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("value", [0.0, -1.0, np.nan, np.inf, 2.0**24, 2.0**-25])
def test_values_out_of_range_are_refused_before_anything_is_sent(value, counted):
    c = case([[1.0, value], [1.0], [2.0]], B=2)
    if counted:
        c.inputs[Party("site-0")] = (Table(np.array([1.0, value]), np.array([1, 1])),)
    run = run_protocol(pooled_quantiles, c, timeout=10.0)
    assert isinstance(run.errors["site-0"], DataError)
    sent = [e.name for e, _ in run.receipts["site-0"].entries if e.kind == "sent"]
    assert all(name.startswith("channel.") for name in sent)


def test_fewer_values_than_edges_is_a_named_abort():
    run = run_protocol(pooled_quantiles, case([[1, 2], [3], [4]], whole=True, B=10))
    assert {e.code for e in run.errors.values()} == {"too-few-values"}


def test_a_site_with_too_few_values_is_refused_before_anything_is_sent():
    run = run_protocol(pooled_quantiles, case([[1, 2], [3] * 9, [4] * 9], whole=True, B=2, least=3), timeout=1.0)
    assert "fewer than min_cells = 3" in str(run.errors["site-0"])


@pytest.mark.parametrize("x", [[3, 1, 3, 70_000], [3, 1, 3, 9], [0.5, 3, 3], [], [65_535, 65_536]])
def test_distinct_values_and_how_often_they_occur(x):
    found, times = distinct(np.array(x, dtype=np.float64))
    wanted, often = np.unique(x, return_counts=True)
    np.testing.assert_array_equal(found, wanted)
    np.testing.assert_array_equal(times, often)


def test_counting_agrees_with_numpy():
    rng = np.random.default_rng(0)
    for _ in range(20):
        ends = np.unique(rng.integers(1, 50, 12)).astype(float)
        x = np.sort(rng.integers(1, 50, 300)).astype(float)
        inside = x[(x >= ends[0]) & (x < ends[-1])]
        np.testing.assert_array_equal(old.count(ends, x), np.histogram(inside, ends)[0])


@pytest.mark.parametrize("options", [{"n_quantiles": 1}, {"cells": 0}, {"parts": 0}, {"least": 0}])
def test_bad_parameters(options):
    with pytest.raises(ParameterError):
        dataclasses.replace(Params(sites(2), HUB, 5, True), **options)


# ---- what the coordinator sees, and one that lies --------------------------------------------------------------------


def test_the_coordinator_opens_pooled_counts_only():
    run = run_protocol(pooled_quantiles, small())
    opened = [(e.protocol, e.line, e.to) for e, _ in run.receipts[HUB].entries if e.kind == "opened"]
    assert opened == [("secure_sum", "L10", HUB)] * 2
    for u in sites(3):
        assert not [e for e, _ in run.receipts[u].entries if e.kind == "opened"]


def asks_for(cells):
    async def hub(ch, params):
        n_cells = len(params.grid) - 1
        await secure_sum.aggregator(ch.sub("coarse/0"), params.sum(n_cells))
        await ch.broadcast(params.sites, Refine(np.array(cells, dtype=np.int64)))
        await secure_sum.aggregator(ch.sub("fine/0"), params.sum(len(cells) * params.parts))

    return hub


@pytest.mark.parametrize("cells", [[], [-1], [96], [3, 3], [5, 4], list(range(9))])
def test_a_coordinator_that_asks_for_cells_no_quantile_needs_is_refused(cells):
    c = small()
    assert len(c.params.grid) - 1 == 96
    run = run_protocol(pooled_quantiles, c, roles={HUB: asks_for(cells)}, timeout=10.0)
    for u in c.params.sites:
        assert isinstance(run.errors[u], ProtocolAbort)
        assert (run.errors[u].line, run.errors[u].code) == ("L2", "cells")


def answers(edges, again):
    async def hub(ch, params):
        for attempt in range(len(params.sites) if again else 1):
            await secure_sum.aggregator(ch.sub(f"coarse/{attempt}"), params.sum(len(params.grid) - 1))
            await ch.broadcast(params.sites, Refine(np.array([50], dtype=np.int64)))
            await secure_sum.aggregator(ch.sub(f"fine/{attempt}"), params.sum(params.parts))
            await ch.broadcast(params.sites, Edges(np.array(edges, dtype=float), again))
        return None

    return hub


@pytest.mark.parametrize(
    ("edges", "again", "code"),
    [
        ([1, 2, np.nan, 4], False, "edges"),
        ([1, 3, 2, 4], False, "edges"),
        ([1, 2, 3, 2e8], False, "edges"),
        ([0, 0, 0, 0], True, "restarts"),
    ],
)
def test_a_coordinator_that_answers_nonsense_is_refused(edges, again, code):
    run = run_protocol(pooled_quantiles, small(), roles={HUB: answers(edges, again)}, timeout=10.0)
    for u in sites(3):
        assert (run.errors[u].line, run.errors[u].code) == ("L4", code)
