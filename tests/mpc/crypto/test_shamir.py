import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloister.errors import CloisterError, ParameterError, ProtocolAbort
from cloister.mpc.crypto import shamir
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.crypto.prg import Prg
from cloister.mpc.crypto.shamir import PRIME, SHARE_BYTES, combine, share

quick = settings(derandomize=True, deadline=None, max_examples=60)


def entropy(seed=0):
    return Entropy(Prg(seed.to_bytes(32, "big")).bytes)


@pytest.mark.parametrize(("t", "n"), [(1, 1), (1, 3), (2, 3), (3, 5), (4, 6), (6, 6)])
def test_any_t_of_n_recombine(t, n):
    secret = entropy(1).bytes(32)
    shares = share(secret, t, range(1, n + 1), entropy(2))
    for size in range(t, n + 1):
        for points in itertools.combinations(shares, size):
            assert combine({x: shares[x] for x in points}, t) == secret


@quick
@given(
    st.binary(min_size=1, max_size=65),
    st.sets(st.one_of(st.integers(1, 40), st.integers(1, PRIME - 1)), min_size=1, max_size=12),
    st.data(),
)
def test_round_trip(secret, points, data):
    t = data.draw(st.integers(1, len(points)))
    shares = share(secret, t, sorted(points), entropy(data.draw(st.integers(0, 2**32))))
    chosen = data.draw(st.permutations(sorted(points)))[:t]
    assert all(len(s) == SHARE_BYTES for s in shares.values())
    assert combine({x: shares[x] for x in chosen}, t, len(secret)) == secret


def test_known_polynomial():
    # f(X) = 5 + 3 X + 2 X^2, by hand
    draws = iter([3, 2])
    fixed = Entropy(lambda n: (next(draws) << (8 * n - 521)).to_bytes(n, "big"))
    shares = share(b"\x05", 3, [1, 2, 7], fixed)
    assert [int.from_bytes(s, "big") for s in shares.values()] == [10, 19, 124]


@pytest.fixture
def tiny_field(monkeypatch):
    """The same code over GF(7), where everything can be counted."""
    monkeypatch.setattr(shamir, "PRIME", 7)
    shamir._weights.cache_clear()
    yield
    shamir._weights.cache_clear()


def every_sharing(secret, t, points):
    for coefficients in itertools.product(range(7), repeat=t - 1):
        draws = iter(coefficients)
        yield share(bytes([secret]), t, points, Entropy(lambda n, d=draws: bytes([next(d) << 5])))


@pytest.mark.parametrize("t", [2, 3, 4])
@pytest.mark.usefixtures("tiny_field")
def test_t_minus_1_shares_are_independent_of_the_secret(t):
    # over all choices of the polynomial, any t - 1 shares take all 7^(t-1) values once, whatever the secret is
    points = (1, 2, 4, 6)
    for secret in range(7):
        sharings = list(every_sharing(secret, t, points))
        for few in itertools.combinations(points, t - 1):
            views = Counter(tuple(s[x] for x in few) for s in sharings)
            assert len(views) == 7 ** (t - 1)
            assert set(views.values()) == {1}
        assert all(combine(s, t, 1) == bytes([secret]) for s in sharings)


def test_t_minus_1_shares_fit_every_secret():
    # in the full field: whatever secret one guesses, there is a last share that makes the others give it
    shares = share(bytes(32), 3, [1, 2, 3], entropy())
    known = {1: shares[1], 2: shares[2]}
    ys = [int.from_bytes(y, "big") for y in known.values()]
    for seed in range(20):
        guess = entropy(seed).bytes(32)
        last = shamir._interpolate((1, 2, 0), [*ys, int.from_bytes(guess, "big")], 3)
        assert combine({**known, 3: last.to_bytes(SHARE_BYTES, "big")}, 3) == guess


def test_shares_do_not_repeat():
    first, second = (share(bytes(32), 2, [1, 2, 3], Entropy()) for _ in range(2))
    assert not set(first.values()) & set(second.values())


@pytest.mark.parametrize(
    ("t", "points", "text"),
    [
        (0, [1, 2], "threshold of 0"),
        (3, [1, 2], "threshold of 3 cannot be met by 2"),
        (1, [], "threshold of 1 cannot be met by 0"),
        (2, [0, 1], "number the parties from 1"),
        (2, [1, PRIME], "number the parties from 1"),
        (2, [-1, 1], "number the parties from 1"),
        (2, [1, 2.0], "number the parties from 1"),
        (2, [1, True], "number the parties from 1"),
        (2, [1, 2, 1], "3 shares stand at 2 points"),
    ],
)
def test_bad_parameters(t, points, text):
    with pytest.raises(ParameterError, match=text):
        share(bytes(32), t, points, entropy())


@pytest.mark.parametrize("secret", [b"", b"top secret" * 7])
def test_bad_secrets(secret):
    with pytest.raises(ParameterError, match="1 to 65 bytes") as e:
        share(secret, 1, [1], entropy())
    assert "top secret" not in str(e.value)


def test_too_few_shares():
    shares = share(bytes(32), 3, [1, 2, 3], entropy())
    with pytest.raises(ParameterError, match="threshold of 3 cannot be met by 2"):
        combine({x: shares[x] for x in (1, 3)}, 3)
    with pytest.raises(ParameterError, match="1 to 65"):
        combine(shares, 3, 66)


@pytest.mark.parametrize("bad", [b"", bytes(65), bytes(67), PRIME.to_bytes(66, "big"), b"\xff" * 66, "x" * 66, None])
def test_a_malformed_share_aborts(bad):
    shares = share(bytes(32), 2, [1, 2, 3], entropy())
    with pytest.raises(ProtocolAbort, match="share at 2") as e:
        combine({**shares, 2: bad}, 2)
    assert e.value.code == "malformed"


def test_a_wrong_share_is_seen_if_there_is_one_to_spare():
    shares = share(bytes(32), 2, [1, 2, 3], entropy())
    for x in shares:
        altered = {**shares, x: shares[x][:-1] + bytes([shares[x][-1] ^ 1])}
        with pytest.raises(ProtocolAbort, match="do not belong to one secret"):
            combine(altered, 2)


def test_without_a_spare_share_a_wrong_one_gives_a_wrong_size():
    shares = share(bytes(32), 2, [1, 2], entropy())
    with pytest.raises(ProtocolAbort, match="no secret of 32 bytes"):
        combine({1: shares[1], 2: shares[1]}, 2)


def test_errors_carry_no_share():
    shares = share(b"s" * 32, 2, [1, 2, 3], entropy())
    broken = [{**shares, 3: shares[1]}, {**shares, 3: shares[1][:-1]}, {1: shares[1]}]
    for bad in broken:
        with pytest.raises(CloisterError) as e:
            combine(bad, 2)
        for y in shares.values():
            assert y.hex()[:40] not in str(e.value)
            assert str(int.from_bytes(y, "big"))[:40] not in str(e.value)
