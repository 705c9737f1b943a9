"""Integration measured beside harmonypy on pooled cells: how far batches mix, what it costs kinds of cells, the price.

    python benchmarks/integration.py                    all sets, with the defaults of both
    python benchmarks/integration.py --quick            every sixth cell of the blood cells
    python benchmarks/integration.py --theta 1,2,4,6    these strengths of mixing
    python benchmarks/integration.py --seeds 3          both with so many seeds: mean and range
    python benchmarks/integration.py --only lung_ts_vs_hlca
    python benchmarks/integration.py --scale 100000     one site of so many simulated cells, two of 5000

Blood cells of four studies, each a site (`pbmc_federation.h5ad`); lung cells of two studies with two technologies each,
two sites of two batches (`lung_ts_vs_hlca.h5ad`); glioblastoma of five patients, each a site
(`glioblastoma_panobinostat_zhao.h5ad`); mass cytometry of two patients on two days, four sites, CD8 T cells and others
(`ms_cytof_batches.npz`); pancreas of two species, each a site (`pancreas_baron_human_mouse_small.h5ad`, 175 and 153
cells); cell lines on five plates, each a site (`cellline_mixology.h5ad`). Shared PCA of 30 components first (cytometry:
15), then `integrate` in each mode; the same components of the pooled cells through harmonypy, with its own defaults. By
batch, over all cells:

  own         share of a cell's 10 nearest cells, of all batches, that are of its own batch
  accuracy    labels by the 10 nearest cells of the other batches, over labels that occur there
  macro-F1    of these labels, a mean over labels and then over batches: rare types count as much as others
  iLISI, cLISI, label and batch ASW as scIB scales them (`models/mixing_scores.py`)
  later       a fifth of every batch is kept out and placed afterwards by the model: own and accuracy of these cells

Targets: own and accuracy no more than 0.01 worse than harmonypy.
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

from cloister.models.mixing_scores import batch_asw, clisi, ilisi, label_asw
from cloister.rehearsal.rehearsal import rehearse

K = 10


def studies(data: Path, *, quick: bool):
    """Name, sites, batch column, label column, options of `shared-pca`."""
    yield from cytometry(data)
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
        counted = "n_counts_all_genes" if "n_counts_all_genes" in whole.obs else None
        genes = 500 if quick else 1000
        yield name, sites, "batch", label, {"n_components": 30, "n_top_genes": genes, "library_key": counted}


def cytometry(data: Path):
    path = data / "cytometry" / "ms_cytof_batches.npz"
    if not path.exists():
        print(f"{path.name} is not here; not measured")
        return
    f = np.load(path)
    x = np.arcsinh(f["X"] / 5).astype(np.float32)
    days = np.array(["-".join(meta[:2]) for meta in f["sample_meta"]])[f["sample"]]
    sites = {}
    for day in map(str, np.unique(days)):
        at = np.flatnonzero(days == day)
        sites[day] = ad.AnnData(x[at])
        sites[day].obs_names, sites[day].var_names = [f"{day}-{i}" for i in at], [f"m{i}" for i in range(x.shape[1])]
        sites[day].obs["batch"] = day
        sites[day].obs["cell_type"] = np.where(f["label"][at] == 1, "CD8 T", "other")
    yield (
        "ms_cytof_batches",
        sites,
        "batch",
        "cell_type",
        {"kind": "log", "n_components": 15, "n_top_genes": x.shape[1]},
    )


def nearest(x, y, k):
    return NearestNeighbors(n_neighbors=k, algorithm="brute").fit(x).kneighbors(y, return_distance=False)


def own_share(x, batch):
    near = nearest(x, x, K + 1)[:, 1:]
    return (batch[near] == batch[:, None]).mean(axis=1)


def votes_of_others(x, batch, labels):
    """Codes of labels, those that the nearest cells of other batches give, and whether a label occurs there."""
    kinds, codes = np.unique(labels, return_inverse=True)
    voted, known = np.full(len(x), -1), np.zeros(len(x), bool)
    for b in np.unique(batch):
        here, there = np.flatnonzero(batch == b), np.flatnonzero(batch != b)
        votes = np.zeros((len(here), len(kinds)), int)
        for column in codes[there][nearest(x[there], x[here], K)].T:
            votes[np.arange(len(here)), column] += 1
        voted[here], known[here] = votes.argmax(axis=1), np.isin(codes[here], codes[there])
    return codes, voted, known


def macro_f1(codes, voted):
    scores = []
    for k in np.unique(codes):
        both = np.sum((codes == k) & (voted == k))
        scores.append(2 * both / (np.sum(codes == k) + np.sum(voted == k)))
    return float(np.mean(scores))


def rows_of(name, x, batch, labels, only=None, *, scores=True, silent=False):
    use = np.ones(len(x), bool) if only is None else only
    own, (codes, voted, known) = own_share(x, batch), votes_of_others(x, batch, labels)
    right = np.where(known, codes == voted, np.nan)
    each = {b: use & (batch == b) for b in np.unique(batch)}
    rare = {b: macro_f1(codes[at & known], voted[at & known]) for b, at in each.items()}
    found = float(np.mean(own[use])), float(np.nanmean(right[use])), float(np.mean([*rare.values()]))
    if silent:
        return found
    cells = [f"{np.mean(own[at]):.3f} {np.nanmean(right[at]):.3f} {rare[b]:.2f}" for b, at in each.items()]
    more = ""
    if scores:
        number = np.unique(batch, return_inverse=True)[1]
        four = ilisi(x, number), clisi(x, codes), label_asw(x, codes), batch_asw(x, number, codes)
        more = "  ".join(f"{score:.3f}" for score in four)
    print(f"{name:26s} {'  '.join(f'{v:.3f}' for v in found)}   {more}   {'   '.join(cells)}", flush=True)
    return found


def spread(name, rows):
    """Mean and range over seeds."""
    if len(rows) > 1:
        each = zip(np.mean(rows, axis=0), np.min(rows, axis=0), np.max(rows, axis=0), strict=True)
        print(f"{name:26s} " + "  ".join(f"{m:.3f} ({a:.3f} to {b:.3f})" for m, a, b in each), flush=True)
    return np.mean(rows, axis=0)


def harmonypy(x, batch, theta, seed=0):
    try:
        import harmonypy as hm
    except ImportError:
        return None
    import pandas as pd

    began = time.perf_counter()
    run = hm.run_harmony(x, pd.DataFrame({"batch": batch}), ["batch"], theta=theta, random_state=seed, verbose=False)
    found = np.asarray(run.Z_corr)
    return (found if found.shape == x.shape else found.T), time.perf_counter() - began


def measure(name, sites, batch_key, label, space, thetas, seeds):
    cells = rehearse("shared-pca", sites, timeout=600, **space).data

    def together(find):
        return np.concatenate([find(a) for a in cells.values()])

    x = together(lambda a: a.obsm["X_shared_pca"])
    batch = together(lambda a: a.obs[batch_key].astype(str).to_numpy())
    labels = together(lambda a: a.obs[label].astype(str).to_numpy())
    print(f"\n{name}: {len(x)} cells, {len(sites)} sites, batches {', '.join(np.unique(batch))}")
    print(f"{'':26s} own    acc.   F1      iLISI  cLISI  label  batch ASW   of each batch: own, accuracy, F1")
    rows_of("shared PCA", x, batch, labels)
    for theta in thetas:
        peer, wanted = harmonypy(x, batch, theta), None
        if peer is not None:
            rows = [rows_of(f"harmonypy θ={theta:g} {peer[1]:.1f} s", peer[0], batch, labels)]
            for seed in range(1, seeds):
                rows.append(rows_of("", harmonypy(x, batch, theta, seed)[0], batch, labels, silent=True))
            wanted = spread(f"harmonypy θ={theta:g}", rows)
        for mode in ("hardened", "published") if theta == thetas[0] else ("hardened",):
            rows = []
            for seed in range(seeds):
                began, options = time.perf_counter(), {"mode": mode, "batch_key": batch_key, "theta": theta}
                done = rehearse("integrate", cells, seed=seed, timeout=600, **options)
                took = time.perf_counter() - began
                moved = np.concatenate([done.data[p].obsm["X_integrated"] for p in cells])
                rows.append(rows_of(f"{mode} θ={theta:g}", moved, batch, labels, silent=seed > 0))
                if seed == 0:
                    price(done, took)
            found = spread(f"{mode} θ={theta:g}", rows)
            if wanted is not None:
                print(f"    beside harmonypy: own {found[0] - wanted[0]:+.3f} (target at most +0.01), "
                      f"accuracy {found[1] - wanted[1]:+.3f} (target at least -0.01), "
                      f"F1 {found[2] - wanted[2]:+.3f}")  # fmt: skip
    later(cells, batch_key, label)


def price(done, took):
    sites = [c for p, c in done.cost.items() if p != "coordinator"]
    said = done.results["coordinator"]
    mixed = said["own_site"]
    sent, busy = max(c["bytes"] for c in sites) / 1e6, max(c["cpu_seconds"] for c in sites)
    print(f"    {said['sums']} sums, {said['clusters']} clusters, {sent:.2f} MB sent and {busy:.1f} s of CPU per site, "
          f"{took:.1f} s; own site in a cell's clusters {mixed['before']:.3f} before, {mixed['after']:.3f} after, "
          f"{mixed['if_mixed']:.3f} if mixed")  # fmt: skip


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
    rows_of("later, placed", x, batch, labels, new, scores=False)
    rows_of("those of the run", x, batch, labels, ~new, scores=False)


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="every sixth blood cell, 500 genes")
    parser.add_argument("--scale", type=int, default=0, help="simulated cells of one site, instead of real sets")
    parser.add_argument("--theta", default="2", help="strengths of mixing, in commas")
    parser.add_argument("--seeds", type=int, default=1, help="how many")
    parser.add_argument("--only", default="", help="the set of that name")
    parser.add_argument("--data", type=Path, default=Path(__file__).parents[2] / "shared" / "data")
    args = parser.parse_args()
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, {os.environ['OMP_NUM_THREADS']} thread(s), all parties on one"
    )
    if args.scale:
        scale(args.scale)
        return
    for name, sites, batch_key, label, space in studies(args.data, quick=args.quick):
        if args.only in ("", name):
            thetas = [float(theta) for theta in args.theta.split(",")]
            measure(name, sites, batch_key, label, space, thetas, args.seeds)


if __name__ == "__main__":
    main()
