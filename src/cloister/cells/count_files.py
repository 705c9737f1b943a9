"""Count matrices as instruments and pipelines write them: 10x `.h5`, folders of `matrix.mtx`, and `.loom`.

Genes get their symbols as names, the id where two genes have one symbol, and both columns in `var`. If a 10x file
holds other features beside genes (antibodies, peaks), only the genes are read.
"""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cloister.cells.probe import EXPANSION, LARGEST
from cloister.errors import DataError

if TYPE_CHECKING:
    from anndata import AnnData

GENES = "Gene Expression"
MATRIX = ("matrix.mtx", "matrix.mtx.gz")
FEATURES = ("features.tsv.gz", "features.tsv", "genes.tsv", "genes.tsv.gz")
BARCODES = ("barcodes.tsv.gz", "barcodes.tsv")
_ENTRY = 16  # bytes that a stored entry takes in memory
_GENES_AT_ONCE = 512  # of a dense matrix by genes


def is_mtx_folder(path: Path) -> bool:
    return path.is_dir() and any((path / name).is_file() for name in MATRIX)


def read_mtx_folder(path: Path) -> AnnData:
    """A folder of CellRanger, STARsolo, alevin or kallisto: matrix, features and barcodes."""
    import pandas as pd
    from scipy import io, sparse

    matrix, features, barcodes = (_one_of(path, names) for names in (MATRIX, FEATURES, BARCODES))
    _check_entries(matrix)
    genes = pd.read_csv(features, sep="\t", header=None, dtype=str, keep_default_na=False)
    cells = pd.read_csv(barcodes, sep="\t", header=None, dtype=str, keep_default_na=False)[0].tolist()
    X = sparse.csr_matrix(io.mmread(matrix))
    if X.shape == (len(genes), len(cells)):
        X = X.T.tocsr()
    if X.shape != (len(cells), len(genes)):
        raise DataError(
            f"{path} holds a matrix of {X.shape[0]} x {X.shape[1]}, but {len(genes)} features and {len(cells)}"
            " barcodes; copy all three files of one run."
        )
    ids = genes[0].tolist()
    symbols = genes[1].tolist() if genes.shape[1] > 1 else ids
    kinds = genes[2].tolist() if genes.shape[1] > 2 else None
    return _made(X, cells, ids, symbols, kinds)


def _one_of(folder: Path, names: tuple[str, ...]) -> Path:
    found = next((folder / name for name in names if (folder / name).is_file()), None)
    if found is None:
        raise DataError(f"{folder} has a matrix but no {names[0]}; copy all files of the folder.")
    return found


