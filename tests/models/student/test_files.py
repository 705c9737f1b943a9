"""Checkpoints from files: what they hold is read back, and nothing in them is ever run."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from cloister.errors import DataError, ParameterError
from cloister.models import student

VECTORS = Path(__file__).parents[2] / "vectors"


def state():
    with np.load(VECTORS / "vit_transformers4.npz") as kept:
        return {k.removeprefix("state:"): torch.from_numpy(kept[k]) for k in kept.files if k.startswith("state:")}


def safetensors(tensors):
    """A file of that format, written by its description."""
    kinds = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for name, t in tensors.items():
        raw = t.contiguous().view(torch.uint8).numpy().tobytes()
        header[name] = {
            "dtype": kinds[t.dtype],
            "shape": list(t.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def write(kind, path, tensors):
    if kind == "npz":
        np.savez(path, **{k: v.numpy() for k, v in tensors.items()})
    elif kind == "safetensors":
        path.write_bytes(safetensors(tensors))
    else:
        torch.save(tensors, path)


@pytest.mark.parametrize("kind", ["npz", "safetensors", "pt", "bin"])
def test_tensors_come_back(kind, tmp_path):
    wanted = state()
    write(kind, tmp_path / f"model.{kind}", wanted)
    found = student.read_checkpoint(tmp_path / f"model.{kind}").state
    assert list(found) == list(wanted)
    for name, t in wanted.items():
        np.testing.assert_array_equal(np.asarray(found[name]), t)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_read(dtype, tmp_path):
    wanted = {k: v.to(dtype) for k, v in state().items()}
    write("safetensors", tmp_path / "model.safetensors", wanted)
    found = student.read_checkpoint(tmp_path / "model.safetensors").state
    assert all(torch.equal(found[k], v) for k, v in wanted.items())


def test_a_folder_of_the_hub_brings_its_settings(tmp_path):
    write("safetensors", tmp_path / "model.safetensors", state())
    config = {"num_attention_heads": 2, "layer_norm_eps": 1e-12, "hidden_act": "gelu",
              "id2label": {"10": "z", "0": "cat", "2": "owl"}}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"image_mean": [0.1] * 3, "image_std": [0.2] * 3}))
    found = student.read_checkpoint(tmp_path)
    assert (found.heads, found.eps, found.classes) == (2, 1e-12, ("cat", "owl", "z"))
    assert (found.mean, found.std) == ([0.1] * 3, [0.2] * 3)
    (tmp_path / "preprocessor_config.json").unlink()
    timm = {"pretrained_cfg": {"mean": [0.3] * 3, "std": [0.4] * 3}, "label_names": ["a", "b"]}
    (tmp_path / "config.json").write_text(json.dumps(timm))
    found = student.read_checkpoint(tmp_path / "model.safetensors")
    assert (found.mean, found.std, found.classes, found.heads) == ([0.3] * 3, [0.4] * 3, ("a", "b"), None)
    (tmp_path / "config.json").write_text(json.dumps({"hidden_act": "quick_gelu"}))
    with pytest.raises(ParameterError, match="activation is 'quick_gelu'; only GELU"):
        student.read_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(DataError, match="is not JSON"):
        student.read_checkpoint(tmp_path)


def test_a_file_of_code_is_not_run(tmp_path):
    """An attacker's checkpoint: unpickled freely, it would write a file; here it is refused, and nothing is written."""
    import pickle

    class Evil:
        def __reduce__(self):
            return Path.touch, (tmp_path / "ran",)

    (tmp_path / "model.pt").write_bytes(pickle.dumps({"weight": Evil()}))
    with pytest.raises(DataError, match="holds more than tensors"):
        student.read_checkpoint(tmp_path / "model.pt")
    assert not (tmp_path / "ran").exists()
    pickle.loads((tmp_path / "model.pt").read_bytes())  # noqa: S301  the attack does what it should
    assert (tmp_path / "ran").exists()
    np.savez(tmp_path / "model.npz", weight=np.array([Evil()], dtype=object))
    with pytest.raises(DataError, match="holds more than tensors"):
        student.read_checkpoint(tmp_path / "model.npz")


def test_files_that_are_damaged_or_missing_are_refused_in_a_sentence(tmp_path):
    whole = safetensors(state())
    length = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + length])
    name = next(k for k in header if k != "__metadata__")
    header[name]["shape"] = [10**6]
    text = json.dumps(header).encode()
    cases = {
        "cut short or damaged": whole[:-5],
        "its header would have": b"\xff" * 20,
        "lies outside": len(text).to_bytes(8, "little") + text + whole[8 + length :],
        "cannot be read as a checkpoint": whole[:20],
    }
    for words, content in cases.items():
        (tmp_path / "model.safetensors").write_bytes(content)
        with pytest.raises(DataError, match=words):
            student.read_checkpoint(tmp_path / "model.safetensors")
    for path, words in ((tmp_path / "none.pt", "there is no checkpoint"), (VECTORS / "limma.json", "must be .npz")):
        with pytest.raises(DataError, match=words):
            student.read_checkpoint(path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="has none of model.safetensors"):
        student.read_checkpoint(tmp_path / "empty")
