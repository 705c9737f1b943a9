"""Refresh, threshold decryption and key switch: the five questions, and the attacks that they stop."""

import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("seal")
sys.path.insert(0, str(Path(__file__).parents[1]))

from collective import HUB, SMALL, encrypt, entropy, faults_on, names, secrets, size, whole

from cloister.crypto.ckks import scheme as ckks
from cloister.crypto.entropy import Entropy
from cloister.crypto.lattice import slots
from cloister.errors import ParameterError, RefusedError
from cloister.protocols.ckks import collective_refresh, key_switch, threshold_decrypt
from cloister.protocols.ckks.collective_refresh import Ledger
from cloister.study import Party
from cloister.testing import Case, check_cost, check_no_errors, check_vectors, check_view, run_protocol, values

VECTORS = Path(__file__).parents[2] / "vectors"
ASKER = Party("asker")
BIG = 2.0**85  # a scale that leaves room for flooding at two base primes
SHARES = secrets(SMALL, 3, "opening")
S = SMALL.slots


def plain(seed=0):
    return np.random.default_rng(seed).normal(size=S)


def scaled(seed=0):
    return encrypt(SMALL, SHARES, plain(seed), k=2, scale=BIG)


def ledger(ct=None):
    made = Ledger()
    if ct is not None:
        c = ckks.context(SMALL)
        made.admit(c.pack(c.raw(ct)[0][1]))
    return made


MAPS = [
    slots.permutation_map(np.random.default_rng(5).permutation(S)),
    slots.make_map([(np.arange(100), [0, 1, S + 7], [0.5, -1.0, 2.0])], S),
]


def refresh_case(seed=0):
    cts = [encrypt(SMALL, SHARES, plain(seed), k=2), encrypt(SMALL, SHARES, plain(seed + 1), k=2)]
    params = collective_refresh.Params(
        names(3), HUB, SMALL, (SMALL.scale,) * 2, (SMALL.top, 2), tuple(m.digest for m in MAPS)
    )
    return Case(params, {HUB: (cts, MAPS)} | {p: (s, MAPS, Ledger()) for p, s in SHARES.items()})


def decrypt_case(seed=0, to=2):
    ct = scaled(seed)
    params = threshold_decrypt.Params(names(3), HUB, SMALL, "a test", 2, BIG, 14, names(3)[:to])
    return Case(params, {HUB: (ct,)} | {p: (s, ledger(ct)) for p, s in SHARES.items()})


def switch_case(seed=0):
    ct = scaled(seed)
    params = key_switch.Params(names(3), HUB, ASKER, SMALL, 2, BIG, 14)
    return Case(params, {HUB: (ct,)} | {p: (s, ledger(ct)) for p, s in SHARES.items()})


CASES = {collective_refresh: refresh_case, threshold_decrypt: decrypt_case, key_switch: switch_case}
MODULES = list(CASES)


def test_ideal_refresh_with_any_slot_map():
    case = refresh_case()
    run = run_protocol(collective_refresh, case)
    check_no_errors(run)
    found, c = values(run)[HUB], ckks.context(SMALL)
    want = collective_refresh.ideal(case.params, {HUB: ((plain(0), plain(1)), MAPS)})[HUB]
    for ct, k, slots_wanted in zip(found, case.params.outputs, want, strict=True):
        assert ct.coeff_modulus_size() == k
        np.testing.assert_allclose(c.decrypt(whole(SMALL, SHARES), ct), slots_wanted, atol=1e-5)
    assert all(values(run)[p] is None for p in names(3))


def test_ideal_decryption():
    case = decrypt_case()
    run = run_protocol(threshold_decrypt, case)
    check_no_errors(run)
    wanted = threshold_decrypt.ideal(case.params, {HUB: (plain(),)})
    for party, found in values(run).items():
        if wanted[party] is None:
            assert found is None
        else:
            np.testing.assert_allclose(found, wanted[party], atol=1e-6)


def test_ideal_key_switch():
    run = run_protocol(key_switch, switch_case())
    check_no_errors(run)
    found = values(run)
    np.testing.assert_allclose(found.pop(ASKER), plain(), atol=1e-6)
    assert set(found.values()) == {None}


@pytest.mark.parametrize("module", MODULES, ids=lambda m: m.NAME)
def test_vectors_view_and_cost(module):
    check_vectors(module, CASES[module](), VECTORS / f"{module.NAME}.json")
    check_view(module, CASES[module](1), CASES[module](2))
    check_cost(module, CASES[module]())


@pytest.mark.parametrize("module", MODULES, ids=lambda m: m.NAME)
def test_abort(module):
    assert faults_on(module, CASES[module]) >= 2


# ---- the key ---------------------------------------------------------------------------------------------------------


def solve(c1, h, r):
    """s = h / c1, residue by residue: what anybody can do with a share that carries no noise."""
    inverse = np.array([[pow(int(x), -1, q) for x in row] for row, q in zip(c1, r.primes, strict=False)], np.uint64)
    return r.backward(r.multiply(h, inverse))


def test_an_unflooded_share_gives_the_key_away_and_ours_does_not():
    c = ckks.context(SMALL)
    r, secret = c.ring, SHARES[names(3)[0]]
    raw, _ = c.raw(scaled())
    naked = r.multiply(raw[1], secret.ntt[:2])  # c1·s and nothing else
    assert r.lift_exact(solve(raw[1], naked, r)) == secret.coefficients.tolist()
    params = decrypt_case().params
    ours = c.unpack(threshold_decrypt.share(params, secret, c.pack(raw[1]), Entropy()), 2)
    found = np.array(r.lift_exact(solve(raw[1], ours, r)), float)
    assert np.abs(found).min() > 1  # nowhere near ternary
    assert abs(np.corrcoef(found, secret.coefficients)[0, 1]) < 0.05


