"""An asking that breaks off goes on: the same taps, paid for once, and nothing more for who claims a break."""

import dataclasses
import json
import stat
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("numba")
from encoders import tiny

from cloister.errors import DataError, ProtocolAbort
from cloister.mpc.crypto.owner_ckks import scheme as block
from cloister.study import Party
from cloister.testing import Case, check_no_errors, run_protocol, values
from cloister.workflows.adapt_model import checkpoint, encrypted_inference
from cloister.workflows.adapt_model import encrypted_inference as inference
from cloister.workflows.adapt_model.checkpoint import Answers, Taps
from cloister.workflows.adapt_model.inference import stored_taps
from cloister.workflows.adapt_model.packing import cheapest
from cloister.workflows.common.query_ledger import Ledger
from cloister.workflows.serve_model import workflow as serve_model

HUB, ANN = Party("hub"), Party("ann")
LITTLE = {"tokens": 2, "inputs": 1, "width": 4, "heads": 1, "hidden": 2, "rank": 1}
LITTLE |= {"exp_degree": 2, "steps": 1, "root_steps": 1}
DEPTH, TAPS = 4, (2, 4)


class Killed(Exception):
    """The power goes."""


@pytest.fixture(scope="module")
def encoder():
    return tiny(depth=DEPTH, taps=TAPS, **LITTLE)[0]


@pytest.fixture
def place(tmp_path):
    return tmp_path / "ann.taps.npz", tmp_path / "answers", tmp_path / "ledger.json"


def samples(encoder, n=3):
    s = encoder.shape
    return np.random.default_rng(1).uniform(-1, 1, (n, s.tokens - 1, s.inputs))


def asked(encoder, place, x, crypto=block.SMALL):
    path, folder, ledger = place
    kept = Taps.open(path, "these samples", crypto)
    inputs = {HUB: (encoder, Ledger(ledger), "cpu", folder), ANN: (x, kept)}
    case = Case(inference.Params((ANN,), HUB, encoder.shape, crypto), inputs)
    return run_protocol(inference, case, timeout=300.0)


def used(place):
    return json.loads(place[2].read_text())


def killed_after(monkeypatch, number):
    """End the provider as soon as it has kept so many blocks, before a tap leaves."""
    add = Answers.add

    def dying(self):
        add(self)
        if self.block == number:
            raise Killed

    monkeypatch.setattr(Answers, "add", dying)


def test_killed_after_block_three_and_started_again(encoder, place, monkeypatch):
    x = samples(encoder)
    with monkeypatch.context() as m:
        killed_after(m, 3)
        run = asked(encoder, place, x)
    assert isinstance(run.errors[HUB], Killed)
    assert isinstance(run.errors[ANN], ProtocolAbort)
    path, folder, _ = place
    assert used(place) == {"ann": block.SMALL.slots}
    assert [f.name for f in (folder / "ann").glob("block-*")] == ["block-1-3.npy"]
    for file in (path, *(folder / "ann").iterdir()):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    counted = []
    with monkeypatch.context() as m:
        done = inference.circuit_of(encoder.shape).block

        async def counting(self, values, layer, tokens=0):
            counted.append(layer)
            return await done(self, values, layer, tokens)

        m.setattr(inference.circuit_of(encoder.shape), "block", counting)
        run = asked(encoder, place, x)
    check_no_errors(run)
    assert counted == [3]  # blocks 1 to 3 were not computed again
    exact = inference.ideal(inference.Params((ANN,), HUB, encoder.shape, block.SMALL), {HUB: encoder, ANN: x})[ANN]
    assert np.abs(values(run)[ANN] - exact).max() < 0.1  # noise of the small ring, and flooding
    assert used(place) == {"ann": block.SMALL.slots}  # counted once
    meta, arrays = checkpoint.unpacked(path, "taps")
    assert set(arrays) == {"taps"}  # the key is gone
    assert "seed" not in meta
    again = asked(encoder, place, x)  # all are there: nothing is asked, nothing counted
    check_no_errors(again)
    assert np.array_equal(values(again)[ANN], values(run)[ANN])
    assert values(again)[HUB] == {ANN: 0}
    assert used(place) == {"ann": block.SMALL.slots}


@pytest.mark.slow
def test_a_small_batch_goes_on_as_well(place, monkeypatch):
    """Quadratic attention, where tokens share ciphertexts; one sample has no inputs that the model takes."""
    little = {k: v for k, v in LITTLE.items() if k not in ("tokens", "exp_degree")}
    encoder = tiny(depth=2, taps=(2,), tokens=3, attention="quadratic", **little)[0]
    x = samples(encoder, 5)
    x[2] = np.nan
    packed = cheapest(encoder.shape, block.QUADRATIC, 4)
    assert packed.tokens == 2
    with monkeypatch.context() as m:
        killed_after(m, 1)
        assert isinstance(asked(encoder, place, x, block.QUADRATIC).errors[HUB], Killed)
    run = asked(encoder, place, x, block.QUADRATIC)
    check_no_errors(run)
    params = inference.Params((ANN,), HUB, encoder.shape, block.QUADRATIC)
    good = np.arange(5) != 2
    exact = inference.ideal(params, {HUB: encoder, ANN: x[good]})[ANN]
    assert np.abs(values(run)[ANN][good] - exact).max() < 4e-2  # flooding
    assert np.isnan(values(run)[ANN][2]).all()
    assert used(place) == {"ann": packed.samples}


