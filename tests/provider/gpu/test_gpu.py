"""A card computes what a CPU does, byte for byte; where there is none, a C++ compiler takes the kernels' source."""

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("numba")
pytest.importorskip("torch")
import emulated
import parity

from cloister.errors import ParameterError
from cloister.mpc.crypto.owner_ckks import scheme
from cloister.mpc.crypto.owner_ckks.ring import Halves
from cloister.mpc.crypto.prg import Prg
from cloister.provider.gpu import cuda_device

VECTORS = json.loads((Path(__file__).parents[2] / "vectors" / "owner_ckks.json").read_text())
SMALL = scheme.SMALL


@pytest.fixture(params=["emulated", pytest.param("card", marks=pytest.mark.gpu)])
def where(request, monkeypatch):
    """The kernels, by a C++ compiler or on a GPU."""
    emulated.choose(request.param, monkeypatch)
    yield
    if request.param == "emulated":
        from cloister.provider.gpu.gpu_ring import ring_on_card

        ring_on_card.cache_clear()


@pytest.mark.parametrize("ring", [pytest.param("small"), pytest.param("standard", marks=pytest.mark.slow)])
def test_the_cpu_gives_the_vectors(ring):
    assert parity.hashes(parity.Cpu(parity.RINGS[ring])) == VECTORS[ring]


@pytest.mark.parametrize("ring", [pytest.param("small"), pytest.param("standard", marks=pytest.mark.slow)])
def test_the_card_gives_the_same(where, ring):
    assert parity.hashes(parity.Card(parity.RINGS[ring])) == VECTORS[ring]


def test_ciphers_are_those_of_their_standards(where):
    for name, held in parity.streams():
        assert held, name


def test_noise_is_what_it_should_be(where):
    for what, found, least, most in parity.noise_found(SMALL):
        assert least <= found <= most, what


def test_words_drawn_again_move_no_other():
    """Every second word is drawn again; those that are not stay those of the stream, and each has its own counter."""
    seed, last = bytes(range(32)), parity.OFTEN
    plain, found = Prg(seed).uint64(256), Halves(seed).words(256, last)
    kept = plain <= last
    assert 80 < kept.sum() < 176
    np.testing.assert_array_equal(found[kept], plain[kept])
    assert (found <= last).all()
    halves = Halves(seed)
    np.testing.assert_array_equal(np.concatenate([halves.words(100, last), halves.words(156, last)]), found)


def test_a_card_that_is_not_there_is_one_sentence(monkeypatch):
    monkeypatch.setattr(cuda_device, "why_not", lambda: "PyTorch finds no NVIDIA card on this machine")
    with pytest.raises(ParameterError, match="a GPU was requested, but PyTorch finds no NVIDIA card"):
        cuda_device.check()
    with pytest.raises(ParameterError, match="GPU was requested"):
        cuda_device.Kernels(4096)


def test_what_a_card_cannot_do_is_refused(where):
    from cloister.provider.gpu import gpu

    side = parity.Card(SMALL)
    ev, x = side.ev, side.put(np.zeros((2, 6, 2, SMALL.degree), np.uint32))
    with pytest.raises(ParameterError, match="no product of"):
        ev.products(x, x)
    with pytest.raises(ParameterError, match="too large to be exact"):
        ev.linear(np.full((1, 2), 1 << 27), x)
    with pytest.raises(ParameterError, match="does not fit 2 ciphertexts"):
        ev.linear(np.ones((1, 3), np.int64), x)
    with pytest.raises(ParameterError, match="no switching keys"):
        ev.switched(x)
    with pytest.raises(ParameterError, match="not residues"):
        ev.put(np.full((2, 1, SMALL.tight), 2**32 - 1, np.uint32))
    with pytest.raises(ParameterError, match="rings of 4096"):
        cuda_device.Kernels(2048)
    assert repr(gpu.OwnerKey(SMALL, parity.Entropy())) == "OwnerKey(...)"


