"""Isolation forests, standard and extended: grown level by level for all trees at once, scored in blocks of rows.

    c(n)   = 2 H(n - 1) - 2 (n - 1) / n             mean path of an unsuccessful search among n; c(0) = c(1) = 0
    h(x)   = depth of x's leaf + c(rows in it)      per tree
    s(x)   = 2^(- mean h(x) / c(ψ))                 in (0, 1), higher = more isolated

A tree is a heap of 2^(depth + 1) - 1 places: the children of place p are 2p + 1 and 2p + 2. `Forest` keeps the inner
places only; a leaf above the last level is written as a split at +∞, so every row takes the same number of steps and
ends at its leaf's leftmost place below. Rows of a growing forest are a `Sample`: each knows the node that holds it.

References
----------
[LTZ08] Liu, Ting, Zhou, ICDM 2008: c(n), the depth limit ⌈log2 ψ⌉, s(x).
[HKB19] Hariri, Carrasco Kind, Brunner, TKDE 2019: splits along random normals, extension level.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from cloister.arrays import F64, I64, Array
from cloister.errors import ParameterError

Kind = Literal["standard", "extended"]

TRIES = 12  # axes that are tried at a node before it is called constant
BLOCK = 1 << 15  # numbers of one block of projections, so that it stays in cache


def average_path(n: Any) -> F64:
    """c(n): what a leaf that still holds n rows would add to the path, were it grown to the end."""
    n = np.asarray(n, dtype=np.float64)
    whole = np.maximum(np.ceil(n), 2).astype(np.int64)
    harmonic = np.concatenate([[0.0], np.cumsum(1.0 / np.arange(1, int(whole.max(initial=2)) + 1))])
    length = 2.0 * harmonic[whole - 1] - 2.0 * (whole - 1) / whole
    return np.where(n > 1, length, 0.0)


def depth_limit(sample: int) -> int:
    return max(1, math.ceil(math.log2(max(2, sample))))


def places(depth: int) -> int:
    """Places of one tree, and one to spare: node id = tree · places + place."""
    return 2 << depth


# ---- axes ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Axes:
    """One direction per node: a column, or a unit normal."""

    columns: I64 | None  # (nodes,)
    normals: F64 | None  # (nodes, D)

    def take(self, keep: Array) -> Axes:
        return Axes(
            None if self.columns is None else self.columns[keep],
            None if self.normals is None else self.normals[keep],
        )


def draw_axes(rng: np.random.Generator, nodes: int, usable: I64, width: int, kind: Kind, extension: int | None) -> Axes:
    """Random columns, or random unit normals with `extension + 1` entries that are not zero (all, if None)."""
    if kind == "standard":
        return Axes(usable[rng.integers(len(usable), size=nodes)], None)
    normals = np.zeros((nodes, width))
    normals[:, usable] = rng.normal(size=(nodes, len(usable)))
    if extension is not None and extension + 1 < len(usable):
        order = rng.random((nodes, len(usable))).argsort(axis=1)
        normals[np.arange(nodes)[:, None], usable[order[:, extension + 1 :]]] = 0.0
    return Axes(None, normals / np.linalg.norm(normals, axis=1, keepdims=True))


# ---- rows of a forest that grows -------------------------------------------------------------------------------------


@dataclass
class Sample:
    """The rows that grow a forest, and the node that holds each of them now."""

    X: F64  # (n, D)
    at: I64  # (n,) node ids; -1 for rows that were dropped
    ids: int  # node ids are below
    donor: I64 | None = None  # (n,) whose rows they are, where that counts

    def which(self, nodes: I64) -> I64:
        """Position in `nodes` of the node that holds each row; -1 if none of them does."""
        table = np.full(self.ids + 1, -1, np.int64)  # the last entry is that of dropped rows
        table[nodes] = np.arange(len(nodes))
        return table[self.at]

    def values(self, nodes: I64, axes: Axes) -> tuple[I64, I64, F64]:
        """Rows that stand in one of `nodes`, which of them, and where along its axis."""
        which = self.which(nodes)
        rows = np.flatnonzero(which >= 0)
        which = which[rows]
        return rows, which, _along(self.X, rows, axes, which)

    def descend(self, nodes: I64, axes: Axes, threshold: F64, per_tree: int) -> None:
        """Move the rows of `nodes` to the child on their side: below the threshold to the left."""
        rows, which, along = self.values(nodes, axes)
        tree, place = np.divmod(self.at[rows], per_tree)
        self.at[rows] = tree * per_tree + 2 * place + 1 + (along >= threshold[which])

    def count(self, nodes: I64) -> I64:
        return np.bincount(self.at[self.at >= 0], minlength=self.ids)[nodes].astype(np.int64)


def draw_sample(X: F64, picks: list[Array], depth: int, donor: I64 | None = None) -> Sample:
    """Every tree's rows, one after the other, at the roots; `picks[k]` are the rows of tree k."""
    tree = np.repeat(np.arange(len(picks)), [len(p) for p in picks])
    rows = np.concatenate(picks).astype(np.int64)
    at = (tree * places(depth)).astype(np.int64)
    return Sample(X[rows], at, len(picks) * places(depth), None if donor is None else donor[rows])


