"""Values of donors of which none dominates a column: the largest part that one donor has in the sum of squares.

A threshold on numbers of donors says how many are in a sum, not how much of the sum is one of them: the mean of three
donors of whom one lies at 1000 is a third of 1000. So a site first moves values that are far from all others.
"""

from __future__ import annotations

import numpy as np

from cloister.arrays import F64
from cloister.disclosure import SLACK

INSIDE = 1e-4  # part by which a value that is moved stays inside its bound
ROUNDS = 200  # of moving the largest value of each column
LARGEST = 1e100  # so that squares are finite
RANK = 1e-9  # spread of a column, in its largest value, that is rounding


def shares_of(x: F64) -> F64:
    """Part of each row in the sum of squares of each column around its mean."""
    d = np.square(x - x.mean(axis=0))
    made: F64 = d / np.maximum(d.sum(axis=0), 1e-300)
    return made


def bounded_columns(x: F64, least: int) -> F64:
    """The columns with values moved towards the others, so that no row has more than 1 / least of the squares.

    The place to which a value moves is the bound that the others give, on its side of their mean; it does not depend on
    how far the value was. A column in which fewer than `least` rows differ from the rest becomes constant.
    """
    x = np.clip(x.astype(np.float64), -LARGEST, LARGEST)
    n, part = len(x), (1 - INSIDE) / least
    if least == 1 or n < 2 or not x.size:
        return x
    q = (n - 1) / n
    todo = np.arange(x.shape[1])
    for _ in range(ROUNDS):
        some = x[:, todo]
        shares = shares_of(some)
        worst = shares.argmax(axis=0)
        at = np.arange(len(todo))
        small = np.ptp(some, axis=0) <= RANK * np.abs(some).max(axis=0)
        over = (shares[worst, at] * least > 1 + SLACK) & ~small
        todo, worst, some = todo[over], worst[over], some[:, over]
        if not len(todo):
            break
        at = np.arange(len(todo))
        value, others = some[worst, at], some.copy()
        others[worst, at] = 0.0  # sums without it, for it may be so large that nothing else is left of them
        mean = others.sum(axis=0) / (n - 1)
        apart = others - mean
        apart[worst, at] = 0.0
        rest = np.square(apart).sum(axis=0)
        reach = np.sqrt(rest * part / (q * (q - part)))
        x[worst, todo] = mean + np.copysign(reach, value - mean)
    else:
        x[:, todo] = np.median(x[:, todo], axis=0)
    flat = np.ptp(x, axis=0) <= RANK * np.abs(x).max(axis=0)
    x[:, flat] = np.median(x[:, flat], axis=0)
    return x
