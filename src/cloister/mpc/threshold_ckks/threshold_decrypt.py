"""Threshold decryption: all holders together open one ciphertext that each of them knows to be the circuit's.

    L1  i → S   h_i = c1·s_i + ε_i      ε_i as wide as hides the noise of the ciphertext to 2^-40 (`chain.flood_bits`)
    L2  S → i   m = c0 + Σ h_i
        i       `collective_audit`: Σ h_i = m - c0, and everyone was told the same m

The holders bring c1 themselves: the aggregator has no say in what is opened. The auditor, their first, brings c0, too.

Reveals
-------
aggregator, holder : the slots, to the precision that the flooding leaves. The noise of the ciphertext, which depends on
    all secrets, stays hidden behind every single holder's ε_i, over 64 openings under one key.

Assumes
-------
Any one party may lie. An aggregator that tells something else than m is caught at the audit. A holder that lies shifts
what is opened by what it likes; it learns no more by it. A holder refuses altogether without its own consent.

Cost
----
Per holder: one message up, one down, one polynomial each; one audit.

References
----------
[MTBH21] Mouchet et al., PETS 2021, section 4.4; flooding: [LM21] Li, Micciancio, Eurocrypt 2021.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from cloister.arrays import F64
from cloister.errors import ParameterError, RefusedError
from cloister.mpc.crypto.ckks import scheme as ckks
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.crypto.rns.ring import Residues
from cloister.mpc.net.channel import Channel
from cloister.mpc.net.wire import message
from cloister.mpc.parties import Party
from cloister.mpc.threshold_ckks import collective_audit
from cloister.mpc.threshold_ckks.collective_audit import AuditLog, Collective
from cloister.mpc.threshold_ckks.collective_key import added, read

NAME = "threshold_decrypt"


@dataclass(frozen=True, slots=True)
class Params(Collective):  # public
    what: str  # in words, for the receipt
    primes: int  # of the ciphertext
    scale: float
    noise: float  # standard deviation per coefficient, by the circuit
    weaker: int = 0  # bits of flooding that are missing; more than 0 only where `published` says so

    def __post_init__(self) -> None:
        Collective.__post_init__(self)
        check_flood(self.ckks, self.primes, self.scale, self.flood_bits)

    @property
    def flood_bits(self) -> int:
        return ckks.flood_bits(self.ckks, self.noise) - self.weaker


def check_flood(params: ckks.Parameters, primes: int, scale: float, flood_bits: int) -> None:
    """Raise where flooding would not fit, or would drown the message."""
    room = sum(params.bits[:primes]) - 8
    if flood_bits + 8 > room or math.ldexp(1.0, flood_bits) > scale:
        raise ParameterError(
            f"opening refused: noise of {flood_bits} bits has to hide the ciphertext's own, and the message has scale"
            f" 2^{math.log2(scale):.0f} in a modulus of {room} bits; use a larger scale"
        )


@message("L1")
class Share:  # i → S
    h: bytes


@message("L2")
class Opened:  # S → i
    m: bytes


def ideal(params: Params, inputs: Mapping[Party, tuple[F64, ...]]) -> dict[Party, F64]:
    """The slots; the test's aggregator inputs start with the plain slots."""
    return dict.fromkeys((params.aggregator, *params.holders), inputs[params.aggregator][0])


def roles(params: Params) -> dict[Party, object]:
    return {params.aggregator: aggregator} | dict.fromkeys(params.holders, holder)


def cost(params: Params) -> dict[Party, tuple[int, int]]:
    one, n = ckks.context(params.ckks).packed(params.primes), len(params.holders)
    sent = {params.aggregator: (n, n * one)} | dict.fromkeys(params.holders, (1, one))
    return added(sent, collective_audit.cost(params.audit, params.primes))


def share(params: Params, secret: ckks.Secret, c1: Residues, entropy: Entropy) -> Residues:
    """L1: c1·s_i and a flood."""
    r = ckks.context(params.ckks).ring
    return r.add_product(r.flood(entropy.prg(), params.flood_bits, params.primes), c1, secret.ntt)


async def holder(
    ch: Channel,
    params: Params,
    secret: ckks.Secret,
    c1: Residues,
    c0: Residues | None = None,
    *,
    entropy: Entropy,
    consent: frozenset[str],
    needed: str = "open-model",
) -> F64:
    """Open a ciphertext whose second polynomial is c1; the auditor brings the first one, too."""
    if needed not in consent:
        raise RefusedError(f"this site did not consent to opening {params.what}; nothing was decrypted")
    c, S, book = ckks.context(params.ckks), params.aggregator, AuditLog()
    h = share(params, secret, c1, entropy)
    await ch.send(S, Share(c.pack(h)))  # L1
    opened = (await ch.recv(S, Opened)).m  # L2
    m = read(c, opened, params.primes, NAME, "L2", S)
    book.sent(h)
    book.heard(opened)
    if c0 is not None:
        book.total(c.ring.subtract(m.copy(), c0))
    await collective_audit.holder(ch.sub("audit"), params.audit, book, entropy=entropy)
    return c.decode(m, params.scale)


async def aggregator(ch: Channel, params: Params, ct: ckks.Cipher) -> F64:
    c = ckks.context(params.ckks)
    raw, scale = c.raw(c.drop(ct, params.primes))
    if abs(scale / params.scale - 1) > 1e-9:
        raise ParameterError(f"decryption refused: a ciphertext at scale {scale:g}, agreed was {params.scale:g}")
    m = raw[0]
    for i, got in (await ch.gather(params.holders, Share)).items():  # L1
        c.ring.add(m, read(c, got.h, params.primes, NAME, "L1", i))
    m = ch.reveal(m, to=(ch.me, *params.holders), line="L2", what=params.what, protocol=NAME)
    await ch.scatter(params.holders, Opened(c.pack(m)))  # L2
    return c.decode(m, params.scale)
