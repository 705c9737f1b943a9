"""What the parties of a label propagation can rebuild: vectors from distances, labels from influences.

*Vectors.* Cosines of all pairs are a Gram matrix of unit vectors: its leading eigenvectors are the points up to a
rotation, and the points that a colluding site knows fix the rotation (multidimensional scaling, then Procrustes). A
server that holds only the edges of a graph fills the rest in by the shortest paths along them, as Isomap does.

*Labels.* S is symmetric, so the columns of S that a site is given for its labelled points l are also the rows of all
others' influence on them: Z[l, c] u_l = Σ_i S[i, l] u_i Y[i, c], where u is how the rows were scaled. With its own
labels taken out, the site solves for u_i Y[i, c] ≥ 0 of everybody's points i, and reads the class off.
"""

from __future__ import annotations

import numpy as np

from cloister.arrays import F64, I32, I64
from cloister.models import graph


def cosines(distances: I32, bits: int) -> F64:
    return np.cos(np.pi * distances / bits)


def paths(keys: I64, bits: int) -> F64:
    """Cosines of angles along shortest paths of a k-nearest-neighbour graph; a right angle where there is none."""
    from scipy import sparse

    n, k = keys.shape
    index, distance = graph.split_keys(keys, n)
    angle = np.pi * np.maximum(distance, 0.5).reshape(-1) / bits
    edges = sparse.csr_array((angle, (np.repeat(np.arange(n), k), index.reshape(-1))), shape=(n, n))
    far = sparse.csgraph.shortest_path(edges, directed=False)
    return np.asarray(np.cos(np.clip(np.where(np.isfinite(far), far, np.pi / 2), 0, np.pi)))


def rebuild_vectors(similar: F64, known: I64, vectors: F64) -> F64:
    """Unit vectors of all points, from cosines and the vectors of the points `known`."""
    dims = vectors.shape[1]
    values, basis = np.linalg.eigh(similar)
    points = basis[:, -dims:] * np.sqrt(np.maximum(values[-dims:], 0))
    truth = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    u, _, v = np.linalg.svd(points[known].T @ truth)
    turned = points @ (u @ v)
    return np.asarray(turned / np.maximum(np.linalg.norm(turned, axis=1, keepdims=True), 1e-12))


def hits(guess: F64, truth: F64) -> F64:
    """Cosine of every guess with the truth."""
    return np.asarray(np.sum(guess * truth, axis=1) / np.maximum(np.linalg.norm(truth, axis=1), 1e-300))


def solve_labels(columns: I32 | None, scores: I64, mine: I64, labels: I64, others: I64) -> I64:
    """Classes of the points `others`, as the site with labelled points `mine` finds them.

    `columns` (n, l) are its columns of S, or None if it got none; `scores` (l, C) its rows of Z, at `mine`; `labels`
    (l,) its own. Points that no solution gives a class get -1.
    """
    from scipy.optimize import nnls

    n_classes = scores.shape[1]
    if columns is None:  # all it can do is to guess the most frequent class
        return np.full(len(others), np.argmax((scores / np.maximum(scores.sum(axis=1), 1)[:, None]).sum(axis=0)))
    s = columns.astype(np.float64)
    own = s[mine]  # own[i, j] = S[i, j] / u_i, so that own[i, j] u_i = own[j, i] u_j
    u = np.exp(_potentials(own))
    target = scores * u[:, None] - (own * u[:, None]).T @ graph.one_hot(labels, n_classes)
    left = s[others].T
    weights = np.stack([nnls(left, target[:, c], maxiter=50 * len(others))[0] for c in range(n_classes)], axis=1)
    return np.where(weights.max(axis=1) > 0, weights.argmax(axis=1), -1)


def _potentials(own: F64) -> F64:
    """Find log u up to a constant, from log u_i - log u_j = log own[j, i] - log own[i, j]."""
    i, j = np.nonzero((own > 1000) & (own.T > 1000))  # large enough for their rounding not to matter
    keep = i < j
    i, j = i[keep], j[keep]
    rows = np.zeros((len(i) + 1, len(own)))
    rows[np.arange(len(i)), i], rows[np.arange(len(i)), j], rows[-1, 0] = 1, -1, 1
    right = np.append(np.log(own[j, i]) - np.log(own[i, j]), 0.0)
    return np.asarray(np.linalg.lstsq(rows, right, rcond=None)[0], np.float64)
