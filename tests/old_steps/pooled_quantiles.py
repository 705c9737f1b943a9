"""Pooled quantiles before thresholds of each site: every value is counted in its own interval, 3e-6 of it wide."""

import numpy as np

from cloister.arrays import F64, I64
from cloister.mpc.net.wire import message


@message("L2", protocol="pooled_quantiles")
class Refine:  # S → u, as it was
    cells: I64


@message("L4", protocol="pooled_quantiles")
class Edges:  # S → u, as it was
    edges: F64
    again: bool


def count(ends, values):
    """How many of the sorted values lie in [ends_i, ends_{i+1})."""
    first, last = np.searchsorted(values, (ends[0], ends[-1]), side="left")
    return np.bincount(np.searchsorted(ends, values[first:last], side="right") - 1, minlength=len(ends) - 1)


def count_fine(params, chosen, values):
    """What a site added to the second sum."""
    return np.concatenate([count(params.split(int(cell)), np.sort(values)) for cell in chosen])


def outer_edges(arrays, k):
    """The k-th smallest and the k-th largest value of all sites together."""
    x = np.sort(np.concatenate(arrays))
    return x[k - 1], x[-k]
