"""Shared scores: every site learns Z = S Y for its own points, where the server knows S and the sites know Y.

    C1   S ⇒ u      how many labelled points each site brings, rounded up to a multiple of 16
    C2   u          Y_u, a one in every row at the class of a labelled point; rows of zeros up to that number; shared
    C3   S          S[R_v], the rows of v's points, shared; recipient by recipient, in blocks of rows
    C4   0, 1, 2    Z[R_v] = S[R_v] Y
    C5   → v        Z[R_v]

Who computes: the first three sites, or two sites and the server, by `replicated`.

Reveals
-------
server : how many points each site has labelled, which it told itself. Together with one site that it does not compute
    with: what that site learns.
site : for each own point the scores of all classes; rounded numbers of labelled points.
two computing parties together : all labels and S. With two sites the server computes as third, and it and a single
    site learn them.

Assumes
-------
Semi-honest parties; no two of the three computing parties collude. Lies that are not noticed: (a), (b), (c), (f) of the
site and (a), (b), (c), (f) of the server, which may give any S: `verified_propagation` computes without one.

Cost
----
8 bytes per entry of S from the server, 4 per entry of Y (twice where a site does not compute), 12 per entry of Z among
the three.

References
----------
[AFL+16] Araki et al., CCS 2016: the product. Lines numbered here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from cloister.arrays import I32, I64
from cloister.errors import ParameterError, ProtocolAbort
from cloister.models import graph
from cloister.mpc.crypto.agreement import Identity
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.crypto.replicated import Ring, Shared, join
from cloister.mpc.net.channel import Channel
from cloister.mpc.net.wire import message
from cloister.mpc.three_party.replicated import Trio
from cloister.mpc.three_party.replicated_cost import CostModel
from cloister.study import Party
from cloister.workflows.propagate_labels.shared_codes import computing

NAME = "shared_scores"
RING = Ring.holding(1 << (graph.FRACTION + 2))  # a row of S adds up to 2^FRACTION, but for rounding
BLOCK = 1 << 21  # entries of S at once
PAD = 16


@dataclass(frozen=True, slots=True)
class Params:
    sites: tuple[Party, ...]
    sizes: tuple[int, ...]
    server: Party
    classes: int

    def __post_init__(self) -> None:
        if len(self.sites) < 2 or len(self.sizes) != len(self.sites) or self.classes < 2:
            raise ParameterError("scores need at least two sites with points, and two classes")

    @property
    def computing(self) -> tuple[Party, Party, Party]:
        return computing(self.sites, self.server)


@message("C1")
class Labelled:  # S ⇒ u
    rounded: dict[Party, int]


def ideal(params: Params, xs: Mapping[Party, object]) -> dict[Party, I64 | None]:
    """The server gives {site: S at the columns of its labelled points}, a site the classes of these."""
    given = xs[params.server]
    assert isinstance(given, dict)
    scores = sum(S.astype(np.int64) @ graph.one_hot(np.asarray(xs[u]), params.classes) for u, S in given.items())
    cuts = np.split(np.asarray(scores), np.cumsum(params.sizes)[:-1])
    return {params.server: None} | dict(zip(params.sites, cuts, strict=True))


def roles(params: Params) -> dict[Party, object]:
    return {params.server: server} | dict.fromkeys(params.sites, site)


def cost(params: Params, labelled: Mapping[Party, int]) -> dict[Party, tuple[int, int]]:
    """Messages and payload bytes that each party sends, for so many labelled points."""
    members = (*params.sites, params.server)
    bill = CostModel(members, params.computing)
    bill.send(params.server, len(params.sites), len(params.sites))
    bill.meet()
    widths = {u: rounded(n) for u, n in labelled.items()}
    for u, width in ((u, width) for u, width in widths.items() if width):
        bill.input(u, width * params.classes, RING)
    for v, cut in _blocks(params, sum(widths.values())):
        rows, width = cut.stop - cut.start, sum(widths.values())
        bill.input(params.server, rows * width, RING)
        bill.reshare(rows * params.classes, RING)
        bill.open(v, rows * params.classes, RING)
    return bill.total()


def rounded(n: int) -> int:
    return -(-n // PAD) * PAD


def _blocks(params: Params, width: int) -> Iterator[tuple[Party, slice]]:
    """Rows of S at once: the points of one recipient, or some of them."""
    step, at = max(1, BLOCK // max(1, width)), 0
    for v, n in zip(params.sites, params.sizes, strict=True):
        for start in range(0, n, step):
            yield v, slice(at + start, at + min(n, start + step))
        at += n


def check_rounded(sites: tuple[Party, ...], announced: Mapping[Party, int], me: Party, mine: int) -> dict[Party, int]:
    """C1: all sites, multiples of 16, and mine is the one that follows from what I said."""
    widths = {u: announced.get(u, -1) for u in sites}
    if set(announced) != set(sites) or any(w < 0 or w % PAD for w in widths.values()) or widths[me] != rounded(mine):
        raise ProtocolAbort(NAME, "C1", "mismatch", "the numbers of labelled points are not those that were sent")
    if not sum(widths.values()):
        raise ProtocolAbort(NAME, "C1", "no-labels", "no point of the sites that are left has a label")
    return widths


# ---- roles -----------------------------------------------------------------------------------------------------------


async def _share_labels(trio: Trio, params: Params, widths: Mapping[Party, int], y: I64 | None) -> Shared | None:
    """C2: Yᵀ (C, l), as the product wants it."""
    parts = []
    for u, width in widths.items():
        mine = None
        if u == trio.ch.me and y is not None:
            rows = np.full(width, -1, np.int64)
            rows[: len(y)] = y
            mine = RING.encode(graph.one_hot(rows, params.classes))
        if not width:
            continue
        part = await trio.input(u, mine, (width, params.classes), RING)
        if part is not None:
            parts.append(part.map(lambda w: np.ascontiguousarray(w.T)))
    return join(parts, axis=1) if parts else None


async def _compute(
    ch: Channel,
    params: Params,
    widths: Mapping[Party, int],
    y: I64 | None,
    S: I32 | None,
    entropy: Entropy,
    identity: Identity,
) -> I64 | None:
    """C2 to C5, at every member; returns this site's scores."""
    members = (*params.sites, params.server)
    trio = await Trio.meet(ch.sub("three"), params.computing, members, entropy=entropy, identity=identity)
    labels = await _share_labels(trio, params, widths, y)
    width, scores = sum(widths.values()), []
    for v, cut in _blocks(params, width):
        shape = (cut.stop - cut.start, params.classes)
        mine = None if S is None else RING.encode(S[cut])
        rows = await trio.input(params.server, mine, (shape[0], width), RING)  # C3
        z = None
        if rows is not None and labels is not None:
            z = await trio.times_transposed(rows, labels)  # C4
        what = f"scores of {shape[0]} points"
        part = await trio.open(z, shape, RING, to=v, protocol=NAME, line="C5", what=what)  # C5
        if part is not None:
            scores.append(part)
    return np.concatenate(scores) if scores else None


async def site(ch: Channel, params: Params, y: I64, *, entropy: Entropy, identity: Identity) -> I64:
    """Hold the classes of labelled points, in order."""
    labelled = await ch.recv_broadcast(params.server, Labelled)  # C1
    widths = check_rounded(params.sites, labelled.rounded, ch.me, len(y))
    scores = await _compute(ch, params, widths, y, None, entropy, identity)
    assert scores is not None
    return scores


async def server(
    ch: Channel, params: Params, columns: Mapping[Party, I32], *, entropy: Entropy, identity: Identity
) -> None:
    """Hold S at the columns of every site's labelled points, (n, l_u) each."""
    widths = {u: rounded(columns[u].shape[1]) for u in params.sites}
    await ch.broadcast(params.sites, Labelled(widths))  # C1
    n = sum(params.sizes)
    padded = [np.pad(columns[u], ((0, 0), (0, widths[u] - columns[u].shape[1]))) for u in params.sites]
    S = np.concatenate(padded, axis=1) if sum(widths.values()) else np.zeros((n, 0), np.int32)
    if not S.shape[1]:
        raise ProtocolAbort(NAME, "C1", "no-labels", "no point of the sites that are left has a label")
    await _compute(ch, params, widths, None, S, entropy, identity)
