"""Files of cells: `.h5ad`, `.zarr`, `.h5mu`, and plain matrices as `.csv`, `.npz` and `.fcs`.

`read_cells` loads a file; `open_cells` leaves a large one on disk (`cloister.cells.stored`).

A file that is not what its suffix says, is damaged or cut short is a `DataError` in one sentence. The HDF5 library
itself may crash or hang on a damaged file, so a child process tries it first (`hdf5_probe`). Nothing is ever
unpickled. A result is written beside its place and moved there, so no half-written file is left behind.

In `.csv` and `.npz`, columns of `obs` carry the prefix `obs:`, so that a score does not come back as a gene;
`.npz` also keeps `obsm:`. Layers and `uns`, with the receipts in it, are kept in `.h5ad` only.
"""

from __future__ import annotations

import csv
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cloister.cells import probe as hdf5_probe
from cloister.cells.values import layer_names
from cloister.errors import CloisterError, DataError, MissingExtra, ParameterError
from cloister.files import replacing

if TYPE_CHECKING:
    import pandas as pd
    from anndata import AnnData

GENE_KEYS = ("var_names", "genes", "gene_names", "markers", "columns", "features", "channels")
CELL_KEYS = ("obs_names", "cells", "cell_names", "barcodes")
IN_MEMORY = 1 << 27  # bytes of a file that `open_cells` still loads
SPARSE_KEYS = ("format", "shape", "data", "indices", "indptr", "row", "col", "offsets", "_is_array")  # scipy's


def open_cells(path: str | os.PathLike[str], *, probe: bool = True) -> AnnData:
    """Cells of a file: loaded if it is small, else with `X` and layers left on disk, where its format allows."""
    path, part = split_name(path)
    large = path.suffix.lower() in STORED and _size(path) > IN_MEMORY
    return read_cells(f"{path}:{part}" if part else path, backed=large, probe=probe)


def read_cells(path: str | os.PathLike[str], *, backed: bool = False, probe: bool = True) -> AnnData:
    """Read cells from a file, by its suffix.

    Parameters
    ----------
    path
        `.h5ad` or `.zarr`, with `:raw` behind it for the values and genes of `adata.raw`; `.h5mu:NAME` for a modality;
        `.csv` with cell names in the first column and gene names in the first line (numbers go to
        `X`, other columns to `obs`); `.npz` with an array `X`, dense or as `scipy.sparse.save_npz` writes
        it, and arrays per cell or gene beside it; `.fcs` with the extra `fcs`.
    backed
        Leave `X` and layers of an `.h5ad`, `.h5mu` or `.zarr` file on disk, and read them in pieces.
    probe
        Have a child process parse an HDF5 file first, so that damage cannot crash this one.
    """
    path, part = split_name(path)
    suffix = path.suffix.lower()
    if suffix not in _READERS:
        raise DataError(f"{path} must be one of {', '.join(_READERS)}; convert it or correct its suffix.")
    if backed and suffix not in STORED:
        raise ParameterError(f"Only {', '.join(STORED)} can be read with backed=True, got {suffix}; leave it out.")
    kind, reader = _READERS[suffix]
    try:
        _check_file(path, kind)
        if kind == "HDF5":
            if probe and not hdf5_probe.check(path):
                raise DataError(_damaged(path, kind))
            _check_declared(path)
        with _known_warnings():
            if backed:
                from cloister.cells.stored import open_stored

                adata = open_stored(path, part)
            else:
                adata = _read_stored(path, part) if part else reader(path)
    except CloisterError:
        raise
    except (PermissionError, BlockingIOError) as error:
        raise DataError(
            f"{path} cannot be opened; ask for the right to read it, or close the program that writes it."
        ) from error
    except MemoryError as error:
        raise DataError(f"{path} does not fit into memory; use an .h5ad file with backed=True.") from error
    except Exception as error:  # on damaged bytes the libraries raise anything
        raise DataError(_damaged(path, kind)) from error
    if 0 in adata.shape:
        raise DataError(f"{path} holds {adata.n_obs} cells and {adata.n_vars} genes; at least one of each is needed.")
    return adata


def _damaged(path: Path, kind: str) -> str:
    return f"{path} cannot be read as {kind}: it is damaged or cut short; copy it or write it again."


def split_name(path: str | os.PathLike[str]) -> tuple[Path, str | None]:
    """File and part of a name such as `cohort.h5mu:rna`; a file that is there under the whole name wins."""
    text = os.fspath(path)
    head, colon, part = text.rpartition(":")
    if colon and not Path(text).exists() and Path(head).suffix.lower() in STORED:
        return Path(head), part
    return Path(text), None


