"""Pooled logistic regression: one classifier of all sites' labelled cells, from checked sums and no cell.

    L1   u, S    common genes, common seed      genes that every site measured; a secret of the sites, for checked sums
    L2   u, S    common labels                  one embedding for all, if any; the label vocabulary
    L3   u       y = target · x / Σ_g x         each cell over the common genes; l = log(1 + y); or an embedding
    L4   u, S    checked sum of n, Σy, Σy², Σl, Σl² per gene; training and held-out cells per label
         u, S    the genes of largest normalised dispersion, μ, σ; labels with at least m cells; weights of the labels
    L5   u, S    checked sum of Σ a (x - μ)(x - μ)ᵀ Ω     Ω of ±1 from the study's seed, then once more with Ω = V
         u, S    V                              the strongest directions
    for λ from the largest to the smallest, on the training cells; then for the chosen λ, on all labelled cells:
    L6   u, S    checked sum of the Hessian in the span of V, at θ
    L7   u, S    checked sum of loss and gradient, at θ
         u, S    θ ← the next point of L-BFGS, until the next step is below `tolerance` everywhere
    L8   u, S    checked sum of right answers per λ and label on the held-out cells: λ
    L9   u, S    checked sum of right and wrong answers by the highest probability: the level of `unknown`
    L10  u, S    checked sum of the scores Wᵀx + b of each label's cells, with which cells of a new site can be aligned
    L11  u, S    all sites received the same broadcasts     (same_view)

Every party computes every point itself from the opened sums, which the coordinator cannot change. The result is the
minimum for the pooled cells, as it would be found in one place. A site without labels adds zeros from L5 on, and has
the model in the end. Labels with fewer than t cells or d donors at a site are left out at that site.

The sums depend on points that depend on earlier sums, so a malicious site can steer the points. Therefore no site runs
this without its own consent ("iterative-fit"). `pooled_discriminant` needs no such sums.

Reveals
-------
coordinator, site : which genes each site measured (coordinator); label names per site (coordinator, unless the study
    lists them); over all sites together: number of cells, mean and variance of every common gene, cells per label, a
    sketch of the covariance, and loss, gradient and Hessian in few directions at most `openings` times, at points that
    follow from those before; right answers on held-out cells; the model. The first gradient is the sum of expression of
    each label, of at least t cells at each site. Fewer labelled cells than openings times labels are in principle
    determined by that many sums. With two sites: the other's sums.
malicious coordinator : the same. It cannot change a sum or leave out a site without an abort.
one malicious site : single cells of the other sites. Its part of every sum is arbitrary, and it learns the others' part
    after each opening, so it can claim many cells and choose gradients and Hessians that lead the fit to points at
    which a gradient column is close to one cell. Measured before these limits: 16 of 164 cells of two sites over 40
    genes, median error 1.6e-5, in 200 openings. Steps are limited (`trusted_length`) and gradients of no convex loss
    abort the run. These limits slow the attack; they do not exclude it.
coordinator with k sites : these sums over the other sites, so with all but one those of the last site; with any one
    site, at points that the two choose.

Assumes
-------
What the checked sum assumes: every site stays to the end. No site deviates from the protocol. Each site holds at least
`min_cells` cells. Labels mean the same at all sites.

Cost
----
Per site and opening a checked sum: of K(h + 1) + 1 words for h genes and K labels at L7, of about (K r)²/2 for r
directions at L6, at most `openings` in all.

References
----------
[LN89] Liu and Nocedal, Mathematical Programming 1989 (L-BFGS). [SAT+15] genes, as in shared PCA. [FTU23] Frangella,
Tropp and Udell, SIAM J. Matrix Anal. 2023 (Nyström preconditioning). [DCX+22] CellTypist, Science 2022. Lines numbered
here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from cloister.arrays import F64, U64
from cloister.cells import genes
from cloister.errors import ParameterError, ProtocolAbort, RefusedError
from cloister.models import logistic
from cloister.models.logistic import Ask, Memory, Problem, Rows
from cloister.mpc.crypto.agreement import Identity
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.crypto.fixed_point import FixedPoint
from cloister.mpc.net.channel import Channel
from cloister.mpc.sums import checked_sum, consistency_check
from cloister.study import CONSENTS, Party
from cloister.workflows.shared_pca import shared_pca
from cloister.workflows.train_classifier.logistic_terms import (
    GRID,
    NAME,
    PATH_ASKS,
    Cells,
    Fitted,
    Labelled,
    Params,
    Terms,
    check_site,
    choose_penalty,
    chosen_values,
    label_codes,
    label_counts,
    moments,
    path_of,
    terms_of,
    unknown_level,
)
from cloister.workflows.train_classifier.openings import (
    Openings,
    Start,
    begin_coordinator,
    begin_site,
    code_for,
    start_cost,
    view_of,
)

CONSENT = "iterative-fit"
OVER = 10  # directions of Ω beyond these
PATH_STEP = 1e-3  # below which the path goes on to the next penalty


def roles(params: Params) -> dict[Party, object]:
    return {params.coordinator: coordinator} | dict.fromkeys(params.sites, site)


def ideal(params: Params, xs: Mapping[Party, Labelled]) -> dict[Party, Fitted]:
    """The tightly converged fit of the pooled cells, nothing encoded and nothing in parts."""
    xs = {u: mine.open_labels(params.min_cells) for u, mine in xs.items()}
    common = () if params.embedding else tuple(genes.genes_in_common({u: c.names for u, c in xs.items()}))
    sums = np.sum([moments(params, mine, common) for mine in xs.values()], axis=0)
    names = tuple(name for mine in xs.values() for name in mine.labels)
    vocabulary = tuple(sorted(params.labels or {name for name in names if name is not None}))
    held = np.concatenate([np.asarray(mine.held, bool) for mine in xs.values()]) & params.held_out
    counts = label_counts(label_codes(names, vocabulary), held, len(vocabulary))
    terms = terms_of(params, sums, counts, vocabulary)
    parts = [chosen_values(params, mine, common, terms.at) for mine in xs.values()]
    x = np.concatenate([x if params.embedding else x.toarray() for x in parts])
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
    hub = params.coordinator
    parts = [checked_sum.cost(checked_sum.Params(params.sites, hub, length)) for length in lengths]
    parts += [*start_cost(params, up, down), consistency_check.cost(view_of(params))]
    return {u: (sum(p[u][0] for p in parts), sum(p[u][1] for p in parts)) for u in (hub, *params.sites)}


# ---- both halves -----------------------------------------------------------------------------------------------------


async def open_terms(openings: Openings, start: Start, words: Callable[[], U64]) -> Terms:
    """L4."""
    params, K = openings.params, len(start.labels)
    width = 1 + 2 * start.columns if params.embedding else 1 + 4 * len(start.common)
    opened = await openings.open("L4", "moments of genes, and cells per label", 2 * width + 2 * K, words)
    sums, counts = opened[: -2 * K], opened[-2 * K :]
    return terms_of(params, shared_pca.join_sum(sums), counts.view(np.int64), start.labels)


async def fit(openings: Openings, terms: Terms, cells: Cells) -> tuple[F64, dict[str, Any]]:
    """L5 to L9: the same at every party, but that S has no cells. Returns θ, and the rest of `Fitted`."""
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
    """L5: V, and the mean variance of a direction outside of it."""
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
        words = await openings.open("L5", what, directions.size, partial(sketch_words, code, directions))
        sketch = openings.decode(code, words, "L5").reshape(shape)
        directions, strength = logistic.principal_basis(sketch, directions, rank), np.linalg.norm(sketch)
        if not np.all(np.isfinite(directions)) or not strength > 0:
            raise ProtocolAbort(NAME, "L5", "absurd", "the labelled cells of all sites do not vary")
    held = float(np.abs((directions * terms.variance[:, None] * directions).sum()))
    return directions, max(0.0, float(terms.variance.sum()) - held) / (h - rank)


async def descend(
    openings: Openings, terms: Terms, rows: Rows, basis: F64, work: Generator[Ask, Any, tuple[F64, bool]]
) -> tuple[F64, bool]:
    """L6, L7: open the sums that L-BFGS asks for, until it is done."""
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
            raise ProtocolAbort(NAME, "L7", "diverged", str(e)) from None
        if ask.curvature:
            what, size = f"Hessian of {K} labels along {r} directions", K * r * (K * r + 1) // 2
            words = await openings.open("L6", what, size, partial(curvature_words, ask.theta))
            answer = openings.decode(curvature, words, "L6")
        else:
            what, size = f"loss and gradient of {ask.theta.size} coefficients", 1 + ask.theta.size
            words = await openings.open("L7", what, size, partial(gradient_words, ask.theta))
            sums = openings.decode(gradient, words, "L7")
            answer = float(sums[0]), sums[1:].reshape(ask.theta.shape)


async def validate(
    openings: Openings, terms: Terms, cells: Cells, points: list[F64]
) -> tuple[int, list[tuple[float, float, float]], float]:
    """L8, L9: which penalty, how each did, and the level of `unknown`."""
    shape = len(points), len(terms.labels)

    def right_answers() -> U64:
        return cells.right_answers(terms, points).astype(np.uint64).ravel()

    what = f"right answers on held-out cells with {len(points)} penalties"
    words = await openings.open("L8", what, math.prod(shape), right_answers)
    right = words.view(np.int64).reshape(shape)
    if np.any(right < 0) or np.any(right > terms.held):
        raise ProtocolAbort(NAME, "L8", "absurd", "more right answers than held-out cells")
    path = path_of(openings.params.penalties, right, terms.held)
    at = choose_penalty(path)

    def answers() -> U64:
        return cells.answers_by_probability(terms, points[at]).astype(np.uint64)

    counts = (await openings.open("L9", "answers by their probability", 2 * GRID, answers)).view(np.int64)
    if np.any(counts < 0) or counts.sum() != terms.held.sum():
        raise ProtocolAbort(NAME, "L9", "absurd", "other answers than held-out cells")
    return at, path, unknown_level(counts, openings.params.unknown_share)


async def label_centers(openings: Openings, terms: Terms, cells: Cells, theta: F64) -> F64:
    """L10."""
    K = len(terms.labels)
    reach = math.sqrt(terms.cells * terms.energy) * float(np.linalg.norm(theta[:-1], axis=0).max())
    code = code_for(openings.params, reach + terms.cells * float(np.abs(theta[-1]).max()))

    def words() -> U64:
        return code.encode(cells.score_sums(terms, theta).ravel())

    sums = openings.decode(code, await openings.open("L10", "scores of each label's cells", K * K, words), "L10")
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


def check_consent(consent: frozenset[str]) -> None:
    """Raise unless this site's own settings allow the iterative fit."""
    if CONSENT not in consent:
        raise RefusedError(
            f'this site does not consent to {CONSENTS[CONSENT]}; add "{CONSENT}" to [approve] consent in site.toml, or '
            "agree on solver='statistics' or dp_noise="
        )


