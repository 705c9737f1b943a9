"""The inner loops of lattice arithmetic for primes below 2^50, in pairs of doubles: vectors of eight, on any processor.

A product modulo q is four exact steps [HLQ16]: h = ⌊a·b⌉, l = a·b - h by a fused multiply-add, c = ⌊h/q⌉, and
(h - c·q) + l. Numbers are signed integers held as doubles, |x| < 2^53 throughout; w is centred, |w| ≤ q/2, so that
the product lies within (1/2 + 3·2^-54·|a|)·q. In a transform, sums are reduced every second stage: the bound of what
is multiplied settles below 4q forward and 8q backward. Results are integers and the same on every machine.

A transform of N = R·64 points has two phases, each on tiles that fit into the nearest cache: log2 R stages down the
columns of an R×64 matrix, eight columns at a time; then six stages within rows, eight rows at a time, transposed.

References
----------
[HLQ16] van der Hoeven, Lecerf, Quintin, ACM Transactions on Mathematical Software 43, 2016, section 3.
"""
# mypy: ignore-errors
# ruff: noqa: ANN001, ANN002, ANN201, ANN202, ANN204

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from cloister.mpc.crypto.rns.kernels import inline, jit

LANES = 8
ROW = 64  # points of the second phase
DOUBLE, WORD, INT = ir.DoubleType(), ir.IntType(64), ir.IntType(32)
VECTOR = ir.VectorType(DOUBLE, LANES)
MAGIC = np.uint64(0x4330000000000000)  # 2^52 as a double: the last 52 bits are an integer
TWO52 = 4503599627370496.0
U, ONE = np.uint64, np.uint64(1)

# ---- single numbers --------------------------------------------------------------------------------------------------


@intrinsic
def fma(typing, a, b, c):
    """Multiply and add with one rounding."""

    def emit(context, builder, signature, args):
        return call(builder, "fma", *args)

    return types.float64(types.float64, types.float64, types.float64), emit


@intrinsic
def nearest(typing, a):
    """The nearest integer."""

    def emit(context, builder, signature, args):
        return call(builder, "rint", *args)

    return types.float64(types.float64), emit


@intrinsic
def as_double(typing, a):
    def emit(context, builder, signature, args):
        return builder.bitcast(args[0], DOUBLE)

    return types.float64(types.uint64), emit


@intrinsic
def as_word(typing, a):
    def emit(context, builder, signature, args):
        return builder.bitcast(args[0], WORD)

    return types.uint64(types.float64), emit


@inline
def number(x):
    """A word below 2^52 as a double."""
    return as_double(x | MAGIC) - TWO52


@inline
def residue(x, q, inv):
    """The word in [0, q) that is x modulo q."""
    r = fma(-nearest(x * inv), q, x)
    return as_word((r + q if r < 0.0 else r) + TWO52) ^ MAGIC


@inline
def times(a, b, q, inv):
    """a·b modulo q, centred but for a little."""
    h = a * b
    return fma(-nearest(h * inv), q, h) + fma(a, b, -h)


# ---- vectors of eight ------------------------------------------------------------------------------------------------


def call(builder, name, *args):
    """An intrinsic of LLVM on doubles, or on vectors of them."""
    kind = args[0].type
    suffix = "f64" if kind == DOUBLE else f"v{LANES}f64"
    declared = ir.FunctionType(kind, [kind] * len(args))
    return builder.call(cgutils.get_or_insert_function(builder.module, declared, f"llvm.{name}.{suffix}"), args)


def load(builder, address):
    value = builder.load(builder.inttoptr(address, VECTOR.as_pointer()))
    value.align = 8
    return value


def store(builder, value, address):
    builder.store(value, builder.inttoptr(address, VECTOR.as_pointer())).align = 8


def splat(builder, x):
    one = builder.insert_element(ir.Constant(VECTOR, ir.Undefined), x, INT(0))
    return builder.shuffle_vector(one, one, ir.Constant(ir.VectorType(INT, LANES), [0] * LANES))


