"""Shared PCA: the principal components of all sites' cells together, from two checked sums and no cell.

    L1   u, S    common genes              the genes every site measured, and whether they hold counts or log values
    L2   u       y = target · x / Σ_g x    library-size normalisation over all genes of the site; l = log(1 + y)
    L3   u, S    checked sum of n, Σy, Σy², Σl, Σl²    per gene; zero for genes that too few cells of u express
    L4   S ⇒ u   H, μ, σ, N                the genes of largest normalised dispersion, pooled mean and deviation of l
         u                                 these follow from the sums of L3
    L5   u, S    checked sum of n, Σz, Σzzᵀ     z = clip((l_H - μ) / σ, ±max); not clipped where too few cells of u are
    L6   S ⇒ u   V, λ, m                   eigenvectors of the pooled covariance of z, eigenvalues, mean of z
         u                                 these follow from the sums of L5: C V = V λ, and no λ of the rest is larger
    L7   u, S    all were told the same    (same_view)
         u       (z - m) V                 the cells of u in the shared space

S broadcasts what follows from the sums so that it has the same digits at all sites. Where a site drops out after L1,
L3 to L7 begin again without it (`attempts`).

"Too few" are the site's own thresholds (`disclosure`): `min_expressing` cells, of `min_donors` donors where donors are
named. In a gene that too few of its cells express, or of which one donor has more than nine tenths of Σy², a site
counts all its cells as zero, in L3 and in L5. Where one cell has more than three quarters of Σy², values above the
`min_expressing`-th largest count as that one. Clipping is the only step that depends on single values: the cells beyond
a limit, and those within both, are groups of the site, and each is empty or large enough. If fewer cells are beyond a
limit, they are not clipped there, and if fewer are within, none are; then Σz and Σz² follow from L3. A gene in which an
unclipped value exceeds ten times the limit counts as zero.

The steps and their order are scanpy's (`normalize_total`, `log1p`, `highly_variable_genes` of flavour seurat, `scale`,
`pca`), so the result is that of the pooled cells, up to the signs of the components and to the rules above. It corrects
no batch effect.

Reveals
-------
coordinator : which genes each site measured.
coordinator, site : over all sites together, the number of cells, mean and variance of every common gene, and the
    covariance of the chosen genes; who took part. Products of two genes that fewer than `min_expressing` cells of a
    site express together are replaced by what their means give. With two sites: the other's sums. If a site drops out,
    by subtraction: that site's sums of L3, and of L5 if it drops out after these. With k colluding sites: the same sums
    over the other sites, so with all but one the sums of the last site, never a cell of it.
malicious coordinator : the same. It may claim that a site dropped out, and subtract. It cannot change a sum, genes,
    means, deviations or components.
one malicious site : the same, for means and deviations of its choice, by claiming many cells at that mean. With a tiny
    deviation the sums of L5 are numbers of cells above it, one mean per gene, each zero or at least `min_expressing` of
    a site, as is the rest of its cells; so are cells that exceed two means, and the other parts.

Assumes
-------
What the checked sum and `attempts` assume. Every site holds at least `min_cells` cells, so that no sum is close to one
cell. Lies that are not noticed: (b), (c), (f) of the site.

Cost
----
Per site: a common seed and two checked sums, of 2 + 8g words for g common genes and of 1 + h + h(h + 1)/2 words for h
chosen ones (16 MB at h = 2000, up and down); gene names up; 8h(d + 3) bytes down; one signature.

References
----------
[SAT+15] Satija et al., Nature Biotechnology 2015: dispersions normalised within bins of the mean.
Lines numbered here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import scipy.linalg
import scipy.sparse
import scipy.sparse.linalg

from cloister.arrays import F64, I64, U64, Bits
from cloister.cells import genes
from cloister.disclosure import Contribution, Groups, Rows, Thresholds
from cloister.errors import DataError, ParameterError, ProtocolAbort
from cloister.mpc.crypto.agreement import Identity
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.crypto.fixed_point import FixedPoint
from cloister.mpc.net.channel import Channel
from cloister.mpc.net.wire import message
from cloister.mpc.sums import checked_sum, common_seed, consistency_check, retry_without_dropouts
from cloister.study import Party
from cloister.workflows.common import common_genes
from cloister.workflows.common.gene_moments import (
    BLOCK,
    LARGEST_LOG,
    Cells,
    Values,
    caps,
    choose_genes,
    expressing,
    join_sum,
    moments,
    moments_of,
    normalised,
    split_sum,
    variance_of,
    warn_of_share,
)

# steps that other files know by this name
__all__ = ["LARGEST_LOG", "Cells", "choose_genes", "join_sum", "moments", "normalised", "split_sum"]

NAME = "shared_pca"
REACH = 10  # limits that a value which is not clipped may exceed the limit by


@dataclass(frozen=True, slots=True)
class Params:
    sites: tuple[Party, ...]
    coordinator: Party
    kind: str = "counts"  # or "log": what x is; log values skip the normalisation
    n_top_genes: int = 2000
    n_components: int = 50  # d
    target_sum: float = 1e4
    scale: bool = True  # divide by σ and clip; otherwise z = l - μ
    max_value: float = 10.0
    min_cells: int = 50  # of a site
    min_expressing: int = 10  # own cells behind every sum of a gene at a site
    min_donors: int = 3  # own donors, where they are named

    def __post_init__(self) -> None:
        if self.kind not in ("counts", "log"):
            raise ParameterError(f"shared-pca needs counts or log values, found {self.kind} values")
        if not 1 <= self.n_components < self.n_top_genes:
            raise ParameterError(
                f"expected fewer components than genes, found {self.n_components} of {self.n_top_genes} genes"
            )
        if not self.target_sum > 0 or not self.max_value > 0:
            raise ParameterError("target_sum and max_value must be above 0")
        if self.min_expressing < 1 or self.min_donors < 1:
            raise ParameterError("min_expressing and min_donors must be at least 1")

    @property
    def thresholds(self) -> Thresholds:
        return Thresholds(self.min_expressing, self.min_donors)

    @property
    def beyond(self) -> int:
        """Cells at the limit that weigh as much as all sites' values beyond it, in sums of products."""
        return len(self.sites) * 4 * self.min_expressing * REACH**2

    @property
    def largest_log(self) -> float:
        return math.log1p(self.target_sum) if self.kind == "counts" else LARGEST_LOG

    @property
    def bound(self) -> float:
        """The largest |z|."""
        return self.max_value if self.scale else self.largest_log

    def sum(self, sites: tuple[Party, ...], length: int) -> checked_sum.Params:
        return checked_sum.Params(sites, self.coordinator, length)

    def seed_of(self, sites: tuple[Party, ...]) -> common_seed.Params:
        return common_seed.Params(sites, self.coordinator, everyone=True)

    def view(self, sites: tuple[Party, ...]) -> consistency_check.Params:
        return consistency_check.Params(sites, self.coordinator)

    def covariance_code(self, cells: int) -> FixedPoint:
        """As many fraction bits as sums of products over `cells` cells leave free, at most 40."""
        reach, n = (cells + self.beyond) * self.bound**2, len(self.sites)
        bits = min(40, 62 - math.ceil(math.log2(n * reach)))
        return FixedPoint(bits, reach, n)


