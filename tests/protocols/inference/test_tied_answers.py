"""An owner that answers something else than what it was sent: it is found out before it is told anything."""

import math
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
pytest.importorskip("numba")
from encoders import Sums as Watch
from encoders import micro, quadratic_shape, tiny, untied

from cloister.crypto.entropy import Entropy
from cloister.crypto.owner_ckks import scheme as block
from cloister.crypto.owner_ckks.cover import cover, uncover
from cloister.crypto.owner_ckks.pairs import dropped, pairs_of
from cloister.errors import ParameterError
from cloister.protocols.inference import batch_sides, tied_answers
from cloister.protocols.inference import encrypted_inference as inference
from cloister.protocols.inference.block_messages import CONTROLS, chunks, pairs, traffic
from cloister.protocols.inference.block_plan import checked, plan
from cloister.protocols.inference.packing import packings
from cloister.protocols.inference.tied_answers import REACH, ROOM, SENT, SMALL_PRIMES, Sums, Tie, Ties
from cloister.study import Party
from cloister.testing import Case, check_no_errors, run_protocol, transcript, values

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
        r, first = block.ring_of(P), watch.left == 0
        number, sums = told[0], watch.follow(cts, how)
        told[0] += sums
        batch, at = divmod(number, len(OPENINGS))
        change = lie(at, how) if first and not sums and batch in batches else 0
        if not change:
            return honest(self, cts, how, seed, entropy)
        mask, secret, out = block.Halves(seed), entropy.prg(), []
        opened = [half for ct in cts for half in pairs_of(P).halves(r.to_words(self._opened(ct)))]
        for i, value in enumerate(opened):
            m = r.add_words(np.zeros((how.back, P.degree), np.uint32), block.times_shift(value, how))
            if i == 0:
                m[:, 0] = [(int(x) + change) % q for x, q in zip(m[:, 0], r.primes[: how.back], strict=True)]
            out.append(self.hide(m, mask, secret))
        return np.stack(out)

    monkeypatch.setattr(block.OwnerKey, "refresh", refresh)


def passing(i):
    """The largest lie in one answer of opening i that a check lets pass, whatever was drawn."""
    tie = Tie.of(P, OPENINGS)
    most = math.ldexp(dropped(P, checked(P), SENT), ROOM) * dropped(P, OPENINGS[i].back, checked(P))
    return round(most / tie.weights[i] / REACH)


# ---- the check by itself ---------------------------------------------------------------------------------------------


def covered(m):
    """What the reader of coefficients m finds of z, and z."""
    key, k = block.OwnerKey(P, E), checked(P)
    ev, r, seed = block.Evaluator(P, key.b, key.seed), block.ring_of(P), E.bytes(32)
    ints = np.asarray(m, object) * dropped(P, k, SENT)
    c0 = np.stack([key.hide(np.array([[int(x) % q for x in row] for q in r.primes[:k]], np.uint32),
                            block.Halves(seed), E.prg()) for row in ints])  # fmt: skip
    sent, z = cover(ev, block.expand(P, c0, seed), SENT, E)
    assert sent.shape == (len(m), 2, SENT, P.degree)
    return uncover(key, sent), z


def test_a_small_message_shows_what_lies_above_it_and_a_large_one_does_not():
    most = (1 << ROOM) - 1000  # of which noise takes some
    small = np.random.default_rng(0).integers(-most, most, (1, P.degree))
    found, z = covered(small)
    np.testing.assert_array_equal(found, z)
    assert z.max() < block.modulus(P, SENT) >> 32
    large = np.full((1, P.degree), 1 << 32) * np.where(np.arange(P.degree) % 2, 1, -1)
    found, z = covered(large)
    assert not (found == z).any()
    half, z = covered(np.full((1, P.degree), 1 << 31))  # between the two it is a matter of chance
    assert 0.45 < (half == z).mean() < 0.55  # 3,072 of 4,096 would be ten deviations off


