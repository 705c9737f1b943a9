"""Slots and coefficients of a CKKS plaintext, exactly, and the linear maps that a refresh applies for free.

A plaintext polynomial p of degree N holds N/2 complex slots, z_j = p(ζ^(3^j)), ζ = exp(iπ/N): SEAL's order. A mask that
is uniform modulo a modulus of 180 bits passes through this transform, and the message under it must not notice: all is
computed in fixed point of 256 bits (`fixed_kernels`), POINT of them after the point.

p has real coefficients, so half of the roots suffice: with c_k = p_k + i·p_{k + N/2}, p(ζ^(4j + 1)) = Σ c_k ζ^k
(ζ^4)^jk is a transform of N/2 points; the other roots give the conjugates.

A `SlotMap` says how output slots come from input slots: sparse weighted sums, each placed at any number of slots. It
is linear, so it may act on a masked value and on the masks apart.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias, final

import numpy as np
import numpy.typing as npt

from cloister.arrays import C128, F64, I64, U64
from cloister.errors import ParameterError
from cloister.mpc.crypto.rns.ring import Residues, Ring, bit_reversed

Words: TypeAlias = U64  # (N, 4) signed integers of 256 bits, lowest word first
Slots: TypeAlias = U64  # (S, 2, 4) real and imaginary parts, in fixed point
POINT = 40  # bits after the point
WIDEST = 192  # bits of the largest coefficient: sums over N of them, and over a map's sources, still fit
_PRECISION = 224
_WEIGHT_BITS = 10  # weights of a map lie below 2^this


@dataclass(frozen=True, eq=False)
class SlotMap:
    """Output slot s is Σ_e weight[e] · input[source[e]] over the entries e of row place[s]; zero where place is -1.

    Inputs of several ciphertexts count on: slot s of the c-th is source c · S + s. A *real* map drops the imaginary
    part of every output, which is linear over the reals.
    """

    start: I64  # (rows + 1,)
    source: I64  # (entries,)
    weight: F64  # (entries,)
    place: I64  # (S,)
    real: bool = False

    @functools.cached_property
    def digest(self) -> bytes:
        h = hashlib.sha256(b"real" if self.real else b"")
        for a in (self.start, self.source, self.weight, self.place):
            h.update(np.ascontiguousarray(a).tobytes())
        return h.digest()

    def scaled(self, factor: float) -> SlotMap:
        return SlotMap(self.start, self.source, self.weight * factor, self.place, self.real)

    def apply(self, z: Slots, ratio: F64) -> Slots:
        """The map on slots of several ciphertexts, those of the c-th times ratio[c]."""
        from cloister.mpc.crypto.rns import fixed_kernels as fixed

        weights = self.weight * ratio[self.source // len(self.place)]
        factor, sign = fractions(weights)
        rows = np.empty((len(self.start) - 1, 2, 4), np.uint64)
        fixed.rows(self.start, self.source, factor, sign, _WEIGHT_BITS, z, rows)
        out = rows[np.maximum(self.place, 0)]
        out[self.place < 0] = 0
        if self.real:
            out[:, 1] = 0
        return out

    def apply_plain(self, z: C128 | F64) -> C128 | F64:
        """The same in ordinary numbers."""
        entries = self.weight * z[self.source]
        rows = np.array([entries[a:b].sum() for a, b in zip(self.start, self.start[1:], strict=False)])
        rows = rows.real if self.real else rows
        return np.where(self.place >= 0, rows[np.maximum(self.place, 0)], 0.0)


def make_map(
    rows: Sequence[tuple[npt.ArrayLike, npt.ArrayLike, npt.ArrayLike]], slots: int, *, real: bool = False
) -> SlotMap:
    """Collect (targets, sources, weights): the sum over the sources goes to every target."""
    place = np.full(slots, -1, np.int64)
    start, source, weight = [0], [], []
    for r, (targets, sources, weights) in enumerate(rows):
        s = np.atleast_1d(np.asarray(sources, np.int64))
        t = np.atleast_1d(np.asarray(targets, np.int64))
        if (place[t] >= 0).any():
            raise ParameterError("a slot map writes a slot twice")
        place[t] = r
        source.append(s)
        weight.append(np.broadcast_to(np.asarray(weights, np.float64), s.shape))
        start.append(start[-1] + len(s))
    empty = [np.zeros(0)]
    return SlotMap(
        np.array(start, np.int64),
        np.concatenate(source or empty).astype(np.int64),
        np.concatenate(weight or empty).astype(np.float64),
        place,
        real,
    )


def identity_map(slots: int) -> SlotMap:
    at = np.arange(slots)
    return SlotMap(np.arange(slots + 1), at, np.ones(slots), at)


def permutation_map(source: npt.ArrayLike) -> SlotMap:
    """Output slot s takes input slot source[s]."""
    at = np.asarray(source, np.int64)
    return SlotMap(np.arange(len(at) + 1), at, np.ones(len(at)), np.arange(len(at)))


def fractions(weights: F64) -> tuple[U64, U64]:
    """Weights below 2^10 as fractions of 2^10 in three words (n, 3), exactly, and their signs."""
    if not np.abs(weights).max(initial=0) < 1 << _WEIGHT_BITS:
        raise ParameterError(f"weights of a slot map must lie below {1 << _WEIGHT_BITS}")
    rest, words = np.abs(weights) / (1 << _WEIGHT_BITS), np.empty((len(weights), 3), np.uint64)
    for m in (2, 1, 0):
        rest = np.ldexp(rest, 64)
        whole = np.floor(rest)
        words[:, m] = whole.astype(np.uint64)
        rest = rest - whole
    return words, (weights < 0).astype(np.uint64)


@final
class Embedding:
    """The transform between coefficients and slots for one ring degree."""

    def __init__(self, degree: int) -> None:
        self.degree, self.slots = degree, degree // 2
        self._roots, self._signs = _roots(degree)
        self._order = bit_reversed(self.slots)
        at = np.empty(self.slots, np.int64)
        e = 1
        for j in range(self.slots):
            at[j] = e
            e = e * 3 % (2 * degree)
        self.mirrored = at % 4 == 3  # the conjugate stands at the opposite root
        self.at = (np.where(self.mirrored, 2 * degree - at, at) - 1) // 4
        size = (1 - 2.0 * self._signs) * (self._roots.astype(np.float64) @ 2.0 ** (64.0 * np.arange(3) - 192))
        self.twists = (size[0] - 1j * size[1])[: self.slots]  # ζ^-k
        self._flip = np.where(self.mirrored, ~np.uint64(0), np.uint64(0))
        self._kept = np.zeros(self.slots, np.uint64)
        where = np.empty(self.slots, np.int64)
        where[self.at] = np.arange(self.slots)
        self._back = where[self._order]

    def to_slots(self, a: Words) -> Slots:
        from cloister.mpc.crypto.rns import fixed_kernels as fixed

        z, out, shifted = self._empty(), self._empty(), np.empty((self.degree, 4), np.uint64)
        fixed.shift_up(np.ascontiguousarray(a), POINT, shifted)
        z[:, 0], z[:, 1] = shifted[: self.slots], shifted[self.slots :]
        fixed.twist(z, self._roots, self._signs, np.uint64(0))
        fixed.place(z, self._order, self._kept, out)
        fixed.fft(out, self._roots, self._signs, 4, np.uint64(0))
        fixed.place(out, self.at, self._flip, z)
        return z

    def to_coefficients(self, slots: Slots) -> Words:
        """The nearest integers."""
        from cloister.mpc.crypto.rns import fixed_kernels as fixed

        z, out = self._empty(), np.empty((self.degree, 4), np.uint64)
        fixed.place(slots, self._back, self._flip[self._back], z)
        fixed.fft(z, self._roots, self._signs, 4, np.uint64(1))
        fixed.twist(z, self._roots, self._signs, np.uint64(1))
        both = np.ascontiguousarray(z.transpose(1, 0, 2)).reshape(self.degree, 4)
        fixed.shift_down(both, POINT + self.slots.bit_length() - 1, out)
        return out

    def _empty(self) -> Slots:
        return np.empty((self.slots, 2, 4), np.uint64)


@functools.lru_cache(maxsize=8)
def embedding(degree: int) -> Embedding:
    return Embedding(degree)


def to_real(z: Slots, scale: float) -> F64:
    """Real parts as ordinary numbers."""
    a, negative = z[:, 0], z[:, 0, 3] >> np.uint64(63) == 1
    size = np.where(negative[:, None], ~a, a).astype(np.float64) @ 2.0 ** (64 * np.arange(4))
    return np.asarray(np.ldexp(np.where(negative, -size, size), -POINT) / scale)


def encode_exact(ring: Ring, values: I64, factor: float, k: int) -> Residues:
    """The polynomial whose slots are values · factor, to the nearest integers, in NTT form.

    Values are real, (slots,), or have an imaginary part, (slots, 2).
    """
    from cloister.mpc.crypto.rns import fixed_kernels as fixed

    mantissa, exponent = math.frexp(factor)  # factor = mantissa · 2^exponent, 1/2 ≤ mantissa < 1
    z = np.zeros((len(values), 2, 4), np.uint64)
    for part, column in enumerate(values.reshape(len(values), -1).T):
        z[:, part, 0], z[:, part, 1:] = column.astype(np.uint64), (column >> 63).astype(np.uint64)[:, None]
        for bits in _shifts(POINT + exponent):
            fixed.shift_up(z[:, part].copy(), bits, z[:, part])
    z = identity_map(len(values)).apply(z, np.array([mantissa]))
    return ring.forward(ring.of_integers(embedding(ring.degree).to_coefficients(z), k))


def to_plain_coefficients(values: F64 | C128, degree: int, scale: float) -> F64:
    """The integers nearest to the coefficients of these slots at that scale, in ordinary precision."""
    e, half = embedding(degree), degree // 2
    z = np.empty(half, np.complex128)
    z[e.at] = np.where(e.mirrored, np.conj(values), values)
    c = np.fft.fft(z) / half * e.twists * scale
    return np.asarray(np.rint(np.concatenate([c.real, c.imag])))


def _shifts(bits: int) -> list[int]:
    """A shift in parts of less than a word."""
    return [48] * (bits // 48) + ([bits % 48] if bits % 48 else [])


def _roots(degree: int) -> tuple[U64, U64]:
    """ζ^n for n < N: cosines and sines as fractions (2, N, 3) and signs (2, N). Half angles by integer square roots."""
    one = 1 << _PRECISION
    c, s, angle = 0, one, 2
    while angle < degree:  # π/angle → π/(2 angle)
        c = math.isqrt((one + c) * one // 2)
        s = s * one // (2 * c)
        angle *= 2
    re, im = np.array([one], object), np.array([0], object)
    steps = [(c, s)]
    for _ in range(degree.bit_length() - 2):
        x, y = steps[-1]
        steps.append(((x * x - y * y) >> _PRECISION, (2 * x * y) >> _PRECISION))
    for x, y in steps:
        re, im = (
            np.concatenate([re, (re * x - im * y) >> _PRECISION]),
            np.concatenate([im, (re * y + im * x) >> _PRECISION]),
        )
    words, signs = np.empty((2, degree, 3), np.uint64), np.empty((2, degree), np.uint64)
    for part, values in enumerate((np.asarray(re, object), np.asarray(im, object))):
        signs[part] = values < 0
        size = np.minimum(np.abs(values) // (1 << (_PRECISION - 192)), (1 << 192) - 1)
        for m in range(3):
            words[part, :, m] = ((size >> (64 * m)) & ((1 << 64) - 1)).astype(np.uint64)
    return words, signs
