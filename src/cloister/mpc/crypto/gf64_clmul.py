"""The loops of `gf64` with the carry-less products of x86 processors, through LLVM intrinsics in numba.

A vector of LANES words gives LANES / 2 products of 128 bits at a time, low words (0x00) or high words (0x11) of each
128-bit lane. Sums of products are reduced once, at the end: X^64 = X^4 + X^3 + X + 1, twice.
"""

# mypy: ignore-errors
# ruff: noqa: ANN001, ANN201, ANN202
from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from cloister.mpc.crypto.gf64_portable import HALF, LANES, POLY, ZERO, U, inline, jit, shifted, spread_bits

WORD, BYTE, INT = ir.IntType(64), ir.IntType(8), ir.IntType(32)
VECTOR = ir.VectorType(WORD, LANES)
PAIR = ir.VectorType(WORD, 2)
NONE = ir.Constant(VECTOR, [0] * LANES)
NAME = {2: "llvm.x86.pclmulqdq", 4: "llvm.x86.pclmulqdq.256", 8: "llvm.x86.pclmulqdq.512"}[LANES]
BYTES = 8 * LANES
ROWS, COLUMNS = 2, 4  # of one tile: as many sums as fit the registers
CACHED = 256  # words of a row at a time


def product(builder, x, y, which):
    """Carry-less products of one word of each 128-bit lane: 0x00 low times low, 0x11 high times high, 0x10 mixed."""
    kind = ir.FunctionType(VECTOR, [VECTOR, VECTOR, BYTE])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, NAME), [x, y, BYTE(which)])


def load(builder, address, offset):
    value = builder.load(builder.inttoptr(builder.add(address, offset), VECTOR.as_pointer()))
    value.align = 8
    return value


def store(builder, value, address, offset):
    builder.store(value, builder.inttoptr(builder.add(address, offset), VECTOR.as_pointer())).align = 8


def splat(builder, word):
    one = builder.insert_element(NONE, word, INT(0))
    return builder.shuffle_vector(one, NONE, ir.Constant(ir.VectorType(INT, LANES), [0] * LANES))


def reduced(builder, sums):
    """Each 128-bit lane modulo the polynomial, in its low word."""
    poly = ir.Constant(VECTOR, [int(POLY)] * LANES)
    once = product(builder, sums, poly, 0x01)
    twice = product(builder, once, poly, 0x01)
    return builder.xor(builder.xor(sums, once), twice)


