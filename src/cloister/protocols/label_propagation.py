"""Cross-client label propagation as published: every point gets a label and a confidence from the graph of all points.

    L1    u ↔ u   a seed that S does not know (`common_seed`); how many points, which classes (`point_roster`)
    L3    u       Π (L × d) standard normal, from the seed
    L4    u       B_u = [V_u Πᵀ ≥ 0], packed
    L5    u ↔ S   H, all Hamming distances, at S (`secure_hamming`)
    L6-9  S       A = cos(πH/L), the k largest per row, W = A + Aᵀ, normalised (`graph.adjacency`)
    L10   S       columns of S = (I - αW)^{-1} by conjugate gradients, for labelled points only
    L12   u → S   which of its points are labelled;   S → u   S_u, the columns of those
    L13   u       Z̄_u = S_u Y_u
    L14   u ↔ S   Z[R_u] to u alone (`row_sums`)
    L15   u       label = argmax Z, confidence = 1 - entropy(Z / ΣZ) / log C

Rows of S are scaled to sum to one over the labelled points and sent as integers of 28 bits: L15 sees no difference, and
the sums of L14 are exact. Similarities of zero or less are no edges. With `balance`, which the paper does not have, the
scores of a class are divided by the number of its labels, which the sites add up before L13 (`secure_sum`).

Reveals
-------
server : H, which points are labelled, how many points each site has and how many classes there are. From H it finds all
    points up to a rotation, and with some 30 known points (one site that colludes) the vectors: cosine 0.99.
site : for each own point the scores Z of all classes; the columns of S of its labelled points, which say how near they
    are to everybody's points; the sizes and class names of the others. A site can solve S_L Y = Z for the labels of
    other sites' points, and with the server any site can: 76 to 100 % of them. Use `private_propagation`.
with `balance`, everyone : how many labels of each class all sites have together.
engine `mpc` : the first three sites compute (with two sites, the server is third); two of them together know all codes.

Assumes
-------
Semi-honest parties; the server does not collude with a site; what the parts assume. A site that stops before L5 is as
if absent; during L5, L5 is begun again without it; before L14 it counts as unlabelled; within L14, L14 is begun again
with fresh masks; later it only misses its labels. At least two sites must stay.

Cost
----
`secure_hamming`, plus per site 4 n l_u bytes down for S_u (l_u labelled points), plus `row_sums` of n C words.

References
----------
[SYL24] Scott, Yeo, Lampert, TMLR 2024, Algorithm 1; L numbers are its lines (it has no L2 or L11 to send).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from cloister.channel import Channel
from cloister.crypto.agreement import Identity
from cloister.crypto.entropy import Entropy
from cloister.errors import DataError, ParameterError, ProtocolAbort
from cloister.models import graph
from cloister.protocols import attempts, common_seed, point_roster, row_sums, secure_hamming, secure_sum
from cloister.protocols.hamming_mpc import offsets
from cloister.protocols.point_roster import Roster
from cloister.protocols.secure_hamming import Engine
from cloister.study import Party
from cloister.wire import F64, I32, I64, U8, message

NAME = "label_propagation"
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

    def __post_init__(self) -> None:
        point_roster.Params(self.sites, self.server, self.classes)
        if not 1 <= self.groups <= len(self.sites) // 2:
            raise ParameterError(
                f"'groups' must leave at least two sites in each: at most {len(self.sites) // 2}, found {self.groups}"
            )
        graph.check_sizes(1 << 40, self.bits, self.n_neighbors, self.alpha)
        if self.engine not in secure_hamming.ENGINES:
            known = ", ".join(secure_hamming.ENGINES)
            raise ParameterError(f"'hamming' must be one of {known}, found {self.engine!r}")

    def group(self, i: int) -> Params:
        """The i-th group: every `groups`-th site."""
        return replace(self, sites=self.sites[i :: self.groups], groups=1)


@dataclass(frozen=True)
class Labels:
    """What a site takes away."""

    classes: tuple[str, ...]
    label: I64  # (n_u,) index into classes, -1 where no label reaches
    confidence: F64  # (n_u,)
    scores: I64  # (n_u, C) Z[R_u], each row up to a factor
    sites: tuple[Party, ...]  # whose points are in the graph

    @property
    def names(self) -> list[str | None]:
        return [self.classes[i] if i >= 0 else None for i in self.label]


@dataclass(frozen=True)
class Served:
    """What the server takes away."""

    sites: tuple[Party, ...]
    sizes: tuple[int, ...]
    labelled: I64  # points, by their place in the graph
    distances: I32 | None  # H, published only
    keys: I64 | None  # the graph, hardened only
    finished: tuple[Party, ...]  # who got their labels


@message("L12")
class Labelled:  # u → S
    mask: U8  # (⌈n_u / 8⌉,)
    classes: int  # C


@message("L12")
class Columns:  # S → u
    s: I32  # (n, block)


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
    found = graph.propagate(
        packed,
        y,
        n_classes=len(classes),
        n_neighbors=params.n_neighbors,
        alpha=params.alpha,
        balance=params.balance,
        sites=owner,
    )
    cuts = [slice(at[i], at[i + 1]) for i in range(len(sites))]
    given = {
        u: Labels(classes, found.label[c], found.confidence[c], found.scores[c], sites)
        for u, c in zip(sites, cuts, strict=True)
    }
    return given | {params.server: None}


def roles(params: Params) -> dict[Party, object]:
    return {params.server: server} | dict.fromkeys(params.sites, site)


# ---- local steps -----------------------------------------------------------------------------------------------------


def class_names(labels: Sequence[str | None]) -> tuple[str, ...]:
    return tuple(sorted({name for name in labels if name is not None}))


def label_codes(labels: Sequence[str | None], classes: tuple[str, ...]) -> I64:
    place = {name: i for i, name in enumerate(classes)}
    return np.array([-1 if name is None else place[name] for name in labels], np.int64)


def check_inputs(vectors: F64, labels: Sequence[str | None]) -> None:
    if vectors.ndim != 2 or 0 in vectors.shape or vectors.dtype != np.float64:
        raise DataError(f"expected a table of numbers, one row per point, found {vectors.dtype} of {vectors.shape}")
    if not np.isfinite(vectors).all():
        raise DataError("vectors have missing or infinite values; fill them, or remove these points")
    if len(labels) != len(vectors):
        raise DataError(f"expected one label (or None) per point, found {len(labels)} for {len(vectors)} points")


def unpack_mask(mask: U8, n: int) -> I64:
    return np.flatnonzero(np.unpackbits(mask, count=n)).astype(np.int64)


def column_blocks(n: int, labelled: int) -> list[int]:
    """Widths of the blocks in which `graph.influence` yields the columns of one site."""
    step = max(1, graph._COLUMNS // n)
    return [min(step, labelled - start) for start in range(0, labelled, step)]


# ---- what both modes have in common ----------------------------------------------------------------------------------


async def begin(
    ch: Channel, params: Params, vectors: F64, labels: Sequence[str | None], *, entropy: Entropy, identity: Identity
) -> tuple[Roster, U8, I64]:
    """L1 to L4 at a site: who takes part, this site's codes and classes."""
    check_inputs(vectors, labels)
    seeds = common_seed.Params(params.sites, params.server)
    seed = await common_seed.site(ch.sub("seed"), seeds, entropy=entropy, identity=identity)  # L1
    names = class_names(labels)
    listed = point_roster.Params(params.sites, params.server, params.classes)
    n, d = vectors.shape
    roster = await point_roster.site(ch.sub("roster"), listed, n, d, names, seed.secret, entropy=entropy)
    check_graph(params, roster.sizes)
    planes = graph.hyperplanes(seed.secret, params.bits, d)  # L3
    return roster, graph.codes(vectors, planes), label_codes(labels, roster.classes)  # L4


