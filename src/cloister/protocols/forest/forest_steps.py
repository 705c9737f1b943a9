"""What a counted forest opens, and how forests are put together from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from cloister.arrays import F64, I64, Bits
from cloister.models import isolation_forest as iforest
from cloister.models.isolation_forest import Axes, Forest

if TYPE_CHECKING:
    from cloister.protocols.forest.counted_forest import Params


@dataclass(frozen=True)
class Outline:
    """The opened forest without its geometry: what the coordinator learns."""

    ranges: list[tuple[I64, I64, I64]]  # per step: nodes, first cell, last cell
    small: I64  # leaves of fewer than t rows
    large: I64  # other leaves
    counts: I64  # rows in these; -1 where not opened
    depth: int


def finish(params: Params, outline: Outline, splits: list[tuple[I64, Axes, F64]], rows: int) -> tuple[Forest, ...]:
    """Counted forest L8: the forests of all repeats, from the opened counts."""
    n = np.arange(1, params.least)
    below = float((n * iforest.average_path(n)).sum() / max(1, n.sum()))  # of a row in a leaf of n < t, all n alike
    guess = np.where(outline.counts >= 0, outline.counts, 2 * params.least)
    per_tree = iforest.places(outline.depth)
    made = []
    for r in range(params.repeats):
        first = r * params.trees * per_tree
        last = first + params.trees * per_tree

        def mine(nodes: I64, first: int = first, last: int = last) -> Bits:
            return (nodes >= first) & (nodes < last)

        own = [(s[0][k] - first, s[1].take(k), s[2][k]) for s in splits if (k := mine(s[0])).any()]
        leaves = [
            (outline.small[mine(outline.small)] - first, np.full(int(mine(outline.small).sum()), below)),
            (outline.large[mine(outline.large)] - first, iforest.average_path(guess[mine(outline.large)])),
        ]
        normal = float(iforest.average_path(params.size(rows)))
        made.append(iforest.build(params.trees, outline.depth, own, leaves, normal))
    return tuple(made)
