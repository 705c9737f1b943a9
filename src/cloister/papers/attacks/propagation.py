"""What the parties of a label propagation can rebuild: vectors from distances, labels from influences.

*Vectors.* Cosines of all pairs are a Gram matrix of unit vectors: its leading eigenvectors are the points up to a
rotation, and the points that a colluding site knows fix the rotation (multidimensional scaling, then Procrustes). A
server that holds only the edges of a graph fills the rest in by the shortest paths along them, as Isomap does.

*Labels.* S is symmetric, so the columns of S that a site is given for its labelled points l are also the rows of all
others' influence on them: Z[l, c] u_l = Σ_i S[i, l] u_i Y[i, c], where u is how the rows were scaled. With its own
labels taken out, the site solves for u_i Y[i, c] ≥ 0 of everybody's points i, and reads the class off.

*Distances from labels.* A site submits k copies of a point q without a label and k + 1 copies of a point at distance r
from q, all of one class of its own (`probe`). Each copy of q has one place left among its neighbours. If a cell of
another site is nearer to q than r, it takes this place, and q gets its label or none. Otherwise q gets the class of the
site. Answers for many q and r locate the cell (`locate`). No message deviates: this is the function itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from cloister.arrays import F64, I32, I64, U8, Bits
from cloister.models import graph

Inside = Callable[[Sequence[F64], F64, float], Bits]  # anchors, radii and the largest radius of one run


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


# ---- distances from labels -------------------------------------------------------------------------------------------


def probe(anchor: F64, radius: float, reach: float, planes: F64, k: int, rng: np.random.Generator) -> U8:
    """Codes of 2k + 1 points, whose labels show whether a cell is nearer to the anchor than `radius` bits.

    Some bits that a near cell shares with the anchor are flipped, so that probes are not neighbours of each other.
    """
    bits, d = planes.shape
    most = int(min(bits, max(9 * reach, 400)))
    q = np.unpackbits(graph.codes(anchor[None], planes))
    sure = np.argsort(-np.abs(planes @ anchor))[:most]
    q[rng.choice(sure, most // 4, replace=False)] ^= 1
    side: F64 = rng.standard_normal((d,))
    side -= (side @ anchor) * anchor
    angle = np.pi * radius / bits
    at_radius = np.cos(angle) * anchor + np.sin(angle) * side / np.linalg.norm(side)
    distance = int((np.unpackbits(graph.codes(at_radius[None], planes)) != q).sum())
    x = q.copy()
    x[rng.choice(bits, distance, replace=False)] ^= 1
    return np.packbits(np.array([q] * k + [x] * (k + 1)), axis=1)


def locate(inside: Inside, start: F64, bits: int, rng: np.random.Generator, rounds: int = 4) -> F64:
    """The direction of the cell nearest to `start`, from answers of 2 `rounds` + 1 runs."""

    def distances(anchors: Sequence[F64], grid: F64) -> F64:
        found = inside([a for a in anchors for _ in grid], np.tile(grid, len(anchors)), float(grid[-1]))
        gap = grid[1] - grid[0]
        estimates: F64 = grid[-1] + gap / 2 - gap * found.reshape(len(anchors), -1).sum(axis=1)
        return estimates

    v, d = start / np.linalg.norm(start), len(start)
    far = float(distances([v], np.linspace(5, bits / 8, 40))[0])
    for _ in range(rounds):
        angle = np.pi * far / bits
        sides = np.linalg.qr(np.column_stack([v, rng.normal(size=(d, d - 1))]))[0][:, 1:].T
        width = 0.45 * far
        around = [np.cos(angle / 2) * v + sign * np.sin(angle / 2) * e for e in sides for sign in (1, -1)]
        both = distances(around, np.linspace(max(1.0, far - width), far + width, 7)).reshape(-1, 2)
        towards = sides.T @ (both[:, 1] - both[:, 0])
        towards /= max(float(np.linalg.norm(towards)), 1e-9)
        tries = [np.cos(f * angle) * v + np.sin(f * angle) * towards for f in (0.4, 0.6, 0.8, 0.9, 1.0, 1.1)]
        tried = distances([t / np.linalg.norm(t) for t in tries], np.linspace(1, 1.1 * far, 16))
        v, far = tries[int(np.argmin(tried))], max(float(tried.min()), 4.0)
        v = v / np.linalg.norm(v)
    return v
