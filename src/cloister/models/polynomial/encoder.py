"""An encoder that consists of sums and products only: what a provider evaluates on ciphertexts, in plain NumPy.

    tokens      x_0 = p_0 (class token),  x_t = E·input_t + p_t
    attention   s = q·k,  e = T_6(s) (Taylor's exp) or (s + c)² (quadratic),  D = mean(e) / S,  1/D by Goldschmidt,
                o = Σ e·v / Σ e
    LayerNorm   v = variance / V,  1/√v by Newton from a line
    activation  a·u² + b·u + c,  written as a·(u + b/2a)² + rest and folded into the weights
    blocks      pre-norm (ViT) or post-norm (scGPT):  one interface, the same steps in another order

All of `Shape` is public, and so are its intervals; weights are the provider's secret. `evaluate` does in float64 what
the encrypted circuit does, with the same rounded weights, so the two differ by noise alone.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from cloister import files
from cloister.arrays import F64, Bits
from cloister.errors import DataError, ParameterError

GELU = (0.2125, 0.5, 0.0697)  # least squares on N(0, 1)
RELU = (0.1995, 0.5, 0.1995)
ATTENTION = ("taylor", "quadratic")
DEGREES = (2, 4, 6, 8, 10, 12, 14, 16)  # of Taylor's exp
TOP_SCORE = 3.5  # above, it lacks more than a seventh of exp at degree 6
DIVISION = (0.05, 1.95)  # where Goldschmidt converges
ROOT = (0.05, 1.4)
START = (35, -21, 16)  # 1/√v ≈ (35 - 21 v) / 16 to begin with
TAP_BOUND = 32.0
FORMAT = 1


@dataclass(frozen=True, slots=True)
class Shape:
    """Public description of an encoder: sizes, degrees, and the intervals that its values keep."""

    tokens: int  # T, with the class token
    inputs: int  # numbers per token that the owner encrypts
    width: int  # d
    heads: int
    hidden: int
    depth: int  # L
    norm: Literal["pre", "post"] = "pre"
    exp_degree: int = 6
    steps: int = 7  # of Goldschmidt's division
    root_steps: int = 5  # of Newton's 1/√
    taps: tuple[int, ...] = ()  # blocks after which the owner reads, counted from 1; no two adjacent
    rank: int = 8  # numbers that it reads there
    variances: tuple[float, ...] = ()  # V, two per block
    means: tuple[float, ...] = ()  # S, one per block
    x_bound: float = 16.0  # of activations between blocks, and of inputs
    u_bound: float = 16.0  # of queries, keys, values and hidden units
    input_bound: float = 0.0  # of what an owner brings; 0: as x_bound
    tap_bounds: tuple[float, ...] = ()  # of what an owner reads, tap by tap; none: TAP_BOUND
    attention: Literal["taylor", "quadratic"] = "taylor"  # how a score becomes a weight
    sum_bound: float = 0.0  # of weighted sums of values before they are divided; 0: twice u_bound

    def __post_init__(self) -> None:
        if self.width % self.heads or min(self.tokens, self.inputs, self.hidden, self.depth, self.rank) < 1:
            raise ParameterError(f"the width {self.width} must be a multiple of the number of heads {self.heads}")
        if self.exp_degree not in DEGREES or self.steps < 1 or self.root_steps < 1 or self.tokens < 2:
            raise ParameterError("exp has an even degree from 2 to 16, and division and root take at least one step")
        if self.attention not in ATTENTION:
            raise ParameterError(f"attention is one of {', '.join(ATTENTION)}, found '{self.attention}'")
        if list(self.taps) != sorted(set(self.taps)) or any(not 1 <= t <= self.depth for t in self.taps):
            raise ParameterError(f"taps must be blocks 1 to {self.depth}, in order")
        if self.tap_bounds and (len(self.tap_bounds) != len(self.taps) or not 0 < max(self.tap_bounds) <= TAP_BOUND):
            raise ParameterError(
                f"a model with {len(self.taps)} taps needs the same number of bounds, none above {TAP_BOUND:g}"
            )
        if any(b - a < 2 for a, b in zip(self.taps, self.taps[1:], strict=False)):
            raise ParameterError("two taps are adjacent; the increment of a block would be seen")

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    def tap_bound(self, number: int) -> float:
        """How large a feature of that tap may be; beyond, the sample is unlike those of the calibration."""
        return self.tap_bounds[number] if self.tap_bounds else TAP_BOUND


def default_taps(depth: int) -> tuple[int, ...]:
    """About a third of the blocks, the last among them, no two adjacent."""
    return tuple(sorted(range(depth, 0, -3)))


@dataclass(frozen=True)
class Block:
    """Weights of one block with everything folded in that can be."""

    qkv: F64  # (3d, d)
    qkv_bias: F64
    out: F64  # (d, d)
    out_bias: F64
    up: F64  # (f, d)
    up_bias: F64  # with b/2a
    down: F64  # (d, f), times a
    down_bias: F64  # with the rest of the activation
    offset: F64 = field(default_factory=lambda: np.zeros(0))  # c of each head; quadratic attention only
    gain1: F64 = field(default_factory=lambda: np.zeros(0))  # post-norm only
    shift1: F64 = field(default_factory=lambda: np.zeros(0))
    gain2: F64 = field(default_factory=lambda: np.zeros(0))
    shift2: F64 = field(default_factory=lambda: np.zeros(0))


MATRICES = ("qkv", "out", "up", "down", "gain1", "gain2")


@dataclass(frozen=True)
class Encoder:
    """The provider's model, and what it tells about it (`card`)."""

    shape: Shape
    embed: F64  # E, (d, inputs)
    positions: F64  # (T, d)
    blocks: tuple[Block, ...]
    projections: F64  # (taps, r, d)
    centres: F64  # (taps, r)
    card: dict[str, Any] = field(default_factory=dict)  # what kind of input it takes: public

    def rounded(self, weight_bits: int) -> Encoder:
        """All matrices on the grid of 2^-weight_bits, as they are used under encryption."""

        def grid(x: F64) -> F64:
            return np.rint(np.ldexp(x, weight_bits)) / 2.0**weight_bits

        blocks = tuple(
            dataclasses.replace(b, **{name: grid(getattr(b, name)) for name in MATRICES}) for b in self.blocks
        )
        return dataclasses.replace(
            self, embed=grid(self.embed), projections=grid(self.projections), blocks=blocks, positions=self.positions
        )

    # ---- one `.npz` without pickles ---------------------------------------------------------------------------------

    def to_bytes(self, *, half: bool = False) -> bytes:
        """In float32, or in float16 (`half`); check the ranges of a model that was rounded so again."""
        arrays = {"embed": self.embed, "positions": self.positions}
        arrays |= {"projections": self.projections, "centres": self.centres}
        for i, b in enumerate(self.blocks):
            arrays |= {f"{i}.{f.name}": getattr(b, f.name) for f in dataclasses.fields(Block)}
        meta = {"format": FORMAT, "shape": dataclasses.asdict(self.shape), "card": self.card}
        out = io.BytesIO()
        packed: dict[str, Any] = {k: v.astype(np.float16 if half else np.float32) for k, v in arrays.items()}
        np.savez_compressed(out, meta=np.frombuffer(json.dumps(meta).encode(), np.uint8), **packed)
        return out.getvalue()

    def save(self, path: str | Path, *, half: bool = False) -> None:
        Path(path).write_bytes(self.to_bytes(half=half))

    @classmethod
    def load(cls, path: str | Path) -> Encoder:
        try:
            with files.load_arrays(path) as kept:
                arrays = {k: kept[k].astype(np.float64) for k in kept.files if k != "meta"}
                meta = json.loads(kept["meta"].tobytes())
            shape = shape_of(meta["shape"])
            names = [f.name for f in dataclasses.fields(Block)]
            blocks = tuple(
                Block(**{n: arrays[f"{i}.{n}"] for n in names if f"{i}.{n}" in arrays}) for i in range(shape.depth)
            )
            projections, centres, card = arrays["projections"], arrays["centres"], meta["card"]
            encoder = cls(shape, arrays["embed"], arrays["positions"], blocks, projections, centres, card)
        except FileNotFoundError:
            raise DataError(f"there is no model at {path}") from None
        except (DataError, ParameterError):
            raise
        except Exception as e:  # every way in which a file can be wrong
            raise DataError(f"{path} is not a provider's model of Cloister ({type(e).__name__})") from None
        return encoder


