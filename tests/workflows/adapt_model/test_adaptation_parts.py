"""The five questions for what stands around encrypted inference: the card, the published mode, the published loss."""

import dataclasses
import functools
import types
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("numba")
from encoders import micro, tiny

from cloister.errors import ProtocolAbort
from cloister.mpc.crypto.owner_ckks import scheme as block
from cloister.papers import encrypted_loss
from cloister.papers import permuted_inference as permuted
from cloister.rehearsal.rehearsal import Fault
from cloister.study import Party
from cloister.testing import (
    Case,
    check_abort,
    check_cost,
    check_ideal,
    check_protocol,
    check_vectors,
    check_view,
    run_protocol,
    values,
)
from cloister.workflows.adapt_model import model_card

HUB, ANN, BEN = Party("hub"), Party("ann"), Party("ben")
VECTORS = Path(__file__).parents[2] / "vectors"


# ---- model card ------------------------------------------------------------------------------------------------------


def told(**card):
    return model_card.told_by(dataclasses.replace(micro(), card={"kind": "cells", **card}), block.SMALL)


def same_card(found, ideal):
    assert found.digest == ideal.digest


def test_model_card():
    params = model_card.Params((ANN, BEN), HUB)
    first, twin = (Case(params, {HUB: (told(genes=[name]),)}) for name in ("A", "B"))
    size = len(model_card.write(first.inputs[HUB][0]))
    module = types.SimpleNamespace(**vars(model_card))
    module.cost = functools.partial(model_card.cost, size=size)

    def right(run):
        for found in values(run).values():
            same_card(found, first.inputs[HUB][0])

    check_protocol(module, [first], vectors=VECTORS / "model_card.json", agree=same_card, survived=right, twin=twin)


# ---- the published loss ----------------------------------------------------------------------------------------------


def loss_case(seed=0, sizes=(1,), owners=(ANN,)):
    rng, n = np.random.default_rng(seed), sum(sizes)
    params = encrypted_loss.Params(owners, HUB, block.SMALL, 3)
    return Case(params, {u: (rng.dirichlet([1, 1, 1], n), rng.integers(0, 3, n), np.array(sizes)) for u in owners})


def near(found, ideal):
    assert (ideal is None and found is None) or np.abs(found - ideal).max() < 1e-2


def test_encrypted_loss():
    first = loss_case()
    check_ideal(encrypted_loss, [first, loss_case(1, (2, 3), (ANN, BEN))], agree=near)
    check_vectors(encrypted_loss, first, VECTORS / "encrypted_loss.json")
    check_view(encrypted_loss, first, loss_case(3))
    check_cost(encrypted_loss, loss_case(4, owners=(ANN, BEN)))


def test_encrypted_loss_stops_in_time():
    first = loss_case()
    ideal = encrypted_loss.ideal(first.params, first.inputs)

    def right(run):
        if ANN in run.outcomes:
            near(values(run)[ANN], ideal[ANN])

    messages = [
        (ANN, HUB, "encrypted_loss.Key"),
        (ANN, HUB, "encrypted_loss.Sample"),
        (HUB, ANN, "encrypted_loss.Loss"),
    ]
    check_abort(encrypted_loss, first, survived=right, timeout=2.0, within=30.0, messages=messages)


# ---- the published mode ----------------------------------------------------------------------------------------------


def permuted_case(encoder, seed=0, samples=2, owners=(ANN,)):
    rng, s = np.random.default_rng(seed), encoder.shape
    data = {u: (rng.uniform(-1, 1, (samples, s.tokens - 1, s.inputs)),) for u in owners}
    return Case(permuted.Params(owners, HUB, s, block.SMALL), {HUB: (encoder,), **data})


@functools.cache
def two_blocks():
    return tiny(depth=2, taps=(2,), tokens=2, inputs=1, width=4, heads=1, hidden=2, rank=1, exp_degree=2, steps=1,
                root_steps=1)[0]  # fmt: skip


def alike(found, ideal):
    if ideal is not None:
        assert np.abs(found - ideal).max() < 2e-2 * np.abs(ideal).max()


def test_permuted_inference():
    encoder = two_blocks()
    check_ideal(permuted, [permuted_case(encoder, samples=3)], agree=alike, timeout=120.0)
    check_vectors(permuted, permuted_case(micro()), VECTORS / "permuted_inference.json", timeout=60.0)
    check_view(permuted, permuted_case(encoder, 1), permuted_case(encoder, 2))
    check_cost(permuted, permuted_case(encoder, owners=(ANN, BEN)))


@pytest.mark.parametrize(
    ("kind", "sender", "name"),
    [
        ("truncate", HUB, "permuted_inference.Output"),
        ("drop", HUB, "permuted_inference.Relative"),
        ("truncate", HUB, "permuted_inference.Order"),
        ("swap", ANN, "permuted_inference.Again"),
        ("drop", ANN, "permuted_inference.Again"),
        ("kill", ANN, "encrypted_inference.Key"),
        ("truncate", ANN, "encrypted_inference.Fresh"),
    ],
)
def test_permuted_inference_stops_in_time(kind, sender, name):
    fault = Fault(kind, sender, ANN if sender == HUB else HUB, name)
    run = run_protocol(permuted, permuted_case(two_blocks()), faults=[fault], timeout=5.0)
    assert run.errors
    assert ANN not in run.outcomes
    for e in run.errors.values():
        assert isinstance(e, ProtocolAbort), e
        assert e.line
