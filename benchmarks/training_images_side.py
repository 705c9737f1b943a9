"""Many copies of one CNN trained side by side, and label propagation on the device: the engine of `training_images.py`.

Copies are groups of one wide network: their channels, batch norms and losses do not touch, so that nothing changes but
the speed. On a GPU a step is captured once and replayed.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cloister.models.cnn import Cnn13, Config

CLASSES = 10


class Side(nn.Module):
    """`copies` of a `Cnn13` as one network of groups; `unit`: embeddings of length one before the last layer."""

    def __init__(self, copies: int, width: int, dropout: float, *, unit: bool = True) -> None:
        super().__init__()
        self.copies, self.unit, body = copies, unit, []
        for m in Cnn13(Config(3, CLASSES, width, dropout)).body:
            if isinstance(m, nn.Conv2d):
                sizes = (m.in_channels * copies, m.out_channels * copies, m.kernel_size)
                body.append(nn.Conv2d(*sizes, padding=m.padding, groups=copies, bias=False))
            elif isinstance(m, nn.BatchNorm2d):
                body.append(nn.BatchNorm2d(m.num_features * copies))
            elif type(m).__name__ == "Dropout":
                body.append(nn.Dropout(dropout))
            elif isinstance(m, nn.LeakyReLU):
                body.append(nn.LeakyReLU(m.negative_slope, inplace=True))
            else:
                body.append(m)
        self.body = nn.Sequential(*body)
        self.weight = nn.Parameter(torch.zeros(copies * CLASSES, width))
        self.bias = nn.Parameter(torch.zeros(copies * CLASSES))

    def features(self, x: Tensor) -> Tensor:  # (b, copies · 3, h, w) → (b, copies, d)
        with torch.autocast(x.device.type, torch.bfloat16, enabled=x.is_cuda):
            z = self.body(x)
        z = z.float().unflatten(1, (self.copies, -1))
        return F.normalize(z, dim=-1) if self.unit else z

    def head(self, z: Tensor) -> Tensor:
        weight = self.weight.view(self.copies, CLASSES, -1)
        return torch.einsum("bpw,pkw->bpk", z, weight) + self.bias.view(self.copies, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))  # (b, copies, K)

    def tensors(self) -> list[Tensor]:
        """Parameters and running statistics, each with the copies along its first axis."""
        return [t for t in self.state_dict(keep_vars=True).values() if t.dtype.is_floating_point]

    @torch.no_grad()
    def begin(self, model: Cnn13) -> None:
        """All copies like one network."""
        theirs = [t for t in model.state_dict().values() if t.dtype.is_floating_point]
        mine = self.tensors()
        for many, one in zip(mine[2:] + mine[:2], theirs, strict=True):  # our head comes first, theirs last
            many.copy_(torch.cat([one] * self.copies))

    @torch.no_grad()
    def spread(self, shared: Side) -> None:
        """Every shared network to its own run of copies."""
        for many, few in zip(self.tensors(), shared.tensors(), strict=True):
            runs = many.unflatten(0, (shared.copies, self.copies // shared.copies, -1))
            runs.copy_(few.unflatten(0, (shared.copies, 1, -1)))

    @torch.no_grad()
    def average(self, shared: Side, share: Tensor) -> None:
        """The means of each run of copies, weighted by `share` (shared copies, copies of each)."""
        for many, few in zip(self.tensors(), shared.tensors(), strict=True):
            runs = many.unflatten(0, (*share.shape, -1))
            means = (runs * share.view(*share.shape, *[1] * many.dim())).sum(dim=1)
            few.copy_(means.flatten(0, 1))


class Steps:
    """A round's SGD steps of all copies, whose images, labels and weights lie ready on the device."""

    def __init__(self, side: Side, steps: int, batch: int, decay: float) -> None:
        device, p = side.weight.device, side.copies
        kind = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.side, self.decay, self.steps = side, decay, steps
        self.x = torch.zeros(steps, batch, 32, 32, 3 * p, device=device, dtype=kind)
        self.y = torch.zeros(steps, batch, p, dtype=torch.long, device=device)
        self.w = torch.zeros(steps, batch, p, device=device)
        self.at = torch.zeros(1, dtype=torch.long, device=device)
        self.rate = torch.zeros((), device=device)
        self.parameters = list(side.parameters())
        self.graph = None
        if device.type == "cuda":
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(3):
                    self.once()
            torch.cuda.current_stream().wait_stream(stream)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.once()

    def once(self) -> None:
        x, y, w = (a.index_select(0, self.at)[0] for a in (self.x, self.y, self.w))
        logits = self.side(x.permute(0, 3, 1, 2))
        loss = F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none")
        total = (loss * w.flatten()).sum() / len(x)  # the mean of each copy's batch, added up
        grads = list(torch.autograd.grad(total, self.parameters))
        with torch.no_grad():
            torch._foreach_add_(grads, self.parameters, alpha=self.decay)
            torch._foreach_mul_(grads, self.rate)
            torch._foreach_sub_(self.parameters, grads)
            self.at += 1

    def round(self, rate: float) -> None:
        self.at.zero_()
        self.rate.fill_(rate)
        self.side.train()
        for _ in range(self.steps):
            self.graph.replay() if self.graph is not None else self.once()


