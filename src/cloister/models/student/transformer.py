"""Teacher and student: a transformer with exact functions, and its twin of sums and products, in PyTorch.

One block serves a ViT (pre-norm, GELU) and an scGPT-compatible encoder (post-norm, ReLU). Exact, it computes what the
source computes; as a student it has Taylor's exp, or (s + c)² in its place (`attend_by("quadratic")`, c learnt for each
head), and a quadratic activation. Division and 1/√ stay exact here: on the intervals that `polynomial.check_ranges`
insists on, their iterations are good to a few digits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cloister.errors import ParameterError
from cloister.models import polynomial

SAFE_SCORE, SAFE_RATIO = 3.0, 12.0
OFFSET = 3.0  # c to begin with
SAFE_SHARE = 0.95  # of the way down to where exp turns upwards


@dataclass
class Trace:
    logits: Tensor  # (n, K)
    hidden: list[Tensor]  # b_0 … b_L
    scores: list[Tensor]
    penalty: Tensor


class Block(nn.Module):
    """Attention and feed-forward, pre- or post-norm."""

    def __init__(self, width: int, heads: int, hidden: int, norm: str, activation: str, eps: float) -> None:
        super().__init__()
        self.heads, self.norm, self.activation = heads, norm, activation
        self.offset: nn.Parameter | None = None  # c, (heads,): quadratic attention
        self.norm1, self.norm2 = nn.LayerNorm(width, eps), nn.LayerNorm(width, eps)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    @property
    def quadratic(self) -> tuple[float, float, float]:
        return polynomial.GELU if self.activation == "gelu" else polynomial.RELU

    def weigh(self, scores: Tensor, degree: int) -> tuple[Tensor, Tensor]:
        """What a score weighs before the division, and how far it lies below where that turns upwards."""
        if self.offset is not None:
            c = self.offset[:, None, None]
            return (scores + c) ** 2, F.relu(-SAFE_SHARE * c - scores)
        low = F.relu(max(SAFE_SHARE * polynomial.turning(degree), -SAFE_SCORE) - scores)
        return polynomial.taylor(scores.clamp(-12, 12), degree), low

    def forward(self, x: Tensor, *, exact: bool, degree: int) -> tuple[Tensor, Tensor, Tensor]:
        """X → (x', scores, penalty)."""
        penalty = scores = x.new_zeros(())

        def normed(z: Tensor, layer: nn.LayerNorm) -> Tensor:
            nonlocal penalty
            v = z.var(-1, unbiased=False)
            penalty = penalty + _spread(v)
            return layer(z)

        def attend(z: Tensor) -> Tensor:
            nonlocal scores, penalty
            q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(z).chunk(3, -1))
            scores = (q @ k.transpose(-1, -2)).to(x.dtype) / math.sqrt(q.shape[-1])  # whatever products are of
            e, low = self.weigh(scores, degree)
            penalty = penalty + _worst(F.relu(scores - SAFE_SCORE) + low) + _spread(e.mean(-1))
            weights = scores.softmax(-1) if exact else e / e.sum(-1, keepdim=True)
            return self.out((weights @ v).transpose(1, 2).flatten(2))

        def feed(z: Tensor) -> Tensor:
            u = self.up(z)
            if exact:
                return self.down(F.gelu(u) if self.activation == "gelu" else F.relu(u))
            a, b, c = self.quadratic
            return self.down(a * u * u + b * u + c)

        scores = x
        if self.norm == "pre":
            x = x + attend(normed(x, self.norm1))
            x = x + feed(normed(x, self.norm2))
        else:
            x = normed(x + attend(x), self.norm1)
            x = normed(x + feed(x), self.norm2)
        return x, scores, penalty


def _spread(v: Tensor) -> Tensor:
    """How far values lie below a twelfth of the largest: both iterations want one scale for all."""
    return _worst(F.relu(torch.log(v.max().detach() / v.clamp_min(1e-12)) - math.log(SAFE_RATIO)))


def _worst(x: Tensor) -> Tensor:
    """Mean square, and a share of the largest: a mean alone lets single values pass that the range check will not."""
    return x.square().mean() + 0.1 * x.amax()


class Transformer(nn.Module):
    """Tokens of numbers to logits. `exact` says whether this is a teacher or a student."""

    def __init__(
        self, tokens: int, inputs: int, width: int, heads: int, hidden: int, depth: int, labels: int, norm: str,
        activation: str, degree: int = 6, eps: float = 1e-5,
    ) -> None:  # fmt: skip
        super().__init__()
        self.exact, self.degree, self.norm, self.attention = True, degree, norm, "taylor"
        self.card: dict[str, Any] = {}  # what it takes in, where its source says so
        self.embed = nn.Linear(inputs, width, bias=False)
        self.positions = nn.Parameter(torch.zeros(tokens, width))
        self.blocks = nn.ModuleList(Block(width, heads, hidden, norm, activation, eps) for _ in range(depth))
        self.final = nn.LayerNorm(width, eps) if norm == "pre" else nn.Identity()
        self.head = nn.Linear(width, labels)

    def attend_by(self, attention: str) -> Transformer:
        """Choose what its student has in place of the softmax: "taylor" or "quadratic"; before tuning or distilling."""
        if attention not in polynomial.ATTENTION:
            raise ParameterError(f"attention is one of {', '.join(polynomial.ATTENTION)}, found '{attention}'")
        self.attention, own = attention, [b for b in self.blocks if isinstance(b, Block)]
        for block in own:
            new = nn.Parameter(torch.full((block.heads,), OFFSET)) if attention == "quadratic" else None
            block.offset = new
        return self

    def trace(self, inputs: Tensor) -> Trace:
        """(n, T - 1, inputs) → everything that distillation compares."""
        x = torch.cat([inputs.new_zeros(len(inputs), 1, self.embed.out_features), self.embed(inputs)], 1)
        x = x + self.positions
        hidden, scores, penalty = [x], [], x.new_zeros(())
        for block in self.blocks:
            x, s, p = block(x, exact=self.exact, degree=self.degree)
            hidden.append(x)
            scores.append(s)
            penalty = penalty + p
        return Trace(self.head(self.final(x[:, 0])), hidden, scores, penalty)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.trace(inputs).logits
