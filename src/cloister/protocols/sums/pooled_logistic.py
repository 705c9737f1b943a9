"""Pooled logistic regression: one classifier of all sites' labelled cells, from checked sums and no cell.

    L1   u, S    common genes, common seed      genes that every site measured; a secret of the sites, for checked sums
    L2   u → S   what the model takes in, names of the labels     no names where the study lists them
    L3   S ⇒ u   the same of all sites; the label vocabulary
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
    L11  u, S    checked sum of the scores Wᵀx + b of each label's cells, with which cells of a new site can be aligned

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
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from cloister.arrays import F64, U64
from cloister.cells import genes
from cloister.crypto.agreement import Identity
from cloister.crypto.entropy import Entropy
from cloister.crypto.fixedpoint import FixedPoint, check_range
from cloister.errors import ParameterError, ProtocolAbort
from cloister.models import logistic
from cloister.models.logistic import Ask, Memory, Problem, Rows
from cloister.net.channel import Channel
from cloister.net.wire import message
from cloister.protocols.sums import checked_sum, common_genes, common_seed, shared_pca
from cloister.protocols.sums.logistic_terms import (
    GRID,
    NAME,
    PATH_ASKS,
    Cells,
    Labelled,
    Params,
    Terms,
    check_site,
    choose_penalty,
    label_codes,
    label_counts,
    path_of,
    terms_of,
    unknown_level,
    values,
)
from cloister.study import Party

OVER = 10  # directions of Ω beyond these
PATH_STEP = 1e-3  # below which the path goes on to the next penalty


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
    centers: F64  # (K, K): mean score of each label's cells


@message("L2")
class Brings:  # u → S
    space: str  # digest of what made the embedding
    columns: int  # of it
    labels: tuple[str, ...]


@message("L3")
class Agreed:  # S ⇒ u
    space: str
    columns: int
    labels: tuple[str, ...]


def roles(params: Params) -> dict[Party, object]:
    return {params.coordinator: coordinator} | dict.fromkeys(params.sites, site)


def ideal(params: Params, xs: Mapping[Party, Labelled]) -> dict[Party, Fitted]:
    """The tightly converged fit of the pooled cells, nothing encoded and nothing in parts."""
    common = () if params.embedding else tuple(genes.genes_in_common({u: c.names for u, c in xs.items()}))
    parts = [values(params, mine, common) for mine in xs.values()]
    names = tuple(name for mine in xs.values() for name in mine.labels)
    vocabulary = tuple(sorted(params.labels or {name for name in names if name is not None}))
    held = np.concatenate([np.asarray(mine.held, bool) for mine in xs.values()]) & params.held_out
    counts = label_counts(label_codes(names, vocabulary), held, len(vocabulary))
    terms = terms_of(params, np.sum([sums for _, sums in parts], axis=0), counts, vocabulary)
    x = np.concatenate([x if params.embedding else x.toarray() for x, _ in parts])[:, terms.at]
    cells = Cells(x, label_codes(names, terms.labels), held)

    def fit_pooled(penalty: float, *, everything: bool) -> F64:
        rows = cells.rows(terms, everything=everything)
        problem = Problem(penalty, float(rows.weights.sum()), np.zeros((len(terms.mean), 0)), 1.0)
        zero = np.zeros((len(terms.mean) + 1, len(terms.labels)))
        theta, _ = logistic.minimise_here(rows, terms.mean, problem, zero, Memory(), most=5000, tolerance=1e-8)
        return theta

    at, level, path = 0, 0.0, list[tuple[float, float, float]]()
    if params.held_out:
        points = [fit_pooled(penalty, everything=False) for penalty in params.penalties]
        path = path_of(params.penalties, cells.right_answers(terms, points), terms.held)
        at = choose_penalty(path)
        level = unknown_level(cells.answers_by_probability(terms, points[at]), params.unknown_share)
    theta = fit_pooled(params.penalties[at], everything=True)
    rest = {"penalty": params.penalties[at], "level": level, "path": tuple(path), "converged": True}
    rest["centers"] = cells.score_sums(terms, theta) / terms.counts(everything=True)[:, None]
    return dict.fromkeys((params.coordinator, *xs), model_of(terms, common, theta, 0, rest))


def cost(params: Params, lengths: Sequence[int], up: int = 0, down: int = 0) -> dict[Party, tuple[int, int]]:
    """Messages and bytes, for openings of these lengths, `up` bytes of a site's names and `down` of those in common."""
    n, hub = len(params.sites), params.coordinator
    parts = [checked_sum.cost(checked_sum.Params(params.sites, hub, length)) for length in lengths]
    parts.append(common_seed.cost(common_seed.Params(params.sites, hub)))
    if not params.embedding:
        parts.append(common_genes.cost(common_genes.Params(params.sites, hub), up, down))
    parts.append({hub: (n, 0)} | dict.fromkeys(params.sites, (1, 0)))  # L2, L3: a few names
    return {u: (sum(p[u][0] for p in parts), sum(p[u][1] for p in parts)) for u in (hub, *params.sites)}


