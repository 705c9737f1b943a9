import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

seal = pytest.importorskip("seal")

from cloister.errors import ParameterError, WireError  # noqa: E402
from cloister.mpc.crypto import bfv_matmul as he  # noqa: E402
from cloister.mpc.crypto.entropy import Entropy  # noqa: E402
from cloister.mpc.crypto.rns.ring import SECURE_BITS  # noqa: E402

SMALL = he.Scheme(14, 13)
KEY = he.Key(SMALL)


def product(plan, y, s, key=KEY, **options):
    cts = he.encrypt(plan, key.public, y)
    return he.multiply(key.public, [he.Term(plan, cts, s)], Entropy(), **options)


@settings(max_examples=20, deadline=None)
@given(
    rows=st.integers(1, 9),
    inner=st.integers(1, 40),
    columns=st.integers(1, 60),
    cut=st.sampled_from([0, 1, 3]),
    mask=st.booleans(),
    seed=st.integers(0, 999),
)
def test_exact(rows, inner, columns, cut, mask, seed):
    rng = np.random.default_rng(seed)
    plan = he.Plan(SMALL, rows, inner, columns, cut)
    y, s = rng.integers(-3, 4, (inner, columns)), rng.integers(-5, 6, (rows, inner))
    out, r = product(plan, y, s, mask=mask)
    found = he.signed(SMALL, KEY.decrypt(plan, out) - r)
    np.testing.assert_array_equal(found, s @ y)
    assert bool(r.any()) == mask


def test_more_columns_than_coefficients_and_sums_of_products():
    rng = np.random.default_rng(0)
    n = SMALL.degree + 5
    plan = he.Plan(SMALL, 2, 3, n)
    y, s = rng.integers(0, 2, (3, n)), rng.integers(-5, 6, (2, 3))
    np.testing.assert_array_equal(he.signed(SMALL, KEY.decrypt(plan, product(plan, y, s)[0])), s @ y)
    plans = [he.Plan(SMALL, 7, inner, 5, cut=2) for inner in (3, 1, 900)]
    ys, ss = [rng.integers(0, 2, (p.inner, 5)) for p in plans], [rng.integers(-1, 2, (7, p.inner)) for p in plans]
    terms = [he.Term(p, he.encrypt(p, KEY.public, y), s) for p, y, s in zip(plans, ys, ss, strict=True)]
    out, _ = he.multiply(KEY.public, terms, Entropy())
    wanted = sum(s @ y for s, y in zip(ss, ys, strict=True))
    np.testing.assert_array_equal(he.signed(SMALL, KEY.decrypt(plans[0], out)), wanted)


def test_nothing_but_zeros_is_hidden_too():
    plan = he.Plan(SMALL, 2, 3, 4)
    out, _ = product(plan, np.ones((3, 4), np.int64), np.zeros((2, 3), np.int64))
    np.testing.assert_array_equal(KEY.decrypt(plan, out), 0)


def test_other_coefficients_are_uniform():
    """The terms with i ≠ i' stand beside the results; unmasked they would tell the owner about S."""
    plan = he.Plan(SMALL, 1, 2, 3)
    out, _ = product(plan, np.ones((2, 3), np.int64), np.array([[1, 7]]))
    whole = he._coefficients(SMALL, KEY._decryptor.decrypt(he.load(SMALL, out[0])))[3:]
    counts = np.bincount((whole >> np.uint64(10)).astype(int), minlength=16)
    assert ((counts - len(whole) / 16) ** 2 / (len(whole) / 16)).sum() < 80  # df 15: P < 1e-10


def noise(ct):
    """Bits of noise budget that are left: the same for every S if the flooding covers what S does to the noise."""
    return KEY._decryptor.invariant_noise_budget(he.load(SMALL, ct))


