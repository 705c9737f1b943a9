"""Hamming distances of two sites by homomorphic encryption (engine `he`): one encrypts its codes, the other multiplies.

    L1   K → M   pk, Enc(Y)          Y = the codes of K as a matrix (L, n_K), packed into coefficients
    L2   M       Enc(T) = (1 - 2X) Enc(Y) + r, r uniform modulo 2^κ      X = the codes of M, (n_M, L)
         M → K   Enc(T), re-randomised and flooded
    L3   M       its share: Σ_l x_l - r;   K   its share: T
         so that the shares add up to Σ_l (x_l + (1 - 2x_l) y_l) = Σ_l x_l ⊕ y_l

The printed function adds y where x = 1 and so computes a similarity; this one has the signs of a distance. The mask is
exact modulo 2^κ > L. K is the site with fewer points, so that fewer ciphertexts travel.

Reveals
-------
K : T, which is uniform. M : nothing. Both: how many points the other has.
who carries the frames : nothing.

Assumes
-------
Semi-honest sites; BFV at 128-bit security; results hidden by 40 bits of flooding (`bfv_matmul`). Lies that are not
noticed: (b), (c), (f) of both sites, which change shares; a ciphertext that is none of a code may tell the one who made
it more than a distance.

Cost
----
K sends n_K L / 4096 ciphertexts of 131 kB, M about n_M of them for every 4096 points of K; 0.3 ms per product of two
polynomials, of which there are n_M n_K L / 4096.

References
----------
[SYL24] section 3.2, PHE-based; here with a packed lattice scheme. Lines numbered here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cloister.arrays import U8
from cloister.errors import CloisterError, ProtocolAbort
from cloister.mpc.crypto import bfv_matmul as he
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.crypto.replicated import Words
from cloister.mpc.net.channel import Channel
from cloister.mpc.net.wire import message
from cloister.study import Party
from cloister.workflows.propagate_labels import shared_codes
from cloister.workflows.propagate_labels.shared_codes import Pair, ring_of

NAME = "hamming_he"
GROUP = 256  # ciphertexts in one message


@dataclass(frozen=True, slots=True)
class Params(Pair):
    @property
    def owner(self) -> Party:  # K
        return self.fewer

    @property
    def multiplier(self) -> Party:  # M
        return self.other

    @property
    def plan(self) -> he.Plan:
        """Rows are cut one by one: weights are ±1, so the noise grows by L."""
        scheme = he.Scheme(ring_of(self.bits).bits, self.bits.bit_length())
        return he.Plan(scheme, self.size(self.multiplier), self.bits, self.size(self.owner), cut=1)


@message("L1")
class Key:  # K → M
    pk: bytes


@message("L1")
class Codes:  # K → M
    cts: tuple[bytes, ...]


@message("L2")
class Masked:  # M → K
    cts: tuple[bytes, ...]


ideal = shared_codes.pair_ideal


def roles(params: Params) -> dict[Party, Any]:
    return {params.first: share, params.second: share}


def cost(params: Params) -> dict[Party, tuple[int, int]]:
    plan = params.plan
    ct = plan.scheme.ciphertext_bytes + 113  # and its header
    public = 2 * plan.scheme.degree * len(plan.scheme.primes) * 8 + 170
    sent, back = (-(-n // GROUP) for n in (plan.sent, plan.returned))
    return {params.owner: (1 + sent, public + plan.sent * ct), params.multiplier: (back, plan.returned * ct)}


async def _send(ch: Channel, to: Party, kind: type[Any], cts: list[bytes]) -> None:
    for start in range(0, len(cts), GROUP):
        await ch.send(to, kind(tuple(cts[start : start + GROUP])))


async def _recv(ch: Channel, sender: Party, kind: type[Any], count: int) -> list[bytes]:
    cts: list[bytes] = []
    while len(cts) < count:
        cts += (await ch.recv(sender, kind)).cts
    return cts


async def share(ch: Channel, params: Params, packed: U8, *, entropy: Entropy) -> Words:
    """Either part; returns this site's summand (n_me, n_other) of the distances modulo 2^κ."""
    params.check_codes(ch.me, packed)
    return await (_encrypt if ch.me == params.owner else _multiply)(ch, params, packed, entropy)


async def _encrypt(ch: Channel, params: Params, packed: U8, entropy: Entropy) -> Words:
    plan, ring, M = params.plan, ring_of(params.bits), params.multiplier
    key = he.Key(plan.scheme)
    await ch.send(M, Key(key.public))  # L1
    y = np.ascontiguousarray(np.unpackbits(packed, axis=1).T)
    await _send(ch, M, Codes, he.encrypt(plan, key.public, y))
    cts = await _recv(ch, M, Masked, plan.returned)  # L2
    try:
        t: Words = key.decrypt(plan, cts)
    except CloisterError as e:
        raise ProtocolAbort(NAME, "L2", "malformed", str(e)) from None
    return np.ascontiguousarray(t.T, ring.dtype)  # L3


async def _multiply(ch: Channel, params: Params, packed: U8, entropy: Entropy) -> Words:
    plan, ring, K = params.plan, ring_of(params.bits), params.owner
    public = (await ch.recv(K, Key)).pk  # L1
    cts = await _recv(ch, K, Codes, plan.sent)
    x = np.unpackbits(packed, axis=1).astype(np.int64)
    try:
        products, r = he.multiply(public, [he.Term(plan, cts, 1 - 2 * x)], entropy, mask=True)  # L2
    except CloisterError as e:
        raise ProtocolAbort(NAME, "L1", "malformed", str(e)) from None
    await _send(ch, K, Masked, products)
    mine: Words = (x.sum(axis=1).astype(np.uint64)[:, None] - r).astype(ring.dtype)
    return mine  # L3
