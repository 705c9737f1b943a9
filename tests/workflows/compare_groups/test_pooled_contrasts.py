import dataclasses
from pathlib import Path

import numpy as np
import pytest
from group_cases import CASES, HUB, NONE, case, plain, same_as_limma, stored, tables

from cloister.errors import DataError, ParameterError, ProtocolAbort
from cloister.models import voom
from cloister.rehearsal.rehearsal import Fault
from cloister.study import Party
from cloister.testing import (
    Case,
    check_ideal,
    check_lies,
    check_no_errors,
    check_vectors,
    run_protocol,
    transcript,
    values,
)
from cloister.workflows.compare_groups import contrast_steps, pooled_contrasts
from cloister.workflows.compare_groups.contrast_terms import Bulk, Params, part_of
from old_steps import contrast_floors

VECTORS = Path(__file__).parents[2] / "vectors" / "pooled_contrasts.json"


LOOSE = {"rtol": 0.03, "atol": 0.03}


def agree(found, ideal, exact=False):
    """Sums of at most 32 samples of a site are rounded to 2^-10; others are exact."""
    assert found.left_out.keys() == ideal.left_out.keys()
    assert [r.label for r in found.results] == [r.label for r in ideal.results]
    for mine, theirs in zip(found.results, ideal.results, strict=True):
        assert (mine.names, mine.donors, mine.df) == (theirs.names, theirs.donors, theirs.df)
        np.testing.assert_allclose(mine.average, theirs.average, rtol=1e-9 if exact else 2e-4)
        for a, b in zip(mine.tested, theirs.tested, strict=True):
            np.testing.assert_allclose(a.effect, b.effect, rtol=1e-8, atol=1e-9 if exact else 2e-3)
            np.testing.assert_allclose(
                np.log(a.p), np.log(b.p), rtol=1e-7 if exact else 0.03, atol=1e-9 if exact else 0.03
            )
            np.testing.assert_allclose(a.fdr, b.fdr, rtol=1e-6 if exact else 0.1)
        if theirs.shares is not None:
            np.testing.assert_allclose(
                mine.shares, theirs.shares, rtol=1e-9 if exact else 0.0, atol=0 if exact else 1e-3
            )


@pytest.mark.parametrize("name", CASES)
def test_equals_limma(name):
    """limma's own answers, stored: coefficients, log p, false discovery rates and priors to 1e-6."""
    c, answer = stored(name)
    (ideal,) = pooled_contrasts.ideal(c.params, plain(c))[HUB].results
    same_as_limma(ideal, answer, c.params)
    run = run_protocol(pooled_contrasts, c)
    check_no_errors(run)
    for found in values(run).values():
        (result,) = found.results
        same_as_limma(result, answer, c.params)


@pytest.mark.parametrize(
    ("options", "exact"),
    [
        ({}, False),
        ({"sites": 2, "block": "donor", "per_group": (4, 4)}, False),
        ({"covariates": True, "per_group": (12, 12), "labels": ("B",), "g": 30}, False),
        ({"per_group": (4, 3, 4), "contrasts": ((2, 1), (1, 0)), "normalise": "library", "transform": "asin"}, False),
        ({"block": "none", "per_group": (5, 5), "labels": ()}, False),
        ({"sites": 2, "per_group": (24, 24), "labels": (), "g": 40}, True),
        ({"covariates": True, "per_group": (4, 4), "labels": ("B",), "thresholds": NONE}, True),
    ],
    ids=["types and shares", "pairs", "covariates", "three groups", "no blocks", "own weights", "nothing excluded"],
)
def test_equals_the_pooled_fit(options, exact):
    check_ideal(pooled_contrasts, [case(seed=3, **options)], agree=lambda a, b: agree(a, b, exact))


def test_exact_sums_would_give_small_counts_away_and_rounded_ones_do_not():
    """Attack: Σ log2(c + ½) over three donors is the logarithm of an integer, which has few divisors."""
    c = case(seed=21, labels=(), per_group=(5, 3), block="none", g=200)
    t, _, _ = before(c, "take_plain")
    part = part_of(t, plain(c)[c.params.sites[0]])
    ones, library = part.group == 1, t.values(part)[1]
    known = np.log2(1e6 / (library[ones] + 1)).sum()  # the attacker knows the libraries, too
    old = contrast_floors.plain(t, part)[0][0] - known  # Σ log2(c + ½) of the three, per gene
    new = contrast_steps.plain(t, part)[0].values[0] - known

    def ways(log, slack):
        low, high = (2.0 ** (log + 3 + d) for d in (-slack, slack))
        found = 0
        for a in range(1, int(high ** (1 / 3)) + 1, 2):
            for b in range(a, int((high / a) ** 0.5) + 1, 2):
                first, last = max(b, int(np.ceil(low / (a * b)))), int(high / (a * b))
                found += (last + 1) // 2 - first // 2
        return found

    counts = part.counts[ones][:, t.keep]
    some = np.flatnonzero((counts.min(axis=0) >= 10) & (counts.max(axis=0) < 200))[:12]
    assert len(some) > 5
    exact = [ways(old[g], 1e-9) for g in some]
    rounded = [ways(new[g], 2.0**-11) for g in some]
    assert min(exact) <= 5
    assert min(rounded) > 20
    assert np.median(rounded) > 300


