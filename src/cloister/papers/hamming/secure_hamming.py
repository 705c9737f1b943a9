"""Secure Hamming: the server learns the distances between all sites' codes (H), by one of three engines.

    H1   engine `mpc`     `hamming_mpc` between three computing parties
    H2   engine `ot`, `he`   every two sites hold H_jk = T - R mod 2^κ (`pair_distances`)
    H3   u → S            T and R of every pair, and u's own distances
    H4   S                H = T - R mod 2^κ

All three are exact and return the same matrix. `mpc` sends bytes in proportion to n L, `he` to n L with a large factor,
`ot` to n² L; `mpc` needs three parties that do not collude in pairs, the others protect any two sites from each
other and from the server.

Reveals
-------
server : H, and how many points each site has; see `label_propagation` for what follows from H. Nothing else, unless it
    computes as third party of `mpc`.
site : how many points the others have. With `ot` and `he`, together with the server: H, and no more of the others.
    With `mpc`: see `hamming_mpc`.

Assumes
-------
Semi-honest parties. See the engines for what each rests on. Lies that are not noticed: (a), (b), (c), (f) of the site
and (a), (b), (c), (f) of the server: other distances, which are a site's word of its own points, too.

Cost
----
See the engines; H3 adds 2 bytes (3 above L = 2^14) per pair of points, from each of the two.

References
----------
[SYL24] section 3.2, SecureHamming, corrected as in the engines. Lines numbered here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from cloister.arrays import I32, U8
from cloister.errors import ProtocolAbort
from cloister.models import graph
from cloister.mpc.crypto.agreement import Identity
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.crypto.replicated import Ring, Words
from cloister.mpc.net.channel import Channel
from cloister.mpc.net.wire import message
from cloister.papers.hamming import hamming_mpc, pair_distances
from cloister.papers.hamming.hamming_mpc import own_bytes, own_distances
from cloister.papers.hamming.pair_distances import Engine, check_engine
from cloister.study import Party
from cloister.workflows.propagate_labels.shared_codes import check, check_codes, offsets, ring_of

NAME = "secure_hamming"


@dataclass(frozen=True, slots=True)
class Params:
    sites: tuple[Party, ...]
    sizes: tuple[int, ...]
    bits: int
    server: Party
    engine: Engine = "mpc"

    def __post_init__(self) -> None:
        check(self.sites, self.sizes, self.bits, self.server)
        check_engine(self.engine)

    def size(self, u: Party) -> int:
        return self.sizes[self.sites.index(u)]

    @property
    def between(self) -> pair_distances.Params:
        return pair_distances.Params(self.sites, self.sizes, self.bits, self.engine)

    @property
    def mpc(self) -> hamming_mpc.Params:
        return hamming_mpc.Params(self.sites, self.sizes, self.bits, self.server)


@message("H3")
class Share:  # u → S
    data: U8  # ring words as bytes, (n_u, n_v)


@message("H3")
class OwnDistances:  # u → S
    data: U8


def ideal(params: Params, xs: Mapping[Party, U8]) -> dict[Party, I32 | None]:
    packed = np.concatenate([xs[u] for u in params.sites])
    return dict.fromkeys(params.sites) | {params.server: graph.hamming(packed, packed)}


def roles(params: Params) -> dict[Party, object]:
    return {params.server: server} | dict.fromkeys(params.sites, site)


def cost(params: Params) -> dict[Party, tuple[int, int]]:
    """Messages and payload bytes that each party sends."""
    if params.engine == "mpc":
        return hamming_mpc.cost(params.mpc)
    w, n = ring_of(params.bits).size, sum(params.sizes)
    between = pair_distances.cost(params.between).items()
    own = {u: (sent + len(params.sites), size + w * params.size(u) * n) for u, (sent, size) in between}
    return own | {params.server: (0, 0)}


async def site(ch: Channel, params: Params, packed: U8, *, entropy: Entropy, identity: Identity) -> None:
    check_codes(params.sites, params.sizes, params.bits, ch.me, packed)
    if params.engine == "mpc":
        return await hamming_mpc.site(ch.sub("mpc"), params.mpc, packed, entropy=entropy, identity=identity)  # H1
    ring = ring_of(params.bits)
    shares = await pair_distances.pair_shares(ch, params.between, packed, entropy=entropy)  # H2
    for v in params.sites:
        if v != ch.me:
            await ch.send(params.server, Share(ring.to_bytes(shares[v])))  # H3
    await ch.send(params.server, OwnDistances(own_bytes(ring, packed)))
    return None


async def server(ch: Channel, params: Params, *, entropy: Entropy, identity: Identity) -> I32:
    if params.engine == "mpc":
        return await hamming_mpc.server(ch.sub("mpc"), params.mpc, entropy=entropy, identity=identity)  # H1
    ring, at, n = ring_of(params.bits), offsets(params.sizes), sum(params.sizes)
    sums: Words = np.zeros((n, n), ring.dtype)
    cuts = {u: slice(at[i], at[i + 1]) for i, u in enumerate(params.sites)}
    H = np.zeros((n, n), np.int32)
    for u in params.sites:
        for v in params.sites:
            if v != u:
                shape = (params.size(u), params.size(v))
                data = (await ch.recv(u, Share, data=(shape[0] * shape[1] * ring.size,))).data  # H3
                words = ring.from_bytes(data, shape)
                sums[cuts[u], cuts[v]] += words
                sums[cuts[v], cuts[u]] += words.T
        own = (await ch.recv(u, OwnDistances, data=(params.size(u) ** 2 * ring.size,))).data
        H[cuts[u], cuts[u]] = own_distances(ring, own, params.size(u), params.bits, "H3", NAME)
    distances = ch.reveal(_decoded(ring, sums), to=ch.me, line="H4", what=f"distances of {n} points", protocol=NAME)
    for u, v in pair_distances.pairs(params.sites):
        block = distances[cuts[u], cuts[v]]
        if (block < 0).any() or (block > params.bits).any():
            raise ProtocolAbort(NAME, "H4", "malformed", f"the shares of '{u}' and '{v}' give no distances")
        H[cuts[u], cuts[v]] = block
        H[cuts[v], cuts[u]] = block.T
    return H


def _decoded(ring: Ring, words: Words) -> I32:
    return ring.decode(words).astype(np.int32)
