"""A large site and two small ones: time and memory of every party, beside a plain loop over the same file.

    python benchmarks/million.py --quick                     10^5 cells and twice 10^4: some minutes, 2 GB of disk
    python benchmarks/million.py                             10^6 cells and twice 10^5: an hour or two, 45 GB of disk
    python benchmarks/million.py --growth 10000 100000       a large site of so many cells, one after the other
    python benchmarks/million.py --together 50000            three sites of so many cells, all in one process
    python benchmarks/million.py --per-cell 20 --top 500     as many cells with few values: memory, in less time
    python benchmarks/million.py --components                find-outliers alone, of cells that have 50 components only
    python benchmarks/million.py --log                       bin-values of log values, nearly all different
    python benchmarks/million.py --folder D --only bin-values    one workflow; files stay in D for the next one

Files are made by scripts/make_cells.py: 20,000 genes, some 1,400 seen in a cell; 20,000 cells are drawn and then
repeated. `check`, `bin-values`, `shared-pca`, and `find-outliers` on what shared-pca wrote: every site in a process of
its own, which writes its result. Memory is the largest resident size of any party's process, and that of the process
that checks the files and carries frames. The loop is NumPy in one process over the large site alone: the same sums, in
chunks, with no protocol around them; of find-outliers, a forest of its own rows and their scores. Both are told in
seconds of the clock, which other work on the machine lengthens, and of the processor. Files that are in `--folder`
already are taken as they are.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
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
DISTINCT = 20_000  # cells that are drawn; in a larger file they repeat
STEP = 2000  # cells of a chunk in the plain loops
SITES = ("large", "middle", "small")
OPTIONS = {
    "bin-values": {},
    "shared-pca": {"n_components": 50, "n_top_genes": 2000},
    "find-outliers": {"use_rep": "X_shared_pca"},
}


# ---- one step, in a process of its own -------------------------------------------------------------------------------


def rehearse_step(workflow: str, folder: Path, *, processes: bool) -> dict[str, float]:
    """Rehearse, with a process per party or all in this one, and write the results."""
    from cloister.cells.files import write_cells
    from cloister.rehearsal.rehearsal import rehearse

    source = components_in(folder) if workflow == "find-outliers" else folder
    began = time.perf_counter()
    paths = {site: source / f"{site}.h5ad" for site in SITES}
    run = rehearse(workflow, paths, processes=processes, timeout=1800.0, **OPTIONS[workflow])
    ran = time.perf_counter() - began
    (folder / workflow).mkdir()
    run.report(folder / workflow / "report.html")
    drawn = time.perf_counter() - began - ran
    for site, adata in run.data.items():
        path = folder / workflow / f"{site}.h5ad"
        if not processes or not hasattr(adata, "origin"):  # a small file is loaded again
            write_cells(adata, path)
        elif workflow == "shared-pca":  # what find-outliers goes on with; not copied, as only a rehearsal would
            os.link(adata.origin.path, path)
    cost = run.cost["large"]
    figures = {"large_s": cost["seconds"], "large_cpu": cost["cpu_seconds"], "sent_mb": cost["bytes"] / 1e6}
    return figures | {"run_s": ran, "report_s": drawn}


def components_in(folder: Path) -> Path:
    """Where the files with components are: what shared-pca wrote, or the cells themselves, made with nothing else."""
    return folder / "shared-pca" if (folder / "shared-pca").exists() else folder


def check_step(folder: Path) -> dict[str, float]:
    """What `cloister check` does with the large file."""
    from cloister.cells import tables as cells
    from cloister.cells.files import open_cells

    began, cpu, idle = time.perf_counter(), time.thread_time(), queued()
    cells.describe(open_cells(folder / "large.h5ad"))
    used = {"large_s": time.perf_counter() - began, "large_cpu": time.thread_time() - cpu}
    return used | {"queued_s": queued() - idle}


def queued() -> float:
    """Seconds for which this thread was ready to run and had no processor; 0 where the system does not say."""
    told = Path("/proc/thread-self/schedstat")
    return int(told.read_text().split()[1]) / 1e9 if told.exists() else 0.0


def chunks(path: Path):
    with h5py.File(path) as file:
        matrix = sparse_dataset(file["X"])
        for start in range(0, matrix.shape[0], STEP):
            yield matrix[start : min(start + STEP, matrix.shape[0])]


def loop_step(workflow: str, folder: Path) -> dict[str, float]:
    """The same sums over the large site, without a protocol."""
    began, cpu, path = time.perf_counter(), time.thread_time(), folder / "large.h5ad"
    if workflow == "bin-values":
        loop_histogram(path)
    elif workflow == "shared-pca":
        loop_covariance(path)
    else:
        loop_forest(components_in(folder) / "large.h5ad")
    return {"large_s": time.perf_counter() - began, "large_cpu": time.thread_time() - cpu}


def loop_histogram(path: Path) -> None:
    """Coarse counts, and fine counts of the intervals with a quantile; bins are computed when a site writes them."""
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


def loop_covariance(path: Path) -> None:
    """Sums of 20,000 genes, products of those that are chosen, and the projection on 50 axes."""

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
    at = np.sort(np.argsort(-deviation)[: OPTIONS["shared-pca"]["n_top_genes"]])
    square = np.zeros((len(at), len(at)))
    for block, log in logs():
        block.data = log
        z = np.clip((block[:, at].toarray() - mean[at]) / deviation[at], -10, 10)
        square += z.T @ z
    axes = np.linalg.eigh(square)[1][:, -50:]
    for block, log in logs():
        block.data = log
        np.clip((block[:, at].toarray() - mean[at]) / deviation[at], -10, 10) @ axes


def loop_forest(path: Path) -> None:
    """100 trees of 256 rows, and every row's score."""
    from cloister.models import isolation_forest

    with h5py.File(path) as file:
        rows = file[f"obsm/{OPTIONS['find-outliers']['use_rep']}"][:].astype(np.float64)
    rows = (rows - rows.mean(axis=0)) / rows.std(axis=0)
    scores = isolation_forest.fit(rows, rng=np.random.default_rng(0)).score(rows)
    np.quantile(scores, 0.95)


