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
server : H, which points are labelled, how many points each site has and how many classes there are; of a site that
    drops out during L5, what was opened of its distances. From H it finds all points up to a rotation, and with some 30
    known points (one site that colludes) the vectors: cosine 0.99.
site : for each own point the scores Z of all classes; the columns of S of its labelled points, which say how near they
    are to everybody's points; the sizes and class names of the others. A site can solve S_L Y = Z for the labels of
    other sites' points, and with the server any site can: 76 to 100 % of them. Use `private_propagation`.
with `balance`, `choose` or `class_means`, everyone : how many labels of each class all sites have together.
with `class_means`, every site : the mean direction of each class's labelled points (`class_means`).
with `choose` : what `chosen_settings` says.
engine `mpc` : the first three sites compute (with two sites, the server is third); two of them together know all codes.

Assumes
-------
Semi-honest parties; the server does not collude with a site; what the parts assume. Lies that are not noticed: (a),
(b), (c), (f) of the server (another S) and (a), (b), (c), (f) of the site. A site that stops before L5 is as if absent;
during L5, L5 is begun again without it; before L14 it counts as unlabelled; within L14, L14 is begun again with fresh
masks; later it only misses its labels. At least two sites must stay.

Cost
----
`secure_hamming`, plus per site 4 n l_u bytes down for S_u (l_u labelled points), plus `row_sums` of n C words.

References
----------
[SYL24] Scott, Yeo, Lampert, TMLR 2024, Algorithm 1; L numbers are its lines (it has no L2 or L11 to send).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cloister.arrays import F64, I32, I64, U8
from cloister.models import graph
from cloister.mpc.crypto.agreement import Identity
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.net.channel import Channel
from cloister.mpc.net.wire import message
from cloister.mpc.sums import retry_without_dropouts
from cloister.papers import row_sums
from cloister.papers.hamming import secure_hamming
from cloister.study import Party
from cloister.workflows.propagate_labels import propagation_terms
from cloister.workflows.propagate_labels.point_roster import Roster
from cloister.workflows.propagate_labels.propagation_terms import Labels, Params, Served, all_groups, begin, in_group

NAME = "label_propagation"


@message("L12")
class Labelled:  # u → S
    mask: U8  # (⌈n_u / 8⌉,)
    classes: int  # C


@message("L12")
class Columns:  # S → u
    s: I32  # (n, block)


ideal = propagation_terms.ideal


def roles(params: Params) -> dict[Party, object]:
    return {params.server: server} | dict.fromkeys(params.sites, site)


def column_blocks(labelled: int) -> list[int]:
    """Widths of the blocks in which `graph.influence` yields the columns of one site."""
    return [min(graph.COLUMNS, labelled - start) for start in range(0, labelled, graph.COLUMNS)]


# ---- roles -----------------------------------------------------------------------------------------------------------


def _hamming(params: Params, roster: Roster, sites: tuple[Party, ...]) -> secure_hamming.Params:
    sizes = tuple(roster.size(u) for u in sites)
    propagation_terms.check_graph(params, sizes)
    return secure_hamming.Params(sites, sizes, params.bits, params.server, params.engine)


async def site(
    ch: Channel, params: Params, vectors: F64, labels: Sequence[str | None], *, entropy: Entropy, identity: Identity
) -> Labels:
    return await in_group(ch, params, lambda c, p: _site(c, p, vectors, labels, entropy=entropy, identity=identity))


async def server(ch: Channel, params: Params, *, entropy: Entropy, identity: Identity) -> tuple[Served, ...]:
    """S's part; returns one `Served` per group."""
    return await all_groups(ch, params, lambda c, p: _server(c, p, entropy=entropy, identity=identity))


async def _site(
    ch: Channel, params: Params, vectors: F64, labels: Sequence[str | None], *, entropy: Entropy, identity: Identity
) -> Labels:
    S = params.server
    roster, packed, y, secret = await begin(ch, params, vectors, labels, entropy=entropy, identity=identity)

    async def step(c: Channel, sites: tuple[Party, ...]) -> None:
        await secure_hamming.site(c, _hamming(params, roster, sites), packed, entropy=entropy, identity=identity)

    _, sites = await retry_without_dropouts.follow(ch.sub("hamming"), S, step)  # L5
    sizes = tuple(roster.size(u) for u in sites)
    n, n_classes = sum(sizes), len(roster.classes)
    await ch.send(S, Labelled(np.packbits(y >= 0), n_classes))  # L12
    Y = graph.one_hot(y[y >= 0], n_classes)
    settled = await propagation_terms.settle(
        ch, params, sites, (vectors, y, n_classes), secret, entropy=entropy, identity=identity
    )
    z = np.zeros((n, n_classes), np.int64)
    at = 0
    for width in column_blocks(len(Y)):
        block = (await ch.recv(S, Columns, s=(n, width))).s
        z += block @ Y[at : at + width]  # L13
        at += width
    sums = row_sums.Params(sites, sizes, S, n_classes)
    mine = await row_sums.site(ch.sub("rows"), sums, z.view(np.uint64), entropy=entropy, identity=identity)  # L14
    scores = mine.view(np.int64)
    return Labels(roster.classes, *settled.decide(scores), scores, sites, settled.choice)  # L15


async def _server(ch: Channel, params: Params, *, entropy: Entropy, identity: Identity) -> Served:
    roster = await propagation_terms.open_study(ch, params)

    async def step(c: Channel, sites: tuple[Party, ...]) -> I32:
        return await secure_hamming.server(c, _hamming(params, roster, sites), entropy=entropy, identity=identity)

    H, sites = await retry_without_dropouts.lead(ch.sub("hamming"), roster.sites, 2, step)  # L5
    sizes = tuple(roster.size(u) for u in sites)
    ch.step("graph", protocol=NAME, line="L7")
    keys = smallest_blocks(H, params.n_neighbors)
    marked, counts, n_classes = await propagation_terms.labelled_points(ch, params, roster, sites, Labelled)  # L12
    choice, own, W = await propagation_terms.settle_all(
        ch, params, keys, marked, counts, entropy=entropy, identity=identity
    )  # L6-9
    alpha = choice.setting.alpha
    labelled = np.sort(np.concatenate(list(own.values())))
    total = graph.influence_sum(W, alpha, labelled)
    for u, mine in own.items():  # L10, L12
        for _, block in graph.influence(W, alpha, labelled, mine, total):
            opened = ch.reveal(block, to=u, line="L12", what="how labels spread from its own points", protocol=NAME)
            await ch.send(u, Columns(opened))
    ch.step("row sums", protocol=NAME, line="L14")
    sums = row_sums.Params(sites, sizes, params.server, n_classes)
    finished = await row_sums.server(ch.sub("rows"), sums)  # L14
    return Served(sites, sizes, labelled, H, None, finished, choice)


def smallest_blocks(H: I32, k: int) -> I64:
    """L7 in blocks of rows."""
    n = len(H)
    step = max(1, (1 << 22) // n)
    return np.concatenate([graph.smallest(H[a : a + step], a, k) for a in range(0, n, step)])
