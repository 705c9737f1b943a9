"""A provider's ViT, pre-trained on CIFAR-10, adapted to other images: what the adapter is worth.

    python benchmarks/adaptation_images.py --quick            minutes on two cores: 600 images, few rounds
    python benchmarks/adaptation_images.py                    all images and splits, three seeds: an hour of a core
    python benchmarks/adaptation_images.py --part full        full fine-tuning alone; wants a GPU
    python benchmarks/adaptation_images.py --show             the tables from benchmarks/logs/adaptation_images.jsonl

adapters   owners of Fashion-MNIST (5,000 training, 1,000 validation, 2,000 test images) and PneumoniaMNIST (3,882, 524,
           624): linear probing, ours with hardened taps (two blocks, 32 numbers each, the flooding's noise on them),
           ours as published (class tokens of all six blocks), pooled and with K owners whose labels are Dirichlet.
           Taps come from the plain student: the tests check that the encrypted ones are the same to 1e-2. FedAvg in
           the clear.
full       full fine-tuning of the teacher in the clear, the same splits, rounds and batches
efficiency table 4 of the paper: what one training step costs an owner by method, on taps that it has (linear probing,
           ours) or on images (full fine-tuning): parameters, CPU milliseconds a sample forward and backward, memory
domains    the same adapters on students that were distilled on other sets (`pretrain_vit.py --domains`)

Rates and bottlenecks are chosen on the validation images, for each set and arm, pooled and with five owners at seed 0;
so is the round whose weights are tested. The test images choose nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import functools
import itertools
import json
import math
import os
import platform
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).parent))

from pretrain_vit import WEIGHTS, deal, grey, restore, scaled

from cloister.models import polynomial, student
from cloister.mpc.crypto.owner_ckks import scheme

LOG = Path(__file__).parent / "logs" / "adaptation_images.jsonl"
BATCH, ROUNDS, EPOCHS = 64, 20, 2
SPLITS = [(1, 100.0), (5, 100.0), (5, 1.0), (5, 0.01), (10, 1.0), (20, 1.0), (50, 1.0)]
ARMS = ("linear, hardened", "ours, hardened", "linear, published", "ours, published", "full fine-tuning")


@dataclasses.dataclass
class Images:
    name: str
    x: np.ndarray  # bytes, (n, 3, 32, 32)
    y: np.ndarray
    train: np.ndarray
    validation: np.ndarray
    test: np.ndarray

    @property
    def labels(self) -> int:
        return int(self.y.max()) + 1


def sets(folder: Path, *, quick: bool) -> list[Images]:
    out = []
    with np.load(folder / "images" / "fashion_mnist_10k.npz") as f:
        x, y = f["X"], f["y"].astype(np.int64)
        at = np.concatenate(parts := deal(len(x))[1:])  # the first part is the provider's
        out.append(
            Images("Fashion-MNIST", x[at], y[at], *np.split(np.arange(len(at)), np.cumsum([*map(len, parts)])[:2]))
        )
    with np.load(folder / "images" / "pneumoniamnist_28.npz") as f:
        parts = [f[f"{k}_images"] for k in ("train", "val", "test")]
        y = np.concatenate([f[f"{k}_labels"].ravel() for k in ("train", "val", "test")]).astype(np.int64)
        at = np.split(np.arange(len(y)), np.cumsum([len(p) for p in parts])[:2])
        out.append(Images("PneumoniaMNIST", np.concatenate(parts), y, *at))
    for s in out:
        if quick:
            rng = np.random.default_rng(0)
            keep = [rng.permutation(p)[:n] for p, n in ((s.train, 600), (s.validation, 150), (s.test, 250))]
            s.x, s.y = (v[np.concatenate(keep)] for v in (s.x, s.y))
            s.train, s.validation, s.test = np.split(np.arange(len(s.y)), [600, 750])
        s.x = grey(s.x)
    return out


def split(y, owners, alpha, seed):
    """Positions by owner, labels Dirichlet over owners; who has fewer than four takes from whoever has most."""
    rng = np.random.default_rng([seed, owners, int(alpha * 100)])
    parts = [[] for _ in range(owners)]
    for k in np.unique(y):
        at = rng.permutation(np.flatnonzero(y == k))
        share = rng.dirichlet([alpha] * owners)
        for part, piece in zip(parts, np.split(at, (np.cumsum(share)[:-1] * len(at)).astype(int)), strict=True):
            part.extend(piece)
    for part in parts:
        while len(part) < 4:
            most = max(parts, key=len)
            part.append(most.pop(int(rng.integers(len(most)))))
    return [np.sort(np.array(p)) for p in parts]


def scores(logits, y):
    """Accuracy, and its mean over classes."""
    right = logits.argmax(1) == y
    each = [right[y == k].mean() for k in np.unique(y)]
    return {"accuracy": round(float(right.mean()), 4), "balanced": round(float(np.mean(each)), 4)}


def log(row, path):
    print(json.dumps(row), flush=True)
    if path is not None:
        with path.open("a") as f:
            f.write(json.dumps(row) + "\n")


# ---- what owners see -------------------------------------------------------------------------------------------------


def features(encoder, images, cache: Path | None = None):
    """Class tokens after every block (n, L, d); the least and largest value of every kind, (n, kinds)."""
    if cache is not None and cache.exists():
        with np.load(cache) as f:
            return f["tokens"].astype(np.float64), f["low"], f["high"]
    tokens, low, high = [], [], []
    for i, part in enumerate(torch.from_numpy(images).split(50)):
        inputs = student.patches(scaled(part), 4)
        made = hidden(encoder, inputs)
        if i == 0:
            exact = polynomial.hidden(encoder, inputs[:4].double().numpy())[-1][:, 0]
            assert np.abs(made[0][:4, -1] - exact).max() < 1e-3 * np.abs(exact).max()
        for out, v in zip((tokens, low, high), made, strict=True):
            out.append(v)
    units = units_of(encoder)
    tokens, low, high = np.concatenate(tokens), np.concatenate(low) * units, np.concatenate(high) * units
    if cache is not None:
        np.savez(cache, tokens=tokens, low=low, high=high)
    return tokens.astype(np.float64), low, high


def horner(x, degree):
    """Taylor's exp in place of as many passes as it has terms."""
    y = torch.full_like(x, 1 / degree).mul_(x).add_(1)
    for i in range(degree - 1, 0, -1):
        y.mul_(x).div_(i).add_(1)
    return y


