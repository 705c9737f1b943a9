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


async def many_rounds(ch, sites):
    """Two sites exchange small messages for longer than the timeout, and compute next to nothing."""
    if ch.me == HUB:
        return "all"
    one, two = sites[:2]
    for _ in range(60 if ch.me in (one, two) else 0):
        other = two if ch.me == one else one
        if ch.me == one:
            await ch.send(other, Drop())
            await ch.recv(other, Drop)
        else:
            await ch.recv(other, Drop)
            with ch.waiting():  # as while a message is on its way
                await asyncio.sleep(0.05)
            await ch.send(other, Drop())
    return "all"


def test_a_long_exchange_between_sites_is_no_silence():
    """The coordinator gave up all sites after its timeout: "0 sites are left", at 6,000 cells of propagate-labels."""
    study = Study(
        name="test",
        workflow="cloister.protocols.attempts",
        parties={HUB: "coordinator"} | dict.fromkeys(SITES, "site"),
        timeout=1.0,
    )

    async def lead(ch, params, *, entropy, identity):
        return await retry_without_dropouts.lead(ch, SITES, 2, many_rounds)

    async def follow(ch, params, *, entropy, identity):
        return await retry_without_dropouts.follow(ch, HUB, many_rounds)

    def part(role):
        return lambda session, inputs: Outcome(result={"value": session.run(role, None)})

    run = run_parties(study, {HUB: part(lead)} | dict.fromkeys(SITES, part(follow)), {})
    assert run.errors == {}
    assert run.outcomes[HUB].result["value"] == ("all", SITES)
