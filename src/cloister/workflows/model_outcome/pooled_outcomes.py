"""Pooled outcomes: regression of donors' outcomes on their features, and survival curves, from checked sums.

    L1   u, S    common seed: a secret of the sites, for checked sums
    L2   u       tables of its own donors, before the first sum and from nothing but its own rows:
                 T_u   groups of similar donors, each of min_donors or more: donors, mean features, sum of outcomes;
                       donors at risk and events in each interval of time
                 F_u   score C and information K of the features less their group means, at coefficients of zero, of
                       donors whose joint leverage is at most 1 / min_donors
                 A site with enough donors for its features has one group of all: T_u says next to nothing then
         u, S    checked sum: donors, Σ n x̄, Σ n x̄ x̄ᵀ, Σ y
    L3   u, S    checked sum of F_u; for a linear model XᵀX, Xᵀy, yᵀy, and nothing else
    for `rounds` rounds, at β that all know:
    L4   u, S    checked sum: log likelihood, score and information of T_u, with u's own intercept or baseline hazard
         u, S    β ← β + J⁻¹ (Σ U_table + C - K β), J = Σ J_table + K; the extra variance of counts is in F_u
    L5   u, S    checked sum, once: score and information of the donors themselves at the last β, of sites with one
                 group where no donor stands out at this β; of other sites T_u and F_u again. One more step of β; J
    L6   u, S    checked sum: observed and expected outcomes in five ranges of the prediction; ordered pairs of donors
    L7   u, S    all sites received the same broadcasts     (same_view)

    survival curves instead of L2 to L6:
    L8   u       donors of an arm by their times, in runs of min_donors or more; the exits of a run lie evenly between
                 the means of its neighbours, and each has the run's share of events
         u, S    checked sum: donors at risk and events per arm and interval; the log-rank difference within u

`models.outcomes` has the arithmetic. Time is on a grid that the study names; events of an interval are tied (Efron).
Times of a Cox model are moved in runs, too, over all donors of u.

Thresholds, enforced by each site on its own donors, whatever others send. In T_u a donor has leverage 1 / (donors of
its group). In T_u and F_u together no donor has a leverage above 1 / min_donors: donors that would are left out of
F_u. At L5 the site looks at the β that came of the sums, and adds its donors' own likelihood only if no donor has more
than that in the weights which this β gives, and none more than half of the score or information in any direction. An
exposure counts as a weight in F_u. In a linear model all donors' own features are used where no donor has more
in the columns [1, X]; else those that stand out have the mean features of a group.

Reveals
-------
coordinator, site : over all sites' donors: their number, mean and spread of the group means, number of events; C and K;
    in each round the log likelihood, score and information of the group means; the result. For a linear model: XᵀX, Xᵀy
    and yᵀy within sites. For survival curves: donors at risk and events per arm and interval, in whole runs.
    Thresholds count donors, not how much each has of a number. Of donors in a group, or with one feature, that of a
    single one who has another feature; a third of a donor far from all others; a sum of squares by one large outcome.
malicious coordinator : the same. It cannot change a sum without an abort.
one malicious site : the same at coefficients that it can choose by its part of the sums: over all rounds no more than
    T_u and F_u of each other site, that is group means and one scatter matrix; at L5, once a run, one score and one
    information matrix over donors none of whom stands out.
coordinator with k sites : the sums over the other sites; with all but one, those of the last site.

Assumes
-------
What the checked sum assumes: every site stays to the end. A donor is at one site. Runs with other features divide the
donors anew: two runs together may isolate a donor, which budgets and approvals limit and nothing else does.

Cost
----
Per site rounds + 3 checked sums of at most a few hundred numbers of two words; one for survival curves.

References
----------
[Cox72] Cox, JRSS B 1972. [Efr77] Efron, JASA 1977 (ties). [DMS02] Domingo-Ferrer, Mateo-Sanz, IEEE TKDE 2002
(microaggregation). [MH59] Mantel, Haenszel 1959 (score within groups). [KM58] Kaplan, Meier 1958. Lines numbered here;
the security argument is docs/security/model_outcome.md.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import scipy.stats

from cloister.arrays import F64, I64
from cloister.disclosure import SLACK, Contribution, Rows, SimilarGroups, Thresholds, join
from cloister.errors import DataError, ParameterError, ProtocolAbort
from cloister.models import outcomes
from cloister.mpc.crypto.agreement import Identity
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.net.channel import Channel
from cloister.mpc.sums import checked_sum, common_seed, consistency_check
from cloister.study import Party
from cloister.workflows.common.gene_moments import join_sum, split_sum

NAME = "pooled_outcomes"
LEAST_DONORS = 2  # that a study may agree on
BINS = 5  # ranges of the prediction in which observed and expected outcomes are compared
FAR = 1e-6  # a fit that still moves by more, in deviations of a feature, has not converged
WIDE = 8.0  # deviation of a linear predictor above which outcomes are separated
MOST_ROUNDS = 60
CANONICAL = ("logistic", "poisson")  # outcomes enter sums as Xᵀy, whatever the coefficients
NEAR = 3  # donors, at least, among whom the extra variance of counts is found
RANK = 1e-10  # singular values below this part of the largest are rounding
MERGED = (list(range(BINS)), [1, 1, 2, 3, 3], [1, 1, 1, 3, 3])  # ranges of the prediction, and wider ones
CLOSE = 0.05  # of the logarithm of a feature's variance: smaller groups are preferred, as they are more alike
MOST = 0.5  # of the score or the information at L5, in any direction, that may be one donor's
FLAT = 1e6  # weights at L5 that differ by more leave some donors to the last digits of the sums
WORTH = 0.3  # the same, given up for one large group whose donors' own likelihood is used


@dataclass(frozen=True, slots=True)
class Params:
    sites: tuple[Party, ...]
    coordinator: Party
    model: str  # "cox", "logistic", "linear", "poisson", "negbin"; or "km"
    columns: tuple[str, ...] = ()  # features, one column each
    fits: tuple[tuple[int, ...], ...] = ()  # columns of each regression
    intervals: int = 0  # of time
    arms: tuple[str, ...] = ()  # of survival curves
    rounds: int = 15
    min_donors: int = 3

    def __post_init__(self) -> None:
        if self.model not in (*outcomes.MODELS, "km"):
            raise ParameterError(f"model must be one of {', '.join((*outcomes.MODELS, 'km'))}, found '{self.model}'")
        if self.min_donors < LEAST_DONORS:
            raise ParameterError(f"min_donors must be at least {LEAST_DONORS}, found {self.min_donors}")
        if not 1 <= self.rounds <= MOST_ROUNDS:
            raise ParameterError(f"rounds must be 1 to {MOST_ROUNDS}, found {self.rounds}")
        if self.model in ("cox", "km") and self.intervals < 2:
            raise ParameterError(f"survival needs at least two intervals of time, found {self.intervals}")
        if self.model == "km":
            if not self.arms or len(set(self.arms)) != len(self.arms):
                raise ParameterError("survival curves need the names of the arms, each once")
        elif not self.fits or any(not f or not {*f} <= {*range(len(self.columns))} for f in self.fits):
            raise ParameterError("a regression needs at least one of the columns")

    @property
    def curves(self) -> bool:
        return self.model == "km"

    @property
    def linear(self) -> bool:
        return self.model == "linear"

    @property
    def likelihood(self) -> outcomes.Model:
        return next(m for m in outcomes.MODELS if m == self.model)


@dataclass(frozen=True, slots=True)
class Donors:
    """What a site holds: one row per donor."""

    x: F64  # (n, P)
    y: F64  # (n,), outcome; for survival 1 for an event and 0 for none
    cells: I64  # (n,), cells behind each row
    interval: I64 | None = None  # (n,), interval of time in which the donor was last seen
    exposure: F64 | None = None  # (n,), for counts
    arm: I64 | None = None  # (n,), position among the arms; -1: none
    thresholds: Thresholds = field(default_factory=Thresholds)


@dataclass(frozen=True, slots=True)
class Arranged:
    """A site's tables, made before the first message. `donors` is 1 / the largest joint leverage."""

    table: outcomes.Table
    inside: outcomes.Within
    groups: SimilarGroups
    rows: Rows
    donors: float
    kept: I64  # (n,), group of each donor in F_u; -1 for the others
    large: int = -1  # code of a large group, whose donors' own likelihood may be used at L5; -1: none
    notes: tuple[str, ...] = ()  # for this site alone


