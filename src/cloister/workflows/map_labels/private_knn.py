"""Private k-NN: the querier learns the majority label of the k nearest references of each of its cells.

Nobody else learns anything, and nobody sees a cell, a distance, or who the neighbours are.

    L1   all        keys of the three computing parties, and links of the others to them          (replicated R1)
    L2   querier    shares q, its rows times the public scale, rounded; zero rows up to `queries`
         site i     shares r, scaled alike, and w = |r|² 2^b + label; w = (3M² + 1) 2^b for rows that pad
    L3   three      K = w - 2^{b+1} q rᵀ, so that K_j + |q|² 2^b = distance_j² 2^b + label_j; by batches of queries
    L4   three      the k smallest of every row of K, ascending: all rows shuffled, comparisons opened (replicated R6)
    L5   three      labels = the b bits above their column numbers; e_ij = [label_i = label_j], votes_i = 1 + Σ_j e_ij
    L6   three      the smallest of label_i - votes_i 2^b: most votes, of equal ones the earlier label
    L7   three      t = [nearest distance² ≤ threshold²], if there is a threshold
    L8   → querier  the winning label (and its votes, if `share`); nothing but `unknown` where t = 0
    L9   querier    tells everyone that it has its labels, so that nobody calls a run done that was not

b bits hold a label, M is the largest norm of a row after scaling; 4M² + 2 ≤ 2^{κ-1-b} for a ring of κ bits, so that
no difference wraps. L4 puts the number of its column below every key, and L6 that of its neighbour, so that keys of one
row differ (rows that pad are all alike, and so are the keys of a unanimous vote) and their order shows nothing. Equally
distant references count in the order of their labels in the vocabulary, hence the result does not depend on the order
of rows or sites.

Reveals
-------
querier : a label per cell, or `unknown`; its share of the votes if asked for; the padded sizes of all sites.
site, computing party : padded sizes; the label names; nothing about any cell. The order in which a uniformly random
    shuffle put the rows is opened among the three; it is independent of all data.
any two computing parties together : everything. A site that only gives inputs adds nothing to a coalition.

Assumes
-------
Semi-honest parties, no two of the three computing ones collude. Lies that are not noticed: (a), (b), (c), (f) of the
querier, (a), (b), (c), (f) of the holder and (a), (b), (c), (f) of the helper, where they compute: a querier reads
labels of references of its choice (`verified_knn` closes it). Bounds are checked by every owner before it shares. A
querier that may ask about cells of its own making learns the reference's labels at these points: limit the queries.

Cost
----
Per pair of query and reference, the three together, with κ' = κ + log2 of all references: 4κ' bits for the shuffle and
about 1.05 to 1.5 comparisons of 4κ' + 3 bits; κ = 40: 60 to 65 bytes. Inputs: κ bits (2κ from a site that does not
compute) per number. Some 100 to 200 rounds a batch.

References
----------
[000] FedscGPT, Algorithms 3-6, of which this is the ideal functionality; see `published_knn` for its steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cloister.arrays import I64, U8, Index
from cloister.mpc.crypto.agreement import Identity
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.crypto.replicated import Ring, Words, index_bits, numbered_ring
from cloister.mpc.net.channel import Channel
from cloister.mpc.net.wire import message
from cloister.mpc.three_party.replicated import Bits, Shared, Trio, join
from cloister.mpc.three_party.replicated_cost import CostModel
from cloister.study import Party
from cloister.workflows.map_labels import nearest_labels
from cloister.workflows.map_labels.nearest_labels import UNKNOWN, Mapped, encode, pad

NAME = "private_knn"


@dataclass(frozen=True, slots=True)
class Params(nearest_labels.Params):
    """Those of every k-NN, under this protocol's name in the run id."""


@message("L9")
class Done:  # querier → everyone
    pass


ideal = nearest_labels.ideal


def roles(params: Params) -> dict[Party, object]:
    return {p: querier if p == params.querier else holder if p in params.sites else helper for p in params.members}


