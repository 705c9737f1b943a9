"""Openings in pairs: two values in one ciphertext on the way down, of two polynomials, at few primes, in tight words.

pack       a + i·b, with i = X^(N/2): free, as values are real
switch     c_2, c_3, … go over to c_0 and c_1: digits modulo single primes times the owner's switching keys,
encryptions of s^2, s^3, … under s (one per digit; no further prime: their modulus is Q itself)
drop       ⌊c / D⌉, D the product of all primes but KEEP: it takes the noise of the step before with it. Between two
openings single primes are dropped in the same way, so that a product of long factors stays short
halves     what the owner finds under a mask, and what the provider has to take off, split in the same way
"""

from __future__ import annotations

import functools
import math
from typing import Any, final

import numpy as np

from cloister.arrays import U32
from cloister.errors import ParameterError
from cloister.mpc.crypto.owner_ckks.ring import KEEP, Cts, Halves, Parameters, Residues, modulus, primes_of, ring_of

AT_MOST = 6  # polynomials that are switched together: their digits' products add up in one word


@final
class Pairs:
    """What both sides know of a ring's pairs."""

    def __init__(self, params: Parameters) -> None:
        from cloister.mpc.crypto.owner_ckks import pair_kernels

        self.kernels, self.params, self.ring = pair_kernels, params, ring_of(params)
        turn = np.zeros((params.count, params.degree), np.uint32)
        turn[:, params.degree // 2] = 1
        self._turn = self.ring.forward(turn)
        self._turn_s = self.ring.quotients(self._turn)
        Q = modulus(params, KEEP)
        self._modulus = np.array([Q >> (32 * m) & 0xFFFFFFFF for m in range(-(-Q.bit_length() // 32))], np.uint32)

    def pack(self, cts: Cts, lift: int) -> Cts:
        """2^lift·(a + i·b) of ciphertexts (n, p, k, N), two and two; the last one may be alone."""
        n, p, k, N = cts.shape
        out = np.empty((-(-n // 2), p, k, N), np.uint32)
        by = np.array([[pow(2, lift, q)] for q in self.ring.primes[:k]], np.uint32)
        factors, alone = (by[:, 0], self.ring.quotients(by)[:, 0]), np.zeros((p, k, N), np.uint32)
        for c, made in enumerate(out):
            b = cts[2 * c + 1] if 2 * c + 1 < n else alone
            self.kernels.pack(cts[2 * c], b, self._turn, self._turn_s, *factors, self.ring.q, made)
        return out

    def switch(self, ct: U32, keys: list[U32]) -> U32:
        """A ciphertext (p, k, N) as two polynomials, by p - 2 keys (K, 2, K, N)."""
        r, (p, k, N) = self.ring, ct.shape
        sums, digit = ct[:2].astype(np.uint64), np.empty((k, N), np.uint32)
        for m in range(p - 2):
            digits = r.backward(ct[2 + m].copy())
            for i in range(k):
                self.kernels.spread(digits[i], r.q[i], r.q, digit)
                self.kernels.add_products(sums, r.forward(digit), keys[m][i, :, :k])
        out = np.empty((2, k, N), np.uint32)
        self.kernels.reduce_all(sums, r.q, r.inv, out)
        return out

    def drop(self, x: Residues, keep: int = KEEP) -> Residues:
        """⌊x / D⌉ of coefficients (k, N) at the first `keep` primes; spoils x."""
        r, k = self.ring, len(x)
        half = dropped(self.params, k, keep) // 2
        by = np.array([half % q for q in r.primes[:k]], np.uint32)
        self.kernels.drop(x, by, keep, r.q, r._inverse, r._inverse_s)
        return np.ascontiguousarray(x[:keep])

    def halves(self, words: U32) -> U32:
        """Integers below Q, (words, N), as twice their real and imaginary parts, (2, words + 1, N)."""
        out = np.empty((2, len(words) + 1, self.params.degree), np.uint32)
        self.kernels.halves(words, self._modulus, out)
        return out

    def expand(self, c0: U32, seed: bytes) -> U32:
        """Switching keys (m, K, 2, K, N) whose c_0 (m, K, K, N) came with a seed."""
        m, K, _, N = c0.shape
        uniform, out = Halves(seed), np.empty((m, K, 2, K, N), np.uint32)
        out[:, :, 0] = c0
        for place in np.ndindex(m, K):
            out[(*place, 1)] = self.ring.uniform(uniform, K)
        return out


@functools.lru_cache(maxsize=8)
def pairs_of(params: Parameters) -> Pairs:
    return Pairs(params)


def dropped(params: Parameters, k: int, keep: int = KEEP) -> int:
    """D."""
    return math.prod(primes_of(params)[keep:k])


# ---- on the wire -----------------------------------------------------------------------------------------------------


def pack_words(params: Parameters, x: U32) -> U32:
    """Residues (…, N), each of `bits` bits, without gaps: (…, tight)."""
    out = np.empty((*x.shape[:-1], params.tight), np.uint32)
    rows = np.ascontiguousarray(x).reshape(-1, params.degree)
    pairs_of(params).kernels.tighten(rows, params.bits, out.reshape(-1, params.tight))
    return out


def unpack_words(params: Parameters, words: U32) -> U32:
    """Residues (…, k, N) from the wire; raises unless they are below their primes."""
    x = np.empty((*words.shape[:-1], params.degree), np.uint32)
    rows = np.ascontiguousarray(words, np.uint32).reshape(-1, params.tight)
    pairs_of(params).kernels.loosen(rows, params.bits, x.reshape(-1, params.degree))
    q: Any = np.array(primes_of(params)[: x.shape[-2]], np.uint32)[:, None]
    if (x >= q).any():
        raise ParameterError("numbers that are not residues of the agreed primes")
    return x
