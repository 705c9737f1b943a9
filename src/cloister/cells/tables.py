"""AnnData in and out: what a site brings, and what it takes away. No cryptography, no network.

Matrices stay as they are: sparse ones are never made dense, and one on disk is read in blocks of bounded size, along
the axis in which it is stored, or with `chunks` by cells. Results go to `adata.obs`, receipts to `adata.uns["cloister"]`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from cloister.arrays import F64, U64, Array
from cloister.cells.files import layer_names, open_cells, read_cells, write_cells
from cloister.cells.genes import check_unique, gene_id_kind, gene_names, genes_in_common, match_genes
from cloister.errors import DataError

if TYPE_CHECKING:
    from anndata import AnnData

__all__ = [
    "Rows",
    "Survey",
    "attach_receipt",
    "check_cells",
    "chunks",
    "describe",
    "donors",
    "embedding",
    "expression_kind",
    "gene_id_kind",
    "gene_names",
    "genes_in_common",
    "layer_names",
    "map_values",
    "match_genes",
    "nonzero_values",
    "open_cells",
    "read_cells",
    "reading_told_to",
    "rows_of",
    "sample_values",
    "survey",
    "write_cells",
    "write_labels",
]

ExpressionKind = Literal["counts", "log", "scaled"]
DENSE_LIMIT = 8 * 10**9  # bytes of a matrix that `embedding` is willing to make dense
LOG_LIMIT = 30.0  # log2 of any count stays below; larger fractions are on a linear scale
_BLOCK = 2**24  # matrix entries per block, zeros included
_SAMPLE, _SAMPLE_BLOCKS = 2**18, 16  # the same for a sample, and how many of them
_TELL = 0.5  # seconds between two words about how far a pass over the cells has come

Mapping = Callable[[F64, U64], npt.ArrayLike]  # non-zero values and their places row · n_vars + column → new values
_listener: ContextVar[Callable[[str], None] | None] = ContextVar("listener", default=None)


@contextmanager
def reading_told_to(listener: Callable[[str], None]) -> Iterator[None]:
    """Have a listener hear how far a pass over cells on disk has come, in this thread."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


@dataclass(frozen=True)
class Survey:
    """What one pass over all values says about them."""

    nonzero: int
    whole: bool  # all are whole numbers
    finite: bool
    smallest: float  # of the finite non-zero values; 0 if there are none
    largest: float

    @property
    def kind(self) -> ExpressionKind:
        return "scaled" if self.smallest < 0 else "counts" if self.whole else "log"


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
        _check_labels(adata, label_key)
    if use_rep not in (None, "X"):
        embedding(adata, use_rep)
        return None
    if need_names:
        check_unique(adata.var_names, "Gene names")
    where, seen = _where(layer), survey(adata, layer)
    if not seen.finite:
        raise DataError(_not_finite(where))
    if not allow_negative and seen.smallest < 0:
        raise DataError(
            f"{where} has negative values; expected counts or log values. "
            "Pass the layer that holds them, or undo the scaling."
        )
    return seen


def survey(adata: AnnData, layer: str | None = None) -> Survey:
    """Look at every value once; of a file, what was seen is kept as long as the file stays as it is."""
    matrix, kept = _matrix(adata, layer), _kept_surveys(adata)
    if layer in kept:
        return kept[layer]
    nonzero, whole, finite, low, high = 0, True, True, np.inf, -np.inf
    for _, block in _blocks(matrix, _where(layer)):
        values = _stored(block)
        values = values[values != 0]
        nonzero += values.size
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            finite, values = False, values[np.isfinite(values)]
        if values.size:
            low, high = min(low, float(values.min())), max(high, float(values.max()))
            whole = whole and (values.dtype.kind != "f" or bool((values == np.rint(values)).all()))
    seen = Survey(nonzero, whole, finite, low if nonzero else 0.0, high if nonzero else 0.0)
    kept[layer] = seen
    return seen


def _kept_surveys(adata: AnnData) -> dict[str | None, Survey]:
    origin = getattr(adata, "origin", None)
    return {} if origin is None else origin.surveys


def expression_kind(adata: AnnData, layer: str | None = None) -> ExpressionKind:
    """Tell raw counts (whole numbers) from log values (fractions) and scaled values (some negative).

    Looks at a bounded sample of the cells. Fractions on a linear scale, such as CP10k without a logarithm,
    are called `log` here, and `describe` warns of them.
    """
    if (seen := _kept_surveys(adata).get(layer)) is not None:
        return seen.kind
    whole = True
    for _, block in _blocks(_matrix(adata, layer), _where(layer), entries=_SAMPLE, most=_SAMPLE_BLOCKS):
        values = _stored(block).astype(np.float64)
        values = values[np.isfinite(values)]
        if values.size and values.min() < 0:
            return "scaled"
        whole = whole and bool((values == np.rint(values)).all())
    return "counts" if whole else "log"


