import numpy as np
import pytest

torch = pytest.importorskip("torch")

from cloister.errors import DataError, ParameterError  # noqa: E402
from cloister.models import cnn, mlp, vit  # noqa: E402
from cloister.models.classifier import (  # noqa: E402
    Blueprint,
    Network,
    ScGPTClassifier,
    Tokens,
    first_weights,
    make,
)
from cloister.models.learner import (  # noqa: E402
    Learner,
    Recipe,
    Table,
    augment_by,
    flip_and_shift,
    init_weights,
    pseudo_weights,
    rotate,
)
from cloister.models.linear import hold_out  # noqa: E402
from cloister.models.scgpt import Config, ScGPT  # noqa: E402

LABELS = ("a", "b", "c")


def blobs(n=90, d=6, seed=0):
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 3, n)
    x = np.random.default_rng(1).normal(0, 2, (3, d))[y] + rng.normal(0, 1, (n, d))
    return x.astype(np.float32), y


def learner(recipe=None, blueprint=None, site="basel", validation=(), n=90):
    x, y = blobs(n)
    blueprint = blueprint or Blueprint("mlp", 6, hidden=(16,), dropout=0.2)
    return Learner(
        make(blueprint, LABELS),
        3,
        recipe or Recipe(epochs=2, batch_size=16),
        Table(torch.from_numpy(x)),
        y,
        validation,
        describe=blueprint.describe(LABELS),
        site=site,
    )


def zeros(one):
    return np.zeros(one.size, np.float32)


def test_learns_and_repeats():
    one, two = learner(validation=np.arange(10)), learner(validation=np.arange(10))
    theta, losses = zeros(one), []
    for t in range(6):
        delta, loss = one.train(theta, t, 3e-2)
        losses.append(loss)
        again, same = two.train(theta, t, 3e-2)
        np.testing.assert_array_equal(delta, again)
        assert loss == same
        theta = (theta + delta).astype(np.float32)
    counts, loss = one.score(theta)
    assert counts.sum() == 10
    assert np.trace(counts) >= 6
    assert losses[-1] < losses[0] / 2
    assert one.cells == 80


def test_rounds_and_sites_have_their_own_order_and_dropout():
    one, other = learner(), learner(site="lugano")
    first = one.train(zeros(one), 0, 1e-2)[0]
    assert not np.array_equal(first, one.train(zeros(one), 1, 1e-2)[0])
    assert not np.array_equal(first, other.train(zeros(one), 0, 1e-2)[0])


def test_the_digest_tells_architectures_and_weights_apart():
    base = learner().digest
    assert learner(site="lugano").digest == base
    assert learner(blueprint=Blueprint("mlp", 6, hidden=(17,), dropout=0.2)).digest != base
    assert learner(blueprint=Blueprint("mlp", 6, hidden=(16,), dropout=0.2, seed=1)).digest != base


def test_fedprox_pulls_back():
    deltas = []
    for mu in (0.0, 1.0, 100.0):
        one = learner(Recipe(epochs=3, batch_size=16, optimizer="sgd", momentum=0.0, mu=mu))
        deltas.append(np.linalg.norm(one.train(zeros(one), 0, 5e-3)[0]))
    assert deltas[0] > deltas[1] > 5 * deltas[2]


def test_fedprox_gradient_by_hand():
    """One full-batch step from the anchor sees no pull; the second sees mu times the distance."""
    plain = learner(Recipe(epochs=2, batch_size=90, optimizer="sgd", momentum=0.0), Blueprint("mlp", 6, dropout=0.0))
    prox = learner(
        Recipe(epochs=2, batch_size=90, optimizer="sgd", momentum=0.0, mu=2.0), Blueprint("mlp", 6, dropout=0.0)
    )
    once = learner(Recipe(epochs=1, batch_size=90, optimizer="sgd", momentum=0.0), Blueprint("mlp", 6, dropout=0.0))
    rate = 1e-2
    a, b, first = (o.train(zeros(o), 0, rate)[0] for o in (plain, prox, once))
    np.testing.assert_allclose(a - b, rate * 2.0 * first, atol=1e-6)


