"""Pooled markers: genes by which cells of one label differ from all others, over cells and over donors, from one sum.

    L1   u, S    common genes, common seed      genes that every site measured; a secret of the sites, for checked sums
         u, S    common labels                  names of labels with at least t cells of d donors at a site
    L2   u       y = target · x / Σ_g x, over all genes of u; l = log(1 + y)
                 n_k; m_kg, Σ_k l, Σ_k l²       cells of label k; those that express gene g; sums over the label
                 δ_ak = log2((ȳ_ak + ε) / (ȳ_a,rest + ε))       for each donor a with t cells of k and t of the rest
    L3   u, S    checked sum of n_k, m_kg, Σ l, Σ l²; and where donors are named of A_k, A_kg, Σ δ, Σ δ², w_kg
         u, S    per label and gene: Welch's t against the rest, p, false discovery rate, log fold change, fractions;
                 over donors: mean δ and its t
    L4   u, S    all sites received the same broadcasts         (same_view)

The figures over cells are those of scanpy's `rank_genes_groups` (method t-test) on the pooled cells, up to the rules
below. Cells of one donor are not independent: p over cells ranks genes, p over donors tests them.

A site's part of the sum is limited as follows. t and d are `min_cells` and `min_donors`, or more where the site's own
settings say so. Nothing in it depends on a value that another party sends: common genes decide which columns are added
up, and no value of a column.

- Of a donor that has more than half of the cells of a label at the site, those that are too many are left out.
- Labels with fewer than t cells or d donors of the site are one group, "others". It belongs to the rest of every label,
  and is left out if it does not reach t and d itself.
- An entry (k, g) is zero unless t cells of d donors of label k express g here, or if one cell has more than three
  quarters of Σ l² or one donor more than nine tenths of Σ y. All such entries of a gene are added to "others", which is
  zero unless t cells of d donors express g in it.
- If fewer than t cells of label k do not express g, m_kg is n_k. Otherwise, if these are of fewer than d donors, m_kg
  is zero, and the site's cells of k do not count in the fraction: w_kg is n_k, and 0 for all others. The same of
  "others", with all cells of the labels whose entry was added to it; it has no w.
- Sums of l and l² are multiples of 1/`UNIT`; those of δ and δ² of 1/`DONOR_UNIT`.
- Over donors, ȳ of k is taken as zero for all unless t cells of k express g, of d such donors; so is ȳ of the rest. An
  entry is zero unless the label has d such donors here, and one of the two is not. A_k and A_kg count these donors.

Reveals
-------
coordinator : which genes each site measured; names of labels of each site above the thresholds, unless the study lists
    them. Beside these:
coordinator, site : over all sites together, per label: cells and donors; per label and gene: cells expressing it,
    mean and variance, and over donors mean and variance of the log ratio. A label that one site alone has: that site's.
    With two sites: the other's sums.
malicious coordinator : the same. It cannot change a sum or leave out a site without an abort. It can leave out genes
    from those in common.
one malicious site : the same, less its own part. By the genes that it claims to have it can do the same as the
    coordinator. It can make the result wrong.
coordinator with k sites : these sums over the other sites, so with all but one those of the last site.

Assumes
-------
What the checked sum assumes: every site stays to the end. Labels mean the same at all sites. Inputs are not verified: a
site may submit arbitrary sums.

Cost
----
Per site one checked sum, of 2 (K + 1) (1 + 3 g) words for K labels and g common genes, and 2 K (1 + 4 g) more
with donors.

References
----------
[Wel47] Welch, Biometrika 1947. [SMO21] Squair et al., Nature Communications 2021: donors as samples. Lines numbered
here; the security argument is docs/security/pooled_markers.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import scipy.sparse
import scipy.stats

from cloister.arrays import F64, I64, Bits
from cloister.cells import genes
from cloister.disclosure import Contribution, Rows, Shares, Thresholds, join
from cloister.errors import DataError, ParameterError, ProtocolAbort
from cloister.models.voom import false_discovery
from cloister.mpc.crypto.agreement import Identity
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.net.channel import Channel
from cloister.study import Party
from cloister.workflows.common import common_genes, gene_moments, opened_sums
from cloister.workflows.common.opened_sums import OpenedSums, add_costs
from cloister.workflows.train_classifier import common_labels

NAME = "pooled_markers"
UNIT = 4  # sums of log values, and of their squares, are multiples of 1 / UNIT
DONOR_UNIT = 64  # the same of log ratios of donors
PRIOR = 1e-5  # of the target sum: ε
TINY = 1e-9  # as in scanpy's log fold change
OTHERS = ""  # cells of labels below the thresholds


@dataclass(frozen=True, slots=True)
class Params:
    sites: tuple[Party, ...]
    coordinator: Party
    kind: str = "counts"  # or "log"
    target_sum: float = 1e4
    labels: tuple[str, ...] = ()  # the study's vocabulary
    donors: bool = False  # whether donors are named, at every site alike
    min_cells: int = 10  # t
    min_donors: int = 3  # d, where donors are named

    def __post_init__(self) -> None:
        if len(set(self.sites)) < 2 or len(set(self.sites)) != len(self.sites) or self.coordinator in self.sites:
            raise ParameterError(f"markers need at least two sites, all different; found {len(self.sites)}")
        if self.kind not in ("counts", "log") or not self.target_sum > 0:
            raise ParameterError(f"expected counts or log values and a target_sum above 0, found {self.kind}")

    @property
    def thresholds(self) -> Thresholds:
        return Thresholds(self.min_cells, self.min_donors)

    @property
    def common_labels(self) -> common_labels.Params:
        return common_labels.Params(self.sites, self.coordinator, "", self.labels)

    def length(self, labels: int, common: int) -> int:
        of_cells, of_donors = (labels + 1) * (1 + 3 * common), labels * (1 + 4 * common)
        return of_cells + of_donors if self.donors else of_cells


@dataclass(frozen=True, slots=True)
class Cells:
    """What a site holds."""

    cells: gene_moments.Cells  # with donors, where they are named
    labels: tuple[str | None, ...]  # of each cell
    thresholds: Thresholds = field(default_factory=Thresholds)  # this site's own; they can only raise the study's


@dataclass(frozen=True, slots=True)
class Markers:
    """The same at every party; arrays are (K, g), and NaN where nothing is known."""

    labels: tuple[str, ...]
    genes: tuple[str, ...]
    cells: F64  # (K,)
    t: F64
    p: F64
    fdr: F64
    log_fold_change: F64  # base 2, of means of log values taken back, as in scanpy
    fraction: F64  # of the label's cells that express the gene
    fraction_rest: F64
    donors: F64  # (K,)
    donor_change: F64  # mean log2 ratio of a donor's cells of the label to its other cells
    donor_t: F64
    donor_p: F64
    donor_fdr: F64


def ideal(params: Params, xs: Mapping[Party, Cells]) -> dict[Party, Markers]:
    """The same sums over all sites in one place."""
    common = tuple(genes.genes_in_common({u: mine.cells.names for u, mine in xs.items()}))
    own = {u: opened_labels(params, mine) for u, mine in xs.items()}
    labels = tuple(sorted(params.labels or {name for mine in own.values() for name in mine.labels if name}))
    total = np.sum([contribution(params, mine, common, labels).values for mine in own.values()], axis=0)
    return dict.fromkeys((params.coordinator, *xs), markers_of(params, labels, common, total))


def roles(params: Params) -> dict[Party, object]:
    return {params.coordinator: coordinator} | dict.fromkeys(params.sites, site)


def cost(
    params: Params, labels: int, common: int, up: tuple[int, int] = (0, 0), down: tuple[int, int] = (0, 0)
) -> dict[Party, tuple[int, int]]:
    """Messages and bytes; `up` and `down` are bytes of names of genes and of labels."""
    who = (params.sites, params.coordinator)
    parts = [opened_sums.cost(*who, [params.length(labels, common)])]
    parts.append(common_genes.cost(common_genes.Params(*who), up[0], down[0]))
    parts.append(common_labels.cost(params.common_labels, up[1], down[1]))
    return add_costs((params.coordinator, *params.sites), parts)


# ---- a site's part ---------------------------------------------------------------------------------------------------


def check_site(params: Params, mine: Cells) -> None:
    if len(mine.labels) != mine.cells.x.shape[0]:
        raise DataError(f"expected one label per cell, found {len(mine.labels)} for {mine.cells.x.shape[0]} cells")
    if params.donors != (mine.cells.donor is not None):
        raise DataError("donors must be named at all sites, or at none")
    for _ in gene_moments.normalised(params, mine.cells, mine.cells.names, mine.cells.x.shape[1]):
        pass  # a library that holds all genes holds those that are found to be common


def opened_labels(params: Params, mine: Cells) -> Cells:
    """L1: cells of labels below the thresholds are of `OTHERS`, or of none if these are too few together."""
    own = mine.thresholds
    least = params.thresholds.raised({"min_cells": own.min_cells, "min_donors": own.min_donors})
    names = sorted({name for name in mine.labels if name is not None})
    at = {name: i for i, name in enumerate(names)}
    codes = np.array([-1 if name is None else at[name] for name in mine.labels], np.int64)
    rows = Rows(len(codes), mine.cells.donor, least)
    keep = rows.balanced_rows(codes, len(names))
    small = (codes >= 0) & ~np.isin(codes, codes[keep])
    others = rows.balanced_rows(np.where(small, 0, -1), 1)
    labels = tuple(
        name if own else OTHERS if rest else None for name, own, rest in zip(mine.labels, keep, others, strict=True)
    )
    return replace(mine, labels=labels, thresholds=least)


@dataclass
class Sums:
    """L2: by label, others last, and donor; everything that is contributed follows from these."""

    cells: I64  # (a, K + 1)
    expressing: I64  # (a, K + 1, g)
    value: F64  # Σ y, (a, K + 1, g)
    log: F64  # (K + 1, g)
    square: F64  # (K + 1, g)
    largest: F64  # largest l², (K + 1, g)


def sums_of(params: Params, mine: Cells, common: Sequence[str], labels: Sequence[str]) -> tuple[Sums, I64]:
    K, g = len(labels) + 1, len(common)
    at = {name: i for i, name in enumerate(labels)} | {OTHERS: K - 1}
    codes = np.array([-1 if name is None else at[name] for name in mine.labels], np.int64)
    donor = np.zeros(len(codes), np.int64) if mine.cells.donor is None else mine.cells.donor
    a = int(donor.max(initial=-1)) + 1
    sums = Sums(
        np.zeros((a, K), np.int64), np.zeros((a, K, g), np.int64), np.zeros((a, K, g)), np.zeros((K, g)),
        np.zeros((K, g)), np.zeros((K, g)),
    )  # fmt: skip
    np.add.at(sums.cells, (donor[codes >= 0], codes[codes >= 0]), 1)
    start = 0
    for y in gene_moments.normalised(params, mine.cells, tuple(common), g):
        rows = slice(start, start + y.shape[0])
        start = rows.stop
        here = np.flatnonzero(codes[rows] >= 0)
        y, k, who = y[here], codes[rows][here], donor[rows][here]
        log, there = y.copy(), y.copy()
        log.data, there.data = np.log1p(y.data), (y.data > 0).astype(np.float64)
        by_both = one_hot(who * K + k, a * K)
        sums.expressing += np.rint((by_both @ there).toarray()).astype(np.int64).reshape(a, K, g)
        sums.value += (by_both @ y).toarray().reshape(a, K, g)
        by_label = one_hot(k, K)
        sums.log += (by_label @ log).toarray()
        log.data = np.square(log.data)
        sums.square += (by_label @ log).toarray()
        np.maximum.at(sums.largest.reshape(-1), np.repeat(k * g, np.diff(log.indptr)) + log.indices, log.data)
    return sums, codes


def one_hot(codes: I64, kinds: int) -> scipy.sparse.csr_matrix:
    return scipy.sparse.csr_matrix((np.ones(len(codes)), (codes, np.arange(len(codes)))), shape=(kinds, len(codes)))


def contribution(params: Params, mine: Cells, common: Sequence[str], labels: Sequence[str]) -> Contribution:
    """L3."""
    sums, codes = sums_of(params, mine, common, labels)
    rows, K = Rows(len(codes), mine.cells.donor, mine.thresholds), len(labels)
    least, tables = rows.thresholds, [sums.log.copy(), sums.square.copy()]
    expressing = sums.expressing.copy()
    people = (expressing > 0).sum(axis=0) if params.donors else None
    largest, value = sums.largest.copy(), sums.value.copy()
    shares = shares_of(params, sums.square[:K], largest[:K], value[:, :K])
    open_ = rows.sized(expressing.sum(axis=0)[:K].ravel(), None if people is None else people[:K].ravel(), shares)
    shown = open_.open.reshape(K, -1)
    for table in (*tables, *expressing):  # entries below a threshold go to the others
        table[K] += (table[:K] * ~shown).sum(axis=0)
        table[:K] *= shown
    largest[K] = np.maximum(largest[K], (largest[:K] * ~shown).max(axis=0, initial=0.0))
    value[:, K] += (value[:, :K] * ~shown).sum(axis=1)
    m = expressing.sum(axis=0)
    shares = shares_of(params, tables[1], np.where(tables[1] > 0, largest, 0.0), value)
    people = (expressing > 0).sum(axis=0) if params.donors else None
    members = sums.cells[:, :, None] * np.ones((1, 1, len(common)), np.int64)  # by donor, those of an entry's cells
    members[:, K] += (members[:, :K] * ~shown).sum(axis=1)
    members[:, :K] *= shown
    size = members.sum(axis=0)
    lacking = size - m
    counted = np.where(lacking < least.min_cells, size, m)
    withheld = np.zeros(shown.shape)
    if params.donors:
        of_few = (lacking >= least.min_cells) & ((members > expressing).sum(axis=0) < least.min_donors)
        counted, withheld = np.where(of_few, 0, counted), np.where(of_few[:K], size[:K], 0.0)
    rounded = [np.rint(table * UNIT) / UNIT for table in tables]
    parts = [rows.grouped(codes, K + 1)]
    parts += [rows.counted(x.astype(np.float64), m, people, shares) for x in (counted, *rounded)]
    if params.donors:
        parts += donor_parts(params, rows, sums)
        parts.append(rows.counted(withheld, m[:K], None if people is None else people[:K]))
    return join(parts)


def shares_of(params: Params, square: F64, largest: F64, value: F64) -> Shares:
    """By label and gene: which part of Σ l² one cell has, and which part of Σ y one donor."""
    of_donor = Shares.of(value.sum(axis=0), donor=value.max(axis=0, initial=0.0)) if params.donors else Shares()
    return replace(of_donor, cell=Shares.of(square, largest).cell)


def donor_parts(params: Params, rows: Rows, sums: Sums) -> list[Contribution]:
    """L3, over donors: A_k, A_kg, Σ δ, Σ δ²."""
    least, K, g = rows.thresholds, sums.cells.shape[1] - 1, sums.value.shape[2]
    cells = sums.cells[:, :K]
    rest_cells = sums.cells.sum(axis=1, keepdims=True) - cells
    used: Bits = (cells >= least.min_cells) & (rest_cells >= least.min_cells)  # (a, K)
    prior = PRIOR * params.target_sum
    whole, expressing = sums.value.sum(axis=1), sums.expressing.sum(axis=1)
    behind, people = (cells * used).sum(axis=0), used.sum(axis=0)
    total, square, shown = np.zeros((K, g)), np.zeros((K, g)), np.zeros((K, g), np.int64)
    for k in range(K):
        of = np.flatnonzero(used[:, k])
        with_gene = sums.expressing[of, k], expressing[of] - sums.expressing[of, k]  # cells of k, and of the rest
        enough = [(x.sum(axis=0) >= least.min_cells) & ((x > 0).sum(axis=0) >= least.min_donors) for x in with_gene]
        own = enough[0] * sums.value[of, k] / np.maximum(cells[of, k, None], 1)
        rest = enough[1] * (whole[of] - sums.value[of, k]) / np.maximum(rest_cells[of, k, None], 1)
        ratio = np.log2((own + prior) / (rest + prior))
        total[k], square[k] = ratio.sum(axis=0), np.square(ratio).sum(axis=0)
        shown[k] = ((enough[0] * with_gene[0] + enough[1] * with_gene[1]) > 0).sum(axis=0)
    number = np.where(shown >= least.min_donors, behind[:, None], 0)
    counts = np.broadcast_to(people[:, None], (K, g)).astype(np.float64)
    rounded = [np.rint(x * DONOR_UNIT) / DONOR_UNIT for x in (total, square)]
    entries = [rows.counted(x, number, np.minimum(shown, people[:, None])) for x in (counts, *rounded)]
    return [rows.counted(people.astype(np.float64), behind, people), *entries]


# ---- what follows from the sums --------------------------------------------------------------------------------------


def markers_of(params: Params, labels: Sequence[str], common: Sequence[str], total: F64) -> Markers:
    """L3: tests of every label against the rest."""
    K, g = len(labels), len(common)
    ends = np.cumsum([(K + 1) * (1 + 3 * g), K * (1 + 3 * g)])
    of_cells, of_donors, withheld = np.split(total, ends)
    w = np.rint(withheld.reshape(K, g)) if params.donors else np.zeros((K, g))
    every = np.maximum(np.rint(of_cells[: K + 1]), 0.0)
    n, all_n = every[:K], every.sum()
    sums = [x.reshape(K + 1, g) for x in np.split(of_cells[K + 1 :], 3)]
    (m, log, square), (all_m, all_log, all_square) = ([x[:K] for x in sums], [x.sum(axis=0) for x in sums])
    present = n > 0
    if present.sum() < 2:
        raise ProtocolAbort(
            NAME,
            "L3",
            "labels",
            f"{int(present.sum())} label(s) have {params.min_cells} cells at a site; two are needed",
        )
    with np.errstate(divide="ignore", invalid="ignore"):
        rest_n = all_n - n
        mean, variance = _moments(n[:, None], log, square)
        rest_mean, rest_variance = _moments(rest_n[:, None], all_log - log, all_square - square)
        t, p = welch(mean, variance, n[:, None], rest_mean, rest_variance, rest_n[:, None])
        change = np.log2((np.expm1(mean) + TINY) / (np.expm1(rest_mean) + TINY))
        change[(mean == 0) | (rest_mean == 0)] = np.nan  # too few cells express it at every site
        fraction = m / (n[:, None] - w)
        fraction_rest = (all_m - m) / (rest_n[:, None] - (w.sum(axis=0) - w))
    nothing = np.full((K, g), np.nan)
    people, by_donor, donor_t, donor_p = np.zeros(K), nothing, nothing, nothing
    if params.donors:
        people = np.rint(of_donors[:K])
        counts, ratios, squares = (x.reshape(K, g) for x in np.split(of_donors[K:], 3))
        by_donor, donor_t, donor_p = one_sample(np.rint(counts), ratios, squares)
    unknown = ~present
    for table in (t, p, change, fraction, fraction_rest):
        table[unknown] = np.nan
    return Markers(
        tuple(labels), tuple(common), n, t, p, adjusted(p), change,
        np.clip(fraction, 0, 1), np.clip(fraction_rest, 0, 1),
        people, by_donor, donor_t, donor_p, adjusted(donor_p),
    )  # fmt: skip


def _moments(n: F64, total: F64, square: F64) -> tuple[F64, F64]:
    mean = np.clip(total / n, 0.0, gene_moments.LARGEST_LOG)
    return mean, np.maximum(square / n - np.square(total / n), 0.0) * n / np.maximum(n - 1, 1.0)


def welch(mean: F64, variance: F64, n: F64, other: F64, other_variance: F64, m: F64) -> tuple[F64, F64]:
    """T and two-sided p; 0 and 1 where neither group varies."""
    one, two = variance / n, other_variance / m
    with np.errstate(divide="ignore", invalid="ignore"):
        t = (mean - other) / np.sqrt(one + two)
        df = np.square(one + two) / (np.square(one) / np.maximum(n - 1, 1) + np.square(two) / np.maximum(m - 1, 1))
        p = 2 * scipy.stats.t.sf(np.abs(t), df)
    still = ~np.isfinite(t) | ~np.isfinite(df)
    return np.where(still, 0.0, t), np.where(still, 1.0, p)


def one_sample(n: F64, total: F64, square: F64) -> tuple[F64, F64, F64]:
    """Mean, t and two-sided p; NaN for fewer than three donors."""
    with np.errstate(divide="ignore", invalid="ignore"):
        mean = total / n
        variance = np.maximum(square / n - np.square(mean), 0.5 / DONOR_UNIT / n) * n / (n - 1)
        t = mean / np.sqrt(variance / n)
        p = 2 * scipy.stats.t.sf(np.abs(t), n - 1)
    few = n < 3
    return np.where(few, np.nan, mean), np.where(few, np.nan, t), np.where(few, np.nan, p)


def adjusted(p: F64) -> F64:
    """False discovery rates, over the genes of each label."""
    out = np.full(p.shape, np.nan)
    for k, row in enumerate(p):
        known = np.isfinite(row)
        if known.any():
            out[k, known] = false_discovery(row[known])
    return out


# ---- roles -----------------------------------------------------------------------------------------------------------


async def site(ch: Channel, params: Params, mine: Cells, *, entropy: Entropy, identity: Identity) -> Markers:
    """Be u."""
    check_site(params, mine)
    mine = opened_labels(params, mine)
    own = common_labels.Own("", 0, tuple(sorted({name for name in mine.labels if name})))
    common_labels.check_own(params.common_labels, own)
    agreement = common_genes.Params(params.sites, params.coordinator)
    agreed = await common_genes.site(ch.sub("genes"), agreement, params.kind, list(mine.cells.names))  # L1
    opened = OpenedSums(ch, NAME, params.sites, params.coordinator, entropy, identity)
    await opened.begin()
    labels = (await common_labels.site(ch.sub("labels", params.common_labels), params.common_labels, own)).labels
    gene_moments.warn_of_share(params, mine.cells, agreed.names)
    return await follow(opened, params, labels, agreed.names, mine)


async def coordinator(ch: Channel, params: Params) -> Markers:
    """Be S."""
    agreement = common_genes.Params(params.sites, params.coordinator)
    agreed = await common_genes.coordinator(ch.sub("genes"), agreement)  # L1
    opened = OpenedSums(ch, NAME, params.sites, params.coordinator)
    await opened.begin()
    labels = (await common_labels.coordinator(ch.sub("labels", params.common_labels), params.common_labels)).labels
    return await follow(opened, params, labels, agreed.names, None)


async def follow(
    opened: OpenedSums, params: Params, labels: tuple[str, ...], common: tuple[str, ...], mine: Cells | None
) -> Markers:
    """L2 to L4, at any party."""

    def part() -> Contribution:
        assert mine is not None
        return contribution(params, mine, common, labels)

    what = f"moments of {len(common)} genes in {len(labels)} labels"
    total = await opened.add("L3", what, params.length(len(labels), len(common)), part)  # L3
    found = markers_of(params, labels, common, total)
    await opened.finish()  # L4
    return found
