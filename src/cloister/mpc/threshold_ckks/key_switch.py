"""Key switch: a result under the collective key becomes readable for one querier, and for nobody else.

    L1  i → i'  pair keys               of `collective_refresh`: ζ_i are made of them, and add up to zero
    L2  q → i   b, seed                 the querier's own public key (b, a), a from the seed
    L3  i → q   h_i = c1·s_i + u_i·b + ε_i + ζ_i,   g_i = u_i·a + e_i      u_i ternary, ε_i floods
        q       c0 + Σ h_i, Σ g_i       which it decrypts with its own secret

Holders bring c1 themselves, the querier c0: both have made the ciphertext from the query (`oblivious_prediction`). A
querier that holds no share of the key, an outsider, adds none of its own.

Reveals
-------
querier : the slots, to the precision that the flooding leaves. Of the shares, only their sum.
holder : nothing.

Assumes
-------
Any one party may lie. c1 is not of the querier's choosing; then whatever it sends as a key, it gets the sum of all
shares behind the floods. A holder that lies shifts the answer by what it likes, and learns nothing.

Cost
----
Per holder: two polynomials to the querier, 32 bytes to each holder after it. Querier: one polynomial to each holder.

References
----------
[MTBH21] Mouchet et al., PETS 2021, protocol 3 (public collective key switch); lines numbered here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cloister.arrays import F64
from cloister.errors import ParameterError, ProtocolAbort
from cloister.mpc.crypto.ckks import scheme as ckks
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.crypto.rns.ring import Residues
from cloister.mpc.net.channel import Channel
from cloister.mpc.net.wire import message
from cloister.mpc.parties import Party
from cloister.mpc.threshold_ckks.collective_key import read
from cloister.mpc.threshold_ckks.collective_refresh import ZeroShares, pair_keys
from cloister.mpc.threshold_ckks.threshold_decrypt import check_flood

NAME = "key_switch"


@dataclass(frozen=True, slots=True)
class Params:  # public
    holders: tuple[Party, ...]
    querier: Party  # one of the holders, or an outsider
    ckks: ckks.Parameters
    primes: int
    scale: float
    noise: float  # standard deviation per coefficient

    def __post_init__(self) -> None:
        if len(set(self.holders)) != len(self.holders) or len(self.holders) < 2:
            raise ParameterError("a key switch needs two holders or more, all different")
        check_flood(self.ckks, self.primes, self.scale, self.flood_bits)

    @property
    def flood_bits(self) -> int:
        return ckks.flood_bits(self.ckks, self.noise)

    @property
    def others(self) -> tuple[Party, ...]:
        return tuple(i for i in self.holders if i != self.querier)


@message("L2")
class OwnKey:  # q → i
    b: bytes
    seed: bytes


@message("L3")
class Share:  # i → q
    h: bytes
    g: bytes


def ideal(params: Params, inputs: Mapping[Party, tuple[F64, ...]]) -> dict[Party, F64 | None]:
    return dict.fromkeys(params.others) | {params.querier: inputs[params.querier][0]}


def roles(params: Params) -> dict[Party, object]:
    asks = querier if params.querier in params.holders else outsider
    return {params.querier: asks} | dict.fromkeys(params.others, holder)


def cost(params: Params) -> dict[Party, tuple[int, int]]:
    one, n, asked = ckks.context(params.ckks).packed(params.primes), len(params.holders), len(params.others)
    sent = {params.querier: (asked, asked * (one + 32))} | dict.fromkeys(params.others, (1, 2 * one))
    for at, i in enumerate(params.holders):
        later = n - 1 - at
        sent[i] = (sent[i][0] + later, sent[i][1] + 32 * later)
    return sent


def switched(
    params: Params, secret: ckks.Secret, c1: Residues, key: ckks.PublicKey, zero: ZeroShares, entropy: Entropy
) -> tuple[Residues, Residues]:
    """h_i and g_i."""
    r, k, prg = ckks.context(params.ckks).ring, params.primes, entropy.prg()
    u = r.forward(r.of_small(prg.ternary(params.ckks.degree), k))
    h = r.add_product(r.flood(prg, params.flood_bits, k), c1, secret.ntt)
    zero.add_to(r.add_product(h, u, key.b))
    return h, r.add_product(r.error(prg, k), u, key.a)


async def querier(
    ch: Channel, params: Params, secret: ckks.Secret, c1: Residues, c0: Residues, *, entropy: Entropy
) -> F64:
    """The part of q, which holds a share of the collective key itself."""
    seed = entropy.bytes(32)
    zero = ZeroShares(params.ckks, ch.me, await pair_keys(ch, params.holders, entropy))  # L1
    own, key = await tell_key(ch, params, seed, entropy)
    m, total = switched(params, secret, c1, key, zero, entropy)
    ckks.context(params.ckks).ring.add(m, c0)
    return await opened(ch, params, own, m, total)


async def outsider(ch: Channel, params: Params, c0: Residues, *, entropy: Entropy) -> F64:
    """The part of a q that holds no share."""
    own, _ = await tell_key(ch, params, entropy.bytes(32), entropy)
    return await opened(ch, params, own, c0.copy(), ckks.context(params.ckks).ring.zeros(params.primes))


async def tell_key(ch: Channel, params: Params, seed: bytes, entropy: Entropy) -> tuple[ckks.Secret, ckks.PublicKey]:
    """L2 at q."""
    c, k = ckks.context(params.ckks), params.primes
    own = ckks.Secret.draw(params.ckks, entropy)
    a = ckks.common(params.ckks, seed, "querier", k)
    b = c.ring.add_product(c.ring.error(entropy.prg(), k), a, own.ntt, sign=-1)
    await ch.scatter(params.others, OwnKey(c.pack(b), seed))  # L2
    return own, ckks.PublicKey(b, a)


async def opened(ch: Channel, params: Params, own: ckks.Secret, m: Residues, total: Residues) -> F64:
    """L3 at q: all shares are added, and what is left is under its own key."""
    c, k = ckks.context(params.ckks), params.primes
    for i, got in (await ch.gather(params.others, Share)).items():  # L3
        c.ring.add(m, read(c, got.h, k, NAME, "L3", i))
        c.ring.add(total, read(c, got.g, k, NAME, "L3", i))
    c.ring.add_product(m, total, own.ntt)
    return c.decode(ch.reveal(m, to=ch.me, line="L3", what="the result of my query", protocol=NAME), params.scale)


async def holder(ch: Channel, params: Params, secret: ckks.Secret, c1: Residues, *, entropy: Entropy) -> None:
    c, q, k = ckks.context(params.ckks), params.querier, params.primes
    zero = ZeroShares(params.ckks, ch.me, await pair_keys(ch, params.holders, entropy))  # L1
    own_key = await ch.recv(q, OwnKey)  # L2
    if len(own_key.seed) != 32:
        raise ProtocolAbort(NAME, "L2", "malformed", f"'{q}' sent no seed of 32 bytes")
    key = ckks.PublicKey(read(c, own_key.b, k, NAME, "L2", q), ckks.common(params.ckks, own_key.seed, "querier", k))
    h, g = switched(params, secret, c1, key, zero, entropy)
    await ch.send(q, Share(c.pack(h), c.pack(g)))  # L3