@torch.no_grad()
def hidden(encoder, inputs):
    """`polynomial.hidden` in single precision and PyTorch, twice as fast: class tokens, least and largest values."""
    s, low, high, tokens = encoder.shape, [], [], []

    def note(v):
        flat = v.reshape(len(v), -1)
        low.append(flat.amin(1))
        high.append(flat.amax(1))
        return v

    def single(a):
        return torch.from_numpy(a.astype(np.float32))

    def norm(x, V):
        c = x - x.mean(-1, keepdim=True)
        v = note((c * c).mean(-1, keepdim=True) / V)
        return c * (polynomial.inverse_root(v, s.root_steps) / math.sqrt(V))

    x = inputs @ single(encoder.embed).T
    x = note(torch.cat([x.new_zeros(len(x), 1, s.width), x], 1) + single(encoder.positions))
    for i, b in enumerate(encoder.blocks):
        y = note(F.linear(norm(x, s.variances[2 * i]), single(b.qkv), single(b.qkv_bias)))
        q, k, v = (t.unflatten(-1, (s.heads, -1)).transpose(1, 2) for t in y.chunk(3, -1))
        e = note(q @ k.transpose(-1, -2))
        e = (e + single(b.offset)[:, None, None]) ** 2 if s.attention == "quadratic" else horner(e, s.exp_degree)
        D = note(e.mean(-1, keepdim=True) / s.means[i])
        o = note(e @ v / (s.tokens * s.means[i])) * polynomial.inverse(D, s.steps)
        x = note(x + F.linear(o.transpose(1, 2).flatten(2), single(b.out), single(b.out_bias)))
        u = note(F.linear(norm(x, s.variances[2 * i + 1]), single(b.up), single(b.up_bias)))
        x = note(x + F.linear(u * u, single(b.down), single(b.down_bias)))
        tokens.append(x[:, 0])
    return torch.stack(tokens, 1).numpy(), torch.stack(low, 1).numpy(), torch.stack(high, 1).numpy()


