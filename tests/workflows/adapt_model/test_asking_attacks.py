"""Who lies about breaks, or asks side by side: a no is told of each sample once, a batch answered as often as paid."""

import asyncio
import errno
import json
import shutil
import stat
import threading

import numpy as np
import pytest

pytest.importorskip("numba")
from encoders import micro

from cloister import files
from cloister.errors import DataError, ProtocolAbort
from cloister.mpc.crypto.owner_ckks import scheme as block
from cloister.study import Party
from cloister.testing import Case, check_no_errors, run_protocol, transcript, values
from cloister.workflows.adapt_model import answer_integrity, batch_roles, block_plan
from cloister.workflows.adapt_model import encrypted_inference as inference
from cloister.workflows.adapt_model.checkpoint import Taps
from cloister.workflows.common.query_ledger import Ledger

HUB, ANN = Party("hub"), Party("ann")
P, ENCODER = block.SMALL, micro()


class Killed(Exception):
    """The power goes."""


def samples(n):
    s = ENCODER.shape
    return np.random.default_rng(1).uniform(-1, 1, (n, s.tokens - 1, s.inputs))


def asked(place, n=2, taps="ann.taps.npz", timeout=60.0, encoder=ENCODER):
    kept = Taps.open(place / taps, "these samples", P)
    given = {HUB: (encoder, Ledger(place / "ledger.json"), "cpu", place / "deep" / "answers"), ANN: (samples(n), kept)}
    return run_protocol(inference, Case(inference.Params((ANN,), HUB, encoder.shape, P), given), timeout=timeout)


def kept_in(place):
    return Taps.open(place / "ann.taps.npz", "these samples", P)


def paid(place):
    return json.loads((place / "ledger.json").read_text())


def says(run, who, name):
    return [n for n, *_ in transcript(run)[who]].count(f"encrypted_inference.{name}")


def lies_at(monkeypatch, number):
    """The provider commits itself to something else at that check of a run: the owner says no."""
    honest, said = answer_integrity.seal, []

    def seal(salt, h, z):  # by the provider, then by the owner
        said.append(z)
        return honest(salt, h, z + np.uint64(len(said) == 2 * number - 1))

    monkeypatch.setattr(batch_roles, "seal", seal)


def dies_after_inputs(monkeypatch):
    honest = batch_roles.ProviderSide.inputs

    async def inputs(self, n):
        await honest(self, n)
        raise Killed

    monkeypatch.setattr(batch_roles.ProviderSide, "inputs", inputs)


# ---- a provider that lies --------------------------------------------------------------------------------------------


def test_a_no_about_keys_after_a_break_is_told_of_each_sample_once(monkeypatch, tmp_path):
    """Break off when the samples are there, ask about them by the check of keys, break off again: a bit a run."""
    told, sent, found = [], [], []
    honest = batch_roles.opens

    def hears(sealed, opened, h, z):
        if not len(opened[0]):  # no; by then it is on disk
            told.append((kept_in(tmp_path).begun, kept_in(tmp_path).count))
        return honest(sealed, opened, h, z)

    for number in range(8):
        with monkeypatch.context() as m:
            m.setattr(batch_roles, "opens", hears)
            if number % 2:
                lies_at(m, 1)
            else:
                dies_after_inputs(m)
            run = asked(tmp_path, P.slots + 2)
            sent.append(says(run, ANN, "Inputs"))
            found.append(str(run.errors[ANN]))
    assert told == [(False, P.slots), (False, P.slots + 2)]  # two batches, two answers, and neither comes again
    assert [bool(n) for n in sent] == [True, False, True, False] + [False] * 4
    assert ["2048 samples are lost" in found[1], "2 samples are lost" in found[3]] == [True, True]
    assert run.errors[ANN].code == "range"


def test_a_no_about_keys_of_a_first_run_costs_no_sample(monkeypatch, tmp_path):
    """None has been sent under that key."""
    with monkeypatch.context() as m:
        lies_at(m, 1)
        run = asked(tmp_path)
    assert run.errors[ANN].code == "keys"
    assert says(run, ANN, "Inputs") == 0
    assert (kept_in(tmp_path).begun, kept_in(tmp_path).count) == (False, 0)
    run = asked(tmp_path)
    check_no_errors(run)
    assert not np.isnan(values(run)[ANN]).any()


