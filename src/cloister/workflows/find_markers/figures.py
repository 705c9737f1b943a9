"""Figures of `find-markers`: a dot plot of the best markers of every label."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from cloister.report.figures import Figure, canvas, shown
from cloister.session import Outcome

EACH, MOST = 3, 16  # markers of a label, and labels, that are drawn


def figures(outcomes: Mapping[str, Outcome], options: Any) -> list[Figure]:
    key = options.key_added
    table = next((o.adata.uns[key] for o in outcomes.values() if o.adata is not None and key in o.adata.uns), None)
    return [] if table is None or not len(table) else [dot_plot(table)]


def dot_plot(table: Any, each: int = EACH) -> Figure:
    """The best genes of each label: size is the fraction of cells that express it, colour the log fold change."""
    labels = [str(x) for x in table["label"].unique()][:MOST]
    text = table["label"].astype(str)
    genes: list[str] = []
    for label in labels:
        best = table[(text == label) & (table["t"] > 0)]["gene"]
        genes += [g for g in best[: 4 * each] if g not in genes][:each]
    some = table[table["gene"].isin(genes)]
    change = some.pivot(index="label", columns="gene", values="log_fold_change").reindex(labels)[genes].to_numpy()
    share = some.pivot(index="label", columns="gene", values="fraction").reindex(labels)[genes].to_numpy()
    x, y = np.meshgrid(np.arange(len(genes)), np.arange(len(labels)))
    reach = max(1.0, float(np.nanpercentile(np.abs(change), 95)))
    with canvas(width=min(2.6 + 0.22 * len(genes), 12.0), height=1.8 + 0.26 * len(labels)) as c:
        dots = c.axis.scatter(
            x, y, s=90 * np.nan_to_num(share), c=np.clip(change, -reach, reach), cmap="RdBu_r", vmin=-reach, vmax=reach,
            edgecolors="#535c66", linewidths=0.4,
        )  # fmt: skip
        c.axis.set_xticks(range(len(genes)), [shown(g, 16) for g in genes], rotation=90, fontsize=8)
        c.axis.set_yticks(range(len(labels)), [shown(x) for x in labels], fontsize=8)
        c.axis.set(xlim=(-0.7, len(genes) - 0.3), ylim=(len(labels) - 0.4, -0.6))
        c.axis.grid(visible=False)
        c.paper.colorbar(dots, ax=c.axis, shrink=0.8, label="log2 fold change")
        for part in (0.25, 0.5, 1.0):
            c.axis.scatter([], [], s=90 * part, c="white", edgecolors="#535c66", label=f"{part:.0%} of cells")
        c.axis.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=3, borderaxespad=0.2)
        best = "; ".join(
            f"{label}: {', '.join(genes[i * each : (i + 1) * each])}" for i, label in enumerate(labels[:4])
        )
        return c.done("Markers", f"Best genes of {len(labels)} labels by fold change and fraction of cells. {best}.")
