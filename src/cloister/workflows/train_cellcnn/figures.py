"""What an opened CellCnn says: accuracy on donors, consensus of several models, figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from cloister.cells import tables as cells
from cloister.errors import DataError, ParameterError
from cloister.models import cellcnn
from cloister.report.figures import COLOURS, canvas, heatmap, shown
from cloister.session import Outcome
from cloister.workflows.common.columns import match_columns
from cloister.workflows.train_cellcnn.response import marker_values, selected

if TYPE_CHECKING:
    from anndata import AnnData

MOST_MARKERS = 48  # in a figure


class Columns(Protocol):
    """The options that name columns of obs, and the class of interest."""

    @property
    def sample_key(self) -> str: ...
    @property
    def target_key(self) -> str: ...
    @property
    def positive_class(self) -> str | None: ...


def positive(options: Columns, classes: Sequence[str]) -> str:
    """The class whose cells a report looks for."""
    if options.positive_class is None:
        return classes[-1]
    if options.positive_class not in classes:
        raise ParameterError(f"option 'positive_class' must be one of {', '.join(classes)}; the sites have no other")
    return options.positive_class


def accuracy(made: cellcnn.Model, adata: AnnData, options: Columns) -> dict[str, Any]:
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
            f"{outside} of {U.size} logits lie outside ±{made.config.interval:g}, where the polynomial is not a sigmoid"
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


def figures(outcomes: Mapping[str, Outcome], options: Columns) -> list[Any]:
    """Filters by markers; how many cells of each donor each class's filter selects; their markers and clusters."""
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
    drawn.append(marker_histograms(tables, label, result["markers"]))
    return drawn + cluster_means({p: o.adata for p, o in opened.items() if o.adata is not None}, label)


def marker_histograms(tables: Sequence[AnnData], label: str, markers: Sequence[str]) -> Any:
    """Every marker, standardised, in all cells and in the selected ones; those that differ most come first."""
    every = np.concatenate([marker_values(a) for a in tables])
    chosen = every[np.concatenate(selected(tables, label))]
    gap = [_gap(every[:, j], chosen[:, j]) for j in range(len(markers))]
    order = np.argsort(-np.array(gap), kind="stable")[:MOST_MARKERS]
    across = min(6, len(order))
    down = -(-len(order) // across)
    with canvas(across, width=1.0 + 1.5 * across, height=0.8 + 1.25 * down, rows=down) as c:
        for axis, j in zip(c.axes, order, strict=False):
            low, high = (float(v) for v in np.quantile(every[:, j], (0.001, 0.999)))
            edges = np.linspace(low - 1e-9, high + 1e-9, 31)
            for name, values, colour, style in (
                ("all cells", every[:, j], COLOURS[0], "-"),
                ("selected cells", chosen[:, j], COLOURS[1], "--"),
            ):
                share = np.histogram(np.clip(values, edges[0], edges[-1]), edges)[0] / max(len(values), 1)
                axis.stairs(share, edges, lw=1.3, color=colour, ls=style, label=name)
            axis.set_title(shown(markers[j], 16), fontsize=8)
            axis.set_yticks([])
            axis.tick_params(labelsize=7)
        for axis in c.axes[len(order) :]:
            axis.set_visible(False)
        c.paper.legend(*c.axis.get_legend_handles_labels(), loc="outside lower center", ncols=2)
        told = ", ".join(f"{markers[j]} ({np.median(chosen[:, j]):+.1f})" for j in order[:4])
        alt = f"Histograms of {len(order)} standardised markers in all cells and in the cells selected for '{label}'."
        return c.done(f"Markers of the cells selected for {label}", f"{alt} Furthest apart, with medians: {told}.")


def _gap(every: Any, chosen: Any) -> float:
    """Largest distance of the two distribution functions (Kolmogorov and Smirnov's)."""
    if len(chosen) == 0:
        return 0.0
    at = np.sort(chosen)
    below = np.searchsorted(np.sort(every), at, side="right") / len(every)
    return float(np.abs(below - np.searchsorted(at, at, side="right") / len(at)).max())


def cluster_means(tables: Mapping[str, AnnData], label: str) -> list[Any]:
    """Mean of every marker in each cluster of a site's selected cells."""
    rows, names, markers = [], [], []
    for party, adata in tables.items():
        if "cellcnn_cluster" not in adata.obs:
            continue
        kind, values = adata.obs["cellcnn_cluster"].astype(str).to_numpy(), marker_values(adata)
        markers = list(adata.uns["cloister"]["cellcnn"]["markers"])
        for k in sorted(set(kind) - {""}, key=int):
            rows.append(values[kind == k].mean(axis=0))
            names.append(f"{party} {k} ({(kind == k).sum():,} cells)")
    if not rows:
        return []
    matrix = np.stack(rows)
    order = np.argsort(-np.abs(matrix).max(axis=0), kind="stable")[:MOST_MARKERS]
    return [
        heatmap(
            matrix[:, order],
            names,
            [markers[j] for j in order],
            title=f"Clusters of the cells selected for {label}",
            rows="site, and cluster of its selected cells",
            columns="marker",
            alt=f"Means of {len(order)} standardised markers in {len(rows)} clusters of selected cells.",
        )
    ]


def _selected_per_donor(tables: Sequence[AnnData], label: str, options: Columns) -> Any:
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
