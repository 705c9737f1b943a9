"""Counted forest: an isolation forest of all sites' rows, grown from ranges of enough rows of each site.

    L1   u, S    columns in common, by name                                        (common_genes)
    L2   u       common seed Ξ, unknown to S                                       (common_seed)
    L3   u, S    rows N; mean and scale σ of every column                          (pooled_scaling)
    L4   u       sample of its own: each row of z = (x - mean)/σ is in each tree with probability ψ/N
                 (1/2 at most where ψ is above 256; with extended splits, 2/3 at most)
         per level of the trees, for every node that may be split, an axis: a column or a unit normal
    L5   u, S    first and last cell of a public grid that enough of some site's rows reach, and a coin  (node_ranges);
                 another axis if both are one cell, a leaf if no site has a range
    L6   u       split at low + f (high - low), f in (0, 1); rows move to the children. f and the axes of what follows
                 are drawn from Ξ and the coin. A site drops those of its rows from the tree that would be fewer in a
                 child than its thresholds allow.
         u       paths and scores of its own rows, dropped ones included         (RangeForest)
    L7   u, S    the cut above which the requested fraction of all rows lies       (share_cuts; with contamination only)
    L8   u, S    all received the same                                             (same_view)

Thresholds are those of each site (`disclosure`): "enough" are `min_cells` of its own sampled rows, of `min_donors` of
its own donors where donors are named. A node in which a site has fewer counts as empty for that site, in everything
below. No number of rows in a node is opened, neither pooled nor per site, so that dropped rows have no complement.

Ranges leave out the outermost rows of every site, the outliers among them. A row is therefore scored by the path that
it would have as one more row of the tree: beyond the range of a node it is isolated there with the probability that a
cut of the wider range falls between it and the others. Scores are functions of the forest and the row alone.

Reveals
-------
site : the forest: axes, and per node and cell of the grid how many sites have enough rows below and above; what
    `pooled_scaling` reveals; with contamination, how many of all rows score above some cuts, in runs of enough rows of
    each site. With n - 1 colluding sites: the same about the last site alone.
coordinator : the same sums and coins, but not Ξ, so neither axes nor cuts. Which columns each site has, by name.
malicious coordinator : the same. It cannot change a sum (`checked_sum`); it can end the run.
one malicious site : the same sums, less its own part. It can widen ranges and add nodes. It cannot choose axes or cuts,
    which depend on a coin that is drawn by the sum that opens the range. Whatever it sends, each answer of an honest
    site is about at least `min_cells` of that site's sampled rows, or it is no.
coordinator with one site : what the site learns, and it can choose axes and cuts.

Assumes
-------
What checked sum and common seed assume: a site that drops out after L2 ends the run. Rows and donors of a site are its
unverified input; a donor who is at two sites counts at both. Lies that are not noticed: (b), (c), (f) of the site.

Cost
----
Per level one checked sum, and one more per try of another axis: about 10 to 40 sums per site for 100 trees, of 32 bytes
per node of at most 3 sites. Local time is linear in the rows.

References
----------
[LTZ08], [HKB19] as in cloister.models.isolation_forest; [GMRS16] Guha et al., ICML 2016: a row scored as one more row
of the tree. PROTOCOLS S4; lines numbered here; the security argument is docs/security/counted_forest.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from cloister.arrays import F64, I64
from cloister.disclosure import Contribution, Rows, Thresholds
from cloister.errors import DataError, ParameterError, ProtocolAbort
from cloister.models import isolation_forest as iforest
from cloister.models.isolation_forest import Axes, RangeForest, Sample, Step
from cloister.mpc.crypto.agreement import Identity, bind, hkdf
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.net.channel import Channel
from cloister.mpc.sums import common_seed, consistency_check, pooled_scaling
from cloister.mpc.sums.pooled_queries import Asking, Part, Plain, Totals, answer_plainly
from cloister.mpc.sums.pooled_scaling import Scaling
from cloister.study import Party
from cloister.workflows.common import common_genes
from cloister.workflows.common.columns import match_columns
from cloister.workflows.find_outliers.node_ranges import Grid, find_ranges, reached
from cloister.workflows.find_outliers.score_thresholds import Scored, find_cuts

NAME = "counted_forest"
EXTENDED_SHARE = 2 / 3  # of all rows that a tree of extended splits may hold
SMALL = 256  # rows that a tree may hold even if they are more than half of all
TRIES = 5  # axes tried at a node before it is called constant
ALONE = 0.5  # what an isolated row adds to its depth: between that of a row alone, 0, and of one of two, c(2) = 1


@dataclass(frozen=True, slots=True)
class Params:
    sites: tuple[Party, ...]
    coordinator: Party
    trees: int = 100
    sample: int = 256  # ψ
    forest: iforest.Kind = "standard"
    extension: int | None = None  # entries of a normal that are not zero, less one; None: all
    min_cells: int = 10  # own rows behind every answer of a site; a site may raise it
    min_donors: int = 3  # own donors, where they are named
    by_donor: bool = False  # whether rows name their donors
    repeats: int = 1  # forests
    contamination: float | None = None  # fraction of all rows that is cut off; None: no cut is sought
    cells: int = 0  # of the grid along an axis; 0: 64 for standard, 128 for extended splits
    min_rows: int = 32  # of all sites together

    def __post_init__(self) -> None:
        if not 1 <= self.trees * self.repeats <= 10_000:
            raise ParameterError(f"trees times repeats must be from 1 to 10000, found {self.trees * self.repeats}")
        if not 1 <= self.min_cells <= 1000 or self.min_donors < 1:
            raise ParameterError(f"'min_cells' must be from 1 to 1000, found {self.min_cells}")
        if not 2 * self.min_cells <= self.sample <= 1 << 16:
            raise ParameterError(
                f"'sample' must be from twice min_cells, {2 * self.min_cells}, to 65536, found {self.sample}"
            )
        if self.contamination is not None and not 0 < self.contamination < 0.5:
            raise ParameterError(f"'contamination' must lie between 0 and 0.5, found {self.contamination}")

    @property
    def all_trees(self) -> int:
        return self.trees * self.repeats

    @property
    def grid_cells(self) -> int:
        return self.cells or (64 if self.forest == "standard" else 128)

    def size(self, rows: int) -> int:
        """Rows of a tree: more than 256 only up to half of all, so that the trees of many rows differ.

        Ranges along random normals outline the rows of a tree, so of extended ones no tree has nearly all rows.
        """
        share = EXTENDED_SHARE if self.forest == "extended" else 1.0
        return min(self.sample, max(SMALL, rows // 2), int(rows * share))

    @property
    def needed(self) -> int:
        return max(self.min_rows, 2 * self.min_cells)

    @property
    def thresholds(self) -> Thresholds:
        return Thresholds(self.min_cells, self.min_donors)


@dataclass(frozen=True)
class Outline:
    """The opened forest without its geometry: what the coordinator learns."""

    ranges: list[tuple[I64, I64, I64]]  # per step: nodes, first cell, last cell; first > last where no site has one
    depth: int


@dataclass(frozen=True)
class Isolated:
    """Results of a site."""

    columns: tuple[str, ...]
    scaling: Scaling
    forests: tuple[RangeForest, ...]  # one per repeat
    outline: Outline
    scores: F64  # (repeats, own rows)
    cuts: F64 | None  # (repeats,)
    present: tuple[Party, ...]
    secret: bytes = field(repr=False)
    rows: F64 = field(repr=False)  # own rows, on the common scale


def roles(params: Params) -> dict[Party, object]:
    return {params.coordinator: coordinator} | dict.fromkeys(params.sites, site)


# ---- L4-L6: the forest -----------------------------------------------------------------------------------------------


@dataclass
class Grown:
    """Sampled rows of one site, and its thresholds."""

    sample: Sample
    thresholds: Thresholds

    @property
    def rows(self) -> Rows:
        return Rows(len(self.sample.at), self.sample.donor, self.thresholds)

    def ends(self, grid: Grid, nodes: I64, axes: Axes) -> Contribution:
        """L5: this site's answers."""
        rows, which, along = self.sample.values(nodes, axes)
        return reached(grid, self.rows.only(rows), which, len(nodes), along)

    def drop_few(self, nodes: I64) -> None:
        """L6: rows of nodes that hold too few of this site leave the tree."""
        which = self.sample.which(nodes)
        keep = self.rows.open_rows(which, len(nodes))
        self.sample.at[(which >= 0) & ~keep] = -1