async def open_study(ch: Channel, params: Params) -> Roster:
    """L1 at the server."""
    await common_seed.coordinator(ch.sub("seed"), common_seed.Params(params.sites, params.server))
    listed = point_roster.Params(params.sites, params.server, params.classes)
    roster = await point_roster.server(ch.sub("roster"), listed)
    check_graph(params, roster.sizes)
    return roster


def check_graph(params: Params, sizes: Sequence[int]) -> None:
    graph.check_sizes(sum(sizes), params.bits, params.n_neighbors, params.alpha)


def same_classes(counts: set[int]) -> int:
    if len(counts) != 1 or min(counts) < 2:
        raise ProtocolAbort(NAME, "L12", "mismatch", "the sites do not agree on the classes")
    return counts.pop()


def check_labelled(labelled: I64) -> None:
    if not len(labelled):
        raise ProtocolAbort(NAME, "L12", "no-labels", "no point of the sites that are left has a label")


async def class_counts(
    ch: Channel, params: Params, sites: tuple[Party, ...], Y: I64, *, entropy: Entropy, identity: Identity
) -> I64 | None:
    """With `balance`: how many labels of each class all sites have together (`secure_sum`)."""
    if not params.balance:
        return None
    sums = secure_sum.Params(sites, params.server, Y.shape[1], to_all=True)
    mine = Y.sum(axis=0).astype(np.uint64)
    found = await secure_sum.contributor(ch.sub("counts"), sums, mine, entropy=entropy, identity=identity)
    assert found is not None
    return found.z.astype(np.int64)


