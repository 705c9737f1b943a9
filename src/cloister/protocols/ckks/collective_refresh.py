"""Collective refresh: ciphertexts out of levels become fresh ones, and their slots are rearranged on the way for free.

Inputs ct_j = (c0_j, c1_j) at the base primes, outputs at as many primes as asked for. f_l is the public linear map on
slots that makes output l from all inputs (`slots.SlotMap`), a_l public, M_ij uniform below 2^b, all e fresh and small:

    L1  S → i   c1_j                     for every input
    L2  i → S   h_ij = c1_j·s_i + e - M_ij        modulo the base primes
                g_il = -a_l·s_i + e' + f_l(M_i)   modulo the output's primes
    L3  S       x_j = c0_j + Σ_i h_ij = m_j - Σ_i M_ij    as integers, since n·2^b + |m| < Q/2
                output l = (f_l(x) + Σ_i g_il, a_l)       which encrypts f_l(m)

f is computed to 104 bits on both sides (`slots`), and brings every output to the scale Δ.

Reveals
-------
aggregator : x_j, which is m_j hidden 2^40-fold by the mask of each single holder. With n - 1 holders: the same.
holder : nothing (c1 is uniform to it).

Assumes
-------
Semi-honest parties. |slots| ≤ 2^value_bits, which the circuit has to keep: a message beyond it is hidden less, and one
beyond 2^(mask room) would wrap. Refused where the mask would be less than 2^40 wider than the message, or could wrap.
A holder answers once for a ciphertext (`Ledger`).

Cost
----
Per holder: one message each way; one polynomial over the base primes per input both ways, and one over its primes
per output up. Two wide transforms per input and output.

References
----------
[MTBH21] Mouchet et al., PETS 2021, protocol 4 (bootstrapping); [SAV22] PriCell, supplementary note 4 (repacking).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from cloister.arrays import F64, U64
from cloister.crypto.ckks import scheme as ckks
from cloister.crypto.entropy import Entropy
from cloister.crypto.lattice.slots import (
    LIMBS,
    MASK_BITS,
    SlotMap,
    WideSlots,
    embedding,
    limbs_to_wide,
    random_limbs,
    wide_to_limbs,
)
from cloister.errors import ParameterError, ProtocolAbort
from cloister.net.channel import Channel
from cloister.net.wire import message
from cloister.protocols.ckks.collective_key import check_holders, read
from cloister.study import Party

NAME = "collective_refresh"


@dataclass(frozen=True, slots=True)
class Params:  # public
    holders: tuple[Party, ...]
    aggregator: Party
    ckks: ckks.Parameters
    scales: tuple[float, ...]  # of the inputs
    outputs: tuple[int, ...]  # primes of the outputs
    maps: tuple[bytes, ...]  # digests of the slot maps, one per output
    value_bits: int = 6  # |slot| ≤ 2^value_bits

    def __post_init__(self) -> None:
        check_holders(self.holders, self.aggregator)
        if len(self.maps) != len(self.outputs) or not all(1 <= k <= self.ckks.top for k in self.outputs):
            raise ParameterError("a refresh needs one slot map per output, at 1 to L primes")
        need = math.log2(max(self.scales)) + self.value_bits + ckks.FLOOD_BITS
        if self.mask_bits < need:
            raise ParameterError(
                f"refresh refused: a mask of {need:.0f} bits hides these messages, and {self.mask_bits} fit without"
                f" wrapping among {len(self.holders)} holders; use more or larger base primes"
            )

    @property
    def mask_bits(self) -> int:
        """The widest masks whose sum stays below a quarter of the base modulus."""
        base = self.ckks.base * self.ckks.base_bits - 1  # SEAL takes the largest primes of a size
        return min(MASK_BITS, base - 2 - (len(self.holders) - 1).bit_length())


@message("L1")
class Request:  # S → i
    c1: tuple[bytes, ...]


@message("L2")
class Share:  # i → S
    h: tuple[bytes, ...]
    g: tuple[bytes, ...]


class Ledger:
    """What this party has answered for, and which ciphertexts it knows to be the circuit's."""

    def __init__(self) -> None:
        self._spent: set[bytes] = set()
        self._known: set[bytes] = set()

    def spend(self, c1: bytes, protocol: str, line: str) -> None:
        """Raise if a share for this ciphertext has been given already."""
        digest = hashlib.sha256(c1).digest()
        if digest in self._spent:
            raise ProtocolAbort(protocol, line, "repeated", "a second share for one ciphertext would thin its noise")
        self._spent.add(digest)

    def admit(self, c1: bytes) -> None:
        """Remember a ciphertext as the circuit's own, by its second polynomial: shares depend on nothing else."""
        self.admit_digest(hashlib.sha256(c1).digest())

    def admit_digest(self, digest: bytes) -> None:
        self._known.add(digest)

    def check_known(self, c1: bytes, protocol: str, line: str) -> None:
        if hashlib.sha256(c1).digest() not in self._known:
            raise ProtocolAbort(protocol, line, "foreign", "a ciphertext that the agreed circuit did not make")


def ideal(
    params: Params, inputs: Mapping[Party, tuple[tuple[F64, ...], Sequence[SlotMap]]]
) -> dict[Party, list[F64] | None]:
    """Slots of the outputs; the test's aggregator inputs carry the plain slots."""
    values, maps = inputs[params.aggregator]
    z = np.concatenate(values)
    return {params.aggregator: [np.real(m.apply_plain(z)) for m in maps]} | dict.fromkeys(params.holders)


