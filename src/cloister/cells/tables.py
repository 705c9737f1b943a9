"""AnnData in and out: what a site brings, and what it takes away. No cryptography, no network.

Matrices stay as they are: sparse ones are never made dense, and a backed one is read in blocks of bounded
size, along the axis in which it is stored. Results go to `adata.obs`, receipts to `adata.uns["cloister"]`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from cloister.arrays import F64, Array
from cloister.cells.files import layer_names, read_cells, write_cells
from cloister.cells.genes import check_unique, gene_id_kind, gene_names, genes_in_common, match_genes
from cloister.errors import DataError

if TYPE_CHECKING:
    from anndata import AnnData

__all__ = [
    "attach_receipt",
    "check_cells",
    "describe",
    "embedding",
    "expression_kind",
    "gene_id_kind",
    "gene_names",
    "genes_in_common",
    "layer_names",
    "map_values",
    "match_genes",
    "nonzero_values",
    "read_cells",
    "write_cells",
    "write_labels",
]

ExpressionKind = Literal["counts", "log", "scaled"]
DENSE_LIMIT = 8 * 10**9  # bytes of a matrix that `embedding` is willing to make dense
LOG_LIMIT = 30.0  # log2 of any count stays below; larger fractions are on a linear scale
_BLOCK = 2**24  # matrix entries per block, zeros included
_SAMPLE, _SAMPLE_BLOCKS = 2**18, 16  # the same for a sample, and how many of them


def check_cells(
    adata: AnnData,
    *,
    layer: str | None = None,
    use_rep: str | None = None,
    label_key: str | None = None,
    need_names: bool = True,
    allow_negative: bool = False,
) -> None:
    """Raise a `DataError` unless the cells are fit for an analysis.

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
        _check_labels(adata, label_key)
    if use_rep not in (None, "X"):
        embedding(adata, use_rep)
        return
    if need_names:
        check_unique(adata.var_names, "Gene names")
    where = _where(layer)
    for _, block in _blocks(_matrix(adata, layer), where):
        values = _stored(block)
        _check_finite(values, where)
        if not allow_negative and values.size and values.min() < 0:
            raise DataError(
                f"{where} has negative values; expected counts or log values. "
                "Pass the layer that holds them, or undo the scaling."
            )


def expression_kind(adata: AnnData, layer: str | None = None) -> ExpressionKind:
    """Tell raw counts (whole numbers) from log values (fractions) and scaled values (some negative).

    Looks at a bounded sample of the cells. Fractions on a linear scale, such as CP10k without a logarithm,
    are called `log` here, and `describe` warns of them.
    """
    kind, _ = _kind_and_largest(adata, layer)
    return kind


def nonzero_values(adata: AnnData, layer: str | None = None) -> Iterator[F64]:
    """Yield the non-zero values, block by block, in no promised order."""
    for _, block in _blocks(_matrix(adata, layer), _where(layer)):
        values = _stored(block)
        yield values[values != 0].astype(np.float64)


def map_values(
    adata: AnnData,
    fn: Callable[[F64], npt.ArrayLike],
    layer: str | None = None,
    dtype: npt.DTypeLike = np.float32,
) -> Any:
    """Apply a function to the non-zero values and leave every zero at zero.

    Parameters
    ----------
    adata, layer
        The cells, and the layer to read instead of `X`.
    fn
        Takes a vector of non-zero values and returns one of the same length. It is called once per block.
    dtype
        Type of the result, wide enough for what `fn` returns.

    Returns
    -------
    A matrix in memory, of the same shape and storage (dense, CSR or CSC), with zeros stored where they were.
    """
    from scipy import sparse

    def mapped(values: np.ndarray) -> np.ndarray:
        out, keep = np.zeros(values.shape, dtype), values != 0
        if keep.any():
            out[keep] = fn(values[keep].astype(np.float64))
        return out

    matrix = _matrix(adata, layer)
    if not _is_sparse(matrix):
        dense = np.zeros(matrix.shape, dtype)
        for part, block in _blocks(matrix, _where(layer)):
            dense[part] = mapped(np.asarray(block))
        return dense
    blocks = []
    for _, block in _blocks(matrix, _where(layer)):
        blocks.append(type(block)((mapped(block.data), block.indices, block.indptr), shape=block.shape))
    return (sparse.hstack if matrix.format == "csc" else sparse.vstack)(blocks, format=matrix.format)


