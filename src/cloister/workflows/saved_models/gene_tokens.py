"""Genes as tokens of an scGPT checkpoint, and cells as sparse rows: what `embed` and a fine-tuned model share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from cloister.errors import DataError

if TYPE_CHECKING:
    from anndata import AnnData

    from cloister.models.scgpt import ScGPT

LEAST_SHARE = 0.05  # of the genes that the vocabulary has to know


def gene_tokens(adata: AnnData, gene_key: str | None, model: ScGPT) -> Any:
    """The token of every gene, -1 where the vocabulary does not know it."""
    if gene_key is not None and gene_key not in adata.var:
        raise DataError(f"adata.var[{gene_key!r}] is missing; pass the column with gene symbols as gene_key=")
    names = adata.var_names if gene_key is None else adata.var[gene_key]
    ids = np.array([model.vocab.get(str(name), -1) for name in names], dtype=np.int64)
    known = ids[ids >= 0]
    if len(known) < max(1, LEAST_SHARE * len(ids)):
        raise DataError(
            f"the checkpoint's vocabulary knows {len(known)} of {len(ids)} genes; it names genes by symbol as in "
            f"'CD3E': pass gene_key= with the column of adata.var that holds symbols"
        )
    if len(np.unique(known)) < len(known):
        raise DataError("two columns carry the same gene symbol; merge them or keep one of each")
    return ids


def csr_rows(block: Any) -> Any:
    """Sparse rows without duplicates."""
    from scipy import sparse

    rows = sparse.csr_matrix(block)
    rows.sum_duplicates()
    return rows
