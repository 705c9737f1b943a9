"""What an opened CellCnn says about cells: responses, accuracy on donors, consensus of several models, figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from cloister.cells import genes
from cloister.cells import tables as cells
from cloister.errors import DataError
from cloister.models import cellcnn
from cloister.net.seat import Outcome
from cloister.protocols.sums.columns import match_columns
from cloister.report.figures import COLOURS, canvas, heatmap, histograms

if TYPE_CHECKING:
    from anndata import AnnData

    from cloister.workflows.train_cellcnn import Options


def report(adata: AnnData, made: cellcnn.Model, prepared: Any) -> None:
    """What an opened model says about this site's own cells."""
    assert made.weights is not None
    adata.obs["cellcnn_response"] = made.response(prepared, len(made.classes) - 1)
    adata.uns.setdefault("cloister", {})["cellcnn"] = {
        "filters": made.weights.W.T,
        "dense": made.weights.V,
        "markers": list(made.markers),
        "classes": list(made.classes),
    }


def accuracy(made: cellcnn.Model, adata: AnnData, options: Options) -> dict[str, Any]:
    """Of an opened model on this site's donors, each by the mean of all its cells."""
    X, names, truth = donor_means(made, adata, options.sample_key, options.target_key)
    if made.weights is None or truth is None:
        return {}
    U = made.logits(X)
    found = [made.classes[k] for k in cellcnn.predict(U)]
    outside = int((np.abs(U) > made.config.interval).sum())
    result: dict[str, Any] = {
        "donors": len(names),
        "donor_accuracy": float(np.mean([a == b for a, b in zip(found, truth, strict=True)])),
        "logits_outside_interval": outside,
        "logits": int(U.size),
    }
    if outside:
        result["warning"] = (
            f"{outside} of {U.size} logits lie outside ±{made.config.interval:g}, where the polynomial is no sigmoid"
            " any more; train again with a larger interval= or a lower learning_rate="
        )
    return result


def donor_means(
    made: cellcnn.Model, adata: AnnData, sample_key: str, target_key: str | None = None
) -> tuple[Any, list[str], list[str] | None]:
    """One prepared mean per donor, their names, and their classes if known."""
    if sample_key not in adata.obs:
        raise DataError(f"adata.obs['{sample_key}'] is missing; name the column of donors with sample_key=")
    at = match_columns([str(v) for v in adata.var_names], made.markers)
    prepared = made.prepare(cells.embedding(adata, None)[:, at])
    names = adata.obs[sample_key].astype(str).to_numpy()
    donors = sorted(set(names))
    X = np.stack([prepared[names == d].mean(axis=0) for d in donors])
    if target_key is None or target_key not in adata.obs:
        return X, donors, None
    classes = adata.obs[target_key].astype(str).to_numpy()
    return X, donors, [str(classes[names == d][0]) for d in donors]


def consensus(models: Sequence[cellcnn.Model], scores: Sequence[float]) -> dict[str, Any]:
    """One filter for each cluster among the filters of the best three models."""
    W, V = cellcnn.consensus_filters([m.weights for m in models if m.weights is not None], scores)
    return {"consensus_filters": W.tolist(), "consensus_dense": V.tolist()}


def figures(outcomes: Mapping[str, Outcome], options: Options) -> list[Any]:
    """Filters by markers; how many cells each donor has that the positive filter selects; their markers."""
    opened = {p: o for p, o in sorted(outcomes.items()) if o.result.get("opened")}
    if not opened:
        return []
    result = next(iter(opened.values())).result
    label = result["classes"][-1]
    V = np.array(result.get("consensus_dense", result["dense"]))
    W = np.array(result.get("consensus_filters", result["filters"]))
    strength = V[:, -1] - V[:, :-1].mean(axis=1)
    order = np.argsort(-strength)
    drawn = [
        heatmap(
            W[order],
            [f"filter {k + 1} ({strength[k]:+.2f})" for k in order],
            result["markers"],
            title="Consensus filters by markers" if "consensus_filters" in result else "Filters by markers",
            rows=f"filter, and how much it speaks for '{label}'",
            columns="marker",
            alt=f"Weights of {len(V)} filters on {len(result['markers'])} markers, strongest for '{label}' first.",
        )
    ]
    tables = {p: o.adata for p, o in opened.items() if o.adata is not None and "cellcnn_response" in o.adata.obs}
    if not tables:
        return drawn
    responses = np.concatenate([a.obs["cellcnn_response"].to_numpy() for a in tables.values()])
    bar = float(np.quantile(responses, 0.9))
    shares: dict[str, list[float]] = {}
    for a in tables.values():
        chosen = a.obs["cellcnn_response"].to_numpy() > bar
        for donor in a.obs[options.sample_key].unique():
            of_donor = (a.obs[options.sample_key] == donor).to_numpy()
            kind = str(a.obs[options.target_key][of_donor].iloc[0])
            shares.setdefault(kind, []).append(float(chosen[of_donor].mean()))
    with canvas() as c:
        kinds = sorted(shares)
        c.axis.boxplot([shares[k] for k in kinds], tick_labels=kinds, medianprops={"color": COLOURS[0]})
        c.axis.set(ylabel="share of selected cells per donor")
        middle = ", ".join(f"{k}: {np.median(shares[k]):.3f}" for k in kinds)
        drawn.append(c.done("Cells selected by the positive filter", f"Medians per donor: {middle}."))
    top = np.argsort(-np.abs(W[order[0]]))[:2]
    for j in top:
        name = result["markers"][j]
        every = np.concatenate([np.asarray(cells.embedding(a, None))[:, _column(a, name)] for a in tables.values()])
        drawn.append(
            histograms(
                {"all cells": every, "selected cells": every[responses > bar]},
                title=f"{name} in selected cells",
                xlabel=name,
            )
        )
    return drawn


def _column(adata: AnnData, name: str) -> int:
    return [genes.plain_name(str(v)) for v in adata.var_names].index(name)
