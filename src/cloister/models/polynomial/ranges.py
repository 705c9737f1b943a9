"""The intervals that a polynomial encoder's values keep: measured, checked, and chosen from auxiliary inputs."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from cloister.arrays import F64
from cloister.errors import ParameterError
from cloister.models.polynomial.encoder import (
    DIVISION,
    ROOT,
    TAP_BOUND,
    TOP_SCORE,
    Encoder,
    Shape,
    embed,
    hidden,
    run_block,
    taps_of,
    turning,
)


class Ranges:
    """Smallest and largest of every kind of value, block by block."""

    def __init__(self) -> None:
        self.seen: dict[tuple[str, int], tuple[float, float]] = {}

    def __call__(self, what: str, block: int, values: Any) -> None:
        low, high = self.seen.get((what, block), (math.inf, -math.inf))
        self.seen[what, block] = (min(low, float(values.min())), max(high, float(values.max())))

    def rows(self, shape: Shape) -> list[Row]:
        """Every span beside the interval that it must keep, block by block."""
        allowed = limits(shape)
        ordered = sorted(self.seen.items(), key=lambda kv: (kv[0][1], kv[0][0]))
        return [Row(block + 1, what, *span, *allowed[what]) for (what, block), span in ordered]


@dataclass(frozen=True)
class Row:
    block: int  # from 1
    what: str
    low: float
    high: float
    least: float
    most: float

    @property
    def inside(self) -> bool:
        return self.least <= self.low and self.high <= self.most  # NaN is not <= anything


def limits(shape: Shape) -> dict[str, tuple[float, float]]:
    scores = max(turning(shape.exp_degree), -TOP_SCORE), TOP_SCORE
    sums = shape.sum_bound or 2 * shape.u_bound
    return {
        "scores": (-math.inf, math.inf) if shape.attention == "quadratic" else scores,  # a square is no approximation
        "sums": (-sums, sums),
        "division": DIVISION,
        "root": ROOT,
        "units": (-shape.u_bound, shape.u_bound),
        "activations": (-shape.x_bound, shape.x_bound),
    }


def measure(encoder: Encoder, inputs: F64, at_once: int = 256, ranges: Ranges | None = None) -> Ranges:
    """The spans of all values on these inputs, wherever they lie; and on those of `ranges`, if given."""
    ranges = Ranges() if ranges is None else ranges
    with np.errstate(all="ignore"):
        for start in range(0, len(inputs), at_once):
            hidden(encoder, inputs[start : start + at_once], ranges)
    return ranges


def check_ranges(encoder: Encoder, inputs: F64) -> Ranges:
    """Refuse a model whose values leave the intervals of its approximations on these inputs."""
    ranges = measure(encoder, inputs)
    check_rows(ranges.rows(encoder.shape))
    return ranges


def check_rows(rows: list[Row]) -> None:
    outside = [r for r in rows if not r.inside]
    if outside:
        r, others = outside[0], len(outside) - 1
        raise ParameterError(
            f"block {r.block}: {r.what} reach [{r.low:.3g}, {r.high:.3g}], the approximation holds on [{r.least:g}, "
            f"{r.most:g}]{f' (and {others} more)' if others else ''}; "
            "distil longer with the range penalty, or on data more like the owners'"
        )


def calibrate(encoder: Encoder, inputs: F64, *, centred: bool = False) -> Encoder:
    """Choose V, S and the public bounds from auxiliary inputs, block after block, with a margin.

    V and S follow the largest value, or (`centred`) leave room at both ends of the interval, three times as much above
    as below in the logarithm: there is a smallest variance, that of a flat patch, but hardly a largest.
    """
    depth = encoder.shape.depth
    shape = dataclasses.replace(encoder.shape, variances=(1.0,) * (2 * depth), means=(1.0,) * depth)
    pre = (("root", 0), ("division", 0), ("root", 1))
    post = (("division", 0), ("root", 0), ("root", 1))
    ranges, x = Ranges(), embed(encoder, inputs)
    ranges("activations", 0, x)
    for layer, block in enumerate(encoder.blocks):
        for kind, which in pre if shape.norm == "pre" else post:  # each is met before the ones after it
            seen: list[tuple[float, float]] = []

            def watch(what: str, _: int, values: Any) -> None:
                if what == kind:  # noqa: B023
                    seen.append((float(values.min()), float(values.max())))  # noqa: B023

            with np.errstate(all="ignore"):
                run_block(shape, block, x, layer, watch)
            variances, means = list(shape.variances), list(shape.means)
            low, high = seen[which]
            if not 0 < low <= high < math.inf:
                raise ParameterError(
                    f"block {layer + 1}: {kind} reach [{low:.3g}, {high:.3g}], which no unit brings into an interval; "
                    "distil longer with the range penalty"
                )
            a, b = ROOT if kind == "root" else DIVISION
            room = b * low / (a * high)
            unit = high if kind == "root" else high / 1.5
            if centred and room > 1:
                unit = low / (a * room**0.25)
            if kind == "root":
                variances[2 * layer + which] = unit
            else:
                means[layer] = unit
            shape = dataclasses.replace(shape, variances=tuple(variances), means=tuple(means))
        x = run_block(shape, block, x, layer, ranges)

    def bound(what: str, least: float) -> float:
        top = max(max(abs(a), abs(b)) for (w, _), (a, b) in ranges.seen.items() if w == what)
        return 2.0 ** math.ceil(math.log2(max(1.5 * top, least)))

    largest = float(np.abs(inputs).max())
    shape = dataclasses.replace(
        shape,
        x_bound=bound("activations", max(largest, 1.0)),
        u_bound=bound("units", max(largest, 1.0)),
        input_bound=1.25 * largest,
        sum_bound=bound("sums", 1.0) if shape.attention == "quadratic" else 0.0,
    )
    return dataclasses.replace(encoder, shape=shape)


def fit_projections(encoder: Encoder, inputs: F64) -> Encoder:
    """Fix the low-rank projections: leading principal directions of the class token on auxiliary inputs, whitened."""
    b, shape = hidden(encoder, inputs), encoder.shape
    P, c = [], []
    for t in shape.taps:
        x = b[t][:, 0]
        centred = x - x.mean(axis=0)
        _, s, V = np.linalg.svd(centred, full_matrices=False)
        spread = np.maximum(s[: shape.rank] / math.sqrt(len(x)), 0.02 * s[0] / math.sqrt(len(x)))
        rows = V[: shape.rank] / spread[:, None]
        P.append(rows)
        c.append(rows @ x.mean(axis=0))
    projected = dataclasses.replace(encoder, projections=np.stack(P), centres=np.stack(c))
    largest = np.abs(taps_of(projected, b)).max(axis=(0, 2))  # by tap
    bounds = tuple(min(TAP_BOUND, 2.0 * float(x)) for x in largest)
    return dataclasses.replace(projected, shape=dataclasses.replace(shape, tap_bounds=bounds))
