"""Common programs: multicellular programs of donors of all sites, from checked sums over groups of similar donors.

    L1   u, S    common genes, common seed       genes that every site measured; a secret of the sites, for checked sums
    L2   u       x of each donor: log expression per cell type and gene, of its own cells. Groups of similar donors,
                 each of min_donors or more, formed before the first sum from all genes of u's own donors alone; only
                 their means are used, x̄, less the mean of u if the study says so. No donor has more than
                 1 / min_donors of a column's squares. Where fewer than min_donors of a group have the cell type, or
                 express a gene that most do not, the mean of the other groups stands in
         u, S    checked sum: donors per cell type; Σ n x̄ and Σ n x̄² per column         of types that min_donors have
         u, S    columns with the largest variance, at every party alike
    L3   u, S    checked sum of Σ n z zᵀ over these columns, z = x̄ - mean over all sites
         u, S    programs: its first eigenvectors
    L4   u       scores of its own donors: (x - mean) times the programs; they stay
    L5   u, S    all sites received the same broadcasts     (same_view)

When groups are formed, a donor without enough cells of a type has the mean of its site there. The programs are
principal components of donors x (cell type, gene), the matricised Tucker decomposition of [FBA26], on group means in
place of donors. Similar donors differ least along the main programs, so these survive; what is a donor's own is
averaged away.

Reveals
-------
coordinator : which genes each site measured. Beside these:
coordinator, site : over the groups of all sites: donors per cell type, mean and spread of each gene in each cell type,
    second moments of the chosen columns; the programs.
malicious coordinator : the same. It cannot change a sum without an abort.
one malicious site : the same, for columns that it can choose by inflating their spread: at most the group means of
    other sites, each over min_donors donors. With two sites: the other's sums.
whoever has a donor's profile : a guess whether the donor took part, from how well the second moments fit the profile;
    benchmarks/programs.py measures it beside sums over donors.
whoever sees two runs on the same donors : what their sums differ by, such as a donor that has a type in one of them.
    Between machines a site rejects a run with other groups or other types of its donors; a rehearsal does not.
coordinator with k sites : the sums over the other sites; with all but one, those of the last site.

Assumes
-------
What the checked sum assumes: every site stays to the end. A donor is at one site. Cell types mean the same everywhere.

Cost
----
Per site two checked sums, of T + 2 T G numbers for T types and G genes in common, and of d(d + 1)/2 for d columns.

References
----------
[FBA26] Faes, van den Berg, Amir Haeri, arXiv 2606.24938 (programs by merging the sites' subspaces, and a membership
attack). [DMS02] Domingo-Ferrer, Mateo-Sanz, IEEE TKDE 2002. Lines numbered here; the security argument is
docs/security/find_programs.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from cloister.arrays import F64, I64, Bits
from cloister.cells import genes
from cloister.cells.genes import match_genes
from cloister.disclosure import Contribution, Rows, SimilarGroups, Thresholds
from cloister.errors import DataError, ParameterError, ProtocolAbort
from cloister.mpc.crypto.agreement import Identity
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.net.channel import Channel
from cloister.mpc.sums import checked_sum, common_seed, consistency_check
from cloister.study import Party
from cloister.workflows.common import common_genes
from cloister.workflows.common.bounded_values import bounded_columns
from cloister.workflows.common.gene_moments import join_sum, split_sum

NAME = "common_programs"
LEAST_DONORS = 2


@dataclass(frozen=True, slots=True)
class Params:
    sites: tuple[Party, ...]
    coordinator: Party
    labels: tuple[str, ...]  # cell types
    programs: int = 5
    columns: int = 300  # of (cell type, gene) that enter
    min_donors: int = 3
    within: bool = True  # whether the mean of each site is taken out

    def __post_init__(self) -> None:
        if not self.labels or len(set(self.labels)) != len(self.labels):
            raise ParameterError("programs need the names of cell types, each once")
        if not 1 <= self.programs <= self.columns:
            raise ParameterError(f"expected 1 to {self.columns} programs, found {self.programs}")
        if self.min_donors < LEAST_DONORS:
            raise ParameterError(f"min_donors must be at least {LEAST_DONORS}, found {self.min_donors}")


@dataclass(frozen=True, slots=True)
class Profiles:
    """What a site holds: one row per donor."""

    names: tuple[str, ...]  # of genes
    x: F64  # (n, T, G), log expression
    present: Bits  # (n, T), whether the donor has enough cells of the type
    cells: I64  # (n,)
    thresholds: Thresholds = field(default_factory=Thresholds)
    donors: tuple[str, ...] = ()  # names, for comparison with earlier runs at this site


@dataclass(frozen=True, slots=True)
class Programs:
    """The same at every party, but for the scores."""

    donors: int
    genes: tuple[str, ...]  # in common
    columns: I64  # (d,), type * genes + gene
    mean: F64  # (d,)
    loadings: F64  # (d, K)
    explained: F64  # (K,), of the spread of group means over the columns
    scores: F64 | None = None  # (n, K), at a site


def roles(params: Params) -> dict[Party, object]:
    return {params.coordinator: coordinator} | dict.fromkeys(params.sites, site)


def cost(params: Params, common: int, up: int, down: int) -> dict[Party, tuple[int, int]]:
    """Messages and bytes, for so many genes in common, `up` bytes of a site's names and `down` of those in common."""
    hub, T = params.coordinator, len(params.labels)
    d = min(params.columns, T * common)
    lengths = (T + 2 * T * common, d * (d + 1) // 2)
    parts = [checked_sum.cost(checked_sum.Params(params.sites, hub, 2 * n)) for n in lengths]
    parts.append(common_genes.cost(common_genes.Params(params.sites, hub), up, down))
    parts.append(common_seed.cost(common_seed.Params(params.sites, hub)))
    parts.append(consistency_check.cost(consistency_check.Params(params.sites, hub)))
    return {u: (sum(p[u][0] for p in parts), sum(p[u][1] for p in parts)) for u in (hub, *params.sites)}


def ideal(params: Params, xs: Mapping[Party, Profiles]) -> dict[Party, Programs]:
    common = tuple(genes.genes_in_common({u: p.names for u, p in xs.items()}))
    sides = {u: Side(params, mine, common) for u, mine in xs.items()}
    chosen = choose(params, common, np.sum([s.means().values for s in sides.values()], axis=0))
    found = programs_of(params, chosen, np.sum([s.moments(chosen).values for s in sides.values()], axis=0))
    return {params.coordinator: found} | {u: replace(found, scores=s.scores(found)) for u, s in sides.items()}


# ---- local steps -----------------------------------------------------------------------------------------------------


def check_site(params: Params, mine: Profiles) -> None:
    n = len(mine.cells)
    if mine.x.shape != (n, len(params.labels), len(mine.names)) or mine.present.shape != (n, len(params.labels)):
        raise DataError("expected one row per donor, one column per cell type and one value per gene")
    if n < mine.thresholds.min_donors:
        raise DataError(
            f"{n} donors here, fewer than min_donors = {mine.thresholds.min_donors}: means over so few come close to "
            "single persons; leave this site out of the study"
        )
    if not np.any(mine.present.sum(axis=0) >= mine.thresholds.min_donors):
        raise DataError(
            f"no cell type has enough cells in min_donors = {mine.thresholds.min_donors} donors here; lower min_cells, "
            "or leave this site out"
        )


class Side:
    """A site's part of both sums. Its groups are formed here, from all its own genes in common."""

    def __init__(self, params: Params, mine: Profiles, common: tuple[str, ...]) -> None:
        check_site(params, mine)
        self.params, self.common = params, common
        self.open = mine.present.sum(axis=0) >= mine.thresholds.min_donors  # cell types that this site speaks of
        least, n, T = mine.thresholds.min_donors, len(mine.cells), len(params.labels)
        whole = mine.x.copy()
        for t in range(T):
            own = whole[mine.present[:, t], t].mean(axis=0) if self.open[t] else np.zeros(len(mine.names))
            whole[~mine.present[:, t] if self.open[t] else slice(None), t] = own
        at = match_genes(list(mine.names), common)
        self.x: F64 = whole[:, :, at].reshape(n, -1)
        rows = Rows(n, np.arange(n), mine.thresholds, mine.cells)
        if least == 1:
            self.groups = SimilarGroups(np.arange(n), mine.cells, np.ones(n, np.int64))
        else:  # by all genes of this site: the groups do not depend on what others measured
            flat = bounded_columns(whole.reshape(n, -1), least)
            self.groups = rows.similar(flat - flat.mean(axis=0))
        self.size = np.bincount(self.groups.codes[self.groups.codes >= 0], minlength=len(self.groups)).astype(
            np.float64
        )
        self.table = self._table(mine.present, mine.x[:, :, at] > 0, least)
        if params.within and len(self.groups):
            own_mean = self.size @ self.table / self.size.sum()
            self.table, self.x = self.table - own_mean, self.x - own_mean

    def _table(self, present: Bits, expressed: Bits, least: int) -> F64:
        """Means of groups, (groups, T G), of values of which no donor dominates a column.

        Where fewer than min_donors of a group have the cell type, the mean would be that of these few and of values
        that stand in. The same holds for a gene that most donors do not express, if from 1 to that many in the group
        do. There the group has the mean of the other groups, so its own does not show as a difference either.
        """
        table = self.groups.means(bounded_columns(self.x, least))
        if least == 1:
            return table
        hot = (self.groups.codes[:, None] == np.arange(len(self.groups))).astype(np.float64)
        has = np.repeat(hot.T @ present, len(self.common), axis=1)
        there = (expressed & present[:, :, None]).reshape(len(present), -1)
        shown = hot.T @ there
        common = 2 * there.sum(axis=0) >= np.repeat(present.sum(axis=0), len(self.common))
        good = (has >= least) & (common | (shown == 0) | (shown >= least))
        weight = good * self.size[:, None]
        others: F64 = (weight * table).sum(axis=0) / np.maximum(weight.sum(axis=0), 1.0)
        return np.where(good, table, others)

    def means(self) -> Contribution:
        """L2."""
        donors = np.where(self.open, self.size.sum(), 0.0)
        return self.groups.contribution(np.concatenate([donors, self.size @ self.table, self.size @ self.table**2]))

    def moments(self, chosen: Chosen) -> Contribution:
        """L3."""
        z = self._centred(self.table, chosen.columns, chosen.mean)
        second = (z * self.size[:, None]).T @ z
        return self.groups.contribution(second[np.triu_indices(len(second))])

    def _centred(self, x: F64, columns: I64, mean: F64) -> F64:
        there = np.repeat(self.open, len(self.common))[columns]
        made: F64 = np.where(there, x[:, columns] - mean, 0.0)
        return made

    def scores(self, found: Programs) -> F64:
        """L4."""
        made: F64 = self._centred(self.x, found.columns, found.mean) @ found.loadings
        return made


@dataclass(frozen=True, slots=True)
class Chosen:
    common: tuple[str, ...]
    donors: int
    columns: I64
    mean: F64


def choose(params: Params, common: tuple[str, ...], total: F64) -> Chosen:
    """L2: the columns whose group means vary most, in their order."""
    T, G = len(params.labels), len(common)
    donors = total[:T]
    if not np.all(np.isfinite(total)) or not donors.max(initial=0) >= 1:
        raise ProtocolAbort(NAME, "L2", "no-donors", "no cell type has enough donors at any site")
    n = np.maximum(np.repeat(donors, G), 1.0)
    mean = total[T : T + T * G] / n
    spread = np.where(np.repeat(donors, G) > 0, total[T + T * G :] / n - mean**2, 0.0)
    best = np.argsort(-spread, kind="stable")[: min(params.columns, T * G)]
    columns = np.sort(best).astype(np.int64)
    if not spread[best[min(params.programs, len(best)) - 1]] > 0:
        raise ProtocolAbort(
            NAME, "L2", "constant", f"fewer than {params.programs} columns vary between groups of donors"
        )
    return Chosen(common, round(float(donors.max())), columns, mean[columns])


def programs_of(params: Params, chosen: Chosen, total: F64) -> Programs:
    """L3: eigenvectors with the largest eigenvalues; the largest entry of each is positive."""
    d = len(chosen.columns)
    second = np.zeros((d, d))
    second[np.triu_indices(d)] = total
    second = second + np.triu(second, 1).T
    values, vectors = np.linalg.eigh(second)
    order = np.argsort(-values)[: params.programs]
    loadings = vectors[:, order]
    loadings = loadings * np.sign(loadings[np.abs(loadings).argmax(axis=0), np.arange(len(order))])
    explained = np.maximum(values[order], 0.0) / max(float(np.trace(second)), 1e-300)
    return Programs(chosen.donors, chosen.common, chosen.columns, chosen.mean, loadings, explained)


# ---- roles -----------------------------------------------------------------------------------------------------------


def sum_params(params: Params, number: int, common: int) -> checked_sum.Params:
    T = len(params.labels)
    d = min(params.columns, T * common)
    length = T + 2 * T * common if number == 1 else d * (d + 1) // 2
    return checked_sum.Params(params.sites, params.coordinator, 2 * length)


WHAT = {1: ("L2", "donors, means and spread per cell type and gene"), 2: ("L3", "second moments of columns")}


async def site(ch: Channel, params: Params, mine: Profiles, *, entropy: Entropy, identity: Identity) -> Programs:
    """Be u. Returns the programs, with the scores of its own donors."""
    check_site(params, mine)
    agreement = common_genes.Params(params.sites, params.coordinator)
    common = (await common_genes.site(ch.sub("genes"), agreement, "counts", list(mine.names))).names  # L1
    pair = common_seed.Params(params.sites, params.coordinator, everyone=True)
    seed = await common_seed.site(ch.sub("seed", pair), pair, entropy=entropy, identity=identity)  # L1
    side = Side(params, mine, tuple(common))

    async def add(number: int, part: Contribution) -> F64:
        (line, what), p = WHAT[number], sum_params(params, number, len(common))
        sub = ch.sub(f"sum/{number}", (p, line))
        part = part.map(lambda x: split_sum(x, len(params.sites), entropy))
        words = sub.contribute(part, line=line, what=what, protocol=NAME)
        total = join_sum(await checked_sum.site(sub, p, words, seed))
        return ch.reveal(total, to=ch.me, line=line, what=what, protocol=NAME)

    chosen = choose(params, tuple(common), await add(1, side.means()))  # L2
    found = programs_of(params, chosen, await add(2, side.moments(chosen)))  # L3
    await consistency_check.site(
        ch, consistency_check.Params(params.sites, params.coordinator), identity=identity
    )  # L5
    return replace(found, scores=side.scores(found))  # L4


async def coordinator(ch: Channel, params: Params) -> Programs:
    """Be S: add up, and follow."""
    agreement = common_genes.Params(params.sites, params.coordinator)
    common = (await common_genes.coordinator(ch.sub("genes"), agreement)).names  # L1
    pair = common_seed.Params(params.sites, params.coordinator, everyone=True)
    await common_seed.coordinator(ch.sub("seed", pair), pair)  # L1

    async def add(number: int) -> F64:
        (line, what), p = WHAT[number], sum_params(params, number, len(common))
        total = join_sum(await checked_sum.coordinator(ch.sub(f"sum/{number}", (p, line)), p))
        return ch.reveal(total, to=ch.me, line=line, what=what, protocol=NAME)

    chosen = choose(params, tuple(common), await add(1))  # L2
    found = programs_of(params, chosen, await add(2))  # L3
    await consistency_check.coordinator(ch, consistency_check.Params(params.sites, params.coordinator))  # L5
    return found