@dataclass
class Geometry:
    """What all sites know and the coordinator does not: axes and cuts, drawn from Ξ and the coins."""

    secret: bytes
    usable: I64
    steps: list[Step] = field(default_factory=list)

    def rng(self, purpose: str, coin: bytes) -> np.random.Generator:
        step = len(self.steps).to_bytes(8, "big")
        return np.random.default_rng(list(hkdf(self.secret, bind(f"{NAME}/{purpose}", step, coin))))


async def grow(
    params: Params, totals: Totals, rows: int, width: int, geometry: Geometry | None, here: Sequence[Grown]
) -> Outline:
    """L5 and L6, the same code at every party; without `geometry` and rows at the coordinator."""
    depth = iforest.depth_limit(params.size(rows))
    per_tree = iforest.places(depth)
    grid = Grid(params.grid_cells, float(np.sqrt(rows * (width if params.forest == "extended" else 1))))
    nodes = np.arange(params.all_trees, dtype=np.int64) * per_tree
    opened: list[tuple[I64, I64, I64]] = []
    coin = b""
    for _ in range(depth):
        pending, split = nodes, [nodes[:0]]
        for _ in range(TRIES):
            if not len(pending):
                break
            axes = None
            if geometry is not None:
                rng = geometry.rng("axes", coin)
                axes = iforest.draw_axes(rng, len(pending), geometry.usable, width, params.forest, params.extension)

            def part(own: Grown, pending: I64 = pending, axes: Axes | None = axes) -> Part:
                assert axes is not None
                return lambda: own.ends(grid, pending, axes)

            parts = [part(own) for own in here]
            first, last, coin = await find_ranges(totals, grid, len(pending), len(params.sites), parts)  # L5
            opened.append((pending, first, last))
            there, wide = first <= last, first < last
            if geometry is not None and axes is not None:
                f = geometry.rng("cuts", coin).random(len(pending))
                low, high = grid.edge(first), grid.edge(last + 1)
                cut = np.where(wide, low + f * (high - low), np.nan)
                geometry.steps.append(Step(pending, axes, low, high, cut).take(there))
                for own in here:
                    own.sample.descend(pending[wide], axes.take(wide), cut[wide], per_tree)  # L6
            split.append(pending[wide])
            pending = pending[there & ~wide]
        tree, place = np.divmod(np.sort(np.concatenate(split)), per_tree)
        children = [tree * per_tree + 2 * place + 1, tree * per_tree + 2 * place + 2]
        nodes = np.sort(np.concatenate(children))
        for own in here:
            own.drop_few(nodes)
    return Outline(opened, depth)


