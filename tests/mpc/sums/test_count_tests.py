import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloister.errors import DataError, ParameterError, ProtocolAbort
from cloister.mpc.parties import Party
from cloister.mpc.sums import count_tests
from cloister.mpc.sums.count_tests import Params
from cloister.rehearsal.rehearsal import Fault
from cloister.testing import (
    Case,
    check_abort,
    check_cost,
    check_no_errors,
    check_vectors,
    check_view,
    run_protocol,
    transcript,
    values,
)

HUB = Party("hub")
SECRET = bytes(range(32))


def case(n=3, length=20, least=4, most=60, seed=0, proofs=0):
    rng = np.random.default_rng(seed)
    names = tuple(Party(f"site-{i}") for i in range(n))
    inputs = {u: (rng.integers(0, least + 1, length), SECRET) for u in names}
    return Case(Params(names, HUB, length, least, most, proofs), inputs)


def wanted(c, present):
    return count_tests.ideal(c.params, {u: c.inputs[u][0] for u in present})[HUB]


def check_bits(c, run):
    for found in values(run).values():
        np.testing.assert_array_equal(found.bits, wanted(c, found.present))


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(2, 6),
    length=st.integers(1, 30),
    least=st.integers(1, 12),
    extra=st.integers(0, 2000),
    seed=st.integers(0, 2**20),
    proofs=st.integers(0, 3),
)
def test_the_encoding_says_exactly_whether_the_sum_is_large_enough_and_proves_it(n, length, least, extra, seed, proofs):
    rng = np.random.default_rng(seed)
    most = 2 * least * n + extra
    p = Params(tuple(Party(f"s{i}") for i in range(n)), HUB, length, least, most, proofs)
    xs = {u: rng.integers(0, 2 * least + 1, length) for u in p.sites}
    z = np.zeros(p.words, np.uint64)
    for u, x in xs.items():
        words, rho = count_tests.encode(p, x, u, p.sites, bytes(32))
        z += words
    bits, ratios = count_tests.decode(p, z)
    np.testing.assert_array_equal(bits, sum(xs.values()) >= least)
    count_tests.check_proof(p, bits, count_tests.proof_of(bits, ratios), rho)
    assert not ratios[~bits].any()


def test_a_count_that_is_too_small_cannot_be_proved_large():
    """Whatever is said of ρ_1/ρ_0 where z < k is right as often as any guess; where z ≥ k it is always right."""
    sites = tuple(map(Party, ("a", "b", "c")))
    p = Params(sites, HUB, 4000, 3, 30, 1)
    xs = dict(zip(sites, (np.arange(4000) % 2, np.zeros(4000, int), np.ones(4000, int)), strict=True))  # 1 or 2
    z, rho = np.zeros(p.words, np.uint64), None
    for u, x in xs.items():
        words, rho = count_tests.encode(p, x, u, sites, SECRET)
        z += words
    bits, ratios = count_tests.decode(p, z)
    assert not bits.any()
    for guess in (ratios, np.ones_like(ratios), np.full_like(ratios, 17)):
        for said in (~bits, np.arange(4000) < 3):
            with pytest.raises(ProtocolAbort) as e:
                count_tests.check_proof(p, said, count_tests.proof_of(said, guess), rho)
            assert e.value.code == "proof"
    right = rho[:, 1] * count_tests._inverse(rho[:, 0], p.p) % p.p
    assert np.bincount(right, minlength=p.p)[1:].min() > 80  # 4000/30 = 133 each: no value is likelier
    for i in np.flatnonzero(right == 17)[:3]:
        said = np.arange(4000) == i
        count_tests.check_proof(p, said, count_tests.proof_of(said, np.full_like(ratios, 17)), rho)


@pytest.mark.parametrize(("n", "least", "most"), [(3, 1, 3), (3, 8, 1024), (5, 4, 60)])
def test_ideal(n, least, most):
    c = case(n=n, least=least, most=most)
    if most == 3:
        c = Case(c.params, {u: (np.minimum(x, 1), s) for u, (x, s) in c.inputs.items()})
    run = run_protocol(count_tests, c)
    check_no_errors(run)
    check_bits(c, run)
    assert len(values(run)) == n + 1


def test_vectors():
    check_vectors(count_tests, case(length=5, proofs=1), Path(__file__).parents[2] / "vectors" / "count_tests.json")


def opened(p, xs, key=SECRET):
    """What the coordinator sees of many tests of the same counts: the sums, unpacked, before they are reduced."""
    z = np.zeros(p.words, np.uint64)
    for u, x in zip(p.sites, xs, strict=True):
        z += count_tests.encode(p, np.full(p.length, x), u, p.sites, key)[0]
    shifts = np.arange(p.lanes, dtype=np.uint64) * np.uint64(p.bits)
    lanes = (z[:, None] >> shifts) & np.uint64((1 << p.bits) - 1)
    return lanes.ravel()[: p.length * p.entries].reshape(p.length, p.entries).astype(int)


def laws(p, xs, key):
    """Frequencies of the whole reduced E, and of each sum before it is reduced."""
    seen = opened(p, xs, key)
    place = p.p ** np.arange(p.entries)
    whole = np.bincount((seen % p.p) @ place, minlength=p.p**p.entries)
    return whole, *(np.bincount(seen[:, i], minlength=2 * p.p - 1) for i in range(p.entries))


def distance(one, two):
    """Chi-square of two samples, and its degrees of freedom."""
    both = one + two
    used = both > 0
    return float(((one - two)[used] ** 2 / both[used]).sum()), int(used.sum()) - 1


