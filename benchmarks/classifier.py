"""The shared classifier measured: accuracy on real studies, unseen types, cost; beside iterative logistic regression.

    python benchmarks/classifier.py --quick                  real sets cut short, one small size; some minutes
    python benchmarks/classifier.py                          everything
    python benchmarks/classifier.py --scale 100000 5000      cost of one fit with so many cells and genes a site
    python benchmarks/classifier.py --unknown                cells of a type that nobody trained on
    python benchmarks/classifier.py --chosen-on              the sets that defaults were chosen on
    python benchmarks/classifier.py --equality               solver=logistic against scikit-learn on pooled cells
    python benchmarks/classifier.py --disclosure             attacks on opened sums: one cell of a label, membership
    python benchmarks/classifier.py --noise                  what hiding donors or sites costs, on the demo's cells

Two questions on every set. *New cells*: all sites have labels, a fifth of their cells is held out, and the model labels
those. *New site*: one site has no label, the others train, and the model labels all its cells; each site in turn.
Accuracy counts all cells that are asked about, and, as "known", those of labels that some training site has ten cells
of. Beside ours: `solver="logistic"` with 2000 genes, the classifier of earlier versions, federated under the same
thresholds; logistic regression of scikit-learn on the pooled cells and on each site alone with its best C, picked with
hindsight on the answers.
"""

from __future__ import annotations

import argparse
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
CS = (0.001, 0.01, 0.1, 1.0)
BEFORE = {  # the defaults of the version before fixed statistics, all of them pinned
    "solver": "logistic", "mode": "semi-honest", "n_top_genes": 2000, "unknown_share": 0.01, "validation": 0.2,
    "class_weight": "none",
}  # fmt: skip


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
    whole = ad.read_h5ad(data / "glioblastoma_panobinostat_zhao.h5ad")
    yield "glioblastoma", split(whole, "patient_id"), "annotation", {}


def chosen_on(data):
    """Sets on which defaults were chosen, beside glioblastoma."""
    whole = ad.read_h5ad(data / "cellline_mixology.h5ad")
    yield "cell lines", split(whole, "batch"), "cell_type", {"library_key": "n_counts_all_genes"}
    whole = ad.read_h5ad(data / "lung_ts_vs_hlca.h5ad")
    yield "lung by batch", split(whole, "batch"), "cell_type_coarse", {"library_key": "n_counts_all_genes"}


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
    """The answers of the best C, from the strongest penalty to the weakest, each from where the last one ended."""
    from sklearn.linear_model import LogisticRegression

    fit, rows = LogisticRegression(max_iter=100, tol=1e-3, warm_start=True), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for c in CS:
            called = fit.set_params(C=c).fit(x, y).predict(questions)
            rows.append((float(np.mean(called == truth)), called))
    return max(rows, key=lambda row: row[0])[1]


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

    def trained(self, bare, **more):
        options = {"max_share": 1.0, **self.options, **more}  # with two sites, one of them trains alone
        return cl.rehearse("train-classifier", bare, label_key=self.label, timeout=900, **options)

    def known_types(self, bare):
        """Labels with ten cells or more at one of the training sites."""
        counts = [a.obs[self.label].value_counts() for a in bare.values()]
        return {str(name) for c in counts for name, n in c.items() if n >= 10}

    def compare(self, asked, *, alone):
        """Name of a method → accuracy, accuracy on known types, macro-F1; and the two runs."""
        bare = self.hidden(asked)
        known = self.known_types(bare)
        truth = np.concatenate([self.truth[s][at] for s, at in asked.items()])
        seen = np.isin(truth, sorted(known))

        def score(called):
            accuracy, f1 = scores(truth, called)
            return accuracy, float(np.mean(truth[seen] == called[seen])), f1

        def called_by(run):
            return np.concatenate([run.data[s].obs["predicted"].astype(str).to_numpy()[at] for s, at in asked.items()])

        ours, before = self.trained(bare), self.trained(bare, **BEFORE)
        rows = {"ours": score(called_by(ours)), "logistic": score(called_by(before))}
        if set(asked) != set(bare):
            read = {"library_key": self.options.get("library_key"), "unknown": False}
            plain = [ours.model.predict(self.sites[s][at].copy(), **read) for s, at in asked.items()]
            rows["ours, not aligned"] = score(np.concatenate(plain))
        if alone:
            rows |= self.in_the_clear(ours.model, bare, asked, truth, score)
        return rows, ours, before

    def in_the_clear(self, model, bare, asked, truth, score):
        """Logistic regression of scikit-learn over our genes, pooled and at each site alone, with its best C."""
        read = {"library_key": self.options.get("library_key")}
        x = {s: scipy.sparse.csr_matrix(model.inputs(a, **read)) for s, a in self.sites.items()}
        labelled = {s: bare[s].obs[self.label].notna().to_numpy() for s in bare}
        train = [s for s in bare if labelled[s].any()]
        questions = scipy.sparse.vstack([x[s][at] for s, at in asked.items()]).toarray()
        pool = {s: (x[s][labelled[s]].toarray(), self.truth[s][labelled[s]]) for s in train}
        both = np.vstack([p[0] for p in pool.values()]), np.concatenate([p[1] for p in pool.values()])
        rows = {"pooled": score(best_fit(*both, questions, truth))}
        single = [score(best_fit(*pool[s], questions, truth)) for s in train if len(np.unique(pool[s][1])) > 1]
        if len(train) > 1:
            rows["best single site"] = max(single)
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
    for name, (accuracy, known, f1) in rows.items():
        print(f"    {name:{width}}accuracy {accuracy:.3f}   known types {known:.3f}   macro-F1 {f1:.3f}", flush=True)


