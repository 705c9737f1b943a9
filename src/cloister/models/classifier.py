"""Classifiers that federated training fits: from a description to a network, and from a trained network to a file.

A description is public and small; it names an MLP on embeddings, the 13-layer CNN, a ResNet-18, a ViT, or an
scGPT-compatible encoder with a head, of which all, the last layers, the head alone, or LoRA adapters are trained. All
but scGPT can begin with the weights of a file (`first_weights`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cloister import files
from cloister.errors import DataError, MissingExtra, ParameterError
from cloister.models import cnn, mlp, vit
from cloister.models.learner import Examples, Learner, init_weights
from cloister.models.scgpt import Encoder, ScGPT, pad_batch

try:
    import torch
    from torch import Tensor, nn
except ImportError:
    raise MissingExtra("torch", "models") from None

FORMAT = "cloister-network/2"
ADAPTED = r".*transformer_encoder\.layers\.\d+\.(linear1|linear2|self_attn\.out_proj)"


@dataclass(frozen=True)
class Blueprint:
    """All there is to know about a classifier but its weights and the names of its labels."""

    kind: str  # "mlp" | "cnn" | "resnet" | "vit" | "scgpt"
    inputs: int  # numbers per cell, channels of an image, or tokens of a vocabulary
    side: int = 0  # of an image
    hidden: tuple[int, ...] = (128,)
    width: int = 128
    dropout: float = 0.1
    tune: str = "all"  # or "head"; of scgpt also "last" | "lora"
    last_layers: int = 2
    lora_rank: int = 8
    checkpoint: str = ""  # digest of the encoder, for scgpt
    seed: int = 0
    unit: bool = False  # embeddings of length one before the last layer
    stem: int = 3  # of a ResNet: 3 for small images, 7 for large ones

    def describe(self, labels: tuple[str, ...]) -> str:
        return json.dumps([dataclasses.asdict(self), labels], sort_keys=True)


class ScGPTClassifier(nn.Module):
    """The encoder at <cls>, then two hidden layers as in scGPT's annotation head."""

    def __init__(self, encoder: Encoder, labels: int) -> None:
        super().__init__()
        d = encoder.config.width
        self.encoder = encoder
        self.neck = nn.Sequential(
            nn.Linear(d, d), nn.ReLU(), nn.LayerNorm(d), nn.Linear(d, d), nn.ReLU(), nn.LayerNorm(d)
        )
        self.head = nn.Linear(d, labels)

    def features(self, genes: Tensor, values: Tensor) -> Tensor:
        return self.neck(self.encoder(genes, values))  # (b, d)

    def forward(self, genes: Tensor, values: Tensor) -> Tensor:
        return self.head(self.features(genes, values))  # (b, K)


class Headed(nn.Module):
    """A network whose embeddings have length one before its head (`unit`), or of which only the head trains."""

    def __init__(self, model: nn.Module, *, unit: bool, only_head: bool) -> None:
        super().__init__()
        self.model, self.unit, self.only_head = model, unit, only_head
        for name, p in model.named_parameters():
            p.requires_grad_(not only_head or name.startswith("head."))

    def train(self, mode: bool = True) -> Headed:  # noqa: FBT001, FBT002  as in torch
        super().train(mode)
        if self.only_head:
            self.model.eval()  # running means stay as they were learnt
        return self

    def features(self, *inputs: Tensor) -> Tensor:
        model: Any = self.model
        z: Tensor = model.features(*inputs)
        return nn.functional.normalize(z, dim=-1) if self.unit else z

    def forward(self, *inputs: Tensor) -> Tensor:
        model: Any = self.model
        out: Tensor = model.head(self.features(*inputs))
        return out


@dataclass
class Tokens:
    """Cells as tokens, for the encoder."""

    tokens: list[tuple[Any, Any]]
    model: ScGPT

    def __len__(self) -> int:
        return len(self.tokens)

    def batch(self, at: Any, rng: np.random.Generator | None) -> tuple[Tensor, ...]:
        return pad_batch([self.tokens[i] for i in at], self.model)


def make(
    blueprint: Blueprint,
    labels: tuple[str, ...],
    pretrained: ScGPT | None = None,
    first: Mapping[str, Any] | None = None,
) -> nn.Module:
    """The network with its first weights: the same at every site that has the same description and files."""
    if blueprint.kind == "scgpt":
        if pretrained is None:
            raise ParameterError("this classifier stands on an scGPT checkpoint; pass pretrained= with its folder")
        if pretrained.digest != blueprint.checkpoint:
            raise ParameterError("this classifier stands on another checkpoint; load the one it was trained with")
        return _tuned(blueprint, pretrained, len(labels))
    model = _plain(blueprint, len(labels))
    init_weights(model, blueprint.seed)
    if first is not None:
        begin_with(model, first)
    only_head = blueprint.tune == "head"
    return Headed(model, unit=blueprint.unit, only_head=only_head) if blueprint.unit or only_head else model