def scaffold(sites, rounds, rate, recipe):
    """Rounds over two sites that know two labels each; the last weights, and the learners."""
    x, y = blobs(240)
    blueprint, learners = Blueprint("mlp", 6, hidden=(), dropout=0.0), []
    for kinds in sites:
        at = np.isin(y, kinds)
        learners.append(
            Learner(
                make(blueprint, LABELS),
                3,
                recipe,
                Table(torch.from_numpy(x[at])),
                y[at],
                (),
                describe="",
                site=str(kinds),
            )
        )
    theta = np.zeros(learners[0].size)
    for t in range(rounds):
        theta = theta + np.mean([one.train(theta.astype(np.float32), t, rate)[0] for one in learners], axis=0)
    return theta, learners


def test_scaffold_finds_the_common_optimum_where_averaging_drifts():
    whole = {"batch_size": 1000, "optimizer": "sgd", "momentum": 0.0, "weight_decay": 0.1}
    apart = [(0, 1), (2,)]
    wanted, _ = scaffold(apart, 250, 0.3, Recipe(epochs=1, **whole))  # one step a round does not drift
    drifted, _ = scaffold(apart, 25, 0.3, Recipe(epochs=10, **whole))
    found, learners = scaffold(apart, 25, 0.3, Recipe(epochs=10, controls=1.0, **whole))
    weights = len(wanted)
    assert len(found) == 2 * weights
    np.testing.assert_allclose(found[weights:], np.mean([one.control.numpy() for one in learners], axis=0), atol=1e-5)
    assert np.linalg.norm(found[:weights] - wanted) < 0.1 * np.linalg.norm(drifted - wanted)


def test_scaffold_with_one_site_is_plain_descent():
    plain = {"batch_size": 16, "optimizer": "sgd", "momentum": 0.0, "epochs": 2}
    one, _ = scaffold([(0, 1, 2)], 4, 0.05, Recipe(**plain))
    two, _ = scaffold([(0, 1, 2)], 4, 0.05, Recipe(controls=1.0, **plain))
    np.testing.assert_allclose(two[: len(one)], one, atol=1e-5)


def test_only_a_share_of_each_label_is_held_out():
    codes = np.array([0] * 20 + [1] * 5 + [2] + [-1] * 7)
    held = hold_out(codes, 0.2, np.random.default_rng(0))
    assert np.bincount(codes[held], minlength=3).tolist() == [4, 1, 0]
    assert hold_out(codes, 0.0, np.random.default_rng(0)).size == 0


def test_cells_without_a_label_do_not_train():
    x, y = blobs()
    blueprint = Blueprint("mlp", 6, hidden=(16,), dropout=0.0)
    codes = y.copy()
    codes[50:] = -1
    changed = x.copy()
    changed[50:] = 1e6
    found = []
    for rows in (x, changed):
        one = Learner(
            make(blueprint, LABELS), 3, Recipe(), Table(torch.from_numpy(rows)), codes, [], describe="", site="s"
        )
        found.append(one.train(zeros(one), 0, 1e-3)[0])
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize(
    ("model", "size"),
    [
        (cnn.Cnn13(cnn.Config(3, 10, width=128)), 3_124_490),  # convolutions, norms and head, counted by hand below
        (vit.Vit(vit.Config(3, 32, 10)), None),
        (mlp.Mlp(mlp.Config(512, 10, (1024, 512))), 512 * 1024 + 1024 + 1024 * 512 + 512 + 5130),
    ],
    ids=["cnn", "vit", "mlp"],
)
def test_shapes(model, size):
    model.eval()
    x = torch.randn(2, 512) if isinstance(model, mlp.Mlp) else torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert model(x).shape == (2, 10)
        assert model.features(x).dim() == 2
    if isinstance(model, cnn.Cnn13):
        convolutions = [m for m in model.modules() if isinstance(m, torch.nn.Conv2d)]
        assert len(convolutions) == 9  # with pooling, dropout-free, and the head: the paper's 13 layers
        size = sum(c.weight.numel() + 2 * c.out_channels for c in convolutions) + 128 * 10 + 10
    if size is not None:
        assert sum(p.numel() for p in model.parameters()) == size


