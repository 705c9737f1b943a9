"""Cells that stay on disk are what they would be in memory; what is written is a copy with the result in it."""

import shutil
import warnings
from pathlib import Path

import anndata as ad
import h5py
import numpy as np
import pandas as pd
import pytest
from anndata import AnnData
from scipy import sparse

from cloister.cells import tables as cells
from cloister.cells import values as cell_values
from cloister.cells.demo import demo_sites
from cloister.cells.files import open_cells, read_cells, write_cells
from cloister.cells.stored import StoredCells
from cloister.errors import DataError
from cloister.rehearsal.rehearsal import rehearse
from cloister.rehearsal.results import save_run
from cloister.testing import fixed_entropy

N, GENES = 60, 40


def made(seed=0, n=N, form=sparse.csr_matrix):
    rng = np.random.default_rng(seed)
    X = rng.poisson(0.4, (n, GENES)).astype(np.float32)
    obs = pd.DataFrame({"cell_type": pd.Categorical(rng.choice(["T", "B"], n))}, index=[f"c{i}" for i in range(n)])
    adata = AnnData(form(X), obs=obs, var=pd.DataFrame(index=[f"g{i}" for i in range(GENES)]))
    adata.layers["log"] = form(np.log1p(X))
    adata.obsm["X_pca"] = rng.normal(size=(n, 3))
    adata.uns["note"] = {"by": "hand"}
    adata.raw = adata[:, :30].copy()
    return adata


def dense(X):
    X = X[:] if cells.is_on_disk(X) else X
    return X.toarray() if sparse.issparse(X) else np.asarray(X)


def write_mudata(path, **modalities):
    """A file as mudata writes it: every modality is an AnnData below `mod`."""
    with h5py.File(path, "w") as file:
        for name in ("obs", "var"):
            ad.io.write_elem(file, name, pd.DataFrame(index=["a"]))
        for name, adata in modalities.items():
            ad.io.write_elem(file, f"mod/{name}", adata)


def write_zarr(path, version=3):
    with ad.settings.override(zarr_write_format=version), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that format 2 is not for ever
        made().write_zarr(path)


@pytest.fixture(params=["a.h5ad", "a.zarr", "old.zarr", "a.h5mu", "a.h5mu:rna"])
def name(request, tmp_path):
    path = tmp_path / request.param.split(":")[0]
    if path.suffix == ".h5mu":
        others = {"prot": made(1)} if ":" in request.param else {}
        write_mudata(path, rna=made(), **others)
    elif path.suffix == ".zarr":
        write_zarr(path, 2 if path.stem == "old" else 3)
    else:
        write_cells(made(), path)
    return str(tmp_path / request.param)


def same(found, wanted):
    np.testing.assert_array_equal(dense(found.X), dense(wanted.X))
    assert found.obs_names.tolist() == wanted.obs_names.tolist()
    assert found.var_names.tolist() == wanted.var_names.tolist()
    pd.testing.assert_frame_equal(found.obs, wanted.obs, check_categorical=False, check_dtype=False)
    np.testing.assert_array_equal(dense(found.layers["log"]), dense(wanted.layers["log"]))
    np.testing.assert_array_equal(found.obsm["X_pca"], wanted.obsm["X_pca"])
    assert found.uns["note"] == {"by": "hand"}


def test_on_disk_loaded_and_copied_are_the_same(name, tmp_path):
    on_disk, loaded = read_cells(name, backed=True), read_cells(name)
    assert isinstance(on_disk, StoredCells)
    assert cells.is_on_disk(on_disk.X)
    assert cells.is_on_disk(on_disk.layers["log"])
    assert sparse.issparse(loaded.X)
    for adata in (on_disk, loaded, on_disk.to_memory(), on_disk.copy()):
        same(adata, made())
    np.testing.assert_array_equal(dense(loaded.raw.X), dense(made().raw.X))
    write_cells(on_disk, tmp_path / "copy.h5ad")
    back = read_cells(tmp_path / "copy.h5ad")
    same(back, made())
    np.testing.assert_array_equal(dense(back.raw.X), dense(made().raw.X))


