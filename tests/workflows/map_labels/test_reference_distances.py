import dataclasses
from pathlib import Path

import numpy as np
import pytest

from cloister.disclosure import Thresholds, constant
from cloister.errors import ParameterError, PeerLost, ProtocolAbort
from cloister.mpc.sums import checked_sum
from cloister.study import Party
from cloister.testing import (
    Case,
    Fault,
    check_cost,
    check_lies,
    check_no_errors,
    check_vectors,
    check_view,
    run_protocol,
    values,
)
from cloister.workflows.map_labels import reference_distances
from cloister.workflows.map_labels.reference_distances import Params, Threshold, contribution, nearest_others
from old_steps import reference_curve

HUB, ASKING, AUX = Party("hub"), Party("asking"), Party("aux")
SITES = tuple(map(Party, ("a", "b")))
VECTORS = Path(__file__).parents[2] / "vectors" / "reference_distances.json"


def case(seed=0, sites=SITES, share=0.95, listeners=(), n=220):
    rng = np.random.default_rng(seed)
    params = Params(ASKING, sites, HUB, 8.0, share, listeners)
    rows = {u: (rng.normal(0, 1, (n + 20 * i, 5)),) for i, u in enumerate(sites)}
    return Case(params, {HUB: (), ASKING: (), **rows, **{p: () for p in listeners}})


def rows(c):
    return {u: x[0] for u, x in c.inputs.items() if x}


def ideal_of(c):
    return reference_distances.ideal(c.params, rows(c))[HUB]


@pytest.mark.parametrize("options", [{}, {"sites": SITES[:1]}, {"share": 0.5}], ids=["two", "one-site", "half"])
def test_every_party_finds_the_distance(options):
    c = case(**options)
    run = run_protocol(reference_distances, c)
    check_no_errors(run)
    assert set(values(run).values()) == {ideal_of(c)}
    assert set(values(run)) == {HUB, ASKING, *c.params.sites}


def test_a_party_without_cells_is_told():
    c = case(listeners=(AUX,))
    run = run_protocol(reference_distances, c)
    check_no_errors(run)
    assert values(run)[AUX] == ideal_of(c)


def test_vectors():
    c = case(listeners=(AUX,))
    line = {
        u: (np.outer(np.arange(210.0 + i) ** 2, [3.0, 4.0]) / 2**15,) for i, u in enumerate(SITES)
    }  # exact anywhere
    check_vectors(reference_distances, Case(c.params, {**c.inputs, **line}), VECTORS)


@pytest.mark.parametrize("who", [SITES[0], ASKING], ids=["references", "asking"])
@pytest.mark.parametrize("name", ["Confirm", "Masked"])
def test_a_site_that_dies_ends_the_run_by_name(who, name):
    run = run_protocol(reference_distances, case(listeners=(AUX,)), faults=[Fault("kill", who, HUB, name)], timeout=1.0)
    assert not run.outcomes
    assert isinstance(run.errors[HUB], PeerLost)
    for party in {HUB, ASKING, AUX, *SITES} - {who}:
        assert isinstance(run.errors[party], ProtocolAbort)


def test_a_coordinator_that_dies_before_it_tells_the_distance():
    c = case(listeners=(AUX,))
    run = run_protocol(reference_distances, c, faults=[Fault("kill", HUB, AUX, "Threshold")], timeout=1.0)
    assert HUB in str(run.errors[AUX])


def test_so_many_references_are_nearer_to_another_one():
    c = case(n=400)
    tau = ideal_of(c)
    for x in rows(c).values():
        apart = np.sqrt(((x[:, None] - x[None]) ** 2).sum(axis=2))
        np.fill_diagonal(apart, np.inf)
        np.testing.assert_allclose(np.sort(nearest_others(x)), np.sort(apart.min(axis=1)), atol=1e-9)
        assert abs(np.mean(apart.min(axis=1) <= tau) - 0.95) < 0.05  # a step of the grid, 3.5 %, and two sites


def test_copies_and_many_cells():
    params, least = case().params, Thresholds()
    assert contribution(params, np.zeros((400, 5)), least).values[0] == 975  # at distance 0; ten are not shown
    many = np.random.default_rng(0).normal(size=(12_000, 2))
    assert len(nearest_others(many)) <= reference_distances.MOST


