"""find-outliers: AUROC on the ODDS sets, the price of suppression, uneven sites, and cost beside a pooled forest.

    python benchmarks/outliers.py                     everything, 10 seeds: about half an hour on two idle cores
    python benchmarks/outliers.py --quick             2 seeds, six sets, 10^4 and 10^5 rows: below five minutes
    python benchmarks/outliers.py --only auroc --figures figures
    python benchmarks/outliers.py --only price        AUROC for other settings of the suppression; not part of the rest
    python benchmarks/outliers.py --only gap          sixteen sets, three of them never tuned on: hardened less
                                                      pooled with its noise, for other numbers of trees and rows
    python benchmarks/outliers.py --only found        what the attack finds for these numbers of trees and rows
    python benchmarks/outliers.py --only isotree      the published masks under the library its paper used, if installed

`hardened` columns grow the forest that the protocol opens (`grow_plainly`; that the two agree is tested), so
that ten seeds take minutes; `in rehearsal` runs the protocol itself. Rows of each set go to three sites at random.
Like is compared with like: standard splits with the pooled standard forest, extended with the pooled extended one, all
on columns of one scale but for the published mode, which masks the columns as they are, as its paper does.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")

import numpy as np  # noqa: E402

from cloister.models import isolation_forest as iforest  # noqa: E402
from cloister.mpc.sums import pooled_scaling  # noqa: E402
from cloister.papers import masked_forest  # noqa: E402
from cloister.papers.attacks import opened_forest  # noqa: E402
from cloister.workflows.find_outliers import counted_forest  # noqa: E402
from cloister.workflows.find_outliers.workflow import SAMPLE  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
SETS = (
    *("lympho", "glass", "vertebral", "ionosphere", "arrhythmia", "vowels", "cardio"),
    *("thyroid", "musk", "satellite", "mnist", "mammography", "shuttle"),
)
MADE = ("digits", "breast", "wine")  # from scikit-learn's bundled sets, as ODDS made Optdigits, WBC and Wine
QUICK = ("lympho", "glass", "vertebral", "ionosphere", "thyroid", "mammography")
STRETCH = (2.0, 10.0, 100.0, 1000.0)
SITES = ("basel", "lugano", "vienna")
KINDS = ("standard", "extended")
SHORT = {"standard": "IF", "extended": "EIF"}


def say(*words):
    print(*words, flush=True)


def auroc(truth, score):
    """Area under the curve by ranks, ties counted half."""
    from scipy.stats import rankdata

    ranks, n = rankdata(score), truth.sum()
    return float((ranks[truth].sum() - n * (n + 1) / 2) / (n * (len(truth) - n)))


def load(folder, name):
    if name in MADE:
        return made(name)
    data = np.load(Path(folder) / "odds" / f"{name}.npz", allow_pickle=False)
    return data["X"].astype(np.float64), data["y"].ravel() == 1


def made(name):
    """One class of a bundled set, thinned to so many rows, as outliers among the others."""
    from sklearn import datasets

    source, few = {
        "digits": (datasets.load_digits, 54),
        "breast": (datasets.load_breast_cancer, 21),
        "wine": (datasets.load_wine, 10),
    }[name]
    X, y = source(return_X_y=True)
    kept = np.random.default_rng(0).choice(np.flatnonzero(y == 0), few, replace=False)
    rows = np.concatenate([np.flatnonzero(y != 0), kept])
    return X[rows].astype(np.float64), y[rows] == 0


def grown(params, X, part, secret, rng):
    """Paths in the forests that three sites of these rows open, (repeats, rows)."""
    xs = [X[part == i] for i in range(3)]
    scaling = pooled_scaling.fenced_scaling(xs, params.thresholds)
    outline, geometry = counted_forest.grow_plainly(params, scaling, xs, secret, rng)
    Z = counted_forest.on_scale(params, scaling, X)
    return np.array([f.paths(Z) for f in counted_forest.finish(params, geometry.steps, outline.depth, len(X))])


# ---- 1: AUROC --------------------------------------------------------------------------------------------------------


def methods(X, truth, seed):
    """AUROC of every method on one set, for one seed."""
    rng = np.random.default_rng(seed)
    scaling = pooled_scaling.scaling_of(X)
    Z = scaling.apply(X)
    part = rng.integers(0, 3, len(X))
    found = {}
    for kind in KINDS:
        found[f"pooled {SHORT[kind]}"] = auroc(truth, iforest.fit(Z, kind=kind, rng=rng).score(Z))
        params = counted_forest.Params(SITES, "hub", forest=kind, sample=SAMPLE)
        secret = bytes([seed]) * 32
        found[f"hardened {SHORT[kind]}"] = auroc(truth, -grown(params, X, part, secret, rng)[0])
        for T in STRETCH:
            masked = X @ masked_forest.masking_matrix(secret, X.shape[1], T)
            score = iforest.fit(masked, kind=kind, rng=rng).score(masked)
            found[f"published {SHORT[kind]} T={T:g}"] = auroc(truth, score)
            if T == 10.0:
                masked = Z @ masked_forest.masking_matrix(secret, X.shape[1], T)
                score = iforest.fit(masked, kind=kind, rng=rng).score(masked)
                found[f"published {SHORT[kind]} standardised"] = auroc(truth, score)
    alone = [
        auroc(truth[part == i], iforest.fit(X[part == i], rng=rng).score(X[part == i]))
        for i in range(3)
        if 0 < truth[part == i].sum() < (part == i).sum()
    ]
    found["alone IF"] = float(np.mean(alone)) if alone else float("nan")
    return found


def run_auroc(folder, sets, seeds, keep):
    """Per set and method a list over seeds; what is done is kept in a file, so that a long run can be taken up."""
    done = json.loads(keep.read_text()) if keep and keep.exists() else {}
    for seed in range(seeds):
        for name in sets:
            have = done.setdefault(name, {})
            if str(seed) in have:
                continue
            have[str(seed)] = methods(*load(folder, name), seed)
            if keep:
                keep.write_text(json.dumps(done))
        say(f"  seed {seed}: done")
    return {name: list(done[name].values()) for name in sets}


def table(results):
    names = list(next(iter(results.values()))[0])
    mean = {s: {m: np.mean([r[m] for r in rows]) for m in names} for s, rows in results.items()}
    sd = {s: {m: np.std([r[m] for r in rows]) for m in names} for s, rows in results.items()}
    say("\nAUROC, mean ± sd")
    for group in (
        ("pooled IF", "hardened IF", "alone IF", "pooled EIF", "hardened EIF"),
        tuple(m for m in names if m.startswith("published IF")),
        tuple(m for m in names if m.startswith("published EIF")),
    ):
        say(f"  {'':12s}" + "".join(f"{m:>27s}" for m in group))
        for s in results:
            say(f"  {s:12s}" + "".join(f"{mean[s][m]:>19.3f} ± {sd[s][m]:.3f}" for m in group))
    say("\ndifference to the pooled forest of the same kind: mean over sets, worst set")
    for m in names:
        if m.startswith(("hardened", "published", "alone")):
            base = f"pooled {m.split()[1]}"
            gap = {s: mean[s][m] - mean[s][base] for s in results}
            worst = min(gap, key=gap.get)
            say(f"  {m:28s} {np.mean(list(gap.values())):+.4f}   {gap[worst]:+.4f} ({worst})")


def box_plot(results, folder):
    """The paper's figure 2: one panel per set, one box per method."""
    from cloister.report.figures import COLOURS, canvas

    names = [m for m in next(iter(results.values()))[0] if "standardised" not in m and "alone" not in m]
    names = sorted(names, key=lambda m: (m.split()[1], {"pooled": 0, "published": 1, "hardened": 2}[m.split()[0]]))
    colours = {"pooled": COLOURS[8], "published": COLOURS[5], "hardened": COLOURS[1]}
    sets = list(results)
    with canvas(panels=len(sets), width=1.7 * len(sets) + 1, height=4.2) as c:
        for axis, s in zip(c.axes, sets, strict=True):
            values = [[r[m] for r in results[s]] for m in names]
            drawn = axis.boxplot(
                values, widths=0.7, patch_artist=True, medianprops={"color": "black"}, showfliers=False
            )
            for box, m in zip(drawn["boxes"], names, strict=True):
                box.set_facecolor(colours[m.split()[0]])
            labels = [m.replace("published ", "").replace("pooled ", "").replace("hardened", "our") for m in names]
            axis.set_xticklabels(labels, rotation=90, fontsize=6)
            axis.set_title(s, fontsize=9)
        c.axes[0].set_ylabel("AUROC")
        figure = c.done("AUROC by set and method", "box plot")
    Path(folder).mkdir(parents=True, exist_ok=True)
    (Path(folder) / "outliers-auroc.png").write_bytes(figure["png"])


