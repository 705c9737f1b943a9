"""Verification: what was sent since the last opening is proved before the next one. Lines V7 to V12 of `verified`.

For a prover j the verifiers are A = j - 1 and B = j + 1; every party is all three at once, for three provers. P shares
a key with A (k_j), one with B (k_{j+1}), and A one with B (k_{j+2}), from which the coins come that P cannot foresee.

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

import numpy as np

from cloister.arrays import U8, U64
from cloister.errors import ParameterError
from cloister.mpc.crypto.prg import Prg
from cloister.mpc.crypto.replicated import Ring, Shared, Words
from cloister.mpc.crypto.share_proofs import ROWS, Mixture, digest
from cloister.mpc.net.wire import message
from cloister.mpc.three_party.folding import HASH, LEFT, PROVER, RIGHT, Folding, Hop, Statement, reject
from cloister.mpc.three_party.packing import packed, packed_size, unpacked
from cloister.mpc.three_party.sealed_links import NAME, Links

SEED = 16
PENDING = 1 << 21  # elements of proofs that wait, from which they are proved without waiting for an opening


@message("V7", protocol=NAME)
class Seed:
    data: U8


@message("V8", protocol=NAME)
class Halves:
    data: U8


@message("V12", protocol=NAME)
class Verdict:
    data: U8


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
    diagonal: bool = False  # q (d,) stands for a diagonal matrix

    @property
    def inner(self) -> int:
        """Length of the sums in the product."""
        return self.r.shape[1]


class Proofs:
    """What this party has to prove and to check since the last opening."""

    def __init__(self, links: Links) -> None:
        i = links.i
        self.links = links
        self._prover_of = {PROVER: i, LEFT: (i + 1) % 3, RIGHT: (i + 2) % 3}
        self._with_left = {PROVER: links.stream(i, f"P-A/{i}"), LEFT: links.stream(i + 1, f"P-A/{(i + 1) % 3}")}
        self._with_right = {PROVER: links.stream(i + 1, f"P-B/{i}"), RIGHT: links.stream(i, f"P-B/{(i + 2) % 3}")}
        self._coins = {LEFT: links.stream(i, f"A-B/{(i + 1) % 3}"), RIGHT: links.stream(i + 1, f"A-B/{(i + 2) % 3}")}
        self.statement = Statement(self._prover_of)
        self.products: list[Product] = []
        self.unfinished = 0  # chains of products that have not ended

    @property
    def pending(self) -> int:
        """Elements of the longest proof that waits."""
        return self.statement.longest

    # -- what was sent -------------------------------------------------------------------------------------------------

    def add_gates(self, x: tuple[U64, U64], y: tuple[U64, U64], received: U64, own: U64, following: U64) -> None:
        """One AND of shared bits, z = x & y, with z_j = x_j (y_j ⊕ y_{j+1}) ⊕ x_{j+1} y_j ⊕ F(k_j) ⊕ F(k_{j+1})."""
        self.statement.equations[PROVER].add(x[0], y[0], y[1], x[1])
        self.statement.equations[LEFT].add(x[1], y[1], received ^ (x[1] & y[1]) ^ following)
        self.statement.equations[RIGHT].add(y[0], x[0], own)

    def add_carries(self, prover: int, left: tuple[U64, U64] | None, right: tuple[U64, U64] | None) -> None:
        """Bits u = m_A ⊕ m_B of the sum of two words, K_A known to A and K_B to B; (m, K) as planes.

        With t = m ⊕ K the carries are t_A ⊕ t_B, and c' = c ⊕ (u ⊕ K_A)(u ⊕ K_B); into the lowest bit goes none.
        """

        def known(m: U64, k: U64) -> tuple[U64, U64, U64]:
            t = m ^ k
            c = np.concatenate([t[:1], t[1:] ^ t[:-1] ^ (m[:-1] & t[:-1])])
            none = np.zeros_like(t[:1])
            return np.concatenate([none, m[:-1]]), np.concatenate([none, t[:-1]]), c

        part = {whose: part for part, whose in self._prover_of.items()}[prover]
        if part == PROVER and left is not None and right is not None:
            self.statement.equations[PROVER].add(*known(*left)[:2], *known(*right)[:2])
        elif part == LEFT and left is not None:
            self.statement.equations[LEFT].add(*known(*left))
        elif right is not None:
            self.statement.equations[RIGHT].add(*known(*right))

    def add_hop(self, hop: Hop) -> None:
        self.statement.hops.append(hop)

    def correction(self, d: int) -> tuple[tuple[Masks, Masks], U64]:
        """The masks of a product of inner length d as its prover draws them, and w_b for B."""
        left = Masks.draw(self._with_left[PROVER], d)
        right = Masks.draw(self._with_right[PROVER], d)
        sum_left = self._with_left[PROVER].uint64((ROWS, ROWS))
        return (left, right), left.u @ right.v + right.u @ left.v - sum_left

    def add_product(
        self,
        q: Shared,
        r: Shared,
        left: Words,
        right: Words,
        own: tuple[Masks, Masks],
        sum_right: U64,
        *,
        diagonal: bool = False,
    ) -> None:
        d = r.shape[1]
        masks_left = Masks.draw(self._with_left[LEFT], d)
        sum_left = self._with_left[LEFT].uint64((ROWS, ROWS))
        masks_right = Masks.draw(self._with_right[RIGHT], d)
        held = (masks_left, sum_left, masks_right, sum_right)
        self.products.append(Product(q.ring, q, r, left, right, own, *held, diagonal))

    # -- V7 to V12 -----------------------------------------------------------------------------------------------------

    async def verify(self) -> None:
        """Prove and check everything that waits; returns only if nobody rejects."""
        if self.unfinished:
            raise ParameterError("a chain of products must end before anything is proved or opened")
        if not (self.pending or self.products):
            return
        challenge = await self._challenges()
        residue_left, residue_right = await self._check_products(challenge)
        folding = Folding(self.links, self.statement, challenge, self._with_left, self._coins)
        await folding.prove(residue_left, residue_right)  # V9 to V11
        self.statement, self.products = Statement(self._prover_of), []
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
        if not self.products:
            return digest(), digest()
        mixtures = [
            {part: Mixture.draw(prg, p.left.shape[0], p.left.shape[1]) for part, prg in challenge.items()}
            for p in self.products
        ]
        said = [self._halves(p, mixture) for p, mixture in zip(self.products, mixtures, strict=True)]
        as_left = [packed(x, p.ring) for p, s in zip(self.products, said, strict=True) for x in s[LEFT]]
        as_right = [packed(x, p.ring) for p, s in zip(self.products, said, strict=True) for x in s[RIGHT]]
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
        return digest(*(packed(x, p.ring) for p, pair in zip(self.products, halves, strict=True) for x in pair))

    def _halves(self, p: Product, mixture: dict[str, Mixture]) -> dict[str, tuple[U64, ...]]:
        """Masked halves: mine as A and as B, and both of my own proof; modulo 2^κ when they travel."""

        def masked(part: str, component: int, masks: Masks) -> tuple[U64, U64]:
            q, r = ((p.q.a, p.r.a), (p.q.b, p.r.b))[component]
            x, y = mixture[part].halves(q, r, p.ring, diagonal=p.diagonal)
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
        for p, mixture, mine in zip(self.products, mixtures, said, strict=True):
            d, size = p.inner, packed_size(ROWS * p.inner, p.ring)
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


def _wide(ring: Ring, data: U8, shape: tuple[int, int]) -> U64:
    return unpacked(data, ring, shape).astype(np.uint64)