class Vectors:
    """Arithmetic modulo q on vectors, as instructions."""

    def __init__(self, builder, q, inv):
        self.b, self.q, self.inv = builder, splat(builder, q), splat(builder, inv)

    def reduce(self, x):
        c = call(self.b, "rint", self.b.fmul(x, self.inv))
        return call(self.b, "fma", self.b.fneg(c), self.q, x)

    def times(self, a, w):
        b = self.b
        h = b.fmul(a, w)
        return b.fadd(self.reduce(h), call(b, "fma", a, w, b.fneg(h)))

    def forward(self, u, v, w, *, reduced):
        u, v = self.reduce(u) if reduced else u, self.times(v, w)
        return self.b.fadd(u, v), self.b.fsub(u, v)

    def backward(self, u, v, w, *, reduced):
        total = self.b.fadd(u, v)
        return self.reduce(total) if reduced else total, self.times(self.b.fsub(u, v), w)

    def forward_four(self, a, top, below):
        a0, a2 = self.forward(a[0], a[2], top, reduced=True)
        a1, a3 = self.forward(a[1], a[3], top, reduced=True)
        return *self.forward(a0, a1, below[0], reduced=False), *self.forward(a2, a3, below[1], reduced=False)

    def backward_four(self, a, top, below):
        a0, a1 = self.backward(a[0], a[1], below[0], reduced=False)
        a2, a3 = self.backward(a[2], a[3], below[1], reduced=False)
        (a0, a2), (a1, a3) = (self.backward(x, y, top, reduced=True) for x, y in ((a0, a2), (a1, a3)))
        return a0, a1, a2, a3


def stages(*, back, single, spread):
    """One stage on two vectors, or two on four, `stride` bytes apart.

    Factors stand as in a heap: those of the second stage of node n are nodes 2n and 2n + 1; each is one number for all
    lanes if `spread`, else eight.
    """

    @intrinsic
    def emit_stages(typing, x, stride, w, node, q, inv):
        def emit(context, builder, signature, args):
            x, stride, w, node, q, inv = args
            v, count = Vectors(builder, q, inv), 2 if single else 4
            places = [builder.add(x, builder.mul(stride, WORD(i))) for i in range(count)]

            def factor(n):
                at = builder.add(w, builder.mul(n, WORD(8 if spread else 8 * LANES)))
                return (
                    splat(builder, builder.load(builder.inttoptr(at, DOUBLE.as_pointer())))
                    if spread
                    else load(builder, at)
                )

            a, top = [load(builder, at) for at in places], factor(node)
            if single:
                a = (v.backward if back else v.forward)(*a, top, reduced=True)
            else:
                left = builder.mul(node, WORD(2))
                below = factor(left), factor(builder.add(left, WORD(1)))
                a = v.backward_four(a, top, below) if back else v.forward_four(a, top, below)
            for value, at in zip(a, places, strict=True):
                store(builder, value, at)
            return context.get_dummy_value()

        word, real = types.uint64, types.float64
        return types.void(word, word, word, word, real, real), emit

    return emit_stages


forward_two, backward_two = (stages(back=back, single=True, spread=True) for back in (False, True))
forward_four, backward_four = (stages(back=back, single=False, spread=True) for back in (False, True))
forward_rows, backward_rows = (stages(back=back, single=False, spread=False) for back in (False, True))


