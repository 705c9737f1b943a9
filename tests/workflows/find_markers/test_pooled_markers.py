"""Pooled markers: figures of the pooled cells, small groups and their complements, one malicious party."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.sparse
import scipy.stats

from cloister.disclosure import Thresholds
from cloister.errors import DataError, ParameterError, ProtocolAbort
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
from cloister.workflows.find_markers import pooled_markers
from cloister.workflows.find_markers.pooled_markers import OTHERS, Cells, Params

HUB = Party("hub")
SITES = A, B, C = tuple(map(Party, "abc"))
VECTORS = Path(__file__).parents[2] / "vectors"
KINDS = ("B", "NK", "T")


def cells(rng, n, g=20, donors=0, kinds=KINDS):
    codes = np.arange(n) % len(kinds)
    rate = np.full((n, g), 1.0)
    for k in range(len(kinds)):
        rate[codes == k, 2 * k : 2 * k + 2] = 6.0
    x = scipy.sparse.csr_matrix(rng.poisson(rate).astype(float))
    donor = rng.integers(0, donors, n) if donors else None
    names = tuple(f"G{i:02d}" for i in range(g))
    return Cells(gene_moments.Cells(names, x, None, donor), tuple(kinds[k] for k in codes))


def case(seed=0, n=3, sizes=(60, 90, 120), donors=0, g=20, **options):
    rng = np.random.default_rng(seed)
    params = Params(SITES[:n], HUB, donors=bool(donors), **options)
    return Case(params, {u: (cells(rng, size, g, donors),) for u, size in zip(SITES[:n], sizes, strict=False)})


def agree(found, ideal):
    assert (found.labels, found.genes) == (ideal.labels, ideal.genes)
    for name in ("cells", "donors", "fraction", "fraction_rest"):
        np.testing.assert_allclose(getattr(found, name), getattr(ideal, name), rtol=1e-9)
    for name in ("t", "p", "fdr", "log_fold_change", "donor_change", "donor_t", "donor_p", "donor_fdr"):
        np.testing.assert_allclose(getattr(found, name), getattr(ideal, name), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "options",
    [{}, {"n": 2}, {"donors": 6}, {"labels": ("B", "NK", "T", "none")}, {"sizes": (60, 90, 9)}],
    ids=["cells", "two-sites", "donors", "vocabulary", "a site with 9 cells"],
)
def test_roles_give_what_one_place_gives(options):
    check_ideal(pooled_markers, [case(seed=1, **options)], agree=agree)


def test_figures_are_those_of_the_pooled_cells():
    """Where every entry has enough cells, only rounding to 1/4 stands between."""
    c = case(sizes=(300, 300, 300))
    found = next(iter(pooled_markers.ideal(c.params, plain_inputs(c)).values()))
    x = np.concatenate([m.cells.x.toarray() for (m,) in c.inputs.values()])
    kinds = np.concatenate([m.labels for (m,) in c.inputs.values()])
    logs = np.log1p(1e4 * x / x.sum(axis=1, keepdims=True))
    for k, kind in enumerate(KINDS):
        one, rest = logs[kinds == kind], logs[kinds != kind]
        t, p = scipy.stats.ttest_ind(one, rest, equal_var=False)
        np.testing.assert_allclose(found.t[k], t, rtol=0.02, atol=0.05)
        np.testing.assert_allclose(np.log10(found.p[k] + 1e-300), np.log10(p + 1e-300), rtol=0.05, atol=0.1)
        change = np.log2(np.expm1(one.mean(axis=0)) / np.expm1(rest.mean(axis=0)))
        np.testing.assert_allclose(found.log_fold_change[k], change, atol=0.01)
        np.testing.assert_allclose(
            found.fraction[k], (one > 0).mean(axis=0), atol=0.04
        )  # few that lack it count as none
        np.testing.assert_allclose(found.fraction_rest[k], (rest > 0).mean(axis=0), atol=0.04)
        assert set(np.argsort(-found.t[k])[:2]) == {2 * k, 2 * k + 1}
        assert found.cells[k] == 300


def test_over_donors_each_is_compared_with_itself():
    c = case(sizes=(600, 600, 600), donors=5)
    found = next(iter(pooled_markers.ideal(c.params, plain_inputs(c)).values()))
    ratios = []
    for (mine,) in c.inputs.values():
        x, kinds = mine.cells.x.toarray(), np.array(mine.labels)
        y = 1e4 * x / x.sum(axis=1, keepdims=True)
        for d in range(5):
            of = mine.cells.donor == d
            ratios.append(
                np.log2((y[of & (kinds == "B")].mean(axis=0) + 0.1) / (y[of & (kinds != "B")].mean(axis=0) + 0.1))
            )
    t, p = scipy.stats.ttest_1samp(ratios, 0)
    assert found.donors.tolist() == [15, 15, 15]
    np.testing.assert_allclose(found.donor_change[0], np.mean(ratios, axis=0), atol=0.01)
    np.testing.assert_allclose(found.donor_t[0], t, rtol=0.1, atol=0.2)
    np.testing.assert_allclose(np.log10(found.donor_p[0]), np.log10(p), rtol=0.15, atol=0.2)


def test_vectors():
    check_vectors(pooled_markers, case(sizes=(36, 36, 36), g=4), VECTORS / "pooled_markers.json")


def test_view_does_not_depend_on_the_values():
    check_view(pooled_markers, case(seed=1, donors=4), case(seed=2, donors=4))


@pytest.mark.parametrize("donors", [0, 4])
def test_cost(donors):
    c = case(donors=donors)
    genes, labels = len(common_genes.join([f"G{i:02d}" for i in range(20)])), len("BNKT") + 3
    priced = SimpleNamespace(
        __name__="pooled_markers",
        roles=pooled_markers.roles,
        cost=lambda params: pooled_markers.cost(params, 3, 20, (genes, labels), (genes, labels)),
    )
    check_cost(priced, c)


def test_no_value_leaves_but_masked():
    run = run_protocol(pooled_markers, case())
    check_no_errors(run)
    sent = {row[0] for p, rows in transcript(run).items() if p != HUB for row in rows}
    assert sent == {
        "channel.Hello",
        "common_genes.Measured",
        "common_labels.Brings",
        "same_view.Signature",
        *(f"common_seed.{m}" for m in ("Key", "Parts", "Confirm")),
        "checked_sum.Masked",
    }


# ---- few cells -------------------------------------------------------------------------------------------------------


def parts_of(c, mine):
    """Tables of one site's contribution: n, m, Σ l, Σ l²."""
    mine = pooled_markers.opened_labels(c.params, mine)
    part = pooled_markers.contribution(c.params, mine, mine.cells.names, KINDS)
    K, g = 4, len(mine.cells.names)
    n, *rest = np.split(part.values[: K * (1 + 3 * g)], K + K * g * np.arange(3))
    return part, n, *(x.reshape(K, g) for x in rest)