def embedding(adata: AnnData, use_rep: str | None) -> F64:
    """Return one dense row per cell: `adata.obsm[use_rep]`, or `X` for `None`.

    Returns
    -------
    Array of shape (n_cells, n_dims), without missing values; never a view of the data.
    """
    if use_rep in (None, "X"):
        matrix, where = _matrix(adata, None), "adata.X"
        if matrix.shape[0] * matrix.shape[1] * 8 > DENSE_LIMIT:
            raise DataError(
                f"adata.X with {adata.n_obs} cells x {adata.n_vars} genes is too large to be made dense; "
                "reduce it to some components in adata.obsm and pass use_rep=."
            )
        dense = np.empty(matrix.shape)
        for part, block in _blocks(matrix, where):
            dense[part] = block.toarray() if _is_sparse(block) else block
    else:
        where = f"adata.obsm[{use_rep!r}]"
        if use_rep not in adata.obsm:
            raise DataError(
                f"{where} is missing; there is {_names(adata.obsm)}. Compute it (the workflow shared-pca makes one"
                " space for all sites), or name another with use_rep=."
            )
        found = adata.obsm[use_rep]
        found = np.asarray(found.toarray() if _is_sparse(found) else found)
        if found.ndim != 2 or 0 in found.shape or found.dtype.kind not in "biuf":
            raise DataError(f"{where} must be a table of numbers, one row per cell, found shape {found.shape}.")
        dense = found.astype(np.float64)
    _check_finite(dense, where)
    return dense


def describe(adata: AnnData) -> dict[str, Any]:
    """Say what is in an AnnData, for `cloister check`; plain values that fit into JSON, no cell's value."""
    kind, zeros, warnings = None, None, []
    ids, X = gene_id_kind(adata.var_names), _x(adata)
    if X is None:
        warnings.append("adata.X is missing")
    elif 0 in adata.shape:
        warnings.append("there are no cells or no genes")
    else:
        kind, largest = _kind_and_largest(adata, None)
        nonzero, finite = 0, True
        for values in nonzero_values(adata):
            nonzero += values.size
            finite = finite and bool(np.isfinite(values).all())
        zeros = 1 - nonzero / (adata.n_obs * adata.n_vars)
        if not finite:
            warnings.append("adata.X has missing or infinite values")
        if kind == "scaled":
            warnings.append("adata.X has negative values, so it holds neither counts nor log values")
        if kind == "log" and largest > LOG_LIMIT:
            warnings.append(f"adata.X has fractions above {LOG_LIMIT:g}, so it is on a linear scale, not log values")
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
        "sparse": _is_sparse(X),
        "backed": bool(adata.isbacked),
        "gene_ids": ids,
        "expression": kind,
        "zeros": zeros,
        "layers": layer_names(adata),
        "obsm": {key: int(matrix.shape[1]) for key, matrix in adata.obsm.items()},
        "obs": {str(key): _n_categories(adata.obs[key]) for key in adata.obs},
        "warnings": warnings,
    }


def write_labels(
    adata: AnnData,
    key_added: str,
    labels: Sequence[str | None] | Array,
    share: npt.ArrayLike | None = None,
    *,
    share_name: str = "share",
) -> None:
    """Write one label per cell to `adata.obs[key_added]`, missing ones as `None` or NaN.

    `share`, how sure the label is, goes to `adata.obs[f"{key_added}_{share_name}"]`.
    """
    import pandas as pd

    shares = None if share is None else np.asarray(share, dtype=np.float64)
    for name, column in (("labels", np.asarray(labels, dtype=object)), ("shares", shares)):
        if column is not None and column.shape != (adata.n_obs,):
            raise DataError(f"Expected {adata.n_obs} {name}, one per cell, found shape {column.shape}.")
    adata.obs[key_added] = pd.Categorical(labels)
    if shares is not None:
        adata.obs[f"{key_added}_{share_name}"] = shares


