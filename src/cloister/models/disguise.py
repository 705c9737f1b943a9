"""Inliers kept back or made up before rows are sent, so that a server sees neither all rows nor only real ones.

Only plain inliers are touched: rows that a forest of this site alone scores low, in the lower half
unless another part is agreed. Outliers stay.

References
----------
[MA24] section VI-C.  [CBHK02] Chawla et al., SMOTE, JAIR 2002: a new row between a row and one of its neighbours.
"""

from __future__ import annotations

import numpy as np

from cloister.arrays import F64, I64, Index
from cloister.models import isolation_forest as iforest

NEIGHBOURS = 5


def disguise(X: F64, thin: float, smote: float, rng: np.random.Generator, below: float = 0.5) -> tuple[F64, I64]:
    """Rows to send, shuffled, and for each of them which row of X it is; -1 for a made-up one.

    Plain inliers are rows in the lower part `below` of the site's own scores.
    """
    rows = np.arange(len(X))
    if (thin or smote) and len(X) > 2:
        scores = iforest.fit(X, rng=rng).score(X)
        inliers = np.flatnonzero(scores <= np.quantile(scores, below))
        gone = rng.permutation(inliers)[: int(thin * len(inliers))]
        rows = np.setdiff1d(rows, gone)
        between = _between(X, inliers, int(smote * len(X)), rng)
        X, rows = np.concatenate([X[rows], between]), np.concatenate([rows, np.full(len(between), -1)])
        order = rng.permutation(len(X))
        return X[order], rows[order]
    return X, rows


def _between(X: F64, inliers: Index, count: int, rng: np.random.Generator) -> F64:
    """SMOTE: a random point between an inlier and one of its nearest inliers."""
    from scipy.spatial import cKDTree

    if not count or len(inliers) < 2:
        return np.zeros((0, X.shape[1]))
    spread = X.std(axis=0)
    scaled = X[inliers] / np.where(spread > 0, spread, 1.0)
    near = cKDTree(scaled).query(scaled, k=min(NEIGHBOURS + 1, len(inliers)))[1]
    at = rng.integers(len(inliers), size=count)
    other = near[at, rng.integers(1, near.shape[1], size=count)]
    points: F64 = X[inliers[at]] + rng.random((count, 1)) * (X[inliers[other]] - X[inliers[at]])
    return points
