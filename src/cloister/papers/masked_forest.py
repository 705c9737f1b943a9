"""Masked forest: the principal server runs an isolation forest on rows that were rotated, stretched and shuffled.

    L1   i, A    seed Ξ of the clients, N = Σ N_i, and each client's start s_i, through Paillier ciphertexts
                 (private_slots: Algorithms 1 and 2)
    L2   i, A, P with `standardise`: means and squares of the columns, whole and fractional parts in words of their own
                 (`split_sum`), masked by a stream of Ξ that only clients know
    L3   i       Z = permutation of 0 … N-1 from Ξ;  slots Z_{s_i}, …, Z_{s_i + N_i - 1} (indices mod N)
         i       X̃ = X M, M = Q S Q′ from Ξ, S uniform in (1, T)
         i → A   the key of R_i                    R_i uniform in Z_{2^64}^{N×D}
         i → P   W_i = R_i + X̃ in the client's slots
    L4   A → P   R = Σ_i R_i
    L5   P       X_masked = Σ_i W_i - R, a forest on it, its scores
         P → i   scores by slot, or flags by slot, or only the half-spaces around the outliers
    L3 to L5 once per repeat, with streams of their own.

Where the paper as printed would not work, this does what it means: the masked row X̃ is added, not X; noise is uniform
in a ring, not Gaussian.

Reveals
-------
principal : every masked row, in random order: with D known rows (of any client, or its own knowledge) or with any one
    client it solves for M and has EVERYBODY'S ROWS; from the masked rows alone, independent component analysis finds
    columns that are independent and not Gaussian; N, D, all scores; which masked row of one repeat is which of another
    (a row's leverage does not depend on M). Which columns each client has, by name.
auxiliary : N, D. With one client: how many rows each client has, and which places of the shuffled table are whose. With
    the principal: which rows belong to the same client.
client : N, Ξ and M, which all clients share, and what P hands out: all scores (without their owners), all flags, or the
    regions. With m - 1 colluding clients: the scores of the last one's rows.

Assumes
-------
A principal server that all trust with the data, a second one that does not collude with it, semi-honest clients.
Paillier keys of 3072 bits. Nobody drops out: any loss aborts. The hardened mode needs no such trust. Lies that are not
noticed: (a), (b), (c), (f) of the principal, other scores; (a), (b), (c), (f) of the auxiliary, slots or noise that are
none; (b), (c), (f) of the client.

Cost
----
Per client: 2 m encryptions, 3 decryptions, N·D words up to P for each repeat. A → P: N·D words for each repeat.

References
----------
[MA24] Malpetti, Azzimonti, Global Outlier Detection in a Federated Learning Setting with Isolation Forest, 2024:
Algorithm 3; section IV-D the regions, VI-B the collusions. Lines numbered here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from cloister.arrays import F64, I64, U8, U64
from cloister.errors import DataError, ParameterError, ProtocolAbort
from cloister.models import isolation_forest as iforest
from cloister.models.regions import Regions, describe
from cloister.mpc.crypto.agreement import bind, hkdf
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.crypto.fixed_point import FixedPoint
from cloister.mpc.crypto.prg import Prg
from cloister.mpc.net.channel import Channel
from cloister.mpc.net.wire import message
from cloister.papers import private_slots
from cloister.study import Party
from cloister.workflows.common import common_genes
from cloister.workflows.common.columns import match_columns
from cloister.workflows.common.gene_moments import join_sum, split_sum

NAME = "masked_forest"
Give = Literal["scores", "flags", "regions"]


@dataclass(frozen=True, slots=True)
class Params:
    sites: tuple[Party, ...]  # the clients
    principal: Party  # P
    auxiliary: Party  # A
    trees: int = 100
    sample: int = 256  # ψ; N where there are fewer rows
    forest: iforest.Kind = "standard"
    extension: int | None = None
    stretch: float = 10.0  # T
    repeats: int = 1
    give: Give = "scores"
    contamination: float | None = 0.05
    threshold: float | None = None  # instead of contamination
    standardise: bool = False  # columns first; the paper does not
    key_bits: int = 3072
    bound: float = float(2**30)  # of an entry of X̃

    def __post_init__(self) -> None:
        if len(self.sites) < 2:
            raise ParameterError(f"a masked forest needs at least two clients, found {len(self.sites)}")
        if not self.stretch > 1:
            raise ParameterError(f"'stretch' (T) must be above 1, found {self.stretch}")
        if (self.contamination is None) == (self.threshold is None):
            raise ParameterError("give either 'contamination' or 'threshold', not both and not neither")

    @property
    def slots(self) -> private_slots.Params:
        return private_slots.Params(self.sites, self.auxiliary, self.key_bits)

    @property
    def point(self) -> FixedPoint:
        return FixedPoint(62 - int(np.ceil(np.log2(self.bound))), self.bound)


@dataclass(frozen=True)
class Found:
    """What a client takes away, per repeat."""

    scores: F64 | None  # (repeats, own rows)
    flags: U8  # (repeats, own rows)
    everyone: F64 | None  # (repeats, N): all scores, without their owners
    slots: I64  # (repeats, own rows)
    masked: F64 = field(repr=False)  # (own rows, D) of the first repeat: what P saw of them
    seed: bytes = field(repr=False)
    cut: float | None = None  # the lowest flagged score, mean over repeats; None without scores


@dataclass(frozen=True)
class Seen:
    """What the principal server has at the end."""

    masked: tuple[F64, ...]  # per repeat (N, D)
    scores: F64  # (repeats, N)
    flags: U8
    regions: tuple[Regions, ...]


@message("L2")
class NoisySums:  # i → P
    y: U64


@message("L2")
class Sums:  # P → i, still under the stream of Ξ
    y: U64


@message("L3")
class NoiseKey:  # i → A
    key: bytes


@message("L3")
class Noisy:  # i → P
    w: U64  # (N, D)


@message("L4")
class Noise:  # A → P
    r: U64  # (N, D)


@message("L5")
class Scores:  # P → i
    scores: F64  # (N,)


@message("L5")
class Flags:  # P → i
    flags: U8  # (N,)


@message("L5")
class OutlierRegions:  # P → i
    normals: F64
    cut: F64
    right: U8
    region: I64


def roles(params: Params) -> dict[Party, object]:
    servers: dict[Party, object] = {params.principal: principal, params.auxiliary: auxiliary}
    return servers | dict.fromkeys(params.sites, client)


def ideal(params: Params, masked: F64, rng: np.random.Generator) -> tuple[F64, U8]:
    """Scores and flags of the masked rows, in the order of their slots: what P would compute alone."""
    scores = _fit(params, masked, rng).score(masked)
    return scores, flag(params, scores)


# ---- local steps -----------------------------------------------------------------------------------------------------


def stream(seed: bytes, purpose: str, repeat: int = 0) -> Prg:
    """A stream of Ξ for one purpose; no two purposes share one."""
    return Prg(hkdf(seed, bind(NAME, purpose.encode(), repeat.to_bytes(4, "big"))))


def masking_matrix(seed: bytes, width: int, stretch: float, repeat: int = 0) -> F64:
    """M = Q S Q′: two random rotations (QR of Gaussian matrices) and a stretch of each axis by 1 to T."""

    def uniform(prg: Prg, shape: tuple[int, ...]) -> F64:
        made: F64 = ((prg.uint64(shape) >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
        return made

    def rotation(purpose: str) -> F64:
        prg = stream(seed, purpose, repeat)
        u, v = uniform(prg, (width, width)), uniform(prg, (width, width))
        q, r = np.linalg.qr(np.sqrt(-2 * np.log(u)) * np.cos(2 * np.pi * v))
        made: F64 = q * np.sign(np.diag(r))
        return made

    s = 1 + (stretch - 1) * uniform(stream(seed, "stretch", repeat), (width,))
    M: F64 = (rotation("left") * s) @ rotation("right")
    return M


def slots_of(seed: bytes, start: int, own: int, rows: int, repeat: int = 0) -> I64:
    """The client's slots: `own` consecutive places, from `start` on, of a permutation that all clients share."""
    order = np.argsort(stream(seed, "slots", repeat).uint64(rows), kind="stable")
    return order[(start + np.arange(own)) % rows]