def test_shelves_beyond_the_card_lie_in_the_hosts_memory(where, monkeypatch):
    from cloister.provider.gpu import gpu_store as gpu

    N, before = SMALL.degree, gpu.CardPool.taken
    one = 2 * 2 * N * 4
    monkeypatch.setattr(gpu, "PIECE", 2 * one)
    pool, x = gpu.CardPool(before + 3 * 2 * 2 * N * 4), np.arange(3 * 2 * 2 * N, dtype=np.uint32).reshape(3, 2, 2, N)
    inside, outside = pool.shelf(3, 2, 2, N), pool.shelf(3, 2, 2, N)

    def where_it_lies(shelf):
        return [(piece.device.type, len(piece)) for piece in shelf.pieces]

    on_card = cuda_device.DEVICE
    assert where_it_lies(inside) == [(on_card, 3)]
    assert where_it_lies(outside) == [("cpu", 2), ("cpu", 1)]
    assert where_it_lies(gpu.CardPool(gpu.CardPool.taken + 2 * one).shelf(3, 2, 2, N)) == [(on_card, 2), ("cpu", 1)]
    much = gpu.CardPool(gpu.CardPool.taken + 14 * one).shelf(3, 2, 2, N, rarely=True)  # as many at seven primes: 10.5
    assert where_it_lies(much) == [(on_card, 2), (on_card, 1)]
    assert much.inside == [3 * one]
    little = gpu.CardPool(12 * one).shelf(3, 2, 2, N, rarely=True)
    assert where_it_lies(little) == [("cpu", 2), ("cpu", 1)]
    assert little.inside == [0]
    del much, little
    for shelf in (inside, outside):
        shelf.put(0, cuda_device.put(x[:1]))
        shelf.put(1, cuda_device.put(x[1:]))
        np.testing.assert_array_equal(cuda_device.host(shelf.read([1, 2], 2)), x[1:])
        np.testing.assert_array_equal(cuda_device.host(shelf.read([2, 0, 2], 1)), x[[2, 0, 2], :, :1])
    del inside, shelf
    assert gpu.CardPool.taken == before


def test_a_shelf_is_put_aside_for_what_would_not_fit_beside_it(where):
    from cloister.provider.gpu import gpu_store as gpu

    N, before = SMALL.degree, gpu.CardPool.taken
    one = 2 * 2 * N * 4
    pool, x = gpu.CardPool(before + 40 * one), np.arange(3 * 2 * 2 * N, dtype=np.uint32).reshape(3, 2, 2, N)
    shelf = pool.shelf(3, 2, 2, N, rarely=True)
    shelf.put(0, cuda_device.put(x))
    assert gpu.CardPool.taken == before + 3 * one
    pool.make_room(shelf, 37, 2, N)
    assert gpu.CardPool.taken == before + 3 * one  # it fits
    for _ in range(2):
        pool.make_room(shelf, 38, 2, N)
        assert gpu.CardPool.taken == before
        np.testing.assert_array_equal(cuda_device.host(shelf.read([1, 2], 2)), x[1:])
        shelf.put(0, cuda_device.put(x[1:2]))
        shelf.back()
        shelf.back()
        assert gpu.CardPool.taken == before + 3 * one
        np.testing.assert_array_equal(cuda_device.host(shelf.read([0, 1, 2], 2)), x[[1, 1, 2]])
        shelf.put(0, cuda_device.put(x))
    shelf.aside()
    other = pool.shelf(39, 2, 2, N)
    shelf.back()  # there is no room any more
    assert gpu.CardPool.taken == before + 39 * one
    np.testing.assert_array_equal(cuda_device.host(shelf.read([0, 1, 2], 2)), x)
    del shelf, other
    assert gpu.CardPool.taken == before


