"""Rings for lattice encryption: which are safe, arithmetic on raw residues, and small noise.

A polynomial of R_Q = Z_Q[X]/(X^N + 1), Q = q_0 ⋯ q_{k-1}, is a (k, N) array of residues. In *NTT form* it holds the
values at the odd powers of a 2N-th root of unity, in the bit-reversed order and with the smallest primitive root that
Microsoft SEAL uses, so arrays pass between this file and SEAL unchanged.

    forward, backward    coefficients ⇄ NTT form, [LN16] with Shoup's precomputed quotients
    secret               uniform ternary coefficients
    error                discrete Gaussian of σ = 3.2
    flood                a sum of three uniform numbers of b bits, wide enough to hide what it covers
    uniform              uniform residues from a public seed: the same at every party

`SECURE_BITS` is the largest log2 Q for 128-bit classical security with a ternary secret and σ ≈ 3.2; nothing in
Cloister makes lattice keys beyond it. A sum of several parties' ternary secrets is wider than the ternary one of the
table and is no easier to find.

References
----------
[BCC24] Bossuat, Cammarota, Cheon et al., Security Guidelines for Implementing Homomorphic Encryption, IACR ePrint
    2024/463 (uniform ternary secrets, classical attacks, 128 bits); a few bits below the standard of 2018.
[LN16] Longa, Naehrig, CANS 2016, algorithms 1 and 2.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, TypeAlias, final

import numpy as np

from cloister.arrays import F64, I64, U64
from cloister.errors import ParameterError
from cloister.mpc.crypto import cores
from cloister.mpc.crypto.prg import Prg

SECURE_BITS = {4096: 106, 8192: 214, 16384: 430, 32768: 868}  # [BCC24]; estimates in docs/security/parameters.md
SIGMA = 3.2
NARROW = 1 << 50  # primes below it are computed with in doubles
Residues: TypeAlias = U64  # (k, N)


def check_secure(degree: int, bits: int) -> None:
    """Raise unless a modulus of `bits` bits keeps 128-bit security in the ring of that degree."""
    if degree not in SECURE_BITS:
        raise ParameterError(f"a ring degree must be one of {', '.join(map(str, SECURE_BITS))}, found {degree}")
    if bits > SECURE_BITS[degree]:
        fits = [n for n, most in SECURE_BITS.items() if bits <= most]
        advice = f"degree {fits[0]} would do" if fits else "no ring offered here has that many levels"
        raise ParameterError(
            f"a modulus of {bits} bits at ring degree {degree} is below 128-bit security, which allows"
            f" {SECURE_BITS[degree]}; {advice}, or use fewer or smaller primes"
        )


@final
class Ring:
    """Arithmetic modulo the first k of `primes`, where k is the number of rows of the arrays given."""

    def __init__(self, degree: int, primes: Sequence[int], *, narrow: bool = True) -> None:
        from cloister.mpc.crypto.rns import kernels

        self._k = kernels
        self.degree, self.primes = degree, tuple(int(q) for q in primes)
        ratios = [(1 << 128) // q for q in self.primes]
        self.narrow = narrow and degree >= 512 and max(self.primes) < NARROW
        self.q = np.array(self.primes, np.uint64)
        self._r0 = np.array([r & (2**64 - 1) for r in ratios], np.uint64)
        self._r1 = np.array([r >> 64 for r in ratios], np.uint64)
        self._n_inv = np.array([pow(degree, -1, q) for q in self.primes], np.uint64)
        if self.narrow:
            self._make_real()
        else:
            tables = [_tables(degree, q) for q in self.primes]
            self._w, self._ws, self._v, self._vs = (np.stack([t[i] for t in tables]) for i in range(4))
        k = len(self.primes)
        powers = [[pow(2, 64 * m, q) for q in self.primes] for m in range(5)]
        self._powers = np.array(powers, np.uint64)
        self._quotients = np.array(
            [[(x << 64) // q for x, q in zip(p, self.primes, strict=True)] for p in powers], np.uint64
        )
        self._inverse = np.zeros((k, k), np.uint64)  # q_l^-1 mod q_j
        for i in range(k):
            for j in range(k):
                if i != j:
                    self._inverse[i, j] = pow(self.primes[i], -1, self.primes[j])

    def _make_real(self) -> None:
        """What `float_kernels` needs: primes, their inverses and the roots, centred, as doubles."""
        from cloister.mpc.crypto.rns import float_kernels

        self._f: Any = float_kernels
        self.real = np.array([float(q) for q in self.primes])
        self.inverse = 1.0 / self.real
        self.n_inverse = np.array([centred(int(x), q) for x, q in zip(self._n_inv, self.primes, strict=True)])
        tables = [root_tables(self.degree, q) for q in self.primes]
        self.w, self.v = (
            np.stack([_centred_table(t[i], q) for t, q in zip(tables, self.primes, strict=True)]) for i in (0, 1)
        )
        self.w_rows: F64 = self._f.by_rows(self.w)
        self.v_rows: F64 = self._f.by_rows(self.v)

    def forward(self, a: Residues) -> Residues:
        """To NTT form, in place."""
        if self.narrow:
            f = self._f.forward
            cores.rows(lambda s: f(a[s], self.w[s], self.w_rows[s], self.real[s], self.inverse[s]), *a.shape)
        else:
            self._k.forward(a, self._w, self._ws, self.q)
        return a

    def backward(self, a: Residues) -> Residues:
        """To coefficients, in place."""
        if self.narrow:
            f, n_inverse = self._f.backward, self.n_inverse
            cores.rows(
                lambda s: f(a[s], self.v[s], self.v_rows[s], self.real[s], self.inverse[s], n_inverse[s]), *a.shape
            )
        else:
            self._k.backward(a, self._v, self._vs, self.q, self._n_inv, self._r0, self._r1)
        return a

    def zeros(self, k: int) -> Residues:
        return np.zeros((k, self.degree), np.uint64)

    def of_small(self, v: I64, k: int) -> Residues:
        """Residues of signed coefficients."""
        out = np.empty((k, self.degree), np.uint64)
        self._k.of_small(v, self.q, out)
        return out

    def multiply(self, a: Residues, b: Residues) -> Residues:
        return self.add_product(np.zeros_like(a), a, b)

    def add_product(self, acc: Residues, a: Residues, b: Residues, *, sign: int = 1) -> Residues:
        """Add ± a·b to acc, in place; a and b may have more rows than acc."""
        if self.narrow:
            from cloister.mpc.crypto.rns import base_kernels

            base_kernels.add_product(acc, a, b, sign, self.real, self.inverse)
        else:
            self._k.add_product(acc, a, b, sign, self.q, self._r0, self._r1)
        return acc

    def inner(self, a: Residues, b: Residues) -> U64:
        """⟨a, b⟩ modulo each prime, (k,); a may have more rows than b."""
        out = np.empty(len(b), np.uint64)
        self._k.inner(a[: len(b)], b, self.q, self._r0, self._r1, out)
        return out

    def add_multiple(self, acc: Residues, a: Residues, factor: int, row: int) -> Residues:
        """Add factor · a[row] to acc[row], in place: one residue of a scaled polynomial."""
        self._k.add_multiple(acc[row], a[row], np.uint64(factor % self.primes[row]), *self._row(row))
        return acc

    def add(self, acc: Residues, a: Residues) -> Residues:
        self._k.add(acc, a, self.q)
        return acc

    def subtract(self, acc: Residues, a: Residues) -> Residues:
        self._k.subtract(acc, a, self.q)
        return acc

    def _row(self, j: int) -> tuple[np.uint64, np.uint64, np.uint64]:
        return self.q[j], self._r0[j], self._r1[j]

    def integers(self, a: Residues) -> U64:
        """Coefficients in (-Q/2, Q/2) as integers of four words, (N, 4); see `fixed_kernels`."""
        from cloister.mpc.crypto.rns import fixed_kernels as fixed

        k = a.shape[0]
        digits, Q = a.copy(), math.prod(self.primes[:k])
        if Q.bit_length() > 192:
            raise ParameterError(f"a modulus of {Q.bit_length()} bits has no room in integers of four words")
        self._k.mixed_radix(digits, self.q, self._r0, self._r1, self._inverse)
        modulus = np.array([Q >> (64 * m) & (2**64 - 1) for m in range(4)], np.uint64)
        out = np.empty((self.degree, 4), np.uint64)
        fixed.of_digits(digits, self.q, modulus, out)
        return out

    def of_integers(self, a: U64, k: int) -> Residues:
        """Residues of integers of four words."""
        from cloister.mpc.crypto.rns import fixed_kernels as fixed

        out = np.empty((k, self.degree), np.uint64)
        fixed.to_residues(a, self._powers, self._quotients, self.q, out)
        return out

    def lift(self, a: Residues) -> tuple[F64, F64]:
        """Coefficients in (-Q/2, Q/2) as double-doubles (high, low): exact up to 2^-104 of their size."""
        k = a.shape[0]
        digits = a.copy()
        self._k.mixed_radix(digits, self.q, self._r0, self._r1, self._inverse)
        radix = [math.prod(self.primes[:i]) for i in range(k)]
        high = np.array([float(r) for r in radix])
        low = np.array([float(r - int(float(r))) for r in radix])
        out = np.empty((2, self.degree))
        self._k.lift(digits, self.q, high, low, out)
        return out[0], out[1]

    def lift_exact(self, a: Residues) -> list[int]:
        """The same as Python integers: the slow, direct way that tests compare with."""
        Q = math.prod(self.primes[: a.shape[0]])
        basis = [Q // q * pow(Q // q, -1, q) for q in self.primes[: a.shape[0]]]
        found = [sum(int(x) * b for x, b in zip(col, basis, strict=True)) % Q for col in a.T]
        return [x - Q if x > Q // 2 else x for x in found]

    # ---- noise -------------------------------------------------------------------------------------------------------

    def error(self, prg: Prg, k: int) -> Residues:
        """A fresh Gaussian error, in NTT form."""
        return self.forward(self.of_small(prg.gaussian(self.degree, SIGMA), k))

    def spread(self, prg: Prg, bits: int) -> U64:
        """Sums of three uniform numbers of `bits` bits, centred, as integers of four words, (N, 4).

        Its density has no steps, so that hiding e takes 2^bits ≥ 2^40·‖e‖ (Euclidean, all coefficients together):
        a shift by e is within KL 2.3·(‖e‖ / 2^bits)². Noise that is uniform itself would need √N times more.
        """
        from cloister.mpc.crypto.rns import fixed_kernels as fixed

        if not 0 < bits <= 190:
            raise ParameterError(f"flooding noise has 1 to 190 bits, got {bits}")
        total = np.zeros((self.degree, 4), np.uint64)
        middle = 3 << (bits - 1)
        total[:] = np.array([-middle >> (64 * m) & (2**64 - 1) for m in range(4)], np.uint64)
        for _ in range(3):
            words = np.zeros((self.degree, 4), np.uint64)
            count = -(-bits // 64)
            words[:, :count] = prg.uint64((self.degree, count))
            words[:, count - 1] >>= np.uint64(64 * count - bits)
            fixed.add(total, words)
        return total

    def sum_of(self, a: U64, b: U64) -> U64:
        """Of integers of four words."""
        from cloister.mpc.crypto.rns import fixed_kernels as fixed

        out = a.copy()
        fixed.add(out, b)
        return out

    def flood(self, prg: Prg, bits: int, k: int) -> Residues:
        """The same as residues, in NTT form."""
        return self.forward(self.of_integers(self.spread(prg, bits), k))

    def uniform(self, prg: Prg, k: int) -> Residues:
        return np.stack([prg.below(q, self.degree) for q in self.primes[:k]])

    def rotate_coefficients(self, v: I64, galois: int) -> I64:
        """p(X) → p(X^galois) on signed coefficients."""
        n = self.degree
        to = np.arange(n) * galois % (2 * n)
        out = np.zeros_like(v)
        out[to % n] = np.where(to >= n, -v, v)
        return out


def centred(x: int, q: int) -> float:
    """The residue of x in (-q/2, q/2), as a double."""
    x %= q
    return float(x - q if x > q // 2 else x)


def _centred_table(words: U64, q: int) -> F64:
    return np.where(words > q // 2, -(np.uint64(q) - words).astype(np.float64), words.astype(np.float64))


@functools.lru_cache(maxsize=8)
def ring(degree: int, primes: tuple[int, ...]) -> Ring:
    """The ring with its tables, which take a second to make and are kept."""
    return Ring(degree, primes)


@functools.lru_cache(maxsize=128)
def root_tables(n: int, q: int) -> tuple[U64, U64]:
    """Powers of the smallest primitive 2n-th root of unity and of its inverse, bit reversed."""
    if (q - 1) % (2 * n):
        raise ParameterError(f"the prime {q} has no {2 * n}-th root of unity")
    base = 2
    while pow(psi := pow(base, (q - 1) // (2 * n), q), n, q) != q - 1:
        base += 1
    square, power, least = psi * psi % q, psi, psi
    for _ in range(n - 1):
        power = power * square % q
        least = min(least, power)
    order = bit_reversed(n)

    def table(root: int) -> U64:
        powers = [1] * n
        for i in range(1, n):
            powers[i] = powers[i - 1] * root % q
        return np.array(powers, np.uint64)[order]

    return table(least), table(pow(least, -1, q))


@functools.lru_cache(maxsize=128)
def _tables(n: int, q: int) -> tuple[U64, U64, U64, U64]:
    """The same, each with its Shoup quotients."""
    w, v = root_tables(n, q)
    ws, vs = (np.array([(int(x) << 64) // q for x in t], np.uint64) for t in (w, v))
    return w, ws, v, vs


def bit_reversed(n: int) -> I64:
    bits = n.bit_length() - 1
    out = np.zeros(n, np.int64)
    for i in range(bits):
        out |= ((np.arange(n) >> i) & 1) << (bits - 1 - i)
    return out
