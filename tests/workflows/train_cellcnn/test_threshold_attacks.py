"""Attacks of one malicious site on encrypted training and prediction: they succeed on the old step and fail now."""

import dataclasses
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("numba")
sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2] / "old_steps"))

import threshold_ckks as old
from collective import HUB, entropy, faults_on, names, public, secrets, whole
from test_encrypted_training import CONFIG, LARGE, PARTIES, RING, batches, params, query_case, trained

from cloister.errors import DataError, ProtocolAbort
from cloister.models import cellcnn
from cloister.mpc.crypto.ckks import scheme as ckks
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.crypto.rns import slots
from cloister.mpc.threshold_ckks import (
    collective_audit,
    collective_range,
    collective_refresh,
    collective_relin,
    key_switch,
)
from cloister.mpc.threshold_ckks.collective_audit import AuditLog
from cloister.testing import (
    Case,
    check_cost,
    check_lies,
    check_no_errors,
    check_vectors,
    check_view,
    run_protocol,
    values,
)
from cloister.workflows.predict_cellcnn import oblivious_prediction
from cloister.workflows.train_cellcnn import encrypted_training, training_refreshes, training_state
from cloister.workflows.train_cellcnn.cellcnn_circuit import QUERY_BOUND
from cloister.workflows.train_cellcnn.encrypted_training import check_model, range_ciphers
from cloister.workflows.train_cellcnn.level_schedule import QUERY
from cloister.workflows.train_cellcnn.training_keys import Keys, relinearised_zero

__all__ = ["trained"]  # the fixture
ATTACKER = PARTIES[1]
VECTORS = Path(__file__).parents[2] / "vectors"
K = RING.base + QUERY  # primes of a query


def shifted(c, ct, constant):
    """A ciphertext whose plaintext polynomial has that integer added to coefficient 0."""
    raw, scale = c.raw(ct)
    for row, q in zip(raw[0], c.primes, strict=False):
        row[:] = (row.astype(object) + constant % q) % q
    return c.cipher(raw, scale)


def integers(c, m):
    """Coefficients of a plaintext polynomial in NTT form, as Python integers."""
    return np.array(c.ring.lift_exact(c.ring.backward(m.copy())), object)


def zero_query(c, L, key, k, scale):
    """[X] of zeros, two masks added: what a querier knows of the masks it subtracts, so they are zero here."""
    zeros = np.zeros(L.ckks.slots)
    masks = [c.encrypt(key, zeros, k, scale, Entropy()) for _ in range(2)]
    return c.add_exact(c.add(*masks), zeros)


def test_n1_a_shifted_model_gave_equations_in_the_key(trained):
    """2^72·S_x more in [M'], and an answer to zeros is 2^72·tr(x0 + x1·s), far above the floods: exact equations."""
    p, *_, run = trained
    found, c, L = values(run), ckks.context(p.ckks), p.layout
    keys, s, r = found[ATTACKER].keys, whole(p.ckks, {i: found[i].keys.secret for i in PARTIES}), c.ring
    k, scale = L.ladder.one, old.sample_scale(c, L)
    M = shifted(c, c.drop(found[ATTACKER].model[0], k), 2**72 * int(scale))
    x = zero_query(c, L, keys.public, k, scale)
    U, _ = c.raw(old.evaluate(c, L, M, x, keys))
    opened = r.add_product(U[0], U[1], s)
    for _ in PARTIES:
        r.add(opened, r.flood(Entropy().prg(), ckks.flood_bits(p.ckks, old.query_noise(L)), len(opened)))
    read = [round(int(v) / 2**72) for v in integers(c, opened)]
    x0, x1 = x.polys
    noise = integers(c, r.add_product(x0.copy(), x1, s)).astype(np.int64)
    trace = sum(r.rotate_coefficients(noise, c.galois(L.R * j) if j else 1) for j in range(L.J))
    assert read == trace.tolist()
    assert np.count_nonzero(trace) > 0.9 * p.ckks.degree / L.J  # so many equations by every answer


