import numpy as np
import pytest

from cloister.crypto.entropy import Entropy
from cloister.crypto.lattice import ring as lattice
from cloister.crypto.prg import Prg
from cloister.errors import ParameterError

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


def test_limbs_are_the_number_that_they_spell():
    limbs = np.random.default_rng(0).integers(-(2**41), 2**41, (3, N))
    want = [int(a) + (int(b) << 42) + (int(c) << 84) for a, b, c in limbs.T]
    Q = PRIMES[0] * PRIMES[1] * PRIMES[2]
    assert [x % Q for x in ints(RING.limbs_to_residues(limbs, 3))] == [x % Q for x in want]


def test_automorphism_is_a_substitution():
    v = np.arange(N)
    out = RING.rotate_coefficients(v, 3)
    for i in range(N):
        sign = -1 if 3 * i % (2 * N) >= N else 1
        assert out[3 * i % N] == sign * v[i]


def test_noise_has_the_stated_width():
    prg = Entropy().prg()
    for bits in (10, 30, 41, 42, 60, 83, 84, 100):
        flood = [int(x) for x in ints(RING.backward(RING.flood(prg, bits, 3)))]
        assert 2 ** (bits - 2) < max(flood) < 2**bits
        assert -(2 ** (bits - 2)) > min(flood) >= -(2**bits)
    assert np.abs(np.array(ints(RING.backward(RING.error(prg, 3))))).max() < 40
    with pytest.raises(ParameterError):
        RING.flood(prg, 125, 3)


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
    lattice.check_secure(8192, 218)
    with pytest.raises(ParameterError, match="16384 would do"):
        lattice.check_secure(8192, 219)
    with pytest.raises(ParameterError, match="no ring"):
        lattice.check_secure(32768, 882)
    with pytest.raises(ParameterError, match="ring degree"):
        lattice.check_secure(1000, 20)