def test_a_no_about_answers_stands_before_it_is_told(monkeypatch, tmp_path):
    """The line breaks as the owner says no: the samples stay lost, and the rest is asked for with another key."""
    send, seen = batch_roles.Channel.send, []

    async def breaks(self, to, message):
        if isinstance(message, batch_roles.Found) and not len(message.salts):
            seen.append((kept_in(tmp_path).begun, kept_in(tmp_path).count))
            raise Killed
        await send(self, to, message)

    with monkeypatch.context() as m:
        m.setattr(batch_roles.Channel, "send", breaks)
        lies_at(m, 2)
        run = asked(tmp_path, P.slots + 2, timeout=20.0)
    assert isinstance(run.errors[ANN], Killed)
    assert seen == [(False, P.slots)]
    run = asked(tmp_path, P.slots + 2)
    check_no_errors(run)
    lost = np.isnan(values(run)[ANN]).all(axis=(1, 2))
    assert lost.tolist() == [True] * P.slots + [False] * 2
    assert says(run, ANN, "Check") == 0
    assert values(run)[HUB] == {ANN: 1}
    assert paid(tmp_path) == {"ann": 2 * P.slots}  # the second batch was paid for, and nothing told of it


def test_a_full_disk_does_not_tell_what_the_owner_found(monkeypatch, tmp_path):
    """If a no had to wait for room, its failing would be the answer, and the key would still be there."""
    agree, honest = batch_roles.OwnerSide.agree, files.replacing

    def owner_has_none(path, **kwargs):
        return no_room() if path.parent == tmp_path and path.name != "ledger.json" else honest(path, **kwargs)

    async def full(self):
        with monkeypatch.context() as m:
            m.setattr(files, "replacing", owner_has_none)
            return await agree(self)

    with monkeypatch.context() as m:
        m.setattr(batch_roles.OwnerSide, "agree", full)
        lies_at(m, 2)
        run = asked(tmp_path)
    assert run.errors[ANN].code == "range"
    kept = kept_in(tmp_path)
    assert (kept.begun, kept.count) == (False, 2)
    assert np.isnan(kept.read[0]).all()


def no_room(*args, **kwargs):
    raise OSError(errno.ENOSPC, "no room")


# ---- an owner that lies ----------------------------------------------------------------------------------------------


def test_a_batch_is_not_answered_by_two_runs_side_by_side(monkeypatch, tmp_path):
    """The second begins, with the key that was paid for, while the first is at work: both had the same state."""
    honest, others = inference.circuit_of(ENCODER.shape).block, []

    async def meanwhile(self, *args):
        if not others:
            others.append(None)
            while not (tmp_path / "ann.taps.npz").exists():  # the owner writes it when its first inputs are out
                await asyncio.sleep(0.01)
            shutil.copy(tmp_path / "ann.taps.npz", tmp_path / "copy.npz")
            thread = threading.Thread(target=lambda: others.append(asked(tmp_path, taps="copy.npz", timeout=20.0)))
            thread.start()
            thread.join()
        return await honest(self, *args)

    assert block_plan.plan(ENCODER.shape, P, 1, 1).rounds  # counted now, with the circuit as it is
    monkeypatch.setattr(inference.circuit_of(ENCODER.shape), "block", meanwhile)
    run = asked(tmp_path)
    check_no_errors(run)
    second = others[1]
    assert says(second, HUB, "Features") == 0
    assert isinstance(second.errors[HUB], DataError)
    assert "answers/ann is in use by another run" in str(second.errors[HUB])
    assert paid(tmp_path) == {"ann": P.slots}


def test_who_may_not_go_on_does_not_cost_another_owner_its_key(monkeypatch, tmp_path):
    """Ann asks for more than her key has left, and the run ends: Bob forgot his own key by that, and paid again."""
    bob, answers, honest = Party("bob"), tmp_path / "answers", batch_roles.OwnerSide.send_key
    taps = {u: tmp_path / f"{u}.taps.npz" for u in (ANN, bob)}

    def kept(u):
        return Taps.open(taps[u], "these samples", P)

    def both_ask():
        given = {u: (samples(2), kept(u)) for u in taps} | {HUB: (ENCODER, Ledger(), "cpu", answers)}
        return run_protocol(inference, Case(inference.Params((ANN, bob), HUB, ENCODER.shape, P), given), timeout=20.0)

    def when(done, more):
        async def send_key(self, openings, batches, tokens=1):
            while self.ch.me == bob and not done():
                await asyncio.sleep(0.01)
            await honest(self, openings, batches + (more if self.ch.me == ANN else 0), tokens)

        return send_key

    with monkeypatch.context() as m:
        dies_after_inputs(m)
        m.setattr(batch_roles.OwnerSide, "send_key", when((answers / ANN / "state.npz").exists, 0))
        both_ask()
    assert kept(ANN).begun
    assert kept(bob).begun
    with monkeypatch.context() as m:
        m.setattr(batch_roles.OwnerSide, "send_key", when(lambda: not kept(ANN).begun, 1))
        run = both_ask()
    assert {u: e.code for u, e in run.errors.items()} == dict.fromkeys((HUB, ANN, bob), "state")
    assert not kept(ANN).begun  # so that her next run has another
    assert kept(bob).begun


