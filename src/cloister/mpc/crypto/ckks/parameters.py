"""Which primes a CKKS ciphertext has, what it can hold, and how much noise it carries: numbers only, no ciphertext.

A ciphertext is at *k primes* of the L data primes. `Parameters` lays the primes out as

    base primes          always kept: room for a masked refresh or a flooded decryption
    level primes         `per_level` of them are spent by each rescaling, and make up the scale Δ
    special primes       for switching keys only: as many as a digit has (`lattice.bases`), the more the fewer digits

All are below 2^50 (`lattice.float_kernels`).

What hides something statistically hides it to 2^-SECURITY for a whole run: all coefficients of up to MASKED
polynomials, or of OPENINGS openings under one key, together (`Ring.spread` says why that costs square roots). Noise is
about 2^12 at any scale, so that opening to three digits needs Δ near 2^84, more than one 60-bit prime.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from cloister.errors import ParameterError
from cloister.mpc.crypto.rns.ring import SECURE_BITS, SIGMA, check_secure

SECURITY = 40  # bits, of everything that hides statistically
MASKED = 1 << 12  # polynomials that are refreshed in one run, at most
OPENINGS = 64  # under one key, at most
HIDING_BITS = SECURITY + MASKED.bit_length() // 2  # of a mask over the message
MOST_BITS = 50  # of a prime
MOST_SPECIALS = 6
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
    special_bits, specials
        Size and number of the primes for switching keys.
    given_scale_bits
        log2 Δ where a circuit plans the scales between its rescalings itself; 0 otherwise.
    """

    degree: int
    base: int = 3
    base_bits: int = 45
    levels: int = 4
    per_level: int = 2
    level_bits: int = 39
    special_bits: int = MOST_BITS
    given_scale_bits: int = 0
    specials: int = 1

    def __post_init__(self) -> None:
        least = min(self.base, self.levels, self.per_level, self.specials)
        if least < 1 or max(self.bits) > MOST_BITS or min(self.bits) < 20:
            raise ParameterError(f"a CKKS chain needs base, level and special primes of 20 to {MOST_BITS} bits")
        check_secure(self.degree, sum(self.bits))

    @property
    def bits(self) -> tuple[int, ...]:
        data = (self.base_bits,) * self.base + (self.level_bits,) * (self.levels * self.per_level)
        return data + (self.special_bits,) * self.specials

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
        return len(self.bits) - self.specials

    @property
    def digits(self) -> int:
        """Pairs of a switching key."""
        return -(-self.top // self.specials)

    def primes_at(self, level: int) -> int:
        """Primes of a ciphertext that can still be rescaled `level` times."""
        return self.base + level * self.per_level


def chain_primes(params: Parameters) -> tuple[int, ...]:
    """The largest primes of the sizes asked for that have a 2N-th root of unity, all different."""
    step = 2 * params.degree
    found: dict[int, list[int]] = {}
    for bits in dict.fromkeys(params.bits):
        q, found[bits] = (1 << bits) // step * step + 1, []
        while len(found[bits]) < params.bits.count(bits):
            q -= step
            if q < 1 << (bits - 1):
                raise ParameterError(f"there are not enough primes of {bits} bits for ring degree {params.degree}")
            if is_prime(q):
                found[bits].append(q)
    return tuple(found[bits].pop(0) for bits in params.bits)


def is_prime(n: int) -> bool:
    """Miller and Rabin's test with the bases that decide all odd n below 2^64."""
    odd, twos = n - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for base in (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37):
        x = pow(base, odd, n)
        if base % n and x not in (1, n - 1) and not any((x := x * x % n) == n - 1 for _ in range(twos - 1)):
            return False
    return True


def choose(
    levels: int, slots_needed: int, *, scale_bits: int = 78, value_bits: int = 6, parties: int = 16
) -> Parameters:
    """The smallest secure ring that carries so many levels at that scale, with room for refreshes between them."""
    per_level = -(-scale_bits // MOST_BITS)
    level_bits = -(-scale_bits // per_level)
    need = base_bits(per_level * level_bits, value_bits, parties)
    base = -(-need // MOST_BITS)
    each = -(-need // base)
    for degree, most in SECURE_BITS.items():
        left = most - base * each - levels * per_level * level_bits
        special = specials_in(left, base + levels * per_level)
        if degree // 2 >= slots_needed and special is not None:
            return Parameters(degree, base, each, levels, per_level, level_bits, special[0], 0, special[1])
    raise ParameterError(
        f"no ring of 128-bit security holds {slots_needed} slots, {levels} levels and a scale of 2^{scale_bits};"
        " use fewer filters, markers or classes, or a smaller scale"
    )


def specials_in(bits: int, data: int) -> tuple[int, int] | None:
    """Size and number of the special primes that so many bits hold, for so many data primes; none is `None`."""
    count = min(bits // MOST_BITS, MOST_SPECIALS, data)
    return (MOST_BITS, count) if count > 0 else None


def encryption_noise(params: Parameters, parties: int) -> float:
    """Standard deviation of a fresh ciphertext's noise, per coefficient: u·Σe_i and e·Σs_i."""
    return SIGMA * math.sqrt(params.degree * (2 / 3) * 2 * parties)


def rounding_noise(params: Parameters, parties: int) -> float:
    """Standard deviation of a rescaled ciphertext's noise, per coefficient: rounding times the sum of secrets."""
    n = params.degree
    rounding = n * (2 / 3) * parties / 12 + 1 / 12
    data, size, P = params.bits[: params.top], params.specials, params.specials * params.special_bits
    digits = sum(4.0 ** (sum(data[at : at + size]) - P) for at in range(0, params.top, size))
    switching = n / 12 * SIGMA**2 * parties * digits
    return math.sqrt(rounding + switching)
