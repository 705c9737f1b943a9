"""Which primes a CKKS ciphertext has, what it can hold, and how much noise it carries: numbers only, no ciphertext.

A ciphertext is at *k primes* of the L data primes. `Parameters` lays the primes out as

    base primes          always kept: room for a masked refresh or a flooded decryption
    level primes         `per_level` of them are spent by each rescaling, and make up the scale Δ
    one special prime    for switching keys only

What hides something statistically hides it to 2^-SECURITY for a whole run: all coefficients of up to MASKED
polynomials, or of OPENINGS openings under one key, together (`Ring.spread` says why that costs square roots). Noise is
about 2^12 at any scale, so that opening to three digits needs Δ near 2^84, more than one 60-bit prime.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from cloister.crypto.lattice.ring import SECURE_BITS, SIGMA, check_secure
from cloister.errors import ParameterError

SECURITY = 40  # bits, of everything that hides statistically
MASKED = 1 << 12  # polynomials that are refreshed in one run, at most
OPENINGS = 64  # under one key, at most
HIDING_BITS = SECURITY + MASKED.bit_length() // 2  # of a mask over the message
WRAP_BITS = 36  # a coefficient of a refresh wraps modulo Q, and spoils the result, with probability 2^-this


def flood_bits(params: Parameters, noise: float) -> int:
    """Bits of the flood (`Ring.spread`) over noise of that standard deviation per coefficient."""
    return math.ceil(math.log2(noise) + SECURITY + math.log2(params.degree * OPENINGS) / 2)


def base_bits(scale_bits: int, value_bits: int, parties: int) -> int:
    """Bits of the base primes together: one mask uniform modulo their product, the others, and the message."""
    return scale_bits + value_bits + HIDING_BITS + (parties - 1).bit_length() // 2 + 1 + WRAP_BITS + 1


@dataclass(frozen=True, slots=True)
class Parameters:
    """Public; part of every run id.

    Parameters
    ----------
    degree
        N, the ring degree; N/2 slots.
    base, base_bits
        Primes that are never spent, and their size.
    levels, per_level, level_bits
        How many rescalings, how many primes each spends, and their size; Δ = 2^(per_level · level_bits).
    special_bits
        Size of the prime for switching keys.
    given_scale_bits
        log2 Δ where a circuit plans the scales between its rescalings itself; 0 otherwise.
    """

    degree: int
    base: int = 3
    base_bits: int = 45
    levels: int = 4
    per_level: int = 2
    level_bits: int = 39
    special_bits: int = 60
    given_scale_bits: int = 0

    def __post_init__(self) -> None:
        if min(self.base, self.levels, self.per_level) < 1 or max(self.bits) > 60 or min(self.bits) < 20:
            raise ParameterError("a CKKS chain needs base and level primes of 20 to 60 bits")
        check_secure(self.degree, sum(self.bits))

    @property
    def bits(self) -> tuple[int, ...]:
        data = (self.base_bits,) * self.base + (self.level_bits,) * (self.levels * self.per_level)
        return (*data, self.special_bits)

    @property
    def about(self) -> str:
        """In words, for reports."""
        return (
            f"log N {self.degree.bit_length() - 1}, log Q {sum(self.bits)} of {SECURE_BITS[self.degree]} at 128 bits,"
            f" scale 2^{self.scale_bits}, {self.levels} levels, {OPENINGS} openings per key"
        )

    @property
    def slots(self) -> int:
        return self.degree // 2

    @property
    def scale_bits(self) -> int:
        return self.given_scale_bits or self.per_level * self.level_bits

    @property
    def scale(self) -> float:
        return math.ldexp(1.0, self.scale_bits)

    @property
    def top(self) -> int:
        """L, all data primes."""
        return len(self.bits) - 1

    def primes_at(self, level: int) -> int:
        """Primes of a ciphertext that can still be rescaled `level` times."""
        return self.base + level * self.per_level


def choose(
    levels: int, slots_needed: int, *, scale_bits: int = 78, value_bits: int = 6, parties: int = 16
) -> Parameters:
    """The smallest secure ring that carries so many levels at that scale, with room for refreshes between them."""
    per_level = -(-scale_bits // 59)
    level_bits = -(-scale_bits // per_level)
    need = base_bits(per_level * level_bits, value_bits, parties)
    base = -(-need // 60)
    each = -(-need // base)
    for degree, most in SECURE_BITS.items():
        left = most - base * each - levels * per_level * level_bits
        if degree // 2 >= slots_needed and left >= min(60, each, level_bits) - 2:
            return Parameters(degree, base, each, levels, per_level, level_bits, min(60, left))
    raise ParameterError(
        f"no ring of 128-bit security holds {slots_needed} slots, {levels} levels and a scale of 2^{scale_bits};"
        " use fewer filters, markers or classes, or a smaller scale"
    )


def encryption_noise(params: Parameters, parties: int) -> float:
    """Standard deviation of a fresh ciphertext's noise, per coefficient: u·Σe_i and e·Σs_i."""
    return SIGMA * math.sqrt(params.degree * (2 / 3) * 2 * parties)


def rounding_noise(params: Parameters, parties: int) -> float:
    """Standard deviation of a rescaled ciphertext's noise, per coefficient: rounding times the sum of secrets."""
    n = params.degree
    rounding = n * (2 / 3) * parties / 12 + 1 / 12
    digits = sum(4.0 ** (bits - params.special_bits) for bits in params.bits[:-1])
    switching = n / 12 * SIGMA**2 * parties * digits
    return math.sqrt(rounding + switching)