def range_case(p, found, model=None, keys=None):
    model = model or found[HUB].model
    cts = {i: range_ciphers(p, keys or found[i].keys, model) for i in (HUB, *PARTIES)}
    inputs = {i: (found[i].keys.secret, found[i].keys.public, [ct.polys[1] for ct in cts[i]]) for i in PARTIES}
    return Case(p.range, inputs | {HUB: (found[HUB].keys.public, cts[HUB])})


def test_n1_a_shifted_model_does_not_pass_the_range_check(trained):
    p, *_, run = trained
    found, c = values(run), ckks.context(p.ckks)
    check_no_errors(run_protocol(collective_range, range_case(p, found), timeout=60))
    base = int(np.prod([int(q) for q in c.primes[: p.ckks.base]], dtype=object))
    half = int(np.prod([int(q) for q in c.primes[: p.range.primes]], dtype=object)) // 2  # an even factor hides it
    scale = int(oblivious_prediction.sample_scale(query_case(trained, np.zeros((1, 3))).params))
    for constant in (2**72 * scale, base, half, int(4 * p.range.tolerance)):
        model = [shifted(c, found[HUB].model[0], constant)]
        failed = run_protocol(collective_range, range_case(p, found, model), timeout=60)
        assert set(failed.errors) == {HUB, *PARTIES}
        assert failed.errors[HUB].code == "range"


def test_a_shifted_public_key_does_not_pass(trained):
    """It would multiply the randomness of masks, and answers would show the model beyond the samples."""
    p, *_, run = trained
    found, c = values(run), ckks.context(p.ckks)
    key = found[HUB].keys.public
    wrong = shifted(c, c.cipher(np.stack([key.b, key.a]), 1.0), int(4 * p.layout.key_tolerance))
    keys = dataclasses.replace(found[HUB].keys, public=ckks.PublicKey(*wrong.polys))
    failed = run_protocol(collective_range, range_case(p, found, keys=keys), timeout=60)
    assert failed.errors[HUB].code == "range"
    assert p.layout.key_tolerance < p.range.tolerance / 2**50


def test_n1_whatever_passes_is_not_seen_above_the_floods(trained):
    """With as large a shift as may pass, the noise of an answer to zeros is what the floods are made for."""
    p, *_, run = trained
    found, c, L = values(run), ckks.context(p.ckks), p.layout
    keys, s, r = found[ATTACKER].keys, whole(p.ckks, {i: found[i].keys.secret for i in PARTIES}), c.ring
    q = query_case(trained, np.zeros((1, 3))).params
    k, scale = L.ladder.query, oblivious_prediction.sample_scale(q)
    M = shifted(c, c.drop(found[ATTACKER].model[0], k), int(p.range.tolerance))
    x = zero_query(c, L, keys.public, k, scale)
    (U,) = oblivious_prediction.evaluate(q, [M], x, keys)
    raw, _ = c.raw(U)
    noise = integers(c, r.add_product(raw[0], raw[1], s)).astype(np.float64)
    assert noise.std() < L.query_noise
    assert L.query_noise < 1.5 * old.query_noise(L) * QUERY_BOUND / 56  # nothing but larger samples needs wider floods


def test_n1_models_that_passed_no_check_answer_nothing(trained):
    p, *_, run = trained
    unchecked = dataclasses.replace(values(run)[ATTACKER], checked=False)
    with pytest.raises(DataError, match="range check"):
        check_model(unchecked)
    case = query_case(trained, np.zeros((1, p.config.markers)))
    case.inputs[PARTIES[0]] = (dataclasses.replace(values(run)[PARTIES[0]], checked=False),)
    asked = run_protocol(oblivious_prediction, case, timeout=8)
    assert isinstance(asked.errors[PARTIES[0]], DataError)


