"""Collective refresh: ciphertexts out of levels become fresh ones, and their slots are rearranged on the way for free.

Inputs ct_j = (c0_j, c1_j) at the base primes, outputs at as many primes as asked for. f_l is the public linear map on
slots that makes output l from all inputs (`slots.SlotMap`), a_l public, all e fresh and small. The first holder v
audits; the second, m, masks with M_mj uniform modulo the base primes, the others with M_ij of 2^(46 + message's bits):

    L1  i → i'  k_ii'                    for i before i'; ζ_ij are made of them, and add up to zero over the holders
    L2  S → i   c1_j                     for every input; v has made them itself
    L3  i → S   h_ij = c1_j·s_i + e - M_ij - K_ij + ζ_ij   modulo the base primes; K_ij: a pad, or 0
                g_il = -a_l·s_i + e' + f_l(M_i + ε_i) modulo the output's primes; ε_i = 0, or a flood
    L4  S       x_j = c0_j + Σ_i h_ij = m_j - Σ_i M_ij    as integers
                output l = (f_l(x) + Σ_i g_il, a_l)       which encrypts f_l(m)
        S → v   x_j and the first polynomials of the outputs
        i       `collective_audit`: Σ_i h_ij = x_j - c0_j, Σ_i g_il = output l - f_l(x), and everyone had v's c1_j

A holder that owns a part of an input, [z_i], adds a pad K_i to it before anybody receives it: a polynomial that is
uniform modulo the base primes. Its own h takes the pad off again, and only the sum of all h is of any use. So whoever
holds [z_i + K_i] has a ciphertext whose plaintext is uniform, whatever z_i is, and f(z) is all that comes of it.

f is computed in integers of 256 bits on both sides (`slots`), and brings every output to the scale Δ. With floods, the
outputs keep nothing of the noise that the inputs had gathered: it is hidden behind Σ ε_i, once and for all.

Reveals
-------
aggregator, v : x_j, which is uniform modulo the base primes, whatever ciphertext it belongs to. So nothing shows where
    a message leaves its bounds, or where an aggregator has a ciphertext refreshed that is not the circuit's.
holder : nothing (c1 is uniform to it).
Collusions: whoever has x_j and m's mask sees m_j behind the mask of each single other holder, hidden to 2^-40 for a
    run of 4096 polynomials; so n - 1 holders and the aggregator learn nothing of messages within their bounds.

Assumes
-------
Any one party may lie. An aggregator that makes other outputs is caught at the audit, before anybody uses them. A holder
that deviates adds any polynomial that it knows to the outputs, small or large: what depends on them may be opened only
if `collective_range` bounds them, or if few functionals of them are opened (docs/security/threshold_ckks.md).
√(mean of slots²) ≤ 2^value_bits, which the circuit has to keep: beyond it, collusions see more. A coefficient wraps
with probability 2^-36, and spoils the result.

Cost
----
Per holder: one message each way; one polynomial over the base primes per input both ways, and one over its primes
per output up; 32 bytes to each holder after it; one audit. The auditor gets a polynomial per input and output.
Two transforms of 256-bit numbers per input and output, twice as many at the auditor.

References
----------
[MTBH21] Mouchet et al., PETS 2021, protocol 4 (bootstrapping); [SAV22] PriCell, supplementary note 4 (repacking). The
uniform mask, the pairwise ones and the audit are ours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from cloister.arrays import F64, U64
from cloister.errors import ParameterError, ProtocolAbort
from cloister.mpc.crypto import cores
from cloister.mpc.crypto.ckks import scheme as ckks
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.crypto.prg import Prg
from cloister.mpc.crypto.rns.ring import Residues
from cloister.mpc.crypto.rns.slots import SlotMap, Words, embedding
from cloister.mpc.net.channel import Channel
from cloister.mpc.net.wire import message
from cloister.mpc.parties import Party
from cloister.mpc.threshold_ckks import collective_audit
from cloister.mpc.threshold_ckks.collective_audit import AuditLog, Collective
from cloister.mpc.threshold_ckks.collective_key import added, read

NAME = "collective_refresh"
LEAST_WRAP_BITS = 34


@dataclass(frozen=True, slots=True)
class Params(Collective):  # public
    scales: tuple[float, ...]  # of the inputs
    outputs: tuple[int, ...]  # primes of the outputs
    maps: tuple[bytes, ...]  # digests of the slot maps, one per output
    value_bits: int = 6  # √(mean of slots²) ≤ 2^value_bits
    flood_bits: int = 0  # of ε; 0: none
    audited: bool = True  # False only where `published` says so: no L4, no audit

    def __post_init__(self) -> None:
        Collective.__post_init__(self)
        if len(self.maps) != len(self.outputs) or not all(1 <= k <= self.ckks.top for k in self.outputs):
            raise ParameterError("a refresh needs one slot map per output, at 1 to L primes")
        if self.wrap_bits < LEAST_WRAP_BITS:
            raise ParameterError(
                f"refresh refused: masks of {self.mask_bits} bits hide these messages, and one coefficient in"
                f" 2^{self.wrap_bits:.0f} would wrap; use more or larger base primes"
            )

    @property
    def masker(self) -> Party:
        """Whose mask is uniform; it must not see x."""
        return self.holders[1]

    @property
    def mask_bits(self) -> int:
        """Of the masks that are not uniform."""
        return math.ceil(math.log2(max(self.scales))) + self.value_bits + ckks.HIDING_BITS

    @property
    def wrap_bits(self) -> float:
        """-log2 of the probability that a coefficient wraps: what is under the uniform mask, against the modulus."""
        return self.ckks.base * (self.ckks.base_bits - 1e-6) - self.mask_bits - math.log2(len(self.holders)) / 2


@message("L1")
class PairKey:  # i → i'
    key: bytes


@message("L2")
class Request:  # S → i
    c1: tuple[bytes, ...]


@message("L3")
class Share:  # i → S
    h: tuple[bytes, ...]
    g: tuple[bytes, ...]


@message("L4")
class Work:  # S → v
    x: tuple[bytes, ...]
    c0: tuple[bytes, ...]


def ideal(
    params: Params, inputs: Mapping[Party, tuple[tuple[F64, ...], Sequence[SlotMap]]]
) -> dict[Party, list[F64] | None]:
    """Slots of the outputs; the test's aggregator inputs carry the plain slots."""
    values, maps = inputs[params.aggregator]
    outputs = [np.real(m.apply_plain(np.concatenate(values))) for m in maps]
    return {params.aggregator: outputs, params.auditor: outputs} | dict.fromkeys(params.holders[1:])