def test_batch_norms_travel_too():
    blueprint = Blueprint("cnn", 1, 16, width=4)
    x = torch.randn(24, 1, 16, 16)
    one = Learner(
        make(blueprint, LABELS), 3, Recipe(batch_size=8), Table(x, flip_and_shift), np.arange(24) % 3, [],
        describe="", site="s",
    )  # fmt: skip
    delta, _ = one.train(zeros(one), 0, 1e-2)
    buffers = sum(b.numel() for b in one.model.buffers() if b.dtype.is_floating_point)
    assert buffers > 0
    assert np.abs(delta[-buffers:]).max() > 1e-3


def test_augmentation_moves_and_mirrors():
    x = torch.arange(2 * 36.0).reshape(2, 1, 6, 6)
    found = flip_and_shift(x, np.random.default_rng(3))
    assert found.shape == x.shape
    assert set(found[0].unique().tolist()) <= set(x[0].unique().tolist())
    moved = [flip_and_shift(x, np.random.default_rng(s)) for s in range(20)]
    assert len({tuple(m[0].flatten().tolist()) for m in moved}) > 5


def test_rotation_turns_about_the_middle_and_fills_the_corners():
    x = torch.zeros(1, 1, 9, 9)
    x[0, 0, 4, :] = 1.0  # a bar through the middle
    still = rotate(x, 0.0, np.random.default_rng(0))
    torch.testing.assert_close(still, x, atol=1e-5, rtol=0)

    class Quarter:
        def uniform(self, low, high, n):
            assert (low, high) == (-90.0, 90.0)
            return np.full(n, 90.0)

    torch.testing.assert_close(rotate(x, 90.0, Quarter()), x.transpose(2, 3), atol=1e-5, rtol=0)
    ones = torch.ones(5, 3, 8, 8)
    torch.testing.assert_close(rotate(ones, 40.0, np.random.default_rng(1)), ones)  # no black corners
    images = torch.rand(6, 1, 12, 12)
    assert not torch.equal(augment_by(10.0)(images, np.random.default_rng(0)), images)
    assert augment_by(0.0) is flip_and_shift


# ---- first weights from a file, and what of a network trains ---------------------------------------------------------


def torchvision_names(model):
    """A file as torchvision would write it: the last layer is called fc."""
    state = {k: v.numpy() for k, v in model.state_dict().items() if v.dtype.is_floating_point}
    return {("fc" + k[4:] if k.startswith("head.") else k): v for k, v in state.items()}


@pytest.mark.parametrize("stem", [3, 7])
def test_a_resnet_begins_with_a_file_in_torchvisions_names(stem, tmp_path):
    blueprint = Blueprint("resnet", 3, 32, width=4, stem=stem, dropout=0.0, seed=1)
    trained = make(blueprint, tuple("abcdefghij"))
    assert {"layer1.0.conv1.weight", "layer2.0.downsample.1.running_var", "bn1.bias"} <= set(trained.state_dict())
    assert sum(isinstance(m, torch.nn.Conv2d) for m in trained.modules()) == 20  # 17 and three on the way past
    with torch.no_grad():
        for b in trained.buffers():
            if b.dtype.is_floating_point:
                b.uniform_(0.5, 1.5)
    np.savez(tmp_path / "w.npz", **torchvision_names(trained))
    torch.save({k: torch.from_numpy(v) for k, v in torchvision_names(trained).items()}, tmp_path / "w.pt")
    x = torch.rand(2, 3, 32, 32) - 0.5
    for name in ("w.npz", "w.pt"):
        made = make(Blueprint("resnet", 3, 32, width=4, stem=stem, dropout=0.0, seed=2), LABELS, None,
                    first_weights(tmp_path / name))  # fmt: skip
        assert made.head.out_features == 3  # another number of labels: a head of its own
        torch.testing.assert_close(made.eval().features(x), trained.eval().features(x))


