"""Validation under encryption: one number, the twin's own."""

import dataclasses
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("numba")
sys.path.insert(0, str(Path(__file__).parents[2] / "old_steps"))

import threshold_ckks as old
from collective import HUB, names, whole

from cloister.errors import DataError, ParameterError, ProtocolAbort, RefusedError
from cloister.models import cellcnn
from cloister.mpc.crypto.ckks import scheme as ckks
from cloister.mpc.crypto.entropy import Entropy
from cloister.rehearsal.rehearsal import Fault
from cloister.testing import Case, check_cost, check_lies, check_no_errors, check_view, run_protocol, values
from cloister.workflows.train_cellcnn import encrypted_training, encrypted_validation, level_schedule
from cloister.workflows.train_cellcnn.encrypted_validation import Params, ring_for

CONFIG = cellcnn.Config(markers=3, filters=2, classes=2, batch=12, steps=2, learning_rate=0.3, momentum=0.5)
PARTIES = names(2)


def data(seed=0, samples=9):
    rng = np.random.default_rng(seed)
    found = {}
    for p in PARTIES:
        y = rng.integers(0, 2, (3, CONFIG.batch))
        X = rng.normal(0, 0.7, (3, CONFIG.batch, 3))
        X[..., 0] += 1.5 * y - 0.7
        Y = cellcnn.one_hot(y, 2)
        found[p] = (X[:2], Y[:2], None, (X[2][:samples], Y[2][:samples]))
    return found


def params(**options):
    given = {"open_model": False, "validate_every": 1, "held_out": 9, **options}
    return encrypted_training.Params(PARTIES, HUB, ring_for(CONFIG, 2), CONFIG, **given)


def test_only_rings_with_room_and_inputs_that_fit():
    with pytest.raises(ParameterError, match="exact to"):
        Params(PARTIES, HUB, level_schedule.chain(8192, scale_bits=56, value_bits=3), CONFIG, 9)
    with pytest.raises(ParameterError, match="inputs"):
        Params(PARTIES, HUB, ring_for(CONFIG, 2), CONFIG, 0)
    with pytest.raises(ParameterError, match="fewer steps"):
        ring_for(dataclasses.replace(CONFIG, steps=10**9, learning_rate=1.0, momentum=0.99), 2)
    with pytest.raises(DataError, match="held-out"):
        encrypted_validation.check_samples(params().validation, np.zeros((8, 3)), np.zeros((8, 2)))


def test_the_ideal_is_the_mean_of_the_sites():
    w, inputs = cellcnn.initial(CONFIG), data()
    p = params().validation
    found = encrypted_validation.ideal(p, {i: (w, *inputs[i][3]) for i in PARTIES})
    X, Y = (np.concatenate([inputs[i][3][k] for i in PARTIES]) for k in (0, 1))
    assert found[HUB] == pytest.approx(((cellcnn.sigmoid(CONFIG, X @ w.M) - Y) ** 2).mean())


@pytest.mark.slow
def test_losses_are_the_twins_and_nothing_else_is_opened():
    p, inputs = params(patience=2), data()  # so that the first step's model is sealed too, and training goes on with it
    case = Case(p, inputs)
    run = run_protocol(encrypted_training, case, timeout=300)
    check_no_errors(run)
    for steps in (1, 2):
        config = dataclasses.replace(CONFIG, steps=steps)
        twin = cellcnn.train(config, [(inputs[i][0][:steps], inputs[i][1][:steps]) for i in PARTIES])
        wanted = encrypted_validation.ideal(p.validation, {i: (twin, *inputs[i][3]) for i in PARTIES})[HUB]
        for party in (HUB, *PARTIES):
            assert values(run)[party].losses[steps] == pytest.approx(wanted, abs=6 * p.validation.error)
    assert 6 * p.validation.error < 1e-3
    opened = {e.name for r in run.receipts.values() for e, _ in r.entries if e.kind == "opened"}
    assert opened == {
        "the squared error on all sites' held-out inputs",
        "random combinations of the encrypted model's coefficients, flooded",
        "differences between the copies of the encrypted model, flooded",
    }
    found = {party: len([e for e, _ in r.entries if e.kind == "sent"]) for party, r in run.receipts.items()}
    assert found["site-0"] >= encrypted_training.cost(p)[PARTIES[0]][0]


