"""Figures of `choose-genes`: in how many batches the chosen genes are among the first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cloister.report.figures import COLOURS, Figure, canvas
from cloister.session import Outcome


def figures(outcomes: Mapping[str, Outcome], options: Any) -> list[Figure]:
    result = next((o.result for o in outcomes.values() if "chosen_by_batches" in o.result), None)
    return [] if result is None else [by_batches(result)]


def by_batches(result: Mapping[str, Any]) -> Figure:
    """Chosen genes by the number of batches that rank them high."""
    counts = {int(k): int(n) for k, n in result["chosen_by_batches"].items()}
    with canvas() as c:
        c.axis.bar(list(counts), list(counts.values()), color=COLOURS[0])
        c.axis.set(xlabel="batches that rank the gene high", ylabel="chosen genes")
        c.axis.xaxis.get_major_locator().set_params(integer=True)
        every = counts.get(result["batches"], 0)
        alt = f"{result['chosen']:,} chosen genes; {every:,} of them rank high in all {result['batches']} batches."
        return c.done("Chosen genes by batches", alt)
