"""Reference mapping as published: Algorithms 3 to 6 of the paper, step by step, under replicated sharing.

    A3.1   querier        shares Q
    A3.2   all            O = Σ n_i, in the clear; L = all labels; a label's number is its place in L, from 1
    A4     site i         shares R_i, r_i = (0, ..., n_i - 1) + (i - 1) O, and its label numbers ℓ_i
    A5.1   three          D = |Q|² + |R_i|² - 2 Q R_iᵀ
    A5.2   k times        M = one-hot argmin of every row of D; T_j = its distance; I_j = M r_i; D ← D + A M
    A3.3   three          T and I of all sites side by side
    A3.4   k times        M = one-hot argmin of T; N_j = Σ M I; T ← T + A M
    A6     site i, k times  M = [N_j = r_i]; v = M ℓ_i; V += one-hot(v), v = 0 is no vote
    A3.5   three          M = one-hot argmax of V; the label Σ ℓ M is opened to the querier

What the text leaves open is fixed here: of equal distances or votes, the first index wins (printed masks are one-hot);
A is the public bound of a distance ("a large constant" in the text), so that nothing wraps; a site with fewer than k
references contributes all of them. A3.4 reads D = A M in our copy of the text, which is OCR; Algorithm 5 and the
authors' code add, and so do we.

Reveals
-------
querier : a label per cell.
everyone : the true number of queries and of each site's references, and all label names.
any two computing parties together : everything.

Assumes
-------
Semi-honest parties, no two of the three computing ones collude. Lies that are not noticed: (a), (b), (c), (f) of the
querier, (a), (b), (c), (f) of the holder and (a), (b), (c), (f) of the helper, where they compute: labels are then
wrong, and may tell the liar what it must not know.

Cost
----
2k(n + Ck) comparisons and k·n equality tests per query, each with products to pick and suppress: 9 to 10 times the
bytes of `private_knn` on two whole studies, and a thousand rounds a batch and more. For comparison, not for use.

References
----------
[000] FedscGPT, Algorithms 3 (A3), 4 (A4), 5 (A5), 6 (A6).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cloister.arrays import I64
from cloister.errors import DataError, ParameterError
from cloister.mpc.crypto.agreement import Identity
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.crypto.replicated import Ring, Words
from cloister.mpc.net.channel import Channel
from cloister.mpc.three_party.replicated import Shared, Trio, join
from cloister.mpc.three_party.replicated_cost import CostModel
from cloister.study import Party
from cloister.workflows.map_labels import nearest_labels, private_knn
from cloister.workflows.map_labels.nearest_labels import Mapped, encode

NAME = "published_knn"
BATCH = 1 << 19  # pairs of query and reference at a time


@dataclass(frozen=True, slots=True)
class Params:  # public; hashed into the run id, so a mismatch aborts
    core: nearest_labels.Params

    def __post_init__(self) -> None:
        if self.core.share or self.core.threshold:
            raise ParameterError("the published protocol has no vote share and no threshold; use mode='hardened'")

    @property
    def offset(self) -> int:
        """O."""
        return sum(self.core.rows)

    @property
    def far(self) -> int:
        """A: above every distance."""
        return 4 * self.core.norm**2 + 1

    @property
    def distances(self) -> Ring:
        """Holds differences of distances up to 2A."""
        return Ring.holding(2 * self.far + 1)

    @property
    def numbers(self) -> Ring:
        """Holds row numbers of all sites."""
        return Ring.holding(len(self.core.sites) * self.offset)

    @property
    def votes(self) -> Ring:
        return Ring.holding(2 * max(self.core.k, len(self.core.labels)) + 2)

    @property
    def step(self) -> int:
        return max(1, min(self.core.queries, BATCH // max(self.core.rows)))

    def candidates(self, site: int) -> int:
        return min(self.core.k, self.core.rows[site])


def ideal(params: Params, inputs: Mapping[Party, object]) -> dict[Party, Mapped | None]:
    """What a trusted party would hand to each party: distance ties in the order of sites and rows."""
    core = params.core
    q = encode(core, nearest_labels.first(inputs[core.querier]))
    parts = [inputs[p] for p in core.sites]
    r = np.concatenate([encode(core, nearest_labels.first(part)) for part in parts])
    y = np.concatenate([np.asarray(part[1]) for part in parts])  # type: ignore[index]
    d = (q**2).sum(1)[:, None] + (r**2).sum(1) - 2 * (q @ r.T)
    near = y[np.argsort(d, axis=1, kind="stable")[:, : core.k]]
    votes = np.stack([(near == label).sum(1) for label in range(len(core.labels))], axis=1)
    return dict.fromkeys(core.members) | {core.querier: Mapped(votes.argmax(1), None)}


def roles(params: Params) -> dict[Party, object]:
    core = params.core
    return {p: querier if p == core.querier else holder if p in core.sites else helper for p in core.members}


def cost(params: Params) -> dict[Party, tuple[int, int]]:
    """Messages and payload bytes that each party sends."""
    core, ring = params.core, params.distances
    bill = CostModel(core.members, core.computing)
    bill.meet()
    bill.input(core.querier, core.queries * core.dims, ring)
    for site, n in zip(core.sites, core.rows, strict=True):
        bill.input(site, n * core.dims, ring)
        bill.input(site, n, params.numbers)
        bill.input(site, n, params.votes)
    for start in range(0, core.queries, params.step):
        m = min(params.step, core.queries - start)
        for i, n in enumerate(core.rows):
            bill.reshare(m, ring)
            bill.reshare(n, ring)
            bill.reshare(m * n, ring)
            for _ in range(params.candidates(i)):
                bill.onehot(m, n, ring)
                bill.reshare(m, params.numbers)
        wide = sum(params.candidates(i) for i in range(len(core.rows)))
        for _ in range(core.k):
            bill.onehot(m, wide, ring)
            bill.reshare(m, params.numbers)
        for n in core.rows:
            for _ in range(core.k):
                bill.equal(m * n, params.numbers)
                bill.inject(1, m * n, params.votes)
                bill.reshare(m, params.votes)
                bill.equal(m * len(core.labels), params.votes)
                bill.inject(1, m * len(core.labels), params.votes)
        bill.onehot(m, len(core.labels), params.votes)
    bill.open(core.querier, core.queries, params.votes)
    bill.send(core.querier, 0, len(core.members) - 1)
    return bill.total()


def _rows(x: Words, y: Words) -> Words:
    """Row-wise inner product."""
    products: Words = (x * y).sum(axis=-1, dtype=x.dtype)
    return products


# ---- the algorithms, at the three ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Setup:
    """Algorithm 4: what a site has shared."""

    r: Shared  # (n, d) embeddings
    number: Shared  # (n,)
    label: Shared  # (n,), from 1


async def secure_knn(trio: Trio, params: Params, q: Shared, site: Setup, k: int) -> tuple[Shared, Shared]:
    """Algorithm 5: distances and row numbers (m, k) of a site's nearest references."""
    own, other = await trio.mul(q, q, _rows), await trio.mul(site.r, site.r, _rows)
    d = (await trio.matmul(q, site.r.map(lambda w: w.T))).times(-2)  # A5.1
    d = d + own.map(lambda w: np.broadcast_to(w[:, None], d.shape)) + other.map(lambda w: np.broadcast_to(w, d.shape))
    distances, numbers = [], []
    for _ in range(k):  # A5.2
        least, mask = await trio.onehot_min(d)
        distances.append(least)
        numbers.append(await _pick(trio, mask.to(params.numbers), site.number))
        d = d + mask.times(params.far)
    return _columns(distances), _columns(numbers)


