import sys

import numpy as np
import pandas as pd
import pytest
from anndata import AnnData
from anndata.io import write_h5ad
from scipy import sparse

from cloister.cells.tables import check_cells, is_on_disk, read_cells, write_cells
from cloister.errors import CloisterError, DataError, MissingExtra, ParameterError

COUNTS = np.array([[0, 3, 0], [1, 0, 0], [0, 0, 2], [5, 1, 0]], dtype=np.float32)


def cells(X=None):
    obs = pd.DataFrame(
        {"cell_type": pd.Categorical(["T", "B", None, "T"]), "score": [0.5, 1.25, 2.0, -1.0]},
        index=["c1", "c2", "c3", "c4"],
    )
    adata = AnnData(X=sparse.csr_matrix(COUNTS) if X is None else X, obs=obs, var=pd.DataFrame(index=list("ABC")))
    adata.obsm["X_pca"] = np.arange(8, dtype=np.float32).reshape(4, 2)
    adata.layers["log"] = adata.X.copy()
    return adata


def dense(X):
    return X.toarray() if sparse.issparse(X) else np.asarray(X)


@pytest.mark.parametrize("suffix", [".h5ad", ".csv", ".npz", ".H5AD"])
@pytest.mark.parametrize("storage", [sparse.csr_matrix, sparse.csc_matrix, np.asarray])
def test_what_is_written_comes_back(tmp_path, suffix, storage):
    path = tmp_path / f"cells{suffix}"
    write_cells(cells(storage(COUNTS)), path)
    back = read_cells(path)
    np.testing.assert_array_equal(dense(back.X), COUNTS)
    assert list(back.var_names) == ["A", "B", "C"]
    assert list(back.obs_names) == ["c1", "c2", "c3", "c4"]
    assert back.obs["cell_type"].tolist()[:2] == ["T", "B"]
    assert back.obs["cell_type"].isna().tolist() == [False, False, True, False]
    assert back.obs["score"].tolist() == [0.5, 1.25, 2.0, -1.0]
    if suffix != ".csv":
        assert sparse.issparse(back.X) == (storage is not np.asarray)
        np.testing.assert_array_equal(back.obsm["X_pca"], [[0, 1], [2, 3], [4, 5], [6, 7]])
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_a_backed_file_is_read_and_written(tmp_path):
    write_cells(cells(), tmp_path / "a.h5ad")
    backed = read_cells(tmp_path / "a.h5ad", backed=True)
    assert is_on_disk(backed.X)
    assert is_on_disk(backed.layers["log"])
    for name in ("b.h5ad", "b.csv", "b.npz", "a.h5ad"):  # the last one is the file it is backed by
        write_cells(backed, tmp_path / name)
        np.testing.assert_array_equal(dense(read_cells(tmp_path / name).X), COUNTS)
    np.testing.assert_array_equal(dense(backed.X[:]), COUNTS)
    with pytest.raises(ParameterError, match="backed=True"):
        read_cells(tmp_path / "b.csv", backed=True)