def interleaved(builder, even, odd):
    places = [lane // 2 * 2 + (LANES if lane % 2 else 0) for lane in range(LANES)]
    return builder.shuffle_vector(even, odd, ir.Constant(ir.VectorType(INT, LANES), places))


@intrinsic
def clmul(typing, a, b):
    """One product of 128 bits, as (low, high)."""

    def emit(context, builder, signature, args):
        kind = ir.FunctionType(PAIR, [PAIR, PAIR, BYTE])
        call = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.pclmulqdq")
        x, y = (builder.insert_element(ir.Constant(PAIR, [0, 0]), word, INT(0)) for word in args)
        z = builder.call(call, [x, y, BYTE(0)])
        words = [builder.extract_element(z, INT(k)) for k in (0, 1)]
        return context.make_tuple(builder, signature.return_type, words)

    return types.UniTuple(types.uint64, 2)(types.uint64, types.uint64), emit


def tile(*, bits):
    """Sums over t of eps_t (a_i[t] & b_k[t]) if `bits`, else of a_i[t] b_k[t]: a tile of rows, unreduced."""

    @intrinsic
    def loop(typing, a, b, stride, eps, count, out):
        def emit(context, builder, signature, args):
            a, b, stride, eps, count, out = args
            sums = [cgutils.alloca_once(builder, VECTOR) for _ in range(ROWS * COLUMNS)]
            for one in sums:
                builder.store(NONE, one)
            left = [builder.add(a, builder.mul(stride, WORD(i))) for i in range(ROWS)]
            right = [builder.add(b, builder.mul(stride, WORD(k))) for k in range(COLUMNS)]
            with cgutils.for_range(builder, count, intp=WORD) as step:
                at = builder.mul(step.index, WORD(BYTES))
                xs = [load(builder, address, at) for address in left]
                ys = [load(builder, address, at) for address in right]
                weight = load(builder, eps, at) if bits else None
                for i, x in enumerate(xs):
                    for k, y in enumerate(ys):
                        pair = (weight, builder.and_(x, y)) if bits else (x, y)
                        z = builder.xor(product(builder, *pair, 0x00), product(builder, *pair, 0x11))
                        one = sums[COLUMNS * i + k]
                        builder.store(builder.xor(builder.load(one), z), one)
            for place, one in enumerate(sums):
                store(builder, builder.load(one), out, WORD(BYTES * place))
            return context.get_dummy_value()

        word = types.uint64
        return types.void(word, word, word, word, word, word), emit

    return loop


tile_bits, tile_field = tile(bits=True), tile(bits=False)


@intrinsic
def fold_rows(typing, a, stride, rows, w, count, out):
    """out[t] = Σ_l w_l a[l, t]."""

    def emit(context, builder, signature, args):
        a, stride, rows, w, count, out = args
        even, odd = cgutils.alloca_once(builder, VECTOR), cgutils.alloca_once(builder, VECTOR)
        with cgutils.for_range(builder, count, intp=WORD) as step:
            at = builder.mul(step.index, WORD(BYTES))
            builder.store(NONE, even)
            builder.store(NONE, odd)
            with cgutils.for_range(builder, rows, intp=WORD) as row:
                x = load(builder, a, builder.add(at, builder.mul(row.index, stride)))
                place = builder.inttoptr(builder.add(w, builder.mul(row.index, WORD(8))), WORD.as_pointer())
                weight = splat(builder, builder.load(place))
                builder.store(builder.xor(builder.load(even), product(builder, weight, x, 0x00)), even)
                builder.store(builder.xor(builder.load(odd), product(builder, weight, x, 0x10)), odd)
            low, high = (reduced(builder, builder.load(half)) for half in (even, odd))
            store(builder, interleaved(builder, low, high), out, at)
        return context.get_dummy_value()

    word = types.uint64
    return types.void(word, word, word, word, word, word), emit


@intrinsic
def multiply_into(typing, x, y, count):
    """x[t] *= y[t]."""

    def emit(context, builder, signature, args):
        x, y, count = args
        with cgutils.for_range(builder, count, intp=WORD) as step:
            at = builder.mul(step.index, WORD(BYTES))
            p, q = load(builder, x, at), load(builder, y, at)
            low, high = (reduced(builder, product(builder, p, q, which)) for which in (0x00, 0x11))
            store(builder, interleaved(builder, low, high), x, at)
        return context.get_dummy_value()

    word = types.uint64
    return types.void(word, word, word), emit


@inline
def reduce(low, high):
    a, b = clmul(high, POLY)
    c, _ = clmul(b, POLY)
    return low ^ a ^ c


@jit
def gather_sum(sums, place):
    """The sum of one place of a tile, reduced."""
    low, high = ZERO, ZERO
    for lane in range(0, LANES, 2):
        low ^= sums[place * LANES + lane]
        high ^= sums[place * LANES + lane + 1]
    return reduce(low, high)


@jit
def address(x):
    return U(x.ctypes.data)


@jit
def gram_bits(a_low, a_high, b_low, b_high, eps):
    """All halves (32, n) with rows next to each other at one stride; n a multiple of 8."""
    n = eps.size
    out = np.zeros((2 * HALF, 2 * HALF), np.uint64)
    sums = np.zeros(ROWS * COLUMNS * LANES, np.uint64)
    stride = U(a_low.strides[0])
    for start in range(0, n, CACHED):
        count, at = U((min(n, start + CACHED) - start) // LANES), U(8 * start)
        for i in range(0, 2 * HALF, ROWS):
            x = (address(a_low) + U(i) * stride) if i < HALF else (address(a_high) + U(i - HALF) * stride)
            for k in range(0, 2 * HALF, COLUMNS):
                y = (address(b_low) + U(k) * stride) if k < HALF else (address(b_high) + U(k - HALF) * stride)
                tile_bits(x + at, y + at, stride, address(eps) + at, count, address(sums))
                for place in range(ROWS * COLUMNS):
                    out[i + place // COLUMNS, k + place % COLUMNS] ^= gather_sum(sums, place)
    return out


@jit
def weigh_bits(out, eps):
    weights = np.empty(64, np.uint64)
    for t in range(eps.size):
        e = eps[t]
        for u in range(64):
            weights[u] = e
            e = shifted(e)
        multiply_into(address(out) + U(512 * t), address(weights), U(64 // LANES))


def fold_bits(a_low, a_high, w, eps, out):
    spread_bits(a_low, a_high, w, out)
    if eps is not None:
        weigh_bits(out, eps)


@jit
def gram_field(a, b):
    """Rows a multiple of 2 and of 4; columns a multiple of 8."""
    n = a.shape[1]
    out = np.zeros((len(a), len(b)), np.uint64)
    sums = np.zeros(ROWS * COLUMNS * LANES, np.uint64)
    stride = U(a.strides[0])
    for start in range(0, n, 4 * CACHED):
        count, at = U((min(n, start + 4 * CACHED) - start) // LANES), U(8 * start)
        for i in range(0, len(a), ROWS):
            for k in range(0, len(b), COLUMNS):
                x, y = address(a) + U(i) * stride + at, address(b) + U(k) * stride + at
                tile_field(x, y, stride, address(sums), count, address(sums))
                for place in range(ROWS * COLUMNS):
                    out[i + place // COLUMNS, k + place % COLUMNS] ^= gather_sum(sums, place)
    return out


@jit
def fold_field(a, w):
    """Columns a multiple of 8."""
    rows, n = a.shape
    out = np.empty(n, np.uint64)
    fold_rows(address(a), U(a.strides[0]), U(rows), address(w), U(n // LANES), address(out))
    return out


@jit
def dot(x, y):
    low, high = ZERO, ZERO
    for t in range(x.size):
        a, b = clmul(x[t], y[t])
        low ^= a
        high ^= b
    return reduce(low, high)


@jit
def weigh_rows(x, alpha, beta):
    out = ZERO
    for i in range(x.shape[0]):
        low, high = clmul(alpha[i], dot(x[i], beta))
        out ^= reduce(low, high)
    return out


@jit
def scatter_weights(perm, alpha, beta, out):
    rows, n = perm.shape
    for i in range(rows):
        for j in range(n):
            low, high = clmul(alpha[i], beta[j])
            out[i, perm[i, j]] = reduce(low, high)
