"""AnnData in and out: what a site brings, and what it takes away. No cryptography, no network.

Values are read by `cloister.cells.values`, whose names can be had from here too. Results go to `adata.obs`, receipts to
`adata.uns["cloister"]`.
"""

from __future__ import annotations

import json
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any

import numpy as np

from cloister.arrays import F64
from cloister.cells.donors import check_donors, common_range, donor_codes, donors, used_cells
from cloister.cells.files import open_cells, read_cells, write_cells
from cloister.cells.genes import check_unique, gene_id_kind, gene_names, genes_in_common, match_genes
from cloister.cells.labels import check_labels, labels_of, split_label, write_labels
from cloister.cells.values import (
    ExpressionKind,
    Rows,
    Survey,
    blocks,
    chunks,
    expression_kind,
    is_on_disk,
    is_sparse,
    layer_names,
    listed,
    loaded,
    map_values,
    matrix_of,
    nonzero_values,
    not_finite,
    rows_of,
    sample_values,
    survey,
    where_is,
    x_of,
)
from cloister.errors import DataError

if TYPE_CHECKING:
    from anndata import AnnData

__all__ = [
    "ExpressionKind",
    "Rows",
    "Survey",
    "attach_receipt",
    "check_cells",
    "check_donors",
    "chunks",
    "common_range",
    "describe",
    "donor_codes",
    "donors",
    "embedding",
    "expression_kind",
    "gene_id_kind",
    "gene_names",
    "genes_in_common",
    "is_on_disk",
    "labels_of",
    "layer_names",
    "loaded",
    "map_values",
    "match_genes",
    "nonzero_values",
    "open_cells",
    "places",
    "read_cells",
    "rows_of",
    "sample_values",
    "split_label",
    "survey",
    "used_cells",
    "write_cells",
    "write_labels",
]

DENSE_LIMIT = 8 * 10**9  # bytes of a matrix that `embedding` is willing to make dense
MOST_GROUPS = 30  # values of a column that `describe` lists
LOG_LIMIT = 30.0  # log2 of any count stays below; larger fractions are on a linear scale


def check_cells(
    adata: AnnData,
    *,
    layer: str | None = None,
    use_rep: str | None = None,
    label_key: str | None = None,
    need_names: bool = True,
    allow_negative: bool = False,
) -> Survey | None:
    """Raise a `DataError` unless the cells are fit for an analysis; returns what all their values have in common.

    Parameters
    ----------
    adata
        Cells; the names of cells need not be unique.
    layer
        The layer that will be used instead of `X`.
    use_rep
        The key of `adata.obsm` that will be used; then neither `X` nor the gene names are looked at.
    label_key
        A column of `adata.obs` that must hold at least one label.
    need_names
        Gene names have to be unique, because they are matched with those of other sites.
    allow_negative
        Accept negative values, as in scaled expression, cytometry or other measurements.
    """
    if 0 in adata.shape:
        raise DataError(f"Expected cells and genes, found {adata.n_obs} cells and {adata.n_vars} genes.")
    if label_key is not None:
        check_labels(adata, label_key)
    if use_rep not in (None, "X"):
        embedding(adata, use_rep)
        return None
    if need_names:
        check_unique(adata.var_names, "Gene names")
    where, seen = where_is(layer), survey(adata, layer)
    if not seen.finite:
        raise DataError(not_finite(where))
    if not allow_negative and seen.smallest < 0:
        raise DataError(
            f"{where} has negative values; expected counts or log values. "
            "Pass the layer that holds them, or undo the scaling."
        )
    return seen


def how_to_embed(adata: AnnData, use_rep: str) -> str:
    """What to do about an embedding that is missing."""
    if "X_integrated" in adata.obsm and use_rep == "X_shared_pca":
        return "Pass use_rep='X_integrated', or run shared-pca."
    own = " X_pca from scanpy is a different space at every site." if "X_pca" in adata.obsm else ""
    return f"Run shared-pca, which makes one space for all sites, or name such a space with use_rep=.{own}"


def embedding(adata: AnnData, use_rep: str | None) -> F64:
    """Return one dense row per cell: `adata.obsm[use_rep]`, or `X` for `None`.

    Returns
    -------
    Array of shape (n_cells, n_dims), without missing values; never a view of the data.
    """
    if use_rep in (None, "X"):
        matrix, where = matrix_of(adata, None), "adata.X"
        if matrix.shape[0] * matrix.shape[1] * 8 > DENSE_LIMIT:
            raise DataError(
                f"adata.X with {adata.n_obs} cells x {adata.n_vars} genes is too large to be made dense; "
                "reduce it to some components in adata.obsm and pass use_rep=."
            )
        dense = np.empty(matrix.shape)
        for part, block in blocks(matrix, where):
            dense[part] = block.toarray() if is_sparse(block) else block
    else:
        where = f"adata.obsm[{use_rep!r}]"
        if use_rep not in adata.obsm:
            raise DataError(f"{where} is missing; there is {listed(adata.obsm)}. {how_to_embed(adata, use_rep)}")
        found = adata.obsm[use_rep]
        found = np.asarray(found.toarray() if is_sparse(found) else found)
        if found.ndim != 2 or 0 in found.shape or found.dtype.kind not in "biuf":
            raise DataError(f"{where} must be a table of numbers, one row per cell, found shape {found.shape}.")
        dense = found.astype(np.float64)
    _check_finite(dense, where)
    return dense