def test_one_run_at_a_time_asks_with_a_file_of_taps(tmp_path):
    """And it goes by what the file says now: a key that another run has lost is not used again."""
    old = kept_in(tmp_path)
    key = old.key(P, inference.Entropy(), 2)
    old = kept_in(tmp_path)
    assert old.begun
    other = kept_in(tmp_path)
    with other.held(P), pytest.raises(DataError, match=r"ann.taps.npz is in use by another run"), old.held(P):
        pass
    with other.held(P):
        other.stake(inference.nothing(inference.Params((ANN,), HUB, ENCODER.shape, P), 2))
        other.lose()
    with old.held(P):
        assert (old.begun, old.count) == (False, 2)
        assert old.key(P, inference.Entropy(), 3).seed != key.seed
    with Taps().held(P):  # of nothing that is kept
        pass


def test_what_a_check_may_cost_is_put_down_anew_by_every_run(tmp_path):
    """What a killed run had put down goes; if it is gone when it is needed, it is written."""
    kept, lost = kept_in(tmp_path), tmp_path / "ann.taps.npz.lost"
    params = inference.Params((ANN,), HUB, ENCODER.shape, P)
    kept.key(P, inference.Entropy(), 2)
    kept.stake(inference.nothing(params, 2))
    assert lost.exists()
    with kept.held(P):
        assert not lost.exists()
        kept.stake(inference.nothing(params, 1))
        lost.unlink()
        kept.lose()
    assert (kept_in(tmp_path).begun, kept_in(tmp_path).count) == (False, 1)


# ---- breaks that nobody wanted ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_full_disk_at_any_save_costs_nothing_and_gives_nothing(monkeypatch, tmp_path, depth):
    """The first, the second, …: the next run brings what is missing, and the ledger has one batch in the end."""
    encoder = micro(depth=depth, taps=(depth,))
    exact = inference.ideal(inference.Params((ANN,), HUB, encoder.shape, P), {HUB: encoder, ANN: samples(2)})[ANN]
    honest, saves = files.replacing, []
    for number in range(1, 40):
        place, saves[:] = tmp_path / str(number), []
        place.mkdir()

        def fails(path, number=number, **kwargs):
            saves.append(path.name)
            return no_room() if len(saves) == number else honest(path, **kwargs)

        with monkeypatch.context() as m:
            m.setattr(files, "replacing", fails)
            run = asked(place, encoder=encoder)
        if len(saves) < number:
            break
        broken = [e for e in run.errors.values() if isinstance(e, OSError)]
        assert [str(e) for e in broken] == ["[Errno 28] no room"], saves[-1]
        told = says(run, HUB, "Features")
        run = asked(place, encoder=encoder)
        check_no_errors(run)
        np.testing.assert_allclose(values(run)[ANN], exact, atol=0.4)  # noise of the small ring, and flooding
        assert paid(place) == {"ann": P.slots}, saves[-1]
        assert told <= (saves[-1] == "ann.taps.npz")
    assert {"ann.taps.npz", "ann.taps.npz.lost", "ledger.json", "next.npz", "state.npz"} <= set(saves)
    assert len(saves) == (9 if depth == 1 else 12)


def test_what_is_kept_is_private_all_the_way(monkeypatch, tmp_path):
    dies_after_inputs(monkeypatch)
    assert isinstance(asked(tmp_path).errors[HUB], Killed)
    own = tmp_path / "deep" / "answers" / "ann"
    (own / f".state.npz.{'0' * 32}.part").touch()
    (tmp_path / f".ann.taps.npz.{'0' * 32}.part").touch()
    (tmp_path / f".ann.taps.npz.lost.{'0' * 32}.part").touch()
    for folder in (own, own.parent, own.parent.parent):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert isinstance(asked(tmp_path).errors[ANN], ProtocolAbort)
    assert list(tmp_path.glob(".*.part")) + list(own.glob(".*.part")) == []
    for file in [f for f in tmp_path.rglob("*") if f.is_file()]:
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, file
