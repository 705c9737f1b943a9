"""Key switch: a result under the collective key becomes readable for one querier, and for nobody else.

    L1  q → S   b, seed, σ              the querier's own public key (b, a), a from the seed; σ signs (run, b, seed)
    L2  S → i   b, seed, σ, c1          holders check σ, and that the circuit made the ciphertext
    L3  i → S   h_i = c1·s_i + u_i·b + ε_i,   g_i = u_i·a + e_i      u_i ternary, ε_i uniform in ±2^flood
    L4  S → q   (c0 + Σ h_i, Σ g_i)     which the querier decrypts with its own secret

Reveals
-------
querier : the slots, to the precision that the flooding leaves.
aggregator, holder : nothing.

Assumes
-------
The querier's Ed25519 key stands in the study. Semi-honest aggregator; each holder admits a ciphertext to its ledger
only after it has made it itself from the query (`oblivious_prediction`), and answers once for each.

Cost
----
Per holder: one message each way, two polynomials down and up. Querier: one polynomial up, two down.

References
----------
[MTBH21] Mouchet et al., PETS 2021, protocol 3 (public collective key switch); lines numbered here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from cloister.arrays import F64
from cloister.crypto.agreement import Identity
from cloister.crypto.ckks import scheme as ckks
from cloister.crypto.entropy import Entropy
from cloister.errors import ParameterError
from cloister.net import wire
from cloister.net.channel import Channel
from cloister.net.wire import message
from cloister.protocols.ckks.collective_key import check_holders, read
from cloister.protocols.ckks.collective_refresh import Ledger
from cloister.protocols.ckks.threshold_decrypt import check_flood
from cloister.protocols.sums.signed import check_signed
from cloister.study import Party

NAME = "key_switch"


@dataclass(frozen=True, slots=True)
class Params:  # public
    holders: tuple[Party, ...]
    aggregator: Party
    querier: Party
    ckks: ckks.Parameters
    primes: int
    scale: float
    noise_bits: int

    def __post_init__(self) -> None:
        check_holders(self.holders, self.aggregator)
        check_flood(self.ckks, self.primes, self.scale, self.flood_bits)
        if self.querier == self.aggregator:
            raise ParameterError("the querier of a key switch cannot be the aggregator")

    @property
    def flood_bits(self) -> int:
        return self.noise_bits + ckks.FLOOD_BITS


@message("L1")
class OwnKey:  # q → S
    b: bytes
    seed: bytes
    signature: bytes


@message("L2")
class Request:  # S → i
    key: OwnKey
    c1: bytes


@message("L3")
class Share:  # i → S
    h: bytes
    g: bytes


@message("L4")
class Switched:  # S → q
    c0: bytes
    c1: bytes


def ideal(params: Params, inputs: Mapping[Party, tuple[F64, ...]]) -> dict[Party, F64 | None]:
    return dict.fromkeys((*params.holders, params.aggregator)) | {params.querier: inputs[params.aggregator][0]}


def roles(params: Params) -> dict[Party, object]:
    found: dict[Party, object] = {params.aggregator: aggregator} | dict.fromkeys(params.holders, holder)
    return found | {params.querier: querying_holder if params.querier in params.holders else querier}


def cost(params: Params) -> dict[Party, tuple[int, int]]:
    one, n = ckks.context(params.ckks).packed(params.primes), len(params.holders)
    sent = {params.aggregator: (n + 1, (2 * n + 2) * one + 96 * n)} | dict.fromkeys(params.holders, (1, 2 * one))
    messages, payload = sent.get(params.querier, (0, 0))
    return sent | {params.querier: (messages + 1, payload + one + 96)}


def signed(run_id: bytes, b: bytes, seed: bytes) -> bytes:
    return wire.canonical([run_id, b, seed])


async def announce(ch: Channel, params: Params, entropy: Entropy, identity: Identity) -> ckks.Secret:
    """L1: a key of my own, for this one result."""
    c = ckks.context(params.ckks)
    k, seed = params.primes, entropy.bytes(32)
    mine = ckks.Secret.draw(params.ckks, entropy)
    a = ckks.common(params.ckks, seed, "querier", k)
    b = c.pack(c.ring.add_product(c.ring.error(entropy.prg(), k), a, mine.ntt, sign=-1))
    await ch.send(params.aggregator, OwnKey(b, seed, identity.sign(f"{NAME}/key", signed(ch.run_id, b, seed))))  # L1
    return mine


async def collect(ch: Channel, params: Params, mine: ckks.Secret) -> F64:
    """L4: decrypt what came back."""
    c, k, S = ckks.context(params.ckks), params.primes, params.aggregator
    got = await ch.recv(S, Switched)  # L4
    m = c.ring.add_product(read(c, got.c0, k, NAME, "L4", S), read(c, got.c1, k, NAME, "L4", S), mine.ntt)
    return c.decode(ch.reveal(m, to=ch.me, line="L4", what="the result of my query", protocol=NAME), params.scale)


async def querier(ch: Channel, params: Params, *, entropy: Entropy, identity: Identity) -> F64:
    return await collect(ch, params, await announce(ch, params, entropy, identity))


async def querying_holder(
    ch: Channel, params: Params, secret: ckks.Secret, ledger: Ledger, *, entropy: Entropy, identity: Identity
) -> F64:
    """A querier that holds a share of the collective key itself."""
    mine = await announce(ch, params, entropy, identity)
    await holder(ch, params, secret, ledger, entropy=entropy)
    return await collect(ch, params, mine)


async def holder(ch: Channel, params: Params, secret: ckks.Secret, ledger: Ledger, *, entropy: Entropy) -> None:
    c, S, k = ckks.context(params.ckks), params.aggregator, params.primes
    request = await ch.recv(S, Request)  # L2
    key = request.key
    data = signed(ch.run_id, key.b, key.seed)
    check_signed(ch, params.querier, f"{NAME}/key", data, key.signature, protocol=NAME, line="L2")
    ledger.check_known(request.c1, NAME, "L2")
    ledger.spend(request.c1, NAME, "L2")
    prg, r = entropy.prg(), c.ring
    u = r.forward(r.of_small(prg.ternary(params.ckks.degree), k))
    h = r.add_product(r.flood(prg, params.flood_bits, k), read(c, request.c1, k, NAME, "L2", S), secret.ntt)
    r.add_product(h, u, read(c, key.b, k, NAME, "L2", S))
    g = r.add_product(r.error(prg, k), u, ckks.common(params.ckks, key.seed, "querier", k))
    await ch.send(S, Share(c.pack(h), c.pack(g)))  # L3


async def aggregator(ch: Channel, params: Params, ct: ckks.Cipher) -> None:
    c, k = ckks.context(params.ckks), params.primes
    raw, scale = c.raw(c.drop(ct, k))
    if abs(scale / params.scale - 1) > 1e-9:
        raise ParameterError(f"key switch refused: a ciphertext at scale {scale:g}, agreed was {params.scale:g}")
    key = await ch.recv(params.querier, OwnKey)  # L1
    await ch.scatter(params.holders, Request(key, c.pack(raw[1])))  # L2
    c0, c1 = raw[0], np.zeros_like(raw[1])
    for i, got in (await ch.gather(params.holders, Share)).items():  # L3
        c.ring.add(c0, read(c, got.h, k, NAME, "L3", i))
        c.ring.add(c1, read(c, got.g, k, NAME, "L3", i))
    await ch.send(params.querier, Switched(c.pack(c0), c.pack(c1)))  # L4
