"""Count tests: of counts summed over all sites, everyone learns whether each is at least k, and nothing more about it.

The sites hold a common seed Ξ that the coordinator does not know, and draw from it, for every test, the same

    R₁   unit upper triangular, k × k      c_s   k - 1 numbers      ρ_s   in 1 … p - 1      s = 0 … q
    r_u  with Σ_u r_u = 0 over the sites that take part

    L1   u       E_u = its part of the upper triangle of R₁ M(z) and of q + 1 last columns, + r_u    mod p
    L2   u, S    secure sum of the E_u over the integers, several per word, to S alone
    L3   S       d_s = det (R₁ m_1, …, R₁ m_{k-1}, last column s) = ρ_s · z (z - 1) ⋯ (z - k + 1),  z = Σ x_u
         S ⇒ u   z ≥ k, which is so exactly if d_0 ≠ 0; as a proof, a hash of d_s / d_0, s = 1 … q, of all such tests
         u       checks that it is the hash of ρ_s / ρ_0

M(z) has z, z - 1, …, z - k + 1 on its diagonal and -1 below it; m_j are its columns, and last column s is
R₁ (ρ_s m_k + Σ_{j<k} c_sj m_j). By rows from below (R₁) and by the first columns (c_s), this matrix becomes one that
has only the d_s, in the last columns of the first row; so the matrices of given d_s are all equally likely
[IK02], and the ρ_s make (d_0, …, d_q) all zero or uniform. E says z < k or z ≥ k and nothing else. If z < k, S knows
nothing of ρ_s / ρ_0, and a proof that it makes up is right with probability 1 / (p - 1)^q. The integer sums carry how
often they passed p, which the r_u make a function of E and of fresh coins. k = 1 is the question whether anything is
there at all: one number per test. A site, who knows Ξ, would read z from E; so no site gets E.

A site that drops out takes its r_u along: what is opened then is uniform, and the sum is repeated without it, with
fewer sites each time.

Reveals
-------
all : for every test, whether the pooled count is at least k; who of the sites dropped out.
malicious coordinator : the same. It may say "less" where it is not so; with q ≥ 1 it cannot say "at least" where it is
    not so. It may call a site dropped that is there: then the same bits without that site.
one malicious site : nothing more. Its counts are what it says.
coordinator with one site (who knows Ξ) : the pooled counts themselves. No single site's, unless all others collude.

Assumes
-------
What the secure sum assumes; counts below p. The coordinator does not know Ξ. Lies that are not noticed here: (a), (b),
(c), (f) of the coordinator, "less" where it is not so, which who is told something else notices at the next step of the
run, whose id depends on it; (b), (c), (f) of the site, whose words may be those of no count.

Cost
----
Per site: one secure sum of ⌈length · (k(k + 1)/2 + qk) / lanes⌉ words, lanes = ⌊64 / log2(n(p - 1) + 1)⌋; again for
every site that drops out at this point. One bit per test comes back, and a hash.

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
from cloister.errors import DataError, ParameterError, ProtocolAbort
from cloister.mpc.crypto.agreement import Identity, bind, hkdf
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.crypto.prg import Prg
from cloister.mpc.net import wire
from cloister.mpc.net.channel import Channel
from cloister.mpc.net.wire import message
from cloister.mpc.parties import Party
from cloister.mpc.sums import secure_sum

NAME = "count_tests"


@dataclass(frozen=True, slots=True)
class Params:
    sites: tuple[Party, ...]
    coordinator: Party
    length: int  # how many tests
    least: int  # k
    most: int  # no pooled count is larger
    proofs: int = 0  # q: numbers that prove "at least"; where the outcome opens something, at least 1

    def __post_init__(self) -> None:
        if self.length < 1 or not 1 <= self.least <= 64:
            raise ParameterError(f"expected at least one test of a count from 1 to 64, found {self.least}")
        if not 0 <= self.proofs <= 4:
            raise ParameterError(f"expected 0 to 4 proofs per test, found {self.proofs}")
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
        return self.least * (self.least + 1) // 2 + self.proofs * self.least

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
    proof: bytes  # SHA-256 of all d_s / d_0 where the bit is set; empty if q = 0


class Answer(NamedTuple):
    bits: Bits  # (length,)
    present: tuple[Party, ...]  # whose counts are in


def ideal(params: Params, xs: Mapping[Party, I64]) -> dict[Party, Bits]:
    z = np.sum(list(xs.values()), axis=0)
    return dict.fromkeys((params.coordinator, *xs), z >= params.least)


def roles(params: Params) -> dict[Party, object]:
    return {params.coordinator: coordinator} | dict.fromkeys(params.sites, site)


def cost(params: Params) -> dict[Party, tuple[int, int]]:
    parties, n = secure_sum.cost(params.sum), len(params.sites)
    messages, payload = parties[params.coordinator]
    down = params.told + (32 if params.proofs else 0)
    return parties | {params.coordinator: (messages + n, payload + n * down)}


# ---- local steps -----------------------------------------------------------------------------------------------------


def encode(params: Params, x: I64, me: Party, present: tuple[Party, ...], key: bytes) -> tuple[U64, I64]:
    """L1: this site's part of every E, packed, and the ρ (length, q + 1); all sites draw the same stream from `key`."""
    n, k, p = params.length, params.least, params.p
    stream = Prg(key)
    strictly = np.triu_indices(k, 1)
    left = np.zeros((n, k, k), np.int64)  # R₁
    left[:, range(k), range(k)] = 1
    left[:, strictly[0], strictly[1]] = stream.below(p, (n, len(strictly[0]))).astype(np.int64)
    column = stream.below(p, (n, k - 1, params.proofs + 1)).astype(np.int64)  # c
    rho = 1 + stream.below(p - 1, (n, params.proofs + 1)).astype(np.int64)

    made = _triangle(left, column, rho, p) * (x[:, None] % p)  # R₁ z
    if me == present[0]:
        offset = -left * np.arange(k)  # R₁ (M(z) - z): -j on the diagonal, -1 below it
        offset[:, :, :-1] -= left[:, :, 1:]
        made += _triangle(offset % p, column, rho, p)
    rest = np.zeros((n, params.entries), np.int64)
    for u in present[:-1]:
        r = stream.below(p, (n, params.entries)).astype(np.int64)
        rest -= r
        if u == me:
            made += r
    if me == present[-1]:
        made += rest
    return pack(params, (made % p).ravel()), rho


