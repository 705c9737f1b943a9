"""Encrypted training and prediction: equal to the clear twin, resumable, and silent."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("numba")

from collective import HUB, names, whole

from cloister.errors import DataError, ParameterError, ProtocolAbort, RefusedError
from cloister.models import cellcnn
from cloister.mpc.crypto.ckks import scheme as ckks
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.crypto.prg import Prg
from cloister.mpc.threshold_ckks import collective_range, equal_copies, key_switch
from cloister.rehearsal.rehearsal import Fault
from cloister.study import Party
from cloister.testing import (
    Case,
    check_abort,
    check_cost,
    check_ideal,
    check_lies,
    check_no_errors,
    check_vectors,
    check_view,
    fixed_entropy,
    run_protocol,
    values,
)
from cloister.workflows.predict_cellcnn import oblivious_prediction, private_prediction
from cloister.workflows.train_cellcnn import (
    cellcnn_circuit,
    encrypted_training,
    level_schedule,
    training_opening,
    training_refreshes,
    training_state,
)
from cloister.workflows.train_cellcnn import workflow as train_cellcnn
from cloister.workflows.train_cellcnn.encrypted_training import Params
from cloister.workflows.train_cellcnn.encrypted_validation import ring_for
from cloister.workflows.train_cellcnn.key_store import KeyStore

CONFIG = cellcnn.Config(markers=3, filters=2, classes=2, batch=12, steps=2, learning_rate=0.1, momentum=0.5)
RING = level_schedule.chain(8192, scale_bits=56, value_bits=3, parties=3)  # the smallest ring that carries a step
LARGE = level_schedule.chain(16384, scale_bits=88, parties=3)  # the smallest one that leaves something to open
PARTIES = names(3)
VECTORS = Path(__file__).parents[2] / "vectors"


def batches(config, seed=0):
    rng = np.random.default_rng(seed)
    found = {}
    for p in PARTIES:
        y = rng.integers(0, config.classes, (config.steps, config.batch))
        X = rng.normal(0, 1, (config.steps, config.batch, config.markers))
        X[..., 0] += 1.5 * y - 0.7
        found[p] = (X, cellcnn.one_hot(y, config.classes))
    return found


def params(config=CONFIG, ring=RING, **options):
    return Params(PARTIES, HUB, ring, config, **options)


def case_with_stores(folder, p, data):
    stores = {party: KeyStore(folder, party) for party in (HUB, *PARTIES)}
    return Case(p, {HUB: (stores[HUB],)} | {i: (*data[i], stores[i]) for i in PARTIES})


def decrypted_model(run, p):
    """[M] under the sum of all shares: a test may do what no party can."""
    found = values(run)
    c, L = ckks.context(p.ckks), p.layout
    s = whole(p.ckks, {i: found[i].keys.secret for i in PARTIES})
    M = np.zeros((p.config.markers, p.config.classes))
    for ct, group in zip(found[HUB].model, L.groups, strict=True):
        slots = c.decrypt(s, ct)
        for at, label in enumerate(group):
            M[:, label] = [slots[L.at(j, at, L.I - 1)] for j in range(p.config.markers)]
    return M


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A site dies in the second step; the run that follows goes on from the checkpoint."""
    folder, p, data = tmp_path_factory.mktemp("keys"), params(ring=LARGE, open_model=True), batches(CONFIG)
    fault = Fault("kill", "site-1", "hub", "encrypted_training.Gradient", nth=1)
    first, second = fixed_entropy("first"), fixed_entropy("second")  # what follows has stored vectors
    case = case_with_stores(folder, p, data)
    broken = run_protocol(encrypted_training, case, faults=[fault], timeout=8, entropy=first)
    case = case_with_stores(folder, p, data)
    again = run_protocol(encrypted_training, case, timeout=120, entropy=second)
    check_no_errors(again)
    return p, data, folder, broken, again


def test_a_death_ends_the_run_by_name_and_the_next_run_resumes(trained):
    *_, broken, again = trained
    assert set(broken.errors) == {HUB, "site-0", "site-2"}
    assert all(isinstance(e, ProtocolAbort) for e in broken.errors.values())
    lines = {(e.protocol, e.line) for e in broken.errors.values()}
    assert ("encrypted_training", "L3") in lines
    made = [e.name for e, _ in again.receipts["site-0"].entries if e.kind == "sent"]
    assert "collective_key.KeyShare" not in made  # keys were kept
    assert made.count("encrypted_training.Gradient") == 1  # and the first step too


def test_a_guess_of_a_batch_cannot_be_checked(trained):
    """The aggregator knows [M] and all switching keys; from a batch it would compute the same ciphertext."""
    p, data, *_, run = trained
    site = values(run)[PARTIES[0]]
    c, (X, Y) = ckks.context(p.ckks), data[PARTIES[0]]
    refresh = training_refreshes.refreshes(p)["gradient"]
    first, second = (
        training_state.gradient_ciphers(c, p.layout, site.model, X[0], Y[0], site.keys, refresh, Entropy())[0][0]
        for _ in range(2)
    )
    assert (first != second).mean(axis=(1, 2)).min() > 0.99


def test_weights_equal_the_clear_twin(trained):
    p, data, _, _, run = trained
    twin = cellcnn.train(p.config, [data[i] for i in PARTIES])
    np.testing.assert_allclose(decrypted_model(run, p), twin.M, atol=1e-5)  # what sealing leaves of 2^-88
    for party in (HUB, *PARTIES):
        w = values(run)[party].weights
        for name in ("W", "V"):  # what was opened is flooded: six standard deviations
            error = np.abs(getattr(w, name) - getattr(twin, name)).max()
            assert error < 6 * p.layout.opening_error < 1e-5
        assert not np.any(w.vW)  # momenta stay encrypted
        assert not np.any(w.vV)


