"""A disk that is full while cells are written ends in a sentence; HDF5 alone ends the whole process."""

import subprocess
import sys

import anndata as ad
import numpy as np
import pytest

from cloister.cells.files import read_cells, write_cells
from cloister.cells.safe_hdf5 import PatientFile, open_hdf5

FULL = """
import resource, sys
import anndata as ad, numpy as np
from cloister.cells.files import open_cells, write_cells
from cloister.errors import DataError
adata = ad.AnnData(np.random.default_rng(0).normal(size=(300, 200)).astype(np.float32))
if sys.argv[3] == "copied":
    from cloister.cells import files
    files.IN_MEMORY = 0
    write_cells(adata, sys.argv[1] + ".old.h5ad")
    adata = open_cells(sys.argv[1] + ".old.h5ad")
    adata.obsm["new"] = np.random.default_rng(1).normal(size=(300, 200))
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), int(sys.argv[2])))  # as if the disk ended there
if sys.argv[3] == "the library alone":
    from anndata.io import write_h5ad
    write_h5ad(sys.argv[1], adata, compression="gzip")
try:
    write_cells(adata, sys.argv[1])
except DataError as e:
    sys.exit(str(e))
"""


def write_on_a_full_disk(path, size, how):
    command = [sys.executable, "-c", FULL, str(path), str(size), how]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(("size", "how"), [(60_000, "new"), pytest.param(260_000, "copied", marks=pytest.mark.slow)])
def test_a_full_disk_ends_in_a_sentence(tmp_path, size, how):
    done = write_on_a_full_disk(tmp_path / "cells.h5ad", size, how)
    assert done.returncode == 1, done.stderr
    assert done.stderr.strip() == f"{tmp_path / 'cells.h5ad'} cannot be written (File too large)."
    assert [f.name for f in tmp_path.iterdir() if not f.name.endswith(".old.h5ad")] == []  # nothing half-written


@pytest.mark.slow
def test_the_library_alone_ends_the_process(tmp_path):
    assert write_on_a_full_disk(tmp_path / "cells.h5ad", 60_000, "the library alone").returncode < 0


def test_what_is_written_is_what_the_library_writes(tmp_path):
    adata = ad.AnnData(np.arange(12.0, dtype=np.float32).reshape(4, 3))
    adata.obs["label"] = ["a", "b", None, "a"]
    adata.raw = adata.copy()
    adata.layers["twice"] = adata.X * 2
    adata.uns["note"] = {"x": "y"}
    write_cells(adata, tmp_path / "a.h5ad")
    again = read_cells(tmp_path / "a.h5ad")
    np.testing.assert_array_equal(again.X, adata.X)
    np.testing.assert_array_equal(again.raw.X, adata.raw.X)
    np.testing.assert_array_equal(again.layers["twice"], adata.layers["twice"])
    assert again.uns["note"] == {"x": "y"}
    assert list(again.obs["label"].astype(object).where(again.obs["label"].notna(), None)) == ["a", "b", None, "a"]


def test_the_first_error_is_the_one_that_is_raised(tmp_path, monkeypatch):
    def full(self, data):
        self.error = self.error or OSError(28, "No space left on device")
        return len(data)

    monkeypatch.setattr(PatientFile, "write", full)
    with pytest.raises(OSError, match="No space left"), open_hdf5(tmp_path / "a.h5", "w") as file:
        file["x"] = np.zeros(3)


def test_an_error_of_the_block_is_its_own(tmp_path):
    with pytest.raises(KeyError, match="mine"), open_hdf5(tmp_path / "a.h5", "w"):
        raise KeyError("mine")
