"""The circuit of quadratic attention for small batches: tokens share ciphertexts, slot = (token, sample).

A number of the class token is one ciphertext, the same in the slots of all tokens; a number of the P others is one
ciphertext, too, each token in its slots. So a block has 2·d ciphertexts for T·d numbers, and N/2 / P samples a batch.
LayerNorm, projection and feed-forward act within a token: as they are in `quadratic_circuit`, on two rows. Attention:

    scores     q_i · k_(i + r) for every turn r = a + b:  q turned by -b, k by a, products; switched to s
    e          as ever; e_ab stands b tokens further than its query
    sums       Σ_a e_ab · v turned by a, switched; turned by b, added up over b, switched
    class      as key: e · v without turns.  as query: e · v, added up over all tokens by turns of 1, 2, 4, …

q, k and v are too short for the noise of a switching key. v has a prime to spare, and is switched when it is longer by
that (`under_s`). q and k have none: they are turned under their keys (`turns`), and products are switched, which
have the scale of z squared.

P is a power of two; with fewer tokens the last places are empty. They hold a token without input, whose normalised
values, biases and offsets are multiplied by zero before attention: no weight falls on them (a mask of 2^18 a block).

The class token of the first block is a constant, and all it ever gets from others are whole sums: none of its slots
holds anything of a single token. What is read at a tap is added up over the tokens' slots once more, so that an owner
that encrypted other things there gets N / P numbers, and not N.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from cloister.arrays import F64
from cloister.models.polynomial import Shape
from cloister.mpc.crypto.owner_ckks.ring import primes_of
from cloister.mpc.crypto.owner_ckks.rotations import Turns, spread
from cloister.workflows.adapt_model.block_circuit import rows_of
from cloister.workflows.adapt_model.block_values import Cts, Values, token
from cloister.workflows.adapt_model.quadratic_circuit import QuadraticCircuit, SquaredHeads


class GridCircuit(QuadraticCircuit):
    """One pass of one batch."""

    tap_bits = 58  # its noise is that of a switching key, P times
    mask_bits = 18  # of a mask's scale: it is good to 2^-13

    @property
    def rows(self) -> int:
        """The class token's, and that of all others."""
        return 2

    @property
    def together(self) -> int:
        """P."""
        return grid_of(self.shape)

    @property
    def mask(self) -> F64 | None:
        """1 where there is a token, (P,); None if there is one everywhere."""
        there, P = self.shape.tokens - 1, self.together
        return None if there == P else (np.arange(P) < there).astype(np.float64)

    def plain(self, x: F64, scale: float, k: int) -> Cts:
        """Numbers (n, P) that no sample changes, as ciphertexts of one polynomial."""
        return self.ev.plain(spread(x[:, :, None], self.params.degree), scale, k)

    def embedded(self, inputs: Values) -> Values:
        s, e = self.shape, self.encoder
        scale = inputs.scale * self.w
        w = None if e is None else self.ev.weights(np.rint(e.embed * self.w).astype(np.int64))

        def make(row: int, k: int) -> Cts:
            ev, positions = self.ev, e.positions  # type: ignore[union-attr]
            if not row:
                return ev.add_constants(ev.zeros(s.width, 2, k), positions[0] * scale)
            places = positions[1 + np.arange(self.together) % (s.tokens - 1)].T
            return ev.combine([(1, ev.linear(w, inputs.get(range(s.inputs), k))), (1, self.plain(places, scale, k))])

        return self.by_token(2 * s.width, s.width, 2, scale, [inputs], make)

    def mask_scale(self, which: int) -> float:
        return 1.0 if self.mask is None or which else 2.0**self.mask_bits

    def masked(self, z: Values) -> Values:
        """Times zero where there is no token; the class token times one."""
        d, scale = self.shape.width, 2.0**self.mask_bits

        def make(row: int, k: int) -> Cts:
            ev, y = self.ev, z.get(token(row, d), k)
            if not row:
                return ev.combine([(round(scale), y)])
            return ev.products(y, ev.join([self.plain(self.mask[None], scale, k)] * d))  # type: ignore[index]

        return self.by_token(z.n, d, z.p, z.scale * scale, [z], make)

    def heads_of(self, z: Values, layer: int, rows: int) -> SquaredHeads:
        return GridHeads(self, z, layer, rows)

    async def tap(self, x: Values, which: int) -> Values:
        y = await super().tap(x, which)

        def compute(ids: Sequence[int], k: int) -> Cts:
            return added_up(self.ev, y.get(ids, k), Turns(self.together))

        return self.derive(y.n, 2, y.scale * self.together, [y], y.n, compute)


