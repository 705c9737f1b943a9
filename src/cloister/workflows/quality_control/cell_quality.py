"""Cell quality: common cut-offs on counts, genes and mitochondrial share, and doublet scores, over all sites' cells.

    L1   u, S    common seed                    a secret of the sites, for checked sums
    L2   u       per measure: runs              its cells in rising order, in runs of at least t cells of d donors
                                                (`disclosure`); a run counts in the bin of its middle cell
    L3   u, S    checked sum of h_uj            cells of site u in each bin of measure j; bins are fixed, 0.02 of log10
    L4   u       abort unless h_u is what u added
         u, S    cut-offs                       of the histograms over all sites: median ± c · MAD, or quantiles
    L5   u, S    shared space                   principal components of log counts (`shared_pca`, unscaled)
    L6   u, S    shared prototypes              only if a site has fewer than `FILL` cells (`shared_prototypes`)
    L7   u       doublet scores                 share of simulated doublets among neighbours (`models.doublets`), which
                                                are cells and doublets of u; a site with fewer than `FILL` cells adds
                                                cells drawn from the prototypes, and their doublets with its own cells
    L8   u, S    checked sum of h_u             scores in bins as in L2 to L4; the threshold is a quantile of all
    L9   u, S    all sites received the same broadcasts     (same_view)

What stands beside `u, S` is done by all parties together. Every party computes all else from the opened sums. Scores
and flags of cells stay at their site.

Reveals
-------
coordinator : which genes each site measured. Beside this:
coordinator, site : of each site, the number of cells in bins of counts, genes, mitochondrial share and doublet score,
    rounded to runs of at least t cells and d donors, and so its number of cells; the cut-offs. Over all sites together:
    what `shared_pca` reveals, and, if a site has fewer than `FILL` cells, what `shared_prototypes` reveals.
malicious coordinator : the same. It cannot change a sum or leave out a site without an abort.
one malicious site : the same. It can make the cut-offs wrong; where cells are dropped, it so chooses which. In the
    space it places prototypes and means, as in `shared_prototypes` and `shared_pca`.
coordinator with k sites : the same; and the sums of `shared_pca` and `shared_prototypes` over the other sites.

Assumes
-------
What the checked sum, `shared_pca` and `shared_prototypes` assume: every site stays to the end. Inputs are not verified:
a site may submit arbitrary histograms as its own.

Cost
----
Per site a checked sum of 2 · 701 words per site of the study, and with doublets one of 2 · 200, beside the costs of
`shared_pca` and `shared_prototypes`.

References
----------
[LT19] Luecken and Theis, Molecular Systems Biology 2019 (cut-offs by MAD); [WLK19] in `models.doublets`. Lines numbered
here; the security argument is docs/security/cell_quality.md.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from cloister.arrays import F64, I64, Bits
from cloister.disclosure import Contribution, Rows, Thresholds, join
from cloister.errors import DataError, ParameterError, ProtocolAbort
from cloister.models import doublets, leiden
from cloister.mpc.crypto.agreement import Identity
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.net.channel import Channel
from cloister.study import Party
from cloister.workflows.cluster_cells import shared_prototypes
from cloister.workflows.cluster_cells.shared_prototypes import Prototypes
from cloister.workflows.common import gene_moments, opened_sums
from cloister.workflows.common.opened_sums import OpenedSums, add_costs
from cloister.workflows.shared_pca import shared_pca
from cloister.workflows.shared_pca.shared_pca import Space

NAME = "cell_quality"
STEP = 0.02  # of log10: the width of a bin
FILL = 250  # cells; a site that has fewer takes the other sites' into account for its doublet scores
MOST = 10_000  # cells of a site that are neighbours of others
PROTOTYPES = 200
N_GENES, N_COMPONENTS = 2000, 30  # of the space
SPREAD = 20  # points that stand for a bin
MIXED = 4.0  # a drawn cell has a share of about a half, Beta(4, 4), of the counts of a doublet


@dataclass(frozen=True, slots=True)
class Measure:
    """A number of each cell, and its bins: 0.02 of log10(offset + value), from `low` on."""

    name: str
    bins: int
    low: float = 0.0
    offset: float = 1.0

    def log(self, values: F64) -> F64:
        return np.asarray(np.log10(self.offset + np.maximum(values, 0.0)), np.float64)

    def bin_of(self, logs: F64) -> I64:
        found: I64 = np.clip(np.floor((logs - self.low) / STEP), 0, self.bins - 1).astype(np.int64)
        return found


COUNTS, GENES, MITO = Measure("counts", 350), Measure("genes", 250), Measure("mito", 101)
MEASURES = (COUNTS, GENES, MITO)
SCORE = Measure("score", 200, low=-4.0, offset=0.0)


@dataclass(frozen=True, slots=True)
class Params:
    sites: tuple[Party, ...]
    coordinator: Party
    cutoff: float = 5.0  # c from 1 on; below, the share of cells beyond each cut-off
    doublet_rate: float = 0.06  # ρ; 0: no doublet scores
    min_cells: int = 10  # t
    min_donors: int = 3  # d, where donors are named
    n_top_genes: int = N_GENES
    n_components: int = N_COMPONENTS
    seed: int = 0

    def __post_init__(self) -> None:
        if len(set(self.sites)) < 2 or len(set(self.sites)) != len(self.sites) or self.coordinator in self.sites:
            raise ParameterError(f"quality control needs at least two sites, all different; found {len(self.sites)}")
        if not (0 < self.cutoff < 0.5 or 1 <= self.cutoff <= 100):
            raise ParameterError(
                f"cutoff must be from 1 to 100 (median absolute deviations) or a share above 0 and below 0.5, found "
                f"{self.cutoff}"
            )
        if not 0 <= self.doublet_rate <= 0.5:
            raise ParameterError(f"doublet_rate must be from 0 to 0.5, found {self.doublet_rate}")

    @property
    def thresholds(self) -> Thresholds:
        return Thresholds(self.min_cells, self.min_donors)

    @property
    def space(self) -> shared_pca.Params:
        return shared_pca.Params(
            self.sites,
            self.coordinator,
            n_top_genes=self.n_top_genes,
            n_components=self.n_components,
            scale=False,
            min_cells=self.min_cells,
            min_expressing=self.min_cells,
            min_donors=self.min_donors,
        )

    @property
    def prototypes(self) -> shared_prototypes.Params:
        return shared_prototypes.Params(
            self.sites, self.coordinator, "quality", PROTOTYPES, self.min_cells, self.min_donors
        )


@dataclass(frozen=True, slots=True)
class Cells:
    """What a site holds."""

    genes: gene_moments.Cells  # counts; with donors, where they are named
    measures: F64  # (n, 3), as in `MEASURES`; a column of NaN is not measured here
    thresholds: Thresholds = field(default_factory=Thresholds)  # this site's own; they can only raise the study's

    def rows(self, params: Params) -> Rows:
        own = self.thresholds
        least = params.thresholds.raised({"min_cells": own.min_cells, "min_donors": own.min_donors})
        return Rows(len(self.measures), self.genes.donor, least)


@dataclass(frozen=True, slots=True)
class Quality:
    """The same at every party, but for the scores of its own cells."""

    histograms: Mapping[str, F64]  # measure → (sites, bins)
    cutoffs: Mapping[str, tuple[float, float]]  # measure → lowest and highest value that passes
    scores: F64  # (n,), at a site
    threshold: float  # scores above are of doublets; infinite without doublet scores

    @property
    def cells(self) -> I64:
        """Of each site."""
        found: I64 = np.rint(self.histograms["counts"].sum(axis=1)).astype(np.int64)
        return found


def ideal(params: Params, xs: Mapping[Party, Cells]) -> dict[Party, Quality]:
    """The same histograms, space and prototypes, found in one place."""
    hub = params.coordinator
    own = {u: histograms(mine.rows(params), MEASURES, mine.measures) for u, mine in xs.items()}
    total: F64 = np.sum([placed(params, u, part).values for u, part in own.items()], axis=0)
    found = by_site(params, MEASURES, total)
    cutoffs = cutoffs_of(params, found)
    if not params.doublet_rate:
        return {u: Quality(found, cutoffs, np.zeros(0), np.inf) for u in (hub, *xs)}
    inside = shared_pca.ideal(params.space, {u: mine.genes for u, mine in xs.items()})
    groups = {u: own_cells(params, mine, *inside[u]) for u, mine in xs.items()}
    drawn = next(iter(shared_prototypes.ideal(params.prototypes, groups).values())) if filled(found) else None
    scores = {u: scores_of(params, u, mine, inside[u][0], inside[u][1], drawn) for u, mine in xs.items()}
    own = {u: score_histogram(mine.rows(params), scores[u]) for u, mine in xs.items()}
    total = np.sum([placed(params, u, part).values for u, part in own.items()], axis=0)
    found = {**found, **by_site(params, (SCORE,), total)}
    threshold = threshold_of(params, found[SCORE.name])
    return {u: Quality(found, cutoffs, scores.get(u, np.zeros(0)), threshold) for u in (hub, *xs)}


def roles(params: Params) -> dict[Party, object]:
    return {params.coordinator: coordinator} | dict.fromkeys(params.sites, site)


def cost(
    params: Params, common: int, names: int, prototypes: Sequence[int] = (), digest: int = 64
) -> dict[Party, tuple[int, int]]:
    """Messages and bytes; common genes and bytes of their names, and prototypes in each sum if there are any."""
    who, n = (params.sites, params.coordinator), len(params.sites)
    lengths = [n * sum(m.bins for m in MEASURES)] + ([n * SCORE.bins] if params.doublet_rate else [])
    parts = [opened_sums.cost(*who, lengths)]
    if params.doublet_rate:
        parts.append(shared_pca.cost(params.space, common, names))
    if prototypes:
        parts.append(
            shared_prototypes.cost(params.prototypes, params.n_components, list(prototypes), digest, finish=False)
        )
    return add_costs((params.coordinator, *params.sites), parts)


# ---- histograms ------------------------------------------------------------------------------------------------------


def check_site(params: Params, mine: Cells) -> None:
    if mine.measures.shape != (mine.genes.x.shape[0], len(MEASURES)):
        raise DataError(f"expected {len(MEASURES)} measures of each cell, found shape {mine.measures.shape}")
    if not np.all(np.isfinite(mine.measures[:, :2])):
        raise DataError("counts or genes of a cell are missing or infinite")
    mine.rows(params).check()


def histograms(rows: Rows, measures: Sequence[Measure], values: F64) -> Contribution:
    """L2: cells in each bin of every measure, in whole runs; zeros where it was not measured."""
    return join([histogram(rows, m, values[:, j]) for j, m in enumerate(measures)])


def histogram(rows: Rows, measure: Measure, values: F64) -> Contribution:
    if np.isnan(values).any():
        return rows.grouped(np.full(rows.n, -1, np.int64), measure.bins)
    return rows.grouped(bins_of_runs(rows, measure, values), measure.bins)


def score_histogram(rows: Rows, scores: F64) -> Contribution:
    return histograms(rows, (SCORE,), scores[:, None])


def bins_of_runs(rows: Rows, measure: Measure, values: F64) -> I64:
    """The bin of each cell: that of the middle cell of its run; -1 where the cells are too few for a run."""
    logs = measure.log(values)
    codes = rows.blocks(logs)
    if rows.n == 0 or codes.max(initial=-1) < 0:
        return np.full(rows.n, -1, np.int64)
    order = np.argsort(logs, kind="stable")
    ends = np.searchsorted(codes[order], np.arange(codes.max() + 2))
    middle = order[(ends[:-1] + ends[1:] - 1) // 2]
    found: I64 = measure.bin_of(logs[middle])[codes]
    return found


def placed(params: Params, u: Party, part: Contribution) -> Contribution:
    """L3: this site's histograms in its place among those of all sites."""

    def place(x: F64) -> F64:
        every = np.zeros((len(params.sites), len(x)))
        every[params.sites.index(u)] = x
        return every.ravel()

    return part.map(place)


