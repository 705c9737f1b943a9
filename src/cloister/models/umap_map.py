"""A map in two dimensions from points that stand for cells, and where cells lie in it.

    fitted     UMAP of the points [MHM18], by umap-learn, the extra `map`
    place      for a cell, max_y Σ_j w_j / (1 + |y - y_j|²) over its k nearest points: w_j are UMAP's weights of
               neighbours in the space, 1 / (1 + |y - y_j|²) are about those of the map; found in `STEPS` steps from
               the weighted mean, by a mean with weights w_j / (1 + |y - y_j|²)²
    recall     fraction of the k nearest neighbours in a space that are among the k nearest in the map
    density    shares of the points in the places of a grid

The mean alone lies between two parts of a map where a cell's neighbours are in both. The maximum is at the larger part.
Nothing is random. With `own` neighbours, after `ALONE` steps the cells that are placed together draw each other as
well, with `PULL` of the weight of the points, as edges between cells do in UMAP. Without them a cell has the same
place at every site and in every later call, whoever comes with it.

References
----------
[MHM18] McInnes, Healy, Melville, arXiv:1802.03426.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

from cloister.arrays import F64, I64
from cloister.errors import MissingExtra
from cloister.models import leiden

STEPS, ALONE = 30, 10
NEAREST = 60  # points that place a cell
PULL = 0.3
MOST_OWN = 20_000  # cells that draw each other; among more, neighbours take minutes to find
BLOCK = 20_000  # cells at a time


def check_umap() -> Any:
    """The module of umap-learn; raises `MissingExtra` without it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of tensorflow, which it would use for another purpose
            import umap
    except ImportError:
        raise MissingExtra("umap-learn", "map") from None
    return umap


def fitted(points: F64, n_neighbors: int, min_dist: float, seed: int) -> F64:
    """Positions of the points, (M, 2), centred."""
    umap = check_umap()
    k = min(n_neighbors, len(points) - 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of small or disconnected graphs
        model = umap.UMAP(n_neighbors=k, min_dist=min_dist, random_state=seed & 0x7FFFFFFF, n_jobs=1)
        positions = np.asarray(model.fit_transform(points), np.float64)
    positions = np.where(np.isfinite(positions), positions, 0.0)  # of a point without neighbours
    centred: F64 = positions - np.median(positions, axis=0)
    return centred


def principal(points: F64) -> F64:
    """The first two principal components, (M, 2): the map that a better one is compared with."""
    centred = points - points.mean(axis=0)
    _, axes = np.linalg.eigh(centred.T @ centred)
    flat: F64 = centred @ axes[:, ::-1][:, :2]
    return flat


def place(x: F64, points: F64, positions: F64, k: int = NEAREST, own: int = 0) -> F64:
    """Positions of cells, (n, 2); `own` nearest cells draw each cell as well, unless these are more than `MOST_OWN`."""
    at, weight = _near(x, points, k)
    placed = np.concatenate([
        (weight[some, :, None] * positions[at[some]]).sum(axis=1) for some in _blocks(len(x))
    ] or [np.zeros((0, 2))])  # fmt: skip
    friends = _near(x, x, own, itself=True) if 0 < own < len(x) <= MOST_OWN else None
    for step in range(STEPS):
        before = placed.copy()
        for some in _blocks(len(x)):
            y, mass = _pulled(before[some], positions[at[some]], weight[some])
            if friends is not None and step >= ALONE:
                z, more = _pulled(before[some], before[friends[0][some]], PULL * friends[1][some])
                y, mass = y + z, mass + more
            placed[some] = y / mass
    return placed


def _blocks(n: int) -> list[slice]:
    return [slice(start, start + BLOCK) for start in range(0, n, BLOCK)]


def _near(x: F64, among: F64, k: int, *, itself: bool = False) -> tuple[I64, F64]:
    """The k nearest and their weights, which add up to 1 for each cell; `itself`: x are among them, and left out."""
    if itself:
        at = _others(x, x, np.arange(len(x)), k)
        far = np.concatenate([
            np.sqrt(np.square(x[some, None] - x[at[some]]).sum(axis=2)) for some in _blocks(len(x))
        ])  # fmt: skip
    else:
        at, far = leiden.nearest(x, among, k)
    weight = leiden.memberships(far, far.shape[1], apart=True) if len(x) else far
    return at, weight / weight.sum(axis=1, keepdims=True)


def _pulled(y: F64, near: F64, weight: F64) -> tuple[F64, F64]:
    pull = weight / np.square(1.0 + np.square(near - y[:, None]).sum(axis=2))
    return (pull[:, :, None] * near).sum(axis=1), pull.sum(axis=1, keepdims=True)


def recall(x: F64, y: F64, k: int, among: I64 | None = None) -> float:
    """Fraction of the k nearest in x that are among the k nearest in y; of all points, or of those at `among`."""
    at = np.arange(len(x)) if among is None else among
    k = min(k, len(x) - 1)
    if k < 1:
        return 1.0
    both = [_others(z[at], z, at, k) for z in (x, y)]
    return float(np.mean([np.isin(a, b).mean() for a, b in zip(*both, strict=True)]))


def _others(z: F64, among: F64, own: I64, k: int) -> I64:
    """The k nearest, without the point itself; among equal points one stands for it."""
    near = leiden.nearest(z, among, k + 1)[0]
    itself = near == own[:, None]
    itself[~itself.any(axis=1), -1] = True
    return near[~itself].reshape(len(z), k)


def density(positions: F64, span: F64, bins: int) -> F64:
    """Share of the points in each of `bins` x `bins` places of the map; `span` is ((x from, to), (y from, to))."""
    counts = np.histogram2d(positions[:, 0], positions[:, 1], bins=bins, range=span)[0]
    shares: F64 = counts / max(len(positions), 1)
    return shares
