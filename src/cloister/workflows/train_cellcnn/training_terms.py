"""What the parties of an encrypted training agree on, and what follows from it for every part of the protocol."""

from __future__ import annotations

from dataclasses import dataclass

from cloister.models import cellcnn
from cloister.mpc.net import wire
from cloister.mpc.threshold_ckks import collective_range
from cloister.mpc.threshold_ckks.collective_audit import Collective
from cloister.workflows.train_cellcnn import encrypted_validation
from cloister.workflows.train_cellcnn.cellcnn_circuit import Layout
from cloister.workflows.train_cellcnn.training_keys import NAME


@dataclass(frozen=True, slots=True)
class Terms(Collective):
    """The fields of `encrypted_training.Params`, which checks that they fit together."""

    config: cellcnn.Config
    open_model: bool = False
    validate_every: int = 0  # steps; 0: never
    held_out: int = 0  # inputs of each site that validation uses
    patience: int = 0  # validations that were no better than one before, after which training stops; 0: never

    @property
    def layout(self) -> Layout:
        return Layout(self.config, self.ckks, len(self.holders))

    @property
    def validation(self) -> encrypted_validation.Params:
        who = (self.holders, self.aggregator, self.ckks)
        return encrypted_validation.Params(*who, self.config, self.held_out)

    def validates(self, step: int) -> bool:
        """Whether the model after that many steps is validated."""
        return self.validate_every > 0 and step % self.validate_every == 0

    def last_stage(self, step: int) -> str:
        """How [M'] is made in that step: sealed where training may end with it."""
        ends = step + 1 == self.config.steps or (self.patience > 0 and self.validates(step + 1))
        return "sealed" if ends else "product"

    @property
    def tag(self) -> bytes:
        """What a checkpoint belongs to."""
        return wire.digest(NAME, self.holders, self.aggregator, self.ckks, self.config)

    @property
    def range(self) -> collective_range.Params:
        """The check of [M] at the end."""
        return self.layout.model_range((self.holders, self.aggregator))
