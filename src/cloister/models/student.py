"""Teacher and student: a transformer with exact functions, and its twin of sums and products, in PyTorch.

One block serves a ViT (pre-norm, GELU) and an scGPT-compatible encoder (post-norm, ReLU). Exact, it computes what the
source computes; as a student it has Taylor's exp, or (s + c)² in its place (`attend_by("quadratic")`, c learnt for each
head), and a quadratic activation. Division and 1/√ stay exact here: on the intervals that `polynomial.check_ranges`
insists on, their iterations are good to a few digits.

    stage 1   Σ MSE of hidden states, embedding among them, and of raw attention scores             [appendix E, 12–16]
    stage 2   τ²·KL(teacher ‖ student) at τ = 5, and cross-entropy where there are labels
    always    a penalty on scores, variances and denominators that are about to leave their intervals
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from cloister.errors import MissingExtra, ParameterError
from cloister.models import polynomial

try:
    import torch
    import torch.nn.functional as F
    from torch import Tensor, nn
except ImportError:
    raise MissingExtra("torch", "models") from None

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

    def __init__(self, width: int, heads: int, hidden: int, norm: str, activation: str) -> None:
        super().__init__()
        self.heads, self.norm, self.activation = heads, norm, activation
        self.offset: nn.Parameter | None = None  # c, (heads,): quadratic attention
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
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
            scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
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
        activation: str, degree: int = 6,
    ) -> None:  # fmt: skip
        super().__init__()
        self.exact, self.degree, self.norm, self.attention = True, degree, norm, "taylor"
        self.embed = nn.Linear(inputs, width, bias=False)
        self.positions = nn.Parameter(torch.zeros(tokens, width))
        self.blocks = nn.ModuleList(Block(width, heads, hidden, norm, activation) for _ in range(depth))
        self.final = nn.LayerNorm(width) if norm == "pre" else nn.Identity()
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


# ---- sources ---------------------------------------------------------------------------------------------------------


def patches(images: Any, patch: int) -> Any:
    """(n, c, h, w) → (n, tokens, c·p·p), row by row, as a convolution of that stride sees them."""
    n, c, h, w = images.shape
    if h % patch or w % patch:
        raise ParameterError(f"images of {h} x {w} cannot be cut into patches of {patch}")
    x = images.reshape(n, c, h // patch, patch, w // patch, patch)
    order = (0, 2, 4, 1, 3, 5)
    x = x.permute(*order) if isinstance(x, Tensor) else x.transpose(order)
    return x.reshape(n, (h // patch) * (w // patch), c * patch * patch)


@torch.no_grad()
def from_vit(vit: Any, degree: int = 6) -> Transformer:
    """A teacher that computes what a `models.vit.Vit` computes, on patches."""
    kernel = vit.patches.weight  # (d, c, p, p)
    first, d = vit.blocks[0], kernel.shape[0]
    hidden, labels = first.up.out_features, vit.head.out_features
    tokens = vit.positions.shape[1]
    student = Transformer(
        tokens, kernel[0].numel(), d, first.heads, hidden, len(vit.blocks), labels, "pre", "gelu", degree
    )
    student.embed.weight.copy_(kernel.flatten(1))
    p = vit.positions[0].clone()
    p[0] += vit.token[0, 0]
    p[1:] += vit.patches.bias
    student.positions.copy_(p)
    for own, source in zip(student.blocks, vit.blocks, strict=True):
        for name in ("norm1", "norm2", "qkv", "out", "up", "down"):
            getattr(own, name).load_state_dict(getattr(source, name).state_dict())
    student.final.load_state_dict(vit.norm.state_dict())
    student.head.load_state_dict(vit.head.state_dict())
    return student


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


# ---- training --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recipe:
    epochs: int = 5  # of each stage
    batch_size: int = 64
    rate: float = 1e-4
    last_rate: float = 1e-5  # of stage 2
    temperature: float = 5.0
    penalty: float = 1.0
    seed: int = 0


def batches(n: int, size: int, rng: np.random.Generator) -> Iterator[Any]:
    order = rng.permutation(n)
    for start in range(0, n, size):
        yield torch.from_numpy(order[start : start + size])


def tune_teacher(teacher: Transformer, inputs: Tensor, labels: Tensor, recipe: Recipe) -> list[float]:
    """Fine-tune a teacher on the auxiliary set, within the intervals of its student; the mean loss per epoch."""

    def loss(at: Tensor) -> Tensor:
        traced = teacher.trace(inputs[at])
        return F.cross_entropy(traced.logits, labels[at]) + recipe.penalty * traced.penalty

    return _train(teacher, len(inputs), recipe, recipe.rate, loss)


def distil(
    teacher: Transformer, inputs: Tensor, labels: Tensor | None = None, recipe: Recipe | None = None
) -> tuple[Transformer, dict[str, list[float]]]:
    """The student of a teacher, in two stages on an auxiliary set; labels are optional (out of domain)."""
    recipe = recipe or Recipe()
    student = copy.deepcopy(teacher)
    student.exact, teacher.exact = False, True
    teacher.eval()

    def layers(at: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = teacher.trace(inputs[at])
        traced = student.trace(inputs[at])
        loss: Any = sum(F.mse_loss(a, b) for a, b in zip(traced.hidden, wanted.hidden, strict=True))
        loss = loss + sum(F.mse_loss(a, b) for a, b in zip(traced.scores, wanted.scores, strict=True))
        return loss + recipe.penalty * traced.penalty

    def prediction(at: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = teacher(inputs[at])
        traced, t = student.trace(inputs[at]), recipe.temperature
        loss = t * t * F.kl_div((traced.logits / t).log_softmax(-1), (wanted / t).log_softmax(-1), log_target=True,
                                reduction="batchmean")  # fmt: skip
        if labels is not None:
            loss = loss + F.cross_entropy(traced.logits, labels[at])
        return loss + recipe.penalty * traced.penalty

    first = _train(student, len(inputs), recipe, recipe.rate, layers)
    second = _train(student, len(inputs), recipe, recipe.last_rate, prediction)
    return student.eval(), {"layers": first, "prediction": second}


def _train(model: nn.Module, n: int, recipe: Recipe, rate: float, loss_of: Callable[[Tensor], Tensor]) -> list[float]:
    rng = np.random.default_rng(recipe.seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    history = []
    for _ in range(recipe.epochs):
        total = 0.0
        for at in batches(n, recipe.batch_size, rng):
            loss = loss_of(at)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            total += float(loss.detach()) * len(at)
        history.append(total / n)
    return history


# ---- export ----------------------------------------------------------------------------------------------------------


def export(
    student: Transformer, inputs: Any, card: dict[str, Any], *, taps: tuple[int, ...] = (), rank: int = 8,
    steps: int = 7, root_steps: int = 5,
) -> polynomial.Encoder:  # fmt: skip
    """Fold, calibrate on auxiliary inputs, fix the projections, and refuse a student that leaves its intervals."""
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
    x = np.asarray(inputs, np.float64)
    encoder = polynomial.Encoder(shape, array(student.embed.weight), array(student.positions), blocks, *none, card)
    encoder = polynomial.fit_projections(polynomial.calibrate(encoder, x, centred=True), x)
    polynomial.check_ranges(encoder, x)
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
