"""Node ranges: where the rows of each node begin and end along its axis, to a cell of a public grid.

    L1   u, S   of every g-th edge of the grid: does any row lie below it, does any lie above    (count_tests, k = 1)
    L2   u, S   of the edges in the g cells where the rows begin, and in those where they end: the same again

Two questions of about √cells edges each in place of one of all edges; what both open is the first and the last cell
that holds a row, and no more than that follows from every answer.

Reveals
-------
all : the first and the last cell of every node that is asked about.
lying coordinator : whether any row lies beyond the edges of g cells that it chose, instead of those that hold the ends.

Assumes
-------
What count tests assume. If a site drops out between L1 and L2, a range may be wider than what is left.

Cost
----
Two count tests of 2(⌈cells/g⌉ - 1) and 2(g - 1) per node, g = ⌈√cells⌉.

References
----------
Lines numbered here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from cloister.arrays import F64, I64
from cloister.protocols.sums.tally import Tally

KNEE = 0.25  # the grid is linear around 0 and exponential beyond this many scales


@dataclass(frozen=True)
class Grid:
    """Cells along an axis: even steps of asinh, so fine around 0 and wide enough for any row of N."""

    cells: int
    bound: float

    @property
    def step(self) -> float:
        return float(2 * np.arcsinh(self.bound / KNEE) / self.cells)

    @property
    def stride(self) -> int:
        """g: cells between two edges of L1."""
        return int(np.ceil(np.sqrt(self.cells)))

    @property
    def strides(self) -> int:
        return -(-self.cells // self.stride)

    def cell(self, along: F64) -> I64:
        at = np.floor(np.arcsinh(along / KNEE) / self.step).astype(np.int64) + self.cells // 2
        return np.clip(at, 0, self.cells - 1)

    def edge(self, cell: I64) -> F64:
        edge: F64 = KNEE * np.sinh((cell - self.cells // 2) * self.step)
        return edge

    def ends(self, which: I64, along: F64, nodes: int) -> tuple[I64, I64]:
        """First and last cell of one site's rows in each node; beyond the grid where it has none."""
        first, last = np.full(nodes, self.cells), np.full(nodes, -1)
        at = self.cell(along)
        np.minimum.at(first, which, at)
        np.maximum.at(last, which, at)
        return first, last


async def find_ranges(
    tally: Tally, grid: Grid, nodes: int, sites: int, ends: Callable[[], tuple[I64, I64]]
) -> tuple[I64, I64]:
    """First and last cell of the pooled rows of each node; `ends` are those of a site's own rows."""
    own: list[tuple[I64, I64]] = []

    async def beyond(below: I64, above: I64) -> tuple[I64, I64]:
        """Of how many edges `below` no row lies below, and of how many `above` one does; both (nodes, edges)."""
        if not (edges := below.shape[1]):
            return np.zeros(nodes, np.int64), np.zeros(nodes, np.int64)

        def reached() -> I64:
            own[:] = own or [ends()]
            first, last = (x[:, None] for x in own[0])
            return np.concatenate([first < below, last >= above], axis=1).astype(np.int64).ravel()

        bits = (await tally.test(reached, 2 * below.size, 1, sites)).reshape(nodes, 2, edges)
        return edges - bits[:, 0].sum(axis=1), bits[:, 1].sum(axis=1)

    coarse = np.tile(np.arange(1, grid.strides) * grid.stride, (nodes, 1))
    first, last = (grid.stride * x for x in await beyond(coarse, coarse))  # L1
    fine = np.arange(1, grid.stride)
    more = await beyond(first[:, None] + fine, last[:, None] + fine)  # L2
    return np.minimum(first + more[0], grid.cells - 1), last + more[1]
