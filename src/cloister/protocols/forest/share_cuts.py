"""Share cuts: per forest, the lowest score above which no more than a given share of all sites' rows lies.

    where rows are counted, three times:
    L1   u, S   of 15 cuts in an interval, at first (0, 1): how many rows score above each           (secure_sum)
                the interval becomes the part in which the share is passed

    where donors are named, four times:
    L1   u, S   of all stretches of 16 parts of an interval: does each hold t rows, if no donor's     (count_tests,
                count for more than q                                                                k = t, proved)
    L2   u, S   from the top, the shortest stretch that does, the shortest after it, and so on; the   (secure_sum)
                last one with the rest: how many rows score above the lower end of each but the last
                the interval becomes what lies between two such ends, or the old ones, where the share is passed

In the second form every two cuts whose counts are opened have rows of enough donors between them, and so has the
highest above it: whatever is subtracted, the rest is never of fewer. Sites add to a test no more than t, which says the
same. What the share cuts off may be less than asked, down to the rows of so many donors, or none.

Reveals
-------
all : the counts that are opened, and which stretches are of too few donors.

Assumes
-------
What secure sum and count tests assume.

Cost
----
Three sums of 15 counts per forest; with donors four of 136 tests and at most four of 15 counts.

References
----------
Lines numbered here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from cloister.arrays import F64, I64, Bits
from cloister.protocols.sums.tally import Tally

CUTS, ROUNDS, DONOR_ROUNDS = 16, 3, 4
FIRST, LAST = np.triu_indices(CUTS + 1, 1)  # edges of all stretches
PROOFS = 2  # numbers that prove a count large enough to be opened


@dataclass(frozen=True)
class Scored:
    """A site's own rows."""

    scores: F64  # (forests, own rows)
    donor: I64 | None = None  # (own rows,)


async def find_cuts(tally: Tally, forests: int, allowed: int, own: Scored | None) -> F64:
    """Where rows are counted: per forest, the lowest cut on a grid of 16³ steps above which `allowed` rows lie."""
    low, width = np.zeros(forests), 1.0
    for _ in range(ROUNDS):
        cuts = low[:, None] + width * np.arange(1, CUTS) / CUTS
        counts = (await tally.total(rows_above(own, [*cuts]), cuts.size)).reshape(cuts.shape)
        low += width / CUTS * (counts > allowed).sum(axis=1)  # L1
        width /= CUTS
    return low + width


async def find_donor_cuts(
    tally: Tally, forests: int, allowed: int, own: Scored | None, *, least: int, per_donor: int, sites: int
) -> F64:
    """Where donors are named: per forest, the lowest opened cut above which at most `allowed` rows lie; 1 if none."""
    low, high = np.zeros(forests), np.ones(forests)
    for _ in range(DONOR_ROUNDS):
        edges = low[:, None] + (high - low)[:, None] * np.arange(CUTS + 1) / CUTS

        def stretches(edges: F64 = edges) -> I64:
            assert own is not None
            return np.minimum(rows_between(own, edges, per_donor), least)

        enough = await tally.test(stretches, forests * len(FIRST), least, sites * least, PROOFS)  # L1
        cuts = [e[ends_of(there)] for e, there in zip(edges, enough.reshape(forests, -1), strict=True)]
        if not (asked := sum(map(len, cuts))):
            break
        counts = await tally.total(rows_above(own, cuts), asked)  # L2
        ends = np.cumsum([len(c) for c in cuts])[:-1]
        for k, (at, above) in enumerate(zip(cuts, np.split(counts, ends), strict=True)):
            low[k] = max([low[k], *at[above > allowed]])
            high[k] = min([high[k], *at[above <= allowed]])
    return high


def rows_above(own: Scored | None, cuts: list[F64]) -> Callable[[], I64]:
    """How many own rows score at least each cut of every forest."""

    def count() -> I64:
        assert own is not None
        ordered = np.sort(own.scores, axis=1)
        found = [len(s) - np.searchsorted(s, c, side="left") for s, c in zip(ordered, cuts, strict=True)]
        return np.concatenate(found).astype(np.int64)

    return count


def rows_between(own: Scored, edges: F64, per_donor: int) -> I64:
    """How many own rows lie in each stretch, no donor's counting for more than `per_donor`."""
    assert own.donor is not None
    donors, found = int(own.donor.max(initial=0)) + 1, []
    for scores, ends in zip(own.scores, edges, strict=True):
        part = np.searchsorted(ends, scores, side="right") - 1
        there = (part >= 0) & (part < CUTS)
        rows = np.bincount(own.donor[there] * CUTS + part[there], minlength=donors * CUTS).reshape(donors, CUTS)
        below = np.concatenate([np.zeros((donors, 1), np.int64), np.cumsum(rows, axis=1)], axis=1)
        found.append(np.minimum(below[:, LAST] - below[:, FIRST], per_donor).sum(axis=0))
    return np.concatenate(found).astype(np.int64)


def ends_of(enough: Bits) -> list[int]:
    """Lower ends of the stretches of L2 from below, but for the lowest, which goes on to the interval's own end."""
    holds = dict(zip(zip(FIRST.tolist(), LAST.tolist(), strict=True), enough.tolist(), strict=True))
    top, found = CUTS, []
    for a in range(CUTS - 1, -1, -1):
        if holds[a, top]:
            found.append(a)
            top = a
    return found[-2::-1]
