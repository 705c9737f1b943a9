"""Local arithmetic of encrypted inference: ciphertexts of one owner's key under a provider's plain weights.

Slot = sample, one ciphertext per number of a sample. So nothing is rotated; and because the owner, who has the key,
opens products of three polynomials, nothing is relinearised: there is no switching key at all. Nothing is rescaled
either: a stretch of work ends before its scale fills the modulus, with a blinded refresh,

    provider   c' = c + Enc(0) + M          M uniform on 2^b values, b = log2(largest message) + hiding
    owner      x' = ⌊(m + M)·f⌉             re-encrypted at all primes; f = scale wanted / scale found
    provider   c'' = x' - ⌊M·f⌉             an encryption of m·f ± 1

M hides m and the noise (2^-hiding per coefficient, statistically); Enc(0), with fresh randomness in every polynomial,
hides c_1 and c_2, from which the owner, who knows its own randomness, would read the weights.

Primes have at most 28 bits: a linear layer is then a float64 matrix product over residues, exact as long as
Σ|w|·q < 2^53, and tensor products add up in one word.

A ciphertext array is (n, p, k, N) in NTT form: n ciphertexts of p polynomials at k primes.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TypeAlias, final

import numpy as np
import numpy.typing as npt

from cloister.crypto import slots
from cloister.crypto.entropy import Entropy, check_entropy
from cloister.crypto.lattice import SIGMA, Residues, Ring, check_secure, ring
from cloister.crypto.prg import I64, U64, Prg
from cloister.errors import ParameterError

F64: TypeAlias = npt.NDArray[np.float64]
Cts: TypeAlias = U64  # (n, p, k, N)
FLOOD_BITS = 40
LIFT_BITS = 46  # scale below which a ciphertext is multiplied up before it is re-randomised


@dataclass(frozen=True, slots=True)
class Parameters:
    """Public. `degree` N gives N/2 samples a batch; scales of values and weights are powers of two."""

    degree: int = 8192
    count: int = 7  # primes
    bits: int = 28  # of each
    scale_bits: int = 28  # Δ
    weight_bits: int = 13
    hiding: int = 48  # statistical bits per coefficient of a blinded refresh

    def __post_init__(self) -> None:
        if not 20 <= self.bits <= 28 or self.count < 2 or self.hiding < 40:
            raise ParameterError("encrypted blocks need primes of 20 to 28 bits, two or more, and 40 bits of hiding")
        check_secure(self.degree, self.count * self.bits)

    @property
    def slots(self) -> int:
        return self.degree // 2

    @property
    def scale(self) -> float:
        return math.ldexp(1.0, self.scale_bits)

    @property
    def weight_scale(self) -> float:
        return math.ldexp(1.0, self.weight_bits)


SMALL = Parameters(4096, 4, 27, 22, 9, 40)  # the smallest ring that carries a block; for tests and small models
STANDARD = Parameters()


@dataclass(frozen=True, slots=True)
class Opening:
    """One refresh of `count` ciphertexts, as both sides know it beforehand."""

    label: str
    count: int
    polys: int  # p
    primes: int  # k, on the way down
    mask_bits: int  # b
    message_bits: float  # log2 of the largest coefficient
    lift: int  # bits by which the provider multiplies first
    factor: float  # f

    @property
    def hiding(self) -> float:
        return self.mask_bits - self.message_bits


@functools.lru_cache(maxsize=8)
def primes_of(params: Parameters) -> tuple[int, ...]:
    step = 2 * params.degree
    q = (1 << params.bits) // step * step + 1
    found: list[int] = []
    while len(found) < params.count:
        q -= step
        if q < 1 << (params.bits - 1):
            raise ParameterError(f"there are not {params.count} primes of {params.bits} bits for this ring")
        if _is_prime(q):
            found.append(q)
    return tuple(found)


def _is_prime(n: int) -> bool:
    return all(n % p for p in range(3, math.isqrt(n) + 1, 2))


@final
class Narrow:
    """The ring with transforms for primes of at most 28 bits: a few times faster, the same order of values."""

    def __init__(self, params: Parameters) -> None:
        from cloister.crypto import block_kernels

        self.wide: Ring = ring(params.degree, primes_of(params))
        self._k, self.q, self.degree = block_kernels, self.wide.q, params.degree
        self.inv = 1.0 / self.q.astype(np.float64)
        shift, q = np.uint64(32), self.q[:, None]
        self._w, self._v = self.wide._w.astype(np.uint32), self.wide._v.astype(np.uint32)
        self._ws = ((self.wide._w << shift) // q).astype(np.uint32)
        self._vs = ((self.wide._v << shift) // q).astype(np.uint32)
        self._n_inv = np.array([pow(params.degree, -1, int(x)) for x in self.q], np.uint64)
        self._powers = np.array([[pow(2, 42 * i, int(x)) for x in self.q] for i in range(slots.LIMBS)], np.uint64)
        self.of_small, self.add, self.subtract = self.wide.of_small, self.wide.add, self.wide.subtract
        self.add_product, self.uniform, self.lift = self.wide.add_product, self.wide.uniform, self.wide.lift
        self.zeros = self.wide.zeros

    def forward(self, a: Residues) -> Residues:
        self._k.forward(a, self._w, self._ws, self.q)
        return a

    def backward(self, a: Residues) -> Residues:
        self._k.backward(a, self._v, self._vs, self.q, self._n_inv, self.inv)
        return a

    def limbs_to_residues(self, limbs: I64, k: int) -> Residues:
        out = np.empty((k, self.degree), np.uint64)
        self._k.of_limbs(limbs, self._powers, self.q, self.inv, out)
        return out


@functools.lru_cache(maxsize=8)
def ring_of(params: Parameters) -> Narrow:
    return Narrow(params)


def room(params: Parameters, k: int) -> int:
    """Bits of a mask at k primes, so that mask and message stay within ±Q/4."""
    return math.floor(sum(math.log2(q) for q in primes_of(params)[:k])) - 2


def opening(
    params: Parameters, label: str, count: int, polys: int, scale: float, bound: float, want: float, hiding: int = 0
) -> Opening:
    """How to refresh values up to ±bound from `scale` to the scale `want`."""
    lift = max(0, LIFT_BITS - math.floor(math.log2(scale)))
    message = math.log2(scale * bound) + lift
    mask = math.ceil(message) + (hiding or params.hiding)
    k = next((k for k in range(1, params.count + 1) if room(params, k) >= mask), 0)
    if not k:
        raise ParameterError(
            f"{label}: a message of {message:.0f} bits, hidden by {mask - message:.0f}, does not fit into "
            f"{room(params, params.count)} bits; use more primes, or smaller scales"
        )
    return Opening(label, count, polys, k, mask, message, lift, want / math.ldexp(scale, lift))


def fits(params: Parameters, scale: float, bound: float) -> bool:
    """Whether values up to ±bound at that scale can still be refreshed."""
    return math.ceil(math.log2(scale * bound)) + params.hiding <= room(params, params.count)


# ---- encoding: slot j is the value at ζ^(2j+1); nothing is rotated, so any order does -------------------------------


@functools.lru_cache(maxsize=4)
def _zeta(degree: int) -> npt.NDArray[np.complex128]:
    return np.asarray(np.exp(1j * np.pi * np.arange(degree) / degree), np.complex128)


def encode(x: F64, degree: int, scale: float) -> I64:
    """Coefficients of up to N/2 real slots; the others are zero."""
    z = np.zeros(degree)
    z[: len(x)] = x
    z[degree - len(x) :] = x[::-1]
    return np.rint((np.fft.fft(z) / degree / _zeta(degree)).real * scale).astype(np.int64)


def decode(m: F64, scale: float, count: int) -> F64:
    z = np.fft.ifft(m * _zeta(len(m))) * len(m)
    return np.asarray(z.real[:count] / scale)


# ---- the owner -------------------------------------------------------------------------------------------------------


@final
class OwnerKey:
    """Secret s, and what of it the provider gets: b = -a·s + e, with a from a public seed."""

    __slots__ = ("_s", "_s2", "b", "params", "seed")

    def __init__(self, params: Parameters, entropy: Entropy) -> None:
        check_entropy(entropy)
        r, K = ring_of(params), params.count
        self.params, self.seed = params, entropy.bytes(32)
        self._s = r.forward(r.of_small(entropy.prg().ternary(params.degree), K))
        self._s2 = r.add_product(r.zeros(K), self._s, self._s)
        e = r.forward(r.of_small(entropy.prg().gaussian(params.degree, SIGMA), K))
        self.b = r.add_product(e, r.uniform(Prg(self.seed), K), self._s, sign=-1)

    def __repr__(self) -> str:
        return "OwnerKey(...)"

    def hide(self, m: Residues, mask: Prg, secret: Prg) -> Residues:
        """c_0 of a fresh encryption of coefficients m; c_1 is the next uniform polynomial of `mask`."""
        r = ring_of(self.params)
        r.add(m, r.of_small(secret.gaussian(self.params.degree, SIGMA), len(m)))
        return r.add_product(r.forward(m), r.uniform(mask, len(m)), self._s, sign=-1)

    def encrypt(self, x: F64, seed: bytes, entropy: Entropy) -> U64:
        """Values (n, samples) → c_0 of each, (n, K, N), at scale Δ."""
        p, r = self.params, ring_of(self.params)
        mask, secret = Prg(seed), entropy.prg()
        out = np.empty((len(x), p.count, p.degree), np.uint64)
        for i, row in enumerate(x):
            out[i] = self.hide(r.of_small(encode(row, p.degree, p.scale), p.count), mask, secret)
        return out

    def open(self, ct: U64) -> slots.Wide:
        """The message polynomial of one ciphertext (p, k, N), centred, as double-doubles."""
        r = ring_of(self.params)
        m = r.add_product(ct[0].copy(), ct[1], self._s)
        if len(ct) == 3:
            r.add_product(m, ct[2], self._s2)
        return np.stack(r.lift(r.backward(m)))

    def refresh(self, cts: Cts, how: Opening, seed: bytes, entropy: Entropy) -> tuple[U64, bool]:
        """c_0 of fresh encryptions of what is under the masks, rescaled; and whether all lay where they must."""
        p, r = self.params, ring_of(self.params)
        mask, secret = Prg(seed), entropy.prg()
        limit = math.ldexp(1.0, how.mask_bits - 1) + math.ldexp(1.0, math.ceil(how.message_bits))
        out, inside = np.empty((len(cts), p.count, p.degree), np.uint64), True
        for i, ct in enumerate(cts):
            wide = self.open(ct)
            inside = inside and float(np.abs(wide[0]).max()) <= limit
            out[i] = self.hide(r.limbs_to_residues(slots.wide_to_limbs(times(wide, how.factor)), p.count), mask, secret)
        return out, inside

    def read(self, cts: Cts, scale: float, count: int) -> F64:
        """Slots of ciphertexts that were sent to be read, (n, count)."""
        return np.stack([decode(self.open(ct)[0], scale, count) for ct in cts])


def expand(params: Parameters, c0: U64, seed: bytes) -> Cts:
    """The ciphertexts (n, 2, K, N) whose c_0 came with a seed."""
    r, mask = ring_of(params), Prg(seed)
    return np.stack([np.stack([c, r.uniform(mask, params.count)]) for c in c0])


def times(wide: slots.Wide, factor: float) -> slots.Wide:
    from cloister.crypto import block_kernels

    out = np.empty_like(wide)
    block_kernels.scale(wide, factor, out)
    return out


# ---- the provider ----------------------------------------------------------------------------------------------------


@final
class Evaluator:
    """Arithmetic on ciphertexts of one owner. Results of every method are new arrays."""

    def __init__(self, params: Parameters, b: Residues, seed: bytes) -> None:
        from cloister.crypto import block_kernels

        self.params, self.ring, self._k = params, ring_of(params), block_kernels
        self._b, self._a = b, self.ring.uniform(Prg(seed), params.count)
        self._q = self.ring.q
        self._inv = 1.0 / self._q.astype(np.float64)

    def linear(self, w: I64, x: Cts) -> Cts:
        """Integer matrix (o, i) times ciphertexts (i, p, k, N)."""
        q = float(self._q.max())
        if w.shape[1] != len(x) or np.abs(w).sum(axis=1).max(initial=0) * q >= 2.0**53:
            raise ParameterError("a linear layer does not fit its input, or its weights are too large to be exact")
        p, k, N = x.shape[1:]
        out = np.empty((len(w), p, k, N), np.uint64)
        wf, step = w.astype(np.float64), min(N, 2048)
        for r in range(p):
            for j in range(k):
                for s in range(0, N, step):
                    y = wf @ x[:, r, j, s : s + step].astype(np.float64)
                    self._k.reduce_into(y, out[:, r, j, s : s + step], float(self._q[j]), self._inv[j])
        return out

    def dot(self, x: Cts, y: Cts) -> U64:
        """Σ_f x_f ⊗ y_f, (3, k, N)."""
        out = np.empty((3, x.shape[2], x.shape[3]), np.uint64)
        self._k.tensor_sum(np.ascontiguousarray(x), np.ascontiguousarray(y), out, self._q, self._inv)
        return out

    def products(self, x: Cts, y: Cts) -> Cts:
        """x_i ⊗ y_i for every i."""
        return np.stack([self.dot(a[None], b[None]) for a, b in zip(x, y, strict=True)])

    def combine(self, parts: list[tuple[int, Cts]], constants: npt.ArrayLike | None = None) -> Cts:
        """Σ factor·x, for arrays of any p, plus an integer in every slot of each ciphertext."""
        n, p = len(parts[0][1]), max(x.shape[1] for _, x in parts)
        out = np.zeros((n, p, *parts[0][1].shape[2:]), np.uint64)
        for factor, x in parts:
            residues = np.array([factor % int(q) for q in self._q], np.uint64)
            self._k.add_multiple(out[:, : x.shape[1]], x, residues, self._q, self._inv)
        if constants is not None:
            self.add_constants(out, constants)
        return out

    def add_constants(self, x: Cts, constants: npt.ArrayLike) -> Cts:
        """Add integers to every slot, in place: a constant is the same in NTT form."""
        values = [round(float(c)) for c in np.broadcast_to(np.asarray(constants, np.float64), (len(x),))]
        for j in range(x.shape[2]):
            q = int(self._q[j])
            column = np.array([c % q for c in values], np.uint64)[:, None]
            x[:, 0, j] = (x[:, 0, j] + column) % self._q[j]
        return x

    def rerandomise(self, ct: U64, prg: Prg, extra: Residues) -> U64:
        """One ciphertext (p, k, N) plus fresh encryptions of zero, plus a polynomial `extra` in coefficients."""
        r, (p, k, N) = self.ring, ct.shape
        out = ct.copy()
        for i in range(p):
            e = r.of_small(prg.gaussian(N, SIGMA), k)
            r.add(out[i], r.forward(r.add(e, extra) if i == 0 else e))
        for i in range(p - 1):
            v = r.forward(r.of_small(prg.ternary(N), k))
            r.add_product(out[i], self._b, v)
            r.add_product(out[i + 1], self._a, v)
        return out

    def blind(self, cts: Cts, how: Opening, entropy: Entropy) -> tuple[U64, I64]:
        """Masked ciphertexts (n, p, k, N), and what to subtract afterwards, (n, limbs, N)."""
        r, k, N = self.ring, how.primes, self.params.degree
        if cts.shape[:2] != (how.count, how.polys):
            raise ParameterError(f"{how.label}: planned for {how.count}, {how.polys}, found {cts.shape[:2]}")
        sent = np.empty((len(cts), cts.shape[1], k, N), np.uint64)
        kept = np.empty((len(cts), slots.LIMBS, N), np.int64)
        prg = entropy.prg()
        for i in range(len(cts)):
            ct = np.ascontiguousarray(cts[i, :, :k])
            if how.lift:
                ct = self.combine([(1 << how.lift, ct[None])])[0]
            limbs = slots.random_limbs(prg.uint64((slots.LIMBS, N)), how.mask_bits)
            limbs[(how.mask_bits - 1) // 42] -= 1 << ((how.mask_bits - 1) % 42)
            sent[i] = self.rerandomise(ct, prg, r.limbs_to_residues(limbs, k))
            kept[i] = slots.wide_to_limbs(times(slots.limbs_to_wide(limbs), how.factor))
        return sent, kept

    def unblind(self, c0: U64, seed: bytes, kept: I64) -> Cts:
        r, out = self.ring, expand(self.params, c0, seed)
        for i, limbs in enumerate(kept):
            r.subtract(out[i, 0], r.forward(r.limbs_to_residues(limbs, self.params.count)))
        return out

    def flood(self, cts: Cts, bits: int, primes: int, entropy: Entropy) -> Cts:
        """Ciphertexts to be read: re-randomised, and covered by noise uniform in ±2^bits."""
        prg = entropy.prg()
        out = []
        for ct in cts:
            c = self.rerandomise(np.ascontiguousarray(ct[:, :primes]), prg, self.ring.zeros(primes))
            self.ring.add(c[0], self.ring.wide.flood(prg, bits, primes))
            out.append(c)
        return np.stack(out)


def pack(x: U64) -> npt.NDArray[np.uint32]:
    return x.astype(np.uint32)


def unpack(params: Parameters, x: npt.NDArray[np.uint32]) -> U64:
    """Residues from the wire; raises unless they are below their primes."""
    q = np.array(primes_of(params)[: x.shape[-2]], np.uint64)[:, None]
    out = x.astype(np.uint64)
    if (out >= q).any():
        raise ParameterError("numbers that are no residues of the agreed primes")
    return out
