"""Where a provider's encoder helps: few labels. Curves for 1, 3, 10, 20 and 100 labels per type, three seeds.

    python benchmarks/few_labels.py                       all sets; encoders of blood are trained first (minutes)
    python benchmarks/few_labels.py --only lung images    some of them
    python benchmarks/few_labels.py --show                the tables from benchmarks/logs/few_labels.json

A provider has trained an encoder on the atlas of one study, or two. A hospital has cells of another study, and labels
for a few of each type; it is scored on all its other cells of these types. Everything is in the clear: the numbers of
the encoder that a hospital sees (taps) are those of the plain student with the flooding's noise, which are
the encrypted ones to 1e-2. Nothing is done with other hospitals: sums over sites need more labels than these.

adapter         the adapter of `adapt-model` with its options of mode published, trained on the hospital's taps
linear head     logistic regression on the taps, penalty by cross-validation on the labelled cells
no provider     the same on the hospital's own genes, 2,000 most variable (pixels of images)
full            all weights of the encoder, in the clear: needs the provider's model, rate 3e-4 of Adam, 80 passes
zero-shot       no label: the type that most of the ten nearest cells of the provider's atlas have, by their taps

sets   blood        Kang (10x, two conditions) → pbmc3k
       blood, back  pbmc3k and sorted cells of Zheng → Kang's controls
       lung         Tabula Sapiens → HLCA (the encoder of `pretrain_cells.py`), coarse types
       images       CIFAR-10 → Fashion-MNIST (the encoder of `pretrain_vit.py`, two taps), no zero-shot: other classes
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).parent))

import pretrain_cells

from cloister.models import polynomial
from cloister.papers.baselines.mapping import nearest_label
from cloister.papers.baselines.own_features import own_features, own_labels
from cloister.workflows.adapt_model import workflow as adapt_model
from cloister.workflows.adapt_model.inference import inputs_of
from cloister.workflows.adapt_model.training import learner_of

LOG = Path(__file__).parent / "logs" / "few_labels.json"
LABELS, SEEDS = (1, 3, 10, 20, 100), 3
FEWEST = 25  # cells of a type that is asked about
ARMS = ("adapter", "linear head", "no provider", "full", "zero-shot")
FULL_RATE, FLOODING = 3e-4, 1 / 700


# ---- sets ------------------------------------------------------------------------------------------------------------


def blood(data, providers, hospital, out):
    """The provider's cells, the hospital's, and the encoder, trained now if it is not there."""
    import anndata as ad

    a = ad.read_h5ad(data / "scrna" / "pbmc_federation.h5ad")
    a.obs["cell_type"] = a.obs["cell_type"].astype(str)
    batch = a.obs["batch"].astype(str)
    own, there = a[batch.isin(providers).to_numpy()].copy(), a[(batch == hospital).to_numpy()].copy()
    if not out.exists():
        pretrain_cells.train(thin(own, 2000), out, epochs=6)
    return own, there, polynomial.Encoder.load(out)


def lung(data):
    own, hospitals = pretrain_cells.lung(data)
    import anndata as ad

    return own, ad.concat(list(hospitals.values()), index_unique="-"), polynomial.Encoder.load(pretrain_cells.OUT)


def thin(adata, most):
    return adata[np.sort(np.random.default_rng(0).permutation(adata.n_obs)[:most])].copy()


class Cells:
    def __init__(self, own, there, encoder):
        self.encoder = encoder
        self.x = inputs_of(there, encoder.card)
        inside = polynomial.takes(encoder.shape, self.x)
        there, self.x = there[inside].copy(), self.x[inside]
        self.y = there.obs["cell_type"].astype(str).to_numpy()
        self.taps = taps_of(encoder, self.x)
        self.own = own_features({"hospital": there})["hospital"]
        own = thin(own, 3000)
        atlas = taps_of(encoder, inputs_of(own, encoder.card))[:, -1]
        names = own.obs["cell_type"].astype(str).to_numpy()
        self.zero = nearest_label(self.taps[:, -1], atlas, names, 10)[0]


class Images:
    """Fashion-MNIST: two taps of the shipped ViT."""

    def __init__(self, data):
        import torch
        from adaptation_images import features
        from pretrain_vit import WEIGHTS, grey, scaled

        from cloister.models import student

        self.encoder = polynomial.Encoder.load(WEIGHTS / "student_model.npz")
        with np.load(data / "images" / "fashion_mnist_10k.npz") as f:
            some = np.random.default_rng(0).permutation(len(f["X"]))[:1600]
            x, self.y = grey(f["X"][some]), f["y"][some].astype(str)
        tokens, _, _ = features(self.encoder, x)
        read = zip(self.encoder.shape.taps, self.encoder.projections, self.encoder.centres, strict=True)
        taps = np.stack([tokens[:, t - 1] @ P.T - c for t, P, c in read], axis=1)
        self.taps = taps + np.random.default_rng(0).uniform(-1, 1, taps.shape) * FLOODING
        self.x = np.concatenate([student.patches(scaled(part), 4) for part in torch.from_numpy(x).split(200)])
        self.own, self.zero = x.reshape(len(x), -1).astype(float) / 255, None
        self.own = (self.own - self.own.mean(0)) / (self.own.std(0) + 1e-3)


def taps_of(encoder, x):
    parts = [polynomial.taps_of(encoder, polynomial.hidden(encoder, x[i : i + 256])) for i in range(0, len(x), 256)]
    found = np.concatenate(parts)
    return found + np.random.default_rng(0).uniform(-1, 1, found.shape) * FLOODING


# ---- ways ------------------------------------------------------------------------------------------------------------


def labelled(y, k, seed):
    """k cells of each type of FEWEST or more, at most half of them; and all other cells of these types."""
    rng = np.random.default_rng(seed)
    kinds, counts = np.unique(y, return_counts=True)
    kinds, train = kinds[counts >= FEWEST], []
    for kind in kinds:
        at = rng.permutation(np.flatnonzero(y == kind))
        train.extend(at[: min(k, len(at) // 2)])
    train = np.sort(train)
    return train, np.setdiff1d(np.flatnonzero(np.isin(y, kinds)), train)


def adapted(s, train, test, seed, *, whole=False):
    """Labels by an adapter on taps, or by the whole model on inputs, as `adaptation_baselines` trains them."""
    import torch

    from cloister.models.learner import Learner, Recipe, Table
    from cloister.models.polynomial.unfolded import unfold

    names = tuple(np.unique(s.y[train]))
    codes = np.array([names.index(n) for n in s.y[train]])
    options = adapt_model.in_mode(adapt_model.Options(), "published")
    x = s.x if whole else s.taps
    table = Table(torch.as_tensor(x[train], dtype=torch.float32))
    if whole:
        model = unfold(s.encoder, len(names))
        recipe = Recipe(options.local_epochs, options.batch_size, "adam", options.momentum, seed=seed)
        learner, rate = Learner(model, len(names), recipe, table, codes, [], describe="", site="hospital"), FULL_RATE
    else:
        learner = learner_of(options, x.shape[1:], names, table, codes, [], "hospital", seed)
        rate = options.lr
    theta = np.zeros(learner.size)
    for t in range(options.rounds):
        theta = theta + learner.train(theta.astype(np.float32), t, rate)[0]
    learner.place(theta.astype(np.float32))
    learner.model.eval()
    with torch.no_grad():
        parts = torch.as_tensor(x[test], dtype=torch.float32).split(256)
        found = torch.cat([learner.model(part) for part in parts]).argmax(1).numpy()
    return np.array(names)[found]


def by(arm, s, train, test, seed):
    y = s.y[train]
    if arm == "no provider":
        return own_labels(s.own[test], s.own[train], y)
    if arm == "linear head":
        taps = s.taps.reshape(len(s.taps), -1)
        taps = (taps - taps.mean(0)) / taps.std(0)
        return own_labels(taps[test], taps[train], y)
    if arm == "zero-shot":
        return s.zero[test]
    return adapted(s, train, test, seed, whole=arm == "full")


def curves(name, s, seeds, arms, log):
    for k in LABELS:
        for seed in range(seeds):
            train, test = labelled(s.y, k, seed)
            for arm in arms:
                if arm == "zero-shot" and s.zero is None:
                    continue
                began = time.process_time()
                right = by(arm, s, train, test, seed) == s.y[test]
                log[f"{name}|{arm}|{k}|{seed}"] = {
                    "accuracy": round(float(right.mean()), 4), "labels": len(train), "scored": len(test),
                    "balanced": round(float(np.mean([right[s.y[test] == n].mean() for n in np.unique(s.y[test])])), 4),
                    "s": round(time.process_time() - began, 2),
                }  # fmt: skip
        LOG.write_text(json.dumps(log, indent=0) + "\n")
        print(line(log, name, k), flush=True)


def line(log, name, k):
    parts = []
    for arm in ARMS:
        found = [row["accuracy"] for key, row in log.items() if key.startswith(f"{name}|{arm}|{k}|")]
        if found:
            parts.append(f"{arm} {np.mean(found):.3f} ± {np.std(found):.3f}")
    return f"{name:12} {k:4} labels a type   " + "   ".join(parts)


def crossover(log, name):
    """The fewest labels per type from which the hospital's own features are as good as its better use of taps."""
    for k in LABELS:
        mean = {
            arm: np.mean([row["accuracy"] for key, row in log.items() if key.startswith(f"{name}|{arm}|{k}|")])
            for arm in ("adapter", "linear head", "no provider")
        }
        if mean["no provider"] >= max(mean["adapter"], mean["linear head"]):
            return k
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path(__file__).parents[2] / "shared" / "data")
    parser.add_argument("--only", nargs="+", default=("lung", "blood", "blood-back", "images"))
    parser.add_argument("--weights", type=Path, default=Path(__file__).parent / "weights", help="encoders of blood")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--arms", nargs="+", default=ARMS)
    parser.add_argument("--show", action="store_true")
    args = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    log = json.loads(LOG.read_text()) if LOG.exists() else {}
    made = {
        "lung": lambda: Cells(*lung(args.data)),
        "blood": lambda: Cells(*blood(args.data, ("kang_ctrl", "kang_stim"), "pbmc3k", args.weights / "blood.npz")),
        "blood-back": lambda: Cells(
            *blood(args.data, ("pbmc3k", "zheng_sorted"), "kang_ctrl", args.weights / "blood_back.npz")
        ),
        "images": lambda: Images(args.data),
    }
    if not args.show:
        for name in args.only:
            curves(name, made[name](), args.seeds, args.arms, log)
    for name in made:
        if any(key.startswith(f"{name}|") for key in log):
            print(*(line(log, name, k) for k in LABELS), sep="\n")
            print(f"  own features are as good from {crossover(log, name) or 'more than 100'} labels a type on")
    print(f"machine: {platform.machine()}, {os.cpu_count()} cores, one thread")


if __name__ == "__main__":
    main()
