"""Cells of a site, normalised as scanpy does, and their sums per gene: the local steps of protocols over expression.

    L2   y = target · x / Σ_g x          library-size normalisation of each cell over the common genes; l = log(1 + y)
    L3   n, Σy, Σy², Σl, Σl²             per gene, some cells at a time; and as words for a secure sum
    L4   genes of largest normalised dispersion, by bins of the mean [SAT+15]

Lines are those of `shared_pca`; `pooled_logistic` chooses its genes in the same way.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import scipy.sparse

from cloister.arrays import F64, I64, U64
from cloister.cells import genes
from cloister.errors import DataError
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.crypto.fixed_point import FixedPoint

BINS = 20  # of the mean expression, for dispersions
LARGEST_LOG = 30.0  # of values that come as logarithms
LARGEST_SUM = 2.0**52  # of one site; 2^10 of them stay below 2^63
FRACTION = FixedPoint(40, 1.0, 1 << 20)  # of the fractional parts of sums
BLOCK = 1 << 22  # entries that are made dense at a time


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


def normalised(params: Normalisation, mine: Cells, common: list[str] | tuple[str, ...], width: int) -> Iterator[Any]:
    """Yield y (L2) of some cells at a time, as many as `BLOCK` dense entries of that width allow."""
    at = genes.match_genes(list(mine.names), common)
    step = max(1, BLOCK // max(1, width))
    for start in range(0, mine.x.shape[0], step):
        part = slice(start, min(start + step, mine.x.shape[0]))
        library = None if mine.library is None else mine.library[part]
        yield normalise(params, scipy.sparse.csr_matrix(mine.x[part], dtype=np.float64)[:, at], library)


def normalise(params: Normalisation, x: Any, library: F64 | None) -> Any:
    """Return y of the common genes in the common order, sparse (L2). Cells without a count stay zero, as in scanpy."""
    if params.kind == "log":
        if x.nnz and x.data.max() > LARGEST_LOG:
            raise DataError(f"log values above {LARGEST_LOG:g}; these are not logarithms: pass counts instead")
        x.data = np.expm1(x.data)
        return x
    total = np.asarray(x.sum(axis=1)).ravel()
    if library is not None and np.any(total > library):
        raise DataError("a cell has more counts than its library size; take the sizes from the raw counts")
    library = total if library is None else library
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


def moments(params: Normalisation, mine: Cells, common: tuple[str, ...]) -> F64:
    """n, Σy, Σy², Σl, Σl² as one vector."""
    g = len(common)
    sums = np.zeros((4, g))
    for y in normalised(params, mine, common, g):
        log = np.log1p(y.data)
        for row, values in zip(sums, (y.data, y.data**2, log, log**2), strict=True):
            row += np.bincount(y.indices, values, minlength=g)
    return np.concatenate([[float(mine.x.shape[0])], sums.ravel()])


def expressing(params: Normalisation, mine: Cells, common: tuple[str, ...]) -> tuple[I64, I64 | None]:
    """Per gene, how many cells of this site express it, and how many donors do where donors are named."""
    g, start = len(common), 0
    cells = np.zeros(g, np.int64)
    donors = 0 if mine.donor is None else int(mine.donor.max(initial=-1)) + 1
    who = np.zeros((donors, g), bool)
    for y in normalised(params, mine, common, g):
        there = y.data > 0
        cells += np.bincount(y.indices[there], minlength=g)
        if mine.donor is not None:
            rows = np.repeat(mine.donor[start : start + y.shape[0]], np.diff(y.indptr))
            who[rows[there], y.indices[there]] = True
        start += y.shape[0]
    return cells, None if mine.donor is None else who.sum(axis=0)


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
