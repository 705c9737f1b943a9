"""Four hospitals, the fourth without labels: the five commands of the page, each party a service of its own."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from federation import free_port

from cloister.cells.demo import demo_sites
from cloister.cells.files import read_cells, write_cells
from cloister.rehearsal.rehearsal import rehearse
from cloister.study import Study, format_study
from cloister.workflows.saved_models import load_model

pytest.importorskip("nvflare")
pytestmark = [pytest.mark.xdist_group("flare"), pytest.mark.slow]
PAGE = Path(__file__).parents[2] / "docs" / "train-classifier.md"
TYPES = ["macrophage", "endothelial", "T", "AT2", "monocyte", "NK/NKT"]
OPTIONS = {"n_top_genes": 150, "validation": 0.0}  # else counts, which are rounded by chance, choose the setting


@pytest.fixture(scope="module")
def hospitals():
    """The demo's three, and every second cell of one of them at a fourth, which has never seen a label."""
    sites = {name: a[a.obs["cell_type"].isin(TYPES)].copy() for name, a in demo_sites().items()}
    geneva = sites["vienna"][1::2].copy()
    sites["vienna"] = sites["vienna"][::2].copy()
    truth = geneva.obs.pop("cell_type").astype(str).to_numpy()
    return {**sites, "geneva": geneva}, truth


def printed():
    """The commands between machines, as the page has them."""
    (block,) = re.findall(r"^```sh\n(.*?)^```", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE)
    return [shlex.split(line, comments=True) for line in re.sub(r"\\\n\s*", "", block).splitlines()]


def start(words, folder):
    assert words[0] == "cloister"
    command = [sys.executable, "-m", "cloister.cli.main", *words[1:]]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def end(process, limit=240):
    told = process.communicate(timeout=limit)[0]
    assert process.returncode == 0, f"{process.args}: {told}"
    return told


def test_from_three_files_to_labels_at_a_fourth_site_in_five_commands(hospitals, tmp_path):
    sites, truth = hospitals
    parties = {"hub": "coordinator", **dict.fromkeys(sites, "site")}
    network = {"host": "localhost", "port": free_port()}
    study = Study("four", "train-classifier", parties, timeout=60.0, network=network, parameters=OPTIONS)
    (tmp_path / "study.toml").write_text(format_study(study))
    for name, adata in sites.items():
        write_cells(adata, tmp_path / f"{name}.h5ad")
    provision, approve, bring, ask, conduct = printed()
    at = {name: [word.replace("basel", name) for word in bring] for name in ("basel", "lugano", "vienna")}

    end(start(provision, tmp_path))
    for name in sites:
        assert "approved: train-classifier" in end(start([w.replace("basel", name) for w in approve], tmp_path))
    running = [start(words, tmp_path) for words in (*at.values(), ask, conduct)]
    try:
        assert [end(process).count("done") > 0 for process in running] == [True] * 5
    finally:
        for process in running:
            process.kill()

    labelled = read_cells(tmp_path / "labelled.h5ad")
    assert "cell_type" not in labelled.obs
    called = labelled.obs["predicted"].astype(str).to_numpy()
    assert (called == truth).mean() > 0.9
    rehearsed = rehearse("train-classifier", sites, **OPTIONS)
    assert list(called) == list(rehearsed.data["geneva"].obs["predicted"].astype(str))
    models = [load_model(next((tmp_path / "kits" / s / "results").glob(f"*/{s}.model.npz"))) for s in sites]
    assert len({model.digest for model in models}) == 1
    assert models[0].model.origin["sites"] == list(study.sites)
