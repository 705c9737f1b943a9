"""The standard steps across sites, each beside its reference on pooled cells and each site alone.

    python benchmarks/pipeline.py clusters            cluster-cells beside Leiden on the pooled cells, k-means, alone
    python benchmarks/pipeline.py clusters --quick    blood every sixth cell
    python benchmarks/pipeline.py clusters --scale 50000      three sites of so many simulated cells
    python benchmarks/pipeline.py map                 shared-map beside UMAP of the pooled cells, and alone
    python benchmarks/pipeline.py map --scale 50000   three sites of so many simulated cells
    python benchmarks/pipeline.py template --scale 100000     the template `atlas` on so many simulated cells at 3 sites
    python benchmarks/pipeline.py again               at which sites a second clustering of the same cells may be summed
    python benchmarks/pipeline.py markers             find-markers beside a t-test on the pooled cells, and alone
    python benchmarks/pipeline.py genes               choose-genes beside the same steps without caps, and alone

Sets, each after shared-pca (30 components) and integrate: blood of four batches (`pbmc_federation`), each a site; lung
of two studies; glioblastoma of five patients; cytometry of one donor in three sites (`levine32_h2`, its own columns).
"blood, hard": of the same, one site has no B cells and one has 40 cells.

  ARI pooled   agreement with Leiden on the pooled integrated cells (the same graph: 15 neighbours, UMAP's weights,
               igraph), mean over six seeds; target 0.9 of the agreement between two seeds of that
  NMI, ARI     agreement with known types; target: not below pooled Leiden
  recall       fraction of a cell's 15 (50) nearest cells of all sites in the joint space that are among the 15 (50)
               nearest on the map, mean over 3000 cells; target 0.95 of pooled UMAP
  same type    fraction of the 15 nearest cells on the map that are of the cell's type
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

from cloister.rehearsal.rehearsal import rehearse

SEEDS = 6


def integrated(whole, key, label, batch_key):
    """Cells of each site in the joint space."""
    whole.obs["cell_type"] = whole.obs[label].astype(str)
    sites = {
        str(v).lower().replace("_", "-"): whole[(whole.obs[key] == v).to_numpy()].copy()
        for v in whole.obs[key].unique()
    }
    library = "n_counts_all_genes" if "n_counts_all_genes" in whole.obs else None
    options = {"n_components": 30, "n_top_genes": min(1000, whole.n_vars - 1), "library_key": library, "min_cells": 40}
    done = rehearse("shared-pca", sites, timeout=600, **options).data
    return rehearse("integrate", done, timeout=600, min_cells=40, batch_key=batch_key).data


def hard(whole):
    """One site without B cells, one with forty cells."""
    batch, rng = whole.obs["batch"].astype(str).to_numpy(), np.random.default_rng(0)
    keep = ~((batch == "kang_ctrl") & (whole.obs["cell_type"].astype(str) == "B").to_numpy())
    small = np.flatnonzero(batch == "pbmc3k")
    keep[rng.permutation(small)[40:]] = False
    return whole[keep].copy()


def sets(data, *, quick, only=()):
    """Names and cells; `only` some of the sets."""
    made = {"blood": blood_sets, "lung": lung_set, "glioblastoma": tumour_set, "cytometry": cytometry_set}
    for name in ("blood",) if quick else only or made:
        yield from made[name](data, quick)


def blood_sets(data, quick):
    every = 6 if quick else 1
    blood = ad.read_h5ad(data / "scrna" / "pbmc_federation.h5ad")[::every].copy()
    yield "blood", integrated(blood.copy(), "batch", "cell_type", None)
    if quick:
        return
    yield "blood, hard", integrated(hard(blood), "batch", "cell_type", None)


def lung_set(data, quick):
    lung = ad.read_h5ad(data / "scrna" / "lung_ts_vs_hlca.h5ad")
    yield "lung", integrated(lung, "study", "cell_type_coarse", "batch")


def tumour_set(data, quick):
    tumour = ad.read_h5ad(data / "scrna" / "glioblastoma_panobinostat_zhao.h5ad")
    yield "glioblastoma", integrated(tumour, "patient_id", "annotation", None)


def cytometry_set(data, quick):
    with np.load(data / "cytometry" / "levine32_h2.npz") as f:
        x, names = f["X"].astype(float), f["label"].astype(str)
    order = np.random.default_rng(0).permutation(len(x))[:15000]
    cells = {}
    for name, at in zip(("one", "two", "three"), np.array_split(order, 3), strict=True):
        a = ad.AnnData(np.zeros((len(at), 1), np.float32))
        a.obsm["X_integrated"], a.uns["X_integrated"] = x[at], {"space": "levine32"}
        a.obs["cell_type"] = names[at]
        cells[name] = a
    yield "cytometry", cells


def clusters(data, *, quick):
    from sklearn.cluster import KMeans
    from sklearn.metrics import adjusted_rand_score as ari
    from sklearn.metrics import normalized_mutual_info_score as nmi

    from cloister.models.leiden import neighbour_graph, partition

    for name, cells in sets(data, quick=quick):
        x = np.concatenate([a.obsm["X_integrated"] for a in cells.values()])
        kinds = np.concatenate([a.obs["cell_type"].astype(str).to_numpy() for a in cells.values()])
        graph = neighbour_graph(x, 15)
        pooled = [partition(graph, 1.0, seed) for seed in range(SEEDS)]
        pairs = [ari(pooled[i], pooled[j]) for i in range(SEEDS) for j in range(i)]

        def row(what, found, kinds=kinds, pooled=pooled, pairs=pairs):
            same = float(np.mean([ari(p, found) for p in pooled]))
            share, known = same / np.mean(pairs), f"NMI {nmi(kinds, found):.3f}  ARI {ari(kinds, found):.3f}"
            of = f"{len(np.unique(found))} clusters"
            print(f"  {what:34s} ARI pooled {same:.3f} ({share:.3f} of two seeds)  {known}  {of}", flush=True)

        print(f"{name}: {len(x)} cells at {len(cells)} sites ({', '.join(str(a.n_obs) for a in cells.values())})")
        quality = [(nmi(kinds, p), ari(kinds, p)) for p in pooled]
        between = f"{np.mean(pairs):.3f} ({min(pairs):.3f} to {max(pairs):.3f})"
        print(f"  {'pooled Leiden, six seeds':34s} two seeds  {between}  "
              f"NMI {np.mean([q[0] for q in quality]):.3f}  ARI {np.mean([q[1] for q in quality]):.3f}")  # fmt: skip
        ours = []
        for seed in range(3):
            began = time.perf_counter()
            run = rehearse("cluster-cells", {p: a.copy() for p, a in cells.items()}, timeout=600, seed=seed)
            took = time.perf_counter() - began
            ours.append(np.concatenate([a.obs["cluster"].astype(int).to_numpy() for a in run.data.values()]))
            row(f"cluster-cells, seed {seed}", ours[-1])
        said = run.results["coordinator"]
        cost = [c for p, c in run.cost.items() if p != "coordinator"]
        between = [ari(ours[i], ours[j]) for i in range(3) for j in range(i)]
        print(f"  {'':34s} two seeds  {np.mean(between):.3f}; {said['prototypes']} prototypes, {said['sums']} sums, "
              f"{max(c['bytes'] for c in cost) / 1e6:.1f} MB sent and "
              f"{max(c['cpu_seconds'] for c in cost):.1f} CPU-s a site, "
              f"{took:.0f} s")  # fmt: skip
        row("k-means, as many clusters", KMeans(said["clusters"], n_init=3, random_state=0).fit_predict(x))
        start, alone = 0, np.zeros(len(x), int)
        for a in cells.values():
            here = slice(start, start + a.n_obs)
            mine = partition(neighbour_graph(x[here], min(15, a.n_obs)), 1.0, 0)
            alone[here] = mine + alone.max() + 1
            start += a.n_obs
        row("each site alone, names do not meet", alone)


def maps(data, *, quick, only=()):
    from cloister.models import leiden, umap_map

    for name, cells in sets(data, quick=quick, only=only):
        x = np.concatenate([a.obsm["X_integrated"] for a in cells.values()])
        kinds = np.concatenate([a.obs["cell_type"].astype(str).to_numpy() for a in cells.values()])
        some = np.random.default_rng(1).permutation(len(x))[:3000]
        pooled = {}

        def row(what, y, x=x, kinds=kinds, some=some, pooled=pooled):
            found = {k: umap_map.recall(x, y, k, some) for k in (15, 50)}
            of = ""
            if pooled:
                of = f" ({' and '.join(f'{found[k] / pooled[k]:.3f}' for k in found)} of pooled)"
            near = leiden.nearest(y[some], y, 16)[0][:, 1:]
            same = float(np.mean(kinds[near] == kinds[some][:, None]))
            said = " ".join(f"recall {r:.3f} of {k}" for k, r in found.items())
            print(f"  {what:28s} {said}{of}  same type {same:.3f}", flush=True)
            return found

        print(f"{name}: {len(x)} cells at {len(cells)} sites ({', '.join(str(a.n_obs) for a in cells.values())})")
        pooled |= row("pooled UMAP, seed 0", umap_map.fitted(x, 15, 0.5, 0))
        row("pooled UMAP, seed 1", umap_map.fitted(x, 15, 0.5, 1))
        for seed in range(3):
            began = time.perf_counter()
            run = rehearse("shared-map", {p: a.copy() for p, a in cells.items()}, timeout=600, seed=seed)
            took = time.perf_counter() - began
            row(f"shared-map, seed {seed}", np.concatenate([a.obsm["X_shared_map"] for a in run.data.values()]))
        said = run.results["coordinator"]
        cost = [c for p, c in run.cost.items() if p != "coordinator"]
        print(f"  {'':28s} {said['prototypes']} prototypes, {said['points']} points, {said['sums']} sums, "
              f"{max(c['bytes'] for c in cost) / 1e6:.1f} MB sent and "
              f"{max(c['cpu_seconds'] for c in cost):.1f} CPU-s a site, "
              f"{took:.0f} s")  # fmt: skip
        alone = [umap_map.fitted(a.obsm["X_integrated"], 15, 0.5, 0) for a in cells.values()]
        alone = [y + np.array([1e3 * i, 0.0]) for i, y in enumerate(alone)]
        row("each site alone", np.concatenate(alone))
        row("two principal components", umap_map.principal(x))


def again(data, *, quick, only=()):
    """Sums by cluster after one run of cluster-cells, then after another: whether the sites answer the second time."""
    import tempfile

    from cloister.deploy.approval.differencing import AnsweredCells
    from cloister.disclosure import Thresholds
    from cloister.errors import RefusedError

    for name, cells in sets(data, quick=quick, only=only):
        first = rehearse("cluster-cells", {p: a.copy() for p, a in cells.items()}, timeout=600).data
        print(f"{name}: {len(cells)} sites of {', '.join(str(a.n_obs) for a in cells.values())} cells")
        for what, options in (
            ("the same study", {}),
            ("another seed", {"seed": 1}),
            ("resolution 0.8", {"resolution": 0.8}),
            ("resolution 2", {"resolution": 2.0}),
        ):
            other = rehearse("cluster-cells", {p: a.copy() for p, a in cells.items()}, timeout=600, **options).data
            refused = []
            for p, a in first.items():
                with tempfile.TemporaryDirectory() as folder:
                    answered, bare = AnsweredCells(Path(folder)), ad.AnnData(obs=a.obs[[]].copy())
                    answered.admit(bare, p, None, "first")
                    for key, source in (("first", a), ("second", other[p])):
                        bare.obs[key] = source.obs["cluster"].astype(str)
                        try:
                            answered.admit_step(bare, p, key, Thresholds(), [key], [key])
                        except RefusedError:
                            refused.append(p)
            print(f"  {what:16s} refused at {len(refused)} of {len(cells)} sites", flush=True)


def at_scale(what, cells):
    rng = np.random.default_rng(0)
    kinds, sites = rng.normal(0, 3, (15, 30)), {}
    for p in ("one", "two", "three"):
        a = ad.AnnData(np.zeros((cells, 1), np.float32))
        a.obsm["X_integrated"] = kinds[rng.integers(0, 15, cells)] + rng.normal(0, 1, (cells, 30))
        a.uns["X_integrated"] = {"space": "x"}
        sites[p] = a
    began = time.perf_counter()
    run = rehearse(what, sites, timeout=600)
    cost = run.cost["one"]
    found = run.results["coordinator"]
    said = f"{found['clusters']} clusters of 15 kinds" if "clusters" in found else f"{found['prototypes']} prototypes"
    print(f"{what}, 3 x {cells} cells: {time.perf_counter() - began:.0f} s, {cost['cpu_seconds']:.0f} CPU-s a site, "
          f"{cost['bytes'] / 1e6:.1f} MB a site; "
          f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.2f} GB for all parties together; "
          f"{said}")  # fmt: skip


def template(cells):
    """The study that `cloister new study --template atlas` writes, on simulated counts of 2500 genes."""
    import scipy.sparse

    from cloister.cli.new import study_of
    from cloister.study import parse_study

    rng, genes, sites = np.random.default_rng(0), 2500, {}
    rates = rng.gamma(0.3, 1.0, genes) * np.exp(rng.normal(0, 0.7, (15, genes)))
    rates *= 400 / rates.sum(axis=1, keepdims=True)
    for p in ("basel", "lugano", "vienna"):
        kind = rng.integers(0, 15, cells // 3)
        shift = np.exp(rng.normal(0, 0.2, genes))  # of the site
        parts = [scipy.sparse.csr_matrix(rng.poisson(rates[k] * shift).astype(np.float32))
                 for k in np.array_split(kind, len(kind) // 1000 + 1)]  # fmt: skip
        a = ad.AnnData(scipy.sparse.vstack(parts).tocsr())
        a.var_names, a.obs_names = [f"G{i}" for i in range(genes)], [f"{p}{i}" for i in range(len(kind))]
        a.obs["cell_type"] = [f"kind {k}" for k in kind]
        sites[p] = a
    began = time.perf_counter()
    text = study_of("atlas", []).replace("seed = 0", "seed = 0\ntimeout = 3000.0")
    series = rehearse(parse_study(text), sites)
    series.check()
    took = time.perf_counter() - began
    for name, run in series.runs.items():
        cost = [c for p, c in run.cost.items() if p != "coordinator"]
        each = [max(c[what] for c in cost) for what in ("cpu_seconds", "bytes")]
        print(f"  {name:14s} {max(c['seconds'] for c in run.cost.values()):5.0f} s, "
              f"{each[0]:5.0f} CPU-s and {each[1] / 1e6:6.1f} MB a site", flush=True)  # fmt: skip
    print(f"template atlas, 3 x {cells // 3} cells: {took:.0f} s; "
          f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.2f} GB for all parties together")  # fmt: skip


def pooled_markers(x, library, kinds, wanted):
    """Genes by falling Welch t of each label against the rest, as scanpy's rank_genes_groups with a t-test."""
    import scipy.sparse
    from scipy.stats import ttest_ind_from_stats

    logs = (scipy.sparse.diags(1e4 / np.maximum(library, 1e-9)) @ scipy.sparse.csr_matrix(x, dtype=float)).log1p()

    def moments(at):
        part, n = logs[at], int(at.sum())
        mean = np.asarray(part.mean(axis=0)).ravel()
        square = np.asarray(part.multiply(part).mean(axis=0)).ravel()
        return mean, np.sqrt(np.maximum(square - mean**2, 0) * n / max(n - 1, 1)), n

    found = {}
    for kind in wanted:
        with np.errstate(divide="ignore", invalid="ignore"):
            t = ttest_ind_from_stats(*moments(kinds == kind), *moments(kinds != kind), equal_var=False)[0]
        found[kind] = np.argsort(-np.nan_to_num(t), kind="stable")
    return found


