"""Cuts over rows in one place: that the protocol's sums are these is tested with the protocol."""

import itertools

import numpy as np
import pytest

from cloister.disclosure import Rows, Thresholds
from cloister.mpc.sums.pooled_queries import Plain, answer_plainly
from cloister.workflows.find_outliers.score_thresholds import Scored, find_cuts


class Noting(Plain):
    """What one site contributes, to hold against the rows behind it."""

    def __init__(self):
        super().__init__()
        self.counts = []

    async def total(self, parts, length, most, *, line, what):
        self.counts += np.ravel(parts[0]().values).tolist()
        return await super().total(parts, length, most, line=line, what=what)


def scored(seed=0, donors=10, rows=600, crowd=20, least=(10, 3)):
    """Scores of many donors' rows about 0.45, and of `crowd` rows of one more donor about 0.8."""
    rng = np.random.default_rng(seed)
    scores = np.concatenate([rng.normal(0.45, 0.04, rows), rng.uniform(0.78, 0.84, crowd)])[None]
    donor = np.concatenate([rng.integers(donors, size=rows), np.full(crowd, donors)])
    return scores, Scored.of(Rows(rows + crowd, donor, Thresholds(*least)), scores)


@pytest.mark.parametrize("seed", range(3))
def test_counts_and_their_differences_are_of_enough_rows_and_donors(seed):
    """Attack: subtract one opened count from another, or from the number of rows."""
    scores, own = scored(seed)
    tally = Noting()
    answer_plainly(find_cuts(tally, 1, 31, [own]))
    order = np.argsort(-scores[0], kind="stable")
    ends = sorted({0, *tally.counts, len(order)})
    assert len(ends) > 4
    for a, b in itertools.pairwise(ends):
        assert b - a >= 10
        assert len(set(own.rows.donor[order[a:b]])) >= 3


@pytest.mark.parametrize("allowed", [62, 200])
def test_about_the_fraction_is_cut_off(allowed):
    sites = [scored(seed, rows=2000) for seed in range(3)]
    cut = answer_plainly(find_cuts(Plain(), 1, allowed, [own for _, own in sites]))[0]
    above = sum(int((scores[0] >= cut).sum()) for scores, _ in sites)
    assert abs(above - allowed) <= 3 * 20  # a run of the crowd's one donor takes rows of two others


def test_forests_are_cut_each_by_its_own_scores():
    (one, a), (two, _) = scored(0, rows=3000), scored(1, rows=3000)
    both = Scored.of(a.rows, np.concatenate([one, two * 0.9]))
    cuts = answer_plainly(find_cuts(Plain(), 2, 90, [both]))
    single = [
        answer_plainly(find_cuts(Plain(), 1, 90, [Scored.of(a.rows, s[None])]))[0] for s in (one[0], two[0] * 0.9)
    ]
    np.testing.assert_array_equal(cuts, single)


def test_too_few_rows_count_for_nothing():
    scores = np.linspace(0.1, 0.9, 8)[None]
    own = Scored.of(Rows(8, None, Thresholds(10, 3)), scores)
    assert not own.above(np.array([[0.0, 0.5]])).values.any()
