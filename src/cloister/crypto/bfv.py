"""BFV on Microsoft SEAL: packed integers modulo t, exact, with a public key of their owner.

    key = Key(params)                        the owner's; never leaves it
    ct = encrypt(params, key.public, xs)     one ciphertext holds `params.slots` integers modulo t
    ct = weighted_sum(params, cts, weights)  slot by slot, weights are plain integers or vectors
    ct = hide(params, public, ct, entropy)   before it goes back to the owner
    xs = key.decrypt(ct)

Ciphertexts and public keys are `bytes`, checked whenever they are read. What goes back to the owner of the key must
pass through `hide`: the owner knows its own randomness, and the noise of an untouched result tells it the weights.
`hide` adds a fresh encryption of zero, and uniform noise 2^40 times wider than the noise that the result may carry.

Parameters are refused below 128-bit security (`lattice.SECURE_BITS`). SEAL draws keys and noise from the operating
system.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import numpy.typing as npt

from cloister.crypto.entropy import Entropy, check_entropy
from cloister.crypto.lattice import check_secure
from cloister.crypto.prg import I64
from cloister.errors import MissingExtra, ParameterError, WireError

FLOOD_BITS = 40


@dataclass(frozen=True, slots=True)
class Params:
    """Public parameters.

    Parameters
    ----------
    degree
        N, also the number of slots.
    plain_bits
        Bits of t: results are exact modulo t, and signed in (-t/2, t/2).
    terms
        How many products a sum may have: what the noise has to leave room for, besides the flooding.
    """

    degree: int = 8192
    plain_bits: int = 20
    terms: int = 4096

    def __post_init__(self) -> None:
        check_secure(self.degree, self.modulus_bits)
        if not 14 <= self.plain_bits <= 40 or 1 << self.plain_bits <= 2 * self.degree:
            raise ParameterError(f"plain_bits must lie in 15 ... 40 and exceed log2 of 2N, got {self.plain_bits}")

    @property
    def slots(self) -> int:
        return self.degree

    @property
    def noise_bits(self) -> int:
        """Of a weighted sum of fresh ciphertexts: |e| < 2^12 each, times a polynomial with coefficients below t/2.

        N terms of random sign add up to less than 8 √N.
        """
        return 12 + self.plain_bits - 1 + (self.degree.bit_length() - 1) // 2 + 3 + (self.terms - 1).bit_length()

    @property
    def modulus_bits(self) -> int:
        return sum(self.primes)

    @property
    def primes(self) -> tuple[int, ...]:
        """Data primes hold t times the flooded noise; the last is SEAL's special prime, unused and small."""
        need = self.plain_bits + self.noise_bits + FLOOD_BITS + 4
        count = -(-need // 58)
        each = max(30, -(-need // count))
        return (each,) * count + (each,)


@functools.lru_cache(maxsize=8)
def _engine(params: Params) -> tuple[Any, Any, Any, Any]:
    try:
        import seal
    except ImportError:
        raise MissingExtra("seal-python", "he") from None
    p = seal.EncryptionParameters(seal.scheme_type.bfv)
    p.set_poly_modulus_degree(params.degree)
    p.set_coeff_modulus(seal.CoeffModulus.Create(params.degree, list(params.primes)))
    p.set_plain_modulus(seal.PlainModulus.Batching(params.degree, params.plain_bits))
    context = seal.SEALContext(p, expand_mod_chain=True, sec_level=seal.sec_level_type.tc128)
    if not context.parameters_set():
        raise ParameterError(f"SEAL refuses these parameters: {context.parameter_error_message()}")
    return seal, context, seal.BatchEncoder(context), seal.Evaluator(context)


def modulus(params: Params) -> int:
    """The plain modulus t."""
    _, context, _, _ = _engine(params)
    return int(context.first_context_data().parms().plain_modulus().value())


@final
class Key:
    """A secret key and its public one."""

    __slots__ = ("_decryptor", "_params", "public")

    def __init__(self, params: Params) -> None:
        seal, context, _, _ = _engine(params)
        maker = seal.KeyGenerator(context)
        self._params, self._decryptor = params, seal.Decryptor(context, maker.secret_key())
        self.public: bytes = maker.create_public_key().to_string()

    def __repr__(self) -> str:
        return "Key(...)"

    def decrypt(self, ct: bytes) -> I64:
        """The slots, signed. Refuses a ciphertext whose noise has used up the room."""
        _, _, encoder, _ = _engine(self._params)
        loaded = load(self._params, ct)
        if self._decryptor.invariant_noise_budget(loaded) <= 0:
            raise WireError("a ciphertext without noise budget left; it does not hold what was computed")
        found = np.asarray(encoder.decode(self._decryptor.decrypt(loaded)), np.int64)
        return found


def load(params: Params, ct: bytes) -> Any:
    """A SEAL ciphertext from bytes, checked against the parameters; anything else raises `WireError`."""
    _, context, _, _ = _engine(params)
    try:
        found = context.from_cipher_str(ct)
    except (RuntimeError, ValueError, IndexError):
        raise WireError("bytes that are no ciphertext under the agreed parameters") from None
    if found.size() != 2 or found.is_ntt_form() or found.is_transparent():
        raise WireError("expected a ciphertext of two polynomials that hides something")
    return found


def load_public(params: Params, public: bytes) -> Any:
    _, context, _, _ = _engine(params)
    try:
        return context.from_public_str(public)
    except (RuntimeError, ValueError, IndexError):
        raise WireError("bytes that are no public key under the agreed parameters") from None


def _plain(params: Params, xs: npt.NDArray[Any]) -> Any:
    _, _, encoder, _ = _engine(params)
    v = np.asarray(xs)
    if v.dtype.kind not in "iu" or v.ndim != 1 or len(v) > params.slots:
        raise ParameterError(f"expected at most {params.slots} integers, found {v.dtype} of shape {v.shape}")
    half = modulus(params) // 2
    if len(v) and max(abs(int(v.min())), abs(int(v.max()))) > half:
        raise ParameterError(f"an integer beyond ±{half} does not fit into {params.plain_bits} bits")
    full = np.zeros(params.slots, np.int64)
    full[: len(v)] = v
    return encoder.encode(full)


def encrypt(params: Params, public: bytes, xs: npt.NDArray[Any]) -> bytes:
    """At most `slots` signed integers; the rest are zero."""
    seal, context, _, _ = _engine(params)
    made: bytes = seal.Encryptor(context, load_public(params, public)).encrypt(_plain(params, xs)).to_string()
    return made


def add(params: Params, cts: Sequence[bytes]) -> bytes:
    _, _, _, evaluator = _engine(params)
    total = load(params, cts[0])
    for ct in cts[1:]:
        evaluator.add_inplace(total, load(params, ct))
    made: bytes = total.to_string()
    return made


def add_plain(params: Params, ct: bytes, xs: npt.NDArray[Any]) -> bytes:
    _, _, _, evaluator = _engine(params)
    made: bytes = evaluator.add_plain(load(params, ct), _plain(params, xs)).to_string()
    return made


def weighted_sum(params: Params, cts: Sequence[bytes], weights: Sequence[npt.NDArray[Any] | int]) -> bytes | None:
    """Σ weight · ct, slot by slot; `None` if every weight is zero, since that would hide nothing."""
    _, _, _, evaluator = _engine(params)
    if len(cts) > params.terms:
        raise ParameterError(f"a sum of {len(cts)} products, where {params.terms} were agreed: the noise would show")
    total = None
    for ct, w in zip(cts, weights, strict=True):
        vector = np.full(params.slots, w, np.int64) if isinstance(w, int | np.integer) else np.asarray(w)
        if not vector.any():
            continue
        term = evaluator.multiply_plain(load(params, ct), _plain(params, vector))
        total = term if total is None else evaluator.add(total, term)
    return None if total is None else total.to_string()


def hide(params: Params, public: bytes, ct: bytes | None, entropy: Entropy) -> bytes:
    """The same plaintext, re-encrypted and flooded: it tells the key's owner the slots, and nothing else."""
    check_entropy(entropy)
    seal, context, _, evaluator = _engine(params)
    fresh = seal.Encryptor(context, load_public(params, public)).encrypt_zero()
    if ct is not None:
        fresh = evaluator.add(load(params, ct), fresh)
    blob = bytearray(fresh.to_string())
    k, n = len(params.primes) - 1, params.degree
    primes = [m.value() for m in context.first_context_data().parms().coeff_modulus()]
    body = np.frombuffer(blob, np.uint64, count=k * n, offset=len(blob) - 2 * k * n * 8).reshape(k, n)
    signs, noise = _wide(params, entropy)
    for j, q in enumerate(primes):  # coefficient form: the noise is added to every residue of c0
        residue = np.zeros(n, np.uint64)
        for limb in noise:  # highest first
            residue = _times(residue, 1 << 30, q)
            residue = (residue + limb % np.uint64(q)) % np.uint64(q)
        residue = np.where(signs & (residue > 0), np.uint64(q) - residue, residue)
        body[j] = (body[j] + residue) % np.uint64(q)
    made: bytes = context.from_cipher_str(bytes(blob)).to_string()
    return made


def _wide(params: Params, entropy: Entropy) -> tuple[npt.NDArray[np.bool_], list[npt.NDArray[np.uint64]]]:
    """Uniform in ±2^(noise + 40) as sign and limbs of 30 bits, highest first."""
    prg = entropy.prg()
    bits = params.noise_bits + FLOOD_BITS
    sizes = [30] * (bits // 30) + ([bits % 30] if bits % 30 else [])
    return prg.bits(params.degree) == 1, [prg.below(1 << b, params.degree) for b in reversed(sizes)]


def _times(a: npt.NDArray[np.uint64], factor: int, q: int) -> npt.NDArray[np.uint64]:
    """Product a · factor mod q for q below 2^60 and a factor of 30 bits, three bits at a time."""
    out, step = a, 3
    left = factor.bit_length() - 1
    while left > 0:
        take = min(step, left)
        out = (out << np.uint64(take)) % np.uint64(q)
        left -= take
    return out