def run_isotree(folder, seeds):
    """The same masks under the library that the paper used: is a loss ours, or the masking's?"""
    try:
        from isotree import IsolationForest
    except ImportError:
        say("\nisotree is not installed (pip install isotree, ten minutes of compiling); its table is left out")
        return
    say("\nisotree, 100 trees of 256, ndim=1: AUROC pooled, and less that, masked at T = 2, 10, 100, 1000")
    for name in SETS:
        X, truth = load(folder, name)
        found = {T: [] for T in (None, *STRETCH)}
        for seed in range(seeds):
            for T in found:
                given = X if T is None else X @ masked_forest.masking_matrix(bytes([seed]) * 32, X.shape[1], T)
                size = min(256, len(X))
                forest = IsolationForest(ndim=1, ntrees=100, sample_size=size, random_seed=seed + 1, nthreads=1)
                found[T].append(auroc(truth, forest.fit(given).predict(given)))
        base = np.mean(found.pop(None))
        say(f"  {name:12s} {base:.3f}  " + "  ".join(f"{np.mean(v) - base:+.3f}" for v in found.values()))


# ---- 2: what suppression costs and what it saves ---------------------------------------------------------------------


def run_attack(folder, seeds, quick):
    """A forest of half the rows at three sites, and the other half as a control."""
    say(
        "\nsmallest group t of a site and cells of the grid: lone rows rebuilt from the opened forest of half the rows,"
    )
    say("  lone rows of the other half hit by the same guesses")
    for name in ("glass",) if quick else ("glass", "vertebral", "thyroid"):
        X, _ = load(folder, name)
        for cells, least in ((512, 2), (512, 10), (64, 2), (64, 5), (64, 10)):
            params = counted_forest.Params(SITES, "hub", min_cells=least, cells=cells)
            got = [_rebuilt(params, X, bytes([s]) * 32, np.random.default_rng(s)) for s in range(seeds)]
            hit, control = np.mean(got, axis=0)
            say(f"  {name:10s} cells {cells:3d}  t {least:2d}  rebuilt {hit:5.1%}  other half {control:5.1%}")


