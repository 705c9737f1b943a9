"""Terms of `pooled_contrasts`: what is compared, what a site holds, and what all parties know of a table.

Lines are those of `pooled_contrasts`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from cloister.arrays import F64, I64, Bits
from cloister.cells.genes import match_genes
from cloister.disclosure import SLACK, Contribution, Rows, Thresholds
from cloister.errors import DataError, ParameterError
from cloister.models import voom
from cloister.study import Party

NAME = "pooled_contrasts"
LEAST_DONORS = 2  # that a study may agree on
EXACT = 32  # samples of a site in a table; with no more, sums per gene are rounded and samples have one weight
GRAIN = 2.0**-10  # what they are rounded to
LEAST_COUNT = 10.0  # of a gene in min_donors donors of a site; sums of smaller counts give these and the libraries away
LEAST_FACTOR = 1e-12  # of a sample's size; reached only where a malicious site hid that genes are not counted


@dataclass(frozen=True, slots=True)
class Params:
    sites: tuple[Party, ...]
    coordinator: Party
    groups: tuple[str, ...]  # the first is the reference
    contrasts: tuple[tuple[int, int], ...] = ((1, 0),)  # which groups, the second taken from the first
    covariates: tuple[str, ...] = ()
    block: str = "site"  # or "donor", "none": what is taken out where it is
    labels: tuple[str, ...] | None = None  # vocabulary of cell types; None: collected
    expression: bool = True
    composition: bool = False
    normalise: str = "rle"  # or "library"
    transform: str = "logit"  # or "asin"
    min_donors: int = 3
    min_count: float = 10.0

    def __post_init__(self) -> None:
        if len(self.groups) < 2 or len(set(self.groups)) != len(self.groups):
            raise ParameterError(f"expected at least two groups, each once, found {', '.join(self.groups) or 'none'}")
        if not self.contrasts or any(
            a == b or not 0 <= min(a, b) <= max(a, b) < len(self.groups) for a, b in self.contrasts
        ):
            raise ParameterError("a contrast compares two of the groups")
        if self.block not in ("site", "donor", "none"):
            raise ParameterError(f"block must be site, donor or none, found {self.block!r}")
        if self.min_donors < LEAST_DONORS:
            raise ParameterError(f"min_donors must be at least {LEAST_DONORS}, found {self.min_donors}")

    def vector(self, contrast: tuple[int, int], columns: int) -> F64:
        """A contrast as weights of the design's columns, in which the reference has none."""
        c = np.zeros(columns)
        for group, sign in zip(contrast, (1.0, -1.0), strict=True):
            if group:
                c[group - 1] = sign
        return c


class Bulk(NamedTuple):
    """Counts of one cell type, added up over the cells of each sample."""

    rows: I64  # which samples
    counts: F64  # (rows, genes)
    cells: I64 | None = None  # (rows,), cells behind each; None: not known, `min_cells` of the thresholds is assumed


@dataclass(frozen=True, slots=True)
class Donors:
    """What a site holds. A sample is one donor's cells of one group."""

    names: tuple[str, ...]  # of genes
    donor: I64  # (n,), whose sample it is
    group: I64  # (n,), position among the groups
    covariates: tuple[F64 | tuple[str, ...], ...]  # (n,) each: numbers, or names
    bulks: Mapping[str, Bulk]  # by cell type; "" for all cells
    cells: Mapping[str, I64]  # cells of each type in each sample, (n,)
    thresholds: Thresholds = field(default_factory=Thresholds)  # this site's own; min_donors = 1 excludes nothing

    def levels(self) -> tuple[tuple[str, ...], ...]:
        """Names that enough donors here have in each covariate; none where it is a number."""
        return tuple(self._shared(c) if isinstance(c, tuple) else () for c in self.covariates)

    def labels(self) -> tuple[str, ...]:
        """Cell types that enough donors here have."""
        donors = Counter({k: len(set(self.donor[b.rows].tolist())) for k, b in self.bulks.items()})
        for k, n in self.cells.items():
            donors[k] = max(donors[k], len(set(self.donor[n > 0].tolist())))
        return tuple(sorted(k for k, n in donors.items() if k and n >= self.thresholds.min_donors))

    def _shared(self, values: tuple[str, ...]) -> tuple[str, ...]:
        donors = Counter(value for value, _ in {*zip(values, self.donor.tolist(), strict=True)})
        return tuple(sorted(value for value, n in donors.items() if n >= self.thresholds.min_donors))


