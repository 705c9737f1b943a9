"""Cells for a model that knows genes which their file lacks: zeros for a few, an error for many."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cloister.cells.genes import LOG, cause_of, current_symbols
from cloister.cells.values import PaddedRows, listed
from cloister.errors import DataError

MISSING_NOTED, MISSING_MOST = 0.05, 0.30  # parts of a model that a file may lack: with a warning, and at most


def fill_missing(
    names: Sequence[str], rows: Any, needed: Sequence[str], weights: Mapping[str, float], what: str = "model"
) -> tuple[tuple[str, ...], Any]:
    """The genes and rows of a file with zeros for genes of a model that it lacks.

    Parameters
    ----------
    names, rows
        Genes of the file, and its values (`values.Rows`).
    needed
        All genes of the model: those with a weight, and those over which cells are normalised.
    weights
        Weight of each gene in the model, for example the sum of its absolute coefficients.
    what
        What the genes belong to, for messages.

    The missing part is the larger of two fractions: of the weight, and of the needed genes. Above `MISSING_NOTED` it is
    logged, above `MISSING_MOST` it is a `DataError`. A human gene that only changed its symbol is not missing.
    """
    here, needed = set(names), list(needed)
    if here.issuperset(needed):
        return tuple(names), rows
    now = {new: old for old, new in zip(names, current_symbols(names), strict=True)}
    renamed = {
        now[new]: old
        for old, new in zip(needed, current_symbols(needed), strict=True)
        if old not in here and new in now and now[new] not in needed
    }
    names = [renamed.get(name, name) for name in names]
    missing = [name for name in needed if name not in set(names)]
    total = sum(abs(w) for w in weights.values()) or 1.0
    share = max(sum(abs(weights.get(name, 0.0)) for name in missing) / total, len(missing) / len(needed))
    text = f"{len(missing)} of the {len(needed)} genes of the {what} are not here ({_some(missing)}), {share:.0%} of it"
    if share > MISSING_MOST:
        cause = cause_of("these cells", {"these cells": names, what: needed})
        raise DataError(f"{text}, more than {MISSING_MOST:.0%}: {cause}. Bring a file with these genes.")
    if share > MISSING_NOTED:
        LOG.warning(f"{text}; they count as not expressed, and results may differ")
    return (*names, *missing), PaddedRows(rows, len(missing)) if missing else rows


def _some(names: Sequence[str], most: int = 5) -> str:
    return listed(names[:most]) + (", ..." if len(names) > most else "")