def shape_of(raw: dict[str, Any]) -> Shape:
    """A shape from JSON, where tuples became lists."""
    fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in raw.items()}
    return Shape(**fields)


# ---- the three approximations ---------------------------------------------------------------------------------------


def taylor(s: Any, degree: int) -> Any:
    total, term = 1.0, 1.0
    for i in range(1, degree + 1):
        term = term * s / i
        total = total + term
    return total


@functools.cache
def turning(degree: int) -> float:
    """Where Taylor's exp of even degree has its minimum: its derivative, of one degree less, has one real root.

    Below it, a smaller score would weigh more.
    """
    roots = np.roots([1 / math.factorial(i) for i in range(degree - 1, -1, -1)])
    return float(min(z.real for z in roots if abs(z.imag) < 1e-9))


def inverse(D: Any, steps: int) -> Any:
    """1/D for D in (0, 2): (1 + r)(1 + r²)(1 + r⁴)…, r = 1 - D."""
    r = 1 - D
    y = 1 + r
    for _ in range(steps):
        r = r * r
        y = y * (1 + r)
    return y


def inverse_root(v: Any, steps: int) -> Any:
    y = (START[0] + START[1] * v) / START[2]
    for _ in range(steps):
        y = y * (3 - v * y * y) / 2
    return y