def test_vectors(monkeypatch):
    """What is added is rounded to 16 bits first: another processor's last digits must not change what is masked."""
    exact = pooled_contrasts.pack
    rounded = lambda x: np.round(x * 2**16) / 2**16  # noqa: E731
    monkeypatch.setattr(pooled_contrasts, "pack", lambda *args: exact(*args).map(rounded))
    c = case(seed=1, g=12, labels=("B", "T"))
    check_vectors(pooled_contrasts, c, VECTORS)


def test_planted_genes_come_out_and_others_do_not():
    c = case(seed=5, per_group=(12, 12), g=200, labels=())
    (result,) = pooled_contrasts.ideal(c.params, plain(c))[HUB].results
    found = {result.names[i] for i in np.flatnonzero(result.tested[0].fdr < 0.05)}
    planted = {f"G{i:03d}" for i in range(20)} & set(result.names)
    assert len(found & planted) >= 0.8 * len(planted)
    assert len(found - planted) <= 0.1 * len(found)


def test_every_party_has_the_same_and_counts_the_openings():
    run = run_protocol(pooled_contrasts, case())
    check_no_errors(run)
    all_found = list(values(run).values())
    first = all_found[0].results[0].tested[0].p
    assert all(np.array_equal(found.results[0].tested[0].p, first) for found in all_found)
    for party, receipt in run.receipts.items():
        opened = [e for e, _ in receipt.entries if e.kind == "opened" and e.protocol == "pooled_contrasts"]
        assert len(opened) == all_found[0].openings == 8
        assert {e.to for e in opened} == {party}


def test_no_value_leaves_but_masked_or_pooled():
    run = run_protocol(pooled_contrasts, case())
    sent = {row[0] for p, rows in transcript(run).items() if p != HUB for row in rows}
    assert sent == {
        "channel.Hello",
        "common_genes.Measured",
        "pooled_contrasts.Brings",
        "same_view.Signature",
        *(f"common_seed.{m}" for m in ("Key", "Parts", "Confirm")),
        "checked_sum.Masked",
    }


def test_cost():
    c = case(seed=1)
    run = run_protocol(pooled_contrasts, c)
    check_no_errors(run)
    lengths = []
    for e, _ in run.receipts[HUB].entries:
        if e.kind == "opened" and e.protocol == "checked_sum" and e.to == HUB:
            lengths.append(int(e.name.rpartition(" ")[2]) - 2)
    names = len("\n".join(next(iter(plain(c).values())).names))
    for party, (messages, payload) in pooled_contrasts.cost(c.params, lengths, names, names).items():
        rows = [r for r in transcript(run)[party] if not r[0].startswith("channel.")]
        assert len(rows) == messages
        total = sum(size for _, _, size in rows)
        assert payload <= total <= payload + 400 * messages + 0.02 * payload


# ---- attacks ---------------------------------------------------------------------------------------------------------


def opened_sums(c, step_name):
    """What one opening of a run shows, as numbers of the first table; and the run's first table after it."""
    shown = {}
    look = pooled_contrasts.take

    def take(step, tables, total):
        if step.line == step_name:
            shown["sums"], at = [], 0
            for shape in step.shapes(tables[0]):
                size = int(np.prod(shape))
                shown["sums"].append(total[at : at + size].reshape(shape))
                at += size
            shown["table"] = tables[0]
        look(step, tables, total)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pooled_contrasts, "take", take)
        check_no_errors(run_protocol(pooled_contrasts, c))
    return shown["sums"], shown["table"]


def lonely(c, group=1):
    """The same case, with a single donor of a group at the last site."""
    u = c.params.sites[-1]
    mine = c.inputs[u][0]
    keep = np.flatnonzero((mine.group != group) | (np.cumsum(mine.group == group) == 1))
    bulks = {k: Bulk(np.arange(len(keep)), b.counts[keep]) for k, b in mine.bulks.items()}
    cells = {k: n[keep] for k, n in mine.cells.items()}
    less = dataclasses.replace(mine, donor=mine.donor[keep], group=mine.group[keep], bulks=bulks, cells=cells)
    return Case(c.params, {**c.inputs, u: (less,)}), u


