"""What the operations of `replicated` send: messages and payload bytes per party, without running them.

The counts are exact, but for `smallest_k` on rows longer than `selection.FEW`, which chooses its comparisons by the
outcome of earlier ones: there they are expected values.
"""

from __future__ import annotations

from collections.abc import Iterable

from cloister.mpc.crypto.replicated import Ring, digit_widths, numbered_ring, plane_bytes
from cloister.mpc.parties import Party
from cloister.mpc.three_party import replicated, selection

PK, SIGNATURE, SEED = 32, 64, 32


class CostModel:
    """Adds up what every member sends."""

    def __init__(self, members: Iterable[Party], computing: tuple[Party, ...]) -> None:
        self.computing = computing
        self.members = tuple(members)
        self._sent: dict[Party, list[float]] = {p: [0, 0.0] for p in self.members}

    def total(self) -> dict[Party, tuple[int, int]]:
        return {p: (int(n), round(size)) for p, (n, size) in self._sent.items()}

    def send(self, party: Party | int, size: float, times: float = 1) -> None:
        row = self._sent[self.computing[party] if isinstance(party, int) else party]
        row[0] += times
        row[1] += size * times

    def meet(self) -> None:
        others = [p for p in self.members if p not in self.computing]
        for i in range(3):
            self.send(i, PK + SIGNATURE, 2 + len(others))
        for p in others:
            self.send(p, PK + SIGNATURE, 3)
            self.send(p, 2 * SEED)
            self.send(p, SEED, 2)

    def input(self, owner: Party, n: int, ring: Ring) -> None:
        self.send(owner, n * ring.size, 1 if owner in self.computing else 2)

    def open(self, to: Party, n: int, ring: Ring) -> None:
        if to in self.computing:
            self.send((self.computing.index(to) + 2) % 3, n * ring.size)
        else:
            self.send(0, n * ring.size)
            self.send(1, n * ring.size)

    def everyone(self, size: float, times: float = 1) -> None:
        for i in range(3):
            self.send(i, size, times)

    def reshare(self, n: int, ring: Ring) -> None:
        self.everyone(n * ring.size)

    def ands(self, planes: int, n: int) -> None:
        self.everyone(planes * plane_bytes(n))

    def pair(self, size: float) -> None:
        self.send(1, size)
        self.send(2, size)

    def msb(self, n: int, ring: Ring) -> None:
        widths = digit_widths(ring.bits - 1)
        digits, size = len(widths), plane_bytes(n)
        self.send(0, size * (sum(2**w - 1 for w in widths) + 1))
        if n >= replicated.DEEP:
            self.pair(digits * size)
            self.everyone(size, digits - 1)
            return
        self.pair((2 * digits - 1) * size)
        while digits > 1:
            h = digits // 2
            self.everyone((2 * h - 1) * size)
            digits -= h

    def equal(self, n: int, ring: Ring) -> None:
        widths = digit_widths(ring.bits)
        size, left = plane_bytes(n), len(widths)
        self.send(0, size * sum(2**w - 1 for w in widths))
        self.pair(left * size)
        while left > 1:
            self.everyone(left // 2 * size)
            left -= left // 2

    def low_bits(self, n: int, count: int) -> None:
        size = plane_bytes(n)
        self.send(0, count * size)
        self.pair(count * size)
        self.everyone(size, count - 1)

    def inject(self, rows: int, n: int, ring: Ring) -> None:
        self.send(0, rows * n * ring.size)
        self.pair(rows * n * ring.size)

    def smaller(self, n: int, ring: Ring) -> None:
        self.msb(n, ring)
        self.inject(1, n, ring)
        self.reshare(n, ring)

    def onehot(self, rows: int, n: int, ring: Ring) -> None:
        while n > 1:
            self.smaller(rows * (n // 2), ring)
            self.reshare(rows * (n // 2), ring)
            n -= n // 2

    def smallest_k(self, rows: int, n: int, k: int, ring: Ring) -> None:
        ring = numbered_ring(ring, n)
        for sender in (2, 0, 1, 2):
            self.send(sender, rows * n * ring.size)
        for pairs in selection.expected(rows, n, k):
            self.msb(pairs, ring)
            self.everyone(plane_bytes(pairs))
        self.send(0, rows * k * ring.size)
