"""Regression of donors' outcomes on donors' features, from tables in which no donor stands alone.

A site divides its donors into groups of similar features (`disclosure.Rows.similar`). What it adds to a fit comes from
two tables, and from nothing else:

- `Table`: for each group the number of donors, the means of the features, the sum of the outcomes (for survival: donors
  at risk and events in each interval). The likelihood of these group means may be evaluated at any coefficients.
- `Within`: one score and one information matrix over all groups together, for the features less their group means, at
  coefficients of zero and with an intercept (a baseline hazard) of each group's own. They are computed once.

    U(β) = Σ_sites [ U_table(β) + C - K β ] = 0          J(β) = Σ_sites [ J_table(β) + K ]
    covariance = J⁻¹ (J_table + B) J⁻¹                   B = K, but for counts with extra variance

In a linear model the two add up to least squares on the donors. In the others U differs from the score of the donors by
terms of second order in the effect of the differences within a group. With groups of one donor it is that score.

Every site has an intercept (Cox: a baseline hazard) of its own, which is eliminated at the site.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from cloister.arrays import F64, I64, Bits

Model = Literal["cox", "logistic", "linear", "poisson", "negbin"]
MODELS: tuple[Model, ...] = ("cox", "logistic", "linear", "poisson", "negbin")
LARGEST = 30.0  # of a linear predictor, so that exponentials stay finite
STEP = 1.5  # largest change of a standardised coefficient in one round


@dataclass(frozen=True, slots=True)
class Table:
    """Groups of donors of one site; every number is a sum or a mean over all donors of a group."""

    n: F64  # (G,), donors
    x: F64  # (G, P), mean features
    y: F64  # (G,), sum of outcomes; of events for survival
    exposure: F64  # (G,), sum of exposures; donors where there is none
    at_risk: F64  # (G, J), donors at risk in each interval; J = 0 without times
    events: F64  # (G, J)

    def __len__(self) -> int:
        return len(self.n)


@dataclass(frozen=True, slots=True)
class Within:
    """What differs within groups, added up over all groups of a site."""

    score: F64  # C, (P,)
    information: F64  # K, (P, P)
    variance: F64  # B, (P, P), of C
    moments: F64 = field(default_factory=lambda: np.zeros(2))  # of counts: Σ (y - m)² - m and Σ m², as `dispersion_of`


def grouped(
    x: F64, y: F64, codes: I64, exposure: F64 | None = None, interval: I64 | None = None, intervals: int = 0
) -> Table:
    """The table of the groups that `codes` names, from 0; rows with code -1 are in none."""
    inside = codes >= 0
    at = codes[inside]
    G = int(at.max(initial=-1)) + 1

    def total(values: F64) -> F64:
        sums = np.zeros((G, *values.shape[1:]))
        np.add.at(sums, at, values)
        return sums

    n = total(np.ones(len(at)))
    exposed = n if exposure is None else total(exposure[inside])
    shape = (G, intervals)
    exits, events = np.zeros(shape), np.zeros(shape)
    if interval is not None:
        np.add.at(exits, (at, interval[inside]), 1.0)
        np.add.at(events, (at, interval[inside]), y[inside])
    at_risk = np.cumsum(exits[:, ::-1], axis=1)[:, ::-1]
    return Table(n, total(x[inside]) / n[:, None], total(y[inside]), exposed, at_risk, events)


# ---- likelihood of group means ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Evaluated:
    """One site's table at some coefficients."""

    value: float  # log likelihood, the site's own intercept at its maximum
    score: F64  # (P,)
    information: F64  # (P, P)
    expected: F64  # (G,), sum of outcomes that the fit expects of each group

    @classmethod
    def none(cls, p: int, groups: int = 0) -> Evaluated:
        return cls(0.0, np.zeros(p), np.zeros((p, p)), np.zeros(groups))


