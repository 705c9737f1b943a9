import numpy as np
import pytest

from cloister.workflows.common.bounded_values import bounded_columns, shares_of


@pytest.mark.parametrize("least", [2, 3, 5])
def test_no_row_dominates_a_column(least):
    rng = np.random.default_rng(least)
    x = rng.standard_t(1.2, (30, 200))
    x[:, :20] = np.where(rng.random((30, 20)) < 0.2, rng.uniform(1, 9, (30, 20)), 0.0)
    made = bounded_columns(x, least)
    assert shares_of(made).max() <= 1 / least + 1e-6
    assert (np.sign(made - np.median(x, axis=0)) * np.sign(x - np.median(x, axis=0)) >= 0).mean() > 0.99


def test_values_within_the_bound_stay():
    x = np.random.default_rng(0).uniform(-1, 1, (20, 5))
    np.testing.assert_array_equal(bounded_columns(x, 3), x)
    np.testing.assert_array_equal(bounded_columns(x * 1e6, 1), x * 1e6)


@pytest.mark.parametrize("far", [1e2, 1e8, 1e300])
def test_where_a_far_value_moves_to_does_not_depend_on_it(far):
    x = np.random.default_rng(0).normal(size=(20, 1))
    one, other = x.copy(), x.copy()
    one[4], other[4] = 50.0, far
    np.testing.assert_allclose(bounded_columns(one, 3), bounded_columns(other, 3), rtol=1e-9)


def test_a_column_in_which_one_row_differs_becomes_constant():
    x = np.zeros((12, 2))
    x[3, 0], x[5, 1] = 7.0, -1e-3
    assert not bounded_columns(x, 3).any()
