"""Local arithmetic of encrypted inference: ciphertexts of one owner's key under a provider's plain weights.

Slot = sample, one ciphertext per number of a sample: nothing is rotated, and nothing is rescaled. A stretch of work
ends before its scale fills the modulus, with a blinded refresh of values, two and two (`pairs`):

    provider   c' = ⌊(switch(c_a + i·c_b) + Enc(0)) / D⌉ + M     M uniform modulo Q, the product of KEEP primes
    owner      w = m + M mod Q; x' = ⌊2·Re(w)·f⌋, ⌊2·Im(w)·f⌋    re-encrypted; 2f = scale wanted / scale found
    provider   c'' = x' - ⌊2·Re(M)·f⌋, …                         encryptions of m·2f ± 1, unless m + M went round

M hides m and the noise perfectly, however large they are: a mask of fewer bits would show the leading ones of a message
beyond its interval, and an owner can make messages as large as it likes. m is 2^hiding times smaller than Q, so a
coefficient wraps modulo Q with probability 2^-hiding. Enc(0) hides c_1, from which the owner, who knows its own
randomness, would read the weights: with v·a + e it is as good as uniform before primes are dropped, and so what is left
of it after; that does not depend on the owner's word for its public key or for its switching keys.

Primes have at most 28 bits: a linear layer is then a float64 matrix product over residues, exact as long as
Σ|w|·q < 2^53, and tensor products add up in one word.

A ciphertext array is (n, p, k, N) in NTT form: n ciphertexts of p polynomials at k primes, in 32-bit words. Dropping
primes from its end changes nothing as long as the message fits into the rest: a stretch is computed at no more primes
than its opening needs, and what an owner encrypts afresh has no more than the stretches after it need.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import numpy as np
import numpy.typing as npt

from cloister.arrays import F64, I64, U32
from cloister.errors import ParameterError
from cloister.mpc.crypto.entropy import Entropy, check_entropy
from cloister.mpc.crypto.owner_ckks import rotations
from cloister.mpc.crypto.owner_ckks.ciphertext_store import Pool
from cloister.mpc.crypto.owner_ckks.packed_refresh import AT_MOST, pack_words, pairs_of, unpack_words
from cloister.mpc.crypto.owner_ckks.ring import (
    KEEP,
    QUADRATIC,
    SMALL,
    STANDARD,
    Cts,
    Halves,
    Opening,
    Parameters,
    Residues,
    fits,
    fraction,
    longest,
    modulus,
    opening,
    primes_for,
    primes_of,
    random_below,
    random_words,
    ring_of,
    room,
    times_shift,
)
from cloister.mpc.crypto.owner_ckks.rotations import decode, encode
from cloister.mpc.crypto.prg import Prg

FLOOD_BITS = 40


# ---- the owner -------------------------------------------------------------------------------------------------------


@final
class OwnerKey:
    """Secret s, and what of it the provider gets: b = -a·s + e, with a from a public seed."""

    __slots__ = ("_powers", "b", "params", "seed")

    def __init__(self, params: Parameters, entropy: Entropy) -> None:
        check_entropy(entropy)
        r, K = ring_of(params), params.count
        self.params, self.seed = params, entropy.bytes(32)
        s = r.forward(r.ternary(entropy.prg(), K))
        self._powers = [(s, r.quotients(s))]  # s, s², …, as far as they are asked for
        self.b = r.forward(r.gaussian(entropy.prg(), K))
        r.kernels.subtract_known(self.b, r.uniform(Halves(self.seed), K), *self._powers[0], r.q)

    @classmethod
    def kept(cls, params: Parameters, secret: Residues, b: Residues, seed: bytes) -> OwnerKey:
        """A key that its owner has kept in a file of its own: `secret`, `b` and `seed` of one."""
        wanted = (params.count, params.degree)
        if secret.shape != wanted or b.shape != wanted or secret.dtype != np.uint32 or len(seed) != 32:
            raise ValueError("no key of this ring")
        key = cls.__new__(cls)
        key.params, key.seed, key.b = params, seed, b
        key._powers = [(secret, ring_of(params).quotients(secret))]
        return key

    @property
    def secret(self) -> Residues:
        """s: for its owner's own file, and for nobody else."""
        return self._powers[0][0]

    def __repr__(self) -> str:
        return "OwnerKey(...)"

    def _power(self, i: int) -> tuple[Residues, Residues]:
        r = ring_of(self.params)
        while len(self._powers) < i:
            next_one = np.zeros_like(self._powers[0][0])
            r.kernels.add_known(next_one, self._powers[-1][0], *self._powers[0], r.q)
            self._powers.append((next_one, r.quotients(next_one)))
        return self._powers[i - 1]

    def switching(self, polys: int, seed: bytes, entropy: Entropy, tokens: int = 1) -> U32:
        """c_0 of switching keys for ciphertexts of up to so many polynomials, and for turns of tokens, (m, K, K, N)."""
        r, K, mask, secret = ring_of(self.params), self.params.count, Halves(seed), entropy.prg()
        keys = [self._power(m + 2)[0] for m in range(polys - 2)] + self._turned(tokens)
        out = np.zeros((len(keys), K, K, self.params.degree), np.uint32)
        for m, i in np.ndindex(len(keys), K):
            self.hide(out[m, i], mask, secret)
            own = out[m, i, i].astype(np.uint64) + keys[m][i]
            out[m, i, i] = own % np.uint64(r.primes[i])
        return out

    def _turned(self, tokens: int) -> list[Residues]:
        """σ_r(s) and s·σ_r(s) for every turn that has keys."""
        r, s, found = ring_of(self.params), self._powers[0], []
        for turn in rotations.Turns(tokens).every:
            turned = np.ascontiguousarray(s[0][:, rotations.order(self.params.degree, tokens, turn)])
            both = np.zeros_like(turned)
            r.kernels.add_known(both, turned, *s, r.q)
            found += [turned, both]
        return found

    def hide(self, m: Residues, mask: Halves, secret: Prg) -> Residues:
        """c_0 of a fresh encryption of coefficients m, in place; c_1 is the next one of `mask`."""
        r, k = ring_of(self.params), len(m)
        r.forward(r.add(m, r.gaussian(secret, k)))
        r.kernels.subtract_known(m, r.uniform(mask, k), *self._powers[0], r.q)
        return m

    def encrypt(self, x: F64, seed: bytes, entropy: Entropy) -> U32:
        """Values (n, samples) → c_0 of each, (n, K, N), at scale Δ."""
        p, r = self.params, ring_of(self.params)
        mask, secret = Halves(seed), entropy.prg()
        out = np.empty((len(x), p.count, p.degree), np.uint32)
        for i, row in enumerate(x):
            m = r.wide.of_small(encode(row, p.degree, p.scale), p.count).astype(np.uint32)
            out[i] = self.hide(m, mask, secret)
        return out

    def _opened(self, ct: U32) -> Residues:
        """The message polynomial of one ciphertext (p, k, N), in coefficients."""
        r = ring_of(self.params)
        m = ct[0].copy()
        for i in range(1, len(ct)):
            r.kernels.add_known(m, ct[i], *self._power(i), r.q)
        return r.backward(m)

    def open(self, ct: U32) -> F64:
        """The same, centred, as double-doubles (2, N)."""
        return np.stack(ring_of(self.params).wide.lift(self._opened(ct).astype(np.uint64)))

    def refresh(self, cts: Cts, how: Opening, seed: bytes, entropy: Entropy) -> U32:
        """c_0 of fresh encryptions of what is under the masks, rescaled: two for each ciphertext."""
        r, pairs = ring_of(self.params), pairs_of(self.params)
        mask, secret = Halves(seed), entropy.prg()
        out = np.zeros((2 * len(cts), how.back, self.params.degree), np.uint32)
        for i, ct in enumerate(cts):
            for h, words in enumerate(pairs.halves(r.to_words(self._opened(ct)))):
                self.hide(r.add_words(out[2 * i + h], times_shift(words, how)), mask, secret)
        return out

    def read(self, cts: Cts, scale: float, count: int) -> F64:
        """Slots of ciphertexts that were sent to be read, (n, count)."""
        return np.stack([decode(self.open(ct)[0], scale, count) for ct in cts])