def shifting(monkeypatch, stage, where, constant):
    """The attacker adds a constant to its share h of an input, or g of an output, in one kind of refresh."""
    shares = collective_refresh.shares

    def deviating(ch, params, secret, maps, c1s, zero, entropy):
        hs, gs = shares(ch, params, secret, maps, c1s, zero, entropy)
        if ch.me == ATTACKER and f"/{stage}" in ch.scope:
            share = (hs if where == "h" else gs)[0]
            for row, q in zip(share, ckks.context(params.ckks).primes, strict=False):
                row[:] = (row.astype(object) + constant % q) % q
        return hs, gs

    monkeypatch.setattr(collective_refresh, "shares", deviating)


@pytest.mark.parametrize(
    ("stage", "where", "bits"), [("product", "g", 264), ("product", "g", 200), ("gradient", "h", 150)]
)
def test_n1_a_site_that_shifts_its_share_of_a_refresh_ends_the_training(monkeypatch, stage, where, bits):
    config = dataclasses.replace(CONFIG, steps=1)
    shifting(monkeypatch, stage, where, 1 << bits)
    run = run_protocol(encrypted_training, Case(params(config), batches(config)), timeout=60)
    assert run.errors[HUB].code == "range"
    assert {HUB, *PARTIES} == set(run.errors)
    opened = {e.name for r in run.receipts.values() for e, _ in r.entries if e.kind == "opened"}
    assert opened == {"random combinations of the encrypted model's coefficients, flooded"}


# ---- the relinearisation key ----------------------------------------------------------------------------------------


def shift_relin(delta):
    """`collective_relin.holder` that adds a constant to its h of the first digit, and audits what it sent."""

    async def holder(ch, params, secret, *, entropy):
        c, S = ckks.context(params.ckks), params.aggregator
        r, K, s, prg, book = c.ring, len(c.primes), secret.ntt, entropy.prg(), AuditLog()
        u = r.forward(r.of_small(prg.ternary(params.ckks.degree), K))
        for d in range(params.ckks.digits):
            a = ckks.common(params.ckks, ch.run_id, f"relin/{d}", K)
            h = r.add_product(r.error(prg, K), u, a, sign=-1)
            c.bases.known_share(h, s, d)
            if d == 0:
                for row, q in zip(h, c.primes, strict=True):
                    row[:] = (row.astype(object) + delta % q) % q
            g = r.add_product(r.error(prg, K), s, a)
            await ch.send(S, collective_relin.First(c.pack(h), c.pack(g)))
            book.sent(h, g)
        sums = []
        for _ in range(params.ckks.digits):
            got = await ch.recv(S, collective_relin.Firsts)
            sums.append([c.unpack(x, K) for x in (got.h, got.g)])
            book.heard(got.h, got.g)
            book.total(*sums[-1])
        await collective_audit.holder(ch.sub("firsts"), params.audit, book, entropy=entropy)
        for h, g in sums:
            f = r.add_product(r.error(prg, K), s, h)
            r.add_product(f, r.subtract(u.copy(), s), g)
            await ch.send(S, collective_relin.Second(c.pack(f)))
            book.sent(f)
        fs = []
        for _ in range(params.ckks.digits):
            packed = (await ch.recv(S, collective_relin.Seconds)).f
            fs.append(c.unpack(packed, K))
            book.heard(packed)
            book.total(fs[-1])
        await collective_audit.holder(ch.sub("seconds"), params.audit, book, entropy=entropy)
        return ckks.SwitchingKey(np.stack(fs), np.stack([g for _, g in sums]))

    return holder


