"""Harmony step by step, as both its protocols run it: which sums over all parties are needed, and what follows.

`integrate` is a generator. It yields the sums it needs, each with this party's part, and is sent those of all parties;
every party runs it, the coordinator without cells. Lines are those of `pooled_harmony`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from cloister.arrays import F64, I64
from cloister.disclosure import Contribution, Thresholds
from cloister.errors import DataError, ParameterError, ProtocolAbort
from cloister.models.harmony import SMALL, Part, Settings, Shifts, Trail, shifts_of, unaided, unit
from cloister.mpc.sums import announced_counts
from cloister.study import Party

STARTS = 10  # rounds of soft k-means before the first correction
GRID = 24  # places of the picture along each axis
SPAN = 2.5  # deviations to each side that it shows
WIDEST = 4096  # columns of an embedding
SLACK = 1e-6  # of sums, for what fixed point rounds
GRAIN = 0.5  # of a cell: masses and centroids are rounded to it, so that sums that differ by one cell hardly do
ANCHOR_GRAIN = 0.0625  # of anchors, in which a cell weighs λ / (n + λ), about a sixth
FAR = 10.0  # times the norm that `min_cells` cells reach: no cell may lie farther out


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
    if params.settings.least_donors and mine.donor is None:
        raise DataError("this study counts donors; say whose each cell is")
    part = part_of(params, Party("here"), mine, mine.x.shape[1])
    part.rows.check()
    norms, outer = np.linalg.norm(mine.x, axis=1), math.sqrt(outer_square(part))
    if far := int((norms > FAR * max(outer, 1e-12)).sum()):
        raise DataError(
            f"{far} cell(s) lie more than {FAR:g} times as far from the origin as {part.rows.thresholds.min_cells} "
            "cells do; remove them, or make the embedding anew"
        )


def part_of(params: Params, me: Party, mine: Cells | None, columns: int) -> Part:
    """The cells of a party, ready to be assigned; none for the coordinator."""
    none = np.zeros(0, np.int64)
    if mine is None:
        return Part(params.settings, np.zeros((0, columns)), none, 1, none)
    batches = int(mine.batch.max(initial=0)) + 1
    donor = mine.donor if params.settings.least_donors else None
    return Part(params.settings, mine.x, mine.batch, batches, donor, tuple(me.encode()), mine.thresholds)


def outer_square(part: Part) -> float:
    """The squared norm that `min_cells` cells of this party reach."""
    squares, least = np.square(part.x).sum(axis=1), part.rows.thresholds.min_cells
    return float(np.sort(squares)[-least]) if len(squares) >= least else 0.0


def second_moments(part: Part) -> Contribution:
    """Σ zzᵀ without cells that have more than 1 / min_cells of it in some direction, upper triangle.

    The leverage zᵀ(Σ zzᵀ)⁻¹z is the largest share that a cell has of uᵀ(Σ zzᵀ)u, over all directions u.
    """
    z, upper = unit(part.x), np.triu_indices(part.x.shape[1])
    keep, least = np.ones(len(z), bool), part.rows.thresholds.min_cells
    if least > 1:
        while keep.any():
            values, vectors = np.linalg.eigh(z[keep].T @ z[keep])
            there = values > 1e-9 * values[-1]
            leverage = np.square(z @ (vectors[:, there] / np.sqrt(values[there]))).sum(axis=1)
            if not np.any(dominant := keep & (leverage * least > 1 + SLACK)):
                break
            keep &= ~dominant
    return part.rows.only(keep).whole((z[keep].T @ z[keep])[upper])


def together(params: Params, xs: Mapping[Party, Cells]) -> dict[Party, Integrated]:
    """Every party's steps in one place, with nothing encoded."""
    columns = next(iter(xs.values())).x.shape[1]
    parts = {p: part_of(params, p, xs.get(p), columns) for p in (params.coordinator, *params.sites)}
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
        self.name, self.part, self.s, self.sites = name, part, part.s, sites
        self.hash, self.sums, self.cells, self.energy = hashlib.sha256(), 0, 0, 0.0

    def add(self, line: str, what: str, mine: Contribution, reach: float = 0.0, grain: float = 0.0) -> Sums:
        """The sum over all parties; `grain` is the unit that this party's part is rounded to."""
        shape = mine.values.shape
        if grain and self.part.rows.thresholds.min_cells > 1:
            mine = mine.map(lambda x: np.rint(x / grain) * grain)
        total = yield Ask(line, what, mine.map(np.ravel), reach)
        self.hash.update(f"{line}{shape}".encode() + np.ascontiguousarray(total, "<f8").tobytes())
        self.sums += 1
        return np.reshape(total, shape)

    def check(self, line: str, right: Any, what: str) -> None:
        if not np.all(right):
            raise ProtocolAbort(self.name, line, "absurd", f"{what}, which no cells have")

    def size(self) -> Generator[Ask, F64, None]:
        """L2: N, and how far all cells together reach; the outermost `min_cells` of a party count alike."""
        squares = np.minimum(np.square(self.part.x).sum(axis=1), outer_square(self.part))
        mine = self.part.rows.whole(np.array([len(squares), squares.sum()]))
        cells, energy = yield from self.add("L2", "number of cells, and sum of their squares", mine)
        self.cells, self.energy = round(float(cells)), float(energy)
        self.check("L2", 2 <= self.cells < 1 << 40 and self.energy > 0, "a number of cells, or a sum of squares")
        self.part.start(self.s.n_clusters(self.cells, self.sites))

    def masses(self, line: str, what: str, without: int | None = None) -> Sums:
        """Σ_b O_kb, of all cells or of all but one block, (K,)."""
        self.part.settle(without)
        mine = self.part.contribution(self.part.told_mass(without), without)
        total = yield from self.add(line, what, mine, float(self.cells), GRAIN)
        slack = SLACK * self.cells + GRAIN * len(self.part.open) * self.sites
        inside = np.all((total >= -slack) & (total <= self.cells + slack))
        self.check(line, inside and total.sum() <= self.cells + slack, "a mass of a cluster")
        return np.maximum(total, 0.0)

    def centroids(self, line: str, Y: F64) -> Sums:
        """The mean directions of clusters; one that nobody shows stays at its Y, (K, d)."""
        self.part.settle()
        near = self.part.contribution(self.part.near.sum(axis=0))
        total = yield from self.add(line, f"centroids of {len(Y)} clusters", near, float(self.cells), GRAIN)
        length = np.linalg.norm(total, axis=1, keepdims=True)
        return np.where(length > SLACK, unit(total), Y)

    def first_centroids(self) -> Sums:
        """L3, L4: directions drawn from the second moments of all cells, then soft k-means."""
        d, K = self.part.x.shape[1], self.s.n_clusters(self.cells, self.sites)
        upper = np.triu_indices(d)
        total = yield from self.add("L3", "second moments of directions", second_moments(self.part), float(self.cells))
        moments = np.zeros((d, d))
        moments[upper] = total / self.cells
        values, vectors = np.linalg.eigh(moments.T)  # of the lower triangle
        root = vectors * np.sqrt(np.maximum(values, 1e-9)) @ vectors.T  # whatever the signs of vectors
        drawn = np.random.default_rng([self.s.seed & 0xFFFFFFFF, 20]).normal(size=(K, d))
        Y = unit(drawn @ root)
        for _ in range(STARTS):
            self.part.assign(Y, None)
            Y = yield from self.centroids("L4", Y)
        self.part.assign(Y, None)
        return Y

    def cluster(self, Y: F64) -> Sums:
        """L5, L6: one update of centroids, and of all assignments, a block at a time."""
        Y = yield from self.centroids("L5", Y)
        for j in range(self.s.blocks):
            total = yield from self.masses("L6", f"masses of clusters without block {j + 1}", j)
            rest = self.part.mass_by_group(without=j)
            penalty = self.part.penalty(self.cells, rest, self.part.told_mass(without=j), total)
            self.part.assign(Y, penalty, [j])
        return Y

    def correct(self, Y: F64) -> Generator[Ask, F64, tuple[Any, ...]]:
        """L7, L8: masses, anchors; and the cells of this party are moved. Returns what is kept of a round."""
        part = self.part
        masses = yield from self.masses("L7", "masses of clusters")
        before, told = part.mass_by_group(), part.told_mass()
        penalty = part.penalty(self.cells, before, told, masses)
        s = part.regress(Y, penalty)
        mass, lam = part.mass_by_group(), self.s.lam(part.expected(self.cells, before, told, masses))
        length = 2.0 ** math.floor(math.log2(math.sqrt(self.energy / self.cells) + 1e-9))  # of a usual cell
        own, units = part.anchor_sums(mass, s, lam), np.append(np.full(s.shape[2], length), 1.0)
        mine = own.map(lambda x: x / units)
        reach = FAR * (math.sqrt(self.cells * self.energy) / length + self.cells)
        total = yield from self.add("L8", f"anchors of {len(Y)} clusters", mine, reach, ANCHOR_GRAIN)
        top, weight = total[:, :-1] * length, total[:, -1]
        known = weight > SMALL
        anchors = np.where(known[:, None], top, 0.0) / np.where(known, weight, 1.0)[:, None]
        inside = np.linalg.norm(anchors, axis=1) <= FAR * (math.sqrt(self.energy) + length)
        self.check("L8", inside & (weight >= -SLACK * self.cells), "an anchor outside of all cells")
        n = part.by_batch(mass)
        farther = np.where(own.values[:, -1] > 0, 1.0, unaided(n, lam, weight))
        W = shifts_of(n, s, lam, anchors, known) * farther[:, :, None]
        part.move(W)
        return masses, anchors, known, penalty, W

    def mix(self, line: str, Y: F64) -> Generator[Ask, F64, tuple[F64, float, F64]]:
        """L9: the share of own cells in the clusters of own cells, by batch and as one; R without a penalty; masses."""
        part = self.part
        part.assign(Y, None)
        total = yield from self.masses(line, "masses of clusters, for the mixing")
        by_batch = part.by_batch(part.mass_by_group())
        whole = np.maximum(np.maximum(total - part.told_mass(), 0.0) + by_batch.sum(axis=0), 1e-12)
        own = (by_batch**2 / whole).sum(axis=1) / np.maximum(part.sizes, 1)
        return own, float((by_batch.sum(axis=0) ** 2 / whole).sum()), total

    def picture(self, Y: F64, masses: F64, shares: F64) -> Generator[Ask, F64, tuple[Picture, F64]]:
        """L10, L11: the pooled mixing; where all cells lie in the two axes in which the clusters vary most."""
        mine = self.part.rows.whole(shares)
        pooled = yield from self.add("L10", "mixing", mine, float(self.cells) * 2)
        weight = masses / max(float(masses.sum()), 1e-12)
        center = weight @ Y
        values, vectors = np.linalg.eigh((Y - center).T @ (weight[:, None] * (Y - center)))
        axes = vectors[:, [-1, -2]]
        axes = axes * np.sign(axes[np.abs(axes).argmax(axis=0), [0, 1]])
        span = SPAN * np.sqrt(np.maximum(values[[-1, -2]], 1e-12))
        drawn = Picture(center, axes, span, np.zeros((GRID, GRID)), np.zeros((GRID, GRID)))
        own = self.density(drawn)
        counts = yield from self.add("L11", f"cells in {GRID} x {GRID} places", own, float(self.cells))
        self.check("L11", (counts >= -SLACK) & (counts <= self.cells + SLACK), "a number of cells in a place")
        both = {"counts": np.rint(counts), "own": np.asarray(own.values, np.float64)}
        return replace(drawn, **{k: v.reshape(GRID, GRID) for k, v in both.items()}), pooled / self.cells

    def density(self, drawn: Picture) -> Contribution:
        """L11: own cells in each place; those of places with too few, or outside, count in the nearest other place."""
        rows, places = self.part.rows, drawn.places(self.part.moved, clip=True)
        open_ = np.flatnonzero(rows.groups(places, GRID * GRID).open)
        if len(open_):
            at, among = (np.stack(np.divmod(p, GRID), axis=1) for p in (np.arange(GRID * GRID), open_))
            nearest = open_[np.square(at[:, None] - among).sum(axis=2).argmin(axis=1)]
            places = nearest[places]
        return rows.grouped(places, GRID * GRID).map(lambda x: x.astype(np.float64))


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
    n = float(part.sizes.sum())
    shares = np.array([n * n / course.cells, before[1], after[1]])
    picture, pooled = yield from course.picture(Y, after[2], shares)  # L10, L11
    centroids, masses, anchors, known, penalties, shifts = (np.stack(x) for x in zip(*kept, strict=True))
    return Integrated(
        Trail(course.cells, centroids, masses, anchors, known),
        course.hash.hexdigest(),
        course.sums,
        part.moved,
        Shifts(penalties, shifts),
        Mixing(
            part.sizes / course.cells,
            before[0],
            after[0],
            (n / course.cells, before[1] / max(n, 1), after[1] / max(n, 1)),
            (float(pooled[0]), float(pooled[1]), float(pooled[2])),
        ),
        picture,
    )