def cost(params: Params) -> dict[Party, tuple[int, int]]:
    """Messages and payload bytes that each party sends; expected ones where rows are long (see `selection`)."""
    bill = CostModel(params.members, params.computing)
    ring, m, k, b = params.ring, params.queries, params.k, params.label_bits
    bill.meet()
    bill.input(params.querier, m * params.dims, ring)
    if params.threshold:
        bill.input(params.querier, m, ring)
    for site, n in zip(params.sites, params.rows, strict=True):
        bill.input(site, n * params.dims, ring)
        bill.input(site, n, ring)
    for start in range(0, m, params.step):
        bill.smallest_k(min(params.step, m - start), sum(params.rows), k, ring)
    pairs = k * (k - 1) // 2
    small = vote_ring(params)
    bill.low_bits(m * k, index_bits(sum(params.rows)) + b)
    if pairs:
        for h in _halvings(b):
            bill.ands(h, m * pairs)
    bill.inject(b, m * k, small)
    if pairs:
        bill.inject(1, m * pairs, small)
    bill.smallest_k(m, k, 1, small)
    bill.low_bits(m, index_bits(k) + params.answer_bits)
    if params.threshold:
        bill.msb(m, numbered_ring(ring, sum(params.rows)))
        bill.ands(params.answer_bits, m)
    out = Ring(params.opened_bits + 1)
    bill.inject(params.opened_bits, m, out)
    bill.open(params.querier, m, out)
    bill.send(params.querier, 0, len(params.members) - 1)
    return bill.total()


