"""Counted forest before thresholds of each site: size tests over all sites, ranges of single rows, leaf counts opened.

One malicious site answers t to every size test and zero to everything else. So every node passes, ranges are those of
the honest sites' rows down to single ones, and leaf counts are theirs as well.
"""

import numpy as np

from cloister.models import isolation_forest as iforest
from cloister.papers.attacks.opened_forest import View
from cloister.workflows.find_outliers.node_ranges import Grid


def opened(Z, *, trees=100, sample=256, least=8, cells=64, rng):
    """The attacker's view of a forest of the honest rows Z: (view, leaf counts of the honest sites)."""
    depth = iforest.depth_limit(min(sample, len(Z)))
    per_tree, width = iforest.places(depth), Z.shape[1]
    picks = [rng.choice(len(Z), min(sample, len(Z)), replace=False) for _ in range(trees)]
    rows = iforest.draw_sample(Z, picks, depth)
    grid = Grid(cells, float(np.sqrt(len(Z))))
    size = trees * per_tree
    column, cut, ranges = np.full(size, -1, np.int64), np.zeros(size), {}
    nodes, leaves = np.arange(trees, dtype=np.int64) * per_tree, []
    for _ in range(depth):
        axes = iforest.draw_axes(rng, len(nodes), np.arange(width), width, "standard", None)
        _, which, along = rows.values(nodes, axes)
        first, last = np.full(len(nodes), cells), np.full(len(nodes), -1)
        np.minimum.at(first, which, grid.cell(along))  # smallest and largest row, whatever their number
        np.maximum.at(last, which, grid.cell(along))
        low, high = grid.edge(first), grid.edge(last + 1)
        for node, j, a, b in zip(nodes.tolist(), axes.columns.tolist(), low, high, strict=True):
            if a < b:
                ranges.setdefault(node, []).append((j, float(a), float(b)))
        wide = first < last
        leaves.append(nodes[~wide])
        at = low + rng.random(len(nodes)) * (high - low)
        column[nodes[wide]], cut[nodes[wide]] = axes.columns[wide], at[wide]
        rows.descend(nodes[wide], axes.take(wide), at[wide], per_tree)
        tree, place = np.divmod(nodes[wide], per_tree)
        children = np.concatenate([tree * per_tree + 2 * place + 1, tree * per_tree + 2 * place + 2])
        enough = rows.count(children) + least >= least  # the malicious site's t
        nodes = children[enough]
    leaves = np.concatenate([*leaves, nodes])
    counts = rows.count(leaves)
    few = np.zeros(size, bool)
    few[leaves[(counts > 0) & (counts <= 2)]] = True
    return View(column, cut, ranges, few, per_tree, trees, width), counts