def by_site(params: Params, measures: Sequence[Measure], total: F64) -> dict[str, F64]:
    """Measure → (sites, bins). What no cells give is the work of a malicious site, and counts as none."""
    table = np.maximum(np.rint(total).reshape(len(params.sites), -1), 0.0)
    parts = np.split(table, np.cumsum([m.bins for m in measures])[:-1], axis=1)
    return {m.name: part for m, part in zip(measures, parts, strict=True)}


def check_slot(params: Params, u: Party, total: F64, own: Contribution, line: str) -> None:
    """L4: nobody else has added to this site's place."""
    here = total.reshape(len(params.sites), -1)[params.sites.index(u)]
    if not np.allclose(here, own.values, atol=1e-6, rtol=0):
        raise ProtocolAbort(NAME, line, "slot", "another site added to the histogram of this one")


# ---- cut-offs --------------------------------------------------------------------------------------------------------


def weighted_quantile(values: F64, weights: F64, share: float) -> float:
    """The value below which this share of the weight is."""
    order = np.argsort(values, kind="stable")
    below = np.cumsum(weights[order])
    return float(values[order][min(np.searchsorted(below, share * below[-1]), len(order) - 1)])


def spread_out(measure: Measure, counts: F64) -> tuple[F64, F64]:
    """Points that stand for the cells of a histogram, evenly over each bin of log10, and their weights."""
    filled_bins = np.flatnonzero(counts > 0)
    inside = (np.arange(SPREAD) + 0.5) / SPREAD
    logs = measure.low + STEP * (filled_bins[:, None] + inside)
    return logs.ravel(), np.repeat(counts[filled_bins] / SPREAD, SPREAD)


