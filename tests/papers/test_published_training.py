"""PriCell's own circuit: on plain vectors it is the twin exactly; encrypted it gives the same weights."""

import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("numba")
sys.path.insert(0, str(Path(__file__).parents[0]))

from collective import HUB, names

from cloister.errors import ParameterError, ProtocolAbort, RefusedError
from cloister.models import cellcnn
from cloister.mpc.crypto.ckks import scheme as ckks
from cloister.mpc.crypto.entropy import Entropy
from cloister.papers import published_circuit, published_training
from cloister.rehearsal.rehearsal import Fault
from cloister.testing import Case, check_no_errors, run_protocol, values
from cloister.workflows.train_cellcnn.key_store import KeyStore


class PlainOps:
    """The operations on plain complex vectors."""

    def rotate(self, x, steps):
        return np.conj(x) if steps == published_circuit.CONJUGATE else np.roll(x, -steps)

    def add(self, x, y):
        return x + y

    def times(self, x, y):
        return x * y

    def times_i(self, x):
        return published_circuit.iota(len(x)) * x

    def times_plain(self, x, v, *, like=None):
        return x * v

    def add_plain(self, x, v):
        return x + v

    def join(self, x, y):
        return x + y


@pytest.mark.parametrize(
    ("m", "h", "o", "n", "slots"),
    [
        (5, 2, 2, 6, 16384),
        (38, 8, 3, 100, 16384),  # three classes in the paper's ring: nothing is padded to powers of two
        (16, 8, 3, 50, 16384),
        (7, 3, 3, 9, 16384),
        (37, 16, 2, 169, 32768),  # the paper's largest; it takes a ring of 2^16
        (12, 64, 2, 16, 16384),
    ],
)
def test_the_circuit_on_plain_vectors_is_the_twin(m, h, o, n, slots):
    config = cellcnn.Config(m, h, o, n, steps=3, learning_rate=0.2)
    L, ops, rng = published_circuit.Layout(config, slots, 2), PlainOps(), np.random.default_rng(0)
    repack = L.repacking(1.0)
    w = cellcnn.initial(config)
    C, W, gC, gW = L.conv_slots(w.W) + 0j, L.dense_slots(w.V) + 0j, None, None
    for _ in range(3):
        data = [(rng.normal(0, 0.5, (n, m)), cellcnn.one_hot(rng.integers(0, o, n), o)) for _ in range(2)]
        made = []
        for X, Y in data:
            D = repack.apply_plain(published_circuit.forward(ops, L, C, W, gW, gC, X))
            made.append(published_circuit.backward(ops, L, D, X, Y))
        gW, gC = sum(a for a, _ in made), sum(b for _, b in made)
        C, W = C - gC, W - gW
        w = cellcnn.update(config, w, np.mean([cellcnn.gradient(config, w.M, X, Y) for X, Y in data], axis=0))
        np.testing.assert_allclose(C[: L.csize], L.conv_slots(w.W)[: L.csize], atol=1e-12)  # format kept, too
        np.testing.assert_allclose(W, L.dense_slots(w.V), atol=1e-12)


def test_every_rotation_that_is_made_has_a_key():
    config = cellcnn.Config(9, 3, 3, 11, steps=1)
    L = published_circuit.Layout(config, 16384, 2)

    class Spy(PlainOps):
        def __init__(self):
            self.seen = set()

        def rotate(self, x, steps):
            self.seen.add(steps)
            return super().rotate(x, steps)

    ops, zero = Spy(), np.zeros(16384, complex)
    published_circuit.forward(ops, L, zero, zero, zero, zero, np.zeros((11, 9)))
    published_circuit.backward(ops, L, zero, np.zeros((11, 9)), np.zeros((11, 3)))
    assert ops.seen == set(L.rotations)


def test_batches_beyond_the_slots_are_refused():
    for h, n in ((8, 512), (16, 169), (64, 169)):
        with pytest.raises(ParameterError, match="slots, the ring has 16384"):
            published_circuit.Layout(cellcnn.Config(38, h, 2, n), 16384, 2)


@pytest.mark.parametrize("count", [1, 2, 3, 7, 8, 100, 169])
def test_sums_of_rotations(count):
    x = np.random.default_rng(count).normal(size=512)
    found = published_circuit.add_rotated(PlainOps(), x, count, 2)
    np.testing.assert_allclose(found, sum(np.roll(x, -2 * i) for i in range(count)), atol=1e-12)


def data_for(config, n):
    rng = np.random.default_rng(0)
    found = {}
    for p in names(n):
        y = rng.integers(0, config.classes, (config.steps, config.batch))
        X = rng.normal(0, 1, (config.steps, config.batch, config.markers))
        X[..., 0] += 1.5 * y - 0.7
        found[p] = (X, cellcnn.one_hot(y, config.classes))
    return found


