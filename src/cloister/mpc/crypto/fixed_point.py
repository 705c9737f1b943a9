"""Real numbers in a ring: x becomes round(x · 2^f) in Z_{2^64}, where NumPy's uint64 wraps by itself.

    encode     ⌊x · 2^f⌉ mod 2^64,  for |x| ≤ bound            error at most 2^-(f+1) per entry
    decode     the representative in [-2^63, 2^63), divided by 2^f
    check      parties · (bound · 2^f + 1/2) < 2^63            so that a sum over all parties cannot wrap

Rounding is to the nearest, ties to even. Entries outside the bound raise before anything is sent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from cloister.arrays import F64, U64, Array
from cloister.errors import DataError, ParameterError

LIMIT = 1 << 63


@dataclass(frozen=True, slots=True)
class FixedPoint:
    """A public agreement on how real numbers are written.

    Parameters
    ----------
    fraction_bits
        f, binary digits after the point.
    bound
        The largest absolute value that an entry may have.
    parties
        How many encoded vectors are summed at most.
    """

    fraction_bits: int
    bound: float
    parties: int = 1

    def __post_init__(self) -> None:
        check_range(self.fraction_bits, self.bound, self.parties)

    @property
    def resolution(self) -> float:
        """The step between two neighbouring numbers, 2^-f."""
        return math.ldexp(1.0, -self.fraction_bits)

    def encode(self, x: Array) -> U64:
        values = np.asarray(x)
        if values.dtype.kind not in "fiub":
            raise DataError(f"expected an array of real numbers, found dtype {values.dtype}")
        real = values.astype(np.float64)  # a copy, rounded in place below
        outside = int(np.count_nonzero(~(np.abs(real) <= self.bound)))  # NaN is not <= anything
        if outside:
            raise DataError(
                f"{outside} of {real.size} entries are missing, infinite or beyond ±{self.bound:g}, the bound agreed "
                "for this study; nothing was sent. Clean the data, or agree on a larger bound."
            )
        np.ldexp(real, self.fraction_bits, out=real)  # exact
        np.rint(real, out=real)
        return real.astype(np.int64).view(np.uint64)

    def decode(self, y: U64, *, factors: int = 1) -> F64:
        """Back to reals; a product of `factors` encoded numbers carries `factors` times the fraction bits."""
        if not isinstance(y, np.ndarray) or y.dtype != np.uint64:
            raise ParameterError(f"decode needs uint64, found {getattr(y, 'dtype', type(y).__name__)}")
        real = y.view(np.int64).astype(np.float64)
        return np.ldexp(real, -factors * self.fraction_bits, out=real)


def check_range(fraction_bits: int, bound: float, parties: int) -> None:
    """Raise unless parties · (bound · 2^f + 1/2) < 2^63, computed exactly."""
    if type(fraction_bits) is not int or not 0 <= fraction_bits < 63:
        raise ParameterError(f"fraction_bits must be a whole number from 0 to 62, got {fraction_bits!r}")
    if type(parties) is not int or parties < 1:
        raise ParameterError(f"parties must be a whole number of at least 1, got {parties!r}")
    if type(bound) not in (int, float) or not math.isfinite(bound) or bound <= 0:
        raise ParameterError(f"bound must be a positive number, got {bound!r}")
    reach = _reach(fraction_bits, bound, parties)
    if reach < LIMIT:
        return
    fits = [f for f in range(fraction_bits) if _reach(f, bound, parties) < LIMIT]
    advice = f"use at most {fits[-1]} fraction bits or a smaller bound" if fits else "use a smaller bound"
    raise ParameterError(
        f"{parties} parties with entries up to {bound:g} and {fraction_bits} fraction bits need "
        f"{int(reach).bit_length()} bits beside the sign, the ring has 63; the sum would wrap: {advice}."
    )


def _reach(fraction_bits: int, bound: float, parties: int) -> Fraction:
    return parties * (Fraction(bound) * (1 << fraction_bits) + Fraction(1, 2))
