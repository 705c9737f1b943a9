"""What every demo shares: the columns of the table, what a run cost, a score, logistic regressions to compare with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from cloister.mpc.net.events import Event
from cloister.papers.baselines.mapping import linear_label
from cloister.rehearsal.run import Run
from cloister.report.parts import size

HEADER = ("workflow", "mode", "measure", "alone", "together", "pooled", "attack", "sent", "seconds")
Tell: TypeAlias = Callable[[Event], None] | None
Played: TypeAlias = tuple[list[Run], list[tuple[Any, ...]]]  # the runs, and their rows of the table


def halves(rows: list[tuple[Any, ...]]) -> dict[str, list[tuple[Any, ...]]]:
    """The table in two that are narrow enough to be read: what comes out and costs, and what an attack makes of it."""
    at = HEADER.index("attack")
    return {
        "What comes out, and what it costs": [row[:at] + row[at + 1 :] for row in rows],
        "What an attack makes of what it gets to see": [(f"{row[0]}, {row[1]}", row[at]) for row in rows],
    }


def cost_of(run: Run) -> tuple[str, str]:
    """What a site sent, on average, and the seconds of the whole run."""
    sites = [run.cost[p] for p in run.study.sites if p in run.cost]
    sent = float(np.mean([c["bytes"] for c in sites]))
    return size(sent), f"{max(c['seconds'] for c in run.cost.values()):.1f}"


def auroc(scores: Any, truth: Any) -> float:
    """How often an outlier scores above an inlier; ties count half."""
    from scipy.stats import rankdata

    ranks = rankdata(scores)
    n = int(truth.sum())
    return float((ranks[truth].sum() - n * (n + 1) / 2) / (n * (len(truth) - n)))


def linear_figures(
    x: dict[str, Any], truth: dict[str, Any], held: dict[str, Any], seen: dict[str, Any], l2: float | None = None
) -> tuple[float, float]:
    """Accuracy on the kept cells: logistic regressions on each site's own labels, and one on all sites' labels."""

    def linear(names: list[str], asked: list[str]) -> Any:
        labels = np.concatenate([truth[q][seen[q]] for q in names])
        penalty = 1.0 if l2 is None else l2 * len(labels)
        at = np.concatenate([x[q][held[q]] for q in asked])
        return linear_label(at, np.concatenate([x[q][seen[q]] for q in names]), labels, penalty=penalty)

    wanted = np.concatenate([truth[p][held[p]] for p in x])
    alone = np.concatenate([linear([p], [p]) for p in x])
    return float(np.mean(alone == wanted)), float(np.mean(linear([*x], [*x]) == wanted))


def right_of(predicted: dict[str, Any], truth: dict[str, Any], held: dict[str, Any]) -> float:
    """Accuracy on the kept cells of what was predicted for all."""
    return float(np.mean(np.concatenate([(predicted[p] == truth[p])[held[p]] for p in truth])))


def percent(*values: float) -> tuple[str, ...]:
    return tuple(f"{v:.1%}" for v in values)
