"""The 13-layer convolutional network for small images of semi-supervised learning [TV17, table 5], as in paper 001."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from cloister.errors import ParameterError
from cloister.models.learner import Dropout


@dataclass(frozen=True)
class Config:
    channels: int  # of the images
    labels: int  # K
    width: int = 128  # of the first block; 128 in the paper
    dropout: float = 0.5

    def __post_init__(self) -> None:
        if self.channels < 1 or self.width < 2 or self.width % 2 or self.labels < 2 or not 0 <= self.dropout < 1:
            raise ParameterError("a CNN needs channels, an even width, two labels, and a dropout in [0, 1)")


def block(inside: int, outside: int, size: int = 3, padding: int = 1) -> list[nn.Module]:
    return [
        nn.Conv2d(inside, outside, size, padding=padding, bias=False),
        nn.BatchNorm2d(outside),
        nn.LeakyReLU(0.1),
    ]


class Cnn13(nn.Module):
    """Images (b, c, h, w), h and w at least 16."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        w = config.width
        self.body = nn.Sequential(
            *block(config.channels, w),
            *block(w, w),
            *block(w, w),
            nn.MaxPool2d(2),
            Dropout(config.dropout),  # (b, w, h/2, w/2)
            *block(w, 2 * w),
            *block(2 * w, 2 * w),
            *block(2 * w, 2 * w),
            nn.MaxPool2d(2),
            Dropout(config.dropout),  # (b, 2w, h/4, w/4)
            *block(2 * w, 4 * w, padding=0),
            *block(4 * w, 2 * w, 1, 0),
            *block(2 * w, w, 1, 0),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),  # (b, w)
        )
        self.head = nn.Linear(w, config.labels)

    def features(self, x: Tensor) -> Tensor:
        return self.body(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))  # (b, K)
