"""`cloister place`: cells that come after an integration, from a file to a file."""

import numpy as np
import pytest
from typer.testing import CliRunner

from cloister.cells.files import read_cells, write_cells
from cloister.cli.main import app
from cloister.models.harmony import Settings, Shifts, Trail
from cloister.workflows.saved_models.integration import Integration
from cloister.workflows.saved_models.shared_map import SharedMap

ad = pytest.importorskip("anndata")


def model(rounds=2, K=3, d=4, batches=("one",)):
    rng = np.random.default_rng(0)
    Y = rng.normal(size=(rounds, K, d))
    trail = Trail(300, Y, np.full((rounds, K), 100.0), Y * 5, np.ones((rounds, K), bool))
    B = len(batches)
    own = Shifts(np.ones((rounds, B, K)), rng.normal(size=(rounds, B, K, d)))
    return Integration(Settings(rounds=rounds), trail, own, batches, "batch", "X_pca", "", "cd34", 50)


@pytest.fixture
def paths(tmp_path):
    a = ad.AnnData(np.zeros((60, 2), np.float32))
    a.obs_names = [f"c{i}" for i in range(60)]
    a.obs["batch"] = "one"
    a.obsm["X_pca"] = np.random.default_rng(1).normal(size=(60, 4))
    write_cells(a, tmp_path / "new.h5ad")
    model().save(tmp_path / "model.npz")
    return tmp_path


def place(folder, *words):
    wanted = ["place", str(folder / "model.npz"), str(folder / "new.h5ad"), *map(str, words)]
    return CliRunner().invoke(app, wanted)


def test_cells_are_placed_and_written(paths):
    done = place(paths, "--out", paths / "placed.h5ad")
    assert done.exit_code == 0, done.output
    assert "obsm['X_integrated'] of 60 cells" in " ".join(done.output.split())
    back = read_cells(paths / "placed.h5ad")
    np.testing.assert_allclose(back.obsm["X_integrated"], model().transform(read_cells(paths / "new.h5ad")))
    assert back.uns["X_integrated"]["space"] == "cd34"
    again = place(paths, "--out", paths / "other.h5ad", "--new-batch", "--key-added", "X_b")
    assert again.exit_code == 0, again.output
    assert not np.allclose(read_cells(paths / "other.h5ad").obsm["X_b"], back.obsm["X_integrated"])


def test_cells_are_placed_on_a_map(paths):
    rng = np.random.default_rng(3)
    SharedMap(rng.normal(size=(90, 4)), rng.normal(size=(90, 2)), "X_pca", "").save(paths / "model.npz")
    done = place(paths, "--out", paths / "placed.h5ad")
    assert done.exit_code == 0, done.output
    assert "obsm['X_shared_map'] of 60 cells" in " ".join(done.output.split())
    assert read_cells(paths / "placed.h5ad").obsm["X_shared_map"].shape == (60, 2)
    wrong = place(paths, "--out", paths / "other.h5ad", "--new-batch")
    assert "needs cells in adata.obsm['X_pca'] and no other option" in str(wrong.exception)
    labels = CliRunner().invoke(app, ["predict", str(paths / "model.npz"), str(paths / "new.h5ad")])
    assert "a model of shared-map, which labels nothing" in str(labels.exception)


def test_the_file_of_the_cells_is_not_written_over(paths):
    before = (paths / "new.h5ad").read_bytes()
    done = place(paths, "--out", paths / "new.h5ad")
    assert done.exit_code != 0
    assert "name another" in str(done.exception or done.output)
    assert (paths / "new.h5ad").read_bytes() == before


def test_predict_says_that_such_a_model_labels_nothing(paths):
    done = CliRunner().invoke(app, ["predict", str(paths / "model.npz"), str(paths / "new.h5ad")])
    assert done.exit_code != 0
    assert "cloister place" in str(done.exception or done.output)
