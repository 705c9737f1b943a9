"""The circuit of an encrypted encoder, in stretches between refreshes. Local steps of `encrypted_inference`.

    embed       linear                                              1 refresh of T·d
    LayerNorm   centre, square and add; Newton; multiply            2 + 2·steps refreshes of T to T·d
    attention   linear, scores; exp; weighted sums; Goldschmidt     2 to 4 of heads·T², 1 + steps of heads·T
    projection  multiply, linear on four polynomials, residual      1
    feed        linear, square, linear on three polynomials         1, or 2 where the modulus is short

Values are recipes (`block_values`), so a block may be larger than memory. Run without an evaluator (`block_plan`), it
only counts: the list of openings is the written depth budget, and both sides hold it before anything is sent.
`quadratic_circuit` has the same parts for quadratic attention.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from cloister.arrays import F64
from cloister.errors import ParameterError
from cloister.models.polynomial import START, Encoder, Shape
from cloister.mpc.crypto.owner_ckks import scheme as block
from cloister.mpc.crypto.owner_ckks.scheme import Opening, Parameters, fits
from cloister.workflows.adapt_model.block_values import Cts, Recipes, Refresh, Values, token

ROWS = 8  # of the attention matrix that are computed together
EXP_BITS = 20.0  # the least scale of scores at which exp is one stretch


def quadratics(degree: int) -> list[tuple[float, float]]:
    """(b, c) with Σ s^i / i! = Π (s² + b·s + c) / degree!: Taylor's exp of even degree has no real root."""
    roots = np.roots([1 / math.factorial(i) for i in range(degree, -1, -1)])
    return [(-2 * float(z.real), float(abs(z) ** 2)) for z in roots if z.imag > 0]


