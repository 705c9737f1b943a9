"""Equal copies: numbers that stand in many slots of a refreshed ciphertext are the same in all of them.

A holder can add any polynomial to the output of a refresh. If the output holds one copy of a model for every sample of
a batch, the copy of one sample may be shifted, and that sample then outweighs all others. So the copies are compared
before anything that depends on them is opened: those of many steps at once, with the tests of switching keys. V is the
set of plaintexts that are real, alike in all slots of a cell and zero elsewhere. While the steps run, S alone knows
ρ_κt, integers in ±2^WEIGHT_BITS, and computes [A_κ] = Σ_t ρ_κt·[M_t] for κ up to `REPEATS`. Then, with ciphertexts [Z]
that must hold nothing but noise:

    all          the seed of ρ goes to all, and `collective_range` bounds the coefficients of A_κ and Z
    L1  S → i    T_κ = r_κ·c1(A_κ) + Σ_g f_κg·c1(Z_g) + a·u + e    r_κ orthogonal to V, f_κg random, from a seed
    L2  i → S    H(σ_i, nonce)            σ_iκ = coefficient 0 of T_κ·s_i, plus a flood η_iκ
    L3  S → i    the seed; i makes T_κ again, of its own ciphertexts
    L4  i → S    σ_i, nonce               which must be what was committed to
        S        y_κ = coefficient 0 of r_κ·A_κ + Σ_g f_κg·Z_g, plus Σ_i η_iκ; none is beyond the bound
    L5  S → i    passed

Coefficient 0 of r·A is the sum of r times A over all slots. r is uniform in a cube, projected: its mean over every cell
is subtracted from the real parts. A holder commits to σ_i before it knows r, which T hides. S need not be trusted: a
holder opens σ_i only for the T of a seed, and if S deviates, all holders are honest and there is nothing to find. The
argument is in docs/security/threshold_ckks.md.

Reveals
-------
aggregator : y_κ, `REPEATS` numbers, which hold the noise of A_κ and Z to 2^-40 behind every single holder's flood, as
    long as √(mean of slots²) of every M_t is at most 2^value_bits. Beyond, random combinations of their slots.
holder : that the check passed or failed.

Assumes
-------
Any one party may deviate. The ciphertexts are the circuit's, and passed `collective_range`. If the distance of some M_t
to V is beyond `tolerance` (Euclidean, over all slots), the check passes with probability 2^-40; so it does if the
coefficients of some Z_g are beyond `zero_tolerance`. An aggregator together with a holder is not covered. Ring-LWE
hides r and f in T.

Cost
----
Aggregator: `REPEATS` polynomials to every holder. Holder: `REPEATS` numbers. Per step, a multiplication of [M] by
`REPEATS` numbers at the aggregator.

References
----------
Lines numbered here. Ball, Cube slicing in R^n, Proc. AMS 97 (1986): a combination of independent uniform numbers has a
density of at most √2 over its Euclidean norm.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from cloister.arrays import I64, U64
from cloister.errors import ParameterError, ProtocolAbort
from cloister.mpc.crypto.ckks import scheme as ckks
from cloister.mpc.crypto.ckks.parameters import OPENINGS, SECURITY
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.crypto.prg import Prg
from cloister.mpc.crypto.rns.ring import SIGMA, Residues
from cloister.mpc.crypto.rns.slots import encode_exact
from cloister.mpc.net.channel import Channel
from cloister.mpc.net.wire import message
from cloister.mpc.parties import Party
from cloister.mpc.threshold_ckks.collective_audit import Collective
from cloister.mpc.threshold_ckks.collective_key import read

NAME = "equal_copies"
REPEATS = 10
WEIGHT_BITS = 5  # ρ lies within ±2^this
FACTOR_BITS = 20  # r and f are drawn within ±2^this
MISSED = 5  # in each repetition, too large a combination passes with probability 2^-this


@dataclass(frozen=True, slots=True)
class Params(Collective):  # public
    primes: int  # of the ciphertexts
    scale: float
    cells: tuple[bytes, ...]  # digests of the cells, one for every ciphertext of a step
    steps: int  # at most
    zeros: tuple[float, ...]  # Euclidean norms of the noise in every [Z]
    value_bits: int = 6  # √(mean of slots²) ≤ 2^value_bits at honest parties

    def __post_init__(self) -> None:
        Collective.__post_init__(self)
        if not self.cells or self.steps < 1 or not 1 <= self.primes <= self.ckks.top:
            raise ParameterError("a check of copies needs ciphertexts at 1 to L primes, of at least one step")
        if self.bound * 2.0**FACTOR_BITS >= math.prod(2.0**b for b in self.ckks.bits[: self.primes]):
            raise ParameterError(f"{self.primes} primes leave no room for a check of copies; check at more primes")

    @property
    def factor_scale(self) -> int:
        """log2 of the scale of r: its rounding times an honest A_κ stays below the noise."""
        return math.ceil(math.log2(self.scale)) + self.value_bits - FACTOR_BITS + 1

    @property
    def noise(self) -> float:
        """Standard deviation of r_κ·A_κ at honest parties; every [Z] adds as much at most."""
        refresh = 1.1 * SIGMA * math.sqrt(len(self.holders) * self.steps * len(self.cells))
        return 1.25 * refresh * 2.0 ** (WEIGHT_BITS + FACTOR_BITS + self.factor_scale) / 2

    def shift(self, zero: int) -> int:
        """By how many bits f is shifted, so that a [Z] weighs like A_κ."""
        return max(0, math.floor(math.log2(self.noise / self.zeros[zero])) - FACTOR_BITS)

    @property
    def flood_bits(self) -> int:
        """Of η: hides the noise over all checks under one key."""
        terms = [self.noise] + [z * 2.0 ** (FACTOR_BITS + self.shift(g)) for g, z in enumerate(self.zeros)]
        return math.ceil(math.log2(math.hypot(*terms)) + SECURITY + math.log2(OPENINGS * REPEATS) / 2)

    @property
    def bound(self) -> float:
        """Beyond what honest parties bring about: η is a sum of three numbers of `flood_bits` bits, centred."""
        return len(self.holders) * 2.0 ** (self.flood_bits + 1)

    @property
    def tolerance(self) -> float:
        """The largest distance of one M_t to V that may pass; Euclidean, over all slots, in units of 1 / scale.

        A distance of A_κ beyond half of it passes with probability 2^-MISSED by Ball's theorem. One value of ρ_κt, or
        two of 2^(WEIGHT_BITS + 1), bring A_κ below that.
        """
        each = (
            2.0 ** (FACTOR_BITS + self.factor_scale + 1) / self.ckks.degree
        )  # of a unit in a slot, at the cube's edge
        return 2 * math.sqrt(2) * self.bound * 2.0**MISSED / each

    def zero_tolerance(self, zero: int) -> float:
        """The largest Euclidean norm of the coefficients of that Z that may pass."""
        return math.sqrt(2) * self.bound * 2.0**MISSED / 2.0 ** (FACTOR_BITS + self.shift(zero))


@message("L1")
class Combination:  # S → i
    c1: tuple[bytes, ...]  # one per repetition


@message("L2")
class Committed:  # i → S
    share: bytes


@message("L3")
class Reveal:  # S → i
    seed: bytes


@message("L4")
class Share:  # i → S
    share: U64  # (REPEATS, primes)
    nonce: bytes


@message("L5")
class Passed:  # S → i
    pass


def ideal(params: Params, inputs: Mapping[Party, object]) -> dict[Party, None]:
    return dict.fromkeys((params.aggregator, *params.holders))


def roles(params: Params) -> dict[Party, object]:
    return {params.aggregator: aggregator} | dict.fromkeys(params.holders, holder)


def cost(params: Params) -> dict[Party, tuple[int, int]]:
    n, one = len(params.holders), ckks.context(params.ckks).packed(params.primes)
    sent = dict.fromkeys(params.holders, (2, 64 + 8 * REPEATS * params.primes))
    return sent | {params.aggregator: (3 * n, n * (REPEATS * one + 32))}


# ---- while the steps run ---------------------------------------------------------------------------------------------


def weights(seed: bytes, step: int) -> I64:
    """ρ_κt for every κ; t counts the steps since the seed was drawn."""
    prg = Prg(hashlib.sha256(b"cloister/equal_copies/weights/" + step.to_bytes(8, "big") + seed).digest())
    return prg.below((2 << WEIGHT_BITS) + 1, REPEATS).astype(np.int64) - (1 << WEIGHT_BITS)


class Sums:
    """Σ_t ρ_κt·p_t for every κ, of several polynomials of every step at once."""

    def __init__(self, params: ckks.Parameters, primes: int, count: int) -> None:
        self._ring = ckks.context(params).ring
        self.polys = np.zeros((REPEATS, count, primes, params.degree), np.uint64)

    def add(self, rho: I64, polys: Iterable[Residues]) -> None:
        for at, p in enumerate(polys):
            for total, factor in zip(self.polys[:, at], rho, strict=True):
                for row in range(len(total)):
                    self._ring.add_multiple(total, p, int(factor), row)


# ---- local steps -----------------------------------------------------------------------------------------------------


def digest(cells: I64) -> bytes:
    return hashlib.sha256(cells.tobytes()).digest()


def orthogonal(prg: Prg, cells: I64) -> tuple[I64, int]:
    """Slots of r (slots, 2), times the returned number: uniform, their mean over every cell subtracted from real parts.

    `cells` has the number of every slot's cell, and -1 where nothing stands. All cells have the same size.
    """
    u = prg.below((2 << FACTOR_BITS) + 1, (len(cells), 2)).astype(np.int64) - (1 << FACTOR_BITS)
    inside = cells >= 0
    sizes = np.bincount(cells[inside])
    size = int(sizes[0])
    if (sizes != size).any():
        raise ParameterError("copies are compared in cells of the same size")
    sums = np.zeros(len(sizes), np.int64)
    np.add.at(sums, cells[inside], u[inside, 0])
    u *= size
    u[inside, 0] -= sums[cells[inside]]
    return u, size


class Factors:
    """What S adds in one repetition, all from its seed: r and f, and a fresh encryption of zero."""

    def __init__(self, params: Params, cells: Sequence[I64], seed: bytes, repeat: int) -> None:
        self._r, k, N = ckks.context(params.ckks).ring, params.primes, params.ckks.degree
        prg = Prg(hashlib.sha256(b"cloister/equal_copies/" + bytes([repeat]) + seed).digest())
        self._factors = []
        for table in cells:
            u, size = orthogonal(prg, table)
            self._factors.append(encode_exact(self._r, u, 2.0**params.factor_scale / size, k))
        for zero in range(len(params.zeros)):
            drawn = prg.below((2 << FACTOR_BITS) + 1, N).astype(np.int64) - (1 << FACTOR_BITS)
            small = self._r.forward(self._r.of_small(drawn, k))
            shifted = self._r.zeros(k)
            for row in range(k):
                self._r.add_multiple(shifted, small, 1 << params.shift(zero), row)
            self._factors.append(shifted)
        self._u = self._r.forward(self._r.of_small(prg.ternary(N), k))
        self._errors = [self._r.error(prg, k) for _ in range(2)]

    def combine(self, polynomials: Sequence[Residues], key: Residues, part: int) -> Residues:
        """r·p + Σ_g f_g·p_g + key·u + e; part 0 with b, part 1 with a."""
        out = self._r.add_product(self._errors[part].copy(), key, self._u)
        for factor, p in zip(self._factors, polynomials, strict=True):
            self._r.add_product(out, p, factor)
        return out


def check_inputs(params: Params, cells: Sequence[I64], polynomials: Sequence[Sequence[Residues]]) -> None:
    if tuple(map(digest, cells)) != params.cells:
        raise ParameterError("the cells are not those that the parties agreed on")
    count = len(params.cells) + len(params.zeros)
    if len(polynomials) != REPEATS or any(len(each) != count for each in polynomials):
        raise ParameterError("a check of copies needs the ciphertexts that the parties agreed on")


def combinations(
    params: Params, cells: Sequence[I64], seed: bytes, c1s: Sequence[Sequence[Residues]], a: Residues
) -> Combination:
    """T of every repetition."""
    c = ckks.context(params.ckks)
    made = (Factors(params, cells, seed, t).combine(each, a, 1) for t, each in enumerate(c1s))
    return Combination(tuple(map(c.pack, made)))


def lowest(params: Params, x: Residues, y: Residues) -> list[int]:
    """Coefficient 0 of x·y modulo every prime: the mean over all roots."""
    r = ckks.context(params.ckks).ring
    return [int(v) * pow(params.ckks.degree, -1, q) % q for v, q in zip(r.inner(y, x), r.primes[: len(x)], strict=True)]


def flood(params: Params, entropy: Entropy) -> int:
    """As `Ring.spread`, one number: a sum of three uniform ones, centred."""
    bits = params.flood_bits
    drawn = (int.from_bytes(entropy.bytes(bits // 8 + 1), "big") >> (8 - bits % 8) for _ in range(3))
    return sum(drawn) - (3 << (bits - 1))


def decryption_share(params: Params, secret: ckks.Secret, totals: Sequence[Residues], entropy: Entropy) -> U64:
    """σ_i."""
    primes, shares = ckks.context(params.ckks).primes[: params.primes], []
    for total in totals:
        eta = flood(params, entropy)
        shares.append([(v + eta) % q for v, q in zip(lowest(params, total, secret.ntt), primes, strict=True)])
    return np.array(shares, np.uint64)


def commitment(share: U64, nonce: bytes) -> bytes:
    return hashlib.sha256(b"cloister/equal_copies/share/" + nonce + np.ascontiguousarray(share).tobytes()).digest()


def whole(params: Params, residues: Sequence[int]) -> int:
    """The integer in (-Q/2, Q/2)."""
    primes = ckks.context(params.ckks).primes[: params.primes]
    Q = math.prod(primes)
    x = sum(v * (Q // q) * pow(Q // q, -1, q) for v, q in zip(residues, primes, strict=True)) % Q
    return x - Q if x > Q // 2 else x


def check_copies(params: Params, y: Sequence[int]) -> None:
    """Raise if a number is beyond what honest parties bring about."""
    if not max(map(abs, y)) <= params.bound:
        raise ProtocolAbort(
            NAME, "L4", "copies", "copies of a refreshed model differ, or a switching key is wrong: a site shifted them"
        )


# ---- roles -----------------------------------------------------------------------------------------------------------


async def holder(
    ch: Channel,
    params: Params,
    secret: ckks.Secret,
    public: ckks.PublicKey,
    cells: Sequence[I64],
    c1s: Sequence[Sequence[Residues]],
    *,
    entropy: Entropy,
) -> None:
    """A holder's part, with the second polynomials of [A_κ] and [Z] for every κ; raises if the check fails."""
    check_inputs(params, cells, c1s)
    c, S, nonce = ckks.context(params.ckks), params.aggregator, entropy.bytes(32)
    received = await ch.recv(S, Combination)  # L1
    if len(received.c1) != REPEATS:
        raise ProtocolAbort(NAME, "L1", "malformed", f"'{S}' sent {len(received.c1)} polynomials, expected {REPEATS}")
    totals = [read(c, data, params.primes, NAME, "L1", S) for data in received.c1]
    share = decryption_share(params, secret, totals, entropy)
    await ch.send(S, Committed(commitment(share, nonce)))  # L2
    seed = (await ch.recv(S, Reveal)).seed  # L3
    if len(seed) != 32 or combinations(params, cells, seed, c1s, public.a).c1 != tuple(received.c1):
        raise ProtocolAbort(NAME, "L3", "combination", f"what '{S}' sent is not what its seed gives")
    await ch.send(S, Share(share, nonce))  # L4
    await ch.recv(S, Passed)  # L5


