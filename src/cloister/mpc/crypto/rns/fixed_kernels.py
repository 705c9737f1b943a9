"""The inner loops of 256-bit fixed-point arithmetic, compiled by numba: integers of four words, and their FFT.

A number is four 64-bit words, lowest first, in two's complement: an integer, or a real number times 2^POINT. Factors
(roots of unity, weights of a slot map) are a sign and a fraction of three words. A product drops what lies below its
lowest word, at most a few units there: the same bits on every machine.
"""
# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201, D403

from __future__ import annotations

import numpy as np

from cloister.mpc.crypto.rns.kernels import ZERO, high_word, inline, jit, reduced

U = np.uint64
ONE = np.uint64(1)
TOP = np.uint64(63)
WORD = np.uint64(64)


@inline
def plus(a0, a1, a2, a3, b0, b1, b2, b3):
    s0 = a0 + b0
    c = np.uint64(s0 < a0)
    t1 = a1 + b1
    s1 = t1 + c
    c = np.uint64(t1 < a1) + np.uint64(s1 < t1)
    t2 = a2 + b2
    s2 = t2 + c
    c = np.uint64(t2 < a2) + np.uint64(s2 < t2)
    return s0, s1, s2, a3 + b3 + c


@inline
def minus(a0, a1, a2, a3, b0, b1, b2, b3):
    s0 = a0 - b0
    c = np.uint64(a0 < b0)
    t1 = a1 - b1
    s1 = t1 - c
    c = np.uint64(a1 < b1) + np.uint64(t1 < c)
    t2 = a2 - b2
    s2 = t2 - c
    c = np.uint64(a2 < b2) + np.uint64(t2 < c)
    return s0, s1, s2, a3 - b3 - c


@inline
def fraction_of(a0, a1, a2, a3, f0, f1, f2, sign):
    """± a · f / 2^192; `sign` is 1 for minus."""
    flip = a3 >> TOP
    mask = ZERO - flip
    a0, a1, a2, a3 = a0 ^ mask, a1 ^ mask, a2 ^ mask, a3 ^ mask  # |a|, less one where a is negative
    r3, r4, r5 = high_word(a0, f2), high_word(a1, f2), high_word(a2, f2)
    r6 = high_word(a3, f2)
    # column 3
    x = high_word(a1, f1)
    r3 += x
    c = np.uint64(r3 < x)
    x = high_word(a2, f0)
    r3 += x
    c += np.uint64(r3 < x)
    x = a1 * f2
    r3 += x
    c += np.uint64(r3 < x)
    x = a2 * f1
    r3 += x
    c += np.uint64(r3 < x)
    x = a3 * f0
    r3 += x
    c += np.uint64(r3 < x)
    # column 4
    r4 += c
    c = np.uint64(r4 < c)
    x = high_word(a2, f1)
    r4 += x
    c += np.uint64(r4 < x)
    x = high_word(a3, f0)
    r4 += x
    c += np.uint64(r4 < x)
    x = a2 * f2
    r4 += x
    c += np.uint64(r4 < x)
    x = a3 * f1
    r4 += x
    c += np.uint64(r4 < x)
    # columns 5 and 6
    r5 += c
    c = np.uint64(r5 < c)
    x = high_word(a3, f1)
    r5 += x
    c += np.uint64(r5 < x)
    x = a3 * f2
    r5 += x
    c += np.uint64(r5 < x)
    r6 += c
    mask = ZERO - (flip ^ sign)
    return r3 ^ mask, r4 ^ mask, r5 ^ mask, r6 ^ mask


@inline
def turned(z, i, roots, signs, at, conjugate):
    """z[i] times root `at` of the tables, which go half way round, as eight words."""
    half = U(at >= roots.shape[1])
    at -= roots.shape[1] if half else 0
    f, g, cs, sn = roots[0, at], roots[1, at], signs[0, at] ^ half, signs[1, at] ^ half ^ conjugate
    a0, a1, a2, a3 = z[i, 0, 0], z[i, 0, 1], z[i, 0, 2], z[i, 0, 3]
    b0, b1, b2, b3 = z[i, 1, 0], z[i, 1, 1], z[i, 1, 2], z[i, 1, 3]
    p0, p1, p2, p3 = fraction_of(a0, a1, a2, a3, f[0], f[1], f[2], cs)
    q0, q1, q2, q3 = fraction_of(b0, b1, b2, b3, g[0], g[1], g[2], sn)
    x0, x1, x2, x3 = minus(p0, p1, p2, p3, q0, q1, q2, q3)
    p0, p1, p2, p3 = fraction_of(a0, a1, a2, a3, g[0], g[1], g[2], sn)
    q0, q1, q2, q3 = fraction_of(b0, b1, b2, b3, f[0], f[1], f[2], cs)
    y0, y1, y2, y3 = plus(p0, p1, p2, p3, q0, q1, q2, q3)
    return x0, x1, x2, x3, y0, y1, y2, y3


