"""Shared prototypes: many small groups of all sites' cells, as pooled sizes, means and variances, from checked sums.

    L1   u, S    common space, common seed      one embedding of d columns; a secret of the sites, for checked sums
    L2   u       groups of similar cells        its own, each of at least t cells of d' donors (`disclosure`);
                 m, x̄, s                        size of a group, and per column its mean and its mean of squares;
                                                a cell farther out than the middle one counts at that distance
    L3   u, S    Σ m, Σ m x̄, Σ m s              over all groups: the first prototype
    then up to `ROUNDS` times, until there are K prototypes:
    L4   u, S    split                          prototypes of at least 3/2 of N/K cells in two, along the column of
                                                largest variance; the largest first
    L5   u, S    Σ m, Σ m x̄, Σ m s  by prototype     twice: every group belongs to the nearest prototype, which then
                                                is the mean of its groups; prototypes without a group are dropped
    L6   u, S    the same, `LAST` times         k-means to its end, about
    L7   u, S    all sites received the same broadcasts     (same_view)

What stands beside `u, S` is a checked sum over all sites. Every party computes all else from the opened sums.

A site contributes functions of the sizes, means and mean squares of its groups, and of nothing else. One cell far from
all others bends none of them far (`SimilarGroups.clipped_means`). Groups are formed
from its own cells before the first message. Whatever other parties send, and however often: no opened value depends on
fewer than t of its cells and d' of its donors. A site with fewer cells adds zero, and receives the prototypes.

Reveals
-------
coordinator, site : over all sites together: the number of cells in groups; in every round the size, the mean and the
    variance per column of each prototype. A prototype may consist of groups of one site, and of one group of it. With
    two sites: the other's sums, by subtraction.
malicious coordinator : the same. It cannot change a sum or leave out a site without an abort.
one malicious site : the same of prototypes that it can place, because its part of every sum is its unverified input. At
    the most, size, mean and variance of single groups of another site: at least t cells and d' donors each.
coordinator with k sites : these sums over the other sites, so with all but one those of the last site.

Assumes
-------
What the checked sum assumes: every site stays to the end. Inputs are not verified: a site may submit arbitrary sums.

Cost
----
Per site at most 1 + 2 `ROUNDS` + `LAST` checked sums, of 2 (1 + 2d) words per prototype.

References
----------
[LBG80] Linde, Buzo and Gray, IEEE Transactions on Communications 1980: k-means by splitting. Groups: microaggregation
[DFMS02, Domingo-Ferrer and Mateo-Sanz, IEEE TKDE 2002]. Lines numbered here; the security argument is
docs/security/shared_prototypes.md.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from cloister.arrays import F64, I64
from cloister.disclosure import Contribution, Rows, Thresholds
from cloister.errors import DataError, ParameterError, ProtocolAbort
from cloister.models.leiden import nearest
from cloister.mpc.crypto.agreement import Identity
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.net.channel import Channel
from cloister.study import Party
from cloister.workflows.common import common_space, opened_sums
from cloister.workflows.common.opened_sums import OpenedSums, add_costs

NAME = "shared_prototypes"
ROUNDS = 16
LAST = 2
WIDEST = 1024  # columns of an embedding
STEP = 0.5  # deviations that the two halves of a prototype move apart
FULL = 1.5  # of N/K cells: prototypes that are split


@dataclass(frozen=True, slots=True)
class Params:
    sites: tuple[Party, ...]
    coordinator: Party
    embedding: str  # its name
    n_prototypes: int = 1000  # K, at most
    min_cells: int = 10  # t
    min_donors: int = 3  # d', where donors are named

    def __post_init__(self) -> None:
        if len(set(self.sites)) < 2 or len(set(self.sites)) != len(self.sites) or self.coordinator in self.sites:
            raise ParameterError(f"shared prototypes need at least two sites, all different; found {len(self.sites)}")
        if not 2 <= self.n_prototypes <= 10_000:
            raise ParameterError(f"n_prototypes must be from 2 to 10000, found {self.n_prototypes}")

    @property
    def thresholds(self) -> Thresholds:
        return Thresholds(self.min_cells, self.min_donors)


@dataclass(frozen=True, slots=True)
class Cells:
    """What a site holds."""

    x: F64  # (n, d)
    donor: I64 | None = None  # (n,), codes, where donors are named
    space: str = ""  # digest of what made the embedding
    thresholds: Thresholds = field(default_factory=Thresholds)  # this site's own; they can only raise the study's


@dataclass(frozen=True, slots=True)
class Prototypes:
    """The same at every party."""

    cells: F64  # (K,)
    mean: F64  # (K, d)
    variance: F64  # (K, d), per column
    trail: tuple[int, ...] = ()  # prototypes of every sum that was opened

    def __len__(self) -> int:
        return len(self.cells)


def ideal(params: Params, xs: Mapping[Party, Cells]) -> dict[Party, Prototypes]:
    """The same steps over the groups of all sites in one place, with nothing encoded."""
    own = [Own.of(params, mine) for mine in xs.values()]
    columns = next(iter(xs.values())).x.shape[1]

    async def add(line: str, what: str, means: F64) -> F64:
        total: F64 = np.sum([o.sums(means).values for o in own], axis=0)
        return total.reshape(len(means), -1)

    steps = course(params, columns, add)
    try:
        steps.send(None)
    except StopIteration as end:
        found: Prototypes = end.value
        return dict.fromkeys((params.coordinator, *xs), found)
    raise AssertionError("nothing here waits for anybody")


def roles(params: Params) -> dict[Party, object]:
    return {params.coordinator: coordinator} | dict.fromkeys(params.sites, site)


def cost(
    params: Params, columns: int, prototypes: list[int], digest: int = 0, *, finish: bool = True
) -> dict[Party, tuple[int, int]]:
    """Messages and bytes; `prototypes` has one entry for every sum."""
    who = (params.sites, params.coordinator)
    parts = [opened_sums.cost(*who, [k * (1 + 2 * columns) for k in prototypes], finish=finish)]
    parts.append(common_space.cost(common_space.Params(*who, params.embedding), digest + len(f"/{columns}")))
    return add_costs((params.coordinator, *params.sites), parts)


# ---- local steps -----------------------------------------------------------------------------------------------------


def check_site(mine: Cells) -> None:
    if mine.x.ndim != 2 or not 1 <= mine.x.shape[1] <= WIDEST:
        raise DataError(f"expected an embedding of 1 to {WIDEST} columns, found shape {mine.x.shape}")
    if not np.all(np.isfinite(mine.x)):
        raise DataError("the embedding has missing or infinite values")


@dataclass(frozen=True)
class Own:
    """L2: a site's groups of similar cells."""

    size: F64  # (k,)
    mean: F64  # (k, d)
    square: F64  # (k, d)
    contribution: Callable[[F64], Contribution]

    @staticmethod
    def of(params: Params, mine: Cells) -> Own:
        least = params.thresholds.raised(
            {"min_cells": mine.thresholds.min_cells, "min_donors": mine.thresholds.min_donors}
        )
        groups = Rows(len(mine.x), mine.donor, least).similar(mine.x)
        mean = groups.clipped_means(mine.x)
        away = np.zeros_like(mine.x)
        inside = groups.codes >= 0
        away[inside] = clipped(mine.x[inside] - mean[groups.codes[inside]], groups.codes[inside])
        square = np.square(mean) + groups.means(np.square(away))
        return Own(groups.cells.astype(np.float64), mean, square, groups.contribution)

    def sums(self, means: F64) -> Contribution:
        """L5: by nearest prototype, (K, 1 + 2d) in one vector."""
        K, d = means.shape
        sums = np.zeros((K, 1 + 2 * d))
        if len(self.size):
            own = np.concatenate([np.ones((len(self.size), 1)), self.mean, self.square], axis=1) * self.size[:, None]
            np.add.at(sums, nearest(self.mean, means, 1)[0][:, 0], own)
        return self.contribution(sums.ravel())


