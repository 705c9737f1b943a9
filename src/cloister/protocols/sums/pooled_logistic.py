"""Pooled logistic regression: one classifier of all sites' labelled cells, from checked sums and no cell.

    L1   u, S    common genes, common seed      genes that every site measured; a secret of the sites, for checked sums
    L2   u → S   what the model takes in, names of the labels     no names where the study lists them
    L3   S ⇒ u   the label vocabulary
    L4   u       y = target · x / Σ_g x         each cell over the common genes; l = log(1 + y); or an embedding
    L5   u, S    checked sum of n, Σy, Σy², Σl, Σl² per gene; training and held-out cells per label
         u, S    the genes of largest normalised dispersion, μ, σ; labels with at least m cells; weights of the labels
    L6   u, S    checked sum of Σ a (x - μ)(x - μ)ᵀ Ω     Ω of ±1 from the study's seed, then once more with Ω = V
         u, S    V                              the strongest directions
    for λ from the largest to the smallest, on the training cells; then for the chosen λ, on all labelled cells:
    L7   u, S    checked sum of the Hessian in the span of V, at θ
    L8   u, S    checked sum of loss and gradient, at θ
         u, S    θ ← the next point of L-BFGS, until the next step is below `tolerance` everywhere
    L9   u, S    checked sum of right answers per λ and label on the held-out cells: λ
    L10  u, S    checked sum of right and wrong answers by the highest probability: the level of `unknown`

Every party computes every point itself from the opened sums, which the coordinator cannot change: nobody can be sent a
point that somebody chose. The result is the minimum for the pooled cells, as it would be found in one place. A site
without labels adds zeros from L6 on, and has the model in the end.

Reveals
-------
coordinator, site : which genes each site measured (coordinator); label names per site (coordinator, unless the study
    lists them); over all sites together: number of cells, mean and variance of every common gene, cells per label, a
    sketch of the covariance, and loss, gradient and Hessian in few directions at most `openings` times, at points that
    follow from those before; right answers on held-out cells; the model. The first gradient is the sum of expression of
    each label: therefore labels with fewer than `min_label_cells` cells in all are left out. Few labelled cells, fewer
    than openings times labels, are in principle determined by that many sums. With two sites: the other's sums.
lying coordinator : the same. It cannot change a sum or leave out a site without an abort.
one lying site : the same, at points it can shift, because its part of every sum is whatever it likes, but it does not
    see the others' part before. Up to `openings` sums over the others' cells can be bent towards single cells that way.
coordinator with k sites : these sums over the other sites, so with all but one those of the last site; with any one
    site, at points that the two choose.

Assumes
-------
What the checked sum assumes: every site stays to the end. Each site holds at least `min_cells` cells. Labels mean the
same at all sites.

Cost
----
Per site and opening a checked sum: of K(h + 1) + 1 words for h genes and K labels at L8, of about (K r)²/2 for r
directions at L7, at most `openings` in all.

References
----------
[LN89] Liu and Nocedal, Mathematical Programming 1989 (L-BFGS). [SAT+15] genes, as in shared PCA. [FTU23] Frangella,
Tropp and Udell, SIAM J. Matrix Anal. 2023 (Nyström preconditioning). [DCX+22] CellTypist, Science 2022. Lines numbered
here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cloister.cells import genes
from cloister.crypto.agreement import Identity
from cloister.crypto.entropy import Entropy
from cloister.crypto.fixedpoint import FixedPoint, check_range
from cloister.errors import DataError, ParameterError, ProtocolAbort
from cloister.models import logistic
from cloister.models.logistic import Memory, Problem, Rows
from cloister.net.channel import Channel
from cloister.net.wire import F64, I64, U64, message
from cloister.protocols.sums import checked_sum, common_genes, common_seed, shared_pca
from cloister.study import Party

NAME = "pooled_logistic"
RANK = 50  # directions of V
OVER = 10  # directions of Ω beyond these
CURVED = 1000  # directions times labels, at most
PATH_ASKS = 6  # openings for one penalty of the path
PATH_STEP = 1e-3  # below which the path goes on to the next penalty
GRID = 100  # steps of the highest probability


@dataclass(frozen=True, slots=True)
class Params:
    sites: tuple[Party, ...]
    coordinator: Party
    space: str = ""  # what an embedding is, with its digest; empty: genes
    kind: str = "counts"  # or "log"
    n_top_genes: int = 2000
    target_sum: float = 1e4
    labels: tuple[str, ...] = ()  # the vocabulary; empty: all that the sites have
    penalties: tuple[float, ...] = (1e-1, 3e-2, 1e-2, 3e-3, 1e-3, 3e-4, 1e-4)  # λ, from the largest
    held_out: bool = True  # whether sites hold cells out, to choose λ and the level of `unknown`
    balanced: bool = False  # weigh labels alike
    unknown_share: float = 0.01  # of right answers that may fall below the level
    tolerance: float = 1e-5  # of a coefficient
    openings: int = 200
    min_cells: int = 50
    min_label_cells: int = 5
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

    @property
    def least_openings(self) -> int:
        return 3 + (2 + PATH_ASKS * len(self.penalties) if self.held_out else 0) + 10

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
    x: Any  # CSR or dense, (n, genes)
    labels: tuple[str | None, ...]  # (n,)
    held: Any  # bool, (n,): held-out cells
    library: F64 | None = None


@dataclass(frozen=True, slots=True)
class Fitted:
    """The classifier, and how it came about; the same at every party."""

    genes: tuple[str, ...]  # (h,); empty for an embedding
    common: tuple[str, ...]  # cells are normalised over these
    labels: tuple[str, ...]  # (K,)
    coefficients: F64  # W, (h, K)
    intercept: F64  # (K,)
    mean: F64  # μ, (h,)
    penalty: float  # λ
    level: float  # of `unknown`
    converged: bool
    openings: int
    cells: dict[str, int]  # labelled cells of each label, held-out ones included
    left_out: tuple[str, ...]  # labels with too few cells
    path: tuple[tuple[float, float, float], ...]  # λ, accuracy, balanced accuracy on held-out cells


@message("L2")
class Brings:  # u → S
    space: str
    columns: int  # of an embedding
    labels: tuple[str, ...]


@message("L3")
class Vocabulary:  # S → u
    labels: tuple[str, ...]


def roles(params: Params) -> dict[Party, object]:
    return {params.coordinator: coordinator} | dict.fromkeys(params.sites, site)


def ideal(params: Params, xs: Mapping[Party, Labelled]) -> dict[Party, Fitted]:
    """The fit of the pooled cells by SciPy, nothing encoded and nothing in parts."""
    pool = _pooled(params, xs)
    path, chosen, level = [], params.penalties[0], 0.0
    if params.held_out:
        fits = [_tight(pool, pool.training, penalty) for penalty in params.penalties]
        z = [logistic.scores(pool.x[pool.held], theta, pool.mean) for theta in fits]
        truth = pool.codes[pool.held]
        hits = np.array([np.bincount(truth[s.argmax(1) == truth], minlength=len(pool.labels)) for s in z])
        counts = np.bincount(truth, minlength=len(pool.labels))
        path = _path(params.penalties, hits, counts)
        at = choose_penalty(path)
        chosen, level = params.penalties[at], unknown_level(top_counts(z[at], truth), params.unknown_share)
    theta = _tight(pool, np.ones(len(pool.codes), bool), chosen, params.balanced)
    model = Fitted(
        pool.genes, pool.common, pool.labels, theta[:-1], theta[-1] - pool.mean @ theta[:-1], pool.mean, chosen, level,
        True, 0, pool.counts, pool.left_out, tuple(path),
    )  # fmt: skip
    return dict.fromkeys((params.coordinator, *xs), model)


# ---- local steps -----------------------------------------------------------------------------------------------------


def check_site(params: Params, mine: Labelled) -> None:
    n = mine.x.shape[0]
    if n < params.min_cells:
        raise DataError(
            f"{n} cells, fewer than {params.min_cells}: sums over so few come close to single cells; leave this site "
            "out, or lower min_cells= if all agree"
        )
    if len(mine.labels) != n or len(mine.held) != n:
        raise DataError(f"expected {n} labels, one per cell, found {len(mine.labels)}")
    unknown = sorted({name for name in mine.labels if name is not None} - set(params.labels)) if params.labels else []
    if unknown:
        raise DataError(
            f"{len(unknown)} label(s) here are not in the study's vocabulary (e.g. '{unknown[0]}'); rename or remove "
            "them, or agree on a longer list of labels"
        )


def values(params: Params, mine: Labelled, common: tuple[str, ...]) -> tuple[Any, F64]:
    """L4: what the model takes in, before genes are chosen, and this site's sums for L5."""
    if params.space:
        x = np.asarray(mine.x, dtype=np.float64)
        return x, np.concatenate([[float(len(x))], x.sum(axis=0), (x**2).sum(axis=0)])
    y = shared_pca.normalise(params.cells, shared_pca.Cells(mine.names, mine.x, mine.library), common)
    sums = shared_pca.moments(y)
    y.data = np.log1p(y.data)
    return y, sums