def cost_of(run):
    sites = [run.cost[s] for s in run.study.sites]
    return [max(c[name] for c in sites) for name in ("cpu_seconds", "rounds", "bytes")]


def cost_line(run):
    said, (cpu, rounds, sent) = run.results["coordinator"], cost_of(run)
    how = said["setting"] or f"penalty {said['penalty']:g}"
    return f"    {how}; {said['openings']} openings, {rounds:.0f} rounds, {cpu:.2f} s CPU, {sent / 1e6:.1f} MB per site"


def on_real_data(rows_of, alone):
    summary, costs = [], []
    for name, sites, label, options in rows_of:
        print(f"\n{name}: " + ", ".join(f"{s} {a.n_obs}" for s, a in sites.items()) + f" cells, {a_genes(sites)} genes")
        task = Task(sites, label, options)
        rng = np.random.default_rng(0)
        asks = {"new cells of all sites": {s: fifth(a, label, rng) for s, a in sites.items()}}
        asks |= {f"new site: {s}": {s: np.arange(a.n_obs)} for s, a in sites.items()}
        for what, asked in asks.items():
            rows, ours, before = task.compare(asked, alone=alone)
            tell(what, rows)
            print(cost_line(ours) + "\n" + cost_line(before), flush=True)
            summary.append((name, what.startswith("new site"), rows))
            costs.append(np.array(cost_of(ours)) / np.maximum(cost_of(before), 1e-9))
    for new_site, title in ((False, "new cells"), (True, "new sites")):
        print(f"\nmean over {title}: accuracy, accuracy on known types, macro-F1")
        chosen = [rows for _, kind, rows in summary if kind == new_site]
        for method in ("ours", "ours, not aligned", "logistic", "pooled", "best single site"):
            found = [rows[method] for rows in chosen if method in rows]
            if found:
                print(f"  {method:20} {np.round(np.mean(found, axis=0), 4)}   ({len(found)} rows)")
    cpu, rounds, sent = np.mean(costs, axis=0)
    print(f"\nours / logistic: CPU {cpu:.3f}, rounds {rounds:.3f}, bytes {sent:.3f} (means over {len(costs)} runs)")


def a_genes(sites):
    return next(iter(sites.values())).n_vars


# ---- unknown cells ---------------------------------------------------------------------------------------------------


