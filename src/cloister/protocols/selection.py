"""Which comparisons find the k smallest of a shuffled row: public, and the same at every computing party.

    S1   a row of at most `FEW` candidates    all pairs are compared; the order is known
    S2   a longer row                         the t smallest of the first s candidates are found (S1 or S2 on those),
                                              and every other candidate is compared with the t-th of them, the pivot
    S3   candidates below the pivot           they and the pivot are the new candidates, if they are k or more;
         fewer than k                         the row is searched again with t doubled

s and t are chosen so that S3 fails in one row of a hundred and the expected number of comparisons is smallest: a little
more than one per candidate of a long row. Everything here is decided by the outcome of comparisons between entries in
uniformly random order, so it tells nothing about the entries.

References
----------
[FR75] Floyd, Rivest, CACM 1975: selection by a sample.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Awaitable, Callable

import numpy as np

from cloister.crypto.replicated import U8, Index

Less = Callable[[Index, Index], Awaitable[U8]]  # flat places i, j → 1 where i comes before j

FEW = 24  # candidates whose pairs are all compared
MISS = 0.01  # rows in which the pivot may turn out too small
STEP = 20_000.0  # what one more step costs, in comparisons


def tail(n: int, p: float, t: int) -> float:
    """P(Binomial(n, p) ≥ t)."""
    return 1.0 - sum(math.comb(n, i) * p**i * (1 - p) ** (n - i) for i in range(min(t, n + 1)))


def pivot_rank(n: int, k: int, s: int) -> int:
    """Smallest t such that the t-th of a sample of s is rarely among the k - 1 smallest of n."""
    for t in range(1, s + 1):
        if tail(k - 1, s / n, t) <= MISS:
            return t
    return s


@functools.cache
def plan(n: int, k: int, rows: int) -> tuple[float, int, int]:
    """Expected comparisons per row, sample size s and rank t; s = 0: compare all pairs."""
    all_pairs = n * (n - 1) / 2 + STEP / rows
    if n <= FEW or n <= k + 1:
        return all_pairs, 0, 0
    best = (all_pairs, 0, 0)
    s = max(4, k // 2)
    while s <= min(n // 2, n - k):
        t = pivot_rank(n, k, s)
        left = math.ceil(t * (n + 1) / (s + 1) * 1.2) + k
        if t <= s and left < n:
            total = plan(s, t, rows)[0] + (n - s) + STEP / rows + plan(left, k, rows)[0]
            best = min(best, (total, s, t))
        s = math.ceil(s * 1.4)
    return best


async def smallest(less: Less, rows: int, n: int, k: int) -> Index:
    """Flat places (rows, k) of the k smallest entries of every row, in ascending order."""
    start = np.arange(rows, dtype=np.intp)[:, None] * n
    if k == n == 1:
        return start
    return await _select(less, start + np.arange(n, dtype=np.intp), np.full(rows, n), k)


async def _select(less: Less, cand: Index, count: np.ndarray, k: int) -> Index:
    """The k smallest of the first count[r] candidates of every row r; every count is at least k."""
    rows, n = cand.shape
    if rows == 0:
        return cand[:, :k]
    _, s, t = plan(n, k, rows)
    if s == 0:
        return await _all_pairs(less, cand, count, k)
    out: Index = np.empty((rows, k), np.intp)
    short = count < s + k
    if short.any():  # rows that the sample would use up
        width = int(count[short].max())
        out[short] = await _select(less, cand[short, :width], count[short], k)
        out[~short] = await _select(less, cand[~short], count[~short], k)
        return out
    pending, kept, kept_count = np.arange(rows), [], []
    while pending.size:
        below, number = await _filter(less, cand[pending], count[pending], s, t)
        done = number >= k
        kept.append((pending[done], below[done]))
        kept_count.append(number[done])
        pending, t = pending[~done], min(2 * t, s)
        if t == s and pending.size:  # the sample is spent: all pairs of what is left
            out[pending] = await _all_pairs(less, cand[pending], count[pending], k)
            break
    order = np.concatenate([r for r, _ in kept])
    number = np.concatenate(kept_count)
    width = int(number.max(initial=k))
    merged: Index = np.zeros((len(order), width), np.intp)
    at = 0
    for r, below in kept:
        w = min(width, below.shape[1])
        merged[at : at + len(r), :w] = below[:, :w]
        at += len(r)
    out[order] = await _select(less, merged, number, k)
    return out


async def _filter(
    less: Less,
    cand: Index,
    count: np.ndarray,
    s: int,
    t: int,
) -> tuple[Index, np.ndarray]:
    """S2: candidates up to the pivot, packed to the left, and how many they are."""
    rows, n = cand.shape
    first = await _select(less, cand[:, :s], np.full(rows, s), t)
    pivot = first[:, -1]
    rest = cand[:, s:]
    valid = np.arange(s, n) < count[:, None]
    mine = np.broadcast_to(pivot[:, None], rest.shape)[valid]
    smaller = np.zeros(rest.shape, bool)
    smaller[valid] = (await less(rest[valid], mine)).astype(bool)
    number = smaller.sum(axis=1) + t
    width = int(number.max(initial=t))
    out: Index = np.zeros((rows, width), np.intp)
    out[:, :t] = first
    r, c = np.nonzero(smaller)
    column = np.cumsum(smaller, axis=1)[r, c] - 1 + t
    out[r, column] = rest[r, c]
    return out, number


async def _all_pairs(less: Less, cand: Index, count: np.ndarray, k: int) -> Index:
    """S1: rank = how many come before."""
    rows, n = cand.shape
    if n == 1:
        return cand[:, :k]
    i, j = np.triu_indices(n, 1)
    valid = j[None, :] < count[:, None]
    left, right = cand[:, i][valid], cand[:, j][valid]
    before = await less(left, right)
    r = np.nonzero(valid)[0]
    rank = np.zeros(rows * n)
    for places, beaten in ((j, before), (i, 1 - before)):
        rank += np.bincount(r * n + np.broadcast_to(places, valid.shape)[valid], weights=beaten, minlength=rows * n)
    rank = rank.reshape(rows, n)
    rank[np.arange(n) >= count[:, None]] = n
    order = np.argsort(rank, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(cand, order, axis=1)
