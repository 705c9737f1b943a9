"""Figures of `shared-map`: a site's own cells by label, over the density of all sites' cells."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from cloister.report.figures import Figure, canvas, draw_points, legend_beside, shown, some_points
from cloister.session import Outcome

if TYPE_CHECKING:
    from anndata import AnnData


def figures(outcomes: Mapping[str, Outcome], options: Any) -> list[Figure]:
    key = options.key_added
    here = {s: o.adata for s, o in outcomes.items() if o.adata is not None and key in o.adata.uns}
    return [on_the_map(site, adata, key, options.label_key) for site, adata in here.items()]


def on_the_map(site: str, adata: AnnData, key: str, label_key: str) -> Figure:
    """A site's cells; those of all sites are shares of a place, from prototypes, and never points."""
    notes, points = adata.uns[key], np.asarray(adata.obsm[key])
    labels = np.full(len(points), shown(site), dtype=object)
    if label_key in adata.obs:
        column: Any = adata.obs[label_key].astype(object)
        labels = np.asarray(column.where(column.notna(), "(none)").astype(str), dtype=object)
    kinds, sizes = np.unique(labels, return_counts=True)
    kinds = kinds[np.argsort(-sizes, kind="stable")]
    keep = some_points(len(points))
    with canvas(width=6.2, height=4.2) as c:
        shade(c.axis, notes)
        draw_points(c.axis, points[keep], labels[keep], {kind: i for i, kind in enumerate(kinds)})
        legend_beside(c.axis, markerscale=2.5)
        alt = f"{adata.n_obs:,} cells of {site} by {len(kinds)} labels, over the density of {notes['cells']:,} cells."
        return c.done(f"Cells of {shown(site)} on the common map, all sites in grey", alt)


def shade(axis: Any, notes: Mapping[str, Any]) -> None:
    """The density of all sites' cells, in grey."""
    density, span = np.asarray(notes["density"]), np.asarray(notes["span"])
    seen = np.ma.masked_equal(np.log1p(1e4 * density.T), 0)
    axis.imshow(seen, origin="lower", extent=span.ravel(), aspect="auto", cmap="Greys", alpha=0.6, zorder=0)
    axis.set(xlim=span[0], ylim=span[1], xlabel="shared map 1", ylabel="shared map 2")
