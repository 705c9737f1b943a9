"""Tables 5 and 6 of the paper: exp by degree and division by steps, after one pass of stage 1 of the distillation.

    python benchmarks/approximation.py --quick                  two rows of each table, 32 images
    python benchmarks/approximation.py --train 512 --test 500   a CPU: some eight CPU-minutes on one thread
    python benchmarks/approximation.py                          all 2,000 images of the provider: half an hour, or a GPU
    python benchmarks/approximation.py --images cifar10.npz --weights FOLDER      as it was pre-trained, 10,000 images

The teacher is that of `pretrain_vit.py` (patch 4, 65 tokens, width 192, six blocks) with a head that is fitted to the
provider's part of Fashion-MNIST on its last class token; with `--images`, as it is, on CIFAR-10. For each row:

    attention, hidden   losses of stage 1 (appendix E, 12 and 13), summed over blocks, on test images: first of the
                        teacher's own weights with these functions put in, then after one pass
    accuracy            on test images, after one pass
    kept                megabytes that a batch of eight keeps for the way back
    latency             seconds of a batch of eight, forwards, median of five (CPU seconds, or by the clock on a GPU)
    rounds, opened, MB  of the whole model under encryption, by the plan: round trips, ciphertexts of a batch that are
                        opened, megabytes a sample in batches of 4096, both ways; nothing for exact functions

GELU is the quadratic of the circuit in all rows, LayerNorm is exact; table 5 divides exactly, table 6 has exp of
degree 6.
"""

from __future__ import annotations

import argparse
import copy
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

from pretrain_vit import WEIGHTS, deal, grey, load, restore, scaled

from cloister.models import polynomial, student
from cloister.mpc.crypto.owner_ckks import scheme
from cloister.study import Party
from cloister.workflows.adapt_model import encrypted_inference
from cloister.workflows.adapt_model.block_plan import used

DEGREES = (2, 4, 6, 8, 10, 12, 14, 16, 0)  # 0: exact
STEPS = (2, 4, 6, 7, 8, 10, 12, 16, 0)
EIGHT = 8  # the paper's batch


def approximate(model, inputs, degree, steps, means):
    """Logits, hidden states and scores of a student with exp of a degree and division in so many steps; 0: exact."""
    x = torch.cat([inputs.new_zeros(len(inputs), 1, model.embed.out_features), model.embed(inputs)], 1)
    x = x + model.positions
    hidden, attention = [x], []
    a, b, c = polynomial.GELU
    for block, S in zip(model.blocks, means, strict=True):
        q, k, v = (t.unflatten(-1, (block.heads, -1)).transpose(1, 2) for t in block.qkv(block.norm1(x)).chunk(3, -1))
        s = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        attention.append(s)
        e = polynomial.taylor(s, degree) if degree else s.exp()
        D = e.mean(-1, keepdim=True) / S
        inverse = polynomial.inverse(D, steps) if steps else 1 / D
        o = (e @ v) * inverse / (e.shape[-1] * S)
        x = x + block.out(o.transpose(1, 2).flatten(2))
        u = block.up(block.norm2(x))
        x = x + block.down(a * u * u + b * u + c)
        hidden.append(x)
    return model.head(model.final(x[:, 0])), hidden, attention


def images_of(args):
    """Training and test images as patches, with their labels."""
    if args.images is not None:
        x, y, tx, ty = load(args.images)
    else:
        with np.load(args.data / "images" / "fashion_mnist_10k.npz") as kept:
            own, _, _, test = deal(len(kept["X"]))
            x, tx = (torch.from_numpy(grey(kept["X"][at])) for at in (own, test))
            y, ty = (torch.from_numpy(kept["y"][at].astype(np.int64)) for at in (own, test))
    x, tx = (student.patches(scaled(v[:n]), 4).to(args.device) for v, n in ((x, args.train), (tx, args.test)))
    return x, y[: args.train].to(args.device), tx, ty[: args.test].to(args.device)


@torch.no_grad()
def class_tokens(teacher, x):
    return torch.cat([teacher.final(teacher.trace(part).hidden[-1][:, 0]) for part in x.split(64)])


def fit_head(teacher, x, y):
    """Logistic regression on the teacher's last class token, which stays as it is."""
    with torch.no_grad():
        tokens = class_tokens(teacher, x)
        teacher.head = nn.Linear(tokens.shape[1], int(y.max()) + 1).to(x.device)
    optimizer = torch.optim.LBFGS(teacher.head.parameters(), max_iter=200, line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        loss = F.cross_entropy(teacher.head(tokens), y) + 1e-3 * teacher.head.weight.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)


