"""Regression of donors' outcomes on donors' features.

A row of a `Table` is a donor, or a group of donors with their mean features. `evaluate` gives the log likelihood of the
rows, its score U and its information K at any coefficients. Every site has an intercept (Cox: a baseline hazard) of its
own, which is eliminated at the site.

Sites are combined by one Newton step from a point b of each site's own, near its maximum:

    C = U(b) + K(b) b                     β = (Σ K)⁻¹ Σ C                     covariance (Σ K)⁻¹
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from cloister.arrays import F64, I64, Bits

Model = Literal["cox", "logistic", "linear", "poisson", "negbin"]
MODELS: tuple[Model, ...] = ("cox", "logistic", "linear", "poisson", "negbin")
LARGEST = 30.0  # of a linear predictor, so that exponentials stay finite
STEP = 1.5  # largest change of a standardised coefficient in one round
ROUNDS = 60  # of Newton's method at one site


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


# ---- the fit ---------------------------------------------------------------------------------------------------------


def drawn_to_zero(model: Model, t: Table, prior: float, dispersion: float = 0.0) -> F64:
    """Coefficients at the maximum of the log likelihood less |b|² / (2 prior²): finite for separated outcomes too."""
    b = np.zeros(t.x.shape[1])
    weight = 1 / prior**2
    for _ in range(ROUNDS):
        found = evaluate(model, t, b, dispersion)
        change = np.linalg.solve(found.information + weight * np.eye(len(b)), found.score - weight * b)
        far = float(np.abs(change).max(initial=0.0))
        b = b + change * min(1.0, STEP / max(far, 1e-300))
        if far < 1e-10:
            break
    return b


def extra_variance(y: F64, near: I64, exposure: F64 | None, least: int = 1) -> F64:
    """Σ (y - m)² - m and Σ m² of rows in groups, with m the group's mean, both without bias by it.

    One row may be most of its group's Σ (y - m)². So no group has more than 1 / `least` of the sum over groups, if
    there are so many; a larger one becomes that.
    """
    groups = [np.flatnonzero(near == g) for g in np.unique(near[near >= 0])]
    each = [np.ones(len(at)) if exposure is None else exposure[at] for at in groups]
    means = [float(y[at].sum()) * e / e.sum() for at, e in zip(groups, each, strict=True)]
    spread = np.array([float(np.square(y[at] - m).sum()) for at, m in zip(groups, means, strict=True)])
    order = np.sort(spread)[::-1]
    for t in range(least if len(groups) >= least else 0):  # the t largest become the bound
        bound = float(order[t:].sum()) / (least - t)
        if order[t] <= bound:
            spread = np.minimum(spread, bound)
            break
    excess, squared = 0.0, 0.0
    for at, e, m, found in zip(groups, each, means, spread.tolist(), strict=True):
        left = 1 - e / e.sum()
        excess += found - float(m @ left)
        squared += float(np.square(m) @ left) - found / len(at)
    return np.array([excess, squared])


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
