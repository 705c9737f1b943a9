"""The inner loops of encrypted inference, compiled by numba, for primes of at most 28 bits in 32-bit words.

Loops write to other arrays than they read wherever they can: the compiler then turns them into vector instructions.
A product by a known factor w comes with ws = ⌊2^32·w / q⌋ (Shoup): two multiplications and no division.
"""
# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201, D403

from __future__ import annotations

import numpy as np

from cloister.mpc.crypto.rns.kernels import inline, jit

U, W = np.uint32, np.uint64
SHIFT, LOW = np.uint64(32), np.uint64(0xFFFFFFFF)
TERMS = 32  # tensor products that add up in one word before it is reduced: 2 · 32 · 2^56 + 2^28 < 2^63
STRIP = 512  # slots that are worked on at once


@inline
def reduce(x, q, inv):
    """x mod q for x < 2^63, q < 2^28."""
    r = np.int64(x) - np.int64(np.float64(np.int64(x)) * inv) * np.int64(q)
    r += (r >> np.int64(63)) & np.int64(q)
    return min(U(r), U(r - np.int64(q)))


@inline
def scaled(y, w, ws, p):
    """w·y mod p."""
    v = U(W(w) * W(y) - ((W(ws) * W(y)) >> SHIFT) * W(p))
    return min(v, U(v - p))


# ---- polynomials (k, N) ----------------------------------------------------------------------------------------------


@jit
def add(acc, a, q):
    for j in range(acc.shape[0]):
        p = q[j]
        for i in range(acc.shape[1]):
            s = U(acc[j, i] + a[j, i])
            acc[j, i] = min(s, U(s - p))


@jit
def subtract(acc, a, q):
    for j in range(acc.shape[0]):
        p = q[j]
        for i in range(acc.shape[1]):
            s = U(acc[j, i] + p - a[j, i])
            acc[j, i] = min(s, U(s - p))


@jit
def add_known(acc, a, w, ws, q):
    """Add a·w to acc, for a polynomial w with its quotients."""
    for j in range(acc.shape[0]):
        p = q[j]
        for i in range(acc.shape[1]):
            s = U(acc[j, i] + scaled(a[j, i], w[j, i], ws[j, i], p))
            acc[j, i] = min(s, U(s - p))


@jit
def subtract_known(acc, a, w, ws, q):
    for j in range(acc.shape[0]):
        p = q[j]
        for i in range(acc.shape[1]):
            s = U(acc[j, i] + p - scaled(a[j, i], w[j, i], ws[j, i], p))
            acc[j, i] = min(s, U(s - p))


@jit
def of_small(v, q, out):
    for j in range(out.shape[0]):
        p = np.int64(q[j])
        for i in range(out.shape[1]):
            x = v[i]
            out[j, i] = U(x + ((x >> np.int64(63)) & p))