@torch.no_grad()
def units(teacher, x):
    """S of every block: denominators are divided by two thirds of their largest."""
    _, _, scores = approximate(teacher, x, 0, 0, [1.0] * len(teacher.blocks))
    return [float(s.exp().mean(-1).max()) / 1.5 for s in scores]


@torch.no_grad()
def traced(teacher, parts):
    """The teacher's scores and hidden states by batch, the same for all rows: 0.65 MB an image."""
    made = (teacher.trace(part) for part in parts)
    return [(t.scores, t.hidden) for t in made]


@torch.no_grad()
def judged(model, wanted, x, y, row, means):
    sums = np.zeros(3)
    for part, labels, (scores, states) in zip(x.split(50), y.split(50), wanted, strict=True):
        logits, hidden, attention = approximate(model, part, *row, means)
        sums += np.array([
            sum(float(F.mse_loss(p, q)) for p, q in zip(attention, scores, strict=True)),
            sum(float(F.mse_loss(p, q)) for p, q in zip(hidden, states, strict=True)),
            float((logits.argmax(1) == labels).float().mean()),
        ]) * len(part)  # fmt: skip
    return dict(zip(("attention", "hidden", "accuracy"), (round(float(v), 4) for v in sums / len(x)), strict=True))


def one_pass(teacher, batches, wanted, row, means, rate):
    """Stage 1 over all images once, from the teacher's weights."""
    made = copy.deepcopy(teacher)
    optimizer = torch.optim.Adam(made.parameters(), lr=rate)
    for x, (scores, states) in zip(batches, wanted, strict=True):
        _, hidden, attention = approximate(made, x, *row, means)
        loss = sum(F.mse_loss(p, q) for p, q in zip(hidden, states, strict=True))
        loss = loss + sum(F.mse_loss(p, q) for p, q in zip(attention, scores, strict=True))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(made.parameters(), 1.0)
        optimizer.step()
    return made.eval()


def planned(model, row):
    """Round trips, opened ciphertexts and traffic of the encrypted model; table 5 takes seven steps of division."""
    degree, steps = row
    if not degree:
        return {}
    first, depth = model.blocks[0], len(model.blocks)
    shape = polynomial.Shape(
        len(model.positions), model.embed.in_features, model.embed.out_features, first.heads, first.up.out_features,
        depth, exp_degree=degree, steps=steps or 7, taps=polynomial.default_taps(depth), rank=32,
        variances=(1.0,) * (2 * depth), means=(1.0,) * depth,
    )  # fmt: skip
    found = used(shape, scheme.STANDARD)
    owner, provider = Party("owner"), Party("provider")
    params = encrypted_inference.Params((owner,), provider, shape, scheme.STANDARD, 1)
    total = sum(size for _, size in encrypted_inference.cost(params).values())
    return {"rounds": found["rounds"], "opened": found["ciphertexts"], "mb_a_sample": round(total / 4096e6, 2)}


def cost(model, x, row, means):
    """What a batch of eight keeps for the way back, in MB without the weights, and seconds forwards."""
    kept, x = {}, x[:EIGHT].clone()  # not a view, which would hold all images
    own = {p.data_ptr() for p in model.parameters()}

    def keep(t):
        if t.untyped_storage().data_ptr() not in own:
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        out = approximate(model, x, *row, means)
    seconds = []
    for _ in range(5):
        if x.is_cuda:
            torch.cuda.synchronize()
        began = time.perf_counter() if x.is_cuda else time.process_time()
        with torch.no_grad():
            approximate(model, x, *row, means)
        if x.is_cuda:
            torch.cuda.synchronize()
        seconds.append((time.perf_counter() if x.is_cuda else time.process_time()) - began)
    del out
    return {"kept_mb": round(sum(kept.values()) / 1e6, 1), "latency_s": round(float(np.median(seconds)), 4)}


def logged(args):
    """Rows that the log has at this size already."""
    if args.log is None or not args.log.exists():
        return set()
    kept = [json.loads(line) for line in args.log.read_text().splitlines()]
    return {(r["table"], r["degree"], r["steps"]) for r in kept if (r["train"], r["test"]) == (args.train, args.test)}