@inline
def turn(z, i, roots, signs, at, conjugate):
    """The same, in place."""
    x0, x1, x2, x3, y0, y1, y2, y3 = turned(z, i, roots, signs, at, conjugate)
    z[i, 0, 0], z[i, 0, 1], z[i, 0, 2], z[i, 0, 3] = x0, x1, x2, x3
    z[i, 1, 0], z[i, 1, 1], z[i, 1, 2], z[i, 1, 3] = y0, y1, y2, y3


@inline
def cross(z, a, part_a, b, part_b, swap):
    """The sum of two numbers goes to the place of the first, their difference to the second; or swapped."""
    u0, u1, u2, u3 = z[a, part_a, 0], z[a, part_a, 1], z[a, part_a, 2], z[a, part_a, 3]
    v0, v1, v2, v3 = z[b, part_b, 0], z[b, part_b, 1], z[b, part_b, 2], z[b, part_b, 3]
    s0, s1, s2, s3 = plus(u0, u1, u2, u3, v0, v1, v2, v3)
    d0, d1, d2, d3 = minus(u0, u1, u2, u3, v0, v1, v2, v3)
    if swap:
        s0, s1, s2, s3, d0, d1, d2, d3 = d0, d1, d2, d3, s0, s1, s2, s3
    z[a, part_a, 0], z[a, part_a, 1], z[a, part_a, 2], z[a, part_a, 3] = s0, s1, s2, s3
    z[b, part_b, 0], z[b, part_b, 1], z[b, part_b, 2], z[b, part_b, 3] = d0, d1, d2, d3


