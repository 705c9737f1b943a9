"""One site told from all: what can be said about a single site, from what it sent or from what is opened over all.

read        what a site sent, taken as if nothing protected it; believed only if it can be what it is taken for
subtract    a site takes its own part out of a sum over all sites, and has the sum over the others
compare     whether one site has more of something than another: half of all answers are right by guessing
mine        the same, asked by a site about itself and each other one; it knows what it has, so guessing does better

An update of a classifier tells which labels a site holds: the gradient of row k of its last layer is the mean of
(p_k - y_k)·h over the cells, and h is hardly below zero after ReLU or GELU, so the row rises where k is frequent
[WVM+22]. A gradient Z = XᵀE/n of CellCnn tells what its classes differ by: at small logits E is (1/2 - Y)·σ'(0), so
the difference of two columns is the difference of the class means, up to a factor. An opened CellCnn has gone some
steps along such gradients from public weights: to first order, M - M_0 = -(W_0·W_0ᵀ·Z + Z·V_0ᵀ·V_0) for the sum Z.

References
----------
[WVM+22] Wainakh et al., PoPETs 2022: user-level label leakage from gradients in federated learning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations

import numpy as np

from cloister.arrays import F64, I64, U64
from cloister.models.cellcnn import Weights


def read_counts(words: U64, most: int) -> I64 | None:
    """Words as numbers of values in cells; None if they cannot be."""
    return words.astype(np.int64) if int(words.max(initial=0)) < most else None


def quantiles_of(counts: I64, ends: F64, levels: F64) -> F64:
    """Quantiles of values of which only the cells are known: the upper end of the cell that holds each."""
    rank = levels * max(int(counts.sum()) - 1, 0)
    return np.asarray(ends[1 + np.searchsorted(np.cumsum(counts), rank, side="right").clip(max=len(ends) - 2)])


def subtract(total: F64, cells: int, mine: F64, my_cells: int) -> F64:
    """The mean over everybody else, from the mean over all and one's own."""
    return np.asarray((total * cells - mine * my_cells) / (cells - my_cells))


def label_pull(head: F64) -> F64:
    """How far a site's update pulled each label: sums over the rows of its last layer, (K, h) → (K,)."""
    return np.asarray(head.sum(axis=1))


def class_pull(gradients: F64) -> F64:
    """What the first class has more of than the second: gradients of some steps, (..., steps, m, 2) → (..., m)."""
    return np.asarray((gradients[..., 1] - gradients[..., 0]).sum(axis=-2))


def gradients_in(first: Weights, last: Weights) -> F64:
    """The sum of mean gradients, up to a factor, that led from the first weights of a CellCnn to its last."""
    from scipy.linalg import solve_sylvester

    difference: F64 = solve_sylvester(first.W @ first.W.T, first.V.T @ first.V, first.M - last.M)
    return difference


def numbers_in(sent: Sequence[bytes], count: int, most: int = 1024) -> F64:
    """Read bytes that may be anything as 32-bit numbers, `count` at a time: (readings, count), the first `most`."""
    words = np.frombuffer(b"".join(sent)[: 4 * count * most], "<u4")
    return words[: len(words) // count * count].reshape(-1, count).astype(np.float64)


def compare(guess: Mapping[str, F64], truth: Mapping[str, F64], *, least: float = 0.0) -> float:
    """Share of right answers to "which of two sites has more of it?", over all pairs and entries; ties count half.

    Entries that differ by no more than `least` are not asked about.
    """
    right, asked = 0.0, 0
    for p, q in combinations(sorted(truth), 2):
        guessed, true = np.sign(guess[p] - guess[q]), truth[p] - truth[q]
        there = np.abs(true) > least
        right += float(np.sum(guessed[there] == np.sign(true[there])) + 0.5 * np.sum(guessed[there] == 0))
        asked += int(there.sum())
    return right / max(asked, 1)


def mine(me: str, own: F64, rest: F64, truth: Mapping[str, F64], *, least: float = 0.0) -> float:
    """`compare`, between a site that holds `own` and each other one, of all of which it takes `rest` to be true."""
    others = [p for p in truth if p != me]
    shares = [compare({me: own, p: rest}, {me: truth[me], p: truth[p]}, least=least) for p in others]
    return float(np.mean(shares))