def finish(params: Params, steps: Sequence[Step], depth: int, rows: int) -> tuple[RangeForest, ...]:
    """L6: the forests of all repeats. A leaf adds what one of twice the smallest group adds."""
    per_tree = iforest.places(depth)
    normal = float(iforest.average_path(params.size(rows)))
    leaf = float(iforest.average_path(2 * params.min_cells))
    forests = []
    for r in range(params.repeats):
        first = r * params.trees * per_tree
        mine = [s.take((s.nodes >= first) & (s.nodes < first + params.trees * per_tree)) for s in steps]
        own = tuple(Step(s.nodes - first, s.axes, s.low, s.high, s.cut) for s in mine if len(s.nodes))
        forests.append(RangeForest(params.trees, depth, own, normal, leaf, ALONE))
    return tuple(forests)


def usable(params: Params, scaling: Scaling) -> I64:
    """Columns that axes are drawn from: all of them for standard splits, since rare values isolate rows too."""
    return np.arange(len(scaling.scale)) if params.forest == "standard" else scaling.usable


def on_scale(params: Params, scaling: Scaling, X: F64) -> F64:
    """L4: z. In a column that is constant but for too few rows to have a scale, those rows are at the grid's ends."""
    Z = scaling.apply(X)
    if params.forest == "standard" and len(scaling.usable) < Z.shape[1]:
        flat = np.flatnonzero(scaling.scale == 0)
        away = np.nan_to_num(X[:, flat] - scaling.mean[flat])
        noise = 2.0**-20 * np.abs(scaling.mean[flat])
        Z[:, flat] = np.sign(away) * (np.abs(away) > noise) * np.sqrt(scaling.rows)
    return Z