def evaluate(model: Model, t: Table, beta: F64, dispersion: float = 0.0) -> Evaluated:
    """Log likelihood, score and information of the group means; of nothing where no event, or nothing else, is seen."""
    if not len(t):
        return Evaluated.none(len(beta))
    eta = np.clip(t.x @ beta, -LARGEST, LARGEST)
    if model == "cox":
        return _cox(t, eta)
    if model == "logistic":
        return _logistic(t, eta)
    return _counts(t, eta, 0.0 if model == "poisson" else dispersion)


def _centred(x: F64, weights: F64) -> F64:
    """The information matrix of an intercept and x, less what the intercept takes."""
    mean = weights @ x / weights.sum()
    apart = x - mean
    information: F64 = (apart * weights[:, None]).T @ apart
    return information


def _logistic(t: Table, eta: F64) -> Evaluated:
    total, n = float(t.y.sum()), float(t.n.sum())
    if total <= 0 or total >= n:  # the intercept is infinite, and the groups say nothing about the features
        return Evaluated(0.0, np.zeros(t.x.shape[1]), np.zeros((t.x.shape[1],) * 2), t.y.copy())
    low, high = -LARGEST - eta.max() - 10, LARGEST - eta.min() + 10
    a = math.log(total / (n - total)) - float(np.average(eta, weights=t.n))
    for _ in range(100):  # Newton, held between two bounds
        p = 1 / (1 + np.exp(-(eta + a)))
        gap = total - float(t.n @ p)
        if abs(gap) < 1e-12 * n:
            break
        low, high = (a, high) if gap > 0 else (low, a)
        step = gap / max(float(t.n @ (p * (1 - p))), 1e-300)
        a = a + step if low < a + step < high else (low + high) / 2
    z = eta + a
    p = 1 / (1 + np.exp(-z))
    value = float(t.y @ z - t.n @ np.logaddexp(0, z))
    return Evaluated(value, t.x.T @ (t.y - t.n * p), _centred(t.x, t.n * p * (1 - p)), t.n * p)


def _counts(t: Table, eta: F64, dispersion: float) -> Evaluated:
    """Poisson, or negative binomial with variance m + dispersion m²; m is the mean of one donor of the group."""
    total = float(t.y.sum())
    if total <= 0:
        return Evaluated.none(t.x.shape[1], len(t))
    each = t.exposure / t.n
    a = math.log(total / float(t.exposure @ np.exp(eta)))
    if dispersion > 0:
        for _ in range(100):
            m = each * np.exp(np.clip(eta + a, -LARGEST, LARGEST))
            gap = float(((t.y - t.n * m) / (1 + dispersion * m)).sum())
            a += float(np.clip(gap / (t.n * m * (1 + dispersion * t.y / t.n) / (1 + dispersion * m) ** 2).sum(), -1, 1))
            if abs(gap) < 1e-12 * total:
                break
    m = each * np.exp(np.clip(eta + a, -LARGEST, LARGEST))
    shrunk = 1 + dispersion * m
    mu = t.n * m
    if dispersion > 0:
        value = float(t.y @ np.log(m / shrunk) - (t.n / dispersion) @ np.log(shrunk))
    else:
        value = float(t.y @ np.log(m) - mu.sum())
    return Evaluated(value, t.x.T @ ((t.y - mu) / shrunk), _centred(t.x, mu / shrunk), mu)


