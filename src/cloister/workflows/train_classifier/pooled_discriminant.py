"""Pooled discriminant: one linear classifier of all sites' labelled cells, from a few sums over groups of cells.

    L1   u       drop labels with fewer than t own cells or d own donors, cells without a label, and of a donor with
                 more than half of a label's cells those that are too many; if fewer than `min_cells` cells remain, u
                 adds zero to every sum
         u, S    common genes, common seed      genes that every site measured; a secret of the sites, for checked sums
    L2   u, S    common labels                  label names of the remaining cells
    C1   u → S   number of u's remaining cells, rounded up       (`announced_counts`)
    L3   u       y = target · x / Σ_g x         each cell over all genes of u; l = log(1 + y); or an embedding
         u       groups of similar cells of one label, each of at least t cells of d donors (`disclosure.similar`)
    L4   u, S    checked sum of n_k, Σ_{i in k} l_i, Σ_i l_i²      cells and sums of each label, squares per gene
    C2   S ⇒ u   abort if a site has more than `max_share` of all cells
         u, S    H: the h genes whose label means differ most
    L5   u, S    checked sum of Σ_γ s_γ s_γᵀ / n_γ over H          s_γ: sum of l over the n_γ cells of group γ
         u, S    classifiers with every setting              (`models.discriminant`)
    L6   u, S    `steps` times: checked sum of Σ_γ s_γ (y_γ - p_γ)ᵀ and Σ_γ n_γ (y_γ - p_γ), with y_γ the label of γ and
                 p_γ its probabilities by the classifier so far; a step of logistic regression from it
    L7   u       classifiers with every setting, and after every step, from these sums less those of a part of u's
                 groups, scored on these; and less all of u's groups, scored on all
         u, S    checked sum of right answers with every setting, and of right answers by their typicality
         u, S    the setting, of the model; the step, with which sites that have labels label their other cells; the
                 level of typicality below which a cell is `unknown`
    L8   u, S    all sites received the same broadcasts     (same_view)

What is summed at L4 and L5 does not depend on any message but the choice of H: common genes decide which columns are
added up, and no value of a column. Parties can shift the points of L6 and L7, where only whole groups are summed. A
site without labels adds zeros, and has the model in the end.

Scatter within groups is lost at L5, but for the squares of L4: the diagonal of the second moments is that of the cells.
So the covariance is that between groups plus a diagonal, as in factor analysis.

A site's part of a sum is limited as follows. t and d are `min_label_cells` and `min_donors`, or more where the site's
own settings say so.

- Groups are formed once, before the first sum, from the site's own cells. L5 to L7 are functions of labels, sizes and
  rounded sums of whole groups, and of the squares of L4. Whatever others send, and whatever they solve for, no opened
  value of L5 to L7 changes unless one of these does.
- L4, n_k and Σ_k l: over at least t cells of d donors of label k at this site. A gene whose effective number of cells,
  Σ l² / max l², is below t at the site, that fewer than d donors express, or of which one donor has more than nine
  tenths of Σ l², counts as zero in all of its cells, at L5 and L6 too. Sums of labels are multiples of 4, which is more
  than most values of one cell: where one cell of a small label expresses a gene, a finer sum is the value of that cell,
  and the smallest values belong to the cell with the largest library. Sums of groups are multiples of 4 too, and add up
  to those of their label.
- L4, Σ l²: over at least `min_cells` cells, with an effective number of t or more; rounded to 1/4.
- L5: rounded to 1/4. Where rounding to steps makes the squares of a column larger than those of L4, the column is
  scaled down to these.
- Embeddings: the t - 1 cells farthest from the site's median are moved towards it, to the distance of the t-th.
  Otherwise a cell far from all others is the first eigenvector of the second moments.
- L6, L7: cells are not read, at whatever classifier. A group counts as n_γ cells, normally distributed around its mean
  with the site's variance within groups: as right answers, n_γ times the probability that the score of its label
  exceeds each other one.

Reveals
-------
coordinator, site : which genes each site measured (coordinator); label names per site (coordinator, unless the study
    lists them) of labels above the thresholds; the number of labelled cells of each site within 1/64 (coordinator).
    Over all sites together: labelled cells and mean expression of each label, second moments of h genes over groups of
    cells, residuals of groups at two classifiers, and expected right answers per setting and by typicality; the model.
    A label that one site alone has: that site's number of cells and mean expression of it. With two sites: the other's
    sums. Whoever has a cell's whole profile can tell from a site's sums whether the cell is in them. A sum of a small
    label shows genes that any of its cells expresses; of a site whose file has few counts per cell, such as a panel,
    also in how many cells.
malicious coordinator : the same. It cannot change a sum or leave out a site without an abort.
one malicious site : the same sums over the other sites, for genes of its choice. It can claim label means that make any
    h genes the chosen ones, and with its part shift the classifiers that the other sites use at L6 and L7. It learns
    sums of functions of their groups, in a run those of L6 and one for every setting and of `GRID`, and may so find
    sizes and rounded means of single groups. It can make the model wrong.
coordinator with k sites : these sums over the other sites, so with all but one those of the last site.

Assumes
-------
What the checked sum assumes: every site stays to the end. Labels mean the same at all sites. Inputs are not verified:
a site may submit arbitrary sums. Sums that no cells can give abort the run (L4 to L7); these checks are the same at
all parties and use opened values only.

Cost
----
Per site two small messages (C1, C2), one signature and checked sums: of K + (K + 1) g words for K labels and g common
genes, of h (h + 1) / 2 words, two of K (h + 1) words, and one of some seventy words.

References
----------
[FHT09], [RFL+21] in `models.discriminant`. [DM02] Domingo-Ferrer, Mateo-Sanz, TKDE 2002: microaggregation. Lines
numbered here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import scipy.sparse
import scipy.special

from cloister.arrays import F64, I64, U64, Bits
from cloister.cells import genes
from cloister.disclosure import Contribution, Shares, SimilarGroups, join
from cloister.disclosure import Rows as Group
from cloister.errors import DataError, ParameterError, ProtocolAbort
from cloister.models import discriminant, logistic
from cloister.models.discriminant import Linear, Setting, Solver, Statistics
from cloister.mpc.crypto.agreement import Identity
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.net.channel import Channel
from cloister.mpc.sums import announced_counts, checked_sum, consistency_check
from cloister.study import Party
from cloister.workflows.common import gene_moments
from cloister.workflows.train_classifier import logistic_terms
from cloister.workflows.train_classifier.logistic_terms import (
    Fitted,
    Labelled,
    check_site,
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
OPENINGS = 3  # and one for every step
UNIT = 4  # sums of squares and products of log values are multiples of 1 / UNIT
LABEL_STEP = 4.0  # sums of log values over the cells of a label, or of a group, are multiples of this
LOCAL_GENES = 1000  # of a site that vary most, by which its cells are similar
TAILS = 1.3  # genes of a cell vary together, so its typicality varies more than independent genes would make it
DIRECTIONS = 30  # of these genes, likewise
EMBEDDING_UNIT = 1 << 16  # the same for an embedding
LARGEST = 2.0**62  # of a sum over all sites, in units
GRID = np.round(np.arange(-1.0, 1.5001, 0.05), 2)  # typicalities below which right answers are counted


@dataclass(frozen=True, slots=True)
class Params:
    base: logistic_terms.Params  # cells, labels, genes; `held_out`: whether settings and level are chosen at L6
    settings: tuple[Setting, ...] = discriminant.SETTINGS  # in order of preference
    max_share: float = announced_counts.MAX_SHARE  # of all labelled cells that one site may claim
    steps: int = 2  # of logistic regression, from the first setting; none without held-out cells

    def __post_init__(self) -> None:
        if not self.settings or self.steps < 0:
            raise ParameterError("expected at least one setting, and 0 steps or more")

    @property
    def refined(self) -> int:
        """Steps that are made."""
        return self.steps if self.base.held_out else 0

    @property
    def names(self) -> tuple[str, ...]:
        """Of all classifiers that L7 compares."""
        first = self.settings[0].name
        steps = (f"{first}, {t} logistic step{'s' if t > 1 else ''}" for t in range(1, self.refined + 1))
        return (*(s.name for s in self.settings), *steps)

    @property
    def openings(self) -> int:
        return OPENINGS + self.refined if self.base.held_out else OPENINGS - 1

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
        """Numbers opened at L7."""
        return 3 + len(self.settings) + len(GRID) + len(self.names)


def roles(params: Params) -> dict[Party, object]:
    return {params.base.coordinator: coordinator} | dict.fromkeys(params.base.sites, site)


def ideal(params: Params, xs: Mapping[Party, Labelled]) -> dict[Party, Fitted]:
    """The same sums and scores over all sites in one place."""
    base = params.base
    common = () if base.embedding else tuple(genes.genes_in_common({u: c.names for u, c in xs.items()}))
    opened = {u: mine.open_labels(base.min_cells) for u, mine in xs.items()}
    names = {name for mine in opened.values() for name in mine.own_labels}
    vocabulary = tuple(sorted(base.labels or names))
    start = Start(common, vocabulary, next(iter(xs.values())).x.shape[1])
    parts = {u: Part(params, start, mine) for u, mine in opened.items()}
    first = np.sum([part.first().map(words_for(params)).values.astype(np.int64) for part in parts.values()], axis=0)
    terms = terms_of(params, start, first)
    second = np.sum(
        [part.second(terms).map(words_for(params)).values.astype(np.int64) for part in parts.values()], axis=0
    )
    total = statistics_of(params, terms, second)
    course, counts = Course.of(params, total), None
    for _ in range(params.refined):
        steps = [
            part.residuals(terms, course).map(words_for(params)).values.astype(np.int64) for part in parts.values()
        ]
        course.take(np.sum(steps, axis=0))
    if base.held_out:
        counts = np.sum([part.third(terms, course).values for part in parts.values()], axis=0)
    return dict.fromkeys((base.coordinator, *xs), fitted(params, start, terms, course, counts))


def cost(params: Params, labels: int, columns: int, h: int, up: int = 0, down: int = 0) -> dict[Party, tuple[int, int]]:
    """Messages and bytes, for `columns` genes in common of which h are chosen."""
    base, hub = params.base, params.base.coordinator
    lengths = [labels + (labels + 1) * columns, h * (h + 1) // 2, *[(h + 1) * labels] * params.refined]
    lengths += [params.counts] if base.held_out else []
    parts = [checked_sum.cost(checked_sum.Params(base.sites, hub, length)) for length in lengths]
    parts += [*start_cost(base, up, down), consistency_check.cost(view_of(base))]
    parts += [{hub: (len(base.sites), 0)} | dict.fromkeys(base.sites, (1, 0))]  # C1, C2
    return {u: (sum(p[u][0] for p in parts), sum(p[u][1] for p in parts)) for u in (hub, *base.sites)}


# ---- a site's part ---------------------------------------------------------------------------------------------------


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
    """What one site adds to the sums."""

    def __init__(self, params: Params, start: Start, mine: Labelled) -> None:
        self.params, self.start, self.mine = params, start, mine
        codes = mine.codes(start.labels)
        self.keep: Bits = codes >= 0
        self.codes = codes[self.keep]
        self.group: Group = mine.group.only(self.keep)
        self.folds = 0 if mine.fold is None else len(np.unique(mine.fold[self.keep]))
        if params.base.embedding and self.keep.any():
            x = np.array(mine.x, np.float64)
            x[self.keep] = pulled_in(x[self.keep], self.group.thresholds.min_cells)
            self.mine = replace(mine, x=x)
        self.shown: Bits | None = None  # genes that enough cells and donors here express
        self.similar: SimilarGroups | None = None
        self.sums: F64 | None = None  # as added at L4
        self.squares: F64 | None = None  # likewise
        self.held: list[Any] | None = None  # l of all rows, where these are not too many
        self.whole: Grouped | None = None  # as added at L5
        self.scale = np.ones(0)  # of each column at L5, so that it has no more than its squares

    @property
    def classes(self) -> int:
        return len(self.start.labels)

    def logs(self) -> Iterator[Any]:
        """L3: l of the common genes of all rows, some at a time; held after the first pass if that is not too much."""
        if self.held is not None:
            yield from self.held
            return
        held, size = [], 0
        for log in log_values(self.params.base, self.mine, self.start.common):
            size += log.nnz
            if size <= gene_moments.HELD:
                held.append(log)
            else:
                held.clear()
            yield log
        self.held = held if size <= gene_moments.HELD else None

    def columns(self, at: I64) -> Any:
        """L3: of the rows that take part, some columns."""
        if self.params.base.embedding:
            return np.asarray(self.mine.x, np.float64)[self.keep][:, at]
        parts = [log[:, at].astype(np.float32) for log in self.logs()]
        return scipy.sparse.vstack(parts, format="csr")[np.flatnonzero(self.keep)]

    def blocks(self) -> Any:
        """L3: rows that take part, some at a time, with their positions among these."""
        base = self.params.base
        parts = [np.asarray(self.mine.x, np.float64)] if base.embedding else self.logs()
        row = done = 0
        for part in parts:
            keep = self.keep[row : row + part.shape[0]]
            row += part.shape[0]
            count = int(keep.sum())
            if count:
                yield part[np.flatnonzero(keep)], slice(done, done + count)
            done += count

    def first(self) -> Contribution:
        """L3, L4."""
        columns = self.start.columns if self.params.base.embedding else len(self.start.common)
        K = self.classes
        sums, squares, largest = np.zeros((K, columns)), np.zeros(columns), np.zeros(columns)
        donor, by_donor = self.donors(), np.zeros((0, columns))
        if donor is not None:
            by_donor = np.zeros((int(donor.max(initial=-1)) + 1, columns))
        for x, at in self.blocks():
            sparse = scipy.sparse.csr_matrix(x)
            hot = one_hot(self.codes[at], K)
            sums += (hot.T @ sparse).toarray()
            square = scipy.sparse.csr_matrix((np.square(sparse.data), sparse.indices, sparse.indptr), sparse.shape)
            squares += np.bincount(square.indices, square.data, minlength=columns)
            np.maximum.at(largest, square.indices, square.data)
            if donor is not None:
                by_donor += (one_hot(donor[at], len(by_donor)).T @ square).toarray()
        cells = np.where(largest > 0, squares / np.where(largest > 0, largest, 1.0), 0.0)  # effective numbers
        donors, shares = None, Shares()
        if donor is not None:
            donors, shares = (by_donor > 0).sum(axis=0), Shares.of(squares, donor=by_donor.max(axis=0, initial=0.0))
        second = self.group.counted(squares, cells, donors, shares)
        self.shown = self.group.counted(np.ones(columns), cells, donors, shares).values > 0
        self.similar = self.group.similar(self.features(sums.sum(axis=0), squares), self.codes, complete=True)
        self.squares = rounded(self.params, second.values)
        step = self.params.label_step
        of_labels = self.group.grouped(self.codes, K, np.rint(sums * self.shown / step) * step)
        self.sums = of_labels.values
        return join([self.group.grouped(self.codes, K), of_labels, second])

    def features(self, sums: F64, squares: F64) -> F64:
        """L3: what cells are similar by, from the site's own cells alone: directions of the genes that vary most."""
        n = len(self.codes)
        if not n:
            return np.zeros((0, 1))
        if self.params.base.embedding:
            return np.asarray(self.mine.x, np.float64)[self.keep]
        assert self.shown is not None
        mean = sums / n
        variance = np.where(self.shown, np.maximum(squares / n - mean**2, 0.0), 0.0)
        at = np.sort(np.argsort(-variance, kind="stable")[:LOCAL_GENES])
        x = self.columns(at)
        scale = 1 / np.sqrt(variance[at] + discriminant.SPREAD)
        centre = mean[at] * scale
        directions = np.random.default_rng(0).normal(size=(len(at), min(DIRECTIONS, len(at))))  # not a secret
        for _ in range(2):
            projected = x @ (scale[:, None] * directions) - centre @ directions
            back = scale[:, None] * (x.T @ projected) - np.outer(centre, projected.sum(axis=0))
            directions = np.linalg.qr(back)[0]
        features: F64 = x @ (scale[:, None] * directions) - centre @ directions
        return features

    def second(self, terms: Terms) -> Contribution:
        """L5: upper triangle."""
        assert self.shown is not None
        assert self.similar is not None
        assert self.squares is not None
        x = scipy.sparse.csr_matrix(self.columns(terms.at), dtype=np.float64)
        x.data *= self.shown[terms.at][x.indices]
        codes = self.similar.codes
        sums = (one_hot(codes, len(self.similar)).T @ x).toarray()
        label = np.zeros(len(self.similar), np.int64)
        label[codes] = self.codes
        label = terms.kept[label] if len(label) else label
        means = stepwise(sums, label, self.params.label_step) / np.maximum(self.similar.cells, 1)[:, None]
        squares = self.squares[terms.at]
        rounded_up = np.square(means).T @ self.similar.cells  # by the step: sums of squares above those of the cells
        self.scale = np.sqrt(np.where(rounded_up > squares, squares / np.maximum(rounded_up, 1e-300), 1.0))
        means *= self.scale
        between = (means.T * self.similar.cells) @ means
        within = np.maximum(squares - between.diagonal(), 0.0) / max(len(self.codes), 1)
        self.whole = Grouped(label, self.similar.cells, means, within)
        between[np.diag_indices(len(terms.at))] = squares
        return self.similar.contribution(between[np.triu_indices(len(terms.at))])

    def residuals(self, terms: Terms, course: Course) -> Contribution:
        """L6: R at the classifier so far."""
        assert self.similar is not None
        assert self.whole is not None
        residual = np.zeros((len(terms.at) + 1, len(terms.labels)))
        if len(self.whole):
            residual = self.whole.residuals(course.points[-1])
        return self.similar.contribution(residual.ravel())

    def third(self, terms: Terms, course: Course) -> Contribution:
        """L7: cells scored and right answers with every setting, without what this site added: as for a new site.

        Then of held-out groups: right answers in all, and those below each typicality; cells scored, and right answers
        with every setting and after every step.
        """
        assert self.similar is not None
        assert self.whole is not None
        params, total, spread = self.params, course.total, spread_of(self.params)
        labels, counts = len(terms.labels), np.zeros(self.params.counts)
        middle = 1 + len(params.settings)
        end = middle + 1 + len(GRID)
        if self.folds and len(self.whole):
            held = self.whole.only(self.whole.fold(self.folds))
            rest = total.less(held.statistics(labels))
            answer = score(rest, params.settings, held, course.without(held, rest), spread=spread, aligned=False)
            if answer is not None:
                counts[middle:end] += self.folds * np.array([answer.hits, *answer.below])
                counts[end:] += self.folds * np.array([answer.cells, *answer.right])
        if len(self.whole):
            rest = total.less(self.added(terms))
            answer = score(rest, params.settings, self.whole, [], spread=spread, aligned=True)
            if answer is not None:
                counts[:middle] += [answer.cells, *answer.right]
        return self.similar.contribution(np.rint(counts).astype(np.int64))

    def added(self, terms: Terms) -> Statistics:
        """What this site added to L4 and L5, so that it can be taken away again."""
        assert self.sums is not None
        assert self.squares is not None
        assert self.whole is not None
        own = self.whole.statistics(len(terms.labels))
        own.gram[np.diag_indices(len(terms.at))] = self.squares[terms.at]
        return replace(own, sums=self.sums[np.flatnonzero(terms.kept >= 0)][:, terms.at])

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


