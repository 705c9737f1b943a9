"""Opened sums: a secret of the sites, checked sums one after the other, and the comparison at the end.

    begin     common seed of all sites
    add       the next checked sum; every site contributes through `Channel.contribute`, and all receive the total
    finish    same_view: all sites received the same broadcasts

Reals travel as whole and fractional parts (`gene_moments.split_sum`), so that sums need no bound that is agreed on
before. Sends and opens in the name of the protocol that it works for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from cloister.arrays import F64
from cloister.disclosure import Contribution
from cloister.errors import ProtocolAbort
from cloister.mpc.crypto.agreement import Identity
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.net.channel import Channel
from cloister.mpc.sums import checked_sum, common_seed, consistency_check
from cloister.study import Party
from cloister.workflows.common.gene_moments import LARGEST_SUM, join_sum, split_sum


@dataclass
class OpenedSums:
    """Opens checked sums at one party. The coordinator adds nothing: its `seed` is None."""

    ch: Channel
    protocol: str
    sites: tuple[Party, ...]
    coordinator: Party
    entropy: Entropy | None = None  # at a site, as the next two
    identity: Identity | None = None
    seed: common_seed.Seed | None = None
    count: int = 0

    async def begin(self) -> None:
        pair = common_seed.Params(self.sites, self.coordinator, everyone=True)
        ch = self.ch.sub("seed", pair)
        if self.entropy is None or self.identity is None:
            await common_seed.coordinator(ch, pair)
        else:
            self.seed = await common_seed.site(ch, pair, entropy=self.entropy, identity=self.identity)

    async def add(self, line: str, what: str, length: int, part: Callable[[], Contribution]) -> F64:
        """The total of `length` reals over all sites; `part` is called at the sites only."""
        self.count += 1
        p = checked_sum.Params(self.sites, self.coordinator, 2 * length)
        ch = self.ch.sub(f"sum/{self.count}", (p, line))
        if self.seed is None:
            z = await checked_sum.coordinator(ch, p)
        else:
            entropy = self.entropy
            assert entropy is not None
            own = part().map(lambda x: split_sum(np.asarray(x, np.float64), len(self.sites), entropy))
            words = ch.contribute(own, line=line, what=what, protocol=self.protocol)
            z = await checked_sum.site(ch, p, words, self.seed)
        self.ch.step(what, protocol=self.protocol, line=line)
        total = join_sum(self.ch.reveal(z, to=self.ch.me, line=line, what=what, protocol=self.protocol))
        if not np.all(np.abs(total) <= len(self.sites) * LARGEST_SUM):
            raise ProtocolAbort(self.protocol, line, "absurd", "a sum is larger than all cells together can give")
        return total

    async def finish(self) -> None:
        view = consistency_check.Params(self.sites, self.coordinator)
        if self.identity is None:
            await consistency_check.coordinator(self.ch, view)
        else:
            await consistency_check.site(self.ch, view, identity=self.identity)


def cost(
    sites: tuple[Party, ...], coordinator: Party, lengths: list[int], *, finish: bool = True
) -> dict[Party, tuple[int, int]]:
    """Messages and bytes of `begin`, sums of these lengths and, unless another protocol does it, `finish`."""
    parts = [checked_sum.cost(checked_sum.Params(sites, coordinator, 2 * length)) for length in lengths]
    parts.append(common_seed.cost(common_seed.Params(sites, coordinator)))
    if finish:
        parts.append(consistency_check.cost(consistency_check.Params(sites, coordinator)))
    return add_costs((coordinator, *sites), parts)


def add_costs(
    parties: tuple[Party, ...], parts: Sequence[Mapping[Party, tuple[int, int]]]
) -> dict[Party, tuple[int, int]]:
    return {u: (sum(p[u][0] for p in parts), sum(p[u][1] for p in parts)) for u in parties}
