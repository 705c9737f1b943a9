"""Files of cells: `.h5ad`, `.zarr`, `.h5mu`, 10x `.h5`, `.loom`, and plain matrices as `.csv`, `.npz` and `.fcs`.

`read_cells` loads a file; `open_cells` leaves a large one on disk (`cloister.cells.stored`).

What a site's file means may stand behind its name, after a question mark, as in `cells.h5ad?layer=counts`:

    raw=1             the values and genes of adata.raw
    layer=NAME        a layer in place of X, which stays as layer `X_original` (of a large file, as X of the file)
    genes=COLUMN      gene names from a column of var; the former ones stay as column `original_name`
    label=COLUMN      the same as obs.cell_type=COLUMN
    obs.NAME=COLUMN   a column of obs under the name that the study uses
    obsm.NAME=KEY     an embedding under the name that the study uses
    kind=KIND         counts, log or scaled, whatever the values look like

A file that is not what its suffix says, is damaged or cut short is a `DataError` in one sentence. The HDF5 library
itself may crash or hang on a damaged file, so a child process tries it first (`hdf5_probe`). Nothing is ever
unpickled. A result is written beside its place and moved there, so no half-written file is left behind.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloister.cells import probe as hdf5_probe
from cloister.cells.count_files import is_mtx_folder, read_10x, read_loom, read_mtx_folder
from cloister.cells.cytometry import is_folder, read_folder
from cloister.cells.plain_files import read_csv, read_fcs, read_npz, write_csv, write_npz
from cloister.cells.safe_hdf5 import open_hdf5
from cloister.cells.values import declare_kind, layer_names, listed, matrix_of
from cloister.errors import CloisterError, DataError, DiskError, ParameterError, UsageError, about
from cloister.files import replacing

if TYPE_CHECKING:
    from anndata import AnnData

IN_MEMORY = 1 << 27  # bytes of a file that `open_cells` still loads


def open_cells(path: str | os.PathLike[str], *, probe: bool = True, settings: Settings | None = None) -> AnnData:
    """Cells of a file: loaded if it is small, else with `X` and layers left on disk, where its format allows."""
    file, _ = split_name(split_settings(path)[0])
    large = file.suffix.lower() in STORED and _size(file) > IN_MEMORY
    return read_cells(path, backed=large, probe=probe, settings=settings)


@dataclass(frozen=True)
class Settings:
    """What stands behind the name of a file, or in a site's own settings."""

    raw: bool = False
    layer: str | None = None
    genes: str | None = None
    kind: str | None = None
    obs: Mapping[str, str] = field(default_factory=dict)
    obsm: Mapping[str, str] = field(default_factory=dict)


SETTINGS = ("raw", "layer", "genes", "label", "obs.NAME", "obsm.NAME", "kind")
LABEL = "cell_type"  # the name that `label=` gives to a column


def split_settings(path: str | os.PathLike[str]) -> tuple[str, Settings]:
    """File and settings of a name such as `cells.h5ad?layer=counts&raw=1`; a file of the whole name wins."""
    text = os.fspath(path)
    head, mark, tail = text.rpartition("?")
    if not mark or Path(text).exists():
        return text, Settings()
    given: dict[str, Any] = {}
    tables: dict[str, dict[str, str]] = {"obs": {}, "obsm": {}}
    for word in filter(None, tail.split("&")):
        key, _, value = word.partition("=")
        slot, _, name = key.partition(".")
        if key == "raw" and value.lower() in ("", "1", "true", "0", "false"):
            given["raw"] = value.lower() not in ("0", "false")
        elif key == "label" and value:
            tables["obs"][LABEL] = value
        elif key in ("layer", "genes", "kind") and value:
            given[key] = value
        elif slot in tables and name and value:
            tables[slot][name] = value
        else:
            raise UsageError(f"'{word}' behind {head} is not a setting; known are {', '.join(SETTINGS)}, each with =")
    return head, Settings(**given, obs=tables["obs"], obsm=tables["obsm"])


def apply_settings(adata: AnnData, settings: Settings) -> AnnData:
    """Give columns, genes and values the place that settings say; what they had stays beside it."""
    for slot, renames in (("obs", settings.obs), ("obsm", settings.obsm)):
        table = getattr(adata, slot)
        for name, own in renames.items():
            if own not in table:
                raise DataError(f"adata.{slot}[{own!r}] is missing; there is {listed(table)}. Name one of these.")
            table[name] = table[own]
    if settings.genes is not None:
        if settings.genes not in adata.var:
            raise DataError(
                f"adata.var[{settings.genes!r}] is missing; there is {listed(adata.var)}. Name one of these."
            )
        names = [
            str(new) if isinstance(new, str) and new else str(old)
            for old, new in zip(adata.var_names, adata.var[settings.genes].astype(object), strict=True)
        ]
        adata.var["original_name"] = adata.var_names.to_numpy(dtype=object)
        adata.var_names = names
    if settings.layer is not None:
        values = matrix_of(adata, settings.layer)
        if hasattr(adata, "origin"):
            from cloister.cells.stored import with_layer

            adata = with_layer(adata, settings.layer)
        else:
            if adata.X is not None:
                adata.layers["X_original"] = adata.X
            adata.X = values
    if settings.kind is not None:
        declare_kind(adata, settings.kind)
    return adata


