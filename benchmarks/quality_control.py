"""quality-control beside Scrublet and cut-offs on the pooled cells, and beside each site alone.

    python benchmarks/quality_control.py                    blood, lung and glioblastoma
    python benchmarks/quality_control.py --tune             bone marrow and pancreas, on which defaults were chosen
    python benchmarks/quality_control.py --scanpy           scanpy's Scrublet beside ours, where scanpy is installed
    python benchmarks/quality_control.py --cutoffs          common cut-offs beside those of scanpy's steps, pooled
    python benchmarks/quality_control.py --scale 50000      three sites of so many simulated cells

Truth: within each site, pairs of cells are replaced by the sums of their counts, so that 8 % of what is left are
doublets; both cells are taken out. Sets: blood of four batches, lung of two studies and two technologies, and
glioblastoma of five patients, each batch a site. "hard": of the same, the second largest site lacks a type (B cells,
or the most frequent one), and the smallest has 40 cells. Area: area under the ROC curve of the doublet score, over the
cells of all sites (smallest to largest over three seeds of the truth) and by site, means.

  Scrublet pooled   scanpy 1.11's steps: counts normalised, variable genes by dispersion, no logarithms, each gene
                    divided by its deviation, 30 components of the pooled cells, simulated doublets of pooled cells
  Scrublet alone    the same at each site
  pooled            the steps of quality-control with all cells in one place
  alone             the steps of quality-control at each site
"""

from __future__ import annotations

import argparse
import os
import resource
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import anndata as ad
import numpy as np
import scipy.sparse

from cloister.models import doublets
from cloister.rehearsal.rehearsal import rehearse
from cloister.workflows.quality_control.baselines import doublet_scores

RATE, SEEDS = 0.08, 3
SETS = {  # file, column of sites, column of types
    "blood": ("pbmc_federation", "batch", "cell_type"),
    "lung": ("lung_ts_vs_hlca", "batch", "cell_type_coarse"),
    "glioblastoma": ("glioblastoma_panobinostat_zhao", "patient_id", "annotation"),
    "bone marrow": ("bmmc_aml_vs_healthy", "donor", None),
    "pancreas": ("pancreas_baron_h1", None, "cell_type"),
}


def read(data, name):
    """Counts, sites and types."""
    file, key, label = SETS[name]
    whole = ad.read_h5ad(data / "scrna" / f"{file}.h5ad")
    n = whole.n_obs
    of = np.random.default_rng(3).choice(list("abc"), n, p=[0.6, 0.33, 0.07]) if key is None else whole.obs[key]
    kinds = whole.obs[label].astype(str).to_numpy() if label else np.zeros(n, str)
    return scipy.sparse.csr_matrix(whole.X, dtype=np.float64), np.asarray(of, dtype=str), kinds, list(whole.var_names)


def hard(x, of, kinds):
    """The first site lacks the most frequent type of all, the last one has 40 cells."""
    sites, sizes = np.unique(of, return_counts=True)
    order = sites[np.argsort(-sizes, kind="stable")]
    common = "B" if "B" in kinds else max(sorted(set(kinds)), key=list(kinds).count)
    keep = ~((of == order[1]) & (kinds == common))
    small = np.flatnonzero(of == order[-1])
    keep[np.random.default_rng(0).permutation(small)[43:]] = False  # of which three are paired with three others
    return x[keep], of[keep], kinds[keep]


def planted(x, of, seed):
    """Counts, truth and sites with doublets, in which two cells of a site became one."""
    rng, parts, truth, where = np.random.default_rng(seed), [], [], []
    for s in np.unique(of):
        at = rng.permutation(np.flatnonzero(of == s))
        pairs = round(RATE * len(at) / (1 + RATE))
        one, two, rest = at[:pairs], at[pairs : 2 * pairs], at[2 * pairs :]
        parts += [x[rest], x[one] + x[two]]
        truth += [np.zeros(len(rest), bool), np.ones(pairs, bool)]
        where.append(np.full(len(at) - pairs, s))
    order = rng.permutation(sum(map(len, truth)))
    return scipy.sparse.vstack(parts).tocsr()[order], np.concatenate(truth)[order], np.concatenate(where)[order]


def scaled(x, target):
    total = np.asarray(x.sum(axis=1)).ravel()
    return scipy.sparse.diags(target / np.maximum(total, 1.0)) @ x


