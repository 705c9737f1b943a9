import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloister.errors import DataError, ParameterError
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.crypto.prg import Prg
from cloister.mpc.sums.packed_words import Code, gaussian


@settings(max_examples=60, deadline=None)
@given(
    parties=st.integers(1, 40),
    length=st.integers(1, 33),
    bound=st.floats(1e-3, 100.0),
    packed=st.booleans(),
    seed=st.integers(0, 2**20),
)
def test_sums_of_words_are_sums_of_entries(parties, length, bound, packed, seed):
    rng = np.random.default_rng(seed)
    code = Code(bound, parties, packed)
    xs = rng.uniform(-bound, bound, (parties, length))
    xs[:, 0] = bound  # the worst case of every lane
    xs[:, -1] = -bound
    words = np.zeros(code.words(length), np.uint64)
    for x in xs:
        words += code.encode(x)
    found = code.decode(words, length)
    np.testing.assert_allclose(found, xs.sum(axis=0), atol=parties * code.resolution / 2 + 1e-9)


def test_two_entries_share_a_word():
    assert Code(4.0, 10).words(1_000_001) == 500_001
    assert Code(4.0, 10).resolution < 4e-8


def test_one_more_bit_would_wrap():
    code = Code(1.0, 10)
    finer = 2.0 ** (code.fraction_bits + 1)
    assert 10 * (finer + 0.5) >= 2**31


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1.1])
def test_out_of_range_is_refused(bad):
    with pytest.raises(DataError, match="nothing was sent"):
        Code(1.0, 3).encode(np.array([0.5, bad]))


@pytest.mark.parametrize(("bound", "parties"), [(0.0, 3), (np.inf, 3), (1.0, 0), (1e9, 3)])
def test_bad_codes(bound, parties):
    with pytest.raises(ParameterError):
        Code(bound, parties)


def test_noise_is_normal_and_secret():
    from scipy.stats import kstest

    x = gaussian(Entropy(Prg(bytes(32)).bytes), 20_001, 3.0)
    assert len(x) == 20_001
    assert kstest(x / 3.0, "norm").pvalue > 1e-3
    with pytest.raises(ParameterError):
        gaussian(np.random.default_rng(0), 3, 1.0)
