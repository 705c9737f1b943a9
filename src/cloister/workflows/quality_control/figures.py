"""Figures of `quality-control`: histograms by site with the common cut-offs, and violins of the cells here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from cloister.report.figures import COLOURS, STYLES, Canvas, Figure, canvas, draw_violins, legend_beside, shown
from cloister.session import Outcome
from cloister.workflows.quality_control.cell_quality import MEASURES, SCORE, STEP

KEY = "quality_control"
TITLES = {
    "total_counts": "counts per cell",
    "n_genes_by_counts": "genes per cell",
    "pct_counts_mt": "mitochondrial counts, %",
    "doublet_score": "doublet score",
}
SHAPES = dict(zip(TITLES, (*MEASURES, SCORE), strict=True))
MERGED = 4  # bins drawn as one
TICKS = [a * 10.0**b for b in range(-4, 7) for a in (1, 3)]
MOST_TICKS = 5


def figures(outcomes: Mapping[str, Outcome], options: Any) -> list[Figure]:
    here = {s: o.adata for s, o in outcomes.items() if o.adata is not None and KEY in o.adata.uns}
    if not here:
        return []
    found = next(iter(here.values())).uns[KEY]
    columns = [key for key in measures_in(found) if all(key in a.obs for a in here.values())]
    return [
        by_site(found),
        violins({s: {k: a.obs[k].to_numpy(float) for k in columns} for s, a in here.items()}),
    ]


def measures_in(found: Mapping[str, Any]) -> list[str]:
    """Measures of which a site has cells, in their order."""
    return [key for key in TITLES if key in found["histograms"] and np.any(found["histograms"][key])]


def by_site(found: Mapping[str, Any]) -> Figure:
    names = measures_in(found)
    with canvas(len(names), 3.1 * len(names) + 1.0, 2.9) as c:
        draw_quality(c, found)
        limits = "; ".join(f"{TITLES[key]} {text}" for key in names if (text := limits_in_words(found, key)))
        return c.done("Cells by site, and common cut-offs", f"Histograms of {len(found['sites'])} sites. {limits}.")


def limits_in_words(found: Mapping[str, Any], key: str) -> str:
    if key == "doublet_score":
        return f"at most {found['threshold']:.3g}" if np.isfinite(found["threshold"]) else ""
    if key not in found["cutoffs"]:
        return ""
    low, high = found["cutoffs"][key]
    ends = [f"{v:,.0f}" if v >= 100 else f"{v:.3g}" for v in (low, high)]
    return f"{ends[0]} to {ends[1]}" if low > 0 else f"at most {ends[1]}"


def draw_quality(c: Canvas, found: Mapping[str, Any]) -> None:
    """One panel a measure: shares of each site's cells in bins of log10, and the cut-offs as dashed lines."""
    for axis, key in zip(c.axes, measures_in(found), strict=True):
        table, shape = np.asarray(found["histograms"][key], float), SHAPES[key]
        seen = np.flatnonzero(table.sum(axis=0))
        first, last = seen[0] // MERGED * MERGED, (seen[-1] // MERGED + 1) * MERGED
        edges = shape.low + STEP * np.arange(first, last + 1, MERGED)
        for i, (site, row) in enumerate(zip(found["sites"], table, strict=True)):
            padded = np.pad(row, (0, MERGED))[first:last].reshape(-1, MERGED).sum(axis=1)
            style = {"lw": 1.5, "color": COLOURS[i % len(COLOURS)], "ls": STYLES[i % 4]}
            axis.stairs(padded / max(row.sum(), 1), edges, label=shown(site), **style)
        limits = [found["threshold"]] if key == "doublet_score" else found["cutoffs"].get(key, [])
        for limit in limits:
            if np.isfinite(limit) and limit > 0:
                axis.axvline(np.log10(limit + shape.offset), color="#1d2329", ls="--", lw=1)
        ticks = [v for v in TICKS if edges[0] - 0.1 <= np.log10(v + shape.offset) <= edges[-1] + 0.1]
        ticks = ticks[len(ticks) % 2 :: 2] if len(ticks) > MOST_TICKS else ticks
        axis.set_xticks([np.log10(v + shape.offset) for v in ticks], [f"{v:,g}" for v in ticks])
        axis.set(xlabel=TITLES[key], ylabel="share of the site's cells" if axis is c.axes[0] else "")
    legend_beside(c.axes[-1])


def violins(values: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Values of each measure at the sites whose cells are here."""
    names = [*next(iter(values.values()))]
    with canvas(len(names), max(2.6, 1.0 + 0.6 * len(values)) * len(names), 3.2) as c:
        for axis, key in zip(c.axes, names, strict=True):
            log = key in ("total_counts", "n_genes_by_counts")
            parts = {site: of[key][np.isfinite(of[key])] for site, of in values.items()}
            draw_violins(
                axis,
                {site: np.log10(v[v > 0]) if log else v for site, v in parts.items()},
                range(len(parts)),
                log=log,
            )
            axis.set(ylabel=TITLES[key])
        words = "; ".join(f"{site}: {np.median(of[names[0]]):,.0f}" for site, of in values.items())
        return c.done("Quality of cells", f"Violins of {len(names)} measures. Median counts per cell: {words}.")
