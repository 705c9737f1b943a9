"""Shared PCA before thresholds of each site: every value is clipped at ±max of any mean and deviation."""

import numpy as np


def sum_of_z(log, mean, deviation, bound=10.0):
    """What a site added to the second sum for one gene."""
    return float(np.clip((log - mean) / deviation, -bound, bound).sum())


def cells_above(total, n, bound=10.0):
    """Cells above the mean, if all others are below it and all are clipped."""
    return round((total / bound + n) / 2)
