"""Harmony step by step, as both its protocols run it: which sums over all parties are needed, and what follows.

`integrate` is a generator. It yields the sums it needs, each with this party's part, and is sent those of all parties;
every party runs it, the coordinator without cells. Every part is computed from the party's groups (`Part.shown`) and
earlier sums alone. Lines are those of `pooled_harmony`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from cloister.arrays import F64, I64, Bits
from cloister.disclosure import Contribution, Rows, Thresholds
from cloister.errors import DataError, ParameterError, ProtocolAbort
from cloister.models.harmony import (
    OWN_STEPS,
    STEPS,
    Part,
    Settings,
    Shifts,
    Trail,
    shifts_of,
    shrunk,
    unaided,
    unit,
)
from cloister.mpc.sums import announced_counts
from cloister.study import Party

STARTS = 10  # rounds of soft k-means before the first correction
GRID = 24  # places of the picture along each axis
SPAN = 2.5  # deviations to each side that it shows
WIDEST = 4096  # columns of an embedding
SLACK = 1e-6  # of sums, for what fixed point rounds
FAINT = 0.01  # of a cell: clusters of less stay where they are, and have no anchor


@dataclass(frozen=True, slots=True)
class Params:
    sites: tuple[Party, ...]
    coordinator: Party
    embedding: str  # its name
    settings: Settings = field(default_factory=Settings)
    min_cells: int = 50
    max_share: float = announced_counts.MAX_SHARE  # of all cells that one site may claim

    def __post_init__(self) -> None:
        if len(set(self.sites)) < 2 or len(set(self.sites)) != len(self.sites) or self.coordinator in self.sites:
            raise ParameterError(f"integration needs at least two sites, all different; found {len(self.sites)}")


@dataclass(frozen=True, slots=True)
class Cells:
    """What a site holds: its cells in the embedding, the batch of each, the donor of each if these count."""

    x: F64  # (n, d)
    batch: I64  # (n,), codes from 0
    donor: I64 | None = None  # (n,)
    space: str = ""  # digest of what made the embedding
    thresholds: Thresholds = field(default_factory=Thresholds)  # this site's own


@dataclass(frozen=True, slots=True)
class Ask:
    """A sum over all parties that is needed next."""

    line: str
    what: str
    part: Contribution  # this party's part, (m,)
    reach: float = 0.0  # no sum is larger; 0 where nobody can know yet

    @property
    def mine(self) -> F64:
        return np.asarray(self.part.values, np.float64)


@dataclass(frozen=True)
class Mixing:
    """The share of a cell's own batch among the cells of its clusters, by batch of this party and over all."""

    expected: F64  # (batches,): N_b / N, what cells have that lie anywhere
    before: F64  # (batches,)
    after: F64  # (batches,)
    site: tuple[float, float, float]  # the same three for all own cells as one batch
    pooled: tuple[float, float, float]  # and for the cells of all sites, by site


@dataclass(frozen=True)
class Picture:
    """Directions z of all parties' cells along the two axes in which they vary most, counted in places of a grid."""

    center: F64  # (d,)
    axes: F64  # (d, 2)
    span: F64  # (2,): the grid goes so far to each side
    counts: F64  # (GRID, GRID), of all parties
    own: F64  # (GRID, GRID), what this party added

    def along(self, x: F64) -> F64:
        return np.asarray((unit(x) - self.center) @ self.axes)

    def places(self, x: F64, *, clip: bool = False) -> I64:
        """The place of each cell, row · GRID + column; outside of the picture -1, or with `clip` the nearest, (n,)."""
        at = np.floor((self.along(x) / self.span + 1) / 2 * GRID)
        at = np.clip(at, 0, GRID - 1) if clip else at
        inside = np.all((at >= 0) & (at < GRID), axis=1)
        return np.where(inside, at[:, 0] * GRID + at[:, 1], -1).astype(np.int64)


@dataclass(frozen=True)
class Integrated:
    """What a party takes away; `trail`, `digest`, pooled mixing and counts of the picture are the same for all."""

    trail: Trail
    digest: str  # of all sums that were opened
    sums: int  # how many
    moved: F64  # (n, d)
    own: Shifts
    mixing: Mixing
    picture: Picture


