"""Cells added up by sample: counts of all cells of one donor and type, read some cells at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cloister.arrays import F64, I64
from cloister.cells.values import chunks

if TYPE_CHECKING:
    from anndata import AnnData


def add_up(adata: AnnData, codes: I64, n: int, layer: str | None = None) -> F64:
    """Sums over the cells of each code, (n, genes); cells of code -1 belong nowhere.

    Memory is that of the result and of one chunk of cells, wherever the matrix is.
    """
    from scipy import sparse

    total = np.zeros((n, adata.n_vars))
    for part, block in chunks(adata, layer):
        of = codes[part]
        cells = np.flatnonzero(of >= 0)
        which = sparse.csr_matrix((np.ones(len(cells)), (of[cells], cells)), shape=(n, len(of)))
        added = (which @ block.astype(np.float64)).tocoo()
        total[added.row, added.col] += added.data  # each place once
    return np.rint(total)  # fractional counts (SoupX, alevin, RSEM) are rounded once, as sums
