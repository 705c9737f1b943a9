"""The ring of encrypted inference on a graphics card: tables, transforms, and what is drawn at random (`ring`).

Every kernel draws by counters, so a value does not depend on which thread draws it. Secrets come from ChaCha20 under
32 bytes of the operating system for each call; uniform halves from AES-256 under their public seed, as on a CPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, final

import numpy as np
import torch

from cloister.arrays import I32, U8, U32, Array
from cloister.errors import ParameterError
from cloister.mpc.crypto.owner_ckks.packed_refresh import dropped
from cloister.mpc.crypto.owner_ckks.ring import KEEP, Opening, Parameters, last_word, modulus, primes_of
from cloister.mpc.crypto.prg import gaussian_table
from cloister.mpc.crypto.rns.ring import SIGMA, root_tables
from cloister.provider.gpu import cuda_device
from cloister.provider.gpu.cuda_device import Tensor, wide

MOST_PRIMES = MOST_WORDS = 8  # as in cuda/arithmetic.cu
AES_SHARED = (256 * 32 + 64) * 4  # bytes, as AES_WORDS in cuda/randomness.cu
MOST_BLOCKS = 396  # that draw uniform halves: each fills its table first, so there are no more than a card runs at once
KEPT = 4096  # constants that stay on the card
PRIME = np.dtype(
    [("q", "u4"), ("one", "u4"), ("n_inv", "u4"), ("n_inv_s", "u4"), ("ratio", "u8"), ("last", "u8")]
)  # struct Prime


@functools.cache
def aes_table() -> U32:
    """For each byte x, the word (2·S(x), S(x), S(x), 3·S(x)) of AES [FIPS 197, section 5.1], highest byte first."""

    def doubled(x: int) -> int:
        return (x << 1) ^ (0x11B if x & 0x80 else 0)

    box, p, q = [0x63] * 256, 1, 1
    while True:  # p runs through the powers of 3, q through their inverses
        p ^= doubled(p)
        for n in (1, 2, 4):
            q ^= (q << n) & 0xFF
        q ^= 0x09 if q & 0x80 else 0
        turns = [((q << n) | (q >> (8 - n))) & 0xFF for n in range(5)]
        box[p] = functools.reduce(lambda a, b: a ^ b, turns) ^ 0x63
        if p == 1:
            break
    return np.array([doubled(s) << 24 | s << 16 | s << 8 | doubled(s) ^ s for s in box], np.uint32)


@final
class CardRing:
    """Arithmetic of the ring on the card; polynomials are tensors (…, k, N)."""

    def __init__(self, params: Parameters) -> None:
        if params.count > MOST_PRIMES:
            raise ParameterError(f"the kernels take at most {MOST_PRIMES} primes, found {params.count}")
        self.kernels, self.params = cuda_device.Kernels(params.degree), params
        self.degree, self.primes = params.degree, primes_of(params)
        pairs = [root_tables(params.degree, q) for q in self.primes]
        self._w, self._v = (cuda_device.upload(self.factors(np.stack([t[i] for t in pairs]))) for i in range(2))
        known = np.zeros(len(self.primes), PRIME)
        for j, q in enumerate(self.primes):
            n_inv = pow(params.degree, -1, q)
            known[j] = (q, (1 << 32) // q, n_inv, (n_inv << 32) // q, (1 << 64) // q, last_word(q))
        self.known = cuda_device.upload(known)
        self.powers = cuda_device.upload(
            np.array([[pow(2, 32 * m, q) for m in range(MOST_WORDS)] for q in self.primes], np.uint64)
        )
        self.inverses = cuda_device.upload(self._inverses())
        table = gaussian_table(SIGMA)
        leading = np.arange(1 << 12, dtype=np.uint64) << np.uint64(52)
        first: U8 = np.searchsorted(table, leading, side="right").astype(np.uint8)
        self._errors = (cuda_device.upload(table), cuda_device.upload(first), len(table))
        self._aes = cuda_device.upload(aes_table())
        self._kept: dict[Hashable, Tensor] = {}
        turn = cuda_device.put(np.zeros((len(self.primes), params.degree), np.uint32))
        turn[:, params.degree // 2] = 1
        self._turn = cuda_device.upload(self.factors(cuda_device.host(self.forward(turn))))  # X^(N/2)

    def _inverses(self) -> U32:
        """q_m^-1 modulo q_j with its quotient, (8, 8, 2)."""
        out = np.zeros((MOST_PRIMES, MOST_PRIMES, 2), np.uint32)
        for m, p in enumerate(self.primes):
            for j, q in enumerate(self.primes):
                if m != j:
                    c = pow(p, -1, q)
                    out[m, j] = c, (c << 32) // q
        return out

    def factors(self, w: Array) -> U32:
        """Residues (k, …) with their quotients ⌊2^32·w / q⌋, (k, …, 2)."""
        q = np.array(self.primes[: len(w)], np.uint64).reshape(-1, *[1] * (w.ndim - 1))
        w = w.astype(np.uint64)
        return np.stack([w, (w << np.uint64(32)) // q], axis=-1).astype(np.uint32)

    # ---- constants, which are kept -----------------------------------------------------------------------------------

    def kept(self, key: Hashable, make: Callable[[], Array]) -> Tensor:
        if key not in self._kept:
            if len(self._kept) >= KEPT:
                self._kept.clear()
            self._kept[key] = cuda_device.upload(make())
        return self._kept[key]

    def multipliers(self, values: Sequence[int], k: int) -> Tensor:
        """Integers modulo the first k primes, as factors (n, k, 2)."""
        each = [tuple(v % q for q in self.primes[:k]) for v in values]

        def make() -> U32:
            return np.ascontiguousarray(np.moveaxis(self.factors(np.array(each, np.uint32).T), 0, 1))

        return self.kept(("multipliers", k, *each), make)

    def constants(self, values: Array, k: int) -> Tensor:
        """Rounded real numbers modulo the first k primes, (n, k)."""
        values = np.ascontiguousarray(values, np.float64)

        def make() -> U32:
            whole = [round(float(v)) for v in values]
            return np.array([[v % q for q in self.primes[:k]] for v in whole], np.uint32)

        return self.kept(("constants", k, values.tobytes()), make)

    def _scaling(self, how: Opening) -> Tensor:
        outs = -(-how.fresh_bits // 32)
        return self.kept(("scaling", how), lambda: np.array([how.factor, how.shift % (1 << 32), outs], np.uint32))

    # ---- transforms --------------------------------------------------------------------------------------------------

    def forward(self, a: Tensor) -> Tensor:
        """Residues (…, k, N) to NTT form, in place."""
        self.kernels.transforms("forward", a.numel() // self.degree, a, a, self._w, self.known, a.shape[-2])
        return a

    def forward_small(self, small: Tensor, k: int, extra: Tensor | None = None) -> Tensor:
        """Signed bytes (n, m, N) to NTT form (n, m, k, N); `extra` (n, k, N) is added to the first of every m."""
        n, m = small.shape[:2]
        out = cuda_device.empty(n, m, k, self.degree)
        self.kernels.transforms("forward_small", n * m * k, out, small, extra, self._w, self.known, m, k)
        return out

    def opened(self, cts: Tensor, powers: Tensor) -> Tensor:
        """Coefficients (n, k, N) of ciphertexts under the key whose powers are given, as factors (p - 1, K, N)."""
        n, p, k, _ = cts.shape
        out, most = cuda_device.empty(n, k, self.degree), len(self.primes)
        self.kernels.transforms("opened", n * k, out, cts, powers, self._v, self.known, p, k, most)
        return out

    # ---- random ------------------------------------------------------------------------------------------------------

    def noise(self, key: bytes, n: int, m: int, gaussians: int) -> Tensor:
        """Signed bytes (n, m, N): of every m polynomials the first are Gaussian errors, the others ternary."""
        out = torch.empty((n, m, self.degree), dtype=torch.int8, device=cuda_device.DEVICE)
        blocks = n * m * self.degree // 8
        self.kernels.each(
            "small_noise", blocks, out, cuda_device.upload(key_words(key)), *self._errors, m, gaussians, wide(blocks)
        )
        return out

    def uniform(self, seed: bytes, n: int, k: int, out: Tensor | None = None) -> Tensor:
        """The first n uniform polynomials (k, N) of a public seed; or into the second ones of `out` (n, 2, k, N)."""
        one = k * self.degree
        where, stride = (cuda_device.empty(n, k, self.degree), one) if out is None else (out.view(-1)[one:], 2 * one)
        self._uniform(where, stride, cuda_device.upload(key_words(seed)), k, k, 0, n)
        return where if out is None else out

    def again(self, out: Tensor, seed: Tensor, k: int, first: int) -> None:
        """Uniform polynomials from number `first` on, of k primes, into the second ones of `out` (n, 2, k', N)."""
        n, _, keep, degree = out.shape
        self._uniform(out.view(-1)[keep * degree :], 2 * keep * degree, seed, k, keep, first, n)

    def _uniform(self, where: Tensor, stride: int, seed: Tensor, k: int, keep: int, first: int, n: int) -> None:
        words = n * keep * self.degree
        self.kernels.blocks(
            "uniform", (min(MOST_BLOCKS, -(-words // 1024)),), 512, where, wide(stride), self._aes, seed, self.known, k,
            keep, wide(first), wide(words), shared=AES_SHARED,
        )  # fmt: skip

    # ---- long integers -----------------------------------------------------------------------------------------------

    def masks(self, key: bytes, n: int, bound: int) -> Tensor:
        """Integers uniform below `bound`, words (n, words, N), drawn from a key."""
        bits = bound.bit_length()
        words, pairs = -(-bits // 32), n * self.degree // 2
        limit = self.kept(("bound", bound), lambda: words_of(bound))
        out = cuda_device.empty(n, words, self.degree)
        self.kernels.each("masks", pairs, out, cuda_device.upload(key_words(key)), limit, words, bits, wide(pairs))
        return out

    def residues(self, words: Tensor, k: int, offset: int = 0) -> Tensor:
        """Words (n, words, N) plus an offset, as residues (n, k, N)."""
        n, rows, _ = words.shape
        at = self.kept(("offset", offset), lambda: np.array([offset % q for q in self.primes], np.uint32))
        out, count = cuda_device.empty(n, k, self.degree), n * self.degree
        self.kernels.each("residues_of", count, out, words, rows, at, self.powers, self.known, k, wide(count))
        return out

    def words(self, x: Tensor) -> Tensor:
        """Coefficients (n, k, N) in [0, Q), as words (n, words, N)."""
        n, k, _ = x.shape
        rows, count = -(-28 * k // 32), n * self.degree
        out = cuda_device.empty(n, rows, self.degree)
        self.kernels.each("words_of", count, out, x, self.inverses, k, rows, self.known, wide(count))
        return out

    def halves(self, words: Tensor, how: Opening, errors: Tensor | None = None) -> Tensor:
        """⌊2·Re·f⌋ and ⌊2·Im·f⌋ of integers below Q, plus errors (2n, 1, N), as residues (2n, back, N)."""
        n, rows, _ = words.shape
        Q = modulus(self.params, KEEP)
        limit = self.kept(("bound", Q), lambda: words_of(Q))
        out, count = cuda_device.empty(2 * n, how.back, self.degree), 2 * n * self.degree
        self.kernels.each(
            "halves", count, out, words, errors, limit, rows, self._scaling(how), self.powers, self.known, how.back,
            wide(count),
        )  # fmt: skip
        return out

    # ---- pairs -------------------------------------------------------------------------------------------------------

    def packed(self, cts: Tensor, lift: int) -> Tensor:
        """2^lift·(a + i·b) of ciphertexts (n, p, k, N), two and two."""
        n, p, k, degree = cts.shape
        out = cuda_device.empty(-(-n // 2), p, k, degree)
        by, count = self.multipliers([1 << lift], k), out.numel()
        self.kernels.each("pack_pairs", count, out, cts, self._turn, by, self.known, p, k, wide(n), wide(count))
        return out

    def backward(self, cts: Tensor, first: int = 0) -> Tensor:
        """Coefficients of the polynomials from `first` on of ciphertexts (n, p, k, N)."""
        n, p, k, degree = cts.shape
        out, many = cuda_device.empty(n, p - first, k, degree), p - first
        self.kernels.transforms("backward", n * many * k, out, cts, self._v, self.known, first, many, p, k)
        return out

    def switched(self, cts: Tensor, keys: Tensor, named: I32) -> Tensor:
        """Ciphertexts (n, p, k, N) as two polynomials, by those of keys (m, K, 2, K, N) that `named` says.

        (p - 2,) for all ciphertexts, or (n, p - 2).
        """
        n, p, k, degree = cts.shape
        digits, out, most = self.backward(cts, 2), cuda_device.empty(n, 2, k, degree), len(self.primes)
        which = self.kept(("keys", named.shape, named.tobytes()), lambda: named)
        self.kernels.transforms(
            "switched", n * k, out, cts, digits, keys, which, int(named.ndim == 2), self._w, self.known, p, k, most
        )
        return out

    def dropped(self, cts: Tensor, masks: Tensor | None = None, keep: int = KEEP) -> Tensor:
        """⌊c / D⌉ of ciphertexts (n, 2, k, N), plus masks (n, keep, N) in coefficients: (n, 2, keep, N)."""
        n, _, k, degree = cts.shape
        half = dropped(self.params, k, keep) // 2
        by = self.kept(("half", k, keep), lambda: np.array([half % q for q in self.primes[:k]], np.uint32))
        out, count = cuda_device.empty(n, 2, keep, degree), 2 * n * degree
        self.kernels.each(
            "drop_primes", count, out, self.backward(cts), by, masks, self.inverses, self.known, k, keep, wide(count)
        )
        return self.forward(out)

    # ---- on the wire -------------------------------------------------------------------------------------------------

    def tight(self, x: Tensor) -> Tensor:
        """Residues (…, N) without gaps."""
        out = cuda_device.empty(*x.shape[:-1], self.params.tight)
        self.kernels.each("tighten", out.numel(), out, x.contiguous(), self.params.bits, wide(out.numel()))
        return out

    def loose(self, words: Tensor) -> Tensor:
        """And back, (…, k, N); raises unless they are residues."""
        out, k = cuda_device.empty(*words.shape[:-1], self.degree), words.shape[-2]
        wrong = cuda_device.empty(1).zero_()
        self.kernels.each("loosen", out.numel(), out, words, wrong, self.params.bits, self.known, k, wide(out.numel()))
        if wrong.item():
            raise ParameterError("numbers that are not residues of the agreed primes")
        return out


def key_words(key: bytes) -> Any:
    if len(key) != 32:
        raise ParameterError(f"a key has 32 bytes, found {len(key)}")
    return np.frombuffer(key, np.uint32)


def words_of(x: int) -> U32:
    return np.array([x >> (32 * m) & 0xFFFFFFFF for m in range(MOST_WORDS)], np.uint32)


@functools.lru_cache(maxsize=4)
def ring_on_card(params: Parameters) -> CardRing:
    return CardRing(params)
