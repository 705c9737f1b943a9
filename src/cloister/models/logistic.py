"""Multinomial logistic regression from sums over cells, wherever these sums come from.

    f(W, b) = 1/A Σ_i a_i (log Σ_k exp z_ik - z_{i,y_i}) + λ/2 ‖W‖²      z_i = Wᵀ(x_i - μ) + b,  A = Σ_i a_i

The minimum is found by L-BFGS. Its start matrix is the inverse of the true Hessian in the span of a few principal
directions V and of the intercepts, and a multiple of the identity in the rest: expression varies most along few
directions, and without this the number of passes over the cells grows tenfold.

`minimise` is a generator: it yields the points at which it needs sums, and is sent the sums. It never sees a cell. A
party that contributes wrong sums can steer it, so the points are limited: a step at most doubles W, plus one, no W lies
outside the radius √(2 log K / λ) of the minimum, and gradients that no convex loss has raise an error.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import scipy.linalg

from cloister.arrays import F64, I64
from cloister.errors import ParameterError

BLOCK = 1 << 22  # numbers of one intermediate result
CURVATURE_CELLS = 20_000  # of a site; from more, every second, third, ... cell stands for all
BEND_AGAIN = (3, 10, 25)  # steps after which the Hessian is looked at again
MEMORY = 40  # pairs that L-BFGS keeps
SUFFICIENT = 1e-4  # share of the expected decrease that a step must bring
ALIGN_CELLS, ALIGN_SHARE = 10, 0.005  # of a label, to count in `align`
LARGEST = 1e6  # coefficient that a fit may reach
CONCAVE = 1e-6  # cosine of a step and its change of the gradient below which the loss is not convex


@dataclass(frozen=True)
class Rows:
    """Labelled cells of one site."""

    x: Any  # (n, h), CSR or dense
    codes: I64  # (n,)
    weights: F64  # a, (n,)

    def __len__(self) -> int:
        return len(self.codes)

    def blocks(self, width: int) -> Iterator[Rows]:
        """The same cells, some at a time: every sum over cells here is a sum over these."""
        step = max(1, BLOCK // max(1, width))
        for start in range(0, len(self), step):
            at = slice(start, start + step)
            yield Rows(self.x[at], self.codes[at], self.weights[at])

    def every(self, stride: int) -> Rows:
        """Every so many cells, each with the weight of all that it stands for."""
        if stride <= 1:
            return self
        weights = self.weights[::stride]
        return Rows(self.x[::stride], self.codes[::stride], weights * (self.weights.sum() / weights.sum()))


def scores(x: Any, theta: F64, mean: F64) -> F64:
    """z, (n, K), of cells at θ = (W, b), (h + 1, K)."""
    z: F64 = np.asarray(x @ theta[:-1]) + (theta[-1] - mean @ theta[:-1])
    return z


def probabilities(z: F64) -> F64:
    p: F64 = np.exp(z - z.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    return p


def align(z: F64, centers: F64, steps: int = 6) -> F64:
    """Scores of cells from elsewhere, moved so that the labels they get have their usual mean scores.

    Cells that were measured otherwise are shifted along some genes, and so are their scores. The shift is the mean over
    labels of how far the cells that get them are from the label's center; labels and shift are found in turn.
    """
    shift = np.zeros(z.shape[1])
    for _ in range(steps):
        called = np.eye(z.shape[1])[(z - shift).argmax(axis=1)]
        count = called.sum(axis=0)
        often = count >= max(ALIGN_CELLS, ALIGN_SHARE * len(z))
        if not often.any():
            break
        shift = ((called.T @ z)[often] / count[often, None] - centers[often]).mean(axis=0)
    return z - shift


# ---- sums over cells -------------------------------------------------------------------------------------------------


def gradient_sums(rows: Rows, theta: F64, mean: F64) -> tuple[float, F64]:
    """Σ a_i loss_i and Σ a_i (p_i - e_{y_i}) ⊗ (x_i - μ, 1), (h + 1, K), without the penalty."""
    loss, total, residual = 0.0, np.zeros((len(mean), theta.shape[1])), np.zeros(theta.shape[1])
    for part in rows.blocks(theta.shape[1]):
        z, at = scores(part.x, theta, mean), np.arange(len(part))
        top = z.max(axis=1)
        log_sum = top + np.log(np.exp(z - top[:, None]).sum(axis=1))
        loss += float(part.weights @ (log_sum - z[at, part.codes]))
        r = probabilities(z)
        r[at, part.codes] -= 1.0
        r *= part.weights[:, None]
        total += part.x.T @ r
        residual += r.sum(axis=0)
    return loss, np.vstack([total - np.outer(mean, residual), residual])


def curvature_sums(rows: Rows, theta: F64, mean: F64, basis: F64) -> F64:
    """The Hessian without the penalty, in the directions (V, intercept) of every label: upper triangle, flat."""
    K, r = theta.shape[1], basis.shape[1] + 1
    hessian = np.zeros((K * r, K * r))
    shift = mean @ basis
    for part in rows.every(math.ceil(len(rows) / CURVATURE_CELLS)).blocks(K * r):
        p = probabilities(scores(part.x, theta, mean))
        place = np.column_stack([np.asarray(part.x @ basis) - shift, np.ones(len(part))])  # (n, r)
        outer = (np.sqrt(part.weights)[:, None] * p)[:, :, None] * place[:, None, :]  # (n, K, r)
        outer = outer.reshape(len(part), K * r)
        hessian -= outer.T @ outer
        for k in range(K):
            at = slice(k * r, (k + 1) * r)
            hessian[at, at] += (place * (part.weights * p[:, k])[:, None]).T @ place
    return hessian[np.triu_indices(K * r)]


def sketch_sums(rows: Rows, mean: F64, directions: F64) -> F64:
    """Σ a_i (x_i - μ)(x_i - μ)ᵀ Ω, (h, ℓ)."""
    total, place_sum = np.zeros(directions.shape), np.zeros(directions.shape[1])
    shift = mean @ directions
    for part in rows.blocks(directions.shape[1]):
        place = (np.asarray(part.x @ directions) - shift) * part.weights[:, None]
        total += part.x.T @ place
        place_sum += place.sum(axis=0)
    return total - np.outer(mean, place_sum)


# ---- the start matrix ------------------------------------------------------------------------------------------------


def principal_basis(sketch: F64, directions: F64, rank: int) -> F64:
    """V, (h, rank): the strongest directions of a covariance C, from C Ω (Nyström)."""
    small = directions.T @ sketch
    small = (small + small.T) / 2
    shift = 1e-10 * max(float(np.trace(small)), 1e-300)
    factor = np.linalg.cholesky(small + shift * np.eye(len(small)))
    wide = scipy.linalg.solve_triangular(factor, sketch.T, lower=True).T
    left, _, _ = np.linalg.svd(wide, full_matrices=False)
    return np.ascontiguousarray(left[:, :rank])


@dataclass(frozen=True)
class Metric:
    """The start matrix of L-BFGS: solves with the Hessian along `basis` and the intercepts, divides in the rest."""

    basis: F64  # V, (h, r - 1)
    factor: F64  # Cholesky factor of the Hessian with the penalty, (K r, K r)
    rest: F64  # what the rest is divided by, (K,)

    @classmethod
    def of(cls, hessian: F64, basis: F64, labels: int, penalty: float, left_over: float) -> Metric:
        """From the mean Hessian; `left_over` is the mean variance of a direction outside the basis."""
        r = basis.shape[1] + 1
        full = np.zeros((labels * r, labels * r))
        full[np.triu_indices(len(full))] = hessian
        full += np.triu(full, 1).T
        share = np.maximum(np.diag(full).reshape(labels, r)[:, -1], 1e-12)  # mean p(1 - p) of each label
        ridge = np.tile(np.append(np.full(r - 1, penalty), 1e-3 * share.mean()), labels)
        full[np.diag_indices(len(full))] += ridge + 1e-12 * np.diag(full).max()
        return cls(basis, np.linalg.cholesky(full), penalty + share * left_over)

    def solve(self, g: F64) -> F64:
        r, K = self.basis.shape[1] + 1, g.shape[1]
        inside = np.vstack([self.basis.T @ g[:-1], g[-1]])  # (r, K)
        step = scipy.linalg.cho_solve((self.factor, True), inside.T.ravel()).reshape(K, r).T
        outside = (g[:-1] - self.basis @ inside[:-1]) / self.rest
        return np.vstack([self.basis @ step[:-1] + outside, step[-1]])


# ---- L-BFGS ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ask:
    """A point at which sums over cells are needed."""

    theta: F64
    curvature: bool  # else loss and gradient


@dataclass
class Memory:
    """Steps and changes of the gradient without the penalty, so that they serve under another penalty too."""

    steps: list[F64] = field(default_factory=list)
    changes: list[F64] = field(default_factory=list)

    def add(self, step: F64, change: F64) -> None:
        product = float((step * change).sum())
        if product < -CONCAVE * float(np.linalg.norm(step)) * float(np.linalg.norm(change)):
            raise ParameterError("the gradients of two points are those of no convex loss: a site sent other sums")
        if product >= 0.0:  # below 0 only by rounding
            self.steps, self.changes = [*self.steps, step][-MEMORY:], [*self.changes, change][-MEMORY:]

    def direction(self, g: F64, metric: Metric, ridge: F64) -> F64:
        """-H g by the two loops of L-BFGS."""
        q, pairs = g.copy(), []
        for s, change in zip(reversed(self.steps), reversed(self.changes), strict=True):
            y = change + ridge * s
            rho = 1.0 / max(float((s * y).sum()), 1e-300)
            alpha = rho * float((s * q).sum())
            q -= alpha * y
            pairs.append((s, y, rho, alpha))
        scale = 1.0
        if pairs:
            s, y, _, _ = pairs[0]
            scale = float((s * y).sum()) / max(float((metric.solve(y) * y).sum()), 1e-300)
        q = scale * metric.solve(q)
        for s, y, rho, alpha in reversed(pairs):
            q += (alpha - rho * float((y * q).sum())) * s
        return -q


@dataclass(frozen=True)
class Problem:
    """What is minimised, as far as it is public."""

    penalty: float  # λ
    total: float  # A
    basis: F64  # V
    left_over: float  # mean variance outside V


def minimise(
    problem: Problem, theta: F64, memory: Memory, *, most: int, tolerance: float
) -> Generator[Ask, Any, tuple[F64, bool]]:
    """Minimise f from θ; returns the last point, and whether the next step would be below `tolerance` everywhere.

    Is sent `curvature_sums` or `gradient_sums` of all cells for each `Ask`, at most `most` of them. The Hessian is
    asked for at the start, and again after so many steps as `BEND_AGAIN` says.
    """
    K = theta.shape[1]
    ridge = np.full((len(theta), 1), problem.penalty)
    ridge[-1] = 0.0

    def look(at: F64) -> Generator[Ask, Any, tuple[float, F64]]:
        loss, g = yield Ask(at, curvature=False)
        return loss / problem.total, g / problem.total

    def bend(at: F64) -> Generator[Ask, Any, Metric]:
        hessian = yield Ask(at, curvature=True)
        return Metric.of(hessian / problem.total, problem.basis, K, problem.penalty, problem.left_over)

    def value(loss: float, at: F64) -> float:
        return loss + problem.penalty / 2 * float((at[:-1] ** 2).sum())

    radius = math.sqrt(2 * math.log(max(K, 2)) / problem.penalty)  # λ/2 ‖W‖² <= f(0) = log K at the minimum
    metric = yield from bend(theta)
    loss, g = yield from look(theta)
    asked, steps = 2, 0
    while asked < most:
        if steps in BEND_AGAIN and asked + 1 < most:
            metric, asked = (yield from bend(theta)), asked + 1
        full = g + ridge * theta
        d = memory.direction(full, metric, ridge)
        if float(np.abs(d).max()) <= tolerance:
            return theta, True
        slope, length, f = float((d * full).sum()), trusted_length(theta, d, radius), value(loss, theta)
        while True:
            point = theta + length * d
            check_point(point)
            loss_there, g_there = yield from look(point)
            asked += 1
            f_there = value(loss_there, point)
            if f_there <= f + SUFFICIENT * length * slope + 1e-12 * abs(f):
                break
            if asked >= most:
                return theta, False
            bent = f_there - f - length * slope
            length *= min(0.5, max(0.1, -length * slope / (2 * bent) if bent > 0 else 0.5))
        memory.add(point - theta, g_there - g)
        theta, loss, g, steps = point, loss_there, g_there, steps + 1
    return theta, False


def trusted_length(theta: F64, d: F64, radius: float) -> float:
    """How far along d the next point may lie: W at most doubles, plus one, and stays within the radius."""
    norm, size = (float(np.linalg.norm(x[:-1])) for x in (d, theta))
    if norm == 0.0:
        return 1.0
    along = float((d[:-1] * theta[:-1]).sum())
    inside = max(radius**2 - size**2, 0.0)
    edge = (-along + math.sqrt(along**2 + norm**2 * inside)) / norm**2  # ‖W + edge d‖ = radius
    return min(1.0, (1 + size) / norm, max(edge, 1e-3))


def check_point(theta: F64) -> None:
    if not np.all(np.abs(theta) <= LARGEST):  # NaN is not below anything
        raise ParameterError("the fit diverged: a coefficient is not a number, or too large; use a larger penalty")


def minimise_here(
    rows: Rows, mean: F64, problem: Problem, theta: F64, memory: Memory, *, most: int, tolerance: float
) -> tuple[F64, bool]:
    """`minimise` over cells that are all here."""
    work = minimise(problem, theta, memory, most=most, tolerance=tolerance)
    answer: Any = None
    while True:
        try:
            ask = work.send(answer)
        except StopIteration as end:
            fit: tuple[F64, bool] = end.value
            return fit
        if ask.curvature:
            answer = curvature_sums(rows, ask.theta, mean, problem.basis)
        else:
            answer = gradient_sums(rows, ask.theta, mean)
