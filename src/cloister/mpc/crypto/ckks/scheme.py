"""CKKS: real vectors under encryption, with the raw residues that collective protocols need.

Everything is computed on residues (`lattice`): keys, encryption and decryption shares from `Entropy`, so that nobody
needs a key that nobody may have, and products, rotations and rescaling. The tests hold it against Microsoft SEAL, whose
order of slots and of NTT form this is.

A ciphertext is at *k primes* of the L data primes that `Parameters` lays out (`chain`).
"""

from __future__ import annotations

import functools
import hashlib
import math
import struct
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple, final

import numpy as np

from cloister.arrays import C128, F64, I64, U64
from cloister.errors import ParameterError, WireError
from cloister.mpc.crypto.ckks.parameters import (
    HIDING_BITS,
    Parameters,
    base_bits,
    chain_primes,
    choose,
    encryption_noise,
    flood_bits,
    rounding_noise,
)
from cloister.mpc.crypto.entropy import Entropy, check_entropy
from cloister.mpc.crypto.prg import Prg
from cloister.mpc.crypto.rns import slots
from cloister.mpc.crypto.rns.bases import Bases, SwitchingKey, bases
from cloister.mpc.crypto.rns.ring import Residues, Ring, ring

GRID = 30  # bits after the point of values that everybody encodes for itself


@final
class Secret:
    """One party's secret: ternary coefficients, and its NTT form."""

    __slots__ = ("_coefficients", "_ntt", "params")

    def __init__(self, params: Parameters, coefficients: I64) -> None:
        if coefficients.shape != (params.degree,) or np.abs(coefficients).max() > 1:
            raise ParameterError(f"a secret has {params.degree} coefficients in {{-1, 0, 1}}")
        self.params, self._coefficients = params, coefficients
        r = context(params).ring
        self._ntt = r.forward(r.of_small(coefficients, len(params.bits)))

    def __repr__(self) -> str:
        return "Secret(...)"

    @classmethod
    def draw(cls, params: Parameters, entropy: Entropy) -> Secret:
        check_entropy(entropy)
        return cls(params, entropy.prg().ternary(params.degree))

    @property
    def ntt(self) -> Residues:
        return self._ntt

    @property
    def coefficients(self) -> I64:
        return self._coefficients

    def to_bytes(self) -> bytes:
        return (self._coefficients + 1).astype(np.uint8).tobytes()

    @classmethod
    def from_bytes(cls, params: Parameters, raw: bytes) -> Secret:
        if len(raw) != params.degree or max(raw) > 2:
            raise WireError("bytes that are not a secret of this ring")
        return cls(params, np.frombuffer(raw, np.uint8).astype(np.int64) - 1)


@dataclass(frozen=True, eq=False)
class PublicKey:
    """(b, a) with b = -a·s + e, over all data primes, NTT form."""

    b: Residues
    a: Residues


class Cipher:
    """Polynomials in NTT form, (2, k, N) or (3, k, N) before relinearisation, and the scale of what they hide."""

    __slots__ = ("polys", "scale")

    def __init__(self, polys: U64, scale: float) -> None:
        self.polys, self.scale = polys, scale

    @property
    def primes(self) -> int:
        """k, the primes it is at."""
        return int(self.polys.shape[1])


class Plain(NamedTuple):
    """A plaintext polynomial in NTT form and its scale."""

    residues: Residues
    scale: float


