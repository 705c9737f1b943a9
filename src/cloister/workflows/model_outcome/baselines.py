"""What `model-outcome` is compared with: all donors in one place, each site alone, and a meta-analysis of these."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from cloister.disclosure import Thresholds
from cloister.errors import ProtocolAbort
from cloister.study import Party
from cloister.workflows.model_outcome import pooled_outcomes as protocol
from cloister.workflows.model_outcome.figures import tables
from cloister.workflows.model_outcome.pooled_outcomes import Donors, Fit, Modelled, Params
from cloister.workflows.model_outcome.workflow import WORKFLOW, Options, donors_of, params_of
from cloister.workflows.options import read_options

if TYPE_CHECKING:
    from anndata import AnnData

NOBODY = Party("nobody")  # adds up
NOTHING_OPENED = Thresholds(min_cells=1, min_donors=1)  # whoever sees all donors need not hide any


def outcome_baselines(data: Mapping[str, AnnData], **options: Any) -> dict[str, dict[str, Any]]:
    """Model outcomes in the ways that need no protocol.

    Returns
    -------
    `pooled`, `SITE alone` for every site, and `meta-analysis` (their inverse-variance mean) → tables as in
    `model_outcome`. A site whose own donors cannot be fitted has tables without rows.
    """
    chosen: Options = read_options(WORKFLOW.options, options, WORKFLOW.name)
    held = {Party(name): donors_of(adata, chosen)[0] for name, adata in data.items()}
    params = params_of(tuple(held), NOBODY, chosen)
    found = {"pooled": pooled(params, held)} | {f"{u} alone": pooled(params, {u: d}) for u, d in held.items()}
    if not params.curves:
        found["meta-analysis"] = meta([found[f"{u} alone"] for u in held], params)
    empty = Modelled(0, 0.0, 0, 0, 0)
    return {name: tables(one or empty, chosen) for name, one in found.items()}


def pooled(params: Params, xs: Mapping[Party, Donors]) -> Modelled | None:
    """The fit on the donors themselves; None where there is none."""
    whole = {u: replace(d, thresholds=NOTHING_OPENED) for u, d in xs.items()}
    try:
        return protocol.ideal(replace(params, rounds=25), whole)[params.coordinator]
    except ProtocolAbort:
        return None


def meta(alone: list[Modelled | None], params: Params) -> Modelled | None:
    """Means of the sites' own coefficients, weighted by their inverse covariances."""
    there = [m for m in alone if m is not None]
    if not there:
        return None
    fits = []
    for i, columns in enumerate(params.fits):
        weights = [np.linalg.pinv(m.fits[i].covariance, hermitian=True) for m in there]
        covariance = np.linalg.pinv(np.sum(weights, axis=0), hermitian=True)
        mean = covariance @ np.sum([w @ m.fits[i].coefficients for w, m in zip(weights, there, strict=True)], axis=0)
        none = np.zeros((0, 3))
        fits.append(Fit(columns, mean, covariance, math.inf, math.nan, math.nan, math.nan, none, math.nan))
    return Modelled(sum(m.donors for m in there), sum(m.outcomes for m in there), 0, 0, 0, tuple(fits))