@dataclass(frozen=True, slots=True)
class Space:
    """A shared space, and all it takes to put further cells into it."""

    genes: tuple[str, ...]  # (h,)
    mean: F64  # μ, (h,)
    deviation: F64  # σ, (h,)
    center: F64  # m, (h,)
    components: F64  # V, (h, d)
    variance: F64  # λ, (d,)
    total_variance: float
    cells: int  # of those who took part in L5
    common: tuple[str, ...]  # all genes that the sites have in common: cells that are placed are normalised over these


@message("L4")
class Chosen:  # S → u
    at: I64  # (h,), positions among the common genes
    mean: F64  # (h,)
    deviation: F64  # (h,)
    cells: int  # N


@message("L6")
class Components:  # S → u
    components: F64  # (h, d)
    variance: F64  # (d,)
    center: F64  # (h,)
    total_variance: float
    cells: int


def ideal(params: Params, xs: Mapping[Party, Cells]) -> dict[Party, Any]:
    """The PCA of the pooled cells, each site's by its own rules; and every site's cells in it."""
    common = tuple(genes.genes_in_common({u: c.names for u, c in xs.items()}))
    own = [Own(params, c, common, params.thresholds) for c in xs.values()]
    x = np.concatenate(
        [
            np.concatenate(
                [
                    np.minimum(y.toarray(), np.inf if o.cap is None else o.cap)
                    for y in normalised(params, o.mine, common, len(common))
                ]
            )
            * o.genes.open
            for o in own
        ]
    )
    logs = np.log1p(x)
    at = choose_genes(x.mean(axis=0), x.var(axis=0, ddof=1), params.n_top_genes)
    mean, deviation = logs[:, at].mean(axis=0), logs[:, at].std(axis=0, ddof=1)
    deviation = deviation if params.scale else np.ones_like(deviation)
    pooled = Chosen(at, mean, deviation, len(x))
    n, center, cov = covariance(np.sum([o.products(pooled).values for o in own], axis=0), len(at))
    variance, components = decompose(cov, params.n_components)
    chosen = tuple(common[i] for i in at)
    space = Space(chosen, mean, deviation, center, components, variance, float(np.trace(cov)), n, common)
    return {params.coordinator: space} | {u: (space, place(params, space, mine)) for u, mine in xs.items()}


