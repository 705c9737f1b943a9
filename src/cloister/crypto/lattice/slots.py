"""Slots and coefficients of a CKKS plaintext, to 104 bits, and the linear maps that a refresh applies for free.

A plaintext polynomial p of degree N holds N/2 complex slots, z_j = p(ζ^(3^j)), ζ = exp(iπ/N): SEAL's order. A mask that
hides a 60-bit message by 40 bits is a hundred bits wide, so that doubles would lose the message when a masked value
passes through this transform; double-doubles keep it (`kernels`).

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
from cloister.crypto.lattice.ring import bit_reversed
from cloister.errors import ParameterError

Wide: TypeAlias = F64  # (2, N) high and low of real double-doubles
WideSlots: TypeAlias = F64  # (4, S) high and low of real parts, then of imaginary ones
LIMBS = 4  # of 42 bits: what a mask or a masked value is made of
MASK_BITS = 156  # the widest mask: sums over slots must still fit into the limbs
_PRECISION = 180


@dataclass(frozen=True, eq=False)
class SlotMap:
    """Output slot s is Σ_e weight[e] · input[source[e]] over the entries e of row place[s]; zero where place is -1.

    Inputs of several ciphertexts count on: slot s of the c-th is source c · S + s.
    """

    start: I64  # (rows + 1,)
    source: I64  # (entries,)
    weight: F64  # (entries,)
    place: I64  # (S,)

    @functools.cached_property
    def digest(self) -> bytes:
        h = hashlib.sha256()
        for a in (self.start, self.source, self.weight, self.place):
            h.update(np.ascontiguousarray(a).tobytes())
        return h.digest()

    def scaled(self, factor: float) -> SlotMap:
        return SlotMap(self.start, self.source, self.weight * factor, self.place)

    def apply(self, z: WideSlots) -> WideSlots:
        from cloister.crypto.lattice import kernels

        rows = np.empty((4, len(self.start) - 1))
        kernels.dd_rows(self.start, self.source, self.weight, np.ascontiguousarray(z), rows)
        out = np.where(self.place >= 0, rows[:, np.maximum(self.place, 0)], 0.0)
        return np.ascontiguousarray(out)

    def apply_plain(self, z: C128 | F64) -> C128 | F64:
        """The same in ordinary numbers."""
        entries = self.weight * z[self.source]
        rows = np.array([entries[a:b].sum() for a, b in zip(self.start, self.start[1:], strict=False)])
        return np.where(self.place >= 0, rows[np.maximum(self.place, 0)], 0.0)


def make_map(rows: Sequence[tuple[npt.ArrayLike, npt.ArrayLike, npt.ArrayLike]], slots: int) -> SlotMap:
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
    )


def identity_map(slots: int) -> SlotMap:
    at = np.arange(slots)
    return SlotMap(np.arange(slots + 1), at, np.ones(slots), at)


def permutation_map(source: npt.ArrayLike) -> SlotMap:
    """Output slot s takes input slot source[s]."""
    at = np.asarray(source, np.int64)
    return SlotMap(np.arange(len(at) + 1), at, np.ones(len(at)), np.arange(len(at)))


@final
class Embedding:
    """The transform between coefficients and slots for one ring degree."""

    def __init__(self, degree: int) -> None:
        self.degree, self.slots = degree, degree // 2
        cos, sin = _roots(degree)
        self._twist = np.stack([*_wide(cos), *_wide(sin)])  # ζ^n
        self._twiddle = np.ascontiguousarray(self._twist[:, ::2])  # ω^j = ζ^2j, j < N/2
        self._order = bit_reversed(degree)
        powers = np.empty(self.slots, np.int64)
        e = 1
        for j in range(self.slots):
            powers[j] = e
            e = e * 3 % (2 * degree)
        self._at = (powers - 1) // 2

    def to_slots(self, a: Wide) -> WideSlots:
        from cloister.crypto.lattice import kernels

        z = np.zeros((4, self.degree))
        z[0], z[1] = a[0], a[1]
        kernels.dd_times(z, self._twist, False)  # noqa: FBT003
        z = np.ascontiguousarray(z[:, self._order])
        kernels.dd_fft(z, self._twiddle, False)  # noqa: FBT003
        return np.ascontiguousarray(z[:, self._at])

    def to_coefficients(self, z: WideSlots) -> Wide:
        from cloister.crypto.lattice import kernels

        full = np.empty((4, self.degree))
        full[:, self._at] = z
        full[:2, self.degree - 1 - self._at] = z[:2]
        full[2:, self.degree - 1 - self._at] = -z[2:]
        full = np.ascontiguousarray(full[:, self._order])
        kernels.dd_fft(full, self._twiddle, True)  # noqa: FBT003
        kernels.dd_times(full, self._twist, True)  # noqa: FBT003
        return np.ascontiguousarray(full[:2] / self.degree)


@functools.lru_cache(maxsize=8)
def embedding(degree: int) -> Embedding:
    return Embedding(degree)


def to_real(z: WideSlots, scale: float) -> F64:
    """Real parts as ordinary numbers."""
    return np.asarray((z[0] + z[1]) / scale)


def random_limbs(words: U64, bits: int) -> I64:
    """Uniform integers below 2^bits as (4, N) limbs of 42 bits, from (4, N) random words."""
    if not 0 < bits <= MASK_BITS:
        raise ParameterError(f"a mask has 1 to {MASK_BITS} bits, got {bits}")
    out = np.zeros(words.shape, np.int64)
    for m in range(LIMBS):
        width = min(42, max(0, bits - 42 * m))
        if width:
            out[m] = (words[m] >> np.uint64(64 - width)).astype(np.int64)
    return out


def limbs_to_wide(limbs: I64) -> Wide:
    from cloister.crypto.lattice import kernels

    out = np.empty((2, limbs.shape[1]))
    kernels.limbs_to_dd(limbs, out)
    return out


def wide_to_limbs(x: Wide) -> I64:
    """The nearest integers."""
    from cloister.crypto.lattice import kernels

    out = np.empty((LIMBS, x.shape[1]), np.int64)
    kernels.dd_to_limbs(x, out)
    return out


def _roots(degree: int) -> tuple[list[int], list[int]]:
    """Fixed-point cos and sin of πn/N for n < N: half angles by integer square roots, then powers by doubling."""
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
    return list(re), list(im)


def _wide(xs: list[int]) -> tuple[F64, F64]:
    one = float(1 << _PRECISION)
    high = [float(x) for x in xs]
    low = [float(x - int(h)) for x, h in zip(xs, high, strict=True)]
    return np.array(high) / one, np.array(low) / one
