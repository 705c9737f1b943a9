"""Harmony at one party: clusters of its cells, and how its batches are moved until the clusters mix.

    R_ik  ∝ exp(-2 (1 - z_i·y_k) / σ) · ((E_kb + 1) / (O_kb + 1))^θ     z = x / ‖x‖, x moved as far as it is; O_kb mass
            of cluster k in batch b, without the cells that are assigned; E_kb = N_b / N · Σ_b O_kb
    n_b   = Σ_i R_ik, s_b = Σ_i R_ik x_i, λ_b = ridge · E_kb             x as it was at first
    w_k   = Σ_b λ_b s_b / (n_b + λ_b) / Σ_b λ_b n_b / (n_b + λ_b)       the anchor of cluster k, from all batches
    W_kb  = (s_b - n_b w_k) / (n_b + λ_b)                               and cells move to x_i - Σ_k R_ik W_kb

This is the ridge regression of Harmony, solved batch by batch: given the anchors, a batch needs nobody else. So cells
that come later are placed along the centroids, masses and anchors of a run (`replay`, `replay_new_batch`), and nobody
else moves.

A party may show nothing of a cluster whose sum rests on too few of its cells or donors: the criterion is the leverage
of R in the cluster (`disclosure`). Such a cluster is closed at this party. What it shows are sums of R', which is R
normalised over its open clusters. The masses that it shows add up to its number of cells, so closed clusters have no
complement. Its own cells move by R. A batch that adds nothing to an anchor moves farther itself (`unaided`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import scipy.sparse

from cloister.arrays import F64, I64, Array, Bits, Index
from cloister.disclosure import Contribution, Rows, Thresholds, effective_sizes
from cloister.errors import ParameterError

CHUNK = 1 << 21  # assignments that are computed at a time
SMALL = 1e-3  # λ at least
STORED = 1 << 25  # entries of R that are stored; of more, R is computed anew where it is needed
EVERYTHING = Thresholds(1, 1)  # closes no cluster


@dataclass(frozen=True, slots=True)
class Settings:
    clusters: int = 0  # K; 0: a twentieth of the cells of a mean site, 2 to 100
    sigma: float = 0.1  # σ
    theta: float = 2.0  # θ
    ridge: float = 0.2  # of λ
    rounds: int = 5
    updates: int = 4  # of all assignments, per round
    blocks: int = 5  # of cells, per update
    least: int = 10  # smallest effective number of a site's cells in a cluster, as agreed
    least_donors: int = 0  # of its donors; 0 where these are not named
    seed: int = 0

    def __post_init__(self) -> None:
        if self.clusters < 0 or self.clusters == 1 or min(self.rounds, self.updates, self.blocks) < 1:
            raise ParameterError("Harmony needs at least two clusters, one round, one update and one block")
        if not (self.sigma > 0 and self.ridge > 0 and self.theta >= 0):
            raise ParameterError("Harmony needs sigma and ridge above 0, and a theta that is not negative")

    def lam(self, expected: F64) -> F64:
        return np.asarray(np.maximum(self.ridge * expected, SMALL))

    def n_clusters(self, cells: int, sites: int) -> int:
        """So many that a site of mean size has twice the smallest group in a mean cluster."""
        return self.clusters or int(min(100, max(2, cells // (20 * sites))))


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


def unaided(n: F64, lam: F64, weight: F64) -> F64:
    """How much farther a batch moves towards an anchor that it adds nothing to, (batches, K).

    With its part the anchor would lie nearer to it, by its share of the weight, and the other batches would come nearer
    as well. What is left of the distance between them is the same in both cases.
    """
    left = lam / (n + lam)
    less = left * np.maximum(weight, 0.0) / np.maximum(weight + left * n, SMALL)
    return np.asarray(np.where(n > SMALL, (1 - less) / np.maximum(1 - left, SMALL), 1.0))


Piece = tuple[Index, F64, F64]  # some cells: which, their z, their R


class Part:
    """The cells of one party, and where they stand; the coordinator has none."""

    def __init__(
        self,
        s: Settings,
        x: F64,
        batch: I64,
        batches: int,
        donor: I64 | None = None,
        seed: tuple[int, ...] = (),
        thresholds: Thresholds = EVERYTHING,
    ) -> None:
        self.s, self.x, self.batch, self.batches = s, x, batch, batches
        self.rows = Rows(len(x), donor, thresholds)
        pairs = np.stack([batch, np.zeros_like(batch) if donor is None else donor])
        kinds, group = np.unique(pairs, axis=1, return_inverse=True)
        self.group: Index = np.ravel(group)  # cells of one donor in one batch are a group
        self.batch_of, self.donor_of = kinds  # (G,)
        self.sizes = np.bincount(batch, minlength=batches).astype(np.float64)  # N_b
        order = np.random.default_rng([s.seed & 0xFFFFFFFF, *seed]).permutation(len(x))
        self.cells_of = np.array_split(order, s.blocks)
        self.moved = x.copy()

    def start(self, K: int) -> None:
        none = np.zeros((self.s.blocks, self.batches, K))
        self.mass = np.zeros((self.s.blocks, len(self.batch_of), K))  # ΣR, by block and group
        self.told = np.zeros_like(self.mass)  # ΣR', which is R normalised over the clusters that are open
        self.squares, self.peak = none, none.copy()  # ΣR'² and max R', by block and batch
        self.near = np.zeros((self.s.blocks, K, self.x.shape[1]))  # ΣR' z, by block
        self.open: Bits = np.ones(K, bool)  # clusters that this party may show
        self.how: list[tuple[F64, F64 | None]] = [(self.near[0], None)] * self.s.blocks  # Y and penalty, by block
        self.stored: list[list[Piece] | None] = [[] for _ in range(self.s.blocks)]

    def pieces(self, Y: F64, penalty: F64 | None, block: int) -> Iterator[Piece]:
        """Some cells of a block at a time."""
        cells = self.cells_of[block]
        for at in np.array_split(cells, max(1, math.ceil(len(cells) * len(Y) / CHUNK))):
            z = unit(self.moved[at])
            yield at, z, assignments(self.s, z, Y, None if penalty is None else penalty[self.batch[at]])

    def assign(self, Y: F64, penalty: F64 | None, blocks: Iterable[int] | None = None) -> None:
        """R of the cells of these blocks; or of all, and then all clusters are open at first."""
        if blocks is None:
            self.open[:] = True
        for j in range(self.s.blocks) if blocks is None else blocks:
            self.how[j], self.mass[j] = (Y, penalty), 0.0
            self.stored[j] = list(self.pieces(Y, penalty, j)) if len(self.x) * len(Y) <= STORED else None
            for at, _, R in self.of_block(j):
                self.mass[j] += _one_hot(self.group[at], len(self.batch_of)) @ R
            self._show(j, self.of_block(j))

    def of_block(self, j: int) -> Iterable[Piece]:
        """R of a block as it was assigned last."""
        stored = self.stored[j]
        return self.pieces(*self.how[j], j) if stored is None else stored

    def _show(self, j: int, pieces: Iterable[Piece]) -> None:
        """R' of a block, and its sums."""
        self.told[j], self.near[j], self.squares[j], self.peak[j] = 0.0, 0.0, 0.0, 0.0
        for at, z, R in pieces:
            shown = R * self.open
            total = shown.sum(axis=1, keepdims=True)
            shown /= np.where(total > 0, total, 1.0)  # all 0 where every cluster is closed
            self.told[j] += _one_hot(self.group[at], len(self.batch_of)) @ shown
            self.near[j] += shown.T @ z
            for b in np.unique(self.batch[at]):
                mine = shown[self.batch[at] == b]
                self.squares[j, b] += np.square(mine).sum(axis=0)
                self.peak[j, b] = np.maximum(self.peak[j, b], mine.max(axis=0))

    # ---- what may be shown -------------------------------------------------------------------------------------------

    def contribution(self, sums: Array, without: int | None = None) -> Contribution:
        """Sums over R' of all cells, or of all but one block, (K, …).

        The effective size of cluster k is 1 / the largest leverage of a cell: Σ R² / max R².
        """
        kept = [j for j in range(self.s.blocks) if j != without]
        squares, peak = self.squares[kept].sum(axis=0), self.peak[kept].max(axis=0, initial=0.0)
        return self._judged(sums, np.ones((self.batches, len(self.open))), squares, peak, self.told[kept].sum(axis=0))

    def _judged(self, sums: Array, f: F64, squares: F64, peak: F64, mass: F64) -> Contribution:
        """Sums with weights R f, from ΣR² and max R by batch and from ΣR by group."""
        total, most = (np.square(f) * squares).sum(axis=0), (f * peak).max(axis=0, initial=0.0)
        cells = np.where(most > 0, total / np.square(np.where(most > 0, most, 1.0)), 0.0)
        donors = None
        if self.rows.donor is not None:
            people = int(self.donor_of.max(initial=-1)) + 1
            by_donor = _one_hot(self.donor_of, people) @ (f[self.batch_of] * mass)
            donors = effective_sizes(by_donor) if people else np.zeros(len(cells))
        return self.rows.measured(cells, donors, sums)

    def settle(self, without: int | None = None) -> None:
        """Close clusters until those that are open may be shown; the cells of closed ones belong to others then."""
        while self.rows.n:
            judged = self.contribution(np.ones(len(self.open)), without).values > 0
            failing = np.flatnonzero(self.open & ~judged)
            if not len(failing):
                return
            mass = self.told.sum(axis=(0, 1))[failing]
            self.open[failing[np.argsort(mass, kind="stable")[: max(1, len(failing) // 4)]]] = False
            for j in range(self.s.blocks):
                self._show(j, self.of_block(j))

    # ---- corrections -------------------------------------------------------------------------------------------------

    def regress(self, Y: F64, penalty: F64) -> F64:
        """R of all cells, and s_b, (batches, K, d)."""
        self.assign(Y, penalty)
        self.settle()
        s = np.zeros((self.batches, len(Y), self.x.shape[1]))
        for j in range(self.s.blocks):
            for at, _, R in self.of_block(j):
                for b in np.unique(self.batch[at]):
                    mine = self.batch[at] == b
                    s[b] += R[mine].T @ self.x[at[mine]]
        return s

    def move(self, W: F64) -> None:
        """Cells to x - Σ_k R_ik W_kb, with the R of `regress`."""

        def moved(pieces: Iterable[Piece]) -> Iterator[Piece]:
            for at, _, R in pieces:
                self.moved[at] = corrected(self.x[at], R, W, self.batch[at])
                yield at, unit(self.moved[at]), R

        for j in range(self.s.blocks):
            pieces: Iterable[Piece] = moved(self.of_block(j))
            if self.stored[j] is not None:
                self.stored[j] = list(pieces)
                pieces = self.of_block(j)
            self._show(j, pieces)

    def mass_by_group(self, without: int | None = None) -> F64:
        """(G, K), of all cells or of all but those of one block."""
        total: F64 = self.mass.sum(axis=0)
        return total if without is None else np.maximum(total - self.mass[without], 0.0)

    def told_mass(self, without: int | None = None) -> F64:
        """What masses this party shows, (K,)."""
        return np.asarray(self.told[[j for j in range(self.s.blocks) if j != without]].sum(axis=(0, 1)))

    def by_batch(self, mass: F64) -> F64:
        """(batches, K) from (G, K)."""
        return np.asarray(_one_hot(self.batch_of, self.batches) @ mass)

    def expected(self, cells: int, mass: F64, told: F64, total: F64) -> F64:
        """E from own masses (G, K), those that this party showed, (K,), and all parties did, (batches, K)."""
        return np.outer(self.sizes / cells, np.maximum(total - told, 0.0) + mass.sum(axis=0))

    def penalty(self, cells: int, mass: F64, told: F64, total: F64) -> F64:
        """((E + 1) / (O + 1))^θ; none in clusters that nobody shows, (batches, K)."""
        E = self.expected(cells, mass, told, total)
        return np.where(total > 0, ((E + 1) / (self.by_batch(mass) + 1)) ** self.s.theta, 1.0)

    def anchor_sums(self, mass: F64, s: F64, lam: F64) -> Contribution:
        """Σ_b of `shrunk`, (K, d + 1); a cell's weight is R λ / (n + λ) of its batch."""
        n, sums = self.by_batch(mass), np.zeros((mass.shape[1], self.x.shape[1] + 1))
        for b in range(self.batches):
            sums += shrunk(n[b], s[b], lam[b])
        squares, peak = np.zeros_like(n), np.zeros_like(n)
        for j in range(self.s.blocks):
            for at, _, R in self.of_block(j):
                for b in np.unique(self.batch[at]):
                    mine = R[self.batch[at] == b]
                    squares[b] += np.square(mine).sum(axis=0)
                    peak[b] = np.maximum(peak[b], mine.max(axis=0))
        return self._judged(sums, lam / (n + lam), squares, peak, mass)


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
        part.move(shifts_of(n, sums, lam, anchors, known))
    return part.moved