def roles(params: Params) -> dict[Party, object]:
    return {params.coordinator: coordinator} | dict.fromkeys(params.sites, site)


def cost(params: Params, common: int, names: int) -> dict[Party, tuple[int, int]]:
    """Messages and payload bytes, with so many common genes and bytes of their names, when nobody drops."""
    n, h, d = len(params.sites), min(params.n_top_genes, common), params.n_components
    who = params.sites
    sums = [checked_sum.cost(params.sum(who, m)) for m in (moments_length(common), products_length(h))]
    sums += [common_seed.cost(params.seed_of(who)), consistency_check.cost(params.view(who))]
    sums.append(retry_without_dropouts.cost(who, params.coordinator))
    hub, u = params.coordinator, params.sites[0]
    up = (1 + sum(s[u][0] for s in sums), names + sum(s[u][1] for s in sums))
    down = n * (names + 8 * (3 * h) + 8 * (h * d + d + h))
    return {hub: (3 * n + sum(s[hub][0] for s in sums), down + sum(s[hub][1] for s in sums))} | dict.fromkeys(
        params.sites, up
    )


# ---- local steps -----------------------------------------------------------------------------------------------------


def check_site(params: Params, mine: Cells) -> None:
    if mine.x.shape[0] < params.min_cells:
        raise DataError(
            f"{mine.x.shape[0]} cells, fewer than {params.min_cells}: sums over so few come close to single cells; "
            "leave this site out, or lower min_cells= if all agree"
        )
    if mine.library is not None and (len(mine.library) != mine.x.shape[0] or not np.all(mine.library > 0)):
        raise DataError("library sizes must be positive, one per cell; take them from the raw counts")


def moments_length(common: int) -> int:
    return 2 + 8 * common


def products_length(chosen: int) -> int:
    return 1 + chosen + chosen * (chosen + 1) // 2


@dataclass(frozen=True)
class Limits:
    """Of one space at one site (L5)."""

    lower: F64  # limits of z per gene, infinite where it is not clipped
    upper: F64
    zero: Bits  # genes that count as zero
    spread: F64  # Σ (l - μ)²


