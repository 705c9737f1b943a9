"""Propagation terms: what both modes of label propagation have in common before, beside and after their graph.

    L1    u ↔ u   a seed that S does not know (`common_seed`); how many points, which classes (`point_roster`)
    L3    u       Π (L × d) standard normal, from the seed
    L4    u       B_u = [V_u Πᵀ ≥ 0], packed
    L10   u → S   which of its points are labelled (but for the published mode, where L12 says it)
    L12   u ↔ S   with `balance`, `choose` or `class_means`: the number of labels of each class, over all sites
                  (`secure_sum`)
          u ↔ S   with `class_means`: the mean direction of each class, at the sites (`class_means`)
          u ↔ S   with `choose`: neighbours, power, α and balance, by labels that are left out (`chosen_settings`)

Groups: very many small sites are dealt into groups with a graph of their own, side by side at the server.

Reveals
-------
server : which points are labelled, and how many classes there are.
with `balance`, `choose` or `class_means`, everyone : how many labels of each class all sites have together.
with `class_means`, every site : the mean direction of each class with at least `least` labels in all.
with `choose` : what `chosen_settings` says.

Assumes
-------
What the parts assume.

References
----------
[SYL24] Scott, Yeo, Lampert, TMLR 2024, Algorithm 1; L numbers are its lines.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from cloister.arrays import F64, I32, I64, U8
from cloister.errors import DataError, ParameterError, ProtocolAbort
from cloister.models import graph
from cloister.mpc.crypto.agreement import Identity
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.net.channel import Channel
from cloister.mpc.net.wire import message
from cloister.mpc.sums import common_seed, retry_without_dropouts, secure_sum
from cloister.papers.hamming.pair_distances import Engine, check_engine
from cloister.study import Party
from cloister.workflows.propagate_labels import chosen_settings, class_means, point_roster
from cloister.workflows.propagate_labels.chosen_settings import Choice, Setting
from cloister.workflows.propagate_labels.class_means import Params as MeansParams
from cloister.workflows.propagate_labels.point_roster import Roster
from cloister.workflows.propagate_labels.shared_codes import offsets

NAME = "propagation_terms"
MOST_WEIGHT = 64.0
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Params:
    sites: tuple[Party, ...]
    server: Party
    bits: int = 4096  # L
    n_neighbors: int = 10  # k
    alpha: float = 0.99
    engine: Engine = "mpc"
    classes: tuple[str, ...] = ()
    balance: bool = False  # divide the score of a class by the number of its labels
    groups: int = 1  # very many small sites are split, and each group has a graph of its own
    power: float = 1.0  # p, of the similarities
    choose: bool = False  # try other settings than these, too, with up to as many neighbours
    class_means: float = 0.0  # weight of how near a point is to the mean of each class; 0 opens no mean
    least: int = 2  # labels of a class over all sites, below which its mean is not opened

    def __post_init__(self) -> None:
        point_roster.Params(self.sites, self.server, self.classes)
        if not 1 <= self.groups <= len(self.sites) // 2:
            raise ParameterError(
                f"'groups' must leave at least two sites in each: at most {len(self.sites) // 2}, found {self.groups}"
            )
        graph.check_sizes(1 << 40, self.bits, self.n_neighbors, self.alpha, self.power)
        if not 0 <= self.class_means <= MOST_WEIGHT or self.least < 2:
            raise ParameterError(
                f"'class_means' must lie between 0 and {MOST_WEIGHT:g}, and take two labels or more, found"
                f" {self.class_means:g} and {self.least}"
            )
        check_engine(self.engine)

    def group(self, i: int) -> Params:
        """The i-th group: every `groups`-th site."""
        return replace(self, sites=self.sites[i :: self.groups], groups=1)

    @property
    def setting(self) -> Setting:
        return Setting(self.n_neighbors, self.power, self.alpha, self.balance, self.class_means)

    @property
    def counted(self) -> bool:
        """Whether labels of each class are counted."""
        return self.balance or self.choose or self.class_means > 0

    def means(self, sites: tuple[Party, ...], counts: I64, width: int) -> MeansParams:
        return MeansParams(sites, self.server, tuple(int(n) for n in counts), width, self.least)

    def choice(self, sites: tuple[Party, ...], classes: int) -> chosen_settings.Params:
        return chosen_settings.Params(sites, self.server, self.bits, self.setting, classes)


@message("L10")
class Labelled:  # u → S
    mask: U8  # (⌈n_u / 8⌉,), which points are labelled
    classes: int


@message("H1")
class Classes:  # u → S
    count: int


@dataclass(frozen=True)
class Labels:
    """What a site has at the end."""

    classes: tuple[str, ...]
    label: I64  # (n_u,) index into classes, -1 where no label reaches
    confidence: F64  # (n_u,)
    scores: I64  # (n_u, C) Z[R_u], each row up to a factor
    sites: tuple[Party, ...]  # whose points are in the graph
    choice: Choice

    @property
    def names(self) -> list[str | None]:
        return [self.classes[i] if i >= 0 else None for i in self.label]


@dataclass(frozen=True)
class Served:
    """What the server has at the end."""

    sites: tuple[Party, ...]
    sizes: tuple[int, ...]
    labelled: I64 | None  # points, by their place in the graph; not hardened
    distances: I32 | None  # H, published only
    keys: I64 | None  # the graph, semi-honest only
    finished: tuple[Party, ...]  # who got their labels
    choice: Choice


def ideal(
    params: Params, xs: Mapping[Party, tuple[F64, Sequence[str | None]]], seed: bytes = bytes(32)
) -> dict[Party, Labels | None]:
    """What a trusted party would hand out, for a given seed of the hyperplanes (of each group the same)."""
    given: dict[Party, Labels | None] = {}
    if params.groups > 1:
        parts = (params.group(i) for i in range(params.groups))
        for part in parts:
            given |= ideal(part, {u: x for u, x in xs.items() if u in part.sites}, seed)
        return given
    sites = tuple(u for u in params.sites if u in xs)
    classes = params.classes or class_names([name for u in sites for name in xs[u][1]])
    planes = graph.hyperplanes(seed, params.bits, xs[sites[0]][0].shape[1])
    packed = np.concatenate([graph.codes(xs[u][0], planes) for u in sites])
    y = np.concatenate([label_codes(xs[u][1], classes) for u in sites])
    at = offsets(tuple(len(xs[u][0]) for u in sites))
    owner = np.concatenate([np.full(len(xs[u][0]), i) for i, u in enumerate(sites)])
    cuts = [slice(at[i], at[i + 1]) for i in range(len(sites))]
    counts = np.bincount(y[y >= 0], minlength=len(classes))
    v = {u: class_means.directions(xs[u][0]) for u in sites}
    label = {u: y[c] for u, c in zip(sites, cuts, strict=True)}
    known = {u: (v[u][label[u] >= 0], label[u][label[u] >= 0], seed) for u in sites}
    means = class_means.ideal(params.means(sites, counts, xs[sites[0]][0].shape[1]), known)
    sums = means[sites[0]] if params.class_means else None
    choice = Choice(params.setting, math.nan)
    if params.choose:
        keys = graph.nearest(packed, params.n_neighbors)
        own = {u: at[i] + np.flatnonzero(y[cuts[i]] >= 0) for i, u in enumerate(sites)}
        terms = params.choice(sites, len(classes))
        near = None if sums is None else {u: class_means.closeness(known[u][0], sums, known[u][1]) for u in sites}
        choice = chosen_settings.choose(terms, keys, own, {u: y[p] for u, p in own.items()}, near)
    scores = graph.propagate(packed, y, n_classes=len(classes), sites=owner, **choice.setting.spread).scores
    found: dict[Party, Labels | None] = {params.server: None}
    for u, c in zip(sites, cuts, strict=True):
        label_of, sure = decide(choice, scores[c], counts, None if sums is None else class_means.closeness(v[u], sums))
        found[u] = Labels(classes, label_of, sure, scores[c], sites, choice)
    return found


# ---- local steps -----------------------------------------------------------------------------------------------------


def class_names(labels: Sequence[str | None]) -> tuple[str, ...]:
    return tuple(sorted({name for name in labels if name is not None}))


def label_codes(labels: Sequence[str | None], classes: tuple[str, ...]) -> I64:
    place = {name: i for i, name in enumerate(classes)}
    return np.array([-1 if name is None else place[name] for name in labels], np.int64)


def decide(choice: Choice, scores: I64, counts: I64 | None, near: F64 | None) -> tuple[I64, F64]:
    """Label and confidence of a site's points, by the setting that was chosen."""
    how = choice.setting
    return graph.decide(scores, counts if how.balance else None, near if how.class_means else None, how.class_means)


