"""Pair distances: every two sites hold shares of the distances between their points, by transfer or encryption.

    D1   j ↔ k   for all j < k, one after the other: `hamming_ot` or `hamming_he`; H_jk = T - R mod 2^κ, T at one of
                 them, R at the other

Reveals
-------
site : a share of each distance, uniform by itself; how many points the others have.
who carries the frames : nothing.

Assumes
-------
Semi-honest sites; what the engine assumes.

Cost
----
That of the engine, for every pair of sites.

References
----------
[SYL24] section 3.2, SecureHamming. Lines numbered here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from cloister.arrays import U8
from cloister.errors import ParameterError
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.crypto.replicated import Words
from cloister.mpc.net.channel import Channel
from cloister.papers.hamming import hamming_he, hamming_ot
from cloister.study import Party
from cloister.workflows.propagate_labels.shared_codes import ring_of

NAME = "pair_distances"
Engine = Literal["mpc", "ot", "he"]
ENGINES: tuple[Engine, ...] = get_args(Engine)


@dataclass(frozen=True, slots=True)
class Params:
    sites: tuple[Party, ...]
    sizes: tuple[int, ...]
    bits: int
    engine: Engine

    def __post_init__(self) -> None:
        check_engine(self.engine)

    def size(self, u: Party) -> int:
        return self.sizes[self.sites.index(u)]


def check_engine(engine: str) -> None:
    if engine not in ENGINES:
        raise ParameterError(f"'hamming' must be one of {', '.join(ENGINES)}, found {engine!r}")


def pairs(sites: tuple[Party, ...]) -> list[tuple[Party, Party]]:
    return [(u, v) for i, u in enumerate(sites) for v in sites[i + 1 :]]


def cost(params: Params) -> dict[Party, tuple[int, int]]:
    """Messages and payload bytes that each site sends, to all others together."""
    total = dict.fromkeys(params.sites, (0, 0))
    for u, v in pairs(params.sites):
        sizes = (params.size(u), params.size(v))
        if params.engine == "ot":
            sent = hamming_ot.cost(hamming_ot.Params(u, v, *sizes, params.bits))
        else:
            sent = hamming_he.cost(hamming_he.Params(u, v, *sizes, params.bits))
        total |= {p: (total[p][0] + n, total[p][1] + size) for p, (n, size) in sent.items()}
    return total


async def pair_shares(ch: Channel, params: Params, packed: U8, *, entropy: Entropy) -> dict[Party, Words]:
    """D1: per other site, this one's summand (n_me, n_v) of the distances modulo 2^κ."""
    ring = ring_of(params.bits)
    shares: dict[Party, Words] = {}
    for u, v in pairs(params.sites):  # the same order everywhere, so nobody waits in a circle
        if ch.me not in (u, v):
            continue
        inner, peer = ch.sub(f"{u}+{v}"), v if ch.me == u else u
        sizes = (params.size(u), params.size(v))
        if params.engine == "ot":
            ot = hamming_ot.Params(u, v, *sizes, params.bits)
            shares[peer] = await hamming_ot.share(inner, ot, packed, entropy=entropy)
        else:
            he = hamming_he.Params(u, v, *sizes, params.bits)
            shares[peer] = await hamming_he.share(inner, he, packed, entropy=entropy)
        if shares[peer].shape != (params.size(ch.me), params.size(peer)) or shares[peer].dtype != ring.dtype:
            raise ParameterError("an engine returned shares of another shape than was agreed on")
    return shares
