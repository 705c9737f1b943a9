"""`pooled_harmony` before clusters were closed at a site (commit 5a0c885): small clusters were left out of its sums."""

import numpy as np

from cloister.models.harmony import assignments, unit

LEAST = 5  # cells of a site in a cluster that it showed


def responsibilities(s, x, Y):
    """R of a site's cells: each row adds up to 1 over all clusters, shown or not."""
    return assignments(s, unit(x), Y, None)


def masses(R):
    """What a site added at L7: nothing for clusters in which it had few cells."""
    mass = R.sum(axis=0)
    return np.where(mass >= LEAST, mass, 0.0)


def centroids(R, x):
    """What a site added at L4 and L5."""
    return (R.T @ unit(x)) * (R.sum(axis=0) >= LEAST)[:, None]


def moments(x):
    """What a site added at L3 and L10, without any threshold: Σz and Σzzᵀ."""
    z = unit(x)
    return z.sum(axis=0), z.T @ z


def places(codes, kinds):
    """What a site added at L11: nothing for places with few cells; those outside of the picture have code -1."""
    counts = np.bincount(codes[codes >= 0], minlength=kinds)
    return np.where(counts >= LEAST, counts, 0)
