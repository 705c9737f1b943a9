"""Common clusters: Leiden clusters of all sites' cells, the same at every site, from shared prototypes.

    L1   u, S    shared prototypes              size, mean and variance of many small groups (`shared_prototypes`)
    L2   u, S    M points                       drawn from the prototypes with the study's seed, as many as cells, at
                                                most `MOST`: x = mean + deviation · e, e normal
    L3   S ⇒ u   a cluster for each point       Leiden on the points' graph of k nearest neighbours
    L4   u       abort unless Q ≥ Q_u - `SLACK`        Q: modularity of what S sent in the graph that u computes
                                                itself; Q_u: that of the best of u's own runs
    L5   u       majority of its k nearest points      for each cell of u
    L6   u, S    all sites received the same broadcasts        (same_view)

Drawn points stand for the cells: with means alone, a graph has fewer and sharper neighbourhoods than cells have, and
`resolution` another meaning. Every party can draw the points. S sends the clusters because graphs of two machines
differ in rounding, and Leiden then ends differently; u accepts any partition that is as good as its own.

Reveals
-------
coordinator, site : what `shared_prototypes` reveals, and nothing more: clusters follow from it. Which cluster a cell is
    in, only its own site knows.
malicious coordinator : the same. It can choose among partitions of nearly the best modularity, and so move a border
    past one cell between two runs. A protocol that opens sums per cluster after each (`find-markers`) would then open
    that cell by subtraction. Between machines a site compares the groups of all its runs, and refuses the second
    (docs/security/disclosure.md); the refusal shows that 1 to t - 1 of its cells are between the borders.
one malicious site : the same as of `shared_prototypes`. It can make the clusters wrong, and move borders by its sums.
coordinator with k sites : as `shared_prototypes`.

Assumes
-------
What `shared_prototypes` assumes.

Cost
----
Beside `shared_prototypes`, one message down of M words. A graph of M points and a run of Leiden at every party.

References
----------
[TWE19] Traag, Waltman and van Eck, Scientific Reports 2019 (Leiden); [MHM18] McInnes, Healy and Melville 2018 (weights
of neighbours). Lines numbered here; the security argument is docs/security/shared_prototypes.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from cloister.arrays import F64, I64
from cloister.errors import ParameterError, ProtocolAbort
from cloister.models import leiden
from cloister.mpc.crypto.agreement import Identity
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.net.channel import Channel
from cloister.mpc.net.wire import message
from cloister.mpc.sums import consistency_check
from cloister.study import Party
from cloister.workflows.cluster_cells import shared_prototypes
from cloister.workflows.cluster_cells.shared_prototypes import Cells, Prototypes
from cloister.workflows.common.opened_sums import add_costs

NAME = "common_clusters"
MOST = 12_000  # points
SLACK = 0.02  # of modularity
RUNS = 20  # of Leiden at S
OWN_RUNS = 3  # at a site


@dataclass(frozen=True, slots=True)
class Params:
    base: shared_prototypes.Params
    resolution: float = 1.0
    n_neighbors: int = 15  # k, the point itself included
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.resolution > 0:
            raise ParameterError(f"resolution must be above 0, found {self.resolution}")
        if not 2 <= self.n_neighbors <= 200:
            raise ParameterError(f"n_neighbors must be from 2 to 200, found {self.n_neighbors}")

    @property
    def view(self) -> consistency_check.Params:
        return consistency_check.Params(self.base.sites, self.base.coordinator)


@dataclass(frozen=True, slots=True)
class Clusters:
    """Points and their clusters, and at a site the clusters of its cells."""

    prototypes: Prototypes
    points: F64  # (M, d)
    codes: I64  # (M,), the largest cluster first
    modularity: float
    cells: I64  # (n,), at this site
    votes: F64  # (n,), share of the nearest points that are of that cluster

    def __len__(self) -> int:
        return int(self.codes.max(initial=-1)) + 1


@message("L3")
class Labels:  # S ⇒ u
    codes: I64  # (M,)


def ideal(params: Params, xs: Mapping[Party, Cells]) -> dict[Party, Clusters]:
    found = next(iter(shared_prototypes.ideal(params.base, xs).values()))
    points = drawn(params, found)
    graph = graph_of(params, points)
    codes = leiden.partition(graph, params.resolution, params.seed, RUNS)
    return {u: clusters_of(params, found, points, graph, codes, mine.x) for u, mine in xs.items()} | {
        params.base.coordinator: clusters_of(params, found, points, graph, codes, None)
    }


def roles(params: Params) -> dict[Party, object]:
    return {params.base.coordinator: coordinator} | dict.fromkeys(params.base.sites, site)


def cost(
    params: Params, columns: int, prototypes: list[int], points: int, digest: int = 0
) -> dict[Party, tuple[int, int]]:
    hub, sites = params.base.coordinator, params.base.sites
    down: dict[Party, tuple[int, int]] = {hub: (len(sites), len(sites) * 8 * points)} | dict.fromkeys(sites, (0, 0))
    base = shared_prototypes.cost(params.base, columns, prototypes, digest, finish=False)
    return add_costs((hub, *sites), [base, down, consistency_check.cost(params.view)])


# ---- local steps -----------------------------------------------------------------------------------------------------


def drawn(params: Params, found: Prototypes) -> F64:
    """L2."""
    return leiden.drawn(found.cells, found.mean, found.variance, MOST, params.seed)


def graph_of(params: Params, points: F64) -> Any:
    if len(points) < 3:
        raise ProtocolAbort(NAME, "L2", "too-few-cells", f"{len(points)} cells in groups at all sites; no clusters")
    return leiden.neighbour_graph(points, min(params.n_neighbors, len(points)))


def check_labels(params: Params, graph: Any, codes: I64) -> None:
    """L4."""
    points = graph.shape[0]
    if len(codes) != points or codes.min() < 0 or len(np.unique(codes)) != int(codes.max()) + 1:
        raise ProtocolAbort(NAME, "L4", "labels", "not one cluster for each point, numbered from 0 without a gap")
    own = leiden.partition(graph, params.resolution, params.seed, OWN_RUNS)
    if leiden.modularity(graph, codes, params.resolution) < leiden.modularity(graph, own, params.resolution) - SLACK:
        raise ProtocolAbort(NAME, "L4", "modularity", "the clusters fit the points worse than those computed here")


def clusters_of(params: Params, found: Prototypes, points: F64, graph: Any, codes: I64, x: F64 | None) -> Clusters:
    """L5."""
    quality = leiden.modularity(graph, codes, params.resolution)
    if x is None or not len(x):
        return Clusters(found, points, codes, quality, np.zeros(0, np.int64), np.zeros(0))
    near = codes[leiden.nearest(x, points, params.n_neighbors)[0]]
    votes = np.zeros((len(x), int(codes.max()) + 1))
    np.add.at(votes, (np.repeat(np.arange(len(x)), near.shape[1]), near.ravel()), 1.0 / near.shape[1])
    return Clusters(found, points, codes, quality, votes.argmax(axis=1), votes.max(axis=1))


# ---- roles -----------------------------------------------------------------------------------------------------------


async def site(ch: Channel, params: Params, mine: Cells, *, entropy: Entropy, identity: Identity) -> Clusters:
    """Be u."""
    found = await shared_prototypes.site(
        ch.sub("prototypes"), params.base, mine, entropy=entropy, identity=identity, finish=False
    )  # L1
    points = drawn(params, found)  # L2
    graph = graph_of(params, points)
    codes = (await ch.recv_broadcast(params.base.coordinator, Labels, codes=(None,))).codes  # L3
    ch.step(f"clusters of {len(points)} points", protocol=NAME, line="L4")
    check_labels(params, graph, codes)  # L4
    await consistency_check.site(ch, params.view, identity=identity)  # L6
    return clusters_of(params, found, points, graph, codes, mine.x)  # L5


async def coordinator(ch: Channel, params: Params) -> Clusters:
    """Be S."""
    found = await shared_prototypes.coordinator(ch.sub("prototypes"), params.base, finish=False)  # L1
    points = drawn(params, found)  # L2
    ch.step(f"clusters of {len(points)} points", protocol=NAME, line="L3")
    graph = graph_of(params, points)
    codes = leiden.partition(graph, params.resolution, params.seed, RUNS)
    await ch.broadcast(params.base.sites, Labels(codes))  # L3
    await consistency_check.coordinator(ch, params.view)  # L6
    return clusters_of(params, found, points, graph, codes, None)
