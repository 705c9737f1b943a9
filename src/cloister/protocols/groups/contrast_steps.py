"""What is added up in `pooled_contrasts`, opening by opening, and what every party makes of the sum.

A `Step` is one opening: the shapes of what is added up for a table, which all parties know; what a site adds; what
follows from the sum. A table that is left out, and one that a step is not for, adds nothing. Lines are those of
`pooled_contrasts`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from cloister.arrays import F64, I64
from cloister.errors import ProtocolAbort
from cloister.models import voom
from cloister.protocols.groups.contrast_terms import NAME, SITE_DONORS, Params, Part, Result, Table

MOST_DONORS = 1 << 20
ONE_DONOR = 2 / 3  # share of a column's sum of squares that one donor may have
VARIES = 1e-9  # sum of squares of a column that is not the same all over

Shapes = list[tuple[int, ...]]


def census_shapes(t: Table) -> Shapes:
    groups, named = len(t.params.groups), sum(map(len, t.levels))
    return [(groups,), (groups,), (1,), (1,), (named,), (2, len(t.numeric)), (len(t.names) if t.composition else 0,)]


def census(t: Table, part: Part) -> list[F64]:
    donors = np.bincount(part.group, minlength=len(t.params.groups)).astype(np.float64)
    blocks = part.blocks(t.params.block)
    pairs = zip(part.covariates, t.levels, strict=True)
    named = [float(sum(v == k for v in values)) for values, names in pairs for k in names]
    numbers = np.array([part.covariates[i] for i in t.numeric], np.float64).reshape(len(t.numeric), len(part.group))
    present = (part.counts > 0).sum(axis=0).astype(np.float64) if t.composition else np.zeros(0)
    return [
        donors,
        (donors > 0).astype(np.float64),
        np.array([float(len(set(blocks[blocks >= 0].tolist())))]),
        np.array([part.library.sum()]),
        np.array(named),
        np.stack([numbers.sum(axis=1), np.square(numbers).sum(axis=1)]),
        present,
    ]


def take_census(t: Table, sums: list[F64]) -> None:
    """L5: the floors."""
    donors, sites, blocks, library, named, numbers, present = sums
    check_counts("L5", [donors, sites, blocks, named, present], MOST_DONORS)
    t.donors, t.blocks = donors.astype(np.int64), round(float(blocks[0]))
    t.left_out = why_too_few(t.params, t.donors, sites)
    counts = iter(named)
    seen = [[(k, round(next(counts))) for k in names] for names in t.levels]
    for covariate, levels in zip(t.params.covariates, seen, strict=True):
        rare = [k for k, n in levels if 0 < n < t.params.min_donors]
        if rare and not t.left_out:
            t.left_out = f"fewer than {t.params.min_donors} donors have '{rare[0]}' as their '{covariate}'"
    t.levels = tuple(tuple(k for k, n in levels if n) for levels in seen)
    if t.left_out:
        return
    t.mean_library = float(library[0]) / t.n
    t.center = numbers[0] / t.n
    spread = np.sqrt(np.maximum(numbers[1] / t.n - np.square(t.center), 0.0))
    t.scale = np.where(spread > 1e-9 * np.abs(t.center), spread, np.inf)  # a constant becomes a column of zeros
    if t.composition:
        t.keep = np.flatnonzero(present >= t.params.min_donors)
        rare_types = [k for k, n in zip(t.names, present, strict=True) if n < t.params.min_donors]
        if rare_types:
            t.notes.append(f"too few donors have {', '.join(rare_types)}")
        if len(t.keep) < 2:
            t.left_out = "fewer than two cell types occur in enough donors"


def why_too_few(params: Params, donors: I64, sites: F64) -> str:
    for name, n, at in zip(params.groups, donors, sites, strict=True):
        if n < params.min_donors:
            return (
                f"{n} donors of '{name}' at sites with at least {SITE_DONORS} of them; {params.min_donors} are needed"
            )
        if at < 2:
            return f"all donors of '{name}' are at one site: the group cannot be told from the site"
    return ""


def detected_shapes(t: Table) -> Shapes:
    return [] if t.composition else [(len(t.names),)]


def detected(t: Table, part: Part) -> list[F64]:
    enough = voom.often_enough(part.counts, part.library, t.mean_library, t.params.min_count)
    return [enough.sum(axis=0).astype(np.float64)]


def take_detected(t: Table, sums: list[F64]) -> None:
    """L6: the genes that are compared."""
    check_counts("L6", sums, t.n)
    t.keep = np.flatnonzero(sums[0] >= voom.least_samples(int(t.donors.min())) - 1e-9)
    if len(t.keep) < 2:
        t.left_out = "fewer than two genes are counted often enough; lower min_count= if all agree"


def zeros_shapes(t: Table) -> Shapes:
    return [] if t.composition or t.params.normalise == "library" else [(len(t.keep),)]


def zeros(t: Table, part: Part) -> list[F64]:
    return [(part.counts[:, t.keep] == 0).sum(axis=0).astype(np.float64)]


def take_zeros(t: Table, sums: list[F64]) -> None:
    """L7: the genes that samples are normalised by."""
    check_counts("L7", sums, t.n)
    t.everywhere = np.flatnonzero(sums[0] == 0)
    if not len(t.everywhere):
        t.notes.append("no gene is counted in every donor: normalised by library size only")


def logs_shapes(t: Table) -> Shapes:
    return [(len(t.everywhere),)] if len(t.everywhere) else []


def logs(t: Table, part: Part) -> list[F64]:
    return [np.log(part.counts[:, t.keep[t.everywhere]]).sum(axis=0)]


def take_logs(t: Table, sums: list[F64]) -> None:
    check_real("L8", sums, 60.0 * t.n)
    t.mean_log = sums[0] / t.n


def factors_shapes(t: Table) -> Shapes:
    return [(1,)] if len(t.everywhere) else []


def factors(t: Table, part: Part) -> list[F64]:
    return [np.log(t.factors(part)).sum(keepdims=True)]


def take_factors(t: Table, sums: list[F64]) -> None:
    check_real("L8", sums, 120.0 * t.n)
    t.log_factor = float(sums[0][0]) / t.n


def design_shapes(t: Table) -> Shapes:
    return [(len(t.columns), len(t.columns)), (len(t.columns),)]


def design(t: Table, part: Part) -> list[F64]:
    X = voom.within(t.design(part), part.blocks(t.params.block))
    return [X.T @ X, (np.square(X).sum(axis=0) > VARIES).astype(np.float64)]


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


def check_one_donor(t: Table, part: Part) -> None:
    """L9: Xᵀy would be one donor's y if a column were 0 for all others."""
    X = voom.within(t.design(part), part.blocks(t.params.block))
    share = np.square(X) / np.diag(t.xx)
    if np.any(share > ONE_DONOR):
        name = t.columns[int(np.argmax(share.max(axis=0)))]
        text = f"one donor here has almost all that differs in '{name}'; leave this covariate out"
        raise ProtocolAbort(NAME, "L9", "one-donor", text)


