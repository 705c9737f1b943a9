"""A large site and two small ones: time and memory of every party, beside a plain loop over the same file.

    python benchmarks/million.py --quick                     10^5 cells and twice 10^4: some minutes, 2 GB of disk
    python benchmarks/million.py                             10^6 cells and twice 10^5: an hour or two, 40 GB of disk
    python benchmarks/million.py --growth 10000 100000       a large site of so many cells, one after the other

Files are made by scripts/make_cells.py (20,000 genes, some 1,400 of them seen in a cell). `check`, `bin-values`,
`shared-pca`, and `find-outliers` on what shared-pca wrote: every site in a process of its own, results written. Memory
is the largest resident size of any party's process, and that of the process that checks the files and carries frames.
The loop is NumPy in one process over the large site alone: the same sums, in chunks, with no protocol around them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import h5py
import numpy as np
from anndata.io import sparse_dataset

ROOT = Path(__file__).parents[1]
ONE_THREAD = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL", "NUMBA")}  # of a step's process
STEP = 2000  # cells of a chunk in the plain loops
SITES = {"large": 1.0, "middle": 0.1, "small": 0.1}
OPTIONS = {
    "bin-values": {},
    "shared-pca": {"n_components": 50, "n_top_genes": 2000},
    "find-outliers": {"use_rep": "X_shared_pca"},
}


# ---- one step, in a process of its own -------------------------------------------------------------------------------


def rehearse_step(workflow: str, folder: Path) -> dict[str, float]:
    """Rehearse with a process per party, and write the results."""
    from cloister.run.rehearsal import rehearse
    from cloister.run.results import save_run

    source = folder / "shared-pca" if workflow == "find-outliers" else folder
    began = time.perf_counter()
    paths = {site: source / f"{site}.h5ad" for site in SITES}
    run = rehearse(workflow, paths, processes=True, timeout=600.0, **OPTIONS[workflow])
    ran = time.perf_counter() - began
    run.drawing = run.draw()
    drawn = time.perf_counter() - began - ran
    save_run(run, folder / workflow)
    cost = run.cost["large"]
    return {"large_s": cost["seconds"], "run_s": ran, "report_s": drawn, "sent_mb": cost["bytes"] / 1e6}


def check_step(folder: Path) -> dict[str, float]:
    """What `cloister check` does with the large file."""
    from cloister.cells import tables as cells

    began = time.perf_counter()
    cells.describe(cells.open_cells(folder / "large.h5ad"))
    return {"large_s": time.perf_counter() - began}


def chunks(path: Path):
    with h5py.File(path) as file:
        matrix = sparse_dataset(file["X"])
        for start in range(0, matrix.shape[0], STEP):
            yield matrix[start : min(start + STEP, matrix.shape[0])]


def loop_step(workflow: str, folder: Path) -> dict[str, float]:
    """The same sums over the large site, without a protocol."""
    began, path = time.perf_counter(), folder / "large.h5ad"
    if workflow == "bin-values":
        loop_histogram(path)
    elif workflow == "shared-pca":
        loop_covariance(path)
    else:
        for block in chunks(path):
            assert np.all(np.isfinite(block.data))
    return {"large_s": time.perf_counter() - began}


def loop_histogram(path: Path) -> None:
    """Coarse counts, fine counts of the intervals with a quantile, and bins."""
    grid = np.exp2(np.arange(-24 * 64, 24 * 64 + 1) / 64)
    coarse = np.zeros(len(grid) - 1)
    for block in chunks(path):
        coarse += np.histogram(block.data, grid)[0]
    wanted = np.unique(np.searchsorted(np.cumsum(coarse), np.linspace(0, 1, 50) * (coarse.sum() - 1), side="right"))
    fine = [np.linspace(grid[c], grid[c + 1], 4097) for c in wanted]
    counts = np.zeros((len(fine), 4096))
    for block in chunks(path):
        values = np.sort(block.data.astype(np.float64))
        for row, ends in zip(counts, fine, strict=True):
            row += np.diff(np.searchsorted(values, ends))
    edges = np.array([ends[0] for ends in fine])
    for block in chunks(path):
        np.digitize(block.data, edges).astype(np.int16)


def loop_covariance(path: Path) -> None:
    """Sums of 20,000 genes, products of 2,000, and the projection on 50 axes."""

    def logs():
        for block in chunks(path):
            block = block.astype(np.float64)
            total = np.maximum(np.asarray(block.sum(axis=1)).ravel(), 1)
            block.data *= np.repeat(1e4 / total, np.diff(block.indptr))
            yield block, np.log1p(block.data)

    n, sums = 0, None
    for block, log in logs():
        parts = [np.bincount(block.indices, w, block.shape[1]) for w in (block.data, block.data**2, log, log**2)]
        sums, n = np.array(parts) + (0 if sums is None else sums), n + block.shape[0]
    mean = sums[2] / n
    deviation = np.sqrt(np.maximum(sums[3] / n - mean**2, 1e-12))
    at = np.sort(np.argsort(-deviation)[:2000])
    square = np.zeros((len(at), len(at)))
    for block, log in logs():
        block.data = log
        z = np.clip((block[:, at].toarray() - mean[at]) / deviation[at], -10, 10)
        square += z.T @ z
    axes = np.linalg.eigh(square)[1][:, -50:]
    for block, log in logs():
        block.data = log
        np.clip((block[:, at].toarray() - mean[at]) / deviation[at], -10, 10) @ axes


def in_process(step: str, workflow: str, folder: Path) -> dict[str, float]:
    """One step in a child, with the largest resident size of the child and of its own children."""
    command = [sys.executable, __file__, "--step", step, workflow, "--folder", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=ONE_THREAD | os.environ)
    if done.returncode:
        raise SystemExit(f"{step} {workflow} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def one_step(step: str, workflow: str, folder: Path) -> None:
    if step == "rehearse":
        figures = rehearse_step(workflow, folder)
    else:
        figures = check_step(folder) if step == "check" else loop_step(workflow, folder)
    for who, which in (("own_gb", resource.RUSAGE_SELF), ("parties_gb", resource.RUSAGE_CHILDREN)):
        figures[who] = resource.getrusage(which).ru_maxrss / 2**20
    print(json.dumps(figures))


# ---- all of them -----------------------------------------------------------------------------------------------------


def measure(cells: int, folder: Path) -> None:
    for i, (site, share) in enumerate(SITES.items()):
        command = [sys.executable, str(ROOT / "scripts" / "make_cells.py"), str(folder / f"{site}.h5ad")]
        subprocess.run([*command, "--cells", str(int(cells * share)), "--seed", str(i)], check=True)
    size = (folder / "large.h5ad").stat().st_size / 1e9
    print(f"\n{cells} cells ({size:.1f} GB) and twice {cells // 10}; 20000 genes", flush=True)
    told = in_process("check", "-", folder)
    print(f"{'check':14s} {told['large_s']:7.1f} s, {told['own_gb']:.2f} GB", flush=True)
    for workflow in OPTIONS:
        ours = in_process("rehearse", workflow, folder)
        line = (
            f"{workflow:14s} {ours['large_s']:7.1f} s at the large site, {ours['run_s']:.1f} s with checks, processes"
            f" and writing, report {ours['report_s']:.1f} s; {ours['sent_mb']:.1f} MB sent; largest party"
            f" {ours['parties_gb']:.2f} GB, carrier of frames {ours['own_gb']:.2f} GB"
        )
        if workflow != "find-outliers":
            plain = in_process("loop", workflow, folder)
            ratio = ours["large_s"] / plain["large_s"]
            line += f"; loop {plain['large_s']:.1f} s, {plain['own_gb']:.2f} GB: {ratio:.2f} times"
        print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="10^5 cells at the large site")
    parser.add_argument("--growth", type=int, nargs="+", help="cells of the large site, one run for each")
    parser.add_argument("--folder", type=Path, help="where files go; a temporary folder if none is named")
    parser.add_argument("--step", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.step:
        one_step(*args.step, args.folder)
        return
    print(f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, one thread per process")
    for cells in args.growth or [100_000 if args.quick else 1_000_000]:
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            measure(cells, Path(folder))


if __name__ == "__main__":
    main()
