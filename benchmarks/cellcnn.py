"""Encrypted CellCnn measured: accuracy on real donors beside the pooled CellCnn, and what encryption costs.

    python benchmarks/cellcnn.py --quick                  three splits of the clear twin, one local iteration, minutes
    python benchmarks/cellcnn.py --part accuracy          ten splits, N = 2, 3, 5, pooled, local only, ours
    python benchmarks/cellcnn.py --part cost              local iteration, refresh, keys, bytes, growth
    python benchmarks/cellcnn.py --part encrypted         one full encrypted training per N on the CMV donors
    python benchmarks/cellcnn.py --part filters           20 models, consensus filters and their markers

The CMV donors are for non-commercial use and are read from --data, never shipped.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import platform
import resource
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np

from cloister.models import cellcnn

HERE = Path(__file__).resolve().parent
METRICS = ("accuracy", "precision", "recall", "F")
RATES = {"learning_rate": 0.1, "momentum": 0.9, "interval": 3.0}
STEPS = 60
CELLS = 200


# ---- data ------------------------------------------------------------------------------------------------------------


def load_cmv(folder):
    z = np.load(folder / "nk_cmv_pricell" / "nk_cmv_cells.npz")
    return (
        z["X_milli"].astype(np.float32) / 1000,
        z["donor"],
        z["donor_label"].astype(int),
        [str(m) for m in z["markers"]],
    )


def load_aml(folder):
    z = np.load(folder / "cytometry" / "aml_flowcap_cytodx.npz")
    return (
        np.arcsinh(z["X"] / 5.0),
        z["donor"].astype(int),
        z["donor_label"].astype(int),
        [str(m) for m in z["markers"]],
    )


class Split:
    """Training and test donors, standardised by the training donors, and their multi-cell inputs."""

    def __init__(self, data, train_share, seed, inputs, test_inputs):
        self.X, self.donor, self.label, _ = data
        rng = np.random.default_rng(seed)
        train, test = [], []
        for k in np.unique(self.label):
            of_class = rng.permutation(np.flatnonzero(self.label == k))
            cut = round(len(of_class) * train_share)
            train += of_class[:cut].tolist()
            test += of_class[cut:].tolist()
        self.train, self.test, self.seed, self.inputs = np.array(train), np.array(test), seed, inputs
        rows = np.isin(self.donor, self.train)
        self.mean, self.scale = self.X[rows].mean(0), self.X[rows].std(0)
        self.bags, self.bag_labels = self.draw(self.test, test_inputs, np.random.default_rng(seed + 10_000))
        least = min((self.donor == d).sum() for d in self.test)
        rng = np.random.default_rng(seed + 20_000)
        self.donor_bags = np.stack(
            [self.cells(rng.choice(np.flatnonzero(self.donor == d), least, replace=False)) for d in self.test]
        )

    def cells(self, rows):
        return (self.X[rows] - self.mean) / self.scale

    def draw(self, donors, count, rng):
        """`count` inputs of 200 cells per class, as cells (n, c, m)."""
        bags, labels = [], []
        for k in np.unique(self.label):
            rows = np.flatnonzero(np.isin(self.donor, donors[self.label[donors] == k]))
            if len(rows):
                bags += [self.cells(rng.choice(rows, CELLS)) for _ in range(count)]
                labels += [k] * count
        return np.asarray(bags, np.float32), np.array(labels)

    def parts(self, n):
        """Training donors dealt to n sites, classes as even as they go."""
        dealt = [[] for _ in range(n)]
        at = 0
        for k in np.unique(self.label):
            for d in self.train[self.label[self.train] == k]:
                dealt[at % n].append(d)
                at += 1
        return [np.array(p) for p in dealt]

    def site_inputs(self, n):
        return [
            self.draw(p, max(1, self.inputs // n), np.random.default_rng(self.seed * 100 + i + 1000 * n))
            for i, p in enumerate(self.parts(n))
        ]


def scores(truth, found):
    """Accuracy, and precision, recall and F (of class 1 for two classes, macro for more)."""
    classes = [1] if len(np.unique(truth)) <= 2 else np.unique(truth)
    rows = []
    for k in classes:
        hit = ((found == k) & (truth == k)).sum()
        precision, recall = hit / max((found == k).sum(), 1), hit / max((truth == k).sum(), 1)
        rows.append((precision, recall, 2 * precision * recall / max(precision + recall, 1e-12)))
    return np.array([(truth == found).mean(), *np.mean(rows, axis=0)])


def config_for(split, n, **changes):
    given = {"markers": split.X.shape[1], "classes": len(np.unique(split.label)), "batch": 200 // n, "steps": STEPS}
    return cellcnn.Config(**{**given, **RATES, "seed": split.seed, **changes})


def ours(split, n, **changes):
    """The clear twin of n sites; the same weights as encrypted training."""
    config = config_for(split, n, **changes)
    batches = [
        cellcnn.draw_batches(X.mean(axis=1).astype(np.float64), y, config, np.random.default_rng(i))
        for i, (X, y) in enumerate(split.site_inputs(n))
    ]
    return config, batches, cellcnn.train(config, batches)


def evaluate(split, w):
    bags = cellcnn.predict(cellcnn.logits(w, split.bags.mean(axis=1)))
    donors = cellcnn.predict(cellcnn.logits(w, split.donor_bags.mean(axis=1)))
    return scores(split.bag_labels, bags), scores(split.label[split.test], donors)


def evaluate_torch(split, predict):
    return scores(split.bag_labels, predict(split.bags)), scores(split.label[split.test], predict(split.donor_bags))


# ---- accuracy --------------------------------------------------------------------------------------------------------


def accuracy(data, name, args, train_share, sites):
    from cloister.models import cellcnn_baseline

    table = defaultdict(list)
    count, inputs, tests, epochs = (3, 400, 200, 20) if args.quick else (args.splits, args.inputs, args.inputs, 20)
    for seed in range(count):
        split = Split(data, train_share, seed, inputs, tests)
        bags, labels = split.draw(split.train, inputs, np.random.default_rng(seed))
        batch = max(10, inputs // 10)  # 400 steps, whatever the number of inputs
        made = cellcnn_baseline.Config(classes=len(np.unique(split.label)), epochs=epochs, batch=batch, seed=seed)
        table["CellCnn pooled"].append(evaluate_torch(split, cellcnn_baseline.train(bags, labels, made)))
        del bags
        for n in sites:
            _, _, w = ours(split, n)
            table[f"ours (N={n})"].append(evaluate(split, w))
            if args.quick and n != sites[0]:
                continue
            alone = []
            for i, (X, y) in enumerate(split.site_inputs(n)):
                one = replace(made, batch=max(1, batch // n), seed=seed * 10 + i)
                alone.append(evaluate_torch(split, cellcnn_baseline.train(X, y, one)))
            table[f"local (N={n})"].append(tuple(np.mean([a[k] for a in alone], axis=0) for k in (0, 1)))
        print(f"  {name} split {seed + 1}/{count} done", flush=True)
    return table


def print_accuracy(table, name, reference=None):
    from scipy.stats import wilcoxon

    print(
        f"\n{name}: mean over {len(next(iter(table.values())))} splits, multi-cell / donor; p: Wilcoxon, F, vs pooled"
    )
    print(f"{'':22s}" + "".join(f"{m:>16s}" for m in METRICS) + f"{'p (F)':>16s}")
    pooled = np.array([[m, d] for m, d in table["CellCnn pooled"]])
    for row in sorted(table):
        found = np.array([[m, d] for m, d in table[row]])
        means = found.mean(axis=0)
        p = []
        for k in (0, 1):
            gap = found[:, k, 3] - pooled[:, k, 3]
            p.append(wilcoxon(gap).pvalue if np.abs(gap).max() > 0 and len(gap) > 4 else float("nan"))
        cells = "".join(f"{means[0, j]:>9.3f}/{means[1, j]:.3f} " for j in range(4))
        print(f"{row:22s}{cells}{p[0]:>9.2f}/{p[1]:.2f}")
    for row, (m, d) in (reference or {}).items():
        print(f"{'paper: ' + row:22s}{m:>9.3f}/{d:.3f} (accuracy, the authors' own ten runs)")


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


# ---- encrypted -------------------------------------------------------------------------------------------------------


def encrypted_training(config, batches, *, open_model=True):
    """One encrypted training among threads; returns weights, seconds and per-party cost."""
    from cloister.protocols import cellcnn_circuit
    from cloister.protocols import encrypted_training as et
    from cloister.study import Party
    from cloister.testing import Case, check_no_errors, run_protocol, values

    names = tuple(Party(f"site-{i}") for i in range(len(batches)))
    ring = cellcnn_circuit.choose_ring(config, len(names))
    params = et.Params(names, Party("hub"), ring, config, open_model=open_model)
    began = time.perf_counter()
    run = run_protocol(et, Case(params, dict(zip(names, batches, strict=True))), timeout=3600)
    check_no_errors(run)
    wall = time.perf_counter() - began
    return values(run)[Party("hub")], wall, run


def encrypted(data, args):
    rows = []
    for n in args.sites:
        split = Split(data, 0.7, 0, 200, 200)
        config, batches, twin = ours(split, n, steps=STEPS if not args.quick else 3)
        done, wall, run = encrypted_training(config, batches)
        error = max(np.abs(getattr(done.weights, k) - getattr(twin, k)).max() for k in ("W", "V"))
        ours_scores, twin_scores = evaluate(split, done.weights), evaluate(split, twin)
        sent = {p: sum(e.bytes for e, _ in r.entries if e.kind == "sent") for p, r in run.receipts.items()}
        rows.append(
            f"N={n}, {config.steps} steps: largest difference to the twin {error:.1e}; accuracy"
            f" {ours_scores[0][0]:.3f}/{ours_scores[1][0]:.3f} (twin {twin_scores[0][0]:.3f}/{twin_scores[1][0]:.3f});"
            f" {wall:.0f} s for all parties on this machine; {sent['site-0'] / 1e6:.0f} MB sent per site"
        )
        print("  " + rows[-1], flush=True)
    return rows


# ---- cost ------------------------------------------------------------------------------------------------------------


class Bench:
    """One party's work, timed with a key that this process holds alone; the arithmetic is the same."""

    def __init__(self, config, parameters=None, parties=3):
        from cloister.crypto import ckks
        from cloister.crypto.entropy import Entropy
        from cloister.protocols import cellcnn_circuit as circuit

        self.config, self.ckks, self.circuit, self.entropy = config, ckks, circuit, Entropy()
        self.P = parameters or circuit.choose_ring(config, parties)
        self.L = circuit.Layout(config, self.P, parties)  # of our circuit
        self.c = ckks.context(self.P)
        self.secret, self.public = ckks.own_key(self.P, self.entropy)
        self.relin = self.switching(self.c.ring.multiply(self.secret.ntt, self.secret.ntt))
        self.keys = {}

    def switching(self, target, galois=0):
        c, r, P = self.c, self.c.ring, self.P
        K, prg = len(c.primes), self.entropy.prg()
        a = np.stack([r.uniform(prg, K) for _ in range(P.top)])
        b = []
        for d in range(P.top):
            e = r.add_product(r.error(prg, K), a[d], self.secret.ntt, sign=-1)
            b.append(r.add_multiple(e, target, c.primes[-1], d))
        return c.load_key(self.ckks.SwitchingKey(np.stack(b), a, galois))

    def rotation(self, steps):
        if steps not in self.keys:
            r, g = self.c.ring, self.c.galois(steps)
            turned = r.forward(r.of_small(r.rotate_coefficients(self.secret.coefficients, g), len(self.c.primes)))
            self.keys[steps] = self.switching(turned, g)
        return self.keys[steps]

    def local_iteration(self, repeat=3):
        """Seconds of CPU for one batch: from [M] to [Z]."""
        config, L, c = self.config, self.L, self.c
        rng = np.random.default_rng(0)
        X = rng.normal(0, 0.3, (config.batch, config.markers))
        Y = cellcnn.one_hot(rng.integers(0, config.classes, config.batch), config.classes)
        M = cellcnn.initial(config).M
        cts = [c.encrypt(self.public, L.model_slots(M, g), self.P.top, self.P.scale, self.entropy) for g in L.groups]
        keys = {s: self.rotation(s) for s in L.rotations}

        def once():
            for ct, group in zip(cts, L.groups, strict=True):
                for at in range(0, config.batch, L.I):
                    part = slice(at, at + L.I)
                    self.circuit.gradient(L, ct, X[part], Y[part][:, list(group)], self.relin, keys)

        return timed(once, repeat)


