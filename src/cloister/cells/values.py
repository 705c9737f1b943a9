"""The values of cells, wherever they are: read in blocks of bounded size, as often as an analysis needs them.

Matrices stay as they are: sparse ones are never made dense. `blocks` cuts along the axis in which a matrix is stored;
`chunks` gives cells. A matrix on disk (`cloister.cells.stored`) is checked block by block as it is read, and a listener
hears how far a pass has come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

import numpy as np
import numpy.typing as npt

from cloister.arrays import F64, I64, U64, Array
from cloister.cells.progress import Pace
from cloister.errors import DataError
from cloister.mpc.sums.value_counts import Table, Tally

if TYPE_CHECKING:
    from anndata import AnnData

ExpressionKind = Literal["counts", "log", "scaled"]
KIND = "kind"  # in adata.uns["cloister"]: what a site says its values are
_BLOCK = 2**24  # matrix entries per block, zeros included
_STORED = 2**21  # stored entries that are read at a time where only values matter
_SAMPLE, _SAMPLE_BLOCKS = 2**18, 16  # the same for a sample, and how many of them

Mapping = Callable[[F64, U64], npt.ArrayLike]  # non-zero values and their places row · n_vars + column → new values


@dataclass(frozen=True)
class Survey:
    """What one pass over all values says about them."""

    nonzero: int
    whole: bool  # all are whole numbers
    finite: bool
    smallest: float  # of the finite non-zero values; 0 if there are none
    largest: float
    table: Table | None = field(default=None, repr=False, compare=False)  # of all values, if few differ
    single: bool = False  # of a sparse matrix: no place is stored twice, so that values can be read without places
    near_whole: float = 1.0  # fraction of a sample of the non-zero values, see `Fractions`
    fractional: bool = False  # not whole, but counts by the rule of `Fractions`
    declared: ExpressionKind | None = None  # what the site says its values are

    @property
    def kind(self) -> ExpressionKind:
        if self.declared is not None:
            return self.declared
        return "scaled" if self.smallest < 0 else "counts" if self.whole or self.fractional else "log"


class Fractions:
    """Whether values that are not whole are counts all the same, as SoupX, alevin and RSEM give them.

    They are if at least half of a sample of the non-zero values lie within `NEAR` of a whole number of at least 1,
    and if they are not logarithms (base e, 2 or 10) of whole numbers plus 1. Of other fractions (log values, CP10k,
    TPM), about a fifth lie so near.
    """

    NEAR, HALF = 0.1, 0.5
    MOST = 2**18  # values of the sample

    def __init__(self) -> None:
        self.n, self.near, self.tried, self.logs = 0, 0, 0, np.zeros(3, np.int64)

    def add(self, values: Array) -> None:
        """Some non-zero, finite values."""
        values = values[:: max(1, values.size // 2**16)][: max(0, self.MOST - self.n)].astype(np.float64)
        if not values.size:
            return
        whole = np.rint(values)
        self.n += values.size
        self.near += int(np.count_nonzero((np.abs(values - whole) <= self.NEAR) & (whole >= 1)))
        odd = values[(np.abs(values - whole) > 1e-4) & (values > 0) & (values < 9)]
        self.tried += odd.size
        for i, base in enumerate((np.e, 2.0, 10.0)):
            powers = base**odd - 1
            powers = powers[powers < 1000]
            self.logs[i] += np.count_nonzero(np.abs(powers - np.rint(powers)) <= 1e-3)

    @property
    def share(self) -> float:
        return self.near / self.n if self.n else 1.0

    @property
    def counts(self) -> bool:
        return self.share >= self.HALF and not (self.tried and self.logs.max() >= 0.5 * self.tried)


def declare_kind(adata: AnnData, kind: str) -> None:
    """Note in an AnnData what its values are, whatever they look like."""
    if kind not in get_args(ExpressionKind):
        raise DataError(f"kind must be one of {', '.join(get_args(ExpressionKind))}, found {kind!r}")
    adata.uns.setdefault("cloister", {})[KIND] = kind


def declared_kind(adata: AnnData) -> ExpressionKind | None:
    notes = adata.uns.get("cloister", {})
    kind = notes.get(KIND) if hasattr(notes, "get") else None
    return cast(ExpressionKind, kind) if kind in get_args(ExpressionKind) else None


def survey(adata: AnnData, layer: str | None = None) -> Survey:
    """Look at every value once; of a file, what was seen is kept as long as the file stays as it is."""
    matrix = matrix_of(adata, layer)
    kept = _kept_surveys(adata, matrix)
    if layer in kept:
        return kept[layer]
    stored, nonzero, whole, finite, low, high = 0, 0, True, True, np.inf, -np.inf
    tally, fractions = Tally(), Fractions()
    for values in _stored_values(matrix, where_is(layer)):
        stored += values.size
        values = _without_zeros(values)
        nonzero += values.size
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            finite, values = False, values[np.isfinite(values)]
        if values.size:
            if values.dtype.kind == "f":
                fractions.add(values)
            values = tally.add(values)
            low, high = min(low, float(values.min())), max(high, float(values.max()))
            whole = whole and (values.dtype.kind != "f" or bool((values == np.rint(values)).all()))
    single = is_sparse(matrix) and stored == int(pointers(matrix, where_is(layer))[-1])
    ends = (low, high) if nonzero else (0.0, 0.0)
    near, looks = (1.0, False) if whole else (fractions.share, fractions.counts)
    seen = Survey(nonzero, whole, finite, *ends, tally.table, single, near, looks, declared_kind(adata))
    kept[layer] = seen
    return seen


def _kept_surveys(adata: AnnData, matrix: Any) -> dict[str | None, Survey]:
    """What was seen of the matrices of a file; of others, which may change, nothing is kept."""
    origin = getattr(adata, "origin", None)
    own = is_on_disk(matrix) and not hasattr(matrix, "fn")
    return origin.surveys if origin is not None and own else {}


def expression_kind(adata: AnnData, layer: str | None = None) -> ExpressionKind:
    """Tell counts (whole numbers, or fractions by the rule of `Fractions`) from log and scaled values (some negative).

    Looks at a bounded sample of the cells. Fractions on a linear scale, such as CP10k without a logarithm,
    are called `log` here, and `describe` warns of them. A kind that the site declared (`kind=` in the name of its
    file) decides.
    """
    if (declared := declared_kind(adata)) is not None:
        return declared
    matrix = matrix_of(adata, layer)
    if (seen := _kept_surveys(adata, matrix).get(layer)) is not None:
        return seen.kind
    whole, fractions = True, Fractions()
    for _, block in blocks(matrix, where_is(layer), entries=_SAMPLE, most=_SAMPLE_BLOCKS):
        values = _stored(block).astype(np.float64)
        values = values[np.isfinite(values)]
        if values.size and values.min() < 0:
            return "scaled"
        whole = whole and bool((values == np.rint(values)).all())
        fractions.add(values[values != 0])
    return "counts" if whole or fractions.counts else "log"


def nonzero_values(adata: AnnData, layer: str | None = None) -> Iterator[F64]:
    """Yield the non-zero values, some at a time, in no promised order."""
    matrix = matrix_of(adata, layer)
    seen = _kept_surveys(adata, matrix).get(layer)
    for values in _stored_values(matrix, where_is(layer), bare=seen is not None and seen.single):
        yield _without_zeros(values).astype(np.float64)


def sample_values(adata: AnnData, layer: str | None = None) -> F64:
    """Non-zero values of some cells, evenly spread over all: enough to draw, few enough to hold."""
    some = blocks(matrix_of(adata, layer), where_is(layer), entries=_SAMPLE, most=_SAMPLE_BLOCKS)
    values = [_stored(block) for _, block in some]
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


def loaded(adata: AnnData, layer: str | None = None) -> Any:
    """The whole matrix of an analysis, in memory."""
    matrix = matrix_of(adata, layer)
    return matrix[:] if is_on_disk(matrix) else matrix


def rows_of(adata: AnnData, layer: str | None = None) -> Rows:
    """The matrix of an analysis, to be read by ranges of cells, as often as needed."""
    matrix = matrix_of(adata, layer)
    if getattr(matrix, "format", None) == "csc":
        try:
            matrix = (matrix[:] if is_on_disk(matrix) else matrix).tocsr()
        except MemoryError as error:
            raise DataError(
                f"{where_is(layer)} is stored by gene and does not fit into memory; write it as a CSR matrix."
            ) from error
    return Rows(matrix, where_is(layer))


class Rows:
    """Rows of a matrix in memory or on disk; every range that is read has been checked."""

    def __init__(self, matrix: Any, where: str) -> None:
        self._matrix, self._where, self._pace = matrix, where, Pace("reading", where)
        self.shape: tuple[int, int] = matrix.shape

    def __getitem__(self, rows: slice) -> Any:
        block = _read(self._matrix, (rows, slice(None)), self._where)
        self._pace.tell(rows.stop or self.shape[0], self.shape[0])
        return block


class PaddedRows(Rows):
    """Rows of a matrix with columns of zeros behind them, for genes that a file lacks."""

    def __init__(self, rows: Rows, extra: int) -> None:
        self._rows, self._extra = rows, extra
        self.shape = (rows.shape[0], rows.shape[1] + extra)

    def __getitem__(self, rows: slice) -> Any:
        from scipy import sparse

        block = sparse.csr_matrix(self._rows[rows])
        return sparse.csr_matrix((block.data, block.indices, block.indptr), shape=(block.shape[0], self.shape[1]))


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

    matrix = matrix_of(adata, layer)
    rows, columns = np.arange(matrix.shape[0]), np.arange(matrix.shape[1])
    if is_sparse(matrix) and is_on_disk(matrix):
        return mapped_layer(matrix, fn, dtype)
    if not is_sparse(matrix):
        dense = np.zeros(matrix.shape, dtype)
        for part, block in blocks(matrix, where_is(layer)):
            dense[part] = map_block(block, fn, dtype, rows[part[0]], columns, matrix.shape[1])
        return dense
    mapped = [
        map_block(block, fn, dtype, rows[part[0]], columns[part[1]], matrix.shape[1])
        for part, block in blocks(matrix, where_is(layer))
    ]
    return (sparse.hstack if matrix.format == "csc" else sparse.vstack)(mapped, format=matrix.format)


def map_block(block: Any, fn: Mapping, dtype: npt.DTypeLike, rows: Array, columns: Array, width: int) -> Any:
    """`fn` of the non-zero values of a block that holds these rows and columns of a matrix of that width."""
    sparse = is_sparse(block)
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


def mapped_layer(matrix: Any, fn: Mapping, dtype: npt.DTypeLike) -> Any:
    """A sparse dataset whose values are `fn` of those of `matrix`, computed for the rows that are asked for."""
    return _mapped_type(type(matrix))(matrix, fn, np.dtype(dtype))


def _mapped_type(base: type) -> Any:
    class MappedDataset(base):  # type: ignore[misc]
        """As sparse as what it is made from; anndata takes it for a dataset on disk."""

        def __init__(self, matrix: Any, fn: Mapping, dtype: np.dtype[Any]) -> None:
            super().__init__(matrix.group)
            self.matrix, self.fn, self._dtype = matrix, fn, dtype

        @property
        def dtype(self) -> np.dtype[Any]:
            return self._dtype

        def __getitem__(self, index: Any) -> Any:
            rows, columns = (np.ravel(x) if not isinstance(x, slice) else x for x in self._normalize_index(index))
            block = self.matrix[index]
            row, column = np.arange(self.shape[0])[rows], np.arange(self.shape[1])[columns]
            return map_block(block, self.fn, self._dtype, np.atleast_1d(row), np.atleast_1d(column), self.shape[1])

        def to_memory(self) -> Any:
            return self[:]

        def _to_backed(self) -> Any:
            return self[:]

    return MappedDataset


def layer_names(adata: AnnData) -> list[str]:
    """Names of the layers beside X, which anndata 0.13 lists among them as `None`."""
    return [key for key in adata.layers if key is not None]


def where_is(layer: str | None) -> str:
    return "adata.X" if layer is None else f"adata.layers[{layer!r}]"


def matrix_of(adata: AnnData, layer: str | None) -> Any:
    if layer is not None and layer not in adata.layers:
        raise DataError(
            f"{where_is(layer)} is missing; there is {listed(layer_names(adata))}. Name another with layer=."
        )
    if (origin := getattr(adata, "origin", None)) is not None:
        origin.check_unchanged()
    matrix = x_of(adata) if layer is None else adata.layers[layer]
    if matrix is None:
        raise DataError("adata.X is missing; put the expression there, or pass layer=.")
    if matrix.dtype.kind not in "biuf":
        raise DataError(f"{where_is(layer)} must hold numbers, found {matrix.dtype}.")
    return matrix


def x_of(adata: AnnData) -> Any:
    try:
        if adata.isbacked:  # its arrays are opened only when asked for
            _ = adata.X.dtype, adata.X.shape
        return adata.X
    except Exception as error:  # on a damaged file the libraries raise anything
        raise DataError(_damaged("adata.X")) from error


def _damaged(where: str) -> str:
    return f"{where} cannot be read: it is damaged or its file was removed; copy the file or write it again."


def is_sparse(matrix: Any) -> bool:
    return getattr(matrix, "format", None) in ("csr", "csc")  # scipy's, and those of anndata on disk


def is_on_disk(matrix: Any) -> bool:
    """Whether a matrix is a dataset of h5py or zarr, or anndata's sparse one of these."""
    dense = type(matrix).__module__.partition(".")[0] in ("h5py", "zarr")
    return (dense and hasattr(matrix, "shape")) or (is_sparse(matrix) and hasattr(matrix, "group"))


