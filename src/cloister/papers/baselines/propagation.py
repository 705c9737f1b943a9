"""What a propagation is measured against: each site alone, pooled cells, FedAvg, k-NN, a linear model. For researchers.

    table = cl.propagation_baselines(sites, label_key="some", truth_key="cell_type", use_rep="X_pca")
    table["pooled logistic regression"]["balanced_accuracy"]

All of them see only the labels of `label_key`; `truth_key` scores the cells that have none there. Everything here needs
all cells in one place, which is what the propagation itself avoids.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from cloister.arrays import F64, I64, Bits
from cloister.cells import tables as cells
from cloister.errors import DataError, ParameterError
from cloister.models import graph
from cloister.papers.baselines.mapping import linear_label, nearest_label
from cloister.study import Party
from cloister.workflows.propagate_labels import class_means
from cloister.workflows.propagate_labels.workflow import Options

if TYPE_CHECKING:
    from anndata import AnnData

TWO = (Party("one"), Party("two"))  # class means know no fewer sites; who they are changes nothing
ROUNDS, STEPS, RATE = 60, 5, 3.0  # of FedAvg: rounds, steps of every site in each, and how long these are


def balanced_accuracy(truth: I64, found: I64) -> float:
    """The mean over the classes that occur of the share that is found; a missing label (-1) is wrong."""
    return float(np.mean([(found[truth == c] == c).mean() for c in np.unique(truth)]))


def spread_label(x: F64, y: I64, n_classes: int, options: Options | None = None) -> I64:
    """Propagation of the given labels (-1: none) over a graph of these cells, as `propagate-labels` would."""
    options = options or Options()
    if not (y >= 0).any() or len(x) < 2:
        return np.full(len(x), -1)
    spread = graph.propagate(
        graph.codes(x, graph.hyperplanes(bytes(32), options.bits, x.shape[1])),
        y,
        n_classes=n_classes,
        n_neighbors=min(options.n_neighbors, len(x) - 1),
        alpha=options.alpha,
        power=options.power,
        balance=options.balance,
        exact=False,
    )
    if not options.class_means:
        return spread.label
    counts, v = np.bincount(y[y >= 0], minlength=n_classes), class_means.directions(x)
    terms = class_means.Params(TWO, Party("hub"), tuple(counts.tolist()), x.shape[1], options.class_means_from)
    near = class_means.closeness(v, class_means.sums_of(terms, v[y >= 0], y[y >= 0]))
    return graph.decide(spread.scores, counts if options.balance else None, near, options.class_means)[0]


def averaged_label(x: F64, y: I64, sites: I64, n_classes: int) -> I64:
    """A softmax classifier trained by FedAvg on the labelled cells of every site."""
    known = y >= 0
    x = (x - x[known].mean(axis=0)) / ((x[known].std() + 1e-9) * math.sqrt(x.shape[1]))
    parts = [
        (x[m], graph.one_hot(y[m], n_classes)) for m in ((sites == s) & known for s in np.unique(sites)) if m.any()
    ]
    total, theta = known.sum(), np.zeros((x.shape[1], n_classes))
    for _ in range(ROUNDS):
        mean = np.zeros_like(theta)
        for rows, target in parts:
            mine = theta.copy()
            for _ in range(STEPS):
                z = rows @ mine
                p = np.exp(z - z.max(axis=1, keepdims=True))
                mine -= RATE / len(rows) * rows.T @ (p / p.sum(axis=1, keepdims=True) - target)
            mean += len(rows) / total * mine
        theta = mean
    return np.asarray((x @ theta).argmax(axis=1))


def baselines_of(x: F64, y: I64, sites: I64, n_classes: int, options: Options | None = None) -> dict[str, I64]:
    """Name of the baseline → a class for every cell, from the labels in y (-1: none)."""
    known = y >= 0
    alone = np.full(len(y), -1)
    for s in np.unique(sites):
        alone[sites == s] = spread_label(x[sites == s], y[sites == s], n_classes, options)
    published = Options(n_neighbors=10, alpha=0.99, power=1.0, balance=False)
    return {
        "each site alone": alone,
        "pooled propagation": spread_label(x, y, n_classes, options),
        "pooled propagation as published": spread_label(x, y, n_classes, published),
        "FedAvg": averaged_label(x, y, sites, n_classes),
        "pooled 1-NN": nearest_label(x, x[known], y[known], 1)[0],
        "pooled 5-NN": nearest_label(x, x[known], y[known], 5)[0],
        "pooled logistic regression": linear_label(x, x[known], y[known]),
    }


def propagation_baselines(
    data: Mapping[str, AnnData], *, label_key: str, truth_key: str, use_rep: str = "X_pca", **options: Any
) -> dict[str, dict[str, Any]]:
    """Label the cells without a label in the ways that need no protocol, and score them by their true labels.

    Further options are those of `propagate-labels` (`n_neighbors`, `alpha`, `power`, `balance`, `bits`).

    Returns
    -------
    Name of the baseline → `accuracy`, `balanced_accuracy`, and `labels`: site → one name or None per cell.
    """
    if len(data) < 2 or label_key == truth_key:
        raise ParameterError("expected two sites or more, and a column of true labels besides the given ones")
    for site, adata in data.items():
        for key in (label_key, truth_key):
            if key not in adata.obs:
                raise DataError(f"site '{site}': adata.obs[{key!r}] is missing; pass label_key= and truth_key=")
    names = {key: [_names(adata, key) for adata in data.values()] for key in (label_key, truth_key)}
    given, truth = (np.concatenate(names[key]) for key in (label_key, truth_key))
    classes = sorted({str(n) for n in (*given, *truth) if n is not None})
    y, true = (np.array([-1 if n is None else classes.index(n) for n in part]) for part in (given, truth))
    asked: Bits = (y < 0) & (true >= 0)
    if not (y >= 0).any() or not asked.any():
        raise DataError("expected some cells with a given label, and some without one whose true label is known")
    x = np.concatenate([cells.embedding(adata, use_rep) for adata in data.values()])
    sizes = [adata.n_obs for adata in data.values()]
    found = baselines_of(x, y, np.repeat(np.arange(len(sizes)), sizes), len(classes), Options(**options))
    made: dict[str, dict[str, Any]] = {}
    for name, label in found.items():
        told = np.array([classes[i] if i >= 0 else None for i in label], object)
        made[name] = {
            "accuracy": float((label == true)[asked].mean()),
            "balanced_accuracy": balanced_accuracy(true[asked], label[asked]),
            "labels": dict(zip(data, np.split(told, np.cumsum(sizes)[:-1]), strict=True)),
        }
    return made


def _names(adata: AnnData, key: str) -> Any:
    column = adata.obs[key]
    return np.array([None if gone else str(n) for n, gone in zip(column, column.isna(), strict=True)], object)
