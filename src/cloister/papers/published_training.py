"""Encrypted CellCnn training as published: PriCell's own circuit, every party's batch refreshed and repacked.

    L0  i → S   which keys i holds from an earlier run, if any
        S → i   whether to go on from a checkpoint, and at which step
        all     otherwise: `collective_key`, `collective_relin`, `collective_rotation`
    L1  S → i   [C], [W], and from a checkpoint [∇W], [∇C]; else initial weights of a public seed, encrypted

and per step, slots as in `published_circuit`:

    L2  i → S   [D_i] = [U ‖ P ‖ W ‖ ∇W ‖ ∇C]          forward pass on a batch, repacked into one ciphertext
        all     refresh ([D_1], ..., [D_n]) → [D'_1], ..., [D'_n]
    L3  S → i   [D'_i]
    L4  i → S   [∇W_i], [∇C_i]                          backward pass, its share of the momentum included
    L5  S → i   [∇W] = Σ [∇W_i], [∇C] = Σ [∇C_i]        everyone: C ← C - ∇C, W ← W - ∇W

        all     `threshold_decrypt` of [C] and [W] at the end

Reveals
-------
aggregator, holder : the final weights; nothing else about data, labels, gradients or the model. Opened weights are
    flooded by 36 bits less than `hardened` floods, since the paper's single-prime scale leaves no more: whoever knows
    the exact result learns something about the noise, and with it about the key.
aggregator : as published, L2 and L4 send what a circuit made of known ciphertexts and a plain batch, as it is: whoever
    guesses a batch with its labels can compute the same ciphertext and see that the guess is right. `hardened` adds a
    fresh encryption of zero.

Assumes
-------
Semi-honest parties: nobody audits the refreshes and sums of a step. A site opens only weights that it has followed
itself from the first step: after a restart, those that its own checkpoint names.

Cost
----
Setup: about 30 switching keys. Per site and step: 3 messages up (one ciphertext, refresh shares for every site's
ciphertext, two ciphertexts), about (markers + batch) / 2 rotations and as many plain products.

References
----------
[SAV22] Sav et al., PriCell, Patterns 2022; supplementary note 4, algorithm 1; lines numbered here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from cloister.arrays import F64
from cloister.errors import ProtocolAbort, RefusedError
from cloister.models import cellcnn
from cloister.mpc.crypto.ckks import scheme as ckks
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.crypto.rns.slots import SlotMap
from cloister.mpc.net import wire
from cloister.mpc.net.channel import Channel
from cloister.mpc.net.wire import message
from cloister.mpc.threshold_ckks import collective_refresh, threshold_decrypt
from cloister.mpc.threshold_ckks.collective_audit import AuditLog, Collective
from cloister.mpc.threshold_ckks.collective_key import added, read
from cloister.papers.published_circuit import LEVELS, CipherOps, Layout, backward, forward
from cloister.study import Party
from cloister.workflows.train_cellcnn.key_store import KeyStore
from cloister.workflows.train_cellcnn.training_keys import Keys, key_costs, load_keys, make_keys

NAME = "published_training"
WEAKER = 36  # bits of flooding that the opening lacks
START = 2  # levels of weights and gradients


@dataclass(frozen=True, slots=True)
class Params(Collective):  # public
    config: cellcnn.Config

    def __post_init__(self) -> None:
        Collective.__post_init__(self)
        self.layout  # noqa: B018 - raises where the slots do not suffice

    @property
    def layout(self) -> Layout:
        return Layout(self.config, self.ckks.slots, len(self.holders))

    @property
    def tag(self) -> bytes:
        """What a checkpoint belongs to."""
        return wire.digest(NAME, self.holders, self.aggregator, self.ckks, self.config)

    @property
    def noise(self) -> float:
        """Of [C] and [W] at the end: a rounding per step, summed over up to n rows, momentum and parties."""
        one = ckks.rounding_noise(self.ckks, len(self.holders)) * math.sqrt(self.layout.n * len(self.holders))
        total = one * math.sqrt(self.config.steps) / (1 - self.config.momentum)
        return math.hypot(total, ckks.encryption_noise(self.ckks, len(self.holders)))


def choose_ring(parties: int) -> ckks.Parameters:
    """One prime per level, as in the paper: scale 2^50."""
    return ckks.choose(LEVELS, 16384, scale_bits=50, parties=parties)


@message("L0")
class Ready:  # i → S
    keys: bytes  # name of the keys it holds; empty without


@message("L0")
class Start:  # S → i
    step: int
    resumed: bool


@message("L1")
class Initial:  # S → i
    C: tuple[bytes, ...]  # two polynomials
    W: tuple[bytes, ...]
    gC: tuple[bytes, ...]  # none before the first step
    gW: tuple[bytes, ...]


@message("L2")
class Packed:  # i → S
    D: tuple[bytes, ...]


@message("L3")
class Repacked:  # S → i; the second polynomial is the refresh's public one
    D: bytes


@message("L4")
class Gradients:  # i → S
    W: tuple[bytes, ...]
    C: tuple[bytes, ...]


@message("L5")
class Total:  # S → i
    W: tuple[bytes, ...]
    C: tuple[bytes, ...]


@dataclass
class Done:
    params: Params
    keys: Keys
    weights: cellcnn.Weights


def ideal(params: Params, inputs: Mapping[Party, tuple[F64, F64]]) -> dict[Party, cellcnn.Weights]:
    w = cellcnn.train(params.config, [inputs[i][:2] for i in params.holders])
    return dict.fromkeys((params.aggregator, *params.holders), w)


def roles(params: Params) -> dict[Party, object]:
    return {params.aggregator: aggregator} | dict.fromkeys(params.holders, holder)


def cost(params: Params) -> dict[Party, tuple[int, int]]:
    """Without a checkpoint."""
    c, P, n, steps = ckks.context(params.ckks), params.ckks, len(params.holders), params.config.steps
    base, low, top = (c.packed(k) for k in (P.base, P.primes_at(START), P.primes_at(LEVELS)))
    parts = [dict.fromkeys(params.holders, (1 + 2 * steps, steps * (2 * base + 4 * low)))]
    parts[0] |= {params.aggregator: (n * (2 + 2 * steps), n * (4 * low + steps * (top + 4 * low)))}
    parts += key_costs(params)
    parts += [collective_refresh.cost(refresh(params)[0], audited=False)] * steps
    parts += [threshold_decrypt.cost(opening(params, name)) for name in ("C", "W")]
    return added(*parts)


def refresh(params: Params) -> tuple[collective_refresh.Params, list[SlotMap]]:
    c, P = ckks.context(params.ckks), params.ckks
    ratio = c.dropped(P.primes_at(1)) / P.scale  # U stands at Δ²/dropped
    n = len(params.holders)
    maps = [params.layout.repacking(ratio, i) for i in range(n)]
    digests = tuple(m.digest for m in maps)
    top = P.primes_at(LEVELS)
    who = (params.holders, params.aggregator, P)
    return collective_refresh.Params(*who, (P.scale,) * n, (top,) * n, digests, audited=False), maps


def opening(params: Params, what: str) -> threshold_decrypt.Params:
    P = params.ckks
    who = (params.holders, params.aggregator, P)
    return threshold_decrypt.Params(*who, what, P.base, P.scale, params.noise, WEAKER)


def pack(c: ckks.Context, ct: ckks.Cipher, k: int) -> tuple[bytes, ...]:
    raw, _ = c.raw(c.drop(ct, k))
    return c.pack(raw[0]), c.pack(raw[1])


def unpack(params: Params, parts: tuple[bytes, ...], k: int, line: str, sender: Party) -> ckks.Cipher:
    c = ckks.context(params.ckks)
    if len(parts) != 2:
        raise ProtocolAbort(NAME, line, "malformed", f"a ciphertext of {len(parts)} polynomials")
    return c.cipher(np.stack([read(c, p, k, NAME, line, sender) for p in parts]), params.ckks.scale)


def weights(params: Params, C: F64, W: F64) -> cellcnn.Weights:
    """From opened slots: every row of C and every copy of W counts."""
    L, config = params.layout, params.config
    rows = C[: L.csize].reshape(-1, L.h)
    mean = np.stack([rows[j :: L.m].mean(axis=0) for j in range(config.markers)])[:, : config.filters]
    dense = W[: L.onh].reshape(config.classes, L.n, L.h).mean(axis=1)[:, : config.filters].T
    return cellcnn.Weights(mean, dense, np.zeros_like(mean), np.zeros_like(dense))


@dataclass
class State:
    """[C] and [W] after a step, and the last update, which is the momentum of the next."""

    step: int
    C: ckks.Cipher
    W: ckks.Cipher
    gC: ckks.Cipher | None = None  # none before the first step
    gW: ckks.Cipher | None = None

    def after(self, c: ckks.Context, gC: ckks.Cipher, gW: ckks.Cipher) -> State:
        return State(self.step + 1, c.subtract(self.C, gC), c.subtract(self.W, gW), gC, gW)

    def keep(self, params: Params, store: KeyStore | None) -> State:
        if store is not None:
            last = {"gC": [self.gC], "gW": [self.gW]} if self.gC and self.gW else {}
            store.put_state(ckks.context(params.ckks), params.tag, self.step, {"C": [self.C], "W": [self.W], **last})
        return self

    @classmethod
    def load(cls, params: Params, store: KeyStore) -> State:
        step = store.steps(params.tag)[0]
        kept = store.get_state(ckks.context(params.ckks), params.tag, step)
        return cls(step, **{label: cts[0] for label, cts in kept.items()})


def followed(params: Params, start: Start, first: Initial, store: KeyStore | None) -> State:
    """Where a site begins: at the initial weights, or at those that it has come to itself."""
    c, P, S = ckks.context(params.ckks), params.ckks, params.aggregator
    low = P.primes_at(START)
    if start.step == 0:
        return State(0, unpack(params, first.C, low, "L1", S), unpack(params, first.W, low, "L1", S))
    own = State.load(params, store) if store is not None and store.steps(params.tag) else None
    if own is not None and own.step == start.step - 1:  # this site missed the last update
        gC, gW = unpack(params, first.gC, low, "L1", S), unpack(params, first.gW, low, "L1", S)
        own = own.after(c, gC, gW)
    if own is None or own.step != start.step:
        raise ProtocolAbort(NAME, "L0", "checkpoint", "requested to resume from a step that this site has not reached")
    return own


async def holder(
    ch: Channel,
    params: Params,
    X: F64,
    Y: F64,
    store: KeyStore | None = None,
    *,
    entropy: Entropy,
    consent: frozenset[str],
) -> Done:
    """A site's part; as in `encrypted_training`."""
    if "open-model" not in consent:
        raise RefusedError("this site did not consent to opening the model, with which published training ends")
    cellcnn.check_batches(params.config, X, Y)
    c, P, L, S = ckks.context(params.ckks), params.ckks, params.layout, params.aggregator
    await ch.send(S, Ready(store.name if store is not None else b""))  # L0
    start = await ch.recv(S, Start)  # L0
    if start.resumed and store is not None:
        keys = load_keys(params, store, site=True)
    elif start.resumed or start.step != 0:
        raise ProtocolAbort(
            NAME, "L0", "checkpoint", "requested to resume from a checkpoint that this site does not have"
        )
    else:
        keys = await make_keys(ch, params, entropy, ckks.Secret.draw(P, entropy), store)
    secret, low, ops = keys.share, P.primes_at(START), CipherOps(P, keys.relin, keys.rotation)
    state = followed(params, start, await ch.recv(S, Initial), store).keep(params, store)  # L1
    shares, maps = refresh(params)
    mine = params.holders.index(ch.me)
    for t in range(state.step, params.config.steps):
        ch.step(f"step {t + 1} of {params.config.steps}: forward pass", protocol=NAME, line="L2")
        D = forward(ops, L, state.C, state.W, state.gW, state.gC, X[t])
        await ch.send(S, Packed(pack(c, D, P.base)))  # L2
        sub = ch.sub(f"{t}/refresh")
        await collective_refresh.contribute(sub, shares, secret, maps, None, AuditLog(), entropy=entropy)
        fresh = read(c, (await ch.recv(S, Repacked)).D, P.primes_at(LEVELS), NAME, "L3", S)  # L3
        D = c.cipher(np.stack([fresh, collective_refresh.common(sub, shares, mine)]), P.scale)
        ch.step(f"step {t + 1} of {params.config.steps}: backward pass", protocol=NAME, line="L4")
        dW, dC = backward(ops, L, D, X[t], Y[t])
        await ch.send(S, Gradients(pack(c, dW, low), pack(c, dC, low)))  # L4
        total = await ch.recv(S, Total)  # L5
        gC, gW = unpack(params, total.C, low, "L5", S), unpack(params, total.W, low, "L5", S)
        state = state.after(c, gC, gW).keep(params, store)
    keys.spend(2)
    opened = []
    for name, ct in (("C", state.C), ("W", state.W)):
        (c0, c1), _ = c.raw(c.drop(ct, P.base))
        what, sub = opening(params, f"the trained weights {name}"), ch.sub(f"open/{name}")
        first = c0 if mine == 0 else None
        opened.append(await threshold_decrypt.holder(sub, what, secret, c1, first, entropy=entropy, consent=consent))
    return Done(params, keys, weights(params, *opened))


