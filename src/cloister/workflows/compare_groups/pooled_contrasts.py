"""Pooled contrasts: which genes, and which shares of cell types, differ between groups of donors, from checked sums.

    L1   u, S    common genes, common seed      genes that every site measured; a secret of the sites, for checked sums
    L2   u → S   names of cell types and of levels of covariates that min_donors donors of u have
    L3   S ⇒ u   the same of all sites
    L4   u       counts c of each sample (a donor's cells of a group) and cell type; library ℓ; shares of cell types.
                 Samples that no sum may hold are dropped here, before anything is added up (below)
    then for all tables at once, each line a checked sum over the samples of all sites:
    L5   u, S    donors and sites per group, blocks, Σℓ, donors per level, Σz and Σz² of covariates; sites at which at
                 least min_donors donors have a cell type, and at which some do, but fewer
    L6   u, S    donors with c/ℓ ≥ min_count / mean ℓ, per gene: genes that enough donors show are compared
    L7   u, S    per compared gene: sites where some donor has c = 0, and where fewer than min_donors have c ≥ 10
    L8   u, S    Σ ln c of genes that no donor lacks; then Σ ln f, f a sample's median ratio to their geometric mean
    L9   u, S    XᵀX, and at how many sites each column of X varies; nothing that varies at one site only goes on
         u, S    Xᵀy, yᵀy, Σy, Σ log2(ℓf + 1)          y = log2((c + ½) / (ℓf + 1) · 10^6), or transformed shares
         u, S    coefficients, deviations, and from these the trend (lowess), at every party alike
         u       w = trend(fitted log count)^-4        of its own samples, or one for all of them (below)
    L10  u, S    XᵀWX, XᵀWr, rᵀWr                      r = y - fitted
         u, S    coefficients, prior variance, moderated t, p and false discovery rate
    L11  u, S    all sites received the same broadcasts     (same_view)

The result is limma-voom's on the pooled samples that were not dropped, with the weights named below. The trend needs no
donor: a point of it is a gene, with its pooled mean and deviation. X has a column per group but the first, and the
covariates. What belongs to a block (the site, or with `block="donor"` the donor) is taken out within the block, at its
site, before anything is added up: X and y less their weighted means, which is what a column of X for each block would
do.

Thresholds, enforced by each site on its own samples of a table, whatever other parties send:

- every group and every level of a covariate has min_donors donors, or its samples are dropped;
- no donor has a leverage above 1 / min_donors in the columns [1, groups, levels, numbers] by which samples are added
  up: no combination of all linear sums of a gene is closer to one donor. The donor with the largest is dropped;
- there are more samples than independent sums per gene, q + 5 for q columns of X (or q + 3 + groups for a cell type);
- a cell type that 1 to min_donors - 1 donors of a site have is compared by nobody (L5), nor is a gene that some donor
  of a site has, but fewer than min_donors with ten counts (L7). If a malicious site takes this objection back, the site
  adds zero for it. A site counts 0 donors at L6 where fewer than min_donors reach the cutoff, and min_donors fewer than
  all where fewer do not;
- in a table with at most 32 samples of a site, its sums per gene in L8 and L9 are rounded to 2^-10, because exact sums
  of logarithms of integers give these away. All its samples have one weight per gene, that of their mean, and L10 is a
  function of what the site added before. With more, sums are exact, and weights of samples are used in genes where no
  donor has a leverage above 1 / min_donors in the columns, the weights and their products, all together.

Reveals
-------
coordinator : which genes each site measured; names of cell types (unless the study lists them) and of levels of
    covariates that at least min_donors donors of a site have, per site. Beside these:
coordinator, site : over the samples of all sites together, per cell type: donors and sites per group, donors per level,
    sites at which each column varies, blocks, mean and spread of covariates, mean library; per gene in how many donors
    it is counted often, and if it is compared, at how many sites some donor lacks it; per compared gene a mean log
    count, and the sums of L9 and L10; mean shares of cell types per group; the result. With two sites, or if no other
    site has enough donors of a cell type: the other's sums.
    These sums hide single donors only as far as the thresholds say. Counts are integers: from exact sums the unordered
    counts of 3 to 5 donors would follow in nine genes of ten (docs/measured/compare-groups.md). Rounding leaves many
    candidates for counts of ten and more. From genes with smaller ones, libraries and counts of all seven donors of a
    site follow by a joint fit (tests/attacks/test_small_counts.py); this is why sites add nothing for these. With more
    than 32 samples, sums are exact, and it is the number of candidates that a search would have to try which hides
    them. A gene that one donor of a group has, while the site has it in min_donors, shows that donor's count in the
    group's sum.
malicious coordinator : the same. It cannot change a sum or leave out a site without an abort.
one malicious site : the same; its part of every sum is its unverified input. It can move the cutoff of L6, the size
    factors of L8 and the trend, and so choose one transform of an honest site's counts per run. Every sum still rests
    on at least min_donors of that site's donors.
coordinator with k sites : these sums over the samples of the other sites, so with all but one those of the last site.

Assumes
-------
What the checked sum assumes: every site stays to the end. A donor is at one site. Groups, cell types and levels mean
the same at all sites.

Cost
----
Per site eight checked sums; the largest, L10, of q(q + 5)/2 + 1 numbers of two words per compared gene and cell type.
Leverages of weights take O(n (q + groups)²) operations per gene at a site with n samples.

References
----------
[LCSS14] Law et al., Genome Biology 2014 (voom). [Smy04] Smyth 2004 (moderated t). [AH10] Anders and Huber, Genome
Biology 2010 (size factors). [Cle79] Cleveland, JASA 1979 (lowess). [PSL+22] Phipson et al., Bioinformatics 2022
(shares, propeller). [FW33] Frisch and Waugh, Econometrica 1933 (effects taken out). Lines numbered here; the security
argument is docs/security/pooled_contrasts.md.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from cloister.arrays import F64, U64
from cloister.cells import genes
from cloister.cells.names import check_vocabularies
from cloister.disclosure import Contribution, join
from cloister.errors import ProtocolAbort
from cloister.models import voom
from cloister.mpc.crypto.agreement import Identity
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.net.channel import Channel
from cloister.mpc.net.wire import message
from cloister.mpc.sums import checked_sum, common_seed, consistency_check
from cloister.study import Party
from cloister.workflows.common import common_genes
from cloister.workflows.compare_groups.contrast_steps import (
    STEPS,
    Step,
    detected,
    result_of,
    sample_weights,
    take_census,
    take_design,
    take_detected,
)
from cloister.workflows.compare_groups.contrast_terms import (
    NAME,
    Donors,
    Params,
    Part,
    Result,
    Table,
    check_site,
    part_of,
)
from cloister.workflows.shared_pca.shared_pca import join_sum, split_sum

COMPOSITION = "composition"
CENSUS = next(step for step in STEPS if step.take is take_census)
DESIGN = next(step for step in STEPS if step.take is take_design)


@dataclass(frozen=True, slots=True)
class Compared:
    """The same at every party."""

    results: tuple[Result, ...]
    left_out: dict[str, str]  # cell type, or "composition" → why it has no result
    openings: int
    excluded: tuple[str, ...] = ()  # what a site left out, by table: known at this site alone


@message("L2")
class Brings:  # u → S
    labels: tuple[str, ...]
    levels: tuple[tuple[str, ...], ...]  # per covariate; none where it is a number


@message("L3")
class Agreed:  # S ⇒ u
    labels: tuple[str, ...]
    levels: tuple[tuple[str, ...], ...]


def roles(params: Params) -> dict[Party, object]:
    return {params.coordinator: coordinator} | dict.fromkeys(params.sites, site)


def cost(params: Params, lengths: Sequence[int], up: int = 0, down: int = 0) -> dict[Party, tuple[int, int]]:
    """Messages and bytes, for openings of these lengths, `up` bytes of a site's names and `down` of those in common."""
    n, hub = len(params.sites), params.coordinator
    parts = [checked_sum.cost(checked_sum.Params(params.sites, hub, length)) for length in lengths]
    parts.append(common_seed.cost(common_seed.Params(params.sites, hub)))
    if params.expression:
        parts.append(common_genes.cost(common_genes.Params(params.sites, hub), up, down))
    parts.append({hub: (n, 0)} | dict.fromkeys(params.sites, (1, 0)))  # L2, L3: a few names
    parts.append(consistency_check.cost(consistency_check.Params(params.sites, hub)))
    return {u: (sum(p[u][0] for p in parts), sum(p[u][1] for p in parts)) for u in (hub, *params.sites)}


