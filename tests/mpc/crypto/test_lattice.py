import numpy as np
import pytest

from cloister.errors import ParameterError
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.crypto.prg import Prg
from cloister.mpc.crypto.rns import ring as lattice

pytest.importorskip("numba")
N = 64
PRIMES = tuple(q for q in range(2**40 + 1, 2**40 + 2**18, 2 * N) if all(q % d for d in range(3, 2000, 2)))
PRIMES = tuple(q for q in PRIMES if pow(3, q - 1, q) == 1 and pow(7, q - 1, q) == 1)[:3]
RING = lattice.Ring(N, PRIMES)


def direct(a, b):
    """Product modulo X^N + 1 over the integers, the schoolbook way."""
    out = [0] * N
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            out[(i + j) % N] += -int(x) * int(y) if i + j >= N else int(x) * int(y)
    return out


def ints(rows):
    return RING.lift_exact(rows)


def test_ntt_product_equals_the_schoolbook_product():
    prg = Prg(bytes(32))
    a, b = (prg.gaussian(N, 100.0) for _ in range(2))
    product = RING.multiply(RING.forward(RING.of_small(a, 3)), RING.forward(RING.of_small(b, 3)))
    assert ints(RING.backward(product)) == direct(a, b)


def test_forward_and_backward_undo_each_other():
    a = RING.uniform(Prg(bytes(32)), 3)
    np.testing.assert_array_equal(RING.backward(RING.forward(a.copy())), a)


def test_accumulating_operations():
    prg = Prg(b"x" * 32)
    a, b, c = (RING.uniform(prg, 3) for _ in range(3))
    q = np.array(PRIMES, object)[:, None]
    A, B, C = (x.astype(object) for x in (a, b, c))
    assert (RING.add(a.copy(), b) == (A + B) % q).all()
    assert (RING.subtract(a.copy(), b) == (A - B) % q).all()
    assert (RING.add_product(a.copy(), b, c) == (A + B * C) % q).all()
    assert (RING.add_product(a.copy(), b, c, sign=-1) == (A - B * C) % q).all()
    one = RING.add_multiple(a.copy(), b, 12345678901234567, 1)
    assert (one[1] == (A[1] + 12345678901234567 * B[1]) % PRIMES[1]).all()
    assert (one[[0, 2]] == a[[0, 2]]).all()


@pytest.mark.parametrize("bits", [3, 40, 80, 110])
def test_lift_agrees_with_big_integers(bits):
    rng = np.random.default_rng(bits)
    values = [int.from_bytes(rng.bytes(20), "big") % 2**bits * (-1) ** i for i in range(N)]
    rows = np.array([[v % q for v in values] for q in PRIMES], np.uint64)
    assert RING.lift_exact(rows) == values
    high, low = RING.lift(rows)
    for v, h, x in zip(values, high, low, strict=True):
        assert abs(int(h) + int(x) - v) <= abs(v) * 2.0**-100 + 1


def words(values):
    return np.array([[v >> (64 * m) & (2**64 - 1) for m in range(4)] for v in values], np.uint64)


def numbers(a):
    return [sum(int(x) << (64 * m) for m, x in enumerate(row)) - (int(row[3]) >> 63 << 256) for row in a]


def test_integers_of_four_words_are_the_centred_coefficients():
    Q = PRIMES[0] * PRIMES[1] * PRIMES[2]
    rng = np.random.default_rng(0)
    values = [int.from_bytes(rng.bytes(16), "big") % Q - Q // 2 for _ in range(N - 4)] + [0, -1, Q // 2, -(Q // 2)]
    rows = np.array([[v % q for v in values] for q in PRIMES], np.uint64)
    assert numbers(RING.integers(rows)) == values
    np.testing.assert_array_equal(RING.of_integers(words(values), 3), rows)
    far = [(-1) ** i * (3**i % 2**250) for i in range(N)]
    assert [[int(x) for x in row] for row in RING.of_integers(words(far), 3)] == [[v % q for v in far] for q in PRIMES]


def test_inner_products():
    prg = Prg(b"i" * 32)
    a, b = RING.uniform(prg, 3), RING.uniform(prg, 2)
    found = [int(x) for x in RING.inner(a, b)]
    assert found == [sum(int(x) * int(y) for x, y in zip(a[j], b[j], strict=True)) % PRIMES[j] for j in range(2)]


def test_automorphism_is_a_substitution():
    v = np.arange(N)
    out = RING.rotate_coefficients(v, 3)
    for i in range(N):
        sign = -1 if 3 * i % (2 * N) >= N else 1
        assert out[3 * i % N] == sign * v[i]


def test_noise_has_the_stated_width():
    prg = Entropy().prg()
    for bits in (10, 30, 41, 42, 63, 64, 65, 83, 100, 116):
        flood = np.array([float(x) for x in ints(RING.backward(RING.flood(prg, bits, 3)))])
        assert np.abs(flood).max() <= 1.5 * 2**bits
        assert 0.25 < flood.std() / 2**bits < 0.8  # a sum of three uniform numbers: one half
        assert abs(flood.mean()) < 2**bits / 3
    assert np.abs(np.array(ints(RING.backward(RING.error(prg, 3))))).max() < 40
    with pytest.raises(ParameterError):
        RING.flood(prg, 191, 3)


def test_a_flood_hides_a_shift_better_than_uniform_noise_would():
    """The claim of `Ring.spread`: KL of a shift by δ is 2.3·(δ / 2^b)², from the density of a sum of three."""
    x = np.linspace(0, 3, 300_001)[1:-1]
    f = np.where(x < 1, x * x / 2, np.where(x < 2, 0.75 - (x - 1.5) ** 2, (3 - x) ** 2 / 2))
    for step in (100, 1000):  # δ = 0.001, 0.01 of 2^b
        inside = f[step:], f[:-step]
        kl = float((inside[0] * np.log(inside[0] / inside[1])).sum() * 1e-5)
        assert (
            kl + 2 * f[:step].sum() * 1e-5 < 2.3 * (step * 1e-5) ** 2 * 1.1 + 1e-5
        )  # what falls off the edge included


def test_ntt_order_is_that_of_seal():
    seal = pytest.importorskip("seal")
    p = seal.EncryptionParameters(seal.scheme_type.ckks)
    p.set_poly_modulus_degree(4096)
    p.set_coeff_modulus(seal.CoeffModulus.Create(4096, [40, 40]))
    context = seal.SEALContext(p, True, seal.sec_level_type.tc128)
    primes = tuple(m.value() for m in context.key_context_data().parms().coeff_modulus())
    raw = seal.KeyGenerator(context).secret_key().to_string()
    secret = np.frombuffer(raw[-2 * 4096 * 8 :], np.uint64).reshape(2, 4096).copy()
    ring = lattice.ring(4096, primes)
    assert set(ring.lift_exact(ring.backward(secret))) == {-1, 0, 1}  # SEAL's secrets are ternary


def test_insecure_moduli_are_refused():
    lattice.check_secure(8192, 214)
    with pytest.raises(ParameterError, match="16384 would do"):
        lattice.check_secure(8192, 215)
    with pytest.raises(ParameterError, match="no ring"):
        lattice.check_secure(32768, 869)
    with pytest.raises(ParameterError, match="ring degree"):
        lattice.check_secure(1000, 20)
