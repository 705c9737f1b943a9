"""Clear CellCnn training: the encrypted circuit without the encryption, for choosing hyperparameters and for tests.

    L1  i → S   Z_i = XᵀE               every step, in the clear
    L2  S → i   Z = mean of the Z_i     everyone updates the same weights (`models.cellcnn`)

Reveals
-------
aggregator : every site's gradient in every step, which tells much about its batch.
holder : the mean gradient of every step, and the model throughout.

Assumes
-------
That sites may see each other's gradients: simulated or public data. Real data belongs into `encrypted_training`.

Cost
----
Per site and step: 1 message each way, 8·m·o bytes.

References
----------
[SAV22] Sav et al., PriCell, Patterns 2022: the circuit of supplementary note 4 in plain numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from cloister.arrays import F64
from cloister.models import cellcnn
from cloister.net.channel import Channel
from cloister.net.wire import message
from cloister.protocols.ckks.collective_audit import check_holders
from cloister.study import Party

NAME = "clear_training"
GRID = 2.0**40  # gradients are rounded to it, so that processors that add in another order send the same bytes


@dataclass(frozen=True, slots=True)
class Params:
    holders: tuple[Party, ...]
    aggregator: Party
    config: cellcnn.Config

    def __post_init__(self) -> None:
        check_holders(self.holders, self.aggregator)


@message("L1")
class Gradient:  # i → S
    z: F64  # (m, o)


@message("L2")
class Mean:  # S → i
    z: F64  # (m, o)


def ideal(params: Params, inputs: Mapping[Party, tuple[F64, F64]]) -> dict[Party, cellcnn.Weights]:
    w = cellcnn.train(params.config, [inputs[i] for i in params.holders])
    return dict.fromkeys((params.aggregator, *params.holders), w)


def roles(params: Params) -> dict[Party, object]:
    return {params.aggregator: aggregator} | dict.fromkeys(params.holders, holder)


def cost(params: Params) -> dict[Party, tuple[int, int]]:
    steps, n = params.config.steps, len(params.holders)
    size = 8 * params.config.markers * params.config.classes
    return {params.aggregator: (n * steps, n * steps * size)} | dict.fromkeys(params.holders, (steps, steps * size))


async def holder(ch: Channel, params: Params, X: F64, Y: F64) -> cellcnn.Weights:
    w, shape = cellcnn.initial(params.config), (params.config.markers, params.config.classes)
    for t in range(params.config.steps):
        z = cellcnn.gradient(params.config, w.M, X[t], Y[t])
        await ch.send(params.aggregator, Gradient(np.rint(z * GRID) / GRID))  # L1
        w = cellcnn.update(params.config, w, (await ch.recv(params.aggregator, Mean, z=shape)).z)  # L2
    return w


async def aggregator(ch: Channel, params: Params) -> cellcnn.Weights:
    w, shape = cellcnn.initial(params.config), (params.config.markers, params.config.classes)
    for t in range(params.config.steps):
        ch.step(f"step {t + 1} of {params.config.steps}", protocol=NAME, line="L1")
        got = await ch.gather(params.holders, Gradient, z=shape)  # L1
        Z = ch.reveal(
            np.mean([m.z for m in got.values()], axis=0),
            to=(ch.me, *params.holders),
            line="L1",
            what=f"gradients of step {t + 1}, every site's",
            protocol=NAME,
        )
        await ch.scatter(params.holders, Mean(Z))  # L2
        w = cellcnn.update(params.config, w, Z)
    return w
