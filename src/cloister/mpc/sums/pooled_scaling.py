"""Pooled scaling: mean and standard deviation of every column over all sites' rows, whatever its unit.

    L1   u       per column: low, high that enough of its rows are at or below, and at or above; values beyond
                 low - 3w and high + 3w, w = high - low, are set to these ends
         u, S    per column: the power of two above |low| and |high| of every site   (checked_sum)
    L2   u, S    rows; per column entries and Σ x / 2^e                              (checked_sum)
    L3   u, S    per column: the power of two above |low - mean|, |high - mean|      (checked_sum)
    L4   u, S    rows; per column entries and Σ ((x - mean) / 2^e')²                 (checked_sum)

"Enough" are the site's own thresholds (`disclosure`): `min_cells` rows, of `min_donors` donors where donors are named.
A column with fewer entries at a site is missing there. Without a few rows far from all others, w is so wide that
nothing is changed; a column that is constant but for fewer than `min_cells` rows is constant.

Numbers are scaled by L1 and L3 before they are written with a fixed point, so nobody has to know a bound in advance,
and a column of 1000.001 … 1000.002 keeps its digits. A column whose spread is below 2^-40 of its size is constant.
Missing entries (NaN) do not count.

Reveals
-------
all : rows of all sites together; per column the entries, the mean, the standard deviation, and how many sites reach
    each power of two with enough rows. With two sites: the other's, by subtraction.
malicious coordinator : the same. It cannot change a sum; it can end the run.
one malicious site : the same sums less its own part. It can choose the mean of L3 and raise or lower the
    exponents, neither of which changes what follows from L2 and L4: entries, sum and sum of squares of each column of
    the other sites. Missing entries are rows less entries, a count that can be 1.

Assumes
-------
What checked sum and common seed assume: a site that drops out after the seed ends the run; at most 2^31 rows; |x| below
2^60. Rows of a site are its unverified input. Lies that are not noticed: (b), (c), (f) of the site.

Cost
----
Per site: two checked sums of 128 D packed numbers and two of 2 D + 1 words, one signature.

References
----------
None; lines numbered here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from cloister.arrays import F64, I64
from cloister.disclosure import Contribution, Rows, Thresholds
from cloister.errors import DataError, ProtocolAbort
from cloister.mpc.crypto.agreement import Identity
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.crypto.fixed_point import FixedPoint
from cloister.mpc.net.channel import Channel
from cloister.mpc.parties import Party
from cloister.mpc.sums import checked_sum, common_seed, consistency_check
from cloister.mpc.sums.pooled_queries import Asking, lanes_of

NAME = "pooled_scaling"
EXPONENTS = (-64, 64)  # powers of two that |x| may have
FLAT = 40
ROWS = 31  # bits of a number of rows
FENCE = 3.0  # widths of the range of enough rows that a value may lie beyond it
GUARD = 3  # bits: a value is below 2^GUARD times the larger end of that range
BLOCK = 4096  # rows that are changed at a time, so that they stay in cache


@dataclass(frozen=True, slots=True)
class Params:
    sites: tuple[Party, ...]
    coordinator: Party
    width: int  # D, columns
    least: int = 2  # rows of all sites together
    min_cells: int = 10
    min_donors: int = 3


@dataclass(frozen=True)
class Scaling:
    """The same at all parties."""

    rows: int  # N
    mean: F64  # (D,)
    scale: F64  # (D,), 0 for constant columns

    @property
    def usable(self) -> I64:
        return np.flatnonzero(self.scale > 0)

    def apply(self, X: F64) -> F64:
        """(x - mean) / scale; 0 in constant columns and where an entry is missing."""
        Z = X - self.mean
        Z /= np.where(self.scale > 0, self.scale, 1.0)
        if len(self.usable) < len(self.scale):
            Z[:, self.scale == 0] = 0.0
        return Z if np.isfinite(Z.sum()) else np.nan_to_num(Z, copy=False, nan=0.0)


def ideal(params: Params, xs: Mapping[Party, F64]) -> dict[Party, Scaling]:
    least = Thresholds(params.min_cells, params.min_donors)
    return dict.fromkeys((params.coordinator, *xs), fenced_scaling(list(xs.values()), least))


def fenced_scaling(xs: Sequence[F64], least: Thresholds, donors: Sequence[I64] | None = None) -> Scaling:
    """The same for several sites' rows in one place."""
    whose: Sequence[I64 | None] = [None] * len(xs) if donors is None else donors
    rows = [Rows(len(x), d, least) for x, d in zip(xs, whose, strict=True)]
    fenced = [Fence.of(x, r).hold(x) for x, r in zip(xs, rows, strict=True)]
    found = scaling_of(np.concatenate(fenced))
    return Scaling(sum(r.n for r in rows if r.groups(np.zeros(r.n, np.int64), 1).open[0]), found.mean, found.scale)


