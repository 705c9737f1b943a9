"""Tables and figures of `model-outcome`: forest plot, survival curves with numbers at risk, calibration."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import scipy.stats

from cloister.arrays import F64
from cloister.report.figures import COLOURS, QUIET, STYLES, canvas, shown
from cloister.session import Outcome
from cloister.workflows.model_outcome.features import weights_of

if TYPE_CHECKING:
    from cloister.workflows.model_outcome import pooled_outcomes as protocol

COEFFICIENTS = ("regression", "term", "coefficient", "error", "low", "high", "ratio", "statistic", "p", "fdr")
CONTRASTS = ("regression", "contrast", "coefficient", "error", "low", "high", "statistic", "p")
CALIBRATION = ("regression", "range", "donors", "observed", "expected")
CURVES = ("arm", "time", "at_risk", "events", "survival", "low", "high")
TABLES = ("coefficients", "contrasts", "calibration", "curves")
RATIOS = {"cox": "hazard ratio", "logistic": "odds ratio", "poisson": "rate ratio", "negbin": "rate ratio"}
TICKS = 6  # times at which numbers at risk are written


@dataclass(frozen=True, slots=True)
class Modelled:
    """The tables, as :class:`pandas.DataFrame`; without rows where there is nothing."""

    coefficients: Any
    contrasts: Any
    calibration: Any
    curves: Any


def tables(found: protocol.Modelled, options: Any) -> dict[str, Any]:
    import pandas as pd

    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in TABLES}
    for i, fit in enumerate(found.fits):
        design = options.design
        names = [design.columns[c] for c in fit.columns]
        regression = options.features[i] if options.each else "all"
        ratios = options.model in RATIOS
        for k, name in enumerate(names):
            test = _tested(float(fit.coefficients[k]), float(fit.covariance[k, k]), fit.df, options.level)
            ratio = math.exp(min(test["coefficient"], 700.0)) if ratios else math.nan
            rows["coefficients"].append({"regression": regression, "term": name, **test, "ratio": ratio})
        for text in options.contrasts:
            w = weights_of(text, names)
            test = _tested(float(w @ fit.coefficients), float(w @ fit.covariance @ w), fit.df, options.level)
            rows["contrasts"].append({"regression": regression, "contrast": text, **test})
        for k, (donors, observed, expected) in enumerate(fit.calibration):
            numbers = {"donors": round(donors), "observed": observed, "expected": expected}
            rows["calibration"].append({"regression": regression, "range": k + 1, **numbers})
    if found.curves is not None:
        rows["curves"] = _curve_rows(found.curves, options)
    if options.each and rows["coefficients"]:
        first = {options.features[i]: options.design.columns[f.columns[0]] for i, f in enumerate(found.fits)}
        tested = [r for r in rows["coefficients"] if r["term"] == first[r["regression"]]]
        tested = [r for r in tested if math.isfinite(r["p"])]
        rates = scipy.stats.false_discovery_control([r["p"] for r in tested]) if tested else []
        for row, rate in zip(tested, rates, strict=True):
            row["fdr"] = float(rate)
    columns = {"coefficients": COEFFICIENTS, "contrasts": CONTRASTS, "calibration": CALIBRATION, "curves": CURVES}
    return {name: pd.DataFrame(rows[name], columns=list(columns[name])) for name in TABLES}


def _tested(estimate: float, variance: float, df: float, level: float) -> dict[str, float]:
    """Wald's test and interval: by t where the variance is estimated, by the normal distribution otherwise."""
    error = math.sqrt(max(variance, 0.0))
    law = scipy.stats.norm if math.isinf(df) else scipy.stats.t(df)
    statistic = estimate / error if error > 0 else math.nan
    half = float(law.ppf(0.5 + level / 2)) * error
    p = float(2 * law.sf(abs(statistic)))
    return {
        "coefficient": estimate,
        "error": error,
        "low": estimate - half,
        "high": estimate + half,
        "statistic": statistic,
        "p": p,
    }


