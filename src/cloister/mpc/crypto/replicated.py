"""Arithmetic of three-party replicated sharing that needs no other party.

    x = x_0 + x_1 + x_2 mod 2^κ      party i holds (x_i, x_{i+1}); bits are shared alike, with ⊕ for +
    k_i                              a key that parties i and i - 1 have in common, and F(k_i) its stream

A ring Z_{2^κ} lies in words of 32 bits (κ ≤ 32) or 64 bits; a word travels modulo 2^κ, as ⌈κ/8⌉ bytes. Bits are kept as
*planes*: plane b holds bit b of eight values a byte, so that one XOR or AND works on as many comparisons as there are
bits in a register.

The sum u + v of a word u that one party knows and a word v that the two others know overflows a digit of w bits
where a polynomial in the bits of u says so, whose coefficients depend on v alone. Whoever shares the monomials of a
digit of u (2^w - 1 of them) therefore gives the holders of v shares of *generate* and *propagate* of that digit without
further words: with w = 3 a carry costs the same bytes as bit by bit, in a third of the rounds.

References
----------
[AFL+16] Araki, Furukawa, Lindell, Nof, Ohara, CCS 2016: replicated sharing, multiplication with one word per party.
[MR18] Mohassel, Rindal, ABY3, CCS 2018: bit planes, injection of bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numba import njit

from cloister.arrays import F64, I64, U8, Array, Index
from cloister.errors import ParameterError
from cloister.mpc.crypto.prg import Prg

Words: TypeAlias = Array  # uint32 or uint64, as the ring says

DIGIT = 3  # bits of one digit in a carry chain
MANTISSA = 53  # bits that a float64 adds and multiplies exactly


@dataclass(frozen=True, slots=True)
class Ring:
    """Z_{2^bits}, signed when it is read: values lie in [-2^(bits-1), 2^(bits-1))."""

    bits: int

    def __post_init__(self) -> None:
        if not 2 <= self.bits <= 64:
            raise ParameterError(f"a ring has 2 to 64 bits, found {self.bits}; the public bounds ask for too much")

    @classmethod
    def holding(cls, reach: int) -> Ring:
        """The smallest ring whose signed values include ±reach, so that differences up to it compare rightly."""
        return cls(max(2, int(reach).bit_length() + 1))

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(np.uint32 if self.bits <= 32 else np.uint64)

    @property
    def size(self) -> int:
        """Bytes of one word on the wire."""
        return -(-self.bits // 8)

    def encode(self, x: Array) -> Words:
        """Signed integers as words; what does not fit raises."""
        x = np.asarray(x)
        if x.dtype.kind not in "iub":
            raise ParameterError(f"a ring takes integers, found {x.dtype}")
        half = 1 << (self.bits - 1)
        if x.size and (int(x.min()) < -half or int(x.max()) >= half):
            raise ParameterError(f"values outside ±2^{self.bits - 1} do not fit the ring that was agreed on")
        return x.astype(np.int64).view(np.uint64).astype(self.dtype)

    def decode(self, words: Words) -> I64:
        """Words as signed integers; bits above the ring are dropped."""
        spare = np.int64(64 - self.bits)
        wide: I64 = words.astype(np.uint64).view(np.int64)
        return (wide << spare) >> spare

    def to_bytes(self, words: Words) -> U8:
        """Modulo 2^bits: the bits above hold parts of products of shares, which must not be sent."""
        within = np.asarray(words, self.dtype) & self.dtype.type((1 << self.bits) - 1)
        raw = np.ascontiguousarray(within).reshape(-1).view(np.uint8)
        return raw.reshape(-1, self.dtype.itemsize)[:, : self.size].reshape(-1).copy()

    def from_bytes(self, data: U8, shape: tuple[int, ...]) -> Words:
        wide = np.zeros((math.prod(shape), self.dtype.itemsize), np.uint8)
        wide[:, : self.size] = data.reshape(-1, self.size)
        return wide.view(self.dtype).reshape(shape)

    def draw(self, prg: Prg, shape: tuple[int, ...]) -> Words:
        out: Words = np.empty(shape, self.dtype)
        prg.fill(out)
        return out


@dataclass(frozen=True, slots=True)
class Shared:
    """One party's two components of a shared array: a = x_i, b = x_{i+1}. Sums need no other party."""

    ring: Ring
    a: Words
    b: Words

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.a.shape)

    def map(self, f: Callable[[Words], Words]) -> Shared:
        """Apply a map that is linear in the components: an index, a reshape, a sum over an axis."""
        return Shared(self.ring, f(self.a), f(self.b))

    def __getitem__(self, index: Any) -> Shared:
        return self.map(lambda w: w[index])

    def __add__(self, other: Shared) -> Shared:
        return Shared(self.ring, self.a + other.a, self.b + other.b)

    def __sub__(self, other: Shared) -> Shared:
        return Shared(self.ring, self.a - other.a, self.b - other.b)

    def times(self, factor: int | np.ndarray[Any, Any]) -> Shared:
        """Times public integers."""
        words = np.asarray(factor).astype(np.int64).view(np.uint64).astype(self.ring.dtype)
        return self.map(lambda w: w * words)

    def reshape(self, *shape: int) -> Shared:
        return self.map(lambda w: w.reshape(shape))

    def sum(self, axis: int) -> Shared:
        return self.map(lambda w: w.sum(axis=axis, dtype=self.ring.dtype))

    def shifted(self, bits: int) -> Shared:
        """The value times 2^bits, in a ring so much larger."""
        ring = Ring(self.ring.bits + bits)
        return Shared(ring, *(w.astype(ring.dtype) << ring.dtype.type(bits) for w in (self.a, self.b)))

    def to(self, ring: Ring) -> Shared:
        """The same value in a smaller ring, where it still fits."""
        if ring.bits > self.ring.bits:
            raise ParameterError(f"{self.ring.bits} bits cannot grow to {ring.bits} without another party")
        return Shared(ring, self.a.astype(ring.dtype), self.b.astype(ring.dtype))


