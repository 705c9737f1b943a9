"""What owners train: a low-rank parallel adapter on the taps, and a head.

    h_0 = b_L                                    the last tap
    h_l = g_l(b_l + h_{l-1}) + h_{l-1}           for every tap, first to last
    g(z) = α·W_up·GELU(W_down z)                 W_up starts at zero
    logits = head(h)

Without the adapter this is linear probing.
"""

from __future__ import annotations

import dataclasses
import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cloister import files
from cloister.errors import DataError, MissingExtra, ParameterError
from cloister.models.learner import Learner, Table, init_weights

try:
    import torch
    import torch.nn.functional as F
    from torch import Tensor, nn
except ImportError:
    raise MissingExtra("torch", "models") from None

FORMAT = 1


@dataclass(frozen=True)
class Config:
    taps: int
    rank: int  # r, numbers per tap
    labels: int  # K
    bottleneck: int = 8  # 0: linear probing
    alpha: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.taps, self.rank) < 1 or self.labels < 2 or self.bottleneck < 0:
            raise ParameterError("an adapter needs a tap and two labels")


class Adapter(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        r, m, n = config.rank, config.bottleneck, config.taps if config.bottleneck else 0
        self.downs = nn.ModuleList(nn.Linear(r, m) for _ in range(n))
        self.ups = nn.ModuleList(nn.Linear(m, r) for _ in range(n))
        self.head = nn.Linear(r, config.labels)

    def features(self, taps: Tensor) -> Tensor:
        h = taps[:, -1]  # (b, r)
        for tap, (down, up) in enumerate(zip(self.downs, self.ups, strict=True)):
            h = h + self.config.alpha * up(F.gelu(down(taps[:, tap] + h)))
        return h

    def forward(self, taps: Tensor) -> Tensor:
        return self.head(self.features(taps))  # (b, K)


def make(config: Config) -> Adapter:
    """The adapter with its first weights: the same at every owner."""
    module = Adapter(config)
    init_weights(module, config.seed)
    with torch.no_grad():
        for weight in module.ups.parameters():
            weight.zero_()
    return module


class AdapterLearner(Learner):
    """A site's adapter and taps behind vectors, for local training with a rate that steps down.

    `by_round` has taps of their own for every round. With `watch`, `batches_seen` holds of every batch, in the order of
    training, the predictions that its step began from, (b, K), and the codes of its labels. All of these are for
    `train`, in published mode. In hardened mode the protocol calls `gradient`, on one set of taps, and sets the rate.
    """

    def __init__(
        self, *what: Any, decay: float = 1.0, decay_at: tuple[int, ...] = (), by_round: tuple[Table, ...] = (),
        watch: bool = False, **how: Any,
    ) -> None:  # fmt: skip
        super().__init__(*what, **how)
        self.decay, self.decay_at, self.by_round, self.watch = decay, decay_at, by_round, watch
        self.batches_seen: list[tuple[Any, Any]] = []

    def train(self, theta: Any, t: int, rate: float) -> tuple[Any, float]:
        if self.by_round:
            self.examples = self.by_round[t]
        return super().train(theta, t, rate * self.decay ** sum(t >= at for at in self.decay_at))

    def loss(self, own: Any, taught: Any, rng: np.random.Generator) -> Tensor:
        if self.watch:
            with torch.no_grad():
                p = torch.softmax(self.model(*self.examples.batch(own, None)), 1)
            self.batches_seen.append((p.double().numpy(), self.codes[own]))
        return super().loss(own, taught, rng)


@dataclass
class Adapted:
    """A trained adapter and head, with the names of its labels; useless without the provider's model."""

    module: Adapter
    labels: tuple[str, ...]
    model: str  # digest of the card it was trained with

    @torch.no_grad()
    def probabilities(self, taps: Any) -> Any:
        self.module.eval()
        return torch.softmax(self.module(torch.as_tensor(np.asarray(taps), dtype=torch.float32)), 1).double().numpy()

    def predict(self, taps: Any) -> Any:
        return np.array(self.labels)[self.probabilities(taps).argmax(axis=1)]

    @property
    def parameters(self) -> int:
        return sum(p.numel() for p in self.module.parameters())

    def to_bytes(self) -> bytes:
        config = dataclasses.asdict(self.module.config)
        meta = {"format": FORMAT, "config": config, "labels": self.labels, "model": self.model}
        arrays: dict[str, Any] = {f"w:{n}": p.detach().numpy() for n, p in self.module.named_parameters()}
        out = io.BytesIO()
        np.savez(out, meta=np.frombuffer(json.dumps(meta).encode(), np.uint8), **arrays)
        return out.getvalue()

    def save(self, path: str | Path) -> None:
        Path(path).write_bytes(self.to_bytes())

    @classmethod
    def load(cls, path: str | Path) -> Adapted:
        try:
            with files.load_arrays(path) as kept:
                arrays = {n: kept[n] for n in kept.files}
            meta = json.loads(arrays.pop("meta").tobytes())
            config, state = Config(**meta["config"]), {n[2:]: torch.from_numpy(a) for n, a in arrays.items()}
            with torch.device("meta"):  # sizes first: no memory for those that the arrays do not have
                wanted = {n: tuple(x.shape) for n, x in Adapter(config).state_dict().items()}
            if wanted != {n: tuple(x.shape) for n, x in state.items()}:
                raise ValueError("arrays of other shapes than the description has")
            module = Adapter(config)
            module.load_state_dict(state)
            return cls(module.eval(), tuple(str(x) for x in meta["labels"]), str(meta["model"]))
        except FileNotFoundError:
            raise DataError(f"there is no adapter at {path}") from None
        except DataError:
            raise
        except Exception as e:  # every way in which a file can be wrong
            raise DataError(f"{path} is not an adapter of Cloister ({type(e).__name__})") from None