def test_a_site_that_shifts_the_relinearisation_key_reads_the_others_secret_in_products_and_is_caught():
    """Nobody noticed such a key: every product had public digits times δ·s added. The range check multiplies zeros."""
    shares, c, r = secrets(RING, 3), ckks.context(RING), ckks.context(RING).ring
    case = Case(collective_relin.Params(PARTIES, HUB, RING), {i: (x,) for i, x in shares.items()})
    delta = 1 << 500
    run = run_protocol(collective_relin, case, roles={ATTACKER: shift_relin(delta)}, timeout=60)
    check_no_errors(run)  # both audits passed
    s, config = whole(RING, shares), dataclasses.replace(CONFIG, steps=1)
    p, key = params(config), public(RING, shares)
    model = [c.encrypt(key, np.zeros(RING.slots), RING.top, RING.scale, Entropy())]
    keys = Keys(b"", key, values(run)[HUB], {})
    zero = relinearised_zero(RING, keys, model, K)
    seen = r.add_product(zero.polys[0].copy(), zero.polys[1], s)  # what an opening would show
    c2 = c.bases.tensor(*(np.ascontiguousarray(ct.polys) for ct in zero_factors(c, keys, model)))[2]
    bare = ckks.SwitchingKey(np.zeros_like(keys.relin.b), np.zeros_like(keys.relin.a))
    for row, q in zip(bare.b[0], c.primes, strict=True):
        row[:] = delta % q
    digits = c.bases.switched(c.bases.digits(c2), [bare])[0]  # public
    left = r.add_product(seen.copy(), digits, s, sign=-1)
    assert max(abs(v) for v in integers(c, seen)) > 2**200
    assert max(abs(v) for v in integers(c, left)) < 2**60  # all of it was digits times the secret key
    good = Keys(b"", key, honest_relin(case), {})
    small = relinearised_zero(RING, good, model, K)
    assert max(abs(v) for v in integers(c, r.add_product(small.polys[0].copy(), small.polys[1], s))) < 2**60
    for held, code in ((keys, "range"), (good, None)):
        cts = range_ciphers(p, held, model)
        inputs = {i: (x, key, [ct.polys[1] for ct in cts]) for i, x in shares.items()} | {HUB: (key, cts)}
        checked = run_protocol(collective_range, Case(p.range, inputs), timeout=60)
        assert (checked.errors[HUB].code if checked.errors else None) == code


def honest_relin(case):
    run = run_protocol(collective_relin, case, timeout=60)
    check_no_errors(run)
    return values(run)[HUB]


def zero_factors(c, keys, model):
    """The two encryptions of zero that `relinearised_zero` multiplies."""
    made, product = [], c.product
    try:
        type(c).product = lambda self, x, y, relin: made.extend([x, y]) or product(x, y, relin)
        relinearised_zero(c.params, keys, model, K)
    finally:
        type(c).product = product.__func__
    return made


# ---- the check itself -----------------------------------------------------------------------------------------------


def small_case(seed=0):
    """Encryptions at the smallest ring; nobody deviates."""
    shares = secrets(RING, 3)
    c, key = ckks.context(RING), public(RING, shares)
    P = collective_range.Params(PARTIES, HUB, RING, RING.top, 2, RING.scale, 3)
    values_of = np.random.default_rng(seed).uniform(-8, 8, (2, RING.slots))
    cts = [c.encrypt(key, v, RING.top, RING.scale, entropy(f"{seed}")) for v in values_of]
    return Case(P, {i: (s, key, [ct.polys[1] for ct in cts]) for i, s in shares.items()} | {HUB: (key, cts)})


def test_the_range_check_passes_honest_values_at_its_cost_and_shows_nothing_by_its_messages():
    check_no_errors(run_protocol(collective_range, small_case(), timeout=60))
    check_cost(collective_range, small_case())
    check_vectors(collective_range, small_case(), VECTORS / "collective_range.json")
    check_view(collective_range, small_case(1), small_case(2))


@pytest.mark.slow
def test_every_message_of_a_range_check_that_goes_wrong_ends_it_by_name():
    assert faults_on(collective_range, small_case) >= 8


def test_lies_in_a_range_check():
    lies = check_lies(
        collective_range, [small_case()], right=lambda lie, found: None, liars=[HUB, *PARTIES[:2]], within=400.0
    )
    assert lies.tried >= 10
    assert lies.aborted >= 8