def test_weights_that_do_not_fit_are_refused_in_words(tmp_path):
    blueprint = Blueprint("resnet", 3, 16, width=4)
    state = torchvision_names(make(blueprint, LABELS))
    cases = {
        "narrow.npz": (lambda s: s.update({"conv1.weight": s["conv1.weight"][:2]}), "'conv1.weight' of"),
        "less.npz": (lambda s: s.pop("bn1.running_mean"), "e.g. 'bn1.running_mean'"),
        "nan.npz": (lambda s: s.update({"fc.bias": np.full(3, np.nan)}), "not numbers"),
        "empty.npz": (lambda s: s.clear(), "no weights"),
    }
    for name, (change, message) in cases.items():
        changed = dict(state)
        change(changed)
        np.savez(tmp_path / name, **changed)
        with pytest.raises(DataError, match=message):
            make(blueprint, LABELS, None, first_weights(tmp_path / name))
    np.savez(tmp_path / "code.npz", x=np.array([print], object))  # would run code when read
    (tmp_path / "code.pt").write_bytes(b"nonsense")
    for name in ("code.npz", "code.pt"):
        with pytest.raises(DataError, match="tensors alone"):
            first_weights(tmp_path / name)
    with pytest.raises(DataError, match="no weight file"):
        first_weights(tmp_path / "nowhere.npz")


def test_the_head_alone_trains_and_the_file_is_whole(tmp_path):
    start = make(Blueprint("cnn", 1, 16, width=4, seed=5), LABELS)
    np.savez(tmp_path / "w.npz", **{k: v.numpy() for k, v in start.state_dict().items() if v.is_floating_point()})
    blueprint = Blueprint("cnn", 1, 16, width=4, tune="head", unit=True)
    x = torch.rand(24, 1, 16, 16)
    one = Learner(
        make(blueprint, LABELS, None, first_weights(tmp_path / "w.npz")), 3, Recipe(batch_size=8), Table(x),
        np.arange(24) % 3, [], describe="", site="s",
    )  # fmt: skip
    buffers = sum(b.numel() for b in one.model.buffers() if b.dtype.is_floating_point)
    assert one.size == 4 * 3 + 3 + buffers
    delta, _ = one.train(zeros(one), 0, 1e-2)
    assert np.abs(delta[:15]).min() > 0
    assert not delta[15:].any()  # running means stay
    np.testing.assert_allclose(np.linalg.norm(one.features(zeros(one)), axis=1), 1, atol=1e-5)
    network = Network.of(one, delta, blueprint, LABELS)
    (tmp_path / "m.npz").write_bytes(network.to_bytes())
    again, _ = Network.load(tmp_path / "m.npz")  # without the file that it began with
    np.testing.assert_array_equal(again.probabilities(Table(x)), network.probabilities(Table(x)))


def test_first_weights_do_not_depend_on_torchs_generator():
    torch.manual_seed(1)
    one = make(Blueprint("vit", 1, 16, width=16), LABELS)
    torch.manual_seed(2)
    two = make(Blueprint("vit", 1, 16, width=16), LABELS)
    for (name, p), q in zip(one.named_parameters(), two.parameters(), strict=True):
        assert torch.equal(p, q), name
    init_weights(two, 9)
    assert not torch.equal(one.qkv.weight if hasattr(one, "qkv") else one.head.weight, two.head.weight)


# ---- pseudo-labels ---------------------------------------------------------------------------------------------------


def semi(n=90, known=30):
    x, y = blobs(n)
    codes = y.copy()
    codes[known:] = -1
    blueprint = Blueprint("mlp", 6, hidden=(16,), dropout=0.0)
    recipe = Recipe(epochs=1, batch_size=8, optimizer="sgd", momentum=0.0)
    made = Learner(
        make(blueprint, LABELS), 3, recipe, Table(torch.from_numpy(x)), codes, np.arange(4),
        describe="", site="s", unlabelled=True,
    )  # fmt: skip
    return made, y


def test_taught_cells_train_beside_labelled_ones():
    one, y = semi()
    assert one.cells == 86
    np.testing.assert_array_equal(one.points, np.arange(4, 90))
    one.teach(y[one.points], np.where(one.codes[one.points] < 0, 0.5, 1.0))
    batches = list(one.batches(np.random.default_rng(0)))
    assert sum(len(taught) for _, taught in batches) == 60
    assert all(len(own) == len(taught) for own, taught in batches)
    assert all((one.codes[taught] < 0).all() and (one.codes[own] >= 0).all() for own, taught in batches)
    assert not any(np.isin(own, np.arange(4)).any() for own, _ in batches)  # validation stays out