Sums = Generator[Ask, F64, F64]


def check_site(params: Params, mine: Cells) -> None:
    if (
        mine.x.ndim != 2
        or len(mine.batch) != len(mine.x)
        or (mine.donor is not None and len(mine.donor) != len(mine.x))
    ):
        raise DataError("every cell needs one row of the embedding, one batch and one donor")
    if len(mine.x) < params.min_cells:
        raise DataError(
            f"{len(mine.x)} cells, fewer than {params.min_cells}: sums over so few come close to single cells; "
            "leave this site out, or lower min_cells= if all agree"
        )
    if mine.x.shape[1] < 2 or mine.x.shape[1] > WIDEST:
        raise DataError(f"an embedding of 2 to {WIDEST} columns is needed, found {mine.x.shape[1]}")
    if not np.all(np.isfinite(mine.x)):
        raise DataError("the embedding has missing or infinite values; embed these cells anew or remove them")
    if params.settings.donors and mine.donor is None:
        raise DataError("this study counts donors; say whose each cell is")
    rows = rows_of(params, mine)
    rows.check()
    if not rows.groups(mine.batch, int(mine.batch.max()) + 1).open.any():
        least = rows.thresholds
        whose = f" of {least.min_donors} donors" if params.settings.donors else ""
        raise DataError(
            f"no batch here has {least.min_cells} cells{whose}, so nothing can be added to any sum; "
            "name larger batches in batch_key="
        )


def rows_of(params: Params, mine: Cells) -> Rows:
    return Rows(len(mine.x), mine.donor if params.settings.donors else None, mine.thresholds)


def part_of(params: Params, mine: Cells | None, columns: int) -> Part:
    """The cells of a party and its groups of them; none for the coordinator."""
    if mine is None:
        return Part(params.settings, np.zeros((0, columns)), np.zeros(0, np.int64), 1)
    return Part(params.settings, mine.x, mine.batch, int(mine.batch.max(initial=0)) + 1, rows_of(params, mine))


def together(params: Params, xs: Mapping[Party, Cells]) -> dict[Party, Integrated]:
    """Every party's steps in one place, with nothing encoded."""
    columns = next(iter(xs.values())).x.shape[1]
    parts = {p: part_of(params, xs.get(p), columns) for p in (params.coordinator, *params.sites)}
    runs = {p: integrate(part, len(params.sites)) for p, part in parts.items()}
    asks = {p: next(run) for p, run in runs.items()}
    done: dict[Party, Integrated] = {}
    while not done:
        total = np.sum([ask.mine for ask in asks.values()], axis=0)
        for p, run in runs.items():
            try:
                asks[p] = run.send(total)
            except StopIteration as end:
                done[p] = end.value
    return done


# ---- the steps -------------------------------------------------------------------------------------------------------