def mask(params: Params, Xm: F64, slots: I64, rows: int, key: bytes) -> U64:
    """L3: W_i."""
    W = Prg(key).uint64((rows, Xm.shape[1]))
    W[slots] += params.point.encode(Xm)
    return W


def flag(params: Params, scores: F64) -> U8:
    """1 for outliers; rows of equal score are flagged alike, so never more than the asked share."""
    if params.threshold is not None:
        above: U8 = (scores >= params.threshold).astype(np.uint8)
        return above
    assert params.contamination is not None
    allowed = int(np.floor(params.contamination * len(scores)))
    if allowed >= len(scores):
        return np.ones(len(scores), np.uint8)
    made: U8 = (scores > np.sort(scores)[len(scores) - 1 - allowed]).astype(np.uint8)
    return made


def _fit(params: Params, X: F64, rng: np.random.Generator) -> iforest.Forest:
    return iforest.fit(
        X, trees=params.trees, sample=params.sample, kind=params.forest, extension=params.extension, rng=rng
    )


# ---- the client ------------------------------------------------------------------------------------------------------


async def client(ch: Channel, params: Params, names: list[str], X: F64, *, entropy: Entropy) -> Found:
    """Play C_i with rows X, complete and finite."""
    if not np.isfinite(X).all() or X.ndim != 2 or 0 in X.shape:
        raise DataError("a masked forest needs rows without missing or infinite values; clean them before the run")
    P, A = params.principal, params.auxiliary
    columns = await common_genes.site(
        ch.sub("columns", apart=True), common_genes.Params(params.sites, P), "table", names
    )
    X = X[:, match_columns(names, columns.names)]
    own, width = X.shape
    agreed = await private_slots.client(ch.sub("slots"), params.slots, own, width, entropy=entropy)  # L1
    seed, rows, start = agreed.seed, agreed.rows, agreed.start
    if params.standardise:
        X = await _standardise(ch, params, X, seed, rows, entropy)
    scores, flags, slots, everyone, cuts, first = [], [], [], [], [], X
    for repeat in range(params.repeats):
        Xm = X @ masking_matrix(seed, width, params.stretch, repeat)  # L3
        mine = slots_of(seed, start, own, rows, repeat)
        key = entropy.bytes(32)
        W = mask(params, Xm, mine, rows, key)
        await ch.send(A, NoiseKey(key))
        await ch.send(P, Noisy(W))
        slots.append(mine)
        first = Xm if repeat == 0 else first
        if params.give == "scores":  # L5
            got = (await ch.recv(P, Scores, scores=(rows,))).scores
            scores.append(got[mine])
            everyone.append(got)
            flagged = flag(params, got)
            flags.append(flagged[mine])
            cuts.append(float(got[flagged > 0].min(initial=1.0)))
        elif params.give == "flags":
            flags.append((await ch.recv(P, Flags, flags=(rows,))).flags[mine])
        else:
            m = await ch.recv(P, OutlierRegions, normals=(None, width), cut=(None,), right=(None,), region=(None,))
            if not len(m.normals) == len(m.cut) == len(m.right) == len(m.region):
                raise ProtocolAbort(NAME, "L5", "malformed", "half-spaces of different numbers")
            seen = params.point.decode(params.point.encode(Xm))  # P works on rounded rows
            flags.append(Regions(m.normals, m.cut, m.right, m.region).inside(seen).astype(np.uint8))
    return Found(
        np.array(scores) if scores else None,
        np.array(flags),
        np.array(everyone) if everyone else None,
        np.array(slots),
        first,
        seed,
        float(np.mean(cuts)) if cuts else None,
    )


