"""Plain matrices as files of cells: `.csv`, `.npz` and `.fcs`.

In `.csv` and `.npz`, columns of `obs` carry the prefix `obs:`, so that a score does not come back as a gene;
`.npz` also keeps `obsm:`. Layers and `uns`, with the receipts in it, are kept in `.h5ad` only.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cloister.arrays import Array
from cloister.errors import DataError, MissingExtra
from cloister.files import load_arrays

if TYPE_CHECKING:
    import pandas as pd
    from anndata import AnnData

GENE_KEYS = ("var_names", "genes", "gene_names", "markers", "columns", "features", "channels")
CELL_KEYS = ("obs_names", "cells", "cell_names", "barcodes")
SPARSE_KEYS = ("format", "shape", "data", "indices", "indptr", "row", "col", "offsets", "_is_array")  # scipy's


def read_csv(path: Path) -> AnnData:
    """Cells in lines, genes in columns: numbers go to `X`, other columns to `obs`."""
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


def read_npz(path: Path) -> AnnData:
    """An array `X`, dense or as scipy stores it, and arrays per cell or gene beside it."""
    from anndata import AnnData
    from scipy import sparse

    with path.open("rb") as file, load_arrays(path) as archive:
        is_sparse = {"format", "shape", "data"}.issubset(archive.files)
        if not is_sparse and "X" not in archive.files:
            found = ", ".join(map(repr, archive.files[:5])) or "no array"
            raise DataError(f"{path} must hold an array 'X', found {found}; rename one.")
        arrays = {key: _array(archive, key, path) for key in archive.files if not (is_sparse and key in SPARSE_KEYS)}
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


def read_fcs(path: Path) -> AnnData:
    """Events of a cytometer, by marker where it has a name of its own."""
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


def write_csv(adata: AnnData, path: Path) -> None:
    """A thousand cells at a time, with the columns of `obs` first."""
    import pandas as pd

    obs = adata.obs.add_prefix("obs:")
    with path.open("w", encoding="utf-8", newline="") as file:
        for start in range(0, adata.n_obs, 1000):
            rows = adata.X[start : start + 1000]
            rows = rows.toarray() if hasattr(rows, "toarray") else rows
            some = obs.iloc[start : start + 1000]
            table = pd.DataFrame(rows, index=some.index, columns=adata.var_names)
            pd.concat([some, table], axis=1).to_csv(file, header=start == 0, index_label="cell")


def _array(archive: Any, key: str, path: Path) -> Array:
    try:
        found: Array = archive[key]
    except ValueError as e:
        if "pickle" not in str(e).lower():
            raise
        raise DataError(
            f"{path} cannot be read: its array '{key}' is pickled Python, which can run programs when it is opened."
            f" Save it as numbers or text, for example {key}.astype(str)."
        ) from None
    return found


def write_npz(adata: AnnData, path: Path) -> None:
    """What `read_npz` reads, compressed."""
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
