"""How often each value occurs, as long as few different ones do: counts are some hundred whole numbers.

tally = Tally()
tally.add(values)                          of one block after the other
tally.table                                every value once, and how often; None where too many are different
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from cloister.arrays import F64, I64, Array

MOST = 1 << 16  # different values that are kept; whole numbers below are counted without sorting
PROBE = 4 * MOST  # values of a block that are looked at first


class Table(NamedTuple):
    values: F64  # rising
    times: I64  # how often each occurs


def distinct(values: Array) -> Table:
    """Finite values in rising order, each once, and how often it occurs."""
    if (table := _small_whole_numbers(values)) is not None:
        return table
    found, often = np.unique(values, return_counts=True)
    return Table(found.astype(np.float64), often)


def _small_whole_numbers(values: Array) -> Table | None:
    """The same without sorting, if all are whole and below `MOST`."""
    if not values.size or values.min() < 0 or values.max() >= MOST:
        return None
    whole = values.astype(np.uint16)
    if not (whole == values).all():
        return None
    times = np.bincount(whole)
    at = np.flatnonzero(times)
    return Table(at.astype(np.float64), times[at])


class Tally:
    def __init__(self) -> None:
        self.table: Table | None = Table(np.empty(0), np.empty(0, np.int64))

    def add(self, values: Array) -> Array:
        """Count these; returns them, each once as long as few are different."""
        if self.table is None:
            return values
        new = _small_whole_numbers(values)
        if new is None and len(np.unique(values[:PROBE])) <= MOST:  # many need not all be sorted to be told
            new = distinct(values)
        if new is None:
            self.table = None
            return values
        found, at = np.unique(np.concatenate([self.table.values, new.values]), return_inverse=True)
        times = np.zeros(len(found), np.int64)
        np.add.at(times, at, np.concatenate([self.table.times, new.times]))
        self.table = Table(found, times) if len(found) <= MOST else None
        return new.values