def sample_rows(params: Params, Z: F64, rows: int, rng: np.random.Generator, donor: I64 | None = None) -> Sample:
    """L4: each row is in each tree with probability ψ/N; how many those are is not opened."""
    share = params.size(rows) / rows
    sizes = rng.binomial(len(Z), share, size=params.all_trees)
    picks = [rng.choice(len(Z), k, replace=False, shuffle=False) for k in sizes.tolist()]
    return iforest.draw_sample(Z, picks, iforest.depth_limit(params.size(rows)), donor)


# ---- roles -----------------------------------------------------------------------------------------------------------


async def site(
    ch: Channel,
    params: Params,
    kind: str,
    names: list[str],
    X: F64,
    donor: I64 | None = None,
    thresholds: Thresholds | None = None,
    *,
    entropy: Entropy,
    identity: Identity,
) -> Isolated:
    """Be u with rows X, one column per name, NaN where a value is missing, and the donor of each row.

    `thresholds` are this site's own; they can only raise those of `params`.
    """
    check_rows(params, X, names, donor)
    own = Rows(len(X), donor, raised(params, thresholds))
    own.check("rows")
    common = common_genes.Params(params.sites, params.coordinator)
    columns = await common_genes.site(ch.sub("columns"), common, kind, names)
    order = match_columns(names, columns.names)  # L1
    seed_params = common_seed.Params(params.sites, params.coordinator)
    seed = await common_seed.site(ch.sub("seed"), seed_params, entropy=entropy, identity=identity)  # L2
    ask = Asking(ch, seed.present, params.coordinator, NAME, seed, entropy, identity)
    X = X if np.array_equal(order, np.arange(X.shape[1])) else X[:, order]  # copies only if it must
    scaling = await pooled_scaling.find(ask, X, X.shape[1], params.needed, own)  # L3
    if not len(scaling.usable):
        raise DataError("every column has one value in all rows of all sites; nothing can be isolated in such data")
    Z = on_scale(params, scaling, X)
    rng = np.random.default_rng(list(entropy.bytes(32)))  # which rows are sampled must not be guessed by others
    here = Grown(sample_rows(params, Z, scaling.rows, rng, donor), own.thresholds)  # L4
    geometry = Geometry(seed.secret, usable(params, scaling))
    ch.step("growing the forest", protocol=NAME, line="L5")
    outline = await grow(params, ask, scaling.rows, X.shape[1], geometry, [here])  # L5, L6
    forests = finish(params, geometry.steps, outline.depth, scaling.rows)
    ch.step("scoring rows", protocol=NAME, line="L6")
    scores = np.array([f.score(Z) for f in forests])
    cuts = await _cuts(params, ask, scaling.rows, [Scored.of(own, scores)])  # L7
    await consistency_check.site(
        ch, consistency_check.Params(params.sites, params.coordinator), identity=identity
    )  # L8
    return Isolated(columns.names, scaling, forests, outline, scores, cuts, ask.sites, seed.secret, Z)