# ---- local steps -----------------------------------------------------------------------------------------------------


def check_one_space(params: Params, brought: Mapping[Party, Brings]) -> None:
    """L2: the minority is named."""
    spaces = [(b.space, b.columns) for b in brought.values()]
    common = max(spaces, key=spaces.count)
    others = sorted(u for u, b in brought.items() if (b.space, b.columns) != common)
    if others:
        which = f"'{params.embedding}' of another model or with other columns"
        raise ProtocolAbort(NAME, "L2", "mismatch", f"{', '.join(others)} came with {which} than the others")


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


async def fit(openings: Openings, terms: Terms, cells: Cells) -> tuple[F64, dict[str, Any]]:
    """L6 to L10: the same at every party, but that S has no cells. Returns θ, and the rest of `Fitted`."""
    params = openings.params
    basis, left_over = await principal(openings, terms, cells.rows(terms, everything=not params.held_out))
    theta, memory = np.zeros((len(terms.mean) + 1, len(terms.labels))), Memory()

    async def descend_to(penalty: float, *, everything: bool, most: int, tolerance: float) -> tuple[F64, bool]:
        problem = Problem(penalty, terms.total(everything=everything), basis, left_over)
        work = logistic.minimise(problem, theta, memory, most=most, tolerance=tolerance)
        return await descend(openings, terms, cells.rows(terms, everything=everything), basis, work)

    at, level, path = 0, 0.0, list[tuple[float, float, float]]()
    if params.held_out:
        points = list[F64]()
        for penalty in params.penalties:
            asks = PATH_ASKS if points else 2 * PATH_ASKS
            theta, _ = await descend_to(penalty, everything=False, most=asks, tolerance=PATH_STEP)
            points.append(theta)
        at, path, level = await validate(openings, terms, cells, points)
        theta, memory = points[at], Memory()  # other cells bend otherwise
    theta, converged = await descend_to(
        params.penalties[at], everything=True, most=openings.left - 1, tolerance=params.tolerance
    )
    centers = await label_centers(openings, terms, cells, theta)
    rest = {"penalty": params.penalties[at], "level": level, "path": tuple(path), "converged": converged}
    return theta, rest | {"centers": centers}