def stepwise(sums: F64, label: I64, step: float) -> F64:
    """Sums of groups as multiples of a step that add up to the rounded sum of their label."""
    steps = np.zeros_like(sums)
    for k in np.unique(label):
        of = np.flatnonzero(label == k)
        steps[of] = np.diff(np.rint(np.cumsum(sums[of], axis=0) / step) * step, axis=0, prepend=0.0)
    return steps


@dataclass(frozen=True)
class Grouped:
    """Groups of similar cells: all that L5 and L6 know of a site's cells."""

    label: I64  # (G,)
    cells: I64  # (G,)
    means: F64  # (G, h), rounded
    within: F64  # (h,), variance of cells around the mean of their group

    def __len__(self) -> int:
        return len(self.cells)

    def only(self, at: I64) -> Grouped:
        return replace(self, label=self.label[at], cells=self.cells[at], means=self.means[at])

    def fold(self, folds: int) -> I64:
        """Every so many-th group of each label."""
        turn = np.zeros(len(self), np.int64)
        for k in np.unique(self.label):
            of = np.flatnonzero(self.label == k)
            turn[of] = np.arange(len(of))
        return np.flatnonzero(turn % folds == folds - 1)

    def residuals(self, linear: Linear) -> F64:
        return discriminant.residuals(linear, self.means, self.label, self.cells, self.within)

    def statistics(self, labels: int) -> Statistics:
        """Of the cells of these groups, as far as groups tell."""
        counts, sums = np.zeros(labels), np.zeros((labels, self.means.shape[1]))
        np.add.at(counts, self.label, self.cells)
        np.add.at(sums, self.label, self.means * self.cells[:, None])
        gram = (self.means.T * self.cells) @ self.means
        gram[np.diag_indices(len(gram))] += self.within * self.cells.sum()
        return Statistics(counts, sums, gram)