def markers(data):
    for name, key, label, donor in (
        ("pbmc_federation", "batch", "cell_type", None),
        ("lung_ts_vs_hlca", "study", "cell_type_coarse", None),
        ("lung_ts_vs_hlca", "study", "cell_type_coarse", "donor"),
        ("glioblastoma_panobinostat_zhao", "patient_id", "annotation", None),
    ):
        whole = ad.read_h5ad(data / "scrna" / f"{name}.h5ad")
        whole.obs[label] = whole.obs[label].astype(str)
        kinds, of = whole.obs[label].to_numpy(), whole.obs[key].astype(str).to_numpy()
        library = whole.obs["n_counts_all_genes"].to_numpy(float) if "n_counts_all_genes" in whole.obs else None
        sites = {v.lower().replace("_", "-"): whole[of == v].copy() for v in np.unique(of)}
        began = time.perf_counter()
        run = rehearse("find-markers", sites, label_key=label, donor_key=donor, timeout=600,
                       library_key=None if library is None else "n_counts_all_genes")  # fmt: skip
        took = time.perf_counter() - began
        library = np.asarray(whole.X.sum(axis=1)).ravel() if library is None else library
        table = next(iter(run.data.values())).uns["markers"]
        labels = list(table["label"].unique())
        pooled = pooled_markers(whole.X, library, kinds, labels)
        genes, share = whole.var_names.to_numpy(), {}
        without = run.results["coordinator"]["left_out"] + sorted(set(kinds) - set(labels))
        sent = max(c["bytes"] for p, c in run.cost.items() if p != "coordinator") / 1e6
        print(f"{name}, {'donors named' if donor else 'cells counted'}: {took:.1f} s, {sent:.1f} MB a site; "
              f"labels left out: {', '.join(without) or 'none'}")  # fmt: skip
        for kind in labels:
            top = set(genes[pooled[kind][:50]])
            share[kind] = len(top & set(table[table["label"] == kind]["gene"][:50])) / 50
            alone = []
            for v in np.unique(of):
                at = of == v
                if (kinds[at] == kind).sum() >= 2:
                    mine = pooled_markers(whole.X[at], library[at], kinds[at], [kind])[kind]
                    alone.append(len(top & set(genes[mine[:50]])) / 50)
            most = max(int(((kinds == kind) & (of == v)).sum()) for v in np.unique(of))
            print(f"  {kind:20s} {int((kinds == kind).sum()):5d} cells, {most:4d} at one site: "
                  f"top 50 shared {share[kind]:.2f}; a site alone {np.mean(alone):.2f}")  # fmt: skip
        shares = list(share.values())
        good = f"{sum(v >= 0.9 for v in shares)} of {len(shares)} at 0.90 or more"
        print(f"  all labels: mean {np.mean(shares):.3f}; {good}", flush=True)


