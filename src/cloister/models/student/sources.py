"""Where teachers come from: a ViT of ours or of another library, an scGPT; and their inputs from images and cells."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cloister.errors import DataError, ParameterError
from cloister.models.student.names import read_state
from cloister.models.student.transformer import Transformer


def patches(images: Any, patch: int) -> Any:
    """(n, c, h, w) → (n, tokens, c·p·p), row by row, as a convolution of that stride sees them."""
    n, c, h, w = images.shape
    if h % patch or w % patch:
        raise ParameterError(f"images of {h} x {w} cannot be cut into patches of {patch}")
    x = images.reshape(n, c, h // patch, patch, w // patch, patch)
    order = (0, 2, 4, 1, 3, 5)
    x = x.permute(*order) if isinstance(x, Tensor) else x.transpose(order)
    return x.reshape(n, (h // patch) * (w // patch), c * patch * patch)


def image_inputs(rows: Any, card: Mapping[str, Any]) -> Any:
    """Images as rows of height x width x channels → (n, tokens - 1, inputs), scaled as the card says."""
    h, w, c, p = (int(card[k]) for k in ("height", "width", "channels", "patch"))
    x = np.asarray(rows, np.float64)
    if x.ndim != 2 or x.shape[1] != h * w * c:
        raise DataError(
            f"the model takes images of {h} x {w} x {c} ({h * w * c} values), found rows of {x.shape[1]} in X; "
            "resize or pad the images"
        )
    x = x / (255.0 if x.size and x.max() > 1.5 else 1.0)
    mean, std = (np.asarray(card[k], np.float64) for k in ("mean", "std"))  # one number, or one per channel
    if any(v.shape not in ((), (1,), (c,)) for v in (mean, std)):
        raise DataError(f"the model's card has {mean.size} means and {std.size} deviations for {c} channel(s)")
    return patches(((x.reshape(-1, h, w, c) - mean) / std).transpose(0, 3, 1, 2), p)


def from_vit(vit: Any, degree: int = 6) -> Transformer:
    """A teacher that computes what a `models.vit.Vit` computes, on patches."""
    return from_state_dict(vit.state_dict(), heads=vit.blocks[0].heads, degree=degree)


@torch.no_grad()
def from_state_dict(
    state: Mapping[str, Any],
    *,
    heads: int | None = None,
    labels: int | None = None,
    eps: float | None = None,
    mean: Any = None,
    std: Any = None,
    degree: int = 6,
) -> Transformer:
    """A teacher that computes what a ViT of timm, torchvision or Hugging Face computes, from its tensors.

    It is exact: softmax, GELU, LayerNorm and division are the library's own functions. Its student has polynomials in
    their place, and is near it only after distillation.

    Parameters
    ----------
    state
        Tensors or arrays by name, as `model.state_dict()` gives them or `read_checkpoint(path).state`.
    heads
        Which tensors do not say; by default as in the published models of that width.
    labels
        Outputs of the head. A head of another size, or none, is replaced by one of zeros, which `tune_teacher` trains.
    eps
        What LayerNorm adds to a variance; by default the library's own. The circuit adds nothing.
    mean, std
        Of the images, one number or one per channel, for the card; by default what the library's models use: ImageNet's
        for torchvision, 0.5 and 0.5 for the others.
    """
    source = read_state(state)
    labels = labels or source.labels
    if not labels:
        raise ParameterError("the checkpoint has no head; say with labels= how many outputs it shall have")
    t, d = source.tensors, source.width
    teacher = Transformer(
        source.side**2 + 1, t["patches.weight"][0].numel(), d, source.heads(heads), source.hidden, source.depth, labels,
        "pre", "gelu", degree, source.scheme.eps if eps is None else eps,
    )  # fmt: skip
    teacher.card = source.card(mean, std)
    positions = t["positions"].clone()
    positions[0] += t["token"]
    positions[1:] += t["patches.bias"]
    own = {f"final.{name[5:]}" if name.startswith("norm.") else name: v for name, v in t.items()}
    own |= {"embed.weight": t["patches.weight"].flatten(1), "positions": positions}
    if source.labels != labels:
        own |= {"head.weight": torch.zeros(labels, d), "head.bias": torch.zeros(labels)}
    kept = teacher.state_dict()
    teacher.load_state_dict({name: own[name] for name in kept})
    return teacher


@torch.no_grad()
def from_scgpt(model: Any, genes: list[str], values: Any, labels: int, degree: int = 6) -> Transformer:
    """A teacher from an scGPT-compatible encoder on a fixed gene panel: a token is a gene, its inputs are (v, v²).

    The value encoder is replaced by the quadratic that fits it best on `values` (as they occur in the auxiliary cells).
    """
    missing = [g for g in genes if g not in model.vocab]
    if missing:
        raise ParameterError(f"the encoder does not know {len(missing)} gene(s) of the panel, e.g. '{missing[0]}'")
    config, encoder = model.config, model.encoder.eval()
    student = Transformer(
        len(genes) + 1, 2, config.width, config.heads, config.hidden, config.layers, labels, "post", "relu", degree
    )
    v = torch.as_tensor(np.asarray(values), dtype=torch.float32).flatten()
    design = torch.stack([torch.ones_like(v), v, v * v], 1)
    fit = torch.linalg.lstsq(design, encoder.value_encoder(v)).solution  # (3, d)
    student.embed.weight.copy_(fit[1:].T)
    ids = torch.tensor([model.vocab["<cls>"], *(model.vocab[g] for g in genes)])
    p = encoder.encoder(ids[None])[0].clone()
    p[0] += encoder.value_encoder(torch.zeros(1, 1))[0, 0]
    p[1:] += fit[0]
    student.positions.copy_(p)
    own: Any
    for own, source in zip(student.blocks, encoder.transformer_encoder.layers, strict=True):
        own.qkv.weight.copy_(source.self_attn.in_proj_weight)
        own.qkv.bias.copy_(source.self_attn.in_proj_bias)
        pairs = ((own.out, source.self_attn.out_proj), (own.up, source.linear1), (own.down, source.linear2))
        for a, b in (*pairs, (own.norm1, source.norm1), (own.norm2, source.norm2)):
            a.load_state_dict(b.state_dict())
    return student


def cell_inputs(values: Any, per_token: int = 1) -> Any:
    """Expression of the panel (cells, genes) → (cells, tokens, 2·genes of a token): values with their squares."""
    v = np.asarray(values, np.float64)
    if per_token < 1 or v.shape[1] % per_token:
        raise ParameterError(f"a panel of {v.shape[1]} genes cannot be cut into tokens of {per_token}")
    return np.stack([v, v * v], axis=-1).reshape(len(v), v.shape[1] // per_token, 2 * per_token)
