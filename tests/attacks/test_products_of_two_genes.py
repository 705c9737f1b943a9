"""Two genes that one cell expresses together: their product does not show that cell's values."""

import numpy as np

from cloister.disclosure import Thresholds
from cloister.study import Party
from cloister.workflows.shared_pca import shared_pca

SITES, HUB = tuple(map(Party, ("basel", "lugano", "vienna"))), Party("hub")
PARAMS = shared_pca.Params(SITES, HUB, n_top_genes=3, n_components=2)
NAMES = ("A", "B", "C")


def site(together, seed=0):
    """120 cells; A and B are expressed by forty cells each, and together by so many cells only."""
    rng = np.random.default_rng(seed)
    x = np.zeros((120, 3))
    x[:40, 0] = rng.integers(1, 9, 40)
    x[40 - together : 80 - together, 1] = rng.integers(1, 9, 40)
    x[:, 2] = rng.integers(20, 40, 120)
    return shared_pca.Cells(NAMES, x)


def old_products(own, space):
    """The step before: Σzzᵀ of all cells, whoever expresses what."""
    z = np.concatenate([(log - space.mean) / space.deviation for log in own.logs(space)])
    z = np.clip(z, -PARAMS.bound, PARAMS.bound)
    return np.concatenate([[float(len(z))], z.sum(axis=0), (z.T @ z)[np.triu_indices(3)]])


def product_read(values, space):
    """What an attacker computes for Σ l_A l_B from the opened sums of one site."""
    n, total, square = values[0], values[1:4], values[5]
    log_sum = total * space.deviation + n * space.mean
    mean, deviation = space.mean[:2], space.deviation[:2]
    return square * deviation.prod() + mean[1] * log_sum[0] + mean[0] * log_sum[1] - n * mean.prod()


def opened(together):
    own = shared_pca.Own(PARAMS, site(together), NAMES, Thresholds(10, 3))
    logs = np.concatenate([*own.logs(shared_pca.Chosen(np.arange(3), np.zeros(3), np.ones(3), 120))])
    space = shared_pca.Chosen(np.arange(3), logs.mean(axis=0), logs.std(axis=0, ddof=1), 120)
    truth = float((logs[:, 0] * logs[:, 1]).sum())
    return product_read(old_products(own, space), space), product_read(own.products(space).values, space), truth


def test_the_product_of_one_cell_is_read_from_the_old_sums_only():
    old, new, truth = opened(together=1)
    assert np.isclose(old, truth)
    assert not np.isclose(new, truth, rtol=0.1)


def test_products_of_enough_cells_are_exact():
    for together in (0, 10, 25):
        old, new, truth = opened(together)
        np.testing.assert_allclose([old, new], truth, atol=1e-9)


def test_what_is_opened_depends_on_means_only():
    """The cell that has both genes could have any other values with the same sums per gene."""
    own = shared_pca.Own(PARAMS, site(1), NAMES, Thresholds(10, 3))
    space = shared_pca.Chosen(np.arange(3), np.full(3, 0.5), np.ones(3), 120)
    logs = np.concatenate([*own.logs(space)])
    expected = logs[:, 0].sum() * logs[:, 1].sum() / 120
    assert np.isclose(product_read(own.products(space).values, space), expected)
