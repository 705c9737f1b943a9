"""A round of `fine-tune` as it was up to commit 5a0c885 (hardened mode), without masks, which change nothing.

The site's update of several local epochs, each entry within ±bound, times its share of the cells that are claimed; the
coordinator's sum becomes the next state. Sites accepted any round number in the first task.
"""

import numpy as np


def mean_update(deltas, cells, bound, bits=27):
    """Σ n_u / Σ n · Δ_u, on the grid of the sum."""
    total = sum(cells)
    pairs = zip(deltas, cells, strict=True)
    return np.sum([np.rint(np.clip(d, -bound, bound) * n / total * 2**bits) / 2**bits for d, n in pairs], axis=0)


def check_task(t, before, rounds, *, end=False):
    """Whether a site followed a task with round number t; `before` is that of the task before, or None."""
    late = t < before + (not end) if before is not None else t < 0
    return not late and t <= rounds


def reach(t, bound, most=2.0):
    """How far from the first weights a model might be that claimed to come after t rounds."""
    return (t + 1e-3) * bound * most
