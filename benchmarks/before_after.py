"""Cost of the workflows before and after a change: bytes, messages, rounds and CPU, in one run.

    python benchmarks/before_after.py [--quick] [--before 5a0c885] [--repeats 3] [--only integrate,bin-values]

Both versions run alternately in processes of their own, on the same generated cells, three sites, all parties on this
machine. `before` is a commit of this repository, checked out beside it for the time of the run; `after` is the working
tree. Each process runs a workflow once before it is measured, so that imports are not counted. CPU is that of the whole
process (all parties), and of the protocols alone (inside `Session.run`, a site's own computing between two messages
included): the smallest of the repeats. The rest is the mean, since the number of sums can differ between runs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CHILD = """
import json, sys, time
import numpy as np, scipy.sparse
from anndata import AnnData
import pandas as pd
import cloister as cl
try:
    from cloister.session import Session
except ImportError:  # as it was called before
    try:
        from cloister.seat import Seat as Session
    except ImportError:
        from cloister.net.seat import Seat as Session

spent, run_role = [], Session.run

def timed(*args, **more):
    began = time.thread_time()
    try:
        return run_role(*args, **more)
    finally:
        spent.append(time.thread_time() - began)

Session.run = timed
workflow, options, cells, genes = json.loads(sys.argv[1])
rng = np.random.default_rng(0)
base = rng.gamma(0.6, 2.0, genes)
kinds = base * np.exp(rng.normal(0, 1.0, (3, genes)))
data = {}
for site in ("basel", "lugano", "vienna"):
    kind = rng.integers(0, 3, cells)
    x = rng.poisson(kinds[kind]).astype(np.float32)
    if workflow == "find-outliers":
        x = np.log1p(x[:, :8]) + rng.normal(0, 0.1, (cells, 8)).astype(np.float32)
    else:
        x = scipy.sparse.csr_matrix(x)
    names = [f"GENE{i}" for i in range(x.shape[1])]
    rows = [f"{site}{i}" for i in range(cells)]
    obs = pd.DataFrame({"cell_type": pd.Categorical([f"type {k}" for k in kind])}, index=rows)
    data[site] = AnnData(x, obs=obs, var=pd.DataFrame(index=names))
    data[site].obs["donor"] = [f"{site}{i % 12}" for i in range(cells)]
    data[site].obs["group"] = [("control", "treated")[i % 12 % 2] for i in range(cells)]
    if workflow == "propagate-labels":
        data[site].obs.loc[rng.random(cells) > 0.1, "cell_type"] = None
    data[site].obsm["X_pca"] = rng.normal(0, 1, (cells, 50)) + 2 * np.eye(3, 50)[kind]
cl.rehearse(workflow, {site: cells.copy() for site, cells in data.items()}, **options)
spent.clear()
began = time.process_time()
run = cl.rehearse(workflow, data, **options)
cpu = time.process_time() - began
cost = run.cost
print("COST", json.dumps({
    "bytes": sum(c["bytes"] for c in cost.values()),
    "messages": sum(c["messages"] for c in cost.values()),
    "rounds": max(c["rounds"] for c in cost.values()),
    "cpu": cpu,
    "roles": sum(spent),
}))
"""
WORKFLOWS = {  # options, cells per site, genes; then the same for --quick
    "bin-values": (({}, 2000, 2000), ({}, 300, 300)),
    "shared-pca": (({"n_top_genes": 1000, "n_components": 30}, 1000, 2000), ({"n_top_genes": 200}, 200, 300)),
    "find-outliers": (({}, 2000, 8), ({"trees": 20}, 300, 8)),
    "integrate": (({"use_rep": "X_pca"}, 1000, 100), ({"use_rep": "X_pca"}, 200, 100)),
    "compare-groups": (
        ({"donor_key": "donor", "group_key": "group", "groups": ["control", "treated"]}, 1000, 2000),
        ({"donor_key": "donor", "group_key": "group", "groups": ["control", "treated"]}, 300, 300),
    ),
    "train-classifier": (({"label_key": "cell_type"}, 1000, 1000), ({"label_key": "cell_type"}, 200, 200)),
    "map-labels": (
        ({"label_key": "cell_type", "use_rep": "X_pca", "query": "vienna"}, 1000, 100),
        ({"label_key": "cell_type", "use_rep": "X_pca", "query": "vienna"}, 100, 100),
    ),
    "propagate-labels": (
        ({"label_key": "cell_type", "use_rep": "X_pca"}, 500, 100),
        ({"label_key": "cell_type", "use_rep": "X_pca"}, 120, 100),
    ),
    "fine-tune": (({"rounds": 5, "local_epochs": 1}, 1000, 100), ({"rounds": 2, "local_epochs": 1}, 120, 100)),
}


def measure(source: Path, workflow: str, given: tuple[dict[str, object], int, int]) -> dict[str, float]:
    env = os.environ | {"PYTHONPATH": str(source)} | dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    words = [sys.executable, "-W", "ignore", "-c", CHILD, json.dumps([workflow, *given])]
    done = subprocess.run(words, env=env, capture_output=True, text=True)
    rows = [line[5:] for line in done.stdout.splitlines() if line.startswith("COST ")]
    if not rows:
        raise SystemExit(f"{workflow} did not finish with {source}:\n{done.stderr[-2000:]}")
    return dict(json.loads(rows[0]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--before", default="5a0c885")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", default=",".join(WORKFLOWS))
    args = parser.parse_args()
    repeats = 1 if args.quick else args.repeats
    print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; "
        f"Python {platform.python_version()}, one thread per library; before: {args.before}; {repeats} repeats"
    )
    with tempfile.TemporaryDirectory() as folder:
        old = Path(folder) / "before"
        subprocess.run(["git", "worktree", "add", "--detach", "-q", str(old), args.before], cwd=ROOT, check=True)
        try:
            print(f"{'':15s}{'bytes':>30s}{'messages':>22s}{'rounds':>16s}{'CPU, s':>24s}{'in protocols, s':>24s}")
            for workflow in args.only.split(","):
                given = WORKFLOWS[workflow][args.quick]
                both: dict[str, list[dict[str, float]]] = {"before": [], "after": []}
                for _ in range(repeats):
                    both["before"].append(measure(old / "src", workflow, given))
                    both["after"].append(measure(ROOT / "src", workflow, given))
                found = {k: {m: _one(m, [r[m] for r in rows]) for m in rows[0]} for k, rows in both.items()}
                say(workflow, found["before"], found["after"])
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(old)], cwd=ROOT, check=True)


def _one(measure: str, values: list[float]) -> float:
    return min(values) if measure in ("cpu", "roles") else sum(values) / len(values)


def say(workflow: str, before: dict[str, float], after: dict[str, float]) -> None:
    def share(name: str) -> str:
        return f"{100 * (after[name] / before[name] - 1):+.1f} %"

    cells = [
        f"{before['bytes'] / 1e6:.3f} → {after['bytes'] / 1e6:.3f} MB {share('bytes')}",
        f"{before['messages']:.0f} → {after['messages']:.0f} {share('messages')}",
        f"{before['rounds']:.0f} → {after['rounds']:.0f}",
        *(f"{before[name]:.2f} → {after[name]:.2f} {share(name)}" for name in ("cpu", "roles")),
    ]
    rest = "".join(f"{cell:>24s}" for cell in cells[3:])
    print(f"{workflow:15s}{cells[0]:>30s}{cells[1]:>22s}{cells[2]:>16s}{rest}", flush=True)


if __name__ == "__main__":
    main()
