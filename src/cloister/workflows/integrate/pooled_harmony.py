"""Pooled Harmony: cells of all sites are moved until clusters mix, from checked sums and no cell.

    L1   u, S    common space, common seed      one embedding, of d columns; a secret of the sites, for checked sums
         u       groups                     disjoint sets of similar cells of one batch, each of min_cells cells or more
                                            (and min_donors donors, none with more than half of the cells, where donors
                                            are named); x_g its clipped mean, m_g its number of cells. Formed once, here
    L2   u → S   a number of cells, rounded up      no site may claim more than max_share of N (announced_counts)
         u, S    Σ m_g, Σ m_g ‖x_g‖²            N cells; K clusters; how large any later sum can be
    L3   u, S    Σ m_g zzᵀ                      z = x / ‖x‖; K first centroids Y, drawn from it with the study's seed
    L4   u, S    Σ m_g R_gk z_g                 ten times: Y_k = unit of it; R_gk ∝ exp(-2 (1 - z_g·y_k) / σ)
    `rounds` times:
    L5   u, S      Σ m_g R_gk z_g               `updates` times: Y; and `sweeps` times:
    L6   u, S      T_k = Σ m_g R_gk             masses; then each site balances its own R (`models/harmony`) at these
    L7   u, S      T_k
    L8   u, S      Σ_b λ_b s_b / (n_b + λ_b), Σ_b λ_b n_b / (n_b + λ_b)     their ratio w_k is the anchor of cluster k
         u         x_g - Σ_k R_gk (s_b - n_b w_k) / (n_b + λ_b)             the groups of u are moved; z with them. Its
                                                single cells are moved by the same formulas from Y, T and w, locally
    L9   u, S    T_k, R without θ               before the first round and after the last: how far sites are mixed
    L10  u, S    n²/N, and the same of clusters     the pooled mixing
    L11  u, S    cells of groups in 24 x 24 places      of the two axes in which the centroids vary most: a picture
    L12  u, S    all sites received the same broadcasts     (same_view)

What stands beside `u, S` is a checked sum over all sites. Every party computes everything else itself from the opened
sums, which the coordinator cannot change. A site's part of every sum is a function of its (x_g, m_g), of their batches
and of earlier sums. Cells of a batch that is too small for a group add nothing and are moved all the same.

Reveals
-------
coordinator : how many cells each site has in groups, within 1/64. Beside this:
coordinator, site : over all sites together: number of cells, and second moments of their directions; at every step the
    masses and centroids of K clusters, and their anchors, means over all batches; the sum of squared numbers of cells,
    and the mixing; how many lie in each place of a grid. With two sites: the other's sums. All of them together are
    computed from means of at least min_cells similar cells. They are more numbers than a small site has groups, so they
    can determine these means and the sizes of the groups, and nothing finer. A group of similar cells shows what kind
    of cells these are: a rare type with min_cells cells of a site can be a group of its own.
malicious coordinator : the same. It cannot change a sum or leave out a site without an abort.
one malicious site : the same, at centroids that it can bend, because its part of every sum is its unverified input. The
    groups were formed before its first message. Over all sums it learns at most the means and sizes of the groups of an
    honest site. Who knows all other cells of a group, and its mean, learns its last one, up to the clipping.
coordinator with k sites : these sums over the other sites, so with all but one those of the last site: at most the
    means and sizes of its groups.

Assumes
-------
What the checked sum assumes: every site stays to the end. Each site holds at least `min_cells` cells, in one embedding.
A site that takes part again with another embedding, other batches or other thresholds forms other groups: means of both
can be combined.

Cost
----
Per site 16 + rounds · (updates · (1 + sweeps) + 2) checked sums; of K d words at L4 and L5, K at L6, K (d + 1) at L8.

References
----------
[KMF+19] Korsunsky et al., Nature Methods 2019: its equations for R, Y and W, the last solved batch by batch. The
bounded penalty is that of Harmony 2. Lines numbered here; the security argument is docs/security/pooled_harmony.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from cloister.arrays import F64, U64
from cloister.disclosure import Contribution
from cloister.errors import ProtocolAbort
from cloister.mpc.crypto.agreement import Identity
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.crypto.fixed_point import FixedPoint
from cloister.mpc.net.channel import Channel
from cloister.mpc.sums import announced_counts, checked_sum, common_seed, consistency_check
from cloister.study import Party
from cloister.workflows.common import common_space
from cloister.workflows.integrate.harmony_steps import (
    GRID,
    STARTS,
    WIDEST,
    Ask,
    Cells,
    Integrated,
    Params,
    check_site,
    integrate,
    part_of,
    together,
)
from cloister.workflows.shared_pca import shared_pca

NAME = "pooled_harmony"
BITS = 24  # of a fraction, at most: the same on every processor, and far below what moves a cell


def ideal(params: Params, xs: Mapping[Party, Cells]) -> dict[Party, Integrated]:
    """The same steps over all cells in one place, with nothing encoded."""
    return together(params, xs)


def roles(params: Params) -> dict[Party, object]:
    return {params.coordinator: coordinator} | dict.fromkeys(params.sites, site)


def lengths(params: Params, cells: int, columns: int) -> list[int]:
    """Words of every sum, in their order."""
    s, d = params.settings, columns
    K = s.n_clusters(cells, len(params.sites))
    one = s.updates * [K * d, *s.sweeps * [K]] + [K, K * (d + 1)]
    half = d * (d + 1) // 2
    return [4, half, *STARTS * [K * d], K, *s.rounds * one, K, 3, GRID * GRID]


def cost(params: Params, cells: int, columns: int, digest: int = 0) -> dict[Party, tuple[int, int]]:
    """Messages and bytes, with so many cells in all in so many columns, and bytes of their space's digest."""
    who = (params.sites, params.coordinator)
    parts = [checked_sum.cost(checked_sum.Params(*who, length)) for length in lengths(params, cells, columns)]
    parts.append(common_seed.cost(common_seed.Params(*who)))
    parts.append(consistency_check.cost(consistency_check.Params(*who)))
    parts.append({params.coordinator: (len(params.sites), 0)} | dict.fromkeys(params.sites, (1, 0)))  # claims
    parts.append(common_space.cost(common_space.Params(*who, params.embedding), digest + len(f"/{columns}")))
    return {u: (sum(p[u][0] for p in parts), sum(p[u][1] for p in parts)) for u in (params.coordinator, *params.sites)}


