"""The check of an encrypted training before anything that depends on its models is opened: copies, keys and range.

Every sample of a batch has its own copy of [M]. A site that shifts one copy, or makes a switching key wrong in the
slots of one sample, would have that sample outweigh all others. So all [M] since the last check are compared:

    S       while steps run: Σ_t ρ_κt·[M_t], where S alone knows ρ
    L6  S → i   the seed of ρ, once the last [M] is fixed
        all     `collective_range` of these sums and of [Z], which then wrap nowhere
        all     `equal_copies` of the same

[Z] are sparse encryptions of zero, made of the models so that nobody knew them when the keys were made: two that are
rotated and added as a site does with logits, by all rotation keys, and two that are relinearised. Their plaintext is
small if the keys are right.

A seed that was sent is not used for later steps: S stores that it was sent before it sends it (`REVEALED`), goes back
behind no such state, and has the check finished before a run goes on from it.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from cloister.arrays import I64
from cloister.errors import DataError, ProtocolAbort
from cloister.mpc.crypto.ckks import scheme as ckks
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.crypto.prg import Prg
from cloister.mpc.crypto.rns.ring import SIGMA, Residues
from cloister.mpc.net.channel import Channel
from cloister.mpc.net.wire import message
from cloister.mpc.threshold_ckks import collective_range, equal_copies
from cloister.mpc.threshold_ckks.collective_key import added
from cloister.study import Party
from cloister.workflows.train_cellcnn.cellcnn_circuit import Layout, add_over_markers
from cloister.workflows.train_cellcnn.training_keys import NAME, Keys
from cloister.workflows.train_cellcnn.training_terms import Terms

TESTS = 2  # of every kind of key
SPARSE = 32  # coefficients of the randomness of a test
REVEALED = "revealed"  # part of a state of S whose seed was sent


@message("L6", protocol=NAME)
class Weighted:  # S → i
    seed: bytes  # of ρ
    steps: int  # since the last check that S finished


def cells(L: Layout) -> list[I64]:
    """Per class group, the number of every slot's cell: (j, c, all samples); -1 where nothing stands."""
    tables = []
    for group in L.groups:
        table = np.full((L.J, L.R), -1, np.int64)
        for c in range(len(group)):
            numbers = np.arange(L.config.markers) * L.O + c
            table[: L.config.markers, c * L.I : (c + 1) * L.I] = numbers[:, None]
        flat = table.ravel()
        _, dense = np.unique(flat[flat >= 0], return_inverse=True)
        flat[flat >= 0] = dense
        tables.append(flat)
    return tables


@functools.lru_cache(maxsize=16)
def copies(params: Terms) -> equal_copies.Params:
    L, who = params.layout, (params.holders, params.aggregator, params.ckks)
    digests = tuple(map(equal_copies.digest, cells(L)))
    zeros = (rotated_noise(L),) * TESTS + (relinearised_noise(L),) * TESTS
    return equal_copies.Params(
        *who, L.ladder.query, params.ckks.scale, digests, params.config.steps, zeros, L.value_bits
    )


@functools.lru_cache(maxsize=16)
def ranges(params: Terms) -> collective_range.Params:
    """Of all sums over steps, which are larger than one [M], and of [Z]."""
    P, L, steps = copies(params), params.layout, params.config.steps
    larger = math.ceil(equal_copies.WEIGHT_BITS + math.log2(steps) / 2)
    count = equal_copies.REPEATS * len(L.groups) + len(P.zeros)
    return collective_range.Params(
        params.holders, params.aggregator, params.ckks, P.primes, count, P.scale, L.value_bits + larger
    )


def cost(params: Terms) -> dict[Party, tuple[int, int]]:
    parts = [collective_range.cost(ranges(params)), equal_copies.cost(copies(params))]
    return added(*parts, {params.aggregator: (len(params.holders), 32 * len(params.holders))})


# ---- tests of keys ---------------------------------------------------------------------------------------------------


