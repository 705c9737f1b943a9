"""Columns matched by name: every site brings the same ones, in any order."""

from __future__ import annotations

import numpy as np

from cloister.arrays import I64
from cloister.cells import genes
from cloister.errors import DataError


def match_columns(names: list[str], common: tuple[str, ...]) -> I64:
    """Where the common columns stand here; a column that some site lacks is an error that names it."""
    missing = sorted({genes.plain_name(n) for n in names} - set(common))
    if missing:
        listed = ", ".join(f"'{n}'" for n in missing[:5]) + (", ..." if len(missing) > 5 else "")
        raise DataError(
            f"{len(missing)} of {len(names)} columns are not at every site ({listed}); "
            "drop or rename them, so that all sites have the same columns"
        )
    return genes.match_genes(list(names), list(common)).astype(np.int64)
