"""The five questions. Sizes of messages follow from the opened ranges, so view and cost are asked for given ones."""

from pathlib import Path

import numpy as np
import pytest

from cloister.disclosure import Thresholds
from cloister.errors import ParameterError
from cloister.models import isolation_forest as iforest
from cloister.mpc.sums import checked_sum, common_seed, consistency_check, pooled_scaling
from cloister.mpc.sums.pooled_queries import Plain, lanes_of
from cloister.rehearsal.rehearsal import Fault
from cloister.study import Party
from cloister.testing import (
    FRAMING,
    Case,
    check_no_errors,
    check_vectors,
    fixed_entropy,
    run_protocol,
    transcript,
    values,
)
from cloister.workflows.common import common_genes
from cloister.workflows.find_outliers import counted_forest
from cloister.workflows.find_outliers.counted_forest import Params
from cloister.workflows.find_outliers.node_ranges import Grid

HUB = Party("hub")
SITES = tuple(Party(f"site-{i}") for i in range(3))
NAMES = ["a", "b", "c", "d"]


def rows(n=120, seed=0, d=4):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, d))
    X[:6] *= 6
    return X


def case(X=None, cuts=(40, 80), seed=0, **options):
    X = rows(seed=seed) if X is None else X
    params = Params(SITES, HUB, **{"trees": 5, "sample": 128, "min_cells": 4, **options})
    parts = np.split(X, cuts)
    return Case(params, {u: ("table", NAMES[: X.shape[1]], p) for u, p in zip(SITES, parts, strict=True)})


def parts_of(c):
    return [c.inputs[u][2] for u in SITES]


def same_forest(one, two):
    for a, b in zip(one, two, strict=True):
        assert len(a.steps) == len(b.steps)
        for s, t in zip(a.steps, b.steps, strict=True):
            np.testing.assert_array_equal(s.nodes, t.nodes)
            np.testing.assert_allclose(s.cut, t.cut)
            np.testing.assert_allclose(s.low, t.low)


@pytest.mark.parametrize(
    "options", [{}, {"forest": "extended"}, {"forest": "extended", "extension": 1}, {"repeats": 2, "min_cells": 8}]
)
def test_ideal_what_is_opened_is_what_the_sites_rows_give(options, monkeypatch):
    """All rows are in every tree (N < ψ), so the seed and the coins of the run decide the forest."""
    monkeypatch.setattr(counted_forest, "EXTENDED_SHARE", 1.0)
    coins, kept = [], Plain.total

    async def note(ask, parts, length, most, *, line, what):
        counts, coin = await asking(ask, parts, length, most, line=line, what=what)
        if ask.seed is None and line == "L5":
            coins.append(coin)
        return counts, coin

    asking = counted_forest.Asking.total
    monkeypatch.setattr(counted_forest.Asking, "total", note)
    c = case(**options)
    run = run_protocol(counted_forest, c)
    check_no_errors(run)
    found = {u: values(run)[u] for u in SITES}

    class Again(Plain):
        async def total(self, parts, length, most, *, line, what):
            counts, _ = await kept(self, parts, length, most, line=line, what=what)
            return counts, coins[self.asked - 1]

    one = found[SITES[0]]
    rng = np.random.default_rng(0)
    outline, geometry = counted_forest.grow_plainly(c.params, one.scaling, parts_of(c), one.secret, rng, totals=Again())
    wanted = counted_forest.finish(c.params, geometry.steps, outline.depth, 120)
    for u, got in found.items():
        same_forest(got.forests, wanted)
        Z = counted_forest.on_scale(c.params, got.scaling, c.inputs[u][2])
        np.testing.assert_allclose(got.scores, [f.score(Z) for f in wanted])
    for a, b in zip(values(run)[HUB].ranges, outline.ranges, strict=True):
        np.testing.assert_array_equal(np.concatenate(a), np.concatenate(b))


def test_scaling_is_that_of_the_sites_rows_within_their_fences():
    c = case()
    run = run_protocol(counted_forest, c)
    check_no_errors(run)
    wanted = pooled_scaling.fenced_scaling(parts_of(c), Thresholds(4, 3))
    np.testing.assert_allclose(values(run)[SITES[0]].scaling.mean, wanted.mean, atol=1e-6)
    np.testing.assert_allclose(values(run)[SITES[0]].scaling.scale, wanted.scale, rtol=1e-5)


def test_vectors():
    check_vectors(counted_forest, case(trees=2), Path(__file__).parents[2] / "vectors" / "counted_forest.json")