def test_the_noise_does_not_show_the_weights_and_unflooded_it_would(monkeypatch):
    plan = he.Plan(SMALL, 1, 2, 3)
    y = np.ones((2, 3), np.int64)
    light, heavy = np.array([[1, 0]]), np.array([[4000, 4000]])
    budgets = [[noise(product(plan, y, s)[0][0]) for _ in range(4)] for s in (light, heavy)]
    assert budgets[0] == budgets[1]
    monkeypatch.setattr(he, "flood_bits", lambda scheme: 0)
    bare = [noise(product(plan, y, s)[0][0]) for s in (light, heavy)]
    assert bare[0] > bare[1] + 5
    assert min(budgets[0]) > 0


def test_the_flood_is_forty_bits_above_the_noise_of_the_heaviest_weights(monkeypatch):
    """Measured: what the flood takes of the budget, beyond what the heaviest product that is let through leaves."""
    plan = he.Plan(SMALL, 1, 2, 3)
    y, heaviest = np.full((2, 3), 2, np.int64), np.array([[4095, 4096]])
    flooded = max(noise(product(plan, y, heaviest)[0][0]) for _ in range(4))
    monkeypatch.setattr(he, "flood_bits", lambda scheme: scheme.noise_bits)
    bound = min(noise(product(plan, y, heaviest)[0][0]) for _ in range(4))  # as if the noise were at its bound
    assert 39 <= bound - flooded <= 41
    monkeypatch.setattr(he, "flood_bits", lambda scheme: 0)
    assert min(noise(product(plan, y, heaviest)[0][0]) for _ in range(4)) >= bound  # and it is not above it


def test_a_result_is_never_the_same_twice():
    plan = he.Plan(SMALL, 1, 2, 3)
    cts = he.encrypt(plan, KEY.public, np.ones((2, 3), np.int64))
    s = np.array([[1, 2]])
    first, second = (he.multiply(KEY.public, [he.Term(plan, cts, s)], Entropy())[0][0] for _ in range(2))
    half = SMALL.ciphertext_bytes // 2
    assert first[-half:] != second[-half:]  # c1: an untouched one would give the weights away


@pytest.mark.parametrize("bits", [(14, 13), (30, 41), (18, 17), (16, 15)])
def test_security(bits):
    scheme = he.Scheme(*bits)
    assert sum(scheme.primes) <= SECURE_BITS[scheme.degree]
    assert sum(scheme.primes[:-1]) >= scheme.plain_bits + scheme.noise_bits + 40


def test_refusals():
    plan = he.Plan(SMALL, 2, 3, 4)
    y, s = np.ones((3, 4), np.int64), np.ones((2, 3), np.int64)
    cts = he.encrypt(plan, KEY.public, y)
    for bad in (y[:2], y * 1.5):
        with pytest.raises(ParameterError):
            he.encrypt(plan, KEY.public, bad)
    with pytest.raises(ParameterError, match="noise would show"):
        product(plan, y, s * 3000)
    with pytest.raises(ParameterError, match="expected a factor"):
        product(plan, y, s[:1])
    with pytest.raises(ParameterError, match="cut alike"):
        he.multiply(KEY.public, [he.Term(plan, cts, s), he.Term(he.Plan(SMALL, 2, 3, 4, 1), cts, s)], Entropy())
    with pytest.raises(WireError, match="expected 1 ciphertexts"):
        he.multiply(KEY.public, [he.Term(plan, cts * 2, s)], Entropy())
    for bad in (
        b"",
        b"x" * 100,
        cts[0][:-8],
        he.encrypt(he.Plan(he.Scheme(16, 13), 2, 3, 4), he.Key(he.Scheme(16, 13)).public, y)[0],
    ):
        with pytest.raises(WireError):
            he.load(SMALL, bad)
    with pytest.raises(WireError):
        he.encrypt(plan, b"no key", y)
    with pytest.raises(ParameterError):
        he.Scheme(51, 0)
    assert "Key(...)" in repr(KEY)


def test_a_result_without_room_for_its_noise_is_refused(monkeypatch):
    plan = he.Plan(SMALL, 1, 2, 3)
    monkeypatch.setattr(he, "flood_bits", lambda scheme: scheme.noise_bits + 60)
    out, _ = product(plan, np.ones((2, 3), np.int64), np.array([[1, 1]]))
    with pytest.raises(WireError, match="noise budget"):
        KEY.decrypt(plan, out)
