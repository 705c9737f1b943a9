"""Private graph: the server learns every point's k nearest neighbours and how near they are, and no other distance.

    G1   mpc          the codes of all sites, shared among three computing parties; H from them (`shared_codes`)
         ot, he       every two sites hold H_jk = T - R (`pair_distances`), and share T and R
    G2   0, 1, 2      keys H_ij · 2^b + j, with L + 1 in place of H_ii, in blocks of rows
    G3   0, 1, 2      the k smallest of every row: shuffled by a permutation nobody knows, then compared in the open
    G4   0, 1 → S     the k keys of every row, ascending

Since the column stands in the low bits of a key, the same sharing that holds H modulo 2^κ holds the key modulo
2^(κ+b): nothing is sent to put them together, and ties go to the smaller index.

Reveals
-------
server : for every point its k nearest neighbours and their distances: n k numbers of the n(n - 1)/2 in H; how many
    points each site has.
site : how many points the others have.
computing party : nothing else; two of the three together learn all codes (`mpc`) or all distances (`ot`, `he`). With
    two sites the server computes as third, and it and a single site learn them.

Assumes
-------
Semi-honest parties; no two of the three computing parties collude; what `replicated` and the engine assume. Lies that
are not noticed: (a), (b), (c), (f) of the site and (a), (b), (c), (f) of the server, where they compute: a liar and the
server choose which distances are opened (`verified_propagation` opens none).

Cost
----
Beyond the engine: for a key of κ bits about 4κ + 1.2 (4κ + 3) bits per pair of points, all three together, and some
(3 + κ/3) · 5 rounds per block of rows. `ot` and `he` share w n_u (n - n_u) bytes more per site.

References
----------
[SYL24] lines 5-7 of Algorithm 1. Selection: `replicated`, `selection`. Lines numbered here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from cloister.arrays import I64, U8
from cloister.errors import DataError, ParameterError, ProtocolAbort
from cloister.models import graph
from cloister.mpc.crypto.agreement import Identity
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.crypto.replicated import Ring, Words, numbered_ring
from cloister.mpc.net.channel import Channel
from cloister.mpc.three_party.replicated import Shared, Trio, join
from cloister.mpc.three_party.replicated_cost import CostModel
from cloister.mpc.three_party.verified import Verified
from cloister.papers.hamming import pair_distances
from cloister.papers.hamming.pair_distances import Engine, check_engine
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

NAME = "private_graph"
BLOCK = 1 << 21  # keys at once; a selection takes about 80 bytes for each


@dataclass(frozen=True, slots=True)
class Params:
    sites: tuple[Party, ...]
    sizes: tuple[int, ...]
    bits: int
    server: Party
    n_neighbors: int
    engine: Engine = "mpc"

    def __post_init__(self) -> None:
        check(self.sites, self.sizes, self.bits, self.server)
        check_engine(self.engine)
        if not 1 <= self.n_neighbors < sum(self.sizes):
            raise ParameterError(
                f"{self.n_neighbors} neighbours of {sum(self.sizes)} points in all; lower n_neighbors="
            )

    @property
    def between(self) -> pair_distances.Params:
        return pair_distances.Params(self.sites, self.sizes, self.bits, self.engine)

    @property
    def key_ring(self) -> Ring:
        return numbered_ring(ring_of(self.bits), sum(self.sizes))


def ideal(params: Params, xs: Mapping[Party, U8]) -> dict[Party, I64 | None]:
    packed = np.concatenate([xs[u] for u in params.sites])
    return dict.fromkeys(params.sites) | {params.server: graph.nearest(packed, params.n_neighbors)}


def roles(params: Params) -> dict[Party, object]:
    return {params.server: server} | dict.fromkeys(params.sites, site)


def cost(params: Params) -> dict[Party, tuple[int, int]]:
    """Messages and payload bytes that each party sends; expected values where a selection is long (`CostModel`)."""
    ring, n = ring_of(params.bits), sum(params.sizes)
    bill = CostModel((*params.sites, params.server), computing(params.sites, params.server))
    bill.meet()
    for u, own in zip(params.sites, params.sizes, strict=True):
        if params.engine == "mpc":
            bill.input(u, own * params.bits, ring)
        else:
            for other in params.sizes:
                bill.input(u, own * other, ring)
    for rows in blocks(n):
        count = rows.stop - rows.start
        bill.smallest_k(count, n, params.n_neighbors, ring)
        bill.open(params.server, count * params.n_neighbors, params.key_ring)
    return with_engine(params, bill.total())


def blocks(n: int) -> Iterator[slice]:
    """Rows of H that are worked on at once."""
    step = max(1, BLOCK // n)
    return (slice(start, min(start + step, n)) for start in range(0, n, step))


def with_engine(params: Params, sent: dict[Party, tuple[int, int]]) -> dict[Party, tuple[int, int]]:
    """The same cost with that of the distances between every two sites, where an engine computes them."""
    between = {} if params.engine == "mpc" else pair_distances.cost(params.between)
    return sent | {u: (sent[u][0] + messages, sent[u][1] + size) for u, (messages, size) in between.items()}


def check_keys(params: Params, keys: I64 | None, protocol: str) -> I64:
    """What was opened to the server, if it is a graph."""
    assert keys is not None
    try:
        graph.check_keys(keys, sum(params.sizes), params.bits)
    except DataError:
        raise ProtocolAbort(protocol, "G4", "malformed", "what was opened is not a graph") from None
    return keys


async def pair_shares(ch: Channel, params: Params, packed: U8, entropy: Entropy) -> dict[Party, Words]:
    """G1 for `ot` and `he`: this site's summands of H, by the site whose points stand in the columns; its own too."""
    check_codes(params.sites, params.sizes, params.bits, ch.me, packed)
    if params.engine == "mpc":
        return {}
    shares = await pair_distances.pair_shares(ch, params.between, packed, entropy=entropy)
    return shares | {ch.me: graph.hamming(packed, packed).astype(ring_of(params.bits).dtype)}