def test_shares_and_combinations_of_a_range_check_are_hidden():
    """σ - T·s is a flood and not a small error; T - Σ r·c1 is uniform and not small: factors do not show in T."""
    case = small_case()
    p, c, (secret, key, c1s) = case.params, ckks.context(RING), case.inputs[PARTIES[0]]
    r, total = c.ring, c1s[0]
    share = collective_range.decryption_share(p, secret, total, Entropy())
    left = integers(c, r.add_product(share, total, secret.ntt, sign=-1)).astype(float)
    assert 0.25 < left.std() / 2.0 ** (p.flood_bits - 1) < 4
    factors = collective_range.Factors(p, bytes(32), 0)
    bare = r.zeros(p.primes)
    for f, c1 in zip(factors._factors, c1s, strict=True):
        r.add_product(bare, f, c1)
    left = integers(c, r.subtract(factors.combine(c1s, key.a, 1), bare))
    assert max(map(abs, left)) > 2 ** (sum(RING.bits[: p.primes]) - 3)


def test_a_verifier_that_wants_something_else_decrypted_is_stopped_before_any_share_is_opened():
    """The auditor sends the second polynomial of a stored ciphertext instead of a combination."""
    case = small_case()
    c, (_, cts) = ckks.context(RING), case.inputs[HUB]

    async def greedy(ch, params, secret, key, c1s, *, entropy):
        scatter = ch.scatter

        async def other(to, msg=None):
            if isinstance(msg, collective_range.Combination):
                msg = collective_range.Combination((c.pack(cts[0].polys[1]),) * collective_range.REPEATS)
            await scatter(to, msg)

        ch.scatter = other
        return await collective_range.holder(ch, params, secret, key, c1s, entropy=entropy)

    run = run_protocol(collective_range, case, roles={PARTIES[0]: greedy}, timeout=20)
    assert run.errors[HUB].code == "combination"
    sent = {e.name for i in PARTIES for e, _ in run.receipts[i].entries if e.kind == "sent"}
    assert "collective_range.Share" not in sent


# ---- one sample of another site --------------------------------------------------------------------------------------


def one_sample(c, L, ct, sample):
    """Everything but one sample masked away by a plaintext, as the auditor could do with a ciphertext it received."""
    table = np.zeros((1, 1, L.I))
    table[..., sample] = 1
    return c.multiply_plain(ct, c.encode(L.spread(table), ct.primes, 2.0**20))


def test_n2_a_received_gradient_masked_to_one_sample_shows_it_no_longer(trained):
    p, data, *_, run = trained
    site, c, L = values(run)[PARTIES[0]], ckks.context(p.ckks), p.layout
    s, (X, Y) = whole(p.ckks, {i: values(run)[i].keys.secret for i in PARTIES}), data[PARTIES[0]]
    (raw,) = old.gradient_ciphers(c, L, site.model, X[0], Y[0], site.keys, Entropy())
    refresh = training_refreshes.refreshes(p)["gradient"]
    (new,), (pad,) = training_state.gradient_ciphers(c, L, site.model, X[0], Y[0], site.keys, refresh, Entropy())
    sample, read = 5, {}
    for name, polys in (("old", raw), ("new", new)):
        ct = one_sample(c, L, c.cipher(polys, p.ckks.scale), sample)
        z = c.decrypt(s, ct).reshape(L.J, L.R)[: p.config.markers, : L.O * L.I].reshape(-1, L.O, L.I)
        read[name] = z[:, 0, sample]  # x·E for one class, what weighted weights would have shown
    assert abs(np.corrcoef(read["old"], X[0][sample])[0, 1]) > 0.999
    assert np.abs(read["new"]).min() > 2.0**30 * np.abs(read["old"]).max()
    sums = []
    for polys, taken in ((raw, np.zeros_like(pad)), (new, pad)):
        m = c.ring.subtract(c.ring.add_product(polys[0].copy(), polys[1], s), taken)
        z = slots.embedding(p.ckks.degree).to_slots(c.ring.integers(c.ring.backward(m)))
        sums.append(slots.to_real(refresh.maps[0].apply(z, np.ones(1)), p.ckks.scale))
    assert np.abs(sums[0]).max() > 1e-3
    np.testing.assert_allclose(sums[0], sums[1], atol=1e-12)  # what the refresh takes of it is the same, but for [0]


