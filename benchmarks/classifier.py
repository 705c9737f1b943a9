"""The shared classifier measured: equality with scikit-learn on pooled cells, accuracy on real studies, cost at scale.

    python benchmarks/classifier.py --quick                  real sets cut short, one small size; some minutes
    python benchmarks/classifier.py                          everything
    python benchmarks/classifier.py --scale 100000 5000      cost of one fit with so many cells and genes a site
    python benchmarks/classifier.py --noise                  what hiding donors or sites costs, on the demo's cells
    python benchmarks/classifier.py --adapt                  whether to align a new site's cells, by sites held out
    python benchmarks/classifier.py --weights                what a label should count, on all sets
    python benchmarks/classifier.py --unknown                cells of a type that nobody trained on

Two questions on every set. *New cells*: all sites have labels, a fifth of their cells is held out, and the model labels
those. *New site*: one site has no label, the others train, and the model labels all its cells; each site in turn.
Beside ours: logistic regression of scikit-learn on the pooled cells, with our penalty, and with
its best C; each site alone with its best C (C picked with hindsight, on the answers); k-NN in the PCA of all cells,
which is the shared one, and `fine-tune` on the same.
"""

from __future__ import annotations

import argparse
import itertools
import os
import platform
import resource
import tempfile
import time
import warnings
from pathlib import Path

import anndata as ad
import numpy as np
import scipy.sparse

import cloister as cl

HERE = Path(__file__).resolve().parent
CS = (0.001, 0.01, 0.1, 1.0, 10.0)


# ---- sets ------------------------------------------------------------------------------------------------------------


def studies(data, quick, only=()):
    """Name, sites, label column, options of the training; of all sets, or only of those named."""
    for row in all_studies(data, quick):
        if not only or row[0] in only:
            yield row


def all_studies(data, quick):
    cut = 3 if quick else 1
    whole = ad.read_h5ad(data / "pbmc_federation.h5ad")
    yield "pbmc_federation", split(whole[::cut], "batch"), "cell_type", {"library_key": "n_counts_all_genes"}
    whole = ad.read_h5ad(data / "lung_ts_vs_hlca.h5ad")
    yield "lung_ts_vs_hlca", split(whole, "study"), "cell_type_coarse", {"library_key": "n_counts_all_genes"}
    yield "pancreas", pancreas(data), "cell_type", {"kind": "log"}


def split(whole, key):
    return {
        str(name).lower().replace("_", "-"): whole[(whole.obs[key] == name).to_numpy()].copy()
        for name in whole.obs[key].unique()
    }


def pancreas(data: Path):
    """Log values on both sides, over the genes that both have."""
    baron, xin = (ad.read_h5ad(data / f"pancreas_{name}.h5ad") for name in ("baron_h1", "xin_lognorm"))
    size = baron.obs["n_counts_all_genes"].to_numpy(float)
    baron.X = scipy.sparse.csr_matrix(scipy.sparse.diags(1e4 / size) @ baron.X)
    baron.X.data = np.log1p(baron.X.data)
    common = [g for g in baron.var_names if g in set(xin.var_names)]
    return {"baron": baron[:, common].copy(), "xin": xin[:, common].copy()}


# ---- scores ----------------------------------------------------------------------------------------------------------


def scores(truth, called):
    """Accuracy, and F1 averaged over the labels that occur in the truth."""
    f1 = []
    for name in np.unique(truth):
        both = np.count_nonzero((truth == name) & (called == name))
        f1.append(2 * both / (np.count_nonzero(truth == name) + np.count_nonzero(called == name)))
    return float(np.mean(truth == called)), float(np.mean(f1))


def fit_sklearn(x, y, penalty, **limits):
    """The pooled fit at our penalty."""
    from sklearn.linear_model import LogisticRegression

    return LogisticRegression(C=1 / (penalty * len(y)), **limits).fit(x, y)


def best_fit(x, y, questions, truth):
    """The scores of the best C, from the strongest penalty to the weakest, each from where the last one ended."""
    from sklearn.linear_model import LogisticRegression

    fit, rows = LogisticRegression(max_iter=200, tol=1e-3, warm_start=True), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for c in CS:
            rows.append(scores(truth, fit.set_params(C=c).fit(x, y).predict(questions)))
    return max(rows)


def nearest(x, y, q, k=10):
    from sklearn.neighbors import KNeighborsClassifier

    return KNeighborsClassifier(k).fit(x, y).predict(q)