@final
class Context:
    """Arithmetic for one set of parameters. Use `context(params)`, which keeps its tables."""

    def __init__(self, params: Parameters) -> None:
        self.params = params
        self.primes = chain_primes(params)
        self.ring: Ring = ring(params.degree, self.primes)
        self.bases: Bases = bases(self.ring, params.specials)

    @property
    def readable(self) -> int:
        """The most primes whose product is an integer of `slots.WIDEST` bits."""
        return max(k for k in range(1, len(self.primes) + 1) if math.prod(self.primes[:k]).bit_length() <= slots.WIDEST)

    # ---- encoding ----------------------------------------------------------------------------------------------------

    def encode(self, values: F64 | C128 | float, k: int, scale: float) -> Plain:
        """A plaintext at k primes: a vector, or one number in every slot."""
        if isinstance(values, float):
            whole = round(Fraction(values) * Fraction(scale))
            rows = [np.full(self.params.degree, whole % q, np.uint64) for q in self.primes[:k]]
            return Plain(np.stack(rows), scale)
        shift = _shift_of(scale)
        coefficients = slots.to_plain_coefficients(values, self.params.degree, math.ldexp(scale, -shift))
        return Plain(self._shifted(self.ring.forward(self.bases.of_doubles(coefficients, k)), shift), scale)

    def exact_residues(self, values: F64, k: int, scale: float) -> Residues:
        """The plaintext polynomial of values on the grid of 2^-GRID, in integers: the same on every machine."""
        shift, whole = _shift_of(scale), np.rint(np.ldexp(values, GRID)).astype(np.int64)
        return self._shifted(slots.encode_exact(self.ring, whole, math.ldexp(scale, -shift - GRID), k), shift)

    def _shifted(self, rows: Residues, bits: int) -> Residues:
        """Times 2^bits."""
        if bits == 0:
            return rows
        out = np.zeros_like(rows)
        for row in range(len(rows)):
            self.ring.add_multiple(out, rows, 1 << bits, row)
        return out

    def add_exact(self, ct: Cipher, values: F64) -> Cipher:
        """Add a vector on that grid."""
        raw, scale = self.raw(ct)
        self.ring.add(raw[0], self.exact_residues(values, raw.shape[1], scale))
        return self.cipher(raw, scale)

    def decode(self, m: Residues, scale: float) -> F64:
        """Real slots of a plaintext polynomial given in NTT form."""
        rows = m[: self.readable].copy()  # a message that can be read is far below their product
        z = slots.embedding(self.params.degree).to_slots(self.ring.integers(self.ring.backward(rows)))
        return slots.to_real(z, scale)

    # ---- ciphertexts -------------------------------------------------------------------------------------------------

    def encrypt(self, key: PublicKey, values: F64, k: int, scale: float, entropy: Entropy) -> Cipher:
        """(b·u + e0 + m, a·u + e1) at k primes, u ternary."""
        check_entropy(entropy)
        polys = self.encrypted_zero(key, k, entropy.prg())
        self.ring.add(polys[0], self.encode(values, k, scale).residues)
        return self.cipher(polys, scale)

    def encrypt_public(self, values: F64, k: int, scale: float) -> Cipher:
        """(m, 0): values that everybody knows, in a ciphertext that everybody makes alike. It hides nothing.

        It has no noise either: with (b + m, a), whoever knows m would read equations in the key from what is opened.
        """
        return self.cipher(np.stack([self.exact_residues(values, k, scale), self.ring.zeros(k)]), scale)

    def rerandomise(self, key: PublicKey, ct: Cipher, entropy: Entropy) -> Cipher:
        """The same slots plus a fresh encryption of zero: what went into `ct` no longer shows in its polynomials.

        Evaluation is deterministic. Who knows the inputs of a circuit but for some plain factors could try values for
        these until the same ciphertext comes out.
        """
        check_entropy(entropy)
        zero = self.encrypted_zero(key, ct.primes, entropy.prg())
        return self.add(ct, self.cipher(zero, ct.scale))

    def encrypted_zero(self, key: PublicKey, k: int, prg: Prg) -> U64:
        """Polynomials of an encryption of zero at k primes, from that stream."""
        r = self.ring
        u = r.forward(r.of_small(prg.ternary(self.params.degree), k))
        c0, c1 = r.error(prg, k), r.error(prg, k)
        r.add_product(c0, key.b, u)
        r.add_product(c1, key.a, u)
        return np.stack([c0, c1])

    def decrypt(self, secret: Residues, ct: Cipher) -> F64:
        """With the whole secret key: only for keys that one party owns."""
        raw, scale = self.raw(ct)
        return self.decode(self.ring.add_product(raw[0], raw[1], secret), scale)

    def raw(self, ct: Cipher) -> tuple[U64, float]:
        """Residues (2, k, N) in NTT form, to be changed at will, and the scale."""
        return ct.polys.copy(), ct.scale

    def cipher(self, raw: U64, scale: float) -> Cipher:
        return Cipher(raw, scale)

    def width(self, j: int) -> int:
        """Bytes of one residue of the j-th prime on the wire."""
        return (self.primes[j].bit_length() + 7) // 8

    def packed(self, k: int) -> int:
        """Bytes of k rows on the wire."""
        return self.params.degree * sum(self.width(j) for j in range(k))

    def pack(self, rows: Residues) -> bytes:
        from cloister.mpc.crypto.rns import kernels

        out, at = np.empty(self.packed(len(rows)), np.uint8), 0
        for j, row in enumerate(rows):
            size = self.params.degree * self.width(j)
            kernels.pack(row, self.width(j), out[at : at + size])
            at += size
        return out.tobytes()

    def unpack(self, data: bytes, k: int) -> Residues:
        """Rows back from the wire; wrong lengths and numbers that are not residues raise `WireError`."""
        from cloister.mpc.crypto.rns import kernels

        n = self.params.degree
        if not 1 <= k <= len(self.primes) or len(data) != self.packed(k):
            raise WireError(f"expected {k} residues per coefficient of degree {n}, found {len(data)} bytes")
        out, at = np.zeros((k, n, 8), np.uint8), 0
        for j in range(k):
            w = self.width(j)
            out[j, :, :w] = np.frombuffer(data, np.uint8, n * w, at).reshape(n, w)
            at += n * w
        rows = out.view("<u8").reshape(k, n).astype(np.uint64, copy=False)
        if kernels.largest(rows, self.ring.q):
            raise WireError("numbers that are not residues of the agreed primes")
        return rows

    # ---- keys --------------------------------------------------------------------------------------------------------

    def held(self, key: SwitchingKey) -> SwitchingKey:
        """That key, or an equal one that this process already has: they are public, and large."""
        digest = hashlib.sha256(struct.pack("<q", key.galois))
        for part in (key.b, key.a):
            digest.update(np.ascontiguousarray(part).data)
        return _HELD.setdefault(digest.digest(), key)

    # ---- evaluation --------------------------------------------------------------------------------------------------

    def dropped(self, k: int, count: int = 0) -> float:
        """The product of the primes that a rescaling from k primes divides by; `count` of them, or one level's."""
        return float(math.prod(self.primes[k - (count or self.params.per_level) : k]))

    def rescale(self, ct: Cipher, count: int = 0) -> Cipher:
        count = count or self.params.per_level
        return Cipher(self.bases.rescaled(ct.polys, count), ct.scale / self.dropped(ct.primes, count))

    def drop(self, ct: Cipher, k: int) -> Cipher:
        """Forget primes down to k, without dividing."""
        return Cipher(ct.polys[:, :k], ct.scale) if ct.primes > k else ct

    def multiply_plain(self, ct: Cipher, plain: Plain) -> Cipher:
        """Not rescaled."""
        polys = np.zeros_like(ct.polys)
        for out, p in zip(polys, ct.polys, strict=True):
            self.ring.add_product(out, p, plain.residues)
        return Cipher(polys, ct.scale * plain.scale)

    def times_plain(self, ct: Cipher, plain: Plain, count: int = 0) -> Cipher:
        return self.rescale(self.multiply_plain(ct, plain), count)

    def product(self, x: Cipher, y: Cipher, relin: SwitchingKey) -> Cipher:
        """Relinearised, not yet rescaled; at the fewer primes of the two."""
        k = min(x.primes, y.primes)
        made = self.bases.tensor(*(np.ascontiguousarray(ct.polys[:, :k]) for ct in (x, y)))
        out = self.bases.switched(self.bases.digits(made[2]), [relin])
        for part in (0, 1):
            self.ring.add(out[part], made[part])
        return Cipher(out, x.scale * y.scale)

    def times(self, x: Cipher, y: Cipher, relin: SwitchingKey, count: int = 0) -> Cipher:
        return self.rescale(self.product(x, y, relin), count)

    def square(self, x: Cipher, relin: SwitchingKey, count: int = 0) -> Cipher:
        return self.times(x, x, relin, count)

    def shift(self, ct: Cipher, bits: int) -> Cipher:
        """The same values at a scale 2^bits larger."""
        polys = np.zeros_like(ct.polys)
        for out, p in zip(polys, ct.polys, strict=True):
            for row in range(ct.primes):
                self.ring.add_multiple(out, p, 1 << bits, row)
        return Cipher(polys, ct.scale * 2.0**bits)

    def add(self, x: Cipher, y: Cipher) -> Cipher:
        """Both at the fewer primes; scales must agree to nine digits."""
        return self._joined(x, y, self.ring.add)

    def subtract(self, x: Cipher, y: Cipher) -> Cipher:
        return self._joined(x, y, self.ring.subtract)

    def _joined(self, x: Cipher, y: Cipher, into: Callable[[Residues, Residues], Residues]) -> Cipher:
        if abs(x.scale / y.scale - 1) > 1e-9:
            raise ParameterError("two ciphertexts of different scales cannot be added")
        k = min(x.primes, y.primes)
        polys = x.polys[:, :k].copy()
        for p, other in zip(polys, y.polys, strict=True):
            into(p, other)
        return Cipher(polys, x.scale)

    def add_plain(self, ct: Cipher, values: F64 | float) -> Cipher:
        """Add a vector, or one number to every slot."""
        polys = ct.polys.copy()
        self.ring.add(polys[0], self.encode(values, ct.primes, ct.scale).residues)
        return Cipher(polys, ct.scale)

    def rotate(self, ct: Cipher, steps: int, key: SwitchingKey) -> Cipher:
        """Slot s becomes what slot s + steps was; 0 steps stand for complex conjugation."""
        if key.galois != self.galois(steps):
            raise ParameterError(f"this key is not the one of a rotation by {steps} slots")
        return self._turned_sum(ct, [key])

    def add_rotations(self, ct: Cipher, keys: Sequence[SwitchingKey]) -> Cipher:
        """The ciphertext and all rotations of it that the keys are for: one decomposition, one division."""
        return self.add(ct, self._turned_sum(ct, keys))

    def _turned_sum(self, ct: Cipher, keys: Sequence[SwitchingKey]) -> Cipher:
        out = self.bases.switched(self.bases.digits(ct.polys[1]), keys)
        for key in keys:
            self.ring.add(out[0], self.bases.turned(ct.polys[0], key.galois))
        return Cipher(out, ct.scale)

    def galois(self, steps: int) -> int:
        """The automorphism behind a rotation by `steps` slots; 0 stands for complex conjugation."""
        if steps == 0:
            return 2 * self.params.degree - 1
        return pow(3, steps % self.params.slots, 2 * self.params.degree)