def nonzero_values(adata: AnnData, layer: str | None = None) -> Iterator[F64]:
    """Yield the non-zero values, block by block, in no promised order."""
    for _, block in _blocks(_matrix(adata, layer), _where(layer)):
        values = _stored(block)
        yield values[values != 0].astype(np.float64)


def sample_values(adata: AnnData, layer: str | None = None) -> F64:
    """Non-zero values of some cells, evenly spread over all: enough to draw, few enough to hold."""
    blocks = _blocks(_matrix(adata, layer), _where(layer), entries=_SAMPLE, most=_SAMPLE_BLOCKS)
    values = [_stored(block) for _, block in blocks]
    return np.concatenate([v[v != 0].astype(np.float64) for v in values])


def chunks(adata: AnnData, layer: str | None = None, *, entries: int = _BLOCK) -> Iterator[tuple[slice, Any]]:
    """Yield some cells at a time, in their order: which rows, and their values as a CSR matrix.

    Memory is bounded by `entries` (zeros included), wherever the matrix is; one that is stored by gene is turned first.
    """
    from scipy import sparse

    rows = rows_of(adata, layer)
    step = max(1, entries // max(1, rows.shape[1]))
    for start in range(0, rows.shape[0], step):
        part = slice(start, min(start + step, rows.shape[0]))
        yield part, sparse.csr_matrix(rows[part])


def rows_of(adata: AnnData, layer: str | None = None) -> Rows:
    """The matrix of an analysis, to be read by ranges of cells, as often as needed."""
    matrix = _matrix(adata, layer)
    if getattr(matrix, "format", None) == "csc":
        try:
            matrix = (matrix[:] if is_on_disk(matrix) else matrix).tocsr()
        except MemoryError as error:
            raise DataError(
                f"{_where(layer)} is stored by gene and does not fit into memory; write it as a CSR matrix."
            ) from error
    return Rows(matrix, _where(layer))


class Rows:
    """Rows of a matrix in memory or on disk; every range that is read has been checked."""

    def __init__(self, matrix: Any, where: str) -> None:
        self._matrix, self._where, self._clock = matrix, where, _Clock(where)
        self.shape: tuple[int, int] = matrix.shape

    def __getitem__(self, rows: slice) -> Any:
        self._clock.tell(rows.stop or self.shape[0], self.shape[0], again=not rows.start)
        return _read(self._matrix, (rows, slice(None)), self._where)


class _Clock:
    """Says now and then how far a pass has come, and how long the rest will take."""

    def __init__(self, what: str) -> None:
        self._what, self._listener, self._began, self._said = what, _listener.get(), time.monotonic(), 0.0

    def tell(self, done: int, of: int, *, again: bool = False) -> None:
        if self._listener is None:
            return
        now = time.monotonic()
        if again:
            self._began = now
        if now - self._said >= _TELL and now > self._began:
            self._said, share = now, min(done, of) / max(1, of)
            self._listener(f"{self._what} {share:.0%}, {(now - self._began) * (1 - share) / share:.0f} s left")


def map_values(adata: AnnData, fn: Mapping, layer: str | None = None, dtype: npt.DTypeLike = np.float32) -> Any:
    """Apply a function to the non-zero values and leave every zero at zero.

    Parameters
    ----------
    adata, layer
        The cells, and the layer to read instead of `X`.
    fn
        Takes a vector of non-zero values and one of their places (row · n_vars + column), and returns a vector of the
        same length. It is called once per block, so it must not depend on what else is in the vector.
    dtype
        Type of the result, wide enough for what `fn` returns.

    Returns
    -------
    A matrix of the same shape and storage (dense, CSR or CSC), with zeros stored where they were. Of a sparse matrix on
    disk, one whose values are computed when they are read or written.
    """
    from scipy import sparse

    matrix = _matrix(adata, layer)
    rows, columns = np.arange(matrix.shape[0]), np.arange(matrix.shape[1])
    if _is_sparse(matrix) and is_on_disk(matrix):
        from cloister.cells.stored import mapped_layer

        return mapped_layer(matrix, fn, dtype)
    if not _is_sparse(matrix):
        dense = np.zeros(matrix.shape, dtype)
        for part, block in _blocks(matrix, _where(layer)):
            dense[part] = map_block(block, fn, dtype, rows[part[0]], columns, matrix.shape[1])
        return dense
    blocks = [
        map_block(block, fn, dtype, rows[part[0]], columns[part[1]], matrix.shape[1])
        for part, block in _blocks(matrix, _where(layer))
    ]
    return (sparse.hstack if matrix.format == "csc" else sparse.vstack)(blocks, format=matrix.format)


def map_block(block: Any, fn: Mapping, dtype: npt.DTypeLike, rows: Array, columns: Array, width: int) -> Any:
    """`fn` of the non-zero values of a block that holds these rows and columns of a matrix of that width."""
    sparse = _is_sparse(block)
    if sparse:
        block.sum_duplicates()
    values = block.data if sparse else np.asarray(block)
    out, keep = np.zeros(values.shape, dtype), values != 0
    if sparse:
        major = np.repeat(np.arange(len(block.indptr) - 1), np.diff(block.indptr))
        r, c = (major, block.indices) if block.format == "csr" else (block.indices, major)
        r, c = r[keep], c[keep]
    else:
        r, c = np.nonzero(keep)
    if len(r):
        at = rows[r].astype(np.uint64) * np.uint64(width) + columns[c].astype(np.uint64)
        out[keep] = fn(values[keep].astype(np.float64), at)
    return type(block)((out, block.indices, block.indptr), shape=block.shape) if sparse else out


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
        seen = survey(adata)
        kind, zeros = seen.kind, 1 - seen.nonzero / (adata.n_obs * adata.n_vars)
        if not seen.finite:
            warnings.append("adata.X has missing or infinite values")
        if kind == "scaled":
            warnings.append("adata.X has negative values, so it holds neither counts nor log values")
        if kind == "log" and seen.largest > LOG_LIMIT:
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
        "backed": bool(adata.isbacked) or is_on_disk(X),
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
    for name, column in (("labels", labels), ("shares", shares)):
        if column is not None and np.shape(column) != (adata.n_obs,):
            raise DataError(f"Expected {adata.n_obs} {name}, one per cell, found shape {np.shape(column)}.")
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
    if (origin := getattr(adata, "origin", None)) is not None:
        origin.check_unchanged()
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
    return getattr(matrix, "format", None) in ("csr", "csc")  # scipy's, and those of anndata on disk


def is_on_disk(matrix: Any) -> bool:
    """Whether a matrix is a dataset of h5py or zarr, or anndata's sparse one of these."""
    dense = type(matrix).__module__.partition(".")[0] in ("h5py", "zarr")
    return (dense and hasattr(matrix, "shape")) or (_is_sparse(matrix) and hasattr(matrix, "group"))


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
    clock = _Clock(where)
    for start in starts.tolist():
        cut = slice(start, min(start + step, length))
        part = (slice(None), cut) if by_column else (cut, slice(None))
        clock.tell(cut.stop, length)
        yield part, _read(matrix, part, where)


def _read(matrix: Any, part: tuple[slice, slice], where: str) -> Any:
    try:
        block = matrix[part]
        if _is_sparse(block):
            block.check_format(full_check=True)  # a matrix on disk has not been checked on opening
            block.sum_duplicates()
        return block
    except Exception as error:  # as above
        raise DataError(_damaged(where)) from error


def _stored(block: Any) -> np.ndarray:
    return block.data if _is_sparse(block) else np.asarray(block).ravel()


def _check_finite(values: np.ndarray, where: str) -> None:
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        raise DataError(_not_finite(where))


def _not_finite(where: str) -> str:
    return f"{where} has missing or infinite values; fill them or remove these cells or genes."


def _check_labels(adata: AnnData, label_key: str) -> None:
    if label_key not in adata.obs:
        raise DataError(
            f"adata.obs[{label_key!r}] is missing; there is {_names(adata.obs)}. Pass one of these as label_key=."
        )
    if adata.obs[label_key].isna().all():
        raise DataError(f"adata.obs[{label_key!r}] holds no label; at least one cell needs one.")


def donors(adata: AnnData, donor_key: str) -> int:
    """How many persons the cells are of; every cell must say whose it is."""
    if donor_key not in adata.obs:
        raise DataError(f"adata.obs[{donor_key!r}] is missing; there is {_names(adata.obs)}. Pass one as donor_key=.")
    column = adata.obs[donor_key]
    if (unnamed := int(column.isna().sum())) > 0:
        raise DataError(f"adata.obs[{donor_key!r}] names no donor for {unnamed} cells; fill it or remove these cells.")
    return int(column.nunique())


def _n_categories(column: Any) -> int | None:
    return None if column.dtype.kind == "f" else int(column.nunique())


def _names(keys: Any) -> str:
    return ", ".join(repr(str(key)) for key in keys) or "none"
