"""The path of L-BFGS as it was: no limit on a step, and pairs with s·y < 0 left out without a word."""

from __future__ import annotations

import numpy as np

from cloister.models.logistic import MEMORY, SUFFICIENT, Ask, Metric
from cloister.models.logistic import Memory as NewMemory


class Memory(NewMemory):
    def add(self, step, change):
        if float((step * change).sum()) >= 0.0:
            self.steps, self.changes = [*self.steps, step][-MEMORY:], [*self.changes, change][-MEMORY:]


def minimise(problem, theta, memory, *, most, tolerance):
    K = theta.shape[1]
    ridge = np.full((len(theta), 1), problem.penalty)
    ridge[-1] = 0.0

    def value(loss, at):
        return loss + problem.penalty / 2 * float((at[:-1] ** 2).sum())

    hessian = yield Ask(theta, curvature=True)
    metric = Metric.of(hessian / problem.total, problem.basis, K, problem.penalty, problem.left_over)
    loss, g = yield Ask(theta, curvature=False)
    loss, g = loss / problem.total, g / problem.total
    for _ in range(most):
        full = g + ridge * theta
        d = memory.direction(full, metric, ridge)
        if float(np.abs(d).max()) <= tolerance:
            return theta, True
        slope, f = float((d * full).sum()), value(loss, theta)
        point = theta + d
        loss_there, g_there = yield Ask(point, curvature=False)
        loss_there, g_there = loss_there / problem.total, g_there / problem.total
        assert value(loss_there, point) <= f + SUFFICIENT * slope + 1e-12 * abs(f)
        memory.add(point - theta, g_there - g)
        theta, loss, g = point, loss_there, g_there
    return theta, False