def check_inputs(vectors: F64, labels: Sequence[str | None]) -> None:
    if vectors.ndim != 2 or 0 in vectors.shape or vectors.dtype != np.float64:
        raise DataError(f"expected a table of numbers, one row per point, found {vectors.dtype} of {vectors.shape}")
    if not np.isfinite(vectors).all():
        raise DataError("vectors have missing or infinite values; fill them, or remove these points")
    if len(labels) != len(vectors):
        raise DataError(f"expected one label (or None) per point, found {len(labels)} for {len(vectors)} points")


def unpack_mask(mask: U8, n: int) -> I64:
    return np.flatnonzero(np.unpackbits(mask, count=n)).astype(np.int64)


# ---- what both modes have in common ----------------------------------------------------------------------------------


async def begin(
    ch: Channel, params: Params, vectors: F64, labels: Sequence[str | None], *, entropy: Entropy, identity: Identity
) -> tuple[Roster, U8, I64, bytes]:
    """L1 to L4 at a site: who takes part, this site's codes and classes, and a secret of the sites."""
    check_inputs(vectors, labels)
    seeds = common_seed.Params(params.sites, params.server)
    seed = await common_seed.site(ch.sub("seed"), seeds, entropy=entropy, identity=identity)  # L1
    names = class_names(labels)
    listed = point_roster.Params(params.sites, params.server, params.classes)
    n, d = vectors.shape
    roster = await point_roster.site(ch.sub("roster"), listed, n, d, names, seed.secret, entropy=entropy)
    check_graph(params, roster.sizes)
    planes = graph.hyperplanes(seed.secret, params.bits, d)  # L3
    return roster, graph.codes(vectors, planes), label_codes(labels, roster.classes), seed.secret  # L4


