import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloister.errors import ParameterError
from cloister.mpc.crypto import replicated as local
from cloister.mpc.crypto.prg import Prg
from cloister.mpc.crypto.replicated import Ring

BITS = st.integers(2, 64)


def words(ring, shape, seed):
    return ring.draw(Prg(seed.to_bytes(32, "big")), shape)


@given(bits=BITS, seed=st.integers(0, 1000))
def test_rings_read_what_they_write(bits, seed):
    ring = Ring(bits)
    rng = np.random.default_rng(seed)
    half = 1 << (bits - 1)
    x = rng.integers(-half, half - 1, 20, dtype=np.int64, endpoint=True)
    x[:2] = -half, half - 1
    w = ring.encode(x)
    assert w.dtype == (np.uint32 if bits <= 32 else np.uint64)
    np.testing.assert_array_equal(ring.decode(w), x)
    np.testing.assert_array_equal(ring.decode(ring.from_bytes(ring.to_bytes(w), w.shape)), x)
    assert ring.to_bytes(w).size == 20 * -(-bits // 8)
    spoilt = w | ring.dtype.type(((1 << 8 * ring.dtype.itemsize) - 1) ^ ((1 << bits) - 1))  # above the ring: not sent
    np.testing.assert_array_equal(ring.to_bytes(spoilt), ring.to_bytes(ring.from_bytes(ring.to_bytes(w), w.shape)))


def test_rings_refuse_what_does_not_fit():
    with pytest.raises(ParameterError, match="do not fit"):
        Ring(8).encode(np.array([128]))
    with pytest.raises(ParameterError, match="integers"):
        Ring(8).encode(np.array([1.0]))
    with pytest.raises(ParameterError, match="2 to 64 bits"):
        Ring.holding(1 << 64)
    assert Ring.holding(127).bits == 8
    assert Ring.holding(128).bits == 9


@settings(max_examples=40, deadline=None)
@given(bits=BITS, inner=st.sampled_from([1, 3, 50, 700]), seed=st.integers(0, 99))
def test_matmul_is_exact_modulo_a_power_of_two(bits, inner, seed):
    ring = Ring(bits)
    a, b = words(ring, (3, inner), seed), words(ring, (inner, 4), seed + 1)
    exact = a.astype(object) @ b.astype(object)
    found = local.matmul(a, b, bits).astype(object)
    assert ((found - exact) % (1 << bits) == 0).all()


def test_matmul_would_be_wrong_with_limbs_a_bit_wider():
    a = np.full((1, 700), (1 << 32) - 1, np.uint32)
    width = local.limb_bits(700, 32)
    assert 2 * (width + 6) + (700).bit_length() > local.MANTISSA
    exact = int(a[0, 0]) ** 2 * 700 % (1 << 32)
    assert int(local.matmul(a, a.T, 32)[0, 0]) == exact


@given(bits=BITS, n=st.integers(1, 40), seed=st.integers(0, 99))
def test_planes(bits, n, seed):
    ring = Ring(bits)
    w = words(ring, (n,), seed)
    p = local.planes(w, 0, bits)
    assert p.shape == (bits, -(-n // 8))
    for b in range(bits):
        np.testing.assert_array_equal(local.unpack(p[b], n), (w >> w.dtype.type(b)) & w.dtype.type(1))
    np.testing.assert_array_equal(local.planes(w, bits // 2, bits), p[bits // 2 :])


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_digits_generate_and_propagate_for_every_pair(width):
    u, v = (x.ravel() for x in np.meshgrid(np.arange(2**width), np.arange(2**width)))
    n = u.size
    up, vp = (local.planes(x.astype(np.uint32), 0, width) for x in (u, v))
    whole = local.monomials(up)
    one = Prg(bytes(32)).uint8(whole.shape)  # any XOR sharing will do
    two = whole ^ one
    g = local.generate(one, vp) ^ local.generate(two, vp)
    p = local.propagate(one, vp, constant=True) ^ local.propagate(two, vp, constant=False)
    np.testing.assert_array_equal(local.unpack(g, n), u + v >= 2**width)
    np.testing.assert_array_equal(local.unpack(p, n), u + v == 2**width - 1)


def test_permutations_are_uniform_and_common():
    one, two = Prg(bytes(32)), Prg(bytes(32))
    a, b = local.permutations(one, 6000, 3), local.permutations(two, 6000, 3)
    np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(np.sort(a, axis=1), np.broadcast_to(np.arange(3), a.shape))
    counts = np.unique(a @ [9, 3, 1], return_counts=True)[1]
    assert len(counts) == 6
    assert ((counts - 1000) ** 2 / 1000).sum() < 25.7  # chi-square, df 5, P < 1e-4
    assert local.permutations(one, 2, 1).tolist() == [[0], [0]]


def test_tied_keys_are_redrawn():
    class Stuck:
        calls = 0

        def uint64(self, shape):
            self.calls += 1
            made = np.arange(np.prod(shape), dtype=np.uint64).reshape(shape) << np.uint64(20)
            return made * np.uint64(0) if self.calls == 1 else made[:, ::-1].copy()

    stuck = Stuck()
    assert local.permutations(stuck, 2, 4).tolist() == [[3, 2, 1, 0]] * 2
    assert stuck.calls == 2