async def _standardise(ch: Channel, params: Params, X: F64, seed: bytes, rows: int, entropy: Entropy) -> F64:
    """L2: two sums over all clients. P adds them up without the noise of A, and still under a stream of Ξ."""

    async def total(values: F64, purpose: str) -> F64:
        hidden = stream(seed, purpose).uint64(2 * len(values))
        key = entropy.bytes(32)
        y = Prg(key).uint64(2 * len(values)) + split_sum(values, len(params.sites), entropy)
        if ch.me == params.sites[0]:
            y += hidden
        await ch.send(params.auxiliary, NoiseKey(key))
        await ch.send(params.principal, NoisySums(y))
        return join_sum((await ch.recv(params.principal, Sums, y=(2 * len(values),))).y - hidden)

    mean = await total(X.sum(axis=0), "mean") / rows
    scale = np.sqrt(np.maximum(await total(np.square(X - mean).sum(axis=0), "scale"), 0.0) / rows)
    made: F64 = (X - mean) / np.where(scale > 0, scale, 1.0)
    return made


# ---- the servers -----------------------------------------------------------------------------------------------------


async def auxiliary(ch: Channel, params: Params, *, entropy: Entropy) -> int:
    """Play A. Returns N."""
    clients = params.sites
    size = await private_slots.auxiliary(ch.sub("slots"), params.slots, entropy=entropy)  # L1
    rows, width = size.rows, size.width
    for _ in range(2 if params.standardise else 0):
        noise = await ch.gather(clients, NoiseKey)  # L2
        await ch.send(params.principal, Noise(_added([Prg(m.key).uint64((1, 2 * width)) for m in noise.values()])))
    for _ in range(params.repeats):
        noise = await ch.gather(clients, NoiseKey)  # L3
        await ch.send(params.principal, Noise(_added([Prg(m.key).uint64((rows, width)) for m in noise.values()])))
    return rows  # L4