def _curve_rows(curves: protocol.Curves, options: Any) -> list[dict[str, Any]]:
    """Survival at the end of each interval; numbers below `min_donors` are not shown, nor survival after them."""
    rows = []
    width = options.horizon / options.intervals
    z = float(scipy.stats.norm.ppf(0.5 + options.level / 2))
    for a, arm in enumerate(options.arms):
        at_risk, events = curves.at_risk[a], curves.events[a]
        if not at_risk[0] > 0:
            continue
        rows.append(_row(arm, 0.0, at_risk[0], 0.0, 1.0, 1.0, 1.0))
        for j in range(options.intervals):
            n = at_risk[j]
            if n < options.min_donors:
                break
            s = float(curves.survival[a, j])
            low, high = _log_log(s, float(curves.error[a, j]), z)
            rows.append(_row(arm, (j + 1) * width, n, events[j], s, low, high))
    return rows


def _row(arm: str, time: float, n: float, events: float, survival: float, low: float, high: float) -> dict[str, Any]:
    numbers = {"at_risk": round(n), "events": round(events), "survival": survival, "low": low, "high": high}
    return {"arm": arm, "time": time, **numbers}


def _log_log(survival: float, error: float, z: float) -> tuple[float, float]:
    """Interval on the scale log(-log S), as lifelines and R have it."""
    if not 0 < survival < 1 or not error > 0:
        return survival, survival
    half = z * error / (survival * abs(math.log(survival)))
    low, high = survival ** math.exp(half), survival ** math.exp(-half)
    return low, high


def summary(found: protocol.Modelled, options: Any) -> dict[str, Any]:
    """Plain values for the report."""
    told: dict[str, Any] = {
        "donors": found.donors,
        "outcomes": round(found.outcomes, 6),
        "openings": found.openings,
        "notes": list(found.notes),
    }
    for i, fit in enumerate(found.fits):
        name = options.features[i] if options.each else "all"
        told.setdefault("regressions", {})[name] = {
            key: round(float(value), 6)
            for key, value in (
                ("concordance", fit.concordance),
                ("explained", fit.explained),
                ("dispersion", fit.dispersion),
                ("df", fit.df),
                ("log_likelihood", fit.log_likelihood),
            )
            if math.isfinite(value)
        } | _global(fit)
    if found.curves is not None:
        for name, (square, df, p) in (("log_rank", found.curves.test), ("stratified", found.curves.stratified)):
            if df:
                told[name] = {"chi_square": square, "df": df, "p": p}
    return told


def _global(fit: protocol.Fit) -> dict[str, float]:
    """Wald's test of all coefficients."""
    there = np.isfinite(fit.coefficients)
    b = fit.coefficients[there]
    square = float(b @ np.linalg.pinv(fit.covariance[np.ix_(there, there)], hermitian=True) @ b)
    p = len(b)
    tail = scipy.stats.chi2.sf(square, p) if math.isinf(fit.df) else scipy.stats.f.sf(square / p, p, fit.df)
    return {"wald": square, "wald_p": float(tail)}


# ---- figures ---------------------------------------------------------------------------------------------------------


def figures(outcomes: Mapping[str, Outcome], options: Any) -> list[Any]:
    """A forest plot and the calibration of each regression; survival curves."""
    here = [o.adata.uns[options.key_added] for o in outcomes.values() if o.adata is not None]
    here += [{name: getattr(o.model, name) for name in TABLES} for o in outcomes.values() if o.model]
    if not here:
        return []
    made, first = [], here[0]
    if len(first["coefficients"]):
        made.append(forest(first["coefficients"], options))
    if len(first["calibration"]):
        for name, part in list(first["calibration"].groupby("regression", sort=False))[:4]:
            made.append(calibration(part, str(name), options.model))
    if len(first["curves"]):
        made.append(survival(first["curves"], options))
    return made