def _size(path: Path) -> int:
    """Bytes of a file, or of all files in a folder."""
    try:
        if not path.is_dir():
            return path.stat().st_size
        return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    except OSError:
        return 0  # reading it says what is wrong


def write_cells(adata: AnnData, path: str | os.PathLike[str], *, private: bool = False) -> None:
    """Write cells to `.h5ad`, `.csv` or `.npz`; whole or not at all, and if private for the owner's eyes only."""
    path = Path(path)
    writer = _WRITERS.get(path.suffix.lower())
    if writer is None:
        raise DataError(f"{path} must be one of {', '.join(_WRITERS)}; choose one of these suffixes.")
    if not path.parent.is_dir():
        raise DataError(f"The folder {path.parent} does not exist; make it first.")
    if path.is_dir():
        raise DataError(f"{path} is a folder; name a file.")
    if adata.X is None and path.suffix.lower() != ".h5ad":
        raise DataError(f"adata.X is missing, and {path.suffix} holds nothing else; write .h5ad.")
    try:
        with replacing(path, private=private) as part:
            writer(adata, part)
    except CloisterError:
        raise
    except OSError as error:
        raise DataError(f"{path} cannot be written ({error.strerror or 'input/output error'}).") from error
    except Exception as error:  # e.g. an object in uns that HDF5 cannot hold
        raise DataError(
            f"This AnnData cannot be stored as {path.suffix}; remove what is not text, numbers or tables from it."
        ) from error


