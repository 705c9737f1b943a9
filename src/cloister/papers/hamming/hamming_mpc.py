"""Hamming distances by three-party sharing (engine `mpc`): the server learns H, or three parties share it.

    M1   u → 0, 1, 2   the codes X_u (n_u × L bits), shared modulo 2^κ > 2L (`shared_codes`)
    M2   0, 1, 2       H = X (1 - 2X)ᵀ + 1 (X1)ᵀ, one product of shared matrices, in blocks of rows
    M3   0, 1 → S      the blocks of two different sites
    M4   u → S         the distances among its own points, which it knows

Only the product is computed together: what is sent grows with (n_1 + n_2 + …) L for the codes and with n² for the
result, not with n² L.

Reveals
-------
server : H, and how many points each site has. From H and a few known points, all points up to a rotation (see
    `label_propagation`). With one computing party more than that: nothing. With two: all codes.
site : how many points the others have.
computing party : nothing else; two of them together learn all codes. With two sites the server computes as third, and
    a single site and the server learn the other's codes.

Assumes
-------
Semi-honest parties; no two of the three computing parties collude; `replicated`'s links. Lies that are not noticed:
(a), (b), (c), (f) of the site and (a), (b), (c), (f) of the server, where they compute: other distances.

Cost
----
For a ring of κ bits, w = ⌈κ/8⌉ bytes: a site sends w n_u L bytes for its codes (2 w n_u L if it does not compute) and
w n_u² to the server; each computing party w per pair of points of different sites to its neighbour, and two of them as
much to the server.

References
----------
[SYL24] section 3.2, SecureHamming; the engine is ours. [AFL+16] the product. Lines numbered here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from cloister.arrays import I32, U8
from cloister.errors import ProtocolAbort
from cloister.models import graph
from cloister.mpc.crypto.agreement import Identity
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.crypto.replicated import Ring
from cloister.mpc.net.channel import Channel
from cloister.mpc.net.wire import message
from cloister.mpc.three_party.replicated import Trio
from cloister.study import Party
from cloister.workflows.propagate_labels.shared_codes import (
    SharedCodes,
    check,
    check_codes,
    computing,
    offsets,
    ring_of,
    share_codes,
)

NAME = "hamming_mpc"
BLOCK = 1 << 22  # entries of H at once


@dataclass(frozen=True, slots=True)
class Params:
    sites: tuple[Party, ...]
    sizes: tuple[int, ...]  # points of each
    bits: int  # L
    server: Party

    def __post_init__(self) -> None:
        check(self.sites, self.sizes, self.bits, self.server)

    @property
    def computing(self) -> tuple[Party, Party, Party]:
        return computing(self.sites, self.server)


@message("M4")
class OwnDistances:  # u → S
    data: U8  # ring words as bytes


def ideal(params: Params, xs: Mapping[Party, U8]) -> dict[Party, I32 | None]:
    packed = np.concatenate([xs[u] for u in params.sites])
    return dict.fromkeys(params.sites) | {params.server: graph.hamming(packed, packed)}


def roles(params: Params) -> dict[Party, object]:
    return {params.server: server} | dict.fromkeys(params.sites, site)


def cost(params: Params) -> dict[Party, tuple[int, int]]:
    """Messages and payload bytes that each party sends."""
    w, three = ring_of(params.bits).size, params.computing
    members = (*params.sites, params.server)
    cuts = list(blocks(params))
    cross = sum((r.stop - r.start) * (c.stop - c.start) for r, c in cuts)
    sent: dict[Party, tuple[int, int]] = {}
    for u in members:
        n = params.sizes[params.sites.index(u)] if u in params.sites else 0
        if u in three:
            peers = len(members) - 1
            to_server = three.index(u) < 2 if params.server not in three else three[three.index(u) - 2] == params.server
            opens = len(cuts) if to_server else 0
            messages = peers + (n > 0) + len(cuts) + opens
            size = 96 * peers + w * n * params.bits + w * cross * (1 + to_server)
        else:  # its key, its seeds, and its codes to two of the three
            messages = 3 + 3 + 2 * (n > 0)
            size = 96 * 3 + 128 + 2 * w * n * params.bits
        sent[u] = (messages + (u in params.sites), size + w * n * n)
    return sent


# ---- local steps -----------------------------------------------------------------------------------------------------


def blocks(params: Params) -> Iterator[tuple[slice, slice]]:
    """Rows and columns of the blocks of two different sites, the first one's rows in pieces."""
    at = offsets(params.sizes)
    for j in range(len(params.sites)):
        for k in range(j + 1, len(params.sites)):
            step = max(1, BLOCK // params.sizes[k])
            for start in range(at[j], at[j + 1], step):
                yield slice(start, min(start + step, at[j + 1])), slice(at[k], at[k + 1])


def own_bytes(ring: Ring, packed: U8) -> U8:
    return ring.to_bytes(graph.hamming(packed, packed).astype(ring.dtype))


def own_distances(ring: Ring, data: U8, n: int, bits: int, line: str, protocol: str = NAME) -> I32:
    H = ring.from_bytes(data, (n, n)).astype(np.int32)
    if (bits < H).any() or (H != H.T).any() or np.diagonal(H).any():
        raise ProtocolAbort(protocol, line, "malformed", "what a site sent are not distances among its own points")
    return H


# ---- roles -----------------------------------------------------------------------------------------------------------


async def _open(params: Params, trio: Trio, shared: SharedCodes | None) -> I32 | None:
    ring = ring_of(params.bits)
    n = sum(params.sizes)
    H = np.zeros((n, n), np.int32) if trio.ch.me == params.server else None
    for rows, columns in blocks(params):
        shape = (rows.stop - rows.start, columns.stop - columns.start)
        x = None if shared is None else await trio.reshare(shared.summand(rows, columns), ring)  # M2
        part = await trio.open(
            x, shape, ring, to=params.server, protocol=NAME, line="M3", what="distances between two sites' points"
        )
        if H is not None and part is not None:
            if (part < 0).any() or (part > params.bits).any():
                raise ProtocolAbort(NAME, "M3", "malformed", "what was opened are not distances")
            H[rows, columns] = part
            H[columns, rows] = part.T
    return H


async def site(ch: Channel, params: Params, packed: U8, *, entropy: Entropy, identity: Identity) -> None:
    check_codes(params.sites, params.sizes, params.bits, ch.me, packed)
    await ch.send(params.server, OwnDistances(own_bytes(ring_of(params.bits), packed)))  # M4
    members = (*params.sites, params.server)
    trio = await Trio.meet(ch.sub("trio"), params.computing, members, entropy=entropy, identity=identity)
    shared = await share_codes(trio, params.sites, params.sizes, params.bits, packed)
    await _open(params, trio, shared)


async def server(ch: Channel, params: Params, *, entropy: Entropy, identity: Identity) -> I32:
    ring, at = ring_of(params.bits), offsets(params.sizes)
    members = (*params.sites, params.server)
    trio = await Trio.meet(ch.sub("trio"), params.computing, members, entropy=entropy, identity=identity)
    shared = await share_codes(trio, params.sites, params.sizes, params.bits, None)
    H = await _open(params, trio, shared)
    assert H is not None
    for j, u in enumerate(params.sites):
        n = params.sizes[j]
        data = (await ch.recv(u, OwnDistances, data=(n * n * ring.size,))).data  # M4
        cut = slice(at[j], at[j + 1])
        H[cut, cut] = own_distances(
            ring, ch.reveal(data, to=ch.me, line="M4", what="own distances", protocol=NAME), n, params.bits, "M4"
        )
    return H
