import numpy as np
import pytest

from cloister.errors import ParameterError
from cloister.mpc.crypto.rns import slots

pytest.importorskip("numba")


def words(values):
    return np.array([[int(v) >> (64 * m) & (2**64 - 1) for m in range(4)] for v in values], np.uint64)


def numbers(a):
    return [sum(int(x) << (64 * m) for m, x in enumerate(row)) - (int(row[3]) >> 63 << 256) for row in a]


def fixed(z):
    """Complex numbers as slots."""
    parts = [words(np.rint(x * 2.0**slots.POINT).astype(object)) for x in (z.real, z.imag)]
    return np.stack(parts, axis=1)


@pytest.mark.parametrize("degree", [8, 64, 1024])
def test_slots_are_values_at_the_roots_in_seals_order(degree):
    a = np.random.default_rng(0).integers(-(2**40), 2**40, degree)
    z = slots.embedding(degree).to_slots(words(a))
    imaginary = z.copy()
    imaginary[:, 0] = z[:, 1]
    found = slots.to_real(z, 1.0) + 1j * slots.to_real(imaginary, 1.0)
    for j in range(degree // 2):
        root = np.exp(1j * np.pi * (pow(3, j, 2 * degree)) / degree)
        assert abs(np.polyval(a[::-1].astype(float), root) - found[j]) < 2.0**40 * degree * 1e-12


def test_a_uniform_mask_survives_both_transforms_exactly():
    rng = np.random.default_rng(0)
    values = [int.from_bytes(rng.bytes(24), "big") % 2**180 * (-1) ** i for i in range(4096)]
    e = slots.embedding(4096)
    assert numbers(e.to_coefficients(e.to_slots(words(values)))) == values
    plain = np.array([float(x) for x in values])
    assert np.abs(np.fft.irfft(np.fft.rfft(plain), 4096) - plain).max() > 2**115  # what doubles would make of it


def test_map_on_slots_and_on_plain_numbers_agree():
    S, rng = 32, np.random.default_rng(1)
    m = slots.make_map([([0, 5], [1, 2, 33], [1.0, -2.0, 0.5]), (7, 63, 3.0)], S)
    z = rng.normal(size=2 * S) + 1j * rng.normal(size=2 * S)
    out = slots.to_real(m.apply(fixed(z), np.array([1.0, 0.25])), 1.0)
    scaled = np.concatenate([z[:S], z[S:] / 4])
    np.testing.assert_allclose(out, m.apply_plain(scaled).real, atol=1e-8)
    want = np.zeros(S, complex)
    want[[0, 5]] = z[1] - 2 * z[2] + 0.5 * z[33]
    want[7] = 3 * z[63]
    np.testing.assert_allclose(m.apply_plain(z), want)
    with pytest.raises(ParameterError, match="twice"):
        slots.make_map([([0], [1], 1.0), ([0], [2], 1.0)], S)
    with pytest.raises(ParameterError, match="below 1024"):
        m.scaled(1000.0).apply(fixed(z), np.ones(2))


def test_values_are_encoded_exactly_and_alike_everywhere():
    from cloister.mpc.crypto.ckks import scheme as ckks

    P = ckks.Parameters(8192, base=3, base_bits=42, levels=1, per_level=1, level_bits=30)
    c, x = ckks.context(P), np.round(np.random.default_rng(0).normal(size=4096), 3)
    for scale in (2.0**30, 1.37e25):
        np.testing.assert_allclose(c.decode(c.exact_residues(x, 3, scale), scale), x, atol=1e-7)
    floating = c.decode(c.encode(x, 3, 2.0**60).residues, 2.0**60)
    np.testing.assert_allclose(c.decode(c.exact_residues(x, 3, 2.0**60), 2.0**60), floating, atol=2.0**-30)


def test_digest_tells_maps_apart():
    a, b = slots.identity_map(16), slots.permutation_map(np.roll(np.arange(16), 1))
    assert a.digest != b.digest
    assert a.digest == slots.permutation_map(np.arange(16)).digest
    assert a.digest != a.scaled(2.0).digest
