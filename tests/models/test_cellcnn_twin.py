"""The clear twin against finite differences and plain formulas; the PyTorch baseline; consensus filters."""

import dataclasses

import numpy as np
import pytest

from cloister.errors import ParameterError
from cloister.models import cellcnn

CONFIG = cellcnn.Config(markers=5, filters=3, classes=2, batch=40, steps=30, learning_rate=0.3)


def data(seed=0, n=40, m=5, classes=2):
    rng = np.random.default_rng(seed)
    y = rng.integers(0, classes, n)
    X = rng.normal(0, 1, (n, m))
    X[:, 0] += 2 * y - 1
    return X, y


@pytest.mark.parametrize("interval", [1.0, 3.0])
def test_the_sigmoid_is_fitted_on_its_interval(interval):
    a0, a1, a3 = cellcnn.sigmoid_fit(interval)
    u = np.linspace(-interval, interval, 101)
    exact = 1 / (1 + np.exp(-u))
    assert np.abs(a0 + a1 * u + a3 * u**3 - exact).max() < (1e-3 if interval == 1 else 2e-2)
    # no other cubic through (0, 1/2) is closer in the mean square
    loss = ((a0 + a1 * u + a3 * u**3 - exact) ** 2).sum()
    for d1, d3 in ((1e-3, 0), (0, 1e-3), (-1e-3, 0), (0, -1e-3)):
        assert ((a0 + (a1 + d1) * u + (a3 + d3) * u**3 - exact) ** 2).sum() > loss


def test_gradients_are_those_of_the_squared_error():
    X, y = data()
    Y = cellcnn.one_hot(y, 2)
    w = cellcnn.initial(CONFIG)

    def loss(W, V):
        return ((cellcnn.sigmoid(CONFIG, X @ W @ V) - Y) ** 2).sum() / (2 * CONFIG.batch)

    Z = cellcnn.gradient(CONFIG, w.M, X, Y)
    for name, found in (("W", Z @ w.V.T), ("V", w.W.T @ Z)):
        at = getattr(w, name)
        for i, j in ((0, 0), (2, 1)):
            step = np.zeros_like(at)
            step[i, j] = 1e-6
            plus, minus = ({"W": w.W, "V": w.V, name: at + s * step} for s in (1, -1))
            assert abs((loss(**plus) - loss(**minus)) / 2e-6 - found[i, j]) < 1e-7


def test_momentum_is_the_papers():
    w = cellcnn.initial(CONFIG)
    Z = np.ones((5, 2))
    one = cellcnn.update(CONFIG, w, Z)
    two = cellcnn.update(CONFIG, one, np.zeros((5, 2)))
    np.testing.assert_allclose(one.W, w.W - 0.3 * Z @ w.V.T)
    np.testing.assert_allclose(two.W, one.W - 0.9 * (w.W - one.W) * -1 * -1)
    np.testing.assert_allclose(two.vV, 0.9 * one.vV)


def test_training_learns_and_counts_logits_outside_the_interval():
    X, y = data(n=400)
    batches = cellcnn.draw_batches(X, y, CONFIG, np.random.default_rng(0))
    trace = cellcnn.Trace()
    w = cellcnn.train(CONFIG, [batches, batches], trace=trace)
    assert trace.loss[-1] < trace.loss[0]
    assert (cellcnn.predict(cellcnn.logits(w, X)) == y).mean() > 0.8
    assert trace.logits == 2 * 30 * 40 * 2
    far = cellcnn.Trace()
    cellcnn.train(dataclasses.replace(CONFIG, steps=2), [(3 * batches[0], batches[1])], trace=far)
    assert far.outside > 0


def test_inputs_per_class_and_per_donor():
    rng = np.random.default_rng(0)
    cells = rng.normal(size=(90, 4))
    donors, labels = np.repeat(["a", "b", "c"], 30), np.repeat([0, 1, 1], 30)
    X, y = cellcnn.draw_inputs(cells, donors, labels, n_cells=10, per="class", n_inputs=6, rng=rng)
    assert X.shape == (12, 4)
    assert y.tolist() == [0] * 6 + [1] * 6
    X, y = cellcnn.draw_inputs(cells, donors, labels, n_cells=10, per="donor", n_inputs=6, rng=rng)
    assert y.tolist() == [0] * 6 + [1] * 12


def test_every_input_is_seen_once_per_epoch():
    X = np.arange(80.0).reshape(80, 1)
    config = cellcnn.Config(markers=1, batch=20, steps=8)
    seen, _ = cellcnn.draw_batches(X, np.zeros(80, int), config, np.random.default_rng(0))
    assert sorted(seen[:4].ravel()) == sorted(seen[4:].ravel()) == list(range(80))


def test_consensus_filters_find_the_repeated_ones():
    rng = np.random.default_rng(0)
    good, other = np.eye(6)[0], np.eye(6)[3]
    models = []
    for _ in range(5):
        W = np.stack([good + rng.normal(0, 0.02, 6), other + rng.normal(0, 0.02, 6)], axis=1)
        models.append(cellcnn.Weights(W, np.array([[-1.0, 1.0], [1.0, -1.0]]), W * 0, np.zeros((2, 2))))
    W, V = cellcnn.consensus_filters(models, [0.5, 0.9, 0.8, 0.7, 0.1])
    assert W.shape == (2, 6)
    best = W[(V[:, 1] - V[:, 0]).argmax()]
    assert best.argmax() == 0


def test_models_survive_json_and_reject_anything_else():
    made = cellcnn.Model(CONFIG, tuple("abcde"), ("x", "y"), 5.0, np.zeros(5), np.ones(5), cellcnn.initial(CONFIG))
    again = cellcnn.Model.from_json(made.to_json())
    np.testing.assert_array_equal(again.weights.V, made.weights.V)
    assert again.config == CONFIG
    for bad in ("", "{}", '{"format": "cloister-cellcnn/1"}', made.to_json()[:-20]):
        with pytest.raises(ParameterError, match="not a CellCnn model"):
            cellcnn.Model.from_json(bad)


def test_constant_markers_become_zero():
    x = cellcnn.standardise(np.array([[1.0, 2.0]]), 0.0, np.array([0.0, 2.0]), np.array([2.0, 0.0]))
    assert x.tolist() == [[0.5, 0.0]]


@pytest.mark.parametrize("bad", [{"classes": 1}, {"momentum": 1.0}, {"learning_rate": 0.0}, {"interval": 9.0}])
def test_bad_configurations(bad):
    with pytest.raises(ParameterError):
        cellcnn.Config(**{"markers": 5, **bad})