def timed(action, repeat=3):
    found = []
    for _ in range(repeat):
        began = time.process_time()
        action()
        found.append(time.process_time() - began)
    return min(found)


def refresh_cost(bench, parties):
    """CPU seconds of one site's three refresh shares of a step, and of the aggregator's part; bytes of a site."""
    from cloister.protocols import collective_refresh as cr
    from cloister.protocols import encrypted_training as et
    from cloister.study import Party
    from cloister.testing import Case, check_no_errors, run_protocol

    names = tuple(Party(f"site-{i}") for i in range(parties))
    params = et.Params(names, Party("hub"), bench.P, bench.config)
    total = {"all": 0.0, "bytes": 0}
    secrets = {p: bench.ckks.Secret.draw(bench.P, bench.entropy) for p in names}
    c = bench.c
    for name in ("gradient", "update", "product"):
        todo = et.refreshes(params)[name]
        zero = np.zeros(bench.P.slots)
        cts = [c.encrypt(bench.public, zero, bench.P.base, s, bench.entropy) for s in todo.params.scales]
        inputs = {Party("hub"): (cts, todo.maps)} | {p: (s, todo.maps, cr.Ledger()) for p, s in secrets.items()}
        began = time.process_time()
        run = run_protocol(cr, Case(todo.params, inputs), timeout=600)
        total["all"] += time.process_time() - began
        check_no_errors(run)
        total["bytes"] += sum(e.bytes for e, _ in run.receipts[names[0]].entries if e.kind == "sent")
    return total


