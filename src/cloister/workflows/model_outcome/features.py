"""Features of donors from their cells: shares of cell types, expression, means of columns, facts about the donor.

age                        column of obs, a number, the same for all cells of a donor
sex=female|male            column of obs with names; the first is the reference
share:B cell               share of a cell type among the donor's cells, centred log-ratio over all `labels`
gene:MS4A1                 log2 counts per million of a gene in all cells of the donor, plus one
gene:MS4A1@B cell          the same in the donor's cells of one type
signature:IFN=ISG15+MX1    mean of that over the genes; with @TYPE in cells of one type
mean:score                 mean over the donor's cells of a column of obs, such as the score of a saved model
age * share:B cell         product of two of them
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from cloister.arrays import F64, I64
from cloister.cells.bulks import add_up
from cloister.cells.values import listed
from cloister.errors import DataError, ParameterError

if TYPE_CHECKING:
    from anndata import AnnData

TIMES = " * "
KINDS = ("share", "gene", "signature", "mean")
SHARE_PRIOR = 0.5  # cells added to each type, so that a type may be missing


@dataclass(frozen=True, slots=True)
class Feature:
    """One feature as the study names it."""

    text: str
    kind: str  # one of KINDS; "number" or "names" for a column of obs
    name: str  # of the column, cell type, or signature
    genes: tuple[str, ...] = ()
    within: str = ""  # cell type that expression is of
    levels: tuple[str, ...] = ()  # names that a column may have, the reference first

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of its columns in the design."""
        if self.kind == "names":
            return tuple(f"{self.name}:{level}" for level in self.levels[1:])
        return (self.text.partition("=")[0] if self.kind == "signature" else self.text,)


def parse(text: str) -> Feature:
    head, colon, rest = text.partition(":")
    if not colon or head not in KINDS or "=" in head:
        name, equals, names = text.partition("=")
        levels = tuple(names.split("|")) if equals else ()
        if not name or (equals and (len(levels) < 2 or len(set(levels)) != len(levels) or not all(levels))):
            raise ParameterError(f"feature '{text}': expected a column, or COLUMN=reference|other with each name once")
        return Feature(text, "names" if equals else "number", name, levels=levels)
    if not rest:
        raise ParameterError(f"feature '{text}': a name must follow '{head}:'")
    if head in ("share", "mean"):
        return Feature(text, head, rest)
    rest, _, within = rest.partition("@")
    name, equals, genes = rest.partition("=")
    if head == "signature" and (not equals or not name or not all(genes.split("+"))):
        raise ParameterError(f"feature '{text}': a signature is written signature:NAME=GENE+GENE")
    return Feature(text, head, name, tuple(genes.split("+")) if equals else (name,), within)


@dataclass(frozen=True, slots=True)
class Design:
    """The columns of a design, as all sites know them."""

    features: tuple[Feature, ...]
    covariates: tuple[Feature, ...]
    interactions: tuple[tuple[Feature, Feature], ...]
    each: bool  # a regression for each feature, all with the covariates

    @classmethod
    def of(
        cls, features: Sequence[str], covariates: Sequence[str], interactions: Sequence[str], *, each: bool
    ) -> Design:
        first, second = tuple(map(parse, features)), tuple(map(parse, covariates))
        known = {f.text: f for f in (*first, *second)} | {
            f.columns[0].partition(":")[0]: f for f in (*first, *second) if f.kind == "names"
        }
        known |= {f.columns[0]: f for f in first + second if f.kind == "signature"}
        if len({f.text for f in (*first, *second)}) != len(first) + len(second):
            raise ParameterError("options 'features' and 'covariates' must name each feature once")
        pairs = []
        for text in interactions:
            one, _, other = text.partition(TIMES)
            if one not in known or other not in known:
                raise ParameterError(
                    f"interaction '{text}' must be two of the features and covariates with '{TIMES}' between them: "
                    f"{', '.join(known)}"
                )
            pairs.append((known[one], known[other]))
        if not first and not second:
            raise ParameterError("option 'features' is empty; name at least one feature")
        return cls(first, second, tuple(pairs), each)

    @property
    def all(self) -> tuple[Feature, ...]:
        return (*self.features, *self.covariates)

    @property
    def columns(self) -> tuple[str, ...]:
        names = [c for f in self.all for c in f.columns]
        names += [f"{a}{TIMES}{b}" for f, g in self.interactions for a in f.columns for b in g.columns]
        if len(set(names)) != len(names):
            raise ParameterError("two features have the same name; rename a column or a signature")
        return tuple(names)

    @property
    def fits(self) -> tuple[tuple[int, ...], ...]:
        """Positions of the columns of each regression."""
        place = {c: i for i, c in enumerate(self.columns)}
        if not self.each:
            return (tuple(range(len(place))),)
        made = []
        for feature in self.features:
            mine = [feature, *self.covariates]
            at = [place[c] for f in mine for c in f.columns]
            at += [
                place[f"{a}{TIMES}{b}"]
                for f, g in self.interactions
                if f in mine and g in mine
                for a in f.columns
                for b in g.columns
            ]
            made.append(tuple(at))
        return tuple(made)


