"""model-outcome: agreement with lifelines and statsmodels, power and coverage over cohorts, cost.

    python benchmarks/outcome.py agreement            the pooled fit, and that of the protocol, against the packages
    python benchmarks/outcome.py cohorts --model cox --donors 100 --hospitals 5 --repetitions 200
    python benchmarks/outcome.py real                 real donor sets of ../shared/data: AML and CMV, one marker a run
    python benchmarks/outcome.py protocol             a few of these cohorts through the protocol, with bytes and time

Donors are drawn from the lung cells of `demo_sites`: a donor is 80 real cells of a hospital, with a tilt of its own
towards some cell types. Features: the share of T cells (centred log-ratio), the age, the sex. Outcomes are
simulated from these; `--effect` is the coefficient of the share per standard deviation.
`agreement` needs statsmodels and lifelines.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import scipy.stats

import cloister as cl
from cloister.errors import CloisterError, ProtocolAbort
from cloister.study import Party
from cloister.testing import Case, run_protocol, values
from cloister.workflows.model_outcome import pooled_outcomes as protocol
from cloister.workflows.model_outcome.baselines import meta, pooled
from cloister.workflows.model_outcome.pooled_outcomes import Donors, Params

HUB = Party("hub")
CELLS, INTERVALS, HORIZON = 80, 36, 6.0
AGE = 0.4
DATA = Path(__file__).parents[1] / ".." / "shared" / "data"


def composition() -> list[Any]:
    """Cell types of the real cells of each demo site, as codes."""
    labels = [a.obs["cell_type"].astype(str).to_numpy() for a in cl.demo_sites().values()]
    names = sorted(set.intersection(*(set(x) for x in labels)))
    return [np.array([names.index(v) for v in x if v in names]) for x in labels], names


CODES, NAMES = composition()


def hospital(rng: np.random.Generator, model: str, n: int, effect: float, home: int) -> Donors:
    codes, k = CODES[home % len(CODES)], len(NAMES)
    counts = np.empty((n, k))
    for i in range(n):
        tilt = rng.gamma(2.0, 0.5, k)[codes]
        counts[i] = np.bincount(rng.choice(codes, CELLS, p=tilt / tilt.sum()), minlength=k)
    logs = np.log(counts + 0.5)
    share = (logs - logs.mean(axis=1, keepdims=True))[:, NAMES.index("T")]
    age, sex = rng.normal(60, 12, n).round(), (rng.random(n) < 0.5).astype(float)
    eta = effect * share / SPREAD + AGE * (age - 60) / 12 + rng.normal(0, 0.4)
    interval = None
    if model == "logistic":
        y = (rng.random(n) < 1 / (1 + np.exp(-eta))).astype(float)
    elif model == "linear":
        y = eta + rng.normal(0, 1, n)
    elif model == "negbin":
        y = rng.poisson(rng.gamma(2.0, np.exp(eta + 1) / 2)).astype(float)
    else:
        event, last = rng.exponential(4 / np.exp(eta)), rng.uniform(1, 8, n)
        seen = np.minimum(np.minimum(event, last), HORIZON)
        y = ((event <= last) & (event <= HORIZON)).astype(float)
        interval = np.minimum((seen / HORIZON * INTERVALS).astype(np.int64), INTERVALS - 1)
    return Donors(np.stack([share, age, sex], axis=1), y, np.full(n, CELLS), interval)


SPREAD = 1.0
SPREAD = float(
    np.std(np.concatenate([hospital(np.random.default_rng(i), "linear", 300, 0, i).x[:, 0] for i in range(3)]))
)


def cohort(
    rng: np.random.Generator, model: str, donors: int, hospitals: int, effect: float
) -> tuple[Params, dict[Party, Donors]]:
    """Hospitals of unequal size: the largest has about twice as many donors as the smallest."""
    weights = np.linspace(2, 1, hospitals)
    sizes = np.maximum(np.rint(donors * weights / weights.sum()).astype(int), 6)
    held = {Party(f"site-{i}"): hospital(rng, model, int(n), effect, i) for i, n in enumerate(sizes)}
    columns = ("share:T", "age", "sex:male")[: 1 if donors / hospitals < 15 else 3]
    held = {u: dataclasses.replace(d, x=d.x[:, : len(columns)]) for u, d in held.items()}
    intervals = INTERVALS if model == "cox" else 0
    return Params(tuple(held), HUB, model, columns, (tuple(range(len(columns))),), intervals), held


def ideal(params: Params, held: dict[Party, Donors]) -> protocol.Modelled | None:
    """What the protocol computes; sites that may not take part are left out."""
    able = {}
    for u, mine in held.items():
        try:
            protocol.check_site(params, mine)
            able[u] = mine
        except CloisterError:
            continue
    if len(able) < 2:
        return None
    try:
        return protocol.ideal(dataclasses.replace(params, sites=tuple(able)), able)[HUB]
    except ProtocolAbort:
        return None


def term_of(found: protocol.Modelled | None, term: int = 0) -> tuple[float, float, float]:
    if found is None:
        return math.nan, math.nan, math.nan
    fit = found.fits[0]
    error = math.sqrt(max(fit.covariance[term, term], 0.0))
    half = float(scipy.stats.norm.ppf(0.975) if math.isinf(fit.df) else scipy.stats.t.ppf(0.975, fit.df))
    if not 0 < error < 50:
        return math.nan, math.nan, math.nan
    unit = 1.0 if term else SPREAD
    return float(fit.coefficients[term]) * unit, error * unit, half


def cohorts(model: str, donors: int, hospitals: int, repetitions: int, effect: float, term: int) -> None:
    start = time.perf_counter()
    used: list[float] = []
    closed: list[bool] = []
    names = ("cloister", "pooled", "meta-analysis", "largest alone")
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in names}
    for seed in range(repetitions):
        params, held = cohort(np.random.default_rng([seed, donors, hospitals]), model, donors, hospitals, effect)
        alone = [pooled(params, {u: d}) for u, d in held.items()]
        able = [d for d in held.values() if len(d.y) >= 2 * (len(params.columns) + 1)]
        ready = [protocol.prepared(params, mine) for mine in able]
        used.append(sum(len(r.at) for r in ready) / sum(len(d.y) for d in held.values()))
        closed += [not r.open.all() for r in ready if r.donors > 0]
        together = {
            "cloister": ideal(params, held),
            "pooled": pooled(params, held),
            "meta-analysis": meta(alone, params),
            "largest alone": alone[0],
        }
        for name in names:
            found[name].append(term_of(together[name], term))
    took = time.perf_counter() - start
    effect = 0.0 if term else effect
    print(
        f"{model}, {donors} donors, {hospitals} hospitals, '{params.columns[term]}' with an effect of {effect}, "
        f"{len(params.columns)} feature(s), "
        f"{repetitions} repetitions, {took:.0f} s"
    )
    print(
        f"  donors used {np.mean(used):.0%}; hospitals at which a factor has a cell too small for its coefficient "
        f"{np.mean(closed):.0%}"
    )
    whole = np.array(found["pooled"])
    for name in names:
        one = np.array(found[name])
        ok = np.isfinite(one[:, 0])
        b, e, half = one[ok].T
        both = ok & np.isfinite(whole[:, 0])
        apart = (one[both, 0] - whole[both, 0]) / whole[both, 1]
        print(
            f"  {name:14s} fitted {ok.mean():5.1%}  mean {b.mean():6.3f}  sd {b.std():5.3f}  "
            f"error {np.median(e):5.3f}  "
            f"coverage {np.mean(np.abs(b - effect) <= half * e):5.1%}  rejects {np.mean(np.abs(b) > half * e):5.1%}  "
            f"from pooled: rms {np.sqrt(np.mean(apart**2)):5.3f} errors, mean {apart.mean():6.3f}"
        )


def agreement() -> None:
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
    import outcome_reference as reference
    from outcome_cases import NONE, case, plain

    for model in ("linear", "logistic", "poisson", "negbin", "cox"):
        c = case(model, thresholds=NONE, seed=7, p=3)
        answer = reference.regression(model, c)
        fit = pooled(c.params, plain(c)).fits[0]
        ours = protocol.ideal(c.params, plain(case(model, seed=7, p=3)))[HUB].fits[0]
        apart = np.abs(fit.coefficients - answer["coefficients"]).max()
        errors = np.abs(np.sqrt(np.diag(fit.covariance)) - answer["errors"]).max()
        scaled = (np.abs(ours.coefficients - answer["coefficients"]) / answer["errors"]).max()
        ratio = np.sqrt(np.diag(ours.covariance)) / answer["errors"]
        print(
            f"{model:9s} pooled: coefficients within {apart:.1e}, errors within {errors:.1e}; protocol: coefficients "
            f"within {scaled:.2g} standard errors, errors {ratio.min():.2f} to {ratio.max():.2f} of the packages'"
        )
    c = case("km", thresholds=NONE, seed=7)
    answer, curves = reference.curves(c), protocol.ideal(c.params, plain(c))[HUB].curves
    assert curves is not None
    apart = max(np.abs(curves.survival[a] - answer["survival"][n]).max() for a, n in enumerate(c.params.arms))
    print(
        f"km        groups of one donor: survival within {apart:.1e}, "
        f"chi-square {abs(curves.test[0] - answer['chi_square']):.1e}"
    )
    for n, hospitals in ((10, 3), (20, 5), (100, 10)):
        gaps, tests = [], []
        for seed in range(20):
            c = case("km", seed=seed, sites=hospitals, n=n)
            whole = Case(c.params, {u: (dataclasses.replace(d, thresholds=NONE),) for u, (d,) in c.inputs.items()})
            one, other = (protocol.ideal(c.params, plain(x))[HUB].curves for x in (c, whole))
            assert one is not None
            assert other is not None
            shown = other.at_risk >= 10
            gaps.append(np.abs(one.survival - other.survival)[shown].max())
            tests.append(abs(one.test[0] - other.test[0]))
        print(
            f"km        {n} donors at each of {hospitals} hospitals: survival where 10 are at risk within "
            f"{np.median(gaps):.3f} (median of 20 cohorts; at most {max(gaps):.3f}), chi-square {np.median(tests):.2f}"
        )


def through() -> None:
    for model, donors, hospitals in (
        ("cox", 30, 3),
        ("cox", 100, 5),
        ("cox", 1000, 10),
        ("logistic", 100, 5),
        ("linear", 100, 5),
    ):
        for seed in range(2):
            params, held = cohort(np.random.default_rng([seed, donors, hospitals]), model, donors, hospitals, 0.5)
            start = time.perf_counter()
            run = run_protocol(protocol, Case(params, {u: (d,) for u, d in held.items()}), timeout=60.0)
            took, made = time.perf_counter() - start, values(run)
            if not made:
                print(f"{model}, {donors} donors, {hospitals} hospitals: {next(iter(run.errors.values()))}")
                continue
            wanted = protocol.ideal(params, held)[HUB].fits[0]
            apart = np.abs(made[HUB].fits[0].coefficients - wanted.coefficients).max()
            sent = sum(
                size for _, size in ((e, e.bytes) for e, _ in run.receipts[params.sites[0]].entries if e.kind == "sent")
            )
            print(
                f"{model}, {donors} donors, {hospitals} hospitals, cohort {seed}: {took:.2f} s for all parties, "
                f"{sent / 1e3:.1f} kB from a site, {made[HUB].openings} sums; within {apart:.0e} of the ideal"
            )


def real_sets() -> dict[str, tuple[np.ndarray, np.ndarray, np.ndarray, list[str]]]:
    """Cells, donors, labels of the donors and names of markers of the real donor sets."""
    aml = np.load(DATA / "cytometry" / "aml_flowcap_cytodx.npz")
    cmv = np.load(DATA / "nk_cmv_pricell" / "nk_cmv_cells.npz")
    scatter = np.arcsinh(aml["X"] / 5)
    return {
        "AML or healthy (FlowCAP-II)": (scatter, aml["donor"], aml["donor_label"], aml["markers"].tolist()),
        "CMV or not, NK cells": (cmv["X_milli"] / 1000, cmv["donor"], cmv["donor_label"], cmv["markers"].tolist()),
    }


def real() -> None:
    """Logistic regression of each marker's mean alone, on two hospitals of ten donors each."""
    import anndata

    for name, (x, donor, label, markers) in real_sets().items():
        donor = np.unique(donor, return_inverse=True)[1]
        order = np.argsort(label, kind="stable")
        home = np.empty(len(label), int)
        home[order] = np.arange(len(label)) % 2  # cases and controls at both hospitals
        data = {}
        for h, site in enumerate(("basel", "vienna")):
            rows = np.flatnonzero(home[donor] == h)
            obs = {m: x[rows, j].astype(float) for j, m in enumerate(markers)}
            obs |= {"donor": [f"donor-{d}" for d in donor[rows]], "label": label[donor[rows]].astype(int)}
            data[site] = anndata.AnnData(np.zeros((len(rows), 1)), obs=obs)
        apart, ratios, ended, kept = [], [], {}, []
        for marker in markers:
            given = {"model": "logistic", "outcome_key": "label", "donor_key": "donor", "features": (f"mean:{marker}",)}
            beside = cl.outcome_baselines(data, **given)
            pooled_fit = beside["pooled"]["coefficients"]
            try:
                ours = cl.rehearse("model-outcome", data=data, **given).data["basel"].uns["outcome"]["coefficients"]
            except CloisterError as e:
                words = str(e)
                ended[marker] = "separated" if "separated" in words else words[:60]
                continue
            if not len(pooled_fit):
                ended[marker] = "pooled separated"
                continue
            b, p = ours.iloc[0], pooled_fit.iloc[0]
            apart.append((b["coefficient"] - p["coefficient"]) / p["error"])
            ratios.append(b["error"] / p["error"])
            kept.append(
                (float(p["p"]), f"{marker} {p['coefficient']:.2f} (here {b['coefficient']:.2f})", float(b["p"]))
            )
        most, middle = np.abs(apart).max(), np.median(np.abs(apart))
        clear, here = (sum(k[i] < 0.05 for k in kept) for i in (0, 2))
        print(
            f"{name}: {len(label)} donors, {len(markers)} markers, {len(apart)} compared; from the pooled fit: "
            f"median {middle:.2f} errors, at most {most:.2f}; error over the pooled one, median "
            f"{np.median(ratios):.2f}; p < 0.05 at pooled {clear}, here {here}"
        )
        far = sorted(zip(np.abs(apart), [k[1] for k in kept], strict=True))[-2:]
        print("   farthest:", "; ".join(f"{name} {v:.2f}" for v, name in reversed(far)))
        print("   strongest:", "; ".join(f"{m} p {a:.3f} (here {b:.3f})" for a, m, b in sorted(kept)[:4]))
        print("   ended:", ended or "none")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("agreement", "cohorts", "protocol", "real"))
    parser.add_argument("--model", default="cox", choices=("cox", "logistic", "linear", "negbin"))
    parser.add_argument("--donors", type=int, default=100)
    parser.add_argument("--hospitals", type=int, default=5)
    parser.add_argument("--repetitions", type=int, default=200)
    parser.add_argument("--effect", type=float, default=0.5)
    parser.add_argument(
        "--term", type=int, default=0, choices=(0, 2), help="0: the share of T cells; 2: the sex, which has no effect"
    )
    given = parser.parse_args()
    if given.what == "cohorts":
        cohorts(given.model, given.donors, given.hospitals, given.repetitions, given.effect, given.term)
    else:
        {"agreement": agreement, "protocol": through, "real": real}[given.what]()
