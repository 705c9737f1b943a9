"""An exported encoder as a network that can be trained again: `student.export` backwards."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from cloister.models import polynomial, student


@torch.no_grad()
def unfold(encoder: polynomial.Encoder, labels: int) -> student.Transformer:
    """The student that computes what the encoder computes, division and roots exactly, with a new head of zeros."""
    s = encoder.shape
    made = student.Transformer(
        s.tokens, s.inputs, s.width, s.heads, s.hidden, s.depth, labels, s.norm, "gelu", s.exp_degree
    ).attend_by(s.attention)
    made.exact = False
    _set(made.embed.weight, encoder.embed)
    _set(made.positions, encoder.positions)
    for module, folded in zip(made.blocks, encoder.blocks, strict=True):
        _unfold_block(module, folded, math.sqrt(s.head_width))
    torch.nn.init.zeros_(made.head.weight)  # the same at every owner
    torch.nn.init.zeros_(made.head.bias)
    return made


def _unfold_block(own: Any, folded: polynomial.Block, root: float) -> None:
    d = folded.qkv.shape[1]
    by = np.where(np.arange(3 * d) < d, root, 1.0)  # queries were divided by it
    a, e, c = own.quadratic
    down = folded.down / a
    _set(own.qkv.weight, folded.qkv * by[:, None])
    _set(own.qkv.bias, folded.qkv_bias * by)
    _set(own.out.weight, folded.out)
    _set(own.out.bias, folded.out_bias)
    _set(own.up.weight, folded.up)
    _set(own.up.bias, folded.up_bias - e / (2 * a))
    _set(own.down.weight, down)
    _set(own.down.bias, folded.down_bias - down.sum(axis=1) * (c - e * e / (4 * a)))
    if len(folded.offset):
        _set(own.offset, folded.offset)
    if len(folded.gain1):  # in pre-norm blocks they went into the weights
        for module, gain, shift in (
            (own.norm1, folded.gain1, folded.shift1),
            (own.norm2, folded.gain2, folded.shift2),
        ):
            _set(module.weight, gain)
            _set(module.bias, shift)


def _set(parameter: Any, value: Any) -> None:
    parameter.copy_(torch.as_tensor(np.asarray(value), dtype=parameter.dtype))
