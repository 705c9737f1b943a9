import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloister.errors import DataError, ParameterError
from cloister.models import graph

SEED = bytes(range(32))


def blobs(n=300, d=8, classes=4, labelled=0.1, seed=0, spread=1.5):
    rng = np.random.default_rng(seed)
    centres = spread * rng.normal(size=(classes, d))
    y = rng.integers(0, classes, n)
    known = rng.random(n) < labelled
    known[np.unique(y, return_index=True)[1]] = True  # one of each class that there is
    return centres[y] + rng.normal(size=(n, d)), y, np.where(known, y, -1)


def dense(packed, labels, classes, k, alpha):
    """Algorithm 1 as printed, with dense matrices: sort by (distance, index), inverse of an n×n matrix."""
    bits = 8 * packed.shape[1]
    b = np.unpackbits(packed, axis=1).astype(np.int64)
    H = np.array([(b ^ row).sum(axis=1) for row in b])
    A = np.zeros(H.shape)
    for i, row in enumerate(H):
        order = [j for j in np.lexsort((np.arange(len(row)), row)) if j != i][:k]
        A[i, order] = np.maximum(np.cos(np.pi * row[order] / bits), 0)
        A[i, [j for j in order if 2 * row[j] == bits]] = 0
    W = A + A.T
    degree = W.sum(axis=1)
    scale = np.where(degree > 0, 1 / np.sqrt(np.where(degree > 0, degree, 1)), 0)
    W = scale[:, None] * W * scale
    S = np.linalg.inv(np.eye(len(W)) - alpha * W)
    return W, S @ graph.one_hot(labels, classes)


@settings(max_examples=25, deadline=None)
@given(
    n=st.integers(20, 120),
    bits=st.sampled_from([64, 256]),  # few bits make many ties
    k=st.integers(1, 8),
    alpha=st.sampled_from([0.5, 0.9, 0.99]),
    seed=st.integers(0, 999),
)
def test_equals_the_dense_computation(n, bits, k, alpha, seed):
    v, _, labels = blobs(n, seed=seed)
    packed = graph.codes(v, graph.hyperplanes(SEED, bits, v.shape[1]))
    W, Z = dense(packed, labels, 4, k, alpha)
    np.testing.assert_allclose(graph.adjacency(graph.nearest(packed, k), bits).toarray(), W, atol=1e-12)
    for exact in (True, False):
        found = graph.propagate(packed, labels, n_classes=4, n_neighbors=k, alpha=alpha, exact=exact)
        reached = Z.sum(axis=1) > graph.REACHED
        np.testing.assert_array_equal(found.label >= 0, reached)
        p = Z[reached] / Z[reached].sum(axis=1, keepdims=True)
        q = found.scores[reached] / found.scores[reached].sum(axis=1, keepdims=True)
        np.testing.assert_allclose(q, p, atol=2e-6)  # 2^-29 for each of at most 120 labelled points, and the residual
        gap = np.diff(np.sort(p, axis=1)[:, -2:], axis=1)[:, 0]
        clear = gap > 1e-5  # anything closer is a tie
        np.testing.assert_array_equal(found.label[reached][clear], p.argmax(axis=1)[clear])
        entropy = -np.sum(p * np.log(np.where(p > 1e-300, p, 1)), axis=1)
        np.testing.assert_allclose(found.confidence[reached], 1 - entropy / np.log(4), atol=1e-4)


def test_two_thousand_points_get_the_labels_of_the_dense_inverse():
    v, y, labels = blobs(2000, labelled=0.02)
    packed = graph.codes(v, graph.hyperplanes(SEED, 512, v.shape[1]))
    W = graph.adjacency(graph.nearest(packed, 10), 512).toarray()
    Z = np.linalg.solve(np.eye(2000) - 0.99 * W, graph.one_hot(labels, 4))
    found = graph.propagate(packed, labels, n_classes=4, exact=False)
    np.testing.assert_array_equal(found.label, Z.argmax(axis=1))
    assert (found.label == y).mean() > 0.9


