"""Waiting: how long a party has waited for others, and when that is too long.

A wait ends when the awaited party is silent for `timeout` seconds, when for `timeout` seconds nobody at all was
computing (or about to go on), or after `patience` seconds whatever happens. A long computation at one party therefore
trips nobody's timeout. Nor does a long exchange: a party to which messages still come, or pieces of a large one, says
in its pulses that it is at work, and so does one whose process uses the processor while it waits. While a party is
falling silent, idleness does not count: whoever waits for that party has to notice first, or the others would blame
each other.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterable

from cloister.mpc.net.mailbox import COMPUTING, PATIENT, Mailbox
from cloister.mpc.parties import Agreement, Party


class Wait:
    """One wait for several parties; `quorum` says that it goes on without the missing."""

    def __init__(
        self, agreement: Agreement, mailbox: Mailbox, senders: Iterable[Party], poll: float, *, quorum: bool
    ) -> None:
        self.agreement, self.mailbox, self.poll = agreement, mailbox, poll
        self.pending = list(senders)
        self._active = (COMPUTING,) if quorum else (COMPUTING, PATIENT)
        self._heard = dict.fromkeys(self.pending, -1)
        self._silent = dict.fromkeys(self.pending, 0.0)
        self._waited = self._idle = 0.0
        self._busy, self._last = -1, time.monotonic()

    def arrived(self, party: Party) -> None:
        self.pending.remove(party)
        self._idle = 0.0

    def tick(self) -> None:
        """Time has passed."""
        now = time.monotonic()
        tick, self._last = (
            min(now - self._last, 2 * self.poll),
            now,
        )  # a frozen process counts as one poll, not as silence
        self._waited += tick
        active = sum(self.mailbox.busy[state] for state in self._active) + self.mailbox.progress
        before, self._busy = self._busy, active
        fading = self.mailbox.fading(now, self.agreement.timeout / 2, 2 * self.agreement.timeout)
        self._idle = 0.0 if self._busy != before else self._idle if fading else self._idle + tick
        for party in self.pending:
            before, self._heard[party] = self._heard[party], self.mailbox.heard[party]
            self._silent[party] = 0.0 if self._heard[party] != before else self._silent[party] + tick

    def over(self, party: Party) -> str:
        """Why waiting for `party` has ended, with the limit and its name; empty if it has not."""
        timeout, patience = self.agreement.timeout, self.agreement.patience
        if self._waited > patience:
            return f"for {patience:g} s ('patience' of the study)"
        if self._silent[party] > timeout:
            return f"for {timeout:g} s ('timeout' of the study)"
        return (
            f"for {timeout:g} s, in which no party was computing ('timeout' of the study)"
            if self._idle > timeout
            else ""
        )


class Bell:
    """Wakes those who wait for something to arrive; belongs to one event loop."""

    def __init__(self) -> None:
        self.rung = 0
        self._waiters: set[asyncio.Future[None]] = set()

    def ring(self) -> None:
        self.rung += 1
        for waiter in self._waiters:
            _finish(waiter)

    def ring_from_a_thread(self, loop: asyncio.AbstractEventLoop) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended; nobody waits
            loop.call_soon_threadsafe(self.ring)

    async def wait(self, seen: int, seconds: float) -> None:
        """Until it has rung more often than `seen`, or `seconds`."""
        if self.rung != seen:
            return
        loop = asyncio.get_running_loop()
        waiter = loop.create_future()
        self._waiters.add(waiter)
        alarm = loop.call_later(seconds, _finish, waiter)
        try:
            await waiter
        finally:
            alarm.cancel()
            self._waiters.discard(waiter)


def _finish(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