def key_cost(bench):
    from cloister.protocols import collective_key, collective_relin, collective_rotation
    from cloister.study import Party
    from cloister.testing import Case, check_no_errors, run_protocol

    names = (Party("site-0"), Party("site-1"))
    secrets = {p: (bench.ckks.Secret.draw(bench.P, bench.entropy),) for p in names}
    found = {}
    for module, extra in ((collective_key, {}), (collective_relin, {}), (collective_rotation, {"steps": (1,)})):
        began = time.process_time()
        run = run_protocol(module, Case(module.Params(names, Party("hub"), bench.P, **extra), secrets), timeout=600)
        check_no_errors(run)
        size = sum(e.bytes for e, _ in run.receipts["site-0"].entries if e.kind == "sent")
        found[module.NAME] = (time.process_time() - began, size / 1e6)
    return found


def cost(args):
    rows = []
    base = cellcnn.Config(markers=38, filters=8, classes=2, batch=100, steps=400, **RATES)
    bench = Bench(base)
    P = bench.P
    rows.append(f"ring 2^{P.degree.bit_length() - 1}, {len(P.bits)} primes, {sum(P.bits)} bits, scale 2^{P.scale_bits}")
    local = bench.local_iteration(1 if args.quick else 3)
    rows.append(f"local iteration, n=100 m=38 h=8 o=2: {local:.2f} s CPU")
    from cellcnn_published import published_iteration, rings

    for name, ring in rings(base, 3).items():
        if args.quick and name != "scale 2^50":
            continue
        theirs = published_iteration(base, Bench, ring, repeat=1)
        rows.append(
            f"the published circuit, same library, {name}, {len(ring.bits)} primes: {theirs:.2f} s CPU;"
            f" ours is {local / theirs:.2f} of it"
        )
    for n in (2, 3) if args.quick else (3, 5, 10):
        r = refresh_cost(bench, n)
        rows.append(
            f"three refreshes of a step, N={n}: {r['all']:.2f} s CPU of all parties and the aggregator,"
            f" {r['bytes'] / 1e6:.1f} MB sent per site"
        )
    per_step = local + r["all"] / (n + 1)
    for name, (seconds, size) in key_cost(bench).items():
        rows.append(f"{name}, two sites and aggregator: {seconds:.2f} s CPU, {size:.1f} MB sent per site")
    steps = 20 * 1000 // 100
    rows.append(
        f"the paper's training (10 parties x 1000 samples, 20 epochs, {steps} steps): about"
        f" {per_step * steps / 60:.1f} min of CPU per party, refreshes counted as shared evenly; the paper: 20 min"
    )
    growth = [("n", 200), ("n", 400), ("m", 16), ("m", 128), ("h", 32), ("h", 64), ("o", 4)]
    names = {"n": "batch", "m": "markers", "h": "filters", "o": "classes"}
    for axis, value in growth[:1] if args.quick else growth:
        other = Bench(replace(base, **{names[axis]: value}))
        rows.append(
            f"{names[axis]} = {value}: {other.local_iteration(1):.2f} s CPU per local iteration,"
            f" {len(other.L.groups)} x {other.L.chunks} ciphertexts"
        )
        del other
    rows.append(f"memory of this process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.1f} GB at most")
    return rows


