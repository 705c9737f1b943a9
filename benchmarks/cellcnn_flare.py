"""An encrypted CellCnn training over FLARE: wall time and bytes, four services on loopback.

    python benchmarks/cellcnn_flare.py [--quick] [--steps 20]

A coordinator and three sites of simulated donors (`cl.demo_donors`), each a service and, while the run lasts, a process
of its own. Beside it the same training rehearsed in one process, and the clear twin, whose weights it must have.
"""

from __future__ import annotations

import argparse
import os
import platform
import tempfile
import time
from pathlib import Path

import numpy as np
from flare_services import run, services

import cloister as cl


def difference(result, twin) -> float:
    return max(float(np.abs(np.array(result[k]) - np.array(twin[k])).max()) for k in ("filters", "dense"))


def told(cost) -> str:
    return f"{cost['seconds']:.1f} s, {cost['cpu_seconds']:.1f} CPU-s, {cost['bytes'] / 1e6:.0f} MB sent"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two steps")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--limit", type=float, default=1800.0, help="seconds that the run may take")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    options = {"n_filters": 8, "n_steps": 2 if args.quick else args.steps, "open_model": True}
    sites = cl.demo_donors()
    twin = cl.rehearse("train-cellcnn", data=sites, mode="plain", **options).results["basel"]
    markers, threads = len(twin["markers"]), os.environ["OMP_NUM_THREADS"]
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, {threads} thread(s) a party; load {os.getloadavg()[0]:.1f}\n"
        f"three sites, {markers} markers, 8 filters, {options['n_steps']} steps of 67 inputs a site"
    )
    began = time.monotonic()
    here = cl.rehearse("train-cellcnn", data=sites, timeout=args.limit, **options)
    print(
        f"  one process: {time.monotonic() - began:.1f} s in all; a site {told(here.cost['basel'])};"
        f" difference to the twin {difference(here.results['basel'], twin):.1e}",
        flush=True,
    )
    with (
        tempfile.TemporaryDirectory(prefix="cloister-bench-") as folder,
        services(Path(folder), "train-cellcnn", sites, parameters=options, timeout=300.0) as kits,
    ):
        took, ended = run(kits, args.limit, consent=["open-model"])
    for party, (end, _) in ended.items():
        print(f"  over FLARE, {party}: {told(end.cost)}")
    print(
        f"  over FLARE, from order to end: {took:.1f} s;"
        f" difference to the twin {difference(ended['basel'][0].result, twin):.1e}; load {os.getloadavg()[0]:.1f}"
    )


if __name__ == "__main__":
    main()
