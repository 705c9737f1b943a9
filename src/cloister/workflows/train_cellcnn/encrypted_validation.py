"""Validation of an encrypted CellCnn: everyone learns one number, the squared error on inputs that no site trained on.

Whether a class is right is no polynomial; the squared error of the fitted sigmoid is. With S' = (σ(U) - Y) / a3, slots
and scales as in `cellcnn_circuit` and `cellcnn_ladder`:

    L1  i → S   [S'² + K_i] + [0],  S' = U³ + (a1/a3)·U + (a0 - Y)/a3     from [M], held-out inputs X and labels Y;
                                    [0] is fresh, K_i a uniform pad, which the refresh takes off
    L2  S → v   Σ_i [S'² + K_i]
        all     refresh (Σ_i [S'² + K_i]) → [loss], a3² times the mean over sites, inputs and classes, at every slot
        i       `collective_audit` of the sum and the refresh
        all     `threshold_decrypt` → all sites and S

Reveals
-------
aggregator, holder : the mean squared error over all sites' held-out inputs, to about four digits. With two sites, each
    learns the other's mean. n - 1 sites with the aggregator learn no more.
one malicious site : the same at a model that it has steered (`encrypted_training`), the same for all inputs: one number
    per validation, which is a sum over all held-out inputs of each other site.

Assumes
-------
As `encrypted_training`, whose keys, auditor and [M] it uses, and whose check of [M] precedes it. Logits stay below 4;
beyond, the number is wrong, and refused where it is more than any logit below 4 could make. Only scales from 2^92 on
leave room for that; others are refused.

Cost
----
Per site: one local iteration, two ciphertexts up; one refresh and one opening.

References
----------
None; lines numbered here. [SAV22] decrypts such a number after an epoch by agreement.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from cloister.arrays import F64, U64
from cloister.errors import DataError, ParameterError, ProtocolAbort, RefusedError
from cloister.models import cellcnn
from cloister.mpc.crypto.ckks import scheme as ckks
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.crypto.rns.ring import Residues
from cloister.mpc.crypto.rns.slots import SlotMap, make_map
from cloister.mpc.net.channel import Channel
from cloister.mpc.net.wire import message
from cloister.mpc.threshold_ckks import collective_audit, collective_refresh, threshold_decrypt
from cloister.mpc.threshold_ckks.collective_audit import AuditLog, Collective
from cloister.mpc.threshold_ckks.collective_key import added, read
from cloister.study import Party
from cloister.workflows.train_cellcnn.cellcnn_circuit import Layout, logits
from cloister.workflows.train_cellcnn.level_schedule import chain
from cloister.workflows.train_cellcnn.training_keys import Keys

NAME = "encrypted_validation"
CUBED = 2  # primes that the cube spends
LARGEST = 4.0  # logit


@dataclass(frozen=True, slots=True)
class Params(Collective):  # public
    config: cellcnn.Config
    samples: int  # held-out inputs of each site

    def __post_init__(self) -> None:
        Collective.__post_init__(self)
        L = self.layout
        if not 1 <= self.samples <= L.I or len(L.groups) > 1:
            raise ParameterError(
                f"validation takes 1 to {L.I} inputs of each site and all classes in one ciphertext, found"
                f" {self.samples} inputs and {len(L.groups)} ciphertexts"
            )
        if self.error > 2e-3:
            raise ParameterError(
                f"the validation error would be exact to {self.error:.1g} only; use the ring of `ring_for`"
            )
        refresh(self)

    @property
    def layout(self) -> Layout:
        return Layout(self.config, self.ckks, len(self.holders))

    @property
    def squared(self) -> int:
        """Primes that the square spends: all that are left."""
        return self.layout.ladder.primes[1] - CUBED - self.ckks.base

    @property
    def scales(self) -> tuple[float, float]:
        """Of S' and of S'²."""
        c, ladder = ckks.context(self.ckks), self.layout.ladder
        k_u, k_b, _, _ = ladder.primes
        w = 2.0**ladder.square_bits
        u = math.sqrt(w * c.dropped(k_u, ladder.spent[0]))
        first = u * w / c.dropped(k_b, CUBED)
        return first, first**2 / c.dropped(k_b - CUBED, self.squared)

    @property
    def bounds(self) -> tuple[float, float]:
        """Of |S'| and of its slope in U."""
        a0, a1, a3 = cellcnn.sigmoid_fit(self.config.interval)
        u = np.linspace(0, LARGEST, 101)
        return np.abs(u**3 + a1 / a3 * u).max() + a0 / abs(a3), np.abs(3 * u * u + a1 / a3).max()

    @property
    def noise(self) -> float:
        """Standard deviation of the opened number's noise, which stands at every slot and so in one coefficient."""
        _, _, a3 = cellcnn.sigmoid_fit(self.config.interval)
        largest, slope = self.bounds
        c, (first, second) = ckks.context(self.ckks), self.scales
        one = ckks.rounding_noise(self.ckks, len(self.holders))
        cubed = one * (1 + slope * self.layout.J * first / 2.0**self.layout.ladder.square_bits)
        noise = one + 2 * largest * cubed * first / c.dropped(self.layout.ladder.primes[1] - CUBED, self.squared)
        fresh = ckks.encryption_noise(self.ckks, len(self.holders))
        spread = math.hypot(noise, fresh) * math.sqrt(self.ckks.degree) * a3 * a3 * self.ckks.scale / second
        return math.hypot(spread, fresh)

    @property
    def error(self) -> float:
        """Standard deviation that the flooding leaves in the mean over all slots."""
        flood = 2.0 ** (ckks.flood_bits(self.ckks, self.noise) - 1) * math.sqrt(len(self.holders))
        return flood * math.sqrt(self.ckks.degree / self.ckks.slots) / self.ckks.scale