@dataclass(frozen=True, slots=True)
class Fit:
    """One regression, on the scale of the features; the same at every party."""

    columns: tuple[int, ...]
    coefficients: F64  # (p,)
    covariance: F64  # (p, p)
    df: float  # of t; infinite where the normal distribution is used
    dispersion: float  # variance of residuals (linear), or extra variance of counts
    explained: float  # R² within sites; NaN but for a linear model
    concordance: float  # of donors of one site and different groups; NaN where it is not defined
    calibration: F64  # (BINS, 3): donors, observed, expected
    log_likelihood: float


@dataclass(frozen=True, slots=True)
class Curves:
    """Survival by arm; the same at every party."""

    at_risk: F64  # (A, J)
    events: F64  # (A, J)
    survival: F64  # (A, J)
    error: F64  # (A, J), Greenwood's
    test: tuple[float, int, float]  # log-rank over all donors: chi-square, degrees of freedom, p
    stratified: tuple[float, int, float]  # within sites


@dataclass(frozen=True, slots=True)
class Modelled:
    donors: int
    outcomes: float  # sum over donors: events, or the total
    groups: int
    inside: int  # donors in the sums within groups
    openings: int
    fits: tuple[Fit, ...] = ()
    curves: Curves | None = None
    notes: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()  # at a site: what it left out of its own


def roles(params: Params) -> dict[Party, object]:
    return {params.coordinator: coordinator} | dict.fromkeys(params.sites, site)


