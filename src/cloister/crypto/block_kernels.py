"""The inner loops of encrypted inference, compiled by numba, for primes of at most 28 bits; see `block`."""
# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201, D403

from __future__ import annotations

import numpy as np

from cloister.crypto.kernels import ZERO, dd_mul, inline, jit

TERMS = 32  # tensor products that add up in one word before it is reduced: 2 · 32 · 2^56 < 2^63


@inline
def reduce(x, q, inv):
    """x mod q for x < 2^63, q < 2^28."""
    r = np.int64(x) - np.int64(np.float64(np.int64(x)) * inv) * np.int64(q)
    if r < 0:
        r += np.int64(q)
    if r >= np.int64(q):
        r -= np.int64(q)
    return np.uint64(r)


@jit
def tensor_sum(x, y, out, q, inv):
    """Σ_f x_f ⊗ y_f: x, y (f, 2, k, N), out (3, k, N)."""
    f, _, k, n = x.shape
    for j in range(k):
        p, v = q[j], inv[j]
        for s in range(0, n, 512):
            e = min(n, s + 512)
            out[:, j, s:e] = ZERO
            o0, o1, o2 = out[0, j, s:e], out[1, j, s:e], out[2, j, s:e]
            for t in range(f):
                a0, a1 = x[t, 0, j, s:e], x[t, 1, j, s:e]
                b0, b1 = y[t, 0, j, s:e], y[t, 1, j, s:e]
                for i in range(e - s):
                    o0[i] += a0[i] * b0[i]
                    o1[i] += a0[i] * b1[i] + a1[i] * b0[i]
                    o2[i] += a1[i] * b1[i]
                if t % TERMS == TERMS - 1 or t == f - 1:
                    for i in range(e - s):
                        o0[i] = reduce(o0[i], p, v)
                        o1[i] = reduce(o1[i], p, v)
                        o2[i] = reduce(o2[i], p, v)


@jit
def add_multiple(out, x, factor, q, inv):
    """Add factor[j]·x to out mod q[j]: arrays (n, p, k, N)."""
    n, p, k, length = x.shape
    for a in range(n):
        for b in range(p):
            for j in range(k):
                c, m, v = factor[j], q[j], inv[j]
                for i in range(length):
                    out[a, b, j, i] = reduce(out[a, b, j, i] + c * x[a, b, j, i], m, v)


@jit
def reduce_into(y, out, q, inv):
    """Exact integers held as float64 to residues."""
    n, m = y.shape
    for a in range(n):
        for i in range(m):
            z = y[a, i] - np.floor(y[a, i] * inv) * q
            if z < 0:
                z += q
            if z >= q:
                z -= q
            out[a, i] = np.uint64(z)


@jit
def scale(x, factor, out):
    """A row of double-doubles times a double."""
    for i in range(x.shape[1]):
        out[0, i], out[1, i] = dd_mul(x[0, i], x[1, i], factor, 0.0)


@jit
def forward(a, w, ws, q):
    """NTT in place, same order as `kernels.forward`, for q < 2^28; ws = ⌊2^32·w / q⌋."""
    k, n = a.shape
    row, part = np.empty(n, np.uint32), np.empty(n // 2, np.uint32)
    shift = np.uint64(32)
    for j in range(k):
        wide = q[j]
        p = np.uint32(wide)
        for i in range(n):
            row[i] = np.uint32(a[j, i])
        t, m = n, 1
        while m < n:
            t >>= 1
            if t >= 8:
                for i in range(m):
                    x, xs, s = np.uint64(w[j, m + i]), np.uint64(ws[j, m + i]), 2 * i * t
                    low, high = row[s : s + t], row[s + t : s + 2 * t]
                    for c in range(t):
                        y = np.uint64(high[c])
                        v = np.uint32(x * y - ((xs * y) >> shift) * wide)
                        part[c] = min(v, np.uint32(v - p))
                    for c in range(t):
                        u = low[c]
                        y1, z1 = np.uint32(u + part[c]), np.uint32(u + p - part[c])
                        low[c] = min(y1, np.uint32(y1 - p))
                        high[c] = min(z1, np.uint32(z1 - p))
            else:
                for c in range(t):
                    for i in range(m):
                        at = 2 * i * t + c
                        y = np.uint64(row[at + t])
                        v = np.uint32(np.uint64(w[j, m + i]) * y - ((np.uint64(ws[j, m + i]) * y) >> shift) * wide)
                        v = min(v, np.uint32(v - p))
                        u = row[at]
                        y1, z1 = np.uint32(u + v), np.uint32(u + p - v)
                        row[at] = min(y1, np.uint32(y1 - p))
                        row[at + t] = min(z1, np.uint32(z1 - p))
            m <<= 1
        for i in range(n):
            a[j, i] = np.uint64(row[i])


@jit
def backward(a, w, ws, q, n_inv, inv):
    k, n = a.shape
    row = np.empty(n, np.uint32)
    part = np.empty(n // 2, np.uint32)
    shift = np.uint64(32)
    for j in range(k):
        wide = q[j]
        p = np.uint32(wide)
        for i in range(n):
            row[i] = np.uint32(a[j, i])
        t, m = 1, n
        while m > 1:
            half = m >> 1
            if t >= 8:
                for i in range(half):
                    x, xs, s = np.uint64(w[j, half + i]), np.uint64(ws[j, half + i]), 2 * i * t
                    low, high = row[s : s + t], row[s + t : s + 2 * t]
                    for c in range(t):
                        u, v = low[c], high[c]
                        y1 = np.uint32(u + v)
                        part[c] = np.uint32(u + p - v)
                        low[c] = min(y1, np.uint32(y1 - p))
                    for c in range(t):
                        y = np.uint64(part[c])
                        z = np.uint32(x * y - ((xs * y) >> shift) * wide)
                        high[c] = min(z, np.uint32(z - p))
            else:
                for c in range(t):
                    for i in range(half):
                        at = 2 * i * t + c
                        u, v = row[at], row[at + t]
                        y1 = np.uint32(u + v)
                        row[at] = min(y1, np.uint32(y1 - p))
                        y = np.uint64(np.uint32(u + p - v))
                        z = np.uint32(
                            np.uint64(w[j, half + i]) * y - ((np.uint64(ws[j, half + i]) * y) >> shift) * wide
                        )
                        row[at + t] = min(z, np.uint32(z - p))
            t <<= 1
            m = half
        for i in range(n):
            a[j, i] = reduce(np.uint64(row[i]) * n_inv[j], wide, inv[j])


@jit
def of_limbs(limbs, powers, q, inv, out):
    """Residues of Σ limbs[l]·2^(42 l) for signed limbs and q < 2^28."""
    k, n = out.shape
    for j in range(k):
        p, v = q[j], inv[j]
        for i in range(n):
            acc = ZERO
            for m in range(limbs.shape[0]):
                x = limbs[m, i]
                if x != 0:
                    r = reduce(np.uint64(abs(x)), p, v)
                    if x < 0 and r > ZERO:
                        r = p - r
                    acc += r * powers[m, j]
            out[j, i] = reduce(acc, p, v)
