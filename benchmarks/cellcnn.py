"""Encrypted CellCnn measured: accuracy on real donors beside the pooled CellCnn, and what encryption costs.

    python benchmarks/cellcnn.py --quick                  three splits of the clear twin, one local iteration, minutes
    python benchmarks/cellcnn.py --part accuracy          ten splits, N = 2, 3, 5, pooled, local only, ours
    python benchmarks/cellcnn.py --part drawings          the clear twin by what inputs are: groups, per class or donor
    python benchmarks/cellcnn.py --part encrypted         one full encrypted training per N on the CMV donors, also on
                                                          means of groups with --least 3
    python benchmarks/cellcnn.py --part cost              local iteration, refresh, keys, bytes, growth
    python benchmarks/cellcnn.py --part paper             the paper's training whole: ten sites, 200 steps (or --steps)
    python benchmarks/cellcnn.py --part sites             growth with the number of sites at 18,000 inputs in all
    python benchmarks/cellcnn.py --part predict           an encrypted query by the number of markers
    python benchmarks/cellcnn.py --part classes           three classes on generated donors, encrypted and clear
    python benchmarks/cellcnn.py --part filters           20 models, consensus filters and their markers

Hyperparameters are chosen by cross-validation over the training donors of each split (`cellcnn_donors`). The CMV donors
are for non-commercial use and are read from --data, never shipped.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import platform
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import cellcnn_donors as donors
import numpy as np

from cloister.models import cellcnn

HERE = Path(__file__).resolve().parent
METRICS = ("accuracy", "precision", "recall", "F")


def ours(split, n, repeats=donors.REPEATS, rate=None, steps=None):
    """The clear twin of n sites with the setting that validation chose; encrypted training has the same weights.

    With a learning rate and steps nothing is validated.
    """
    if rate and steps:
        per, chosen, how = "donor", {"learning_rate": rate, "steps": steps}, "not validated"
    else:
        per, chosen, validated = split.choose(n, repeats)
        how = f"validated {validated:.3f}"
    config = split.config(n, **chosen)
    batches = split.batches(config, split.site_inputs(n, per))
    return config, batches, cellcnn.train(config, batches), f"{per}, {chosen}, {how}"


# ---- accuracy --------------------------------------------------------------------------------------------------------


def baseline(X, y, seed, batch, epochs=20):
    from cloister.papers.baselines import max_pooling

    made = max_pooling.Config(classes=int(y.max()) + 1, epochs=epochs, batch=max(1, batch), seed=seed)
    return max_pooling.train(X, y, made)


def baseline_drawing(split):
    """Which drawing of inputs suits the pooled CellCnn: validated as for ours, once over five folds."""
    rng, found = np.random.default_rng((split.seed, 77)), defaultdict(list)
    for fold in donors.folds(split.all, split.train, donors.FOLDS, rng):
        inner = [d for d in split.train if d not in fold]
        held = [(split.draw([d], "donor", 25, (split.seed, d), whole=True)[0], split.all.label[d]) for d in fold]
        for per in donors.DRAWN:
            predict = baseline(*split.draw(inner, per, 200, (split.seed, 78), whole=True), split.seed, 20)
            found[per] += [(predict(X) == k).mean() for X, k in held]
    return max(donors.DRAWN, key=lambda per: np.mean(found[per]))


def accuracy(data, name, args, train_share, sites):
    """Table of (multi-cell scores, donor scores) per row and split."""
    table, every = defaultdict(list), donors.Donors(data)
    count, inputs, repeats = (3, 400, 1) if args.quick else (args.splits, args.inputs, donors.REPEATS)
    batch = max(10, inputs // 10)  # 400 steps, whatever the number of inputs
    for seed in range(args.first, args.first + count):
        split = donors.Split(every, train_share, seed, inputs)
        per = "donor" if args.quick else baseline_drawing(split)
        predict = baseline(*split.draw(split.train, per, inputs, (seed, 1), whole=True), seed, batch)
        table["CellCnn pooled"].append(donors.evaluate(split, predict))
        said = [f"pooled draws per {per}"]
        for n in sites[:1] if args.quick else sites:
            *_, w, setting = ours(split, n, repeats)
            said.append(f"N={n}: {setting}")
            table[f"ours (N={n})"].append(donors.evaluate_twin(split, w))
            alone = []
            for i, (X, y) in enumerate(split.site_inputs(n, per, whole=True)):
                alone.append(donors.evaluate(split, baseline(X, y, seed * 10 + i, batch // n)))
            table[f"local (N={n})"].append(tuple(np.mean([a[k] for a in alone], axis=0) for k in (0, 1)))
        print(f"  {name} split {seed + 1}: " + "; ".join(said), flush=True)
    return table


def print_accuracy(table, name, reference=None):
    first = next(iter(table.values()))
    tried = len(donors.DRAWN) * len(donors.RATES) * len(donors.STEPS)
    print(f"\n{name}: mean over {len(first)} splits, multi-cell / donor; p: Wilcoxon, against pooled")
    print(f"ours: best of {tried} settings by cross-validation over the training donors of each split")
    print(f"{'':18s}" + "".join(f"{m:>15s}" for m in METRICS) + f"{'p (accuracy)':>16s}{'p (F)':>14s}")
    for row in sorted(table):
        means = np.mean(table[row], axis=0)
        cells = "".join(f"{means[0, j]:>9.3f}/{means[1, j]:.3f}" for j in range(4))
        p = [wilcoxon(table[row], table["CellCnn pooled"], metric) for metric in (0, 3)]
        print(f"{row:18s}{cells}{p[0]:>16s}{p[1]:>14s}")
    for n in (2, 3, 5):
        if f"ours (N={n})" in table:
            p = wilcoxon(table[f"ours (N={n})"], table[f"local (N={n})"], 0)
            print(f"ours against local, N={n}: p (accuracy) {p}")
    for row, (m, d) in (reference or {}).items():
        print(f"{'paper: ' + row:22s}{m:>9.3f}/{d:.3f} (accuracy, the authors' own ten runs)")


def wilcoxon(rows, others, metric):
    from scipy import stats

    said = []
    for k in (0, 1):
        gap = np.array([r[k][metric] - o[k][metric] for r, o in zip(rows, others, strict=True)])
        enough = np.abs(gap).max() > 0 and len(gap) > 4
        said.append(f"{stats.wilcoxon(gap).pvalue:.2f}" if enough else "-")
    return "/".join(said)


def reference_rows(folder):
    found = defaultdict(lambda: defaultdict(list))
    with (folder / "nk_cmv_pricell" / "pricell_reference_results_cmv.csv").open() as f:
        for r in csv.DictReader(f):
            found[r["Runs"]][r["Classification"]].append(float(r["Accuracy"]))
    return {
        k: (np.mean(v["Multi-cell Classification"]), np.mean(v["Phenotype Classification"])) for k, v in found.items()
    }


def box_plots(table, path):
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    paper, axes = plt.subplots(1, 2, figsize=(10, 4), sharey=True)
    for k, (axis, title) in enumerate(zip(axes, ("multi-cell inputs", "donors"), strict=True)):
        rows = sorted(table)
        axis.boxplot([[s[k][3] for s in table[r]] for r in rows], tick_labels=rows)
        axis.tick_params(axis="x", rotation=40)
        axis.set(title=title, ylabel="F score")
    paper.tight_layout()
    paper.savefig(path, dpi=130)
    plt.close(paper)


# ---- what inputs are -------------------------------------------------------------------------------------------------

SETTINGS = ((0.2, 20), (0.4, 20), (0.2, 60))  # learning rate and steps: the default, and two that nothing chose


def drawings(data, name, args, train_share, sites):
    """Mean accuracy over splits, multi-cell / donor, at fixed settings: what hardened mode costs by default."""
    every, rows = donors.Donors(data), []
    for n in sites:
        kinds = [("class", 0), ("donor", 0), *(("group", least) for least in (2, 3))]
        for per, least in kinds:
            found, there = defaultdict(list), []
            for seed in range(args.splits):
                split = donors.Split(every, train_share, seed, args.inputs)
                inputs = split.site_groups(n, least) if least else split.site_inputs(n, per)
                there.append(len(inputs))
                for rate, steps in SETTINGS:
                    if inputs:
                        config = split.config(n, learning_rate=rate, steps=steps)
                        w = cellcnn.train(config, split.batches(config, inputs))
                        found[rate, steps].append([s[0] for s in donors.evaluate_twin(split, w)])
            text = f"{per}s of {least} donors or more" if least else f"per {per}"
            scores = (np.mean(found[s], axis=0) if found[s] else (np.nan, np.nan) for s in SETTINGS)
            rows.append(
                f"{name}, N={n}, {text}, {np.mean(there):.1f} sites train: "
                + ", ".join(
                    f"{m:.3f}/{d:.3f} ({rate}, {steps} steps)"
                    for (rate, steps), (m, d) in zip(SETTINGS, scores, strict=True)
                )
            )
            print("  " + rows[-1], flush=True)
    return rows


# ---- encrypted -------------------------------------------------------------------------------------------------------


def encrypted(data, args):
    """Full trainings on the first split, with the settings that its validation chose."""
    from cellcnn_whole import encrypted_training

    rows, split = [], donors.Split(donors.Donors(data), 0.7, 0, args.inputs)
    for n in args.sites:
        if args.least:
            inputs = split.site_groups(n, args.least)
            config = split.config(n, learning_rate=args.rate or 0.2, steps=args.steps or 20)
            batches = split.batches(config, inputs)
            setting = f"means of {args.least} donors or more at {len(inputs)} sites, rate {config.learning_rate}"
        else:
            config, batches, _, setting = ours(split, n, rate=args.rate, steps=args.steps)
        if args.steps:
            config = replace(config, steps=args.steps)
        twin = cellcnn.train(config, batches)
        played = encrypted_training(config, batches)
        opened, (seconds, size, hub) = played.values["hub"].weights, played.site()
        error = max(np.abs(getattr(opened, k) - getattr(twin, k)).max() for k in ("W", "V"))
        found, clear = donors.evaluate_twin(split, opened), donors.evaluate_twin(split, twin)
        X = split.bags.mean(axis=1)
        same = (cellcnn.predict(cellcnn.logits(opened, X)) == cellcnn.predict(cellcnn.logits(twin, X))).mean()
        rows.append(
            f"N={n} ({setting}), {config.steps} steps of {config.batch} inputs a site: largest difference to the twin"
            f" {error:.1e}; accuracy {found[0][0]:.3f}/{found[1][0]:.3f} (twin {clear[0][0]:.3f}/{clear[1][0]:.3f}),"
            f" {same:.2%} of test inputs predicted alike; {seconds:.0f} s CPU and {size:.0f} MB sent per site,"
            f" {hub:.0f} s CPU at the aggregator, {played.wall:.0f} s wall"
        )
        print("  " + rows[-1], flush=True)
    return rows


# ---- filters ---------------------------------------------------------------------------------------------------------


def filters(data, args):
    """Consensus of the best 3 of 20 models, by their accuracy on training donors that they did not see."""
    every = donors.Donors(data)
    split = donors.Split(every, 0.7, 0, 400)
    held = donors.folds(every, split.train, donors.FOLDS, np.random.default_rng(1))[0]
    inner = [d for d in split.train if d not in held]
    per, chosen, _ = split.choose(3, 1)
    sites = [split.draw(p, per, 130, (5, i)) for i, p in enumerate(every.deal(inner, 3))]
    X, y = split.draw(held, "donor", 200, 6)
    models, found = [], []
    for k in range(5 if args.quick else 20):
        config = split.config(3, **{**chosen, "seed": k, "filters": 3 + k % 7})
        models.append(cellcnn.train(config, split.batches(config, sites)))
        found.append((cellcnn.predict(cellcnn.logits(models[-1], X)) == y).mean())
    W, V = cellcnn.consensus_filters(models, found)
    best = W[(V[:, 1] - V[:, 0]).argmax()]
    names = [every.markers[j] for j in np.argsort(-best)]
    top = ", ".join(f"{m} {w:+.2f}" for m, w in zip(names[:8], np.sort(-best)[:8] * -1, strict=True))
    rank = {m: names.index(m) + 1 for m in ("CD16", "CD57", "NKG2C", "CD94") if m in names}
    return [
        f"{len(W)} consensus filters of the best 3 of {len(models)} (held-out training donors); positive filter: {top}",
        f"ranks of {len(names)}: {rank}",
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parts = ["accuracy", "drawings", "encrypted", "cost", "paper", "sites", "predict", "classes", "filters", "all"]
    parser.add_argument("--part", choices=parts, default="all", help="all: accuracy, filters and cost")
    parser.add_argument("--set", choices=["CMV", "AML"], nargs="+", default=["CMV", "AML"], help="of --part accuracy")
    parser.add_argument("--splits", type=int, default=10)
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--sites", type=int, nargs="+", default=[2, 3, 5], help="numbers of sites of --part encrypted")
    parser.add_argument("--steps", type=int, help="of --part encrypted or paper, instead of theirs")
    parser.add_argument("--rate", type=float, help="learning rate of --part encrypted; with --steps, none is validated")
    parser.add_argument("--least", type=int, default=0, help="donors of a group, of --part encrypted; 0: per donor")
    parser.add_argument("--inputs", type=int, default=2000, help="multi-cell inputs per class, over all sites")
    parser.add_argument("--data", type=Path, default=HERE.parent.parent / "shared" / "data")
    parser.add_argument("--out", type=Path, help="folder for box plots and the figures as JSON")
    args = parser.parse_args()
    threads = os.environ.get("OMP_NUM_THREADS", "all")
    machine = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, OMP_NUM_THREADS={threads}"
    cmv = args.data / "nk_cmv_pricell" / "nk_cmv_cells.npz"
    aml = args.data / "cytometry" / "aml_flowcap_cytodx.npz"
    lines, tables = [], {}
    if args.part in ("accuracy", "all"):
        if cmv.exists() and "CMV" in args.set:
            tables["CMV"] = accuracy(donors.load_cmv(args.data), "CMV", args, 0.7, (2, 3, 5))
        if aml.exists() and "AML" in args.set and not args.quick:
            tables["AML"] = accuracy(donors.load_aml(args.data), "AML", args, 0.5, (2,))
    if args.part == "drawings" and cmv.exists():
        lines += drawings(donors.load_cmv(args.data), "CMV", args, 0.7, (1, 2, 3, 5))
        lines += drawings(donors.load_aml(args.data), "AML", args, 0.5, (2,))
    if args.part in ("filters", "all") and cmv.exists():
        lines += filters(donors.load_cmv(args.data), args)
    if args.part == "encrypted" and cmv.exists():
        lines += encrypted(donors.load_cmv(args.data), args)
    if args.part in ("paper", "sites", "predict", "classes"):
        import cellcnn_whole

        lines += getattr(cellcnn_whole, args.part)(args)
    if args.part in ("cost", "all"):
        import cellcnn_cost

        lines += cellcnn_cost.cost(args)
    print(f"\nmachine: {machine}")
    for name, table in tables.items():
        print_accuracy(table, name, reference_rows(args.data) if name == "CMV" else None)
        if args.out:
            args.out.mkdir(parents=True, exist_ok=True)
            box_plots(table, args.out / f"cellcnn-{name.lower()}.png")
            plain = {row: [[m.tolist(), d.tolist()] for m, d in found] for row, found in table.items()}
            (args.out / f"cellcnn-{name.lower()}.json").write_text(json.dumps(plain))
    if not cmv.exists():
        print(f"no CMV donors under {args.data}: accuracy and filters left out")
    for line in lines:
        print(line)


if __name__ == "__main__":
    main()
