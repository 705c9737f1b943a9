"""Two reals in one word of a secure sum, and noise for one. Local steps of protocols that add up long vectors.

    encode     word = hi · 2^32 + lo   mod 2^64,     hi, lo = ⌊x · 2^f⌉, signed
    add        words add up lane by lane, as long as no sum of lanes leaves [-2^31, 2^31)
    decode     lo = the low half as a signed number;  hi = (word - lo) / 2^32

A negative lo borrows from hi, and subtracting lo gives it back, so the lanes need no gap between them. f is the largest
for which parties · (bound · 2^f + 1/2) < 2^31.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from cloister.arrays import F64, U64
from cloister.errors import DataError, ParameterError
from cloister.mpc.crypto.entropy import Entropy, check_entropy
from cloister.mpc.crypto.fixed_point import FixedPoint

HALF = 1 << 31


@dataclass(frozen=True, slots=True)
class Code:
    """How a vector is written: entries up to ±bound, summed over so many parties; one or two to a word."""

    bound: float
    parties: int
    packed: bool = True

    def __post_init__(self) -> None:
        if not self.bound > 0 or not math.isfinite(self.bound) or self.parties < 1:
            raise ParameterError(f"expected a bound above 0 and at least one party, found {self.bound}, {self.parties}")
        if self.fraction_bits < 8:
            raise ParameterError(
                f"{self.parties} parties with entries up to {self.bound:g} leave {self.fraction_bits} fraction bits; "
                "agree on a smaller bound"
            )

    @property
    def fraction_bits(self) -> int:
        limit = HALF if self.packed else 1 << 62
        f = math.floor(math.log2(limit / (self.parties * self.bound)))
        while self.parties * (self.bound * 2.0**f + 0.5) >= limit:
            f -= 1
        return min(f, 40)

    @property
    def resolution(self) -> float:
        return math.ldexp(1.0, -self.fraction_bits)

    def words(self, length: int) -> int:
        return (length + 1) // 2 if self.packed else length

    def encode(self, x: F64) -> U64:
        if not self.packed:
            return FixedPoint(self.fraction_bits, self.bound, self.parties).encode(x)
        if not np.all(np.abs(x) <= self.bound):  # NaN is not <= anything
            raise DataError(f"entries of an update are missing or beyond ±{self.bound:g}; nothing was sent")
        fixed = np.zeros(2 * self.words(len(x)), np.int64)
        fixed[: len(x)] = np.rint(np.ldexp(x.astype(np.float64), self.fraction_bits))
        high, low = np.split(fixed, 2)
        return ((high << 32) + low).view(np.uint64)

    def decode(self, words: U64, length: int) -> F64:
        if not self.packed:
            return FixedPoint(self.fraction_bits, self.bound, self.parties).decode(words)
        whole = words.view(np.int64)
        low = (whole & 0xFFFFFFFF).astype(np.uint32).view(np.int32).astype(np.int64)
        high = (whole - low) >> 32
        joined = np.concatenate([high, low])[:length].astype(np.float64)
        return np.ldexp(joined, -self.fraction_bits, out=joined)


def gaussian(entropy: Entropy, n: int, sigma: float) -> F64:
    """Normal noise from secret randomness (Box-Muller on 53-bit uniforms); it is rounded to the code's grid later."""
    check_entropy(entropy)
    half = (n + 1) // 2
    bits = entropy.uint64(2 * half) >> np.uint64(11)
    u, v = np.split((bits.astype(np.float64) + 0.5) * 2.0**-53, 2)
    radius = sigma * np.sqrt(-2 * np.log(u))
    return np.concatenate([radius * np.cos(2 * np.pi * v), radius * np.sin(2 * np.pi * v)])[:n]