def _check_entries(path: Path) -> None:
    """Raise if the head of a matrix declares more entries than its file can hold."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        line = file.readline()
        if not line.startswith("%%MatrixMarket"):
            raise DataError(f"{path} is not a matrix in Matrix Market format; copy it or write it again.")
        while line.startswith("%"):
            line = file.readline()
    *_, entries = map(int, line.split())
    if entries * _ENTRY > max(LARGEST, EXPANSION * path.stat().st_size):
        raise DataError(f"{path} declares {entries} entries, far more than a file of its size can hold.")


def read_10x(path: Path) -> AnnData:
    """`filtered_feature_bc_matrix.h5` of CellRanger 3 and later, or the file of one genome of CellRanger 2."""
    import h5py
    from scipy import sparse

    with h5py.File(path, "r") as file:
        groups = [name for name in file if isinstance(file[name], h5py.Group) and "indptr" in file[name]]
        if not groups:
            raise DataError(f"{path} holds no matrix of 10x CellRanger; convert it with scanpy.")
        if len(groups) > 1:
            raise DataError(f"{path} holds the matrices of {len(groups)} genomes ({', '.join(groups)}); split it.")
        group = file[groups[0]]
        arrays = {name: group[name][()] for name in ("data", "indices", "indptr", "shape")}
        cells = _texts(group["barcodes"])
        if "features" in group:
            features = group["features"]
            ids, symbols = _texts(features["id"]), _texts(features["name"])
            kinds = _texts(features["feature_type"]) if "feature_type" in features else None
        else:
            ids, symbols, kinds = _texts(group["genes"]), _texts(group["gene_names"]), None
    genes, n = (int(x) for x in arrays["shape"])
    if (genes, n) != (len(ids), len(cells)):
        raise DataError(f"{path} is damaged: its matrix has another size than its names; copy it again.")
    X = sparse.csr_matrix((arrays["data"], arrays["indices"], arrays["indptr"]), shape=(n, genes))
    X.check_format(full_check=True)
    X.sum_duplicates()
    return _made(X, cells, ids, symbols, kinds)


def read_loom(path: Path) -> AnnData:
    """Genes in rows, cells in columns; attributes of cells go to `obs`, layers to `layers`."""
    import h5py
    import pandas as pd

    with h5py.File(path, "r") as file:
        if "matrix" not in file or "row_attrs" not in file or "col_attrs" not in file:
            raise DataError(f"{path} is HDF5 but no loom file (matrix, row_attrs or col_attrs is missing).")
        X = _turned(file["matrix"])
        rows, columns = _attributes(file["row_attrs"], X.shape[1]), _attributes(file["col_attrs"], X.shape[0])
        layers = {name: _turned(file["layers"][name]) for name in file.get("layers", ())}
    cells = next((columns.pop(name) for name in ("CellID", "cell_id", "obs_names") if name in columns), None)
    symbols = next((rows[name] for name in ("Gene", "gene_name", "var_names", "name") if name in rows), None)
    ids = next((rows[name] for name in ("Accession", "gene_id", "gene_ids") if name in rows), symbols)
    if symbols is None or ids is None:
        raise DataError(f"{path} names no genes (row_attrs/Gene is missing); write it again with gene names.")
    names = [str(x) for x in cells] if cells is not None else [str(i) for i in range(X.shape[0])]
    adata = _made(X, names, [str(x) for x in ids], [str(x) for x in symbols], None)
    for name, values in columns.items():
        adata.obs[name] = pd.Categorical(values) if values.dtype.kind in "OUS" else values
    for name, layer in layers.items():
        adata.layers[name] = layer
    return adata


def _turned(matrix: Any) -> Any:
    """A dense matrix of genes by cells as a sparse one of cells by genes."""
    from scipy import sparse

    parts = [
        sparse.csc_matrix(matrix[start : start + _GENES_AT_ONCE, :].T)
        for start in range(0, matrix.shape[0], _GENES_AT_ONCE)
    ]
    return sparse.hstack(parts, format="csr")


def _attributes(group: Any, n: int) -> dict[str, np.ndarray]:
    found = {}
    for name in group:
        if getattr(group[name], "shape", None) == (n,):
            values = group[name][()]
            found[name] = np.array(_texts(group[name]), dtype=object) if values.dtype.kind in "OS" else values
    return found


def _texts(dataset: Any) -> list[str]:
    return [x.decode() if isinstance(x, bytes) else str(x) for x in dataset[()].tolist()]


def _made(X: Any, cells: list[str], ids: list[str], symbols: list[str], kinds: list[str] | None) -> AnnData:
    import pandas as pd
    from anndata import AnnData

    seen: set[str] = set()
    names = []
    for key, symbol in zip(ids, symbols, strict=True):
        names.append(key if not symbol or symbol in seen else symbol)
        seen.add(symbol)
    var = pd.DataFrame({"gene_ids": ids, "gene_symbols": symbols}, index=names)
    if kinds is not None:
        var["feature_types"] = kinds
        if GENES in kinds and len(set(kinds)) > 1:
            keep = np.array(kinds) == GENES
            X, var = X[:, np.flatnonzero(keep)], var[keep]
    return AnnData(X=X, obs=pd.DataFrame(index=cells), var=var)
