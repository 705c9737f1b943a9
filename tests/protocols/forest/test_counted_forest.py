"""The five questions. Sizes of messages follow from the opened forest, so view and cost are asked for a given one."""

from pathlib import Path

import numpy as np
import pytest

from cloister.errors import ParameterError
from cloister.models import isolation_forest as iforest
from cloister.protocols.forest import counted_forest
from cloister.protocols.forest.counted_forest import DonorParams, Params
from cloister.protocols.forest.node_ranges import Grid
from cloister.protocols.sums import common_genes, common_seed, count_tests, same_view, secure_sum
from cloister.run.rehearsal import Fault
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
    params = Params(SITES, HUB, **{"trees": 5, "sample": 128, "least": 4, **options})
    parts = np.split(X, cuts)
    return Case(params, {u: ("table", NAMES[: X.shape[1]], p) for u, p in zip(SITES, parts, strict=True)})


def pooled(c, present=SITES):
    return {u: c.inputs[u][2] for u in present}


def same_forest(one, two):
    for a, b in zip(one, two, strict=True):
        np.testing.assert_array_equal(a.source, b.source)
        np.testing.assert_allclose(a.threshold, b.threshold, atol=1e-6)
        np.testing.assert_allclose(a.path, b.path)


@pytest.mark.parametrize(
    "options",
    [{}, {"forest": "extended"}, {"forest": "extended", "extension": 1}, {"repeats": 2, "least": 8}, {"least": 1}],
)
def test_ideal_the_forest_is_that_of_the_pooled_rows(options, monkeypatch):
    """All rows are in every tree (N < ψ), so the seed decides the forest, up to the rounding of the scales."""
    monkeypatch.setattr(counted_forest, "EXTENDED_SHARE", 1.0)
    c = case(**options)
    run = run_protocol(counted_forest, c)
    check_no_errors(run)
    found = {u: values(run)[u] for u in SITES}
    wanted = counted_forest.ideal(c.params, pooled(c), found[SITES[0]].secret, rng=np.random.default_rng(0))
    for u, got in found.items():
        same_forest(got.forests, wanted)
        Z = got.scaling.apply(c.inputs[u][2])
        np.testing.assert_allclose(got.scores, [f.score(Z) for f in wanted], rtol=1e-6)
    outline = values(run)[HUB]
    np.testing.assert_array_equal(outline.counts, found[SITES[0]].outline.counts)


def test_vectors():
    check_vectors(counted_forest, case(trees=2), Path(__file__).parents[2] / "vectors" / "counted_forest.json")


def test_leaves_are_small_or_counted():
    c = case(trees=8)
    run = run_protocol(counted_forest, c)
    check_no_errors(run)
    got = values(run)[SITES[0]]
    Z = got.scaling.apply(np.concatenate(list(pooled(c).values())))
    per_tree = iforest.places(got.outline.depth)
    for k in range(8):
        tree = iforest.Forest(
            got.forests[0].source[k : k + 1], got.forests[0].threshold[k : k + 1], got.forests[0].path[k : k + 1], 1.0
        )
        paths = tree.paths(Z)
        large = got.outline.large // per_tree == k
        for leaf, count in zip(got.outline.large[large] % per_tree, got.outline.counts[large], strict=True):
            assert count == -1 or count >= c.params.least
            depth = np.floor(np.log2(leaf + 1))
            if count > 0:
                assert (np.abs(paths - depth - iforest.average_path(count)) < 1e-9).sum() >= count


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
    c = case(rows(900), cuts=(300, 310), contamination=0.1, repeats=2, trees=10)
    run = run_protocol(counted_forest, c)
    check_no_errors(run)
    found = [values(run)[u] for u in SITES]
    for r in range(2):
        flagged = sum(int((v.scores[r] >= v.cuts[r]).sum()) for v in found)
        assert flagged <= 90
        assert flagged >= 80  # ties and a grid of 4096 steps
    assert len({tuple(v.cuts) for v in found}) == 1


def test_grid_holds_every_row_and_reads_back_its_cells():
    grid = Grid(512, np.sqrt(1000.0))
    x = np.concatenate([np.linspace(-31.6, 31.6, 999), [0.0]])
    cell = grid.cell(x)
    assert ((grid.edge(cell) <= x + 1e-12) & (x <= grid.edge(cell + 1) + 1e-12)).all()
    which = np.repeat([0, 1], 500)
    first, last = grid.ends(which, x, 2)
    assert first.tolist() == [cell[:500].min(), cell[500:].min()]
    assert last.tolist() == [cell[:500].max(), cell[500:].max()]


# ---- donors ----------------------------------------------------------------------------------------------------------

CROWD = 20  # cells of one donor, far from all others


def crowded(seed=0):
    """120 rows of six donors, and 20 of a seventh in a place of their own."""
    rng = np.random.default_rng(seed)
    X = np.concatenate([rng.normal(size=(120, 4)), rng.normal(size=(CROWD, 4)) * 0.8 + 7])
    return X, np.concatenate([np.arange(120) % 6, np.full(CROWD, 6)])


