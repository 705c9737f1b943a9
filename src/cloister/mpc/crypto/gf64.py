"""GF(2^64) = GF(2)[X] / (X^64 + X^4 + X^3 + X + 1): the inner loops of proofs about shared bits.

A word is a field element, bit u the coefficient of X^u. The loops exist twice, equal bit for bit:

    gf64_clmul       carry-less products by the processor (PCLMULQDQ; two or four at once with VPCLMULQDQ)
    gf64_portable    table look-ups, on every processor that numba knows

Which one is used is decided here, once, by what the processor offers; `cloister doctor` says which it is.

    gram_bits(a, b, eps)      G[l, k] = Σ_t eps_t (a[l, t] & b[k, t])        a, b: 64 rows, as two halves of 32
    fold_bits(a, w, eps)      out[t, u] = Σ_l w_l (bit u of a[l, t]), times eps_t X^u if eps is given
    gram_field(a, b)          G[l, k] = Σ_t a[l, t] b[k, t]
    fold_field(a, w)          out[t] = Σ_l w_l a[l, t]
    dot(x, y)                 Σ_t x_t y_t
    weigh_rows(x, alpha, beta)       Σ_ij alpha_i beta_j x[i, j]
    scatter_weights(perm, alpha, beta, out)      out[i, perm[i, j]] = alpha_i beta_j

`powers`, `times`, `product_coefficients` and the transposition of bits cost next to nothing and exist once.
"""

from __future__ import annotations

import importlib
from typing import Any

from cloister.mpc.crypto import gf64_portable as portable
from cloister.mpc.crypto.gf64_portable import (
    LANES,
    powers,
    product_coefficients,
    sum_where,
    times,
    to_planes,
    to_words,
)

__all__ = [
    "BLOCKS",
    "HOW",
    "LANES",
    "dot",
    "fold_bits",
    "fold_field",
    "gram_bits",
    "gram_field",
    "powers",
    "product_coefficients",
    "scatter_weights",
    "sum_where",
    "times",
    "to_planes",
    "to_words",
    "weigh_rows",
]

BLOCKS = 32  # rows of half a matrix of bits


HOW = {8: "VPCLMULQDQ, 512 bits", 4: "VPCLMULQDQ, 256 bits", 2: "PCLMULQDQ", 0: "portable"}[LANES]
_fast: Any = importlib.import_module("cloister.mpc.crypto.gf64_clmul") if LANES else portable

gram_bits = _fast.gram_bits
gram_field = _fast.gram_field
fold_bits = _fast.fold_bits
fold_field = _fast.fold_field
dot = _fast.dot
weigh_rows = _fast.weigh_rows
scatter_weights = _fast.scatter_weights