def ring_for(config: cellcnn.Config, parties: int) -> ckks.Parameters:
    """The ring for a training with validation."""
    params = chain(16384, scale_bits=92, value_bits=10, parties=parties)
    layout = Layout(config, params, parties)
    if layout.opening_error > 2e-4 or layout.answer_error > 4e-3:
        raise ParameterError(
            f"{config.steps} steps at learning rate {config.learning_rate:g} need a ring on which validation does not"
            " fit; train without it, or with fewer steps"
        )
    return params


@message("L1")
class Squares:  # i → S
    c0: bytes
    c1: bytes


@message("L2")
class Summed:  # S → v
    c0: bytes
    c1: bytes


def ideal(params: Params, inputs: Mapping[Party, tuple[cellcnn.Weights, F64, F64]]) -> dict[Party, float]:
    """The clear number; the test's inputs of a site carry the plain weights."""
    losses = [loss(params.config, *inputs[i]) for i in params.holders]
    return dict.fromkeys((params.aggregator, *params.holders), float(np.mean(losses)))


def loss(config: cellcnn.Config, w: cellcnn.Weights, X: F64, Y: F64) -> float:
    return float(((cellcnn.sigmoid(config, cellcnn.logits(w, X)) - Y) ** 2).mean())


def roles(params: Params) -> dict[Party, object]:
    return {params.aggregator: aggregator} | dict.fromkeys(params.holders, holder)


def cost(params: Params) -> dict[Party, tuple[int, int]]:
    two = 2 * ckks.context(params.ckks).packed(params.ckks.base)
    sent = dict.fromkeys(params.holders, (1, two)) | {params.aggregator: (1, two)}
    return added(sent, collective_refresh.cost(refresh(params)[0]), threshold_decrypt.cost(opening(params)))


def refresh(params: Params) -> tuple[collective_refresh.Params, list[SlotMap]]:
    """All slots of samples and classes summed, and the mean put everywhere."""
    L, P, n = params.layout, params.ckks, len(params.holders)
    _, _, a3 = cellcnn.sigmoid_fit(params.config.interval)
    at = [L.at(0, k, i) for k in range(params.config.classes) for i in range(params.samples)]
    row = (np.arange(P.slots), np.array(at), a3 * a3 / (len(at) * n))
    maps = [make_map([row], P.slots, real=True)]
    digests = tuple(m.digest for m in maps)
    value_bits = math.ceil(math.log2(n * params.bounds[0] ** 2))
    who = (params.holders, params.aggregator, P)
    return collective_refresh.Params(*who, (params.scales[1],), (P.base,), digests, value_bits), maps


def opening(params: Params) -> threshold_decrypt.Params:
    P = params.ckks
    who = (params.holders, params.aggregator, P)
    what = "the squared error on all sites' held-out inputs"
    return threshold_decrypt.Params(*who, what, P.base, P.scale, params.noise)


