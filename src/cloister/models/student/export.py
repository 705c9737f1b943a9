"""From a student to the model that a provider serves: folded, calibrated, and refused outside its intervals."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor

from cloister.errors import ParameterError
from cloister.models import polynomial
from cloister.models.student.transformer import Block, Transformer

MOST_EPS = 0.02  # of the smallest variance that a model may meet: a hundredth of 1/√


def export(
    student: Transformer, inputs: Any, card: dict[str, Any] | None = None, *, taps: tuple[int, ...] = (), rank: int = 8,
    steps: int = 7, root_steps: int = 5,
) -> polynomial.Encoder:  # fmt: skip
    """Fold, calibrate on auxiliary inputs, refuse a student that leaves its intervals, and fix the projections."""
    encoder = calibrated(student, inputs, card, taps=taps, rank=rank, steps=steps, root_steps=root_steps)
    x = np.asarray(inputs, np.float64)
    polynomial.check_ranges(encoder, x)
    return polynomial.fit_projections(encoder, x)


def calibrated(
    student: Transformer, inputs: Any, card: dict[str, Any] | None = None, *, taps: tuple[int, ...] = (), rank: int = 8,
    steps: int = 7, root_steps: int = 5,
) -> polynomial.Encoder:  # fmt: skip
    """The student as sums and products, with units and bounds from auxiliary inputs, wherever its values lie."""
    blocks_of: list[Any] = list(student.blocks)
    first, depth = blocks_of[0], len(blocks_of)
    d = student.embed.out_features
    shape = polynomial.Shape(
        len(student.positions), student.embed.in_features, d, first.heads, first.up.out_features, depth,
        "pre" if student.norm == "pre" else "post", student.degree,
        steps, root_steps, taps or polynomial.default_taps(depth), min(rank, d),
        attention="quadratic" if student.attention == "quadratic" else "taylor",
    )  # fmt: skip

    def array(t: Tensor) -> Any:
        return t.detach().cpu().double().numpy()

    blocks = tuple(_folded(b, array) for b in blocks_of)
    none = np.zeros((len(shape.taps), shape.rank, d)), np.zeros((len(shape.taps), shape.rank))
    card = student.card if card is None else card
    encoder = polynomial.Encoder(shape, array(student.embed.weight), array(student.positions), blocks, *none, card)
    encoder = polynomial.calibrate(encoder, np.asarray(inputs, np.float64), centred=True)
    least = polynomial.ROOT[0] * min(encoder.shape.variances)
    if first.norm1.eps > MOST_EPS * least:
        raise ParameterError(
            f"LayerNorm adds {first.norm1.eps:g} to variances down to {least:.2g}, which the circuit cannot; "
            "distil it with a smaller eps"
        )
    return encoder


def _folded(b: Block, array: Callable[[Tensor], Any]) -> polynomial.Block:
    qkv, qkv_bias, up, up_bias = (array(t) for t in (b.qkv.weight, b.qkv.bias, b.up.weight, b.up.bias))
    g1, s1, g2, s2 = (array(t) for t in (b.norm1.weight, b.norm1.bias, b.norm2.weight, b.norm2.bias))
    d = qkv.shape[1]
    offset = np.zeros(0) if b.offset is None else array(b.offset)
    post: dict[str, Any] = {"gain1": g1, "shift1": s1, "gain2": g2, "shift2": s2}
    if b.norm == "pre":
        qkv_bias, qkv = qkv_bias + qkv @ s1, qkv * g1
        up_bias, up = up_bias + up @ s2, up * g2
        post = {}
    root = math.sqrt(d // b.heads)
    qkv, qkv_bias = qkv.copy(), qkv_bias.copy()
    qkv[:d] /= root
    qkv_bias[:d] /= root
    a, e, c = b.quadratic
    down, down_bias = array(b.down.weight), array(b.down.bias)
    rest = down_bias + down.sum(axis=1) * (c - e * e / (4 * a))
    return polynomial.Block(
        qkv, qkv_bias, array(b.out.weight), array(b.out.bias), up, up_bias + e / (2 * a), a * down, rest, offset, **post
    )
