"""Oblivious prediction: a querier learns the logits of its samples under a model that stays encrypted.

The querier encrypts nothing: what it might encrypt instead of samples would have the others decrypt it. Two parties p,
the maskers, bring encrypted random numbers that only they and the querier know, and the querier says in the clear how
its samples differ from them. X is on a grid, |X| ≤ 8; r_p of a masker is a sum of three uniform numbers, ±3·2^11:

    L1  p → q   ρ_p                 a seed of r_p for every entry, together with q's nonce
    L2  q → all nonce, d = X - Σ_p r_p
    L3  p → S   [r_p]               per chunk of samples
    L4  S → i   Σ_p [r_p]
        i       `collective_audit` of the sum
        i       [X] = Σ_p [r_p] + d,   [U] = Σ_j [M]·[X]     every site computes it itself
    L5  i → q   c0 of [U]           to a querier from outside: from the first site, and its digest from the others
        all     `key_switch` of [U] to a key of the querier's own, for every chunk and class group

A querier from outside trained nothing and holds neither a share of the key nor the encrypted model.

A masker sees X behind the other masker's r alone, whose density has no steps. Two queries whose entries differ by δ
(Euclidean, all together) look alike to it but for 1.1·δ / 2^12 in total variation, over all runs together.

A ciphertext has room for many more samples than the parties agreed on. Maskers and sites put zero into the places
beyond `donors`, so a querier gets that many answers and no more. Every site charges them to the querier's account
(`key_store.Account`) before its first message: by default half as many as there are markers, over all runs and studies.

Reveals
-------
querier : U = X·M for up to `donors` samples of its choice, which need not be real donors: per class one linear equation
    in the weights for each. As many linearly independent samples as markers determine M. Fewer determine M on their
    span: a querier that asks about single markers learns the weights of these markers.
aggregator, holder : `donors`, the agreed number. Not the samples, not the answer, not the model. Both maskers together
    see the samples: the first two other sites, or, with two sites of which one is the querier, the other site and the
    aggregator.
masker : in addition, X minus the other masker's r, between ±6,144. It tells two queries of 20 donors and 38 markers
    apart with an advantage of 0.008 in one run, if all entries differ by 1. It excludes a value of an entry with
    probability (X / 2^12)³ / 6.

Assumes
-------
As `encrypted_training`, whose keys, auditor and [M] it uses. Any one party may lie. Whatever the querier says at L2,
[X] is an encryption that others made, of numbers below 24,584. [M] passed `collective_range` at every holder that
answers; the scale of [X] is so large that its noise stays below the flood for every [M] that may pass. A masker or a
site that deviates shifts the querier's answer without learning it: logits beyond ±64 are clipped, so the querier goes
on whatever they are. Evaluation is deterministic, so all sites get the same [U], and an outsider notices a site that
sends something else.

Cost
----
Querier: 32 bytes and 8 for every entry to everyone. Masker: one ciphertext up per chunk of I samples. Per site, chunk
and class group: one product, log2(markers) rotations, one key-switch share.

References
----------
[SAV22] Sav et al., PriCell, Patterns 2022, oblivious inference. Lines numbered here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from cloister.arrays import F64, I64, U64
from cloister.errors import DataError, ParameterError, ProtocolAbort
from cloister.models import cellcnn
from cloister.mpc.crypto.ckks import scheme as ckks
from cloister.mpc.crypto.ckks.scheme import GRID
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.crypto.prg import Prg
from cloister.mpc.net.channel import Channel
from cloister.mpc.net.wire import message
from cloister.mpc.threshold_ckks import collective_audit, key_switch
from cloister.mpc.threshold_ckks.collective_audit import AuditLog, check_holders
from cloister.mpc.threshold_ckks.collective_key import added, read
from cloister.study import Party
from cloister.workflows.train_cellcnn.cellcnn_circuit import Layout, add_over_markers
from cloister.workflows.train_cellcnn.encrypted_training import Trained, check_model
from cloister.workflows.train_cellcnn.key_store import Account
from cloister.workflows.train_cellcnn.level_schedule import QUERY
from cloister.workflows.train_cellcnn.training_keys import Keys

NAME = "oblivious_prediction"
LARGEST_X = 8
WIDTH_BITS = 12  # of each of the three uniform numbers of a mask
LARGEST_R = 3 << (WIDTH_BITS - 1)
LARGEST_LOGIT = 64.0


@dataclass(frozen=True, slots=True)
class Params:  # public
    holders: tuple[Party, ...]
    aggregator: Party
    querier: Party  # one of the holders, or a party from outside
    ckks: ckks.Parameters
    config: cellcnn.Config
    chunks: int  # ciphertexts of the query
    donors: int = 0  # samples that are answered; 0: as many as the ciphertexts hold

    def __post_init__(self) -> None:
        check_holders(self.holders, self.aggregator)
        if self.querier == self.aggregator or self.chunks < 1:
            raise ParameterError("a query comes from a site, not from the aggregator, and has at least one sample")
        if not 0 <= self.donors <= self.chunks * self.layout.I:
            raise ParameterError(
                f"{self.chunks} ciphertexts hold {self.chunks * self.layout.I} samples, found {self.donors}"
            )

    @property
    def outside(self) -> bool:
        return self.querier not in self.holders

    @property
    def layout(self) -> Layout:
        return Layout(self.config, self.ckks, len(self.holders))

    @property
    def audit(self) -> collective_audit.Params:
        return collective_audit.Params(self.holders, self.aggregator, self.ckks)

    @property
    def maskers(self) -> tuple[Party, Party]:
        first, second, *_ = (*(i for i in self.holders if i != self.querier), self.aggregator)
        return first, second

    @property
    def entries(self) -> tuple[int, int]:
        """Samples that are answered, markers."""
        return self.donors or self.chunks * self.layout.I, self.config.markers

    def parts(self, table: F64) -> list[F64]:
        """The samples of every chunk; places beyond the last sample stay zero in `Layout.input_slots`."""
        return [table[at * self.layout.I : (at + 1) * self.layout.I] for at in range(self.chunks)]


@message("L1")
class Seed:  # p → q
    seed: bytes


@message("L2")
class Query:  # q → all
    nonce: bytes
    d: I64  # (donors, m), on the grid


@message("L3")
class Mask:  # p → S
    c0: bytes
    c1: bytes


@message("L4")
class Masks:  # S → i
    c0: bytes
    c1: bytes


@message("L5")
class Result:  # the first site → q
    c0: bytes


@message("L5")
class Seen:  # i → q
    digest: bytes


def ideal(params: Params, inputs: Mapping[Party, tuple[cellcnn.Weights, F64]]) -> dict[Party, F64 | None]:
    """Logits, to the querier alone."""
    w, X = inputs[params.querier]
    return dict.fromkeys((params.aggregator, *params.holders, params.querier)) | {params.querier: X @ w.M}


def roles(params: Params) -> dict[Party, object]:
    return (
        {params.aggregator: aggregator}
        | dict.fromkeys(params.holders, holder)
        | {params.querier: outsider if params.outside else querier}
    )


def cost(params: Params) -> dict[Party, tuple[int, int]]:
    c, n = ckks.context(params.ckks), len(params.holders)
    k, G, one = params.chunks, len(params.layout.groups), params.layout.ladder.query
    size, entries, told = 2 * c.packed(one), int(np.prod(params.entries)), n + params.outside
    parts: list[dict[Party, tuple[int, int]]] = [
        dict.fromkeys(params.holders, (0, 0))
        | {params.aggregator: (k * n, k * n * size), params.querier: (told, told * (32 + 8 * entries))}
    ]
    parts += [
        {p: (1 + (k if p != params.aggregator else 0), 32 + (k * size if p != params.aggregator else 0))}
        for p in params.maskers
    ]
    parts += [collective_audit.cost(params.audit, one)]
    if params.outside:
        first, *rest = params.holders
        parts += [{first: (k * G, k * G * c.packed(params.ckks.base))} | dict.fromkeys(rest, (k * G, 32 * k * G))]
    parts += [key_switch.cost(switch(params))] * (k * G)
    return added(*parts)


def chunks(config: cellcnn.Config, params: ckks.Parameters, parties: int, samples: int) -> int:
    return -(-samples // Layout(config, params, parties).I)


def switch(params: Params) -> key_switch.Params:
    P, noise = params.ckks, params.layout.query_noise
    return key_switch.Params(params.holders, params.querier, P, P.base, P.scale, noise)


def sample_scale(params: Params) -> float:
    """Of the samples: what the product spends, so that the logits stand at Δ."""
    return ckks.context(params.ckks).dropped(params.layout.ladder.query, QUERY)


def evaluate(params: Params, model: list[ckks.Cipher], x: ckks.Cipher, keys: Keys) -> list[ckks.Cipher]:
    """[U] of one chunk, per class group, at the base primes."""
    c, L = ckks.context(params.ckks), params.layout
    logits = [add_over_markers(c, L, c.times(M, x, keys.relin, QUERY), keys.rotation) for M in model]
    for U in logits:
        U.scale = params.ckks.scale
    return logits


def check_samples(params: Params, X: F64) -> None:
    most, markers = params.entries
    if X.ndim != 2 or X.shape[1] != markers or not 0 < len(X) <= most:
        raise DataError(f"expected up to {most} samples of {markers} markers, found shape {X.shape}")
    if not np.isfinite(X).all() or np.abs(X).max() > LARGEST_X:
        raise DataError(
            f"a marker's mean lies beyond ±{LARGEST_X} or is missing; standardise the markers as in training"
        )


# ---- masks -----------------------------------------------------------------------------------------------------------


def drawn(params: Params, seed: bytes, nonce: bytes) -> I64:
    """r_p of one masker, on the grid; the querier's nonce is in it, so that no masker chooses its r_p."""
    prg = Prg(hashlib.sha256(b"cloister/oblivious_prediction/" + seed + nonce).digest())
    parts = [prg.below(1 << (WIDTH_BITS + GRID), params.entries).astype(np.int64) for _ in range(3)]
    return np.asarray(sum(parts) - (LARGEST_R << GRID), np.int64)


