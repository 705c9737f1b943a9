"""Numbers under encryption as recipes: the arithmetic of an encrypted encoder between two refreshes.

Nothing is computed before a refresh asks for it, some ciphertexts at a time and at the primes that this opening needs;
only what comes back from a refresh is kept (on a `Shelf`). So a block may be larger than memory. Without an evaluator
the same calls only count: which openings there are, and how many primes each has to bring back.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from cloister.arrays import F64
from cloister.errors import ParameterError
from cloister.mpc.crypto.owner_ckks.ciphertext_store import Pool
from cloister.mpc.crypto.owner_ckks.packed_refresh import dropped
from cloister.mpc.crypto.owner_ckks.scheme import Opening, Parameters, opening

AT_ONCE = 32  # ciphertexts that a refresh makes at once, at least

Cts: TypeAlias = Any  # `scheme.Cts`, or their like on a GPU
Recipe = Callable[[Sequence[int], int], Cts]  # numbers of ciphertexts, primes
Refresh = Callable[[list[tuple[Opening, Any]]], Awaitable[list[Any]]]  # openings with their recipes → recipes


@dataclass(frozen=True, slots=True, eq=False)
class Values:
    """n numbers per sample under encryption: p polynomials, a scale; no recipe where we only count."""

    n: int
    p: int
    scale: float
    recipe: Recipe | None = None
    k: int = 0  # primes there are; where we only count, 0 if as many as are asked for
    group: int = 1  # how many are best made together
    origins: frozenset[int] = frozenset()  # the refreshes they come from
    shelf: Any = None  # where they lie, if they were computed already

    def scaled(self, factor: float) -> Values:
        """The same ciphertexts read as values / factor."""
        return dataclasses.replace(self, scale=self.scale * factor)

    def get(self, which: Sequence[int], k: int) -> Cts:
        if self.recipe is None:
            raise ParameterError("there is nothing to compute where we only count")
        return self.recipe(which, k)


def token(t: int, width: int) -> range:
    """Where the values of token t stand."""
    return range(t * width, (t + 1) * width)


class Recipes:
    """What is computed between refreshes. `refresh` does the round trips; without an evaluator we only count."""

    def __init__(
        self,
        params: Parameters,
        refresh: Refresh,
        ev: Any = None,
        openings: Sequence[Opening] = (),
        pool: Any = None,
    ) -> None:
        self.params, self._refresh = params, refresh
        self._ev, self.pool = ev, pool or Pool()
        self.delta, self.w = params.scale, params.weight_scale
        self.need: list[int] = []  # counting: primes that each refresh must bring back
        self.follow(openings)

    def follow(self, openings: Sequence[Opening]) -> None:
        """The openings from here on, as planned."""
        self._planned: Iterator[Opening] = iter(openings)

    @property
    def counting(self) -> bool:
        return self._ev is None

    @property
    def ev(self) -> Any:  # scheme.Evaluator, or its like on a GPU
        if self._ev is None:
            raise ParameterError("there is nothing to compute where we only count")
        return self._ev

    async def refresh(
        self, label: str, *parts: tuple[Values, float], want: float | tuple[float, ...] = 0.0
    ) -> list[Values]:
        """One round trip for arrays, each with the bound of its values; back at scale Δ or `want`, one or several."""
        wants = want if isinstance(want, tuple) else (want or self.delta,) * len(parts)
        if self.counting:
            how = []
            for (v, bound), scale in zip(parts, wants, strict=True):
                h = opening(self.params, label, v.n, v.p, v.scale, bound, scale, v.group * max(1, AT_ONCE // v.group))
                self.require(v, h.primes)
                self.need.append(h.back)
                how.append(h)
        else:
            how = [next(self._planned) for _ in parts]
            if [(h.label, h.count, h.polys) for h in how] != [(label, v.n, v.p) for v, _ in parts]:
                raise ParameterError(f"'{label}' was not planned here")
        back = await self._refresh([(h, v.recipe) for h, (v, _) in zip(how, parts, strict=True)])
        first = len(self.need) - len(how)
        return [
            Values(h.count, 2, scale, None, origins=frozenset([first + i]))
            if self.counting
            else Values(h.count, 2, scale, recipe, h.back)
            for i, (h, recipe, scale) in enumerate(zip(how, back, wants, strict=True))
        ]

    def require(self, v: Values, primes: int) -> None:
        """Where we count: v is needed at so many primes."""
        if v.k and primes > v.k:
            raise ParameterError(f"values that have {v.k} primes would need {primes}; use smaller scales")
        for at in v.origins:
            self.need[at] = max(self.need[at], primes)

    def derive(
        self, n: int, p: int, scale: float, parents: Sequence[Values], group: int, recipe: Recipe | None
    ) -> Values:
        """Values that a recipe makes of others."""
        origins = frozenset[int]().union(*(v.origins for v in parents))
        if self.counting:
            return Values(n, p, scale, None, min((v.k for v in parents if v.k), default=0), group, origins)
        return Values(n, p, scale, recipe, min(v.k for v in parents), group, origins)

    def shelf(self, n: int, p: int, k: int) -> Any:
        return self.pool.shelf(n, p, k, self.params.degree)

    def pick(self, x: Values, which: Sequence[int]) -> Values:
        def compute(ids: Sequence[int], k: int) -> Cts:
            return x.get([which[i] for i in ids], k)

        return self.derive(len(which), x.p, x.scale, [x], 1, compute)

    def add(self, parts: Sequence[tuple[int, Values]], constants: Any = None, scale: float = 0.0) -> Values:
        """Σ factor·x + constants, read at `scale` (that of the first part times its factor, unless given)."""
        first = parts[0][1]
        scale = scale or abs(parts[0][0]) * first.scale

        def compute(ids: Sequence[int], k: int) -> Cts:
            fixed = None if constants is None else constants * scale
            return self.ev.combine([(f, v.get(ids, k)) for f, v in parts], fixed)

        values = [v for _, v in parts]
        return self.derive(first.n, max(v.p for v in values), scale, values, max(v.group for v in values), compute)

    def times(self, x: Values, y: Values) -> Values:
        def compute(ids: Sequence[int], k: int) -> Cts:
            return self.ev.products(x.get(ids, k), y.get(ids, k))

        return self.derive(x.n, x.p + y.p - 1, x.scale * y.scale, [x, y], max(x.group, y.group), compute)

    def square(self, x: Values) -> Values:
        def compute(ids: Sequence[int], k: int) -> Cts:
            got = x.get(ids, k)
            return self.ev.products(got, got)

        return self.derive(x.n, 2 * x.p - 1, x.scale**2, [x], x.group, compute)

    def switched(self, x: Values) -> Values:
        """The same of two polynomials."""

        def compute(ids: Sequence[int], k: int) -> Cts:
            return self.ev.switched(x.get(ids, k))

        return self.derive(x.n, 2, x.scale, [x], x.group, compute)

    def shortened(self, x: Values, k: int, keep: int) -> Values:
        """Of two polynomials, and divided by the primes from `keep` on, of the k at which x is computed."""
        if self.counting:
            self.require(x, k)

        def compute(ids: Sequence[int], most: int) -> Cts:
            return self.ev.cut(self.ev.dropped(self.ev.switched(x.get(ids, k)), keep), most)

        scale = x.scale / dropped(self.params, k, keep)
        return Values(x.n, 2, scale, None if self.counting else compute, keep, x.group)

    def by_token(
        self, n: int, outs: int, p: int, scale: float, parents: Sequence[Values], make: Callable[[int, int], Cts]
    ) -> Values:
        """`outs` values for each token, made together by make(token, primes)."""

        def compute(ids: Sequence[int], k: int) -> Cts:
            parts, at = [], np.asarray(ids)
            for t in np.unique(at // outs):  # sorted, as the ids are
                cts, mine = make(int(t), k), at[at // outs == t] % outs
                parts.append(cts if len(mine) == outs else cts[mine])
            return self.ev.join(parts)

        return self.derive(n, p, scale, parents, outs, compute)

    def linear(self, w: F64 | None, bias: F64 | None, outs: int, x: Values, wide: int) -> Values:
        """The weights times the `wide` values of each token, plus a bias."""
        ints = None if w is None else self.ev.weights(np.rint(w * self.w).astype(np.int64))
        scale = x.scale * self.w

        def make(t: int, k: int) -> Cts:
            y = self.ev.linear(ints, x.get(token(t, wide), k))
            return y if bias is None else self.ev.add_constants(y, bias * scale)

        return self.by_token(x.n // wide * outs, outs, x.p, scale, [x], make)
