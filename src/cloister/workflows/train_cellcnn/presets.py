"""The settings of the paper's experiments, for as many sites, classes and donors as there are."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, TypeVar

import numpy as np

from cloister.disclosure import Rows
from cloister.session import Session
from cloister.workflows.train_cellcnn import pooled_counts


class Drawn(Protocol):
    """The options that a preset sets, and those that it follows."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def preset(self) -> str | None: ...
    @property
    def batch(self) -> int: ...
    @property
    def n_local(self) -> int: ...


T = TypeVar("T", bound=Drawn)


@dataclass(frozen=True)
class Preset:
    """[SAV22] supplementary note 3; the rates are ours, chosen on the clear twin."""

    n_cells: int
    n_inputs: int  # per class over all sites, or per donor
    per: str
    batch: int  # over all sites
    interval: float
    epochs: int

    def steps(self, batch: int, classes: int, donors: int) -> int:
        """So many epochs over the inputs of all sites, at that batch over all sites."""
        inputs = self.n_inputs * (donors if self.per == "donor" else classes)
        return -(-inputs // batch) * self.epochs


PRESETS = {
    "cmv": Preset(200, 2000, "class", 200, 3.0, 20),
    "aml": Preset(200, 1000, "class", 200, 3.0, 20),
    "rrms-class": Preset(100, 15000, "class", 64, 1.0, 30),
    "rrms-donor": Preset(2000, 10, "donor", 64, 1.0, 30),
}


def settled(options: T, sites: int, classes: int, donors: int = 0) -> T:
    """The options with the preset's values for so many sites, classes, and donors to train on.

    Local iterations are batches whose gradients a site adds up before it sends them: one batch of as many inputs.
    """
    local = options.n_local
    if options.preset is None:
        return replace(options, batch=local * (options.batch or max(1, 200 // sites)), n_local=1)
    p = PRESETS[options.preset]
    batch = local * (options.batch or max(1, p.batch // sites))
    total = local * (options.batch * sites or p.batch)
    n_inputs = p.n_inputs if p.per == "donor" else max(1, p.n_inputs // sites)  # fewer of a class at each of more sites
    drawn: dict[str, Any] = {"n_cells": p.n_cells, "per": p.per, "n_inputs": n_inputs, "interval": p.interval}
    return replace(options, **drawn, batch=batch, n_local=1, n_steps=p.steps(total, classes, donors))


def settle(session: Session, options: T, classes: int, donors: Rows | None) -> T:
    """`settled`, with all sites' donors counted by a secure sum where the preset needs it; a coordinator has none."""
    total = 0
    if options.preset is not None and PRESETS[options.preset].per == "donor":
        params = pooled_counts.Params(session.sites, session.coordinator, (1,), "donors to train on, of all sites")
        if donors is None:
            (total,) = session.run(pooled_counts.coordinator, params).tolist()
        else:
            (total,) = session.run(pooled_counts.site, params, donors.whole(np.array([donors.n]))).tolist()
    return settled(options, len(session.sites), classes, total)