def table_at_L9(c):
    """The first table as all parties know it when y is added up."""
    return before(c, "take_plain", checked=False)[0]


def test_the_only_donor_of_a_group_at_a_site_is_left_out():
    c, last = lonely(case(seed=8, labels=(), block="none"))
    t, mine = table_at_L9(c), plain(c)[last]
    assert not np.any(part_of(t, mine).group == 1)
    assert part_of(t, mine).excluded == (
        "1 donor of group 'mild': fewer than 3",
        "all 4 samples: 7 sums of a gene are opened, so 8 are needed",
    )


def machines(c, of):
    """A named covariate: site → level of each donor."""
    params = dataclasses.replace(c.params, covariates=("machine",))
    inputs = {u: (dataclasses.replace(d, covariates=(tuple(of[u]),)),) for u, d in plain(c).items()}
    return Case(params, inputs)


def test_F4_a_level_of_three_donors_two_of_them_ours():
    """Attack: a site that follows the protocol subtracts its two donors of a level; the third is another site's."""
    base = case(seed=11, labels=(), per_group=(6, 6), block="none")
    a, b, _ = base.params.sites
    of = {u: ["old"] * 12 for u in base.params.sites}
    of[a][:2], of[b][4:5] = ["new"] * 2, ["new"]
    open_levels = {u: (dataclasses.replace(x, thresholds=NONE),) for u, x in plain(base).items()}
    t = table_at_L9(machines(Case(base.params, open_levels), of))  # all sites name both levels, as the old step did
    at = t.columns.index("machine=old")
    inputs = plain(machines(base, of))
    old = {u: contrast_floors.plain(t, contrast_floors.part_of(t, x)) for u, x in inputs.items()}
    opened, own = sum(total - xy[at] for xy, total in old.values()), old[a][1] - old[a][0][at]
    truth = t.values(contrast_floors.part_of(t, inputs[b]))[0][4]
    np.testing.assert_allclose(opened - own, truth, atol=1e-9)  # every gene of that donor
    part = part_of(t, inputs[b])
    assert 4 not in part.donor
    assert "'machine' = 'new'" in part.excluded[0]
    assert inputs[b].levels() == (("old",),)  # nor is the level's name sent


def test_F4_levels_that_differ_by_one_donor():
    """Attack: groups and levels are large enough, and their difference is one donor."""
    base = case(seed=12, labels=(), per_group=(6, 6), block="none")
    u = base.params.sites[0]
    of = {v: ["x", "y"] * 6 for v in base.params.sites}
    of[u] = ["x"] * 7 + ["y"] * 5  # all of control, and the first of the others
    c = machines(base, of)
    t, mine = table_at_L9(c), plain(c)[u]
    part = contrast_floors.part_of(t, mine)
    xy = contrast_floors.plain(t, part)[0]
    mild, y, one = (xy[t.columns.index(k)] for k in ("mild", "machine=y", "1"))
    truth = t.values(part)[0][6]
    np.testing.assert_allclose(one - y - (one - mild), truth, atol=1e-9)
    kept = part_of(t, mine)
    assert 6 not in kept.donor
    assert kept.donors >= 3 * (1 - 1e-9)


@pytest.mark.parametrize("block", ["site", "none", "donor"])
def test_no_combination_of_sums_comes_close_to_one_donor(block):
    """Whatever covariates a site's donors have: the best linear guess at a donor has a leverage of 1/3 at most."""
    rng = np.random.default_rng(0)
    for seed in range(30):
        c = case(seed=seed, labels=(), per_group=(9, 9), block=block, g=10)
        params = dataclasses.replace(c.params, covariates=("age", "lab"))
        mine = next(iter(plain(c).values()))
        ages = np.round(rng.lognormal(3.5, 1.0, len(mine.group)))
        labs = tuple(rng.choice(["a", "b", "c"], len(mine.group), p=[0.6, 0.3, 0.1]))
        mine = dataclasses.replace(mine, covariates=(ages, labs))
        t = pooled_contrasts.Table(params, "", mine.names, ((), ("a", "b", "c")))
        t.center, t.scale = np.zeros(1), np.ones(1)
        part = part_of(t, mine)
        if not len(part.group):
            continue
        X = t.design(part)
        X = np.column_stack([voom.within(X, part.blocks(block)), X if block == "none" else np.ones(len(X))])
        Q = voom.basis_of(X)
        for donor in np.unique(part.donor):
            assert np.linalg.norm(Q[part.donor == donor], ord=2) ** 2 <= 1 / 3 + 1e-9
        assert len(part.group) > t.opened