def test_flooding_hides_the_noise_of_the_ciphertext():
    """Opened minus plain is the ciphertext's noise plus floods: 40 bits above what was there before."""
    c = ckks.context(SMALL)
    r, ct = c.ring, scaled()
    raw, _ = c.raw(ct)
    message = c.plain_residues(plain(), 2, BIG)
    noise = r.subtract(r.add_product(raw[0].copy(), raw[1], whole(SMALL, SHARES)), message)
    assert size(r, noise) < 2**14  # the bound that the flooding stands on
    total = noise.copy()
    for s in SHARES.values():
        h = c.unpack(threshold_decrypt.share(decrypt_case().params, s, c.pack(raw[1]), Entropy()), 2)
        r.add(total, r.subtract(h, r.multiply(raw[1], s.ntt[:2])))
    assert size(r, total) > 2**40 * size(r, noise)


def test_the_refresh_shows_the_aggregator_a_masked_value_only():
    seen = []
    real = collective_refresh.apply_map

    def spy(params, m, z):
        seen.append(z)
        return real(params, m, z)

    params = refresh_case().params
    need = np.log2(SMALL.scale) + params.value_bits + 40
    assert params.mask_bits >= need
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collective_refresh, "apply_map", spy)
        check_no_errors(run_protocol(collective_refresh, refresh_case()))
    messages = [np.abs(z[0]).max() / SMALL.scale for z in seen]
    assert min(messages) > 2**40  # slots of about 1 appear 2^40 times larger, with their masks


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", [threshold_decrypt, key_switch], ids=lambda m: m.NAME)
def test_a_foreign_ciphertext_is_refused(module):
    case = CASES[module]()
    c = ckks.context(SMALL)
    tampered, _ = c.raw(case.inputs[HUB][0])
    tampered[1][0, 0] ^= np.uint64(1)
    for ct in (scaled(9), c.cipher(tampered, BIG)):
        run = run_protocol(module, Case(case.params, {**CASES[module]().inputs, HUB: (ct,)}), timeout=5)
        assert {run.errors[p].code for p in names(3)} == {"foreign"}
        assert HUB in run.errors


@pytest.mark.parametrize("module", MODULES, ids=lambda m: m.NAME)
def test_a_second_share_for_one_ciphertext_is_refused(module):
    case = CASES[module]()
    check_no_errors(run_protocol(module, case))
    again = run_protocol(module, case, timeout=5)
    assert {again.errors[p].code for p in names(3)} == {"repeated"}


def test_without_consent_nothing_is_opened():
    case = decrypt_case()

    async def refusing(ch, params, secret, ledger, *, entropy):
        return await threshold_decrypt.holder(ch, params, secret, ledger, entropy=entropy, consent=frozenset())

    run = run_protocol(threshold_decrypt, case, roles={names(3)[1]: refusing}, timeout=5)
    assert isinstance(run.errors[names(3)[1]], RefusedError)
    assert HUB in run.errors
    assert not any(e.kind == "opened" for r in run.receipts.values() for e, _ in r.entries)


def test_only_the_querier_whose_key_is_signed_gets_the_result():
    case = switch_case()

    async def swapped(ch, params, ct):
        """Puts a key of its own in the querier's place."""
        key = await ch.recv(params.querier, key_switch.OwnKey)
        c = ckks.context(params.ckks)
        mine = key_switch.OwnKey(key.b, bytes(32), key.signature)
        await ch.scatter(params.holders, key_switch.Request(mine, c.pack(c.raw(ct)[0][1])))
        return await ch.gather(params.holders, key_switch.Share)

    run = run_protocol(key_switch, case, roles={HUB: swapped}, timeout=5)
    assert {run.errors[p].code for p in names(3)} == {"signature"}


def test_refresh_is_refused_where_the_mask_would_not_hide_or_could_wrap():
    with pytest.raises(ParameterError, match="refused"):
        collective_refresh.Params(names(3), HUB, SMALL, (2.0**60,), (2,), (b"",))
    with pytest.raises(ParameterError, match="refused"):
        collective_refresh.Params(names(3), HUB, SMALL, (SMALL.scale,), (2,), (b"",), value_bits=30)


def test_opening_is_refused_where_flooding_would_drown_the_message():
    with pytest.raises(ParameterError, match="larger scale"):
        threshold_decrypt.Params(names(3), HUB, SMALL, "x", 2, SMALL.scale, 14, ())


def test_another_slot_map_than_agreed_is_refused():
    case = refresh_case()
    wrong = [MAPS[0], MAPS[0]]
    inputs = {**case.inputs, names(3)[0]: (SHARES[names(3)[0]], wrong, Ledger())}
    run = run_protocol(collective_refresh, Case(case.params, inputs), timeout=5)
    assert isinstance(run.errors[names(3)[0]], ParameterError)


def test_the_mask_is_fresh_in_every_run():
    c = ckks.context(SMALL)
    shares = []
    for label in ("one", "two"):
        prg = entropy(label).prg()
        limbs = slots.random_limbs(prg.uint64((slots.LIMBS, SMALL.degree)), 96)
        shares.append(c.ring.limbs_to_residues(limbs, 2))
    assert (shares[0] != shares[1]).mean() > 0.99