class Course:
    """Asks for sums, holds them against what cells can give, and keeps a digest of all."""

    def __init__(self, name: str, part: Part, sites: int) -> None:
        self.name, self.part, self.shown, self.s, self.sites = name, part, part.shown, part.s, sites
        self.hash, self.sums, self.cells, self.energy = hashlib.sha256(), 0, 0, 0.0
        self.p = np.ones((self.shown.batches, 1))  # penalties of the groups

    def add(self, line: str, what: str, mine: F64, reach: float = 0.0) -> Sums:
        """The sum over all parties; `mine` is computed from groups alone."""
        total = yield Ask(line, what, self.part.groups.contribution(np.ravel(mine)), reach)
        self.hash.update(f"{line}{mine.shape}".encode() + np.ascontiguousarray(total, "<f8").tobytes())
        self.sums += 1
        return np.reshape(total, mine.shape)

    def check(self, line: str, right: Any, what: str) -> None:
        if not np.all(right):
            raise ProtocolAbort(self.name, line, "absurd", f"{what}, which no cells have")

    def size(self) -> Generator[Ask, F64, None]:
        """L2: N, and how far all groups together reach."""
        square = float(self.shown.size @ np.square(self.shown.x).sum(axis=1))
        mine = np.array([self.shown.sizes.sum(), square])
        cells, energy = yield from self.add("L2", "number of cells, and sum of their squares", mine)
        self.cells, self.energy = round(float(cells)), float(energy)
        self.check("L2", 2 <= self.cells < 1 << 40 and self.energy > 0, "a number of cells, or a sum of squares")
        self.p = np.ones((self.shown.batches, self.s.n_clusters(self.cells, self.sites)))

    def masses(self, line: str, what: str) -> Sums:
        """T, (K,): they add up to N."""
        total = yield from self.add(line, what, self.shown.mass(self.p).sum(axis=0), float(self.cells))
        slack = SLACK * self.cells + len(total) * SLACK
        right = bool(np.all(total >= -slack)) and abs(float(total.sum()) - self.cells) <= slack
        self.check(line, right, "a mass of a cluster")
        return np.maximum(total, 0.0)

    def centroids(self, line: str, Y: F64) -> Sums:
        """The mean directions of clusters; one that nobody is in stays at its Y, (K, d)."""
        what = f"centroids of {len(Y)} clusters"
        total = yield from self.add(line, what, self.shown.near(self.p), float(self.cells))
        length = np.linalg.norm(total, axis=1, keepdims=True)
        return np.where(length > FAINT, unit(total), Y)

    def first_centroids(self) -> Sums:
        """L3, L4: directions drawn from the second moments of all groups, then soft k-means."""
        d, K = self.shown.x.shape[1], self.p.shape[1]
        upper, z = np.triu_indices(d), unit(self.shown.x)
        mine = (z.T @ (self.shown.size[:, None] * z))[upper]
        total = yield from self.add("L3", "second moments of directions", mine, float(self.cells))
        moments = np.zeros((d, d))
        moments[upper] = total / self.cells
        values, vectors = np.linalg.eigh(moments.T)  # of the lower triangle
        root = vectors * np.sqrt(np.maximum(values, 1e-9)) @ vectors.T  # whatever the signs of vectors
        drawn = np.random.default_rng([self.s.seed & 0xFFFFFFFF, 20]).normal(size=(K, d))
        Y = unit(drawn @ root)
        for _ in range(STARTS):
            self.shown.look(Y)
            Y = yield from self.centroids("L4", Y)
        self.shown.look(Y)
        return Y

    def cluster(self, Y: F64) -> Sums:
        """L5, L6: one update of centroids; then penalties, balanced at one pooled mass after the other."""
        Y = yield from self.centroids("L5", Y)
        self.shown.look(Y)
        for _ in range(self.s.sweeps):
            total = yield from self.masses("L6", "masses of clusters")
            self.p = self.shown.balance(self.cells, total, self.p, STEPS)
        return Y

    def correct(self, Y: F64) -> Generator[Ask, F64, tuple[Any, ...]]:
        """L7, L8: masses, anchors; groups and cells of this party are moved. Returns what is kept of a round."""
        masses = yield from self.masses("L7", "masses of clusters")
        n, s = self.shown.sums(self.p)
        lam = self.s.lam(self.shown.expected(self.cells, masses))
        length = 2.0 ** math.floor(math.log2(math.sqrt(self.energy / self.cells) + 1e-9))  # of a usual group
        own = np.sum([shrunk(n[b], s[b], lam[b]) for b in range(len(n))], axis=0)
        units = np.append(np.full(s.shape[2], length), 1.0)
        reach = (1 + SLACK) * (math.sqrt(self.cells * self.energy) / length + self.cells)  # Σ m ‖x‖ and Σ m at most
        total = (yield from self.add("L8", f"anchors of {len(Y)} clusters", own / units, reach)) * units
        weight = total[:, -1]
        known = weight > FAINT
        anchors = np.where(known[:, None], total[:, :-1], 0.0) / np.where(known, weight, 1.0)[:, None]
        inside = np.linalg.norm(anchors, axis=1) <= math.sqrt(self.energy) + length
        self.check("L8", inside & (weight >= -SLACK * self.cells), "an anchor outside of all cells")
        self.shown.move(self.p, shifts_of(n, s, lam, anchors, known))
        penalty, W = self.move_cells(Y, masses, anchors, known, weight)
        self.shown.look(Y)
        return masses, anchors, known, penalty, W

    def move_cells(self, Y: F64, masses: F64, anchors: F64, known: Bits, weight: F64) -> tuple[F64, F64]:
        """Local: the same correction for single cells, from what is public. Nothing of it enters a sum."""
        cells, apart = self.part.cells, self.part.apart[:, None]
        cells.look(Y)
        penalty = cells.balance(self.cells, masses, self.p, OWN_STEPS)
        n, s = cells.sums(penalty)
        lam = self.s.lam(cells.expected(self.cells, masses))
        W = shifts_of(n, s, lam, anchors, known) * np.where(apart, unaided(n, lam, weight), 1.0)[:, :, None]
        cells.move(penalty, W)
        return penalty, W

    def mix(self, line: str, Y: F64) -> Generator[Ask, F64, tuple[F64, float, F64]]:
        """L9: the share of own cells in the clusters of own cells, by batch and as one; R without a penalty; masses."""
        kept, self.p = self.p, np.ones_like(self.p)
        total = yield from self.masses(line, "masses of clusters, for the mixing")
        by_batch, self.p = self.shown.mass(self.p), kept
        whole = np.maximum(total, 1e-12)
        own = (by_batch**2 / whole).sum(axis=1) / np.maximum(self.shown.sizes, 1)
        return own, float((by_batch.sum(axis=0) ** 2 / whole).sum()), total

    def picture(self, Y: F64, masses: F64, shares: F64) -> Generator[Ask, F64, tuple[Picture, F64]]:
        """L10, L11: the pooled mixing; where all groups lie in the two axes in which the clusters vary most."""
        pooled = yield from self.add("L10", "mixing", shares, float(self.cells) * 2)
        weight = masses / max(float(masses.sum()), 1e-12)
        center = weight @ Y
        values, vectors = np.linalg.eigh((Y - center).T @ (weight[:, None] * (Y - center)))
        axes = vectors[:, [-1, -2]]
        axes = axes * np.sign(axes[np.abs(axes).argmax(axis=0), [0, 1]])
        span = SPAN * np.sqrt(np.maximum(values[[-1, -2]], 1e-12))
        drawn = Picture(center, axes, span, np.zeros((GRID, GRID)), np.zeros((GRID, GRID)))
        at = drawn.places(self.shown.moved, clip=True)
        own = np.bincount(at, self.shown.size, minlength=GRID * GRID).astype(np.float64)
        counts = yield from self.add("L11", f"cells in {GRID} x {GRID} places", own, float(self.cells))
        both = {"counts": np.maximum(np.rint(counts), 0.0), "own": own}  # nothing follows from a picture: no check
        return replace(drawn, **{k: v.reshape(GRID, GRID) for k, v in both.items()}), pooled / self.cells