def test_F8_a_bent_trend_does_not_single_out_a_donor():
    """Attack: a site shapes the trend so that only the donor with the smallest library has a large weight."""
    c = case(seed=13, labels=(), per_group=(5, 5), sites=2)
    t, _, sums = before(c, "take_plain")
    contrast_steps.take_plain(t, sums)
    mine = plain(c)[c.params.sites[0]]
    part = part_of(t, mine)
    y, library = t.values(part)
    X, blocks = t.design(part), part.blocks("site")
    gene = 0
    count = (voom.fitted_values(X, y, blocks, t.plain.coefficients) + np.log2(library + 1)[:, None])[:, gene] - np.log2(
        1e6
    )
    first, second = np.argsort(count)[:2]
    at = (count[first] + count[second]) / 2
    t.trend = voom.Trend(np.array([0.0, at - 1e-6, at + 1e-6, 60.0]), np.array([0.01, 0.01, 10.0, 10.0]))
    old, r, _ = contrast_floors.weighted(t, part)
    other = X[:, 0] != X[first, 0]  # Σ w x (r - r_first) over the donors of the other group
    sign = 1.0 if X[first, 0] == 0 else -1.0
    read = r[other, gene].mean() - sign * old.xy[0, gene] / (10.0**-4 * other.sum())
    assert abs(read - r[first, gene]) < 1e-4
    fitted = voom.fitted_values(X, y, blocks, t.plain.coefficients)
    weights, donors = contrast_steps.sample_weights(t, part, fitted, library)
    assert np.ptp(weights, axis=0).max() == 0.0  # of all samples here alike
    assert donors.min() >= 3 * (1 - 1e-9)


def test_weights_of_samples_are_used_where_no_donor_stands_out():
    c = case(seed=13, labels=(), per_group=(30, 30), sites=2, g=40)
    t, _, sums = before(c, "take_plain")
    contrast_steps.take_plain(t, sums)
    part = part_of(t, plain(c)[c.params.sites[0]])
    (y, library), X = t.values(part), t.design(part)
    fitted = voom.fitted_values(X, y, part.blocks("site"), t.plain.coefficients)
    weights, donors = contrast_steps.sample_weights(t, part, fitted, library)
    assert 0.5 < (np.ptp(weights, axis=0) > 0).mean() < 1.0
    assert donors.min() >= 3 * (1 - 1e-9)
    for g in np.flatnonzero(np.ptp(weights, axis=0) > 0)[:5]:
        w = weights[:, g]
        centred = X[:, 0] - (w @ X[:, 0]) / w.sum()
        Q = voom.basis_of(np.column_stack([np.ones(len(X)), X, w, w * centred]))
        np.testing.assert_allclose(1 / np.square(Q).sum(axis=1).max(), donors[g], rtol=1e-6)


def test_sums_with_a_common_weight_follow_from_those_opened_before():
    """L10 of a site without weights of samples adds nothing to what L9 says about it."""
    c = case(seed=14, labels=())
    t, _, sums = before(c, "take_plain")
    contrast_steps.take_plain(t, sums)
    part = part_of(t, plain(c)[c.params.sites[0]])
    xx = contrast_steps.design(t, part)[0].values[0]
    xy, yy, total, logs, _ = (p.values for p in contrast_steps.plain(t, part))
    n, beta = len(part.group), t.plain.coefficients
    w = t.trend.weights(total[0] / n + logs[0] / n - np.log2(1e6))
    again = [
        w * xx[0, 0],
        w * (xy[0] - xx[0, 0] * beta[0]),
        w * (yy[0] - 2 * beta[0] * xy[0] + xx[0, 0] * beta[0] ** 2),
    ]
    np.testing.assert_allclose(contrast_steps.weighted(t, part)[0].values, again, rtol=1e-8, atol=1e-9)


def test_F8_no_site_aborts_alone_where_another_hides_its_zeros():
    """Attack: a count of -1 at L7 hides that one honest site lacks a gene, which then had to abort, and was known."""
    c = case(seed=15, labels=())
    t, _, _ = before(c, "take_logs")
    part = part_of(t, plain(c)[c.params.sites[0]])
    counts = part.counts.copy()
    counts[0, t.keep[t.everywhere[0]]] = 0.0
    part = dataclasses.replace(part, counts=counts)
    assert not np.all(np.isfinite(contrast_floors.logs(t, part)))
    for step in contrast_steps.STEPS[3:5]:
        t.mean_log = np.zeros(len(t.everywhere))
        assert all(np.all(np.isfinite(x.values)) for x in step.local(t, part))