@pytest.mark.parametrize("proofs", [0, 1])
def test_what_is_opened_depends_on_the_bit_alone(proofs):
    """k = 2, two sites: counts on the same side look alike, however they are split; sides do not."""
    p = Params((Party("a"), Party("b")), HUB, 60_000, 2, 4 if proofs else 6, proofs)  # p = 5 or 7
    keys = iter(bytes([i]) * 32 for i in range(1, 100))
    below, above = [(0, 0), (0, 1), (1, 0)], [(2, 0), (2, 2), (0, 3), (1, 3)] if proofs else [(2, 0), (2, 3), (0, 5)]
    for side in (below, above):
        first = laws(p, side[0], next(keys))
        for xs in side[1:]:
            for a, b in zip(first, laws(p, xs, next(keys)), strict=True):
                stat, df = distance(a, b)
                assert stat < df + 6 * np.sqrt(2 * df), f"{xs} can be told from {side[0]}"
    stat, df = distance(laws(p, below[0], next(keys))[0], laws(p, above[0], next(keys))[0])
    assert stat > 20 * df


def test_a_site_would_read_the_count_from_the_sum_and_does_not_get_it():
    """Who knows the common seed solves E = z · slope + offset for z; so a site is told bits, and no sum."""
    c = case()
    p, key = c.params, SECRET
    zs = np.arange(p.length) % (p.least + 1)

    def entries(z):
        sums = sum(count_tests.encode(p, z if u == p.sites[0] else 0 * z, u, p.sites, key)[0] for u in p.sites)
        shifts = np.arange(p.lanes, dtype=np.uint64) * np.uint64(p.bits)
        lanes = (sums[:, None] >> shifts) & np.uint64((1 << p.bits) - 1)
        return lanes.ravel()[: p.length * p.entries].astype(int).reshape(p.length, p.entries) % p.p

    seen, none, one = entries(zs), entries(0 * zs), entries(0 * zs + 1)
    slope = [pow(int(a), -1, p.p) for a in (one - none)[:, 0] % p.p]  # a one on the diagonal of R₁
    np.testing.assert_array_equal((seen - none)[:, 0] * slope % p.p, zs)
    run = run_protocol(count_tests, c)
    sent = {name for name, to, _ in transcript(run)["hub"] if to == p.sites[0]}
    assert "secure_sum.Total" not in sent
    assert {n for n in sent if not n.startswith(("channel.", "secure_sum."))} == {"count_tests.Outcome"}


def test_without_masks_a_small_count_would_show():
    """The same test bites where r_u and R₁, R₂ are left out: det alone takes another value for every count."""
    p = 7
    seen = {z: sorted((rho * z * (z - 1)) % p for rho in range(1, p)) for z in range(6)}
    assert seen[0] == seen[1] != seen[2]
    assert len({tuple((z * np.arange(1, p)) % p) for z in range(3)}) == 3


def test_a_missing_site_leaves_only_noise():
    """What is opened when a site's part is missing is uniform, whatever the counts."""
    p = Params((Party("a"), Party("b")), HUB, 3000, 2, 6)
    for x in (0, 3):
        z, _ = count_tests.encode(p, np.full(3000, x), Party("a"), p.sites, SECRET)
        shifts = np.arange(p.lanes, dtype=np.uint64) * np.uint64(p.bits)
        values_ = ((z[:, None] >> shifts) & np.uint64((1 << p.bits) - 1)).ravel()[: 3000 * 3].astype(int)
        counts = np.bincount(values_ % 7, minlength=7)
        assert ((counts - 9000 / 7) ** 2 / (9000 / 7)).sum() < 35  # df 6


def test_view_and_cost():
    check_view(count_tests, case(seed=1), case(seed=2))
    check_cost(count_tests, case(length=500))
    check_cost(count_tests, case(length=500, proofs=2))


@pytest.mark.parametrize(
    "kind", ["truncate", *(pytest.param(k, marks=pytest.mark.slow) for k in ("drop", "duplicate", "swap", "kill"))]
)
def test_abort_or_survive(kind):
    c = case()
    messages = [("site-1", "hub", f"secure_sum.{n}") for n in ("Keys", "MaskedInput", "Unmask")]
    messages += [("hub", "site-1", n) for n in ("secure_sum.Roster", "secure_sum.Survivors", "count_tests.Outcome")]
    assert check_abort(count_tests, c, survived=lambda run: check_bits(c, run), kinds=[kind], messages=messages) == 6


@pytest.mark.parametrize("name", ["Keys", "Shares", "MaskedInput", "Vouch"])
def test_a_dropped_site_is_left_out_and_the_rest_is_exact(name):
    c = case(n=4)
    run = run_protocol(count_tests, c, faults=[Fault("kill", "site-2", "hub", name)], timeout=2.0)
    check_no_errors(run)
    check_bits(c, run)
    assert len(values(run)) == 4


def test_bad_input():
    c = case()
    with pytest.raises(ParameterError, match="from 1 to 64"):
        Params(c.params.sites, HUB, 1, 0, 10)
    with pytest.raises(ParameterError, match="largest pooled count"):
        Params(c.params.sites, HUB, 1, 8, 4)
    for x, error in ((np.zeros(3, np.int64), ParameterError), (np.full(20, 61), DataError)):
        with pytest.raises(error):
            count_tests.check_counts(c.params, x)


def test_the_modulus_is_a_prime_above_every_count():
    for most in (1, 3, 6, 1024, 40_000):
        p = Params((Party("a"), Party("b")), HUB, 1, 1, most).p
        assert p > most
        assert all(p % d for d in range(2, math.isqrt(p) + 1))