def run_price(folder, sets, seeds):
    """AUROC less pooled, standard splits, over the sets, for settings around the default."""
    say("\nAUROC less the pooled forest's over the sets, standard splits: smallest group t, cells of the grid")
    combos = ((5, 64), (8, 64), (10, 32), (10, 64), (10, 128), (20, 64))
    gaps = {c: [] for c in combos}
    for name in sets:
        X, truth = load(folder, name)
        Z = pooled_scaling.scaling_of(X).apply(X)
        base = np.mean([auroc(truth, iforest.fit(Z, rng=np.random.default_rng(s)).score(Z)) for s in range(seeds)])
        for least, cells in combos:
            params = counted_forest.Params(SITES, "hub", min_cells=least, cells=cells, sample=SAMPLE)
            areas = []
            for s in range(seeds):
                rng = np.random.default_rng(s)
                areas.append(auroc(truth, -grown(params, X, rng.integers(0, 3, len(X)), bytes([s]) * 32, rng)[0]))
            gaps[least, cells].append(np.mean(areas) - base)
    for (least, cells), gap in gaps.items():
        say(f"  t {least:2d}  cells {cells:3d}  mean {np.mean(gap):+.4f}  worst {np.min(gap):+.4f}")


FORMS, REPEATS = ((256, 10), (512, 10)), 3  # rows of a tree, smallest group of a site
SIZES = ((100, 256, 10), (300, 256, 10), (100, 512, 10))


