"""Semi-supervised `fine-tune` itself on CIFAR-10, rehearsed, beside the engine that made the larger figures.

    python benchmarks/training_images_workflow.py --images cifar10.npz       both on one subset, the same seeds
    python benchmarks/training_images_workflow.py --only steps               the steps of a round, number by number

`training_images.py` trains many clients side by side on a GPU and spreads labels there; what it says of `fine-tune` is
true only if the two do the same. `steps`: from the same weights, images and batches, without what is random (dropout,
augmentation), one round's local updates, the embeddings, the labels that are found and what they count. `arms`: every
arm through `cl.rehearse`, and through the engine on the same images, clients and labels. Their generators differ
(batches, shifts of up to two or four pixels, hyperplanes, who trains), so that the two agree only as two seeds do.

`cifar10.npz` is what `pretrain_vit.py --make-data` writes; without it patterns with noise, whose figures mean nothing.
"""

from __future__ import annotations

import argparse
import io
import os
import platform
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

os.environ.setdefault("OMP_NUM_THREADS", "1")

import anndata as ad
import numpy as np
import pandas as pd
import torch

sys.path.insert(0, str(Path(__file__).parent))

import training_images as engine
from training_images_side import CLASSES, Side, Steps, propagate

from cloister.models import graph
from cloister.models.classifier import Blueprint, make
from cloister.models.learner import Learner, Recipe, Table
from cloister.rehearsal.rehearsal import rehearse

NAMES = tuple(str(c) for c in range(CLASSES))
GRAPH = {"similarity_power": 3.0, "balance": True, "scale_confidence": True, "class_weights": True}
SHEET = 50  # images along a side of a sheet


