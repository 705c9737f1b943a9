"""Counts of single donors from the sums of compare-groups: a joint fit of libraries and counts, and the cutoff of L6.

One malicious site claims a huge library, so that every gene is compared, and subtracts its part. An honest site with
seven donors adds Σy, Xᵀy and yᵀy of each gene and Σ log2 of libraries, rounded to 2^-10. With q = log2(2c + 1), the
sums of q per group are logarithms of products of odd numbers. That gives the sum of the libraries in each group, and
for each gene a list of candidates. Across genes, yᵀy is one function of seven libraries, which a search finds.
"""

import dataclasses
import functools

import numpy as np

from cloister.disclosure import Thresholds
from cloister.models import voom
from cloister.study import Party
from cloister.workflows.compare_groups import contrast_steps
from cloister.workflows.compare_groups.contrast_terms import (
    GRAIN,
    LEAST_COUNT,
    Bulk,
    Donors,
    Params,
    Part,
    Table,
    part_of,
)

SITES, HUB = tuple(map(Party, "abc")), Party("hub")
CASE = np.array([0, 0, 0, 0, 1, 1, 1], bool)
LARGEST = np.log2(350)  # product of a group's odd numbers that candidates are listed for


def honest(seed=0, genes=1500, mean=0.6):
    """A table in which all genes are compared, and seven donors of few cells each."""
    rng = np.random.default_rng(seed)
    library = np.rint(np.exp(rng.normal(np.log(20_000), 0.5, 7)))
    counts = rng.poisson(
        rng.lognormal(np.log(mean), 0.6, genes) * library[:, None] / 20_000 * rng.gamma(8, 1 / 8, (7, genes))
    )
    counts = counts[:, (counts > 0).sum(axis=0) >= 3].astype(np.float64)
    params = Params(SITES, HUB, ("control", "case"), normalise="library")
    t = Table(params, "", tuple(f"G{i}" for i in range(counts.shape[1])), ())
    t.keep = np.arange(counts.shape[1])
    part = Part(np.arange(7), CASE.astype(np.int64), (), counts, library, np.full(7, 50), Thresholds(), 3.5)
    return t, part


