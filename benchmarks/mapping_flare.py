"""Reference mapping over FLARE: wall time of hardened and semi-honest runs, four services on loopback.

    python benchmarks/mapping_flare.py [--quick] [--queries 100] [--references 2000] [--turns 2]

A coordinator and three sites, each a service and, while a run lasts, a process of its own. The blobs are those of
`mapping.py`: one site asks, two offer. Times are from the order to the end of the run, and what the asking site spent
in the run itself (`seconds` of its cost); the rest is FLARE's, which starts a process at every party for every run.
"""

from __future__ import annotations

import argparse
import os
import platform
import tempfile
from pathlib import Path

import numpy as np
from flare_services import run, services
from mapping import blobs, pooled

QUERY, SITES = "ask", ("ask", "basel", "lugano")


def cells(m: int, n: int, d: int):
    """One table of cells per site, and what pooled k-NN makes of the query."""
    import anndata as ad
    import pandas as pd

    q, r, y = blobs(m, n, d)
    made = {}
    for site, x, labels in (
        (SITES[0], q, None),
        (SITES[1], r[: n // 2], y[: n // 2]),
        (SITES[2], r[n // 2 :], y[n // 2 :]),
    ):
        names = [f"{site}{i}" for i in range(len(x))]
        column = [None] * len(x) if labels is None else [f"{label:03d}" for label in labels]
        obs = pd.DataFrame({"cell_type": pd.Categorical(column)}, index=names)
        made[site] = ad.AnnData(np.zeros((len(x), 1), np.float32), obs=obs)
        made[site].obsm["X_pca"] = x
    return made, (q, r, y)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="20 queries against 200 references, one turn")
    parser.add_argument("--queries", type=int, default=100)
    parser.add_argument("--references", type=int, default=2000)
    parser.add_argument("--dims", type=int, default=64)
    parser.add_argument("--neighbours", type=int, default=5)
    parser.add_argument("--turns", type=int, default=2, help="runs of each mode, in turn")
    parser.add_argument("--limit", type=float, default=1200.0, help="seconds that a run may take")
    args = parser.parse_args()
    if args.quick:
        args.queries, args.references, args.turns = 20, 200, 1
    os.environ["OMP_NUM_THREADS"] = "1"
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, one thread a process; load {os.getloadavg()[0]:.1f}\n"
        f"{args.queries} x {args.references}, d={args.dims}, k={args.neighbours}: FLARE, four services on loopback"
    )
    with tempfile.TemporaryDirectory(prefix="cloister-bench-") as folder:
        measure(Path(folder), args)


def measure(folder: Path, args: argparse.Namespace) -> None:
    made, clear = cells(args.queries, args.references, args.dims)
    truth, ties = pooled(*clear, args.neighbours)
    options = {"query": QUERY, "use_rep": "X_pca", "n_neighbors": args.neighbours}
    with services(folder, "map-labels", made, parameters=options, timeout=300.0) as kits:
        for _ in range(args.turns):
            for mode in ("semi-honest", "hardened"):
                one_run(kits, mode, args.limit, truth, ties)


def one_run(kits, mode, limit, truth, ties) -> None:
    from cloister.cells.files import read_cells

    took, parties = run(kits, limit, mode=mode)
    ended, results = parties[QUERY]
    found = read_cells(results / f"{QUERY}.h5ad").obs["mapped"].astype(str).to_numpy()
    agree = float((found.astype(int) == truth)[~ties].mean())
    print(
        f"  {mode:12} {took:7.1f} s from order to end, {ended.cost['seconds']:7.1f} s in the run at the asking site,"
        f" {ended.cost['rounds']} rounds, {agree:.4f} of {int((~ties).sum())} as pooled k-NN;"
        f" load {os.getloadavg()[0]:.1f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
