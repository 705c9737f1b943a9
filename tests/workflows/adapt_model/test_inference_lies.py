"""One liar between provider and owner: whoever lies in whichever message, the other ends in time, and never crashes."""

import dataclasses

import numpy as np
import pytest

pytest.importorskip("numba")
from encoders import micro

from cloister.mpc.crypto.owner_ckks import scheme as block
from cloister.study import Party
from cloister.testing import Case, check_lies
from cloister.workflows.adapt_model import encrypted_inference, model_card

HUB, ANN = Party("hub"), Party("ann")


def case():
    encoder = micro()
    s = encoder.shape
    x = np.random.default_rng(1).uniform(-1, 1, (2, s.tokens - 1, s.inputs))
    return Case(encrypted_inference.Params((ANN,), HUB, s, block.SMALL), {HUB: (encoder,), ANN: (x,)})


def right(lie, values):
    """The provider's own result is how many batches it answered to the end: none, if the answers do not add up."""
    if HUB in values:
        assert values[HUB][ANN] in (0, 1)


@pytest.mark.slow
def test_lies_of_provider_and_owner():
    """An owner's lies shift what it reads itself, a provider's what the owner reads: both stand under Assumes."""
    lies = check_lies(
        encrypted_inference, [case()], right=right, assumes={"provider": "abcef"}, timeout=6.0, within=200.0, full=True
    )
    assert lies.tried >= 30
    assert lies.aborted >= 8


def test_one_lie_of_each():
    """In CI: keys of another run, other features, and a block after which nothing was begun."""
    first = {
        "encrypted_inference.Key": "c",
        "encrypted_inference.Features": "b",
        "encrypted_inference.Start": "b",
    }
    lies = check_lies(
        encrypted_inference,
        [case()],
        right=right,
        assumes={"provider": "abcef"},
        timeout=6.0,
        within=200.0,
        only=lambda lie: first.get(lie.name) == lie.letter,
    )
    assert (lies.tried, lies.assumed) == (3, 2)


def test_lies_about_the_card():
    """A card that cannot be read is named; one that can is agreed on at the start of what follows."""
    told = model_card.told_by(dataclasses.replace(micro(), card={"kind": "cells"}), block.SMALL)
    card = Case(model_card.Params((ANN,), HUB), {HUB: (told,), ANN: ()})
    lies = check_lies(model_card, [card], right=lambda lie, values: None)
    assert lies.aborted >= 1
