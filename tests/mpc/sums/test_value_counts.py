import numpy as np
import pytest

from cloister.mpc.sums import value_counts
from cloister.mpc.sums.value_counts import MOST, PROBE, Tally, distinct


def counts(rng, n):
    return rng.poisson(3, n).astype(np.float32)


def big_whole_numbers(rng, n):
    return rng.integers(MOST - 20, MOST + 20, n)


def rounded(rng, n):
    return np.round(rng.lognormal(0, 1, n), 1).astype(np.float32)


def rounded_of_either_sign(rng, n):
    return np.round(rng.normal(0, 3, n), 1)


def flags(rng, n):
    return rng.random(n) < 0.5


@pytest.mark.parametrize("draw", [counts, big_whole_numbers, rounded, rounded_of_either_sign, flags])
def test_few_different_values_are_counted_over_all_blocks(draw):
    rng = np.random.default_rng(0)
    blocks = [draw(rng, n) for n in (1000, 1, 300, 0, 5000)]
    counted = Tally()
    for block in blocks:
        found = counted.add(block)
        np.testing.assert_array_equal(found, np.unique(block))
    values, times = np.unique(np.concatenate(blocks), return_counts=True)
    np.testing.assert_array_equal(counted.table.values, values)
    np.testing.assert_array_equal(counted.table.times, times)
    assert counted.table.values.dtype == np.float64


def test_blocks_of_several_kinds_make_one_table():
    counted = Tally()
    for block in ([1, 2, 2], [0.5, 2], [70_000, 1]):
        counted.add(np.array(block))
    assert counted.table.values.tolist() == [0.5, 1, 2, 70_000]
    assert counted.table.times.tolist() == [1, 2, 3, 1]


def test_many_different_values_are_not_kept_and_come_back_as_they_are():
    counted = Tally()
    counted.add(np.array([1.0, 1.0]))
    many = np.random.default_rng(0).random(2 * MOST)
    assert counted.add(many) is many
    assert counted.table is None
    again = np.array([1.0, 1.0])
    assert counted.add(again) is again  # nor later, or the table would lack what came before
    assert counted.table is None


@pytest.mark.parametrize("n", [MOST, MOST + 1])
def test_the_largest_table(n):
    counted = Tally()
    for block in np.array_split(np.arange(n) + 0.5, 3):
        counted.add(block)
    assert (counted.table is None) == (n > MOST)


def test_many_that_come_after_the_values_that_are_looked_at_first():
    counted = Tally()
    counted.add(np.concatenate([np.full(PROBE, 0.5), np.arange(MOST) + 0.25]))
    assert counted.table is None


def test_not_all_of_many_are_sorted(monkeypatch):
    sizes, unique = [], np.unique
    monkeypatch.setattr(value_counts.np, "unique", lambda x, **options: sizes.append(len(x)) or unique(x, **options))
    Tally().add(np.random.default_rng(0).random(2 * PROBE))
    assert sizes == [PROBE]


def test_distinct_of_none():
    assert [len(x) for x in distinct(np.empty(0))] == [0, 0]
