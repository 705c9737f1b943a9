import itertools
from collections import Counter

import numpy as np
import pytest

from cloister.errors import ParameterError
from cloister.mpc.crypto.agreement import Identity, key_pair, seal
from cloister.mpc.crypto.entropy import Entropy, check_entropy
from cloister.mpc.crypto.prg import Prg
from cloister.mpc.crypto.shamir import share


def test_the_operating_system_never_repeats_itself():
    entropy = Entropy()
    assert len({entropy.bytes(32) for _ in range(100)}) == 100
    assert entropy.bytes(0) == b""
    assert not np.array_equal(entropy.uint64(4), entropy.uint64(4))
    assert entropy.prg().bytes(16) != entropy.prg().bytes(16)


def test_uint64_has_the_shape_and_may_be_written():
    x = Entropy().uint64((3, 5))
    assert (x.shape, x.dtype, x.flags.writeable) == ((3, 5), np.uint64, True)


def test_a_test_repeats_it_with_a_source():
    first, second = (Entropy(Prg(bytes(32)).bytes) for _ in range(2))
    assert first.bytes(40) == second.bytes(40)
    assert first.integer_below(10**30) == second.integer_below(10**30)
    assert np.array_equal(first.uint64(7), second.uint64(7))


@pytest.mark.parametrize("n", [1, 2, 3, 5, 7, 8, 100, 255, 256])
def test_integer_below_is_exactly_uniform(n):
    # every single byte as the source's only answer: each number must be reached from equally many
    counts = Counter()
    for byte in range(256):
        answers = itertools.chain([byte], itertools.repeat(-1))

        def source(size, answers=answers):
            if (b := next(answers)) < 0:
                raise StopIteration  # rejected and asked again
            return bytes([b] * size)

        try:
            counts[Entropy(source).integer_below(n)] += 1
        except StopIteration:
            counts["redrawn"] += 1
    redrawn = counts.pop("redrawn", 0)
    assert sorted(counts) == list(range(n))
    assert len(set(counts.values())) == 1
    assert redrawn < 128


@pytest.mark.parametrize("n", [2**521 - 1, 2**521, 2**64 + 1])
def test_integer_below_takes_any_size(n):
    entropy = Entropy(Prg(bytes(32)).bytes)
    drawn = [entropy.integer_below(n) for _ in range(400)]
    assert all(0 <= x < n for x in drawn)
    assert 140 < sum(x < n // 2 for x in drawn) < 260
    assert max(drawn) > n * 0.97


def test_integer_below_needs_a_positive_number():
    with pytest.raises(ParameterError, match="n >= 1"):
        Entropy().integer_below(0)


@pytest.mark.parametrize("bad", [lambda n: b"", lambda n: b"x" * (n + 1), lambda n: bytearray(n), lambda n: None])
def test_a_source_that_gives_something_else_is_refused(bad):
    with pytest.raises(ParameterError, match="exactly 8 bytes"):
        Entropy(bad).bytes(8)


def test_numpy_generators_cannot_stand_in():
    rng = np.random.default_rng(0)
    for source in (rng, rng.bytes, np.random.RandomState(0).bytes):
        with pytest.raises(ParameterError, match="not a source of secrets"):
            Entropy(source)
    spend = (
        key_pair,
        Identity.create,
        check_entropy,
        lambda e: share(b"x", 1, [1], e),
        lambda e: seal(bytes(32), b"", b"", e),
    )
    for use in spend:
        with pytest.raises(ParameterError, match="found Generator"):
            use(rng)


def test_an_entropy_is_no_generator():
    assert not isinstance(Entropy(), np.random.Generator)
    shared = {name for name in dir(Entropy) if not name.startswith("_")} & set(dir(np.random.Generator))
    assert shared == {"bytes"}  # the reason for check_entropy


def test_repr_shows_nothing():
    entropy = Entropy(Prg(b"k" * 32).bytes)
    assert repr(entropy) == str(entropy) == f"{entropy}" == "Entropy(...)"
    assert not hasattr(entropy, "__dict__")
