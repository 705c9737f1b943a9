"""The check of copies: what passes it, what does not, and what its messages show."""

import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("numba")
sys.path.insert(0, str(Path(__file__).parents[2] / "workflows" / "train_cellcnn"))

from collective import HUB, entropy, faults_on, names, public, secrets, whole

from cloister.errors import ParameterError
from cloister.mpc.crypto.ckks import scheme as ckks
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.crypto.prg import Prg
from cloister.mpc.crypto.rns import slots
from cloister.mpc.threshold_ckks import equal_copies
from cloister.testing import Case, check_cost, check_lies, check_no_errors, check_vectors, check_view, run_protocol

PARTIES = names(3)
STEPS = 3
VECTORS = Path(__file__).parents[2] / "vectors"


def ring():
    """The smallest one that carries a training."""
    from test_encrypted_training import RING as training

    return training


def terms(**options):
    P = ring()
    zeros = options.pop("zeros", (2.0**18,))
    who = (PARTIES, HUB, P)
    return equal_copies.Params(*who, P.top, 2.0**40, (equal_copies.digest(cells()),), STEPS, zeros, 3)


def cells():
    table = np.full(ring().slots, -1)
    table[: 5 * 256] = np.repeat(np.arange(5), 256)  # the rest of the slots is empty
    return table


def small_case(seed=0, shift=None, steps=STEPS, zero=0):
    """Three steps of values that are alike in every cell; `shift` adds complex slots to some step, `zero` to [Z]."""
    p, c, shares = terms(), ckks.context(ring()), secrets(ring(), 3)
    key, rng, table = public(ring(), shares), np.random.default_rng(seed), cells()
    sums = equal_copies.Sums(ring(), p.primes, 2)
    for t in range(steps):
        values = np.where(table >= 0, rng.uniform(-8, 8, 5)[np.maximum(table, 0)], 0.0)
        polys = noisy(c, key, values, p, entropy(f"{seed}/{t}"))
        if shift and t in shift:
            c.ring.add(polys[0], encoded(c, shift[t], p))
        sums.add(equal_copies.weights(b"w" * 32, t), polys)
    k = p.primes
    Z = c.cipher(c.encrypted_zero(key, k, entropy(f"z{seed}").prg()), 1.0)
    if zero:
        raw, _ = c.raw(Z)
        for row, q in zip(raw[0], c.primes, strict=False):
            row[:] = (row.astype(object) + zero % q) % q
        Z = c.cipher(raw, 1.0)
    cts = [[c.cipher(each, 1.0), Z] for each in sums.polys]
    c1s = [[ct.polys[1] for ct in each] for each in cts]
    inputs = {i: (s, key, [table], c1s) for i, s in shares.items()}
    return Case(p, inputs | {HUB: (key, [table], cts)})


def noisy(c, key, values, p, entropy):
    """An encryption whose noise is that of a refresh: (values - a·s + e, a), here with b for -a·s + e."""
    power = np.zeros(ring().degree, np.int64)
    power[int(entropy.prg().below(ring().degree, 1)[0])] = 1
    factor = c.ring.forward(c.ring.of_small(power, p.primes))
    polys = np.stack([c.ring.multiply(part[: p.primes].copy(), factor) for part in (key.b, key.a)])
    c.ring.add(polys[0], c.exact_residues(values, p.primes, p.scale))
    return polys


def encoded(c, z, p):
    """A plaintext with these complex slots, in units of 1."""
    small = np.rint(np.ldexp(np.stack([z.real, z.imag], axis=1), -30)).astype(np.int64)
    return slots.encode_exact(c.ring, small, 2.0**30, p.primes)


def at(slot, value):
    z = np.zeros(ring().slots, np.complex128)
    z[slot] = value
    return z


def outcome(case):
    run = run_protocol(equal_copies, case, timeout=60)
    assert not run.errors or set(run.errors) == {HUB, *PARTIES}
    return run.errors[HUB].code if run.errors else None


def test_equal_copies_pass_at_their_cost_and_show_nothing_by_their_messages():
    check_no_errors(run_protocol(equal_copies, small_case(), timeout=60))
    check_cost(equal_copies, small_case())
    check_vectors(equal_copies, small_case(), VECTORS / "equal_copies.json")
    check_view(equal_copies, small_case(1), small_case(2))


def test_a_shift_of_all_copies_alike_passes():
    """Steering: the model is whatever it is, the same for all samples."""
    alike = np.where(cells() == 2, 2.0**50, 0.0).astype(np.complex128)
    assert outcome(small_case(shift={1: alike})) is None


@pytest.mark.parametrize("slot", [0, 300, 255, 5 * 256, 8191])
@pytest.mark.parametrize("unit", [1, 1j])
def test_a_shift_of_one_slot_does_not_pass(slot, unit):
    """One sample's copy, real or imaginary, and slots where nothing stands."""
    assert outcome(small_case(shift={1: at(slot, unit * 1.01 * terms().tolerance)})) == "copies"


def test_an_imaginary_shift_of_a_whole_cell_does_not_pass():
    assert outcome(small_case(shift={0: np.where(cells() == 1, 1j * terms().tolerance, 0)})) == "copies"


def test_shifts_that_add_up_to_zero_over_two_refreshes_do_not_pass():
    size = 4 * terms().tolerance
    assert outcome(small_case(shift={0: at(7, size), 1: at(7, -size)})) == "copies"


def test_a_wrong_key_does_not_pass():
    assert outcome(small_case(zero=int(1.01 * terms().zero_tolerance(0)))) == "copies"


