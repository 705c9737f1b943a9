"""Folders of .fcs files given on the command line: what a cytometry core hands out, with a table of donors."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from test_main import data_of, run

from cloister.cells.files import read_cells

flowio = pytest.importorskip("flowio")
__all__ = ["run"]  # the fixture
MARKERS = {"basel": ["CD3", "CD16", "CD57"], "lugano": ["172Yb_CD57", "CD3(Nd142)Dd", "CD16"]}  # two panels
OPTIONS = (
    "--mode plain --n-filters 2 --n-cells 30 --n-inputs 20 --batch 8 --n-steps 20 --learning-rate 0.3 --cofactor 5"
    " --min-donors 2"
)


def folder(path, site, seed):
    """Four donors of 50 cells; those of 'case' are high in CD57, wherever their panel has it."""
    path.mkdir()
    rng, lines = np.random.default_rng(seed), ["file,donor,condition"]
    for d in range(4):
        x = rng.uniform(0, 5, (50, 4))
        case = d % 2
        high = 1 + next(i for i, m in enumerate(MARKERS[site]) if "CD57" in m)
        x[:25, high] += 60.0 * case
        with (path / f"{d}.fcs").open("wb") as file:
            channels = ["Time", "Ch1Di", "Ch2Di", "Ch3Di"]
            flowio.create_fcs(file, x.ravel(), channels, opt_channel_names=["", *MARKERS[site]])
        lines.append(f"{d}.fcs,{site}-{d},{'case' if case else 'control'}")
    (path / "donors.csv").write_text("\n".join(lines) + "\n")
    return path


def test_train_cellcnn_on_folders_of_fcs_files(run, tmp_path):
    data = {site: folder(tmp_path / site, site, seed) for seed, site in enumerate(MARKERS)}
    out = tmp_path / "out"
    code, said, err = run("rehearse", "train-cellcnn", *data_of(data), *OPTIONS.split(), "--json", "--out", out)
    assert code == 0, err
    assert json.loads(said)
    for site in data:
        adata = read_cells(out / f"{site}.h5ad")
        assert sorted(adata.var_names) == ["CD16", "CD3", "CD57"]
        assert "cellcnn_response" in adata.obs
        told = adata.uns["cloister"]["cellcnn"]
        assert np.abs(told["filters"]).sum(axis=0).argmax() == list(told["markers"]).index(
            "CD57"
        )  # found in both panels


def test_a_folder_without_its_table_is_one_sentence(run, tmp_path):
    data = {site: folder(tmp_path / site, site, seed) for seed, site in enumerate(MARKERS)}
    (data["basel"] / "donors.csv").unlink()
    code, _, err = run("rehearse", "train-cellcnn", *data_of(data), *OPTIONS.split())
    assert code == 1
    assert "donors.csv" in err
    assert "Traceback" not in err
