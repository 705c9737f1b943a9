"""Retry without dropouts: a step that needs all of its parties is begun again without those who stopped.

Its name on the wire, in receipts and in `cloister explain` is `attempts`.

    A1   S ⇒ u   who takes part: fewer in every attempt, and never somebody who was left out before
    A2   u → S   whether the step came to its end here
    A3   S ⇒ u   the step counts, with these parties; or A1 again, without those who stopped

Parties of such a step wait for each other, so when one stops, some of the others notice and some wait for those who
did. The coordinator therefore tells everyone at once: whatever an attempt was waiting for is dropped, and the next one
has a channel, a run id, keys and masks of its own. Nothing of an attempt that failed is used again. ⇒ is a broadcast:
the id of an attempt depends on every list so far, so that sites with different lists cannot do the step together.

Reveals
-------
every party : who takes part in which attempt.
malicious coordinator : it may begin again without a site that is there, and sees what the step reveals once per list.
    The lists shrink, so these are at most as many as there are sites. It cannot go on without a site that found
    something wrong, if another site has heard of it.
one malicious site : nothing more. It may leave, and be left out; it cannot have another left out.

Assumes
-------
The coordinator stays. Only who is gone is left out: a party that stops because it found something wrong (a proof that
does not hold, a message of another run) ends the step for all, under the name of what it found. Otherwise a party
that sends one honest site after the other something wrong would be left with the list that it likes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from cloister.errors import LEFT, CloisterError, PeerLost, ProtocolAbort, blame
from cloister.mpc.net.channel import Channel
from cloister.mpc.net.wire import message
from cloister.mpc.parties import Party

PROTOCOL = "attempts"

NAME = "attempts"
T = TypeVar("T")
Step = Callable[[Channel, tuple[Party, ...]], Coroutine[Any, Any, T]]


@message("A1")
class Go:  # S → u
    sites: tuple[Party, ...]
    done: bool


@message("A2")
class Report:  # u → S
    done: bool


def cost(sites: tuple[Party, ...], server: Party) -> dict[Party, tuple[int, int]]:
    """Messages and bytes of one attempt that comes to its end, without those of the step."""
    n = len(sites)
    return {server: (2 * n, 2 * n * sum(len(u) for u in sites))} | dict.fromkeys(sites, (1, 1))


def _scopes(ch: Channel, attempt: int, sites: tuple[Party, ...]) -> tuple[Channel, Channel]:
    return ch.sub(f"try-{attempt}", sites, apart=True), ch.sub(f"report-{attempt}", apart=True)


def check_list(me: Party, sites: tuple[Party, ...], before: tuple[Party, ...] | None) -> None:
    """A1: each once, me among them, and fewer than in the attempt before, all of whom were in that."""
    if len(set(sites)) != len(sites):
        raise ProtocolAbort(NAME, "A1", "restart", "the list of sites names one of them twice")
    if me not in sites:
        raise ProtocolAbort(NAME, "A1", "dropped", "the coordinator went on without this party")
    if before is not None and not set(sites) < set(before):
        raise ProtocolAbort(
            NAME, "A1", "restart", "restarted with parties other than the remaining ones, or without a dropout"
        )


async def lead(ch: Channel, sites: tuple[Party, ...], least: int, step: Step[T]) -> tuple[T, tuple[Party, ...]]:
    """Play S: run `step(channel, sites)` until all of those who are left have finished it."""
    attempt, everyone = 0, sites
    while True:
        if len(sites) < least:
            raise too_few(ch, everyone, sites, least)
        await ch.broadcast(sites, Go(sites, done=False))  # A1
        inner, control = _scopes(ch, attempt, sites)
        mine = asyncio.ensure_future(step(inner, sites))
        reports = {u: asyncio.ensure_future(control.gather((u,), Report, quorum=0)) for u in sites}  # A2
        try:
            if not await _first_failure(mine, reports):
                await ch.broadcast(sites, Go(sites, done=True))  # A3
                return mine.result(), sites
        finally:
            await _cancel(mine, *reports.values())
        sites = still_there(ch, sites)
        attempt += 1


async def _first_failure(mine: asyncio.Future[T], reports: Mapping[Party, asyncio.Future[Any]]) -> bool:
    """Wait until all have reported well (False), or until it is known who is lost (True)."""
    pending: set[asyncio.Future[Any]] = {mine, *reports.values()}
    failed = False
    while pending:
        finished, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        for one in finished:
            if one is mine:
                failed = failed or _lost(one)
            elif not (found := one.result()):
                return True  # a party is gone
            elif not next(iter(found.values())).done:
                failed = True  # it has lost somebody; who, will show
        if failed and not pending - {mine}:
            raise PeerLost(
                NAME, "A2", "lost", "the sites lost connection to each other, but none dropped out. Start a new run."
            )
    return False


async def follow(ch: Channel, server: Party, step: Step[T]) -> tuple[T, tuple[Party, ...]]:
    """Play u: take part in every attempt until one counts."""
    attempt, before, result = 0, None, None
    go = await ch.recv_broadcast(server, Go)  # A1
    while not go.done:
        check_list(ch.me, go.sites, before)
        still_there(ch, before or ())
        before, result = go.sites, None
        inner, control = _scopes(ch, attempt, go.sites)
        mine = asyncio.ensure_future(step(inner, go.sites))
        news = asyncio.ensure_future(ch.recv_broadcast(server, Go, aside=True))  # A3, or A1
        try:
            await asyncio.wait({mine, news}, return_when=asyncio.FIRST_COMPLETED)
            if mine.done():
                lost = _lost(mine)
                result = None if lost else [mine.result()]
                await control.send(server, Report(done=not lost))  # A2
            with ch.waiting():
                go = await news
        finally:
            await _cancel(mine, news)
        attempt += 1
    if result is None or go.sites != before:
        raise ProtocolAbort(NAME, "A3", "unexpected", "the coordinator calls a step done that was not")
    return result[0], go.sites


def _lost(done: asyncio.Future[Any]) -> bool:
    """Whether a step ended because another party is gone; any other error, its own or heard of, is raised."""
    e = done.exception()
    if e is None:
        return False
    if isinstance(e, PeerLost) or (isinstance(e, ProtocolAbort) and e.heard and e.code in LEFT):
        return True
    raise e


def still_there(ch: Channel, sites: Iterable[Party]) -> tuple[Party, ...]:
    """A1: without those who are gone; if one of them stopped because it found something wrong, nobody goes on."""
    left = []
    for u in sites:
        why = ch.stopped(u)
        if why is None:
            left.append(u)
        elif not why.own and why.code not in LEFT:
            found = ProtocolAbort(why.protocol, why.line, why.code, why.detail)
            found.heard = True
            blame(found, why.origin or u, why.began or why.code)
            raise found
    return tuple(left)


def too_few(ch: Channel, everyone: Iterable[Party], left: Sequence[Party], least: int) -> PeerLost:
    """The error that says who is missing, and why, with the limit that was exceeded."""
    reasons = [why.detail for u in everyone if u not in left and (why := ch.stopped(u)) is not None and why.detail]
    named = "".join(f"; {reason}" for reason in dict.fromkeys(reasons))
    return PeerLost(NAME, "A1", "too-few", f"{len(left)} sites are left, {least} are needed{named}. Start a new run.")


async def _cancel(*tasks: asyncio.Future[Any]) -> None:
    for t in tasks:
        t.cancel()
    for t in tasks:
        with contextlib.suppress(asyncio.CancelledError, CloisterError):
            await t


async def survivors(ch: Channel, sites: Iterable[Party], kind: type[T], least: int, **shapes: Any) -> dict[Party, T]:
    """One message of every site that is still there."""
    alive = still_there(ch, sites)
    if len(alive) < least:
        raise too_few(ch, sites, alive, least)
    return await ch.gather(alive, kind, quorum=least, **shapes)
