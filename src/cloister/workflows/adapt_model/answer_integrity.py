"""What ties an owner's answers to what it was sent. Local steps of `encrypted_inference`.

    before the first batch, of u's switching keys (`Ties.switch_zeros`):
    T1-4        E_i = Σ λ·switched zeros: encryptions of zero that P made, under the key that is switched; then as below
    in every opening:
    L3  P → u   after the values v_1, …, v_n of an opening, also Σ_j r_ij·v_j for i = 1, …, 4: masked like them, to be
                answered like them; r_ij uniform in [-31, 31] (of complex numbers for pairs of values), fresh, P's alone
    L4  u → P   answers a_j, b_i: what is under the masks, times f
    after each block, and before what it tells (L5):
    T1  P       E_i = Σ ⌊λ_i·(b_i - Σ_j r_ij·a_j) / D⌉ over the block's openings, D the last primes of an answer; λ_i
                random and secret, some fraction of D. Encryptions still, so P does not see that E_i is small
        P → u   [E_i + M_i], H(salt, h, z)      M uniform; h and z: its cells and their shifts (`owner_ckks.cover`)
    T2  u → P   H(leaves)                       of the cells z' of what it opens, for both shifts
    T3  P → u   salt, h                         u compares; if z' is not z, its key and this batch are done with
    T4  u → P   z' opened for h, or nothing     P compares; if z' is not z, this batch gets no tap any more

A lie δ in the answer to v_j moves E_i by λ_i·r_ij·δ / D, and who does not know r_ij does not know what to move b_i by,
nor what z' to commit itself to: what it opens is uniform. From about a hundred times `Tie.slack` on, it passes with
probability 2^-20 or less; below, more often; up to the slack always, since the check has to leave room for the noise of
all answers of a block. λ_i hides what would vanish modulo the primes that are left. Lies of a simple fraction α / β of
the modulus, β a Gaussian integer, pass with probability 16·|β|^-4 at most: a fifth for 1 / 3, and only a quarter for (1
+ i) / 2, as half of the modulus at which sums are opened is nearly a multiple of a cell. They break the sums of any
opening that follows, and say of the last projection no more than its weights modulo β.

u learns one bit of E_i a coefficient at most, and too late to use it: r and λ are drawn anew. E_i holds its own lies
and noise, roundings, and, far below these if two primes are dropped, digits times errors of its switching keys. Values
that went round modulo Q, 2^40 times beyond their interval, break the sums as a lie does; which coefficients did shows
then, and the batch is over. A provider that lies learns whether z' is what it said; then u goes on, or uses neither its
key nor the samples at hand any more (`asking_state`).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from cloister.arrays import I64, U8, U64
from cloister.errors import ParameterError
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.crypto.owner_ckks.packed_refresh import dropped
from cloister.mpc.crypto.owner_ckks.rotations import Turns
from cloister.mpc.crypto.owner_ckks.scheme import Evaluator, Opening, Parameters
from cloister.mpc.crypto.owner_ckks.smallness_check import ROOM, SENT, cover
from cloister.mpc.crypto.rns.ring import SIGMA
from cloister.workflows.adapt_model.block_messages import CONTROLS, chunks, pairs
from cloister.workflows.adapt_model.block_plan import checked

REACH = 31  # |r|
LEAST = 1 << 20  # that a secret factor may be at most: it hides by as much
SMALL_PRIMES = math.prod(p for p in range(2, 64) if all(p % i for i in range(2, p)))
SIGMAS = 10.0
MEAN_SQUARE = REACH * (REACH + 1) / 3  # of r


# ---- how far honest answers are off ----------------------------------------------------------------------------------


def noise(params: Parameters, how: Opening) -> float:
    """Standard deviation of an answer's coefficient from what is under the mask, times f."""
    N, lost = params.degree, float(dropped(params, how.primes))
    rounding = (1 + N * 2 / 3) / 12  # of c_0 and of c_1·s, when primes are dropped
    zero = (SIGMA / lost) ** 2 * (1 + 4 * N / 3)  # of Enc(0)
    digits = (SIGMA * 2.0**params.bits / lost) ** 2 * N / 3 * how.primes * (how.polys - 2)  # of switching keys
    f = math.ldexp(how.factor, -how.shift)
    return math.sqrt(SIGMA**2 + 0.5 + 2 * f * f * (rounding + zero + digits))


@dataclass(frozen=True, slots=True)
class Tie:
    """How the sums of one block are weighed, so that all together are small (`cover`) where answers are true."""

    weights: tuple[int, ...]  # the largest λ of each opening
    slack: float  # a lie in one answer that passes whatever r is, in deviations of an honest one; where it is largest

    @classmethod
    def of(cls, params: Parameters, openings: Sequence[Opening]) -> Tie:
        keep = checked(params)
        most = math.ldexp(float(dropped(params, keep, SENT)), ROOM)
        weights, slack = [], 0.0
        for how in openings:
            one, columns = noise(params, how), 2 * sum(map(pairs, chunks(how)))
            share = most / SIGMAS / math.sqrt(len(openings)) / one / math.sqrt(1 + MEAN_SQUARE * columns)
            weights.append(math.floor(share * dropped(params, how.back, keep)))
            slack = max(slack, most / share / REACH / one)
        if min(weights) < LEAST:
            raise ParameterError("sums of answers are too long to be opened; use smaller scales")
        return cls(tuple(weights), slack)

    @classmethod
    def of_keys(cls, params: Parameters, powers: int, tokens: int) -> Tie:
        """The same of switching keys: those of s², s³, …, and of turns."""
        keep, count = checked(params), powers + Turns(tokens).count
        most = math.ldexp(float(dropped(params, keep, SENT)), ROOM) / SIGMAS / math.sqrt(count)
        digits = (SIGMA * 2.0**params.bits) ** 2 * params.degree / 3 * params.count
        zero, times_s = SIGMA**2 * (1 + 4 * params.degree / 3), 2 * params.degree / 3
        of_power = [zero * 4 * math.factorial(m) * times_s**m for m in range(1, powers + 1)]  # |s(ζ)|² is exponential
        each = [math.sqrt(min(m + 1, 2) * digits + x) for m, x in enumerate(of_power)]
        each += [math.sqrt(digits + zero * times_s**h) for _ in Turns(tokens).every for h in range(2)]
        return cls(tuple(math.floor(most / one * dropped(params, params.count, keep)) for one in each), 0.0)