def images(path, count, tested):
    """Bytes (n, 32, 32, 3) and labels, classes in turn; for training, and for the test."""
    if path is None:
        x, y = engine.load(None, "train")
        return (x[:count], y[:count]), engine.load(None, "validation")
    from PIL import Image

    with np.load(path, allow_pickle=False) as kept:
        sheets = sorted(n for n in kept.files if n.startswith("sheet_"))[: 1 + 2 * count // SHEET**2]
        x = [np.asarray(Image.open(io.BytesIO(kept[n].tobytes()))) for n in sheets]
        x = np.concatenate([s.reshape(SHEET, 32, SHEET, 32, 3).transpose(0, 2, 1, 3, 4) for s in x])
        x = x.reshape(-1, 32, 32, 3)
        y = kept["y"][: len(x)].astype(int)
        seen = np.cumsum(kept["test_diff"], axis=1, dtype=np.uint8).reshape(-1, 32, 32, 3), kept["test_y"].astype(int)
    at, there = (
        np.stack([np.flatnonzero(v == c)[: n // CLASSES] for c in range(CLASSES)], axis=1).ravel()
        for v, n in ((y, count), (seen[1], tested))
    )
    return (x[at], y[at]), (seen[0][there], seen[1][there])


# ---- number by number ------------------------------------------------------------------------------------------------


def steps(args):
    """One client's round both ways: what it sees, the labels it is given, what they count, how far it moves."""
    (x, y), _ = images(args.images, 200, 100)
    inputs = torch.from_numpy(x / 255.0 - 0.5).float().permute(0, 3, 1, 2).contiguous()
    known = np.where(np.arange(len(y)) // CLASSES % 4 == 0, y, -1)
    form = {"scale_confidence": True, "class_weights": True}
    recipe = Recipe(1, 150, "sgd", 0.0, 2e-4, seed=args.seed, **form)
    blueprint = Blueprint("cnn", 3, 32, width=args.width, dropout=0.0, seed=args.seed, unit=True)
    told = {"describe": "", "site": "a", "unlabelled": True}
    learner = Learner(make(blueprint, NAMES), CLASSES, recipe, Table(inputs), known, [], **told)
    side = Side(1, args.width, 0.0)
    side.register_forward_pre_hook(lambda _, x: (x[0].contiguous(),))  # channels first: another order rounds otherwise
    side.begin(learner.model.model)

    vectors, given = learner.embed(np.zeros(learner.size, np.float32))
    side.eval()
    with torch.no_grad():
        z = side.features(inputs[learner.points])[:, 0].numpy()
    assert np.abs(vectors - z).max() < 1e-5
    print(f"steps: embeddings of {len(z)} images differ by at most {np.abs(vectors - z).max():.1e}")

    planes = graph.hyperplanes(bytes(32), 1024, vectors.shape[1])
    ours = graph.propagate(graph.codes(vectors, planes), given, n_classes=CLASSES, power=3.0, balance=True)
    tensors = (torch.from_numpy(v) for v in (vectors[None], given[None], planes))
    label, sure = (v[0].numpy() for v in propagate(*tensors, power=3, balance=True))
    same, away = (label == ours.label).mean(), np.abs(sure - ours.confidence).max()
    assert same == 1
    assert away < 1e-5
    print(f"  labels over one graph: {same:.1%} the same, confidences differ by at most {away:.1e}")
    learner.teach(ours.label, ours.confidence)
    weight = engine.pseudo_weights(label, sure, given, CLASSES, **form)
    away = np.abs(learner.pseudo[1][learner.points] - weight).max()
    assert away < 1e-4
    print(f"  what they count differs by at most {away:.1e}")

    for epochs in (1, 2):
        _move(args, learner, side, inputs, known, epochs)


def _move(args, learner, side, inputs, known, epochs):
    """Local steps from the first weights: the learner's own batches, in the engine, too."""
    learner.recipe, theta = replace(learner.recipe, epochs=epochs), np.zeros(learner.size, np.float32)
    learner.place(theta)
    side.begin(learner.model.model)
    rng = np.random.default_rng(learner._seed(0))
    plan = [at for _ in range(epochs) for at in learner.batches(rng)]
    once = Steps(side, len(plan), sum(map(len, plan[0])), learner.recipe.weight_decay)
    for i, (own, taught) in enumerate(plan):
        once.x[i] = inputs[np.concatenate([own, taught])].permute(0, 2, 3, 1)
        once.y[i, :, 0] = torch.from_numpy(np.concatenate([known[own], learner.pseudo[0][taught]]))
        once.w[i, :, 0] = torch.from_numpy(np.concatenate([np.ones(len(own)), learner.pseudo[1][taught]]))
    delta, _ = learner.train(theta, 0, args.rate)
    once.round(args.rate)
    theirs = {n if n.startswith("body.") else f"head.{n}": t for n, t in side.state_dict().items()}
    mine = {n: t for n, t in learner.model.model.state_dict().items() if t.dtype.is_floating_point}
    away = np.concatenate([(t - theirs[n]).numpy().ravel() for n, t in mine.items()])
    assert np.linalg.norm(away) < (1e-5 if epochs == 1 else 0.01) * np.linalg.norm(delta)  # rounding grows with steps
    print(f"  {len(plan)} steps: the update has norm {np.linalg.norm(delta):.3f}, the two differ by"
          f" {np.linalg.norm(away) / np.linalg.norm(delta):.1e} of it")  # fmt: skip


# ---- every arm -------------------------------------------------------------------------------------------------------


def by_workflow(args, train, test, held, chosen, say):
    """Stage 1, and every arm of stage 2, each a rehearsal of `fine-tune`."""
    (x, y), (seen, truth), arms = train, test, {}
    sites = {}
    for j, at in enumerate(held):
        given = np.full(len(at), -1)
        given[chosen[j]] = y[at[chosen[j]]]
        labels = pd.Categorical.from_codes(given, NAMES)
        sites[f"site-{j:02d}"] = ad.AnnData(x[at].reshape(len(at), -1).astype(np.float32), obs={"cell_type": labels})
    check = ad.AnnData(seen.reshape(len(seen), -1).astype(np.float32))
    size = min(50, args.labels)  # |B_L|
    common = {"model": "cnn", "image_shape": (32, 32, 3), "width": args.width, "dropout": 0.5, "unit_embedding": True,
              "optimizer": "sgd", "momentum": 0.0, "weight_decay": 2e-4, "lr": args.rate, "weighting": "plain",
              "schedule": "cosine", "batch_size": size, "validation": 0.0, "score_every": 0, "labels": NAMES,
              "clients_per_round": args.per_round, "seed": args.seed, "timeout": 900.0, "mode": args.mode}  # fmt: skip

    def run(what, rounds, epochs, **more):
        began = time.process_time()
        ends = max(rounds, round(rounds * 4 / 3))
        done = rehearse("fine-tune", sites, rounds=rounds, local_epochs=epochs, schedule_rounds=ends, **common, **more)
        model = next(o.model for o in done.outcomes.values() if o.model is not None)
        arms[what] = float((model.predict(check).astype(int) == truth).mean())
        sent = sum(c["bytes"] for c in done.cost.values()) / 1e6
        say(f"  workflow {what:20s} {arms[what]:.3f}   {sent:7.1f} MB, {time.process_time() - began:6.1f} CPU s")
        return model

    with tempfile.TemporaryDirectory() as folder:
        first = run("labelled, stage 1", args.first, args.epochs).save(Path(folder) / "model.npz")
        passes = (
            held.shape[1] - args.labels
        ) // size  # over the labels, for as many steps; the engine shows each label twice in a step
        if "labelled" in args.arms:
            run("labelled", args.rounds, args.epochs * passes, init=str(first))
        for arm in (a for a in args.arms if a != "labelled"):
            form = GRAPH if arm != "network" else {}
            more = {"semi_supervised": True, "pseudo_labels": arm, "bits": args.bits, **form}
            run(arm, args.rounds, args.epochs, init=str(first), **more)
    return arms


def by_engine(args, train, test, say):
    """The same through `training_images.Trial`."""
    rows = []
    told = {"images": None, "train": len(train[1]), "labels": args.labels * args.sites, "test": False, "keep": None,
            "plain_embedding": False, "power": 3, "arms": args.arms, "score_every": 10**6}  # fmt: skip
    told |= {n: getattr(args, n) for n in ("width", "rate", "first", "rounds", "epochs")}
    told |= {n: GRAPH[n] for n in ("balance", "scale_confidence", "class_weights")}
    loaded = {"CLIENTS": args.sites, "PER_ROUND": args.per_round, "BITS": args.bits,
              "load": lambda folder, part, count=None: train if part == "train" else test}  # fmt: skip
    began = time.process_time()
    with mock.patch.multiple(engine, **loaded):
        engine.Trial(SimpleNamespace(**told), "iid", args.seed, rows.append).go()
    arms = {"labelled, stage 1": next(r for r in rows if r["stage"] == 1)["validation"]["labelled"]}
    arms |= rows[-1]["validation"]
    say(f"  engine, all arms: {time.process_time() - began:.1f} CPU s")
    return arms


def arms(args):
    train, test = images(args.images, args.sites * args.each, args.tested)
    with mock.patch.object(engine, "CLIENTS", args.sites):
        held, chosen = engine.deal(train[1], "iid", args.seed, args.labels * args.sites)
    print(f"arms: {args.sites} clients of {held.shape[1]} images, {args.labels} of them labelled, {args.per_round} a"
          f" round; {args.first} + {args.rounds} rounds of {args.epochs} epochs, width {args.width}, {args.bits} bits,"
          f" {args.mode}; {len(test[1])} test images", flush=True)  # fmt: skip

    def say(line):
        print(line, flush=True)

    ours, theirs = by_workflow(args, train, test, held, chosen, say), by_engine(args, train, test, say)
    print(f"  {'':20s} workflow  engine")
    for arm, found in ours.items():
        print(f"  {arm:20s} {found:8.3f} {theirs[arm]:7.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=Path, help="cifar10.npz")
    parser.add_argument("--only", default="steps,arms")
    parser.add_argument("--arms", choices=engine.ARMS, nargs="+", default=["labelled", "xclp"], help="of stage 2")
    parser.add_argument("--mode", choices=("published", "hardened"), default="published")
    parser.add_argument("--sites", type=int, default=20)
    parser.add_argument("--per-round", type=int, default=5)
    parser.add_argument("--each", type=int, default=40, help="images of a client")
    parser.add_argument("--labels", type=int, default=10, help="of a client")
    parser.add_argument("--tested", type=int, default=1000)
    parser.add_argument("--first", type=int, default=100, help="rounds of stage 1")
    parser.add_argument("--rounds", type=int, default=6, help="rounds of stage 2")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--width", type=int, default=12)
    parser.add_argument("--bits", type=int, default=1024)
    parser.add_argument("--rate", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{platform.machine()}, {os.cpu_count()} cores, one thread, torch {torch.__version__}, seed {args.seed}")
    for what in args.only.split(","):
        {"steps": steps, "arms": arms}[what](args)


if __name__ == "__main__":
    main()