def test_results_go_into_the_copy_and_the_file_stays_as_it_is(name, tmp_path):
    before = made()
    adata = read_cells(name, backed=True)
    adata.obs["score"] = np.arange(N) / 7
    adata.obsm["X_new"] = np.ones((N, 2))
    adata.varm["loadings"] = np.ones((GENES, 2))
    adata.uns["cloister"] = {"edges": np.arange(3.0)}
    adata.layers["twice"] = cells.map_values(adata, lambda v, at: 2 * v)
    del adata.obsm["X_pca"]
    write_cells(adata, tmp_path / "out.h5ad")
    found = ad.read_h5ad(tmp_path / "out.h5ad")  # anndata's own reader
    np.testing.assert_array_equal(dense(found.layers["twice"]), 2 * dense(before.X))
    np.testing.assert_array_equal(found.obs["score"], np.arange(N) / 7)
    assert found.obs["cell_type"].tolist() == before.obs["cell_type"].tolist()
    assert set(found.obsm) == {"X_new"}
    assert set(found.varm) == {"loadings"}
    assert found.uns["cloister"]["edges"].tolist() == [0, 1, 2]
    assert found.uns["note"] == {"by": "hand"}
    same(read_cells(name), before)


def test_raw_is_a_part(tmp_path):
    write_cells(made(), tmp_path / "a.h5ad")
    raw = read_cells(tmp_path / "a.h5ad:raw", backed=True)
    assert raw.shape == (N, 30)
    np.testing.assert_array_equal(dense(raw.X), dense(made().X)[:, :30])
    raw.obs["score"] = 1.0
    write_cells(raw, tmp_path / "b.h5ad")
    again = read_cells(tmp_path / "b.h5ad")
    assert again.shape == (N, 30)
    assert again.obs["score"].tolist() == [1.0] * N
    np.testing.assert_array_equal(dense(again.X), dense(raw.X))


def test_small_files_are_loaded_and_large_ones_stay_on_disk(tmp_path, monkeypatch):
    write_cells(made(), tmp_path / "a.h5ad")
    assert sparse.issparse(open_cells(tmp_path / "a.h5ad").X)
    monkeypatch.setattr("cloister.cells.files.IN_MEMORY", 1000)
    assert cells.is_on_disk(open_cells(tmp_path / "a.h5ad").X)


@pytest.mark.parametrize("form", [sparse.csr_matrix, sparse.csc_matrix, np.asarray])
@pytest.mark.parametrize("backed", [False, True])
def test_chunks_are_all_cells_in_their_order(form, backed, tmp_path):
    write_cells(made(form=form), tmp_path / "a.h5ad")
    adata = read_cells(tmp_path / "a.h5ad", backed=backed)
    seen = list(cells.chunks(adata, "log", entries=7 * GENES))
    assert [rows.stop - rows.start for rows, _ in seen] == [7] * 8 + [4]
    assert all(block.format == "csr" for _, block in seen)
    np.testing.assert_array_equal(sparse.vstack([b for _, b in seen]).toarray(), dense(made().layers["log"]))


# ---- workflows from disk, as from memory -----------------------------------------------------------------------------


def stream_everything(monkeypatch):
    """Every file stays on disk, and is read in pieces that are small beside it."""
    monkeypatch.setattr("cloister.cells.files.IN_MEMORY", 0)
    monkeypatch.setitem(cell_values.blocks.__kwdefaults__, "entries", 50_000)
    monkeypatch.setattr(cell_values, "_STORED", 3000)
    monkeypatch.setattr("cloister.workflows.common.gene_moments.BLOCK", 20_000)


@pytest.fixture
def paths(tmp_path, monkeypatch):
    sites = demo_sites()
    for site, adata in sites.items():
        write_cells(adata, tmp_path / f"{site}.h5ad")
    stream_everything(monkeypatch)
    return {site: tmp_path / f"{site}.h5ad" for site in sites}


OPTIONS = {
    "bin-values": {},
    "shared-pca": {"n_components": 10, "n_top_genes": 200},
    "find-outliers": {"use_rep": "X_pca", "trees": 20},
}


def rehearse_same(workflow, data, monkeypatch, **options):
    """A run whose parties draw what they draw in every other such run: forests and masks are the same."""
    with monkeypatch.context() as patch:
        parties = iter(range(100))
        patch.setattr("cloister.rehearsal.rehearsal.Entropy", lambda: fixed_entropy("streamed")(str(next(parties))))
        return rehearse(workflow, data, **options)


