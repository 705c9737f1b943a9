"""Rows unmasked: what a principal server can do with the masked rows X̃ = X M that the published mode hands it.

known rows       a few rows X_k and their slots (one client's help, or an outlier that everybody knows) give M by least
                 squares, and M gives every row of everybody
independence     columns that are independent and not Gaussian are found up to sign and scale, without any help, by
                 independent component analysis: rotations and stretches are exactly what it undoes
linking          the leverage x̃ (X̃ᵀX̃)⁻¹ x̃ᵀ of a row does not depend on M, so it names the row in every repeat
two servers      W_i of the principal less R_i of the auxiliary is zero but in the slots of client i
"""

from __future__ import annotations

import numpy as np

from cloister.arrays import F64, I64, U64


def solve_mask(masked: F64, rows: F64) -> F64:
    """M from as many known rows as columns, or more."""
    return np.asarray(np.linalg.lstsq(rows, masked, rcond=None)[0], np.float64)


def unmask(masked: F64, M: F64) -> F64:
    return np.asarray(np.linalg.solve(M.T, masked.T).T, np.float64)


def independent_columns(masked: F64, *, rng: np.random.Generator, steps: int = 300) -> F64:
    """Symmetric FastICA with the tanh contrast [Hyvärinen 1999]; columns in no order, of any sign, of scale one."""
    centred = masked - masked.mean(axis=0)
    u, _, _ = np.linalg.svd(centred, full_matrices=False)
    white = u * np.sqrt(len(masked))
    W = np.linalg.qr(rng.normal(size=(white.shape[1],) * 2))[0]
    for _ in range(steps):
        y = np.tanh(white @ W.T)
        step = y.T @ white / len(white) - (1 - y**2).mean(axis=0)[:, None] * W
        left, _, right = np.linalg.svd(step)
        new = left @ right
        done = np.abs(np.abs(np.sum(new * W, axis=1)) - 1).max() < 1e-7
        W = new
        if done:
            break
    sources: F64 = white @ W.T
    return sources


def matched_columns(columns: F64, truth: F64) -> F64:
    """For every true column, the correlation of the found one that is most like it."""
    n = truth.shape[1]
    best: F64 = np.abs(np.corrcoef(truth.T, columns.T)[:n, n:]).max(axis=1)
    return best


def leverage(rows: F64) -> F64:
    u, s, _ = np.linalg.svd(rows, full_matrices=False)
    scores: F64 = np.square(u[:, s > s.max() * 1e-10]).sum(axis=1)
    return scores


def link(first: F64, second: F64) -> I64:
    """For each row of `first`, the row of `second` that is the same one under another mask."""
    order = np.empty(len(first), np.int64)
    order[np.argsort(leverage(first), kind="stable")] = np.argsort(leverage(second), kind="stable")
    return order


def owned_slots(w: U64, r: U64) -> I64:
    """The slots of the client that sent W to one server and R to the other."""
    return np.flatnonzero((w != r).any(axis=1))
