"""What is added up in `pooled_contrasts`, opening by opening, and what every party computes from the sum.

A `Step` is one opening: the shapes of what is added up for a table, which all parties know; what a site contributes;
what follows from the sum. A table that is left out, and one that a step does not apply to, adds nothing. Whether a
party aborts depends on the opened sums alone, which are the same for all. Lines are those of `pooled_contrasts`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from cloister.arrays import F64, I64, Bits
from cloister.disclosure import SLACK, Contribution
from cloister.errors import ProtocolAbort
from cloister.models import voom
from cloister.workflows.compare_groups.contrast_terms import NAME, Params, Part, Result, Table, spanned

MOST_DONORS = 1 << 20
VARIES = 1e-9  # sum of squares of a column that is not the same all over
GENES = 512  # whose leverages are computed at a time
ABSENT = 0.5  # stands for a count of 0 in a logarithm, where a malicious site hid that a gene is not counted

Shapes = list[tuple[int, ...]]


def census_shapes(t: Table) -> Shapes:
    groups, named = len(t.params.groups), sum(map(len, t.levels))
    return [(groups,), (groups,), (2,), (named,), (2, len(t.numeric)), (len(t.names) if t.composition else 0,)]


def census(t: Table, part: Part) -> list[Contribution]:
    rows, k = part.rows, len(t.params.groups)
    donors = np.bincount(part.group, minlength=k).astype(np.float64)
    blocks = part.blocks(t.params.block)
    named = []
    for values, names in zip(part.covariates, t.levels, strict=True):
        place = {name: i for i, name in enumerate(names)}
        codes = np.array([place.get(v, -1) for v in values] if names else [], np.int64)
        if names:
            named.append(rows.grouped(codes, len(names), np.bincount(codes, minlength=len(names)).astype(np.float64)))
    numbers = np.array([part.covariates[i] for i in t.numeric], np.float64).reshape(len(t.numeric), len(part.group))
    sizes = [float(len(set(blocks[blocks >= 0].tolist()))), part.library.sum()]
    squares = np.stack([numbers.sum(axis=1), np.square(numbers).sum(axis=1)])
    return [
        rows.grouped(part.group, k, donors),
        rows.grouped(part.group, k, (donors > 0).astype(np.float64)),
        part.contribution(np.array([sizes])),
        *named,
        part.contribution(squares[None]),
        part.contribution((shown_code(t, part) if t.composition else np.zeros(0))[None]),
    ]


def shown_code(t: Table, part: Part) -> F64:
    """Per cell type: 1 where min_donors donors here have it; sites + 1 where some do, but fewer."""
    donors = part.rows.members(part.counts > 0).donors
    assert donors is not None
    enough = donors >= part.thresholds.min_donors
    return np.asarray(enough + (len(t.params.sites) + 1.0) * part.few)


def decoded(t: Table, line: str, codes: F64) -> tuple[F64, F64]:
    """How many sites said 1, and how many said sites + 1."""
    base = len(t.params.sites) + 1
    check_counts(line, [codes], base * base - 1)
    return codes % base, codes // base


def take_census(t: Table, sums: list[F64]) -> None:
    """L5: whether enough donors of every group and level take part."""
    donors, sites, (blocks, library), named, numbers, present = sums
    check_counts("L5", [donors, sites, np.array([blocks]), named], MOST_DONORS)
    check_real("L5", [numbers, np.array([library])], 2.0**52)
    t.donors, t.blocks = donors.astype(np.int64), round(float(blocks))
    t.left_out = why_too_few(t.params, t.donors, sites)
    counts = iter(named)
    seen = [[(k, round(next(counts))) for k in names] for names in t.levels]
    t.levels = tuple(tuple(k for k, n in levels if n) for levels in seen)
    if t.left_out:
        return
    t.mean_library = max(float(library), 1.0) / t.n
    t.center = numbers[0] / t.n
    spread = np.sqrt(np.maximum(numbers[1] / t.n - np.square(t.center), 0.0))
    t.scale = np.where(spread > 1e-9 * np.abs(t.center), spread, np.inf)  # a constant becomes a column of zeros
    if t.composition:
        sites_with, sites_with_few = decoded(t, "L5", present)
        kept = (sites_with > 0) & (sites_with_few == 0)
        t.keep = np.flatnonzero(kept)
        if rare_types := [k for k, there in zip(t.names, kept, strict=True) if not there]:
            t.notes.append(f"too few donors of a site have {', '.join(rare_types)}")
        if len(t.keep) < 2:
            t.left_out = "fewer than two cell types occur in enough donors"


def why_too_few(params: Params, donors: I64, sites: F64) -> str:
    for name, n, at in zip(params.groups, donors, sites, strict=True):
        if n < params.min_donors:
            return f"{n} donors of '{name}' at sites that have enough of them; {params.min_donors} are needed"
        if at < 2:
            return f"all donors of '{name}' are at one site: group and site cannot be separated"
    return ""


def detected_shapes(t: Table) -> Shapes:
    return [] if t.composition else [(len(t.names),)]


def detected(t: Table, part: Part) -> list[Contribution]:
    """Per gene, samples with enough counts: none where these are of too few donors.

    Where too few others are left, min_donors count as left. Another site can choose the cutoff, by the library that it
    claims.
    """
    enough = voom.often_enough(part.counts, part.library, t.mean_library, t.params.min_count)
    rest, count = part.rows.members(~enough), enough.sum(axis=0).astype(np.float64)
    most = max(len(part.group) - part.thresholds.min_donors, 0)
    count = np.where(rest.open | rest.empty, count, np.minimum(count, most))
    return [part.rows.summed(part.rows.members(enough), count)]


def take_detected(t: Table, sums: list[F64]) -> None:
    """L6: the genes that are compared."""
    check_counts("L6", sums, t.n)
    t.keep = np.flatnonzero(sums[0] >= voom.least_samples(int(t.donors.min())) - 1e-9)
    if len(t.keep) < 2:
        t.left_out = "fewer than two genes are counted often enough; lower min_count= if all agree"


def zeros_shapes(t: Table) -> Shapes:
    return [] if t.composition else [(len(t.keep),)]


def zeros(t: Table, part: Part) -> list[Contribution]:
    """Per compared gene: 1 where some donor here lacks it; sites + 1 more where fewer than min_donors have it."""
    lacking = np.any(part.counts[:, t.keep] == 0, axis=0)
    return [part.rows.whole(lacking + (len(t.params.sites) + 1.0) * part.few[t.keep])]


def take_zeros(t: Table, sums: list[F64]) -> None:
    """L7: genes that one or two donors of a site have are left out; samples are normalised by those that all have."""
    lacking, few = decoded(t, "L7", sums[0])
    if dropped := int((few > 0).sum()):
        t.notes.append(f"{dropped} gene(s) left out: too few donors of a site have them")
    t.keep, lacking = t.keep[few == 0], lacking[few == 0]
    if len(t.keep) < 2:
        t.left_out = "fewer than two genes are counted in enough donors of every site"
    elif t.params.normalise == "rle":
        t.everywhere = np.flatnonzero(lacking == 0)
        if not len(t.everywhere):
            t.notes.append("no gene is counted in every donor: normalised by library size only")


def logs_shapes(t: Table) -> Shapes:
    return [(len(t.everywhere),)] if len(t.everywhere) else []


def logs(t: Table, part: Part) -> list[Contribution]:
    at = t.keep[t.everywhere]
    sums = np.log(np.maximum(part.counts[:, at], ABSENT)).sum(axis=0) * ~part.few[at]
    return [part.contribution(part.rounded(sums))]


def take_logs(t: Table, sums: list[F64]) -> None:
    check_real("L8", sums, 60.0 * t.n)
    t.mean_log = sums[0] / t.n


def factors_shapes(t: Table) -> Shapes:
    return [(1,)] if len(t.everywhere) else []


def factors(t: Table, part: Part) -> list[Contribution]:
    return [part.contribution(part.rounded(np.log(t.factors(part)).sum(keepdims=True)))]


def take_factors(t: Table, sums: list[F64]) -> None:
    check_real("L8", sums, 120.0 * t.n)
    t.log_factor = float(sums[0][0]) / t.n


def design_shapes(t: Table) -> Shapes:
    return [(len(t.columns), len(t.columns)), (len(t.columns),)]


def design(t: Table, part: Part) -> list[Contribution]:
    X = voom.within(t.design(part), part.blocks(t.params.block))
    varies = (np.square(X).sum(axis=0) > VARIES).astype(np.float64)
    return [part.contribution((X.T @ X)[None]), part.contribution(varies)]


def take_design(t: Table, sums: list[F64]) -> None:
    """L9: whether everything can be told apart, and from more than one site, before any y is added up."""
    xx, sites = sums
    check_real("L9", [xx], 2.0**45)
    check_counts("L9", [sites], len(t.params.sites))
    t.xx, df = xx, t.n - len(t.columns) - t.blocks
    alone = [name for name, n in zip(t.columns, sites, strict=True) if n == 1]
    if voom.rank_of(xx) < len(t.columns):
        t.left_out = why_confounded(t, xx)
    elif df < 1:
        t.left_out = f"{t.n} samples are too few for a design of {len(t.columns) + t.blocks} columns"
    elif alone:
        t.left_out = f"'{alone[0]}' differs at one site only: its sums would be that site's own"


def plain_shapes(t: Table) -> Shapes:
    g = len(t.keep)
    return [(len(t.columns), g), (g,), (g,), (1,), (len(t.params.groups), g if t.composition else 0)]


def plain(t: Table, part: Part) -> list[Contribution]:
    xy, yy, total, logs = plain_sums(t, part)
    share, groups = (part.counts / part.library[:, None])[:, t.keep if t.composition else []], len(t.params.groups)
    shares = np.stack([share[part.group == g].sum(axis=0) for g in range(groups)])
    return [
        part.contribution(xy),
        part.contribution(yy[None]),
        part.contribution(total[None]),
        part.contribution(logs),
        part.rows.grouped(part.group, groups, part.rounded(shares * ~part.few[t.keep][: shares.shape[1]])),
    ]


def plain_sums(t: Table, part: Part) -> tuple[F64, F64, F64, F64]:
    """Xᵀy, yᵀy, Σy and Σ log2(ℓf + 1), as this site adds them."""
    y, library = t.values(part)
    s = voom.sums_of(t.design(part), y, part.blocks(t.params.block))
    told = ~part.few[t.keep]  # the others are not compared, unless a malicious site hid that few donors have them
    sums = s.xy * told, s.yy * told, y.sum(axis=0) * told, np.log2(library + 1).sum(keepdims=True)
    xy, yy, total, logs = map(part.rounded, sums)
    return xy, yy, total, logs


def take_plain(t: Table, sums: list[F64]) -> None:
    """L9: the unweighted fit; for counts the trend, for shares the result."""
    xy, yy, total, log_library, share = sums
    check_real("L9", sums, 2.0**45)
    df = t.n - len(t.columns) - t.blocks
    t.average = total / t.n
    fit = voom.fit_of(voom.Sums(t.xx[:, :, None], xy, yy), df, yy + np.square(total) / t.n)
    if flat := int((fit.variance == 0).sum()):
        t.notes.append(f"{flat} row(s) do not vary beyond the design: their spread is that of the others")
    if t.composition:
        t.shares = share / t.donors[:, None]
        t.result = result_of(t, fit)
        return
    t.plain, t.trend = fit, voom.trend_of(t.average, np.sqrt(fit.variance), float(log_library[0]) / t.n)
    if not np.all(t.trend.y > 0):
        t.left_out = "the spread of these genes has no trend that could weigh them"


def why_confounded(t: Table, xx: F64) -> str:
    flat = [c for c, size in zip(t.columns, np.diag(xx), strict=True) if size <= 1e-9]
    where = {"site": "within no site", "donor": "within no donor", "none": "nowhere"}[t.params.block]
    if flat and flat[0] in t.params.groups:
        return f"'{flat[0]}' and another group are together {where}: what differs may as well be the {t.params.block}"
    if flat:
        return f"'{flat[0]}' differs {where}; leave this covariate out"
    return f"groups and covariates ({', '.join(t.columns)}) cannot be separated: the design has too low a rank"


def weighted_shapes(t: Table) -> Shapes:
    q, g = len(t.columns), len(t.keep)
    return [] if t.composition else [(q * (q + 1) // 2 + q + 1, g)]


def weighted(t: Table, part: Part) -> list[Contribution]:
    """Sums of the residuals of the unweighted fit, which keeps their digits."""
    assert t.plain is not None
    upper = np.triu_indices(len(t.columns))
    if not part.exact:
        xx, xy, yy = common_weight_sums(t, part)
        return [part.contribution(np.concatenate([xx[upper], xy, yy[None]]).T).map(lambda x: x.T)]
    (y, library), X, blocks = t.values(part), t.design(part), part.blocks(t.params.block)
    fitted = voom.fitted_values(X, y, blocks, t.plain.coefficients)
    weights, donors = sample_weights(t, part, fitted, library)
    s = voom.sums_of(X, y - fitted, blocks, weights)
    told = ~part.few[t.keep]
    parts = [s.xx[upper] * told, s.xy * told, (s.yy * told)[None]]
    return [part.contribution(np.concatenate(parts).T, donors).map(lambda x: x.T)]


def common_weight_sums(t: Table, part: Part) -> tuple[F64, F64, F64]:
    """XᵀWX, XᵀWr and rᵀWr where all samples here have the weight of their mean: a function of what L9 was given."""
    assert t.plain is not None
    assert t.trend is not None
    n, beta, X = max(len(part.group), 1), t.plain.coefficients, t.design(part)
    xy, yy, total, logs = plain_sums(t, part)
    within = voom.within(X, part.blocks(t.params.block))
    xx = within.T @ within
    fitted = X.sum(axis=0) / n @ beta if t.params.block == "none" else total / n
    w = t.trend.weights(fitted + logs[0] / n - np.log2(1e6)) * ~part.few[t.keep]
    rest = np.maximum(yy - 2 * (beta * xy).sum(axis=0) + np.einsum("ig,ij,jg->g", beta, xx, beta), 0.0)
    return w * xx[:, :, None], w * (xy - xx @ beta), w * rest


def sample_weights(t: Table, part: Part, fitted: F64, library: F64) -> tuple[F64, F64]:
    """Weights of the samples, (n, g), and the effective number of donors behind the sums of each gene.

    Weights that differ from sample to sample make XᵀWy a further combination of samples, which another site can bend by
    its part of the trend. Where there are too few samples for the further sums, or a donor's leverage in all opened
    combinations of the gene exceeded 1 / min_donors, all samples of this site have the weight that the trend gives to
    their mean.
    """
    assert t.trend is not None
    logs = np.log2(library + 1)
    own = t.trend.weights(fitted + logs[:, None] - np.log2(1e6))
    donors = np.full(own.shape[1], part.donors)
    if part.thresholds.min_donors == 1 or not len(own):
        return own, donors
    common = t.trend.weights(fitted.mean(axis=0) + logs.mean() - np.log2(1e6))
    use: Bits = np.zeros(own.shape[1], bool)
    if part.exact and len(own) > t.opened_weighted:
        sizes = donors_with(t, part, own)
        use = sizes >= part.thresholds.min_donors * (1 - SLACK)
        donors = np.where(use, sizes, donors)
    return np.where(use, own, common), donors


def donors_with(t: Table, part: Part, weights: F64) -> F64:
    """Per gene 1 / the largest leverage of a donor in the sums of L9 and L10 together."""
    Q, X, blocks = voom.basis_of(spanned(t.params, part)), t.design(part), part.blocks(t.params.block)
    sizes = np.empty(weights.shape[1])
    for start in range(0, len(sizes), GENES):
        cut = slice(start, start + GENES)
        V = voom.weighted_columns(X, blocks, weights[:, cut])
        whole = np.linalg.norm(V, axis=1)
        V -= Q @ (Q.T @ V)
        further, R = np.linalg.qr(V)
        new = np.abs(np.diagonal(R, axis1=1, axis2=2)) > 1e-9 * whole
        both = np.concatenate([np.broadcast_to(Q, (len(V), *Q.shape)), further * new[:, None]], axis=2)
        sizes[cut] = 1 / voom.leverages(both, part.donor)[1].max(axis=1)
    return sizes


def take_weighted(t: Table, sums: list[F64]) -> None:
    """L10: the weighted fit."""
    assert t.plain is not None
    check_real("L10", sums, 2.0**52)
    q, half = len(t.columns), len(t.columns) * (len(t.columns) + 1) // 2
    upper, xy, yy = sums[0][:half], sums[0][half:-1], sums[0][-1]
    xx = np.zeros((q, q, len(t.keep)))
    i, j = np.triu_indices(q)
    xx[i, j], xx[j, i] = upper, upper
    if not np.all(np.linalg.eigvalsh(np.moveaxis(xx, 2, 0))[:, 0] > 0):
        raise ProtocolAbort(NAME, "L10", "absurd", "weighted sums that no donors can have: a site's input is wrong")
    fit = voom.fit_of(voom.Sums(xx, xy, yy), t.plain.df)
    t.result = result_of(t, replace(fit, coefficients=fit.coefficients + t.plain.coefficients))


def result_of(t: Table, fit: voom.Fit) -> Result:
    prior = voom.prior_of(fit.variance, fit.df)
    tested = tuple(voom.test(fit, t.params.vector(c, len(t.columns)), prior) for c in t.params.contrasts)
    names, donors = tuple(t.names[i] for i in t.keep), tuple(int(n) for n in t.donors)
    return Result(
        t.label, t.composition, names, t.average, tested, donors, fit.df, prior, t.trend, t.shares, tuple(t.notes)
    )


def check_counts(line: str, sums: list[F64], most: float) -> None:
    if not all(np.all((s >= 0) & (s <= most) & (s == np.rint(s))) for s in sums):
        raise ProtocolAbort(NAME, line, "absurd", "counts that no donors can have: a site's input is wrong")


def check_real(line: str, sums: list[F64], most: float) -> None:
    if not all(np.all(np.abs(s) <= most) for s in sums):
        raise ProtocolAbort(NAME, line, "absurd", "a sum is larger than all donors together can give")


class Step(NamedTuple):
    line: str
    what: str
    shapes: Callable[[Table], Shapes]
    local: Callable[[Table, Part], list[Contribution]]
    take: Callable[[Table, list[F64]], None]


STEPS = (
    Step("L5", "donors per group, and sizes", census_shapes, census, take_census),
    Step("L6", "donors in which each gene is counted often", detected_shapes, detected, take_detected),
    Step("L7", "sites where a compared gene is not counted in all donors, or in few", zeros_shapes, zeros, take_zeros),
    Step("L8", "log counts of genes that all donors have", logs_shapes, logs, take_logs),
    Step("L8", "log size factors", factors_shapes, factors, take_factors),
    Step("L9", "the design, and at how many sites it varies", design_shapes, design, take_design),
    Step("L9", "least squares", plain_shapes, plain, take_plain),
    Step("L10", "weighted least squares", weighted_shapes, weighted, take_weighted),
)
