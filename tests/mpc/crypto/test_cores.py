"""Several cores: the same results as with one, in order, charged to whoever asked."""

import threading
import time

import numpy as np
import pytest

from cloister.mpc.crypto import cores
from cloister.mpc.crypto.ckks import scheme as ckks
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.crypto.rns.slots import embedding
from cloister.papers import published_training


@pytest.fixture
def three(monkeypatch):
    monkeypatch.setattr(cores, "count", lambda: 3)
    monkeypatch.setattr(cores, "LEAST", 1)
    cores._pool.cache_clear()
    yield
    cores._pool().shutdown()
    cores._pool.cache_clear()


def test_results_come_in_order_from_several_threads(three):
    gate = threading.Barrier(3, timeout=30)  # passed only if three threads work at the same time

    def action(i):
        if i < 3:
            gate.wait()
        return i, threading.get_ident()

    found = cores.each(action, range(8))
    assert [i for i, _ in found] == list(range(8))
    assert len({thread for _, thread in found}) == 3
    assert cores.each(action, []) == []


def test_slices_are_all_rows_once(three):
    for k in (1, 2, 3, 7, 20):
        seen = np.zeros(k, int)
        cores.rows(lambda s, seen=seen: np.add.at(seen, np.arange(s.start, s.stop), 1), k, 10)
        np.testing.assert_array_equal(seen, 1)


def test_what_others_compute_is_charged_to_who_asked(three):
    def work(_):
        began = time.thread_time()
        while time.thread_time() - began < 0.05:
            pass

    before, own = cores.cpu_seconds(), time.thread_time()
    cores.each(work, range(6))
    assert cores.cpu_seconds() - before >= 0.29  # six times 0.05
    assert time.thread_time() - own < 0.29


def test_a_failure_is_raised_after_all_have_stopped(three):
    running = []

    def action(i):
        running.append(i)
        time.sleep(0.05)
        running.remove(i)
        if i == 1:
            raise ValueError("one of them")

    with pytest.raises(ValueError, match="one of them"):
        cores.each(action, range(3))
    assert running == []
    assert cores.each(lambda i: i, range(3)) == [0, 1, 2]


def test_a_piece_is_not_divided_once_more(three):
    def outer(_):
        here = threading.get_ident()
        return {t for t in cores.each(lambda _: threading.get_ident(), range(4))} == {here}

    assert all(cores.each(outer, range(3)))


def test_ciphertexts_do_not_depend_on_the_number_of_cores(three, monkeypatch):
    P = published_training.choose_ring(2)
    c, prg = ckks.context(P), Entropy().prg()
    polys = np.stack([c.ring.uniform(prg, P.top) for _ in range(2)])
    b, a = (np.stack([c.ring.uniform(prg, len(c.primes)) for _ in range(P.digits)]) for _ in range(2))
    keys = [ckks.SwitchingKey(b, a), ckks.SwitchingKey(b, a, c.galois(1))]
    words = c.ring.integers(c.ring.uniform(prg, P.base))

    def computed():
        digits = c.bases.digits(polys[1]).copy()
        slots = np.stack(cores.each(embedding(P.degree).to_slots, [words] * 3))
        there, back = c.ring.forward(polys[0].copy()), c.ring.backward(polys[0].copy())
        return [digits, c.bases.switched(digits, keys), c.bases.rescaled(polys, 1), there, back, slots]

    made = computed()
    monkeypatch.setattr(cores, "count", lambda: 1)
    for one, other in zip(made, computed(), strict=True):
        np.testing.assert_array_equal(one, other)
