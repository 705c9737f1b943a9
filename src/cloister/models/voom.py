"""Linear models of expression with donors as samples, as limma-voom fits them; from samples, or from sums over them.

    y = log2((count + 0.5) / (library + 1) · 10^6)      log counts per million
    least squares of y on the design                    mean and deviation of each gene
    trend of √deviation over mean log count (lowess)    weight of an observation: 1 / trend(fitted log count)^4
    weighted least squares                              coefficients, variances
    variances moved towards a common one                moderated t, p, false discovery rate

`Sums` is all that a fit needs of its samples. Effects that belong to one block of samples each (a site, a donor) are
taken out within the block, so they are part of no sum.

[LCSS14] Law, Chen, Shi, Smyth, Genome Biology 2014 (voom). [Smy04] Smyth, Stat. Appl. Genet. Mol. Biol. 2004
(moderation). [Cle79] Cleveland, JASA 1979 (lowess). [AH10] Anders, Huber, Genome Biology 2010 (size factors).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import scipy.special

from cloister.arrays import F64, I64, Bits

SPAN = 0.5  # share of the genes that a point of the trend looks at
ROBUST_STEPS = 3
FLAT = 1e-10  # a residual sum of squares below this share of the sum of squares is 0
LARGE, SHARE = 10, 0.7  # beyond LARGE samples of the smallest group, only this share has to show a gene


# ---- counts ----------------------------------------------------------------------------------------------------------


def log_cpm(counts: F64, library: F64) -> F64:
    """Samples by genes."""
    y: F64 = np.log2((counts + 0.5) / (library[:, None] + 1) * 1e6)
    return y


def least_samples(smallest_group: int) -> float:
    """In how many samples a gene has to be counted often enough."""
    return smallest_group if smallest_group <= LARGE else LARGE + (smallest_group - LARGE) * SHARE


def often_enough(counts: F64, library: F64, mean_library: float, min_count: float) -> Bits:
    """Whether a gene has as many counts per million as `min_count` would be in a sample of mean size."""
    enough: Bits = counts / library[:, None] >= min_count / mean_library
    return enough


def size_factors(counts: F64, library: F64, mean_log: F64) -> F64:
    """Median ratio of a sample to the geometric mean sample, over genes that every sample has, per count."""
    return np.median(counts / np.exp(mean_log), axis=1) / library


# ---- the trend -------------------------------------------------------------------------------------------------------


def lowess(x: F64, y: F64, span: float = SPAN, steps: int = ROBUST_STEPS) -> F64:
    """Local lines through points that are sorted by x, robust; between points closer than 1 % they are interpolated."""
    n = len(x)
    width, reach = max(min(int(span * n + 1e-7), n), 2), float(x[-1] - x[0])
    anchors = _anchors(x, 0.01 * reach)
    fitted, trust = y.copy(), np.ones(n)
    for step in range(steps + 1):
        first, values = 0, np.empty(len(anchors))
        for k, i in enumerate(anchors):
            while first + width < n and x[i] - x[first] > x[first + width] - x[i]:
                first += 1
            radius = max(x[i] - x[first], x[first + width - 1] - x[i])
            values[k] = _local_line(x, y, i, first, radius, reach, trust)
        fitted = np.interp(x, x[anchors], values)
        away = np.abs(y - fitted)
        middle = np.sort(away)[[n // 2, n - n // 2 - 1]].sum() * 3
        if step == steps or middle < 1e-7 * away.mean():
            break
        trust = np.where(away <= 0.001 * middle, 1.0, np.square(1 - np.square(away / max(middle, 1e-300))))
        trust[away > 0.999 * middle] = 0.0
    return fitted


def _anchors(x: F64, apart: float) -> list[int]:
    """Points at which a line is fitted: about `apart` from each other, the last one included."""
    n, anchors, last = len(x), [0], 0
    while True:
        last = int(np.searchsorted(x, x[last], side="right")) - 1  # equal x have one value
        if last >= n - 1:
            return anchors
        beyond = int(np.searchsorted(x, x[last] + apart, side="right"))
        last = max(last + 1, beyond - 1)
        anchors.append(last)


def _local_line(x: F64, y: F64, i: int, first: int, radius: float, reach: float, trust: F64) -> float:
    """The value at x[i] of the line through its neighbours, near ones counting most."""
    end = int(np.searchsorted(x, x[i] + radius, side="right"))
    near = slice(first, max(end, i + 1))
    far = np.abs(x[near] - x[i])
    weight = np.where(far <= 0.001 * radius, 1.0, (1 - (far / max(radius, 1e-300)) ** 3) ** 3)
    weight = np.where(far <= 0.999 * radius, weight, 0.0) * trust[near]
    total = weight.sum()
    if total <= 0:
        return float(y[i])
    weight = weight / total
    center = float(weight @ x[near])
    spread = float(weight @ np.square(x[near] - center))
    if np.sqrt(spread) > 0.001 * reach:
        weight = weight * (1 + (x[i] - center) / spread * (x[near] - center))
    return float(weight @ y[near])


@dataclass(frozen=True, slots=True)
class Trend:
    """√deviation over mean log count, as a line through points."""

    x: F64
    y: F64

    def weights(self, log_count: F64) -> F64:
        """Of observations whose fitted log count is this."""
        w: F64 = np.interp(log_count, self.x, self.y) ** -4.0
        return w


def trend_of(mean: F64, sigma: F64, mean_log_library: float, span: float = SPAN) -> Trend:
    """The trend through the genes: their mean log counts per million, and residual deviations."""
    x, y = mean + mean_log_library - np.log2(1e6), np.sqrt(sigma)
    order = np.argsort(x, kind="stable")
    x = x[order]
    fitted = lowess(x, y[order], span)
    points, at, size = np.unique(x, return_inverse=True, return_counts=True)
    return Trend(points, np.bincount(at, fitted) / size)


# ---- least squares ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sums:
    """Over samples, with what belongs to a block taken out: design q wide, g genes."""

    xx: F64  # XᵀWX, (q, q, g), or (q, q, 1) where all genes have the same
    xy: F64  # XᵀWy, (q, g)
    yy: F64  # yᵀWy, (g,)


def sums_of(X: F64, y: F64, blocks: I64, weights: F64 | None = None) -> Sums:
    """Over these samples; block -1 belongs to none. Without weights xx is the same for all genes, and stands once."""
    w = np.ones((len(y), 1)) if weights is None else weights
    wy = w * y
    xx, xy, yy = np.einsum("ni,nj,ng->ijg", X, X, w), X.T @ wy, (wy * y).sum(axis=0)
    for block in np.unique(blocks[blocks >= 0]):
        of = blocks == block
        total, x_sum, y_sum = w[of].sum(axis=0), X[of].T @ w[of], wy[of].sum(axis=0)
        xx -= x_sum[:, None] * x_sum[None] / total
        xy -= x_sum * y_sum / total
        yy = yy - y_sum * y_sum / total
    return Sums(xx, xy, yy)


@dataclass(frozen=True, slots=True)
class Fit:
    """Coefficients (q, g), their covariance but for the variance (q, q, g), and the variance (g,)."""

    coefficients: F64
    covariance: F64
    variance: F64
    df: int


def fit_of(sums: Sums, df: int, size: F64 | None = None) -> Fit:
    """Solve the normal equations; `size` is the sum of squares that rounding is compared with."""
    inverse = np.linalg.inv(np.moveaxis(sums.xx, 2, 0))  # (g, q, q)
    inverse = (inverse + np.swapaxes(inverse, 1, 2)) / 2
    coefficients = np.matmul(inverse, sums.xy.T[:, :, None])[:, :, 0].T
    rest = sums.yy - (coefficients * sums.xy).sum(axis=0)
    size = sums.yy if size is None else size
    rest = np.where(rest <= FLAT * np.abs(size), 0.0, rest)
    return Fit(coefficients, np.moveaxis(inverse, 0, 2), rest / df, df)


def within(X: F64, blocks: I64) -> F64:
    """X less its mean in every block."""
    X = X.copy()
    for block in np.unique(blocks[blocks >= 0]):
        X[blocks == block] -= X[blocks == block].mean(axis=0)
    return X


def basis_of(X: F64) -> F64:
    """Orthonormal columns that span those of X, whatever their units."""
    size = np.linalg.norm(X, axis=0)
    U, values, _ = np.linalg.svd(X[:, size > 0] / size[size > 0], full_matrices=False)
    return np.asarray(U[:, values > 1e-9 * max(len(X), 1)])


def leverages(Q: F64, owner: I64) -> tuple[I64, F64]:
    """Each owner of rows, and its leverage: the largest share of a combination of the columns of Q that is its own.

    Q has orthonormal columns, (n, p), or is a stack of such matrices, (…, n, p). A leverage of 1 means that some
    combination of Qᵀy holds nothing but this owner's rows; m owners whose rows are alike have 1 / m each.
    """
    who = np.unique(owner)
    parts = [Q[..., owner == u, :] for u in who]
    sizes = [
        np.square(P).sum(axis=(-2, -1)) if P.shape[-2] == 1 else np.square(np.linalg.norm(P, ord=2, axis=(-2, -1)))
        for P in parts
    ]
    return who, np.stack(sizes, axis=-1) if sizes else np.zeros((*Q.shape[:-2], 0))


def weighted_columns(X: F64, blocks: I64, weights: F64) -> F64:
    """By what weighted sums multiply samples, (g, n, 1 + q): the weights, and XᵀW less the blocks' weighted means."""
    columns = np.repeat(X[None], weights.shape[1], axis=0)
    w = weights.T[:, :, None]
    for block in np.unique(blocks[blocks >= 0]):
        of = blocks == block
        columns[:, of] -= (w[:, of] * columns[:, of]).sum(axis=1, keepdims=True) / w[:, of].sum(axis=1, keepdims=True)
    return np.concatenate([w, w * columns], axis=2)