class Own:
    """One site's cells with its thresholds: which genes count as zero here, and where values are clipped."""

    def __init__(self, params: Params, mine: Cells, common: tuple[str, ...], least: Thresholds) -> None:
        self.params, self.mine, self.common = params, mine, common
        self.rows = Rows(mine.x.shape[0], mine.donor, least)
        self.values = Values(params, mine, common)
        found = expressing(self.values)
        self.genes: Groups = self.rows.sized(found.cells, found.donors, found.one_donor)
        self.cap = caps(self.values, found, least.min_cells)  # of y per gene, where one cell would have most of Σy²
        self.last: tuple[Chosen, list[F64] | None, Limits] | None = None  # a space, l of its genes, and its limits

    def sums(self) -> Contribution:
        """L3: n, Σy, Σy², Σl, Σl²."""
        n, *rest = np.split(moments_of(self.values, self.cap), 1 + len(self.common) * np.arange(4))
        part = self.rows.summed(self.genes, np.stack(rest, axis=1))
        whole = self.rows.whole(n)
        return replace_values(part, np.concatenate([whole.values, part.values.T.ravel()]))

    def logs(self, space: Chosen) -> Iterator[F64]:
        """L of the chosen genes, some cells at a time; zero where the gene counts as zero here."""
        if self.last is not None and self.last[0] is space and self.last[1] is not None:
            yield from self.last[1]
            return
        keep = self.genes.open[space.at]
        cap = None if self.cap is None or np.isinf(self.cap[space.at]).all() else self.cap[space.at]
        for y in self.values:
            log = y[:, space.at].toarray()
            if cap is not None:
                np.minimum(log, cap, out=log)
            np.log1p(log, out=log)
            log[:, ~keep] = 0.0
            yield log

    def limits(self, space: Chosen) -> Limits:
        """L5: of this space; l is held from here on where it is not too large."""
        if self.last is not None and self.last[0] is space:
            return self.last[2]
        h, bound, start = len(space.at), self.params.bound, 0
        donors = 0 if self.mine.donor is None else int(self.mine.donor.max(initial=-1)) + 1
        cells, who = np.zeros((3, h), np.int64), np.zeros((3, donors, h), bool)
        largest, spread, held = np.zeros(h), np.zeros(h), []
        for log in self.logs(space):
            if self.rows.n * h <= BLOCK:
                held.append(log)
            z = log - space.mean
            spread += np.einsum("ij,ij->j", z, z)
            z /= space.deviation
            largest = np.maximum(largest, np.maximum(z.max(axis=0, initial=0.0), -z.min(axis=0, initial=0.0)))
            for k, inside in ((0, z < -bound), (2, z > bound)):
                cells[k] += inside.sum(axis=0)
                if self.mine.donor is not None:
                    np.logical_or.at(who[k], self.mine.donor[start : start + len(z)], inside)
            if self.mine.donor is not None:
                np.logical_or.at(who[1], self.mine.donor[start : start + len(z)], np.abs(z) <= bound)
            start += len(z)
        cells[1] = start - cells[0] - cells[2]

        def enough(*parts: int) -> Bits:
            together = cells[list(parts)].sum(axis=0)
            named = None if self.mine.donor is None else who[list(parts)].any(axis=0).sum(axis=0)
            groups = self.rows.sized(together, named)
            return groups.open | groups.empty

        low, high = enough(0), enough(2)
        free = np.where(low & high, enough(1), np.where(low, enough(1, 2), ~high | enough(0, 1)))
        lower, upper = np.where(low & free, -bound, -np.inf), np.where(high & free, bound, np.inf)
        few = ~(low & free) | ~(high & free)
        zero = (few & (largest > REACH * bound)) | ~self.genes.open[space.at]
        found = Limits(lower, upper, zero, spread)
        self.last = (space, held or None, found)
        return found

    def products(self, space: Chosen) -> Contribution:
        """L5: n, Σz, Σzzᵀ (upper triangle) as one vector.

        With u = z - z(0), which is zero for a cell that does not express the gene, Σ z_g z_h follows from n, Σu_g, Σu_h
        and Σ u_g u_h. The last one rests on the cells that express both genes. Where these are some, but too few, it is
        replaced by its expectation for independent genes, Σu_g Σu_h / n.
        """
        h, n, found = len(space.at), self.rows.n, self.limits(space)
        zero, upper, lower = found.zero, found.upper, np.where(found.zero, -self.params.bound, found.lower)
        base = np.clip(-space.mean / space.deviation, lower, upper)  # z(0)
        top = upper - base
        pairs = Pairs(h, self.mine.donor)
        total, square = np.zeros(h), np.zeros((h, h))
        for log in self.logs(space):
            u = log - space.mean
            u /= space.deviation
            np.maximum(u, lower, out=u)
            np.minimum(u, upper, out=u)
            u -= base
            u[:, zero] = 0.0
            total += u.sum(axis=0)
            square += u.T @ u
            pairs.add(u != 0, u >= top)
        triangle = np.triu_indices(h)
        groups = pairs.groups(self.rows, np.isfinite(upper), triangle)
        part = self.rows.summed(groups, square[triangle])
        g, k = triangle
        products = np.where(groups.open | groups.empty, part.values, total[g] * total[k] / max(n, 1))
        products += (n * base[g] + total[g]) * base[k] + base[g] * total[k]
        sums = self.rows.whole(np.concatenate([[float(n)], total + n * base, products]))
        return replace_values(part, sums.values)

    def check_spread(self, space: Chosen) -> None:
        """L4: cells of one site spread no more around the pooled mean than all cells do."""
        if not self.params.scale:
            return
        spread = self.limits(space).spread
        most = (space.cells - 1) * np.square(space.deviation)
        if np.any(spread > most * (1 + 1e-6) + 1e-6 + 1e-13 * space.cells * self.params.largest_log**2):  # rounding
            raise ProtocolAbort(NAME, "L4", "spread", "a pooled deviation is smaller than this site's cells allow")