@dataclass(frozen=True, slots=True)
class Part:
    """A site's samples in one table, without those that no sum may hold."""

    donor: I64
    group: I64
    covariates: tuple[F64 | tuple[str, ...], ...]
    counts: F64  # (n, genes or cell types)
    library: F64  # (n,), counts over all genes of the site, or all cells
    cells: I64  # (n,), cells behind each sample
    thresholds: Thresholds
    donors: float = 0.0  # effective number: 1 / the largest leverage of a donor in what is opened of this table
    excluded: tuple[str, ...] = ()  # sentences about samples left out, for this site alone
    least_count: float = 1.0  # counts that show a column in a sample

    def blocks(self, block: str) -> I64:
        if block == "none":
            return np.full(len(self.group), -1)
        return self.donor if block == "donor" else np.zeros(len(self.group), np.int64)

    def only(self, keep: I64) -> Part:
        mine = tuple(tuple(c[i] for i in keep) if isinstance(c, tuple) else c[keep] for c in self.covariates)
        cut = {k: getattr(self, k)[keep] for k in ("donor", "group", "counts", "library", "cells")}
        return replace(self, covariates=mine, **cut)

    @property
    def rows(self) -> Rows:
        return Rows(len(self.group), self.donor, self.thresholds, self.cells)

    @property
    def exact(self) -> bool:
        """Whether sums per gene keep all digits: logarithms of few integers would give these away."""
        return self.thresholds.min_donors == 1 or len(self.group) > EXACT

    def rounded(self, sums: F64) -> F64:
        return sums if self.exact else np.asarray(np.rint(sums / GRAIN) * GRAIN)

    @property
    def few(self) -> Bits:
        """Columns that some donor here has, but fewer than min_donors with `least_count` counts.

        A sum of one or two donors comes close to one person. Sums of small counts over any number of donors leave few
        solutions, and many such genes determine the libraries and each donor's counts.
        """
        if self.thresholds.min_donors == 1:
            return np.zeros(self.counts.shape[1], bool)
        donors = self.rows.members(self.counts >= self.least_count).donors
        assert donors is not None
        return np.asarray(np.any(self.counts > 0, axis=0) & (donors < self.thresholds.min_donors))

    def contribution(self, sums: F64, donors: F64 | None = None) -> Contribution:
        """Sums over all samples, (k, …), with the effective number of donors behind each of the k."""
        size = np.full(len(sums), self.donors) if donors is None else donors
        return self.rows.measured(size * (self.cells.min() if len(self.cells) else 0), size, sums)


def spanned(params: Params, part: Part) -> F64:
    """Columns that opened sums combine samples by: groups, levels and numbers, as they are and within blocks."""
    columns = [(part.group == g).astype(np.float64) for g in range(len(params.groups))]
    for c in part.covariates:
        if isinstance(c, tuple):
            columns += [np.array([v == k for v in c], np.float64) for k in sorted(set(c))]
        else:
            z = np.asarray(c, np.float64) - np.mean(c)
            columns.append(z / max(float(np.abs(z).max(initial=0.0)), 1e-300))
    X = np.stack([*columns, np.ones(len(part.group))], axis=1)
    return np.hstack([X, voom.within(X, part.donor)]) if params.block == "donor" else X


