"""Variance of counts beside that of genes with the same mean, and what no single cell may decide."""

import numpy as np
import pytest
import scipy.sparse

from cloister.models import variable_genes


def counts(seed=0, n=200, g=120):
    rng = np.random.default_rng(seed)
    mean = rng.gamma(0.5, 3.0, g)
    x = rng.poisson(mean * rng.gamma(5, 0.2, (n, 1)))
    x[: n // 2, :5] = rng.poisson(8, (n // 2, 5))  # five genes of one kind of cells
    x[n // 2 :, :5] = 0
    return x.astype(float)


def test_loess_follows_a_parabola_and_smooths_noise():
    x = np.sort(np.random.default_rng(0).uniform(-2, 2, 400))
    y = 1 + 0.5 * x - 0.3 * x**2
    np.testing.assert_allclose(variable_genes.loess(x, y), y, atol=1e-3)  # lines between 300 points
    noisy = y + np.random.default_rng(1).normal(0, 0.2, 400)
    assert np.abs(variable_genes.loess(x, noisy) - y).mean() < 0.05


def test_normalised_variance_is_that_of_clipped_standardised_counts():
    x = counts()
    found = variable_genes.normalised_variance(scipy.sparse.csc_matrix(x))
    assert np.all(found[x.max(axis=0) == 0] == 0)
    x, found = x[:, x.max(axis=0) > 0], found[x.max(axis=0) > 0]
    mean, variance = x.mean(axis=0), x.var(axis=0, ddof=1)
    fit = variable_genes.loess(np.log10(mean), np.log10(variance))
    deviation = np.sqrt(10**fit)
    z = np.minimum((x - mean) / deviation, np.sqrt(len(x)))
    np.testing.assert_allclose(found, np.square(z).sum(axis=0) / (len(x) - 1), rtol=1e-9)
    assert set(np.argsort(-found)[:5]) == set(range(5))


def test_genes_that_do_not_vary_have_no_variance():
    x = counts()
    x[:, 7], x[:, 8] = 0, 3
    found = variable_genes.normalised_variance(scipy.sparse.csc_matrix(x))
    assert found[7] == found[8] == 0
    assert np.all(variable_genes.normalised_variance(scipy.sparse.csc_matrix(np.zeros((5, 3)))) == 0)


@pytest.mark.parametrize("seed", range(5))
def test_no_cell_has_more_of_a_gene_than_allowed(seed):
    rng = np.random.default_rng(seed)
    x = np.floor(rng.lognormal(0, 2, (60, 40)) * (rng.random((60, 40)) < rng.uniform(0.05, 1, 40)))
    found = variable_genes.capped(x, None, 10, 3).toarray()
    squares = np.square(found)
    assert np.all(squares.max(axis=0) <= squares.sum(axis=0) / 10 * (1 + 1e-9))
    enough = (x > 0).sum(axis=0) >= 10
    np.testing.assert_array_equal((found > 0).any(axis=0), enough)
    assert np.all(found <= x)
    same = np.square(x).max(axis=0) <= np.square(x).sum(axis=0) / 10
    np.testing.assert_allclose(found[:, same & enough], x[:, same & enough])  # nothing is taken off without need
    # the largest cap: a little more would be too much
    for g in np.flatnonzero(enough & ~same):
        c = found[:, g].max() * 1.001
        assert c**2 > np.square(np.minimum(x[:, g], c)).sum() / 10 * (1 - 1e-9)


def test_values_of_few_donors_are_capped():
    x, donor = np.ones((60, 2)), np.arange(60) % 6
    x[donor < 2, 0] = 50.0
    x[donor >= 2, 1] = 0.0
    found = variable_genes.capped(x, donor, 10, 3).toarray()
    assert found[:, 0].max() == 1.0
    assert found[:, 1].max() == 0.0


def test_ranks_and_choice():
    np.testing.assert_array_equal(variable_genes.ranked(np.array([0.5, 3, 0, 2]), 2), [-1, 0, -1, 1])
    np.testing.assert_array_equal(variable_genes.ranked(np.array([0.5, 0, 0]), 3), [0, -1, -1])
    picked, rank = variable_genes.chosen(np.array([2.0, 1, 2, 0]), np.array([6.0, 0, 2, 0]), 3)
    assert picked.tolist() == [True, True, True, False]
    assert rank.tolist() == [3, 0, 1, np.inf]
    assert variable_genes.chosen(np.array([2.0, 1, 2, 0]), np.array([6.0, 0, 2, 0]), 1)[0].tolist() == [0, 0, 1, 0]
