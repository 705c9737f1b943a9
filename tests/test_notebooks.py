"""Every notebook runs headless from top to bottom and draws something; two of them in `make test`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from cloister import workflows

pytest.importorskip("nbclient")
pytest.importorskip("matplotlib")

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "notebooks"
NAMES = sorted(p.stem for p in FOLDER.glob("*.ipynb"))
QUICK = ("bin-values", "map-labels")  # in `make test`
TOGETHER = {"predict-cellcnn": "train-cellcnn", "serve-model": "adapt-model"}  # two workflows in one notebook


def raw(name):
    return json.loads((FOLDER / f"{name}.ipynb").read_text(encoding="utf-8"))


def test_every_workflow_has_one():
    assert {TOGETHER.get(name, name) for name in workflows.SHIPPED} | {"embed"} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_kept_is_small_and_says_nothing_of_a_machine(name):
    text = (FOLDER / f"{name}.ipynb").read_text(encoding="utf-8")
    assert len(text) < 120_000
    for word in ("/root", "/work/", "/home", "/tmp/", "Traceback"):
        assert word not in text
    outputs = [o for c in raw(name)["cells"] if c["cell_type"] == "code" for o in c["outputs"]]
    assert any("image/png" in o.get("data", {}) for o in outputs), "run: python scripts/notebooks.py"
    assert not [o for o in outputs if o["output_type"] == "error" or o.get("name") == "stderr"]


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.slow]) for n in NAMES])
def test_runs_headless_and_draws(name):
    command = [sys.executable, ROOT / "scripts" / "notebooks.py", "--check", name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
