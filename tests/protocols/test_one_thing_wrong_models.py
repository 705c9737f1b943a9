"""Encrypted training, validation and inference: what is refused before anything is sent, and impossible messages."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("seal")
pytest.importorskip("numba")

from collective import HUB, names
from encoders import micro
from liars import answers

from cloister.errors import DataError, ParameterError, ProtocolAbort, RefusedError
from cloister.models import cellcnn
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.crypto.owner_ckks import scheme as block
from cloister.papers import encrypted_loss
from cloister.provider.gpu import cuda_device
from cloister.study import Party
from cloister.testing import Case
from cloister.workflows.adapt_model import block_messages, encrypted_inference
from cloister.workflows.predict_cellcnn import cellcnn_card
from cloister.workflows.train_cellcnn import cellcnn_terms, encrypted_training, encrypted_validation

SITES = A, B = names(2)
ANN = Party("ann")


def refused(code, line, check, *args):
    with pytest.raises(ProtocolAbort) as e:
        check(*args)
    assert (e.value.code, e.value.line) == (code, line)


# ---- CellCnn ---------------------------------------------------------------------------------------------------------


def test_agreed_classes_without_one_of_mine():
    case = Case(cellcnn_terms.Params(SITES, HUB), dict.fromkeys(SITES, (["CD4"], ["sick", "well"])))
    found = answers(cellcnn_terms, case, HUB, cellcnn_terms.Agreed, lambda m: replace(m, classes=("sick", "sound")))
    assert found == dict.fromkeys(SITES, ("cellcnn_terms", "L2", "classes"))


@pytest.mark.parametrize(("there", "start"), [((), (3, True)), ((2, 4), (3, True)), ((2, 4), (4, False))])
def test_a_start_from_a_checkpoint_that_a_site_does_not_have(there, start, monkeypatch):
    async def send(to, message):
        assert message.steps == there

    async def told(sender, kind):
        return encrypted_training.Start(*start, check=False)

    monkeypatch.setattr(encrypted_training.ckks, "context", lambda params: None)
    params = SimpleNamespace(aggregator=HUB, tag=b"tag", ckks=None)
    ch = SimpleNamespace(send=send, recv_broadcast=told)
    kept = {"steps": lambda tag: there, "get_state": lambda c, tag, step: {}}
    store = SimpleNamespace(name=b"store", **kept) if there else None
    refused("checkpoint", "L2", lambda: asyncio.run(encrypted_training.begin(ch, params, store, None)))


CONFIG = cellcnn.Config(markers=3, filters=2, classes=2, batch=12, steps=2, learning_rate=0.3, momentum=0.5)
VALIDATION = encrypted_validation.Params(SITES, HUB, encrypted_validation.ring_for(CONFIG, 2), CONFIG, 9)
X, Y = np.zeros((9, 3)), np.zeros((9, 2))
AGREED = frozenset(["validation"])


def validate(ch=None, keys=None, x=X, consent=AGREED):
    return asyncio.run(
        encrypted_validation.holder(ch, VALIDATION, None, keys, x, Y, entropy=Entropy(), consent=consent)
    )


def test_nothing_is_validated_without_consent_or_with_other_samples():
    with pytest.raises(RefusedError, match="validation"):
        validate(consent=frozenset(["open-model"]))
    for x in (X[:8], X + np.nan, X + 33.0):
        with pytest.raises(DataError, match="held-out"):
            validate(x=x)


@pytest.mark.parametrize("loss", [-1.1, np.nan, np.inf, 1e6])
def test_a_loss_that_cannot_be(loss):
    assert encrypted_validation.check_loss(VALIDATION, np.full(4, 0.25)) == 0.25
    refused("diverged", "L2", encrypted_validation.check_loss, VALIDATION, np.full(4, loss))


def test_no_loss_is_opened_before_its_audit(monkeypatch):
    """The circuit is left out: what a holder sends is in its book, and an audit that fails is the end."""
    squares, audited, opened = np.ones((2, 1, 4), np.uint64), [], []

    async def send(to, message):
        pass

    async def contribute(*args, **kwargs):
        return None

    async def audit(ch, params, book, *, entropy):
        audited.extend(book.shares)
        raise ProtocolAbort("collective_audit", "L2", "sum", "another sum")

    async def open_(*args, **kwargs):
        opened.append(args)
        return np.full(4, 0.25)

    ring = SimpleNamespace(add=lambda x, mask: x)
    encrypted = {"raw": lambda ct: (squares, 1.0), "rerandomise": lambda key, ct, entropy: ct, "pack": bytes}
    context = SimpleNamespace(**encrypted, ring=ring)
    monkeypatch.setattr(encrypted_validation.collective_refresh, "pad", lambda *args: None)
    monkeypatch.setattr(encrypted_validation, "squares", lambda *args: None)
    monkeypatch.setattr(encrypted_validation.ckks, "context", lambda params: context)
    monkeypatch.setattr(encrypted_validation, "refresh", lambda params: (SimpleNamespace(auditor=A), []))
    monkeypatch.setattr(encrypted_validation, "opening", lambda params: None)
    monkeypatch.setattr(encrypted_validation.collective_refresh, "contribute", contribute)
    monkeypatch.setattr(encrypted_validation.collective_refresh, "common", lambda *args: None)
    monkeypatch.setattr(encrypted_validation.collective_audit, "holder", audit)
    monkeypatch.setattr(encrypted_validation.threshold_decrypt, "holder", open_)
    ch = SimpleNamespace(me=B, send=send, sub=lambda name: None)
    keys = SimpleNamespace(spend=lambda n: None, public=None, share=None)
    refused("sum", "L2", lambda: validate(ch, keys))
    assert np.array_equal(audited, squares)
    assert not opened


def test_a_card_is_not_even_looked_at_without_consent():
    params = cellcnn_card.Params(SITES, HUB, ANN)
    with pytest.raises(RefusedError, match="outside-query"):
        asyncio.run(cellcnn_card.holder(None, params, None, consent=frozenset(["validation"])))


# ---- inference -------------------------------------------------------------------------------------------------------

ENCODER = micro()
INFERENCE = encrypted_inference.Params((ANN,), HUB, ENCODER.shape, block.SMALL)
SAMPLES = np.zeros((2, ENCODER.shape.tokens - 1, ENCODER.shape.inputs))


def test_a_seed_of_another_length():
    assert block_messages.seed_of(bytes(32), "L1", ANN) == bytes(32)
    for seed in (b"", bytes(31), bytes(33)):
        refused("malformed", "L1", block_messages.seed_of, seed, "L1", ANN)


@pytest.mark.parametrize("x", [SAMPLES[:, 1:], SAMPLES[0], SAMPLES + np.nan, SAMPLES + 1e3])
def test_samples_that_the_model_does_not_take_are_refused_before_anything_is_sent(x):
    with pytest.raises(DataError):
        asyncio.run(encrypted_inference.owner(SimpleNamespace(me=ANN), INFERENCE, x, entropy=Entropy()))


def test_a_card_that_is_not_there_is_missed_before_anything_is_received(monkeypatch):
    monkeypatch.setattr(cuda_device, "why_not", lambda: "there is none")
    with pytest.raises(ParameterError, match="there is none"):
        asyncio.run(encrypted_inference.provider(None, INFERENCE, ENCODER, device="gpu", entropy=Entropy()))


SIZES = [np.zeros(0, np.int64), np.array([0]), np.array([1, -1]), np.array([encrypted_loss.MOST + 1])]


@pytest.mark.parametrize("change", [{"seed": bytes(31)}, *({"sizes": sizes} for sizes in SIZES)])
def test_a_key_for_a_loss_with_one_thing_wrong(change):
    given = {HUB: (), ANN: (np.full((1, 2), 0.5), np.array([1]), np.array([1]))}
    case = Case(encrypted_loss.Params((ANN,), HUB, block.SMALL, 2), given)
    found = answers(encrypted_loss, case, ANN, encrypted_loss.Key, lambda m: replace(m, **change))
    assert found == {HUB: ("encrypted_loss", "L1", "malformed")}


@pytest.mark.parametrize(("beyond", "block_done"), [(0, 0), (1, 0), (2, 0), (0, 1), (0, -1)])
def test_samples_that_all_leave_their_bounds_and_a_start_in_the_middle(beyond, block_done, monkeypatch):
    """One sample of two may; then it has no features. Where both do, it is said at the end. Nothing was begun."""
    found = np.where(np.arange(2)[:, None, None] < beyond, np.nan, np.ones((2, 1, ENCODER.shape.rank)))

    class Side:
        def __init__(self, *args):
            self.ch = SimpleNamespace(recv=self.start)

        async def start(self, sender, kind):
            return encrypted_inference.Start(block_done)

        async def send_key(self, *args):
            pass

        async def agree(self):
            return True

        async def batch(self, *args):
            return found

    monkeypatch.setattr(encrypted_inference, "OwnerSide", Side)
    kept = SimpleNamespace(key=lambda *args: None, begun=False, count=0, read=[])
    kept.add = lambda taps, key: kept.read.append(taps)
    kept.stake, kept.lose = lambda lost: None, lambda: None
    ch = SimpleNamespace(me=ANN, sub=lambda name: None, step=lambda *args, **kwargs: None)

    def ask():
        return asyncio.run(encrypted_inference.ask(ch, INFERENCE, SAMPLES, kept, Entropy()))

    if block_done:
        refused("state", "L1", ask)
    elif beyond == 2:
        refused("range", "L5", ask)
    else:
        np.testing.assert_array_equal(ask(), found)


@pytest.mark.parametrize("sizes", [[], [2], [1, 0]])
def test_sizes_of_batches_that_are_not_those_of_the_samples_are_refused_before_anything_is_sent(sizes):
    params = encrypted_loss.Params((ANN,), HUB, block.SMALL, 2)
    given = np.full((1, 2), 0.5), np.array([1]), np.array(sizes, np.int64)
    with pytest.raises(DataError, match="batches of 1 to"):
        asyncio.run(encrypted_loss.owner(SimpleNamespace(me=ANN), params, *given, entropy=Entropy()))
