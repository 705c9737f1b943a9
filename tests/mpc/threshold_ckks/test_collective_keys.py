"""Public, relinearisation and rotation keys: the five questions, and that no n - 1 of them decrypt."""

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("numba")

from collective import HUB, SMALL, encrypt, faults_on, names, own, secrets, size, whole

from cloister.errors import ParameterError
from cloister.mpc.crypto.ckks import scheme as ckks
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.parties import Party
from cloister.mpc.threshold_ckks import collective_key, collective_relin, collective_rotation
from cloister.testing import (
    Case,
    check_cost,
    check_ideal,
    check_no_errors,
    check_vectors,
    check_view,
    run_protocol,
    values,
)

VECTORS = Path(__file__).parents[2] / "vectors"
MODULES = [collective_key, collective_relin, collective_rotation]


def case(module, n=3, seed="a"):
    extra = {"steps": (1, 16)} if module is collective_rotation else {}
    return Case(module.Params(names(n), HUB, SMALL, **extra), own(secrets(SMALL, n, seed)))


def agree(found, s):
    """The key fits the sum of the secrets: what is left over is small noise."""
    c = ckks.context(SMALL)
    r = c.ring
    if isinstance(found, ckks.PublicKey):
        assert size(r, r.add_product(found.b.copy(), found.a, s)) < 200  # n Gaussians of σ = 3.2
        return
    keys = {0: found} if isinstance(found, ckks.SwitchingKey) else found
    for steps, key in keys.items():
        if steps:
            small = r.rotate_coefficients(s, c.galois(steps))
            target = r.forward(r.of_small(small, len(c.primes)))
            s_ntt = r.forward(r.of_small(s, len(c.primes)))
        else:
            target, s_ntt = r.multiply(s, s), s
        for d in range(SMALL.digits):
            left = r.add_product(key.b[d].copy(), key.a[d], s_ntt)
            r.subtract(left, c.bases.known_share(np.zeros_like(left), target, d))
            assert size(r, left) < 2**20  # products of errors and secrets; the special prime has 50 bits


@pytest.mark.parametrize("module", MODULES, ids=lambda m: m.NAME)
def test_ideal(module):
    check_ideal(module, [case(module), case(module, 2)], agree=agree, timeout=60)


@pytest.mark.parametrize("module", MODULES, ids=lambda m: m.NAME)
def test_vectors_view_and_cost(module):
    check_vectors(module, case(module), VECTORS / f"{module.NAME}.json")
    check_view(module, case(module, seed="a"), case(module, seed="b"))
    check_cost(module, case(module))


@pytest.mark.parametrize("module", MODULES, ids=lambda m: m.NAME)
def test_abort(module):
    kinds = ("drop", "duplicate", "truncate", "kill") if module is collective_key else ("truncate", "kill")
    assert faults_on(module, lambda: case(module), kinds) >= 2


@pytest.fixture(scope="module")
def made():
    shares = secrets(SMALL, 3, "made")
    found = {}
    for module in MODULES:
        extra = {"steps": (16,)} if module is collective_rotation else {}
        run = run_protocol(module, Case(module.Params(names(3), HUB, SMALL, **extra), own(shares)))
        check_no_errors(run)
        found[module] = values(run)[HUB]
    return shares, found


def test_collective_keys_evaluate(made):
    shares, found = made
    c, s = ckks.context(SMALL), whole(SMALL, shares)
    x = np.random.default_rng(0).normal(size=SMALL.slots)
    ct = c.encrypt(found[collective_key], x, SMALL.top, SMALL.scale, Entropy())
    product = c.square(ct, c.held(found[collective_relin]))
    np.testing.assert_allclose(c.decrypt(s, product), x * x, atol=2e-2)
    turned = c.rotate(ct, 16, c.held(found[collective_rotation][16]))
    np.testing.assert_allclose(c.decrypt(s, turned), np.roll(x, -16), atol=1e-3)


def test_n_minus_1_keys_do_not_decrypt(made):
    shares, found = made
    c = ckks.context(SMALL)
    x = np.ones(SMALL.slots)
    ct = c.encrypt(found[collective_key], x, SMALL.top, SMALL.scale, Entropy())
    np.testing.assert_allclose(c.decrypt(whole(SMALL, shares), ct), x, atol=1e-3)
    for left_out in shares:
        colluding = whole(SMALL, {p: s for p, s in shares.items() if p != left_out})
        seen = c.decrypt(colluding, ct)
        assert np.abs(seen).min() > 1e3  # uniform modulo Q: not one slot is near its value
        assert abs(np.corrcoef(seen, np.arange(len(seen)))[0, 1]) < 0.1


# ---- an aggregator that lies -----------------------------------------------------------------------------------------


async def old_relin_answer(ch, params, secret, *, entropy):
    """The holder of `collective_relin` before it audited: L1, L2 and L3 for the first data prime."""
    c, hub = ckks.context(params.ckks), params.aggregator
    r, K, s, prg = c.ring, len(c.primes), secret.ntt, entropy.prg()
    u = r.forward(r.of_small(prg.ternary(params.ckks.degree), K))
    a = ckks.common(params.ckks, ch.run_id, "relin/0", K)
    h = c.bases.known_share(r.add_product(r.error(prg, K), u, a, sign=-1), s, 0)
    g = r.add_product(r.error(prg, K), s, a)
    await ch.send(hub, collective_relin.First(c.pack(h), c.pack(g)))
    firsts = await ch.recv(hub, collective_relin.Firsts)
    h, g = (c.unpack(x, K) for x in (firsts.h, firsts.g))
    f = r.add_product(r.add(r.error(prg, K), r.error(prg, K)), s, h)
    r.add_product(f, r.subtract(u, s), g)
    await ch.send(hub, collective_relin.Second(c.pack(f)))


