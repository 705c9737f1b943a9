"""The shipped model, 65 x 192 x 6, encrypted from end to end on a graphics card: images in, predictions out.

    python benchmarks/encoder_gpu.py --data SHARED/data                        the shipped student (quadratic attention)
    python benchmarks/encoder_gpu.py --data SHARED/data --train 60             one tuned to its own images first
    python benchmarks/encoder_gpu.py --data SHARED/data --only Fashion --images 4096
    python benchmarks/encoder_gpu.py --data SHARED/data --intervals            images that leave intervals; no card
    python benchmarks/encoder_gpu.py --quick                                   a tiny random encoder, on the CPU

Owners of Fashion-MNIST and PneumoniaMNIST encrypt their images, the provider computes six blocks, the owners read two
taps of 32 numbers; both roles on the card, messages handed over and counted (`block_gpu.Sides`), answers compared after
every block. Then an adapter is trained on these numbers, by five owners (FedAvg in the clear, as in
`adaptation_images.py`), and beside it on those of the plain student. An adapter that was trained on the plain numbers
labels both: how many labels are the same?

Images on which the plain student leaves its intervals are counted and left out; with `--all` they take part.
With `--train`, the provider tunes its teacher to its own 2,000 images of Fashion-MNIST and distils a student with
quadratic attention, each stage so many seconds. Needs NumPy, PyTorch, CuPy; not numba, except with `--quick`.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import math
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count()))

import numpy as np
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
sys.path.insert(0, str(Path(__file__).parent))

import pretrain_vit as source
from adaptation_images import federated, sets
from block_gpu import Sides, machine, memory
from encoders import tiny

from cloister.errors import ParameterError
from cloister.models import adapter, polynomial, student
from cloister.mpc.crypto.owner_ckks import scheme
from cloister.provider.gpu import cuda_device
from cloister.workflows.adapt_model import block_plan

FEW = 512  # images that the plain student takes at once


# ---- the provider's model --------------------------------------------------------------------------------------------


def trained(data, seconds):
    """A student with quadratic attention, from the shipped teacher and the provider's own images."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    generator = torch.Generator(device=device).manual_seed(0)
    teacher = source.restore(source.WEIGHTS / "teacher.npz").attend_by("quadratic").to(device)
    with np.load(data / "images" / "fashion_mnist_10k.npz") as kept:
        at = source.deal(len(kept["X"]))[0]
        x, y = torch.from_numpy(source.grey(kept["X"][at])), torch.from_numpy(kept["y"][at].astype(np.int64))
    x, y = x.to(device), y.to(device)
    source.settle(teacher, x, y, seconds, 512, generator, name="teacher, quadratic")
    made = source.distil(teacher, x, y, seconds, 512, generator, "student, quadratic").cpu()
    images = source.scaled(x.cpu())
    for name, kept in (
        ("odd", source.outlandish(images, 400, torch.Generator().manual_seed(1))),
        ("own", images[:800]),
    ):
        try:
            return student.export(made, student.patches(kept, 4).double().numpy(), source.CARD, rank=32)
        except ParameterError as e:
            print(f"  calibrated on {name} images: {e}", file=sys.stderr, flush=True)
    raise SystemExit("the student leaves its intervals; train longer")


def plain(encoder, inputs):
    """Taps of the plain student, (n, taps, r), and which samples leave the model's intervals.

    Scores may: where Taylor's exp turns upwards they are weighed wrongly, under encryption as in plain, and stay small.
    """
    found, out = [], []
    allowed = polynomial.limits(encoder.shape) | {"scores": (-math.inf, math.inf)}
    for lo in range(0, len(inputs), FEW):
        part = inputs[lo : lo + FEW]
        bad = np.zeros(len(part), bool)

        def watch(what, _, values, bad=bad):
            flat, (low, high) = np.asarray(values).reshape(len(values), -1), allowed[what]
            bad |= (flat.min(axis=1) < low) | (flat.max(axis=1) > high)

        with np.errstate(all="ignore"):
            found.append(polynomial.taps_of(encoder, polynomial.hidden(encoder, part, watch)))
        out.append(bad)
    return np.concatenate(found), np.concatenate(out)


FAR = {"root": 2.6, "division": 2.0}  # beyond it Newton's and Goldschmidt's steps grow, and a batch is spoilt