def roles(params: Params) -> dict[Party, object]:
    return {params.aggregator: aggregator} | dict.fromkeys(params.holders, holder)


def cost(params: Params, *, audited: bool = True) -> dict[Party, tuple[int, int]]:
    c = ckks.context(params.ckks)
    n, down = len(params.holders), len(params.scales) * c.packed(params.ckks.base)
    out = sum(c.packed(k) for k in params.outputs)
    sent = {params.aggregator: (n, n * down + (out if params.audited else 0))}
    for at, i in enumerate(params.holders):
        later = n - 1 - at
        sent[i] = (1 + later, down + out + 32 * later)
    return added(sent, collective_audit.cost(params.audit, primes_of(params))) if audited else sent


def primes_of(params: Params) -> int:
    return max(params.ckks.base, *params.outputs)


def check_maps(params: Params, maps: Sequence[SlotMap]) -> None:
    if tuple(m.digest for m in maps) != params.maps:
        raise ParameterError("the slot maps are not those that the parties agreed on")


def mapped(params: Params, maps: Sequence[SlotMap], xs: Sequence[Words]) -> list[Residues]:
    """f_l of these integers for every output l, with every input's scale brought to Δ, in NTT form."""
    r, e = ckks.context(params.ckks).ring, embedding(params.ckks.degree)
    z = np.concatenate(cores.each(e.to_slots, xs))
    ratio = np.array([params.ckks.scale / s for s in params.scales])

    def output(at: int) -> Residues:
        return r.forward(r.of_integers(e.to_coefficients(maps[at].apply(z, ratio)), params.outputs[at]))

    return cores.each(output, range(len(params.outputs)))


def common(ch: Channel, params: Params, output: int) -> U64:
    """The second polynomial of an output: public, so that only the first has to travel."""
    return ckks.common(params.ckks, ch.run_id, f"refresh/{output}", params.outputs[output])


def integers(params: Params, x: Residues) -> Words:
    r = ckks.context(params.ckks).ring
    return r.integers(r.backward(x.copy()))


