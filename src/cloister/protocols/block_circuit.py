"""The circuit of an encrypted encoder, in stretches between refreshes. Local steps of `encrypted_inference`.

    embed       linear                                              1 refresh of T·d
    LayerNorm   centre, square and add; Newton; multiply            2 + 2·steps refreshes of T to T·d
    attention   linear, scores; exp; weighted sums; Goldschmidt     5 + degree/2 + steps
    projection  multiply, linear on three polynomials, residual     1
    feed        linear, square, linear on three polynomials         1, or 2 where the modulus is short

Run without an evaluator (`plan`), it only counts: the list of openings is the written depth budget, and both sides hold
it before anything is sent.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cloister.crypto import block
from cloister.crypto.block import Cts, Evaluator, Opening, Parameters, fits, opening
from cloister.errors import ParameterError
from cloister.models.polynomial import START, TAP_BOUND, Encoder, Shape
from cloister.wire import F64

TAP_BITS = 46  # the scale of what is read, above Δ
TAP_PRECISION = 10  # bits of what is read; the flooding covers all below

Refresh = Callable[[list[tuple[Opening, Any]]], Awaitable[list[Any]]]


@dataclass(frozen=True, slots=True)
class Values:
    """n numbers per sample under encryption: p polynomials, a scale; no data where we only count."""

    n: int
    p: int
    scale: float
    data: Any = None

    def at(self, which: Sequence[int]) -> Values:
        return Values(len(which), self.p, self.scale, None if self.data is None else self.data[list(which)])

    def scaled(self, factor: float) -> Values:
        """The same ciphertexts read as values / factor."""
        return dataclasses.replace(self, scale=self.scale * factor)


@dataclass(frozen=True, slots=True)
class Tap:
    """How the owner reads one tap."""

    block: int
    primes: int
    scale: float
    flood_bits: int


def join(parts: Sequence[Values]) -> Values:
    if len({(v.p, v.scale) for v in parts}) != 1:
        raise ParameterError("values of different scales cannot stand in one array")
    data = None if parts[0].data is None else np.concatenate([v.data for v in parts])
    return Values(sum(v.n for v in parts), parts[0].p, parts[0].scale, data)


class Circuit:
    """One pass of one batch. `refresh` does the round trips; `encoder` is None where we only count."""

    def __init__(
        self, shape: Shape, params: Parameters, refresh: Refresh, encoder: Encoder | None, ev: Evaluator | None
    ) -> None:
        self.shape, self.params, self._refresh, self.encoder, self.ev = shape, params, refresh, encoder, ev
        self.delta, self.w = params.scale, params.weight_scale

    # ---- operations ----------------------------------------------------------------------------------------------

    async def refresh(self, label: str, *parts: tuple[Values, float], want: float = 0.0) -> list[Values]:
        """One round trip for arrays, each with the bound of its values; back at scale Δ or `want`."""
        want = want or self.delta
        how = [opening(self.params, label, v.n, v.p, v.scale, bound, want) for v, bound in parts]
        back = await self._refresh([(h, v.data) for h, (v, _) in zip(how, parts, strict=True)])
        return [Values(v.n, 2, want, data) for (v, _), data in zip(parts, back, strict=True)]

    def linear(self, w: F64 | None, outs: int, x: Values, wscale: float = 0.0) -> Values:
        """Weights times values, where the weights are rounded to multiples of 1 / wscale."""
        wscale = wscale or self.w
        data = None
        if self.ev is not None and w is not None:
            data = self.ev.linear(np.rint(w * wscale).astype(np.int64), x.data)
        return Values(outs, x.p, x.scale * wscale, data)

    def add(self, parts: Sequence[tuple[int, Values]], constants: Any = None, scale: float = 0.0) -> Values:
        """Σ factor·x + constants, read at `scale` (that of the first part times its factor, unless given)."""
        first = parts[0][1]
        scale = scale or abs(parts[0][0]) * first.scale
        data = None
        if self.ev is not None:
            fixed = None if constants is None else np.asarray(constants) * scale
            data = self.ev.combine([(f, v.data) for f, v in parts], fixed)
        return Values(first.n, max(v.p for _, v in parts), scale, data)

    def times(self, x: Values, y: Values) -> Values:
        data = None if self.ev is None else self.ev.products(x.data, y.data)
        return Values(x.n, 3, x.scale * y.scale, data)

    def dots(self, x: Values, y: Values, count: int, pairs: Iterable[tuple[Sequence[int], Sequence[int]]]) -> Values:
        """Sums of products over the listed positions, which are not looked at where we only count."""
        data = None
        if self.ev is not None:
            data = np.stack([self.ev.dot(x.data[list(a)], y.data[list(b)]) for a, b in pairs])
        return Values(count, 3, x.scale * y.scale, data)

    def token(self, t: int, width: int = 0) -> range:
        width = width or self.shape.width
        return range(t * width, (t + 1) * width)

    # ---- parts of a block ----------------------------------------------------------------------------------------

    async def embed(self, inputs: Values) -> Values:
        """(T - 1)·inputs ciphertexts at Δ → T·d at Δ."""
        s, e, parts = self.shape, self.encoder, []
        for t in range(s.tokens):
            if t == 0:
                zero = None if self.ev is None else np.zeros((s.width, *inputs.data.shape[1:]), np.uint64)
                y = Values(s.width, 2, inputs.scale * self.w, zero)
            else:
                y = self.linear(None if e is None else e.embed, s.width, inputs.at(self.token(t - 1, s.inputs)))
            parts.append(self.add([(1, y)], None if e is None else e.positions[t]))
        return (await self.refresh("embed", (join(parts), s.x_bound)))[0]

    async def layer_norm(
        self, x: Values, layer: int, which: int, gain: F64 | None = None, shift: F64 | None = None
    ) -> Values:
        s, T, d, D = self.shape, self.shape.tokens, self.shape.width, self.delta
        V = s.variances[2 * layer + which]
        centre = d * np.eye(d) - 1.0
        c = join([self.linear(centre, d, x.at(self.token(t)), 1.0) for t in range(T)]).scaled(d)
        squares = self.dots(c, c, T, ((self.token(t), self.token(t)) for t in range(T)))
        (v,) = await self.refresh("variance", (squares.scaled(d * V), 2.0))
        a, b, of = START
        y = self.add([(b, v)], a / of, scale=of * D)
        for _ in range(s.root_steps):
            yy, vy = await self.refresh("root", (self.times(y, y), 64.0), (self.times(v, y), 8.0))
            factor = round(3 * D * D / y.scale)
            y = self.add([(-1, self.times(yy, vy)), (factor, y)], scale=2 * D * D)
            (y,) = await self.refresh("root", (y, 8.0))
        spread = [t for t in range(T) for _ in range(d)]
        z = self.times(c, y.at(spread)).scaled(math.sqrt(V))
        bound = math.sqrt(d)
        if s.norm == "post":
            ints = None if gain is None else np.rint(gain * self.w).astype(np.int64)
            columns = []
            for i in range(T * d):
                factor = 1 if ints is None else int(ints[i % d])
                columns.append(
                    self.add([(factor, z.at([i]))], None if shift is None else shift[i % d], z.scale * self.w)
                )
            z, bound = join(columns), s.x_bound
        return (await self.refresh("normed", (z, bound)))[0]

    async def attention(self, z: Values, layer: int) -> Values:
        """Weighted values softmax(q·k)·v, three polynomials, T·d of them."""
        s, T, d, D, h = self.shape, self.shape.tokens, self.shape.width, self.delta, self.shape.head_width
        b = None if self.encoder is None else self.encoder.blocks[layer]
        S = s.means[layer]
        y = join(
            [
                self.add(
                    [(1, self.linear(None if b is None else b.qkv, 3 * d, z.at(self.token(t))))],
                    None if b is None else b.qkv_bias,
                )
                for t in range(T)
            ]
        )
        if not fits(self.params, y.scale**2, 4.0):
            (y,) = await self.refresh("qkv", (y, s.u_bound))

        def of(part: int, t: int, head: int) -> range:
            start = t * 3 * d + part * d + head * h
            return range(start, start + h)

        grid = [(head, i, j) for head in range(s.heads) for i in range(T) for j in range(T)]
        scores = self.dots(y, y, len(grid), ((of(0, i, a), of(1, j, a)) for a, i, j in grid))
        (e,) = await self.refresh("scores", (scores, 4.0))
        e = await self.exp(e)
        at = {key: n for n, key in enumerate(grid)}
        sums = (
            ([at[a, i, j] for j in range(T)], [of(2, j, a)[f] for j in range(T)])
            for i in range(T)
            for a in range(s.heads)
            for f in range(h)
        )
        o = self.dots(e, y, T * d, sums).scaled(T * S)
        if self.ev is None:
            den = Values(T * s.heads, 2, e.scale)
        else:
            rows = ([at[a, i, j] for j in range(T)] for i in range(T) for a in range(s.heads))
            den = join([self.add([(1, e.at([n])) for n in row]) for row in rows])
        r = self.add([(-1, den)], 1.0, scale=D * T * S)
        y_inv = self.add([(1, r)], 1.0)
        o, r = await self.refresh("division", (o, 2 * s.u_bound), (self.times(r, r), 1.0))
        for step in range(s.steps):
            grown = self.times(self.add([(1, r)], 1.0), y_inv)
            if step == s.steps - 1:
                (y_inv,) = await self.refresh("division", (grown, 32.0))
            else:
                r, y_inv = await self.refresh("division", (self.times(r, r), 1.0), (grown, 32.0))
        per_head = [t * s.heads + f // h for t in range(T) for f in range(d)]
        return self.times(o, y_inv.at(per_head))

    async def exp(self, s1: Values) -> Values:
        """Taylor: A(s) + s^k·B(s) with k = degree / 2, refreshed."""
        D, k = self.delta, self.shape.exp_degree // 2
        grain = 2.0 ** next((g for g in (20, 16) if fits(self.params, D * D * 2.0**g, 64.0)), 12)  # of coefficients
        powers = [s1]
        for i in range(1, k):
            (s,) = await self.refresh("exp", (self.times(s1, powers[-1]), 4.0 ** (i + 1)))
            powers.append(s)
        inner = [1 / math.factorial(k + i) for i in range(k + 1)]  # B = Σ inner_i s^i
        B = self.add([(round(inner[i] * grain), powers[i - 1]) for i in range(1, k + 1)], inner[0], scale=D * grain)
        outer = [(round(D * grain / math.factorial(i)), powers[i - 1]) for i in range(1, k)]
        product = self.times(B, powers[k - 1])
        whole = self.add([(1, product), *outer], 1.0)
        return (await self.refresh("exp", (whole, 64.0)))[0]

    async def close(self, name: str, product: Values, residual: Values, layer: int, wide: int) -> Values:
        """Linear layer on three polynomials, plus the residual: one refresh."""
        s, T, d = self.shape, self.shape.tokens, self.shape.width
        b = None if self.encoder is None else self.encoder.blocks[layer]
        w, bias = (None, None) if b is None else (getattr(b, name), getattr(b, f"{name}_bias"))
        parts = []
        for t in range(T):
            y = self.linear(w, d, product.at(self.token(t, wide)))
            keep = residual.at(self.token(t))
            parts.append(self.add([(1, y), (round(y.scale / keep.scale), keep)], bias))
        return (await self.refresh(name, (join(parts), s.x_bound)))[0]

    async def feed(self, z: Values, residual: Values, layer: int) -> Values:
        s, T, f = self.shape, self.shape.tokens, self.shape.hidden
        b = None if self.encoder is None else self.encoder.blocks[layer]
        w, bias = (None, None) if b is None else (b.up, b.up_bias)
        u = join([self.add([(1, self.linear(w, f, z.at(self.token(t))))], bias) for t in range(T)])
        if not fits(self.params, u.scale**2 * self.w, s.x_bound):
            (u,) = await self.refresh("units", (u, s.u_bound))
        return await self.close("down", self.times(u, u), residual, layer, f)

    async def block(self, x: Values, layer: int) -> Values:
        d = self.shape.width
        b = None if self.encoder is None else self.encoder.blocks[layer]
        if self.shape.norm == "pre":
            x = await self.close("out", await self.attention(await self.layer_norm(x, layer, 0), layer), x, layer, d)
            return await self.feed(await self.layer_norm(x, layer, 1), x, layer)
        x = await self.close("out", await self.attention(x, layer), x, layer, d)
        x = await self.layer_norm(x, layer, 0, *((None, None) if b is None else (b.gain1, b.shift1)))
        x = await self.feed(x, x, layer)
        return await self.layer_norm(x, layer, 1, *((None, None) if b is None else (b.gain2, b.shift2)))

    async def tap(self, x: Values, which: int) -> Values:
        """The class token through the projection, ready to be flooded and read."""
        s, e = self.shape, self.encoder
        (cls,) = await self.refresh("tap", (x.at(self.token(0)), s.x_bound), want=self.delta * 2.0**TAP_BITS)
        y = self.linear(None if e is None else e.projections[which], s.rank, cls)
        return self.add([(1, y)], None if e is None else -e.centres[which])


# ---- the plan -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Plan:
    """All round trips of one batch: per round the openings; after some, a tap."""

    rounds: tuple[tuple[Opening, ...], ...]
    taps: tuple[tuple[int, Tap], ...]  # (rounds done before it, how it is read)


def tap_of(shape: Shape, params: Parameters, number: int) -> Tap:
    scale = math.ldexp(params.scale * params.weight_scale, TAP_BITS)
    noise = math.log2(6 * 3.2 * TAP_BOUND * params.weight_scale * math.sqrt(shape.width))
    flood = math.floor(math.log2(scale)) - TAP_PRECISION - params.degree.bit_length() // 2
    if flood < noise + block.FLOOD_BITS:
        raise ParameterError("a tap cannot be flooded by 40 bits at this scale; use a smaller width or weight scale")
    need = math.ceil(math.log2(scale * TAP_BOUND)) + 1
    primes = next((k for k in range(1, params.count + 1) if block.room(params, k) >= need), 0)
    if not primes:
        raise ParameterError("a tap does not fit into the modulus; use more primes")
    return Tap(shape.taps[number], primes, scale, flood)


@functools.lru_cache(maxsize=32)
def plan(shape: Shape, params: Parameters) -> Plan:
    rounds: list[tuple[Opening, ...]] = []
    taps: list[tuple[int, Tap]] = []

    async def count(parts: list[tuple[Opening, Any]]) -> list[Any]:
        rounds.append(tuple(h for h, _ in parts))
        return [None] * len(parts)

    async def whole() -> None:
        c = Circuit(shape, params, count, None, None)
        x = await c.embed(Values((shape.tokens - 1) * shape.inputs, 2, params.scale))
        for layer in range(shape.depth):
            x = await c.block(x, layer)
            if layer + 1 in shape.taps:
                number = shape.taps.index(layer + 1)
                await c.tap(x, number)
                taps.append((len(rounds), tap_of(shape, params, number)))

    coroutine = whole()
    try:
        coroutine.send(None)
    except StopIteration:
        return Plan(tuple(rounds), tuple(taps))
    raise RuntimeError("counting waits for nobody")


def used(shape: Shape, params: Parameters) -> dict[str, Any]:
    """The depth budget in figures: openings, ciphertexts, and the least hiding."""
    every = [h for r in plan(shape, params).rounds for h in r]
    return {
        "rounds": len(plan(shape, params).rounds),
        "ciphertexts": sum(h.count for h in every),
        "hiding": min(h.hiding for h in every),
        "largest_message_bits": max(h.message_bits for h in every),
        "modulus_bits": params.count * params.bits,
    }


__all__ = ["Circuit", "Cts", "Plan", "Tap", "Values", "join", "plan", "tap_of", "used"]
