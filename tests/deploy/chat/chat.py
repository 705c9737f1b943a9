"""A workflow that is only talk: sites send what they hold to the auxiliary, the coordinator opens the total.

    L1   u → A   x_u
    L2   A → S   Σ x_u
    L3   S → u   the total, and so on for some rounds

With CHAT_MARK in the environment, a party leaves a file there when it reaches round 2, so that a test can kill it.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cloister import workflows
from cloister.arrays import F64
from cloister.mpc.net.channel import Channel
from cloister.mpc.net.wire import message
from cloister.session import Outcome, Session
from cloister.study import Party
from cloister.workflows.modes import Mode


@dataclass(frozen=True)
class Options:
    rounds: int = 3
    pause: float = 0.0
    length: int = 10


@dataclass(frozen=True, slots=True)
class Params:
    sites: tuple[Party, ...]
    rounds: int


@message("L1")
class Input:
    x: F64


@message("L2")
class Sum:
    x: F64


@message("L3")
class Total:
    x: F64


async def site(ch: Channel, params: Params, x: F64, pause: float) -> F64:
    hub, helper = ch.agreement.coordinator, ch.agreement.auxiliaries[0]
    total = x
    for i in range(params.rounds):
        if i == 2 and "CHAT_MARK" in os.environ:
            Path(os.environ["CHAT_MARK"], ch.me).touch()
        time.sleep(pause)
        await ch.send(helper, Input(x))  # L1
        total = (await ch.recv(hub, Total, x=x.shape)).x  # L3
    return total


async def auxiliary(ch: Channel, params: Params) -> None:
    for _ in range(params.rounds):
        inputs = await ch.gather(params.sites, Input, x=(None,))  # L1
        await ch.send(ch.agreement.coordinator, Sum(sum(m.x for m in inputs.values())))  # L2


async def coordinator(ch: Channel, params: Params) -> F64:
    for _ in range(params.rounds):
        total = (await ch.recv(ch.agreement.auxiliaries[0], Sum, x=(None,))).x  # L2
        await ch.scatter(params.sites, Total(total))  # L3
    return total


def site_part(session: Session, adata, options: Options) -> Outcome:
    x = np.full(options.length, float(adata.n_obs))
    total = session.run(site, Params(session.sites, options.rounds), x, options.pause)
    return Outcome(adata, {"total": float(total[0])})


def coordinator_part(session: Session, options: Options) -> Outcome:
    return Outcome(None, {"total": float(session.run(coordinator, Params(session.sites, options.rounds))[0])})


def auxiliary_part(session: Session, options: Options) -> Outcome:
    session.run(auxiliary, Params(session.sites, options.rounds))
    return Outcome()


WORKFLOW = workflows.Workflow(
    name="chat",
    summary="Talk.",
    options=Options,
    modes={"hardened": Mode(("chat",), auxiliaries=1)},
    site=site_part,
    coordinator=coordinator_part,
    auxiliary=auxiliary_part,
    check=lambda adata, options: [],
)


def register() -> None:
    workflows.register(WORKFLOW)