def check_input(x: Words | None, shape: tuple[int, ...], ring: Ring, owner: str, *, mine: bool) -> None:
    """Raise unless x is there at its owner only, and is what was agreed on."""
    if (x is not None) != mine:
        raise ParameterError(f"the values of an input belong to its owner '{owner}' and to nobody else")
    if x is not None and (x.shape != shape or x.dtype != ring.dtype):
        raise ParameterError(f"expected an input of shape {shape} in {ring.dtype}, found {x.shape} in {x.dtype}")


def constant(values: Array, ring: Ring, party: int) -> Shared:
    """Public integers in shares: component 0, held by parties 0 and 2."""
    words = np.asarray(values).astype(np.int64).view(np.uint64).astype(ring.dtype)
    zero = np.zeros_like(words)
    return Shared(ring, words if party == 0 else zero, words if party == 2 else zero)


def join(xs: Sequence[Shared], axis: int) -> Shared:
    return Shared(
        xs[0].ring, np.concatenate([x.a for x in xs], axis=axis), np.concatenate([x.b for x in xs], axis=axis)
    )


def index_bits(n: int) -> int:
    """Bits of a number below n."""
    return max(1, (n - 1).bit_length())


def numbered_ring(ring: Ring, n: int) -> Ring:
    """Holds an entry of `ring`, and below it the number of its column, one of n."""
    return Ring(ring.bits + index_bits(n))


# ---- products --------------------------------------------------------------------------------------------------------


