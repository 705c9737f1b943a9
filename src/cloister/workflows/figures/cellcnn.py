"""What an opened CellCnn says about cells: responses, accuracy on donors, consensus of several models, figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from cloister.cells import genes
from cloister.cells import tables as cells
from cloister.errors import DataError, ParameterError
from cloister.models import cellcnn
from cloister.net.seat import Outcome
from cloister.protocols.sums.columns import match_columns
from cloister.report.figures import COLOURS, canvas, heatmap, histograms

if TYPE_CHECKING:
    from anndata import AnnData

    from cloister.workflows.train_cellcnn import Options


def positive(options: Options, classes: Sequence[str]) -> str:
    """The class whose cells a report looks for."""
    if options.positive_class is None:
        return classes[-1]
    if options.positive_class not in classes:
        raise ParameterError(f"option 'positive_class' must be one of {', '.join(classes)}; the sites have no other")
    return options.positive_class


def report(adata: AnnData, made: cellcnn.Model, prepared: Any, label: str) -> None:
    """What an opened model says about this site's own cells."""
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
    """Filters by markers; how many cells of each donor the filter for each class selects; markers of those selected."""
    opened = {p: o for p, o in sorted(outcomes.items()) if o.result.get("opened")}
    if not opened:
        return []
    result = next(iter(opened.values())).result
    classes = list(result["classes"])
    label = positive(options, classes)
    V = np.array(result.get("consensus_dense", result["dense"]))
    W = np.array(result.get("consensus_filters", result["filters"]))
    k = classes.index(label)
    strength = V[:, k] - np.delete(V, k, axis=1).mean(axis=1)
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
    tables = [o.adata for o in opened.values() if o.adata is not None and "cellcnn_responses" in o.adata.obsm]
    if not tables:
        return drawn
    for name in (label, *(c for c in classes if c != label)):
        drawn.append(_selected_per_donor(tables, name, options))
    chosen = np.concatenate(selected(tables, label))
    for j in np.argsort(-np.abs(W[order[0]]))[:2]:
        marker = result["markers"][j]
        every = np.concatenate([np.asarray(cells.embedding(a, None))[:, _column(a, marker)] for a in tables])
        drawn.append(
            histograms(
                {"all cells": every, "selected cells": every[chosen]},
                title=f"{marker} in cells selected for {label}",
                xlabel=marker,
            )
        )
    return drawn


def selected(tables: Sequence[AnnData], label: str, share: float = 0.1) -> list[Any]:
    """At each site, the cells among the `share` of all that respond most to the filter for that class."""
    at = [list(a.uns["cloister"]["cellcnn"]["classes"]).index(label) for a in tables]
    responses = [np.asarray(a.obsm["cellcnn_responses"])[:, k] for a, k in zip(tables, at, strict=True)]
    bar = float(np.quantile(np.concatenate(responses), 1 - share))
    return [r > bar for r in responses]


def _selected_per_donor(tables: Sequence[AnnData], label: str, options: Options) -> Any:
    """A box for each class of donors: which share of a donor's cells is selected for `label`."""
    shares: dict[str, list[float]] = {}
    for a, chosen in zip(tables, selected(tables, label), strict=True):
        for donor in a.obs[options.sample_key].unique():
            of_donor = (a.obs[options.sample_key] == donor).to_numpy()
            kind = str(a.obs[options.target_key][of_donor].iloc[0])
            shares.setdefault(kind, []).append(float(chosen[of_donor].mean()))
    with canvas() as c:
        kinds = sorted(shares)
        c.axis.boxplot([shares[k] for k in kinds], tick_labels=kinds, medianprops={"color": COLOURS[0]})
        c.axis.set(ylabel="share of selected cells per donor")
        middle = ", ".join(f"{k}: {np.median(shares[k]):.3f}" for k in kinds)
        return c.done(f"Cells selected by the filter for {label}", f"Medians per donor: {middle}.")


def _column(adata: AnnData, name: str) -> int:
    return [genes.plain_name(str(v)) for v in adata.var_names].index(name)
