"""docs/mpc.md runs as it is printed, without the packages that only workflows need."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import cloister
from cloister import mpc

PAGE = (Path(__file__).parents[2] / "docs" / "mpc.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)
HEAVY = ("pandas", "anndata", "typer", "torch", "scanpy", "nvflare", "matplotlib")


def run(tmp_path, text, name="block.py"):
    (tmp_path / name).write_text(text, encoding="utf-8")
    source = str(Path(cloister.__file__).parents[1])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([source, str(tmp_path)])}
    return subprocess.run([sys.executable, name], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240)


@pytest.mark.parametrize("number", range(1, len(BLOCKS)), ids=["simulated", "attacked", "across_processes"])
def test_the_page_runs_as_printed(tmp_path, number):
    (tmp_path / "coin_toss.py").write_text(BLOCKS[0], encoding="utf-8")
    done = run(tmp_path, BLOCKS[number])
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout


def test_the_protocol_of_the_page_has_thirty_lines():
    lines = [line for line in BLOCKS[0].splitlines() if line.strip() and not line.startswith(("#", "import", "from"))]
    assert len(lines) <= 30


def test_without_the_comparison_the_attack_succeeds(tmp_path):
    weak = BLOCKS[0].replace("commit(ch, p, values[p]) != received[p].hash", "False")
    assert weak != BLOCKS[0]
    (tmp_path / "coin_toss.py").write_text(weak, encoding="utf-8")
    done = run(tmp_path, BLOCKS[2])
    assert done.returncode != 0
    assert "honest parties have different coins" in done.stderr


def test_the_library_loads_no_package_of_the_workflows(tmp_path):
    names = [name for name in mpc.__all__ if name not in ("PipeLink", "carry")]
    code = (
        f"import sys\nfrom cloister import mpc\nfor name in {names!r}:\n    getattr(mpc, name)\n"
        f"print(*sorted(set({HEAVY!r}) & set(sys.modules)), *(m for m in sys.modules if m.startswith('cloister.')"
        " and not m.startswith(('cloister.mpc', 'cloister._'))))"
    )
    done = run(tmp_path, code)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) <= {"cloister.errors", "cloister.arrays", "cloister.files", "cloister.disclosure"}


def test_every_public_name_is_there_and_documented_in_one_place():
    for name in mpc.__all__:
        assert getattr(mpc, name) is not None
    assert 40 <= len(mpc.__all__) <= 60
    assert not hasattr(mpc, "no_such_name")