def test_csv_tells_numbers_from_labels(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("\ufeffcell,CD3E,donor,Cd19,qc,CD3E\nNA,1,d1,0.5,True,7\n2,0,d2,1.5,False,8\n", encoding="utf-8")
    adata = read_cells(path)
    assert list(adata.var_names) == ["CD3E", "Cd19", "CD3E"]  # a repeated name is kept for check_cells to name
    assert list(adata.obs_names) == ["NA", "2"]
    assert dense(adata.X).tolist() == [[1, 0.5, 7], [0, 1.5, 8]]
    assert adata.obs["donor"].tolist() == ["d1", "d2"]
    assert adata.obs["qc"].tolist() == [True, False]
    with pytest.raises(DataError, match="'CD3E'"):
        check_cells(adata)


def test_csv_of_r_has_no_name_above_the_cells(tmp_path):
    path = tmp_path / "r.csv"
    path.write_text('"A","B"\n"c1",1,2\n"c2",3,4\n')
    adata = read_cells(path)
    assert (list(adata.var_names), list(adata.obs_names)) == (["A", "B"], ["c1", "c2"])
    assert dense(adata.X).tolist() == [[1, 2], [3, 4]]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("cell;A;B\nc1;1;2\n", "separated by commas"),
        ("cell,A,B\n", "no cells"),
        ("cell,A,B\nc1,1,Zürich\n", "UTF-8"),
        ("cell,A,B\nc1,1,2,\nc2,1,2,\n", "names 3 columns but has 4"),
        ("cell,A,B,C\nc1,1,2\n", "names 4 columns but has 3"),
        ("cell,A\nc1,1\nc2,1,2,3\n", "damaged"),
        ("cell,A,B\nc1,x,y\nc2,z,w\n", "no column of numbers"),
        ("c1,0.5,2.0\nc2,1.5,3.5\n", "must name the genes"),
        ("c1,0,0,7\nc2,1,3,5\n", "must name the genes"),
        ("A,B,C\n0.5,1,2\n0.7,1,2\n", "must name the cells"),
        ("cell,A,B\nc1,1,2\nc2,O,3\nc3,4,5\nc4,4,5\n", "column 'A' holds numbers, but not in line 3"),
    ],
)
def test_csv_says_what_is_wrong(tmp_path, text, says):
    (tmp_path / "a.csv").write_text(text, encoding="latin-1")
    with pytest.raises(DataError, match=says):
        read_cells(tmp_path / "a.csv")


def test_npz_arrays_go_where_their_shape_belongs(tmp_path):
    path = tmp_path / "a.npz"
    np.savez(
        path,
        X=COUNTS,
        y=np.array([0, 1, 0, 1]),
        markers=np.array(["CD3", "CD4", "CD8"]),
        channels=np.array([b"Nd1", b"Nd2", b"Nd3"]),
        donor_names=np.array(["d0", "d1"]),
        pca=np.ones((4, 2)),
        kind=np.array(["a", "", "b", "b"]),
    )
    adata = read_cells(path)
    assert list(adata.var_names) == ["CD3", "CD4", "CD8"]
    assert adata.var["channels"].tolist() == ["Nd1", "Nd2", "Nd3"]
    assert adata.obs["y"].tolist() == [0, 1, 0, 1]
    assert adata.obs["kind"].isna().tolist() == [False, True, False, False]
    assert adata.uns["donor_names"].tolist() == ["d0", "d1"]
    assert adata.obsm["pca"].shape == (4, 2)


@pytest.mark.parametrize("storage", [sparse.csr_matrix, sparse.csc_matrix, sparse.coo_matrix])
def test_npz_of_scipy(tmp_path, storage):
    sparse.save_npz(tmp_path / "a.npz", storage(COUNTS))
    adata = read_cells(tmp_path / "a.npz")
    assert sparse.issparse(adata.X)
    np.testing.assert_array_equal(dense(adata.X), COUNTS)


class Trap:
    """Set off when it is unpickled."""

    sprung = False

    def __reduce__(self):
        return (setattr, (Trap, "sprung", True))


def test_nothing_is_unpickled(tmp_path):
    np.savez(tmp_path / "a.npz", X=COUNTS, y=np.array([Trap()] * 4, dtype=object))
    np.savez(tmp_path / "b.npz", X=np.array([[Trap()]], dtype=object))
    for name in ("a.npz", "b.npz"):
        with pytest.raises(DataError, match="cannot be read"):
            read_cells(tmp_path / name)
    assert not Trap.sprung


@pytest.mark.parametrize(
    ("arrays", "says"),
    [
        ({"data": COUNTS}, "must hold an array 'X', found 'data'"),
        ({"X": COUNTS[0]}, "1 dimensions"),
        ({"X": COUNTS.astype(str)}, "table of numbers"),
        ({"X": COUNTS[:0]}, "0 cells and 3 genes"),
        ({"X": COUNTS[:, :0]}, "4 cells and 0 genes"),
    ],
)
def test_npz_says_what_is_wrong(tmp_path, arrays, says):
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(DataError, match=says):
        read_cells(tmp_path / "a.npz")


