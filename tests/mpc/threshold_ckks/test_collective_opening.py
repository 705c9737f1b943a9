"""Refresh, threshold decryption and key switch: the five questions, and the attacks that they stop."""

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("numba")

from collective import HUB, SMALL, encrypt, entropy, faults_on, names, secrets, size, whole

from cloister.errors import ParameterError, RefusedError
from cloister.mpc.crypto.ckks import scheme as ckks
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.crypto.rns import slots
from cloister.mpc.parties import Party
from cloister.mpc.threshold_ckks import collective_refresh, key_switch, threshold_decrypt
from cloister.testing import Case, check_cost, check_no_errors, check_vectors, check_view, run_protocol, values

VECTORS = Path(__file__).parents[2] / "vectors"
BIG = 2.0**100  # a scale that leaves room for flooding
FRESH = 2.0**12  # more than the noise of an encryption
SHARES = secrets(SMALL, 3, "opening")
S, K = SMALL.slots, SMALL.base
FIRST, SECOND, THIRD = names(3)


def plain(seed=0):
    return np.random.default_rng(seed).normal(size=S)


def scaled(seed=0):
    return encrypt(SMALL, SHARES, plain(seed), k=K, scale=BIG)


def polynomials(ct):
    return ckks.context(SMALL).raw(ct)[0]


MAPS = [
    slots.permutation_map(np.random.default_rng(5).permutation(S)),
    slots.make_map([(np.arange(100), [0, 1, S + 7], [0.5, -1.0, 2.0])], S),
]


def refresh_params(**options):
    return collective_refresh.Params(
        names(3), HUB, SMALL, (SMALL.scale,) * 2, (SMALL.top, 2), tuple(m.digest for m in MAPS), **options
    )


def refresh_case(seed=0):
    cts = [encrypt(SMALL, SHARES, plain(seed), k=K), encrypt(SMALL, SHARES, plain(seed + 1), k=K)]
    return Case(
        refresh_params(),
        {HUB: (cts, MAPS), FIRST: (SHARES[FIRST], MAPS, cts)} | {p: (SHARES[p], MAPS) for p in (SECOND, THIRD)},
    )


def decrypt_case(seed=0):
    ct = scaled(seed)
    c0, c1 = polynomials(ct)
    params = threshold_decrypt.Params(names(3), HUB, SMALL, "a test", K, BIG, FRESH)
    return Case(params, {HUB: (ct,), FIRST: (SHARES[FIRST], c1, c0)} | {p: (SHARES[p], c1) for p in (SECOND, THIRD)})


def switch_case(seed=0):
    c0, c1 = polynomials(scaled(seed))
    params = key_switch.Params(names(3), SECOND, SMALL, K, BIG, FRESH)
    return Case(params, {p: (s, c1) for p, s in SHARES.items()} | {SECOND: (SHARES[SECOND], c1, c0)})


CASES = {collective_refresh: refresh_case, threshold_decrypt: decrypt_case, key_switch: switch_case}
MODULES = list(CASES)


def test_ideal_refresh_with_any_slot_map():
    case = refresh_case()
    run = run_protocol(collective_refresh, case)
    check_no_errors(run)
    c = ckks.context(SMALL)
    want = collective_refresh.ideal(case.params, {HUB: ((plain(0), plain(1)), MAPS)})[HUB]
    for party in (HUB, FIRST):
        for ct, k, slots_wanted in zip(values(run)[party], case.params.outputs, want, strict=True):
            assert ct.primes == k
            np.testing.assert_allclose(c.decrypt(whole(SMALL, SHARES), ct), slots_wanted, atol=1e-3)
    assert values(run)[SECOND] is None is values(run)[THIRD]


def test_ideal_decryption():
    case = decrypt_case()
    run = run_protocol(threshold_decrypt, case)
    check_no_errors(run)
    for found in values(run).values():
        np.testing.assert_allclose(found, plain(), atol=1e-6)


def test_ideal_key_switch():
    run = run_protocol(key_switch, switch_case())
    check_no_errors(run)
    found = values(run)
    np.testing.assert_allclose(found.pop(SECOND), plain(), atol=1e-6)
    assert set(found.values()) == {None}


@pytest.mark.parametrize("module", MODULES, ids=lambda m: m.NAME)
def test_vectors_view_and_cost(module):
    check_vectors(module, CASES[module](), VECTORS / f"{module.NAME}.json")
    check_view(module, CASES[module](1), CASES[module](2))
    check_cost(module, CASES[module]())