def pad(images: Tensor) -> Tensor:
    """(n, 32, 32, 3) of bytes → (n, 40, 40, 3), mirrored at the edges."""
    wide = F.pad(images.permute(0, 3, 1, 2).half(), (4, 4, 4, 4), mode="reflect")
    return wide.to(torch.uint8).permute(0, 2, 3, 1).contiguous()


def augment(padded: Tensor, at: Tensor, generator: torch.Generator) -> Tensor:
    """Shift by up to four pixels, mirror half: (steps, batch, copies) → (steps, batch, 32, 32, copies · 3) of bytes."""
    n, device = at.numel(), padded.device
    dy, dx = (torch.randint(0, 9, (n, 1), device=device, generator=generator) for _ in range(2))
    flip = torch.rand(n, 1, device=device, generator=generator) < 0.5
    rows = dy + torch.arange(32, device=device)
    columns = torch.where(flip, dx + torch.arange(31, -1, -1, device=device), dx + torch.arange(32, device=device))
    shown = padded[at.flatten()[:, None, None], rows[:, :, None], columns[:, None, :]]  # (n, 32, 32, 3)
    return shown.view(*at.shape, 32, 32, 3).permute(0, 1, 3, 4, 2, 5).flatten(4)


def scale(images: Tensor, kind: torch.dtype) -> Tensor:
    return images.to(kind).mul_(4 / 255).sub_(2)


@torch.no_grad()
def look(shared: Side, images: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
    """Embeddings (n, copies, d) and logits (n, copies, K) of images (n, copies) by each shared network."""
    shared.eval()
    kind, zs, outs = torch.bfloat16 if images.is_cuda else torch.float32, [], []
    for part in torch.split(at, 1000):
        x = scale(images[part].permute(0, 2, 3, 1, 4).flatten(3), kind)  # (n, 32, 32, copies · 3)
        z = shared.features(x.permute(0, 3, 1, 2))
        zs.append(z)
        outs.append(shared.head(z))
    return torch.cat(zs), torch.cat(outs)


@torch.no_grad()
def propagate(
    z: Tensor, known: Tensor, planes: Tensor, *, k: int = 10, alpha: float = 0.99, power: int = 1, balance: bool = False
) -> tuple[Tensor, Tensor]:
    """Labels and confidences of `graph.propagate` for several graphs at once: (g, n, d), (g, n) with -1 for none.

    `power`: of the similarities. `balance`: the labels of a class count as one together.
    """
    g, n, _ = z.shape
    bits = len(planes)
    b = (z.double() @ planes.T >= 0).float() * 2 - 1  # (g, n, L)
    apart = ((bits - torch.bmm(b, b.transpose(1, 2))) / 2).round().long()
    key = apart * n + torch.arange(n, device=z.device)
    key.diagonal(dim1=1, dim2=2).fill_(1 << 40)  # no edge to itself
    near = torch.topk(key, k, dim=2, largest=False).values
    index, distance = near % n, near // n
    alike = torch.cos(math.pi * distance.double() / bits) ** power
    alike[2 * distance >= bits] = 0.0
    W = torch.zeros(g, n, n, device=z.device, dtype=torch.double).scatter_(2, index, alike)
    W = W + W.transpose(1, 2)
    root = W.sum(dim=2).rsqrt().nan_to_num(posinf=0.0)
    W = root[:, :, None] * W * root[:, None, :]
    Y = (known[:, :, None] == torch.arange(CLASSES, device=z.device)).double()
    if balance:
        Y = Y / Y.sum(dim=1, keepdim=True).clamp_min(1)
    Z = torch.linalg.solve(torch.eye(n, device=z.device, dtype=torch.double) - alpha * W, Y).clamp_min(0)
    total = Z.sum(dim=2)
    reached = total > 1e-9
    p = Z / total.clamp_min(1e-9)[:, :, None]
    sure = 1 + torch.xlogy(p, p).sum(dim=2) / math.log(CLASSES)
    return torch.where(reached, Z.argmax(dim=2), -1), torch.where(reached, sure, 0.0).clamp(0, 1).float()
