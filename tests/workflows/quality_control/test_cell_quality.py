"""Cell quality: histograms of whole runs, cut-offs of the pooled cells, doublet scores, one malicious party."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.sparse

from cloister.disclosure import Thresholds
from cloister.errors import DataError, ParameterError, ProtocolAbort
from cloister.models import doublets
from cloister.mpc.net.channel import Channel
from cloister.rehearsal.rehearsal import Fault
from cloister.study import Party
from cloister.testing import (
    Case,
    check_cost,
    check_ideal,
    check_lies,
    check_no_errors,
    check_vectors,
    check_view,
    plain_inputs,
    run_protocol,
    transcript,
    values,
)
from cloister.workflows.common import common_genes, gene_moments
from cloister.workflows.quality_control import cell_quality
from cloister.workflows.quality_control.cell_quality import COUNTS, GENES, MEASURES, MITO, SCORE, Cells, Params

HUB = Party("hub")
SITES = A, B, C = tuple(map(Party, "abc"))
VECTORS = Path(__file__).parents[2] / "vectors"


def cells(rng, n, g=40, donors=0, mito=True):
    """Two kinds of cells; the first two genes are mitochondrial."""
    kind = np.arange(n) % 2
    mean = np.random.default_rng(9).gamma(1.0, 3.0, g)
    mean = np.where((np.arange(g) % 2)[None] == kind[:, None], mean, 0.2 * mean)
    x = rng.poisson(mean * rng.gamma(8, 0.125, (n, 1)))
    x[:, :2] = rng.poisson(1.0, (n, 2))
    share = 100 * x[:, :2].sum(axis=1) / np.maximum(x.sum(axis=1), 1)
    measures = np.stack([x.sum(axis=1), (x > 0).sum(axis=1), share if mito else np.full(n, np.nan)], axis=1)
    names = tuple(f"G{i:02d}" for i in range(g))
    donor = rng.integers(0, donors, n) if donors else None
    return Cells(
        gene_moments.Cells(names, scipy.sparse.csr_matrix(x.astype(float)), None, donor), measures.astype(float)
    )


def case(seed=0, n=3, sizes=(60, 80, 100), donors=0, g=40, mito=True, **options):
    rng = np.random.default_rng(seed)
    params = Params(SITES[:n], HUB, **{"n_top_genes": 60, "n_components": 3} | options)
    return Case(params, {u: (cells(rng, s, g, donors, mito),) for u, s in zip(SITES[:n], sizes, strict=False)})


def quick(**options):
    return case(doublet_rate=0.0, **options)


def agree(found, ideal):
    for name in ideal.histograms:
        if name != SCORE.name:
            np.testing.assert_array_equal(found.histograms[name], ideal.histograms[name])
    assert found.cutoffs == ideal.cutoffs
    if len(ideal.scores):  # neighbours at about the same distance may swap
        np.testing.assert_allclose(found.scores, ideal.scores, atol=0.05)
        assert np.mean(np.abs(found.scores - ideal.scores)) < 1e-3


@pytest.mark.parametrize(
    "options",
    [{}, {"n": 2}, {"donors": 6}, {"sizes": (60, 80, 15)}, {"cutoff": 0.05}, {"sizes": (260, 280, 300)}],
    ids=["plain", "two-sites", "donors", "a site with 15 cells", "quantiles", "no prototypes"],
)
def test_roles_give_what_one_place_gives(options):
    check_ideal(cell_quality, [case(seed=1, **options)], agree=agree)


def test_vectors():
    check_vectors(cell_quality, case(sizes=(30, 30, 30), g=12, n_components=2),
                  VECTORS / "cell_quality.json")  # fmt: skip


def test_view_does_not_depend_on_the_values():
    check_view(cell_quality, quick(seed=1, donors=4), quick(seed=2, donors=4))


@pytest.mark.parametrize("sizes", [(60, 80, 100), (260, 280, 300)], ids=["prototypes", "none"])
def test_cost(sizes):
    c = case(sizes=sizes)
    size, trail = len(common_genes.join([f"G{i:02d}" for i in range(40)])), ()
    if sizes[0] < cell_quality.FILL:
        params, xs = c.params, plain_inputs(c)
        inside = cell_quality.shared_pca.ideal(params.space, {u: m.genes for u, m in xs.items()})
        groups = {u: cell_quality.own_cells(params, m, *inside[u]) for u, m in xs.items()}
        trail = next(iter(cell_quality.shared_prototypes.ideal(params.prototypes, groups).values())).trail
    priced = SimpleNamespace(
        __name__="cell_quality",
        roles=cell_quality.roles,
        cost=lambda params: cell_quality.cost(params, 40, size, trail),
    )
    check_cost(priced, c)


def test_no_value_leaves_but_masked():
    run = run_protocol(cell_quality, case())
    check_no_errors(run)
    sent = {row[0] for p, rows in transcript(run).items() if p != HUB for row in rows}
    assert sent == {
        "channel.Hello",
        "common_genes.Measured",
        "common_space.Space",
        "same_view.Signature",
        "attempts.Report",
        *(f"common_seed.{m}" for m in ("Key", "Parts", "Confirm")),
        "checked_sum.Masked",
    }


# ---- cut-offs --------------------------------------------------------------------------------------------------------


def test_cutoffs_are_those_of_the_pooled_cells():
    c = quick(sizes=(400, 500, 600))
    every = np.concatenate([m.measures for (m,) in c.inputs.values()])
    found = next(iter(cell_quality.ideal(c.params, plain_inputs(c)).values()))
    for m, column in zip(MEASURES[:2], every.T, strict=False):
        logs = np.log10(1 + column)
        middle = np.median(logs)
        away = 5 * np.median(np.abs(logs - middle))
        near = 0.04 if m is COUNTS else 0.08  # forty genes: a number of genes more is 0.02 of log10
        logs = np.log10(1 + np.array(found.cutoffs[m.name]))
        np.testing.assert_allclose(logs, (middle - away, middle + away), atol=near)
    middle = np.median(every[:, 2])
    wanted = middle + 5 * np.median(np.abs(every[:, 2] - middle))
    assert found.cutoffs["mito"][0] == 0
    np.testing.assert_allclose(found.cutoffs["mito"][1], wanted, rtol=0.1)
    quantiles = dataclasses.replace(c.params, cutoff=0.05)
    found = next(iter(cell_quality.ideal(quantiles, plain_inputs(c)).values()))
    wanted = np.quantile(every[:, 0], [0.05, 0.95])
    np.testing.assert_allclose(found.cutoffs["counts"], wanted, rtol=0.06)
    np.testing.assert_array_equal(found.cells, [400, 500, 600])


def test_one_sites_histogram_is_that_of_its_cells():
    c = quick(sizes=(400, 500, 600))
    found = next(iter(cell_quality.ideal(c.params, plain_inputs(c)).values()))
    here = c.inputs[B][0].measures[:, 0]
    wanted = np.cumsum(np.bincount(COUNTS.bin_of(COUNTS.log(here)), minlength=COUNTS.bins))
    assert np.abs(np.cumsum(found.histograms["counts"][1]) - wanted).max() <= 10  # a run


def test_without_mitochondrial_genes_there_is_no_such_cutoff():
    c = quick(mito=False)
    found = next(iter(cell_quality.ideal(c.params, plain_inputs(c)).values()))
    assert set(found.cutoffs) == {"counts", "genes"}
    assert not found.histograms["mito"].any()
    mixed = Case(c.params, {**c.inputs, B: quick(seed=3).inputs[B]})
    found = next(iter(cell_quality.ideal(mixed.params, plain_inputs(mixed)).values()))
    assert set(found.cutoffs) == {"counts", "genes", "mito"}
    assert found.histograms["mito"].sum(axis=1).tolist() == [0, 80, 0]
    assert cell_quality.passes(found.cutoffs, c.inputs[A][0].measures).mean() > 0.8


def test_passes():
    cutoffs = {"counts": (10.0, 100.0), "genes": (5.0, 50.0), "mito": (0.0, 8.0)}
    rows = np.array([[50, 20, 1], [9, 20, 1], [101, 20, 1], [50, 4, 1], [50, 51, 1], [50, 20, 9]], float)
    assert cell_quality.passes(cutoffs, rows).tolist() == [True] + 5 * [False]
    rows[:, 2] = np.nan
    assert cell_quality.passes(cutoffs, rows).tolist() == [True] + 4 * [False] + [True]


# ---- doublets --------------------------------------------------------------------------------------------------------


def test_doublets_have_high_scores_also_at_a_small_site():
    rng = np.random.default_rng(5)
    c = case(sizes=(500, 400, 60), g=60, n_components=5)
    inputs, planted = {}, {}
    for u, (mine,) in c.inputs.items():
        x, n = mine.genes.x.toarray(), mine.genes.x.shape[0]
        at = rng.permutation(n)[: n // 10]
        planted[u] = np.isin(np.arange(n), at)
        x[at] += x[(at + 1) % n]  # kinds alternate
        inputs[u] = (dataclasses.replace(mine, genes=dataclasses.replace(mine.genes, x=scipy.sparse.csr_matrix(x))),)
    found = values(run_protocol(cell_quality, Case(c.params, inputs)))
    for u in SITES:
        scores, truth = found[u].scores, planted[u]
        area = np.mean(scores[truth][:, None] > scores[~truth]) + 0.5 * np.mean(
            scores[truth][:, None] == scores[~truth]
        )
        assert area > 0.85, u
    every = np.concatenate([found[u].scores for u in SITES])
    assert 0.02 < np.mean(every > found[A].threshold) < 0.12
    assert len({found[p].threshold for p in (HUB, *SITES)}) == 1


def test_simulated_doublets_are_of_two_cells():
    both = doublets.pairs(7, 1000, np.random.default_rng(0))
    assert (both[:, 0] != both[:, 1]).all()
    assert both.min() == 0
    assert both.max() == 6


def test_scores_are_scrublets():
    """By hand, with brute force over all pairs."""
    rng = np.random.default_rng(0)
    x, sim = rng.normal(size=(90, 4)), rng.normal(size=(180, 4))
    found = doublets.scores(x, np.arange(90), np.zeros((0, 4)), sim, 0.1)
    points, k = np.concatenate([x, sim]), round(5 * 3.0)
    for i in range(90):
        away = np.square(points - x[i]).sum(axis=1)
        away[i] = np.inf
        q = ((np.argsort(away)[:k] >= 90).sum() + 1) / (k + 2)
        assert found[i] == pytest.approx(q * 0.1 / 2 / (0.9 - q * (0.9 - 0.05)))


# ---- few cells -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("donors", [0, 5])
def test_every_bin_rests_on_enough_cells_and_donors(donors):
    """Attack: cells with counts that no other has. Their bin is that of the middle cell of their run."""
    c = quick(donors=donors)
    mine = c.inputs[C][0]
    measures = mine.measures.copy()
    measures[7] = [3e6, 39, 99.0]
    measures[8] = [0, 0, 0]
    mine = dataclasses.replace(mine, measures=measures)
    rows = mine.rows(c.params)
    part = cell_quality.histograms(rows, MEASURES, measures)
    assert part.cells >= 10
    assert part.donors is None if not donors else part.donors >= 3
    assert all(v == 0 or v >= 10 for v in part.values)
    for m, column in zip(MEASURES, measures.T, strict=True):
        bins = cell_quality.bins_of_runs(rows, m, column)
        for b in np.unique(bins):
            assert (bins == b).sum() >= 10
            if donors:
                assert len(np.unique(mine.genes.donor[bins == b])) >= 3
    assert not part.values[COUNTS.bin_of(np.log10([3e6]))[0]]
    assert part.values[: COUNTS.bins].sum() == 100


def test_how_far_out_a_cell_is_changes_nothing():
    """Attack: an attacker that knows all other cells compares the histogram with and without a cell's far value."""
    c = quick()
    mine = c.inputs[C][0]
    parts = []
    for far in (1e3, 1e4, 1e6):
        measures = mine.measures.copy()
        measures[7, 0] = far
        parts.append(cell_quality.histograms(mine.rows(c.params), MEASURES, measures).values)
    assert np.array_equal(parts[0], parts[1])
    assert np.array_equal(parts[0], parts[2])


