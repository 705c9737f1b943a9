"""Make benchmarks/weights/cell_encoder.npz: a provider's encoder of lung cells, 200 genes, width 128, two blocks.

    python benchmarks/pretrain_cells.py            about three CPU-minutes on one thread
    python benchmarks/pretrain_cells.py --check    ranges of the file that is there on the hospitals' cells

The provider has the 1,000 cells of Tabula Sapiens in `lung_ts_vs_hlca.h5ad`. The three donors of the other study in
that file, HLCA, are the hospitals of `adaptation.py --only cells`; nothing was chosen by looking at them. A token is 25
genes of the panel, 50 numbers (values and squares). Each cell comes three times, once as it is and twice with its
counts thinned, since other studies have sequenced less. Attention is quadratic; weights are stored in float16, and the
ranges checked again after that.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

OUT = Path(__file__).parent / "weights" / "cell_encoder.npz"
GENES, PER_TOKEN, WIDTH, HEADS, DEPTH, RANK = 200, 25, 128, 4, 2, 32
HOSPITALS = ("LCA1", "LCA2", "LCA3")


def lung(folder: Path):
    """The provider's cells, and those of three hospitals; counts, with `cell_type` of the coarse kinds."""
    import anndata

    a = anndata.read_h5ad(folder / "scrna" / "lung_ts_vs_hlca.h5ad")
    a.obs["cell_type"] = a.obs["cell_type_coarse"].astype(str)
    own = (a.obs["study"] == "TabulaSapiens").to_numpy()
    return a[own].copy(), {d.lower(): a[(a.obs["donor"] == d).to_numpy()].copy() for d in HOSPITALS}


def panel(adata, count: int) -> list[str]:
    """In turn for each type of at least ten cells the gene that tells it best from all others and is not there yet."""
    x = np.asarray(adata.X.todense(), float)
    x = np.log1p(x / np.maximum(x.sum(axis=1, keepdims=True), 1) * 1e4)
    kinds, names = adata.obs["cell_type"].to_numpy(), [str(n) for n in adata.var_names]
    orders = []
    for kind in [k for k in np.unique(kinds) if (kinds == k).sum() >= 10]:
        own, rest = x[kinds == kind], x[kinds != kind]
        apart = (own.mean(0) - rest.mean(0)) / np.sqrt(own.var(0) + rest.var(0) + 1e-1)
        orders.append(iter(np.argsort(-apart, kind="stable")))
    found: list[str] = []
    while len(found) < count:
        for order in orders:
            found.append(next(names[i] for i in order if names[i] not in found))
    return found[:count]


def thinned(adata, rng):
    """The same cells, as if each had been sequenced less."""
    other = adata.copy()
    counts = np.asarray(adata.X.todense()).astype(np.int64)
    other.X = rng.binomial(counts, rng.uniform(0.2, 1.0, (len(counts), 1))).astype(np.float32)
    return other


def train(own, out: Path, epochs: int) -> None:
    """Teacher and student of these cells' types, exported with a panel of their genes."""
    import torch

    from cloister.models import polynomial, student
    from cloister.workflows.adapt_model.inference import inputs_of

    torch.set_num_threads(1)
    torch.manual_seed(0)
    card = {"kind": "cells", "genes": panel(own, GENES), "per_token": PER_TOKEN, "target": 2000.0, "unit": 6.0}
    rng, kinds = np.random.default_rng(0), own.obs["cell_type"].to_numpy()
    x = np.concatenate([inputs_of(a, card) for a in (own, thinned(own, rng), thinned(own, rng))])
    labels = sorted(set(kinds))
    y = torch.tensor([labels.index(k) for k in kinds] * 3)
    inputs = torch.as_tensor(x, dtype=torch.float32)
    teacher = student.Transformer(
        GENES // PER_TOKEN + 1, 2 * PER_TOKEN, WIDTH, HEADS, 2 * WIDTH, DEPTH, len(labels), "pre", "gelu"
    ).attend_by("quadratic")
    torch.nn.init.normal_(teacher.positions, 0, 0.5)
    began = time.process_time()
    recipe = student.Recipe(epochs=epochs, rate=1e-3, last_rate=3e-4, batch_size=64)
    student.tune_teacher(teacher, inputs, y, recipe)
    right = [float((teacher(inputs[: own.n_obs]).argmax(1) == y[: own.n_obs]).float().mean())]
    print(f"teacher: {right[0]:.3f} of its own cells, {time.process_time() - began:.0f} CPU-s", flush=True)
    made, _ = student.distil(teacher, inputs, y, recipe)
    right.append(float((made(inputs[: own.n_obs]).argmax(1) == y[: own.n_obs]).float().mean()))
    print(f"student: {right[1]:.3f}, {time.process_time() - began:.0f} CPU-s", flush=True)
    student.export(made, x, card, rank=RANK).save(out, half=True)
    again = polynomial.Encoder.load(out)
    polynomial.check_ranges(again, x)
    print(f"{out.name}: {out.stat().st_size / 1e3:.0f} kB, {GENES} genes, width {WIDTH}, {DEPTH} blocks")


def main() -> None:
    from cloister.models import polynomial
    from cloister.workflows.adapt_model.inference import inputs_of

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=Path(__file__).parents[2] / "shared" / "data")
    parser.add_argument("--epochs", type=int, default=14)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    own, hospitals = lung(args.data)
    if args.check:
        encoder = polynomial.Encoder.load(args.out)
        ranges = polynomial.Ranges()
        for a in hospitals.values():
            polynomial.hidden(encoder, inputs_of(a, encoder.card), ranges)
        print(ranges.seen)
        return
    train(own, args.out, args.epochs)


if __name__ == "__main__":
    main()