def expand(params: Parameters, c0: U32, seed: bytes) -> Cts:
    """The ciphertexts (n, 2, k, N) whose c_0 came with a seed."""
    r, mask = ring_of(params), Halves(seed)
    out = np.empty((len(c0), 2, *c0.shape[1:]), np.uint32)
    for i, c in enumerate(c0):
        out[i, 0], out[i, 1] = c, r.uniform(mask, len(c))
    return out


# ---- the provider ----------------------------------------------------------------------------------------------------


@final
class Evaluator:
    """Arithmetic on ciphertexts of one owner. Results are new arrays unless said otherwise."""

    def __init__(self, params: Parameters, b: Residues, seed: bytes) -> None:
        self.params, self.ring = params, ring_of(params)
        self._k, self._q, self._inv = self.ring.kernels, self.ring.q, self.ring.inv
        a = self.ring.uniform(Halves(seed), params.count)
        self._b, self._a = (b, self.ring.quotients(b)), (a, self.ring.quotients(a))
        self._switching: U32 | None = None

    def accept(self, c0: U32, seed: bytes) -> None:
        """The owner's switching keys, which openings of three polynomials and more need."""
        self._switching = pairs_of(self.params).expand(c0, seed)

    # what a circuit does with arrays besides, so that they may lie elsewhere (`gpu.Evaluator`)

    at_once = 0  # ciphertexts that are best made together; 0: one group of an opening at a time

    def pool(self) -> Pool:
        return Pool()

    def put(self, words: U32) -> Cts:
        """From the wire; raises unless they are residues."""
        return unpack_words(self.params, words)

    def host(self, x: Cts) -> U32:
        """For the wire."""
        return pack_words(self.params, x)

    def expand(self, c0: U32, seed: bytes) -> Cts:
        return expand(self.params, c0, seed)

    def zeros(self, n: int, p: int, k: int) -> Cts:
        return np.zeros((n, p, k, self.params.degree), np.uint32)

    def join(self, parts: list[Cts]) -> Cts:
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def cut(self, x: Cts, k: int) -> Cts:
        """The first k primes of ciphertexts (…, p, k', N)."""
        return np.ascontiguousarray(x[..., :k, :])

    def weights(self, w: I64) -> Any:
        """A matrix, ready for `linear`."""
        return w

    def linear(self, w: Any, x: Cts) -> Cts:
        """Integer matrix (o, i) times ciphertexts (i, p, k, N)."""
        q = float(self._q.max())
        if w.shape[1] != len(x) or np.abs(w).sum(axis=1).max(initial=0) * q >= 2.0**53:
            raise ParameterError("a linear layer does not fit its input, or its weights are too large to be exact")
        p, k, N = x.shape[1:]
        out = np.empty((len(w), p, k, N), np.uint32)
        wf, step = w.astype(np.float64), min(N, 1024)
        xf, yf = np.empty((len(x), step)), np.empty((len(w), step))
        for r in range(p):
            for j in range(k):
                for s in range(0, N, step):
                    xf[:] = x[:, r, j, s : s + step]
                    np.matmul(wf, xf, out=yf)
                    self._k.reduce_into(yf, out[:, r, j, s : s + step], float(self._q[j]), self._inv[j])
        return out

    def centre(self, x: Cts) -> Cts:
        """n·x_i - Σ x for n ciphertexts: n times what lies above their mean."""
        n, mean = len(x), self.total(x)
        return self.combine([(n, x), (-1, np.broadcast_to(mean, x.shape))])

    def total(self, x: Cts) -> Cts:
        """Σ x, one ciphertext."""
        out = np.empty((1, *x.shape[1:]), np.uint32)
        self._k.total(x, self._q, self._inv, out[0])
        return out

    def rows(self, x: Cts, y: Cts, at: I64) -> Cts:
        """Σ_f x[r, f] ⊗ y[at[m, f]] for x (r, f, 2, k, N) and y (n, 2, k, N): (r, m, 3, k, N)."""
        out = np.empty((len(x), len(at), 3, *x.shape[3:]), np.uint32)
        self._k.tensor_rows(x, y, at, self._q, self._inv, out)
        return out

    def dot(self, x: Cts, y: Cts) -> Any:
        """Σ x_f ⊗ y_f, a ciphertext of three polynomials (3, k, N)."""
        return self.rows(np.ascontiguousarray(x)[None], np.ascontiguousarray(y), np.arange(len(y))[None])[0, 0]

    def products(self, x: Cts, y: Cts) -> Cts:
        """x_i ⊗ y_i for every i, of any numbers of polynomials."""
        out = np.empty((len(x), x.shape[1] + y.shape[1] - 1, *x.shape[2:]), np.uint32)
        self._k.convolve(x, y, self._q, self._inv, out)
        return out

    def combine(self, parts: list[tuple[int | list[int], Cts]], constants: npt.ArrayLike | None = None) -> Cts:
        """Σ factor·x, for arrays of any p and one factor or one per ciphertext, plus an integer in every slot."""
        n, p, k = len(parts[0][1]), max(x.shape[1] for _, x in parts), min(x.shape[2] for _, x in parts)
        out = np.zeros((n, p, k, parts[0][1].shape[3]), np.uint32)
        primes = self.ring.primes[:k]
        for factor, x in parts:
            each = factor if isinstance(factor, list) else [factor]
            w = np.array([[f % q for q in primes] for f in each], np.uint32)
            ws = np.ascontiguousarray(self.ring.quotients(np.ascontiguousarray(w.T)).T)
            w, ws = (np.ascontiguousarray(np.broadcast_to(a, (n, k))) for a in (w, ws))
            self._k.add_multiple(out[:, : x.shape[1]], x[:, :, :k], w, ws, self._q)
        if constants is not None:
            self.add_constants(out, constants)
        return out

    def add_constants(self, x: Cts, constants: npt.ArrayLike) -> Cts:
        """Add integers to every slot, in place: a constant is the same in NTT form."""
        values = [round(float(c)) for c in np.broadcast_to(np.asarray(constants, np.float64), (len(x),))]
        for j, q in enumerate(self.ring.primes[: x.shape[2]]):
            column = np.array([c % q for c in values], np.uint32)[:, None]
            x[:, 0, j] = (x[:, 0, j] + column) % self._q[j]
        return x

    def rerandomise(self, ct: U32, prg: Prg, extra: Residues | None = None) -> U32:
        """Add fresh encryptions of zero to one ciphertext (p, k, N), in place, and `extra`, given in coefficients."""
        r, (p, k, _) = self.ring, ct.shape
        for i in range(p):
            e = r.gaussian(prg, k)
            r.add(ct[i], r.forward(e if extra is None or i else r.add(e, extra)))
        for i in range(p - 1):
            v = r.forward(r.ternary(prg, k))
            self._k.add_known(ct[i], v, *self._b, self._q)
            self._k.add_known(ct[i + 1], v, *self._a, self._q)
        return ct

    def switched(self, cts: Cts, by: Sequence[int] | I64 = ()) -> Cts:
        """The same messages in two polynomials; `by` names the keys of the others, s², s³, … if it does not.

        An array (n, p - 2) names them for every ciphertext.
        """
        p = cts.shape[1]
        if p == 2:
            return cts
        if isinstance(by, np.ndarray):
            return np.concatenate([self.switched(ct[None], row.tolist()) for ct, row in zip(cts, by, strict=True)])
        named, pairs = by or range(p - 2), pairs_of(self.params)
        if self._switching is None or len(self._switching) <= max(named) or len(named) != p - 2:
            raise ParameterError(f"there are no switching keys for ciphertexts of {p} polynomials")
        out = cts
        for lo in range(0, p - 2, AT_MOST):
            keys = [self._switching[m] for m in named[lo : lo + AT_MOST]]
            some = np.concatenate([out[:, :2], cts[:, 2 + lo : 2 + lo + AT_MOST]], axis=1)
            out = np.stack([pairs.switch(ct, keys) for ct in some])
        return out

    def turned(self, cts: Cts, tokens: int, r: int) -> Cts:
        """Ciphertexts (…, N) whose slots hold what stood r tokens further, under the turned key (`turns`)."""
        return np.ascontiguousarray(np.take(cts, rotations.order(self.params.degree, tokens, r), axis=-1))

    def plain(self, x: F64, scale: float, k: int) -> Cts:
        """Slots (n, N/2) that are no secret, as ciphertexts of one polynomial (n, 1, k, N)."""
        r, N = self.ring, self.params.degree
        rows = [r.forward(r.wide.of_small(encode(row, N, scale), k).astype(np.uint32)) for row in x]
        return np.stack(rows)[:, None]

    def dropped(self, cts: Cts, keep: int) -> Cts:
        """⌊c / D⌉ of ciphertexts (n, p, k, N) at the first `keep` primes, D the product of the others."""
        r, pairs, (n, p, _, N) = self.ring, pairs_of(self.params), cts.shape
        out = np.empty((n, p, keep, N), np.uint32)
        for c, m in np.ndindex(n, p):
            out[c, m] = r.forward(pairs.drop(r.backward(cts[c, m].copy()), keep))
        return out

    def blind(self, cts: Cts, how: Opening, mask_key: bytes, entropy: Entropy) -> U32:
        """Masked pairs (⌈n/2⌉, 2, KEEP, N); the masks are drawn from the key, and again by `unblind`."""
        if cts.shape[1:3] != (how.polys, how.primes):
            raise ParameterError(f"{how.label}: planned for {how.polys} at {how.primes} primes, found {cts.shape[1:3]}")
        r, pairs, Q = self.ring, pairs_of(self.params), modulus(self.params, KEEP)
        packed, prg, masks = self.switched(pairs.pack(cts, how.lift)), entropy.prg(), Prg(mask_key)
        sent = np.empty((len(packed), 2, KEEP, self.params.degree), np.uint32)
        for ct, out in zip(packed, sent, strict=True):
            self.rerandomise(ct, prg)
            for h in range(2):
                out[h] = pairs.drop(r.backward(ct[h]))
            r.add_words(out[0], random_below(masks, Q, self.params.degree))
            for h in range(2):
                r.forward(out[h])
        return sent

    def unblind(self, c0: U32, seed: bytes, how: Opening, mask_key: bytes) -> Cts:
        r, out, masks = self.ring, expand(self.params, c0, seed), Prg(mask_key)
        pairs, Q, zero = pairs_of(self.params), modulus(self.params, KEEP), np.zeros_like(c0[0])
        for i in range(0, len(out), 2):
            for h, words in enumerate(pairs.halves(random_below(masks, Q, self.params.degree))):
                r.subtract(out[i + h, 0], r.forward(r.add_words(zero.copy(), times_shift(words, how))))
        return out

    def flood(self, cts: Cts, bits: int, primes: int, entropy: Entropy) -> Cts:
        """Ciphertexts to be read: re-randomised, and covered by noise uniform in [-2^bits, 2^bits)."""
        r, prg = self.ring, entropy.prg()
        out = np.ascontiguousarray(cts[:, :, :primes]).copy()
        for ct in out:
            noise = random_words(prg, bits + 1, self.params.degree)
            self.rerandomise(ct, prg, r.add_words(r.constant(-(1 << bits), primes), noise))
        return out


__all__ = [
    "KEEP", "QUADRATIC", "SMALL", "STANDARD", "Cts", "Evaluator", "Halves", "Opening", "OwnerKey", "Parameters",
    "decode", "encode", "expand", "fits", "fraction", "longest", "modulus", "opening", "pack_words", "primes_for",
    "primes_of", "random_below", "random_words", "ring_of", "room", "times_shift", "unpack_words",
]  # fmt: skip
