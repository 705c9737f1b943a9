"""Verified label propagation over a graph that nobody sees, with malicious security against one party.

    L1-4  u ↔ u   as in `label_propagation`: common seed, sizes and class names, codes
    H1    u → 3   codes, shared, proved to be bits; labels as rows of bits, proved to have at most one 1
    H2    3       distances; the k smallest of every row, whose columns stay shared                     (verified V6)
    H3    3       A, the bits of these columns, as numbers                                             (verified V14)
    H4    3       u, the weight of what a point passes on, from the column sums of A; 0 for hubs
    H5    3       Z_0 = u ∘ Y, Z_{t+1} = u ∘ (A + Aᵀ) Z_t, R = Σ_t c_{T-t} Z_t                   (`models.graph.Walk`)
          u ↔ 3   before the first opening (H6 or H8): this party does not start again; the three wait for all of these
    H6    3       with `choose`: for each setting the number of labelled points whose label the labels of three other
                  folds predict; the index of the largest number is opened to all
    H7    3       the largest class of every row of R; H5 again, from these labels and the given ones; then the largest
                  class of every row, and its part of the row in eighths
    H8    3 → u   both, for u's own points

The three computing parties are the first three sites, or two sites and the server. Every message of theirs is proved
before something that depends on it is opened (`verified`). R is an integer below a public bound, so nothing is
truncated and nothing wraps.

Reveals
-------
server : how many points each site has, and how many classes there are. With `choose`, the index of the setting.
site : for each own point a label, or that none arrives, and its rounded score: one of eight levels. The sizes and class
    names of the others. With `choose`, the index of the setting.
computing party : no more than as a site or as the server, if it deviates too.
two computing parties together : all codes and all labels. With two sites, so do the server and one site.
what labels reveal : a site chooses its own points. Points that surround a vector that it knows get the label of the
    cell that has this vector. 2k + 1 points reveal whether a cell of another site lies within an angle of any vector.
    So a site can locate cells of others, in about 16,000 points for one cell in 20 dimensions (`attacks.propagation`).
    Every run reveals at most one label and one level for each point. A site's budget counts the points of every other
    site (`query_cells`) in `propagate-labels`; `fine-tune` does not count them.
with `choose` : a site can make the index depend on one cell of another site: less than three bits in a run.
malicious coordinator : it may leave sites out, and run disjoint groups of sites apart. No site takes part in two
    openings.

Assumes
-------
At most one party deviates, in any way (`verified`); no two of the three computing parties collude. Points and labels of
a site are not verified. A site that drops out before the first opening (H6 or H8) is left out, and H1 starts again
without it. After the first opening nothing starts again: the run ends.

Cost
----
For n points, codes of L bits, rings of κ = ⌈log2 (L + 2)⌉ and κ' ≤ 44 bits and b = ⌈log2 n⌉: about 7κ + 6 (κ + b) +
1.2 (3 (κ + b) + 3) + 3k + 3κ' bits for each pair of points, all three together; 6κ' n C T bits for T steps of
two walks.

References
----------
[SYL24] Algorithm 1, lines 1-7. [ZBL+04] Zhou et al., NeurIPS 2003: propagation. Lines H1 to H8 are numbered here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from cloister.arrays import F64, I64, U8, U64
from cloister.errors import ParameterError, ProtocolAbort
from cloister.models import graph
from cloister.models.graph import Walk
from cloister.mpc.crypto.agreement import Identity
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.crypto.replicated import Ring, Shared, index_bits, join
from cloister.mpc.net.channel import Channel
from cloister.mpc.net.wire import message
from cloister.mpc.sums import retry_without_dropouts
from cloister.mpc.three_party.packing import planes_of
from cloister.mpc.three_party.verified import Chain, Verified, XorShares, stacked, together, zeros
from cloister.study import Party
from cloister.workflows.propagate_labels import propagation_terms
from cloister.workflows.propagate_labels.chosen_settings import Choice, Setting
from cloister.workflows.propagate_labels.point_roster import Roster
from cloister.workflows.propagate_labels.propagation_terms import Labels, Params, Served, all_groups, begin, in_group
from cloister.workflows.propagate_labels.shared_codes import check, computing, offsets

__all__ = ["Params", "ideal", "roles", "server", "settings", "site"]

NAME = "verified_propagation"
BLOCK = 1 << 22  # distances at once; a selection takes about 80 bytes for each
WORD = 64  # points of one word of a plane
FOLDS = 4  # of labels, where a setting is chosen
ALPHAS = (0.5, 0.9, 0.99)
SHORT = 4  # steps of the shorter walks that `choose` tries
HEAD_START = 6  # the usual setting wins unless another one has 2^-6 of all labels more
Charge = Callable[[Party, int], None]
QUICK = 1 << 15  # words at once whose bits are found in few rounds


def settings(params: Params) -> tuple[Walk, ...]:
    """The walks that `choose` tries, the usual one first; without `choose`, that one alone."""
    usual = Walk.of(params.n_neighbors, params.alpha)
    if not params.choose:
        return (usual,)
    lengths = sorted({min(SHORT, usual.steps), usual.steps}, reverse=True)
    walks = (Walk.of(params.n_neighbors, alpha, steps) for alpha in ALPHAS for steps in lengths)
    return tuple(dict.fromkeys((usual, *walks)))


def ring_of_walks(walks: Sequence[Walk], n: int) -> Ring:
    """Holds all scores, and numbers of points."""
    return Ring(max(n.bit_length() + 2, *(walk.ring_bits for walk in walks)))


def check_params(params: Params) -> None:
    """Raise where options ask for what is not computed under sharing."""
    if params.engine != "mpc":
        raise ParameterError(
            f"'hamming' is '{params.engine}', which protects from parties that follow the protocol only; use"
            " hamming=mpc, or mode semi-honest or published"
        )
    for name, wanted in (("balance", params.balance), ("class_means", params.class_means > 0)):
        if wanted:
            raise ParameterError(
                f"'{name}' opens counts or means of labels by class, which mode hardened does not; leave it out, or"
                " use mode semi-honest"
            )
    settings(params)


def ideal(
    params: Params, xs: Mapping[Party, tuple[F64, Sequence[str | None]]], seed: bytes = bytes(32)
) -> dict[Party, Labels | None]:
    """What a trusted party would hand out, for a given seed of the hyperplanes (of each group the same)."""
    check_params(params)
    if params.groups > 1:
        every: dict[Party, Labels | None] = {}
        for part in (params.group(i) for i in range(params.groups)):
            every |= ideal(part, {u: x for u, x in xs.items() if u in part.sites}, seed)
        return every
    sites = tuple(u for u in params.sites if u in xs)
    classes = params.classes or propagation_terms.class_names([name for u in sites for name in xs[u][1]])
    planes = graph.hyperplanes(seed, params.bits, xs[sites[0]][0].shape[1])
    packed = np.concatenate([graph.codes(xs[u][0], planes) for u in sites])
    y = np.concatenate([propagation_terms.label_codes(xs[u][1], classes) for u in sites])
    at = offsets(tuple(len(xs[u][0]) for u in sites))
    near = graph.split_keys(graph.nearest(packed, params.n_neighbors), len(packed))[0]
    fold = np.concatenate([np.arange(len(xs[u][0])) % FOLDS for u in sites])
    walks = settings(params)
    number = predicted(walks, near, y, fold, len(classes)) if params.choose else 0
    scores = graph.walk_twice(near, y, len(classes), walks[number], ring_of_walks(walks, len(y)).bits)
    label, level = graph.decide_walk(scores)
    choice = choice_of(params, walks[number])
    made: dict[Party, Labels | None] = {params.server: None}
    for u, start, stop in zip(sites, at[:-1], at[1:], strict=True):
        made[u] = labels_of(classes, label[start:stop], level[start:stop], sites, choice)
    return made


def predicted(walks: Sequence[Walk], near: I64, y: I64, fold: I64, n_classes: int) -> int:
    """H6 in the clear: the index of the setting that predicts the most labels."""
    hits = []
    for walk in walks:
        right = 0
        for f in range(FOLDS):
            scores = graph.walk(near, np.where(fold == f, -1, y), n_classes, walk, 0)  # without votes for hubs
            label, _ = graph.decide_walk(scores)
            right += int(((label == y) & (y >= 0) & (fold == f)).sum())
        hits.append(right)
    hits[0] += int((y >= 0).sum()) >> HEAD_START
    return int(np.argmax(hits))


def choice_of(params: Params, walk: Walk) -> Choice:
    return Choice(Setting(params.n_neighbors, 1.0, walk.alpha, balance=False, steps=walk.steps), math.nan)


def labels_of(classes: tuple[str, ...], label: I64, level: I64, sites: tuple[Party, ...], choice: Choice) -> Labels:
    scores = (level + 1)[:, None] * graph.one_hot(label, len(classes))
    return Labels(classes, label, graph.level_confidence(label, level, len(classes)), scores, sites, choice)


def roles(params: Params) -> dict[Party, object]:
    return {params.server: server} | dict.fromkeys(params.sites, site)


# ---- points in words of planes ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Places:
    """Where the points of every site stand in planes: those of a site begin at a word of their own."""

    sites: tuple[Party, ...]
    sizes: tuple[int, ...]

    @property
    def n(self) -> int:
        return sum(self.sizes)

    def words(self, u: Party) -> int:
        return -(-self.sizes[self.sites.index(u)] // WORD)

    @property
    def cuts(self) -> dict[Party, slice]:
        """The words of each site."""
        ends = np.cumsum([self.words(u) for u in self.sites])
        return {u: slice(int(end) - self.words(u), int(end)) for u, end in zip(self.sites, ends, strict=True)}

    @property
    def width(self) -> int:
        return sum(self.words(u) for u in self.sites)

    @property
    def places(self) -> I64:
        """The place of every point among all bits of a plane."""
        starts = [WORD * cut.start for cut in self.cuts.values()]
        return np.concatenate([start + np.arange(n) for start, n in zip(starts, self.sizes, strict=True)])

    @property
    def folds(self) -> I64:
        return np.concatenate([np.arange(n) % FOLDS for n in self.sizes])

    def spread(self, x: Shared) -> Shared:
        """(..., n) numbers at the places of their points, 0 elsewhere."""

        def moved(w: U64) -> U64:
            out = np.zeros((*w.shape[:-1], WORD * self.width), w.dtype)
            out[..., self.places] = w
            return out

        return x.map(moved)

    def collect(self, x: Shared) -> Shared:
        return x.map(lambda w: w[..., self.places])


@dataclass(frozen=True, slots=True)
class Plan:
    """What all members know of one attempt."""

    params: Params
    sites: tuple[Party, ...]
    places: Places
    classes: int

    @property
    def members(self) -> tuple[Party, ...]:
        return (*self.sites, self.params.server)

    @property
    def distances(self) -> Ring:
        """Holds 0 to L + 1, which stands for a distance larger than any."""
        return Ring((self.params.bits + 1).bit_length())


@message("H6")
class Ready:  # u ↔ 3
    data: U8


@dataclass(slots=True)
class Progress:
    """Whether results may have been opened to somebody: then this party does not start again."""

    opened: bool = field(default=False)


# ---- H1 to H3: the graph ---------------------------------------------------------------------------------------------


async def _share_codes(trio: Verified, plan: Plan, packed: U8 | None) -> Shared | None:
    """H1: the bits of all codes (n, L)."""
    ring, parts = plan.distances, []
    for u, n in zip(plan.sites, plan.places.sizes, strict=True):
        mine = np.unpackbits(packed, axis=1).astype(ring.dtype) if packed is not None and u == trio.ch.me else None
        part = await trio.input(u, mine, (n, plan.params.bits), ring)
        if part is not None:
            await trio.check_small(part, u, 1, line="H1")
            parts.append(part)
    return join(parts, axis=0) if trio.rank is not None else None


async def _share_labels(trio: Verified, plan: Plan, y: I64 | None) -> XorShares | None:
    """H1: the bits of Y as planes (C, words)."""
    ring, parts = Ring.holding(plan.classes), []
    for u, n in zip(plan.sites, plan.places.sizes, strict=True):
        shape = (plan.classes, WORD * plan.places.words(u))
        mine = None
        if u == trio.ch.me and y is not None:
            bits = np.zeros(shape, np.int64)
            bits[:, :n] = graph.one_hot(y, plan.classes).T
            mine = ring.encode(bits)
        part = await trio.input(u, mine, shape, ring)
        if part is not None:
            planes = await trio.check_small(part, u, 1, line="H1")
            await trio.check_small(part.sum(axis=0), u, 1, line="H1")
            used = np.packbits(np.arange(shape[1]) < n, bitorder="little").view(np.uint64)  # not the places behind them
            rows = planes.reshape(plan.classes, -1)
            parts.append(XorShares(rows.a & used, rows.b & used))
    if trio.rank is None:
        return None
    return XorShares(np.concatenate([x.a for x in parts], axis=1), np.concatenate([x.b for x in parts], axis=1))


async def _neighbours(trio: Verified, plan: Plan, x: Shared, ring: Ring) -> Shared:
    """H2 and H3: A (n, n), a row for every point, in the ring of the scores."""
    n, k = plan.places.n, plan.params.n_neighbors
    difference = trio.constant(np.ones(x.shape, np.int64), x.ring) - x.times(2)  # 1 - 2x
    ones, low = x.sum(axis=1), index_bits(n)
    out = Shared(ring, np.empty((n, n), ring.dtype), np.empty((n, n), ring.dtype))
    step = max(1, BLOCK // n)
    for start in range(0, n, step):
        rows = slice(start, min(start + step, n))
        count = rows.stop - rows.start
        itself = np.zeros((count, n), np.int64)
        itself[np.arange(count), np.arange(rows.start, rows.stop)] = plan.params.bits + 1
        far = await trio.product(x[rows], difference, ones) + trio.constant(itself, x.ring)
        best = await trio.smallest_k(far, k, signed=False)  # H2
        del far, itself
        columns = XorShares(
            *(np.stack([planes_of(w[:, s], low) for s in range(k)], axis=1) for w in (best.a, best.b))
        )  # (b, k, words)
        hot = await trio.one_hot(columns, n)
        chosen = hot.map(lambda w: np.bitwise_xor.reduce(w, axis=1))  # (n, words): bits of A transposed
        del hot
        await trio.prove_large()
        part = await trio.inject(chosen, ring)  # H3
        await trio.prove_large()
        out.a[rows], out.b[rows] = part.a[:, :count].T, part.b[:, :count].T
        trio.ch.step(f"neighbours of {rows.stop} of {n} points", protocol=NAME, line="H2")
    return out


# ---- H4, H5: walks ---------------------------------------------------------------------------------------------------


def _sum(parts: Sequence[Shared]) -> Shared:
    out = parts[0]
    for part in parts[1:]:
        out = out + part
    return out


@dataclass(frozen=True, slots=True)
class Walked:
    """All steps of a walk from the labels of each fold, (n, C) each."""

    steps: list[list[Shared]]  # Z_t, by step and fold
    votes: list[Shared]  # B Z_t, of all folds
    labels: Shared  # Y

    def total(self, step: int) -> Shared:
        return _sum(self.steps[step])

    def left_out(self, step: int, folds: I64) -> Shared:
        """Z_t at every point, without the labels of its fold."""
        total, rows, parts = self.total(step), np.arange(len(folds)), self.steps[step]
        own = (np.stack([x.a for x in parts])[folds, rows], np.stack([x.b for x in parts])[folds, rows])
        return total - Shared(total.ring, *own)

    def scores(self, walk: Walk, n: int, bits: int) -> tuple[Shared, Shared]:
        """R (n, C) of points that pass labels on, and of hubs."""
        points = [self.total(t).times(walk.coefficient(walk.steps - t)) for t in range(walk.steps + 1)]
        last = walk.hub_steps(n, bits)
        votes = [self.votes[t].times(walk.coefficient(last - t)) for t in range(last + 1)]
        return _sum(points), _sum([self.labels.times(walk.coefficient(last + 1)), *votes])


class Graph:
    """A shared graph at a computing party, and walks over it."""

    def __init__(self, trio: Verified, plan: Plan, B: Shared, weight: Shared, passes_on: XorShares) -> None:
        self.trio, self.plan, self.passes_on = trio, plan, passes_on  # (words,): 0 for hubs
        self._B, self._weight = B, weight
        self._chains: tuple[Chain, Chain] | None = None

    @classmethod
    async def of(cls, trio: Verified, plan: Plan, A: Shared, walk: Walk) -> Graph:
        """H4."""
        n, width = plan.places.n, plan.places.width
        degree = A.sum(axis=0).to(Ring(n.bit_length() + 2))
        bounds = trio.constant(np.array([[min(bound, n)] for bound in walk.bounds]), degree.ring)
        gaps = bounds.map(lambda w: np.broadcast_to(w, (graph.MOST, n)).copy()) - degree[None]
        above = (await trio.bits(plan.places.spread(gaps), few_rounds=True))[-1].reshape(graph.MOST, width)
        within = trio.flip(above)
        weight = plan.places.collect(await trio.inject(within, A.ring)).sum(axis=0)
        return cls(trio, plan, A + A.map(lambda w: w.T), weight, within[0])

    async def walk(self, Y: XorShares, steps: int, folds: int = 1) -> Walked:
        """H5, from the labels in planes (C, words)."""
        spread, weigh = self._chains or (self.trio.chain(self._B), self.trio.chain(self._weight, diagonal=True))
        self._chains = spread, weigh
        places, C = self.plan.places, self.plan.classes
        labels = places.collect(await self.trio.inject(Y, self._B.ring)).map(lambda w: np.ascontiguousarray(w.T))
        fold = places.folds % folds
        Z = await weigh.step(join([labels.times((fold == f)[:, None]) for f in range(folds)], axis=1))
        every, votes = [Z], []
        for t in range(steps):
            votes.append(await spread.step(Z))
            Z = await weigh.step(votes[-1])
            every.append(Z)
            self.trio.ch.step(f"step {t + 1} of {steps}", protocol=NAME, line="H5")
        cut = [slice(C * f, C * (f + 1)) for f in range(folds)]
        return Walked([[z[:, c] for c in cut] for z in every], [_sum([x[:, c] for c in cut]) for x in votes], labels)

    async def end(self) -> None:
        """Before an opening; a later walk begins new chains."""
        if self._chains is not None:
            for chain in self._chains:
                await chain.end()
        self._chains = None


# ---- H6 to H8: comparisons -------------------------------------------------------------------------------------------


async def _largest(trio: Verified, x: XorShares) -> tuple[XorShares, XorShares]:
    """The largest of m numbers, planes (κ, m, words), and its number as planes (b, words); of equal ones the first."""
    count, m, width = x.shape
    names = np.zeros((index_bits(m), m, width), np.uint64)
    for b in range(len(names)):
        names[b, (np.arange(m) >> b & 1).astype(bool)] = ~np.uint64(0)
    rows = together([x, trio.public(names)])
    while rows.shape[1] > 1:
        h = rows.shape[1] // 2
        left, right = rows[:, 0 : 2 * h : 2], rows[:, 1 : 2 * h : 2]
        smaller = await trio.less(left[:count], right[:count], few_rounds=True)
        best, rest = await trio.choose(smaller, right, left), rows[:, 2 * h :]
        rows = XorShares(*(np.concatenate(parts, axis=1) for parts in ((best.a, rest.a), (best.b, rest.b))))
    return rows[:count, 0], rows[count:, 0]


async def _some(trio: Verified, x: XorShares) -> XorShares:
    """OR over the first axis."""
    return trio.flip(await trio.all_of(trio.flip(x)))


async def _count(trio: Verified, x: XorShares) -> XorShares:
    """How many bits of every row (m, words) are 1, as planes (b, m) with the number in the lowest bit of each word."""
    numbers = x[None]  # (b, m, words): planes of numbers that are added up, halves at a time
    wide = 1 << (x.shape[1] - 1).bit_length()
    short = zeros((1, x.shape[0], wide - x.shape[1]))
    numbers = XorShares(*(np.concatenate([w, z], axis=2) for w, z in ((numbers.a, short.a), (numbers.b, short.b))))
    shift = WORD // 2
    while numbers.shape[2] > 1 or shift:
        if numbers.shape[2] > 1:
            h = numbers.shape[2] // 2
            one, two = numbers[:, :, :h], numbers[:, :, h:]
        else:
            low = np.uint64((1 << shift) - 1)
            one = XorShares(numbers.a & low, numbers.b & low)
            two = XorShares(numbers.a >> np.uint64(shift), numbers.b >> np.uint64(shift))
            shift //= 2
        more = zeros((1, *one.shape[1:]))
        numbers = await trio.add(together([one, more]), together([two, more]))
    return numbers[:, :, 0].map(lambda w: w & np.uint64(1))


async def _choose(trio: Verified, plan: Plan, walks: Sequence[Walk], walked: Walked, Y: XorShares) -> XorShares:
    """H6: the number of the setting, as planes (b, 1) with it in the lowest bit."""
    C, width = plan.classes, plan.places.width
    names = [_parity([Y[c] for c in range(C) if c >> b & 1], width) for b in range(index_bits(C))]
    labelled = _parity([Y[c] for c in range(C)], width)
    hits = []
    for walk in walks:
        terms = [
            walked.left_out(t, plan.places.folds).times(walk.coefficient(walk.steps - t)) for t in range(walk.steps + 1)
        ]
        scores = plan.places.spread(_sum(terms).map(lambda w: np.ascontiguousarray(w.T)))
        planes = await trio.bits(scores, few_rounds=scores.a.size <= QUICK)
        most, label = await _largest(trio, planes.reshape(len(planes), C, width))
        same = trio.flip(label ^ stacked(names))
        arrives = await _some(trio, most)
        hits.append(await trio.all_of(together([same, arrives[None], labelled[None]])))
        await trio.prove_large()
    counts = await _count(trio, stacked([*hits, labelled]))
    b = len(counts)
    ahead = together([counts[HEAD_START:, -1:], zeros((min(b, HEAD_START), 1))]) if b > HEAD_START else zeros((b, 1))
    first = await trio.add(counts[:, :1], ahead)
    every = XorShares(
        *(np.concatenate(w, axis=1) for w in ((first.a, counts.a[:, 1:-1]), (first.b, counts.b[:, 1:-1])))
    )
    _, number = await _largest(trio, every[:, :, None])
    return number.map(lambda w: w & np.uint64(1))


def _parity(planes: Sequence[XorShares], width: int) -> XorShares:
    out = zeros((width,))
    for plane in planes:
        out = out ^ plane
    return out


async def _score_planes(graph_: Graph, scores: tuple[Shared, Shared]) -> XorShares:
    """H7: planes (κ, C + 1, words) of the scores of all classes, and of their sum."""
    trio, plan = graph_.trio, graph_.plan
    C, width = plan.classes, plan.places.width
    rows = join(scores, axis=1).map(lambda w: np.ascontiguousarray(w.T).reshape(2, C, -1))
    rows = join([rows, rows.sum(axis=1)[:, None]], axis=1)  # (2, C + 1, n): points, hubs
    planes = await trio.bits(plan.places.spread(rows), few_rounds=rows.a.size <= QUICK)
    points, hubs = (planes.reshape(len(planes), 2, C + 1, width)[:, i] for i in range(2))
    where = graph_.passes_on.map(lambda w: np.broadcast_to(w, (C + 1, width)))
    return await trio.choose(where, points, hubs)


async def _relabel(graph_: Graph, scores: tuple[Shared, Shared], Y: XorShares) -> XorShares:
    """H7: the labels that a walk gives, where none was given, and the given ones, as planes (C, words)."""
    trio, C = graph_.trio, graph_.plan.classes
    every = await _score_planes(graph_, scores)
    _, label = await _largest(trio, every[:, :C])
    missing = trio.flip(_parity([Y[c] for c in range(C)], Y.shape[1]))
    wanted = await trio.gate(await _some(trio, every[:, C]), missing)
    hot = await trio.one_hot(label, C)
    return Y ^ await trio.gate(hot, wanted.wide(C))


async def _decide(graph_: Graph, scores: tuple[Shared, Shared]) -> XorShares:
    """H7: planes of the label (b), whether one arrives (1), and seven levels of its part."""
    trio, C, width = graph_.trio, graph_.plan.classes, graph_.plan.places.width
    every = await _score_planes(graph_, scores)
    most, label = await _largest(trio, every[:, :C])
    total = every[:, C]
    eighth = _shifted(total, -3)
    both = await trio.add(_beside(eighth, eighth), _beside(_shifted(eighth, 1), _shifted(eighth, 2)))
    three, five = both[:, :width], both[:, width:]
    seven = await trio.add(three, _shifted(eighth, 2))
    parts = (eighth, _shifted(eighth, 1), three, _shifted(eighth, 2), five, _shifted(three, 1), seven)
    bounds = XorShares(np.stack([x.a for x in parts], axis=1), np.stack([x.b for x in parts], axis=1))  # (κ, 7, words)
    least = most.map(lambda w: np.broadcast_to(w[:, None], bounds.shape))
    below = await trio.less(least, bounds, few_rounds=True)
    return together([label, (await _some(trio, total))[None], trio.flip(below)])


def _shifted(x: XorShares, places: int) -> XorShares:
    """Numbers times 2^places, without what leaves the planes."""

    def moved(w: U64) -> U64:
        out = np.zeros_like(w)
        if places < 0:
            out[:places] = w[-places:]
        else:
            out[places:] = w[: len(w) - places]
        return out

    return x.map(moved)


def _beside(x: XorShares, y: XorShares) -> XorShares:
    return XorShares(np.concatenate([x.a, y.a], axis=1), np.concatenate([x.b, y.b], axis=1))


def read_result(planes: U64, n: int, classes: int) -> tuple[I64, I64]:
    """H8: label and level of n points, from the planes that were opened."""
    bits = np.unpackbits(planes.view(np.uint8), axis=1, bitorder="little")[:, :n].astype(np.int64)
    b = index_bits(classes)
    label = sum((bits[i] << i for i in range(b)), np.zeros(n, np.int64))
    arrives, level = bits[b] > 0, bits[b + 1 :].sum(axis=0)
    if (label >= classes).any():
        raise ProtocolAbort(NAME, "H8", "malformed", "a label that was opened does not exist")
    return np.where(arrives, label, -1), np.where(arrives, level, 0)


# ---- roles -----------------------------------------------------------------------------------------------------------


async def _compute(
    ch: Channel,
    plan: Plan,
    packed: U8 | None,
    y: I64 | None,
    progress: Progress,
    *,
    entropy: Entropy,
    identity: Identity,
) -> tuple[int, tuple[I64, I64] | None]:
    """H1 to H8 at every member: the number of the setting, and at a site labels and levels of its points."""
    if progress.opened:
        raise ProtocolAbort(NAME, "H8", "repeated", "a party dropped out after results were opened. Start a new run.")
    three = computing(plan.sites, plan.params.server)
    trio = await Verified.meet(ch.sub("three"), three, plan.members, entropy=entropy, identity=identity)
    walks, n = settings(plan.params), plan.places.n
    ring, steps = ring_of_walks(walks, n), max(walk.steps for walk in walks)
    codes = await _share_codes(trio, plan, packed)
    labels = await _share_labels(trio, plan, y)
    shared, first, number, planes = None, None, 0, None
    if codes is not None and labels is not None:
        shared = await Graph.of(trio, plan, await _neighbours(trio, plan, codes, ring), walks[0])
        first = await shared.walk(labels, steps, FOLDS if plan.params.choose else 1)
    if plan.params.choose:
        index = None
        if shared is not None and first is not None and labels is not None:
            await shared.end()
            index = await _choose(trio, plan, walks, first, labels)
        await _commit(trio, plan, progress)
        number = await _open_number(trio, plan, index, len(walks))
    if shared is not None and first is not None and labels is not None:
        walk = walks[number]
        second = await _relabel(shared, first.scores(walk, n, ring.bits), labels)
        scores = (await shared.walk(second, walk.steps)).scores(walk, n, ring.bits)
        await shared.end()
        planes = await _decide(shared, scores)
        await trio.proofs.verify()
    if not plan.params.choose:
        await _commit(trio, plan, progress)
    rows, result = index_bits(plan.classes) + graph.LEVELS, None
    for u, n in zip(plan.sites, plan.places.sizes, strict=True):
        cut, shape = plan.places.cuts[u], (rows, plan.places.words(u))
        part = None if planes is None else planes[:, cut].map(np.ascontiguousarray)
        what = f"labels and levels of {n} points"
        opened = await trio.open_to(part, shape, to=u, protocol=NAME, line="H8", what=what)
        if opened is not None:
            result = read_result(opened, n, plan.classes)
    return number, result


async def _commit(trio: Verified, plan: Plan, progress: Progress) -> None:
    """Before the first opening: the three open nothing until every site has said that it does not start again.

    A site that does not compute cannot see that another party has a result. Without this line a malicious coordinator
    holds its frames back, obtains the index of all sites, and starts again with those that have seen nothing.
    """
    three = [p for p in trio.computing if p != trio.ch.me]
    others = [u for u in plan.sites if u not in trio.computing]
    if trio.rank is None:
        if trio.ch.me not in others:  # the coordinator gives no input
            return
        await trio.links.gather(Ready, dict.fromkeys(three, 1))
    else:
        three += others
    progress.opened = True
    for p in three:
        await trio.links.send(p, Ready, np.zeros(1, np.uint8))
    if trio.rank is not None:
        await trio.links.gather(Ready, dict.fromkeys(three, 1))


async def _open_number(trio: Verified, plan: Plan, index: XorShares | None, count: int) -> int:
    """H6: to every member."""
    rows, number = index_bits(count), 0
    for p in plan.members:
        bits = await trio.open_to(index, (rows, 1), to=p, protocol=NAME, line="H6", what="index of a setting")
        if bits is not None:
            number = sum(int(bit) << i for i, bit in enumerate(bits[:, 0]))
    if number >= count:
        raise ProtocolAbort(NAME, "H6", "malformed", "a setting that was opened does not exist")
    return number


def _plan(params: Params, roster: Roster, sites: tuple[Party, ...], classes: int) -> Plan:
    sizes = tuple(roster.size(u) for u in sites)
    check(sites, sizes, params.bits, params.server)
    return Plan(params, sites, Places(sites, sizes), classes)


async def site(
    ch: Channel,
    params: Params,
    vectors: F64,
    labels: Sequence[str | None],
    charge: Charge | None = None,
    *,
    entropy: Entropy,
    identity: Identity,
) -> Labels:
    """`charge(u, n)` counts the n points of another site u against this site's budget; it raises if that is spent."""
    check_params(params)
    return await in_group(
        ch, params, lambda c, p: _site(c, p, vectors, labels, charge, entropy=entropy, identity=identity)
    )


