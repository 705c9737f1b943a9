"""Counted forest: an isolation forest of all sites' rows that no row, no range and no small count leaves a site for.

    L1   u, S    columns in common, by name                                        (common_genes)
    L2   u       common seed Ξ, unknown to S                                       (common_seed)
    L3   u, S    rows N; mean and scale σ of every column                          (pooled_scaling)
    L4   u       sample of its own: each row of z = (x - mean)/σ is in each tree with probability ψ/N
                 (1/2 at most where ψ is above 256; with extended splits, 2/3 at most)
         per level of the trees, for every node that may be split, from Ξ: a column or a unit normal, and f in (0, 1)
    L5   u, S    first and last cell of a public grid along it that holds a row    (node_ranges); another axis if both
                 are one cell
    L6   u       split at low + f (high - low); rows move to the children
         u, S    which children hold at least t rows; the others are leaves        (count_tests, k = t, proved)
    L7   u, S    per tree: do its small leaves together hold at least t rows       (count_tests, k = t, proved)
         u, S    where they do: rows in each leaf of at least t rows               (secure_sum)
    L8   u       path lengths; a small leaf adds the mean c(n) over n < t; scores of its own rows
    L9   u, S    the cut above which the asked share of all rows lies              (share_cuts; with contamination only)
    L10  u, S    all were told the same                                            (same_view)

What a level opens about a node of at least t rows is where its range begins and ends, on the grid; about smaller ones,
that they are smaller. Trees of several repeats grow side by side. Sites that stop are left out of what follows.

Where donors are named (`DonorParams`), "t rows" are t rows of at least d donors in L6, L7 and L9: no donor's rows of a
node, or of a tree's small leaves, count for more than q = ⌊(t - 1)/(d - 1)⌋, so that d - 1 donors never make t. Ends of
ranges are those of single rows all the same.

Reveals
-------
site : the forest: axes, splits, which leaves hold fewer than t sampled rows, how many rows the larger leaves hold; mean
    and scale of every column, the power of two of its extremes, how many rows all sites hold together; with
    contamination, how many of all rows score above some cuts. Nothing that tells one other site from another, but
    who dropped out, and of a site that does so between the sums of L3 its number of rows, and of entries per column.
    With n - 1 colluding sites: the same about the last site alone.
coordinator : the same bits and sums, but not Ξ, so neither axes nor splits. Which columns each site has, by name.
lying coordinator : the same. It may call large counts small, and then learns less; a small count it can call large only
    by guessing a proof, right with probability 1/(p - 1)² a count, p the prime above `most`: 3·10⁻⁶ for ψ = 512; a
    wrong one ends the run. It may call a site dropped that is there, of which it then learns what all learn of one that
    drops out.
one lying site : nothing more. Its rows are what it says, and so are its donors; one who is at two sites counts twice.
coordinator with one site : also the small counts and the grid's pooled counts.

Assumes
-------
What secure sum, common seed and count tests assume. With two sites, each can subtract its own part from every sum. Lies
that are not noticed: (b), (c), (f) of the coordinator, a forest that is the same for all and wrong; (b), (c), (f) of
the site.

Cost
----
Per level three sums and two more per try of another axis; about 0.5 MB and 30 to 60 sums per site for 100 trees of 256.
Local time is linear in the rows.

References
----------
[LTZ08], [HKB19] as in cloister.models.isolation_forest. PROTOCOLS S4; lines numbered here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from cloister.arrays import F64, I64
from cloister.crypto.agreement import Identity, bind, hkdf
from cloister.crypto.entropy import Entropy
from cloister.errors import DataError, ParameterError, ProtocolAbort
from cloister.models import isolation_forest as iforest
from cloister.models.isolation_forest import Axes, Forest, Sample
from cloister.net.channel import Channel
from cloister.protocols.forest.forest_steps import Outline, finish
from cloister.protocols.forest.node_ranges import Grid, find_ranges
from cloister.protocols.forest.share_cuts import Scored, find_cuts, find_donor_cuts
from cloister.protocols.sums import common_genes, common_seed, pooled_scaling, same_view
from cloister.protocols.sums.columns import match_columns
from cloister.protocols.sums.pooled_scaling import Scaling
from cloister.protocols.sums.tally import Asking, Plain, Tally, answer_plainly
from cloister.study import Party

NAME = "counted_forest"
EXTENDED_SHARE = 2 / 3  # of all rows that a tree of extended splits may hold
SMALL = 256  # rows that a tree may hold even if they are more than half of all
TRIES = 5  # axes tried at a node before it is called constant
PROOFS = 2  # numbers that prove a count large enough to be opened


@dataclass(frozen=True, slots=True)
class Params:
    sites: tuple[Party, ...]
    coordinator: Party
    trees: int = 100
    sample: int = 256  # ψ
    forest: iforest.Kind = "standard"
    extension: int | None = None  # entries of a normal that are not zero, less one; None: all
    least: int = 8  # t: counts below are not opened; 1 opens all, for tests
    repeats: int = 1  # forests
    contamination: float | None = None  # share of all rows that is cut off; None: no cut is sought
    cells: int = 0  # of the grid along an axis; 0: 64 for standard, 128 for extended splits
    min_rows: int = 32  # of all sites together

    def __post_init__(self) -> None:
        if not 1 <= self.trees * self.repeats <= 10_000:
            raise ParameterError(f"trees times repeats must be from 1 to 10000, found {self.trees * self.repeats}")
        if not 1 <= self.least <= 64:
            raise ParameterError(f"the smallest count that is opened must be from 1 to 64, found {self.least}")
        if not 4 * self.least <= self.sample <= 1 << 16:
            raise ParameterError(
                f"'sample' must be from four times the smallest opened count, {4 * self.least}, to 65536,"
                f" found {self.sample}"
            )
        if self.contamination is not None and not 0 < self.contamination < 0.5:
            raise ParameterError(f"'contamination' must lie between 0 and 0.5, found {self.contamination}")

    @property
    def all_trees(self) -> int:
        return self.trees * self.repeats

    @property
    def grid_cells(self) -> int:
        """Finer ones would tell lone rows from the ends of a range."""
        return self.cells or (64 if self.forest == "standard" else 128)

    def size(self, rows: int) -> int:
        """Rows of a tree: more than 256 only up to half of all, since trees that share their rows give lone ones away.

        Ranges along random normals outline the rows of a tree, so of extended ones no tree has nearly all rows.
        """
        share = EXTENDED_SHARE if self.forest == "extended" else 1.0
        return min(self.sample, max(SMALL, rows // 2), int(rows * share))

    @property
    def most(self) -> int:
        """Rows that a node may hold: ψ and five standard deviations, beyond which counts would wrap."""
        return self.sample + 5 * math.isqrt(max(self.sample, 64))

    @property
    def needed(self) -> int:
        return max(self.min_rows, 2 * self.least)

    @property
    def per_donor(self) -> int | None:
        """q: rows that one donor may count for; None where rows are counted, whosever they are."""
        return None


@dataclass(frozen=True, slots=True)
class DonorParams(Params):
    """Where every row has a donor: what is opened is of at least so many of them."""

    min_donors: int = 3  # d

    def __post_init__(self) -> None:
        Params.__post_init__(self)
        if not 2 <= self.min_donors <= self.least:
            raise ParameterError(f"'min_donors' must be from 2 to the smallest opened count, found {self.min_donors}")

    @property
    def per_donor(self) -> int:
        return (self.least - 1) // (self.min_donors - 1)


@dataclass(frozen=True)
class Isolated:
    """What a site takes away."""

    columns: tuple[str, ...]
    scaling: Scaling
    forests: tuple[Forest, ...]  # one per repeat
    outline: Outline
    scores: F64  # (repeats, own rows)
    cuts: F64 | None  # (repeats,)
    present: tuple[Party, ...]
    secret: bytes = field(repr=False)
    rows: F64 = field(repr=False)  # own rows, on the common scale


def roles(params: Params) -> dict[Party, object]:
    return {params.coordinator: coordinator} | dict.fromkeys(params.sites, site)


# ---- L4-L7: the forest -----------------------------------------------------------------------------------------------


@dataclass
class Geometry:
    """What only sites have: their sampled rows, and the axes that Ξ gives."""

    sample: Sample
    rng: np.random.Generator
    usable: I64
    splits: list[tuple[I64, Axes, F64]] = field(default_factory=list)
    axes: list[Axes] = field(default_factory=list)  # per step, of all nodes that were asked about


async def grow(params: Params, tally: Tally, rows: int, width: int, geometry: Geometry | None) -> Outline:
    """L5 to L7, the same code at every party; without `geometry` at the coordinator."""
    size, t = params.size(rows), params.least
    depth, sites = iforest.depth_limit(size), len(params.sites)
    per_tree, most = iforest.places(depth), params.most
    grid = Grid(params.grid_cells, float(np.sqrt(rows * (width if params.forest == "extended" else 1))))
    nodes = np.arange(params.all_trees, dtype=np.int64) * per_tree
    opened: list[tuple[I64, I64, I64]] = []
    small, large = [nodes[:0]], [nodes[:0]]
    for _ in range(depth):
        pending, split = nodes, [nodes[:0]]
        for _ in range(TRIES):
            if not len(pending):
                break
            axes = f = None
            if geometry is not None:
                axes = iforest.draw_axes(
                    geometry.rng, len(pending), geometry.usable, width, params.forest, params.extension
                )
                f = geometry.rng.random(len(pending))

            def ends(pending: I64 = pending, axes: Axes | None = axes) -> tuple[I64, I64]:
                assert geometry is not None
                assert axes is not None
                _, which, along = geometry.sample.values(pending, axes)
                return grid.ends(which, along, len(pending))

            first, last = await find_ranges(tally, grid, len(pending), sites, ends)  # L5
            wide = first < last
            opened.append((pending, first, last))
            if geometry is not None and axes is not None and f is not None:
                low, high = grid.edge(first[wide]), grid.edge(last[wide] + 1)
                made = (pending[wide], axes.take(wide), low + f[wide] * (high - low))
                geometry.splits.append(made)
                geometry.axes.append(axes)
                geometry.sample.descend(*made, per_tree)  # L6
            split.append(pending[wide])
            pending = pending[~wide]
        large.append(pending)
        tree, place = np.divmod(np.sort(np.concatenate(split)), per_tree)
        if not len(tree):
            nodes = nodes[:0]
            break
        children = np.sort(np.concatenate([tree * per_tree + 2 * place + 1, tree * per_tree + 2 * place + 2]))
        held = _held(params, geometry, children, np.arange(len(children)), len(children))
        enough = await tally.test(held, len(children), t, most, PROOFS)  # L6
        small.append(children[~enough])
        nodes = children[enough]
    large.append(nodes)
    return await _count_leaves(params, tally, geometry, np.concatenate(small), np.concatenate(large), opened, depth)


def _counter(geometry: Geometry | None, nodes: I64) -> Callable[[], I64]:
    def count() -> I64:
        assert geometry is not None
        return geometry.sample.count(nodes)

    return count


def _held(params: Params, geometry: Geometry | None, nodes: I64, group: I64, groups: int) -> Callable[[], I64]:
    """What is tested: rows in each group of nodes, a donor's no more than q."""

    def count() -> I64:
        assert geometry is not None
        return geometry.sample.count_held(nodes, group, groups, params.per_donor)

    return count