def outside(encoder, inputs):
    """By kind of value, how many samples leave its interval, and how many so far that they spoil their batch."""
    allowed, count = polynomial.limits(encoder.shape), {}
    for lo in range(0, len(inputs), FEW):
        part = inputs[lo : lo + FEW]
        bad = {}

        def watch(what, _, values, bad=bad, part=part):
            flat, (low, high) = np.asarray(values).reshape(len(part), -1), allowed[what]
            left = (flat.min(axis=1) < low) | ~(flat.max(axis=1) <= high)
            bad[what] = bad.get(what, False) | left
            if what in FAR:
                bad["spoils"] = bad.get("spoils", False) | ~(flat.max(axis=1) <= FAR[what])

        with np.errstate(all="ignore"):
            polynomial.hidden(encoder, part, watch)
        bad["any"] = np.any([v for k, v in bad.items() if k not in ("scores", "spoils")], axis=0)
        for what, left in bad.items():
            count[what] = count.get(what, 0) + int(left.sum())
    return count


# ---- under encryption ------------------------------------------------------------------------------------------------


def encrypted(sides, encoder, inputs):
    """Taps of up to one batch of samples, as their owner reads them, (n, taps, r)."""
    s, p = encoder.shape, sides.crypto
    planned = block_plan.plan(s, p)
    run = block_plan.circuit_of(s)(s, p, sides.refresh, encoder, sides.ev, planned.openings, sides.pool)
    flat = np.ascontiguousarray(inputs.reshape(len(inputs), -1).T)

    async def whole():
        x, found = await run.embed(sides.encrypted(flat)), []
        for layer in range(s.depth):
            x = await run.block(x, layer, 1 if layer + 1 == s.depth else 0)
            taps = []
            if layer + 1 in s.taps:
                which = s.taps.index(layer + 1)
                y, tap = await run.tap(x, which), block_plan.tap_of(s, p, which)
                taps = [(block_plan.flooded(sides.ev, y, tap, sides.entropy), tap.scale)]
            sides.agree(planned.openings_of(layer))  # before the owner is told
            found += [sides.key.read(c, scale, len(inputs)).T for c, scale in taps]
        return np.stack(found, axis=1)

    return asyncio.run(whole())


def all_encrypted(encoder, crypto, device, inputs):
    """Taps of all samples; figures. One batch warms the card up."""
    rounded = encoder.rounded(crypto.weight_bits)
    sides = Sides(crypto, device)
    keys = sides.hand_keys(block_plan.plan(encoder.shape, crypto).openings)
    found, walls = [], []
    for lo in range(0, len(inputs), crypto.slots):
        began = sides.clock.settle()
        found.append(encrypted(sides, rounded, inputs[lo : lo + crypto.slots]))
        walls.append(sides.clock.settle() - began)
        print(f"  batch of {len(found[-1])}: {walls[-1]:.1f} s", file=sys.stderr, flush=True)
    full = len(walls) * crypto.slots
    return np.concatenate(found), {
        "batches": len(walls), "s_per_batch": round(min(walls), 2),
        "ms_per_sample": round(min(walls) / crypto.slots * 1e3, 3),
        "MB_per_sample": round((sides.traffic["down"] + sides.traffic["up"]) / full / 1e6, 2),
        "MB_switching_keys": round(keys, 2), "peak_GiB": round(memory(device), 1),
        "seconds_by_step": {k: round(v, 2) for k, v in sides.clock.spent.most_common(8)},
    }  # fmt: skip


# ---- predictions -----------------------------------------------------------------------------------------------------


def fitted(taps, y, labels, steps=400):
    """An adapter on these numbers, pooled: what labels both kinds of taps."""
    model = adapter.make(adapter.Config(*taps.shape[1:], labels, 8))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    x, y = torch.as_tensor(taps, dtype=torch.float32), torch.as_tensor(y)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        at = torch.randint(0, len(x), (min(256, len(x)),), generator=generator)
        loss = F.cross_entropy(model(x[at]), y[at])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


@torch.no_grad()
def labels_of(model, taps):
    return model(torch.as_tensor(taps, dtype=torch.float32)).argmax(1).numpy()


