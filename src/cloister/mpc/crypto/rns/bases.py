"""Arithmetic between bases of primes: key switching in digits of several primes, and division by primes.

The integer x of (-D/2, D/2) with residues x_i modulo primes d_i, D = Π d_i, is Σ_i ⌊x_i·(D/d_i)^-1⌉_{d_i}·D/d_i - e·D,
where e is the sum of the fractions, rounded: that is its value modulo any other prime ([HPS19], without a table).

A ciphertext at k of L data primes has a *digit* for every α of them, α being the number of special primes, P their
product. A switching key from t to s has, per digit d, a pair with b_d + a_d·s = w_d·t + e, where w_d is P modulo the
primes of the digit and 0 modulo all others, special ones included. So [HK20]

    switch(x) = ⌊ Σ_d digit_d(x)·(b_d, a_d) / P ⌉        ≈ x·t under s

and a digit's error weighs D/P of what it would alone. `Digits` of one polynomial serve any number of automorphisms
(*hoisted* rotations [HS18]: φ permutes the values of NTT form), and sums of them are divided by P once.

References
----------
[HK20] Han, Ki, CT-RSA 2020, section 3; [HPS19] Halevi, Polyakov, Shoup, CT-RSA 2019, section 2.2;
[HS18] Halevi, Shoup, CRYPTO 2018, section 5.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias, final

import numpy as np
import numpy.typing as npt

from cloister.arrays import F64, I64, U64
from cloister.mpc.crypto import cores
from cloister.mpc.crypto.rns.ring import Residues, Ring, bit_reversed, centred

U16: TypeAlias = npt.NDArray[np.uint16]
Doubles: TypeAlias = F64  # (rows, N)
Digits: TypeAlias = F64  # (digits, rows, N), NTT form, modulo the data primes in use and the special ones
NOT_TURNED = np.zeros(0, np.uint16)


@dataclass(frozen=True, eq=False)
class SwitchingKey:
    """Per digit one pair (b_d, a_d) over all primes: what relinearisation and rotation need."""

    b: U64  # (digits, K, N)
    a: U64  # (digits, K, N)
    galois: int = 0  # the automorphism X → X^galois; 0 for relinearisation


def digits_of(k: int, specials: int) -> list[range]:
    """Which of k data primes make up each digit."""
    return [range(at, min(k, at + specials)) for at in range(0, k, specials)]


@final
class Bases:
    """A ring whose last `specials` primes serve switching keys alone."""

    def __init__(self, ring: Ring, specials: int) -> None:
        from cloister.mpc.crypto.rns import base_kernels

        self._k, self.ring, self.specials = base_kernels, ring, specials
        self.top = len(ring.primes) - specials
        self.P = math.prod(ring.primes[self.top :])
        self._order = bit_reversed(ring.degree)
        self._conversions: dict[tuple[range, tuple[int, ...]], tuple[F64, F64, F64]] = {}
        self._turns: dict[int, U16] = {}
        self._special, self._arrays = range(self.top, len(ring.primes)), threading.local()

    # ---- between bases -----------------------------------------------------------------------------------------------

    def _converted(self, x: Doubles, source: range, target: Sequence[int], out: Doubles, place: I64) -> None:
        """NTT form modulo other primes of a centred integer given in coefficients, to the rows `place` of `out`."""
        to = tuple(target)
        if (source, to) not in self._conversions:
            q = self.ring.primes
            D = math.prod(q[i] for i in source)
            self._conversions[source, to] = (
                np.array([centred(pow(D // q[i], -1, q[i]), q[i]) for i in source]),
                np.array([[centred(D // q[i], q[t]) for i in source] for t in to]),
                np.array([centred(D, q[t]) for t in to]),
            )
        hat, factors, whole = self._conversions[source, to]
        at, r, read = np.array(to), self.ring, np.array(source)

        def some(s: slice) -> None:
            self._k.convert(x, read, hat, at[s], factors[s], whole[s], r.real, r.inverse, place[s], out)
            self._k.transform_rows(out, place[s], at[s], r.w, r.w_rows, r.real, r.inverse)

        cores.rows(some, len(at), self.ring.degree)

    def _coefficients(self, x: Doubles, at: range) -> Doubles:
        """In place."""
        r, to = self.ring, np.array(at)
        cores.rows(lambda s: self._k.invert_rows(x[s], to[s], r.v, r.v_rows, r.real, r.inverse, r.n_inverse), *x.shape)
        return x

    def _divided(self, x: Doubles, source: range, out: Residues) -> None:
        """⌊x / Π source⌉ modulo the first primes; x has their rows, then those of `source`, and is spent."""
        keep = len(out)
        rest, D = self._scratch("rest", (keep, self.ring.degree)), math.prod(self.ring.primes[i] for i in source)
        self._converted(self._coefficients(x[keep:], source), source, range(keep), rest, np.arange(keep))
        factor, r = np.array([centred(pow(D, -1, q), q) for q in self.ring.primes[:keep]]), self.ring
        cores.rows(lambda s: self._k.divide(x[s], rest[s], factor[s], r.real[s], r.inverse[s], out[s]), keep, r.degree)

    def rescaled(self, polys: U64, count: int) -> U64:
        """⌊p / its last `count` primes⌉ for polynomials p."""
        k = polys.shape[1]
        out = np.empty((len(polys), k - count, self.ring.degree), np.uint64)
        for p, o in zip(polys, out, strict=True):
            self._divided(self._doubles(p), range(k - count, k), o)
        return out

    def _doubles(self, a: Residues) -> Doubles:
        out = self._scratch("doubles", a.shape)
        self._k.to_doubles(a, out)
        return out

    def _scratch(self, name: str, shape: tuple[int, ...]) -> F64:
        """An array of this thread to work in: fresh memory would cost more than what is done in it."""
        held = self._arrays.__dict__
        if name not in held or held[name].size < math.prod(shape):
            held[name] = np.empty(math.prod(shape))
        return np.asarray(held[name][: math.prod(shape)].reshape(shape))

    # ---- key switching -----------------------------------------------------------------------------------------------

    def digits(self, x: Residues) -> Digits:
        """Every digit of x modulo all data primes in use and the special ones; this thread's until the next call."""
        k, y, parts = len(x), self._doubles(x), digits_of(len(x), self.specials)
        out = self._scratch("digits", (len(parts), k + self.specials, self.ring.degree))
        for d, part in enumerate(parts):
            out[d, part.start : part.stop] = y[part.start : part.stop]
        self._coefficients(y, range(k))
        for d, part in enumerate(parts):
            others = [*(t for t in range(k) if t not in part), *self._special]
            place = np.array([t if t < k else k + t - self.top for t in others])
            self._converted(y[part.start : part.stop], part, others, out[d], place)
        return out

    def switched(self, digits: Digits, keys: Sequence[SwitchingKey]) -> U64:
        """The sum of φ(x)·t over the keys of φ and t, under s, from the digits of x: two polynomials (2, k, N)."""
        k = digits.shape[1] - self.specials
        acc, at = self._scratch("acc", (2, *digits.shape[1:])), np.array([*range(k), *self._special])
        acc[:] = 0.0
        turns, r = [self.turn(key.galois) for key in keys], self.ring

        def some(s: slice) -> None:
            for key, turn in zip(keys, turns, strict=True):
                self._k.add_known(acc, digits, key.b, key.a, at, s.start, s.stop, turn, r.real, r.inverse)

        cores.rows(some, len(at), self.ring.degree)
        out = np.empty((2, k, self.ring.degree), np.uint64)
        for part, o in zip(acc, out, strict=True):
            self._divided(part, self._special, o)
        return out

    def turn(self, galois: int) -> U16:
        """Where the values of p(X^galois) stand among those of p, in NTT form; empty where nothing moves."""
        if galois in (0, 1):
            return NOT_TURNED
        if galois not in self._turns:
            n = self.ring.degree
            turn = self._order[((2 * self._order + 1) * galois % (2 * n) - 1) // 2]
            self._turns[galois] = turn.astype(np.uint16)  # N ≤ 2^16
        return self._turns[galois]

    def turned(self, a: Residues, galois: int) -> Residues:
        """p(X^galois), in NTT form."""
        out = np.empty_like(a)
        self._k.turned(a, self.turn(galois), out)
        return out

    def known_share(self, acc: Residues, target: Residues, digit: int) -> Residues:
        """Add w_d·target to acc, in place: what a switching key hides in its digit."""
        for j in digits_of(self.top, self.specials)[digit]:
            self.ring.add_multiple(acc, target, self.P, j)
        return acc

    # ---- ciphertexts, NTT form ---------------------------------------------------------------------------------------

    def tensor(self, x: U64, y: U64) -> U64:
        out = np.empty((3, *x.shape[1:]), np.uint64)
        self._k.tensor(x, y, self.ring.real, self.ring.inverse, out)
        return out

    def of_doubles(self, x: F64, k: int) -> Residues:
        """Residues of integers that are held as doubles."""
        out = np.empty((k, self.ring.degree), np.uint64)
        self._k.of_doubles(x, self.ring.real, self.ring.inverse, out)
        return out


@functools.lru_cache(maxsize=8)
def bases(ring: Ring, specials: int) -> Bases:
    return Bases(ring, specials)