def blocks(
    matrix: Any, where: str, *, entries: int = _BLOCK, most: int | None = None
) -> Iterator[tuple[tuple[slice, slice], Any]]:
    """Cut a matrix along the axis in which it is stored; with `most`, only so many blocks, evenly spread."""
    by_column = getattr(matrix, "format", None) == "csc"
    length, width = matrix.shape[::-1] if by_column else matrix.shape
    step = max(1, entries // max(1, width))
    starts = np.arange(0, length, step)
    if most is not None and len(starts) > most:
        starts = starts[np.linspace(0, len(starts) - 1, most).astype(int)]
    pace = Pace("reading", where)
    for start in starts.tolist():
        cut = slice(start, min(start + step, length))
        part = (slice(None), cut) if by_column else (cut, slice(None))
        yield part, _read(matrix, part, where)
        pace.tell(cut.stop, length)


def _stored_values(matrix: Any, where: str, *, bare: bool = False) -> Iterator[Array]:
    """The stored values, `_STORED` of them or one row at a time; `bare`, those of a file without their places."""
    if not is_sparse(matrix):
        yield from (_stored(block) for _, block in blocks(matrix, where))
        return
    indptr, pace = pointers(matrix, where), Pace("reading", where)
    for first, last in runs(indptr, _STORED):
        cut = slice(first, last)
        if bare:
            yield _read(matrix.group["data"], slice(int(indptr[first]), int(indptr[last])), where)
        else:
            yield _read(matrix, (slice(None), cut) if matrix.format == "csc" else (cut, slice(None)), where).data
        pace.tell(last, len(indptr) - 1)


def pointers(matrix: Any, where: str) -> I64:
    """Where each row (or column) of a sparse matrix begins among its stored entries, and where the last one ends."""
    held = _read(matrix.group["indptr"], slice(None), where) if is_on_disk(matrix) else matrix.indptr
    return np.asarray(held).astype(np.int64)


def runs(indptr: I64, entries: int) -> Iterator[tuple[int, int]]:
    """Ranges of rows that hold at most so many stored entries, or are one row."""
    first, n = 0, len(indptr) - 1
    while first < n:
        last = int(np.searchsorted(indptr, indptr[first] + entries, side="right")) - 1
        last = min(n, max(first + 1, last))
        yield first, last
        first = last


def _without_zeros(values: Array) -> Array:
    there = values != 0
    return values if there.all() else values[there]


def _read(matrix: Any, part: tuple[slice, slice] | slice, where: str) -> Any:
    try:
        block = matrix[part]
        if is_sparse(block):
            block.check_format(full_check=True)  # a matrix on disk has not been checked on opening
            block.sum_duplicates()
        return block
    except Exception as error:  # as above
        raise DataError(_damaged(where)) from error


def _stored(block: Any) -> np.ndarray:
    return block.data if is_sparse(block) else np.asarray(block).ravel()


def not_finite(where: str) -> str:
    return f"{where} has missing or infinite values; fill them or remove these cells or genes."


def listed(keys: Any) -> str:
    return ", ".join(repr(str(key)) for key in keys) or "none"
