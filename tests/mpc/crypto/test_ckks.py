import numpy as np
import pytest

from cloister.errors import ParameterError, WireError
from cloister.mpc.crypto.ckks import scheme as ckks
from cloister.mpc.crypto.entropy import Entropy

pytest.importorskip("numba")
P = ckks.Parameters(8192, base=2, base_bits=50, levels=1, per_level=1, level_bits=40)


@pytest.fixture(scope="module")
def key():
    return ckks.own_key(P, Entropy())


@pytest.fixture(scope="module")
def c():
    return ckks.context(P)


def values(seed=0):
    return np.random.default_rng(seed).normal(size=P.slots)


def test_encrypt_evaluate_decrypt(c, key):
    secret, public = key
    x, y = values(1), values(2)
    ct = c.encrypt(public, x, P.top, P.scale, Entropy())
    np.testing.assert_allclose(c.decrypt(secret.ntt, ct), x, atol=1e-6)  # 2^11 of noise, √N of it per slot, at 2^40
    both = c.add(ct, c.encrypt(public, y, P.top, P.scale, Entropy()))
    np.testing.assert_allclose(c.decrypt(secret.ntt, c.add_plain(both, x)), 2 * x + y, atol=2e-6)
    product = c.times_plain(ct, c.encode(y, P.top, c.dropped(P.top)))
    assert product.primes == P.base
    np.testing.assert_allclose(c.decrypt(secret.ntt, product), x * y, atol=1e-5)


def test_rerandomised_ciphertexts_do_not_show_what_went_into_them(c, key):
    """Evaluation repeats itself to the bit, so a guess of a plain factor could be checked; not after a fresh zero."""
    secret, public = key
    x, y = values(1), values(2)
    ct = c.encrypt(public, x, P.top, P.scale, Entropy())
    made = [c.times_plain(ct, c.encode(y, P.top, c.dropped(P.top))) for _ in range(2)]
    np.testing.assert_array_equal(c.raw(made[0])[0], c.raw(made[1])[0])
    hidden = [c.rerandomise(public, one, Entropy()) for one in made]
    for j in (0, 1):
        assert (c.raw(hidden[0])[0][j] != c.raw(hidden[1])[0][j]).mean() > 0.999
        assert (c.raw(hidden[0])[0][j] != c.raw(made[0])[0][j]).mean() > 0.999
    np.testing.assert_allclose(c.decrypt(secret.ntt, hidden[0]), x * y, atol=1e-5)


def test_shifted_scales_and_single_numbers(c, key):
    secret, public = key
    x = values(4)
    ct = c.encrypt(public, x, P.top, P.scale, Entropy())
    moved = c.shift(c.drop(ct, P.base), 12)
    assert moved.scale == P.scale * 2.0**12
    np.testing.assert_allclose(c.decrypt(secret.ntt, moved), x, atol=1e-6)  # relative noise stays
    np.testing.assert_allclose(c.decrypt(secret.ntt, c.add_plain(moved, -2.5)), x - 2.5, atol=1e-6)
    assert c.dropped(P.top, 2) == c.dropped(P.top, 1) * c.dropped(P.top - 1, 1)


def test_a_scale_may_be_given():
    planned = ckks.Parameters(8192, 2, 50, 1, 1, 40, given_scale_bits=33)
    assert (planned.scale_bits, planned.bits, planned.scale) == (33, P.bits, 2.0**33)


def test_the_direct_big_integer_way_gives_the_same(c, key):
    """c0 + c1·s over the integers, centred, then the polynomial at the roots: no NTT, no doubles."""
    secret, public = key
    x = values(3)
    raw, scale = c.raw(c.encrypt(public, x, 2, P.scale, Entropy()))
    m = c.ring.lift_exact(c.ring.backward(c.ring.add_product(raw[0].copy(), raw[1], secret.ntt)))
    n = P.degree
    for j in (0, 1, 2, 4095):
        root = np.exp(1j * np.pi * (np.arange(n) * pow(3, j, 2 * n) % (2 * n)) / n)
        assert abs((np.array(m, float) @ root).real / scale - x[j]) < 1e-5


def test_another_key_does_not_decrypt(c, key):
    other, _ = ckks.own_key(P, Entropy())
    ct = c.encrypt(key[1], values(), P.top, P.scale, Entropy())
    assert np.abs(c.decrypt(other.ntt, ct)).max() > 1e6


def test_pack_and_unpack(c, key):
    raw, _ = c.raw(c.encrypt(key[1], values(), P.top, P.scale, Entropy()))
    data = c.pack(raw[0])
    assert len(data) == c.packed(P.top) < raw[0].nbytes
    np.testing.assert_array_equal(c.unpack(data, P.top), raw[0])


@pytest.mark.parametrize("harm", [lambda d: d[:-1], lambda d: d + b"\0", lambda d: b"", lambda d: b"\xff" * len(d)])
def test_bytes_that_are_no_residues_are_refused(c, key, harm):
    data = c.pack(c.raw(c.encrypt(key[1], values(), P.top, P.scale, Entropy()))[0][0])
    with pytest.raises(WireError):
        c.unpack(harm(data), P.top)
    with pytest.raises(WireError):
        c.unpack(data, 99)


def test_secrets_do_not_show(key):
    secret, _ = key
    assert repr(secret) == "Secret(...)"
    again = ckks.Secret.from_bytes(P, secret.to_bytes())
    np.testing.assert_array_equal(again.ntt, secret.ntt)
    for bad in (b"", secret.to_bytes()[:-1], b"\x05" * P.degree):
        with pytest.raises((WireError, ValueError)):
            ckks.Secret.from_bytes(P, bad)


def test_numpy_generators_make_no_secret():
    with pytest.raises(ParameterError):
        ckks.Secret.draw(P, np.random.default_rng(0))


def test_parameters_below_128_bits_are_refused():
    with pytest.raises(ParameterError, match="128-bit"):
        ckks.Parameters(8192)
    with pytest.raises(ParameterError, match="20 to 50"):
        ckks.Parameters(32768, level_bits=51)


@pytest.mark.parametrize(("levels", "slots", "scale"), [(4, 8192, 68), (4, 16384, 78), (1, 1024, 70), (6, 100, 50)])
def test_choose_finds_the_smallest_ring(levels, slots, scale):
    found = ckks.choose(levels, slots, scale_bits=scale, value_bits=3, parties=3)
    assert found.slots >= slots
    assert found.levels == levels
    assert found.scale_bits >= scale
    smaller = {4096: 109, 8192: 218, 16384: 438}.get(found.degree // 2)
    data = sum(found.bits[: found.top])
    assert smaller is None or found.degree // 4 < slots or data + found.base_bits - 2 > smaller


def test_choose_says_when_nothing_fits():
    with pytest.raises(ParameterError, match="no ring"):
        ckks.choose(20, 16384)