def test_confidence_weighs_and_zero_means_absent():
    one, y = semi()
    base = one.train(zeros(one), 0, 1e-2)[0]
    one.teach(y[one.points], np.zeros(len(one.points)))
    np.testing.assert_array_equal(one.train(zeros(one), 0, 1e-2)[0], base)
    at, rng = np.arange(30, 38), np.random.default_rng(0)
    one.teach(y[one.points], np.full(len(one.points), 0.25))
    quarter = one.loss(at[:0], at, rng).item()
    one.teach(y[one.points], np.ones(len(one.points)))
    assert quarter == pytest.approx(one.loss(at[:0], at, rng).item() / 4, rel=1e-5)


def test_a_learner_can_teach_itself():
    one, y = semi()
    theta = zeros(one)
    for t in range(10):
        theta = (theta + one.train(theta, t, 0.1)[0]).astype(np.float32)
    for source in ("network", "client"):
        one.teach_itself(theta, source, n_neighbors=5, alpha=0.99)
        label, weight = one.pseudo
        assert np.mean(label[30:] == y[30:]) > 0.6
        assert 0 <= weight.min() <= weight.max() <= 1


def test_pseudo_weights_scale_and_balance():
    label, sure = np.array([0, 0, 0, 1, -1, 0]), np.array([0.5, 0.25, 0.1, 0.2, 0.9, 0.3])
    known = np.array([-1, -1, -1, -1, -1, 2])

    def made(*, scale_confidence=False, class_weights=False):
        form = {"scale_confidence": scale_confidence, "class_weights": class_weights}
        return pseudo_weights(label, sure, known, 3, **form)

    np.testing.assert_allclose(made(), [0.5, 0.25, 0.1, 0.2, 0, 0.3])
    np.testing.assert_allclose(made(scale_confidence=True), np.array([0.5, 0.25, 0.1, 0.2, 0, 0.3]) / 0.9)
    rare = made(class_weights=True)  # three cells of class 0, one of 1, one given of 2: 5/9, 5/3, 5/3
    np.testing.assert_allclose(rare, [0.5 * 5 / 9, 0.25 * 5 / 9, 0.1 * 5 / 9, 0.2 * 5 / 3, 0, 0.3 * 5 / 9])
    assert not pseudo_weights(label[:0], sure[:0], known[:0], 3, scale_confidence=True, class_weights=True).size


# ---- scGPT with a head -----------------------------------------------------------------------------------------------

SMALL = Config(width=16, heads=2, hidden=16, layers=3, dropout=0.1, max_length=12)


def scgpt_learner(tune, seed=0):
    model = ScGPT.random([f"G{i}" for i in range(20)], SMALL, seed=4)
    rng = np.random.default_rng(seed)
    y = np.arange(30) % 3
    tokens = []
    for label in y:
        genes = np.r_[model.vocab["<cls>"], label * 6 + rng.choice(6, 5, replace=False)]
        tokens.append((genes.astype(np.int64), np.r_[0.0, rng.integers(1, 50, 5)].astype(np.float32)))
    blueprint = Blueprint("scgpt", 23, tune=tune, last_layers=1, lora_rank=2, checkpoint=model.digest)
    module = make(blueprint, LABELS, model)
    return model, blueprint, Learner(
        module, 3, Recipe(epochs=2, batch_size=10), Tokens(tokens, model), y, [],
        describe=blueprint.describe(LABELS), site="s", global_rng=True,
    )  # fmt: skip