class GridHeads(SquaredHeads):
    """Queries, keys and values of one layer by head; sums in the order (head, class token or others, feature)."""

    polys = 2
    circuit: GridCircuit

    def __init__(self, circuit: GridCircuit, z: Values, layer: int, rows: int) -> None:
        super().__init__(circuit, z, layer, rows)
        self.turns = Turns(circuit.together)
        self.value_primes = self.primes[0]  # one more than their sums have: `under_s` needs it

    def parts(self, head: int) -> list[Cts]:
        """As ever; where places are empty, their keys and values have no bias."""
        out = super().parts(head)
        mask, h = self.circuit.mask, self.size
        if mask is None:
            return out
        for part, cts in enumerate(out):
            if part:
                bias = self.bias[part * self.width + head * h :][:h]  # type: ignore[index]
                less = self.circuit.plain(np.outer(bias, mask - 1), self.part_scale, cts.shape[2])
                cts[h:] = self.circuit.ev.combine([(1, cts[h:]), (1, less)])
        return out

    def weighted_by(self, scores: Cts, head: int, turns: Sequence[tuple[int, int]]) -> Cts:
        """(s + c)² of queries b tokens before a slot and keys a tokens behind it: c is zero where there is no key."""
        mask = self.circuit.mask
        if mask is None:
            return self.squared(scores, head)
        ev, k = self.circuit.ev, self.primes[1]
        behind = sorted({a for _, a in turns})
        offset = float(self.offset[head]) * np.stack([np.roll(mask, -a) for a in behind])  # type: ignore[index]
        plain = self.circuit.plain(offset, self.score_scale, k)
        short = ev.dropped(ev.switched(scores), k)
        shifted = ev.combine([(1, short), (1, plain[[behind.index(a) for _, a in turns]])])
        return ev.switched(ev.products(shifted, shifted))

    def compute(self, ids: Sequence[int], k: int) -> Cts:
        ev, h, parts = self.circuit.ev, self.size, []
        for head, _, _ in rows_of(ids, self.outs, h):
            queries, keys, values = self.parts(head)
            parts.append(self.of_class(head, queries[:h], keys, ev.cut(values, k)))
            if self.outs > 1:
                parts.append(self.of_others(head, queries[h:], keys, values, k))
        return ev.join(parts)

    # ---- the class token as query ------------------------------------------------------------------------------------

    def of_class(self, head: int, q: Cts, keys: Cts, values: Cts) -> Cts:
        ev, h, k = self.circuit.ev, self.size, values.shape[2]
        scores = ev.rows(q[None], keys, np.arange(2 * h).reshape(2, h))[0]  # of itself, of all others
        e = ev.join([self.squared(scores[:1], head), self.weighted_by(scores[1:], head, [(0, 0)])])
        total = added_up(ev, e[1:], self.turns)
        self.shelf.put(head * self.outs, ev.combine([(1, total), (1, e[:1])]))
        e = ev.cut(e, k)
        others = added_up(ev, ev.switched(self.weighed(e[1:], values[h:])), self.turns)
        return ev.combine([(1, others), (1, ev.switched(self.weighed(e[:1], values[:h])))])

    def weighed(self, e: Cts, v: Cts) -> Cts:
        """One e times every v, three polynomials."""
        return self.circuit.ev.rows(e[None], v, np.arange(len(v))[:, None])[0]

    # ---- all others --------------------------------------------------------------------------------------------------

    def of_others(self, head: int, q: Cts, keys: Cts, values: Cts, k: int) -> Cts:
        ev, h, t = self.circuit.ev, self.size, self.turns
        of_class = self.squared(ev.rows(q[None], keys[:h], np.arange(h)[None])[0], head)
        e = self.weights_by_turn(head, q, keys[h:])  # (b, a)
        totals = [ev.total(row) for row in e]
        totals[0] = ev.combine([(1, totals[0]), (1, of_class)])
        self.shelf.put(head * self.outs + 1, self.turned_back(totals))
        n, m = len(t.large), len(t.small)
        e = ev.cut(e.reshape(n * m, *e.shape[2:]), k).reshape(n, m, 2, k, -1)
        moved = ev.join([self.under_s(values[h:], a, k) for a in t.small])  # (a, feature)
        sums = ev.rows(e, moved, np.arange(m * h).reshape(m, h).T.copy())
        own = self.weighed(ev.cut(of_class, k), ev.cut(values[:h], k))
        sums[0] = ev.combine([(1, sums[0]), (1, own)])
        sums = ev.switched(sums.reshape(n * h, *sums.shape[2:]))
        return self.turned_back([sums[i * h : (i + 1) * h] for i in range(n)])

    def under_s(self, v: Cts, a: int, k: int) -> Cts:
        """Values turned by a, under s, at k primes, one less than it has.

        v is as short as the noise of a switching key. So it is multiplied by the last prime, switched, and divided by
        it again: that noise becomes shorter by 28 bits, and the scale stays.
        """
        ev = self.circuit.ev
        if not a:
            return ev.cut(v, k)
        lifted = ev.combine([(primes_of(self.circuit.params)[v.shape[2] - 1], ev.turned(v, self.turns.tokens, a))])
        return ev.cut(ev.dropped(to_s(ev, lifted, self.turns.key(a)), self.primes[1]), k)

    def weights_by_turn(self, head: int, q: Cts, keys: Cts) -> Cts:
        """Weights e for queries b tokens before a slot and keys a tokens behind it, (b, a, 2, k, N)."""
        ev, h, t = self.circuit.ev, self.size, self.turns
        n, m = len(t.large), len(t.small)
        moved = ev.join([ev.turned(q, t.tokens, -b) for b in t.large]).reshape(n, h, *q.shape[1:])
        out = ev.zeros(n * m, 2, q.shape[2]).reshape(n, m, *q.shape[1:])
        for i, a in enumerate(t.small):
            split = ev.join(list(apart(ev, ev.turned(keys, t.tokens, a))))
            y = ev.rows(moved, split, np.arange(2 * h).reshape(2, h))  # of either half of k: (b, half, 3, k, N)
            out[:, i] = self.scores_under_s(y, a)
        e = self.weighted_by(out.reshape(n * m, *q.shape[1:]), head, [(b, a) for b in t.large for a in t.small])
        return e.reshape(n, m, *e.shape[1:])

    def scores_under_s(self, y: Cts, a: int) -> Cts:
        """q·k for every b, q under σ_(-b)(s) and k under σ_a(s), under s; y holds the products with either half of k.

        What is under both comes under s·σ_(-b)(s) and σ_(-b)(s) by the key of a first. Without a turn of k it is there
        already, as it is without one of q by the key of a.
        """
        ev, t = self.circuit.ev, self.turns
        (c00, c10), (c01, c11) = ((y[:, half, 0], y[:, half, 1]) for half in range(2))
        back = [t.key(-b) for b in t.large[1:]]
        both = [t.key(-b, times_s=True) for b in t.large[1:]]
        if not a:
            first = ev.switched(polynomials(ev, c00[:1], added(ev, c10[:1], c01[:1]), c11[:1]))
            rest = polynomials(ev, c00[1:], c01[1:], c10[1:], c11[1:])
            return ev.join([first, ev.switched(rest, np.array([back, both]).T)] if back else [first])
        first = polynomials(ev, c00[:1], c10[:1], c01[:1], c11[:1])
        first = ev.switched(first, (t.key(a), t.key(a, times_s=True)))
        if not back:
            return first
        d = ev.switched(polynomials(ev, None, None, c11[1:]), (t.key(a),))  # c11·σ_a(s) = d_0 + d_1·s
        rest = polynomials(ev, c00[1:], None, added(ev, c10[1:], d[:, 0]), c01[1:], d[:, 1])
        return ev.join([first, ev.switched(rest, np.array([back, [t.key(a)] * len(back), both]).T)])

    def turned_back(self, by_turn: list[Cts]) -> Cts:
        """What stands b tokens too far, for every b, where it belongs; added up."""
        ev, t = self.circuit.ev, self.turns
        n, _, k, _ = by_turn[0].shape
        moved = [ev.turned(y, t.tokens, b) for b, y in zip(t.large[1:], by_turn[1:], strict=True)]
        out = ev.zeros(n, 2 + len(moved), k)
        out[:, :2] = by_turn[0]
        if moved:
            out[:, :1] = ev.combine([(1, x[:, :1]) for x in (by_turn[0], *moved)])
        for i, y in enumerate(moved):
            out[:, 2 + i] = y[:, 1]
        return ev.switched(out, tuple(t.key(b) for b in t.large[1:]))


