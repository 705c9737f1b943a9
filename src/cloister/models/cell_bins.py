"""The values of one cell as bins, by its own quantiles, as scGPT reads them."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np


def bin_cell(values: Any, n_bins: int, rng: np.random.Generator | None) -> Any:
    """Bins 1 … n_bins - 1 of one cell's non-zero values, by its own quantiles.

    Values that lie on several edges at once (ties) are spread over those bins at random, as scGPT does; without `rng`
    they take the highest.
    """
    if not len(values):
        return np.zeros(0, np.int64)
    edges = np.quantile(values, np.linspace(0, 1, n_bins - 1))
    high = np.digitize(values, edges)
    if rng is None:
        return high
    low = np.digitize(values, edges, right=True)
    return np.ceil(rng.random(len(values)) * (low - high) + high).astype(np.int64)


def cell_rng(cell: str, seed: int) -> np.random.Generator:
    """Randomness of one cell, from its name: ties fall alike in every run and in any order of cells."""
    words = np.frombuffer(hashlib.sha256(f"{seed}/{cell}".encode()).digest(), np.uint32)
    return np.random.default_rng(words)
