"""What the operations of `verified` send: messages and payload bytes per party, without running them.

Exact but for `smallest_k` on rows longer than `selection.FEW`, as in `replicated_cost`. Tags of boxes are framing.
"""

from __future__ import annotations

from collections.abc import Iterable

from cloister.mpc.crypto.gf64 import BLOCKS
from cloister.mpc.crypto.replicated import Ring, index_bits
from cloister.mpc.crypto.share_proofs import ALIGN, FOLD, ROWS, folded_length
from cloister.mpc.parties import Party
from cloister.mpc.three_party import selection, verification, verified
from cloister.mpc.three_party.folding import HASH, LAST
from cloister.mpc.three_party.packing import packed_size
from cloister.mpc.three_party.replicated_cost import PK, SIGNATURE, CostModel
from cloister.mpc.three_party.verified import SEED


def columns(n: int) -> int:
    """Words of a plane of n entries."""
    return -(-n // 64)


class VerifiedCostModel(CostModel):
    """Adds up what every member sends, proofs included."""

    def __init__(self, members: Iterable[Party], computing: tuple[Party, ...]) -> None:
        super().__init__(members, computing)
        self._seeded: set[Party] = set()
        self._clear()

    def _clear(self) -> None:
        self._whole, self._rest, self._hops = [0, 0, 0], [0, 0, 0], [0, 0, 0]  # words of equations, elements of hops
        self._halves = 0
        self._products = False

    def meet(self) -> None:
        others = [p for p in self.members if p not in self.computing]
        for i in range(3):
            self.send(i, PK + SIGNATURE, 2 + len(others))
        for p in others:
            self.send(p, PK + SIGNATURE, 3)

    def input(self, owner: Party, n: int, ring: Ring) -> None:
        if owner in self.computing:
            return self.send(owner, packed_size(n, ring))
        if owner not in self._seeded:
            self._seeded.add(owner)
            self.send(owner, 2 * SEED)
            self.send(owner, SEED, 2)
        self.send(owner, packed_size(n, ring), 2)
        return self.everyone(HASH)

    def coin(self, owner: Party) -> None:
        rank = self.computing.index(owner) if owner in self.computing else 1
        for i in {0, 1, 2} - {rank}:
            self.send(i, SEED)

    def product(self, m: int, n: int, d: int, ring: Ring) -> None:
        self.everyone(packed_size(m * n, ring))
        self.everyone(ROWS * ROWS * ring.size)
        self._halves += 2 * packed_size(ROWS * d, ring)
        self._products = True

    def _equations(self, words: int, provers: Iterable[int]) -> None:
        for j in provers:
            self._whole[j] += words // ALIGN * ALIGN
            self._rest[j] += words % ALIGN

    def gate(self, words: int) -> None:
        self.everyone(8 * words)
        self._equations(words, range(3))

    def bits(self, n: int, count: int) -> None:
        width = columns(n)
        self.send(0, 8 * count * width)
        self._equations(count * width, [0])
        if n > verified.WIDE:
            for _ in range(count - 1):
                self.gate(width)
        elif count > 1:
            self.gate((count - 1) * width)
            reach = 1
            while reach < count - 1:
                self.gate(2 * width * sum(1 for b in range(count - 1) if b & reach))
                reach *= 2

    def check_small(self, owner: Party, n: int, count: int, ring: Ring) -> None:
        if owner not in self.computing:
            self.bits(n, ring.bits)
            return self.check_zero()
        o = self.computing.index(owner)
        self.send(o, 8 * count * columns(n))
        return self._equations(ring.bits * columns(n), [o])

    def less(self, width: int, count: int, *, few_rounds: bool) -> None:
        """Comparisons of planes of so many words."""
        digit = (verified.LONG if count > 24 else verified.DIGIT) if few_rounds else count
        starts = list(range(0, count, digit))
        for step in range(min(digit, count)):
            here = [k for k, start in enumerate(starts) if start + step < count]
            self.gate(width * (len(here) + sum(1 for k in here if step and k)))
        left = len(starts)
        while left > 1:
            self.gate(width * (2 * (left // 2) - 1))
            left -= left // 2

    def shuffle(self, rows: int, n: int, bits: int) -> None:
        for p in range(3):
            for i in (p, (p + 1) % 3):
                self.send(i, packed_size(rows * n, Ring(bits)))
                self._hops[i] += rows * n
            self.prove_large()

    def smallest_k(self, rows: int, n: int, k: int, ring: Ring) -> None:
        wide = ring.bits + index_bits(n)
        self.bits(rows * n, ring.bits)
        self.prove_large()
        self.shuffle(rows, n, wide)
        for pairs in selection.expected(rows, n, k):
            self.less(columns(pairs), wide, few_rounds=pairs < verified.DEEP)
            self.open_all(columns(pairs))

    # -- proofs and openings -------------------------------------------------------------------------------------------

    def _lengths(self) -> list[int]:
        return [
            64 * (whole + -(-rest // ALIGN) * ALIGN) // BLOCKS + hops
            for whole, rest, hops in zip(self._whole, self._rest, self._hops, strict=True)
        ]

    def prove_large(self) -> None:
        if max(self._lengths()) >= verification.PENDING:
            self.verify()

    def verify(self) -> None:
        lengths, hops = self._lengths(), max(self._hops)
        if not max(lengths) and not self._products:
            return
        self.everyone(verification.SEED, 2)  # V7
        if self._products:
            self.everyone(HASH + self._halves, 2)  # V8
        gates, sums = max(self._whole) + max(self._rest), 1
        last = not hops and max(lengths) <= LAST
        if gates:
            self._point(4 * BLOCKS - 1 + last)
            sums += 1
        while (gates or hops) and not last:
            lengths = [folded_length(n) for n in lengths]
            last = max(lengths) <= LAST
            self._point(2 * FOLD - 1 + last)
            sums += 1
        for i in range(3):
            self.send(i, HASH + 8 * (sums + lengths[(i + 1) % 3]))  # V11, of the next one's proof
            self.send(i, HASH)
        self.everyone(1, 2)  # V12
        self._clear()

    def _point(self, coefficients: int) -> None:
        self.everyone(8 * coefficients)  # V9
        self.everyone(8)  # V10

    def check_zero(self) -> None:
        self.verify()
        self.everyone(HASH)

    def open_all(self, words: int) -> None:
        self.verify()
        self.everyone(HASH)
        self.everyone(8 * words)

    def open_to(self, to: Party, words: int) -> None:
        self._open(to, 8 * words)

    def open(self, to: Party, n: int, ring: Ring) -> None:
        self._open(to, n * ring.size)

    def _open(self, to: Party, size: int) -> None:
        self.verify()
        if to not in self.computing:
            return self.everyone(HASH + size)
        o = self.computing.index(to)
        self.send((o + 2) % 3, size)
        return self.send((o + 1) % 3, HASH)