def _cox(t: Table, eta: F64) -> Evaluated:
    """Partial likelihood of this site's stratum; events of one interval are tied, in Efron's way."""
    p = t.x.shape[1]
    here = np.flatnonzero(t.events.sum(axis=0) > 0)
    if not len(here):
        return Evaluated.none(p, len(t))
    d = np.rint(t.events[:, here].sum(axis=0)).astype(np.int64)
    which = np.repeat(np.arange(len(here)), d)
    share = np.concatenate([np.arange(k) / k for k in d])
    w = np.exp(eta - eta.max())
    weight = t.at_risk[:, here][:, which] - share * t.events[:, here][:, which]  # (G, events)
    each = w[:, None] * weight
    s0 = each.sum(axis=0)
    prob = each / s0
    s1 = prob.T @ t.x  # (events, P)
    mean_square = np.einsum("ge,gp,gq->pq", prob, t.x, t.x)
    score = t.x.T @ t.y - s1.sum(axis=0)
    value = float(t.y @ eta - np.log(s0).sum() - len(which) * eta.max())
    hazard = np.zeros(len(here))  # Breslow's, for what the fit expects
    np.add.at(hazard, which, 1 / s0)
    expected = w * (t.at_risk[:, here] @ (d / np.maximum((t.at_risk[:, here] * w[:, None]).sum(axis=0), 1e-300)))
    return Evaluated(value, score, mean_square - s1.T @ s1, expected)


# ---- what differs within groups --------------------------------------------------------------------------------------


def within(
    model: Model,
    x: F64,
    y: F64,
    kept: I64,
    near: I64,
    exposure: F64 | None = None,
    interval: I64 | None = None,
) -> Within:
    """C, K and B of the rows that `kept` puts into groups of two or more.

    The extra variance of counts is that among rows with the same code in `near`, which are few and much alike.
    """
    p = x.shape[1]
    C, K, B = np.zeros(p), np.zeros((p, p)), np.zeros((p, p))
    for g in np.unique(kept[kept >= 0]).tolist():
        at = np.flatnonzero(kept == g)
        n = len(at)
        if n < 2:
            continue
        if model == "cox":
            assert interval is not None
            one, two = _log_rank(x[at], y[at], interval[at])
            C, K = C + one, K + two
            continue
        e = np.ones(n) if exposure is None else exposure[at]
        d = x[at] - e @ x[at] / e.sum()
        total = float(y[at].sum())
        C += d.T @ y[at]
        if model == "logistic":
            K += total * (n - total) / (n * (n - 1)) * d.T @ d
            continue
        K += total / e.sum() * (d * e[:, None]).T @ d
        rest = y[at] - total * e / e.sum()
        B += float(rest @ rest) / (n - 1) * (d.T @ d)
    if model != "negbin":
        return Within(C, K, K)
    moments, counted = _extra(y, near, exposure)
    scale = max(1.0, 1 + moments[0] / counted) if counted > 0 else 1.0  # variance over mean, as in the other part
    return Within(C / scale, K / scale, B / scale**2, moments)


def _extra(y: F64, near: I64, exposure: F64 | None) -> tuple[F64, float]:
    """Σ (y - m)² - m, Σ m² and Σ m of rows in groups, with m the group's mean, all without bias by it."""
    excess, squared, counted = 0.0, 0.0, 0.0
    for g in np.unique(near[near >= 0]).tolist():
        at = np.flatnonzero(near == g)
        e = np.ones(len(at)) if exposure is None else exposure[at]
        m = float(y[at].sum()) * e / e.sum()
        left = 1 - e / e.sum()
        spread = float(np.square(y[at] - m).sum())
        excess += spread - float(m @ left)
        squared += float(np.square(m) @ left) - spread / len(at)
        counted += float(m @ left)
    return np.array([excess, squared]), counted


def _log_rank(x: F64, y: F64, interval: I64) -> tuple[F64, F64]:
    """Score and information of Cox's likelihood at coefficients of zero, one baseline for these rows."""
    p = x.shape[1]
    score, information = np.zeros(p), np.zeros((p, p))
    for j in np.unique(interval[y > 0]).tolist():
        there = interval >= j
        dead = there & (interval == j) & (y > 0)
        n, k = int(there.sum()), int(dead.sum())
        apart = x[there] - x[there].mean(axis=0)
        score += (x[dead] - x[there].mean(axis=0)).sum(axis=0)
        if n > 1:
            information += k * (n - k) / (n - 1) * apart.T @ apart / n
    return score, information


# ---- the fit ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sums:
    """What all sites together add in one round; of one model."""

    value: float
    score: F64
    information: F64


