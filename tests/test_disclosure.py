"""A site's contribution to an opened sum is based on enough of its own cells and donors, or it is zero."""

import ast
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from cloister.disclosure import Rows, Shares, Thresholds, constant, join
from cloister.errors import DataError, ParameterError
from cloister.mpc.net.channel import Channel
from cloister.mpc.net.receipts import Receipt
from cloister.report.provenance import signed_rows
from cloister.study import Party

LEAST = Thresholds(min_cells=10, min_donors=3)


def rows_of(donor, least=LEAST):
    return Rows(len(donor), np.asarray(donor), least)


def test_small_groups_contribute_zero():
    codes = np.repeat([0, 1, 2], [9, 10, 30])
    part = Rows(len(codes)).grouped(codes, 4)
    assert part.values.tolist() == [0, 10, 30, 0]
    assert (part.cells, part.donors, part.withheld) == (10, None, 1)


def test_cells_of_few_donors_contribute_zero():
    donor = np.concatenate([np.zeros(50, int), np.ones(50, int), np.arange(60) % 3])
    codes = np.repeat([0, 1], [100, 60])
    part = rows_of(donor).grouped(codes, 2, np.array([[1.0, 2.0], [3.0, 4.0]]))
    assert part.values.tolist() == [[0.0, 0.0], [3.0, 4.0]]
    assert (part.cells, part.donors) == (60, 3)


def test_rows_of_small_groups_can_be_dropped_so_that_totals_have_no_complement():
    codes = np.repeat([0, 1, -1], [4, 20, 5])
    rows = Rows(len(codes))
    keep = rows.open_rows(codes, 2)
    assert keep.sum() == 20
    assert rows.excluded(codes, ["rare", "common"]) == {"rare": 4}
    assert rows.only(keep).whole(np.array([20.0])).values.tolist() == [20.0]


def test_a_group_that_lacks_a_few_rows_is_suppressed_too():
    inside = np.ones((40, 3), bool)
    inside[:4, 0] = False  # its complement is four cells
    inside[:15, 1] = False
    assert Rows(40).overlapping(inside).values.tolist() == [0, 25, 40]


def clouds(n, seed=0, centres=4):
    rng = np.random.default_rng(seed)
    kind = rng.integers(0, centres, n)
    return rng.normal(size=(n, 6)) + 8 * rng.normal(size=(centres, 6))[kind], kind


@pytest.mark.parametrize("n", [9, 10, 19, 20, 337, 1500])
def test_groups_of_similar_rows_reach_the_thresholds(n):
    x, _ = clouds(n)
    groups = Rows(n).similar(x)
    if n < 10:
        assert len(groups) == 0
        assert (groups.codes == -1).all()
        return
    assert np.array_equal(np.bincount(groups.codes), groups.cells)
    assert groups.cells.min() >= 10
    assert groups.cells.max() < 20
    assert groups.cells.sum() == n


def test_groups_of_similar_rows_are_of_enough_donors_and_of_one_batch():
    x, _ = clouds(600)
    rng = np.random.default_rng(1)
    donor, batch = rng.integers(0, 5, 600), np.repeat([0, 1, 2, -1], [300, 250, 5, 45])
    groups = rows_of(donor).similar(x, within=batch)
    assert (groups.codes[550:] == -1).all()  # five rows of a batch, and those of none
    for k in range(len(groups)):
        inside = groups.codes == k
        assert inside.sum() == groups.cells[k] >= 10
        assert len(set(donor[inside])) == groups.donors[k] >= 3
        assert len(set(batch[inside])) == 1


def test_groups_of_similar_rows_keep_clouds_apart():
    x, kind = clouds(1000)
    groups = Rows(1000).similar(x)
    pure = [len(set(kind[groups.codes == k])) == 1 for k in range(len(groups))]
    assert np.mean(pure) > 0.9
    assert np.allclose(groups.means(x)[3], x[groups.codes == 3].mean(axis=0))
    part = groups.contribution(groups.means(x).sum(axis=0))
    assert (part.cells, part.donors) == (int(groups.cells.min()), None)


