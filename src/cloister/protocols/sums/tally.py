"""Questions to all sites: pooled bits and pooled counts, one numbered sub-protocol each.

A protocol that asks many (grow a forest, find a cut) is written once, against `Tally`, and runs at every party: sites
evaluate `count` on their rows, the coordinator never does, and `Plain` answers from rows in one place, for `ideal`.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np

from cloister.arrays import I64, U64, Bits
from cloister.crypto.agreement import Identity
from cloister.crypto.entropy import Entropy
from cloister.net.channel import Channel
from cloister.protocols.sums import common_seed, count_tests, secure_sum
from cloister.study import Party

T = TypeVar("T")


class Tally(Protocol):
    """How all sites are asked; `count` is evaluated where there are rows to count."""

    async def test(self, count: Callable[[], I64], length: int, least: int, most: int, proofs: int = 0) -> Bits:
        """Whether each pooled count is at least `least`; proved, where the outcome opens something."""

    async def total(self, count: Callable[[], I64], length: int) -> I64:
        """The pooled counts."""


@dataclass
class Asking:
    """A `Tally` over the channel."""

    ch: Channel
    sites: tuple[Party, ...]
    coordinator: Party
    present: tuple[Party, ...]  # sites that have not dropped out
    seed: common_seed.Seed | None = None  # None at the coordinator
    entropy: Entropy | None = None
    identity: Identity | None = None
    asked: int = 0

    def _next(self) -> Channel:
        self.asked += 1
        return self.ch.sub(f"ask/{self.asked}")

    async def test(self, count: Callable[[], I64], length: int, least: int, most: int, proofs: int = 0) -> Bits:
        p = count_tests.Params(self.sites, self.coordinator, length, least, most, proofs)
        ch = self._next()
        if self.seed is None:
            answer = await count_tests.coordinator(ch, p, self.present)
        else:
            assert self.entropy is not None
            assert self.identity is not None
            answer = await count_tests.site(
                ch, p, count(), self.seed.secret, self.present, entropy=self.entropy, identity=self.identity
            )
        self.present = answer.present
        return answer.bits

    async def words(self, count: Callable[[], U64], length: int) -> U64:
        """The pooled words, modulo 2^64."""
        p = secure_sum.Params(self.sites, self.coordinator, length, to_all=True)
        ch = self._next()
        if self.seed is None:
            total: secure_sum.Sum | None = await secure_sum.aggregator(ch, p, self.present)
        else:
            assert self.entropy is not None
            assert self.identity is not None
            total = await secure_sum.contributor(
                ch, p, count(), self.present, entropy=self.entropy, identity=self.identity
            )
        assert total is not None
        self.present = tuple(u for u in self.sites if u in total.survivors)
        return total.z

    async def total(self, count: Callable[[], I64], length: int) -> I64:
        return (await self.words(lambda: count().view(np.uint64), length)).view(np.int64)


@dataclass
class Plain:
    """A `Tally` over rows in one place."""

    async def test(self, count: Callable[[], I64], length: int, least: int, most: int, proofs: int = 0) -> Bits:
        enough: Bits = count() >= least
        return enough

    async def total(self, count: Callable[[], I64], length: int) -> I64:
        return count()


def answer_plainly(work: Coroutine[Any, Any, T]) -> T:
    """Drive a coroutine that asks a `Plain` tally, and so never waits."""
    try:
        work.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    raise AssertionError("a plain tally never waits")