# ---- local steps -----------------------------------------------------------------------------------------------------


def code_of(params: Params, reach: float) -> FixedPoint:
    """As many fraction bits as sums up to `reach` leave free, at most `BITS`."""
    n, reach = len(params.sites), max(reach, 1.0) * (1 + 1e-6)
    return FixedPoint(max(0, min(BITS, 61 - math.ceil(math.log2(n * reach)))), reach, n)


def encode(params: Params, ask: Ask, entropy: Entropy) -> Contribution:
    """Words of what this party adds."""
    if not ask.reach:
        return ask.part.map(lambda x: shared_pca.split_sum(x, len(params.sites), entropy))
    return ask.part.map(code_of(params, ask.reach).encode)


def decode(params: Params, ask: Ask, words: U64) -> F64:
    """Back to reals; nothing beyond what all cells together can give."""
    if not ask.reach:
        return shared_pca.join_sum(words)
    code = code_of(params, ask.reach)
    total = code.decode(words)
    if not np.all(np.abs(total) <= code.bound + code.resolution * code.parties):
        raise ProtocolAbort(NAME, ask.line, "absurd", "a sum is larger than all cells together can give")
    return total


def columns_in(agreed: str) -> int:
    """L1: the columns that all embeddings have, from what the sites agreed on."""
    _, _, text = agreed.rpartition("/")
    if not text.isdecimal() or not 2 <= int(text[:9]) <= WIDEST:
        raise ProtocolAbort(NAME, "L1", "columns", f"no embedding of 2 to {WIDEST} columns")
    return int(text)


# ---- roles -----------------------------------------------------------------------------------------------------------


async def drive(
    ch: Channel,
    params: Params,
    mine: Cells | None,
    columns: int,
    seed: common_seed.Seed | None = None,
    entropy: Entropy | None = None,
) -> Integrated:
    """L2 to L11, at any party; S has no cells and no secret."""
    part = part_of(params, mine, columns)
    steps, own = integrate(part, len(params.sites), NAME), int(part.shown.sizes.sum())
    claims = announced_counts.Params(params.sites, params.coordinator, params.max_share)
    if mine is None:
        announced = await announced_counts.gather(ch, claims)  # L2
    else:
        await announced_counts.announce(ch, claims, own)  # L2
    count, ask = 0, next(steps)
    while True:
        count += 1
        length = len(ask.mine) if ask.reach else 2 * len(ask.mine)
        p = checked_sum.Params(params.sites, params.coordinator, length)
        step = ch.sub(f"sum/{count}", (p, ask.line))
        if seed is None or entropy is None:
            z = await checked_sum.coordinator(step, p)
        else:
            words = step.contribute(encode(params, ask, entropy), line=ask.line, what=ask.what, protocol=NAME)
            z = await checked_sum.site(step, p, words, seed)
        ch.step(ask.what, protocol=NAME, line=ask.line)
        total = decode(params, ask, ch.reveal(z, to=ch.me, line=ask.line, what=ask.what, protocol=NAME))
        if count == 1 and mine is None:
            await announced_counts.judge(ch, claims, round(float(total[0])), announced)  # L2
        elif count == 1 and mine is not None:
            await announced_counts.accept(ch, claims, round(float(total[0])), own)  # L2
        try:
            ask = steps.send(total)
        except StopIteration as end:
            done: Integrated = end.value
            return done


async def site(ch: Channel, params: Params, mine: Cells, *, entropy: Entropy, identity: Identity) -> Integrated:
    """Be u. Returns the moved cells of u, and what it takes to place later ones."""
    check_site(params, mine)
    d = mine.x.shape[1]
    space = common_space.Params(params.sites, params.coordinator, params.embedding)
    await common_space.site(ch.sub("space"), space, f"{mine.space}/{d}")  # L1
    pair = common_seed.Params(params.sites, params.coordinator, everyone=True)
    seed = await common_seed.site(ch.sub("seed", pair), pair, entropy=entropy, identity=identity)  # L1
    done = await drive(ch, params, mine, d, seed, entropy)  # L2 to L11
    await consistency_check.site(
        ch, consistency_check.Params(params.sites, params.coordinator), identity=identity
    )  # L12
    return done


async def coordinator(ch: Channel, params: Params) -> Integrated:
    """Be S: add up, and follow the clusters."""
    space = common_space.Params(params.sites, params.coordinator, params.embedding)
    columns = columns_in(await common_space.coordinator(ch.sub("space"), space))  # L1
    pair = common_seed.Params(params.sites, params.coordinator, everyone=True)
    await common_seed.coordinator(ch.sub("seed", pair), pair)  # L1
    done = await drive(ch, params, None, columns)  # L2 to L11
    await consistency_check.coordinator(ch, consistency_check.Params(params.sites, params.coordinator))  # L12
    return done
