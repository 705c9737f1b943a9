"""Encrypted loss, as published: labels and predictions go to the provider encrypted, so does each batch's loss back.

    L1  u → P   b, seed, n_1, n_2, …    u's public key; how many samples each batch has
    per batch:
    L2  u → P   [y_ic], [log p_ic]      one-hot labels and log-probabilities, a ciphertext for each sample and class
    L3  P → u   [Σ_i Σ_c y_ic·log p_ic] three polynomials, re-randomised
        u       -1/n of it              the mean cross-entropy of the batch

A scalar does not replace the labels: gradients still need them beside the predictions, at the owner. The step is here
because the paper has it; hardened mode computes the same numbers at home and sends nothing.

Reveals
-------
owner : the mean loss of each of its own batches.
provider : how many samples each batch of each owner has. Not the labels, not the predictions.

Assumes
-------
Semi-honest parties; ring learning with errors at 128 bits.

Cost
----
Per owner 2nK ciphertexts up for n samples in all, one down for each batch.

References
----------
[BlindFed] double-blind federated adaptation, section 3.3; lines numbered here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from cloister.arrays import F64, I64, U32
from cloister.errors import CloisterError, DataError, ProtocolAbort
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.crypto.owner_ckks import scheme as block
from cloister.mpc.crypto.owner_ckks.scheme import Evaluator, OwnerKey, Parameters
from cloister.mpc.net.channel import Channel
from cloister.mpc.net.wire import message
from cloister.study import Party

NAME = "encrypted_loss"
SMALLEST = 1e-6  # probabilities below it count as this
NOISE_BITS = 20
MOST = 1 << 16


@dataclass(frozen=True, slots=True)
class Params:  # public
    owners: tuple[Party, ...]
    provider: Party
    crypto: Parameters
    labels: int  # K


@message("L1")
class Key:  # u → P
    b: U32  # (K, tight)
    seed: bytes
    sizes: I64  # (m,)


@message("L2")
class Sample:  # u → P
    c0: U32  # (2K, primes, tight): labels, then log-probabilities
    seed: bytes


@message("L3")
class Loss:  # P → u
    c: U32  # (1, 3, primes, tight)


def ideal(params: Params, inputs: Mapping[Party, tuple[F64, Any, Any]]) -> dict[Party, F64 | None]:
    """The mean cross-entropy of every batch, to the owner."""
    given: dict[Party, F64 | None] = {params.provider: None}
    for u in params.owners:
        p, codes, sizes = inputs[u]
        each = -np.log(np.maximum(p[np.arange(len(codes)), codes], SMALLEST))
        given[u] = np.array([part.mean() for part in np.split(each, np.cumsum(sizes)[:-1])])
    return given


def roles(params: Params) -> dict[Party, object]:
    return {params.provider: provider} | dict.fromkeys(params.owners, owner)


def cost(params: Params, samples: int = 1, batches: int = 1) -> dict[Party, tuple[int, int]]:
    """Messages and payload, where every owner has so many samples and batches."""
    one, u = params.crypto.count * params.crypto.tight * 4, len(params.owners)
    up = (1 + samples, one * (1 + 2 * params.labels * samples))
    return {params.provider: (u * batches, 3 * u * batches * one)} | dict.fromkeys(params.owners, up)


def check_sizes(sizes: Any, samples: int) -> None:
    if not len(sizes) or int(np.min(sizes)) < 1 or not 0 < samples <= MOST or int(np.sum(sizes)) != samples:
        raise DataError(f"expected batches of 1 to {MOST} samples in all, and a label for each")


async def owner(ch: Channel, params: Params, p: F64, codes: Any, sizes: I64, *, entropy: Entropy) -> F64:
    """The part of u, with probabilities (n, K), the codes of the true labels, and how many each batch has."""
    n, crypto, P = len(p), params.crypto, params.provider
    check_sizes(sizes, n)
    if p.shape != (n, params.labels) or len(codes) != n or not 0 <= np.min(codes) <= np.max(codes) < params.labels:
        raise DataError(f"expected probabilities of {params.labels} labels, and a label for each sample")
    key, mine = OwnerKey(crypto, entropy), ch.sub(str(ch.me))
    await mine.send(P, Key(block.pack_words(crypto, key.b), key.seed, np.asarray(sizes, np.int64)))  # L1
    logs, losses, at = np.log(np.clip(p, SMALLEST, 1.0)), [], 0
    for size in sizes:
        for i in range(at, at + size):
            seed = entropy.bytes(32)
            x = np.concatenate([np.eye(params.labels)[codes[i]], logs[i]])
            c0 = key.encrypt(np.repeat(x[:, None], crypto.slots, axis=1), seed, entropy)
            await mine.send(P, Sample(block.pack_words(crypto, c0), seed))  # L2
        c = await mine.recv(P, Loss, c=(1, 3, crypto.count, crypto.tight))  # L3
        total = float(key.read(_read(crypto, c.c, "L3", P), crypto.scale**2, 1)[0, 0])
        losses.append(-total / size)
        at += size
    what = f"mean losses of {len(sizes)} batches, {n} samples in all"
    return ch.reveal(np.array(losses), to=ch.me, line="L3", what=what, protocol=NAME)


async def provider(ch: Channel, params: Params, *, entropy: Entropy) -> None:
    """The part of P."""
    crypto, K = params.crypto, params.labels

    async def serve(u: Party) -> None:
        mine = ch.sub(str(u))
        key = await mine.recv(u, Key, b=(crypto.count, crypto.tight), sizes=(None,))  # L1
        try:
            check_sizes(key.sizes, int(key.sizes.sum()))
        except DataError as e:
            raise ProtocolAbort(NAME, "L1", "malformed", f"from '{u}': {e}") from None
        if len(key.seed) != 32:
            raise ProtocolAbort(NAME, "L1", "malformed", f"'{u}' sent no seed of 32 bytes")
        ev = Evaluator(crypto, _read(crypto, key.b, "L1", u), key.seed)
        for size in key.sizes:
            total = np.zeros((1, 3, crypto.count, crypto.degree), np.uint32)
            for _ in range(size):
                m = await mine.recv(u, Sample, c0=(2 * K, crypto.count, crypto.tight))  # L2
                c = block.expand(crypto, _read(crypto, m.c0, "L2", u), m.seed)
                total = ev.combine([(1, total), (1, ev.dot(c[:K], c[K:])[None])])
            await mine.send(u, Loss(ev.host(ev.flood(total, NOISE_BITS, crypto.count, entropy))))  # L3

    await asyncio.gather(*(serve(u) for u in params.owners))


def _read(params: Parameters, x: U32, line: str, who: Party) -> Any:
    try:
        return block.unpack_words(params, x)
    except CloisterError as e:
        raise ProtocolAbort(NAME, line, "malformed", f"from '{who}': {e}") from None