def test_whatever_is_computed_from_group_means_a_row_has_at_most_a_tenth_of_it():
    """The leverage criterion of `weighted`, for any columns that are functions of the group: no call is counted."""
    x, _ = clouds(400)
    groups = Rows(400).similar(x)
    columns = np.random.default_rng(2).normal(size=(len(groups), 300))[groups.codes]  # 300 rounds of weights
    basis = np.linalg.svd(columns, full_matrices=False)
    span = basis[0][:, basis[1] > 1e-9]
    assert np.square(span).sum(axis=1).max() <= 0.1 + 1e-9


def test_equal_rows_are_grouped_too():
    groups = Rows(55).similar(np.zeros((55, 3)))
    assert groups.cells.min() >= 10
    assert len(groups) >= 2


def test_groups_that_differ_in_a_few_rows_are_not_open_together():
    """Each group and each complement is large; the difference of two sums was one row."""
    inside = np.zeros((100, 3), bool)
    inside[:40, 0], inside[:41, 1], inside[:30, 2] = True, True, True
    assert Rows(100).overlapping(inside).values.tolist() == [0, 41, 30]


def test_combinations_of_groups_are_groups_too():
    """{X, a}, {Y, b} and X ∪ Y: two by two they differ in many rows; the first two minus the third are a and b."""
    inside = np.zeros((200, 3), bool)
    inside[:41, 0], inside[60:101, 1] = True, True
    inside[:40, 2] = inside[60:100, 2] = True
    assert (Rows(200).overlapping(inside).values == 0).sum() == 1


def test_groups_that_differ_in_rows_of_few_donors_are_not_open_together():
    donor = np.repeat(np.arange(10), 20)
    inside = np.zeros((200, 3), bool)
    inside[:80, 0], inside[:100, 1], inside[:140, 2] = True, True, True  # the second has 20 cells of one donor more
    part = rows_of(donor).overlapping(inside)
    assert part.values.tolist() == [80, 0, 140]


def test_weighted_columns_that_differ_in_one_row_are_not_open_together():
    weights = np.ones((100, 2))
    weights[7, 1] = 1.5
    part = Rows(100).weighted(weights, np.ones(2))
    assert part.values.tolist() == [1.0, 0.0]


def test_a_weighted_column_less_the_total_is_not_one_row():
    """Its own effective size is 21: one row of weight 1 among 200,000 of weight 0.01, which the total cancels."""
    weights = np.full((200_000, 1), 1e-2)
    weights[0] = 1.0
    assert Rows(200_000).effective(weights).open.all()
    assert not Rows(200_000).weighted(weights).values.any()


def test_weighted_columns_that_differ_in_one_donor_are_not_open_together():
    donor, weights = np.repeat(np.arange(5), 20), np.ones((100, 2))
    weights[:20, 1] = 1.5
    assert rows_of(donor).weighted(weights, np.ones(2)).values.sum() == 1.0


@given(
    hnp.arrays(np.int8, st.tuples(st.integers(12, 40), st.integers(1, 4)), elements=st.integers(-2, 2)),
    hnp.arrays(np.float64, 5, elements=st.integers(-3, 3).map(float)),
)
def test_every_combination_of_open_columns_is_based_on_enough_rows(columns, factors):
    """1 / leverage is the smallest |v|² / max |v_i|² over combinations v of the columns and the sum over all rows."""
    weights, sums = columns.astype(np.float64), np.ones(columns.shape[1])
    part = Rows(len(weights), thresholds=Thresholds(5)).weighted(weights, sums)
    every = np.concatenate([weights * part.values, np.ones((len(weights), 1))], axis=1)
    combined = every @ factors[-every.shape[1] :]
    if np.abs(combined).max() > 1e-9:
        assert np.square(combined).sum() / np.square(combined).max() >= 5 - 1e-6


@pytest.mark.parametrize("codes", [[-1, 0, 1], [0.0, 1.0, np.nan]])
def test_a_missing_donor_is_not_a_donor(codes):
    with pytest.raises(DataError, match="'donor' must hold integers of 0 or more"):
        Rows(30, np.repeat(np.array(codes), 10))