# ---- in one place ----------------------------------------------------------------------------------------------------


def ideal(params: Params, xs: Mapping[Party, Donors]) -> dict[Party, Compared]:
    """limma-voom of the pooled samples: a column of the design for each block, and a fit for each gene."""
    common = tuple(genes.genes_in_common({u: d.names for u, d in xs.items()})) if params.expression else ()
    brought = {u: Brings(labels_of(params, d), d.levels()) for u, d in xs.items()}
    tables = tables_of(params, common, agree(params, brought))
    for t in tables:
        parts = [part_of(t, mine) for mine in xs.values()]
        take(CENSUS, [t], added(CENSUS, t, parts))
        if not t.left_out:
            take(DESIGN, [t], added(DESIGN, t, parts))
        if not t.left_out:
            fit_pooled(t, parts)
    return dict.fromkeys((params.coordinator, *xs), compared(tables, 0))


def fit_pooled(t: Table, parts: Sequence[Part]) -> None:
    """The fit of one table from all its samples."""
    counts, library = np.concatenate([p.counts for p in parts]), np.concatenate([p.library for p in parts])
    if not t.composition:
        take_detected(t, [np.sum([detected(t, p)[0].values for p in parts], axis=0)])
        if t.left_out:
            return
        t.keep = t.keep[~np.any([p.few[t.keep] for p in parts], axis=0)]
        if t.params.normalise == "rle":
            t.everywhere = np.flatnonzero(np.all(counts[:, t.keep] > 0, axis=0))
            t.mean_log = np.log(counts[:, t.keep[t.everywhere]]).mean(axis=0)
            if len(t.everywhere):
                t.log_factor = float(np.mean([np.log(f) for p in parts for f in t.factors(p)]))
    y = np.concatenate([t.values(p)[0] for p in parts])
    library = np.concatenate([t.values(p)[1] for p in parts])
    X = np.concatenate([t.design(p) for p in parts])
    q = X.shape[1]
    blocks = [(i, int(b)) for i, p in enumerate(parts) for b in p.blocks(t.params.block)]
    own = sorted({b for b in blocks if b[1] >= 0})
    X = np.hstack([X, np.array([[float(b == k) for k in own] for b in blocks]).reshape(len(y), len(own))])
    rank = int(np.linalg.matrix_rank(X))
    if rank < X.shape[1] or len(y) <= rank:
        t.left_out = "the design has too low a rank, or there are too few samples"
        return
    t.average, df = y.mean(axis=0), len(y) - rank
    beta, variance = np.linalg.lstsq(X, y)[0], np.zeros(len(t.keep))
    variance = np.square(y - X @ beta).sum(axis=0) / df
    if t.composition:
        group = np.concatenate([p.group for p in parts])
        share = (counts / library[:, None])[:, t.keep]
        t.shares = np.stack([share[group == g].mean(axis=0) for g in range(len(t.params.groups))])
        unscaled = np.repeat(np.linalg.inv(X.T @ X)[:q, :q, None], len(t.keep), axis=2)
        t.result = result_of(t, voom.Fit(beta[:q], unscaled, variance, df))
        return
    t.trend = voom.trend_of(t.average, np.sqrt(variance), float(np.log2(library + 1).mean()))
    ends = np.cumsum([0, *(len(p.group) for p in parts)])
    cuts = [slice(a, b) for a, b in itertools.pairwise(ends)]
    pairs = [sample_weights(t, p, X[cut] @ beta, library[cut])[0] for p, cut in zip(parts, cuts, strict=True)]
    weights = np.concatenate(pairs)
    unscaled = np.empty((q, q, len(t.keep)))
    for g in range(len(t.keep)):
        root = np.sqrt(weights[:, g])
        beta[:, g] = np.linalg.lstsq(X * root[:, None], y[:, g] * root)[0]
        variance[g] = np.square(root * (y[:, g] - X @ beta[:, g])).sum() / df
        unscaled[:, :, g] = np.linalg.inv((X * weights[:, g, None]).T @ X)[:q, :q]
    t.result = result_of(t, voom.Fit(beta[:q], unscaled, variance, df))


