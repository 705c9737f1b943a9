"""`cl.advise` measured: what it recommends on five sets, and whether that was right on cells that it did not see.

    python benchmarks/advise.py                    all sets, up to 700 cells a site; about half an hour on two cores
    python benchmarks/advise.py --only blood demo  some of them
    python benchmarks/advise.py --quick            300 cells a site

Half of the cells of every site are later ones: their labels are hidden from `advise`, which sees the other half. Then
every way labels the later cells with all labels of the first half (`advise.Task`, whose held-out cells are the later
ones). The recommendation was right if it is what the same rule recommends on the later cells; "as good" says that it is
behind the best on them by no more than one standard error; "left" is the accuracy that the best has more. In the demo
sites know different kinds, and later cells are of all kinds; elsewhere each site labels all kinds that it has.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).parent))

from classifier import pancreas, split

from cloister.cells.demo import demo_encoder
from cloister.demo.story import KNOWN, Story
from cloister.rehearsal import advise

LOG = Path(__file__).parent / "logs" / "advise.json"
LIBRARY = {"library_key": "n_counts_all_genes"}


def studies(data: Path):
    """Name → sites, label column, options; labels of the demo's sites are those of the kinds that they know."""
    import anndata as ad

    def read(name):
        return ad.read_h5ad(data / "scrna" / f"{name}.h5ad")

    yield "blood", lambda: (split(read("pbmc_federation"), "batch"), "cell_type", LIBRARY)
    yield "lung", lambda: (split(read("lung_ts_vs_hlca"), "donor"), "cell_type_coarse", LIBRARY)
    yield "pancreas", lambda: (pancreas(data / "scrna"), "cell_type", {})
    yield "glioblastoma", lambda: (split(read("glioblastoma_panobinostat_zhao"), "patient_id"), "annotation", {})
    yield "demo", demo


def demo():
    story = Story.draw()
    for site, a in story.sites.items():
        a.obs["kind"] = story.truth[site]
        a.obs["known"] = np.isin(story.truth[site], KNOWN[site])
    return story.sites, "kind", {"model": str(demo_encoder()), "ring": "small"}


def measured(name, sites, label, options, n_cells):
    rng, first, later = np.random.default_rng(0), {}, {}
    for site, a in sites.items():
        some = np.sort(rng.permutation(a.n_obs)[: 2 * n_cells])
        a = a[some].copy()
        half = rng.random(a.n_obs) < 0.5
        truth = a.obs[label].astype(str).to_numpy().astype(object)
        known = a.obs["known"].to_numpy() if "known" in a.obs else np.ones(a.n_obs, bool)
        a.obs["given"] = np.where(half & known, truth, None)
        first[site], later[site] = a, (truth, ~half)
    began = time.monotonic()
    task = Rows(first, {"label_key": "given", **options}, None)
    found = task.advice(advise.WAYS)
    took = time.monotonic() - began
    after = Later(first, later, {"label_key": "given", **options}).advice(advise.WAYS)
    chosen, best = after.way(found.recommended), after.way(after.best)
    row = {
        "set": name, "sites": len(sites), "cells": {s: a.n_obs for s, a in first.items()},
        "recommended": found.recommended, "best_seen": found.best, "held_out": found.held_out,
        "later_cells": after.held_out, "on_later_cells": after.recommended, "best_later": after.best,
        "right": found.recommended == after.recommended, "as_good": chosen.as_good,
        "left": round(float(best.accuracy - chosen.accuracy), 4), "seconds": round(took, 1), "rule": found.rule,
        "seen": found.rows(), "later": after.rows(),
    }  # fmt: skip
    print(f"\n{name}: {found}\n\non later cells:\n{after}", flush=True)
    return row


class Rows(advise.Task):
    """As `cl.advise` takes it, with all cells."""

    def __init__(self, data, options, agreed):
        super().__init__(data, options, agreed, held_out=0.2, n_cells=0, seed=0, timeout=900.0, on_event=None)


class Later(advise.Task):
    """All labels of the first half are given; the later cells are scored."""

    def __init__(self, data, later, options):
        super().__init__(data, options, None, held_out=0.2, n_cells=0, seed=0, timeout=900.0, on_event=None)
        for site, (truth, asked) in later.items():
            self.sites[site].obs[advise.COLUMN] = self.sites[site].obs["given"].to_numpy()
            self.truth[site], self.held[site] = truth, asked
            self.weights[site] = np.ones(int(asked.sum()))
        self.hidden, self.count = dict.fromkeys(data, ()), sum(int(h.sum()) for h in self.held.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path(__file__).parents[2] / "shared" / "data")
    parser.add_argument("--only", nargs="+", default=())
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    rows = {row["set"]: row for row in json.loads(LOG.read_text())} if LOG.exists() else {}
    for name, load in studies(args.data):
        if args.only and name not in args.only:
            continue
        rows[name] = measured(name, *load(), 150 if args.quick else 350)
        if not args.quick:
            LOG.write_text(json.dumps(list(rows.values()), indent=1) + "\n")
    print(f"\nmachine: {platform.machine()}, {os.cpu_count()} cores, one thread a library")
    for row in rows.values():
        print({k: row[k] for k in ("set", "recommended", "on_later_cells", "best_later", "right", "as_good", "left")})


if __name__ == "__main__":
    main()
