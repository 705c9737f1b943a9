"""Rows reconstructed from an opened forest: what a site can infer about others' rows from the ranges it receives.

Every leaf is a box: an ancestor that split at `cut` along a column, in a node whose rows reached from `low` to `high`,
implies that the rows on the leaf's side lie between `low` and `cut`, or between `cut` and `high`; where the leaf is the
outer child itself, one of its rows stands at the very end. The attack takes leaves that may hold few rows, guesses a
row for each (ends where they are known, middles where not, the mean where nothing is), and lets every other tree
correct the guess: it follows the guess down the tree, and if it arrives in another leaf of few rows, cuts the box by
that leaf's.

Extended splits need another attack: the range of a tree's root along a normal is a pair of planes that touch the hull
of its rows, and where all trees have the same rows, many planes touch the same outlier. `rebuild_hull` finds points
that the planes have in common.

Either succeeds on rows that stand alone (those are the ones worth protecting, and the ones that a lucky guess among
crowded rows would not hit): a row counts as rebuilt if a guess is nearer to it than `within` scales per column, and no
other row is within twice that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cloister.arrays import F64, I64, Bits
from cloister.models import isolation_forest as iforest
from cloister.models.isolation_forest import Step
from cloister.workflows.find_outliers import counted_forest
from cloister.workflows.find_outliers.counted_forest import Outline
from cloister.workflows.find_outliers.node_ranges import Grid


@dataclass(frozen=True)
class View:
    """An opened forest with its ranges, one entry per node id."""

    column: I64  # -1 where nothing is split
    cut: F64
    ranges: dict[int, list[tuple[int, float, float]]]  # node → (column, from, to), one per axis that was tried
    few: Bits  # leaves of few rows
    per_tree: int
    trees: int
    width: int


def view(params: counted_forest.Params, outline: Outline, steps: Sequence[Step], rows: int, width: int) -> View:
    """What the protocol opened, by node; standard splits only. Leaves below a range are taken for those of few rows.

    An attacker who knows all other sites' parts passes the ranges of the honest site alone as those of `outline`.
    """
    per_tree = iforest.places(outline.depth)
    size = params.all_trees * per_tree
    grid = Grid(params.grid_cells, float(np.sqrt(rows)))
    column = np.full(size, -1, np.int64)
    cut = np.zeros(size)
    along = np.full(size, -1, np.int64)  # axis of the step that is read
    ranges: dict[int, list[tuple[int, float, float]]] = {}
    wanted = np.zeros(size, bool)
    by_step = {tuple(s.nodes.tolist()): s for s in steps}
    for nodes, first, last in outline.ranges:
        there = first <= last
        step = next((s for k, s in by_step.items() if set(nodes[there].tolist()) <= set(k)), None)
        if step is None or step.axes.columns is None:
            continue
        del by_step[tuple(step.nodes.tolist())]
        along[step.nodes] = step.axes.columns
        split = ~np.isnan(step.cut)
        column[step.nodes[split]], cut[step.nodes[split]] = step.axes.columns[split], step.cut[split]
        ends = grid.edge(first[there]), grid.edge(last[there] + 1)
        for node, low, high in zip(nodes[there].tolist(), *(e.tolist() for e in ends), strict=True):
            ranges.setdefault(node, []).append((int(along[node]), low, high))
    for node in ranges:
        if column[node] >= 0:
            tree, place = divmod(node, per_tree)
            children = [tree * per_tree + 2 * place + 1 + side for side in (0, 1)]
            wanted[[c for c in children if c not in ranges]] = True
    return View(column, cut, ranges, wanted, per_tree, params.all_trees, width)


def box(v: View, leaf: int) -> tuple[F64, F64, int, float]:
    """Lower and upper ends of a leaf's box, the column of its last split, and the value at its outer end."""
    lower, upper = np.full(v.width, -np.inf), np.full(v.width, np.inf)
    tree, child = divmod(leaf, v.per_tree)
    end_column, end = -1, 0.0
    for j, low, high in v.ranges.get(leaf, []):
        lower[j], upper[j] = max(lower[j], low), min(upper[j], high)
    while child:
        node, right = tree * v.per_tree + (child - 1) // 2, child % 2 == 0
        for j, low, high in v.ranges.get(node, []):
            lower[j], upper[j] = max(lower[j], low), min(upper[j], high)
            if end_column < 0 and j == v.column[node]:
                end_column, end = j, high if right else low
        j, cut = v.column[node], v.cut[node]
        if right:
            lower[j] = max(lower[j], cut)
        else:
            upper[j] = min(upper[j], cut)
        child = (child - 1) // 2
    return lower, upper, end_column, end


