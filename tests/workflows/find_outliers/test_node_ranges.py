"""Where rows begin and end on a grid: each answer of a site is about enough of its own rows and donors."""

import numpy as np
import pytest

from cloister.disclosure import Rows, Thresholds
from cloister.errors import ProtocolAbort
from cloister.mpc.sums.pooled_queries import Plain, answer_plainly
from cloister.workflows.find_outliers.node_ranges import Grid, check_answers, find_ranges, reached

NODES = 40
GRID = Grid(64, 10.0)


def site(seed, n=1500, donors=None, least=(10, 3)):
    rng = np.random.default_rng(seed)
    donor = None if donors is None else rng.integers(0, donors, n)
    which = rng.integers(-1, NODES + 20, n)
    which[which >= NODES] = rng.integers(0, 5, int((which >= NODES).sum()))  # some nodes hold many rows, others few
    return Rows(n, donor, Thresholds(*least)), which, rng.normal(0, 3, n)


@pytest.mark.parametrize("donors", [None, 4])
def test_every_yes_is_about_enough_rows_and_donors_and_no_is_about_fewer(donors):
    rows, which, along = site(1, donors=donors)
    part = reached(GRID, rows, which, NODES, along)
    cell = GRID.cell(along)
    least = rows.thresholds
    seen = 0
    for node in range(NODES):
        for e in range(1, GRID.cells):
            for end, inside in enumerate((cell < e, cell >= e)):
                mine = (which == node) & inside
                enough = mine.sum() >= least.min_cells
                if donors is not None:
                    enough &= len(set(rows.donor[mine])) >= least.min_donors
                if part.values[node, end, e - 1]:
                    assert enough
                    seen += 1
                elif part.values[node].any():
                    assert not enough
    assert seen > 1000
    assert part.cells >= least.min_cells


def test_a_node_with_too_few_rows_for_both_ends_answers_no():
    rows = Rows(15, None, Thresholds(10, 3))
    part = reached(GRID, rows, np.zeros(15, np.int64), 1, np.linspace(-5, 5, 15))
    assert not part.values.any()
    same = reached(GRID, rows, np.zeros(15, np.int64), 1, np.full(15, 0.1))
    assert same.values.any()  # one cell holds them all


def test_the_range_is_the_widest_of_all_sites():
    sites = [site(seed) for seed in range(3)]
    parts = [lambda s=s: reached(GRID, s[0], s[1], NODES, s[2]) for s in sites]
    first, last, _ = answer_plainly(find_ranges(Plain(), GRID, NODES, 3, parts))
    ends = [r.spans(w, NODES, GRID.cell(v)) for r, w, v in sites]
    for node in range(NODES):
        there = [(lo[node], hi[node]) for lo, hi in ends if lo[node] <= hi[node]]
        if there:
            assert (first[node], last[node]) == (min(a for a, _ in there), max(b for _, b in there))
        else:
            assert first[node] > last[node]
    assert (first <= last).sum() >= 5


class Subtracting(Plain):
    """A malicious site adds -1 wherever it expects the only yes, so that the range becomes what it likes."""

    async def total(self, parts, length, most, *, line, what):
        pooled, coin = await super().total(parts, length, most, line=line, what=what)
        answers = pooled.reshape(-1, 2, GRID.cells - 1)
        answers[:, 0, :40] = answers[:, 1, 41:] = 0  # of the honest site, those that the attacker takes away
        return answers.ravel(), coin


def test_a_site_cannot_narrow_a_range_to_place_the_cut():
    rows = Rows(200, None, Thresholds(10, 3))
    part = reached(GRID, rows, np.zeros(200, np.int64), 1, np.linspace(-9, 9, 200))
    low, high, _ = answer_plainly(find_ranges(Plain(), GRID, 1, 2, [lambda: part]))
    assert high[0] - low[0] > 50
    with pytest.raises(ProtocolAbort, match="takes the answer of another site away"):
        answer_plainly(find_ranges(Subtracting(), GRID, 1, 2, [lambda: part]))


@pytest.mark.parametrize("change", [lambda c: c + 5, lambda c: c[:, :, ::-1]])
def test_numbers_of_sites_that_no_ranges_have_end_the_run(change):
    counts = np.stack([np.arange(1, 64) > 20, np.arange(1, 64) < 40])[None].astype(np.int64)
    check_answers(counts, 3, [counts])
    with pytest.raises(ProtocolAbort, match="no ranges have"):
        check_answers(change(counts), 3, [])
