"""`pooled_contrasts` before thresholds at each site (commit 5a0c885): which samples a site added, and what it added."""

import numpy as np

from cloister.models import voom
from cloister.workflows.compare_groups.contrast_terms import Part

SITE_DONORS = 2  # of a group; levels, columns and weights had no threshold at a site


def part_of(t, mine):
    """A site's samples of one table: those of a group with fewer than two donors here were left out, no others."""
    bulk = mine.bulks[t.label]
    here = tuple(tuple(c[i] for i in bulk.rows) if isinstance(c, tuple) else c[bulk.rows] for c in mine.covariates)
    cells = np.full(len(bulk.rows), 10)
    part = Part(
        mine.donor[bulk.rows], mine.group[bulk.rows], here, bulk.counts, bulk.counts.sum(axis=1), cells, mine.thresholds
    )
    enough = [g for g in range(len(t.params.groups)) if len(set(part.donor[part.group == g])) >= SITE_DONORS]
    return part.only(np.flatnonzero(np.isin(part.group, enough)))


def plain(t, part):
    """Xᵀy and Σy of L9."""
    y = t.values(part)[0]
    return voom.sums_of(t.design(part), y, part.blocks(t.params.block)).xy, y.sum(axis=0)


def logs(t, part):
    """Σ ln c of L8; a site with a count of 0 there added -inf, and alone aborted."""
    with np.errstate(divide="ignore"):
        return np.log(part.counts[:, t.keep[t.everywhere]]).sum(axis=0)


def weighted(t, part):
    """XᵀWX, XᵀWr and rᵀWr of L10, with the weights of the trend, however one site bent it."""
    (y, library), X, blocks = t.values(part), t.design(part), part.blocks(t.params.block)
    fitted = voom.fitted_values(X, y, blocks, t.plain.coefficients)
    weights = t.trend.weights(fitted + np.log2(library + 1)[:, None] - np.log2(1e6))
    return voom.sums_of(X, y - fitted, blocks, weights), y - fitted, weights