def rebuild(v: View, *, most: int = 2000, rng: np.random.Generator) -> F64:
    """A guess per leaf of few rows, at most `most` of them."""
    leaves = np.flatnonzero(v.few)
    leaves = leaves[leaves % v.per_tree > 0]
    if len(leaves) > most:
        leaves = rng.choice(leaves, most, replace=False)
    boxes = [box(v, leaf) for leaf in leaves.tolist()]
    if not boxes:
        return np.zeros((0, v.width))
    lower, upper = np.array([b[0] for b in boxes]), np.array([b[1] for b in boxes])
    known = np.full(lower.shape, np.nan)
    ends = np.array([b[2] for b in boxes]), np.array([b[3] for b in boxes])
    known[np.arange(len(boxes)), ends[0]] = ends[1]
    guess = _middle(lower, upper, known)
    cache: dict[int, tuple[F64, F64, int, float]] = {}
    for tree in rng.permutation(v.trees).tolist():
        at = _follow(v, guess, tree)
        for i in np.flatnonzero(v.few[at]).tolist():
            leaf = int(at[i])
            cache[leaf] = cache.get(leaf) or box(v, leaf)
            low, high, j, end = cache[leaf]
            low, high = np.maximum(low, lower[i]), np.minimum(high, upper[i])
            if (low <= high).all():
                lower[i], upper[i] = low, high
                if lower[i, j] - 1e-9 <= end <= upper[i, j] + 1e-9:
                    known[i, j] = end
        guess = _middle(lower, upper, known)
    return guess


def _middle(lower: F64, upper: F64, known: F64) -> F64:
    """Between the ends; the finite end, or the mean if that is inside, where one side is open."""
    inside = np.clip(0.0, lower, upper)
    closed = np.isfinite(lower) & np.isfinite(upper)
    with np.errstate(invalid="ignore"):
        middle = np.where(closed, (lower + upper) / 2, inside)
    return np.where(np.isfinite(known), np.clip(known, lower, upper), middle)


def _follow(v: View, guess: F64, tree: int) -> I64:
    at = np.full(len(guess), tree * v.per_tree, np.int64)
    while True:
        inner = np.flatnonzero(v.column[at] >= 0)
        if not len(inner):
            return at
        node = at[inner]
        right = guess[inner, v.column[node]] >= v.cut[node]
        at[inner] = tree * v.per_tree + 2 * (node - tree * v.per_tree) + 1 + right


def rebuild_hull(
    params: counted_forest.Params, outline: Outline, steps: Sequence[Step], rows: int, *, rng: np.random.Generator
) -> F64:
    """Points that the ranges of the roots have in common: planes go to the point farthest along, and back."""
    nodes, first, last = outline.ranges[0]
    first, last = first[np.isin(nodes, steps[0].nodes)], last[np.isin(nodes, steps[0].nodes)]
    normals = steps[0].axes.normals
    assert normals is not None
    assert len(normals) == len(first)
    width = normals.shape[1]
    grid = Grid(params.grid_cells, float(np.sqrt(rows * width)))
    low, high = (grid.edge(c) / 2 + grid.edge(c + 1) / 2 for c in (first, last))
    planes, heights = np.concatenate([normals, -normals]), np.concatenate([high, -low])
    guesses = []
    for count in (4, 8, 16, 24) * 5:
        points = (planes * heights[:, None])[rng.choice(len(planes), min(count, len(planes)), replace=False)]
        for _ in range(60):
            owner = (planes @ points.T).argmax(axis=1)
            for j in range(len(points)):
                mine = owner == j
                if mine.any():
                    left = planes[mine].T @ planes[mine] + 0.05 * np.eye(width)
                    points[j] = np.linalg.solve(left, planes[mine].T @ heights[mine] + 0.05 * points[j])
                else:
                    points[j] = planes[i := rng.integers(len(planes))] * heights[i]
        guesses.append(points)
    return np.concatenate(guesses)


def rebuilt(Z: F64, guess: F64, *, within: float = 0.15) -> tuple[float, int]:
    """Share of the rows that stand alone which some guess is near to, and how many rows stand alone.

    Distances are root mean squares over the columns, in scales.
    """
    from scipy.spatial import cKDTree

    root = np.sqrt(Z.shape[1])
    tree = cKDTree(Z)
    apart = tree.query(Z, k=2)[0][:, 1] / root
    alone = np.flatnonzero(apart > 2 * within)
    if not len(alone) or not len(guess):
        return 0.0, len(alone)
    near = cKDTree(guess).query(Z[alone])[0] / root
    return float((near < within).mean()), len(alone)


def lucky(Z: F64, guesses: int, rng: np.random.Generator) -> F64:
    """As many guesses without a forest: every column drawn from its own distribution, independently."""
    return np.stack([rng.choice(Z[:, j], guesses) for j in range(Z.shape[1])], axis=1)