async def aggregator(
    ch: Channel,
    params: Params,
    public: ckks.PublicKey,
    cells: Sequence[I64],
    cts: Sequence[Sequence[ckks.Cipher]],
    *,
    entropy: Entropy,
) -> None:
    """S's part, with [A_κ] and [Z] for every κ."""
    c, k, seed = ckks.context(params.ckks), params.primes, entropy.bytes(32)
    parts = [[[c.drop(ct, k).polys[part] for ct in each] for each in cts] for part in (0, 1)]
    check_inputs(params, cells, parts[1])
    await ch.scatter(params.holders, combinations(params, cells, seed, parts[1], public.a))  # L1
    y = []
    for repeat, each in enumerate(parts[0]):
        total = Factors(params, cells, seed, repeat).combine(each, public.b, 0)
        y.append([int(v) for v in c.ring.backward(total)[:, 0]])
    committed = await ch.gather(params.holders, Committed)  # L2
    await ch.scatter(params.holders, Reveal(seed))  # L3
    shape = (REPEATS, k)
    for i, got in (await ch.gather(params.holders, Share, share=shape)).items():  # L4
        if commitment(got.share, got.nonce) != committed[i].share:
            raise ProtocolAbort(NAME, "L4", "commitment", f"'{i}' opened another share than it committed to")
        y = [[a + int(b) for a, b in zip(total, more, strict=True)] for total, more in zip(y, got.share, strict=True)]
    what = "differences between the copies of the encrypted model, flooded"
    y = ch.reveal(y, to=ch.me, line="L4", what=what, protocol=NAME)
    check_copies(params, [whole(params, total) for total in y])
    await ch.scatter(params.holders, Passed())  # L5
