"""Reference distances: how far a cell may be from every reference before it is called unknown, learned from references.

    L1   u, S    common seed                    a secret of the sites, for the checked sum
    L2   u       F_u(g) = share of u's references with another of u's nearer than g, in thousandths    g on a grid
    L3   u, S    checked sum of F_u             the site that asks adds zeros
    L4   S ⇒ all τ = the smallest g at which the mean of F_u reaches the agreed share; sites compare it with their own

The grid has 20 steps for every power of two, from the bound / 4096 to twice the bound. Every site with references
counts alike. Distances within a site are shorter than from site to site, and the asking site's cells find the nearest
of all sites: of these two effects the second is the larger on blood and lung.

Reveals
-------
coordinator, site : Σ F_u, a curve of 261 numbers: how near to each other the references of all sites lie. With one
    site that has references: that site's curve. No number of cells, beyond what thousandths of a few cells give away.
auxiliary : τ.
lying coordinator : the same. It cannot change the curve, nor tell anybody another τ without an abort.
one lying site : the same; its own curve is what it says, and moves τ.
coordinator with k sites : the curve of the others.

Assumes
-------
What the checked sum assumes: every site stays to the end.

Cost
----
A checked sum of 261 words, a common seed, and 1 message down per party.

References
----------
Ours; the papers leave it open.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cloister.arrays import F64, I64, U64
from cloister.crypto.agreement import Identity
from cloister.crypto.entropy import Entropy
from cloister.errors import ParameterError, ProtocolAbort
from cloister.net.channel import Channel
from cloister.net.wire import message
from cloister.protocols.sums import checked_sum, common_seed
from cloister.study import Party

NAME = "reference_distances"
STEPS, OCTAVES = 20, 13  # of the grid
UNIT = 1000
MOST = 5000  # references of a site that are asked for their nearest; of more, every second, third, ...
BLOCK = 1 << 22  # distances at a time


@dataclass(frozen=True, slots=True)
class Params:
    querier: Party
    sites: tuple[Party, ...]  # owners of references
    coordinator: Party
    bound: float  # largest norm of a row
    share: float  # of references that are to be no farther from another than τ
    listeners: tuple[Party, ...] = ()  # hold no cells, but must know τ

    def __post_init__(self) -> None:
        if not 0 < self.share < 1 or not (math.isfinite(self.bound) and self.bound > 0):
            raise ParameterError(f"the share of references must lie between 0 and 1, found {self.share}")

    @property
    def owners(self) -> tuple[Party, ...]:
        return (self.querier, *self.sites)

    @property
    def grid(self) -> F64:
        steps: F64 = 2.0 * self.bound * 2.0 ** (np.arange(-STEPS * OCTAVES, 1) / STEPS)
        return steps

    @property
    def sum(self) -> checked_sum.Params:
        return checked_sum.Params(self.owners, self.coordinator, STEPS * OCTAVES + 1)

    @property
    def seed(self) -> common_seed.Params:
        return common_seed.Params(self.owners, self.coordinator)


@message("L4")
class Threshold:  # S ⇒ all
    distance: float  # τ


def ideal(params: Params, xs: Mapping[Party, npt.NDArray[np.floating]]) -> dict[Party, float]:
    total = np.sum([curve(params, xs[u]) for u in params.sites], axis=0)
    return dict.fromkeys((params.coordinator, *params.owners, *params.listeners), threshold(params, total))


def roles(params: Params) -> dict[Party, object]:
    owners: dict[Party, object] = {params.querier: querier} | dict.fromkeys(params.sites, site)
    return {params.coordinator: coordinator} | owners | dict.fromkeys(params.listeners, listener)


def cost(params: Params) -> dict[Party, tuple[int, int]]:
    parts = [checked_sum.cost(params.sum), common_seed.cost(params.seed)]
    down = len(params.owners) + len(params.listeners)
    parts.append({params.coordinator: (down, 8 * down)})
    everyone = (params.coordinator, *params.owners, *params.listeners)
    return {u: (sum(p.get(u, (0, 0))[0] for p in parts), sum(p.get(u, (0, 0))[1] for p in parts)) for u in everyone}


# ---- local steps -----------------------------------------------------------------------------------------------------


def nearest_others(x: npt.NDArray[np.floating]) -> F64:
    """The distance of rows to the nearest other row; of no more than `MOST` of them."""
    rows = np.asarray(x, dtype=np.float64)
    at = np.arange(0, len(rows), max(1, math.ceil(len(rows) / MOST)))
    square, found = (rows**2).sum(axis=1), []
    step = max(1, BLOCK // max(1, len(rows)))
    for start in range(0, len(at), step):
        part = at[start : start + step]
        apart = square[part, None] - 2 * rows[part] @ rows.T + square
        apart[np.arange(len(part)), part] = np.inf
        found.append(apart.min(axis=1))
    near: F64 = np.sqrt(np.maximum(np.concatenate(found), 0.0))
    return near


def curve(params: Params, x: npt.NDArray[np.floating]) -> I64:
    """L2: F_u in thousandths, rounded down; all zeros if there is only one row."""
    near = np.sort(nearest_others(x))
    below = np.searchsorted(near, params.grid, side="right")
    return below * UNIT // len(near)


def threshold(params: Params, total: I64) -> float:
    """L4: τ; the end of the grid, where nothing is unknown, if the curve does not reach the share."""
    if np.any(total < 0) or np.any(total > UNIT * len(params.sites)) or np.any(np.diff(total) < 0):
        raise ProtocolAbort(NAME, "L3", "absurd", "the sum of all curves is no curve: a site lies")
    reached = np.flatnonzero(total >= params.share * UNIT * len(params.sites))
    return float(params.grid[reached[0] if len(reached) else -1])


# ---- roles -----------------------------------------------------------------------------------------------------------


async def site(
    ch: Channel, params: Params, x: npt.NDArray[np.floating], *, entropy: Entropy, identity: Identity
) -> float:
    """Hold references, one row each. Returns τ."""
    return await _add(ch, params, curve(params, x).astype(np.uint64), entropy, identity)


async def querier(ch: Channel, params: Params, *, entropy: Entropy, identity: Identity) -> float:
    """Hold the cells that will be asked about; they play no part here."""
    return await _add(ch, params, np.zeros(params.sum.length, np.uint64), entropy, identity)


async def _add(ch: Channel, params: Params, mine: U64, entropy: Entropy, identity: Identity) -> float:
    seed = await common_seed.site(ch.sub("seed", params.seed), params.seed, entropy=entropy, identity=identity)  # L1
    sums = ch.sub("curve", params.sum)
    z = await checked_sum.site(sums, params.sum, mine, seed.secret, entropy=entropy, identity=identity)  # L3
    tau = threshold(params, _shown(ch, z))
    if (await ch.recv_broadcast(params.coordinator, Threshold)).distance != tau:  # L4
        raise ProtocolAbort(NAME, "L4", "changed", "the coordinator tells another distance than the sites found")
    return tau


async def coordinator(ch: Channel, params: Params) -> float:
    """Play S."""
    await common_seed.coordinator(ch.sub("seed", params.seed), params.seed)  # L1
    z = await checked_sum.coordinator(ch.sub("curve", params.sum), params.sum)  # L3
    tau = threshold(params, _shown(ch, z))
    await ch.broadcast([*params.owners, *params.listeners], Threshold(tau))  # L4
    return tau


async def listener(ch: Channel, params: Params) -> float:
    """Be told τ; the same as the sites, or the next step fails."""
    return (await ch.recv_broadcast(params.coordinator, Threshold)).distance  # L4


def _shown(ch: Channel, z: U64) -> I64:
    what = "how near to each other references lie, summed over sites"
    return ch.reveal(z, to=ch.me, line="L3", what=what, protocol=NAME).view(np.int64)