# ---- ciphertexts, polynomial by polynomial ---------------------------------------------------------------------------


def polynomials(ev: Any, *given: Any) -> Cts:
    """Ciphertexts of these polynomials (n, k, N); None for zero."""
    n, k, _ = next(p.shape for p in given if p is not None)
    out = ev.zeros(n, len(given), k)
    for i, p in enumerate(given):
        if p is not None:
            out[:, i] = p
    return out


def added(ev: Any, x: Any, y: Any) -> Any:
    """Sums of polynomials (n, k, N)."""
    return ev.combine([(1, x[:, None]), (1, y[:, None])])[:, 0]


def to_s(ev: Any, x: Cts, key: int) -> Cts:
    """Ciphertexts of two polynomials under a turned key, under s."""
    split = ev.zeros(len(x), 3, x.shape[2])
    split[:, 0], split[:, 2] = x[:, 0], x[:, 1]
    return ev.switched(split, (key,))


def apart(ev: Any, v: Cts) -> tuple[Cts, Cts]:
    """Ciphertexts (n, 2, k, N) as (c_0, 0) and (c_1, 0): what a product has of either half."""
    out = ev.zeros(len(v), 2, v.shape[2]), ev.zeros(len(v), 2, v.shape[2])
    for half, into in enumerate(out):
        into[:, 0] = v[:, half]
    return out


def added_up(ev: Any, x: Cts, turns: Turns) -> Cts:
    """Ciphertexts of two polynomials, added up over the tokens: the sum in the slots of every one."""
    r = 1
    while r < turns.tokens:
        x = ev.combine([(1, x), (1, to_s(ev, ev.turned(x, turns.tokens, r), turns.key(r)))])
        r *= 2
    return x


def grid_of(shape: Shape) -> int:
    """P: as many places as there are tokens beside the class token, or a few more."""
    return 1 << (shape.tokens - 2).bit_length()


def fits_a_grid(shape: Shape, slots: int) -> bool:
    """Whether tokens can share ciphertexts: with quadratic attention; empty places only in pre-norm blocks."""
    P = grid_of(shape)
    return shape.attention == "quadratic" and 2 <= P <= slots and (shape.norm == "pre" or shape.tokens - 1 == P)
