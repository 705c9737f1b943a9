"""Embed cells with a pretrained encoder, at one site, without talking to anybody."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from cloister.cells import tables as cells
from cloister.cells.spaces import digest_of, edges_of
from cloister.cells.values import matrix_of
from cloister.errors import DataError, ParameterError
from cloister.workflows.saved_models.gene_tokens import csr_rows, gene_tokens

if TYPE_CHECKING:
    from anndata import AnnData

    from cloister.models.scgpt import ScGPT
    from cloister.workflows.saved_models.fine_tuned import FineTuned

CHUNK = 4096  # cells that are tokens at a time


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
    pretrained: str | Path | None = None,
    key_added: str = "X_scGPT",
    copy: bool = False,
) -> AnnData | None:
    """Embed cells with an scGPT-compatible encoder. Nothing leaves the site.

    Parameters
    ----------
    adata
        Counts or log values; only their order within a cell matters. Genes are matched by exact symbol.
    model
        A folder with an official checkpoint (`args.json`, `vocab.json`, `best_model.pt`), or a loaded `ScGPT`. Or the
        file of a model of `fine-tune`: cells get what its last layer sees, genes and bins are those of its training.
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
    pretrained
        The folder of the checkpoint that a fine-tuned scGPT stands on.

    Returns
    -------
    `None`, or a copy if `copy=True`, with a unit vector per cell in `adata.obsm[key_added]` (float32), and in
    `adata.uns[key_added]` what made them: sites with one checkpoint and the same options share a space.
    """
    if binning not in ("cell", "none") or batch_size < 1:
        raise ParameterError(f"binning must be 'cell' or 'none', batch_size above 0: found {binning!r}, {batch_size}")
    adata = adata.copy() if copy else adata
    if isinstance(model, str | Path) and Path(model).is_file():
        write_features(adata, load_tuned(model, pretrained), key_added)
        return adata if copy else None
    cells.check_cells(adata, layer=layer, need_names=gene_key is None)
    encoder = load_encoder(model, allow_random=allow_random)
    ids = gene_tokens(adata, gene_key, encoder)
    tokens: dict[str, Any] = {"binned": binning == "none", "seed": seed}
    tokens["cls_value"] = encoder.config.pad_value if cls_value is None else cls_value
    adata.obsm[key_added] = vectors(adata, layer, encoder, ids, tokens, batch_size, device)
    adata.uns[key_added] = origin_of(adata, encoder, ids, tokens)
    return adata if copy else None


def load_encoder(model: str | Path | ScGPT, *, allow_random: bool) -> ScGPT:
    from cloister.models import scgpt

    encoder = model if isinstance(model, scgpt.ScGPT) else scgpt.ScGPT.load(model)
    if not encoder.trained and not allow_random:
        raise ParameterError(
            "this encoder has random weights, and its embeddings look plausible and mean little; load a checkpoint, or "
            "pass allow_random=True"
        )
    return encoder


def origin_of(adata: AnnData, encoder: ScGPT, ids: Any, tokens: dict[str, Any]) -> dict[str, Any]:
    """What made an embedding: checkpoint, options, and their digest."""
    binning, cls_value, seed = "none" if tokens["binned"] else "cell", tokens["cls_value"], tokens["seed"]
    space = digest_of(encoder.digest, binning, edges_of(adata) if tokens["binned"] else "", cls_value, seed)
    told = {"digest": encoder.digest, "space": space, "trained": encoder.trained, "genes_known": int((ids >= 0).sum())}
    return told | {"genes": adata.n_vars, "binning": binning, "cls_value": cls_value, "seed": seed}


def vectors(
    adata: AnnData, layer: str | None, model: ScGPT, ids: Any, tokens: dict[str, Any], batch_size: int, device: Any
) -> Any:
    """One vector per cell; only some cells are tokens at a time."""
    from cloister.models import scgpt

    matrix = matrix_of(adata, layer)
    parts = []
    for start in range(0, adata.n_obs, CHUNK):
        names = [str(name) for name in adata.obs_names[start : start + CHUNK]]
        some = scgpt.tokenize(csr_rows(matrix[start : start + CHUNK]), ids, names, model, **tokens)
        parts.append(scgpt.encode(model, some, batch_size=batch_size, device=device))
    return np.concatenate(parts)


def load_tuned(path: str | Path, pretrained: str | Path | None) -> FineTuned:
    from cloister.workflows.saved_models import load_model
    from cloister.workflows.saved_models.fine_tuned import FineTuned

    tuned = load_model(path, pretrained)
    if not isinstance(tuned, FineTuned):
        raise DataError(f"{path} is a linear classifier, which has no features; embed with a model of fine-tune")
    return tuned


def write_features(adata: AnnData, tuned: FineTuned, key: str) -> None:
    """What the last layer sees of every cell, and which model that was."""
    adata.obsm[key] = tuned.features(adata).astype(np.float32)
    adata.uns[key] = {"space": tuned.digest}
