"""Highly variable genes of one batch, as in Seurat v3: variance of counts beside that of genes with the same mean.

    capped, trimmed    counts of which few cells have no large part
    trend        log10 variance against log10 mean, local parabolas over 0.3 of the genes (loess)
    normalised   variance of (x - mean) / expected deviation, values above √n clipped
    ranked       0 for the most variable of `n_top` genes, 1, …; -1 for all others

References
----------
[SBH+19] Stuart et al., Cell 2019 (vst). [CD88] Cleveland and Devlin, JASA 1988 (loess).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse

from cloister.arrays import F64, I64, Bits

SPAN = 0.3  # of the genes
ANCHORS = 300  # means at which a parabola is fitted


def loess(x: F64, y: F64, span: float = SPAN) -> F64:
    """Local parabolas with tricube weights, fitted at some points and interpolated between them."""
    order = np.argsort(x, kind="stable")
    xs, ys = x[order], y[order]
    n, k = len(xs), max(min(len(xs), 4), round(span * len(xs)))
    at = np.unique(np.quantile(xs, np.linspace(0, 1, min(n, ANCHORS))))
    fitted = np.empty(len(at))
    for i, center in enumerate(at):
        first = int(np.searchsorted(xs, center))
        low, high = max(0, first - k), min(n, first + k)
        far = np.abs(xs[low:high] - center)
        some = np.argpartition(far, min(k, len(far)) - 1)[:k]
        reach = max(float(far[some].max()), 1e-12)
        trust = np.sqrt(np.clip(1 - (far[some] / reach) ** 3, 0.0, 1.0) ** 3)
        d = xs[low:high][some] - center
        design = np.stack([np.ones_like(d), d, d * d], axis=1)
        fitted[i] = np.linalg.lstsq(design * trust[:, None], ys[low:high][some] * trust, rcond=None)[0][0]
    return np.interp(x, at, fitted)


def capped(x: Any, donor: I64 | None, min_cells: int, min_donors: int) -> Any:
    """Counts of which no cell has more than 1 / `min_cells` of a gene's sum of squares.

    Larger values count as the largest that is allowed; a gene that fewer than `min_cells` cells express is zero. Where
    donors are named, values above the `min_donors`-th largest of their maxima count as that one first.
    """
    columns = scipy.sparse.csc_matrix(x, dtype=np.float64, copy=True)
    columns.data = np.maximum(columns.data, 0.0)
    columns.eliminate_zeros()
    for g in range(columns.shape[1]):
        part = slice(columns.indptr[g], columns.indptr[g + 1])
        values = columns.data[part]
        if donor is not None:
            tops = np.zeros(int(donor.max(initial=-1)) + 1)
            np.maximum.at(tops, donor[columns.indices[part]], values)
            tops = tops[tops > 0]
            values = np.minimum(
                values, np.partition(tops, -min_donors)[-min_donors] if len(tops) >= min_donors else 0.0
            )
        columns.data[part] = np.minimum(values, largest_allowed(values, min_cells))
    columns.eliminate_zeros()
    return columns


def trimmed(x: Any, min_cells: int) -> Any:
    """Counts of which no cell has more than about 1 / `min_cells` of a gene's squared distances from its median.

    For genes that at least half of the cells express; the median of all others is zero, so `capped` did the same.
    """
    often = np.flatnonzero(np.diff(x.indptr) > x.shape[0] // 2)
    if not len(often):
        return x
    other = np.setdiff1d(np.arange(x.shape[1]), often)
    changed = [within_reach(x[:, [g]].toarray(), min_cells) for g in often]
    columns = scipy.sparse.hstack([x[:, other], *map(scipy.sparse.csc_matrix, changed)], format="csc")
    return columns[:, np.argsort(np.concatenate([other, often]), kind="stable")]


def within_reach(values: F64, min_cells: int) -> F64:
    away = values - np.median(values)
    reach = largest_allowed(np.abs(away).ravel(), min_cells)
    nearer: F64 = values - away + np.clip(away, -reach, reach)
    return nearer


def largest_allowed(values: F64, least: int) -> float:
    """The largest c with c² ≤ Σ min(x, c)² / least; 0 for fewer values than that."""
    if len(values) < least:
        return 0.0
    falling = np.sort(values)[::-1]
    rest = np.append(np.cumsum(np.square(falling)[::-1])[::-1], 0.0)[:least]  # Σ of all but the k largest squares
    bounds = np.sqrt(rest / (least - np.arange(least)))  # c, if the k largest are above it
    fits = np.flatnonzero(falling[:least] <= bounds * (1 + 1e-12))
    k = int(fits[0]) if len(fits) else least - 1
    return float(min(bounds[k], falling[max(k - 1, 0)]))


def normalised_variance(x: Any) -> F64:
    """Of a CSC matrix of counts, cells by genes; 0 where a gene does not vary."""
    n = x.shape[0]
    mean = np.asarray(x.mean(axis=0)).ravel()
    variance = (np.asarray(x.multiply(x).mean(axis=0)).ravel() - np.square(mean)) * n / max(n - 1, 1)
    varies: Bits = variance > 1e-12
    out = np.zeros(len(mean))
    if varies.sum() < 4:
        return out
    expected = np.zeros(len(mean))
    expected[varies] = loess(np.log10(mean[varies]), np.log10(variance[varies]))
    deviation = np.sqrt(10.0**expected)
    limit = deviation * np.sqrt(n) + mean
    clipped = x.copy()
    clipped.data = np.minimum(clipped.data, np.repeat(limit, np.diff(x.indptr)))
    total = np.asarray(clipped.sum(axis=0)).ravel()
    square = np.asarray(clipped.multiply(clipped).sum(axis=0)).ravel()
    scatter = n * np.square(mean) + square - 2 * total * mean
    out[varies] = (scatter / ((n - 1) * np.square(deviation)))[varies]
    return out


def ranked(score: F64, n_top: int) -> I64:
    """Ranks of the best `n_top` genes that vary, from 0; -1 for the others."""
    order = np.argsort(-score, kind="stable")[: min(n_top, int((score > 0).sum()))]
    ranks = np.full(len(score), -1, np.int64)
    ranks[order] = np.arange(len(order))
    return ranks


def chosen(batches: F64, ranks: F64, n_top: int) -> tuple[Bits, F64]:
    """Which genes are chosen, and the mean rank of each (infinite for genes that no batch chose).

    Genes that more batches chose come first, and among these those of smaller mean rank.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        mean = np.where(batches > 0, ranks / batches, np.inf)
    order = np.lexsort((mean, -batches))[:n_top]
    picked = np.zeros(len(batches), bool)
    picked[order] = True
    return picked & (batches > 0), mean
