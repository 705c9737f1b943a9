"""The cells that an opened CellCnn selects for a class, and the kinds of cells among them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from cloister.arrays import F64, I64
from cloister.cells import tables as cells
from cloister.models import cellcnn
from cloister.workflows.common.columns import match_columns

if TYPE_CHECKING:
    from anndata import AnnData

SHARE = 0.1  # of the cells at hand is selected
MOST_CELLS = 5000  # selected cells that are clustered
LEAST_CLUSTER = 0.05  # of the selected cells


def report(adata: AnnData, made: cellcnn.Model, prepared: F64, label: str) -> dict[str, Any]:
    """Write what an opened model says about this site's own cells; return the clusters of those that it selects."""
    assert made.weights is not None
    responses = np.column_stack([made.response(prepared, k) for k in range(len(made.classes))])
    adata.obs["cellcnn_response"] = responses[:, made.classes.index(label)]
    adata.obsm["cellcnn_responses"] = responses
    adata.uns.setdefault("cloister", {})["cellcnn"] = {
        "filters": made.weights.W.T,
        "dense": made.weights.V,
        "markers": list(made.markers),
        "classes": list(made.classes),
        "positive_class": label,
        "cofactor": made.cofactor,
        "mean": made.mean,
        "scale": made.scale,
    }
    chosen = np.flatnonzero(selected([adata], label)[0])
    adata.obs["cellcnn_cluster"] = ""
    if len(chosen) == 0:
        return {}
    kind = clusters(prepared[chosen])
    adata.obs.iloc[chosen, adata.obs.columns.get_loc("cellcnn_cluster")] = [str(k + 1) for k in kind]
    rows = []
    for k in np.unique(kind):
        middle = prepared[chosen[kind == k]].mean(axis=0)
        high = [f"{made.markers[j]} {middle[j]:+.1f}" for j in np.argsort(-np.abs(middle))[:4]]
        rows.append({"cluster": int(k) + 1, "cells": int((kind == k).sum()), "markers": ", ".join(high)})
    return {"selected_clusters": rows}


def selected(tables: Sequence[AnnData], label: str, share: float = SHARE) -> list[Any]:
    """At each site, the cells among the `share` of all that respond most to the filter for that class."""
    at = [list(a.uns["cloister"]["cellcnn"]["classes"]).index(label) for a in tables]
    responses = [np.asarray(a.obsm["cellcnn_responses"])[:, k] for a, k in zip(tables, at, strict=True)]
    bar = float(np.quantile(np.concatenate(responses), 1 - share))
    return [r > bar for r in responses]


def marker_values(adata: AnnData) -> F64:
    """The cells in the units of the training: markers in its order, standardised as there."""
    kept = adata.uns["cloister"]["cellcnn"]
    at = match_columns([str(v) for v in adata.var_names], tuple(kept["markers"]))
    x = cells.embedding(adata, None)[:, at]
    return cellcnn.standardise(x, float(kept["cofactor"]), np.asarray(kept["mean"]), np.asarray(kept["scale"]))


def clusters(Z: F64) -> I64:
    """Clusters by density, the largest first: every cell goes uphill, to its nearest denser neighbour, up to a peak.

    In five principal components; a peak with less than `LEAST_CLUSTER` of the cells joins the nearest of the others.
    """
    from scipy.spatial import KDTree

    if len(Z) > MOST_CELLS:  # the others go where the nearest of these is
        few = np.linspace(0, len(Z) - 1, MOST_CELLS).astype(np.int64)
        return np.asarray(clusters(Z[few])[KDTree(Z[few]).query(Z)[1]], np.int64)
    n = len(Z)
    if n < 3:
        return np.zeros(n, np.int64)
    C = Z - Z.mean(axis=0)
    C = C @ np.linalg.svd(C, full_matrices=False)[2][:5].T
    reach, near = KDTree(C).query(C, 1 + min(n - 1, max(10, n // 10)))
    height = -reach.mean(axis=1)
    higher = height[near] > height[:, None]
    peak = np.where(higher.any(axis=1), near[np.arange(n), higher.argmax(axis=1)], np.arange(n))
    while (peak[peak] != peak).any():
        peak = peak[peak]
    peaks, sizes = np.unique(peak, return_counts=True)
    kept = peaks[sizes >= max(2, LEAST_CLUSTER * n)] if (sizes >= max(2, LEAST_CLUSTER * n)).any() else peaks
    joins = kept[KDTree(C[kept]).query(C[peak])[1]]
    kinds, counts = np.unique(joins, return_counts=True)
    order = kinds[np.argsort(-counts, kind="stable")]
    return np.asarray([int(np.flatnonzero(order == j)[0]) for j in joins], np.int64)
