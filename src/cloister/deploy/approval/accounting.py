"""Privacy accounting: what all runs with noise on the same cells reveal together.

A run with noise opens a number of sums with Gaussian noise of z times their sensitivity. Sums of all runs compose:
k_i sums at z_i are as one sum at 1 / √(Σ k_i / z_i²) [DRS22, theorem 2.7 and corollary 3.3], whatever was chosen after
seeing earlier ones. `dp_accounting` computes ε of that sum exactly. Without it (extra `privacy`), Rényi differential
privacy gives an upper bound that is a few per cent higher; the result names which of the two was used.

Units. A run protects single cells, whole donors or whole sites. The total is stated for the smallest unit of all runs.
A run that protects a larger unit counts for a smaller one with half its noise: the larger unit's clipped contribution
changes by at most twice the bound if the smaller unit contributes nothing.

A run of an earlier version, of which only ε is on record, is added linearly.

References
----------
[DRS22] Dong, Roth, Su: Gaussian differential privacy, JRSS B 2022. [CKS20] for the conversion of the Rényi bound.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from cloister.study import Study
from cloister.workflows import pipeline
from cloister.workflows.options import privacy_budget

DELTA = 1e-5  # of the total, unless the site says otherwise
UNITS = ("cell", "donor", "site")
EXACT, BOUND = "dp-accounting", "Rényi bound"


@dataclass(frozen=True)
class Release:
    """Sums with Gaussian noise that one run opens."""

    unit: str  # whom the noise hides, against that unit contributing nothing
    noise: float  # standard deviation divided by what one unit can change
    sums: int

    def __post_init__(self) -> None:
        if self.unit not in UNITS or not 0 < self.noise < math.inf or self.sums < 0:
            raise ValueError(f"not a release with noise: {self}")


@dataclass(frozen=True)
class Total:
    """What all runs spent together."""

    epsilon: float
    delta: float
    unit: str
    runs: int
    accountant: str

    @property
    def protects(self) -> str:
        return f"one {self.unit}, against that {self.unit} contributing nothing, over {self.runs} runs"

    def record(self) -> dict[str, Any]:
        """What a receipt says about it."""
        return {**asdict(self), "protects": self.protects}


def releases_of(study: Study) -> list[Release]:
    """What one run of the study opens with noise."""
    found = (workflow.release(options) for _, workflow, options in pipeline.check_steps(study))
    return [Release(unit, noise, sums) for unit, noise, sums in filter(None, found)]


def compose(releases: Iterable[Release], delta: float = DELTA, earlier: float = 0.0, runs: int = 0) -> Total:
    """ε of all releases together at δ, rounded up to two digits; `earlier` is ε of runs without a record of noise."""
    releases = list(releases)
    unit = min((r.unit for r in releases), key=UNITS.index, default="cell")
    shift = sum(r.sums / (r.noise if r.unit == unit else r.noise / 2) ** 2 for r in releases)
    if not shift:
        return Total(earlier, delta, unit, runs, EXACT)
    one = 1 / math.sqrt(shift)  # noise of the one sum that is as all of them
    try:
        from dp_accounting import get_epsilon_gaussian
    except ImportError:
        return Total(privacy_budget(one, delta, 1) + earlier, delta, unit, runs, BOUND)
    exact = math.ceil(max(0.0, float(get_epsilon_gaussian(one, delta))) * 100) / 100
    return Total(exact + earlier, delta, unit, runs, EXACT)
