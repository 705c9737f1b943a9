"""F6: a site that claims 10^9 cells at a value T learns how many cells of another site exceed T."""

import numpy as np
import pytest
from tests.old_steps import shared_pca as old

from cloister.disclosure import Thresholds
from cloister.errors import ProtocolAbort
from cloister.study import Party
from cloister.workflows.common.gene_moments import Cells
from cloister.workflows.shared_pca import shared_pca
from cloister.workflows.shared_pca.shared_pca import Chosen, Own, Params

HUB, SITES = Party("hub"), tuple(map(Party, "abc"))
GENES, N = 30, 400


def honest(seed=0):
    rng = np.random.default_rng(seed)
    x = rng.lognormal(0, 1, (N, GENES))
    x[rng.random((N, GENES)) < 0.5] = 0.0
    params = Params(SITES, HUB, kind="log", n_top_genes=GENES, n_components=2)
    mine = Cells(tuple(f"G{i:02d}" for i in range(GENES)), np.log1p(x))
    return Own(params, mine, mine.names, Thresholds(10, 3)), np.log1p(x)


def claimed(log, rank):
    """Mean and deviation if one site adds 10^9 cells at T, which `rank` cells of each gene exceed."""
    T = (np.sort(log, axis=0)[-rank - 1] + np.sort(log, axis=0)[-rank]) / 2
    n = 10**9
    mean = (log.sum(axis=0) + n * T) / (n + len(log))
    spread = np.square(log - mean).sum(axis=0) + n * np.square(T - mean)
    return Chosen(np.arange(log.shape[1]), mean, np.sqrt(spread / (n + len(log) - 1)), n + len(log))


@pytest.mark.parametrize("rank", [2, 5])
def test_old_step_counts_cells_above_a_value(rank):
    _, log = honest()
    space = claimed(log, rank)
    sums = [old.sum_of_z(log[:, g], space.mean[g], space.deviation[g]) for g in range(GENES)]
    right = sum(old.cells_above(s, N) == rank for s in sums)
    assert right >= 0.9 * GENES  # all but those with two values within 0.01 deviations of T


def sums_of_z(own, space):
    return own.products(space).values[1 : 1 + GENES]


@pytest.mark.parametrize("rank", [2, 5, 9])
def test_new_step_says_nothing_about_fewer_cells_than_the_threshold(rank):
    """Σz is the same whether two, five or nine cells exceed T: it follows from what is known anyway."""
    own, log = honest()
    space = claimed(log, rank)
    found = own.limits(space)
    lower, upper, zero = found.lower, found.upper, found.zero
    free = np.isinf(lower) & np.isinf(upper)
    assert (free | zero).all()
    expected = np.where(zero, N * np.clip(-space.mean / space.deviation, -10, np.inf), 0)
    linear = (log.sum(axis=0) - N * space.mean) / space.deviation
    np.testing.assert_allclose(sums_of_z(own, space), np.where(zero, expected, linear))


def test_larger_groups_are_clipped_as_in_scanpy():
    own, log = honest()
    space = claimed(log, 100)
    found = own.limits(space)
    lower, upper, zero = found.lower, found.upper, found.zero
    assert (np.isfinite(upper) & np.isfinite(lower) & ~zero).sum() >= 10
    own.check_spread(space)


def test_a_deviation_that_no_pooled_cells_have_ends_the_run():
    own, log = honest()
    space = claimed(log, 100)
    for change in ({"deviation": space.deviation / 2}, {"mean": space.mean + 1.0}):
        fields = {"at": space.at, "mean": space.mean, "deviation": space.deviation, "cells": space.cells} | change
        with pytest.raises(ProtocolAbort) as e:
            own.check_spread(Chosen(**fields))
        assert e.value.code == "spread"


def test_genes_of_few_cells_or_donors_add_nothing():
    x = np.zeros((60, 3))
    x[:4, 0], x[:30, 1], x[::2, 2] = 3.0, 2.0, 1.0
    donor = np.repeat([0, 1, 2, 3], 15)
    params = Params(SITES, HUB, kind="log", n_top_genes=3, n_components=2)
    names = ("A", "B", "C")
    for mine, kept in ((Cells(names, x), [False, True, True]), (Cells(names, x, None, donor), [False, False, True])):
        own = Own(params, mine, mine.names, Thresholds(10, 3))
        part = own.sums()
        sums = part.values[1:].reshape(4, 3)
        assert ((sums > 0).all(axis=0) == kept).all()
        assert part.values[0] == 60
        assert part.cells == 30
        assert part.withheld == kept.count(False)
        assert shared_pca.moments(params, mine, mine.names)[1] > 0  # the old step


def test_the_value_of_one_cell_does_not_follow_from_a_sum_that_it_dominates():
    """Attack: Σy² of a gene is nearly the square of the one cell that expresses it most, whoever else does."""
    rng = np.random.default_rng(0)
    y = np.zeros((200, 3))
    y[:40] = rng.uniform(0.5, 2, (40, 3))
    y[7, 0] = 300.0
    params = Params(SITES, HUB, kind="log", n_top_genes=3, n_components=2)
    mine = Cells(("A", "B", "C"), np.log1p(y))
    own = Own(params, mine, mine.names, Thresholds(10, 3))
    total, square, log, log_square = own.sums().values[1:].reshape(4, 3)
    old_total, old_square = shared_pca.moments(params, mine, mine.names)[1:7].reshape(2, 3)
    assert abs(old_square[0] ** 0.5 - 300) < 1  # the old step: its value, to 0.3 %
    assert square[0] ** 0.5 < 20
    assert (np.array([total[1:], square[1:]]) == np.array([old_total[1:], old_square[1:]])).all()  # others as they are
    tenth = np.sort(y[:, 0])[-10]
    assert total[0] == pytest.approx(np.minimum(y[:, 0], tenth).sum())
    space = Chosen(np.arange(3), np.zeros(3), np.ones(3), 200)
    logs = np.concatenate(list(own.logs(space)))
    assert logs[7, 0] == pytest.approx(np.log1p(tenth))  # at L5 too
    np.testing.assert_allclose(logs.sum(axis=0)[1:], log[1:])
    assert (log_square > 0).all()


def test_a_gene_that_one_donor_dominates_adds_nothing():
    rng = np.random.default_rng(0)
    donor = np.repeat([0, 1, 2], 60)
    y = rng.uniform(0.5, 2, (180, 2))
    y[:60, 0] *= 20
    params = Params(SITES, HUB, kind="log", n_top_genes=2, n_components=1)
    mine = Cells(("A", "B"), np.log1p(y), None, donor)
    sums = Own(params, mine, mine.names, Thresholds(10, 3)).sums().values[1:].reshape(4, 2)
    assert not sums[:, 0].any()
    assert sums[:, 1].all()
    assert Own(params, mine, mine.names, Thresholds(10, 1)).genes.donors.tolist() == [3, 3]