def in_process(step: str, workflow: str, folder: Path) -> dict[str, float]:
    """One step in a child, with the largest resident size of the child and of its own children."""
    command = [sys.executable, __file__, "--step", step, workflow, "--folder", str(folder)]
    command += ["--top", str(OPTIONS["shared-pca"]["n_top_genes"])]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=ONE_THREAD | os.environ)
    if done.returncode:
        raise SystemExit(f"{step} {workflow} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def one_step(step: str, workflow: str, folder: Path) -> None:
    if step in ("rehearse", "together"):
        figures = rehearse_step(workflow, folder, processes=step == "rehearse")
    else:
        figures = check_step(folder) if step == "check" else loop_step(workflow, folder)
    for who, which in (("own_gb", resource.RUSAGE_SELF), ("parties_gb", resource.RUSAGE_CHILDREN)):
        figures[who] = resource.getrusage(which).ru_maxrss / 2**20
    print(json.dumps(figures))


# ---- all of them -----------------------------------------------------------------------------------------------------


def make_sites(sizes: tuple[int, ...], folder: Path, kept: Path, per_cell: int) -> None:
    """A file per site, in `folder`; those that are kept are not made again."""
    for i, (site, cells) in enumerate(zip(SITES, sizes, strict=True)):
        path = kept / f"{cells}-{per_cell}-{i}.h5ad"
        if not path.exists():
            part = path.with_suffix(".part.h5ad")
            command = [sys.executable, str(ROOT / "scripts" / "make_cells.py"), str(part)]
            sizes_of = [
                "--cells",
                str(cells),
                "--per-cell",
                str(per_cell),
                "--distinct",
                str(DISTINCT),
                "--seed",
                str(i),
            ]
            subprocess.run([*command, *sizes_of], check=True)
            part.rename(path)
        (folder / f"{site}.h5ad").symlink_to(path)
    tell_sites(sizes, folder)


def take_logs(folder: Path) -> None:
    """log(1 + counts per 10,000) in place of counts, in copies of the files."""
    for site in SITES:
        path = folder / f"{site}.h5ad"
        counts = path.resolve()
        path.unlink()
        shutil.copyfile(counts, path)
        with h5py.File(path, "r+") as file:
            data, indptr = file["X/data"], file["X/indptr"][:]
            for start in range(0, len(indptr) - 1, STEP):
                ends = indptr[start : start + STEP + 1]
                part = data[ends[0] : ends[-1]].astype(np.float64)
                total = np.add.reduceat(part, ends[:-1] - ends[0])
                data[ends[0] : ends[-1]] = np.log1p(1e4 * part / np.repeat(total, np.diff(ends)))


def make_components(sizes: tuple[int, ...], folder: Path) -> None:
    """Cells of ten types that have nothing but 50 components."""
    from anndata import AnnData
    from scipy import sparse

    for i, (site, cells) in enumerate(zip(SITES, sizes, strict=True)):
        rng = np.random.default_rng(i)
        centres = np.random.default_rng(2016).normal(0, 4, (10, 50))
        rows = rng.normal(size=(cells, 50)).astype(np.float32) + centres[rng.integers(10, size=cells)]
        empty = AnnData(sparse.csr_matrix((cells, 1), dtype=np.float32))
        empty.obsm[OPTIONS["find-outliers"]["use_rep"]] = rows.astype(np.float32)
        empty.write_h5ad(folder / f"{site}.h5ad")
    tell_sites(sizes, folder)


def tell_sites(sizes: tuple[int, ...], folder: Path) -> None:
    size = (folder / "large.h5ad").stat().st_size / 1e9
    print(f"\n{sizes[0]} cells ({size:.1f} GB), {sizes[1]} and {sizes[2]}", flush=True)


def measure_together(folder: Path, asked: list[str]) -> None:
    for workflow in asked:
        ours = in_process("together", workflow, folder)
        print(
            f"{workflow:14s} {ours['run_s']:7.1f} s, report {ours['report_s']:.1f} s, {ours['own_gb']:.2f} GB",
            flush=True,
        )


def measure(folder: Path, asked: list[str], without: str | None) -> None:
    told = in_process("check", "-", folder)
    print(
        f"{'check':14s} {told['large_s']:7.1f} s ({told['large_cpu']:.1f} s of the processor, {told['queued_s']:.1f} s"
        f" without one), {told['own_gb']:.2f} GB",
        flush=True,
    )
    for workflow in asked:
        ours = in_process("rehearse", workflow, folder) if without != "run" else None
        plain = in_process("loop", workflow, folder) if without != "loop" else None
        line = f"{workflow:14s}"
        if ours is not None:
            line += (
                f" {ours['large_s']:7.1f} s at the large site ({ours['large_cpu']:.1f} s of the processor),"
                f" {ours['run_s']:.1f} s with checks, processes and writing, report {ours['report_s']:.1f} s;"
                f" {ours['sent_mb']:.1f} MB sent; largest party {ours['parties_gb']:.2f} GB, carrier of frames"
                f" {ours['own_gb']:.2f} GB;"
            )
        if plain is not None:
            line += f" loop {plain['large_s']:.1f} s ({plain['large_cpu']:.1f} s), {plain['own_gb']:.2f} GB;"
        if ours is not None and plain is not None:
            line += f" {ours['large_s'] / plain['large_s']:.2f} times ({ours['large_cpu'] / plain['large_cpu']:.2f});"
        print(f"{line} load {os.getloadavg()[0]:.0f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="10^5 cells at the large site")
    parser.add_argument("--growth", type=int, nargs="+", help="cells of the large site, one run for each")
    parser.add_argument("--together", type=int, help="cells of each of three sites, rehearsed in one process")
    parser.add_argument("--per-cell", type=int, default=1400, help="genes that are seen in a cell")
    parser.add_argument("--top", type=int, default=2000, help="genes that shared-pca chooses")
    parser.add_argument("--only", nargs="+", choices=list(OPTIONS), help="these workflows; shared-pca first, if asked")
    parser.add_argument("--without", choices=("run", "loop"), help="leave one of the two out, where time is short")
    parser.add_argument("--log", action="store_true", help="bin-values of log values")
    parser.add_argument("--components", action="store_true", help="find-outliers of cells that are components only")
    parser.add_argument("--folder", type=Path, help="where files go and stay; a temporary folder if none is named")
    parser.add_argument("--step", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    OPTIONS["shared-pca"]["n_top_genes"] = args.top
    if args.step:
        one_step(*args.step, args.folder)
        return
    only = ["find-outliers"] if args.components else ["bin-values"] if args.log else args.only or OPTIONS
    asked = [w for w in OPTIONS if w in only]
    if "find-outliers" in asked and not args.components and ("shared-pca" not in asked or args.without == "run"):
        raise SystemExit("find-outliers needs what shared-pca writes: ask for both, or for --components")
    print(f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, one thread per process")
    for cells in args.growth or [args.together or (100_000 if args.quick else 1_000_000)]:
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            home, kept = Path(folder), args.folder or Path(folder)
            sizes = (cells, cells, cells) if args.together else (cells, cells // 10, cells // 10)
            if args.components:
                make_components(sizes, home)
            else:
                make_sites(sizes, home, kept, args.per_cell)
            if args.log:
                take_logs(home)
            if args.together:
                measure_together(home, asked)
            else:
                measure(home, asked, args.without)


if __name__ == "__main__":
    main()