async def principal(openings: Openings, terms: Terms, rows: Rows) -> tuple[F64, float]:
    """L6: V, and the mean variance of a direction outside of it."""
    h, rank = len(terms.mean), terms.rank
    if h <= rank:
        return np.eye(h), 0.0
    rng = np.random.default_rng([openings.params.seed & 0xFFFFFFFF, 26])  # public: any Ω will do
    directions = rng.choice([-1.0, 1.0], (h, min(h, rank + OVER)))
    reach = terms.heaviest * terms.energy

    def sketch_words(code: FixedPoint, along: F64) -> U64:
        return code.encode(logistic.sketch_sums(rows, terms.mean, along).ravel())

    for norm in (math.sqrt(h), 1.0):
        code, shape = code_for(openings.params, reach * norm), directions.shape
        what = f"sketch of the covariance along {shape[1]} directions"
        words = await openings.open("L6", what, directions.size, partial(sketch_words, code, directions))
        sketch = decode(code, words, "L6").reshape(shape)
        directions, strength = logistic.principal_basis(sketch, directions, rank), np.linalg.norm(sketch)
        if not np.all(np.isfinite(directions)) or not strength > 0:
            raise ProtocolAbort(NAME, "L6", "absurd", "the labelled cells of all sites do not vary")
    held = float(np.abs((directions * terms.variance[:, None] * directions).sum()))
    return directions, max(0.0, float(terms.variance.sum()) - held) / (h - rank)


async def descend(
    openings: Openings, terms: Terms, rows: Rows, basis: F64, work: Generator[Ask, Any, tuple[F64, bool]]
) -> tuple[F64, bool]:
    """L7, L8: open the sums that L-BFGS asks for, until it is done."""
    params, K, r = openings.params, len(terms.labels), basis.shape[1] + 1
    spread = math.sqrt(float(terms.variance.max()))
    gradient = code_for(params, terms.heaviest * terms.cells * max(spread, math.log(K), 1.0))
    curvature = code_for(params, terms.heaviest * max(terms.energy, float(terms.cells)))

    def gradient_words(theta: F64) -> U64:
        loss, g = logistic.gradient_sums(rows, theta, terms.mean)
        most = gradient.bound / len(params.sites)  # a step that overshoots this far is taken back anyway
        loss = min(loss, most) if math.isfinite(loss) else most
        return gradient.encode(np.concatenate([[loss], g.ravel()]))

    def curvature_words(theta: F64) -> U64:
        return curvature.encode(logistic.curvature_sums(rows, theta, terms.mean, basis))

    answer: Any = None
    while True:
        try:
            ask = work.send(answer)
        except StopIteration as end:
            fitted: tuple[F64, bool] = end.value
            return fitted
        except ParameterError as e:
            raise ProtocolAbort(NAME, "L8", "diverged", str(e)) from None
        if ask.curvature:
            what, size = f"Hessian of {K} labels along {r} directions", K * r * (K * r + 1) // 2
            words = await openings.open("L7", what, size, partial(curvature_words, ask.theta))
            answer = decode(curvature, words, "L7")
        else:
            what, size = f"loss and gradient of {ask.theta.size} coefficients", 1 + ask.theta.size
            words = await openings.open("L8", what, size, partial(gradient_words, ask.theta))
            sums = decode(gradient, words, "L8")
            answer = float(sums[0]), sums[1:].reshape(ask.theta.shape)


async def validate(
    openings: Openings, terms: Terms, cells: Cells, points: list[F64]
) -> tuple[int, list[tuple[float, float, float]], float]:
    """L9, L10: which penalty, how each did, and the level of `unknown`."""
    shape = len(points), len(terms.labels)

    def right_answers() -> U64:
        return cells.right_answers(terms, points).astype(np.uint64).ravel()

    what = f"right answers on held-out cells with {len(points)} penalties"
    words = await openings.open("L9", what, math.prod(shape), right_answers)
    right = words.view(np.int64).reshape(shape)
    if np.any(right < 0) or np.any(right > terms.held):
        raise ProtocolAbort(NAME, "L9", "absurd", "more right answers than held-out cells")
    path = path_of(openings.params.penalties, right, terms.held)
    at = choose_penalty(path)

    def answers() -> U64:
        return cells.answers_by_probability(terms, points[at]).astype(np.uint64)

    counts = (await openings.open("L10", "answers by their probability", 2 * GRID, answers)).view(np.int64)
    if np.any(counts < 0) or counts.sum() != terms.held.sum():
        raise ProtocolAbort(NAME, "L10", "absurd", "other answers than held-out cells")
    return at, path, unknown_level(counts, openings.params.unknown_share)


