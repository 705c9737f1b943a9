"""Doublet scores of `quality-control` without a network: of one site alone, or of all cells in one place."""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse

from cloister.arrays import F64
from cloister.models import doublets
from cloister.workflows.common.gene_moments import choose_genes
from cloister.workflows.quality_control.cell_quality import N_COMPONENTS, N_GENES
from cloister.workflows.shared_pca.shared_pca import decompose

TARGET = 1e4


def doublet_scores(counts: Any, site: Any, seed: int = 0, rate: float = 0.06) -> F64:
    """Scores by the same steps: one space of these cells, and simulated doublets within each `site`.

    Parameters
    ----------
    counts
        Raw counts, cells by genes, sparse or dense.
    site
        The site of each cell; equal entries for a site alone.
    """
    x, site = scipy.sparse.csr_matrix(counts, dtype=np.float64), np.asarray(site)

    def logs(y: Any, at: Any = slice(None)) -> Any:
        total = np.maximum(np.asarray(y.sum(axis=1)).ravel(), 1.0)
        return (scipy.sparse.diags(TARGET / total) @ y).tocsc()[:, at].log1p()

    whole = logs(x).expm1()
    mean = np.asarray(whole.mean(axis=0)).ravel()
    spread = np.asarray(whole.multiply(whole).mean(axis=0)).ravel() - mean**2
    at = choose_genes(mean, spread, N_GENES)
    here = logs(x, at).toarray()
    center = here.mean(axis=0)
    d = min(N_COMPONENTS, len(at) - 1, len(here) - 1)
    _, axes = decompose(np.cov(here.T), d)
    placed, found = (here - center) @ axes, np.zeros(len(here))
    for i, name in enumerate(np.unique(site)):
        own = np.flatnonzero(site == name)
        pairs = doublets.pairs(len(own), doublets.RATIO * len(own), doublets.generator(seed, i))
        both = (logs(x[own[pairs[:, 0]]] + x[own[pairs[:, 1]]], at).toarray() - center) @ axes
        found[own] = doublets.scores(placed[own], np.arange(len(own)), np.zeros((0, d)), both, rate)
    return found