async def aggregator(ch: Channel, params: Params, store: KeyStore | None = None, *, entropy: Entropy) -> Done:
    """S's part: add, refresh, hand out."""
    c, P, L = ckks.context(params.ckks), params.ckks, params.layout
    low, w = P.primes_at(START), cellcnn.initial(params.config)
    held = {r.keys for r in (await ch.gather(params.holders, Ready)).values()}  # L0
    if store is not None and store.name and held == {store.name} and store.steps(params.tag):
        state = State.load(params, store)
        await ch.scatter(params.holders, Start(state.step, resumed=True))  # L0
        keys = load_keys(params, store, site=False)
    else:
        await ch.scatter(params.holders, Start(0, resumed=False))  # L0
        keys = await make_keys(ch, params, entropy, None, store)
        C = c.encrypt(keys.public, L.conv_slots(w.W), low, P.scale, entropy)
        W = c.encrypt(keys.public, L.dense_slots(w.V), low, P.scale, entropy)
        state = State(0, C, W).keep(params, store)
    first = [pack(c, ct, low) if ct else () for ct in _told(state)]
    await ch.scatter(params.holders, Initial(*first))  # L1
    shares, maps = refresh(params)
    for t in range(state.step, params.config.steps):
        ch.step(f"step {t + 1} of {params.config.steps}: refresh", protocol=NAME, line="L2")
        packed = await ch.gather(params.holders, Packed)  # L2
        cts = [unpack(params, packed[i].D, P.base, "L2", i) for i in params.holders]
        fresh = await collective_refresh.aggregator(ch.sub(f"{t}/refresh"), shares, cts, maps)
        await ch.scatter(
            {i: Repacked(c.pack(c.raw(ct)[0][0])) for i, ct in zip(params.holders, fresh, strict=True)}
        )  # L3
        sums = None
        for i, got in (await ch.gather(params.holders, Gradients)).items():  # L4
            pair = [unpack(params, parts, low, "L4", i) for parts in (got.C, got.W)]
            sums = pair if sums is None else [c.add(a, b) for a, b in zip(sums, pair, strict=True)]
        assert sums is not None
        state = state.after(c, *sums).keep(params, store)
        await ch.scatter(params.holders, Total(W=pack(c, sums[1], low), C=pack(c, sums[0], low)))  # L5
    opened = [
        await threshold_decrypt.aggregator(ch.sub(f"open/{n}"), opening(params, f"the trained weights {n}"), ct)
        for n, ct in (("C", state.C), ("W", state.W))
    ]
    return Done(params, keys, weights(params, *opened))


def _told(state: State) -> list[ckks.Cipher | None]:
    """What sites need to begin: weights at the first step, the last update later (they have their own weights)."""
    return [state.C, state.W, None, None] if state.step == 0 else [None, None, state.gC, state.gW]
