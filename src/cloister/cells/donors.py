"""Donors are the persons: who they are is in a column of `obs`, and floors count them, not their cells."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from cloister.arrays import F64, I64
from cloister.cells.values import chunks, listed
from cloister.errors import DataError

if TYPE_CHECKING:
    import pandas as pd
    from anndata import AnnData


def donors(adata: AnnData, donor_key: str) -> int:
    """How many persons the cells are of; every cell must say whose it is."""
    return int(_column(adata, donor_key).nunique())


def donor_codes(adata: AnnData, donor_key: str) -> I64:
    """Whose each cell is: donors numbered from 0."""
    codes, _ = _column(adata, donor_key).factorize()
    return np.asarray(codes, np.int64)


def check_donors(adata: AnnData, donor_key: str | None, least: int) -> None:
    """Raise a `DataError` if the cells are of fewer persons than a sum needs; without a key none are counted."""
    if donor_key is not None and (here := donors(adata, donor_key)) < least:
        raise DataError(
            f"{here} donors, fewer than {least}: sums over so few persons come close to one of them; "
            "leave this site out, or lower min_donors= if all agree"
        )


def used_cells(adata: AnnData, donor_key: str | None) -> str:
    """How many cells, and of how many persons where a column says so, in words."""
    known = donor_key is not None and donor_key in adata.obs
    return f"{adata.n_obs} cells" + (f" of {int(adata.obs[donor_key].nunique())} donors" if known else "")


def common_range(adata: AnnData, donor_key: str, least: int, layer: str | None = None) -> tuple[float, float]:
    """The widest range of non-zero values at whose ends, or beyond them, there are values of `least` donors.

    Values beyond it are those of fewer persons; held to its ends, they tell that there are such values, not which.
    """
    codes = donor_codes(adata, donor_key)
    n = int(codes.max()) + 1
    low: F64 = np.full(n, np.inf)
    high: F64 = np.full(n, -np.inf)
    for rows, block in chunks(adata, layer):
        of = np.repeat(codes[rows], np.diff(block.indptr))
        there = block.data != 0
        values = block.data[there].astype(np.float64)
        np.minimum.at(low, of[there], values)
        np.maximum.at(high, of[there], values)
    if np.count_nonzero(np.isfinite(low)) < least:
        raise DataError(
            f"fewer than {least} donors have a value that is not zero; leave this site out, or lower min_donors="
        )
    return float(np.sort(low)[least - 1]), float(np.sort(high)[-least])


def _column(adata: AnnData, donor_key: str) -> pd.Series:
    if donor_key not in adata.obs:
        raise DataError(f"adata.obs[{donor_key!r}] is missing; there is {listed(adata.obs)}. Pass one as donor_key=.")
    column = adata.obs[donor_key]
    if (unnamed := int(column.isna().sum())) > 0:
        raise DataError(f"adata.obs[{donor_key!r}] names no donor for {unnamed} cells; fill it or remove these cells.")
    return column


def donor_ids(adata: AnnData, of_cell: I64, names: Sequence[str]) -> tuple[str, ...]:
    """A name of each donor that does not depend on which column names donors: the smallest hash of a cell's name.

    It stays the same if a study names another column for the same persons. Donors that share it have their names too.
    """
    smallest = [""] * len(names)
    for cell, k in zip(adata.obs_names, of_cell.tolist(), strict=True):
        digest = hashlib.sha256(str(cell).encode()).hexdigest()
        smallest[k] = min(smallest[k] or digest, digest)
    return tuple(x if smallest.count(x) == 1 else f"{x} {name}" for x, name in zip(smallest, names, strict=True))
