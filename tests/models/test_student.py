import copy
import dataclasses

import numpy as np
import pytest

pytest.importorskip("torch")
import torch

from cloister.errors import DataError, ParameterError
from cloister.models import adapter, polynomial, scgpt, student, vit
from cloister.models.learner import init_weights

torch.set_num_threads(1)


def small_vit(seed=0, depth=2):
    model = vit.Vit(vit.Config(1, 8, 3, patch=4, width=8, depth=depth, heads=2, dropout=0.0))
    init_weights(model, seed)
    with torch.no_grad():
        g = torch.Generator().manual_seed(seed)
        model.positions.copy_(torch.randn(model.positions.shape, generator=g))
        model.token.copy_(torch.randn(model.token.shape, generator=g))
    return model.eval()


def images(n=64, seed=1):
    return torch.rand((n, 1, 8, 8), generator=torch.Generator().manual_seed(seed)) - 0.5


def test_a_teacher_computes_what_the_vit_computes():
    model, x = small_vit(), images()
    made = student.from_vit(model)
    np.testing.assert_allclose(made(student.patches(x, 4)).detach(), model(x).detach(), atol=1e-5)


def test_a_teacher_computes_what_the_scgpt_encoder_computes_up_to_its_value_encoder():
    genes = [f"G{i}" for i in range(6)]
    model = scgpt.ScGPT.random(genes, scgpt.Config(16, 2, 16, 2, dropout=0.0), seed=3)
    v = torch.linspace(0, 3, 50).repeat(6).reshape(50, 6)
    made = student.from_scgpt(model, genes, v, 2)
    ids = torch.tensor([[model.vocab["<cls>"], *(model.vocab[g] for g in genes)]]).expand(50, -1)
    wanted = model.encoder.tokens(ids, torch.cat([torch.zeros(50, 1), v], 1)).detach()
    found = made.trace(torch.as_tensor(student.cell_inputs(v), dtype=torch.float32)).hidden[-1].detach()
    assert float((found - wanted).square().mean().sqrt() / wanted.square().mean().sqrt()) < 0.2


@pytest.fixture(scope="module")
def distilled():
    teacher = student.from_vit(small_vit())
    x = student.patches(images(128), 4)
    made, history = student.distil(teacher, x, recipe=student.Recipe(epochs=8, rate=3e-3, last_rate=3e-4))
    return teacher, made, history, x


def test_distillation_brings_the_student_closer(distilled):
    teacher, made, history, x = distilled
    raw = copy.deepcopy(teacher)
    raw.exact = False

    def far(model):
        return float((model(x) - teacher(x)).detach().square().mean())

    assert far(made) < 0.95 * far(raw)  # and its scores stay above -2.18, which the teacher's do not
    assert history["layers"][-1] < history["layers"][0]
    assert history["prediction"][-1] < history["prediction"][0]


def test_distillation_out_of_domain_needs_no_labels_and_helps_where_it_did_not_look():
    """The auxiliary images are of another kind (smooth slopes) than those on which the student is judged (noise)."""
    teacher, own = student.from_vit(small_vit()), student.patches(images(128), 4)
    g = torch.Generator().manual_seed(5)
    at = torch.linspace(-0.5, 0.5, 8)
    a, b, c = (torch.rand((128, 1, 1, 1), generator=g) * 2 - 1 for _ in range(3))
    foreign = student.patches(0.5 * (a * at[:, None] + b * at + c * 0.5), 4)
    made, _ = student.distil(teacher, foreign, recipe=student.Recipe(epochs=8, rate=3e-3, last_rate=3e-4))
    raw = copy.deepcopy(teacher)
    raw.exact = False

    def far(model, x):
        return float((model(x) - teacher(x)).detach().square().mean())

    assert far(made, foreign) < 0.5 * far(raw, foreign)
    assert far(made, own) < 0.8 * far(raw, own)


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_the_export_computes_what_the_student_computes(distilled, norm):
    if norm == "pre":
        made, x = distilled[1], distilled[3]
    else:
        genes = [f"G{i}" for i in range(4)]
        model = scgpt.ScGPT.random(genes, scgpt.Config(8, 2, 8, 2, dropout=0.0), seed=3)
        v = torch.rand((128, 4), generator=torch.Generator().manual_seed(0))
        made = student.from_scgpt(model, genes, v, 2)
        made.exact = False
        with torch.no_grad():
            for block in made.blocks:
                block.qkv.weight[:8] *= 0.7  # scores above -2.18, where exp turns upwards
        x = torch.as_tensor(student.cell_inputs(v), dtype=torch.float32)
    encoder = student.export(made, x, {"kind": "test"}, taps=(2,), rank=4)
    b = polynomial.hidden(encoder, x.double().numpy())
    wanted = made.trace(x).hidden
    for found, exact in zip(b, wanted, strict=True):
        exact = exact.detach().numpy()
        assert np.abs(found - exact).max() < 1e-2 * np.abs(exact).max()  # iterations instead of division and root
    taps = polynomial.taps_of(encoder, b)
    assert taps.shape == (len(x), 1, 4)
    assert np.abs(taps).max() < polynomial.TAP_BOUND


