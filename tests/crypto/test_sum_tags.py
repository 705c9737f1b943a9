import numpy as np
import pytest

from cloister.crypto.entropy import Entropy
from cloister.crypto.prg import expand
from cloister.crypto.sum_tags import HALF, PRIME, check_tag, tag

KEY = bytes(range(32))
EDGES = [0, 1, -1, 2**62, -(2**62), 2**63 - 1, -(2**63), PRIME, -PRIME, PRIME - 1, 2**32, 2**61]


def plain(x, key):
    """The same with Python's integers."""
    alpha = [int(a) % PRIME for a in expand(key, len(x))]
    return sum(a * int(v) for a, v in zip(alpha, x.view(np.int64), strict=True)) % PRIME


@pytest.mark.parametrize("x", [EDGES, [7], list(range(-50, 50))])
def test_a_tag_is_the_inner_product_modulo_the_prime(x):
    words = np.array(x, dtype=np.int64).view(np.uint64)
    high, low = (int(w) for w in tag(words, KEY))
    assert ((high << HALF) + low) % PRIME == plain(words, KEY)


@pytest.mark.parametrize("sites", [2, 3, 40])
def test_tags_of_parts_fit_their_sum_and_no_other(sites):
    entropy, m = Entropy(), 200
    xs = [(entropy.uint64(m) >> np.uint64(8)) - (entropy.uint64(m) >> np.uint64(8)) for _ in range(sites)]
    total, tags = np.sum(xs, axis=0, dtype=np.uint64), np.sum([tag(x, KEY) for x in xs], axis=0, dtype=np.uint64)
    assert check_tag(total, tags, KEY)
    for change in (1, 2**40, 2**62, 2**63):  # high bits count as much as low ones
        other = total.copy()
        other[17:18] += np.uint64(change)  # arrays wrap
        assert not check_tag(other, tags, KEY)
    assert not check_tag(total, tags + np.array([0, 1], dtype=np.uint64), KEY)
    assert not check_tag(total, tags, bytes(32))
