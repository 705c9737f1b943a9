"""The circuit of quadratic attention for small batches: tokens share ciphertexts, slot = (token, sample).

A number of the class token is one ciphertext, the same in the slots of all tokens; a number of the P others is one
ciphertext, too, each token in its slots. So a block has 2·d ciphertexts for T·d numbers, and N/2 / P samples a batch.
LayerNorm, projection and feed-forward act within a token: as they are in `quadratic_circuit`, on two rows. Attention:

    scores     q_i · k_(i + r) for every turn r = a + b:  q turned by -b, k by a, products; switched to s
    e          as ever; e_ab stands b tokens further than its query
    sums       Σ_a e_ab · v turned by a, switched; turned by b, added up over b, switched
    class      as key: e · v without turns.  as query: e · v, added up over all tokens by turns of 1, 2, 4, …

q, k and v are too short for the noise of a switching key. They are turned under their keys (`turns`), and what is
switched are products: scores have the scale of z squared, weighted sums that of its fifth power.

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

    def weighted_by(self, scores: Cts, head: int, turn: int) -> Cts:
        """(s + c)² of keys that stand so many tokens further: c is zero where there is none."""
        mask = self.circuit.mask
        if mask is None:
            return self.squared(scores, head)
        ev, k = self.circuit.ev, self.primes[1]
        offset = float(self.offset[head]) * np.roll(mask, -turn)[None]  # type: ignore[index]
        plain = self.circuit.plain(offset, self.score_scale, k)
        short = ev.dropped(ev.switched(scores), k)
        shifted = ev.combine([(1, short), (1, ev.join([plain] * len(short)))])
        return ev.switched(ev.products(shifted, shifted))

    def compute(self, ids: Sequence[int], k: int) -> Cts:
        ev, h, parts = self.circuit.ev, self.size, []
        for head, _, _ in rows_of(ids, self.outs, h):
            queries, keys, values = self.parts(head)
            values = ev.cut(values, k)
            parts.append(self.of_class(head, queries[:h], keys, values))
            if self.outs > 1:
                parts.append(self.of_others(head, queries[h:], keys, values))
        return ev.join(parts)

    # ---- the class token as query ------------------------------------------------------------------------------------

    def of_class(self, head: int, q: Cts, keys: Cts, values: Cts) -> Cts:
        ev, h, k = self.circuit.ev, self.size, values.shape[2]
        scores = ev.rows(q[None], keys, np.arange(2 * h).reshape(2, h))[0]  # of itself, of all others
        e = ev.join([self.squared(scores[:1], head), self.weighted_by(scores[1:], head, 0)])
        total = added_up(ev, e[1:], self.turns)
        self.shelf.put(head * self.outs, ev.combine([(1, total), (1, e[:1])]))
        e = ev.cut(e, k)
        others = added_up(ev, ev.switched(self.weighed(e[1:], values[h:])), self.turns)
        return ev.combine([(1, others), (1, ev.switched(self.weighed(e[:1], values[:h])))])

    def weighed(self, e: Cts, v: Cts) -> Cts:
        """One e times every v, three polynomials."""
        return self.circuit.ev.rows(e[None], v, np.arange(len(v))[:, None])[0]

    # ---- all others --------------------------------------------------------------------------------------------------

    def of_others(self, head: int, q: Cts, keys: Cts, values: Cts) -> Cts:
        ev, h, k, t = self.circuit.ev, self.size, values.shape[2], self.turns
        of_class = self.squared(ev.rows(q[None], keys[:h], np.arange(h)[None])[0], head)
        e = self.weights_by_turn(head, q, keys[h:])  # (b, a)
        totals = [ev.total(row) for row in e]
        totals[0] = ev.combine([(1, totals[0]), (1, of_class)])
        self.shelf.put(head * self.outs + 1, self.turned_back(totals))
        e, of_class = [ev.cut(row, k) for row in e], ev.cut(of_class, k)
        own = self.weighed(of_class, values[:h])
        turned = [apart(ev, ev.turned(values[h:], t.tokens, a)) for a in t.small]
        first = ev.join([x[0] for x in turned])
        return self.turned_back(
            [self.added_turns(row, first, [x[1] for x in turned], own if not b else None) for b, row in enumerate(e)]
        )

    def weights_by_turn(self, head: int, q: Cts, keys: Cts) -> list[Cts]:
        """Weights e for queries b tokens before a slot and keys a tokens behind it: for every b, all a."""
        ev, h, t, found = self.circuit.ev, self.size, self.turns, []
        moved = [ev.turned(q, t.tokens, -b) for b in t.large]
        moved = ev.join(moved).reshape(len(moved), h, *q.shape[1:])
        for a in t.small:
            split = ev.join(list(apart(ev, ev.turned(keys, t.tokens, a))))
            y = ev.rows(moved, split, np.arange(2 * h).reshape(2, h))
            found.append(self.weighted_by(ev.join([self.to_s(y[i], a, b) for i, b in enumerate(t.large)]), head, a))
        return [ev.join([by_b[i : i + 1] for by_b in found]) for i in range(len(t.large))]

    def to_s(self, y: Cts, a: int, b: int) -> Cts:
        """q·k, q under σ_(-b)(s) and k under σ_a(s), under s; y holds the products with either half of k."""
        ev, t = self.circuit.ev, self.turns
        (c00, c10), (c01, c11) = (y[half, :2] for half in range(2))
        if not a and not b:
            return ev.switched(polynomials(ev, c00, added(ev, c10, c01), c11))
        if not b:
            return ev.switched(polynomials(ev, c00, c10, c01, c11), (t.key(a), t.key(a, times_s=True)))
        back, both = t.key(-b), t.key(-b, times_s=True)
        if not a:
            return ev.switched(polynomials(ev, c00, c01, c10, c11), (back, both))
        (d,) = ev.switched(polynomials(ev, None, None, c11), (t.key(a),))  # c11·σ_a(s) = d_0 + d_1·s
        whole = polynomials(ev, c00, None, added(ev, c10, d[0]), c01, d[1])
        return ev.switched(whole, (back, t.key(a), both))

    def added_turns(self, e: Cts, first: Cts, seconds: list[Cts], own: Cts | None) -> Cts:
        """Σ_a e_a · v turned by a, under s: `first` and `seconds` hold the halves of v, `own` what needs no turn."""
        ev, h, t, (n, _, k, _) = self.circuit.ev, self.size, self.turns, e.shape
        out = ev.zeros(h, 1 + 2 * n, k)
        out[:, :2] = ev.rows(e[None], first, np.arange(n * h).reshape(n, h).T.copy())[0][:, :2]
        by = [0]
        for a in t.small:
            y = self.weighed(e[a : a + 1], seconds[a])[:, :2]
            if a:
                out[:, 1 + 2 * a : 3 + 2 * a] = y
                by += [t.key(a), t.key(a, times_s=True)]
            else:  # under s and s², like the class token's
                two = ev.zeros(h, 3, k)
                two[:, 1:] = y
                parts = [(1, two), (1, out[:, :2])]
                out[:, :3] = ev.combine(parts if own is None else [*parts, (1, own)])
        return ev.switched(out, tuple(by))

    def turned_back(self, by_turn: list[Cts]) -> Cts:
        """What stands b tokens too far, for every b, where it belongs; added up."""
        ev, t = self.circuit.ev, self.turns
        n, _, k, _ = by_turn[0].shape
        moved = [ev.turned(y, t.tokens, b) for b, y in zip(t.large[1:], by_turn[1:], strict=True)]
        out = ev.zeros(n, 2 + len(moved), k)
        out[:, :2] = by_turn[0]
        for i, y in enumerate(moved):
            out[:, :1] = ev.combine([(1, out[:, :1]), (1, y[:, :1])])
            out[:, 2 + i] = y[:, 1]
        return ev.switched(out, tuple(t.key(b) for b in t.large[1:]))


# ---- ciphertexts, polynomial by polynomial ---------------------------------------------------------------------------


def polynomials(ev: Any, *given: Any) -> Cts:
    """One ciphertext of these polynomials (k, N); None for zero."""
    k = next(p.shape[0] for p in given if p is not None)
    out = ev.zeros(1, len(given), k)
    for i, p in enumerate(given):
        if p is not None:
            out[0, i] = p
    return out


def added(ev: Any, x: Any, y: Any) -> Any:
    """The sum of two polynomials (k, N)."""
    return ev.combine([(1, x[None, None]), (1, y[None, None])])[0, 0]


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
        moved = ev.turned(x, turns.tokens, r)
        split = ev.zeros(len(x), 3, x.shape[2])
        split[:, 0], split[:, 2] = moved[:, 0], moved[:, 1]
        x = ev.combine([(1, x), (1, ev.switched(split, (turns.key(r),)))])
        r *= 2
    return x


def grid_of(shape: Shape) -> int:
    """P: as many places as there are tokens beside the class token, or a few more."""
    return 1 << (shape.tokens - 2).bit_length()


def fits_a_grid(shape: Shape, slots: int) -> bool:
    """Whether tokens can share ciphertexts: with quadratic attention; empty places only in pre-norm blocks."""
    P = grid_of(shape)
    return shape.attention == "quadratic" and 2 <= P <= slots and (shape.norm == "pre" or shape.tokens - 1 == P)