@pytest.mark.slow
def test_cost_view_death_and_refusal():
    trained = run_protocol(encrypted_training, Case(params(validate_every=0, held_out=0), data()), timeout=300)
    check_no_errors(trained)
    p, kept = params().validation, values(trained)

    def case(seed=0):
        return Case(p, {i: (kept[i].model[0], kept[i].keys, *data(seed)[i][3]) for i in PARTIES})

    check_cost(encrypted_validation, case())
    check_view(encrypted_validation, case(1), case(2))
    fault = Fault("kill", "site-1", "hub", "encrypted_validation.Squares")
    broken = run_protocol(encrypted_validation, case(), faults=[fault], timeout=8)
    assert set(broken.errors) == {HUB, "site-0"}
    assert all(isinstance(e, ProtocolAbort) for e in broken.errors.values())

    async def refusing(ch, params, *inputs, entropy):
        return await encrypted_validation.holder(ch, params, *inputs, entropy=entropy, consent=frozenset())

    refused = run_protocol(encrypted_validation, case(), roles={PARTIES[0]: refusing}, timeout=8)
    assert isinstance(refused.errors[PARTIES[0]], RefusedError)


@pytest.mark.slow
def test_n4_what_a_site_sends_shows_no_single_input():
    """Squares of one input, and a stored gradient of one sample in their place: before, the opened loss was theirs."""
    trained = run_protocol(encrypted_training, Case(params(validate_every=0, held_out=0), data()), timeout=300)
    check_no_errors(trained)
    p, kept, (X, Y, _, held) = params().validation, values(trained), data()[PARTIES[0]]
    c, L, site = ckks.context(p.ckks), p.layout, kept[PARTIES[0]]
    s = whole(p.ckks, {i: kept[i].keys.secret for i in PARTIES})
    select = np.zeros((1, 1, L.I))
    select[..., 4] = 1
    mask = c.encode(L.spread(select), p.ckks.base, 2.0**20)

    def shown(raw, scale):
        """Slots of one input, as a loss made of them would have shown."""
        slots = c.decrypt(s, c.multiply_plain(c.cipher(raw, scale), mask))
        return np.array([slots[L.at(j, 0, 4)] for j in range(3)])

    squares, _ = c.raw(encrypted_validation.squares(p, site.model[0], *held, site.keys))
    new, _ = encrypted_validation.padded_squares(p, site.model[0], *held, site.keys, Entropy())
    before, now = shown(squares, p.scales[1])[0], shown(new, p.scales[1])[0]
    assert 0 < abs(before) < 1e4
    assert abs(now) > 2.0**25 * abs(before)
    (stored,) = old.gradient_ciphers(c, L, site.model, X[0], Y[0], site.keys, Entropy())
    x = shown(stored, p.ckks.scale)
    assert abs(x @ X[0][4]) > 0.999 * np.linalg.norm(x) * np.linalg.norm(X[0][4])  # x·E of one sample


@pytest.mark.slow
def test_lies_in_a_validation():
    """All that finish have one number; if the aggregator lied, it is the right one."""
    trained = run_protocol(encrypted_training, Case(params(validate_every=0, held_out=0), data()), timeout=300)
    check_no_errors(trained)
    p, kept = params().validation, values(trained)
    case = Case(p, {i: (kept[i].model[0], kept[i].keys, *data()[i][3]) for i in PARTIES})
    honest = run_protocol(encrypted_validation, case, timeout=60)
    wanted = values(honest)[PARTIES[0]]

    def one_number(lie, found):
        numbers = {float(v) for v in found.values() if v is not None}
        assert max(numbers, default=0.0) - min(numbers, default=0.0) <= 1e-12
        if lie.liar == HUB and numbers:
            assert min(numbers) == pytest.approx(wanted, abs=12 * p.error)

    lies = check_lies(
        encrypted_validation,
        [case],
        right=one_number,
        liars=[HUB, *PARTIES],
        only=lambda lie: lie.name.startswith("encrypted_validation."),
        timeout=10.0,
        within=400.0,
    )
    assert lies.tried >= 5
    assert lies.aborted >= 4