def test_too_few_cells_or_donors_are_an_error_before_anything_is_sent():
    c = quick(donors=2)
    with pytest.raises(DataError, match="2 donors here, fewer than min_donors = 3"):
        cell_quality.check_site(c.params, c.inputs[A][0])
    few = quick(sizes=(60, 80, 9))
    with pytest.raises(DataError, match="9 cells here, fewer than min_cells = 10"):
        cell_quality.check_site(few.params, few.inputs[C][0])
    run = run_protocol(cell_quality, few, timeout=2.0)
    assert isinstance(run.errors[C], DataError)
    assert {row[0] for row in transcript(run)[C]} <= {"channel.Hello", "channel.Abort"}


def test_histograms_of_no_cells_end_the_run():
    c = case()
    none = {m.name: np.zeros((3, m.bins)) for m in (*MEASURES, SCORE)}
    for step in (lambda: cell_quality.cutoffs_of(c.params, none),
                 lambda: cell_quality.threshold_of(c.params, none["score"])):  # fmt: skip
        with pytest.raises(ProtocolAbort, match="enough cells for a histogram"):
            step()


def test_a_sites_own_thresholds_can_only_raise_those_of_the_study():
    c = quick()
    mine = c.inputs[C][0]
    for own, least in ((Thresholds(30, 3), 30), (Thresholds(2, 3), 10)):
        higher = dataclasses.replace(mine, thresholds=own)
        part = cell_quality.histograms(higher.rows(c.params), MEASURES, mine.measures)
        assert part.cells >= least