def admitted(params: Params, part: Part, opened: int) -> Part:
    """L4: the samples that sums may hold, dropped before anything is added up, so that no sum has a complement.

    A group or level needs min_donors donors here. So does any linear combination of all opened sums of a gene: no donor
    has a leverage above 1 / min_donors in the columns by which samples are added up. And there must be more samples
    than sums of a gene, `opened`, as otherwise these equations determine the values.
    """
    least, notes = part.thresholds.min_donors, []
    if least == 1:
        return replace(part, donors=float(len(set(part.donor.tolist()))))
    while len(part.group):
        names = [(f"group '{params.groups[g]}'", part.group == g) for g in np.unique(part.group)]
        for covariate, values in zip(params.covariates, part.covariates, strict=True):
            if isinstance(values, tuple):
                names += [(f"'{covariate}' = '{k}'", np.array([v == k for v in values])) for k in sorted(set(values))]
        sizes = part.rows.members(np.stack([inside for _, inside in names], axis=1))
        if small := [i for i in range(len(names)) if not sizes.open[i]]:
            name, inside = names[small[0]]
            notes.append(f"{_people(part.donor[inside])} of {name}: fewer than {least}")
            part = part.only(np.flatnonzero(~inside))
            continue
        people, leverage = voom.leverages(voom.basis_of(spanned(params, part)), part.donor)
        worst = int(np.argmax(leverage))
        if leverage[worst] * least <= 1 + SLACK:
            part = replace(part, donors=float(1 / leverage[worst]))
            break
        notes.append("1 donor that groups and covariates set apart from the others here")
        part = part.only(np.flatnonzero(part.donor != people[worst]))
    if 0 < len(part.group) <= opened:
        notes.append(f"all {len(part.group)} samples: {opened} sums of a gene are opened, so {opened + 1} are needed")
        part = part.only(np.zeros(0, np.int64))
    counted = Counter(notes)
    return replace(part, excluded=tuple(f"{n} times {text}" if n > 1 else text for text, n in counted.items()))


def _people(donor: I64) -> str:
    n = len(set(donor.tolist()))
    return f"{n} donor{'s' if n > 1 else ''}"


def part_of(t: Table, mine: Donors) -> Part:
    """L4: the samples of one table, without those of which no sum may be opened."""
    rows: I64 = np.arange(len(mine.group))
    counts: F64 = np.zeros((0, len(t.names)))
    cells: I64 | None = None
    library: F64 | None = None
    if t.composition:
        nothing = np.zeros(len(rows))
        counts = np.stack([mine.cells.get(k, nothing) for k in t.names], axis=1).astype(np.float64)
        cells = counts.sum(axis=1).astype(np.int64)
    elif t.label in mine.bulks:
        bulk = mine.bulks[t.label]
        rows, counts, cells = bulk.rows, bulk.counts[:, match_genes(list(mine.names), t.names)], bulk.cells
        library = bulk.counts.sum(axis=1)  # over all genes of the site: others choose the common ones too
    else:
        rows = rows[:0]
    here = tuple(tuple(c[i] for i in rows) if isinstance(c, tuple) else c[rows] for c in mine.covariates)
    size = np.full(len(rows), mine.thresholds.min_cells) if cells is None else cells
    library = counts.sum(axis=1) if library is None else library
    part = Part(mine.donor[rows], mine.group[rows], here, counts, library, size, mine.thresholds)
    part = part if t.composition else replace(part, least_count=LEAST_COUNT)
    return admitted(t.params, part.only(np.flatnonzero(part.library > 0)), t.opened)


def check_site(params: Params, mine: Donors) -> None:
    n = len(mine.group)
    whole = len(mine.donor) == n and all(len(c) == n for c in mine.covariates)
    if not whole or len(mine.covariates) != len(params.covariates):
        raise DataError("donors, groups and covariates must have one entry per sample")
    if n and not 0 <= mine.group.min() <= mine.group.max() < len(params.groups):
        raise DataError("a sample belongs to none of the groups")
    if len(set(zip(mine.donor.tolist(), mine.group.tolist(), strict=True))) != n:
        raise DataError("a sample is one donor's cells of one group; add those of the same donor and group up")
    if params.block != "donor" and len(set(mine.donor.tolist())) != n:
        raise DataError(
            "some donors have cells in several groups, which are not independent samples; "
            "pass block='donor' to compare them within donors"
        )
    for bulk in mine.bulks.values():
        if bulk.counts.shape != (len(bulk.rows), len(mine.names)) or not np.all(bulk.counts >= 0):
            raise DataError("counts must be at least 0, one row per sample and one column per gene")