# ---- filters ---------------------------------------------------------------------------------------------------------


def filters(data, args):
    markers = data[3]
    models, found = [], []
    split = Split(data, 0.7, 0, 200 if args.quick else 1000, 200)
    for k in range(5 if args.quick else 20):
        _, _, w = ours(split, 3, seed=k, filters=3 + k % 7)
        models.append(w)
        found.append(evaluate(split, w)[0][0])
    W, V = cellcnn.consensus_filters(models, found)
    strength = V[:, 1] - V[:, 0]
    best = W[strength.argmax()]
    order = np.argsort(-best)
    top = ", ".join(f"{markers[j]} {best[j]:+.2f}" for j in order[:8])
    rank = {
        m: int(np.flatnonzero([markers[j] == m for j in order])[0]) + 1
        for m in markers
        if m in ("CD16", "CD57", "NKG2C", "CD94")
    }
    return [
        f"{len(W)} consensus filters of the best 3 of {len(models)}; positive filter: {top}",
        f"ranks of {len(markers)}: {rank}",
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--part", choices=["accuracy", "cost", "encrypted", "filters", "all"], default="all")
    parser.add_argument("--splits", type=int, default=10)
    parser.add_argument("--sites", type=int, nargs="+", default=[2, 3, 5], help="numbers of sites of --part encrypted")
    parser.add_argument("--inputs", type=int, default=2000, help="multi-cell inputs per class, over all sites")
    parser.add_argument("--data", type=Path, default=HERE.parent.parent / "shared" / "data")
    parser.add_argument("--out", type=Path, help="folder for box plots and the figures as JSON")
    args = parser.parse_args()
    threads = os.environ.get("OMP_NUM_THREADS", "all")
    machine = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, OMP_NUM_THREADS={threads}"
    cmv = args.data / "nk_cmv_pricell" / "nk_cmv_cells.npz"
    lines, tables = [], {}
    if args.part in ("accuracy", "all"):
        if cmv.exists():
            tables["CMV"] = accuracy(load_cmv(args.data), "CMV", args, 0.7, (2, 3, 5))
        if (args.data / "cytometry" / "aml_flowcap_cytodx.npz").exists() and not args.quick:
            tables["AML"] = accuracy(load_aml(args.data), "AML", args, 0.5, (2,))
    if args.part in ("filters", "all") and cmv.exists():
        lines += filters(load_cmv(args.data), args)
    if args.part == "encrypted" and cmv.exists():
        lines += encrypted(load_cmv(args.data), args)
    if args.part in ("cost", "all"):
        lines += cost(args)
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
