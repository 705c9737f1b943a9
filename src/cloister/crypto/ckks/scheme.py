"""CKKS on Microsoft SEAL: real vectors under encryption, with the raw residues that collective protocols need.

SEAL evaluates (products, relinearisation, rotations, rescaling); keys, encryption and decryption shares are made here
on residues, from `Entropy`, so that nobody needs a key that nobody may have.

A ciphertext is at *k primes* of the L data primes that `Parameters` lays out (`ckks_chain`).
"""

from __future__ import annotations

import functools
import hashlib
import math
import struct
import weakref
from dataclasses import dataclass
from typing import Any, TypeAlias, final

import numpy as np

from cloister.arrays import F64, I64, U64
from cloister.crypto.ckks.chain import (
    HIDING_BITS,
    Parameters,
    base_bits,
    choose,
    encryption_noise,
    flood_bits,
    rounding_noise,
)
from cloister.crypto.entropy import Entropy, check_entropy
from cloister.crypto.lattice import slots
from cloister.crypto.lattice.ring import Residues, Ring, ring
from cloister.crypto.prg import Prg
from cloister.errors import MissingExtra, ParameterError, WireError

Cipher: TypeAlias = Any  # seal.Ciphertext
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
            raise WireError("bytes that are no secret of this ring")
        return cls(params, np.frombuffer(raw, np.uint8).astype(np.int64) - 1)


@dataclass(frozen=True, eq=False)
class PublicKey:
    """(b, a) with b = -a·s + e, over all data primes, NTT form."""

    b: Residues
    a: Residues


@dataclass(frozen=True, eq=False)
class SwitchingKey:
    """Per data prime one pair (b_d, a_d) over all primes: what relinearisation and rotation need."""

    b: U64  # (L, K, N)
    a: U64  # (L, K, N)
    galois: int = 0  # the automorphism X → X^galois; 0 for relinearisation


