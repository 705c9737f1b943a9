import numpy as np
import pytest
import scipy.sparse
from sklearn.linear_model import LogisticRegression

from cloister.errors import ParameterError
from cloister.models import logistic
from cloister.models.logistic import Memory, Metric, Problem, Rows


def cells(n=300, h=40, K=4, seed=0, sparse=True):
    rng = np.random.default_rng(seed)
    centres = rng.normal(0, 0.7, (K, h))
    codes = rng.integers(0, K, n)
    x = np.maximum(rng.normal(0, 1, (n, h)) * rng.uniform(0.2, 3, h) + centres[codes], 0)
    return (scipy.sparse.csr_matrix(x) if sparse else x), codes, rng.uniform(0.5, 2, n)


def fit(x, codes, weights, penalty, rank=10, **limits):
    rows = Rows(x, codes, weights)
    mean = np.asarray(x.mean(axis=0)).ravel()
    h, K = x.shape[1], int(codes.max()) + 1
    directions = np.random.default_rng(1).choice([-1.0, 1.0], (h, min(h, rank + 5)))
    basis = logistic.principal_basis(logistic.sketch_sums(rows, mean, directions), directions, rank)
    problem = Problem(penalty, float(weights.sum()), basis, 0.5)
    limits = {"most": 200, "tolerance": 1e-7} | limits
    return mean, *logistic.minimise_here(rows, mean, problem, np.zeros((h + 1, K)), Memory(), **limits)


@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize("penalty", [1.0, 1e-2, 1e-4])
def test_equals_scikit_learn(sparse, penalty):
    x, codes, weights = cells(sparse=sparse)
    mean, theta, converged = fit(x, codes, weights, penalty)
    assert converged
    oracle = LogisticRegression(C=1 / (penalty * weights.sum()), tol=1e-10, max_iter=100_000)
    oracle.fit(x, codes, sample_weight=weights)
    np.testing.assert_allclose(theta[:-1].T, oracle.coef_, atol=1e-4)  # the figure
    intercept = theta[-1] - mean @ theta[:-1]
    difference = intercept - oracle.intercept_
    np.testing.assert_allclose(difference, difference.mean(), atol=1e-3)  # free up to one number for all


