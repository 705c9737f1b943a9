"""Paillier's cryptosystem: ciphertexts that can be added without the key.

    n = p q                     g = n + 1
    [m] = (1 + m n) r^n         mod n²,  r uniform in Z_n*
    [a] ⊕ [b] = [a] · [b]       k ⊗ [a] = [a]^k        mod n²
    m = L(c^(p-1) mod p²) h_p   mod p, the same mod q, joined by the Chinese remainder theorem; L(x) = (x - 1) / p

Made for a handful of ciphertexts: exponentiation is gmpy2's where it is installed and Python's where not, and does not
run in constant time. Keys have at least `LEAST_BITS` bits.

References
----------
[Pai99] Paillier, EUROCRYPT 1999, sections 4 and 7.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import final

from cryptography.hazmat.primitives.asymmetric import rsa

from cloister.errors import ParameterError, ProtocolAbort
from cloister.mpc.crypto.entropy import Entropy, check_entropy

try:
    from gmpy2 import powmod as _gmpy_pow
except ImportError:
    _gmpy_pow = None

LEAST_BITS = 3072


def power(base: int, exponent: int, modulus: int) -> int:
    return pow(base, exponent, modulus) if _gmpy_pow is None else int(_gmpy_pow(base, exponent, modulus))


@final
@dataclass(frozen=True, slots=True)
class PublicKey:
    n: int

    def __post_init__(self) -> None:
        if type(self.n) is not int or self.n.bit_length() < LEAST_BITS or self.n % 2 == 0:
            raise ProtocolAbort("paillier", "key", "bad-key", f"a public key is an odd number of {LEAST_BITS} bits")

    @property
    def size(self) -> int:
        """Bytes of a ciphertext."""
        return -(-2 * self.n.bit_length() // 8)

    def encrypt(self, m: int, entropy: Entropy) -> int:
        check_entropy(entropy)
        if not 0 <= m < self.n:
            raise ParameterError("a plaintext must be from 0 to n - 1")
        while math.gcd(r := entropy.integer_below(self.n), self.n) != 1:
            continue
        square = self.n * self.n
        return (1 + m * self.n) * power(r, self.n, square) % square

    def add(self, ciphertexts: Iterable[int]) -> int:
        total, square = 1, self.n * self.n  # 1 is an encryption of 0, with randomness 1
        for c in ciphertexts:
            total = total * self.check(c) % square
        return total

    def times(self, k: int, c: int) -> int:
        return power(self.check(c), k % self.n, self.n * self.n)

    def check(self, c: int) -> int:
        """Return `c`, or raise unless it is a ciphertext under this key."""
        if not 0 < c < self.n * self.n or math.gcd(c, self.n) != 1:
            raise ProtocolAbort(
                "paillier", "ciphertext", "malformed", "a number that is not a ciphertext under this key"
            )
        return c

    def to_bytes(self, c: int) -> bytes:
        return c.to_bytes(self.size, "big")

    def from_bytes(self, data: bytes) -> int:
        if len(data) != self.size:
            raise ProtocolAbort("paillier", "ciphertext", "malformed", f"a ciphertext here has {self.size} bytes")
        return self.check(int.from_bytes(data, "big"))


@final
@dataclass(frozen=True, slots=True, eq=False)
class SecretKey:
    p: int = field(repr=False)
    q: int = field(repr=False)
    public: PublicKey = field(init=False)

    def __post_init__(self) -> None:
        if self.p == self.q or math.gcd(self.p * self.q, (self.p - 1) * (self.q - 1)) != 1:
            raise ParameterError("p and q must be different primes of the same length")
        object.__setattr__(self, "public", PublicKey(self.p * self.q))

    def decrypt(self, c: int) -> int:
        self.public.check(c)
        m_p, m_q = self._part(c, self.p), self._part(c, self.q)
        return m_p + self.p * ((m_q - m_p) * pow(self.p, -1, self.q) % self.q)

    def _part(self, c: int, p: int) -> int:
        def log(base: int) -> int:
            return (power(base, p - 1, p * p) - 1) // p

        return log(c % (p * p)) * pow(log((1 + self.public.n) % (p * p)), -1, p) % p


def generate(bits: int = LEAST_BITS) -> SecretKey:
    """A fresh key; the primes are OpenSSL's, from the operating system's randomness."""
    if bits < LEAST_BITS:
        raise ParameterError(f"Paillier keys have at least {LEAST_BITS} bits, requested {bits}")
    numbers = rsa.generate_private_key(public_exponent=65537, key_size=bits).private_numbers()
    return SecretKey(numbers.p, numbers.q)
