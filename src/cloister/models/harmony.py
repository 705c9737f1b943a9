"""Harmony at one party: clusters of its cells, and how its batches are moved until the clusters mix.

    R_ik  ∝ exp(-2 (1 - z_i·y_k) / σ) · ((E_kb + 1) / (O_kb + 1))^θ     z = x / ‖x‖, x moved as far as it is; O_kb mass
            of cluster k in batch b, without the cells that are assigned; E_kb = N_b / N · Σ_b O_kb
    n_b   = Σ_i R_ik, s_b = Σ_i R_ik x_i, λ_b = ridge · E_kb             x as it was at first
    w_k   = Σ_b λ_b s_b / (n_b + λ_b) / Σ_b λ_b n_b / (n_b + λ_b)       the anchor of cluster k, from all batches
    W_kb  = (s_b - n_b w_k) / (n_b + λ_b)                               and cells move to x_i - Σ_k R_ik W_kb

This is the ridge regression of Harmony, solved batch by batch: given the anchors, a batch needs nobody else. So cells
that come later are placed along the centroids, masses and anchors of a run (`replay`, `replay_new_batch`), and nobody
else moves. R is never kept as a whole: what is needed of it are sums.

A party shows nothing of a cluster in which it has fewer than `least` cells, or fewer than `least_donors` donors.
Batches below that are put together for the anchors, and shown if they suffice then.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import scipy.sparse

from cloister.arrays import F64, I64, Bits, Index
from cloister.errors import ParameterError

CHUNK = 1 << 21  # assignments that are computed at a time
SMALL = 1e-3  # λ at least


@dataclass(frozen=True, slots=True)
class Settings:
    clusters: int = 0  # K; 0: a thirtieth of the cells, 2 to 100
    sigma: float = 0.1  # σ
    theta: float = 2.0  # θ
    ridge: float = 0.2  # of λ
    rounds: int = 5
    updates: int = 4  # of all assignments, per round
    blocks: int = 5  # of cells, per update
    least: int = 5
    least_donors: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.clusters < 0 or self.clusters == 1 or min(self.rounds, self.updates, self.blocks) < 1:
            raise ParameterError("Harmony needs at least two clusters, one round, one update and one block")
        if not (self.sigma > 0 and self.ridge > 0 and self.theta >= 0):
            raise ParameterError("Harmony needs sigma and ridge above 0, and a theta that is not negative")

    def lam(self, expected: F64) -> F64:
        return np.asarray(np.maximum(self.ridge * expected, SMALL))

    def n_clusters(self, cells: int) -> int:
        return self.clusters or int(min(100, max(2, cells // 30)))


@dataclass(frozen=True)
class Trail:
    """What all parties know of a run: where clusters lay in every round."""

    cells: int  # N
    centroids: F64  # Y, (rounds, K, d)
    masses: F64  # Σ_b O_kb, (rounds, K)
    anchors: F64  # w, (rounds, K, d)
    known: Bits  # (rounds, K): clusters that somebody showed an anchor of


@dataclass(frozen=True)
class Shifts:
    """How the batches of one party were moved in every round."""

    penalties: F64  # ((E + 1) / (O + 1))^θ, (rounds, batches, K)
    shifts: F64  # W, (rounds, batches, K, d)


def unit(x: F64) -> F64:
    return np.asarray(x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12))


def assignments(s: Settings, z: F64, Y: F64, penalty: F64 | None) -> F64:
    """R, (n, K); `penalty` of each cell's batch, (n, K)."""
    a = (2 / s.sigma) * (z @ Y.T)
    a -= a.max(axis=1, keepdims=True)
    np.exp(a, out=a)
    if penalty is not None:
        a *= penalty
    a /= a.sum(axis=1, keepdims=True)
    return np.asarray(a)


def corrected(x: F64, R: F64, W: F64, batch: I64) -> F64:
    """Cells at x - Σ_k R_ik W_kb; W is (batches, K, d)."""
    moved = x.copy()
    for b in np.unique(batch):
        moved[batch == b] -= R[batch == b] @ W[b]
    return moved


