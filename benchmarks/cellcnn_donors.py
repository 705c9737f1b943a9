"""Donors for cellcnn.py: splits, multi-cell inputs, sites, and hyperparameters chosen within the training donors.

Test donors are scored once, with the setting that cross-validation over the training donors of their own split picked.
"""

from __future__ import annotations

import numpy as np

from cloister.disclosure import Thresholds
from cloister.models import cellcnn
from cloister.workflows.train_cellcnn.donor_groups import DonorGroups

CELLS = 200  # per multi-cell input, as in the paper
BATCH = 200  # over all sites, as in the paper
FIXED = {"filters": 8, "momentum": 0.9, "interval": 3.0}
DRAWN = ("class", "donor")  # an input's cells come from all donors of a class at the site, or from one donor
RATES = (0.05, 0.1, 0.2, 0.4)
STEPS = (20, 40, 60, 80)
FOLDS, REPEATS = 5, 3


def load_cmv(folder):
    z = np.load(folder / "nk_cmv_pricell" / "nk_cmv_cells.npz")
    X = z["X_milli"].astype(np.float32) / 1000
    return X, z["donor"].astype(int), z["donor_label"].astype(int), [str(m) for m in z["markers"]]


def load_aml(folder):
    z = np.load(folder / "cytometry" / "aml_flowcap_cytodx.npz")
    X = np.arcsinh(z["X"] / 5.0).astype(np.float32)
    return X, z["donor"].astype(int), z["donor_label"].astype(int), [str(m) for m in z["markers"]]


