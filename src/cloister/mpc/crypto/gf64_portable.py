"""The loops of `gf64` by table look-ups, compiled by numba for any processor; and the few steps that exist only once.

The product of a fixed element e with any word is the XOR of eight entries of a table T[c][v] = e v X^(8c), one for
each byte v of the word: where one e meets thousands of words, as in `gram_bits`, this costs eight loads a product.

Nothing here runs in constant time. The operands are shares and challenges, each uniform by itself.
"""

# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201
from __future__ import annotations

import numpy as np
from llvmlite import binding
from numba import njit

jit = njit(cache=True, nogil=True)
inline = njit(inline="always")
U = np.uint64


def processor_lanes() -> int:
    """Words of one carry-less instruction of this processor: 8, 4 or 2; 0 where it has none."""
    features = binding.get_host_cpu_features()
    if features.get("vpclmulqdq") and features.get("avx512f"):
        return 8
    if features.get("vpclmulqdq") and features.get("avx2"):
        return 4
    return 2 if features.get("pclmul") and features.get("sse4.1") else 0


LANES = processor_lanes()
ZERO, ONE, TOP, LOW = U(0), U(1), U(63), U(255)
POLY = U(0x1B)  # X^64 = X^4 + X^3 + X + 1
HALF = 32  # rows of half a matrix of bits
TILE = 64  # words of a row at a time


@inline
def shifted(x):
    """X x."""
    return (x << ONE) ^ (POLY * (x >> TOP))


@inline
def mul(x, y):
    """One product, four bits of y at a time from the top; no branch and no address depends on either."""
    x1, x2 = shifted(x), shifted(shifted(x))
    x3 = shifted(x2)
    out = ZERO
    for c in range(15, -1, -1):
        v, t = y >> U(4 * c), out >> U(60)
        out = (out << U(4)) ^ t ^ (t << ONE) ^ (t << U(3)) ^ (t << U(4))
        out ^= (x * (v & ONE)) ^ (x1 * (v >> ONE & ONE)) ^ (x2 * (v >> U(2) & ONE)) ^ (x3 * (v >> U(3) & ONE))
    return out


@jit
def fill_table(table, e):
    """T[c, v] = e v X^(8c)."""
    for c in range(8):
        for bit in range(8):
            table[c, 1 << bit] = e
            for v in range(1, 1 << bit):
                table[c, (1 << bit) + v] = table[c, v] ^ e
            e = shifted(e)


@inline
def look_up(table, word):
    out = table[0, word & LOW]
    for c in range(1, 8):
        out ^= table[c, (word >> U(8 * c)) & LOW]
    return out


# ---- once for all processors -----------------------------------------------------------------------------------------


@jit
def powers(r, n):
    """1, r, ..., r^(n-1)."""
    out = np.empty(n, np.uint64)
    out[0] = ONE
    for i in range(1, n):
        out[i] = mul(out[i - 1], r)
    return out


@jit
def times(x, y):
    """Entry by entry, of short vectors."""
    out = np.empty(x.size, np.uint64)
    for i in range(x.size):
        out[i] = mul(x[i], y[i])
    return out


@jit
def product_coefficients(gram, weights):
    """Coefficients of (Σ_l weights_l X^l a_l)(Σ_k X^(K-1-k) b_k), from gram[l, k] = <a_l, b_k>; b may be shorter."""
    rows, columns = gram.shape
    out = np.zeros(rows + columns - 1, np.uint64)
    for i in range(rows):
        for k in range(columns):
            out[i + columns - 1 - k] ^= mul(weights[i], gram[i, k])
    return out


@jit
def transpose(x):
    """In place: 64 words, bit (i, j) to (j, i)."""
    j, m = 32, U(0x00000000FFFFFFFF)
    while j:
        k = 0
        while k < 64:
            t = ((x[k] >> U(j)) ^ x[k + j]) & m
            x[k] ^= t << U(j)
            x[k + j] ^= t
            k = (k + j + 1) & ~j
        j >>= 1
        m ^= m << U(j)


@jit
def to_planes(words, rows):
    """Plane b holds bit b of all words, 64 of them a word; their number is a multiple of 64."""
    count = words.size // 64
    out = np.empty((rows, count), np.uint64)
    part = np.empty(64, np.uint64)
    for t in range(count):
        for i in range(64):
            part[i] = words[64 * t + i]
        transpose(part)
        for i in range(rows):
            out[i, t] = part[i]
    return out