def test_few_references_would_show_the_distance_of_each():
    """Attack: another site subtracts its curve; the steps of the rest are the nearest distances of single cells."""
    params = case(share=0.9).params
    x = np.random.default_rng(1).normal(0, 1, (12, 5))
    steps = np.repeat(
        params.grid, np.round(np.diff(reference_curve.curve(params, x), prepend=0) * 12 / 1000).astype(int)
    )
    np.testing.assert_allclose(steps, np.sort(nearest_others(x)), rtol=0.04)  # of every reference
    assert not contribution(params, x, Thresholds()).values.any()
    for n in (99, 100, 130, 137):
        x = np.random.default_rng(n).normal(0, 1, (n, 5))
        part = contribution(params, x, Thresholds())
        counts = np.unique(np.round(part.values[:-1] * n / 1000).astype(int))
        assert part.values[-1] == (n >= 100)
        assert np.all(np.diff(counts) >= 10)  # each step is of ten or more
        assert n - counts.max() >= 10  # and as many lie beyond
        assert part.cells == (10 if n >= 100 else None)


def test_a_site_with_few_references_adds_nothing_and_others_decide():
    c = case(n=220)
    few = np.random.default_rng(0).normal(0, 1, (40, 5))
    some = Case(c.params, {**c.inputs, SITES[0]: (few,)})
    run = run_protocol(reference_distances, some)
    check_no_errors(run)
    alone = case(sites=SITES[1:])
    wanted = reference_distances.ideal(alone.params, {SITES[1]: c.inputs[SITES[1]][0]})[HUB]
    assert set(values(run).values()) == {wanted}
    assert "cells" not in run.receipts[SITES[0]].smallest_group
    assert run.receipts[SITES[1]].smallest_group == {"cells": 10}
    none = Case(c.params, {**c.inputs, **dict.fromkeys(SITES, (few,))})
    run = run_protocol(reference_distances, none, timeout=2.0)
    assert {e.code for e in run.errors.values()} == {"few-references"}
    assert "lower known_share=, or pass max_distance=" in str(run.errors[ASKING])


def test_cost_and_view():
    check_cost(reference_distances, case())
    check_view(reference_distances, case(1), case(2))


def test_nothing_leaves_but_the_sum():
    run = run_protocol(reference_distances, case())
    for party, receipt in run.receipts.items():
        opened = [e for e, _ in receipt.entries if e.kind == "opened" and e.protocol == "reference_distances"]
        assert [e.line for e in opened] == ["L3"], party
        sent = {e.protocol for e, _ in receipt.entries if e.kind == "sent"}
        assert sent <= {"channel", "checked_sum", "common_seed", "reference_distances"}


@pytest.mark.parametrize("only", [None, SITES[0]], ids=["told all", "told one"])
def test_a_coordinator_cannot_move_the_distance(only):
    """It would call every cell unknown, or none."""

    async def coordinator(ch, params):
        await reference_distances.common_seed.coordinator(ch.sub("seed", params.seed), params.seed)
        z = await checked_sum.coordinator(ch.sub("curve", params.sum), params.sum)
        right = reference_distances.threshold(params, z.view(np.int64))
        told = {u: Threshold(right * 2 if only in (None, u) else right) for u in params.owners}
        await ch.scatter(told)

    c = case()
    run = run_protocol(reference_distances, c, roles={HUB: coordinator}, timeout=3.0)
    for u in c.params.owners if only is None else (only,):
        assert run.errors[u].code == "changed"


def test_one_liar():
    c, twin = case(3), case(4)

    def right(lie, ended):
        exact = lie.liar == HUB or lie.letter == "j"
        for tau in ended.values():
            assert tau == ideal_of(lie.case) if exact else tau in c.params.grid

    lies = check_lies(reference_distances, [c, twin], right=right)
    assert lies.tried > 5
    assert lies.aborted > 3


def test_a_curve_that_is_none_is_absurd():
    async def liar(ch, params, x, *, entropy, identity):
        mine = np.zeros(params.sum.length, np.int64)
        mine[5] = 10**6
        return await reference_distances._add(ch, params, constant(mine, "a lie"), entropy, identity)

    run = run_protocol(reference_distances, case(), roles={SITES[0]: liar}, timeout=3.0)
    assert run.errors[ASKING].code == "absurd"


@pytest.mark.parametrize("change", [{"share": 0.0}, {"share": 1.0}, {"bound": 0.0}])
def test_bad_parameters(change):
    with pytest.raises(ParameterError):
        dataclasses.replace(case().params, **change)
