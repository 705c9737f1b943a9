"""Pooled scaling: mean and standard deviation of every column over all sites' rows, whatever its unit.

    L1   u, S    per column: the power of two above every |x|                      (count_tests, k = 1)
    L2   u, S    rows; per column entries and Σ x / 2^e                            (secure_sum)
    L3   u, S    per column: the power of two above every |x - mean|               (count_tests, k = 1)
    L4   u, S    rows; per column entries and Σ ((x - mean) / 2^e')²               (secure_sum)

Numbers are scaled by L1 and L3 before they are written with a fixed point, so nobody has to know a bound in advance,
and a column of 1000.001 … 1000.002 keeps its digits. A column whose spread is below 2^-40 of its size is constant.
Missing entries (NaN) do not count.

Reveals
-------
all : rows of all sites together; per column the entries, the mean, the standard deviation, and the powers of two above
    its largest size and its largest deviation; who of the sites dropped out. If one drops out between L2 and L4, all
    can subtract: its number of rows, and of entries per column.
lying coordinator : the same. It may call a site dropped that is there, of which it then learns what all learn of one
    that drops out. Sites that finish have the same result.
one lying site : nothing more. Its rows are what it says.
coordinator with one site : how many sites reach each power of two.

Assumes
-------
What count tests and the secure sum assume; at most 2^31 rows; |x| below 2^64. Lies that are not noticed: (b), (c), (f)
of the coordinator, sums and bits that are the same for all, possible, and wrong; (b), (c), (f) of the site.

Cost
----
Per site: two rounds of count tests of 128 D bits, two secure sums of 2 D + 1 words, one signature.

References
----------
None; lines numbered here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from cloister.arrays import F64, I64, U64
from cloister.crypto.agreement import Identity
from cloister.crypto.entropy import Entropy
from cloister.crypto.fixedpoint import FixedPoint
from cloister.errors import DataError, ProtocolAbort
from cloister.net.channel import Channel
from cloister.protocols.sums import common_seed, count_tests, same_view, secure_sum
from cloister.protocols.sums.tally import Asking
from cloister.study import Party

NAME = "pooled_scaling"
EXPONENTS = (-64, 64)  # powers of two that |x| may have
FLAT = 40
ROWS = 31  # bits of a number of rows
BLOCK = 4096  # rows that are changed at a time, so that they stay in cache


@dataclass(frozen=True, slots=True)
class Params:
    sites: tuple[Party, ...]
    coordinator: Party
    width: int  # D, columns
    least: int = 2  # rows of all sites together


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
    return dict.fromkeys((params.coordinator, *xs), scaling_of(np.concatenate(list(xs.values()))))


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
    """Messages and payload bytes that each party sends when nobody drops."""
    who, low, high = (params.sites, params.coordinator), *EXPONENTS
    test = count_tests.cost(count_tests.Params(*who, params.width * (high - low), 1, len(params.sites)))
    added = secure_sum.cost(secure_sum.Params(*who, 2 * params.width + 1, to_all=True))
    view = same_view.cost(same_view.Params(*who))
    parts = [common_seed.cost(common_seed.Params(*who)), test, added, test, added, view]
    return {p: (sum(c[p][0] for c in parts), sum(c[p][1] for c in parts)) for p in test}


def check_values(X: F64) -> None:
    if np.isinf(X).any() or np.nanmax(np.abs(X), initial=0.0) >= 2.0 ** EXPONENTS[1]:
        raise DataError(f"values must be finite and below 2^{EXPONENTS[1]}; clean or rescale them before the run")
    if len(X) >= 1 << ROWS:
        raise DataError(f"a site may bring at most 2^{ROWS} rows")


# ---- steps -----------------------------------------------------------------------------------------------------------


Parts = Callable[[], Iterator[F64]]  # own rows, some at a time, as often as they are asked for


async def _exponents(ask: Asking, width: int, parts: Parts) -> I64:
    """L1, L3: e such that 2^e is above every |value|."""
    low, high = EXPONENTS

    def reach() -> I64:
        largest = np.zeros(width)
        for part in parts():
            np.fmax(largest, np.fmax.reduce(np.abs(part), axis=0), out=largest)  # missing entries reach nothing
        above: I64 = (largest[:, None] >= np.ldexp(1.0, np.arange(low, high))).astype(np.int64)
        return above.ravel()

    bits = await ask.test(reach, width * (high - low), 1, len(ask.sites))
    reached = bits.reshape(width, -1)
    if np.any(reached[:, 1:] > reached[:, :-1]):
        raise ProtocolAbort(NAME, "L1", "damaged", "a column reaches a power of two, and not a smaller one")
    exponents: I64 = low + reached.sum(axis=1)
    return exponents


async def _sums(ask: Asking, width: int, mine: int, parts: Parts) -> tuple[int, I64, F64]:
    """L2, L4: rows, entries and sums of values within ±1."""
    n = len(ask.sites)
    point = FixedPoint(62 - ROWS - n.bit_length(), float(1 << ROWS), n)

    def local() -> U64:
        counts, sums = np.zeros(width, np.int64), np.zeros(width)
        for part in parts():
            there = np.isfinite(part)
            counts += there.sum(axis=0)
            sums += part.sum(axis=0) if there.all() else np.where(there, part, 0.0).sum(axis=0)
        head = np.array([mine, *counts], np.int64)
        sums = np.clip(sums, -point.bound, point.bound)  # beyond only if L1 lied
        return np.concatenate([head.view(np.uint64), point.encode(sums)])

    z = await ask.words(local, 2 * width + 1)
    rows, there, total = int(z[0]), z[1 : width + 1].astype(np.int64), point.decode(z[width + 1 :])
    check_sums(mine, rows, there, total, n)
    return rows, there, total


def check_sums(mine: int, rows: int, there: I64, total: F64, sites: int) -> None:
    """L2, L4: at least my rows, at most what sites may bring, no more entries than rows, means within ±1."""
    possible = mine <= rows <= sites << ROWS and np.all((there >= 0) & (there <= rows))
    if not possible or not np.all(np.abs(total) <= there + 1e-3):
        raise ProtocolAbort(NAME, "L2", "damaged", "sums that no rows have: a message was damaged, or somebody lies")


async def find(ask: Asking, X: F64 | None, width: int, least: int) -> Scaling:
    """All lines, at any party; `X` is None at the coordinator."""
    rows = X if X is not None else np.zeros((0, width))

    def parts(change: Callable[[F64], F64]) -> Parts:
        return lambda: (change(rows[start : start + BLOCK]) for start in range(0, len(rows), BLOCK))

    up = await _exponents(ask, width, parts(lambda x: x))  # L1
    N, there, total = await _sums(ask, width, len(rows), parts(lambda x: np.ldexp(x, -up)))  # L2
    if least > N:
        raise ProtocolAbort(NAME, "L2", "too-few-rows", f"all sites together hold {N} rows; {least} are needed")
    mean = np.ldexp(total / np.maximum(there, 1), up)
    around = await _exponents(ask, width, parts(lambda x: x - mean))  # L3
    squares = parts(lambda x: np.square(np.ldexp(x - mean, -around)))
    N, there, total = await _sums(ask, width, len(rows), squares)  # L4
    scale = np.ldexp(np.sqrt(np.maximum(total, 0.0) / np.maximum(there, 1)), around)
    flat = (around <= up - FLAT) | (around == EXPONENTS[0])
    return Scaling(N, mean, np.where(flat, 0.0, scale))


# ---- roles -----------------------------------------------------------------------------------------------------------


async def site(ch: Channel, params: Params, X: F64, *, entropy: Entropy, identity: Identity) -> Scaling:
    check_values(X)
    seed_params = common_seed.Params(params.sites, params.coordinator)
    seed = await common_seed.site(ch.sub("seed"), seed_params, entropy=entropy, identity=identity)
    ask = Asking(ch, params.sites, params.coordinator, seed.present, seed, entropy, identity)
    scaling = await find(ask, X, params.width, params.least)
    await same_view.site(ch, same_view.Params(params.sites, params.coordinator), identity=identity)
    return scaling


async def coordinator(ch: Channel, params: Params) -> Scaling:
    present = await common_seed.coordinator(ch.sub("seed"), common_seed.Params(params.sites, params.coordinator))
    ask = Asking(ch, params.sites, params.coordinator, present)
    scaling = await find(ask, None, params.width, params.least)
    await same_view.coordinator(ch, same_view.Params(params.sites, params.coordinator))
    return scaling
