"""Pooled quantiles: quantiles of all sites' positive values, as if they lay in one place; only counts are added up.

    L0   u       microaggregation: its values in rising order, in runs of at least k of them, of at least `min_donors`
                 donors where donors are named. Only size and mean of a run are used further: its values are spread
                 evenly between the middles to the means of its neighbours, or are the one value that k of them share.
                 The outermost runs have medians in place of means; of those of its donors, the innermost
    L1   u, S    secure sum of N_c        values per cell of a coarse grid, equal steps of log₂
    L2   S ⇒ u   C                        the cells that hold an order statistic of a wanted quantile
    L3   u, S    secure sum of n_c,g      values per part of each cell in C, equal steps
    L4   S ⇒ u   edges                    q_j = x_(⌊r⌋) + (r - ⌊r⌋)(x_(⌊r⌋+1) - x_(⌊r⌋)), r = p_j (N - 1)
                                          with r held between k - 1 and N - k, so that the outermost edges
                                          are the k-th smallest and the k-th largest value; or `again`, where a
                                          site dropped out between L1 and L3
    L5   u, S    all were told the same   (same_view)

Runs are fixed before the first sum. Whatever intervals are counted, by whomever, each count of a site, each difference
of two and each complement is a function of sizes and means of whole runs. It is the value of a cell only
where k values of one site are equal. A site may raise k and `min_donors` for its own runs.

Values may come in pieces, so a site need not hold them all at once: values within one part of the refined grid are held
as one number, and how many they are.

⇒ is a broadcast: sites that were given different cells or edges cannot finish the next sum, or L5. All sums go on with
the sites that are left of the one before; `again` is refused where nobody dropped out.

An order statistic x_(i) is read as the lower end of its part, so that values tied with it stay on its side of the edge;
where values are whole numbers it is the whole number in that part, and the result is exact (up to 2^18, where a part
is as wide as one; beyond, as close as for other values).

Reveals
-------
coordinator : how many values all sites together have in each interval of a grid, and in each part of the refined ones,
    every site's values spread evenly within its runs; the edges; who took part. With m colluding sites: the same over
    the other sites. If a site drops out between L1 and L3, the sums start over, and the coordinator can subtract: how
    many values of that site are in each interval, always as spread within its runs.
site : the edges, the intervals of the grid that hold the values on both sides of each (C, again after a drop-out), and
    who of the sites dropped out.
malicious coordinator : the same about any 2(B - 1) intervals of its choice. It may claim that a site dropped out, and
    subtract as above: at most n - t sites, each once, who then abort.
one malicious site : the edges, which its own values shift: with few or many values of its choice it can place an edge
    within a run of its choice, so that it learns the means of runs one by one. At the outer edges it learns the median
    of an outermost run, which is one value or the mean of two.

Assumes
-------
What the secure sum assumes. Values are positive (zeros are left out by the caller) and between 2^-24 and 2^24.
Lies that are not noticed: (b), (c), (f) of the coordinator, edges that are the same for all, rising, and wrong; (b),
(c), (f) of the site. In rank, an edge is exact to about a value per site, and to half a run in tails.

Cost
----
Per site and attempt: two secure sums, of 48·R words and of |C|·G words; |C| ≤ 2(B - 1). One signature at the end.

References
----------
[DM02] Domingo-Ferrer, Mateo-Sanz, TKDE 2002: microaggregation.
[FedscGPT] Algorithm 1 asks for shared bin edges and averages local ones; these are the edges it means.
Lines numbered here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from cloister.arrays import F64, I64, U64, Bits
from cloister.disclosure import Contribution, Rows, Thresholds, join
from cloister.errors import DataError, ParameterError, ProtocolAbort
from cloister.mpc.crypto.agreement import Identity
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.net.channel import Channel
from cloister.mpc.net.wire import message
from cloister.mpc.parties import Party
from cloister.mpc.sums import consistency_check, secure_sum
from cloister.mpc.sums.value_counts import Table

NAME = "pooled_quantiles"
MOST = 1 << 48  # values that all sites together may hold in a cell
LOWEST, HIGHEST = -24, 24  # log₂ of the ends of the grid


Piece: TypeAlias = F64 | tuple[F64, I64]  # values, or values and the donor of each
Values: TypeAlias = F64 | Table | Iterable[Piece]  # all at once, counted, or in pieces


@dataclass(frozen=True, slots=True)
class Params:
    sites: tuple[Party, ...]
    coordinator: Party
    n_quantiles: int  # B - 1, from the smallest value to the largest
    whole: bool  # whether values are whole numbers
    least: int = 10  # k, values at or beyond an edge on either side; 1 opens the smallest and the largest of all
    cells: int = 64  # R, coarse cells per doubling
    parts: int = 4096  # G, parts of a refined cell
    min_donors: int = 3  # donors of a run, where pieces name them

    def __post_init__(self) -> None:
        if self.n_quantiles < 2 or self.cells < 1 or self.parts < 1:
            raise ParameterError(f"expected at least two quantiles, found {self.n_quantiles}")
        if self.least < 1 or self.min_donors < 1:
            raise ParameterError(f"at least one value must lie at an edge, found {self.least}")

    @property
    def thresholds(self) -> Thresholds:
        return Thresholds(self.least, self.min_donors)

    @property
    def grid(self) -> F64:
        """Ends of the coarse cells, the same floats at every party."""
        return np.exp2(np.arange(LOWEST * self.cells, HIGHEST * self.cells + 1) / self.cells)

    def split(self, cell: int) -> F64:
        """Ends of the parts of one coarse cell."""
        low, high = self.grid[cell], self.grid[cell + 1]
        return np.linspace(low, high, self.parts + 1)

    def sum(self, length: int) -> secure_sum.Params:
        return secure_sum.Params(self.sites, self.coordinator, length)

    @property
    def view(self) -> consistency_check.Params:
        return consistency_check.Params(self.sites, self.coordinator)


@message("L2")
class Refine:  # S → u
    cells: I64  # (|C|,)


@message("L4")
class Edges:  # S → u
    edges: F64  # (B - 1,)
    again: bool  # start over without the dropped site; the edges are zero


def ideal(params: Params, xs: Mapping[Party, Values]) -> dict[Party, F64]:
    """Quantiles of all values, each site's by sizes and means of its runs."""
    runs = [Runs.of(params, values, params.thresholds) for values in xs.values()]
    coarse: U64 = np.stack([count_coarse(params, r).values for r in runs]).sum(axis=0)
    lower, upper, share, wanted = wanted_ranks(params, int(coarse.sum()))
    chosen = np.unique(cells_of(coarse, wanted)).astype(np.int64)
    fine: U64 = np.stack([count_fine(params, chosen, r).values for r in runs]).sum(axis=0)
    x = order_statistics(params, coarse, chosen, fine, wanted)
    edges = between(x[np.searchsorted(wanted, lower)], x[np.searchsorted(wanted, upper)], share)
    return dict.fromkeys((params.coordinator, *xs), edges)


