"""A site's contribution to an opened sum is based on enough of its own cells and donors, or it is zero."""

import ast
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from cloister.disclosure import Rows, Thresholds, constant, join
from cloister.errors import DataError, ParameterError
from cloister.net.channel import Channel
from cloister.net.receipts import Receipt
from cloister.report.signed import signed_rows
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
        self.me, self._session = Party("basel"), self
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
