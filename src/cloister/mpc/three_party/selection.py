"""Which comparisons find the k smallest of a shuffled row: public, and the same at every computing party.

    S1   a row of at most `FEW` candidates    all pairs are compared; the order is known
    S2   a longer row                         the t smallest of the first s candidates are found (S1 or S2 on those),
                                              and every other candidate is compared with the t-th of them, the pivot
    S3   candidates below the pivot           they and the pivot are the new candidates, if they are k or more;
         fewer than k                         the row is searched again with t doubled

Rows that go different ways take their steps together, so a step of all rows is one batch of comparisons.

s and t are chosen so that S3 fails in at most three rows of a hundred and the expected number of comparisons is
smallest: a little more than one per candidate of a long row. Everything here is decided by the outcome of comparisons
between entries in uniformly random order, so it tells nothing about the entries.

References
----------
[FR75] Floyd, Rivest, CACM 1975: selection by a sample.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Awaitable, Callable, Generator, Sequence
from typing import TypeAlias

import numpy as np

from cloister.arrays import I64, U8, Bits, Index

Less = Callable[[Index, Index], Awaitable[U8]]  # flat places i, j → 1 where i comes before j
Pairs: TypeAlias = tuple[Index, Index]
Search: TypeAlias = Generator[Pairs, U8, Index]  # asks for comparisons, gets their outcome, ends with places

FEW = 24  # candidates whose pairs are all compared
MISSES = (0.03, 0.01, 0.002)  # shares of rows in which the pivot may turn out too small, to choose from
STEP = 20_000.0  # what one more step costs, in comparisons


def pivot_rank(n: int, k: int, s: int, miss: float) -> int:
    """Smallest t such that the t-th of a sample of s is among the k - 1 smallest of n in a share `miss` of rows."""
    p = s / n
    mass = (1 - p) ** (k - 1)  # of exactly i of them in the sample, i = 0
    rest = 1.0 - mass
    for i in range(min(k - 1, s)):
        if rest <= miss:
            return i + 1
        mass *= (k - 1 - i) / (i + 1) * p / (1 - p)
        rest -= mass
    return min(k, s)


def plan(n: int, k: int, rows: int) -> tuple[float, int, int]:
    """Expected comparisons per row, sample size s and rank t; s = 0: compare all pairs."""
    coarse = max(0, n.bit_length() - 6)  # to within 3 %, so that few plans have to be made
    return _plan(n >> coarse << coarse, k, 1 << round(math.log2(rows)))


@functools.cache
def _plan(n: int, k: int, rows: int) -> tuple[float, int, int]:
    all_pairs = n * (n - 1) / 2 + STEP / rows
    if n <= FEW or n <= k + 1:
        return all_pairs, 0, 0
    best = (all_pairs, 0, 0)
    s = max(4, k // 2)
    while s <= min(n // 2, n - k):
        for miss in MISSES:
            t = pivot_rank(n, k, s, miss)
            left = math.ceil(t * (n + 1) / (s + 1) * 1.2) + k
            if left < n:
                total = plan(s, t, rows)[0] + (1 + miss) * (n - s) + STEP / rows + plan(left, k, rows)[0]
                best = min(best, (total, s, t))
        s = math.ceil(s * 1.4)
    return best


def expected(rows: int, n: int, k: int) -> list[int]:
    """Comparisons of every step for `rows` rows; exact where all pairs are compared, else expected."""
    if n == 1:
        return []
    _, s, t = plan(n, k, rows)
    if s == 0:
        return [rows * n * (n - 1) // 2]
    left = min(n, round(t * (n + 1) / (s + 1) * math.sqrt(1 + 1 / t)))  # root of the mean square
    return [*expected(rows, s, t), rows * (n - s), *expected(rows, max(left, k), k)]


async def smallest(less: Less, rows: int, n: int, k: int) -> Index:
    """Flat places (rows, k) of the k smallest entries of every row, in ascending order."""
    start = np.arange(rows, dtype=np.intp)[:, None] * n
    search = _select(start + np.arange(n, dtype=np.intp), np.full(rows, n), k)
    answer = None
    try:
        while True:
            i, j = search.send(answer)  # type: ignore[arg-type]
            answer = await less(i, j)
    except StopIteration as end:
        places: Index = end.value
        return places


def _together(searches: Sequence[Search]) -> Generator[Pairs, U8, list[Index]]:
    """Let several searches take their steps at the same time, as one."""
    results: list[Index] = [np.empty((0, 0), np.intp)] * len(searches)
    asked: dict[int, Pairs] = {}

    def go_on(number: int, answer: U8 | None) -> None:
        try:
            asked[number] = searches[number].send(answer)  # type: ignore[arg-type]
        except StopIteration as end:
            asked.pop(number, None)
            results[number] = end.value

    for number in range(len(searches)):
        go_on(number, None)
    while asked:
        order = list(asked)
        answers = yield (
            np.concatenate([asked[number][0] for number in order]),
            np.concatenate([asked[number][1] for number in order]),
        )
        cuts = np.cumsum([len(asked[number][0]) for number in order])[:-1]
        for number, answer in zip(order, np.split(answers, cuts.tolist()), strict=True):
            go_on(number, answer)
    return results


def _select(cand: Index, count: I64, k: int) -> Search:
    """The k smallest of the first count[r] candidates of every row r; every count is at least k."""
    rows = len(cand)
    if rows == 0:
        return np.empty((0, k), np.intp)
    _, s, t = plan(int(count.mean()), k, rows)
    if s == 0:
        return (yield from _all_pairs(cand, count, k))
    short = count < s + k
    if short.any():  # rows that the sample would use up
        return (yield from _split(cand, count, k, short))
    below, number = yield from _filter(cand, count, s, t)
    return (yield from _settle(cand, count, k, s, t, below, number))


def _split(cand: Index, count: I64, k: int, first: Bits) -> Search:
    width = int(count[first].max())
    parts = [_select(cand[first, :width], count[first], k), _select(cand[~first], count[~first], k)]
    return _merge(first, *(yield from _together(parts)))


def _merge(first: Bits, one: Index, two: Index) -> Index:
    out: Index = np.empty((len(first), one.shape[1]), np.intp)
    out[first], out[~first] = one, two
    return out


def _settle(cand: Index, count: I64, k: int, s: int, t: int, below: Index, number: I64) -> Search:
    """S3: go on with what is below the pivot; where that is too little, search again with a larger one."""
    enough = number >= k
    width = int(number.max())
    search = _select(below[enough, :width], number[enough], k)
    if enough.all():
        return (yield from search)
    again = _again(cand[~enough], count[~enough], k, s, t)
    return _merge(enough, *(yield from _together([search, again])))


def _again(cand: Index, count: I64, k: int, s: int, t: int) -> Search:
    if 2 * t >= s:
        return (yield from _all_pairs(cand, count, k))
    below, number = yield from _filter(cand, count, s, 2 * t)
    return (yield from _settle(cand, count, k, s, 2 * t, below, number))


def _filter(cand: Index, count: I64, s: int, t: int) -> Generator[Pairs, U8, tuple[Index, I64]]:
    """S2: candidates up to the pivot, packed to the left, and how many they are."""
    rows, n = cand.shape
    first = yield from _select(cand[:, :s], np.full(rows, s), t)
    rest = cand[:, s:]
    valid = np.arange(s, n) < count[:, None]
    pivot = np.broadcast_to(first[:, -1:], rest.shape)[valid]
    answer = yield rest[valid], pivot
    smaller = np.zeros(rest.shape, bool)
    smaller[valid] = answer.astype(bool)
    number = smaller.sum(axis=1) + t
    out: Index = np.zeros((rows, int(number.max())), np.intp)
    out[:, :t] = first
    r, c = np.nonzero(smaller)
    column = np.arange(len(r)) - np.searchsorted(r, r) + t
    out[r, column] = rest[r, c]
    return out, number


def _all_pairs(cand: Index, count: I64, k: int) -> Search:
    """S1: rank = how many come before."""
    rows, n = cand.shape
    if n == 1:
        return cand[:, :k]
    i, j = np.triu_indices(n, 1)
    valid = j[None, :] < count[:, None]
    before = yield cand[:, i][valid], cand[:, j][valid]
    r = np.nonzero(valid)[0]
    rank = np.zeros(rows * n)
    for places, beaten in ((j, before), (i, 1 - before)):
        rank += np.bincount(r * n + np.broadcast_to(places, valid.shape)[valid], weights=beaten, minlength=rows * n)
    rank = rank.reshape(rows, n)
    rank[np.arange(n) >= count[:, None]] = n
    order = np.argsort(rank, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(cand, order, axis=1)
