"""Node ranges: where the rows of each node begin and end along its axis, to a cell of a public grid.

    L1   u       per node and edge e of the grid: do enough of its own rows in the node lie below e; do enough lie above
         u, S    how many sites say so                                             (checked_sum)
         u       its own answers are among them, and the numbers rise and fall as those of ranges do; otherwise abort

"Enough" are the site's own thresholds: at least `min_cells` rows of at least `min_donors` donors where donors are
named. A site whose two answers would cross, because it has too few rows for both ends, answers no for the whole node.
The range of a node begins at the lowest edge that some site's lower rows reach, and ends likewise.

Reveals
-------
all : per node and edge, the number of sites with enough rows below it, and above it; a coin.
one malicious site : the same. Its own answers can widen a range. Where it adds -1, to narrow one, a site whose answer
    is missing aborts, which tells that this site was one of those with yes. Every yes of an honest site is about at
    least `min_cells` of its rows; no is about any smaller number, zero included.

Assumes
-------
What the checked sum assumes.

Cost
----
One checked sum of 2 (cells - 1) numbers per node, each up to the number of sites, packed.

References
----------
Lines numbered here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from cloister.arrays import F64, I64
from cloister.disclosure import Contribution, Rows
from cloister.errors import ProtocolAbort
from cloister.mpc.sums.pooled_queries import Totals

NAME = "node_ranges"
KNEE = 0.25  # the grid is linear around 0 and exponential beyond this many scales


@dataclass(frozen=True)
class Grid:
    """Cells along an axis: even steps of asinh, so fine around 0 and wide enough for any row of N."""

    cells: int
    bound: float

    @property
    def step(self) -> float:
        return float(2 * np.arcsinh(self.bound / KNEE) / self.cells)

    def cell(self, along: F64) -> I64:
        at = np.floor(np.arcsinh(along / KNEE) / self.step).astype(np.int64) + self.cells // 2
        return np.clip(at, 0, self.cells - 1)

    def edge(self, cell: I64) -> F64:
        edge: F64 = KNEE * np.sinh((cell - self.cells // 2) * self.step)
        return edge


def reached(grid: Grid, rows: Rows, which: I64, nodes: int, along: F64) -> Contribution:
    """L1: one site's answers, (nodes, 2, cells - 1); `which` is the node of each row, -1 for none."""
    low, high = rows.spans(which, nodes, grid.cell(along))
    there = low <= high
    edges = np.arange(1, grid.cells)
    below = (low[:, None] < edges) & there[:, None]
    above = (high[:, None] >= edges) & there[:, None]
    return rows.grouped(which, nodes, np.stack([below, above], axis=1).astype(np.int64))


def check_answers(counts: I64, sites: int, said: Sequence[I64]) -> None:
    """L1: counts that sites can have, with mine among them: a site that adds -1 takes another site's answer away."""
    steps = np.diff(counts, axis=2)
    if np.any(counts > sites) or np.any(steps[:, 0] < 0) or np.any(steps[:, 1] > 0):
        raise ProtocolAbort(NAME, "L1", "absurd", "numbers of sites that no ranges have: a site's input is wrong")
    if any(np.any(counts < own) for own in said):
        raise ProtocolAbort(NAME, "L1", "absurd", "a site's input takes the answer of another site away")


async def find_ranges(
    totals: Totals, grid: Grid, nodes: int, sites: int, parts: Sequence[Callable[[], Contribution]]
) -> tuple[I64, I64, bytes]:
    """First and last cell of each node, first > last where no site has a range; and the coin of the sum."""
    edges = grid.cells - 1
    what = f"whether enough rows lie below and above {edges} edges in each of {nodes} nodes"
    said: list[I64] = []

    def kept(part: Callable[[], Contribution]) -> Callable[[], Contribution]:
        def make() -> Contribution:
            made = part()
            said.append(np.asarray(made.values).reshape(nodes, 2, edges))
            return made

        return make

    counts, coin = await totals.total([kept(p) for p in parts], nodes * 2 * edges, sites, line="L5", what=what)
    check_answers(counts := counts.reshape(nodes, 2, edges), sites, said)
    some = counts > 0
    return (~some[:, 0]).sum(axis=1), some[:, 1].sum(axis=1), coin
