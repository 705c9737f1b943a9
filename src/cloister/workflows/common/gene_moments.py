"""Cells of a site, normalised as scanpy does, and their sums per gene: the local steps of protocols over expression.

    L2   y = target · x / Σ_g x          library-size normalisation over all genes of the cell's site; l = log(1 + y)
    L3   n, Σy, Σy², Σl, Σl²             per gene, some cells at a time; and as words for a secure sum
    L4   genes of largest normalised dispersion, by bins of the mean [SAT+15]

Lines are those of `shared_pca`; `pooled_logistic` chooses its genes in the same way.

A cell's library is the sum over the genes that its own site measured, unless the site names library sizes. Common genes
are chosen by other parties too. Over these, a party that names a few hundred rare genes would divide each cell by a few
counts, and by other lists in other runs read the same sums at other scales. Common genes only decide which columns are
used. Cells that are placed by a model of an earlier run stay where they are; these are normalised over the model's
genes (`of_model`), whatever else their file has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import scipy.sparse

from cloister.arrays import F64, I64, U64, Bits, Index
from cloister.cells import genes
from cloister.disclosure import Shares, largest_of
from cloister.errors import DataError
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.crypto.fixed_point import FixedPoint

BINS = 20  # of the mean expression, for dispersions
LARGEST_LOG = 30.0  # of values that come as logarithms
LARGEST_SUM = 2.0**52  # of one site; 2^10 of them stay below 2^63
FRACTION = FixedPoint(40, 1.0, 1 << 20)  # of the fractional parts of sums
BLOCK = 1 << 22  # entries that are made dense at a time
LEAST_SHARE = 0.5  # of a site's counts in the common genes, below which it logs a warning
SAMPLE = 1000  # cells that the share is found from
HELD = 1 << 24  # values that are not zero, which a site holds from pass to pass


class Normalisation(Protocol):
    """What a protocol's parameters say about it."""

    @property
    def kind(self) -> str:
        """`counts`, or `log`: what x is; log values skip the normalisation."""

    @property
    def target_sum(self) -> float: ...


@dataclass(frozen=True, slots=True)
class Cells:
    """What a site holds: names of its genes, values (n, genes), and the library sizes if they are not the sums of x."""

    names: tuple[str, ...]
    x: Any  # CSR or dense; or anything with a shape that gives rows for a slice, such as a matrix on disk
    library: F64 | None = None
    donor: I64 | None = None  # (n,), codes, where donors are named


