"""Verification: what was sent since the last opening is proved before the next one. Lines V7 to V12 of `verified`.

For a prover j the verifiers are A = j - 1 and B = j + 1; every party is all three at once, for three provers. P shares a
key with A (k_j), one with B (k_{j+1}), and A one with B (k_{j+2}), from which the coins come that P cannot foresee.

    V7   A, B → P    16 bytes of a seed each, once they hold everything P has sent since the last time
    V8   A ↔ B       products: α q and r β of their own shares, masked by P's streams
         P → A, B    the hash of what the other one has to say there
    V9   P → B       coefficients of the product of two polynomials, masked; A has the mask from a key
    V10  B → P       the point, which A draws alike. V9 and V10 again, 16 : 1, until 2048 elements are left
    V11  A → B       its vector at the last point, under one more row that is random; its sums, and the hash of its
                     residue of V8
         P → B       the hash of A's vector
    V12  all         that all checks of this party hold

A row m of uniform elements, known to P and A, stands above A's rows in the last fold. It does not touch the coefficient
that is checked, and hides A's vector from B. A verifier that departs from this is found by P's hash or ends the run:
it can reject, and nothing it says makes an honest verifier's answer depend on shares.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

import numpy as np

from cloister.crypto import gf64
from cloister.crypto import share_proofs as local
from cloister.crypto.prg import U8, U64, Prg
from cloister.crypto.replicated import Index, Ring, Shared, Words
from cloister.crypto.share_proofs import FOLD, ROWS, Equations, Mixture, Weights, digest, raw, words
from cloister.errors import ProtocolAbort
from cloister.net.wire import message
from cloister.protocols.sharing.sealed_links import NAME, Links

LAST = 1 << 11  # elements that A sends masked
HASH = 32
SEED = 16
PENDING = 1 << 22  # elements of proofs that wait, from which they are proved without waiting for an opening
PROVER, LEFT, RIGHT = "P", "A", "B"  # the part that this party plays for a prover


@message("V7", protocol=NAME)
class Seed:
    data: U8


@message("V8", protocol=NAME)
class Halves:
    data: U8


@message("V9", protocol=NAME)
class Coefficients:
    data: U8


@message("V10", protocol=NAME)
class Point:
    data: U8


@message("V11", protocol=NAME)
class Folded:
    data: U8


@message("V12", protocol=NAME)
class Verdict:
    data: U8


def reject(line: str, what: str) -> NoReturn:
    raise ProtocolAbort(NAME, line, "mismatch", f"{what}; one of the three computing parties departs from the protocol")


@dataclass(frozen=True, slots=True)
class Masks:
    """u (64, d), v (d, 64) of one party's halves."""

    u: U64
    v: U64

    @classmethod
    def draw(cls, prg: Prg, d: int) -> Masks:
        return cls(prg.uint64((ROWS, d)), prg.uint64((d, ROWS)))


@dataclass(frozen=True, slots=True)
class Product:
    """z = q rᵀ + w, as this party sees it for the three provers."""

    ring: Ring
    q: Shared
    r: Shared
    left: Words  # z - w - F(k_j) of prover i + 1
    right: Words  # F(k_{j+1}) of prover i - 1
    masks_own: tuple[Masks, Masks]  # of A and B of this party's own product
    masks_left: Masks
    sum_left: U64  # w_a of prover i + 1
    masks_right: Masks
    sum_right: U64  # w_b, as prover i - 1 says


@dataclass(frozen=True, slots=True)
class Hop:
    """One hop of a shuffle, by p and q = p + 1, who know the permutation, to the third, t."""

    p: int
    shape: tuple[int, int]
    perm: Index | None  # at p and q
    x_p: U64 | None  # at p and t
    x_t: U64 | None  # at q and t
    known_left: U64 | None  # what A adds up: y_p at t, ρ' at p
    known_right: U64 | None  # what B adds up: y_t at t, ρ at q

    def provers(self) -> tuple[int, int]:
        return self.p, (self.p + 1) % 3


