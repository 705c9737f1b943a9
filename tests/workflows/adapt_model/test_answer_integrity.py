"""An owner that answers something else than what it was sent: it is found out before it is told anything."""

import hashlib
import math

import numpy as np
import pytest

pytest.importorskip("numba")
from encoders import Sums as Watch
from encoders import micro, quadratic_shape, shifted, tiny, untied

from cloister.errors import ParameterError
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.crypto.owner_ckks import scheme as block
from cloister.mpc.crypto.owner_ckks.packed_refresh import dropped
from cloister.mpc.crypto.owner_ckks.smallness_check import (
    CELL,
    ROOM,
    SENT,
    Leaves,
    cells,
    cover,
    opens,
    shifts,
    uncover,
)
from cloister.study import Party
from cloister.testing import Case, check_no_errors, run_protocol, transcript, values
from cloister.workflows.adapt_model import answer_integrity, batch_roles
from cloister.workflows.adapt_model import encrypted_inference as inference
from cloister.workflows.adapt_model.answer_integrity import REACH, SMALL_PRIMES, Sums, Tie, Ties
from cloister.workflows.adapt_model.block_messages import CONTROLS, chunks, pairs, traffic
from cloister.workflows.adapt_model.block_plan import checked, plan
from cloister.workflows.adapt_model.checkpoint import Taps
from cloister.workflows.adapt_model.packing import packings

HUB, ANN = Party("hub"), Party("ann")
P, E = block.SMALL, Entropy()
ENCODER = micro()
OPENINGS = plan(ENCODER.shape, P).openings


def case(n=2, encoder=ENCODER, params=P, device="cpu", folder=None):
    s = encoder.shape
    x = np.random.default_rng(1).uniform(-1, 1, (n, s.tokens - 1, s.inputs))
    given = {HUB: (encoder, None, device, folder), ANN: (x,)}
    return Case(inference.Params((ANN,), HUB, s, params), given)


def lying(monkeypatch, lie, batches=(0,)):
    """Let u add lie(i, how), an integer, to the constant term of the first answer to opening i."""
    honest, watch, told = block.OwnerKey.refresh, Watch(), [0]

    def refresh(self, cts, how, seed, entropy):
        first = watch.left == 0
        number, sums = told[0], watch.follow(cts, how)
        told[0] += sums
        batch, at = divmod(number, len(OPENINGS))
        change = lie(at, how) if first and not sums and batch in batches else 0
        if not change:
            return honest(self, cts, how, seed, entropy)
        return shifted(self, cts, how, seed, entropy, {(0, 0): change})

    monkeypatch.setattr(block.OwnerKey, "refresh", refresh)


def passing(i):
    """The largest lie in one answer of opening i that a check lets pass, whatever was drawn."""
    tie = Tie.of(P, OPENINGS)
    most = math.ldexp(dropped(P, checked(P), SENT), ROOM) * dropped(P, OPENINGS[i].back, checked(P))
    return round(most / tie.weights[i] / REACH)


# ---- the check by itself ---------------------------------------------------------------------------------------------


def covered(m):
    """Masks, and what the reader of coefficients m opens under them."""
    key, k = block.OwnerKey(P, E), checked(P)
    ev, r, seed = block.Evaluator(P, key.b, key.seed), block.ring_of(P), E.bytes(32)
    rows = [[int(x) * dropped(P, k, SENT) for x in row] for row in m]
    ints = [np.array([[x % q for x in row] for q in r.primes[:k]], np.uint32) for row in rows]
    c0 = np.stack([key.hide(one, block.Halves(seed), E.prg()) for one in ints])
    sent, masks = cover(ev, block.expand(P, c0, seed), E)
    assert sent.shape == (len(m), 2, SENT, P.degree)
    assert (masks < block.modulus(P, SENT)).all()
    return masks, uncover(key, sent)


def agree(masks, w):
    h = shifts(masks)
    return cells(masks, h) == cells(w, h)


def test_a_small_message_leaves_the_cell_of_its_mask_and_a_large_one_does_not():
    most = (1 << ROOM) - 200  # of which rounding takes some
    small = np.random.default_rng(0).integers(-most, most, (1, P.degree))
    masks, w = covered(small)
    assert agree(masks, w).all()  # or one goes round the modulus: once in 2^18
    large = np.full((1, P.degree), 1 << CELL) * np.where(np.arange(P.degree) % 2, 1, -1)
    assert not agree(*covered(large)).any()
    half = agree(*covered(np.full((1, P.degree), 1 << (CELL - 1)))).mean()  # between the two it is a matter of chance
    assert 0.43 < half < 0.57  # nine deviations
    h = shifts(masks)
    assert 0.4 < h.mean() < 0.6
    within = ((masks & np.uint64((1 << CELL) - 1)).astype(np.int64) + (h.astype(np.int64) << (CELL - 1))) % (1 << CELL)
    assert within.min() >= 1 << ROOM
    assert within.max() < 3 << ROOM