def kinds(shape):
    """What `polynomial.hidden` watches, in its order (pre-norm)."""
    each = ("root", "units", "scores", "division", "sums", "activations", "root", "units", "activations")
    return [("activations", 0), *((what, i) for i in range(shape.depth) for what in each)]


def units_of(encoder):
    """V and S where a value is watched in these units, 1 elsewhere."""
    s, roots = encoder.shape, iter(encoder.shape.variances)
    take = {"root": lambda i: next(roots), "division": lambda i: s.means[i]}
    return np.array([take.get(what, lambda i: 1.0)(i) for what, i in kinds(s)])


def outside(encoder, low, high):
    """Which images leave the intervals of the model."""
    ends = [polynomial.limits(encoder.shape)[what] for what, _ in kinds(encoder.shape)]
    a, b = np.array(ends).T * units_of(encoder)
    return ~((low >= a) & (high <= b)).all(1)


def seen(encoder, tokens):
    """What hardened mode shows of these tokens, (n, taps, r): projected, with the flooding's noise."""
    shape = encoder.shape
    z = [tokens[:, t - 1] @ P.T - c for t, P, c in zip(shape.taps, encoder.projections, encoder.centres, strict=True)]
    z = np.stack(z, 1)
    return z + np.random.default_rng(1).uniform(-1, 1, z.shape) / 700


# ---- adapters --------------------------------------------------------------------------------------------------------


def stacked(config, weights, x):
    """Logits of many adapters at once, each on its own samples: x is (models, n, taps, r)."""

    def layer(z, name):
        return torch.baddbmm(weights[f"{name}.bias"][:, None], z, weights[f"{name}.weight"].transpose(1, 2))

    h = x[:, :, -1]
    for t in range(config.taps if config.bottleneck else 0):
        h = h + config.alpha * layer(F.gelu(layer(x[:, :, t] + h, f"downs.{t}")), f"ups.{t}")
    return layer(h, "head")


