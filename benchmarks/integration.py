"""Integration measured beside harmonypy on pooled cells: how far batches mix, what it costs kinds of cells, the price.

    python benchmarks/integration.py --quick        every sixth cell of the blood cells
    python benchmarks/integration.py                all cells
    python benchmarks/integration.py --scale 100000     one site of so many simulated cells, two of 5000
    python benchmarks/integration.py --leverage         what a party could do that knew the weights of a site's cells

Blood cells of four studies, each a site (`pbmc_federation.h5ad`); lung cells of two studies with two technologies each,
two sites of two batches (`lung_ts_vs_hlca.h5ad`); pancreas of two species, each a site
(`pancreas_baron_human_mouse_small.h5ad`, 175 and 153 cells); glioblastoma of five patients, each a site
(`glioblastoma_panobinostat_zhao.h5ad`); cell lines on five plates, each a site (`cellline_mixology.h5ad`, on which
nothing was tuned). Shared PCA of 30 components first, then `integrate` in each mode; the
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

from cloister.rehearsal.rehearsal import rehearse

K = 10


def studies(data: Path, *, quick: bool):
    """Name, sites, batch column, label column."""
    for name, key, label in (
        ("pbmc_federation", "batch", "cell_type"),
        ("lung_ts_vs_hlca", "study", "cell_type_coarse"),
        ("pancreas_baron_human_mouse_small", "species", "cell_type"),
        ("glioblastoma_panobinostat_zhao", "patient_id", "annotation"),
        ("cellline_mixology", "batch", "cell_type"),
    ):
        path = data / "scrna" / f"{name}.h5ad"
        if not path.exists():
            print(f"{path.name} is not here; not measured")
            continue
        whole = ad.read_h5ad(path)
        whole = whole[:: 6 if quick and name == "pbmc_federation" else 1].copy()
        if "batch" not in whole.obs:
            whole.obs["batch"] = whole.obs[key]
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
                   library_key="n_counts_all_genes" if "n_counts_all_genes" in next(iter(sites.values())).obs else None,
                   timeout=600)  # fmt: skip
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
    run = rehearse("integrate", sites, timeout=600, max_share=1.0)
    more = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - began) / 1e6
    cost, said = run.cost["large"], run.results["coordinator"]
    print(f"{cells} cells at one site: {cost['seconds']:.0f} s, {cost['cpu_seconds']:.0f} s of its CPU, "
          f"{cost['bytes'] / 1e6:.1f} MB sent, {said['sums']} sums; {more:.2f} GB more for all sites")  # fmt: skip


def leverage(path):
    """Weights of one site's cells in all sums of directions of a run, and what they would give to who knew them."""
    from cloister.workflows.integrate import harmony_steps
    from cloister.workflows.integrate.harmony_steps import Cells, Course, Params, together

    whole = ad.read_h5ad(path)[::4].copy()
    sites = {
        str(b).replace("_", "-"): whole[(whole.obs["batch"] == b).to_numpy()].copy()
        for b in whole.obs["batch"].unique()
    }
    run = rehearse("shared-pca", sites, n_components=30, n_top_genes=500, library_key="n_counts_all_genes", timeout=600)
    x = {p: np.asarray(a.obsm["X_shared_pca"], float) for p, a in run.data.items()}
    first = next(iter(x))
    seen, real = [], Course.centroids

    def watched(self, line, Y):
        if len(self.part.x) == len(x[first]) and np.array_equal(self.part.x, x[first]):
            self.part.settle()
            R, z = np.zeros((len(x[first]), len(Y))), np.zeros_like(x[first])
            for j in range(self.s.blocks):
                for at, directions, piece in self.part.of_block(j):
                    shown = piece * self.part.open
                    R[at], z[at] = shown / np.maximum(shown.sum(axis=1, keepdims=True), 1e-300), directions
            seen.append((R[:, self.part.open], z))
        return (yield from real(self, line, Y))

    Course.centroids = watched
    cells = {p: Cells(v, np.zeros(len(v), np.int64)) for p, v in x.items()}
    together(Params(tuple(cells), "coordinator", "X_shared_pca"), cells)
    Course.centroids = real
    n = len(x[first])
    print(f"{first}: {n} cells; weights of {len(seen)} sums of directions, {seen[0][0].shape[1]} to "
          f"{seen[-1][0].shape[1]} open clusters")  # fmt: skip
    for count in (1, 2, 5, 10, 20, len(seen)):
        A = np.hstack([R for R, _ in seen[:count]])
        U, values, _ = np.linalg.svd(A, full_matrices=False)
        U = U[:, values > 1e-9 * values[0]]
        h = np.square(U).sum(axis=1)
        z = seen[0][1]  # cells before they are moved: the first ten sums are of these
        likeness = []
        for grain in (0.0, harmony_steps.GRAIN):
            sums = np.vstack([R.T @ z for R, _ in seen[:count]])
            sums = np.rint(sums / grain) * grain if grain else sums
            found = []
            for least in (1e-6, 1e-3, 1e-2, 0.1):  # small directions of A are left out; what serves the attacker best
                guess = np.linalg.lstsq(A.T, sums, rcond=least)[0]
                found.append((guess * z).sum(axis=1) / np.maximum(np.linalg.norm(guess, axis=1), 1e-12))
            likeness.append(max(found, key=lambda cosine: (np.mean(cosine > 0.99), np.median(cosine))))
        exact, rounded = likeness
        print(f"  {count:3d} sums: leverage {np.median(h):.2f} (median), {h.max():.3f} (most),"
              f" above 0.5 in {np.mean(h > 0.5):.0%}; cells found with known weights, cosine above 0.99:"
              f" {np.mean(exact > 0.99):.0%} of exact sums, {np.mean(rounded > 0.99):.0%} of rounded ones"
              f" (median cosine {np.median(rounded):.2f})")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="every sixth blood cell, 500 genes")
    parser.add_argument("--scale", type=int, default=0, help="simulated cells of one site, instead of real sets")
    parser.add_argument("--leverage", action="store_true", help="leverages in the sums of one site of blood")
    parser.add_argument("--only", default="", help="the set of that name")
    parser.add_argument("--data", type=Path, default=Path(__file__).parents[2] / "shared" / "data")
    args = parser.parse_args()
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, {os.environ['OMP_NUM_THREADS']} thread(s), all parties on one"
    )
    if args.scale:
        scale(args.scale)
        return
    if args.leverage:
        leverage(args.data / "scrna" / "pbmc_federation.h5ad")
        return
    for name, sites, batch_key, label in studies(args.data, quick=args.quick):
        if args.only in ("", name):
            measure(name, sites, batch_key, label, quick=args.quick)


if __name__ == "__main__":
    main()