def test_antipodes_zeros_and_duplicates():
    rng = np.random.default_rng(0)
    v = rng.normal(size=(4, 6))
    points = np.concatenate([v, -v, v, np.zeros((2, 6)), 1e-300 * v[:1], 1e300 * v[:1]])
    H = graph.hamming(*2 * [graph.codes(points, graph.hyperplanes(SEED, 4096, 6))])
    np.testing.assert_array_equal(np.diagonal(H[:4, 4:8]), 4096)  # modulo L these would be 0
    np.testing.assert_array_equal(np.diagonal(H[:4, 8:12]), 0)
    assert H[12, 13] == 0
    assert np.abs(H[12, :4] - 2048).max() < 6 * 32  # a zero vector is at a right angle to all
    assert H[14, 0] == H[15, 0] == 0


def test_cosine_error_is_what_theory_says():
    rng = np.random.default_rng(1)
    v = rng.normal(size=(60, 5))
    v /= np.linalg.norm(v, axis=1, keepdims=True)
    bits = 4096
    H = graph.hamming(*2 * [graph.codes(v, graph.hyperplanes(SEED, bits, 5))])
    i, j = np.triu_indices(60, 1)
    p = np.arccos(np.clip((v @ v.T)[i, j], -1, 1)) / np.pi
    z = (H[i, j] - bits * p) / np.sqrt(bits * p * (1 - p))  # H is binomial(L, angle/π)
    assert 0.8 < z.std() < 1.2
    assert abs(z.mean()) < 0.4  # pairs are dependent through their points
    error = np.cos(np.pi * H[i, j] / bits) - np.cos(np.pi * p)
    predicted = np.pi * np.sin(np.pi * p) * np.sqrt(p * (1 - p) / bits)
    assert 0.8 < np.sqrt((error**2).mean() / (predicted**2).mean()) < 1.2
    assert np.sqrt((error**2).mean()) < 0.025


def test_hamming_counts_bits():
    rng = np.random.default_rng(2)
    a, b = rng.integers(0, 256, (5, 16), dtype=np.uint8), rng.integers(0, 256, (7, 16), dtype=np.uint8)
    slow = [[sum(int(x ^ y).bit_count() for x, y in zip(r, s, strict=True)) for s in b] for r in a]
    np.testing.assert_array_equal(graph.hamming(a, b), slow)


def test_the_hyperplanes_are_normal_and_depend_on_the_seed():
    p = graph.hyperplanes(SEED, 512, 40)
    assert abs(p.mean()) < 0.03
    assert abs(p.std() - 1) < 0.03
    np.testing.assert_array_equal(p, graph.hyperplanes(SEED, 512, 40))
    assert (p != graph.hyperplanes(bytes(32), 512, 40)).all()


def test_balancing_divides_by_the_labels_of_a_class():
    scores = np.array([[90, 20, 0], [10, 0, 0], [0, 0, 0]])
    label, confidence = graph.decide(scores, np.array([50, 2, 0]))
    np.testing.assert_array_equal(label, [1, 0, -1])
    p = np.array([1.8, 10.0]) / 11.8
    np.testing.assert_allclose(confidence, [1 + (p * np.log(p)).sum() / np.log(3), 1, 0])
    np.testing.assert_array_equal(graph.decide(scores)[0], [0, 0, -1])


def test_a_component_without_labels_stays_without():
    rng = np.random.default_rng(0)
    v = np.concatenate([rng.normal(size=(30, 4)) * 0.01 + c for c in ([1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0])])
    labels = np.full(90, -1)
    labels[[0, 30]] = [0, 1]
    found = graph.propagate(graph.codes(v, graph.hyperplanes(SEED, 1024, 4)), labels, n_classes=2)
    np.testing.assert_array_equal(found.label[60:], -1)
    np.testing.assert_array_equal(found.confidence[60:], 0)
    np.testing.assert_array_equal(found.label[:60], np.repeat([0, 1], 30))
    np.testing.assert_array_equal(found.confidence[:60], 1)