def test_numbers_of_cells_and_codes_that_cannot_be_are_rejected():
    with pytest.raises(DataError, match="'cells' must hold integers"):
        Rows(3, cells=np.array([20, -5, -4]))
    with pytest.raises(ParameterError, match="expected group codes below 2, found 2"):
        Rows(30).grouped(np.repeat([0, 1, 2], 10), 2)


@pytest.mark.parametrize("weight", [np.nan, np.inf, 1e200, 0.0])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_weights_that_cannot_be_judged_contribute_zero(weight):
    assert not Rows(30).weighted(np.full((30, 1), weight), np.ones(1)).values.any()


def test_one_dominant_cell_suppresses_a_weighted_sum():
    weights = np.full((200, 2), 1e-3)
    weights[0, 0] = 1.0
    part = Rows(200).weighted(weights, np.ones((2, 3)))
    assert part.values.tolist() == [[0.0] * 3, [1.0] * 3]
    assert part.cells == 200


def test_equal_weights_of_m_cells_have_effective_size_m():
    for m in (9, 10, 11):
        weights = np.zeros((50, 1))
        weights[:m] = -0.3
        assert bool(Rows(50).weighted(weights).values.any()) == (m >= 10)


def test_all_rows_together_must_reach_the_thresholds():
    with pytest.raises(DataError, match="9 cells here, fewer than min_cells = 10"):
        Rows(9).check()
    with pytest.raises(DataError, match="cells of 2 donors here, fewer than min_donors = 3"):
        rows_of(np.arange(100) % 2).check()
    assert not Rows(9).whole(np.ones(4)).values.any()
    rows_of(np.arange(100) % 3).check()


def test_samples_count_as_the_cells_behind_them():
    rows = Rows(3, np.arange(3), LEAST, cells=np.array([4, 4, 4]))
    assert rows.grouped(np.zeros(3, int), 1).values.tolist() == [12]
    assert rows.only([0, 1]).grouped(np.zeros(2, int), 1).values.tolist() == [0]


def test_a_site_can_raise_thresholds_and_not_lower_them():
    assert LEAST.raised({"min_cells": 50, "min_donors": 1}) == Thresholds(50, 3)
    with pytest.raises(ParameterError, match="'min_cells' must be at least 1"):
        Thresholds(min_cells=0)


def test_joined_contributions_keep_the_smallest_group():
    rows = Rows(60)
    whole, part = rows.whole(np.ones(2)), rows.grouped(np.repeat([0, 1], [12, 48]), 2)
    both = join([whole, part, constant(np.zeros(3), "padding")])
    assert both.values.tolist() == [1, 1, 12, 48, 0, 0, 0]
    assert (both.cells, both.donors) == (12, None)


@given(
    hnp.arrays(np.int64, st.integers(0, 60), elements=st.integers(-1, 5)),
    st.integers(1, 8),
    st.integers(1, 4),
    st.randoms(use_true_random=False),
)
def test_every_nonzero_entry_is_based_on_enough_cells_and_donors(codes, cells, donors, random):
    donor = np.array([random.randrange(5) for _ in codes], int)
    least = Thresholds(cells, donors)
    sums = np.full(6, 7.0)
    part = Rows(len(codes), donor, least).grouped(codes, 6, sums)
    for k in range(6):
        here = codes == k
        enough = here.sum() >= cells and len(set(donor[here])) >= donors
        assert part.values[k] == (7.0 if enough else 0.0)
        if enough:
            assert part.cells <= here.sum()
            assert part.donors <= len(set(donor[here]))


@given(hnp.arrays(np.float64, (30, 3), elements=st.floats(-1e3, 1e3)), st.integers(1, 10))
def test_no_cell_has_more_than_its_share_of_an_open_column(weights, cells):
    part = Rows(30, None, Thresholds(cells, 1)).weighted(weights, np.ones(3))
    for k in range(3):
        squares = np.square(weights[:, k])
        if part.values[k]:
            assert squares.max() <= squares.sum() / cells * (1 + 1e-6)


