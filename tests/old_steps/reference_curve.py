"""`reference_distances` before thresholds (commit 5a0c885): the curve that a site added."""

import numpy as np

from cloister.workflows.map_labels.reference_distances import UNIT, nearest_others


def curve(params, x):
    """F_u in thousandths: each of n references adds 1000 / n where another one comes near enough."""
    near = np.sort(nearest_others(x))
    return np.searchsorted(near, params.grid, side="right") * UNIT // len(near)