def run_gap(folder, sets, seeds, kind):
    """Hardened less pooled on every set; three forests of 100 trees a seed are one of 300, too."""
    say(f"\nAUROC of the pooled {kind} forest (100 trees of 256), and less that, {REPEATS} a seed; ± standard error")
    heads = ["pooled, 300", *(f"{trees} of {size}, t {t}" for size, t in FORMS for trees in (100, 100 * REPEATS))]
    say(f"  {'':12s} {'rows':>6s} seeds {'pooled (sd)':>15s}" + "".join(f"{h:>18s}" for h in heads))
    gaps = []
    for name in sets:
        X, truth = load(folder, name)
        scaling = pooled_scaling.scaling_of(X)
        Z, n = scaling.apply(X), seeds if len(X) < 5000 else max(2, seeds // 3)
        found = {"pooled": [], **{form: [] for form in FORMS}}
        for seed in range(n):
            rng = np.random.default_rng(1000 + seed)
            found["pooled"].append([iforest.fit(Z, kind=kind, rng=rng).paths(Z) for _ in range(REPEATS)])
            for form in FORMS:
                how = {"sample": form[0], "min_cells": form[1], "repeats": REPEATS, "forest": kind}
                params = counted_forest.Params(SITES, "hub", **how)
                rng, secret = np.random.default_rng(seed), bytes([seed]) * 32
                found[form].append(grown(params, X, rng.integers(0, 3, len(X)), secret, rng))
        areas = {}
        for what, seen in found.items():  # a shorter path is a higher score
            areas[what, 100] = [auroc(truth, -path) for forests in seen for path in forests]
            areas[what, 300] = [auroc(truth, -np.mean(forests, axis=0)) for forests in seen]
        base = areas.pop(("pooled", 100))
        gaps.append([np.mean(v) - np.mean(base) for v in areas.values()])
        noise = [np.sqrt(np.var(v, ddof=1) / len(v) + np.var(base, ddof=1) / len(base)) for v in areas.values()]
        say(
            f"  {name:12s} {len(X):6d} {n:5d} {np.mean(base):8.3f} ({np.std(base, ddof=1):.3f})"
            + "".join(f"{g:+10.3f} ± {e:.3f}" for g, e in zip(gaps[-1], noise, strict=True))
        )
    say("  mean, worst" + " " * 20 + "".join(f"{g.mean():+10.3f}, {g.min():+.3f}" for g in np.array(gaps).T))


def run_found(folder, sets, seeds):
    """Lone rows that the attack finds, by number of trees, rows a tree and smallest opened count."""
    say("\nlone rows of a half that the attack rebuilds from its forest (of the other half, by luck)")
    say(f"  {'':12s} {'rows':>6s}" + "".join(f"{f'{trees} of {size}, t {t}':>20s}" for trees, size, t in SIZES))
    for name in sets:
        whole, _, rows = name.partition(":")  # thyroid:800 has 800 of its rows
        X, _ = load(folder, whole)
        X, line = X[np.random.default_rng(0).permutation(len(X))[: int(rows or len(X))]], []
        for trees, sample, least in SIZES:
            params = counted_forest.Params(SITES, "hub", trees=trees, sample=sample, min_cells=least)
            got = [_rebuilt(params, X, bytes([s]) * 32, np.random.default_rng(s)) for s in range(seeds)]
            hit, luck = np.mean(got, axis=0)
            line.append(f"{hit:.1%} ({luck:.1%})")
        say(f"  {name:12s} {len(X) // 2:6d}" + "".join(f"{c:>20s}" for c in line))


def _rebuilt(params, X, secret, rng):
    """Lone rows of one half that the attack finds in its forest, and of the other half."""
    inside, outside = np.array_split(rng.permutation(len(X)), 2)
    xs = np.array_split(X[inside], 3)
    scaling = pooled_scaling.fenced_scaling(xs, params.thresholds)
    Z, other = (counted_forest.on_scale(params, scaling, X[half]) for half in (inside, outside))
    outline, geometry = counted_forest.grow_plainly(params, scaling, xs, secret, rng)
    view = opened_forest.view(params, outline, geometry.steps, len(Z), Z.shape[1])
    guess = opened_forest.rebuild(view, most=3000, rng=rng)
    return [opened_forest.rebuilt(rows, guess, within=0.2)[0] for rows in (Z, other)]


# ---- 3: the protocol itself, and sites that are not alike ------------------------------------------------------------


def rehearsed(X, truth, part, **options):
    from anndata import AnnData

    from cloister.rehearsal.rehearsal import rehearse

    data = {u: AnnData(X[part == i]) for i, u in enumerate(SITES)}
    began = time.perf_counter()
    run = rehearse("find-outliers", data, timeout=300, **options)
    took = time.perf_counter() - began
    score = np.zeros(len(X))
    for i, u in enumerate(SITES):
        score[part == i] = run.data[u].obs["outlier_score"]
    return auroc(truth, score), took, run


def run_splits(folder, seeds, quick):
    say("\nin rehearsal, hardened: rows dealt out at random; all outliers at one site; sites of 80, 10 and 10 %")
    for name in ("glass", "thyroid") if quick else ("glass", "ionosphere", "cardio", "thyroid"):
        X, truth = load(folder, name)
        found = {"random": [], "outliers at one": [], "80/10/10 %": []}
        for seed in range(seeds):
            rng = np.random.default_rng(seed)
            even = rng.integers(0, 3, len(X))
            parts = {
                "random": even,
                "outliers at one": np.where(truth, 0, even),
                "80/10/10 %": rng.permutation(np.searchsorted([0.8, 0.9], (np.arange(len(X)) + 1) / len(X))),
            }
            for how, part in parts.items():
                found[how].append(rehearsed(X, truth, part)[0])
        say(f"  {name:12s}" + "   ".join(f"{h} {np.mean(v):.3f} ± {np.std(v):.3f}" for h, v in found.items()))


# ---- 4: cost ---------------------------------------------------------------------------------------------------------

CHILD = (
    "import sys; sys.path.insert(0, {here!r}); import outliers;"
    " outliers.one_cost({rows}, {kind!r}, {data!r}, {mode!r}, {sample})"
)


def one_cost(rows, kind, folder, mode, sample):
    """Pooled fit and score, then the protocol on the same rows; in a process of its own, so that memory is its own."""
    import resource

    from sklearn.ensemble import IsolationForest

    if rows == 49097:
        X, truth = load(folder, "shuttle")
    else:
        rng = np.random.default_rng(0)
        truth = rng.random(rows) < 0.02
        X = rng.normal(size=(rows, 9)) * np.where(truth, 4.0, 1.0)[:, None]
    peer, busy = [], []
    for _ in range(2):
        began, cpu = time.perf_counter(), time.process_time()
        if kind == "standard":
            IsolationForest(n_estimators=100, max_samples=256, random_state=0).fit(X).score_samples(X)
        else:
            iforest.fit(X, kind=kind, rng=np.random.default_rng(0)).score(X)
        peer.append(time.perf_counter() - began)
        busy.append(time.process_time() - cpu)
    part = np.random.default_rng(1).integers(0, 3, len(X))
    area, took, run = rehearsed(X, truth, part, forest=kind, mode=mode, sample=sample, inplace=True)
    cost = run.cost[SITES[0]]
    say(
        json.dumps(
            {
                "rows": len(X),
                "pooled_s": min(peer),
                "pooled_cpu_s": min(busy),
                "ours_s": took,
                "cpu_s": sum(c["cpu_seconds"] for c in run.cost.values()),
                "sent_mb": cost["bytes"] / 1e6,
                "sums": sum(1 for e, _ in run.receipts[SITES[0]].entries if e.name == "secure_sum.Unmask"),
                "gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
                "auroc": area,
            }
        )
    )


def run_cost(folder, quick, sample):
    say("\ncost in rehearsal, three sites in threads, 9 columns; pooled = scikit-learn fit + score (extended: our own)")
    runs = [(n, "standard", "hardened") for n in ((10**4, 10**5) if quick else (10**4, 49097, 10**5, 10**6))]
    if not quick:
        runs += [(49097, "extended", "hardened"), (10**6, "extended", "hardened"), (49097, "standard", "published")]
    for rows, kind, mode in runs:
        if rows == 49097 and not (Path(folder) / "odds" / "shuttle.npz").exists():
            continue
        code = CHILD.format(
            here=str(Path(__file__).parent), rows=rows, kind=kind, data=str(folder), mode=mode, sample=sample
        )
        out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        got = json.loads(out.splitlines()[-1])
        say(
            f"  {got['rows']:>9,d} rows {mode:9s} {kind:9s} {got['ours_s']:7.2f} s (CPU {got['cpu_s']:.1f} s)"
            f"   pooled {got['pooled_s']:6.2f} s (CPU {got['pooled_cpu_s']:.1f} s)"
            f"   ratio {got['ours_s'] / got['pooled_s']:.2f} (CPU {got['cpu_s'] / got['pooled_cpu_s']:.2f})"
            f"   {got['sent_mb']:.2f} MB per site, {got['sums']} sums, {got['gb']:.2f} GB, AUROC {got['auroc']:.3f}"
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data")
    parser.add_argument("--seeds", type=int, default=0)
    parser.add_argument("--only", default="auroc,attack,splits,cost")
    parser.add_argument(
        "--sets", help="gap and found: names of sets, with commas; found also takes some rows of one, thyroid:800"
    )
    parser.add_argument("--forest", choices=KINDS, default="standard", help="gap: kind of splits")
    parser.add_argument("--sample", type=int, help="cost: rows of a tree; the default of the workflow")
    parser.add_argument("--figures", type=Path, help="folder for the box plot")
    parser.add_argument("--keep", type=Path, help="file that keeps finished seeds of the AUROC table")
    args = parser.parse_args()
    seeds = args.seeds or (2 if args.quick else 10)
    what = args.only.split(",")
    say(
        f"machine: {platform.processor() or platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f};"
    )
    say(f"Python {platform.python_version()}, NumPy {np.__version__}, one thread per process; {seeds} seeds")
    if not (args.data / "odds").is_dir():
        say(f"no ODDS sets under {args.data}; only the cost on generated rows is measured")
        what = [w for w in what if w == "cost"]
    results = None
    if "auroc" in what:
        results = run_auroc(args.data, QUICK if args.quick else SETS, seeds, args.keep)
    if "isotree" in what:
        run_isotree(args.data, seeds)
    if "attack" in what:
        run_attack(args.data, min(seeds, 4), args.quick)
    if "price" in what:
        run_price(args.data, QUICK if args.quick else SETS, seeds)
    sets = tuple(args.sets.split(",")) if args.sets else (*MADE, *SETS)
    if "gap" in what:
        run_gap(args.data, sets, seeds, args.forest)
    if "found" in what:
        run_found(args.data, sets, min(seeds, 4))
    if "splits" in what:
        run_splits(args.data, 2 if args.quick else 5, args.quick)
    if "cost" in what:
        run_cost(args.data, args.quick, args.sample)
    if results:
        table(results)
        if args.figures:
            box_plot(results, args.figures)


if __name__ == "__main__":
    main()