# ---- one malicious party ---------------------------------------------------------------------------------------------


def test_a_site_that_writes_into_the_histogram_of_another_ends_the_run(monkeypatch):
    real = cell_quality.placed

    def lying(params, u, part):
        own = real(params, u, part)
        return own.map(lambda x: x + np.eye(1, len(x), 5).ravel()) if u == B else own

    monkeypatch.setattr(cell_quality, "placed", lying)
    run = run_protocol(cell_quality, quick(), timeout=3.0)
    assert run.errors[A].code == "slot"
    assert A not in values(run)


@pytest.mark.parametrize("factor", [-1.0, 1000.0])
def test_a_malicious_histogram_moves_cutoffs_and_nothing_else(monkeypatch, factor):
    real, seen = cell_quality.histograms, []

    def lying(rows, measures, values):
        part = real(rows, measures, values)
        if rows.n == 80:
            return part.map(lambda x: factor * x)
        seen.append(part)
        return part

    monkeypatch.setattr(cell_quality, "histograms", lying)
    c = quick()
    found = values(run_protocol(cell_quality, c))
    assert len(found) == 4
    for v in found.values():
        assert all(np.all(np.isfinite(v.cutoffs[m.name])) for m in (COUNTS, GENES, MITO))
        assert v.histograms["counts"].min() >= 0
    assert all(part.cells >= 10 for part in seen)
    honest = next(iter(cell_quality.ideal(c.params, plain_inputs(c)).values()))
    np.testing.assert_array_equal(found[A].histograms["counts"][2], honest.histograms["counts"][2])


