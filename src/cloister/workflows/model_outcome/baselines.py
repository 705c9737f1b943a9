"""What `model-outcome` is compared with: all donors in one place, each site alone, and a meta-analysis of these."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from cloister.disclosure import Thresholds
from cloister.errors import ProtocolAbort
from cloister.models import outcomes
from cloister.study import Party
from cloister.workflows.model_outcome import pooled_outcomes as protocol
from cloister.workflows.model_outcome.figures import tables
from cloister.workflows.model_outcome.pooled_outcomes import Donors, Fit, Modelled, Params
from cloister.workflows.model_outcome.workflow import WORKFLOW, Options, donors_of, params_of
from cloister.workflows.options import read_options

if TYPE_CHECKING:
    from anndata import AnnData

NOBODY = Party("nobody")  # adds up
FAR, WIDE = 1e-9, 20.0  # of Newton's last step, and of coefficients that do not converge; in deviations of a feature
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
    empty = Modelled(0, 0.0, 0)
    return {name: tables(one or empty, chosen) for name, one in found.items()}


def pooled(params: Params, xs: Mapping[Party, Donors]) -> Modelled | None:
    """The fit on the donors themselves, by Newton's method; None where there is none."""
    whole = {u: replace(d, thresholds=NOTHING_OPENED) for u, d in xs.items()}
    try:
        found = protocol.ideal(params, whole)[params.coordinator]
    except ProtocolAbort:
        return None
    if params.curves or params.linear:
        return found
    fits = [newton(params, [*whole.values()], f, fit) for f, fit in zip(params.fits, found.fits, strict=True)]
    if any(fit is None for fit in fits):
        return None
    return replace(found, fits=tuple(fit for fit in fits if fit is not None))


def newton(params: Params, held: list[Donors], f: tuple[int, ...], start: Fit) -> Fit | None:
    """The maximum of the likelihood of all donors, an intercept or baseline hazard for each site."""
    x = np.concatenate([d.x[:, f] for d in held])
    mean, spread = x.mean(axis=0), x.std(axis=0)
    rows = [
        outcomes.grouped(
            (d.x[:, f] - mean) / spread, d.y, np.arange(len(d.y)), d.exposure, d.interval, params.intervals
        )
        for d in held
    ]
    b, far = start.coefficients * spread, math.inf
    for _ in range(outcomes.ROUNDS):
        sums = [outcomes.evaluate(params.likelihood, t, b, start.dispersion) for t in rows]
        J = np.sum([s.information for s in sums], axis=0)
        change = np.linalg.lstsq(J, np.sum([s.score for s in sums], axis=0), rcond=protocol.RANK)[0]
        far = float(np.abs(change).max())
        b = b + change * min(1.0, outcomes.STEP / max(far, 1e-300))
        if far < FAR or float(np.abs(b).max()) > WIDE:
            break
    if not far < FAR:
        return None  # separated
    covariance = np.linalg.pinv(J, rcond=protocol.RANK, hermitian=True) / np.outer(spread, spread)
    value = float(sum(s.value for s in sums))
    return replace(start, coefficients=b / spread, covariance=covariance, log_likelihood=value)


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
    return Modelled(sum(m.donors for m in there), sum(m.outcomes for m in there), 0, tuple(fits))