# ---- local steps -----------------------------------------------------------------------------------------------------


def labels_of(params: Params, mine: Donors) -> tuple[str, ...]:
    return () if params.labels is not None else mine.labels()


def agree(params: Params, brought: Mapping[Party, Brings]) -> Agreed:
    """L3: all names, in order."""
    check_vocabularies({u: b.labels for u, b in brought.items()}, NAME, "L2")
    names = params.labels if params.labels is not None else {k for b in brought.values() for k in b.labels}
    wrong = [u for u, b in brought.items() if len(b.levels) != len(params.covariates)]
    if wrong:
        raise ProtocolAbort(NAME, "L2", "covariates", f"{wrong[0]} brings other covariates than the study's")
    levels = []
    for i, covariate in enumerate(params.covariates):
        kinds = {bool(b.levels[i]) for b in brought.values()}
        if len(kinds) > 1:
            text = f"covariate '{covariate}' is a number at one site and a name at another; write it alike"
            raise ProtocolAbort(NAME, "L2", "covariates", text)
        levels.append(tuple(sorted({k for b in brought.values() for k in b.levels[i]})))
    return Agreed(tuple(sorted(names)), tuple(levels))


def check_agreed(params: Params, agreed: Agreed, mine: Donors) -> None:
    """L3: in order, and all of mine are there."""
    own, labels = mine.levels(), labels_of(params, mine) if params.labels is None else params.labels
    missing = not set(labels) <= set(agreed.labels) or len(agreed.levels) != len(own)
    missing = missing or any(
        not set(o) <= set(a) or bool(o) != bool(a) for o, a in zip(own, agreed.levels, strict=True)
    )
    if missing or any(list(names) != sorted(set(names)) for names in (agreed.labels, *agreed.levels)):
        raise ProtocolAbort(NAME, "L3", "names", "the vocabulary lacks a name of this site, or is not in order")