def test_a_break_gets_the_same_tap_again_and_not_another(encoder, place, monkeypatch):
    """Whoever claims that it lost a tap is sent the same ciphertext; anew, the flooding would be drawn again."""
    x = samples(encoder)
    seen = []
    read = encrypted_inference.OwnerSide.read_tap

    async def forgetful(self, tap, packed, count):
        found = await read(self, tap, packed, count)
        seen.append(found)
        if len(seen) == 1:
            raise Killed
        return found

    monkeypatch.setattr(encrypted_inference.OwnerSide, "read_tap", forgetful)
    assert isinstance(asked(encoder, place, x).errors[ANN], Killed)
    check_no_errors(asked(encoder, place, x))
    assert np.array_equal(seen[0], seen[1])
    place[1].rename(place[1].with_name("lost"))  # then the asking begins anew, and is paid for
    place[0].unlink()
    check_no_errors(asked(encoder, place, x))
    assert not np.array_equal(seen[0], seen[3])  # as it was before taps were kept: another draw of the noise
    assert used(place) == {"ann": 2 * block.SMALL.slots}


def test_a_key_buys_no_more_batches_than_were_paid_for(tmp_path):
    new, unpaid = Answers.of(tmp_path, ANN, b"key", "how", 3)
    assert unpaid == 3
    new.start(3)
    for batches, block_done in ((3, 0), (2, 0)):  # the one at hand, or the next one
        found, unpaid = Answers.of(tmp_path, ANN, b"key", "how", batches)
        assert (unpaid, found.block, found.left) == (0, block_done, batches)
    for batches in (4, 3, 5):  # two are left
        with pytest.raises(ProtocolAbort) as e:
            Answers.of(tmp_path, ANN, b"key", "how", batches)
        assert e.value.code == "state"


def test_a_new_key_is_owed_what_was_paid_for_and_never_told(tmp_path):
    def unpaid(batches, how="how"):
        return Answers.of(tmp_path, ANN, b"another key", how, batches)[1]

    paid, _ = Answers.of(tmp_path, ANN, b"key", "how", 3)
    paid.start(3)
    assert [unpaid(n) for n in (1, 3, 4)] == [0, 0, 1]  # nothing was told yet
    assert unpaid(4, "another model") == 4
    paid.prepare(1, None, None, [])
    assert unpaid(4) == 1
    paid.compare()  # from here on the batch at hand counts as told
    assert unpaid(4) == 2
    paid.add()
    assert unpaid(4) == 2
    paid.start(1)
    assert unpaid(4) == 3
    paid.prepare(1, None, None, [])
    paid.add()
    assert unpaid(4) == 4
    Answers.of(tmp_path, ANN, b"another key", "how", 4)[0].start(4)
    assert Answers.of(tmp_path, ANN, b"key", "how", 5)[1] == 1  # owed once, to either key


def test_files_of_other_samples_and_of_something_else_are_refused(tmp_path):
    path = tmp_path / "taps.npz"
    Taps(path, "these").add(np.zeros((2, 1, 3)), None)
    assert Taps.open(path, "these", block.SMALL).count == 2
    with pytest.raises(DataError, match="holds taps of other samples, of another model or of another mode"):
        Taps.open(path, "others", block.SMALL)
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(DataError, match="is not a file of taps"):
        Taps.open(path, "these", block.SMALL)
    with pytest.raises(ProtocolAbort) as e:
        checkpoint.check_start(1, 0)  # a provider that skips what was never begun
    assert e.value.code == "state"


def test_n8_serve_model_stores_lost_samples_by_default(tmp_path):
    """Beside the adapter, for its owner only: else every run with one set of samples could lose another bit."""
    told = SimpleNamespace(digest="model", crypto=None)
    options = SimpleNamespace(adapter=str(tmp_path / "adapter.npz"), taps=None)
    assert next(f.default for f in dataclasses.fields(serve_model.Options) if f.name == "taps") is None
    session, inputs = SimpleNamespace(mode="hardened", me="basel"), np.ones((3, 2, 2))
    first = stored_taps(session, options, told, inputs)
    assert first.path.parent == tmp_path / "taps"
    assert first.path.parent.stat().st_mode & 0o077 == 0
    first.read.append(np.full((3, 1, 4), np.nan))  # all lost
    first._save(None)
    again = stored_taps(session, options, told, inputs)
    assert again.count == 3
    assert np.isnan(again.read[0]).all()
    more = stored_taps(session, options, told, np.ones((4, 2, 2)))
    assert more.count == 0  # open: a set with one sample more is another file