def roles(params: Params) -> dict[Party, object]:
    return {params.aggregator: aggregator} | dict.fromkeys(params.holders, holder)


def cost(params: Params) -> dict[Party, tuple[int, int]]:
    c = ckks.context(params.ckks)
    n, down = len(params.holders), len(params.scales) * c.packed(params.ckks.base)
    up = down + sum(c.packed(k) for k in params.outputs)
    return {params.aggregator: (n, n * down)} | dict.fromkeys(params.holders, (1, up))


def check_maps(params: Params, maps: Sequence[SlotMap]) -> None:
    if tuple(m.digest for m in maps) != params.maps:
        raise ParameterError("the slot maps are not those that the parties agreed on")


def apply_map(params: Params, m: SlotMap, z: WideSlots) -> WideSlots:
    """f, with every input's scale brought to Δ."""
    ratio = np.array([params.ckks.scale / s for s in params.scales])
    weights = m.weight * ratio[m.source // params.ckks.slots]
    return SlotMap(m.start, m.source, weights, m.place).apply(z)


async def holder(
    ch: Channel,
    params: Params,
    secret: ckks.Secret,
    maps: Sequence[SlotMap],
    ledger: Ledger,
    *,
    entropy: Entropy,
    known: bool = False,
) -> None:
    """Give a share; with `known`, only for ciphertexts that the ledger admitted."""
    check_maps(params, maps)
    c, S = ckks.context(params.ckks), params.aggregator
    r, base, e, prg = c.ring, params.ckks.base, embedding(params.ckks.degree), entropy.prg()
    request = await ch.recv(S, Request)  # L1
    if len(request.c1) != len(params.scales):
        raise ProtocolAbort(NAME, "L1", "malformed", f"{len(request.c1)} ciphertexts, expected {len(params.scales)}")
    hs, masks = [], []
    for c1 in request.c1:
        if known:
            ledger.check_known(c1, NAME, "L1")
        ledger.spend(c1, NAME, "L1")
        limbs = random_limbs(prg.uint64((LIMBS, params.ckks.degree)), params.mask_bits)
        h = r.add_product(r.error(prg, base), read(c, c1, base, NAME, "L1", S), secret.ntt)
        r.subtract(h, r.forward(r.limbs_to_residues(limbs, base)))
        hs.append(c.pack(h))
        masks.append(e.to_slots(limbs_to_wide(limbs)))
    z = np.concatenate(masks, axis=1)
    gs = []
    for i, (k, m) in enumerate(zip(params.outputs, maps, strict=True)):
        mapped = r.limbs_to_residues(wide_to_limbs(e.to_coefficients(apply_map(params, m, z))), k)
        g = r.add_product(r.error(prg, k), common(ch, params, i), secret.ntt, sign=-1)
        gs.append(c.pack(r.add(g, r.forward(mapped))))
    await ch.send(S, Share(tuple(hs), tuple(gs)))  # L2


def common(ch: Channel, params: Params, output: int) -> U64:
    """The second polynomial of an output: public, so that only the first has to travel."""
    return ckks.common(params.ckks, ch.run_id, f"refresh/{output}", params.outputs[output])


async def aggregator(
    ch: Channel, params: Params, cts: Sequence[ckks.Cipher], maps: Sequence[SlotMap]
) -> list[ckks.Cipher]:
    check_maps(params, maps)
    c = ckks.context(params.ckks)
    r, base, e = c.ring, params.ckks.base, embedding(params.ckks.degree)
    raws = []
    for ct, scale in zip(cts, params.scales, strict=True):
        raw, found = c.raw(c.drop(ct, base))
        if abs(found / scale - 1) > 1e-9 or raw.shape[:2] != (2, base):
            raise ParameterError(f"refresh refused: a ciphertext at {raw.shape[1]} primes and scale {found:g}")
        raws.append(raw)
    await ch.scatter(params.holders, Request(tuple(c.pack(raw[1]) for raw in raws)))  # L1
    totals = [raw[0] for raw in raws]
    outs = [r.zeros(k) for k in params.outputs]
    for i, share in (await ch.gather(params.holders, Share)).items():  # L2
        if len(share.h) != len(totals) or len(share.g) != len(outs):
            raise ProtocolAbort(NAME, "L2", "malformed", f"'{i}' sent another number of shares")
        for total, h in zip(totals, share.h, strict=True):
            r.add(total, read(c, h, base, NAME, "L2", i))
        for out, k, g in zip(outs, params.outputs, share.g, strict=True):
            r.add(out, read(c, g, k, NAME, "L2", i))
    z = np.concatenate([e.to_slots(np.stack(r.lift(r.backward(x)))) for x in totals], axis=1)  # L3
    made = []
    for index, (k, m, out) in enumerate(zip(params.outputs, maps, outs, strict=True)):
        mapped = r.limbs_to_residues(wide_to_limbs(e.to_coefficients(apply_map(params, m, z))), k)
        r.add(out, r.forward(mapped))
        made.append(c.cipher(np.stack([out, common(ch, params, index)]), params.ckks.scale))
    return made