class Circuit(Recipes):
    """One pass of one batch; `encoder` is None where we only count."""

    tap_bits = 46  # the scale of what is read, above Δ

    def __init__(
        self,
        shape: Shape,
        params: Parameters,
        refresh: Refresh,
        encoder: Encoder | None = None,
        ev: Any = None,
        openings: Sequence[Opening] = (),
        pool: Any = None,
    ) -> None:
        super().__init__(params, refresh, ev, openings, pool)
        self.shape, self.encoder = shape, encoder

    async def embed(self, inputs: Values) -> Values:
        """(T - 1)·inputs ciphertexts at Δ → T·d at Δ."""
        return (await self.refresh("embed", (self.embedded(inputs), self.shape.x_bound)))[0]

    def embedded(self, inputs: Values) -> Values:
        """The first layer, before anything is opened."""
        s, e = self.shape, self.encoder
        scale = inputs.scale * self.w
        w = None if e is None else self.ev.weights(np.rint(e.embed * self.w).astype(np.int64))

        def make(t: int, k: int) -> Cts:
            y = self.ev.linear(w, inputs.get(token(t - 1, s.inputs), k)) if t else self.ev.zeros(s.width, 2, k)
            return self.ev.add_constants(y, e.positions[t] * scale)  # type: ignore[union-attr]

        return self.by_token(s.tokens * s.width, s.width, 2, scale, [inputs], make)

    async def enter(self, x: Values) -> Values:
        """T·d ciphertexts at Δ and all primes → what `block` takes."""
        return x

    async def layer_norm(
        self, x: Values, layer: int, which: int, gain: F64 | None = None, shift: F64 | None = None
    ) -> Values:
        """Newton's steps for 1 / √v on v / V, where V is the variance that the calibration found."""
        s, d, D = self.shape, self.shape.width, self.delta
        T = x.n // d
        V = s.variances[2 * layer + which]
        c = self.by_token(T * d, d, 2, x.scale * d, [x], lambda t, k: self.ev.centre(x.get(token(t, d), k)))

        def sum_of_squares(t: int, k: int) -> Cts:
            row = c.get(token(t, d), k)
            return self.ev.dot(row, row)[None]

        squares = self.by_token(T, 1, 3, c.scale**2, [c], sum_of_squares)
        (v,) = await self.refresh("variance", (squares.scaled(d * V), 2.0))
        a, b, of = START
        y = self.add([(b, v)], a / of, scale=of * D)
        for _ in range(s.root_steps):
            yy, vy = await self.refresh("root", (self.square(y), 64.0), (self.times(v, y), 8.0))
            factor = round(3 * D * D / y.scale)
            y = self.add([(-1, self.times(yy, vy)), (factor, y)], scale=2 * D * D)
            (y,) = await self.refresh("root", (y, 8.0))
        z = self.times(c, self.pick(y, [t for t in range(T) for _ in range(d)])).scaled(math.sqrt(V))
        bound = math.sqrt(d)
        if s.norm == "post":
            plain, scale, bound = z, z.scale * self.w, s.x_bound
            ints = [1] * d if gain is None else [int(g) for g in np.rint(gain * self.w)]

            def weighted(ids: Sequence[int], k: int) -> Cts:
                at = [i % d for i in ids]
                return self.ev.combine([([ints[i] for i in at], plain.get(ids, k))], shift[at] * scale)  # type: ignore[index]

            z = self.derive(T * d, 3, scale, [plain], plain.group, weighted)
        return (await self.refresh("normed", (z, bound)))[0]

    def weights(self, layer: int, first: str, second: str) -> tuple[F64 | None, F64 | None]:
        """Two weights of one block, by name; None where we only count."""
        if self.encoder is None:
            return None, None
        block = self.encoder.blocks[layer]
        return getattr(block, first), getattr(block, second)

    async def attention(self, z: Values, layer: int, tokens: int) -> Values:
        """Weighted values softmax(q·k)·v of the first tokens, over all: d for each, three polynomials or four."""
        s, w, bias = self.shape, *self.weights(layer, "qkv", "qkv_bias")
        whole = self.linear(w, bias, 3 * s.width, z, s.width)
        stored = not fits(self.params, whole.scale**2, 4.0)
        if stored:
            (whole,) = await self.refresh("qkv", (whole, s.u_bound))
        heads = Heads(self, whole, None if stored else z, w, bias)
        e = await self.exp(heads.scores(tokens))
        heads.keys.clear()
        sums, totals = heads.weigh(e, tokens)
        norm = s.tokens * s.means[layer]  # what a row of e adds up to, about
        return await self.divide(sums.scaled(norm), totals, norm)

    async def divide(self, sums: Values, totals: Values, norm: float) -> Values:
        """Goldschmidt: each head's sums by its total, which is near `norm`; 1 / (1 - r) = Π (1 + r^(2^i))."""
        s, d, h = self.shape, self.shape.width, self.shape.head_width
        r = self.add([(-1, totals)], 1.0, scale=totals.scale * norm)
        inverse = self.add([(1, r)], 1.0)
        straight = fits(self.params, sums.scale * self.thin * self.w, s.x_bound)
        if straight:
            (r,) = await self.refresh("division", (self.square(r), 1.0))
        else:
            sums, r = await self.refresh("division", (sums, 2 * s.u_bound), (self.square(r), 1.0))
        for step in range(s.steps):
            better = self.times(self.add([(1, r)], 1.0), inverse)
            if step == s.steps - 1:
                (inverse,) = await self.refresh("division", (better, 32.0), want=self.thin if straight else self.delta)
            else:
                r, inverse = await self.refresh("division", (self.square(r), 1.0), (better, 32.0))
        per_head = self.pick(inverse, [t * s.heads + f // h for t in range(sums.n // d) for f in range(d)])
        return dataclasses.replace(self.times(sums, per_head), group=d)

    @property
    def thin(self) -> float:
        """The scale of factors in a long product."""
        return self.delta / 8

    async def exp(self, scores: Values) -> Values:
        """Taylor's polynomial, refreshed: in one stretch as a product of quadratics, where the modulus is long."""
        degree = self.shape.exp_degree
        top = math.factorial(degree)
        bits = (block.longest(self.params, self.params.count) - 1 - math.log2(64.0 * top)) / degree
        if bits < EXP_BITS and degree > 6:
            return await self.exp_by_factors(scores)
        if bits < EXP_BITS:
            (s1,) = await self.refresh("scores", (scores, 4.0))
            return await self.exp_by_powers(s1)
        (s,) = await self.refresh("scores", (scores, 4.0), want=2.0 ** min(bits, self.params.scale_bits))
        whole = self.quadratic_product(s, quadratics(degree), top)
        return (await self.refresh("exp", (whole, 64.0), want=self.thin))[0]

    async def exp_by_factors(self, scores: Values) -> Values:
        """Degrees above 6: the quadratics, each 1 at 0, by up to three in a stretch; then the stretches' product."""
        factors = [(round(b * 2**24) / 2**24, round(c * 2**24) / 2**24) for b, c in quadratics(self.shape.exp_degree)]
        s4 = np.linspace(-4.0, 4.0, 801)  # coefficients and bounds are both sides', whatever their roots
        longest = block.longest(self.params, self.params.count) - 1

        def bound(some: Sequence[tuple[float, float]]) -> float:
            top = np.prod([(s4 * s4 + b * s4 + c) / c for b, c in some], axis=0).max()
            return math.ceil(8.1 * float(top)) / 8

        def bits(some: Sequence[tuple[float, float]]) -> float:
            return (longest - math.log2(bound(some) * math.prod(c for _, c in some))) / (2 * len(some))

        count = next(n for n in range(-(-len(factors) // 3), len(factors) + 1)
                     if all(bits(factors[i::n]) >= EXP_BITS for i in range(n)))  # fmt: skip
        groups = [factors[i::count] for i in range(count)]
        fine = min(self.params.scale_bits, *(math.floor(bits(some)) for some in groups))
        (s,) = await self.refresh("scores", (scores, 4.0), want=2.0**fine)
        products = [self.quadratic_product(s, some, math.prod(c for _, c in some)) for some in groups]
        whole, *parts = await self.refresh("exp", *zip(products, map(bound, groups), strict=True))
        done = groups[0]
        for part, some in zip(parts, groups[1:], strict=True):
            done = done + some
            last = len(done) == len(factors)
            want = self.thin if last else self.delta
            (whole,) = await self.refresh("exp", (self.times(whole, part), 64.0 if last else bound(done)), want=want)
        return whole

    def quadratic_product(self, s: Values, factors: Sequence[tuple[float, float]], of: float) -> Values:
        """Π (s² + b·s + c) / `of`."""

        def compute(ids: Sequence[int], k: int) -> Cts:
            ev, x = self.ev, s.get(ids, k)
            square, product = ev.products(x, x), None
            for b, c in factors:
                q = ev.combine([(1, square), (round(b * s.scale), x)], c * s.scale**2)
                product = q if product is None else ev.products(product, q)
            return product

        n = len(factors)
        return self.derive(s.n, 2 * n + 1, s.scale ** (2 * n) * of, [s], 8, compute)

    async def exp_by_powers(self, s1: Values) -> Values:
        """A(s) + s^k·B(s) with k = degree / 2, every power refreshed."""
        D, k = self.delta, self.shape.exp_degree // 2
        grain = 2.0 ** next((g for g in (20, 16) if fits(self.params, D * D * 2.0**g, 64.0)), 12)  # of coefficients
        powers = [s1]
        for i in range(1, k):
            (s,) = await self.refresh("exp", (self.times(s1, powers[-1]), 4.0 ** (i + 1)))
            powers.append(s)
        inner = [1 / math.factorial(k + i) for i in range(k + 1)]  # B = Σ inner_i s^i
        B = self.add([(round(inner[i] * grain), powers[i - 1]) for i in range(1, k + 1)], inner[0], scale=D * grain)
        outer = [(round(D * grain / math.factorial(i)), powers[i - 1]) for i in range(1, k)]
        whole = self.add([(1, self.times(B, powers[k - 1])), *outer], 1.0)
        return (await self.refresh("exp", (whole, 64.0)))[0]

    async def close(self, name: str, product: Values, residual: Values, layer: int, wide: int) -> Values:
        """Linear layer on three polynomials or four, plus the residual: one refresh."""
        s, d = self.shape, self.shape.width
        y = self.linear(*self.weights(layer, name, f"{name}_bias"), d, product, wide)
        y = self.add([(1, y), (round(y.scale / residual.scale), residual)])
        return (await self.refresh(name, (y, s.x_bound)))[0]

    async def feed(self, z: Values, residual: Values, layer: int) -> Values:
        s, f = self.shape, self.shape.hidden
        u = self.linear(*self.weights(layer, "up", "up_bias"), f, z, s.width)
        if not fits(self.params, u.scale**2 * self.w, s.x_bound):
            (u,) = await self.refresh("units", (u, s.u_bound))
        return await self.close("down", dataclasses.replace(self.square(u), group=f), residual, layer, f)

    async def block(self, x: Values, layer: int, tokens: int = 0) -> Values:
        """One block; what comes out has all primes. With `tokens`, only the first so many of them come out."""
        d, tokens = self.shape.width, tokens or self.shape.tokens
        first = self.pick(x, range(tokens * d))
        if self.shape.norm == "pre":
            z = await self.layer_norm(x, layer, 0)
            x = await self.close("out", await self.attention(z, layer, tokens), first, layer, d)
            x = await self.feed(await self.layer_norm(x, layer, 1), x, layer)
        else:
            x = await self.close("out", await self.attention(x, layer, tokens), first, layer, d)
            x = await self.layer_norm(x, layer, 0, *self.weights(layer, "gain1", "shift1"))
            x = await self.feed(x, x, layer)
            x = await self.layer_norm(x, layer, 1, *self.weights(layer, "gain2", "shift2"))
        if self.counting:
            self.require(x, self.params.count)
        return x

    async def tap(self, x: Values, which: int) -> Values:
        """The class token through the projection, ready to be flooded and read."""
        s, e = self.shape, self.encoder
        cls = self.pick(x, token(0, s.width))
        (cls,) = await self.refresh("tap", (cls, s.x_bound), want=self.delta * 2.0**self.tap_bits)
        w, c = (None, None) if e is None else (e.projections[which], -e.centres[which])
        return self.linear(w, c, s.rank, cls, s.width)


class Heads:
    """Queries, keys and values of one layer by head: out of `whole`, or made of z again wherever they are read."""

    def __init__(self, circuit: Circuit, whole: Values, z: Values | None, w: F64 | None, bias: F64 | None) -> None:
        self.circuit, self.whole, self.z, self.w, self.bias = circuit, whole, z, w, bias
        self.tokens, self.width, self.size = circuit.shape.tokens, circuit.shape.width, circuit.shape.head_width
        self.keys: dict[int, Cts] = {}  # of the head at hand

    def part(self, part: int, head: int) -> Values:
        """Queries (0), keys (1) or values (2) of one head: `size` for each token."""
        first = part * self.width + head * self.size
        rows = slice(first, first + self.size)
        if self.z is None:
            of_token = range(first, first + self.size)
            return self.circuit.pick(self.whole, [t * 3 * self.width + r for t in range(self.tokens) for r in of_token])
        w, bias = (None if x is None else x[rows] for x in (self.w, self.bias))
        return self.circuit.linear(w, bias, self.size, self.z, self.width)

    def all_of(self, part: int, head: int, k: int) -> Cts:
        values, n = self.part(part, head), self.tokens * self.size
        cts = self.circuit.ev.zeros(n, 2, k)
        for t in range(self.tokens):
            at = token(t, self.size)
            cts[at.start : at.stop] = values.get(at, k)
        return cts

    def scores(self, tokens: int) -> Values:
        """q·k on the grid (head, i, j), for the first tokens i and all j."""
        T, h = self.tokens, self.size

        def compute(ids: Sequence[int], k: int) -> Cts:
            parts = []
            for head, first, count in rows_of(ids, tokens, T):
                if head not in self.keys:
                    self.keys.clear()
                    self.keys[head] = self.all_of(1, head, k)
                q = self.part(0, head).get(range(first * h, (first + count) * h), k)
                q = q.reshape(count, h, *q.shape[1:])
                y = self.circuit.ev.rows(q, self.keys[head], np.arange(T * h).reshape(T, h))
                parts.append(y.reshape(count * T, *y.shape[2:]))
            return self.circuit.ev.join(parts)

        n, group = self.circuit.shape.heads * tokens * T, min(tokens, ROWS) * T
        return self.circuit.derive(n, 3, self.whole.scale**2, [self.whole], group, compute)

    def weigh(self, e: Values, tokens: int) -> tuple[Values, Values]:
        """Sums over j of e·v, in the order (token, head, feature), and of e, (token, head)."""
        c, T, d, h, H = self.circuit, self.tokens, self.width, self.size, self.circuit.shape.heads
        weighted = c.derive(tokens * d, 3, e.scale * self.whole.scale, [e, self.whole], d, None)
        plain = c.derive(tokens * H, 2, e.scale, [e], H, None)
        if c.counting:
            return weighted, plain
        sums, totals = c.shelf(tokens * d, 3, weighted.k), c.shelf(tokens * H, 2, plain.k)
        over = np.arange(T * h).reshape(T, h).T.copy()  # (feature, j)
        for head in range(H):
            v = self.all_of(2, head, weighted.k)
            for first in range(0, tokens, ROWS):
                count, at = min(ROWS, tokens - first), head * tokens + first
                row = e.get(range(at * T, (at + count) * T), plain.k)
                row = row.reshape(count, T, *row.shape[1:])
                y = c.ev.rows(c.ev.cut(row, weighted.k), v, over)
                for i in range(count):
                    sums.put((first + i) * d + head * h, y[i])
                    totals.put((first + i) * H + head, c.ev.total(row[i]))
            del v
        return dataclasses.replace(weighted, recipe=sums.read), dataclasses.replace(plain, recipe=totals.read)


def rows_of(ids: Sequence[int], rows: int, length: int) -> Iterator[tuple[int, int, int]]:
    """(head, first row, how many) of a run of whole rows of the grid (head, i, j), `rows` of them per head."""
    row, last = ids[0] // length, ids[-1] // length
    if ids[0] % length or (ids[-1] + 1) % length or len(ids) != (last + 1 - row) * length:
        raise ParameterError("scores are made in whole rows")
    while row <= last:
        count = min(last + 1 - row, rows - row % rows, ROWS)
        yield row // rows, row % rows, count
        row += count
