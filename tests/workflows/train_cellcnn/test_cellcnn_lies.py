"""One liar in encrypted training and prediction: the others end with one model and right answers, or by name."""

import dataclasses
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("numba")
sys.path.insert(0, str(Path(__file__).parent))

from collective import HUB
from test_encrypted_training import CONFIG, PARTIES, RING, answers, batches, params, query_case, trained

from cloister.mpc.crypto.ckks import scheme as ckks
from cloister.testing import Case, check_lies
from cloister.workflows.predict_cellcnn import oblivious_prediction
from cloister.workflows.train_cellcnn import encrypted_training

__all__ = ["trained"]  # the fixture
SLOW = {"timeout": 10.0, "within": 400.0}  # seconds, on a machine that others keep busy
AUDITOR, MASKER, _ = PARTIES


def one_step():
    config = dataclasses.replace(CONFIG, steps=1)
    return Case(params(config), batches(config))


def one_model(lie, values):
    """All that finished hold the same [M]; that it is the right one is what the audit says (`test_collective_lies`)."""
    c = ckks.context(RING)
    models = [[c.raw(ct)[0] for ct in v.model] for v in values.values() if v is not None]
    assert all(np.array_equal(a, b) for m in models for a, b in zip(m, models[0], strict=True))


OWN = ("encrypted_training.", "collective_audit.")  # keys and refreshes have tests of their own


@pytest.mark.slow
@pytest.mark.parametrize("liar", [HUB, AUDITOR, MASKER])
def test_lies_in_a_training_step(liar):
    lies = check_lies(
        encrypted_training,
        [one_step()],
        right=one_model,
        liars=[liar],
        only=lambda lie: lie.name.startswith(OWN),
        **SLOW,
    )
    assert lies.tried >= 3
    assert lies.aborted >= 2


@pytest.mark.slow
def test_lies_in_a_prediction(trained):
    X = np.random.default_rng(3).uniform(-3, 3, (4, CONFIG.markers))
    lies = check_lies(
        oblivious_prediction,
        [query_case(trained, X)],
        right=answers(trained, X),
        liars=[HUB, *PARTIES],
        only=lambda lie: lie.name.startswith("oblivious_prediction."),
        **SLOW,
    )
    assert lies.tried >= 12
    assert lies.aborted >= 8
