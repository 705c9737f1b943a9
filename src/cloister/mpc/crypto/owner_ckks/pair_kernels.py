"""The inner loops of openings in pairs, compiled by numba: packing, switching keys, dropping primes, tight words."""
# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201

from __future__ import annotations

import numpy as np

from cloister.mpc.crypto.owner_ckks.kernels import LOW, SHIFT, U, W, reduce, scaled
from cloister.mpc.crypto.rns.kernels import jit


@jit
def pack(a, b, turn, turn_s, lift, lift_s, q, out):
    """lift·(a + i·b) of polynomials (p, k, N) in NTT form; `turn` is i = X^(N/2)."""
    for m in range(out.shape[0]):
        for j in range(out.shape[1]):
            p, f, fs = q[j], lift[j], lift_s[j]
            for x in range(out.shape[2]):
                y = U(a[m, j, x] + scaled(b[m, j, x], turn[j, x], turn_s[j, x], p))
                out[m, j, x] = scaled(min(y, U(y - p)), f, fs, p)


@jit
def spread(digit, prime, q, out):
    """Residues of one prime, as numbers about zero, modulo all primes, which differ by less than a factor of two.

    About zero: numbers above it would have a mean, and their noise would gather in the first and last slots.
    """
    half = prime >> U(1)
    for j in range(out.shape[0]):
        for x in range(out.shape[1]):
            out[j, x] = U(digit[x] + q[j] - prime) if digit[x] > half else digit[x]


@jit
def add_products(acc, digit, key):
    """Add digit·key to acc, words of 64 bits: at most 63 products of 56 bits."""
    for h in range(2):
        for j in range(digit.shape[0]):
            o, y, z = acc[h, j], digit[j], key[h, j]
            for x in range(digit.shape[1]):
                o[x] += W(y[x]) * W(z[x])


@jit
def reduce_all(acc, q, inv, out):
    for h in range(out.shape[0]):
        for j in range(out.shape[1]):
            for x in range(out.shape[2]):
                out[h, j, x] = reduce(acc[h, j, x], q[j], inv[j])


@jit
def drop(x, half, keep, q, inverse, inverse_s):
    """⌊(x + half) / D⌋ of coefficients (k, N), D the product of all primes but the first `keep`, where it stands."""
    k, n = x.shape
    for j in range(k):
        for i in range(n):
            y = U(x[j, i] + half[j])
            x[j, i] = min(y, U(y - q[j]))
    for back in range(k - keep):
        last = k - 1 - back
        for j in range(last):
            p, c, cs = q[j], inverse[last, j], inverse_s[last, j]
            for i in range(n):
                x[j, i] = scaled(U(x[j, i] + p - min(x[last, i], U(x[last, i] - p))), c, cs, p)


@jit
def halves(words, modulus, out):
    """Twice the real and the imaginary part of a + i·b, as long integers that are not negative.

    The conjugate of w has the coefficients w_0 and -w_(N-x). Of 2a, Q is added where a difference is; 2b is turned by
    -X^(N/2), and 2Q is added where its sign changes.
    """
    rows, n = words.shape
    half = n // 2
    for x in range(n):
        y = (n - x) % n
        first = x + half if x < half else x - half
        second = (n - first) % n
        real, imaginary = np.int64(0), np.int64(0)
        for m in range(rows + 1):
            if m < rows:
                Q = np.int64(modulus[m])
                if x == 0:
                    real += np.int64(2) * np.int64(words[m, 0])
                else:
                    real += np.int64(words[m, x]) - np.int64(words[m, y]) + Q
                if x < half:
                    imaginary += np.int64(words[m, first]) + np.int64(words[m, second])
                elif x > half:
                    imaginary += np.int64(2) * Q - np.int64(words[m, first]) - np.int64(words[m, second])
            out[0, m, x] = U(real & np.int64(0xFFFFFFFF))
            out[1, m, x] = U(imaginary & np.int64(0xFFFFFFFF))
            real >>= np.int64(32)
            imaginary >>= np.int64(32)


@jit
def tighten(x, bits, out):
    """Rows of residues of so many bits without gaps, lowest first."""
    for r in range(x.shape[0]):
        held, have, at = W(0), 0, 0
        for i in range(x.shape[1]):
            held |= W(x[r, i]) << W(have)
            have += bits
            if have >= 32:
                out[r, at] = U(held & LOW)
                held >>= SHIFT
                have -= 32
                at += 1


@jit
def loosen(words, bits, out):
    mask = (W(1) << W(bits)) - W(1)
    for r in range(out.shape[0]):
        held, have, at = W(0), 0, 0
        for i in range(out.shape[1]):
            if have < bits:
                held |= W(words[r, at]) << W(have)
                have += 32
                at += 1
            out[r, i] = U(held & mask)
            held >>= W(bits)
            have -= bits
