"""Pooled outcomes: regression of donors' outcomes on their features, and survival curves, from fixed checked sums.

    L1   u, S    common seed: a secret of the sites, for checked sums
    L2   u       its own donors, prepared before the first sum and from nothing but its own rows (`prepared`):
                 levels of two features that fewer than min_donors donors combine are left out; no donor has more than
                 1 / min_donors of a column's sum of squares, or much leverage in several; every risk set has
                 min_donors donors
         u, S    checked sum: donors, sum of outcomes; for counts with extra variance two moments
    L3   u       its own fit, drawn towards zero, b; score U and information K of its donors' likelihood at b
         u, S    checked sum, once: Σ C and Σ K with C = U(b) + K b. A linear model: XᵀX, Xᵀy, yᵀy within u
         u, S    β = (Σ K)⁻¹ Σ C; covariance (Σ K)⁻¹
    L4   u, S    checked sum: of groups of min_donors donors or more by u's own fit, made before the first sum: observed
                 and expected outcomes in ranges of the prediction at β; ordered pairs of donors of different groups
    L7   u, S    all sites received the same broadcasts     (same_view)

    survival curves instead of L2 to L4:
    L8   u       donors of an arm by their times, bounded as above, in runs of min_donors or more; the exits of a run
                 lie evenly between the means of its neighbours, and each has the run's share of events
         u, S    checked sum: donors at risk and events per arm and interval; the log-rank difference within u

`models.outcomes` has the arithmetic. The log likelihood of u is replaced by its quadratic expansion at u's own point b:
one Newton step for all sites together, from points that no other party can choose. Time is on a grid that the study
names; events of an interval are tied (Efron).

Thresholds, enforced by each site on its own donors, whatever others send. A level is a value that a third of the donors
share; all other values of a column are one level too. In each pair of columns, and in each column alone, a level or
combination that 1 to min_donors - 1 donors have is left out with its donors. So is the rest that exclusive columns
leave, such as the reference of a factor. A column of which a level has fewer than min_donors donors with, or without,
the outcome is projected out of the others and adds nothing. A site with fewer than min_donors donors of one outcome
adds nothing.

Reveals
-------
coordinator, site : over all sites' donors that were used: their number and the sum of outcomes; C and K of each
    regression; observed and expected outcomes in ranges; the result. For a linear model: XᵀX, Xᵀy and yᵀy within
    sites. For survival curves: donors at risk and events per arm and interval, in whole runs.
malicious coordinator : the same. It cannot change a sum without an abort.
one malicious site : the same. C and K of other sites do not depend on what it sends, but for one number, the extra
    variance of counts. With two sites it has those of the other: what a meta-analysis of published fits has of each
    site.
coordinator with k sites : the sums over the other sites; with all but one, those of the last site.
whoever knows all donors of a site but one : that donor, as from any exact sum.
whoever sees two runs on the same donors : what their sums differ by. Between machines a site rejects a run that
    differs from an earlier one in fewer than min_donors donors, or relates too many columns to outcomes; a rehearsal
    does not. An entry of K or C may rest on the one donor that is large in both of its columns.

Assumes
-------
What the checked sum assumes: every site stays to the end. A donor is at one site. Each run opens a further C and K of
the same donors: a site limits the runs on the same donors (docs/security/model_outcome.md).

Cost
----
Per site three checked sums of at most a few hundred numbers of two words; one for linear models and survival curves.

References
----------
[Cox72] Cox, JRSS B 1972. [Efr77] Efron, JASA 1977 (ties). [Leh83] Lehmann, Theory of Point Estimation 1983 (one Newton
step from a consistent estimate is efficient). [Huk+12] Hundepool et al., Statistical Disclosure Control 2012 (rare
combinations, dominance). [KM58] Kaplan, Meier 1958. Lines numbered here; the security argument is
docs/security/model_outcome.md.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import scipy.stats

from cloister.arrays import F64, I64, Bits
from cloister.disclosure import SLACK, Contribution, Rows, SimilarGroups, Thresholds, constant
from cloister.errors import DataError, ParameterError, ProtocolAbort
from cloister.models import outcomes
from cloister.mpc.crypto.agreement import Identity
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.net.channel import Channel
from cloister.mpc.sums import checked_sum, common_seed, consistency_check
from cloister.study import Party
from cloister.workflows.common.bounded_values import bounded_columns, shares_of
from cloister.workflows.common.gene_moments import join_sum, split_sum

NAME = "pooled_outcomes"
LEAST_DONORS = 2  # that a study may agree on
BINS = 5  # ranges of the prediction in which observed and expected outcomes are compared
NEAR = 3  # donors, at least, among whom the extra variance of counts is found
RANK = 1e-10  # singular values below this part of the largest are rounding
LEVEL = 1 / 3  # of the donors, that make a value of a column a level
MOST = 0.5  # leverage of one donor in any combination of columns
PRIOR = 1.0  # standard deviation of the prior that draws a site's own fit towards zero, per deviation of a feature
FREE = 20.0  # the same where it hardly matters: to see whether outcomes are separated
DISPERSION = 100.0  # largest extra variance of counts
PULL = 0.9  # of a donor's deviation, that is left by one step of `bounded`
PULLS = 60  # steps, after which a donor is at the mean of the others


@dataclass(frozen=True, slots=True)
class Params:
    sites: tuple[Party, ...]
    coordinator: Party
    model: str  # "cox", "logistic", "linear", "poisson", "negbin"; or "km"
    columns: tuple[str, ...] = ()  # features, one column each
    fits: tuple[tuple[int, ...], ...] = ()  # columns of each regression
    intervals: int = 0  # of time
    arms: tuple[str, ...] = ()  # of survival curves
    min_donors: int = 3

    def __post_init__(self) -> None:
        if self.model not in (*outcomes.MODELS, "km"):
            raise ParameterError(f"model must be one of {', '.join((*outcomes.MODELS, 'km'))}, found '{self.model}'")
        if self.min_donors < LEAST_DONORS:
            raise ParameterError(f"min_donors must be at least {LEAST_DONORS}, found {self.min_donors}")
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
    block: I64 | None = None  # (n,), sets of donors that are left out together, the same in every run; -1: left out
    names: tuple[str, ...] = ()  # of the donors, for comparison with earlier runs at this site


@dataclass(frozen=True, slots=True)
class Prepared:
    """A site's donors as sums may use them, made before the first message."""

    at: I64  # (m,), positions of the donors that are used
    x: F64  # (m, P), a closed column is zero
    y: F64  # (m,)
    open: Bits  # (P,), columns that this site adds to
    donors: float  # 1 / the largest part of one donor in the squares of a column; 0: nothing is added
    interval: I64 | None = None
    exposure: F64 | None = None
    notes: tuple[str, ...] = ()  # for this site alone