def forest(table: Any, options: Any) -> Any:
    """Estimates and intervals, one line per term."""
    table = table[np.isfinite(table["error"]) & (table["error"] > 0)].iloc[:40]
    ratio = RATIOS.get(options.model)
    change = np.exp if ratio else np.asarray
    at = np.arange(len(table))
    low, mid, high = (change(table[k].to_numpy(dtype=float)) for k in ("low", "coefficient", "high"))
    with canvas(width=5.8, height=1.3 + 0.32 * len(table)) as c:
        clear = table["p"].to_numpy(dtype=float) < 1 - options.level
        for i in at:
            colour = COLOURS[0] if clear[i] else QUIET
            c.axis.plot([low[i], high[i]], [i, i], color=colour, lw=1.8)
            c.axis.plot([mid[i]], [i], "s", color=colour, ms=5)
        c.axis.axvline(1.0 if ratio else 0.0, color="#535c66", lw=0.8, ls="--")
        if ratio:
            c.axis.set_xscale("log")
            c.axis.xaxis.set_major_formatter("{x:g}")
            c.axis.xaxis.set_minor_formatter("")
        c.axis.set_yticks(at, [shown(t, 30) for t in table["term"]])
        c.axis.invert_yaxis()
        c.axis.set(xlabel=f"{ratio or 'coefficient'}, {options.level:.0%} interval")
        told = "; ".join(
            f"{t} {m:.2f} ({a:.2f} to {b:.2f})"
            for t, m, a, b in zip(table["term"].iloc[:6], mid, low, high, strict=False)
        )
        return c.done(f"{(ratio or 'coefficient').capitalize()}s", f"{told}.")


def calibration(part: Any, name: str, model: str) -> Any:
    """Observed against expected outcomes per donor, in ranges of the prediction."""
    n, observed, expected = (part[k].to_numpy(dtype=float) for k in ("donors", "observed", "expected"))
    seen = n > 0
    a, b = expected[seen] / n[seen], observed[seen] / n[seen]
    what = {"cox": "events", "logistic": "share with the outcome"}.get(model, "mean count")
    with canvas(width=4.2, height=3.8) as c:
        most = 1.05 * max(float(a.max()), float(b.max()), 1e-9)
        c.axis.plot([0, most], [0, most], color="#535c66", lw=0.8, ls="--")
        c.axis.scatter(a, b, s=14 + 1.5 * n[seen], c=COLOURS[0], lw=0)
        c.axis.set(xlabel=f"expected {what} per donor", ylabel=f"observed {what} per donor")
        told = "; ".join(f"{y:.2f} observed, {x:.2f} expected" for x, y in zip(a, b, strict=True))
        return c.done("Calibration" + ("" if name == "all" else f": {shown(name)}"), f"{told}.")


def survival(table: Any, options: Any) -> Any:
    """Curves with intervals, and the numbers at risk below; numbers under `min_donors` are not written."""
    arms = [a for a in options.arms if (table["arm"] == a).any()]
    ticks = np.linspace(0, options.horizon, TICKS)
    with canvas(width=5.8, height=3.4 + 0.26 * len(arms)) as c:
        ends = []
        for i, arm in enumerate(arms):
            part = table[table["arm"] == arm]
            time, s, low, high = (part[k].to_numpy(dtype=float) for k in ("time", "survival", "low", "high"))
            colour = COLOURS[i % len(COLOURS)]
            c.axis.step(time, s, where="post", color=colour, ls=STYLES[i % len(STYLES)], label=shown(arm))
            c.axis.fill_between(time, low, high, step="post", color=colour, alpha=0.15, lw=0)
            ends.append(f"{arm} {s[-1]:.2f} at {time[-1]:g}")
            for tick, number in zip(ticks, at_risk(part, ticks), strict=True):
                c.axis.text(
                    tick, -0.28 - 0.085 * i, number, transform=c.axis.get_xaxis_transform(), ha="center", fontsize=8
                )
            c.axis.text(
                -0.06,
                -0.28 - 0.085 * i,
                shown(arm, 14),
                transform=c.axis.transAxes,
                ha="right",
                fontsize=8,
                color=colour,
            )
        c.axis.text(-0.06, -0.2, "at risk", transform=c.axis.transAxes, ha="right", fontsize=8)
        c.axis.set(xlabel=options.time_key, ylabel="survival", ylim=(0, 1.02), xlim=(0, options.horizon), xticks=ticks)
        c.axis.legend(loc="lower left")
        return c.done("Survival", f"Survival at the end of each curve: {'; '.join(ends)}.")


def at_risk(part: Any, ticks: F64) -> list[str]:
    """Donors at risk just after each tick, as the curve's own rows have it."""
    time, n = part["time"].to_numpy(dtype=float), part["at_risk"].to_numpy()
    made = []
    for tick in ticks:
        later = np.flatnonzero(time > tick + 1e-9)
        made.append(str(n[later[0]]) if len(later) else "")
    return made