def roles(params: Params) -> dict[Party, object]:
    return {params.coordinator: coordinator} | dict.fromkeys(params.sites, site)


def cost(params: Params, refined: int | None = None) -> dict[Party, tuple[int, int]]:
    """What each party sends when nobody drops and |C| = `refined`; by default, the most there can be."""
    size = 2 * params.n_quantiles if refined is None else refined
    sums = [secure_sum.cost(params.sum(m)) for m in (len(params.grid) - 1, size * params.parts)]
    total = {p: (sum(c[p][0] for c in sums), sum(c[p][1] for c in sums)) for p in sums[0]}
    n, (messages, payload) = len(params.sites), total[params.coordinator]
    total[params.coordinator] = (messages + 2 * n, payload + n * (8 * size + 8 * params.n_quantiles + 1))
    view = consistency_check.cost(params.view)
    return {p: (total[p][0] + view[p][0], total[p][1] + view[p][1]) for p in total}


# ---- local steps -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Runs:
    """L0: one site's values. A row is the values of one part of the grid (and donor); rows belong to runs."""

    rows: Rows
    code: I64  # (rows,), run of each; -1 if all values together are too few
    value: F64  # (runs,), rising: mean, or the value that enough of them share
    shared: Bits  # (runs,), whether it is shared

    @property
    def sizes(self) -> Contribution:
        """Values in each run."""
        return self.rows.grouped(self.code, len(self.value))

    @staticmethod
    def of(params: Params, values: Values, thresholds: Thresholds) -> Runs:
        at, donor, times, total = _parts(params, values)
        rows = Rows(len(at), donor, thresholds, times)
        code = rows.blocks(at.astype(np.float64))
        runs = int(code.max(initial=-1)) + 1
        if not runs:
            return Runs(rows, code, np.empty(0), np.empty(0, bool))
        value = np.bincount(code, total, minlength=runs) / np.bincount(code, times, minlength=runs)
        _, part = np.unique(at, return_inverse=True)
        single = rows.groups(part, int(part.max()) + 1)  # parts of the grid that reach the thresholds by themselves
        own = np.bincount(part, total) / single.cells
        order = np.argsort(single.cells[part], kind="stable")  # of several in a run, the largest is last
        alone = order[single.open[part[order]]]
        value[code[alone]] = own[part[alone]]
        shared = np.zeros(runs, bool)
        shared[code[alone]] = True
        for end, inner in ((0, max), (runs - 1, min)):  # the only runs in which one value can be far from all others
            if not shared[end]:
                value[end] = inner(_medians(rows, code == end, total / times))
        return Runs(rows, code, value, shared)

    def counts(self, ends: F64, *, whole: bool) -> Contribution:
        """Values in [ends_i, ends_{i+1}), spread evenly within runs; whole ones are rounded to the nearest number."""
        at = np.ceil(ends) - 0.5 if whole else ends

        def spread(sizes: I64) -> U64:
            if not len(sizes):
                return np.zeros(len(ends) - 1, np.uint64)
            middle = (self.value[1:] + self.value[:-1]) / 2
            first = max(self.value[0] / 2, 2 * self.value[0] - (middle[0] if len(middle) else self.value[0]))
            last = 2 * self.value[-1] - (middle[-1] if len(middle) else self.value[-1])
            low, high = np.append(first, middle), np.append(middle, last)
            low, high = np.where(self.shared, self.value, low), np.where(self.shared, self.value, high)
            high = np.maximum(high, np.nextafter(low, np.inf))
            below = np.concatenate([[0], np.cumsum(sizes)])
            x = np.ravel(np.stack([low, high], axis=1))
            y = np.ravel(np.stack([below[:-1], below[1:]], axis=1))
            between: U64 = np.diff(np.rint(np.interp(at, x, y))).astype(np.uint64)
            return between

        return self.sizes.map(spread)