# ---- masks ----------------------------------------------------------------------------------------------------------


def pad(params: Params, entropy: Entropy) -> Residues:
    """A uniform polynomial for the owner of a part of an input: added to its ciphertext, and taken off by its share."""
    return ckks.context(params.ckks).ring.uniform(entropy.prg(), params.ckks.base)


# ---- masks that add up to zero ---------------------------------------------------------------------------------------


async def pair_keys(ch: Channel, holders: Sequence[Party], entropy: Entropy) -> dict[Party, bytes]:
    """L1: a key with every other holder, drawn by the earlier of the two."""
    at = holders.index(ch.me)
    keys = {p: entropy.bytes(32) for p in holders[at + 1 :]}
    await ch.scatter({p: PairKey(k) for p, k in keys.items()})
    for p, got in (await ch.gather(holders[:at], PairKey)).items():
        if len(got.key) != 32:
            raise ProtocolAbort(NAME, "L1", "malformed", f"'{p}' sent no key of 32 bytes")
        keys[p] = got.key
    return keys


class ZeroShares:
    """ζ_i: uniform polynomials that add up to zero over all holders."""

    def __init__(self, params: ckks.Parameters, me: Party, keys: Mapping[Party, bytes]) -> None:
        self._ring = ckks.context(params).ring
        self._streams = {p: Prg(k) for p, k in sorted(keys.items())}
        self._me = me

    def add_to(self, h: Residues) -> Residues:
        for p, stream in self._streams.items():
            zeta = self._ring.uniform(stream, len(h))
            h = self._ring.add(h, zeta) if self._me < p else self._ring.subtract(h, zeta)
        return h


# ---- roles -----------------------------------------------------------------------------------------------------------


async def holder(
    ch: Channel,
    params: Params,
    secret: ckks.Secret,
    maps: Sequence[SlotMap],
    cts: Sequence[ckks.Cipher] | None = None,
    *,
    entropy: Entropy,
) -> list[ckks.Cipher] | None:
    """Give a share and audit. The auditor brings the ciphertexts that it has made itself, and takes the outputs."""
    book = AuditLog()
    outputs = await contribute(ch, params, secret, maps, cts, book, entropy=entropy)
    await collective_audit.holder(ch.sub("audit"), params.audit, book, entropy=entropy)
    return outputs


async def contribute(
    ch: Channel,
    params: Params,
    secret: ckks.Secret,
    maps: Sequence[SlotMap],
    cts: Sequence[ckks.Cipher] | None,
    book: AuditLog,
    *,
    entropy: Entropy,
    pads: Sequence[Residues] = (),
    requested: Callable[[], None] | None = None,
) -> list[ckks.Cipher] | None:
    """The same without the audit, which the caller owes the book before anything is opened.

    `pads` are those that this holder added to its parts of the inputs, one for every input; none without. `requested`
    is called once the inputs are there, before this holder makes its share of them.
    """
    check_maps(params, maps)
    c, S = ckks.context(params.ckks), params.aggregator
    zero = ZeroShares(params.ckks, ch.me, await pair_keys(ch, params.holders, entropy))  # L1
    raws = None
    if cts is not None:
        raws = [raw_input(params, ct, scale) for ct, scale in zip(cts, params.scales, strict=True)]
        second = tuple(c.pack(raw[1]) for raw in raws)
    else:
        second = (await ch.recv(S, Request)).c1  # L2
        if len(second) != len(params.scales):
            raise ProtocolAbort(NAME, "L2", "malformed", f"{len(second)} ciphertexts, expected {len(params.scales)}")
    book.heard(*second)
    c1s = [read(c, c1, params.ckks.base, NAME, "L2", S) for c1 in second]
    if requested is not None:
        requested()
    hs, gs = shares(ch, params, secret, maps, c1s, zero, entropy)
    if pads:
        for h, own in zip(hs, pads, strict=True):
            c.ring.subtract(h, own)
    book.sent(*hs, *gs)
    await ch.send(S, Share(tuple(map(c.pack, hs)), tuple(map(c.pack, gs))))  # L3
    if raws is None:
        return None
    return audit_work(ch, params, maps, raws, await ch.recv(S, Work), book)  # L4


