"""The demo: every workflow on small real data that ships with the package, in minutes on two cores.

Each entry of `DEMOS` plays its workflow's modes in rehearsal and returns the runs and the rows of the table: what the
pooled analysis would give, what the federation gives, what a site alone would get, what an attack finds, and the cost.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from cloister import cells, demo_data
from cloister.channel import Event
from cloister.rehearsal import Run, rehearse

HEADER = (
    "workflow",
    "mode",
    "measure",
    "pooled",
    "federated",
    "alone",
    "what an attack finds",
    "sent per site",
    "seconds",
)
Tell = Callable[[Event], None] | None


def run_demo(
    folder: Path, *, on_event: Tell = None, say: Callable[[str], None] = print
) -> tuple[list[tuple[Any, ...]], Path]:
    """Play every demo, save each run under `folder`, and write one report. Returns the table and the page."""
    from cloister.report import write_report
    from cloister.results import save_run

    rows: list[tuple[Any, ...]] = [HEADER]
    runs: list[Run] = []
    for name, play in DEMOS.items():
        say(f"{name} ...")
        began = time.perf_counter()
        played, lines = play(on_event)
        runs += played
        rows += lines
        for run in played:
            save_run(run, folder / f"{name}-{run.study.mode}")
        say(f"{name}: {time.perf_counter() - began:.1f} s")
    return rows, write_report(folder / "report.html", runs, title="Cloister demo", table=rows)


def write_sites(folder: Path) -> list[Path]:
    """Write the demo's three sites as .h5ad files, to try the command line on."""
    from cloister.cell_files import write_cells

    folder.mkdir(parents=True, exist_ok=True)
    files = {folder / f"{site}.h5ad": adata for site, adata in demo_data.demo_sites().items()}
    for path, adata in files.items():
        write_cells(adata, path)
    return list(files)


def cost_of(run: Run) -> tuple[str, str]:
    """What a site sent, on average, and the seconds of the whole run."""
    from cloister.report_parts import size

    sites = [run.cost[p] for p in run.study.sites if p in run.cost]
    sent = float(np.mean([c["bytes"] for c in sites]))
    return size(sent), f"{max(c['seconds'] for c in run.cost.values()):.1f}"


def bin_values(tell: Tell) -> tuple[list[Run], list[tuple[Any, ...]]]:
    """Share of values that get the bin which the pooled quantiles would give them."""
    from cloister.workflows.bin_values import digitise

    sites = demo_data.demo_sites()
    values = {p: np.concatenate([*cells.nonzero_values(a)]) for p, a in sites.items()}
    levels = np.linspace(0, 1, 50)
    pooled = np.quantile(np.concatenate([*values.values()]), levels)

    def right(edges: Callable[[str], Any]) -> float:
        hits = [digitise(v, edges(p)) == digitise(v, pooled) for p, v in values.items()]
        return float(np.mean(np.concatenate(hits)))

    alone = right(lambda p: np.quantile(values[p], levels))
    runs, rows = [], []
    for mode in ("hardened", "published"):
        run = rehearse("bin-values", sites, mode=mode, on_event=tell)
        found = right(lambda p, run=run: run.data[p].uns["cloister"]["bin_edges"])
        seen = [e for p in sites for e, _ in run.receipts[p].entries if e.kind == "opened" and "local" in e.name]
        leak = f"{len(seen)} sites' own quantiles" if seen else "pooled counts only"
        runs.append(run)
        rows.append(("bin-values", mode, "same bin", "100.0%", f"{found:.1%}", f"{alone:.1%}", leak, *cost_of(run)))
    return runs, rows


def map_labels(tell: Tell) -> tuple[list[Run], list[tuple[Any, ...]]]:
    """Accuracy of the labels that one site gets from the other two, against its own."""
    from cloister.attacks import trilateration
    from cloister.protocols import plain_knn
    from cloister.workflows.mapping_baselines import mapping_baselines

    sites, query = demo_data.demo_sites(), "vienna"
    few = {p: a[::4].copy() for p, a in sites.items()}  # published takes ten to twenty times the bytes
    runs, rows = [], []
    for mode in ("hardened", "published", "plain"):
        data = few if mode == "published" else sites
        table = mapping_baselines(data, query=query)
        run = rehearse("map-labels", data, mode=mode, query=query, on_event=tell)
        pooled, alone = (
            table["pooled k-NN"]["accuracy"],
            max(table[f"{p} alone"]["accuracy"] for p in data if p != query),
        )
        found, leak = run.results[query]["accuracy"], "sizes only"
        if mode == "plain":  # what the coordinator is sent, and what it makes of it
            x = {p: np.rint(cells.embedding(a, "X_pca") * 2**16).astype(np.int64) for p, a in data.items()}
            hits = 0
            for p in x.keys() - {query}:
                d2, numbers = plain_knn.nearest(x[query], x[p], np.zeros(len(x[p]), np.int64), 10)
                view = trilateration.View(x[query].astype(float), numbers, d2.astype(float))
                hits += trilateration.rebuilt(view, x[p].astype(float), within=2**16 / 100)
            leak = f"{hits} of {sum(len(v) for p, v in x.items() if p != query)} references rebuilt"
        runs.append(run)
        figures = (f"{pooled:.1%}", f"{found:.1%}", f"{alone:.1%}")
        rows.append(("map-labels", mode, "accuracy", *figures, leak, *cost_of(run)))
    return runs, rows


DEMOS: dict[str, Callable[[Tell], tuple[list[Run], list[tuple[Any, ...]]]]] = {
    "bin-values": bin_values,
    "map-labels": map_labels,
}
