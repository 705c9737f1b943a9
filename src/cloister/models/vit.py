"""A small vision transformer: patches, a class token, learned positions, pre-norm blocks [DBK+21]."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cloister.errors import ParameterError
from cloister.models.learner import Dropout


@dataclass(frozen=True)
class Config:
    channels: int
    side: int  # height and width of the images
    labels: int  # K
    patch: int = 4
    width: int = 64  # d
    depth: int = 4
    heads: int = 4
    dropout: float = 0.1

    def __post_init__(self) -> None:
        if self.side % self.patch or self.width % self.heads or self.labels < 2 or self.depth < 1:
            raise ParameterError(
                f"a ViT needs a side ({self.side}) that is a multiple of the patch ({self.patch}), a width that is one "
                "of the heads, and two labels"
            )


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        d = config.width
        self.heads = config.heads
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)
        self.dropout = Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1)
        )  # (b, heads, n, d / heads)
        a = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.dropout(self.out(a))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))  # (b, n, d)


class Vit(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        d, n = config.width, (config.side // config.patch) ** 2
        self.patches = nn.Conv2d(config.channels, d, config.patch, config.patch)
        self.token = nn.Parameter(torch.zeros(1, 1, d))
        self.positions = nn.Parameter(torch.zeros(1, n + 1, d))
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, config.labels)

    def features(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)  # (b, n, d)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.norm(x[:, 0])  # (b, d)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))  # (b, K)
