"""Files that declare far more than they hold, or that take values from other files, are refused with one sentence."""

import io
import zipfile

import anndata as ad
import numpy as np
import pytest

from cloister import files
from cloister.cells import probe
from cloister.cells.files import read_cells, write_cells
from cloister.errors import DataError

h5py = pytest.importorskip("h5py")


@pytest.fixture
def cells(tmp_path):
    adata = ad.AnnData(np.arange(60.0, dtype=np.float32).reshape(12, 5))
    write_cells(adata, tmp_path / "cells.h5ad")
    return tmp_path / "cells.h5ad"


@pytest.fixture(params=[True, False], ids=["probed", "not probed"])
def probed(request):
    return request.param


def refused(path, words, *, probed):
    with pytest.raises(DataError, match=words):
        read_cells(path, probe=probed)


# ---- HDF5 ------------------------------------------------------------------------------------------------------------


def test_an_external_link_is_refused(cells, probed, tmp_path):
    with h5py.File(tmp_path / "other.h5", "w") as other:
        other["values"] = np.ones((12, 2))
    with h5py.File(cells, "r+") as file:
        file["obsm"]["X_other"] = h5py.ExternalLink(str(tmp_path / "other.h5"), "/values")
    refused(cells, "takes values from other files", probed=probed)
    assert probe.verdict(cells) == probe.LINKED


def test_external_storage_is_refused(cells, probed, tmp_path):
    (tmp_path / "raw.bin").write_bytes(np.ones((12, 2)).tobytes())
    with h5py.File(cells, "r+") as file:
        where = [(str(tmp_path / "raw.bin"), 0, h5py.h5f.UNLIMITED)]
        file["obsm"].create_dataset("X_other", (12, 2), "f8", external=where)
    refused(cells, "takes values from other files", probed=probed)


def test_a_virtual_dataset_is_refused(cells, probed, tmp_path):
    with h5py.File(tmp_path / "other.h5", "w") as other:
        other["values"] = np.ones((12, 2))
    layout = h5py.VirtualLayout((12, 2), "f8")
    layout[:] = h5py.VirtualSource(str(tmp_path / "other.h5"), "values", (12, 2))
    with h5py.File(cells, "r+") as file:
        file["obsm"].create_virtual_dataset("X_other", layout)
    refused(cells, "takes values from other files", probed=probed)


def test_many_arrays_that_compress_well_are_refused_by_their_sum(cells, probed):
    """Each is within 10,000 times its storage and below 100 MB; together they would take 2 GB."""
    with h5py.File(cells, "r+") as file:
        for i in range(25):
            made = file["uns"].create_dataset(f"z{i}", (9_000_000,), "f8", compression="gzip", chunks=(9_000_000,))
            made.id.write_direct_chunk((0,), zeros(9_000_000 * 8))
    assert cells.stat().st_size < 4e6
    refused(cells, "declares far larger arrays than a file of", probed=probed)
    assert probe.verdict(cells) == probe.TOO_LARGE


def zeros(count, _made={}):  # noqa: B006 - one chunk for all
    import zlib

    if count not in _made:
        _made[count] = zlib.compress(bytes(count), 9)
    return _made[count]


def test_one_array_behind_many_links_counts_as_often(cells, probed):
    with h5py.File(cells, "r+") as file:
        file["uns"]["a"] = np.zeros(2_000_000)
        for i in range(400):
            file["uns"][f"again{i}"] = file["uns"]["a"]
    refused(cells, "declares far larger arrays", probed=probed)


def test_links_that_go_in_a_circle_are_refused(cells, probed):
    with h5py.File(cells, "r+") as file:
        file["uns"]["me"] = file["uns"]
    refused(cells, "declares far larger arrays", probed=probed)


def test_a_file_as_it_is_written_is_read(cells, probed):
    assert read_cells(cells, probe=probed).shape == (12, 5)


# ---- archives of arrays ----------------------------------------------------------------------------------------------


def archive(path, arrays, compression=zipfile.ZIP_DEFLATED):
    with zipfile.ZipFile(path, "w", compression, compresslevel=9) as out:
        for name, data in arrays.items():
            out.writestr(f"{name}.npy", data)
    return path


def header(shape, dtype="<f8"):
    out = io.BytesIO()
    np.lib.format.write_array_header_1_0(out, {"descr": dtype, "fortran_order": False, "shape": shape})
    return out.getvalue()


def test_an_archive_that_expands_a_thousandfold_is_refused_before_it_is_read(tmp_path, monkeypatch):
    path = archive(tmp_path / "model.npz", {f"a{i}": header((8_000_000,)) + bytes(64_000_000) for i in range(5)})
    assert path.stat().st_size < 4e5
    monkeypatch.setattr(np, "load", lambda *_, **__: pytest.fail("was read"))
    with pytest.raises(DataError, match="declares arrays of 320000640, more than 268435456"):
        files.load_arrays(path)


def test_a_header_that_claims_more_than_its_member_holds_is_refused(tmp_path):
    path = archive(tmp_path / "model.npz", {"a": header((10**10,)) + bytes(100)})
    with pytest.raises(DataError, match="declares arrays of 80000000000"):
        files.load_arrays(path)


def test_the_providers_model_the_adapter_and_cells_are_read_that_way(tmp_path):
    from cloister.models.polynomial import Encoder
    from cloister.workflows.saved_models import load_model

    path = archive(tmp_path / "model.npz", {"meta": header((10**10,)) + bytes(100), "X": header((1,)) + bytes(8)})
    for load in (Encoder.load, load_model, read_cells):
        with pytest.raises(DataError, match="declares arrays of"):
            load(path)
    pytest.importorskip("torch")
    from cloister.models.adapter import Adapted
    from cloister.models.classifier import Network

    for load in (Adapted.load, Network.load):
        with pytest.raises(DataError, match="declares arrays of"):
            load(path)


def test_an_adapter_that_describes_a_huge_network_is_refused_without_its_memory(tmp_path):
    pytest.importorskip("torch")
    import json

    from cloister.models.adapter import Adapted, Config, make

    path = tmp_path / "adapter.npz"
    Adapted(make(Config(2, 4, 2, 4, 1.0)), ("a", "b"), "digest").save(path)
    kept = dict(np.load(path))
    meta = json.loads(kept["meta"].tobytes())
    meta["config"]["bottleneck"] = 10**10
    kept["meta"] = np.frombuffer(json.dumps(meta).encode(), np.uint8)
    np.savez(path, **kept)
    with pytest.raises(DataError, match="is not an adapter of Cloister"):
        Adapted.load(path)
