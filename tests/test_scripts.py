"""The scripts behind `make bench`, `make tables` and `make sbom`, on small things."""

import json
import runpy
import subprocess
import sys
import time
from pathlib import Path

import pytest

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
    return subprocess.run([str(c) for c in command], capture_output=True, text=True, timeout=60)


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
    hang = FINE + "import subprocess, time\nprint(subprocess.Popen(['sleep', '321']).pid, flush=True)\ntime.sleep(60)\n"
    (folder / "b" / "hangs.py").write_text(hang)
    began = time.monotonic()
    assert bench(folder, "hangs", "--limit", "3").returncode == 1
    assert time.monotonic() - began < 30
    told = json.loads((folder / "logs" / "quick.json").read_text())["hangs"]
    assert told["code"] is None
    pid = told["out"].splitlines()[-1]
    state = Path(f"/proc/{pid}/stat")
    assert not state.exists() or state.read_text().split()[2] == "Z"


def test_every_benchmark_with_a_quick_form_is_found():
    found = runpy.run_path(str(ROOT / "scripts" / "bench.py"))["benchmarks"](ROOT / "benchmarks")
    assert {"secure_sum", "mapping", "outliers", "propagation", "cellcnn", "training", "adaptation"} <= set(found)


def test_tables_print_the_papers_numbers_and_ours():
    done = subprocess.run([sys.executable, ROOT / "scripts" / "tables.py"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    for title in ("XCLP, table 4", "PriCell, table S2", "BlindFed, table 2", "Global outliers", "FedscGPT"):
        assert title in done.stdout
    assert "0.7091" in done.stdout


@pytest.mark.slow
def test_every_place_that_the_tables_name_is_on_our_pages():
    command = [sys.executable, ROOT / "scripts" / "tables.py", "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
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