def _plain(blueprint: Blueprint, k: int) -> nn.Module:
    if blueprint.kind == "mlp":
        return mlp.Mlp(mlp.Config(blueprint.inputs, k, blueprint.hidden, blueprint.dropout))
    if blueprint.kind == "cnn":
        return cnn.Cnn13(cnn.Config(blueprint.inputs, k, blueprint.width, blueprint.dropout))
    if blueprint.kind == "resnet":
        return cnn.ResNet18(cnn.Config(blueprint.inputs, k, blueprint.width, blueprint.dropout), blueprint.stem)
    if blueprint.kind == "vit":
        return vit.Vit(
            vit.Config(blueprint.inputs, blueprint.side, k, width=blueprint.width, dropout=blueprint.dropout)
        )
    raise ParameterError(f"there is no model '{blueprint.kind}'; use mlp, scgpt, cnn, resnet or vit")


def first_weights(path: str | Path) -> dict[str, Any]:
    """Weights to begin with, by name: of a model file of Cloister, or of a `.npz` or `.pt` file of tensors.

    A ResNet-18 has the names of torchvision, so its files fit; their last layer, `fc`, counts as the head.
    """
    try:
        if Path(path).suffix in (".pt", ".pth"):
            state = torch.load(path, map_location="cpu", weights_only=True)
            arrays = {str(k): v.numpy() for k, v in state.items() if v.dtype.is_floating_point}
        else:
            with files.load_arrays(path) as kept:
                arrays = {k: kept[k] for k in kept.files if kept[k].dtype.kind == "f"}
    except FileNotFoundError:
        raise DataError(f"there is no weight file at {path}") from None
    except DataError:
        raise
    except Exception as e:  # every way in which a file can be wrong
        raise DataError(
            f"{path} is not a file of tensors alone ({type(e).__name__}); pass .npz, .pt or a model"
        ) from None
    named = {k.removeprefix("w:").removeprefix("model."): np.asarray(v, np.float32) for k, v in arrays.items()}
    named = {("head" + k[2:] if k.startswith("fc.") else k): v for k, v in named.items()}
    if not named or any(not np.all(np.isfinite(v)) for v in named.values()):
        raise DataError(f"{path} holds no weights, or some that are not numbers")
    return named


@torch.no_grad()
def begin_with(model: nn.Module, first: Mapping[str, Any]) -> None:
    """Take over the weights of a file: all of the body, and the head where it has as many labels."""
    own = dict(model.named_parameters()) | {n: b for n, b in model.named_buffers() if b.dtype.is_floating_point}
    odd = [n for n in own if not n.startswith("head.") and (n not in first or first[n].shape != tuple(own[n].shape))]
    if odd:
        found = first[odd[0]].shape if odd[0] in first else "none"
        raise DataError(
            f"the weight file does not fit this model: {len(odd)} of {len(own)} parts differ, e.g. '{odd[0]}' of "
            f"{tuple(own[odd[0]].shape)}, found {found}; check model=, width=, hidden= and image_shape="
        )
    head = all(n in first and first[n].shape == tuple(own[n].shape) for n in own if n.startswith("head."))
    for name, target in own.items():
        if head or not name.startswith("head."):
            target.copy_(torch.from_numpy(first[name]))


def _tuned(blueprint: Blueprint, pretrained: ScGPT, labels: int) -> nn.Module:
    encoder = Encoder(len(pretrained.vocab), pretrained.vocab["<pad>"], pretrained.config)
    encoder.load_state_dict(pretrained.encoder.state_dict())
    model = ScGPTClassifier(encoder, labels)
    init_weights(model, blueprint.seed, only=lambda name: name.startswith(("neck.", "head.")))
    last = pretrained.config.layers - blueprint.last_layers

    def trains(name: str) -> bool:
        if not name.startswith("encoder."):
            return True
        layer = re.match(r"encoder\.transformer_encoder\.layers\.(\d+)\.", name)
        return blueprint.tune == "all" or (blueprint.tune == "last" and layer is not None and int(layer[1]) >= last)

    for name, p in model.named_parameters():
        p.requires_grad_(trains(name))
    if blueprint.tune == "lora":
        try:
            from peft import LoraConfig, inject_adapter_in_model
        except ImportError:
            raise MissingExtra("peft", "lora") from None
        r = blueprint.lora_rank
        inject_adapter_in_model(LoraConfig(r=r, lora_alpha=2 * r, target_modules=ADAPTED), model)
        for name, p in model.named_parameters():
            p.requires_grad_("lora_" in name or not name.startswith("encoder."))
        init_weights(model, blueprint.seed, only=lambda name: "lora_A" in name)  # B starts at zero
    return model