async def server(ch: Channel, params: Params, *, entropy: Entropy, identity: Identity) -> tuple[Served, ...]:
    """S's part; returns one `Served` per group."""
    check_params(params)
    return await all_groups(ch, params, lambda c, p: _server(c, p, entropy=entropy, identity=identity))


async def _site(
    ch: Channel,
    params: Params,
    vectors: F64,
    labels: Sequence[str | None],
    charge: Charge | None,
    *,
    entropy: Entropy,
    identity: Identity,
) -> Labels:
    roster, packed, y, _ = await begin(ch, params, vectors, labels, entropy=entropy, identity=identity)
    for u in roster.sites:
        if charge is not None and u != ch.me:
            charge(u, roster.size(u))
    await ch.send(params.server, propagation_terms.Classes(len(roster.classes)))  # H1
    progress = Progress()

    async def step(c: Channel, sites: tuple[Party, ...]) -> tuple[int, tuple[I64, I64] | None]:
        plan = _plan(params, roster, sites, len(roster.classes))
        return await _compute(c, plan, packed, y, progress, entropy=entropy, identity=identity)

    (number, result), sites = await retry_without_dropouts.follow(ch.sub("hidden"), params.server, step)
    assert result is not None
    return labels_of(roster.classes, *result, sites, choice_of(params, settings(params)[number]))


async def _server(ch: Channel, params: Params, *, entropy: Entropy, identity: Identity) -> Served:
    roster = await propagation_terms.open_study(ch, params)
    named = await retry_without_dropouts.survivors(ch, roster.sites, propagation_terms.Classes, 2)  # H1
    numbers = {m.count for m in named.values()}
    if len(numbers) != 1 or min(numbers) < 2:
        raise ProtocolAbort(NAME, "H1", "mismatch", "the sites do not agree on the classes")
    classes, progress = numbers.pop(), Progress()

    async def step(c: Channel, sites: tuple[Party, ...]) -> int:
        plan = _plan(params, roster, sites, classes)
        number, _ = await _compute(c, plan, None, None, progress, entropy=entropy, identity=identity)
        return number

    number, sites = await retry_without_dropouts.lead(ch.sub("hidden"), tuple(named), 2, step)
    sizes = tuple(roster.size(u) for u in sites)
    return Served(sites, sizes, None, None, None, sites, choice_of(params, settings(params)[number]))