def test_of_many_fresh_ciphertexts_half_is_kept(where, monkeypatch):
    """c_1 is drawn again from its seed, in any order, at fewer primes, on the card and beside it."""
    from cloister.provider.gpu import gpu_store as gpu

    side, N, K = parity.Card(SMALL), SMALL.degree, SMALL.count
    one, before = K * N * 4, gpu.CardPool.taken  # of a polynomial
    monkeypatch.setattr(gpu, "PIECE", 3 * one)
    seeds, sizes = [parity.seed(n) for n in (20, 21, 22)], (4, 1, 3)
    drawn = [side.ev.expand(side.uniform(30 + i, n, K), s) for i, (n, s) in enumerate(zip(sizes, seeds, strict=True))]
    whole = np.concatenate([cuda_device.host(x) for x in drawn])
    for memory, kinds in ((9, {cuda_device.DEVICE}), (5, {cuda_device.DEVICE, "cpu"}), (1, {"cpu"})):
        pool = gpu.CardPool(before + memory * one, side.ring)
        shelf = pool.shelf(8, 2, K, N, fresh=True)
        assert {x.device.type for x in shelf.pieces} == kinds
        assert sum(x.numel() for x in shelf.pieces) * 4 == 8 * one  # of 16
        with pytest.raises(ParameterError, match="with their seed"):
            shelf.put(0, drawn[0])
        for start, x, s in zip((0, 4, 5), drawn, seeds, strict=True):
            with pytest.raises(ParameterError, match="never written"):
                shelf.read([start], K)
            shelf.put(start, x, s)
        for which, k in ((range(8), K), ([5, 6, 7], 2), ([7, 0, 1, 3, 4, 4, 5, 2], K - 1)):
            np.testing.assert_array_equal(cuda_device.host(shelf.read(which, k)), whole[list(which), :, :k])
        shelf.aside()
        np.testing.assert_array_equal(cuda_device.host(shelf.read(range(3, 7), K)), whole[3:7])
        shelf.back()
        np.testing.assert_array_equal(cuda_device.host(shelf.read(range(3, 7), K)), whole[3:7])
        del shelf
    assert gpu.CardPool.taken == before
    few = gpu.CardPool(before + 1000 * one, side.ring)
    assert few.shelf(8, 2, K, N, fresh=True).pieces[0].shape[1] == 2  # there is room for all of it
    assert few.shelf(600, 2, K, N).pieces[0].shape[1] == 2  # not fresh
    assert few.size(600, 2, K, N, fresh=True) == 600 * one


def test_every_polynomial_is_hidden_anew_each_time(where):
    """Two blinds of the same ciphertexts under the same masks share no polynomial: c_1 would tell the weights."""
    side = parity.Card(SMALL)
    how = scheme.opening(SMALL, "t", 2, 3, SMALL.scale**2, 1.0, SMALL.scale)
    side.ev.accept(side.switching(3), parity.seed(16))
    x = side.put(np.zeros((2, 3, how.primes, SMALL.degree), np.uint32))
    first, second = (cuda_device.host(side.ev.blind(x, how, bytes(32), parity.Entropy())) for _ in range(2))
    same = (first == second).mean(axis=-1)
    assert same.max() < 0.01  # of a polynomial's values, any of them
    first, second = (cuda_device.host(side.ev.flood(x, 30, 2, parity.Entropy())) for _ in range(2))
    assert (first == second).mean(axis=-1).max() < 0.01
    with pytest.raises(ParameterError, match="drawn from an Entropy"):
        side.ev.blind(x, how, bytes(32), np.random.default_rng(0))


def test_what_the_owner_opens_does_not_depend_on_the_message(where):
    """Coefficients under the mask, for 0 and for the bound: the same distribution (KS at 1 in 10^10)."""
    from cloister.provider.gpu import gpu

    entropy = parity.Entropy()
    key = gpu.OwnerKey(SMALL, entropy)
    ev = gpu.Evaluator(SMALL, key.b, key.seed)
    how, views = scheme.opening(SMALL, "t", 2, 2, SMALL.scale, 1.0, SMALL.scale), []
    for value in (0.0, 1.0):
        seed = entropy.bytes(32)
        c = ev.expand(key.encrypt(np.full((2, SMALL.slots), value), seed, entropy), seed)
        sent = ev.blind(ev.cut(c, how.primes), how, entropy.bytes(32), entropy)
        views.append(np.sort(np.concatenate([gpu.centred(SMALL, m) for m in cuda_device.host(key.opened(sent))])))
    grid = np.linspace(min(v[0] for v in views), max(v[-1] for v in views), 300)
    a, b = (np.searchsorted(v, grid) / len(v) for v in views)
    assert np.abs(a - b).max() < 3.4 * np.sqrt(2 / len(views[0]))