async def site(
    ch: Channel, params: Params, mine: Labelled, *, entropy: Entropy, identity: Identity, consent: frozenset[str]
) -> Fitted:
    """Be u. Returns the classifier."""
    check_consent(consent)
    check_site(params, mine)
    mine = mine.open_labels(params.min_cells)
    start = await begin_site(ch, params, mine, entropy=entropy, identity=identity)  # L1, L2
    sums = moments(params, mine, start.common)  # L3
    held = np.asarray(mine.held, dtype=bool) & params.held_out
    counts = label_counts(label_codes(mine.labels, start.labels), held, len(start.labels))

    def words() -> U64:
        return np.concatenate([shared_pca.split_sum(sums, len(params.sites), entropy), counts.astype(np.uint64)])

    openings = Openings(ch, NAME, params, params.openings, entropy, identity, start.seed)
    terms = await open_terms(openings, start, words)  # L4
    x = chosen_values(params, mine, start.common, terms.at)
    cells = Cells(x, label_codes(mine.labels, terms.labels), held)
    theta, rest = await fit(openings, terms, cells)  # L5 to L10
    await openings.compare()  # L11
    return model_of(terms, start.common, theta, openings.count, rest)


async def coordinator(ch: Channel, params: Params) -> Fitted:
    """Be S: add up, and follow the points."""
    start = await begin_coordinator(ch, params)  # L1, L2
    openings = Openings(ch, NAME, params, params.openings)
    terms = await open_terms(openings, start, lambda: np.zeros(0, np.uint64))  # L4
    nothing = Cells(np.zeros((0, len(terms.mean))), np.zeros(0, np.int64), np.zeros(0, bool))
    theta, rest = await fit(openings, terms, nothing)  # L5 to L10
    await openings.compare()  # L11
    return model_of(terms, start.common, theta, openings.count, rest)
