"""The inner loops between bases of primes: digits of a polynomial modulo other primes, products with keys, divisions.

Doubles and primes as in `float_kernels`; a polynomial on its way is (rows, N) of doubles, at most a few times q.
"""
# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201

from __future__ import annotations

import numpy as np

from cloister.mpc.crypto.rns.float_kernels import LANES, ROW, fma, nearest, number, residue, times, transform
from cloister.mpc.crypto.rns.kernels import inline, jit

STRIP = 512


@inline
def summed(o, a, b, q, inv):
    """The centred residue of o + a·b."""
    z = o + times(a, b, q, inv)
    return fma(-nearest(z * inv), q, z)


@jit
def to_doubles(a, out):
    for j in range(a.shape[0]):
        for i in range(a.shape[1]):
            out[j, i] = number(a[j, i])


@jit
def transform_rows(x, place, at, w, rows, q, inv):
    """To NTT form, row place[j] modulo prime at[j], in place."""
    n = x.shape[1]
    tile = np.empty((max(n // ROW, ROW), LANES))
    for j in range(len(at)):
        p = at[j]
        transform(x[place[j]].reshape((n // ROW, ROW)), tile, w[p], rows[p], q[p], inv[p], back=False)


@jit
def invert_rows(x, at, w, rows, q, inv, n_inv):
    """To coefficients, centred, in place."""
    n = x.shape[1]
    tile = np.empty((max(n // ROW, ROW), LANES))
    for j in range(x.shape[0]):
        p = at[j]
        f, m, v = n_inv[p], q[p], inv[p]
        transform(x[j].reshape((n // ROW, ROW)), tile, w[p], rows[p], m, v, back=True)
        y = x[j]
        for i in range(n):
            y[i] = times(y[i], f, m, v)


@jit
def convert(x, source, hat, target, factors, whole, q, inv, place, out):
    """The centred integer with residues x modulo the primes `source`, modulo the primes `target`; see `bases`.

    What is modulo target[t] goes to row place[t].
    """
    n, s = x.shape[1], x.shape[0]
    digits, share, acc = np.empty((s, STRIP)), np.empty(STRIP), np.empty(STRIP)
    for first in range(0, n, STRIP):
        width = min(STRIP, n - first)
        share[:] = 0.0
        for j in range(s):
            p, m, v = source[j], q[source[j]], inv[source[j]]
            h, d, y = hat[j], digits[j], x[j, first : first + width]
            for i in range(width):
                z = times(y[i], h, m, v)
                z = fma(-nearest(z * v), m, z)
                d[i] = z
                share[i] += z * v
        for i in range(width):
            share[i] = nearest(share[i])
        for t in range(len(target)):
            p, v, big = q[target[t]], inv[target[t]], whole[t]
            for i in range(width):
                acc[i] = -share[i] * big
            for j in range(s):
                f, d = factors[t, j], digits[j]
                for i in range(width):
                    acc[i] = summed(acc[i], d[i], f, p, v)
            o = out[place[t], first : first + width]
            for i in range(width):
                o[i] = acc[i]


@jit
def add_known(acc, x, b, a, at, first, last, turn, q, inv):
    """Add x[d, j]·(b, a)[d, at[j]] over the digits d to acc[:, j], first ≤ j < last; entry i of x is from turn[i]."""
    n = acc.shape[2]
    row = np.empty(n)
    for j in range(first, last):
        p, v, o0, o1 = q[at[j]], inv[at[j]], acc[0, j], acc[1, j]
        for d in range(x.shape[0]):
            y, k0, k1 = x[d, j], b[d, at[j]], a[d, at[j]]
            for i in range(len(turn)):
                row[i] = y[turn[i]]
            z = row if len(turn) else y
            for i in range(n):
                o0[i] = summed(o0[i], z[i], number(k0[i]), p, v)
            for i in range(n):
                o1[i] = summed(o1[i], z[i], number(k1[i]), p, v)


@jit
def divide(x, rest, factor, q, inv, out):
    """Words of (x - rest)·factor modulo the first primes, row by row."""
    n = x.shape[1]
    for j in range(out.shape[0]):
        p, v, f, y, z, o = q[j], inv[j], factor[j], x[j], rest[j], out[j]
        for i in range(n):
            o[i] = residue(times(y[i] - z[i], f, p, v), p, v)


@jit
def tensor(x, y, q, inv, out):
    """(x0 + x1·s)(y0 + y1·s): words (2, k, N) twice to (3, k, N)."""
    k, n = x.shape[1:]
    for j in range(k):
        p, v = q[j], inv[j]
        a0, a1, b0, b1, o0, o1, o2 = x[0, j], x[1, j], y[0, j], y[1, j], out[0, j], out[1, j], out[2, j]
        for i in range(n):
            c0, c1, d0, d1 = number(a0[i]), number(a1[i]), number(b0[i]), number(b1[i])
            o0[i] = residue(times(c0, d0, p, v), p, v)
            o1[i] = residue(times(c0, d1, p, v) + times(c1, d0, p, v), p, v)
            o2[i] = residue(times(c1, d1, p, v), p, v)


@jit
def add_product(acc, a, b, sign, q, inv):
    """Add ± a·b to acc, words (k, N), in place."""
    k, n = acc.shape
    for j in range(k):
        p, v, s, x, y, o = q[j], inv[j], float(sign), a[j], b[j], acc[j]
        for i in range(n):
            o[i] = residue(fma(s, times(number(x[i]), number(y[i]), p, v), number(o[i])), p, v)


@jit
def of_doubles(x, q, inv, out):
    """Words of integers held as doubles, below 2^200."""
    k, n = out.shape
    for j in range(k):
        p, v, o = q[j], inv[j], out[j]
        for i in range(n):
            z = x[i]
            for _ in range(4):
                z = fma(-nearest(z * v), p, z)
            o[i] = residue(z, p, v)


@jit
def turned(a, turn, out):
    """Entry i from turn[i], row by row."""
    for j in range(a.shape[0]):
        x, o = a[j], out[j]
        for i in range(a.shape[1]):
            o[i] = x[turn[i]]