def _medians(rows: Rows, inside: Bits, value: F64) -> list[float]:
    """The median of these rows' values, one for each donor where donors are named."""
    donor = np.zeros(rows.n, np.int64) if rows.donor is None else rows.donor
    times = np.ones(rows.n, np.int64) if rows.cells is None else rows.cells
    each = [inside & (donor == d) for d in np.unique(donor[inside])]
    return [float(np.median(np.repeat(value[e], times[e]))) for e in each]


def _parts(params: Params, values: Values) -> tuple[I64, I64 | None, I64, F64]:
    """Per occupied part of the grid, and donor: its number, the donor, how many values, and their sum."""
    keys, times, donors = np.empty(0, np.int64), np.empty(0, np.int64), 0
    total: F64 = np.empty(0)
    for x, who, often in _pieces(values):
        check_values(x)
        donors = max(donors, 0 if who is None else 1 << 20)
        new = _part(params, x) * max(donors, 1) + (0 if who is None else who)
        keys, at = np.unique(np.concatenate([keys, new]), return_inverse=True)
        times = np.bincount(at, np.concatenate([times, often]), minlength=len(keys)).astype(np.int64)
        total = np.bincount(at, np.concatenate([total, x * often]), minlength=len(keys)).astype(np.float64)
    if not donors:
        return keys, None, times, total
    return keys // donors, keys % donors, times, total