class Donors:
    """All donors of a data set, in raw units."""

    def __init__(self, data):
        self.X, self.donor, self.label, self.markers = data
        self.rows = [np.flatnonzero(self.donor == d) for d in range(len(self.label))]
        self.classes = np.unique(self.label)

    def standard(self, donors):
        rows = np.concatenate([self.rows[d] for d in donors])
        return self.X[rows].mean(0), self.X[rows].std(0)

    def draw(self, donors, per, count, rng, *, whole=False, cells=CELLS):
        """About `count` inputs per class: their means, or with `whole` their cells (n, c, m); and their classes."""
        groups = []
        for k in self.classes:
            of_class = [d for d in donors if self.label[d] == k]
            if per == "donor":
                share = max(1, count * len(self.classes) // len(donors))
                groups += [(k, self.rows[d], share) for d in of_class]
            elif of_class:
                groups.append((k, np.concatenate([self.rows[d] for d in of_class]), count))
        made, labels = [], []
        for k, rows, n in groups:
            for _ in range(n):
                x = self.X[rows[rng.integers(0, len(rows), cells)]]
                made.append(x if whole else x.mean(axis=0))
            labels += [k] * n
        return np.asarray(made), np.array(labels)

    def groups(self, donors, least):
        """Means of groups of at least `least` donors of a class, and their classes; None if there are none."""
        at = np.concatenate([self.rows[d] for d in donors])
        names = np.array([f"d{d:03d}" for d in self.donor[at]])
        classes = {f"d{d:03d}": str(self.label[d]) for d in donors}
        made = DonorGroups.of(classes, names, Thresholds(10, least))
        if not len(made):
            return None
        x = self.X[at][made.rows(names)[0]].astype(np.float64)
        return made.inputs(x)[0], np.array([int(k) for k in made.labels])

    def deal(self, donors, n):
        """Donors dealt to n sites, classes as even as they go."""
        dealt = [[] for _ in range(n)]
        for at, d in enumerate(d for k in self.classes for d in donors if self.label[d] == k):
            dealt[at % n].append(d)
        return dealt


class Split:
    """Training and test donors, standardised by the training donors; test inputs are drawn per class."""

    def __init__(self, donors, train_share, seed, inputs):
        self.all, self.seed, self.inputs = donors, seed, inputs
        rng, train, test = np.random.default_rng(seed), [], []
        for k in donors.classes:
            of_class = rng.permutation(np.flatnonzero(donors.label == k))
            cut = round(len(of_class) * train_share)
            train += of_class[:cut].tolist()
            test += of_class[cut:].tolist()
        self.train, self.test = train, test
        self.mean, self.scale = donors.standard(train)
        self.bags, self.bag_labels = self.draw(test, "class", inputs, (seed, 10_000), whole=True)
        least = min(len(donors.rows[d]) for d in test)
        rng = np.random.default_rng(seed + 20_000)
        rows = [rng.choice(donors.rows[d], least, replace=False) for d in test]
        self.donor_bags = np.stack([self.prepare(donors.X[r]) for r in rows])
        self.donor_labels = donors.label[test]

    def prepare(self, x):
        return (x - self.mean) / self.scale

    def draw(self, donors, per, count, seed, *, whole=False):
        X, y = self.all.draw(donors, per, count, np.random.default_rng(seed), whole=whole)
        return self.prepare(X), y

    def site_inputs(self, n, per, *, whole=False):
        count = max(1, self.inputs // n)
        return [
            self.draw(p, per, count, (self.seed, n, i), whole=whole) for i, p in enumerate(self.all.deal(self.train, n))
        ]

    def site_groups(self, n, least):
        """The same, if sites train on means of groups; sites without a group are left out."""
        found = [self.all.groups(p, least) for p in self.all.deal(self.train, n)]
        return [(self.prepare(f[0]), f[1]) for f in found if f is not None]

    def config(self, n, **chosen):
        given = {"markers": self.all.X.shape[1], "classes": len(self.all.classes), "batch": BATCH // n}
        return cellcnn.Config(**{**given, **FIXED, "seed": self.seed, **chosen})

    def batches(self, config, sites):
        return [
            cellcnn.draw_batches(X.astype(np.float64), y, config, np.random.default_rng((self.seed, i)))
            for i, (X, y) in enumerate(sites)
        ]

    def validate(self, n, repeats=REPEATS):
        """Mean accuracy on inputs of held-out training donors, of every setting (per, learning rate, steps)."""
        rng, found = np.random.default_rng((self.seed, n, 99)), {}
        for _ in range(repeats):
            for fold in folds(self.all, self.train, FOLDS, rng):
                self._validate_fold(n, fold, rng, found)
        return {setting: float(np.mean(scores)) for setting, scores in found.items()}

    def _validate_fold(self, n, fold, rng, found):
        D, inner = self.all, [d for d in self.train if d not in fold]
        mean, scale = D.standard(inner)
        held = [((D.draw([d], "donor", 25, rng)[0] - mean) / scale, D.label[d]) for d in fold]
        for per in DRAWN:
            drawn = [D.draw(p, per, 400 // n, rng) for p in D.deal(inner, n)]
            sites = [((X - mean) / scale, y) for X, y in drawn]
            config = self.config(n, steps=max(STEPS))
            for steps, models in trajectories(config, self.batches(config, sites), RATES, STEPS):
                for rate, M in zip(RATES, models, strict=True):
                    right = [((X @ M).argmax(axis=1) == k).mean() for X, k in held]
                    found.setdefault((per, rate, steps), []).extend(right)

    def choose(self, n, repeats=REPEATS):
        """The best of the settings in cross-validation; of equals the one with fewer steps."""
        found = self.validate(n, repeats)
        per, rate, steps = max(found, key=lambda s: (round(found[s], 6), -s[2], -s[1], s[0]))
        return per, {"learning_rate": rate, "steps": steps}, found[per, rate, steps]


def folds(donors, train, count, rng):
    """Training donors in `count` folds, classes as even as they go."""
    made = [[] for _ in range(count)]
    mixed = [d for k in donors.classes for d in rng.permutation([d for d in train if donors.label[d] == k])]
    for at, d in enumerate(mixed):
        made[at % count].append(int(d))
    return made


def trajectories(config, batches, rates, at):
    """W·V of the clear twin at all learning rates together, after each number of steps in `at`."""
    w, count, rate = cellcnn.initial(config), len(rates), np.array(rates)[:, None, None]
    W, V = (np.repeat(a[None], count, axis=0) for a in (w.W, w.V))  # (rates, m, h), (rates, h, o)
    vW, vV = np.zeros_like(W), np.zeros_like(V)
    X, Y = (np.stack([b[k] for b in batches]) for k in (0, 1))  # (sites, steps, n, ...)
    c0, c1, c2, c3, c5 = cellcnn.error_polynomial(config.interval, Y)
    for t in range(max(at)):
        x = X[:, None, t]  # (sites, 1, n, m)
        with np.errstate(over="ignore", invalid="ignore"):  # a rate that diverges loses, no more
            U = x @ (W @ V)
            U2 = U * U
            E = c0[:, None, t] + U * (c1 + U2 * (c3 + c5 * U2)) + c2[:, None, t] * U2
            Z = (x.swapaxes(2, 3) @ E).mean(axis=0) / config.batch
            vW, vV = (
                config.momentum * vW + rate * Z @ V.swapaxes(1, 2),
                config.momentum * vV + rate * W.swapaxes(1, 2) @ Z,
            )
            W, V = W - vW, V - vV
        if t + 1 in at:
            yield t + 1, W @ V


def scores(truth, found):
    """Accuracy, and precision, recall and F (of class 1 for two classes, macro for more)."""
    classes = [1] if len(np.unique(truth)) <= 2 else np.unique(truth)
    rows = []
    for k in classes:
        hit = ((found == k) & (truth == k)).sum()
        precision, recall = hit / max((found == k).sum(), 1), hit / max((truth == k).sum(), 1)
        rows.append((precision, recall, 2 * precision * recall / max(precision + recall, 1e-12)))
    return np.array([(truth == found).mean(), *np.mean(rows, axis=0)])


def evaluate(split, predict):
    """Scores on multi-cell inputs and on donors; `predict` takes cells (n, c, m)."""
    return scores(split.bag_labels, predict(split.bags)), scores(split.donor_labels, predict(split.donor_bags))


def evaluate_twin(split, w):
    return evaluate(split, lambda bags: cellcnn.predict(cellcnn.logits(w, bags.mean(axis=1))))