def _halvings(b: int) -> list[int]:
    halves = []
    while b > 1:
        halves.append(b // 2)
        b -= b // 2
    return halves


# ---- local steps -----------------------------------------------------------------------------------------------------


def vote_ring(params: Params) -> Ring:
    """Holds differences of label - votes 2^b, and the bits that are opened."""
    return Ring.holding((params.k + 2) << (params.label_bits + 1))


def decode(params: Params, code: I64) -> Mapped:
    b = params.label_bits
    labels = code & ((1 << b) - 1)
    votes = -(code >> b) & ((1 << params.vote_bits) - 1) if params.share else None
    if params.threshold:
        known = code >> params.answer_bits & 1
        labels = np.where(known == 1, labels, UNKNOWN)
        votes = None if votes is None else np.where(known == 1, votes, 0)
    return Mapped(labels, votes)


# ---- the three -------------------------------------------------------------------------------------------------------


async def neighbours(trio: Trio, params: Params, q: Shared, r: Sequence[Shared], w: Sequence[Shared]) -> Shared:
    """L3, L4: keys (queries, k) of the nearest references, ascending, above their numbers."""
    factor = -(2 << params.label_bits)
    columns = [x.map(lambda words: words.T) for x in r]
    nearest = []
    for start in range(0, params.queries, params.step):
        trio.ch.step(f"neighbours of queries from {start + 1}", protocol=NAME, line="L4")
        part = q[start : start + params.step].times(factor)
        keys = np.concatenate(
            [trio.matmul_summand(part, x) + y.a[None] for x, y in zip(columns, w, strict=True)], axis=1
        )  # L3
        nearest.append(await trio.smallest_k(keys, params.ring, params.k))  # L4
    return join(nearest, axis=0)


async def vote(trio: Trio, params: Params, near: Shared) -> Shared:
    """L5, L6: label - votes 2^b of the label with most votes, per query, above the number of a neighbour."""
    m, k, b, ring = params.queries, params.k, params.label_bits, vote_ring(params)
    planes = await _bits_above(trio, near.map(lambda words: words.T), params.ring, b)  # L5, entry (neighbour, query)
    labels = (await trio.inject(planes, (b, k, m), ring)).times((1 << np.arange(b))[:, None, None]).sum(0)
    votes = trio.constant(np.ones((k, m), np.int64), ring)
    if k > 1:
        i, j = np.triu_indices(k, 1)
        same = _same(trio, planes, i, j, k, m)
        while len(same.a) > 1:
            h = len(same.a) // 2
            equal = await trio.both(same[:h], same[h : 2 * h])
            same = Bits(
                same.n, *(np.concatenate(ws) for ws in ((equal.a, same.a[2 * h :]), (equal.b, same.b[2 * h :])))
            )
        e = await trio.inject(same, (len(i), m), ring)
        for half in (i, j):
            votes = votes + e.map(lambda words, half=half: _gather(words, half, k))  # type: ignore[misc]
    keys = labels - votes.times(1 << b)
    zero = trio.product(keys.map(lambda words: words.T), trio.constant(np.ones((m, k), np.int64), ring))
    return (await trio.smallest_k(zero, ring, 1)).reshape(m)  # L6


async def _bits_above(trio: Trio, keys: Shared, ring: Ring, count: int) -> Bits:
    """The lowest bits of what `smallest_k` found in `ring`, above the column numbers."""
    low = keys.ring.bits - ring.bits
    return (await trio.low_bits(keys, low + count))[low:]


def _gather(words: Words, place: Index, k: int) -> Words:
    out: Words = np.zeros((k, words.shape[1]), words.dtype)
    np.add.at(out, place, words)
    return out


def _same(trio: Trio, planes: Bits, i: Index, j: Index, k: int, m: int) -> Bits:
    """Per bit of a label, whether neighbours i and j agree in it; (b, pairs · queries)."""

    def pairs(p: U8) -> U8:
        bits = np.unpackbits(p, axis=1, count=k * m, bitorder="little").reshape(-1, k, m)
        return np.packbits((bits[:, i] ^ bits[:, j]).reshape(len(p), -1), axis=1, bitorder="little")

    return trio.flip(Bits(len(i) * m, pairs(planes.a), pairs(planes.b)))


async def result(trio: Trio, params: Params, near: Shared, winner: Shared, square: Shared | None) -> Shared:
    """L7, and the bits that L8 opens."""
    m, b, count = params.queries, params.label_bits, params.answer_bits
    planes = await _bits_above(trio, winner, vote_ring(params), count)
    if square is not None:
        low = near.ring.bits - params.ring.bits
        limit = min(int(params.threshold**2 * params.scale**2), 4 * params.norm**2) + 1
        far = near[:, 0] + square.shifted(low) - trio.constant(np.full(m, limit << (b + low), np.int64), near.ring)
        t = await trio.negative(far)  # L7
        masks = Bits(m, *(np.broadcast_to(c, (count, c.size)) for c in (t.a, t.b)))
        kept = await trio.both(planes, masks)
        planes = Bits(m, np.concatenate([kept.a, t.a[None]]), np.concatenate([kept.b, t.b[None]]))
        count += 1
    bits = await trio.inject(planes, (count, m), Ring(count + 1))
    return bits.times((1 << np.arange(count))[:, None]).sum(0)


# ---- roles -----------------------------------------------------------------------------------------------------------


async def _compute(
    ch: Channel, params: Params, q: I64 | None, r: I64 | None, w: I64 | None, entropy: Entropy, identity: Identity
) -> I64 | None:
    """Every role: share what is mine, compute if I am one of the three, get what is opened to me."""
    p0, p1, p2 = params.computing
    ring, b, m, d = params.ring, params.label_bits, params.queries, params.dims
    trio = await Trio.meet(ch, (p0, p1, p2), params.members, entropy=entropy, identity=identity)  # L1
    mine = None if q is None else ring.encode(q)
    qs = await trio.input(params.querier, mine, (m, d), ring)  # L2
    square = None
    if params.threshold:
        mine = None if q is None else ring.encode((q**2).sum(1) << b)
        square = await trio.input(params.querier, mine, (m,), ring)
    references, added = await nearest_labels.share_references(trio, params, r, w)
    code = None
    if qs is not None:
        near = await neighbours(trio, params, qs, references, added)
        winner = await vote(trio, params, near)
        code = await result(trio, params, near, winner, square)
    out = Ring(params.opened_bits + 1)
    labels = await trio.open(code, (m,), out, to=params.querier, protocol=NAME, line="L8", what=params.opened)  # L8
    await nearest_labels.finish(ch, params.querier, Done())  # L9
    return labels


async def querier(
    ch: Channel, params: Params, x: npt.NDArray[np.floating], *, entropy: Entropy, identity: Identity
) -> Mapped:
    """Hold the cells to be labelled, one row each."""
    q = pad(encode(params, x), params.queries)
    code = await _compute(ch, params, q, None, None, entropy, identity)
    assert code is not None
    return decode(params, code[: len(x)])


async def holder(
    ch: Channel, params: Params, x: npt.NDArray[np.floating], labels: I64, *, entropy: Entropy, identity: Identity
) -> None:
    """Hold references: rows, and for each the place of its label in the vocabulary."""
    await _compute(ch, params, None, *nearest_labels.padded_references(params, ch.me, x, labels), entropy, identity)


async def helper(ch: Channel, params: Params, *, entropy: Entropy, identity: Identity) -> None:
    """Compute without data, as the coordinator does where there are only two sites; or wait for the end."""
    if ch.me in params.members:
        await _compute(ch, params, None, None, None, entropy, identity)
    else:
        await nearest_labels.finish(ch, params.querier, Done())  # L9