def shrunk(n: F64, s: F64, lam: F64) -> F64:
    """λ / (n + λ) times s, and times n, (K, d + 1)."""
    return np.asarray((lam / (n + lam))[:, None] * np.concatenate([s, n[:, None]], axis=1))


def shifts_of(n: F64, s: F64, lam: F64, anchors: F64, known: Bits) -> F64:
    """W, (batches, K, d); nothing where nobody showed an anchor."""
    W = (s - n[:, :, None] * anchors) / (n + lam)[:, :, None]
    return np.where(known[:, None], W, 0.0)


class Part:
    """The cells of one party, and where they stand; the coordinator has none."""

    def __init__(
        self, s: Settings, x: F64, batch: I64, batches: int, donor: I64 | None = None, seed: tuple[int, ...] = ()
    ) -> None:
        self.s, self.x, self.batch, self.batches = s, x, batch, batches
        pairs = np.stack([batch, np.zeros_like(batch) if donor is None else donor])
        kinds, group = np.unique(pairs, axis=1, return_inverse=True)
        self.group: Index = np.ravel(group)  # cells of one donor in one batch are a group
        self.batch_of, self.donor_of = kinds  # (G,)
        self.sizes = np.bincount(batch, minlength=batches).astype(np.float64)  # N_b
        order = np.random.default_rng([s.seed & 0xFFFFFFFF, *seed]).permutation(len(x))
        self.cells_of = np.array_split(order, s.blocks)
        self.moved = x.copy()

    def start(self, K: int) -> None:
        self.mass = np.zeros((self.s.blocks, len(self.batch_of), K))  # ΣR, by block and group
        self.near = np.zeros((self.s.blocks, K, self.x.shape[1]))  # ΣR z, by block

    def pieces(self, Y: F64, penalty: F64 | None, block: int) -> Iterator[tuple[Index, F64, F64]]:
        """Some cells of a block at a time: which, their z, their R."""
        cells = self.cells_of[block]
        for at in np.array_split(cells, max(1, math.ceil(len(cells) * len(Y) / CHUNK))):
            z = unit(self.moved[at])
            yield at, z, assignments(self.s, z, Y, None if penalty is None else penalty[self.batch[at]])

    def assign(self, Y: F64, penalty: F64 | None, blocks: Iterable[int] | None = None) -> None:
        """R of the cells of these blocks, or of all."""
        for j in range(self.s.blocks) if blocks is None else blocks:
            self.mass[j], self.near[j] = 0.0, 0.0
            for at, z, R in self.pieces(Y, penalty, j):
                self.mass[j] += _one_hot(self.group[at], len(self.batch_of)) @ R
                self.near[j] += R.T @ z

    def regress(self, Y: F64, penalty: F64) -> F64:
        """R of all cells, and s_b, (batches, K, d)."""
        s = np.zeros((self.batches, len(Y), self.x.shape[1]))
        for j in range(self.s.blocks):
            self.mass[j] = 0.0
            for at, _, R in self.pieces(Y, penalty, j):
                self.mass[j] += _one_hot(self.group[at], len(self.batch_of)) @ R
                for b in np.unique(self.batch[at]):
                    mine = self.batch[at] == b
                    s[b] += R[mine].T @ self.x[at[mine]]
        return s

    def move(self, Y: F64, penalty: F64, W: F64) -> None:
        """Cells to x - Σ_k R_ik W_kb, with the R of `regress`."""
        for j in range(self.s.blocks):
            self.near[j] = 0.0
            for at, _, R in self.pieces(Y, penalty, j):
                self.moved[at] = corrected(self.x[at], R, W, self.batch[at])
                self.near[j] += R.T @ unit(self.moved[at])

    def mass_by_group(self, without: int | None = None) -> F64:
        """(G, K), of all cells or of all but those of one block."""
        total: F64 = self.mass.sum(axis=0)
        return total if without is None else np.maximum(total - self.mass[without], 0.0)

    def by_batch(self, mass: F64) -> F64:
        """(batches, K) from (G, K)."""
        return np.asarray(_one_hot(self.batch_of, self.batches) @ mass)

    def shown(self, mass: F64) -> Bits:
        """Clusters in which these masses (G, K) are of enough cells, and of enough donors, (K,)."""
        total = mass.sum(axis=0)
        enough = (total >= self.s.least) & (total > 0)
        if self.s.least_donors:
            people = _one_hot(self.donor_of, int(self.donor_of.max(initial=-1)) + 1) @ mass
            enough &= np.minimum(people, 1.0).sum(axis=0) >= self.s.least_donors
        return np.asarray(enough)

    def expected(self, cells: int, mass: F64, total: F64) -> F64:
        """E from own masses (G, K) and those that all parties showed, (batches, K)."""
        hidden = np.where(self.shown(mass), 0.0, mass.sum(axis=0))
        return np.outer(self.sizes / cells, total + hidden)

    def penalty(self, cells: int, mass: F64, total: F64) -> F64:
        """((E + 1) / (O + 1))^θ; none in clusters that nobody shows, (batches, K)."""
        E = self.expected(cells, mass, total)
        return np.where(total > 0, ((E + 1) / (self.by_batch(mass) + 1)) ** self.s.theta, 1.0)

    def anchor_sums(self, mass: F64, s: F64, lam: F64) -> F64:
        """Σ_b of `shrunk`, over the batches that may be shown, and over the others as one, (K, d + 1)."""
        n, sums = self.by_batch(mass), np.zeros((mass.shape[1], self.x.shape[1] + 1))
        rest, rest_s, rest_lam = mass.copy(), np.zeros(s.shape[1:]), np.full(mass.shape[1], SMALL)
        for b in range(self.batches):
            mine = (self.batch_of == b)[:, None]
            alone = self.shown(np.where(mine, mass, 0.0))
            sums += alone[:, None] * shrunk(n[b], s[b], lam[b])
            rest = np.where(mine & alone, 0.0, rest)
            rest_s += ~alone[:, None] * s[b]
            rest_lam += ~alone * lam[b]
        return sums + self.shown(rest)[:, None] * shrunk(rest.sum(axis=0), rest_s, rest_lam)