def lengths_of(params: Params) -> list[tuple[str, str, int]]:
    """Line, what is opened, and how many numbers; of every sum of a run, in order."""
    P = len(params.columns)
    upper = P * (P + 1) // 2
    if params.curves:
        A = len(params.arms)
        return [("L8", "donors at risk and events", 2 * A * params.intervals + A + A * A)]
    if params.linear:
        return [("L3", "sums of squares and products", 3 + 2 * P + upper + P + 1)]
    inside = 2 + P + upper + ((upper + 2) if params.model == "negbin" else 0)
    each = sum(1 + len(f) + len(f) * (len(f) + 1) // 2 for f in params.fits)
    made = [("L2", "means of features and outcomes", 2 + P + upper), ("L3", "sums within groups", inside)]
    made += [("L4", f"score and information, round {t + 1}", each) for t in range(params.rounds)]
    once = sum(1 + len(f) + (1 + (params.model == "negbin")) * len(f) * (len(f) + 1) // 2 for f in params.fits)
    made.append(("L5", "score and information of donors", once))
    return [*made, ("L6", "calibration and concordance", (3 * BINS + 2) * len(params.fits))]


def cost(params: Params) -> dict[Party, tuple[int, int]]:
    hub = params.coordinator
    parts = [checked_sum.cost(checked_sum.Params(params.sites, hub, 2 * n)) for _, _, n in lengths_of(params)]
    parts.append(common_seed.cost(common_seed.Params(params.sites, hub)))
    parts.append(consistency_check.cost(consistency_check.Params(params.sites, hub)))
    return {u: (sum(p[u][0] for p in parts), sum(p[u][1] for p in parts)) for u in (hub, *params.sites)}


def ideal(params: Params, xs: Mapping[Party, Donors]) -> dict[Party, Modelled]:
    """The same sums, added up in one place. What a site may add is decided by `arranged`, from its rows alone."""
    sites = [Side(params, mine) for mine in xs.values()]
    state = State(params)
    for number, (line, _, length) in enumerate(lengths_of(params)):
        state.take(number, line, np.sum([s.part(number, line, state).values for s in sites], axis=0)[:length])
    return dict.fromkeys((params.coordinator, *xs), state.result())


# ---- a site's tables -------------------------------------------------------------------------------------------------


def check_site(params: Params, mine: Donors) -> None:
    n = len(mine.y)
    columns = [c for c in (mine.cells, mine.interval, mine.exposure, mine.arm) if c is not None]
    if mine.x.shape != (n, len(params.columns)) or any(len(c) != n for c in columns):
        raise DataError("expected one row per donor and one column per feature")
    finite = [mine.x, mine.y] + ([] if mine.exposure is None else [mine.exposure])
    if not all(np.all(np.isfinite(v)) for v in finite):
        raise DataError("a feature or outcome of a donor is missing; fill it, or leave the donor out")
    if params.model in ("cox", "km", "logistic") and not np.all(np.isin(mine.y, (0.0, 1.0))):
        raise DataError("expected an outcome of 0 or 1 for every donor")
    if params.model in ("poisson", "negbin") and (np.any(mine.y < 0) or np.any(mine.y != np.rint(mine.y))):
        raise DataError("expected a count of 0, 1, 2, ... for every donor")
    if params.model in ("cox", "km") and mine.interval is None:
        raise DataError("expected the time of every donor")
    if params.curves and mine.arm is None:
        raise DataError("expected the arm of every donor")
    if mine.exposure is not None and np.any(mine.exposure <= 0):
        raise DataError("expected an exposure above 0 for every donor")
    if params.curves:
        if not len(runs_of(params, mine)[0]):
            raise DataError(
                f"no arm has min_donors = {mine.thresholds.min_donors} donors here; a curve over fewer comes close to "
                "single persons: leave this site out"
            )
        return
    least = mine.thresholds.min_donors
    least *= 1 if least == 1 else 2  # one group of fewer says nothing about the features
    if n < least:
        raise DataError(
            f"{n} donor{'s' if n != 1 else ''} here, fewer than {least}: what a site adds to a regression comes from "
            f"groups of that many (min_donors = {mine.thresholds.min_donors}); leave this site out of the study"
        )


def group_sizes(thresholds: Thresholds) -> list[int]:
    """Smallest numbers of donors of a group that are tried; in larger groups more donors may enter F_u."""
    least = thresholds.min_donors
    return [1] if least == 1 else list(range(least, 3 * least + 1))


def standardised(x: F64) -> F64:
    """Features in this site's own deviations: groups must not depend on what others send."""
    spread = x.std(axis=0)
    made: F64 = (x - x.mean(axis=0)) / np.where(spread > 0, spread, 1.0)
    return made


def arranged(params: Params, mine: Donors) -> Arranged:
    """L2: groups of similar donors; the smallest size that leaves about as much of the features' spread as any."""
    n, thresholds = len(mine.y), mine.thresholds
    interval = None if mine.interval is None else moved(mine.interval, thresholds)
    z = standardised(mine.x)
    tried: list[tuple[float, SimilarGroups, I64]] = []
    nobody = np.full(n, -1, np.int64)
    for size in group_sizes(thresholds):
        rows = Rows(n, np.arange(n), replace(thresholds, min_donors=size), mine.cells)
        groups = rows.similar(z)
        kept = (
            within_leverage(z, groups, thresholds.min_donors, mine.exposure) if size > thresholds.min_donors else nobody
        )
        tried.append((left_spread(z, groups.codes, kept), groups, kept))
    most = max(spread for spread, _, _ in tried)
    if (codes := peeled(params, z, thresholds, mine.exposure)) is not None:
        rest = int(codes.max())
        kept = np.where(codes == rest, rest, -1)
        sizes = [np.bincount(codes, w, minlength=rest + 1).astype(np.int64) for w in (mine.cells, None)]
        if left_spread(z, codes, kept) >= most - WORTH * z.shape[1] and sizes[0].min() >= thresholds.min_cells:
            return tables_of(params, mine, SimilarGroups(codes, *sizes), kept, interval, rest)
    groups, kept = next((g, k) for spread, g, k in tried if spread >= most - CLOSE * z.shape[1])
    return tables_of(params, mine, groups, kept, interval)


def left_spread(z: F64, codes: I64, kept: I64) -> float:
    """Logarithm of the volume that the features' spread keeps."""
    return float(np.linalg.slogdet(scatter(z, codes, kept) + 1e-9 * len(z) * np.eye(z.shape[1]))[1])


def peeled(params: Params, z: F64, thresholds: Thresholds, exposure: F64 | None = None) -> I64 | None:
    """One large group of donors of whom none stands out, the last code; those that would, in groups with the nearest.

    None where too few are left, and in models in which coefficients multiply outcomes or times in the score: there one
    more evaluation would bring as many combinations of these as there are features.
    """
    least = thresholds.min_donors
    if least == 1 or params.model not in (*CANONICAL, "linear"):
        return None
    codes, rest, count = np.full(len(z), -1, np.int64), np.arange(len(z)), 0
    while len(rest) >= 2 * least:
        d = z[rest] - z[rest].mean(axis=0)
        h = np.einsum("ip,pq,iq->i", d, np.linalg.pinv(d.T @ d, rcond=RANK, hermitian=True), d) + 1 / len(rest)
        if exposure is not None:
            h = np.maximum(h, np.square(exposure[rest]) / np.square(exposure[rest]).sum())
        worst = int(np.argmax(h))
        if h[worst] * least <= 1 + SLACK:
            codes[rest] = count
            return codes
        near = np.argsort(np.square(z[rest] - z[rest][worst]).sum(axis=1), kind="stable")[:least]
        codes[rest[near]] = count
        rest, count = np.delete(rest, near), count + 1
    return None


def tables_of(
    params: Params, mine: Donors, groups: SimilarGroups, kept: I64, interval: I64 | None, large: int = -1
) -> Arranged:
    n, least = len(mine.y), mine.thresholds.min_donors
    table = outcomes.grouped(mine.x, mine.y, groups.codes, mine.exposure, interval, params.intervals)
    near = Rows(n, np.arange(n), Thresholds(1, max(NEAR, least)), mine.cells).similar(standardised(mine.x)).codes
    inside = outcomes.within(params.likelihood, mine.x, mine.y, kept, near, mine.exposure, interval)
    rows = Rows(n, np.arange(n), mine.thresholds, mine.cells)
    notes = []
    if missing := int((groups.codes < 0).sum()):
        notes.append(f"{missing} of {n} donors are in no group, and are left out")
    if (apart := int((groups.codes >= 0).sum() - (kept >= 0).sum())) and least > 1:
        notes.append(f"{apart} of {n} donors count by their group's mean alone")
    if params.model in ("cox", "logistic") and mine.y.sum() in (0, n):
        notes.append("all donors here have the same outcome, so this site adds nothing to the coefficients")
    h = joint(standardised(mine.x), groups, kept, mine.exposure)
    return Arranged(table, inside, groups, rows, h, kept, large, tuple(notes))


def runs_in(interval: I64, least: int) -> I64:
    """Codes of runs of at least so many donors with neighbouring times; donors with the same time are in one run.

    What is too little for a run joins the run before it, so that a time which enough donors share stays a run of its
    own. All codes are -1 if all are too few.
    """
    times, number = np.unique(interval, return_counts=True)
    runs: list[tuple[list[int], int]] = []  # positions among `times`, and donors
    for k, n in enumerate(number.tolist()):
        if runs and runs[-1][1] < least:
            if n >= least and len(runs) > 1:
                rest = runs.pop()
                runs[-1] = (runs[-1][0] + rest[0], runs[-1][1] + rest[1])
                runs.append(([k], n))
            else:
                runs[-1] = (runs[-1][0] + [k], runs[-1][1] + n)
        else:
            runs.append(([k], n))
    if len(runs) > 1 and runs[-1][1] < least:
        rest = runs.pop()
        runs[-1] = (runs[-1][0] + rest[0], runs[-1][1] + rest[1])
    if not runs or runs[0][1] < least:
        return np.full(len(interval), -1, np.int64)
    of_time = np.repeat(np.arange(len(runs)), [len(positions) for positions, _ in runs])
    return of_time[np.searchsorted(times, interval)].astype(np.int64)


def moved(interval: I64, thresholds: Thresholds) -> I64:
    """Times in runs of enough donors: all of a run get its mean interval."""
    runs = runs_in(interval, thresholds.min_donors)
    if not len(interval) or runs.min() < 0:
        return np.zeros(len(interval), np.int64)
    means: F64 = np.bincount(runs, interval) / np.bincount(runs)
    return np.rint(means[runs]).astype(np.int64)


def spread(interval: I64, runs: I64, intervals: int) -> I64:
    """Interval of each donor where the exits of a run lie evenly between the middles to its neighbours' means.

    In a run with one time nothing moves. Which donor of a run comes first is not told by the result.
    """
    size = np.bincount(runs)
    means = np.bincount(runs, interval) / size
    middles = (means[1:] + means[:-1]) / 2
    low = np.maximum(np.append(2 * means[:1] - middles[:1] if len(middles) else 0.0, middles), 0.0)
    high = np.append(middles, 2 * means[-1:] - low[-1:])
    made = interval.copy()
    for r in range(len(size)):
        at = np.flatnonzero(runs == r)
        if np.ptp(interval[at]) > 0:
            half = min(means[r] - low[r], high[r] - means[r]) + 0.5  # so that the mean stays
            places = means[r] + half * ((2 * np.arange(len(at)) + 1) / len(at) - 1)
            made[at] = np.clip(np.rint(places), 0, intervals - 1).astype(np.int64)
    return made


def deviations(x: F64, codes: I64) -> F64:
    """Rows less the mean of the rows with the same code; zero for code -1."""
    d = np.zeros_like(x)
    for g in np.unique(codes[codes >= 0]).tolist():
        at = codes == g
        d[at] = x[at] - x[at].mean(axis=0)
    return d


def leverage_of(z: F64, groups: SimilarGroups, kept: I64, exposure: F64 | None = None) -> F64:
    """Of each donor, in the groups and in the differences within them, together; or in the exposure of those.

    Differences are from a mean with the exposures as weights: one large exposure would make it a donor's features.
    """
    d = deviations(z, kept)
    inside = np.einsum("ip,pq,iq->i", d, np.linalg.pinv(d.T @ d, rcond=1e-10, hermitian=True), d)
    sizes = np.bincount(groups.codes[groups.codes >= 0], minlength=len(groups))
    made: F64 = np.where(groups.codes >= 0, inside + 1 / np.maximum(sizes[groups.codes], 1), 0.0)
    if exposure is not None:
        square, within = np.where(kept >= 0, np.square(exposure), 0.0), np.maximum(kept, 0)
        made = np.maximum(made, square / np.maximum(np.bincount(within, square)[within], 1e-300))
    return made


def largest_leverage(columns: F64) -> float:
    """Of any row, in the span of these columns."""
    norms = np.linalg.norm(columns, axis=0)
    if not np.any(norms > 0):
        return 0.0
    left, size, _ = np.linalg.svd(columns[:, norms > 0] / norms[norms > 0], full_matrices=False)
    return float(np.square(left[:, size > RANK * size.max()]).sum(axis=1).max())


def within_leverage(z: F64, groups: SimilarGroups, least: int, exposure: F64 | None = None) -> I64:
    """Codes of the donors that may enter sums within groups: the one with the largest leverage is left out, again."""
    kept = groups.codes.copy()
    while np.any(kept >= 0):
        h = np.where(kept >= 0, leverage_of(z, groups, kept, exposure), 0.0)
        worst = int(np.argmax(h))
        if h[worst] * least <= 1 + SLACK:
            break
        kept[worst] = -1
    return kept


def joint(z: F64, groups: SimilarGroups, kept: I64, exposure: F64 | None = None) -> float:
    """Effective number of donors behind any combination of T_u and F_u."""
    return float(1 / leverage_of(z, groups, kept, exposure).max(initial=1e-300))


def scatter(z: F64, codes: I64, kept: I64) -> F64:
    """What groups and the differences within them leave of the features' spread."""
    inside = codes >= 0
    total = deviations(z, np.where(inside, 0, -1))
    rest, d = deviations(z, codes), deviations(z, kept)
    made: F64 = total.T @ total - rest.T @ rest + d.T @ d
    return made


def softened(x: F64, groups: SimilarGroups, kept: I64) -> F64:
    """Features as sums may use them: the mean of the donor's group, and its own difference where that is allowed."""
    inside = groups.codes >= 0
    made = np.zeros_like(x)
    made[inside] = groups.means(x)[groups.codes[inside]]
    return made + deviations(x, kept)


def runs_of(params: Params, mine: Donors) -> tuple[I64, I64, F64, SimilarGroups]:
    """L8: donors of arms with enough donors, the interval of each, its part in the run's events, and the runs."""
    assert mine.arm is not None
    assert mine.interval is not None
    least = mine.thresholds
    sizes = np.bincount(mine.arm[mine.arm >= 0], minlength=len(params.arms))
    here = np.flatnonzero((mine.arm >= 0) & (sizes[mine.arm] >= least.min_donors))
    interval, codes, events = mine.interval[here].copy(), np.full(len(here), -1, np.int64), np.zeros(len(here))
    count = 0
    for a in np.unique(mine.arm[here]).tolist():
        at = np.flatnonzero(mine.arm[here] == a)
        runs = runs_in(interval[at], least.min_donors)
        size = np.bincount(runs)
        if np.bincount(runs, mine.cells[here][at]).min() < least.min_cells:
            continue
        interval[at] = spread(interval[at], runs, params.intervals)
        events[at] = (np.bincount(runs, mine.y[here][at]) / size)[runs]
        codes[at] = runs + count
        count += len(size)
    keep = codes >= 0
    here, interval, codes, events = here[keep], interval[keep], codes[keep], events[keep]
    cells = np.bincount(codes, mine.cells[here], minlength=count).astype(np.int64)
    groups = SimilarGroups(codes, cells, np.bincount(codes, minlength=count).astype(np.int64))
    return here, interval, events, groups


# ---- what a site adds ------------------------------------------------------------------------------------------------


def upper(m: F64) -> F64:
    made: F64 = m[np.triu_indices(len(m))]
    return made


def full(values: F64, p: int) -> F64:
    m = np.zeros((p, p))
    m[np.triu_indices(p)] = values
    return m + np.triu(m, 1).T


class Side:
    """A site's part of every sum."""

    def __init__(self, params: Params, mine: Donors) -> None:
        check_site(params, mine)
        self.params, self.mine = params, mine
        self.notes: tuple[str, ...] = ()
        self.arranged: Arranged | None = None
        if not params.curves:
            self.arranged = arranged(params, mine)
            self.notes = self.arranged.notes
            self.inside = self.arranged.groups.codes == self.arranged.large
            self.row = self.arranged.groups.codes.copy()  # of each donor in the table below
            self.row[self.inside] = self.arranged.large + np.arange(int(self.inside.sum()))
            self.each = outcomes.grouped(mine.x, mine.y, self.row, mine.exposure, mine.interval, params.intervals)

    def part(self, number: int, line: str, state: State) -> Contribution:
        if line == "L8":
            return self._curves()
        if self.params.linear:
            return self._squares()
        assert self.arranged is not None
        if line == "L2":
            return self._moments()
        if line == "L3":
            return self._inside(state)
        if line == "L4":
            return self.arranged.groups.contribution(self._round(state))
        return self._once(state) if line == "L5" else self._checks(state)

    def _moments(self) -> Contribution:
        """L2: of group means; of the donors where all are one group."""
        a = self.arranged
        assert a is not None
        t = self.each if a.large >= 0 else a.table
        values = np.concatenate([[t.n.sum()], t.n @ t.x, upper((t.x * t.n[:, None]).T @ t.x), [t.y.sum()]])
        if a.large < 0:
            return a.groups.contribution(values)
        size = np.full(len(values), a.donors)
        return a.rows.measured(size * self.mine.cells.min(), size, values)

    def _scaled(self, state: State) -> outcomes.Table:
        assert self.arranged is not None
        return replace(self.arranged.table, x=(self.arranged.table.x - state.center) / state.scale)

    def _inside(self, state: State) -> Contribution:
        """L3: F_u, with the numbers of groups and donors behind it."""
        a = self.arranged
        assert a is not None
        w, s = a.inside, state.scale
        pair = np.outer(s, s)
        numbers = [w.score / s, upper(w.information / pair)]
        if self.params.model == "negbin":
            numbers += [upper(w.variance / pair), w.moments]
        values = np.concatenate(numbers)
        size = np.full(len(values), a.donors)
        sums = a.rows.measured(size * self.mine.cells.min(), size, values)
        return join(
            [a.groups.contribution(np.array([float(len(a.groups)), float(np.count_nonzero(a.kept >= 0))])), sums]
        )

    def _round(self, state: State) -> F64:
        """L4: the table at the coefficients of each regression."""
        table, numbers = self._scaled(state), []
        for f, beta, dispersion in zip(self.params.fits, state.betas, state.dispersions, strict=True):
            t = replace(table, x=table.x[:, f])
            found = outcomes.evaluate(self.params.likelihood, t, beta, dispersion)
            numbers += [np.array([found.value]), found.score, upper(found.information)]
        return np.concatenate(numbers)

    def _each_at(self, state: State, f: tuple[int, ...]) -> outcomes.Table:
        """The donors of the large group as rows of their own, and the other groups; the columns of one regression."""
        return replace(self.each, x=(self.each.x[:, f] - state.center[[*f]]) / state.scale[[*f]])

    def _once(self, state: State) -> Contribution:
        """L5: the donors' own likelihood where none of them stands out; else that of the tables."""
        a = self.arranged
        assert a is not None
        donors, numbers = self._effective(state, state.betas) if a.large >= 0 else 0.0, []
        alone = donors >= self.mine.thresholds.min_donors * (1 - SLACK)
        for f, beta, dispersion in zip(self.params.fits, state.betas, state.dispersions, strict=True):
            if alone:
                found = outcomes.evaluate(self.params.likelihood, self._each_at(state, f), beta, dispersion)
                score, J, meat = found.score, found.information, found.information
            else:
                pick, s = np.ix_(f, f), state.scale[[*f]]
                K, B = (m[pick] / np.outer(s, s) for m in (a.inside.information, a.inside.variance))
                t = self._scaled(state)
                found = outcomes.evaluate(self.params.likelihood, replace(t, x=t.x[:, f]), beta, dispersion)
                score = found.score + a.inside.score[[*f]] / s - K @ beta
                J, meat = found.information + K, found.information + B
            numbers += [np.array([found.value]), score, upper(J)]
            if self.params.model == "negbin":
                numbers.append(upper(meat))
        values = np.concatenate(numbers)
        size = np.full(len(values), donors if alone else a.donors)
        return a.rows.measured(size * self.mine.cells.min(), size, values)

    def _effective(self, state: State, first: list[F64], ranges: I64 | None = None) -> float:
        """Effective number of donors behind the likelihood at these coefficients: 1 / the largest leverage.

        Outcomes enter sums with the columns [1, X], whatever the coefficients, and with the ranges of the prediction.
        Features enter the score with the expected outcomes m as weights, and the information with their variances w.
        There a donor's part is m x and w x xᵀ: where few donors have a feature, v may choose m that leaves one of them.
        So no donor may have more than half of any combination of m [1, X] or √w [1, X] (else the number is 0), and
        what a range expects of its donors counts as a column too.
        """
        a = self.arranged
        assert a is not None
        at_all = np.flatnonzero(a.groups.codes >= 0)
        own = self.inside[at_all][:, None]
        groups = (a.groups.codes[at_all][:, None] == np.arange(len(a.groups))).astype(np.float64)
        X = np.hstack([groups, standardised(self.mine.x[at_all]) * own])
        outcome, means, weights, parts = [X], [groups], [groups], []
        for f, m in zip(self.params.fits, self._expected(state, first), strict=True):
            mean = m[self.row[at_all]][:, None] * own
            weight = mean * (1 - mean) if self.params.likelihood == "logistic" else mean
            means.append(mean)
            weights.append(weight)
            if weight.max() > FLAT * weight[own].min():
                return 0.0
            columns = np.hstack([own, X[:, len(a.groups) + np.array(f)]])
            parts += [mean * columns, np.sqrt(weight) * columns]
        if ranges is not None:
            inside = [(row[self.row[at_all]][:, None] == np.arange(BINS)) * own for row in ranges]
            outcome += inside
            for hot, m in zip(inside, self._expected(state, state.betas), strict=True):
                means.append(hot * m[self.row[at_all]][:, None])
        if max(largest_leverage(columns) for columns in parts) > MOST + SLACK:
            return 0.0
        return 1 / max(largest_leverage(np.hstack(columns)) for columns in (outcome, means, weights))

    def _expected(self, state: State, betas: list[F64]) -> list[F64]:
        """Of each regression, the outcome that it expects of one donor of each row of `each`."""
        model, made = self.params.likelihood, []
        for f, beta, dispersion in zip(self.params.fits, betas, state.dispersions, strict=True):
            t = self._each_at(state, f)
            made.append(outcomes.evaluate(model, t, beta, dispersion).expected / t.n)
        return made

    def _ranges(self, state: State) -> tuple[I64, float]:
        """L6 with a large group: range of each row of `each` in each regression, so that no donor stands out."""
        least, half = self.mine.thresholds.min_donors, BINS // 2
        order = [*((b, b + 1) for b in range(half)), *((b, b - 1) for b in range(BINS - 1, half, -1))]
        etas = [self._each_at(state, f).x @ beta for f, beta in zip(self.params.fits, state.betas, strict=True)]
        bins = np.zeros((len(etas), len(self.each)), np.int64)
        for merged in MERGED:
            for row, edges, eta in zip(bins, state.edges(), etas, strict=True):
                row[:] = np.array(merged)[np.searchsorted(edges, eta)]
                for b, to in order:
                    if 0 < self.each.n[row == b].sum() < least:
                        row[row == b] = to
            donors = self._effective(state, state.first, bins)
            if donors >= least * (1 - SLACK):
                return bins, donors
        return bins, 0.0

    def _checks(self, state: State) -> Contribution:
        """L6: outcomes by prediction, of groups or of ranges with enough donors; pairs of donors of different ones."""
        a = self.arranged
        assert a is not None
        numbers = []
        ranges, donors = self._ranges(state) if a.large >= 0 else (None, 0.0)
        for i, (f, beta, dispersion, edges) in enumerate(
            zip(self.params.fits, state.betas, state.dispersions, state.edges(), strict=True)
        ):
            t = self._scaled(state)
            t = replace(t, x=t.x[:, f]) if ranges is None else self._each_at(state, f)
            eta = t.x @ beta
            bins = np.searchsorted(edges, eta) if ranges is None else ranges[i]
            order = eta if ranges is None else bins.astype(np.float64)  # donors of one range are not ordered
            found = outcomes.evaluate(self.params.likelihood, t, beta, dispersion)
            numbers += [np.bincount(bins, w, minlength=BINS) for w in (t.n, t.y, found.expected)]
            pairs = (0.0, 0.0)
            if self.params.model == "cox":
                pairs = outcomes.concordant(order, t.n, outcomes.later(t.at_risk, t.events), t.events)
            elif self.params.model == "logistic":
                pairs = outcomes.concordant(order, t.n, (t.n - t.y)[:, None], t.y[:, None])
            numbers.append(np.array(pairs))
        values = np.concatenate(numbers)
        if ranges is None:
            return a.groups.contribution(values)
        size = np.full(len(values), donors)
        return a.rows.measured(size * self.mine.cells.min(), size, values)

    def _squares(self) -> Contribution:
        """L3 of a linear model: sums of squares and products within the site."""
        a = self.arranged
        assert a is not None
        at = np.flatnonzero(a.groups.codes >= 0)
        x, y = softened(self.mine.x, a.groups, a.kept)[at], self.mine.y[at]
        dx, dy = x - x.mean(axis=0), y - y.mean()
        numbers = [[float(len(at)), 1.0, float(y.sum())], x.sum(axis=0), np.square(x).sum(axis=0)]
        values = np.concatenate([*numbers, upper(dx.T @ dx), dx.T @ dy, [float(dy @ dy)]])
        size = np.full(len(values), a.donors)
        return a.rows.measured(size * self.mine.cells.min(), size, values)

    def _curves(self) -> Contribution:
        """L8."""
        here, interval, part, runs = runs_of(self.params, self.mine)
        assert self.mine.arm is not None
        if left_out := len(self.mine.y) - len(here):
            self.notes = (f"{left_out} donors are of none of the arms, or of an arm with too few donors here",)
        A, J = len(self.params.arms), self.params.intervals
        exits, events = np.zeros((A, J)), np.zeros((A, J))
        np.add.at(exits, (self.mine.arm[here], interval), 1.0)
        np.add.at(events, (self.mine.arm[here], interval), part)
        at_risk = np.cumsum(exits[:, ::-1], axis=1)[:, ::-1]
        difference, covariance = outcomes.log_rank(at_risk, events)
        return runs.contribution(np.concatenate([at_risk.ravel(), events.ravel(), difference, covariance.ravel()]))


# ---- what all know ---------------------------------------------------------------------------------------------------


def abort(line: str, code: str, text: str) -> ProtocolAbort:
    return ProtocolAbort(NAME, line, code, text)


class State:
    """What every party makes of the sums, alike."""

    def __init__(self, params: Params) -> None:
        P = len(params.columns)
        self.params = params
        self.donors, self.total, self.groups, self.inside = 0.0, 0.0, 0.0, 0.0
        self.center, self.scale, self.moments = np.zeros(P), np.ones(P), np.zeros((P, P))
        self.betas = [np.zeros(len(f)) for f in params.fits]
        self.dispersions = [0.0 for _ in params.fits]
        self.score, self.information, self.variance = np.zeros(P), np.zeros((P, P)), np.zeros((P, P))
        self.last: list[outcomes.Sums] = []
        self.far = [math.inf for _ in params.fits]
        self.covariances: list[F64] = []
        self.first: list[F64] = []  # coefficients at which L5 was evaluated
        self.fits: tuple[Fit, ...] = ()
        self.curves: Curves | None = None
        self.notes: list[str] = []
        self.openings = 0

    def take(self, number: int, line: str, total: F64) -> None:
        self.openings = number + 1
        if not np.all(np.isfinite(total)):
            raise abort(line, "absurd", "a sum is not a finite number")
        if line == "L8":
            self._take_curves(total)
        elif self.params.linear:
            self._take_squares(total)
        else:
            {
                "L2": self._take_means,
                "L3": self._take_inside,
                "L4": self._take_round,
                "L5": self._take_once,
                "L6": self._take_checks,
            }[line](total)

    def _take_means(self, total: F64) -> None:
        P = len(self.params.columns)
        self.donors, self.total = float(total[0]), float(total[-1])
        if not self.donors >= 1:
            raise abort("L2", "no-donors", "no site has enough donors for one group")
        self.center = total[1 : 1 + P] / self.donors
        second = full(total[1 + P : -1], P) / self.donors - np.outer(self.center, self.center)
        self.scale = np.sqrt(np.maximum(np.diag(second), 0.0))
        constant = [
            c
            for c, s, m in zip(self.params.columns, self.scale, self.center, strict=True)
            if s <= 1e-9 * max(1.0, abs(m))
        ]
        if constant:
            raise abort("L2", "constant", f"'{constant[0]}' does not vary between groups of donors; leave it out")
        self.moments = second / np.outer(self.scale, self.scale)
        self._check_outcomes()

    def _check_outcomes(self) -> None:
        """Enough donors with and without the outcome, for the number of coefficients."""
        most = max(len(f) for f in self.params.fits)
        what = {"cox": "events", "logistic": "donors with the outcome"}.get(self.params.model, "counts")
        few = self.total if self.params.model != "logistic" else min(self.total, self.donors - self.total)
        if self.params.model == "logistic" and self.total > self.donors - self.total:
            what = "donors without the outcome"
        if few <= most:
            raise abort(
                "L2",
                "few-events",
                f"{few:.0f} {what} at all sites together; {most} coefficient(s) need at least {most + 1}; "
                "about ten each are better",
            )
        if few < 10 * most:
            self.notes.append(f"{few:.0f} {what} for {most} coefficients; fewer than ten each make estimates unstable")

    def _take_inside(self, total: F64) -> None:
        P = len(self.params.columns)
        u = P * (P + 1) // 2
        self.groups, self.inside = float(total[0]), float(total[1])
        cuts = np.cumsum([2, P, u])
        self.score, self.information = total[cuts[0] : cuts[1]], full(total[cuts[1] : cuts[2]], P)
        self.variance = self.information
        if self.params.model == "negbin":
            rest = total[cuts[2] :]
            self.variance = full(rest[:u], P)
            self.dispersions = [outcomes.dispersion_of(float(rest[u]), float(rest[u + 1]))] * len(self.params.fits)

    def _take_round(self, total: F64) -> None:
        at, self.last = 0, []
        for i, f in enumerate(self.params.fits):
            p = len(f)
            u = p * (p + 1) // 2
            value, score, information = (
                total[at],
                total[at + 1 : at + 1 + p],
                full(total[at + 1 + p : at + 1 + p + u], p),
            )
            at += 1 + p + u
            sums = outcomes.Sums(float(value), score, information)
            self.last.append(sums)
            K = self.information[np.ix_(f, f)]
            unknown = outcomes.singular(information + K)
            if unknown.any() and not self.betas[i].any():
                names = ", ".join(f"'{self.params.columns[c]}'" for c, bad in zip(f, unknown, strict=True) if bad)
                raise abort(
                    "L4",
                    "singular",
                    f"the donors do not determine the coefficients of {names}: too few groups of donors, or features "
                    "that are combinations of others within every site; leave features out",
                )
            self.betas[i], self.far[i] = outcomes.step_of(sums, self.score[[*f]], K, self.betas[i])

    def edges(self) -> list[F64]:
        """Ranges of the prediction: fifths, if it were normal."""
        cuts = scipy.stats.norm.ppf(np.arange(1, BINS) / BINS)
        return [
            np.asarray(cuts * math.sqrt(max(float(b @ self.moments[np.ix_(f, f)] @ b), 1e-300)))
            for f, b in zip(self.params.fits, self.betas, strict=True)
        ]

    def _separated(self, f: tuple[int, ...]) -> ProtocolAbort:
        names = ", ".join(f"'{self.params.columns[c]}'" for c in f)
        return abort(
            "L5",
            "separated",
            f"the coefficients of {names} do not converge: the outcomes are separated by the features, or there are "
            "too few donors for so many; leave features out",
        )

    def _check_converged(self) -> None:
        for f, far in zip(self.params.fits, self.far, strict=True):
            if not far <= FAR:
                raise self._separated(f)
        self._check_wide()

    def _check_wide(self) -> None:
        for f, b in zip(self.params.fits, self.betas, strict=True):
            if math.sqrt(max(float(b @ self.moments[np.ix_(f, f)] @ b), 0.0)) > WIDE:
                raise self._separated(f)

    def _take_once(self, total: F64) -> None:
        """L5: one step more, and the information for the errors."""
        self._check_converged()
        at, self.first = 0, list(self.betas)
        for i, f in enumerate(self.params.fits):
            p = len(f)
            u = p * (p + 1) // 2
            value, score, J = float(total[at]), total[at + 1 : at + 1 + p], full(total[at + 1 + p : at + 1 + p + u], p)
            at += 1 + p + u
            meat = J
            if self.params.model == "negbin":
                meat = full(total[at : at + u], p)
                at += u
            self.last[i] = outcomes.Sums(value, score, J)
            self.covariances.append(outcomes.covariance_of(meat, J - meat, np.zeros((p, p))))
            self.betas[i], _ = outcomes.step_of(self.last[i], np.zeros(p), np.zeros((p, p)), self.betas[i])
        self._check_wide()

    def _take_checks(self, total: F64) -> None:
        made = []
        for i, f in enumerate(self.params.fits):
            part = total[i * (3 * BINS + 2) : (i + 1) * (3 * BINS + 2)]
            s = self.scale[[*f]]
            agree, pairs = part[-2:]
            made.append(
                Fit(
                    f,
                    self.betas[i] / s,
                    self.covariances[i] / np.outer(s, s),
                    math.inf,
                    self.dispersions[i],
                    math.nan,
                    float(agree / pairs) if pairs > 0 else math.nan,
                    part[:-2].reshape(3, BINS).T,
                    self.last[i].value,
                )
            )
        self.fits = tuple(made)

    def _take_squares(self, total: F64) -> None:
        P = len(self.params.columns)
        u = P * (P + 1) // 2
        self.donors, sites, self.total = (float(v) for v in total[:3])
        at = 3 + 2 * P
        XX, Xy, yy = full(total[at : at + u], P), total[at + u : at + u + P], float(total[-1])
        for f in self.params.fits:
            df = self.donors - sites - len(f)
            A, b = XX[np.ix_(f, f)], Xy[[*f]]
            if df < 1:
                raise abort(
                    "L3",
                    "few-donors",
                    f"{self.donors:.0f} donors at {sites:.0f} sites are too few for {len(f)} coefficients",
                )
            if (unknown := outcomes.singular(A)).any():
                names = ", ".join(f"'{self.params.columns[c]}'" for c, bad in zip(f, unknown, strict=True) if bad)
                raise abort(
                    "L3", "singular", f"{names} are combinations of other features within every site; leave one out"
                )
            size = np.sqrt(np.diag(A))
            inverse = np.linalg.inv(A / np.outer(size, size)) / np.outer(size, size)
            beta = inverse @ b
            rest = max(yy - float(beta @ b), 0.0)
            variance = rest / df
            value = -self.donors / 2 * (math.log(2 * math.pi * max(rest, 1e-300) / self.donors) + 1)
            explained = 1 - rest / yy if yy > 0 else math.nan
            none = np.zeros((0, 3))
            self.fits += (Fit(f, beta, variance * inverse, df, variance, explained, math.nan, none, value),)

    def _take_curves(self, total: F64) -> None:
        A, J = len(self.params.arms), self.params.intervals
        at_risk, events = total[: A * J].reshape(A, J), total[A * J : 2 * A * J].reshape(A, J)
        difference, covariance = total[2 * A * J : 2 * A * J + A], total[2 * A * J + A :].reshape(A, A)
        self.donors, self.total = float(at_risk[:, 0].sum()), float(events.sum())
        if not self.total > 0:
            raise abort("L8", "no-events", "no event at any site, so there is nothing to draw or to test")
        survival, error = outcomes.kaplan_meier(at_risk, events)
        tests = [outcomes.chi_square(*pair) for pair in (outcomes.log_rank(at_risk, events), (difference, covariance))]
        made = [(c, df, float(scipy.stats.chi2.sf(c, df)) if df else math.nan) for c, df in tests]
        self.curves = Curves(at_risk, events, survival, error, made[0], made[1])

    def result(self) -> Modelled:
        return Modelled(
            round(self.donors),
            self.total,
            round(self.groups),
            round(self.inside),
            self.openings,
            self.fits,
            self.curves,
            tuple(self.notes),
        )


# ---- roles -----------------------------------------------------------------------------------------------------------

Add = Callable[[Channel, checked_sum.Params, int, str, str, State], Awaitable[F64]]


async def follow(ch: Channel, params: Params, add: Add) -> Modelled:
    """L2 to L6, or L8: the same at every party, except that S has no donors."""
    state = State(params)
    sums = lengths_of(params)
    for number, (line, what, length) in enumerate(sums):
        p = checked_sum.Params(params.sites, params.coordinator, 2 * length)
        shown = f"{what}: opening {number + 1} of {len(sums)}"
        ch.step(shown, protocol=NAME, line=line)
        total = await add(ch.sub(f"sum/{number + 1}", (p, line)), p, number, line, what, state)
        ch.reveal(total, to=ch.me, line=line, what=shown, protocol=NAME)
        state.take(number, line, total)
    return state.result()


async def site(ch: Channel, params: Params, mine: Donors, *, entropy: Entropy, identity: Identity) -> Modelled:
    """Be u. Returns the fits, or the curves."""
    side = Side(params, mine)  # L2, L8: before anything is sent
    pair = common_seed.Params(params.sites, params.coordinator, everyone=True)
    seed = await common_seed.site(ch.sub("seed", pair), pair, entropy=entropy, identity=identity)  # L1

    async def add(sub: Channel, p: checked_sum.Params, number: int, line: str, what: str, state: State) -> F64:
        part = side.part(number, line, state).map(lambda x: split_sum(x, len(params.sites), entropy))
        words = sub.contribute(part, line=line, what=what, protocol=NAME)
        return join_sum(await checked_sum.site(sub, p, words, seed))

    result = await follow(ch, params, add)  # L2 to L6, L8
    await consistency_check.site(
        ch, consistency_check.Params(params.sites, params.coordinator), identity=identity
    )  # L7
    return replace(result, excluded=side.notes)


async def coordinator(ch: Channel, params: Params) -> Modelled:
    """Be S: add up, and follow."""
    pair = common_seed.Params(params.sites, params.coordinator, everyone=True)
    await common_seed.coordinator(ch.sub("seed", pair), pair)  # L1

    async def add(sub: Channel, p: checked_sum.Params, number: int, line: str, what: str, state: State) -> F64:
        return join_sum(await checked_sum.coordinator(sub, p))

    result = await follow(ch, params, add)  # L2 to L6, L8
    await consistency_check.coordinator(ch, consistency_check.Params(params.sites, params.coordinator))  # L7
    return result
