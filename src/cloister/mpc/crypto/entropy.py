"""Entropy: where secrets come from. The operating system, and nothing else.

Randomness is an argument. `entropy: Entropy` makes keys, shares and masks and is never repeatable; `rng:
numpy.random.Generator` makes statistics and is seeded. They share no type, and whatever spends a secret calls
`check_entropy`, so that one handed over for the other raises instead of working.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeAlias, final

import numpy as np

from cloister.arrays import U64
from cloister.errors import ParameterError
from cloister.mpc.crypto.prg import KEY_BYTES, Prg, Size

Raw: TypeAlias = bytes  # inside the class, `bytes` is the method


@final
class Entropy:
    """Secret randomness of one party.

    Parameters
    ----------
    source
        n → n bytes. Only tests pass one, to repeat a transcript; all other code writes `Entropy()`.
    """

    __slots__ = ("_source",)

    def __init__(self, source: Callable[[int], Raw] = os.urandom) -> None:
        if isinstance(getattr(source, "__self__", source), np.random.Generator | np.random.RandomState):
            raise ParameterError(
                "a NumPy generator is not a source of secrets; write Entropy(), or in a test Entropy(Prg(key).bytes)"
            )
        self._source = source

    def __repr__(self) -> str:
        return "Entropy(...)"

    def bytes(self, n: int) -> Raw:
        drawn = self._source(n)
        if type(drawn) is not Raw or len(drawn) != n:
            raise ParameterError(f"the source of entropy must give exactly {n} bytes; it gave something else")
        return drawn

    def integer_below(self, n: int) -> int:
        """Uniform in {0, ..., n - 1}, for n of any size: numbers of n's length, until one is below n."""
        if n < 1:
            raise ParameterError("integer_below(n) needs n >= 1")
        bits = (n - 1).bit_length()
        size = -(-bits // 8)
        while True:
            x = int.from_bytes(self.bytes(size), "big") >> (8 * size - bits)
            if x < n:
                return x

    def uint64(self, shape: Size) -> U64:
        """Uniform words, from a fresh key: as unpredictable as AES-256, and fast for millions of entries."""
        return self.prg().uint64(shape)

    def prg(self) -> Prg:
        return Prg(self.bytes(KEY_BYTES))


def check_entropy(entropy: Entropy) -> None:
    """Raise unless `entropy` is one; NumPy generators have a method `bytes`, too."""
    if type(entropy) is not Entropy:
        raise ParameterError(f"secrets are drawn from an Entropy, found {type(entropy).__name__}; pass Entropy()")
