"""The parts of a distillation's losses, the rates that fall, and what is done about a student outside its intervals."""

import copy

import numpy as np
import pytest
import torch

from cloister.errors import ParameterError
from cloister.models import polynomial, student, vit
from cloister.models.learner import init_weights
from cloister.models.student.export import calibrated


@pytest.fixture
def teacher():
    model = vit.Vit(vit.Config(1, 4, 3, patch=2, width=8, depth=2, heads=2, dropout=0.0))
    init_weights(model, 1)
    with torch.no_grad():
        g = torch.Generator().manual_seed(0)
        for p in (model.positions, model.token):
            p.copy_(torch.randn(p.shape, generator=g))
    return student.from_vit(model.eval())


@pytest.fixture
def images():
    return student.patches(torch.rand((32, 1, 4, 4), generator=torch.Generator().manual_seed(2)) - 0.5, 2)


def test_the_parts_of_a_loss_add_up_to_it(teacher, images):
    labels = torch.arange(32) % 3
    _, history = student.distil(teacher, images, labels, student.Recipe(epochs=2, batch_size=10, decay=0.1))
    for stage, parts in (
        ("layers", ("hidden", "attention", "ranges")),
        ("prediction", ("KL", "cross-entropy", "ranges")),
    ):
        summed = np.sum([history[f"{stage}: {name}"] for name in parts], axis=0)
        np.testing.assert_allclose(history[stage], summed, rtol=1e-5)
        assert len(history[stage]) == 2
    _, without = student.distil(teacher, images, None, student.Recipe(epochs=1))
    assert "prediction: cross-entropy" not in without


def test_each_stage_begins_at_its_rate_and_falls_to_a_share_of_it(teacher, images, monkeypatch):
    rates = []
    step = torch.optim.Adam.step

    def watched(self, *args, **kwargs):
        rates.append(self.param_groups[0]["lr"])
        return step(self, *args, **kwargs)

    monkeypatch.setattr(torch.optim.Adam, "step", watched)
    recipe = student.Recipe(epochs=5, batch_size=8, rate=1e-3, last_rate=1e-4, decay=0.1)
    student.distil(teacher, images, recipe=recipe)
    first, second = np.split(np.array(rates), 2)
    for stage, rate in ((first, 1e-3), (second, 1e-4)):
        assert stage[0] == pytest.approx(rate)
        assert (np.diff(stage) < 0).all()
        assert 0.1 * rate < stage[-1] < 0.12 * rate
    rates.clear()
    student.distil(teacher, images, recipe=student.Recipe(epochs=1, batch_size=8, rate=1e-3, last_rate=1e-3))
    assert set(rates) == {1e-3}


def test_a_stronger_penalty_brings_scores_back(teacher, images):
    """Queries and keys twice too large: outside before, nearer after."""
    wild = copy.deepcopy(teacher)
    wild.exact = False
    with torch.no_grad():
        wild.blocks[0].qkv.weight[:16] *= 4

    def reach(model):
        return float(model.trace(images).scores[0].detach().abs().max())

    before = reach(wild)
    history = student.keep_within(teacher, wild, images, None, student.Recipe(epochs=10, batch_size=8, rate=1e-2))
    assert history["prediction: ranges"][-1] < history["prediction: ranges"][0]
    assert reach(wild) < before


def test_spans_are_listed_with_their_intervals_and_all_that_leave_them_are_counted(teacher, images):
    made = copy.deepcopy(teacher)
    made.exact = False
    with torch.no_grad():
        for block in made.blocks:
            block.qkv.weight[:16] *= 5
    encoder = calibrated(made, images)
    rows = polynomial.measure(encoder, images.double().numpy(), at_once=5).rows(encoder.shape)
    whole = polynomial.measure(encoder, images.double().numpy()).rows(encoder.shape)
    assert [(r.block, r.what) for r in rows] == [(r.block, r.what) for r in whole]
    np.testing.assert_allclose([r.high for r in rows], [r.high for r in whole])
    outside = [r for r in rows if not r.inside]
    assert {r.what for r in outside} >= {"scores"}
    more = rf"\(and {len(outside) - 1} more\)" if len(outside) > 1 else "reach"
    with pytest.raises(ParameterError, match=more):
        polynomial.check_rows(rows)
    with pytest.raises(ParameterError, match=f"block {outside[0].block}: {outside[0].what} reach"):
        student.export(made, images)


def test_values_that_no_unit_brings_into_an_interval_are_refused_by_block(teacher, images):
    with torch.no_grad():
        teacher.blocks[1].down.weight.fill_(float("inf"))
        teacher.blocks[0].out.weight.fill_(float("nan"))
    with pytest.raises(ParameterError, match=r"block 1: .* no unit brings"):
        student.export(teacher, images)


def test_an_eps_that_the_circuit_cannot_add_is_refused(teacher, images):
    for block in teacher.blocks:
        block.norm1.eps = 0.5
    with pytest.raises(ParameterError, match="LayerNorm adds 0.5 to variances"):
        student.export(teacher, images)
