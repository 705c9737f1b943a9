"""Small batches, in which tokens share ciphertexts: what they compute, what they cost, and what a liar gets of them."""

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("numba")
from encoders import Sums, both, micro, shifted, tiny, untied
from encoders import quadratic_shape as shape

from cloister.errors import ParameterError
from cloister.models import polynomial
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.crypto.owner_ckks import rotations, scheme
from cloister.papers.attacks.block_regression import fit_block
from cloister.study import Party
from cloister.testing import Case, check_cost, check_no_errors, check_vectors, run_protocol, values
from cloister.workflows.adapt_model import block_plan, grid_circuit, leakage_bound
from cloister.workflows.adapt_model import encrypted_inference as inference
from cloister.workflows.adapt_model.checkpoint import Answers, Taps
from cloister.workflows.adapt_model.packing import Packing, cheapest, packings
from cloister.workflows.common.query_ledger import Ledger

HUB, ANN = Party("hub"), Party("ann")
CRYPTO = scheme.QUADRATIC
VECTORS = Path(__file__).parents[2] / "vectors" / "grid_inference.json"


def case(encoder, n=5, device="cpu"):
    s = encoder.shape
    x = np.random.default_rng(1).uniform(-1, 1, (n, s.tokens - 1, s.inputs))
    return Case(inference.Params((ANN,), HUB, s, CRYPTO), {HUB: (encoder, None, device), ANN: (x,)})


def wanted(c):
    return inference.ideal(c.params, {p: x[0] for p, x in c.inputs.items()})[ANN]


def grid(monkeypatch):
    """Let owners take it, whatever it costs."""
    monkeypatch.setattr(inference, "cheapest", lambda s, p, n: Packing(s, p, grid_circuit.grid_of(s)))


def five():
    """Of the first block all tokens come out, of the second the class token."""
    little = {"width": 4, "heads": 1, "hidden": 4, "depth": 2, "taps": (2,), "steps": 1, "root_steps": 2}
    return tiny(tokens=5, attention="quadratic", **little)[0]


def small():
    return micro(tokens=3, attention="quadratic")


def check(encoder, n=5):
    c = case(encoder, n)
    run = run_protocol(inference, c, timeout=600.0)
    check_no_errors(run)
    assert np.abs(values(run)[ANN] - wanted(c)).max() < 2e-2  # 8e-4 is the deviation seen
    return values(run)[HUB]


def test_taps_are_those_of_the_plain_student(monkeypatch):
    """Four tokens beside the class token: turns by one, by two, and by both."""
    grid(monkeypatch)
    encoder = five()
    assert check(encoder) == {ANN: 1}


def test_empty_places_get_no_weight(monkeypatch):
    """Three tokens beside the class token in four places; with the mask taken off, the fourth is attended to."""
    grid(monkeypatch)
    little = {"width": 4, "heads": 1, "hidden": 4, "depth": 2, "taps": (2,), "steps": 3, "root_steps": 4}
    encoder, _ = tiny(tokens=4, attention="quadratic", **little)
    check(encoder)
    monkeypatch.setattr(grid_circuit.GridCircuit, "mask", None)
    block_plan.plan.cache_clear()
    c = case(encoder)
    run = run_protocol(inference, c, timeout=600.0)
    block_plan.plan.cache_clear()
    assert np.nanmax(np.abs(values(run)[ANN] - wanted(c))) > 5e-2


@pytest.mark.slow
@pytest.mark.parametrize(("tokens", "norm"), [(3, "pre"), (9, "post"), (17, "pre"), (12, "pre")])
def test_taps_of_other_sizes(tokens, norm, monkeypatch):
    grid(monkeypatch)
    encoder, _ = tiny(norm, tokens=tokens, depth=3, taps=(1, 3), attention="quadratic")
    check(encoder)