def label_codes(labels: tuple[str | None, ...], vocabulary: tuple[str, ...]) -> I64:
    at = {name: i for i, name in enumerate(vocabulary)}
    return np.array([-1 if name is None else at.get(name, -1) for name in labels], dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Terms:
    """All that follows from L5; the same at every party."""

    at: I64  # chosen columns
    mean: F64  # μ, (h,)
    variance: F64  # σ², (h,)
    cells: int
    labels: tuple[str, ...]  # with enough cells
    left_out: tuple[str, ...]
    training: I64  # cells per label
    held: I64
    balanced: bool

    def weights(self, counts: I64) -> F64:
        """What a cell of each label counts; 1 on average."""
        if not self.balanced:
            return np.ones(len(counts))
        return np.where(counts > 0, counts.sum() / (np.count_nonzero(counts) * np.maximum(counts, 1)), 0.0)

    @property
    def rank(self) -> int:
        return max(1, min(RANK, len(self.mean), CURVED // len(self.labels) - 1))

    @property
    def energy(self) -> float:
        """Σ ‖x - μ‖² over all cells."""
        return self.cells * float(self.variance.sum())


def terms_of(params: Params, sums: F64, counts: I64, vocabulary: tuple[str, ...]) -> Terms:
    """L5: genes, moments and labels, from the opened sums."""
    n = round(float(sums[0]))
    if n < 2 or np.any(counts < 0) or counts.sum() > n or not np.all(np.isfinite(sums)):
        raise ProtocolAbort(NAME, "L5", "absurd", "the sums of all sites are those of no cells")
    training, held = counts.reshape(2, -1)
    enough = np.flatnonzero(training + held >= params.min_label_cells)
    if len(enough) < 2:
        raise ProtocolAbort(
            NAME, "L5", "labels", f"{len(enough)} label(s) have {params.min_label_cells} cells or more; two are needed"
        )
    if params.space:
        first, second = np.split(sums[1:], 2)
        at = np.arange(len(first))
    else:
        y, yy, first, second = np.split(sums[1:], 4)
        at = shared_pca.choose_genes(y / n, _variance(y, yy, n), params.n_top_genes)
        first, second = first[at], second[at]
    mean = first / n
    variance = np.maximum(second / n - mean**2, 0.0)
    if not variance.sum() > 0:
        raise ProtocolAbort(NAME, "L5", "absurd", "no gene varies over all sites")
    few = tuple(vocabulary[i] for i in np.flatnonzero((training + held > 0)) if i not in set(enough))
    kept = tuple(vocabulary[i] for i in enough)
    return Terms(at.astype(np.int64), mean, variance, n, kept, few, training[enough], held[enough], params.balanced)


def _variance(total: F64, square: F64, n: int) -> F64:
    return np.maximum(square - total**2 / n, 0.0) / (n - 1)


def code_for(params: Params, reach: float) -> FixedPoint:
    """As many fraction bits as sums up to `reach` leave free, at most 40."""
    n = len(params.sites)
    reach = max(reach, 1.0) * (1 + 1e-6)
    bits = max(0, min(40, 61 - math.ceil(math.log2(n * reach))))
    check_range(bits, reach, n)
    return FixedPoint(bits, reach, n)


def decode(code: FixedPoint, words: U64, line: str) -> F64:
    """Back to reals; nothing beyond what all cells together can give."""
    x = code.decode(words)
    if not np.all(np.abs(x) <= code.bound * (1 + 1e-6) + code.resolution * code.parties):
        raise ProtocolAbort(NAME, line, "absurd", "a sum is larger than all cells together can give")
    return x


def choose_penalty(path: list[tuple[float, float, float]]) -> int:
    """The largest penalty whose accuracy on the held-out cells is best."""
    return int(np.argmax([accuracy for _, accuracy, _ in path]))


def _path(penalties: tuple[float, ...], hits: I64, held: I64) -> list[tuple[float, float, float]]:
    there = held > 0
    rows = []
    for penalty, right in zip(penalties, hits, strict=True):
        share = right[there] / held[there]
        rows.append((penalty, float(right.sum() / max(1, held.sum())), float(share.mean()) if there.any() else 0.0))
    return rows


def top_counts(z: F64, truth: I64) -> I64:
    """Right, then wrong answers by the highest probability, on a grid."""
    p = logistic.probabilities(z)
    at = np.minimum((p.max(axis=1) * GRID).astype(np.int64), GRID - 1)
    right = p.argmax(axis=1) == truth
    return np.concatenate([np.bincount(at[right], minlength=GRID), np.bincount(at[~right], minlength=GRID)])


def unknown_level(counts: I64, share: float) -> float:
    """The highest level below which at most `share` of the right answers lie."""
    below = np.cumsum(counts[:GRID])
    return float(np.count_nonzero(below <= share * below[-1])) / GRID if below[-1] else 0.0


# ---- both halves -----------------------------------------------------------------------------------------------------


@dataclass
class Openings:
    """Opens checked sums, one after the other, and counts them. S adds nothing: `words` is called at the sites only."""

    ch: Channel
    params: Params
    entropy: Entropy | None = None  # at a site, as the next two
    identity: Identity | None = None
    secret: bytes | None = field(default=None, repr=False)
    count: int = 0

    @property
    def left(self) -> int:
        return self.params.openings - self.count

    async def open(self, line: str, what: str, length: int, words: Callable[[], U64]) -> U64:
        self.count += 1
        p = checked_sum.Params(self.params.sites, self.params.coordinator, length)
        ch = self.ch.sub(f"sum/{self.count}", (p, line))
        if self.secret is None:
            z = await checked_sum.coordinator(ch, p)
        else:
            assert self.entropy is not None
            assert self.identity is not None
            z = await checked_sum.site(ch, p, words(), self.secret, entropy=self.entropy, identity=self.identity)
        shown = f"{what}: opening {self.count} of at most {self.params.openings}"
        self.ch.step(shown, protocol=NAME, line=line)
        return self.ch.reveal(z, to=self.ch.me, line=line, what=shown, protocol=NAME)


@dataclass
class Cells:
    """A site's labelled cells of the chosen columns; empty at S."""

    x: Any
    codes: I64
    held: Any

    def rows(self, weights: F64, *, everything: bool) -> Rows:
        at = np.flatnonzero((self.codes >= 0) & (np.ones(len(self.codes), bool) if everything else ~self.held))
        return Rows(self.x[at], self.codes[at], weights[self.codes[at]])


async def fit(openings: Openings, terms: Terms, cells: Cells) -> tuple[F64, dict[str, Any]]:
    """L6 to L10: the same at every party, but that S has no cells. Returns θ, and the rest of `Fitted`."""
    params = openings.params
    weights = terms.weights(terms.training)
    everything = not params.held_out
    counts = terms.training + terms.held if everything else terms.training
    rows = cells.rows(terms.weights(counts), everything=everything)
    basis, left_over = await principal(openings, terms, rows, weights)
    theta, memory = np.zeros((len(terms.mean) + 1, len(terms.labels))), Memory()
    penalty, level, path, converged = params.penalties[0], 0.0, [], False
    if params.held_out:
        points = []
        for one in params.penalties:
            problem = Problem(one, float(weights @ terms.training), basis, left_over)
            theta, _ = await descend(
                openings, terms, rows, problem, theta, memory, weights, most=PATH_ASKS, tolerance=PATH_STEP
            )
            points.append(theta)
        at, path, level = await validate(openings, terms, cells, points)
        penalty, theta = params.penalties[at], points[at]
    counts = terms.training + terms.held
    weights = terms.weights(counts)
    problem = Problem(penalty, float(weights @ counts), basis, left_over)
    rows = cells.rows(weights, everything=True)
    theta, converged = await descend(
        openings, terms, rows, problem, theta, memory, weights, most=openings.left, tolerance=params.tolerance
    )
    return theta, {"penalty": penalty, "level": level, "path": tuple(path), "converged": converged}


async def principal(openings: Openings, terms: Terms, rows: Rows, weights: F64) -> tuple[F64, float]:
    """L6: V, and the mean variance of a direction outside of it."""
    h, rank = len(terms.mean), terms.rank
    if h <= rank:
        return np.eye(h), 0.0
    rng = np.random.default_rng([openings.params.seed & 0xFFFFFFFF, 26])  # public: any Ω will do
    directions = rng.choice([-1.0, 1.0], (h, min(h, rank + OVER)))
    reach = float(weights.max()) * terms.energy
    for norm in (math.sqrt(h), 1.0):
        code, shape = code_for(openings.params, reach * norm), directions.shape
        words = await openings.open(
            "L6",
            f"sketch of the covariance along {shape[1]} directions",
            directions.size,
            lambda c=code, d=directions: c.encode(logistic.sketch_sums(rows, terms.mean, d).ravel()),  # type: ignore[misc]
        )
        sketch = decode(code, words, "L6").reshape(shape)
        directions, strength = logistic.principal_basis(sketch, directions, rank), np.linalg.norm(sketch)
        if not np.all(np.isfinite(directions)) or not strength > 0:
            raise ProtocolAbort(NAME, "L6", "absurd", "the labelled cells of all sites do not vary")
    held = float(np.abs((directions * terms.variance[:, None] * directions).sum()))
    return directions, max(0.0, float(terms.variance.sum()) - held) / (h - rank)


async def descend(
    openings: Openings,
    terms: Terms,
    rows: Rows,
    problem: Problem,
    theta: F64,
    memory: Memory,
    weights: F64,
    *,
    most: int,
    tolerance: float,
) -> tuple[F64, bool]:
    """L7, L8: L-BFGS with its sums opened."""
    params, heaviest = openings.params, float(weights.max())
    spread = math.sqrt(float(terms.variance.max()))
    gradient = code_for(params, heaviest * terms.cells * max(spread, math.log(len(terms.labels)), 1.0))
    curvature = code_for(params, heaviest * max(terms.energy, float(terms.cells)))
    K, r = theta.shape[1], problem.basis.shape[1] + 1

    def gradient_words(at: F64) -> U64:
        loss, g = logistic.gradient_sums(rows, at, terms.mean)
        loss = min(loss, gradient.bound) if math.isfinite(loss) else gradient.bound
        return gradient.encode(np.concatenate([[loss], g.ravel()]))

    work = logistic.minimise(problem, theta, memory, most=most, tolerance=tolerance)
    answer: Any = None
    while True:
        try:
            ask = work.send(answer)
        except StopIteration as end:
            fitted: tuple[F64, bool] = end.value
            return fitted
        except ParameterError as e:
            raise ProtocolAbort(NAME, "L8", "diverged", str(e)) from None
        at = ask.theta
        if ask.curvature:
            what, size = f"Hessian of {K} labels along {r} directions", K * r * (K * r + 1) // 2
            words = await openings.open(
                "L7",
                what,
                size,
                lambda at=at: curvature.encode(logistic.curvature_sums(rows, at, terms.mean, problem.basis)),  # type: ignore[misc]
            )
            answer = decode(curvature, words, "L7")
        else:
            what = f"loss and gradient of {at.size} coefficients"
            words = await openings.open("L8", what, 1 + at.size, lambda at=at: gradient_words(at))  # type: ignore[misc]
            sums = decode(gradient, words, "L8")
            answer = float(sums[0]), sums[1:].reshape(at.shape)


async def validate(
    openings: Openings, terms: Terms, cells: Cells, points: list[F64]
) -> tuple[int, list[tuple[float, float, float]], float]:
    """L9, L10: which penalty, how each did, and the level of `unknown`."""
    K = len(terms.labels)
    held = np.flatnonzero((cells.codes >= 0) & cells.held)
    truth = cells.codes[held]

    def hits() -> U64:
        right = []
        for theta in points:
            called = logistic.scores(cells.x[held], theta, terms.mean).argmax(axis=1)
            right.append(np.bincount(truth[called == truth], minlength=K))
        return np.concatenate(right).astype(np.uint64)

    words = await openings.open(
        "L9", f"right answers on held-out cells, {len(points)} penalties", len(points) * K, hits
    )
    right = words.view(np.int64).reshape(len(points), K)
    if np.any(right < 0) or np.any(right > terms.held):
        raise ProtocolAbort(NAME, "L9", "absurd", "more right answers than held-out cells")
    path = _path(openings.params.penalties, right, terms.held)
    at = choose_penalty(path)

    def tops() -> U64:
        return top_counts(logistic.scores(cells.x[held], points[at], terms.mean), truth).astype(np.uint64)

    counts = (await openings.open("L10", "answers by their probability", 2 * GRID, tops)).view(np.int64)
    if np.any(counts < 0) or counts.sum() != terms.held.sum():
        raise ProtocolAbort(NAME, "L10", "absurd", "other answers than held-out cells")
    return at, path, unknown_level(counts, openings.params.unknown_share)


def model_of(terms: Terms, common: tuple[str, ...], theta: F64, openings: int, rest: Mapping[str, Any]) -> Fitted:
    W = theta[:-1]
    chosen = tuple(common[i] for i in terms.at) if common else ()
    cells = {name: int(n) for name, n in zip(terms.labels, terms.training + terms.held, strict=True)}
    return Fitted(
        genes=chosen,
        common=common,
        labels=terms.labels,
        coefficients=W,
        intercept=theta[-1] - terms.mean @ W,
        mean=terms.mean,
        openings=openings,
        cells=cells,
        left_out=terms.left_out,
        **rest,
    )


# ---- roles -----------------------------------------------------------------------------------------------------------


async def site(ch: Channel, params: Params, mine: Labelled, *, entropy: Entropy, identity: Identity) -> Fitted:
    """u. Returns the classifier."""
    check_site(params, mine)
    S = params.coordinator
    common: tuple[str, ...] = ()
    if not params.space:
        agreement = common_genes.Params(params.sites, S)
        common = (await common_genes.site(ch.sub("genes"), agreement, params.kind, list(mine.names))).names  # L1
    pair = common_seed.Params(params.sites, S)
    seed = await common_seed.site(ch.sub("seed", pair), pair, entropy=entropy, identity=identity)  # L1
    own = tuple(sorted({name for name in mine.labels if name is not None}))
    columns = mine.x.shape[1] if params.space else 0
    await ch.send(S, Brings(params.space, columns, () if params.labels else own))  # L2
    vocabulary = (await ch.recv_broadcast(S, Vocabulary)).labels  # L3
    if not set(own) <= set(vocabulary) or list(vocabulary) != sorted(set(vocabulary)):
        raise ProtocolAbort(NAME, "L3", "labels", "the vocabulary lacks a label of this site, or is not in order")
    x, sums = values(params, mine, common)  # L4
    codes, K = label_codes(mine.labels, vocabulary), len(vocabulary)
    known, held = codes >= 0, np.asarray(mine.held, dtype=bool) & params.held_out
    counts = [np.bincount(codes[known & side], minlength=K) for side in (~held, held)]
    openings = Openings(ch, params, entropy, identity, seed.secret)
    words = await openings.open(
        "L5",
        "moments of genes, and cells per label",
        2 * len(sums) + 2 * K,
        lambda: np.concatenate(
            [shared_pca.split_sum(sums, len(params.sites), entropy), *(c.astype(np.uint64) for c in counts)]
        ),
    )
    terms = _open_terms(params, words, vocabulary)
    again = label_codes(mine.labels, terms.labels)
    theta, rest = await fit(openings, terms, Cells(x[:, terms.at], again, held))  # L6 to L10
    return model_of(terms, common, theta, openings.count, rest)


async def coordinator(ch: Channel, params: Params) -> Fitted:
    """S. Adds up, and follows the points."""
    common: tuple[str, ...] = ()
    if not params.space:
        agreement = common_genes.Params(params.sites, params.coordinator)
        common = (await common_genes.coordinator(ch.sub("genes"), agreement)).names  # L1
    pair = common_seed.Params(params.sites, params.coordinator)
    await common_seed.coordinator(ch.sub("seed", pair), pair)  # L1
    brought = await ch.gather(params.sites, Brings)  # L2
    if len({(b.space, b.columns) for b in brought.values()}) != 1:
        found = ", ".join(f"{u}: {b.columns} columns" for u, b in brought.items())
        raise ProtocolAbort(NAME, "L2", "mismatch", f"the sites came with different embeddings: {found}")
    columns = next(iter(brought.values())).columns
    vocabulary = tuple(sorted(params.labels or {name for b in brought.values() for name in b.labels}))
    if len(vocabulary) < 2:
        raise ProtocolAbort(NAME, "L2", "labels", f"the sites know {len(vocabulary)} label(s) together; two are needed")
    await ch.broadcast(params.sites, Vocabulary(vocabulary))  # L3
    openings = Openings(ch, params)
    width = 1 + 2 * columns if params.space else 1 + 4 * len(common)
    words = await openings.open(
        "L5", "moments of genes, and cells per label", 2 * width + 2 * len(vocabulary), lambda: np.zeros(0, np.uint64)
    )
    terms = _open_terms(params, words, vocabulary)
    nothing = Cells(np.zeros((0, len(terms.mean))), np.zeros(0, np.int64), np.zeros(0, bool))
    theta, rest = await fit(openings, terms, nothing)  # L6 to L10
    return model_of(terms, common, theta, openings.count, rest)


def _open_terms(params: Params, words: U64, vocabulary: tuple[str, ...]) -> Terms:
    sums, counts = words[: -2 * len(vocabulary)], words[-2 * len(vocabulary) :]
    return terms_of(params, shared_pca.join_sum(sums), counts.view(np.int64), vocabulary)


# ---- the pooled fit, for `ideal` -------------------------------------------------------------------------------------


@dataclass
class _Pool:
    x: Any
    codes: I64
    held: Any
    mean: F64
    genes: tuple[str, ...]
    common: tuple[str, ...]
    labels: tuple[str, ...]
    left_out: tuple[str, ...]
    counts: dict[str, int]
    balanced: bool

    @property
    def training(self) -> Any:
        return ~self.held


def _pooled(params: Params, xs: Mapping[Party, Labelled]) -> _Pool:
    import scipy.sparse

    common = () if params.space else tuple(genes.genes_in_common({u: c.names for u, c in xs.items()}))
    parts = [values(params, mine, common) for mine in xs.values()]
    sums = np.sum([s for _, s in parts], axis=0)
    names = [name for mine in xs.values() for name in mine.labels]
    vocabulary = tuple(sorted(params.labels or {name for name in names if name is not None}))
    codes = label_codes(tuple(names), vocabulary)
    held = np.concatenate([np.asarray(mine.held, bool) for mine in xs.values()]) & params.held_out
    counts = [np.bincount(codes[(codes >= 0) & side], minlength=len(vocabulary)) for side in (~held, held)]
    terms = terms_of(params, sums, np.concatenate(counts), vocabulary)
    x = np.concatenate([p for p, _ in parts]) if params.space else scipy.sparse.vstack([p for p, _ in parts]).toarray()
    codes = label_codes(tuple(names), terms.labels)
    known = codes >= 0
    chosen = tuple(common[i] for i in terms.at) if common else ()
    cells = {name: int(n) for name, n in zip(terms.labels, terms.training + terms.held, strict=True)}
    return _Pool(
        x[known][:, terms.at], codes[known], held[known], terms.mean, chosen, common, terms.labels, terms.left_out,
        cells, params.balanced,
    )  # fmt: skip


def _tight(pool: _Pool, which: Any, penalty: float, balanced: bool | None = None) -> F64:
    from scipy.optimize import minimize

    x, codes, K = pool.x[which] - pool.mean, pool.codes[which], len(pool.labels)
    counts = np.bincount(codes, minlength=K)
    weights = np.ones(len(codes))
    if pool.balanced if balanced is None else balanced:
        weights = len(codes) / (np.count_nonzero(counts) * counts[codes])
    rows, zero = Rows(x, codes, weights), np.zeros(x.shape[1])

    def f(flat: F64) -> tuple[float, F64]:
        theta = flat.reshape(-1, K)
        loss, g = logistic.gradient_sums(rows, theta, zero)
        ridge = np.vstack([penalty * theta[:-1], np.zeros((1, K))])
        total = loss / weights.sum() + penalty / 2 * float((theta[:-1] ** 2).sum())
        return total, (g / weights.sum() + ridge).ravel()

    limits = {"maxiter": 20_000, "maxfun": 50_000, "ftol": 1e-16, "gtol": 1e-10, "maxcor": 60}
    start = np.zeros((x.shape[1] + 1) * K)
    return np.asarray(minimize(f, start, jac=True, method="L-BFGS-B", options=limits).x).reshape(-1, K)
