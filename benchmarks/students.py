"""Students with quadratic attention beside students with Taylor's softmax, and both beside their free teacher.

    python benchmarks/students.py --images cifar10.npz --data SHARED/data --out FOLDER     ten minutes of a large GPU
    python benchmarks/students.py --quick                                                  noise for images, a CPU

One teacher (`pretrain_vit.py`: 65 tokens, width 192, 6 blocks) is trained on CIFAR-10 without limits. Then for each
kind of attention and each seed a student is made, all at the same time and for the same seconds: the teacher's copy is
tuned within the intervals, the student follows its layers, then the *free* teacher's predictions and the labels. Right
on 4,000 test images of CIFAR-10; and, on class tokens after blocks 3 and 6, an adapter that is trained on all training
images of Fashion-MNIST and PneumoniaMNIST, balanced accuracy. Lines of JSON; the last is the table.
"""

from __future__ import annotations

import argparse
import copy
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).parent))

import pretrain_vit as source

from cloister.models import adapter, polynomial, student

SHARES = {
    "teacher": 0.24,
    "within": 0.06,
    "student": 0.60,
}  # of the seconds; the rest for too wide a range
TAPS = (3, 6)


def device():
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def begin(seed):
    torch.manual_seed(seed)
    torch.set_float32_matmul_precision("high")
    return torch.Generator(device=device()).manual_seed(seed)


