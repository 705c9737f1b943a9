"""How far batches mix and labels stay apart in an embedding: LISI and silhouette widths, as scIB scales them.

`lisi` is the inverse Simpson index of codes among a cell's neighbours, weighted with a kernel of fixed perplexity:
1 where all have one code, k where k codes are equally frequent. `ilisi` is that of batches and `clisi` that of labels,
both scaled to 0 … 1, where 1 is good. `label_asw` is the mean silhouette width of labels, scaled to 0 … 1.
`batch_asw` is 1 - |silhouette width| of batches within each label, averaged over labels.

References
----------
[KMF+19] Korsunsky et al., Nature Methods 2019 (LISI). [LBC+22] Luecken et al., Nature Methods 2022 (scIB).
"""

from __future__ import annotations

import numpy as np

from cloister.arrays import F64, I64

PERPLEXITY = 30.0
FEWEST = 10  # cells, and more than one batch: labels with fewer say nothing in `batch_asw`
ROWS = 1 << 24  # distances that are computed at a time


def lisi(x: F64, codes: I64, perplexity: float = PERPLEXITY) -> F64:
    """Inverse Simpson index of `codes` among the neighbours of each cell, (n,)."""
    k = min(int(3 * perplexity), len(x) - 1)
    if k < 1:
        return np.ones(len(x))
    found = np.empty(len(x))
    step = max(1, ROWS // len(x))
    for start in range(0, len(x), step):
        at = np.arange(start, min(start + step, len(x)))
        away = _distances(x[at], x)
        away[np.arange(len(at)), at] = np.inf
        near = np.argpartition(away, k - 1, axis=1)[:, :k]
        weights = _kernel(np.take_along_axis(away, near, axis=1), min(perplexity, k))
        shares = np.zeros((len(at), int(codes.max()) + 1))
        np.add.at(shares, (np.arange(len(at))[:, None], codes[near]), weights)
        found[at] = 1 / np.square(shares).sum(axis=1)
    return found


def ilisi(x: F64, batch: I64) -> float:
    """Mixing of batches: 0 if every cell has only its own around it, 1 if all are equally frequent."""
    kinds = len(np.unique(batch))
    return (float(np.median(lisi(x, batch))) - 1) / (kinds - 1) if kinds > 1 else 1.0


def clisi(x: F64, label: I64) -> float:
    """Purity of labels: 1 if every cell has only cells of one label around it."""
    kinds = len(np.unique(label))
    return (kinds - float(np.median(lisi(x, label)))) / (kinds - 1) if kinds > 1 else 1.0


def silhouettes(x: F64, codes: I64) -> F64:
    """(b - a) / max(a, b), with a the mean distance to a cell's own code and b to the nearest other, (n,)."""
    kinds, at = np.unique(codes, return_inverse=True)
    sizes = np.bincount(at).astype(np.float64)
    if len(kinds) < 2:
        return np.zeros(len(x))
    one_hot = np.eye(len(kinds))[at]
    found = np.zeros(len(x))
    step = max(1, ROWS // len(x))
    for start in range(0, len(x), step):
        rows = np.arange(start, min(start + step, len(x)))
        sums = _distances(x[rows], x) @ one_hot
        own = at[rows]
        each = np.arange(len(rows))
        a = sums[each, own] / np.maximum(sizes[own] - 1, 1)
        means = sums / sizes
        means[each, own] = np.inf
        b = means.min(axis=1)
        found[rows] = np.where(sizes[own] > 1, (b - a) / np.maximum(np.maximum(a, b), 1e-300), 0.0)
    return found


def label_asw(x: F64, label: I64) -> float:
    return (float(silhouettes(x, label).mean()) + 1) / 2


def batch_asw(x: F64, batch: I64, label: I64) -> float:
    """1 if batches lie alike within every label."""
    scores = []
    for k in np.unique(label):
        inside = label == k
        if inside.sum() >= FEWEST and len(np.unique(batch[inside])) > 1:
            scores.append(float(np.mean(1 - np.abs(silhouettes(x[inside], batch[inside])))))
    return float(np.mean(scores)) if scores else 1.0


def _distances(x: F64, y: F64) -> F64:
    squares = np.square(x).sum(axis=1)[:, None] + np.square(y).sum(axis=1) - 2 * x @ y.T
    return np.asarray(np.sqrt(np.maximum(squares, 0.0)))


def _kernel(away: F64, perplexity: float, steps: int = 50) -> F64:
    """Weights exp(-β distance) that add up to 1 and have the entropy log(perplexity), each row its own β."""
    away = away - away.min(axis=1, keepdims=True)
    low, high = np.zeros(len(away)), np.full(len(away), np.inf)
    beta = np.ones(len(away))
    for _ in range(steps):
        weights = np.exp(-away * beta[:, None])
        total = weights.sum(axis=1)
        entropy = np.log(total) + beta * (away * weights).sum(axis=1) / total
        wide = entropy > np.log(perplexity)
        low, high = np.where(wide, beta, low), np.where(wide, high, beta)
        beta = np.where(np.isinf(high), beta * 2, (low + high) / 2)
    weights = np.exp(-away * beta[:, None])
    return np.asarray(weights / weights.sum(axis=1, keepdims=True))
