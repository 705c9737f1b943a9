"""Count tests: of counts summed over all sites, everyone learns whether each is at least k, and nothing more about it.

The sites hold a common seed Ξ that the coordinator does not know, and draw from it, for every test, the same

    R₁   unit upper triangular, k × k      R₂   the identity with a random last column      ρ   in 1 … p - 1
    r_u  with Σ_u r_u = 0 over the sites that take part

    L1   u       E_u = x_u · R₁ A R₂ + [u is first] · R₁ K R₂ + r_u    mod p,  upper triangle only
    L2   u, S    secure sum of the E_u over the integers, several per word, to S alone
    L3   S       E = Σ E_u mod p = R₁ M(z) R₂, z = Σ x_u;   d = det E = ρ · z (z - 1) ⋯ (z - k + 1)
         S → u   z ≥ k, which is so exactly if d ≠ 0

M(z) = z A + K has ρz, z - 1, …, z - k + 1 on its diagonal and -1 below it. The matrices R₁ M R₂ of one determinant are
all equally likely [IK02], and ρ makes every determinant but 0 equally likely: E says d = 0 or d ≠ 0 and nothing else.
The integer sums carry how often they passed p, which the r_u make a function of E and of fresh coins. k = 1 is the
question whether anything is there at all: one number per test. A site, who knows R₁, R₂ and ρ, would read z from E; so
no site gets E.

A site that drops out takes its r_u along: what is opened then is uniform, and the sum is repeated without it.

Reveals
-------
all : for every test, whether the pooled count is at least k; who of the sites dropped out.
coordinator with one site (who knows Ξ) : the pooled counts themselves. No single site's, unless all others collude.

Assumes
-------
What the secure sum assumes; counts below p. The coordinator does not know Ξ.

Cost
----
Per site: one secure sum of ⌈length · k(k + 1)/2 / lanes⌉ words, lanes = ⌊64 / log2(n(p - 1) + 1)⌋; again for every
site that drops out at this point. One bit per test comes back.

References
----------
[IK02] Ishai, Kushilevitz, ICALP 2002, section 3: randomised encoding of a determinant. Lines numbered here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from cloister.arrays import I64, U8, U64, Bits
from cloister.crypto.agreement import Identity, bind, hkdf
from cloister.crypto.entropy import Entropy
from cloister.crypto.prg import Prg
from cloister.errors import DataError, ParameterError
from cloister.net.channel import Channel
from cloister.net.wire import message
from cloister.protocols.sums import secure_sum
from cloister.study import Party

NAME = "count_tests"


@dataclass(frozen=True, slots=True)
class Params:
    sites: tuple[Party, ...]
    coordinator: Party
    length: int  # how many tests
    least: int  # k
    most: int  # no pooled count is larger

    def __post_init__(self) -> None:
        if self.length < 1 or not 1 <= self.least <= 64:
            raise ParameterError(f"expected at least one test of a count from 1 to 64, found {self.least}")
        if not self.least <= self.most < 2**24:
            raise ParameterError(f"the largest pooled count must be from {self.least} to {2**24}, found {self.most}")

    @property
    def p(self) -> int:
        """The smallest prime above `most`."""
        p = self.most + 1
        while any(p % d == 0 for d in range(2, int(p**0.5) + 1)):
            p += 1
        return p

    @property
    def entries(self) -> int:
        return self.least * (self.least + 1) // 2

    @property
    def bits(self) -> int:
        return (len(self.sites) * (self.p - 1)).bit_length()

    @property
    def lanes(self) -> int:
        return 64 // self.bits

    @property
    def words(self) -> int:
        return -(-self.length * self.entries // self.lanes)

    @property
    def told(self) -> int:
        """Bytes of the outcome."""
        return -(-self.length // 8)

    @property
    def sum(self) -> secure_sum.Params:
        return secure_sum.Params(self.sites, self.coordinator, self.words)  # not to the sites, who know Ξ


@message("L3")
class Outcome:  # S → u
    bits: U8  # (⌈length / 8⌉,)


class Answer(NamedTuple):
    bits: Bits  # (length,)
    present: tuple[Party, ...]  # whose counts are in


def ideal(params: Params, xs: Mapping[Party, I64]) -> dict[Party, Bits]:
    z = np.sum(list(xs.values()), axis=0)
    return dict.fromkeys((params.coordinator, *xs), z >= params.least)


def roles(params: Params) -> dict[Party, object]:
    return {params.coordinator: coordinator} | dict.fromkeys(params.sites, site)


def cost(params: Params) -> dict[Party, tuple[int, int]]:
    found, n = secure_sum.cost(params.sum), len(params.sites)
    messages, payload = found[params.coordinator]
    return found | {params.coordinator: (messages + n, payload + n * params.told)}


# ---- local steps -----------------------------------------------------------------------------------------------------


def encode(params: Params, x: I64, me: Party, present: tuple[Party, ...], key: bytes) -> U64:
    """L1: this site's part of every E, packed; all sites draw the same stream from `key`."""
    n, k, p = params.length, params.least, params.p
    stream = Prg(key)
    upper = np.triu_indices(k)
    strictly = np.triu_indices(k, 1)
    left = np.zeros((n, k, k), np.int64)
    left[:, range(k), range(k)] = 1
    left[:, strictly[0], strictly[1]] = stream.below(p, (n, len(strictly[0]))).astype(np.int64)
    column = stream.below(p, (n, k - 1)).astype(np.int64)
    rho = 1 + stream.below(p - 1, n).astype(np.int64)

    slope = left.copy()  # R₁ A, A = diag(ρ, 1, …, 1)
    slope[:, :, 0] *= rho[:, None]
    made = _last_column(slope % p, column, p)[:, upper[0], upper[1]] * (x[:, None] % p)
    if me == present[0]:
        offset = -left * np.arange(k)  # R₁ K: -j on the diagonal, -1 below it
        offset[:, :, :-1] -= left[:, :, 1:]
        made += _last_column(offset % p, column, p)[:, upper[0], upper[1]]
    rest = np.zeros((n, params.entries), np.int64)
    for u in present[:-1]:
        r = stream.below(p, (n, params.entries)).astype(np.int64)
        rest -= r
        if u == me:
            made += r
    if me == present[-1]:
        made += rest
    return pack(params, (made % p).ravel())


