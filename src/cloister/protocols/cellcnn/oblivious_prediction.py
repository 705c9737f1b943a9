"""Oblivious prediction: a querier learns the logits of its samples under a model that stays encrypted.

    L1  q → S   [X_c]               the querier's samples under the collective key, in chunks
    L2  S → i   [X_c]
        S, i    [U] = Σ_j [M]·[X]   every site computes it itself, so that it knows what it is asked to switch
        all     `key_switch` of [U] to a key of the querier's own, for every chunk and class group

Reveals
-------
querier : U = X·M for its samples, and nothing else (k ≥ markers well-chosen samples determine M: a model that answers
    is a model that can be learned).
aggregator, holder : how many samples, rounded up to whole ciphertexts. Not the samples, not the answer, not the model.

Assumes
-------
As `encrypted_training`, whose keys and [M] it uses. Evaluation is deterministic, so all sites get the same [U].

Cost
----
Querier: one ciphertext up per chunk of I samples. Per site, chunk and class group: one product, log2(markers)
rotations, one key-switch share.

References
----------
[SAV22] Sav et al., PriCell, Patterns 2022, oblivious inference; lines numbered here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from cloister.arrays import F64
from cloister.crypto.agreement import Identity
from cloister.crypto.ckks import scheme as ckks
from cloister.crypto.entropy import Entropy
from cloister.errors import DataError, ParameterError, ProtocolAbort
from cloister.models import cellcnn
from cloister.net.channel import Channel
from cloister.net.wire import message
from cloister.protocols.cellcnn.cellcnn_circuit import Layout, add_over_markers
from cloister.protocols.cellcnn.cellcnn_ladder import PRODUCT
from cloister.protocols.cellcnn.encrypted_training import Trained
from cloister.protocols.cellcnn.training_keys import Keys
from cloister.protocols.ckks import key_switch
from cloister.protocols.ckks.collective_key import check_holders, read
from cloister.protocols.ckks.collective_refresh import Ledger
from cloister.study import Party

NAME = "oblivious_prediction"


@dataclass(frozen=True, slots=True)
class Params:  # public
    holders: tuple[Party, ...]
    aggregator: Party
    querier: Party  # one of the holders
    ckks: ckks.Parameters
    config: cellcnn.Config
    chunks: int  # ciphertexts of the query

    def __post_init__(self) -> None:
        check_holders(self.holders, self.aggregator)
        if self.querier not in self.holders or self.chunks < 1:
            raise ParameterError("a query comes from one of the sites that hold the key, and has at least one sample")

    @property
    def layout(self) -> Layout:
        return Layout(self.config, self.ckks, len(self.holders))


@message("L1")
class Query:  # q → S
    c0: bytes
    c1: bytes


@message("L2")
class Forwarded:  # S → i
    c0: bytes
    c1: bytes


def ideal(params: Params, inputs: Mapping[Party, tuple[cellcnn.Weights, F64]]) -> dict[Party, F64 | None]:
    """Logits, to the querier alone."""
    w, X = inputs[params.querier]
    return dict.fromkeys((params.aggregator, *params.holders)) | {params.querier: X @ w.M}


def roles(params: Params) -> dict[Party, object]:
    return {params.aggregator: aggregator} | dict.fromkeys(params.holders, holder) | {params.querier: querier}


def cost(params: Params) -> dict[Party, tuple[int, int]]:
    c, n = ckks.context(params.ckks), len(params.holders)
    k, G, size = params.chunks, len(params.layout.groups), 2 * c.packed(params.layout.ladder.one)
    each = key_switch.cost(switch(params))
    sent = {p: (k * G * messages, k * G * payload) for p, (messages, payload) in each.items()}
    for p, copies in ((params.querier, 1), (params.aggregator, n - 1)):
        sent[p] = (sent[p][0] + k * copies, sent[p][1] + k * copies * size)
    return sent


def chunks(config: cellcnn.Config, params: ckks.Parameters, parties: int, samples: int) -> int:
    return -(-samples // Layout(config, params, parties).I)


def switch(params: Params) -> key_switch.Params:
    P, noise = params.ckks, params.layout.query_noise_bits
    return key_switch.Params(params.holders, params.aggregator, params.querier, P, P.base, P.scale, noise)


def sample_scale(params: Params) -> float:
    """Of the samples: what the product spends, so that the logits stand at Δ."""
    return ckks.context(params.ckks).dropped(params.layout.ladder.one, PRODUCT)


def evaluate(params: Params, model: list[ckks.Cipher], x: ckks.Cipher, keys: Keys) -> list[ckks.Cipher]:
    """[U] of one chunk, per class group, at the base primes."""
    c, L = ckks.context(params.ckks), params.layout
    found = [add_over_markers(c, L, c.times(M, x, keys.relin, PRODUCT), keys.rotation) for M in model]
    for U in found:
        U.scale(params.ckks.scale)
    return found


def check_samples(params: Params, X: F64) -> None:
    L = params.layout
    if X.ndim != 2 or X.shape[1] != params.config.markers or not 0 < len(X) <= params.chunks * L.I:
        raise DataError(
            f"expected up to {params.chunks * L.I} samples of {params.config.markers} markers, found shape {X.shape}"
        )
    if not np.isfinite(X).all() or np.abs(X).max() > 2.0**5:
        raise DataError("a marker's mean lies beyond ±32 or is missing; standardise the markers as in training")


async def querier(
    ch: Channel, params: Params, trained: Trained, X: F64, *, entropy: Entropy, identity: Identity
) -> F64:
    """Play a site that asks. X (samples, m) → logits (samples, o)."""
    check_samples(params, X)
    c, L, k = ckks.context(params.ckks), params.layout, params.layout.ladder.one
    queries = []
    for part in range(params.chunks):
        values = L.input_slots(X[part * L.I : (part + 1) * L.I])
        x = c.encrypt(trained.keys.public, values, k, sample_scale(params), entropy)
        raw, _ = c.raw(x)
        await ch.send(params.aggregator, Query(c.pack(raw[0]), c.pack(raw[1])))  # L1
        queries.append(x)
    found = np.zeros((params.chunks * L.I, params.config.classes))
    ledger = Ledger()
    for part, x in enumerate(queries):
        for g, U in enumerate(evaluate(params, trained.model, x, trained.keys)):
            slots = await _switch(ch, params, trained, U, ledger, part, g, entropy, identity)
            assert slots is not None
            table = slots.reshape(L.J, L.R)[:, : L.O * L.I].mean(axis=0).reshape(L.O, L.I)
            for at, label in enumerate(L.groups[g]):
                found[part * L.I : (part + 1) * L.I, label] = table[at]
    return found[: len(X)]


async def holder(ch: Channel, params: Params, trained: Trained, *, entropy: Entropy) -> None:
    """Play a site that helps to answer."""
    c, S, k = ckks.context(params.ckks), params.aggregator, params.layout.ladder.one
    ledger = Ledger()
    for part in range(params.chunks):
        got = await ch.recv(S, Forwarded)  # L2
        x = c.cipher(np.stack([read(c, y, k, NAME, "L2", S) for y in (got.c0, got.c1)]), sample_scale(params))
        for g, U in enumerate(evaluate(params, trained.model, x, trained.keys)):
            await _switch(ch, params, trained, U, ledger, part, g, entropy, None)


async def _switch(
    ch: Channel,
    params: Params,
    trained: Trained,
    U: ckks.Cipher,
    ledger: Ledger,
    part: int,
    group: int,
    entropy: Entropy,
    identity: Identity | None,
) -> F64 | None:
    c, secret = ckks.context(params.ckks), trained.keys.secret
    if secret is None:
        raise ProtocolAbort(NAME, "L2", "no-key", "this party holds no share of the key")
    ledger.admit(c.pack(c.raw(U)[0][1]))
    sub = ch.sub(f"{part}/{group}")
    if identity is not None:
        return await key_switch.querying_holder(sub, switch(params), secret, ledger, entropy=entropy, identity=identity)
    await key_switch.holder(sub, switch(params), secret, ledger, entropy=entropy)
    return None


async def aggregator(ch: Channel, params: Params, trained: Trained) -> None:
    """Play S."""
    c, q, k = ckks.context(params.ckks), params.querier, params.layout.ladder.one
    others = [i for i in params.holders if i != q]
    for part in range(params.chunks):
        got = await ch.recv(q, Query)  # L1
        x = c.cipher(
            np.stack([read(c, got.c0, k, NAME, "L1", q), read(c, got.c1, k, NAME, "L1", q)]), sample_scale(params)
        )
        await ch.scatter(others, Forwarded(got.c0, got.c1))  # L2
        ch.step(f"prediction: part {part + 1} of {params.chunks}", protocol=NAME, line="L2")
        for g, U in enumerate(evaluate(params, trained.model, x, trained.keys)):
            await key_switch.aggregator(ch.sub(f"{part}/{g}"), switch(params), U)
