"""Collective rotation keys: slots of a ciphertext can be rotated by the agreed numbers of steps.

For every rotation by r slots (the automorphism φ: X → X^(3^r)) and every digit d, with w_d as in
`collective_relin` and a public polynomial a_{r,d} of its own:

    L1  i → S   b_i = -a_{r,d}·s_i + w_d·φ(s_i) + e_i
    L2  S → i   b = Σ b_i               the key is (b, a_{r,d})
        i       `collective_audit` of all b of a rotation

Keys are large: megabytes each.

Reveals
-------
aggregator, holder : the rotation keys, which are public.

Assumes
-------
As `collective_relin`. Every key has its own a: two keys under one a would differ by φ(s) - φ'(s) in the clear.

Cost
----
Per holder, rotation and digit: 1 message up, 1 down, one polynomial over all primes each. One audit per rotation.

References
----------
[MTBH21] Mouchet et al., PETS 2021, section 4.3 (rotation keys); lines numbered here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from cloister.arrays import U64
from cloister.mpc.crypto.ckks import scheme as ckks
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.net.channel import Channel
from cloister.mpc.net.wire import message
from cloister.mpc.parties import Party
from cloister.mpc.threshold_ckks import collective_audit
from cloister.mpc.threshold_ckks.collective_audit import AuditLog, Collective
from cloister.mpc.threshold_ckks.collective_key import added, read

NAME = "collective_rotation"


@dataclass(frozen=True, slots=True)
class Params(Collective):
    steps: tuple[int, ...]


@message("L1")
class RotationShare:  # i → S, for one rotation and digit
    b: bytes


@message("L2")
class Rotation:  # S → i
    b: bytes


def ideal(params: Params, secrets: Mapping[Party, ckks.Secret]) -> dict[Party, U64]:
    """The coefficients of the sum of the secrets."""
    total = np.sum([s.coefficients for s in secrets.values()], axis=0)
    return dict.fromkeys((*params.holders, params.aggregator), total)


def roles(params: Params) -> dict[Party, object]:
    return {params.aggregator: aggregator} | dict.fromkeys(params.holders, holder)


def cost(params: Params) -> dict[Party, tuple[int, int]]:
    c = ckks.context(params.ckks)
    digits, one, n = params.ckks.digits, c.packed(len(c.primes)), len(params.holders)
    each = digits * len(params.steps)
    sent = {params.aggregator: (n * each, n * each * one)} | dict.fromkeys(params.holders, (each, each * one))
    return added(sent, *[collective_audit.cost(params.audit, len(c.primes))] * len(params.steps))


def label(steps: int, d: int) -> str:
    return f"rotation/{steps}/{d}"


async def holder(ch: Channel, params: Params, secret: ckks.Secret, *, entropy: Entropy) -> dict[int, ckks.SwitchingKey]:
    c, S = ckks.context(params.ckks), params.aggregator
    r, K, prg = c.ring, len(c.primes), entropy.prg()
    keys = {}
    for steps in params.steps:
        turned = r.forward(r.of_small(r.rotate_coefficients(secret.coefficients, c.galois(steps)), K))
        commons, bs, book = [], [], AuditLog()
        for d in range(params.ckks.digits):
            a = ckks.common(params.ckks, ch.run_id, label(steps, d), K)
            b = r.add_product(r.error(prg, K), a, secret.ntt, sign=-1)
            c.bases.known_share(b, turned, d)
            await ch.send(S, RotationShare(c.pack(b)))  # L1
            book.sent(b)
            commons.append(a)
        for _ in commons:
            packed = (await ch.recv(S, Rotation)).b  # L2
            bs.append(read(c, packed, K, NAME, "L2", S))
            book.heard(packed)
            book.total(bs[-1])
        await collective_audit.holder(ch.sub(f"audit/{steps}"), params.audit, book, entropy=entropy)
        keys[steps] = ckks.SwitchingKey(np.stack(bs), np.stack(commons), c.galois(steps))
    return keys


async def aggregator(ch: Channel, params: Params) -> dict[int, ckks.SwitchingKey]:
    c = ckks.context(params.ckks)
    r, K = c.ring, len(c.primes)
    keys = {}
    for steps in params.steps:
        bs, commons = [], []
        for d in range(params.ckks.digits):
            b = r.zeros(K)
            for i, share in (await ch.gather(params.holders, RotationShare)).items():  # L1
                r.add(b, read(c, share.b, K, NAME, "L1", i))
            await ch.scatter(params.holders, Rotation(c.pack(b)))  # L2
            bs.append(b)
            commons.append(ckks.common(params.ckks, ch.run_id, label(steps, d), K))
        keys[steps] = ckks.SwitchingKey(np.stack(bs), np.stack(commons), c.galois(steps))
    return keys
