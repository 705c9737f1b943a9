"""Options of `adapt-model`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from cloister.errors import ParameterError
from cloister.workflows.options import PAPER, option

if TYPE_CHECKING:
    pass


@dataclass(frozen=True)
class Options:
    model: str = option("model.npz", "file of the provider's model, at the coordinator")
    label_key: str = option("cell_type", "column of obs with the labels, NaN where missing")
    labels: tuple[str, ...] = option((), "complete list of label names; if empty, the sites' names are collected")
    ring: Literal["small", "standard"] = option(
        "standard", "lattice parameters: small for small models only, standard for all"
    )
    budget: int = option(65536, "number of samples that a site may query over all runs")
    ledger: str | None = option(
        None, "file of the provider with the number of queried samples; by default beside the model"
    )
    device: Literal["cpu", "gpu"] = option("cpu", "device of the provider's computation: CPU or NVIDIA GPU")
    stage: Literal["both", "ask", "train"] = option(
        "both", "part of the run: encrypted inference (ask), training on stored taps (train), or both"
    )
    taps: str | None = option(
        None, "folder in which every party stores its part of the inference; an interrupted one resumes"
    )
    bottleneck: int = option(8, "width of the adapter; 0 for linear probing")
    alpha: float = option(1.0, "scale of the adapter relative to the taps")
    rounds: int = option(40, "number of rounds")
    clients_per_round: int = option(0, "number of sites that train per round; 0 for all", modes=PAPER)
    local_epochs: int = option(
        0, "passes over a site's samples per round; in hardened mode each is one opened step; 0 for 1 there, else 2"
    )
    batch_size: int = option(32, "samples per step; hardened mode always takes all samples")
    lr: float = option(0.0, "learning rate; 0 for 0.03 in hardened mode, and 0.05 in published mode (adam: 0.01)")
    schedule: Literal["constant", "cosine", "step"] = option("constant", "learning-rate schedule over the rounds")
    decay: float = option(0.1, "factor of the learning rate at each step, with schedule=step", retired=True)
    decay_at: tuple[int, ...] = option(
        (), "rounds after which the learning rate is reduced, with schedule=step", retired=True
    )
    optimizer: Literal["auto", "adam", "sgd"] = option(
        "auto", "optimiser; auto takes sgd, since local adam is worse if sites have different labels", modes=PAPER
    )
    momentum: float = option(0.9, "momentum of sgd", modes=PAPER)
    validation: float = option(0.1, "fraction of each label's samples held out for validation")
    metric: Literal["accuracy", "balanced_accuracy", "macro_f1", "loss"] = option(
        "accuracy", "validation score that chooses the best round"
    )
    patience: int = option(0, "rounds without improvement before training stops; 0 for never")
    permutation: Literal["once", "round"] = option(
        "once", "order of the samples: drawn once, or anew for every round", modes=PAPER
    )
    donor_key: str | None = option(
        None, "column of obs with donor names; noise then protects donors instead of samples"
    )
    dp_noise: float | None = option(
        None,
        "noise multiplier of differential privacy in hardened mode, 5 by default; 0 needs the consent of every site",
    )
    dp_clip: float = option(1.0, "largest norm of a sample's gradient")
    dp_delta: float = option(1e-5, "delta of differential privacy")
    min_cells: int = option(
        10, "minimum number of a site's own samples behind its part of an opened sum, hardened mode"
    )
    min_donors: int = option(3, "minimum number of a site's own donors behind it; needs donor_key")
    key_added: str = option("predicted", "column of obs for the model's labels")

    def __post_init__(self) -> None:
        if not 0 <= self.validation < 1:
            raise ParameterError(f"option 'validation' must be in [0, 1), found {self.validation}")
        if self.labels and (len(set(self.labels)) != len(self.labels) or len(self.labels) < 2):
            raise ParameterError("option 'labels' needs at least two names, each once")
        if self.budget < 1 or self.bottleneck < 0:
            raise ParameterError("options 'budget' and 'bottleneck' cannot be negative, and 'budget' not 0")
        if self.stage != "both" and self.taps is None:
            raise ParameterError(f"stage '{self.stage}' needs taps= with the folder of stored taps")
        if self.permutation == "round" and self.taps is not None:
            raise ParameterError("permutation 'round' queries again in every round, so there are no taps to store")
        if not 0 <= self.momentum < 1 or not 0 < self.decay <= 1 or not self.alpha > 0:
            raise ParameterError("option 'momentum' must be in [0, 1), 'decay' in (0, 1], 'alpha' above 0")
        if self.local_epochs < 0 or self.lr < 0:
            raise ParameterError("options 'local_epochs' and 'lr' must be above 0, or 0 for the default of the mode")
        if (self.dp_noise or 0) < 0 or not self.dp_clip > 0 or not 0 < self.dp_delta < 1:
            raise ParameterError("option 'dp_noise' must be at least 0, 'dp_clip' above 0, 'dp_delta' in (0, 1)")
        if bool(self.decay_at) != (self.schedule == "step") or any(at < 1 for at in self.decay_at):
            raise ParameterError("schedule 'step' needs decay_at= with numbers of rounds; no other schedule has them")
