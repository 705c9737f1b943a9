"""What the slots of a ciphertext hold, and what that costs an owner. Local steps of `encrypted_inference`.

    slot = sample             a batch of N/2 samples, a ciphertext for each of their numbers
    slot = (token, sample)    P ≥ T - 1 tokens share a ciphertext, N/2 / P samples a batch (`grid_circuit`)

A batch costs the same however few samples it holds, so an owner of few takes the second, if the model has it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cloister.arrays import F64
from cloister.errors import ParameterError, ProtocolAbort
from cloister.models.polynomial import Shape
from cloister.mpc.crypto.owner_ckks.rotations import Turns, slots, spread
from cloister.mpc.crypto.owner_ckks.scheme import Parameters
from cloister.mpc.crypto.owner_ckks.smallness_check import LEAF, SALT, SENT
from cloister.study import Party
from cloister.workflows.adapt_model.block_messages import CONTROLS, NAME, powers, traffic
from cloister.workflows.adapt_model.block_plan import Plan, plan
from cloister.workflows.adapt_model.grid_circuit import fits_a_grid, grid_of

LINE = 12.5e6  # bytes a second, in which a cost is told: 100 Mbit/s


@dataclass(frozen=True, slots=True)
class Packing:
    """How one owner's samples fill ciphertexts."""

    shape: Shape
    crypto: Parameters
    tokens: int = 1  # that share a ciphertext: 1 or P

    def __post_init__(self) -> None:
        if self.tokens not in packings(self.shape, self.crypto):
            raise ParameterError(f"a model of {self.shape.tokens} tokens cannot have {self.tokens} in a ciphertext")

    @property
    def plan(self) -> Plan:
        return plan(self.shape, self.crypto, 1, self.tokens)

    @property
    def samples(self) -> int:
        """Of a batch."""
        return self.crypto.slots // self.tokens

    def batches(self, samples: int) -> int:
        return -(-samples // self.samples)

    @property
    def inputs(self) -> int:
        """Ciphertexts that a batch begins with."""
        return self.shape.inputs * (self.shape.tokens - 1 if self.tokens == 1 else 1)

    @property
    def keys(self) -> int:
        """How many switching keys it takes."""
        return powers(self.plan.openings) + Turns(self.tokens).count

    # ---- slots -------------------------------------------------------------------------------------------------------

    def filled(self, x: F64) -> F64:
        """Samples (n, T - 1, inputs) as slots (`inputs`, N/2); repeated until no slot holds what no sample has."""
        if self.tokens == 1:
            return np.resize(x, (self.samples, *x.shape[1:])).reshape(self.samples, -1).T
        empty = self.tokens - x.shape[1]
        return spread(np.pad(x.transpose(2, 1, 0), ((0, 0), (0, empty), (0, 0))), self.crypto.degree)

    def read(self, found: F64, count: int) -> F64:
        """What slots (r, N/2) say of the first samples, (count, r): the mean over the tokens' slots."""
        if self.tokens == 1:
            return found[:, :count].T
        return np.asarray(found[:, slots(self.crypto.degree, self.tokens)].mean(axis=1)[:, :count].T)

    # ---- cost --------------------------------------------------------------------------------------------------------

    def bytes(self, samples: int) -> tuple[int, int]:
        """Sent and received by an owner of so many, taps left out."""
        p, (_, down, up) = self.crypto, traffic(self.plan.openings)
        one, n = p.tight * 4, self.batches(samples)
        keys = (1 + self.keys * p.count) * p.count
        checks = 1 + n * self.shape.depth
        compared = checks * CONTROLS * p.degree  # coefficients
        covered = checks * CONTROLS * 2 * SENT
        return one * (keys + n * (up + self.inputs * p.count)) + compared * (SALT + LEAF), one * (
            n * down + covered
        ) + compared

    def price(self, samples: int) -> str:
        """The same in words."""
        sent, received = self.bytes(samples)
        minutes = (sent + received) / LINE / 60
        return (
            f"{self.batches(samples)} batch(es) of up to {self.samples}: {sent / 1e6:.0f} MB to send, "
            f"{received / 1e6:.0f} MB to receive, {minutes:.0f} min at 100 Mbit/s"
        )


def packings(shape: Shape, crypto: Parameters) -> tuple[int, ...]:
    return (1, grid_of(shape)) if fits_a_grid(shape, crypto.slots) else (1,)


def cheapest(shape: Shape, crypto: Parameters, samples: int) -> Packing:
    """That which moves the fewest bytes for so many samples."""
    found = [Packing(shape, crypto, tokens) for tokens in packings(shape, crypto)]
    return min(found, key=lambda p: sum(p.bytes(samples)))


def announced(shape: Shape, crypto: Parameters, tokens: int, keys: int, batches: int, who: Party) -> Packing:
    """L1: what an owner announced, if there is such a thing, and its keys are those that it takes."""
    try:
        packed = Packing(shape, crypto, tokens)
    except ParameterError as e:
        raise ProtocolAbort(NAME, "L1", "malformed", f"from '{who}': {e}") from None
    if batches < 0 or keys != packed.keys:
        found = f"{batches} batches and {keys} switching keys, where it takes {packed.keys}"
        raise ProtocolAbort(NAME, "L1", "malformed", f"'{who}' announces {found}")
    return packed
