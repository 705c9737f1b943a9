"""Pooled discriminant: one linear classifier of all sites' labelled cells, from three fixed sums and no iteration.

    L1   u       drop labels with fewer than t own cells or d own donors, and cells without a label; if fewer than
                 `min_cells` cells remain, u adds zero to every sum
         u, S    common genes, common seed      genes that every site measured; a secret of the sites, for checked sums
    L2   u, S    common labels                  label names of the remaining cells; the largest h that every site allows
    C1   u → S   number of u's remaining cells, rounded up       (`announced_counts`)
    L3   u       y = target · x / Σ_g x         each cell over the common genes; l = log(1 + y); or an embedding
    L4   u, S    checked sum of n_k, Σ_{i in k} l_i, Σ_i l_i²      cells and sums of each label, squares per gene
    C2   S ⇒ u   abort if a site has more than `max_share` of all cells
         u, S    H: the h genes whose label means differ most
    L5   u, S    checked sum of Σ_i l_i l_iᵀ over H
         u, S    classifiers with every setting              (`models.discriminant`)
    L6   u       the same from these sums less those of a fold of u's cells, scored on that fold, for every fold;
                 and less all of u's part, scored on u's cells
         u, S    checked sum of right answers with every setting, and of right answers by their typicality
         u, S    the setting; the level of typicality below which a cell is `unknown`
    L7   u, S    all sites received the same broadcasts     (same_view)

What is summed at L4 and L5 does not depend on any message but the choice of H. No party chooses a point at which sums
are opened. A site without labels adds zeros, and has the model in the end.

A site's part of a sum is limited as follows. t and d are `min_label_cells` and `min_donors`, or more where the site's
own settings say so.

- L4, n_k and Σ_k l: over at least t cells of d donors of label k at this site. A gene that is not zero in fewer than t
  cells or d donors of the site counts as zero in all of its cells, here and at L6. Sums of labels are multiples of 4,
  which is more than most values of one cell: where one cell of a small label expresses a gene, a finer sum is the value
  of that cell, and the smallest values belong to the cell with the largest library.
- L4, Σ l²: over at least `min_cells` cells, of which t cells of d donors are not zero; rounded to 1/4.
- L5: h is at most half the number of u's cells, genes or columns of an embedding. With as many genes as cells, a
  combination of columns of Σ l lᵀ is one cell: its leverage in the cells' span is 1. With half as many it is 1/2 on
  average. An entry (g, g') is zero unless l_g l_g' is not zero in t cells of d donors; rounded to 1/4.
- Embeddings: the t - 1 cells farthest from the site's median are moved towards it, to the distance of the t-th.
  Otherwise a cell far from all others is the first eigenvector of the second moments.
- L6: right answers over all labelled cells of u, to multiples of 2t, since each cell is scored twice; up or down with a
  secret offset. Typicalities are those of groups: t cells that follow each other in order all count at their median.

Reveals
-------
coordinator, site : which genes each site measured (coordinator); label names per site (coordinator, unless the study
    lists them) of labels above the thresholds; the number of labelled cells of each site within 1/64 (coordinator), and
    half the smallest of these numbers, down to one of `common_labels.SIZES` (site). Over all sites together: labelled
    cells and mean expression of each label, second moments of h genes, and right answers per setting and by typicality,
    in multiples of t; the model. A label that one site alone has: that site's number of cells and mean expression of
    it. With two sites: the other's sums. Whoever has a cell's whole profile can tell from a site's sums whether the
    cell is in them. A sum of a small label shows genes that any of its cells expresses.
malicious coordinator : the same. It cannot change a sum or leave out a site without an abort.
one malicious site : the same sums over the other sites, for genes of its choice: it can claim label means that make any
    h genes the chosen ones, and with its part shift the classifiers that the other sites score at L6. It learns counts
    of their cells along directions of its choice, in multiples of t, at most `SETTINGS` and `GRID` of them in a run;
    with probability 1/t on which side of one of eight such directions a cell is. It can make the model wrong.
coordinator with k sites : these sums over the other sites, so with all but one those of the last site.

Assumes
-------
What the checked sum assumes: every site stays to the end. Labels mean the same at all sites. Inputs are not verified:
a site may submit arbitrary sums. Sums that no cells can give abort the run (L4, L5, L6); these checks are the same at
all parties and use opened values only.

Cost
----
Per site two small messages (C1, C2), one signature and three checked sums: of K + (K + 1) g words for K labels and g
common genes, of h (h + 1) / 2 words, and of some sixty words.

References
----------
[FHT09], [RFL+21] in `models.discriminant`. [SWW12] Spielman, Wang and Wright, COLT 2012: sparse vectors can be found in
their span, which is why h is limited. Lines numbered here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import scipy.sparse

from cloister.arrays import F64, I64, U64, Bits
from cloister.cells import genes
from cloister.disclosure import Contribution, join
from cloister.disclosure import Rows as Group
from cloister.errors import DataError, ParameterError, ProtocolAbort
from cloister.models import discriminant, logistic
from cloister.models.discriminant import Setting, Solver, Statistics
from cloister.mpc.crypto.agreement import Identity
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.net.channel import Channel
from cloister.mpc.sums import announced_counts, checked_sum, consistency_check
from cloister.study import Party
from cloister.workflows.train_classifier import logistic_terms
from cloister.workflows.train_classifier.common_labels import SIZES, allowed
from cloister.workflows.train_classifier.logistic_terms import (
    Fitted,
    Labelled,
    check_site,
    chosen_values,
    log_values,
)
from cloister.workflows.train_classifier.openings import (
    Openings,
    Start,
    begin_coordinator,
    begin_site,
    start_cost,
    view_of,
)

NAME = "pooled_discriminant"
OPENINGS = 3
UNIT = 4  # sums of squares and products of log values are multiples of 1 / UNIT
CELLS_PER_COLUMN = 2  # labelled cells of a site for each column of second moments
LABEL_STEP = 4.0  # sums of log values over the cells of a label are multiples of this
TIMES = 2  # how often L6 scores each cell
EMBEDDING_UNIT = 1 << 16  # the same for an embedding
LARGEST = 2.0**62  # of a sum over all sites, in units
GRID = np.round(np.arange(-1.0, 1.5001, 0.05), 2)  # typicalities below which right answers are counted


@dataclass(frozen=True, slots=True)
class Params:
    base: logistic_terms.Params  # cells, labels, genes; `held_out`: whether settings and level are chosen at L6
    settings: tuple[Setting, ...] = discriminant.SETTINGS  # in order of preference
    max_share: float = announced_counts.MAX_SHARE  # of all labelled cells that one site may claim

    def __post_init__(self) -> None:
        if not self.settings:
            raise ParameterError("expected at least one setting")

    @property
    def claims(self) -> announced_counts.Params:
        return announced_counts.Params(self.base.sites, self.base.coordinator, self.max_share)

    @property
    def unit(self) -> int:
        return EMBEDDING_UNIT if self.base.embedding else UNIT

    @property
    def label_step(self) -> float:
        """What sums over the cells of a label are multiples of."""
        return 1 / EMBEDDING_UNIT if self.base.embedding else LABEL_STEP

    @property
    def counts(self) -> int:
        """Numbers opened at L6."""
        return 2 + len(self.settings) + len(GRID)


def roles(params: Params) -> dict[Party, object]:
    return {params.base.coordinator: coordinator} | dict.fromkeys(params.base.sites, site)


def ideal(params: Params, xs: Mapping[Party, Labelled]) -> dict[Party, Fitted]:
    """The same sums and scores over all sites in one place; counts of L6 to the nearest multiple of t."""
    base = params.base
    common = () if base.embedding else tuple(genes.genes_in_common({u: c.names for u, c in xs.items()}))
    opened = {u: own_cells(params, mine) for u, mine in xs.items()}
    names = {name for mine in opened.values() for name in mine.own_labels}
    vocabulary = tuple(sorted(base.labels or names))
    most = min((size for mine in opened.values() if (size := genes_allowed(mine))), default=0)
    start = Start(common, vocabulary, next(iter(xs.values())).x.shape[1], most)
    parts = {u: Part(params, start, mine) for u, mine in opened.items()}
    first = np.sum([part.first().map(words_for(params)).values.astype(np.int64) for part in parts.values()], axis=0)
    terms = terms_of(params, start, first)
    second = np.sum(
        [part.second(terms).map(words_for(params)).values.astype(np.int64) for part in parts.values()], axis=0
    )
    total = statistics_of(params, terms, second)
    counts = None
    if base.held_out:
        half = {u: TIMES * part.group.thresholds.min_cells // 2 for u, part in parts.items()}
        counts = np.sum([part.third(terms, total, half[u]).values for u, part in parts.items()], axis=0)
    return dict.fromkeys((base.coordinator, *xs), fitted(params, start, terms, total, counts))


def cost(params: Params, labels: int, columns: int, h: int, up: int = 0, down: int = 0) -> dict[Party, tuple[int, int]]:
    """Messages and bytes, for `columns` genes in common of which h are chosen."""
    base, hub = params.base, params.base.coordinator
    lengths = [labels + (labels + 1) * columns, h * (h + 1) // 2, *([params.counts] if base.held_out else [])]
    parts = [checked_sum.cost(checked_sum.Params(base.sites, hub, length)) for length in lengths]
    parts += [*start_cost(base, up, down), consistency_check.cost(view_of(base))]
    parts += [{hub: (len(base.sites), 0)} | dict.fromkeys(base.sites, (1, 0))]  # C1, C2
    return {u: (sum(p[u][0] for p in parts), sum(p[u][1] for p in parts)) for u in (hub, *base.sites)}


# ---- a site's part ---------------------------------------------------------------------------------------------------


def own_cells(params: Params, mine: Labelled) -> Labelled:
    """L1: the site's cells with the labels that take part; none where too few remain for the second moments."""
    columns = mine.x.shape[1] if params.base.embedding else SIZES[0]
    least = max(params.base.min_cells, CELLS_PER_COLUMN * columns)
    return mine.open_labels(least)