def plain_shapes(t: Table) -> Shapes:
    g = len(t.keep)
    return [(len(t.columns), g), (g,), (g,), (1,), (len(t.params.groups), g if t.composition else 0)]


def plain(t: Table, part: Part) -> list[F64]:
    check_one_donor(t, part)
    (y, library), groups = t.values(part), range(len(t.params.groups))
    s = voom.sums_of(t.design(part), y, part.blocks(t.params.block))
    share = (part.counts / part.library[:, None])[:, t.keep if t.composition else []]
    return [
        s.xy,
        s.yy,
        y.sum(axis=0),
        np.log2(library + 1).sum(keepdims=True),
        np.stack([share[part.group == g].sum(axis=0) for g in groups]),
    ]


def take_plain(t: Table, sums: list[F64]) -> None:
    """L9: the unweighted fit; for counts the trend, for shares the result."""
    xy, yy, total, log_library, share = sums
    check_real("L9", sums, 2.0**45)
    q, df = len(t.columns), t.n - len(t.columns) - t.blocks
    t.average = total / t.n
    fit = voom.fit_of(voom.Sums(t.xx[:, :, None], xy, yy), df, yy + np.square(total) / t.n)
    if flat := int((fit.variance == 0).sum()):
        t.notes.append(f"{flat} row(s) do not vary beyond the design: their spread is that of the others")
    if t.composition:
        t.shares = share / t.donors[:, None]
        t.result = result_of(t, fit)
        return
    if t.n <= (opened := 6 + q * (q + 5) // 2):
        t.notes.append(f"{opened} sums per gene over {t.n} samples: in principle these tell the counts of each")
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
    return f"groups and covariates ({', '.join(t.columns)}) cannot be told apart: the design has too low a rank"


def weighted_shapes(t: Table) -> Shapes:
    q, g = len(t.columns), len(t.keep)
    return [] if t.composition else [(q * (q + 1) // 2, g), (q, g), (g,)]


def weighted(t: Table, part: Part) -> list[F64]:
    """Sums of what the unweighted fit leaves over, which keeps their digits."""
    assert t.plain is not None
    assert t.trend is not None
    (y, library), X, blocks = t.values(part), t.design(part), part.blocks(t.params.block)
    fitted = voom.fitted_values(X, y, blocks, t.plain.coefficients)
    weights = t.trend.weights(fitted + np.log2(library + 1)[:, None] - np.log2(1e6))
    s = voom.sums_of(X, y - fitted, blocks, weights)
    return [s.xx[np.triu_indices(X.shape[1])], s.xy, s.yy]


def take_weighted(t: Table, sums: list[F64]) -> None:
    """L10: the weighted fit."""
    assert t.plain is not None
    check_real("L10", sums, 2.0**52)
    q, (upper, xy, yy) = len(t.columns), sums
    xx = np.zeros((q, q, len(t.keep)))
    i, j = np.triu_indices(q)
    xx[i, j], xx[j, i] = upper, upper
    if not np.all(np.linalg.eigvalsh(np.moveaxis(xx, 2, 0))[:, 0] > 0):
        raise ProtocolAbort(NAME, "L10", "absurd", "weighted sums that no donors have: somebody lies")
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
        raise ProtocolAbort(NAME, line, "absurd", "counts that no donors have: somebody lies")


def check_real(line: str, sums: list[F64], most: float) -> None:
    if not all(np.all(np.abs(s) <= most) for s in sums):
        raise ProtocolAbort(NAME, line, "absurd", "a sum is larger than all donors together can give")


class Step(NamedTuple):
    line: str
    what: str
    shapes: Callable[[Table], Shapes]
    local: Callable[[Table, Part], list[F64]]
    take: Callable[[Table, list[F64]], None]


STEPS = (
    Step("L5", "donors per group, and sizes", census_shapes, census, take_census),
    Step("L6", "donors in which each gene is counted often", detected_shapes, detected, take_detected),
    Step("L7", "donors in which a compared gene is not counted", zeros_shapes, zeros, take_zeros),
    Step("L8", "log counts of genes that all donors have", logs_shapes, logs, take_logs),
    Step("L8", "log size factors", factors_shapes, factors, take_factors),
    Step("L9", "the design, and at how many sites it varies", design_shapes, design, take_design),
    Step("L9", "least squares", plain_shapes, plain, take_plain),
    Step("L10", "weighted least squares", weighted_shapes, weighted, take_weighted),
)