def federated(s: Images, values, bottleneck, runs, rounds=ROUNDS):
    """FedAvg of an adapter (or a head), for many runs (owners, Dirichlet, seed, rate) side by side.

    A round is what `models.learner.Learner` does with the defaults of `adapt-model`: two epochs of SGD with momentum at
    every owner, weights averaged by samples. Tested with the weights of the round that validation prefers.
    """
    from cloister.models import adapter

    table, y = torch.as_tensor(values, dtype=torch.float32), torch.from_numpy(s.y)
    made = [adapter.make(adapter.Config(*values.shape[1:], s.labels, bottleneck, seed=seed)) for _, _, seed, _ in runs]
    config, names = made[0].config, [n for n, _ in made[0].named_parameters()]
    theta = {n: torch.stack([m.get_parameter(n).detach() for m in made]) for n in names}
    some = table[: BATCH * len(runs)].reshape(len(runs), -1, *values.shape[1:])
    assert torch.allclose(stacked(config, theta, some)[0], made[0](some[0]), atol=1e-3)
    owners = [
        (r, s.train[at]) for r, (k, alpha, seed, _) in enumerate(runs) for at in split(s.y[s.train], k, alpha, seed)
    ]
    owners.sort(key=lambda o: -len(o[1]))  # who has batches left stands in front
    run, sizes = torch.tensor([r for r, _ in owners]), np.array([len(at) for _, at in owners])
    steps = -(-sizes // BATCH)
    rate = torch.tensor([runs[r][3] for r, _ in owners])
    share = torch.from_numpy(sizes / np.bincount(run.numpy(), sizes)[run.numpy()]).float()
    best = [(-1.0, 0, None)] * len(runs)
    rng = np.random.default_rng(0)
    for t in range(rounds):
        now = [theta[n][run] for n in names]
        moved = [torch.zeros_like(p) for p in now]
        for _ in range(EPOCHS):
            order = np.zeros((len(owners), steps[0] * BATCH), np.int64)
            for row, (_, at) in zip(order, owners, strict=True):
                row[: len(at)] = rng.permutation(at)
            weight = torch.from_numpy(np.arange(order.shape[1]) < sizes[:, None]).float()
            order = torch.from_numpy(order)
            for i in range(steps[0]):
                active, here = int((steps > i).sum()), slice(i * BATCH, (i + 1) * BATCH)
                leaves = [p[:active].requires_grad_() for p in (q.detach() for q in now)]
                at, w = order[:active, here], weight[:active, here]
                logits = stacked(config, dict(zip(names, leaves, strict=True)), table[at])
                each = F.cross_entropy(logits.transpose(1, 2), y[at], reduction="none")
                gradients = torch.autograd.grad(((each * w).sum(1) / w.sum(1)).sum(), leaves)
                with torch.no_grad():
                    for p, g, m in zip(now, gradients, moved, strict=True):
                        m[:active].mul_(0.9).add_(g)
                        p[:active].detach().sub_(rate[:active].view(-1, *[1] * (p.ndim - 1)) * m[:active])
        theta = {
            n: torch.zeros_like(theta[n]).index_add_(0, run, p.detach() * share.view(-1, *[1] * (p.ndim - 1)))
            for n, p in zip(names, now, strict=True)
        }
        for r in range(len(runs)):
            own = {n: p[r : r + 1] for n, p in theta.items()}
            found = scores(stacked(config, own, table[None, s.validation])[0].numpy(), s.y[s.validation])["balanced"]
            if found > best[r][0]:
                test = stacked(config, own, table[None, s.test])[0].numpy()
                best[r] = (found, t + 1, scores(test, s.y[s.test]))
    parameters = sum(p.numel() for p in made[0].parameters())
    return [{"validation": v, "round": t, **found, "parameters": parameters} for v, t, found in best]


GRID = {
    "linear, hardened": [(0, r) for r in (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)],
    "linear, published": [(0, r) for r in (0.003, 0.01, 0.03, 0.1, 0.3)],
    "ours, hardened": list(itertools.product((8, 32), (0.01, 0.02, 0.05, 0.1, 0.2))),
    "ours, published": [(8, r) for r in (0.003, 0.01, 0.03, 0.1)],
}


def choose(s: Images, values, grid, rounds):
    """Bottleneck and rate with the best validation, mean of pooled and five owners at Dirichlet 1, seed 0."""
    found = []
    for bottleneck, rates in itertools.groupby(grid, key=lambda pair: pair[0]):
        runs = [(k, 1.0, 0, rate) for _, rate in rates for k in (1, 5)]
        made = [m["validation"] for m in federated(s, values, bottleneck, runs, rounds)]
        found += [(sum(made[i : i + 2]) / 2, bottleneck, runs[i][3]) for i in range(0, len(runs), 2)]
    return max(found, key=lambda row: row[0])[1:], found


def adapters(args, encoder, name, found_sets, path):
    for s in found_sets:
        cache = None if args.cache is None else args.cache / f"{name}_{s.name}.npz"
        tokens, low, high = features(encoder, s.x, cache)
        left = int(outside(encoder, low, high).sum())
        log({"part": "ranges", "model": name, "set": s.name, "images": len(s.y), "outside": left}, path)
        taps, rounds = seen(encoder, tokens), 10 if args.quick else ROUNDS
        for arm, grid in GRID.items():
            if args.arm not in (None, arm):
                continue
            values = taps if "hardened" in arm else tokens
            values = values[:, -1:] if arm.startswith("linear") else values
            (bottleneck, rate), tried = choose(s, values, grid[1::3] if args.quick else grid, rounds)
            log({"part": "choice", "model": name, "set": s.name, "arm": arm, "bottleneck": bottleneck, "rate": rate,
                 "tried": tried}, path)  # fmt: skip
            runs = [(k, alpha, seed, rate) for (k, alpha), seed in itertools.product(args.splits, range(args.seeds))]
            for (k, alpha, seed, _), made in zip(runs, federated(s, values, bottleneck, runs, rounds), strict=True):
                log({"part": "adapters", "model": name, "set": s.name, "owners": k, "alpha": alpha, "seed": seed,
                     "arm": arm, **made}, path)  # fmt: skip


# ---- full fine-tuning ------------------------------------------------------------------------------------------------


def forward(model, inputs):
    """What a teacher computes, without the penalty's by-products."""
    x = torch.cat([inputs.new_zeros(len(inputs), 1, model.embed.out_features), model.embed(inputs)], 1)
    x = x + model.positions
    for b in model.blocks:
        q, k, v = (t.unflatten(-1, (b.heads, -1)).transpose(1, 2) for t in b.qkv(b.norm1(x)).chunk(3, -1))
        x = x + b.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        x = x + b.down(F.gelu(b.up(b.norm2(x))))
    return model.head(model.final(x[:, 0]))


class Stepper:
    """Adam steps on one flat vector of weights; recorded once as a graph on a GPU, where launching costs more."""

    def __init__(self, teacher, labels, inputs, y) -> None:
        device = inputs.device
        self.model = copy.deepcopy(teacher)
        self.model.head = nn.Linear(teacher.head.in_features, labels).to(device)
        nn.init.zeros_(self.model.head.weight)
        nn.init.zeros_(self.model.head.bias)
        self.inputs, self.y = inputs, y
        weights = list(self.model.parameters())
        self.flat = torch.cat([p.detach().reshape(-1) for p in weights])
        self.grad, self.m, self.v = (torch.zeros_like(self.flat) for _ in range(3))
        start = 0
        for p in weights:
            p.data = self.flat[start : start + p.numel()].view_as(p)
            p.grad = self.grad[start : start + p.numel()].view_as(p)
            start += p.numel()
        self.t, self.rate = (torch.zeros((), device=device) for _ in range(2))
        self.at = torch.zeros(BATCH, dtype=torch.int64, device=device)
        self.weight = torch.ones(BATCH, device=device)
        self.first = self.flat.clone()
        self.graph = self.stream = None
        if device.type == "cuda":
            self.stream = torch.cuda.Stream()
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                for _ in range(3):
                    self._step()
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, stream=self.stream):
                self._step()

    def _step(self) -> None:
        self.grad.zero_()
        each = F.cross_entropy(forward(self.model, self.inputs[self.at]), self.y[self.at], reduction="none")
        ((each * self.weight).sum() / self.weight.sum()).backward()
        with torch.no_grad():
            self.t += 1
            self.m.mul_(0.9).add_(self.grad, alpha=0.1)
            self.v.mul_(0.999).addcmul_(self.grad, self.grad, value=0.001)
            root = (self.v / (1 - 0.999**self.t)).sqrt_().add_(1e-8)
            self.flat.sub_(self.rate * (self.m / (1 - 0.9**self.t)) / root)

    def train(self, theta, at, rng):
        """One epoch over the images at these positions, from θ, with a fresh Adam; yields after every step."""
        self.flat.copy_(theta)
        for state in (self.m, self.v, self.t):
            state.zero_()
        order = rng.permutation(at)
        steps = -(-len(order) // BATCH)
        order = np.concatenate([order, np.zeros(steps * BATCH - len(order), np.int64)]).reshape(steps, BATCH)
        weight = (np.arange(steps * BATCH) < len(at)).astype(np.float32).reshape(steps, BATCH)
        order, weight = (torch.from_numpy(v) for v in (order, weight))
        if self.graph is not None:
            order, weight = (v.pin_memory().to(self.at.device, non_blocking=True) for v in (order, weight))
        for i in range(steps):
            self.at.copy_(order[i])
            self.weight.copy_(weight[i])
            self._step() if self.graph is None else self.graph.replay()
            yield
        return self.flat - theta

    @torch.no_grad()
    def logits(self, theta, at):
        self.flat.copy_(theta)
        at = torch.from_numpy(at).to(self.at.device)
        return torch.cat([forward(self.model, self.inputs[part]) for part in at.split(1000)]).float().cpu().numpy()


def full_run(stepper, s: Images, rate, owners, alpha, seed, rounds):
    """FedAvg of all weights, in single steps; returns what `federated` returns."""
    parts = split(s.y[s.train], owners, alpha, seed)
    theta, best, sizes = stepper.first, (-1.0, 0, None), np.array([len(p) for p in parts])
    rng = np.random.default_rng(seed)
    stepper.rate.fill_(rate)
    for t in range(rounds):
        mean = torch.zeros_like(theta)
        for part, n in zip(parts, sizes, strict=True):
            mean += (yield from stepper.train(theta, s.train[part], rng)) * float(n / sizes.sum())
        theta = theta + mean
        found = scores(stepper.logits(theta, s.validation), s.y[s.validation])["balanced"]
        if found > best[0]:
            best = (found, t + 1, scores(stepper.logits(theta, s.test), s.y[s.test]))
    return {"validation": best[0], "round": best[1], **best[2], "parameters": len(theta)}


def side_by_side(steppers, jobs, done):
    """Run jobs (functions of a stepper that make generators) several at a time, each on its stepper's stream."""
    waiting, running = list(jobs), {}
    while waiting or running:
        for i, stepper in enumerate(steppers):
            if i not in running and waiting:
                key, make = waiting.pop(0)
                running[i] = key, make(stepper)
            if i in running:
                try:
                    with torch.cuda.stream(stepper.stream) if stepper.stream else contextlib.nullcontext():
                        next(running[i][1])
                except StopIteration as stop:
                    done(running.pop(i)[0], stop.value)


def full(args, found_sets, path, rounds):
    """Splits and seeds in order of seeds; after `--limit` seconds no new one is begun."""
    device, began = torch.device("cuda" if torch.cuda.is_available() else "cpu"), time.monotonic()
    teacher = restore(args.weights / "free_teacher.npz").to(device)
    ready = []
    for s in found_sets:
        inputs = student.patches(scaled(torch.from_numpy(s.x)), 4).to(device)
        y = torch.from_numpy(s.y).to(device)
        steppers = [Stepper(teacher, s.labels, inputs, y) for _ in range(8 if device.type == "cuda" else 1)]
        tried = {}

        def keep(key, made, tried=tried):
            tried.setdefault(key[1], []).append(made["validation"])

        rates = (3e-4,) if args.quick else (1e-4, 3e-4, 1e-3)
        jobs = [
            ((k, rate), functools.partial(full_run, s=s, rate=rate, owners=k, alpha=1.0, seed=0, rounds=rounds // 2))
            for k, rate in itertools.product((1, 5), rates if len(rates) > 1 else ())
        ]
        side_by_side(steppers, jobs, keep)
        rate = max(rates, key=lambda r, tried=tried: np.mean(tried.get(r, [0])))
        log({"part": "choice", "set": s.name, "arm": "full fine-tuning", "rate": rate,
             "tried": [(float(np.mean(v)), 0, r) for r, v in tried.items()],
             "seconds": round(time.monotonic() - began, 1)}, path)  # fmt: skip
        ready.append((s, steppers, rate))
    for seed, (s, steppers, rate) in itertools.product(range(args.seeds), ready):
        if time.monotonic() - began > args.limit:
            log({"part": "stopped", "set": s.name, "seed": seed}, path)
            continue

        def keep(key, made, s=s, seed=seed):
            log({"part": "adapters", "model": "teacher", "set": s.name, "owners": key[0], "alpha": key[1],
                 "seed": seed, "arm": "full fine-tuning", **made, "at": round(time.monotonic() - began, 1)},
                path)  # fmt: skip

        side_by_side(steppers, [
            ((k, alpha), functools.partial(full_run, s=s, rate=rate, owners=k, alpha=alpha, seed=seed, rounds=rounds))
            for k, alpha in args.splits
        ], keep)  # fmt: skip


# ---- table 4 ---------------------------------------------------------------------------------------------------------


def step_cost(model, x, y, steps):
    """CPU milliseconds a sample of a training step, and what it holds: weights, gradients, Adam's two, the graph."""
    optimizer, saved = torch.optim.Adam(model.parameters(), lr=1e-3), {}

    def hold(t):
        saved[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(hold, lambda t: t):
        F.cross_entropy(model(x), y).backward()
    own = {p.untyped_storage().data_ptr() for p in model.parameters()} | {x.untyped_storage().data_ptr()}
    parameters = sum(p.numel() for p in model.parameters())
    graph = sum(n for at, n in saved.items() if at not in own)
    began = time.process_time()
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    ms = (time.process_time() - began) / steps / len(x) * 1e3
    size = 4 * 4 * parameters + graph + x.untyped_storage().nbytes()
    whole = ms * ROUNDS  # of a thousand samples, with an epoch a round
    return {"parameters": parameters, "ms a sample": round(ms, 4), "MB": round(size / 1e6, 3),
            "CPU s of all rounds, 1,000 samples": round(whole, 2)}  # fmt: skip


def efficiency(args, path):
    """Steps of 64 samples on one thread; ten labels."""
    from cloister.models import adapter
    from cloister.workflows.adapt_model.packing import cheapest

    torch.set_num_threads(1)
    encoder = polynomial.Encoder.load(args.weights / "student_model.npz")
    s, labels, rng = encoder.shape, 10, torch.Generator().manual_seed(0)
    y = torch.randint(0, labels, (BATCH,), generator=rng)
    for arm, (taps, width), bottleneck in (
        ("linear, hardened", (1, s.rank), 0),
        ("ours, hardened", (len(s.taps), s.rank), 32),
        ("linear, published", (1, s.width), 0),
        ("ours, published", (s.depth, s.width), 8),
    ):
        x = torch.randn(BATCH, taps, width, generator=rng)
        made = adapter.make(adapter.Config(taps, width, labels, bottleneck))
        log({"part": "efficiency", "arm": arm, **step_cost(made, x, y, 20 if args.quick else 200)}, path)

    class Whole(nn.Module):
        def __init__(self, model) -> None:
            super().__init__()
            self.model = model

        def forward(self, x):
            return forward(self.model, x)

    x = torch.randn(BATCH, s.tokens - 1, s.inputs, generator=rng)
    whole = Whole(restore(args.weights / "free_teacher.npz"))
    log({"part": "efficiency", "arm": "full fine-tuning", **step_cost(whole, x, y, 1 if args.quick else 3)}, path)
    crypto = scheme.QUADRATIC if s.attention == "quadratic" else scheme.STANDARD
    asked = cheapest(s, crypto, crypto.slots).price(crypto.slots)
    log({"part": "efficiency", "arm": "asking, once for all trainings", "an owner": asked}, path)


# ---- tables ----------------------------------------------------------------------------------------------------------


def show(rows, out=print):
    """Mean and standard deviation over seeds, by set, split and arm."""
    out("\nset, model, owners, Dirichlet: accuracy (balanced) of " + " | ".join(ARMS))
    kept = {}
    for r in rows:
        if r["part"] == "adapters":
            kept.setdefault((r["set"], r["model"], r["owners"], r["alpha"]), {}).setdefault(r["arm"], []).append(r)
    for (name, model, owners, alpha), arms in kept.items():
        if model == "teacher":
            continue
        arms = arms | kept.get((name, "teacher", owners, alpha), {})
        cells = []
        for arm in ARMS:
            a, b = ([r[k] for r in arms.get(arm, [])] for k in ("accuracy", "balanced"))
            cells.append(f"{np.mean(a):.3f}±{np.std(a):.3f} ({np.mean(b):.3f})" if a else "-")
        out(f"  {name}, {model}, {owners}, {alpha:g}: " + " | ".join(cells))
    sizes = {(r["set"], r["arm"]): r["parameters"] for r in rows if r["part"] == "adapters"}
    out("trainable parameters: " + json.dumps({f"{a}: {b}": n for (a, b), n in sizes.items()}))
    for r in rows:
        if r["part"] in ("ranges", "functions", "efficiency"):
            out("  " + json.dumps(r))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--data", type=Path, default=Path(__file__).parents[2] / "shared" / "data")
    parser.add_argument("--weights", type=Path, default=WEIGHTS)
    parser.add_argument("--part", choices=("adapters", "full", "efficiency", "domains"), action="append", default=None)
    parser.add_argument("--set", choices=("Fashion-MNIST", "PneumoniaMNIST"), default=None, help="one of the two")
    parser.add_argument("--arm", choices=ARMS[:-1], default=None, help="one of them")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--cache", type=Path, default=None, help="folder for features, which take longest")
    parser.add_argument("--log", type=Path, default=None, help="append JSON lines to this file")
    parser.add_argument("--limit", type=float, default=1e9, help="seconds after which `full` begins nothing new")
    parser.add_argument("--show", action="store_true")
    args = parser.parse_args()
    if args.cache:
        args.cache.mkdir(parents=True, exist_ok=True)
    if args.show:
        show([json.loads(line) for line in (args.log or LOG).read_text().splitlines()])
        return
    parts = args.part or (["adapters", "full", "efficiency"] if args.quick else ["adapters", "efficiency", "domains"])
    args.splits = [(1, 100.0), (5, 1.0)] if args.quick else SPLITS
    args.seeds = 1 if args.quick else args.seeds
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    began = time.monotonic()
    path = args.log
    rows_before = 0 if path is None or not path.exists() else len(path.read_text().splitlines())
    kept = []
    if path is None:
        import tempfile

        path = Path(tempfile.mkstemp(suffix=".jsonl")[1])
    found_sets = [] if set(parts) <= {"efficiency"} else sets(args.data, quick=args.quick)
    found_sets = [s for s in found_sets if args.set in (None, s.name)]
    if "adapters" in parts:
        adapters(args, polynomial.Encoder.load(args.weights / "student_model.npz"), "student", found_sets, path)
    if "domains" in parts:
        for name in ("domain", "foreign"):
            if (args.weights / f"{name}_model.npz").exists():
                adapters(args, polynomial.Encoder.load(args.weights / f"{name}_model.npz"), name, found_sets[:1], path)
    if "full" in parts:
        args.splits = args.splits[:1] if args.quick else args.splits
        full(args, found_sets, path, 3 if args.quick else ROUNDS)
    if "efficiency" in parts:
        efficiency(args, path)
    kept = [json.loads(line) for line in path.read_text().splitlines()[rows_before:]]
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{os.cpu_count()} cores"
    print(
        f"\n{platform.machine()}, {device}, one thread, load {os.getloadavg()[0]:.1f}, {time.monotonic() - began:.0f} s"
    )
    show(kept)


if __name__ == "__main__":
    main()
