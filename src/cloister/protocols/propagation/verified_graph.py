"""Verified graph: the function of `private_graph`, computed so that any one party may lie.

    G1   mpc          the codes of all sites, shared among three computing parties; that they are bits is proved
         ot, he       every two sites hold H_jk = T - R (`pair_distances`), and share T and R
    G2   0, 1, 2      H = X (1 - 2X)ᵀ + 1 (X1)ᵀ, or what was shared; L + 1 in place of H_ii; in blocks of rows
    G3   0, 1, 2      the k smallest of every row: bits, a shuffle, opened comparisons                  (verified V6)
    G4   three → S    the k keys H_ij · 2^b + j of every row, ascending

Reveals
-------
server : for every point its k nearest neighbours and their distances: n k numbers of the n(n - 1)/2 in H; how many
    points each site has. If it lies, no more: it gives nothing but, with two sites, a computing party's part.
site : how many points the others have; no more if it lies. Its own points are what it says they are.
computing party : nothing else; two of the three together learn all codes (`mpc`) or all distances (`ot`, `he`). With
    two sites the server computes as third, and it and a single site learn them.

Assumes
-------
At most one party lies (`verified`). With `ot` and `he` the distances between a lying site's points and all others are
what it says, since nobody else holds them; with `mpc` they are distances of some points. No two of the three computing
parties collude.

Cost
----
Beyond the engine: for keys of κ + b bits about 7κ + 6 (κ + b) + 1.2 (3 (κ + b) + 3) bits per pair of points, all three
together; 1.6 times the bytes of `private_graph`, and some 2.5 times its rounds.

References
----------
[SYL24] lines 5-7 of Algorithm 1. Sharing and proofs: `verified`. Lines numbered here.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from cloister.arrays import I64, U8
from cloister.crypto.agreement import Identity
from cloister.crypto.entropy import Entropy
from cloister.crypto.replicated import Shared, Words, join
from cloister.net.channel import Channel
from cloister.protocols.hamming.shared_codes import computing, ring_of
from cloister.protocols.propagation import private_graph
from cloister.protocols.propagation.private_graph import Params, blocks
from cloister.protocols.sharing.verified import Verified
from cloister.protocols.sharing.verified_cost import VerifiedBill
from cloister.study import Party

__all__ = ["Params", "cost", "ideal", "roles", "server", "site"]

NAME = "verified_graph"


ideal = private_graph.ideal


def roles(params: Params) -> dict[Party, object]:
    return {params.server: server} | dict.fromkeys(params.sites, site)


def cost(params: Params) -> dict[Party, tuple[int, int]]:
    """Messages and payload bytes that each party sends; expected values where a selection is long (`Bill`)."""
    ring, n, L = ring_of(params.bits), sum(params.sizes), params.bits
    bill = VerifiedBill((*params.sites, params.server), computing(params.sites, params.server))
    bill.meet()
    for u, own in zip(params.sites, params.sizes, strict=True):
        if params.engine == "mpc":
            bill.input(u, own * L, ring)
            bill.check_small(u, own * L, 1, ring)
        else:
            for other in params.sizes:
                bill.input(u, own * other, ring)
    for rows in blocks(n):
        count = rows.stop - rows.start
        if params.engine == "mpc":
            bill.product(count, n, L, ring)
        bill.smallest_k(count, n, params.n_neighbors, ring)
        bill.open_to(params.server, count * params.n_neighbors)
    return private_graph.with_engine(params, bill.total())


class SharedCodes:
    """Shared bits of all sites' points at a computing party, and rows of H from them."""

    def __init__(self, trio: Verified, x: Shared) -> None:
        self._trio, self._x = trio, x
        self._difference = trio.constant(np.ones(x.shape, np.int64), x.ring) - x.times(2)  # 1 - 2x
        self._ones = x.sum(axis=1)

    async def rows(self, rows: slice) -> Shared:
        return await self._trio.product(self._x[rows], self._difference, self._ones)  # G2


class SharedDistances:
    """A shared H, from what the sites hold."""

    def __init__(self, h: Shared) -> None:
        self._h = h

    async def rows(self, rows: slice) -> Shared:
        return self._h[rows]


async def share_codes(trio: Verified, params: Params, packed: U8 | None) -> SharedCodes | None:
    """G1 for `mpc`; `packed` is what this member holds, None at the server."""
    ring, parts = ring_of(params.bits), []
    for u, n in zip(params.sites, params.sizes, strict=True):
        mine = np.unpackbits(packed, axis=1).astype(ring.dtype) if packed is not None and u == trio.ch.me else None
        part = await trio.input(u, mine, (n, params.bits), ring)
        if part is not None:
            await trio.check_small(part, u, 1, line="G1")
            parts.append(part)
    return SharedCodes(trio, join(parts, axis=0)) if trio.rank is not None else None


async def _share(
    trio: Verified, params: Params, packed: U8 | None, shares: Mapping[Party, Words]
) -> SharedCodes | SharedDistances | None:
    """G1."""
    if params.engine == "mpc":
        return await share_codes(trio, params, packed)
    h = await private_graph.share_distances(trio, params, shares)
    return None if h is None else SharedDistances(h)


async def _select(params: Params, trio: Verified, shared: SharedCodes | SharedDistances | None) -> I64 | None:
    """G2 to G4; returns the keys at the server."""
    n, k, ring = sum(params.sizes), params.n_neighbors, ring_of(params.bits)
    out = np.empty((n, k), np.int64) if trio.ch.me == params.server else None
    turned = np.uint64(1 << (params.key_ring.bits - 1))  # the highest bit of a key, see `smallest_k`
    for rows in blocks(n):
        count = rows.stop - rows.start
        best = None
        if shared is not None:
            itself = np.zeros((count, n), np.int64)
            itself[np.arange(count), np.arange(rows.start, rows.stop)] = params.bits + 1
            keys = await shared.rows(rows) + trio.constant(itself, ring)
            best = await trio.smallest_k(keys, k)  # G3
        what = f"{k} nearest neighbours of {count} points"
        part = await trio.open_to(best, (count, k), to=params.server, protocol=NAME, line="G4", what=what)
        if out is not None and part is not None:
            out[rows] = (part ^ turned).astype(np.int64)
        trio.ch.step(f"neighbours of {rows.stop} of {n} points", protocol=NAME, line="G3")
    return out


async def _meet(ch: Channel, params: Params, entropy: Entropy, identity: Identity) -> Verified:
    three, members = computing(params.sites, params.server), (*params.sites, params.server)
    return await Verified.meet(ch.sub("three"), three, members, entropy=entropy, identity=identity)


async def site(ch: Channel, params: Params, packed: U8, *, entropy: Entropy, identity: Identity) -> None:
    shares = await private_graph.pair_shares(ch, params, packed, entropy)
    trio = await _meet(ch, params, entropy, identity)
    await _select(params, trio, await _share(trio, params, packed, shares))


async def server(ch: Channel, params: Params, *, entropy: Entropy, identity: Identity) -> I64:
    trio = await _meet(ch, params, entropy, identity)
    return private_graph.check_keys(params, await _select(params, trio, await _share(trio, params, None, {})), NAME)
