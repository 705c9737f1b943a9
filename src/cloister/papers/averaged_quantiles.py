"""Averaged quantiles: the mean of the sites' own quantiles, weighted by their cells. The published federated binning.

    L1   u → S   B_u, n_u        quantiles of u's own positive values; its number of cells
    L2   S → u   B = Σ n_u B_u / Σ n_u

This is not the quantile of the pooled values, and it hides little: it is here to compare with. Use `pooled_quantiles`.

Reveals
-------
coordinator : every site's number of cells and its B - 1 local quantiles, among them its smallest and largest value.
    A site with about B values or fewer sends them almost literally.
site : the averaged edges. With two sites: each can work out the other's quantiles, up to the weights.

Assumes
-------
A coordinator that every site trusts with its quantiles; authenticated channels. Lies that are not noticed: (a), (b),
(c), (f) of the coordinator, other edges for each site; (b), (c), (f) of the site.

Cost
----
Per site: 1 message up, 1 down, 8B bytes each and framing.

References
----------
[FedscGPT] supplementary methods, Algorithm 1 lines 2-9: L1 is its lines 3-5, L2 its line 7.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from cloister.arrays import F64
from cloister.errors import ProtocolAbort
from cloister.mpc.net.channel import Channel
from cloister.mpc.net.wire import message
from cloister.study import Party

NAME = "averaged_quantiles"


@dataclass(frozen=True, slots=True)
class Params:
    sites: tuple[Party, ...]
    coordinator: Party
    n_quantiles: int  # B - 1


@message("L1")
class Local:  # u → S
    edges: F64  # (B - 1,)
    n_cells: int


@message("L2")
class Averaged:  # S → u
    edges: F64  # (B - 1,)


def ideal(params: Params, xs: Mapping[Party, tuple[F64, int]]) -> dict[Party, F64]:
    total = sum(n for _, n in xs.values())
    edges = np.sum([n * quantiles(params, values) for values, n in xs.values()], axis=0) / total
    return dict.fromkeys((params.coordinator, *xs), edges)


def roles(params: Params) -> dict[Party, object]:
    return {params.coordinator: coordinator} | dict.fromkeys(params.sites, site)


def cost(params: Params) -> dict[Party, tuple[int, int]]:
    n, size = len(params.sites), 8 * params.n_quantiles
    return {params.coordinator: (n, n * size)} | dict.fromkeys(params.sites, (1, size))


def quantiles(params: Params, values: F64) -> F64:
    return np.quantile(values, np.linspace(0, 1, params.n_quantiles))


async def site(ch: Channel, params: Params, values: F64, n_cells: int) -> F64:
    S = params.coordinator
    edges = ch.reveal(quantiles(params, values), to=S, line="L1", what="my local quantiles", protocol=NAME)
    await ch.send(S, Local(edges, n_cells))  # L1
    averaged = (await ch.recv(S, Averaged, edges=(params.n_quantiles,))).edges  # L2
    if not np.all(np.isfinite(averaged)) or np.any(np.diff(averaged) < 0):
        raise ProtocolAbort(NAME, "L2", "edges", "edges that are not rising numbers")
    return averaged


async def coordinator(ch: Channel, params: Params) -> F64:
    local = await ch.gather(params.sites, Local, edges=(params.n_quantiles,))  # L1
    total = sum(m.n_cells for m in local.values())
    if total <= 0 or any(m.n_cells < 1 or not np.all(np.isfinite(m.edges)) for m in local.values()):
        raise ProtocolAbort(NAME, "L1", "malformed", "a site without cells, or edges that are not numbers")
    edges = np.sum([m.n_cells * m.edges for m in local.values()], axis=0) / total
    await ch.scatter(params.sites, Averaged(edges))  # L2
    return np.asarray(edges)