def show(rows):
    """Both tables as the page has them, the exact functions last; of a row at several sizes, the largest."""
    largest = {}
    for r in sorted(rows, key=lambda r: r["train"]):
        largest[r["table"], r["degree"], r["steps"]] = r
    rows = [*largest.values()]
    columns = (
        "images",
        "attention before, after",
        "hidden before, after",
        "accuracy before, after",
        "kept, MB",
        "seconds forwards",
    )
    last = [r for r in rows if r["table"] == 5 and r["degree"] == 6]  # exact division under degree 6
    for title, key, of in (("exp degree", "degree", [r for r in rows if r["table"] == 5]),
                           ("division steps", "steps", [r for r in rows if r["table"] == 6] + last)):  # fmt: skip
        print(f"\n| {' | '.join((title, *columns))} |\n|{'---|' * (len(columns) + 1)}")
        for r in sorted(of, key=lambda r, key=key: r[key] or math.inf):
            pairs = (f"{r[f'{k}_before']:.3f}, {r.get(k, math.nan):.3f}" for k in ("attention", "hidden", "accuracy"))
            print(f"| {' | '.join(map(str, (r[key] or 'exact', r['train'], *pairs, r['kept_mb'], r['latency_s'])))} |")
    print("\nunder encryption, by the plan: exp degree, steps: round trips, ciphertexts opened, MB a sample")
    for r in rows:
        if "rounds" in r:
            print(f"{r['degree']}, {r['steps'] or 7}: {r['rounds']}, {r['opened']}, {r['mb_a_sample']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--data", type=Path, default=Path(__file__).parents[2] / "shared" / "data")
    parser.add_argument("--images", type=Path, default=None, help="of `pretrain_vit.py --make-data`: CIFAR-10")
    parser.add_argument("--weights", type=Path, default=WEIGHTS)
    parser.add_argument("--train", type=int, default=None, help="images of the one pass; 2,000, or 10,000 of CIFAR-10")
    parser.add_argument("--test", type=int, default=1000)
    parser.add_argument("--degrees", type=int, nargs="*", default=DEGREES, help="rows of table 5; 0: exact")
    parser.add_argument("--steps", type=int, nargs="*", default=STEPS, help="rows of table 6; 0: exact")
    parser.add_argument("--untrained", action="store_true", help="without the pass: what functions do, and all costs")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rate", type=float, default=1e-4)
    parser.add_argument("--log", type=Path, default=None, help="append rows to this file that it has not yet")
    parser.add_argument("--show", type=Path, default=None, metavar="LOG", help="print the tables of a log, no more")
    args = parser.parse_args()
    if args.show is not None:
        show([json.loads(line) for line in args.show.read_text().splitlines()])
        return
    degrees, steps = args.degrees, args.steps
    if args.quick:
        args.train, args.test, degrees, steps = 32, 32, (2, 16), (2, 7)
    args.train = args.train or (10_000 if args.images else 2_000)
    args.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    began = time.perf_counter()
    x, y, tx, ty = images_of(args)
    teacher = restore(args.weights / "teacher.npz").to(args.device)
    if args.images is None:
        fit_head(teacher, x, y)
    with torch.no_grad():
        right = float((teacher.head(class_tokens(teacher, tx)).argmax(1) == ty).float().mean())
    means = units(teacher, tx[:100])
    name = torch.cuda.get_device_name() if x.is_cuda else f"{platform.machine()}, {torch.get_num_threads()} thread(s)"
    print(
        f"{name}; {len(x)} images, batches of {args.batch}, rate {args.rate:g}; {len(tx)} test images; "
        f"teacher {right:.3f}"
    )
    rows = [(5, (d, 0)) for d in degrees] + [(6, (6, k)) for k in steps if k or 6 not in degrees]
    rows = [(table, row) for table, row in rows if (table, *row) not in logged(args)]
    batches = x[torch.randperm(len(x), generator=torch.Generator().manual_seed(0)).to(x.device)].split(args.batch)
    wanted, judge = [] if args.untrained else traced(teacher, batches), traced(teacher, tx.split(50))
    for table, row in rows:
        before = judged(teacher, judge, tx, ty, row, means)
        found = {"table": table, "degree": row[0], "steps": row[1]} | {f"{k}_before": v for k, v in before.items()}
        if not args.untrained:
            found |= judged(one_pass(teacher, batches, wanted, row, means, args.rate), judge, tx, ty, row, means)
        found |= cost(teacher, tx, row, means) | planned(teacher, row)
        print(json.dumps(found), flush=True)
        if args.log is not None:
            with args.log.open("a") as file:
                file.write(json.dumps(found | {"train": len(x), "test": len(tx), "machine": name}) + "\n")
    print(f"{time.perf_counter() - began:.0f} s, load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