@pytest.mark.parametrize("m", [0, 1 << 16, 1 << 21, 1 << 40])
def test_what_is_opened_is_uniform_whatever_the_message(m):
    """So it says nothing of r or λ to a liar before it commits itself: not even where in its cell a number lies."""
    _, w = covered(np.full((1, P.degree), m))
    for part in (w % np.uint64(1 << CELL) / (1 << CELL), w / block.modulus(P, SENT)):
        u = np.sort(part.ravel())
        n = len(u)
        assert np.abs(u - (np.arange(n) + 0.5) / n).max() * np.sqrt(n) / 3.4 < 1.0  # chance: once in 10^10


def test_one_number_of_two_is_opened():
    a, b = (np.arange(5, dtype=np.uint64) + np.uint64(x) for x in (10, 20))
    which = np.array([0, 1, 1, 0, 1], np.uint8)
    right, others = np.where(which, b, a), np.where(which, a, b)
    made = Leaves((a, b), E)
    opened = made.open(which)
    assert opens(made.seal, opened, which, right)
    for i in range(5):
        wrong = right.copy()
        wrong[i] += np.uint64(1)
        assert not opens(made.seal, opened, which, wrong)
    assert not opens(made.seal, opened, 1 - which, others)
    assert not opens(made.seal, Leaves((a, b), E).open(which), which, right)
    assert not opens(made.seal, (opened[0][:0], opened[1][:0]), which, right)
    assert not opens(b"", opened, which, right)
    tried = {hashlib.sha256(s.tobytes() + int(x).to_bytes(8, "little")).digest()
             for s in opened[0] for x in range(40)}  # fmt: skip
    assert not {leaf.tobytes() for leaf in opened[1]} & tried  # the others have salts of their own
    assert repr(made) == "Leaves(...)"


@pytest.mark.parametrize("params", [block.SMALL, block.STANDARD, block.QUADRATIC])
def test_half_of_the_modulus_is_nearly_a_multiple_of_a_cell(params):
    """So two cells for one number cover no two halves of it: a lie of half the modulus has no second guess."""
    off = block.modulus(params, SENT) // 2 % (1 << CELL)
    assert min(off, (1 << CELL) - off) < 0.06 * (1 << CELL)


