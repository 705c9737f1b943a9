"""Range check: the plaintext of every given ciphertext is small in all coefficients, whatever one holder did to it.

A holder that adds a large polynomial to its share of a refresh has the noise of everything that is multiplied with the
output decrypted in plain sight. So the output is checked before anything that depends on it is opened. All ciphertexts
are at the same primes, Q their product; P_g is the plaintext of the g-th. v and m are the first two holders. Everything
is done `REPEATS` times, with independent randomness:

    L1  j → i   T_j = Σ_g r_jg·c1_g + a·u_j + e_j       j = v, m; from a seed ρ_j: r_jg in ±2^20, u_j ternary
    L2  i → S   H(σ_i, nonce), H(T_v, T_m)              σ_i = (T_v + T_m)·s_i + η_i, where η_i is a flood
    L3  S → j   reveal;   j → S  ρ_j                    once S has every commitment
        S       makes T_v, T_m of the seeds again: they are what every holder has
    L4  S → i   open;     i → S  σ_i, nonce             which must be what was committed to
        S       y = Σ_jg r_jg·P_g + Σ_i η_i, plus noise;  no coefficient is beyond the bound
    L5  S → i   passed

Why it is sound, what it reveals and what an abort tells is argued in docs/security/threshold_ckks.md. In short: a
holder commits to σ_i before it can know the other holder's r, so what it may add is independent of r. A deviating
holder among v and m cannot have anything but a combination of the P_g opened, since its T_j is made again from its
seed. S need not be trusted: if S deviates, all holders are honest, and their outputs passed the audit.

Reveals
-------
aggregator : y, which is independent of the P_g to 2^-40 by every single holder's η_i, as long as √(mean of slots²) is
    at most 2^value_bits. Beyond, random combinations of the P_g to the precision of η.
holder : that the check passed or failed.

Assumes
-------
Any one party may deviate. The c1_g that the holders bring are the circuit's: they are public. If some coefficient of
some P_g is beyond `tolerance`, the check passes with probability 2^-40, except for coefficients near multiples of Q/b
with a small b: there it passes with probability b^(-2·rank), where the rank is that of the multiples modulo b. An
aggregator together with a holder is not covered. Ring-LWE hides r_jg in T_j.

Cost
----
Per holder: 2 messages up, 2 down, `REPEATS` polynomials over the primes up. v and m: as many to every other holder.

References
----------
Lines numbered here. Baum, Damgard, Larsen, Nielsen, CRYPTO 2016: proofs of small noise by random combination.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from cloister.arrays import F64
from cloister.errors import ParameterError, ProtocolAbort
from cloister.mpc.crypto.ckks import scheme as ckks
from cloister.mpc.crypto.ckks.parameters import OPENINGS, SECURITY
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.crypto.prg import Prg
from cloister.mpc.crypto.rns.ring import Residues
from cloister.mpc.net.channel import Channel
from cloister.mpc.net.wire import message
from cloister.mpc.parties import Party
from cloister.mpc.threshold_ckks.collective_audit import Collective
from cloister.mpc.threshold_ckks.collective_key import read

NAME = "collective_range"
REPEATS = 2
FACTOR_BITS = 20  # r lies within ±2^this: given all other factors, one value in 2^21 lets a large coefficient pass


@dataclass(frozen=True, slots=True)
class Params(Collective):  # public
    primes: int  # of the ciphertexts
    count: int  # ciphertexts
    scale: float
    value_bits: int = 6  # √(mean of slots²) ≤ 2^value_bits at honest parties

    def __post_init__(self) -> None:
        Collective.__post_init__(self)
        if self.count < 1 or not 1 <= self.primes <= self.ckks.top:
            raise ParameterError("a range check needs at least one ciphertext, at 1 to L primes")
        if self.tolerance >= 0.25 * math.prod(2.0**b for b in self.ckks.bits[: self.primes]):
            raise ParameterError(f"{self.primes} primes leave no room for a range check; check at more primes")

    @property
    def verifiers(self) -> tuple[Party, Party]:
        """V and m, who bring the random factors."""
        return self.holders[0], self.holders[1]

    @property
    def flood_bits(self) -> int:
        """Of η: hides Σ r·P, all coefficients together, over all checks under one key."""
        norm = math.log2(self.scale) + self.value_bits + math.log2(2 * self.count) / 2  # √(Σ_jg P²), coefficients
        factors = FACTOR_BITS + math.log2(self.ckks.degree) / 2
        return math.ceil(norm + factors + SECURITY + math.log2(OPENINGS * REPEATS) / 2)

    @property
    def bound(self) -> float:
        """Beyond what honest parties bring about: η is a sum of three numbers of `flood_bits` bits, centred."""
        return len(self.holders) * 2.0 ** (self.flood_bits + 1)

    @property
    def tolerance(self) -> float:
        """The largest coefficient that may pass: two values of one factor r must not both lead within the bound."""
        return 2 * self.bound

    def other_verifiers(self, me: Party) -> list[Party]:
        return [j for j in self.verifiers if j != me]


@message("L1")
class Combination:  # j → i
    c1: tuple[bytes, ...]  # one per repetition


@message("L2")
class Committed:  # i → S
    share: bytes
    seen: bytes


@message("L3")
class Reveal:  # S → j
    pass


@message("L3")
class Seed:  # j → S
    seed: bytes


@message("L4")
class Open:  # S → i
    pass


@message("L4")
class Share:  # i → S
    share: tuple[bytes, ...]  # one polynomial per repetition
    nonce: bytes


@message("L5")
class Passed:  # S → i
    pass


def ideal(params: Params, inputs: Mapping[Party, object]) -> dict[Party, None]:
    return dict.fromkeys((params.aggregator, *params.holders))


def roles(params: Params) -> dict[Party, object]:
    return {params.aggregator: aggregator} | dict.fromkeys(params.holders, holder)


def cost(params: Params) -> dict[Party, tuple[int, int]]:
    n, one = len(params.holders), REPEATS * ckks.context(params.ckks).packed(params.primes)
    sent = dict.fromkeys(params.holders, (2, 96 + one)) | {params.aggregator: (2 + 2 * n, 0)}
    for j in params.verifiers:
        sent[j] = 2 + n - 1 + 1, 96 + one + (n - 1) * one + 32
    return sent


# ---- local steps -----------------------------------------------------------------------------------------------------


class Factors:
    """What one verifier adds in one repetition, all from its seed: r_g, and a fresh encryption of zero."""

    def __init__(self, params: Params, seed: bytes, repeat: int) -> None:
        self._r, self._k = ckks.context(params.ckks).ring, params.primes
        prg = Prg(hashlib.sha256(b"cloister/collective_range/" + bytes([repeat]) + seed).digest())
        N, span = params.ckks.degree, 2 << FACTOR_BITS
        drawn = [prg.below(span, N).astype(np.int64) - (1 << FACTOR_BITS) for _ in range(params.count)]
        self._factors = [self._r.forward(self._r.of_small(f, self._k)) for f in drawn]
        self._u = self._r.forward(self._r.of_small(prg.ternary(N), self._k))
        self._errors = [self._r.error(prg, self._k) for _ in range(2)]

    def combine(self, polynomials: Sequence[Residues], key: Residues, part: int) -> Residues:
        """Σ_g r_g·p_g + key·u + e; part 0 with b, part 1 with a."""
        out = self._r.add_product(self._errors[part].copy(), key, self._u)
        for factor, p in zip(self._factors, polynomials, strict=True):
            self._r.add_product(out, p, factor)
        return out


def combinations(params: Params, seed: bytes, c1s: Sequence[Residues], a: Residues) -> Combination:
    """T_j of every repetition."""
    c = ckks.context(params.ckks)
    return Combination(tuple(c.pack(Factors(params, seed, t).combine(c1s, a, 1)) for t in range(REPEATS)))


def decryption_share(params: Params, secret: ckks.Secret, total: Residues, entropy: Entropy) -> Residues:
    """σ_i."""
    r = ckks.context(params.ckks).ring
    return r.add_product(r.flood(entropy.prg(), params.flood_bits, params.primes), total, secret.ntt)


def commitment(share: Sequence[bytes], nonce: bytes) -> bytes:
    h = hashlib.sha256(b"cloister/collective_range/share/" + nonce)
    for data in share:
        h.update(len(data).to_bytes(8, "big") + data)
    return h.digest()


def seen(parts: Mapping[Party, Combination]) -> bytes:
    h = hashlib.sha256()
    for j in sorted(parts):
        for data in parts[j].c1:
            h.update(len(data).to_bytes(8, "big") + data)
    return h.digest()


def added(params: Params, parts: Mapping[Party, Combination]) -> list[Residues]:
    """T_v + T_m of every repetition."""
    c = ckks.context(params.ckks)
    totals = [c.ring.zeros(params.primes) for _ in range(REPEATS)]
    for j, part in parts.items():
        if len(part.c1) != REPEATS:
            raise ProtocolAbort(NAME, "L1", "malformed", f"'{j}' sent {len(part.c1)} polynomials, expected {REPEATS}")
        for total, data in zip(totals, part.c1, strict=True):
            c.ring.add(total, read(c, data, params.primes, NAME, "L1", j))
    return totals


def check_range(params: Params, y: Sequence[F64]) -> None:
    """Raise if a coefficient is beyond what honest parties bring about."""
    if not max(float(np.abs(part).max()) for part in y) <= params.bound:
        raise ProtocolAbort(
            NAME, "L4", "range", "a refreshed ciphertext is out of range: the training diverged, or a site shifted it"
        )


# ---- roles -----------------------------------------------------------------------------------------------------------


async def holder(
    ch: Channel,
    params: Params,
    secret: ckks.Secret,
    public: ckks.PublicKey,
    c1s: Sequence[Residues],
    *,
    entropy: Entropy,
) -> None:
    """A holder's part, with the second polynomials of the ciphertexts; raises if the check fails."""
    S, seed, nonce = params.aggregator, entropy.bytes(32), entropy.bytes(32)
    parts: dict[Party, Combination] = {}
    if ch.me in params.verifiers:
        parts[ch.me] = combinations(params, seed, c1s, public.a)
        await ch.scatter([i for i in params.holders if i != ch.me], parts[ch.me])  # L1
    parts |= await ch.gather(params.other_verifiers(ch.me), Combination)  # L1
    c = ckks.context(params.ckks)
    share = tuple(c.pack(decryption_share(params, secret, t, entropy)) for t in added(params, parts))
    await ch.send(S, Committed(commitment(share, nonce), seen(parts)))  # L2
    if ch.me in params.verifiers:
        await ch.recv(S, Reveal)  # L3
        await ch.send(S, Seed(seed))  # L3
    await ch.recv(S, Open)  # L4
    await ch.send(S, Share(share, nonce))  # L4
    await ch.recv(S, Passed)  # L5


