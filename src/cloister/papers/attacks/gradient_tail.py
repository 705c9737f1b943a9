"""One malicious site reads training cells of other sites from the updates of a network (attack G1).

A linear layer's gradient for one cell is δ·x: its direction is the cell. The attacker drives the hidden units of the
first layer to states at which the others' update of a unit comes mostly from one cell, and subtracts its own part from
every opened sum. Each unit has a direction along which few cells lie, found from the attacker's own cells, and its bias
falls from round to round, so that the unit comes to the tail of its activation for one cell after the other.

`Attacker.wanted` is the state that it wants next. How far it gets is up to the training that it attacks (`Step`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from cloister.arrays import F64

Step = Callable[[F64, F64, int], tuple[F64, F64]]  # state, wanted state, round → what the others added, next state


@dataclass(frozen=True)
class Attacker:
    """Knows the network's layout, its first weights, and cells of its own."""

    first: F64  # (P,), w_0: first layer's weights (h, d), its biases (h,), then the rest
    hidden: int  # h
    inputs: int  # d
    own: F64  # (n, d), the attacker's cells
    scale: float = 1.0  # length of a unit's weights
    fall: float = 3.0  # of a unit's bias in a round
    seed: int = 0

    def directions(self) -> F64:
        """(h, d): along each, one of the attacker's cells lies far out and the others behind the origin."""
        rng = np.random.default_rng(self.seed)
        X, d = self.own, self.inputs
        A = X.T @ X + 1e-2 * np.trace(X.T @ X) / d * np.eye(d)
        lone = X[rng.choice(len(X), self.hidden, replace=len(X) < self.hidden)]
        W = np.linalg.solve(A, (len(X) / 4 * lone - X.sum(axis=0)).T).T
        return np.asarray(W / np.linalg.norm(W, axis=1, keepdims=True))

    def wanted(self, t: int, directions: F64) -> F64:
        """The θ that the attacker wants after round t."""
        theta = np.zeros(len(self.first))
        h, d = self.hidden, self.inputs
        theta[: h * d] = (self.scale * directions).ravel() - self.first[: h * d]
        theta[h * d : h * d + h] = -self.fall * (t + 1)
        return theta


def readings(attacker: Attacker, step: Step, rounds: int) -> F64:
    """(rounds, h, d): what the others' updates of every hidden unit's weights are in every round."""
    theta, directions, seen = np.zeros(len(attacker.first)), attacker.directions(), []
    for t in range(rounds):
        others, theta = step(theta, attacker.wanted(t, directions), t)
        seen.append(others[: attacker.hidden * attacker.inputs].reshape(attacker.hidden, attacker.inputs))
    return np.array(seen)


def read_cells(seen: F64, cells: F64, own: F64, level: float) -> tuple[int, int]:
    """How many of the cells (n, d) a reading resembles with a cosine above the level, sign aside.

    The second number counts those that resemble none of the attacker's own cells as much. Readings are those of every
    round, and their means over all rounds.
    """
    rounds = [seen.reshape(-1, seen.shape[-1]), seen.mean(axis=0)]
    found = resemblance(np.concatenate(rounds), cells) > level
    return int(found.sum()), int((found & (resemblance(own, cells) <= level)).sum())


def resemblance(vectors: F64, cells: F64) -> F64:
    """(n,): the largest cosine of every cell with one of the vectors, sign aside."""
    length = np.linalg.norm(vectors, axis=1)
    unit = cells / np.linalg.norm(cells, axis=1, keepdims=True)
    vectors = vectors[length > 0] / length[length > 0][:, None]
    best = np.zeros(len(cells))
    for start in range(0, len(vectors), 4096):
        best = np.maximum(best, np.abs(vectors[start : start + 4096] @ unit.T).max(axis=0))
    return best