def _pieces(values: Values) -> Iterator[tuple[F64, I64 | None, I64]]:
    """Values, donors where they are named, and how often each occurs."""
    if isinstance(values, Table):
        yield values.values, None, values.times
        return
    for piece in (values,) if isinstance(values, np.ndarray) else values:
        x, who = piece if isinstance(piece, tuple) else (piece, None)
        yield x, who, np.ones(len(x), np.int64)


def _part(params: Params, x: F64) -> I64:
    """The part of the refined grid that holds each value, counted through all cells."""
    grid = params.grid
    cell = np.searchsorted(grid, x, side="right") - 1
    low = grid[cell]
    part = np.floor((x - low) / (grid[cell + 1] - low) * params.parts).astype(np.int64)
    return cell * params.parts + np.clip(part, 0, params.parts - 1)


def check_values(values: F64) -> None:
    low, high = 2.0**LOWEST, 2.0**HIGHEST
    if not np.all(np.isfinite(values)) or np.any(values < low) or np.any(values >= high):
        raise DataError(f"values must lie between {low:.1e} and {high:.1e}; rescale them before the run")


def count_coarse(params: Params, runs: Runs) -> Contribution:
    """L1: values per cell."""
    return runs.counts(params.grid, whole=params.whole)


def count_fine(params: Params, chosen: I64, runs: Runs) -> Contribution:
    """L3: values per part of the chosen cells."""
    parts = [runs.counts(params.split(int(cell)), whole=params.whole) for cell in chosen]
    return join(parts)


def ranks(params: Params, total: int) -> tuple[I64, F64]:
    """Index of the lower order statistic of each quantile, and how far it is to the next."""
    r = np.clip(np.linspace(0, 1, params.n_quantiles) * (total - 1), params.least - 1, total - params.least)
    lower = np.floor(r).astype(np.int64)
    return lower, r - lower


def wanted_ranks(params: Params, total: int) -> tuple[I64, I64, F64, I64]:
    """Lower and upper order statistic of each quantile, how far it is between them, and all of them once."""
    lower, share = ranks(params, total)
    upper = lower + (share > 0)  # a quantile that is a value needs no other
    return lower, upper, share, np.unique(np.concatenate([lower, upper]))


def between(low: F64, high: F64, share: F64) -> F64:
    """As NumPy interpolates, to the last bit: from the nearer end."""
    return np.where(share < 0.5, low + (high - low) * share, high - (high - low) * (1 - share))


def cells_of(counts: U64, wanted: I64) -> I64:
    """The cell that holds each of the wanted order statistics."""
    return np.searchsorted(np.cumsum(counts.astype(np.int64)), wanted, side="right")


def order_statistics(params: Params, coarse: U64, chosen: I64, fine: U64, wanted: I64) -> F64:
    """Read x_(i) off the refined cells."""
    before = np.concatenate([[0], np.cumsum(coarse.astype(np.int64))])
    value = np.empty(len(wanted))
    cells = cells_of(coarse, wanted)
    for j, (i, cell) in enumerate(zip(wanted, cells, strict=True)):
        row = fine.reshape(len(chosen), params.parts)[np.searchsorted(chosen, cell)]
        part = int(np.searchsorted(np.cumsum(row.astype(np.int64)), i - before[cell], side="right"))
        low = params.split(int(cell))[part]
        value[j] = np.ceil(low) if params.whole else low
    return value


def check_counts(z: U64, line: str) -> None:
    """Raise if these cannot be counts: masks that did not cancel leave numbers all over 64 bits."""
    if int(z.max(initial=0)) >= MOST:
        raise ProtocolAbort(NAME, line, "damaged", "a sum that is not a count: a site's message was damaged on its way")


# ---- roles -----------------------------------------------------------------------------------------------------------