@pytest.mark.slow
def test_more_than_a_batch(monkeypatch):
    """The last sample of two batches is its own, as is the first."""
    grid(monkeypatch)
    encoder = five()
    assert check(encoder, CRYPTO.slots // 4 + 1) == {ANN: 2}


def test_vectors(monkeypatch):
    grid(monkeypatch)
    check_vectors(inference, case(small(), n=2), VECTORS, timeout=60.0)


def test_cost(monkeypatch):
    grid(monkeypatch)
    check_cost(inference, case(small(), n=2))


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["emulated", pytest.param("card", marks=pytest.mark.gpu)])
def test_a_card_sends_the_same_messages(kernels, monkeypatch):
    pytest.importorskip("torch")
    import emulated

    emulated.choose(kernels, monkeypatch)
    grid(monkeypatch)
    encoder = five()
    found, plain = (run_protocol(inference, case(encoder, 2, device), timeout=900.0) for device in ("gpu", "cpu"))
    for run in (found, plain):
        check_no_errors(run)
        assert np.abs(values(run)[ANN] - wanted(case(encoder, 2))).max() < 2e-2

    def told(run):
        return [(e.name, e.bytes) for e, _ in run.receipts[ANN].entries if e.kind in ("sent", "received")]

    assert told(found) == told(plain)