def test_outliers_score_high():
    c = case(rows(900), cuts=(300, 600), trees=50, min_cells=10, sample=256)
    run = run_protocol(counted_forest, c)
    check_no_errors(run)
    scores = np.concatenate([values(run)[u].scores[0] for u in SITES])
    assert np.sort(scores)[-12:].min() > np.median(scores) + 0.05
    assert (np.argsort(-scores)[:12] < 6).sum() >= 4  # the planted ones are the first six rows


def groups_of(run, site):
    """The smallest groups behind each contribution, from the receipt."""
    said = [e.name.split(" | ")[1:] for e, _ in run.receipts[site].entries if e.kind == "contributed"]
    assert len(said) > 8
    return [{name: int(size) for name, size in (part.rsplit(" ", 1) for part in parts)} for parts in said]


def test_a_site_may_raise_its_own_thresholds():
    c = case(trees=3)
    inputs = dict(c.inputs)
    inputs[SITES[0]] = (*c.inputs[SITES[0]], None, Thresholds(20, 3))
    run = run_protocol(counted_forest, Case(c.params, inputs))
    check_no_errors(run)
    assert min(s["cells"] for s in groups_of(run, SITES[0]) if "cells" in s) >= 20
    assert min(s["cells"] for s in groups_of(run, SITES[1]) if "cells" in s) < 20
    lower = (*c.inputs[SITES[0]], None, Thresholds(2, 2))
    assert counted_forest.raised(c.params, lower[-1]) == Thresholds(4, 3)