@pytest.mark.parametrize("module", MODULES, ids=lambda m: m.NAME)
def test_abort(module):
    kinds = ("truncate", "kill") if module is collective_refresh else ("drop", "duplicate", "truncate", "kill")
    assert faults_on(module, CASES[module], kinds) >= 2


# ---- the key ---------------------------------------------------------------------------------------------------------


def solve(c1, h, r):
    """s = h / c1, residue by residue: what anybody can do with a share that carries no noise."""
    inverse = np.array([[pow(int(x), -1, q) for x in row] for row, q in zip(c1, r.primes, strict=False)], np.uint64)
    return r.backward(r.multiply(h, inverse))


def test_an_unflooded_share_gives_the_key_away_and_ours_does_not():
    c = ckks.context(SMALL)
    r, secret = c.ring, SHARES[FIRST]
    c1 = polynomials(scaled())[1]
    naked = r.multiply(c1, secret.ntt[:K])  # c1·s and nothing else
    assert r.lift_exact(solve(c1, naked, r)) == secret.coefficients.tolist()
    ours = threshold_decrypt.share(decrypt_case().params, secret, c1, Entropy())
    found = np.array(r.lift_exact(solve(c1, ours, r)), float)
    assert np.abs(found).min() > 1  # nowhere near ternary
    assert abs(np.corrcoef(found, secret.coefficients)[0, 1]) < 0.08


def test_flooding_hides_the_noise_of_the_ciphertext():
    """Opened minus plain is the ciphertext's noise plus floods: 2^40·√(N·64) above what was there before."""
    c = ckks.context(SMALL)
    r = c.ring
    c0, c1 = polynomials(scaled())
    message = c.encode(plain(), K, BIG).residues
    noise = r.subtract(r.add_product(c0.copy(), c1, whole(SMALL, SHARES)), message)

    def spread(a):
        return r.lift(r.backward(a.copy()))[0].std()

    assert spread(noise) < FRESH  # the bound that the flooding stands on
    total = noise.copy()
    for s in SHARES.values():
        h = threshold_decrypt.share(decrypt_case().params, s, c1, Entropy())
        r.add(total, r.subtract(h, r.multiply(c1, s.ntt[:K])))
    assert spread(total) > 2**40 * np.sqrt(SMALL.degree * 64) / 2 * spread(noise)


def noise_of(ct, k, wanted, scale):
    """What decrypts beyond the wanted slots, per coefficient."""
    c = ckks.context(SMALL)
    raw, _ = c.raw(ct)
    m = c.ring.add_product(raw[0][:k].copy(), raw[1][:k], whole(SMALL, SHARES)[:k])
    return c.ring.lift(c.ring.backward(c.ring.subtract(m, c.exact_residues(wanted, k, scale))))[0]


def test_k7_a_refresh_adds_the_holders_errors_and_nothing_else():
    """Before, the transform of masks of 138 bits in double-doubles left errors of 2^37; the flooding stood on 2^20."""
    grid = np.rint(plain(0) * 2**20) / 2**20
    ct = encrypt(SMALL, SHARES, grid, k=K)
    maps = [slots.identity_map(S)]
    params = collective_refresh.Params(names(3), HUB, SMALL, (SMALL.scale,), (K,), (maps[0].digest,))
    inputs = {HUB: ([ct], maps), FIRST: (SHARES[FIRST], maps, [ct])} | {p: (SHARES[p], maps) for p in (SECOND, THIRD)}
    run = run_protocol(collective_refresh, Case(params, inputs))
    check_no_errors(run)
    before, after = noise_of(ct, K, grid, SMALL.scale), noise_of(values(run)[HUB][0], K, grid, SMALL.scale)
    added = after - before
    assert added.std() < 1.5 * np.sqrt(2 * 3) * 3.2  # six Gaussians of σ = 3.2, and roundings
    assert np.abs(added).max() < 64


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_without_consent_nothing_is_opened():
    case = decrypt_case()

    async def refusing(ch, params, *inputs, entropy):
        return await threshold_decrypt.holder(ch, params, *inputs, entropy=entropy, consent=frozenset(["validation"]))

    run = run_protocol(threshold_decrypt, case, roles={SECOND: refusing}, timeout=5)
    assert isinstance(run.errors[SECOND], RefusedError)
    assert HUB in run.errors
    assert not any(e.kind == "opened" for r in run.receipts.values() for e, _ in r.entries)


def test_refresh_is_refused_where_too_many_coefficients_would_go_round():
    with pytest.raises(ParameterError, match="refused"):
        collective_refresh.Params(names(3), HUB, SMALL, (2.0**60,), (2,), (b"",))
    with pytest.raises(ParameterError, match="refused"):
        refresh_params(value_bits=30)


