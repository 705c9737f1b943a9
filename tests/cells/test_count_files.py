"""Files as instruments and pipelines write them, and what may stand behind a file's name."""

import gzip

import h5py
import numpy as np
import pandas as pd
import pytest
from anndata import AnnData
from scipy import io, sparse

from cloister.cells import files as cell_files
from cloister.cells.files import open_cells, read_cells, split_settings, write_cells
from cloister.cells.tables import describe, expression_kind, survey
from cloister.errors import DataError, UsageError

IDS = ["ENSG00000141510", "ENSG00000198851", "ENSG00000177455", "ENSG00000000001"]
SYMBOLS = ["TP53", "CD3E", "CD19", "TP53"]
X = sparse.csr_matrix(np.array([[0, 2, 0, 1], [3, 0, 0, 0], [0, 0, 5, 1.0]]))


def mtx_folder(folder, *, packed=True, kinds=None):
    folder.mkdir()
    io.mmwrite(folder / "matrix.mtx", X.T)
    rows = [f"{a}\t{b}" + (f"\t{kinds[i]}" if kinds else "") for i, (a, b) in enumerate(zip(IDS, SYMBOLS, strict=True))]
    (folder / "features.tsv").write_text("\n".join(rows) + "\n")
    (folder / "barcodes.tsv").write_text("AAA-1\nNA\nCCC-1\n")
    if packed:
        for file in list(folder.iterdir()):
            (folder / f"{file.name}.gz").write_bytes(gzip.compress(file.read_bytes()))
            file.unlink()
    return folder


def ten_x(path, *, kinds=None, **changed):
    with h5py.File(path, "w") as file:
        group = file.create_group("matrix")
        arrays = {"data": X.data, "indices": X.indices, "indptr": X.indptr, "shape": [4, 3]} | changed
        for name, values in arrays.items():
            group[name] = values
        group["barcodes"] = np.array(["AAA-1", "BBB-1", "CCC-1"], "S")
        group["features/id"], group["features/name"] = np.array(IDS, "S"), np.array(SYMBOLS, "S")
        group["features/feature_type"] = np.array(kinds or ["Gene Expression"] * 4, "S")
    return path


def loom(path):
    with h5py.File(path, "w") as file:
        file["matrix"] = X.T.toarray()
        file["row_attrs/Gene"], file["row_attrs/Accession"] = np.array(SYMBOLS, "S"), np.array(IDS, "S")
        file["col_attrs/CellID"] = np.array(["a", "b", "c"], "S")
        file["col_attrs/cell_type"] = np.array(["T", "B", "T"], "S")
        file["layers/spliced"] = 2 * X.T.toarray()
    return path


def check_genes(adata):
    assert adata.var_names.tolist() == [*SYMBOLS[:3], IDS[3]]  # of two genes with one symbol, the second has its id
    assert adata.var["gene_ids"].tolist() == IDS
    assert (adata.X != X).nnz == 0


@pytest.mark.parametrize("packed", [True, False])
def test_a_folder_of_cellranger(tmp_path, packed):
    adata = read_cells(mtx_folder(tmp_path / "run", packed=packed))
    check_genes(adata)
    assert adata.obs_names.tolist() == ["AAA-1", "NA", "CCC-1"]
    assert expression_kind(adata) == "counts"


def test_a_10x_file(tmp_path):
    check_genes(open_cells(ten_x(tmp_path / "filtered.h5")))
    kinds = ["Gene Expression", "Gene Expression", "Gene Expression", "Antibody Capture"]
    assert read_cells(ten_x(tmp_path / "cite.h5", kinds=kinds)).var_names.tolist() == SYMBOLS[:3]
    assert read_cells(mtx_folder(tmp_path / "cite", kinds=kinds)).n_vars == 3


