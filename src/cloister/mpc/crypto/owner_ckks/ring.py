"""The ring of encrypted inference: its parameters, openings, and arithmetic in 32-bit words; see `block`."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TypeAlias, final

import numpy as np

from cloister.arrays import U32, U64, Index
from cloister.errors import ParameterError
from cloister.mpc.crypto.prg import Prg, block_of, gaussian_table
from cloister.mpc.crypto.rns.ring import SECURE_BITS, SIGMA, Ring, check_secure, ring, root_tables

Residues: TypeAlias = U32  # (k, N)
Cts: TypeAlias = U32  # (n, p, k, N)
KEEP = 3  # primes of what an owner is sent: the others are dropped first
WORDS = 7  # of 32 bits: the longest masked value
PAIR_BITS = 0.5  # by which the coefficients of a pair of values, a + i·b, are longer than those of one


@dataclass(frozen=True, slots=True)
class Parameters:
    """Public. `degree` N gives N/2 samples a batch; scales of values and weights are powers of two."""

    degree: int = 8192
    count: int = 7  # primes
    bits: int = 28  # of each
    scale_bits: int = 28  # Δ
    weight_bits: int = 13
    hiding: int = 48  # bits by which a mask is wider than the message, so that their sum does not go round

    def __post_init__(self) -> None:
        if not 20 <= self.bits <= 28 or self.count <= KEEP or self.hiding < 40:
            raise ParameterError("encrypted blocks need primes of 20 to 28 bits, four or more, and 40 bits of hiding")
        check_secure(self.degree, self.count * self.bits)

    @property
    def about(self) -> str:
        """In words, for reports."""
        size, most = self.count * self.bits, SECURE_BITS[self.degree]
        return f"log N {self.degree.bit_length() - 1}, log Q {size} of {most} at 128 bits, scale 2^{self.scale_bits}"

    @property
    def slots(self) -> int:
        return self.degree // 2

    @property
    def tight(self) -> int:
        """32-bit words of one polynomial at one prime on the wire."""
        return self.degree * self.bits // 32

    @property
    def scale(self) -> float:
        return math.ldexp(1.0, self.scale_bits)

    @property
    def weight_scale(self) -> float:
        return math.ldexp(1.0, self.weight_bits)


SMALL = Parameters(4096, 4, 26, 21, 9, 40)  # the smallest ring that carries a block; for tests and small models
STANDARD = Parameters()
QUADRATIC = Parameters(weight_bits=11)  # for quadratic attention, whose longest stretch has five weights


@dataclass(frozen=True, slots=True)
class Opening:
    """One refresh of `count` ciphertexts, as both sides know it beforehand."""

    label: str
    count: int
    polys: int  # p
    primes: int  # k, at which the provider computes; KEEP of them are sent
    mask_bits: int  # of Q, the product of these, below which a mask is drawn
    message_bits: float  # log2 of the largest coefficient that is sent
    lift: int  # bits by which the provider multiplies first
    factor: int  # f = factor / 2^shift, for twice what is sent (`halves`)
    shift: int  # -32 at least
    back: int  # primes of the fresh ciphertexts
    group: int = 1  # ciphertexts that the provider makes at once

    @property
    def hiding(self) -> float:
        """-log2 of the probability that a coefficient wraps modulo Q, and is lost."""
        return self.mask_bits - 1 - self.message_bits

    @property
    def fresh_bits(self) -> int:
        """Of what the owner encrypts."""
        return fresh_bits(self.mask_bits, self.factor, self.shift)


def fresh_bits(mask_bits: int, factor: int, shift: int) -> int:
    return mask_bits + 2 + factor.bit_length() - shift


def fraction(f: float) -> tuple[int, int]:
    """Find f ≈ factor / 2^shift with a factor of 32 bits: exact for powers of two, else good to 2^-32."""
    shift = 31 - math.floor(math.log2(f))
    if shift < -32:
        raise ParameterError("a refresh cannot multiply by more than 2^63")
    return min(round(math.ldexp(f, shift)), (1 << 32) - 1), shift


@functools.lru_cache(maxsize=8)
def primes_of(params: Parameters) -> tuple[int, ...]:
    step = 2 * params.degree
    q = (1 << params.bits) // step * step + 1
    primes: list[int] = []
    while len(primes) < params.count:
        q -= step
        if q < 1 << (params.bits - 1):
            raise ParameterError(f"there are not {params.count} primes of {params.bits} bits for this ring")
        if _is_prime(q):
            primes.append(q)
    return tuple(primes)


def _is_prime(n: int) -> bool:
    return all(n % p for p in range(3, math.isqrt(n) + 1, 2))


def last_word(q: int) -> int:
    """The largest 64-bit word that is taken modulo q: beyond it small residues would be favoured."""
    return (1 << 64) - (1 << 64) % q - 1


@final
class Halves:
    """What a public seed stands for: uniform words, one for every coefficient, drawn alike by whatever draws them.

    Word w is the w-th of the seed's AES stream (`prg`). Where it is too large, it becomes the first word of the block
    with the counter t·2^64 + w, t = 1, 2, …: a redraw moves no other word, so that words can be drawn in any order.
    """

    __slots__ = ("_at", "_seed", "_stream")

    def __init__(self, seed: bytes) -> None:
        self._stream, self._seed, self._at = Prg(seed), seed, 0

    def words(self, count: int, last: int) -> U64:
        """The next words, none above `last`."""
        words = self._stream.uint64(count)
        for i in np.flatnonzero(words > np.uint64(last)):
            again, word = 0, last + 1
            while word > last:
                again += 1
                word = int.from_bytes(block_of(self._seed, again << 64 | self._at + int(i))[:8], "little")
            words[i] = word
        self._at += count
        return words


@final
class Narrow:
    """Arithmetic of the ring in 32-bit words, for primes of at most 28 bits; the same order of values as `Ring`."""

    def __init__(self, params: Parameters) -> None:
        from cloister.mpc.crypto.owner_ckks import kernels, transforms

        self.kernels, self._transforms, self.degree = kernels, transforms, params.degree
        self.wide: Ring = ring(params.degree, primes_of(params))
        self.primes = self.wide.primes
        self.q = self.wide.q.astype(np.uint32)
        self.inv = 1.0 / self.q.astype(np.float64)
        roots = [root_tables(params.degree, x) for x in self.primes]
        self._w, self._v = (np.stack([t[i] for t in roots]).astype(np.uint32) for i in (0, 1))
        self._ws, self._vs = self.quotients(self._w), self.quotients(self._v)
        self._late = [self._across(t) for t in (self._w, self._ws, self._v, self._vs)]
        n_inv = np.array([[pow(params.degree, -1, x)] for x in self.primes], np.uint32)
        self._n_inv, self._n_inv_s = n_inv[:, 0].copy(), self.quotients(n_inv)[:, 0].copy()
        self._inverse = self.wide._inverse.astype(np.uint32)  # q_l^-1 mod q_j
        self._inverse_s = np.ascontiguousarray(self.quotients(self._inverse.T).T)
        self._powers = np.array([[pow(2, 32 * m, x) for x in self.primes] for m in range(WORDS)], np.uint64)
        self._table = gaussian_table(SIGMA)
        leading = np.arange(1 << 12, dtype=np.uint64) << np.uint64(52)
        self._first = np.searchsorted(self._table, leading, side="right").astype(np.int64)

    def quotients(self, w: Residues) -> Residues:
        """⌊2^32·w / q⌋, which make products by w cheap."""
        return ((w.astype(np.uint64) << np.uint64(32)) // self.q[: len(w), None]).astype(np.uint32)

    def _across(self, table: U32) -> U32:
        """Factors of the last butterflies, in rows that run across blocks."""
        rows, size = [], self._transforms.LATE
        blocks = self.degree // size
        for groups in (1 << i for i in range(size.bit_length() - 1)):
            rows += [table[:, blocks * groups + np.arange(blocks) * groups + b] for b in range(groups)]
        return np.ascontiguousarray(np.stack(rows, axis=1))

    def forward(self, a: Residues) -> Residues:
        self._transforms.forward(a, self._w, self._ws, self._late[0], self._late[1], self.q)
        return a

    def backward(self, a: Residues) -> Residues:
        self._transforms.backward(
            a, self._v, self._vs, self._late[2], self._late[3], self.q, self._n_inv, self._n_inv_s
        )
        return a

    def constant(self, c: int, k: int) -> Residues:
        """The integer c in every place."""
        column = np.array([[c % x] for x in self.primes[:k]], np.uint32)
        return np.repeat(column, self.degree, axis=1)

    def add(self, acc: Residues, a: Residues) -> Residues:
        self.kernels.add(acc, a, self.q)
        return acc

    def subtract(self, acc: Residues, a: Residues) -> Residues:
        self.kernels.subtract(acc, a, self.q)
        return acc

    def gaussian(self, prg: Prg, k: int) -> Residues:
        """A fresh error, in coefficients."""
        small, out = np.empty(self.degree, np.int64), np.empty((k, self.degree), np.uint32)
        self.kernels.gaussian(prg.uint64(self.degree), self._table, self._first, small)
        self.kernels.of_small(small, self.q, out)
        return out

    def ternary(self, prg: Prg, k: int) -> Residues:
        drawn, out = prg.uint8(self.degree), np.empty((k, self.degree), np.uint32)
        again = np.flatnonzero(drawn == 255)
        while again.size:
            drawn[again] = prg.uint8(again.size)
            again = again[drawn[again] == 255]
        small = np.empty(self.degree, np.int64)
        self.kernels.of_ternary(drawn, small)
        self.kernels.of_small(small, self.q, out)
        return out

    def uniform(self, halves: Halves, k: int) -> Residues:
        """The next uniform polynomial of a public seed."""
        out = np.empty((k, self.degree), np.uint32)
        for j, q in enumerate(self.primes[:k]):
            words = halves.words(self.degree, last_word(q))
            self.kernels.of_uniform(words, self.q[j], self.inv[j], np.uint64((1 << 32) % q), out[j])
        return out

    def add_words(self, acc: Residues, words: U32) -> Residues:
        """Add long integers, rows of 32-bit words, to every coefficient."""
        self.kernels.add_words(words, self._powers, self.q, self.inv, acc)
        return acc

    def to_words(self, a: Residues) -> U32:
        """Coefficients in [0, Q) as rows of words; spoils a."""
        k = len(a)
        words = np.empty((-(-28 * k // 32), self.degree), np.uint32)
        self.kernels.to_words(a, self.q, self._inverse, self._inverse_s, words)
        return words


def times_shift(words: U32, how: Opening) -> U32:
    """⌊words·f⌋."""
    from cloister.mpc.crypto.owner_ckks import kernels

    out = np.empty((-(-how.fresh_bits // 32), words.shape[1]), np.uint32)
    kernels.times_shift(words, np.uint32(how.factor), how.shift, out)
    return out


def random_words(prg: Prg, bits: int, count: int) -> U32:
    """Uniform below 2^bits in every place."""
    words = prg.uint32((-(-bits // 32), count))
    if bits % 32:
        words[-1] >>= np.uint32(32 - bits % 32)
    return words


def random_below(prg: Prg, bound: int, count: int) -> U32:
    """Uniform below `bound` in every place: what is not below it is drawn again."""
    bits = bound.bit_length()
    words = random_words(prg, bits, count)
    again = _not_below(words, bound)
    while again.size:
        drawn = random_words(prg, bits, again.size)
        words[:, again] = drawn
        again = again[_not_below(drawn, bound)]
    return words


def _not_below(words: U32, bound: int) -> Index:
    few = np.flatnonzero(words[-1] >= np.uint32(bound >> (32 * (len(words) - 1))))  # or not far below
    above, equal = np.zeros(few.size, bool), np.ones(few.size, bool)
    for m in range(len(words) - 1, -1, -1):
        limit, word = np.uint32(bound >> (32 * m) & 0xFFFFFFFF), words[m, few]
        above |= equal & (word > limit)
        equal &= word == limit
    return few[above | equal]


def modulus(params: Parameters, k: int) -> int:
    """Q, the product of the first k primes."""
    return math.prod(primes_of(params)[:k])


@functools.lru_cache(maxsize=8)
def ring_of(params: Parameters) -> Narrow:
    return Narrow(params)


def room(params: Parameters, k: int) -> int:
    """Bits of a message at k primes, with all that hides it: a quarter of Q."""
    return math.floor(sum(math.log2(q) for q in primes_of(params)[:k])) - 2


def primes_for(params: Parameters, bits: int) -> int:
    """The fewest primes with that much room, or 0."""
    return next((k for k in range(1, params.count + 1) if room(params, k) >= bits), 0)


def opening(
    params: Parameters, label: str, count: int, polys: int, scale: float, bound: float, want: float, group: int = 1
) -> Opening:
    """How to refresh values up to ±bound from `scale` to the scale `want`; back at as few primes as can hold them.

    One prime is dropped at least, which takes the noise of re-randomising with it; two where a switching key was used.
    """
    message = math.log2(scale * bound) + PAIR_BITS
    least = min(params.count, KEEP + (1 if polys == 2 else 2))
    k = next((k for k in range(least, params.count + 1) if message <= longest(params, k)), 0)
    back = primes_for(params, math.ceil(math.log2(want * bound)) + 1)  # the mask may go round: it is taken off again
    if not k or not back:
        raise ParameterError(
            f"{label}: a message of {message:.0f} bits, hidden by {params.hiding}, does not fit into "
            f"{room(params, params.count)} bits; use more primes, or smaller scales"
        )
    lift = math.floor(longest(params, k) - message)
    mask, dropped = modulus(params, KEEP).bit_length(), modulus(params, k) // modulus(params, KEEP)
    factor, shift = fraction(want / 2 * dropped / math.ldexp(scale, lift))
    if fresh_bits(mask, factor, shift) > 32 * WORDS:
        raise ParameterError(f"{label}: what comes back has more than {32 * WORDS} bits; use smaller scales")
    sent = message + lift - math.log2(dropped)
    return Opening(label, count, polys, k, mask, sent, lift, factor, shift, back, group)


def longest(params: Parameters, k: int) -> float:
    """Bits of the longest message at k primes that is short enough, after dropping, to be hidden at KEEP of them."""
    dropped = modulus(params, k) // modulus(params, KEEP)
    return room(params, KEEP) - params.hiding + math.log2(dropped)


def fits(params: Parameters, scale: float, bound: float) -> bool:
    """Whether values up to ±bound at that scale can still be refreshed."""
    return math.log2(scale * bound) + PAIR_BITS <= longest(params, params.count)
