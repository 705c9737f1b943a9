"""Leiden clusters of points: a graph of nearest neighbours with UMAP's weights, and partitions of it.

    neighbour_graph   k nearest of each point; w = exp(-(d - ρ) / σ), joined as a + b - ab [MHM18]
    partition         the best of several runs of Leiden on it, by modularity with a resolution [TWE19, RB06]
    modularity        Q = Σ_c (inside_c / W - γ (degree_c / W)²)   of any partition, to compare two

These are the steps of `scanpy.pp.neighbors` and `scanpy.tl.leiden`, with exact neighbours. igraph, whose Leiden it is,
is the extra `cluster`.

References
----------
[MHM18] McInnes, Healy, Melville, arXiv:1802.03426, algorithm 3. [TWE19] Traag, Waltman, van Eck, Scientific Reports
2019. [RB06] Reichardt and Bornholdt, Physical Review E 2006.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import scipy.sparse

from cloister.arrays import F64, I64
from cloister.errors import MissingExtra

BLOCK = 1 << 23  # distances at a time
STEPS = 64  # of the search for σ


def nearest(points: F64, among: F64, k: int) -> tuple[I64, F64]:
    """Positions and distances of the k nearest, (n, k), nearest first."""
    k = min(k, len(among))
    at, far = np.empty((len(points), k), np.int64), np.empty((len(points), k))
    squares = np.square(among).sum(axis=1)
    step = max(1, BLOCK // max(1, len(among)))
    for start in range(0, len(points), step):
        x = points[start : start + step]
        d = np.square(x).sum(axis=1)[:, None] + squares - 2.0 * (x @ among.T)
        some = np.argpartition(d, k - 1, axis=1)[:, :k]
        exact = np.sqrt(np.square(x[:, None] - among[some]).sum(axis=2))
        order = np.argsort(exact, axis=1, kind="stable")
        at[start : start + step] = np.take_along_axis(some, order, axis=1)
        far[start : start + step] = np.take_along_axis(exact, order, axis=1)
    return at, far


def neighbour_graph(points: F64, k: int) -> Any:
    """Symmetric weights of neighbours, a CSR matrix; `k` counts the point itself, as in scanpy."""
    n = len(points)
    at, far = nearest(points, points, min(k, n))
    own = at == np.arange(n)[:, None]
    lacks = ~own.any(axis=1)
    own[lacks, -1] = True  # among equal points, one stands for the point itself
    at, far = at[~own].reshape(n, -1), far[~own].reshape(n, -1)
    weights = memberships(far, k)
    rows = np.repeat(np.arange(n), at.shape[1])
    one = scipy.sparse.csr_matrix((weights.ravel(), (rows, at.ravel())), shape=(n, n))
    return (one + one.T - one.multiply(one.T)).tocsr()


def memberships(far: F64, k: int, *, apart: bool = False) -> F64:
    """Weights of neighbours at these distances, (n, m): exp(-(d - ρ) / σ), which add up to log2 k.

    σ is at least 1/1000 of the mean distance; with `apart` that of the same row, so that no row depends on others.
    """
    n, mean = len(far), far.mean(axis=1, keepdims=True) if apart else float(far.mean()) if far.size else 1.0
    rho = np.min(np.where(far > 0, far, np.inf), axis=1, initial=np.inf)
    rho = np.where(np.isfinite(rho), rho, 0.0)[:, None]
    target, low, high = np.log2(max(k, 2)), np.zeros((n, 1)), np.full((n, 1), np.inf)
    sigma = np.ones((n, 1))
    for _ in range(STEPS):
        above = np.exp(-np.maximum(far - rho, 0.0) / sigma).sum(axis=1, keepdims=True) > target
        high, low = np.where(above, sigma, high), np.where(above, low, sigma)
        sigma = np.where(np.isfinite(high), (low + np.where(np.isfinite(high), high, 0.0)) / 2, sigma * 2)
    sigma = np.maximum(sigma, 1e-3 * np.maximum(mean, 1e-12))
    weights: F64 = np.exp(-np.maximum(far - rho, 0.0) / sigma)
    return weights


def drawn(cells: F64, mean: F64, variance: F64, most: int, seed: int) -> F64:
    """Points that stand for the cells of prototypes: as many as these, at most `most`, normal around their means."""
    ends = np.cumsum(cells)
    total = min(float(ends[-1]), float(most))
    own = np.repeat(np.arange(len(cells)), np.diff(np.rint(ends / ends[-1] * total), prepend=0.0).astype(np.int64))
    noise = np.random.default_rng([seed & 0xFFFFFFFF, 40]).standard_normal((len(own), mean.shape[1]))
    points: F64 = mean[own] + np.sqrt(variance)[own] * noise
    return points


def modularity(graph: Any, labels: I64, resolution: float) -> float:
    """Of a partition, per unit of weight."""
    k = int(labels.max(initial=0)) + 1
    member = scipy.sparse.csr_matrix((np.ones(len(labels)), (np.arange(len(labels)), labels)), shape=(len(labels), k))
    inside = (member.T @ graph @ member).diagonal()
    degree = np.asarray(member.T @ graph.sum(axis=1)).ravel()
    total = float(degree.sum())
    return float((inside / total - resolution * np.square(degree / total)).sum()) if total > 0 else 0.0


def partition(graph: Any, resolution: float, seed: int, runs: int = 1) -> I64:
    """Codes of clusters, the largest first; the best of `runs` partitions."""
    try:
        import igraph
    except ImportError:
        raise MissingExtra("igraph", "cluster") from None
    upper = scipy.sparse.triu(graph, k=1).tocoo()
    net = igraph.Graph(n=graph.shape[0], edges=np.stack([upper.row, upper.col], axis=1))
    weights = upper.data.tolist()
    found: list[tuple[float, list[int]]] = []
    for run in range(runs):
        igraph.set_random_number_generator(random.Random((seed << 10) + run))  # statistical, reproducible
        best = net.community_leiden("modularity", weights=weights, resolution=resolution, n_iterations=-1)
        labels = np.array(best.membership, np.int64)
        found.append((modularity(graph, labels, resolution), labels.tolist()))
    igraph.set_random_number_generator(random)
    return by_size(np.array(max(found)[1], np.int64))


def by_size(labels: I64) -> I64:
    """The same partition with codes 0, 1, … from the largest cluster on."""
    _, first, codes, sizes = np.unique(labels, return_index=True, return_inverse=True, return_counts=True)
    rank = np.empty(len(sizes), np.int64)
    rank[np.lexsort((first, -sizes))] = np.arange(len(sizes))
    return rank[codes]
