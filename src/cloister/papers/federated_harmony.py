"""Federated Harmony as it was published: the centre adds up what every site tells it in the clear.

    L1   u ⇒ S   space, columns                 common space, as in `pooled_harmony`
    L2   u → S   its part of a sum              the sums L2 to L11 of `pooled_harmony`, over single cells
    L3   S ⇒ u   the sum

What a site tells is what the published code hands to its centre: R_ik z_i summed over its cells, masses of clusters,
and of the ridge regression n_b and s_b, here in the form λs / (n + λ), λn / (n + λ). Its centroids come from a
federated k-means that is not part of it; ours are those of `pooled_harmony`. Every cell is a group of its own.

Reveals
-------
coordinator : of every site: number of cells; at every step the mass of each cluster and the sum of its cells'
    directions; the mean of its cells in each cluster. A cluster that one cell of a site is in shows that cell.
site : the sums over all sites; with two sites therefore the other's part.
malicious coordinator : the same, and it can tell the sites any sums, so also centroids beside a cell of its choice.
one malicious site : the sums over all, at centroids that it can bend.

Assumes
-------
Parties that keep to the protocol. Lies that are not noticed: (b), (c), (f) of the coordinator and (b), (c), (f) of the
site, cells that are moved elsewhere.

Cost
----
Per site and sum one message up and one down, of 8 bytes a number: K d for centroids, K for masses, K (d + 1) for
anchors.

References
----------
[FH] Federated Harmony, PLOS Computational Biology, and its code (classes of a centre and of clients). [KMF+19] Harmony.
Lines numbered here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from cloister.arrays import F64
from cloister.errors import ProtocolAbort
from cloister.models.harmony import EVERYTHING
from cloister.mpc.crypto.agreement import Identity
from cloister.mpc.net.channel import Channel
from cloister.mpc.net.wire import message
from cloister.mpc.sums import consistency_check
from cloister.study import Party
from cloister.workflows.common import common_space
from cloister.workflows.integrate import pooled_harmony
from cloister.workflows.integrate.harmony_steps import (
    Cells,
    Integrated,
    Params,
    check_site,
    integrate,
    part_of,
    together,
)

NAME = "federated_harmony"


@message("L2")
class Mine:  # u → S
    part: F64  # (m,)


@message("L3")
class Total:  # S ⇒ u
    sum: F64  # (m,)


def unprotected(mine: Cells) -> Cells:
    """Every cell is a group of its own."""
    return replace(mine, thresholds=EVERYTHING)


def ideal(params: Params, xs: Mapping[Party, Cells]) -> dict[Party, Integrated]:
    return together(params, {u: unprotected(mine) for u, mine in xs.items()})


def roles(params: Params) -> dict[Party, object]:
    return {params.coordinator: coordinator} | dict.fromkeys(params.sites, site)


def cost(params: Params, cells: int, columns: int, digest: int = 0) -> dict[Party, tuple[int, int]]:
    n, hub = len(params.sites), params.coordinator
    sizes = pooled_harmony.lengths(params, cells, columns)
    sizes[0] //= 2  # no fractions apart
    space = common_space.cost(common_space.Params(params.sites, hub, params.embedding), digest + len(f"/{columns}"))
    view = consistency_check.cost(consistency_check.Params(params.sites, hub))
    own = (len(sizes), 8 * sum(sizes))
    mine = {hub: (n * own[0], n * own[1])} | dict.fromkeys(params.sites, own)
    return {p: (mine[p][0] + space[p][0] + view[p][0], mine[p][1] + space[p][1] + view[p][1]) for p in mine}


def check_numbers(line: str, x: F64) -> F64:
    if not np.all(np.isfinite(x)):
        raise ProtocolAbort(NAME, line, "absurd", "a sum that is not a number")
    return x


# ---- roles -----------------------------------------------------------------------------------------------------------


async def site(ch: Channel, params: Params, mine: Cells, *, identity: Identity) -> Integrated:
    check_site(params, mine)
    mine, S, d = unprotected(mine), params.coordinator, mine.x.shape[1]
    space = common_space.Params(params.sites, S, params.embedding)
    await common_space.site(ch.sub("space"), space, f"{mine.space}/{d}")  # L1
    steps = integrate(part_of(params, mine, d), len(params.sites), NAME)
    ask = next(steps)
    while True:
        await ch.send(S, Mine(ask.mine))  # L2
        total = (await ch.recv_broadcast(S, Total, sum=ask.mine.shape)).sum  # L3
        try:
            ask = steps.send(check_numbers("L3", total))
        except StopIteration as end:
            await consistency_check.site(ch, consistency_check.Params(params.sites, S), identity=identity)
            done: Integrated = end.value
            return done


async def coordinator(ch: Channel, params: Params) -> Integrated:
    """Be S: sees every site's part of every sum."""
    space = common_space.Params(params.sites, params.coordinator, params.embedding)
    columns = pooled_harmony.columns_in(await common_space.coordinator(ch.sub("space"), space))  # L1
    steps = integrate(part_of(params, None, columns), len(params.sites), NAME)
    ask = next(steps)
    while True:
        parts = await ch.gather(params.sites, Mine, part=ask.mine.shape)  # L2
        total = check_numbers("L2", np.sum([m.part for m in parts.values()], axis=0))
        ch.reveal(total, to=(ch.me, *params.sites), line="L3", what=ask.what, protocol=NAME)
        await ch.broadcast(params.sites, Total(total))  # L3
        try:
            ask = steps.send(total)
        except StopIteration as end:
            await consistency_check.coordinator(ch, consistency_check.Params(params.sites, params.coordinator))
            done: Integrated = end.value
            return done
