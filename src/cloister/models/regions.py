"""Regions that hold outliers: the flagged rows of a forest, said as a union of a few intersections of half-spaces.

For a flagged row, the splits on its paths through the forest are half-spaces that hold it; together they are the cell
of all rows with exactly its score, so some of them suffice to leave every unflagged row outside. They are chosen
greedily, each time the one that excludes most of the rows still inside; one region often holds several flagged rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cloister.arrays import F64, I64, U8, Bits
from cloister.models.isolation_forest import Forest

WORK = 2 * 10**7  # numbers of one table of projections


@dataclass(frozen=True)
class Regions:
    """Region k is the intersection of the half-spaces whose `region` is k."""

    normals: F64  # (half-spaces, D)
    cut: F64
    right: U8  # 1: x·normal ≥ cut, 0: below
    region: I64

    def inside(self, X: F64) -> Bits:
        """Whether each row lies in some region."""
        inside = np.zeros(len(X), bool)
        step = max(1, WORK // max(1, len(self.cut)))
        for start in range(0, len(X), step):
            part = slice(start, start + step)
            ok = (X[part] @ self.normals.T >= self.cut) == self.right.astype(bool)
            for k in np.unique(self.region):
                inside[part] |= ok[:, self.region == k].all(axis=1)
        return inside


def half_spaces(forest: Forest, x: F64, trees: I64) -> tuple[F64, F64, Bits]:
    """The splits on the paths of x: normals, cuts, and whether x lies at or above the cut."""
    normals, cuts, right = [], [], []
    for k in trees.tolist():
        place = 0
        while place < forest.threshold.shape[1] and np.isfinite(cut := forest.threshold[k, place]):
            source = int(forest.source[k, place])
            normal = forest.normals[k][source] if forest.normals else np.eye(1, len(x), source)[0]
            above = bool(normal @ x >= cut)
            normals.append(normal)
            cuts.append(cut)
            right.append(above)
            place = 2 * place + 1 + above
    return np.array(normals).reshape(-1, len(x)), np.array(cuts), np.array(right, bool)


def describe(forest: Forest, X: F64, flagged: Bits, *, rng: np.random.Generator) -> Regions:
    """Regions that hold every flagged row and no other row of X. Rows of equal score must be flagged alike."""
    rows, todo = X[~flagged], X[flagged]
    parts: list[tuple[F64, F64, Bits]] = []
    while len(todo):
        parts.append(_region(forest, todo[0], rows, rng))
        normals, cut, right = parts[-1]
        todo = todo[1:][~((todo[1:] @ normals.T >= cut) == right).all(axis=1)]
    if not parts:
        return Regions(np.zeros((0, X.shape[1])), np.zeros(0), np.zeros(0, np.uint8), np.zeros(0, np.int64))
    return Regions(
        np.concatenate([p[0] for p in parts]),
        np.concatenate([p[1] for p in parts]),
        np.concatenate([p[2] for p in parts]).astype(np.uint8),
        np.repeat(np.arange(len(parts)), [len(p[1]) for p in parts]),
    )


def _region(forest: Forest, x: F64, rows: F64, rng: np.random.Generator) -> tuple[F64, F64, Bits]:
    """A few half-spaces around x that leave all `rows` outside."""
    chosen: list[tuple[F64, float, bool]] = []
    some = max(1, min(forest.trees, WORK // (max(1, len(rows)) * forest.depth)))
    order = rng.permutation(forest.trees)
    for start in range(0, forest.trees, some):
        normals, cuts, right = half_spaces(forest, x, order[start : start + some])
        while len(rows) and len(cuts):
            outside = (rows @ normals.T >= cuts) != right
            best = int(outside.sum(axis=0).argmax())
            if not outside[:, best].any():
                break
            chosen.append((normals[best], float(cuts[best]), bool(right[best])))
            rows = rows[~outside[:, best]]
        if not len(rows):
            break
    if not chosen:  # every row is flagged, or x cannot be told from the rest: the whole space would be a region
        chosen = [(np.zeros(len(x)), 0.0, True)]
    return (
        np.array([c[0] for c in chosen]),
        np.array([c[1] for c in chosen]),
        np.array([c[2] for c in chosen], bool),
    )
