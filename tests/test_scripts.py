"""The scripts behind `make bench`, `make tables`, `make mutants` and `make wheel`, on small things."""

import importlib
import json
import runpy
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from cloister.errors import ProtocolAbort
from cloister.mpc.sums import pooled_quantiles

ROOT = Path(__file__).parents[1]

FINE = """
import argparse, sys
parser = argparse.ArgumentParser()
parser.add_argument("--quick", action="store_true")
assert parser.parse_args().quick
print("words  seconds")
print(f"1e6    0.1 in {__file__}")
"""


def bench(tmp_path, *words):
    command = [sys.executable, ROOT / "scripts" / "bench.py", "--folder", tmp_path / "b", "--out", tmp_path / "page.md"]
    command += ["--kept", tmp_path / "logs" / "quick.json", *words]
    return subprocess.run([str(c) for c in command], capture_output=True, text=True, timeout=300)


@pytest.fixture
def folder(tmp_path):
    b = tmp_path / "b"
    b.mkdir()
    (b / "fine.py").write_text(FINE)
    (b / "broken.py").write_text(FINE + 'raise SystemExit("above the target")\n')
    (b / "part.py").write_text("nothing = 1\n")
    return tmp_path


def test_bench_collects_what_is_printed_and_says_what_failed(folder):
    done = bench(folder)
    assert done.returncode == 1
    page = (folder / "page.md").read_text()
    assert "## fine" in page
    assert "words  seconds" in page
    assert "failed: above the target" in page
    assert "part" not in page.partition("## ")[0].replace("| benchmark", "")
    for fact in ("Machine: ", "cores", "load before, after", "UTC"):
        assert fact in page


def test_bench_of_one_keeps_the_others(folder):
    bench(folder)
    kept = json.loads((folder / "logs" / "quick.json").read_text())
    assert bench(folder, "fine").returncode == 0
    again = json.loads((folder / "logs" / "quick.json").read_text())
    assert again["broken"] == kept["broken"]
    assert "no benchmark 'nowhere'" in bench(folder, "nowhere").stderr


def test_bench_stops_what_hangs_with_all_its_processes(folder):
    hang = (
        FINE + "import subprocess, time\nprint(subprocess.Popen(['sleep', '321']).pid, flush=True)\ntime.sleep(600)\n"
    )
    (folder / "b" / "hangs.py").write_text(hang)
    assert bench(folder, "hangs", "--limit", "6").returncode == 1
    told = json.loads((folder / "logs" / "quick.json").read_text())["hangs"]
    assert told["code"] is None
    pid = told["out"].splitlines()[-1]
    end = time.monotonic() + 60
    while not gone(Path(f"/proc/{pid}/stat")):  # who is killed still has to be given the processor to end
        assert time.monotonic() < end
        time.sleep(0.05)


def gone(state):
    try:
        return state.read_text().split()[2] == "Z"
    except OSError:
        return True


def test_every_benchmark_with_a_quick_form_is_found():
    found = runpy.run_path(str(ROOT / "scripts" / "bench.py"))["benchmarks"](ROOT / "benchmarks")
    assert {"secure_sum", "mapping", "outliers", "propagation", "cellcnn", "training", "adaptation"} <= set(found)