class Proofs:
    """What this party has to prove and to check since the last opening."""

    def __init__(self, links: Links) -> None:
        i = links.i
        self.links = links
        self._prover = {PROVER: i, LEFT: (i + 1) % 3, RIGHT: (i + 2) % 3}  # whose proof, by this party's part in it
        self._with_left = {PROVER: links.stream(i, f"P-A/{i}"), LEFT: links.stream(i + 1, f"P-A/{(i + 1) % 3}")}
        self._with_right = {PROVER: links.stream(i + 1, f"P-B/{i}"), RIGHT: links.stream(i, f"P-B/{(i + 2) % 3}")}
        self._coins = {LEFT: links.stream(i, f"A-B/{(i + 1) % 3}"), RIGHT: links.stream(i + 1, f"A-B/{(i + 2) % 3}")}
        self._clear()

    def _clear(self) -> None:
        self._equations = {part: Equations() for part in (PROVER, LEFT, RIGHT)}
        self._hops: list[Hop] = []
        self._products: list[Product] = []
        self._hop_elements = [0, 0, 0]

    @property
    def pending(self) -> int:
        """Elements of the longest proof that waits."""
        return max(self._length(part) for part in self._prover)

    def _length(self, part: str) -> int:
        return 64 * self._equations[part].columns + self._hop_elements[self._prover[part]]

    # -- what was sent -------------------------------------------------------------------------------------------------

    def add_gates(self, x: tuple[U64, U64], y: tuple[U64, U64], received: U64, own: U64, following: U64) -> None:
        """z = x & y of shared bits, with z_j = x_j (y_j ⊕ y_{j+1}) ⊕ x_{j+1} y_j ⊕ F(k_j) ⊕ F(k_{j+1})."""
        self._equations[PROVER].add(x[0], y[0], y[1], x[1])
        self._equations[LEFT].add(x[1], y[1], received ^ (x[1] & y[1]) ^ following)
        self._equations[RIGHT].add(y[0], x[0], own)

    def add_carries(self, prover: int, left: tuple[U64, U64] | None, right: tuple[U64, U64] | None) -> None:
        """Bits u = m_A ⊕ m_B of the sum of two words, K_A known to A and K_B to B; (m, K) as planes.

        With t = m ⊕ K the carries are t_A ⊕ t_B, and c' = c ⊕ (u ⊕ K_A)(u ⊕ K_B); into the lowest bit goes none.
        """

        def known(m: U64, k: U64) -> tuple[U64, U64, U64]:
            t = m ^ k
            c = np.concatenate([t[:1], t[1:] ^ t[:-1] ^ (m[:-1] & t[:-1])])
            none = np.zeros_like(t[:1])
            return np.concatenate([none, m[:-1]]), np.concatenate([none, t[:-1]]), c

        part = {whose: part for part, whose in self._prover.items()}[prover]
        if part == PROVER and left is not None and right is not None:
            self._equations[PROVER].add(*known(*left)[:2], *known(*right)[:2])
        elif part == LEFT and left is not None:
            self._equations[LEFT].add(*known(*left))
        elif right is not None:
            self._equations[RIGHT].add(*known(*right))

    def add_hop(self, hop: Hop) -> None:
        self._hops.append(hop)
        for prover in hop.provers():
            self._hop_elements[prover] += hop.shape[0] * hop.shape[1]

    def correction(self, d: int) -> tuple[tuple[Masks, Masks], U64]:
        """The masks of a product of inner length d as its prover draws them, and w_b for B."""
        left = Masks.draw(self._with_left[PROVER], d)
        right = Masks.draw(self._with_right[PROVER], d)
        sum_left = self._with_left[PROVER].uint64((ROWS, ROWS))
        return (left, right), left.u @ right.v + right.u @ left.v - sum_left

    def add_product(
        self, q: Shared, r: Shared, left: Words, right: Words, own: tuple[Masks, Masks], sum_right: U64
    ) -> None:
        d = q.shape[1]
        masks_left = Masks.draw(self._with_left[LEFT], d)
        sum_left = self._with_left[LEFT].uint64((ROWS, ROWS))
        masks_right = Masks.draw(self._with_right[RIGHT], d)
        self._products.append(Product(q.ring, q, r, left, right, own, masks_left, sum_left, masks_right, sum_right))

    # -- V7 to V12 -----------------------------------------------------------------------------------------------------

    async def verify(self) -> None:
        """Prove and check everything that waits; returns only if nobody rejects."""
        if not (self.pending or self._products):
            return
        challenge = await self._challenges()
        residue_left, residue_right = await self._check_products(challenge)
        await self._check_inner_products(challenge, residue_left, residue_right)
        self._clear()
        done = np.zeros(1, np.uint8)
        await self.links.exchange(Verdict, done, done, 1, 1)  # V12

    async def _challenges(self) -> dict[str, Prg]:
        seeds = {part: coins.bytes(2 * SEED) for part, coins in self._coins.items()}
        first = np.frombuffer(seeds[LEFT][:SEED], np.uint8)  # as A, to prover i + 1
        second = np.frombuffer(seeds[RIGHT][SEED:], np.uint8)  # as B, to prover i - 1
        from_left, from_right = await self.links.exchange(Seed, second, first, SEED, SEED)  # V7
        own = from_left.tobytes() + from_right.tobytes()
        return {PROVER: Prg(own)} | {part: Prg(seed) for part, seed in seeds.items()}

    async def _check_products(self, challenge: dict[str, Prg]) -> tuple[U8, U8]:
        """V8; returns the hash of this party's residues as A, and of those it expects as B."""
        if not self._products:
            return digest(), digest()
        mixtures = [
            {part: Mixture.draw(prg, p.left.shape[0], p.left.shape[1]) for part, prg in challenge.items()}
            for p in self._products
        ]
        said = [self._halves(p, mixture) for p, mixture in zip(self._products, mixtures, strict=True)]
        as_left = [p.ring.to_bytes(x) for p, s in zip(self._products, said, strict=True) for x in s[LEFT]]
        as_right = [p.ring.to_bytes(x) for p, s in zip(self._products, said, strict=True) for x in s[RIGHT]]
        to_prev = np.concatenate([self._vouch(said, right=True), *as_left])  # to A of my proof, and B of i + 1
        to_next = np.concatenate([self._vouch(said, right=False), *as_right])  # to B of my proof, and A of i - 1
        from_prev, from_next = await self.links.exchange(Halves, to_prev, to_next, to_next.size, to_prev.size)  # V8
        # i - 1 vouches for what A = i + 1 of its proof says; i + 1 for what B = i - 1 of its proof says
        if (digest(from_next[HASH:]) != from_prev[:HASH]).any() or (digest(from_prev[HASH:]) != from_next[:HASH]).any():
            reject("V8", "a masked half of a product is not what its prover expects")
        left, right = self._residues(mixtures, said, from_prev[HASH:], from_next[HASH:])
        return digest(*left), digest(*right)

    def _vouch(self, said: list[dict[str, tuple[U64, ...]]], *, right: bool) -> U8:
        """The hash of what B (or A) of this party's own proof has to say."""
        halves = [s[PROVER][2:] if right else s[PROVER][:2] for s in said]
        return digest(*(p.ring.to_bytes(x) for p, pair in zip(self._products, halves, strict=True) for x in pair))

    def _halves(self, p: Product, mixture: dict[str, Mixture]) -> dict[str, tuple[U64, ...]]:
        """Masked halves: mine as A and as B, and both of my own proof; modulo 2^κ when they travel."""

        def masked(part: str, component: int, masks: Masks) -> tuple[U64, U64]:
            q, r = ((p.q.a, p.r.a), (p.q.b, p.r.b))[component]
            x, y = mixture[part].halves(q, r, p.ring)
            return x + masks.u, y + masks.v

        own = masked(PROVER, 0, p.masks_own[0]) + masked(PROVER, 1, p.masks_own[1])
        return {LEFT: masked(LEFT, 1, p.masks_left), RIGHT: masked(RIGHT, 0, p.masks_right), PROVER: own}

    def _residues(
        self,
        mixtures: list[dict[str, Mixture]],
        said: list[dict[str, tuple[U64, ...]]],
        from_prev: U8,
        from_next: U8,
    ) -> tuple[list[U8], list[U8]]:
        left, right, at = [], [], 0
        for p, mixture, mine in zip(self._products, mixtures, said, strict=True):
            d, size = p.q.shape[1], ROWS * p.q.shape[1] * p.ring.size
            shapes, cuts = ((ROWS, d), (d, ROWS)), (slice(at, at + size), slice(at + size, at + 2 * size))
            at += 2 * size
            x_right, y_right = (_wide(p.ring, from_prev[c], s) for c, s in zip(cuts, shapes, strict=True))  # B of i + 1
            x_left, y_left = (_wide(p.ring, from_next[c], s) for c, s in zip(cuts, shapes, strict=True))  # A of i - 1
            (x, y), (u, v) = mine[LEFT], (p.masks_left.u, p.masks_left.v)
            e = mixture[LEFT].both(p.left, p.ring) - (x - u) @ (y - v) + u @ y_right + x_right @ v - p.sum_left
            left.append(p.ring.to_bytes(e.astype(p.ring.dtype)))
            (x, y), (u, v) = mine[RIGHT], (p.masks_right.u, p.masks_right.v)
            e = x_left @ (y - v) + (x - u) @ y_left + p.sum_right - mixture[RIGHT].both(p.right, p.ring)
            right.append(p.ring.to_bytes(e.astype(p.ring.dtype)))
        return left, right

    # -- V9 to V11 -----------------------------------------------------------------------------------------------------

    async def _check_inner_products(self, challenge: dict[str, Prg], residue_left: U8, residue_right: U8) -> None:
        fold = _Folding(self)
        gates = max(e.columns for e in self._equations.values()) > 0
        direct = not self._hops and self.pending <= LAST  # the bits are folded once, under a mask
        if gates:
            await fold.bits(challenge, masked=direct)
        fold.hops(challenge)
        while gates or self._hops:
            size = max(fold.length(part) for part in self._prover)
            if direct:
                break
            direct = local.folded_length(size) <= LAST
            await fold.field(masked=direct)
        await fold.finish(residue_left, residue_right)