def test_secret_factors_are_drawn_among_those_without_small_divisors():
    most = 1 << 40
    drawn = [tied_answers.secret_factor(most, E) for _ in range(200)]
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
    sums, asked = Sums(ev, how, E), [(part, cts[part.start : part.stop]) for part in chunks(how)]
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
        tied_answers.noise(P, how) * math.sqrt(1 + tied_answers.MEAN_SQUARE * columns), rel=0.35
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
    assert sent.count("encrypted_inference.Salt") == 1


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


def test_one_batch_is_lost_and_the_next_one_answered(monkeypatch, tmp_path):
    lying(monkeypatch, lambda at, how: 300 * passing(0) if at == 0 else 0)
    run = run_protocol(inference, case(P.slots + 2, folder=tmp_path), timeout=120.0)
    check_no_errors(run)
    assert values(run)[HUB] == {ANN: 1}  # of two
    lost = np.isnan(values(run)[ANN]).all(axis=(1, 2))
    assert lost.tolist() == [True] * P.slots + [False] * 2


def test_values_that_go_round_are_no_answers_either(monkeypatch):
    """Inputs 2^30 times beyond their interval: sums of what went round are not what went round of sums."""
    honest = block.OwnerKey.encrypt
    monkeypatch.setattr(block.OwnerKey, "encrypt", lambda self, x, *rest: honest(self, x * 2.0**30, *rest))
    run = run_protocol(inference, case(), timeout=60.0)
    assert "encrypted_inference.Features" not in [name for name, *_ in transcript(run)[HUB]]


@pytest.mark.parametrize("lie", ["zero", "ones"])
def test_switching_keys_that_are_none_end_it(lie, monkeypatch):
    def switching(self, polys, seed, entropy, tokens):
        return np.full((polys - 2, P.count, P.count, P.degree), lie == "ones", np.uint32)

    monkeypatch.setattr(block.OwnerKey, "switching", switching)
    run = run_protocol(inference, case(), timeout=60.0)
    assert "encrypted_inference.Features" not in [name for name, *_ in transcript(run)[HUB]]


@pytest.mark.parametrize("echo", ["seal", "other"])
def test_an_owner_that_says_after_the_provider_gets_nothing(echo, monkeypatch):
    """It answers T2 with the provider's own seal, or with one of its own making, and T4 with the provider's salt."""
    lying(monkeypatch, lambda at, how: 300 * passing(0) if at == 0 else 0)

    async def agree(self):
        P, p = self.params.provider, self.params.crypto
        c = await self.ch.recv(P, batch_sides.Check, c=(CONTROLS, 2, SENT, p.tight))
        z = uncover(self.key, batch_sides.read(p, c.c, "T1", P))
        mine = c.seal if echo == "seal" else tied_answers.seal(bytes(32), str(ANN), z)
        await self.ch.send(P, batch_sides.Sealed(mine))
        salt = (await self.ch.recv(P, batch_sides.Salt)).salt
        await self.ch.send(P, batch_sides.Found(salt if echo == "seal" else bytes(32)))
        return True  # and waits for its tap

    monkeypatch.setattr(batch_sides.OwnerSide, "agree", agree)
    run = run_protocol(inference, case(), timeout=4.0)
    assert ANN in run.errors
    assert "encrypted_inference.Features" not in [name for name, *_ in transcript(run)[HUB]]


def test_a_provider_that_lies_about_the_sums_hears_no_more_than_no(monkeypatch):
    """It commits itself to something else: the owner's salt stays at home, and so what it found."""
    honest, heard = tied_answers.seal, []
    monkeypatch.setattr(batch_sides, "seal", lambda salt, who, z: honest(salt, who, z + np.uint32(who == HUB)))
    receive = batch_sides.opens

    def opens(sealed, salt, who, z):
        heard.append((who, salt))
        return receive(sealed, salt, who, z)

    monkeypatch.setattr(batch_sides, "opens", opens)
    run = run_protocol(inference, case(), timeout=60.0)
    assert run.errors[ANN].code == "range"
    assert [salt for who, salt in heard if who == ANN] == [b""]


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