def limb_bits(inner: int, bits: int) -> int:
    """Widest limb such that a sum of `inner` products over all limbs of one weight stays exact in float64."""
    for width in range(26, 0, -1):
        count = -(-bits // width)
        if 2 * width + (inner * count).bit_length() <= MANTISSA:
            return -(-bits // count)  # no wider than it has to be
    raise ParameterError(f"a product over {inner} entries is too long for exact arithmetic")


def limbs(x: Words, width: int, bits: int) -> list[F64]:
    mask = x.dtype.type((1 << width) - 1)
    return [((x >> x.dtype.type(width * i)) & mask).astype(np.float64) for i in range(-(-bits // width))]


def matmul(a: Words, b: Words, bits: int) -> Words:
    """A product of two matrices modulo 2^bits, through float64 BLAS on limbs; limbs that only overflow are left out."""
    width = limb_bits(a.shape[-1], bits)
    left, right = limbs(a, width, bits), limbs(b, width, bits)
    out = np.zeros((*a.shape[:-1], b.shape[-1]), np.uint64)
    for weight in range(len(left)):
        total = sum(left[i] @ right[weight - i] for i in range(weight + 1))
        out += np.asarray(total).astype(np.int64).view(np.uint64) << np.uint64(width * weight)
    return out.astype(a.dtype)


@njit(cache=True, nogil=True)
def _add_product(a: Words, b: Words, out: Words) -> None:  # pragma: no cover
    for i in range(a.shape[0]):
        for k in range(a.shape[1]):
            for j in range(b.shape[1]):
                out[i, j] += a[i, k] * b[k, j]


def word_matmul(a: Words, b: Words) -> Words:
    """A product of two matrices modulo the size of a word; faster than `matmul` where b has few columns."""
    out: Words = np.zeros((a.shape[0], b.shape[1]), a.dtype)
    _add_product(np.ascontiguousarray(a), np.ascontiguousarray(b), out)
    return out


# ---- bit planes ------------------------------------------------------------------------------------------------------


def plane_bytes(n: int) -> int:
    return -(-n // 8)


def planes(words: Words, first: int, last: int) -> U8:
    """Bits first..last-1 of all words, one row per bit; eight words a byte, the first one in the lowest bit."""
    flat = np.ascontiguousarray(words).reshape(-1)
    raw = flat.view(np.uint8).reshape(flat.size, flat.dtype.itemsize)
    out = np.empty((last - first, plane_bytes(flat.size)), np.uint8)
    for byte in range(first // 8, -(-last // 8)):
        column = np.ascontiguousarray(raw[:, byte])
        for bit in range(max(first, 8 * byte), min(last, 8 * byte + 8)):
            out[bit - first] = np.packbits(column & np.uint8(1 << bit % 8), bitorder="little")
    return out


def unpack(plane: U8, n: int) -> U8:
    """One plane as n bytes of 0 or 1."""
    return np.unpackbits(plane, count=n, bitorder="little")


def digit_widths(bits: int) -> list[int]:
    """How `bits` bits are cut into digits, lowest first; only the lowest may be short."""
    short = bits % DIGIT
    return ([short] if short else []) + [DIGIT] * (bits // DIGIT)


def monomials(u: U8) -> U8:
    """Products of the bits of one digit, from its planes (w, ...): row s - 1 is the product over the bits in s."""
    width = len(u)
    out = np.empty((2**width - 1, *u.shape[1:]), np.uint8)
    for s in range(1, 2**width):
        top = s.bit_length() - 1
        rest = s & ~(1 << top)
        out[s - 1] = u[top] & out[rest - 1] if rest else u[top]
    return out


def generate(m: U8, v: U8) -> U8:
    """Share of the carry out of a digit, from shares of the monomials of u and the planes of v.

    carry_{i+1} = u_i v_i ⊕ (u_i ⊕ v_i) carry_i, written out in the monomials of u.
    """
    table: dict[int, U8] = {}
    for i, v_i in enumerate(v):
        grown = {1 << i: v_i}
        for s, c in table.items():
            for t, part in ((s | 1 << i, c), (s, c & v_i)):
                grown[t] = grown[t] ^ part if t in grown else part
        table = grown
    out: U8 = np.zeros_like(v[0])
    for s, c in table.items():
        out ^= c & m[s - 1]
    return out


def propagate(m: U8, v: U8, *, constant: bool) -> U8:
    """Share of Π_i (u_i ⊕ v_i) over one digit; one of the two holders adds the term without u."""
    width = len(v)
    out: U8 = np.zeros_like(v[0])
    for s in range(2**width):
        rest = [v[i] for i in range(width) if not s >> i & 1]
        c = rest[0] if rest else None
        for v_i in rest[1:]:
            c = c & v_i if c is not None else v_i
        if s == 0:
            if constant and c is not None:
                out ^= c
        else:
            out ^= m[s - 1] if c is None else c & m[s - 1]
    return out


# ---- permutations ----------------------------------------------------------------------------------------------------


def permutations(prg: Prg, rows: int, n: int) -> Index:
    """One uniform permutation of n per row: random keys with the index in their low bits, sorted; ties are redrawn."""
    low = max(1, (n - 1).bit_length())
    mask = np.uint64((1 << low) - 1)
    index = np.arange(n, dtype=np.uint64)
    out: Index = np.empty((rows, n), np.intp)
    pending = np.arange(rows)
    while pending.size:
        keys = prg.uint64((pending.size, n))
        keys &= ~mask
        keys |= index
        keys.sort(axis=1)
        distinct = keys >> np.uint64(low)
        tied = (distinct[:, 1:] == distinct[:, :-1]).any(axis=1)
        out[pending] = (keys & mask).astype(np.intp)
        pending = pending[tied]
    return out
