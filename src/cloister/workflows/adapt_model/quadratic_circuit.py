"""The circuit of an encoder with quadratic attention: a square in place of exp, and activations that are never opened.

    x           the sum of all that the blocks add, at two polynomials and K - 2 primes: opened at the taps only
    LayerNorm   d·Σ x² - (Σ x)²; Newton's steps, one a round; (d·x - Σ x)·y     1 + steps rounds of T, 1 of T·d
    attention   q·k; drop a prime; (s + c)²; Σ e·v and Σ e, in one stretch      1 round of T·d and heads·T
    division    Goldschmidt, two steps a round                                  steps / 2 rounds of heads·T
    projection  multiply, linear, drop a prime, add to x                        none
    feed        linear, square, linear, drop two primes, add to x               none

No score is ever opened: what travels does not grow with T². Products go back to two polynomials where they stand
(switching keys of s² alone), and a prime that is dropped takes as much off their scale: the square of a product of
scale s then has (s / q)² at one prime less, which is why seven primes are enough.

With post-norm blocks (scGPT) x is what a LayerNorm gives: refreshed there, and added before primes are dropped.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from cloister.arrays import F64
from cloister.errors import ParameterError
from cloister.models.polynomial import START, Shape
from cloister.mpc.crypto.owner_ckks.packed_refresh import dropped
from cloister.mpc.crypto.owner_ckks.ring import KEEP, PAIR_BITS, longest
from cloister.workflows.adapt_model.block_circuit import ROWS, Circuit, rows_of
from cloister.workflows.adapt_model.block_values import Cts, Values, token

FINE = 32.0  # bits of the scale of what Newton and Goldschmidt work on
LEAST = 16.0  # bits of any scale, below which noise would show
MOST = 40.0  # bits of the scale of x
SUM, ROOT, INVERSE = 2.0, 8.0, 32.0  # bounds of a denominator and a variance, of 1/√, of a quotient


class QuadraticCircuit(Circuit):
    """One pass of one batch."""

    @property
    def rows(self) -> int:
        """Tokens whose numbers are ciphertexts of their own."""
        return self.shape.tokens

    @property
    def kept(self) -> int:
        """Primes of x."""
        return self.params.count - 2

    def room(self, k: int) -> float:
        """Bits of the longest value at k primes, with a little to spare for rounding."""
        return longest(self.params, k) - PAIR_BITS - 0.01 if k > KEEP else 0.0

    def lost(self, k: int, keep: int) -> float:
        return float(dropped(self.params, k, keep))

    def scale(self, what: str, bits: float, most: float = 60.0) -> float:
        """About 2^bits, or 2^most if that is less."""
        if bits < LEAST:
            raise ParameterError(
                f"{what}: a scale of 2^{bits:.0f} is too small for quadratic attention; use seven primes of 28 bits, "
                "or a model with smaller bounds"
            )
        whole, part = divmod(min(bits, most), 1.0)
        return math.ldexp(math.floor(2.0 ** (16 + part)), int(whole) - 16)  # both sides', whatever their logarithms

    # ---- scales, each as large as its opening allows -----------------------------------------------------------------

    @property
    def x_scale(self) -> float:
        """So that a variance can be opened."""
        s = self.shape
        top = SUM * s.width**2 * max(s.variances)
        return self.scale("activations", (self.room(self.kept) - math.log2(top)) / 2, MOST)

    def z_scale(self, layer: int) -> float:
        """Of the inputs of attention: Σ (q·k)²·v fills its opening at one prime less."""
        s, K = self.shape, self.params.count
        top = s.tokens * s.means[layer] * (s.sum_bound or 2 * s.u_bound)
        bits = self.room(K - 1) - math.log2(top) + 2 * math.log2(self.lost(K, K - 1))
        return self.scale("attention", bits / 5 - self.params.weight_bits)

    @property
    def feed_scale(self) -> float:
        """So that u²·W, less two primes, has the scale of x."""
        K = self.params.count
        return math.sqrt(self.x_scale * self.lost(K, self.kept) / self.w**3)

    @property
    def share_scale(self) -> float:
        """Of weighted sums and of quotients, so that their product times W, less a prime, has the scale of x."""
        return math.sqrt(self.x_scale * self.lost(self.kept + 1, self.kept) / self.w)

    @property
    def fine(self) -> float:
        """The first step of Newton is the longest stretch: 2·v·(16·y)³."""
        top = 2 * START[2] ** 3 * ROOT
        bits = (self.room(self.params.count) - math.log2(top)) / 4
        return self.scale("division", bits, FINE)

    # ---- x -----------------------------------------------------------------------------------------------------------

    async def embed(self, inputs: Values) -> Values:
        return await self.enter(self.embedded(inputs))

    async def enter(self, x: Values) -> Values:
        if self.shape.norm == "post":
            return (await self.refresh("embed", (x, self.shape.x_bound), want=self.z_scale(0)))[0]
        K, d = self.params.count, self.shape.width
        by = round(self.x_scale * self.lost(K, self.kept) / x.scale)
        lifted = self.add([(by, x)], scale=by * x.scale)
        return self.stored(self.shortened(lifted, K, self.kept), d)

    def stored(self, y: Values, group: int, onto: Values | None = None) -> Values:
        """Computed now and kept; `onto` what is there already, in its place."""
        if self.counting:
            return Values(y.n, y.p, self.x_scale, None, y.k, group)
        shelf: Any = self.pool.shelf(y.n, y.p, y.k, self.params.degree, rarely=True) if onto is None else onto.shelf
        for lo in range(0, y.n, group):
            made = y.get(ids := range(lo, min(y.n, lo + group)), y.k)
            shelf.put(lo, made if onto is None else self.ev.combine([(1, made), (1, onto.get(ids, y.k))]))
        return Values(y.n, y.p, self.x_scale, shelf.read, y.k, group, shelf=shelf)

    def closed(self, name: str, product: Values, x: Values, layer: int, wide: int) -> Values:
        """Linear layer on three polynomials, less primes, plus x; nothing is opened."""
        d, K = self.shape.width, self.params.count
        k = K if name == "down" else K - 1
        y = self.linear(*self.weights(layer, name, f"{name}_bias"), d, product, wide)
        if self.shape.norm == "post":
            y = self.add([(1, y), (round(y.scale / x.scale), self.pick(x, range(y.n)))])
            return self.stored(self.shortened(y, k, self.kept), d)
        return self.stored(self.shortened(y, k, self.kept), d, x)

    # ---- LayerNorm ---------------------------------------------------------------------------------------------------

    async def normed(
        self, x: Values, layer: int, which: int, want: float, gain: F64 | None = None, shift: F64 | None = None
    ) -> Values:
        s, d = self.shape, self.shape.width
        T, V = x.n // d, s.variances[2 * layer + which]

        def spread(t: int, k: int) -> Cts:
            row = x.get(token(t, d), k)
            total = self.ev.total(row)
            return self.ev.combine([(d, self.ev.dot(row, row)[None]), (-1, self.ev.products(total, total))])

        squares = self.by_token(T, 1, 3, x.scale**2, [x], spread).scaled(d * d * V)
        (v,) = await self.refresh("variance", (squares, SUM), want=self.fine)
        c = self.by_token(T * d, d, 2, x.scale * d, [x], lambda t, k: self.ev.centre(x.get(token(t, d), k)))
        post, bound = s.norm == "post", s.x_bound if s.norm == "post" else math.sqrt(d)
        top = c.scale * math.sqrt(V) * bound * (self.w if post else 1.0) * self.mask_scale(which)
        last = self.scale("LayerNorm", self.room(self.kept) - math.log2(top), FINE)
        y = await self.root(v, last)
        z = self.times(c, self.pick(y, [t for t in range(T) for _ in range(d)])).scaled(math.sqrt(V))
        if post:
            z = self.weighted(z, gain, shift)
        if self.mask_scale(which) > 1:
            z = self.masked(z)
        return (await self.refresh("normed", (z, bound), want=want))[0]

    def mask_scale(self, which: int) -> float:
        """Of a mask on what that LayerNorm gives; 1 for none."""
        return 1.0

    def masked(self, z: Values) -> Values:
        raise ParameterError("nothing is masked where every token has ciphertexts of its own")

    async def root(self, v: Values, want: float) -> Values:
        """1/√v by Newton: y·(3 - v·y²) / 2, one step a round; the last one back at `want`."""
        a, b, of = START
        y = self.add([(b, v)], a / of, scale=of * v.scale)
        for left in range(self.shape.root_steps - 1, -1, -1):
            cube = self.times(self.switched(self.times(v, y)), self.switched(self.square(y)))
            y = self.add([(-1, cube), (round(3 * v.scale * y.scale**2), y)], scale=2 * cube.scale)
            (y,) = await self.refresh("root", (y, ROOT), want=self.fine if left else want)
        return y

    def weighted(self, z: Values, gain: F64 | None, shift: F64 | None) -> Values:
        """Gain and shift of a post-norm block."""
        d, scale = self.shape.width, z.scale * self.w
        ints = [1] * d if gain is None else [int(g) for g in np.rint(gain * self.w)]

        def compute(ids: Sequence[int], k: int) -> Cts:
            at = [i % d for i in ids]
            return self.ev.combine([([ints[i] for i in at], z.get(ids, k))], shift[at] * scale)  # type: ignore[index]

        return self.derive(z.n, z.p, scale, [z], z.group, compute)

    # ---- attention ---------------------------------------------------------------------------------------------------

    async def attend(self, z: Values, layer: int, tokens: int) -> Values:
        """Σ e·v / Σ e of the first tokens, over all, with e = (q·k + c)²: d for each, three polynomials."""
        s, h = self.shape, self.shape.head_width
        norm = s.tokens * s.means[layer]
        heads = self.heads_of(z, layer, tokens)
        bound, want = s.sum_bound or 2 * s.u_bound, self.share_scale
        opened = (heads.sums.scaled(norm), bound), (heads.totals.scaled(norm), SUM)
        sums, D = await self.refresh("sums", *opened, want=(want, self.fine))
        heads.clear()
        del heads, opened
        quotients = await self.inverse(D, want)
        grid = [(t, f) for t in range(tokens) for f in range(s.width)]
        shares = self.pick(sums, [(f // h * tokens + t) * h + f % h for t, f in grid])
        product = self.times(shares, self.pick(quotients, [f // h * tokens + t for t, f in grid]))
        return dataclasses.replace(product, group=s.width)

    def heads_of(self, z: Values, layer: int, tokens: int) -> SquaredHeads:
        return SquaredHeads(self, z, layer, tokens)

    async def inverse(self, D: Values, want: float) -> Values:
        """1 / D by Goldschmidt, (1 + r)·(1 + r²)·(1 + r⁴)…, r = 1 - D: two factors a round."""
        r, found = self.add([(-1, D)], 1.0), None
        left = self.shape.steps + 1
        while left:
            both = left > 1
            factor, rr = self.add([(1, r)], 1.0), self.switched(self.square(r))
            if both:
                factor = self.times(factor, self.add([(1, rr)], 1.0))
            if found is not None:
                factor = self.times(self.switched(factor), found)
            left -= 2 if both else 1
            if left:
                found, r = await self.refresh("division", (factor, INVERSE), (self.square(rr), 1.0), want=self.fine)
            else:
                (found,) = await self.refresh("division", (factor, INVERSE), want=want)
        return found  # type: ignore[return-value]

    # ---- a block -----------------------------------------------------------------------------------------------------

    async def feed_into(self, z: Values, x: Values, layer: int) -> Values:
        f = self.shape.hidden
        u = self.linear(*self.weights(layer, "up", "up_bias"), f, z, self.shape.width)
        return self.closed("down", dataclasses.replace(self.square(u), group=f), x, layer, f)

    async def block(self, x: Values, layer: int, tokens: int = 0) -> Values:
        s, tokens = self.shape, tokens or self.rows
        if s.norm == "pre":
            z = await self.normed(x, layer, 0, self.z_scale(layer))
            if x.shelf is not None:
                self.pool.make_room(x.shelf, tokens * s.width, self.params.count - 1, self.params.degree)
            product = await self.attend(z, layer, tokens)
            del z  # what is held here is as large as a card
            if x.shelf is not None:
                x.shelf.back()
            x = self.closed("out", product, x, layer, s.width)
            del product
            z = await self.normed(x, layer, 1, self.feed_scale)
            return await self.feed_into(z, x, layer)
        x = self.closed("out", await self.attend(x, layer, tokens), x, layer, s.width)
        x = await self.normed(x, layer, 0, self.feed_scale, *self.weights(layer, "gain1", "shift1"))
        x = await self.feed_into(x, x, layer)
        following = self.z_scale(min(layer + 1, s.depth - 1))
        return await self.normed(x, layer, 1, following, *self.weights(layer, "gain2", "shift2"))


class SquaredHeads:
    """Queries, keys and values of one layer by head, made of z where they are read, and what is opened of them."""

    polys = 3  # of a sum

    def __init__(self, circuit: QuadraticCircuit, z: Values, layer: int, tokens: int) -> None:
        s: Shape = circuit.shape
        self.circuit, self.z, self.outs = circuit, z, tokens
        self.tokens, self.width, self.size = s.tokens, s.width, s.head_width
        self.w, self.bias = circuit.weights(layer, "qkv", "qkv_bias")
        self.offset = None if circuit.encoder is None else circuit.encoder.blocks[layer].offset
        self.held: tuple[int, list[Cts]] | None = None  # head at hand, its queries, keys and values
        K, h, n = circuit.params.count, self.size, s.heads * tokens
        self.primes = K, K - 1  # of scores, and of their squares
        self.value_primes = K - 1
        self.part_scale = z.scale * circuit.w
        self.score_scale = self.part_scale**2 / circuit.lost(*self.primes)
        e = self.score_scale**2
        if circuit.counting:
            circuit.require(z, K)
            self.sums = Values(n * h, self.polys, e * self.part_scale, k=K - 1, group=min(tokens, ROWS) * h)
            self.totals = Values(n, 2, e, k=K - 1)
            return
        self.shelf = circuit.pool.shelf(n, 2, K - 1, circuit.params.degree)
        self.sums = Values(n * h, self.polys, e * self.part_scale, self.compute, K - 1, min(tokens, ROWS) * h)
        self.totals = Values(n, 2, e, self.shelf.read, K - 1)  # written as sums are computed

    def clear(self) -> None:
        """Let go of z: what computes sums refers to itself, and would live on until somebody collects garbage."""
        del self.held, self.sums, self.totals

    def parts(self, head: int) -> list[Cts]:
        """Queries, keys and values of one head, `size` for each token; queries only of what comes out. Reads z once."""
        c, h, (K, _) = self.circuit, self.size, self.primes
        tokens = self.z.n // self.width
        out = [c.ev.zeros(n * h, 2, k) for n, k in ((self.outs, K), (tokens, K), (tokens, self.value_primes))]
        for first, some in ((0, range(self.outs)), (1, range(self.outs, tokens))):
            rows = np.concatenate([np.arange(h) + p * self.width + head * h for p in range(first, 3)])
            made = c.linear(self.w[rows], self.bias[rows], len(rows), self.z, self.width)  # type: ignore[index]
            for t in some:
                y = made.get(token(t, len(rows)), K)
                for n, part in enumerate(out[first:]):
                    part[t * h : (t + 1) * h] = y[n * h : (n + 1) * h, :, : part.shape[2]]
        return out

    def compute(self, ids: Sequence[int], k: int) -> Cts:
        """Σ_j e·v on the grid (head, token, feature), in whole rows of it; Σ_j e goes onto the shelf."""
        ev, T, h, parts = self.circuit.ev, self.tokens, self.size, []
        by_key, by_value = np.arange(T * h).reshape(T, h), np.arange(T * h).reshape(T, h).T.copy()
        for head, first, count in rows_of(ids, self.outs, h):
            if self.held is None or self.held[0] != head:
                self.held = None  # before there are others
                self.held = head, self.parts(head)
            queries, keys, values = self.held[1]
            q = queries[first * h : (first + count) * h]
            scores = ev.rows(q.reshape(count, h, *q.shape[1:]), keys, by_key)
            e = self.squared(scores.reshape(count * T, *scores.shape[2:]), head)
            del scores
            e = e.reshape(count, T, *e.shape[1:])
            for i in range(count):
                self.shelf.put(head * self.outs + first + i, ev.total(e[i]))
            y = ev.rows(ev.cut(e, k), ev.cut(values, k), by_value)
            parts.append(y.reshape(count * h, *y.shape[2:]))
            del queries, keys, values, q, e
        return ev.join(parts)

    def squared(self, scores: Cts, head: int) -> Cts:
        """(s + c)², of two polynomials at one prime less."""
        ev = self.circuit.ev
        short = ev.dropped(ev.switched(scores), self.primes[1])
        shifted = ev.combine([(1, short)], float(self.offset[head]) * self.score_scale)  # type: ignore[index]
        return ev.switched(ev.products(shifted, shifted))
