"""Doublet scores: the share of simulated doublets among the nearest neighbours of a cell, as in Scrublet.

    pairs     which two cells make each simulated doublet
    scores    s = q ρ/r / (1 - ρ - q (1 - ρ - ρ/r)),  q = (d + 1) / (k' + 2)

d of the k' nearest are simulated, r is the number of simulated doublets per observed cell, and ρ the expected share of
doublets. k' = k (1 + r), with k half the root of the number of observed cells.

References
----------
[WLK19] Wolock, Lopez and Klein, Cell Systems 2019 (Scrublet).
"""

from __future__ import annotations

import numpy as np

from cloister.arrays import F64, I64
from cloister.models.leiden import nearest

RATIO = 2  # simulated doublets per observed cell
LEAST = 3  # neighbours


def generator(seed: int, place: int) -> np.random.Generator:
    """Statistical randomness of the simulation at one site of a study."""
    return np.random.default_rng([seed & 0xFFFFFFFF, 41, place])


def pairs(n: int, count: int, rng: np.random.Generator) -> I64:
    """Positions of two different cells for each doublet, (count, 2)."""
    first = rng.integers(0, n, count)
    return np.stack([first, (first + rng.integers(1, max(n, 2), count)) % n], axis=1)


def scores(cells: F64, observed: I64, others: F64, doublets: F64, rate: float) -> F64:
    """A score in (0, 1) for each of `cells`.

    Neighbours are `cells[observed]`, further observed cells `others`, and `doublets`; a cell is not its own neighbour.
    """
    points = np.concatenate([cells[observed], others, doublets])
    n = len(observed) + len(others)
    ratio = len(doublets) / n
    k = min(round(max(LEAST, round(0.5 * np.sqrt(n))) * (1 + ratio)), len(points) - 1)
    near, _ = nearest(cells, points, k + 1)
    own = np.full(len(cells), -1, np.int64)
    own[observed] = np.arange(len(observed))
    same = near == own[:, None]
    same[~same.any(axis=1), -1] = True  # a cell that is not among its neighbours: the farthest counts for it
    share = ((near[~same].reshape(len(cells), k) >= n).sum(axis=1) + 1) / (k + 2)
    found: F64 = share * rate / ratio / (1 - rate - share * (1 - rate - rate / ratio))
    return found