def opened_donors(params, X, donor, seed):
    """Of every node that more is said about than that it is small: how many donors, and how many rows, it holds."""
    scaling = counted_forest.pooled_scaling.scaling_of(X)
    rng = np.random.default_rng(seed)
    grown = counted_forest.grow_plainly(params, scaling, scaling.apply(X), bytes([seed]) * 32, rng, donor)
    _, geometry, outline = grown
    picked = counted_forest.sample_rows(params, np.arange(len(X))[:, None], len(X), np.random.default_rng(seed))
    whose = (np.arange(len(X)) if donor is None else donor)[picked.X[:, 0]]
    per_tree, inside = iforest.places(outline.depth), {}
    for at, who in zip(geometry.sample.at.tolist(), whose.tolist(), strict=True):
        tree, place = divmod(at, per_tree)
        while place:
            inside.setdefault(tree * per_tree + place, []).append(who)
            place = (place - 1) // 2
    said = {int(n) for nodes, _, _ in outline.ranges for n in nodes} | set(outline.large.tolist())
    return [inside.get(n, []) for n in said if n % per_tree]


def test_nothing_is_opened_about_a_place_that_few_donors_are_in():
    """Attack: read the crowd of one donor off the forest. It works where rows are counted, not where donors are."""
    X, donor = crowded()
    options = {"trees": 20, "sample": 256, "least": 8}
    by_rows = opened_donors(Params(SITES, HUB, **options), X, None, 1)
    assert any(min(rows) >= 120 for rows in by_rows)  # nodes of nobody else's cells
    by_donors = opened_donors(DonorParams(SITES, HUB, **options, min_donors=3), X, donor, 1)
    assert len(by_donors) > 100
    assert min(len(set(who)) for who in by_donors) >= 3
    assert min(len(who) for who in by_donors) >= 8
    many = opened_donors(DonorParams(SITES, HUB, **options | {"least": 6}, min_donors=6), X, donor, 1)
    assert min(len(set(who)) for who in many) >= 6


def donor_case(**options):
    X, donor = crowded()
    params = DonorParams(SITES, HUB, **{"trees": 3, "sample": 256, "least": 4, "contamination": 0.1, **options})
    order = np.random.default_rng(5).permutation(len(X))
    parts = np.split(order, [50, 90])
    return Case(params, {u: ("table", NAMES, X[i], donor[i]) for u, i in zip(SITES, parts, strict=True)})


def test_with_donors_the_forest_is_that_of_the_pooled_rows_if_no_donor_is_at_two_sites():
    X, donor = crowded()
    c = donor_case()
    of = [np.flatnonzero(np.isin(donor, k)) for k in ((0, 1), (2, 3), (4, 5, 6))]
    c = Case(c.params, {u: ("table", NAMES, X[i], donor[i]) for u, i in zip(SITES, of, strict=True)})
    run = run_protocol(counted_forest, c)
    check_no_errors(run)
    got = [values(run)[u] for u in SITES]
    whose = np.concatenate([donor[i] for i in of])
    wanted = counted_forest.ideal(c.params, pooled(c), got[0].secret, whose, rng=np.random.default_rng(0))
    same_forest(got[0].forests, wanted)
    assert len({tuple(v.cuts) for v in got}) == 1
    flagged = sum(int((v.scores[0] >= v.cuts[0]).sum()) for v in got)
    assert flagged <= 0.1 * len(X)


def test_a_site_with_rows_and_no_donors_is_refused_before_anything_is_sent():
    c = donor_case()
    inputs = {u: (*given[:3], None) for u, given in c.inputs.items()}
    run = run_protocol(counted_forest, Case(c.params, inputs), timeout=1.0)
    assert "a donor for every row" in str(run.errors[SITES[0]])
    for few in (1, 5):
        with pytest.raises(ParameterError, match="min_donors"):
            DonorParams(SITES, HUB, least=4, min_donors=few)


# ---- view, vectors, cost ---------------------------------------------------------------------------------------------


def test_view_depends_on_the_opened_forest_only():
    """The same pooled rows, dealt out differently: names, order and sizes of all messages are the same."""
    X = rows()
    runs = [
        run_protocol(counted_forest, case(part, cuts), entropy=fixed_entropy("view"))
        for part, cuts in ((X, (40, 80)), (X[::-1].copy(), (1, 119)))
    ]
    for run in runs:
        check_no_errors(run)
    assert transcript(runs[0]) == transcript(runs[1])


def test_with_fixed_entropy_everything_repeats():
    runs = [run_protocol(counted_forest, case(), entropy=fixed_entropy("again")) for _ in range(2)]
    assert transcript(runs[0], hashes=True) == transcript(runs[1], hashes=True)
    other = run_protocol(counted_forest, case(), entropy=fixed_entropy("other"))
    assert transcript(other, hashes=True) != transcript(runs[0], hashes=True)