async def open_study(ch: Channel, params: Params) -> Roster:
    """L1 at the server."""
    await common_seed.coordinator(ch.sub("seed"), common_seed.Params(params.sites, params.server))
    listed = point_roster.Params(params.sites, params.server, params.classes)
    roster = await point_roster.server(ch.sub("roster"), listed)
    check_graph(params, roster.sizes)
    return roster


def check_graph(params: Params, sizes: Sequence[int]) -> None:
    graph.check_sizes(sum(sizes), params.bits, params.n_neighbors, params.alpha, params.power)


async def labelled_points(
    ch: Channel, params: Params, roster: Roster, sites: tuple[Party, ...], kind: type[Any]
) -> tuple[dict[Party, I64], I64, int]:
    """At the server: which points are labelled, by site (`kind` tells); labels of each class, if counted; classes."""
    masks = await retry_without_dropouts.survivors(ch, sites, kind, 2, mask=(None,))
    at = dict(zip(sites, offsets(tuple(roster.size(u) for u in sites)), strict=False))
    own = {u: at[u] + unpack_mask(m.mask, roster.size(u)) for u, m in masks.items()}
    check_labelled(np.concatenate(list(own.values())))
    told = {m.classes for m in masks.values()}
    if len(told) != 1 or min(told) < 2:
        raise ProtocolAbort(NAME, "L12", "mismatch", "the sites do not agree on the classes")
    n_classes = told.pop()
    counts = np.zeros(n_classes, np.int64)
    if params.counted:
        sums = secure_sum.Params(sites, params.server, n_classes, to_all=True)
        counts = (await secure_sum.aggregator(ch.sub("counts"), sums)).z.astype(np.int64)
    if params.class_means:
        await class_means.server(ch.sub("means"), params.means(sites, counts, roster.width))
    return own, counts, n_classes