# ---- in plain -------------------------------------------------------------------------------------------------------

Watch = Callable[[str, int, Any], None]  # what, block, values


def _silent(what: str, block: int, values: Any) -> None:
    pass


def layer_norm(shape: Shape, x: F64, layer: int, which: int, watch: Watch) -> F64:
    c = x - x.mean(axis=-1, keepdims=True)
    v = (c * c).mean(axis=-1, keepdims=True) / shape.variances[2 * layer + which]
    watch("root", layer, v)
    return np.asarray(c * inverse_root(v, shape.root_steps) / math.sqrt(shape.variances[2 * layer + which]))


def attend(shape: Shape, b: Block, z: F64, layer: int, watch: Watch) -> F64:
    n, T, d = z.shape
    y = z @ b.qkv.T + b.qkv_bias
    watch("units", layer, y)
    q, k, v = (a.reshape(n, T, shape.heads, -1).transpose(0, 2, 1, 3) for a in np.split(y, 3, axis=-1))
    s = q @ k.transpose(0, 1, 3, 2)
    watch("scores", layer, s)
    e = (s + b.offset[:, None, None]) ** 2 if shape.attention == "quadratic" else taylor(s, shape.exp_degree)
    D = e.mean(axis=-1, keepdims=True) / shape.means[layer]
    watch("division", layer, D)
    o = e @ v / (T * shape.means[layer])
    watch("sums", layer, o)
    o = o * inverse(D, shape.steps)
    return np.asarray(o.transpose(0, 2, 1, 3).reshape(n, T, d) @ b.out.T + b.out_bias)


def feed(b: Block, z: F64, layer: int, watch: Watch) -> F64:
    u = z @ b.up.T + b.up_bias
    watch("units", layer, u)
    return np.asarray((u * u) @ b.down.T + b.down_bias)


def run_block(shape: Shape, b: Block, x: F64, layer: int, watch: Watch = _silent) -> F64:
    if shape.norm == "pre":
        x = x + attend(shape, b, layer_norm(shape, x, layer, 0, watch), layer, watch)
        watch("activations", layer, x)
        x = x + feed(b, layer_norm(shape, x, layer, 1, watch), layer, watch)
    else:
        x = layer_norm(shape, x + attend(shape, b, x, layer, watch), layer, 0, watch) * b.gain1 + b.shift1
        x = layer_norm(shape, x + feed(b, x, layer, watch), layer, 1, watch) * b.gain2 + b.shift2
    watch("activations", layer, x)
    return x


def embed(encoder: Encoder, inputs: F64) -> F64:
    """(n, T - 1, inputs) → (n, T, d)."""
    body = inputs @ encoder.embed.T
    return np.asarray(np.concatenate([np.zeros((len(body), 1, body.shape[2])), body], axis=1) + encoder.positions)


def hidden(encoder: Encoder, inputs: F64, watch: Watch = _silent) -> list[F64]:
    """b_0, …, b_L, each (n, T, d)."""
    x = embed(encoder, inputs)
    watch("activations", 0, x)
    out = [x]
    for layer, b in enumerate(encoder.blocks):
        out.append(x := run_block(encoder.shape, b, x, layer, watch))
    return out


def taps_of(encoder: Encoder, b: list[F64]) -> F64:
    """What the owner reads of every sample, (n, taps, r): the class token through the projection."""
    each = [
        b[t][:, 0] @ P.T - c for t, P, c in zip(encoder.shape.taps, encoder.projections, encoder.centres, strict=True)
    ]
    return np.stack(each, axis=1)


def check_inputs(shape: Shape, inputs: F64, beyond: float = 0.0) -> None:
    """Raise unless the model takes these; that share of the samples may hold something missing or too large."""
    if inputs.ndim != 3 or inputs.shape[1:] != (shape.tokens - 1, shape.inputs):
        raise DataError(
            f"the model takes {shape.tokens - 1} tokens of {shape.inputs} numbers, found {inputs.shape[1:]}"
        )
    found = ~takes(shape, inputs)
    if found.any() and found.mean() > beyond:
        bound = shape.input_bound or shape.x_bound
        raise DataError(
            f"inputs of {int(found.sum())} of {len(found)} samples are missing or beyond ±{bound:g}; normalise them as "
            "the model's card says"
        )


def takes(shape: Shape, inputs: F64) -> Bits:
    """Which samples hold nothing that is missing, or larger than anything in the calibration."""
    bound = shape.input_bound or shape.x_bound
    return np.asarray((np.abs(inputs) <= bound).all(axis=(1, 2)))  # NaN is not <= anything
