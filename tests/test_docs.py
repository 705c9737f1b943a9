"""The README and the guides say nothing that does not run: commands in order, Python blocks, TOML blocks.

A page about one workflow finds the demo's three sites as `sites` in Python and under `sites/` as files. A block marked
`py` instead of `python` needs something we cannot ship (a checkpoint, a second machine) and is only shown.
"""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from cloister.cells.demo import demo_sites
from cloister.demo import write_sites
from cloister.study import parse_study
from cloister.workflows.pipeline import check_steps

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs" / "measured").glob("*.md"))]
RUN = [p for p in PAGES if p.name not in ("deploy.md", "mpc.md")]  # played by tests/deploy and tests/mpc


def named(page):
    return page.relative_to(ROOT).as_posix()


def blocks(page, kind):
    return re.findall(rf"^```{kind}\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE)


LONG = ("train-classifier", "integrate", "propagate-labels", "map-labels")  # for the slow suite


@pytest.mark.parametrize(
    "page", [pytest.param(p, marks=[pytest.mark.slow] if p.stem in LONG else [], id=named(p)) for p in RUN]
)
def test_commands_and_python_run_as_printed(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "__docs__", "sites": demo_sites()}
    write_sites(tmp_path / "sites")
    for text in blocks(page, "toml"):
        if name := re.match(r"# ([a-z]+\.toml)\n", text):  # a file that the commands take
            (tmp_path / name[1]).write_text(text)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for kind, text in re.findall(r"^```(console|python)\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE):
        if kind == "python":
            exec(compile(text, f"{page.name} (python block)", "exec"), names)
            continue
        whole = re.sub(r"\\\n\s*", "", text)  # a command may go on in the next line
        for command in re.findall(r"^\$ (cloister .*)$", whole, flags=re.MULTILINE):
            done = subprocess.run(
                command, shell=True, capture_output=True, text=True, env={**os.environ, "PATH": path}, timeout=300
            )
            assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_toml_blocks_are_valid(page):
    for text in blocks(page, "toml"):
        if tomllib.loads(text).keys() & {"workflow", "step"}:
            check_steps(parse_study(text, page.name))


@pytest.mark.parametrize("page", [*PAGES, ROOT / "SECURITY.md", ROOT / "CONTRIBUTING.md"], ids=named)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
