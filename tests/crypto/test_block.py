import numpy as np
import pytest

pytest.importorskip("numba")
from cloister.crypto import block
from cloister.crypto.entropy import Entropy
from cloister.crypto.lattice import SECURE_BITS, ring
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
    x = wide.uniform(E.prg(), P.count)
    a, b = narrow.forward(x.copy()), wide.forward(x.copy())
    np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(narrow.backward(a), x)
    limbs = E.prg().uint64((4, P.degree)).astype(np.int64) >> 22
    np.testing.assert_array_equal(narrow.limbs_to_residues(limbs, 4), wide.limbs_to_residues(limbs, 4))


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
    sent, kept = ev.blind(c, how, E)
    seed = E.bytes(32)
    c0, inside = key.refresh(sent, how, seed, E)
    assert inside
    np.testing.assert_allclose(key.read(ev.unblind(c0, seed, kept), P.scale, P.slots), exact, atol=3e-3)
    assert not key.refresh(ev.combine([(1 << 30, sent)]), how, seed, E)[1]  # far out of range: noticed


def test_what_the_owner_opens_does_not_depend_on_the_message(sides):
    """Coefficients under the mask, for messages of 0 and of the bound: the same distribution (KS at 1 %)."""
    key, ev = sides
    how = block.opening(P, "t", 1, 2, P.scale, 1.0, P.scale)
    views = []
    for value in (0.0, 1.0):
        c = encrypted(key, np.full((1, P.slots), value))
        views.append(np.sort(np.concatenate([key.open(ev.blind(c, how, E)[0][0])[0] for _ in range(3)])))
    grid = np.linspace(min(v[0] for v in views), max(v[-1] for v in views), 300)
    a, b = (np.searchsorted(v, grid) / len(v) for v in views)
    assert np.abs(a - b).max() < 1.63 * np.sqrt(2 / len(views[0]))
    assert how.hiding >= 40


def test_what_does_not_fit_is_refused():
    with pytest.raises(ParameterError, match="does not fit into"):
        block.opening(P, "long", 1, 2, 2.0**80, 16.0, P.scale)
    with pytest.raises(ParameterError, match="no residues"):
        block.unpack(P, np.full((1, 1, P.count, 8), 2**32 - 1, np.uint32))


def test_secrets_do_not_show(sides):
    assert repr(sides[0]) == "OwnerKey(...)"