def check_same_results(loaded, streamed, folder):
    """What was streamed and written is what was loaded and computed, to the last digits of sums in another order."""
    save_run(streamed, folder)
    for site, wanted in loaded.data.items():
        assert cells.is_on_disk(streamed.data[site].X)
        assert not cells.is_on_disk(wanted.X)
        found = read_cells(folder / f"{site}.h5ad")
        for slot in ("obs", "obsm", "varm", "layers"):
            assert set(getattr(found, slot)) == set(getattr(wanted, slot))
        for key in cells.layer_names(wanted):
            np.testing.assert_array_equal(dense(found.layers[key]), dense(wanted.layers[key]))
        for slot in ("obsm", "varm"):
            for key, matrix in getattr(wanted, slot).items():
                np.testing.assert_allclose(getattr(found, slot)[key], matrix, atol=1e-6)
        pd.testing.assert_frame_equal(found.obs, wanted.obs, check_dtype=False, check_categorical=False, rtol=1e-9)
        np.testing.assert_array_equal(dense(found.X), dense(wanted.X))
    assert streamed.results.keys() == loaded.results.keys()
    for party, result in loaded.results.items():
        for key, value in result.items():
            np.testing.assert_allclose(np.asarray(streamed.results[party][key]), np.asarray(value), rtol=1e-6)


@pytest.mark.parametrize("workflow", OPTIONS)
def test_the_shipped_cells_streamed_give_what_they_give_loaded(workflow, paths, tmp_path, monkeypatch):
    loaded = rehearse_same(workflow, demo_sites(), monkeypatch, **OPTIONS[workflow])
    streamed = rehearse_same(workflow, paths, monkeypatch, **OPTIONS[workflow])
    check_same_results(loaded, streamed, tmp_path / "out")


def reads(monkeypatch):
    """What is read of matrices on disk from here on: `rows` with their places, `values` alone, or `pointers`."""
    seen, read = [], cell_values._read

    def noted(matrix, part, where):
        kind = "rows" if isinstance(part, tuple) else matrix.name.rpartition("/")[2]
        seen.append((kind, where))
        return read(matrix, part, where)

    monkeypatch.setattr(cell_values, "_read", noted)
    return seen


@pytest.mark.parametrize("most", [1 << 16, 20])
@pytest.mark.parametrize("layer", [None, "log"])
def test_few_different_values_are_read_once_and_many_again_without_their_places(layer, most, tmp_path, monkeypatch):
    sites = demo_sites()
    for site, adata in sites.items():
        adata.layers["log"] = adata.X.copy()
        adata.layers["log"].data = np.log1p(adata.X.data)
        write_cells(adata, tmp_path / f"{site}.h5ad")
    loaded = rehearse_same("bin-values", sites, monkeypatch, layer=layer)
    stream_everything(monkeypatch)
    monkeypatch.setattr("cloister.mpc.sums.value_counts.MOST", most)
    on_disk = {site: read_cells(tmp_path / f"{site}.h5ad", backed=True) for site in sites}
    seen = reads(monkeypatch)
    streamed = rehearse_same("bin-values", on_disk, monkeypatch, layer=layer)
    kinds = [kind for kind, where in seen if where == cell_values.where_is(layer)]
    check_same_results(loaded, streamed, tmp_path / "out")
    pieces = sum(len([*cell_values.runs(cell_values.pointers(a.X, ""), 3000)]) for a in on_disk.values())
    assert pieces > 6
    assert kinds.count("rows") == pieces  # once, for kind and check
    assert kinds.count("data") == (0 if most > 20 else pieces)  # once, for the runs


@pytest.mark.parametrize("most", [1 << 16, 2])
@pytest.mark.parametrize("form", [sparse.csr_matrix, sparse.csc_matrix])
def test_places_that_are_stored_twice_are_added_up_however_often_they_are_read(form, most, tmp_path, monkeypatch):
    adata = made(form=form)
    write_cells(adata, tmp_path / "a.h5ad")
    with h5py.File(tmp_path / "a.h5ad", "r+") as file:
        at = np.flatnonzero(np.diff(file["X/indptr"][...]) > 1)[0]
        first = file["X/indptr"][at]
        file["X/indices"][first + 1] = file["X/indices"][first]
    stream_everything(monkeypatch)
    monkeypatch.setattr("cloister.mpc.sums.value_counts.MOST", most)
    twice = read_cells(tmp_path / "a.h5ad", backed=True)
    wanted = dense(read_cells(tmp_path / "a.h5ad").X)
    wanted = np.sort(wanted[wanted != 0])
    seen = cells.survey(twice)
    assert not seen.single
    assert (seen.table is None) == (most == 2)
    assert seen.nonzero == len(wanted) == adata.X.nnz - 1
    if seen.table is not None:
        np.testing.assert_array_equal(np.repeat(*seen.table), wanted)
    np.testing.assert_array_equal(np.sort(np.concatenate([*cells.nonzero_values(twice)])), wanted)


