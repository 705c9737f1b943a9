"""Groups of `pooled_harmony` before clipped directions (commit e39665c): cuts and means that one far cell steers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from cloister.arrays import F64
from cloister.disclosure import SimilarGroups
from cloister.mpc.crypto.entropy import Entropy
from cloister.workflows.integrate.harmony_steps import Ask, Params
from cloister.workflows.integrate.pooled_harmony import code_of
from cloister.workflows.shared_pca import shared_pca


def main_direction(centred: F64, rounds: int = 8) -> F64:
    """Direction of largest variance, of which one far row has nearly all."""
    spread = np.square(centred).sum(axis=0)
    direction = centred.T @ centred[:, int(spread.argmax())]
    for _ in range(rounds):
        direction = direction / max(float(np.linalg.norm(direction)), 1e-300)
        direction = centred.T @ (centred @ direction)
    return np.asarray(direction / max(float(np.linalg.norm(direction)), 1e-300))


def clipped_means(groups: SimilarGroups, values: F64, rounds: int = 10) -> F64:
    """Ten steps from the plain mean, one group after the other."""
    means = groups.means(values)
    for k in range(len(groups)):
        rows = values[groups.codes == k]
        for _ in range(rounds):
            away = rows - means[k]
            length = np.linalg.norm(away, axis=1)
            reach = np.sort(length)[len(length) // 2]
            means[k] += (away * np.minimum(1.0, reach / np.maximum(length, 1e-300))[:, None]).mean(axis=0)
    return means


def encode(params: Params, ask: Ask, entropy: Entropy) -> object:
    """A part beyond the reach is an error of the party whose part it is."""
    how: Callable[[F64], object] = code_of(params, ask.reach).encode
    if not ask.reach:
        return ask.part.map(lambda x: shared_pca.split_sum(x, len(params.sites), entropy))
    return ask.part.map(how)  # type: ignore[arg-type]
