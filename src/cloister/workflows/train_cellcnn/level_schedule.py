"""Primes and scales of the encrypted CellCnn step: which are spent where, and how much each rounding weighs in Z.

A site computes, on ciphertexts but for x, with p and q from the coefficients of E (`models.cellcnn.error_polynomial`),

    U = Σ_j x·M                     one prime (x is plain: any scale will do for it)      scale 2^u
    B = U² + p                      d1 primes                                             scale 2^w
    Q = B² + q                      d2 primes                                             scale 2^(2w - d2·b)
    Z = (c5·x·U)·Q + (x·c2)·U² + x·c0       d3 primes, one before for c5·x·U              scale Δ

so that Z = x·(c0 + c1·U + c2·U² + c3·U³ + c5·U⁵). Δ lies between one prime and two, and is no whole number of primes;
d = (2, 1, 2) primes of b ≈ 2/3·log2 Δ bits do for scales up to 2^77, (2, 2, 2) of half of it beyond. What a rescaling
spends more than Δ comes back as scale of U, of B and of c5·x·U: w is chosen so that their roundings weigh least.
Rounding of plain x has nothing to do with the key, needs no flooding, and is far below anything that is compared.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np

from cloister.errors import ParameterError
from cloister.models import cellcnn
from cloister.mpc.crypto.ckks import scheme as ckks
from cloister.mpc.crypto.ckks.parameters import MOST_BITS, specials_in
from cloister.mpc.crypto.rns.ring import SECURE_BITS

SPENT = {6: (2, 1, 2), 7: (2, 2, 2)}  # by the number of level primes, one of them for x·M
PRODUCT = 2  # primes that a product at the aggregator spends
QUERY = 4  # primes that the product of an encrypted query spends
LARGEST_U, LARGEST_X = 8.0, 4.0  # for which the noise of Z is bounded


@dataclass(frozen=True, slots=True)
class Ladder:
    """Primes (k) and scales (as bits) at each stage."""

    ckks: ckks.Parameters
    interval: float

    def __post_init__(self) -> None:
        if self.ckks.per_level != 1 or self.ckks.levels not in SPENT:
            there = f"{self.ckks.levels} levels of {self.ckks.per_level}"
            raise ParameterError(f"training needs 6 or 7 level primes, one per level; these parameters have {there}")

    @property
    def spent(self) -> tuple[int, int, int]:
        return SPENT[self.ckks.levels]

    @property
    def primes(self) -> tuple[int, int, int, int]:
        """Of U, B, Q and Z."""
        d1, d2, d3 = self.spent
        base = self.ckks.base
        return base + d1 + d2 + d3, base + d2 + d3, base + d3, base

    @property
    def one(self) -> int:
        """Primes of what the aggregator multiplies."""
        return self.ckks.base + PRODUCT

    @property
    def query(self) -> int:
        """Primes of an encrypted query.

        Its scale is so large that its own noise vanishes in the product with a model whose coefficients are only known
        to lie within the tolerance of `collective_range`, far beyond what an honest training makes.
        """
        return self.ckks.base + QUERY

    @property
    def quintic(self) -> tuple[float, float, float]:
        """c5, p, q with c1·u + c3·u³ + c5·u⁵ = c5·u·((u² + p)² + q)."""
        _, c1, _, c3, c5 = cellcnn.error_polynomial(self.interval, np.zeros((1, 1)))
        p = c3 / (2 * c5)
        return c5, p, c1 / c5 - p * p

    @property
    def square_bits(self) -> float:
        """w, to the quarter of a bit."""
        return _balanced(self)[0]

    @property
    def z_noise(self) -> float:
        """Standard deviation of the noise in a slot of Z, in units of a rounding, for |U| ≤ 8 and |x| ≤ 4."""
        return _balanced(self)[1]

    def weights(self, w: float) -> float:
        """What the roundings of U, B, Q, c5·x·U and Z weigh together in Z, at the worst |U|."""
        d1, d2, d3 = self.spent
        b, scale = self.ckks.level_bits, self.ckks.scale_bits
        c5, p, q = self.quintic
        u = np.linspace(0, LARGEST_U, 101)
        c2 = np.abs(cellcnn.error_polynomial(self.interval, np.ones((1, 1)))[2]).max()
        Q = (u * u + p) ** 2 + q
        by_B = np.abs(2 * c5 * u * (u * u + p)) + c2
        by_U = np.abs(c5 * Q) + 2 * u * by_B
        q_bits = 2 * w - d2 * b
        summed = 64.0  # the noise of U is that of up to 128 markers and their rotations
        terms = (
            by_U * summed * 2 ** (scale - (w + d1 * b) / 2) * LARGEST_X,
            by_B * 2.0 ** (scale - w) * LARGEST_X,
            np.abs(c5 * u) * 2.0 ** (scale - q_bits) * LARGEST_X,
            np.abs(Q) * 2.0 ** (q_bits - d3 * b),
            np.ones_like(u),
        )
        return float(np.sqrt(sum(t**2 for t in terms)).max())


@functools.lru_cache(maxsize=64)
def _balanced(ladder: Ladder) -> tuple[float, float]:
    scale = ladder.ckks.scale_bits
    tried = [scale + step / 4 for step in range(-80, 81)]
    best = min(tried, key=ladder.weights)
    return best, ladder.weights(best)


def chain(slots: int, *, scale_bits: int, value_bits: int = 6, parties: int = 16) -> ckks.Parameters:
    """The parameters of that scale on a ring of `slots` slots; refused if they are not secure there."""
    level_bits, levels = math.ceil((2 * scale_bits - 4) / 3), 6
    if level_bits > MOST_BITS:
        level_bits, levels = min(scale_bits // 2 + 5, 48 if scale_bits <= 92 else MOST_BITS), 7
    need = ckks.base_bits(scale_bits, value_bits, parties)
    base = math.ceil(need / MOST_BITS)
    each = math.ceil(need / base)
    special = specials_in(SECURE_BITS[2 * slots] - base * each - levels * level_bits, base + levels)
    if special is None:
        raise ParameterError(f"a scale of 2^{scale_bits} leaves no room for switching keys in a ring of {slots} slots")
    return ckks.Parameters(2 * slots, base, each, levels, 1, level_bits, special[0], scale_bits, special[1])
