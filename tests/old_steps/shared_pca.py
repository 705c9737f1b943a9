"""Shared PCA before thresholds of each site: every value is clipped at ±max of any mean and deviation."""

import numpy as np

from cloister.workflows.shared_pca import shared_pca


def sum_of_z(log, mean, deviation, bound=10.0):
    """What a site added to the second sum for one gene."""
    return float(np.clip((log - mean) / deviation, -bound, bound).sum())


def cells_above(total, n, bound=10.0):
    """Cells above the mean, if all others are below it and all are clipped."""
    return round((total / bound + n) / 2)


def products(params, mine, common, space):
    """n, Σz, Σzzᵀ (upper triangle) as one vector."""
    h = len(space.at)
    n, total, square = 0, np.zeros(h), np.zeros((h, h))
    for y in shared_pca.normalised(params, mine, common, h):
        z = shared_pca.standardise(params, np.log1p(y[:, space.at].toarray()), space.mean, space.deviation)
        n, total = n + len(z), total + z.sum(axis=0)
        square += z.T @ z
    return np.concatenate([[float(n)], total, square[np.triu_indices(h)]])