def check_labelled(labelled: I64) -> None:
    if not len(labelled):
        raise ProtocolAbort(NAME, "L12", "no-labels", "no point of the sites that are left has a label")


@dataclass(frozen=True)
class Settled:
    """What a site has before its scores come."""

    choice: Choice
    counts: I64 | None  # labels of each class
    near: F64 | None  # how near its points are to the mean of each class

    def decide(self, scores: I64) -> tuple[I64, F64]:
        return decide(self.choice, scores, self.counts, self.near)


async def settle(
    ch: Channel,
    params: Params,
    sites: tuple[Party, ...],
    points: tuple[F64, I64, int],
    secret: bytes,
    *,
    entropy: Entropy,
    identity: Identity,
) -> Settled:
    """At a site with these points, labels and number of classes: L12 up to the setting that counts."""
    vectors, labels, n_classes = points
    y, counts, near, close = labels[labels >= 0], None, None, None
    if params.counted:
        sums = secure_sum.Params(sites, params.server, n_classes, to_all=True)
        mine = np.bincount(y, minlength=n_classes).astype(np.uint64)
        total = await secure_sum.contributor(ch.sub("counts"), sums, mine, entropy=entropy, identity=identity)
        assert total is not None
        counts = total.z.astype(np.int64)
    if params.class_means and counts is not None:
        v = class_means.directions(vectors)
        known = v[labels >= 0]
        terms = params.means(sites, counts, vectors.shape[1])
        means = await class_means.site(ch.sub("means"), terms, known, y, secret, entropy=entropy, identity=identity)
        near, close = class_means.closeness(v, means), class_means.closeness(known, means, y)
    choice = Choice(params.setting, math.nan)
    if params.choose and counts is not None:

        async def step(c: Channel, left: tuple[Party, ...]) -> Choice:
            terms = params.choice(left, len(counts))
            return await chosen_settings.site(c, terms, y, counts, close, entropy=entropy, identity=identity)

        choice, _ = await retry_without_dropouts.follow(ch.sub("choice"), params.server, step)
    return Settled(choice, counts, near)


async def settle_all(
    ch: Channel,
    params: Params,
    keys: I64,
    own: Mapping[Party, I64],
    counts: I64,
    *,
    entropy: Entropy,
    identity: Identity,
) -> tuple[Choice, dict[Party, I64], Any]:
    """At the server: the setting that counts, labelled points of the sites that are left, and W."""
    choice, left = Choice(params.setting, math.nan), tuple(own)
    if params.choose:

        async def step(c: Channel, left: tuple[Party, ...]) -> Choice:
            terms = params.choice(left, len(counts))
            mine = {u: own[u] for u in left}
            return await chosen_settings.server(c, terms, keys, mine, counts, entropy=entropy, identity=identity)

        choice, left = await retry_without_dropouts.lead(ch.sub("choice"), left, 2, step)
    how = choice.setting
    return choice, {u: own[u] for u in left}, graph.adjacency(keys[:, : how.n_neighbors], params.bits, how.power)


async def in_group(ch: Channel, params: Params, role: Callable[[Channel, Params], Awaitable[T]]) -> T:
    """A site: take part in its own group."""
    i = params.sites.index(ch.me) % params.groups
    return await role(ch.sub(f"group-{i}") if params.groups > 1 else ch, params.group(i))


async def all_groups(
    ch: Channel, params: Params, role: Callable[[Channel, Params], Coroutine[Any, Any, Served]]
) -> tuple[Served, ...]:
    """The server: all groups side by side. A group that fails ends by itself, as long as one is left."""
    if params.groups == 1:
        return (await role(ch, params.group(0)),)
    parts = [role(ch.sub(f"group-{i}"), params.group(i)) for i in range(params.groups)]
    ended = await asyncio.gather(*parts, return_exceptions=True)
    served = tuple(x for x in ended if isinstance(x, Served))
    for x in ended:
        if isinstance(x, BaseException) and not (isinstance(x, ProtocolAbort) and served):
            raise x
    return served