def attach_receipt(adata: AnnData, key: str, receipt_json: str) -> None:
    """Store a receipt as one JSON string under `adata.uns["cloister"][key]`."""
    try:
        json.loads(receipt_json)
    except ValueError as error:
        raise DataError(f"The receipt for {key!r} is not JSON; make it anew.") from error
    if not isinstance(adata.uns.setdefault("cloister", {}), MutableMapping):
        raise DataError("adata.uns['cloister'] is taken by something else; rename or remove it.")
    adata.uns["cloister"][key] = receipt_json


def _where(layer: str | None) -> str:
    return "adata.X" if layer is None else f"adata.layers[{layer!r}]"


def _matrix(adata: AnnData, layer: str | None) -> Any:
    if layer is not None and layer not in adata.layers:
        raise DataError(f"{_where(layer)} is missing; there is {_names(layer_names(adata))}. Name another with layer=.")
    matrix = _x(adata) if layer is None else adata.layers[layer]
    if matrix is None:
        raise DataError("adata.X is missing; put the expression there, or pass layer=.")
    if matrix.dtype.kind not in "biuf":
        raise DataError(f"{_where(layer)} must hold numbers, found {matrix.dtype}.")
    return matrix


def _x(adata: AnnData) -> Any:
    try:
        if adata.isbacked:  # its arrays are opened only when asked for
            _ = adata.X.dtype, adata.X.shape
        return adata.X
    except Exception as error:  # on a damaged file the libraries raise anything
        raise DataError(_damaged("adata.X")) from error


def _damaged(where: str) -> str:
    return f"{where} cannot be read: it is damaged or its file is gone; copy the file or write it again."


def _is_sparse(matrix: Any) -> bool:
    return getattr(matrix, "format", None) in ("csr", "csc")  # scipy's, and the backed ones of anndata


def _blocks(
    matrix: Any, where: str, *, entries: int = _BLOCK, most: int | None = None
) -> Iterator[tuple[tuple[slice, slice], Any]]:
    """Cut a matrix along the axis in which it is stored; with `most`, only so many blocks, evenly spread."""
    by_column = getattr(matrix, "format", None) == "csc"
    length, width = matrix.shape[::-1] if by_column else matrix.shape
    step = max(1, entries // max(1, width))
    starts = np.arange(0, length, step)
    if most is not None and len(starts) > most:
        starts = starts[np.linspace(0, len(starts) - 1, most).astype(int)]
    for start in starts.tolist():
        cut = slice(start, min(start + step, length))
        part = (slice(None), cut) if by_column else (cut, slice(None))
        try:
            block = matrix[part]
            if _is_sparse(block):
                block.check_format(full_check=True)  # a backed matrix has not been checked on reading
                block.sum_duplicates()
        except Exception as error:  # as above
            raise DataError(_damaged(where)) from error
        yield part, block


def _stored(block: Any) -> np.ndarray:
    return block.data if _is_sparse(block) else np.asarray(block).ravel()


def _kind_and_largest(adata: AnnData, layer: str | None) -> tuple[ExpressionKind, float]:
    whole, largest = True, 0.0
    sample = _blocks(_matrix(adata, layer), _where(layer), entries=_SAMPLE, most=_SAMPLE_BLOCKS)
    for _, block in sample:
        values = _stored(block).astype(np.float64)
        values = values[np.isfinite(values)]
        if values.size == 0:
            continue
        if values.min() < 0:
            return "scaled", largest
        whole = whole and bool((values == np.rint(values)).all())
        largest = max(largest, float(values.max()))
    return ("counts" if whole else "log"), largest


def _check_finite(values: np.ndarray, where: str) -> None:
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        raise DataError(f"{where} has missing or infinite values; fill them or remove these cells or genes.")


def _check_labels(adata: AnnData, label_key: str) -> None:
    if label_key not in adata.obs:
        raise DataError(
            f"adata.obs[{label_key!r}] is missing; there is {_names(adata.obs)}. Pass one of these as label_key=."
        )
    if adata.obs[label_key].isna().all():
        raise DataError(f"adata.obs[{label_key!r}] holds no label; at least one cell needs one.")


def _n_categories(column: Any) -> int | None:
    return None if column.dtype.kind == "f" else int(column.nunique())


def _names(keys: Any) -> str:
    return ", ".join(repr(str(key)) for key in keys) or "none"
