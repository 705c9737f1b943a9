"""Figures of `find-markers`: a dot plot of the best markers of every label."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from cloister.cells.genes import for_people
from cloister.report.figures import Canvas, Figure, canvas, shown
from cloister.session import Outcome

EACH, MOST = 3, 16  # markers of a label, and labels, that are drawn


def figures(outcomes: Mapping[str, Outcome], options: Any) -> list[Figure]:
    key = options.key_added
    table = next((o.adata.uns[key] for o in outcomes.values() if o.adata is not None and key in o.adata.uns), None)
    return [] if table is None or not len(table) else [dot_plot(table)]


def dot_plot(table: Any, each: int = EACH) -> Figure:
    """The best genes of each label: size is the fraction of cells that express it, colour the log fold change."""
    best = best_genes(table, each)
    with canvas(1, *dots_size(best)) as c:
        draw_dots(c, table, best)
        first = "; ".join(f"{label}: {', '.join(genes)}" for label, genes in [*best.items()][:4])
        return c.done("Markers", f"Best genes of {len(best)} labels by fold change and fraction of cells. {first}.")


def best_genes(table: Any, each: int = EACH, most: int = MOST) -> dict[str, list[str]]:
    """The best genes of each label, in the table's order; a gene stands under the first label that has it."""
    table = for_people(table)
    text, seen = table["label"].astype(str), set[str]()
    best: dict[str, list[str]] = {}
    for label in [str(x) for x in table["label"].unique()][:most]:
        genes = table[(text == label) & (table["t"] > 0)]["gene"][: 4 * each].astype(str)
        best[label] = [g for g in genes if g not in seen][:each]
        seen.update(best[label])
    return best


def dots_size(best: Mapping[str, list[str]]) -> tuple[float, float]:
    genes = sum(map(len, best.values()))
    return min(max(2.6 + 0.22 * genes, 5.6), 12.0), 2.2 + 0.26 * len(best)


def draw_dots(c: Canvas, table: Any, best: Mapping[str, list[str]]) -> None:
    """Draw the genes of all labels in `best` against these labels.

    A fold change against cells that do not express the gene is infinite, and NaN in the table: the end of the scale.
    """
    labels, genes = [*best], [g for some in best.values() for g in some]
    table = for_people(table)
    some = table.assign(label=table["label"].astype(str), gene=table["gene"].astype(str))
    some = some[some["gene"].isin(genes)]
    tables = {k: some.pivot(index="label", columns="gene", values=k) for k in ("log_fold_change", "fraction", "t")}
    change, share, t = (table.reindex(labels)[genes].to_numpy(dtype=float) for table in tables.values())
    x, y = np.meshgrid(np.arange(len(genes)), np.arange(len(labels)))
    finite = np.abs(change[np.isfinite(change)])
    reach = max(1.0, float(np.percentile(finite, 95))) if len(finite) else 1.0
    change = np.where(np.isnan(change), np.sign(t) * reach, change)
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
