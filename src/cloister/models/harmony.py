"""Harmony at one party: clusters of points, and how its batches are moved until the clusters mix.

    R_ik  ∝ exp(-2 (1 - z_i·y_k) / σ) p_kb                              z = x / ‖x‖, x moved as far as it is
    p_kb  = ((2 E_kb + 1) / (O_kb + E_kb + 1))^θ                        O_kb = Σ_i m_i R_ik over batch b, of points with
            m_i cells each; E_kb = N_b / N · T_k, T_k the mass of cluster k over all parties
    n_b   = Σ_i m_i R_ik, s_b = Σ_i m_i R_ik x_i, λ_b = ridge · E_kb    x as it was at first
    w_k   = Σ_b λ_b s_b / (n_b + λ_b) / Σ_b λ_b n_b / (n_b + λ_b)       the anchor of cluster k, from all batches
    W_kb  = (s_b - n_b w_k) / (n_b + λ_b)                               and points move to x_i - Σ_k R_ik W_kb

This is the ridge regression of Harmony, solved batch by batch: given the anchors, a batch needs nobody else. So cells
that come later are placed along the centroids, masses and anchors of a run (`replay`, `replay_new_batch`), and nobody
else moves.

The penalty p depends on O, and O on p. Given T, a party solves both without anybody else (`Points.balance`): log p
goes a part 2 / (2 + θ) of the way to its formula, again and again. Where O = E, the formula answers a change of log p
by at most -θ / 2, so that a step overshoots at no θ. Block after block with the whole penalty, as in [KMF+19],
oscillates with few blocks and a large θ.

A party has points of two kinds. Its groups are disjoint sets of similar cells of one batch, each above the party's
thresholds (`Rows.similar`), and each a point at its clipped mean. All that other parties ever receive is computed from
these. Its cells are moved by the same formulas from public centroids, masses and anchors, and no sum over them leaves.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from cloister.arrays import F64, I64, Bits, Index
from cloister.disclosure import Rows, SimilarGroups, Thresholds
from cloister.errors import ParameterError

CHUNK = 1 << 21  # assignments that are computed at a time
SMALL = 1e-3  # λ at least
TINY = 1e-300  # of a sum of likelihoods
STORED = 1 << 25  # likelihoods that are stored; of more, they are computed anew where they are needed
EVERYTHING = Thresholds(1, 1)  # every cell is a group
STEPS, OWN_STEPS = 5, 8  # of `balance`, of groups at every mass and of cells at the last one of a round


@dataclass(frozen=True, slots=True)
class Settings:
    clusters: int = 0  # K; 0: a twentieth of the cells of a mean site, 2 to 100
    sigma: float = 0.1  # σ
    theta: float = 2.0  # θ
    ridge: float = 0.06  # of λ
    rounds: int = 3
    updates: int = 1  # of centroids, per round
    sweeps: int = 3  # of masses, per update
    donors: bool = False  # whether donors are named, and count
    seed: int = 0

    def __post_init__(self) -> None:
        if self.clusters < 0 or self.clusters == 1 or min(self.rounds, self.updates, self.sweeps) < 1:
            raise ParameterError("Harmony needs at least two clusters, one round, one update and one sweep")
        if not (self.sigma > 0 and self.ridge > 0 and self.theta >= 0):
            raise ParameterError("Harmony needs sigma and ridge above 0, and a theta that is not negative")

    def lam(self, expected: F64) -> F64:
        return np.asarray(np.maximum(self.ridge * expected, SMALL))

    def n_clusters(self, cells: int, sites: int) -> int:
        """So many that a site of mean size has about two groups of ten in a mean cluster."""
        return self.clusters or int(min(100, max(2, cells // (20 * sites))))


@dataclass(frozen=True)
class Trail:
    """What all parties know of a run: where clusters lay in every round."""

    cells: int  # N
    centroids: F64  # Y, (rounds, K, d)
    masses: F64  # T, (rounds, K)
    anchors: F64  # w, (rounds, K, d)
    known: Bits  # (rounds, K): clusters that somebody showed an anchor of


@dataclass(frozen=True)
class Shifts:
    """How the batches of one party were moved in every round."""

    penalties: F64  # p, (rounds, batches, K)
    shifts: F64  # W, (rounds, batches, K, d)


def unit(x: F64) -> F64:
    return np.asarray(x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12))


def assignments(s: Settings, z: F64, Y: F64, penalty: F64 | None) -> F64:
    """R, (n, K); `penalty` of each cell's batch, (n, K)."""
    a = likelihoods(s, z, Y)
    if penalty is not None:
        a *= penalty
    a /= np.maximum(a.sum(axis=1, keepdims=True), TINY)
    return a


