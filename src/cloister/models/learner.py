"""A site's model and cells behind vectors: what federated training asks of them, in PyTorch.

    w_0     the first weights: the same at all sites, from the study's seed or a checkpoint
    θ       what was learned on top of them, as one vector: trainable weights, then running means and variances
    train   local epochs of SGD or Adam from w_0 + θ; FedProx pulls back to where they began
    gradient  Σ of the cells' gradients at w_0 + θ, each clipped to one norm; of donors, the means of their cells
    c, c_u  of SCAFFOLD: what all sites' gradients, and this one's, are about; steps go along ∇ - c_u + c. The vector
            that travels is then (θ, c): after K steps at rate η, c_u becomes c_u - c - Δ/(Kη), and c the mean of all

First weights come from NumPy's generator, whose stream is the same everywhere; the order of cells and the dropout of a
round from (seed, site, round). A site's result therefore does not depend on what runs beside it.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from cloister.errors import MissingExtra, ParameterError
from cloister.models import graph

try:
    import torch
    import torch.nn.functional as F
    from torch import Tensor, nn
except ImportError:
    raise MissingExtra("torch", "models") from None

Sums = tuple[Tensor, float, int]  # of clipped gradients and losses; cells whose gradient is not finite
GLOBAL_RNG = threading.Lock()  # for models whose dropout draws from torch's one generator


class Dropout(nn.Module):
    """Dropout from a generator of its own, so that sites that train side by side do not disturb each other."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p
        self.generator: torch.Generator | None = None

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        keep = torch.rand(x.shape, device=x.device, generator=self.generator) >= self.p
        return x * keep / (1 - self.p)


class Examples(Protocol):
    """Cells as a model takes them in."""

    def __len__(self) -> int: ...

    def batch(self, at: Any, rng: np.random.Generator | None) -> tuple[Tensor, ...]:
        """Inputs of the cells at these positions; changed at random (augmented) if there is an `rng`."""


@dataclass
class Table:
    """Rows of numbers, or images."""

    x: Tensor
    augment: Callable[[Tensor, np.random.Generator], Tensor] | None = None

    def __len__(self) -> int:
        return len(self.x)

    def batch(self, at: Any, rng: np.random.Generator | None) -> tuple[Tensor, ...]:
        x = self.x[torch.as_tensor(np.asarray(at), device=self.x.device)]
        return (self.augment(x, rng) if self.augment is not None and rng is not None else x,)


