"""Collective relinearisation key: products of ciphertexts become ciphertexts of two polynomials again.

For every digit d, with w_d the number that is P, the product of the special primes, modulo the primes of the digit and
0 modulo all others (`lattice.bases`), a_d public, u_i ternary and fresh, all e fresh and small:

    L1  i → S   h_i = -u_i·a_d + w_d·s_i + e,   g_i = s_i·a_d + e'
    L2  S → i   h = Σ h_i,   g = Σ g_i
        i       `collective_audit` of all h and g: h of another making would have s_i answer for it at L3
    L3  i → S   f_i = s_i·h + (u_i - s_i)·g + e''
    L4  S → i   f = Σ f_i               the key is (f, g): f + g·s ≈ w_d·s², s = Σ s_i
        i       `collective_audit` of all f

Reveals
-------
aggregator, holder : the relinearisation key, which is public.

Assumes
-------
As `collective_key`; and that an encryption of w_d·s² under s itself is safe (circular security), as all of CKKS does.

Cost
----
Per holder and digit: 2 messages up, 2 down; three polynomials over all primes up, three down. Two audits.

References
----------
[MTBH21] Mouchet et al., PETS 2021, protocol 2 (RelinKeyGen); lines numbered here.
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

NAME = "collective_relin"


@dataclass(frozen=True, slots=True)
class Params(Collective):
    pass


@message("L1")
class First:  # i → S, for one digit
    h: bytes
    g: bytes


@message("L2")
class Firsts:  # S → i
    h: bytes
    g: bytes


@message("L3")
class Second:  # i → S
    f: bytes


@message("L4")
class Seconds:  # S → i
    f: bytes


def ideal(params: Params, secrets: Mapping[Party, ckks.Secret]) -> dict[Party, U64]:
    """The sum of the secrets, in NTT form over all primes."""
    c = ckks.context(params.ckks)
    total = c.ring.zeros(len(c.primes))
    for s in secrets.values():
        c.ring.add(total, s.ntt)
    return dict.fromkeys((*params.holders, params.aggregator), total)


def roles(params: Params) -> dict[Party, object]:
    return {params.aggregator: aggregator} | dict.fromkeys(params.holders, holder)


def cost(params: Params) -> dict[Party, tuple[int, int]]:
    c = ckks.context(params.ckks)
    digits, one, n = params.ckks.digits, c.packed(len(c.primes)), len(params.holders)
    each = (2 * digits, 3 * digits * one)
    sent = {params.aggregator: (n * each[0], n * each[1])} | dict.fromkeys(params.holders, each)
    audit = collective_audit.cost(params.audit, len(c.primes))
    return added(sent, audit, audit)


async def holder(ch: Channel, params: Params, secret: ckks.Secret, *, entropy: Entropy) -> ckks.SwitchingKey:
    c, S = ckks.context(params.ckks), params.aggregator
    r, K, s, prg, book = c.ring, len(c.primes), secret.ntt, entropy.prg(), AuditLog()
    u = r.forward(r.of_small(prg.ternary(params.ckks.degree), K))
    for d in range(params.ckks.digits):
        a = ckks.common(params.ckks, ch.run_id, f"relin/{d}", K)
        h = r.add_product(r.error(prg, K), u, a, sign=-1)
        c.bases.known_share(h, s, d)
        g = r.add_product(r.error(prg, K), s, a)
        await ch.send(S, First(c.pack(h), c.pack(g)))  # L1
        book.sent(h, g)
    sums = []
    for _ in range(params.ckks.digits):
        firsts = await ch.recv(S, Firsts)  # L2
        sums.append([read(c, x, K, NAME, "L2", S) for x in (firsts.h, firsts.g)])
        book.heard(firsts.h, firsts.g)
        book.total(*sums[-1])
    await collective_audit.holder(ch.sub("firsts"), params.audit, book, entropy=entropy)
    difference = r.subtract(u, s)
    for h, g in sums:
        f = r.add_product(r.add(r.error(prg, K), r.error(prg, K)), s, h)
        r.add_product(f, difference, g)
        await ch.send(S, Second(c.pack(f)))  # L3
        book.sent(f)
    fs = []
    for _ in range(params.ckks.digits):
        packed = (await ch.recv(S, Seconds)).f  # L4
        fs.append(read(c, packed, K, NAME, "L4", S))
        book.heard(packed)
        book.total(fs[-1])
    await collective_audit.holder(ch.sub("seconds"), params.audit, book, entropy=entropy)
    return ckks.SwitchingKey(np.stack(fs), np.stack([g for _, g in sums]))


async def aggregator(ch: Channel, params: Params) -> ckks.SwitchingKey:
    c = ckks.context(params.ckks)
    r, K = c.ring, len(c.primes)
    gs, fs = [], []
    for _ in range(params.ckks.digits):
        h, g = r.zeros(K), r.zeros(K)
        for i, first in (await ch.gather(params.holders, First)).items():  # L1
            r.add(h, read(c, first.h, K, NAME, "L1", i))
            r.add(g, read(c, first.g, K, NAME, "L1", i))
        await ch.scatter(params.holders, Firsts(c.pack(h), c.pack(g)))  # L2
        gs.append(g)
    for _ in range(params.ckks.digits):
        f = r.zeros(K)
        for i, second in (await ch.gather(params.holders, Second)).items():  # L3
            r.add(f, read(c, second.f, K, NAME, "L3", i))
        await ch.scatter(params.holders, Seconds(c.pack(f)))  # L4
        fs.append(f)
    return ckks.SwitchingKey(np.stack(fs), np.stack(gs))
