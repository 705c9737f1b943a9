"""The inner loops of lattice arithmetic, compiled by numba: modular products, NTT, and inner products.

Nothing here knows what it computes for; `lattice` and `slots` are the readable side. The loops release Python's lock,
so parties in threads overlap. A modulus q has at most 61 bits and comes with ⌊2^128 / q⌋ as two words (Barrett).

A double-double is an unevaluated sum of two doubles, about 104 significant bits [Dek71].

References
----------
[Dek71] Dekker, Numerische Mathematik 18, 1971.
"""
# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201, ANN202

from __future__ import annotations

import numpy as np

from cloister.errors import MissingExtra

try:
    from llvmlite import ir
    from numba import njit, types
    from numba.extending import intrinsic
except ImportError:  # pragma: no cover
    raise MissingExtra("numba", "he") from None

jit = njit(cache=True, nogil=True)
inline = njit(inline="always")
ZERO = np.uint64(0)
SPLIT = 134217729.0  # 2^27 + 1


@intrinsic
def high_word(typing, a, b):
    """The upper half of a 128-bit product: one machine instruction, which NumPy's integers do not offer."""

    def emit(context, builder, signature, args):
        wide = ir.IntType(128)
        product = builder.mul(builder.zext(args[0], wide), builder.zext(args[1], wide))
        return builder.trunc(builder.lshr(product, ir.Constant(wide, 64)), ir.IntType(64))

    return types.uint64(types.uint64, types.uint64), emit


@inline
def reduced(x, q):
    """A number x in [0, 2q) modulo q, without a branch: x - q wraps to something large where x is below q."""
    return min(x, x - q)


@inline
def times(a, b, q, r0, r1):
    lo, hi = a * b, high_word(a, b)
    carry = high_word(lo, r0)
    mid = lo * r1
    top = high_word(lo, r1)
    s = mid + carry
    if s < mid:
        top += np.uint64(1)
    t = hi * r0
    top2 = high_word(hi, r0)
    s2 = s + t
    if s2 < s:
        top2 += np.uint64(1)
    r = lo - (hi * r1 + top + top2) * q
    return r - q if r >= q else r


@jit
def forward(a, w, ws, q):
    k, n = a.shape
    for j in range(k):
        p, row, t, m = q[j], a[j], n, 1
        while m < n:
            t >>= 1
            for i in range(m):
                x, xs, start = w[j, m + i], ws[j, m + i], 2 * i * t
                for at in range(start, start + t):
                    u, y = row[at], row[at + t]
                    v = reduced(x * y - high_word(xs, y) * p, p)
                    row[at] = reduced(u + v, p)
                    row[at + t] = reduced(u + p - v, p)
            m <<= 1


@jit
def backward(a, w, ws, q, n_inv, r0, r1):
    k, n = a.shape
    for j in range(k):
        p, row, t, m = q[j], a[j], 1, n
        while m > 1:
            half, start = m >> 1, 0
            for i in range(half):
                x, xs = w[j, half + i], ws[j, half + i]
                for at in range(start, start + t):
                    u, v = row[at], row[at + t]
                    row[at] = reduced(u + v, p)
                    d = u + p - v
                    row[at + t] = reduced(x * d - high_word(xs, d) * p, p)
                start += 2 * t
            t <<= 1
            m = half
        for at in range(n):
            row[at] = times(row[at], n_inv[j], p, r0[j], r1[j])


@jit
def add_product(acc, a, b, sign, q, r0, r1):
    k, n = acc.shape
    for j in range(k):
        p = q[j]
        for i in range(n):
            v = times(a[j, i], b[j, i], p, r0[j], r1[j])
            if sign < 0 and v > ZERO:
                v = p - v
            s = acc[j, i] + v
            acc[j, i] = s - p if s >= p else s


@jit
def inner(a, b, q, r0, r1, out):
    """out[j] = Σ_i a[j, i] · b[j, i] modulo q[j]."""
    k, n = a.shape
    for j in range(k):
        p, total = q[j], ZERO
        for i in range(n):
            s = total + times(a[j, i], b[j, i], p, r0[j], r1[j])
            total = s - p if s >= p else s
        out[j] = total


