"""Local steps of proofs about replicated shares: equations of bits, permuted words, products of matrices.

A prover j shows the two others, A = j - 1 and B = j + 1, that what it sent follows from what they hold. Every message
is brought into the form Σ (known to A) · (known to B) = (known to A) + (known to B):

    bits        a_low & b_low ⊕ a_high & b_high = c_A ⊕ c_B                            one equation a bit
    hops        Σ_ij α_i β_j y[i, j] = Σ_ij α_i β_j (x[i, π_i(j)] ⊕ ρ[i, j])       π, ρ known to one, x, y to the other
    products    α z β = (α q_A)(r_B β) + (α q_B)(r_A β) + ...                           modulo 2^κ, α and β binary

Bits and hops become one inner product over GF(2^64). Bits are cut into 64 rows (32 blocks of equations, two products
each), words of equations times ε_t η^l; the product of the polynomials Σ_l X^l a_l and Σ_k X^(K-1-k) b_k has <a, b> as
its coefficient K - 1, and its value at a random point is an inner product of vectors so many times shorter.

References
----------
[BBC+19] Boneh, Boyle, Corrigan-Gibbs, Gilboa, Ishai, CRYPTO 2019: proofs on distributed data.
[BGIN20] Boyle, Gilboa, Ishai, Nof, ASIACRYPT 2020: three parties, folding.  [Fre77] Freivalds, IFIP 1977: products.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from cloister.arrays import U8, U64
from cloister.mpc.crypto import gf64
from cloister.mpc.crypto.gf64 import BLOCKS
from cloister.mpc.crypto.prg import Prg
from cloister.mpc.crypto.replicated import Ring, Words

LIMB = 26  # bits that a float64 adds 2^27 times without rounding
PIECE = 1 << 20  # words turned into floats at a time
ALIGN = 8 * BLOCKS  # words of equations that fill the vectors of every processor
FOLD = 16  # rows of one fold of field elements
ROWS = 64  # of binary vectors a side, for products: a wrong product passes with probability 2^-63


def digest(*arrays: npt.NDArray[Any]) -> U8:
    h = hashlib.sha256()
    for x in arrays:
        h.update(np.ascontiguousarray(x).reshape(-1).view(np.uint8).data)
    return np.frombuffer(h.digest(), np.uint8)


def words(data: U8) -> U64:
    return np.ascontiguousarray(data).view(np.uint64)


def raw(x: npt.NDArray[Any]) -> U8:
    return np.ascontiguousarray(x).reshape(-1).view(np.uint8)


# ---- equations of bits -----------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Equations:
    """What one party knows of one prover's equations: arrays of words side by side, as blocks of 32 rows.

    Long arrays are kept as they are; what is left over of each, and short ones, are put together at the end.
    """

    large: list[tuple[U64, ...]] = field(default_factory=list)
    small: list[tuple[U64, ...]] = field(default_factory=list)
    words: int = 0  # in `large`
    rest: int = 0  # in `small`

    def add(self, *arrays: U64) -> None:
        flat = [np.ascontiguousarray(x).reshape(-1) for x in arrays]
        whole = flat[0].size // ALIGN * ALIGN
        if whole:
            self.large.append(tuple(x[:whole].reshape(BLOCKS, -1) for x in flat))
            self.words += whole
        if whole < flat[0].size:
            self.small.append(tuple(x[whole:] for x in flat))
            self.rest += flat[0].size - whole

    @property
    def columns(self) -> int:
        """Words of one block."""
        return (self.words + -(-self.rest // ALIGN) * ALIGN) // BLOCKS

    def segments(self) -> list[tuple[U64, ...]]:
        if not self.rest:
            return self.large
        joined = []
        for parts in zip(*self.small, strict=True):
            whole = np.zeros(-(-self.rest // ALIGN) * ALIGN, np.uint64)
            whole[: self.rest] = np.concatenate(parts)
            joined.append(whole.reshape(BLOCKS, -1))
        return [*self.large, tuple(joined)]


@dataclass(frozen=True, slots=True)
class Weights:
    """ε_t η^l of the equation in block l and word t."""

    eps: U64
    eta: U64  # (32,)

    @classmethod
    def draw(cls, prg: Prg, columns: int) -> Weights:
        return cls(prg.uint64(columns), gf64.powers(prg.uint64(1)[0], BLOCKS))

    @property
    def rows(self) -> U64:
        return np.concatenate([self.eta, self.eta])


def claim(equations: Equations, weights: Weights) -> np.uint64:
    """Σ ε_t η^l c[l, t], where c is the last of the arrays."""
    out, at = np.uint64(0), 0
    for *_, c in equations.segments():
        out ^= gf64.weigh_rows(c, weights.eta, weights.eps[at : at + c.shape[1]])
        at += c.shape[1]
    return out


def gram(equations: Equations, weights: Weights) -> U64:
    out, at = np.zeros((2 * BLOCKS, 2 * BLOCKS), np.uint64), 0
    for arrays in equations.segments():
        width = arrays[0].shape[1]
        out ^= gf64.gram_bits(*arrays, weights.eps[at : at + width])
        at += width
    return out


def fold_left(equations: Equations, weights: Weights, point: np.uint64, out: U64) -> None:
    """The first two arrays, A's half, at the point; with the weights."""
    row_weights = gf64.times(gf64.powers(point, 2 * BLOCKS), weights.rows)
    at = 0
    for low, high, *_ in equations.segments():
        width = low.shape[1]
        part = out[64 * at : 64 * (at + width)].reshape(width, 64)
        gf64.fold_bits(low, high, row_weights, weights.eps[at : at + width], part)
        at += width