class Task:
    """Sites as they train (labels taken away where they are asked for), and the cells that are asked about."""

    def __init__(self, sites, label, options):
        self.sites, self.label, self.options = sites, label, options
        self.truth = {s: a.obs[label].astype(str).to_numpy() for s, a in sites.items()}

    def hidden(self, asked):
        bare = {s: a.copy() for s, a in self.sites.items()}
        for s, at in asked.items():
            column = bare[s].obs[self.label].astype(object)
            column.iloc[at] = np.nan
            bare[s].obs[self.label] = column
        return bare

    def ours(self, bare):
        began = time.perf_counter()
        run = cl.rehearse("train-classifier", bare, label_key=self.label, timeout=600, **self.options)
        return run, time.perf_counter() - began

    def features(self, model):
        read = {"library_key": self.options.get("library_key")}
        return {s: model.inputs(a, **read) for s, a in self.sites.items()}

    def compare(self, asked, *, peers):
        """Name of a method → accuracy, macro-F1 over all asked cells, and our run."""
        bare = self.hidden(asked)
        run, seconds = self.ours(bare)
        x, model = self.features(run.model), run.model
        known = {s: ~bare[s].obs[self.label].isna().to_numpy() for s in bare}
        truth = np.concatenate([self.truth[s][at] for s, at in asked.items()])
        questions = scipy.sparse.vstack([scipy.sparse.csr_matrix(x[s][at]) for s, at in asked.items()])
        called = np.concatenate([run.data[s].obs["predicted"].astype(str).to_numpy()[at] for s, at in asked.items()])
        rows = {"ours": scores(truth, called)}
        if set(asked) != set(bare):
            read = {"library_key": self.options.get("library_key"), "unknown": False}
            plain = np.concatenate([model.predict(self.sites[s][at].copy(), **read) for s, at in asked.items()])
            rows["ours, not aligned"] = scores(truth, plain)
        train = [s for s in bare if known[s].any()]
        pool_x = scipy.sparse.vstack([scipy.sparse.csr_matrix(x[s][known[s]]) for s in train]).tocsr()
        pool_y = np.concatenate([self.truth[s][known[s]] for s in train])
        kept = np.isin(pool_y, model.labels)
        penalty = run.results["coordinator"]["penalty"]
        same = fit_sklearn(pool_x[kept], pool_y[kept], penalty, tol=1e-7, max_iter=5000)
        rows["pooled, our penalty"] = scores(truth, same.predict(questions))
        rows["pooled, best C"] = best_fit(pool_x, pool_y, questions, truth)
        for s in train:
            own_x, own_y = x[s][known[s]], self.truth[s][known[s]]
            if len(train) > 1 and len(np.unique(own_y)) > 1:
                rows[f"{s} alone"] = best_fit(own_x, own_y, questions, truth)
        if peers:
            rows |= self.peers(x, bare, known, asked, truth, train)
        return rows, run, seconds

    def peers(self, x, bare, known, asked, truth, train):
        from sklearn.decomposition import PCA

        dense = {s: scipy.sparse.csr_matrix(v).toarray() for s, v in x.items()}
        pca = PCA(50, svd_solver="randomized", random_state=0).fit(np.vstack(list(dense.values())))
        z = {s: pca.transform(v) for s, v in dense.items()}
        q = np.vstack([z[s][at] for s, at in asked.items()])
        pool = np.vstack([z[s][known[s]] for s in train])
        rows = {"k-NN": scores(truth, nearest(pool, np.concatenate([self.truth[s][known[s]] for s in train]), q))}
        for s, a in bare.items():
            a.obsm["X_pca"] = z[s]
        taking_part = {s: bare[s] for s in train}
        if len(taking_part) > 1:
            tuned = cl.rehearse("fine-tune", taking_part, label_key=self.label, use_rep="X_pca", timeout=600).model
            called = np.concatenate([tuned.predict(bare[s][at].copy()) for s, at in asked.items()])
            rows["fine-tune"] = scores(truth, called)
        return rows