def test_n2_at_steered_logits_a_mask_of_46_bits_showed_single_samples_and_a_pad_does_not(trained):
    """E grows with the fifth power. At logits of 2^16, a sample was larger than its mask."""
    p, data, *_, run = trained
    site, c, L = values(run)[PARTIES[0]], ckks.context(p.ckks), p.layout
    s, (X, Y) = whole(p.ckks, {i: values(run)[i].keys.secret for i in PARTIES}), data[PARTIES[0]]
    refresh, sample = training_refreshes.refreshes(p)["gradient"], int(np.abs(X[0][:, 0]).argmax())
    for size, seen in ((1.0, False), (2.0**17.5, True)):
        M = np.zeros((p.config.markers, p.config.classes))
        M[0] = size / abs(X[0][sample, 0])
        model = [c.encrypt(site.keys.public, L.model_slots(M, L.groups[0]), p.ckks.top, p.ckks.scale, Entropy())]
        (before,) = old.gradient_ciphers(c, L, model, X[0], Y[0], site.keys, Entropy())
        c.ring.add(before[0], old.kernel_mask(refresh.params, refresh.maps[0], Entropy()))
        (now,), _ = training_state.gradient_ciphers(c, L, model, X[0], Y[0], site.keys, refresh, Entropy())
        cosines = []
        for polys in (before, now):
            ct = one_sample(c, L, c.cipher(polys, p.ckks.scale), sample)
            z = c.decrypt(s, ct).reshape(L.J, L.R)[: p.config.markers, : L.O * L.I].reshape(-1, L.O, L.I)[:, 0, sample]
            cosines.append(abs(z @ X[0][sample]) / np.linalg.norm(z) / np.linalg.norm(X[0][sample]))
        assert (cosines[0] > 0.9999) == seen
        assert cosines[1] < 0.9999


def test_n2_a_padded_gradient_is_uniform_modulo_every_prime(trained):
    """Whatever the logits are: not a large mask, but one-time-pad coefficients."""
    p, data, *_, run = trained
    site, c, L = values(run)[PARTIES[0]], ckks.context(p.ckks), p.layout
    s, (X, Y) = whole(p.ckks, {i: values(run)[i].keys.secret for i in PARTIES}), data[PARTIES[0]]
    refresh = training_refreshes.refreshes(p)["gradient"]
    (new,), (pad,) = training_state.gradient_ciphers(c, L, site.model, X[0], Y[0], site.keys, refresh, Entropy())
    m = c.ring.backward(c.ring.add_product(new[0].copy(), new[1], s))
    for row, q in zip(m, c.primes, strict=False):
        counts = np.histogram(row.astype(float) / q, bins=16, range=(0, 1))[0]
        assert np.abs(counts - len(row) / 16).max() < 6 * (len(row) / 16) ** 0.5
    left = c.ring.subtract(c.ring.forward(m.copy()), pad)
    assert max(map(abs, c.ring.lift_exact(c.ring.backward(left)))) < 2.0 ** (p.ckks.scale_bits + 6)
    again = training_state.gradient_ciphers(c, L, site.model, X[0], Y[0], site.keys, refresh, Entropy())[1][0]
    assert (again != pad).mean() > 0.99


