"""Chosen settings: how labels are best spread over a graph, by how often labelled points are told their own label.

    P1   S ⇒ u   how many labelled points each site brings, rounded up to a multiple of 16
    P2   S       for every (k, p, α): S between labelled points without its diagonal (`graph.left_out`)
    P3   u ↔ S   what each labelled point is told by all others, at its site (`shared_scores`)
    P4   u ↔ S   with and without balance, and with three weights of class means where these are open (each point taken
                 out of its own class's): how many points of each class are told right, of how many (`secure_sum`)
    P5   all     the setting of the largest balanced accuracy, if it is above the usual one's by more than twice the
                 standard error of that; else the usual one, with the best weight of class means if that is above the
                 usual weight by half a standard error

Every label is left out once: a column of S does not depend on who is labelled. Of a site with very many labels, some
are tested, at even distances. A class with a single label cannot be told right, and does not count; classes with fewer
than three labels count together as one, and not at all if they have fewer than three together (`pools`). The number of
bits is not chosen: more of them are never worse, only dearer.

Reveals
-------
server : of all sites together, how many labelled points of each class are told right by each setting, three points or
    more at a time. With a site v: what v learns, and so more equations for the labels of others: S_g Y = Z_g at its
    labelled points, for every g.
site : the same sums; for each own labelled point its scores from all other labels, for every setting; rounded numbers
    of labelled points. With two sites, each finds the other's counts by subtraction; with m own of three labels of a
    class, the counts of the 3 - m others.
two computing parties together : as in `shared_scores`.

Assumes
-------
What `shared_scores` and `secure_sum` assume, and so not (a) of the server: it may tell one site other hits, and so have
it choose another setting, which that site notices at the next step of the run. A malicious server may use another S,
and so make another setting win for all; a malicious site may count other hits. Labels stay hidden.

Cost
----
8 bytes for each of the G t l entries of S, for G settings, t tested and l labelled points (`shared_scores`).

References
----------
Lines numbered here. [SYL24] chooses by cross-validation, and does not say how between clients.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from cloister.arrays import F64, I32, I64, U64
from cloister.errors import ParameterError, ProtocolAbort
from cloister.models import graph
from cloister.mpc.crypto.agreement import Identity
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.net.channel import Channel
from cloister.mpc.net.wire import message
from cloister.mpc.sums import secure_sum
from cloister.study import Party
from cloister.workflows.propagate_labels import shared_scores
from cloister.workflows.propagate_labels.shared_scores import PAD, check_rounded, rounded

NAME = "chosen_settings"
NEIGHBOURS = (3, 5, 10, 20)  # up to those of the graph
POWERS = (1.0, 4.0)
ALPHAS = (0.5, 0.9, 0.99)
MORE = 4.0  # times the usual weight of class means, the most that is tried
SLIGHTLY = 0.5  # standard errors by which another weight of class means must be better: three are not many
CLEARLY = 2.0  # standard errors by which another setting must be better than the usual one: the best of many is lucky
FEWEST = 3  # labels of a class whose hits are counted by themselves
TESTED = 512  # labelled points that are tested, of all sites


@dataclass(frozen=True, slots=True)
class Setting:
    n_neighbors: int  # k
    power: float  # p, of the similarities
    alpha: float
    balance: bool
    class_means: float = 0.0  # weight of how near a point is to the mean of each class
    steps: int = 0  # of a walk (`verified_propagation`); 0: until nothing changes

    @property
    def spread(self) -> dict[str, Any]:
        """What `graph.propagate` takes."""
        return {k: v for k, v in asdict(self).items() if k not in ("class_means", "steps")}


@dataclass(frozen=True, slots=True)
class Params:
    sites: tuple[Party, ...]
    server: Party
    bits: int
    usual: Setting  # the first to be tried; its neighbours are those of the graph
    classes: int

    def __post_init__(self) -> None:
        if len(self.sites) < 2 or self.classes < 2:
            raise ParameterError("a choice needs at least two sites and two classes")

    @property
    def spreads(self) -> tuple[tuple[int, float, float], ...]:
        """(k, p, α), each an S of its own; the usual one first."""
        usual = (self.usual.n_neighbors, self.usual.power, self.usual.alpha)
        few = sorted({k for k in NEIGHBOURS if k < usual[0]} | {usual[0]})
        return (usual, *(s for s in itertools.product(few, POWERS, ALPHAS) if s != usual))

    @property
    def settings(self) -> tuple[Setting, ...]:
        return tuple(Setting(*s, *form) for s in self.spreads for form in self.forms)

    @property
    def forms(self) -> tuple[tuple[bool, float], ...]:
        """Balance, and weight of the class means; the usual ones first."""
        return tuple(itertools.product((self.usual.balance, not self.usual.balance), self.weights))

    @property
    def weights(self) -> tuple[float, ...]:
        weight = self.usual.class_means
        return (weight, 0.0, MORE * weight) if weight else (0.0,)

    @property
    def sums(self) -> secure_sum.Params:
        length = (len(self.settings) + 1) * self.classes
        return secure_sum.Params(self.sites, self.server, length, to_all=True)

    def rows(self, width: int) -> int:
        """Rows of S for one setting and a site with so many labelled points, rounded."""
        return max(PAD, min(width, rounded(TESTED // len(self.sites))))

    def scores(self, widths: Mapping[Party, int]) -> shared_scores.Params:
        sizes = tuple(len(self.spreads) * self.rows(widths[u]) for u in self.sites)
        return shared_scores.Params(self.sites, sizes, self.server, self.classes)


@dataclass(frozen=True, slots=True)
class Choice:
    setting: Setting
    accuracy: float  # balanced, of labels left out; nan where nothing was chosen
    tried: tuple[tuple[Setting, float], ...] = ()


@message("P1")
class Labelled:  # S ⇒ u
    rounded: dict[Party, int]


def ideal(params: Params, xs: Mapping[Party, object]) -> dict[Party, Choice]:
    """The server gives the graph and the places of labelled points by site, a site their classes."""
    given: Any = xs[params.server]
    keys, own = given
    y = {u: np.asarray(xs[u], np.int64) for u in params.sites}
    return dict.fromkeys((*params.sites, params.server), choose(params, keys, own, y))


def roles(params: Params) -> dict[Party, object]:
    return {params.server: server} | dict.fromkeys(params.sites, site)


# ---- local steps -----------------------------------------------------------------------------------------------------


def tested(params: Params, labelled: int) -> I64:
    """Which of so many labelled points of a site are tested."""
    most = params.rows(rounded(labelled))
    return np.arange(labelled) if labelled <= most else np.linspace(0, labelled - 1, most).astype(np.int64)


def left_out(params: Params, keys: I64, own: Mapping[Party, I64]) -> dict[Party, I32]:
    """P2: for every site's columns the rows of all tested points, site by site, setting by setting, padded by zeros."""
    labelled = np.concatenate([own[u] for u in params.sites])
    cuts = np.cumsum([len(own[u]) for u in params.sites])[:-1]
    at = [own[u][tested(params, len(own[u]))] for u in params.sites]
    blocks: list[list[I32]] = [[] for _ in params.sites]
    for k, power, alpha in params.spreads:
        W = graph.adjacency(keys[:, :k], params.bits, power)
        S = graph.left_out(W, alpha, labelled, np.concatenate(at))
        for block, part, u in zip(blocks, np.split(S, np.cumsum([len(a) for a in at])[:-1]), params.sites, strict=True):
            block.append(np.pad(part, ((0, params.rows(rounded(len(own[u]))) - len(part)), (0, 0))))
    whole = np.concatenate([part for block in blocks for part in block])
    return dict(zip(params.sites, np.split(whole, cuts, axis=1), strict=True))