def test_without_consent_nothing_starts():
    config = cellcnn.Config(5, 2, 2, 6, steps=1)
    p = published_training.Params(names(2), HUB, published_training.choose_ring(2), config)

    async def refusing(ch, params, X, Y, *, entropy):
        return await published_training.holder(ch, params, X, Y, entropy=entropy, consent=frozenset())

    run = run_protocol(published_training, Case(p, data_for(config, 2)), roles={names(2)[0]: refusing}, timeout=5)
    assert isinstance(run.errors[names(2)[0]], RefusedError)


@pytest.mark.slow
def test_encrypted_weights_equal_the_twin():
    config = cellcnn.Config(5, 2, 2, 6, steps=2, learning_rate=0.1)
    p = published_training.Params(names(2), HUB, published_training.choose_ring(2), config)
    data = data_for(config, 2)
    run = run_protocol(published_training, Case(p, data), timeout=600)
    check_no_errors(run)
    twin = published_training.ideal(p, data)[HUB]
    for party in (HUB, *names(2)):
        np.testing.assert_allclose(values(run)[party].weights.W, twin.W, atol=1e-3)
        np.testing.assert_allclose(values(run)[party].weights.V, twin.V, atol=1e-3)
    cost = published_training.cost(p)
    for party, (messages, _) in cost.items():
        sent = [e for e, _ in run.receipts[party].entries if e.kind == "sent" and not e.name.startswith("channel.")]
        assert len(sent) == messages


@pytest.mark.slow
@pytest.mark.parametrize("name", ["published_training.Packed", "published_training.Gradients"])
def test_a_death_in_the_second_step_aborts_by_name_and_the_run_resumes(name, tmp_path):
    config = cellcnn.Config(5, 2, 2, 6, steps=2, learning_rate=0.1)
    p = published_training.Params(names(2), HUB, published_training.choose_ring(2), config)
    data = data_for(config, 2)

    def case():
        stores = {party: KeyStore(tmp_path, party) for party in (HUB, *names(2))}
        return Case(p, {HUB: (stores[HUB],)} | {i: (*data[i], stores[i]) for i in names(2)})

    fault = Fault("kill", "site-1", "hub", name, nth=1)
    broken = run_protocol(published_training, case(), faults=[fault], timeout=30)
    assert set(broken.errors) == {HUB, "site-0"}
    assert all(isinstance(e, ProtocolAbort) and e.line for e in broken.errors.values())
    again = run_protocol(published_training, case(), timeout=300)
    check_no_errors(again)
    made = [e.name for e, _ in again.receipts["site-0"].entries if e.kind == "sent"]
    assert "collective_key.KeyShare" not in made
    assert made.count("published_training.Gradients") == 1
    twin = published_training.ideal(p, data)[HUB]
    np.testing.assert_allclose(values(again)[HUB].weights.W, twin.W, atol=1e-3)
    np.testing.assert_allclose(values(again)[HUB].weights.V, twin.V, atol=1e-3)


def test_a_site_goes_on_only_from_where_it_has_come_itself(tmp_path):
    config = cellcnn.Config(5, 2, 2, 6, steps=9, learning_rate=0.1)
    p = published_training.Params(names(2), HUB, published_training.choose_ring(2), config)
    c, low = ckks.context(p.ckks), p.ckks.primes_at(published_training.START)
    _, public = ckks.own_key(p.ckks, Entropy())
    made = [c.encrypt(public, np.full(p.ckks.slots, v), low, p.ckks.scale, Entropy()) for v in (1.0, 2.0, 0.25, 0.5)]
    C, W, gC, gW = (published_training.pack(c, ct, low) for ct in made)
    store = KeyStore(tmp_path, names(2)[0])
    first = published_training.Initial((), (), gC, gW)
    with pytest.raises(ProtocolAbort, match="has not reached"):
        published_training.followed(p, published_training.Start(1, resumed=True), first, store)
    begin = published_training.Initial(C, W, (), ())
    state = published_training.followed(p, published_training.Start(0, resumed=True), begin, store).keep(p, store)
    assert state.step == 0
    after = published_training.followed(p, published_training.Start(1, resumed=True), first, store).keep(p, store)
    wanted = c.subtract(made[0], made[2])
    np.testing.assert_array_equal(c.raw(after.C)[0], c.raw(wanted)[0])
    again = published_training.followed(p, published_training.Start(1, resumed=True), first, store)
    np.testing.assert_array_equal(c.raw(again.C)[0], c.raw(wanted)[0])  # its own, not once more
    with pytest.raises(ProtocolAbort, match="has not reached"):
        published_training.followed(p, published_training.Start(4, resumed=True), first, store)