# ---- tables ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Result:
    """What came of one table; the same at every party."""

    label: str
    composition: bool
    names: tuple[str, ...]  # (g,), genes or cell types
    average: F64  # (g,), mean of y over all donors
    tested: tuple[voom.Tested, ...]  # one per contrast
    donors: tuple[int, ...]  # per group
    df: int
    prior: voom.Prior
    trend: voom.Trend | None
    shares: F64 | None  # (groups, cell types), mean share of a donor's cells
    notes: tuple[str, ...]


@dataclass
class Table:
    """What all parties know of one table, step by step."""

    params: Params
    label: str
    names: tuple[str, ...]
    levels: tuple[tuple[str, ...], ...]  # of covariates that are names
    composition: bool = False
    left_out: str = ""  # why
    notes: list[str] = field(default_factory=list)
    donors: I64 = field(default_factory=lambda: np.zeros(0, np.int64))
    blocks: int = 0
    mean_library: float = 0.0
    center: F64 = field(default_factory=lambda: np.zeros(0))  # of covariates that are numbers
    scale: F64 = field(default_factory=lambda: np.zeros(0))
    keep: I64 = field(default_factory=lambda: np.zeros(0, np.int64))  # genes or types that are compared
    everywhere: I64 = field(default_factory=lambda: np.zeros(0, np.int64))  # among these, counted in every donor
    mean_log: F64 = field(default_factory=lambda: np.zeros(0))
    log_factor: float = 0.0
    xx: F64 = field(default_factory=lambda: np.zeros((0, 0)))  # XᵀX
    average: F64 = field(default_factory=lambda: np.zeros(0))
    plain: voom.Fit | None = None
    trend: voom.Trend | None = None
    shares: F64 | None = None
    result: Result | None = None

    @property
    def n(self) -> int:
        return int(self.donors.sum())

    @property
    def opened(self) -> int:
        """Independent sums per row that a site with weights of its own adds to: L6, L7, L8, Xᵀy, yᵀy, Σy; or shares."""
        return len(self.columns) + 3 + (len(self.params.groups) if self.composition else 2)

    @property
    def opened_weighted(self) -> int:
        """The same of a site whose samples have weights: XᵀWX, XᵀWr and rᵀWr as well."""
        return 6 + len(self.columns) * (len(self.columns) + 5) // 2

    @property
    def numeric(self) -> list[int]:
        return [i for i, names in enumerate(self.levels) if not names]

    @property
    def columns(self) -> list[str]:
        """Of the design: groups but the first, covariates, and a constant where no block has its own."""
        named = [f"{c}={k}" for c, ks in zip(self.params.covariates, self.levels, strict=True) for k in ks[1:]]
        numbers = [self.params.covariates[i] for i in self.numeric]
        return [*self.params.groups[1:], *named, *numbers, *(["1"] if self.params.block == "none" else [])]

    def design(self, part: Part) -> F64:
        columns = [(part.group == g).astype(np.float64) for g in range(1, len(self.params.groups))]
        for values, names in zip(part.covariates, self.levels, strict=True):
            columns += [np.array([v == k for v in values], np.float64) for k in names[1:]]
        for i, center, scale in zip(self.numeric, self.center, self.scale, strict=True):
            columns.append((np.asarray(part.covariates[i], np.float64) - center) / scale)
        if self.params.block == "none":
            columns.append(np.ones(len(part.group)))
        return np.stack(columns, axis=1)

    def values(self, part: Part) -> tuple[F64, F64]:
        """y, and the effective library sizes."""
        if self.composition:
            return transformed(part.counts, part.library, self.params.transform)[:, self.keep], part.library
        library = part.library
        if len(self.everywhere):
            library = library * self.factors(part) / np.exp(self.log_factor)
        return voom.log_cpm(part.counts[:, self.keep], library), library

    def factors(self, part: Part) -> F64:
        return np.maximum(
            voom.size_factors(part.counts[:, self.keep[self.everywhere]], part.library, self.mean_log), LEAST_FACTOR
        )


def transformed(counts: F64, cells: F64, how: str) -> F64:
    """Shares of cell types, on a scale where they spread alike."""
    share = (counts + 0.5) / (cells[:, None] + 0.5 * counts.shape[1])
    y: F64 = np.arcsin(np.sqrt(counts / cells[:, None])) if how == "asin" else np.log(share / (1 - share))
    return y