async def aggregator(ch: Channel, params: Params, public: ckks.PublicKey, cts: Sequence[ckks.Cipher]) -> None:
    """S's part, with the ciphertexts."""
    c, k = ckks.context(params.ckks), params.primes
    raws = [c.raw(c.drop(ct, k))[0] for ct in cts]
    if len(raws) != params.count or any(raw.shape[:2] != (2, k) for raw in raws):
        raise ParameterError("a range check needs the ciphertexts that the parties agreed on")
    committed = await ch.gather(params.holders, Committed)  # L2
    await ch.scatter(params.verifiers, Reveal())  # L3
    seeds = {j: got.seed for j, got in (await ch.gather(params.verifiers, Seed)).items()}  # L3
    check_seeds(params, seeds, committed, [raw[1] for raw in raws], public.a)
    y = [combined(params, seeds, t, [raw[0] for raw in raws], public.b) for t in range(REPEATS)]
    await ch.scatter(params.holders, Open())  # L4
    for i, got in (await ch.gather(params.holders, Share)).items():  # L4
        if len(got.share) != REPEATS or commitment(got.share, got.nonce) != committed[i].share:
            raise ProtocolAbort(NAME, "L4", "commitment", f"'{i}' opened another share than it committed to")
        for total, data in zip(y, got.share, strict=True):
            c.ring.add(total, read(c, data, k, NAME, "L4", i))
    what = "random combinations of the encrypted model's coefficients, flooded"
    y = ch.reveal(y, to=ch.me, line="L4", what=what, protocol=NAME)
    check_range(params, [c.ring.lift(c.ring.backward(total))[0] for total in y])
    await ch.scatter(params.holders, Passed())  # L5


def check_seeds(
    params: Params,
    seeds: Mapping[Party, bytes],
    committed: Mapping[Party, Committed],
    c1s: Sequence[Residues],
    a: Residues,
) -> None:
    """L3 at S: what every holder received from v and m is what their seeds make of the ciphertexts."""
    for j, seed in seeds.items():
        if len(seed) != 32:
            raise ProtocolAbort(NAME, "L3", "malformed", f"'{j}' sent a seed of {len(seed)} bytes, expected 32")
    expected = seen({j: combinations(params, seed, c1s, a) for j, seed in seeds.items()})
    for i, got in committed.items():
        if got.seen != expected:
            raise ProtocolAbort(NAME, "L3", "combination", f"what '{i}' received is not what the seeds give")


def combined(
    params: Params, seeds: Mapping[Party, bytes], repeat: int, c0s: Sequence[Residues], b: Residues
) -> Residues:
    """Σ_j (Σ_g r_jg·c0_g + b·u_j + e_j)."""
    r = ckks.context(params.ckks).ring
    total = r.zeros(params.primes)
    for seed in seeds.values():
        r.add(total, Factors(params, seed, repeat).combine(c0s, b, 0))
    return total
