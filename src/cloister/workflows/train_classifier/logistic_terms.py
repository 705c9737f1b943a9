"""Terms of pooled logistic regression: parameters, what follows from the pooled sums, and what a site's cells answer.

    moments          L3    sums over a site's cells, some cells at a time
    chosen_values    L3    cells as the model takes them in
    terms_of         L4    genes, moments, labels and weights, the same at every party
    Cells            L7    a site's cells of the chosen genes, for training and held out
    choose_penalty   L8    λ by the held-out cells
    unknown_level    L9   below which a label is `unknown`

Lines are those of `pooled_logistic`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import scipy.sparse

from cloister.arrays import F64, I64
from cloister.disclosure import Rows as Group
from cloister.disclosure import Thresholds
from cloister.errors import DataError, ParameterError, ProtocolAbort
from cloister.models import logistic
from cloister.models.discriminant import Linear
from cloister.models.logistic import Rows
from cloister.study import Party
from cloister.workflows.common import gene_moments
from cloister.workflows.shared_pca import shared_pca
from cloister.workflows.train_classifier import common_labels

NAME = "pooled_logistic"
RANK = 50  # directions of V
CURVED = 700  # directions times labels, at most
PATH_ASKS = 6  # openings for one penalty of the path, twice as many for the first
GRID = 100  # steps of the highest probability


@dataclass(frozen=True, slots=True)
class Params:
    sites: tuple[Party, ...]
    coordinator: Party
    embedding: str = ""  # name of the embedding that goes in; empty: genes
    kind: str = "counts"  # or "log"
    n_top_genes: int = 2000
    target_sum: float = 1e4
    labels: tuple[str, ...] = ()  # the vocabulary; empty: all that the sites have
    penalties: tuple[float, ...] = (1e-1, 3e-2, 1e-2, 3e-3, 1e-3, 3e-4, 1e-4)  # λ, from the largest
    held_out: bool = True  # whether sites hold cells out, to choose λ and the level of `unknown`
    balance: float = 0.0  # a label with n cells counts n^(1 - balance): 0 all cells alike, 1 all labels alike
    unknown_share: float = 0.05  # of right answers that may fall below the level
    tolerance: float = 1e-5  # of a coefficient
    openings: int = 200
    min_cells: int = 50
    min_label_cells: int = 10
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.penalties or any(not 0 < p <= 1e3 for p in self.penalties):
            raise ParameterError(f"penalties must lie between 0 and 1000, found {self.penalties}")
        if list(self.penalties) != sorted(set(self.penalties), reverse=True):
            raise ParameterError(f"penalties must fall, each once, found {self.penalties}")
        if len(self.penalties) > 1 and not self.held_out:
            raise ParameterError("several penalties need held-out cells to choose by; hold cells out, or pass one")
        if self.openings < self.least_openings:
            raise ParameterError(f"{len(self.penalties)} penalties need {self.least_openings} openings or more")
        if not self.tolerance > 0 or not 0 <= self.unknown_share < 1 or self.min_label_cells < 2:
            raise ParameterError("tolerance must be above 0, unknown_share in [0, 1), min_label_cells at least 2")
        if not 0 <= self.balance <= 1:
            raise ParameterError(f"balance must lie between 0 and 1, found {self.balance}")

    @property
    def least_openings(self) -> int:
        return 4 + (2 + PATH_ASKS * (1 + len(self.penalties)) if self.held_out else 0) + 10

    @property
    def common_labels(self) -> common_labels.Params:
        return common_labels.Params(self.sites, self.coordinator, self.embedding, self.labels)

    @property
    def cells(self) -> shared_pca.Params:
        """How cells are normalised, as in shared PCA."""
        return shared_pca.Params(
            self.sites, self.coordinator, self.kind, max(2, self.n_top_genes), 1, self.target_sum,
            scale=False, min_cells=self.min_cells,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Labelled:
    """What a site holds."""

    names: tuple[str, ...]  # of the genes; empty for an embedding
    x: Any  # CSR or dense, (n, genes); or anything with a shape that gives rows for a slice, such as a matrix on disk
    labels: tuple[str | None, ...]  # (n,)
    held: Any  # bool, (n,): held-out cells
    library: F64 | None = None
    space: str = ""  # digest of what made the embedding
    donors: I64 | None = None  # (n,), whose cell it is; None where donors are not named
    thresholds: Thresholds = field(default_factory=Thresholds)  # of this site, for a label's cells and donors
    fold: I64 | None = None  # (n,), parts of the cells that are held out in turn; None: not at all

    def codes(self, vocabulary: tuple[str, ...]) -> I64:
        return label_codes(self.labels, vocabulary)

    @property
    def own_labels(self) -> tuple[str, ...]:
        return tuple(sorted({name for name in self.labels if name is not None}))

    @property
    def group(self) -> Group:
        """Cells and donors here, for thresholds."""
        return Group(len(self.labels), self.donors, self.thresholds)

    @property
    def excluded(self) -> dict[str, int]:
        """Labels with fewer cells or donors here than the thresholds, with their numbers of cells."""
        names = self.own_labels
        return self.group.excluded(self.codes(names), names)

    def open_labels(self, least: int) -> Labelled:
        """The same cells without the labels that are too rare here; without any if fewer than `least` cells remain.

        Of a donor that has more than half of a label's cells, those that are too many have no label either.
        Cells without a label add nothing to any sum, so that no total has a complement.
        """
        names = self.own_labels
        keep = self.group.balanced_rows(self.codes(names), len(names))
        if keep.sum() < least:
            keep[:] = False
        labels = tuple(name if k else None for name, k in zip(self.labels, keep, strict=True))
        return replace(self, labels=labels)


@dataclass(frozen=True, slots=True)
class Fitted:
    """The classifier, and how it came about; the same at every party."""

    genes: tuple[str, ...]  # (h,); empty for an embedding
    common: tuple[str, ...]  # cells that the model labels are normalised over these
    labels: tuple[str, ...]  # (K,)
    coefficients: F64  # W, (h, K)
    intercept: F64  # (K,)
    mean: F64  # μ, (h,)
    penalty: float  # λ
    level: float  # of `unknown`
    converged: bool
    openings: int
    cells: dict[str, int]  # labelled cells of each label, held-out ones included; none with noise
    left_out: tuple[str, ...]  # labels with too few cells
    path: tuple[tuple[float, float, float], ...]  # λ, accuracy, balanced accuracy on held-out cells
    centers: F64 | None  # (K, K): mean score of each label's cells
    setting: str = ""  # of a classifier from fixed statistics
    scores: tuple[tuple[str, float], ...] = ()  # share of right answers with every setting
    typical: Linear | None = None  # coefficients of typicality; `level` is then a typicality
    typical_centers: F64 | None = None  # (K, K): mean typicality of each label's cells
    own: Linear | None = None  # for cells of the sites that had labels, where it is better there
    own_centers: F64 | None = None  # (K, K): mean score of each label's cells by it
    own_setting: str = ""


def check_site(params: Params, mine: Labelled) -> None:
    n = mine.x.shape[0]
    if n < params.min_cells:
        raise DataError(
            f"{n} cells, fewer than {params.min_cells}: sums over so few come close to single cells; leave this site "
            "out, or lower min_cells= if all agree"
        )
    if len(mine.labels) != n or len(mine.held) != n:
        raise DataError(f"expected {n} labels, one per cell, found {len(mine.labels)}")


def moments(params: Params, mine: Labelled, common: tuple[str, ...]) -> F64:
    """L3: this site's sums for L4."""
    if params.embedding:
        x = np.asarray(mine.x, dtype=np.float64)
        return np.concatenate([[float(len(x))], x.sum(axis=0), (x**2).sum(axis=0)])
    if params.kind != "log":
        return shared_pca.moments(params.cells, shared_pca.Cells(mine.names, mine.x, mine.library), common)
    both = np.zeros((2, len(common)))  # to any base, so genes are chosen by the dispersion of the logarithms themselves
    for log in log_values(params, mine, common):
        both += [np.asarray(part.sum(axis=0)).ravel() for part in (log, log.multiply(log))]
    return np.concatenate([[float(mine.x.shape[0])], *both, *both])


