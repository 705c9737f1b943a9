import json
import sys

import pytest

from cloister.cells import demo as demo_data
from cloister.cells.files import read_cells, write_cells
from cloister.cli.main import main
from cloister.rehearsal.rehearsal import rehearse


def run_cli(monkeypatch, capsys, *words):
    monkeypatch.setattr(sys, "argv", ["cloister", *map(str, words)])
    with pytest.raises(SystemExit) as end:
        main()
    return end.value.code, capsys.readouterr()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("predict")
    sites = {s: a[a.obs["cell_type"].isin(["T", "AT2"])].copy() for s, a in demo_data.demo_sites().items()}
    new = sites.pop("vienna")
    run = rehearse("train-classifier", sites, n_top_genes=60, min_cells=20, max_share=1.0)
    run.model.save(folder / "model.npz")
    del new.obs["cell_type"]
    write_cells(new, folder / "new.h5ad")
    return folder, run.model


def test_labels_a_file(trained, monkeypatch, capsys):
    folder, model = trained
    words = ("predict", folder / "model.npz", folder / "new.h5ad", "--out", folder / "out.h5ad", "--json")
    code, said = run_cli(monkeypatch, capsys, *words)
    assert code == 0, said.err
    told = json.loads(said.out)
    out = read_cells(folder / "out.h5ad")
    assert told["model"] == model.digest
    assert told["cells"] == out.n_obs == sum(told["labels"].values())
    assert list(out.obs["predicted"].astype(str)) == list(model.predict(out))
    assert out.obs["predicted_confidence"].between(0, 1).all()


def test_says_what_it_found_in_words(trained, monkeypatch, capsys):
    folder, _ = trained
    code, said = run_cli(monkeypatch, capsys, "predict", folder / "model.npz", folder / "new.h5ad", "--no-unknown")
    assert code == 0
    assert "AT2" in said.out
    assert "unknown" not in said.out


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("model.npz", "new.h5ad", "--out", "new.h5ad"), 2, "is the file of the cells"),
        (("none.npz", "new.h5ad"), 1, "there is no model file"),
        (("model.npz", "new.h5ad", "--majority-over", "leiden"), 1, "'leiden'] is missing"),
        (("new.h5ad", "new.h5ad"), 1, "not a model file of Cloister"),
    ],
)
def test_errors_are_one_sentence(trained, monkeypatch, capsys, words, code, message):
    folder, _ = trained
    words = [folder / w if w.endswith((".npz", ".h5ad")) else w for w in words]
    found, said = run_cli(monkeypatch, capsys, "predict", *words)
    assert found == code
    assert message in " ".join(said.err.split())


def test_embeds_a_file_with_a_fine_tuned_model(tmp_path, monkeypatch, capsys):
    pytest.importorskip("torch")
    sites = {s: a[:60].copy() for s, a in demo_data.demo_sites().items()}
    run = rehearse("fine-tune", sites, use_rep="X_pca", rounds=1, hidden=(8,))
    run.model.save(tmp_path / "model.npz")
    write_cells(sites["vienna"], tmp_path / "new.h5ad")
    words = ("embed", tmp_path / "model.npz", tmp_path / "new.h5ad", "--out", tmp_path / "out.h5ad")
    code, said = run_cli(monkeypatch, capsys, *words)
    assert code == 0, said.err
    out = read_cells(tmp_path / "out.h5ad")
    assert out.obsm["X_embedded"].shape == (60, 8)
    assert out.uns["X_embedded"]["space"] == run.model.digest
    code, said = run_cli(monkeypatch, capsys, "predict", tmp_path / "model.npz", tmp_path / "new.h5ad", "--json")
    assert code == 0, said.err
    assert json.loads(said.out)["cells"] == 60
    code, said = run_cli(monkeypatch, capsys, "predict", tmp_path / "model.npz", tmp_path / "new.h5ad", "--adapt")
    assert code == 2
    assert "train-classifier" in said.err