def scaling_of(X: F64) -> Scaling:
    """The same for rows in one place."""
    there = np.maximum(np.isfinite(X).sum(axis=0), 1)
    mean = np.nansum(X, axis=0) / there
    away = X - mean
    scale = np.sqrt(np.nansum(np.square(away), axis=0) / there)
    flat = np.nan_to_num(np.abs(away)).max(axis=0) <= 2.0**-FLAT * np.nan_to_num(np.abs(X)).max(axis=0)
    return Scaling(len(X), mean, np.where(flat, 0.0, scale))


def roles(params: Params) -> dict[Party, object]:
    return {params.coordinator: coordinator} | dict.fromkeys(params.sites, site)


def cost(params: Params) -> dict[Party, tuple[int, int]]:
    """Messages and payload bytes that each party sends."""
    who, low, high = (params.sites, params.coordinator), *EXPONENTS
    bits = 1 + -(-params.width * (high - low) // lanes_of(len(params.sites)))
    test, added = (checked_sum.cost(checked_sum.Params(*who, m)) for m in (bits, 2 * params.width + 1))
    view = consistency_check.cost(consistency_check.Params(*who))
    parts = [common_seed.cost(common_seed.Params(*who)), test, added, test, added, view]
    return {p: (sum(c[p][0] for c in parts), sum(c[p][1] for c in parts)) for p in test}


def check_values(X: F64) -> None:
    if np.isinf(X).any() or np.nanmax(np.abs(X), initial=0.0) >= 2.0 ** (EXPONENTS[1] - GUARD - 1):
        raise DataError(
            f"values must be finite and below 2^{EXPONENTS[1] - GUARD - 1}; clean or rescale them before the run"
        )
    if len(X) >= 1 << ROWS:
        raise DataError(f"a site may bring at most 2^{ROWS} rows")


# ---- steps -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fence:
    """L1: of one site's columns, the range that enough rows reach."""

    rows: Rows
    low: F64  # (D,), NaN in columns with too few entries
    high: F64

    @staticmethod
    def of(X: F64, rows: Rows) -> Fence:
        low, high = np.full((2, X.shape[1]), np.nan)
        for j, column in enumerate(X.T):
            code = np.where(np.isfinite(column), 0, -1)
            (a,), (b,) = rows.spans(code, 1, column)
            if np.isfinite(a):
                low[j], high[j] = min(a, b), max(a, b)  # they cross where all rows together are fewer than twice enough
        return Fence(rows, low, high)

    def hold(self, X: F64) -> F64:
        """Values beyond the fence are set to its ends; missing where the column has too few entries."""
        wide = FENCE * (self.high - self.low)
        held: F64 = np.minimum(np.maximum(X, self.low - wide), self.high + wide)  # NaN stays NaN
        return held

    def reach(self, mean: F64) -> F64:
        """The larger distance of an end from the mean; 0 in missing columns."""
        away: F64 = np.nan_to_num(np.maximum(np.abs(self.low - mean), np.abs(self.high - mean)))
        return away


Parts = Callable[[], Iterator[F64]]  # own rows within the fence, some at a time, from the start at every call


async def _exponents(ask: Asking, width: int, mean: F64, fence: Fence | None, line: str) -> I64:
    """L1, L3: e such that 2^e is above every |value - mean| within the fences."""
    low, high = EXPONENTS

    def part(own: Fence) -> Callable[[], Contribution]:
        above = (own.reach(mean)[:, None] >= np.ldexp(1.0, np.arange(low, high))).astype(np.int64)
        return lambda: own.rows.whole(above.ravel())

    what = f"powers of two that enough rows reach in {width} columns"
    parts = [] if fence is None else [part(fence)]
    counts, _ = await ask.total(parts, width * (high - low), len(ask.sites), line=line, what=what)
    exponents: I64 = low + (counts.reshape(width, -1) > 0).sum(axis=1)
    return np.minimum(exponents + GUARD, high)


async def _sums(ask: Asking, width: int, fence: Fence | None, of: Parts, line: str) -> tuple[int, I64, F64]:
    """L2, L4: rows, entries and sums of values within ±1."""
    n = len(ask.sites)
    point = FixedPoint(62 - ROWS - n.bit_length(), float(1 << ROWS), n)

    def part(own: Fence) -> Callable[[], Contribution]:
        def local() -> Contribution:
            counts, sums = np.zeros(width, np.int64), np.zeros(width)
            for block in of():
                there = np.isfinite(block)
                counts += there.sum(axis=0)
                sums += block.sum(axis=0) if there.all() else np.where(there, block, 0.0).sum(axis=0)
            head = np.array([own.rows.n, *counts], np.int64)
            sums = np.clip(sums, -point.bound, point.bound)
            return own.rows.whole(np.concatenate([head.view(np.uint64), point.encode(sums)]))

        return local

    parts = [] if fence is None else [part(fence)]
    z = await ask.words(parts, 2 * width + 1, line=line, what=f"rows, entries and sums of {width} columns")
    rows, there, total = int(z[0]), z[1 : width + 1].astype(np.int64), point.decode(z[width + 1 :])
    check_sums(0 if fence is None else fence.rows.n, rows, there, total, n)
    return rows, there, total


def check_sums(mine: int, rows: int, there: I64, total: F64, sites: int) -> None:
    """L2, L4: at least my rows, at most what sites may bring, no more entries than rows, means within ±1."""
    possible = mine <= rows <= sites << ROWS and np.all((there >= 0) & (there <= rows))
    if not possible or not np.all(np.abs(total) <= there + 1e-3):
        raise ProtocolAbort(NAME, "L2", "damaged", "sums that no rows have: a message was damaged, or somebody lies")


async def find(
    ask: Asking, X: F64 | None, width: int, least: int, own: Rows | None, fence: Fence | None = None
) -> Scaling:
    """All lines, at any party; `X` and `own` are None at the coordinator."""
    rows = X if X is not None else np.zeros((0, width))
    if X is not None and own is not None:
        fence = Fence.of(X, own) if fence is None else replace(fence, rows=own)

    def parts(change: Callable[[F64], F64]) -> Parts:
        assert fence is not None
        return lambda: (change(fence.hold(rows[start : start + BLOCK])) for start in range(0, len(rows), BLOCK))

    def nothing() -> Iterator[F64]:
        return iter(())

    up = await _exponents(ask, width, np.zeros(width), fence, "L1")  # L1
    of = nothing if fence is None else parts(lambda x: np.ldexp(x, -up))
    N, there, total = await _sums(ask, width, fence, of, "L2")  # L2
    if least > N:
        raise ProtocolAbort(NAME, "L2", "too-few-rows", f"all sites together hold {N} rows; {least} are needed")
    mean = np.ldexp(total / np.maximum(there, 1), up)
    around = await _exponents(ask, width, mean, fence, "L3")  # L3
    of = nothing if fence is None else parts(lambda x: np.square(np.ldexp(x - mean, -around)))
    N, there, total = await _sums(ask, width, fence, of, "L4")  # L4
    scale = np.ldexp(np.sqrt(np.maximum(total, 0.0) / np.maximum(there, 1)), around)
    flat = (around <= up - FLAT) | (around == EXPONENTS[0] + GUARD)
    return Scaling(N, mean, np.where(flat, 0.0, scale))


# ---- roles -----------------------------------------------------------------------------------------------------------


async def site(
    ch: Channel,
    params: Params,
    X: F64,
    donor: I64 | None = None,
    thresholds: Thresholds | None = None,
    fence: Fence | None = None,
    *,
    entropy: Entropy,
    identity: Identity,
) -> Scaling:
    """Be u; `thresholds` are this site's own, those of `params` by default, and `fence` of these rows or of more."""
    check_values(X)
    own = Rows(len(X), donor, thresholds or Thresholds(params.min_cells, params.min_donors))
    own.check("rows")
    seed_params = common_seed.Params(params.sites, params.coordinator)
    seed = await common_seed.site(ch.sub("seed"), seed_params, entropy=entropy, identity=identity)
    ask = Asking(ch, seed.present, params.coordinator, NAME, seed, entropy, identity)
    scaling = await find(ask, X, params.width, params.least, own, fence)
    await consistency_check.site(ch, consistency_check.Params(params.sites, params.coordinator), identity=identity)
    return scaling


async def coordinator(ch: Channel, params: Params) -> Scaling:
    """Be S."""
    present = await common_seed.coordinator(ch.sub("seed"), common_seed.Params(params.sites, params.coordinator))
    ask = Asking(ch, present, params.coordinator, NAME)
    scaling = await find(ask, None, params.width, params.least, None)
    await consistency_check.coordinator(ch, consistency_check.Params(params.sites, params.coordinator))
    return scaling
