"""Cuts over rows in one place: that the protocols' sums are these is tested with the protocols."""

import itertools

import numpy as np
import pytest

from cloister.protocols.forest.share_cuts import Scored, find_cuts, find_donor_cuts
from cloister.protocols.sums.tally import Plain, answer_plainly

T, Q, D = 8, 3, 3  # rows of at least three donors: no donor counts for more than three of eight


class Heard(Plain):
    """What is opened, to hold against the donors behind it."""

    def __init__(self):
        self.counts = []

    async def total(self, count, length):
        told = count()
        assert len(told) == length
        self.counts += told.tolist()
        return told


def scored(seed=0, donors=10, rows=600, crowd=20):
    """Scores of many donors' rows about 0.45, and of `crowd` rows of one more donor about 0.8."""
    rng = np.random.default_rng(seed)
    scores = np.concatenate([rng.normal(0.45, 0.04, rows), rng.uniform(0.78, 0.84, crowd)])[None]
    return Scored(scores, np.concatenate([rng.integers(donors, size=rows), np.full(crowd, donors)]))


def by_donors(own, allowed, tally):
    return answer_plainly(find_donor_cuts(tally, len(own.scores), allowed, own, least=T, per_donor=Q, sites=3))


def donors_between(own, counts):
    """Donors of the rows between every two opened counts, the rows in order of their scores from the top."""
    order = np.argsort(-own.scores[0])
    ends = sorted({0, *counts, len(order)})
    return [len(set(own.donor[order[a:b]].tolist())) for a, b in itertools.pairwise(ends)]


@pytest.mark.parametrize("seed", range(3))
def test_counts_never_tell_of_few_donors(seed):
    """Attack: subtract one opened count from another. Counted by rows, that leaves the rows of one donor."""
    own, by_rows, ours = scored(seed), Heard(), Heard()
    answer_plainly(find_cuts(by_rows, 1, 31, own))
    assert min(donors_between(own, by_rows.counts)) == 1
    by_donors(own, 31, ours)
    assert ours.counts
    assert min(donors_between(own, ours.counts)) >= D


@pytest.mark.parametrize("allowed", [62, 200])
def test_no_more_than_the_share_is_cut_off_and_nearly_as_much(allowed):
    own = scored(rows=6000)
    cut = by_donors(own, allowed, Plain())[0]
    assert 0.5 * allowed <= (own.scores[0] >= cut).sum() <= allowed


def test_rows_of_few_donors_alone_are_never_cut_off():
    """20 of 620 are asked for, and these are one donor's: the cut would tell so."""
    assert by_donors(scored(), 20, Plain())[0] == 1.0


def test_forests_are_cut_each_by_its_own_scores():
    one, two = scored(0, rows=3000), scored(1, rows=3000)
    both = Scored(np.concatenate([one.scores, two.scores * 0.9]), one.donor)
    cuts = by_donors(both, 90, Plain())
    np.testing.assert_array_equal(cuts, [by_donors(Scored(s[None], one.donor), 90, Plain())[0] for s in both.scores])
