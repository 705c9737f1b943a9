"""Distillation of a student in two stages, and the tuning of its teacher [appendix E, 12–16].

    stage 1   Σ MSE of hidden states, embedding among them, and of raw attention scores
    stage 2   τ²·KL(teacher ‖ student) at τ = 5, and cross-entropy where there are labels
    always    a penalty on scores, variances and denominators that are about to leave their intervals

Each stage has a rate of its own, which falls with a cosine to `decay` of it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cloister.models.student.transformer import Transformer

WITHIN = 3.2  # scores of a teacher that a student is asked to match: it has no place for larger ones
STRONGER = 5.0  # the penalty of `keep_within`, of the usual one

Terms = dict[str, Tensor]  # parts of a loss, by name
History = dict[str, list[float]]  # the mean of each part by epoch


@dataclass(frozen=True)
class Recipe:
    epochs: int = 5  # of each stage
    batch_size: int = 64
    rate: float = 1e-4
    last_rate: float = 1e-5  # of stage 2
    decay: float = 1.0  # of a rate over a stage; 1: it stays
    temperature: float = 5.0
    penalty: float = 1.0
    seed: int = 0


def batches(n: int, size: int, rng: np.random.Generator) -> Iterator[Any]:
    order = rng.permutation(n)
    for start in range(0, n, size):
        yield torch.from_numpy(order[start : start + size])


def tune_teacher(teacher: Transformer, inputs: Tensor, labels: Tensor, recipe: Recipe) -> list[float]:
    """Fine-tune a teacher on the auxiliary set, within the intervals of its student; the mean loss per epoch."""

    def loss(at: Tensor) -> Terms:
        traced = teacher.trace(inputs[at])
        return {"cross-entropy": F.cross_entropy(traced.logits, labels[at]), "ranges": recipe.penalty * traced.penalty}

    return _train(teacher, len(inputs), recipe, recipe.rate, loss)["loss"]


def distil(
    teacher: Transformer, inputs: Tensor, labels: Tensor | None = None, recipe: Recipe | None = None
) -> tuple[Transformer, History]:
    """The student of a teacher, in two stages on an auxiliary set; labels are optional (out of domain).

    The history has the whole loss of each stage (`layers`, `prediction`), and its parts: `layers: attention`, …
    """
    recipe = recipe or Recipe()
    student = copy.deepcopy(teacher)
    student.exact, teacher.exact = False, True
    teacher.eval()

    def layers(at: Tensor) -> Terms:
        with torch.no_grad():
            wanted = teacher.trace(inputs[at])
        traced = student.trace(inputs[at])
        hidden: Any = sum(F.mse_loss(a, b) for a, b in zip(traced.hidden, wanted.hidden, strict=True))
        attention: Any = sum(
            F.mse_loss(a, b.clamp(-WITHIN, WITHIN)) for a, b in zip(traced.scores, wanted.scores, strict=True)
        )
        return {"hidden": hidden, "attention": attention, "ranges": recipe.penalty * traced.penalty}

    first = _train(student, len(inputs), recipe, recipe.rate, layers)
    second = _train(
        student, len(inputs), recipe, recipe.last_rate, _prediction(teacher, student, inputs, labels, recipe)
    )
    return student.eval(), _named("layers", first) | _named("prediction", second)


def keep_within(
    teacher: Transformer,
    student: Transformer,
    inputs: Tensor,
    labels: Tensor | None,
    recipe: Recipe,
) -> History:
    """Stage 2 once more under a stronger penalty, for a student that leaves its intervals."""
    loss = _prediction(teacher, student, inputs, labels, recipe, recipe.penalty * STRONGER)
    found = _train(student, len(inputs), recipe, recipe.rate, loss)
    student.eval()
    return _named("prediction", found)


def _named(stage: str, parts: History) -> History:
    return {stage if name == "loss" else f"{stage}: {name}": values for name, values in parts.items()}


def _prediction(
    teacher: Transformer, student: Transformer, inputs: Tensor, labels: Tensor | None, recipe: Recipe,
    penalty: float | None = None,
) -> Callable[[Tensor], Terms]:  # fmt: skip
    weight = recipe.penalty if penalty is None else penalty

    def prediction(at: Tensor) -> Terms:
        with torch.no_grad():
            wanted = teacher(inputs[at])
        traced, t = student.trace(inputs[at]), recipe.temperature
        far = F.kl_div((traced.logits / t).log_softmax(-1), (wanted / t).log_softmax(-1), log_target=True,
                       reduction="batchmean")  # fmt: skip
        terms = {"KL": t * t * far, "ranges": weight * traced.penalty}
        if labels is not None:
            terms["cross-entropy"] = F.cross_entropy(traced.logits, labels[at])
        return terms

    return prediction


def _train(model: nn.Module, n: int, recipe: Recipe, rate: float, loss_of: Callable[[Tensor], Terms]) -> History:
    rng = np.random.default_rng(recipe.seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    history: History = {"loss": []}
    steps, step = recipe.epochs * -(-n // recipe.batch_size), 0
    for _ in range(recipe.epochs):
        totals: dict[str, float] = {}
        for at in batches(n, recipe.batch_size, rng):
            falling = 0.5 + 0.5 * math.cos(math.pi * step / steps)
            for group in optimizer.param_groups:
                group["lr"] = rate * (recipe.decay + (1 - recipe.decay) * falling)
            terms = loss_of(at)
            loss: Any = sum(terms.values())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            step += 1
            for name, value in {**terms, "loss": loss}.items():
                totals[name] = totals.get(name, 0.0) + float(value.detach()) * len(at) / n
        for name, value in totals.items():
            history.setdefault(name, []).append(value)
    return history