@jit
def gaussian(words, table, first, out):
    """How many entries of the table each word reaches, less half of them, as `Prg.gaussian`.

    first[h] says how many are reached by every word with the 12 leading bits h.
    """
    size, half = table.shape[0], np.int64(table.shape[0] // 2)
    for i in range(words.shape[0]):
        c = first[words[i] >> np.uint64(52)]
        while c < size and words[i] >= table[c]:
            c += 1
        out[i] = c - half


@jit
def of_uniform(words, q, inv, radix, out):
    """64-bit words modulo q; radix = 2^32 mod q."""
    for i in range(out.shape[0]):
        out[i] = reduce((words[i] >> SHIFT) * radix + (words[i] & LOW), q, inv)


# ---- long integers: rows of 32-bit words, lowest first ---------------------------------------------------------------


@jit
def add_words(words, powers, q, inv, acc):
    """Add Σ words[l]·2^(32 l) to residues; at most seven words."""
    part = np.empty(STRIP, np.uint64)
    for j in range(acc.shape[0]):
        p, v = q[j], inv[j]
        for s in range(0, acc.shape[1], STRIP):
            o = acc[j, s : s + STRIP]
            for i in range(o.shape[0]):
                part[i] = W(o[i])
            for m in range(words.shape[0]):
                w, c = words[m, s : s + STRIP], powers[m, j]
                for i in range(o.shape[0]):
                    part[i] += W(w[i]) * c
            for i in range(o.shape[0]):
                o[i] = reduce(part[i], p, v)


@jit
def to_words(x, q, inverse, inverse_s, words):
    """Residues (k, N), which are spoilt, to integers in [0, Q), by Garner."""
    k, n = x.shape
    carry = np.empty(STRIP, np.uint64)
    for s in range(0, n, STRIP):
        for j in range(1, k):
            p, d = q[j], x[j, s : s + STRIP]
            for m in range(j):
                e, c, cs = x[m, s : s + STRIP], inverse[m, j], inverse_s[m, j]
                for i in range(d.shape[0]):
                    y = min(e[i], U(e[i] - p))  # primes differ by less than a factor of two
                    d[i] = scaled(U(d[i] + p - y), c, cs, p)
        words[:, s : s + STRIP] = U(0)
        for back in range(k):
            j = k - 1 - back
            d, p = x[j, s : s + STRIP], W(q[j])
            for i in range(d.shape[0]):
                carry[i] = W(d[i])
            for m in range(min(back + 1, words.shape[0])):
                w = words[m, s : s + STRIP]
                for i in range(d.shape[0]):
                    v = W(w[i]) * p + carry[i]
                    w[i] = U(v & LOW)
                    carry[i] = v >> SHIFT


@jit
def times_shift(words, factor, shift, out):
    """⌊words·factor / 2^shift⌋ for a factor of 32 bits and a shift of -32 or more."""
    n, rows = words.shape[1], words.shape[0]
    skip, by = shift // 32, W(shift % 32)
    product = np.empty((rows + 1, STRIP), np.uint32)
    carry = np.empty(STRIP, np.uint64)
    for s in range(0, n, STRIP):
        carry[:] = W(0)
        for m in range(rows):
            w, o = words[m, s : s + STRIP], product[m]
            for i in range(w.shape[0]):
                v = W(w[i]) * W(factor) + carry[i]
                o[i] = U(v & LOW)
                carry[i] = v >> SHIFT
        for i in range(STRIP):
            product[rows, i] = U(carry[i])
        for m in range(out.shape[0]):
            o = out[m, s : s + STRIP]
            at = m + skip
            for i in range(o.shape[0]):
                low = W(product[at, i]) if 0 <= at <= rows else W(0)
                high = W(product[at + 1, i]) if at + 1 <= rows else W(0)
                o[i] = U(((low | (high << SHIFT)) >> by) & LOW)


# ---- ciphertexts (n, p, k, N) ----------------------------------------------------------------------------------------


@jit
def tensor_rows(x, y, at, q, inv, out):
    """out[r, m] = Σ_f x[r, f] ⊗ y[at[m, f]]: x (r, f, 2, k, N), y (n, 2, k, N), out (r, m, 3, k, N)."""
    rows, f, _, k, n = x.shape
    o0, o1, o2 = np.empty(STRIP, np.uint64), np.empty(STRIP, np.uint64), np.empty(STRIP, np.uint64)
    for j in range(k):
        p, v = q[j], inv[j]
        for s in range(0, n, STRIP):
            e = min(n, s + STRIP)
            for m in range(at.shape[0]):
                for r in range(rows):
                    o0[:] = W(0)
                    o1[:] = W(0)
                    o2[:] = W(0)
                    for start in range(0, f, TERMS):
                        stop = min(f, start + TERMS)
                        t = start
                        while t + 1 < stop:
                            a0, a1 = x[r, t, 0, j, s:e], x[r, t, 1, j, s:e]
                            b0, b1 = y[at[m, t], 0, j, s:e], y[at[m, t], 1, j, s:e]
                            c0, c1 = x[r, t + 1, 0, j, s:e], x[r, t + 1, 1, j, s:e]
                            d0, d1 = y[at[m, t + 1], 0, j, s:e], y[at[m, t + 1], 1, j, s:e]
                            for i in range(e - s):
                                o0[i] += W(a0[i]) * W(b0[i]) + W(c0[i]) * W(d0[i])
                                o1[i] += (W(a0[i]) * W(b1[i]) + W(a1[i]) * W(b0[i])) + (
                                    W(c0[i]) * W(d1[i]) + W(c1[i]) * W(d0[i])
                                )
                                o2[i] += W(a1[i]) * W(b1[i]) + W(c1[i]) * W(d1[i])
                            t += 2
                        if t < stop:
                            a0, a1 = x[r, t, 0, j, s:e], x[r, t, 1, j, s:e]
                            b0, b1 = y[at[m, t], 0, j, s:e], y[at[m, t], 1, j, s:e]
                            for i in range(e - s):
                                o0[i] += W(a0[i]) * W(b0[i])
                                o1[i] += W(a0[i]) * W(b1[i]) + W(a1[i]) * W(b0[i])
                                o2[i] += W(a1[i]) * W(b1[i])
                        if stop < f:
                            for i in range(e - s):
                                o0[i] = W(reduce(o0[i], p, v))
                                o1[i] = W(reduce(o1[i], p, v))
                                o2[i] = W(reduce(o2[i], p, v))
                    z0, z1, z2 = out[r, m, 0, j, s:e], out[r, m, 1, j, s:e], out[r, m, 2, j, s:e]
                    for i in range(e - s):
                        z0[i] = reduce(o0[i], p, v)
                        z1[i] = reduce(o1[i], p, v)
                        z2[i] = reduce(o2[i], p, v)


@jit
def convolve(x, y, q, inv, out):
    """x_i ⊗ y_i for each i, of any numbers of polynomials (at most seven terms each)."""
    n, px, k, length = x.shape
    py = y.shape[1]
    acc = np.empty(STRIP, np.uint64)
    for c in range(n):
        for j in range(k):
            p, v = q[j], inv[j]
            for s in range(0, length, STRIP):
                for o in range(px + py - 1):
                    acc[:] = W(0)
                    for a in range(max(0, o - py + 1), min(px, o + 1)):
                        f, g = x[c, a, j, s : s + STRIP], y[c, o - a, j, s : s + STRIP]
                        for i in range(f.shape[0]):
                            acc[i] += W(f[i]) * W(g[i])
                    z = out[c, o, j, s : s + STRIP]
                    for i in range(z.shape[0]):
                        z[i] = reduce(acc[i], p, v)


@jit
def add_multiple(out, x, w, ws, q):
    """Add w[c, j]·x to out: arrays (n, p, k, N)."""
    n, p, k, length = x.shape
    for a in range(n):
        for b in range(p):
            for j in range(k):
                c, cs, m = w[a, j], ws[a, j], q[j]
                o, y = out[a, b, j], x[a, b, j]
                for i in range(length):
                    s = U(o[i] + scaled(y[i], c, cs, m))
                    o[i] = min(s, U(s - m))


@jit
def total(x, q, inv, out):
    """Σ x over the first axis."""
    n, p, k, length = x.shape
    acc = np.empty(length, np.uint64)
    for b in range(p):
        for j in range(k):
            acc[:] = W(0)
            for a in range(n):
                y = x[a, b, j]
                for i in range(length):
                    acc[i] += W(y[i])
            for i in range(length):
                out[b, j, i] = reduce(acc[i], q[j], inv[j])


@jit
def reduce_into(y, out, q, inv):
    """Exact integers held as float64 to residues."""
    for a in range(y.shape[0]):
        row, o = y[a], out[a]
        for i in range(row.shape[0]):
            z = row[i] - np.floor(row[i] * inv) * q
            z = z + q if z < 0 else z
            z = z - q if z >= q else z
            o[i] = U(np.int64(z))


@jit
def of_ternary(values, out):
    """Bytes below 255 modulo 3, less one."""
    for i in range(out.shape[0]):
        x = np.int64(values[i])
        out[i] = x - np.int64(3) * ((x * np.int64(171)) >> np.int64(9)) - np.int64(1)