def new_types(rows_of):
    """Each label with 40 cells or more is hidden in turn; how many of its cells a model of the others calls unknown."""
    overall = {}
    for name, sites, label, options in rows_of:
        every = np.concatenate([a.obs[label].astype(str) for a in sites.values()])
        names, counts = np.unique(every, return_counts=True)
        print(f"\n{name}: called unknown; of a type nobody trained on, of known types, and of right answers among them")
        for way, more in (("ours", {}), ("logistic", {**BEFORE, "l2": 0.03})):
            shares = []
            for kind in names[counts >= 40]:
                asked = {s: np.flatnonzero((a.obs[label] == kind).to_numpy()) for s, a in sites.items()}
                rng, task = np.random.default_rng(0), Task(sites, label, options)
                held = {s: np.setdiff1d(fifth(a, label, rng), asked[s]) for s, a in sites.items()}
                bare = task.hidden({s: np.concatenate([asked[s], held[s]]) for s in sites})
                model, known = task.trained(bare, **more).model, task.known_types(bare)
                read = {"library_key": options.get("library_key")}
                called = {s: model.predict(a.copy(), **read) for s, a in sites.items()}
                label_of = {s: model.predict(a.copy(), unknown=False, **read) for s, a in sites.items()}
                new = np.concatenate([called[s][asked[s]] == "unknown" for s in sites])
                good = {s: held[s][np.isin(task.truth[s][held[s]], sorted(known))] for s in sites}
                lost = np.concatenate([called[s][good[s]] == "unknown" for s in sites])
                right = np.concatenate([(label_of[s] == task.truth[s])[good[s]] for s in sites])
                shares.append([new.mean(), lost.mean(), lost[right].mean()])
                if way == "ours":
                    print(f"  {kind:24} {len(new):5} cells   " + "   ".join(f"{100 * x:3.0f} %" for x in shares[-1]))
            overall.setdefault(way, []).append(np.mean(shares, axis=0))
            print(f"  {way:24} mean         " + "   ".join(f"{100 * x:3.0f} %" for x in overall[way][-1]), flush=True)
    for way, rows in overall.items():
        print(f"{way}, mean over sets: " + "   ".join(f"{100 * x:.1f} %" for x in np.mean(rows, axis=0)))


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
        way = {} if case else {"solver": "logistic", "mode": "semi-honest"}
        run = cl.rehearse("train-classifier", sites, timeout=600, **fixed, **case, **way)
        right = np.concatenate([(run.data[s].obs["predicted"].astype(str) == truth[s])[held[s]] for s in sites])
        private = run.results["coordinator"].get("privacy", {})
        print(f"  {case or 'no noise'}: accuracy {right.mean():.3f}, epsilon {private.get('epsilon', '-')}", flush=True)


# ---- equality --------------------------------------------------------------------------------------------------------


def equality(data, quick):
    """Coefficients against a tightly converged fit of scikit-learn on the pooled cells."""
    whole = ad.read_h5ad(data / "pbmc_federation.h5ad")[:: 6 if quick else 2]
    sites = split(whole, "batch")
    print("\nequality with scikit-learn on pooled cells, " + ", ".join(f"{s} {a.n_obs}" for s, a in sites.items()))
    often = [a.obs["cell_type"].astype(str).value_counts() for a in sites.values()]
    kept = np.concatenate(
        [(a.obs["cell_type"].astype(str).map(c) >= 10).to_numpy() for a, c in zip(sites.values(), often, strict=True)]
    )
    for l2 in (1e-1, 1e-2, 1e-3):
        run = cl.rehearse("train-classifier", sites, **{**BEFORE, "l2": l2, "n_top_genes": 500}, timeout=600)
        x = scipy.sparse.vstack([run.model.inputs(a) for a in sites.values()])
        y = np.concatenate([a.obs["cell_type"].astype(str) for a in sites.values()])
        x, y = x[kept], y[kept]
        oracle = fit_sklearn(x.toarray(), y, l2, tol=1e-9, max_iter=100_000)
        apart = float(np.abs(run.model.model.coefficients.T - oracle.coef_).max())
        called = np.concatenate([run.data[s].obs["predicted"].astype(str) for s in sites])[kept]
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
        run = cl.rehearse("train-classifier", data, timeout=3600, processes=True)
        print(cost_line(run) + f", {time.perf_counter() - began:.0f} s in rehearsal", flush=True)
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
        print(f"    {peak:.1f} GB of memory at most in a party's process", flush=True)


# ---- attacks on the sums of one site, after subtraction of all others ------------------------------------------------


