"""Tensors of a ViT as other libraries name them, under one set of names: those of `models.vit.Vit`.

    timm             blocks.0.attn.qkv.weight                                           layer scale goes into weights
    torchvision      encoder.layers.encoder_layer_0.self_attention.in_proj_weight       files of the first models, too
    transformers 4   vit.encoder.layer.0.attention.attention.query.weight               with and without `vit.`
    transformers 5   vit.layers.0.attention.q_proj.weight
    cloister         blocks.0.qkv.weight

Patch, width, depth, hidden units, labels and the number of patches are read from the tensors. The number of heads and
what is added to a variance (eps) are not in them. What the circuit of sums and products has no place for is refused by
its name: a tensor that were left out would give a teacher that computes something else.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from cloister.errors import DataError, ParameterError

HEADS = {192: 3, 384: 6, 768: 12, 1024: 16, 1280: 16}  # of the published sizes: Tiny, Small, Base, Large, Huge
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))  # mean and deviation of the channels
HALF = ((0.5,), (0.5,))
HUGGING_FACE = {
    "embeddings.cls_token": "token",
    "embeddings.position_embeddings": "positions",
    "embeddings.patch_embeddings.projection": "patches",
    "layernorm": "norm",
    "classifier": "head",
}
NORMS = {"layernorm_before": "norm1", "layernorm_after": "norm2"}


@dataclass(frozen=True)
class Scheme:
    """How one library names what a ViT is made of."""

    name: str
    block: str  # what the names within block i begin with, as a pattern
    within: Mapping[str, str]
    outside: Mapping[str, str]
    eps: float
    scaling: tuple[tuple[float, ...], tuple[float, ...]] = HALF  # mean and deviation that its models were trained with
    unused: str = "(?!)"  # tensors that its classifier does not use, as a pattern


SCHEMES = (
    Scheme(
        "timm",
        r"blocks\.(\d+)\.",
        {"norm1": "norm1", "attn.qkv": "qkv", "attn.proj": "out", "norm2": "norm2", "mlp.fc1": "up", "mlp.fc2": "down",
         "ls1.gamma": "scale1", "ls2.gamma": "scale2"},
        {"patch_embed.proj": "patches", "cls_token": "token", "pos_embed": "positions", "norm": "norm", "head": "head"},
        1e-6,
    ),
    Scheme(
        "torchvision",
        r"encoder\.layers\.encoder_layer_(\d+)\.",
        {"ln_1": "norm1", "self_attention.in_proj_weight": "qkv.weight", "self_attention.in_proj_bias": "qkv.bias",
         "self_attention.out_proj": "out", "ln_2": "norm2", "mlp.0": "up", "mlp.3": "down", "mlp.linear_1": "up",
         "mlp.linear_2": "down"},
        {"conv_proj": "patches", "class_token": "token", "encoder.pos_embedding": "positions", "encoder.ln": "norm",
         "heads.head": "head"},
        1e-6,
        IMAGENET,
    ),
    Scheme(
        "transformers 4",
        r"encoder\.layer\.(\d+)\.",
        {**NORMS, "attention.attention.query": "q", "attention.attention.key": "k", "attention.attention.value": "v",
         "attention.output.dense": "out", "intermediate.dense": "up", "output.dense": "down"},
        HUGGING_FACE,
        1e-12,
        unused=r"pooler\.|embeddings\.mask_token",
    ),
    Scheme(
        "transformers 5",
        r"layers\.(\d+)\.",
        {**NORMS, "attention.q_proj": "q", "attention.k_proj": "k", "attention.v_proj": "v", "attention.o_proj": "out",
         "mlp.fc1": "up", "mlp.fc2": "down"},
        HUGGING_FACE,
        1e-12,
        unused=r"pooler\.|embeddings\.mask_token",
    ),
    Scheme(
        "cloister",
        r"blocks\.(\d+)\.",
        {name: name for name in ("norm1", "qkv", "out", "norm2", "up", "down")},
        {name: name for name in ("patches", "token", "positions", "norm", "head")},
        1e-5,
    ),
)  # fmt: skip

REFUSED = {  # what some ViTs have and the circuit does not
    r"reg_token|register_tokens": "register tokens; the circuit has one token beside the patches, the class token",
    r"dist(illation)?_token|head_dist": "a second token for its own distillation; the circuit has one, the class token",
    r"fc_norm|attn_pool": "a head on tokens that are averaged or pooled; taps are read from the class token",
    r"norm_pre|pre_layrnorm|ln_pre": "a LayerNorm before its first block, which the circuit lacks",
    r"[qk]_norm": "queries and keys that are normalised, which the circuit lacks",
    r"rel_pos|relative_position|rope": "positions in its attention; the circuit adds them to the tokens",
}


@dataclass
class Source:
    """A ViT's tensors under our names, float32, and what they say about it."""

    scheme: Scheme
    tensors: dict[str, Tensor]
    depth: int
    side: int = field(init=False)  # patches along a side

    def __post_init__(self) -> None:
        t, d = self.tensors, self.width
        kernel = t["patches.weight"]
        if kernel.ndim != 4 or kernel.shape[2] != kernel.shape[3]:
            raise ParameterError(f"patches must be square, the first layer is of shape {tuple(kernel.shape)}")
        rows = t["positions"].reshape(-1, d)
        t["token"] = t["token"].reshape(-1)
        bare = math.isqrt(len(rows)) ** 2 == len(rows)  # some give the class token no position
        inner = len(rows) if bare else len(rows) - 1
        self.side = math.isqrt(inner)
        if self.side**2 != inner or inner < 1:
            raise ParameterError(f"{inner} patches make no square; only square images are read")
        t["positions"] = rows if len(rows) > inner else torch.cat([rows.new_zeros(1, d), rows])
        for name, wanted in self.shapes().items():
            if name not in t:
                raise ParameterError(f"the checkpoint ({self.scheme.name}) has no '{name}'; it is incomplete")
            if tuple(t[name].shape) != wanted:
                raise ParameterError(
                    f"'{name}' of the checkpoint must be of shape {wanted}, found {tuple(t[name].shape)}"
                )
            if not bool(torch.isfinite(t[name]).all()):
                raise DataError(f"'{name}' of the checkpoint holds values that are infinite or missing")

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Our names with the shapes that they must have; a head is optional."""
        d, f = self.width, self.hidden
        out: dict[str, tuple[int, ...]] = {"token": (d,), "positions": (self.side**2 + 1, d), "patches.bias": (d,)}
        layers = {"norm1": (d,), "qkv": (3 * d, d), "out": (d, d), "norm2": (d,), "up": (f, d), "down": (d, f)}
        named = {f"blocks.{i}.{name}": shape for i in range(self.depth) for name, shape in layers.items()}
        named |= {"norm": (d,)} | ({"head": (self.labels, d)} if self.labels else {})
        for name, shape in named.items():
            out |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
        return out

    @property
    def width(self) -> int:
        return len(self.tensors["patches.weight"])

    @property
    def hidden(self) -> int:
        return len(self.tensors["blocks.0.up.weight"])

    @property
    def channels(self) -> int:
        return self.tensors["patches.weight"].shape[1]

    @property
    def patch(self) -> int:
        return self.tensors["patches.weight"].shape[2]

    @property
    def labels(self) -> int:
        """Outputs of its head; 0 if it has none."""
        return len(self.tensors.get("head.weight", ()))

    def heads(self, given: int | None) -> int:
        heads = given or HEADS.get(self.width)
        if heads is None:
            raise ParameterError(f"tensors do not say how many heads a model of width {self.width} has; name heads=")
        if heads < 1 or self.width % heads:
            raise ParameterError(f"the width {self.width} must be a multiple of the number of heads {heads}")
        return heads

    def card(self, mean: Any, std: Any) -> dict[str, Any]:
        """What its student will say about inputs: size, patch, mean and deviation, one number or one per channel."""
        side = self.side * self.patch
        card = {"kind": "images", "height": side, "width": side, "channels": self.channels, "patch": self.patch}
        own = self.scheme.scaling if len(self.scheme.scaling[0]) in (1, self.channels) else HALF
        for name, given, usual in (("mean", mean, own[0]), ("std", std, own[1])):
            values = [float(v) for v in (usual if given is None else given if hasattr(given, "__len__") else [given])]
            if len(values) not in (1, self.channels) or not all(map(math.isfinite, values)):
                raise ParameterError(f"{name} is one number or one per channel ({self.channels}), found {values}")
            if name == "std" and min(values) <= 0:
                raise ParameterError(f"std must be above 0, found {values}")
            card[name] = values[0] if len(set(values)) == 1 else values
        return card


def read_state(state: Mapping[str, Any]) -> Source:
    """The tensors of a ViT classifier under our names; raises one sentence about what is missing or too much."""
    state = _unwrapped(state)
    scheme = next((s for s in SCHEMES if _is_of(s, state)), None)
    if scheme is None:
        some = ", ".join(list(map(str, state))[:3]) or "nothing"
        raise DataError(f"no ViT of {', '.join(s.name for s in SCHEMES)}: the checkpoint begins with {some}")
    found: dict[str, Tensor] = {}
    depth = 0
    for name, value in state.items():
        ours, block = _renamed(scheme, name)
        if ours is None:
            continue
        found[ours] = torch.as_tensor(value).detach().cpu().float()
        depth = max(depth, block + 1)
    if "token" not in found:
        raise ParameterError("the model has no class token, from which taps are read; bring one that has")
    if not depth or "positions" not in found or "blocks.0.up.weight" not in found:
        raise ParameterError(f"the checkpoint ({scheme.name}) has no blocks or no positions; it is incomplete")
    _join(found, depth)
    return Source(scheme, found, depth)


def _unwrapped(state: Mapping[str, Any]) -> dict[str, Any]:
    """Without what training scripts put around a state dict, and without prefixes that say nothing."""
    for key in ("state_dict", "model", "model_state_dict"):
        if isinstance(state.get(key), Mapping):
            state = state[key]
    plain = {str(k): v for k, v in state.items()}
    for prefix in ("module.", "_orig_mod.", "model."):
        if plain and all(k.startswith(prefix) for k in plain):
            plain = {k.removeprefix(prefix): v for k, v in plain.items()}
    if any(k.startswith(("vit.", "deit.")) for k in plain):
        plain = {k.removeprefix("vit.").removeprefix("deit."): v for k, v in plain.items()}
    return plain


def _is_of(scheme: Scheme, state: Mapping[str, Any]) -> bool:
    kernel = next(name for name, ours in scheme.outside.items() if ours == "patches")
    return f"{kernel}.weight" in state and any(re.match(scheme.block, k) for k in state)


def _renamed(scheme: Scheme, name: str) -> tuple[str | None, int]:
    """Our name of a tensor and the block that it is in (-1: none); no name where it is not used."""
    for pattern, what in REFUSED.items():
        if re.search(pattern, name):
            raise ParameterError(f"the model has {what} ('{name}')")
    if re.match(scheme.unused, name):
        return None, -1
    inside = re.match(scheme.block, name)
    block, rest = (int(inside[1]), name[inside.end() :]) if inside else (-1, name)
    table = scheme.within if inside else scheme.outside
    stem, _, kind = rest.rpartition(".")
    ours = table.get(rest) or (f"{table[stem]}.{kind}" if stem in table and kind in ("weight", "bias") else None)
    if ours is None:
        raise ParameterError(f"the checkpoint ({scheme.name}) has a tensor that a plain ViT has not: '{name}'")
    return f"blocks.{block}.{ours}" if inside else ours, block


def _join(found: dict[str, Tensor], depth: int) -> None:
    """Queries, keys and values as one matrix; a bias that a model does without is zero; layer scale in the weights."""
    for i in range(depth):
        at = f"blocks.{i}."
        for kind in ("weight", "bias"):
            parts = [found.pop(f"{at}{x}.{kind}", None) for x in "qkv"]
            if all(p is not None for p in parts):
                found[f"{at}qkv.{kind}"] = torch.cat([p for p in parts if p is not None])
        qkv = found.get(f"{at}qkv.weight")
        if qkv is not None:
            found.setdefault(f"{at}qkv.bias", qkv.new_zeros(len(qkv)))
        for scale, layer in (("scale1", "out"), ("scale2", "down")):
            gamma = found.pop(f"{at}{scale}", None)
            if gamma is not None:
                found[f"{at}{layer}.weight"] = found[f"{at}{layer}.weight"] * gamma[:, None]
                found[f"{at}{layer}.bias"] = found[f"{at}{layer}.bias"] * gamma
    for name in ("patches", "head"):
        if f"{name}.weight" in found:
            found.setdefault(f"{name}.bias", found[f"{name}.weight"].new_zeros(len(found[f"{name}.weight"])))