def questions(params, outline, width):
    """What the tests and sums cost that the opened forest asks for, in order: what `Cost` says."""

    def ask(length, least, most):
        proofs = counted_forest.PROOFS if least > 1 else 0
        return count_tests.cost(count_tests.Params(SITES, HUB, length, least, most, proofs))

    def add(length):
        return secure_sum.cost(secure_sum.Params(SITES, HUB, length, to_all=True))

    most = params.most
    asked = [ask(width * 128, 1, 3), add(2 * width + 1)] * 2
    for nodes, first, last in outline.ranges:  # one per level, since no axis is tried twice
        assert (first < last).all()
        grid = Grid(params.grid_cells, 1.0)
        asked.append(ask(len(nodes) * 2 * (grid.strides - 1), 1, 3))
        asked.append(ask(len(nodes) * 2 * (grid.stride - 1), 1, 3))
        asked.append(ask(2 * len(nodes), params.least, most))
    asked.append(ask(params.all_trees, params.least, most))
    if (outline.counts >= 0).any():
        asked.append(add(int((outline.counts >= 0).sum())))
    return [*asked, same_view.cost(same_view.Params(SITES, HUB))]


def test_cost():
    c = case(forest="extended")  # no axis is tried twice on such rows
    run = run_protocol(counted_forest, c)
    check_no_errors(run)
    sums = questions(c.params, values(run)[HUB], 4)
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


def check_survivors(c, run):
    """Whoever finished has the same forest, and it finds the planted outliers."""
    found = [v for p, v in values(run).items() if p != HUB]
    assert len(found) >= 2
    for v in found[1:]:
        same_forest(v.forests, found[0].forests)
    assert found[0].scores.shape[1] > 0


STEPS = [("Measured", 0), ("Parts", 0), ("MaskedInput", 0), ("MaskedInput", 3), ("MaskedInput", 5), ("Unmask", 6)]
LATE = [("Key", 0), ("Confirm", 0), ("Vouch", 5)] + [("MaskedInput", n) for n in (1, 2, 4, 6, 7, 8, 9, 10, 12, 14)]
STEPS += [pytest.param(*step, marks=pytest.mark.slow) for step in LATE]


@pytest.mark.parametrize(("name", "nth"), STEPS)
def test_a_site_may_drop_at_each_step(name, nth):
    c = case(contamination=0.1, trees=3)
    fault = Fault("kill", "site-2", "hub", name, nth=nth)
    run = run_protocol(counted_forest, c, faults=[fault], timeout=2.0)
    check_no_errors(run)
    check_survivors(c, run)
    if name in ("Measured", "Key"):  # gone before the scales: as if it had never been there
        got = values(run)[SITES[0]]
        wanted = counted_forest.ideal(c.params, pooled(c, SITES[:2]), got.secret, rng=np.random.default_rng(0))
        same_forest(got.forests, wanted)


def test_two_of_three_sites_gone_is_a_named_abort():
    faults = [Fault("kill", u, "hub", "MaskedInput", nth=4) for u in ("site-1", "site-2")]
    run = run_protocol(counted_forest, case(), faults=faults, timeout=1.0)
    assert {e.code for e in run.errors.values()} == {"too-few"}


@pytest.mark.parametrize(
    "kind", ["drop", "truncate", *(pytest.param(k, marks=pytest.mark.slow) for k in ("duplicate", "swap"))]
)
def test_a_disturbed_message_is_survived_or_named(kind):
    c = case(trees=2)
    for sender, to, name, nth in (("site-1", "hub", "MaskedInput", 5), ("hub", "site-1", "Outcome", 4)):
        run = run_protocol(counted_forest, c, faults=[Fault(kind, sender, to, name, nth=nth)], timeout=1.0)
        for e in run.errors.values():
            assert all((e.protocol, e.line, e.code))
        if HUB in run.outcomes:
            check_survivors(c, run)
        else:
            assert run.errors


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


def test_constant_columns_missing_entries_and_one_row():
    X = rows()
    X[:, 2] = 4.5
    X[5, 0] = np.nan
    run = run_protocol(counted_forest, case(X, cuts=(1, 60)))
    check_no_errors(run)
    got = values(run)[SITES[0]]
    assert got.scores.shape == (1, 1)
    assert not np.isin(got.forests[0].source[np.isfinite(got.forests[0].threshold)], [2]).any()
    run = run_protocol(counted_forest, case(np.full((60, 4), 2.0), cuts=(20, 40)), timeout=2.0)
    assert set(run.errors) == {HUB, *SITES}
    assert "one value" in str(run.errors[SITES[0]])


def test_fewer_rows_than_columns():
    rng = np.random.default_rng(0)
    c = case(cuts=(13, 26))
    wide = [f"v{i}" for i in range(60)]
    parts = np.split(rng.normal(size=(40, 60)), [13, 26])
    inputs = {u: ("table", wide, p) for u, p in zip(SITES, parts, strict=True)}
    run = run_protocol(counted_forest, Case(c.params, inputs))
    check_no_errors(run)
    check_survivors(c, run)


def test_bad_parameters():
    for options in (
        {"trees": 0},
        {"least": 0},
        {"least": 65},
        {"sample": 8},
        {"contamination": 0.5},
        {"sample": 70000},
    ):
        with pytest.raises(ParameterError):
            Params(SITES, HUB, **options)