def tables_of(params: Params, common: tuple[str, ...], agreed: Agreed) -> list[Table]:
    """One per cell type, or one over all cells; and one of shares."""
    tables = []
    if params.expression:
        tables = [Table(params, label, common, agreed.levels) for label in agreed.labels or ("",)]
    if params.composition:
        tables.append(Table(params, COMPOSITION, agreed.labels, agreed.levels, composition=True))
    return tables


def compared(tables: Sequence[Table], openings: int) -> Compared:
    """The results; if there is none at all, why."""
    left_out = {t.label: t.left_out for t in tables if t.left_out}
    results = tuple(t.result for t in tables if t.result is not None)
    if not results:
        why = "; ".join(f"{label}: {text}" if label else text for label, text in left_out.items())
        raise ProtocolAbort(NAME, "L10", "nothing-to-compare", why or "no cell types to compare")
    return Compared(results, left_out, openings)


def pack(step: Step, tables: Sequence[Table], parts: Sequence[Part]) -> Contribution:
    """What a site adds in one opening, all tables in a row."""
    return join([c for t, part in zip(tables, parts, strict=True) if shapes_of(step, t) for c in step.local(t, part)])


def added(step: Step, t: Table, parts: Sequence[Part]) -> F64:
    """What all parts together add in one opening of one table."""
    return np.asarray(np.sum([pack(step, [t], [part]).values for part in parts], axis=0))


def excluded_of(tables: Sequence[Table], parts: Sequence[Part]) -> tuple[str, ...]:
    """What this site left out of each table; for its own user."""
    pairs = zip(tables, parts, strict=True)
    return tuple(f"{t.label or 'all cells'}: {text}" for t, part in pairs for text in part.excluded)


