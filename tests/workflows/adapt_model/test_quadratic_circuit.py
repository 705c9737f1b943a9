"""Quadratic attention under encryption: what it computes, what is opened of it, and what it sends."""

import gc
import math
import weakref
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("numba")
from encoders import Sums, both, micro, tiny
from encoders import quadratic_shape as shape

from cloister.errors import ParameterError
from cloister.models import polynomial
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.crypto.owner_ckks import scheme
from cloister.papers import permuted_inference
from cloister.papers.attacks.block_regression import fit_block
from cloister.study import Party
from cloister.testing import Case, check_cost, check_ideal, check_no_errors, check_vectors, run_protocol, values
from cloister.workflows.adapt_model import encrypted_inference as inference
from cloister.workflows.adapt_model.block_messages import traffic
from cloister.workflows.adapt_model.block_plan import plan
from cloister.workflows.adapt_model.quadratic_circuit import QuadraticCircuit, SquaredHeads

HUB, ANN = Party("hub"), Party("ann")
VECTORS = Path(__file__).parents[2] / "vectors" / "quadratic_inference.json"
CRYPTO = scheme.QUADRATIC


def case(encoder, n=5, device="cpu"):
    s = encoder.shape
    x = np.random.default_rng(1).uniform(-1, 1, (n, s.tokens - 1, s.inputs))
    return Case(inference.Params((ANN,), HUB, s, CRYPTO), {HUB: (encoder, None, device), ANN: (x,)})


def wanted(c):
    return inference.ideal(c.params, {p: x[0] for p, x in c.inputs.items()})[ANN]


def agree(found, exact):
    """Noise, and flooding below the tenth bit; taps have unit variance."""
    if exact is not None:
        assert np.abs(found - exact).max() < 2e-2  # 5e-4 is the deviation seen


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_taps_are_those_of_the_plain_student(norm):
    encoder, _ = tiny(norm, attention="quadratic")
    c = case(encoder)
    check_ideal(inference, [Case(c.params, {HUB: (encoder,), ANN: c.inputs[ANN]})], agree=agree, timeout=300.0)


def test_vectors():
    check_vectors(inference, case(micro(attention="quadratic"), n=2), VECTORS, timeout=60.0)


def test_cost():
    check_cost(inference, case(micro(attention="quadratic", steps=2), n=2))


def test_what_attention_held_is_let_go_of_at_once(monkeypatch):
    """Of a large block it is half a card: nothing may wait for the garbage collector."""
    made, alive, init, inverse = [], [], SquaredHeads.__init__, QuadraticCircuit.inverse

    def keep(self, *args):
        made.append(weakref.ref(self))
        init(self, *args)

    async def look(self, *args):
        alive.extend(one() is not None for one in made if not self.counting)
        return await inverse(self, *args)

    monkeypatch.setattr(SquaredHeads, "__init__", keep)
    monkeypatch.setattr(QuadraticCircuit, "inverse", look)
    c = case(micro(attention="quadratic"), n=2)
    plan(c.params.shape, CRYPTO)
    made.clear()
    gc.disable()
    try:
        check_no_errors(run_protocol(inference, c, timeout=60.0))
    finally:
        gc.enable()
    assert alive
    assert not any(alive)


@pytest.mark.slow
def test_predictions_of_a_whole_encoder_are_those_of_its_plain_student():
    """Three blocks, a whole batch: a linear head on the taps gives the same class on 99 % of the samples."""
    encoder, _ = tiny(depth=3, taps=(1, 3), rank=4, attention="quadratic")
    c = case(encoder, n=CRYPTO.slots)
    run = run_protocol(inference, c, timeout=600.0)
    check_no_errors(run)
    found, exact = values(run)[ANN], wanted(c)
    head = np.random.default_rng(0).normal(size=(8, 4))
    same = (found.reshape(len(found), -1) @ head).argmax(1) == (exact.reshape(len(found), -1) @ head).argmax(1)
    assert same.mean() >= 0.99


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["emulated", pytest.param("card", marks=pytest.mark.gpu)])
def test_a_card_sends_the_same_messages(kernels, monkeypatch):
    pytest.importorskip("torch")
    import emulated

    emulated.choose(kernels, monkeypatch)
    encoder = micro(attention="quadratic")
    found, plain = (run_protocol(inference, case(encoder, 2, device), timeout=600.0) for device in ("gpu", "cpu"))
    for run in (found, plain):
        check_no_errors(run)
        agree(values(run)[ANN], wanted(case(encoder, 2)))

    def told(run):
        return [(e.name, e.bytes) for e, _ in run.receipts[ANN].entries if e.kind in ("sent", "received")]

    assert told(found) == told(plain)


# ---- the plan --------------------------------------------------------------------------------------------------------


def megabytes(s, crypto):
    """Per sample and block, from the difference of two depths."""
    sizes = []
    for depth in (1, 2):
        _, down, up = traffic(plan(shape(s.tokens, s.width, s.heads, depth, s.norm, s.attention), crypto, 0).openings)
        sizes.append((down + up) * crypto.tight * 4 / crypto.slots / 1e6)
    return sizes[1] - sizes[0]