class Pairs:
    """How many cells and donors of a site are behind the product of every two genes, counted some cells at a time."""

    def __init__(self, h: int, donor: I64 | None) -> None:
        self.donor, self.seen = donor, 0
        self.both = np.zeros((h, h), np.int64)  # cells that express both
        self.clipped = np.zeros((h, h), np.int64)  # cells above the upper limit of both
        self.found: dict[int, Bits] = {}  # donor → pairs that a cell of the donor expresses

    def add(self, expressed: Bits, clipped: Bits) -> None:
        rows = slice(self.seen, self.seen + len(expressed))
        self.seen = rows.stop
        self.both += _together(expressed)
        at = np.flatnonzero(clipped.any(axis=0))
        if len(at):
            self.clipped[np.ix_(at, at)] += _together(clipped[:, at])
        if self.donor is None:
            return
        for who in np.unique(self.donor[rows]):
            there = _together(expressed[self.donor[rows] == who]) > 0
            self.found[int(who)] = there | self.found.get(int(who), np.zeros_like(there))

    def groups(self, rows: Rows, limited: Bits, triangle: tuple[I64, I64]) -> Groups:
        """Of the pairs of the upper triangle. Where both genes are clipped, every part of the cells must be large."""
        donors = None
        if self.donor is not None:
            donors = np.stack([*self.found.values()]).sum(axis=0)[triangle]
        groups = rows.sized(self.both[triangle], donors)
        at = np.flatnonzero(np.diag(self.clipped))  # of other genes, the parts were judged when these were limited
        if not len(at):
            return groups
        both, n = self.clipped[np.ix_(at, at)], self.seen
        own = np.diag(both)
        parts = (both, own[:, None] - both, own[None] - both, n - own[:, None] - own[None] + both)
        least = rows.thresholds.min_cells
        few = np.any([(part > 0) & (part < least) for part in parts], axis=0)
        few &= np.logical_and.outer(limited[at], limited[at])
        np.fill_diagonal(few, val=False)  # a gene with itself: its parts were judged as well
        off = np.zeros(self.both.shape, bool)
        off[np.ix_(at, at)] = few
        return replace(groups, open=groups.open & ~off[triangle])


