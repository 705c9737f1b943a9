"""Verified k-NN: the function of `private_knn`, computed so that any one party may lie.

    L1   all        sealed links to and among the three computing parties                          (verified V1)
    L2   querier    shares q, its rows times the public scale, rounded; zero rows up to `queries`   (modulo 2^64)
         site i     shares r, scaled alike, and w = |r|² 2^b + label; w = (3M² + 1) 2^b for rows that pad
    L3   three      |q| ≤ M: 64 binary mixtures of every g rows of q are small, so no square wraps; then M² - |q|² ≥ 0
    L4   three      K = w - 2^{b+1} q rᵀ, so that K_j + |q|² 2^b = distance_j² 2^b + label_j; by batches of queries
    L5   three      the k smallest of every row of K: bits, a shuffle, opened comparisons                (verified V6)
    L6   three      e_ij = [label_i = label_j], votes_i = 1 + Σ_j e_ij, and the label with most votes, of equal ones the
                    earlier: a tournament under sharing, nothing of it is opened
    L7   three      t = [nearest distance² ≤ threshold²], if there is a threshold
    L8   → querier  the winning label (and its votes, if `share`); nothing but `unknown` where t = 0
    L9   querier    tells everyone that it has its labels, so that nobody calls a run done that was not

Everything sent in L2 to L7 is proved before whatever depends on it is opened. Letters as in `private_knn`.

Reveals
-------
querier : a label per cell, or `unknown`; its share of the votes if asked for; the padded sizes of all sites. If it
    is malicious: the same for other cells within the bound, since L3 lets no others pass. With a largest distance, an
    answer is one bit about references near the query cell: many synthetic cells locate them (budgets count cells).
one malicious site with references : nothing. Its references, labels and their weights w are unverified input. A weight
    makes a row count as nearer or farther than it is, so the site can decide the labels of all query cells.
site, computing party : padded sizes; the label names; nothing about any cell, malicious or not. The order in which a
    uniformly random shuffle put the rows is opened among the three; it is independent of all data.
any two computing parties together : everything. A site that only gives inputs adds nothing to a coalition.

Assumes
-------
At most one party lies (`verified`); then everyone else ends with the right labels or with an abort. What a site says of
its own references is its word: it may give a row any weight w, so that it counts as nearer or farther than it is, and
learns nothing by it. A querier that may ask about cells of its own making learns the reference's labels at these
points: limit the queries.

Cost
----
Per pair of query and reference, the three together, with κ' = κ + log2 of all references: 3κ + κ + 3κ bits for product
and bits, 6κ' for the shuffle and about 1.05 to 1.5 comparisons of 3κ' + 3 bits; κ = 40: 103 to 116 bytes, 1.75 times
those of `private_knn`. Proofs: some 100 kB each. Rounds: about 2.5 times those of `private_knn`.

References
----------
[000] FedscGPT, Algorithms 3-6, of which this is the ideal functionality. Proofs: `crypto.share_proofs`. Small mixtures
of large vectors: [LNS21] Lyubashevsky, Nguyen, Seiler, PKC 2021, Lemma 2.3, with binary coefficients.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from cloister.arrays import I64, U64
from cloister.mpc.crypto import gf64
from cloister.mpc.crypto.agreement import Identity
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.crypto.replicated import Ring, Shared, index_bits, join
from cloister.mpc.crypto.share_proofs import ROWS, mix_rows
from cloister.mpc.net.channel import Channel
from cloister.mpc.net.wire import message
from cloister.mpc.three_party.verified import Verified, XorShares, planes_of, stacked, together, zeros
from cloister.mpc.three_party.verified_cost import VerifiedCostModel, columns
from cloister.study import Party
from cloister.workflows.map_labels import nearest_labels
from cloister.workflows.map_labels.nearest_labels import UNKNOWN, Mapped, encode, pad

NAME = "verified_knn"
WIDE = Ring(64)  # of the querier's rows, so that their squares do not wrap
GROUP = 64  # rows of q mixed together, at most
BLOCK = 128  # rows of q whose squares come from one product


@dataclass(frozen=True, slots=True)
class Params:  # public; hashed into the run id, so a mismatch aborts
    core: nearest_labels.Params

    def __post_init__(self) -> None:
        _ = self.terms  # raises where no κ is left

    @property
    def terms(self) -> nearest_labels.Params:
        """The same with κ such that 16 d² M² < 2^62."""
        most = 61 + self.core.label_bits - 2 * (self.core.dims - 1).bit_length()
        return replace(self.core, bits=min(self.core.bits, most))

    @property
    def group(self) -> int:
        """G: 16 g² d² M² < 2^63, so that squares of rows that pass L3 do not wrap."""
        terms, g = self.terms, GROUP
        while g > 1 and 16 * (g * terms.dims * terms.norm) ** 2 >= 1 << 63:
            g //= 2
        return g

    @property
    def reach(self) -> int:
        """Bits of the largest mixture of honest rows, g √d M."""
        terms = self.terms
        return (math.isqrt(terms.dims) + 1) * self.group * terms.norm


@message("L9")
class Done:  # querier → everyone
    pass


def ideal(params: Params, inputs: Mapping[Party, object]) -> dict[Party, Mapped | None]:
    """What a trusted party would hand to each party."""
    return nearest_labels.ideal(params.terms, inputs)


def roles(params: Params) -> dict[Party, object]:
    core = params.core
    return {p: querier if p == core.querier else holder if p in core.sites else helper for p in core.members}


def cost(params: Params) -> dict[Party, tuple[int, int]]:
    """Messages and payload bytes that each party sends; expected ones where rows are long (see `selection`)."""
    terms = params.terms
    bill = VerifiedCostModel(terms.members, terms.computing)
    m, d, n = terms.queries, terms.dims, sum(terms.rows)
    bill.meet()
    bill.input(terms.querier, m * d, WIDE)
    for site, rows in zip(terms.sites, terms.rows, strict=True):
        bill.input(site, rows * d, terms.ring)
        bill.input(site, rows, terms.ring)
    bill.coin(terms.querier)  # L3
    bill.bits(ROWS * -(-m // params.group), WIDE.bits)
    for start in range(0, m, BLOCK):
        bill.product(min(BLOCK, m - start), min(BLOCK, m - start), d, WIDE)
    bill.bits(m, WIDE.bits)
    bill.check_zero()
    for start in range(0, m, terms.step):  # L4, L5
        count = min(terms.step, m - start)
        bill.product(count, n, d, terms.ring)
        bill.smallest_k(count, n, terms.k, terms.ring)
    _vote_cost(bill, terms)
    if terms.threshold:  # L7
        bill.bits(m, terms.ring.bits)
        bill.less(columns(m), terms.ring.bits, few_rounds=True)
        bill.gate(columns(m) * terms.answer_bits)
    bill.open_to(terms.querier, terms.opened_bits * columns(m))
    bill.send(terms.querier, 0, len(terms.members) - 1)
    return bill.total()


def _vote_cost(bill: VerifiedCostModel, terms: nearest_labels.Params) -> None:
    """L6."""
    width, k, b, high = columns(terms.queries), terms.k, terms.label_bits, terms.vote_bits
    if k > 1:
        left = b
        while left > 1:
            bill.gate(left // 2 * width * (k * (k - 1) // 2))
            left -= left // 2
        counts = [k, *[0] * (high - 1)]
        while max(counts) > 1:
            groups = [count // 3 + (count % 3 == 2) for count in counts]
            if adding := sum(groups[:-1]):
                bill.gate(adding * k * width)
            counts = [groups[at] + (count % 3 == 1) + (groups[at - 1] if at else 0) for at, count in enumerate(counts)]
    while k > 1:
        bill.less(k // 2 * width, b + high, few_rounds=True)
        bill.gate((b + high) * (k // 2) * width)
        k -= k // 2


# ---- L3: the querier's rows lie within the bound ---------------------------------------------------------------------


def mixtures(params: Params, q: Shared, alpha: npt.NDArray[np.float64]) -> Shared:
    """64 binary mixtures of every g rows, moved up by 2^t: (64, groups)."""
    g, d = params.group, params.terms.dims
    groups = -(-q.shape[0] // g)

    def mixed(w: U64) -> U64:
        rows = np.zeros((groups * g, d), np.uint64)
        rows[: len(w)] = w
        return mix_rows(alpha, np.ascontiguousarray(rows.reshape(groups, g * d).T), WIDE.bits)

    return q.map(mixed)


async def check_bound(trio: Verified, params: Params, q: Shared) -> Shared:
    """L3; returns |q|² modulo 2^64."""
    terms, t = params.terms, params.reach.bit_length()
    coin = await trio.coin(terms.querier)
    alpha = coin.bits((ROWS, params.group * terms.dims)).astype(np.float64)
    mixed = mixtures(params, q, alpha)
    moved = mixed + trio.constant(np.full(mixed.shape, 1 << t, np.int64), WIDE)
    high = (await trio.bits(moved))[t + 1 :]
    squares = []
    for start in range(0, terms.queries, BLOCK):
        part = q[start : start + BLOCK]
        squares.append((await trio.product(part, part)).map(np.diagonal))
    square = join(squares, axis=0)
    room = trio.constant(np.full(terms.queries, terms.norm**2, np.int64), WIDE) - square
    above = (await trio.bits(room))[(terms.norm**2).bit_length() :]
    over = together([high.reshape(-1), above.reshape(-1)])
    await trio.check_zero(over, "L3", "a query lies outside the bound, or")
    return square


# ---- L4 to L7: the three ---------------------------------------------------------------------------------------------


async def neighbours(trio: Verified, terms: nearest_labels.Params, q: Shared, r: Shared, w: Shared) -> XorShares:
    """L4, L5: words (queries, k) of the nearest references, ascending, above their numbers."""
    factor = -(2 << terms.label_bits)
    nearest = []
    for start in range(0, terms.queries, terms.step):
        trio.ch.step(f"neighbours of queries from {start + 1}", protocol=NAME, line="L5")
        part = q[start : start + terms.step].times(factor)
        nearest.append(await trio.smallest_k(await trio.product(part, r, w), terms.k))  # L4, L5
    return together(nearest)


async def count_bits(trio: Verified, bits: Sequence[XorShares], width: int) -> list[XorShares]:
    """Σ of shared bits as `width` planes, lowest first: adders of three bits of one weight, all weights at once."""
    columns = [list(bits), *([] for _ in range(width - 1))]
    while any(len(c) > 1 for c in columns):
        triples = [(at, c[3 * i : 3 * i + 3]) for at, c in enumerate(columns) for i in range(-(-len(c) // 3))]
        triples = [(at, three) for at, three in triples if len(three) > 1]
        adding = [(at, three) for at, three in triples if at + 1 < width]
        carry: list[XorShares] = []
        if adding:  # (x ⊕ z)(y ⊕ z) ⊕ z, with z = 0 where there are only two
            left = [three[0] ^ three[2] if len(three) == 3 else three[0] for _, three in adding]
            right = [three[1] ^ three[2] if len(three) == 3 else three[1] for _, three in adding]
            out = await trio.gate(stacked(left), stacked(right))
            carry = [out[i] ^ three[2] if len(three) == 3 else out[i] for i, (_, three) in enumerate(adding)]
        left_over = [c[-1:] if len(c) % 3 == 1 else [] for c in columns]
        for at, three in triples:
            total = three[0] ^ three[1]
            left_over[at].append(total ^ three[2] if len(three) == 3 else total)
        for (at, _), one in zip(adding, carry, strict=True):
            left_over[at + 1].append(one)
        columns = left_over
    return [c[0] if c else zeros(bits[0].shape) for c in columns]


async def vote(trio: Verified, terms: nearest_labels.Params, labels: Sequence[XorShares]) -> XorShares:
    """L6: planes of the winning label and, above them, of its votes turned over, from those of k neighbours."""
    k, b = terms.k, terms.label_bits
    rows = stacked(labels)  # (k, b, words)
    ones = trio.public(np.full(rows.shape[2:], ~np.uint64(0), np.uint64))
    votes = [ones.wide(k), *([zeros((k, *rows.shape[2:]))] * (terms.vote_bits - 1))]
    if k > 1:
        i, j = np.triu_indices(k, 1)
        alike = trio.flip(rows[i] ^ rows[j]).map(lambda w: np.ascontiguousarray(np.swapaxes(w, 0, 1)))
        same = await trio.all_of(alike)  # (pairs, words)
        pair = np.zeros((k, k), int)
        pair[i, j] = pair[j, i] = np.arange(len(i))
        others = [[y for y in range(k) if y != x] for x in range(k)]
        for_each = [same[np.array([pair[x, others[x][s]] for x in range(k)])] for s in range(k - 1)]
        votes = await count_bits(trio, [ones.wide(k), *for_each], terms.vote_bits)
    keys = [rows[:, bit] for bit in range(b)] + [trio.flip(v) for v in votes]  # lowest first; most votes are smallest
    best = stacked(keys)  # (b + bits, k, words)
    while (count := best.shape[1]) > 1:
        h = count // 2
        x, y = best[:, 0 : 2 * h : 2], best[:, 1 : 2 * h : 2]
        later = await trio.less(y, x, few_rounds=True)
        kept = await trio.choose(later, y, x)
        best = XorShares(*(np.concatenate([w, rest[:, 2 * h :]], axis=1) for w, rest in zip(kept, best, strict=True)))
    return best[:, 0]


async def result(trio: Verified, terms: nearest_labels.Params, near: XorShares, square: Shared) -> XorShares:
    """L6, L7: the planes that L8 opens."""
    b, low = terms.label_bits, np.uint64(index_bits(sum(terms.rows)))
    labels = [near[:, j].map(lambda w: planes_of(w >> low, b)) for j in range(terms.k)]
    best = await vote(trio, terms, labels)
    planes = best[: b + terms.vote_bits] if terms.share else best[:b]
    if not terms.threshold:
        return planes
    ring = terms.ring
    limit = min(int(terms.threshold**2 * terms.scale**2), 4 * terms.norm**2) + 1
    room = trio.constant(np.full(terms.queries, limit << b, np.int64), ring) - square.to(ring).times(1 << b)
    far = await trio.bits(room)
    top = np.zeros(far.shape, np.uint64)
    top[-1] = ~np.uint64(0)
    nearest = near[:, 0].map(lambda w: planes_of(w >> low, ring.bits))
    known = await trio.less(nearest, far ^ trio.public(top), few_rounds=True)  # L7
    kept = await trio.gate(planes, known.wide(len(planes)))
    return together([kept, known[None]])


def decode(terms: nearest_labels.Params, planes: U64, count: int) -> Mapped:
    """What was opened, for the first `count` cells; a label outside the vocabulary is `unknown`."""
    b = terms.label_bits
    code = gf64.to_words(planes)[:count].astype(np.int64)
    labels = code & ((1 << b) - 1)
    votes = ~(code >> b) & ((1 << terms.vote_bits) - 1) if terms.share else None
    known = labels < len(terms.labels)
    if terms.threshold:
        known &= (code >> (len(planes) - 1) & 1) == 1
    return Mapped(np.where(known, labels, UNKNOWN), None if votes is None else np.where(known, votes, 0))


# ---- roles -----------------------------------------------------------------------------------------------------------


async def _compute(
    ch: Channel, params: Params, q: I64 | None, r: I64 | None, w: I64 | None, entropy: Entropy, identity: Identity
) -> U64 | None:
    """Every role: share what is mine, compute if I am one of the three, get what is opened to me."""
    terms = params.terms
    p0, p1, p2 = terms.computing
    m, d = terms.queries, terms.dims
    trio = await Verified.meet(ch, (p0, p1, p2), terms.members, entropy=entropy, identity=identity)  # L1
    qs = await trio.input(terms.querier, None if q is None else WIDE.encode(q), (m, d), WIDE)  # L2
    references, added = await nearest_labels.share_references(trio, terms, r, w)
    planes = None
    if qs is not None:
        square = await check_bound(trio, params, qs)  # L3
        near = await neighbours(trio, terms, qs.to(terms.ring), join(references, axis=0), join(added, axis=0))
        planes = await result(trio, terms, near, square)
    shape = (terms.opened_bits, -(-m // 64))
    labels = await trio.open_to(planes, shape, to=terms.querier, protocol=NAME, line="L8", what=terms.opened)  # L8
    await nearest_labels.finish(ch, terms.querier, Done())  # L9
    return labels


async def querier(
    ch: Channel, params: Params, x: npt.NDArray[np.floating], *, entropy: Entropy, identity: Identity
) -> Mapped:
    """Hold the cells to be labelled, one row each."""
    terms = params.terms
    planes = await _compute(ch, params, pad(encode(terms, x), terms.queries), None, None, entropy, identity)
    assert planes is not None
    return decode(terms, planes, len(x))


async def holder(
    ch: Channel, params: Params, x: npt.NDArray[np.floating], labels: I64, *, entropy: Entropy, identity: Identity
) -> None:
    """Hold references: rows, and for each the place of its label in the vocabulary."""
    r, w = nearest_labels.padded_references(params.terms, ch.me, x, labels)
    await _compute(ch, params, None, r, w, entropy, identity)


async def helper(ch: Channel, params: Params, *, entropy: Entropy, identity: Identity) -> None:
    """Compute without data, as the coordinator does where there are only two sites; or wait for the end."""
    if ch.me in params.core.members:
        await _compute(ch, params, None, None, None, entropy, identity)
    else:
        await nearest_labels.finish(ch, params.core.querier, Done())  # L9
