import numpy as np
import pytest
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.linear_model import Ridge

from cloister.errors import ParameterError
from cloister.models.discriminant import SETTINGS, Setting, Solver, Statistics, choose_columns


def cells(n=400, h=12, K=4, seed=0):
    rng = np.random.default_rng(seed)
    codes = rng.choice(K, n, p=np.array([0.4, 0.3, 0.2, 0.1])[:K] / sum([0.4, 0.3, 0.2, 0.1][:K]))
    mix = rng.normal(0, 1, (h, h)) / 3
    return rng.normal(0, 1, (n, h)) @ mix + rng.normal(0, 0.8, (K, h))[codes] + 3.0, codes


def standardised(x):
    return (x - x.mean(axis=0)) / x.std(axis=0)


@pytest.mark.parametrize("shrinkage", [0.1, 0.7])
def test_a_discriminant_is_that_of_scikit_learn(shrinkage):
    x, codes = cells()
    ours = Solver(Statistics.of(x, codes, 4), spread=0.0).fit(Setting(shrinkage)).scores(x)
    oracle = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=shrinkage).fit(standardised(x), codes)
    theirs = oracle.decision_function(standardised(x))
    np.testing.assert_allclose(
        ours - ours.mean(axis=1, keepdims=True), theirs - theirs.mean(axis=1, keepdims=True), atol=1e-7
    )


def test_a_ridge_regression_without_weights_is_that_of_scikit_learn():
    x, codes = cells()
    ours = Solver(Statistics.of(x, codes, 4), spread=0.0).fit(Setting(0.0, 0.3)).scores(x) / 8
    oracle = Ridge(alpha=0.3 * len(x)).fit(standardised(x), np.eye(4)[codes])
    np.testing.assert_allclose(ours, oracle.predict(standardised(x)), atol=1e-8)


def test_a_weighted_ridge_regression_is_that_of_classes_with_one_covariance():
    """Cells whose classes have the same scatter: weights per class follow from one Gram matrix."""
    rng = np.random.default_rng(1)
    noise = rng.normal(0, 1, (60, 5))
    noise -= noise.mean(axis=0)
    means = rng.normal(0, 1, (3, 5))
    x = np.concatenate([means[k] + np.tile(noise, (3 - k, 1)) for k in range(3)])  # 180, 120 and 60 cells
    codes = np.repeat([0, 1, 2], [180, 120, 60])
    ours = Solver(Statistics.of(x, codes, 3), spread=0.0).fit(Setting(0.0, 0.5, 1.0)).scores(x) / 8
    weights = 1 / np.bincount(codes)[codes]
    weights /= weights.sum()
    z = standardised(x)
    oracle = Ridge(alpha=0.5).fit(z, np.eye(3)[codes], sample_weight=weights)
    np.testing.assert_allclose(ours, oracle.predict(z), atol=1e-8)


def test_typicality_is_one_at_a_mean_and_minus_one_at_the_middle():
    x, codes = cells()
    statistics = Statistics.of(x, codes, 4)
    typical = Solver(statistics, spread=0.0).typicality()
    means = statistics.sums / statistics.counts[:, None]
    np.testing.assert_allclose(np.diag(typical.scores(means)), 1.0, atol=1e-9)
    np.testing.assert_allclose(typical.scores(x.mean(axis=0)[None]), -1.0, atol=1e-9)


def test_statistics_of_the_rest_are_those_of_the_other_cells():
    x, codes = cells()
    rest = Statistics.of(x, codes, 4).less(Statistics.of(x[:100], codes[:100], 4))
    other = Statistics.of(x[100:], codes[100:], 4)
    for name in ("counts", "sums", "gram"):
        np.testing.assert_allclose(getattr(rest, name), getattr(other, name), atol=1e-8)
    one = Statistics.of(x, codes, 4).less(Statistics.of(x[codes != 2], codes[codes != 2], 4))
    assert list(one.present) == [2]


def test_classes_without_cells_are_never_called():
    x, codes = cells()
    z = Solver(Statistics.of(x, codes, 6)).fit(SETTINGS[0]).scores(x)
    assert np.isneginf(z[:, 4:]).all()
    assert np.mean(z.argmax(axis=1) == codes) > 0.6


def test_the_columns_are_those_whose_means_differ():
    x, codes = cells(h=12)
    x[:, 3] += 5.0 * codes
    x[:, 7] -= 4.0 * (codes == 3)
    s = Statistics.of(x, codes, 4)
    assert list(choose_columns(s.counts, s.sums, 2)) == [3, 7]
    assert len(choose_columns(s.counts, s.sums * 0, 5)) == 0  # no column differs


@pytest.mark.parametrize("bad", [(0.0, 0.0, 0.0), (1.5, 0.0, 0.0), (0.5, -1.0, 0.0), (0.5, 1.0, 2.0)])
def test_bad_settings(bad):
    with pytest.raises(ParameterError):
        Setting(*bad)
