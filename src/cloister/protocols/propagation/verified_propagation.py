"""Verified label propagation: that of `private_propagation`, computed so that any one party may lie.

    L1-4  u ↔ u   as in `label_propagation`: common seed, sizes and class names, codes
    L5    u ↔ S   the k nearest neighbours of every point, and their distances, at S                  (`verified_graph`)
    L6-9  S       W from them, sparse and normalised
    L10   u → S   which of its points are labelled
    L11   S       the columns of S at these points
    L12   u ↔ S   Z[R_v] = S[R_v] Y at every v, where Y are the labels of all, shared among three     (`shared_scores`)
    L13   v       Z[R_v]; label = argmax, confidence = 1 - entropy / log C

The roles are those of `private_propagation`, over a graph and scores that are proved before they are opened.

Reveals
-------
server : the graph: k neighbours of every point and their distances; which points are labelled; how many points each
    site has and how many classes there are. Not H, and no label. If a site drops out during L5, or a lying server says
    so, also the graph of those who are left. With a site v: what v learns, and so the labels that solve
    S[R_v] Y = Z[R_v]. A graph is itself a picture of the points, see `private_propagation`.
site : for each own point the scores Z of all classes; the sizes and class names of the others, and how many points each
    has labelled, to the next 16. If it lies: no more.
with `balance`, `choose` or `class_means`, everyone : how many labels of each class all sites have together.
with `class_means`, every site : the mean direction of each class's labelled points (`class_means`).
with `choose` : what `chosen_settings` says.
two computing parties : the first three sites compute (with two sites, the server is third); two of them together learn
    all codes (`mpc`) or all distances (`ot`, `he`), and all labels and S. With two sites, so do the server and one.

Assumes
-------
At most one party lies (`verified`); no two of the three computing parties collude. A lying server may use another S
than the one that follows from the graph, since it alone holds the graph: scores are then those of its S, and labels
stay hidden. A site's points and labels are its word. Drop-outs as in `private_propagation`.

Cost
----
`verified_graph`, plus `shared_scores` with proofs.

References
----------
[SYL24] Algorithm 1, for its result; the protocol is ours. L1 to L9 keep its numbers, L10 to L13 are numbered here.
"""

from __future__ import annotations

from collections.abc import Sequence

from cloister.arrays import F64
from cloister.crypto.agreement import Identity
from cloister.crypto.entropy import Entropy
from cloister.net.channel import Channel
from cloister.protocols.propagation import propagation_terms, verified_graph
from cloister.protocols.propagation.private_propagation import server_by, site_by
from cloister.protocols.propagation.propagation_terms import Labels, Params, Served
from cloister.study import Party

__all__ = ["Params", "ideal", "roles", "server", "site"]

NAME = "verified_propagation"


ideal = propagation_terms.ideal


def roles(params: Params) -> dict[Party, object]:
    return {params.server: server} | dict.fromkeys(params.sites, site)


async def site(
    ch: Channel, params: Params, vectors: F64, labels: Sequence[str | None], *, entropy: Entropy, identity: Identity
) -> Labels:
    return await site_by(verified_graph, ch, params, vectors, labels, entropy=entropy, identity=identity)


async def server(ch: Channel, params: Params, *, entropy: Entropy, identity: Identity) -> tuple[Served, ...]:
    """S's part; returns one `Served` per group."""
    return await server_by(verified_graph, ch, params, entropy=entropy, identity=identity)