def shapes_of(step: Step, t: Table) -> list[tuple[int, ...]]:
    return [] if t.left_out else step.shapes(t)


def take(step: Step, tables: Sequence[Table], total: F64) -> None:
    """What every party makes of the sum."""
    at = 0
    for t in tables:
        sums = []
        for shape in (shapes := shapes_of(step, t)):
            sums.append(total[at : at + math.prod(shape)].reshape(shape))
            at += math.prod(shape)
        if shapes:
            step.take(t, sums)


# ---- both halves -----------------------------------------------------------------------------------------------------

Add = Callable[[Channel, checked_sum.Params, Step], Awaitable[U64]]


async def compare(ch: Channel, params: Params, tables: list[Table], open_sum: Add) -> Compared:
    """L5 to L10: the same at every party, except that S has no samples."""
    count = 0
    for step in STEPS:
        length = sum(math.prod(shape) for t in tables for shape in shapes_of(step, t))
        if not length:
            continue
        count += 1
        p = checked_sum.Params(params.sites, params.coordinator, 2 * length)
        ch.step(f"{step.what}: opening {count}", protocol=NAME, line=step.line)
        words = await open_sum(ch.sub(f"sum/{count}", (p, step.line)), p, step)
        ch.reveal(words, to=ch.me, line=step.line, what=f"{step.what}: opening {count}", protocol=NAME)
        take(step, tables, join_sum(words))
    return compared(tables, count)


# ---- roles -----------------------------------------------------------------------------------------------------------


async def site(ch: Channel, params: Params, mine: Donors, *, entropy: Entropy, identity: Identity) -> Compared:
    """Be u. Returns the comparison."""
    check_site(params, mine)
    S, common = params.coordinator, tuple[str, ...]()
    if params.expression:
        agreement = common_genes.Params(params.sites, S)
        common = (await common_genes.site(ch.sub("genes"), agreement, "counts", list(mine.names))).names  # L1
    pair = common_seed.Params(params.sites, S, everyone=True)
    seed = await common_seed.site(ch.sub("seed", pair), pair, entropy=entropy, identity=identity)  # L1
    await ch.send(S, Brings(labels_of(params, mine), mine.levels()))  # L2
    agreed = await ch.recv_broadcast(S, Agreed)  # L3
    check_agreed(params, agreed, mine)
    tables = tables_of(params, common, agreed)
    parts = [part_of(t, mine) for t in tables]  # L4

    async def open_sum(sub: Channel, p: checked_sum.Params, step: Step) -> U64:
        part = pack(step, tables, parts).map(lambda x: split_sum(x, len(params.sites), entropy))
        words = sub.contribute(part, line=step.line, what=step.what, protocol=NAME)
        return await checked_sum.site(sub, p, words, seed)

    result = await compare(ch, params, tables, open_sum)  # L5 to L10
    await consistency_check.site(ch, consistency_check.Params(params.sites, S), identity=identity)  # L11
    return replace(result, excluded=excluded_of(tables, parts))


async def coordinator(ch: Channel, params: Params) -> Compared:
    """Be S: add up, and follow."""
    common = tuple[str, ...]()
    if params.expression:
        agreement = common_genes.Params(params.sites, params.coordinator)
        common = (await common_genes.coordinator(ch.sub("genes"), agreement)).names  # L1
    pair = common_seed.Params(params.sites, params.coordinator, everyone=True)
    await common_seed.coordinator(ch.sub("seed", pair), pair)  # L1
    agreed = agree(params, await ch.gather(params.sites, Brings))  # L2
    await ch.broadcast(params.sites, agreed)  # L3

    async def open_sum(sub: Channel, p: checked_sum.Params, _: Step) -> U64:
        return await checked_sum.coordinator(sub, p)

    result = await compare(ch, params, tables_of(params, common, agreed), open_sum)  # L5 to L10
    await consistency_check.coordinator(ch, consistency_check.Params(params.sites, params.coordinator))  # L11
    return result