# ---- the only way into an opened sum ---------------------------------------------------------------------------------

ROOT = Path(__file__).parents[1] / "src" / "cloister"


def test_contributions_are_made_in_one_module_only():
    for path in ROOT.rglob("*.py"):
        if path.name == "disclosure.py":
            continue
        calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        assert not [c.lineno for c in calls if ast.unparse(c.func).split(".")[-1] == "Contribution"], path


class Wire:
    """A channel that only writes a receipt."""

    def __init__(self):
        self.me, self._endpoint = Party("basel"), self
        self.receipt = Receipt({"party": "basel"})


def test_the_receipt_states_the_smallest_group():
    wire = Wire()
    codes = np.repeat([0, 1, 2], [4, 12, 30])
    rows = Rows(46, np.arange(46) % 6, LEAST)
    values = Channel.contribute(wire, rows.grouped(codes, 3), line="L3", what="cells per label", protocol="example")
    assert values.tolist() == [0, 12, 30]
    Channel.contribute(wire, rows.whole(np.ones(2)), line="L4", what="sums", protocol="example")
    (first, _), _ = wire.receipt.entries
    assert first.name == "cells per label | cells 12 | donors 6 | withheld 1"
    assert wire.receipt.smallest_group == {"cells": 12, "donors": 6}
    assert json.loads(wire.receipt.brief())["smallest_group"] == {"cells": 12, "donors": 6}
    (row,) = [text for title, text in signed_rows(json.loads(wire.receipt.brief())) if title == "Smallest group"]
    assert row.startswith("12 cells of 6 donors of this site")


def test_entries_with_few_terms_that_are_not_zero_contribute_zero():
    part = rows_of(np.arange(60) % 4).counted(
        np.full((2, 2), 7.0), np.array([[9, 10], [30, 30]]), np.array([[4, 4], [2, 3]])
    )
    assert part.values.tolist() == [[0.0, 7.0], [0.0, 7.0]]
    assert (part.cells, part.donors, part.withheld) == (10, 3, 2)


@given(hnp.arrays(np.int64, 5, elements=st.integers(0, 40)), st.integers(0, 9))
def test_counts_are_multiples_that_one_row_changes_rarely(counts, offset):
    rows = Rows(40)
    coarse = rows.coarse(counts, offset).values
    assert not np.any(coarse % 10)
    assert np.all(np.abs(coarse - counts) < 10)
    changed = [
        not np.array_equal(rows.coarse(counts[:1] + 1, u).values, rows.coarse(counts[:1], u).values) for u in range(10)
    ]
    assert sum(changed) == 1  # of ten offsets
    assert np.mean([rows.coarse(counts, u).values for u in range(10)], axis=0) == pytest.approx(counts)
    assert not Rows(9).coarse(counts, offset).values.any()


def test_an_offset_lies_below_the_threshold():
    with pytest.raises(ParameterError, match="offset of 0 to 9"):
        Rows(40).coarse(np.array([3]), 10)


def test_one_donor_has_at_most_half_of_a_group():
    """Two cells of others beside twenty of one donor would be three donors, and that donor's mean."""
    x, _ = clouds(600)
    rng = np.random.default_rng(1)
    donor = np.where(np.arange(600) < 420, 0, rng.integers(1, 4, 600))
    x[:200] += 30.0  # a cloud of one donor
    groups = rows_of(donor).similar(x)
    assert len(groups) >= 10
    assert groups.cells.min() >= 10
    for k in range(len(groups)):
        inside = groups.codes == k
        assert inside.sum() == groups.cells[k]
        assert np.bincount(donor[inside]).max() <= inside.sum() / 2
        assert len(set(donor[inside])) >= 3
    assert (groups.codes[donor > 0] >= 0).all()
    assert 300 <= (groups.codes >= 0).sum() <= 360  # at most as many of the donor as of the others