def _one_hot(codes: Index | I64, kinds: int) -> scipy.sparse.csr_matrix:
    return scipy.sparse.csr_matrix((np.ones(len(codes)), (codes, np.arange(len(codes)))), shape=(kinds, len(codes)))


# ---- cells that come later -------------------------------------------------------------------------------------------


def replay(s: Settings, trail: Trail, own: Shifts, x: F64, batch: I64) -> F64:
    """Cells of batches that took part, each where the run would have put it."""
    out = x.copy()
    for at in np.array_split(np.arange(len(x)), max(1, math.ceil(len(x) * trail.masses.shape[1] / CHUNK))):
        for Y, penalty, W in zip(trail.centroids, own.penalties, own.shifts, strict=True):
            R = assignments(s, unit(out[at]), Y, penalty[batch[at]])
            out[at] = corrected(x[at], R, W, batch[at])
    return out


def replay_new_batch(s: Settings, trail: Trail, x: F64) -> F64:
    """Cells of a batch that took no part, mixed with the others as these lay in every round."""
    part = Part(s, x, np.zeros(len(x), np.int64), 1)
    cells = trail.cells + len(x)
    for Y, masses, anchors, known in zip(trail.centroids, trail.masses, trail.anchors, trail.known, strict=True):

        def penalty(mass: F64, masses: F64 = masses) -> F64:
            E = len(x) / cells * (masses + mass.sum(axis=0))
            return np.asarray(((E + 1) / (mass + 1)) ** s.theta)

        part.start(len(Y))
        part.assign(Y, None)
        for _ in range(s.updates):
            for j in range(s.blocks):
                part.assign(Y, penalty(part.mass_by_group(j)), [j])
        settled = penalty(part.mass_by_group())
        sums = part.regress(Y, settled)
        n = part.mass_by_group()
        lam = s.lam(len(x) / cells * (masses + n.sum(axis=0)))[None]
        part.move(Y, settled, shifts_of(n, sums, lam, anchors, known))
    return part.moved