async def share_distances(trio: Trio | Verified, params: Params, shares: Mapping[Party, Words]) -> Shared | None:
    """G1 for `ot` and `he`: a shared H, where every site gives what `pair_shares` found."""
    ring, rows = ring_of(params.bits), []
    for u in params.sites:
        parts = []
        for v in params.sites:
            mine = shares[v] if u == trio.ch.me else None
            parts.append(await trio.input(u, mine, (params.between.size(u), params.between.size(v)), ring))
        rows.append([part for part in parts if part is not None])
    if trio.rank is None:
        return None
    half = join([join(parts, axis=1) for parts in rows], axis=0)
    whole = half + half.map(lambda w: w.T)
    at = offsets(params.sizes)
    for i in range(len(params.sites)):  # the blocks on the diagonal were added to themselves
        cut = slice(at[i], at[i + 1])
        whole.a[cut, cut], whole.b[cut, cut] = half.a[cut, cut], half.b[cut, cut]
    return whole


class SharedDistances:
    """A shared H at a computing party."""

    def __init__(self, trio: Trio, h: Shared) -> None:
        self._trio, self._h = trio, h
        self._one = trio.constant(np.ones((1, 1), np.int64), h.ring)

    def summand(self, rows: slice, columns: slice) -> Words:
        return self._trio.product(self._h[rows, columns], self._one)


async def _share(
    trio: Trio, params: Params, packed: U8 | None, shares: Mapping[Party, Words]
) -> SharedCodes | SharedDistances | None:
    """G1."""
    if params.engine == "mpc":
        return await share_codes(trio, params.sites, params.sizes, params.bits, packed)
    h = await share_distances(trio, params, shares)
    return None if h is None else SharedDistances(trio, h)


async def _select(params: Params, trio: Trio, shared: SharedCodes | SharedDistances | None) -> I64 | None:
    """G2 to G4; returns the keys at the server."""
    n, k, ring = sum(params.sizes), params.n_neighbors, ring_of(params.bits)
    out = np.empty((n, k), np.int64) if trio.ch.me == params.server else None
    for rows in blocks(n):
        count = rows.stop - rows.start
        best = None
        if shared is not None:
            z = shared.summand(rows, slice(0, n))
            if trio.rank == 0:
                z[np.arange(count), np.arange(rows.start, rows.stop)] += ring.dtype.type(params.bits + 1)
            best = await trio.smallest_k(z, ring, k)  # G2, G3
        what = f"{k} nearest neighbours of {count} points"
        part = await trio.open(best, (count, k), params.key_ring, to=params.server, protocol=NAME, line="G4", what=what)
        if out is not None and part is not None:
            out[rows] = part
        trio.ch.step(f"neighbours of {rows.stop} of {n} points", protocol=NAME, line="G3")
    return out


async def _meet(ch: Channel, params: Params, entropy: Entropy, identity: Identity) -> Trio:
    three, members = computing(params.sites, params.server), (*params.sites, params.server)
    return await Trio.meet(ch.sub("trio"), three, members, entropy=entropy, identity=identity)


async def site(ch: Channel, params: Params, packed: U8, *, entropy: Entropy, identity: Identity) -> None:
    shares = await pair_shares(ch, params, packed, entropy)
    trio = await _meet(ch, params, entropy, identity)
    await _select(params, trio, await _share(trio, params, packed, shares))


async def server(ch: Channel, params: Params, *, entropy: Entropy, identity: Identity) -> I64:
    trio = await _meet(ch, params, entropy, identity)
    return check_keys(params, await _select(params, trio, await _share(trio, params, None, {})), NAME)
