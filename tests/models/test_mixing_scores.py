"""LISI and silhouette widths equal what loops over single cells give, and harmonypy's and scikit-learn's."""

import math

import numpy as np
import pytest

from cloister.models import mixing_scores
from cloister.models.mixing_scores import batch_asw, clisi, ilisi, label_asw, lisi, silhouettes


def cells(n=150, apart=3.0, seed=0):
    rng = np.random.default_rng(seed)
    batch, label = rng.integers(0, 3, n), rng.integers(0, 2, n)
    x = rng.normal(size=(n, 4)) + apart * np.eye(3, 4)[batch] + 8 * np.outer(label, [0, 0, 0, 1])
    return x, batch, label


def lisi_by_hand(x, codes, perplexity):
    found = []
    for i in range(len(x)):
        away = sorted((math.dist(x[i], x[j]), codes[j]) for j in range(len(x)) if j != i)[: int(3 * perplexity)]
        low, high = 0.0, 1e4
        for _ in range(200):
            beta = (low + high) / 2
            p = np.array([math.exp(-beta * (d - away[0][0])) for d, _ in away])
            p /= p.sum()
            entropy = -sum(q * math.log(q) for q in p if q > 0)
            low, high = (beta, high) if entropy > math.log(perplexity) else (low, beta)
        shares = {}
        for q, (_, code) in zip(p, away, strict=True):
            shares[code] = shares.get(code, 0.0) + q
        found.append(1 / sum(s * s for s in shares.values()))
    return np.array(found)


@pytest.mark.parametrize("perplexity", [5.0, 30.0])
def test_lisi_equals_that_of_a_loop(monkeypatch, perplexity):
    x, batch, _ = cells()
    monkeypatch.setattr(mixing_scores, "ROWS", 4000)  # some cells at a time
    np.testing.assert_allclose(lisi(x, batch, perplexity), lisi_by_hand(x, batch, perplexity), rtol=1e-5)


def test_lisi_beside_harmonypy():
    hm = pytest.importorskip("harmonypy", reason="an oracle only")
    pd = pytest.importorskip("pandas")
    x, batch, _ = cells(300)
    peer = hm.compute_lisi(x, pd.DataFrame({"batch": batch.astype(str)}), ["batch"], 30)[:, 0]
    np.testing.assert_allclose(np.median(lisi(x, batch)), np.median(peer), rtol=0.02)  # it counts the cell itself


def test_silhouettes_equal_those_of_scikit_learn(monkeypatch):
    metrics = pytest.importorskip("sklearn.metrics")
    x, batch, label = cells()
    batch[0] = 7  # a batch of one cell has width 0
    monkeypatch.setattr(mixing_scores, "ROWS", 4000)
    np.testing.assert_allclose(silhouettes(x, batch), metrics.silhouette_samples(x, batch), atol=1e-9)
    assert label_asw(x, label) == pytest.approx((metrics.silhouette_score(x, label) + 1) / 2)


def test_scores_rise_with_mixing_and_with_purity():
    mixed, apart = cells(apart=0.0), cells(apart=6.0)
    assert ilisi(*mixed[:2]) > 0.7
    assert ilisi(*apart[:2]) < 0.05
    assert batch_asw(*mixed) > batch_asw(*apart) + 0.2
    x, _, label = mixed
    shuffled = np.random.default_rng(1).permutation(label)
    assert clisi(x, label) > 0.95
    assert clisi(x, shuffled) < 0.3
    assert label_asw(x, label) > label_asw(x, shuffled) + 0.1


def test_what_has_one_kind_only():
    x, batch, _ = cells(20)
    one = np.zeros(20, int)
    assert ilisi(x, one) == clisi(x, one) == batch_asw(x, one, batch) == 1.0
    assert label_asw(x, one) == 0.5
    assert lisi(x[:1], one[:1]).tolist() == [1.0]
