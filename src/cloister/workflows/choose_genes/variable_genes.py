"""Variable genes: the genes that vary most within the batches of all sites, from one sum of ranks.

    L1   u, S    common genes, common seed      genes that every site measured; a secret of the sites, for checked sums
    L2   u       per batch of at least `min_batch` cells: counts, of which the largest of a gene are capped
                 r_bg                           rank of gene g by normalised variance in batch b, where it is among the
                                                `n_top` first
    L3   u, S    checked sum of the number of batches, h_g (batches with a rank) and Σ r_bg
         u, S    the `n_top` genes of most batches, and among these of smallest mean rank
    L4   u, S    all sites received the same broadcasts     (same_view)

The steps are those of `highly_variable_genes` of flavour seurat_v3_paper in scanpy, with a batch per site or per batch
of a site, but for the caps of L2 and for the mean of ranks instead of their median, which is not a sum.

A site's part is limited as follows. t and d are `min_cells` and `min_donors`, or more where the site's own settings say
so. In a batch, values of a gene above the d-th largest of the donors' maxima count as that one. Of the squares of what
remains, no cell has more than 1/t, and the same of the squared distances from the median where that is not zero; what
is farther counts as the farthest that is allowed. A gene that fewer than t cells
or d donors of a batch express has no rank there. Nothing depends on a value that another party sends, but for the
common genes among which ranks are counted.

Reveals
-------
coordinator : which genes each site measured. Beside this:
coordinator, site : over all sites together: the number of batches; for each gene by how many batches it is chosen, and
    the sum of its ranks. With two sites: the other's, and so the order of its genes by variance if it has one batch.
malicious coordinator : the same. It cannot change a sum or leave out a site without an abort. It can leave out genes
    from those in common.
one malicious site : the same, less its own part. It can make the choice wrong.
coordinator with k sites : these sums over the other sites, so with all but one those of the last site.

Assumes
-------
What the checked sum assumes: every site stays to the end. Inputs are not verified: a site may submit arbitrary sums. A
rank is not a sum over cells: that it does not rest on the extreme value of one cell is by the caps of L2 alone.

Cost
----
Per site one checked sum, of 2 + 4 g words for g common genes.

References
----------
[SBH+19] in `models.variable_genes`. Lines numbered here; the security argument is docs/security/variable_genes.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import scipy.sparse

from cloister.arrays import F64, I64, Bits
from cloister.cells import genes
from cloister.disclosure import Contribution, Rows, Thresholds, join
from cloister.errors import DataError, ParameterError, ProtocolAbort
from cloister.models import variable_genes as model
from cloister.mpc.crypto.agreement import Identity
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.net.channel import Channel
from cloister.study import Party
from cloister.workflows.common import common_genes, gene_moments, opened_sums
from cloister.workflows.common.opened_sums import OpenedSums, add_costs

NAME = "variable_genes"
KIND = "counts"


@dataclass(frozen=True, slots=True)
class Params:
    sites: tuple[Party, ...]
    coordinator: Party
    n_top: int = 2000
    min_batch: int = 50  # cells of a batch
    min_cells: int = 10  # t
    min_donors: int = 3  # d, where donors are named

    def __post_init__(self) -> None:
        if len(set(self.sites)) < 2 or len(set(self.sites)) != len(self.sites) or self.coordinator in self.sites:
            raise ParameterError(f"choosing genes needs at least two sites, all different; found {len(self.sites)}")
        if self.n_top < 1 or self.min_batch < 2:
            raise ParameterError("n_top must be at least 1, and min_batch at least 2")

    @property
    def thresholds(self) -> Thresholds:
        return Thresholds(self.min_cells, self.min_donors)


@dataclass(frozen=True, slots=True)
class Cells:
    """What a site holds."""

    cells: gene_moments.Cells  # counts; with donors, where they are named
    batch: I64  # (n,), codes from 0
    thresholds: Thresholds = field(default_factory=Thresholds)  # this site's own; they can only raise the study's


@dataclass(frozen=True, slots=True)
class Chosen:
    """The same at every party."""

    genes: tuple[str, ...]  # in common
    chosen: Bits  # (g,)
    batches: F64  # (g,), that chose it
    rank: F64  # (g,), mean over these; infinite where there is none
    all_batches: int


def ideal(params: Params, xs: Mapping[Party, Cells]) -> dict[Party, Chosen]:
    """The same ranks, added up in one place."""
    common = tuple(genes.genes_in_common({u: mine.cells.names for u, mine in xs.items()}))
    total = np.sum([contribution(params, mine, common).values for mine in xs.values()], axis=0)
    return dict.fromkeys((params.coordinator, *xs), chosen_of(params, common, total))


def roles(params: Params) -> dict[Party, object]:
    return {params.coordinator: coordinator} | dict.fromkeys(params.sites, site)


def cost(params: Params, common: int, up: int = 0, down: int = 0) -> dict[Party, tuple[int, int]]:
    """Messages and bytes; `up` and `down` are bytes of names of genes."""
    who = (params.sites, params.coordinator)
    parts = [opened_sums.cost(*who, [1 + 2 * common]), common_genes.cost(common_genes.Params(*who), up, down)]
    return add_costs((params.coordinator, *params.sites), parts)


# ---- a site's part ---------------------------------------------------------------------------------------------------


def check_site(mine: Cells) -> None:
    if len(mine.batch) != mine.cells.x.shape[0]:
        raise DataError(f"expected one batch per cell, found {len(mine.batch)} for {mine.cells.x.shape[0]} cells")


def contribution(params: Params, mine: Cells, common: Sequence[str]) -> Contribution:
    """L2 and L3."""
    own = mine.thresholds
    least = params.thresholds.raised({"min_cells": own.min_cells, "min_donors": own.min_donors})
    at, donor, g = genes.match_genes(list(mine.cells.names), list(common)), mine.cells.donor, len(common)
    hits, ranks, cells, people, sizes = [], [], [], [], []
    for b in range(int(mine.batch.max(initial=-1)) + 1):
        of = np.flatnonzero(mine.batch == b)
        rows = Rows(len(of), None if donor is None else donor[of], least)
        if len(of) < params.min_batch or not rows.groups(np.zeros(len(of), np.int64), 1).open[0]:
            continue
        x = model.capped(gene_moments.rows_of(mine.cells.x, of)[:, at], rows.donor, least.min_cells, least.min_donors)
        rank = model.ranked(model.normalised_variance(model.trimmed(x, least.min_cells)), params.n_top)
        hits.append(rank >= 0)
        ranks.append(np.maximum(rank, 0))
        cells.append(np.diff(x.indptr))
        sizes.append((len(of), 0 if rows.donor is None else len(np.unique(rows.donor))))
        if rows.donor is not None:
            people.append(donors_of(x, rows.donor))
    rows = Rows(mine.cells.x.shape[0], donor, least)
    behind = np.array(cells, np.int64).reshape(-1, g)
    whose = None if donor is None else np.array(people, np.int64).reshape(-1, g)
    of_batches = np.array(sizes, np.int64).reshape(-1, 2)
    number = rows.counted(np.ones(len(sizes)), of_batches[:, 0], None if donor is None else of_batches[:, 1])
    parts = [rows.counted(np.array(v, np.float64).reshape(-1, g), behind, whose) for v in (hits, ranks)]
    return join([number.map(lambda v: v.sum(keepdims=True)), *(part.map(lambda v: v.sum(axis=0)) for part in parts)])


def donors_of(x: scipy.sparse.csc_matrix, donor: I64) -> I64:
    """How many donors express each gene."""
    by = scipy.sparse.csr_matrix((np.ones(len(donor)), (donor, np.arange(len(donor)))))
    found: I64 = np.asarray((by @ (x > 0).astype(np.float64) > 0).sum(axis=0)).ravel().astype(np.int64)
    return found


def chosen_of(params: Params, common: Sequence[str], total: F64) -> Chosen:
    """L3."""
    batches, hits, ranks = total[0], *np.split(np.maximum(total[1:], 0.0), 2)
    if round(float(batches)) < 1 or not np.any(hits > 0.5):
        raise ProtocolAbort(
            NAME, "L3", "too-few-cells", f"no batch of any site has {params.min_batch} cells and genes that vary"
        )
    picked, rank = model.chosen(np.rint(hits), ranks, params.n_top)
    return Chosen(tuple(common), picked, np.rint(hits), rank, round(float(batches)))


# ---- roles -----------------------------------------------------------------------------------------------------------


async def site(ch: Channel, params: Params, mine: Cells, *, entropy: Entropy, identity: Identity) -> Chosen:
    """Be u."""
    check_site(mine)
    agreement = common_genes.Params(params.sites, params.coordinator)
    agreed = await common_genes.site(ch.sub("genes"), agreement, KIND, list(mine.cells.names))  # L1
    opened = OpenedSums(ch, NAME, params.sites, params.coordinator, entropy, identity)
    return await follow(opened, params, agreed.names, mine)


async def coordinator(ch: Channel, params: Params) -> Chosen:
    """Be S."""
    agreement = common_genes.Params(params.sites, params.coordinator)
    agreed = await common_genes.coordinator(ch.sub("genes"), agreement)  # L1
    return await follow(OpenedSums(ch, NAME, params.sites, params.coordinator), params, agreed.names, None)


async def follow(opened: OpenedSums, params: Params, common: tuple[str, ...], mine: Cells | None) -> Chosen:
    """L1 to L4, at any party."""

    def part() -> Contribution:
        assert mine is not None
        return contribution(params, mine, common)

    await opened.begin()  # L1
    total = await opened.add("L3", f"ranks of {len(common)} genes", 1 + 2 * len(common), part)  # L3
    found = chosen_of(params, common, total)
    await opened.finish()  # L4
    return found
