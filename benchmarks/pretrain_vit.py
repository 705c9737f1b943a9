"""The provider's model of `adaptation.py`: a ViT trained on CIFAR-10, distilled into its student, exported.

    python benchmarks/pretrain_vit.py --images cifar10_subset.npz --out vit_cifar10.npz       minutes on a GPU
    python benchmarks/pretrain_vit.py --quick --out vit.npz                                   noise, seconds of training

On a slow machine `--quick` shows the steps and ends in a refusal: the student is not trained enough for its intervals.
The GPU run itself has not been made yet, and no weights are shipped.
The images are the file that `training_images.py --make-data` cuts (16,000 + 4,000). Patch 4, 65 tokens, width 192.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from cloister.errors import ParameterError
from cloister.models import polynomial, student, vit
from cloister.models.learner import init_weights

CARD = {"kind": "images", "height": 32, "width": 32, "channels": 3, "patch": 4, "mean": 0.5, "std": 0.5}


def load(path: Path | None, device: str):
    if path is None:
        rng = np.random.default_rng(0)
        y = np.arange(600) % 10
        x = (rng.integers(0, 255, (10, 3072))[y] * 0.5 + rng.integers(0, 128, (600, 3072))).astype(np.uint8)
        parts = [(x[:500], y[:500]), (x[500:], y[500:])]
    else:
        kept = np.load(path)
        undo = [np.cumsum(kept[n], axis=1, dtype=np.uint8) for n in ("diff", "test_diff")]
        parts = [(undo[0], kept["y"]), (undo[1], kept["test_y"])]
    out = []
    for x, y in parts:
        images = torch.from_numpy(x.reshape(-1, 32, 32, 3)).permute(0, 3, 1, 2).float().div(255).sub(0.5).div(0.5)
        out += [images.to(device), torch.from_numpy(y.astype(np.int64)).to(device)]
    return out


def augment(x, generator):
    n = len(x)
    flip = torch.rand(n, generator=generator, device=x.device) < 0.5
    x = torch.where(flip[:, None, None, None], x.flip(-1), x)
    padded = F.pad(x, (4, 4, 4, 4), mode="reflect")
    dy, dx = (torch.randint(0, 9, (n,), generator=generator, device=x.device) for _ in range(2))
    span = torch.arange(32, device=x.device)
    which = torch.arange(n, device=x.device)[:, None, None]
    return padded.permute(0, 2, 3, 1)[which, (dy[:, None] + span)[:, :, None], (dx[:, None] + span)[:, None]].permute(
        0, 3, 1, 2
    )


def accuracy(model, x, y):
    with torch.no_grad():
        found = torch.cat([model(part).argmax(1) for part in x.split(500)])
    return float((found == y).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=Path, default=None)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=120.0, help="for the teacher; as long again for the student")
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    if args.quick:
        args.seconds, args.width, args.depth = 5.0, 48, 3
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = True
    x, y, tx, ty = load(args.images, device)
    config = vit.Config(3, 32, 10, patch=4, width=args.width, depth=args.depth, heads=3, dropout=0.0)
    model = vit.Vit(config)
    init_weights(model, 0)
    with torch.no_grad():
        model.positions.normal_(0, 0.3)
        model.token.normal_(0, 0.3)
    model.to(device)
    generator = torch.Generator(device=device).manual_seed(0)
    teacher = _teach(model, x, y, args.seconds, generator)
    patched, tested = student.patches(x, 4), student.patches(tx, 4)
    print(json.dumps({"teacher_accuracy": accuracy(teacher, tested, ty)}), flush=True)
    made = _distil(teacher, x, y, args.seconds, generator)
    figures = {"student_accuracy": accuracy(made, tested, ty), "seconds": args.seconds, "width": args.width}
    auxiliary = torch.cat([patched[:384], tested[:128]]).cpu().double().numpy()
    made = made.cpu()
    try:
        encoder = student.export(made, auxiliary, CARD, rank=args.rank)
    except ParameterError as e:
        sys.exit(f"refused after {args.seconds:g} s of training each: {e}")
    encoder = dataclasses.replace(encoder, card=CARD | {"trained_on": "CIFAR-10, 16,000 images"})
    encoder.save(args.out)
    figures |= {"bytes": args.out.stat().st_size, "taps": encoder.shape.taps, "x_bound": encoder.shape.x_bound}
    seen = polynomial.Ranges()
    polynomial.hidden(encoder, tested[128:256].cpu().double().numpy(), seen)
    for what in ("scores", "division", "root"):
        rows = [v for (kind, _), v in seen.seen.items() if kind == what]
        figures[what] = [min(a for a, _ in rows), max(b for _, b in rows)]
    print(json.dumps(figures), flush=True)


def _teach(model, x, y, seconds, generator):
    steps, began, size = 0, time.monotonic(), min(256, len(x) // 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    model.train()
    while (share := (time.monotonic() - began) / seconds) < 1 or not steps:
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * min(1.0, steps / 200 + 0.01) * max(0.01, 1 - share)
        at = torch.randint(0, len(x), (size,), generator=generator, device=x.device)
        with torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda):
            loss = F.cross_entropy(model(augment(x[at], generator)), y[at], label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        steps += 1
    print(json.dumps({"teacher_steps": steps, "loss": float(loss.detach())}), flush=True)
    return student.from_vit(model.eval()).to(x.device)


def _distil(teacher, x, y, seconds, generator):
    """The two stages of `student.distil`, by the clock and on augmented images."""
    made = student.copy.deepcopy(teacher)
    made.exact = False
    size = min(256, len(x) // 2)
    for stage, rate in (("layers", 5e-4), ("prediction", 1e-4)):
        optimizer, began, steps = torch.optim.Adam(made.parameters(), lr=rate), time.monotonic(), 0
        while (share := (time.monotonic() - began) / (seconds / 2)) < 1 or not steps:
            for group in optimizer.param_groups:
                group["lr"] = rate * max(0.02, 1 - share)
            at = torch.randint(0, len(x), (size,), generator=generator, device=x.device)
            inputs = student.patches(augment(x[at], generator), 4)
            with torch.no_grad():
                wanted = teacher.trace(inputs)
            found = made.trace(inputs)
            if stage == "layers":
                loss = sum(F.mse_loss(a, b) for a, b in zip(found.hidden, wanted.hidden, strict=True))
                loss = loss + sum(
                    F.mse_loss(a, b.clamp(-3.2, 3.2)) for a, b in zip(found.scores, wanted.scores, strict=True)
                )
            else:
                loss = 25 * F.kl_div(
                    (found.logits / 5).log_softmax(-1), (wanted.logits / 5).log_softmax(-1), log_target=True,
                    reduction="batchmean",
                )  # fmt: skip
                loss = loss + F.cross_entropy(found.logits, y[at])
            loss = loss + 10 * found.penalty + 10 * _extremes(found)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(made.parameters(), 1.0)
            optimizer.step()
            steps += 1
        print(
            json.dumps({stage: float(loss.detach()), "penalty": float(found.penalty.detach()), "steps": steps}),
            flush=True,
        )
    return made.eval()


def _extremes(found):
    """The single worst score of every block: a mean would let it pass, the range check will not."""
    return sum(F.relu(s.abs().amax() - 2.8) for s in found.scores)


if __name__ == "__main__":
    main()
