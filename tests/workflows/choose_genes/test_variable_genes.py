"""Variable genes: ranks of all batches, what few cells decide, one malicious party."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.sparse

from cloister.disclosure import Thresholds
from cloister.errors import DataError, ParameterError, ProtocolAbort
from cloister.models import variable_genes as model
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
from cloister.workflows.choose_genes import variable_genes
from cloister.workflows.choose_genes.variable_genes import Cells, Params
from cloister.workflows.common import common_genes, gene_moments

HUB = Party("hub")
SITES = A, B, C = tuple(map(Party, "abc"))
VECTORS = Path(__file__).parents[2] / "vectors"


def cells(rng, n, g=30, donors=0, batches=1):
    mean = np.random.default_rng(9).gamma(1.0, 3.0, g)
    x = rng.poisson(mean * rng.gamma(5, 0.2, (n, 1)))
    x[:, :4] = rng.poisson(9, (n, 4)) * (np.arange(n) % 3 == 0)[:, None]
    names = tuple(f"G{i:02d}" for i in range(g))
    donor = rng.integers(0, donors, n) if donors else None
    mine = gene_moments.Cells(names, scipy.sparse.csr_matrix(x.astype(float)), None, donor)
    return Cells(mine, np.arange(n) % batches)


def case(seed=0, n=3, sizes=(60, 80, 100), donors=0, batches=1, g=30, **options):
    rng = np.random.default_rng(seed)
    params = Params(SITES[:n], HUB, **{"n_top": 6, "min_batch": 20} | options)
    return Case(params, {u: (cells(rng, s, g, donors, batches),) for u, s in zip(SITES[:n], sizes, strict=False)})


def agree(found, ideal):
    assert found.genes == ideal.genes
    assert found.all_batches == ideal.all_batches
    for name in ("chosen", "batches", "rank"):
        np.testing.assert_allclose(getattr(found, name), getattr(ideal, name))


@pytest.mark.parametrize(
    "options",
    [{}, {"n": 2}, {"donors": 6}, {"batches": 2}, {"sizes": (60, 80, 15)}, {"n_top": 100}],
    ids=["plain", "two-sites", "donors", "batches", "a site with 15 cells", "all genes"],
)
def test_roles_give_what_one_place_gives(options):
    check_ideal(variable_genes, [case(seed=1, **options)], agree=agree)


def test_genes_of_most_batches_come_first():
    c = case(batches=2)
    found = next(iter(variable_genes.ideal(c.params, plain_inputs(c)).values()))
    assert found.all_batches == 6
    assert found.chosen.sum() == 6
    assert found.chosen[:4].all()
    assert np.all(found.batches[:4] >= 4)
    hits, ranks = np.zeros(30), np.zeros(30)
    for (mine,) in c.inputs.values():
        for b in range(2):
            x = model.trimmed(model.capped(mine.cells.x[mine.batch == b], None, 10, 3), 10)
            rank = model.ranked(model.normalised_variance(x), 6)
            hits, ranks = hits + (rank >= 0), ranks + np.maximum(rank, 0)
    np.testing.assert_array_equal(found.batches, hits)
    np.testing.assert_allclose(found.rank[hits > 0], ranks[hits > 0] / hits[hits > 0])


def test_vectors():
    check_vectors(variable_genes, case(sizes=(30, 30, 30), g=8), VECTORS / "variable_genes.json")


def test_view_does_not_depend_on_the_values():
    check_view(variable_genes, case(seed=1, donors=4), case(seed=2, donors=4))


def test_cost():
    c = case()
    size = len(common_genes.join([f"G{i:02d}" for i in range(30)]))
    priced = SimpleNamespace(
        __name__="variable_genes",
        roles=variable_genes.roles,
        cost=lambda params: variable_genes.cost(params, 30, size, size),
    )
    check_cost(priced, c)


def test_no_value_leaves_but_masked():
    run = run_protocol(variable_genes, case())
    check_no_errors(run)
    sent = {row[0] for p, rows in transcript(run).items() if p != HUB for row in rows}
    assert sent == {
        "channel.Hello",
        "common_genes.Measured",
        "same_view.Signature",
        *(f"common_seed.{m}" for m in ("Key", "Parts", "Confirm")),
        "checked_sum.Masked",
    }


# ---- few cells -------------------------------------------------------------------------------------------------------


def with_gene(mine, gene, column):
    x = mine.cells.x.toarray()
    x[:, gene] = column
    return dataclasses.replace(mine, cells=dataclasses.replace(mine.cells, x=scipy.sparse.csr_matrix(x)))


def part_of(c, mine):
    part = variable_genes.contribution(c.params, mine, mine.cells.names)
    return part, *np.split(part.values[1:], 2)


@pytest.mark.parametrize("r", [1, 5, 9])
def test_a_gene_of_few_cells_has_no_rank(r):
    """Attack: a gene that one cell expresses strongly varies most of all, and that it does tells of the cell."""
    c = case(g=200)
    mine = c.inputs[C][0]
    odd = with_gene(mine, 20, np.where(np.arange(100) < r, 500, 0))
    uncapped = model.ranked(model.normalised_variance(scipy.sparse.csc_matrix(odd.cells.x)), 6)
    assert uncapped[20] >= 0
    part, hits, ranks = part_of(c, odd)
    assert hits[20] == ranks[20] == 0
    assert part.cells >= 10


def test_few_cells_do_not_decide_a_rank():
    """A gene that all cells express, and five of them thirtyfold."""
    c = case(g=200)
    mine = c.inputs[C][0]
    flat = with_gene(mine, 20, np.tile([2, 3], 50))
    peak = with_gene(mine, 20, np.where(np.arange(100) < 5, 80, np.tile([2, 3], 50)))
    uncapped = [
        model.ranked(model.normalised_variance(scipy.sparse.csc_matrix(m.cells.x)), 6)[20] for m in (flat, peak)
    ]
    assert uncapped[0] == -1
    assert uncapped[1] >= 0
    np.testing.assert_array_equal(part_of(c, flat)[1][20], part_of(c, peak)[1][20])


@pytest.mark.parametrize("value", [500, 0])
def test_one_cell_far_from_the_median_of_a_gene_does_not_decide_its_rank(value):
    """Attack: all cells express the gene strongly. One has less than a tenth of the squares, most of the variance."""
    c = case(sizes=(60, 80, 300), g=200, n_top=20)
    mine, rng = c.inputs[C][0], np.random.default_rng(5)
    x = mine.cells.x.toarray()
    x[:, 40:] = rng.poisson(100, (300, 160))  # so that the trend at this mean is that of many genes
    x[:, 40] = np.tile([90, 95, 100, 105, 110], 60)
    odd = x.copy()
    odd[7, 40] = value
    usual, odd = (
        dataclasses.replace(mine, cells=dataclasses.replace(mine.cells, x=scipy.sparse.csr_matrix(y))) for y in (x, odd)
    )
    before = model.capped(odd.cells.x, None, 10, 3)
    if value:
        assert model.ranked(model.normalised_variance(before), 20)[40] >= 0  # with caps on squares alone
    away = np.square(before[:, [40]].toarray() - 100)
    assert away.max() > 0.3 * away.sum()
    away = np.square(model.trimmed(before, 10)[:, [40]].toarray() - 100)
    assert away.max() <= 0.11 * away.sum()
    assert part_of(c, odd)[1][40] == part_of(c, usual)[1][40] == 0


def test_genes_that_less_than_half_of_the_cells_express_are_not_trimmed_again():
    x = model.capped(case().inputs[C][0].cells.x, None, 10, 3)
    same = np.diff(x.indptr) <= 50
    assert same.sum() > 4
    assert (model.trimmed(x, 10)[:, same] != x[:, same]).nnz == 0


def test_donors_are_counted_where_they_are_named():
    c = case(donors=6)
    mine = c.inputs[C][0]
    two = with_gene(mine, 20, np.where(mine.cells.donor < 2, 30, 0))
    part, hits, _ = part_of(c, two)
    assert hits[20] == 0
    assert part.donors >= 3
    few = case(donors=2)
    part, *_ = part_of(few, few.inputs[C][0])
    assert not part.values.any()


def test_a_sites_own_thresholds_can_only_raise_those_of_the_study():
    c = case()
    mine = c.inputs[C][0]
    for own, cells_behind in ((Thresholds(30, 3), 30), (Thresholds(2, 3), 10)):
        part, *_ = part_of(c, dataclasses.replace(mine, thresholds=own))
        assert part.cells >= cells_behind
    assert not part_of(c, dataclasses.replace(mine, thresholds=Thresholds(101, 3)))[0].values.any()


# ---- one malicious party ---------------------------------------------------------------------------------------------

TINY = {"sizes": (30, 30, 30), "g": 8, "n_top": 3}


def right_genes(cases):
    def right(lie, found):
        have = [v for v in found.values() if v is not None]
        assert len({v.chosen.tobytes() for v in have}) <= 1
        if lie.liar == HUB:
            possible = [next(iter(variable_genes.ideal(c.params, plain_inputs(c)).values())) for c in cases]
            for v in have:
                full = [p for p in possible if p.genes == v.genes]
                assert not full or any(np.array_equal(v.batches, p.batches) for p in full), lie
        if lie.letter == "j":
            wanted = next(iter(variable_genes.ideal(lie.case.params, plain_inputs(lie.case)).values()))
            for v in have:
                np.testing.assert_array_equal(v.batches, wanted.batches)

    return right


@pytest.mark.parametrize("full", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_lies(full):
    cases = [case(**TINY), case(seed=4, **TINY)]
    lies = check_lies(variable_genes, cases, right=right_genes(cases), full=full)
    assert lies.tried > 10
    assert lies.aborted > 5


def test_a_site_that_stops_ends_the_run():
    run = run_protocol(variable_genes, case(), faults=[Fault("kill", "b", HUB, "Masked")], timeout=1.0)
    assert set(run.errors) >= {HUB, A, C}


def test_no_batch_is_large_enough():
    run = run_protocol(variable_genes, case(sizes=(15, 15, 15)), timeout=3.0)
    assert {e.code for e in run.errors.values() if isinstance(e, ProtocolAbort)} == {"too-few-cells"}
    assert not values(run)


def test_bad_input():
    mine = case().inputs[A][0]
    with pytest.raises(DataError, match="one batch per cell"):
        variable_genes.check_site(dataclasses.replace(mine, batch=mine.batch[1:]))
    for bad in ({"sites": SITES[:1]}, {"n_top": 0}, {"min_batch": 1}):
        with pytest.raises(ParameterError):
            Params(**{"sites": SITES, "coordinator": HUB} | bad)
