import numpy as np
import pytest

from cloister.crypto import bfv
from cloister.crypto.entropy import Entropy
from cloister.errors import ParameterError, WireError

pytest.importorskip("seal")
P = bfv.Params()


@pytest.fixture(scope="module")
def key():
    return bfv.Key(P)


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def test_encrypt_decrypt_signed_integers(key, rng):
    x = rng.integers(-500_000, 500_000, P.slots)
    np.testing.assert_array_equal(key.decrypt(bfv.encrypt(P, key.public, x)), x)


def test_weighted_sum_is_exact_and_survives_hiding(key, rng):
    xs = rng.integers(-50, 50, (12, P.slots))
    ws = rng.integers(-500, 500, (12, P.slots))
    cts = [bfv.encrypt(P, key.public, x) for x in xs]
    found = bfv.weighted_sum(P, cts, list(ws))
    hidden = bfv.hide(P, key.public, found, Entropy())
    np.testing.assert_array_equal(key.decrypt(found), (xs * ws).sum(0))
    np.testing.assert_array_equal(key.decrypt(hidden), (xs * ws).sum(0))
    assert len(hidden) == len(bfv.hide(P, key.public, None, Entropy()))  # zero weights look like any other


def test_scalar_weights_and_plain_addition(key, rng):
    xs = rng.integers(0, 2, (3, 100))
    cts = [bfv.encrypt(P, key.public, x) for x in xs]
    found = bfv.add_plain(P, bfv.add(P, [bfv.weighted_sum(P, cts, [3, 0, -7]), cts[1]]), np.full(100, 5))
    np.testing.assert_array_equal(key.decrypt(found)[:100], 3 * xs[0] + xs[1] - 7 * xs[2] + 5)


def noise_room(key, ct):
    return key._decryptor.invariant_noise_budget(bfv.load(P, ct))


def test_hiding_covers_the_noise_that_would_tell_the_weights(key, rng):
    """The room left after a sum depends on the weights; after hiding it is that of the flooding alone."""
    ct = bfv.encrypt(P, key.public, rng.integers(0, 2, P.slots))
    light = bfv.weighted_sum(P, [ct], [1])
    heavy = bfv.weighted_sum(P, [ct] * 64, list(rng.integers(-(2**18), 2**18, (64, P.slots))))
    assert noise_room(key, light) > noise_room(key, heavy) + 20
    flooded = {noise_room(key, bfv.hide(P, key.public, c, Entropy())) for c in (light, heavy, None)}
    assert len(flooded) == 1
    # the bound that the flooding stands on: 40 bits above every noise a sum may have
    total = bfv._engine(P)[1].first_context_data().total_coeff_modulus_bit_count()
    assert total - P.plain_bits - noise_room(key, heavy) <= P.noise_bits


@pytest.mark.parametrize("harm", [lambda b: b"", lambda b: b"x" * 500, lambda b: b[:-8], lambda b: b[:1000]])
def test_broken_bytes_are_refused(key, harm):
    with pytest.raises(WireError):
        bfv.load(P, harm(bfv.encrypt(P, key.public, np.arange(5))))
    with pytest.raises(WireError):
        bfv.load_public(P, harm(key.public))


def test_foreign_parameters_are_refused(key):
    other = bfv.Params(degree=16384)
    with pytest.raises(WireError):
        bfv.load(P, bfv.encrypt(other, bfv.Key(other).public, np.arange(5)))


def test_another_key_does_not_decrypt(key):
    with pytest.raises(WireError):
        bfv.Key(P).decrypt(bfv.encrypt(P, key.public, np.arange(5)))


def test_bad_parameters_and_inputs(key):
    with pytest.raises(ParameterError, match="128-bit"):
        bfv.Params(degree=4096, plain_bits=20)
    with pytest.raises(ParameterError, match="bits"):
        bfv.encrypt(P, key.public, np.array([2**30]))
    with pytest.raises(ParameterError, match="products"):
        bfv.weighted_sum(P, [b""] * 5000, [1] * 5000)
    assert "Key" in repr(key)
    assert len(repr(key)) < 20
