"""Where cells lie on a map: by their own nearest points alone, at the larger part, the same each time."""

import sys

import numpy as np
import pytest

from cloister.errors import MissingExtra
from cloister.models import umap_map


@pytest.fixture
def points():
    """Three kinds in five dimensions, and a map of them."""
    rng = np.random.default_rng(0)
    kind = np.arange(300) % 3
    x = 8 * np.eye(3, 5)[kind] + rng.normal(0, 1, (300, 5))
    return x, 10 * np.eye(3, 2)[kind] + x[:, 3:], kind


def test_a_cell_lies_where_the_points_like_it_lie(points):
    x, y, kind = points
    rng = np.random.default_rng(1)
    new = np.arange(60) % 3
    placed = umap_map.place(8 * np.eye(3, 5)[new] + rng.normal(0, 1, (60, 5)), x, y, 20)
    centres = np.stack([y[kind == k].mean(axis=0) for k in range(3)])
    near = np.square(placed[:, None] - centres).sum(axis=2).argmin(axis=1)
    np.testing.assert_array_equal(near, new)


def test_a_cell_between_two_parts_lies_in_the_larger_one():
    """The mean of its neighbours would be on empty ground."""
    x = np.array([[1.0]] * 14 + [[-1.0]] * 6)
    y = np.concatenate([np.tile([10.0, 0.0], (14, 1)), np.tile([-10.0, 0.0], (6, 1))])
    placed = umap_map.place(np.zeros((1, 1)), x, y, 20)
    assert np.linalg.norm(placed[0] - [10, 0]) < 0.5


def test_a_cell_has_its_place_whoever_comes_with_it(points, monkeypatch):
    x, y, _ = points
    cells = np.random.default_rng(2).normal(0, 3, (50, 5))
    cells[0] *= 1e3
    together = umap_map.place(cells, x, y)
    alone = np.concatenate([umap_map.place(cell[None], x, y) for cell in cells])
    np.testing.assert_allclose(together, alone, atol=1e-9)
    monkeypatch.setattr(umap_map, "BLOCK", 7)
    np.testing.assert_allclose(together, umap_map.place(cells, x, y), atol=1e-9)


def test_own_cells_draw_each_other_and_stay_on_the_map(points, monkeypatch):
    x, y, _ = points
    cells = x + np.random.default_rng(3).normal(0, 0.3, x.shape)
    alone, drawn = (umap_map.place(cells, x, y, 60, own) for own in (0, 10))
    assert umap_map.recall(cells, drawn, 10) > umap_map.recall(cells, alone, 10)
    assert np.linalg.norm(drawn - alone, axis=1).max() < 2.0
    monkeypatch.setattr(umap_map, "MOST_OWN", 299)
    np.testing.assert_array_equal(umap_map.place(cells, x, y, 60, 10), alone)
    np.testing.assert_array_equal(umap_map.place(cells[:4], x, y, 60, 10), umap_map.place(cells[:4], x, y, 60))


def test_a_few_points_that_are_all_alike_give_finite_places():
    placed = umap_map.place(np.ones((3, 2)), np.ones((7, 2)), np.zeros((7, 2)))
    np.testing.assert_array_equal(placed, 0.0)


def test_recall_of_a_turned_map_is_whole_and_of_a_shuffled_one_is_chance(points):
    x, _, _ = points
    y = x[:, :2] @ np.array([[0.6, -0.8], [0.8, 0.6]])
    assert umap_map.recall(x[:, :2], y, 15) == 1.0
    shuffled = y[np.random.default_rng(0).permutation(300)]
    assert umap_map.recall(x[:, :2], shuffled, 15) < 0.12
    assert umap_map.recall(x[:, :2], y, 15, np.array([3, 5])) == 1.0
    assert umap_map.recall(x[:1], y[:1], 15) == 1.0
    assert umap_map.recall(np.ones((30, 2)), np.ones((30, 2)), 5) >= 0  # equal points: one stands for the point itself


def test_principal_components_keep_what_varies_most(points):
    x, _, _ = points
    flat = umap_map.principal(x)
    values = np.linalg.eigvalsh(np.cov(x.T))[::-1]
    np.testing.assert_allclose(flat.var(axis=0, ddof=1), values[:2])


def test_density_is_a_share_of_the_points_in_each_place():
    y = np.array([[0.1, 0.1], [0.1, 0.2], [0.9, 0.9], [0.9, 0.1]])
    np.testing.assert_allclose(umap_map.density(y, np.array([[0, 1], [0, 1.0]]), 2), [[0.5, 0], [0.25, 0.25]])


def test_umap_of_the_points(points):
    pytest.importorskip("umap", reason="the extra `map`")
    x, _, kind = points
    y = umap_map.fitted(x, 15, 0.5, 2**40 + 3)
    np.testing.assert_array_equal(y, umap_map.fitted(x, 15, 0.5, 2**40 + 3))
    np.testing.assert_allclose(np.median(y, axis=0), 0, atol=1e-9)
    assert umap_map.recall(x, y, 15) > umap_map.recall(x, umap_map.principal(x), 15)
    centres = np.stack([y[kind == k].mean(axis=0) for k in range(3)])
    assert (np.square(y[:, None] - centres).sum(axis=2).argmin(axis=1) == kind).mean() > 0.99
    assert np.isfinite(umap_map.fitted(x[:6], 15, 0.5, 0)).all()


def test_without_umap_learn_one_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "umap", None)
    with pytest.raises(MissingExtra, match=r"umap-learn is not installed; run: pip install 'cloister\[map\]'"):
        umap_map.fitted(np.zeros((8, 2)), 3, 0.5, 0)