def rank_of(xx: F64) -> int:
    """Of a design, from its XᵀX; columns of any unit."""
    scale = np.sqrt(np.maximum(np.diag(xx), 0.0))
    there = scale > 1e-6
    if not there.any():
        return 0
    values = np.linalg.eigvalsh(xx[np.ix_(there, there)] / np.outer(scale[there], scale[there]))
    return int((values > 1e-9).sum())


def fitted_values(X: F64, y: F64, blocks: I64, coefficients: F64) -> F64:
    """Of these samples, with the blocks' own effects."""
    fitted = X @ coefficients
    for block in np.unique(blocks[blocks >= 0]):
        of = blocks == block
        fitted[of] += (y[of] - fitted[of]).mean(axis=0)
    return fitted


# ---- moderation ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Prior:
    """What the variances of all genes have in common: as if `df` more samples had shown `variance`."""

    df: float
    variance: float

    def posterior(self, variance: F64, df: int) -> F64:
        if not np.isfinite(self.df):
            return np.full_like(variance, self.variance)
        return (df * variance + self.df * self.variance) / (df + self.df)


def prior_of(variance: F64, df: int) -> Prior:
    """From the mean and the spread of log variances, against those of chi-square over df."""
    if len(variance) < 2:
        return Prior(0.0, float(variance[0]))
    middle = float(np.median(variance))
    above = np.maximum(variance, 1e-5 * (middle if middle > 0 else 1.0))
    half = df / 2
    e = np.log(above) - scipy.special.digamma(half) + np.log(half)
    spread = float(e.var(ddof=1) - scipy.special.polygamma(1, half))
    if spread <= 0:
        return Prior(np.inf, float(above.mean()))
    half_prior = inverse_trigamma(spread)
    return Prior(2 * half_prior, float(np.exp(e.mean() + scipy.special.digamma(half_prior) - np.log(half_prior))))