def cutoffs_of(params: Params, found: Mapping[str, F64]) -> dict[str, tuple[float, float]]:
    """L4: lowest and highest value of each measure that passes. Mitochondrial share has an upper one only."""
    cutoffs: dict[str, tuple[float, float]] = {}
    for m in MEASURES:
        counts = found[m.name].sum(axis=0)
        if not counts.any():
            if m is not MITO:
                raise ProtocolAbort(NAME, "L4", "too-few-cells", "no site has enough cells for a histogram")
            continue
        logs, weights = spread_out(m, counts)
        values = 10.0**logs - m.offset if m is MITO else logs  # as is usual: per cent, and logarithms of counts
        if params.cutoff < 1:
            low, high = (weighted_quantile(values, weights, p) for p in (params.cutoff, 1 - params.cutoff))
        else:
            middle = weighted_quantile(values, weights, 0.5)
            away = params.cutoff * weighted_quantile(np.abs(values - middle), weights, 0.5)
            low, high = middle - away, middle + away
        cutoffs[m.name] = (0.0, high) if m is MITO else (max(10.0**low - m.offset, 0.0), 10.0**high - m.offset)
    return cutoffs


def passes(cutoffs: Mapping[str, tuple[float, float]], measures: F64) -> Bits:
    """Whether each cell is within all cut-offs, (n,); a measure that is missing here has none."""
    inside = np.ones(len(measures), bool)
    for m, column in zip(MEASURES, measures.T, strict=True):
        if m.name in cutoffs and not np.isnan(column).any():
            low, high = cutoffs[m.name]
            inside &= (column >= low) & (column <= high)
    return inside