@dataclass(frozen=True, slots=True)
class Own:
    """A site's part of one regression, and the groups in which it is compared with all sites' fit."""

    score: F64  # C, (p,)
    information: F64  # K, (p, p)
    table: outcomes.Table  # of the groups, in the units of the features
    separated: bool  # whether the site's outcomes are in the order of its predictions


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
    log_likelihood: float  # of a linear model; NaN for others


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
        return [("L3", "sums of squares and products", 3 + upper + P + 1)]
    each = sum(len(f) + len(f) * (len(f) + 1) // 2 for f in params.fits)
    return [
        ("L2", "donors and outcomes", 4),
        ("L3", "score and information of each site's own fit", 2 + each),
        ("L4", "calibration and concordance", (3 * BINS + 2) * len(params.fits)),
    ]


def cost(params: Params) -> dict[Party, tuple[int, int]]:
    hub = params.coordinator
    parts = [checked_sum.cost(checked_sum.Params(params.sites, hub, 2 * n)) for _, _, n in lengths_of(params)]
    parts.append(common_seed.cost(common_seed.Params(params.sites, hub)))
    parts.append(consistency_check.cost(consistency_check.Params(params.sites, hub)))
    return {u: (sum(p[u][0] for p in parts), sum(p[u][1] for p in parts)) for u in (hub, *params.sites)}


def ideal(params: Params, xs: Mapping[Party, Donors]) -> dict[Party, Modelled]:
    """The same sums, added up in one place. What a site may add is decided by `prepared`, from its rows alone."""
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
    least *= 1 if least == 1 else 2
    if n < least:
        raise DataError(
            f"{n} donor{'s' if n != 1 else ''} here, fewer than {least}: sums of a regression over fewer than "
            f"2 min_donors (min_donors = {mine.thresholds.min_donors}) come close to single persons; leave this site "
            "out of the study"
        )
    if mine.thresholds.min_donors > 1 and n < 2 * (len(params.columns) + 1):
        raise DataError(
            f"{n} donors here for {len(params.columns)} features; a site needs two donors for every feature, and two "
            f"more: name at most {n // 2 - 1} features, or leave this site out of the study"
        )


def levels_of(column: F64, least: int) -> I64:
    """Level of each donor in a column: a value that many donors share, or 0 for all other values together."""
    values, of, count = np.unique(column, return_inverse=True, return_counts=True)
    shared = count >= max(least, LEVEL * len(column))
    made: I64 = np.where(shared, np.arange(1, len(values) + 1), 0)[of].astype(np.int64)
    return made


def rare(one: I64, other: I64, least: int) -> Bits:
    """Donors of a combination of two levels that fewer than `least` donors have."""
    _, of, count = np.unique(np.stack([one, other], axis=1), axis=0, return_inverse=True, return_counts=True)
    made: Bits = count[of.ravel()] < least
    return made


def rests_of(x: F64, columns: I64) -> list[tuple[int, Bits]]:
    """What is left of all donors when exclusive columns are taken away, such as the reference of a factor.

    Columns of zeros and one other value are exclusive if no donor has two of them. One minus their sum is a combination
    of the columns and the constant. For each column in turn, the next exclusive ones join it: position of the last that
    joined, and the donors that have none of them.
    """
    some = [int(j) for j in columns if x[:, j].any() and len(np.unique(x[x[:, j] != 0, j])) == 1]
    made = []
    for i in range(len(some)):
        taken = x[:, some[i]] != 0
        for j in (*some[i + 1 :], *some[:i]):
            if not (taken & (x[:, j] != 0)).any():
                taken = taken | (x[:, j] != 0)
                made.append((j, ~taken))
    return made


def common_donors(x: F64, least: int, exposure: F64 | None = None, block: I64 | None = None) -> I64:
    """Donors of whom each level, and each combination of levels of two columns, has at least `least`; whole blocks."""
    at = np.arange(len(x)) if block is None else np.flatnonzero(block >= 0)
    while len(at):
        codes = [levels_of(column, least) for column in x[at].T]
        alone = np.zeros(len(at), bool)
        for i, one in enumerate(codes):
            for other in codes[: i + 1]:
                alone |= rare(one, other, least)
        for _, rest in rests_of(x[at], np.arange(x.shape[1])):
            if rest.sum() < least:
                alone |= rest
        if exposure is not None and not alone.any():
            part = np.square(exposure[at])
            alone = part * least > part.sum() * (1 + SLACK)
        if not alone.any():
            break
        if block is not None:
            alone = np.isin(block[at], block[at[alone]])
        at = at[~alone]
    return at


def leverage_of(x: F64, weights: F64 | None = None) -> F64:
    """Of each row, in the span of these columns and a constant; rows may have weights."""
    w = np.ones(len(x)) if weights is None else weights
    d = np.sqrt(w)[:, None] * (x - w @ x / w.sum())
    sizes = np.linalg.norm(d, axis=0)
    left, size, _ = np.linalg.svd(d[:, sizes > 0] / sizes[sizes > 0], full_matrices=False)
    made: F64 = w / w.sum() + np.square(left[:, size > RANK * size.max(initial=0.0)]).sum(axis=1)
    return made


def bounded(x: F64, least: int, exposure: F64 | None = None) -> F64:
    """Values of which no donor has more than 1 / least of a column's squares, or too much leverage in all columns.

    The bound on the leverage is twice its mean, but at most 1 / 2, and 1 / least where that is more. A donor above a
    bound is moved towards the mean of all. With exposures, which are weights of the information at zero, no donor has
    more than half of a weighted sum of squares either.
    """
    x = x.copy()
    if least == 1 or not x.shape[1]:
        return x
    x = bounded_columns(x, least)
    rank = np.linalg.matrix_rank(x - x.mean(axis=0)) + 1
    most = min(MOST, max(1 / least, 2 * rank / len(x)))
    pulls = np.zeros(len(x), np.int64)
    for _ in range(2 * PULLS * len(x)):
        x = bounded_columns(x, least)
        h = leverage_of(x) / most
        if exposure is not None:
            h = np.maximum(h, leverage_of(x, exposure) / MOST)
        worst = int(np.argmax(h))
        if h[worst] <= 1 + SLACK:
            return x
        near = x.mean(axis=0) + PULL * (x[worst] - x.mean(axis=0))
        pulls[worst] += 1
        # a donor that alone spans a direction would keep its leverage, however near: it goes to the mean of the others
        x[worst] = near if pulls[worst] < PULLS else np.delete(x, worst, axis=0).mean(axis=0)
    return np.zeros_like(x)


def prepared(params: Params, mine: Donors) -> Prepared:
    """L2: the donors and columns that this site adds, and their values; from its own rows alone."""
    least, n, P = mine.thresholds.min_donors, len(mine.y), mine.x.shape[1]
    if least == 1:
        return Prepared(np.arange(n), mine.x, mine.y, np.ones(P, bool), float(n), mine.interval, mine.exposure)
    notes: list[str] = []
    at = common_donors(mine.x, least, mine.exposure, mine.block)
    if n > len(at):
        notes.append(
            f"{n - len(at)} of {n} donors have a rare combination of features, or are of a block with one who has "
            "or who lacks a value, and are left out"
        )
    x, y = mine.x[at], mine.y[at]
    exposure = None if mine.exposure is None else mine.exposure[at]
    interval = None if mine.interval is None else mine.interval[at]
    nothing = Prepared(at[:0], x[:0], y[:0], np.zeros(P, bool), 0.0)
    if len(at) < 2 * least:
        return replace(nothing, notes=(*notes, f"{len(at)} donors are left, too few: this site adds nothing"))
    if params.model == "cox" and interval is not None:
        y, interval = followed(y, interval, least)
    seen = levels_of(y, least)
    if params.model in ("cox", "logistic"):
        seen = y.astype(np.int64)
    several, binary = len(np.unique(seen)) > 1, params.model in ("cox", "logistic")
    if rare(seen, seen, least).any() or (params.model != "linear" and not y.any()):
        text = "fewer than min_donors donors here have one of the outcomes: this site adds nothing"
        return replace(nothing, notes=(*notes, text))
    opened = np.ones(P, bool)
    for j in range(P):
        codes = levels_of(x[:, j], least)
        if len(np.unique(codes)) > 1 and several:
            _, cells = np.unique(np.stack([codes, seen], axis=1), axis=0, return_counts=True)
            opened[j] = len(cells) == len(np.unique(codes)) * len(np.unique(seen)) and cells.min() >= least
    while several:  # the reference of a factor has no column of its own
        few = (
            j
            for j, rest in rests_of(x, np.flatnonzero(opened))
            if rest.any() and min(int((rest & (seen == code)).sum()) for code in np.unique(seen)) < least
        )
        if (column := next(few, None)) is None:
            break
        opened[column] = False
    if not opened.all():
        names = ", ".join(f"'{c}'" for c, ok in zip(params.columns, opened, strict=True) if not ok)
        notes.append(f"{names}: too few donors of a level have one of the outcomes; this site adds nothing to them")
        Z = np.hstack([np.ones((len(x), 1)), x[:, ~opened]])
        x = np.where(opened, x - Z @ np.linalg.lstsq(Z, x, rcond=RANK)[0], 0.0)
    free = x[:, opened]
    scale = np.maximum(np.abs(free).max(axis=0, initial=0.0), 1e-300)
    free = np.where(np.ptp(free, axis=0) > RANK * scale, free, 0.0)
    near = bounded(free, least, exposure)
    if moved_in := int((np.abs(near - free) > 0).any(axis=1).sum()):
        notes.append(f"{moved_in} of {n} donors have features far from the others'; they count with nearer values")
    x = x.copy()
    x[:, opened] = near
    if params.model == "linear":
        y = bounded(y[:, None], least)[:, 0]
    elif params.model in ("poisson", "negbin"):  # on the scale on which the means are linear
        y = np.expm1(bounded(np.log1p(y)[:, None], least))
        y = bounded_columns(y, least)[:, 0]  # where logarithms spread widely, one count may be most of the sum
    sizes = [shares_of(near).max(initial=0.0), 0.0 if binary else shares_of(y[:, None]).max()]
    donors = min(1 / max(*sizes, 1 / len(x)), float(len(x)))
    if not np.any(near):
        return replace(nothing, notes=(*notes, "no feature is left: this site adds nothing"))
    return Prepared(at, x, y, opened, donors, interval, exposure, tuple(notes))


def followed(y: F64, interval: I64, least: int) -> tuple[F64, I64]:
    """Follow-up that ends with the last interval in which enough donors are at risk."""
    last = int(np.sort(interval)[::-1][least - 1])
    return np.where(interval > last, 0.0, y), np.minimum(interval, last)


def standardised(x: F64) -> F64:
    """Features in this site's own deviations."""
    spread = x.std(axis=0)
    made: F64 = (x - x.mean(axis=0)) / np.where(spread > 0, spread, 1.0)
    return made


def own_fits(params: Params, ready: Prepared, dispersion: float, least: int) -> list[Own]:
    """L3: of each regression. Groups of all of them, with the features, leave no donor much leverage."""
    made: list[Own] = []
    columns = ready.x
    for f in params.fits:
        own, codes = own_fit(params, ready, f, dispersion, least, columns)
        columns = np.hstack([columns, (codes[:, None] == np.arange(1, int(codes.max()) + 1)).astype(np.float64)])
        made.append(own)
    return made


def own_fit(
    params: Params, ready: Prepared, f: tuple[int, ...], dispersion: float, least: int, columns: F64
) -> tuple[Own, I64]:
    """Score and information at this site's own point, and groups of donors with similar predictions."""
    x = ready.x[:, f]
    spread = x.std(axis=0)
    scale = np.where(spread > 0, spread, 1.0)
    rows = outcomes.grouped(
        (x - x.mean(axis=0)) / scale, ready.y, np.arange(len(x)), ready.exposure, ready.interval, params.intervals
    )
    b = outcomes.drawn_to_zero(params.likelihood, rows, PRIOR, dispersion)
    found = outcomes.evaluate(params.likelihood, rows, b, dispersion)
    while least > 1 and heaviest(params, rows, found, dispersion) > MOST and np.abs(b).max() > 1e-3:
        b = b / 2
        found = outcomes.evaluate(params.likelihood, rows, b, dispersion)
    if least > 1 and heaviest(params, rows, found, dispersion) > MOST * (1 + SLACK):  # at zero too, so nothing is added
        found = replace(found, score=0.0 * found.score, information=0.0 * found.information)
    C, K = (found.score + found.information @ b) * scale, found.information * np.outer(scale, scale)
    eta = rows.x @ b
    codes = ranges_of(eta, ready, params, least, columns)
    table = outcomes.grouped(x, ready.y, codes, ready.exposure, ready.interval, params.intervals)
    free = rows.x @ outcomes.drawn_to_zero(params.likelihood, rows, FREE, dispersion)
    return Own(C, K, table, separated(params, free, ready)), codes


def separated(params: Params, eta: F64, ready: Prepared) -> bool:
    """Whether the outcomes of this site are in the order of these predictions."""
    if params.likelihood == "logistic":
        return bool(eta[ready.y > 0].min(initial=np.inf) > eta[ready.y == 0].max(initial=-np.inf))
    if params.likelihood != "cox" or ready.interval is None:
        return False
    after = ready.interval[None, :] > ready.interval[:, None]
    below = np.where(after, eta[None, :], -np.inf).max(axis=1)
    return bool(np.all(eta[ready.y > 0] > below[ready.y > 0]))


def heaviest(params: Params, rows: outcomes.Table, found: outcomes.Evaluated, dispersion: float) -> float:
    """Largest part of one donor in any combination of the information, whose weights are those of the likelihood."""
    m = np.maximum(found.expected, 0.0)
    w = m * (1 - m) if params.likelihood == "logistic" else m / (1 + dispersion * m)
    if not w.sum() > 0:
        return 0.0
    apart = rows.x - w @ rows.x / w.sum()
    left, size, _ = np.linalg.svd(np.sqrt(w)[:, None] * apart, full_matrices=False)
    part = np.square(left[:, size > RANK * max(size.max(initial=0.0), 1e-300)]).sum(axis=1)
    return float((part + w / w.sum()).max(initial=0.0))


def ranges_of(eta: F64, ready: Prepared, params: Params, least: int, columns: F64) -> I64:
    """Codes of up to BINS groups of donors by their prediction, each with enough donors of every outcome."""
    n = len(eta)
    order = np.argsort(eta, kind="stable")
    codes = np.zeros(n, np.int64)
    binary = params.likelihood in ("cox", "logistic")
    for groups in range(BINS, 1, -1):
        codes[order] = np.arange(n) * groups // n
        hot = (codes[:, None] == np.arange(groups)).astype(np.float64)
        events = hot.T @ ready.y
        fewest = min(events.min(), (hot.sum(axis=0) - events).min()) if binary else hot.sum(axis=0).min()
        joint = 1.0 if least == 1 else leverage_of(np.hstack([hot[:, 1:], columns])).max(initial=0.0)
        if fewest >= least and (least == 1 or joint <= MOST + SLACK):
            return codes
    return np.zeros(n, np.int64)


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
        if least.min_donors > 1:
            near = bounded_columns(interval[at, None].astype(np.float64), least.min_donors)[:, 0]
            interval[at] = np.clip(np.rint(near), 0, params.intervals - 1).astype(np.int64)
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
        if params.curves:
            return
        self.ready = prepared(params, mine)
        self.notes = self.ready.notes
        self.rows = Rows(len(self.ready.at), np.arange(len(self.ready.at)), mine.thresholds, mine.cells[self.ready.at])
        self.own: list[Own] = []

    def part(self, number: int, line: str, state: State) -> Contribution:
        if line == "L8":
            return self._curves()
        _, _, length = lengths_of(self.params)[number]
        if not self.ready.donors:
            return constant(np.zeros(length), "this site has too few donors, and adds zeros")
        if self.params.linear:
            return self._measured(self._squares())
        return self._measured({"L2": self._counts, "L3": self._fits, "L4": self._checks}[line](state))

    def _measured(self, values: F64) -> Contribution:
        size = np.full(len(values), self.ready.donors)
        return self.rows.measured(size * self.rows.cells.min() if self.rows.cells is not None else size, size, values)

    def _counts(self, state: State) -> F64:
        """L2."""
        ready = self.ready
        extra = np.zeros(2)
        if self.params.model == "negbin":
            least = self.mine.thresholds.min_donors
            rows = replace(self.rows, thresholds=Thresholds(1, max(NEAR, least)))
            near = rows.similar(standardised(ready.x)).codes
            extra = outcomes.extra_variance(ready.y, near, ready.exposure, least)
        return np.concatenate([[float(len(ready.at)), float(ready.y.sum())], extra])

    def _fits(self, state: State) -> F64:
        """L3: sites, those whose outcomes are separated in every regression, and what each adds to these."""
        self.own = own_fits(self.params, self.ready, state.dispersion, self.mine.thresholds.min_donors)
        if nothing := sum(not own.information.any() for own in self.own):
            self.notes += (f"one donor would weigh more than half in {nothing} regression(s); this site adds nothing",)
        numbers = [v for own in self.own for v in (own.score, upper(own.information))]
        return np.concatenate([[1.0, float(all(own.separated for own in self.own))], *numbers])

    def _checks(self, state: State) -> F64:
        """L4: of groups, observed and expected outcomes by prediction; pairs of donors of different ones."""
        numbers = []
        for own, beta in zip(self.own, state.betas, strict=True):
            t = own.table
            eta = t.x @ beta
            t = replace(t, x=t.x - t.n @ t.x / t.n.sum())
            found = outcomes.evaluate(self.params.likelihood, t, beta, state.dispersion)
            bins = (np.argsort(np.argsort(eta, kind="stable")) * 2 + 1) * BINS // (2 * len(t))
            numbers += [np.bincount(bins, w, minlength=BINS) for w in (t.n, t.y, found.expected)]
            pairs = (0.0, 0.0)
            if self.params.model == "cox":
                pairs = outcomes.concordant(eta, t.n, outcomes.later(t.at_risk, t.events), t.events)
            elif self.params.model == "logistic":
                pairs = outcomes.concordant(eta, t.n, (t.n - t.y)[:, None], t.y[:, None])
            numbers.append(np.array(pairs))
        return np.concatenate(numbers)

    def _squares(self) -> F64:
        """L3 of a linear model: sums of squares and products within the site."""
        x, y = self.ready.x, self.ready.y
        dx, dy = x - x.mean(axis=0), y - y.mean()
        numbers = [[float(len(y)), 1.0, float(y.sum())], upper(dx.T @ dx), dx.T @ dy, [float(dy @ dy)]]
        return np.concatenate(numbers)

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


def spread_over(there: Bits, unknown: Bits) -> Bits:
    """Marks of all columns, from those of the columns that are there."""
    made = ~there
    made[there] = unknown[: int(there.sum())]
    return made


class State:
    """What every party makes of the sums, alike."""

    def __init__(self, params: Params) -> None:
        self.params = params
        self.donors, self.total, self.dispersion = 0.0, 0.0, 0.0
        self.betas: list[F64] = []
        self.covariances: list[F64] = []
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
            {"L2": self._take_counts, "L3": self._take_fits, "L4": self._take_checks}[line](total)

    def _take_counts(self, total: F64) -> None:
        self.donors, self.total = float(total[0]), float(total[1])
        if not self.donors >= 1:
            raise abort(
                "L2",
                "no-donors",
                "no site has min_donors donors with the outcome, min_donors without it and a feature that varies",
            )
        if self.params.model == "negbin":
            self.dispersion = min(outcomes.dispersion_of(float(total[2]), float(total[3])), DISPERSION)
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

    def _take_fits(self, total: F64) -> None:
        if round(float(total[1])) >= round(float(total[0])):
            names = ", ".join(f"'{c}'" for c in self.params.columns)
            raise abort(
                "L3",
                "separated",
                f"the outcomes of every site are separated by the features {names}, or there are too few donors for so "
                "many; leave features out",
            )
        at = 2
        for f in self.params.fits:
            p = len(f)
            u = p * (p + 1) // 2
            C, K = total[at : at + p], full(total[at + p : at + p + u], p)
            at += p + u
            there = np.diag(K) > 0
            unknown = outcomes.singular(K[np.ix_(there, there)]) if there.any() else np.ones(1, bool)
            if unknown.any():
                names = ", ".join(
                    f"'{self.params.columns[c]}'" for c, bad in zip(f, spread_over(there, unknown), strict=True) if bad
                )
                raise abort(
                    "L3",
                    "singular",
                    f"the donors do not determine the coefficients of {names}: a feature that does not vary or is a "
                    "combination of others within every site, or too few donors of a level with each outcome; leave "
                    "features out",
                )
            beta, covariance = np.zeros(p), np.full((p, p), math.nan)
            beta[there] = np.linalg.solve(K[np.ix_(there, there)], C[there])
            covariance[np.ix_(there, there)] = np.linalg.inv(K[np.ix_(there, there)])
            self.betas.append(beta)
            self.covariances.append(covariance)
            for name in [self.params.columns[c] for c, ok in zip(f, there, strict=True) if not ok]:
                self.notes.append(
                    f"'{name}' is not estimated: it does not vary, or a level of it has fewer than min_donors donors "
                    "with or without the outcome at every site"
                )

    def _take_checks(self, total: F64) -> None:
        made = []
        for i, f in enumerate(self.params.fits):
            part = total[i * (3 * BINS + 2) : (i + 1) * (3 * BINS + 2)]
            agree, pairs = part[-2:]
            concordance = float(agree / pairs) if pairs > 0 else math.nan
            table = part[:-2].reshape(3, BINS).T
            made.append(
                Fit(
                    f,
                    np.where(np.isfinite(np.diag(self.covariances[i])), self.betas[i], math.nan),
                    self.covariances[i],
                    math.inf,
                    self.dispersion,
                    math.nan,
                    concordance,
                    table,
                    math.nan,
                )
            )
        self.fits = tuple(made)

    def _take_squares(self, total: F64) -> None:
        P = len(self.params.columns)
        u = P * (P + 1) // 2
        self.donors, sites, self.total = (float(v) for v in total[:3])
        at = 3
        XX, Xy, yy = full(total[at : at + u], P), total[at + u : at + u + P], float(total[-1])
        for f in self.params.fits:
            df = self.donors - sites - len(f)
            A, b = XX[np.ix_(f, f)], Xy[[*f]]
            if not (df >= 1 and self.donors >= 1):
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
            self.openings,
            self.fits,
            self.curves,
            tuple(self.notes),
        )


# ---- roles -----------------------------------------------------------------------------------------------------------

Add = Callable[[Channel, checked_sum.Params, int, str, str, State], Awaitable[F64]]


async def follow(ch: Channel, params: Params, add: Add) -> Modelled:
    """L2 to L4, or L8: the same at every party, except that S has no donors."""
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

    result = await follow(ch, params, add)  # L2 to L4, L8
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

    result = await follow(ch, params, add)  # L2 to L4, L8
    await consistency_check.coordinator(ch, consistency_check.Params(params.sites, params.coordinator))  # L7
    return result