@pytest.fixture(scope="module")
def squared():
    """The same teacher, and its student with quadratic attention."""
    teacher = student.from_vit(small_vit()).attend_by("quadratic")
    x = student.patches(images(128), 4)
    made, _ = student.distil(teacher, x, recipe=student.Recipe(epochs=8, rate=3e-3, last_rate=3e-4))
    return teacher, made, x


def test_quadratic_attention_is_learnt(squared):
    teacher, made, x = squared
    raw = copy.deepcopy(teacher)
    raw.exact = False

    def far(model):
        return float((model(x) - teacher(x)).detach().square().mean())

    assert far(made) < 0.95 * far(raw)
    moved = [float((b.offset - student.OFFSET).detach().abs().max()) for b in made.blocks]
    assert min(moved) > 0  # c is learnt, head by head
    weights, low = made.blocks[0].weigh(torch.tensor([[[-5.0, -1.0, 1.0]]] * 2), 6)
    assert weights.detach()[0, 0, 2] > weights.detach()[0, 0, 1] > 0
    assert (low.detach()[:, 0, 0] > 0).all()  # below -c a smaller score would weigh more
    with pytest.raises(ParameterError, match="attention is one of"):
        teacher.attend_by("linear")


def test_the_export_of_quadratic_attention_computes_what_the_student_computes(squared, tmp_path):
    _, made, x = squared
    encoder = student.export(made, x, {"kind": "test"}, taps=(2,), rank=4)
    assert encoder.shape.attention == "quadratic"
    encoder.save(tmp_path / "m.npz")
    again = polynomial.Encoder.load(tmp_path / "m.npz")
    assert again.shape == encoder.shape
    for found, exact in zip(polynomial.hidden(again, x.double().numpy()), made.trace(x).hidden, strict=True):
        exact = exact.detach().numpy()
        assert np.abs(found - exact).max() < 1e-2 * np.abs(exact).max()  # iterations instead of division and root
    seen = polynomial.check_ranges(encoder, x.double().numpy()).seen
    top = max(max(-low, high) for (what, _), (low, high) in seen.items() if what == "sums")
    assert top < encoder.shape.sum_bound <= max(1.0, 3 * top)  # a power of two with half as much again


def test_a_student_that_leaves_its_intervals_is_refused(distilled):
    made, x = copy.deepcopy(distilled[1]), distilled[3]
    with torch.no_grad():
        made.blocks[0].qkv.weight *= 6
    with pytest.raises(ParameterError, match=r"block 1: .* reach .* the approximation holds on"):
        student.export(made, x, {}, taps=(2,))


def test_a_model_file_keeps_everything_and_refuses_others(distilled, tmp_path):
    made, x = distilled[1], distilled[3]
    encoder = student.export(made, x, {"kind": "test"}, taps=(2,), rank=4)
    encoder.save(tmp_path / "m.npz")
    again = polynomial.Encoder.load(tmp_path / "m.npz")
    assert again.shape == encoder.shape
    assert again.card == encoder.card
    np.testing.assert_allclose(again.blocks[1].qkv, encoder.blocks[1].qkv, rtol=1e-6)
    (tmp_path / "bad.npz").write_bytes(b"nothing")
    for name in ("bad.npz", "none.npz"):
        with pytest.raises(DataError):
            polynomial.Encoder.load(tmp_path / name)


