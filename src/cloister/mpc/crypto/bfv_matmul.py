"""Matrix products with one factor encrypted: BFV on Microsoft SEAL, packed into coefficients.

    key = Key(scheme)                              the owner's; never leaves it
    cts = encrypt(plan, key.public, Y)             Y (m, c), under the owner's key
    out, r = multiply(key.public, [Term(plan, cts, S), …], entropy)     S (rows, m), plain, at another party
    key.decrypt(plan, out)  =  Σ S Y + r mod 2^plain_bits    r = 0, or uniform with `mask=True`

A polynomial takes G rows of Y, and one of S takes R rows times G columns, with N ≥ G R c:

    y(X) = Σ Y[i, a] X^(i R c + a)      s(X) = Σ S[j, i] X^(j c - i R c)      (s y)(X) = … + (S Y)[j, a] X^(j c + a) + …

Terms with different i fall on other multiples of R c, never on these. So no rotation and no switching key is needed,
and a product of m inner terms takes m/G ciphertexts in and rows/R out. The plain modulus is a power of two, so that
r makes the result a share modulo 2^plain_bits.

What goes back to the owner is re-randomised (a fresh encryption of zero), its noise covered by noise 2^40 times as wide
as it may be, and every coefficient that is no result masked uniformly: the owner learns S Y + r, and nothing else of S.

References
----------
[FV12] Fan, Vercauteren, 2012.  [HLHD22] Huang et al., Cheetah, USENIX Security 2022: products in coefficients.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from cloister.arrays import I64, U64, Array, Index
from cloister.errors import MissingExtra, ParameterError, WireError
from cloister.mpc.crypto.entropy import Entropy, check_entropy
from cloister.mpc.crypto.rns.ring import SECURE_BITS

FLOOD_BITS = 40
FRESH_BITS = 12  # of the noise of a fresh encryption
_LIMB = 20


@dataclass(frozen=True, slots=True)
class Scheme:
    """Public parameters, the smallest ring that carries them at 128-bit security.

    Parameters
    ----------
    plain_bits
        Results are exact modulo 2^plain_bits.
    weight_bits
        Σ|S[j, i]| over the R rows and all terms of one result stays below 2^weight_bits: how much the noise may grow.
    """

    plain_bits: int
    weight_bits: int

    def __post_init__(self) -> None:
        if not 2 <= self.plain_bits <= 50 or not 0 <= self.weight_bits <= 60:
            raise ParameterError("a product of encrypted numbers that large is not offered")
        if self.degree == 0:
            raise ParameterError("no ring with 128-bit security carries these numbers")

    @property
    def noise_bits(self) -> int:
        return FRESH_BITS + self.weight_bits

    @property
    def _data_bits(self) -> int:
        return self.plain_bits + self.noise_bits + FLOOD_BITS + 2

    def _primes_at(self, degree: int) -> tuple[int, ...]:
        """Data primes of at most 44 bits, so that a limb times a residue fits a word; last SEAL's special prime."""
        count = -(-self._data_bits // 44)
        each = max(-(-self._data_bits // count), degree.bit_length() + 6)
        return (*(each,) * count, 27)

    @property
    def degree(self) -> int:
        fits = [n for n in (4096, 8192, 16384) if sum(self._primes_at(n)) <= SECURE_BITS[n]]
        return fits[0] if fits else 0

    @property
    def primes(self) -> tuple[int, ...]:
        return self._primes_at(self.degree)

    @property
    def ciphertext_bytes(self) -> int:
        return 2 * self.degree * (len(self.primes) - 1) * 8


@dataclass(frozen=True, slots=True)
class Plan:
    """How a product of (rows, inner) by (inner, columns) is cut into polynomials.

    `cut` fixes R, so that products of different inner length can be added up; 0 chooses it.
    """

    scheme: Scheme
    rows: int
    inner: int
    columns: int
    cut: int = 0

    @property
    def width(self) -> int:
        """Columns of Y in one polynomial."""
        return min(self.columns, self.scheme.degree)

    @property
    def cuts(self) -> tuple[int, int]:
        """(G, R): inner terms and rows of one polynomial, so that fewest ciphertexts travel."""
        room = self.scheme.degree // self.width
        if self.cut:
            return max(1, min(room // self.cut, self.inner)), self.cut
        best = (float("inf"), 1, 1)
        for rows in range(1, min(room, self.rows) + 1):
            inner = min(room // rows, self.inner)
            best = min(best, (-(-self.inner // inner) + -(-self.rows // rows), inner, rows))
        return best[1], best[2]

    @property
    def sent(self) -> int:
        """Ciphertexts of the encrypted factor."""
        return -(-self.columns // self.width) * -(-self.inner // self.cuts[0])

    @property
    def returned(self) -> int:
        return -(-self.columns // self.width) * -(-self.rows // self.cuts[1])

    def column_blocks(self) -> list[slice]:
        return [slice(a, min(a + self.width, self.columns)) for a in range(0, self.columns, self.width)]

    def inner_blocks(self) -> list[slice]:
        return [slice(a, min(a + self.cuts[0], self.inner)) for a in range(0, self.inner, self.cuts[0])]

    def row_blocks(self) -> list[slice]:
        return [slice(a, min(a + self.cuts[1], self.rows)) for a in range(0, self.rows, self.cuts[1])]


@functools.lru_cache(maxsize=8)
def _engine(scheme: Scheme) -> tuple[Any, Any, Any]:
    try:
        import seal
    except ImportError:
        raise MissingExtra("seal-python", "he") from None
    p = seal.EncryptionParameters(seal.scheme_type.bfv)
    p.set_poly_modulus_degree(scheme.degree)
    p.set_coeff_modulus(seal.CoeffModulus.Create(scheme.degree, list(scheme.primes)))
    p.set_plain_modulus(1 << scheme.plain_bits)
    context = seal.SEALContext(p, expand_mod_chain=True, sec_level=seal.sec_level_type.tc128)
    if not context.parameters_set():
        raise ParameterError(f"SEAL refuses these parameters: {context.parameter_error_message()}")
    return seal, context, seal.Evaluator(context)


def _polynomial(scheme: Scheme, coefficients: U64) -> Any:
    """A SEAL plaintext with these coefficients modulo 2^plain_bits."""
    seal, context, _ = _engine(scheme)
    n = scheme.degree
    blob = bytearray(seal.Plaintext(n).to_bytes())
    np.frombuffer(blob, np.uint64, count=n, offset=len(blob) - 8 * n)[:] = coefficients & np.uint64(
        (1 << scheme.plain_bits) - 1
    )
    return context.from_plain_str(bytes(blob))


def _coefficients(scheme: Scheme, plain: Any) -> U64:
    count = plain.coeff_count()
    blob = plain.to_bytes()
    out = np.zeros(scheme.degree, np.uint64)
    if count:
        out[:count] = np.frombuffer(blob, np.uint64, count=count, offset=len(blob) - 8 * count)
    return out


def load(scheme: Scheme, ct: bytes) -> Any:
    """A SEAL ciphertext from bytes, checked against the scheme; anything else raises `WireError`."""
    _, context, _ = _engine(scheme)
    try:
        cipher = context.from_cipher_str(ct)
    except (RuntimeError, ValueError, IndexError):
        raise WireError("bytes that are not a ciphertext under the agreed parameters") from None
    if cipher.size() != 2 or cipher.is_ntt_form() or cipher.is_transparent():
        raise WireError("expected a ciphertext of two polynomials that hides something")
    return cipher


def _encryptor(scheme: Scheme, public: bytes) -> Any:
    seal, context, _ = _engine(scheme)
    try:
        return seal.Encryptor(context, context.from_public_str(public))
    except (RuntimeError, ValueError, IndexError):
        raise WireError("bytes that are not a public key under the agreed parameters") from None


@final
class Key:
    """A secret key and its public one."""

    __slots__ = ("_decryptor", "_scheme", "public")

    def __init__(self, scheme: Scheme) -> None:
        seal, context, _ = _engine(scheme)
        maker = seal.KeyGenerator(context)
        self._scheme, self._decryptor = scheme, seal.Decryptor(context, maker.secret_key())
        self.public: bytes = maker.create_public_key().to_string()

    def __repr__(self) -> str:
        return "Key(...)"

    def decrypt(self, plan: Plan, cts: Sequence[bytes]) -> U64:
        """The product (rows, columns) modulo 2^plain_bits."""
        check_count(cts, plan.returned)
        out = np.empty((plan.rows, plan.columns), np.uint64)
        at = iter(cts)
        for columns in plan.column_blocks():
            for rows in plan.row_blocks():
                loaded = load(self._scheme, next(at))
                if self._decryptor.invariant_noise_budget(loaded) <= 0:
                    raise WireError("a ciphertext without noise budget left; it does not hold what was computed")
                values = _coefficients(self._scheme, self._decryptor.decrypt(loaded))
                out[rows, columns] = values[_places(plan, rows, columns)]
        return out


def check_count(cts: Sequence[bytes], wanted: int) -> None:
    if len(cts) != wanted:
        raise WireError(f"expected {wanted} ciphertexts, found {len(cts)}")


def _places(plan: Plan, rows: slice, columns: slice) -> Index:
    """Where the results of a block lie: j c + a."""
    j, a = np.arange(rows.stop - rows.start), np.arange(columns.stop - columns.start)
    return j[:, None] * plan.width + a[None, :]


def encrypt(plan: Plan, public: bytes, y: Array) -> list[bytes]:
    """Encrypt Y (inner, columns), small integers of either sign, under somebody's public key."""
    if y.shape != (plan.inner, plan.columns) or y.dtype.kind not in "iu":
        raise ParameterError(f"expected integers of shape {(plan.inner, plan.columns)}, found {y.dtype} of {y.shape}")
    encryptor = _encryptor(plan.scheme, public)
    stride = plan.cuts[1] * plan.width
    out: list[bytes] = []
    for columns in plan.column_blocks():
        for inner in plan.inner_blocks():
            part = y[inner, columns].astype(np.int64).view(np.uint64)
            poly = np.zeros(plan.scheme.degree, np.uint64)
            i, a = np.arange(part.shape[0]), np.arange(part.shape[1])
            poly[i[:, None] * stride + a[None, :]] = part
            out.append(encryptor.encrypt(_polynomial(plan.scheme, poly)).to_string())
    return out


def _factor(plan: Plan, s: Array) -> U64 | None:
    """Coefficients of s(X) for one block of S, (rows, inner); X^-e is -X^(N - e). None if all are zero."""
    if not s.any():
        return None
    n, c, stride = plan.scheme.degree, plan.width, plan.cuts[1] * plan.width
    j, i = np.arange(s.shape[0]), np.arange(s.shape[1])
    e = j[:, None] * c - i[None, :] * stride
    poly = np.zeros(n, np.uint64)
    values = s.astype(np.int64)
    poly[e % n] = np.where(e < 0, -values, values).view(np.uint64)
    return poly


@dataclass(frozen=True, slots=True)
class Term:
    """One product of a sum: the encrypted factor as it came, and the plain one."""

    plan: Plan
    cts: Sequence[bytes]
    s: Array  # (rows, inner)


def multiply(public: bytes, terms: Sequence[Term], entropy: Entropy, *, mask: bool = False) -> tuple[list[bytes], U64]:
    """Σ S Y + r, to go back to the owner of the key, and r (rows, columns), which is zero without `mask`.

    All terms have the same rows, columns and cut.
    """
    check_entropy(entropy)
    first = terms[0].plan
    for t in terms:
        check_count(t.cts, t.plan.sent)
        if t.s.shape != (t.plan.rows, t.plan.inner):
            raise ParameterError(f"expected a factor of shape {(t.plan.rows, t.plan.inner)}, found {t.s.shape}")
        if (t.plan.scheme, t.plan.row_blocks(), t.plan.columns) != (first.scheme, first.row_blocks(), first.columns):
            raise ParameterError("only products that are cut alike can be added up")
    scheme = first.scheme
    _, _, evaluator = _engine(scheme)
    encryptor = _encryptor(scheme, public)
    check_weight(terms)
    prg = entropy.prg()
    r = np.zeros((first.rows, first.columns), np.uint64)
    modulo = np.uint64((1 << scheme.plain_bits) - 1)
    out: list[bytes] = []
    for b, columns in enumerate(first.column_blocks()):
        factors = []
        for t in terms:
            inner = t.plan.inner_blocks()
            for ct, cut in zip(t.cts[b * len(inner) : (b + 1) * len(inner)], inner, strict=True):
                factors.append((evaluator.transform_to_ntt(load(scheme, ct)), t, cut))
        for rows in first.row_blocks():
            total = None
            for ct_ntt, t, cut in factors:
                factor = _factor(t.plan, t.s[rows, cut])
                if factor is None:
                    continue
                plain = evaluator.transform_to_ntt(_polynomial(scheme, factor), ct_ntt.parms_id())
                term = evaluator.multiply_plain(ct_ntt, plain)
                total = term if total is None else evaluator.add(total, term)
            noise = prg.uint64(scheme.degree) & modulo
            places = _places(first, rows, columns)
            if mask:
                r[rows, columns] = noise[places]
            else:
                noise[places] = 0
            if total is not None:
                evaluator.transform_from_ntt_inplace(total)
            out.append(_hide(scheme, encryptor, total, noise, entropy))
    return out, r


def check_weight(terms: Sequence[Term]) -> None:
    """Raise unless the noise of every result stays where the flooding covers it."""
    plan = terms[0].plan
    rows = np.zeros(plan.rows, np.int64)
    for t in terms:
        rows += np.abs(t.s.astype(np.int64)).sum(axis=1)
    heaviest = max(int(rows[cut].sum()) for cut in plan.row_blocks())
    if heaviest >= 1 << plan.scheme.weight_bits:
        raise ParameterError(f"weights beyond 2^{plan.scheme.weight_bits}, where less was agreed: the noise would show")


def flood_bits(scheme: Scheme) -> int:
    """Of the noise that is added."""
    return scheme.noise_bits + FLOOD_BITS


def _hide(scheme: Scheme, encryptor: Any, ct: Any, mask: U64, entropy: Entropy) -> bytes:
    """The same plaintext plus `mask`, re-encrypted and flooded."""
    _, context, evaluator = _engine(scheme)
    fresh = encryptor.encrypt(_polynomial(scheme, mask))
    if ct is not None:
        fresh = evaluator.add(ct, fresh)
    blob = bytearray(fresh.to_string())
    k, n = len(scheme.primes) - 1, scheme.degree
    body = np.frombuffer(blob, np.uint64, count=k * n, offset=len(blob) - 2 * k * n * 8).reshape(k, n)
    primes = [m.value() for m in context.first_context_data().parms().coeff_modulus()]
    prg, left, weight = entropy.prg(), flood_bits(scheme), 0
    negative = prg.bits(n) == 1
    noise = np.zeros((k, n), np.uint64)
    while left > 0:  # uniform in ±2^(noise + 40), limb by limb
        width = min(_LIMB, left)
        limb = (prg.uint32(n) & np.uint32((1 << width) - 1)).astype(np.uint64)
        for j, q in enumerate(primes):
            noise[j] = (noise[j] + limb * np.uint64(pow(2, weight, q))) % np.uint64(q)
        left, weight = left - width, weight + width
    for j, q in enumerate(primes):
        signed = np.where(negative & (noise[j] > 0), np.uint64(q) - noise[j], noise[j])
        body[j] = (body[j] + signed) % np.uint64(q)
    packed: bytes = context.from_cipher_str(bytes(blob)).to_string()
    return packed


def signed(scheme: Scheme, words: U64) -> I64:
    """Residues modulo 2^plain_bits as signed integers."""
    spare = np.int64(64 - scheme.plain_bits)
    return (words.view(np.int64) << spare) >> spare