def step_of(table: Sums, score: F64, information: F64, beta: F64) -> tuple[F64, float]:
    """The next coefficients, and how far the last ones were from the root; at most STEP away."""
    J = table.information + information
    U = table.score + score - information @ beta
    change = np.linalg.lstsq(J, U, rcond=1e-10)[0]
    far = float(np.abs(change).max(initial=0.0))
    return beta + change * min(1.0, STEP / max(far, 1e-300)), far


def covariance_of(table: F64, information: F64, variance: F64) -> F64:
    """J⁻¹ (J_table + B) J⁻¹."""
    bread = np.linalg.pinv(table + information, rcond=1e-10, hermitian=True)
    made: F64 = bread @ (table + variance) @ bread
    return made


def singular(information: F64) -> Bits:
    """Which coefficients the information says nothing about."""
    size = np.sqrt(np.maximum(np.diag(information), 0.0))
    if not np.all(size > 0):
        return np.asarray(size <= 0)
    values, vectors = np.linalg.eigh(information / np.outer(size, size))
    small = values < 1e-8
    return np.asarray((np.abs(vectors[:, small]) > 1e-3).any(axis=1))


def dispersion_of(excess: float, squared: float) -> float:
    """Of a negative binomial, by moments: Σ ((y - m)² - m) over Σ m²."""
    return max(0.0, excess / squared) if squared > 0 else 0.0


# ---- survival --------------------------------------------------------------------------------------------------------


def kaplan_meier(at_risk: F64, events: F64) -> tuple[F64, F64]:
    """Survival after each interval, and its standard error by Greenwood; along the last axis."""
    n = np.maximum(at_risk, 1e-300)
    survival: F64 = np.cumprod(np.where(at_risk > 0, 1 - events / n, 1.0), axis=-1, dtype=np.float64)
    left = at_risk - events
    terms = np.where((at_risk > 0) & (left > 0), events / np.maximum(n * np.maximum(left, 1e-300), 1e-300), 0.0)
    return survival, survival * np.sqrt(np.cumsum(terms, axis=-1))


def log_rank(at_risk: F64, events: F64) -> tuple[F64, F64]:
    """Observed less expected events of each arm, (A,), and their covariance; arms are rows, intervals columns."""
    n, d = at_risk.sum(axis=0), events.sum(axis=0)
    there = (n > 1) & (d > 0)
    share = at_risk[:, there] / n[there]
    difference = events[:, there].sum(axis=1) - share @ d[there]
    factor = d[there] * (n - d)[there] / (n[there] - 1)
    covariance = np.diag(share @ factor) - (share * factor) @ share.T
    alone = (n == 1) & (d > 0)
    return difference + (events - at_risk)[:, alone].sum(axis=1), covariance


def chi_square(difference: F64, covariance: F64) -> tuple[float, int]:
    """Of a vector with that covariance, and its degrees of freedom."""
    rank = int(np.linalg.matrix_rank(covariance, hermitian=True))
    return float(difference @ np.linalg.pinv(covariance, hermitian=True) @ difference), rank


def concordant(risk: F64, n: F64, at_risk: F64, events: F64) -> tuple[float, float]:
    """Pairs of donors of different groups in the order that their groups' risks have, and all that can be ordered.

    A pair can be ordered if one donor has an event while the other is at risk afterwards. Without times, `events` has
    one column of outcomes and `at_risk` the donors without one.
    """
    agree = comparable = 0.0
    for g in range(len(n)):
        higher = np.where(risk[g] > risk, 1.0, np.where(risk[g] == risk, 0.5, 0.0))
        pairs = at_risk @ events[g]  # of each group, with g's events
        pairs[g] = 0.0
        agree, comparable = agree + float(higher @ pairs), comparable + float(pairs.sum())
    return agree, comparable


def later(at_risk: F64, events: F64) -> F64:
    """Donors of each group at risk after the events of an interval, with whom such an event can be compared."""
    made: F64 = at_risk - events
    return made