def test_a_gene_that_few_donors_of_a_site_have_is_left_out():
    c = case(seed=16, labels=(), per_group=(5, 5), g=40)
    clean = pooled_contrasts.ideal(c.params, plain(c))[HUB].results[0].names
    u, gene = c.params.sites[0], int(clean[0][1:])
    mine = plain(c)[u]
    counts = mine.bulks[""].counts.copy()
    counts[2:, gene] = 0.0
    c = Case(c.params, {**c.inputs, u: (dataclasses.replace(mine, bulks={"": Bulk(mine.bulks[""].rows, counts)}),)})
    run = run_protocol(pooled_contrasts, c)
    check_no_errors(run)
    (result,) = values(run)[HUB].results
    assert clean[0] not in result.names
    assert any("too few donors of a site have them" in note for note in result.notes)
    agree(values(run)[HUB], pooled_contrasts.ideal(c.params, plain(c))[HUB])
    t, _, sums = before(c, "take_zeros")  # a malicious site takes the objection back: this site adds zero
    sums[0][sums[0] > 3] %= 4
    contrast_steps.take_zeros(t, sums)
    t.mean_log, part = np.zeros(len(t.everywhere)), part_of(t, plain(c)[u])
    at = t.names.index(clean[0])
    assert at in t.keep
    assert not contrast_steps.plain(t, part)[0].values[:, list(t.keep).index(at)].any()


def test_receipts_state_effective_donors_and_what_was_left_out_stays_here():
    c, last = lonely(case(seed=8, labels=(), per_group=(6, 6)))
    run = run_protocol(pooled_contrasts, c)
    check_no_errors(run)
    found = values(run)
    assert found[last].excluded == (
        "all cells: 1 donor of group 'mild': fewer than 3",
        "all cells: all 6 samples: 6 sums of a gene are opened, so 7 are needed",
    )
    assert found[HUB].excluded == () == found[c.params.sites[0]].excluded
    assert run.receipts[c.params.sites[0]].smallest_group["donors"] >= 3
    assert "donors" not in run.receipts[last].smallest_group  # nothing was added


def test_the_level_of_a_site_would_be_opened_by_a_column_for_it_and_is_not():
    """Attack: with a column per site in X, an entry of Xᵀy is the sum over that site's donors."""
    c = case(seed=9, labels=())
    sums, table = opened_sums(c, "L9")
    parts = [part_of(table, d) for d in plain(c).values()]
    y = np.concatenate([table.values(p)[0] for p in parts])
    X = np.concatenate([table.design(p) for p in parts])
    site = np.repeat(np.arange(len(parts)), [len(p.group) for p in parts])
    wide = np.hstack([X, np.eye(len(parts))[site]])
    naive = voom.sums_of(wide, y, np.full(len(y), -1))
    np.testing.assert_allclose(naive.xy[1] / naive.xx[1, 1, 0], y[site == 0].mean(axis=0))  # the attack succeeds
    moved = y + np.array([3.0, -2.0, -1.0])[site][:, None]  # other levels of the sites, the same sum over all
    for values_of in (y, moved):
        within = voom.sums_of(X, values_of, site)
        np.testing.assert_allclose(within.xy, sums[0], atol=2e-3)  # sums of three sites, rounded
        np.testing.assert_allclose(within.yy, sums[1], atol=2e-3)
        np.testing.assert_allclose(values_of.sum(axis=0), sums[2], atol=2e-3)


def test_a_covariate_that_marks_one_donor_excludes_this_donor():
    """Attack: a number that is 1 for one donor and 0 for all others makes Xᵀy that donor's expression."""
    c = case(seed=4, labels=(), per_group=(6, 6), block="none")
    params = dataclasses.replace(c.params, covariates=("mark",))
    marks = {u: np.arange(len(d.group)) % 2 * 1.0 for u, d in plain(c).items()}
    u = params.sites[1]
    marks[u] = (np.arange(12) == 3) * 1.0
    inputs = {v: (dataclasses.replace(d, covariates=(marks[v],)),) for v, d in plain(c).items()}
    run = run_protocol(pooled_contrasts, Case(params, inputs))
    check_no_errors(run)
    assert values(run)[u].excluded == ("all cells: 1 donor that groups and covariates set apart from the others here",)
    assert values(run)[HUB].results[0].donors == (17, 18)
    inputs[u] = (dataclasses.replace(inputs[u][0], covariates=()),)
    run = run_protocol(pooled_contrasts, Case(params, inputs), timeout=3.0)
    assert isinstance(run.errors[u], DataError)