def by_rows(table):
    """Factors (k, N) of the second phase, (k, R / 8, 64, 8): those of eight rows together."""
    k, n = table.shape
    height = n // ROW
    out, m = np.zeros((k, height // LANES, ROW, LANES)), 1
    while m < ROW:
        part = table[:, height * m : 2 * height * m].reshape(k, height // LANES, LANES, m)
        out[:, :, m : 2 * m] = part.transpose(0, 1, 3, 2)
        m *= 2
    return out


# ---- transforms ------------------------------------------------------------------------------------------------------


@inline
def address(x):
    return np.uint64(x.ctypes.data)


@jit
def columns(x, tile, w, q, inv, back):
    """The first phase of a transform, or the last of its inverse, in place on (R, 64)."""
    height = x.shape[0]
    at = address(tile)
    size = 1
    while size < height:
        size <<= 2
    odd = size != height
    for c in range(0, ROW, LANES):
        for r in range(height):
            for lane in range(LANES):
                tile[r, lane] = x[r, c + lane]
        if not back:
            m = 1
            if odd:
                for r in range(height // 2):
                    forward_two(at + U(64 * r), U(32 * height), w, ONE, q, inv)
                m = 2
            while m < height:
                t = height // (4 * m)
                for i in range(m):
                    for r in range(4 * i * t, (4 * i + 1) * t):
                        forward_four(at + U(64 * r), U(64 * t), w, U(m + i), q, inv)
                m <<= 2
        else:
            m = height // 4
            while m > 1 or (m == 1 and not odd):
                t = height // (4 * m)
                for i in range(m):
                    for r in range(4 * i * t, (4 * i + 1) * t):
                        backward_four(at + U(64 * r), U(64 * t), w, U(m + i), q, inv)
                m >>= 2
            if odd:
                for r in range(height // 2):
                    backward_two(at + U(64 * r), U(32 * height), w, ONE, q, inv)
        for r in range(height):
            for lane in range(LANES):
                x[r, c + lane] = tile[r, lane]


@jit
def within_rows(x, tile, w, q, inv, back):
    """The other phase; the factors of eight rows together are (64, 8)."""
    at = address(tile)
    for first in range(0, x.shape[0], LANES):
        for lane in range(LANES):
            for e in range(ROW):
                tile[e, lane] = x[first + lane, e]
        table = address(w[first // LANES])
        for level in range(3):
            m = 1 << (2 * (2 - level if back else level))
            t = ROW // (4 * m)
            for i in range(m):
                for r in range(4 * i * t, (4 * i + 1) * t):
                    if back:
                        backward_rows(at + U(64 * r), U(64 * t), table, U(m + i), q, inv)
                    else:
                        forward_rows(at + U(64 * r), U(64 * t), table, U(m + i), q, inv)
        for lane in range(LANES):
            for e in range(ROW):
                x[first + lane, e] = tile[e, lane]


@jit
def transform(x, tile, w, rows, q, inv, back):
    """One polynomial (R, 64) of doubles, in place."""
    if back:
        within_rows(x, tile, rows, q, inv, back)
        columns(x, tile, address(w), q, inv, back)
    else:
        columns(x, tile, address(w), q, inv, back)
        within_rows(x, tile, rows, q, inv, back)


@jit
def forward(a, w, rows, q, inv):
    """To NTT form: words (k, N), in place."""
    k, n = a.shape
    x, tile = np.empty(n), np.empty((max(n // ROW, ROW), LANES))
    for j in range(k):
        p, v = q[j], inv[j]
        for i in range(n):
            x[i] = number(a[j, i])
        transform(x.reshape((n // ROW, ROW)), tile, w[j], rows[j], p, v, back=False)
        for i in range(n):
            a[j, i] = residue(x[i], p, v)


@jit
def backward(a, w, rows, q, inv, n_inv):
    """To coefficients: words (k, N), in place."""
    k, n = a.shape
    x, tile = np.empty(n), np.empty((max(n // ROW, ROW), LANES))
    for j in range(k):
        p, v, f = q[j], inv[j], n_inv[j]
        for i in range(n):
            x[i] = number(a[j, i])
        transform(x.reshape((n // ROW, ROW)), tile, w[j], rows[j], p, v, back=True)
        for i in range(n):
            a[j, i] = residue(times(x[i], f, p, v), p, v)
