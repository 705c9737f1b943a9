"""Tags of sums: one-time affine authentication of a sum of vectors, under a key that the aggregator does not hold.

    t_u = β_u + Σ_j α_j x_uj  mod 2^128      x_uj a signed 64-bit integer
    t   = Σ_u t_u             mod 2^128      equals Σ_u β_u + Σ_j α_j z_j if and only if z is accepted

The α_j (uniform 64-bit words) and the β_u (uniform modulo 2^128, one per summand) come from a key of this sum alone.

Forgery. An aggregator that does not hold the key sees z and the tags. The β_u are uniform and independent, so each t_u
is uniform whatever α and x_u are, and the tags are independent of α. Let it publish (z', t') with z' ≠ z. This pair is
accepted only if Σ_j α_j (z'_j - z_j) = t' - t modulo 2^128. Some d = z'_j - z_j is nonzero with |d| < 2^64, so at most
2^63 divides it as a power of two. For any values of the other α, the equation determines α_j modulo 2^65 or more, and
α_j is uniform on 2^64 values, so the probability is at most 2^-64. It does not matter how z' and t' depend on z and t:
scaling, negating, zeroing and adding a constant to a word are all covered. With z' = z, no other t' is accepted. Tags
of other sums do not help, because their keys are independent. With n verifiers and q sums under q keys, the probability
that any verifier accepts any forgery is at most n·q·2^-64, plus the advantage against AES-256 in counter mode and HKDF.

A summand that holds the key. Tags add up in the ring of the check itself: the secure sum adds the two words of a tag as
one number modulo 2^128. Hence t - Σ_u β_u - Σ_j α_j z_j is what the malicious summands added to their own tags, and
the check passes or fails whatever the others hold. Modulo a prime this is false: the words of the tags of honest
summands carry, a malicious summand can make a word wrap for some of their inputs only, and the abort shows which.

References
----------
[CW81] Wegman, Carter, JCSS 1981: affine universal hashing with a one-time key. [BDOZ11] Bendlin et al., EUROCRYPT
2011: tags that add up. [CDE+18] Cramer et al., CRYPTO 2018 (SPDZ2k): tags modulo a power of two larger than the words.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from cloister.arrays import U64
from cloister.mpc.crypto.prg import Prg

MODULUS = 1 << 128
HALF = 64  # bits of the low word
WORDS = 2  # of a tag: high, low
BLOCK = 1 << 14  # rows at a time: products of 16-bit limbs, summed over a block, are exact as floating point numbers


@dataclass(frozen=True, slots=True)
class TagKey:
    """α and the β_u of one sum. For one sum only."""

    alpha: U64 = field(repr=False)  # (m,)
    beta: tuple[int, ...] = field(repr=False)  # one per summand


def tag_key(key: bytes, summands: int, length: int) -> TagKey:
    """The key of one sum of vectors of this length, expanded from 32 bytes."""
    stream = Prg(key)
    beta = tuple(int.from_bytes(stream.bytes(16), "little") for _ in range(summands))
    return TagKey(stream.uint64(length), beta)


def tag(x: U64, key: TagKey, summand: int) -> U64:
    """t_u of the summand with this number, as two words."""
    return _split(key.beta[summand] + inner_product(key.alpha, x))


def check_tag(total: U64, words: U64, key: TagKey) -> bool:
    """Whether `words` is the tag of `total`, summed over all summands."""
    return np.array_equal(words, _split(sum(key.beta) + inner_product(key.alpha, total)))


def inner_product(alpha: U64, x: U64) -> int:
    """Σ_j α_j x_j mod 2^128, with α_j unsigned and x_j signed."""
    limbs = np.zeros((4, 4), dtype=object)  # Python's integers: Σ_j of limb a of α_j times limb b of x_j
    left, right = np.empty((min(BLOCK, len(x)), 4)), np.empty((min(BLOCK, len(x)), 4))
    for start in range(0, len(x), BLOCK):
        a, b = (np.ascontiguousarray(v[start : start + BLOCK], dtype="<u8") for v in (alpha, x))
        rows = len(b)
        left[:rows] = a.view("<u2").reshape(rows, 4)
        right[:rows] = b.view("<u2").reshape(rows, 4)
        right[:rows, 3] = b.view("<i2").reshape(rows, 4)[:, 3]  # the highest limb carries the sign
        limbs += (left[:rows].T @ right[:rows]).astype(np.int64).astype(object)
    return sum(int(limbs[a, b]) << 16 * (a + b) for a in range(4) for b in range(4)) % MODULUS


def _split(value: int) -> U64:
    value %= MODULUS
    return np.array([value >> HALF, value & ((1 << HALF) - 1)], dtype=np.uint64)