def with_counts(mine, gene, at, value):
    x = mine.cells.x.toarray()
    x[:, gene] = 0
    x[at, gene] = value
    return dataclasses.replace(mine, cells=dataclasses.replace(mine.cells, x=scipy.sparse.csr_matrix(x)))


@pytest.mark.parametrize("r", [0, 1, 3, 9])
def test_a_gene_that_few_cells_of_a_label_express_is_zero_there_and_has_no_complement(r):
    """Attack: another site subtracts its part; the rest of the gene's sum would be that of these cells."""
    c = case()
    mine = c.inputs[C][0]
    at = np.concatenate(
        [np.flatnonzero(np.array(mine.labels) == "B")[:r], np.flatnonzero(np.array(mine.labels) == "T")]
    )
    part, n, m, log, square = parts_of(c, with_counts(mine, 10, at, 50))
    assert m[0, 10] == log[0, 10] == square[0, 10] == 0
    assert m[2, 10] == 40
    assert m[3, 10] == log[3, 10] == 0  # the others: r cells, too few
    assert part.cells >= 10
    assert n.tolist() == [40, 40, 40, 0]


def test_an_entry_that_one_cell_dominates_is_zero():
    """Attack: twelve cells of a label express a gene, one of them far more; Σ l² is nearly its square."""
    c = case(sizes=(60, 90, 300), kind="log")
    u = c.params.sites[2]
    rng, mine = np.random.default_rng(0), c.inputs[u][0]
    x = np.abs(rng.normal(1, 0.2, mine.cells.x.shape))
    of_label = [i for i, name in enumerate(mine.labels) if name == "T"]
    x[:, 5] = 0
    x[of_label[:12], 5] = 0.4
    x[of_label[0], 5] = 8.0
    mine = dataclasses.replace(mine, cells=dataclasses.replace(mine.cells, x=scipy.sparse.csr_matrix(x)))
    sums, _ = pooled_markers.sums_of(c.params, mine, mine.cells.names, KINDS)
    assert abs(sums.square[2, 5] ** 0.5 - 8) < 0.2  # the old step opened this
    part, _, m, log, square = parts_of(c, mine)
    assert not any(table[:, 5].any() for table in (m, log, square))  # no complement: "others" is zero too
    assert all((table[:3, 6] > 0).all() for table in (m, log, square))
    assert part.withheld > 0


