"""A short key stretched into a long stream: AES-256 in counter mode, read as NumPy arrays.

    stream = AES_k(0) ‖ AES_k(1) ‖ ...                   128-bit big-endian counter, [SP800-38A] section 6.5

The arrays take their bytes from the stream in order, integers little endian, so the same calls with the same key
give the same arrays on every machine. A call goes on where the one before it stopped. A key starts one stream and
is never used for anything else, which is why the counter may start at zero.

The samplers reject or look up by value and do not run in constant time: what they draw must not be timed by others.

References
----------
[SP800-38A] NIST SP 800-38A, Recommendation for Block Cipher Modes of Operation, 2001.
[DDLL13] Ducas, Durmus, Lepoint, Lyubashevsky, CRYPTO 2013, section 6: cumulative distribution tables.
"""

from __future__ import annotations

import decimal
import functools
import math
import operator
import sys
from typing import TypeAlias, final

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from cloister.arrays import I64, U8, U32, U64, Array
from cloister.errors import ParameterError

Size: TypeAlias = int | tuple[int, ...]
Raw: TypeAlias = bytes  # inside the class, `bytes` is the method

KEY_BYTES = 32
MAX_SIGMA = 1024.0  # wider noise is no table; draw it with `below`
_ZEROS = memoryview(bytes(1 << 18))  # what is encrypted; small enough to stay in cache


@final
class Prg:
    """The stream of one 32-byte key; the key itself is not kept."""

    __slots__ = ("_stream",)

    def __init__(self, key: Raw) -> None:
        check_key(key)
        self._stream = Cipher(algorithms.AES(key), modes.CTR(Raw(16))).encryptor()

    def __repr__(self) -> str:
        return "Prg(...)"

    def bytes(self, n: int) -> Raw:
        return self._stream.update(Raw(n))

    def fill(self, out: Array) -> None:
        """Overwrite a C-contiguous array of integers with the next bytes of the stream."""
        if out.dtype.kind not in "iu" or not out.flags.c_contiguous or not out.flags.writeable:
            raise ParameterError(f"fill needs a writeable C-contiguous array of integers, found {out.dtype}")
        flat = out.reshape(-1).view(np.uint8).data
        for start in range(0, len(flat), len(_ZEROS)):
            part = flat[start : start + len(_ZEROS)]
            self._stream.update_into(_ZEROS[: len(part)], part)
        if sys.byteorder == "big":
            out.byteswap(inplace=True)

    def uint64(self, shape: Size) -> U64:
        out = np.empty(shape, np.uint64)
        self.fill(out)
        return out

    def uint32(self, shape: Size) -> U32:
        out = np.empty(shape, np.uint32)
        self.fill(out)
        return out

    def uint8(self, shape: Size) -> U8:
        out = np.empty(shape, np.uint8)
        self.fill(out)
        return out

    def bits(self, shape: Size) -> U8:
        """Uniform in {0, 1}; takes whole bytes, lowest bit first."""
        n = _count(shape)
        return np.unpackbits(self.uint8(-(-n // 8)), count=n, bitorder="little").reshape(shape)

    def below(self, n: int, shape: Size) -> U64:
        """Uniform in {0, ..., n - 1}, for 0 < n < 2**63: words at or above the last multiple of n are redrawn."""
        n = operator.index(n)
        if not 0 < n < 1 << 63:
            raise ParameterError(f"below(n) needs 0 < n < 2**63, got a number of {n.bit_length()} bits")
        out = self.uint64(_count(shape))
        last = np.uint64((1 << 64) - (1 << 64) % n - 1)
        again = np.flatnonzero(out > last)
        while again.size:
            out[again] = self.uint64(again.size)
            again = again[out[again] > last]
        out %= np.uint64(n)
        return out.reshape(shape)

    def ternary(self, shape: Size) -> I64:
        """Uniform in {-1, 0, 1}: a byte modulo 3, where the byte 255 is redrawn."""
        out = self.uint8(_count(shape))
        again = np.flatnonzero(out == 255)
        while again.size:
            out[again] = self.uint8(again.size)
            again = again[out[again] == 255]
        out %= np.uint8(3)
        return (out.astype(np.int64) - 1).reshape(shape)

    def gaussian(self, shape: Size, sigma: float = 3.2) -> I64:
        """Discrete Gaussian, P(k) ∝ exp(-k² / 2σ²) on the integers, by inversion of a 64-bit table [DDLL13]."""
        table = gaussian_table(sigma)
        reached = np.searchsorted(table, self.uint64(_count(shape)), side="right")
        return (reached.astype(np.int64) - table.size // 2).reshape(shape)


def expand(key: bytes, length: int) -> U64:
    """The first `length` 64-bit words of the stream of `key`."""
    return Prg(key).uint64(length)


def block_of(key: bytes, counter: int) -> bytes:
    """One block of the stream of `key`, by its 128-bit counter."""
    check_key(key)
    return Cipher(algorithms.AES(key), modes.CTR(counter.to_bytes(16, "big"))).encryptor().update(bytes(16))


def check_key(key: bytes) -> None:
    if not isinstance(key, bytes) or len(key) != KEY_BYTES:
        found = f"{len(key)} bytes" if isinstance(key, bytes) else type(key).__name__
        raise ParameterError(f"a key has {KEY_BYTES} bytes, found {found}")


@functools.cache
def gaussian_table(sigma: float) -> U64:
    """⌊2^64 · P(X ≤ k)⌋ for k = -τ, ..., τ - 1, where P(|X| > τ) < 2^-64.

    Exact: 60 decimal digits, against the 20 of a 64-bit word. The sampler is therefore within (2τ + 1) · 2^-64 of
    the discrete Gaussian in statistical distance.
    """
    if not 0 < sigma <= MAX_SIGMA:
        raise ParameterError(f"sigma must lie in (0, {MAX_SIGMA:g}], got {sigma}")
    tail = math.ceil(9.3 * sigma) + 1
    with decimal.localcontext(decimal.Context(prec=60)):
        two_variance = 2 * decimal.Decimal(sigma) ** 2
        half = [(-decimal.Decimal(k * k) / two_variance).exp() for k in range(tail + 1)]
        total = 2 * sum(half) - half[0]
        mass, table = decimal.Decimal(0), []
        for k in range(-tail, tail):
            mass += half[abs(k)]
            table.append(int(mass / total * (1 << 64)))
    table_of_words = np.array(table, np.uint64)
    table_of_words.flags.writeable = False
    return table_of_words


def _count(shape: Size) -> int:
    return math.prod(shape) if isinstance(shape, tuple) else int(shape)