def scrublet(x, seed=0, rate=0.05):
    """Doublet scores as `scanpy.pp.scrublet` computes them."""
    from sklearn.decomposition import PCA

    rng, n = np.random.default_rng(seed), x.shape[0]
    x = x[:, np.asarray((x > 0).sum(axis=0)).ravel() >= 3]
    target = float(np.median(np.asarray(x.sum(axis=1))))
    logs = scaled(x, target).log1p()
    at = dispersed(np.expm1(logs.toarray()))
    x = x[:, at]
    pairs = rng.integers(0, n, (2 * n, 2))
    both = x[pairs[:, 0]] + x[pairs[:, 1]]
    y, z = (scaled(counts, 1e6).toarray() for counts in (x, both))
    mean, deviation = y.mean(axis=0), y.std(axis=0)
    deviation = np.where(deviation > 0, deviation, 1.0)
    y, z = (y - mean) / deviation, (z - mean) / deviation
    space = PCA(min(30, min(y.shape) - 1), random_state=0, svd_solver="arpack").fit(y)
    none = np.zeros((0, space.n_components_))
    return doublets.scores(space.transform(y), np.arange(n), none, space.transform(z), rate)


def dispersed(y):
    """Genes as scanpy's flavour seurat chooses them by its limits: mean from 0.0125 to 3, dispersion from 0.5 on."""
    mean, variance = y.mean(axis=0), y.var(axis=0, ddof=1)
    mean = np.where(mean == 0, 1e-12, mean)
    ratio = np.log(np.maximum(variance / mean, 1e-300))
    logs = np.log1p(mean)
    edges = np.linspace(logs.min(), logs.max(), 21)
    edges[0] -= 0.001 * (logs.max() - logs.min())
    bins, score = np.searchsorted(edges, logs, side="left"), np.zeros(len(mean))
    for b in np.unique(bins):
        of = bins == b
        middle, spread = ratio[of].mean(), ratio[of].std(ddof=1) if of.sum() > 1 else np.nan
        score[of] = (ratio[of] - middle) / spread if spread > 0 else 1.0
    return np.flatnonzero((logs > 0.0125) & (logs < 3) & (score > 0.5))


def each(score, x, of):
    found = np.zeros(len(of))
    for s in np.unique(of):
        found[of == s] = score(x[of == s])
    return found


def sites_of(x, of, names):
    made = {}
    for s in np.unique(of):
        a = ad.AnnData(x[of == s].astype(np.float32))
        a.var_names = names
        a.obs_names = [f"{s}-{i}" for i in range(a.n_obs)]
        made["s-" + s.lower().replace("_", "-")] = a
    return made


def areas(truth, of, score):
    from sklearn.metrics import roc_auc_score

    sites = [s for s in np.unique(of) if 0 < truth[of == s].sum() < (of == s).sum()]
    return [roc_auc_score(truth, score)] + [roc_auc_score(truth[of == s], score[of == s]) for s in sites]


def compare(data, name, *, is_hard):
    x, of, kinds, names = read(data, name)
    if is_hard:
        x, of, kinds = hard(x, of, kinds)
    rows: dict[str, list[list[float]]] = {}
    for seed in range(SEEDS):
        y, truth, where = planted(x, of, seed)
        began = time.perf_counter()
        run = rehearse("quality-control", sites_of(y, where, names), timeout=600, seed=seed)
        took = time.perf_counter() - began
        ours, flagged = np.zeros(len(truth)), np.zeros(len(truth), bool)
        for s in np.unique(where):
            obs = run.data["s-" + s.lower().replace("_", "-")].obs
            ours[where == s], flagged[where == s] = obs["doublet_score"], obs["predicted_doublet"]
        found = {
            "quality-control": ours,
            "pooled, the same steps": doublet_scores(y, where, seed),
            "alone, the same steps": each(lambda z: doublet_scores(z, np.zeros(z.shape[0]), seed), y, where),  # noqa: B023
            "Scrublet pooled": scrublet(y, seed),
            "Scrublet alone": each(lambda z: scrublet(z, seed), y, where),  # noqa: B023
        }
        for what, score in found.items():
            rows.setdefault(what, []).append(areas(truth, where, score))
        if seed == 0:
            sizes = ", ".join(str((where == s).sum()) for s in np.unique(where))
            cost = [c for p, c in run.cost.items() if p != "coordinator"]
            print(f"{name}{', hard' if is_hard else ''}: {len(truth)} cells ({sizes}), {y.shape[1]} genes; "
                  f"{took:.0f} s, {max(c['bytes'] for c in cost) / 1e6:.1f} MB and "
                  f"{max(c['cpu_seconds'] for c in cost):.1f} CPU-s a site; of {flagged.sum()} flagged, "
                  f"{(flagged & truth).sum()} of {truth.sum()} doublets")  # fmt: skip
    for what, found in rows.items():
        mean = np.mean(found, axis=0)
        span = f"({min(f[0] for f in found):.3f} to {max(f[0] for f in found):.3f})"
        print(f"  {what:24s} area {mean[0]:.3f} {span}  by site {' '.join(f'{v:.3f}' for v in mean[1:])}", flush=True)