def pools(counts: I64) -> I64:
    """The class as which each class is counted: itself, of rare ones the first of them, -1 for not at all."""
    rare = (counts > 1) & (counts < FEWEST)
    together = int(np.argmax(rare)) if counts[rare].sum() >= FEWEST else -1
    return np.where(counts >= FEWEST, np.arange(len(counts)), np.where(rare, together, -1))


def hits(params: Params, scores: I64, y: I64, counts: I64, near: F64 | None = None) -> U64:
    """P4 of a site: points told right, by setting and class, then points tested by class.

    `near`: of its labelled points, how near each is to the means of all others (`class_means.closeness`).
    """
    at = tested(params, len(y))
    spreads = scores.reshape(len(params.spreads), -1, params.classes)[:, : len(at)]
    others = counts - graph.one_hot(y[at], params.classes)  # labels of each class, without the one left out
    rows = []
    close = None if near is None else near[at]
    pool = pools(counts)[y[at]]

    def counted(which: Any) -> I64:
        return np.bincount(pool[which & (pool >= 0)], minlength=params.classes)

    for z, (balance, weight) in itertools.product(spreads, params.forms):
        told, _ = graph.decide(z, others if balance else None, close, weight)
        rows.append(counted(told == y[at]))
    rows.append(counted(np.ones(len(at), bool)))
    return np.concatenate(rows).astype(np.uint64)


