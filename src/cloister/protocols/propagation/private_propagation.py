"""Private label propagation: labels for every point, from a graph of which the server sees only the edges.

    L1-4  u ↔ u   as in `label_propagation`: common seed, sizes and class names, codes
    L5    u ↔ S   the k nearest neighbours of every point, and their distances, at S (`private_graph`)
    L6-9  S       W from them, sparse and normalised
    L10   u → S   which of its points are labelled, and pk_u, σ_u: a fresh BFV key, signed
    L11   S → u   {v: pk_v, σ_v}, and how the products will be cut
    L12   u → S   for every v: Enc_v(Y_u), its labels as rows of zeros with a one
    L13   S       for every v: Enc_v(Z[R_v]) = Σ_u S[R_v, labelled_u] Enc_v(Y_u), re-randomised and flooded
          S → v   Enc_v(Z[R_v])
    L14   v       Z[R_v]; label = argmax, confidence = 1 - entropy / log C

The result is that of `label_propagation` to the last bit. Nobody receives S: it never leaves the server.

Reveals
-------
server : the graph: k neighbours of every point and their distances; which points are labelled; how many points each
    site has and how many classes there are. Not H, and no label. If a site drops out during L5, also what was opened
    before: the graph with that site's points. With a site v: what v learns, and so the labels that solve
    S[R_v] Y = Z[R_v]. A graph is itself a picture of the points: with the vectors of one site, shortest paths give the
    directions of all others, roughly: median cosine 0.6 in 30 dimensions without clusters, 0.97 in 8.
site : for each own point the scores Z of all classes; the sizes and class names of the others, and how many points are
    labelled, roughly. Nothing about S or others' labels beyond its own scores.
with `balance`, everyone : how many labels of each class all sites have together.
engine `mpc`, and the choice of neighbours in all engines : the first three sites compute (with two sites, the server is
    third); two of them together learn all codes (`mpc`) or all distances (`ot`, `he`).

Assumes
-------
Semi-honest parties; no two of the three computing parties collude; BFV at 128-bit security, results hidden by 40 bits
of flooding; what the parts assume. A site that stops before L5 is as if absent; during L5, L5 is begun again without
it; before L12 it counts as unlabelled; later it only misses its labels. At least two sites must stay.

Cost
----
`private_graph`, plus per pair (u, v) about 2 √(n_v l C / 8192) ciphertexts of 393 kB, where l is the number of labelled
points in all: those of u's labels up to the server, and those of v's scores down.

References
----------
[SYL24] Algorithm 1, for its result; the protocol is ours. L1 to L9 keep its numbers, L10 to L14 are numbered here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from cloister.arrays import F64, I32, I64, U8
from cloister.crypto import bfv_matmul as he
from cloister.crypto.agreement import Identity
from cloister.crypto.entropy import Entropy
from cloister.errors import CloisterError, ProtocolAbort
from cloister.models import graph
from cloister.net import wire
from cloister.net.channel import Channel
from cloister.net.wire import message
from cloister.protocols.hamming.shared_codes import offsets
from cloister.protocols.propagation import private_graph, propagation_terms
from cloister.protocols.propagation.point_roster import Roster
from cloister.protocols.propagation.propagation_terms import (
    Labels,
    Params,
    Served,
    all_groups,
    begin,
    check_graph,
    check_labelled,
    class_counts,
    in_group,
    open_study,
    same_classes,
    sum_counts,
    unpack_mask,
)
from cloister.protocols.sums import attempts
from cloister.protocols.sums.signed import check_signed
from cloister.study import Party

NAME = "private_propagation"
SCHEME = he.Scheme(plain_bits=graph.FRACTION + 2, weight_bits=graph.FRACTION + 13)


@dataclass(frozen=True, slots=True)
class _Layout:
    """Public: rows of every recipient, R for each, and the classes."""

    sizes: Mapping[Party, int]
    cuts: Mapping[Party, int]
    n_classes: int

    def plan(self, v: Party, labelled: int) -> he.Plan:
        return he.Plan(SCHEME, self.sizes[v], labelled, self.n_classes, self.cuts[v])


@message("L10")
class Labelled:  # u → S
    mask: U8  # (⌈n_u / 8⌉,)
    classes: int
    pk: bytes
    signature: bytes


@message("L11")
class Recipient:
    pk: bytes
    signature: bytes
    cut: int  # R


@message("L11")
class Recipients:  # S → u
    recipients: dict[Party, Recipient]


@message("L12")
class EncryptedLabels:  # u → S
    cts: dict[Party, EncryptedList]


@message("L12")
class EncryptedList:
    cts: tuple[bytes, ...]


@message("L13")
class Scores:  # S → v
    cts: tuple[bytes, ...]


def ideal(
    params: Params, xs: Mapping[Party, tuple[F64, Sequence[str | None]]], seed: bytes = bytes(32)
) -> dict[Party, Labels | None]:
    """What a trusted party would hand out, for a given seed of the hyperplanes."""
    return propagation_terms.ideal(params, xs, seed)


def roles(params: Params) -> dict[Party, object]:
    return {params.server: server} | dict.fromkeys(params.sites, site)


def _signed(run_id: bytes, u: Party, pk: bytes) -> bytes:
    return wire.canonical([NAME, run_id, u, pk])


def check_recipients(
    ch: Channel, sites: Sequence[Party], given: Mapping[Party, Recipient], mine: bytes, n_classes: int
) -> None:
    """L11: known sites, each with the key it signed; mine unchanged."""
    if not set(given) <= set(sites) or ch.me not in given or given[ch.me].pk != mine:
        raise ProtocolAbort(NAME, "L11", "roster", "the list of recipients is not what was agreed, or my key changed")
    for v, r in given.items():
        if not 1 <= r.cut <= SCHEME.degree // n_classes:
            raise ProtocolAbort(NAME, "L11", "malformed", "a product that cannot be cut as the server says")
        check_signed(ch, v, NAME, _signed(ch.run_id, v, r.pk), r.signature, protocol=NAME, line="L11")


def _graph(params: Params, roster: Roster, sites: tuple[Party, ...]) -> private_graph.Params:
    sizes = tuple(roster.size(u) for u in sites)
    check_graph(params, sizes)
    return private_graph.Params(sites, sizes, params.bits, params.server, params.n_neighbors, params.engine)


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
    key = he.Key(SCHEME)  # first, so that a missing extra is noticed before anything is sent
    roster, packed, y = await begin(ch, params, vectors, labels, entropy=entropy, identity=identity)

    async def step(c: Channel, sites: tuple[Party, ...]) -> None:
        await private_graph.site(c, _graph(params, roster, sites), packed, entropy=entropy, identity=identity)

    _, sites = await attempts.follow(ch.sub("graph"), S, step)  # L5
    n_classes = len(roster.classes)
    signature = identity.sign(NAME, _signed(ch.run_id, ch.me, key.public))
    await ch.send(S, Labelled(np.packbits(y >= 0), n_classes, key.public, signature))  # L10
    Y = graph.one_hot(y[y >= 0], n_classes)
    counts = await class_counts(ch, params, sites, Y, entropy=entropy, identity=identity)
    given = {Party(v): r for v, r in (await ch.recv(S, Recipients)).recipients.items()}  # L11
    check_recipients(ch, sites, given, key.public, n_classes)
    layout = _Layout({v: roster.size(v) for v in given}, {v: r.cut for v, r in given.items()}, n_classes)
    sealed = {
        v: EncryptedList(tuple(he.encrypt(layout.plan(v, len(Y)), r.pk, Y)) if len(Y) else ()) for v, r in given.items()
    }
    await ch.send(S, EncryptedLabels(sealed))  # L12
    cts = (await ch.recv(S, Scores)).cts  # L13
    try:
        words = key.decrypt(layout.plan(ch.me, 1), cts)  # L14
    except CloisterError as e:
        raise ProtocolAbort(NAME, "L13", "malformed", f"the scores cannot be decrypted: {e}") from None
    ch.reveal(None, to=ch.me, line="L14", what="scores of its own points", protocol=NAME)
    scores = he.signed(SCHEME, words)
    return Labels(roster.classes, *graph.decide(scores, counts), scores, sites)


async def _server(ch: Channel, params: Params, *, entropy: Entropy, identity: Identity) -> Served:
    roster = await open_study(ch, params)

    async def step(c: Channel, sites: tuple[Party, ...]) -> I64:
        return await private_graph.server(c, _graph(params, roster, sites), entropy=entropy, identity=identity)

    keys, sites = await attempts.lead(ch.sub("graph"), roster.sites, 2, step)  # L5
    sizes = tuple(roster.size(u) for u in sites)
    at = dict(zip(sites, offsets(sizes), strict=False))
    W = graph.adjacency(keys, params.bits)  # L6-9
    masks = await attempts.survivors(ch, sites, Labelled, 2, mask=(None,))  # L10
    own = {u: at[u] + unpack_mask(m.mask, roster.size(u)) for u, m in masks.items()}
    check_labelled(np.concatenate(list(own.values())))
    n_classes = same_classes({m.classes for m in masks.values()})
    await sum_counts(ch, params, sites, n_classes)
    expected = sum(map(len, own.values()))
    cuts = {v: he.Plan(SCHEME, roster.size(v), expected, n_classes).cuts[1] for v in masks}
    layout = _Layout({v: roster.size(v) for v in masks}, cuts, n_classes)
    recipients = {v: Recipient(m.pk, m.signature, cuts[v]) for v, m in masks.items()}
    await ch.scatter(masks, Recipients(recipients))  # L11
    labels = await attempts.survivors(ch, masks, EncryptedLabels, 1)  # L12
    for u, m in labels.items():
        if set(m.cts) != set(masks):
            raise ProtocolAbort(NAME, "L12", "malformed", f"'{u}' did not send its labels for everyone on the list")
    own = {u: mine for u, mine in own.items() if u in labels}
    labelled = np.sort(np.concatenate(list(own.values())))
    check_labelled(labelled)
    S = _columns(W, params.alpha, labelled, own)
    for v in labels:
        ch.step(f"scores for {v}", protocol=NAME, line="L13")
        rows = slice(at[v], at[v] + roster.size(v))
        terms = [he.Term(layout.plan(v, len(own[u])), labels[u].cts[v].cts, S[u][rows]) for u in own if len(own[u])]
        cts, _ = he.multiply(masks[v].pk, terms, entropy)
        await ch.send(v, Scores(tuple(cts)))  # L13
    return Served(sites, sizes, labelled, None, keys, tuple(labels))


def _columns(W: object, alpha: float, labelled: I64, own: Mapping[Party, I64]) -> dict[Party, I32]:
    """S at the columns of every site's labelled points, (n, l_u) each."""
    total = graph.influence_sum(W, alpha, labelled)
    out: dict[Party, I32] = {}
    for u, mine in own.items():
        blocks = [block for _, block in graph.influence(W, alpha, labelled, mine, total)]
        if blocks:
            out[u] = np.concatenate(blocks, axis=1)
    return out