def masked(params: Params, X: F64, seeds: Mapping[Party, bytes], nonce: bytes) -> Query:
    """L2: d of every entry."""
    x = np.zeros(params.entries)
    x[: len(X)] = X
    grid = np.rint(np.ldexp(x, GRID)).astype(np.int64)
    return Query(nonce, grid - sum(drawn(params, seed, nonce) for seed in seeds.values()))


def check_query(params: Params, query: Query) -> Query:
    if len(query.nonce) != 32:
        raise ProtocolAbort(NAME, "L2", "malformed", f"'{params.querier}' sent no nonce of 32 bytes")
    most = (LARGEST_X + 2 * LARGEST_R) << GRID
    if query.d.max() > most or query.d.min() < -most:  # not by np.abs: that of -2^63 is negative
        raise ProtocolAbort(NAME, "L2", "range", f"'{params.querier}' queries numbers that no sample has")
    return query


async def mask(ch: Channel, params: Params, trained: Trained, entropy: Entropy) -> tuple[Query, list[U64]]:
    """L1 to L3 at a party that is not the querier: its encrypted masks, if it is a masker."""
    c, L, q = ckks.context(params.ckks), params.layout, params.querier
    seed = entropy.bytes(32)
    if ch.me in params.maskers:
        await ch.send(q, Seed(seed))  # L1
    query = check_query(params, await ch.recv_broadcast(q, Query, d=params.entries))  # L2
    if ch.me not in params.maskers:
        return query, []
    masked = []
    for part in params.parts(np.ldexp(drawn(params, seed, query.nonce).astype(np.float64), -GRID)):
        masked.append(
            c.raw(c.encrypt(trained.keys.public, L.input_slots(part), L.ladder.query, sample_scale(params), entropy))[0]
        )
    if ch.me != params.aggregator:
        for raw in masked:
            await ch.send(params.aggregator, Mask(c.pack(raw[0]), c.pack(raw[1])))  # L3
    return query, masked