@dataclass
class Network:
    """A trained classifier of what its blueprint takes in."""

    blueprint: Blueprint
    labels: tuple[str, ...]
    module: nn.Module

    @classmethod
    def of(cls, learner: Learner, theta: Any, blueprint: Blueprint, labels: tuple[str, ...]) -> Network:
        learner.place(theta)
        return cls(blueprint, labels, learner.model.eval().cpu())

    @torch.no_grad()
    def probabilities(self, examples: Examples, batch_size: int = 256) -> Any:
        """(n, K)."""
        return self._forward(examples, lambda *x: torch.softmax(self.module(*x).float(), dim=1), batch_size)

    @torch.no_grad()
    def features(self, examples: Examples, batch_size: int = 256) -> Any:
        """What the last layer sees, (n, d)."""
        module: Any = self.module
        return self._forward(examples, module.features, batch_size)

    def _forward(self, examples: Examples, run: Callable[..., Tensor], batch_size: int) -> Any:
        self.module.eval()
        parts = []
        for start in range(0, len(examples), batch_size):
            at = np.arange(start, min(start + batch_size, len(examples)))
            parts.append(run(*examples.batch(at, None)).float().numpy())
        return np.concatenate(parts).astype(np.float64)

    @property
    def digest(self) -> str:
        """Of architecture, labels and weights."""
        h = hashlib.sha256(self.blueprint.describe(self.labels).encode())
        for name, weights in self._trained().items():
            h.update(name.encode() + weights.tobytes())
        return h.hexdigest()

    def _trained(self) -> dict[str, Any]:
        kept = self.blueprint.kind != "scgpt"  # whose encoder lies in files of its own
        trained: dict[str, Tensor] = {n: p for n, p in self.module.named_parameters() if kept or p.requires_grad}
        trained |= {n: b for n, b in self.module.named_buffers() if b.dtype.is_floating_point}
        return {n: np.ascontiguousarray(t.detach().cpu().numpy()) for n, t in trained.items()}

    def to_bytes(self, inputs: Mapping[str, Any] | None = None) -> bytes:
        """One `.npz`: description, label names and the weights that were trained; nothing that could run code."""
        meta = {
            "format": FORMAT,
            "blueprint": dataclasses.asdict(self.blueprint),
            "labels": self.labels,
            "inputs": dict(inputs or {}),
            "digest": self.digest,
        }
        arrays = {f"w:{n}": weights for n, weights in self._trained().items()}
        out = io.BytesIO()
        np.savez(out, meta=np.frombuffer(json.dumps(meta).encode(), np.uint8), **arrays)
        return out.getvalue()

    @classmethod
    def load(cls, path: str | Path, pretrained: ScGPT | None = None) -> tuple[Network, dict[str, Any]]:
        """A network, and what its file says about its inputs."""
        try:
            with files.load_arrays(path) as kept:
                arrays = {name: kept[name] for name in kept.files}
            meta = json.loads(arrays.pop("meta").tobytes())
            if meta["format"] != FORMAT:
                raise ValueError
            inputs = dict(meta["inputs"])
            blueprint = Blueprint(**{**meta["blueprint"], "hidden": tuple(meta["blueprint"]["hidden"])})
            labels = tuple(str(x) for x in meta["labels"])
        except FileNotFoundError:
            raise DataError(f"there is no model file at {path}") from None
        except DataError:
            raise
        except Exception as e:  # every way in which a file can be wrong
            raise DataError(f"{path} is not a model file of Cloister ({type(e).__name__})") from None
        module = make(blueprint, labels, pretrained)
        own = dict(module.named_parameters()) | dict(module.named_buffers())
        with torch.no_grad():
            for name, value in arrays.items():
                target = own.get(name.removeprefix("w:"))
                if target is None or tuple(target.shape) != value.shape:
                    raise DataError(f"{path} holds weights that do not fit its description, e.g. '{name[2:]}'")
                target.copy_(torch.from_numpy(value))
        network = cls(blueprint, labels, module.eval())
        if network.digest != meta.get("digest"):
            raise DataError(f"{path} was changed after it was written: its digest does not fit")
        return network, inputs