def _together(marks: Bits) -> I64:
    """Rows that have both marks, for every two columns."""
    x = marks.astype(np.float32)  # exact up to 2^24 rows at a time
    counts: I64 = (x.T @ x).astype(np.int64)
    return counts


def replace_values(part: Contribution, values: F64) -> Contribution:
    return part.map(lambda _: values)


def standardise(params: Params, log: F64, mean: F64, deviation: F64) -> F64:
    z: F64 = (log - mean) / deviation
    return np.clip(z, -params.bound, params.bound)


def covariance(words: F64, h: int) -> tuple[int, F64, F64]:
    """Cells, mean of z and its covariance, from their sums."""
    n, total = round(words[0]), words[1 : 1 + h]
    square = np.zeros((h, h))
    square[np.triu_indices(h)] = words[1 + h :]
    square += np.triu(square, 1).T
    return n, total / n, (square - np.outer(total, total) / n) / (n - 1)


def decompose(cov: F64, d: int) -> tuple[F64, F64]:
    """The d largest eigenvalues and their vectors; in each, the largest entry is positive."""
    h = len(cov)
    values, vectors = scipy.linalg.eigh(cov, subset_by_index=(h - d, h - 1))
    values, vectors = values[::-1].copy(), vectors[:, ::-1].copy()
    vectors *= np.sign(vectors[np.abs(vectors).argmax(axis=0), np.arange(d)])
    return values, vectors


def place(params: Params, space: Space, mine: Cells) -> F64:
    """L7: cells that have the common genes, put into a space, (n, d); also one that was made earlier.

    Cells are normalised over the common genes here, so that files with more or fewer other genes are placed alike.
    Where these carry all counts of a site, this is y of L2.
    """
    at = {name: i for i, name in enumerate(space.common)}
    chosen = np.array([at[name] for name in space.genes])
    parts = []
    for y in normalised(params, mine, space.common, len(chosen), of_model=True):
        z = standardise(params, np.log1p(y[:, chosen].toarray()), space.mean, space.deviation)
        parts.append((z - space.center) @ space.components)
    return np.concatenate(parts)


def check_moments(params: Params, cells: int, *sums: F64) -> None:
    """L3: sums that cells can have; masks that did not cancel leave numbers all over 64 bits."""
    total, square, log, log_square = sums
    possible = 0 < cells <= len(params.sites) << 40 and all(np.all(s >= -1) for s in sums)
    if possible:
        most = cells * params.largest_log
        possible = bool(np.all(log <= most + 1) and np.all(log_square <= most * params.largest_log + 1))
        possible = possible and bool(np.all(total**2 <= cells * square * (1 + 1e-6) + 1))
    if not possible:
        raise ProtocolAbort(NAME, "L3", "damaged", "sums that no cells have: a message was damaged, or somebody lies")


def check_products(params: Params, cells: int, words: F64, h: int) -> None:
    """L5: the same of the sums of z and of its products."""
    n, square = round(words[0]), words[1 + h :]
    most = (n + params.beyond) * params.bound
    if (
        not 2 <= n <= cells
        or np.any(np.abs(words[1 : 1 + h]) > most + 1)
        or np.any(np.abs(square) > most * params.bound + 1)
    ):
        raise ProtocolAbort(NAME, "L5", "damaged", "sums that no cells have: a message was damaged, or somebody lies")


def check_chosen(chosen: Chosen, own: Chosen) -> None:
    """L4: what the site finds from the same sums, but for rounding."""
    same = np.array_equal(chosen.at, own.at) and chosen.cells == own.cells
    same = same and chosen.mean.shape == own.mean.shape == chosen.deviation.shape
    if not same or not all(
        np.allclose(x, y, rtol=1e-9, atol=1e-12)
        for x, y in ((chosen.mean, own.mean), (chosen.deviation, own.deviation))
    ):
        raise ProtocolAbort(NAME, "L4", "genes", "the chosen genes, means or deviations do not follow from the sums")