@jit
def to_words(planes):
    """Back: words of as many bits as there are planes."""
    rows, count = planes.shape
    out = np.empty(64 * count, np.uint64)
    part = np.empty(64, np.uint64)
    for t in range(count):
        for i in range(64):
            part[i] = planes[i, t] if i < rows else ZERO
        transpose(part)
        for i in range(64):
            out[64 * t + i] = part[i]
    return out


@jit
def spread_bits(a_low, a_high, w, out):
    """out[t, u] = Σ_l w_l (bit u of a[l, t]); rows 0..31 in a_low, 32..63 in a_high."""
    table = np.zeros((8, 256), np.uint64)
    for c in range(8):
        for v in range(1, 256):
            for bit in range(8):
                if v >> bit & 1:
                    table[c, v] ^= w[8 * c + bit]
    count = a_low.shape[1]
    part = np.empty((TILE, 64), np.uint64)
    for start in range(0, count, TILE):
        size = min(TILE, count - start)
        for i in range(HALF):
            for t in range(size):
                part[t, i] = a_low[i, start + t]
                part[t, HALF + i] = a_high[i, start + t]
        for t in range(size):
            transpose(part[t])
            for u in range(64):
                out[start + t, u] = look_up(table, part[t, u])


@jit
def sum_where(mask, low, high, out):
    """out[k] ^= Σ_tu mask[t, u] (bit u of b[k, t]), b as two halves of 32 rows."""
    for t in range(mask.shape[0]):
        for k in range(2 * HALF):
            word = low[k, t] if k < HALF else high[k - HALF, t]
            total = ZERO
            for u in range(64):
                total ^= mask[t, u] * ((word >> U(u)) & ONE)
            out[k] ^= total


# ---- the loops of this file ------------------------------------------------------------------------------------------


@jit
def gram_bits(a_low, a_high, b_low, b_high, eps):
    out = np.zeros((2 * HALF, 2 * HALF), np.uint64)
    table = np.zeros((8, 256), np.uint64)
    for t in range(eps.size):
        fill_table(table, eps[t])
        for i in range(2 * HALF):
            x = a_low[i, t] if i < HALF else a_high[i - HALF, t]
            for k in range(HALF):
                out[i, k] ^= look_up(table, x & b_low[k, t])
                out[i, HALF + k] ^= look_up(table, x & b_high[k, t])
    return out


@jit
def weigh_bits(out, eps):
    """out[t, u] *= eps_t X^u."""
    for t in range(eps.size):
        e = eps[t]
        for u in range(64):
            out[t, u] = mul(out[t, u], e)
            e = shifted(e)


def fold_bits(a_low, a_high, w, eps, out):
    spread_bits(a_low, a_high, w, out)
    if eps is not None:
        weigh_bits(out, eps)


@jit
def gram_field(a, b):
    rows, columns = len(a), len(b)
    out = np.zeros((rows, columns), np.uint64)
    for t in range(a.shape[1]):
        for i in range(rows):
            for k in range(columns):
                out[i, k] ^= mul(a[i, t], b[k, t])
    return out


@jit
def fold_field(a, w):
    rows, count = a.shape
    out = np.zeros(count, np.uint64)
    table = np.zeros((8, 256), np.uint64)
    for i in range(rows):
        fill_table(table, w[i])
        for t in range(count):
            out[t] ^= look_up(table, a[i, t])
    return out


@jit
def dot(x, y):
    out = ZERO
    for t in range(x.size):
        out ^= mul(x[t], y[t])
    return out


@jit
def weigh_rows(x, alpha, beta):
    out = ZERO
    for i in range(x.shape[0]):
        row = ZERO
        for j in range(x.shape[1]):
            row ^= mul(beta[j], x[i, j])
        out ^= mul(alpha[i], row)
    return out


@jit
def scatter_weights(perm, alpha, beta, out):
    rows, n = perm.shape
    table = np.zeros((8, 256), np.uint64)
    for i in range(rows):
        fill_table(table, alpha[i])
        for j in range(n):
            out[i, perm[i, j]] = look_up(table, beta[j])
