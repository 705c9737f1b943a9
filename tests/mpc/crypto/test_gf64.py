"""GF(2^64): the portable loops against whole numbers, and those of this processor against the portable ones."""

import numpy as np
import pytest

from cloister.mpc.crypto import gf64
from cloister.mpc.crypto import gf64_portable as portable

rng = np.random.default_rng(5)
PATHS = [portable] if gf64.LANES == 0 else [portable, gf64]


def draw(*shape):
    return rng.integers(0, 1 << 64, shape, dtype=np.uint64)


def slow(x, y):
    """A product of polynomials, bit by bit, modulo X^64 + X^4 + X^3 + X + 1."""
    x, y, z = int(x), int(y), 0
    while y:
        z ^= x * (y & 1)
        y >>= 1
        x <<= 1
        x ^= (x >> 64) * ((1 << 64) | 0x1B)
    return z


def total(terms):
    out = 0
    for term in terms:
        out ^= term
    return out


def test_products():
    x, y = draw(50), draw(50)
    x[:3], y[1:4] = (0, 1, 2**64 - 1), (2**64 - 1, 0, 1)
    assert [int(z) for z in portable.times(x, y)] == [slow(a, b) for a, b in zip(x, y, strict=True)]
    assert [int(z) for z in portable.powers(x[9], 4)] == [1, int(x[9]), slow(x[9], x[9]), slow(slow(x[9], x[9]), x[9])]


@pytest.mark.parametrize("path", PATHS)
def test_bits(path):
    a, b, eps, w = draw(2, 32, 16), draw(2, 32, 16), draw(16), draw(64)
    gram = path.gram_bits(*a, *b, eps)
    for row, column in ((0, 0), (3, 40), (63, 31), (33, 63)):
        left, right = a.reshape(64, 16)[row], b.reshape(64, 16)[column]
        assert int(gram[row, column]) == total(slow(eps[t], left[t] & right[t]) for t in range(16))
    plain, weighted = np.empty((16, 64), np.uint64), np.empty((16, 64), np.uint64)
    path.fold_bits(*a, w, None, plain)
    path.fold_bits(*a, w, eps, weighted)
    for t, u in ((0, 0), (7, 63), (15, 20)):
        assert int(plain[t, u]) == total(int(w[row]) for row in range(64) if int(a.reshape(64, 16)[row, t]) >> u & 1)
        assert int(weighted[t, u]) == slow(slow(plain[t, u], eps[t]), 1 << u)


@pytest.mark.parametrize("path", PATHS)
def test_elements(path):
    a, b, w = draw(16, 24), draw(16, 24), draw(16)
    gram = path.gram_field(a, b)
    assert int(gram[3, 9]) == total(slow(x, y) for x, y in zip(a[3], b[9], strict=True))
    assert int(path.fold_field(a, w)[5]) == total(slow(w[row], a[row, 5]) for row in range(16))
    assert int(path.dot(a[1], b[2])) == total(slow(x, y) for x, y in zip(a[1], b[2], strict=True))
    alpha, beta = draw(16), draw(24)
    expected = total(slow(slow(alpha[i], beta[j]), a[i, j]) for i in range(16) for j in range(24))
    assert int(path.weigh_rows(a, alpha, beta)) == expected
    perm = np.stack([rng.permutation(24) for _ in range(16)]).astype(np.uint32)
    out = np.empty((16, 24), np.uint64)
    path.scatter_weights(perm, alpha, beta, out)
    assert int(out[4, perm[4, 11]]) == slow(alpha[4], beta[11])


@pytest.mark.skipif(gf64.LANES == 0, reason="this processor has no carry-less product")
@pytest.mark.parametrize("width", [8, 256, 264, 1048])
def test_both_paths_give_the_same_words(width):
    a, b, eps, w = draw(2, 32, width), draw(2, 32, width), draw(width), draw(64)
    np.testing.assert_array_equal(gf64.gram_bits(*a, *b, eps), portable.gram_bits(*a, *b, eps))
    np.testing.assert_array_equal(
        gf64.gram_field(a[0, :16].copy(), b[0, :16].copy()), portable.gram_field(a[0, :16], b[0, :16])
    )
    np.testing.assert_array_equal(gf64.fold_field(a[0], w[:32]), portable.fold_field(a[0], w[:32]))
    for weights in (None, eps):
        one, two = np.empty((width, 64), np.uint64), np.empty((width, 64), np.uint64)
        gf64.fold_bits(*a, w, weights, one)
        portable.fold_bits(*a, w, weights, two)
        np.testing.assert_array_equal(one, two)


def test_planes_and_back():
    words = draw(192)
    planes = gf64.to_planes(words, 64)
    assert int(planes[5, 1]) >> 9 & 1 == int(words[64 + 9]) >> 5 & 1
    np.testing.assert_array_equal(gf64.to_words(planes), words)
    np.testing.assert_array_equal(gf64.to_words(planes[:40]), words & np.uint64((1 << 40) - 1))


def test_the_checked_coefficient_is_the_inner_product():
    a, b = draw(16, 8), draw(16, 8)
    coefficients = portable.product_coefficients(portable.gram_field(a, b), np.ones(16, np.uint64))
    assert coefficients[15] == portable.dot(a.reshape(-1), b.reshape(-1))
    point = draw(1)[0]
    left = portable.fold_field(a, portable.powers(point, 16))
    right = portable.fold_field(b, portable.powers(point, 16)[::-1].copy())
    assert portable.dot(left, right) == portable.dot(coefficients, portable.powers(point, 31))


def test_a_mask_row_is_one_row_of_the_gram_matrix():
    b, mask = draw(2, 32, 8), draw(8, 64)
    out = np.zeros(64, np.uint64)
    portable.sum_where(mask, *b, out)
    word = b.reshape(64, 8)[40]
    assert int(out[40]) == total(int(mask[t, u]) for t in range(8) for u in range(64) if int(word[t]) >> u & 1)