def within_one_site(c, level, differs):
    """A covariate that is a level of its own at every site, but for some donors of the first site."""
    params = dataclasses.replace(c.params, covariates=("machine",))
    inputs = {}
    for i, (u, d) in enumerate(plain(c).items()):
        values_of = np.full(len(d.group), float(level * i))
        if i < 2:
            values_of[: differs[i]] += 1.0
        inputs[u] = (dataclasses.replace(d, covariates=(values_of,)),)
    return Case(params, inputs)


def test_a_column_that_varies_at_one_site_would_open_that_sites_own_sums():
    """Attack: levels of sites are taken out, so only the site at which a covariate varies is left in its Xᵀy."""
    c = within_one_site(case(seed=4, labels=(), per_group=(8, 8)), 5, (8, 0))
    c = Case(c.params, {u: (dataclasses.replace(d, thresholds=NONE),) for u, d in plain(c).items()})
    table, _, sums = before(c, "take_plain", checked=False)
    mine = part_of(table, plain(c)[c.params.sites[0]])
    y = table.values(mine)[0]
    np.testing.assert_allclose(sums[0][1], (table.design(mine)[:, 1] - table.design(mine)[:, 1].mean()) @ y)
    assert "'machine' differs at one site only: its sums would be that site's own" in why(
        within_one_site(case(seed=4, labels=(), per_group=(8, 8)), 5, (4, 0))
    )


