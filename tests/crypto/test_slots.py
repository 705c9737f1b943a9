import numpy as np
import pytest

from cloister.crypto.lattice import slots
from cloister.crypto.prg import Prg
from cloister.errors import ParameterError

pytest.importorskip("numba")


@pytest.mark.parametrize("degree", [8, 64, 1024])
def test_slots_are_values_at_the_roots_in_seals_order(degree):
    a = np.random.default_rng(0).normal(size=degree)
    z = slots.embedding(degree).to_slots(np.stack([a, np.zeros(degree)]))
    for j in range(degree // 2):
        root = np.exp(1j * np.pi * (pow(3, j, 2 * degree)) / degree)
        assert abs(np.polyval(a[::-1], root) - (z[0, j] + 1j * z[2, j])) < 1e-9


def number(limbs):
    return [sum(int(x) << (42 * i) for i, x in enumerate(row)) for row in limbs.T]


def test_a_wide_mask_survives_both_transforms_where_doubles_would_lose_it():
    e = slots.embedding(4096)
    limbs = slots.random_limbs(Prg(bytes(32)).uint64((4, 4096)), 124)
    back = slots.wide_to_limbs(e.to_coefficients(e.to_slots(slots.limbs_to_wide(limbs))))
    error = max(abs(x - y) for x, y in zip(number(limbs), number(back), strict=True))
    assert error < 2**40  # a message at scale 2^78 keeps 38 bits
    plain = np.array([float(x) for x in number(limbs)])
    again = np.fft.irfft(np.fft.rfft(plain), 4096)
    assert np.abs(again - plain).max() > 2**60


def test_masks_have_their_bits():
    words = Prg(bytes(32)).uint64((4, 2000))
    for bits in (20, 42, 60, 84, 100, 126, 156):
        top = max(number(slots.random_limbs(words, bits)))
        assert 2 ** (bits - 2) < top < 2**bits
    with pytest.raises(ParameterError):
        slots.random_limbs(words, 157)


def test_map_on_slots_and_on_wide_slots_agree():
    S, rng = 32, np.random.default_rng(1)
    m = slots.make_map([([0, 5], [1, 2, 33], [1.0, -2.0, 0.5]), (7, 63, 3.0)], S)
    z = rng.normal(size=2 * S) + 1j * rng.normal(size=2 * S)
    wide = np.stack([z.real, np.zeros(2 * S), z.imag, np.zeros(2 * S)])
    out = m.apply(wide)
    np.testing.assert_allclose(out[0] + 1j * out[2], m.apply_plain(z), atol=1e-12)
    want = np.zeros(S, complex)
    want[[0, 5]] = z[1] - 2 * z[2] + 0.5 * z[33]
    want[7] = 3 * z[63]
    np.testing.assert_allclose(m.apply_plain(z), want)
    with pytest.raises(ParameterError, match="twice"):
        slots.make_map([([0], [1], 1.0), ([0], [2], 1.0)], S)


def test_digest_tells_maps_apart():
    a, b = slots.identity_map(16), slots.permutation_map(np.roll(np.arange(16), 1))
    assert a.digest != b.digest
    assert a.digest == slots.permutation_map(np.arange(16)).digest
    assert a.digest != a.scaled(2.0).digest