def fold_right(equations: Equations, point: np.uint64, out: U64, *, first: int) -> None:
    """B's half at the point, without weights: the arrays `first` and `first + 1`."""
    row_weights = gf64.powers(point, 2 * BLOCKS)[::-1].copy()
    at = 0
    for arrays in equations.segments():
        low, high = arrays[first : first + 2]
        width = low.shape[1]
        gf64.fold_bits(low, high, row_weights, None, out[64 * at : 64 * (at + width)].reshape(width, 64))
        at += width


def mask_products(equations: Equations, mask: U64) -> U64:
    """<mask, b_k> for the 64 rows of B's half: one more row of the gram matrix, without weights."""
    out = np.zeros(2 * BLOCKS, np.uint64)
    at = 0
    for _, _, low, high in equations.segments():
        width = low.shape[1]
        gf64.sum_where(mask[64 * at : 64 * (at + width)].reshape(width, 64), low, high, out)
        at += width
    return out


def folded_length(n: int) -> int:
    """Length of a vector of n elements after one fold."""
    return -(-n // (FOLD * 8)) * 8


def fold_rows(x: U64) -> U64:
    """A vector as 16 rows, filled up with zeros."""
    short = folded_length(x.size) * FOLD - x.size
    return (np.concatenate([x, np.zeros(short, np.uint64)]) if short else x).reshape(FOLD, -1)


# ---- products of matrices --------------------------------------------------------------------------------------------


def mix_rows(alpha: npt.NDArray[np.float64], x: Words, bits: int) -> U64:
    """α x modulo 2^64, for binary α (s, m) and words x (m, n) of so many bits."""
    out = np.zeros((alpha.shape[0], x.shape[1]), np.uint64)
    step = max(1, PIECE // max(1, x.shape[0]))
    for start in range(0, x.shape[1], step):
        part = x[:, start : start + step]
        for low in range(0, bits, LIMB):
            limb = ((part >> part.dtype.type(low)) & part.dtype.type((1 << LIMB) - 1)).astype(np.float64)
            sums = np.rint(alpha @ limb).astype(np.int64).view(np.uint64)
            out[:, start : start + step] += sums << np.uint64(low)
    return out


def mix_columns(x: Words, beta: npt.NDArray[np.float64], bits: int) -> U64:
    return mix_rows(beta.T, x.T, bits).T


@dataclass(frozen=True, slots=True)
class Mixture:
    """α and β of one product."""

    alpha: npt.NDArray[np.float64]  # (64, m)
    beta: npt.NDArray[np.float64]  # (n, 64)

    @classmethod
    def draw(cls, prg: Prg, m: int, n: int) -> Mixture:
        alpha, beta = prg.bits((ROWS, m)), prg.bits((n, ROWS))
        return cls(alpha.astype(np.float64), beta.astype(np.float64))

    def halves(self, q: Words, r: Words, ring: Ring, *, diagonal: bool = False) -> tuple[U64, U64]:
        """α q (64, d) and rᵀ β (d, 64); a diagonal q is given by its entries (d,)."""
        right = mix_columns(within(r, ring).T, self.beta, ring.bits)
        if diagonal:
            return self.alpha.astype(np.uint64) * within(q, ring).astype(np.uint64), right
        return mix_rows(self.alpha, within(q, ring), ring.bits), right

    def both(self, z: Words, ring: Ring) -> U64:
        return mix_rows(self.alpha, within(mix_columns(within(z, ring), self.beta, ring.bits), ring), ring.bits)


def within(x: Words, ring: Ring) -> Words:
    """Modulo 2^κ: above it two holders of a word may differ."""
    out: Words = x & x.dtype.type((1 << ring.bits) - 1)
    return out