@pytest.mark.parametrize("tune", ["all", "last", "head", pytest.param("lora", marks=pytest.mark.slow)])
def test_what_is_tuned_of_the_encoder(tune, tmp_path):
    if tune == "lora":
        pytest.importorskip("peft", reason="LoRA is an extra")
    model, blueprint, one = scgpt_learner(tune)
    before = {k: v.clone() for k, v in one.model.state_dict().items()}
    theta = zeros(one)
    losses = []
    for t in range(4):
        delta, loss = one.train(theta, t, 1e-2)
        theta = (theta + delta).astype(np.float32)
        losses.append(loss)
    assert losses[-1] < losses[0]
    after = one.model.state_dict()
    moved = {k for k in before if not torch.equal(before[k], after[k])}
    in_encoder = {k for k in moved if k.startswith("encoder.")}
    expected = {
        "all": lambda k: True,
        "last": lambda k: ".layers.2." in k,
        "head": lambda k: False,
        "lora": lambda k: "lora_" in k,
    }[tune]
    assert all(expected(k) for k in in_encoder)
    assert bool(in_encoder) == (tune != "head")
    assert {"head.weight", "neck.0.weight"} <= moved
    _, _, twin = scgpt_learner(tune)
    assert twin.digest == scgpt_learner(tune)[2].digest
    np.testing.assert_array_equal(
        twin.train(zeros(twin), 0, 1e-2)[0], scgpt_learner(tune)[2].train(zeros(one), 0, 1e-2)[0]
    )

    trained = Network.of(one, theta, blueprint, LABELS)
    (tmp_path / "m.npz").write_bytes(trained.to_bytes())
    back, _ = Network.load(tmp_path / "m.npz", model)
    np.testing.assert_allclose(back.probabilities(one.examples), trained.probabilities(one.examples), atol=1e-6)
    assert isinstance(back.module, ScGPTClassifier)
    with pytest.raises(ParameterError, match="another checkpoint"):
        Network.load(tmp_path / "m.npz", ScGPT.random(["A"], SMALL))


@pytest.mark.slow  # peft takes its time to import
def test_lora_at_first_changes_nothing():
    pytest.importorskip("peft", reason="LoRA is an extra")
    _, _, plain = scgpt_learner("head")
    _, _, lora = scgpt_learner("lora")
    np.testing.assert_allclose(plain.logits(zeros(plain)), lora.logits(zeros(lora)), atol=1e-6)
    assert lora.size < sum(p.numel() for p in lora.model.parameters()) / 2


# ---- files -----------------------------------------------------------------------------------------------------------


def test_save_and_load(tmp_path):
    one = learner()
    delta, _ = one.train(zeros(one), 0, 1e-2)
    trained = Network.of(one, delta, Blueprint("mlp", 6, hidden=(16,), dropout=0.2), LABELS)
    (tmp_path / "m.npz").write_bytes(trained.to_bytes())
    back, _ = Network.load(tmp_path / "m.npz")
    x = Table(torch.randn(5, 6))
    np.testing.assert_array_equal(back.probabilities(x), trained.probabilities(x))
    assert back.labels == LABELS
    assert back.digest == trained.digest
    assert back.features(x).shape == (5, 16)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 rubbish", b"hello"])
def test_files_that_are_no_models(tmp_path, content):
    (tmp_path / "m.npz").write_bytes(content)
    with pytest.raises(DataError, match="not a model file"):
        Network.load(tmp_path / "m.npz")
    with pytest.raises(DataError, match="there is no model"):
        Network.load(tmp_path / "other.npz")


def test_weights_that_do_not_fit(tmp_path):
    one = learner()
    trained = Network.of(one, zeros(one), Blueprint("mlp", 6, hidden=(17,), dropout=0.2), LABELS)
    (tmp_path / "m.npz").write_bytes(trained.to_bytes())
    with pytest.raises(DataError, match="do not fit"):
        Network.load(tmp_path / "m.npz")


@pytest.mark.parametrize(
    "bad", [{"epochs": 0}, {"batch_size": 0}, {"optimizer": "lion"}, {"mu": -1.0}, {"momentum": 1.0}]
)
def test_bad_recipes(bad):
    with pytest.raises(ParameterError):
        Recipe(**bad)


@pytest.mark.parametrize(
    "bad",
    [
        lambda: mlp.Config(0, 3),
        lambda: cnn.Config(3, 1),
        lambda: cnn.Config(3, 3, width=5),
        lambda: vit.Config(3, 30, 3, patch=4),
        lambda: make(Blueprint("rnn", 3), LABELS),
    ],
)
def test_bad_networks(bad):
    with pytest.raises(ParameterError):
        bad()
