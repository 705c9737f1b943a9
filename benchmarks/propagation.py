"""Label propagation across sites: what it gains over each site alone, what engines cost, what the sparse solve saves.

    python benchmarks/propagation.py [--quick] [--only gain,left-out,graph,groups,...] [--data FOLDER]

  choice     balanced accuracy of the default settings, of those that `choose` finds, and of `propagation_baselines`
  weights    the same where only the weight of class means is chosen, which takes a tenth of the time
  nested     alpha and the weight of class means chosen on all other sets, then measured on one
  alpha      alpha 0.5 to 0.9 on the sets that defaults were chosen on, and on four that they were not
  tuned      the paper's tables 1, 2 and 6 with its k = 3: input features, and `X_tuned` of a rehearsed `fine-tune`
  why        the same from the paper's settings to ours, one change at a time
  gain       accuracy and balanced accuracy on unlabelled points at 1, 5, 10 and 50 % labelled: all sites together
             (`xclp`, what the protocols compute, plain and with `balance`), each site alone, pooled with exact cosines
             instead of codes, a FedAvg classifier; points split at random and as they came (by study, or unevenly by
             class), as in the paper's tables 1 and 6
  left-out   a whole site without labels, labelled by the others, as in table 2
  groups     a hundred small clients in 1, 4, 10 and 25 groups, as the paper does with FEMNIST
  graph      labelled points only in the graph, or unlabelled ones too, as in table 3
  features   raw, pretrained (PCA, or MobileNetV2 for images), linear and fine-tuned (layers of FedAvg networks)
  cv         bits and neighbours chosen by cross-validation on the labelled points
  variants   of the graph, one table: what server and one site rebuild of others' vectors, balanced accuracy, and, of
             those that are built, bytes and CPU seconds; bytes at 5000 points a site, counted
  cost       bytes, seconds and CPU seconds of the engines, real protocols between three parties of this process
  hidden     accuracy of mode hardened, a walk of few steps on integers, beside mode semi-honest, pooled label spreading
             and pooled logistic regression: blood, lung, pancreas, glioblastoma, 1 to 10 % labelled
  steps      the same on sets that `hidden` does not have, by neighbours, hubs, steps and alpha
  sizes      bytes, rounds and CPU seconds of mode hardened, hidden graph, real protocol; `--largest` points a site
  solve      conjugate gradients on the sparse graph against a dense inverse; growth with n; memory

The accuracies use `graph.propagate`, which the protocols equal to the last bit
(tests/workflows/propagate_labels/test_propagation.py).
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import platform
import resource
import time
from dataclasses import asdict, replace
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from cloister.models import graph
from cloister.workflows.propagate_labels.workflow import Options

SHARES = (0.01, 0.05, 0.1, 0.5)


# ---- data ------------------------------------------------------------------------------------------------------------


def blood(folder, per_site, rng):
    """Four batches of three studies: log expression, and 50 components of the pooled PCA (what shared-pca gives)."""
    import anndata as ad

    a = ad.read_h5ad(folder / "scrna" / "pbmc_federation.h5ad")
    rows = np.concatenate(
        [rng.permutation(np.flatnonzero(a.obs["batch"] == b))[:per_site] for b in a.obs["batch"].cat.categories]
    )
    a = a[np.sort(rows)]
    x = np.asarray(a.X.todense(), float) * (1e4 / a.obs["n_counts_all_genes"].to_numpy()[:, None])
    x = np.log1p(x)
    return {"raw": x, "pretrained": components(x, 50)}, a.obs["cell_type"].astype(str), a.obs["batch"].cat.codes


def marrow(folder, per_site, rng):
    """Bone marrow by mass cytometry, 14 populations, five sites with uneven shares of them."""
    f = np.load(folder / "cytometry" / "levine32_h2.npz")
    x = next(f[k] for k in f.files if f[k].ndim == 2)
    label = next(f[k] for k in f.files if f[k].ndim == 1 and len(f[k]) == len(x))
    rows = rng.permutation(len(x))[: 5 * per_site]
    y = label[rows].astype(str)
    return {"raw": x[rows].astype(float), "pretrained": components(x[rows].astype(float), 16)}, y, uneven(y, 5, rng)


def clothes(folder, per_site, rng):
    """Fashion-MNIST, five sites with uneven shares of the ten classes."""
    f = np.load(folder / "images" / "fashion_mnist_10k.npz")
    x = next(f[k] for k in f.files if f[k].ndim >= 2)
    label = next(f[k] for k in f.files if f[k].ndim == 1 and len(f[k]) == len(x))
    rows = rng.permutation(len(x))[: 5 * per_site]
    pixels = x[rows].reshape(len(rows), 28, 28) / 255.0
    y = label[rows].astype(str)
    return {"raw": pixels.reshape(len(rows), -1)}, y, uneven(y, 5, rng)


def lung(folder, per_site, rng):
    """Lung of two atlases, 18 coarse types; 50 components."""
    import anndata as ad

    a = ad.read_h5ad(folder / "scrna" / "lung_ts_vs_hlca.h5ad")
    a = a[np.sort(rng.permutation(a.n_obs)[: 4 * per_site])]
    y = a.obs["cell_type_coarse"].astype(str)
    a = a[(y.groupby(y).transform("size") >= 10).to_numpy()]
    x = np.log1p(np.asarray(a.X.todense(), float) * (1e4 / a.obs["n_counts_all_genes"].to_numpy()[:, None]))
    sites = a.obs["study"].astype("category").cat.codes
    return {"raw": x, "pretrained": components(x, 50)}, a.obs["cell_type_coarse"].astype(str), sites


def fresh(folder, per_site, rng, *, file, key, counts=False):
    """Cells of one study that no default was chosen on, types of ten cells and more, dealt out to four sites."""
    import anndata as ad

    a = ad.read_h5ad(folder / "scrna" / f"{file}.h5ad")
    a = a[np.sort(rng.permutation(a.n_obs)[: 4 * per_site])]
    y = a.obs[key].astype(str)
    a = a[(y.groupby(y).transform("size") >= 10).to_numpy()]
    x = np.asarray(a.X.todense() if hasattr(a.X, "todense") else a.X, float)
    if counts:
        x = np.log1p(x * (1e4 / a.obs["n_counts_all_genes"].to_numpy()[:, None]))
    return {"raw": x, "pretrained": components(x, 50)}, a.obs[key].astype(str), rng.integers(0, 4, len(x))


def digits(folder, per_site, rng):
    """scikit-learn's handwritten digits of 8 x 8 pixels."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    rows = rng.permutation(len(x))[: 4 * per_site]
    return {"raw": x[rows], "pretrained": components(x[rows], 50)}, y[rows].astype(str), rng.integers(0, 4, len(rows))


def glioblastoma(folder, per_site, rng):
    """Cells of five patients, six annotated types; every patient a site."""
    import anndata as ad

    a = ad.read_h5ad(folder / "scrna" / "glioblastoma_panobinostat_zhao.h5ad")
    a = a[np.sort(rng.permutation(a.n_obs)[: 4 * per_site])]
    x = np.asarray(a.X.todense() if hasattr(a.X, "todense") else a.X, float)
    x = np.log1p(x * (1e4 / np.maximum(x.sum(axis=1, keepdims=True), 1)))
    sites = a.obs["patient_id"].astype("category").cat.codes
    return {"raw": x, "pretrained": components(x, 50)}, a.obs["annotation"].astype(str), sites


SETS = {"blood": blood, "marrow": marrow, "clothes": clothes}
MORE = {"lung": lung}  # for `choice` only
FRESH = {
    "pancreas": functools.partial(fresh, file="pancreas_baron_h1", key="cell_type", counts=True),
    "islets": functools.partial(fresh, file="pancreas_wang_lognorm", key="cell_type"),
    "blood 68k": functools.partial(fresh, file="pbmc68k_reduced_lognorm", key="bulk_labels"),
    "digits": digits,
    "glioblastoma": glioblastoma,
    "xin": functools.partial(fresh, file="pancreas_xin_lognorm", key="cell_type"),
    "cell lines": functools.partial(fresh, file="cellline_mixology", key="cell_type"),
}


