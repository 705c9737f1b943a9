from pathlib import Path

import numpy as np
import pytest

from cloister.errors import ParameterError
from cloister.models import isolation_forest as iforest
from cloister.models.disguise import disguise
from cloister.models.regions import describe

ODDS = Path(__file__).parents[3] / "shared" / "data" / "odds"


def auroc(truth, score):
    from sklearn.metrics import roc_auc_score

    return float(roc_auc_score(truth, score))


def planted(n=600, d=5, outliers=20, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, d))
    X[:outliers] = rng.normal(size=(outliers, d)) * 3 + 4
    return X, np.arange(n) < outliers


def test_average_path_is_what_searching_a_random_tree_costs():
    assert iforest.average_path([0, 1, 2]).tolist() == [0.0, 0.0, 1.0]
    np.testing.assert_allclose(iforest.average_path(256), 2 * sum(1 / i for i in range(1, 257)) - 2)  # 2 H(n) - 2
    rng = np.random.default_rng(0)

    def search(n):  # a failed search ends between two neighbours, each gap as likely
        depth, low, high, at = 0, 0, n, rng.random() * n
        while high - low > 1:
            cut = rng.integers(low + 1, high)
            low, high = (low, cut) if at < cut else (cut, high)
            depth += 1
        return depth

    found = np.mean([search(8) for _ in range(20_000)])
    np.testing.assert_allclose(found, iforest.average_path(8), rtol=0.02)


@pytest.mark.parametrize("kind", ["standard", "extended"])
def test_scores_find_planted_outliers_and_lie_in_the_unit_interval(kind):
    X, truth = planted()
    forest = iforest.fit(X, kind=kind, rng=np.random.default_rng(1))
    scores = forest.score(X)
    assert forest.trees == 100
    assert forest.depth == 8
    assert (scores > 0).all()
    assert (scores < 1).all()
    assert auroc(truth, scores) > 0.98


@pytest.mark.parametrize("kind", ["standard", "extended"])
def test_paths_agree_with_walking_the_trees_one_by_one(kind):
    X, _ = planted(80, 4)
    forest = iforest.fit(X, trees=7, sample=32, kind=kind, rng=np.random.default_rng(2))
    for x, found in zip(X, forest.paths(X), strict=True):
        total = 0.0
        for k in range(forest.trees):
            place = 0
            for _ in range(forest.depth):
                at = forest.source[k, place]
                along = forest.normals[k][at] @ x if forest.normals else x[at]
                place = 2 * place + 1 + (along >= forest.threshold[k, place])
            total += forest.path[k, place - (2**forest.depth - 1)]
        np.testing.assert_allclose(found, total / forest.trees)


def test_leaves_hold_what_their_path_says():
    """With all rows in every tree, depth + c(n) of each row can be counted by hand from the splits."""
    X, _ = planted(60, 3)
    forest = iforest.fit(X, trees=5, sample=256, rng=np.random.default_rng(3))
    for k in range(5):
        groups, depth = {0: np.arange(60)}, {0: 0}
        want = np.zeros(60)
        while groups:
            place, rows = groups.popitem()
            d = depth[place]
            if d == forest.depth or not np.isfinite(forest.threshold[k, place]):
                want[rows] = d + iforest.average_path(len(rows))
                continue
            right = X[rows, forest.source[k, place]] >= forest.threshold[k, place]
            for child, part in ((2 * place + 1, rows[~right]), (2 * place + 2, rows[right])):
                assert len(part), "no child is empty"
                groups[child], depth[child] = part, d + 1
        one = iforest.Forest(forest.source[k : k + 1], forest.threshold[k : k + 1], forest.path[k : k + 1], 1.0)
        np.testing.assert_allclose(one.paths(X), want)


def test_extension_level():
    rng = np.random.default_rng(0)
    axes = iforest.draw_axes(rng, 50, np.array([0, 2, 3, 5]), 6, "extended", 1)
    assert ((axes.normals != 0).sum(axis=1) == 2).all()
    assert (axes.normals[:, [1, 4]] == 0).all()
    np.testing.assert_allclose(np.linalg.norm(axes.normals, axis=1), 1)


def test_constant_columns_ties_and_tiny_samples():
    X = np.zeros((40, 3))
    assert np.ptp(iforest.fit(X, rng=np.random.default_rng(0)).score(X)) == 0
    X[:, 1] = np.arange(40) % 2  # two values only
    assert np.isfinite(iforest.fit(X, rng=np.random.default_rng(0)).score(X)).all()
    two = np.array([[0.0, 1.0], [2.0, 1.0]])
    assert np.ptp(iforest.fit(two, trees=5, rng=np.random.default_rng(0)).score(two)) == 0
    with pytest.raises(ParameterError, match="two rows"):
        iforest.fit(two[:1], rng=np.random.default_rng(0))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["glass", "ionosphere", "lympho", "thyroid"])
def test_as_good_as_scikit_learn(name):
    """Two samplers of the same model: means of five seeds differ by their noise, about 0.01 on these sets."""
    ensemble = pytest.importorskip("sklearn.ensemble")
    path = ODDS / f"{name}.npz"
    if not path.exists():
        pytest.skip("the ODDS sets are not beside the repository")
    data = np.load(path)
    X, y = data["X"].astype(float), data["y"].ravel()
    ours = [auroc(y, iforest.fit(X, rng=np.random.default_rng(s)).score(X)) for s in range(5)]
    peer = [
        auroc(
            y,
            -ensemble.IsolationForest(n_estimators=100, max_samples=min(256, len(X)), random_state=s)
            .fit(X)
            .score_samples(X),
        )
        for s in range(5)
    ]
    assert abs(np.mean(ours) - np.mean(peer)) < 0.03


# ---- regions and disguise --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["standard", "extended"])
def test_regions_hold_the_flagged_rows_and_no_other(kind):
    X, _ = planted(400, 4)
    forest = iforest.fit(X, kind=kind, rng=np.random.default_rng(5))
    scores = forest.score(X)
    flagged = scores > np.sort(scores)[-21]
    regions = describe(forest, X, flagged, rng=np.random.default_rng(6))
    np.testing.assert_array_equal(regions.inside(X), flagged)
    assert len(np.unique(regions.region)) <= flagged.sum()
    none = describe(forest, X, np.zeros(400, bool), rng=np.random.default_rng(6))
    assert not none.inside(X).any()


def test_disguise_keeps_every_outlier_and_says_which_row_is_which():
    X, truth = planted()
    sent, mine = disguise(X, 0.5, 0.3, np.random.default_rng(0))
    own = mine >= 0
    np.testing.assert_array_equal(sent[own], X[mine[own]])
    assert set(np.flatnonzero(truth)) <= set(mine[own].tolist())
    assert own.sum() == 450  # half of the inner half is kept back
    assert (~own).sum() == 180
    low, high = X.min(axis=0), X.max(axis=0)
    assert ((sent >= low) & (sent <= high)).all()  # made-up rows lie between real ones
    same, rows = disguise(X, 0.0, 0.0, np.random.default_rng(0))
    assert same is X
    np.testing.assert_array_equal(rows, np.arange(600))