def square(upper: F64, h: int) -> F64:
    """A symmetric matrix from its upper triangle."""
    matrix = np.zeros((h, h))
    matrix[np.triu_indices(h)] = upper
    whole: F64 = matrix + np.triu(matrix, 1).T
    return whole


def one_hot(codes: I64, k: int) -> Any:
    return scipy.sparse.csr_matrix((np.ones(len(codes)), codes, np.arange(len(codes) + 1)), shape=(len(codes), k))


def spread_of(params: Params) -> float:
    return 1e-9 if params.base.embedding else discriminant.SPREAD


@dataclass(frozen=True)
class Answers:
    """Expected numbers of cells."""

    cells: float
    right: F64  # per setting
    hits: float  # whose most typical label is right
    below: F64  # of these, with a typicality below each of `GRID`


def score(
    rest: Statistics,
    settings: Sequence[Setting],
    groups: Grouped,
    steps: Sequence[tuple[Linear, F64]],
    *,
    spread: float,
    aligned: bool,
) -> Answers | None:
    """Groups whose labels the other cells know, by classifiers of these others; None if they know fewer than two."""
    groups = groups.only(np.flatnonzero(rest.counts[groups.label] > 0))
    if len(rest.present) < 2 or not len(groups):
        return None
    at, cells = rest.present, groups.cells.astype(np.float64)
    own, each = np.searchsorted(at, groups.label), np.arange(len(groups))
    solver, means = Solver(rest, spread), rest.sums[at] / rest.counts[at][:, None]

    def scores_of(linear: Linear) -> tuple[F64, F64]:
        """Mean and covariance of the scores of a group's cells."""
        a = linear.coefficients[:, at]
        return linear.scores(groups.means)[:, at], a.T @ (groups.within[:, None] * a)

    def right_of(linear: Linear) -> F64:
        """The probability that a cell of each group gets its label, with rivals taken as independent."""
        z, cov = scores_of(linear)
        if aligned:
            every = np.repeat(z, groups.cells, axis=0)
            z = z + (logistic.align(every, linear.scores(means)[:, at]) - every)[0]
        apart = np.sqrt(np.maximum(cov.diagonal()[:, None] + cov.diagonal() - 2 * cov, 1e-12))
        margin = (z[each, own][:, None] - z) / apart[own]
        margin[each, own] = np.inf
        right: F64 = scipy.special.ndtr(margin).prod(axis=1)
        return right

    linears = [solver.fit(setting) for setting in settings]
    linears += [solver.step(point, residual, float(rest.counts.sum())) for point, residual in steps]
    right = np.array([cells @ right_of(linear) for linear in linears])
    typical = solver.typicality()
    z, cov = scores_of(typical)
    hit = cells * right_of(typical) if not aligned else cells
    deviation = TAILS * np.sqrt(np.maximum(cov.diagonal()[own], 1e-12))
    below = hit @ scipy.special.ndtr((GRID - z[each, own][:, None]) / deviation[:, None])
    return Answers(float(cells.sum()), right, float(hit.sum()), below)