def components(x, count):
    from scipy.linalg import eigh

    centred = x - x.mean(axis=0)
    n = len(centred)
    if n > centred.shape[1]:
        return centred @ np.linalg.eigh(centred.T @ centred)[1][:, ::-1][:, :count]
    s, u = eigh(centred @ centred.T, subset_by_index=[max(0, n - count), n - 1])
    return (u * np.sqrt(np.maximum(s, 0)))[:, ::-1]


def uneven(y, sites, rng):
    """Shares of every class over the sites from a Dirichlet distribution with parameter 0.5."""
    out = np.empty(len(y), int)
    for c in np.unique(y):
        rows = rng.permutation(np.flatnonzero(y == c))
        cuts = (np.cumsum(rng.dirichlet([0.5] * sites))[:-1] * len(rows)).astype(int)
        for site, part in enumerate(np.split(rows, cuts)):
            out[part] = site
    return out


def mobilenet(folder, pixels):
    """Features of MobileNetV2 as trained on ImageNet, 1280 numbers an image, centred; None where torch is missing."""
    try:
        import torch
        import torch.nn.functional as F
    except ImportError:
        return None
    raw = np.load(folder / "weights" / "mobilenet_v2_imagenet_f16.npz")
    w = {k: torch.tensor(raw[k].astype(np.float32)) for k in raw.files}

    def layer(x, conv, norm, stride=1, groups=1, *, relu=True):
        x = F.conv2d(x, w[f"{conv}.weight"], stride=stride, padding=w[f"{conv}.weight"].shape[-1] // 2, groups=groups)
        x = F.batch_norm(x, *(w[f"{norm}.{p}"] for p in ("running_mean", "running_var", "weight", "bias")))
        return F.relu6(x) if relu else x

    def network(x):
        x = layer(x, "features.0.0", "features.0.1", 2)
        i = 1
        for expand, width, repeat, first in ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), *LAST):
            for j in range(repeat):
                name, h = f"features.{i}.conv", x
                if expand > 1:
                    h = layer(h, f"{name}.0.0", f"{name}.0.1")
                at = int(expand > 1)
                h = layer(h, f"{name}.{at}.0", f"{name}.{at}.1", first if j == 0 else 1, h.shape[1])
                h = layer(h, f"{name}.{at + 1}", f"{name}.{at + 2}", relu=False)
                x = x + h if x.shape == h.shape and h.shape[1] == width else h
                i += 1
        return layer(x, "features.18.0", "features.18.1").mean(dim=(2, 3))

    out = []
    with torch.no_grad():
        for part in np.array_split(pixels, max(1, len(pixels) // 64)):
            x = torch.tensor(part, dtype=torch.float32)[:, None].expand(-1, 3, -1, -1)
            out.append(network((F.interpolate(x, size=64, mode="bilinear") - 0.45) / 0.225).numpy())
    x = np.concatenate(out).astype(float)
    return x - x.mean(axis=0)


LAST = ((6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))  # expansion, width, blocks, first stride


# ---- methods ---------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=4)
def planes(bits, width, seed):
    return graph.hyperplanes(bytes([seed] * 32), bits, width)


def codes(x, bits, seed=0):
    return graph.codes(x, planes(bits, x.shape[1], seed))


def xclp(x, y, labelled, n_classes, bits=4096, k=10, *, seed=0, balance=False):
    known = np.where(labelled, y, -1)
    k = min(k, len(x) - 1)
    options = {"n_classes": n_classes, "n_neighbors": k, "balance": balance}
    return graph.propagate(codes(x, bits, seed), known, exact=False, **options).label


def alone(x, y, labelled, n_classes, sites, **options):
    """Every site on its own; where it has no label, it has no answer."""
    out = np.full(len(y), -1)
    for site in np.unique(sites):
        mine = sites == site
        if labelled[mine].any() and mine.sum() > 2:
            out[mine] = xclp(x[mine], y[mine], labelled[mine], n_classes, **options)
    return out


def pooled(x, y, labelled, n_classes, k=10, alpha=0.99):
    """All points in one place, with exact cosines and a dense solve."""
    v = x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12)
    similar = v @ v.T
    np.fill_diagonal(similar, -2)
    order = np.argsort(-similar, axis=1, kind="stable")[:, :k]
    A = np.zeros_like(similar)
    np.put_along_axis(A, order, np.maximum(np.take_along_axis(similar, order, axis=1), 0), axis=1)
    W = A + A.T
    d = W.sum(axis=1)
    scale = np.where(d > 0, 1 / np.sqrt(np.where(d > 0, d, 1)), 0)
    Z = np.linalg.solve(
        np.eye(len(x)) - alpha * scale[:, None] * W * scale, graph.one_hot(np.where(labelled, y, -1), n_classes)
    )
    return np.where(Z.sum(axis=1) > graph.REACHED, Z.argmax(axis=1), -1)


class Network:
    """A classifier trained by FedAvg on the labelled points: softmax, or with one hidden layer, linear or ReLU."""

    def __init__(self, x, y, labelled, sites, n_classes, *, hidden=0, relu=False, rounds=60, steps=5, seed=0):
        rng = np.random.default_rng(seed)
        self.mean, self.scale = x[labelled].mean(axis=0), x[labelled].std() + 1e-9
        pairs = list(itertools.pairwise([x.shape[1], *([hidden] if hidden else []), n_classes]))
        self.layers = [rng.normal(size=s) * np.sqrt(1 / s[0]) for s in pairs]
        self.relu = relu
        data = [
            (self._scaled(x[m]), graph.one_hot(y[m], n_classes)) for m in ((sites == s) & labelled for s in set(sites))
        ]
        data = [(a, b) for a, b in data if len(a)]
        total = sum(len(a) for a, _ in data)
        for _ in range(rounds):
            parts = [self._local(a, b, steps) for a, b in data]
            shares = [len(a) / total for a, _ in data]
            self.layers = [sum(w * p[i] for w, p in zip(shares, parts, strict=True)) for i in range(len(self.layers))]

    def _scaled(self, x):
        return (x - self.mean) / self.scale / np.sqrt(x.shape[1])

    def _forward(self, x, layers):
        h = x @ layers[0]
        if len(layers) == 1:
            return x, h
        a = np.maximum(h, 0) if self.relu else h
        return a, a @ layers[1]

    def _local(self, x, target, steps, rate=3.0):
        layers = [w.copy() for w in self.layers]
        for _ in range(steps):
            a, z = self._forward(x, layers)
            p = np.exp(z - z.max(axis=1, keepdims=True))
            error = (p / p.sum(axis=1, keepdims=True) - target) / len(x)
            if len(layers) == 1:
                layers[0] -= rate * x.T @ error
            else:
                back = error @ layers[1].T
                layers[1] -= rate * a.T @ error
                layers[0] -= rate * x.T @ (back * (a > 0) if self.relu else back)
        return layers

    def predict(self, x):
        return self._forward(self._scaled(x), self.layers)[1].argmax(axis=1)

    def embed(self, x):
        return self._forward(self._scaled(x), self.layers)[0]


def score(y, found, where):
    """Balanced accuracy: the mean over the classes of the share that is right. A missing label is wrong."""
    return float(np.mean([(found[where & (y == c)] == c).mean() for c in np.unique(y[where])]))


def draw(y, share, rng, least=1):
    """A random share of the points, and at least one of every class."""
    labelled = rng.random(len(y)) < share
    for c in np.unique(y):
        missing = least - np.count_nonzero(labelled[y == c])
        if missing > 0:
            labelled[rng.choice(np.flatnonzero((y == c) & ~labelled), missing, replace=False)] = True
    return labelled


def load(args, name, seed):
    rng = np.random.default_rng(seed)
    features, names, sites = (SETS | MORE | FRESH)[name](args.data, args.points, rng)
    classes, y = np.unique(np.asarray(names), return_inverse=True)
    return features, y, np.asarray(sites).astype(int), len(classes), rng


# ---- tables ----------------------------------------------------------------------------------------------------------


def available(args):
    found = []
    for name in SETS:
        try:
            load(argparse.Namespace(data=args.data, points=20), name, 0)
            found.append(name)
        except (FileNotFoundError, KeyError) as e:
            print(f"{name}: not here ({e}); skipped")
    return found


def gain(args, names):
    print(f"\ngain: accuracy / balanced accuracy, mean of {args.repeats} draw(s); features: PCA (images: raw pixels)")
    columns = ("alone", "xclp", "pooled", "FedAvg", "alone bal.", "xclp bal.")
    print(f"{'set':8} {'split':9} {'labelled':>8} " + " ".join(f"{c:>11}" for c in columns))
    won = []
    for name in names:
        for split in ("as it is", "at random"):
            rows = {s: [] for s in SHARES}
            for seed in range(args.repeats):
                features, y, sites, C, rng = load(args, name, seed)
                x = features["raw" if name == "clothes" else "pretrained"]
                if split == "at random":
                    sites = rng.permutation(sites)
                for share in SHARES:
                    known = draw(y, share, rng)
                    found = [
                        alone(x, y, known, C, sites),
                        xclp(x, y, known, C),
                        pooled(x, y, known, C),
                        Network(x, y, known, sites, C).predict(x),
                        alone(x, y, known, C, sites, balance=True),
                        xclp(x, y, known, C, balance=True),
                    ]
                    rows[share].append([[(f == y)[~known].mean(), score(y, f, ~known)] for f in found])
            for share, found in rows.items():
                means = np.mean(found, axis=0)
                won.append([means[1] - means[0], means[5] - means[4]])
                cells = " ".join(f"{a:.3f}/{b:.3f}" for a, b in means)
                print(f"{name:8} {split:9} {share:8.0%} {cells}", flush=True)
    for i, what in enumerate(("xclp over alone", "the same, balanced")):
        for j, measure in enumerate(("accuracy", "balanced accuracy")):
            gains = np.array(won)[:, i, j]
            print(f"{what}, {measure}: {gains.min():+.3f} to {gains.max():+.3f}, mean {gains.mean():+.3f}")


def choice(args, names):
    """What `choose=True` finds, and what it is measured against."""
    from cloister.papers.baselines.propagation import balanced_accuracy, baselines_of, spread_label
    from cloister.study import Party
    from cloister.workflows.propagate_labels import chosen_settings, class_means

    print(
        f"\nchoice: balanced accuracy on unlabelled points, mean of {args.repeats} draw(s); at least two labels a class"
    )
    pooled = ("pooled propagation as published", "pooled 1-NN", "pooled 5-NN", "pooled logistic regression")
    columns = ("alone", "default", "means", "chosen", "FedAvg", "published", "1-NN", "5-NN", "logistic", "to best")
    print(f"{'set':8} {'labelled':>8} " + " ".join(f"{c:>9}" for c in columns))
    usual = Options(n_neighbors=args.neighbours) if args.neighbours else Options()
    for name in (*names, *MORE):
        rows = {s: [] for s in ((0.05,) if args.quick else (0.02, 0.05, 0.1))}
        for seed in range(args.repeats):
            features, y, sites, C, rng = load(args, name, seed)
            x = components(features["raw"], 50) if name == "clothes" else features["pretrained"]
            keys = graph.nearest(codes(x, usual.bits), usual.n_neighbors)
            for share in rows:
                known = draw(y, share, rng, least=2)
                given = np.where(known, y, -1)
                found = baselines_of(x, given, sites, C, usual)
                own = {Party(f"s{s}"): np.flatnonzero(known & (sites == s)) for s in np.unique(sites)}
                setting = chosen_settings.Setting(
                    usual.n_neighbors, usual.power, usual.alpha, usual.balance, args.means
                )
                terms = chosen_settings.Params(tuple(own), Party("hub"), usual.bits, setting, C)
                v = class_means.directions(x)
                counts = class_means.Params(tuple(own), Party("hub"), tuple(np.bincount(y[known]).tolist()), x.shape[1])
                sums = class_means.sums_of(counts, v[known], y[known])
                near = {u: class_means.closeness(v[at], sums, y[at]) for u, at in own.items()}
                best = chosen_settings.choose(terms, keys, own, {u: y[at] for u, at in own.items()}, near).setting
                found["means"] = spread_label(x, given, C, replace(usual, class_means=args.means))
                found["chosen"] = spread_label(x, given, C, replace(usual, **asdict(best)))
                rows[share].append({k: balanced_accuracy(y[~known], f[~known]) for k, f in found.items()})
        for share, draws in rows.items():
            mean = {k: np.mean([d[k] for d in draws]) for k in draws[0]}
            cells = [mean[k] for k in ("each site alone", "pooled propagation", "means", "chosen", "FedAvg", *pooled)]
            gap = mean["chosen"] - max(mean[k] for k in pooled)
            print(f"{name:8} {share:8.0%} " + " ".join(f"{c:9.3f}" for c in cells) + f" {gap:+9.3f}", flush=True)


def weights(args, names):
    """`choice` for one graph and alpha: 0, once or four times the weight of class means, by labels left out."""
    from unittest import mock

    from cloister.papers.baselines.mapping import linear_label, nearest_label
    from cloister.papers.baselines.propagation import spread_label
    from cloister.study import Party
    from cloister.workflows.propagate_labels import chosen_settings, class_means

    usual, hub = Options(class_means=args.means), Party("hub")
    setting = chosen_settings.Setting(usual.n_neighbors, usual.power, usual.alpha, usual.balance, args.means)
    print(f"\nweights: class means {args.means:g}, {args.repeats} draw(s); balanced accuracy; chosen less best pooled")
    columns = ("alone", "default", "means", "chosen", "published", "1-NN", "logistic", "to best")
    print(f"{'set':8} {'labelled':>8} " + " ".join(f"{c:>9}" for c in columns))
    for name in [n for n in (*names, *MORE, *FRESH) if n in args.sets.split(",")]:
        rows = {s: [] for s in (0.02, 0.05, 0.1)}
        for seed in range(args.repeats):
            features, y, sites, C, rng = load(args, name, seed)
            x = components(features["raw"], 50) if name == "clothes" else features["pretrained"]
            v, keys = class_means.directions(x), graph.nearest(codes(x, usual.bits), 10)
            W = graph.adjacency(keys[:, : usual.n_neighbors], usual.bits, usual.power)
            for share in rows:
                known = draw(y, share, rng, least=2)
                given = np.where(known, y, -1)
                Y = graph.one_hot(given, C).astype(float)
                own = {Party(f"s{s}"): np.flatnonzero(known & (sites == s)) for s in np.unique(sites)}
                counts = tuple(np.bincount(y[known], minlength=C).tolist())
                sums = class_means.sums_of(class_means.Params(tuple(own), hub, counts, x.shape[1]), v[known], y[known])
                near = {u: class_means.closeness(v[at], sums, y[at]) for u, at in own.items()}
                terms = chosen_settings.Params(tuple(own), hub, usual.bits, setting, C)
                only = {"NEIGHBOURS": (usual.n_neighbors,), "POWERS": (usual.power,), "ALPHAS": (usual.alpha,)}
                with mock.patch.multiple(chosen_settings, **only):
                    cut, labels = keys[:, : usual.n_neighbors], {u: y[at] for u, at in own.items()}
                    best = chosen_settings.choose(terms, cut, own, labels, near).setting

                def told(weights, alpha, means, Y=Y, v=v, sums=sums):
                    Z = np.rint(np.clip(graph.solve(weights, alpha, Y, 1e-6), 0, None) * 2**28).astype(np.int64)
                    return graph.decide(Z, None, class_means.closeness(v, sums), means)[0]

                alone = np.full(len(y), -1)
                for s in np.unique(sites):
                    alone[sites == s] = spread_label(x[sites == s], given[sites == s], C, Options())
                forms = (0.0, args.means, best.class_means)
                found = [
                    alone,
                    *(told(W, usual.alpha, w) for w in forms),
                    told(graph.adjacency(keys, usual.bits), 0.99, 0),
                ]
                found += [nearest_label(x, x[known], y[known], 1)[0], linear_label(x, x[known], y[known])]
                rows[share].append([score(y, f, ~known) for f in found])
        for share, draws in rows.items():
            mean = np.mean(draws, axis=0)
            cells = " ".join(f"{c:9.3f}" for c in mean)
            print(f"{name:8} {share:8.0%} {cells} {mean[3] - mean[4:].max():+9.3f}", flush=True)


def by_setting(x, y, known, C, W, tried):
    """Balanced accuracy of every setting, as `spread_label` would have it."""
    from cloister.study import Party
    from cloister.workflows.propagate_labels import class_means

    given, v = np.where(known, y, -1), class_means.directions(x)
    counts = np.bincount(y[known], minlength=C)
    terms = class_means.Params((Party("a"), Party("b")), Party("hub"), tuple(counts.tolist()), x.shape[1])
    near, Y = class_means.closeness(v, class_means.sums_of(terms, v[known], y[known])), graph.one_hot(given, C)
    spread = {o.alpha: graph.solve(W, o.alpha, Y.astype(float), 1e-6) for o in tried}
    scores = {a: np.rint(np.clip(Z, 0, None) * 2**28).astype(np.int64) for a, Z in spread.items()}
    return [score(y, graph.decide(scores[o.alpha], None, near, o.class_means)[0], ~known) for o in tried]


def drawn(args, name, tried, shares, fewest=1):
    """Per draw and share: balanced accuracy of every setting, of pooled logistic regression, and of 1-NN.

    Classes of fewer than `fewest` points are left out.
    """
    from cloister.papers.baselines.mapping import linear_label, nearest_label

    usual = Options()
    for seed in range(args.repeats):
        features, y, _, C, rng = load(args, name, seed)
        x = components(features["raw"], 50) if name == "clothes" else features["pretrained"]
        enough = np.bincount(y, minlength=C)[y] >= fewest
        x, y = x[enough], np.unique(y[enough], return_inverse=True)[1]
        W = graph.adjacency(graph.nearest(codes(x, usual.bits), usual.n_neighbors), usual.bits, usual.power)
        C = int(y.max()) + 1
        for share in shares:
            known = draw(y, share, rng, least=2)
            best = [linear_label(x, x[known], y[known]), nearest_label(x, x[known], y[known], 1)[0]]
            yield share, (*by_setting(x, y, known, C, W, tried), *(score(y, b, ~known) for b in best))


def nested(args, names):
    """Defaults that were chosen on other sets: what they are worth on a new one."""
    tried = [Options(alpha=a, class_means=w) for a in (0.5, 0.7, 0.9) for w in (0.0, 0.25, 0.5, 1.0, 2.0)]
    found = {}
    for name in (*names, *MORE):
        for share, row in drawn(args, name, tried, (0.02, 0.05, 0.1)):
            found.setdefault((name, share), []).append(row)
    mean = {at: np.mean(rows, axis=0) for at, rows in found.items()}
    lost = {at: row[: len(tried)] - row[len(tried) :].max() for at, row in mean.items()}  # to the better pooled one
    print(f"\nnested: alpha and class means chosen on the other sets, {args.repeats} draw(s); balanced accuracy")
    print(f"{'set':8} {'labelled':>8} {'alpha':>6} {'means':>6} {'ours':>7} {'logistic':>9} {'1-NN':>7} {'to best':>8}")
    for name, share in mean:
        others = np.mean([v for (other, _), v in lost.items() if other != name], axis=0)
        i, row = int(np.argmax(others)), mean[name, share]
        o, gap = tried[i], lost[name, share][i]
        print(f"{name:8} {share:8.0%} {o.alpha:6.1f} {o.class_means:6.2f} {row[i]:7.3f} {row[-2]:9.3f} {row[-1]:7.3f}"
              f" {gap:+8.3f}", flush=True)  # fmt: skip
    print("mean gap to the better pooled one, by setting, and the worst row:")
    for i, o in enumerate(tried):
        gaps = [v[i] for v in lost.values()]
        print(f"  alpha {o.alpha:.1f}, class means {o.class_means:.2f}: {np.mean(gaps):+.3f}, worst {min(gaps):+.3f}")


def alpha(args, names):
    """Is another alpha than the default better on sets that it was not chosen on? Without class means, and with."""
    tried = [Options(alpha=a, class_means=w) for w in (0.0, 1.0) for a in (0.5, 0.7, 0.8, 0.9)]
    usual, found = Options(), {}  # name → (draws, shares, settings and the two pooled ones)
    for name in (*names, *MORE, *FRESH):
        rows = [row for _, row in drawn(args, name, tried, (0.02, 0.05, 0.1), fewest=5)]
        found[name] = np.array(rows).reshape(args.repeats, 3, -1)
    print(f"\nalpha: balanced accuracy less that of alpha {usual.alpha:g}, 2, 5, 10 % labelled; ± standard error over"
          f" {args.repeats} draws; then alpha 0.7 and 0.9 less the better pooled one, worst share")  # fmt: skip
    for w in (0.0, 1.0):
        mine = [i for i, o in enumerate(tried) if o.class_means == w]
        print(f"class means {w:g}" + "".join(f"{f'alpha {tried[i].alpha:g}':>16}" for i in mine[:-1]))
        chosen_on, measured_on = {}, {}
        for name, rows in found.items():
            gain = (rows[:, :, mine] - rows[:, :, mine[-1:]]).mean(axis=1)  # (draws, alphas)
            (measured_on if name in FRESH else chosen_on)[name] = gain.mean(axis=0)
            error = gain.std(axis=0, ddof=1) / np.sqrt(len(gain)) if len(gain) > 1 else gain[0] * np.nan
            lost = rows.mean(axis=0) - rows.mean(axis=0)[:, -2:].max(axis=1, keepdims=True)
            cells = "".join(f"{g:+9.3f} ± {e:.3f}" for g, e in zip(gain.mean(axis=0)[:-1], error[:-1], strict=True))
            worst = [lost[:, mine[i]].min() for i in (1, 3)]
            print(f"  {name:10}{cells}   {worst[0]:+.3f} {worst[1]:+.3f}", flush=True)
        best = int(np.argmax(np.mean(list(chosen_on.values()), axis=0)))
        new = [gain[best] for gain in measured_on.values()]
        print(f"  chosen on the first {len(chosen_on)} sets: alpha {tried[mine[best]].alpha:g}; on the others it gains"
              f" {np.mean(new):+.4f} over alpha {usual.alpha:g} (from {min(new):+.3f} to {max(new):+.3f})")  # fmt: skip


def x_tuned(x, y, known, sites, **options):
    """What `fine-tune` gives all points in a rehearsal: labels of its model, and the features it writes.

    Sites with fewer than two labels cannot train; they put the trained model to work on their points.
    """
    import anndata as ad
    import pandas as pd

    from cloister.rehearsal.rehearsal import rehearse

    points = {}
    for s in np.unique(sites).tolist():
        at = np.flatnonzero(sites == s)
        points[f"site-{s:03d}"] = a = ad.AnnData(np.zeros((len(at), 1), np.float32))
        a.obsm["X_in"] = x[at].astype(np.float32)
        a.obs["kind"] = pd.Categorical.from_codes(np.where(known[at], y[at], -1), [str(c) for c in range(y.max() + 1)])
        a.obs["row"] = at
    train = {u: a for u, a in points.items() if a.obs["kind"].notna().sum() > 1}
    run = rehearse("fine-tune", train, use_rep="X_in", label_key="kind", features_added="X_tuned", timeout=900,
                   **options)  # fmt: skip
    model = next(o.model for o in run.outcomes.values() if o.model is not None)
    label, features = np.full(len(y), -1), None
    for u, a in points.items():
        made = run.data[u] if u in train else a
        if u not in train:
            model.predict(a, key_added="predicted")
            a.obsm["X_tuned"] = model.features(a)
        if features is None:
            features = np.zeros((len(y), made.obsm["X_tuned"].shape[1]))
        label[a.obs["row"]] = made.obs["predicted"].astype(int)
        features[a.obs["row"]] = made.obsm["X_tuned"]
    return label, features


def tuned(args, names):
    """Tables 1, 2 and 6 with k = 3, on the features that `fine-tune` writes at its defaults."""
    form = {"k": 3, "balance": True}
    print(f"\ntuned, as table 1: balanced accuracy, k = 3, balance, mean of {args.repeats} draw(s)")
    print(f"{'set':8} {'labelled':>8} {'alone':>7} {'xclp':>7} | {'model':>7} {'alone':>7} {'xclp':>7}   X_tuned")
    for name in names:
        rows = {s: [] for s in SHARES[1:]}
        for seed in range(args.repeats):
            features, y, sites, C, rng = load(args, name, seed)
            x = features["raw" if name == "clothes" else "pretrained"]
            for share in rows:
                known = draw(y, share, rng, least=2)
                told, z = x_tuned(x, y, known, sites, seed=seed)
                found = [alone(x, y, known, C, sites, **form), xclp(x, y, known, C, **form), told]
                found += [alone(z, y, known, C, sites, **form), xclp(z, y, known, C, **form)]
                rows[share].append([score(y, f, ~known) for f in found])
        for share, found in rows.items():
            a, b, c, d, e = np.mean(found, axis=0)
            print(f"{name:8} {share:8.0%} {a:7.3f} {b:7.3f} | {c:7.3f} {d:7.3f} {e:7.3f}", flush=True)
    print("\ntuned, as table 2: a site without labels, mean over the sites; input k = 10 and 3, model, X_tuned k = 3")
    for name in names:
        features, y, sites, C, _ = load(args, name, 0)
        x, rows = features["raw" if name == "clothes" else "pretrained"], []
        for site in np.unique(sites):
            known = sites != site
            told, z = x_tuned(x, y, known, sites)
            found = [xclp(x, y, known, C), xclp(x, y, known, C, **form), told, xclp(z, y, known, C, **form)]
            rows.append([score(y, f, ~known) for f in found])
        print(f"{name:8} " + " ".join(f"{v:7.3f}" for v in np.mean(rows, axis=0)), flush=True)
    print("\ntuned, as table 6: 100 clients in 10 groups, 10 % labelled; raw, and X_tuned of the clients' own training")
    print(f"{'set':8} {'alone':>7} {'xclp':>7} | {'alone':>7} {'xclp':>7}")
    for name in names:
        features, y, _, C, rng = load(args, name, 0)
        x, known, clients = features["raw"], draw(y, 0.1, rng, least=2), uneven(y, 100, rng)
        z = x_tuned(x, y, known, clients, hidden=(64,))[1]
        found = [alone(v, y, known, C, c, **form) for v in (x, z) for c in (clients, clients % 10)]
        a, b, c, d = (score(y, f, ~known) for f in found)
        print(f"{name:8} {a:7.3f} {b:7.3f} | {c:7.3f} {d:7.3f}", flush=True)


def why(args, names):
    """Where the paper's settings lose: balanced accuracy at 5 % labelled, two labels a class or more."""
    from scipy import sparse

    print(f"\nwhy: balanced accuracy at 5 % labelled, mean of {args.repeats} draw(s)")
    rows = {}
    for name in names:
        for seed in range(args.repeats):
            features, y, _, C, rng = load(args, name, seed)
            x = components(features["raw"], 50) if name == "clothes" else features["pretrained"]
            known = draw(y, 0.05, rng, least=2)
            Y = graph.one_hot(np.where(known, y, -1), C)
            keys = graph.nearest(codes(x, 4096), 10)
            published = graph.adjacency(keys, 4096)
            itself = 0.5 * (published + sparse.eye_array(len(x), format="csr"))
            cases = {
                "published: 10 neighbours, alpha 0.99": (published, 0.99, False),
                "  an edge to itself as strong as all others": (itself, 0.99, False),
                "  balance": (published, 0.99, True),
                "  power 4": (graph.adjacency(keys, 4096, 4.0), 0.99, False),
                "  3 neighbours": (graph.adjacency(keys[:, :3], 4096), 0.99, False),
                "  alpha 0.9": (published, 0.9, False),
                "  alpha 0.9, power 4": (graph.adjacency(keys, 4096, 4.0), 0.9, False),
                "default: 5 neighbours, alpha 0.9, power 4": (graph.adjacency(keys[:, :5], 4096, 4.0), 0.9, False),
                "  and balance": (graph.adjacency(keys[:, :5], 4096, 4.0), 0.9, True),
            }
            for what, (W, alpha, balance) in cases.items():
                Z = np.rint(np.clip(graph.solve(W, alpha, Y.astype(float), 1e-6), 0, None) * 2**28).astype(np.int64)
                found, _ = graph.decide(Z, Y.sum(axis=0) if balance else None)
                rows.setdefault(what, {}).setdefault(name, []).append(score(y, found, ~known))
            exact = pooled(x, np.where(known, y, 0), known, C)
            rows.setdefault("  exact cosines instead of codes", {}).setdefault(name, []).append(score(y, exact, ~known))
    print(f"{'':46}" + " ".join(f"{n:>8}" for n in names))
    for what, found in rows.items():
        print(f"{what:46}" + " ".join(f"{np.mean(found[n]):8.3f}" for n in names), flush=True)


def left_out(args, names):
    print("\nleft-out: balanced accuracy at a site without labels, all others fully labelled")
    print(f"{'set':8} {'site':>4} {'FedAvg':>7} {'xclp':>7} {'balanced':>8}")
    for name in names:
        features, y, sites, C, _ = load(args, name, 0)
        x = features["raw" if name == "clothes" else "pretrained"]
        for site in np.unique(sites):
            known = sites != site
            net = score(y, Network(x, y, known, sites, C).predict(x), ~known)
            ours = [score(y, xclp(x, y, known, C, balance=b), ~known) for b in (False, True)]
            print(f"{name:8} {site:4d} {net:7.3f} {ours[0]:7.3f} {ours[1]:8.3f}", flush=True)


def graph_of(args, names):
    print("\ngraph: balanced accuracy on a tenth of the points, held back; labelled points only, or all, in the graph")
    print(f"{'set':8} {'labelled':>8} {'FedAvg':>7} {'labelled':>9} {'+ unlabelled':>12}")
    for name in names:
        rows = {s: [] for s in SHARES}
        for seed in range(args.repeats):
            features, y, sites, C, rng = load(args, name, seed)
            x = features["raw" if name == "clothes" else "pretrained"]
            test = rng.random(len(y)) < 0.1
            for share in SHARES:
                known = draw(y, share, rng) & ~test
                few = known | test
                only = np.full(len(y), -1)
                only[few] = xclp(x[few], y[few], known[few], C)
                net = Network(x, y, known, sites, C).predict(x)
                rows[share].append([score(y, net, test), score(y, only, test), score(y, xclp(x, y, known, C), test)])
        for share, found in rows.items():
            a, b, c = np.mean(found, axis=0)
            print(f"{name:8} {share:8.0%} {a:7.3f} {b:9.3f} {c:12.3f}")


def groups_of(args, names):
    """The paper's FEMNIST setting: very many clients with few points each, dealt out to groups that do not meet."""
    print("\ngroups: balanced accuracy at 10 % labelled; 100 clients with uneven classes, in groups of client i mod g")
    cuts = (1, 4, 10, 25)
    print(f"{'set':8} {'points':>6} {'alone':>7} " + " ".join(f"{f'{g} groups':>10}" for g in cuts))
    for name in names:
        rows = []
        for seed in range(args.repeats):
            features, y, _, C, rng = load(args, name, seed)
            x = features["raw" if name == "clothes" else "pretrained"]
            known, clients = draw(y, 0.1, rng), uneven(y, 100, rng)
            found = [alone(x, y, known, C, clients), *(alone(x, y, known, C, clients % g) for g in cuts)]
            rows.append([len(y), *(score(y, f, ~known) for f in found)])
        n, single, *grouped = np.mean(rows, axis=0)
        print(f"{name:8} {n:6.0f} {single:7.3f} " + " ".join(f"{a:10.3f}" for a in grouped), flush=True)


def features_of(args, names):
    print("\nfeatures: balanced accuracy at 10 % labelled; linear and fine-tuned are layers of FedAvg networks")
    print(f"{'set':8} {'features':11} {'FedAvg':>7} {'alone':>7} {'xclp':>7}")
    for name in names:
        features, y, sites, C, rng = load(args, name, 0)
        known = draw(y, 0.1, rng)
        if name == "clothes" and (made := mobilenet(args.data, features["raw"].reshape(-1, 28, 28))) is not None:
            features["pretrained"] = made
        base = features.get("pretrained", features["raw"])
        linear = Network(features["raw"], y, known, sites, C, hidden=64)
        tuned = Network(base, y, known, sites, C, hidden=128, relu=True)
        every = dict(features) | {"linear": linear.embed(features["raw"]), "fine-tuned": tuned.embed(base)}
        nets = {"linear": linear.predict(features["raw"]), "fine-tuned": tuned.predict(base)}
        for kind, x in every.items():
            net = nets.get(kind)
            net = score(y, Network(x, y, known, sites, C).predict(x) if net is None else net, ~known)
            mine, ours = alone(x, y, known, C, sites), xclp(x, y, known, C)
            print(f"{name:8} {kind:11} {net:7.3f} {score(y, mine, ~known):7.3f} {score(y, ours, ~known):7.3f}")


def cross_validation(args, names):
    print("\ncv: bits and neighbours by three-fold cross-validation on the labelled points (10 %), then all unlabelled")
    print(f"{'set':8} {'bits':>6} {'k':>3} {'chosen':>7} {'4096/10':>8}")
    for name in names:
        features, y, _, C, rng = load(args, name, 0)
        x = features["raw" if name == "clothes" else "pretrained"]
        known = draw(y, 0.1, rng)
        fold = rng.integers(0, 3, len(y))
        tried = {}
        for bits in (256, 1024, 4096):
            for k in (3, 10, 20):
                kept = [known & (fold != f) for f in range(3)]
                held = [known & (fold == f) for f in range(3)]
                tried[bits, k] = np.mean(
                    [score(y, xclp(x, y, a, C, bits, k), b) for a, b in zip(kept, held, strict=True)]
                )
        bits, k = max(tried, key=tried.get)
        best, usual = (score(y, xclp(x, y, known, C, *o), ~known) for o in ((bits, k), (4096, 10)))
        print(f"{name:8} {bits:6d} {k:3d} {best:7.3f} {usual:8.3f}")


def thinned(keys, n, bits, rng):
    """Variants of a graph of ten neighbours: name → (keys, neighbours that are computed)."""
    index, far = graph.split_keys(keys, n)
    none = bits  # so far away that it is no edge

    def made(index, far):
        return (far.astype(np.int64) << graph.index_bits(n)) + index

    order = np.argsort(far.reshape(-1), kind="stable")
    seen, kept = np.zeros(n, int), np.zeros(far.size, bool)
    for e in order:  # near edges first
        if seen[index.reshape(-1)[e]] < 10:
            kept[e] = True
            seen[index.reshape(-1)[e]] += 1
    mutual = np.array([[i in set(index[j]) for j in row] for i, row in enumerate(index)])
    step = max(1, int(np.ptp(far)) // 4)
    stray = rng.random(index.shape) < 0.3
    return {
        "10 neighbours": (keys, 10),
        "5 neighbours": (keys[:, :5], 5),
        "3 neighbours": (keys[:, :3], 3),
        "10, no lengths": (made(index, np.full_like(far, int(np.median(far)))), 10),
        "10, lengths in 4 steps": (made(index, far // step * step + step // 2), 10),
        "10, chosen by at most 10": (made(index, np.where(kept.reshape(far.shape), far, none)), 10),
        "10, mutual only": (made(index, np.where(mutual, far, none)), 10),
        "10, 30 % random": (made(np.where(stray, rng.integers(0, n, index.shape), index), far), 10),
    }


def variants(args, names):
    """Attack, accuracy and cost of every variant of the graph."""
    usual, told = Options(), built(args.points)
    found = {}
    for name, seed in itertools.product(names, range(args.repeats)):
        for what, pair in pictures(args, name, seed, usual).items():
            found.setdefault(what, {}).setdefault(name, []).append(pair)
    print(f"\nvariants: median cosine of others' vectors as server and first site rebuild them / balanced accuracy,"
          f" 5 % labelled, alpha {usual.alpha:g}, power {usual.power:g}, mean of {args.repeats} draw(s)")  # fmt: skip
    print(
        f"  then MB, CPU s of all parties, three sites of {args.points} points of {usual.bits} bits; MB at 5000 a site"
    )
    print(f"{'graph':28}" + "".join(f"{n:>16}" for n in names) + f"{'as the mode':>24}{'semi-honest':>24}")
    for what, sets in found.items():
        cells = [np.mean(sets[n], axis=0) for n in names]
        line = "".join(f"{c:>8.2f} / {b:.3f}" if np.isfinite(b) else f"{c:>8.2f}        " for c, b in cells)
        costs = "".join(f"{m:9.1f} {s:6.1f} {far:7.0f}" for m, s, far in told.get(what, ()))
        print(f"{what:28}{line}{costs or '               not built'}", flush=True)


def pictures(args, name, seed, usual):
    """One draw of one set: variant → (median cosine, balanced accuracy)."""
    from cloister.papers.attacks import propagation as attack

    features, y, sites, C, rng = load(args, name, seed)
    x = components(features["raw"], 50) if name == "clothes" else features["pretrained"]
    order = np.argsort(sites, kind="stable")
    x, y, sites = x[order], y[order], sites[order]
    known = np.flatnonzero(sites == 0)
    rest = np.setdiff1d(np.arange(len(x)), known)
    labelled = draw(y, 0.05, rng, least=2)
    Y = graph.one_hot(np.where(labelled, y, -1), C).astype(float)
    H = graph.hamming(codes(x, usual.bits), codes(x, usual.bits))
    keys, made = graph.smallest(H, 0, 10), {}

    def seen(similar, keys):
        cosine = np.median(attack.hits(attack.rebuild_vectors(similar, known, x[known]), x)[rest])
        Z = graph.solve(graph.adjacency(keys, usual.bits, usual.power), usual.alpha, Y, 1e-6)
        told, _ = graph.decide(np.rint(np.clip(Z, 0, None) * 2**28).astype(np.int64))
        return cosine, score(y, told, ~labelled)

    made["all distances (published)"] = seen(attack.cosines(H, usual.bits), keys)
    for what, (variant, _) in thinned(keys, len(x), usual.bits, rng).items():
        made[what] = seen(attack.paths(variant, usual.bits), variant)
    v = x[known] / np.linalg.norm(x[known], axis=1, keepdims=True)
    middle = np.tile(v.mean(axis=0) / np.linalg.norm(v.mean(axis=0)), (len(x), 1))
    made["hidden from all: a guess"] = np.median(attack.hits(middle, x)[rest]), np.nan
    return made


def built(points):
    """Cost of the graphs that are built, random codes: variant → (MB, CPU s, MB at 5000 points) by mode."""
    from cloister.papers.hamming import secure_hamming
    from cloister.study import Party
    from cloister.testing import Case, check_no_errors, run_protocol
    from cloister.workflows.propagate_labels import private_graph

    three, rng = tuple(Party(f"s{i}") for i in range(3)), np.random.default_rng(0)
    inputs = {u: (rng.integers(0, 256, (points, 512), dtype=np.uint8),) for u in three}

    def run(module, **form):
        small, large = (
            module.Params(three, (m,) * 3, 4096, Party("hub"), engine="mpc", **form) for m in (points, 5000)
        )
        began = time.process_time()
        done = run_protocol(module, Case(small, inputs), timeout=900.0)
        took = time.process_time() - began
        check_no_errors(done)
        sent = sum(o.cost["bytes"] for o in done.outcomes.values()) / 1e6
        return sent, took, sum(b for _, b in module.cost(large).values()) / 1e6

    run(private_graph, n_neighbors=5)  # what a process does only once
    made = {"all distances (published)": [run(secure_hamming)]}
    for k in (10, 5, 3):
        made[f"{k} neighbours"] = [run(private_graph, n_neighbors=k)]
    return made


def cost(args, names):
    from cloister.papers.hamming import secure_hamming
    from cloister.study import Party
    from cloister.testing import Case, check_no_errors, run_protocol, values
    from cloister.workflows.propagate_labels import private_graph

    sizes = {"mpc": (100, 300), "ot": (50, 100), "he": (25, 50)}
    if not args.quick:
        sizes = {"mpc": (500, 1000, 2000, 5000), "ot": (100, 200, 500), "he": (50, 100, 200)}
    print("\ncost: two sites and the server, L = 4096; bytes and CPU seconds of all parties, seconds of the run")
    print(f"{'result':9} {'engine':6} {'n/site':>6} {'MB':>9} {'rounds':>6} {'seconds':>8} {'CPU s':>8} {'kB/pair':>8}")
    cases = [("H", secure_hamming, e, n) for e in sizes for n in sizes[e]]
    cases += [("graph", private_graph, "mpc", n) for n in sizes["mpc"]]
    cases = [c for c in cases if c[-1] <= args.largest]
    for what, module, engine, n in cases:
        names = (Party("a"), Party("b"))
        rng = np.random.default_rng(0)
        inputs = {u: (rng.integers(0, 256, (n, 512), dtype=np.uint8),) for u in names}
        options = {"n_neighbors": 10} if module is private_graph else {}
        params = module.Params(names, (n, n), 4096, Party("hub"), engine=engine, **options)
        began, cpu = time.perf_counter(), time.process_time()
        run = run_protocol(module, Case(params, inputs), timeout=600.0)
        took, cpu = time.perf_counter() - began, time.process_time() - cpu
        check_no_errors(run)
        packed = np.concatenate([x[0] for x in inputs.values()])
        if n <= 1000:
            truth = graph.hamming(packed, packed) if module is secure_hamming else graph.nearest(packed, 10)
            assert (values(run)[Party("hub")] == truth).all()
        sent = sum(o.cost["bytes"] for o in run.outcomes.values())
        rounds = max(o.cost["rounds"] for o in run.outcomes.values())
        print(
            f"{what:9} {engine:6} {n:6d} {sent / 1e6:9.1f} {rounds:6.0f} {took:8.1f} {cpu:8.1f}"
            f" {sent / n / n / 1e3:8.2f}",
            flush=True,
        )


def solve(args, names):
    from scipy.spatial import cKDTree

    sizes = (1000, 2000, 3000) if args.quick else (1000, 5000, 10_000, 20_000, 50_000)
    print(
        "\nsolve: k = 10, alpha = 0.99, 10 classes, 1 % labelled; columns of labelled points (what the protocols need),"
    )
    print("       the classes alone (`exact=False`), and a dense inverse in the same run; CPU seconds")
    head = ("n", "graph s", "labelled s", "classes s", "inverse s", "ratio", "us/(n k)", "GB")
    print(" ".join(f"{h:>{w}}" for h, w in zip(head, (6, 8, 10, 9, 9, 7, 8, 5), strict=True)))
    rng = np.random.default_rng(0)
    for n in sizes:
        x = rng.normal(size=(n, 12)) + 2 * rng.normal(size=(10, 12))[rng.integers(0, 10, n)]
        x /= np.linalg.norm(x, axis=1, keepdims=True)
        began = time.process_time()
        far, index = cKDTree(x).query(x, 11)
        distance = np.rint(4096 * np.arccos(np.clip(1 - far[:, 1:] ** 2 / 2, -1, 1)) / np.pi).astype(np.int64)
        keys = (distance << graph.index_bits(n)) + index[:, 1:]
        W = graph.adjacency(keys, 4096)
        made = time.process_time() - began
        labelled = np.sort(rng.choice(n, n // 100, replace=False))
        Y = np.zeros((n, 10))
        Y[labelled, rng.integers(0, 10, len(labelled))] = 1
        began = time.process_time()
        for _ in graph.influence(W, 0.99, labelled, labelled):
            pass
        columns = time.process_time() - began
        began = time.process_time()
        graph.solve(W, 0.99, Y)
        classes = time.process_time() - began
        inverse = float("nan")
        if n <= args.dense:
            began = time.process_time()
            np.linalg.inv(np.eye(n) - 0.99 * W.toarray())
            inverse = time.process_time() - began
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
        print(
            f"{n:6d} {made:8.1f} {columns:10.2f} {classes:9.2f} {inverse:9.1f} {inverse / columns:7.1f}"
            f" {classes / n / 10 * 1e6:8.2f} {peak:5.1f}",
            flush=True,
        )


def labelled_sets(args, names, shares):
    """(set, share, points, classes, given labels or -1, number of classes) of every draw; one label of every class."""
    for name, seed in itertools.product(names, range(args.repeats)):
        features, y, _, C, _ = load(args, name, seed)
        x = features.get("pretrained", features["raw"])
        for share in shares:
            rng, known = np.random.default_rng((seed, round(1000 * share))), np.zeros(len(y), bool)
            for c in range(C):
                rows = np.flatnonzero(y == c)
                known[rng.permutation(rows)[: max(1, round(share * len(rows)))]] = True
            yield name, share, x, y, np.where(known, y, -1), C


def hidden(args, names):
    from cloister.papers.baselines.mapping import linear_label

    usual, rows = Options(), {}
    how = graph.Walk.of(usual.n_neighbors, usual.alpha)
    sets = ("blood", "lung", "pancreas", "glioblastoma")
    for name, share, x, y, given, C in labelled_sets(args, sets, (0.01, 0.02, 0.05, 0.1)):
        packed, known = codes(x, usual.bits), given >= 0
        spread = {"n_neighbors": usual.n_neighbors, "alpha": usual.alpha, "power": usual.power}
        near = graph.split_keys(graph.nearest(packed, usual.n_neighbors), len(x))[0]
        found = {
            "hardened": graph.decide_walk(graph.walk_twice(near, given, C, how))[0],
            "semi-honest": graph.propagate(packed, given, n_classes=C, exact=False, **spread).label,
            "pooled spreading": pooled(x, y, known, C, 10, 0.9),
            "logistic": linear_label(x, x[known], y[known]),
        }
        row = [((f == y)[~known].mean(), score(y, f, ~known)) for f in found.values()]
        rows.setdefault((name, share), []).append(row)
    heads = ("hardened", "semi-honest", "spreading", "logistic")
    print(
        f"\nhidden: accuracy / balanced accuracy, {how.n_neighbors} neighbours, {how.steps} steps, {how.ring_bits} bits"
    )
    print(f"{'':14}{'labelled':>9}" + "".join(f"{h:>16}" for h in heads) + f"{'difference':>16}")
    means = {at: np.mean(row, axis=0) for at, row in rows.items()}
    means[("mean", 0)] = np.mean(list(means.values()), axis=0)
    for (name, share), m in means.items():
        cells = "".join(f"{a:>9.3f} /{b:6.3f}" for a, b in m)
        print(f"{name:14}{100 * share:8.0f}%{cells}{m[0, 0] - m[1, 0]:>+9.3f} /{m[0, 1] - m[1, 1]:+6.3f}", flush=True)


def steps(args, names):
    sets = ("marrow", "clothes", "blood 68k", "digits", "islets", "xin", "cell lines")
    usual, rows, old = Options(), {}, (graph.HUB, graph.RING_BITS)
    graph.RING_BITS = 62
    for name, share, x, y, given, C in labelled_sets(args, sets, (0.01, 0.02, 0.05, 0.1)):
        packed, known = codes(x, usual.bits), given >= 0
        spread = {"n_neighbors": usual.n_neighbors, "alpha": usual.alpha, "power": usual.power}
        before = graph.propagate(packed, given, n_classes=C, exact=False, **spread).label
        keys = graph.split_keys(graph.nearest(packed, 10), len(x))[0]
        for k, graph.HUB, count, alpha in itertools.product((5, 7, 10), (5, 6, 7), (6, 8), (0.8, 0.9)):
            how = graph.Walk.of(k, alpha, count)
            after = graph.decide_walk(graph.walk_twice(keys[:, :k], given, C, how))[0]
            right, wrong = (after == y)[~known].mean(), (before == y)[~known].mean()
            gain = (right - wrong, score(y, after, ~known) - score(y, before, ~known))
            rows.setdefault((k, graph.HUB, count, alpha), {}).setdefault((name, share), []).append(gain)
    graph.HUB, graph.RING_BITS = old
    print("\nsteps: accuracy and balanced accuracy less those of mode semi-honest, mean of 28 rows")
    for (k, hub, count, alpha), by_row in rows.items():
        a, b = np.mean([np.mean(gains, axis=0) for gains in by_row.values()], axis=0)
        print(f"k = {k:2d}  hub {hub}  steps {count:2d}  alpha {alpha}  {a:+.4f} {b:+.4f}", flush=True)


def sizes(args, names):
    from cloister.study import Party
    from cloister.testing import Case, check_no_errors, run_protocol
    from cloister.workflows.propagate_labels import propagation_terms, verified_propagation

    usual, rng = Options(), np.random.default_rng(0)
    centres, parties = rng.normal(size=(8, 30)), tuple(Party(f"site-{i}") for i in range(3))
    print("\nsizes: hardened, 3 sites, default settings, 8 classes, a tenth labelled; all parties together")
    print(f"{'points':>9}{'MB':>9}{'B/pair':>8}{'rounds':>8}{'seconds':>9}{'CPU s':>8}")
    for n in (m for m in (500, 1000, 2000) if m <= args.largest):
        inputs = {}
        for u in parties:
            y = rng.integers(0, 8, n)
            labels = [f"type {c}" if rng.random() < 0.1 else None for c in y]
            inputs[u] = (centres[y] + rng.normal(size=(n, 30)), labels)
        params = propagation_terms.Params(
            parties, Party("hub"), usual.bits, n_neighbors=usual.n_neighbors, alpha=usual.alpha
        )
        run = run_protocol(verified_propagation, Case(params, inputs), timeout=60.0)
        check_no_errors(run)
        size, cpu = (sum(c[x] for c in run.cost.values()) for x in ("bytes", "cpu_seconds"))
        rounds, seconds = (max(c[x] for c in run.cost.values()) for x in ("rounds", "seconds"))
        print(f"3 x {n:5d}{size / 1e6:9.1f}{size / (3 * n) ** 2:8.1f}{rounds:8d}{seconds:9.1f}{cpu:8.1f}", flush=True)


def modes(args, names):
    """The whole protocol, hardened (one party may lie) beside semi-honest, three sites."""
    from cloister.study import Party
    from cloister.testing import Case, check_no_errors, run_protocol, values
    from cloister.workflows.propagate_labels import private_propagation, propagation_terms, verified_propagation

    n, bits = (100, 256) if args.quick else (1000, 1024)
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(8, 30))
    sites = tuple(Party(f"site-{i}") for i in range(3))
    inputs = {}
    for u in sites:
        y = rng.integers(0, 8, n)
        labels = [f"type {c}" if rng.random() < 0.1 else None for c in y]
        inputs[u] = (centres[y] + rng.normal(size=(n, 30)), labels)
    params = propagation_terms.Params(sites, Party("hub"), bits)
    print(f"\nmodes: 3 sites of {n} points, L = {bits}, k = 10, a tenth labelled, 8 classes; all parties together")
    print(f"{'':14}{'MB':>9}{'rounds':>8}{'seconds':>9}{'CPU s':>8}")
    labels = []
    for name, module in (("semi-honest", private_propagation), ("hardened", verified_propagation)):
        run = run_protocol(module, Case(params, inputs), timeout=900.0)
        check_no_errors(run)
        size, cpu = (sum(c[x] for c in run.cost.values()) for x in ("bytes", "cpu_seconds"))
        rounds, seconds = (max(c[x] for c in run.cost.values()) for x in ("rounds", "seconds"))
        print(f"{name:14}{size / 1e6:9.1f}{rounds:8d}{seconds:9.1f}{cpu:8.1f}")
        labels.append(np.concatenate([values(run)[u].label for u in sites]))
    print(f"  the same label for {float((labels[0] == labels[1]).mean()):.4f} (their hyperplanes differ)")


TABLES = {
    "choice": choice,
    "weights": weights,
    "nested": nested,
    "alpha": alpha,
    "tuned": tuned,
    "why": why,
    "solve": solve,
    "gain": gain,
    "left-out": left_out,
    "graph": graph_of,
    "groups": groups_of,
    "features": features_of,
    "cv": cross_validation,
    "variants": variants,
    "cost": cost,
    "modes": modes,
    "hidden": hidden,
    "steps": steps,
    "sizes": sizes,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small sets, one draw; about three minutes")
    parser.add_argument("--only", default=",".join(TABLES), help="comma-separated tables")
    parser.add_argument("--data", type=Path, default=Path(__file__).parents[2] / "shared" / "data")
    parser.add_argument("--points", type=int, help="points per site; 600, or 120 with --quick")
    parser.add_argument(
        "--dense", type=int, default=10_000, help="invert dense matrices up to this size, for comparison"
    )
    parser.add_argument("--largest", type=int, default=5000, help="points per site in the table of costs, at most")
    parser.add_argument("--neighbours", type=int, help="of the graph in `choice`; the default of the workflow")
    parser.add_argument(
        "--sets",
        default=",".join((*SETS, *MORE)),
        help="comma-separated, for `weights`: also pancreas, islets, blood 68k, digits",
    )
    parser.add_argument("--means", type=float, default=1.0, help="weight of class means in `choice`")
    parser.add_argument("--repeats", type=int, help="draws of points and labels; 3, or 1 with --quick")
    args = parser.parse_args()
    args.points = args.points or (120 if args.quick else 600)
    args.repeats = args.repeats or (1 if args.quick else 3)
    threads = os.environ["OMP_NUM_THREADS"]
    print(f"{platform.machine()}, {os.cpu_count()} cores, {threads} thread(s), Python {platform.python_version()}")
    print(f"{args.points} points a site, {args.repeats} draw(s)")
    names = available(args)
    for table in args.only.split(","):
        TABLES[table](args, names)


if __name__ == "__main__":
    main()