def test_the_receipt_says_what_was_opened(trained):
    *_, run = trained
    opened = {e.name for e, _ in run.receipts["hub"].entries if e.kind == "opened"}
    assert opened == {
        "random combinations of the encrypted model's coefficients, flooded",
        "differences between the copies of the encrypted model, flooded",
        "the sum of the trained model's squared weights",
        "the trained model (part 1 of 1)",
    }


def test_key_files_are_held_once_and_the_share_is_private(trained):
    _, _, folder, _, _ = trained
    entries = [json.loads((folder / p / "keys.json").read_text()) for p in (HUB, *PARTIES)]
    assert all(e == entries[0] for e in entries)
    assert len(list((folder / "public").iterdir())) == len(entries[0]) - 1
    assert not (folder / HUB / "secret.bin").exists()
    assert (folder / "site-0" / "secret.bin").stat().st_mode & 0o077 == 0


def test_an_altered_checkpoint_is_refused(trained, tmp_path):
    p, _, folder, _, _ = trained
    c, steps = ckks.context(p.ckks), p.config.steps
    path = folder / HUB / "state.bin"
    kept = path.read_bytes()
    try:
        path.write_bytes(kept[:200] + bytes([kept[200] ^ 1]) + kept[201:])
        with pytest.raises(DataError, match="altered"):
            KeyStore(folder, HUB).get_state(c, p.tag, steps)
    finally:
        path.write_bytes(kept)
    assert KeyStore(folder, HUB).steps(p.tag) == (steps, steps - 1)
    with pytest.raises(DataError, match="other parameters"):
        KeyStore(folder, HUB).get_state(c, b"another training", steps)
    with pytest.raises(DataError, match="did not come to step"):
        KeyStore(folder, HUB).get_state(c, p.tag, steps + 1)
    followed = {"model", "W", "V", "archive", "checked"}
    assert set(KeyStore(folder, PARTIES[0]).get_state(c, p.tag, steps)) == followed  # the auditor's; others the model
    assert set(KeyStore(folder, HUB).get_state(c, p.tag, steps)) == followed | {"sums"}
    assert set(KeyStore(folder, PARTIES[1]).get_state(c, p.tag, steps)) == {"model", "checked"}
    assert KeyStore(folder, PARTIES[1]).openings == 3  # the checks, the model and its norm
    assert KeyStore(folder, HUB).openings == 0


def query_case(trained, X, querier=1):
    p, *_, run = trained
    found, q = values(run), PARTIES[querier]
    params = oblivious_prediction.Params(PARTIES, HUB, q, p.ckks, p.config, 1)
    return Case(params, {i: (found[i],) for i in (HUB, *PARTIES)} | {q: (found[q], X)})


def test_prediction_with_the_encrypted_model(trained):
    p, data, *_ = trained
    X = np.random.default_rng(3).uniform(-3, 3, (20, p.config.markers))
    case = query_case(trained, X)
    asked = run_protocol(oblivious_prediction, case, timeout=60)
    check_no_errors(asked)
    answers = values(asked)
    twin = cellcnn.train(p.config, [data[i] for i in PARTIES])
    np.testing.assert_allclose(answers.pop(PARTIES[1]), X @ twin.M, atol=18 * p.layout.answer_error)  # |X| ≤ 3
    assert p.layout.answer_error < 1e-3
    assert set(answers.values()) == {None}
    check_cost(oblivious_prediction, case)
    check_vectors(oblivious_prediction, case, VECTORS / "oblivious_prediction.json")


# ---- an early stop --------------------------------------------------------------------------------------------------


def test_training_stops_early_everywhere_and_a_stopped_one_stays_stopped(tmp_path, monkeypatch):
    """With stand-ins for the validation, which needs a larger ring; its own tests hold that the numbers are right."""
    errors = {1: 0.3, 2: 0.2, 3: 0.25, 4: 0.1}

    async def at_site(ch, *_, **__):
        return errors[int(ch.scope.split("/")[-2]) + 1]

    async def at_hub(ch, _):
        return errors[int(ch.scope.split("/")[-2]) + 1]

    monkeypatch.setattr(encrypted_training.encrypted_validation, "holder", at_site)
    monkeypatch.setattr(encrypted_training.encrypted_validation, "aggregator", at_hub)
    monkeypatch.setattr(encrypted_training.encrypted_validation, "check_samples", lambda *_: None)
    monkeypatch.setattr(Params, "validation", property(lambda self: None))
    config = dataclasses.replace(CONFIG, steps=4)
    p, data = params(config, LARGE, validate_every=1, patience=1), batches(config)
    held = np.zeros((1, 3)), np.zeros((1, 2))

    def case():
        given = case_with_stores(tmp_path, p, data)
        return Case(p, given.inputs | {i: (*given.inputs[i], held) for i in PARTIES})

    run = run_protocol(encrypted_training, case(), timeout=120)
    check_no_errors(run)
    for party in (HUB, *PARTIES):
        assert values(run)[party].losses == {1: 0.3, 2: 0.2, 3: 0.25}
        assert values(run)[party].step == 3
    again = run_protocol(encrypted_training, case(), timeout=120)
    check_no_errors(again)
    assert {values(again)[party].step for party in (HUB, *PARTIES)} == {3}
    assert not any("Gradient" in e.name for e, _ in again.receipts["site-0"].entries)
    store = KeyStore(tmp_path, PARTIES[1])
    assert encrypted_training.load_trained(p, store, site=True, stopped=3).step == 3
    with pytest.raises(DataError, match="did not come to step 4"):
        encrypted_training.load_trained(p, store, site=True)