def test_fcs_is_read_by_marker(tmp_path):
    flowio = pytest.importorskip("flowio")
    path = tmp_path / "a.fcs"
    with path.open("wb") as file:
        names, markers = ["FSC-A", "Nd142Di", "Nd143Di", "Nd144Di"], ["", "CD19", "CD3", "CD3"]
        flowio.create_fcs(file, np.arange(12.0), names, opt_channel_names=markers)
    adata = read_cells(path)
    assert list(adata.var_names) == ["FSC-A", "CD19", "Nd143Di", "Nd144Di"]  # CD3 alone would be ambiguous
    np.testing.assert_array_equal(adata.X, np.arange(12.0).reshape(3, 4))
    path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(DataError, match="damaged or cut short"):
        read_cells(path)


def test_fcs_without_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "flowio", None)
    (tmp_path / "a.fcs").write_bytes(b"FCS3.1    ")
    with pytest.raises(MissingExtra, match=r"cloister\[fcs\]"):
        read_cells(tmp_path / "a.fcs")


def test_a_file_that_is_not_there_or_not_what_it_says(tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        read_cells(tmp_path / "none.h5ad")
    with pytest.raises(DataError, match="must be one of .h5ad, .h5mu, .zarr, .csv, .npz, .fcs"):
        read_cells(tmp_path / "cells.loom")
    (tmp_path / "folder.h5ad").mkdir()
    with pytest.raises(DataError, match="not a file"):
        read_cells(tmp_path / "folder.h5ad")
    write_cells(cells(), tmp_path / "good.h5ad")
    for suffix in (".h5ad", ".csv", ".npz", ".fcs"):
        path = tmp_path / f"a{suffix}"
        path.touch()
        with pytest.raises(DataError, match="is empty"):
            read_cells(path)
        path.write_bytes(b"\x1f\x8b" + bytes(100))
        with pytest.raises(DataError, match="looks like a gzip file"):
            read_cells(path)
        if suffix != ".h5ad":
            path.write_bytes((tmp_path / "good.h5ad").read_bytes())
            with pytest.raises(DataError, match="looks like HDF5"):
                read_cells(path)


def test_h5ad_without_annotations_or_cells(tmp_path):
    import h5py

    with h5py.File(tmp_path / "tenx.h5ad", "w") as file:
        file["matrix/data"] = np.zeros(3)
    with pytest.raises(DataError, match="HDF5 but holds no AnnData"):
        read_cells(tmp_path / "tenx.h5ad")
    write_h5ad(tmp_path / "none.h5ad", cells()[:0].copy())
    with pytest.raises(DataError, match="0 cells and 3 genes"):
        read_cells(tmp_path / "none.h5ad")


@pytest.mark.parametrize("keep", [9, 100, 2000, 0.5, 0.99])
@pytest.mark.parametrize("backed", [False, True])
def test_h5ad_cut_short(tmp_path, keep, backed):
    path = tmp_path / "a.h5ad"
    write_cells(cells(), path)
    content = path.read_bytes()
    path.write_bytes(content[: keep if isinstance(keep, int) else int(keep * len(content))])
    with pytest.raises(DataError, match="damaged or cut short"):
        read_cells(path, backed=backed)


@pytest.mark.parametrize(("array", "at", "value"), [("indices", 1, 77), ("indices", 1, -1), ("indptr", 1, 99)])
def test_h5ad_with_an_index_out_of_range(tmp_path, array, at, value):
    import h5py

    path = tmp_path / "a.h5ad"
    write_cells(cells(), path)
    with h5py.File(path, "r+") as file:
        file[f"X/{array}"][at] = value
    with pytest.raises(DataError, match="damaged"):
        read_cells(path)
    with pytest.raises(DataError, match="damaged"):
        check_cells(read_cells(path, backed=True))


@pytest.mark.parametrize("backed", [False, True])
def test_h5ad_with_a_damaged_piece_of_any_array(tmp_path, backed):
    import h5py

    whole, path = tmp_path / "whole.h5ad", tmp_path / "a.h5ad"
    write_cells(cells(), whole)
    pieces = {}
    with h5py.File(whole) as file:
        file.visititems(lambda name, item: pieces.update({name: item} if hasattr(item, "chunks") else {}))
        pieces = {
            name: item.id.get_chunk_info(0)
            for name, item in pieces.items()
            if item.chunks and name.startswith(("X", "obs/", "var/", "layers"))
        }
    names = "var/_index" if "var/_index" in pieces else "var/_index/values"  # as pandas 3 stores text
    assert {"X/data", "X/indices", "obs/cell_type/codes", names, "layers/log/data"} <= set(pieces)
    for piece in pieces.values():
        damaged = bytearray(whole.read_bytes())
        middle = piece.byte_offset + piece.size // 2
        damaged[middle : middle + 4] = b"\xff\xfe\xfd\xfc"
        path.unlink(missing_ok=True)
        path.write_bytes(damaged)
        with pytest.raises(DataError, match="damaged"):
            check_cells(read_cells(path, backed=backed))


def test_h5ad_that_declares_more_than_it_holds(tmp_path):
    import h5py

    write_cells(cells(), tmp_path / "a.h5ad")
    with h5py.File(tmp_path / "a.h5ad", "r+") as file:
        del file["layers/log/data"]
        file.create_dataset("layers/log/data", shape=(10**12,), dtype="f4", chunks=(100,))
    with pytest.raises(DataError, match="declares far larger arrays"):
        read_cells(tmp_path / "a.h5ad")


def test_entries_stored_twice_are_added_up(tmp_path):
    twice = sparse.csr_matrix((np.ones(3), [1, 1, 0], [0, 2, 3]), shape=(2, 2))
    write_h5ad(tmp_path / "a.h5ad", AnnData(X=twice))
    assert read_cells(tmp_path / "a.h5ad").X.data.tolist() == [2, 1]


def test_repeated_and_numbered_names_are_read_in_silence(tmp_path):
    adata = cells()
    adata.obs_names = ["c", "c", "d", "e"]
    write_h5ad(tmp_path / "a.h5ad", adata)
    assert list(read_cells(tmp_path / "a.h5ad").obs_names) == ["c", "c", "d", "e"]


@pytest.mark.parametrize("suffix", [".h5ad", ".csv", ".npz"])
def test_damaged_bytes_are_a_data_error_or_still_readable(tmp_path, suffix):
    path = tmp_path / f"a{suffix}"
    write_cells(cells(), path)
    content = np.frombuffer(path.read_bytes(), dtype=np.uint8)
    rng = np.random.default_rng(20)
    refused = 0
    for _ in range(40):
        damaged = content.copy()
        at = rng.choice(len(damaged), size=max(1, len(damaged) // 100), replace=False)
        damaged[at] = rng.integers(0, 256, size=len(at))
        path.write_bytes(damaged.tobytes())
        try:
            check_cells(read_cells(path))
        except CloisterError:
            refused += 1
    assert refused >= 20


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "a.npz"
    write_cells(cells(), path)
    before = path.read_bytes()

    def full_disk(file, **arrays):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez_compressed", full_disk)
    with pytest.raises(DataError, match=r"cannot be written \(No space left on device\)"):
        write_cells(cells(), path)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["a.npz"]


def test_what_cannot_be_written_is_said(tmp_path):
    adata = cells()
    adata.uns["thing"] = object()
    with pytest.raises(DataError, match="cannot be stored as .h5ad"):
        write_cells(adata, tmp_path / "a.h5ad")
    with pytest.raises(DataError, match="folder .* does not exist"):
        write_cells(cells(), tmp_path / "none" / "a.h5ad")
    with pytest.raises(DataError, match="must be one of .h5ad, .csv, .npz"):
        write_cells(cells(), tmp_path / "a.fcs")
    (tmp_path / "b.h5ad").mkdir()
    with pytest.raises(DataError, match="is a folder"):
        write_cells(cells(), tmp_path / "b.h5ad")
    with pytest.raises(DataError, match="X is missing"):
        write_cells(AnnData(obs=cells().obs), tmp_path / "a.csv")
    assert [file.name for file in tmp_path.iterdir()] == ["b.h5ad"]


@pytest.mark.parametrize("view", [False, True])
def test_a_column_without_a_single_label_can_be_written(tmp_path, view):
    adata = AnnData(np.ones((4, 2)))
    adata.obs["label"] = np.array([None] * 4, dtype=object)
    adata.obs["some"] = np.array(["a", None, None, "b"], dtype=object)
    write_cells(adata[:3] if view else adata, tmp_path / "a.h5ad")
    back = read_cells(tmp_path / "a.h5ad").obs
    assert back["label"].isna().all()
    assert back["some"].isna().sum() == 2
