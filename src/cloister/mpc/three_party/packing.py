"""How words of verified sharing travel: whole bytes, or planes of bits where these are shorter.

A plane holds one bit of every word, 64 words in one: row b of (bits, ⌈n/64⌉) holds bit b. Words of 13 bits take 13 bits
each as planes, and 16 as bytes. Bits above the ring are dropped: they hold parts of products, which must not be sent.
"""

from __future__ import annotations

import math

import numpy as np

from cloister.arrays import U8, U64
from cloister.mpc.crypto import gf64
from cloister.mpc.crypto.replicated import Ring, Words
from cloister.mpc.crypto.share_proofs import raw, words


def planes_of(x: Words, rows: int) -> U64:
    """Bits 0..rows-1 of all words, one plane each."""
    flat = np.zeros(-(-x.size // 64) * 64, np.uint64)
    flat[: x.size] = x.reshape(-1)
    planes: U64 = gf64.to_planes(flat, rows)
    return planes


def _as_planes(count: int, ring: Ring) -> int | None:
    """Bytes of so many words as planes, if that is less than whole bytes."""
    size = 8 * ring.bits * -(-count // 64)
    return size if size < count * ring.size else None


def packed_size(count: int, ring: Ring) -> int:
    return _as_planes(count, ring) or count * ring.size


def packed(x: Words, ring: Ring) -> U8:
    if _as_planes(x.size, ring) is None:
        return ring.to_bytes(x.astype(ring.dtype, copy=False))
    return raw(planes_of(x, ring.bits))


def unpacked(data: U8, ring: Ring, shape: tuple[int, ...]) -> Words:
    count = math.prod(shape)
    if _as_planes(count, ring) is None:
        return ring.from_bytes(data, shape)
    out: Words = gf64.to_words(words(data).reshape(ring.bits, -1))[:count].reshape(shape).astype(ring.dtype, copy=False)
    return out