# ---- a querier from outside -----------------------------------------------------------------------------------------

OUTSIDER = Party("researcher")


def outside_case(trained, X):
    p, *_, run = trained
    params = oblivious_prediction.Params(PARTIES, HUB, OUTSIDER, p.ckks, p.config, 1)
    return Case(params, {i: (values(run)[i],) for i in (HUB, *PARTIES)} | {OUTSIDER: (X,)})


def test_who_trained_nothing_and_holds_nothing_gets_the_logits_of_its_samples(trained):
    p, data, *_ = trained
    X = np.random.default_rng(4).uniform(-3, 3, (20, p.config.markers))
    case = outside_case(trained, X)
    asked = run_protocol(oblivious_prediction, case, timeout=60)
    check_no_errors(asked)
    answers = values(asked)
    twin = cellcnn.train(p.config, [data[i] for i in PARTIES])
    np.testing.assert_allclose(answers.pop(OUTSIDER), X @ twin.M, atol=18 * p.layout.answer_error)
    assert set(answers.values()) == {None}
    check_cost(oblivious_prediction, case)
    got = {e.name.partition(".")[2] for e, _ in asked.receipts[OUTSIDER].entries if e.kind == "received"}
    assert got & {"Mask", "Masks", "NewModel"} == set()  # neither the encrypted model nor its own samples encrypted


def test_an_outsider_notices_a_site_that_answers_something_else(trained):
    p, *_ = trained

    async def liar(ch, params, trained, *, entropy):
        send = ch.send

        async def other(to, msg):
            if isinstance(msg, oblivious_prediction.Result | oblivious_prediction.Seen):
                words = (
                    bytes([msg.c0[0] ^ 1]) + msg.c0[1:] if isinstance(msg, oblivious_prediction.Result) else b"x" * 32
                )
                msg = type(msg)(words)
            await send(to, msg)

        ch.send = other
        return await oblivious_prediction.holder(ch, params, trained, entropy=entropy)

    for site in (PARTIES[0], PARTIES[2]):
        case = outside_case(trained, np.zeros((5, p.config.markers)))
        run = run_protocol(oblivious_prediction, case, roles={site: liar}, timeout=8)
        assert run.errors[OUTSIDER].code == "differs"


# ---- as many answers as were agreed ---------------------------------------------------------------------------------


def every_place(monkeypatch):
    """The querier looks at all places of its ciphertexts, not only at its donors'."""
    monkeypatch.setattr(oblivious_prediction.Logits, "of", lambda self, samples: self._found)


def test_n7_a_ciphertext_answered_all_its_places_and_answers_only_those_of_the_agreed_donors(trained, monkeypatch):
    p, data, *_ = trained
    every_place(monkeypatch)
    M, X = cellcnn.train(p.config, [data[i] for i in PARTIES]).M, 8 * np.eye(p.config.markers)
    old = query_case(trained, X)  # no number of donors: as before
    asked = run_protocol(oblivious_prediction, old, timeout=60)
    np.testing.assert_allclose(values(asked)[PARTIES[1]][: p.config.markers] / 8, M, atol=1e-3)  # the whole model
    params = dataclasses.replace(old.params, donors=1)
    new = Case(params, {**old.inputs, PARTIES[1]: (old.inputs[PARTIES[1]][0], X[:1])})
    asked = run_protocol(oblivious_prediction, new, timeout=60)
    found = values(asked)[PARTIES[1]]
    assert len(found) == p.layout.I == 2048
    np.testing.assert_allclose(found[0] / 8, M[0], atol=1e-3)
    assert np.abs(found[1:]).max() < 0.01  # floods, and no other row of the model
    check_cost(oblivious_prediction, new)


def test_n7_a_querier_that_sends_more_donors_than_agreed_is_refused(trained):
    p, *_ = trained

    async def greedy(ch, params, trained, X, *, entropy):
        more = dataclasses.replace(params, donors=p.config.markers)
        return await oblivious_prediction.querier(ch, more, trained, X, entropy=entropy)

    old = query_case(trained, 8 * np.eye(p.config.markers))
    case = Case(dataclasses.replace(old.params, donors=1), old.inputs)
    run = run_protocol(oblivious_prediction, case, roles={PARTIES[1]: greedy}, timeout=8)
    assert {HUB, PARTIES[0], PARTIES[2]} <= set(run.errors)
    assert all(isinstance(run.errors[i], ProtocolAbort) for i in (HUB, PARTIES[0], PARTIES[2]))
    assert PARTIES[1] not in run.outcomes


def test_n7_a_holder_charges_the_querier_before_its_first_message(trained, tmp_path):
    p, *_ = trained
    old = query_case(trained, np.ones((2, p.config.markers)))
    store = KeyStore(tmp_path, PARTIES[0])
    account = store.account((PARTIES[1],), p.config.markers)
    case = Case(
        dataclasses.replace(old.params, donors=2), {**old.inputs, PARTIES[0]: (*old.inputs[PARTIES[0]], account)}
    )
    run = run_protocol(oblivious_prediction, case, timeout=8)
    assert isinstance(run.errors[PARTIES[0]], RefusedError)
    sent = [e.name for e, _ in run.receipts[PARTIES[0]].entries if e.kind == "sent" and "channel." not in e.name]
    assert sent == []


