"""Every lattice ring in use has 128 bits by the project's own estimate, which agrees with the public table."""

import sys
from pathlib import Path

import pytest

pytest.importorskip("numba")
sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))

import lattice_security
from lattice_security import LEAST, STANDARD_2018, estimate, rings

from cloister.errors import ParameterError
from cloister.mpc.crypto.ckks.parameters import Parameters
from cloister.mpc.crypto.rns.ring import SECURE_BITS, check_secure


def test_every_ring_in_use_has_128_bits_against_every_attack():
    used = [*rings()]
    assert {n for _, n, _ in used} == {4096, 8192, 32768}
    for name, n, logq in used:
        assert logq <= SECURE_BITS[n] < STANDARD_2018[n], name
        assert estimate(n, float(logq)).least >= LEAST, name


@pytest.mark.parametrize(("n", "most"), SECURE_BITS.items())
def test_the_largest_admitted_modulus_has_128_bits(n, most):
    found = estimate(n, float(most))
    assert min(found.primal, found.dual, found.hybrid) == found.least >= LEAST
    check_secure(n, most)
    with pytest.raises(ParameterError, match="below 128-bit security"):
        check_secure(n, most + 1)


@pytest.mark.parametrize("n", [8192, 16384, 32768])
def test_the_estimate_gives_about_128_bits_for_the_standard_of_2018(n):
    found = estimate(n, float(STANDARD_2018[n]))
    assert 126.5 <= found.least <= 130
    assert found.primal <= 130


def test_a_larger_modulus_is_found_to_be_weaker_and_a_weak_one_below_128_bits():
    bits = [estimate(32768, logq).least for logq in (700.0, 868.0, 900.0, 1200.0)]
    assert bits == sorted(bits, reverse=True)
    assert bits[2] < LEAST
    assert estimate(2048, 53.0).dual < LEAST  # why that degree is not offered


def test_degrees_that_are_not_offered_and_moduli_that_are_too_long_are_refused():
    for degree in (1024, 2048, 65536):
        with pytest.raises(ParameterError, match="ring degree must be one of 4096, 8192, 16384, 32768"):
            check_secure(degree, 20)
    with pytest.raises(ParameterError, match="128-bit"):
        Parameters(8192, base=4, base_bits=45, levels=2, per_level=1, level_bits=30)


def test_the_table_has_a_row_for_every_ring():
    rows = lattice_security.table().splitlines()
    assert len(rows) == 2 + len([*rings()]) + len(SECURE_BITS)