# ---- what follows from the sums --------------------------------------------------------------------------------------


@dataclass
class Course:
    """The classifier with the first setting, and after every logistic step (L6); the same at every party."""

    params: Params
    total: Statistics
    solver: Solver
    points: list[Linear]
    residuals: list[F64]  # opened; the next point follows from each

    @staticmethod
    def of(params: Params, total: Statistics) -> Course:
        solver = Solver(total, spread_of(params))
        return Course(params, total, solver, [solver.fit(params.settings[0])], [])

    def take(self, words: I64) -> None:
        """L6: the next point."""
        residual = words.astype(np.float64).reshape(len(self.total.gram) + 1, -1) / self.params.unit
        n, diagonal = float(self.total.counts.sum()), np.diag(self.total.gram)
        slack = len(self.params.base.sites) * (1 + len(self.total.counts)) / self.params.unit
        most = np.append(np.sqrt(n * np.maximum(diagonal, 0.0)), n)[:, None]
        if np.any(np.abs(residual) > most * 1.001 + slack) or np.any(np.abs(residual.sum(axis=1)) > slack):
            raise ProtocolAbort(NAME, "L6", "absurd", "residuals are those of no cells")
        self.points.append(self.solver.step(self.points[-1], residual, n))
        self.residuals.append(residual)

    def without(self, groups: Grouped, rest: Statistics) -> list[tuple[Linear, F64]]:
        """L7: every step as it would be without these groups of a site."""
        there = rest.counts > 0
        steps = []
        for point, residual in zip(self.points, self.residuals, strict=False):
            steps.append((point, (residual - groups.residuals(point)) * there))
        return steps


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
        at = discriminant.choose_columns(counts, sums, params.base.n_top_genes)
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