def read_cells(
    path: str | os.PathLike[str], *, backed: bool = False, probe: bool = True, settings: Settings | None = None
) -> AnnData:
    """Read cells from a file, by its suffix.

    Parameters
    ----------
    path
        `.h5ad` or `.zarr`, with `:raw` behind it for the values and genes of `adata.raw`; `.h5mu:NAME` for a modality;
        `.csv` with cell names in the first column and gene names in the first line (numbers go to
        `X`, other columns to `obs`); `.npz` with an array `X`, dense or as `scipy.sparse.save_npz` writes
        it, and arrays per cell or gene beside it; `.fcs` with the extra `fcs`; `.h5` of 10x CellRanger; `.loom`. Or a
        folder of `.fcs` files with a table `donors.csv`, which says the donor and the condition of each, or one with
        `matrix.mtx`, features and barcodes. Settings follow a question mark.
    backed
        Leave `X` and layers of an `.h5ad`, `.h5mu` or `.zarr` file on disk, and read them in pieces.
    probe
        Have a child process parse an HDF5 file first, so that damage cannot crash this one.
    settings
        What would stand behind the question mark, if nothing does.
    """
    text, named = split_settings(path)
    settings = settings if settings is not None and named == Settings() else named
    path, part = split_name(text)
    if settings.raw:
        if part is not None or path.suffix.lower() not in (".h5ad", ".zarr"):
            raise UsageError(f"raw=1 is for adata.raw of .h5ad and .zarr files, found {text}")
        part = "raw"
    suffix = path.suffix.lower()
    if is_folder(path):
        return _with_settings(read_folder(path), settings, path)
    if suffix == "" and is_mtx_folder(path):
        return _with_settings(_read_mtx(path), settings, path)
    if suffix not in _READERS:
        raise DataError(f"{path} must be one of {', '.join(_READERS)}; convert it or correct its suffix.")
    if backed and suffix not in STORED:
        raise ParameterError(f"Only {', '.join(STORED)} can be read with backed=True, got {suffix}; leave it out.")
    kind, reader = _READERS[suffix]
    try:
        _check_file(path, kind)
        if kind == "HDF5":
            found = hdf5_probe.verdict(path) if probe else hdf5_probe.FINE
            if found == hdf5_probe.SILENT:
                raise DataError(f"{path} took too long to be tried; the machine or the disk may be busy: try again.")
            if found in (hdf5_probe.DAMAGED, hdf5_probe.LINKED, hdf5_probe.TOO_LARGE):
                raise DataError(
                    {hdf5_probe.LINKED: _linked(path), hdf5_probe.TOO_LARGE: _too_large(path)}.get(
                        found, _damaged(path, kind)
                    )
                )
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
    return _with_settings(adata, settings, path)


def _with_settings(adata: AnnData, settings: Settings, path: Path) -> AnnData:
    with about(str(path)):
        return apply_settings(adata, settings)


def _read_mtx(path: Path) -> AnnData:
    try:
        return read_mtx_folder(path)
    except CloisterError:
        raise
    except Exception as error:  # on damaged bytes the libraries raise anything
        raise DataError(_damaged(path, "a folder with matrix.mtx")) from error


def _damaged(path: Path, kind: str) -> str:
    return f"{path} cannot be read as {kind}: it is damaged or cut short; copy it or write it again."


def _linked(path: Path) -> str:
    return (
        f"{path} takes values from other files (external links, external storage or virtual datasets), which an"
        " approval does not cover; write all cells into one file."
    )


def _too_large(path: Path) -> str:
    return f"{path} declares far larger arrays than a file of {_size(path)} bytes can hold; write it again."


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
        raise DiskError(f"{path} cannot be written ({error.strerror or 'input/output error'}).") from error
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
            raise DataError(f"{path} is not a folder of Zarr, or was not copied whole; copy it or write it again.")
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
        try:
            hdf5_probe.check_contents(file, _size(path))
        except hdf5_probe.LinkedError:
            raise DataError(_linked(path)) from None
        except hdf5_probe.TooLargeError:
            raise DataError(_too_large(path)) from None
        wanted = () if path.suffix.lower() in (".h5", ".loom") else ("obs", "var")
        missing = [key for key in wanted if key not in file]
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


def _write_h5ad(adata: AnnData, path: Path) -> None:
    from anndata.io import write_elem

    from cloister.cells.stored import StoredCells, write_stored

    empty = [name for name, column in adata.obs.items() if column.dtype == object and column.isna().all()]
    if empty:  # a site without a single label; AnnData cannot tell what the column would hold
        adata = adata.copy() if adata.is_view else adata
        for name in empty:
            adata.obs[name] = adata.obs[name].astype("category")
    if isinstance(adata, StoredCells) and not adata.is_view and adata.shape == adata.origin.shape:
        write_stored(adata, path)
    else:
        adata.strings_to_categoricals()
        if adata.raw is not None:
            adata.strings_to_categoricals(adata.raw.var)
        with open_hdf5(path, "w") as file:
            write_elem(file, "/", adata, dataset_kwargs={"compression": "gzip", "compression_opts": 1})


STORED = (".h5ad", ".h5mu", ".zarr")  # whose matrices can stay on disk
ZARR = "Zarr"
_READERS: dict[str, tuple[str, Callable[[Path], AnnData]]] = {
    ".h5ad": ("HDF5", _read_h5ad),
    ".h5mu": ("HDF5", _read_stored),
    ".zarr": (ZARR, _read_stored),
    ".h5": ("HDF5", read_10x),
    ".loom": ("HDF5", read_loom),
    ".csv": ("text", read_csv),
    ".npz": ("a zip archive", read_npz),
    ".fcs": ("FCS", read_fcs),
}
_WRITERS: dict[str, Callable[[AnnData, Path], None]] = {
    ".h5ad": _write_h5ad,
    ".csv": write_csv,
    ".npz": write_npz,
}
