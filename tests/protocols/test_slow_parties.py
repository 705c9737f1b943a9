"""A party that sends a little from time to time, and pulses that it computes, ends no later than `patience` allows."""

import asyncio
import time

import pytest

from cloister.mpc.net.wire import message
from cloister.mpc.sums import retry_without_dropouts
from cloister.rehearsal.rehearsal import run_parties
from cloister.session import Outcome
from cloister.study import Party, Study

HUB, SLOW = Party("hub"), Party("zurich")
SITES = tuple(map(Party, ("basel", "lugano", "zurich")))
PATIENCE = 3.0


@message("X1", protocol="slow")
class Drop:
    pass


async def endless(ch, sites):
    """A step in which all sites wait for one that never comes to an end."""
    while ch.me != HUB:
        if ch.me == SLOW:
            await asyncio.sleep(PATIENCE / 6)  # no wait is open, so its pulses say that it computes
            await ch.scatter([u for u in sites if u != SLOW], Drop())
        else:
            await ch.recv(SLOW, Drop)
    await asyncio.sleep(60)


async def coordinator(ch, params, *, entropy, identity):
    return await retry_without_dropouts.lead(ch, SITES, 2, endless)


async def site(ch, params, *, entropy, identity):
    return await retry_without_dropouts.follow(ch, HUB, endless)


@pytest.mark.parametrize("stays", [True, False])
def test_an_attempt_ends_after_patience(stays):
    study = Study(
        name="test",
        workflow="cloister.protocols.attempts",
        parties={HUB: "coordinator"} | dict.fromkeys(SITES, "site"),
        timeout=1.0,
        patience=PATIENCE,
    )
    took = {}

    def part(role):
        def play(session, inputs):
            start = time.monotonic()
            try:
                return Outcome(result={"value": session.run(role, None)})
            finally:
                took[session.me] = time.monotonic() - start

        return play

    async def silent(ch, params, *, entropy, identity):
        """A coordinator that starts an attempt and says nothing more."""
        await ch.broadcast(SITES, retry_without_dropouts.Go(SITES, done=False))
        await asyncio.sleep(4 * PATIENCE)

    parts = {HUB: part(coordinator if stays else silent)} | dict.fromkeys(SITES, part(site))
    run = run_parties(study, parts, {})
    assert not set(run.outcomes) & set(SITES[:2])
    assert all(took[u] < 3 * PATIENCE for u in SITES[:2])