def threshold_of(params: Params, counts: F64) -> float:
    """L8: the score above which the expected share of doublets lies."""
    every = counts.sum(axis=0)
    if not every.any():
        raise ProtocolAbort(NAME, "L8", "too-few-cells", "no site has enough cells for a histogram")
    return float(10.0 ** weighted_quantile(*spread_out(SCORE, every), 1 - params.doublet_rate))


# ---- doublets --------------------------------------------------------------------------------------------------------


def filled(found: Mapping[str, F64]) -> bool:
    """L6: whether a site takes cells drawn from prototypes."""
    return bool(found[COUNTS.name].sum(axis=1).min() < FILL)


def own_cells(params: Params, mine: Cells, space: Space, x: F64) -> shared_prototypes.Cells:
    digest = hashlib.sha256(space.components.tobytes() + space.center.tobytes()).hexdigest()
    return shared_prototypes.Cells(x, mine.genes.donor, digest, mine.thresholds)


def scores_of(params: Params, u: Party, mine: Cells, space: Space, x: F64, found: Prototypes | None) -> F64:
    """L7: a doublet score for each cell of u."""
    rng = doublets.generator(params.seed, params.sites.index(u))
    n = len(x)
    observed = np.arange(n) if n <= MOST else np.sort(rng.permutation(n)[:MOST])
    counts = gene_moments.rows_of(mine.genes.x, observed)
    pairs = doublets.pairs(len(observed), doublets.RATIO * len(observed), rng)
    both = gene_moments.Cells(mine.genes.names, counts[pairs[:, 0]] + counts[pairs[:, 1]])
    simulated = [shared_pca.place(params.space, space, both)]
    others = np.zeros((0, x.shape[1]))
    if found is not None and n < FILL:
        others = leiden.drawn(found.cells, found.mean, found.variance, FILL - n, params.seed)
        simulated.append(mixed(params, mine, space, others, rng))
    return doublets.scores(x, observed, others, np.concatenate(simulated), params.doublet_rate)


