"""Model card: the provider tells the owners what its model takes in, before anything is asked of it.

    L1  P → u   card            shape, intervals, kind of input, ring; public, the same for all

Reveals
-------
owner : the card: sizes of the model, the intervals its values keep, which inputs it takes, which blocks are tapped.
provider : nothing.

Assumes
-------
Nothing beyond authenticated channels. What follows is agreed on the card's content: a provider that told owners
different cards would not get past the start of the next protocol.

Cost
----
One message per owner, the card's bytes.

References
----------
None; lines numbered here.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cloister.errors import CloisterError, ParameterError, ProtocolAbort
from cloister.models.polynomial import Encoder, Shape, shape_of
from cloister.mpc.crypto.owner_ckks.scheme import Parameters
from cloister.mpc.net.channel import Channel
from cloister.mpc.net.wire import message
from cloister.study import Party

NAME = "model_card"
KINDS = ("images", "cells")


@dataclass(frozen=True, slots=True)
class Params:
    owners: tuple[Party, ...]
    provider: Party


@message("L1")
class Card:  # P → u
    text: bytes  # JSON


@dataclass(frozen=True)
class Announcement:
    shape: Shape
    crypto: Parameters
    card: dict[str, Any]

    @property
    def digest(self) -> str:
        return hashlib.sha256(write(self)).hexdigest()


def write(announced: Announcement) -> bytes:
    plain = {
        "shape": dataclasses.asdict(announced.shape),
        "crypto": dataclasses.asdict(announced.crypto),
        "card": announced.card,
    }
    return json.dumps(plain, sort_keys=True).encode()


def read(text: bytes) -> Announcement:
    try:
        raw = json.loads(text)
        announced = Announcement(shape_of(raw["shape"]), Parameters(**raw["crypto"]), dict(raw["card"]))
        if announced.card.get("kind") not in KINDS:
            raise ParameterError("unknown kind of input")
    except (CloisterError, ValueError, TypeError, KeyError) as e:
        raise ProtocolAbort(
            NAME, "L1", "malformed", f"the model metadata cannot be read ({type(e).__name__})"
        ) from None
    return announced


def ideal(params: Params, inputs: Mapping[Party, Any]) -> dict[Party, Any]:
    announced: Announcement = inputs[params.provider]
    return dict.fromkeys((params.provider, *params.owners), announced)


def roles(params: Params) -> dict[Party, object]:
    return {params.provider: provider} | dict.fromkeys(params.owners, owner)


def cost(params: Params, size: int) -> dict[Party, tuple[int, int]]:
    """Messages and payload for a card of `size` bytes."""
    n = len(params.owners)
    return {params.provider: (n, n * size)} | dict.fromkeys(params.owners, (0, 0))


def told_by(encoder: Encoder, crypto: Parameters) -> Announcement:
    """The card of a model, as it is after the way through JSON."""
    return read(write(Announcement(encoder.shape, crypto, encoder.card)))


async def provider(ch: Channel, params: Params, announced: Announcement) -> Announcement:
    await ch.scatter(params.owners, Card(write(announced)))  # L1
    return announced


async def owner(ch: Channel, params: Params) -> Announcement:
    return read((await ch.recv(params.provider, Card)).text)  # L1