def test_other_cutoffs_drop_cells_that_differ_in_one():
    """Open: by its histogram one site chooses cut-offs; in two runs these can differ by one cell of another."""
    c = quick(sizes=(300, 300, 300), cutoff=0.1)
    for (mine,) in c.inputs.values():
        mine.measures[:, 0] = 101 * mine.measures[:, 0] + np.arange(300) % 101  # real cells have few equal counts
    mine = c.inputs[C][0].measures
    real = {u: cell_quality.histograms(m.rows(c.params), MEASURES, m.measures) for u, (m,) in c.inputs.items()}
    kept = []
    for claimed in range(60):
        lie = real[B].values + np.eye(1, len(real[B].values)).ravel() * claimed  # cells without counts
        parts = [part.map(lambda _, lie=lie: lie) if u == B else part for u, part in real.items()]
        total = np.sum([cell_quality.placed(c.params, u, x).values for u, x in zip(SITES, parts, strict=True)], axis=0)
        cutoffs = cell_quality.cutoffs_of(c.params, cell_quality.by_site(c.params, MEASURES, total))
        kept.append(cell_quality.passes(cutoffs, mine))
    assert all((~k).sum() >= 10 for k in kept)  # so each run drops enough
    assert any(np.sum(one != other) == 1 for one in kept for other in kept)