# ---- a querier that lies ---------------------------------------------------------------------------------------------


def test_k4_chosen_ciphertexts_read_the_key_before_queries_were_masked(trained):
    """The old query was any ciphertext: of (0, K) the sites opened Σ M·slots(K·s), a function of the secret key."""
    p, *_, run = trained
    found, c, L = values(run), ckks.context(p.ckks), p.layout
    s = whole(p.ckks, {i: found[i].keys.secret for i in PARTIES})
    params = oblivious_prediction.Params(PARTIES, HUB, PARTIES[1], p.ckks, p.config, 1)
    k, r = L.ladder.query, c.ring
    raw = np.stack([r.zeros(k), r.of_small(np.eye(1, p.ckks.degree, dtype=np.int64)[0] << 50, k)])
    raw[1] = c._shifted(raw[1], 96)
    r.forward(raw[1])
    chosen = c.cipher(raw, oblivious_prediction.sample_scale(params))
    (U,) = oblivious_prediction.evaluate(params, found[PARTIES[1]].model, chosen, found[PARTIES[1]].keys)
    read = c.decrypt(s, U)  # what the key switch handed to the querier, but for its flood of 2^-20
    from cloister.mpc.crypto.rns import slots

    key = slots.to_real(slots.embedding(p.ckks.degree).to_slots(r.integers(r.backward(s[:3].copy()))), 1.0)
    M = c.decrypt(s, c.drop(found[HUB].model[0], p.ckks.base))
    expected = M * key * 2.0**146 / oblivious_prediction.sample_scale(params)
    summed = sum(np.roll(expected, -L.R * j) for j in range(L.J))
    assert np.corrcoef(read, summed)[0, 1] > 0.999


def test_k4_a_query_is_numbers_in_the_clear_and_those_that_no_sample_has_are_refused(trained):
    p, *_ = trained

    async def greedy(ch, params, trained, X, *, entropy):
        """Follows L1 and asks about 2^40 instead of a sample."""
        got = await ch.gather(params.maskers, oblivious_prediction.Seed)
        query = oblivious_prediction.masked(params, X, {i: m.seed for i, m in got.items()}, bytes(32))
        huge = oblivious_prediction.Query(query.nonce, query.d + (1 << 62))
        await ch.broadcast([HUB, *(i for i in PARTIES if i != ch.me)], huge)
        return await ch.gather([i for i in PARTIES if i != ch.me], key_switch.Share)

    case = query_case(trained, np.zeros((5, p.config.markers)))
    run = run_protocol(oblivious_prediction, case, roles={PARTIES[1]: greedy}, timeout=20)
    assert {run.errors[i].code for i in (HUB, PARTIES[0], PARTIES[2])} == {"range"}
    assert PARTIES[1] not in run.outcomes


def test_k4_telling_sites_different_samples_is_noticed(trained):
    p, *_ = trained

    async def two_faced(ch, params, trained, X, *, entropy):
        scatter = ch.scatter

        async def different(to, msg=None):
            if isinstance(msg, oblivious_prediction.Query):
                other = oblivious_prediction.Query(msg.nonce, msg.d + 1)
                return await scatter({i: other if i == PARTIES[2] else msg for i in to})
            return await scatter(to, msg)

        ch.scatter = different
        return await oblivious_prediction.querier(ch, params, trained, X, entropy=entropy)

    case = query_case(trained, np.zeros((5, p.config.markers)))
    run = run_protocol(oblivious_prediction, case, roles={PARTIES[1]: two_faced}, timeout=8)
    assert {PARTIES[0], PARTIES[2]} <= set(run.errors)


def answers(trained, X):
    p, data, *_ = trained
    wanted = X @ cellcnn.train(p.config, [data[i] for i in PARTIES]).M

    def right(lie, values):
        """Only the querier learns something, and from a lying aggregator nothing wrong."""
        assert all(v is None for i, v in values.items() if i != PARTIES[1])
        if lie.liar == HUB and values.get(PARTIES[1]) is not None:
            np.testing.assert_allclose(values[PARTIES[1]], wanted, atol=18 * p.layout.answer_error)

    return right


def test_lies_of_a_querier(trained):
    """To one party other numbers than to the rest; `test_cellcnn_lies` has the other lies of a prediction."""
    X = np.random.default_rng(3).uniform(-3, 3, (4, CONFIG.markers))
    lies = check_lies(
        oblivious_prediction,
        [query_case(trained, X)],
        right=answers(trained, X),
        liars=[PARTIES[1]],
        only=lambda lie: lie.name.startswith("oblivious_prediction.") and lie.letter == "a",
        timeout=10.0,
        within=400.0,
    )
    assert lies.tried >= 1
    assert lies.aborted == lies.tried


def test_what_a_query_shows_to_a_masker_is_the_sample_behind_a_mask_without_steps():
    params = oblivious_prediction.Params(PARTIES, HUB, PARTIES[1], LARGE, CONFIG, 1)
    seeds = {i: bytes([7 * n] * 32) for n, i in enumerate(params.maskers)}
    v, m = params.maskers
    for x in (8.0, 0.0, -8.0):
        query = oblivious_prediction.masked(params, np.full(params.entries, x), seeds, bytes(32))
        left = np.ldexp((query.d + oblivious_prediction.drawn(params, seeds[v], bytes(32))).astype(float), -30) - x
        other = np.ldexp(oblivious_prediction.drawn(params, seeds[m], bytes(32)).astype(float), -30)
        np.testing.assert_array_equal(left, -other)  # X - r of the other masker
        assert np.abs(left).max() <= oblivious_prediction.LARGEST_R
        assert left.std() == pytest.approx(2.0**oblivious_prediction.WIDTH_BITS / 2, rel=0.05)  # √(3/12) of a width
    assert params.maskers == (PARTIES[0], PARTIES[2])
    two = oblivious_prediction.Params(PARTIES[:2], HUB, PARTIES[1], LARGE, CONFIG, 1)
    assert two.maskers == (PARTIES[0], HUB)


