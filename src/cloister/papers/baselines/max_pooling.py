"""CellCnn as published [AC17], in PyTorch: the clear, pooled baseline that encrypted training is compared with.

Filters over single cells with ReLU, max pooling over the cells of an input, dense layer with softmax, cross entropy
with small L1 and L2 penalties, Adam.

References
----------
[AC17] Arvaniti, Claassen, Nature Communications 2017, and its public code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cloister.errors import MissingExtra


@dataclass(frozen=True)
class Config:
    filters: int = 8
    classes: int = 2
    epochs: int = 20
    batch: int = 200
    learning_rate: float = 0.005
    penalty: float = 1e-4
    seed: int = 0


def train(inputs: Any, labels: Any, config: Config) -> Any:
    """Train on multi-cell inputs (n, c, m); returns a function from such inputs to classes."""
    try:
        import torch
    except ImportError:
        raise MissingExtra("torch", "models") from None
    made = torch.Generator().manual_seed(config.seed)
    X = torch.as_tensor(np.asarray(inputs), dtype=torch.float32)  # (n, c, m)
    y = torch.as_tensor(np.asarray(labels), dtype=torch.long)
    m, h, o = X.shape[2], config.filters, config.classes
    W = torch.empty(m, h).uniform_(-1, 1, generator=made) * (6 / (m + h)) ** 0.5  # (m, h)
    V = torch.empty(h, o).uniform_(-1, 1, generator=made) * (6 / (h + o)) ** 0.5  # (h, o)
    weights = [W, torch.zeros(h), V, torch.zeros(o)]
    for w in weights:
        w.requires_grad_(True)  # noqa: FBT003
    optimiser = torch.optim.Adam(weights, lr=config.learning_rate)

    def forward(x: Any) -> Any:
        cells = torch.relu(x @ weights[0] + weights[1])  # (n, c, h)
        return cells.amax(dim=1) @ weights[2] + weights[3]  # (n, o)

    for _ in range(config.epochs):
        order = torch.randperm(len(X), generator=made)
        for start in range(0, len(X), config.batch):
            at = order[start : start + config.batch]
            loss = torch.nn.functional.cross_entropy(forward(X[at]), y[at])
            loss = loss + config.penalty * sum(w.abs().sum() + (w**2).sum() for w in (weights[0], weights[2]))
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()

    def predict(new: Any) -> Any:
        with torch.no_grad():
            x = torch.as_tensor(np.asarray(new), dtype=torch.float32)
            return torch.cat([forward(part) for part in x.split(500)]).argmax(dim=1).numpy()

    return predict