def normalised(
    params: Normalisation, mine: Cells, common: list[str] | tuple[str, ...], width: int, *, of_model: bool = False
) -> Iterator[Any]:
    """Yield y (L2) of some cells at a time, as many as `BLOCK` dense entries of that width allow.

    With `of_model`, cells are normalised over `common`, the genes of a model. No sum is made of these.
    """
    at = columns_of(tuple(mine.names), tuple(common))
    step = max(1, BLOCK // max(1, width))
    for start in range(0, mine.x.shape[0], step):
        part = slice(start, min(start + step, mine.x.shape[0]))
        library = None if mine.library is None else mine.library[part]
        x = scipy.sparse.csr_matrix(mine.x[part], dtype=np.float64)
        if params.kind == "counts" and not of_model:
            library = library_of(x, library)
        yield normalise(params, x[:, at], library)


@lru_cache(maxsize=8)  # sites pass over their cells several times, for the same genes
def columns_of(names: tuple[str, ...], common: tuple[str, ...]) -> Index:
    """Positions of the common genes among a site's."""
    at = genes.match_genes(list(names), list(common))
    at.flags.writeable = False
    return at


class Values:
    """y (L2) of a site's cells, some at a time: held in memory after the first pass where these are not too many."""

    def __init__(self, params: Normalisation, mine: Cells, common: Sequence[str]) -> None:
        self.params, self.mine, self.common = params, mine, tuple(common)
        self.held: list[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        """Blocks that nobody may change."""
        if self.held is not None:
            yield from self.held
            return
        parts, size = [], 0
        for y in normalised(self.params, self.mine, self.common, len(self.common)):
            size += y.nnz
            if size <= HELD:
                parts.append(y)
            else:
                parts.clear()
            yield y
        self.held = parts if size <= HELD else None


def library_of(x: Any, library: F64 | None) -> F64:
    """Counts of each cell over all genes of its site, or the sizes that the site names, which hold at least these."""
    total: F64 = np.asarray(x.sum(axis=1), dtype=np.float64).ravel()
    if library is not None and np.any(total > library):
        raise DataError("a cell has more counts than its library size; take the sizes from the raw counts")
    return total if library is None else library


def normalise(params: Normalisation, x: Any, library: F64 | None) -> Any:
    """Return y of the common genes in the common order, sparse (L2). Cells without a count stay zero, as in scanpy."""
    if params.kind == "log":
        if x.nnz and x.data.max() > LARGEST_LOG:
            raise DataError(f"log values above {LARGEST_LOG:g}; these are not logarithms: pass counts instead")
        x.data = np.expm1(x.data)
        return x
    library = library_of(x, library)
    per_cell = params.target_sum / np.where(library == 0, 1.0, library)
    x.data *= np.repeat(per_cell, np.diff(x.indptr))
    return x


def rows_of(x: Any, of: I64) -> scipy.sparse.csr_matrix:
    """Counts of some cells; a matrix on disk is read in runs."""
    if hasattr(x, "tocsr") or isinstance(x, np.ndarray):
        return scipy.sparse.csr_matrix(x[of], dtype=np.float64)
    step, parts = max(1, BLOCK // max(1, x.shape[1])), []
    for start in range(0, x.shape[0], step):
        block = scipy.sparse.csr_matrix(x[start : min(start + step, x.shape[0])], dtype=np.float64)
        parts.append(block[of[(of >= start) & (of < start + step)] - start])
    return scipy.sparse.vstack(parts).tocsr()


def warn_of_share(params: Normalisation, mine: Cells, common: Sequence[str]) -> None:
    """Log at this site that the common genes carry little of its counts: sites measured different genes."""
    if params.kind != "counts" or len(common) == len(mine.names):
        return
    x = scipy.sparse.csr_matrix(mine.x[: min(SAMPLE, mine.x.shape[0])], dtype=np.float64)
    library = None if mine.library is None else mine.library[: x.shape[0]]
    total = library_of(x, library).sum()
    share = x[:, genes.match_genes(list(mine.names), list(common))].sum() / max(total, 1.0)
    if share < LEAST_SHARE:
        genes.LOG.warning(
            f"the {len(common)} genes in common carry {share:.0%} of the counts here, and cells are normalised over "
            "all genes of this site; to normalise over the common ones, bring files with these genes only"
        )


def moments(params: Normalisation, mine: Cells, common: tuple[str, ...]) -> F64:
    """n, Σy, Σy², Σl, Σl² as one vector."""
    return moments_of(Values(params, mine, common))


def moments_of(values: Values, cap: F64 | None = None) -> F64:
    """The same; of a gene with a `cap`, y counts up to that."""
    g = len(values.common)
    sums = np.zeros((4, g))
    for y in values:
        data = y.data if cap is None else np.minimum(y.data, cap[y.indices])
        log = np.log1p(data)
        for row, part in zip(sums, (data, data**2, log, log**2), strict=True):
            row += np.bincount(y.indices, part, minlength=g)
    return np.concatenate([[float(values.mine.x.shape[0])], sums.ravel()])


@dataclass(frozen=True)
class Expressing:
    """Who expresses each common gene at a site, and how large a part of Σy² one of them has."""

    cells: I64  # (g,)
    donors: I64 | None  # (g,), where donors are named
    shares: Shares

    @property
    def one_cell(self) -> Bits:
        """Genes of which one cell has most of Σy²."""
        return replace(self.shares, donor=None).dominated

    @property
    def one_donor(self) -> Shares:
        return replace(self.shares, cell=None)


def expressing(values: Values) -> Expressing:
    """Per gene, how many cells of this site express it, and how many donors do where donors are named."""
    g, start, mine = len(values.common), 0, values.mine
    cells, squares, largest = np.zeros(g, np.int64), np.zeros(g), np.zeros(g)
    people = 0 if mine.donor is None else int(mine.donor.max(initial=-1)) + 1
    of_donor = np.zeros((people, g))
    for y in values:
        there = y.data > 0
        at, square = (y.indices, np.square(y.data)) if there.all() else (y.indices[there], np.square(y.data[there]))
        cells += np.bincount(at, minlength=g)
        squares += np.bincount(at, square, minlength=g)
        np.maximum.at(largest, at, square)
        if mine.donor is not None:
            rows = np.repeat(mine.donor[start : start + y.shape[0]], np.diff(y.indptr))[there]
            of_donor += np.bincount(rows * g + at, square, minlength=people * g).reshape(people, g)
        start += y.shape[0]
    if mine.donor is None:
        return Expressing(cells, None, Shares.of(squares, largest))
    shares = Shares.of(squares, largest, of_donor.max(axis=0, initial=0.0))
    return Expressing(cells, (of_donor > 0).sum(axis=0), shares)


def caps(values: Values, found: Expressing, rank: int) -> F64 | None:
    """Of genes of which one cell has most of Σy²: the value of the `rank`-th largest, so that `rank` cells have it.

    Values above it count as it (top coding). Infinite for other genes; None if there are none of these.
    """
    few = np.flatnonzero(found.one_cell)
    if not len(few):
        return None
    position = np.full(len(values.common), -1)
    position[few] = np.arange(len(few))
    column, size = [], []
    for y in values:
        at = position[y.indices]
        column.append(at[at >= 0])
        size.append(y.data[at >= 0])
    cap = np.full(len(values.common), np.inf)
    cap[few] = np.maximum(largest_of(np.concatenate(column), np.concatenate(size), len(few), rank), 0.0)
    return cap


def split_sum(x: F64, sites: int, entropy: Entropy) -> U64:
    """Whole and fractional parts in words of their own, so that large sums keep their small digits.

    A random whole number moves from one to the other: else the sum of fractions would say how often they pass 1, which
    tells a gene that two sites express from one that a single site does.
    """
    if not np.all(np.abs(x) < LARGEST_SUM):
        raise DataError("sums over this site's cells are too large; check that its values are counts or log values")
    whole, point = np.floor(x), np.uint64(FRACTION.fraction_bits)
    moved = entropy.uint64(len(x)) >> (point + np.uint64(1 + sites.bit_length()))  # so that the sum stays below 2^63
    return np.concatenate(
        [whole.astype(np.int64).view(np.uint64) - moved, FRACTION.encode(x - whole) + (moved << point)]
    )


def join_sum(words: U64) -> F64:
    whole, fraction = np.split(words, 2)
    point = np.uint64(FRACTION.fraction_bits)
    total = (whole + (fraction >> point)).view(np.int64).astype(np.float64)
    return total + FRACTION.decode(fraction & np.uint64((1 << FRACTION.fraction_bits) - 1))


def choose_genes(mean: F64, variance: F64, n_top: int) -> I64:
    """The genes whose log dispersion stands out most among those of similar mean, in their order."""
    mean = np.where(mean == 0, 1e-12, mean)
    dispersion = variance / mean
    seen = dispersion > 0
    log_mean, log_dispersion = np.log1p(mean), np.log(np.where(seen, dispersion, 1.0))
    low, high = log_mean.min(), log_mean.max()
    edges = np.linspace(low, high, BINS + 1)
    edges[0] -= (high - low) * 0.001
    bins = np.searchsorted(edges, log_mean, side="left")
    score = np.full(len(mean), -np.inf)
    for b in np.unique(bins[seen]):
        of = np.flatnonzero((bins == b) & seen)
        if len(of) == 1:
            score[of] = 1.0
        else:
            score[of] = (log_dispersion[of] - log_dispersion[of].mean()) / max(log_dispersion[of].std(ddof=1), 1e-300)
    n_top = min(n_top, int(seen.sum()))
    order = np.argsort(-score, kind="stable")[:n_top]
    return np.sort(order).astype(np.int64)


def variance_of(total: F64, square: F64, n: int) -> F64:
    """Of n values, from their sum and the sum of their squares."""
    return np.maximum(square - total**2 / n, 0.0) / (n - 1)
