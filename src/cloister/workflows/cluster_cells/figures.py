"""Figures of `cluster-cells`: each site's shares of the common clusters, and its labels against them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from cloister.report.figures import Figure, heatmap
from cloister.session import Outcome


def figures(outcomes: Mapping[str, Outcome], options: Any) -> list[Figure]:
    key, label_key = options.key_added, options.label_key
    here = {s: o.adata for s, o in outcomes.items() if o.adata is not None and key in o.adata.obs}
    if not here:
        return []
    names = list(next(iter(here.values())).obs[key].cat.categories)
    made = [shares({s: a.obs[key].cat.codes.to_numpy() for s, a in here.items()}, names)]
    labelled = {s: a for s, a in here.items() if label_key in a.obs}
    if labelled:
        codes = np.concatenate([a.obs[key].cat.codes.to_numpy() for a in labelled.values()])
        labels = np.concatenate([a.obs[label_key].astype(object).astype(str).to_numpy() for a in labelled.values()])
        made.append(against_labels(codes, labels, names, label_key))
    return made


def shares(codes: Mapping[str, Any], names: list[str]) -> Figure:
    """Clusters of the sites that are here, as shares of the site's cells."""
    table = np.stack([np.bincount(c, minlength=len(names)) / max(len(c), 1) for c in codes.values()])
    largest = "; ".join(
        f"{s}: cluster {names[int(row.argmax())]}, {row.max():.0%}" for s, row in zip(codes, table, strict=True)
    )
    return heatmap(
        table,
        list(codes),
        names,
        title="Clusters by site",
        rows="site",
        columns="cluster",
        low=0.0,
        alt=f"Share of each site's cells in each of {len(names)} clusters. Largest: {largest}.",
    )


def against_labels(codes: Any, labels: Any, names: list[str], label_key: str) -> Figure:
    """Where the cells of each label are, as shares of the label's cells."""
    kinds, at = np.unique(labels, return_inverse=True)
    table = np.zeros((len(kinds), len(names)))
    np.add.at(table, (at, codes), 1)
    table /= table.sum(axis=1, keepdims=True)
    order = np.argsort(table.argmax(axis=1), kind="stable")
    return heatmap(
        table[order],
        kinds[order].tolist(),
        names,
        title=f"Clusters against {label_key}",
        rows=label_key,
        columns="cluster",
        low=0.0,
        high=1.0,
        alt=f"Share of each of {len(kinds)} labels in each of {len(names)} clusters, for {len(codes):,} cells.",
    )