@jit
def add_multiple(acc, a, factor, q, r0, r1):
    for i in range(len(acc)):
        s = acc[i] + times(a[i], factor, q, r0, r1)
        acc[i] = s - q if s >= q else s


@jit
def add(acc, a, q):
    k, n = acc.shape
    for j in range(k):
        p = q[j]
        for i in range(n):
            s = acc[j, i] + a[j, i]
            acc[j, i] = s - p if s >= p else s


@jit
def subtract(acc, a, q):
    k, n = acc.shape
    for j in range(k):
        p = q[j]
        for i in range(n):
            x, y = acc[j, i], a[j, i]
            acc[j, i] = x - y if x >= y else x + p - y


@jit
def of_small(v, q, out):
    k, n = out.shape
    for j in range(k):
        p, o = np.int64(q[j]), out[j]
        for i in range(n):
            x = v[i]
            if x >= p or x <= -p:
                x %= p
            o[i] = np.uint64(x + (p if x < 0 else 0))


@jit
def pack(row, width, out):
    """The lower `width` bytes of each word, one after another."""
    for i in range(row.shape[0]):
        x, at = row[i], i * width
        for b in range(width):
            out[at + b] = np.uint8(x)
            x >>= np.uint64(8)


@jit
def largest(a, q):
    """How many rows have an entry that is no residue."""
    k, n = a.shape
    bad = 0
    for j in range(k):
        for i in range(n):
            if a[j, i] >= q[j]:
                bad += 1
                break
    return bad


@jit
def mixed_radix(x, q, r0, r1, inverse):
    """Garner: residues to digits d_j < q_j with value Σ d_j q_0 ⋯ q_{j-1}, in place."""
    k, n = x.shape
    for j in range(1, k):
        p = q[j]
        for i in range(n):
            v = x[j, i]
            for m in range(j):
                d = x[m, i] % p
                v = v - d if v >= d else v + p - d
                v = times(v, inverse[m, j], p, r0[j], r1[j])
            x[j, i] = v


# ---- double-double ---------------------------------------------------------------------------------------------------


@inline
def two_sum(a, b):
    s = a + b
    t = s - a
    return s, (a - (s - t)) + (b - t)


@inline
def fast_sum(a, b):
    s = a + b
    return s, b - (s - a)


@inline
def two_product(a, b):
    p = a * b
    t = SPLIT * a
    ah = t - (t - a)
    al = a - ah
    t = SPLIT * b
    bh = t - (t - b)
    bl = b - bh
    return p, ((ah * bh - p) + ah * bl + al * bh) + al * bl


@inline
def dd_add(ah, al, bh, bl):
    s, e = two_sum(ah, bh)
    t, f = two_sum(al, bl)
    s, e = fast_sum(s, e + t)
    return fast_sum(s, e + f)


@inline
def dd_mul(ah, al, bh, bl):
    p, e = two_product(ah, bh)
    return fast_sum(p, e + (ah * bl + al * bh))


@jit
def lift(digits, q, radix_high, radix_low, out):
    """Centred value of mixed-radix digits; a negative one is complemented first, so that nothing large cancels."""
    k, n = digits.shape
    for i in range(n):
        negative = digits[k - 1, i] > q[k - 1] >> np.uint64(1)
        carry = np.uint64(1)
        h, low = 0.0, 0.0
        for j in range(k):
            d = digits[j, i]
            if negative:
                d = q[j] - np.uint64(1) - d + carry
                if d == q[j]:
                    d = ZERO
                else:
                    carry = ZERO
            dh = np.float64(d >> np.uint64(30)) * 1073741824.0
            dl = np.float64(d & np.uint64(1073741823))
            ph, pl = dd_mul(radix_high[j], radix_low[j], dh, 0.0)
            h, low = dd_add(h, low, ph, pl)
            ph, pl = dd_mul(radix_high[j], radix_low[j], dl, 0.0)
            h, low = dd_add(h, low, ph, pl)
        out[0, i] = -h if negative else h
        out[1, i] = -low if negative else low