def check_components(params: Params, space: Components, cells: int, center: F64, cov: F64) -> None:
    """L6: eigenvectors of the pooled covariance, those of the largest eigenvalues, around the pooled mean."""
    V, variance, d = space.components, space.variance, params.n_components
    total = float(np.trace(cov))
    slack = 1e-6 * max(1.0, total)
    whole = space.cells == cells and abs(space.total_variance - total) <= slack
    whole = whole and np.allclose(space.center, center, rtol=1e-9, atol=1e-9)
    if not whole or not all(np.all(np.isfinite(x)) for x in (V, variance)):
        raise ProtocolAbort(NAME, "L6", "components", "mean or variance do not follow from the sums")
    unit = np.abs(V.T @ V - np.eye(d)).max() <= 1e-6 and np.all(np.diff(variance) <= slack)
    if not unit or np.abs(cov @ V - V * variance).max() > slack:
        raise ProtocolAbort(NAME, "L6", "components", "components that are none of the pooled covariance")
    if d < len(cov) and _largest(cov - (V * variance) @ V.T) > float(variance[-1]) + slack:
        raise ProtocolAbort(NAME, "L6", "components", "components of smaller variance than others have")


def _largest(matrix: F64) -> float:
    """About the largest eigenvalue, from below."""
    start = np.random.default_rng(0).normal(size=len(matrix))  # not a secret: S could only gain what no gap tells apart
    found = scipy.sparse.linalg.eigsh(matrix, 1, which="LA", v0=start, tol=1e-3, return_eigenvectors=False)
    return float(found[0])


# ---- roles -----------------------------------------------------------------------------------------------------------


async def site(
    ch: Channel,
    params: Params,
    mine: Cells,
    thresholds: Thresholds | None = None,
    *,
    entropy: Entropy,
    identity: Identity,
) -> tuple[Space, F64]:
    """Be u; `thresholds` can only raise those of `params`. Returns the shared space, and the cells of u in it."""
    check_site(params, mine)
    S, least = params.coordinator, params.thresholds
    if thresholds is not None:
        least = least.raised({"min_cells": thresholds.min_cells, "min_donors": thresholds.min_donors})
    Rows(mine.x.shape[0], mine.donor, least).check(magnitudes=True)

    agreement = common_genes.Params(params.sites, S)
    agreed = await common_genes.site(ch.sub("genes"), agreement, params.kind, list(mine.names))  # L1
    warn_of_share(params, mine, agreed.names)
    own = Own(params, mine, agreed.names, least)
    moments = own.sums()  # L2

    async def step(ch: Channel, sites: tuple[Party, ...]) -> Space:
        seed_of = params.seed_of(sites)
        seed = await common_seed.site(ch.sub("seed", seed_of), seed_of, entropy=entropy, identity=identity)

        async def add(label: str, part: Contribution, line: str, what: str) -> U64:
            words = ch.contribute(part, protocol=NAME, line=line, what=what)
            sums = params.sum(sites, len(words))
            return await checked_sum.site(ch.sub(label, sums), sums, words, seed)

        part = moments.map(lambda x: split_sum(x, len(params.sites), entropy))
        z = await add("moments", part, "L3", f"moments of {len(agreed.names)} genes")  # L3
        chosen = await ch.recv_broadcast(S, Chosen, at=(None,), mean=(None,), deviation=(None,))  # L4
        check_chosen(chosen, choose(params, len(agreed.names), z))
        own.check_spread(chosen)
        h, d = len(chosen.at), params.n_components
        ch.step(f"covariance of {h} genes", protocol=NAME, line="L5")
        part = own.products(chosen).map(params.covariance_code(chosen.cells).encode)
        z = await add("products", part, "L5", f"covariance of {h} genes")  # L5
        result = await ch.recv_broadcast(S, Components, components=(h, d), variance=(d,), center=(h,))  # L6
        check_components(params, result, *pooled(params, chosen, z))
        await consistency_check.site(ch, params.view(sites), identity=identity)  # L7
        return _space(agreed.names, chosen, result)

    space, _ = await retry_without_dropouts.follow(ch.sub("fit"), S, step)
    return space, place(params, space, mine)  # L7