def flip_and_shift(x: Tensor, rng: np.random.Generator) -> Tensor:
    """Mirror half of the images, and move each by up to two pixels."""
    mirrored = torch.as_tensor(rng.random(len(x)) < 0.5, device=x.device)
    x = torch.where(mirrored[:, None, None, None], x.flip(-1), x)
    padded, (h, w) = F.pad(x, (2, 2, 2, 2), mode="reflect"), x.shape[-2:]
    dy, dx = (torch.as_tensor(rng.integers(0, 5, len(x)), device=x.device) for _ in range(2))
    rows = dy[:, None] + torch.arange(h, device=x.device)  # (b, h)
    columns = dx[:, None] + torch.arange(w, device=x.device)  # (b, w)
    which = torch.arange(len(x), device=x.device)[:, None, None]
    return padded.permute(0, 2, 3, 1)[which, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def rotate(x: Tensor, degrees: float, rng: np.random.Generator) -> Tensor:
    """Rotate each image about its middle, by an angle drawn between ± degrees; corners are filled from the edge."""
    angle = np.radians(rng.uniform(-degrees, degrees, len(x)))
    still = np.zeros(len(x))
    rows = [[np.cos(angle), -np.sin(angle), still], [np.sin(angle), np.cos(angle), still]]
    turned = torch.as_tensor(np.array(rows).transpose(2, 0, 1), dtype=x.dtype, device=x.device)  # (b, 2, 3)
    grid = F.affine_grid(turned, list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, padding_mode="border", align_corners=False)


def augment_by(rotation: float) -> Callable[[Tensor, np.random.Generator], Tensor]:
    """What is done to images in training; `rotation` in degrees."""
    if not rotation:
        return flip_and_shift
    return lambda x, rng: flip_and_shift(rotate(x, rotation, rng), rng)


def pseudo_weights(
    label: Any, confidence: Any, known: Any, labels: int, *, scale_confidence: bool, class_weights: bool
) -> Any:
    """What each of a site's cells counts in training, from the labels (-1: none) that a graph gave them.

    `scale_confidence`: the surest cell counts as much as a given label. `class_weights`: labels that are given or found
    rarely here count more, so that all count alike.
    """
    label, weight = np.asarray(label), np.array(confidence, dtype=np.float64)
    if scale_confidence:
        weight /= max(float(weight.max(initial=0.0)), 1e-9)
    if class_weights:
        every = np.where(np.asarray(known) >= 0, known, label)
        counts = np.bincount(every[every >= 0], minlength=labels)
        weight *= (counts.sum() / labels / np.maximum(counts, 1))[np.maximum(label, 0)]
    weight[label < 0] = 0.0
    return weight


@dataclass(frozen=True)
class Recipe:
    """Local training; public and the same at all sites."""

    epochs: int = 1
    batch_size: int = 64
    optimizer: str = "adam"  # or "sgd"
    momentum: float = 0.9
    weight_decay: float = 0.0
    mu: float = 0.0  # FedProx; 0 is FedAvg
    seed: int = 0
    controls: float = 0.0  # SCAFFOLD: the share of all sites that train in a round; 0 is FedAvg
    scale_confidence: bool = False  # of pseudo-labels from a graph, see `pseudo_weights`
    class_weights: bool = False

    def __post_init__(self) -> None:
        if self.epochs < 1 or self.batch_size < 1:
            raise ParameterError(f"expected at least one epoch and one cell a batch, found {self.epochs}")
        if self.optimizer not in ("adam", "sgd"):
            raise ParameterError(f"optimizer must be adam or sgd, found '{self.optimizer}'")
        if self.mu < 0 or self.weight_decay < 0 or not 0 <= self.momentum < 1:
            raise ParameterError("mu and weight_decay must be at least 0, momentum in [0, 1)")
        if self.controls and (self.optimizer != "sgd" or self.momentum or self.mu or not 0 < self.controls <= 1):
            raise ParameterError("SCAFFOLD corrects plain steps: optimizer must be sgd, momentum and mu 0")


def init_weights(model: nn.Module, seed: int, only: Callable[[str], bool] = lambda name: True) -> None:
    """Draw matrices (He, uniform) and keep norms at one and biases at zero."""
    rng = np.random.default_rng([seed & 0xFFFFFFFF, 11])
    with torch.no_grad():
        for name, p in model.named_parameters():
            if not only(name):
                continue
            if p.dim() > 1:
                inside = p.shape[1] * math.prod(p.shape[2:]) if p.shape[0] > 1 or p.dim() == 2 else p.shape[-1]
                reach = math.sqrt(3.0 / max(1, inside))
                p.copy_(torch.from_numpy(rng.uniform(-reach, reach, tuple(p.shape)).astype(np.float32)))
            elif name.endswith("bias"):
                p.zero_()


@dataclass(frozen=True)
class Clipped:
    """A sum of clipped gradients, and whose cells are in it."""

    sum: Any  # (P,), in units of the clipping norm
    loss: float  # summed over cells
    cells: int
    donor: Any = None  # (cells,), codes
    left_out: int = 0  # cells whose gradient is not finite; they count as zero


class Learner:
    """See `cloister.workflows.fine_tune.training_parts.Learner`, which this is."""

    def __init__(
        self,
        model: nn.Module,
        labels: int,
        recipe: Recipe,
        examples: Examples,
        codes: Any,
        validation: Any,
        *,
        describe: str,
        site: str,
        device: str | torch.device = "cpu",
        global_rng: bool = False,
        unlabelled: bool = False,
        donor: Any = None,
    ) -> None:
        """Cells with a code of at least 0 train, but for those in `validation`; others too, once taught a label.

        `donor` has the code of every cell's donor, or is `None` where donors are not named.
        """
        self.model, self.labels, self.recipe, self.site = model.to(device), labels, recipe, site
        self.device, self.examples, self.global_rng = torch.device(device), examples, global_rng
        self.codes, held = np.asarray(codes), np.asarray(validation, dtype=np.int64)
        self.validation, self.donor = held, None if donor is None else np.asarray(donor, dtype=np.int64)
        self.training = np.setdiff1d(np.flatnonzero(self.codes >= 0), held)
        self.unlabelled = np.flatnonzero(self.codes < 0) if unlabelled else np.zeros(0, np.int64)
        self.cells = len(self.training) + len(self.unlabelled)
        self.points = np.concatenate([self.training, self.unlabelled])  # that may train
        self.pseudo = np.full(len(self.codes), -1), np.zeros(len(self.codes))  # labels of this round, and their weight
        self.first = self.flat()
        self.trainable = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        own = self.trainable if recipe.controls else 0
        self.control = torch.zeros(own, device=self.device)  # c_u
        self.size = len(self.first) + own
        h = hashlib.sha256(describe.encode())
        for name, tensor in model.state_dict().items():
            h.update(name.encode() + tensor.detach().cpu().contiguous().numpy().tobytes())
        self.digest = h.digest()

    # -- vectors ---------------------------------------------------------------------------------------------------

    def tensors(self) -> Iterator[Tensor]:
        yield from (p for p in self.model.parameters() if p.requires_grad)
        yield from (b for b in self.model.buffers() if b.dtype.is_floating_point)

    def flat(self) -> Tensor:
        return torch.cat([t.detach().reshape(-1).float() for t in self.tensors()])

    @torch.no_grad()
    def place(self, theta: Any) -> Tensor:
        """Set the weights to w_0 + θ; returns them. A θ of the trainable weights alone leaves the rest as in w_0."""
        w = self.first.clone()
        change = torch.from_numpy(np.array(theta[: len(w)], dtype=np.float32)).to(self.device)
        w[: len(change)] += change
        start = 0
        for t in self.tensors():
            t.copy_(w[start : start + t.numel()].view_as(t))
            start += t.numel()
        return w

    # -- what the protocol asks ------------------------------------------------------------------------------------

    def train(self, theta: Any, t: int, rate: float) -> tuple[Any, float]:
        if self.global_rng:
            with GLOBAL_RNG, torch.random.fork_rng():
                torch.manual_seed(self._seed(t) % 2**63)
                return self._train(theta, t, rate)
        return self._train(theta, t, rate)

    def _seed(self, t: int) -> int:
        text = f"{self.recipe.seed}/{self.site}/{t}".encode()
        return int.from_bytes(hashlib.sha256(text).digest()[:8], "big")

    def _train(self, theta: Any, t: int, rate: float) -> tuple[Any, float]:
        began = self.place(theta)
        anchor = [p.detach().clone() for p in self.model.parameters() if p.requires_grad]
        rng = np.random.default_rng(self._seed(t))
        generator = torch.Generator(device=self.device).manual_seed(self._seed(t) % 2**63)
        for module in self.model.modules():
            if isinstance(module, Dropout):
                module.generator = generator
        optimizer = self._optimizer(rate)
        shared = torch.from_numpy(np.array(theta[len(began) :], dtype=np.float32)).to(self.device)  # c
        pull = self._split(shared - self.control)
        self.model.train()
        total, seen, steps = 0.0, 0, 0
        for _ in range(self.recipe.epochs):
            for own, taught in self.batches(rng):
                loss, n = self.loss(own, taught, rng), len(own) + len(taught)
                total, seen = total + float(loss.detach()) * n, seen + n
                if self.recipe.mu:
                    now = (p for p in self.model.parameters() if p.requires_grad)
                    loss = loss + self.recipe.mu / 2 * sum(
                        ((p - a) ** 2).sum() for p, a in zip(now, anchor, strict=True)
                    )
                optimizer.zero_grad()
                loss.backward()
                for p, towards in pull:
                    p.grad = towards.clone() if p.grad is None else p.grad + towards
                optimizer.step()
                steps += 1
        delta = self.flat().double() - began.double()
        if pull and steps:
            change = -shared.double() - delta[: len(shared)] / (steps * rate)
            if bool(torch.isfinite(change).all()):
                self.control = self.control + change.float()
            delta = torch.cat([delta, self.recipe.controls * change])
        elif pull:
            delta = torch.cat([delta, torch.zeros_like(shared).double()])
        return delta.cpu().numpy(), total / max(1, seen)

    def _split(self, vector: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Trainable weights beside their parts of a vector; none if it is empty."""
        weights = [p for p in self.model.parameters() if p.requires_grad] if len(vector) else []
        parts = torch.split(vector, [p.numel() for p in weights]) if weights else ()
        return [(p, part.view_as(p)) for p, part in zip(weights, parts, strict=True)]

    def _optimizer(self, rate: float) -> torch.optim.Optimizer:
        weights = [p for p in self.model.parameters() if p.requires_grad]
        r = self.recipe
        if r.optimizer == "adam":
            return torch.optim.AdamW(weights, lr=rate, weight_decay=r.weight_decay)
        return torch.optim.SGD(weights, lr=rate, momentum=r.momentum, weight_decay=r.weight_decay)

    def batches(self, rng: np.random.Generator) -> Iterator[tuple[Any, Any]]:
        """Labelled and pseudo-labelled cells of each step: as many of the one as of the other, if there are both."""
        taught = self.unlabelled[self.pseudo[1][self.unlabelled] > 0]
        own, size = rng.permutation(self.training), self.recipe.batch_size
        if not len(taught):
            for at in _cut(own, size):
                yield at, own[:0]
            return
        size = min(size, len(own)) if len(own) else size
        cycle = _cycle(own, rng)
        for at in _cut(rng.permutation(taught), size):
            yield np.array([next(cycle) for _ in range(len(at))], dtype=np.int64) if len(self.training) else at[:0], at

    def loss(self, own: Any, taught: Any, rng: np.random.Generator) -> Tensor:
        """Mean over the batch of the cross-entropy, weighted by confidence where a label was not given but found."""
        at = np.concatenate([own, taught])
        y = np.concatenate([self.codes[own], self.pseudo[0][taught]])
        weight = np.concatenate([np.ones(len(own)), self.pseudo[1][taught]])
        logits = self.model(*self._move(self.examples.batch(at, rng)))
        each = F.cross_entropy(logits, torch.from_numpy(y).to(self.device), reduction="none")
        return (each * torch.from_numpy(weight.astype(np.float32)).to(self.device)).mean()

    # -- clipped gradients -----------------------------------------------------------------------------------------

    def group(self, *, held_out: bool) -> tuple[Any, Any]:
        """Label codes and donors of the cells that train now, pseudo-labels included, or of those held out."""
        at, codes = (self.validation, self.codes[self.validation]) if held_out else self._taking_part()[:2]
        return codes, None if self.donor is None else self.donor[at]

    def keep_held_out(self, keep: Any) -> None:
        """Score some of the held-out cells from now on, by mask."""
        self.validation = self.validation[keep]

    def _taking_part(self) -> tuple[Any, Any, Any]:
        """Cells that train now, their labels, given or found, and what they count."""
        taught = self.unlabelled[self.pseudo[1][self.unlabelled] > 0]
        at = np.concatenate([self.training, taught])
        codes = np.concatenate([self.codes[self.training], self.pseudo[0][taught]])
        return at, codes, np.concatenate([np.ones(len(self.training)), self.pseudo[1][taught]])

    def gradient(self, theta: Any, t: int, clip: float, keep: Any = None) -> Clipped:
        """Σ of the cells' gradients at w_0 + θ, each of norm at most `clip`, in units of `clip`; of some by mask.

        Where donors are named: the sum over donors of the mean over a donor's cells, so that a donor's part has norm at
        most one, too.
        """
        if self.global_rng:
            with GLOBAL_RNG, torch.random.fork_rng():
                torch.manual_seed(self._seed(t) % 2**63)
                return self._gradient(theta, t, clip, keep)
        return self._gradient(theta, t, clip, keep)

    def _gradient(self, theta: Any, t: int, clip: float, keep: Any) -> Clipped:
        self.place(theta)
        self.model.train()
        if any(isinstance(m, nn.modules.batchnorm._BatchNorm) and m.training for m in self.model.modules()):
            raise ParameterError("batch normalisation mixes cells, so gradients of single cells cannot be clipped")
        rng, generator = np.random.default_rng(self._seed(t)), torch.Generator(device=self.device)
        generator.manual_seed(self._seed(t) % 2**63)
        for module in self.model.modules():
            if isinstance(module, Dropout):
                module.generator = generator
        at, y, weight = (x if keep is None else x[keep] for x in self._taking_part())
        share, donor = np.ones(len(at)), None if self.donor is None else self.donor[at]
        if donor is not None and len(at):
            _, whose, sizes = np.unique(donor, return_inverse=True, return_counts=True)
            share = 1 / sizes[whose]
        total, losses, bad = torch.zeros(self.trainable, dtype=torch.float64, device=self.device), 0.0, 0
        clipped = self._clipped_linear if self._only_linear() else self._clipped_each
        step = 4 * self.recipe.batch_size
        for start in range(0, len(at), step):
            cut = slice(start, start + step)
            inputs = self._move(self.examples.batch(at[cut], rng))
            goal, counts, part = (
                torch.from_numpy(v[cut].astype(kind)).to(self.device)
                for v, kind in ((y, np.int64), (weight, np.float32), (share, np.float32))
            )
            found, loss, left_out = clipped(inputs, goal, counts, part, clip)
            total, losses, bad = total + found, losses + loss, bad + left_out
        return Clipped(total.cpu().numpy(), losses, len(at), donor, bad)

    def _only_linear(self) -> bool:
        """Whether all weights that train belong to linear layers."""
        ours = [p for m in self.model.modules() if isinstance(m, nn.Linear) for p in m.parameters(recurse=False)]
        own = {id(p) for p in ours}
        return all(id(p) in own for p in self.model.parameters() if p.requires_grad)

    def _clipped_linear(self, inputs: Any, y: Tensor, weight: Tensor, share: Tensor, clip: float) -> Sums:
        """One pass for all cells: the gradient of a linear layer for one cell is b ⊗ a, of norm ‖b‖ ‖a‖."""
        layers = [m for m in self.model.modules() if isinstance(m, nn.Linear) and m.weight.requires_grad]
        seen: dict[Any, tuple[Tensor, Tensor]] = {}
        calls = []

        def note(layer: Any, given: Any, out: Tensor) -> None:
            seen[layer] = (given[0].detach(), out)
            calls.append(layer)

        hooks = [layer.register_forward_hook(note) for layer in layers]
        try:
            each = weight * F.cross_entropy(self.model(*inputs), y, reduction="none")
        finally:
            for hook in hooks:
                hook.remove()
        if len(calls) != len(layers) or any(seen[layer][0].dim() != 2 for layer in layers):
            return self._clipped_each(inputs, y, weight, share, clip)
        backs = torch.autograd.grad(each.sum(), [seen[layer][1] for layer in layers])
        pairs = {layer: (seen[layer][0], b) for layer, b in zip(layers, backs, strict=True)}
        squares = sum(
            (b.double() ** 2).sum(1) * ((a.double() ** 2).sum(1) + (layer.bias is not None))
            for layer, (a, b) in pairs.items()
        )
        fine = torch.isfinite(torch.as_tensor(squares))
        scale = share.double() * torch.clamp(1 / torch.as_tensor(squares).sqrt(), max=1 / clip)
        parts: dict[int, Tensor] = {}
        for layer, (a, b) in pairs.items():
            scaled = torch.where(fine[:, None], b.double() * scale[:, None], 0.0)
            parts[id(layer.weight)] = (scaled.T @ torch.where(fine[:, None], a.double(), 0.0)).reshape(-1)
            if layer.bias is not None:
                parts[id(layer.bias)] = scaled.sum(0)
        order = [p for p in self.model.parameters() if p.requires_grad]
        return torch.cat([parts[id(p)] for p in order]), float(each.detach()[fine].sum()), int((~fine).sum())

    def _clipped_each(self, inputs: Any, y: Tensor, weight: Tensor, share: Tensor, clip: float) -> Sums:
        """One pass per cell, for any network."""
        order = [p for p in self.model.parameters() if p.requires_grad]
        total, losses, bad = torch.zeros(self.trainable, dtype=torch.float64, device=self.device), 0.0, 0
        for i in range(len(y)):
            loss = weight[i] * F.cross_entropy(self.model(*(x[i : i + 1] for x in inputs)), y[i : i + 1])
            found = torch.autograd.grad(loss, order, allow_unused=True)
            flat = torch.cat([
                (torch.zeros_like(p) if g is None else g).reshape(-1).double()
                for p, g in zip(order, found, strict=True)
            ])  # fmt: skip
            if not bool(torch.isfinite(flat.norm())):
                bad += 1
                continue
            total += flat * float(share[i]) * torch.clamp(1 / flat.norm(), max=1 / clip)
            losses += float(loss.detach())
        return total, losses, bad

    # -- pseudo-labels ---------------------------------------------------------------------------------------------

    def embed(self, theta: Any) -> tuple[Any, Any]:
        return self.features(theta, self.points), self.codes[self.points]

    def teach(self, codes: Any, confidence: Any) -> None:
        known, r = self.codes[self.points], self.recipe
        form = {"scale_confidence": r.scale_confidence, "class_weights": r.class_weights}
        self._learn(codes, pseudo_weights(codes, confidence, known, self.labels, **form))

    def _learn(self, codes: Any, weights: Any) -> None:
        label, weight = np.full(len(self.codes), -1), np.zeros(len(self.codes))
        label[self.points], weight[self.points] = codes, weights
        self.pseudo = label, weight

    def teach_itself(self, theta: Any, source: str, **form: Any) -> None:
        vectors, known = self.embed(theta)
        if source == "network":
            logits = self.logits(theta, self.points)
            p = np.exp(logits - logits.max(axis=1, keepdims=True))
            p /= p.sum(axis=1, keepdims=True)
            sure = 1 + (p * np.log(np.maximum(p, 1e-300))).sum(axis=1) / math.log(self.labels)
            self._learn(p.argmax(axis=1), np.clip(sure, 0.0, 1.0))
        elif len(known) > form["n_neighbors"] and np.any(known >= 0):
            planes = graph.hyperplanes(hashlib.sha256(self.site.encode()).digest(), 4096, vectors.shape[1])
            spread = graph.propagate(graph.codes(vectors, planes), known, n_classes=self.labels, **form)
            self.teach(spread.label, spread.confidence)

    def _move(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(x.to(self.device) for x in inputs)

    def score(self, theta: Any) -> tuple[Any, float]:
        counts, loss = np.zeros((self.labels, self.labels)), 0.0
        if len(self.validation):
            logits = self.logits(theta, self.validation)
            y = self.codes[self.validation]
            np.add.at(counts, (y, logits.argmax(axis=1)), 1)
            top = logits.max(axis=1, keepdims=True)
            log_sum = top[:, 0] + np.log(np.exp(logits - top).sum(axis=1))
            loss = float((log_sum - logits[np.arange(len(y)), y]).sum())
        return counts, loss

    @torch.no_grad()
    def logits(self, theta: Any, at: Any = None) -> Any:
        """(n, K) of the cells at these positions, or of all."""
        return self._forward(theta, at, self.model)

    @torch.no_grad()
    def features(self, theta: Any, at: Any = None) -> Any:
        """What the last layer sees, (n, d)."""
        features: Any = self.model.features
        return self._forward(theta, at, features)

    def _forward(self, theta: Any, at: Any, run: Callable[..., Tensor]) -> Any:
        self.place(theta)
        self.model.eval()
        at = np.arange(len(self.examples)) if at is None else np.asarray(at)
        step, out = 4 * self.recipe.batch_size, []
        for start in range(0, len(at), step):
            inputs = self._move(self.examples.batch(at[start : start + step], None))
            out.append(run(*inputs).float().cpu().numpy())
        return np.concatenate(out).astype(np.float64)


def _cut(order: Any, size: int) -> Iterator[Any]:
    for start in range(0, len(order), size):
        at = order[start : start + size]
        if len(at) > 1 or start == 0:  # one cell alone is no batch for a batch norm
            yield at


def _cycle(order: Any, rng: np.random.Generator) -> Iterator[Any]:
    while len(order):
        yield from order
        order = rng.permutation(order)
