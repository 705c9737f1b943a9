"""Shared codes: three parties hold the sites' codes in shares, and rows of their distances.

    C1   u → 0, 1, 2   the codes X_u (n_u × L bits), shared modulo 2^κ > 2L
    C2   0, 1, 2       H = X (1 - 2X)ᵀ + 1 (X1)ᵀ: every party has a masked summand of any block, without sending a word

Who computes: the first three sites, or two sites and the server.

Reveals
-------
computing party : how many points each site has, and nothing else; two of them together learn all codes. With two sites
    the server computes as third, and a single site and the server learn the other's codes.

Assumes
-------
Semi-honest parties; no two of the three computing parties collude; `replicated`'s links.

Cost
----
w n_u L bytes from a computing site and twice as many from another, w = ⌈κ/8⌉; C2 is a product of matrices at each.

References
----------
[AFL+16] Araki et al., CCS 2016: the product. Lines numbered here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from cloister.arrays import U8
from cloister.errors import ParameterError
from cloister.models import graph
from cloister.mpc.crypto.replicated import Ring, Words
from cloister.mpc.three_party.replicated import Shared, Trio, join
from cloister.study import Party


@dataclass(frozen=True, slots=True)
class Pair:
    """Two sites whose points are compared, as `hamming_ot` and `hamming_he` do it."""

    first: Party
    second: Party
    n_first: int
    n_second: int
    bits: int

    def __post_init__(self) -> None:
        if self.first == self.second or min(self.n_first, self.n_second) < 1:
            raise ParameterError("distances between two sites need two sites with points")

    @property
    def fewer(self) -> Party:
        """The site with fewer points; of equal ones the first."""
        return self.first if self.n_first <= self.n_second else self.second

    @property
    def other(self) -> Party:
        return self.second if self.fewer == self.first else self.first

    def size(self, u: Party) -> int:
        return self.n_first if u == self.first else self.n_second

    def check_codes(self, me: Party, packed: U8) -> None:
        if packed.shape != (self.size(me), self.bits // 8):
            raise ParameterError(f"expected codes {(self.size(me), self.bits // 8)}, found {packed.shape}")


def pair_ideal(params: Pair, xs: Mapping[Party, U8]) -> dict[Party, Words]:
    """The whole at one of them; the roles return two summands of it."""
    H = graph.hamming(xs[params.first], xs[params.second]).astype(ring_of(params.bits).dtype)
    return {params.first: H, params.second: np.zeros_like(H.T)}


def check(sites: tuple[Party, ...], sizes: tuple[int, ...], bits: int, server: Party) -> None:
    if len(sites) < 2 or len(set(sites)) != len(sites) or server in sites or len(sizes) != len(sites):
        raise ParameterError(f"distances between sites need at least two sites, all different; found {len(sites)}")
    if min(sizes) < 1:
        raise ParameterError("a site without points has nothing to be compared with")
    if bits % 8 or not 8 <= bits <= graph.MAX_BITS:
        raise ParameterError(f"'bits' must be a multiple of 8 up to {graph.MAX_BITS}, found {bits}")


def computing(sites: tuple[Party, ...], server: Party) -> tuple[Party, Party, Party]:
    """Who computes: the first three sites, or two sites and the server."""
    if len(sites) == 2:
        return sites[0], sites[1], server
    return sites[0], sites[1], sites[2]


def ring_of(bits: int) -> Ring:
    """Signed, and beyond L + 1, which stands for a distance larger than any."""
    return Ring.holding(bits + 1)


def offsets(sizes: tuple[int, ...]) -> list[int]:
    return [int(x) for x in np.cumsum([0, *sizes])]


def check_codes(sites: tuple[Party, ...], sizes: tuple[int, ...], bits: int, me: Party, packed: U8) -> None:
    n = sizes[sites.index(me)]
    if packed.dtype != np.uint8 or packed.shape != (n, bits // 8):
        raise ParameterError(f"expected {n} codes of {bits // 8} bytes, found {packed.dtype} of shape {packed.shape}")


def difference(ones: Shared, trio: Trio) -> Shared:
    """1 - 2x for shared bits x."""
    return trio.constant(np.ones(ones.shape, np.int64), ones.ring) - ones.times(2)


class SharedCodes:
    """Shared bits of all sites' points at a computing party, and rows of H from them."""

    def __init__(self, trio: Trio, x: Shared) -> None:
        self._trio, self.x = trio, x
        self._right = difference(x, trio).map(lambda w: np.ascontiguousarray(w.T))
        self._ones = x.sum(axis=1)

    def summand(self, rows: slice, columns: slice) -> Words:
        """Masked summand of H[rows, columns] at this party; C2."""
        z = self._trio.matmul_summand(self.x[rows], self._right[:, columns])
        return z + self._ones.a[columns][None, :]


async def share_codes(
    trio: Trio, sites: tuple[Party, ...], sizes: tuple[int, ...], bits: int, packed: U8 | None
) -> SharedCodes | None:
    """C1; `packed` is what this member holds, None at the server. None comes back to whoever does not compute."""
    ring = ring_of(bits)
    parts = []
    for u, n in zip(sites, sizes, strict=True):
        mine = np.unpackbits(packed, axis=1).astype(ring.dtype) if packed is not None and u == trio.ch.me else None
        parts.append(await trio.input(u, mine, (n, bits), ring))
    known = [p for p in parts if p is not None]
    return SharedCodes(trio, join(known, axis=0)) if trio.rank is not None else None