def test_secret_factors_are_drawn_among_those_without_small_divisors():
    most = 1 << 40
    drawn = [answer_integrity.secret_factor(most, E) for _ in range(200)]
    assert all(most // 2 < x <= most for x in drawn)
    assert all(math.gcd(x, SMALL_PRIMES) == 1 for x in drawn)
    assert SMALL_PRIMES % 61 == 0
    assert len(set(drawn)) == 200
    with pytest.raises(ParameterError, match="too long"):
        Tie.of(P, [block.opening(P, "t", 100, 2, P.scale, 2.0**-20, P.scale * 2.0**90)])


def sums_of(how, answer):
    """b - Σ r·a in coefficients, (CONTROLS, N), for values that a seed gives, if u answers with answer(values)."""
    key, seed = block.OwnerKey(P, E), E.bytes(32)
    ev = block.Evaluator(P, key.b, key.seed)
    ev.accept(key.switching(3, seed, E), seed)
    x = np.random.default_rng(2).uniform(-1, 1, (how.count, P.slots))
    cts = ev.expand(key.encrypt(x, seed, E), seed)[:, :, : how.primes]
    if how.polys == 3:
        cts = ev.products(cts, cts)
    sums, asked = Sums(ev, chunks(how), E), [(part, cts[part.start : part.stop]) for part in chunks(how)]
    for part, some in asked:
        sums.add(part.start, some)
    for part, some in [*asked, (None, sums.controls)]:
        masks, back = E.bytes(32), E.bytes(32)
        fresh = key.refresh(ev.blind(some, how, masks, E), how, back, E)
        fresh = ev.unblind(fresh, back, how, masks)
        if part is None:
            return np.stack([key.open(ct)[0] for ct in sums.off(fresh)])
        sums.answered(part.start, answer(ev, fresh))


@pytest.mark.parametrize(("count", "polys"), [(40, 2), (40, 3), (33, 2), (1, 3)])
def test_what_honest_answers_are_off_by_is_what_was_reckoned(count, polys):
    """Also where a message ends with a single value, whose partner is noise."""
    scale = P.scale ** (polys - 1)
    how = block.opening(P, "t", count, polys, scale, 1.0, P.scale)
    off = np.concatenate([sums_of(how, lambda ev, x: x).ravel() for _ in range(1 if count > 1 else 40)])
    columns = 2 * sum(map(pairs, chunks(how)))
    assert off.std() == pytest.approx(
        answer_integrity.noise(P, how) * math.sqrt(1 + answer_integrity.MEAN_SQUARE * columns), rel=0.35
    )
    assert np.abs(off.mean()) < off.std() / 20


def test_a_lie_moves_every_sum_by_an_unknown_multiple():
    how = block.opening(P, "t", 40, 2, P.scale, 1.0, P.scale)
    delta = 1 << 20

    def lie(ev, x):
        return ev.add_constants(x.copy(), [delta, *[0] * (len(x) - 1)])

    found = {tuple(np.rint(sums_of(how, lie)[:, 0] / delta).astype(int)) for _ in range(3)}
    assert len(found) == 3
    assert all(-2 * REACH <= x <= 2 * REACH for one in found for x in one)  # two messages, two lies
    assert len({abs(x) for one in found for x in one}) > 3


def test_the_price_of_ties():
    shape = quadratic_shape(depth=6)
    for tokens in packings(shape, block.QUADRATIC):
        planned = plan(shape, block.QUADRATIC, 1, tokens).openings
        (_, down, up), (_, d, u) = traffic(planned), traffic(planned, controls=0)
        assert (down + up) / (d + u) < (1.004 if tokens == 1 else 1.08)


def test_a_block_with_other_openings_than_planned_is_no_block():
    key = block.OwnerKey(P, E)
    ev = block.Evaluator(P, key.b, key.seed)
    with pytest.raises(ParameterError, match="planned"):
        Ties(ev, ev, E).open(Tie.of(P, OPENINGS))


# ---- in the protocol -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("i", range(0, len(OPENINGS), 3))
def test_a_lie_in_any_opening_ends_the_batch_before_its_tap(i, monkeypatch):
    lying(monkeypatch, lambda at, how: 300 * passing(i) if at == i else 0)
    run = run_protocol(inference, case(), timeout=60.0)
    assert run.errors[ANN].code == "range"  # it has nothing
    sent = [name for name, *_ in transcript(run)[HUB]]
    assert "encrypted_inference.Features" not in sent
    assert sent.count("encrypted_inference.Shifts") == 2  # of keys, of answers


@pytest.mark.parametrize("primes", [1, 2, 3])
def test_a_lie_that_vanishes_modulo_some_primes_is_found_out(primes, monkeypatch):
    """A multiple of the first primes: nothing of it is left where sums are opened, but for the secret factors."""
    at_tap = len(OPENINGS) - 1
    lying(monkeypatch, lambda at, how: block.modulus(P, primes) << 50 if at == at_tap else 0)
    run = run_protocol(inference, case(), timeout=60.0)
    assert run.errors[ANN].code == "range"
    assert "encrypted_inference.Features" not in [name for name, *_ in transcript(run)[HUB]]


def test_the_largest_lie_that_passes_is_lost_in_the_flooding(monkeypatch):
    """At the last refresh, where it comes out times R: K5, as far as it still goes."""
    at_tap, read, honest = len(OPENINGS) - 1, [], block.OwnerKey.read
    (tap,) = [tap for _, tap in plan(ENCODER.shape, P).taps]
    lie = passing(at_tap) // 2
    lying(monkeypatch, lambda at, how: lie if at == at_tap else 0)

    def spy(self, cts, scale, count):
        read.append(self.open(cts[0])[0][0] / scale)
        return honest(self, cts, scale, count)

    monkeypatch.setattr(block.OwnerKey, "read", spy)
    check_no_errors(run_protocol(inference, case(), timeout=60.0))  # it passes
    assert len(read) == 1
    weight = np.abs(ENCODER.projections).max()
    scale = P.scale * 2.0**46
    assert weight * lie / scale < 2.0**tap.flood_bits / tap.scale


def test_one_batch_is_lost_and_the_rest_asked_for_with_a_new_key(monkeypatch, tmp_path):
    """It was paid for already. A provider that lies would learn a bit of a key every time: so none is used again."""
    lying(monkeypatch, lambda at, how: 300 * passing(0) if at == 0 else 0)
    kept, ledger, keys = Taps(tmp_path / "taps.npz", "these samples"), inference.Ledger(), []
    honest = batch_roles.OwnerSide.send_key

    async def send_key(self, *args):
        keys.append((self.key.seed, args[1]))
        await honest(self, *args)

    async def keeping(ch, params, inputs, *, entropy):
        return await inference.owner(ch, params, inputs, kept, entropy=entropy)

    async def counted(ch, params, encoder, *_, entropy):
        return await inference.provider(ch, params, encoder, ledger, "cpu", tmp_path / "hub", entropy=entropy)

    monkeypatch.setattr(batch_roles.OwnerSide, "send_key", send_key)
    run = run_protocol(inference, case(2 * P.slots + 2), roles={ANN: keeping, HUB: counted}, timeout=120.0)
    check_no_errors(run)
    assert values(run)[HUB] == {ANN: 2}  # of three
    lost = np.isnan(values(run)[ANN]).all(axis=(1, 2))
    assert lost.tolist() == [True] * P.slots + [False] * (P.slots + 2)
    assert [count for _, count in keys] == [3, 2]
    assert len({seed for seed, _ in keys}) == 2
    assert ledger.used == {ANN: 3 * P.slots}
    assert not Taps.open(tmp_path / "taps.npz", "these samples", P).begun


@pytest.mark.parametrize("asked", [1, 3])
def test_who_goes_on_gets_what_is_left_and_no_more(asked, monkeypatch):
    lying(monkeypatch, lambda at, how: 300 * passing(0) if at == 0 else 0)
    honest, keys = batch_roles.OwnerSide.send_key, []

    async def send_key(self, openings, count, tokens):
        keys.append(count)
        await honest(self, openings, asked if len(keys) > 1 else count, tokens)

    monkeypatch.setattr(batch_roles.OwnerSide, "send_key", send_key)
    run = run_protocol(inference, case(2 * P.slots + 2), timeout=30.0)
    assert run.errors[HUB].code == "state"
    assert keys == [3, 2]


def test_values_that_go_round_are_no_answers_either(monkeypatch):
    """Inputs 2^30 times beyond their interval: sums of what went round are not what went round of sums."""
    honest = block.OwnerKey.encrypt
    monkeypatch.setattr(block.OwnerKey, "encrypt", lambda self, x, *rest: honest(self, x * 2.0**30, *rest))
    run = run_protocol(inference, case(), timeout=60.0)
    assert "encrypted_inference.Features" not in [name for name, *_ in transcript(run)[HUB]]


@pytest.mark.parametrize("lie", ["zero", "ones"])
def test_switching_keys_that_are_none_end_it_before_the_first_sample(lie, monkeypatch, tmp_path):
    def switching(self, polys, seed, entropy, tokens):
        return np.full((polys - 2, P.count, P.count, P.degree), lie == "ones", np.uint32)

    monkeypatch.setattr(block.OwnerKey, "switching", switching)
    kept = Taps(tmp_path / "taps.npz", "these samples")

    async def keeping(ch, params, inputs, *, entropy):
        return await inference.owner(ch, params, inputs, kept, entropy=entropy)

    run = run_protocol(inference, case(), roles={ANN: keeping}, timeout=60.0)
    assert {e.code for e in run.errors.values()} == {"keys"}
    assert "encrypted_inference.Blinded" not in [name for name, *_ in transcript(run)[HUB]]
    assert not Taps.open(tmp_path / "taps.npz", "these samples", P).begun


@pytest.mark.parametrize(("powers", "tokens"), [(3, 1), (1, 4)])
def test_every_switching_key_is_tried(powers, tokens):
    """An error of 2^16 in one of its digits, where it should be 3.2, is found out, whichever key has it."""
    key, seed, params = block.OwnerKey(P, E), E.bytes(32), P
    keys = key.switching(powers + 2, seed, E, tokens)

    def found_out(keys):
        ev = block.Evaluator(params, key.b, key.seed)
        ev.accept(keys, seed)
        ties = Ties(ev, ev, E)
        ties.switch_zeros(powers, tokens)
        sent, masks = ties.open(Tie.of_keys(params, powers, tokens))
        return not agree(masks, uncover(key, sent)).all()

    assert not found_out(keys)
    for which in range(len(keys)):
        false = keys.copy()
        digit = which % P.count
        q = np.array(block.primes_of(P), np.uint64)[:, None]
        false[which, digit] = (false[which, digit] + np.uint64(1 << 16)) % q
        assert found_out(false)


@pytest.mark.parametrize("late", ["echo", "after"])
def test_an_owner_that_says_after_the_provider_gets_nothing(late, monkeypatch):
    """It answers T2 with the provider's own seal; or opens what it sealed, though that was something else."""
    lying(monkeypatch, lambda at, how: 300 * passing(0) if at == 0 else 0)

    async def agree(self):
        P, p = self.params.provider, self.params.crypto
        c = await self.ch.recv(P, batch_roles.Check, c=(CONTROLS, 2, SENT, p.tight))
        w = uncover(self.key, batch_roles.read(p, c.c, "T1", P))
        mine = Leaves((cells(w, 0), cells(w, 1)), self.entropy)
        await self.ch.send(P, batch_roles.Sealed(c.seal if late == "echo" else mine.seal))
        h = (await self.ch.recv(P, batch_roles.Shifts, h=(CONTROLS, p.degree))).h
        await self.ch.send(P, batch_roles.Found(*mine.open(h)))
        return True  # and waits for its tap

    monkeypatch.setattr(batch_roles.OwnerSide, "agree", agree)
    run = run_protocol(inference, case(), timeout=30.0)
    assert ANN in run.errors
    found = [name for name, *_ in transcript(run)[ANN]].count("encrypted_inference.Found")
    assert found == (1 if late == "echo" else 2)  # of keys, of answers
    assert "encrypted_inference.Features" not in [name for name, *_ in transcript(run)[HUB]]


def test_a_provider_that_lies_about_the_sums_hears_no_more_than_no(monkeypatch):
    """It commits itself to something else: the owner opens nothing."""
    honest, heard, receive, said = answer_integrity.seal, [], batch_roles.opens, []

    def seal(salt, h, z):
        said.append(z)
        return honest(salt, h, z + np.uint64(len(said) == 3))  # of answers, after both spoke of keys

    def opens(sealed, opened, h, z):
        heard.append([len(x) for x in opened])
        return receive(sealed, opened, h, z)

    monkeypatch.setattr(batch_roles, "seal", seal)
    monkeypatch.setattr(batch_roles, "opens", opens)
    run = run_protocol(inference, case(), timeout=60.0)
    assert run.errors[ANN].code == "range"
    assert heard == [[CONTROLS * P.degree] * 2, [0, 0]]


def test_who_leaves_while_answers_are_compared_cannot_try_again(monkeypatch, tmp_path):
    """At T3 an owner knows how it ends. With the same key there is no second guess, and a new one is paid for."""
    kept, ledger = Taps(tmp_path / "taps.npz", "these samples"), inference.Ledger()

    async def keeping(ch, params, inputs, *, entropy):
        return await inference.owner(ch, params, inputs, kept, entropy=entropy)

    async def counted(ch, params, encoder, *_, entropy):
        return await inference.provider(ch, params, encoder, ledger, "cpu", tmp_path / "hub", entropy=entropy)

    opened, honest = [], batch_roles.Leaves.open

    def falls_over(self, which):
        opened.append(which)
        return honest(self, which) if len(opened) == 1 else None  # of keys; of answers

    with monkeypatch.context() as m:
        m.setattr(batch_roles.Leaves, "open", falls_over)
        run = run_protocol(inference, case(), roles={ANN: keeping, HUB: counted}, timeout=30.0)
    assert ANN in run.errors
    kept = Taps.open(tmp_path / "taps.npz", "these samples", P)
    assert kept.begun
    run = run_protocol(inference, case(), roles={ANN: keeping, HUB: counted}, timeout=30.0)
    assert {e.code for e in run.errors.values()} == {"state"}
    assert "were compared" in str(run.errors[HUB])
    assert "start again" in str(run.errors[ANN])
    kept = Taps.open(tmp_path / "taps.npz", "these samples", P)
    assert not kept.begun  # so the next run has another
    check_no_errors(run_protocol(inference, case(), roles={ANN: keeping, HUB: counted}, timeout=60.0))
    assert ledger.used == {ANN: 2 * P.slots}


def test_without_ties_the_same_lie_was_answered(monkeypatch):
    untied(monkeypatch)
    lying(monkeypatch, lambda at, how: 300 * passing(0) if at == 0 else 0)
    run = run_protocol(inference, case(), timeout=60.0)
    assert "encrypted_inference.Features" in [name for name, *_ in transcript(run)[HUB]]


@pytest.mark.slow
def test_honest_owners_are_believed():
    """Sixty blocks, none refused."""
    little = {"tokens": 2, "inputs": 1, "width": 4, "heads": 1, "hidden": 2, "rank": 1}
    encoder, _ = tiny(depth=2, taps=(2,), exp_degree=2, steps=1, root_steps=1, **little)
    for _ in range(30):
        check_no_errors(run_protocol(inference, case(encoder=encoder), timeout=60.0))