def genes_allowed(mine: Labelled) -> int:
    """L2: how many genes this site's labelled cells allow; 0 without labels."""
    return allowed(sum(name is not None for name in mine.labels) // CELLS_PER_COLUMN)


def words_for(params: Params) -> Callable[[Any], U64]:
    """Sums as words, rounded to the unit."""
    most = LARGEST / len(params.base.sites)

    def words(x: Any) -> U64:
        units = np.rint(np.asarray(x, np.float64) * params.unit)
        if not np.all(np.abs(units) <= most):
            raise DataError("sums over this site's cells are too large; check that its values are counts or log values")
        encoded: U64 = units.astype(np.int64).view(np.uint64)
        return encoded

    return words


class Part:
    """What one site adds to the three sums."""

    def __init__(self, params: Params, start: Start, mine: Labelled) -> None:
        self.params, self.start, self.mine = params, start, mine
        codes = mine.codes(start.labels)
        self.keep: Bits = codes >= 0
        self.codes = codes[self.keep]
        self.group: Group = mine.group.only(self.keep)
        self.fold = None if mine.fold is None else mine.fold[self.keep]
        if params.base.embedding and self.keep.any():
            x = np.array(mine.x, np.float64)
            x[self.keep] = pulled_in(x[self.keep], self.group.thresholds.min_cells)
            self.mine = replace(mine, x=x)
        self.x = np.zeros((0, 0))
        self.shown: Bits | None = None  # genes that are not zero in enough cells and donors here
        self.sums: F64 | None = None  # as added at L4
        self.gram: F64 | None = None  # as added at L5

    @property
    def classes(self) -> int:
        return len(self.start.labels)

    def blocks(self) -> Any:
        """L3: rows that take part, some at a time, with their positions among these."""
        base = self.params.base
        parts = (
            [np.asarray(self.mine.x, np.float64)] if base.embedding else log_values(base, self.mine, self.start.common)
        )
        row = done = 0
        for part in parts:
            keep = self.keep[row : row + part.shape[0]]
            row += part.shape[0]
            count = int(keep.sum())
            if count:
                yield part[np.flatnonzero(keep)], slice(done, done + count)
            done += count

    def first(self) -> Contribution:
        """L4."""
        columns = self.start.columns if self.params.base.embedding else len(self.start.common)
        K = self.classes
        sums, squares = np.zeros((K, columns)), np.zeros(columns)
        cells = np.zeros(columns, np.int64)
        donor, seen = self.donors(), np.zeros((0, columns), bool)
        if donor is not None:
            seen = np.zeros((int(donor.max(initial=-1)) + 1, columns), bool)
        for x, at in self.blocks():
            sparse = scipy.sparse.csr_matrix(x)
            hot = one_hot(self.codes[at], K)
            sums += (hot.T @ sparse).toarray()
            squares += np.asarray(sparse.multiply(sparse).sum(axis=0)).ravel()
            filled = sparse != 0
            cells += np.asarray(filled.sum(axis=0)).ravel().astype(np.int64)
            if donor is not None:
                seen |= (one_hot(donor[at], len(seen)).T @ filled.astype(np.float64)).toarray() > 0
        donors = None if donor is None else seen.sum(axis=0)
        second = self.group.counted(squares, cells, donors)
        self.shown = self.group.counted(np.ones(columns), cells, donors).values > 0
        step = self.params.label_step
        of_labels = self.group.grouped(self.codes, K, np.rint(sums * self.shown / step) * step)
        self.sums = of_labels.values
        return join([self.group.grouped(self.codes, K), of_labels, second])

    def second(self, terms: Terms) -> Contribution:
        """L5: upper triangle."""
        self.x = values_of(self, terms)
        if self.shown is not None:
            self.x = self.x * self.shown[terms.at]  # L6 scores cells without genes that few of them express
        filled = (self.x != 0).astype(np.float32)
        cells = np.rint(filled.T @ filled).astype(np.int64)
        donor, donors = self.donors(), None
        if donor is not None:
            donors = np.zeros(cells.shape, np.int64)
            for d in range(int(donor.max(initial=-1)) + 1):
                part = filled[donor == d]
                donors += (part.T @ part) > 0
        upper = np.triu_indices(len(terms.at))
        gram = self.x.T @ self.x
        entries = self.group.counted(gram[upper], cells[upper], None if donors is None else donors[upper])
        self.gram = square(rounded(self.params, entries.values), len(terms.at))
        return entries

    def third(self, terms: Terms, total: Statistics, offset: int) -> Contribution:
        """L6: cells scored, right answers with every setting; right answers in all, and those below each typicality."""
        settings, spread = self.params.settings, spread_of(self.params)
        right, scored = np.zeros(len(settings), np.int64), 0
        typical = np.zeros(0)
        at = terms.kept[self.codes] if len(self.codes) else self.codes
        folds = np.zeros(0, np.int64) if self.fold is None else np.unique(self.fold)
        for fold in folds:
            held = np.flatnonzero(self.fold == fold)
            rest = total.less(Statistics.of(self.x[held], at[held], len(terms.labels)))
            answer = score(rest, settings, self.x[held], at[held], spread=spread, aligned=False)
            if answer is not None:
                right, scored = right + answer.right, scored + answer.cells
                typical = np.concatenate([typical, answer.typical])
        if len(at):
            answer = score(total.less(self.added(terms)), settings, self.x, at, spread=spread, aligned=True)
            if answer is not None:
                right, scored = right + answer.right, scored + answer.cells
        typical = grouped_medians(typical, self.group.thresholds.min_cells)
        below = np.searchsorted(typical, GRID, side="left")
        twice = self.group.coarse(np.array([scored, *right]), offset, times=TIMES)
        return join([twice, self.group.coarse(np.array([len(typical), *below]), offset // TIMES)])

    def added(self, terms: Terms) -> Statistics:
        """What this site added to L4 and L5, so that it can be taken away again."""
        assert self.sums is not None
        assert self.gram is not None
        at = np.flatnonzero(terms.kept >= 0)
        counts = np.bincount(terms.kept[self.codes], minlength=len(terms.labels)).astype(np.float64)
        return Statistics(counts, self.sums[at][:, terms.at], self.gram)

    def donors(self) -> I64 | None:
        """Donors as 0, 1, …, of the rows that take part."""
        if self.group.donor is None:
            return None
        return np.unique(self.group.donor, return_inverse=True)[1].astype(np.int64)


def rounded(params: Params, x: Any) -> F64:
    """A sum as the others learn it."""
    units: F64 = np.rint(np.asarray(x, np.float64) * params.unit) / params.unit
    return units


def pulled_in(x: F64, least: int) -> F64:
    """L3: rows of an embedding, none farther from the median of all than `least` rows are."""
    centre = np.median(x, axis=0)
    distance = np.linalg.norm(x - centre, axis=1)
    most = np.sort(distance)[-min(least, len(x))]
    near: F64 = centre + (x - centre) * np.minimum(1.0, most / np.maximum(distance, 1e-300))[:, None]
    return near


def grouped_medians(x: F64, least: int) -> F64:
    """Sorted numbers, each replaced by the median of its group; groups are consecutive and have `least` or more."""
    groups = len(x) // least
    parts = np.array_split(np.sort(x), groups) if groups else []
    return np.concatenate([np.full(len(part), np.median(part)) for part in parts]) if parts else np.zeros(0)


def square(upper: F64, h: int) -> F64:
    """A symmetric matrix from its upper triangle."""
    matrix = np.zeros((h, h))
    matrix[np.triu_indices(h)] = upper
    whole: F64 = matrix + np.triu(matrix, 1).T
    return whole


def one_hot(codes: I64, k: int) -> Any:
    return scipy.sparse.csr_matrix((np.ones(len(codes)), codes, np.arange(len(codes) + 1)), shape=(len(codes), k))


def values_of(part: Part, terms: Terms) -> F64:
    """L5: the site's rows that take part, chosen columns."""
    values = chosen_values(part.params.base, part.mine, part.start.common, terms.at)
    rows = values[np.flatnonzero(part.keep)]
    dense: F64 = np.asarray(rows if part.params.base.embedding else rows.toarray(), np.float64)
    return dense


def spread_of(params: Params) -> float:
    return 1e-9 if params.base.embedding else discriminant.SPREAD


@dataclass(frozen=True)
class Answers:
    cells: int
    right: I64  # per setting
    typical: F64  # typicality of the cells whose most typical label is right


def score(
    rest: Statistics, settings: Sequence[Setting], x: F64, codes: I64, *, spread: float, aligned: bool
) -> Answers | None:
    """Cells whose labels the other cells know, by classifiers of these others; None if they know fewer than two."""
    known = rest.counts[codes] > 0
    if len(rest.present) < 2 or not known.any():
        return None
    x, codes, at = x[known], codes[known], rest.present
    solver, means = Solver(rest, spread), rest.sums[at] / rest.counts[at][:, None]
    right = []
    for setting in settings:
        linear = solver.fit(setting)
        z = linear.scores(x)[:, at]
        if aligned:
            z = logistic.align(z, linear.scores(means)[:, at])
        right.append(np.count_nonzero(at[z.argmax(axis=1)] == codes))
    typical = solver.typicality().scores(x)[:, at]
    hit = at[typical.argmax(axis=1)] == codes
    return Answers(len(codes), np.array(right), typical.max(axis=1)[hit])


# ---- what follows from the sums --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Terms:
    """All that follows from L4; the same at every party."""

    at: I64  # chosen columns, H
    labels: tuple[str, ...]  # that have cells
    kept: I64  # position of each name of the vocabulary among them; -1 if none
    left_out: tuple[str, ...]
    counts: F64  # n_k
    sums: F64  # (K, h)
    squares: F64  # (h,)


def terms_of(params: Params, start: Start, words: I64) -> Terms:
    """L4: labels with cells, and the genes."""
    K, columns = len(start.labels), start.columns if params.base.embedding else len(start.common)
    opened = words.astype(np.float64) / params.unit
    counts, sums, squares = opened[:K], opened[K : K + K * columns].reshape(K, columns), opened[K + K * columns :]
    if np.any(counts < 0) or np.any(counts != np.rint(counts)) or np.any(squares < 0):
        raise ProtocolAbort(NAME, "L4", "absurd", "the sums of all sites are those of no cells")
    if not params.base.embedding and np.any(sums < 0):
        raise ProtocolAbort(NAME, "L4", "absurd", "a sum of log values is negative")
    if np.any(sums[counts == 0]):
        raise ProtocolAbort(NAME, "L4", "absurd", "a label without cells has a sum")
    slack = len(params.base.sites) * (K + 1) * max(1 / params.unit, params.label_step / 2)
    if np.any(
        np.maximum(np.abs(sums).sum(axis=0) - slack, 0.0) ** 2 > counts.sum() * (squares + slack) * 1.001 + slack
    ):
        raise ProtocolAbort(NAME, "L4", "absurd", "a sum is larger than its squares allow")
    present = np.flatnonzero(counts)
    if len(present) < 2:
        least = params.base.min_label_cells
        raise ProtocolAbort(
            NAME, "L4", "labels", f"{len(present)} label(s) have {least} cells or more at a site; two are needed"
        )
    if params.base.embedding:
        at = np.arange(columns)
    else:
        at = discriminant.choose_columns(counts, sums, min(params.base.n_top_genes, start.genes))
        if not len(at):
            raise ProtocolAbort(NAME, "L4", "absurd", "no gene differs between labels")
    kept = np.full(K, -1, np.int64)
    kept[present] = np.arange(len(present))
    left_out = tuple(start.labels[i] for i in np.flatnonzero(counts == 0))
    labels = tuple(start.labels[i] for i in present)
    return Terms(at, labels, kept, left_out, counts[present], sums[present][:, at], squares[at])


def statistics_of(params: Params, terms: Terms, words: I64) -> Statistics:
    """L5: counts, sums and the Gram matrix, which must be one of cells with the squares of L4."""
    h = len(terms.at)
    gram = square(words.astype(np.float64) / params.unit, h)
    diagonal = np.diag(gram)
    slack = 2 * len(params.base.sites) / params.unit
    if np.any(np.abs(diagonal - terms.squares) > slack + 1e-5 * terms.squares):
        raise ProtocolAbort(NAME, "L5", "absurd", "second moments contradict the sums of squares")
    if np.any(np.abs(gram) > np.sqrt(np.outer(diagonal, diagonal)) * (1 + 1e-6) + slack):
        raise ProtocolAbort(NAME, "L5", "absurd", "second moments are those of no cells")
    return Statistics(terms.counts, terms.sums, gram)


def choose(params: Params, counts: I64 | None) -> tuple[int, float, tuple[tuple[str, float], ...]]:
    """L6: which setting, the level of `unknown`, and the share of right answers with each setting."""
    lowest = float(GRID[0])
    if counts is None or counts[0] == 0:
        return 0, lowest, ()
    n = len(params.settings)
    scored, right, typical, below = counts[0], counts[1 : 1 + n], counts[1 + n], counts[2 + n :]
    slack = len(params.base.sites) * 2 * TIMES * max(10, params.base.min_label_cells)
    if np.any(counts < 0) or np.any(right > scored + slack) or np.any(below > typical + slack):
        raise ProtocolAbort(NAME, "L6", "absurd", "more right answers than cells")
    if np.any(np.diff(below) < 0):
        raise ProtocolAbort(NAME, "L6", "absurd", "fewer right answers below a higher typicality")
    at = discriminant.choose_setting([float(r) for r in right], float(scored))
    few = np.flatnonzero(below <= params.base.unknown_share * typical)
    level = float(GRID[few[-1]]) if typical and len(few) else lowest
    shares = tuple((s.name, min(1.0, float(r / scored))) for s, r in zip(params.settings, right, strict=True))
    return at, level, shares


def fitted(params: Params, start: Start, terms: Terms, total: Statistics, counts: I64 | None) -> Fitted:
    chosen, level, shares = choose(params, counts)
    setting, solver = params.settings[chosen], Solver(total, spread_of(params))
    linear, typical = solver.fit(setting), solver.typicality()
    if not all(np.all(np.isfinite(x)) for f in (linear, typical) for x in (f.coefficients, f.intercept)):
        raise ProtocolAbort(NAME, "L5", "absurd", "the sums of all sites give no classifier")
    means = terms.sums / terms.counts[:, None]
    return Fitted(
        genes=tuple(start.common[i] for i in terms.at) if start.common else (),
        common=start.common,
        labels=terms.labels,
        coefficients=linear.coefficients,
        intercept=linear.intercept,
        mean=solver.mean,
        penalty=setting.penalty,
        level=level,
        converged=True,
        openings=OPENINGS if params.base.held_out else OPENINGS - 1,
        cells={name: int(n) for name, n in zip(terms.labels, terms.counts, strict=True)},
        left_out=terms.left_out,
        path=(),
        centers=linear.scores(means),
        setting=setting.name,
        scores=shares,
        typical=typical,
        typical_centers=typical.scores(means),
    )


# ---- roles -----------------------------------------------------------------------------------------------------------


async def follow(openings: Openings, params: Params, start: Start, part: Part | None) -> Fitted:
    """L4 to L7: the same at every party, but that S adds nothing."""
    words_of = words_for(params)

    async def add(line: str, what: str, length: int, contribution: Callable[[], Contribution]) -> I64:
        def words() -> U64:
            shown: U64 = openings.ch.contribute(contribution(), line=line, what=what, protocol=NAME)
            return shown

        return (await openings.open(line, what, length, words)).view(np.int64)

    def part_here() -> Part:
        assert part is not None
        return part

    K, columns = len(start.labels), start.columns if params.base.embedding else len(start.common)
    announced = await announce(openings.ch, params, part)  # C1
    first = await add(
        "L4", "cells and sums of each label", K + (K + 1) * columns, lambda: part_here().first().map(words_of)
    )
    terms = terms_of(params, start, first)
    await check_claims(openings.ch, params, round(float(terms.counts.sum())), part, announced)  # C2
    h = len(terms.at)
    second = await add(
        "L5",
        f"second moments of {h} columns",
        h * (h + 1) // 2,
        lambda: part_here().second(terms).map(words_of),
    )
    total = statistics_of(params, terms, second)
    counts: I64 | None = None
    if params.base.held_out:

        def third() -> Contribution:
            assert openings.entropy is not None
            offset = openings.entropy.integer_below(TIMES * part_here().group.thresholds.min_cells)
            return part_here().third(terms, total, offset).map(lambda x: x.astype(np.uint64))

        counts = await add("L6", f"right answers with {len(params.settings)} settings", params.counts, third)
    model = fitted(params, start, terms, total, counts)
    await openings.compare()  # L7
    return model


async def announce(ch: Channel, params: Params, part: Part | None) -> dict[Party, int]:
    """C1: what each site announced, at S."""
    if part is None:
        return await announced_counts.gather(ch, params.claims)
    await announced_counts.announce(ch, params.claims, len(part.codes))
    return {}


async def check_claims(
    ch: Channel, params: Params, total: int, part: Part | None, announced: Mapping[Party, int]
) -> None:
    """C2."""
    if part is None:
        await announced_counts.judge(ch, params.claims, total, announced)
    else:
        await announced_counts.accept(ch, params.claims, total, len(part.codes))


async def site(ch: Channel, params: Params, mine: Labelled, *, entropy: Entropy, identity: Identity) -> Fitted:
    """Be u. Returns the classifier."""
    check_site(params.base, mine)
    mine = own_cells(params, mine)  # L1
    most = 0 if params.base.embedding else genes_allowed(mine)
    start = await begin_site(ch, params.base, mine, genes=most, entropy=entropy, identity=identity)  # L1, L2
    openings = Openings(ch, NAME, params.base, OPENINGS, entropy, identity, start.seed)
    return await follow(openings, params, start, Part(params, start, mine))


async def coordinator(ch: Channel, params: Params) -> Fitted:
    """Be S: add up, and follow."""
    start = await begin_coordinator(ch, params.base)  # L1, L2
    return await follow(Openings(ch, NAME, params.base, OPENINGS), params, start, None)