@jit
def fft(z, roots, signs, stride, conjugate):
    """In place on (H, 2, 4) in bit-reversed order; the root of order H is entry `stride` of the tables (2, n, 3).

    Two stages at a time, with three products for four numbers; one stage alone first where log2 H is odd.
    """
    n, h = z.shape[0], 1
    while h < n:
        h *= 4
    h = 1 if h == n else 2
    if h == 2:
        for a in range(0, n, 2):
            cross(z, a, 0, a + 1, 0, swap=False)
            cross(z, a, 1, a + 1, 1, swap=False)
    while h < n:
        step = stride * (n // (4 * h))
        for first in range(0, n, 4 * h):
            for j in range(h):
                a = first + j
                b, c, d = a + h, a + 2 * h, a + 3 * h
                if j:
                    turn(z, b, roots, signs, 2 * j * step, conjugate)
                    turn(z, c, roots, signs, j * step, conjugate)
                    turn(z, d, roots, signs, 3 * j * step, conjugate)
                for part in range(2):
                    cross(z, a, part, b, part, swap=False)
                    cross(z, c, part, d, part, swap=False)
                    cross(z, a, part, c, part, swap=False)
                # b ± i·d, b ∓ i·d if conjugate; real and imaginary parts of d change places
                cross(z, b, 0, d, 1, swap=conjugate == ZERO)
                cross(z, b, 1, d, 0, swap=conjugate != ZERO)
                for m in range(4):
                    z[d, 0, m], z[d, 1, m] = z[d, 1, m], z[d, 0, m]
        h *= 4


@jit
def twist(z, roots, signs, conjugate):
    """z[i] times root i, in place."""
    for i in range(z.shape[0]):
        turn(z, i, roots, signs, i, conjugate)


@jit
def place(z, source, flip, out):
    """out[i] = z[source[i]], the imaginary part changed in sign, to the last bit, where flip[i] has all bits set."""
    for i in range(len(source)):
        at, mask = source[i], flip[i]
        for m in range(4):
            out[i, 0, m] = z[at, 0, m]
            out[i, 1, m] = z[at, 1, m] ^ mask


@jit
def rows(start, source, factor, sign, up, z, out):
    """out[r] = 2^up · Σ ± factor · z[source] over the entries start[r] ... start[r + 1] of a sparse matrix."""
    down = WORD - np.uint64(up)
    for r in range(len(start) - 1):
        for part in range(2):
            s0, s1, s2, s3 = ZERO, ZERO, ZERO, ZERO
            for e in range(start[r], start[r + 1]):
                a, f = z[source[e], part], factor[e]
                p0, p1, p2, p3 = fraction_of(a[0], a[1], a[2], a[3], f[0], f[1], f[2], sign[e])
                s0, s1, s2, s3 = plus(s0, s1, s2, s3, p0, p1, p2, p3)
            u = np.uint64(up)
            out[r, part, 3] = (s3 << u) | (s2 >> down)
            out[r, part, 2] = (s2 << u) | (s1 >> down)
            out[r, part, 1] = (s1 << u) | (s0 >> down)
            out[r, part, 0] = s0 << u


@jit
def add(acc, a):
    """Rows of four words, in place."""
    for i in range(a.shape[0]):
        acc[i, 0], acc[i, 1], acc[i, 2], acc[i, 3] = plus(
            acc[i, 0], acc[i, 1], acc[i, 2], acc[i, 3], a[i, 0], a[i, 1], a[i, 2], a[i, 3]
        )


@jit
def shift_up(a, bits, out):
    """a · 2^bits for 0 < bits < 64, over rows of four words."""
    u, d = np.uint64(bits), WORD - np.uint64(bits)
    for i in range(a.shape[0]):
        out[i, 3] = (a[i, 3] << u) | (a[i, 2] >> d)
        out[i, 2] = (a[i, 2] << u) | (a[i, 1] >> d)
        out[i, 1] = (a[i, 1] << u) | (a[i, 0] >> d)
        out[i, 0] = a[i, 0] << u


@jit
def shift_down(a, bits, out):
    """The nearest integers to a / 2^bits for 0 < bits < 64."""
    d, u = np.uint64(bits), WORD - np.uint64(bits)
    half = ONE << np.uint64(bits - 1)
    for i in range(a.shape[0]):
        s0, s1, s2, s3 = plus(a[i, 0], a[i, 1], a[i, 2], a[i, 3], half, ZERO, ZERO, ZERO)
        fill = (ZERO - (s3 >> TOP)) << u
        out[i, 0] = (s0 >> d) | (s1 << u)
        out[i, 1] = (s1 >> d) | (s2 << u)
        out[i, 2] = (s2 >> d) | (s3 << u)
        out[i, 3] = (s3 >> d) | fill


@jit
def of_digits(digits, q, modulus, out):
    """Mixed-radix digits (k, N) → centred integers (N, 4); `modulus` is their modulus in four words."""
    k, n = digits.shape
    h0, h1, h2 = modulus[0], modulus[1], modulus[2]
    for i in range(n):
        w0, w1, w2, w3 = digits[k - 1, i], ZERO, ZERO, ZERO
        for j in range(k - 2, -1, -1):
            p = q[j]
            x0, x1, x2 = high_word(w0, p), high_word(w1, p), high_word(w2, p)
            w3 = w3 * p + x2
            t = w2 * p
            w2 = t + x1
            w3 += np.uint64(w2 < t)
            t = w1 * p
            w1 = t + x0
            c = np.uint64(w1 < t)
            w2 += c
            w3 += np.uint64(w2 < c)
            w0, w1, w2, w3 = plus(w0 * p, w1, w2, w3, digits[j, i], ZERO, ZERO, ZERO)
        # 2w > modulus: negative
        d3 = (w3 << ONE) | (w2 >> TOP)
        d2 = (w2 << ONE) | (w1 >> TOP)
        d1 = (w1 << ONE) | (w0 >> TOP)
        d0 = w0 << ONE
        _, _, _, s = minus(modulus[0], modulus[1], modulus[2], modulus[3], d0, d1, d2, d3)
        if s >> TOP:
            w0, w1, w2, w3 = minus(w0, w1, w2, w3, h0, h1, h2, modulus[3])
        out[i, 0], out[i, 1], out[i, 2], out[i, 3] = w0, w1, w2, w3


@jit
def to_residues(a, powers, quotients, q, out):
    """Signed integers (N, 4) → residues (k, N); powers (5, k) are those of 2^64, with their Shoup quotients."""
    k, n = out.shape
    for j in range(k):
        p = q[j]
        for i in range(n):
            acc = ZERO
            for m in range(4):
                x = a[i, m]
                acc += reduced(x * powers[m, j] - high_word(x, quotients[m, j]) * p, p)
            acc = reduced(reduced(acc, p + p), p) + p - (a[i, 3] >> TOP) * powers[4, j]
            out[j, i] = reduced(acc, p)