def weights_of(contrast: str, columns: Sequence[str]) -> F64:
    """A contrast such as 'sex:male - 2 age', as weights of the columns."""
    weights = np.zeros(len(columns))
    for sign, part in re.findall(r"(?:^|(?<=\s))([+-]?)\s*(.+?)(?=\s[+-]\s|$)", contrast.strip()):
        number, _, name = part.strip().partition(" ")
        try:
            factor = float(number)
        except ValueError:
            factor, name = 1.0, part.strip()
        if name not in columns:
            raise ParameterError(f"contrast '{contrast}': '{name}' is none of the terms {', '.join(columns)}")
        weights[list(columns).index(name)] += -factor if sign == "-" else factor
    if not weights.any():
        raise ParameterError(f"contrast '{contrast}' must combine terms, such as 'A - B' or 'A + 2 B'")
    return weights


# ---- from cells ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Samples:
    """The donors of a site: which cells, and where each begins."""

    names: tuple[str, ...]
    of_cell: I64
    first: I64
    cells: I64


def samples_of(adata: AnnData, donor_key: str) -> Samples:
    names, first, of, cells = np.unique(
        adata.obs[donor_key].astype(str).to_numpy(), return_index=True, return_inverse=True, return_counts=True
    )
    return Samples(tuple(names.tolist()), of.astype(np.int64), first.astype(np.int64), cells.astype(np.int64))


def column_of(adata: AnnData, name: str, samples: Samples) -> list[object]:
    """A column that has one value for each donor; None where it is missing."""
    if name not in adata.obs:
        raise DataError(f"adata.obs[{name!r}] is missing; there is {listed(adata.obs)}")
    column = adata.obs[name]
    missing = column.isna().to_numpy()
    codes = np.unique(column.astype(str).to_numpy(), return_inverse=True)[1]
    if np.any(codes != codes[samples.first][samples.of_cell]):
        raise DataError(f"adata.obs[{name!r}] differs between cells of one donor; it must be a fact about the donor")
    return [None if missing[i] else column.iloc[i] for i in samples.first]


def numbers_of(adata: AnnData, name: str, samples: Samples) -> F64:
    values = column_of(adata, name, samples)
    try:
        return np.array([np.nan if v is None else float(v) for v in values])  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise DataError(
            f"adata.obs[{name!r}] holds names; write them as '{name}=reference|other', or turn them into numbers"
        ) from None


def matrix_of(
    adata: AnnData,
    design: Design,
    samples: Samples,
    *,
    label_key: str | None,
    labels: Sequence[str],
    layer: str | None,
    gene_names: Sequence[str],
    min_cells: int,
) -> F64:
    """One row per donor, one column per column of the design; NaN where a donor lacks something."""
    made: dict[str, F64] = {}
    expression = _expression(adata, design, samples, label_key, layer, gene_names, min_cells)
    for f in design.all:
        if f.kind == "number":
            made[f.columns[0]] = numbers_of(adata, f.name, samples)
        elif f.kind == "names":
            values = column_of(adata, f.name, samples)
            other = sorted({str(v) for v in values if v is not None} - {*f.levels})
            if other:
                raise DataError(
                    f"adata.obs[{f.name!r}] holds a name that '{f.text}' does not list; rename it, or list it"
                )
            for level, column in zip(f.levels[1:], f.columns, strict=True):
                made[column] = np.array([np.nan if v is None else float(str(v) == level) for v in values])
        elif f.kind == "mean":
            made[f.columns[0]] = _mean_of(adata, f.name, samples)
        elif f.kind == "share":
            made[f.columns[0]] = _shares(adata, samples, label_key, labels)[:, list(labels).index(f.name)]
        else:
            made[f.columns[0]] = expression[f.text]
    for f, g in design.interactions:
        for a in f.columns:
            for b in g.columns:
                made[f"{a}{TIMES}{b}"] = made[a] * made[b]
    x: F64 = np.stack([made[c] for c in design.columns], axis=1)
    return x