def integrate(part: Part, sites: int, name: str = "pooled_harmony") -> Generator[Ask, F64, Integrated]:
    """All steps, at any party."""
    course, s = Course(name, part, sites), part.s
    yield from course.size()  # L2
    Y = yield from course.first_centroids()  # L3, L4
    before = yield from course.mix("L9", Y)
    kept: list[tuple[Any, ...]] = []
    for _ in range(s.rounds):
        for _ in range(s.updates):
            Y = yield from course.cluster(Y)  # L5, L6
        kept.append((Y, *(yield from course.correct(Y))))  # L7, L8
    after = yield from course.mix("L9", Y)
    n = float(part.shown.sizes.sum())
    shares = np.array([n * n / course.cells, before[1], after[1]])
    picture, pooled = yield from course.picture(Y, after[2], shares)  # L10, L11
    centroids, masses, anchors, known, penalties, shifts = (np.stack(x) for x in zip(*kept, strict=True))
    return Integrated(
        Trail(course.cells, centroids, masses, anchors, known),
        course.hash.hexdigest(),
        course.sums,
        part.cells.moved,
        Shifts(penalties, shifts),
        Mixing(
            part.shown.sizes / course.cells,
            before[0],
            after[0],
            (n / course.cells, before[1] / max(n, 1), after[1] / max(n, 1)),
            (float(pooled[0]), float(pooled[1]), float(pooled[2])),
        ),
        picture,
    )