def test_what_is_opened_is_the_sum_of_what_all_sites_have():
    c = case(seed=6, labels=())
    sums, table = opened_sums(c, "L10")
    parts = [part_of(table, d) for d in plain(c).values()]
    own = [contrast_steps.weighted(table, p)[0].values for p in parts]
    np.testing.assert_allclose(sums[0], np.sum(own, axis=0), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("nth", [0, 5])
def test_a_site_that_dies_ends_the_run_by_name(nth):
    c = case(g=20, labels=())
    faults = [Fault("kill", c.params.sites[0], HUB, "Masked", nth=nth)]
    run = run_protocol(pooled_contrasts, c, faults=faults, timeout=1.5)
    assert not values(run)
    assert all(e.code for e in run.errors.values())


def ask_liars(**how):
    c, twin = (case(seed=s, g=30, labels=()) for s in (5, 6))

    def right(lie, ended):
        for found in ended.values():
            if lie.liar == HUB or lie.letter == "j":
                agree(found, pooled_contrasts.ideal(lie.case.params, plain(lie.case))[HUB])
            else:
                assert all(np.all(np.isfinite(t.p)) for r in found.results for t in r.tested)

    return check_lies(pooled_contrasts, [c, twin], right=right, **how)


def test_one_liar():
    lies = ask_liars()
    assert lies.tried > 12
    assert lies.aborted > 8


@pytest.mark.slow
def test_one_liar_in_every_message():
    lies = ask_liars(full=True, timeout=4.0, within=40.0)
    print(f"\npooled_contrasts: {lies}")
    assert lies.tried > 100
    assert lies.aborted > 60


def before(c, name, checked=True):
    """The table as all know it before a step, the step, and what all sites together add in it."""
    (table,) = tables(c)
    parts = [part_of(table, d) for d in plain(c).values()]
    for step in contrast_steps.STEPS:
        if not step.shapes(table):
            continue
        seen = {}
        ready = step._replace(take=lambda _, sums, seen=seen: seen.update(sums=sums))
        pooled_contrasts.take(ready, [table], pooled_contrasts.added(step, table, parts))
        if step.take.__name__ == name:
            return table, step, seen["sums"]
        step.take(table, seen["sums"])
        if not checked:
            table.left_out = ""
    raise AssertionError(name)


ABSURD = {
    "take_census": [(0, -1.0), (0, 1e9), (1, 0.5), (2, -3.0), (2, np.nan)],
    "take_detected": [(0, -1.0), (0, 25.0), (0, 0.25)],
    "take_zeros": [(0, -1.0), (0, 16.0), (0, 0.5)],
    "take_logs": [(0, 1e5), (0, np.nan)],
    "take_factors": [(0, -1e5), (0, np.inf)],
    "take_design": [(0, 1e15), (0, np.nan), (1, -1.0), (1, 0.5), (1, 4.0)],
    "take_plain": [(0, 1e15), (1, np.nan), (2, np.inf)],
    "take_weighted": [(0, -1.0), (0, 1e17), (0, np.nan)],
}


@pytest.mark.parametrize(("name", "at", "value"), [(n, *row) for n, rows in ABSURD.items() for row in rows])
def test_a_sum_that_no_donors_have_ends_the_run(name, at, value):
    """What a site that lies about its part can make of a sum."""
    table, step, sums = before(case(seed=1, labels=(), g=30), name)
    wrong = [s.copy() for s in sums]
    wrong[at].flat[0] = value
    with pytest.raises(ProtocolAbort) as stopped:
        step.take(table, wrong)
    assert (stopped.value.line, stopped.value.code) == (step.line, "absurd")


@pytest.mark.parametrize(
    "change",
    [
        lambda a: dataclasses.replace(a, labels=a.labels[1:]),
        lambda a: dataclasses.replace(a, labels=a.labels[::-1]),
        lambda a: dataclasses.replace(a, levels=(a.levels[0], a.levels[1][:1])),
        lambda a: dataclasses.replace(a, levels=a.levels[:1]),
    ],
    ids=["a type less", "another order", "a level less", "a covariate less"],
)
def test_a_vocabulary_that_lacks_a_name_ends_the_run(change, monkeypatch):
    look = pooled_contrasts.agree
    monkeypatch.setattr(pooled_contrasts, "agree", lambda *args: change(look(*args)))
    run = run_protocol(pooled_contrasts, case(covariates=True, g=20, per_group=(4, 4), thresholds=NONE), timeout=2.0)
    assert not values(run)
    assert {run.errors[u].code for u in run.agreement.sites} & {"names"}


# ---- floors, and what cannot be compared -----------------------------------------------------------------------------


def moved(c, groups_at):
    """The same donors with other groups: site → group of each donor."""
    inputs = {}
    for u, mine in plain(c).items():
        group = np.array(groups_at[u])
        inputs[u] = (dataclasses.replace(mine, donor=np.arange(len(group)), group=group),)
    return Case(c.params, inputs)


def why(c):
    run = run_protocol(pooled_contrasts, c, timeout=3.0)
    assert not values(run)
    return str(run.errors[HUB])


def test_too_few_donors():
    assert "8 donors of 'control' at sites that have enough of them; 9 are needed" in why(
        case(sites=2, per_group=(4, 4), labels=(), min_donors=9)
    )


def test_a_group_at_one_site_only():
    a, b, d = (Party(f"site-{i}") for i in range(3))
    c = moved(case(labels=()), {a: [0, 0, 0, 0, 1, 1, 1, 1], b: [0] * 8, d: [0] * 8})
    assert "all donors of 'mild' are at one site: group and site cannot be separated" in why(c)


def test_groups_that_never_meet():
    names = [Party(f"site-{i}") for i in range(4)]
    c = moved(case(sites=4, labels=()), {u: [i % 2] * 8 for i, u in enumerate(names)})
    assert "'mild' and another group are together within no site" in why(c)


def test_a_covariate_that_is_the_same_for_all_and_one_that_is_the_group():
    c = case(labels=(), per_group=(6, 6))
    params = dataclasses.replace(c.params, covariates=("x",))
    for values_of, text in (
        (lambda d: np.full(len(d.group), 7.0), "'x' differs within no site; leave this covariate out"),
        (lambda d: d.group.astype(float), "cannot be separated: the design has too low a rank"),
    ):
        inputs = {u: (dataclasses.replace(d, covariates=(values_of(d),)),) for u, d in plain(c).items()}
        assert text in why(Case(params, inputs))


def test_a_number_at_one_site_and_a_name_at_another():
    c = case(labels=())
    params = dataclasses.replace(c.params, covariates=("x",))
    inputs = {u: (dataclasses.replace(d, covariates=(d.group + np.arange(8.0),)),) for u, d in plain(c).items()}
    u = params.sites[1]
    inputs[u] = (dataclasses.replace(inputs[u][0], covariates=(tuple("aaaabbbb"),)),)
    assert "is a number at one site and a name at another" in why(Case(params, inputs))


def test_a_site_with_other_covariates_is_named():
    params = case(covariates=True, g=20).params
    brought = {u: pooled_contrasts.Brings((), ((), ("f", "m"))) for u in params.sites}
    assert pooled_contrasts.agree(params, brought).levels == ((), ("f", "m"))
    brought[params.sites[1]] = pooled_contrasts.Brings((), ((),))
    with pytest.raises(ProtocolAbort, match="site-1 brings other covariates") as stopped:
        pooled_contrasts.agree(params, brought)
    assert stopped.value.code == "covariates"


@pytest.mark.parametrize(
    ("theirs", "code"), [(("B cell", "t_cell"), "spelling"), (("glia", "neuron"), "foreign-labels")]
)
def test_a_site_with_other_names_of_types_is_named(theirs, code):
    params = dataclasses.replace(case(g=20).params, labels=None)
    brought = {u: pooled_contrasts.Brings(("B cell", "T cell"), ()) for u in params.sites}
    assert pooled_contrasts.agree(params, brought).labels == ("B cell", "T cell")
    brought[params.sites[1]] = pooled_contrasts.Brings(theirs, ())
    with pytest.raises(ProtocolAbort, match="site-1") as stopped:
        pooled_contrasts.agree(params, brought)
    assert (stopped.value.code, stopped.value.origin) == (code, "site-1")


def test_a_cell_type_that_few_have_is_left_out_and_the_others_are_compared():
    c = case(seed=2)
    inputs = dict(c.inputs)
    for u in c.params.sites[1:]:
        mine = inputs[u][0]
        inputs[u] = (dataclasses.replace(mine, bulks={"B": mine.bulks["B"]}, cells={"B": mine.cells["B"]}),)
    run = run_protocol(pooled_contrasts, Case(c.params, inputs))
    check_no_errors(run)
    found = values(run)[HUB]
    assert [r.label for r in found.results] == ["B", "composition"]
    assert "all donors of 'control' are at one site" in found.left_out["T"]


def test_a_constant_gene_keeps_its_row_and_is_said():
    c = case(seed=2, labels=(), block="none", normalise="library")
    inputs = {}
    for u, mine in plain(c).items():
        counts = mine.bulks[""].counts.copy()
        counts[:, 0] = 50.0
        counts[:, -1] += 20_000 - counts.sum(axis=1)  # equal libraries: the first gene is the same everywhere
        inputs[u] = (dataclasses.replace(mine, bulks={"": Bulk(mine.bulks[""].rows, counts)}),)
    run = run_protocol(pooled_contrasts, Case(c.params, inputs))
    check_no_errors(run)
    (result,) = values(run)[HUB].results
    at = result.names.index("G000")
    assert abs(result.tested[0].effect[at]) < 1e-9
    assert result.tested[0].p[at] > 0.99
    assert any("do not vary beyond the design" in note for note in result.notes)


def test_no_gene_in_every_donor():
    c = case(seed=2, labels=(), g=40)
    inputs = {}
    for u, mine in plain(c).items():
        counts = mine.bulks[""].counts.copy()
        counts[np.arange(40) % len(counts), np.arange(40)] = 0.0
        inputs[u] = (dataclasses.replace(mine, bulks={"": Bulk(mine.bulks[""].rows, counts)}),)
    bare = Case(dataclasses.replace(c.params, min_count=2.0), inputs)
    run = run_protocol(pooled_contrasts, bare)
    check_no_errors(run)
    (result,) = values(run)[HUB].results
    assert any("normalised by library size only" in note for note in result.notes)
    agree(values(run)[HUB], pooled_contrasts.ideal(bare.params, plain(bare))[HUB])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: dataclasses.replace(m, donor=m.donor[:-1]), "one entry per sample"),
        (lambda m: dataclasses.replace(m, group=m.group + 1), "none of the groups"),
        (lambda m: dataclasses.replace(m, donor=np.zeros_like(m.donor)), "add those of the same donor and group up"),
        (lambda m: dataclasses.replace(m, donor=m.donor % 4), "several groups, which are not independent samples"),
        (lambda m: dataclasses.replace(m, bulks={"": Bulk(m.bulks[""].rows, -m.bulks[""].counts - 1)}), "at least 0"),
    ],
)
def test_bad_input_is_named_to_the_site(change, message):
    c = case(labels=(), g=20)
    u = c.params.sites[0]
    run = run_protocol(pooled_contrasts, Case(c.params, {**c.inputs, u: (change(c.inputs[u][0]),)}), timeout=2.0)
    assert isinstance(run.errors[u], DataError)
    assert message in str(run.errors[u])


@pytest.mark.parametrize(
    "options",
    [
        {"groups": ("a",)},
        {"groups": ("a", "a")},
        {"contrasts": ((1, 1),)},
        {"contrasts": ((2, 0),)},
        {"contrasts": ()},
        {"block": "batch"},
        {"min_donors": 1},
    ],
)
def test_bad_params(options):
    with pytest.raises(ParameterError):
        Params((Party("a"), Party("b")), HUB, **({"groups": ("x", "y")} | options))
