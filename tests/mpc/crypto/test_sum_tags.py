import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloister.mpc.crypto import sum_tags
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.crypto.prg import Prg
from cloister.mpc.crypto.sum_tags import HALF, MODULUS, check_tag, inner_product, tag, tag_key
from cloister.mpc.sums.secure_sum import add

KEY = bytes(range(32))
EDGES = [0, 1, -1, 2**62, -(2**62), 2**63 - 1, -(2**63), 2**61 - 1, -(2**61) + 1, 2**32, 2**61, 2**16 - 1, -(2**48)]
words_of_64_bits = st.one_of(st.sampled_from(EDGES), st.integers(-(2**63), 2**63 - 1))


def signed(x):
    return np.array(x, dtype=np.int64).view(np.uint64)


def plain_key(sites, length):
    """α and β by Python's integers, from the stream of the key."""
    stream = Prg(KEY)
    beta = [int.from_bytes(stream.bytes(16), "little") for _ in range(sites)]
    return [int(a) for a in stream.uint64(length)], beta


def plain(alpha, beta, x):
    return (beta + sum(a * v for a, v in zip(alpha, x, strict=True))) % MODULUS


def as_integer(words):
    high, low = (int(w) for w in words)
    return (high << HALF) + low


def added(tags):
    """As the secure sum adds them: two words, one number."""
    total = np.zeros(2, np.uint64)
    for t in tags:
        add(total, t, wide=True)
    return total


@given(st.lists(words_of_64_bits, min_size=1, max_size=40))
def test_a_tag_is_the_affine_form_modulo_the_ring(x):
    alpha, beta = plain_key(2, len(x))
    key = tag_key(KEY, 2, len(x))
    for u in range(2):
        assert as_integer(tag(signed(x), key, u)) == plain(alpha, beta[u], x)


@given(st.lists(st.tuples(st.integers(0, 2**64 - 1), words_of_64_bits), min_size=1, max_size=60), st.integers(1, 9))
def test_inner_products_equal_those_of_big_integers_in_any_blocks(pairs, block):
    alpha, x = zip(*pairs, strict=True)
    whole = inner_product(np.array(alpha, dtype=np.uint64), signed(x))
    assert whole == plain(alpha, 0, x)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sum_tags, "BLOCK", block)
        assert inner_product(np.array(alpha, dtype=np.uint64), signed(x)) == whole


@pytest.mark.parametrize("word", [2**63 - 1, -(2**63), -1])
def test_inner_products_of_a_full_block_of_the_largest_words_are_exact(word):
    m = sum_tags.BLOCK + 3
    alpha = np.full(m, 2**64 - 1, dtype=np.uint64)
    assert inner_product(alpha, signed([word] * m)) == m * (2**64 - 1) * word % MODULUS


@given(
    st.integers(1, 6).flatmap(
        lambda m: st.lists(st.lists(st.integers(-(2**60), 2**60), min_size=m, max_size=m), min_size=2, max_size=7)
    )
)
def test_tags_of_summands_add_up_to_the_tag_of_the_sum(xs):
    n, m = len(xs), len(xs[0])
    key = tag_key(KEY, n, m)
    tags = added(tag(signed(x), key, u) for u, x in enumerate(xs))
    total = signed([sum(column) for column in zip(*xs, strict=True)])
    assert check_tag(total, tags, key)
    alpha, beta = plain_key(n, m)
    assert as_integer(tags) == plain(alpha, sum(beta), [sum(column) for column in zip(*xs, strict=True)])


@pytest.mark.parametrize("sites", [2, 3, 40])
def test_no_other_sum_fits(sites):
    entropy, m = Entropy(), 200
    xs = [(entropy.uint64(m) >> np.uint64(8)) - (entropy.uint64(m) >> np.uint64(8)) for _ in range(sites)]
    key = tag_key(KEY, sites, m)
    total = np.sum(xs, axis=0, dtype=np.uint64)
    t = added(tag(x, key, u) for u, x in enumerate(xs))
    assert check_tag(total, t, key)
    for change in (1, 2**40, 2**61 - 1, 2**62, 2**63, 2**64 - 1):  # high bits count as much as low ones
        other = total.copy()
        other[17:18] += np.uint64(change)  # arrays wrap
        assert not check_tag(other, t, key)
    for factor in (0, 2, 3, 2**64 - 1):
        scaled = added([t] * factor) if factor < 4 else t
        assert not check_tag(total * np.uint64(factor), scaled, key)
    assert not check_tag(total, t + np.array([0, 1], dtype=np.uint64), key)
    assert not check_tag(total, t, tag_key(bytes(32), sites, m))


def test_tags_of_a_sum_depend_on_the_sum_alone():
    """Two sets of summands with one sum: the sums of their tags are equal, so that a verifier learns nothing more."""
    key = tag_key(KEY, 2, 3)
    one, two = [signed([1, 2, 3]), signed([4, 5, 6])], [signed([5, -(2**50), 9]), signed([0, 2**50 + 7, 0])]
    assert np.array_equal(*(added(tag(x, key, u) for u, x in enumerate(xs)) for xs in (one, two)))


@pytest.mark.parametrize("power", range(64))
def test_a_change_by_any_power_of_two_fits_no_tag_that_another_key_would_give(power):
    """α_j d modulo 2^128 differs for all 64-bit α_j, so a forger has to guess α_j as a whole."""
    d, entropy = 1 << power, Entropy()
    a, b = (int(x) for x in entropy.uint64(2))
    assert (a * d) % MODULUS != (b * d) % MODULUS
    assert ((a ^ (1 << 63)) * d) % MODULUS != (a * d) % MODULUS


def test_each_summand_has_its_own_additive_key():
    """The tag of zeros is β_u: different for each site and each sum, and nothing that a coordinator could guess."""
    keys = [tag_key(KEY, 3, 4), tag_key(bytes(32), 3, 4)]
    tags = {as_integer(tag(np.zeros(4, np.uint64), key, u)) for key in keys for u in range(3)}
    assert len(tags) == 6
    assert min(tags) > 2**64