def disclosure(data):
    """What someone who has a site's sums learns about one of its cells, on the cells of pbmc_federation."""
    whole = ad.read_h5ad(data / "pbmc_federation.h5ad")
    log = np.log1p(1e4 * whole.X.toarray() / whole.obs["n_counts_all_genes"].to_numpy(float)[:, None])
    site, label = (whole.obs[key].astype(str).to_numpy() for key in ("batch", "cell_type"))
    print("one cell of a label: genes with the smallest sum; of these, expressed by the same single cell")
    for u, k in sorted(set(zip(site, label, strict=True))):
        here = site == u
        x = log[here & (label == k)] * ((log[here] != 0).sum(axis=0) >= 10)
        if 10 <= len(x) <= 40:
            print(
                f"    {u}, {k}, {len(x)} cells: {smallest_sums(x, 0.25)} in quarters, {smallest_sums(x, 4.0)} in fours"
            )
    rng, at = np.random.default_rng(0), np.flatnonzero(site == "kang_ctrl")
    here = log[site == "pbmc3k"]
    here = here[:, (here != 0).sum(axis=0) >= 10]
    sizes = np.square(here).sum(axis=0) / np.square(here).max(axis=0)
    print(
        f"effective cells behind a gene of pbmc3k: {sizes.min():.1f} at least, {np.quantile(sizes, 0.01):.1f} for 1 %"
    )
    print("membership of a known cell, area under the curve against cells of the same site")
    for n in (10, 30, 100, 300):
        print(f"    sums of a label of {n}: {np.mean([by_sums(log[rng.permutation(at)], n) for _ in range(20)]):.3f}")
    for n, h in ((300, 300), (600, 300), (1200, 300)):
        area = np.mean([by_second_moments(log[rng.permutation(at)], n, h) for _ in range(3)])
        print(f"    second moments of {h} genes of {n} cells: {area:.3f}")


def smallest_sums(x, step):
    sums = np.rint(x.sum(axis=0) / step) * step
    genes = np.flatnonzero(sums == sums[sums > 0].min())
    single = genes[(x[:, genes] > 0).sum(axis=0) == 1]
    owner = np.bincount(x[:, single].argmax(axis=0), minlength=len(x)).max()
    return f"{owner} of {len(genes)}"


def area_under_curve(members, others):
    return float(np.mean(members[:, None] > others[None, :]))


def by_sums(x, n):
    """Members correlate with the difference of their mean from that of other cells."""
    members, others, known = x[:n], x[n : 2 * n], x[2 * n :]
    mean, centre, variance = np.rint(members.sum(axis=0) / 4) * 4 / n, known.mean(axis=0), known.var(axis=0) + 0.05
    return area_under_curve(*(((y - centre) * (mean - centre) / variance).sum(axis=1) for y in (members, others)))


def by_second_moments(x, n, h):
    """Members have a small xᵀ G⁻¹ x; the best of four ridges."""
    genes = np.argsort(-x.var(axis=0))[:h]
    members, others = x[:n, genes], x[n : 2 * n, genes]
    both = (members != 0).astype(float)
    gram = np.where(both.T @ both >= 10, np.rint(members.T @ members * 4) / 4, 0.0)
    values, axes = np.linalg.eigh(gram)
    areas = []
    for ridge in (0.01, 0.1, 1.0, 10.0):
        white = axes / np.sqrt(np.maximum(values, 0) + ridge)
        areas.append(area_under_curve(*(-np.square(y @ white).sum(axis=1) for y in (members, others))))
    return max(areas)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--data", type=Path, default=HERE.parent.parent / "shared" / "data")
    parser.add_argument("--scale", type=int, nargs=2, metavar=("CELLS", "GENES"))
    parser.add_argument(
        "--sets", nargs="*", default=[], help="pbmc_federation, lung_ts_vs_hlca, pancreas, glioblastoma"
    )
    parser.add_argument("--noise", action="store_true", help="only what noise costs")
    parser.add_argument("--equality", action="store_true", help="only solver=logistic against scikit-learn")
    parser.add_argument("--chosen-on", action="store_true", help="only the sets that defaults were chosen on")
    parser.add_argument("--unknown", action="store_true", help="only cells of a type that nobody trained on")
    parser.add_argument("--disclosure", action="store_true", help="only attacks on opened sums")
    parser.add_argument("--no-alone", action="store_true", help="leave out pooled cells and single sites in the clear")
    args = parser.parse_args()
    threads = os.environ.get("OMP_NUM_THREADS", "all")
    print(f"machine: {platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {threads} thread(s)")
    if args.scale or args.noise:
        with_noise() if args.noise else at_scale(*args.scale)
        return
    folder = args.data / "scrna"
    if not folder.exists():
        print(f"{folder} is not here; nothing measured on real cells")
        return
    if args.equality:
        equality(folder, args.quick)
    elif args.disclosure:
        disclosure(folder)
    elif args.unknown:
        new_types(studies(folder, args.quick, args.sets))
    else:
        rows_of = chosen_on(folder) if args.chosen_on else studies(folder, args.quick, args.sets)
        on_real_data(rows_of, not args.no_alone)


if __name__ == "__main__":
    main()
