"""Defaults of train-cellcnn: chosen on other donors than CMV, then scored there beside what needs no CellCnn.

    python benchmarks/cellcnn_defaults.py --part choose   learning rate, steps, filters, L2 on AML and generated donors
    python benchmarks/cellcnn_defaults.py --part cmv      the defaults on the CMV donors, ten splits, N = 2, 3, 5, 10
    python benchmarks/cellcnn_defaults.py --part aml      the same on AML against normal (FlowCAP, two classes), N = 2
    python benchmarks/cellcnn_defaults.py --part planted --max-pooling   by the frequency of planted cells
    python benchmarks/cellcnn_defaults.py --part drawn    `choose` for inputs per class and per donor

Everything is the clear twin, whose weights the encrypted training has to 1e-5. `choose` never reads the CMV donors. The
score of a setting is the mean accuracy on donors over all cohorts and numbers of sites. A cohort's nested score is that
of the setting chosen on the other cohorts, on splits that chose nothing. LR is logistic regression.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import platform
from collections import defaultdict
from importlib import resources
from pathlib import Path

import cellcnn_donors as donors
import numpy as np

from cloister.cells.demo import demo_cohort
from cloister.models import cellcnn
from cloister.papers.baselines import cellcnn as baselines
from cloister.workflows.train_cellcnn.workflow import Options

HERE = Path(__file__).resolve().parent
RATES, STEPS = (0.05, 0.1, 0.2, 0.4, 0.8), (20, 40, 60, 80, 120)
FILTERS, DECAYS = (4, 8, 16), (0.0, 0.01, 0.1)
MARGIN = 0.005  # of the best setting's score, within which the one with the fewest steps is chosen
LEAST = 3  # donors of a group: the default of min_donors
PER_SITE = 4  # training donors of a class at each site, of generated cohorts
DEFAULT = {"learning_rate": Options().learning_rate, "steps": Options().n_steps, "filters": Options().n_filters}
BEFORE = {"learning_rate": 0.2, "steps": 20, "filters": 8}
POPULATIONS = {"NK": "CD16+_NK_cells", "B": "Mature_B_cells"}  # the planted cells


# ---- cohorts ---------------------------------------------------------------------------------------------------------


def planted_cohort(kind, share, seed, *, per_class=30, n_cells=500, variety=0.4, shift=0.1):
    """Donors from mass-cytometry cells of the package; in class 1 a `share` of a donor's cells are planted.

    Each donor has a composition of its own (log-normal factors of deviation `variety` per population, the planted one
    too, 1 % on average) and a shift of each marker (`shift` of its deviation over cells), as between people and days.
    """
    with resources.as_file(resources.files("cloister") / "data" / "levine_cells.npz") as path, np.load(path) as file:
        X, label, populations, markers = (file[k] for k in ("X", "label", "populations", "markers"))
    rng, rare = np.random.default_rng([seed, 44]), int(np.flatnonzero(populations == POPULATIONS[kind])[0])
    rows_of, usual = [np.flatnonzero(label == k) for k in range(len(populations))], np.bincount(label) / len(label)
    usual[rare] = 0.01
    cells, donor, classes = [], [], np.repeat([0, 1], per_class)
    for d, case in enumerate(classes):
        weights = usual * np.exp(variety * rng.standard_normal(len(usual)))
        weights /= weights.sum()
        counts = rng.multinomial(n_cells, weights * (1 - share * case))
        counts[rare] += n_cells - counts.sum() if case else 0
        rows = np.concatenate([rng.choice(at, n) for at, n in zip(rows_of, counts, strict=True)])
        cells.append(X[rows] + shift * X.std(0) * rng.standard_normal(X.shape[1]))
        donor += [d] * len(rows)
    return np.concatenate(cells).astype(np.float32), np.array(donor), classes, [str(m) for m in markers]


def lung_cohort(seed, *, per_site=20, genes=32):
    """Donors of `cl.demo_cohort`: the genes that vary most, whatever the class, as log counts per 10,000."""
    every = [*demo_cohort(per_site, seed=2014 + seed).values()]
    X = np.concatenate([a.X.toarray() for a in every])
    X = np.log1p(X / X.sum(axis=1, keepdims=True) * 1e4)
    keep = np.argsort(-X.var(axis=0))[:genes]
    names, donor = np.unique(np.concatenate([a.obs["donor"] for a in every]), return_inverse=True)
    case = np.concatenate([a.obs["condition"] == "case" for a in every])
    label = np.array([int(case[donor == d][0]) for d in range(len(names))])
    return X[:, keep].astype(np.float32), donor, label, [str(g) for g in every[0].var_names[keep]]


@functools.lru_cache(maxsize=64)
def cohort(name, seed, folder):
    if name.startswith("planted"):
        _, kind, share = name.split()
        return donors.Donors(planted_cohort(kind, float(share), seed))
    if name == "lung":
        return donors.Donors(lung_cohort(seed))
    return donors.Donors({"AML": donors.load_aml, "CMV": donors.load_cmv}[name](folder))


COHORTS = ("planted NK 0.05", "planted NK 0.1", "planted NK 0.2", "planted B 0.1", "lung", "AML")


def sites_of(name):
    return (2,) if name == "AML" else (2, 3, 5)  # twenty donors of AML are too few for groups at three sites


def split_of(name, n, seed, args):
    """A split of a cohort: of real donors by seed, of generated ones with new donors every three seeds."""
    if name in ("AML", "CMV"):
        return donors.Split(cohort(name, 0, args.data), 0.7, seed, args.inputs)
    every = cohort(name, seed // 3, args.data)
    return donors.Split(every, PER_SITE * n / min(np.bincount(every.label)), seed, args.inputs)


# ---- choice ----------------------------------------------------------------------------------------------------------


def trajectories(config, batches):
    """(rate, decay, steps) → W·V, or None where the largest weight or logit is beyond what a site begins with."""
    tried = list(itertools.product(RATES, DECAYS))
    rate, decay = (np.array([t[k] for t in tried])[:, None, None] for k in (0, 1))
    w = cellcnn.initial(config)
    W, V = (np.repeat(a[None], len(tried), axis=0) for a in (w.W, w.V))
    vW, vV, far = np.zeros_like(W), np.zeros_like(V), np.zeros(len(tried))
    X, Y = (np.stack([b[k] for b in batches]) for k in (0, 1))
    c0, c1, c2, c3, c5 = cellcnn.error_polynomial(config.interval, Y)
    with np.errstate(over="ignore", invalid="ignore"):
        for t in range(max(STEPS)):
            x = X[:, None, t]
            U = x @ (W @ V)
            far = np.maximum(far, np.abs(U).max(axis=(0, 2, 3)) / cellcnn.LARGEST_LOGIT)
            U2 = U * U
            E = c0[:, None, t] + U * (c1 + U2 * (c3 + c5 * U2)) + c2[:, None, t] * U2
            Z = (x.swapaxes(2, 3) @ E).mean(axis=0) / config.batch
            vW, vV = (
                config.momentum * vW + rate * (Z @ V.swapaxes(1, 2) + decay * W),
                config.momentum * vV + rate * (W.swapaxes(1, 2) @ Z + decay * V),
            )
            W, V = W - vW, V - vV
            for a in (W, V, vW, vV):
                far = np.maximum(far, np.abs(a).max(axis=(1, 2)) / cellcnn.LARGEST_WEIGHT)
            if t + 1 in STEPS:
                M = W @ V
                for k, (eta, l2) in enumerate(tried):
                    yield (eta, l2, t + 1), M[k] if far[k] <= 1 else None


def searched(name, n, seed, args, per="group"):
    """Accuracy on donors of every setting (filters, rate, decay, steps) on one split."""
    split, found = split_of(name, n, seed, args), {}
    sites = split.site_groups(n, LEAST) if per == "group" else split.site_inputs(n, per)
    test = split.donor_bags.mean(axis=1)
    for filters in FILTERS:
        config = split.config(n, steps=max(STEPS), filters=filters)
        for setting, M in trajectories(config, split.batches(config, sites)):
            right = np.nan if M is None else ((test @ M).argmax(axis=1) == split.donor_labels).mean()
            found[filters, *setting] = right
    return found


def choose(args, per="group"):
    """Score every setting on all cohorts; the best is named with its nested scores."""
    table = defaultdict(list)  # (cohort, n, half) → settings' scores, one row per split
    for name in COHORTS:
        for n in sites_of(name):
            for seed in range(args.splits * 2):
                found = searched(name, n, seed, args, per)
                table[name, n, seed // args.splits].append([*found.values()])
    settings, mean = [*found], {k: np.mean(v, axis=0) for k, v in table.items()}

    def score(half, without=None):
        rows = [v for (name, n, h), v in mean.items() if h == half and name != without]
        return np.mean(rows, axis=0)  # nan: a weight or logit beyond what a site begins with

    def best(half, without=None):
        """Of the settings within MARGIN of the best one: fewest steps, then the smallest rate and model.

        Without L2, which the encrypted step does not have; and twice the rate has to stay in range as well.
        """
        scores = dict(zip(settings, score(half, without), strict=True))
        able = {s: x for s, x in scores.items() if s[2] == 0 and scores.get((s[0], 2 * s[1], 0.0, s[3]), np.nan) > 0}
        return min((s for s, x in able.items() if x >= max(able.values()) - MARGIN), key=lambda s: (s[3], s[1], s[0]))

    lines = [f"chosen on splits 1 to {args.splits} of all cohorts, inputs per {per}: {named(best(0))}"]
    both = (score(0) + score(1)) / 2
    for rank, k in enumerate(np.argsort(-np.nan_to_num(both))[:5]):
        lines.append(f"  {rank + 1:2d}. {named(settings[k])}: {both[k]:.3f}")
    for what, of in (("by L2", 2), ("by filters", 0), ("by rate", 1), ("by steps", 3)):
        groups = {v: np.nanmax(both[[s[of] == v for s in settings]]) for v in sorted({s[of] for s in settings})}
        lines.append(f"best {what}: " + ", ".join(f"{v:g} {x:.3f}" for v, x in groups.items()))
    grid = [(eta, steps) for eta in RATES for steps in STEPS]
    lines.append("without L2, 8 filters, mean over cohorts; -: a weight or logit is beyond what a site begins with")
    for eta in RATES:
        row = [both[settings.index((8, eta, 0.0, steps))] for e, steps in grid if e == eta]
        lines.append(f"  rate {eta:<5g}" + "".join(f"{x:>8.3f}" if x == x else "       -" for x in row))
    fixed = [(8, e, 0.0, s) for e, s in ((0.2, 20), (DEFAULT["learning_rate"], DEFAULT["steps"]))]
    nested = []
    for name in COHORTS:
        pick = best(0, name)
        nested += [[mean[name, n, 1][settings.index(s)] for s in (pick, *fixed)] for n in sites_of(name)]
        for n in sites_of(name):
            there = mean[name, n, 1]
            told = ", ".join(f"{named(s)} {there[settings.index(s)]:.3f}" for s in [pick, *fixed])
            lines.append(f"{name}, N={n}, splits that chose nothing (the first setting: best on other cohorts): {told}")
    told = " / ".join(f"{x:.3f}" for x in np.mean(nested, axis=0))
    lines.append(f"mean of these: best on other cohorts / {named(fixed[0])} / {named(fixed[1])}: {told}")
    return lines


def named(setting):
    filters, rate, decay, steps = setting
    return f"rate {rate:g}, {steps} steps, {filters} filters" + (f", L2 {decay:g}" if decay else "")


# ---- beside it -------------------------------------------------------------------------------------------------------


def cells_of(split, which):
    """All cells of these donors and whose they are, as a place in `which`."""
    rows = [split.all.rows[d] for d in which]
    x = split.prepare(split.all.X[np.concatenate(rows)]).astype(np.float64)
    return x, np.repeat(np.arange(len(which)), [len(r) for r in rows])


def by_means(split, which=None):
    """Accuracy on test donors of logistic regression on the means of these donors, by default of all."""
    which = split.train if which is None else which
    label = split.all.label[which]
    found = baselines.regress(
        baselines.means(*cells_of(split, which)), label, baselines.means(*cells_of(split, split.test))
    )
    return (found == split.donor_labels).mean()


def by_proportions(split):
    train, test = (cells_of(split, which) for which in (split.train, split.test))
    middle = baselines.centres(*train, np.random.default_rng(split.seed))
    r, q = (baselines.proportions(x, of, middle) for x, of in (train, test))
    return (baselines.regress(r, split.all.label[split.train], q) == split.donor_labels).mean()


def twin(split, n, sites, setting):
    """Scores of the clear twin, multi-cell and donors; nothing if no site has inputs."""
    if not sites:
        return None
    config = split.config(n, **setting)
    w = cellcnn.train(config, split.batches(config, sites))
    return [s[0] for s in donors.evaluate_twin(split, w)]


def one_class(split, k):
    return [(split.bag_labels == k).mean(), (split.donor_labels == k).mean()]


def alone(split, part, i, n, per):
    """A site alone at the defaults: drawn per donor, or its groups; a site with one class names that one."""
    k = np.unique(split.all.label[part])
    if len(k) == 1:
        return one_class(split, k[0])
    if per == "group":
        found = split.all.groups(part, LEAST)
        if found is None or len(np.unique(found[1])) == 1:
            return [0.5, 0.5] if found is None else one_class(split, found[1][0])
        inputs = (split.prepare(found[0]), found[1])
    else:
        inputs = split.draw(part, "donor", max(1, split.inputs // n), (split.seed, n, i))
    return twin(split, 1, [inputs], DEFAULT)


def paper(split, n, rate):
    """The paper's preset 'cmv': 2000 inputs per class over all sites, batches of 200 over all, 20 epochs."""
    dealt = enumerate(split.all.deal(split.train, n))
    sites = [split.draw(p, "class", 2000 // n, (split.seed, n, i)) for i, p in dealt]
    return twin(split, n, sites, {"learning_rate": rate, "steps": 400})


def compared(name, n, args):
    """One row per method: means over splits of accuracy on multi-cell inputs and donors, and sites that train."""
    rows, there = defaultdict(list), defaultdict(list)
    for seed in range(args.splits):
        split = split_of(name, n, seed, args)
        parts = split.all.deal(split.train, n)
        for least in (LEAST, 2):
            sites = split.site_groups(n, least)
            there[f"defaults, groups of {least}"].append(len(sites))
            rows[f"defaults, groups of {least}"].append(twin(split, n, sites, DEFAULT))
        rows["before: rate 0.2, 20 steps, groups of 3"].append(twin(split, n, split.site_groups(n, LEAST), BEFORE))
        for per in ("class", "donor"):
            rows[f"defaults, per {per} (consent)"].append(twin(split, n, split.site_inputs(n, per), DEFAULT))
        for rate in (0.2, DEFAULT["learning_rate"]):
            rows[f"the paper's preset, rate {rate} (consent)"].append(paper(split, n, rate))
        for per in ("donor", "group"):
            each = [alone(split, p, i, n, per) for i, p in enumerate(parts)]
            rows[f"a site alone, defaults per {per}, mean of sites"].append(np.mean(each, axis=0))
            rows[f"a site alone, defaults per {per}, best in hindsight"].append(max(each, key=lambda s: s[1]))
        each = [by_means(split, p) for p in parts]
        rows["a site alone, mean expression + LR, mean of sites"].append([np.nan, np.mean(each)])
        rows["a site alone, mean expression + LR, best in hindsight"].append([np.nan, max(each)])
        for per in ("donor", "group"):
            pooled = split.site_inputs(1, per) if per == "donor" else split.site_groups(1, LEAST)
            rows[f"pooled, defaults per {per}"].append(twin(split, 1, pooled, DEFAULT))
        rows["pooled, mean expression + LR"].append([np.nan, by_means(split)])
        rows["pooled, proportions of 20 clusters + LR"].append([np.nan, by_proportions(split)])
    lines = [f"{name}, N = {n}, {args.splits} splits, accuracy on multi-cell inputs / donors"]
    for what, found in rows.items():
        known = [f for f in found if f is not None]
        sites = f" ({np.mean(there[what]):.1f} sites train)" if what in there else ""
        scores = [f"{x:.3f}" if x == x else "-" for x in np.mean(known, axis=0)] if known else []
        values = " / ".join(scores) or "no site has a group"
        if known and len(known) < len(found):
            values += f" on {len(known)} splits"
        lines.append(f"  {what + sites:62s}{values}")
    return lines


# ---- planted cells ---------------------------------------------------------------------------------------------------


def planted(args):
    """Accuracy on donors by the share of planted cells: three sites, four donors of a class at each, 36 new donors."""
    lines = [
        f"planted cells beside 1 % in all donors; three sites of eight donors, {args.splits} splits; accuracy on new"
        " donors: defaults with groups of 3, per donor; pooled: mean expression + LR, 20 clusters + LR, max pooling"
    ]
    for kind, share in itertools.product(args.kinds, (0.005, 0.01, 0.02, 0.05, 0.1, 0.2)):
        rows = []
        for seed in range(args.splits):
            split = split_of(f"planted {kind} {share}", 3, seed, args)
            groups = twin(split, 3, split.site_groups(3, LEAST), DEFAULT)[1]
            per = twin(split, 3, split.site_inputs(3, "donor"), DEFAULT)[1]
            rows.append([groups, per, by_means(split), by_proportions(split), max_pooled(split, args)])
        lines.append(f"  {kind:3s}{share:7.1%}: " + "  ".join(f"{x:.3f}" for x in np.mean(rows, axis=0)))
    return lines


def max_pooled(split, args):
    """CellCnn as published, pooled, with inputs drawn per donor; nan without --max-pooling, for it takes minutes."""
    if not args.max_pooling:
        return np.nan
    from cloister.papers.baselines import max_pooling

    X, y = split.draw(split.train, "donor", 400, (split.seed, 1), whole=True)
    predict = max_pooling.train(X, y, max_pooling.Config(classes=2, epochs=20, batch=40, seed=split.seed))
    return (predict(split.donor_bags) == split.donor_labels).mean()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=["choose", "drawn", "cmv", "aml", "planted"], required=True)
    parser.add_argument(
        "--splits", type=int, default=10, help="of each cohort; `choose` takes as many again to confirm"
    )
    parser.add_argument("--sites", type=int, nargs="+", default=[2, 3, 5, 10], help="of --part cmv")
    parser.add_argument("--inputs", type=int, default=400, help="multi-cell inputs per class, over all sites")
    parser.add_argument("--kinds", nargs="+", default=[*POPULATIONS], help="of --part planted")
    parser.add_argument("--max-pooling", action="store_true", help="also the published CellCnn, in --part planted")
    parser.add_argument("--data", type=Path, default=HERE.parent.parent / "shared" / "data")
    args = parser.parse_args()
    threads = os.environ.get("OMP_NUM_THREADS", "all")
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, OMP_NUM_THREADS={threads}")
    if args.part == "choose":
        lines = choose(args)
    elif args.part == "drawn":
        lines = [line for per in donors.DRAWN for line in choose(args, per)]
    elif args.part == "planted":
        lines = planted(args)
    else:
        lines = [x for n in (args.sites if args.part == "cmv" else [2]) for x in compared(args.part.upper(), n, args)]
    print("\n".join(lines))


if __name__ == "__main__":
    main()