def inverse_trigamma(x: float) -> float:
    """Where the trigamma function is x, by Newton's method on its reciprocal, which is almost a line."""
    if x > 1e7:
        return float(x**-0.5)
    if x < 1e-6:
        return 1 / x
    y = 0.5 + 1 / x
    for _ in range(50):
        value = float(scipy.special.polygamma(1, y))
        step = value * (1 - value / x) / float(scipy.special.polygamma(2, y))
        y += step
        if abs(step) < 1e-14 * y:
            break
    return y


@dataclass(frozen=True, slots=True)
class Tested:
    """One contrast of coefficients, (g,) each."""

    effect: F64
    error: F64  # standard error, moderated
    t: F64
    p: F64
    fdr: F64


def test(fit: Fit, contrast: F64, prior: Prior) -> Tested:
    """Whether this combination of coefficients is 0."""
    g = len(fit.variance)
    effect: F64 = contrast @ fit.coefficients
    unscaled = np.einsum("i,ijg,j->g", contrast, fit.covariance, contrast)
    error = np.sqrt(prior.posterior(fit.variance, fit.df) * np.maximum(unscaled, 0.0))
    t = effect / np.where(error > 0, error, np.inf)
    df = min(fit.df + prior.df, float(fit.df * g))
    p = np.minimum(2 * scipy.special.stdtr(df, -np.abs(t)), 1.0)
    return Tested(effect, error, t, p, false_discovery(p))


def false_discovery(p: F64) -> F64:
    """Benjamini and Hochberg's."""
    order = np.argsort(p)[::-1]
    rank = np.arange(len(p), 0, -1)
    fdr = np.empty_like(p)
    fdr[order] = np.minimum(np.minimum.accumulate(p[order] * len(p) / rank), 1.0)
    return fdr