def test_sums_do_not_depend_on_blocks(monkeypatch):
    x, codes, weights = cells(n=101)
    rows, mean = Rows(x, codes, weights), np.asarray(x.mean(axis=0)).ravel()
    theta, basis = np.random.default_rng(2).normal(0, 0.1, (41, 4)), np.linalg.qr(np.eye(40)[:, :6])[0]

    def sums():
        loss, g = logistic.gradient_sums(rows, theta, mean)
        return loss, g, logistic.curvature_sums(rows, theta, mean, basis), logistic.sketch_sums(rows, mean, basis)

    whole = sums()
    monkeypatch.setattr(logistic, "BLOCK", 64)
    for a, b in zip(whole, sums(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-9)


def test_the_gradient_and_the_hessian_are_derivatives():
    x, codes, weights = cells(n=80, h=6, K=3, sparse=False)
    rows, mean, rng = Rows(x, codes, weights), x.mean(axis=0), np.random.default_rng(3)
    theta, step = rng.normal(0, 0.3, (7, 3)), rng.normal(0, 1, (7, 3))
    e = 1e-5
    (up, g_up), (down, g_down) = (logistic.gradient_sums(rows, theta + s * e * step, mean) for s in (1, -1))
    g = logistic.gradient_sums(rows, theta, mean)[1]
    assert (up - down) / (2 * e) == pytest.approx(float((g * step).sum()), rel=1e-6)
    flat = logistic.curvature_sums(rows, theta, mean, np.eye(6))
    H = np.zeros((21, 21))
    H[np.triu_indices(21)] = flat
    H += np.triu(H, 1).T
    np.testing.assert_allclose(H @ step.T.ravel(), ((g_up - g_down) / (2 * e)).T.ravel(), rtol=1e-5, atol=1e-5)


def test_a_stride_stands_for_all_cells(monkeypatch):
    x, codes, weights = cells(n=4000, h=5, K=2, sparse=False)
    rows, mean, theta = Rows(x, codes, weights), x.mean(axis=0), np.zeros((6, 2))
    whole = logistic.curvature_sums(rows, theta, mean, np.eye(5))
    monkeypatch.setattr(logistic, "CURVATURE_CELLS", 1000)
    np.testing.assert_allclose(logistic.curvature_sums(rows, theta, mean, np.eye(5)), whole, rtol=0.2, atol=60)


def test_the_start_matrix_saves_most_of_the_passes():
    """The reason for V: on cells that vary along few directions, plain L-BFGS needs several times the passes."""
    rng = np.random.default_rng(4)
    loadings = rng.normal(0, 1, (8, 60)) * (10.0 ** -np.arange(8) * 30)[:, None]
    place = rng.normal(0, 1, (500, 8))
    codes = (place[:, :3] + rng.normal(0, 0.5, (500, 3))).argmax(axis=1)
    x = place @ loadings + rng.normal(0, 0.05, (500, 60))

    def asked(rank):
        for most in range(10, 1000, 10):
            if fit(x, codes, np.ones(500), 1e-3, rank=rank, most=most, tolerance=1e-5)[2]:
                return most
        return 1000

    assert 2 * asked(10) < asked(1)


def test_pairs_serve_under_another_penalty():
    rng = np.random.default_rng(5)
    s, y, g = (rng.normal(0, 1, (5, 2)) for _ in range(3))
    y = np.where((s * y).sum() > 0, y, -y)
    memory = Memory([s], [y])
    ridge = np.array([[0.3]] * 4 + [[0.0]])
    metric = Metric(np.eye(4), np.eye(10), np.ones(2))
    d = memory.direction(y + ridge * s, metric, ridge)
    np.testing.assert_allclose(-d, s, atol=1e-12)  # the secant equation, with the penalty in it
    assert float((memory.direction(g, metric, ridge) * g).sum()) < 0


def begun(penalty=1e-2):
    """A fit that waits for its first gradient, and the gradient of its cells."""
    x, codes, weights = cells(n=60, h=4, K=2, sparse=False)
    problem = Problem(penalty, float(weights.sum()), np.eye(4), 0.0)
    work = logistic.minimise(problem, np.zeros((5, 2)), Memory(), most=20, tolerance=1e-6)
    rows, mean = Rows(x, codes, weights), x.mean(axis=0)
    ask = next(work)
    ask = work.send(logistic.curvature_sums(rows, ask.theta, mean, problem.basis))
    return work, *logistic.gradient_sums(rows, ask.theta, mean)


@pytest.mark.parametrize("size", [1e3, 1e12, -1e15])
def test_a_malicious_gradient_moves_the_point_by_a_limited_step(size):
    """Whatever gradient a party dictates, the next point lies within the trust region."""
    work, loss, g = begun()
    before = 0.0
    sign = np.sign(np.arange(g.size) % 2 - 0.5).reshape(g.shape)
    for _ in range(8):
        ask = work.send((loss, size * sign))
        loss -= abs(size) * 1e3  # claims that the loss fell, so that the step is taken
        norm = float(np.linalg.norm(ask.theta[:-1]))
        assert norm <= min(2 * before + 1, np.sqrt(2 * np.log(2) / 1e-2)) * (1 + 1e-9)
        if ask.curvature:
            break
        before = norm


def test_gradients_of_no_convex_loss_end_the_fit():
    """A gradient that falls along the step: s·y < 0."""
    work, loss, g = begun()
    ask = work.send((loss, g))
    step = ask.theta
    with pytest.raises(ParameterError, match="no convex loss"):
        work.send((loss - 1e6, g - 1e3 * np.abs(g).max() * step))


def test_the_trusted_length_keeps_the_whole_step_where_it_is_small():
    theta = np.zeros((3, 2))
    assert logistic.trusted_length(theta, np.full((3, 2), 0.1), 10.0) == 1.0
    assert logistic.trusted_length(theta, np.full((3, 2), 50.0), 10.0) == pytest.approx(0.01)
    theta[0, 0] = 9.0
    d = np.zeros((3, 2))
    d[0, 0] = 4.0
    assert logistic.trusted_length(theta, d, 10.0) == pytest.approx(0.25)


def test_cells_that_are_shifted_come_back():
    """Scores of cells from elsewhere carry one shift; with it half of the labels are wrong, without it almost none."""
    rng = np.random.default_rng(6)
    centers = 4.0 * np.eye(3)
    codes = rng.integers(0, 3, 600)
    z = centers[codes] + rng.normal(0, 0.8, (600, 3)) + np.array([3.0, -2.0, 0.5])
    assert np.mean(z.argmax(axis=1) == codes) < 0.75
    assert np.mean(logistic.align(z, centers).argmax(axis=1) == codes) > 0.97
    few = z[:12]
    np.testing.assert_array_equal(logistic.align(few[:9], centers), few[:9])  # nothing to go by


def test_unsure_scores_are_aligned_as_well():
    """A strong penalty gives all labels like probabilities: means weighted by these mix the labels."""
    rng = np.random.default_rng(0)
    centers, shift = 0.3 * np.eye(3), np.array([0.05, -0.1, 0.05])
    z = centers[rng.choice(3, 600, p=[0.8, 0.15, 0.05])] + shift + rng.normal(0, 0.03, (600, 3))
    weighted = np.zeros(3)
    for _ in range(6):
        p = logistic.probabilities(z - weighted)
        weighted = ((p.T @ z) / p.sum(axis=0)[:, None] - centers).mean(axis=0)
    assert np.abs(weighted - shift).max() > 0.1
    np.testing.assert_allclose((z - logistic.align(z, centers))[0], shift, atol=0.02)
