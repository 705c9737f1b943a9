"""Tags of sums: one-time affine authentication of a sum of vectors, under a key that the aggregator does not hold.

    t_u = β_u + Σ_j α_j x_uj  mod p        p = 2^89 - 1; x_uj a signed 64-bit integer
    t   = Σ_u t_u             mod p        equals Σ_u β_u + Σ_j α_j z_j if and only if z is accepted

The α_j (uniform 64-bit words) and the β_u (uniform modulo p, one per summand) come from a key of this sum alone.

Forgery. An aggregator that does not hold the key sees z and the tag words. The β_u are uniform and independent, so each
t_u is uniform modulo p whatever α and x_u are, and the tag words are independent of α. Let it publish (z', t') with
z' ≠ z. This pair is accepted only if Σ_j α_j (z'_j - z_j) = t' - t modulo p. Some d = z'_j - z_j is nonzero with
|d| < 2^64 < p, so d is invertible modulo p, and for any values of the other α exactly one residue α_j solves the
equation. α_j is uniform on 2^64 residues, so the probability is at most 2^-64. It does not matter how z' and t' depend
on z and t: scaling, negating, zeroing and adding p to a word are all covered. With z' = z, no other t' is accepted.
Tags of other sums do not help, because their keys are independent. With n verifiers and q sums under q keys, the
probability that any verifier accepts any forgery is at most n·q·2^-64, plus the advantage against AES-256 in counter
mode and HKDF.

A summand's tag travels as two words of at most 45 bits, so sums of up to 2^18 tags do not wrap. Sums of such words
depend on the single tags through their carries. Therefore the aggregator publishes the reduced tag (`reduce_tag`), a
function of z and the key: a verifier, who holds the key, learns nothing from it beyond z.

References
----------
[CW81] Wegman, Carter, JCSS 1981: affine universal hashing with a one-time key. [BDOZ11] Bendlin et al., EUROCRYPT
2011: tags that add up.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from cloister.arrays import U64
from cloister.crypto.prg import Prg

PRIME = (1 << 89) - 1
HALF = 44  # bits of the low word
WORDS = 2  # of a tag
BLOCK = 1 << 14  # rows at a time: products of 16-bit limbs, summed over a block, are exact as floating point numbers
_DRAW = 24  # bytes behind one β: 2^-103 from uniform modulo p


@dataclass(frozen=True, slots=True)
class TagKey:
    """α and the β_u of one sum. For one sum only."""

    alpha: U64 = field(repr=False)  # (m,)
    beta: tuple[int, ...] = field(repr=False)  # one per summand


def tag_key(key: bytes, summands: int, length: int) -> TagKey:
    """The key of one sum of vectors of this length, expanded from 32 bytes."""
    stream = Prg(key)
    beta = tuple(int.from_bytes(stream.bytes(_DRAW), "little") % PRIME for _ in range(summands))
    return TagKey(stream.uint64(length), beta)


def tag(x: U64, key: TagKey, summand: int) -> U64:
    """t_u of the summand with this number, as two words."""
    return _split(key.beta[summand] + inner_product(key.alpha, x))


def reduce_tag(words: U64) -> U64:
    """The tag of a sum from the sums of the two words of its summands' tags. Needs no key."""
    high, low = (int(word) for word in words)
    return _split((high << HALF) + low)


def check_tag(total: U64, words: U64, key: TagKey) -> bool:
    """Whether `words` is the reduced tag of `total`."""
    return np.array_equal(words, _split(sum(key.beta) + inner_product(key.alpha, total)))


def inner_product(alpha: U64, x: U64) -> int:
    """Σ_j α_j x_j mod p, with α_j unsigned and x_j signed."""
    limbs = np.zeros((4, 4), dtype=object)  # Python's integers: Σ_j of limb a of α_j times limb b of x_j
    left, right = np.empty((min(BLOCK, len(x)), 4)), np.empty((min(BLOCK, len(x)), 4))
    for start in range(0, len(x), BLOCK):
        a, b = (np.ascontiguousarray(v[start : start + BLOCK], dtype="<u8") for v in (alpha, x))
        rows = len(b)
        left[:rows] = a.view("<u2").reshape(rows, 4)
        right[:rows] = b.view("<u2").reshape(rows, 4)
        right[:rows, 3] = b.view("<i2").reshape(rows, 4)[:, 3]  # the highest limb carries the sign
        limbs += (left[:rows].T @ right[:rows]).astype(np.int64).astype(object)
    return sum(int(limbs[a, b]) << 16 * (a + b) for a in range(4) for b in range(4)) % PRIME


def _split(value: int) -> U64:
    value %= PRIME
    return np.array([value >> HALF, value & ((1 << HALF) - 1)], dtype=np.uint64)
