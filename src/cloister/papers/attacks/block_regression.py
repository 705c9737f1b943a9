"""A block of a provider's model fitted by an owner: regression of its increment b_l - b_{l-1} on b_{l-1}.

The features are all monomials up to degree three of the leading principal components of what the owner holds of
b_{l-1}. R² on samples that were kept out says how much of the block the owner has: 1 is all of it on data like its own.
"""

from __future__ import annotations

from itertools import combinations_with_replacement

import numpy as np

from cloister.arrays import F64


def features(x: F64, axes: F64, centre: F64, spread: F64) -> F64:
    z = (x - centre) @ axes / spread
    k = z.shape[1]
    columns = [np.ones(len(z))]
    for degree in (1, 2, 3):
        columns += [np.prod(z[:, list(c)], axis=1) for c in combinations_with_replacement(range(k), degree)]
    return np.stack(columns, axis=1)


def fit_block(before: F64, after: F64, *, held: float = 0.25, components: int = 6, ridge: float = 1e-6) -> float:
    """R² of the increment on held-out samples, from what is held before and after the block, (n, numbers) each."""
    n = len(before)
    cut = int(n * (1 - held))
    centre = before[:cut].mean(axis=0)
    _, s, V = np.linalg.svd(before[:cut] - centre, full_matrices=False)
    k = min(components, int((s > 1e-9 * s[0]).sum()))
    spread = s[:k] / np.sqrt(cut)
    A = features(before, V[:k].T, centre, spread)
    y = after - before
    left = A[:cut].T @ A[:cut] + ridge * cut * np.eye(A.shape[1])
    W = np.linalg.solve(left, A[:cut].T @ y[:cut])
    miss = ((A[cut:] @ W - y[cut:]) ** 2).sum()
    return float(1 - miss / ((y[cut:] - y[:cut].mean(axis=0)) ** 2).sum())
