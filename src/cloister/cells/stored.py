"""Cells that stay on disk: `.h5ad`, `.zarr`, and a modality of `.h5mu`, opened but not loaded.

    adata = open_cells("atlas.h5ad")            X and layers on disk, obs, var, obsm, uns in memory
    adata = open_cells("atlas.h5ad:raw")        the matrix and the genes of adata.raw
    adata = open_cells("cohort.h5mu:rna")       one modality

`adata.X` is then anndata's sparse dataset (or the array of the file), from which `cells.chunks` reads some rows at a
time. `write_stored` writes the result: a copy of the file, made without loading it, into which only what is new goes.
A file that changes between opening and writing is a `DataError`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from anndata import AnnData
from anndata.io import read_elem, sparse_dataset, write_elem

from cloister.cells.progress import Pace
from cloister.cells.safe_hdf5 import open_hdf5
from cloister.cells.values import is_on_disk, pointers, runs
from cloister.errors import DataError

_ROWS = 2**22  # stored entries that are written at a time
_PIECE = 2**24  # bytes that are copied at a time


@dataclass
class Origin:
    """Where cells on disk came from, and what the file was like then."""

    path: Path
    part: str | None
    group: Any  # of h5py or zarr, open for reading
    stamp: tuple[Any, ...]
    shape: tuple[int, int]
    loaded: dict[tuple[str, str], Any] = field(default_factory=dict)  # (slot, key) → as it was read
    folder: Any = None  # a temporary one that the file is in, and that goes away with this
    surveys: dict[str | None, Any] = field(default_factory=dict)  # what `tables.survey` saw, by layer
    layer: str | None = None  # that stands in for X

    @property
    def is_raw(self) -> bool:
        return self.part == "raw" and self.path.suffix.lower() != ".h5mu"

    @property
    def measured(self) -> Any:
        """The group that holds `X` and `var`."""
        return self.group["raw"] if self.is_raw else self.group

    @property
    def whole_file(self) -> bool:
        """Whether the AnnData is the whole of an HDF5 file, which can be copied as it is."""
        return self.path.suffix.lower() == ".h5ad" and self.part is None

    def check_unchanged(self) -> None:
        if stamp_of(self.path) != self.stamp:
            raise DataError(
                f"{self.path} changed while it was in use; let nobody write to it during a run, and run again."
            )


def stamp_of(path: Path) -> tuple[Any, ...]:
    """What differs when a file was written to; of a `.zarr` folder, its description and that of its arrays."""
    try:
        if not path.is_dir():
            facts = path.stat()
            return facts.st_ino, facts.st_size, facts.st_mtime_ns
        folders = [path, *(path / name for name in ("X", "obs", "var", "layers", "X/data", "X/indices", "X/indptr"))]
        facts_of = [f.stat() for f in folders if f.exists()]
        return tuple((f.st_ino, f.st_mtime_ns) for f in facts_of)
    except OSError:
        return ()


class StoredCells(AnnData):  # type: ignore[misc]
    """An `AnnData` whose `X` and layers are on disk, and that knows the file they are in."""

    origin: Origin

    def copy(self, filename: str | os.PathLike[str] | None = None) -> AnnData:
        """Another one over the same file: what is in memory is copied."""
        if filename is not None or self.is_view:
            return super().copy(filename)
        return _assemble(self.origin, {slot: _copied(getattr(self, slot)) for slot in _SLOTS})

    def to_memory(self, copy: bool = False) -> AnnData:  # noqa: FBT001, FBT002 - anndata's own signature
        """All of it loaded."""
        slots = {slot: _copied(getattr(self, slot)) for slot in _SLOTS}
        for slot in ("layers", "obsp", "varp"):
            slots[slot] = {k: _in_memory(v) for k, v in slots[slot].items()}
        group = self.origin.group
        raw = read_elem(group["raw"]) if "raw" in group and not self.origin.is_raw else None
        return AnnData(X=_in_memory(self.X), raw=raw, **slots)


_SLOTS = ("obs", "var", "obsm", "varm", "uns", "layers", "obsp", "varp")


def _copied(x: Any) -> Any:
    if hasattr(x, "items") and not hasattr(x, "columns"):
        return {k: _copied(v) for k, v in x.items() if k is not None}
    return x if is_on_disk(x) or not hasattr(x, "copy") else x.copy()


def _in_memory(x: Any) -> Any:
    return x[:] if is_on_disk(x) else x


def _assemble(origin: Origin, slots: dict[str, Any]) -> StoredCells:
    x = _lazy(origin.measured["X"]) if "X" in origin.measured else None
    x = x if origin.layer is None else _lazy(origin.group["layers"][origin.layer])
    shape = None if x is not None else origin.shape
    adata = StoredCells(X=x, shape=shape, **slots)
    adata.origin = origin
    return adata


def with_layer(adata: StoredCells, layer: str) -> StoredCells:
    """The same cells with a layer of the file in place of X."""
    adata.origin.layer = layer
    adata.origin.surveys.clear()
    return _assemble(adata.origin, {slot: _copied(getattr(adata, slot)) for slot in _SLOTS})


# ---- opening ---------------------------------------------------------------------------------------------------------


def open_stored(path: Path, part: str | None) -> StoredCells:
    """Open cells that stay on disk; raises what the libraries raise (`read_cells` says it in one sentence)."""
    stamp = stamp_of(path)
    group = _find_part(path, part, _open_file(path))
    raw = part == "raw" and path.suffix.lower() != ".h5mu"
    if raw and ("raw" not in group or hasattr(group["raw"], "shape")):  # AnnData may write that there is none
        raise DataError(f"{path} holds no adata.raw; leave ':raw' out.")
    missing = [key for key in ("obs", "var") if key not in group]
    if missing:
        raise DataError(f"{path} holds no AnnData ({missing[0]} is missing); convert it with scanpy.")
    source = group["raw"] if raw else group
    obs, var = read_elem(group["obs"]), read_elem(source["var"])
    slots: dict[str, Any] = {"obs": obs, "var": var, "uns": read_elem(group["uns"]) if "uns" in group else {}}
    slots["obsm"] = read_elem(group["obsm"]) if "obsm" in group else {}
    slots["varm"] = read_elem(source["varm"]) if "varm" in source else {}
    for slot in () if raw else ("layers", "obsp", "varp"):
        slots[slot] = {key: _lazy(group[slot][key]) for key in group[slot]} if slot in group else {}
    origin = Origin(path, part, group, stamp, (len(obs), len(var)))
    adata = _assemble(origin, slots)
    _check_stored(path, adata)
    origin.loaded = {(s, str(k)): v for s in ("obsm", "varm", "uns") for k, v in getattr(adata, s).items()}
    return adata


def _open_file(path: Path) -> Any:
    if path.suffix.lower() == ".zarr":
        import zarr

        return zarr.open_group(str(path), mode="r")
    import h5py

    return h5py.File(path, "r")


def _find_part(path: Path, part: str | None, file: Any) -> Any:
    if path.suffix.lower() != ".h5mu":
        if part not in (None, "raw"):
            raise DataError(f"{path} has no part '{part}'; name it without, or ':raw' for adata.raw.")
        return file
    modalities = sorted(file["mod"]) if "mod" in file else []
    if part is None and len(modalities) == 1:
        part = modalities[0]
    if part not in modalities:
        asked = "names no modality" if part is None else f"has no modality '{part}'"
        there = ", ".join(map(repr, modalities)) or "none"
        raise DataError(f"{path} {asked}; there is {there}: write {path.name}:NAME.")
    return file["mod"][part]


def _lazy(element: Any) -> Any:
    """A matrix of a file without its values."""
    kind = element.attrs.get("encoding-type", "")
    if kind in ("csr_matrix", "csc_matrix") or "h5sparse_format" in element.attrs:
        return sparse_dataset(element)
    if kind in ("array", "") and hasattr(element, "shape"):
        return element
    return read_elem(element)


def _check_stored(path: Path, adata: StoredCells) -> None:
    """Raise if names or a matrix on disk are cut short; single values are checked when they are read.

    Zarr reads a piece that is missing as zeros or empty names, and leaves pieces out that hold nothing else: names and
    stored values never do.
    """
    for table in (adata.origin.group["obs"], adata.origin.measured["var"]):
        index: Any = table[table.attrs["_index"]] if "_index" in table.attrs else None
        _check_pieces(path, index["values"] if hasattr(index, "keys") else index)
    for matrix in (adata.X, *(v for k, v in adata.layers.items() if k is not None)):
        group = getattr(matrix, "group", None)
        if group is None:
            arrays = [matrix] if is_on_disk(matrix) else []
        else:
            arrays = [group["data"], group["indices"]] if matrix.shape[1] > 1 else [group["data"]]
            indptr = np.asarray(group["indptr"][...])
            major = matrix.shape[1 if matrix.format == "csc" else 0]
            short = len(indptr) != major + 1 or indptr[0] != 0 or np.any(np.diff(indptr) < 0)
            if short or indptr[-1] != group["data"].shape[0] or group["indices"].shape != group["data"].shape:
                raise DataError(f"{path} is damaged or cut short: its rows do not fit its values; copy it again.")
        for array in arrays:
            _check_pieces(path, array)


def _check_pieces(path: Path, array: Any) -> None:
    if getattr(array, "nchunks_initialized", 0) < getattr(array, "nchunks", 0):
        raise DataError(f"{path} is damaged or cut short: pieces of {array.name} are missing; copy it again.")


# ---- writing ---------------------------------------------------------------------------------------------------------


def write_stored(adata: StoredCells, path: Path) -> None:
    """Write cells that are on disk to an `.h5ad` file: a copy of theirs, and in it what is new."""
    origin = adata.origin
    origin.check_unchanged()
    if origin.whole_file:
        copy_file(origin.path, path)
    with open_hdf5(path, "r+" if origin.whole_file else "w") as file:
        if not origin.whole_file:
            _copy_elements(origin, file)
        _write_new(adata, origin, file)
    origin.check_unchanged()


def copy_file(source: Path, path: Path) -> None:
    """Copy a file piece by piece, and say how far it is."""
    size, pace = source.stat().st_size, Pace("writing", "copy of the file")
    with source.open("rb") as old, path.open("wb") as new:
        while piece := old.read(_PIECE):
            new.write(piece)
            pace.tell(old.tell(), size)


def _copy_elements(origin: Origin, file: Any) -> None:
    """A modality, adata.raw or a `.zarr` as a new file, matrices in pieces."""
    import h5py

    file.attrs.update({"encoding-type": "anndata", "encoding-version": "0.1.0"})
    source = origin.group
    names = {"X": "raw/X", "obsm": "obsm", "uns": "uns"} if origin.is_raw else {n: n for n in source}
    for name, at in names.items():
        if at not in source or name in ("obs", "var"):
            continue
        if isinstance(source, h5py.Group):
            source.copy(source[at], file, name)
        else:
            _copy_element(source[at], file, name)


def _copy_element(element: Any, file: Any, name: str) -> None:
    kind = element.attrs.get("encoding-type", "")
    if kind in ("csr_matrix", "csc_matrix"):
        write_matrix(file, name, _lazy(element))
    elif kind == "dict":
        group = file.create_group(name)
        group.attrs.update({"encoding-type": "dict", "encoding-version": "0.1.0"})
        for key in element:
            _copy_element(element[key], group, key)
    elif kind == "array" and element.ndim == 2:
        write_matrix(file, name, element)
    else:
        write_elem(file, name, read_elem(element))


def _write_new(adata: StoredCells, origin: Origin, file: Any) -> None:
    adata.strings_to_categoricals()
    for slot in ("obs", "var"):
        if slot in file:
            del file[slot]
        write_elem(file, slot, getattr(adata, slot))
    for slot in ("obsm", "varm", "uns", "layers"):
        if slot not in file:
            write_elem(file, slot, {})
        now = {str(k): v for k, v in getattr(adata, slot).items() if k is not None}
        for key in [k for k in file[slot] if k not in now]:
            del file[slot][key]
        for key, value in now.items():
            own = is_on_disk(value) and not hasattr(value, "fn")  # of the file, and not computed from it
            same = own if slot == "layers" else origin.loaded.get((slot, key)) is value
            if same and key != "cloister":
                continue
            if key in file[slot]:
                del file[slot][key]
            if is_on_disk(value):
                write_matrix(file[slot], key, value)
            else:
                write_elem(file[slot], key, value)


def write_matrix(group: Any, key: str, matrix: Any) -> None:
    """Write a matrix on disk into a group of HDF5, some rows at a time; compressed if the original is."""
    source, pace = getattr(matrix, "group", None), Pace("writing", key)
    like = matrix if source is None else source["data"]
    packed = bool(getattr(like, "compression", None) or getattr(like, "compressors", ()))
    packing = {"compression": "gzip", "compression_opts": 1, "shuffle": True} if packed else {}
    if source is None:
        out = group.create_dataset(key, matrix.shape, like.dtype, chunks=True, **packing)
        out.attrs.update({"encoding-type": "array", "encoding-version": "0.2.0"})
        step = max(1, _ROWS // max(1, matrix.shape[1]))
        for start in range(0, matrix.shape[0], step):
            out[start : start + step] = matrix[start : start + step]
            pace.tell(start + step, matrix.shape[0])
        return
    new = group.create_group(key)
    kind = f"{matrix.format}_matrix"
    new.attrs.update({"encoding-type": kind, "encoding-version": "0.1.0", "shape": np.array(matrix.shape)})
    indptr = pointers(matrix, key)
    size = int(indptr[-1])
    length = max(1, min(size, 2**17))
    arrays = {
        name: new.create_dataset(name, (size,), dtype, chunks=(length,), maxshape=(None,), **packing)
        for name, dtype in (("data", matrix.dtype), ("indices", source["indices"].dtype))
    }
    ends, at = [np.zeros(1, np.int64)], 0
    for first, last in runs(indptr, _ROWS):
        block = matrix[first:last] if matrix.format == "csr" else matrix[:, first:last]
        block.sum_duplicates()
        arrays["data"][at : at + block.nnz] = block.data
        arrays["indices"][at : at + block.nnz] = block.indices
        ends.append(block.indptr[1:].astype(np.int64) + at)
        at += block.nnz
        pace.tell(last, len(indptr) - 1)
    for array in arrays.values():
        array.resize((at,))
    new.create_dataset("indptr", data=np.concatenate(ends))
