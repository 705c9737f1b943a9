"""Embed cells with a pretrained encoder, at one site, without talking to anybody."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from cloister.cells import tables as cells
from cloister.errors import DataError, ParameterError

if TYPE_CHECKING:
    from anndata import AnnData

    from cloister.models.scgpt import ScGPT

CHUNK = 4096  # cells that are tokens at a time
LEAST_SHARE = 0.05  # of the genes that the vocabulary has to know


def embed(
    adata: AnnData,
    model: ScGPT | str | Path,
    *,
    layer: str | None = None,
    gene_key: str | None = None,
    binning: Literal["cell", "none"] = "cell",
    cls_value: float | None = None,
    batch_size: int = 64,
    device: str | None = None,
    seed: int = 0,
    allow_random: bool = False,
    key_added: str = "X_scGPT",
    copy: bool = False,
) -> AnnData | None:
    """Embed cells with an scGPT-compatible encoder.

    Nothing leaves the site. Sites that use the same checkpoint and the same options get vectors of one space:
    `adata.uns[key_added]["digest"]` tells.

    Parameters
    ----------
    adata
        Counts or log values; only their order within a cell matters. Genes are matched by exact symbol.
    model
        A folder with an official checkpoint (`args.json`, `vocab.json`, `best_model.pt`), or a loaded `ScGPT`.
    gene_key
        A column of `adata.var` with gene symbols; `adata.var_names` if None.
    binning
        `"cell"`: each cell by its own quantiles, as scGPT was trained. `"none"`: the values are bins already, such as
        `layer="binned"` of `bin-values`.
    cls_value
        The value that goes with <cls>. The checkpoint's padding value if None, as in scGPT's own embedding.
    device
        `"cpu"` or `"cuda"`; the GPU if there is one by default.
    seed
        Of the random spread of ties, together with each cell's name: runs repeat, whatever the order of cells.
    allow_random
        Accept an encoder with random weights.

    Returns
    -------
    `None`, or an annotated copy if `copy=True`. Sets the following fields:

    `adata.obsm[key_added]` : array (n_cells, width) of float32
        One unit vector per cell.
    `adata.uns[key_added]` : :class:`str`
        JSON: digest of the checkpoint, how many genes the vocabulary knew, the options.
    """
    from cloister.models import scgpt

    if binning not in ("cell", "none"):
        raise ParameterError(f"binning must be 'cell' or 'none', found {binning!r}")
    if batch_size < 1:
        raise ParameterError(f"batch_size must be at least 1, found {batch_size}")
    adata = adata.copy() if copy else adata
    cells.check_cells(adata, layer=layer, need_names=gene_key is None)
    loaded = model if isinstance(model, scgpt.ScGPT) else scgpt.ScGPT.load(model)
    if not loaded.trained and not allow_random:
        raise ParameterError(
            "this encoder has random weights, and its embeddings look plausible and mean little; load a checkpoint, or "
            "pass allow_random=True"
        )
    ids = gene_tokens(adata, gene_key, loaded)
    cls_value = loaded.config.pad_value if cls_value is None else cls_value
    tokens = {"binned": binning == "none", "cls_value": cls_value, "seed": seed}
    adata.obsm[key_added] = vectors(adata, layer, loaded, ids, tokens, batch_size, device)
    told = {"digest": loaded.digest, "trained": loaded.trained, "genes_known": int((ids >= 0).sum())}
    told |= {"genes": adata.n_vars, "binning": binning, "cls_value": cls_value, "seed": seed}
    adata.uns[key_added] = json.dumps(told)
    return adata if copy else None


def vectors(
    adata: AnnData, layer: str | None, model: ScGPT, ids: Any, tokens: dict[str, Any], batch_size: int, device: Any
) -> Any:
    """One vector per cell; only some cells are tokens at a time."""
    from cloister.models import scgpt

    matrix = adata.X if layer is None else adata.layers[layer]
    parts = []
    for start in range(0, adata.n_obs, CHUNK):
        names = [str(name) for name in adata.obs_names[start : start + CHUNK]]
        some = scgpt.tokenize(_csr(matrix[start : start + CHUNK]), ids, names, model, **tokens)
        parts.append(scgpt.encode(model, some, batch_size=batch_size, device=device))
    return np.concatenate(parts)


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


def _csr(block: Any) -> Any:
    from scipy import sparse

    rows = sparse.csr_matrix(block)
    rows.sum_duplicates()
    return rows