def test_a_survey_does_not_show_values():
    assert "table" not in repr(cells.survey(made()))


def test_the_comparison_would_notice_one_value(paths, tmp_path, monkeypatch):
    loaded = rehearse_same("bin-values", demo_sites(), monkeypatch)
    adata = read_cells(paths["basel"])
    adata.X.data[0] += 1
    write_cells(adata, paths["basel"])
    streamed = rehearse_same("bin-values", paths, monkeypatch)
    with pytest.raises(AssertionError):
        check_same_results(loaded, streamed, tmp_path / "out")


DATA = Path(__file__).parents[2].parent / "shared" / "data"
SMALL = ("scrna/cellline_mixology_10x.h5ad", "scrna/pancreas_wang_lognorm.h5ad", "odds/vowels.npz")
REFUSED = ("scrna/pancreas_xin_lognorm.h5ad", "shared-pca")  # logarithms to base 2, of values up to a million
FILES = sorted(str(p.relative_to(DATA)) for kind in ("scrna/*.h5ad", "odds/*.npz") for p in DATA.glob(kind))


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in SMALL else pytest.mark.slow) for n in FILES or ["shared data"]]
)
def test_shared_data_streamed_gives_what_it_gives_loaded(name, tmp_path, monkeypatch):
    if not (DATA / name).exists():
        pytest.skip(f"{name} is not here")
    whole = read_cells(DATA / name)
    sites = {site: whole[i::3].copy() for i, site in enumerate(("basel", "lugano", "vienna"))}
    paths = {site: tmp_path / f"{site}.h5ad" for site in sites}
    for site, adata in sites.items():
        write_cells(adata, paths[site])
    stream_everything(monkeypatch)
    table = name.endswith(".npz")
    options = {"find-outliers": {"trees": 20}} if table else {w: OPTIONS[w] for w in ("bin-values", "shared-pca")}
    if name.endswith("_lognorm.h5ad"):
        options["shared-pca"] = options["shared-pca"] | {"kind": "log"}
    for workflow, given in options.items():
        if (name, workflow) == REFUSED:
            for data in (sites, paths):
                with pytest.raises(DataError, match="sums over this site's cells are too large"):
                    rehearse(workflow, data, **given)
            continue
        loaded = rehearse_same(workflow, sites, monkeypatch, **given)
        streamed = rehearse_same(workflow, paths, monkeypatch, **given)
        check_same_results(loaded, streamed, tmp_path / workflow)


def test_reading_is_told_to_the_progress_bar(paths, monkeypatch):
    monkeypatch.setattr("cloister.cells.progress._TELL", 0.0)
    events = []
    rehearse("bin-values", paths, on_event=events.append)
    told = [e for e in events if e.protocol == "reading"]
    assert {e.party for e in told} == set(paths)
    assert {(e.name, e.of) for e in told if e.party == "basel"} == {("adata.X", demo_sites()["basel"].n_obs)}
    assert all(0 < e.done <= e.of for e in told)
    assert any(e.done == e.of for e in told)


# ---- bad input -------------------------------------------------------------------------------------------------------


def test_a_modality_that_is_not_there(tmp_path):
    write_mudata(tmp_path / "a.h5mu", rna=made(), prot=made(1))
    with pytest.raises(DataError, match=r"names no modality; there is 'prot', 'rna': write a.h5mu:NAME"):
        read_cells(tmp_path / "a.h5mu")
    with pytest.raises(DataError, match=r"has no modality 'atac'; there is 'prot', 'rna'"):
        read_cells(tmp_path / "a.h5mu:atac")
    write_cells(made(), tmp_path / "a.h5ad")
    with pytest.raises(DataError, match="has no part 'rna'"):
        read_cells(tmp_path / "a.h5ad:rna")
    bare = made()
    del bare.raw
    write_cells(bare, tmp_path / "b.h5ad")
    with pytest.raises(DataError, match=r"holds no adata.raw"):
        read_cells(tmp_path / "b.h5ad:raw")