def test_tables_print_the_papers_numbers_and_ours():
    done = subprocess.run([sys.executable, ROOT / "scripts" / "tables.py"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0
    for title in ("XCLP, table 4", "PriCell, table S2", "BlindFed, table 2", "Global outliers", "FedscGPT"):
        assert title in done.stdout
    assert "0.7091" in done.stdout


@pytest.mark.slow
def test_every_place_that_the_tables_name_is_on_our_pages():
    command = [sys.executable, ROOT / "scripts" / "tables.py", "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_tables_find_cells_by_row_and_column(tmp_path, monkeypatch):
    script = runpy.run_path(str(ROOT / "scripts" / "tables.py"))
    (tmp_path / "p.md").write_text(
        "| | a, first | non-a |\n|---|---|---|\n| one | 1 | 2 |\n| more of one | 3 | **4** |\n"
    )
    script["find"].__globals__["ROOT"] = tmp_path
    assert script["find"]("p.md", "one", "a") == "1"
    assert script["find"]("p.md", "more", "non-a") == "4"
    assert script["find"]("p.md", "two", "a") is None


def test_every_security_mutant_fits_the_code_and_has_tests(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    mutants = importlib.import_module("mutants")
    made = mutants.all_mutants()
    assert len(made) >= 150
    assert not mutants.stale(), "bring mutants.toml up to date"
    assert set(mutants.REASONS) <= {m.key for m in made}, "a reason for a mutant that there is no more"
    for file in {m.file for m in made}:
        assert mutants.tests_of(file)  # says which file has none


def test_a_weakened_function_is_the_mutants_and_its_call_is_heard(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    weaken = importlib.import_module("weaken")
    module, file = pooled_quantiles, "mpc/sums/pooled_quantiles"
    mutant = next(m for m in weaken.drawn(file) if m.name == "check_edges never aborts with 'edges'")
    before, heard, falling = {f: f.__code__ for f in weaken._loaded(module)}, [], np.array([2.0, 1.0])
    try:
        weaken.listen([file], heard.append)
        with pytest.raises(ProtocolAbort):
            module.check_edges(falling, np.sort(falling))
        assert heard == [f"{file}: check_edges"] == sorted(weaken.functions_of(mutant))
        assert weaken.weaken(mutant)
        module.check_edges(falling, np.sort(falling))
        assert len(heard) == 1, "the mutant's own code, which says nothing"
    finally:
        for function, code in before.items():
            function.__code__ = code
        del module.__heard__


@pytest.fixture
def wheel(monkeypatch, tmp_path):
    """The script with an empty path and home; `put` makes a program that says it has a version, or fails."""
    script = runpy.run_path(str(ROOT / "scripts" / "wheel.py"))
    spoken = script["main"].__globals__
    monkeypatch.setenv("PATH", f"{tmp_path}/shims:{tmp_path}/bin")
    monkeypatch.setenv("PYENV_ROOT", f"{tmp_path}/pyenv")
    monkeypatch.setenv("UV_PYTHON_INSTALL_DIR", f"{tmp_path}/uv")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nowhere"))

    def put(name, says):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"#!/bin/sh\n{f'echo {says}' if says else 'exit 127'}\n")
        (tmp_path / name).chmod(0o755)
        return str(tmp_path / name)

    return spoken, put


def test_wheel_finds_interpreters_that_run_and_are_what_their_name_says(wheel):
    script, put = wheel
    put("shims/python3.11", None)  # a shim of pyenv without that version
    put("bin/python3.12", "3.11")  # a link to another
    assert [script["find"](v) for v in script["PYTHONS"]] == [None] * len(script["PYTHONS"])
    kept = put("pyenv/versions/3.11.7/bin/python3.11", "3.11")
    right = put("uv/cpython-3.12.4-linux/bin/python3.12", "3.12")
    assert [script["find"](v) for v in script["PYTHONS"]] == [kept, right, *[None] * (len(script["PYTHONS"]) - 2)]
    first = put("bin/python3.11", "3.11")
    assert script["find"]("3.11") == first


def test_wheel_tries_both_sets_of_versions_and_names_what_it_did_not_find(wheel, monkeypatch, capsys, tmp_path):
    script, put = wheel
    old, new = put("bin/python3.11", "3.11"), put("bin/python3.13", "3.13")
    tried = []

    def attempt(made, python, versions, extras):
        tried.append((python, versions))
        if broken == (python, versions):
            raise script["Failed"]("pytest: exit code 1")
        return "9 passed"

    (tmp_path / "cloister.whl").write_bytes(b"")
    monkeypatch.setitem(script, "build", lambda: tmp_path / "cloister.whl")
    monkeypatch.setitem(script, "attempt", attempt)
    monkeypatch.setattr(sys, "argv", ["wheel.py"])
    broken = None
    script["main"]()
    assert tried == [(p, v) for p in (old, new) for v in ("constraints", "newest")]
    said = capsys.readouterr().out
    assert "Python 3.12  not found, so not tried" in said
    assert "works outside the repository" in said
    broken = (new, "newest")
    with pytest.raises(SystemExit, match="does not work everywhere"):
        script["main"]()
    assert "Python 3.13  newest       FAILED" in capsys.readouterr().out
    tried.clear()
    monkeypatch.setattr(sys, "argv", ["wheel.py", "--python", old, "--versions", "newest"])
    script["main"]()
    assert tried == [(old, "newest")]
    monkeypatch.setattr(sys, "argv", ["wheel.py", "--python", str(tmp_path / "no")])
    with pytest.raises(SystemExit, match="no Python that can make environments"):
        script["main"]()


def test_wheel_lets_no_other_versions_in(wheel, monkeypatch):
    script, _ = wheel
    for name in ("PIP_CONSTRAINT", "PYTHONPATH", "VIRTUAL_ENV", "PYTEST_ADDOPTS"):
        monkeypatch.setenv(name, "/elsewhere")
    kept = script["clean_environment"]()
    assert "/elsewhere" not in kept.values()
    assert "PATH" in kept
