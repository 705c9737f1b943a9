"""Make src/cloister/data/lung_encoder.npz: a provider's small encoder for the demo of `adapt-model`.

Trained on the cells of the demo's site basel, which the provider is said to own: a panel of eight genes, one for each
of its most frequent cell types, two post-norm blocks of width eight. Takes a minute on one core; nothing was chosen
by looking at the other sites.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

import cloister as cl
from cloister.models import student
from cloister.workflows.adapt_model.inference import inputs_of

OUT = Path(__file__).parents[1] / "src" / "cloister" / "data" / "lung_encoder.npz"
GENES, WIDTH, DEPTH = 8, 8, 2


def panel(log_values: np.ndarray, kinds: np.ndarray, names: list[str]) -> list[str]:
    """For each frequent type the gene that tells it best from all others."""
    found: list[str] = []
    types, counts = np.unique(kinds, return_counts=True)
    for kind in types[np.argsort(-counts, kind="stable")]:
        own, rest = log_values[kinds == kind], log_values[kinds != kind]
        order = np.argsort(-(own.mean(0) - rest.mean(0)) / np.sqrt(own.var(0) + rest.var(0) + 1e-3), kind="stable")
        found.append(next(names[i] for i in order if names[i] not in found))
        if len(found) == GENES:
            break
    return found


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    adata = cl.demo_sites()["basel"]
    counts = np.asarray(adata.X.todense(), dtype=float)
    logs = np.log1p(counts / np.maximum(counts.sum(axis=1, keepdims=True), 1) * 1e3)
    kinds = adata.obs["cell_type"].astype(str).to_numpy()
    labels = sorted(set(kinds))
    card = {"kind": "cells", "genes": panel(logs, kinds, list(adata.var_names)), "target": 1000.0, "unit": 7.0}
    x = inputs_of(adata, card)
    inputs, wanted = torch.tensor(x, dtype=torch.float32), torch.tensor([labels.index(k) for k in kinds])
    teacher = student.Transformer(GENES + 1, 2, WIDTH, 2, 2 * WIDTH, DEPTH, len(labels), "post", "relu", 2)
    torch.nn.init.normal_(teacher.positions, 0, 0.5)
    recipe = student.Recipe(epochs=60, rate=3e-3, last_rate=1e-3)
    student.tune_teacher(teacher, inputs, wanted, recipe)
    made, _ = student.distil(teacher, inputs, wanted, recipe)
    right = float((made(inputs).argmax(1) == wanted).float().mean())
    student.export(made, x, card, rank=4, steps=4, root_steps=4, taps=(DEPTH,)).save(OUT)
    print(f"{OUT.name}: {', '.join(card['genes'])}; {right:.1%} of its own training cells right")


if __name__ == "__main__":
    main()
