"""Threshold decryption: all holders together open one ciphertext of the agreed circuit.

    L1  S → i   c1
    L2  i → S   h_i = c1·s_i + ε_i      ε_i uniform in ±2^flood, flood ≥ 40 bits above the noise of the ciphertext
    L3  S → v   m = c0 + Σ h_i          for every party v that may read it

Reveals
-------
everyone in `to` : the slots, to the precision that the flooding leaves. The noise of the ciphertext, which depends on
    all secrets, stays hidden behind every single holder's ε_i.
aggregator : the same.
holder : nothing, unless it is in `to`.

Assumes
-------
Semi-honest aggregator; a holder refuses ciphertexts that it did not admit to its ledger as the circuit's own, answers
once for each, and refuses altogether without its own consent.

Cost
----
Per holder: one message up, one polynomial; one down, and one more if it may read.

References
----------
[MTBH21] Mouchet et al., PETS 2021, section 4.4; flooding: [LM21] Li, Micciancio, Eurocrypt 2021.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from cloister.arrays import F64
from cloister.crypto.ckks import scheme as ckks
from cloister.crypto.ckks.scheme import FLOOD_BITS
from cloister.crypto.entropy import Entropy
from cloister.errors import ParameterError, RefusedError
from cloister.net.channel import Channel
from cloister.net.wire import message
from cloister.protocols.ckks.collective_key import check_holders, read
from cloister.protocols.ckks.collective_refresh import Ledger
from cloister.study import Party

NAME = "threshold_decrypt"


@dataclass(frozen=True, slots=True)
class Params:  # public
    holders: tuple[Party, ...]
    aggregator: Party
    ckks: ckks.Parameters
    what: str  # in words, for the receipt
    primes: int  # of the ciphertext
    scale: float
    noise_bits: int  # |noise| < 2^noise_bits, by the circuit
    to: tuple[Party, ...]  # holders who may read; the aggregator reads in any case
    margin: int = FLOOD_BITS  # bits of flooding above the noise; less only where `published` says so

    def __post_init__(self) -> None:
        check_holders(self.holders, self.aggregator)
        check_flood(self.ckks, self.primes, self.scale, self.flood_bits)

    @property
    def flood_bits(self) -> int:
        return self.noise_bits + self.margin


def check_flood(params: ckks.Parameters, primes: int, scale: float, flood_bits: int) -> None:
    """Raise where flooding would not fit, or would drown the message."""
    room = sum(params.bits[:primes]) - 8
    if flood_bits + 8 > room or math.ldexp(1.0, flood_bits) > scale:
        raise ParameterError(
            f"opening refused: noise of {flood_bits} bits has to hide the ciphertext's own, and the message has scale"
            f" 2^{math.log2(scale):.0f} in a modulus of {room} bits; use a larger scale"
        )


@message("L1")
class Request:  # S → i
    c1: bytes


@message("L2")
class Share:  # i → S
    h: bytes


@message("L3")
class Opened:  # S → v
    m: bytes


def ideal(params: Params, inputs: Mapping[Party, tuple[F64, ...]]) -> dict[Party, F64 | None]:
    """The slots, to those who may read; the test's aggregator inputs start with the plain slots."""
    plain = inputs[params.aggregator][0]
    return {params.aggregator: plain} | {i: plain if i in params.to else None for i in params.holders}


def roles(params: Params) -> dict[Party, object]:
    return {params.aggregator: aggregator} | dict.fromkeys(params.holders, holder)


def cost(params: Params) -> dict[Party, tuple[int, int]]:
    one, n = ckks.context(params.ckks).packed(params.primes), len(params.holders)
    down = (n + len(params.to), (n + len(params.to)) * one)
    return {params.aggregator: down} | dict.fromkeys(params.holders, (1, one))


def share(params: Params, secret: ckks.Secret, c1: bytes, entropy: Entropy) -> bytes:
    """L2: c1·s_i and a flood."""
    c = ckks.context(params.ckks)
    h = c.ring.flood(entropy.prg(), params.flood_bits, params.primes)
    return c.pack(c.ring.add_product(h, read(c, c1, params.primes, NAME, "L1", params.aggregator), secret.ntt))


async def holder(
    ch: Channel,
    params: Params,
    secret: ckks.Secret,
    ledger: Ledger,
    *,
    entropy: Entropy,
    consent: frozenset[str],
    needed: str = "open-model",
) -> F64 | None:
    if needed not in consent:
        raise RefusedError(f"this site did not consent to opening {params.what}; nothing was decrypted")
    c = ckks.context(params.ckks)
    request = await ch.recv(params.aggregator, Request)  # L1
    ledger.check_known(request.c1, NAME, "L1")
    ledger.spend(request.c1, NAME, "L1")
    await ch.send(params.aggregator, Share(share(params, secret, request.c1, entropy)))  # L2
    if ch.me not in params.to:
        return None
    opened = await ch.recv(params.aggregator, Opened)  # L3
    return c.decode(read(c, opened.m, params.primes, NAME, "L3", params.aggregator), params.scale)


async def aggregator(ch: Channel, params: Params, ct: ckks.Cipher) -> F64:
    c = ckks.context(params.ckks)
    raw, scale = c.raw(c.drop(ct, params.primes))
    if abs(scale / params.scale - 1) > 1e-9:
        raise ParameterError(f"decryption refused: a ciphertext at scale {scale:g}, agreed was {params.scale:g}")
    await ch.scatter(params.holders, Request(c.pack(raw[1])))  # L1
    m = raw[0]
    for i, got in (await ch.gather(params.holders, Share)).items():  # L2
        c.ring.add(m, read(c, got.h, params.primes, NAME, "L2", i))
    m = ch.reveal(m, to=(ch.me, *params.to), line="L3", what=params.what, protocol=NAME)
    await ch.scatter(params.to, Opened(c.pack(m)))  # L3
    return c.decode(m, params.scale)