def test_a_point_that_is_near_to_nobody_is_no_edge():
    """All similarities negative: the printed algorithm takes the square root of a negative degree."""
    v = np.array([[1.0, 0.0], [-0.5, 0.866], [-0.5, -0.866]])
    found = graph.propagate(
        graph.codes(v, graph.hyperplanes(SEED, 1024, 2)), np.array([0, 1, -1]), n_classes=2, n_neighbors=2
    )
    np.testing.assert_array_equal(found.label, [0, 1, -1])


def test_solve_keeps_its_residual():
    v, _, labels = blobs(400)
    W = graph.adjacency(graph.nearest(graph.codes(v, graph.hyperplanes(SEED, 256, 8)), 5), 256)
    right = np.eye(400)[:, labels >= 0]
    x = graph.solve(W, 0.999, right, 1e-10)
    r = right - (x - 0.999 * (W @ x))
    assert np.linalg.norm(r, axis=0).max() < 2e-10
    exact = np.linalg.solve(np.eye(400) - 0.999 * W.toarray(), right)
    assert np.linalg.norm(x - exact, axis=0).max() < 2e-10 / (1 - 0.999)


@pytest.mark.parametrize(
    ("bits", "k", "alpha"), [(100, 3, 0.9), (32, 3, 0.9), (64, 0, 0.9), (64, 20, 0.9), (64, 3, 1.0), (64, 3, 0.0)]
)
def test_bad_sizes(bits, k, alpha):
    with pytest.raises(ParameterError):
        graph.check_sizes(20, bits, k, alpha)


def test_bad_inputs():
    packed = np.zeros((20, 8), np.uint8)
    with pytest.raises(DataError, match="no point has a label"):
        graph.propagate(packed, np.full(20, -1), n_classes=2, n_neighbors=3)
    with pytest.raises(DataError, match="rows of 3 numbers"):
        graph.codes(np.zeros((2, 4)), np.zeros((64, 3)))
    keys = graph.nearest(packed, 3)
    graph.check_keys(keys, 20, 64)
    for bad in (keys[:10], np.where(keys == keys[0, 0], -1, keys), keys[:, [0, 0, 1]], keys + (65 << 5)):
        with pytest.raises(DataError, match="not a graph"):
            graph.check_keys(bad, 20, 64)


def test_a_label_left_out_is_as_if_it_had_never_been_given():
    v, _, labels = blobs(n=120)
    packed = graph.codes(v, graph.hyperplanes(SEED, 256, v.shape[1]))
    labelled = np.flatnonzero(labels >= 0)
    W = graph.adjacency(graph.nearest(packed, 5), 256, 4.0)
    scores = graph.left_out(W, 0.9, labelled, labelled) @ graph.one_hot(labels[labelled], 4)
    for i, at in enumerate(labelled[:5]):
        without = labels.copy()
        without[at] = -1
        found = graph.propagate(packed, without, n_classes=4, n_neighbors=5, alpha=0.9, power=4.0)
        np.testing.assert_allclose(scores[i], found.scores[at], atol=1 << 12)  # of 2^28
        with_it = graph.propagate(packed, labels, n_classes=4, n_neighbors=5, alpha=0.9, power=4.0)
        assert np.abs(with_it.scores[at] - found.scores[at]).max() > 1 << 20


def test_a_power_sharpens_the_similarities():
    v, *_ = blobs(n=60)
    packed = graph.codes(v, graph.hyperplanes(SEED, 256, v.shape[1]))
    keys = graph.nearest(packed, 5)
    index, distance = graph.split_keys(keys, 60)
    A = np.zeros((60, 60))
    A[np.arange(60)[:, None], index] = np.maximum(np.cos(np.pi * distance / 256), 0) ** 4
    W = A + A.T
    d = W.sum(axis=1)
    np.testing.assert_allclose(graph.adjacency(keys, 256, 4.0).toarray(), W / np.sqrt(d[:, None] * d), atol=1e-12)
    with pytest.raises(ParameterError, match="'power'"):
        graph.check_sizes(60, 256, 5, 0.9, 0.0)