async def sum_counts(ch: Channel, params: Params, sites: tuple[Party, ...], n_classes: int) -> None:
    if params.balance:
        sums = secure_sum.Params(sites, params.server, n_classes, to_all=True)
        await secure_sum.aggregator(ch.sub("counts"), sums)


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
    found = await asyncio.gather(*parts, return_exceptions=True)
    served = tuple(x for x in found if isinstance(x, Served))
    for x in found:
        if isinstance(x, BaseException) and not (isinstance(x, ProtocolAbort) and served):
            raise x
    return served


# ---- roles -----------------------------------------------------------------------------------------------------------


def _hamming(params: Params, roster: Roster, sites: tuple[Party, ...]) -> secure_hamming.Params:
    sizes = tuple(roster.size(u) for u in sites)
    check_graph(params, sizes)
    return secure_hamming.Params(sites, sizes, params.bits, params.server, params.engine)


async def site(
    ch: Channel, params: Params, vectors: F64, labels: Sequence[str | None], *, entropy: Entropy, identity: Identity
) -> Labels:
    return await in_group(ch, params, lambda c, p: _site(c, p, vectors, labels, entropy=entropy, identity=identity))


async def server(ch: Channel, params: Params, *, entropy: Entropy, identity: Identity) -> tuple[Served, ...]:
    """Play S; one `Served` per group."""
    return await all_groups(ch, params, lambda c, p: _server(c, p, entropy=entropy, identity=identity))


async def _site(
    ch: Channel, params: Params, vectors: F64, labels: Sequence[str | None], *, entropy: Entropy, identity: Identity
) -> Labels:
    S = params.server
    roster, packed, y = await begin(ch, params, vectors, labels, entropy=entropy, identity=identity)

    async def step(c: Channel, sites: tuple[Party, ...]) -> None:
        await secure_hamming.site(c, _hamming(params, roster, sites), packed, entropy=entropy, identity=identity)

    _, sites = await attempts.follow(ch.sub("hamming"), S, step)  # L5
    sizes = tuple(roster.size(u) for u in sites)
    n, n_classes = sum(sizes), len(roster.classes)
    await ch.send(S, Labelled(np.packbits(y >= 0), n_classes))  # L12
    Y = graph.one_hot(y[y >= 0], n_classes)
    counts = await class_counts(ch, params, sites, Y, entropy=entropy, identity=identity)
    z = np.zeros((n, n_classes), np.int64)
    at = 0
    for width in column_blocks(n, len(Y)):
        block = (await ch.recv(S, Columns, s=(n, width))).s
        z += block @ Y[at : at + width]  # L13
        at += width
    sums = row_sums.Params(sites, sizes, S, n_classes)
    mine = await row_sums.site(ch.sub("rows"), sums, z.view(np.uint64), entropy=entropy, identity=identity)  # L14
    scores = mine.view(np.int64)
    return Labels(roster.classes, *graph.decide(scores, counts), scores, sites)  # L15


async def _server(ch: Channel, params: Params, *, entropy: Entropy, identity: Identity) -> Served:
    roster = await open_study(ch, params)

    async def step(c: Channel, sites: tuple[Party, ...]) -> I32:
        return await secure_hamming.server(c, _hamming(params, roster, sites), entropy=entropy, identity=identity)

    H, sites = await attempts.lead(ch.sub("hamming"), roster.sites, 2, step)  # L5
    sizes = tuple(roster.size(u) for u in sites)
    ch.step("graph", protocol=NAME, line="L7")
    W = graph.adjacency(smallest_blocks(H, params.n_neighbors), params.bits)  # L6-9
    at = dict(zip(sites, offsets(sizes), strict=False))
    masks = await attempts.survivors(ch, sites, Labelled, 2, mask=(None,))  # L12
    own = {u: at[u] + unpack_mask(m.mask, roster.size(u)) for u, m in masks.items()}
    labelled = np.sort(np.concatenate(list(own.values())))
    check_labelled(labelled)
    n_classes = same_classes({m.classes for m in masks.values()})
    await sum_counts(ch, params, sites, n_classes)
    total = graph.influence_sum(W, params.alpha, labelled)
    for u, mine in own.items():  # L10, L12
        for _, block in graph.influence(W, params.alpha, labelled, mine, total):
            await ch.send(u, Columns(ch.reveal(block, to=u, line="L12", what="columns of S", protocol=NAME)))
    ch.step("row sums", protocol=NAME, line="L14")
    sums = row_sums.Params(sites, sizes, params.server, n_classes)
    finished = await row_sums.server(ch.sub("rows"), sums)  # L14
    return Served(sites, sizes, labelled, H, None, finished)


def smallest_blocks(H: I32, k: int) -> I64:
    """L7 in blocks of rows."""
    n = len(H)
    step = max(1, (1 << 22) // n)
    return np.concatenate([graph.smallest(H[a : a + step], a, k) for a in range(0, n, step)])
