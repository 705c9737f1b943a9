import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy import sparse

from cloister.errors import DataError, ParameterError
from cloister.mpc.crypto.fixed_point import FixedPoint

quick = settings(derandomize=True, deadline=None, max_examples=80)


def test_by_hand():
    fixed = FixedPoint(fraction_bits=2, bound=10.0)
    x = np.array([0.0, 1.0, -1.0, 0.25, 0.374, 0.376, -0.376, 10.0, -10.0])
    assert fixed.encode(x).view(np.int64).tolist() == [0, 4, -4, 1, 1, 2, -2, 40, -40]
    assert fixed.encode(np.array(-0.25)) == 2**64 - 1
    assert fixed.decode(fixed.encode(x)).tolist() == [0, 1, -1, 0.25, 0.25, 0.5, -0.5, 10, -10]
    assert fixed.resolution == 0.25


def test_ties_go_to_even():
    fixed = FixedPoint(0, 10.0)
    assert fixed.encode(np.array([0.5, 1.5, 2.5, -0.5, -1.5])).view(np.int64).tolist() == [0, 2, 2, 0, -2]


@quick
@given(st.integers(0, 40), st.lists(st.floats(-1000, 1000), max_size=20))
def test_round_trip_within_half_a_step(f, values):
    fixed = FixedPoint(f, 1000.0, 3)
    x = np.array(values)
    back = fixed.decode(fixed.encode(x))
    assert np.all(np.abs(back - x) <= fixed.resolution / 2)


@quick
@given(st.integers(1, 20), st.integers(0, 48), st.data())
def test_sums_are_exact_up_to_the_bound(parties, f, data):
    # the largest bound that the check lets pass: the sum of everyone's largest entry must not wrap
    bound = math.nextafter(float((Fraction(2**63, parties) - Fraction(1, 2)) / 2**f), 0) * (1 - 2**-50)
    fixed = FixedPoint(f, bound, parties)
    values = data.draw(
        st.lists(
            st.one_of(st.sampled_from([bound, -bound]), st.floats(-bound, bound)), min_size=parties, max_size=parties
        )
    )
    encoded = [fixed.encode(np.array([v])) for v in values]
    total = sum(int(e.view(np.int64)[0]) for e in encoded)
    assert np.sum(encoded, axis=0).view(np.int64).tolist() == [total]
    assert abs(Fraction(total) - sum(map(Fraction, values)) * 2**f) <= Fraction(parties, 2)


@quick
@given(st.integers(0, 62), st.floats(1e-3, 1e19), st.integers(1, 1000))
def test_the_check_is_the_inequality(f, bound, parties):
    if parties * (Fraction(bound) * 2**f + Fraction(1, 2)) < 2**63:
        FixedPoint(f, bound, parties)
    else:
        with pytest.raises(ParameterError, match="the sum would wrap"):
            FixedPoint(f, bound, parties)


def test_the_check_at_its_edge():
    FixedPoint(0, 2**62 - 1, 2)  # 2 (2^62 - 1/2) = 2^63 - 1
    with pytest.raises(ParameterError):
        FixedPoint(0, 2**62, 2)
    with pytest.raises(ParameterError):
        FixedPoint(1, 2**62)


def test_the_message_says_what_to_change():
    with pytest.raises(ParameterError) as e:
        FixedPoint(fraction_bits=48, bound=1e6, parties=40)
    assert str(e.value) == (
        "40 parties with entries up to 1e+06 and 48 fraction bits need 74 bits beside the sign, the ring has 63; "
        "the sum would wrap: use at most 37 fraction bits or a smaller bound."
    )
    FixedPoint(fraction_bits=37, bound=1e6, parties=40)
    with pytest.raises(ParameterError, match="wrap: use a smaller bound"):
        FixedPoint(fraction_bits=62, bound=1e308, parties=2)


@quick
@given(st.integers(0, 62), st.floats(1e-3, 1e15), st.integers(1, 50))
def test_the_advice_is_right(f, bound, parties):
    try:
        FixedPoint(f, bound, parties)
    except ParameterError as e:
        assume("at most" in str(e))
        best = int(str(e).split("at most ")[1].split()[0])
        FixedPoint(best, bound, parties)
        with pytest.raises(ParameterError):
            FixedPoint(best + 1, bound, parties)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((-1, 1.0, 1), "fraction_bits"),
        ((63, 1.0, 1), "fraction_bits"),
        ((1.5, 1.0, 1), "fraction_bits"),
        ((True, 1.0, 1), "fraction_bits"),
        ((8, 0.0, 1), "bound"),
        ((8, -1.0, 1), "bound"),
        ((8, math.inf, 1), "bound"),
        ((8, math.nan, 1), "bound"),
        ((8, "9", 1), "bound"),
        ((8, 1.0, 0), "parties"),
        ((8, 1.0, 2.0), "parties"),
    ],
)
def test_bad_parameters(arguments, text):
    with pytest.raises(ParameterError, match=f"{text} must be"):
        FixedPoint(*arguments)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 100.5, -100.5, 123.456789])
def test_entries_outside_the_bound_raise_and_are_not_shown(bad):
    fixed = FixedPoint(16, 100.0, 3)
    x = np.array([[1.0, bad], [77.125, bad]])
    with pytest.raises(DataError) as e:
        fixed.encode(x)
    assert str(e.value).startswith("2 of 4 entries are missing, infinite or beyond ±100")
    assert "123" not in str(e.value)
    assert "77" not in str(e.value)


@pytest.mark.parametrize("bad", [np.array(["patient 7"]), np.array([1j]), np.array([None]), sparse.eye_array(3)])
def test_what_is_no_number_is_refused(bad):
    with pytest.raises(DataError, match="found dtype") as e:
        FixedPoint(16, 100.0).encode(bad)
    assert "patient" not in str(e.value)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int64, np.int8, np.uint16, np.bool_])
def test_other_numbers_are_taken_as_they_are(dtype):
    x = np.array([[0, 1, 1]], dtype)
    y = FixedPoint(16, 100.0).encode(x)
    assert (y.dtype, y.shape) == (np.uint64, (1, 3))
    assert y.tolist() == [[0, 65536, 65536]]


def test_the_input_is_left_alone_and_the_result_is_new():
    fixed = FixedPoint(4, 10.0)
    x = np.array([1.3, -2.7])
    y = fixed.encode(x)
    assert x.tolist() == [1.3, -2.7]
    kept = y.copy()
    fixed.decode(y)
    assert np.array_equal(y, kept)
    assert y.flags.writeable


def test_strided_and_empty_arrays():
    fixed = FixedPoint(4, 100.0)
    x = np.arange(12.0).reshape(3, 4)
    assert np.array_equal(fixed.decode(fixed.encode(x.T)), x.T)
    assert np.array_equal(fixed.decode(fixed.encode(x[:, ::2])), x[:, ::2])
    assert fixed.encode(np.zeros((0, 3))).shape == (0, 3)


def test_products_carry_twice_the_bits():
    fixed = FixedPoint(10, 100.0)
    a, b = fixed.encode(np.array([1.5, -2.25])), fixed.encode(np.array([4.0, 3.0]))
    assert fixed.decode(a * b, factors=2).tolist() == [6.0, -6.75]


@pytest.mark.parametrize("bad", [np.zeros(2), np.zeros(2, np.int64), [1, 2], 3])
def test_decode_takes_ring_elements_only(bad):
    with pytest.raises(ParameterError, match="decode needs uint64"):
        FixedPoint(4, 10.0).decode(bad)
