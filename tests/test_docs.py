"""The README and the guides say nothing that does not run: commands in order, Python blocks, TOML blocks.

A page about one workflow finds the demo's three sites as `sites` in Python and under `sites/` as files. A block marked
`py` instead of `python` needs something we cannot ship (a checkpoint, a second machine) and is only shown.
"""

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from cloister.cells.demo import demo_sites
from cloister.cli.main import main
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
def test_commands_and_python_run_as_printed(page, tmp_path, monkeypatch, capsys):
    """The commands of the README in a shell, those of other pages in this process."""
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "__docs__", "sites": demo_sites()}
    write_sites(tmp_path / "sites")
    for text in blocks(page, "toml"):
        if name := re.match(r"# ([a-z]+\.toml)\n", text):  # a file that the commands take
            (tmp_path / name[1]).write_text(text)
    for kind, text in re.findall(r"^```(console|python)\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE):
        if kind == "python":
            exec(compile(text, f"{page.name} (python block)", "exec"), names)
            continue
        whole = re.sub(r"\\\n\s*", "", text)  # a command may go on in the next line
        for command in re.findall(r"^\$ (cloister .*)$", whole, flags=re.MULTILINE):
            if page.name == "README.md" or re.search(r"[|&;<>]", command):
                code, said = in_a_shell(command)
            else:
                code, said = in_this_process(command, monkeypatch, capsys)
            assert code == 0, f"{command}\n{said}"


def in_a_shell(command):
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        command, shell=True, capture_output=True, text=True, env={**os.environ, "PATH": path}, timeout=300
    )
    return done.returncode, done.stdout + done.stderr


def in_this_process(command, monkeypatch, capsys):
    """What the console script does, without a second interpreter and its imports."""
    with monkeypatch.context() as m:
        m.setattr(sys, "argv", shlex.split(command, comments=True))
        with pytest.raises(SystemExit) as ended:
            main()
    return ended.value.code, "".join(capsys.readouterr())


def test_a_command_that_fails_is_noticed(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    code, said = in_this_process("cloister check nowhere.h5ad --for bin-values", monkeypatch, capsys)
    assert code != 0
    assert "nowhere.h5ad" in said


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