async def coordinator(ch: Channel, params: Params) -> Outline:
    """Be S."""
    common = common_genes.Params(params.sites, params.coordinator)
    columns = await common_genes.coordinator(ch.sub("columns"), common)  # L1
    present = await common_seed.coordinator(ch.sub("seed"), common_seed.Params(params.sites, params.coordinator))  # L2
    ask = Asking(ch, present, params.coordinator, NAME)
    width = len(columns.names)
    scaling = await pooled_scaling.find(ask, None, width, params.needed, None)  # L3
    if not len(scaling.usable):
        raise ProtocolAbort(NAME, "L3", "constant", "every column has one value in all rows of all sites")
    outline = await grow(params, ask, scaling.rows, width, None, [])  # L5, L6
    await _cuts(params, ask, scaling.rows, [])  # L7
    await consistency_check.coordinator(ch, consistency_check.Params(params.sites, params.coordinator))  # L8
    return outline


async def _cuts(params: Params, ask: Totals, rows: int, own: Sequence[Scored]) -> F64 | None:
    """L7, if a fraction is to be cut off."""
    if params.contamination is None:
        return None
    return await find_cuts(ask, params.repeats, int(np.floor(params.contamination * rows)), own)


def raised(params: Params, thresholds: Thresholds | None) -> Thresholds:
    """A site's own thresholds, never below those that were agreed."""
    least = params.thresholds
    own = least if thresholds is None else thresholds
    return least.raised({"min_cells": own.min_cells, "min_donors": own.min_donors})


def check_rows(params: Params, X: F64, names: list[str], donor: I64 | None) -> None:
    if X.ndim != 2 or X.shape[1] != len(names) or 0 in X.shape:
        raise DataError(f"expected rows and one name per column, found shape {X.shape} and {len(names)} names")
    if (donor is None) == params.by_donor or (donor is not None and len(donor) != len(X)):
        raise DataError("expected a donor for every row where donors are counted, and none where rows are")
    pooled_scaling.check_values(X)


# ---- ideal -----------------------------------------------------------------------------------------------------------


def ideal(
    params: Params,
    xs: Mapping[Party, F64],
    secret: bytes,
    donors: Mapping[Party, I64] | None = None,
    *,
    rng: np.random.Generator,
) -> tuple[RangeForest, ...]:
    """A forest of these sites' rows; `rng` picks the samples."""
    scaling = pooled_scaling.fenced_scaling(list(xs.values()), params.thresholds, [*(donors or {}).values()] or None)
    outline, geometry = grow_plainly(params, scaling, list(xs.values()), secret, rng, donors)
    return finish(params, geometry.steps, outline.depth, scaling.rows)


def grow_plainly(
    params: Params,
    scaling: Scaling,
    xs: Sequence[F64],
    secret: bytes,
    rng: np.random.Generator,
    donors: Mapping[Party, I64] | None = None,
    totals: Totals | None = None,
) -> tuple[Outline, Geometry]:
    """Grow over several sites' rows in one place: what the protocol opens, without the protocol."""
    whose: Sequence[I64 | None] = [None] * len(xs) if donors is None else list(donors.values())
    here = [
        Grown(sample_rows(params, on_scale(params, scaling, x), scaling.rows, rng, d), params.thresholds)
        for x, d in zip(xs, whose, strict=True)
    ]
    geometry = Geometry(secret, usable(params, scaling))
    work = grow(params, totals or Plain(), scaling.rows, xs[0].shape[1], geometry, here)
    return answer_plainly(work), geometry
