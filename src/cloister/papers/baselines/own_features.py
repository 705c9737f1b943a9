"""What a site can do without anybody: regularised logistic regression on its own genes or pixels. For researchers.

The features need no provider: log values of the genes, or the columns as they are, each at unit variance over the
site's own cells, labelled or not. The penalty is chosen by cross-validation on the labelled cells, so that nothing is
chosen on the cells that are scored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from cloister.arrays import F64, Array
from cloister.cells import tables as cells
from cloister.errors import DataError
from cloister.papers.baselines.mapping import linear_label

if TYPE_CHECKING:
    from anndata import AnnData

PENALTIES = (300.0, 30.0, 3.0)  # the strongest first: of equal ones it is taken
FOLDS = 3
MOST_GENES = 2000
MOST_TO_CHOOSE = 1500  # labelled cells that choose the penalty
FURTHEST = 10.0  # standard deviations


def own_features(data: Mapping[str, AnnData], *, images: bool = False, target: float = 1e4) -> dict[str, F64]:
    """The features of every site: columns that all sites have, the most variable ones of the first site's own cells.

    Columns are genes, of which counts become log values; or pixels of `images`, which stay as they are.
    """
    names = [n for n in next(iter(data.values())).var_names if all(n in a.var_names for a in data.values())]
    if not names:
        raise DataError("the sites have no gene in common; match gene names first, for example to symbols")
    same = {site: a if list(a.var_names) == names else a[:, names] for site, a in data.items()}
    values = {site: cells.embedding(a, None) if images else log_values(a, target) for site, a in same.items()}
    first = next(iter(values.values()))
    spread = first.var(0) / np.maximum(first.mean(0), 1e-3) if first.min() >= 0 else first.var(0)
    kept = np.sort(np.argsort(-spread, kind="stable")[:MOST_GENES])
    found = {}
    for site, x in values.items():
        x = x[:, kept]
        found[site] = np.clip((x - x.mean(0)) / (x.std(0) + 1e-6), -FURTHEST, FURTHEST)
    return found


def log_values(adata: AnnData, target: float) -> F64:
    """Log of counts per `target`; other values as they are."""
    x = cells.embedding(adata, None)
    if cells.expression_kind(adata) != "counts":
        return x
    return np.asarray(np.log1p(x / np.maximum(x.sum(axis=1, keepdims=True), 1.0) * target))


def own_labels(q: F64, r: F64, names: Array) -> Array:
    """Labels of the rows of q by a regression on the rows of r, whose penalty cross-validation on r chooses.

    Without a labelled row there is no label: all are empty.
    """
    if not len(r):
        return np.full(len(q), "", dtype=object)
    q, r = onto_rows(q, r)
    return linear_label(q, r, names, penalty=chosen_penalty(r, names))


def onto_rows(q: F64, r: F64) -> tuple[F64, F64]:
    """Both in the span of r, where the coefficients of a regression with a squared penalty lie: the same model."""
    if r.shape[1] <= len(r):
        return q, r
    basis = np.linalg.svd(r, full_matrices=False)[2].T
    return q @ basis, r @ basis


def chosen_penalty(r: F64, names: Array) -> float:
    """The strongest penalty of those with the most correct labels in the left-out folds."""
    if len(names) > MOST_TO_CHOOSE:
        some = np.random.default_rng(0).permutation(len(names))[:MOST_TO_CHOOSE]
        r, names = r[some], names[some]
    fold = folds_of(names)
    inside = [k for k in range(FOLDS) if len(np.unique(names[fold != k])) > 1 and (fold == k).any()]

    def right(penalty: float) -> int:
        found = 0
        for k in inside:
            q, some = onto_rows(r[fold == k], r[fold != k])
            found += int((linear_label(q, some, names[fold != k], penalty) == names[fold == k]).sum())
        return found

    score: dict[float, Any] = {penalty: right(penalty) for penalty in PENALTIES}
    return max(PENALTIES, key=score.__getitem__) if any(score.values()) else PENALTIES[1]


def folds_of(names: Array) -> Array:
    """A fold for every cell, each label spread over them; a label's only cell is never left out (-1)."""
    rng, fold = np.random.default_rng(0), np.full(len(names), -1)
    for name in np.unique(names):
        at = rng.permutation(np.flatnonzero(names == name))
        if len(at) > 1:
            fold[at] = (np.arange(len(at)) + rng.integers(FOLDS)) % FOLDS
    return fold
