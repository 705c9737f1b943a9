import math

import pytest

from cloister.errors import ParameterError, ProtocolAbort
from cloister.mpc.crypto import paillier
from cloister.mpc.crypto.entropy import Entropy


@pytest.fixture(scope="module")
def key():
    return paillier.generate()


def textbook_decrypt(key, c):
    """Paillier's first scheme as printed, with λ and μ, no remainder theorem, and g = n + 1: an independent check."""
    n = key.p * key.q
    lam = math.lcm(key.p - 1, key.q - 1)

    def log(u):
        assert (u - 1) % n == 0
        return (u - 1) // n

    mu = pow(log(pow(n + 1, lam, n * n)), -1, n)
    return log(pow(c, lam, n * n)) * mu % n


def test_key_size_and_primes(key):
    assert key.public.n.bit_length() == 3072
    assert key.p.bit_length() == key.q.bit_length() == 1536
    for prime in (key.p, key.q):
        assert all(pow(a, prime - 1, prime) == 1 for a in (2, 3, 5))


@pytest.mark.parametrize("m", [0, 1, 2**256 + 12345])
def test_agrees_with_the_textbook(key, m):
    c = key.public.encrypt(m, Entropy())
    assert textbook_decrypt(key, c) == m == key.decrypt(c)


def test_sums_and_multiples(key):
    entropy, public = Entropy(), key.public
    a, b = public.encrypt(2**300 + 7, entropy), public.encrypt(public.n - 3, entropy)
    assert key.decrypt(public.add([a, b])) == (2**300 + 4) % public.n
    assert key.decrypt(public.times(5, a)) == 5 * (2**300 + 7)
    assert public.encrypt(1, entropy) != public.encrypt(1, entropy)
    assert public.from_bytes(public.to_bytes(a)) == a
    assert len(public.to_bytes(a)) == 768


def test_small_keys_by_exhaustion(monkeypatch):
    """Every plaintext and every randomness of n = 7 · 11: decryption inverts encryption, and addition is modulo n."""
    monkeypatch.setattr(paillier, "LEAST_BITS", 4)
    key = paillier.SecretKey(7, 11)
    n = 77

    def encrypt(m, r):
        return (1 + m * n) * pow(r, n, n * n) % (n * n)

    for m in range(n):
        for r in (r for r in range(1, n) if math.gcd(r, n) == 1):
            assert key.decrypt(encrypt(m, r)) == m
    assert key.decrypt(key.public.add([encrypt(70, 2), encrypt(20, 3)])) == 90 % n


def test_against_another_library(key):
    phe = pytest.importorskip("phe", reason="python-paillier is not installed; the textbook check stands")
    public = phe.PaillierPublicKey(key.public.n)
    private = phe.PaillierPrivateKey(public, key.p, key.q)
    assert private.raw_decrypt(key.public.encrypt(123456789, Entropy())) == 123456789
    assert key.decrypt(public.raw_encrypt(987654321)) == 987654321


def test_refuses_what_is_no_key_or_ciphertext(key):
    with pytest.raises(ParameterError, match="at least 3072"):
        paillier.generate(2048)
    with pytest.raises(ProtocolAbort, match="public key"):
        paillier.PublicKey(2**2048 + 1)
    with pytest.raises(ProtocolAbort, match="public key"):
        paillier.PublicKey(2**3072)
    for c in (0, key.public.n, key.public.n**2, key.p):
        with pytest.raises(ProtocolAbort, match="not a ciphertext"):
            key.public.add([c])
    with pytest.raises(ProtocolAbort, match="768 bytes"):
        key.public.from_bytes(b"short")
    with pytest.raises(ParameterError, match="plaintext"):
        key.public.encrypt(key.public.n, Entropy())


def test_the_key_does_not_show(key):
    assert str(key.p) not in repr(key)
    assert str(key.q) not in repr(key)
