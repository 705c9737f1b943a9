"""Sums per label as they were: labels counted over all sites together, every site adds whatever cells it has."""

from __future__ import annotations

import numpy as np


def score_sums(z, codes, labels):
    """L10 of `pooled_logistic`: Σ of the K scores of each label's cells, (K, K)."""
    sums = np.zeros((labels, z.shape[1]))
    np.add.at(sums, codes, z)
    return sums


def kept_labels(counts, min_label_cells=5):
    """L4: labels with enough cells over all sites."""
    return np.flatnonzero(counts >= min_label_cells)


def second_moments(x):
    """Second moments without a threshold for single entries."""
    return x.T @ x


def label_sums(x, codes, labels, fraction_bits=40):
    """Sums of expression per label with all their digits."""
    return np.rint(score_sums(x, codes, labels) * 2.0**fraction_bits) / 2.0**fraction_bits


def quarter_sums(x, codes, labels):
    """Sums of expression per label, rounded to 1/4."""
    return np.rint(score_sums(x, codes, labels) * 4) / 4


def typicality_counts(typical, grid, step, offset):
    """L6 of `pooled_discriminant`: right answers below each typicality, to multiples of `step`."""
    counts = np.searchsorted(np.sort(typical), grid, side="left")
    return (counts + offset) // step * step