def _wide(ring: Ring, data: U8, shape: tuple[int, int]) -> U64:
    return ring.from_bytes(data, shape).astype(np.uint64)


class _Folding:
    """The vectors of three proofs while they are folded: A's side at P and A, B's side at P and B."""

    def __init__(self, proofs: Proofs) -> None:
        self._p = proofs
        self.links = proofs.links
        sizes = {part: proofs._length(part) for part in (PROVER, LEFT, RIGHT)}
        self.left = {part: np.zeros(sizes[part], np.uint64) for part in (PROVER, LEFT)}
        self.right = {part: np.zeros(sizes[part], np.uint64) for part in (PROVER, RIGHT)}
        self.claim = {LEFT: np.uint64(0), RIGHT: np.uint64(0)}
        self.offsets: dict[str, list[np.uint64]] = {LEFT: [], RIGHT: []}  # checked coefficient minus claim

    def length(self, part: str) -> int:
        return (self.right if part == RIGHT else self.left)[part].size

    async def bits(self, challenge: dict[str, Prg], *, masked: bool) -> None:
        """All equations of bits, 64 : 1."""
        p = self._p
        equations = p._equations
        weights = {part: Weights.draw(challenge[part], equations[part].columns) for part in equations}
        for part in (LEFT, RIGHT):
            self.claim[part] = local.claim(equations[part], weights[part])
        gram = local.gram(equations[PROVER], weights[PROVER])
        row_weights = weights[PROVER].rows
        masks = {part: p._with_left[part].uint64(self.length(part)) for part in self.left} if masked else {}
        if masked:
            gram = np.vstack([gram, local.mask_products(equations[PROVER], masks[PROVER])])
            row_weights = np.append(row_weights, np.uint64(1))
        point = await self._point(gf64.product_coefficients(gram, row_weights), 64)
        for part, out in self.left.items():
            local.fold_left(equations[part], weights[part], point[part], out[: 64 * equations[part].columns])
        for part, out in self.right.items():
            first = 2 if part == PROVER else 0
            local.fold_right(equations[part], point[part], out[: 64 * equations[part].columns], first=first)
        self._add_mask(masks, point, 64)

    def _add_mask(self, masks: dict[str, U64], point: dict[str, np.uint64], height: int) -> None:
        for part, mask in masks.items():
            top = gf64.powers(point[part], height + 1)[-1:]
            self.left[part] ^= gf64.fold_field(np.ascontiguousarray(mask[None]), top)

    def hops(self, challenge: dict[str, Prg]) -> None:
        """Words of hops as field elements behind the bits; at one of A and B the weights, moved as π moves words."""
        p = self._p
        at = {part: 64 * e.columns for part, e in p._equations.items()}
        for hop in p._hops:
            for part, prover in p._prover.items():
                if prover not in hop.provers():
                    continue
                alpha, beta = challenge[part].uint64(hop.shape[0]), challenge[part].uint64(hop.shape[1])
                cut = slice(at[part], at[part] + hop.shape[0] * hop.shape[1])
                at[part] = cut.stop
                first = prover == hop.p
                data, places = (self.left, self.right) if first else (self.right, self.left)
                moved = hop.x_p if first else hop.x_t
                if part in places and hop.perm is not None:
                    gf64.scatter_weights(hop.perm, alpha, beta, places[part][cut].reshape(hop.shape))
                if part in data and moved is not None:
                    data[part][cut] = moved.reshape(-1)
                known = {LEFT: hop.known_left, RIGHT: hop.known_right}.get(part)
                if known is not None:
                    self.claim[part] ^= gf64.weigh_rows(known, alpha, beta)

    async def field(self, *, masked: bool) -> None:
        """Field elements, 16 : 1."""
        left = {part: local.fold_rows(x) for part, x in self.left.items()}
        right = {part: local.fold_rows(x) for part, x in self.right.items()}
        gram = gf64.gram_field(left[PROVER], right[PROVER])
        masks: dict[str, U64] = {}
        if masked:
            masks = {part: self._p._with_left[part].uint64(x.shape[1]) for part, x in left.items()}
            extra = [gf64.dot(masks[PROVER], row) for row in right[PROVER]]
            gram = np.vstack([gram, np.array(extra, np.uint64)])
        coefficients = gf64.product_coefficients(gram, np.ones(len(gram), np.uint64))
        point = await self._point(coefficients, FOLD)
        for part, rows in left.items():
            self.left[part] = gf64.fold_field(rows, gf64.powers(point[part], FOLD))
        for part, rows in right.items():
            self.right[part] = gf64.fold_field(rows, gf64.powers(point[part], FOLD)[::-1].copy())
        self._add_mask(masks, point, FOLD)

    async def _point(self, coefficients: U64, rows: int) -> dict[str, np.uint64]:
        """V9, V10: hand over the polynomial in two shares, check its claim, and go on with its value at a point."""
        p, size = self._p, coefficients.size
        mask = p._with_left[PROVER].uint64(size)
        from_prev, _ = await self.links.exchange(Coefficients, None, raw(coefficients ^ mask), 8 * size, None)  # V9
        shares = {LEFT: p._with_left[LEFT].uint64(size), RIGHT: words(from_prev)}
        points = {part: _nonzero(p._coins[part]) for part in (LEFT, RIGHT)}
        _, from_next = await self.links.exchange(Point, raw(np.array([points[RIGHT]])), None, None, 8)  # V10
        for part, share in shares.items():
            self.offsets[part].append(share[rows - 1] ^ self.claim[part])
            self.claim[part] = gf64.dot(share, gf64.powers(points[part], size))
        return points | {PROVER: words(from_next)[0]}

    async def finish(self, residue_left: U8, residue_right: U8) -> None:
        """V11."""
        sums = np.array([self.claim[LEFT], *self.offsets[LEFT]], np.uint64)
        to_prev = np.concatenate([residue_left, raw(sums), raw(self.left[LEFT])])
        size = HASH + 8 * (sums.size + self.length(RIGHT))
        vouched, said = await self.links.exchange(Folded, to_prev, digest(self.left[PROVER]), HASH, size)  # V11
        vector = words(said[HASH + 8 * sums.size :])
        if (digest(vector) != vouched).any():
            reject("V11", "a folded vector is not what its prover expects")
        theirs = words(said[HASH : HASH + 8 * sums.size])
        if (theirs[1:] != np.array(self.offsets[RIGHT], np.uint64)).any():
            reject("V11", "a proof about gates, carries or hops does not hold")
        if gf64.dot(vector, self.right[RIGHT]) != theirs[0] ^ self.claim[RIGHT]:
            reject("V11", "a proof about gates, carries or hops does not hold")
        if (said[:HASH] != residue_right).any():
            reject("V11", "a proof about a product does not hold")


def _nonzero(prg: Prg) -> np.uint64:
    """A point other than 0, at which the mask would vanish."""
    while not (point := prg.uint64(1)[0]):
        pass
    return point