def asking_for_shares(count):
    """K1: h = 2^20 and g = 0, so that f_i = 2^20·s_i + e."""

    async def role(ch, params):
        c = ckks.context(params.ckks)
        for _ in range(count):
            await ch.gather(params.holders, collective_relin.First)
        h = c.ring.forward(c.ring.of_small(np.eye(1, params.ckks.degree, dtype=np.int64)[0] << 20, len(c.primes)))
        for _ in range(count):
            await ch.scatter(params.holders, collective_relin.Firsts(c.pack(h), c.pack(c.ring.zeros(len(c.primes)))))
        got = await ch.gather(params.holders, collective_relin.Second)
        return {i: c.unpack(m.f, len(c.primes)) for i, m in got.items()}

    return role


def test_k1_chosen_sums_read_every_share_before_they_were_audited():
    c, old = ckks.context(SMALL), case(collective_relin)
    roles = {HUB: asking_for_shares(1)} | dict.fromkeys(names(3), old_relin_answer)
    run = run_protocol(collective_relin, old, roles=roles)
    check_no_errors(run)
    for i, f in values(run)[HUB].items():
        read = np.rint(c.ring.lift(c.ring.backward(f))[0] / 2**20)
        np.testing.assert_array_equal(read, old.inputs[i][0].coefficients)
    run = run_protocol(collective_relin, old, roles={HUB: asking_for_shares(SMALL.top)}, timeout=5)
    assert {(run.errors[p].protocol, run.errors[p].code) for p in names(3)} == {("collective_audit", "sum")}
    assert HUB not in run.outcomes  # it got no second share


async def old_key_holder(ch, params, secret, *, entropy):
    """The holder of `collective_key` before it audited."""
    c, k = ckks.context(params.ckks), params.ckks.top
    a = ckks.common(params.ckks, ch.run_id, "public", k)
    b = c.ring.add_product(c.ring.error(entropy.prg(), k), a, secret.ntt, sign=-1)
    await ch.send(params.aggregator, collective_key.KeyShare(c.pack(b)))
    return ckks.PublicKey(c.unpack((await ch.recv(params.aggregator, collective_key.Key)).b, k), a)


def handing_out(own, only=()):
    """K3: instead of the sum, a key of its own, to everyone or to some."""

    async def role(ch, params):
        c, k = ckks.context(params.ckks), params.ckks.top
        a = ckks.common(params.ckks, ch.run_id, "public", k)
        total = c.ring.zeros(k)
        for m in (await ch.gather(params.holders, collective_key.KeyShare)).values():
            c.ring.add(total, c.unpack(m.b, k))
        b = c.ring.add_product(c.ring.error(Entropy().prg(), k), a, own.ntt, sign=-1)
        for i in params.holders:
            await ch.send(i, collective_key.Key(c.pack(b if not only or i in only else total)))

    return role


def test_k3_a_key_of_its_own_opened_everything_before_keys_were_audited():
    c, own = ckks.context(SMALL), ckks.Secret.draw(SMALL, Entropy())
    roles = {HUB: handing_out(own)} | dict.fromkeys(names(3), old_key_holder)
    run = run_protocol(collective_key, case(collective_key), roles=roles)
    check_no_errors(run)
    x = np.random.default_rng(1).normal(size=SMALL.slots)
    sent = c.encrypt(values(run)["site-0"], x, SMALL.top, SMALL.scale, Entropy())
    np.testing.assert_allclose(c.decrypt(own.ntt, sent), x, atol=1e-3)  # the aggregator reads what a site encrypts
    for only, code in (((), "sum"), (("site-1",), "told")):
        run = run_protocol(collective_key, case(collective_key), roles={HUB: handing_out(own, only)}, timeout=5)
        assert {run.errors[p].code for p in names(3)} == {code}


def test_k3_rotation_keys_too():
    async def liar(ch, params):
        c, K = ckks.context(params.ckks), len(ckks.context(params.ckks).primes)
        for _ in range(params.ckks.digits):
            await ch.gather(params.holders, collective_rotation.RotationShare)
            noise = c.ring.uniform(Entropy().prg(), K)
            await ch.scatter(params.holders, collective_rotation.Rotation(c.pack(noise)))
        return None

    run = run_protocol(collective_rotation, case(collective_rotation), roles={HUB: liar}, timeout=5)
    assert {run.errors[p].code for p in names(3)} == {"sum"}


def test_equal_keys_are_held_once_and_let_go():
    shares = secrets(SMALL, 2)
    made = values(run_protocol(collective_relin, Case(collective_relin.Params(names(2), HUB, SMALL), own(shares))))
    c = ckks.context(SMALL)
    first, second = c.held(made[HUB]), c.held(made["site-0"])
    assert first is second
    count = len(ckks._HELD)
    del first, second, made
    assert len(ckks._HELD) == count - 1


def test_bad_committees_are_refused():
    for holders in ((), names(1), (Party("a"), Party("a")), (Party("a"), HUB)):
        with pytest.raises(ParameterError):
            collective_key.Params(holders, HUB, SMALL)


def test_encrypting_twice_differs():
    shares = secrets(SMALL, 2)
    c = ckks.context(SMALL)
    first = c.raw(encrypt(SMALL, shares, [1.0]))[0]
    key = ckks.own_key(SMALL, Entropy())[1]
    again = [c.raw(c.encrypt(key, np.ones(SMALL.slots), 2, SMALL.scale, Entropy()))[0] for _ in range(2)]
    assert (again[0] != again[1]).mean() > 0.99
    assert first.shape == (2, SMALL.top, SMALL.degree)