def _shift_of(scale: float) -> int:
    """By how many bits a plaintext of that scale is shifted after encoding: encoders hold coefficients of 2^192."""
    return 96 if scale > 2.0**150 else 0


_HELD: weakref.WeakValueDictionary[bytes, SwitchingKey] = weakref.WeakValueDictionary()


@functools.lru_cache(maxsize=4)
def context(params: Parameters) -> Context:
    return Context(params)


def common(params: Parameters, seed: bytes, label: str, k: int) -> Residues:
    """The common random polynomial of that label: uniform, public, the same at all parties."""
    key = hashlib.sha256(b"cloister/ckks/common/" + label.encode() + b"/" + seed).digest()
    return context(params).ring.uniform(Prg(key), k)


def own_key(params: Parameters, entropy: Entropy) -> tuple[Secret, PublicKey]:
    """A key pair of a single party, for a querier."""
    secret = Secret.draw(params, entropy)
    r = context(params).ring
    a = common(params, entropy.bytes(32), "own", params.top)
    b = r.error(entropy.prg(), params.top)
    return secret, PublicKey(r.add_product(b, a, secret.ntt, sign=-1), a)


__all__ = [
    "HIDING_BITS", "Cipher", "Context", "Parameters", "Plain", "PublicKey", "Secret", "SwitchingKey", "base_bits",
    "choose", "common", "context", "encryption_noise", "flood_bits", "own_key", "rounding_noise",
]  # fmt: skip