@dataclass(frozen=True)
class Choice:
    """L7: what follows from right answers."""

    setting: int = 0  # of the model, by sites that were left out in turn
    own: int = 0  # setting or step for other cells of sites that have labels, by held-out groups
    level: float = float(GRID[0])  # of `unknown`
    shares: tuple[tuple[str, float], ...] = ()  # of right answers with each setting, and of held-out ones after steps


def choose(params: Params, counts: I64 | None) -> Choice:
    """L7: which setting, which step, and the level of `unknown`."""
    lowest = float(GRID[0])
    if counts is None:
        return Choice()
    n = len(params.settings)
    scored, right, typical, below = counts[0], counts[1 : 1 + n], counts[1 + n], counts[2 + n : 2 + n + len(GRID)]
    held, own = counts[2 + n + len(GRID)], counts[3 + n + len(GRID) :]
    if scored == 0:  # one site has all the labels
        scored, right = held, own[:n]
    if scored == 0:
        return Choice()
    slack = len(params.base.sites)  # rounding
    if (
        np.any(counts < 0)
        or np.any(right > scored + slack)
        or np.any(below > typical + slack)
        or np.any(own > held + slack)
    ):
        raise ProtocolAbort(NAME, "L7", "absurd", "more right answers than cells")
    if np.any(np.diff(below) < 0):
        raise ProtocolAbort(NAME, "L7", "absurd", "fewer right answers below a higher typicality")
    at = discriminant.choose_setting([float(r) for r in right], float(scored))
    few = np.flatnonzero(below <= params.base.unknown_share * typical)
    level = float(GRID[few[-1]]) if typical and len(few) else lowest
    here = discriminant.choose_setting([float(r) for r in own], float(held)) if held else at
    shares = [min(1.0, float(r / scored)) for r in right] + [min(1.0, float(r / max(held, 1))) for r in own[n:]]
    return Choice(at, here, level, tuple(zip(params.names, shares, strict=True)))