def secret_factor(most: int, entropy: Entropy) -> int:
    """Uniform in [most / 2, most] among the numbers without a factor below 64."""
    while math.gcd(found := most - entropy.integer_below(most // 2), SMALL_PRIMES) != 1:
        pass
    return found


# ---- the provider ----------------------------------------------------------------------------------------------------


@final
class Sums:
    """Of one opening: Σ r·v on the way out, and b - Σ r·a of what comes back.

    Values travel in pairs v + i·v', and r is complex: sums of pairs are pairs of sums, noise and all. A single value at
    the end of a message has a partner too, whose answer counts.
    """

    def __init__(self, ev: Any, messages: Sequence[slice], entropy: Entropy) -> None:
        self._ev, self._sent, self._off = ev, None, None
        places = [np.arange(part.stop - part.start) for part in messages]
        starts = np.cumsum([0] + [2 * pairs(part) for part in messages])
        self._at = np.concatenate([start + place for start, place in zip(starts, places, strict=False)])
        x, y = entropy.prg().below(2 * REACH + 1, (2, CONTROLS // 2, int(starts[-1]) // 2)).astype(np.int64) - REACH
        self._r = np.stack([np.stack([x, -y], axis=2), np.stack([y, x], axis=2)], axis=1)
        self._r = self._r.reshape(CONTROLS, int(starts[-1]))

    def __repr__(self) -> str:
        return "Sums(...)"

    def _with(self, total: Any, r: I64, cts: Any) -> Any:
        made = self._ev.linear(self._ev.weights(r), cts)
        return made if total is None else self._ev.combine([(1, total), (1, made)])

    def add(self, first: int, cts: Any) -> None:
        """Values from number `first` on, as they are before they are masked."""
        self._sent = self._with(self._sent, self._r[:, self._at[first : first + len(cts)]], cts)

    @property
    def controls(self) -> Any:
        """Further values of the opening."""
        return self._sent

    def answered(self, first: int, cts: Any) -> None:
        """The answers to a message that began with value `first`, its last one's partner among them."""
        start = int(self._at[first])
        self._off = self._with(self._off, -self._r[:, start : start + len(cts)], cts)

    def off(self, answers: Any) -> Any:
        """What is left of b - Σ r·a, encrypted: (CONTROLS, 2, k', N)."""
        return self._ev.combine([(1, answers), (1, self._off)])


@final
class Ties:
    """The sums of the block at hand."""

    def __init__(self, ev: Any, plain: Evaluator | None, entropy: Entropy) -> None:
        self._ev, self._plain, self._entropy = ev, plain, entropy  # `plain`: the same key on the CPU, to try keys
        self._off: list[Any] = []

    def add(self, off: Any) -> None:
        """Of the next opening of this block."""
        self._off.append(off)

    def clear(self) -> None:
        """A block begins."""
        self._off = []

    def switch_zeros(self, powers: int, tokens: int) -> None:
        """Encryptions of zero under the owner's public key, times s^m or turned, switched by each of its keys."""
        ev, turns, prg = self._plain, Turns(tokens), self._entropy.prg()
        if ev is None:
            raise RuntimeError("keys are tried on a CPU")
        k, N = ev.params.count, ev.params.degree

        def zeros() -> Any:
            return np.stack([ev.rerandomise(np.zeros((2, k, N), np.uint32), prg) for _ in range(CONTROLS)])

        for m in range(powers):
            cts = np.zeros((CONTROLS, m + 3, k, N), np.uint32)
            cts[:, m + 1 :] = zeros()
            self.add(ev.switched(cts))
        for turn in turns.every:
            for h in range(2):
                cts = np.zeros((CONTROLS, 3, k, N), np.uint32)
                cts[:, [h, 2]] = ev.turned(zeros(), tokens, turn)
                self.add(ev.switched(cts, (powers + 2 * turns.every.index(turn) + h,)))

    def open(self, tie: Tie) -> tuple[Any, U64]:
        """(What u is sent, (CONTROLS, 2, SENT, N); its masks) of all openings so far."""
        if len(self._off) != len(tie.weights):
            raise ParameterError("a block has other openings than were planned")
        ev, params, parts = self._ev, self._ev.params, []
        for most, off in zip(tie.weights, self._off, strict=True):
            factors = [secret_factor(most, self._entropy) for _ in range(CONTROLS)]
            parts.append((1, ev.dropped(ev.combine([(factors, off)]), checked(params))))
        self.clear()
        total = ev.combine(parts)
        return cover(ev, total, self._entropy) if isinstance(ev, Evaluator) else ev.cover(total, self._entropy)


def seal(salt: bytes, h: U8, z: U64) -> bytes:
    """P's commitment."""
    said = h.tobytes() + np.ascontiguousarray(z, "<u8").tobytes()
    return hashlib.sha256(b"cloister tied answers\0" + salt + said).digest()
