"""Audit: one holder checks for all of them that the aggregator added up what it was sent, and told everyone the same.

Every polynomial that the aggregator hands out is a sum of shares p_i, one from each holder, and of what the auditor v
(the first holder) knows already. With r uniform over the coefficients and α over the polynomials, drawn after the fact:

    L1  v → i   ρ                       the seed of r and α
    L2  i → v   t_i = Σ_p α_p·⟨r, p_i⟩  modulo every prime, twice; d_i, a hash of all that the aggregator told i
        v       Σ_i t_i = Σ_p α_p·⟨r, p⟩ for the sums p that it got, and every d_i is its own
    L3  v → i   passed

Messages go straight from holder to holder: the aggregator sees neither ρ nor t_i before it is bound to its sums.

Reveals
-------
holder : nothing but that the audit passed. The auditor sees two numbers per prime of every holder's shares, which are
    noise to it (ring-LWE samples, or hidden by pairwise masks).
aggregator : nothing.

Assumes
-------
Authenticated channels between holders. The aggregator may deviate arbitrarily: if its sums are wrong, it passes with
probability 2^-70.
A malicious holder makes the run stop, no more: the aggregator's sums are right then. An aggregator together with a
holder that lies for it is not caught.

Cost
----
Per holder but the auditor: 1 message, 16 bytes for every prime and 32; the auditor sends two to each.

References
----------
Freivalds, IFIP 1977: a sum is compared at a random point; lines numbered here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from cloister.arrays import U64
from cloister.errors import ParameterError, ProtocolAbort
from cloister.mpc.crypto.ckks import scheme as ckks
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.crypto.prg import Prg
from cloister.mpc.crypto.rns.ring import Residues
from cloister.mpc.net.channel import Channel
from cloister.mpc.net.wire import message
from cloister.mpc.parties import Party

NAME = "collective_audit"
REPEATS = 2


def check_holders(holders: tuple[Party, ...], aggregator: Party) -> None:
    if len(holders) < 2 or len(set(holders)) != len(holders) or aggregator in holders:
        raise ParameterError(
            f"a collective key needs at least two holders, all different and none the aggregator; found {len(holders)}"
        )


@dataclass(frozen=True, slots=True)
class Collective:
    """What every protocol under a collective key agrees on: who holds a share, who aggregates, the scheme."""

    holders: tuple[Party, ...]
    aggregator: Party  # S
    ckks: ckks.Parameters

    def __post_init__(self) -> None:
        check_holders(self.holders, self.aggregator)

    @property
    def auditor(self) -> Party:
        return self.holders[0]

    @property
    def audit(self) -> Params:
        return Params(self.holders, self.aggregator, self.ckks)


@dataclass(frozen=True, slots=True)
class Params(Collective):  # public; hashed into the run id, as those of all that follow
    pass


class AuditLog:
    """What one holder sent and was told since the last audit; the auditor's has the sums, too."""

    def __init__(self) -> None:
        self.shares: list[Residues] = []
        self.totals: list[Residues] = []
        self._heard = hashlib.sha256()

    def sent(self, *shares: Residues) -> None:
        self.shares.extend(shares)

    def heard(self, *parts: bytes) -> None:
        for data in parts:
            self._heard.update(len(data).to_bytes(8, "big") + data)

    def total(self, *sums: Residues) -> None:
        self.totals.extend(sums)

    @property
    def digest(self) -> bytes:
        return self._heard.digest()


@message("L1")
class Challenge:  # v → i
    seed: bytes


@message("L2")
class Point:  # i → v
    t: U64  # (2, k)
    told: bytes


@message("L3")
class Passed:  # v → i
    pass


def ideal(params: Params, books: Mapping[Party, AuditLog]) -> dict[Party, None]:
    return dict.fromkeys((params.aggregator, *params.holders))


def roles(params: Params) -> dict[Party, object]:
    return {params.aggregator: bystander} | dict.fromkeys(params.holders, holder)


def cost(params: Params, primes: int) -> dict[Party, tuple[int, int]]:
    """Messages and payload, where the longest polynomial has so many primes."""
    others = len(params.holders) - 1
    each = dict.fromkeys(params.holders, (1, 8 * REPEATS * primes + 32))
    return each | {params.aggregator: (0, 0), params.auditor: (2 * others, 32 * others)}


def point(params: Params, seed: bytes, polynomials: list[Residues]) -> U64:
    """Σ_p α_p·⟨r, p⟩ modulo every prime, (2, k): linear in the polynomials."""
    c = ckks.context(params.ckks)
    k, prg = max(len(p) for p in polynomials), Prg(seed)
    hashes = np.zeros((REPEATS, k), np.uint64)
    for repeat in range(REPEATS):
        r = c.ring.uniform(prg, k)
        for p in polynomials:
            alpha = [int(prg.below(q, 1)[0]) for q in c.primes[: len(p)]]
            for j, x in enumerate(c.ring.inner(r, p)):
                hashes[repeat, j] = (int(hashes[repeat, j]) + alpha[j] * int(x)) % c.primes[j]
    return hashes


async def holder(ch: Channel, params: Params, book: AuditLog, *, entropy: Entropy) -> None:
    """One holder's part; raises at all of them if a sum is wrong. The book is empty afterwards."""
    k = max(len(p) for p in book.shares)
    if ch.me == params.auditor:
        await _auditor(ch, params, book, k, entropy)
    else:
        seed = (await ch.recv(params.auditor, Challenge)).seed  # L1
        if len(seed) != 32:
            raise ProtocolAbort(NAME, "L1", "malformed", f"'{params.auditor}' sent no seed of 32 bytes")
        await ch.send(params.auditor, Point(point(params, seed, book.shares), book.digest))  # L2
        await ch.recv(params.auditor, Passed)  # L3
    book.__init__()  # type: ignore[misc]


async def _auditor(ch: Channel, params: Params, book: AuditLog, k: int, entropy: Entropy) -> None:
    if [len(p) for p in book.totals] != [len(p) for p in book.shares]:
        raise ParameterError("an audit needs one sum for every share")
    others, seed = params.holders[1:], entropy.bytes(32)
    await ch.scatter(others, Challenge(seed))  # L1
    primes = np.array(ckks.context(params.ckks).primes[:k], object)
    sums = point(params, seed, book.shares).astype(object)
    for i, got in (await ch.gather(others, Point, t=(REPEATS, k))).items():  # L2
        if got.told != book.digest:
            raise ProtocolAbort(
                NAME, "L2", "told", f"'{i}' received something else from '{params.aggregator}' than I was"
            )
        sums = sums + got.t.astype(object)
    if (sums % primes != point(params, seed, book.totals).astype(object)).any():
        raise ProtocolAbort(
            NAME, "L2", "sum", f"what '{params.aggregator}' handed out is not the sum of what the holders sent"
        )
    await ch.scatter(others, Passed())  # L3


async def bystander(ch: Channel, params: Params) -> None:
    """The aggregator, who sends nothing."""
