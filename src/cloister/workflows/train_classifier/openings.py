"""Openings: how the classifiers begin together, and checked sums that are opened one after the other and counted.

    begin_site, begin_coordinator   genes in common, a secret of the sites, the labels; before any sum
    Openings                        the next checked sum; the receipt of every party counts them; the final comparison
    code_for, decode                fixed point for sums of a known reach, and back

Sends and opens in the name of the protocol that it works for.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from cloister.arrays import F64, U64
from cloister.errors import ProtocolAbort
from cloister.mpc.crypto.agreement import Identity
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.crypto.fixed_point import FixedPoint, check_range
from cloister.mpc.net.channel import Channel
from cloister.mpc.sums import checked_sum, common_seed, consistency_check
from cloister.study import Party
from cloister.workflows.common import common_genes, gene_moments
from cloister.workflows.train_classifier import common_labels
from cloister.workflows.train_classifier.logistic_terms import Labelled, Params


@dataclass(frozen=True, slots=True)
class Start:
    """What all know before the first sum, and what the sites alone know."""

    common: tuple[str, ...]  # genes; none for an embedding
    labels: tuple[str, ...]  # the vocabulary
    columns: int  # of the embedding
    seed: common_seed.Seed | None = None  # at a site


async def begin_site(ch: Channel, params: Params, mine: Labelled, *, entropy: Entropy, identity: Identity) -> Start:
    common: tuple[str, ...] = ()
    labels, own = params.common_labels, own_of(params, mine)
    common_labels.check_own(labels, own)
    if not params.embedding:
        agreement = common_genes.Params(params.sites, params.coordinator)
        common = (await common_genes.site(ch.sub("genes"), agreement, params.kind, list(mine.names))).names
        gene_moments.warn_of_share(params, gene_moments.Cells(mine.names, mine.x, mine.library), common)
    pair = common_seed.Params(params.sites, params.coordinator, everyone=True)
    seed = await common_seed.site(ch.sub("seed", pair), pair, entropy=entropy, identity=identity)
    agreed = await common_labels.site(ch.sub("labels", labels), labels, own)
    return Start(common, agreed.labels, agreed.columns, seed)


async def begin_coordinator(ch: Channel, params: Params) -> Start:
    common: tuple[str, ...] = ()
    if not params.embedding:
        agreement = common_genes.Params(params.sites, params.coordinator)
        common = (await common_genes.coordinator(ch.sub("genes"), agreement)).names
    pair = common_seed.Params(params.sites, params.coordinator, everyone=True)
    await common_seed.coordinator(ch.sub("seed", pair), pair)
    labels = params.common_labels
    agreed = await common_labels.coordinator(ch.sub("labels", labels), labels)
    return Start(common, agreed.labels, agreed.columns)


def own_of(params: Params, mine: Labelled) -> common_labels.Own:
    return common_labels.Own(mine.space, mine.x.shape[1] if params.embedding else 0, mine.own_labels)


def start_cost(params: Params, up: int, down: int) -> list[dict[Party, tuple[int, int]]]:
    """Of what comes before the first sum, for `up` bytes of a site's gene names and `down` of those in common."""
    parts = [common_seed.cost(common_seed.Params(params.sites, params.coordinator))]
    if not params.embedding:
        parts.append(common_genes.cost(common_genes.Params(params.sites, params.coordinator), up, down))
    return [*parts, common_labels.cost(params.common_labels)]


def view_of(params: Params) -> consistency_check.Params:
    return consistency_check.Params(params.sites, params.coordinator)


@dataclass
class Openings:
    """Opens checked sums, one after the other, and counts them. S adds nothing: `words` is called at the sites only."""

    ch: Channel
    protocol: str
    params: Params
    most: int
    entropy: Entropy | None = None  # at a site, as the next two
    identity: Identity | None = None
    seed: common_seed.Seed | None = None
    count: int = 0

    @property
    def left(self) -> int:
        return self.most - self.count

    async def open(self, line: str, what: str, length: int, words: Callable[[], U64]) -> U64:
        self.count += 1
        p = checked_sum.Params(self.params.sites, self.params.coordinator, length)
        ch = self.ch.sub(f"sum/{self.count}", (p, line))
        if self.seed is None:
            z = await checked_sum.coordinator(ch, p)
        else:
            z = await checked_sum.site(ch, p, words(), self.seed)
        shown = f"{what}: opening {self.count} of at most {self.most}"
        self.ch.step(shown, protocol=self.protocol, line=line)
        return self.ch.reveal(z, to=self.ch.me, line=line, what=shown, protocol=self.protocol)

    async def compare(self) -> None:
        """After the last opening: every broadcast of the run was the same at all sites, or the run aborts."""
        if self.seed is None:
            await consistency_check.coordinator(self.ch, view_of(self.params))
        else:
            assert self.identity is not None
            await consistency_check.site(self.ch, view_of(self.params), identity=self.identity)

    def decode(self, code: FixedPoint, words: U64, line: str) -> F64:
        """Back to reals; nothing beyond what all cells together can give."""
        x = code.decode(words)
        if not np.all(np.abs(x) <= code.bound * (1 + 1e-6) + code.resolution * code.parties):
            raise ProtocolAbort(self.protocol, line, "absurd", "a sum is larger than all cells together can give")
        return x


def code_for(params: Params, reach: float) -> FixedPoint:
    """As many fraction bits as sums up to `reach` leave free, at most 40."""
    n = len(params.sites)
    reach = max(reach, 1.0) * (1 + 1e-6)
    bits = max(0, min(40, 61 - math.ceil(math.log2(n * reach))))
    check_range(bits, reach, n)
    return FixedPoint(bits, reach, n)
