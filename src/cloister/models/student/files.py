"""A checkpoint from a file or a folder: `.npz`, `.safetensors`, or PyTorch's own; nothing is ever unpickled.

A folder is one as Hugging Face's hub has it: weights, and beside them `config.json` (heads, eps, activation, names of
classes) and `preprocessor_config.json` (mean and deviation). Both are read where they lie beside a file, too.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from cloister import files
from cloister.errors import DataError, ParameterError

WEIGHTS = ("model.safetensors", "pytorch_model.bin", "model.npz")
TORCH = (".pt", ".pth", ".bin", ".ckpt")
TYPES: dict[str, Any] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
MOST_HEADER = 1 << 26


@dataclass
class Checkpoint:
    """Tensors, and what the files beside them say."""

    state: dict[str, Any]
    heads: int | None = None
    eps: float | None = None
    mean: Any = None
    std: Any = None
    classes: tuple[str, ...] = field(default=())  # in the order of the head's outputs


def read_checkpoint(path: str | Path) -> Checkpoint:
    """Read weights and settings; raises `DataError` in one sentence about a file that is no checkpoint."""
    path = Path(path)
    if path.is_dir():
        found = [path / name for name in WEIGHTS if (path / name).exists()]
        if not found:
            raise DataError(f"the folder {path} has none of {', '.join(WEIGHTS)}; name the file of the weights")
        path = found[0]
    if not path.is_file():
        raise DataError(f"there is no checkpoint at {path}")
    try:
        state = _state(path)
    except DataError:
        raise
    except Exception as e:  # every way in which a file can be wrong
        raise DataError(
            f"{path} cannot be read as a checkpoint ({type(e).__name__}); it is damaged, or holds more than tensors"
        ) from None
    return _with_settings(Checkpoint(state), path.parent)


def _state(path: Path) -> dict[str, Any]:
    kind = path.suffix.lower()
    if kind == ".npz":
        with files.load_arrays(path) as kept:
            return {name: kept[name] for name in kept.files}
    if kind == ".safetensors":
        return _safetensors(path)
    if kind in TORCH:
        return dict(torch.load(path, map_location="cpu", weights_only=True))
    raise DataError(f"{path} must be .npz, .safetensors, {', '.join(TORCH)}, or a folder with one of them")


def _safetensors(path: Path) -> dict[str, Any]:
    """Eight bytes with the length of a header in JSON, which says name, type, shape and place of every tensor."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= MOST_HEADER:
            raise DataError(f"{path} is no .safetensors file: its header would have {length} bytes")
        header, data = json.loads(file.read(length)), bytearray(file.read())
    out = {}
    for name, told in header.items():
        if name == "__metadata__":
            continue
        start, end = told["data_offsets"]
        dtype, shape = TYPES[told["dtype"]], tuple(told["shape"])
        if not 0 <= start <= end <= len(data) or end - start != math.prod(shape) * dtype.itemsize:
            raise DataError(f"{path} is cut short or damaged: '{name}' lies outside of it")
        flat = torch.frombuffer(data, dtype=dtype, count=math.prod(shape), offset=start) if end > start else None
        out[name] = torch.zeros(shape, dtype=dtype) if flat is None else flat.reshape(shape)
    return out


def _with_settings(found: Checkpoint, folder: Path) -> Checkpoint:
    config, images = (_settings(folder / name) for name in ("config.json", "preprocessor_config.json"))
    activation = config.get("hidden_act", "gelu")
    if activation != "gelu":
        raise ParameterError(f"the model's activation is '{activation}'; only GELU has a quadratic in its place")
    found.heads, found.eps = config.get("num_attention_heads"), config.get("layer_norm_eps")
    classes = config.get("id2label")
    if isinstance(classes, dict):
        found.classes = tuple(str(classes[k]) for k in sorted(classes, key=int))
    pretrained = config.get("pretrained_cfg", {})  # timm's
    found.mean = images.get("image_mean", pretrained.get("mean"))
    found.std = images.get("image_std", pretrained.get("std"))
    if "label_names" in config:
        found.classes = tuple(map(str, config["label_names"]))
    return found


def _settings(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        raise DataError(f"{path} is not JSON; copy it again, or move it away and name the settings") from None
    return raw if isinstance(raw, dict) else {}
