"""Turning slots: X → X^g moves what a ciphertext holds from token to token, and takes its key along.

Slots are a cycle, 5^0, 5^1, …: with P tokens of S samples each, token t of sample s stands at 5^(t·S + s), and
g = 5^(r·S) brings token t + r to where t was. In NTT form that is a change of order, which costs nothing and adds no
noise; what it gives is under σ_r(s), the turned key. The way back to s goes by switching keys, whose noise only long
messages can bear: so products are taken of turned ciphertexts, and switched afterwards.

An owner gives keys for few turns, r = 1, …, B - 1 and B, 2B, …, P - B, two for each: of σ_r(s) and of s·σ_r(s).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from cloister.arrays import C128, F64, I64
from cloister.errors import ParameterError
from cloister.mpc.crypto.rns.ring import bit_reversed

POWERS = 1  # switching keys before those of turns: that of s²


@dataclass(frozen=True, slots=True)
class Turns:
    """Which turns of P tokens there are keys for, and where these stand among all switching keys."""

    tokens: int  # P, a power of two

    def __post_init__(self) -> None:
        if self.tokens < 1 or self.tokens & (self.tokens - 1):
            raise ParameterError(f"tokens that share ciphertexts are 1, 2, 4, 8, …, found {self.tokens}")

    @property
    def step(self) -> int:
        """B."""
        return 1 << (self.tokens.bit_length() // 2)

    @property
    def small(self) -> range:
        return range(min(self.step, self.tokens))

    @property
    def large(self) -> range:
        return range(0, self.tokens, self.step)

    @property
    def every(self) -> tuple[int, ...]:
        return (*self.small[1:], *self.large[1:])

    @property
    def count(self) -> int:
        """How many keys an owner gives for turns."""
        return 2 * len(self.every)

    def key(self, r: int, *, times_s: bool = False) -> int:
        """The number of the key of σ_r(s), or of s·σ_r(s)."""
        return POWERS + 2 * self.every.index(r % self.tokens) + int(times_s)


def exponent(degree: int, tokens: int, r: int) -> int:
    """The g of a turn by r tokens."""
    return pow(5, degree // 2 // tokens * (r % tokens), 2 * degree)


@functools.lru_cache(maxsize=256)
def order(degree: int, tokens: int, r: int) -> I64:
    """Where the values of a polynomial in NTT form come from when it is turned by r tokens."""
    powers = 2 * bit_reversed(degree) + 1  # value i is that at ψ^powers[i]
    at = np.empty(2 * degree, np.int64)
    at[powers] = np.arange(degree)
    return np.asarray(at[powers * exponent(degree, tokens, r) % (2 * degree)])


@functools.lru_cache(maxsize=16)
def slots(degree: int, tokens: int) -> I64:
    """The slots of `encode` in which token t of sample s stands, (P, S)."""
    powers, found = 1, np.empty(degree // 2, np.int64)
    for i in range(degree // 2):
        found[i] = min(powers, 2 * degree - powers) // 2  # a real value is its own conjugate
        powers = powers * 5 % (2 * degree)
    return found.reshape(tokens, -1)


def spread(x: F64, degree: int) -> F64:
    """Values (n, P, samples) of tokens, as `encrypt` takes them, (n, N/2); fewer samples are repeated."""
    at = slots(degree, x.shape[1])
    out = np.empty((len(x), degree // 2))
    out[:, at] = np.take(x, np.arange(at.shape[1]) % x.shape[2], axis=2)
    return out


# ---- encoding: slot j is the value at ζ^(2j+1) -----------------------------------------------------------------------


@functools.lru_cache(maxsize=4)
def _zeta(degree: int) -> C128:
    return np.asarray(np.exp(1j * np.pi * np.arange(degree) / degree), np.complex128)


def encode(x: F64, degree: int, scale: float) -> I64:
    """Coefficients of up to N/2 real slots; the others are zero."""
    z = np.zeros(degree)
    z[: len(x)] = x
    z[degree - len(x) :] = x[::-1]
    return np.rint((np.fft.fft(z) / degree / _zeta(degree)).real * scale).astype(np.int64)


def decode(m: F64, scale: float, count: int) -> F64:
    z = np.fft.ifft(m * _zeta(len(m))) * len(m)
    return np.asarray(z.real[:count] / scale)
