"""Options of `adapt-model`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from cloister.errors import ParameterError
from cloister.workflows.options import option

if TYPE_CHECKING:
    pass


@dataclass(frozen=True)
class Options:
    model: str = option("model.npz", "file of the provider's model, at the coordinator")
    label_key: str = option("cell_type", "column of obs with the labels; NaN where there is none")
    labels: tuple[str, ...] = option((), "all label names; if none, the sites' names are collected")
    ring: Literal["small", "standard"] = option("standard", "lattice: small models only, or any")
    budget: int = option(65536, "samples that a site may ask about, over all runs")
    ledger: str | None = option(None, "file in which the provider counts them; if none, beside the model's")
    device: Literal["cpu", "gpu"] = option("cpu", "where the provider computes: its CPU, or its NVIDIA card")
    stage: Literal["both", "ask", "train"] = option("both", "only ask and keep taps; or train on kept ones")
    taps: str | None = option(None, "folder in which every party keeps its part of asking; a broken one goes on")
    bottleneck: int = option(8, "width of the adapter; 0 for linear probing")
    alpha: float = option(1.0, "how much the adapter counts beside the taps")
    rounds: int = option(40, "rounds of training")
    clients_per_round: int = option(0, "sites that train in a round; 0 for all, as always in hardened mode")
    local_epochs: int = option(
        0, "passes over a site's samples in a round, each one opened step in hardened mode; 0 for 1 there, else 2"
    )
    batch_size: int = option(32, "samples a step; in hardened mode every step takes all samples")
    lr: float = option(0.0, "learning rate; 0 for 0.03 in hardened mode and 0.05 in published mode (adam: 0.01)")
    schedule: Literal["constant", "cosine", "step"] = option("constant", "of the learning rate over the rounds")
    decay: float = option(0.1, "factor of the rate at each step")
    decay_at: tuple[int, ...] = option((), "after how many rounds the rate goes down a step, for schedule step")
    optimizer: Literal["auto", "adam", "sgd"] = option(
        "auto", "adam in hardened mode; in published mode sgd, since local adam is worse if sites have different labels"
    )
    momentum: float = option(0.9, "of sgd")
    validation: float = option(0.1, "share of each label's samples kept for validation")
    metric: Literal["accuracy", "balanced_accuracy", "macro_f1", "loss"] = option(
        "accuracy", "that chooses the best round; balanced: every label counts alike"
    )
    patience: int = option(0, "rounds without a better one, after which training stops; 0 for never")
    permutation: Literal["once", "round"] = option("once", "published mode: ask again with a new order for every round")
    donor_key: str | None = option(None, "column of obs with the donor; noise then protects donors instead of samples")
    dp_noise: float | None = option(
        None, "hardened mode: noise multiplier of differential privacy, 5 by default; 0 needs the consent of every site"
    )
    dp_clip: float = option(1.0, "norm that the gradient of a sample is clipped to")
    dp_delta: float = option(1e-5, "delta of differential privacy")
    min_cells: int = option(10, "hardened mode: fewest own samples that a site's part of an opened sum may be based on")
    min_donors: int = option(3, "fewest own donors, with donor_key")
    key_added: str = option("predicted", "column of obs with the model's labels")

    def __post_init__(self) -> None:
        if not 0 <= self.validation < 1:
            raise ParameterError(f"option 'validation' must be in [0, 1), found {self.validation}")
        if self.labels and (len(set(self.labels)) != len(self.labels) or len(self.labels) < 2):
            raise ParameterError("option 'labels' needs at least two names, each once")
        if self.budget < 1 or self.bottleneck < 0:
            raise ParameterError("options 'budget' and 'bottleneck' cannot be negative, and 'budget' not 0")
        if self.stage != "both" and self.taps is None:
            raise ParameterError(f"stage '{self.stage}' needs taps= with the folder in which taps are kept")
        if self.permutation == "round" and self.taps is not None:
            raise ParameterError("permutation 'round' asks anew for every round, so there are no taps to keep")
        if not 0 <= self.momentum < 1 or not 0 < self.decay <= 1 or not self.alpha > 0:
            raise ParameterError("option 'momentum' must be in [0, 1), 'decay' in (0, 1], 'alpha' above 0")
        if self.local_epochs < 0 or self.lr < 0:
            raise ParameterError("options 'local_epochs' and 'lr' must be above 0, or 0 for the default of the mode")
        if (self.dp_noise or 0) < 0 or not self.dp_clip > 0 or not 0 < self.dp_delta < 1:
            raise ParameterError("option 'dp_noise' must be at least 0, 'dp_clip' above 0, 'dp_delta' in (0, 1)")
        if bool(self.decay_at) != (self.schedule == "step") or any(at < 1 for at in self.decay_at):
            raise ParameterError("schedule 'step' needs decay_at= with numbers of rounds; no other schedule has them")