def test_two_queries_differ_for_a_masker_by_no_more_than_stated():
    """Squared Hellinger distance of a sum of three uniform numbers from itself, shifted: 0.57·(shift / width)²."""
    n = 1 << 14
    density = np.convolve(np.convolve(np.ones(n), np.ones(n)), np.ones(n)) / n**3
    for shift in (2, 16, 64):
        a, b = np.pad(density, (0, shift)), np.pad(density, (shift, 0))
        assert 1 - np.sqrt(np.maximum(a * b, 0)).sum() < 0.575 * (shift / n) ** 2


def test_a_masker_no_longer_learns_signs_of_samples():
    """What is certain from one's own masks and d: with r_p uniform within ±16, over half of all signs after 19 runs."""
    params = oblivious_prediction.Params(PARTIES, HUB, PARTIES[1], LARGE, CONFIG, 1)
    rng, (v, m) = np.random.default_rng(5), params.maskers
    X = np.clip(rng.normal(size=params.entries), -8, 8)
    for runs, old_share in ((1, 0.03), (19, 0.45)):
        signs = {}
        for name in ("old", "new"):
            low, high = np.full(X.shape, -8.0), np.full(X.shape, 8.0)
            for _ in range(runs):
                seeds, nonce = {v: rng.bytes(32), m: rng.bytes(32)}, rng.bytes(32)
                if name == "old":
                    r, reach = old_query(params, X, seeds, nonce), 8
                else:
                    query = oblivious_prediction.masked(params, X, seeds, nonce)
                    r = np.ldexp((query.d + oblivious_prediction.drawn(params, seeds[v], nonce)).astype(float), -30)
                    reach = oblivious_prediction.LARGEST_R
                low, high = np.maximum(low, r - reach), np.minimum(high, r + reach)
            assert (low <= X + 1e-6).all()
            assert (high >= X - 1e-6).all()
            signs[name] = int(((low > 0) | (high < 0)).sum())  # entries whose sign the masker knows
        assert signs["old"] > old_share * X.size
        assert signs["new"] == 0


def old_query(params, X, seeds, nonce):
    """The first masker's r_p at the chosen candidates, uniform within ±16, as before."""
    streams, chosen, left = [Prg(s) for s in seeds.values()], np.zeros(X.shape), np.ones(X.shape, bool)
    while left.any():
        drawn = [np.ldexp(s.below((32 << 30) + 1, X.shape).astype(np.float64), -30) - 16 for s in streams]
        fits = left & np.all([np.abs(X - r) <= 8 for r in drawn], axis=0)
        chosen[fits], left = drawn[0][fits], left & ~fits
    return chosen


def test_a_querier_cannot_hide_a_large_entry_behind_the_smallest_integer():
    """np.abs(-2^63) is negative: before, an entry of -2^33 passed, beyond what the floods are made for."""
    params = oblivious_prediction.Params(PARTIES, HUB, PARTIES[1], LARGE, CONFIG, 1)
    d = np.zeros(params.entries, np.int64)
    for value in (-(2**63), 2**63 - 1, ((8 + 3 * 2**12) << 30) + 1):
        d[0, 0] = value
        query = oblivious_prediction.Query(bytes(32), d)
        with pytest.raises(ProtocolAbort, match="no sample has"):
            oblivious_prediction.check_query(params, query)
    d[0, 0] = -((8 + 3 * 2**12) << 30)
    oblivious_prediction.check_query(params, oblivious_prediction.Query(bytes(32), d))


def test_openings_under_one_key_are_counted(trained):
    *_, run = trained
    keys = dataclasses.replace(values(run)[PARTIES[0]].keys, store=None, openings=60)
    keys.spend(4)
    with pytest.raises(ParameterError, match="train anew"):
        keys.spend(1)


def test_vectors_of_a_training_step():
    config = dataclasses.replace(CONFIG, steps=1)
    case = Case(params(config), batches(config))
    check_vectors(encrypted_training, case, VECTORS / "encrypted_training.json")


def prediction_case(seed=0, samples=7):
    rng = np.random.default_rng(seed)
    p = private_prediction.Params(Party("asker"), HUB, 5, 3)
    return Case(p, {Party("asker"): (rng.normal(size=(samples, 5)),), HUB: (rng.normal(size=(5, 3)),)})


def test_prediction_with_an_opened_model():
    def agree(found, ideal):
        if ideal is None:
            assert found is None
        else:
            np.testing.assert_allclose(found, ideal, atol=2e-5)  # weights are rounded to 2^-20

    check_ideal(private_prediction, [prediction_case(), prediction_case(1, 100)], agree=agree)
    check_view(private_prediction, prediction_case(1), prediction_case(2))
    check_cost(private_prediction, prediction_case())
    check_vectors(private_prediction, prediction_case(), VECTORS / "private_prediction.json")
    messages = [("asker", "hub", "private_prediction.Query"), ("hub", "asker", "private_prediction.Answer")]
    kinds = ("drop", "duplicate", "truncate", "kill")
    assert (
        check_abort(private_prediction, prediction_case(), survived=lambda r: None, kinds=kinds, messages=messages) == 8
    )


