"""Reference distances: how far a cell may be from every reference before it is called unknown, learned from references.

    L1   u, S    common seed                    a secret of the sites, for the checked sum
    L2   u       F_u(g) = share of u's references with another of u's within g, in thousandths     g on a grid
                 in steps of at least min_cells references; nothing where 1 - share is of fewer than min_cells of u
    L3   u, S    checked sum of F_u, and of 1 for each site that adds a curve     the querier adds zeros
    L4   S ⇒ all τ = the smallest g at which the mean of F_u reaches the agreed share; sites compare it with their own

The grid has 20 steps for every power of two, from the bound / 4096 to twice the bound. Every site that adds a curve
counts alike. Distances within a site are shorter than from site to site, and the querier's cells find the nearest of
all sites: of these two effects the second is the larger on blood and lung.

A curve of n references takes the values n - min_cells, n - 2 min_cells, … of n, and 0. So each of its steps is of at
least min_cells references, as many lie beyond the last, and the largest distance is not shown. The curve must reach the
agreed share: a site adds one only if n (1 - share) is at least min_cells, 200 references for a share of 0.95. If no
site has so many, the run ends before any cell is labelled.

Reveals
-------
coordinator, site : Σ F_u, a curve of 261 numbers: how near to each other the references of all sites lie, in steps of
    at least min_cells references of each site; how many sites add to it. With one site that has references, or one
    that has enough: that site's curve, from whose steps its number of references follows.
auxiliary : τ.
malicious coordinator : the same. It cannot change the curve, nor send anybody another τ without an abort.
one malicious site : the same; its own curve is its unverified input, and moves τ.
coordinator with k sites : the curve of the others.

Assumes
-------
What the checked sum assumes: every site stays to the end.

Cost
----
A checked sum of 262 words, a common seed, and 1 message down per party.

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
from cloister.disclosure import Contribution, Rows, Thresholds, constant
from cloister.errors import ParameterError, ProtocolAbort
from cloister.mpc.crypto.agreement import Identity
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.net.channel import Channel
from cloister.mpc.net.wire import message
from cloister.mpc.sums import checked_sum, common_seed
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
        return checked_sum.Params(self.owners, self.coordinator, STEPS * OCTAVES + 2)

    @property
    def seed(self) -> common_seed.Params:
        return common_seed.Params(self.owners, self.coordinator, everyone=True)


@message("L4")
class Threshold:  # S ⇒ all
    distance: float  # τ


def ideal(params: Params, xs: Mapping[Party, npt.NDArray[np.floating]]) -> dict[Party, float]:
    total = np.sum([contribution(params, xs[u], Thresholds()).values for u in params.sites], axis=0)
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


def contribution(params: Params, x: npt.NDArray[np.floating], least: Thresholds) -> Contribution:
    """L2: F_u in thousandths, rounded down, and 1; zeros where too few references lie beyond the share."""
    near = np.sort(nearest_others(x))
    n, step = len(near), least.min_cells
    below = np.searchsorted(near, params.grid, side="right")
    levels = np.arange(n - step, 0, -step)[::-1]  # n - min_cells, n - 2 min_cells, …
    levels = levels[levels >= step]
    at = np.searchsorted(levels, below, side="right") - 1
    counts = np.where(at >= 0, levels[np.maximum(at, 0)], 0) if len(levels) else np.zeros(len(below), np.int64)
    told = n * (1 - params.share) * (1 + 1e-12) >= step and len(levels) > 0
    values = np.append(counts * UNIT // max(n, 1), 1) * told
    sizes = np.full(1, float(step if told else 0))
    return Rows(n, None, least).measured(sizes, None, values[None]).map(lambda x: x[0])


def threshold(params: Params, total: I64) -> float:
    """L4: τ; the end of the grid, where nothing is unknown, if the curve does not reach the share."""
    curve, sites = total[:-1], int(total[-1])
    if not 0 <= sites <= len(params.sites):
        raise ProtocolAbort(NAME, "L3", "absurd", "a number of curves that the sites cannot have: an input is wrong")
    if np.any(curve < 0) or np.any(curve > UNIT * sites) or np.any(np.diff(curve) < 0):
        raise ProtocolAbort(NAME, "L3", "absurd", "the sum of all curves is not a curve: a site's input is wrong")
    if not sites:
        why = f"no site has enough references for a share of {params.share:g}: at least 10 must lie beyond it"
        raise ProtocolAbort(NAME, "L3", "few-references", f"{why}; lower known_share=, or pass max_distance=")
    reached = np.flatnonzero(curve >= params.share * UNIT * sites - sites)  # each curve is rounded down
    return float(params.grid[reached[0] if len(reached) else -1])


# ---- roles -----------------------------------------------------------------------------------------------------------


async def site(
    ch: Channel,
    params: Params,
    x: npt.NDArray[np.floating],
    least: Thresholds | None = None,
    *,
    entropy: Entropy,
    identity: Identity,
) -> float:
    """Hold references, one row each. Returns τ."""
    return await _add(ch, params, contribution(params, x, least or Thresholds()), entropy, identity)


async def querier(ch: Channel, params: Params, *, entropy: Entropy, identity: Identity) -> float:
    """Hold the cells that will be labelled; they play no part here."""
    nothing = constant(np.zeros(params.sum.length, np.int64), "the querier has no references")
    return await _add(ch, params, nothing, entropy, identity)


async def _add(ch: Channel, params: Params, mine: Contribution, entropy: Entropy, identity: Identity) -> float:
    seed = await common_seed.site(ch.sub("seed", params.seed), params.seed, entropy=entropy, identity=identity)  # L1
    sums = ch.sub("curve", params.sum)
    what = "how near to each other my references lie"
    words = sums.contribute(mine.map(lambda x: x.astype(np.uint64)), line="L3", what=what, protocol=NAME)
    z = await checked_sum.site(sums, params.sum, words, seed)  # L3
    tau = threshold(params, _shown(ch, z))
    if (await ch.recv_broadcast(params.coordinator, Threshold)).distance != tau:  # L4
        raise ProtocolAbort(NAME, "L4", "changed", "the coordinator sent another distance than the sites computed")
    return tau


async def coordinator(ch: Channel, params: Params) -> float:
    """Play S."""
    await common_seed.coordinator(ch.sub("seed", params.seed), params.seed)  # L1
    z = await checked_sum.coordinator(ch.sub("curve", params.sum), params.sum)  # L3
    tau = threshold(params, _shown(ch, z))
    await ch.broadcast([*params.owners, *params.listeners], Threshold(tau))  # L4
    return tau


async def listener(ch: Channel, params: Params) -> float:
    """Receive τ; the same as the sites, or the next step fails."""
    return (await ch.recv_broadcast(params.coordinator, Threshold)).distance  # L4


def _shown(ch: Channel, z: U64) -> I64:
    what = "how near to each other references lie, summed over sites"
    return ch.reveal(z, to=ch.me, line="L3", what=what, protocol=NAME).view(np.int64)
