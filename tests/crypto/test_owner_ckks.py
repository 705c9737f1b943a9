import numpy as np
import pytest

pytest.importorskip("numba")
from cloister.crypto.entropy import Entropy
from cloister.crypto.lattice.ring import SECURE_BITS, ring
from cloister.crypto.owner_ckks import scheme as block
from cloister.crypto.prg import Prg
from cloister.errors import ParameterError

P, E = block.SMALL, Entropy()


@pytest.fixture(scope="module")
def sides():
    key = block.OwnerKey(P, E)
    return key, block.Evaluator(P, key.b, key.seed)


def encrypted(key, x):
    seed = E.bytes(32)
    return block.expand(P, key.encrypt(x, seed, E), seed)


def test_narrow_transforms_are_those_of_the_ring():
    narrow, wide = block.ring_of(P), ring(P.degree, block.primes_of(P))
    seed = E.bytes(32)
    x = wide.uniform(Prg(seed), P.count)
    np.testing.assert_array_equal(narrow.uniform(block.Halves(seed), P.count), x)
    a, b = narrow.forward(x.astype(np.uint32)), wide.forward(x.copy())
    np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(narrow.backward(a), x)
    for narrow_draw, wide_draw in ((narrow.gaussian, Prg.gaussian), (narrow.ternary, Prg.ternary)):
        small = wide_draw(Prg(seed), P.degree)
        np.testing.assert_array_equal(narrow_draw(Prg(seed), P.count), wide.of_small(small, P.count))


def test_long_integers_against_python():
    """Words to residues and back, and multiplied by a fraction, as Python's integers do it."""
    for params in (block.SMALL, block.STANDARD):
        r, k = block.ring_of(params), params.count
        Q = np.prod([int(q) for q in r.primes], dtype=object)
        bits = block.room(params, k)
        words = block.random_words(E.prg(), bits, params.degree)
        exact = [sum(int(w) << (32 * m) for m, w in enumerate(column)) for column in words[:, :50].T]
        residues = r.add_words(r.constant(-5, k), words)
        assert [int(v) for v in residues[-1, :50]] == [(x - 5) % r.primes[-1] for x in exact]
        back = r.to_words(r.add(residues, r.constant(5, k)))
        np.testing.assert_array_equal(back[: len(words)], words)
        assert not back[len(words) :].any()
        drawn = block.random_below(E.prg(), Q, params.degree)
        largest = max(sum(int(w) << (32 * m) for m, w in enumerate(column)) for column in drawn.T)
        assert 0.99 * Q < largest < Q
        few = block.random_below(E.prg(), 3 << 40, 3000)  # a quarter is drawn again, some of it more than once
        counts = np.bincount(few[1] >> np.uint32(8), minlength=3)
        assert len(counts) == 3
        assert counts.min() > 850
        for f in (2.0**-40, 0.3e-9, 2.0**-100, 7.3):
            factor, shift = block.fraction(f)
            assert abs(factor / 2.0**shift / f - 1) < 2**-31
            how = block.Opening("t", 1, 2, k, bits, 0.0, 0, factor, shift, k)
            scaled = block.times_shift(words, how)
            found = [sum(int(w) << (32 * m) for m, w in enumerate(column)) for column in scaled[:, :50].T]
            assert found == [(x * factor) >> shift for x in exact]


def test_parameters_are_secure():
    for p in (block.SMALL, block.STANDARD):
        assert p.count * p.bits <= SECURE_BITS[p.degree]
    with pytest.raises(ParameterError, match="128-bit"):
        block.Parameters(4096, 7)
    with pytest.raises(ParameterError, match="40 bits of hiding"):
        block.Parameters(hiding=20)


def test_arithmetic(sides):
    key, ev = sides
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(2, 5, P.slots))
    a, b = encrypted(key, x), encrypted(key, y)
    w = rng.integers(-500, 500, (3, 5))
    scale = P.scale
    np.testing.assert_allclose(key.read(ev.linear(w, a), scale, P.slots), w @ x, atol=0.5)
    np.testing.assert_allclose(key.read(ev.products(a, b), scale**2, P.slots), x * y, atol=5e-3)
    np.testing.assert_allclose(key.read(ev.dot(a, b)[None], scale**2, P.slots)[0], (x * y).sum(0), atol=1e-2)
    mixed = ev.combine([(3, a), (-1, b)], np.arange(5) * scale)
    np.testing.assert_allclose(key.read(mixed, scale, P.slots), 3 * x - y + np.arange(5)[:, None], atol=5e-3)
    with pytest.raises(ParameterError, match="too large to be exact"):
        ev.linear(np.full((1, 5), 1 << 26), a)


@pytest.mark.parametrize("polys", [2, 3])
def test_a_blinded_refresh_changes_nothing_but_the_scale(sides, polys):
    key, ev = sides
    x = np.random.default_rng(1).uniform(-1, 1, (2, P.slots))
    a = encrypted(key, x)
    c, scale, exact = (a, P.scale, x) if polys == 2 else (ev.products(a, a), P.scale**2, x * x)
    how = block.opening(P, "t", 2, polys, scale, 1.0, P.scale)
    seed, masks = E.bytes(32), E.bytes(32)
    sent = ev.blind(c[:, :, : how.primes].copy(), how, masks, E)
    c0 = key.refresh(sent, how, seed, E)
    np.testing.assert_allclose(key.read(ev.unblind(c0, seed, how, masks), P.scale, P.slots), exact, atol=3e-3)


@pytest.mark.parametrize("bits", [0, 50, 60])
def test_what_the_owner_opens_does_not_depend_on_the_message(sides, bits):
    """Coefficients under the mask, for 0, the bound, and far beyond it: the same distribution (KS at 1 in 10^4)."""
    key, ev = sides
    how = block.opening(P, "t", 1, 2, P.scale, 1.0, P.scale)
    views = []
    for value in (0.0, 1.0):
        c = ev.combine([(1 << bits, encrypted(key, value * np.random.default_rng(0).choice([-1, 1], (1, P.slots))))])
        views.append(
            np.sort(
                np.concatenate(
                    [key.open(ev.blind(c[:, :, : how.primes].copy(), how, E.bytes(32), E)[0])[0] for _ in range(3)]
                )
            )
        )
    grid = np.linspace(min(v[0] for v in views), max(v[-1] for v in views), 300)
    a, b = (np.searchsorted(v, grid) / len(v) for v in views)
    assert np.abs(a - b).max() < 2.23 * np.sqrt(2 / len(views[0]))
    assert how.hiding >= 40


def test_what_does_not_fit_is_refused():
    with pytest.raises(ParameterError, match="does not fit into"):
        block.opening(P, "long", 1, 2, 2.0**80, 16.0, P.scale)
    with pytest.raises(ParameterError, match="no residues"):
        block.unpack(P, np.full((1, 1, P.count, 8), 2**32 - 1, np.uint32))


def test_secrets_do_not_show(sides):
    assert repr(sides[0]) == "OwnerKey(...)"
