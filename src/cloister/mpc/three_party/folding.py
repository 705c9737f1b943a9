"""Folding: one inner product over GF(2^64) for all gates, carries and hops. Lines V9 to V11 of `verified`.

See `verification` for the conversation, `crypto.share_proofs` for the equations.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NoReturn

import numpy as np

from cloister.arrays import U8, U32, U64
from cloister.errors import ProtocolAbort
from cloister.mpc.crypto import gf64
from cloister.mpc.crypto import share_proofs as local
from cloister.mpc.crypto.prg import Prg
from cloister.mpc.crypto.share_proofs import FOLD, Equations, Weights, digest, raw, words
from cloister.mpc.net.wire import message
from cloister.mpc.three_party.sealed_links import NAME, Links

LAST = 1 << 11  # elements that A sends masked
HASH = 32
PROVER, LEFT, RIGHT = "P", "A", "B"  # the part that this party plays for a prover


@message("V9", protocol=NAME)
class Coefficients:
    data: U8


@message("V10", protocol=NAME)
class Point:
    data: U8


@message("V11", protocol=NAME)
class Folded:
    data: U8


def reject(line: str, what: str) -> NoReturn:
    raise ProtocolAbort(NAME, line, "mismatch", f"{what}; one of the three computing parties departs from the protocol")


@dataclass(frozen=True, slots=True)
class Hop:
    """One hop of a shuffle, by p and q = p + 1, who know the permutation, to the third, t."""

    p: int
    shape: tuple[int, int]
    perm: U32 | None  # at p and q
    x_p: U64 | None  # at p and t
    x_t: U64 | None  # at q and t
    known_left: U64 | None  # what A adds up: y_p at t, ρ' at p
    known_right: U64 | None  # what B adds up: y_t at t, ρ at q

    def provers(self) -> tuple[int, int]:
        return self.p, (self.p + 1) % 3


@dataclass(slots=True)
class Statement:
    """What is to be proved over GF(2^64), as this party sees it for the three provers."""

    prover_of: dict[str, int]  # whose proof, by this party's part in it
    equations: dict[str, Equations] = field(default_factory=dict)
    hops: list[Hop] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.equations = {part: Equations() for part in self.prover_of}

    def length(self, part: str) -> int:
        """Elements of the vectors of that proof."""
        hops = [hop for hop in self.hops if self.prover_of[part] in hop.provers()]
        return 64 * self.equations[part].columns + sum(hop.shape[0] * hop.shape[1] for hop in hops)

    @property
    def longest(self) -> int:
        return max(self.length(part) for part in self.prover_of)


class Folding:
    """The vectors of three proofs while they are folded: A's side at P and A, B's side at P and B."""

    def __init__(
        self,
        links: Links,
        statement: Statement,
        challenge: dict[str, Prg],
        masks: dict[str, Prg],
        coins: dict[str, Prg],
    ) -> None:
        self.links, self.statement, self.challenge = links, statement, challenge
        self._masks, self._coins = masks, coins  # streams of P and A, and of A and B
        sizes = {part: local.folded_length(statement.length(part)) * FOLD for part in statement.prover_of}
        self.left = {part: np.zeros(sizes[part], np.uint64) for part in (PROVER, LEFT)}
        self.right = {part: np.zeros(sizes[part], np.uint64) for part in (PROVER, RIGHT)}
        self.claim = {LEFT: np.uint64(0), RIGHT: np.uint64(0)}
        self.offsets: dict[str, list[np.uint64]] = {LEFT: [], RIGHT: []}  # checked coefficient minus claim

    async def prove(self, residue_left: U8, residue_right: U8) -> None:
        """V9 to V11, with the hashes of the residues of products."""
        statement = self.statement
        gates = any(equations.columns for equations in statement.equations.values())
        last = not statement.hops and statement.longest <= LAST  # then the bits are folded once, under the mask
        if gates:
            await self._fold_bits(masked=last)
        self._place_hops()
        while (gates or statement.hops) and not last:
            last = local.folded_length(max(x.size for x in (*self.left.values(), *self.right.values()))) <= LAST
            await self._fold_field(masked=last)
        await self._finish(residue_left, residue_right)

    async def _fold_bits(self, *, masked: bool) -> None:
        """All equations of bits, 64 : 1."""
        equations = self.statement.equations
        weights = {part: Weights.draw(self.challenge[part], equations[part].columns) for part in equations}
        for part in (LEFT, RIGHT):
            self.claim[part] = local.claim(equations[part], weights[part])
        gram = local.gram(equations[PROVER], weights[PROVER])
        row_weights = weights[PROVER].rows
        masks = {part: self._masks[part].uint64(x.size) for part, x in self.left.items()} if masked else {}
        if masked:
            gram = np.vstack([gram, local.mask_products(equations[PROVER], masks[PROVER])])
            row_weights = np.append(row_weights, np.uint64(1))
        point = await self._point(gf64.product_coefficients(gram, row_weights), 64)
        for part, out in self.left.items():
            local.fold_left(equations[part], weights[part], point[part], out[: 64 * equations[part].columns])
        for part, out in self.right.items():
            first = 2 if part == PROVER else 0
            local.fold_right(equations[part], point[part], out[: 64 * equations[part].columns], first=first)
        self._add_masks(masks, point, 64)

    def _add_masks(self, masks: dict[str, U64], point: dict[str, np.uint64], height: int) -> None:
        for part, mask in masks.items():
            top = gf64.powers(point[part], height + 1)[-1:]
            self.left[part] ^= gf64.fold_field(np.ascontiguousarray(mask[None]), top)

    def _place_hops(self) -> None:
        """Words of hops as field elements behind the bits; at one of A and B the weights, moved as π moves words."""
        statement = self.statement
        at = {part: 64 * equations.columns for part, equations in statement.equations.items()}
        for hop in statement.hops:
            for part, prover in statement.prover_of.items():
                if prover in hop.provers():
                    cut = slice(at[part], at[part] + hop.shape[0] * hop.shape[1])
                    at[part] = cut.stop
                    self._place_hop(hop, part, cut, first=prover == hop.p)

    def _place_hop(self, hop: Hop, part: str, cut: slice, *, first: bool) -> None:
        """First: p proves its word to t, which is A. Else q proves its word to t, which is B."""
        alpha, beta = (self.challenge[part].uint64(size) for size in hop.shape)
        data, places = (self.left, self.right) if first else (self.right, self.left)
        moved = hop.x_p if first else hop.x_t
        if part in places and hop.perm is not None:
            gf64.scatter_weights(hop.perm, alpha, beta, places[part][cut].reshape(hop.shape))
        if part in data and moved is not None:
            data[part][cut] = moved.reshape(-1)
        known = {LEFT: hop.known_left, RIGHT: hop.known_right}.get(part)
        if known is not None:
            self.claim[part] ^= gf64.weigh_rows(known, alpha, beta)

    async def _fold_field(self, *, masked: bool) -> None:
        """Field elements, 16 : 1."""
        left = {part: local.fold_rows(x) for part, x in self.left.items()}
        right = {part: local.fold_rows(x) for part, x in self.right.items()}
        gram = gf64.gram_field(left[PROVER], right[PROVER])
        masks: dict[str, U64] = {}
        if masked:
            masks = {part: self._masks[part].uint64(x.shape[1]) for part, x in left.items()}
            extra = [gf64.dot(masks[PROVER], row) for row in right[PROVER]]
            gram = np.vstack([gram, np.array(extra, np.uint64)])
        coefficients = gf64.product_coefficients(gram, np.ones(len(gram), np.uint64))
        point = await self._point(coefficients, FOLD)
        for part, rows in left.items():
            self.left[part] = gf64.fold_field(rows, gf64.powers(point[part], FOLD))
        for part, rows in right.items():
            self.right[part] = gf64.fold_field(rows, gf64.powers(point[part], FOLD)[::-1].copy())
        self._add_masks(masks, point, FOLD)

    async def _point(self, coefficients: U64, rows: int) -> dict[str, np.uint64]:
        """V9, V10: hand over the polynomial in two shares, keep its claim, and go on with its value at a point."""
        size = coefficients.size
        mask = self._masks[PROVER].uint64(size)
        from_prev, _ = await self.links.exchange(Coefficients, None, raw(coefficients ^ mask), 8 * size, None)  # V9
        shares = {LEFT: self._masks[LEFT].uint64(size), RIGHT: words(from_prev)}
        points = {part: _nonzero(self._coins[part]) for part in (LEFT, RIGHT)}
        _, from_next = await self.links.exchange(Point, raw(np.array([points[RIGHT]])), None, None, 8)  # V10
        for part, share in shares.items():
            self.offsets[part].append(share[rows - 1] ^ self.claim[part])
            self.claim[part] = gf64.dot(share, gf64.powers(points[part], size))
        return points | {PROVER: words(from_next)[0]}

    async def _finish(self, residue_left: U8, residue_right: U8) -> None:
        """V11."""
        sums = np.array([self.claim[LEFT], *self.offsets[LEFT]], np.uint64)
        to_prev = np.concatenate([residue_left, raw(sums), raw(self.left[LEFT])])
        size = HASH + 8 * (sums.size + self.right[RIGHT].size)
        vouched, said = await self.links.exchange(Folded, to_prev, digest(self.left[PROVER]), HASH, size)  # V11
        vector = words(said[HASH + 8 * sums.size :])
        if (digest(vector) != vouched).any():
            reject("V11", "a folded vector is not what its prover expects")
        theirs = words(said[HASH : HASH + 8 * sums.size])
        holds = gf64.dot(vector, self.right[RIGHT]) == theirs[0] ^ self.claim[RIGHT]
        if not holds or (theirs[1:] != np.array(self.offsets[RIGHT], np.uint64)).any():
            reject("V11", "a proof about gates, carries or hops does not hold")
        if (said[:HASH] != residue_right).any():
            reject("V11", "a proof about a product does not hold")


def _nonzero(prg: Prg) -> np.uint64:
    """A point other than 0, at which the mask would vanish."""
    while not (point := np.uint64(prg.uint64(1)[0])):
        pass
    return point
