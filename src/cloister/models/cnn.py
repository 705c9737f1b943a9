"""Convolutional networks for images: 13 layers for small ones [TV17, table 5], and ResNet-18 [HZRS16], as in paper 001.

Parts of the ResNet are named as in torchvision, so that weight files in that form fit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
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


class Residual(nn.Module):
    """Two 3 × 3 convolutions beside a way past them."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outside)
        same = stride == 1 and inside == outside
        past = [] if same else [nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside)]
        self.downsample = nn.Sequential(*past)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(y)) + self.downsample(x))


class ResNet18(nn.Module):
    """Images (b, c, h, w). `stem` 7: a first convolution of 7 × 7 and a pooling, for large images; 3 keeps the size."""

    def __init__(self, config: Config, stem: int = 3) -> None:
        super().__init__()
        w = config.width
        self.conv1 = nn.Conv2d(config.channels, w, stem, 2 if stem == 7 else 1, padding=stem // 2, bias=False)
        self.bn1 = nn.BatchNorm2d(w)
        self.large = stem == 7
        self.pool = nn.MaxPool2d(3, 2, 1) if self.large else nn.Identity()
        self.layer1 = nn.Sequential(Residual(w, w, 1), Residual(w, w, 1))
        self.layer2 = nn.Sequential(Residual(w, 2 * w, 2), Residual(2 * w, 2 * w, 1))
        self.layer3 = nn.Sequential(Residual(2 * w, 4 * w, 2), Residual(4 * w, 4 * w, 1))
        self.layer4 = nn.Sequential(Residual(4 * w, 8 * w, 2), Residual(8 * w, 8 * w, 1))
        self.dropout = Dropout(config.dropout)
        self.head = nn.Linear(8 * w, config.labels)

    def features(self, x: Tensor) -> Tensor:
        if self.large:
            x = (x + 0.05) / 0.225  # from -0.5 … 0.5 to the scale of weights trained on ImageNet
        x = self.pool(torch.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.dropout(x.mean(dim=(2, 3)))  # (b, 8 w)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))  # (b, K)
