"""A common map: all sites' cells in two dimensions, the same at every site, by UMAP of shared prototypes.

    L1   u, S    shared prototypes              size, mean and variance of many small groups (`shared_prototypes`)
    L2   u, S    M points                       drawn from the prototypes with the study's seed, as many as cells, at
                                                most `MOST`: x = mean + deviation · e, e normal
    L3   S ⇒ u   y, a position for each point   UMAP of the points
    L4   u       abort unless R(y) ≥ `PART` · R(p)      R: fraction of neighbours in the space that are neighbours in
                                                the map, of `SAMPLE` points that u draws in secret; p: the first two
                                                principal components of the points
    L5   u       a position for each cell of u  from its nearest points, and own nearest cells (`models.umap_map.place`)
    L6   u, S    all sites received the same broadcasts        (same_view)

S sends the positions because UMAP of two machines differs in rounding, and then ends differently. Positions of cells
stay at their site, and no later step opens a function of them.

Reveals
-------
coordinator, site : what `shared_prototypes` reveals, and nothing more: points and their positions follow from it.
    Where a cell is on the map, only its own site knows.
malicious coordinator : the same. It chooses the map, which may mislead: u accepts any that keeps some neighbours.
one malicious site : the same as of `shared_prototypes`. It can bend the map by its sums.
coordinator with k sites : as `shared_prototypes`.

Assumes
-------
What `shared_prototypes` assumes.

Cost
----
Beside `shared_prototypes`, one message down of 2 M words. UMAP of M points at S; neighbours of `SAMPLE` points at u.

References
----------
[MHM18] McInnes, Healy and Melville 2018 (UMAP). Lines numbered here; the security argument is
docs/security/shared_prototypes.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from cloister.arrays import F64
from cloister.errors import ParameterError, ProtocolAbort
from cloister.models import leiden, umap_map
from cloister.mpc.crypto.agreement import Identity
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.net.channel import Channel
from cloister.mpc.net.wire import message
from cloister.mpc.sums import consistency_check
from cloister.study import Party
from cloister.workflows.cluster_cells import shared_prototypes
from cloister.workflows.cluster_cells.shared_prototypes import Cells, Prototypes
from cloister.workflows.common.opened_sums import add_costs

NAME = "common_map"
MOST, LEAST = 12_000, 6  # points
PART = 1 / 3  # of the neighbours that principal components keep
SAMPLE = 500
FARTHEST = 1e6  # of a position


@dataclass(frozen=True, slots=True)
class Params:
    base: shared_prototypes.Params
    n_neighbors: int = 15  # of UMAP
    min_dist: float = 0.5  # of UMAP
    seed: int = 0
    own_neighbors: int = 15  # own cells that draw a cell in L5

    def __post_init__(self) -> None:
        if not 2 <= self.n_neighbors <= 200:
            raise ParameterError(f"n_neighbors must be from 2 to 200, found {self.n_neighbors}")
        if not 0 <= self.min_dist <= 1:
            raise ParameterError(f"min_dist must be from 0 to 1, found {self.min_dist}")

        if not 0 <= self.own_neighbors <= 200:
            raise ParameterError(f"own_neighbors must be from 0 to 200, found {self.own_neighbors}")

    @property
    def view(self) -> consistency_check.Params:
        return consistency_check.Params(self.base.sites, self.base.coordinator)


@dataclass(frozen=True, slots=True)
class Map:
    """Points and their positions, and at a site those of its cells."""

    prototypes: Prototypes
    points: F64  # (M, d), in the precision of 32 bits
    positions: F64  # (M, 2)
    cells: F64  # (n, 2), at this site


@message("L3")
class Positions:  # S ⇒ u
    y: F64  # (M, 2)


def ideal(params: Params, xs: Mapping[Party, Cells]) -> dict[Party, Map]:
    found = next(iter(shared_prototypes.ideal(params.base, xs).values()))
    points = drawn(params, found)
    y = fitted(params, points)
    hub = {params.base.coordinator: Map(found, points, y, np.zeros((0, 2)))}
    return {u: Map(found, points, y, placed(params, mine, points, y)) for u, mine in xs.items()} | hub


def roles(params: Params) -> dict[Party, object]:
    return {params.base.coordinator: coordinator} | dict.fromkeys(params.base.sites, site)


def cost(
    params: Params, columns: int, prototypes: list[int], points: int, digest: int = 0
) -> dict[Party, tuple[int, int]]:
    hub, sites = params.base.coordinator, params.base.sites
    down: dict[Party, tuple[int, int]] = {hub: (len(sites), len(sites) * 16 * points)} | dict.fromkeys(sites, (0, 0))
    base = shared_prototypes.cost(params.base, columns, prototypes, digest, finish=False)
    return add_costs((hub, *sites), [base, down, consistency_check.cost(params.view)])


# ---- local steps -----------------------------------------------------------------------------------------------------


def drawn(params: Params, found: Prototypes) -> F64:
    """L2, rounded as the saved model has them, so that a cell has the same place now and later."""
    points = leiden.drawn(found.cells, found.mean, found.variance, MOST, params.seed)
    if len(points) < LEAST:
        raise ProtocolAbort(NAME, "L2", "too-few-cells", f"{len(points)} points; no map")
    rounded: F64 = points.astype(np.float32).astype(np.float64)
    return rounded


def fitted(params: Params, points: F64) -> F64:
    """L3."""
    return umap_map.fitted(points, params.n_neighbors, params.min_dist, params.seed)


def check_map(params: Params, points: F64, y: F64, entropy: Entropy) -> None:
    """L4."""
    if y.shape != (len(points), 2) or not np.all(np.abs(y) <= FARTHEST):
        raise ProtocolAbort(NAME, "L4", "positions", "not one position in two dimensions for each point")
    some = np.argsort(entropy.uint64(len(points)))[:SAMPLE]
    kept, least = (umap_map.recall(points, z, params.n_neighbors, some) for z in (y, umap_map.principal(points)))
    if kept < PART * least:
        raise ProtocolAbort(NAME, "L4", "neighbours", "the map keeps fewer neighbours than principal components would")


def placed(params: Params, mine: Cells, points: F64, y: F64) -> F64:
    """L5."""
    return umap_map.place(mine.x, points, y, own=params.own_neighbors)


# ---- roles -----------------------------------------------------------------------------------------------------------


async def site(ch: Channel, params: Params, mine: Cells, *, entropy: Entropy, identity: Identity) -> Map:
    """Be u."""
    found = await shared_prototypes.site(
        ch.sub("prototypes"), params.base, mine, entropy=entropy, identity=identity, finish=False
    )  # L1
    points = drawn(params, found)  # L2
    y = (await ch.recv_broadcast(params.base.coordinator, Positions, y=(None, None))).y  # L3
    ch.step(f"map of {len(points)} points", protocol=NAME, line="L4")
    check_map(params, points, y, entropy)  # L4
    await consistency_check.site(ch, params.view, identity=identity)  # L6
    return Map(found, points, y, placed(params, mine, points, y))  # L5


async def coordinator(ch: Channel, params: Params) -> Map:
    """Be S."""
    umap_map.check_umap()
    found = await shared_prototypes.coordinator(ch.sub("prototypes"), params.base, finish=False)  # L1
    points = drawn(params, found)  # L2
    ch.step(f"map of {len(points)} points", protocol=NAME, line="L3")
    y = fitted(params, points)
    await ch.broadcast(params.base.sites, Positions(y))  # L3
    await consistency_check.coordinator(ch, params.view)  # L6
    return Map(found, points, y, np.zeros((0, 2)))