def _added(parts: list[U64]) -> U64:
    total = parts[0].copy()
    for part in parts[1:]:
        total += part
    return total


async def principal(ch: Channel, params: Params, *, rng: np.random.Generator) -> Seen:
    """Play P."""
    clients = params.sites
    common = common_genes.Params(clients, params.principal)
    width = len((await common_genes.coordinator(ch.sub("columns", apart=True), common)).names)
    for _ in range(2 if params.standardise else 0):
        sums = await ch.gather(clients, NoisySums, y=(2 * width,))  # L2
        noise = await ch.recv(params.auxiliary, Noise, r=(1, 2 * width))
        await ch.scatter(clients, Sums(_added([m.y for m in sums.values()]) - noise.r[0]))
    views, scores, flags, regions = [], [], [], []
    for _ in range(params.repeats):
        noisy = await ch.gather(clients, Noisy, w=(None, width))  # L3
        shapes = {m.w.shape for m in noisy.values()}
        if len(shapes) != 1:
            raise ProtocolAbort(NAME, "L3", "mismatch", "clients sent matrices of different sizes")
        R = (await ch.recv(params.auxiliary, Noise, r=shapes.pop())).r  # L4
        masked = params.point.decode(_added([m.w for m in noisy.values()]) - R)  # L5
        del noisy, R
        views.append(ch.reveal(masked, to=ch.me, line="L5", what=f"{len(masked)} masked rows", protocol=NAME))
        ch.step("growing the forest", protocol=NAME, line="L5")
        forest = _fit(params, masked, rng)
        scores.append(forest.score(masked))
        flags.append(flag(params, scores[-1]))
        if params.give == "scores":
            await ch.scatter(clients, Scores(scores[-1]))
        elif params.give == "flags":
            await ch.scatter(clients, Flags(flags[-1]))
        else:
            made = describe(forest, masked, flags[-1].astype(bool), rng=rng)
            regions.append(made)
            await ch.scatter(clients, OutlierRegions(made.normals, made.cut, made.right, made.region))
    return Seen(tuple(views), np.array(scores), np.array(flags), tuple(regions))


def cost(params: Params, rows: Mapping[Party, int], width: int, names: int) -> dict[Party, tuple[int, int]]:
    """Messages and payload bytes that each party sends with scores or flags; `names` bytes of column names."""
    m, N, r = len(params.sites), sum(rows.values()), params.repeats
    sums = 2 if params.standardise else 0
    slots = private_slots.cost(params.slots)
    own, aux = slots[params.sites[0]], slots[params.auxiliary]
    up = (own[0] + 1 + 2 * (sums + r), own[1] + names + sums * (32 + 16 * width) + r * (32 + 8 * N * width))
    noise = (aux[0] + sums + r, aux[1] + sums * 16 * width + r * 8 * N * width)
    answer = N * (8 if params.give == "scores" else 1)
    head = (m * (1 + sums + r), m * (names + sums * 16 * width + r * answer))
    return {params.principal: head, params.auxiliary: noise} | dict.fromkeys(params.sites, up)