def beside_scanpy(data):
    import scanpy as sc

    if not hasattr(scipy.sparse.csr_array, "getnnz"):  # of scipy before 1.15, which scanpy 1.11 calls
        scipy.sparse.csr_array.getnnz = scipy.sparse.csr_array._getnnz
    for name in ("bone marrow", "lung"):
        x, of, _, _ = read(data, name)
        y, truth, where = planted(x, of, 0)
        a = ad.AnnData(y.copy())
        a.var_names = [f"g{i}" for i in range(y.shape[1])]
        sc.pp.scrublet(a, threshold=0.3, random_state=0, verbose=False)
        theirs, ours = areas(truth, where, a.obs["doublet_score"].to_numpy()), areas(truth, where, scrublet(y))
        print(f"{name}: area of scanpy {theirs[0]:.3f}, of ours {ours[0]:.3f}", flush=True)


def cutoffs(data):
    for name in ("blood", "lung", "glioblastoma"):
        x, of, _, names = read(data, name)
        names = [f"MT-{g}" if i % 50 == 0 else g for i, g in enumerate(names)]  # stand-ins: the files have none
        mito = np.array([g.startswith("MT-") for g in names])
        total, genes = np.asarray(x.sum(axis=1)).ravel(), np.asarray((x > 0).sum(axis=1)).ravel()
        share = 100 * np.asarray(x[:, mito].sum(axis=1)).ravel() / np.maximum(total, 1)
        run = rehearse("quality-control", sites_of(x, of, names), timeout=600, doublet_rate=0.0)
        found, flags = run.results["coordinator"]["cutoffs"], np.ones(len(of), bool)
        ok, alone = np.ones(len(of), bool), np.ones(len(of), bool)
        print(f"{name}: {len(of)} cells at {len(np.unique(of))} sites")
        columns = (("total_counts", total, 1), ("n_genes_by_counts", genes, 1), ("pct_counts_mt", share, 0))
        for key, values, log in columns:
            v = np.log1p(values) if log else values
            for within, result in [(np.ones(len(of), bool), ok)] + [(of == s, alone) for s in np.unique(of)]:
                middle = np.median(v[within])
                away = 5 * np.median(np.abs(v[within] - middle))
                result[within] &= (v[within] <= middle + away) & ((v[within] >= middle - away) | (not log))
                if result is ok:
                    ends = [max(middle - away, 0), middle + away]
                    wanted = np.expm1(ends) if log else np.array([0, ends[1]])
            ours = f"quality-control {found[key][0]:.1f} to {found[key][1]:.1f}"
            print(f"  {key:18s} pooled {wanted[0]:.1f} to {wanted[1]:.1f}, {ours}")
        for s in np.unique(of):
            flags[of == s] = run.data["s-" + s.lower().replace("_", "-")].obs["qc_pass"]
        print(f"  same flag as by pooled cut-offs: {np.mean(flags == ok):.4f} (fail: {np.mean(~flags):.4f}, pooled "
              f"{np.mean(~ok):.4f}); by cut-offs of each site alone: {np.mean(alone == ok):.4f}",
              flush=True)  # fmt: skip


def scale(cells):
    rng, made = np.random.default_rng(0), {}
    mean = rng.gamma(0.3, 1.0, (12, 3000))
    for p in ("one", "two", "three"):
        rows = [scipy.sparse.csr_matrix(rng.poisson(mean[rng.integers(0, 12, 1000)]), dtype=np.float32)
                for _ in range(cells // 1000)]  # fmt: skip
        made[p] = ad.AnnData(scipy.sparse.vstack(rows).tocsr())
        made[p].var_names = [f"G{i}" for i in range(3000)]
        made[p].obs_names = [f"{p}-{i}" for i in range(made[p].n_obs)]
    began = time.perf_counter()
    run = rehearse("quality-control", made, timeout=600)
    cost = run.cost["one"]
    print(f"3 x {cells} cells of 3000 genes: {time.perf_counter() - began:.0f} s, {cost['cpu_seconds']:.0f} CPU-s and "
          f"{cost['bytes'] / 1e6:.1f} MB a site; {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.2f} GB for "
          "all parties together")  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path(__file__).parents[2] / "shared" / "data")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--scanpy", action="store_true")
    parser.add_argument("--cutoffs", action="store_true")
    parser.add_argument("--scale", type=int, default=0)
    parser.add_argument("--only", choices=SETS)
    given = parser.parse_args()
    if given.scale:
        scale(given.scale)
    elif given.scanpy or given.cutoffs:
        (beside_scanpy if given.scanpy else cutoffs)(given.data)
    else:
        for name in [given.only] if given.only else list(SETS)[3:] if given.tune else list(SETS)[:3]:
            for is_hard in (False,) if given.tune else (False, True):
                compare(given.data, name, is_hard=is_hard)


if __name__ == "__main__":
    main()