def test_opening_is_refused_where_flooding_would_drown_the_message():
    with pytest.raises(ParameterError, match="larger scale"):
        threshold_decrypt.Params(names(3), HUB, SMALL, "x", K, SMALL.scale, FRESH)


def test_another_slot_map_than_agreed_is_refused():
    case = refresh_case()
    inputs = {**case.inputs, SECOND: (SHARES[SECOND], [MAPS[0], MAPS[0]])}
    run = run_protocol(collective_refresh, Case(case.params, inputs), timeout=5)
    assert isinstance(run.errors[SECOND], ParameterError)


ASKER = Party("asker")


def outsider_case(seed=0):
    given = switch_case(seed)
    params = key_switch.Params(names(3), ASKER, SMALL, K, BIG, FRESH)
    return Case(params, {i: x[:2] for i, x in given.inputs.items()} | {ASKER: given.inputs[SECOND][2:]})


def test_an_outsider_without_a_share_of_the_key_reads_the_result_and_nobody_else_does():
    run = run_protocol(key_switch, outsider_case())
    check_no_errors(run)
    found = values(run)
    np.testing.assert_allclose(found.pop(ASKER), plain(), atol=1e-6)
    assert set(found.values()) == {None}
    check_vectors(key_switch, outsider_case(), VECTORS / "key_switch_outsider.json")
    check_cost(key_switch, outsider_case())


# ---- an aggregator that lies -----------------------------------------------------------------------------------------


def lying(change, **kinds):
    """An aggregator that follows the refresh but for one message, which `change` alters before it is sent."""

    async def role(ch, params, cts, maps):
        send = ch.send

        async def altered(to, msg):
            await send(to, change(to, msg) or msg)

        ch.send = altered
        return await collective_refresh.aggregator(ch, params, cts, maps)

    return role


def other_c1(to, msg):
    """K2: asks for a share of a polynomial of its own choice."""
    if isinstance(msg, collective_refresh.Request):
        return collective_refresh.Request((chosen_c1(), *msg.c1[1:]))
    return None


def other_output(to, msg):
    """Shifts the slots of an output by a constant."""
    if isinstance(msg, collective_refresh.Work):
        c = ckks.context(SMALL)
        out = c.unpack(msg.c0[1], 2)
        c.ring.add(out, c.encode(np.ones(S), 2, SMALL.scale).residues)
        return collective_refresh.Work(msg.x, (msg.c0[0], c.pack(out)))
    return None


def other_x(to, msg):
    if isinstance(msg, collective_refresh.Work):
        c = ckks.context(SMALL)
        x = c.unpack(msg.x[0], K)
        c.ring.add(x, c.encode(np.ones(S), K, SMALL.scale).residues)
        return collective_refresh.Work((c.pack(x), msg.x[1]), msg.c0)
    return None