def best(params: Params, total: U64, counts: I64) -> Choice:
    """P5."""
    right, n = np.split(total.astype(np.float64).reshape(-1, params.classes), [-1])
    pool = pools(counts)
    most = np.bincount(pool[pool >= 0], counts[pool >= 0], minlength=params.classes)
    if (right > n).any() or (n > most).any():
        raise ProtocolAbort(NAME, "P5", "mismatch", "more labels were reported correct than there are")
    there = n[0] > 0
    if not there.any():
        return Choice(params.usual, math.nan)
    right, n = right[:, there], n[0, there]
    share: F64 = (right / n).mean(axis=1)
    usual = 0
    for some, enough in ((len(params.weights), SLIGHTLY), (len(share), CLEARLY)):
        p = (right[usual] + 1) / (n + 2)  # of few points none or all may be right by chance
        error = math.sqrt(float((p * (1 - p) / n).sum())) / len(n)
        at = int(share[:some].argmax())
        usual = at if share[at] > share[usual] + enough * error else usual
    at = usual
    return Choice(params.settings[at], float(share[at]), tuple(zip(params.settings, share.tolist(), strict=True)))


def choose(
    params: Params, keys: I64, own: Mapping[Party, I64], y: Mapping[Party, I64], near: Mapping[Party, F64] | None = None
) -> Choice:
    """The whole choice in the clear."""
    columns = left_out(params, keys, own)
    scores = sum(columns[u] @ graph.one_hot(y[u], params.classes) for u in params.sites)
    terms = params.scores({u: rounded(len(own[u])) for u in params.sites})
    cuts = np.split(np.asarray(scores), np.cumsum(terms.sizes)[:-1])
    counts = np.bincount(np.concatenate([y[u] for u in params.sites]), minlength=params.classes)
    close = near or dict.fromkeys(params.sites)
    parts = [hits(params, z, y[u], counts, close[u]) for u, z in zip(params.sites, cuts, strict=True)]
    return best(params, np.sum(parts, axis=0, dtype=np.uint64), counts)


# ---- roles -----------------------------------------------------------------------------------------------------------


async def site(
    ch: Channel,
    params: Params,
    y: I64,
    counts: I64,
    near: F64 | None = None,
    *,
    entropy: Entropy,
    identity: Identity,
) -> Choice:
    """Hold the classes of labelled points, in order, and the number of labels of each class at all sites."""
    announced = await ch.recv_broadcast(params.server, Labelled)  # P1
    terms = params.scores(check_rounded(params.sites, announced.rounded, ch.me, len(y)))
    z = await shared_scores.site(ch.sub("scores"), terms, y, entropy=entropy, identity=identity)  # P3
    mine = hits(params, z, y, counts, near)
    total = await secure_sum.contributor(ch.sub("hits"), params.sums, mine, entropy=entropy, identity=identity)  # P4
    assert total is not None
    return best(params, total.z, counts)  # P5


async def server(
    ch: Channel,
    params: Params,
    keys: I64,
    own: Mapping[Party, I64],
    counts: I64,
    *,
    entropy: Entropy,
    identity: Identity,
) -> Choice:
    """Hold the graph, and the places of every site's labelled points."""
    widths = {u: rounded(len(own[u])) for u in params.sites}
    await ch.broadcast(params.sites, Labelled(widths))  # P1
    columns = left_out(params, keys, own)  # P2
    terms = params.scores(widths)
    await shared_scores.server(ch.sub("scores"), terms, columns, entropy=entropy, identity=identity)  # P3
    total = await secure_sum.aggregator(ch.sub("hits"), params.sums)  # P4
    return best(params, total.z, counts)  # P5