def test_an_entry_that_one_donor_dominates_is_zero():
    rng, donor = np.random.default_rng(0), np.repeat(np.arange(4), 60)
    x = rng.poisson(2.0, (240, 20)).astype(float) + 1
    x[:, 3] = 1
    x[donor == 0, 3] = 400
    names = tuple(f"G{i:02d}" for i in range(20))
    mine = Cells(gene_moments.Cells(names, scipy.sparse.csr_matrix(x), np.full(240, 1000.0), donor), KINDS * 80)
    _, n, m, log, square = parts_of(case(donors=4), mine)
    assert n[:3].tolist() == [80, 80, 80]
    assert not any(table[:, 3].any() for table in (m, log, square))
    assert all((table[:3, 4] > 0).all() for table in (m, log, square))


def test_of_a_donor_with_most_cells_of_a_label_those_that_are_too_many_are_left_out():
    rng, donor = np.random.default_rng(0), np.repeat([0, 1, 2], (240, 30, 30))
    x = scipy.sparse.csr_matrix(rng.poisson(2.0, (300, 20)).astype(float) + 1)
    names = tuple(f"G{i:02d}" for i in range(20))
    mine = Cells(gene_moments.Cells(names, x, None, donor), KINDS * 100)
    _, n, *_ = parts_of(case(donors=3), mine)
    assert n.tolist() == [40, 40, 40, 0]  # 10 + 10 of the others, and as many of the first


def test_small_entries_of_several_labels_are_one_group():
    c = case()
    mine = c.inputs[C][0]
    at = np.concatenate(
        [np.flatnonzero(np.array(mine.labels) == kind)[:r] for kind, r in zip(KINDS, (4, 5, 6), strict=True)]
    )
    part, _, m, log, _ = parts_of(c, with_counts(mine, 10, at, 50))
    assert m[:, 10].tolist() == [0, 0, 0, 15]
    assert log[3, 10] > 0
    assert part.cells >= 10


@pytest.mark.parametrize("lacking", [0, 1, 9, 10])
def test_how_many_cells_lack_a_gene_is_not_shown_if_they_are_few(lacking):
    c = case()
    mine = c.inputs[C][0]
    _, _, m, _, _ = parts_of(c, with_counts(mine, 10, np.flatnonzero(np.array(mine.labels) == "B")[lacking:], 50))
    assert m[0, 10] == (40 if lacking < 10 else 30)


@pytest.mark.parametrize("lacking", [0, 1, 9, 10])
def test_how_many_of_the_others_lack_a_gene_is_not_shown_if_they_are_few(lacking):
    """Attack: where every label shows the gene, n - m of the others is the number of their cells that lack it."""
    c = case(sizes=(60, 90, 150))
    mine = c.inputs[C][0]
    labels = tuple(f"rare{i // 6}" if i < 24 else name for i, name in enumerate(mine.labels))
    mine = dataclasses.replace(mine, labels=labels)
    _, n, m, _, _ = parts_of(c, with_counts(mine, 10, np.arange(lacking, 150), 50))
    assert n.tolist() == [42, 42, 42, 24]
    assert m[3, 10] == (24 if lacking < 10 else 14)
    odd = np.array(mine.labels) == "B"  # the same if cells of a label whose entry is too small are among them
    odd[:24] = True
    odd[np.flatnonzero(odd)[24 + 9 :]] = False
    _, _, m, _, _ = parts_of(c, with_counts(mine, 10, np.flatnonzero(odd), 50))
    assert m[:, 10].tolist() == [0, 0, 0, 33]  # of 24 others, and 126 cells of labels without the gene