def mixed(params: Params, mine: Cells, space: Space, others: F64, rng: np.random.Generator) -> F64:
    """Doublets of a cell of u and a drawn one, in the space: both profiles before logarithms, in random shares."""
    at = {name: i for i, name in enumerate(space.common)}
    chosen = np.array([at[name] for name in space.genes])
    blocks = gene_moments.normalised(params.space, mine.genes, space.common, len(chosen))
    own = np.concatenate([y[:, chosen].toarray() for y in blocks])
    logs = (others @ space.components.T + space.center) * space.deviation + space.mean
    drawn = np.expm1(np.clip(logs, 0.0, params.space.largest_log))
    count = doublets.RATIO * len(others)
    one, other = rng.integers(0, len(own), count), rng.integers(0, len(others), count)
    share = rng.beta(MIXED, MIXED, count)[:, None]
    together = np.log1p(share * own[one] + (1 - share) * drawn[other])
    z = shared_pca.standardise(params.space, together, space.mean, space.deviation)
    placed_there: F64 = (z - space.center) @ space.components
    return placed_there


# ---- roles -----------------------------------------------------------------------------------------------------------


async def add(
    opened: OpenedSums, params: Params, line: str, measures: tuple[Measure, ...], own: Contribution | None
) -> dict[str, F64]:
    """L3 and L4, or L8, at any party; S has no histograms."""
    length = len(params.sites) * sum(m.bins for m in measures)
    what = f"histograms of {', '.join(m.name for m in measures)}, by site"

    def part() -> Contribution:
        assert own is not None
        return placed(params, opened.ch.me, own)

    total = await opened.add(line, what, length, part)
    if own is not None:
        check_slot(params, opened.ch.me, total, own, "L4" if line == "L3" else line)
    return by_site(params, measures, total)


async def site(ch: Channel, params: Params, mine: Cells, *, entropy: Entropy, identity: Identity) -> Quality:
    """Be u."""
    check_site(params, mine)
    rows, opened = mine.rows(params), OpenedSums(ch, NAME, params.sites, params.coordinator, entropy, identity)
    await opened.begin()  # L1
    found = await add(opened, params, "L3", MEASURES, histograms(rows, MEASURES, mine.measures))  # L2 to L4
    cutoffs = cutoffs_of(params, found)
    scores, threshold = np.zeros(0), np.inf
    if params.doublet_rate:
        ch_space = ch.sub("space", params.space)
        space, x = await shared_pca.site(
            ch_space, params.space, mine.genes, mine.thresholds, entropy=entropy, identity=identity
        )  # L5
        prototypes = None
        if filled(found):
            prototypes = await shared_prototypes.site(
                ch.sub("prototypes", params.prototypes),
                params.prototypes,
                own_cells(params, mine, space, x),
                entropy=entropy,
                identity=identity,
                finish=False,
            )  # L6
        ch.step("doublet scores", protocol=NAME, line="L7")
        scores = scores_of(params, ch.me, mine, space, x, prototypes)  # L7
        found = found | await add(opened, params, "L8", (SCORE,), score_histogram(rows, scores))  # L8
        threshold = threshold_of(params, found[SCORE.name])
    await opened.finish()  # L9
    return Quality(found, cutoffs, scores, threshold)


async def coordinator(ch: Channel, params: Params) -> Quality:
    """Be S: add up, and follow."""
    opened = OpenedSums(ch, NAME, params.sites, params.coordinator)
    await opened.begin()  # L1
    found = await add(opened, params, "L3", MEASURES, None)  # L3
    cutoffs, threshold = cutoffs_of(params, found), np.inf
    if params.doublet_rate:
        await shared_pca.coordinator(ch.sub("space", params.space), params.space)  # L5
        if filled(found):
            await shared_prototypes.coordinator(
                ch.sub("prototypes", params.prototypes), params.prototypes, finish=False
            )  # L6
        found = found | await add(opened, params, "L8", (SCORE,), None)  # L8
        threshold = threshold_of(params, found[SCORE.name])
    await opened.finish()  # L9
    return Quality(found, cutoffs, np.zeros(0), threshold)