async def coordinator(ch: Channel, params: Params) -> Space:
    """Play S. Sites that drop out are left out, as long as a quorum remains."""
    agreement = common_genes.Params(params.sites, params.coordinator)
    agreed = await common_genes.coordinator(ch.sub("genes"), agreement)  # L1
    g = len(agreed.names)

    async def step(ch: Channel, sites: tuple[Party, ...]) -> Space:
        seed_of, length = params.seed_of(sites), moments_length(g)
        await common_seed.coordinator(ch.sub("seed", seed_of), seed_of)
        sums = params.sum(sites, length)
        z = await checked_sum.coordinator(ch.sub("moments", sums), sums)  # L3
        chosen = choose(params, g, z)
        h = len(chosen.at)
        ch.reveal(chosen, to=sites, line="L4", what=f"mean and deviation of {h} genes", protocol=NAME)
        await ch.broadcast(sites, chosen)  # L4
        sums = params.sum(sites, products_length(h))
        z = await checked_sum.coordinator(ch.sub("products", sums), sums)  # L5
        ch.step(f"{params.n_components} components of {h} genes", protocol=NAME, line="L6")
        seen, center, cov = pooled(params, chosen, z)
        variance, components = decompose(cov, params.n_components)
        result = Components(components, variance, center, float(np.trace(cov)), seen)
        ch.reveal(result, to=sites, line="L6", what=f"{len(variance)} components", protocol=NAME)
        await ch.broadcast(sites, result)  # L6
        await consistency_check.coordinator(ch, params.view(sites))  # L7
        return _space(agreed.names, chosen, result)

    space, _ = await retry_without_dropouts.lead(
        ch.sub("fit"), params.sites, ch.agreement.quorum(len(params.sites)), step
    )
    return space


def choose(params: Params, g: int, z: U64) -> Chosen:
    """L4: what follows from the moments."""
    n, *rest = np.split(join_sum(z), 1 + g * np.arange(4))
    cells, (y, yy, log, loglog) = round(float(n[0])), rest
    check_moments(params, cells, y, yy, log, loglog)
    if cells <= params.n_components:
        raise ProtocolAbort(
            NAME, "L3", "too-few-cells", f"{cells} cells in all give no {params.n_components} components"
        )
    at = choose_genes(y / cells, variance_of(y, yy, cells), params.n_top_genes)
    if len(at) <= params.n_components:
        raise ProtocolAbort(
            NAME, "L4", "too-few-genes", f"{len(at)} common genes that vary give no {params.n_components} components"
        )
    mean, deviation = log[at] / cells, np.sqrt(variance_of(log[at], loglog[at], cells))
    deviation = np.where(deviation > 0, deviation, 1.0) if params.scale else np.ones(len(at))
    return Chosen(at, mean, deviation, cells)


def pooled(params: Params, chosen: Chosen, z: U64) -> tuple[int, F64, F64]:
    """L6: cells, mean and covariance from the products."""
    h = len(chosen.at)
    words = params.covariance_code(chosen.cells).decode(z)
    check_products(params, chosen.cells, words, h)
    return covariance(words, h)


def _space(common: tuple[str, ...], chosen: Chosen, result: Components) -> Space:
    return Space(
        tuple(common[i] for i in chosen.at),
        chosen.mean,
        chosen.deviation,
        result.center,
        result.components,
        result.variance,
        result.total_variance,
        result.cells,
        common,
    )
