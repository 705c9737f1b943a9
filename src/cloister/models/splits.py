"""Which cells are held out of training."""

from __future__ import annotations

import math

import numpy as np

from cloister.arrays import I64


def hold_out(codes: I64, share: float, rng: np.random.Generator) -> I64:
    """Positions of the validation cells: a share of every label's cells, rounded; few cells all train."""
    held = []
    for code in np.unique(codes[codes >= 0]):
        at = np.flatnonzero(codes == code)
        count = min(math.floor(share * len(at) + 0.5), len(at) - 1)
        held.append(rng.permutation(at)[:count])
    return np.sort(np.concatenate(held)) if held else np.zeros(0, np.int64)
