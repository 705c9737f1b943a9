"""`pooled_harmony` before groups (commit 3cf9c00): clusters were closed by leverage, sums rounded to half a cell."""

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
GRAIN = 0.5  # of a cell
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

    def told_mass(self, without: int | None = None) -> F64:
        """What masses this party shows, (K,)."""
        return np.asarray(self.told[[j for j in range(self.s.blocks) if j != without]].sum(axis=(0, 1)))

    def centroids(self) -> F64:
        """What a site added at L4 and L5, (K, d)."""
        self.settle()
        near = self.contribution(self.near.sum(axis=0)).values
        return np.rint(near / GRAIN) * GRAIN


def _one_hot(codes: Index | I64, kinds: int) -> scipy.sparse.csr_matrix:
    return scipy.sparse.csr_matrix((np.ones(len(codes)), (codes, np.arange(len(codes)))), shape=(kinds, len(codes)))