@contextmanager
def _known_warnings() -> Iterator[None]:
    """Silence what `check_cells` says itself, and the change of numbered names to text that we want."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r".*names are not unique", UserWarning)
        warnings.filterwarnings("ignore", r"Transforming to str index", UserWarning)
        yield


def _check_file(path: Path, kind: str) -> None:
    if not path.exists():
        raise DataError(f"{path} does not exist; check the name.")
    if kind == ZARR:
        if not any((path / name).is_file() for name in (".zgroup", "zarr.json")):
            raise DataError(f"{path} is no folder of Zarr, or was not copied whole; copy it or write it again.")
        return
    if not path.is_file():
        raise DataError(f"{path} is not a file; name a file.")
    with path.open("rb") as file:
        head = file.read(4096)
    if not head:
        raise DataError(f"{path} is empty (0 bytes); copy it or write it again.")
    found = _kind_of(head)
    if found != kind:
        raise DataError(f"{path} must be {kind}, but looks like {found}; correct its suffix or convert it.")


def _kind_of(head: bytes) -> str:
    marks = {
        "HDF5": (b"\x89HDF",),
        "a zip archive": (b"PK\x03\x04", b"PK\x05\x06"),
        "FCS": (b"FCS2.", b"FCS3."),
        "a gzip file": (b"\x1f\x8b",),
    }
    for kind, starts in marks.items():
        if head.startswith(starts):
            return kind
    return "something binary" if b"\0" in head else "text"


def _check_declared(path: Path) -> None:
    import h5py

    with h5py.File(path, "r") as file:
        missing = [key for key in ("obs", "var") if key not in file]
        file.visititems(_check_declared_size)
    if missing:
        raise DataError(f"{path} is HDF5 but holds no AnnData ({missing[0]} is missing); convert it with scanpy.")


def _read_h5ad(path: Path) -> AnnData:
    from anndata.io import read_h5ad

    adata = read_h5ad(path)
    _check_loaded(adata)
    return adata


def _read_stored(path: Path, part: str | None = None) -> AnnData:
    from cloister.cells.stored import open_stored

    adata = open_stored(path, part).to_memory()
    _check_loaded(adata)
    return adata


def _check_loaded(adata: AnnData) -> None:
    from scipy import sparse

    for matrix in (adata.X, *(adata.layers[key] for key in layer_names(adata)), *adata.obsm.values()):
        if sparse.issparse(matrix):
            matrix.check_format(full_check=True)  # an index out of range would crash compiled code later
            matrix.sum_duplicates()


def _check_declared_size(name: str, item: Any) -> None:
    """Refuse an array that claims far more than any compression can hide; reading it would fill the memory."""
    if hasattr(item, "nbytes") and item.nbytes > max(10**8, 10_000 * item.id.get_storage_size()):
        raise ValueError(f"{name}: {item.nbytes} bytes declared")


def _read_csv(path: Path) -> AnnData:
    import pandas as pd
    from anndata import AnnData

    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            header = next(csv.reader(file))
        if len(header) < 2:
            raise DataError(f"{path} must be separated by commas, and its first line has none; export it again.")
        marked = {0: "={}".format}  # so that pandas does not take a cell named NA for one without a name
        table = pd.read_csv(path, header=None, skiprows=1, converters=marked, low_memory=False)
    except UnicodeDecodeError as error:
        raise DataError(f"{path} must be text in UTF-8, and some of it is not; export it as UTF-8.") from error
    except pd.errors.EmptyDataError:
        raise DataError(f"{path} has a first line and no cells below it; export it again.") from None
    surplus = table.shape[1] - len(header)
    if surplus not in (0, 1) or (surplus == 1 and table.iloc[:, -1].isna().all()):
        raise DataError(
            f"{path} names {len(header)} columns but has {table.shape[1]}; the first line must name every column."
        )
    cells, genes = table[0].str[1:], header[1 - surplus :]  # R leaves the corner out
    if _are_values(genes):
        raise DataError(f"{path} must name the genes in its first line, which holds numbers; add a header.")
    if _are_values(cells):
        raise DataError(f"{path} must name the cells in its first column, which holds numbers; add names.")
    obs, in_x = {}, []
    for index, gene in enumerate(genes, start=1):
        column = table[index]
        numeric = column.dtype.kind in "iuf"
        if gene.startswith("obs:"):
            obs[gene.removeprefix("obs:")] = column if numeric else column.astype("category")
        elif numeric:
            in_x.append(index)
        else:
            _check_text(path, gene, column)
            obs[gene] = column.astype("category")
    if not in_x:
        raise DataError(f"{path} has no column of numbers; expected one per gene.")
    return AnnData(
        X=table[in_x].to_numpy(),
        obs=pd.DataFrame(obs, index=table.index).set_axis(cells.tolist(), axis=0),
        var=pd.DataFrame(index=[genes[index - 1] for index in in_x]),
    )


def _are_values(names: Any) -> bool:
    """Whether all names are numbers that look measured: fractions, or the same number twice."""
    try:
        values = np.array([float(name) for name in names])
    except ValueError:
        return False
    return bool((values % 1 != 0).any()) or len(np.unique(values)) < len(values)


def _check_text(path: Path, name: str, column: pd.Series) -> None:
    import pandas as pd

    numeric, given = pd.to_numeric(column.astype(str), errors="coerce").notna(), column.notna()
    if 2 * (numeric & given).sum() > given.sum():
        line = int(np.flatnonzero(given & ~numeric)[0]) + 2
        raise DataError(
            f"{path}: column '{name}' holds numbers, but not in line {line}; correct it, "
            "or name the column 'obs:...' if it is a label."
        )


def _read_npz(path: Path) -> AnnData:
    from anndata import AnnData
    from scipy import sparse

    with path.open("rb") as file:  # np.load leaves a file open that it cannot read
        archive = np.load(file, allow_pickle=False)
        is_sparse = {"format", "shape", "data"}.issubset(archive.files)
        if not is_sparse and "X" not in archive.files:
            found = ", ".join(map(repr, archive.files[:5])) or "no array"
            raise DataError(f"{path} must hold an array 'X', found {found}; rename one.")
        arrays = {key: archive[key] for key in archive.files if not (is_sparse and key in SPARSE_KEYS)}
        if is_sparse:
            file.seek(0)
            X = sparse.load_npz(file)
            if X.format in ("csr", "csc", "bsr"):
                X.check_format(full_check=True)
            X = X if X.format in ("csr", "csc") else X.tocsr()
            X.sum_duplicates()
        else:
            X = arrays.pop("X")
    if X.ndim != 2 or X.dtype.kind not in "biuf":
        raise DataError(f"{path}: 'X' must be a table of numbers, found {X.ndim} dimensions of {X.dtype}.")
    adata = AnnData(X=X)
    cell_key = next((key for key in CELL_KEYS if _is_text(arrays.get(key), X.shape[0])), None)
    gene_key = next((key for key in GENE_KEYS if _is_text(arrays.get(key), X.shape[1])), None)
    if cell_key is not None:
        adata.obs_names = _as_text(arrays.pop(cell_key))
    if gene_key is not None:
        adata.var_names = _as_text(arrays.pop(gene_key))
    for key, array in arrays.items():
        _place(adata, key, array)
    return adata


def _place(adata: AnnData, key: str, array: np.ndarray) -> None:
    """Put one array where its shape belongs: per cell, per gene, or beside the table."""
    import pandas as pd

    text = array.dtype.kind in "US"
    if array.shape == (adata.n_obs,):
        values = pd.Categorical(pd.Series(_as_text(array)).replace("", None)) if text else array
        adata.obs[key.removeprefix("obs:")] = values
    elif array.shape == (adata.n_vars,):
        adata.var[key] = _as_text(array) if text else array
    elif array.ndim == 2 and len(array) == adata.n_obs and not text:
        adata.obsm[key.removeprefix("obsm:")] = array
    else:
        adata.uns[key] = array


def _is_text(array: np.ndarray | None, length: int) -> bool:
    return array is not None and array.shape == (length,) and array.dtype.kind in "US"


def _as_text(array: np.ndarray) -> list[str]:
    return [x.decode() if isinstance(x, bytes) else str(x) for x in array.tolist()]


def _read_fcs(path: Path) -> AnnData:
    try:
        import flowio
    except ImportError as error:
        raise MissingExtra("flowio", "fcs") from error
    import pandas as pd
    from anndata import AnnData

    with path.open("rb") as file:
        flow = flowio.FlowData(file)
    markers = [label.strip() for label in flow.pns_labels]
    names = [
        marker if marker and markers.count(marker) == 1 else channel
        for marker, channel in zip(markers, flow.pnn_labels, strict=True)
    ]
    var = pd.DataFrame({"channel": flow.pnn_labels, "marker": markers}, index=names)
    return AnnData(X=flow.as_array().astype(np.float32), var=var)


def _write_h5ad(adata: AnnData, path: Path) -> None:
    from anndata.io import write_h5ad

    from cloister.cells.stored import StoredCells, write_stored

    empty = [name for name, column in adata.obs.items() if column.dtype == object and column.isna().all()]
    if empty:  # a site without a single label; AnnData cannot tell what the column would hold
        adata = adata.copy() if adata.is_view else adata
        for name in empty:
            adata.obs[name] = adata.obs[name].astype("category")
    if isinstance(adata, StoredCells) and not adata.is_view and adata.shape == adata.origin.shape:
        write_stored(adata, path)
    else:
        write_h5ad(path, adata, compression="gzip", compression_opts=1)


def _write_csv(adata: AnnData, path: Path) -> None:
    import pandas as pd

    obs = adata.obs.add_prefix("obs:")
    with path.open("w", encoding="utf-8", newline="") as file:
        for start in range(0, adata.n_obs, 1000):
            rows = adata.X[start : start + 1000]
            rows = rows.toarray() if hasattr(rows, "toarray") else rows
            some = obs.iloc[start : start + 1000]
            table = pd.DataFrame(rows, index=some.index, columns=adata.var_names)
            pd.concat([some, table], axis=1).to_csv(file, header=start == 0, index_label="cell")


def _write_npz(adata: AnnData, path: Path) -> None:
    X = adata.X if isinstance(adata.X, np.ndarray) or hasattr(adata.X, "nnz") else adata.X[:]
    arrays: dict[str, Any] = {
        "obs_names": adata.obs_names.to_numpy(dtype=str),
        "var_names": adata.var_names.to_numpy(dtype=str),
    }
    if hasattr(X, "indptr"):  # as scipy.sparse.save_npz does
        arrays |= {"format": np.array(X.format.encode()), "shape": X.shape}
        arrays |= {"data": X.data, "indices": X.indices, "indptr": X.indptr}
    else:
        arrays["X"] = np.asarray(X)
    for key in adata.obs.columns:
        column = adata.obs[key]
        plain = isinstance(column.dtype, np.dtype) and column.dtype.kind in "biuf"
        arrays[f"obs:{key}"] = column.to_numpy() if plain else column.astype("string").fillna("").to_numpy(dtype=str)
    for key, matrix in adata.obsm.items():
        if isinstance(matrix, np.ndarray):
            arrays[f"obsm:{key}"] = np.asarray(matrix)
    with path.open("wb") as file:
        np.savez_compressed(file, **arrays)


STORED = (".h5ad", ".h5mu", ".zarr")  # whose matrices can stay on disk
ZARR = "Zarr"
_READERS: dict[str, tuple[str, Callable[[Path], AnnData]]] = {
    ".h5ad": ("HDF5", _read_h5ad),
    ".h5mu": ("HDF5", _read_stored),
    ".zarr": (ZARR, _read_stored),
    ".csv": ("text", _read_csv),
    ".npz": ("a zip archive", _read_npz),
    ".fcs": ("FCS", _read_fcs),
}
_WRITERS: dict[str, Callable[[AnnData, Path], None]] = {
    ".h5ad": _write_h5ad,
    ".csv": _write_csv,
    ".npz": _write_npz,
}