def _codes(adata: AnnData, label_key: str | None, labels: Sequence[str]) -> I64:
    if label_key is None:
        raise DataError("features of cell types need label_key=, the column of obs with cell types")
    if label_key not in adata.obs:
        raise DataError(f"adata.obs[{label_key!r}] is missing; there is {listed(adata.obs)}")
    column, place = adata.obs[label_key], {name: i for i, name in enumerate(labels)}
    return np.array([place.get(str(v), -1) for v in column.astype(object)], np.int64)


def _shares(adata: AnnData, samples: Samples, label_key: str | None, labels: Sequence[str]) -> F64:
    """Centred log-ratios, (donors, labels)."""
    code, n, k = _codes(adata, label_key, labels), len(samples.names), len(labels)
    inside = code >= 0
    counts = np.bincount(samples.of_cell[inside] * k + code[inside], minlength=n * k).reshape(n, k)
    logs = np.log(counts + SHARE_PRIOR)
    made: F64 = logs - logs.mean(axis=1, keepdims=True)
    made[counts.sum(axis=1) == 0] = np.nan
    return made


def _mean_of(adata: AnnData, name: str, samples: Samples) -> F64:
    if name not in adata.obs:
        raise DataError(f"adata.obs[{name!r}] is missing; there is {listed(adata.obs)}")
    if adata.obs[name].dtype.kind not in "iufb":
        raise DataError(f"adata.obs[{name!r}] holds names; 'mean:{name}' needs numbers")
    values = adata.obs[name].to_numpy(dtype=np.float64)
    there = np.isfinite(values)
    n = len(samples.names)
    count = np.bincount(samples.of_cell[there], minlength=n)
    total = np.bincount(samples.of_cell[there], values[there], minlength=n)
    made: F64 = np.where(count > 0, total / np.maximum(count, 1), np.nan)
    return made


def _expression(
    adata: AnnData,
    design: Design,
    samples: Samples,
    label_key: str | None,
    layer: str | None,
    gene_names: Sequence[str],
    min_cells: int,
) -> dict[str, F64]:
    """Mean log counts per million of the genes of each feature, from one pass over the cells."""
    wanted = [f for f in design.all if f.kind in ("gene", "signature")]
    if not wanted:
        return {}
    place = {name: i for i, name in enumerate(gene_names)}
    for f in wanted:
        if lacking := [g for g in f.genes if g not in place]:
            raise DataError(f"feature '{f.text}': gene '{lacking[0]}' is not among the genes here")
    types, n = sorted({f.within for f in wanted}), len(samples.names)
    named = [t for t in types if t]
    code = _codes(adata, label_key, named) if named else np.full(adata.n_obs, -1, np.int64)
    made: dict[str, F64] = {}
    sums = add_up(adata, np.where(code >= 0, code * n + samples.of_cell, -1), len(named) * n, layer) if named else None
    whole = add_up(adata, samples.of_cell, n, layer) if "" in types else None
    for f in wanted:
        if f.within:
            assert sums is not None
            k = named.index(f.within)
            counts, cells = sums[k * n : (k + 1) * n], np.bincount(samples.of_cell[code == k], minlength=n)
        else:
            assert whole is not None
            counts, cells = whole, samples.cells
        library = counts.sum(axis=1)
        rate = counts[:, [place[g] for g in f.genes]] / np.maximum(library, 1.0)[:, None]
        values = np.log2(1e6 * rate + 1).mean(axis=1)
        made[f.text] = np.where((cells >= min_cells) & (library > 0), values, np.nan)
    return made