def test_an_untouched_answer_would_tell_the_weights_and_ours_does_not():
    """The querier knows its own randomness: c1 of a plain weighted sum is Σ w_j·a_j, and the a_j are its own."""
    c, k = ckks.context(private_prediction.RING), private_prediction.RING.base
    r, weights = c.ring, [3, -5]
    a = [ckks.common(private_prediction.RING, b"s" * 32, f"0/{j}", k) for j in range(2)]
    naked, hidden = r.zeros(k), r.error(Entropy().prg(), k)
    r.add_product(hidden, r.uniform(Entropy().prg(), k), r.error(Entropy().prg(), k))  # what [0] adds
    for out in (naked, hidden):
        for aj, w in zip(a, weights, strict=True):
            for row in range(k):
                r.add_multiple(out, aj, w, row)
    guess = r.zeros(k)
    for aj, w in zip(a, weights, strict=True):
        for row in range(k):
            r.add_multiple(guess, aj, w, row)
    assert (naked == guess).all()
    assert (hidden == guess).mean() < 0.01


# ---- the circuit without a network -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "groups", "chunks", "archives"),
    [
        (cellcnn.Config(38, 8, 2, 100), 1, 1, 1),
        (cellcnn.Config(128, 64, 2, 100), 1, 2, 2),
        (cellcnn.Config(128, 64, 5, 60), 3, 1, 2),
        (cellcnn.Config(16, 8, 3, 500), 1, 2, 1),
    ],
)
def test_layouts_and_maps_are_the_step_of_the_twin(config, groups, chunks, archives):
    """Every slot map applied to plain slots: gradient, update, product and opening give the twin's numbers."""
    P = cellcnn_circuit.choose_ring(config, 3)
    L = cellcnn_circuit.Layout(config, P, 3)
    assert (len(L.groups), L.chunks, L.archives) == (groups, chunks, archives)
    rng = np.random.default_rng(0)
    w = cellcnn.initial(config)
    w = cellcnn.Weights(w.W, w.V, rng.normal(size=w.W.shape), rng.normal(size=w.V.shape))
    maps = cellcnn_circuit.all_maps(L)
    X, Y = rng.normal(size=(config.batch, config.markers)), rng.normal(size=(config.batch, config.classes))
    E = rng.normal(size=Y.shape)
    z = []
    for group in L.groups:  # what a site sends, summed over chunks and over three equal sites
        total = np.zeros(P.slots)
        for at in range(0, config.batch, L.I):
            table = np.zeros((L.J, L.O, L.I))
            part = slice(at, min(at + L.I, config.batch))
            n = part.stop - part.start
            table[: config.markers, : len(group), :n] = X[part].T[:, None, :] * E[part][:, list(group)].T[None]
            total += L.spread(table)
        z.append(3 * total)
    flat = np.concatenate(z)
    Z = [m.apply_plain(flat) for m in maps["gradient"]]
    W, V = L.filter_slots(w.W), [L.dense_slots(w.V, g) for g in L.groups]
    inputs = np.concatenate([*(zg * W for zg in Z), *(zg * v for zg, v in zip(Z, V, strict=True)), *L.archive(w)])
    new = [m.apply_plain(inputs) for m in maps["update"]]
    twin = cellcnn.update(config, w, X.T @ E / config.batch)
    archive = new[: L.archives]
    for name in ("W", "V", "vW", "vV"):
        found = getattr(L.unarchive(np.concatenate(archive)), name)
        np.testing.assert_allclose(found, getattr(twin, name), atol=1e-12)
    products = np.concatenate([new[L.archives] * v for v in new[L.archives + 1 :]])
    for m, group in zip(maps["product"], L.groups, strict=True):
        np.testing.assert_allclose(m.apply_plain(products), L.model_slots(twin.M, group), atol=1e-12)
    opened = [m.apply_plain(np.concatenate(archive)) for m in maps["opening"]]
    found_weights = L.opened_weights(L.mean_of_copies(opened))
    np.testing.assert_allclose(found_weights.W, twin.W, atol=1e-12)
    np.testing.assert_allclose(found_weights.V, twin.V, atol=1e-12)
    assert not np.any(found_weights.vW)


def test_too_many_filters_say_which_ring_would_do():
    with pytest.raises(ParameterError, match="ring degree 32768 would do"):
        cellcnn_circuit.Layout(cellcnn.Config(128, 100), level_schedule.chain(8192, scale_bits=56, value_bits=3), 3)
    with pytest.raises(ParameterError, match="no ring"):
        cellcnn_circuit.choose_ring(cellcnn.Config(200, 100), 3)


def test_consent_and_batches_are_checked_before_anything_is_sent():
    p = params(ring=LARGE, open_model=True)

    async def refusing(ch, params, X, Y, *, entropy):
        return await encrypted_training.holder(ch, params, X, Y, entropy=entropy, consent=frozenset())

    data = batches(CONFIG)
    run = run_protocol(encrypted_training, Case(p, data), roles={PARTIES[0]: refusing}, timeout=5)
    assert isinstance(run.errors[PARTIES[0]], RefusedError)
    for bad in (data[PARTIES[0]][0][:1], 100 + data[PARTIES[0]][0], data[PARTIES[0]][0] * np.nan):
        with pytest.raises(DataError):
            cellcnn.check_batches(p.config, bad, data[PARTIES[0]][1])


