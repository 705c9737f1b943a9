"""Pooled queries: contributions of all sites, added up by checked sums, one numbered sub-protocol each.

A protocol of many sums (grow a forest, find a cut) is written once, against `Totals`, and runs at every party. A site
passes its own contribution, the coordinator none, and `Plain` adds up the contributions of several sites in one place,
for `ideal`.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np

from cloister.arrays import I64, U64
from cloister.disclosure import Contribution, constant, join
from cloister.mpc.crypto.agreement import Identity
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.net.channel import Channel
from cloister.mpc.parties import Party
from cloister.mpc.sums import checked_sum, common_seed

T = TypeVar("T")
Part = Callable[[], Contribution]  # of one site


class Totals(Protocol):
    """Sums over all sites; `parts` are the contributions of the sites that are here."""

    async def total(self, parts: Sequence[Part], length: int, most: int, *, line: str, what: str) -> tuple[I64, bytes]:
        """Pooled whole numbers from 0 to `most` each, and a coin that no single party could foresee or choose."""


def lanes_of(most: int) -> int:
    """Numbers from 0 to `most` that one word holds."""
    return 63 // most.bit_length()


def pack(values: I64, most: int) -> U64:
    """Several numbers per word; sums of packed words are the packed sums as long as none exceeds `most`."""
    lanes, bits = lanes_of(most), most.bit_length()
    padded = np.zeros(-(-len(values) // lanes) * lanes, np.uint64)
    padded[: len(values)] = values.astype(np.uint64)
    shifts = np.arange(lanes, dtype=np.uint64) * np.uint64(bits)
    packed: U64 = (padded.reshape(-1, lanes) << shifts).sum(axis=1, dtype=np.uint64)
    return packed


def unpack(words: U64, length: int, most: int) -> I64:
    shifts = np.arange(lanes_of(most), dtype=np.uint64) * np.uint64(most.bit_length())
    values = (words[:, None] >> shifts) & np.uint64((1 << most.bit_length()) - 1)
    return values.ravel()[:length].astype(np.int64)


@dataclass
class Asking:
    """A `Totals` over the channel. Every sum is checked and of all `sites`; one that drops out ends the run."""

    ch: Channel
    sites: tuple[Party, ...]  # that agreed on the seed
    coordinator: Party
    protocol: str
    seed: common_seed.Seed | None = None  # None at the coordinator
    entropy: Entropy | None = None
    identity: Identity | None = None
    asked: int = 0

    async def words(self, parts: Sequence[Part], length: int, *, line: str, what: str) -> U64:
        """The pooled words, modulo 2^64."""
        self.asked += 1
        ch = self.ch.sub(f"ask/{self.asked}")
        params = checked_sum.Params(self.sites, self.coordinator, length)
        if self.seed is None:
            return await checked_sum.coordinator(ch, params)
        (part,) = parts
        words = ch.contribute(part(), protocol=self.protocol, line=line, what=what)
        return await checked_sum.site(ch, params, words, self.seed)

    async def total(self, parts: Sequence[Part], length: int, most: int, *, line: str, what: str) -> tuple[I64, bytes]:
        def packed(part: Part) -> Part:
            def make() -> Contribution:
                assert self.entropy is not None
                coin = constant(self.entropy.uint64(1) >> np.uint64(16), "a random word: each site's share of the coin")
                return join([coin, part().map(lambda x: pack(np.ravel(x).astype(np.int64), most))])

            return make

        size = 1 + -(-length // lanes_of(most))
        z = await self.words([packed(part) for part in parts], size, line=line, what=what)
        return unpack(z[1:], length, most), z[:1].tobytes()


@dataclass
class Plain:
    """A `Totals` over the rows of several sites in one place."""

    asked: int = 0

    async def total(self, parts: Sequence[Part], length: int, most: int, *, line: str, what: str) -> tuple[I64, bytes]:
        self.asked += 1
        pooled = np.zeros(length, np.int64)
        for part in parts:
            pooled += np.ravel(part().values).astype(np.int64)
        return pooled, self.asked.to_bytes(8, "little")


def answer_plainly(work: Coroutine[Any, Any, T]) -> T:
    """Drive a coroutine that uses a `Plain` tally, and so never waits."""
    try:
        work.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    raise AssertionError("a plain tally never waits")
