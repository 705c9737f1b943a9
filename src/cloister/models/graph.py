"""Label propagation over a k-nearest-neighbour graph: all of it that needs no other party.

    codes       B = [V Πᵀ ≥ 0]                     L bits per point, eight to a byte; Π from a seed
    hamming     H_ij                               bits in which two codes differ
    nearest     the k smallest H_ij · 2^b + j      of every row i, j ≠ i; so ties go to the smaller index
    adjacency   A_ij = cos(πH_ij/L)^p, W = A + Aᵀ, then D^{-1/2} W D^{-1/2}; sparse; p = 1 in the paper
    solve       X = (I - αW)^{-1} R                conjugate gradients on all columns of R at once
    influence   S_L = (I - αW)^{-1}[:, labelled]   rows divided by their sum, as integers of `FRACTION` bits
    left_out    S_LL without its diagonal          what each labelled point is told by all others
    decide      label = argmax Z, confidence = 1 - entropy(Z / ΣZ) / log C; Z / ΣZ may be blended with a second opinion

A point is no neighbour of its own: the largest similarity of a row is always its own, 1, and would take the place of a
neighbour and only slow the labels down. Dropped, W has a zero diagonal, as in [ZBL+04].

An edge whose similarity is zero or less is no edge (the printed algorithm would take square roots of negative degrees).
A point that no label reaches has Z = 0: its label is missing (-1) and its confidence 0. Rows of S_L are scaled to
sum to one, which neither the largest class nor the confidence sees, and rounded: from there on all arithmetic is on
integers, so that `propagate` and the protocols that compute the same between parties agree to the last bit.

The dense matrices of the paper are never formed: H is taken in blocks of rows, and what is solved for are the columns
of labelled points, in blocks. The matrix I - αW has eigenvalues in [1 - α, 1 + α], so that a residual r bounds the
error by |r| / (1 - α), and `solve` needs about √(2/(1 - α)) steps per two digits.

References
----------
[SYL24] Scott, Yeo, Lampert, Cross-client label propagation, Algorithm 1.  [ZBL+04] Zhou et al., NeurIPS 2003.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from cloister.arrays import F32, F64, I32, I64, U8
from cloister.errors import DataError, ParameterError
from cloister.mpc.crypto.agreement import bind, hkdf
from cloister.mpc.crypto.prg import Prg
from cloister.mpc.crypto.replicated import index_bits as index_bits

FRACTION = 28  # bits of the fixed point of S_L
REACHED = 1e-9  # influence of all labels together below which a point counts as not reached
TOLERANCE = 1e-12  # residual of a solve, relative to its right-hand side
LEFT_OUT = 1e-6  # the same where settings are compared
MAX_BITS = 1 << 16
MAX_POWER = 64
_BLOCK = 1 << 22  # entries of H at once
COLUMNS = 16  # columns of S at once; more of them leave the cache
STEPS = 8  # of a walk, at most
HUB = 6  # a point of degree above HUB k passes no label on
MOST = 4  # the largest weight of what a point passes on
RING_BITS = 44  # of the scores of a walk, at most
LEVELS = 8  # of a rounded score
PARTS = 1000  # α of a walk is taken to so many parts


@dataclass(frozen=True)
class Propagation:
    label: I64  # (n,) class, -1 where no label reaches
    confidence: F64  # (n,)
    scores: I64  # (n, C) Z in fixed point


def check_sizes(n: int, bits: int, n_neighbors: int, alpha: float, power: float = 1.0) -> None:
    if bits % 8 or not 64 <= bits <= MAX_BITS:
        raise ParameterError(f"'bits' must be a multiple of 8 between 64 and {MAX_BITS}, found {bits}")
    if not 0 < alpha < 1:
        raise ParameterError(f"'alpha' must lie between 0 and 1, both excluded, found {alpha:g}")
    if not 0 < power <= MAX_POWER:
        raise ParameterError(f"'power' must lie between 0 and {MAX_POWER}, 0 excluded, found {power:g}")
    if n_neighbors < 1:
        raise ParameterError(f"'n_neighbors' must be at least 1, found {n_neighbors}")
    if n_neighbors >= n:
        raise ParameterError(
            f"{n_neighbors} neighbours were requested, but there are only {n} points in all; lower n_neighbors="
        )


# ---- codes -----------------------------------------------------------------------------------------------------------


def hyperplanes(seed: bytes, bits: int, dims: int) -> F64:
    """Π (L, d), standard normal, from 32 secret bytes: the same at every site."""
    from scipy.special import ndtri

    prg = Prg(hkdf(seed, bind("hyperplanes", bits.to_bytes(4, "big"), dims.to_bytes(4, "big"))))
    out = np.empty((bits, dims))
    step = max(1, (1 << 20) // max(1, dims))
    for start in range(0, bits, step):
        words = prg.uint64((min(step, bits - start), dims)) >> np.uint64(12)
        out[start : start + step] = ndtri((words.astype(np.float64) + 0.5) * 2.0**-52)
    return out


def codes(vectors: F64, planes: F64) -> U8:
    """Signs of the projections, packed (n, L/8). A zero vector has all ones, and so lies at a right angle to others."""
    if vectors.ndim != 2 or vectors.shape[1] != planes.shape[1]:
        raise DataError(f"expected rows of {planes.shape[1]} numbers, found an array of shape {vectors.shape}")
    out = np.empty((len(vectors), len(planes) // 8), np.uint8)
    step = max(1, (1 << 23) // len(planes))
    for start in range(0, len(vectors), step):
        out[start : start + step] = np.packbits(vectors[start : start + step] @ planes.T >= 0, axis=1)
    return out


def signs(packed: U8) -> F32:
    """±1 for the bits of packed codes."""
    return np.unpackbits(packed, axis=1).astype(np.float32) * np.float32(2) - np.float32(1)


def hamming(a: U8, b: U8) -> I32:
    """Distances between all rows of two sets of packed codes: (L - ab)/2, exact in float32 below 2^24."""
    bits = 8 * a.shape[1]
    right = signs(b).T
    out = np.empty((len(a), len(b)), np.int32)
    step = max(1, _BLOCK // max(1, bits, len(b)))
    for start in range(0, len(a), step):
        out[start : start + step] = (np.float32(bits) - signs(a[start : start + step]) @ right) / 2
    return out


# ---- graph -----------------------------------------------------------------------------------------------------------


def smallest(H: I32, first: int, k: int) -> I64:
    """Keys H_ij · 2^b + j of the k nearest others of rows first, first + 1, ..., ascending; H has all columns."""
    rows, n = H.shape
    keys: I64 = (H.astype(np.int64) << index_bits(n)) + np.arange(n)
    keys[np.arange(rows), first + np.arange(rows)] = np.iinfo(np.int64).max  # no edge to itself
    return np.sort(np.partition(keys, k - 1, axis=1)[:, :k], axis=1)


def nearest(packed: U8, k: int) -> I64:
    """Keys (n, k) of every point's k nearest others."""
    n = len(packed)
    out = np.empty((n, k), np.int64)
    step = max(1, _BLOCK // n)
    for start in range(0, n, step):
        out[start : start + step] = smallest(hamming(packed[start : start + step], packed), start, k)
    return out


def split_keys(keys: I64, n: int) -> tuple[I64, I64]:
    """Neighbour and distance from a key."""
    return keys & ((1 << index_bits(n)) - 1), keys >> index_bits(n)


def check_keys(keys: I64, n: int, bits: int) -> None:
    """Raise unless every row names different other points at possible distances."""
    index, distance = split_keys(keys, n)
    own = np.arange(len(keys))[:, None]
    inside = (keys >= 0) & (index < n) & (distance <= bits)
    if len(keys) != n or not inside.all() or (index == own).any() or (np.diff(np.sort(index, axis=1)) == 0).any():
        raise DataError("the neighbours that came out of the computation are not a graph; start a new run")


def adjacency(keys: I64, bits: int, power: float = 1.0) -> Any:
    """The normalised weights D^{-1/2}(A + Aᵀ)D^{-1/2} as a sparse matrix; a power sharpens the similarities."""
    from scipy import sparse

    n, k = keys.shape
    index, distance = split_keys(keys, n)
    weight = np.cos(np.pi * distance / bits)
    weight[2 * distance >= bits] = 0.0
    weight **= power
    A = sparse.csr_array((weight.reshape(-1), (np.repeat(np.arange(n), k), index.reshape(-1))), shape=(n, n))
    A.eliminate_zeros()
    W = (A + A.T).tocsr()
    W.sort_indices()
    degree = W.sum(axis=1)
    scale = np.divide(1.0, np.sqrt(degree), out=np.zeros(n), where=degree > 0)
    W.data *= scale[np.repeat(np.arange(n), np.diff(W.indptr))] * scale[W.indices]
    return W


# ---- solving ---------------------------------------------------------------------------------------------------------


def solve(W: Any, alpha: float, right: F64, tolerance: float = TOLERANCE) -> F64:
    """(I - αW)^{-1} R, every column to a relative residual of `tolerance`; so the error is below it over 1 - α."""
    A = W * -alpha
    x, r, part = np.zeros_like(right), right.copy(), np.empty_like(right)
    p = r.copy()
    rho = np.einsum("ij,ij->j", r, r)
    goal = tolerance**2 * rho
    kappa = (1 + alpha) / (1 - alpha)
    for _ in range(50 + math.ceil(math.sqrt(kappa) * math.log(2 / tolerance) * 2)):
        active = rho > goal
        if not active.any():
            return x
        q = A @ p
        q += p
        curve = np.einsum("ij,ij->j", p, q)
        step = np.divide(rho, curve, out=np.zeros_like(rho), where=active & (curve > 0))
        x += np.multiply(p, step, out=part)
        r -= np.multiply(q, step, out=q)
        new = np.einsum("ij,ij->j", r, r)
        p *= np.divide(new, rho, out=np.zeros_like(rho), where=active)
        p += r
        rho = np.where(active, new, 0.0)
    raise DataError("the propagation did not converge; lower alpha=")


def influence_sum(W: Any, alpha: float, labelled: I64) -> F64:
    """U = S 1_labelled: what all labels together do to each point; 0 where it is next to nothing."""
    ones = np.zeros((W.shape[0], 1))
    ones[labelled] = 1.0
    u: F64 = solve(W, alpha, ones)[:, 0]
    u[u < REACHED] = 0.0
    return u


def influence(
    W: Any, alpha: float, labelled: I64, columns: I64, total: F64 | None = None
) -> Iterator[tuple[slice, I32]]:
    """Blocks of the columns of S at `columns`, rows scaled by 1/u, in fixed point: (which of them, (n, block)).

    Blocks start at multiples of a fixed number of columns, so that whoever asks for the same columns gets the same.
    """
    n = W.shape[0]
    u = influence_sum(W, alpha, labelled) if total is None else total
    scale = np.divide(2.0**FRACTION, u, out=np.zeros(n), where=u > 0)
    for start in range(0, len(columns), COLUMNS):
        chosen = columns[start : start + COLUMNS]
        right = np.zeros((n, len(chosen)))
        right[chosen, np.arange(len(chosen))] = 1.0
        block = solve(W, alpha, right) * scale[:, None]
        yield slice(start, start + len(chosen)), np.rint(np.clip(block, 0.0, 2.0**FRACTION)).astype(np.int32)


def left_out(W: Any, alpha: float, labelled: I64, tested: I64) -> I32:
    """S at the rows of `tested` and the columns of `labelled` points, 0 where both are the same, in fixed point.

    A column of S does not depend on which points are labelled. So a row, times the labels, is what a point would have
    been told if its own label had been missing: every label is left out once, for the price of one solve. S is
    symmetric, so it is solved for the rows. They are scaled to add up to one.
    """
    S = np.empty((len(tested), len(labelled)))
    for start in range(0, len(tested), COLUMNS):
        chosen = tested[start : start + COLUMNS]
        right = np.zeros((W.shape[0], len(chosen)))
        right[chosen, np.arange(len(chosen))] = 1.0
        S[start : start + len(chosen)] = solve(W, alpha, right, LEFT_OUT)[labelled].T
    S[tested[:, None] == labelled] = 0.0
    total = S.sum(axis=1)
    scale = np.divide(2.0**FRACTION, total, out=np.zeros(len(S)), where=total > REACHED)
    return np.rint(np.clip(S * scale[:, None], 0.0, 2.0**FRACTION)).astype(np.int32)


def one_hot(labels: I64, n_classes: int) -> I64:
    """Rows of zeros with a one at the label; missing labels (-1) are rows of zeros."""
    out = np.zeros((len(labels), n_classes), np.int64)
    known = labels >= 0
    out[np.nonzero(known)[0], labels[known]] = 1
    return out


def decide(scores: I64, counts: I64 | None = None, near: F64 | None = None, weight: float = 0.0) -> tuple[I64, F64]:
    """Label and confidence of every row of Z: the largest class, of equal ones the first.

    With `counts`, the number of labels of each class, classes are divided by it, so that frequent ones do not win
    wherever they are near. With `near`, a second opinion in shares of the classes that it knows (columns of others are
    0), p = Z / ΣZ becomes p + weight · near, where `near` divides anew what p gives to those classes.
    """
    n_classes = scores.shape[1]
    z = scores if counts is None else scores / np.maximum(counts, 1)
    total = z.sum(axis=1)
    reached = total > 0
    p = z / np.where(reached, total, 1)[:, None]
    if near is not None and weight > 0 and near.any():
        there = near.any(axis=0)
        mixed = p + weight * np.where(there, near * p[:, there].sum(axis=1, keepdims=True), p)
        p = np.where(reached[:, None], mixed / (1 + weight), near)
        reached = np.ones(len(p), bool)
    entropy = -np.sum(p * np.log(np.where(p > 0, p, 1.0)), axis=1)
    label = np.where(reached, np.argmax(z if near is None or not weight else p, axis=1), -1)
    confidence = np.where(reached, 1.0 - entropy / math.log(n_classes), 0.0)
    return label, np.clip(confidence, 0.0, 1.0)


# ---- walks of few steps, on integers ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Walk:
    """Label propagation in few steps and without divisions, so that it can be computed on shares.

    A is 1 where j is one of the k nearest neighbours of i, B = A + Aᵀ. A point of degree d, the sum of its row of B,
    passes labels on with weight u = ⌊HUB k / d⌋, at most `MOST`. A point with d > HUB k is a hub: it receives labels
    and passes none on.

        Z_0 = u ∘ Y,   Z_{t+1} = u ∘ (B Z_t),   R = Σ_t c_{T-t} Z_t,   c_s = ⌊(3.6 k/α)^s⌋

    So R / c_T is u ∘ Σ_t (α/3.6k)^t (Bu)^t Y: propagation with columns divided by degrees, roughly. A row of uB adds up
    to at most HUB k. So no entry of R exceeds `reach`, whatever the graph is: in a ring of `ring_bits` nothing wraps,
    and nothing has to be truncated. A hub gets the votes of its neighbours, from as many steps as fit.

    A second walk starts from the labels that the first one gives, and from the given ones where there are some. It
    brings labels as far as many more steps would, in numbers that stay small.
    """

    n_neighbors: int  # k
    alpha: float
    steps: int  # T

    @classmethod
    def of(cls, n_neighbors: int, alpha: float, most: int = STEPS) -> Walk:
        """The most steps, up to `most`, whose scores fit into `RING_BITS`."""
        walks = (cls(n_neighbors, alpha, steps) for steps in range(most, 0, -1))
        fitting = next((walk for walk in walks if walk.ring_bits <= RING_BITS), None)
        if fitting is None:
            raise ParameterError(
                f"'n_neighbors' is {n_neighbors} and 'alpha' {alpha:g}: no step of a walk fits; lower n_neighbors, or"
                " raise alpha"
            )
        return fitting

    def coefficient(self, power: int) -> int:
        """c_s in whole numbers: the same on every machine."""
        return (18 * self.n_neighbors * PARTS) ** power // (5 * max(1, round(self.alpha * PARTS))) ** power

    def reach(self, steps: int) -> int:
        """What no entry of a sum over so many steps exceeds, hubs left out."""
        grows = HUB * self.n_neighbors
        return sum(MOST * self.coefficient(steps - t) * grows**t for t in range(steps + 1))

    @property
    def bounds(self) -> tuple[int, ...]:
        """Column sums of A up to which a point has weight 1, 2, ... at least."""
        return tuple(HUB * self.n_neighbors // weight - self.n_neighbors for weight in range(1, MOST + 1))

    @property
    def ring_bits(self) -> int:
        return self.reach(self.steps).bit_length()

    def hub_steps(self, n: int, bits: int) -> int:
        """Steps of the votes that hubs get, in a graph of n points and a ring of so many bits; -1: none."""
        fits = (
            s
            for s in range(self.steps - 1, -1, -1)
            if (n + self.n_neighbors) * self.reach(s) + self.coefficient(s + 1) < 1 << bits
        )
        return next(fits, -1)


def walk_twice(neighbours: I64, labels: I64, n_classes: int, how: Walk, bits: int | None = None) -> I64:
    """R (n, C) of the second walk of all points, from their neighbours (n, k) and labels (-1: none)."""
    first, _ = decide_walk(walk(neighbours, labels, n_classes, how, bits))
    return walk(neighbours, np.where(labels >= 0, labels, first), n_classes, how, bits)


def walk(neighbours: I64, labels: I64, n_classes: int, how: Walk, bits: int | None = None) -> I64:
    """R (n, C) of one walk, in a ring of so many bits; with fewer bits than it needs, hubs get no votes."""
    from scipy import sparse

    n, k = neighbours.shape
    A = sparse.csr_array((np.ones(n * k, np.int64), (np.repeat(np.arange(n), k), neighbours.reshape(-1))), shape=(n, n))
    B, degree = A + A.T, np.asarray(A.sum(axis=0)).reshape(-1)
    u: I64 = np.stack([degree <= bound for bound in how.bounds], axis=1).sum(axis=1, keepdims=True)
    Y = one_hot(labels, n_classes)
    last = how.hub_steps(n, how.ring_bits if bits is None else bits)
    Z = u * Y
    R, hubs = how.coefficient(how.steps) * Z, how.coefficient(last + 1) * Y
    for t in range(how.steps):
        votes = B @ Z
        Z = u * votes
        R += how.coefficient(how.steps - t - 1) * Z
        hubs += (how.coefficient(last - t) if t <= last else 0) * votes
    return np.where(u > 0, R, hubs)


def decide_walk(scores: I64) -> tuple[I64, I64]:
    """Label of every row of R, -1 where no label arrives, and its part of the row in eighths, rounded down."""
    total, most = scores.sum(axis=1), scores.max(axis=1)
    eighth = total >> 3
    level = sum((most >= j * eighth).astype(np.int64) for j in range(1, LEVELS))
    return np.where(total > 0, scores.argmax(axis=1), -1), np.where(total > 0, level, 0)


def level_confidence(label: I64, level: I64, n_classes: int) -> F64:
    """Confidence from the part of the largest class, in eighths: 0 for an even split, near 1 for all of it."""
    share = (level + 0.5) / LEVELS
    sure = np.clip((share - 1 / n_classes) / (1 - 1 / n_classes), 0.0, 1.0)
    return np.where(label >= 0, sure, 0.0)


# ---- the whole of it, in the clear -----------------------------------------------------------------------------------


def propagate(
    packed: U8,
    labels: I64,
    *,
    n_classes: int,
    n_neighbors: int = 10,
    alpha: float = 0.99,
    power: float = 1.0,
    balance: bool = False,
    exact: bool = True,
    sites: I64 | None = None,
) -> Propagation:
    """Labels for all points from those of some: what the protocols compute between parties, in the clear.

    Parameters
    ----------
    packed
        Codes of all points (n, L/8), site after site.
    labels
        Classes 0 … C - 1, and -1 where the label is missing.
    power
        Of the similarities, 1 in the paper: a larger one trusts near neighbours more than far ones.
    balance
        Divide the score of every class by the number of its labels.
    exact
        Solve for every labelled point and round as the protocols do, so that the result is theirs to the last bit.
        Without it, solve for the C classes at once: far faster, and the same up to the rounding.
    sites
        Which site a point belongs to. The protocols solve site by site; with it, `exact` takes the same blocks.
    """
    n, bits = len(packed), 8 * packed.shape[1]
    check_sizes(n, bits, n_neighbors, alpha, power)
    W = adjacency(nearest(packed, n_neighbors), bits, power)
    labelled = np.flatnonzero(labels >= 0)
    if not len(labelled):
        raise DataError("no point has a label, so there is nothing to propagate")
    Y = one_hot(labels, n_classes)
    u = influence_sum(W, alpha, labelled)
    Z = np.zeros((n, n_classes), np.int64)
    if exact:
        for site in np.unique(sites) if sites is not None else (None,):
            mine = labelled if site is None else labelled[sites[labelled] == site]  # type: ignore[index]
            for cut, block in influence(W, alpha, labelled, mine, u):
                Z += block @ Y[mine[cut]]
    else:
        scale = np.divide(2.0**FRACTION, u, out=np.zeros(n), where=u > 0)
        Z = np.rint(np.clip(solve(W, alpha, Y.astype(np.float64)), 0.0, None) * scale[:, None]).astype(np.int64)
    return Propagation(*decide(Z, Y.sum(axis=0) if balance else None), Z)