def test_a_block_sends_what_was_promised():
    small, large = shape(), shape(197, 768, 12)
    assert megabytes(small, CRYPTO) <= 2.75
    assert megabytes(large, CRYPTO) <= 33
    assert megabytes(small, CRYPTO) < 0.55 * megabytes(shape(attention="taylor"), scheme.STANDARD)
    rounds = [len(plan(shape(depth=depth), CRYPTO, 0).rounds) for depth in (1, 2)]
    assert rounds[1] - rounds[0] == 19


def test_neither_activations_nor_scores_are_opened():
    """Nothing but normalised values and weighted sums has T·d openings; nothing at all has T²."""
    s = shape(depth=2)
    opened = Counter()
    for how in plan(s, CRYPTO, 0).openings:
        opened[how.label] = max(opened[how.label], how.count)
        assert how.polys <= 3
        assert how.hiding >= CRYPTO.hiding
    T, d, H = s.tokens, s.width, s.heads
    assert opened == {"variance": T, "root": T, "normed": T * d, "sums": T * d, "division": H * T, "tap": d}
    assert CRYPTO.count * CRYPTO.bits <= 214


def test_a_mask_goes_round_in_one_batch_of_65536_at_most():
    for s in (shape(), shape(197, 768, 12)):
        lost = sum(-(-h.count // 2) * CRYPTO.degree * 2.0**-h.hiding for h in plan(s, CRYPTO, 0).openings)
        assert 12 * lost <= 2**-16  # twelve blocks


def test_a_ring_that_is_too_short_is_refused_before_anything_is_sent():
    encoder = micro(attention="quadratic")
    with pytest.raises(ParameterError, match="too small for quadratic attention"):
        plan(encoder.shape, scheme.SMALL)
    with pytest.raises(ParameterError, match="published mode opens every block"):
        permuted_inference.Params((ANN,), HUB, encoder.shape, CRYPTO)
    with pytest.raises(ParameterError, match="attention is one of taylor, quadratic"):
        shape(attention="cubic")


# ---- dropping primes between openings --------------------------------------------------------------------------------


def test_what_is_left_after_a_prime_is_dropped_is_the_value_divided_by_it():
    entropy = Entropy()
    key = scheme.OwnerKey(CRYPTO, entropy)
    ev = scheme.Evaluator(CRYPTO, key.b, key.seed)
    seed = entropy.bytes(32)
    ev.accept(key.switching(3, seed, entropy), seed)
    values = np.random.default_rng(0).uniform(-1, 1, (2, 64))
    x = ev.expand(key.encrypt(values, seed, entropy), seed)
    long = ev.combine([(1 << 20, x)])
    K = CRYPTO.count
    square = ev.switched(ev.products(long, long))
    for keep in (K - 1, K - 2):
        short = ev.dropped(square, keep)
        assert short.shape == (2, 2, keep, CRYPTO.degree)
        lost = math.prod(scheme.primes_of(CRYPTO)[keep:])
        found = key.read(short, (CRYPTO.scale * 2.0**20) ** 2 / lost, 64)
        assert np.abs(found - values**2).max() < 1e-4  # rounding is 2^11 in a slot, at a scale of 2^40 or more
        rest = key.read(short, (CRYPTO.scale * 2.0**20) ** 2, 64)
        assert np.abs(rest).max() < 1e-6  # not the value itself


# ---- the attack ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_regression_gets_nothing_from_what_an_owner_opens(monkeypatch):
    """Of what is nearest to a block's input and output, the normalised values on both sides of attention."""
    encoder, _ = tiny(depth=2, taps=(2,), steps=2, root_steps=3, attention="quadratic")
    seen, refresh, sums = [], scheme.OwnerKey.refresh, Sums()

    def spy(self, cts, how, seed, entropy):
        if not sums.follow(cts, how) and how.label == "normed":
            scale = CRYPTO.scale * 2.0**how.shift / how.factor / 2
            parts = [part for ct in cts for part in both(self.open(ct)[0])]
            seen.append(np.stack([scheme.decode(part, scale, self.params.slots) for part in parts], axis=1))
        return refresh(self, cts, how, seed, entropy)

    monkeypatch.setattr(scheme.OwnerKey, "refresh", spy)
    c = case(encoder, n=2048)
    check_no_errors(run_protocol(inference, c, timeout=600.0))
    b = [v.reshape(2048, -1) for v in polynomial.hidden(encoder, c.inputs[ANN][0])]
    assert fit_block(b[1], b[2]) > 0.9  # the attack works on what it should not see
    first, second = seen[0][:2048], seen[1][:2048]
    width = min(first.shape[1], second.shape[1])
    assert fit_block(first[:, :width], second[:, :width]) <= 0.1
    true = b[1] - b[0]
    assert fit_block(first, first + true[:, : first.shape[1]]) <= 0.1  # even if somebody told it the increments