def describe(adata: AnnData) -> dict[str, Any]:
    """Say what is in an AnnData, for `cloister check`; plain values that fit into JSON, no cell's value."""
    kind, zeros, warnings = None, None, []
    ids, X = gene_id_kind(adata.var_names), x_of(adata)
    if X is None:
        warnings.append("adata.X is missing")
    elif 0 in adata.shape:
        warnings.append("there are no cells or no genes")
    else:
        seen = survey(adata)
        kind, zeros = seen.kind, 1 - seen.nonzero / (adata.n_obs * adata.n_vars)
        if not seen.finite:
            warnings.append("adata.X has missing or infinite values")
        if kind == "scaled":
            warnings.append("adata.X has negative values, so it holds neither counts nor log values")
        if seen.fractional and kind == "counts":
            warnings.append(
                f"adata.X holds fractions, and {seen.near_whole:.0%} of its values are near whole numbers: taken as"
                " counts (SoupX, alevin, RSEM); add ?kind=log to the file's name if they are not"
            )
        if kind == "log" and seen.largest > LOG_LIMIT:
            warnings.append(
                f"adata.X has fractions above {LOG_LIMIT:g}, so it is on a linear scale, not log values;"
                " if these are corrected counts, add ?kind=counts to the file's name"
            )
    if not adata.var_names.is_unique:
        warnings.append("gene names are not unique")
    if not adata.obs_names.is_unique:
        warnings.append("cell names are not unique")
    if ids == "mixed":
        warnings.append("gene names mix Ensembl ids and symbols")
    if list(adata.var_names) == [str(index) for index in range(adata.n_vars)]:
        warnings.append("genes have numbers instead of names, so their order must be the same at every site")
    return {
        "cells": adata.n_obs,
        "genes": adata.n_vars,
        "sparse": is_sparse(X),
        "backed": bool(adata.isbacked) or is_on_disk(X),
        "gene_ids": ids,
        "expression": kind,
        "zeros": zeros,
        "layers": layer_names(adata),
        "obsm": {key: int(matrix.shape[1]) for key, matrix in adata.obsm.items()},
        "obs": {str(key): _n_categories(adata.obs[key]) for key in adata.obs},
        "groups": {str(key): found for key in adata.obs if (found := _groups(adata.obs[key]))},
        "warnings": warnings,
    }


def attach_receipt(adata: AnnData, key: str, receipt_json: str) -> None:
    """Store a receipt as one JSON string under `adata.uns["cloister"][key]`."""
    try:
        json.loads(receipt_json)
    except ValueError as error:
        raise DataError(f"The receipt for {key!r} is not JSON; make it anew.") from error
    if not isinstance(adata.uns.setdefault("cloister", {}), MutableMapping):
        raise DataError("adata.uns['cloister'] is taken by something else; rename or remove it.")
    adata.uns["cloister"][key] = receipt_json


def places(adata: Any) -> set[str]:
    """Where an AnnData holds something, by name: what is new after a run is the result that was written."""
    found: set[str] = set()
    for slot in ("obs", "var", "obsm", "layers", "uns"):
        keys = {str(k) for k in getattr(adata, slot, ()) if k is not None} - {"cloister"}  # None: X, since anndata 0.13
        found |= {f"{slot}[{k!r}]" for k in keys}
    kept = getattr(adata, "uns", {}).get("cloister", {})
    return found | {f"uns['cloister'][{k!r}]" for k in (kept if isinstance(kept, MutableMapping) else ())}


def _check_finite(values: np.ndarray, where: str) -> None:
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        raise DataError(not_finite(where))


def _groups(column: Any) -> dict[str, int]:
    """Values of a column and their cells, where a column has few of them: names of donors, conditions or types."""
    if column.dtype.kind == "f" or not 0 < (n := int(column.nunique())) <= MOST_GROUPS or n == len(column) > 1:
        return {}
    return {str(name): int(cells) for name, cells in column.value_counts().items() if cells}


def _n_categories(column: Any) -> int | None:
    return None if column.dtype.kind == "f" else int(column.nunique())