async def _count_leaves(
    params: Params,
    tally: Tally,
    geometry: Geometry | None,
    small: I64,
    large: I64,
    opened: list[tuple[I64, I64, I64]],
    depth: int,
) -> Outline:
    """L7: rows in the larger leaves, but in no tree where the rest could be found by subtraction and is small."""
    per_tree, trees = iforest.places(depth), params.all_trees
    has_small = np.bincount(small // per_tree, minlength=trees) > 0
    rest = _held(params, geometry, small, small // per_tree, trees)
    enough = await tally.test(rest, trees, params.least, params.most, PROOFS)
    counts = np.full(len(large), -1, np.int64)
    open_ = (enough | ~has_small)[large // per_tree]
    if open_.any():
        counts[open_] = await tally.total(_counter(geometry, large[open_]), int(open_.sum()))
        check_leaves(counts[open_], geometry.sample.count(large[open_]) if geometry is not None else None)
    return Outline(opened, small, large, counts, depth)


def check_leaves(counts: I64, mine: I64 | None) -> None:
    """L7: no leaf holds fewer rows than this site alone has in it."""
    if np.any(counts < (0 if mine is None else mine)):
        raise ProtocolAbort(NAME, "L7", "damaged", "counts of rows that no leaf has")


def sample_rows(params: Params, Z: F64, rows: int, rng: np.random.Generator, donor: I64 | None = None) -> Sample:
    """L4: each row is in each tree with probability ψ/N; how many those are is nobody else's business."""
    share = params.size(rows) / rows
    sizes = rng.binomial(len(Z), share, size=params.all_trees)
    picks = [rng.choice(len(Z), k, replace=False, shuffle=False) for k in sizes.tolist()]
    return iforest.draw_sample(Z, picks, iforest.depth_limit(params.size(rows)), donor)


def forest_rng(secret: bytes) -> np.random.Generator:
    """The shared generator of axes and splits: statistics, not secrets, though only sites can seed it."""
    return np.random.default_rng(list(hkdf(secret, bind(NAME, b"forest"))))


# ---- roles -----------------------------------------------------------------------------------------------------------


async def site(
    ch: Channel,
    params: Params,
    kind: str,
    names: list[str],
    X: F64,
    donor: I64 | None = None,
    *,
    entropy: Entropy,
    identity: Identity,
) -> Isolated:
    """Play u: X has one row per observation and one column per name, missing entries are NaN; `donor` is whose."""
    check_rows(params, X, names, donor)
    common = common_genes.Params(params.sites, params.coordinator)
    columns = await common_genes.site(ch.sub("columns"), common, kind, names)
    order = match_columns(names, columns.names)  # L1
    seed_params = common_seed.Params(params.sites, params.coordinator)
    seed = await common_seed.site(ch.sub("seed"), seed_params, entropy=entropy, identity=identity)  # L2
    ask = Asking(ch, params.sites, params.coordinator, seed.present, seed, entropy, identity)
    X = X if np.array_equal(order, np.arange(X.shape[1])) else X[:, order]  # a copy of many rows is dear
    scaling = await pooled_scaling.find(ask, X, X.shape[1], params.needed)  # L3
    if not len(scaling.usable):
        raise DataError("every column has one value in all rows of all sites; nothing can be isolated in such data")
    Z = scaling.apply(X)
    own = np.random.default_rng(list(entropy.bytes(32)))  # which rows are sampled is not to be guessed by others
    sample = sample_rows(params, Z, scaling.rows, own, donor)  # L4
    geometry = Geometry(sample, forest_rng(seed.secret), scaling.usable)
    ch.step("growing the forest", protocol=NAME, line="L5")
    outline = await grow(params, ask, scaling.rows, X.shape[1], geometry)  # L5, L6, L7
    forests = finish(params, outline, geometry.splits, scaling.rows)
    ch.step("scoring rows", protocol=NAME, line="L8")
    scores = np.array([f.score(Z) for f in forests])  # L8
    cuts = await _cuts(params, ask, scaling.rows, Scored(scores, donor))  # L9
    await same_view.site(ch, same_view.Params(params.sites, params.coordinator), identity=identity)  # L10
    return Isolated(columns.names, scaling, forests, outline, scores, cuts, ask.present, seed.secret, Z)


async def coordinator(ch: Channel, params: Params) -> Outline:
    common = common_genes.Params(params.sites, params.coordinator)
    columns = await common_genes.coordinator(ch.sub("columns"), common)  # L1
    present = await common_seed.coordinator(ch.sub("seed"), common_seed.Params(params.sites, params.coordinator))  # L2
    ask = Asking(ch, params.sites, params.coordinator, present)
    width = len(columns.names)
    scaling = await pooled_scaling.find(ask, None, width, params.needed)  # L3
    if not len(scaling.usable):
        raise ProtocolAbort(NAME, "L3", "constant", "every column has one value in all rows of all sites")
    outline = await grow(params, ask, scaling.rows, width, None)  # L5, L6, L7
    await _cuts(params, ask, scaling.rows, None)  # L9
    await same_view.coordinator(ch, same_view.Params(params.sites, params.coordinator))  # L10
    return outline


async def _cuts(params: Params, ask: Tally, rows: int, own: Scored | None) -> F64 | None:
    """L9, if a share is to be cut off."""
    if params.contamination is None:
        return None
    allowed = int(np.floor(params.contamination * rows))
    if (q := params.per_donor) is None:
        return await find_cuts(ask, params.repeats, allowed, own)
    t, sites = params.least, len(params.sites)
    return await find_donor_cuts(ask, params.repeats, allowed, own, least=t, per_donor=q, sites=sites)


def check_rows(params: Params, X: F64, names: list[str], donor: I64 | None) -> None:
    if X.ndim != 2 or X.shape[1] != len(names) or 0 in X.shape:
        raise DataError(f"expected rows and one name per column, found shape {X.shape} and {len(names)} names")
    if (donor is None) == (params.per_donor is not None) or (donor is not None and len(donor) != len(X)):
        raise DataError("expected a donor for every row where donors are counted, and none where rows are")
    pooled_scaling.check_values(X)


# ---- ideal -----------------------------------------------------------------------------------------------------------


def ideal(
    params: Params, xs: Mapping[Party, F64], secret: bytes, donor: I64 | None = None, *, rng: np.random.Generator
) -> tuple[Forest, ...]:
    """The forest that Ξ and the pooled rows give; `rng` picks the sample, of which all rows are part if N ≤ ψ."""
    X = np.concatenate(list(xs.values()))
    scaling = pooled_scaling.scaling_of(X)
    _, geometry, outline = grow_plainly(params, scaling, scaling.apply(X), secret, rng, donor)
    return finish(params, outline, geometry.splits, len(X))


def grow_plainly(
    params: Params, scaling: Scaling, Z: F64, secret: bytes, rng: np.random.Generator, donor: I64 | None = None
) -> tuple[Scaling, Geometry, Outline]:
    """Grow over standardised rows in one place: what the sites' protocol opens, without the protocol."""
    geometry = Geometry(sample_rows(params, Z, len(Z), rng, donor), forest_rng(secret), scaling.usable)
    return scaling, geometry, answer_plainly(grow(params, Plain(), len(Z), Z.shape[1], geometry))