def test_sampling_is_private_and_of_the_asked_size():
    params = Params(SITES, HUB, trees=400, sample=64)
    Z = rows(300)
    sample = counted_forest.sample_rows(params, Z, 900, np.random.default_rng(0))
    sizes = np.bincount(sample.at // iforest.places(6), minlength=400)
    assert abs(sizes.mean() - 300 * 64 / 900) < 1
    assert sizes.std() > 2  # nobody can tell how many rows of a site are in a tree
    everything = counted_forest.sample_rows(params, Z[:50], 50, np.random.default_rng(0))
    assert len(everything.X) == 400 * 50
    extended = Params(SITES, HUB, trees=400, sample=64, forest="extended")
    most = counted_forest.sample_rows(extended, Z[:50], 50, np.random.default_rng(0))
    assert 400 * 31 < len(most.X) < 400 * 35  # two thirds


def test_larger_trees_hold_at_most_half_of_all_rows():
    """Where every tree has the same rows, each tells more about them; below 256 rows that cannot be helped."""
    params = Params(SITES, HUB, sample=512)
    assert [params.size(n) for n in (100, 256, 400, 512, 800, 1024, 10**6)] == [100, 256, 256, 256, 400, 512, 512]
    extended = Params(SITES, HUB, sample=512, forest="extended")
    assert [extended.size(n) for n in (300, 400, 800, 10**6)] == [200, 256, 400, 512]
    assert Params(SITES, HUB).size(300) == 256
    shared = counted_forest.sample_rows(params, rows(800), 800, np.random.default_rng(0))
    assert len(shared.X) / params.trees < 420  # 400 of 800 rows in a tree, and not 512


def test_contamination_finds_the_cut_over_all_sites():
    c = case(rows(900), cuts=(300, 400), contamination=0.1, repeats=2, trees=10)
    run = run_protocol(counted_forest, c)
    check_no_errors(run)
    found = [values(run)[u] for u in SITES]
    for r in range(2):
        flagged = sum(int((v.scores[r] >= v.cuts[r]).sum()) for v in found)
        assert abs(flagged - 90) <= 3 * 4  # runs of min_cells rows per site, and a grid of 4096 steps
    assert len({tuple(v.cuts) for v in found}) == 1


def test_grid_holds_every_row_and_reads_back_its_cells():
    grid = Grid(512, np.sqrt(1000.0))
    x = np.concatenate([np.linspace(-31.6, 31.6, 999), [0.0]])
    cell = grid.cell(x)
    assert ((grid.edge(cell) <= x + 1e-12) & (x <= grid.edge(cell + 1) + 1e-12)).all()


# ---- donors ----------------------------------------------------------------------------------------------------------

CROWD = 20  # cells of one donor, far from all others


def crowded(seed=0):
    """120 rows of six donors, and 20 of a seventh in a place of their own."""
    rng = np.random.default_rng(seed)
    X = np.concatenate([rng.normal(size=(120, 4)), rng.normal(size=(CROWD, 4)) * 0.8 + 7])
    return X, np.concatenate([np.arange(120) % 6, np.full(CROWD, 6)])


def deepest_crowd(by_donor):
    """Ranges that are opened about nodes in which a site has nobody's rows but the seventh donor's."""
    X, donor = crowded()
    params = Params(SITES, HUB, trees=20, sample=256, min_cells=8, by_donor=by_donor)
    scaling = pooled_scaling.scaling_of(X)
    whose = {SITES[0]: donor} if by_donor else None
    rng = np.random.default_rng(1)
    _, geometry = counted_forest.grow_plainly(params, scaling, [X], bytes(32), rng, whose)
    box = (scaling.apply(X)[:120].max(axis=0)).max()
    found = 0
    for step in geometry.steps:
        found += int((step.low > box).sum())
    return found


def test_nothing_is_opened_about_a_place_that_few_donors_are_in():
    """Attack: read the crowd of one donor off the ranges. It works where rows are counted, not where donors are."""
    assert deepest_crowd(by_donor=False) > 0
    assert deepest_crowd(by_donor=True) == 0


def donor_case(**options):
    X, donor = crowded()
    params = Params(
        SITES, HUB, **{"trees": 3, "sample": 256, "min_cells": 4, "contamination": 0.1, "by_donor": True, **options}
    )
    order = np.random.default_rng(5).permutation(len(X))
    parts = np.split(order, [50, 90])
    return Case(params, {u: ("table", NAMES, X[i], donor[i]) for u, i in zip(SITES, parts, strict=True)})


def test_receipts_show_the_smallest_group_of_rows_and_donors():
    c = donor_case()
    run = run_protocol(counted_forest, c)
    check_no_errors(run)
    sizes = groups_of(run, SITES[1])
    assert min(s["cells"] for s in sizes if "cells" in s) >= 4
    assert min(s["donors"] for s in sizes if "donors" in s) >= 3
    assert len({tuple(values(run)[u].cuts) for u in SITES}) == 1


def test_a_site_with_rows_and_no_donors_or_too_few_is_refused_before_anything_is_sent():
    c = donor_case()
    inputs = {u: (*given[:3], None) for u, given in c.inputs.items()}
    run = run_protocol(counted_forest, Case(c.params, inputs), timeout=1.0)
    assert "a donor for every row" in str(run.errors[SITES[0]])
    run = run_protocol(counted_forest, case(cuts=(3, 80)), timeout=1.0)
    assert "fewer than min_cells = 4" in str(run.errors[SITES[0]])


# ---- view, vectors, cost ---------------------------------------------------------------------------------------------


def test_with_fixed_entropy_everything_repeats():
    runs = [run_protocol(counted_forest, case(), entropy=fixed_entropy("again")) for _ in range(2)]
    assert transcript(runs[0], hashes=True) == transcript(runs[1], hashes=True)
    other = run_protocol(counted_forest, case(), entropy=fixed_entropy("other"))
    assert transcript(other, hashes=True) != transcript(runs[0], hashes=True)


def sums_of(params, outline, width):
    """What the sums cost that the opened ranges ask for, in order: what `Cost` says."""

    def add(length):
        return checked_sum.cost(checked_sum.Params(SITES, HUB, length))

    def packed(length):
        return add(1 + -(-length // lanes_of(3)))

    asked = [packed(width * 128), add(2 * width + 1)] * 2
    asked += [packed(len(nodes) * 2 * (params.grid_cells - 1)) for nodes, _, _ in outline.ranges]
    return [*asked, consistency_check.cost(consistency_check.Params(SITES, HUB))]


def test_view_and_cost_follow_from_the_opened_ranges():
    c = case(forest="extended")
    run = run_protocol(counted_forest, c)
    check_no_errors(run)
    sums = sums_of(c.params, values(run)[HUB], 4)
    seed = common_seed.cost(common_seed.Params(SITES, HUB))
    names = len(common_genes.join(NAMES))
    for party in (HUB, *SITES):
        sent = [r for r in transcript(run)[party] if not r[0].startswith("channel.")]
        ends = 3 if party == HUB else 1
        messages = sum(s[party][0] for s in sums) + seed[party][0] + ends
        payload = sum(s[party][1] for s in sums) + seed[party][1] + ends * names
        assert len(sent) == messages
        total = sum(size for _, _, size in sent)
        assert payload <= total <= payload + FRAMING * messages + 0.02 * payload
    assert len(run.receipts[SITES[0]].entries) < 1000


# ---- dropouts, aborts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "nth"), [("Measured", 0), ("Parts", 0)])
def test_a_site_may_drop_before_the_seed_is_agreed(name, nth):
    fault = Fault("kill", "site-2", "hub", name, nth=nth)
    run = run_protocol(counted_forest, case(contamination=0.1, trees=3), faults=[fault], timeout=2.0)
    check_no_errors(run)
    found = [v for p, v in values(run).items() if p != HUB]
    assert len(found) == 2
    same_forest(found[0].forests, found[1].forests)


@pytest.mark.parametrize(("name", "nth"), [("Masked", 0), ("Masked", 5), ("Masked", 6)])
def test_a_site_that_drops_later_ends_the_run_by_name(name, nth):
    fault = Fault("kill", "site-2", "hub", name, nth=nth)
    run = run_protocol(counted_forest, case(trees=3), faults=[fault], timeout=2.0)
    assert {HUB, *SITES[:2]} <= set(run.errors)
    for e in run.errors.values():
        assert all((e.protocol, e.line, e.code))


@pytest.mark.parametrize("kind", ["drop", "truncate", pytest.param("swap", marks=pytest.mark.slow)])
def test_a_disturbed_message_is_named(kind):
    c = case(trees=2)
    for sender, to, name, nth in (("site-1", "hub", "Masked", 5), ("hub", "site-1", "Total", 4)):
        run = run_protocol(counted_forest, c, faults=[Fault(kind, sender, to, name, nth=nth)], timeout=1.0)
        assert run.errors
        for e in run.errors.values():
            assert all((e.protocol, e.line, e.code))


# ---- input -----------------------------------------------------------------------------------------------------------


def test_columns_in_another_order_are_matched_by_name():
    X = rows()
    one = case(X)
    shuffled = [3, 1, 0, 2]
    inputs = dict(one.inputs)
    inputs[SITES[1]] = ("table", [NAMES[j] for j in shuffled], X[40:80][:, shuffled])
    runs = [run_protocol(counted_forest, c, entropy=fixed_entropy("order")) for c in (one, Case(one.params, inputs))]
    for run in runs:
        check_no_errors(run)
    np.testing.assert_array_equal(values(runs[0])[SITES[1]].scores, values(runs[1])[SITES[1]].scores)


def test_a_column_that_one_site_lacks_is_named():
    one = case()
    inputs = dict(one.inputs)
    inputs[SITES[1]] = ("table", ["a", "b", "c", "other"], rows()[40:80])
    run = run_protocol(counted_forest, Case(one.params, inputs), timeout=1.0)
    assert "'other'" in str(run.errors[SITES[1]])
    assert "'d'" in str(run.errors[SITES[0]])


def test_constant_columns_and_missing_entries():
    X = rows()
    X[:, 2] = 4.5
    X[5, 0] = np.nan
    run = run_protocol(counted_forest, case(X))
    check_no_errors(run)
    got = values(run)[SITES[0]]
    assert got.scores.shape == (1, 40)
    assert np.isfinite(got.scores).all()
    for step in got.forests[0].steps:
        assert not np.isin(step.axes.columns[~np.isnan(step.cut)], [2]).any()
    run = run_protocol(counted_forest, case(np.full((60, 4), 2.0), cuts=(20, 40)), timeout=2.0)
    assert set(run.errors) == {HUB, *SITES}
    assert "one value" in str(run.errors[SITES[0]])


def test_a_rare_value_isolates_its_rows_though_it_has_no_scale():
    X = rows()
    X[:, 1] = 1.0
    X[7, 1] = 2.0
    run = run_protocol(counted_forest, case(X, trees=30))
    check_no_errors(run)
    got = values(run)[SITES[0]]
    assert got.scaling.scale[1] == 0
    assert got.scores[0, 7] > np.median(got.scores[0]) + 0.05


def test_fewer_rows_than_columns():
    rng = np.random.default_rng(0)
    c = case(cuts=(13, 26))
    wide = [f"v{i}" for i in range(60)]
    parts = np.split(rng.normal(size=(40, 60)), [13, 26])
    inputs = {u: ("table", wide, p) for u, p in zip(SITES, parts, strict=True)}
    run = run_protocol(counted_forest, Case(c.params, inputs))
    check_no_errors(run)


def test_bad_parameters():
    for options in ({"trees": 0}, {"min_cells": 0}, {"sample": 8}, {"contamination": 0.5}, {"sample": 70000}):
        with pytest.raises(ParameterError):
            Params(SITES, HUB, **options)


def test_a_row_beyond_a_range_is_isolated_with_the_probability_of_a_cut_between():
    """One tree, one split of [0, 1] at 0.5: a row at 3 is isolated with probability 2/3."""
    step = iforest.Step(
        np.array([0]), iforest.Axes(np.array([0]), None), np.array([0.0]), np.array([1.0]), np.array([0.5])
    )
    forest = iforest.RangeForest(1, 2, (step,), 1.0, leaf=4.0, alone=1.0)
    np.testing.assert_allclose(forest.paths(np.array([[0.2], [3.0], [-1.0]])), [5.0, 2 / 3 * 2 + 5 / 3, 0.5 * 7])
