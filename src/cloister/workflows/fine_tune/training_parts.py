"""What federated training asks of a site's model, what its coordinator keeps, and scores from pooled counts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from cloister.arrays import F32, F64, I64
from cloister.disclosure import Thresholds

CURVES = ("round", "accuracy", "balanced_accuracy", "macro_f1", "loss", "cells", "clients", "train_loss")
WHOLE = ("round", "cells", "clients")
TIE = 1e-9  # what a loss counts for beside a score: less than one cell of all there are


class Learner(Protocol):
    """A site's model and cells, behind vectors: all that the protocol asks of them. Plain and local."""

    size: int  # P
    digest: bytes  # of architecture and first weights
    cells: int  # n_u

    def train(self, theta: F32, t: int, rate: float) -> tuple[F64, float]:
        """Δ after the local epochs from w_0 + θ, and the mean training loss."""

    def score(self, theta: F32) -> tuple[F64, float]:
        """Counts of true by predicted label (K, K) on the validation cells, and the sum of their losses."""

    def embed(self, theta: F32) -> tuple[F64, I64]:
        """What the last layer sees of every cell that may train, (m, d), and the codes of their labels, -1 for none."""

    def teach(self, codes: Sequence[int], confidence: F64) -> None:
        """Labels of those cells for the next `train`, and how much they count; -1 for none."""

    def teach_itself(self, theta: F32, source: str, **form: Any) -> None:
        """The same from the model's own predictions (`network`), or from a graph of this site's cells (`client`).

        `form`: `n_neighbors`, `alpha`, `power` and `balance` of that graph.
        """


class Store(Protocol):
    """Where the coordinator keeps its state between rounds."""

    def save(self, state: State) -> None: ...

    def load(self) -> State | None: ...


@dataclass(slots=True)
class State:
    """All that the coordinator needs to go on after round t."""

    digest: bytes  # of what is trained
    t: int
    theta: F64
    best: F64
    best_at: int = -1
    best_score: float = -math.inf
    history: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Offer:
    """What a site brings: how its cells go into the model, which labels they carry, and how to build the model."""

    shape: str
    labels: tuple[str, ...]
    build: Callable[[tuple[str, ...]], Learner]
    thresholds: Thresholds | None = None  # this site's minimum group sizes; those of the study by default


@dataclass(frozen=True, slots=True)
class Trained:
    theta: F32  # what was learned on top of w_0
    labels: tuple[str, ...]
    history: list[dict[str, Any]]
    best_round: int
    learner: Learner | None = None  # at a site
    notes: tuple[str, ...] = ()  # for this party alone


def metrics(confusion: F64, loss: float) -> dict[str, float]:
    """Accuracy of all cells and as a mean over labels (balanced), macro-F1 over labels that occur, mean loss."""
    n = confusion.sum()
    if n == 0:
        return dict.fromkeys(("accuracy", "balanced_accuracy", "macro_f1", "loss"), math.nan) | {"cells": 0}
    right, true, called = np.diag(confusion), confusion.sum(axis=1), confusion.sum(axis=0)
    there = true > 0
    f1 = 2 * right[there] / np.maximum(true[there] + called[there], 1e-300)
    return {
        "accuracy": float(right.sum() / n),
        "balanced_accuracy": float((right[there] / true[there]).mean()),
        "macro_f1": float(f1.mean()),
        "loss": float(loss / n),
        "cells": int(n),
    }


def better(metric: str, scored: dict[str, Any]) -> float:
    """The metric, so that more is better; of equals the one of lower loss, since few validation cells often tie."""
    value, loss = float(scored[metric]), float(scored["loss"])
    if math.isnan(value):
        return -math.inf
    return -value if metric == "loss" else value - TIE * loss / (1 + loss)


def to_curves(history: list[dict[str, Any]]) -> F64:
    """The history as a table of fixed width, so that its size says nothing."""
    return np.array([[float(row.get(key, math.nan)) for key in CURVES] for row in history]).reshape(-1, len(CURVES))


def from_curves(curves: F64) -> list[dict[str, Any]]:
    rows = []
    for line in curves:
        known = {key: float(v) for key, v in zip(CURVES, line, strict=True) if math.isfinite(v)}
        rows.append({key: int(v) if key in WHOLE else v for key, v in known.items()})
    return rows