def test_a_loom_file(tmp_path):
    adata = read_cells(loom(tmp_path / "cells.loom"))
    check_genes(adata)
    assert adata.obs["cell_type"].tolist() == ["T", "B", "T"]
    assert (adata.layers["spliced"] != 2 * X).nnz == 0
    write_cells(adata, tmp_path / "again.h5ad")


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda f: ten_x(f / "a.h5", shape=[4, 9]), "another size than its names"),
        (lambda f: ten_x(f / "a.h5", indices=X.indices + 7), "damaged or cut short"),
        (lambda f: (f / "a.h5").write_bytes(b"no") and f / "a.h5", "looks like text"),
        (lambda f: (mtx_folder(f / "a") and (f / "a" / "barcodes.tsv.gz").unlink()) or f / "a", "no barcodes.tsv.gz"),
        (lambda f: mtx_folder(f / "a", packed=False) and (f / "a" / "matrix.mtx").write_text("1 1") and f / "a",
         "not a matrix in Matrix Market format"),
        (lambda f: mtx_folder(f / "a", packed=False)
         and (f / "a" / "matrix.mtx").write_text("%%MatrixMarket matrix coordinate real general\n9 9 999999999999\n")
         and f / "a", "far more than a file of its size"),
        (lambda f: mtx_folder(f / "a", packed=False) and (f / "a" / "barcodes.tsv").write_text("A\n") and f / "a",
         "4 features and 1 barcodes"),
    ],
)  # fmt: skip
def test_damaged_files_are_one_sentence(tmp_path, make, says):
    with pytest.raises(DataError, match=says):
        read_cells(make(tmp_path))


@pytest.mark.parametrize(
    "make", [lambda f: ten_x(f / "a.h5"), lambda f: loom(f / "a.loom"), lambda f: mtx_folder(f / "a")]
)
def test_mutated_files_are_read_or_one_sentence(tmp_path, make):
    rng = np.random.default_rng(5)
    path = make(tmp_path)
    files = [path] if path.is_file() else sorted(path.iterdir())
    sentences = []
    for _ in range(25):
        file = files[rng.integers(len(files))]
        whole = file.read_bytes()
        damaged = bytearray(whole[: rng.integers(1, len(whole))] if rng.random() < 0.3 else whole)
        for at in rng.integers(0, len(damaged), 8):
            damaged[at] = rng.integers(256)
        file.write_bytes(damaged)
        try:
            read_cells(path)
        except DataError as e:
            sentences.append(str(e))
        file.write_bytes(whole)
    assert len(sentences) > 3
    assert not any("\n" in text for text in sentences)


def test_hdf5_kinds_are_probed(tmp_path):
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["data"] = np.arange(3.0)
    path = ten_x(tmp_path / "a.h5")
    with h5py.File(path, "a") as file:
        file["elsewhere"] = h5py.ExternalLink(str(tmp_path / "other.h5"), "/data")
    with pytest.raises(DataError, match="takes values from other files"):
        read_cells(path)
    path = loom(tmp_path / "a.loom")
    with h5py.File(path, "a") as file:
        file["elsewhere"] = h5py.ExternalLink(str(tmp_path / "other.h5"), "/data")
    with pytest.raises(DataError, match="takes values from other files"):
        read_cells(path)


# ---- settings --------------------------------------------------------------------------------------------------------


@pytest.fixture
def cells(tmp_path):
    adata = AnnData(np.log1p(X.toarray()), obs=pd.DataFrame({"CellType": ["T", "B", "T"]}, index=list("abc")))
    adata.var_names = IDS
    adata.var["symbol"] = ["TP53", "CD3E", "", "X4"]
    adata.layers["counts"] = X.copy()
    adata.obsm["X_own"] = np.ones((3, 2))
    adata.raw = AnnData(7 * X, obs=adata.obs, var=pd.DataFrame(index=["r1", "r2", "r3", "r4"]))
    write_cells(adata, tmp_path / "cells.h5ad")
    return tmp_path / "cells.h5ad"