@functools.cache
def products(p, k):
    """Ordered ways to write p as a product of k numbers."""
    return (
        [(p,)] if k == 1 else [(d, *rest) for d in range(1, p + 1, 2) if p % d == 0 for rest in products(p // d, k - 1)]
    )


def ways(log, k):
    near = [p for p in range(1, int(2 ** (log + 0.01)) + 2, 2) if abs(np.log2(p) - log) <= 2.2 * GRAIN]
    return np.array([w for p in near for w in products(p, k)], float).reshape(-1, k)


def group_sum(logs):
    """The constant that makes all of these logarithms of odd numbers."""

    def score(a):
        p = 2 ** (logs + a)[logs + a < np.log2(60)]
        width = p * np.log(2) * 1.3 * GRAIN
        hit = np.abs(p - (2 * np.round((p - 1) / 2) + 1)) < width
        return hit.sum() - np.clip(2 * width, 0, 1).sum()

    first = -logs.min() - GRAIN
    return max(np.arange(first, first + 8, GRAIN / 2), key=score)


def read(xy, yy, total, logs, rng):
    """Per gene, the counts of all seven donors, and which genes have been read."""
    constant = np.log2(1e6 / 2)
    case = xy[0] + CASE.mean() * total - 3 * constant
    a_case = group_sum(case)
    both = case + a_case, total + logs[0] - 7 * constant - case - a_case  # Σq of cases, of controls
    found = {}
    for g in np.flatnonzero((both[0] < LARGEST) & (both[1] < LARGEST)):
        cases, controls = ways(both[0][g], 3), ways(both[1][g], 4)
        q = np.hstack([np.repeat(controls, len(cases), axis=0), np.tile(cases, (len(controls), 1))])
        if 0 < len(q) <= 20_000:
            found[g] = np.log2(q[(q > 1).sum(axis=1) >= 3])
    found = {g: q for g, q in found.items() if len(q)}
    few = sorted(found, key=lambda g: len(found[g]))[:100]
    q = np.concatenate([found[g] for g in few])
    q, sizes = q - q.mean(axis=1, keepdims=True), [len(found[g]) for g in few]
    starts, observed = np.cumsum([0, *sizes[:-1]]), np.repeat(yy[few], sizes)

    def centred(a):
        a[:, CASE] += (a_case / 3 - a[:, CASE].mean(axis=1))[:, None]
        a[:, ~CASE] += ((logs[0] - a_case) / 4 - a[:, ~CASE].mean(axis=1))[:, None]
        return a

    def costs(a, width):
        d = a - a.mean(axis=1, keepdims=True)
        miss = np.square(q).sum(axis=1)[:, None] - 2 * q @ d.T + np.square(d).sum(axis=1) - observed[:, None]
        least = np.square(np.minimum.reduceat(np.abs(miss), starts, axis=0))
        return (least / (least + width**2)).mean(axis=0)

    a, width, spread = centred(rng.normal(0, 0.6, (3000, 7))), 0.05, 0.15
    a = a[np.argsort(costs(a, width))[:60]]
    while width > GRAIN / 4:
        for _ in range(14):
            step = spread * rng.choice([1, 0.3, 0.1], (480, 1)) * (rng.random((480, 7)) < 0.5)
            a = np.concatenate([a, centred(np.repeat(a, 8, axis=0) + rng.normal(size=(480, 7)) * step)])
            a = a[np.argsort(costs(a, width))[:60]]
        width, spread = 0.6 * width, 0.7 * spread
    guess = {}
    for g, q in found.items():
        v = q - a[0]
        fits = np.square(v - v.mean(axis=1, keepdims=True)).sum(axis=1)
        guess[g] = np.rint((2 ** q[np.abs(fits - yy[g]).argmin()] - 1) / 2)
    return guess, a[0]


def in_order(library, counts):
    """Donors are known up to their order in a group: by library."""
    order = np.concatenate([np.flatnonzero(~CASE)[np.argsort(library[~CASE])], 4 + np.argsort(library[CASE])])
    return counts[order]


def test_small_counts_and_libraries_would_follow_from_rounded_sums():
    """The old rule, three donors with one count: every donor's counts in nine of ten of the genes with few counts."""
    t, part = honest()
    guess, a = read(*contrast_steps.plain_sums(t, dataclasses.replace(part, least_count=1.0)), np.random.default_rng(1))
    assert len(guess) > 800
    right = [np.array_equal(in_order(a, c), in_order(part.library, part.counts[:, g])) for g, c in guess.items()]
    assert np.mean(right) > 0.9


def test_a_site_adds_nothing_for_genes_of_small_counts():
    t, part = honest(mean=3.0)
    bulk = Bulk(np.arange(7), part.counts, part.cells)
    part = part_of(t, Donors(t.names, part.donor, part.group, (), {"": bulk}, {}))
    assert len(part.group) == 7
    large = (part.counts >= LEAST_COUNT).sum(axis=0) >= 3
    assert 20 < large.sum() < 0.2 * len(large)
    xy, yy, total, _ = contrast_steps.plain_sums(t, part)
    for sums in (xy[0], yy, total):
        assert not sums[~large].any()
        assert sums[large].all()


def test_a_cutoff_of_another_sites_choice_counts_no_single_donor():
    """L6: a site that claims a huge, or a tiny library has the others count donors above a cutoff that it chooses."""
    t, part = honest()
    seen = set()
    for mean_library in (1e12, 2e5, 5e4, 2e4):
        t.mean_library = mean_library
        before = voom.often_enough(part.counts, part.library, mean_library, t.params.min_count).sum(axis=0)
        seen |= set(before.tolist())
        now = contrast_steps.detected(t, part)[0].values
        assert set(now.tolist()) <= {0.0, 3.0, 4.0, 7.0}
        assert not now[before < 3].any()
        assert np.array_equal(now[before == 3], before[before == 3])
        assert np.all(now[(before > 3) & (before < 7)] == 4)
    assert {1, 2, 5, 6} <= seen
