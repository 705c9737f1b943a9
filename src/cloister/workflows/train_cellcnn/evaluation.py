"""How good an opened CellCnn is on held-out donors: tables of right and wrong answers, pooled by a secure sum.

Multi-cell inputs are drawn from held-out donors as in training; a donor is represented by the mean of all its cells. A
site contributes the row of a class only if it holds out enough donors of that class (`disclosure`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np

from cloister.arrays import F64, I64, Array, Bits
from cloister.disclosure import Contribution, Rows, Thresholds
from cloister.models import cellcnn
from cloister.session import Session
from cloister.workflows.train_cellcnn import pooled_counts

KINDS = ("inputs", "donors")


@dataclass(frozen=True)
class Held:
    """What a site held out, in prepared units: multi-cell inputs, a mean per donor, and the classes of both."""

    inputs: F64  # (n, m)
    labels: I64
    donors: F64  # (d, m)
    donor_labels: I64
    rows: Rows  # one per donor, with its number of cells
    groups: tuple[F64, I64, Contribution | None] | None = None  # means of donor groups, classes, means as they are sent

    @classmethod
    def of(
        cls, x: F64, names: Array, y: I64, drawn: Mapping[str, Any], thresholds: Thresholds, rng: np.random.Generator
    ) -> Held:
        inputs, labels = cellcnn.draw_inputs(x, names, y, **drawn, rng=rng)
        donors = np.unique(names)
        means = np.stack([x[names == d].mean(axis=0) for d in donors])
        rows = donor_rows(names, thresholds)
        return cls(inputs, labels, means, np.array([int(y[names == d][0]) for d in donors]), rows)

    def batch(self, config: cellcnn.Config, rng: np.random.Generator) -> tuple[F64 | Contribution, F64]:
        """As many inputs to validate on as a batch has: the number is public, whatever a site has."""
        if self.groups is None:
            at = rng.choice(len(self.inputs), config.batch)
            return self.inputs[at], cellcnn.one_hot(self.labels[at], config.classes)
        means, labels, part = self.groups
        at = np.resize(rng.permutation(len(means)), config.batch)
        return means[at] if part is None else part.map(itemgetter(at)), cellcnn.one_hot(labels[at], config.classes)


def donor_rows(names: Array, thresholds: Thresholds) -> Rows:
    """One row per donor, in the order of `np.unique`, that stands for its cells; `names` has the donor of each cell."""
    donors, cells = np.unique(names, return_counts=True)
    return Rows(len(donors), np.arange(len(donors)), thresholds, cells=cells.astype(np.int64))


def held_out(donors: Mapping[str, str], count: int, rng: np.random.Generator) -> list[str]:
    """Donors of each class that a site keeps for validation."""
    chosen: list[str] = []
    for label in sorted(set(donors.values())) if count else []:
        chosen += rng.permutation(sorted(d for d, c in donors.items() if c == label))[:count].tolist()
    return chosen


def table_of(truth: I64, found: I64, classes: int) -> I64:
    """How often an input of the class of the row was taken for that of the column."""
    table = np.zeros((classes, classes), np.int64)
    np.add.at(table, (truth, found), 1)
    return table


def tables_of(made: Sequence[cellcnn.Model], held: Held) -> I64:
    """(models, inputs and donors, o, o)."""
    o = made[0].config.classes
    pairs = ((held.inputs, held.labels), (held.donors, held.donor_labels))
    return np.stack([[table_of(y, cellcnn.predict(m.logits(x)), o) for x, y in pairs] for m in made])


def contribution_of(made: Sequence[cellcnn.Model], held: Held) -> Contribution:
    """The same as a contribution: the row of a class that too few held-out donors here have is zero."""
    rows = np.moveaxis(tables_of(made, held), 2, 0)
    part = held.rows.grouped(held.donor_labels, made[0].config.classes, rows)
    return part.map(lambda rows: np.moveaxis(rows, 0, 2))


def pooled_tables(session: Session, made: Sequence[cellcnn.Model], held: Held | None) -> I64:
    """The tables of every model over all sites' held-out inputs and donors; `held` is None at the coordinator."""
    o = made[0].config.classes
    what = f"right and wrong answers of {len(made)} models on held-out inputs and donors"
    params = pooled_counts.Params(session.sites, session.coordinator, (len(made), len(KINDS), o, o), what)
    if held is None:
        return np.asarray(session.run(pooled_counts.coordinator, params))
    return np.asarray(session.run(pooled_counts.site, params, contribution_of(made, held)))


def scores(table: I64, positive: int) -> dict[str, float]:
    """Accuracy, precision, recall and F: of the positive class of two, averaged over the classes of several."""
    right, said, truly = np.diag(table), table.sum(axis=0), table.sum(axis=1)
    precision, recall = right / np.maximum(said, 1), right / np.maximum(truly, 1)
    f = 2 * right / np.maximum(said + truly, 1)
    at: Bits = np.arange(len(table)) == positive if len(table) == 2 else truly > 0
    mean = {"precision": precision[at], "recall": recall[at], "f_score": f[at]}
    accuracy = float(right.sum() / max(1, int(table.sum())))
    return {"accuracy": accuracy} | {name: float(v.mean()) if v.size else 0.0 for name, v in mean.items()}


def judged(tables: I64, classes: Sequence[str], positive: str) -> dict[str, Any]:
    """The results of one model, (inputs and donors, o, o): scores, and both tables in words."""
    k = list(classes).index(positive)
    rows = [{"held_out": kind, "count": int(t.sum())} | scores(t, k) for kind, t in zip(KINDS, tables, strict=True)]
    made: dict[str, Any] = {"validation": rows}
    for kind, table in zip(KINDS, tables, strict=True):
        made[f"confusion_of_{kind}"] = [
            {"truth": label} | {f"predicted {c}": int(n) for c, n in zip(classes, counts, strict=True)}
            for label, counts in zip(classes, table, strict=True)
        ]
    return made
