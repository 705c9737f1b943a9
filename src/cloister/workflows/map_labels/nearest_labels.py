"""Nearest labels: the function that every k-NN of a mapping computes, its parameters, and rows as whole numbers.

Rows are multiplied by a public scale and rounded, so that distances are exact in a ring of κ bits: b bits hold a label,
M is the largest norm of a row after scaling, and 4M² + 2 ≤ 2^{κ-1-b}, so that no difference of distance² 2^b + label
wraps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cloister.arrays import F64, I64
from cloister.errors import DataError, ParameterError
from cloister.mpc.crypto.replicated import Ring, Shared, index_bits
from cloister.mpc.net.channel import Channel
from cloister.mpc.three_party.replicated import Trio
from cloister.mpc.three_party.verified import Verified
from cloister.study import Party

BATCH = 1 << 22  # pairs of query and reference at a time
UNKNOWN = -1


@dataclass(frozen=True, slots=True)
class Params:  # public; hashed into the run id, so a mismatch aborts
    querier: Party
    sites: tuple[Party, ...]  # owners of references
    computing: tuple[Party, ...]  # three of all members; any other party of the study may be one
    queries: int  # padded
    rows: tuple[int, ...]  # padded, per site
    dims: int
    labels: tuple[str, ...]  # the vocabulary
    bound: float  # largest Euclidean norm of any row
    k: int = 10
    bits: int = 40  # κ, as far as 64 bits hold it with the number of a reference
    share: bool = False  # whether the querier learns how many voted for the label
    threshold: float = 0.0  # farther than this from all references is `unknown`; 0: never
    batch: int = BATCH

    def __post_init__(self) -> None:
        if len(set(self.computing)) != 3 or len(self.computing) != 3:
            raise ParameterError(f"three different computing parties are needed, found {', '.join(self.computing)}")
        if not self.sites or self.querier in self.sites or len(set(self.sites)) != len(self.sites):
            raise ParameterError("references come from one or more sites, each named once, and not from the querier")
        if len(self.rows) != len(self.sites) or min(self.rows) < 1 or self.queries < 1 or self.dims < 1:
            raise ParameterError("every site needs at least one row, and rows at least one column")
        if not 1 <= self.k <= sum(self.rows):
            raise ParameterError(
                f"n_neighbors={self.k} is more than the {sum(self.rows)} references there are; lower it"
            )
        if not self.labels or len(set(self.labels)) != len(self.labels):
            raise ParameterError("the vocabulary needs at least one label, and each only once")
        if not (math.isfinite(self.bound) and self.bound > 0 and math.isfinite(self.threshold) and self.threshold >= 0):
            raise ParameterError("bound and threshold are distances: finite, bound above 0")
        if not 16 <= self.bits <= 64 or self.ring.bits < 16 or self.norm < 2 * self.rounding + 16:
            raise ParameterError(
                f"{self.bits} bits do not resolve distances in {self.dims} dimensions with {len(self.labels)} labels; "
                "use precision=40, or up to 64"
            )

    @property
    def ring(self) -> Ring:
        return Ring(min(self.bits, 64 - index_bits(sum(self.rows))))

    @property
    def label_bits(self) -> int:
        return max(1, (len(self.labels) - 1).bit_length())

    @property
    def norm(self) -> int:
        """M: 4M² + 2 ≤ 2^(κ-1-b)."""
        return math.isqrt(((1 << (self.ring.bits - 1 - self.label_bits)) - 2) // 4)

    @property
    def rounding(self) -> int:
        """How much the norm of a row of `dims` rounded numbers can grow."""
        return math.isqrt(self.dims) // 2 + 1

    @property
    def scale(self) -> float:
        return (self.norm - self.rounding) / self.bound

    @property
    def members(self) -> tuple[Party, ...]:
        return tuple(dict.fromkeys((*self.computing, self.querier, *self.sites)))

    @property
    def vote_bits(self) -> int:
        return self.k.bit_length()

    @property
    def answer_bits(self) -> int:
        """Of a label, and of its votes if they are shown."""
        return self.label_bits + (self.vote_bits if self.share else 0)

    @property
    def opened_bits(self) -> int:
        """All that the querier gets of one query: with a threshold, whether the answer holds."""
        return self.answer_bits + bool(self.threshold)

    @property
    def opened(self) -> str:
        """What is opened, for receipts."""
        return f"label{' and votes' if self.share else ''} of {self.queries} queries"

    @property
    def step(self) -> int:
        """Queries of one batch."""
        return max(1, min(self.queries, self.batch // sum(self.rows)))


@dataclass(frozen=True, slots=True)
class Mapped:
    """What the querier learns, one entry per cell."""

    labels: I64  # place in the vocabulary, or UNKNOWN
    votes: I64 | None  # of k, if asked for; 0 where unknown


def ideal(params: Params, inputs: Mapping[Party, object]) -> dict[Party, Mapped | None]:
    """What a trusted party would hand to each party."""
    q = encode(params, first(inputs[params.querier]))
    parts = [inputs[p] for p in params.sites]
    r = np.concatenate([encode(params, first(part)) for part in parts])
    y = np.concatenate([np.asarray(part[1]) for part in parts])  # type: ignore[index]
    return dict.fromkeys(params.members) | {params.querier: plain_vote(params, q, r, y)}


def first(x: object) -> F64:
    return np.asarray(x[0] if isinstance(x, tuple) else x)


def plain_vote(params: Params, q: I64, r: I64, y: I64) -> Mapped:
    """The same function in the clear, on scaled rows."""
    b, labels_near, nearest = params.label_bits, [], []
    wide = np.float64 if params.norm**2 < 1 << 53 else np.int64  # exact: |q · r| ≤ M²
    rr, rt = (r**2).sum(1), r.T.astype(wide)
    for start in range(0, len(q), 256):
        part = q[start : start + 256]
        d = (part**2).sum(1)[:, None] + rr - 2 * (part.astype(wide) @ rt).astype(np.int64)
        keys = np.partition((d << b) + y, params.k - 1, axis=1)[:, : params.k]
        labels_near.append(keys & ((1 << b) - 1))
        nearest.append(keys.min(1) >> b)
    near = np.concatenate(labels_near)
    votes = np.stack([(near == label).sum(1) for label in range(len(params.labels))], axis=1)
    labels, top = votes.argmax(1), votes.max(1)
    if params.threshold:
        far = np.concatenate(nearest) > int(params.threshold**2 * params.scale**2)
        labels, top = np.where(far, UNKNOWN, labels), np.where(far, 0, top)
    return Mapped(labels, top if params.share else None)


def encode(params: Params, x: npt.NDArray[np.floating]) -> I64:
    """Rows times the public scale, rounded; rows beyond the bound raise before anything is sent."""
    x = np.asarray(x, np.float64)
    if x.ndim != 2 or x.shape[1] != params.dims:
        raise DataError(
            f"expected rows of {params.dims} numbers, found shape {x.shape}; do all sites use one embedding?"
        )
    length = np.linalg.norm(x, axis=1)
    outside = int(np.count_nonzero(~(length <= params.bound)))
    if outside:
        raise DataError(
            f"{outside} of {len(x)} cells are missing, infinite or farther from the origin than {params.bound:g}, the "
            "bound agreed for this study; nothing was sent. Clean the data, or agree on a larger bound."
        )
    scaled: I64 = np.rint(x * params.scale).astype(np.int64)
    return scaled


def pad(x: I64, rows: int) -> I64:
    if len(x) > rows:
        raise DataError(f"{len(x)} cells do not fit the {rows} rows that were announced")
    return np.concatenate([x, np.zeros((rows - len(x), *x.shape[1:]), x.dtype)])


def weights(params: Params, r: I64, y: I64, rows: int) -> I64:
    """L2: w = |r|² 2^b + label, and a weight above every distance for rows that pad."""
    y = np.asarray(y, np.int64)
    if y.shape != (len(r),) or (len(y) and not 0 <= int(y.min()) <= int(y.max()) < len(params.labels)):
        raise DataError("every reference needs one label of the vocabulary")
    w = np.full(rows, (3 * params.norm**2 + 1) << params.label_bits, np.int64)
    w[: len(r)] = ((r**2).sum(1) << params.label_bits) + y
    return w


def padded_references(params: Params, site: Party, x: npt.NDArray[np.floating], labels: I64) -> tuple[I64, I64]:
    """What a site shares in L2: r and w, padded."""
    rows, r = params.rows[params.sites.index(site)], encode(params, x)
    return pad(r, rows), weights(params, r, labels, rows)


async def share_references(
    trio: Trio | Verified, params: Params, r: I64 | None, w: I64 | None
) -> tuple[list[Shared], list[Shared]]:
    """L2: every site's r and w in shares; r and w are None at a member that is no site. Empty where nobody computes."""
    ring, shared_r, shared_w = params.ring, [], []
    for site, n in zip(params.sites, params.rows, strict=True):
        mine, added = (None if site != trio.ch.me or x is None else ring.encode(x) for x in (r, w))
        shared_r.append(await trio.input(site, mine, (n, params.dims), ring))
        shared_w.append(await trio.input(site, added, (n,), ring))
    return [x for x in shared_r if x is not None], [x for x in shared_w if x is not None]


async def finish(ch: Channel, querier: Party, done: Any) -> None:
    """L9: the querier tells everyone that it has its labels."""
    if ch.me == querier:
        await ch.scatter([p for p in ch.agreement.parties if p != ch.me], done)
    else:
        await ch.recv(querier, type(done))