def test_a_far_row_hardly_bends_the_clipped_mean_of_its_group():
    x, _ = clouds(200)
    groups = Rows(200).similar(x)
    far = x.copy()
    far[17] += 1e4
    k = groups.codes[17]
    rest = (groups.codes == k) & (np.arange(200) != 17)
    spread = np.linalg.norm(x[rest] - x[rest].mean(axis=0), axis=1).max()
    assert np.linalg.norm(groups.means(far)[k] - x[rest].mean(axis=0)) > 100 * spread
    assert np.linalg.norm(groups.clipped_means(far)[k] - x[rest].mean(axis=0)) < spread
    others = np.arange(len(groups)) != k
    np.testing.assert_array_equal(groups.clipped_means(far)[others], groups.clipped_means(x)[others])


def test_in_a_clipped_mean_no_row_has_more_than_its_share():
    x = np.random.default_rng(0).standard_t(1.5, (300, 4))
    groups = Rows(300).similar(x)
    means = groups.clipped_means(x, rounds=200)
    for k in range(len(groups)):
        away = x[groups.codes == k] - means[k]
        length = np.linalg.norm(away, axis=1)
        clipped = away * np.minimum(1, np.sort(length)[len(length) // 2] / length)[:, None]
        np.testing.assert_allclose(clipped.sum(axis=0), 0, atol=1e-6)
        squares = np.square(clipped).sum(axis=1)
        assert squares.max() <= 2 / len(length) * squares.sum() * (1 + 1e-9)


# ---- dominance -------------------------------------------------------------------------------------------------------


def test_a_sum_that_one_cell_or_donor_dominates_is_zero():
    """Ten cells of three donors each; by count alone every entry was open, and its sum nearly one cell's value."""
    cells, donors = np.full(4, 10), np.full(4, 3)
    rows = Rows(10, np.arange(10) % 3)
    sums = np.array([100.0, 100.0, 100.0, 0.0])
    one_cell, one_donor = np.array([99.0, 75.0, 10.0, 0.0]), np.array([99.0, 60.0, 91.0, 0.0])
    assert rows.counted(sums, cells, donors).values.tolist() == sums.tolist()
    part = rows.counted(sums, cells, donors, Shares.of(sums, one_cell, one_donor))
    assert part.values.tolist() == [0.0, 100.0, 0.0, 0.0]
    assert part.withheld == 2
    assert rows.counted(sums, cells, donors, Shares.of(sums, one_cell)).values.tolist() == [0.0, 100.0, 100.0, 0.0]
    assert Shares.of(sums, one_cell, one_donor).dominated.tolist() == [True, False, True, False]
    assert rows.sized(cells, donors, Shares.of(sums, None, one_donor)).open.tolist() == [False, True, False, True]


@pytest.mark.parametrize(("sizes", "left"), [((90, 6, 6), 24), ((90, 2, 2), 0), ((20, 20, 20), 60), ((30, 20, 10), 60)])
def test_of_a_donor_with_most_cells_of_a_group_those_that_are_too_many_are_left_out(sizes, left):
    donor = np.repeat(np.arange(3), sizes)
    rows, codes = Rows(len(donor), donor), np.zeros(len(donor), np.int64)
    keep = rows.balanced_rows(codes, 1)
    assert keep.sum() == left
    by_donor = np.bincount(donor[keep], minlength=3)
    assert 2 * by_donor.max() <= left
    assert rows.open_rows(codes, 1).all()  # by count alone all were open
    assert Rows(len(donor)).balanced_rows(codes, 1).all()


def test_sums_over_all_rows_need_more_than_one_donor_with_most_of_them():
    donor = np.repeat(np.arange(3), (95, 3, 2))
    Rows(100, donor).check()
    with pytest.raises(DataError, match="one donor has 95 of 100 cells here, more than 90%"):
        Rows(100, donor).check(magnitudes=True)
    Rows(100, np.repeat(np.arange(3), (88, 6, 6))).check(magnitudes=True)
    Rows(100, donor, Thresholds(10, 1)).check(magnitudes=True)
