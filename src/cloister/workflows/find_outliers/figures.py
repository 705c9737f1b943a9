"""Figures of `find-outliers`: scores with the cut, and the site's rows with what it would have flagged alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from cloister.arrays import F64, Bits
from cloister.models import isolation_forest as iforest
from cloister.report.figures import COLOURS, QUIET, canvas, histograms

if TYPE_CHECKING:
    from cloister.session import Outcome

POINTS = 2000  # rows that are drawn, at most


def plot_values(Z: F64, scores: F64 | None, flags: Bits, options: Any, rng: np.random.Generator) -> dict[str, Any]:
    """Some rows on their two principal axes, with their scores and flags, and the flags of a forest of this site alone.

    The site's own forest has the same options; its cut flags the same share of its rows (or scores by the same
    threshold). Nothing of this leaves the site.
    """
    keep = np.sort(rng.permutation(len(Z))[:POINTS])
    some = np.sort(np.union1d(keep, rng.permutation(np.flatnonzero(flags))[: POINTS // 4]))
    part = Z[some]
    centred = part - part.mean(axis=0)
    axes = np.linalg.svd(centred, full_matrices=False)[2][:2]
    points = centred @ axes.T
    if points.shape[1] < 2:
        points = np.column_stack([points, np.zeros((len(points), 2 - points.shape[1]))])
    alone = np.zeros(len(some), bool)
    if len(Z) > 1:
        kind, extension = options.forest, options.extension
        own = iforest.fit(Z, trees=options.trees, sample=options.sample or 256, kind=kind, extension=extension, rng=rng)
        mine = own.score(part)
        if options.threshold is not None:
            alone = mine >= options.threshold
        else:
            alone = mine > np.quantile(own.score(Z[keep]), 1 - options.share)
    made = {"points": points, "flagged": flags[some], "alone": alone}
    return made if scores is None else made | {"score": scores[some]}


def figures(outcomes: Mapping[str, Outcome], options: Any) -> list[Any]:
    """For every site here: its scores with the cut, and its rows, flagged among all sites and flagged alone."""
    sites = {p: o.adata.uns["cloister"] for p, o in outcomes.items() if o.adata is not None and _has_plot(o)}
    drawn = []
    scores = {p: s["outlier_plot"]["score"] for p, s in sites.items() if "score" in s["outlier_plot"]}
    if everyone := [s["outlier_everyone"] for s in sites.values() if "outlier_everyone" in s]:
        scores["all sites"] = everyone[0]  # the same at every site
    cuts = {p: float(s["outlier_cut"]) for p, s in sites.items() if "outlier_cut" in s}
    if scores:
        marks = {"cut": float(np.mean(list(cuts.values())))} if cuts else {}
        drawn.append(
            histograms(
                scores,
                title="Outlier scores",
                xlabel="isolation score (higher = more isolated)",
                marks=marks,
                alt=_score_text(scores, marks.get("cut")),
            )
        )
    drawn += [_rows(p, s["outlier_plot"]) for p, s in sites.items()]
    return drawn


def _has_plot(outcome: Outcome) -> bool:
    assert outcome.adata is not None
    return "outlier_plot" in outcome.adata.uns.get("cloister", {})


def _score_text(scores: Mapping[str, Any], cut: float | None) -> str:
    middle = ", ".join(f"{p} {np.nanmedian(v):.2f}" for p, v in scores.items())
    line = "" if cut is None else f" Rows right of the line at {cut:.3f} are flagged."
    return f"Distribution of isolation scores at each site; medians: {middle}.{line}"


def _rows(site: str, plot: Mapping[str, Any]) -> Any:
    points, flagged, alone = (np.asarray(plot[k]) for k in ("points", "flagged", "alone"))
    flagged, alone = flagged.astype(bool), alone.astype(bool)
    with canvas(panels=2, width=8.4, height=3.8) as c:
        for axis, hit, name in ((c.axes[0], flagged, "among all sites"), (c.axes[1], alone, "this site alone")):
            axis.scatter(*points[~hit].T, s=6, c=QUIET, lw=0, label="inlier")
            axis.scatter(*points[hit].T, s=20, c=COLOURS[1], marker="^", lw=0, label=f"outlier ({int(hit.sum())})")
            axis.set(title=name, xlabel="principal axis 1", ylabel="principal axis 2", xticks=[], yticks=[])
            axis.legend(loc="best", frameon=True)
        both = int((flagged & alone).sum())
        here, there = int((alone & ~flagged).sum()), int((flagged & ~alone).sum())
        return c.done(
            f"Rows of {site}: global and local outliers",
            f"{len(points)} rows of {site} on two principal axes, twice. Left: {int(flagged.sum())} outliers among all"
            f" sites' rows. Right: {int(alone.sum())} outliers by this site's rows alone. {both} are both,"
            f" {here} outliers at {site} only, {there} globally only.",
        )
