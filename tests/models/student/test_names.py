"""Teachers from checkpoints of other libraries: stored models with random weights, and what they computed there."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from cloister.errors import DataError, ParameterError
from cloister.models import student
from cloister.models.student.names import IMAGENET, read_state

VECTORS = Path(__file__).parents[2] / "vectors"
WHOLE = ("timm", "timm_scaled", "torchvision", "transformers4", "transformers5")


def stored(name):
    with np.load(VECTORS / f"vit_{name}.npz", allow_pickle=False) as kept:
        state = {k.removeprefix("state:"): kept[k] for k in kept.files if k.startswith("state:")}
        return state, torch.from_numpy(kept["images"]), kept["out"], json.loads(kept["meta"].tobytes())


@pytest.mark.parametrize("name", WHOLE)
def test_a_teacher_computes_what_the_library_computes(name):
    state, images, wanted, told = stored(name)
    teacher = student.from_state_dict(state, heads=told["sizes"]["heads"]).eval()
    found = teacher(student.patches(images, told["sizes"]["patch"])).detach().numpy()
    np.testing.assert_allclose(found, wanted, atol=2e-5)


@pytest.mark.parametrize("name", WHOLE)
def test_sizes_are_read_from_the_tensors(name):
    state, images, _, told = stored(name)
    source, sizes = read_state(state), told["sizes"]
    assert source.scheme.name.replace(" ", "") == told["library"]
    assert (source.width, source.hidden, source.depth) == (sizes["width"], sizes["hidden"], sizes["depth"])
    assert (source.patch, source.labels, source.channels) == (sizes["patch"], sizes["labels"], images.shape[1])
    assert source.side * source.patch == sizes["side"]


@pytest.mark.parametrize("name", WHOLE)
def test_every_tensor_matters(name):
    """A tensor that came to no place, or to a wrong one, would leave the output as it was."""
    state, images, _, _ = stored(name)
    x = student.patches(images, 4)
    before = student.from_state_dict(state, heads=2)(x).detach()
    for key, value in state.items():
        other = student.from_state_dict({**state, key: value + 0.2 * np.random.default_rng(0).normal(size=value.shape)},
                                        heads=2)  # fmt: skip
        moved = float((other(x).detach() - before).abs().max())
        assert moved > 1e-4 or key.endswith(("k_proj.bias", "key.bias")), key  # softmax does not see a bias of keys


@pytest.mark.parametrize("name", ["transformers4", "transformers5"])
def test_a_body_without_a_head_gets_a_new_one(name):
    state, images, tokens, _ = stored(f"{name}_body")
    with pytest.raises(ParameterError, match="has no head; say with labels="):
        student.from_state_dict(state, heads=2)
    teacher = student.from_state_dict(state, heads=2, labels=5)
    x = student.patches(images, 4)
    assert teacher(x).detach().abs().max() == 0
    found = teacher.final(teacher.trace(x).hidden[-1]).detach()
    np.testing.assert_allclose(found, tokens, atol=2e-5)


def test_another_number_of_labels_replaces_the_head():
    state, images, _, _ = stored("timm")
    assert student.from_state_dict(state, heads=2, labels=7)(student.patches(images, 4)).shape == (4, 7)


def test_files_of_torchvisions_first_models_name_their_layers_otherwise():
    state, images, wanted, _ = stored("torchvision")
    older = {k.replace("mlp.0.", "mlp.linear_1.").replace("mlp.3.", "mlp.linear_2."): v for k, v in state.items()}
    assert set(older) != set(state)
    found = student.from_state_dict(older, heads=2)(student.patches(images, 4)).detach()
    np.testing.assert_allclose(found, wanted, atol=2e-5)


def test_what_training_scripts_put_around_a_state_dict_is_taken_off():
    state, images, wanted, _ = stored("timm")
    around = {"model": {f"module.{k}": torch.from_numpy(v).half() for k, v in state.items()}, "epoch": 3}
    found = student.from_state_dict(around, heads=2)(student.patches(images, 4)).detach()
    np.testing.assert_allclose(found, wanted, atol=2e-2)  # half precision


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("timm_averaged", "tokens that are averaged or pooled"),
        ("timm_registers", "register tokens"),
        ("timm_normed", "queries and keys that are normalised"),
    ],
)
def test_what_the_circuit_cannot_express_is_refused_by_name(name, words):
    with pytest.raises(ParameterError, match=words):
        student.from_state_dict(stored(name)[0], heads=2)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: s.pop("blocks.1.mlp.fc2.bias"), r"has no 'blocks\.1\.down\.bias'; it is incomplete"),
        (lambda s: s.pop("pos_embed"), "no blocks or no positions"),
        (lambda s: s.pop("cls_token"), "no class token"),
        (lambda s: s.update({"blocks.0.gate.weight": np.ones(8)}), "a tensor that a plain ViT has not: 'blocks.0.gate"),
        (lambda s: s.update({"norm.weight": np.ones(9)}), r"must be of shape \(8,\), found \(9,\)"),
        (lambda s: s.update({"head.bias": np.array([1.0, np.nan, 0.0])}), "infinite or missing"),
        (lambda s: s.update({"pos_embed": np.ones((1, 7, 8))}), "6 patches make no square"),
        (lambda s: s.update({"patch_embed.proj.weight": np.ones((8, 3, 4, 2))}), "patches must be square"),
        (lambda s: s.pop("patch_embed.proj.weight"), "no ViT of timm, torchvision"),
        (lambda s: s.clear(), "begins with nothing"),
    ],
)
def test_a_checkpoint_that_is_wrong_is_refused_in_a_sentence(change, words):
    state = stored("timm")[0]
    change(state)
    with pytest.raises((ParameterError, DataError), match=words):
        student.from_state_dict(state, heads=2)


def test_the_number_of_heads_is_taken_from_published_sizes_or_asked_for():
    state = stored("timm")[0]
    with pytest.raises(ParameterError, match="do not say how many heads a model of width 8 has; name heads="):
        student.from_state_dict(state)
    with pytest.raises(ParameterError, match="multiple of the number of heads 3"):
        student.from_state_dict(state, heads=3)
    from cloister.models import vit

    tiny = vit.Vit(vit.Config(3, 8, 2, patch=4, width=192, depth=1, heads=3))
    assert student.from_state_dict(tiny.state_dict()).blocks[0].heads == 3


def test_the_eps_of_the_library_is_kept():
    for name, eps in (("timm", 1e-6), ("torchvision", 1e-6), ("transformers4", 1e-12), ("transformers5", 1e-12)):
        assert student.from_state_dict(stored(name)[0], heads=2).blocks[1].norm2.eps == eps
    state, images, wanted, _ = stored("timm")
    other = student.from_state_dict(state, heads=2, eps=0.5)(student.patches(images, 4)).detach()
    assert np.abs(other.numpy() - wanted).max() > 1e-2


def test_a_card_says_size_mean_and_deviation_per_channel():
    state = stored("torchvision")[0]
    card = student.from_state_dict(state, heads=2).card
    assert card == {"kind": "images", "height": 8, "width": 8, "channels": 3, "patch": 4, "mean": list(IMAGENET[0]),
                    "std": list(IMAGENET[1])}  # fmt: skip
    card = student.from_state_dict(stored("timm")[0], heads=2).card
    assert (card["mean"], card["std"]) == (0.5, 0.5)
    card = student.from_state_dict(state, heads=2, mean=[0.1, 0.2, 0.3], std=2).card
    assert (card["mean"], card["std"]) == ([0.1, 0.2, 0.3], 2.0)
    for given, words in ({"mean": [1, 2]}, "one per channel"), ({"std": [1, 0, 1]}, "must be above 0"):
        with pytest.raises(ParameterError, match=words):
            student.from_state_dict(state, heads=2, **given)


def test_images_are_scaled_channel_by_channel():
    card = {"kind": "images", "height": 2, "width": 2, "channels": 3, "patch": 1, "mean": [0.1, 0.2, 0.3],
            "std": [1.0, 2.0, 4.0]}  # fmt: skip
    rows = np.random.default_rng(0).uniform(0, 1, (5, 12))
    found = student.image_inputs(rows, card)
    np.testing.assert_allclose(found, ((rows.reshape(5, 4, 3) - card["mean"]) / card["std"]))
    np.testing.assert_allclose(student.image_inputs(np.rint(rows * 255), card), found, atol=1 / 255)
    one = student.image_inputs(rows, card | {"mean": 0.5, "std": 0.5})
    np.testing.assert_allclose(one, (rows.reshape(5, 4, 3) - 0.5) / 0.5)
    with pytest.raises(DataError, match="2 means and 3 deviations for 3 channel"):
        student.image_inputs(rows, card | {"mean": [0.1, 0.2]})
    with pytest.raises(DataError, match="resize or pad the images"):
        student.image_inputs(rows[:, 1:], card)