TINY = {"sizes": (30, 30, 30), "g": 12, "n_components": 2}


def right_quality(cases):
    def right(lie, found):
        have = [v for v in found.values() if v is not None]
        assert len({str(v.cutoffs) for v in have}) <= 1
        if lie.liar == HUB:
            possible = [next(iter(cell_quality.ideal(c.params, plain_inputs(c)).values())) for c in cases]
            for v in have:
                assert any(v.cutoffs == p.cutoffs for p in possible), lie

    return right


@pytest.mark.parametrize("full", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_lies(full):
    cases = [quick(**TINY), quick(seed=4, **TINY)]
    lies = check_lies(cell_quality, cases, right=right_quality(cases), full=full)
    assert lies.tried > 8
    assert lies.aborted > 4


@pytest.mark.slow
def test_lies_with_doublets():
    cases = [case(**TINY), case(seed=4, **TINY)]
    lies = check_lies(cell_quality, cases, right=right_quality(cases), timeout=4.0, within=60.0)
    assert lies.tried > 20


def test_a_changed_sum_is_noticed():
    run = run_protocol(cell_quality, quick(), faults=[Fault("truncate", "hub", "a", "Total")], timeout=2.0)
    assert A in run.errors


def test_a_site_that_stops_ends_the_run():
    run = run_protocol(cell_quality, quick(), faults=[Fault("kill", "b", HUB, "Masked")], timeout=1.0)
    assert set(run.errors) >= {HUB, A, C}


def test_a_coordinator_that_gives_one_site_another_space_ends_the_run(monkeypatch):
    real = Channel.broadcast

    async def lying(ch, to, msg):
        if type(msg).__name__ == "Components":
            msg = dataclasses.replace(msg, components=msg.components[:, ::-1].copy())
        await real(ch, to, msg)

    monkeypatch.setattr(Channel, "broadcast", lying)
    run = run_protocol(cell_quality, case(), timeout=3.0)
    assert {e.code for p, e in run.errors.items() if p != HUB and isinstance(e, ProtocolAbort)} == {"components"}


# ---- bad input -------------------------------------------------------------------------------------------------------


def test_bad_input():
    c = quick()
    mine = c.inputs[A][0]
    with pytest.raises(DataError, match="3 measures"):
        cell_quality.check_site(c.params, dataclasses.replace(mine, measures=mine.measures[:, :2]))
    odd = mine.measures.copy()
    odd[3, 0] = np.nan
    with pytest.raises(DataError, match="missing or infinite"):
        cell_quality.check_site(c.params, dataclasses.replace(mine, measures=odd))
    for bad in ({"sites": SITES[:1]}, {"cutoff": 0.7}, {"cutoff": 0.0}, {"cutoff": 101.0}, {"doublet_rate": 0.6}):
        with pytest.raises(ParameterError):
            Params(**{"sites": SITES, "coordinator": HUB} | bad)
