"""Three-party replicated sharing: what three parties compute on values that none of them sees.

    R1   i ↔ j    pk_i, σ_i                 X25519 keys, signed; link keys for both directions, and k_i of i and i - 1
    R2   input    a computing owner i: x_i = F(k_i), x_{i+1} = x - x_i, x_{i+2} = 0; x_{i+1} goes to i + 1
                  any other owner: x_0, x_1 from seeds sent once, x_2 = x - x_0 - x_1 to the two that hold it
    R3   reshare  z_0 + z_1 + z_2 = z, every z_i masked by F(k_i) - F(k_{i+1}); z_i goes to i - 1
    R4   pair     1 and 2 hold z = s_1 + s_2: z_0 = F(k_0), z_1 = F(k_1), and 1 ↔ 2: s_1 - z_1, s_2 - z_0 give z_2
    R5   digits   x = u + v, u = x_0 + x_1 known to 0, v = x_2 known to 1 and 2. 0 → 1: monomials of u ⊕ F(k_0)
    R6   shuffle  2 → 0: z_2; 0, 1 permute by F(k_1); 0 → 2: s_0 - ρ; 1, 2 permute by F(k_2); 1 → 0: s_1 - ρ';
                  2, 0 permute by F(k_0); 2 → 1: v = s_2 + ρ'', and u = s_0 - ρ'' stays at 0 (ρ from the pair's key)
    R7   open     to one computing party: the one component it lacks, from i - 1; to another party: u from 0, v from 1
    R8   open     to all three: i → i + 1 the component that i + 1 lacks

Who holds what: party i of 0, 1, 2 holds the components i and i + 1 of every value, so any two know it and one knows
nothing. What is sent, all three together, for a ring of κ bits:

    operation              bits sent per entry                                        rounds
    input                  κ (computing owner), 2κ (any other)                        1
    add, public factor     0                                                          0
    mul, matmul            3κ per entry of the result, whatever the inner length      1
    less, msb              about 4κ                                                   2 + κ/3, or 2 + log2(κ/3) at 6κ
    equality               about 5κ                                                   2 + log2(κ/3)
    bits (lowest L)        6L                                                         1 + L
    inject                 3κ'  into a ring of κ' bits                                2
    one-hot min            about 4κ + 9κ per entry                                    (4 + κ/3) · log2 n + log2 n
    shuffle                4κ                                                         4
    smallest k of n        4κ' + (1.05 to 1.5)(4κ' + 3), with κ' = κ + log2 n         some (3 + κ'/3) · 5
    open                   κ to a computing party, 2κ to another; 3 per bit to all    1

`smallest_k` shuffles every row by a permutation that nobody knows and then *opens the outcome of comparisons*. Before
the shuffle the number of its column is put below every key, so no two keys of a row are equal and, after the shuffle,
they stand in uniformly random order whatever they are: which comparisons are made and how they end is what a sort of
random numbers would give, and says nothing about the keys. (Equal keys that were told apart by their shuffled place
would show: they alone would always come in the order of their places.) No value has to be selected under sharing, which
is where most of the bytes go otherwise.

Reveals
-------
computing party : nothing but what a protocol opens; of rows that are selected from, their number and length, and the
    order in which a uniform shuffle put them. With a second computing party: everything.
owner of an input, who carries the frames : nothing; every word is under a key of its sender and its receiver.

Assumes
-------
Semi-honest parties; no two of the three computing parties collude; Ed25519 keys of all members in the study. Lies of a
computing party are not noticed, by (a), (b), (c) or (f), and can read what is shared (`verified` closes it).

References
----------
[AFL+16] Araki et al., CCS 2016.  [MR18] Mohassel, Rindal, CCS 2018.  [AHI+22] Asharov et al., CCS 2022: sorting by
opened comparisons after a shuffle.  [HKI+12] Hamada et al., ICISC 2012: the same, first.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np

from cloister.arrays import U8, Index
from cloister.errors import ParameterError
from cloister.mpc.crypto import replicated as local
from cloister.mpc.crypto.prg import Prg
from cloister.mpc.crypto.replicated import Ring, Shared, Words, join
from cloister.mpc.net.wire import message
from cloister.mpc.three_party import selection
from cloister.mpc.three_party.replicated_linear import (
    NAME,
    Bits,
    Input,
    Key,
    Linear,
    Open,
    OpenAll,
    Pair,
    Reshare,
    Split,
)

__all__ = [
    "Bits",
    "Digits",
    "Hop",
    "Input",
    "Key",
    "Open",
    "OpenAll",
    "Pair",
    "Reshare",
    "Shared",
    "Split",
    "Trio",
    "join",
]

DEEP = 1 << 16  # comparisons at once from which bytes count more than rounds


@message("R5")
class Digits:
    data: U8


@message("R6")
class Hop:
    data: U8


class Trio(Linear):
    """One member's end of a three-party computation. `rank` is 0, 1, 2, or None for a member that only gives or gets.

    All members call the same operations in the same order. Every method that is `async` sends something.
    """

    # -- R5: carries ---------------------------------------------------------------------------------------------------

    def split(self, x: Shared) -> Split:
        return Split(x.ring, (x.a + x.b, x.b, x.a)[self._i])

    async def join_split(self, x: Split) -> Shared:
        """Back to components: x_0 = F(k_0), x_1 = u - x_0, x_2 = v."""
        i, ring, shape = self._i, x.ring, tuple(x.word.shape)
        if i == 0:
            first = ring.draw(self._own, shape)
            await self._send_words(1, Digits, ring, x.word - first)
            return Shared(ring, first, x.word - first)
        if i == 1:
            return Shared(ring, await self._recv_words(0, Digits, ring, shape), x.word)
        return Shared(ring, x.word, ring.draw(self._next, shape))

    async def _monomials(self, u: U8 | None, widths: Sequence[int], n: int) -> list[U8]:
        """R5: per digit, this party's share of the monomials of u; party 0 holds none."""
        sizes = [2**w - 1 for w in widths]
        shape = (sum(sizes), local.plane_bytes(n))
        if self._i == 0 and u is not None:
            cuts = np.cumsum([0, *widths])
            whole = np.concatenate([local.monomials(u[s:e]) for s, e in itertools.pairwise(cuts)])
            whole ^= self._own.uint8(shape)
            await self._send(self.computing[1], Digits, whole.reshape(-1))
            return []
        if self._i == 1:
            share = (await self._recv(self.computing[0], Digits, math.prod(shape))).reshape(shape)
        else:
            share = self._next.uint8(shape)
        return np.split(share, np.cumsum(sizes)[:-1].tolist())

    async def _msb(self, x: Split) -> Bits:
        """The sign bits of x: carry into the top bit of u + v, plus the two top bits."""
        ring, n = x.ring, x.word.size
        widths = [*local.digit_widths(ring.bits - 1), 1]
        bits = local.planes(x.word, 0, ring.bits)
        m = await self._monomials(bits if self._i == 0 else None, widths, n)
        digits = len(widths) - 1
        g = p = top = None
        if m:
            cuts = np.cumsum([0, *widths])
            v = [bits[s:e] for s, e in itertools.pairwise(cuts)]
            g = np.stack([local.generate(m[j], v[j]) for j in range(digits)])
            top = m[-1][0] ^ v[-1][0] if self._i == 1 else m[-1][0]
            g[-1] ^= top
            p = [local.propagate(m[j], v[j], constant=self._i == 1) for j in range(1, digits)]
        return await (self._ripple if n >= DEEP else self._tree)(g, p, digits, n)

    async def _ripple(self, g: U8 | None, p: list[U8] | None, digits: int, n: int) -> Bits:
        """c_{j+1} = g_j ⊕ p_j c_j, digit by digit: fewest bytes."""
        rows = [g[0], *p] if g is not None and p is not None else None
        first = await self._pair_bits(np.stack(rows) if rows is not None else None, (digits, local.plane_bytes(n)), n)
        c = first[0]
        for j in range(1, digits):
            c = await self._and(first[j], c, add=None if g is None else g[j])
        return c

    async def _tree(self, g: U8 | None, p: list[U8] | None, digits: int, n: int) -> Bits:
        """Neighbours merged, (g, p) ∘ (g', p') = (g ⊕ p g', p p'): fewest rounds. The lowest p is never used."""
        rows = np.concatenate([g, *[q[None] for q in p]]) if g is not None and p is not None else None
        size = local.plane_bytes(n)
        both = await self._pair_bits(rows, (2 * digits - 1, size), n)
        carry, pass_on = both[:digits], both[digits:]
        pass_on = Bits(n, *(np.concatenate([np.zeros((1, size), np.uint8), w]) for w in (pass_on.a, pass_on.b)))
        while len(carry.a) > 1:
            h, odd = len(carry.a) // 2, len(carry.a) % 2  # an odd one out stays on top
            low, high = slice(0, 2 * h, 2), slice(1, 2 * h, 2)
            left = Bits(n, *(np.concatenate([w[high], w[high][1:]]) for w in (pass_on.a, pass_on.b)))
            right = Bits(
                n,
                *(np.concatenate([c[low], w[low][1:]]) for c, w in ((carry.a, pass_on.a), (carry.b, pass_on.b))),
            )
            joined = await self._and(left, right)
            merged = carry[high] ^ joined[:h]
            kept = [np.concatenate([w[:1] * 0, w[h:]]) for w in (joined.a, joined.b)]
            tops = [w[2 * h :] if odd else w[:0] for w in (carry.a, carry.b, pass_on.a, pass_on.b)]
            carry = Bits(n, np.concatenate([merged.a, tops[0]]), np.concatenate([merged.b, tops[1]]))
            pass_on = Bits(n, np.concatenate([kept[0], tops[2]]), np.concatenate([kept[1], tops[3]]))
        return carry[0]

    async def negative(self, x: Shared) -> Bits:
        """Whether each entry is below zero."""
        return await self._msb(self.split(x))

    async def less(self, x: Shared, y: Shared) -> Bits:
        """Whether x < y, entry by entry; their difference must fit the ring."""
        return await self.negative(x - y)

    async def equal(self, x: Shared, y: Shared) -> Bits:
        """Whether x = y: u = -v, so all bits of u and v - 1 differ."""
        ring, n = x.ring, x.a.size
        word = self.split(x - y).word
        widths = local.digit_widths(ring.bits)
        bits = local.planes(word if self._i == 0 else word - ring.dtype.type(1), 0, ring.bits)
        m = await self._monomials(bits if self._i == 0 else None, widths, n)
        rows = None
        if m:
            cuts = np.cumsum([0, *widths])
            rows = np.stack(
                [local.propagate(m[j], bits[cuts[j] : cuts[j + 1]], constant=self._i == 1) for j in range(len(widths))]
            )
        p = await self._pair_bits(rows, (len(widths), local.plane_bytes(n)), n)
        while len(p.a) > 1:
            h = len(p.a) // 2
            halves = await self._and(p[:h], p[h : 2 * h])
            p = Bits(n, *(np.concatenate([c, w[2 * h :]]) for c, w in ((halves.a, p.a), (halves.b, p.b))))
        return p[0]

    async def low_bits(self, x: Shared, count: int) -> Bits:
        """The lowest `count` bits as planes (count, ...), by a ripple of one-bit digits."""
        n = x.a.size
        bits = local.planes(self.split(x).word, 0, count)
        m = await self._monomials(bits if self._i == 0 else None, [1] * count, n)
        sums = g = None
        if m:
            share = np.concatenate(m)
            g = share & bits
            sums = share ^ bits if self._i == 1 else share
        p = await self._pair_bits(sums, (count, local.plane_bytes(n)), n)
        if count == 1:
            return p
        zero = Bits(n, np.zeros_like(p.a[0]), np.zeros_like(p.b[0]))
        rows, c = [p[0]], zero
        for j in range(count - 1):
            c = await self._and(p[j], c, add=None if g is None else g[j])
            rows.append(p[j + 1] ^ c)
        return Bits(n, np.stack([r.a for r in rows]), np.stack([r.b for r in rows]))

    def flip(self, x: Bits) -> Bits:
        """NOT: component 0, held by parties 0 and 2."""
        ones = np.uint8(255)
        return Bits(x.n, x.a ^ ones if self._i == 0 else x.a, x.b ^ ones if self._i == 2 else x.b)

    async def both(self, x: Bits, y: Bits) -> Bits:
        return await self._and(x, y)

    async def inject(self, x: Bits, shape: tuple[int, ...], ring: Ring) -> Shared:
        """Bits as numbers 0 and 1: d = x_0 ⊕ x_1 known to 0, e = x_2 known to 1 and 2, x = e + (1 - 2e) d."""
        rows = math.prod(x.a.shape[:-1])
        wide = (rows, x.n)

        def numbers(planes: U8) -> Words:
            bits = np.unpackbits(planes.reshape(rows, -1), axis=1, count=x.n, bitorder="little")
            return bits.astype(ring.dtype)

        if self._i == 0:
            d = numbers(x.a ^ x.b)
            await self._send_words(1, Digits, ring, d - ring.draw(self._own, wide))
            z = None
        else:
            e = numbers(x.b if self._i == 1 else x.a)
            one, two = ring.dtype.type(1), ring.dtype.type(2)
            if self._i == 1:
                z = e + (one - two * e) * await self._recv_words(0, Digits, ring, wide)
            else:
                z = (one - two * e) * ring.draw(self._next, wide)
        return (await self._pair_words(z, wide, ring)).reshape(*shape)

    # -- choices -------------------------------------------------------------------------------------------------------

    async def smaller(self, x: Shared, y: Shared) -> tuple[Shared, Shared]:
        """(c, min): c = 1 where x is taken, which is where x ≤ y."""
        c = await self.inject(self.flip(await self.less(y, x)), x.shape, x.ring)
        return c, y + await self.mul(c, x - y)

    async def onehot_min(self, x: Shared) -> tuple[Shared, Shared]:
        """The smallest entry along the last axis, and its place as a one-hot row; of equal ones the first.

        A tournament of neighbours, so that the left one is always the earlier; its results then go down the tree.
        """
        taken = []
        while x.shape[-1] > 1:
            h = x.shape[-1] // 2
            c, best = await self.smaller(x[..., 0 : 2 * h : 2], x[..., 1 : 2 * h : 2])
            taken.append(c)
            x = join([best, x[..., 2 * h :]], axis=-1)
        place = self.constant(np.ones(x.shape, np.int64), x.ring)
        for c in reversed(taken):
            h = c.shape[-1]
            left = await self.mul(c, place[..., :h])
            right = place[..., :h] - left
            mixed = left.map(lambda w: np.empty((*w.shape[:-1], 2 * w.shape[-1]), w.dtype))
            for out, one, two in ((mixed.a, left.a, right.a), (mixed.b, left.b, right.b)):
                out[..., 0::2], out[..., 1::2] = one, two
            place = join([mixed, place[..., h:]], axis=-1)
        return x[..., 0], place

    async def onehot_max(self, x: Shared) -> tuple[Shared, Shared]:
        """The largest entry along the last axis, and its place; of equal ones the first."""
        best, place = await self.onehot_min(x.times(-1))
        return best.times(-1), place

    # -- R6: smallest k by a shuffle and opened comparisons ------------------------------------------------------------

    async def shuffle(self, z: Words, ring: Ring) -> Split:
        """Permute every row of a matrix, given by masked summands (see `product`), so that nobody knows how."""
        i, shape = self._i, tuple(z.shape)

        def permuted(w: Words, key: Prg) -> Words:
            return np.take_along_axis(w, local.permutations(key, *shape), axis=1)

        if i == 0:
            z = z + await self._recv_words(2, Hop, ring, shape)
            z = permuted(z, self._next) - ring.draw(self._next, shape)
            await self._send_words(2, Hop, ring, z)
            z = permuted(await self._recv_words(1, Hop, ring, shape), self._own) - ring.draw(self._own, shape)
        elif i == 1:
            z = permuted(z, self._own) + ring.draw(self._own, shape)
            z = permuted(z, self._next) - ring.draw(self._next, shape)
            await self._send_words(0, Hop, ring, z)
            z = await self._recv_words(2, Hop, ring, shape)
        else:
            await self._send_words(0, Hop, ring, z)
            z = permuted(await self._recv_words(0, Hop, ring, shape), self._own) + ring.draw(self._own, shape)
            z = permuted(z, self._next) + ring.draw(self._next, shape)
            await self._send_words(1, Hop, ring, z)
        return Split(ring, z)

    async def smallest_k(self, z: Words, ring: Ring, k: int) -> Shared:
        """The k smallest entries of every row, ascending, of equal ones the earlier; z as for `shuffle`.

        Each comes as entry · 2^b + column in the ring of `numbered_ring`: what is opened shows no ties.
        """
        rows, n = z.shape
        if not 1 <= k <= n:
            raise ParameterError(f"the {k} smallest of {n} entries do not exist")
        wide = local.numbered_ring(ring, n)
        z = z.astype(wide.dtype) << wide.dtype.type(wide.bits - ring.bits)  # modulo 2^(κ+b), since z is modulo 2^κ
        if self._i == 0:
            z = z + np.arange(n, dtype=wide.dtype)
        flat = (await self.shuffle(z, wide)).word.reshape(-1)

        async def less(i: Index, j: Index) -> U8:
            """Open whether entry i comes before entry j of its row."""
            sign = await self._msb(Split(wide, flat[i] - flat[j]))
            return await self.open_bits(sign, protocol=NAME, line="R6", what="order of shuffled entries")

        place = await selection.smallest(less, rows, n, k)
        return await self.join_split(Split(wide, flat[place]))
