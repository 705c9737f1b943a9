"""Number-theoretic transforms of encrypted inference, compiled by numba; primes of at most 28 bits in 32-bit words."""
# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201, ANN202

from __future__ import annotations

import numpy as np

from cloister.mpc.crypto.owner_ckks.kernels import U, scaled
from cloister.mpc.crypto.rns.kernels import jit

LATE = 32  # butterflies closer than this run across blocks, after a transposition


@jit
def _down(lo, hi, out_lo, out_hi, w, ws, p):
    for c in range(lo.shape[0]):
        v = scaled(hi[c], w, ws, p)
        y, z = U(lo[c] + v), U(lo[c] + p - v)
        out_lo[c] = min(y, U(y - p))
        out_hi[c] = min(z, U(z - p))


@jit
def _down_each(lo, hi, out_lo, out_hi, w, ws, p):
    for c in range(lo.shape[0]):
        v = scaled(hi[c], w[c], ws[c], p)
        y, z = U(lo[c] + v), U(lo[c] + p - v)
        out_lo[c] = min(y, U(y - p))
        out_hi[c] = min(z, U(z - p))


@jit
def _up(lo, hi, out_lo, out_hi, w, ws, p):
    for c in range(lo.shape[0]):
        y, z = U(lo[c] + hi[c]), U(lo[c] + p - hi[c])
        out_lo[c] = min(y, U(y - p))
        out_hi[c] = scaled(z, w, ws, p)


@jit
def _up_each(lo, hi, out_lo, out_hi, w, ws, p):
    for c in range(lo.shape[0]):
        y, z = U(lo[c] + hi[c]), U(lo[c] + p - hi[c])
        out_lo[c] = min(y, U(y - p))
        out_hi[c] = scaled(z, w[c], ws[c], p)


@jit
def forward(a, w, ws, late, late_s, q):
    """NTT in place, same order as `kernels.forward`."""
    k, n = a.shape
    blocks = n // LATE
    row, other = np.empty(n, np.uint32), np.empty(n, np.uint32)
    z, y = np.empty((LATE, blocks), np.uint32), np.empty((LATE, blocks), np.uint32)
    for j in range(k):
        p, t, m = q[j], n, 1
        row[:] = a[j]
        while t > LATE:
            t >>= 1
            for i in range(m):
                s = 2 * i * t
                _down(row[s : s + t], row[s + t : s + 2 * t], other[s : s + t], other[s + t : s + 2 * t],
                      w[j, m + i], ws[j, m + i], p)  # fmt: skip
            m <<= 1
            row, other = other, row
        for i in range(blocks):
            for e in range(LATE):
                z[e, i] = row[i * LATE + e]
        while t > 1:
            t >>= 1
            groups = LATE // (2 * t)
            for b in range(groups):
                x, xs = late[j, groups - 1 + b], late_s[j, groups - 1 + b]
                for e in range(2 * b * t, 2 * b * t + t):
                    _down_each(z[e], z[e + t], y[e], y[e + t], x, xs, p)
            z, y = y, z
        for i in range(blocks):
            for e in range(LATE):
                a[j, i * LATE + e] = z[e, i]


@jit
def backward(a, w, ws, late, late_s, q, n_inv, n_inv_s):
    k, n = a.shape
    blocks = n // LATE
    row, other = np.empty(n, np.uint32), np.empty(n, np.uint32)
    z, y = np.empty((LATE, blocks), np.uint32), np.empty((LATE, blocks), np.uint32)
    for j in range(k):
        p, t = q[j], 1
        for i in range(blocks):
            for e in range(LATE):
                z[e, i] = a[j, i * LATE + e]
        while t < LATE:
            groups = LATE // (2 * t)
            for b in range(groups):
                x, xs = late[j, groups - 1 + b], late_s[j, groups - 1 + b]
                for e in range(2 * b * t, 2 * b * t + t):
                    _up_each(z[e], z[e + t], y[e], y[e + t], x, xs, p)
            z, y = y, z
            t <<= 1
        for i in range(blocks):
            for e in range(LATE):
                row[i * LATE + e] = z[e, i]
        while t < n:
            half = n // (2 * t)
            for i in range(half):
                s = 2 * i * t
                _up(row[s : s + t], row[s + t : s + 2 * t], other[s : s + t], other[s + t : s + 2 * t],
                    w[j, half + i], ws[j, half + i], p)  # fmt: skip
            row, other = other, row
            t <<= 1
        for i in range(n):
            a[j, i] = scaled(row[i], n_inv[j], n_inv_s[j], p)