def test_k6_a_rate_at_which_training_diverges_is_refused_before_anything_is_sent():
    config = dataclasses.replace(CONFIG, steps=4, learning_rate=60.0)
    data = batches(config)
    with np.errstate(all="ignore"):
        before = cellcnn.train(config, [data[i] for i in PARTIES])
    assert not np.abs(before.W).max() < 1e6  # what came back as a model
    run = run_protocol(encrypted_training, Case(params(config), data), timeout=5)
    assert all(isinstance(run.errors[i], ParameterError) for i in PARTIES)
    sent = {e.name for i in PARTIES for e, _ in run.receipts[i].entries if e.kind == "sent"}
    assert sent <= {"channel.Hello", "channel.Abort"}
    nan = cellcnn.Weights(*(np.full((2, 2), np.nan) for _ in range(4)))
    for bad in (nan, before):
        with pytest.raises(ProtocolAbort, match="diverged"):
            training_opening.check_weights(bad)


@pytest.mark.slow
@pytest.mark.parametrize("step", ["new", "norm", "old"])
def test_k6_weights_of_a_training_that_diverged_are_not_opened(monkeypatch, step):
    """Where no site alone would diverge, or none looked: the range check ends it, or the norm, and before no check."""
    config, first = dataclasses.replace(CONFIG, steps=1), cellcnn.initial(CONFIG)
    far = cellcnn.Weights(200 * first.W, 200 * first.V, first.vW, first.vV)  # as after steps that were too large
    monkeypatch.setattr(cellcnn, "initial", lambda config: far)
    monkeypatch.setattr(cellcnn, "check_rate", lambda *given: None)
    if step != "new":
        monkeypatch.setattr(collective_range, "check_range", lambda *given: None)
        monkeypatch.setattr(equal_copies, "check_copies", lambda *given: None)
    if step == "old":
        monkeypatch.setattr(training_opening, "check_norm", lambda slots: None)
    p = params(config, LARGE, open_model=True)
    run = run_protocol(encrypted_training, Case(p, batches(config)), timeout=120)
    assert {run.errors[i].code for i in (HUB, *PARTIES)} == {"range" if step == "new" else "diverged"}
    opened = {e.name for r in run.receipts.values() for e, _ in r.entries if e.kind == "opened"}
    assert ("the trained model (part 1 of 1)" in opened) == (step == "old")
    assert ("the sum of the trained model's squared weights" in opened) == (step != "new")


@pytest.mark.parametrize(
    ("total", "refused"), [(40.0, False), (64.5**2, True), (1e30, True), (-1e30, True), (np.nan, True)]
)
def test_k6_norms_that_no_weights_within_64_have_are_refused(total, refused):
    slots = np.full(8, total / training_refreshes.NORM)
    if refused:
        with pytest.raises(ProtocolAbort, match="no weight was opened"):
            training_opening.check_norm(slots)
    else:
        training_opening.check_norm(slots)


def test_the_map_of_the_norm_adds_every_weight_once():
    rng = np.random.default_rng(0)
    for config in (CONFIG, dataclasses.replace(CONFIG, markers=38, filters=8, classes=5)):
        L = params(config, LARGE).layout
        w = cellcnn.Weights(*(rng.normal(size=shape) for shape in 2 * [(config.markers, config.filters),
                                                                        (config.filters, config.classes)]))  # fmt: skip
        cts = [L.filter_slots(w.W), *(L.dense_slots(w.V, g) for g in L.groups)]
        (found,) = (m.apply_plain(np.concatenate(cts) ** 2) for m in training_refreshes.norm_maps(L))
        np.testing.assert_allclose(found, (np.sum(w.W**2) + np.sum(w.V**2)) / training_refreshes.NORM)


@pytest.mark.parametrize(("kind", "code"), [pytest.param("model", "told", marks=pytest.mark.slow), ("gradient", "sum")])
def test_k2_an_aggregator_that_feeds_the_circuit_something_else_is_caught(kind, code):
    """Another model than [W' ⊙ V'] gives; and gradients of one site, counted three times."""
    config = dataclasses.replace(CONFIG, steps=1)

    async def liar(ch, params, *, entropy):
        scatter, gather = ch.scatter, ch.gather

        async def scattered(to, msg=None):
            if kind == "model" and isinstance(msg, encrypted_training.NewModel):
                c = ckks.context(params.ckks)
                first = c.unpack(msg.c0[0], params.ckks.top)
                c.ring.add(first, c.encode(np.ones(params.ckks.slots), params.ckks.top, params.ckks.scale).residues)
                msg = encrypted_training.NewModel((c.pack(first),))
            await scatter(to, msg)

        async def gathered(senders, cls, **options):
            got = await gather(senders, cls, **options)
            one = kind == "gradient" and cls is encrypted_training.Gradient
            return dict.fromkeys(got, got[PARTIES[1]]) if one else got

        ch.scatter, ch.gather = scattered, gathered
        return await encrypted_training.aggregator(ch, params, entropy=entropy)

    run = run_protocol(encrypted_training, Case(params(config), batches(config)), roles={HUB: liar}, timeout=20)
    assert {(run.errors[i].protocol, run.errors[i].code) for i in PARTIES} == {("collective_audit", code)}


def test_many_steps_that_would_gather_too_much_noise_are_refused():
    with pytest.raises(ParameterError, match="noise"):
        cellcnn_circuit.choose_ring(cellcnn.Config(38, steps=10**14, learning_rate=1.0, momentum=0.999), 3)


