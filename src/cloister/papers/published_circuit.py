"""The CellCnn step as PriCell prints it (supplementary note 4, algorithm 1): packing, diagonals, repacking, rotations.

Written over a handful of operations, so that the same lines run on ciphertexts (`CipherOps`) and, in the tests,
on plain vectors. m markers are padded to an even number; n samples, h filters, o classes. A sum of n rotations takes
log2 n of them where n is a power of two, as in the paper, and one more for every further bit of n.

    C       row r, filter f at r·h + f:  C[r mod m, f]             csize = (n + m - 1)·h slots, rows repeat
    W, ∇W   (c, i, f) at (c·n + i)·h + f:  W[f, c]                 every class n times
    P       (i, f) at i·h + f                                      convolution by complex diagonals
    U       (c, i) at (c·n + i)·h                                  dense layer, inner sums over f
    D       U ‖ P ‖ W ‖ ∇W ‖ ∇C     at multiples of o·n·h          packed by rotations, refreshed as one
    D'      U by (i, c, f) ‖ U by (c, r, f) ‖ η·P ‖ η·W ‖ μ·∇W ‖ μ·∇C      the refresh's slot map

Corrections to the print: line 14's rotations are multiples of o·n·h, as the text says; the inner sums' by-products are
left where nothing is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from cloister.arrays import F64
from cloister.errors import ParameterError
from cloister.models import cellcnn
from cloister.mpc.crypto.ckks import scheme as ckks
from cloister.mpc.crypto.rns.slots import SlotMap, make_map

npt_complex = np.ndarray[Any, np.dtype[np.complex128]]
LEVELS = 7  # two for the forward pass, five for the backward pass
CONJUGATE = 0  # the step that stands for complex conjugation


@dataclass(frozen=True, slots=True)
class Layout:
    config: cellcnn.Config
    slots: int
    parties: int

    def __post_init__(self) -> None:
        need = 3 * self.onh + (2 * self.config.classes + 1) * self.csize
        if max(need, 4 * self.onh + self.csize) > self.slots:
            raise ParameterError(
                f"{self.config.batch} samples, {self.config.filters} filters and {self.config.classes} classes need"
                f" {need} slots, the ring has {self.slots}; use a smaller batch, fewer filters, or mode 'hardened'"
            )

    @property
    def n(self) -> int:
        return max(2, self.config.batch)

    @property
    def h(self) -> int:
        return self.config.filters

    @property
    def m(self) -> int:
        return self.config.markers + self.config.markers % 2

    @property
    def onh(self) -> int:
        return self.config.classes * self.n * self.h

    @property
    def csize(self) -> int:
        return (self.n + self.m - 1) * self.h

    @property
    def access(self) -> int:
        """Where η·P ‖ η·W begin in D'."""
        return self.onh + self.config.classes * self.csize

    @property
    def copies(self) -> int:
        """Of m rows in C."""
        return -(-(self.n + self.m - 1) // self.m)

    @property
    def rotations(self) -> tuple[int, ...]:
        """Every rotation that a site makes; CONJUGATE among them."""
        n, h, o = self.n, self.h, self.config.classes
        steps = {CONJUGATE, h, 2 * h, -self.onh, self.access, self.onh}
        for count, step in ((h, 1), (n, o * h), (n, -h)):  # sums over filters and samples, replication over samples
            steps |= {step * i for doubled, there in doublings(count) for i in (doubled, there) if i}
        steps |= {-n * h * c for c in range(1, o)} | {self.csize * c for c in range(1, o)}
        steps |= {-(n - 1) * h * c for c in range(1, o)}
        steps |= {-self.m * h * t for t in range(1, self.copies)}
        return tuple(sorted(steps))

    # ---- plain vectors -----------------------------------------------------------------------------------------------

    def _vector(self) -> F64:
        return np.zeros(self.slots)

    def conv_slots(self, C: F64) -> F64:
        rows = np.zeros((self.m, self.h))
        rows[: C.shape[0], : C.shape[1]] = C
        out = self._vector()
        out[: self.csize] = rows[np.arange(self.n + self.m - 1) % self.m].ravel()
        return out

    def dense_slots(self, W: F64) -> F64:
        columns = np.zeros((self.config.classes, self.h))
        columns[:, : W.shape[0]] = W.T
        out = self._vector()
        out[: self.onh] = np.repeat(columns[:, None, :], self.n, axis=1).ravel()
        return out

    def _batch(self, X: F64, Y: F64) -> tuple[F64, F64]:
        L, labels = np.zeros((self.n, self.m)), np.zeros((self.n, self.config.classes))
        L[: len(X), : X.shape[1]] = X
        labels[: len(Y)] = Y
        return L, labels

    def forward_diagonals(self, X: F64) -> list[npt_complex]:
        """½(L[i, j] - ι·L[i, j + 1]) at (i, f), j = i + 2k mod m."""
        L, _ = self._batch(X, np.zeros((0, self.config.classes)))
        i = np.arange(self.n)
        diagonals = []
        for k in range(self.m // 2):
            j = (i + 2 * k) % self.m
            diagonals.append(self._rows(L[i, j], L[i, (j + 1) % self.m]))
        return diagonals

    def backward_diagonals(self, X: F64) -> list[npt_complex]:
        """½(L[i, j] - ι·L[i + 1, j]) at (j, f), i = j + 2k mod n; the last has one row alone if n is odd."""
        L, _ = self._batch(X, np.zeros((0, self.config.classes)))
        j = np.arange(self.m)
        diagonals = []
        for k in range(-(-self.n // 2)):
            i = (j + 2 * k) % self.n
            beside = L[(i + 1) % self.n, j] if 2 * k + 1 < self.n else np.zeros(self.m)
            diagonals.append(self._rows(L[i, j], beside))
        return diagonals

    def _rows(self, a: F64, b: F64) -> npt_complex:
        """½(a - ι·b), h times each."""
        out = np.zeros(self.slots, complex)
        size = len(a) * self.h
        out[:size] = 0.5 * (np.repeat(a, self.h) - iota(self.slots)[:size] * np.repeat(b, self.h))
        return out

    def label_slots(self, Y: F64) -> tuple[F64, F64]:
        """Y in both orders of U, and where it counts."""
        _, labels = self._batch(np.zeros((0, self.m)), Y)
        seen = np.zeros((self.n, self.config.classes))
        seen[: len(Y)] = 1.0
        return self._both(labels), self._both(seen)

    def _both(self, table: F64) -> F64:
        out = self._vector()
        out[: self.onh] = np.repeat(table.ravel(), self.h)
        rows = table[np.arange(self.n + self.m - 1) % self.n]
        out[self.onh : self.access] = np.concatenate([np.repeat(rows[:, c], self.h) for c in range(table.shape[1])])
        return out

    def mask(self, start: int, stop: int) -> F64:
        out = self._vector()
        out[start:stop] = 1.0
        return out

    # ---- the refresh -------------------------------------------------------------------------------------------------

    def repacking(self, u_ratio: float, source: int = 0) -> SlotMap:
        """D → D'; `u_ratio` corrects the scale of U, `source` is the number of the input."""
        n, h, o, q = self.n, self.h, self.config.classes, self.onh
        eta = self.config.learning_rate / (self.config.batch * self.parties)
        mu = self.config.momentum / self.parties
        first = source * self.slots
        rows: list[tuple[Any, Any, Any]] = []
        f, r = np.arange(h), np.arange(n + self.m - 1)
        for i in range(n):
            for c in range(o):
                by_sample = i * o * h + c * h + f
                repeats = r[r % n == i]
                by_class = self.onh + c * self.csize + (repeats[:, None] * h + f).ravel()
                rows.append((np.concatenate([by_sample, by_class]), first + (c * n + i) * h, u_ratio))
        for i in range(n):
            for k in range(h):
                to = self.access + i * o * h + np.arange(o) * h + k
                rows.append((to, first + q + i * h + k, eta))
        for c in range(o):
            for k in range(h):
                to = self.access + self.onh + c * self.csize + r * h + k
                rows.append((to, first + 2 * q + c * n * h + k, eta))
        for s in range(self.onh):
            rows.append((2 * self.access + s, first + 3 * q + s, mu))
        for s in range(self.csize):
            rows.append((2 * self.access + self.onh + s, first + 4 * q + s, mu))
        return make_map(rows, self.slots)


def iota(slots: int) -> npt_complex:
    """The root of -1 that is the monomial X^(N/2) in our order of slots, i, -i, i, ...: it costs no level."""
    return np.asarray(1j * (-1.0) ** np.arange(slots), np.complex128)


class CipherOps:
    """The operations on ciphertexts; plain factors bring results to Δ, or to the scale of `like`."""

    def __init__(self, params: ckks.Parameters, relin: Any, rotation: Mapping[int, Any]) -> None:
        self.c, self.relin, self.rotation = ckks.context(params), relin, rotation
        self._i = self.c.encode(iota(params.slots), params.top, 1.0)

    def rotate(self, x: ckks.Cipher, steps: int) -> ckks.Cipher:
        return self.c.rotate(x, steps, self.rotation[steps])

    def add(self, x: ckks.Cipher, y: ckks.Cipher) -> ckks.Cipher:
        return self.c.add(x, y)

    def times(self, x: ckks.Cipher, y: ckks.Cipher) -> ckks.Cipher:
        return self.c.times(x, y, self.relin)

    def times_i(self, x: ckks.Cipher) -> ckks.Cipher:
        return self.c.multiply_plain(x, self._i)

    def times_plain(self, x: ckks.Cipher, v: Any, *, like: ckks.Cipher | None = None) -> ckks.Cipher:
        c = self.c
        target = c.params.scale if like is None else like.scale
        return c.times_plain(x, c.encode(v, x.primes, target * c.dropped(x.primes) / x.scale))

    def add_plain(self, x: ckks.Cipher, v: Any) -> ckks.Cipher:
        return self.c.add_plain(x, v)

    def join(self, x: ckks.Cipher, y: ckks.Cipher) -> ckks.Cipher:
        """Add vectors that stand in different slots, whatever their scales; the repacking corrects the first's."""
        return self.c.add(ckks.Cipher(x.polys, y.scale), y)


def doublings(count: int) -> list[tuple[int, int]]:
    """Per bit of `count`: how far apart the halves of the next block lie (0: none), where a block goes (0: first)."""
    out, there = [], 0
    for t in range(count.bit_length()):
        has = count >> t & 1
        out.append((1 << t if count >> (t + 1) else 0, there if has else 0))
        there += has << t
    return out


def add_rotated(ops: Any, x: Any, count: int, step: int) -> Any:
    """The sum of x rotated by 0, step, ..., (count - 1)·step."""
    total, block = None, x
    for t, (doubled, there) in enumerate(doublings(count)):
        if count >> t & 1:
            placed = ops.rotate(block, there * step) if there else block
            total = placed if total is None else ops.add(total, placed)
        if doubled:
            block = ops.add(block, ops.rotate(block, doubled * step))
    return total


def _by_diagonals(ops: Any, L: Layout, packed: Any, diagonals: list[npt_complex]) -> Any:
    """A matrix, by its diagonals, times a packed ciphertext; the real part of the sum, twice."""
    total, turned = None, packed
    for k, d in enumerate(diagonals):
        turned = ops.rotate(turned, 2 * L.h) if k else turned
        term = ops.times_plain(turned, d)
        total = term if total is None else ops.add(total, term)
    return ops.add(total, ops.rotate(total, CONJUGATE))


def forward(ops: Any, L: Layout, C: Any, W: Any, gW: Any, gC: Any, X: F64) -> Any:
    """Lines 9 to 14: from weights and a batch to D; before the first step there are no gradients (`None`)."""
    packed = ops.add(C, ops.times_i(ops.rotate(C, L.h)))
    P = _by_diagonals(ops, L, packed, L.forward_diagonals(X))
    whole = P
    for c in range(1, L.config.classes):
        whole = ops.add(whole, ops.rotate(P, -L.n * L.h * c))
    U = ops.times(whole, W)
    U = add_rotated(ops, U, L.h, 1)
    D = ops.add(P, ops.rotate(W if gC is None else ops.add(W, _previous(ops, L, gW, gC)), -L.onh))
    return ops.join(U, ops.rotate(D, -L.onh))


def _previous(ops: Any, L: Layout, gW: Any, gC: Any) -> Any:
    return ops.rotate(ops.add(gW, ops.rotate(gC, -L.onh)), -L.onh)


def backward(ops: Any, L: Layout, D: Any, X: F64, Y: F64) -> tuple[Any, Any]:
    """Lines 17 to 33: from D' to this party's ∇W and ∇C, its share of the momentum included."""
    labels, seen = L.label_slots(Y)
    c0, c1, c2, c3, c5 = cellcnn.error_polynomial(L.config.interval, labels)
    U2 = ops.times(D, D)
    inner = ops.times(ops.times_plain(D, c5 * seen), U2)
    inner = ops.add_plain(ops.add(inner, ops.times_plain(D, c3 * seen, like=inner)), c2 * seen)
    E = ops.times(inner, U2)
    E = ops.add_plain(ops.add(E, ops.times_plain(D, c1 * seen, like=E)), c0 * seen)
    PW = ops.rotate(D, L.access)
    G = ops.times(E, PW)
    E0 = ops.rotate(G, L.onh)
    total = E0
    for c in range(1, L.config.classes):
        total = ops.add(total, ops.rotate(E0, L.csize * c))
    G = add_rotated(ops, G, L.n, L.config.classes * L.h)
    packed = ops.add(total, ops.times_i(ops.rotate(total, L.h)))
    gC = _by_diagonals(ops, L, packed, L.backward_diagonals(X))
    rows = gC
    for t in range(1, L.copies):
        rows = ops.add(rows, ops.rotate(gC, -L.m * L.h * t))
    gW = None
    for c in range(L.config.classes):
        column = ops.times_plain(G, L.mask(c * L.h, (c + 1) * L.h))
        column = ops.rotate(column, -(L.n - 1) * L.h * c) if c else column
        gW = column if gW is None else ops.add(gW, column)
    gW = add_rotated(ops, gW, L.n, -L.h)
    previous = ops.rotate(PW, L.access)
    gW = ops.add(gW, ops.times_plain(previous, L.mask(0, L.onh)))
    return gW, ops.add(rows, ops.times_plain(ops.rotate(previous, L.onh), L.mask(0, L.csize)))