def _sparse_noise(L: Layout) -> float:
    """Standard deviation of a sparse zero's noise, per coefficient."""
    return SIGMA * math.sqrt(L.parties * SPARSE)


def rotated_noise(L: Layout) -> float:
    """Euclidean norm of the noise of a zero that was added over markers, at most."""
    each = 1.5 * math.hypot(_sparse_noise(L), 2 * ckks.rounding_noise(L.ckks, L.parties))
    return each * math.sqrt(L.J * L.ckks.degree)


def relinearised_noise(L: Layout) -> float:
    """The same of a zero's product with (0, 1), whose noise is multiplied by the secret key."""
    key = math.sqrt(L.ckks.degree * (2 / 3) * L.parties)
    each = 1.5 * math.hypot(_sparse_noise(L) * key, 2 * ckks.rounding_noise(L.ckks, L.parties))
    return each * math.sqrt(L.ckks.degree)


def sparse_zero(c: ckks.Context, key: ckks.PublicKey, k: int, prg: Prg) -> ckks.Cipher:
    """The public key times a sparse ternary polynomial: a zero with little noise. It hides nothing."""
    N, r = c.params.degree, c.ring
    u = np.zeros(N, np.int64)
    for at, sign in zip(prg.below(N, SPARSE), prg.below(2, SPARSE), strict=True):
        u[int(at)] += 2 * int(sign) - 1
    factor = r.forward(r.of_small(u, k))
    return c.cipher(np.stack([r.add_product(r.zeros(k), part, factor) for part in (key.b, key.a)]), c.params.scale)


def zeros(params: Terms, keys: Keys, model: Sequence[ckks.Cipher]) -> list[ckks.Cipher]:
    """[Z], as `copies` lists them."""
    c, L = ckks.context(params.ckks), params.layout
    h = hashlib.sha256(b"cloister/training_check/zeros/")
    for ct in model:
        h.update(c.pack(ct.polys[0]))
    prg, k, made = Prg(h.digest()), L.ladder.primes[0], []
    for _ in range(TESTS):
        made.append(add_over_markers(c, L, sparse_zero(c, keys.public, k, prg), keys.rotation))
    for _ in range(TESTS):
        x = sparse_zero(c, keys.public, k, prg)
        out = c.bases.switched(c.bases.digits(x.polys[1]), [keys.relin])  # of (0, x0, x1), whose plaintext is s·e
        c.ring.add(out[1], x.polys[0])
        made.append(c.cipher(out, x.scale))
    return [c.drop(ct, L.ladder.query) for ct in made]


# ---- what a party stores while steps run -----------------------------------------------------------------------------


@dataclass
class Made:
    """At a site: which refreshes made the models since the last check. Their second polynomials follow from it."""

    runs: list[bytes] = field(default_factory=list)

    @classmethod
    def from_bytes(cls, raw: bytes) -> Made:
        if len(raw) % 32:
            raise DataError("the checkpoint is of an earlier version, without a check of copies; train anew")
        return cls([raw[at : at + 32] for at in range(0, len(raw), 32)])

    def to_bytes(self) -> bytes:
        return b"".join(self.runs)

    def second(self, params: Terms, said: Weighted) -> list[list[Residues]]:
        """For every κ, the second polynomials of Σ_t ρ_κt·[M_t]; a site that broke off may have more than S needs."""
        P, G = copies(params), len(params.layout.groups)
        if not 0 <= said.steps <= len(self.runs) or len(said.seed) != 32:
            raise ProtocolAbort(NAME, "L6", "malformed", f"a check of {said.steps} steps, here are {len(self.runs)}")
        sums = equal_copies.Sums(params.ckks, P.primes, G)
        for t, run in enumerate(self.runs[len(self.runs) - said.steps :]):
            polys = [ckks.common(params.ckks, run, f"refresh/{g}", P.primes) for g in range(G)]
            sums.add(equal_copies.weights(said.seed, t), polys)
        return [list(each) for each in sums.polys]