def fitted(params: Params, start: Start, terms: Terms, course: Course, counts: I64 | None) -> Fitted:
    choice, solver = choose(params, counts), course.solver
    setting = params.settings[choice.setting]
    linear, typical = solver.fit(setting), solver.typicality()
    step = choice.own - len(params.settings) + 1
    own = course.points[step] if step > 0 else solver.fit(params.settings[choice.own])
    every = [linear, typical, *course.points]
    if not all(np.all(np.isfinite(x)) for f in every for x in (f.coefficients, f.intercept)):
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
        level=choice.level,
        converged=True,
        openings=params.openings,
        cells={name: int(n) for name, n in zip(terms.labels, terms.counts, strict=True)},
        left_out=terms.left_out,
        path=(),
        centers=linear.scores(means),
        setting=setting.name,
        scores=choice.shares,
        own=own,
        own_centers=own.scores(means),
        own_setting=params.names[choice.own],
        typical=typical,
        typical_centers=typical.scores(means),
    )


# ---- roles -----------------------------------------------------------------------------------------------------------


async def follow(openings: Openings, params: Params, start: Start, part: Part | None) -> Fitted:
    """L4 to L8: the same at every party, but that S adds nothing."""
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
    course = Course.of(params, statistics_of(params, terms, second))
    for _ in range(params.refined):
        what, length = f"residuals of {len(terms.labels)} labels in {h} columns", (h + 1) * len(terms.labels)
        course.take(await add("L6", what, length, lambda: part_here().residuals(terms, course).map(words_of)))
    counts: I64 | None = None
    if params.base.held_out:

        def third() -> Contribution:
            return part_here().third(terms, course).map(lambda x: x.astype(np.uint64))

        counts = await add("L7", f"right answers with {len(params.names)} settings", params.counts, third)
    model = fitted(params, start, terms, course, counts)
    await openings.compare()  # L8
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
    mine = mine.open_labels(params.base.min_cells)  # L1
    start = await begin_site(ch, params.base, mine, entropy=entropy, identity=identity)  # L1, L2
    openings = Openings(ch, NAME, params.base, params.openings, entropy, identity, start.seed)
    return await follow(openings, params, start, Part(params, start, mine))


async def coordinator(ch: Channel, params: Params) -> Fitted:
    """Be S: add up, and follow."""
    start = await begin_coordinator(ch, params.base)  # L1, L2
    return await follow(Openings(ch, NAME, params.base, params.openings), params, start, None)
