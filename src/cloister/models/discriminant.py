"""Linear classifiers from fixed statistics: cells, sums and one Gram matrix of classes. No iteration, no cell.

    n_k, S_k = Σ_{i in k} x_i, G = Σ_i x_i x_iᵀ        counts, sums per class, second moments of all cells together
    m_k = S_k / n_k, μ = Σ_k S_k / n, σ² = diag G / n - μ² + floor, z = (x - μ) / σ
    W = cov(z) - Σ_k n_k / n z(m_k) z(m_k)ᵀ             covariance within classes, the same for all of them

    discriminant  A = W_s⁻¹ z(m_k), b = log π_k - ½ z(m_k)ᵀ A         W_s = (1 - s) W + s tr(W) / h I
    ridge         A = (Σ_k π_k (W + c_k c_kᵀ) + λ I)⁻¹ π_k c_k        c_k = z(m_k) - Σ_k π_k z(m_k)
    both          the mean of the two, each scaled so that classes exceed the others by 1 at their means on average

    logistic step A + (c (W + Σ_k π_k z(m_k) z(m_k)ᵀ) + λ I)⁻¹ (R / n - λ A)       R = Σ_γ n_γ z_γ (y_γ - p_γ)ᵀ

A step of logistic regression needs one more sum, R over groups of cells with label y_γ and probabilities p_γ at A. The
matrix is a fraction of the bound of its curvature [Boh92], and the same for all classes. Cells scatter within groups,
so scores are divided by the root of 1 + π/8 of their variance there [Mac92].

Class weights are π_k = n_k / n in discriminants and ∝ n_k^(1 - balance) in ridge regression. A weighted Gram matrix
would need one matrix per class. With one covariance for all classes it follows from W, the counts and the means, so one
matrix is enough.

Typicality of a cell for class k is 1 at m_k, 0 where m_k and μ explain the cell equally well, and negative beyond:
(d(x, μ) - d(x, m_k)) / d(m_k, μ) with Mahalanobis distances d under W_s. It is linear in x, so a model stores it as a
second matrix of coefficients. A cell whose largest typicality is low is `unknown` [RFL+21].

References
----------
[FHT09] Friedman, Hastie and Tibshirani, The Elements of Statistical Learning, 2009, 4.3 (regularised discriminants).
[Boh92] Böhning, Multinomial logistic regression algorithm, 1992. [Mac92] MacKay, The evidence framework applied to
classification networks, 1992.
[RFL+21] Ren et al., A simple fix to Mahalanobis distance for improving near-OOD detection, 2021.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import scipy.linalg

from cloister.arrays import F64, I64
from cloister.errors import ParameterError

SPREAD = 0.05  # added to the variance of log values, so that a gene that hardly varies gets no large weight
SHARPNESS = 8.0  # of ridge scores, which lie between 0 and 1, in the softmax
CURVATURE = 0.125  # c, a quarter of the bound of [Boh92]
DECAY = 0.01  # λ of logistic steps
REFERENCE = 0.3  # shrinkage of the covariance under typicality


@dataclass(frozen=True, slots=True)
class Setting:
    """How a classifier follows from the statistics: a discriminant, a ridge regression, or the mean of both."""

    shrinkage: float = 0.0  # s; 0: no discriminant
    penalty: float = 0.0  # λ; 0: no ridge regression
    balance: float = 0.0  # of the ridge regression: 0 weighs all cells alike, 1 all classes

    def __post_init__(self) -> None:
        if not 0 <= self.shrinkage <= 1 or not 0 <= self.penalty <= 1e3 or not 0 <= self.balance <= 1:
            raise ParameterError(f"shrinkage and balance must lie in [0, 1], the penalty in [0, 1000], found {self}")
        if not self.shrinkage and not self.penalty:
            raise ParameterError("a setting needs a shrinkage or a penalty above 0")

    @property
    def name(self) -> str:
        parts = [f"discriminant {self.shrinkage:g}"] if self.shrinkage else []
        parts += [f"ridge {self.penalty:g} (balance {self.balance:g})"] if self.penalty else []
        return " + ".join(parts)


SETTINGS = (  # in order of preference: of settings that score alike, the first is taken
    Setting(0.9, 3.0, 1.0),
    Setting(0.9, 1.0, 0.5),
    Setting(0.7),
    Setting(0.0, 3.0, 1.0),
    Setting(0.0, 1.0, 0.5),
    Setting(0.5, 0.3, 0.5),
    Setting(0.5),
    Setting(0.3),
)


@dataclass(frozen=True)
class Statistics:
    """Counts, sums and second moments of labelled cells."""

    counts: F64  # n, (K,)
    sums: F64  # S, (K, h)
    gram: F64  # G, (h, h)

    @classmethod
    def of(cls, x: F64, codes: I64, classes: int) -> Statistics:
        sums = np.zeros((classes, x.shape[1]))
        np.add.at(sums, codes, x)
        return cls(np.bincount(codes, minlength=classes).astype(np.float64), sums, x.T @ x)

    def less(self, other: Statistics) -> Statistics:
        """The statistics of the other cells; a class with less than one cell left is empty."""
        counts = self.counts - other.counts
        gone = counts < 1
        sums = np.where(gone[:, None], 0.0, self.sums - other.sums)
        return Statistics(np.where(gone, 0.0, counts), sums, self.gram - other.gram)

    @property
    def present(self) -> I64:
        """Classes that have cells."""
        return np.flatnonzero(self.counts > 0)


@dataclass(frozen=True)
class Linear:
    """Scores x A + b of K classes; -inf for classes without cells."""

    coefficients: F64  # A, (h, K)
    intercept: F64  # b, (K,)

    def scores(self, x: F64) -> F64:
        z: F64 = x @ self.coefficients + self.intercept
        return z


class Solver:
    """One decomposition of the covariance within classes, from which every setting follows."""

    def __init__(self, statistics: Statistics, spread: float = SPREAD) -> None:
        self.classes, at = len(statistics.counts), statistics.present
        self.at, n = at, statistics.counts[at]
        self.share = n / n.sum()
        means = statistics.sums[at] / n[:, None]
        self.mean = self.share @ means
        variance = np.maximum(np.diag(statistics.gram) / n.sum() - self.mean**2, 0.0)
        self.scale = np.sqrt(variance + spread)
        self.means = means
        z = (means - self.mean) / self.scale
        cov = (statistics.gram / n.sum() - np.outer(self.mean, self.mean)) / np.outer(self.scale, self.scale)
        within = cov - (z.T * self.share) @ z
        values, self.axes = scipy.linalg.eigh((within + within.T) / 2, check_finite=False, driver="evd")
        self.values = np.maximum(values, 0.0)
        self.level = max(float(self.values.mean()), 1e-12)
        self.centers = z @ self.axes  # of classes, in the axes of W

    def fit(self, setting: Setting) -> Linear:
        parts = []
        if setting.shrinkage:
            a = self._whitened(setting.shrinkage)
            parts.append((a, np.log(self.share) - 0.5 * (self.centers.T * a).sum(axis=0)))
        if setting.penalty:
            parts.append(self._ridge(setting.penalty, setting.balance))
        if len(parts) > 1:
            sizes = [self._margin(*part) for part in parts]
            a, b = (sum(x / size for x, size in zip(xs, sizes, strict=True)) for xs in zip(*parts, strict=True))
            parts = [(SHARPNESS / 2 * a, SHARPNESS / 2 * b)]
        return self._linear(*parts[0])

    def _ridge(self, penalty: float, balance: float) -> tuple[F64, F64]:
        weights = self.share ** (1 - balance)
        weights = weights / weights.sum()
        middle = weights @ self.centers
        c = self.centers - middle
        diagonal = self.values + penalty
        # (D + Cᵀ Π C)⁻¹ Cᵀ Π = D⁻¹ Cᵀ (Π⁻¹ + C D⁻¹ Cᵀ)⁻¹, K x K instead of h x h
        inner = np.diag(1 / weights) + (c / diagonal) @ c.T
        a = SHARPNESS * np.linalg.solve(inner, c / diagonal).T
        return a, SHARPNESS * weights - middle @ a

    def _margin(self, a: F64, b: F64) -> float:
        """By how much the score of a class exceeds that of the others at its mean, on average."""
        z = self.centers @ a + b
        own = np.diag(z)
        rest = (z.sum(axis=1) - own) / max(len(z) - 1, 1)
        return max(float(np.mean(own - rest)), 1e-9)

    def step(self, linear: Linear, residual: F64, cells: float) -> Linear:
        """One step of logistic regression from `linear`, by R over all groups: (h + 1, K), the last row without z."""
        at = self.at
        a = self.axes.T @ (linear.coefficients[:, at] * self.scale[:, None])
        b = linear.intercept[at] + self.mean @ linear.coefficients[:, at]
        constant = residual[-1, at] / cells
        r = (
            self.axes.T @ ((residual[:-1, at] / cells - np.outer(self.mean, constant)) / self.scale[:, None])
            - DECAY * a
        )
        diagonal = CURVATURE * self.values + DECAY  # with the means of classes by Woodbury's identity
        inner = np.diag(1 / (CURVATURE * self.share)) + (self.centers / diagonal) @ self.centers.T
        r = r / diagonal[:, None]
        r -= (self.centers / diagonal).T @ np.linalg.solve(inner, self.centers @ r)
        return self._linear(a + r, b + constant / (2 * CURVATURE))

    def typicality(self) -> Linear:
        """(d(x, μ) - d(x, m_k)) / d(m_k, μ) for every class."""
        a = self._whitened(REFERENCE)
        distance = np.maximum((self.centers.T * a).sum(axis=0), 1e-9)  # of m_k from μ
        return self._linear(2 * a / distance, -np.ones(len(distance)))

    def _whitened(self, shrinkage: float) -> F64:
        spread = (1 - shrinkage) * self.values + shrinkage * self.level
        whitened: F64 = (self.centers / spread).T
        return whitened

    def _linear(self, a: F64, b: F64) -> Linear:
        """From the axes of W back to x, and to all classes."""
        own = (self.axes @ a) / self.scale[:, None]
        coefficients, intercept = np.zeros((len(own), self.classes)), np.full(self.classes, -np.inf)
        coefficients[:, self.at], intercept[self.at] = own, b - self.mean @ own
        return Linear(coefficients, intercept)


def residuals(linear: Linear, means: F64, labels: I64, cells: I64, within: F64) -> F64:
    """R at `linear` over groups of cells with these means and this variance within them, (h + 1, K)."""
    there = np.isfinite(linear.intercept)
    z = linear.scores(means)
    scatter = np.square(linear.coefficients[:, there]).T @ within
    z = z / np.sqrt(1 + np.pi / 8 * 2 * float(scatter.mean()))
    p = np.exp(z - z.max(axis=1, keepdims=True, initial=-np.inf))
    p /= p.sum(axis=1, keepdims=True)
    apart = (np.eye(len(there))[labels] - p) * cells[:, None]
    found: F64 = np.vstack([means.T @ apart, apart.sum(axis=0)])
    return found


def choose_columns(counts: F64, sums: F64, columns: int) -> I64:
    """The columns whose class means differ most; classes count by the root of their cells."""
    there = counts > 0
    weights = np.sqrt(counts[there])
    weights = weights / weights.sum()
    means = sums[there] / counts[there, None]
    between = weights @ (means - weights @ means) ** 2
    columns = min(columns, int(np.count_nonzero(between > 0)))
    return np.sort(np.argsort(-between, kind="stable")[:columns]).astype(np.int64)


def choose_setting(right: Sequence[float], cells: float) -> int:
    """The first setting within one standard error of the best number of right answers."""
    best = max(right)
    share = min(1.0, max(0.0, best / max(cells, 1.0)))
    error = float(np.sqrt(max(cells, 1.0) * share * (1 - share)))
    return next(i for i, count in enumerate(right) if count >= best - error)