def genes(data):
    """Labels by ten nearest cells of the same batch, in 30 components of the chosen genes."""
    import scipy.sparse
    from sklearn.decomposition import PCA
    from sklearn.neighbors import NearestNeighbors

    from cloister.models import variable_genes as model

    def accuracy(whole, picked, of, kinds, library):
        x = whole.X[:, picked].toarray() / library[:, None] * 1e4
        x = np.log1p(x)
        x = np.clip((x - x.mean(axis=0)) / np.maximum(x.std(axis=0), 1e-9), -10, 10)
        x = PCA(30, random_state=0, svd_solver="randomized").fit_transform(x)
        right = []
        for b in np.unique(of):
            y, names = x[of == b], kinds[of == b]
            near = NearestNeighbors(n_neighbors=11).fit(y).kneighbors(y, return_distance=False)[:, 1:]
            votes = [max(sorted(set(names[row])), key=list(names[row]).count) for row in near]
            right.append(np.mean(np.array(votes) == names))
        return float(np.mean(right))

    for name, key, label, n in (
        ("pbmc_federation", "batch", "cell_type", 500),
        ("lung_ts_vs_hlca", "study", "cell_type_coarse", 500),
        ("glioblastoma_panobinostat_zhao", "patient_id", "annotation", 100),
        ("cellline_mixology", "batch", "cell_type", 500),
    ):
        whole = ad.read_h5ad(data / "scrna" / f"{name}.h5ad")
        whole.X = scipy.sparse.csr_matrix(whole.X, dtype=np.float64)
        of, kinds = (whole.obs[k].astype(str).to_numpy() for k in (key, label))
        library = np.asarray(whole.X.sum(axis=1)).ravel()
        sites = {v.lower().replace("_", "-"): whole[of == v].copy() for v in np.unique(of)}
        began = time.perf_counter()
        run = rehearse("choose-genes", sites, n_top_genes=n, timeout=600)
        took = time.perf_counter() - began
        ours = run.data[next(iter(sites))].var["highly_variable"].to_numpy()
        ranks = [
            model.ranked(model.normalised_variance(scipy.sparse.csc_matrix(whole.X[of == v])), n) for v in np.unique(of)
        ]
        free, _ = model.chosen(
            np.sum([r >= 0 for r in ranks], axis=0).astype(float), np.sum([np.maximum(r, 0) for r in ranks], axis=0), n
        )
        sent = max(c["bytes"] for p, c in run.cost.items() if p != "coordinator") / 1e6
        print(f"{name}: {n} of {whole.n_vars} genes, {len(sites)} sites; {took:.1f} s, {sent:.2f} MB a site")
        print(f"  chosen by choose-genes as well as without caps: {(ours & free).sum() / n:.2f}; "
              f"as by a site alone: {np.mean([(free & (r >= 0)).sum() / n for r in ranks]):.2f}")  # fmt: skip
        every = np.ones(whole.n_vars, bool)
        right = [f"{accuracy(whole, g, of, kinds, library):.3f}" for g in (ours, free, every)]
        print("  accuracy of labels: choose-genes {}, without caps {}, all genes {}".format(*right), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["clusters", "template", "again", "map", "markers", "genes"])
    parser.add_argument("--data", type=Path, default=Path(__file__).parents[2] / "shared" / "data")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument(
        "--only", nargs="*", default=(), help="sets of `map` and `again`: blood, lung, glioblastoma, cytometry"
    )
    parser.add_argument("--scale", type=int, default=0)
    given = parser.parse_args()
    if given.what == "template":
        template(given.scale or 100_000)
    elif given.scale:
        at_scale({"clusters": "cluster-cells", "map": "shared-map"}[given.what], given.scale)
    elif given.what in ("map", "again"):
        {"map": maps, "again": again}[given.what](given.data, quick=given.quick, only=given.only)
    elif given.what != "clusters":
        {"markers": markers, "genes": genes}[given.what](given.data)
    else:
        clusters(given.data, quick=given.quick)


if __name__ == "__main__":
    main()