@final
class Context:
    """SEAL and residues for one set of parameters. Use `context(params)`, which keeps them."""

    def __init__(self, params: Parameters) -> None:
        try:
            import seal
        except ImportError:
            raise MissingExtra("seal-python", "he") from None
        self.params, self.seal = params, seal
        p = seal.EncryptionParameters(seal.scheme_type.ckks)
        p.set_poly_modulus_degree(params.degree)
        p.set_coeff_modulus(seal.CoeffModulus.Create(params.degree, list(params.bits)))
        self.seal_context = seal.SEALContext(p, expand_mod_chain=True, sec_level=seal.sec_level_type.tc128)
        if not self.seal_context.parameters_set():
            raise ParameterError(f"SEAL refuses these parameters: {self.seal_context.parameter_error_message()}")
        moduli = self.seal_context.key_context_data().parms().coeff_modulus()
        self.primes = tuple(int(m.value()) for m in moduli)
        self.ring: Ring = ring(params.degree, self.primes)
        self.encoder = seal.CKKSEncoder(self.seal_context)
        self.evaluator = seal.Evaluator(self.seal_context)
        self._templates()

    def _templates(self) -> None:
        """Headers of SEAL's serialised objects, from a key pair that is thrown away."""
        seal, n = self.seal, self.params.degree
        maker = seal.KeyGenerator(self.seal_context)
        public = maker.create_public_key()
        blob = public.to_string()
        K = len(self.primes)
        self._key_head = blob[: len(blob) - 2 * K * n * 8]
        self._heads: dict[int, bytes] = {}
        zero = seal.Encryptor(self.seal_context, public).encrypt_zero()
        while True:
            k = zero.coeff_modulus_size()
            blob = zero.to_string()
            self._heads[k] = blob[: len(blob) - 2 * k * n * 8]
            if k == 1:
                break
            zero = self.evaluator.mod_switch_to_next(zero)
        keys = maker.create_relin_keys().to_string()
        self._keys_head = keys[:48]  # SEAL header and parms id

    @property
    def readable(self) -> int:
        """The most primes whose product is an integer of `slots.WIDEST` bits."""
        return max(k for k in range(1, len(self.primes) + 1) if math.prod(self.primes[:k]).bit_length() <= slots.WIDEST)

    # ---- encoding ----------------------------------------------------------------------------------------------------

    def encode(self, values: F64 | float, k: int, scale: float) -> Any:
        """A plaintext at k primes: a vector, or one number in every slot."""
        if isinstance(values, float):
            plain = self.encoder.encode(values, scale)
        else:
            plain = self.encoder.encode(np.ascontiguousarray(values, np.float64), scale)
        for _ in range(self.params.top - k):
            plain = self.evaluator.mod_switch_to_next(plain)
        return plain

    def plain_residues(self, values: F64, k: int, scale: float) -> Residues:
        """The plaintext polynomial in NTT form."""
        blob = self.encode(values, k, scale).to_bytes()
        return np.frombuffer(blob[-k * self.params.degree * 8 :], np.uint64).reshape(k, -1).copy()

    def exact_residues(self, values: F64, k: int, scale: float) -> Residues:
        """The plaintext polynomial of values on the grid of 2^-GRID, in integers: the same on every machine."""
        return slots.encode_exact(self.ring, np.rint(np.ldexp(values, GRID)).astype(np.int64), scale / 2.0**GRID, k)

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
        polys = self._zero(key, k, entropy.prg())
        self.ring.add(polys[0], self.plain_residues(values, k, scale))
        return self.cipher(polys, scale)

    def encrypt_public(self, key: PublicKey, values: F64, k: int, scale: float) -> Cipher:
        """(b + m, a): values that everybody knows, in a ciphertext that everybody makes alike. It hides nothing."""
        polys = np.stack([key.b[:k], key.a[:k]])
        self.ring.add(polys[0], self.exact_residues(values, k, scale))
        return self.cipher(polys, scale)

    def rerandomise(self, key: PublicKey, ct: Cipher, entropy: Entropy) -> Cipher:
        """The same slots plus a fresh encryption of zero: what went into `ct` no longer shows in its polynomials.

        Evaluation is deterministic. Who knows the inputs of a circuit but for some plain factors could try values for
        these until the same ciphertext comes out.
        """
        check_entropy(entropy)
        zero = self._zero(key, ct.coeff_modulus_size(), entropy.prg())
        return self.evaluator.add(ct, self.cipher(zero, float(ct.scale())))

    def _zero(self, key: PublicKey, k: int, prg: Prg) -> U64:
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
        """Residues (2, k, N) in NTT form, and the scale."""
        k, size = ct.coeff_modulus_size(), ct.size()
        blob = ct.to_string()
        data = np.frombuffer(blob, np.uint64, offset=len(blob) - size * k * self.params.degree * 8)
        return data.reshape(size, k, self.params.degree).copy(), float(ct.scale())

    def cipher(self, raw: U64, scale: float) -> Cipher:
        """A SEAL ciphertext from residues (2, k, N)."""
        ct = self.seal_context.from_cipher_str(self._heads[raw.shape[1]] + raw.tobytes())
        ct.scale(scale)
        return ct

    def width(self, j: int) -> int:
        """Bytes of one residue of the j-th prime on the wire."""
        return (self.primes[j].bit_length() + 7) // 8

    def packed(self, k: int) -> int:
        """Bytes of k rows on the wire."""
        return self.params.degree * sum(self.width(j) for j in range(k))

    def pack(self, rows: Residues) -> bytes:
        parts = []
        for j, row in enumerate(rows):
            octets = np.ascontiguousarray(row, "<u8").view(np.uint8).reshape(-1, 8)
            parts.append(octets[:, : self.width(j)].tobytes())
        return b"".join(parts)

    def unpack(self, data: bytes, k: int) -> Residues:
        """Rows back from the wire; wrong lengths and numbers that are no residues raise `WireError`."""
        from cloister.crypto.lattice import kernels

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
            raise WireError("numbers that are no residues of the agreed primes")
        return rows

    # ---- keys --------------------------------------------------------------------------------------------------------

    def load_key(self, key: SwitchingKey) -> Any:
        """The key as SEAL's `RelinKeys` or `GaloisKeys`. Equal keys of a process are held once: they are public."""
        digest = hashlib.sha256(struct.pack("<q", key.galois))
        for part in (key.b, key.a):
            digest.update(np.ascontiguousarray(part).data)
        name = digest.digest()
        held = _LOADED.get(name)
        if held is None:
            held = _Loaded(self._load(key))
            _LOADED[name] = held
        return held

    def _load(self, key: SwitchingKey) -> Any:
        pairs = [self._key_head + key.b[d].tobytes() + key.a[d].tobytes() for d in range(self.params.top)]
        index = (key.galois - 1) // 2 if key.galois else 0
        count = self.params.degree if key.galois else 1
        body = b"".join(
            [
                self._keys_head[16:],
                struct.pack("<Q", count),
                bytes(8 * index),
                struct.pack("<Q", len(pairs)),
                *pairs,
                bytes(8 * (count - index - 1)),
            ]
        )
        head = self._keys_head[:8] + struct.pack("<Q", 16 + len(body))
        load = self.seal_context.from_galois_str if key.galois else self.seal_context.from_relin_str
        return load(head + body)

    # ---- evaluation --------------------------------------------------------------------------------------------------

    def dropped(self, k: int, count: int = 0) -> float:
        """The product of the primes that a rescaling from k primes divides by; `count` of them, or one level's."""
        return float(math.prod(self.primes[k - (count or self.params.per_level) : k]))

    def rescale(self, ct: Cipher, count: int = 0) -> Cipher:
        for _ in range(count or self.params.per_level):
            ct = self.evaluator.rescale_to_next(ct)
        return ct

    def drop(self, ct: Cipher, k: int) -> Cipher:
        """Forget primes down to k, without dividing."""
        while ct.coeff_modulus_size() > k:
            ct = self.evaluator.mod_switch_to_next(ct)
        return ct

    def times_plain(self, ct: Cipher, plain: Any, count: int = 0) -> Cipher:
        return self.rescale(self.evaluator.multiply_plain(ct, plain), count)

    def product(self, x: Cipher, y: Cipher, relin: Any) -> Cipher:
        """Relinearised, not yet rescaled; at the fewer primes of the two."""
        k = min(x.coeff_modulus_size(), y.coeff_modulus_size())
        return self.evaluator.relinearize(self.evaluator.multiply(self.drop(x, k), self.drop(y, k)), relin.key)

    def times(self, x: Cipher, y: Cipher, relin: Any, count: int = 0) -> Cipher:
        return self.rescale(self.product(x, y, relin), count)

    def square(self, x: Cipher, relin: Any, count: int = 0) -> Cipher:
        return self.rescale(self.evaluator.relinearize(self.evaluator.square(x), relin.key), count)

    def shift(self, ct: Cipher, bits: int) -> Cipher:
        """The same values at a scale 2^bits larger."""
        k, one = ct.coeff_modulus_size(), self.encoder.encode(1 << bits)
        for _ in range(self.params.top - k):
            one = self.evaluator.mod_switch_to_next(one)
        moved = self.evaluator.multiply_plain(ct, one)
        moved.scale(ct.scale() * 2.0**bits)
        return moved

    def add(self, x: Cipher, y: Cipher) -> Cipher:
        """Both at the fewer primes; scales must agree to nine digits."""
        if abs(x.scale() / y.scale() - 1) > 1e-9:
            raise ParameterError("two ciphertexts of different scales cannot be added")
        k = min(x.coeff_modulus_size(), y.coeff_modulus_size())
        x, y = self.drop(x, k), self.drop(y, k)
        y = self.evaluator.mod_switch_to(y, y.parms_id())  # a copy: the scale is set on it
        y.scale(x.scale())
        return self.evaluator.add(x, y)

    def add_plain(self, ct: Cipher, values: F64 | float) -> Cipher:
        """Add a vector, or one number to every slot."""
        return self.evaluator.add_plain(ct, self.encode(values, ct.coeff_modulus_size(), ct.scale()))

    def rotate(self, ct: Cipher, steps: int, key: Any) -> Cipher:
        """Slot s becomes what slot s + steps was."""
        return self.evaluator.rotate_vector(ct, steps, key.key)

    def galois(self, steps: int) -> int:
        """The automorphism behind a rotation by `steps` slots; 0 stands for complex conjugation."""
        if steps == 0:
            return 2 * self.params.degree - 1
        return pow(3, steps % self.params.slots, 2 * self.params.degree)


class _Loaded:
    """Holds a SEAL key, so that it can be referred to weakly."""

    __slots__ = ("__weakref__", "key")

    def __init__(self, key: Any) -> None:
        self.key = key


_LOADED: weakref.WeakValueDictionary[bytes, _Loaded] = weakref.WeakValueDictionary()


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
    "HIDING_BITS", "Cipher", "Context", "Parameters", "PublicKey", "Secret", "SwitchingKey", "base_bits", "choose",
    "common", "context", "encryption_noise", "flood_bits", "own_key", "rounding_noise",
]  # fmt: skip
