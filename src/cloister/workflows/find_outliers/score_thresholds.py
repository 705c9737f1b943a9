"""Share cuts: per forest, the lowest score above which no more than a given fraction of all sites' rows lies.

    L1   u       microaggregation: its rows in the order of their scores, in runs of at least `min_cells` rows of at
                 least `min_donors` donors; a row counts with the mean score of its run
    three times:
    L2   u, S    for 15 cuts in an interval, at first (0, 1): how many rows count above each         (checked_sum)
                 the interval becomes the part in which the fraction is passed

Runs are fixed before the first cut is known. Whatever cuts follow, counts, their differences and their complements are
those of whole runs. Rows are flagged by their own scores, so that the flagged fraction differs from the requested one
by at most half a run per site.

Reveals
-------
all : the pooled counts. Of each site: numbers of rows in whole runs of at least `min_cells` rows.

Assumes
-------
What the checked sum assumes.

Cost
----
Three checked sums of 15 counts per forest.

References
----------
[DM02] Domingo-Ferrer, Mateo-Sanz, TKDE 2002: microaggregation. Lines numbered here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cloister.arrays import F64, I64
from cloister.disclosure import Contribution, Rows, join
from cloister.mpc.sums.pooled_queries import Part, Totals

PROTOCOL = "share_cuts"

CUTS, ROUNDS = 16, 3
MOST = 1 << 40  # rows of all sites together


@dataclass(frozen=True)
class Scored:
    """A site's own rows with their scores (forests, rows), as runs: codes per forest, and the mean score of each."""

    rows: Rows
    codes: list[I64]
    mean: list[F64]

    @staticmethod
    def of(rows: Rows, scores: F64) -> Scored:
        codes = [rows.blocks(s) for s in scores]
        mean = []
        for s, c in zip(scores, codes, strict=True):
            k = int(c.max(initial=-1)) + 1
            mean.append(np.bincount(c[c >= 0], s[c >= 0], minlength=k) / np.bincount(c[c >= 0], minlength=k))
        return Scored(rows, codes, mean)

    def above(self, cuts: F64) -> Contribution:
        """L2: rows in runs whose mean score is at least each cut, (forests, cuts)."""

        def one(code: I64, mean: F64, at: F64) -> Contribution:
            part = self.rows.grouped(code, len(mean))
            return part.map(lambda n: ((mean[:, None] >= at) * n[:, None]).sum(axis=0).astype(np.int64))

        return join([one(*each) for each in zip(self.codes, self.mean, cuts, strict=True)])


async def find_cuts(totals: Totals, forests: int, allowed: int, own: Sequence[Scored]) -> F64:
    """Per forest, the lowest cut on a grid of 16³ steps above which at most `allowed` rows count."""
    low, width = np.zeros(forests), 1.0

    for _ in range(ROUNDS):
        cuts = low[:, None] + width * np.arange(1, CUTS) / CUTS

        def part(scored: Scored, cuts: F64 = cuts) -> Part:
            return lambda: scored.above(cuts)

        what = f"rows that score above {cuts.size} cuts"
        counts, _ = await totals.total([part(s) for s in own], cuts.size, MOST, line="L7", what=what)
        low += width / CUTS * (counts.reshape(cuts.shape) > allowed).sum(axis=1)  # L2
        width /= CUTS
    return low + width
