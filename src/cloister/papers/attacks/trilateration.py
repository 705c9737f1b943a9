"""References rebuilt from distances: what the coordinator of a plain mapping can do with what it is shown.

A reference r whose squared distances d_j to the queries q_j are known satisfies, with the first of them subtracted,

    2 (q_j - q_1) · r = |q_j|² - |q_1|² - d_j + d_1

which is linear in r: as soon as r is near enough to more queries than it has dimensions, it is found exactly.

Who gets labels and no distances (the querier of the other modes) can only say that references of a label lie among its
own cells that were given that label: `among_labels` guesses one for each of them. `hits` counts what any guess found.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cloister.arrays import F64, I64


@dataclass(frozen=True)
class View:
    """What one party holds: queries, and for each the numbers of some references and values said to be distances²."""

    queries: F64  # (m, d)
    rows: I64  # (m, k), -1 where there is none
    distances: F64  # (m, k)


def rebuild(view: View) -> dict[int, F64]:
    """Guess every reference that occurs with more queries than there are dimensions."""
    q = view.queries
    placed: dict[int, F64] = {}
    for number in np.unique(view.rows[view.rows >= 0]):
        at, column = np.nonzero(view.rows == number)
        if len(at) <= q.shape[1]:
            continue
        d = view.distances[at, column]
        points = q[at]
        left = 2 * (points[1:] - points[0])
        right = (points[1:] ** 2).sum(1) - (points[0] ** 2).sum() - d[1:] + d[0]
        guess, _, rank, _ = np.linalg.lstsq(left, right, rcond=None)
        if rank == q.shape[1]:
            placed[int(number)] = guess
    return placed


def rebuilt(view: View, truth: F64, within: float) -> int:
    """How many references the guesses hit, each coordinate to within `within`."""
    return sum(bool(np.abs(guess - truth[number]).max() <= within) for number, guess in rebuild(view).items())


def among_labels(queries: F64, labels: I64, neighbours: int = 10) -> F64:
    """A guess per query, from labels alone: the mean of the nearest queries that were given the same label."""
    from scipy.spatial import cKDTree

    guess = queries.copy()
    for label in np.unique(labels):
        mine = queries[labels == label]
        _, near = cKDTree(mine).query(mine, k=range(1, min(neighbours, len(mine)) + 1))
        guess[labels == label] = mine[near].mean(axis=1)
    return guess


def hits(guesses: F64, truth: F64, within: float) -> int:
    """How many references some guess hits, each coordinate to within `within`."""
    from scipy.spatial import cKDTree

    return int((cKDTree(guesses).query(truth, p=np.inf)[0] <= within).sum())
