"""Answers of statsmodels and lifelines on the donors of `outcome_cases`, pooled: writes tests/vectors/outcomes.json.

Needs both packages (pip install statsmodels lifelines); run it from the repository.
"""

import json
import sys
import warnings
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[0]))
from outcome_cases import HUB, NONE, case, plain

from cloister.workflows.model_outcome import pooled_outcomes

VECTORS = Path(__file__).parents[1] / "vectors" / "outcomes.json"


def pooled(c):
    parts = list(plain(c).values())
    where = np.repeat(np.arange(len(parts)), [len(d.y) for d in parts])

    def join(name):
        return np.concatenate([getattr(d, name) for d in parts])

    return parts, where, join


def regression(model, c):
    import pandas as pd
    import statsmodels.api as sm
    from lifelines import CoxPHFitter

    parts, where, join = pooled(c)
    X, y = join("x"), join("y")
    p = X.shape[1]
    if model == "cox":
        table = pd.DataFrame(X, columns=[f"x{j}" for j in range(p)])
        table = table.assign(time=join("interval") + 1.0, event=y, site=where)
        fit = CoxPHFitter().fit(table, "time", "event", strata=["site"], fit_options={"precision": 1e-12})
        return {"coefficients": fit.params_.tolist(), "errors": fit.standard_errors_.tolist()}
    D = np.hstack([X, np.eye(len(parts))[where]])
    if model == "linear":
        fit = sm.OLS(y, D).fit()
    else:
        dispersion = pooled_outcomes.ideal(c.params, plain(c))[HUB].fits[0].dispersion
        family = {
            "logistic": sm.families.Binomial(),
            "poisson": sm.families.Poisson(),
            "negbin": sm.families.NegativeBinomial(alpha=max(dispersion, 1e-9)),
        }[model]
        exposure = join("exposure") if parts[0].exposure is not None else None
        fit = sm.GLM(y, D, family=family, exposure=exposure).fit(tol=1e-14, maxiter=300, scale=1.0)
    return {"coefficients": fit.params[:p].tolist(), "errors": fit.bse[:p].tolist()}


def curves(c):
    from lifelines import KaplanMeierFitter
    from lifelines.statistics import multivariate_logrank_test

    _, _, join = pooled(c)
    time, event, arm = join("interval") + 1.0, join("y"), join("arm")
    test = multivariate_logrank_test(time, arm, event)
    made = {}
    for a, name in enumerate(c.params.arms):
        fit = KaplanMeierFitter().fit(time[arm == a], event[arm == a], timeline=np.arange(1, c.params.intervals + 1))
        made[name] = fit.survival_function_["KM_estimate"].tolist()
    return {"survival": made, "chi_square": float(test.test_statistic), "p": float(test.p_value)}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    answers = {
        model: curves(case(model, thresholds=NONE, seed=7))
        if model == "km"
        else regression(model, case(model, thresholds=NONE, seed=7, p=3))
        for model in ("linear", "logistic", "poisson", "negbin", "cox", "km")
    }
    VECTORS.write_text(json.dumps(answers, indent=1) + "\n", encoding="utf-8")
