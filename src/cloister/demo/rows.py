"""What every demo shares: the columns of the table, what a run cost, a score, labels that are hidden to be found."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeAlias

import numpy as np

from cloister.cells import demo as demo_data
from cloister.net.events import Event
from cloister.report.parts import size
from cloister.run.run import Run
from cloister.workflows.baselines.mapping import linear_label

HEADER = ("workflow", "mode", "measure", "pooled", "federated", "alone", "attack", "sent", "seconds")
EPITHELIUM = ("AT1", "AT2", "basal", "ciliated", "secretory")
STROMA = ("endothelial", "fibroblast", "pericyte", "smooth muscle")
IMMUNE = ("B", "NK/NKT", "T", "basophil/mast", "dendritic", "macrophage", "monocyte", "plasma")
KNOWN = {"basel": EPITHELIUM, "lugano": STROMA, "vienna": IMMUNE}  # which cells a site has labelled
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


def hide_labels(share: float, known: Mapping[str, Collection[str]]) -> tuple[dict[str, Any], ...]:
    """Cells of which each site has labelled the kinds that it knows, and of which a share of all is kept for scores.

    Returns cells, all labels, which cells are kept for scores, and which have a label left. By site.
    """
    import pandas as pd

    rng = np.random.default_rng(0)
    sites, truth, held, seen = {}, {}, {}, {}
    for p, a in demo_data.demo_sites().items():
        if p not in known:
            continue
        truth[p] = a.obs["cell_type"].astype(str).to_numpy().copy()
        held[p] = rng.random(a.n_obs) < share
        seen[p] = np.isin(truth[p], [*known[p]]) & ~held[p]
        a.obs["cell_type"] = pd.Categorical(np.where(seen[p], truth[p], None))
        sites[p] = a
    return sites, truth, held, seen


def linear_figures(
    x: dict[str, Any], truth: dict[str, Any], held: dict[str, Any], seen: dict[str, Any], predicted: dict[str, Any]
) -> list[str]:
    """Accuracy on the kept cells: logistic regression on all sites' labels, what was found, on each site's own."""

    def linear(names: list[str], p: str) -> Any:
        return linear_label(
            x[p][held[p]],
            np.concatenate([x[q][seen[q]] for q in names]),
            np.concatenate([truth[q][seen[q]] for q in names]),
        )

    def right(labels: Callable[[str], Any]) -> str:
        return f"{np.mean(np.concatenate([labels(p) == truth[p][held[p]] for p in x])):.1%}"

    return [right(lambda p: linear([*x], p)), right(lambda p: predicted[p][held[p]]), right(lambda p: linear([p], p))]