def chosen_values(params: Params, mine: Labelled, common: tuple[str, ...], at: I64) -> Any:
    """L3: what the model takes in, (n, h): an embedding as it is, of genes 8 bytes for each value that is not zero."""
    if params.embedding:
        return np.asarray(mine.x, dtype=np.float64)[:, at]
    parts = [log[:, at].astype(np.float32) for log in log_values(params, mine, common)]
    return scipy.sparse.vstack(parts, format="csr")


def log_values(params: Params, mine: Labelled, common: tuple[str, ...]) -> Iterator[Any]:
    """L3: l of the common genes, some cells at a time."""
    if params.kind == "counts":
        cells = shared_pca.Cells(mine.names, mine.x, mine.library)
        for y in shared_pca.normalised(params.cells, cells, common, len(common)):
            y.data = np.log1p(y.data)
            yield y
        return
    columns = gene_moments.columns_of(tuple(mine.names), tuple(common))
    step = max(1, gene_moments.BLOCK // max(1, len(common)))
    for start in range(0, mine.x.shape[0], step):
        log = scipy.sparse.csr_matrix(mine.x[start : start + step], dtype=np.float64)[:, columns]
        if log.nnz and log.data.max() > shared_pca.LARGEST_LOG:
            raise DataError(
                f"log values above {shared_pca.LARGEST_LOG:g}; these are not logarithms: pass counts instead"
            )
        yield log


def label_codes(labels: tuple[str | None, ...], vocabulary: tuple[str, ...]) -> I64:
    at = {name: i for i, name in enumerate(vocabulary)}
    return np.array([-1 if name is None else at.get(name, -1) for name in labels], dtype=np.int64)


def label_counts(codes: I64, held: Any, labels: int) -> I64:
    """Training, then held-out cells of each label."""
    known = codes >= 0
    return np.concatenate([np.bincount(codes[known & side], minlength=labels) for side in (~held, held)])


@dataclass(frozen=True, slots=True)
class Terms:
    """All that follows from L4; the same at every party."""

    at: I64  # chosen columns
    mean: F64  # μ, (h,)
    variance: F64  # σ², (h,)
    cells: int
    labels: tuple[str, ...]  # with enough cells
    left_out: tuple[str, ...]
    training: I64  # cells per label
    held: I64
    balance: float

    def counts(self, *, everything: bool) -> I64:
        return self.training + self.held if everything else self.training

    def weights(self, *, everything: bool) -> F64:
        """What a cell of each label counts; 1 on average."""
        counts = self.counts(everything=everything)
        falling = np.where(counts > 0, np.maximum(counts, 1.0) ** -self.balance, 0.0)
        weights: F64 = falling * (counts.sum() / max(1e-300, float(falling @ counts)))
        return weights

    def total(self, *, everything: bool) -> float:
        """A."""
        return float(self.weights(everything=everything) @ self.counts(everything=everything))

    @property
    def rank(self) -> int:
        return max(1, min(RANK, len(self.mean), CURVED // len(self.labels) - 1))

    @property
    def heaviest(self) -> float:
        return max(float(self.weights(everything=e).max()) for e in (False, True))

    @property
    def energy(self) -> float:
        """Σ ‖x - μ‖² over all cells."""
        return self.cells * float(self.variance.sum())


def terms_of(params: Params, sums: F64, counts: I64, vocabulary: tuple[str, ...]) -> Terms:
    """L4: genes, moments and labels, from the opened sums."""
    n = round(float(sums[0]))
    if n < 2 or np.any(counts < 0) or counts.sum() > n or not np.all(np.isfinite(sums)):
        raise ProtocolAbort(NAME, "L4", "absurd", "the sums of all sites are those of no cells")
    training, held = counts.reshape(2, -1)
    enough = np.flatnonzero(training + held >= params.min_label_cells)
    if len(enough) < 2:
        raise ProtocolAbort(
            NAME, "L4", "labels", f"{len(enough)} label(s) have {params.min_label_cells} cells or more; two are needed"
        )
    if params.embedding:
        first, second = np.split(sums[1:], 2)
        at = np.arange(len(first))
    else:
        y, yy, first, second = np.split(sums[1:], 4)
        at = shared_pca.choose_genes(y / n, _variance(y, yy, n), params.n_top_genes)
        first, second = first[at], second[at]
    mean = first / n
    variance = np.maximum(second / n - mean**2, 0.0)
    if not variance.sum() > 0:
        raise ProtocolAbort(NAME, "L4", "absurd", "no gene varies over all sites")
    few = tuple(vocabulary[i] for i in np.flatnonzero(training + held > 0) if i not in set(enough))
    kept = tuple(vocabulary[i] for i in enough)
    return Terms(at.astype(np.int64), mean, variance, n, kept, few, training[enough], held[enough], params.balance)


def _variance(total: F64, square: F64, n: int) -> F64:
    return np.maximum(square - total**2 / n, 0.0) / (n - 1)


def choose_penalty(path: list[tuple[float, float, float]]) -> int:
    """The penalty of the best mean of accuracy and balanced accuracy on the held-out cells; of equals the largest."""
    return int(np.argmax([accuracy + balanced for _, accuracy, balanced in path]))


def path_of(penalties: tuple[float, ...], hits: I64, held: I64) -> list[tuple[float, float, float]]:
    there = held > 0
    rows = []
    for penalty, right in zip(penalties, hits, strict=True):
        share = right[there] / held[there]
        rows.append((penalty, float(right.sum() / max(1, held.sum())), float(share.mean()) if there.any() else 0.0))
    return rows


def unknown_level(counts: I64, share: float) -> float:
    """The highest level below which at most `share` of the right answers lie."""
    below = np.cumsum(counts[:GRID])
    return float(np.count_nonzero(below <= share * below[-1])) / GRID if below[-1] else 0.0


@dataclass
class Cells:
    """A site's cells of the chosen columns; none at S."""

    x: Any
    codes: I64  # -1 without a label
    held: Any

    def rows(self, terms: Terms, *, everything: bool) -> Rows:
        at = np.flatnonzero((self.codes >= 0) & (everything | ~self.held))
        return Rows(self.x[at], self.codes[at], terms.weights(everything=everything)[self.codes[at]])

    def scores(self, terms: Terms, theta: F64) -> tuple[F64, I64]:
        """Of the held-out cells, and their labels."""
        at = np.flatnonzero((self.codes >= 0) & self.held)
        return logistic.scores(self.x[at], theta, terms.mean), self.codes[at]

    def score_sums(self, terms: Terms, theta: F64) -> F64:
        """Σ of the scores of each label's cells, (K, K)."""
        rows = self.rows(terms, everything=True)
        z = logistic.scores(rows.x, theta, terms.mean)
        sums = np.zeros((len(terms.labels), len(terms.labels)))
        np.add.at(sums, rows.codes, z)
        return sums

    def right_answers(self, terms: Terms, points: list[F64]) -> I64:
        """(penalties, K)."""
        rows = []
        for theta in points:
            z, truth = self.scores(terms, theta)
            rows.append(np.bincount(truth[z.argmax(axis=1) == truth], minlength=len(terms.labels)))
        return np.array(rows)

    def answers_by_probability(self, terms: Terms, theta: F64) -> I64:
        """Right, then wrong answers on a grid of the highest probability."""
        z, truth = self.scores(terms, theta)
        p = logistic.probabilities(z)
        at = np.minimum((p.max(axis=1) * GRID).astype(np.int64), GRID - 1)
        right = p.argmax(axis=1) == truth
        return np.concatenate([np.bincount(at[right], minlength=GRID), np.bincount(at[~right], minlength=GRID)])