def _last_column(matrix: I64, column: I64, p: int) -> I64:
    """Times R₂, in place: the last column gets the others', times the drawn ones."""
    matrix[:, :, -1] = (matrix[:, :, -1] + np.einsum("nij,nj->ni", matrix[:, :, :-1], column)) % p
    return matrix


def pack(params: Params, values: I64) -> U64:
    padded = np.zeros(params.words * params.lanes, np.uint64)
    padded[: len(values)] = values.astype(np.uint64)
    shifts = np.arange(params.lanes, dtype=np.uint64) * np.uint64(params.bits)
    packed: U64 = np.bitwise_or.reduce(padded.reshape(-1, params.lanes) << shifts, axis=1)
    return packed


def decode(params: Params, z: U64) -> Bits:
    """L3: unpack, reduce, and expand the determinant of a matrix with -1 below the diagonal column by column."""
    n, k, p = params.length, params.least, params.p
    shifts = np.arange(params.lanes, dtype=np.uint64) * np.uint64(params.bits)
    values = (z[:, None] >> shifts) & np.uint64((1 << params.bits) - 1)
    entries = (values.ravel()[: n * params.entries].astype(np.int64) % p).reshape(n, params.entries)
    E = np.zeros((n, k, k), np.int64)
    upper = np.triu_indices(k)
    E[:, upper[0], upper[1]] = entries
    minors = np.ones((n, k + 1), np.int64)
    for j in range(k):
        minors[:, j + 1] = np.einsum("ni,ni->n", E[:, : j + 1, j], minors[:, : j + 1]) % p
    found: Bits = minors[:, k] != 0
    return found


def check_counts(params: Params, x: I64) -> None:
    if x.shape != (params.length,) or x.dtype != np.int64:
        raise ParameterError(f"expected {params.length} counts of int64, found {x.dtype} of shape {x.shape}")
    if len(x) and (x.min() < 0 or x.max() > params.most):
        raise DataError(f"a count lies outside 0 … {params.most}, which the parties agreed on; nothing was sent")


# ---- roles -----------------------------------------------------------------------------------------------------------


async def site(
    ch: Channel,
    params: Params,
    x: I64,
    secret: bytes,
    present: tuple[Party, ...] = (),
    *,
    entropy: Entropy,
    identity: Identity,
) -> Answer:
    """Play u with counts x; `present` are the sites known to take part, all by default."""
    check_counts(params, x)
    present, attempt = present or params.sites, 0
    while True:
        sub = ch.sub(f"try/{attempt}", present)
        y = encode(params, x, ch.me, present, hkdf(secret, bind(NAME, sub.run_id)))  # L1
        survivors = await secure_sum.contribute(sub, params.sum, y, entropy=entropy, identity=identity)  # L2
        if set(survivors) == set(present):
            told = await sub.recv(params.coordinator, Outcome, bits=(params.told,))  # L3
            return Answer(np.unpackbits(told.bits, count=params.length).astype(bool), present)
        present, attempt = _ordered(params, survivors), attempt + 1


async def coordinator(ch: Channel, params: Params, present: tuple[Party, ...] = ()) -> Answer:
    present, attempt = present or params.sites, 0
    while True:
        sub = ch.sub(f"try/{attempt}", present)
        total = await secure_sum.aggregator(sub, params.sum)  # L2
        if set(total.survivors) == set(present):
            bits = ch.reveal(
                decode(params, total.z),
                to=(ch.me, *present),
                line="L3",
                what=f"{params.length} bits: pooled count at least {params.least}",
                protocol=NAME,
            )
            await sub.scatter([u for u in present if not ch.lost(u)], Outcome(np.packbits(bits)))  # L3
            return Answer(bits, present)
        present, attempt = _ordered(params, total.survivors), attempt + 1


def _ordered(params: Params, survivors: tuple[Party, ...]) -> tuple[Party, ...]:
    return tuple(u for u in params.sites if u in survivors)