def compare(encoder, crypto, found, exact, beyond, y, train, test):
    """How far the encrypted taps are from the plain ones, and how many labels change."""
    bounds = np.array([encoder.shape.tap_bound(n) for n in range(len(encoder.shape.taps))])
    seen = np.abs(found).max(axis=2) > bounds  # (n, taps): what an owner notices
    inside = ~(beyond | seen.any(axis=1))
    train, test = (np.flatnonzero(inside & np.isin(np.arange(len(y)), at)) for at in (train, test))
    model = fitted(exact[train], y[train], int(y.max()) + 1)
    same = labels_of(model, found) == labels_of(model, exact)
    off = (found - exact)[inside]
    return {
        "samples": len(y), "outside_the_intervals": int(beyond.sum()), "noticed_at_a_tap": int(seen.any(axis=1).sum()),
        "tap_error_rms": float(f"{np.sqrt((off**2).mean()):.2e}"), "tap_error_max": float(f"{np.abs(off).max():.2e}"),
        "same_label_test": round(float(same[test].mean()), 5), "same_label_all": round(float(same[inside].mean()), 5),
    }  # fmt: skip


def quick():
    """A tiny encoder of the same kind, on the CPU."""
    for attention, crypto in (("taylor", scheme.SMALL), ("quadratic", scheme.QUADRATIC)):
        encoder, x = tiny(depth=2, taps=(2,), rank=2, attention=attention)
        exact, beyond = plain(encoder.rounded(crypto.weight_bits), x)
        found, figures = all_encrypted(encoder, crypto, "cpu", x)
        y = (exact[:, 0, 0] > 0).astype(np.int64)
        figures |= compare(encoder, crypto, found, exact, beyond, y, np.arange(192), np.arange(192, 256))
        print(json.dumps({"attention": attention, **figures}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="folder that holds images/")
    parser.add_argument("--model", type=Path, default=source.WEIGHTS / "student_model.npz")
    parser.add_argument("--train", type=float, default=0.0, metavar="SECONDS")
    parser.add_argument("--save", type=Path, help="where the trained model goes")
    parser.add_argument("--only", default="", help="Fashion or Pneumonia")
    parser.add_argument("--images", type=int, default=0, help="of each set; default: all")
    parser.add_argument("--all", action="store_true", help="also images on which the model leaves its intervals")
    parser.add_argument("--intervals", action="store_true", help="only count images that leave the model's intervals")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    if args.quick:
        quick()
        return
    if args.intervals:
        encoder = polynomial.Encoder.load(args.model)
        for images in sets(args.data, quick=False):
            some = np.random.default_rng(0).permutation(len(images.y))[: args.images or None]
            x = student.patches(source.scaled(torch.from_numpy(images.x[some])), 4).double().numpy()
            print(json.dumps({"set": images.name, "images": len(x), "outside": outside(encoder, x)}), flush=True)
        return
    cuda_device.check()
    print(f"machine: {machine('gpu')}", flush=True)
    began = time.monotonic()
    encoder = trained(args.data, args.train) if args.train else polynomial.Encoder.load(args.model)
    if args.save:
        encoder.save(args.save, half=True)
    s = encoder.shape
    crypto = scheme.QUADRATIC if s.attention == "quadratic" else scheme.STANDARD
    print(json.dumps({"attention": s.attention, "rounds": len(block_plan.plan(s, crypto).rounds), "s": round(
        time.monotonic() - began, 1)}), flush=True)  # fmt: skip
    for images in sets(args.data, quick=False):
        if not images.name.startswith(args.only):
            continue
        at = np.random.default_rng(0).permutation(len(images.y))[: args.images or None]
        inputs = student.patches(source.scaled(torch.from_numpy(images.x[at])), 4).double().numpy()
        exact, beyond = plain(encoder.rounded(crypto.weight_bits), inputs)
        left = 0 if args.all else int(beyond.sum())
        if left:
            at, inputs, exact, beyond = (v[~beyond] for v in (at, inputs, exact, beyond))
        found, figures = all_encrypted(encoder, crypto, "gpu", inputs)
        figures["left_out"] = left
        parts = [np.flatnonzero(np.isin(at, part)) for part in (images.train, images.validation, images.test)]
        figures |= compare(encoder, crypto, found, exact, beyond, images.y[at], parts[0], parts[2])
        owners = copy.copy(images)
        owners.y, (owners.train, owners.validation, owners.test) = images.y[at], parts
        for name, taps in (("encrypted", found), ("plain", exact)):
            usable = np.clip(np.nan_to_num(taps), -polynomial.TAP_BOUND, polynomial.TAP_BOUND)
            (row,) = federated(owners, usable, 8, [(5, 1.0, 0, 0.01)])
            figures[f"accuracy_five_owners_{name}"] = row["accuracy"]
        print(json.dumps({"set": images.name, **figures}), flush=True)


if __name__ == "__main__":
    main()