def donor_tables(c, mine):
    """A, Σ δ, Σ δ² of one site, (K, g)."""
    mine = pooled_markers.opened_labels(c.params, mine)
    sums, codes = pooled_markers.sums_of(c.params, mine, mine.cells.names, KINDS)
    rows = pooled_markers.Rows(len(codes), mine.cells.donor, mine.thresholds)
    return [part.values for part in pooled_markers.donor_parts(c.params, rows, sums)[1:]]


@pytest.mark.parametrize("each", [1, 3, 4])
def test_log_ratios_of_donors_do_not_rest_on_a_cell_of_each(each):
    """Attack: a gene in one cell of each of three donors; Σ δ and Σ δ² were functions of these three cells."""
    c = case(sizes=(60, 90, 300), donors=3)
    mine = c.inputs[C][0]
    donor, kind = mine.cells.donor, np.array(mine.labels)
    at = np.concatenate([np.flatnonzero((donor == d) & (kind == "B"))[:each] for d in range(3)])
    number, total, square = (table[:, 10] for table in donor_tables(c, with_counts(mine, 10, at, 50)))
    assert number.any() == total.any() == square.any() == (3 * each >= 10)


@pytest.mark.parametrize("few", [1, 9])
def test_log_ratios_of_donors_do_not_tell_of_few_cells_beside_many(few):
    """Attack: all other labels express the gene, so the entry is open; nine cells of the label change nothing in it."""
    c = case(sizes=(60, 90, 300), donors=3)
    mine = c.inputs[C][0]
    kind = np.array(mine.labels)
    rest = np.flatnonzero(kind != "B")
    without = donor_tables(c, with_counts(mine, 10, rest, 50))
    some = np.concatenate([np.flatnonzero(kind == "B")[:few], rest])
    found = donor_tables(c, with_counts(mine, 10, some, 50))
    assert without[0][0, 10] == 3
    for table, before in zip(found, without, strict=True):
        assert table[0, 10] == before[0, 10]


def test_a_library_that_is_too_small_is_found_before_any_gene_is_chosen():
    """Attack: the genes in common are chosen so that an abort tells of a cell with more of them than its library."""
    c = case()
    mine = c.inputs[A][0]
    library = np.asarray(mine.cells.x.sum(axis=1)).ravel()
    right = dataclasses.replace(mine, cells=dataclasses.replace(mine.cells, library=library))
    pooled_markers.check_site(c.params, right)
    library = library - (np.arange(60) == 5)
    with pytest.raises(DataError, match="library"):
        pooled_markers.check_site(
            c.params, dataclasses.replace(mine, cells=dataclasses.replace(mine.cells, library=library))
        )


def test_donors_are_counted_where_they_are_named():
    c = case(sizes=(60, 90, 240), donors=6)
    mine = c.inputs[C][0]
    b = np.array(mine.labels) == "B"
    two = b & np.isin(mine.cells.donor, [0, 1])
    assert two.sum() >= 10
    part, _, m, log, _ = parts_of(c, with_counts(mine, 10, np.flatnonzero(two), 50))
    assert m[0, 10] == log[0, 10] == m[3, 10] == 0
    assert part.donors >= 3
    lacks = b & ~two
    _, _, m, log, _ = parts_of(c, with_counts(mine, 10, np.flatnonzero(lacks), 50))
    assert m[0, 10] == 0  # those that lack it are of two donors
    assert log[0, 10] > 0
    found = next(
        iter(pooled_markers.ideal(c.params, {**plain_inputs(c), C: with_counts(mine, 10, lacks, 50)}).values())
    )
    assert 0 <= found.fraction[0, 10] <= 1