async def _pick(trio: Trio, mask: Shared, row: Shared) -> Shared:
    """M r: (m, n) times (n,)."""
    return await trio.mul(mask, row, lambda a, b: (a * b).sum(axis=-1, dtype=a.dtype))


def _columns(xs: list[Shared]) -> Shared:
    return join([x.map(lambda w: w[:, None]) for x in xs], axis=1)


async def secure_vote(trio: Trio, params: Params, near: Shared, site: Setup) -> Shared:
    """Algorithm 6: votes (m, labels) of the neighbours that are a site's own."""
    m, (n,) = near.shape[0], site.number.shape
    count, ring = len(params.core.labels), params.votes
    votes = trio.constant(np.zeros((m, count), np.int64), ring)
    for j in range(params.core.k):
        x = near[:, j].map(lambda w: np.broadcast_to(w[:, None], (m, n)))
        y = site.number.map(lambda w: np.broadcast_to(w, (m, n)))
        mask = await trio.inject(await trio.equal(x, y), (m, n), ring)
        v = await _pick(trio, mask, site.label)
        wide = v.map(lambda w: np.broadcast_to(w[:, None], (m, count)))
        each = trio.constant(np.broadcast_to(1 + np.arange(count), (m, count)), ring)
        votes = votes + await trio.inject(await trio.equal(wide, each), (m, count), ring)
    return votes