async def site(
    ch: Channel,
    params: Params,
    values: Values,
    thresholds: Thresholds | None = None,
    *,
    entropy: Entropy,
    identity: Identity,
) -> F64:
    """Be u; `thresholds` are this site's own, which can only raise those of `params`."""
    S, present = params.coordinator, params.sites
    least = params.thresholds
    if thresholds is not None:
        least = least.raised({"min_cells": thresholds.min_cells, "min_donors": thresholds.min_donors})
    runs = Runs.of(params, values, least)  # L0
    runs.rows.check("values")

    async def add(label: str, part: Contribution, among: tuple[Party, ...], line: str) -> tuple[Party, ...]:
        x = ch.contribute(part, protocol=NAME, line=line, what="values per interval; sizes are numbers of values")
        sums = params.sum(len(x))
        return await secure_sum.contribute(ch.sub(label), sums, x, among, entropy=entropy, identity=identity)

    for attempt in range(len(params.sites)):
        first = await add(f"coarse/{attempt}", count_coarse(params, runs), present, "L1")  # L1
        chosen = (await ch.recv_broadcast(S, Refine, cells=(None,))).cells  # L2
        check_cells(params, chosen)
        present = await add(f"fine/{attempt}", count_fine(params, chosen, runs), first, "L3")  # L3
        result = await ch.recv_broadcast(S, Edges, edges=(params.n_quantiles,))  # L4
        if result.again != (set(present) != set(first)):
            raise ProtocolAbort(NAME, "L4", "restarts", "begun again though nobody dropped out, or not though one did")
        if not result.again:
            check_edges(result.edges)
            await consistency_check.site(ch, params.view, identity=identity)  # L5
            return result.edges
    raise ProtocolAbort(NAME, "L4", "restarts", "more restarts than there are sites")


def check_cells(params: Params, chosen: I64) -> None:
    """L2: as many cells as quantiles need, inside the grid, each once."""
    n_cells = len(params.grid) - 1
    few = 0 < len(chosen) <= 2 * params.n_quantiles
    if not few or np.any(np.diff(chosen) <= 0) or chosen[0] < 0 or chosen[-1] >= n_cells:
        raise ProtocolAbort(NAME, "L2", "cells", "cells to refine that no set of quantiles needs")


def check_edges(edges: F64) -> None:
    """L4: numbers of the grid that rise."""
    if not np.all(np.isfinite(edges)) or np.any(np.diff(edges) < 0):
        raise ProtocolAbort(NAME, "L4", "edges", "edges that are not rising numbers")
    if np.any(edges < 2.0**LOWEST) or np.any(edges > 2.0**HIGHEST):
        raise ProtocolAbort(NAME, "L4", "edges", "edges where no value can be")


async def coordinator(ch: Channel, params: Params) -> F64:
    present = params.sites
    for attempt in range(len(params.sites)):
        n_cells = len(params.grid) - 1
        first = await secure_sum.aggregator(ch.sub(f"coarse/{attempt}"), params.sum(n_cells), present)  # L1
        check_counts(first.z, "L1")
        total = int(first.z.sum())
        if total < max(params.n_quantiles, 2 * params.least):
            raise ProtocolAbort(NAME, "L1", "too-few-values", f"{total} values at all sites give no such edges")
        lower, upper, share, wanted = wanted_ranks(params, total)
        chosen = np.unique(cells_of(first.z, wanted)).astype(np.int64)
        await ch.broadcast(first.survivors, Refine(chosen))  # L2
        words = params.sum(len(chosen) * params.parts)
        second = await secure_sum.aggregator(ch.sub(f"fine/{attempt}"), words, first.survivors)  # L3
        present = second.survivors
        again = set(present) != set(first.survivors)
        edges = np.zeros(params.n_quantiles)
        if not again:
            check_counts(second.z, "L3")
            x = order_statistics(params, first.z, chosen, second.z, wanted)
            low = x[np.searchsorted(wanted, lower)]
            high = x[np.searchsorted(wanted, upper)]
            edges = between(low, high, share)
        await ch.broadcast(present, Edges(edges, again))  # L4
        if not again:
            await consistency_check.coordinator(ch, params.view)  # L5
            return edges
    raise ProtocolAbort(NAME, "L4", "restarts", "more restarts than there are sites")