def test_small_labels_are_others():
    c = case()
    mine = c.inputs[C][0]
    labels = tuple("rare" if i < 9 else name for i, name in enumerate(mine.labels))
    opened = pooled_markers.opened_labels(c.params, dataclasses.replace(mine, labels=labels))
    assert opened.labels[:9] == (None,) * 9  # too few to be a group of their own
    two = tuple("rare" if i < 9 else "odd" if i < 14 else name for i, name in enumerate(mine.labels))
    opened = pooled_markers.opened_labels(c.params, dataclasses.replace(mine, labels=two))
    assert opened.labels[:14] == (OTHERS,) * 14
    raised = dataclasses.replace(mine, thresholds=Thresholds(41, 3))
    assert set(pooled_markers.opened_labels(c.params, raised).labels) == {OTHERS}
    lowered = dataclasses.replace(mine, labels=labels, thresholds=Thresholds(2, 3))
    assert "rare" not in pooled_markers.opened_labels(c.params, lowered).labels


@pytest.mark.parametrize("donors", [0, 4])
def test_every_number_rests_on_enough(donors):
    for seed in range(6):
        c = case(seed=seed, sizes=(31, 40, 50), donors=donors)
        for (mine,) in c.inputs.values():
            part, *_ = parts_of(c, mine)
            assert part.cells is None or part.cells >= 10
            assert not donors or part.donors is None or part.donors >= 3
            assert np.allclose(part.values * 64, np.rint(part.values * 64))


# ---- one malicious party ---------------------------------------------------------------------------------------------

TINY = {"sizes": (36, 36, 36), "g": 6}


def right_markers(cases):
    def right(lie, found):
        have = [v for v in found.values() if v is not None]
        assert len({np.nan_to_num(v.t).tobytes() for v in have}) <= 1
        if lie.liar == HUB:
            possible = [next(iter(pooled_markers.ideal(c.params, plain_inputs(c)).values())) for c in cases]
            for v in have:
                full = [p for p in possible if p.genes == v.genes]
                assert not full or any(np.allclose(v.t, p.t, atol=1e-5) for p in full), lie
        if lie.letter == "j":
            wanted = next(iter(pooled_markers.ideal(lie.case.params, plain_inputs(lie.case)).values()))
            for v in have:
                np.testing.assert_allclose(v.t, wanted.t, rtol=1e-4, atol=1e-5)

    return right


def test_lies():
    cases = [case(**TINY), case(seed=4, **TINY)]
    lies = check_lies(pooled_markers, cases, right=right_markers(cases))
    assert lies.tried > 10
    assert lies.aborted > 5


@pytest.mark.slow
def test_lies_in_every_message():
    cases = [case(**TINY), case(seed=4, **TINY)]
    lies = check_lies(pooled_markers, cases, right=right_markers(cases), full=True, timeout=4.0, within=40.0)
    print(f"\npooled_markers: {lies}")
    assert lies.tried > 30


def test_a_site_that_stops_ends_the_run():
    run = run_protocol(pooled_markers, case(), faults=[Fault("kill", "b", HUB, "Masked")], timeout=1.0)
    assert set(run.errors) >= {HUB, A, C}


def test_one_label_that_is_large_enough_is_too_few():
    c = case(sizes=(15, 15, 15), labels=KINDS)
    run = run_protocol(pooled_markers, c, timeout=3.0)
    assert {e.code for e in run.errors.values() if isinstance(e, ProtocolAbort)} == {"labels"}
    assert not values(run)


# ---- bad input -------------------------------------------------------------------------------------------------------


def test_bad_input():
    c = case()
    mine = c.inputs[A][0]
    with pytest.raises(DataError, match="one label per cell"):
        pooled_markers.check_site(c.params, dataclasses.replace(mine, labels=mine.labels[1:]))
    with pytest.raises(DataError, match="at all sites, or at none"):
        pooled_markers.check_site(dataclasses.replace(c.params, donors=True), mine)
    for bad in ({"sites": SITES[:1]}, {"kind": "scaled"}, {"target_sum": 0.0}):
        with pytest.raises(ParameterError):
            Params(**{"sites": SITES, "coordinator": HUB} | bad)