async def mapping(trio: Trio, params: Params, q: Shared, sites: list[Setup]) -> Shared:
    """Algorithm 3, for one batch of queries: label numbers, from 1."""
    m = q.shape[0]
    nearest = [await secure_knn(trio, params, q, site, params.candidates(i)) for i, site in enumerate(sites)]
    d, numbers = (join([pair[i] for pair in nearest], axis=1) for i in (0, 1))  # A3.3
    near = []
    for _ in range(params.core.k):  # A3.4
        _, mask = await trio.onehot_min(d)
        near.append(await trio.mul(mask.to(params.numbers), numbers, _rows))
        d = d + mask.times(params.far)
    votes = trio.constant(np.zeros((m, len(params.core.labels)), np.int64), params.votes)
    for site in sites:  # A6
        votes = votes + await secure_vote(trio, params, _columns(near), site)
    _, mask = await trio.onehot_max(votes)  # A3.5
    return mask.times(1 + np.arange(mask.shape[1])).sum(1)


# ---- roles -----------------------------------------------------------------------------------------------------------


async def _compute(
    ch: Channel, params: Params, q: I64 | None, r: I64 | None, y: I64 | None, entropy: Entropy, identity: Identity
) -> I64 | None:
    core, ring = params.core, params.distances
    p0, p1, p2 = core.computing
    m = core.queries
    trio = await Trio.meet(ch, (p0, p1, p2), core.members, entropy=entropy, identity=identity)
    qs = await trio.input(core.querier, None if q is None else ring.encode(q), (m, core.dims), ring)  # A3.1
    setups = []
    for i, (site, n) in enumerate(zip(core.sites, core.rows, strict=True)):  # A4
        mine: list[Words | None] = [None, None, None]
        if site == ch.me and r is not None and y is not None:
            start = np.arange(n) + i * params.offset
            mine = [ring.encode(r), params.numbers.encode(start), params.votes.encode(y + 1)]
        parts = [
            await trio.input(site, mine[0], (n, core.dims), ring),
            await trio.input(site, mine[1], (n,), params.numbers),
            await trio.input(site, mine[2], (n,), params.votes),
        ]
        shared = [x for x in parts if x is not None]
        if len(shared) == 3:
            setups.append(Setup(*shared))
    label = None
    if qs is not None:
        labels = []
        for start_row in range(0, m, params.step):
            ch.step(f"neighbours of queries from {start_row + 1}", protocol=NAME, line="A5")
            labels.append(await mapping(trio, params, qs[start_row : start_row + params.step], setups))
        label = join(labels, axis=0)
    what = f"label of {m} queries"
    opened = await trio.open(label, (m,), params.votes, to=core.querier, protocol=NAME, line="A3.5", what=what)
    await nearest_labels.finish(ch, core.querier, private_knn.Done())
    return opened


async def querier(
    ch: Channel, params: Params, x: npt.NDArray[np.floating], *, entropy: Entropy, identity: Identity
) -> Mapped:
    """Hold the cells to be labelled, one row each."""
    q = encode(params.core, x)
    if len(q) != params.core.queries:
        raise DataError(f"{len(q)} cells, but {params.core.queries} were announced")
    label = await _compute(ch, params, q, None, None, entropy, identity)
    assert label is not None
    return Mapped(label - 1, None)


async def holder(
    ch: Channel, params: Params, x: npt.NDArray[np.floating], labels: I64, *, entropy: Entropy, identity: Identity
) -> None:
    """Hold references: rows, and for each the place of its label in the vocabulary."""
    core = params.core
    r, y = encode(core, x), np.asarray(labels, np.int64)
    nearest_labels.weights(core, r, y, len(r))  # checks the labels
    if len(r) != core.rows[core.sites.index(ch.me)]:
        raise DataError(f"{len(r)} references, but {core.rows[core.sites.index(ch.me)]} were announced")
    await _compute(ch, params, None, r, y, entropy, identity)


async def helper(ch: Channel, params: Params, *, entropy: Entropy, identity: Identity) -> None:
    """Compute without data, or wait for the end."""
    if ch.me in params.core.members:
        await _compute(ch, params, None, None, None, entropy, identity)
    else:
        await nearest_labels.finish(ch, params.core.querier, private_knn.Done())