def likelihoods(s: Settings, z: F64, Y: F64) -> F64:
    """exp(-2 (1 - z·y) / σ), up to a factor of each row, (n, K)."""
    a = (2 / s.sigma) * (z @ Y.T)
    a -= a.max(axis=1, keepdims=True)
    return np.asarray(np.exp(a, out=a))


def shrunk(n: F64, s: F64, lam: F64) -> F64:
    """λ / (n + λ) times s, and times n, (K, d + 1)."""
    return np.asarray((lam / (n + lam))[:, None] * np.concatenate([s, n[:, None]], axis=1))


def shifts_of(n: F64, s: F64, lam: F64, anchors: F64, known: Bits) -> F64:
    """W, (batches, K, d); nothing where nobody showed an anchor."""
    W = (s - n[:, :, None] * anchors) / (n + lam)[:, :, None]
    return np.where(known[:, None], W, 0.0)


def unaided(n: F64, lam: F64, weight: F64) -> F64:
    """How much farther a batch moves towards an anchor that it adds nothing to, (batches, K).

    With its part the anchor would lie nearer to it, by its share of the weight, and the other batches would come nearer
    as well. What is left of the distance between them is the same in both cases.
    """
    left = lam / (n + lam)
    less = left * np.maximum(weight, 0.0) / np.maximum(weight + left * n, SMALL)
    return np.asarray(np.where(n > SMALL, (1 - less) / np.maximum(1 - left, SMALL), 1.0))


Piece = tuple[int, Index, F64]  # a batch, some of its points, their likelihoods


class Points:
    """Points of one party, each standing for so many cells."""

    def __init__(self, s: Settings, x: F64, size: F64, batch: I64, batches: int) -> None:
        self.s, self.x, self.size, self.batch, self.batches = s, x, size, batch, batches
        self.sizes = np.bincount(batch, size, minlength=batches).astype(np.float64)  # N_b
        self.moved = x.copy()
        self.Y = np.zeros((0, x.shape[1]))
        self.stored: list[Piece] | None = None

    def look(self, Y: F64) -> None:
        """Towards these centroids, from where the points lie now."""
        self.Y, self.stored = Y, None
        if len(self.x) * len(Y) <= STORED:
            self.stored = list(self._pieces())

    def pieces(self) -> Iterator[Piece]:
        return self._pieces() if self.stored is None else iter(self.stored)

    def _pieces(self) -> Iterator[Piece]:
        for b in range(self.batches):
            here = np.flatnonzero(self.batch == b)
            for at in np.array_split(here, max(1, math.ceil(len(here) * len(self.Y) / CHUNK))):
                if len(at):
                    yield b, at, likelihoods(self.s, unit(self.moved[at]), self.Y)

    def mass(self, p: F64) -> F64:
        """O, (batches, K), at penalties p, (batches, K)."""
        total = np.zeros_like(p)
        for b, at, a in self.pieces():
            total[b] += p[b] * ((self.size[at] / np.maximum(a @ p[b], TINY)) @ a)
        return total

    def balance(self, cells: int, total: F64, p: F64, steps: int) -> F64:
        """Penalties at the masses `total` of all parties, in so many steps from p."""
        E, log = np.outer(self.sizes / cells, total), np.log(p)
        for _ in range(steps):
            wanted = self.s.theta * np.log((2 * E + 1) / (self.mass(np.exp(log)) + E + 1))
            log += 2 / (2 + self.s.theta) * (wanted - log)
        return np.asarray(np.exp(log))

    def _weighted(self, p: F64) -> Iterator[tuple[int, Index, F64]]:
        """R times the size of each point, some points at a time."""
        for b, at, a in self.pieces():
            R = a * p[b]
            yield b, at, R * (self.size[at] / np.maximum(R.sum(axis=1), TINY))[:, None]

    def near(self, p: F64) -> F64:
        """Σ m R z, (K, d)."""
        total = np.zeros_like(self.Y)
        for _, at, R in self._weighted(p):
            total += R.T @ unit(self.moved[at])
        return total

    def sums(self, p: F64) -> tuple[F64, F64]:
        """n_b, (batches, K), and s_b, (batches, K, d)."""
        n, s = np.zeros_like(p), np.zeros((*p.shape, self.x.shape[1]))
        for b, at, R in self._weighted(p):
            n[b] += R.sum(axis=0)
            s[b] += R.T @ self.x[at]
        return n, s

    def expected(self, cells: int, total: F64) -> F64:
        """E, (batches, K)."""
        return np.outer(self.sizes / cells, total)

    def move(self, p: F64, W: F64) -> None:
        for b, at, a in self.pieces():
            R = a * p[b]
            R /= np.maximum(R.sum(axis=1, keepdims=True), TINY)
            self.moved[at] = self.x[at] - R @ W[b]


