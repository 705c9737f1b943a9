"""A small classifier on embeddings: linear layers with GELU and dropout between them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from cloister.errors import ParameterError
from cloister.models.learner import Dropout


@dataclass(frozen=True)
class Config:
    inputs: int  # numbers per cell
    labels: int  # K
    hidden: tuple[int, ...] = (128,)
    dropout: float = 0.1

    def __post_init__(self) -> None:
        if min((self.inputs, *self.hidden)) < 1 or self.labels < 2 or not 0 <= self.dropout < 1:
            raise ParameterError("an MLP needs inputs, widths of at least 1, two labels, and a dropout in [0, 1)")


class Mlp(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        body: list[nn.Module] = []
        width = config.inputs
        for wide in config.hidden:
            body += [nn.Linear(width, wide), nn.GELU(), Dropout(config.dropout)]
            width = wide
        self.body, self.head = nn.Sequential(*body), nn.Linear(width, config.labels)

    def features(self, x: Tensor) -> Tensor:
        return self.body(x)  # (b, last hidden width)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))  # (b, K)
