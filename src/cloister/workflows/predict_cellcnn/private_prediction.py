"""Private prediction: a querier learns the logits of its samples; the owner of an opened model does not see them.

    L1  q → S   b, seeds, c0_j for every marker j     samples as slots, under the querier's own key
    L2  S → q   [U_k] = Σ_j M[j, k]·[x_j] + [0] + ε    for every class k; [0] fresh, ε floods the noise to 2^-40

The querier encrypts with its secret key, so the second polynomials come from a seed and do not travel.

Reveals
-------
querier : U = X·M for its samples: an untouched c1 or noise would reveal the weights, so S adds a fresh encryption of
    zero and floods. One ciphertext holds N/2 samples, so one query can determine M. Sites that trained have M already;
    a querier from outside is answered only if every site consents to that ("whole-model").
server : how many ciphertexts of N/2 samples were submitted. A malicious server learns no more.

Assumes
-------
The server knows the model. Its answer is not verified: a malicious server can answer falsely. A malicious querier may
send any ciphertexts, and learns linear functions of M, as it would from samples.

Cost
----
Querier: one polynomial per marker up, and its key. Server: two polynomials per class.

References
----------
[SAV22] Sav et al., PriCell, Patterns 2022 (prediction with a decrypted model); flooding as in `threshold_decrypt`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from cloister.arrays import F64
from cloister.errors import DataError, ParameterError, ProtocolAbort
from cloister.mpc.crypto.ckks import scheme as ckks
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.crypto.rns.ring import SIGMA
from cloister.mpc.net.channel import Channel
from cloister.mpc.net.wire import message
from cloister.mpc.threshold_ckks.collective_key import read
from cloister.study import Party

NAME = "private_prediction"
RING = ckks.Parameters(8192, base=3, base_bits=39, levels=1, per_level=1, level_bits=30)
SCALE = 2.0**84  # of the samples
WEIGHT = 1 << 20  # weights become integers: exact to 5e-7
MAX_WEIGHT = 2.0**6


@dataclass(frozen=True, slots=True)
class Params:  # public
    querier: Party
    server: Party
    markers: int
    classes: int
    chunks: int = 1  # of N/2 samples

    def __post_init__(self) -> None:
        if self.querier == self.server or min(self.markers, self.chunks) < 1 or self.classes < 2:
            raise ParameterError("a private prediction needs two parties, markers, and at least two classes")
        if self.markers > 4096:
            raise ParameterError(f"{self.markers} markers are too many for the noise; at most 4096")

    @property
    def noise(self) -> float:
        """Standard deviation of fresh noise times integer weights, over all markers."""
        return SIGMA * WEIGHT * MAX_WEIGHT * math.sqrt(self.markers)


@message("L1")
class Query:  # q → S
    b: bytes  # public key
    key_seed: bytes
    seed: bytes
    c0: tuple[bytes, ...]  # chunk by chunk, marker by marker


@message("L2")
class Answer:  # S → q
    c0: tuple[bytes, ...]  # chunk by chunk, class by class
    c1: tuple[bytes, ...]


def ideal(params: Params, inputs: Mapping[Party, F64]) -> dict[Party, F64 | None]:
    return {params.server: None, params.querier: inputs[params.querier] @ inputs[params.server]}


def roles(params: Params) -> dict[Party, object]:
    parts: dict[Party, object] = {params.server: server, params.querier: querier}
    return parts


def cost(params: Params) -> dict[Party, tuple[int, int]]:
    one = ckks.context(RING).packed(RING.base)
    up = one * (params.chunks * params.markers + 1) + 64
    return {params.querier: (1, up), params.server: (1, one * 2 * params.chunks * params.classes)}


async def querier(ch: Channel, params: Params, X: F64, *, entropy: Entropy) -> F64:
    """X (samples, m) → logits (samples, o)."""
    c, k, n = ckks.context(RING), RING.base, RING.slots
    if X.ndim != 2 or X.shape[1] != params.markers or not 0 < len(X) <= params.chunks * n:
        raise DataError(f"expected up to {params.chunks * n} samples of {params.markers} markers, found {X.shape}")
    if not np.isfinite(X).all() or np.abs(X).max() > 2.0**5:
        raise DataError("a marker's mean lies beyond ±32 or is missing; standardise the markers as in training")
    r, prg = c.ring, entropy.prg()
    secret = ckks.Secret.draw(RING, entropy)
    key_seed, seed = entropy.bytes(32), entropy.bytes(32)
    b = r.add_product(r.error(prg, k), ckks.common(RING, key_seed, "own", k), secret.ntt, sign=-1)
    padded = np.zeros((params.chunks * n, params.markers))
    padded[: len(X)] = X
    sent = []
    for part in range(params.chunks):
        for j in range(params.markers):
            x = c.encode(padded[part * n : (part + 1) * n, j], k, SCALE).residues
            r.add(x, r.error(prg, k))
            sent.append(c.pack(r.add_product(x, ckks.common(RING, seed, f"{part}/{j}", k), secret.ntt, sign=-1)))
    await ch.send(params.server, Query(c.pack(b), key_seed, seed, tuple(sent)))  # L1
    answer = await ch.recv(params.server, Answer)  # L2
    if len(answer.c0) != params.chunks * params.classes or len(answer.c1) != len(answer.c0):
        raise ProtocolAbort(NAME, "L2", "malformed", "another number of ciphertexts than classes")
    logits = np.zeros((params.chunks * n, params.classes))
    for at, (c0, c1) in enumerate(zip(answer.c0, answer.c1, strict=True)):
        part, label = divmod(at, params.classes)
        m = read(c, c0, k, NAME, "L2", params.server)
        r.add_product(m, read(c, c1, k, NAME, "L2", params.server), secret.ntt)
        opened = ch.reveal(m, to=ch.me, line="L2", what="the result of my query", protocol=NAME)
        logits[part * n : (part + 1) * n, label] = c.decode(opened, SCALE * WEIGHT)
    return logits[: len(X)]


async def server(ch: Channel, params: Params, M: F64, *, entropy: Entropy) -> None:
    """The part of the model's owner, with M (m, o)."""
    c, k, q = ckks.context(RING), RING.base, params.querier
    if M.shape != (params.markers, params.classes) or not np.abs(M).max() < MAX_WEIGHT:
        raise DataError(f"expected a model of shape {(params.markers, params.classes)} with weights below 64")
    weights = np.rint(M * WEIGHT).astype(np.int64)
    query = await ch.recv(q, Query)  # L1
    if len(query.c0) != params.chunks * params.markers:
        raise ProtocolAbort(NAME, "L1", "malformed", "another number of ciphertexts than markers")
    r, prg = c.ring, entropy.prg()
    b, a = read(c, query.b, k, NAME, "L1", q), ckks.common(RING, query.key_seed, "own", k)
    out0, out1 = [], []
    for part in range(params.chunks):
        xs = []
        for j in range(params.markers):
            c0 = read(c, query.c0[part * params.markers + j], k, NAME, "L1", q)
            xs.append((c0, ckks.common(RING, query.seed, f"{part}/{j}", k)))
        for label in range(params.classes):
            u = r.forward(r.of_small(prg.ternary(RING.degree), k))
            y0 = r.add_product(r.flood(prg, ckks.flood_bits(RING, params.noise), k), b, u)
            y1 = r.add_product(r.error(prg, k), a, u)
            for (c0, c1), w in zip(xs, weights[:, label], strict=True):
                for row in range(k):
                    r.add_multiple(y0, c0, int(w), row)
                    r.add_multiple(y1, c1, int(w), row)
            out0.append(c.pack(y0))
            out1.append(c.pack(y1))
    await ch.send(q, Answer(tuple(out0), tuple(out1)))  # L2


async def bystander(ch: Channel, params: Params) -> None:
    """A party of the study that neither asks nor answers."""