def test_a_model_in_half_precision_keeps_its_ranges(distilled, tmp_path):
    made, x = distilled[1], distilled[3].double().numpy()
    encoder = student.export(made, x, {"kind": "test"}, taps=(2,), rank=4)
    encoder.save(tmp_path / "m.npz")
    encoder.save(tmp_path / "half.npz", half=True)
    assert (tmp_path / "half.npz").stat().st_size < (tmp_path / "m.npz").stat().st_size
    again = polynomial.Encoder.load(tmp_path / "half.npz")
    assert again.shape == encoder.shape
    polynomial.check_ranges(again, x)
    a, b = (polynomial.hidden(e, x)[-1] for e in (encoder, again))
    assert np.abs(a - b).max() < 5e-3 * np.abs(a).max()


def test_an_export_leaves_room_at_both_ends(distilled):
    made, x = distilled[1], distilled[3].double().numpy()
    encoder = student.export(made, x, {"kind": "test"}, taps=(2,), rank=4)
    found = polynomial.check_ranges(encoder, x)
    low, high = found.seen["division", 0]
    a, b = polynomial.DIVISION
    assert low > a
    assert high < b
    assert np.log(b / high) == pytest.approx(3 * np.log(low / a), rel=1e-3)


@pytest.mark.parametrize("degree", [2, 4, 6, 8])
def test_exp_falls_to_its_minimum_and_no_further(degree):
    """The allowed scores begin where the polynomial turns upwards: below, a smaller score would weigh more."""
    low, high = polynomial.limits(polynomial.Shape(3, 2, 8, 2, 8, 1, exp_degree=degree))["scores"]
    assert low == pytest.approx(polynomial.turning(degree), abs=1e-3)
    rising = polynomial.taylor(np.linspace(low + 2e-3, high, 1000), degree)
    assert (np.diff(rising) > 0).all()
    assert polynomial.taylor(low - 0.1, degree) > polynomial.taylor(low, degree)


@pytest.mark.parametrize(("degree", "within"), [(2, 0.4), (4, 0.03), (6, 0.001)])
def test_taylor(degree, within):
    s = np.linspace(-1, 1, 99)
    assert np.abs(polynomial.taylor(s, degree) / np.exp(s) - 1).max() < within


def test_division_and_root_converge_on_their_intervals():
    D = np.linspace(*polynomial.DIVISION, 99)
    assert np.abs(polynomial.inverse(D, 7) * D - 1).max() < 1e-5
    v = np.linspace(*polynomial.ROOT, 99)
    assert np.abs(polynomial.inverse_root(v, 6) * np.sqrt(v) - 1).max() < 1e-2


def test_adjacent_taps_are_refused():
    with pytest.raises(ParameterError, match="adjacent"):
        polynomial.Shape(3, 2, 8, 2, 8, 4, taps=(2, 3))
    for depth in range(1, 13):
        taps = polynomial.default_taps(depth)
        polynomial.Shape(3, 2, 8, 2, 8, depth, taps=taps)
        assert taps[-1] == depth
        assert len(taps) == -(-depth // 3)


def test_an_adapter_starts_as_linear_probing_and_travels_as_a_file(tmp_path):
    config = adapter.Config(2, 4, 3, seed=1)
    with_adapter, probe = adapter.make(config), adapter.make(dataclasses.replace(config, bottleneck=0))
    taps = np.random.default_rng(0).normal(size=(5, 2, 4))
    probe.head.load_state_dict(with_adapter.head.state_dict())
    a, b = (adapter.Adapted(m, ("x", "y", "z"), "d").probabilities(taps) for m in (with_adapter, probe))
    np.testing.assert_allclose(a, b)
    made = adapter.Adapted(with_adapter, ("x", "y", "z"), "d")
    made.save(tmp_path / "a.npz")
    again = adapter.Adapted.load(tmp_path / "a.npz")
    np.testing.assert_array_equal(again.probabilities(taps), a)
    assert again.labels == made.labels
    assert again.parameters == made.parameters
    with pytest.raises(DataError):
        adapter.Adapted.load(tmp_path / "b.npz")