def make_teacher(args):
    x, y, tx, ty = (v.to(device()) for v in source.load(args.images))
    size = min(args.batch, len(x) // 2)
    free = source.teach(x, y, args.width, args.depth, args.seconds * SHARES["teacher"], size, begin(0))
    source.save(free, args.out / "free.npz", digits="float16")
    print(json.dumps({"teacher, free": source.accuracy(free, tx, ty)}), flush=True)


def make_student(args, attention, seed):
    x, y, tx, ty = (v.to(device()) for v in source.load(args.images))
    size, generator = min(args.batch, len(x) // 2), begin(seed)
    free = source.restore(args.out / "free.npz").to(device())
    teacher = copy.deepcopy(free).attend_by(attention).to(device())
    name = f"{attention}, seed {seed}"
    source.settle(teacher, x, y, args.seconds * SHARES["within"], size, generator, name=f"{name}: within the intervals")
    made = source.distil(teacher, x, y, args.seconds * SHARES["student"], size, generator, name, guide=free)
    source.save(made, args.out / f"{attention}-{seed}.npz", digits="float16")
    row = {"attention": attention, "seed": seed, "CIFAR-10": source.accuracy(made, tx, ty)}
    odd = source.outlandish(source.scaled(tx), min(1000, len(tx) // 2), generator)
    row["spans"] = source.spans(made, odd)
    for which, images in owners(args).items():
        row[which] = adapted(made, images, seed)
    print(json.dumps(row), flush=True)


# ---- owners' images --------------------------------------------------------------------------------------------------


def owners(args):
    """Training and test images with labels, as bytes in three channels; noise where there is no data."""
    if args.data is None:
        x, y, tx, ty = source.load(None)
        return {"noise": (x, y, tx, ty)}
    with np.load(args.data / "images" / "fashion_mnist_10k.npz") as kept:
        _, train, _, test = source.deal(len(kept["X"]))
        fashion = [source.grey(kept["X"][train]), kept["y"][train], source.grey(kept["X"][test]), kept["y"][test]]
    with np.load(args.data / "images" / "pneumoniamnist_28.npz") as kept:
        names = ("train_images", "train_labels", "test_images", "test_labels")
        x, y, tx, ty = (kept[n] for n in names)
        pneumonia = [source.grey(x), y.ravel(), source.grey(tx), ty.ravel()]
    return {
        name: [torch.from_numpy(np.asarray(v, np.int64 if v.ndim == 1 else np.uint8)) for v in rows]
        for name, rows in {"Fashion-MNIST": fashion, "PneumoniaMNIST": pneumonia}.items()
    }


@torch.no_grad()
def tokens(made, images):
    """Class tokens after the blocks of TAPS, of mean 0 and deviation 1 as an owner would scale them."""
    at = [min(t, len(made.blocks)) - 1 for t in TAPS]
    found = [
        torch.stack([made.trace(student.patches(source.scaled(part.to(device())), 4)).hidden[i][:, 0] for i in at], 1)
        for part in images.split(500)
    ]
    return torch.cat(found)


def adapted(made, images, seed, steps=1500):
    """Balanced and plain accuracy on test images of an adapter that was trained on all training images."""
    x, y, tx, ty = images
    values, test = tokens(made, x), tokens(made, tx)
    mean, deviation = values.mean(0), values.std(0) + 1e-6
    values, test, y = (values - mean) / deviation, (test - mean) / deviation, y.to(device())
    torch.manual_seed(seed)
    labels = int(y.max()) + 1
    model = adapter.make(adapter.Config(values.shape[1], values.shape[2], labels, 16)).to(device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    rate = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    counts = torch.bincount(y, minlength=labels)
    for _ in range(steps):
        at = torch.randint(0, len(y), (256,), device=y.device)
        loss = F.cross_entropy(model(values[at]), y[at], weight=len(y) / (labels * counts.float()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rate.step()
    with torch.no_grad():
        right = (model.eval()(test).argmax(1).cpu() == ty).numpy()
    per_class = [right[ty.numpy() == k].mean() for k in range(labels)]
    return {"accuracy": round(float(right.mean()), 4), "balanced": round(float(np.mean(per_class)), 4)}


# ---- all of them -----------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=Path, default=None, help="of `pretrain_vit.py --make-data`")
    parser.add_argument("--data", type=Path, default=None, help="folder that holds images/")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--seconds", type=float, default=540.0, help="for everything")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--attention", nargs="+", choices=polynomial.ATTENTION, default=list(polynomial.ATTENTION))
    parser.add_argument("--teacher", action="store_true", help="take the teacher that is in FOLDER")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--student", nargs=2, default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.width, args.depth, args.batch = (48, 3, 64) if args.quick else (192, 6, 1024)
    if args.quick:
        args.seconds, args.seeds = 30.0, 1
    if args.student:
        make_student(args, args.student[0], int(args.student[1]))
        return
    with tempfile.TemporaryDirectory() as scratch:
        args.out = args.out or Path(scratch)
        args.out.mkdir(parents=True, exist_ok=True)
        all_students(args)


def all_students(args) -> None:
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(json.dumps({"machine": where, "seconds": args.seconds, "side by side": args.seeds * len(args.attention)}))
    if not args.teacher:
        make_teacher(args)
    began = time.monotonic()
    words = [sys.executable, __file__, "--out", str(args.out), "--seconds", str(args.seconds)]
    words += ["--quick"] if args.quick else []
    for name in ("images", "data"):
        words += [f"--{name}", str(getattr(args, name))] if getattr(args, name) is not None else []
    runs = [
        subprocess.Popen([*words, "--student", kind, str(seed)], stdout=subprocess.PIPE, text=True)
        for kind in args.attention
        for seed in range(args.seeds)
    ]
    said = [line for run in runs for line in run.communicate()[0].splitlines()]
    print("\n".join(said))
    if any(run.returncode for run in runs):
        raise SystemExit("a student could not be made")
    rows = [row for line in said if "seed" in (row := json.loads(line))]
    table = {"students, s": round(time.monotonic() - began)}
    for kind in args.attention:
        mine = [row for row in rows if row["attention"] == kind]
        sets = {key: [row[key] for row in mine] for key in mine[0] if key not in ("attention", "seed", "spans")}
        for key, found in sets.items():
            values = [v if isinstance(v, float) else v["balanced"] for v in found]
            table[f"{kind}, {key}"] = f"{np.mean(values):.3f} ± {np.std(values):.3f}"
    print(json.dumps(table), flush=True)


if __name__ == "__main__":
    main()