def raw_input(params: Params, ct: ckks.Cipher, scale: float) -> U64:
    c = ckks.context(params.ckks)
    raw, own_scale = c.raw(c.drop(ct, params.ckks.base))
    if abs(own_scale / scale - 1) > 1e-9 or raw.shape[:2] != (2, params.ckks.base):
        raise ParameterError(f"refresh refused: a ciphertext at {raw.shape[1]} primes and scale {own_scale:g}")
    return raw


def shares(
    ch: Channel,
    params: Params,
    secret: ckks.Secret,
    maps: Sequence[SlotMap],
    c1s: Sequence[Residues],
    zero: ZeroShares,
    entropy: Entropy,
) -> tuple[list[Residues], list[Residues]]:
    """L3: h for every input, g for every output."""
    r, base, prg = ckks.context(params.ckks).ring, params.ckks.base, entropy.prg()
    hs, masks = [], []
    for c1 in c1s:
        mask = r.integers(r.uniform(prg, base)) if ch.me == params.masker else r.spread(prg, params.mask_bits)
        h = r.add_product(r.error(prg, base), c1, secret.ntt)
        hs.append(zero.add_to(r.subtract(h, r.forward(r.of_integers(mask, base)))))
        masks.append(r.sum_of(mask, r.spread(prg, params.flood_bits)) if params.flood_bits else mask)
    gs = []
    for index, moved in enumerate(mapped(params, maps, masks)):
        g = r.add_product(r.error(prg, len(moved)), common(ch, params, index), secret.ntt, sign=-1)
        gs.append(r.add(g, moved))
    return hs, gs


def audit_work(
    ch: Channel, params: Params, maps: Sequence[SlotMap], raws: Sequence[U64], work: Work, book: AuditLog
) -> list[ckks.Cipher]:
    """v: what the shares must add up to, if the aggregator did its work; the outputs, if they do."""
    c, S = ckks.context(params.ckks), params.aggregator
    if len(work.x) != len(raws) or len(work.c0) != len(params.outputs):
        raise ProtocolAbort(NAME, "L4", "malformed", f"'{S}' sent another number of polynomials")
    xs = [read(c, x, params.ckks.base, NAME, "L4", S) for x in work.x]
    outs = [read(c, x, k, NAME, "L4", S) for x, k in zip(work.c0, params.outputs, strict=True)]
    book.total(*(c.ring.subtract(x.copy(), raw[0]) for x, raw in zip(xs, raws, strict=True)))
    moved = mapped(params, maps, [integers(params, x) for x in xs])
    book.total(*(c.ring.subtract(out.copy(), m) for out, m in zip(outs, moved, strict=True)))
    return outputs_of(ch, params, outs)


def outputs_of(ch: Channel, params: Params, outs: Sequence[Residues]) -> list[ckks.Cipher]:
    c = ckks.context(params.ckks)
    return [c.cipher(np.stack([out, common(ch, params, i)]), params.ckks.scale) for i, out in enumerate(outs)]


async def aggregator(
    ch: Channel, params: Params, cts: Sequence[ckks.Cipher], maps: Sequence[SlotMap]
) -> list[ckks.Cipher]:
    check_maps(params, maps)
    c = ckks.context(params.ckks)
    r, base = c.ring, params.ckks.base
    raws = [raw_input(params, ct, scale) for ct, scale in zip(cts, params.scales, strict=True)]
    recipients = params.holders[1:] if params.audited else params.holders
    await ch.scatter(recipients, Request(tuple(c.pack(raw[1]) for raw in raws)))  # L2
    xs = [raw[0] for raw in raws]
    outs = [r.zeros(k) for k in params.outputs]
    for i, share in (await ch.gather(params.holders, Share)).items():  # L3
        if len(share.h) != len(xs) or len(share.g) != len(outs):
            raise ProtocolAbort(NAME, "L3", "malformed", f"'{i}' sent another number of shares")
        for x, h in zip(xs, share.h, strict=True):
            r.add(x, read(c, h, base, NAME, "L3", i))
        for out, k, g in zip(outs, params.outputs, share.g, strict=True):
            r.add(out, read(c, g, k, NAME, "L3", i))
    for out, moved in zip(outs, mapped(params, maps, [integers(params, x) for x in xs]), strict=True):
        r.add(out, moved)
    if params.audited:
        await ch.send(params.auditor, Work(tuple(map(c.pack, xs)), tuple(map(c.pack, outs))))  # L4
    return outputs_of(ch, params, outs)