@pytest.mark.parametrize("on_disk", [False, True])
def test_settings_behind_a_name(cells, on_disk, monkeypatch, tmp_path):
    if on_disk:
        monkeypatch.setattr(cell_files, "IN_MEMORY", 0)
    adata = open_cells(f"{cells}?layer=counts&label=CellType&genes=symbol&obsm.X_pca=X_own")
    assert expression_kind(adata) == "counts"
    assert survey(adata).kind == "counts"
    assert adata.obs["cell_type"].tolist() == ["T", "B", "T"]
    assert adata.var_names.tolist() == ["TP53", "CD3E", IDS[2], "X4"]
    assert adata.var["original_name"].tolist() == IDS
    assert adata.obsm["X_pca"].shape == (3, 2)
    assert survey(adata.copy()).kind == "counts"
    write_cells(adata, tmp_path / "out.h5ad")
    assert read_cells(tmp_path / "out.h5ad").obs["cell_type"].tolist() == ["T", "B", "T"]
    raw = open_cells(f"{cells}?raw=1")
    assert raw.var_names.tolist() == ["r1", "r2", "r3", "r4"]
    assert survey(raw).largest == 35
    assert survey(open_cells(f"{cells}?kind=counts")).kind == "counts"
    assert expression_kind(open_cells(cells)) == "log"


@pytest.mark.parametrize(
    ("settings", "error", "says"),
    [
        ("layer=raw", DataError, r"layers\['raw'\] is missing; there is 'counts'"),
        ("label=celltype", DataError, r"obs\['celltype'\] is missing; there is 'CellType'"),
        ("genes=name", DataError, r"var\['name'\] is missing; there is 'symbol'"),
        ("kind=odd", DataError, "kind must be one of counts, log, scaled"),
        ("layers=counts", UsageError, "'layers=counts' behind .* is not a setting; known are raw, layer"),
        ("raw=maybe", UsageError, "is not a setting"),
    ],
)
def test_settings_that_are_none(cells, settings, error, says):
    with pytest.raises(error, match=says):
        open_cells(f"{cells}?{settings}")


def test_a_file_whose_name_has_a_question_mark(cells, tmp_path):
    odd = tmp_path / "what?layer=x.h5ad"
    odd.write_bytes(cells.read_bytes())
    assert read_cells(odd).n_obs == 3
    assert split_settings(odd)[0] == str(odd)


# ---- fractional counts -----------------------------------------------------------------------------------------------


def counts(n=200, genes=80, seed=0):
    rng = np.random.default_rng(seed)
    return sparse.csr_matrix(rng.negative_binomial(1.0, 0.4, (n, genes)) * (rng.random((n, genes)) < 0.4)).astype(float)


def soup(x, rho):
    """SoupX without rounding: what floats in every droplet is subtracted."""
    profile = np.asarray(x.sum(0)).ravel() / x.sum()
    rows, columns = x.nonzero()
    made = x.copy()
    made.data = np.maximum(made.data - rho * np.asarray(x.sum(1)).ravel()[rows] * profile[columns], 0)
    return made


def shared(x, part):
    """alevin and RSEM: some reads are divided among genes."""
    rng = np.random.default_rng(1)
    made = x.copy()
    at = rng.random(made.nnz) < part
    made.data[at] *= rng.random(at.sum())
    return made


def scaled_to(x, total):
    return sparse.csr_matrix(sparse.diags(total / np.maximum(1, np.asarray(x.sum(1)).ravel())) @ x)


def mapped(x, fn):
    made = x.copy()
    made.data = fn(made.data).astype(np.float32)
    return made


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (counts(), "counts"),
        (soup(counts(), 0.05), "counts"),
        (shared(counts(), 0.2), "counts"),
        (shared(counts(), 0.4), "counts"),
        (scaled_to(counts(), 1e4), "log"),
        (mapped(scaled_to(counts(), 1e4), np.log1p), "log"),
        (mapped(counts(), np.log1p), "log"),
        (mapped(counts(), lambda x: np.log2(1 + x)), "log"),
        (mapped(counts(), lambda x: np.log10(1 + x)), "log"),
        (mapped(counts(), lambda x: x - 1.5), "scaled"),
    ],
)
def test_fractional_counts_are_told_from_logarithms(values, kind):
    adata = AnnData(values)
    assert survey(adata).kind == kind
    assert expression_kind(adata) == kind


def test_describe_says_that_fractions_are_taken_as_counts():
    assert "taken as counts (SoupX, alevin, RSEM)" in " ".join(describe(AnnData(soup(counts(), 0.05)))["warnings"])
    assert "taken as counts" not in " ".join(describe(AnnData(counts()))["warnings"])