# ---- the forest ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Forest:
    """Splits of all trees, and the path length of every place of the last level."""

    source: I64  # (trees, 2^depth - 1): a column, or the row of this tree's normal
    threshold: F64  # (trees, 2^depth - 1): +inf where nothing is split
    path: F64  # (trees, 2^depth)
    normal: float  # c(ψ)
    normals: tuple[F64, ...] = field(default=())  # per tree (splits, D); empty for standard splits

    @property
    def trees(self) -> int:
        return len(self.path)

    @property
    def depth(self) -> int:
        return int(self.path.shape[1]).bit_length() - 1

    def paths(self, X: F64) -> F64:
        """Mean path length of each row."""
        n, width = X.shape
        total = np.zeros(n)
        widest = max([width, *(len(v) for v in self.normals)])
        step = max(256, min(8192, 8 * BLOCK // max(1, widest)))
        for start in range(0, n, step):
            self._add_paths(X[start : start + step], total[start : start + step])
        return total / self.trees

    def _add_paths(self, X: F64, total: F64) -> None:
        size = len(X)
        columns = np.ascontiguousarray(X.T)
        rows = np.arange(size)
        place, at, along, limit = np.empty(size, np.intp), np.empty(size, np.intp), np.empty(size), np.empty(size)
        offsets = self.source.astype(np.intp) * size
        right = np.empty(size, bool)
        for k in range(self.trees):
            table = (self.normals[k] @ columns if self.normals else columns).reshape(-1)
            if table.size == 0:  # a tree without a split
                total += self.path[k, 0]
                continue
            place[:] = 0
            for level in range(self.depth):
                part = slice((1 << level) - 1, (2 << level) - 1)
                offsets[k, part].take(place, out=at, mode="clip")
                at += rows
                table.take(at, out=along, mode="clip")
                self.threshold[k, part].take(place, out=limit, mode="clip")
                np.greater_equal(along, limit, out=right)
                place += place
                place += right
            total += self.path[k].take(place, mode="clip")

    def score(self, X: F64) -> F64:
        return score_of(self.paths(X), self.normal)


def score_of(paths: F64, normal: float) -> F64:
    return np.power(2.0, -paths / normal)


@dataclass(frozen=True)
class Step:
    """Nodes whose ranges were opened together, each along its own axis."""

    nodes: I64
    axes: Axes
    low: F64  # (nodes,), ends of the range
    high: F64
    cut: F64  # NaN where the range is too narrow to be split

    def take(self, keep: Array) -> Step:
        return Step(self.nodes[keep], self.axes.take(keep), self.low[keep], self.high[keep], self.cut[keep])


@dataclass(frozen=True)
class RangeForest:
    """A forest of ranges that leave out outlying rows; a row is scored by the path that it would have as one more row.

    A cut is uniform over a node's range. With one more row at v above the range [low, high], the range would end at v,
    and the cut would isolate the row with probability (v - high) / (v - low); likewise below. The path of a row is the
    expectation over these events. An isolated row adds `alone` to its depth, a leaf adds `leaf`.
    """

    trees: int
    depth: int
    steps: tuple[Step, ...]
    normal: float  # c(ψ)
    leaf: float
    alone: float = 0.0

    def paths(self, X: F64) -> F64:
        """Expected path length of each row, the mean over the trees."""
        paths = np.empty(len(X))
        block = max(1, (1 << 18) // self.trees)
        for start in range(0, len(X), block):
            paths[start : start + block] = self._block(X[start : start + block])
        return paths

    def _block(self, X: F64) -> F64:
        n, per_tree = len(X), places(self.depth)
        row = np.repeat(np.arange(n), self.trees)
        at = np.tile(np.arange(self.trees, dtype=np.int64) * per_tree, n)
        left, total = np.ones(len(at)), np.zeros(len(at))  # probability that it is not isolated yet; path so far
        level, leaf = np.zeros(len(at), np.int8), np.int8(-1)  # of the node that holds it; -1 at a leaf
        table = np.full(self.trees * per_tree, -1, np.int64)
        for step in self.steps:
            depth = int(step.nodes[0] % per_tree + 1).bit_length()  # of the children
            here = np.flatnonzero(level == depth - 1)
            table[step.nodes] = np.arange(len(step.nodes))
            which = table[at[here]]
            table[step.nodes] = -1
            level[here[which < 0]] = leaf
            here, which = here[which >= 0], which[which >= 0]
            v = _along(X, row[here], step.axes, which)
            low, high, cut = step.low[which], step.high[which], step.cut[which]
            beyond = np.maximum(np.maximum(v - high, low - v), 0.0)
            alone = beyond / (beyond + (high - low))
            total[here] += left[here] * alone * (depth + self.alone)
            left[here] *= 1 - alone
            split = ~np.isnan(cut)
            moved = here[split]
            tree, place = np.divmod(at[moved], per_tree)
            at[moved] = tree * per_tree + 2 * place + 1 + (v >= cut)[split]
            level[moved] = depth
        total += left * (np.frexp(at % per_tree + 1.0)[1] - 1 + self.leaf)
        mean: F64 = total.reshape(n, self.trees).mean(axis=1)
        return mean

    def score(self, X: F64) -> F64:
        return score_of(self.paths(X), self.normal)


def _along(X: F64, rows: I64, axes: Axes, which: I64) -> F64:
    """Values of rows along the axes that `which` names."""
    if axes.columns is not None:
        values: F64 = X[rows, axes.columns[which]]
        return values
    assert axes.normals is not None
    along = np.empty(len(rows))
    for start in range(0, len(rows), 4096):  # bounds the gathered normals
        part = slice(start, start + 4096)
        along[part] = np.einsum("ij,ij->i", X[rows[part]], axes.normals[which[part]])
    return along


def build(
    trees: int,
    depth: int,
    splits: list[tuple[I64, Axes, F64]],
    leaves: list[tuple[I64, F64]],
    normal: float,
) -> Forest:
    """Put a forest together from the splits of each level (ids, axes, thresholds) and its leaves (ids, what they add).

    A leaf's path is its depth plus what it adds; places that hold no leaf keep their parents' depth.
    """
    per_tree, inner = places(depth), (1 << depth) - 1
    source = np.zeros((trees, inner), np.int64)
    threshold = np.full((trees, inner), np.inf)
    path = np.zeros((trees, per_tree))
    normals: list[list[F64]] = [[] for _ in range(trees)]
    for nodes, axes, cut in splits:
        tree, place = np.divmod(nodes, per_tree)
        threshold[tree, place] = cut
        if axes.columns is not None:
            source[tree, place] = axes.columns
        else:
            assert axes.normals is not None
            for k, p, v in zip(tree.tolist(), place.tolist(), axes.normals, strict=True):
                source[k, p] = len(normals[k])
                normals[k].append(v)
    for nodes, extra in leaves:
        tree, place = np.divmod(nodes, per_tree)
        path[tree, place] = np.floor(np.log2(place + 1)) + extra
    for level in range(depth):  # a leaf hands its path down to the last level, on the left
        place = np.arange((1 << level) - 1, (2 << level) - 1)
        inherits = ~np.isfinite(threshold[:, place])
        path[:, 2 * place + 1] = np.where(inherits, path[:, place], path[:, 2 * place + 1])
    last = path[:, inner : inner + (1 << depth)]
    extended = any(axes.normals is not None for _, axes, _ in splits)
    width = next((axes.normals.shape[1] for _, axes, _ in splits if axes.normals is not None), 0)
    stacked = tuple(np.array(v).reshape(len(v), width) for v in normals) if extended else ()
    return Forest(source, threshold, np.ascontiguousarray(last), normal, stacked)


def fit(
    X: F64,
    *,
    trees: int = 100,
    sample: int = 256,
    kind: Kind = "standard",
    extension: int | None = None,
    rng: np.random.Generator,
) -> Forest:
    """Grow a forest from rows in one place: the pooled reference, the masked rows of the published mode, one site."""
    if X.ndim != 2 or len(X) < 2:
        raise ParameterError(f"an isolation forest needs at least two rows, found shape {X.shape}")
    size = min(sample, len(X))
    depth = depth_limit(size)
    picks = [rng.permutation(len(X))[:size] if size == len(X) else _choose(rng, len(X), size) for _ in range(trees)]
    rows = draw_sample(X, picks, depth)
    per_tree = places(depth)
    usable = np.flatnonzero(X.min(axis=0) < X.max(axis=0))
    splits: list[tuple[I64, Axes, F64]] = []
    leaves: list[tuple[I64, F64]] = []
    nodes = np.arange(trees, dtype=np.int64) * per_tree
    for _ in range(depth if len(usable) else 0):
        counts = rows.count(nodes)
        leaves.append((nodes[counts < 2], np.zeros(int((counts < 2).sum()))))
        pending = nodes[counts >= 2]
        grown: list[tuple[I64, Axes, F64]] = []
        for _ in range(TRIES):
            if not len(pending):
                break
            axes = draw_axes(rng, len(pending), usable, X.shape[1], kind, extension)
            _, which, along = rows.values(pending, axes)
            low, high = np.full(len(pending), np.inf), np.full(len(pending), -np.inf)
            np.minimum.at(low, which, along)
            np.maximum.at(high, which, along)
            wide = low < high
            cut = low + (high - low) * rng.random(len(pending))
            cut = np.where(cut <= low, np.nextafter(low, np.inf), cut)  # never an empty child
            grown.append((pending[wide], axes.take(wide), cut[wide]))
            pending = pending[~wide]
        leaves.append((pending, average_path(rows.count(pending))))
        split = np.concatenate([g[0] for g in grown]) if grown else nodes[:0]
        for one in grown:
            rows.descend(*one, per_tree)
        splits += grown
        tree, place = np.divmod(split, per_tree)
        nodes = np.sort(np.concatenate([tree * per_tree + 2 * place + 1, tree * per_tree + 2 * place + 2]))
    leaves.append((nodes, average_path(rows.count(nodes))))
    return build(trees, depth, splits, leaves, float(average_path(size)))


def _choose(rng: np.random.Generator, n: int, size: int) -> I64:
    return rng.choice(n, size, replace=False, shuffle=False).astype(np.int64)