async def inputs(ch: Channel, params: Params, query: Query, mine: list[U64], entropy: Entropy) -> list[ckks.Cipher]:
    """L4 at a site: [X] of every chunk, audited."""
    c, L, S, one, book = (
        ckks.context(params.ckks),
        params.layout,
        params.aggregator,
        params.layout.ladder.query,
        AuditLog(),
    )
    sums = []
    for part in range(params.chunks):
        got = await ch.recv(S, Masks)  # L4
        sums.append(np.stack([read(c, x, one, NAME, "L4", S) for x in (got.c0, got.c1)]))
        book.heard(got.c0, got.c1)
        book.sent(*(mine[part] if mine else np.zeros_like(sums[-1])))
        book.total(*sums[-1])
    if S not in params.maskers:  # else its own part is in the sum, and nobody else knows it
        apart = params.outside  # then the querier has no part in it, and what follows is bound by its question alone
        await collective_audit.holder(ch.sub("audit", apart=apart), params.audit, book, entropy=entropy)
    batches = []
    for raw, d in zip(sums, params.parts(np.ldexp(query.d.astype(np.float64), -GRID)), strict=True):
        batches.append(c.add_exact(c.cipher(raw, sample_scale(params)), L.input_slots(d)))
    return batches


# ---- roles -----------------------------------------------------------------------------------------------------------


async def querier(ch: Channel, params: Params, trained: Trained, X: F64, *, entropy: Entropy) -> F64:
    """The part of the site that asks. X (samples, m) → logits (samples, o)."""
    check_samples(params, X)
    check_model(trained)
    c, share = ckks.context(params.ckks), trained.keys.share
    trained.keys.spend(params.chunks * len(params.layout.groups))
    query, answer = await ask(ch, params, X, entropy), Logits(params)
    for part, x in enumerate(await inputs(ch, params, query, [], entropy)):
        for g, U in enumerate(evaluate(params, trained.model, x, trained.keys)):
            (c0, c1), _ = c.raw(U)
            sub = ch.sub(f"{part}/{g}")
            answer.put(part, g, await key_switch.querier(sub, switch(params), share, c1, c0, entropy=entropy))
    return answer.of(len(X))


