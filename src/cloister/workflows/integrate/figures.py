"""Figures of `integrate`: how far sites are mixed, and a site's own cells among the density of all others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from cloister.arrays import Array
from cloister.models.harmony import unit
from cloister.report.figures import COLOURS, Figure, canvas, draw_points, shown, some_points
from cloister.session import Outcome

if TYPE_CHECKING:
    from anndata import AnnData

GREY = "#9aa3a5"


def mixing_bars(outcomes: Mapping[str, Outcome]) -> Figure:
    """The share of own cells in a cell's clusters, of all sites and of each that is here."""
    rows: dict[str, Mapping[str, float]] = {}
    for site, outcome in outcomes.items():
        if "own_site" in outcome.result:
            rows.setdefault("all sites", outcome.result["own_site"])
        if "own_site_here" in outcome.result:
            rows[site] = outcome.result["own_site_here"]
    with canvas(width=5.6, height=1.2 + 0.5 * len(rows)) as c:
        at = np.arange(len(rows))
        c.axis.barh(at - 0.2, [r["before"] for r in rows.values()], 0.36, color=GREY, label="before")
        c.axis.barh(at + 0.2, [r["after"] for r in rows.values()], 0.36, color=COLOURS[0], label="after")
        expected = [r["if_mixed"] for r in rows.values()]
        c.axis.plot(expected, at, "|", color="black", ms=16, label="if mixed")
        c.axis.set_yticks(at, [shown(name) for name in rows])
        c.axis.set(xlim=(0, 1), xlabel="share of its own site's cells in a cell's clusters")
        c.axis.invert_yaxis()
        c.axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), borderaxespad=0.0)
        said = "; ".join(f"{name} {r['before']:.2f} before, {r['after']:.2f} after" for name, r in rows.items())
        return c.done("Mixing before and after", f"Share of own cells in a cell's clusters: {said}.")


def joint_space(
    site: str, adata: AnnData, key: str, label_key: str, batch_key: str | None, places: Mapping[str, int]
) -> Figure:
    """A site's cells in the two axes in which all cells vary most; the others are counts in places, never points.

    `places` are those of all labels that are coloured, so that a label has one colour in the figures of all sites.
    """
    notes = adata.uns[key]
    span, others = np.asarray(notes["span"]), np.asarray(notes["others"])
    points = (unit(np.asarray(adata.obsm[key])) - np.asarray(notes["center"])) @ np.asarray(notes["axes"])
    labels = colours_of(adata, site, label_key, batch_key)
    keep = some_points(len(points))
    kinds, sizes = np.unique(labels, return_counts=True)
    kinds = kinds[np.argsort(-sizes, kind="stable")]
    with canvas(width=5.6, height=3.8) as c:
        extent = (-span[0], span[0], -span[1], span[1])
        seen = np.ma.masked_equal(np.log1p(others.T), 0)
        c.axis.imshow(seen, origin="lower", extent=extent, aspect="auto", cmap="Greys", alpha=0.75, zorder=0)
        draw_points(c.axis, points[keep], labels[keep], {kind: places[kind] for kind in kinds}, size=6)
        c.axis.set(xlim=extent[:2], ylim=extent[2:], xticks=[], yticks=[], xlabel="axis 1", ylabel="axis 2")
        c.axis.grid(visible=False)
        c.axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), borderaxespad=0.0, markerscale=2.5)
        alt = (
            f"{adata.n_obs:,} cells of {site} by {len(kinds)} labels, over the density of {int(others.sum()):,} others."
        )
        return c.done(f"Cells of {site} in the joint space, the others in grey", alt)


def colours_of(adata: AnnData, site: str, label_key: str, batch_key: str | None) -> Array:
    """What colours the cells: labels, or else batches, or else nothing."""
    for column in (label_key, batch_key):
        if column is not None and column in adata.obs:
            names: Any = adata.obs[column].astype(object)
            return np.asarray(names.where(names.notna(), "(none)").astype(str), dtype=object)
    return np.full(adata.n_obs, site, dtype=object)
