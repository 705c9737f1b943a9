import numpy as np
import pytest

pytest.importorskip("numba")
from cloister.errors import ParameterError
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.crypto.owner_ckks import scheme as block
from cloister.mpc.crypto.prg import Prg
from cloister.mpc.crypto.rns.ring import SECURE_BITS, ring

P, E = block.SMALL, Entropy()


@pytest.fixture(scope="module")
def sides():
    key, seed = block.OwnerKey(P, E), E.bytes(32)
    ev = block.Evaluator(P, key.b, key.seed)
    ev.accept(key.switching(4, seed, E), seed)
    return key, ev


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
        for f in (2.0**-40, 0.3e-9, 2.0**-100, 7.3, 2.0**45):
            factor, shift = block.fraction(f)
            assert abs(factor / 2.0**shift / f - 1) < 2**-31
            how = block.Opening("t", 1, 2, k, bits, 0.0, 0, factor, shift, k)
            scaled = block.times_shift(words, how)
            found = [sum(int(w) << (32 * m) for m, w in enumerate(column)) for column in scaled[:, :50].T]
            whole = 32 * len(scaled)  # what is kept
            assert found == [(x * factor * 2 ** max(0, -shift) >> max(0, shift)) % (1 << whole) for x in exact]


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
@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_blinded_refresh_changes_nothing_but_the_scale(sides, polys, n):
    """Pairs, or one alone; what is relinearised is as good as what is not."""
    key, ev = sides
    x = np.random.default_rng(1).uniform(-1, 1, (n, P.slots))
    c, scale, exact = encrypted(key, x), P.scale, x
    if polys > 2:
        c, scale, exact = ev.products(c, c), scale**2, x * x
    how = block.opening(P, "t", n, polys, scale, 1.0, P.scale)
    seed, masks = E.bytes(32), E.bytes(32)
    sent = ev.blind(c[:, :, : how.primes].copy(), how, masks, E)
    assert sent.shape == (-(-n // 2), 2, block.KEEP, P.degree)
    c0 = key.refresh(sent, how, seed, E)
    back = key.read(ev.unblind(c0, seed, how, masks), P.scale, P.slots)
    np.testing.assert_allclose(back[:n], exact, atol=3e-3)
    assert np.abs(back[n:]).max(initial=0) < 3e-3  # beside one that is alone


def test_switching_keys_of_all_powers_that_a_block_needs():
    """Seven polynomials, the sixth power, in the ring of real models: switching adds next to nothing."""
    p = block.STANDARD
    key, seeds = block.OwnerKey(p, E), [E.bytes(32) for _ in range(4)]
    ev = block.Evaluator(p, key.b, key.seed)
    ev.accept(key.switching(7, seeds[0], E), seeds[0])
    x = np.random.default_rng(2).uniform(-1, 1, (2, p.slots))
    thin = 2.0**-8  # of the scale, so that its sixth power fits
    a = block.expand(p, key.encrypt(x * thin, seeds[1], E), seeds[1])
    c = ev.products(ev.products(a, a), a)
    c, scale = ev.products(c, c), (p.scale * thin) ** 6
    how = block.opening(p, "t", 2, 7, scale, 1.0, p.scale)
    sent = ev.blind(np.ascontiguousarray(c[:, :, : how.primes]), how, seeds[2], E)
    back = key.read(ev.unblind(key.refresh(sent, how, seeds[3], E), seeds[3], how, seeds[2]), p.scale, p.slots)
    plain = key.read(c, scale, p.slots)  # by the owner's own powers; noise of encryption at so thin a scale
    off, before = (np.sqrt(((found - x**6) ** 2).mean()) for found in (back, plain))
    assert 1e-5 < before < 1e-3
    assert off < 1.6 * before  # of a pair, each gets the other's imaginary noise: √2


def test_without_switching_keys_nothing_is_opened(sides):
    key, ev = sides
    bare = block.Evaluator(P, key.b, key.seed)
    x = encrypted(key, np.ones((2, P.slots)))
    how = block.opening(P, "t", 2, 3, P.scale**2, 1.0, P.scale)
    with pytest.raises(ParameterError, match="no switching keys for ciphertexts of 3"):
        bare.blind(bare.products(x, x), how, E.bytes(32), E)
    five = np.zeros((1, 5, P.count, P.degree), np.uint32)
    with pytest.raises(ParameterError, match="no switching keys for ciphertexts of 5"):
        ev.switched(five)


def test_dropping_primes_and_halves_against_python():
    from cloister.mpc.crypto.owner_ckks.packed_refresh import dropped, pairs_of

    r, pairs = block.ring_of(P), pairs_of(P)

    def whole(words):
        return [sum(int(w) << (32 * m) for m, w in enumerate(column)) for column in words.T]

    words = block.random_below(E.prg(), block.modulus(P, P.count), P.degree)
    x, D = r.add_words(np.zeros((P.count, P.degree), np.uint32), words), dropped(P, P.count)
    found = whole(r.to_words(pairs.drop(x)))
    Q = block.modulus(P, block.KEEP)
    assert found == [(w + D // 2) // D % Q for w in whole(words)]
    words = block.random_below(E.prg(), Q, P.degree)
    w, N = whole(words), P.degree
    real, imaginary = (whole(half) for half in pairs.halves(words))
    assert real == [2 * w[0]] + [w[i] - w[N - i] + Q for i in range(1, N)]
    turned = [0] + [w[i] + w[N - i] for i in range(1, N)]  # 2·X^(N/2)·b
    assert imaginary == turned[N // 2 :] + [0] + [2 * Q - v for v in turned[1 : N // 2]]


def test_tight_words():
    for p in (block.SMALL, block.STANDARD):
        q = np.array(block.primes_of(p))[:, None]
        x = (E.prg().uint64((2, p.count, p.degree)) % q.astype(np.uint64)).astype(np.uint32)
        words = block.pack_words(p, x)
        assert words.nbytes * 32 == x.nbytes * p.bits
        np.testing.assert_array_equal(block.unpack_words(p, words), x)
        bits = sum(int(v) << (p.bits * i) for i, v in enumerate(x[0, 0, :100]))
        assert sum(int(v) << (32 * i) for i, v in enumerate(words[0, 0])) % (1 << 100 * p.bits) == bits


@pytest.mark.parametrize("bits", [0, 50, 60])
def test_what_the_owner_opens_does_not_depend_on_the_message(sides, bits):
    """Coefficients under the mask, for 0, the bound, and far beyond it: the same distribution (KS at 1 in 10^10)."""
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
    assert np.abs(a - b).max() < 3.4 * np.sqrt(2 / len(views[0]))
    assert how.hiding >= 40


def test_what_does_not_fit_is_refused():
    with pytest.raises(ParameterError, match="does not fit into"):
        block.opening(P, "long", 1, 2, 2.0**80, 16.0, P.scale)
    with pytest.raises(ParameterError, match="not residues"):
        block.unpack_words(P, np.full((1, 1, P.count, P.tight), 2**32 - 1, np.uint32))


def test_secrets_do_not_show(sides):
    assert repr(sides[0]) == "OwnerKey(...)"