async def label_centers(openings: Openings, terms: Terms, cells: Cells, theta: F64) -> F64:
    """L11."""
    K = len(terms.labels)
    reach = math.sqrt(terms.cells * terms.energy) * float(np.linalg.norm(theta[:-1], axis=0).max())
    code = code_for(openings.params, reach + terms.cells * float(np.abs(theta[-1]).max()))

    def words() -> U64:
        return code.encode(cells.score_sums(terms, theta).ravel())

    sums = decode(code, await openings.open("L11", "scores of each label's cells", K * K, words), "L11")
    return sums.reshape(K, K) / terms.counts(everything=True)[:, None]


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
    """Be u. Returns the classifier."""
    check_site(params, mine)
    S = params.coordinator
    common: tuple[str, ...] = ()
    if not params.embedding:
        agreement = common_genes.Params(params.sites, S)
        common = (await common_genes.site(ch.sub("genes"), agreement, params.kind, list(mine.names))).names  # L1
    pair = common_seed.Params(params.sites, S)
    seed = await common_seed.site(ch.sub("seed", pair), pair, entropy=entropy, identity=identity)  # L1
    own = tuple(sorted({name for name in mine.labels if name is not None}))
    columns = mine.x.shape[1] if params.embedding else 0
    await ch.send(S, Brings(mine.space, columns, () if params.labels else own))  # L2
    agreed = await ch.recv_broadcast(S, Agreed)  # L3
    vocabulary = agreed.labels
    if (agreed.space, agreed.columns) != (mine.space, columns):
        raise ProtocolAbort(NAME, "L3", "mismatch", "the coordinator names another embedding than mine")
    if not set(own) <= set(vocabulary) or list(vocabulary) != sorted(set(vocabulary)):
        raise ProtocolAbort(NAME, "L3", "labels", "the vocabulary lacks a label of this site, or is not in order")
    x, sums = values(params, mine, common)  # L4
    held = np.asarray(mine.held, dtype=bool) & params.held_out
    counts = label_counts(label_codes(mine.labels, vocabulary), held, len(vocabulary))
    openings = Openings(ch, params, entropy, identity, seed.secret)
    words = await openings.open(
        "L5",
        "moments of genes, and cells per label",
        2 * len(sums) + len(counts),
        lambda: np.concatenate([shared_pca.split_sum(sums, len(params.sites), entropy), counts.astype(np.uint64)]),
    )
    terms = _open_terms(params, words, vocabulary)
    cells = Cells(x[:, terms.at], label_codes(mine.labels, terms.labels), held)
    theta, rest = await fit(openings, terms, cells)  # L6 to L10
    return model_of(terms, common, theta, openings.count, rest)


async def coordinator(ch: Channel, params: Params) -> Fitted:
    """Be S: add up, and follow the points."""
    common: tuple[str, ...] = ()
    if not params.embedding:
        agreement = common_genes.Params(params.sites, params.coordinator)
        common = (await common_genes.coordinator(ch.sub("genes"), agreement)).names  # L1
    pair = common_seed.Params(params.sites, params.coordinator)
    await common_seed.coordinator(ch.sub("seed", pair), pair)  # L1
    brought = await ch.gather(params.sites, Brings)  # L2
    check_one_space(params, brought)
    first = next(iter(brought.values()))
    vocabulary = tuple(sorted(params.labels or {name for b in brought.values() for name in b.labels}))
    if len(vocabulary) < 2:
        raise ProtocolAbort(NAME, "L2", "labels", f"the sites know {len(vocabulary)} label(s) together; two are needed")
    await ch.broadcast(params.sites, Agreed(first.space, first.columns, vocabulary))  # L3
    openings = Openings(ch, params)
    width = 1 + 2 * first.columns if params.embedding else 1 + 4 * len(common)
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
