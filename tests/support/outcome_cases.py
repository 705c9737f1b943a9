"""Donors for the tests of `pooled_outcomes`: features, and outcomes that depend on them, over sites."""

import numpy as np

from cloister.disclosure import Thresholds
from cloister.study import Party
from cloister.testing import Case
from cloister.workflows.model_outcome.pooled_outcomes import Donors, Params

HUB = Party("hub")
NONE = Thresholds(1, 1)  # groups of one donor: the fit on the donors themselves
BETA = (0.6, -0.4, 0.3, 0.2)
INTERVALS, HORIZON = 24, 3.0


def site(rng, model, n=40, p=2, beta=BETA, thresholds=None):
    x = rng.normal(size=(n, p)) * np.arange(1, p + 1) + 3.0
    if p > 1:
        x[:, -1] = (x[:, -1] > 3.0).astype(float)
    eta = (x - 3.0) @ np.asarray(beta[:p]) + rng.normal(0, 0.4)
    cells, interval, arm = np.full(n, 50), None, None
    exposure = None
    if model == "logistic":
        y = (rng.random(n) < 1 / (1 + np.exp(-eta))).astype(float)
    elif model == "linear":
        y = eta + rng.normal(0, 1.0, n)
    elif model in ("poisson", "negbin"):
        exposure = rng.uniform(0.5, 2.0, n) if model == "poisson" else None
        m = np.exp(0.5 * eta + 1) * (1 if exposure is None else exposure)
        y = rng.poisson(m if model == "poisson" else rng.gamma(2.0, m / 2)).astype(float)
    else:
        event, other = rng.exponential(1.5 / np.exp(eta)), rng.exponential(3.0, n)
        seen = np.minimum(np.minimum(event, other), HORIZON)
        y = ((event <= other) & (event <= HORIZON)).astype(float)
        interval = np.minimum((seen / HORIZON * INTERVALS).astype(np.int64), INTERVALS - 1)
        arm = (x[:, -1] > 0.5).astype(np.int64) if p > 1 else (x[:, 0] > 3).astype(np.int64)
    return Donors(x, y, cells, interval, exposure, arm, thresholds or Thresholds())


def case(model, seed=0, sites=3, n=40, p=2, thresholds=None, fits=None, **options):
    rng = np.random.default_rng(seed)
    names = [Party(f"site-{i}") for i in range(sites)]
    inputs = {u: (site(rng, model, n, p, thresholds=thresholds),) for u in names}
    survival = model in ("cox", "km")
    params = Params(
        tuple(names),
        HUB,
        model,
        () if model == "km" else tuple(f"x{j}" for j in range(p)),
        () if model == "km" else fits or (tuple(range(p)),),
        INTERVALS if survival else 0,
        ("low", "high") if model == "km" else (),
        **options,
    )
    if model == "km":
        inputs = {
            u: (Donors(np.zeros((n, 0)), d.y, d.cells, d.interval, None, d.arm, d.thresholds),)
            for u, (d,) in inputs.items()
        }
    return Case(params, inputs)


def plain(c):
    return {u: mine for u, (mine,) in c.inputs.items()}