def chosen_c1():
    """The constant Q/4: its product with a ternary secret is a quarter of the modulus, or nothing."""
    c = ckks.context(SMALL)
    Q = np.prod([int(q) for q in c.primes[:K]], dtype=object)
    rows = np.zeros((K, SMALL.degree), np.uint64)
    rows[:, 0] = [int(Q // 4) % q for q in c.primes[:K]]
    return c.pack(c.ring.forward(rows))


@pytest.mark.parametrize(("change", "code"), [(other_c1, "told"), (other_output, "sum"), (other_x, "sum")])
def test_a_lying_aggregator_is_caught_before_an_output_is_used(change, code):
    run = run_protocol(collective_refresh, refresh_case(), roles={HUB: lying(change)}, timeout=5)
    assert {(run.errors[p].protocol, run.errors[p].code) for p in names(3)} == {("collective_audit", code)}


def test_another_opening_is_caught():
    async def liar(ch, params, ct):
        send = ch.send

        async def altered(to, msg):
            if isinstance(msg, threshold_decrypt.Opened):
                c = ckks.context(SMALL)
                m = c.unpack(msg.m, K)
                msg = threshold_decrypt.Opened(c.pack(c.ring.add(m, c.encode(np.ones(S), K, BIG).residues)))
            await send(to, msg)

        ch.send = altered
        return await threshold_decrypt.aggregator(ch, params, ct)

    run = run_protocol(threshold_decrypt, decrypt_case(), roles={HUB: liar}, timeout=5)
    assert {run.errors[p].code for p in names(3)} == {"sum"}


def old_share(c1, secret, message=None):
    """h of the refresh before it masked uniformly: below 2^b, three bits below the modulus."""
    c = ckks.context(SMALL)
    r, prg = c.ring, Entropy().prg()
    bits = int(np.log2(float(np.prod([float(q) for q in c.primes[:K]])))) - 4
    limbs = np.zeros((SMALL.degree, 4), np.uint64)
    limbs[:, :2] = prg.uint64((SMALL.degree, 2))
    limbs[:, 1] >>= np.uint64(128 - bits)
    h = r.add_product(r.error(prg, K), c1, secret.ntt)
    return r.subtract(h, r.forward(r.of_integers(limbs, K))), bits


def test_k2_a_chosen_polynomial_read_the_key_from_the_old_share():
    c = ckks.context(SMALL)
    r, secret = c.ring, SHARES[SECOND]
    c1 = c.unpack(chosen_c1(), K)
    Q = float(np.prod([float(q) for q in c.primes[:K]]))
    h, _ = old_share(c1, secret)
    found = r.lift(r.backward(h))[0] / Q  # s/4 less a mask below 1/16
    assert (np.ceil(found * 4 - 1e-9) == secret.coefficients).all()


def test_k2_it_reads_nothing_from_ours():
    """What the aggregator gets of one holder is uniform, and so is what it gets of all together."""
    c = ckks.context(SMALL)
    r, c1, params, total = c.ring, c.unpack(chosen_c1(), K), refresh_params(), None
    keys = {frozenset(pair): entropy(f"pair/{sorted(pair)}").bytes(32) for pair in PAIRS}

    class Here:
        run_id, me = b"r" * 32, None

    Q = float(np.prod([float(q) for q in c.primes[:K]]))
    for p, secret in SHARES.items():
        Here.me = p
        zero = collective_refresh.ZeroShares(SMALL, p, {o: keys[frozenset((p, o))] for o in names(3) if o != p})
        hs, _ = collective_refresh.shares(Here, params, secret, MAPS, [c1, c1], zero, Entropy())
        seen = r.lift(r.backward(hs[0].copy()))[0] / Q
        assert uniform(seen)
        assert abs(np.corrcoef(np.ceil(seen * 4), secret.coefficients)[0, 1]) < 0.08
        total = hs[0].copy() if total is None else r.add(total, hs[0])
    seen = r.lift(r.backward(total))[0] / Q
    assert uniform(seen)
    assert abs(np.corrcoef(seen, sum(s.coefficients for s in SHARES.values()))[0, 1]) < 0.08


PAIRS = [(FIRST, SECOND), (FIRST, THIRD), (SECOND, THIRD)]


def uniform(x):
    """Kolmogorov-Smirnov on (-1/2, 1/2); chance exceeds it once in 10^10."""
    u = np.sort(x + 0.5)
    return np.abs(u - (np.arange(len(u)) + 0.5) / len(u)).max() * np.sqrt(len(u)) < 3.4


def test_k6_a_message_beyond_its_bounds_showed_under_the_old_masks_and_does_not_under_ours():
    """Slots far beyond their bound, as in a training that diverges."""
    c = ckks.context(SMALL)
    r, huge = c.ring, plain(3) * 2.0**68
    coefficients = r.lift(r.backward(c.encode(huge, K, 2.0**60).residues))[0]
    zero = np.zeros((K, SMALL.degree), np.uint64)
    masks = [old_share(zero, s)[0] for s in SHARES.values()]
    seen = c.encode(huge, K, 2.0**60).residues
    for h in masks:
        r.add(seen, h)
    assert np.corrcoef(r.lift(r.backward(seen))[0], coefficients)[0, 1] > 0.9
    params, x = refresh_params(), c.encode(huge, K, 2.0**60).residues

    class Here:
        run_id, me = b"r" * 32, None

    for p, secret in SHARES.items():
        Here.me = p
        zeta = collective_refresh.ZeroShares(SMALL, p, {})
        r.add(x, collective_refresh.shares(Here, params, secret, MAPS, [zero, zero], zeta, Entropy())[0][0])
    seen = r.lift(r.backward(x))[0] / float(np.prod([float(q) for q in c.primes[:K]]))
    assert uniform(seen)
    assert abs(np.corrcoef(seen, coefficients)[0, 1]) < 0.08


def test_the_mask_is_fresh_in_every_run():
    r = ckks.context(SMALL).ring
    first, second = (r.spread(entropy(label).prg(), 96) for label in ("one", "two"))
    assert (first[:, :2] != second[:, :2]).mean() > 0.99
    assert size(r, r.flood(entropy("one").prg(), 96, K)) < 1.5 * 2.0**96
