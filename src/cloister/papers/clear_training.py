"""Clear CellCnn training: the encrypted circuit without the encryption, for choosing hyperparameters and for tests.

    L1  i → S   Z_i = XᵀE               every step, in the clear
    L2  S → i   Z = mean of the Z_i     everyone updates the same weights (`models.cellcnn`)
    L3  i → S   squared error           on its held-out inputs, every `validate_every` steps
    L4  S → i   mean of the errors      training stops where `patience` of them were no better than one before

Reveals
-------
aggregator : every site's gradient in every step, which tells much about its batch, and its validation errors.
holder : the mean gradient of every step, the model throughout, and the mean validation errors.

Assumes
-------
That sites may see each other's gradients: simulated or public data. Real data belongs into `encrypted_training`.

Cost
----
Per site and step: 1 message each way, 8·m·o bytes; 8 bytes more for each validation.

References
----------
[SAV22] Sav et al., PriCell, Patterns 2022: the circuit of supplementary note 4 in plain numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cloister.arrays import F64
from cloister.errors import DataError
from cloister.models import cellcnn
from cloister.mpc.net.channel import Channel
from cloister.mpc.net.wire import message
from cloister.mpc.threshold_ckks.collective_audit import check_holders
from cloister.study import Party

NAME = "clear_training"
GRID = 2.0**40  # gradients are rounded to it, so that processors that add in another order send the same bytes


@dataclass(frozen=True, slots=True)
class Params:
    holders: tuple[Party, ...]
    aggregator: Party
    config: cellcnn.Config
    validate_every: int = 0  # steps; 0: never
    patience: int = 0  # validations; 0: never stop early

    def __post_init__(self) -> None:
        check_holders(self.holders, self.aggregator)

    def validates(self, step: int) -> bool:
        return self.validate_every > 0 and step % self.validate_every == 0


@message("L1")
class Gradient:  # i → S
    z: F64  # (m, o)


@message("L2")
class Mean:  # S → i
    z: F64  # (m, o)


@message("L3")
class Error:  # i → S
    value: float


@message("L4")
class MeanError:  # S → i
    value: float


@dataclass
class Trained:
    """What every party has at the end."""

    weights: cellcnn.Weights
    losses: dict[int, float] = field(default_factory=dict)  # step → squared error on held-out inputs
    step: int = 0  # after which it ended


def ideal(params: Params, inputs: Mapping[Party, tuple[Any, ...]]) -> dict[Party, Trained]:
    """Batches of each site, and with validation its held-out inputs."""
    done = Trained(cellcnn.initial(params.config))
    for t in range(params.config.steps):
        Z = [cellcnn.gradient(params.config, done.weights.M, X[t], Y[t]) for X, Y, *_ in inputs.values()]
        done.weights = cellcnn.update(params.config, done.weights, np.mean(Z, axis=0))
        done.step = t + 1
        if params.validates(done.step):
            errors = [cellcnn.squared_error(params.config, done.weights, *held) for _, _, held in inputs.values()]
            done.losses[done.step] = float(np.mean(errors))
        if cellcnn.stops(done.losses, params.patience):
            break
    return dict.fromkeys((params.aggregator, *params.holders), done)


def roles(params: Params) -> dict[Party, object]:
    return {params.aggregator: aggregator} | dict.fromkeys(params.holders, holder)


def cost(params: Params) -> dict[Party, tuple[int, int]]:
    """Where it does not stop early."""
    steps, n = params.config.steps, len(params.holders)
    checks = steps // params.validate_every if params.validate_every else 0
    sent, size = steps + checks, steps * 8 * params.config.markers * params.config.classes + 8 * checks
    return {params.aggregator: (n * sent, n * size)} | dict.fromkeys(params.holders, (sent, size))


async def holder(ch: Channel, params: Params, X: F64, Y: F64, held: tuple[F64, F64] | None = None) -> Trained:
    """A site's part; `held` are inputs and labels for validation."""
    if params.validate_every and held is None:
        raise DataError("validation needs held-out inputs; hold some out, or agree on validate_every=0")
    done, shape = Trained(cellcnn.initial(params.config)), (params.config.markers, params.config.classes)
    for t in range(params.config.steps):
        z = cellcnn.gradient(params.config, done.weights.M, X[t], Y[t])
        await ch.send(params.aggregator, Gradient(np.rint(z * GRID) / GRID))  # L1
        mean = (await ch.recv(params.aggregator, Mean, z=shape)).z  # L2
        done.weights, done.step = cellcnn.update(params.config, done.weights, mean), t + 1
        if params.validates(t + 1) and held is not None:
            error = cellcnn.squared_error(params.config, done.weights, *held)
            await ch.send(params.aggregator, Error(round(error * GRID) / GRID))  # L3
            done.losses[t + 1] = (await ch.recv(params.aggregator, MeanError)).value  # L4
        if cellcnn.stops(done.losses, params.patience):
            break
    return done


async def aggregator(ch: Channel, params: Params) -> Trained:
    done, shape = Trained(cellcnn.initial(params.config)), (params.config.markers, params.config.classes)
    everyone = (ch.me, *params.holders)
    for t in range(params.config.steps):
        ch.step(f"step {t + 1} of {params.config.steps}", protocol=NAME, line="L1")
        got = await ch.gather(params.holders, Gradient, z=shape)  # L1
        what = f"gradients of step {t + 1}, every site's"
        Z = ch.reveal(np.mean([m.z for m in got.values()], axis=0), to=everyone, line="L1", what=what, protocol=NAME)
        await ch.scatter(params.holders, Mean(Z))  # L2
        done.weights, done.step = cellcnn.update(params.config, done.weights, Z), t + 1
        if params.validates(t + 1):
            errors = [m.value for m in (await ch.gather(params.holders, Error)).values()]  # L3
            what = f"validation errors after step {t + 1}, every site's"
            error = ch.reveal(float(np.mean(errors)), to=everyone, line="L3", what=what, protocol=NAME)
            await ch.scatter(params.holders, MeanError(error))  # L4
            done.losses[t + 1] = error
        if cellcnn.stops(done.losses, params.patience):
            break
    return done