async def outsider(ch: Channel, params: Params, X: F64, *, entropy: Entropy) -> F64:
    """The part of a party that asks and trained nothing. X (samples, m) → logits (samples, o)."""
    check_samples(params, X)
    c, answer, (first, *rest) = ckks.context(params.ckks), Logits(params), params.holders
    await ask(ch, params, X, entropy)
    for part in range(params.chunks):
        for g in range(len(params.layout.groups)):
            got = await ch.recv(first, Result)  # L5
            for i, seen in (await ch.gather(rest, Seen)).items():  # L5
                if seen.digest != hashlib.sha256(got.c0).digest():
                    raise ProtocolAbort(NAME, "L5", "differs", f"'{first}' and '{i}' have different answers")
            c0 = read(c, got.c0, params.ckks.base, NAME, "L5", first)
            sub = ch.sub(f"{part}/{g}")
            answer.put(part, g, await key_switch.outsider(sub, switch(params), c0, entropy=entropy))
    return answer.of(len(X))


async def ask(ch: Channel, params: Params, X: F64, entropy: Entropy) -> Query:
    """L1, L2 at the querier."""
    got = await ch.gather(params.maskers, Seed)  # L1
    for p, m in got.items():
        if len(m.seed) != 32:
            raise ProtocolAbort(NAME, "L1", "malformed", f"'{p}' sent no seed of 32 bytes")
    query = masked(params, X, {p: m.seed for p, m in got.items()}, entropy.bytes(32))
    await ch.broadcast([p for p in (params.aggregator, *params.holders) if p != ch.me], query)  # L2
    return query


class Logits:
    """The answer, as its parts come in."""

    def __init__(self, params: Params) -> None:
        self._layout = params.layout
        self._found = np.zeros((params.chunks * params.layout.I, params.config.classes))

    def put(self, part: int, g: int, slots: F64) -> None:
        L = self._layout
        table = slots.reshape(L.J, L.R)[:, : L.O * L.I].mean(axis=0).reshape(L.O, L.I)
        for at, label in enumerate(L.groups[g]):
            self._found[part * L.I : (part + 1) * L.I, label] = table[at]

    def of(self, samples: int) -> F64:
        """Clipped, never refused: whether a querier goes on must not depend on what a helping site added."""
        return np.clip(np.nan_to_num(self._found[:samples]), -LARGEST_LOGIT, LARGEST_LOGIT)


async def holder(
    ch: Channel, params: Params, trained: Trained, account: Account | None = None, *, entropy: Entropy
) -> None:
    """The part of a site that helps to answer; it charges the donors to the querier's account first."""
    check_model(trained)
    c, share = ckks.context(params.ckks), trained.keys.share
    if account is not None:
        account.charge(params.entries[0])
    trained.keys.spend(params.chunks * len(params.layout.groups))
    query, mine = await mask(ch, params, trained, entropy)
    for part, x in enumerate(await inputs(ch, params, query, mine, entropy)):
        for g, U in enumerate(evaluate(params, trained.model, x, trained.keys)):
            (c0, c1), _ = c.raw(U)
            if params.outside:
                packed = c.pack(c0)
                first = ch.me == params.holders[0]
                await ch.send(params.querier, Result(packed) if first else Seen(hashlib.sha256(packed).digest()))  # L5
            await key_switch.holder(ch.sub(f"{part}/{g}"), switch(params), share, c1, entropy=entropy)


async def aggregator(ch: Channel, params: Params, trained: Trained, *, entropy: Entropy) -> None:
    """S's part: it adds up the masks."""
    c, S, one = ckks.context(params.ckks), params.aggregator, params.layout.ladder.query
    _, mine = await mask(ch, params, trained, entropy)
    others = [p for p in params.maskers if p != S]
    for part in range(params.chunks):
        total = mine[part] if mine else np.stack([c.ring.zeros(one)] * 2)
        for p, got in (await ch.gather(others, Mask)).items():  # L3
            c.ring.add(total[0], read(c, got.c0, one, NAME, "L3", p))
            c.ring.add(total[1], read(c, got.c1, one, NAME, "L3", p))
        ch.step(f"prediction: part {part + 1} of {params.chunks}", protocol=NAME, line="L4")
        await ch.scatter(params.holders, Masks(c.pack(total[0]), c.pack(total[1])))  # L4
