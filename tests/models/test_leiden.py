"""Leiden on a graph of neighbours: UMAP's weights, partitions, and how good they are."""

import sys

import numpy as np
import pytest

from cloister.errors import MissingExtra
from cloister.models import leiden

igraph = pytest.importorskip("igraph", reason="the extra `cluster`")


def blobs(seed=0, n=150, kinds=3, d=5):
    rng = np.random.default_rng(seed)
    labels = np.arange(n) % kinds
    return 6 * np.eye(kinds, d)[labels] + rng.normal(0, 0.5, (n, d)), labels


@pytest.mark.parametrize("block", [leiden.BLOCK, 40])
def test_nearest_are_those_of_all_distances(monkeypatch, block):
    monkeypatch.setattr(leiden, "BLOCK", block)
    x, _ = blobs(n=60)
    at, far = leiden.nearest(x[:20], x, 7)
    d = np.sqrt(np.square(x[:20, None] - x[None]).sum(axis=2))
    np.testing.assert_array_equal(at, np.argsort(d, axis=1, kind="stable")[:, :7])
    np.testing.assert_allclose(far, np.sort(d, axis=1)[:, :7])


def test_weights_are_those_of_the_paper():
    """Each point's weights add up to log2 k before the union; the nearest other point has weight 1."""
    x, _ = blobs(n=80)
    k, graph = 10, leiden.neighbour_graph(x, 10)
    at, far = leiden.nearest(x, x, k)
    rho = far[:, 1]
    one = np.zeros((80, 80))
    for i in range(80):
        low, high = 1e-6, 1e3
        for _ in range(200):
            sigma = (low + high) / 2
            w = np.exp(-np.maximum(far[i, 1:] - rho[i], 0) / sigma)
            low, high = (low, sigma) if w.sum() > np.log2(k) else (sigma, high)
        one[i, at[i, 1:]] = w
    np.testing.assert_allclose(graph.toarray(), one + one.T - one * one.T, atol=1e-6)
    assert graph.diagonal().max() == 0


def test_equal_points_have_a_graph():
    graph = leiden.neighbour_graph(np.zeros((20, 3)), 5)
    assert np.all(np.isfinite(graph.data))
    assert graph.diagonal().max() == 0


def test_kinds_are_found_the_largest_first():
    x, labels = blobs(n=151)
    found = leiden.partition(leiden.neighbour_graph(x, 10), 0.3, seed=1)
    assert found.max() == 2
    np.testing.assert_array_equal(found, labels)  # 51, 50 and 50 points
    same = leiden.partition(leiden.neighbour_graph(x, 10), 0.3, seed=1)
    np.testing.assert_array_equal(found, same)


def test_modularity_is_that_of_igraph():
    x, labels = blobs()
    graph = leiden.neighbour_graph(x, 10)
    rows, columns = np.triu_indices(150, 1)
    dense = graph.toarray()[rows, columns]
    net = igraph.Graph(n=150, edges=np.stack([rows, columns], axis=1)[dense > 0])
    for codes in (labels, np.arange(150) % 5, np.zeros(150, int)):
        wanted = net.modularity(codes.tolist(), weights=dense[dense > 0].tolist())
        assert leiden.modularity(graph, codes, 1.0) == pytest.approx(wanted)


def test_resolution_gives_more_clusters_and_runs_a_better_one():
    x = np.random.default_rng(0).normal(size=(300, 3))
    graph = leiden.neighbour_graph(x, 15)
    few, many = (leiden.partition(graph, r, 0).max() for r in (0.3, 3.0))
    assert few < many
    one, best = (leiden.modularity(graph, leiden.partition(graph, 1.0, 5, runs), 1.0) for runs in (1, 10))
    assert best >= one


def test_igraph_is_an_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "igraph", None)
    with pytest.raises(MissingExtra, match="cluster"):
        leiden.partition(leiden.neighbour_graph(blobs()[0], 5), 1.0, 0)