def squares(params: Params, M: ckks.Cipher, X: F64, Y: F64, keys: Keys) -> ckks.Cipher:
    """[S'²] at the base primes."""
    c, L = ckks.context(params.ckks), params.layout
    ladder, (a0, a1, a3) = L.ladder, cellcnn.sigmoid_fit(params.config.interval)
    k_b = ladder.primes[1]
    U = logits(L, M, X, keys.rotation)
    low = c.drop(U, k_b)
    cubic = c.product(low, c.square(U, keys.relin, ladder.spent[0]), keys.relin)
    linear = c.multiply_plain(low, c.encode(a1 / a3, k_b, cubic.scale / low.scale))
    table = np.zeros((L.J, L.O, L.I))
    table[:, : Y.shape[1], : len(Y)] = ((a0 - Y) / a3).T[None]
    S = c.rescale(c.add_plain(c.add(cubic, linear), L.spread(table)), CUBED)
    return c.square(S, keys.relin, params.squared)


def padded_squares(
    params: Params, M: ckks.Cipher, X: F64, Y: F64, keys: Keys, entropy: Entropy
) -> tuple[U64, Residues]:
    """[S'² + K] + [0] and the pad K, which is uniform, so that others hold nothing."""
    c = ckks.context(params.ckks)
    raw, _ = c.raw(c.rerandomise(keys.public, squares(params, M, X, Y, keys), entropy))
    pad = collective_refresh.pad(refresh(params)[0], entropy)
    c.ring.add(raw[0], pad)
    return raw, pad


def check_samples(params: Params, X: F64, Y: F64) -> None:
    shapes = (params.samples, params.config.markers), (params.samples, params.config.classes)
    if (X.shape, Y.shape) != shapes or not np.isfinite(X).all() or np.abs(X).max() > 2.0**5:
        raise DataError(
            f"expected standardised held-out inputs and labels of shapes {shapes}, found {X.shape, Y.shape}"
        )


def check_consent(consent: frozenset[str]) -> None:
    if "validation" not in consent:
        raise RefusedError("this site did not consent to validation during training; agree on validate_every=0")


def check_loss(params: Params, slots: F64) -> float:
    """The mean over the slots, unless no logits below `LARGEST` could have made it."""
    _, _, a3 = cellcnn.sigmoid_fit(params.config.interval)
    loss = float(slots.mean())
    if not -1 < loss <= 1 + (params.bounds[0] * a3) ** 2:
        raise ProtocolAbort(NAME, "L2", "diverged", "the squared error is beyond what logits within ±4 can make")
    return loss


async def holder(
    ch: Channel,
    params: Params,
    model: ckks.Cipher,
    keys: Keys,
    X: F64,
    Y: F64,
    *,
    entropy: Entropy,
    consent: frozenset[str],
) -> float:
    check_consent(consent)
    check_samples(params, X, Y)
    keys.spend(1)
    c, S, book, sub = ckks.context(params.ckks), params.aggregator, AuditLog(), ch.sub("refresh")
    p, maps = refresh(params)
    raw, pad = padded_squares(params, model, X, Y, keys, entropy)
    await ch.send(S, Squares(c.pack(raw[0]), c.pack(raw[1])))  # L1
    book.sent(*raw)
    cts = None
    if ch.me == p.auditor:
        got = await ch.recv(S, Summed)  # L2
        sums = np.stack([read(c, x, params.ckks.base, NAME, "L2", S) for x in (got.c0, got.c1)])
        book.total(*sums)
        cts = [c.cipher(sums, params.scales[1])]
    refreshed = await collective_refresh.contribute(sub, p, keys.share, maps, cts, book, entropy=entropy, pads=[pad])
    await collective_audit.holder(ch.sub("audit"), params.audit, book, entropy=entropy)
    c1, c0 = collective_refresh.common(sub, p, 0), None if refreshed is None else c.raw(refreshed[0])[0][0]
    slots = await threshold_decrypt.holder(
        ch.sub("open"), opening(params), keys.share, c1, c0, entropy=entropy, consent=consent, needed="validation"
    )
    return check_loss(params, slots)


async def aggregator(ch: Channel, params: Params) -> float:
    c, k = ckks.context(params.ckks), params.ckks.base
    total = np.stack([c.ring.zeros(k)] * 2)
    for i, got in (await ch.gather(params.holders, Squares)).items():  # L1
        c.ring.add(total[0], read(c, got.c0, k, NAME, "L1", i))
        c.ring.add(total[1], read(c, got.c1, k, NAME, "L1", i))
    p, maps = refresh(params)
    await ch.send(p.auditor, Summed(c.pack(total[0]), c.pack(total[1])))  # L2
    (ct,) = await collective_refresh.aggregator(ch.sub("refresh"), p, [c.cipher(total, params.scales[1])], maps)
    return check_loss(params, await threshold_decrypt.aggregator(ch.sub("open"), opening(params), ct))