class Weighing:
    """At S: a seed that nobody else has, and the sums."""

    def __init__(self, params: Terms, entropy: Entropy) -> None:
        self._params, self._entropy = params, entropy
        self.clear()

    def clear(self) -> None:
        """Begin again, with a fresh seed."""
        self.seed, self.steps, self.revealed = self._entropy.bytes(32), 0, False
        P, G = copies(self._params), len(self._params.layout.groups)
        self._sums = equal_copies.Sums(self._params.ckks, P.primes, 2 * G)

    def add(self, model: Sequence[ckks.Cipher]) -> None:
        P = copies(self._params)
        polys = [ct.polys[part, : P.primes] for part in (0, 1) for ct in model]
        self._sums.add(equal_copies.weights(self.seed, self.steps), polys)
        self.steps += 1

    def ciphers(self) -> list[list[ckks.Cipher]]:
        c, G = ckks.context(self._params.ckks), len(self._params.layout.groups)
        scale = self._params.ckks.scale
        return [[c.cipher(np.stack([each[g], each[G + g]]), scale) for g in range(G)] for each in self._sums.polys]

    def state(self) -> tuple[dict[str, list[ckks.Cipher]], bytes]:
        """What a checkpoint holds of it: ciphertexts, and the rest in bytes."""
        flat = [ct for each in self.ciphers() for ct in each]
        marks: dict[str, list[ckks.Cipher]] = {REVEALED: []} if self.revealed else {}
        return {"sums": flat} | marks, self.steps.to_bytes(4, "big") + self.seed

    def load(self, state: dict[str, list[ckks.Cipher]], extra: bytes) -> None:
        G, shape = len(self._params.layout.groups), self._sums.polys.shape
        if len(extra) != 36 or len(state.get("sums", [])) * 2 != shape[0] * shape[1]:
            raise DataError("the checkpoint is of an earlier version, without a check of copies; train anew")
        self.steps, self.seed, self.revealed = int.from_bytes(extra[:4], "big"), extra[4:], REVEALED in state
        for at, ct in enumerate(state["sums"]):
            for part in (0, 1):
                self._sums.polys[at // G, part * G + at % G] = ct.polys[part]


# ---- roles -----------------------------------------------------------------------------------------------------------


async def check_at_site(
    ch: Channel, params: Terms, keys: Keys, model: Sequence[ckks.Cipher], made: Made, *, entropy: Entropy
) -> None:
    """Raise unless all models since the last check are alike for all samples."""
    said = await ch.recv_broadcast(params.aggregator, Weighted)  # L6
    Z = [ct.polys[1] for ct in zeros(params, keys, model)]
    sums = made.second(params, said)
    every = [*(p for each in sums for p in each), *Z]
    await collective_range.holder(ch.sub("range"), ranges(params), keys.share, keys.public, every, entropy=entropy)
    P, tables = copies(params), cells(params.layout)
    each = [[*polys, *Z] for polys in sums]
    await equal_copies.holder(ch.sub("copies"), P, keys.share, keys.public, tables, each, entropy=entropy)
    made.runs.clear()


async def check_at_aggregator(
    ch: Channel, params: Terms, keys: Keys, model: Sequence[ckks.Cipher], weighing: Weighing, *, entropy: Entropy
) -> None:
    await ch.broadcast(params.holders, Weighted(weighing.seed, weighing.steps))  # L6
    Z, sums = zeros(params, keys, model), weighing.ciphers()
    every = [*(ct for each in sums for ct in each), *Z]
    await collective_range.aggregator(ch.sub("range"), ranges(params), keys.public, every)
    P, tables = copies(params), cells(params.layout)
    each = [[*cts, *Z] for cts in sums]
    await equal_copies.aggregator(ch.sub("copies"), P, keys.public, tables, each, entropy=entropy)
    weighing.clear()