def clipped(away: F64, codes: I64) -> F64:
    """Deviations of rows from the mean of their group, none longer than that of the middle row of the group.

    All are stretched by a constant, so that normal deviations in many columns have their variance in spite of it: those
    of half of the rows are cut from m(1 + z / √2d) to m, where z > 0 is half of a normal variable.
    """
    length = np.linalg.norm(away, axis=1)
    order = np.lexsort((length, codes))
    start = np.flatnonzero(np.append(True, np.diff(codes[order]) != 0)) if len(codes) else np.zeros(0, np.int64)
    sizes = np.diff(np.append(start, len(codes)))
    reach = np.zeros(int(codes.max(initial=-1)) + 1)
    reach[codes[order][start]] = length[order][start + sizes // 2]
    stretch = 1.0 / np.sqrt(1.0 - 0.8 / np.sqrt(2.0 * max(away.shape[1], 2)))
    shorter: F64 = away * (stretch * np.minimum(1.0, reach[codes] / np.maximum(length, 1e-300)))[:, None]
    return shorter


def of_sums(sums: F64, columns: int, line: str, trail: tuple[int, ...]) -> Prototypes:
    """L5: prototypes that have cells.

    Sums that no cells give are the work of a malicious site, which can choose its cells as well. They do not end the
    run: prototypes without cells are dropped, and a variance is at least 0.
    """
    cells = np.rint(sums[:, 0])
    kept = cells > 0
    if not kept.any():
        raise ProtocolAbort(NAME, line, "too-few-cells", "no site has enough cells for a group")
    mean = sums[kept, 1 : 1 + columns] / cells[kept, None]
    variance = sums[kept, 1 + columns :] / cells[kept, None] - np.square(mean)
    return Prototypes(cells[kept], mean, np.maximum(variance, 0.0), trail)


def split(params: Params, now: Prototypes) -> F64 | None:
    """L4: means of the next prototypes; None where nothing is to be split."""
    room = params.n_prototypes - len(now)
    target = max(float(now.cells.sum()) / params.n_prototypes, float(params.min_cells))
    large = np.flatnonzero((now.cells >= FULL * target) & (now.variance.max(axis=1) > 0))
    large = large[np.lexsort((large, -now.cells[large]))][: max(0, room)]
    if not len(large):
        return None
    column = now.variance[large].argmax(axis=1)
    move = np.zeros((len(large), now.mean.shape[1]))
    move[np.arange(len(large)), column] = STEP * np.sqrt(now.variance[large, column])
    means = now.mean.copy()
    means[large] -= move / 2  # nearer than the other half, so that a single group has one place to be
    return np.concatenate([means, now.mean[large] + move])


async def course(params: Params, columns: int, add: Callable[[str, str, F64], Awaitable[F64]]) -> Prototypes:
    """L3 to L6: the same at every party."""
    trail: list[int] = []

    async def means_of(line: str, means: F64) -> Prototypes:
        trail.append(len(means))
        what = f"sizes, means and variances of {len(means)} prototypes"
        return of_sums(await add(line, what, means), columns, line, tuple(trail))

    now = await means_of("L3", np.zeros((1, columns)))
    for _ in range(ROUNDS):
        means = split(params, now)
        if means is None:
            break
        before = len(now)
        now = await means_of("L5", means)
        now = await means_of("L5", now.mean)
        if len(now) == before:
            break
    for _ in range(LAST):
        now = await means_of("L6", now.mean)
    return now


# ---- roles -----------------------------------------------------------------------------------------------------------


def columns_in(agreed: str) -> int:
    """L1: the columns that all embeddings have."""
    _, _, text = agreed.rpartition("/")
    if not text.isdecimal() or not 1 <= int(text[:9]) <= WIDEST:
        raise ProtocolAbort(NAME, "L1", "columns", f"no embedding of 1 to {WIDEST} columns")
    return int(text)


async def follow(opened: OpenedSums, params: Params, columns: int, own: Own | None) -> Prototypes:
    """L3 to L6, at any party; S has no groups."""

    async def add(line: str, what: str, means: F64) -> F64:
        def part() -> Contribution:
            assert own is not None
            return own.sums(means)

        return (await opened.add(line, what, len(means) * (1 + 2 * columns), part)).reshape(len(means), -1)

    return await course(params, columns, add)


async def site(
    ch: Channel, params: Params, mine: Cells, *, entropy: Entropy, identity: Identity, finish: bool = True
) -> Prototypes:
    """Be u. A protocol that goes on after L6 passes `finish=False`, and compares at its own end."""
    check_site(mine)
    d = mine.x.shape[1]
    space = common_space.Params(params.sites, params.coordinator, params.embedding)
    await common_space.site(ch.sub("space"), space, f"{mine.space}/{d}")  # L1
    opened = OpenedSums(ch, NAME, params.sites, params.coordinator, entropy, identity)
    await opened.begin()  # L1
    found = await follow(opened, params, d, Own.of(params, mine))  # L2 to L6
    if finish:
        await opened.finish()  # L7
    return found


async def coordinator(ch: Channel, params: Params, *, finish: bool = True) -> Prototypes:
    """Be S: add up, and follow."""
    space = common_space.Params(params.sites, params.coordinator, params.embedding)
    columns = columns_in(await common_space.coordinator(ch.sub("space"), space))  # L1
    opened = OpenedSums(ch, NAME, params.sites, params.coordinator)
    await opened.begin()  # L1
    found = await follow(opened, params, columns, None)  # L3 to L6
    if finish:
        await opened.finish()  # L7
    return found