def pieces(folder):
    return sorted(p for p in folder.rglob("*") if p.is_file() and not p.name.startswith((".z", "zarr")))


@pytest.mark.parametrize("array", ["X/data", "X/indices", "X/indptr", "layers/log/data"])
@pytest.mark.parametrize("how", ["gone", "cut"])
def test_a_truncated_zarr(tmp_path, array, how):
    path = tmp_path / "a.zarr"
    write_zarr(path)
    piece = pieces(path / array)[-1]
    if how == "gone":
        piece.unlink()
    else:
        piece.write_bytes(piece.read_bytes()[: piece.stat().st_size // 2])

    def opened_and_checked():
        cells.check_cells(read_cells(path, backed=True), layer="log" if "log" in array else None)

    with pytest.raises(DataError, match="damaged"):
        opened_and_checked()
    with pytest.raises(DataError, match="damaged"):
        read_cells(path)


def test_a_folder_that_is_no_zarr(tmp_path):
    (tmp_path / "a.zarr").mkdir()
    with pytest.raises(DataError, match="not a folder of Zarr"):
        read_cells(tmp_path / "a.zarr")
    write_zarr(tmp_path / "b.zarr")
    shutil.rmtree(tmp_path / "b.zarr" / "var")
    with pytest.raises(DataError, match="damaged|holds no AnnData"):
        read_cells(tmp_path / "b.zarr")


def test_a_chunk_with_genes_that_are_not_there(tmp_path):
    path = tmp_path / "a.h5ad"
    write_cells(made(), path)
    with h5py.File(path, "r+") as file:
        file["X/indices"][-1] = GENES + 3
    with pytest.raises(DataError, match="adata.X cannot be read: it is damaged"):
        cells.check_cells(read_cells(path, backed=True))


def test_a_file_that_changes_during_a_run_ends_it_and_leaves_nothing(paths, tmp_path):
    changed = []

    def change(event):
        if event.name.endswith("Masked") and event.party == "basel" and not changed:
            changed.append(event)
            with h5py.File(paths["basel"].with_name("new.h5ad"), "w") as file:
                file["x"] = [1]
            paths["basel"].with_name("new.h5ad").replace(paths["basel"])

    run = rehearse("bin-values", paths, on_event=change, check=False, timeout=20.0)
    assert changed
    assert isinstance(run.errors["basel"], DataError)
    assert "changed while it was in use" in str(run.errors["basel"])
    save_run(run, tmp_path / "out")
    assert not list((tmp_path / "out").glob("*.h5ad"))


# ---- donors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workflow", OPTIONS)
def test_a_site_with_too_few_donors_is_refused_before_anything_is_sent(workflow, monkeypatch):
    sites = demo_sites()
    for adata in sites.values():
        adata.obs["donor"] = np.resize(["a", "b", "c", "d"], adata.n_obs)
    options = OPTIONS[workflow] | {"donor_key": "donor"}
    run = rehearse(workflow, sites, **options)
    assert run.receipts["basel"].header["counted"] == "donors"
    assert rehearse(workflow, sites, **OPTIONS[workflow]).receipts["basel"].header["counted"] == "cells"
    monkeypatch.setattr("cloister.rehearsal.rehearsal.run_parties", lambda *a, **k: pytest.fail("something was sent"))
    sites["lugano"].obs["donor"] = np.resize(["a", "b"], sites["lugano"].n_obs)
    with pytest.raises(DataError, match="site 'lugano': 2 donors, fewer than 3"):
        rehearse(workflow, sites, **options)
    sites["lugano"].obs["donor"] = pd.Categorical([None, *["a", "b", "c"] * 1000][: sites["lugano"].n_obs])
    with pytest.raises(DataError, match="names no donor for 1 cells"):
        rehearse(workflow, sites, **options)
    with pytest.raises(DataError, match=r"obs\['patient'\] is missing"):
        rehearse(workflow, sites, **OPTIONS[workflow], donor_key="patient")