@pytest.mark.slow
@pytest.mark.parametrize("part", ["whole", "one sample"])
def test_n2_a_replayed_gradient_spoils_the_training_and_shows_nothing(monkeypatch, part):
    """The auditor submits the first step's sum as its own of the second: it is uniform, and so is the model."""
    data, stored = batches(CONFIG), []
    received, gradients = encrypted_training.read_ciphers, encrypted_training.gradient_ciphers

    def keep(params, got, line, sender):
        raws = received(params, got, line, sender)
        if line == "L4":
            stored.append([raw.copy() for raw in raws])
        return raws

    def replay(c, L, model, X, Y, keys, refresh, entropy):
        if stored and np.array_equal(X, data[PARTIES[0]][0][1]):
            cts = [c.cipher(raw, 1.0) for raw in stored[0]]
            chosen = [one_sample(c, L, ct, 5) for ct in cts] if part == "one sample" else cts
            return [c.raw(ct)[0] for ct in chosen], []
        return gradients(c, L, model, X, Y, keys, refresh, entropy)

    monkeypatch.setattr(encrypted_training, "read_ciphers", keep)
    monkeypatch.setattr(encrypted_training, "gradient_ciphers", replay)
    run = run_protocol(encrypted_training, Case(params(ring=LARGE, open_model=True), data), timeout=120)
    assert set(run.errors) == {HUB, *PARTIES}
    assert run.errors[HUB].code in ("range", "copies", "diverged")
    opened = {e.name for r in run.receipts.values() for e, _ in r.entries if e.kind == "opened"}
    assert not any("trained model (part" in name for name in opened)


# ---- a querier's abort ----------------------------------------------------------------------------------------------


def test_n6_whether_a_querier_goes_on_does_not_depend_on_what_a_helping_site_added(trained, monkeypatch):
    p, *_ = trained
    X = np.random.default_rng(3).uniform(-3, 3, (4, p.config.markers))
    for logit in (-1.0, 1.0):  # one bit of a logit, by who aborted
        added = np.array([[64.0 + logit]])
        if logit > 0:
            with pytest.raises(ProtocolAbort, match="64"):
                old.answer(added)
        else:
            old.answer(added)
    switched = key_switch.switched

    def deviating(params, secret, c1, key, zero, entropy):
        h, g = switched(params, secret, c1, key, zero, entropy)
        if secret is values(trained[-1])[PARTIES[0]].keys.secret:
            c = ckks.context(params.ckks)
            c.ring.add(h, c.encode(np.full(params.ckks.slots, 1e6), params.primes, params.scale).residues)
        return h, g

    monkeypatch.setattr(key_switch, "switched", deviating)
    asked = run_protocol(oblivious_prediction, query_case(trained, X), timeout=60)
    check_no_errors(asked)
    assert (values(asked)[ATTACKER] == oblivious_prediction.LARGEST_LOGIT).all()


def test_weights_that_everybody_knows_have_no_noise_that_a_product_could_show():
    """Before, they were (b + m, a): whoever had D·(b + a·s) opened, D known, had equations in the key."""
    state = training_state.State.initial(params())
    for ct in (*state.model, *state.W, *state.V, *state.archive):
        assert not ct.polys[1].any()


def test_many_opened_numbers_are_refused():
    from cloister.errors import ParameterError
    from cloister.workflows.train_cellcnn.cellcnn_circuit import choose_ring

    config = cellcnn.Config(markers=128, filters=64, classes=2)
    ring = choose_ring(config, 3)
    encrypted_training.Params(PARTIES, HUB, ring, config)
    with pytest.raises(ParameterError, match="combinations of the ciphertexts' noise"):
        encrypted_training.Params(PARTIES, HUB, ring, config, open_model=True)


def test_few_functionals_of_the_noise_are_opened():
    """Each known functional of the key counts as one dimension less: the default model stays within the table."""
    from cloister.mpc.crypto.ckks.parameters import OPENINGS
    from cloister.mpc.crypto.rns.ring import SECURE_BITS
    from cloister.workflows.train_cellcnn.cellcnn_circuit import Layout, choose_ring

    config = cellcnn.Config(markers=38, filters=8, classes=2)
    P = choose_ring(config, 3)
    left = P.degree - Layout(config, P, 3).functionals(OPENINGS)
    assert sum(P.bits) <= SECURE_BITS[P.degree] * left / P.degree
    assert names(3) == PARTIES
