"""Integration measured beside harmonypy on pooled cells: how far batches mix, what it costs kinds of cells, the price.

    python benchmarks/integration.py --quick        every sixth cell of the blood cells
    python benchmarks/integration.py                all cells
    python benchmarks/integration.py --scale 100000     one site of so many simulated cells, two of 5000

Blood cells of four studies, each a site (`pbmc_federation.h5ad`); lung cells of two studies with two technologies each,
two sites of two batches (`lung_ts_vs_hlca.h5ad`); cell lines on five plates, each a site (`cellline_mixology.h5ad`, on
which nothing was tuned). Shared PCA of 30 components first, then `integrate` in each mode; the
same components of the pooled cells through harmonypy, with its own defaults. By batch, over all cells:

  own         share of a cell's 10 nearest cells, of all batches, that are of its own batch
  accuracy    labels by the 10 nearest cells of the other batches, over labels that occur there
  later       a fifth of every batch is kept out and placed afterwards by the model: own and accuracy of these cells

Targets: own no more than 0.05 above harmonypy, accuracy no more than 0.02 below.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import anndata as ad
import numpy as np
from sklearn.neighbors import NearestNeighbors

from cloister.run.rehearsal import rehearse

K = 10


def studies(data: Path, *, quick: bool):
    """Name, sites, batch column, label column."""
    for name, key, label in (
        ("pbmc_federation", "batch", "cell_type"),
        ("lung_ts_vs_hlca", "study", "cell_type_coarse"),
        ("cellline_mixology", "batch", "cell_type"),
    ):
        path = data / "scrna" / f"{name}.h5ad"
        if not path.exists():
            print(f"{path.name} is not here; not measured")
            continue
        whole = ad.read_h5ad(path)
        whole = whole[:: 6 if quick and name == "pbmc_federation" else 1]
        sites = {
            str(v).lower().replace("_", "-"): whole[(whole.obs[key] == v).to_numpy()].copy()
            for v in whole.obs[key].unique()
        }
        yield name, sites, "batch", label


def own_share(x, batch):
    near = NearestNeighbors(n_neighbors=K + 1).fit(x).kneighbors(x, return_distance=False)[:, 1:]
    return (batch[near] == batch[:, None]).mean(axis=1)


def right_labels(x, batch, labels):
    """NaN where no other batch has the label."""
    kinds, codes = np.unique(labels, return_inverse=True)
    right = np.full(len(x), np.nan)
    for b in np.unique(batch):
        here, there = np.flatnonzero(batch == b), np.flatnonzero(batch != b)
        near = NearestNeighbors(n_neighbors=K).fit(x[there]).kneighbors(x[here], return_distance=False)
        votes = np.zeros((len(here), len(kinds)), int)
        for column in codes[there][near].T:
            votes[np.arange(len(here)), column] += 1
        known = np.isin(labels[here], labels[there])
        right[here[known]] = (votes.argmax(axis=1) == codes[here])[known]
    return right


def rows_of(name, x, batch, labels, only=None):
    own, right = own_share(x, batch), right_labels(x, batch, labels)
    use = np.ones(len(x), bool) if only is None else only
    cells = [
        f"{np.mean(own[use & (batch == b)]):.3f} {np.nanmean(right[use & (batch == b)]):.3f}" for b in np.unique(batch)
    ]
    print(f"{name:22s} {np.mean(own[use]):.3f}  {np.nanmean(right[use]):.3f}   " + "   ".join(cells), flush=True)
    return float(np.mean(own[use])), float(np.nanmean(right[use]))


def harmonypy(x, batch):
    try:
        import harmonypy as hm
    except ImportError:
        return None
    import pandas as pd

    began = time.perf_counter()
    found = np.asarray(hm.run_harmony(x, pd.DataFrame({"batch": batch}), ["batch"], verbose=False).Z_corr)
    return (found if found.shape == x.shape else found.T), time.perf_counter() - began


def measure(name, sites, batch_key, label, *, quick):
    run = rehearse("shared-pca", sites, n_components=30, n_top_genes=500 if quick else 1000,
                   library_key="n_counts_all_genes", timeout=600)  # fmt: skip
    cells = run.data

    def together(find):
        return np.concatenate([find(a) for a in cells.values()])

    x = together(lambda a: a.obsm["X_shared_pca"])
    batch = together(lambda a: a.obs[batch_key].astype(str).to_numpy())
    labels = together(lambda a: a.obs[label].astype(str).to_numpy())
    print(f"\n{name}: {len(x)} cells, {len(sites)} sites, batches {', '.join(np.unique(batch))}")
    print(f"{'':22s} own    accuracy  of each batch")
    rows_of("shared PCA", x, batch, labels)
    peer = harmonypy(x, batch)
    wanted = None if peer is None else rows_of(f"harmonypy, {peer[1]:.1f} s", peer[0], batch, labels)
    for mode in ("hardened", "published"):
        began = time.perf_counter()
        done = rehearse("integrate", cells, mode=mode, batch_key=batch_key, timeout=600)
        took = time.perf_counter() - began
        moved = np.concatenate([done.data[p].obsm["X_integrated"] for p in cells])
        found = rows_of(mode, moved, batch, labels)
        sent = max(c["bytes"] for p, c in done.cost.items() if p != "coordinator")
        said = done.results["coordinator"]
        mixed = said["own_site"]
        print(f"    {said['sums']} sums, {said['clusters']} clusters, {sent / 1e6:.1f} MB sent per site, {took:.0f} s; "
              f"own site in a cell's clusters {mixed['before']:.3f} before, {mixed['after']:.3f} after, "
              f"{mixed['if_mixed']:.3f} if mixed")  # fmt: skip
        if wanted is not None:
            print(f"    beside harmonypy: own {found[0] - wanted[0]:+.3f} (target at most +0.05), "
                  f"accuracy {found[1] - wanted[1]:+.3f} (target at least -0.02)")  # fmt: skip
    later(cells, batch_key, label)


def later(cells, batch_key, label):
    """Every fifth cell comes after the run; the model of its site places it."""
    at = {p: np.arange(a.n_obs) % 5 == 0 for p, a in cells.items()}
    done = rehearse("integrate", {p: a[~at[p]].copy() for p, a in cells.items()}, batch_key=batch_key, timeout=600)
    x, batch, labels, new = [], [], [], []
    for p, a in cells.items():
        rest = a[at[p]].copy()
        done.outcomes[p].model.transform(rest)
        for part in (done.data[p], rest):
            x.append(part.obsm["X_integrated"])
            batch.append(part.obs[batch_key].astype(str).to_numpy())
            labels.append(part.obs[label].astype(str).to_numpy())
            new.append(np.full(part.n_obs, part is rest))
    x, batch, labels, new = map(np.concatenate, (x, batch, labels, new))
    rows_of("later, placed", x, batch, labels, new)
    rows_of("those of the run", x, batch, labels, ~new)


def scale(cells):
    """Ten kinds of cells in 30 columns, a shift for every site."""
    rng = np.random.default_rng(0)
    kinds, sites = rng.normal(0, 4, (10, 30)), {}
    for p, n in (("large", cells), ("small", 5000), ("other", 5000)):
        a = ad.AnnData(np.zeros((n, 1), np.float32))
        a.obs_names = [f"{p}{i}" for i in range(n)]
        shift = rng.normal(0, 2, 30)
        a.obsm["X_shared_pca"] = kinds[rng.integers(0, 10, n)] + shift + rng.normal(0, 1, (n, 30))
        sites[p] = a
    began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    run = rehearse("integrate", sites, timeout=600)
    more = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - began) / 1e6
    cost, said = run.cost["large"], run.results["coordinator"]
    print(f"{cells} cells at one site: {cost['seconds']:.0f} s, {cost['cpu_seconds']:.0f} s of its CPU, "
          f"{cost['bytes'] / 1e6:.1f} MB sent, {said['sums']} sums; {more:.2f} GB more for all sites")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="every sixth blood cell, 500 genes")
    parser.add_argument("--scale", type=int, default=0, help="simulated cells of one site, instead of real sets")
    parser.add_argument("--only", default="", help="the set of that name")
    parser.add_argument("--data", type=Path, default=Path(__file__).parents[2] / "shared" / "data")
    args = parser.parse_args()
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, {os.environ['OMP_NUM_THREADS']} thread(s), all parties on one"
    )
    if args.scale:
        scale(args.scale)
        return
    for name, sites, batch_key, label in studies(args.data, quick=args.quick):
        if args.only in ("", name):
            measure(name, sites, batch_key, label, quick=args.quick)


if __name__ == "__main__":
    main()