@pytest.mark.parametrize("sites", [2, 3, 10])
def test_the_default_training_opens_exactly_and_may_be_validated(sites):
    o = train_cellcnn.Options()
    config = cellcnn.Config(
        markers=38, filters=o.n_filters, batch=200 // sites, steps=o.n_steps, learning_rate=o.learning_rate
    )
    holders = tuple(Party(f"site-{i}") for i in range(sites))
    ring = cellcnn_circuit.choose_ring(config, sites)
    made = Params(holders, HUB, ring, config, True)  # raises where masks or floods do not hide that many steps
    assert made.layout.opening_error < 2e-6
    assert Params(holders, HUB, ring_for(config, sites), config, True, 10, config.batch).validates(10)


# ---- long ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_twenty_steps_with_three_parties_equal_the_twin_to_1e_3():
    config = cellcnn.Config(markers=38, filters=8, classes=2, batch=100, steps=20)
    p = params(config, cellcnn_circuit.choose_ring(config, 3), open_model=True)
    data = batches(config)
    run = run_protocol(encrypted_training, Case(p, data), timeout=600)
    check_no_errors(run)
    twin = cellcnn.train(config, [data[i] for i in PARTIES])
    for party in (HUB, *PARTIES):
        for name in ("W", "V"):
            np.testing.assert_allclose(getattr(values(run)[party].weights, name), getattr(twin, name), atol=1e-5)
    found = values(run)
    X = np.clip(np.random.default_rng(3).normal(size=(150, 38)), -3, 3)
    q = oblivious_prediction.Params(PARTIES, HUB, PARTIES[0], p.ckks, config, 2)
    inputs = {i: (found[i],) for i in (HUB, *PARTIES)} | {PARTIES[0]: (found[PARTIES[0]], X)}
    asked = run_protocol(oblivious_prediction, Case(q, inputs), timeout=600)
    check_no_errors(asked)
    np.testing.assert_allclose(values(asked)[PARTIES[0]], X @ twin.M, atol=6 * 3 * p.layout.answer_error)


@pytest.mark.slow
def test_three_classes_in_groups():
    config = cellcnn.Config(markers=70, filters=2, classes=3, batch=128, steps=1, learning_rate=0.1, momentum=0.5)
    p = params(config, LARGE)
    assert (len(p.layout.groups), p.layout.chunks) == (3, 1)
    data = batches(config)
    run = run_protocol(encrypted_training, Case(p, data), timeout=300)
    check_no_errors(run)
    twin = cellcnn.train(config, [data[i] for i in PARTIES])
    np.testing.assert_allclose(decrypted_model(run, p), twin.M, atol=1e-5)  # what sealing leaves of 2^-88


@pytest.mark.slow
def test_cost_and_view():
    data, other = batches(CONFIG), batches(CONFIG, 1)
    check_cost(encrypted_training, Case(params(), data))
    one = dataclasses.replace(CONFIG, steps=1)
    check_cost(encrypted_training, Case(params(one, LARGE, open_model=True), batches(one)))
    check_view(encrypted_training, Case(params(), data), Case(params(), other))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "encrypted_training.Ready",
        "collective_key.KeyShare",
        "collective_relin.Second",
        "collective_rotation.RotationShare",
        "encrypted_training.Gradient",
        "collective_refresh.Share",
        "threshold_decrypt.Share",
    ],
)
def test_a_party_that_dies_anywhere_aborts_by_name_and_the_run_resumes(name, tmp_path):
    p, data = params(ring=LARGE, open_model=True), batches(CONFIG)
    fault = Fault("kill", "site-2", "hub", name)
    broken = run_protocol(encrypted_training, case_with_stores(tmp_path, p, data), faults=[fault], timeout=8)
    assert set(broken.errors) == {HUB, "site-0", "site-1"}
    assert all(isinstance(e, ProtocolAbort) and e.line for e in broken.errors.values())
    again = run_protocol(encrypted_training, case_with_stores(tmp_path, p, data), timeout=120)
    check_no_errors(again)
    twin = cellcnn.train(p.config, [data[i] for i in PARTIES])
    np.testing.assert_allclose(decrypted_model(again, p), twin.M, atol=1e-5)


def plain_polynomials(folder, p, data):
    """The decrypted integer polynomials of the auditor's state after a training, and of the logits of a query."""
    case = case_with_stores(folder, p, data)
    run = run_protocol(encrypted_training, case, timeout=600)
    check_no_errors(run)
    found, c = values(run), ckks.context(p.ckks)
    s, r = whole(p.ckks, {i: found[i].keys.secret for i in PARTIES}), c.ring

    def opened(ct):
        raw, _ = c.raw(ct)
        return r.lift(r.backward(r.add_product(raw[0][:3].copy(), raw[1][:3], s[:3])))

    state = KeyStore(folder, PARTIES[0]).get_state(c, p.tag, p.config.steps)
    return {name: opened(cts[0]) for name, cts in state.items() if cts}


@pytest.mark.slow
def test_k7_the_noise_of_a_training_stays_below_what_the_floods_cover(tmp_path):
    """Two trainings on the same batches under other keys differ by noise alone."""
    config = dataclasses.replace(CONFIG, steps=3, momentum=0.9)
    p = params(config, dataclasses.replace(RING))
    first, second = (plain_polynomials(tmp_path / k, p, batches(config)) for k in ("one", "two"))

    def noise(name):
        (a, a_low), (b, b_low) = first[name], second[name]
        return float(((a - b) + (a_low - b_low)).std() / np.sqrt(2))

    for name in ("archive", "W", "V"):
        assert 1 < noise(name) < p.layout.noise
    sealed = 2.0 ** (ckks.flood_bits(p.ckks, p.layout.factor_noise) - 1)  # of one holder, in the last [M]
    assert noise("model") > sealed  # nothing of what was gathered is left to see