def fifth(adata, label, rng):
    """A fifth of every label's cells, by position."""
    at = []
    for name in adata.obs[label].unique():
        of = np.flatnonzero((adata.obs[label] == name).to_numpy())
        at.append(rng.permutation(of)[: len(of) // 5])
    return np.sort(np.concatenate(at))


def tell(title, rows):
    print(f"\n  {title}")
    width = max(len(name) for name in rows) + 2
    for name, (accuracy, f1) in rows.items():
        print(f"    {name:{width}}accuracy {accuracy:.3f}   macro-F1 {f1:.3f}", flush=True)


def cost_line(run, seconds):
    sites = [run.cost[s] for s in run.study.sites]
    said = run.results["coordinator"]
    sent, rounds = max(c["bytes"] for c in sites) / 1e6, max(c["rounds"] for c in sites)
    end = "converged" if said["converged"] else "NOT converged"
    return (
        f"    {said['openings']} openings, {end}, penalty {said['penalty']:g}; {sent:.0f} MB sent per site,"
        f" {rounds:.0f} rounds, {seconds:.0f} s in rehearsal, {max(c['cpu_seconds'] for c in sites):.0f} s CPU per site"
    )


def on_real_data(data, quick, peers, sets):
    summary = []
    for name, sites, label, options in studies(data, quick, sets):
        print(f"\n{name}: " + ", ".join(f"{s} {a.n_obs}" for s, a in sites.items()) + f" cells, {a_genes(sites)} genes")
        task = Task(sites, label, options)
        rng = np.random.default_rng(0)
        rows, run, seconds = task.compare({s: fifth(a, label, rng) for s, a in sites.items()}, peers=peers)
        tell("new cells of all sites", rows)
        print(cost_line(run, seconds))
        summary.append((f"{name}, new cells", rows))
        for asking in sites:
            rows, run, seconds = task.compare({asking: np.arange(sites[asking].n_obs)}, peers=peers and not quick)
            tell(f"new site: {asking}", rows)
            print(cost_line(run, seconds))
            summary.append((f"{name}, {asking}", rows))
    conclude(summary)


def a_genes(sites):
    return next(iter(sites.values())).n_vars


def conclude(summary):
    print("\nours less others, in points of accuracy")
    below_pooled, against_best = [], []
    for name, rows in summary:
        ours = rows["ours"][0]
        pooled = 100 * (rows.get("ours, not aligned", rows["ours"])[0] - rows["pooled, our penalty"][0])
        hindsight = 100 * (ours - rows["pooled, best C"][0])
        below_pooled.append(pooled)
        alone = [accuracy for who, (accuracy, _) in rows.items() if who.endswith(" alone")]
        line = f"  {name:34} pooled {pooled:+.1f}   pooled at its best C {hindsight:+.1f}"
        if alone:
            against_best.append(100 * (ours - max(alone)))
            line += f"   best single site {against_best[-1]:+.1f}"
        print(line)
    print(
        f"  least against pooled {min(below_pooled):+.1f}; against the best single site:"
        f" mean {np.mean(against_best):+.1f}, least {min(against_best):+.1f}"
    )


# ---- weights of labels, and unknown cells ----------------------------------------------------------------------------


def weighting(data, quick, sets):
    """New cells and new sites of every set, with each weight of a label."""
    for name, sites, label, options in studies(data, quick, sets):
        rng = np.random.default_rng(0)
        asks = {"new cells": {s: fifth(a, label, rng) for s, a in sites.items()}}
        asks |= {s: {s: np.arange(a.n_obs)} for s, a in sites.items()}
        for what, asked in asks.items():
            rows = {}
            for weight in ("none", "root", "balanced"):
                task = Task(sites, label, {**options, "class_weight": weight})
                run, _ = task.ours(task.hidden(asked))
                truth = np.concatenate([task.truth[s][at] for s, at in asked.items()])
                called = [run.data[s].obs["predicted"].astype(str).to_numpy()[at] for s, at in asked.items()]
                rows[weight] = scores(truth, np.concatenate(called))
            tell(f"{name}: {what}", rows)


def new_types(data, quick, sets):
    """Each label with 30 cells or more is hidden in turn; how many of its cells a model of the others calls unknown."""
    for name, sites, label, options in studies(data, quick, sets):
        names, counts = np.unique(
            np.concatenate([a.obs[label].astype(str) for a in sites.values()]), return_counts=True
        )
        print(f"\n{name}: called unknown; of a type nobody trained on, of the others that were right, and wrong")
        shares = []
        for kind in names[counts >= 30]:
            asked = {s: np.flatnonzero((a.obs[label] == kind).to_numpy()) for s, a in sites.items()}
            rng, task = np.random.default_rng(0), Task(sites, label, {**options, "l2": 0.03})
            held = {s: np.setdiff1d(fifth(a, label, rng), asked[s]) for s, a in sites.items()}
            run, _ = task.ours(task.hidden({s: np.concatenate([asked[s], held[s]]) for s in sites}))
            called = {s: run.model.predict(a.copy(), library_key=options.get("library_key")) for s, a in sites.items()}
            p = {s: run.data[s].obs["predicted"].astype(str).to_numpy() for s in sites}
            new = np.concatenate([called[s][asked[s]] == "unknown" for s in sites])
            unsure = np.concatenate([called[s][held[s]] == "unknown" for s in sites])
            right = np.concatenate([(p[s] == task.truth[s])[held[s]] for s in sites])
            shares.append([x.mean() for x in (new, unsure[right], unsure[~right])])
            print(
                f"  {kind:24} {len(new):5} cells   " + "   ".join(f"{100 * x:3.0f} %" for x in shares[-1]), flush=True
            )
        print(f"  {'mean':24}               " + "   ".join(f"{100 * x:3.0f} %" for x in np.mean(shares, axis=0)))


# ---- alignment -------------------------------------------------------------------------------------------------------


def adaptation(data, quick, sets):
    """Every pair of sites trains and the others are asked, so that a site's own labels never speak for its default.

    For a site T without labels, the others know theirs: what alignment gains at each of them, when the other two train,
    is all that anybody could know beforehand. Beside it what it then gains at T itself, when the other three train.
    """
    for name, sites, label, options in studies(data, quick, sets):
        if len(sites) < 4:
            continue
        print(f"\n{name}: accuracy of alignment less that without, in points")
        gain, task = {}, Task(sites, label, options)
        read = {"library_key": options.get("library_key"), "unknown": False}
        for size in (2, 3):
            for train in itertools.combinations(sites, size):
                bring = {s: sites[s] for s in train}
                run = cl.rehearse("train-classifier", bring, label_key=label, timeout=900, **options)
                for asked in set(sites) - set(train):
                    called = [run.model.predict(sites[asked].copy(), adapt=a, **read) for a in (False, True)]
                    plain, aligned = (float(np.mean(task.truth[asked] == c)) for c in called)
                    gain[train, asked] = 100 * (aligned - plain)
                    print(f"  {' + '.join(train):34} -> {asked:14} {plain:.3f} {aligned:.3f}", flush=True)
        for T in sites:
            known = [g for (train, asked), g in gain.items() if len(train) == 2 and T not in (*train, asked)]
            then = next(g for (train, asked), g in gain.items() if len(train) == 3 and asked == T)
            seen = f"{np.mean(known):+.1f} ({min(known):+.1f} to {max(known):+.1f})"
            print(f"  {T:14} at the others {seen}, then here {then:+.1f}")


# ---- noise -----------------------------------------------------------------------------------------------------------


def with_noise(donors=30):
    """A fifth of the labels hidden; cells dealt to so many donors a site, since the demo has too few of its own."""
    rng, sites, truth, held = np.random.default_rng(0), cl.demo_sites(), {}, {}
    for s, a in sites.items():
        truth[s] = a.obs["cell_type"].astype(str).to_numpy()
        held[s] = rng.random(a.n_obs) < 0.2
        a.obs["cell_type"] = np.where(held[s], np.nan, truth[s].astype(object))
        a.obs["person"] = np.arange(a.n_obs) % donors
    fixed = {"use_rep": "X_pca", "l2": 1e-2, "validation": 0.0}
    cases = [{}] + [
        {"dp_noise": z, "dp_rounds": 5, "donor_key": key} for key, z in (("person", 0.5), ("person", 1.0), (None, 1.0))
    ]
    for case in cases:
        run = cl.rehearse("train-classifier", sites, timeout=600, **fixed, **case)
        right = np.concatenate([(run.data[s].obs["predicted"].astype(str) == truth[s])[held[s]] for s in sites])
        private = run.results["coordinator"].get("privacy", {})
        print(f"  {case or 'no noise'}: accuracy {right.mean():.3f}, epsilon {private.get('epsilon', '-')}", flush=True)


# ---- equality --------------------------------------------------------------------------------------------------------


def equality(data, quick):
    """Coefficients against a tightly converged fit of scikit-learn on the pooled cells."""
    whole = ad.read_h5ad(data / "pbmc_federation.h5ad")[:: 6 if quick else 2]
    sites = split(whole, "batch")
    print("\nequality with scikit-learn on pooled cells, " + ", ".join(f"{s} {a.n_obs}" for s, a in sites.items()))
    for l2 in (1e-1, 1e-2, 1e-3):
        run = cl.rehearse("train-classifier", sites, l2=l2, n_top_genes=500, timeout=600)
        x = scipy.sparse.vstack([run.model.inputs(a) for a in sites.values()])
        y = np.concatenate([a.obs["cell_type"].astype(str) for a in sites.values()])
        oracle = fit_sklearn(x.toarray(), y, l2, tol=1e-9, max_iter=100_000)
        apart = float(np.abs(run.model.model.coefficients.T - oracle.coef_).max())
        called = np.concatenate([run.data[s].obs["predicted"].astype(str) for s in sites])
        agree = float(np.mean(oracle.predict(x.toarray()) == called))
        said = run.results["coordinator"]
        print(
            f"  penalty {l2:g}: largest difference of a coefficient {apart:.1e},"
            f" of coefficients up to {np.abs(oracle.coef_).max():.2f};"
            f" {100 * agree:.2f} % of labels the same; {said['openings']} openings",
            flush=True,
        )


# ---- scale -----------------------------------------------------------------------------------------------------------


def at_scale(cells, genes, labels=20, sites=3):
    """Cells that are drawn, as sparse as real ones, in files that stay on disk; every party a process of its own."""
    rng = np.random.default_rng(0)
    kinds = rng.gamma(0.3, 1.0, genes) * np.exp(rng.normal(0, 0.8, (labels, genes)))
    with tempfile.TemporaryDirectory() as folder:
        data = {f"site-{i + 1}": Path(folder) / f"site-{i + 1}.h5ad" for i in range(sites)}
        for path in data.values():
            codes = rng.integers(0, labels, cells)
            parts = [
                scipy.sparse.csr_matrix(rng.poisson(kinds[codes[at : at + 2000]] * 0.3).astype(np.float32))
                for at in range(0, cells, 2000)
            ]
            a = ad.AnnData(scipy.sparse.vstack(parts).tocsr())
            a.var_names = [f"G{j}" for j in range(genes)]
            a.obs["cell_type"] = np.array([f"type {k}" for k in codes])
            filled = a.X.nnz / (cells * genes)
            a.write_h5ad(path)
            size = path.stat().st_size / 1e9
            del a, parts
        print(f"\n{sites} sites of {cells} cells x {genes} genes ({100 * filled:.0f} % not zero), {labels} labels,")
        print(f"    {size:.2f} GB a file, every party a process of its own", flush=True)
        began = time.perf_counter()
        run = cl.rehearse("train-classifier", data, n_top_genes=genes, timeout=3600, processes=True)
        print(cost_line(run, time.perf_counter() - began), flush=True)
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
        print(f"    {peak:.1f} GB of memory at most in a party's process", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--data", type=Path, default=HERE.parent.parent / "shared" / "data")
    parser.add_argument("--scale", type=int, nargs=2, metavar=("CELLS", "GENES"))
    parser.add_argument(
        "--sets", nargs="*", default=[], help="only these sets: pbmc_federation, lung_ts_vs_hlca, pancreas"
    )
    parser.add_argument("--noise", action="store_true", help="only what noise costs")
    parser.add_argument("--adapt", action="store_true", help="only whether to align the cells of a new site")
    parser.add_argument("--weights", action="store_true", help="only what a label should count")
    parser.add_argument("--unknown", action="store_true", help="only cells of a type that nobody trained on")
    parser.add_argument("--no-peers", action="store_true", help="leave out k-NN and fine-tune")
    args = parser.parse_args()
    threads = os.environ.get("OMP_NUM_THREADS", "all")
    print(f"machine: {platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {threads} thread(s)")
    if args.scale or args.noise:
        with_noise() if args.noise else at_scale(*args.scale)
        return
    folder = args.data / "scrna"
    if not folder.exists():
        print(f"{folder} is not here; nothing measured on real cells")
    elif args.adapt or args.weights or args.unknown:
        only = adaptation if args.adapt else weighting if args.weights else new_types
        only(folder, args.quick, args.sets)
        return
    else:
        if not args.sets:
            equality(folder, args.quick)
        on_real_data(folder, args.quick, not args.no_peers, args.sets)
    if args.sets:
        return
    at_scale(*((2000, 500) if args.quick else (20_000, 2000)))


if __name__ == "__main__":
    main()