def _triangle(matrix: I64, column: I64, rho: I64, p: int) -> I64:
    """The first k - 1 columns on and above the diagonal, then the last columns: ρ times the last, c of the others."""
    k = matrix.shape[2]
    upper = np.triu_indices(k - 1)
    last = (matrix[:, :, -1:] * rho[:, None, :] + np.einsum("nij,njs->nis", matrix[:, :, :-1], column)) % p
    return np.concatenate([matrix[:, upper[0], upper[1]], last.reshape(len(matrix), -1)], axis=1)


def pack(params: Params, values: I64) -> U64:
    padded = np.zeros(params.words * params.lanes, np.uint64)
    padded[: len(values)] = values.astype(np.uint64)
    shifts = np.arange(params.lanes, dtype=np.uint64) * np.uint64(params.bits)
    packed: U64 = np.bitwise_or.reduce(padded.reshape(-1, params.lanes) << shifts, axis=1)
    return packed


def decode(params: Params, z: U64) -> tuple[Bits, I64]:
    """L3: unpack, reduce, expand determinants of matrices with -1 below the diagonal column by column; the proofs."""
    n, k, p = params.length, params.least, params.p
    shifts = np.arange(params.lanes, dtype=np.uint64) * np.uint64(params.bits)
    values = (z[:, None] >> shifts) & np.uint64((1 << params.bits) - 1)
    entries = (values.ravel()[: n * params.entries].astype(np.int64) % p).reshape(n, params.entries)
    E = np.zeros((n, k - 1, k - 1), np.int64)
    upper = np.triu_indices(k - 1)
    E[:, upper[0], upper[1]] = entries[:, : len(upper[0])]
    last = entries[:, len(upper[0]) :].reshape(n, k, params.proofs + 1)
    minors = np.ones((n, k), np.int64)
    for j in range(k - 1):
        minors[:, j + 1] = np.einsum("ni,ni->n", E[:, : j + 1, j], minors[:, : j + 1]) % p
    d = np.einsum("nis,ni->ns", last, minors) % p
    return d[:, 0] != 0, d[:, 1:] * _inverse(d[:, 0], p)[:, None] % p


def _inverse(x: I64, p: int) -> I64:
    """x^(p - 2) mod p: the inverse, and 0 of 0."""
    power, square, e = np.ones_like(x), x % p, p - 2
    while e:
        power = power * square % p if e & 1 else power
        square, e = square * square % p, e >> 1
    return np.where(x % p == 0, 0, power)


def proof_of(bits: Bits, ratios: I64) -> bytes:
    """L3: one hash for all tests that came out "at least"."""
    return wire.digest(NAME, ratios[bits]) if ratios.shape[1] else b""


def check_proof(params: Params, bits: Bits, proof: bytes, rho: I64) -> None:
    """L3: whoever says "at least" has to know ρ_s / ρ_0."""
    ratios = rho[:, 1:] * _inverse(rho[:, 0], params.p)[:, None] % params.p
    if proof != proof_of(bits, ratios):
        raise ProtocolAbort(NAME, "L3", "proof", "the coordinator calls a pooled count large and cannot prove it")


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
    present = present or params.sites
    for attempt in range(len(params.sites)):
        sub = ch.sub(f"try/{attempt}", present)
        y, rho = encode(params, x, ch.me, present, hkdf(secret, bind(NAME, sub.run_id)))  # L1
        survivors = await secure_sum.contribute(sub, params.sum, y, present, entropy=entropy, identity=identity)  # L2
        if set(survivors) == set(present):
            outcome = await sub.recv_broadcast(params.coordinator, Outcome, bits=(params.told,))  # L3
            bits = np.unpackbits(outcome.bits, count=params.length).astype(bool)
            check_proof(params, bits, outcome.proof, rho)
            return Answer(bits, present)
        present = _ordered(params, survivors)
    raise ProtocolAbort(NAME, "L2", "restart", "more restarts than there are sites")


async def coordinator(ch: Channel, params: Params, present: tuple[Party, ...] = ()) -> Answer:
    present = present or params.sites
    for attempt in range(len(params.sites)):
        sub = ch.sub(f"try/{attempt}", present)
        total = await secure_sum.aggregator(sub, params.sum, present)  # L2
        if set(total.survivors) == set(present):
            bits, ratios = ch.reveal(
                decode(params, total.z),
                to=(ch.me, *present),
                line="L3",
                what=f"of {params.length} counts over all sites, which reach {params.least}",
                protocol=NAME,
            )
            outcome = Outcome(np.packbits(bits), proof_of(bits, ratios))
            await sub.broadcast([u for u in present if not ch.lost(u)], outcome)  # L3
            return Answer(bits, present)
        present = _ordered(params, total.survivors)
    raise ProtocolAbort(NAME, "L2", "restart", "more restarts than there are sites")


def _ordered(params: Params, survivors: tuple[Party, ...]) -> tuple[Party, ...]:
    return tuple(u for u in params.sites if u in survivors)