class Part:
    """The groups of one party, which all its sums are over, and its cells; the coordinator has neither."""

    def __init__(self, s: Settings, x: F64, batch: I64, batches: int, rows: Rows | None = None) -> None:
        rows = Rows(len(x), None, EVERYTHING) if rows is None else rows
        self.s, self.rows, self.groups = s, rows, groups_of(x, batch, rows)
        kind = np.zeros(len(self.groups), np.int64)
        inside = self.groups.codes >= 0
        kind[self.groups.codes[inside]] = batch[inside]
        means = self.groups.clipped_means(x)
        self.shown = Points(s, means, self.groups.cells.astype(np.float64), kind, batches)
        self.cells = Points(s, x, np.ones(len(x)), batch, batches)

    @property
    def apart(self) -> Bits:
        """Batches that add nothing, because they have too few cells or donors for a group."""
        none: Bits = self.shown.sizes == 0
        return none


def groups_of(x: F64, batch: I64, rows: Rows) -> SimilarGroups:
    """Similar cells of one batch; with thresholds of 1, every cell is a group."""
    if rows.thresholds != EVERYTHING:
        return rows.similar(x, within=batch)
    each = np.ones(len(x), np.int64)
    return SimilarGroups(np.arange(len(x)), each, None if rows.donor is None else each)


# ---- cells that come later -------------------------------------------------------------------------------------------


def replay(s: Settings, trail: Trail, own: Shifts, x: F64, batch: I64) -> F64:
    """Cells of batches that took part, each where the run would have put it."""
    out = x.copy()
    for at in np.array_split(np.arange(len(x)), max(1, math.ceil(len(x) * trail.masses.shape[1] / CHUNK))):
        for Y, penalty, W in zip(trail.centroids, own.penalties, own.shifts, strict=True):
            R = assignments(s, unit(out[at]), Y, penalty[batch[at]])
            for b in np.unique(batch[at]):
                mine = batch[at] == b
                out[at[mine]] = x[at[mine]] - R[mine] @ W[b]
    return out


def replay_new_batch(s: Settings, trail: Trail, x: F64) -> F64:
    """Cells of a batch that took no part, mixed with the others as these lay in every round."""
    new = Points(s, x, np.ones(len(x)), np.zeros(len(x), np.int64), 1)
    cells, p = trail.cells + len(x), np.ones((1, trail.masses.shape[1]))
    for Y, masses, anchors, known in zip(trail.centroids, trail.masses, trail.anchors, trail.known, strict=True):
        new.look(Y)
        for _ in range(s.updates * s.sweeps):
            p = new.balance(cells, masses + new.mass(p)[0], p, STEPS)
        n, sums = new.sums(p)
        lam = s.lam(new.expected(cells, masses + n[0]))
        new.move(p, shifts_of(n, sums, lam, anchors, known))
    return new.moved
