"""CellCnn card: who asks from outside is told what a model takes, and all sites see that it is told the truth.

    L1  S → all  the card: markers, scaling, classes, sizes     to the sites and the querier
        i        is it the card of the model in my own folder?

Reveals
-------
querier : names of markers and classes, mean and spread of each marker over the sites that trained, and the settings of
    the training. No weight, encrypted or not.
holder, coordinator : nothing new.

Assumes
-------
Any one party may lie: a site aborts where the card is not that of its own model, and parties that were told different
cards cannot finish anything together afterwards. Here alone that does not show: (a), (b) of the coordinator, another
card to the querier, are noticed at the next step of the run, whose id depends on the card.

Cost
----
Coordinator: the card to each of the others.

References
----------
[SAV22] Sav et al., PriCell, Patterns 2022: a researcher asks the trained model. Lines numbered here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from cloister.errors import ParameterError, ProtocolAbort, RefusedError
from cloister.models import cellcnn
from cloister.mpc.net.channel import Channel
from cloister.mpc.net.wire import message
from cloister.study import CONSENTS, Party

NAME = "cellcnn_card"
CONSENT = "outside-query"


@dataclass(frozen=True, slots=True)
class Params:
    holders: tuple[Party, ...]  # the sites that trained
    coordinator: Party
    querier: Party

    def __post_init__(self) -> None:
        if self.querier in (*self.holders, self.coordinator):
            raise ParameterError(f"'{self.querier}' took part in the training, and needs no card")


@message("L1")
class Card:  # S → all
    text: str  # the model's file without weights
    validated: bool  # whether it was trained in the ring that leaves room for validation


@dataclass(frozen=True)
class Told:
    model: cellcnn.Model
    validated: bool


def ideal(params: Params, inputs: Mapping[Party, Told]) -> dict[Party, Told | None]:
    mine = inputs[params.coordinator]
    told = Told(replace(mine.model, weights=None), mine.validated)
    return dict.fromkeys((params.coordinator, *params.holders)) | {params.querier: told}


def roles(params: Params) -> dict[Party, object]:
    parts: dict[Party, object] = {params.coordinator: coordinator, params.querier: querier}
    return parts | dict.fromkeys(params.holders, holder)


def cost(params: Params, card: int = 0) -> dict[Party, tuple[int, int]]:
    n = len(params.holders) + 1
    return dict.fromkeys((params.querier, *params.holders), (0, 0)) | {params.coordinator: (n, n * card)}


def read_card(card: Card) -> Told:
    try:
        model = cellcnn.Model.from_json(card.text)
    except ParameterError:
        raise ProtocolAbort(NAME, "L1", "malformed", "the coordinator sent no card of a CellCnn") from None
    return Told(replace(model, weights=None), card.validated)


def check_same(mine: Told, told: Told) -> None:
    """Raise unless the card is that of my own model; the scaling may differ by rounding."""
    a, b = mine.model, told.model
    same = all(getattr(a, k) == getattr(b, k) for k in ("config", "markers", "classes", "cofactor", "stopped"))
    near = all(np.allclose(getattr(a, k), getattr(b, k), rtol=1e-9) for k in ("mean", "scale"))
    if not (same and near and mine.validated == told.validated):
        raise ProtocolAbort(NAME, "L1", "differs", "the coordinator's card is not that of the model in my folder")


def check_consent(consent: frozenset[str]) -> None:
    if CONSENT not in consent:
        raise RefusedError(
            f'this site does not consent to {CONSENTS[CONSENT]}; add "{CONSENT}" to [approve] consent in'
            " local/site.toml, or agree on a study without"
        )


async def coordinator(ch: Channel, params: Params, mine: Told) -> None:
    card = Card(replace(mine.model, weights=None).to_json(), mine.validated)
    await ch.broadcast((*params.holders, params.querier), card)  # L1


async def holder(ch: Channel, params: Params, mine: Told, *, consent: frozenset[str]) -> None:
    check_consent(consent)
    check_same(mine, read_card(await ch.recv_broadcast(params.coordinator, Card)))  # L1


async def querier(ch: Channel, params: Params) -> Told:
    return read_card(await ch.recv_broadcast(params.coordinator, Card))  # L1