def test_what_honest_parties_open_is_below_the_floods():
    """y without floods: within the noise that they are made for."""
    case = small_case()
    p, c, (key, tables, cts) = case.params, ckks.context(ring()), case.inputs[HUB]
    s = whole(ring(), {i: case.inputs[i][0] for i in PARTIES})
    for repeat, each in enumerate(cts):
        factors = equal_copies.Factors(p, tables, bytes(32), repeat)
        T = [factors.combine([ct.polys[part] for ct in each], (key.b, key.a)[part], part) for part in (0, 1)]
        low = equal_copies.lowest(p, T[1], s)
        c0 = c.ring.backward(T[0])[:, 0]
        y = equal_copies.whole(p, [(int(a) + b) % q for a, b, q in zip(c0, low, c.primes, strict=False)])
        assert abs(y) < 2.0 ** (p.flood_bits - 40)


def test_factors_are_orthogonal_to_equal_copies_and_random_elsewhere():
    u, size = equal_copies.orthogonal(Prg(b"u" * 32), cells())
    assert size == 256
    for number in range(5):
        assert u[cells() == number, 0].sum() == 0
        assert u[cells() == number, 1].std() > 256 * 2.0**19
    assert (u[cells() < 0] % 256 == 0).all()
    assert u[cells() < 0].std(axis=0).min() > 256 * 2.0**19
    with pytest.raises(ParameterError, match="same size"):
        equal_copies.orthogonal(Prg(b"u" * 32), np.array([0, 0, 1, -1]))


def test_shares_and_combinations_are_hidden():
    """σ - T·s is a flood; T - r·c1 is uniform: the factors do not show in T."""
    case = small_case()
    p, c, (secret, key, tables, c1s) = case.params, ckks.context(ring()), case.inputs[PARTIES[0]]
    T = c1s[0][0]
    drawn = [
        equal_copies.whole(
            p,
            [(int(a) - b) % q for a, b, q in zip(share, equal_copies.lowest(p, T, secret.ntt), c.primes, strict=False)],
        )
        for share in equal_copies.decryption_share(p, secret, [T] * 40, Entropy())
    ]
    assert 0.25 < np.std(np.array(drawn, float)) / 2.0 ** (p.flood_bits - 1) < 4
    factors = equal_copies.Factors(p, tables, bytes(32), 0)
    bare = c.ring.zeros(p.primes)
    for f, c1 in zip(factors._factors, c1s[0], strict=True):
        c.ring.add_product(bare, f, c1)
    left = c.ring.subtract(factors.combine(c1s[0], key.a, 1), bare)
    assert max(map(abs, c.ring.lift_exact(c.ring.backward(left)))) > 2 ** (sum(ring().bits[: p.primes]) - 3)


def test_an_aggregator_that_wants_something_else_decrypted_gets_no_share():
    case = small_case()
    c, cts = ckks.context(ring()), case.inputs[HUB][2]

    async def greedy(ch, params, key, tables, cts_, *, entropy):
        scatter = ch.scatter

        async def other(to, msg=None):
            if isinstance(msg, equal_copies.Combination):
                msg = equal_copies.Combination((c.pack(cts[0][0].polys[1]),) * equal_copies.REPEATS)
            await scatter(to, msg)

        ch.scatter = other
        return await equal_copies.aggregator(ch, params, key, tables, cts_, entropy=entropy)

    run = run_protocol(equal_copies, case, roles={HUB: greedy}, timeout=20)
    assert {run.errors[i].code for i in PARTIES} == {"combination"}
    sent = {e.name for i in PARTIES for e, _ in run.receipts[i].entries if e.kind == "sent"}
    assert "equal_copies.Share" not in sent


def test_a_holder_cannot_wait_for_the_seed_before_it_decides_what_to_add():
    """Knowing r, it could balance its shift; its share is committed to before."""
    size = 4.0 * terms().tolerance
    case = small_case(shift={1: at(7, size)})
    p, c = case.params, ckks.context(ring())

    async def late(ch, params, secret, key, tables, c1s, *, entropy):
        S = params.aggregator
        await ch.recv(S, equal_copies.Combination)
        zero = np.zeros((equal_copies.REPEATS, p.primes), np.uint64)
        await ch.send(S, equal_copies.Committed(equal_copies.commitment(zero, b"n" * 32)))
        seed = (await ch.recv(S, equal_copies.Reveal)).seed
        rho, shares = equal_copies.weights(b"w" * 32, 1), []
        for repeat in range(equal_copies.REPEATS):
            factors = equal_copies.Factors(p, tables, seed, repeat)
            T = factors.combine(c1s[repeat], key.a, 1)
            known = c.ring.multiply(factors._factors[0], encoded(c, at(7, size), p))
            seen = c.ring.backward(known)[:, 0]
            low = equal_copies.lowest(p, T, secret.ntt)
            pairs = zip(low, seen, c.primes, strict=False)
            shares.append([(a - int(rho[repeat]) * int(b)) % q for a, b, q in pairs])
        await ch.send(S, equal_copies.Share(np.array(shares, np.uint64), b"n" * 32))
        await ch.recv(S, equal_copies.Passed)

    run = run_protocol(equal_copies, case, roles={PARTIES[1]: late}, timeout=20)
    assert run.errors[HUB].code == "commitment"


@pytest.mark.slow
def test_every_message_that_goes_wrong_ends_it_by_name():
    assert faults_on(equal_copies, small_case) >= 5


def test_lies_in_a_check_of_copies():
    lies = check_lies(
        equal_copies, [small_case()], right=lambda lie, found: None, liars=[HUB, *PARTIES[:2]], within=400.0
    )
    assert lies.tried >= 5
    assert lies.aborted >= 4