def test_an_asking_in_small_batches_that_breaks_off_goes_on(monkeypatch, tmp_path):
    grid(monkeypatch)
    c, add, blocks = case(encoder := five(), 2), Answers.add, []

    def dying(self):
        add(self)
        blocks.append(self.block)
        if len(blocks) == 1:
            raise OSError("the power goes")

    monkeypatch.setattr(Answers, "add", dying)
    runs = []
    for _ in range(2):
        kept = Taps.open(tmp_path / "ann.taps.npz", "these samples", CRYPTO)
        ledger = Ledger(tmp_path / "ledger.json")
        inputs = {HUB: (encoder, ledger, "cpu", tmp_path / "answers"), ANN: (*c.inputs[ANN], kept)}
        runs.append(run_protocol(inference, Case(c.params, inputs), timeout=600.0))
    assert ANN in runs[0].errors
    check_no_errors(runs[1])
    assert blocks == [1, 2]  # the first is not computed again
    assert np.abs(values(runs[1])[ANN] - wanted(c)).max() < 2e-2
    assert json.loads((tmp_path / "ledger.json").read_text()) == {"ann": CRYPTO.slots // 4}  # counted once


# ---- which packing, and its price ------------------------------------------------------------------------------------


def per_batch(packed):
    """Bytes of one batch of six blocks, without keys."""
    return sum(packed.bytes(2 * packed.samples)) - sum(packed.bytes(packed.samples))


def test_a_batch_of_32_moves_less_than_a_25th():
    s = shape(depth=6)
    whole, small = Packing(s, CRYPTO), Packing(s, CRYPTO, 64)
    assert (whole.samples, small.samples) == (4096, 64)
    assert sum(small.bytes(32)) < sum(whole.bytes(32)) / 25  # 27.5
    assert per_batch(small) / 6 < 375e6
    keys = (1 + small.keys * CRYPTO.count) * CRYPTO.count * CRYPTO.tight * 4
    assert keys < 42e6
    rounds = [len(p.plan.rounds) for p in (whole, small)]
    assert rounds[0] == rounds[1]


def test_owners_take_what_moves_least():
    s = shape(depth=6)
    assert [cheapest(s, CRYPTO, n).tokens for n in (1, 40, 1000, 4096, 100_000)] == [64, 64, 64, 1, 1]
    for n in (1, 40, 64, 65, 1000, 2500, 4096):
        assert sum(cheapest(s, CRYPTO, n).bytes(n)) == min(sum(Packing(s, CRYPTO, t).bytes(n)) for t in (1, 64))
    assert "1 batch(es) of up to 64" in cheapest(s, CRYPTO, 40).price(40)
    assert packings(dataclasses.replace(s, tokens=66), CRYPTO) == (1, 128)
    assert packings(dataclasses.replace(s, tokens=66, norm="post"), CRYPTO) == (1,)
    assert packings(dataclasses.replace(s, norm="post"), CRYPTO) == (1, 64)
    assert packings(shape(attention="taylor"), scheme.STANDARD) == (1,)
    with pytest.raises(ParameterError, match="cannot have 32 in a ciphertext"):
        Packing(s, CRYPTO, 32)


def test_a_mask_goes_round_in_one_batch_of_65536_at_most():
    every = Packing(shape(depth=12), CRYPTO, 64).plan.openings
    assert sum(-(-h.count // 2) * CRYPTO.degree * 2.0**-h.hiding for h in every) <= 2**-16
    assert max(h.polys for h in every) <= 3


def test_what_no_packing_is_or_lacks_keys_is_refused():
    encoder = small()
    for tokens, batches, keys in ((3, 1, 1), (2, -1, 2), (2, 1, 1)):

        async def lies(ch, params, x, *, entropy, tokens=tokens, batches=batches, keys=keys):
            side = inference.OwnerSide(ch.sub(str(ch.me)), params, scheme.OwnerKey(CRYPTO, entropy), entropy)
            sent = side.key.switching(3, bytes(32), entropy, keys)
            mine = inference.Key(
                scheme.pack_words(CRYPTO, side.key.b), side.key.seed, scheme.pack_words(CRYPTO, sent), bytes(32),
                batches, tokens,
            )  # fmt: skip
            await side.ch.send(params.provider, mine)
            await side.ch.recv(params.provider, inference.Blinded, c=(None, None, None, None))

        run = run_protocol(inference, case(encoder, 2), roles={ANN: lies}, timeout=4.0)
        assert run.errors[HUB].code == "malformed"


# ---- what a tap tells ------------------------------------------------------------------------------------------------


def test_of_a_tap_only_sums_over_tokens_are_left():
    """An owner that encrypts other things in the class token's slots: N coefficients of them, N / P after the sum."""
    tokens, entropy = 16, Entropy()
    key, seed = scheme.OwnerKey(CRYPTO, entropy), entropy.bytes(32)
    ev = scheme.Evaluator(CRYPTO, key.b, key.seed)
    ev.accept(key.switching(3, seed, entropy, tokens), seed)
    chosen = np.random.default_rng(0).uniform(-1, 1, (1, CRYPTO.slots))
    scale = CRYPTO.scale * 2.0**60
    c = ev.combine([(1 << 60, ev.expand(key.encrypt(chosen, seed, entropy), seed))])
    told, left = (np.abs(key.open(ct[0])[0]) for ct in (c, grid_circuit.added_up(ev, c, rotations.Turns(tokens))))
    inside = np.arange(CRYPTO.degree) % tokens == 0
    assert (told > 2.0**50).mean() > 0.99
    assert (left[inside] > 2.0**50).mean() > 0.98
    assert left[~inside].max() < 2.0**46  # a switching key's noise, added up; 2^44.4 is the plan's bound of it
    s = np.asarray(key.read(grid_circuit.added_up(ev, c, rotations.Turns(tokens)), scale, CRYPTO.slots))
    sums = chosen[:, rotations.slots(CRYPTO.degree, tokens)].sum(axis=1)
    assert np.abs(s[:, rotations.slots(CRYPTO.degree, tokens)] - sums[:, None]).max() < 1e-3


@pytest.mark.parametrize(("at", "seen"), [(4, True), (3, False)])
def test_k5_a_shifted_answer_carries_weights_in_one_coefficient_of_p(at, seen, monkeypatch):
    """X^at / 4 is added to what goes back before a tap: where it is no sum over both tokens, it is gone.

    On the step without ties: with them there is no tap.
    """
    grid(monkeypatch)
    encoder, read, honest, sums = small(), [], (scheme.OwnerKey.refresh, scheme.OwnerKey.read), Sums()
    untied(monkeypatch)

    def refresh(self, cts, how, seed, entropy):
        if sums.follow(cts, how) or how.label != "tap":
            return honest[0](self, cts, how, seed, entropy)
        bits = CRYPTO.scale_bits + grid_circuit.GridCircuit.tap_bits - 2
        return shifted(self, cts, how, seed, entropy, {(1, at): 1 << bits})

    def spy(self, cts, scale, count):
        read.extend(self.open(ct)[0][at] / scale for ct in cts)
        return honest[1](self, cts, scale, count)

    monkeypatch.setattr(scheme.OwnerKey, "refresh", refresh)
    monkeypatch.setattr(scheme.OwnerKey, "read", spy)
    run_protocol(inference, case(encoder, 2), timeout=60.0)
    weight = float(encoder.rounded(CRYPTO.weight_bits).projections[0][0, 1])
    assert abs(weight) > 0.2
    assert abs(read[0] * 4 - (weight if seen else 0.0)) < 0.05


@pytest.mark.slow
def test_regression_gets_nothing_from_what_an_owner_opens(monkeypatch):
    """Of what is nearest to a block's input and output, the normalised values on both sides of attention."""
    grid(monkeypatch)
    encoder, _ = tiny(depth=2, taps=(2,), steps=2, root_steps=3, attention="quadratic")
    n, seen, refresh, sums = CRYPTO.slots // 2, [], scheme.OwnerKey.refresh, Sums()
    at = rotations.slots(CRYPTO.degree, 2)

    def spy(self, cts, how, seed, entropy):
        if not sums.follow(cts, how) and how.label == "normed":
            scale = CRYPTO.scale * 2.0**how.shift / how.factor / 2
            found = [scheme.decode(part, scale, CRYPTO.slots)[at] for ct in cts for part in both(self.open(ct)[0])]
            seen.append(np.concatenate(found).T)  # (samples, what is opened of both tokens)
        return refresh(self, cts, how, seed, entropy)

    monkeypatch.setattr(scheme.OwnerKey, "refresh", spy)
    c = case(encoder, n)
    check_no_errors(run_protocol(inference, c, timeout=600.0))
    b = [v.reshape(n, -1) for v in polynomial.hidden(encoder, c.inputs[ANN][0])]
    assert fit_block(b[1], b[2]) > 0.9  # the attack works on what it should not see
    first, second = seen[0], seen[1]
    width = min(first.shape[1], second.shape[1], b[0].shape[1])
    first, second = first[:, :width], second[:, :width]
    found = fit_block(first, second), fit_block(first, first + (b[1] - b[0])[:, :width])
    assert max(found) <= 0.1  # the second even if somebody told it the increments


def test_noise_at_a_tap_is_under_forty_bits_of_flooding():
    s = shape(depth=6)
    for tokens in (1, 64):
        tap = block_plan.tap_of(s, CRYPTO, 0, tokens)
        switching = 3.2 * 2.0**CRYPTO.bits * math.sqrt(CRYPTO.count * CRYPTO.degree / 12)
        noise = (6 * switching if tokens > 1 else 1) * tokens * 2.0**tap.lift
        assert tap.flood_bits >= math.log2(noise) + scheme.FLOOD_BITS
        precision = 2.0**tap.flood_bits * math.sqrt(CRYPTO.degree / tokens / 3) / tap.scale
        assert 2.0**-12 < precision < 2.0**-10


def test_small_batches_tell_a_liar_hardly_more_per_sample_by_taps_but_by_checks():
    s = shape(depth=6)
    per = {t: leakage_bound.batch_bits(Packing(s, CRYPTO, t)) / Packing(s, CRYPTO, t).samples for t in (1, 64)}
    checks = 6 * 4 * CRYPTO.degree / CRYPTO.slots  # a bit a coefficient, however many samples share them
    assert per[64] - 64 * checks <= 1.2 * (per[1] - checks)
    budget = 1 << 16
    found = leakage_bound.exposure(s, CRYPTO, budget)
    assert found.batches * found.bits == pytest.approx(budget * max(per.values()))  # the packing that tells most
