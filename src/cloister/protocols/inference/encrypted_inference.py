"""Encrypted inference: owners learn a few projected features of their samples under a model that stays unseen.

    L1  u → P   b, seed, batches, P     u's public key (b, a), a from the seed; P tokens share a ciphertext
                switching keys          encryptions of s², s³, … under s, with a seed of their own; of turned keys
    per batch (slot = sample; with P > 1, slot = (token, sample)):
    L2  u → P   [x]                     one ciphertext per input number
    per round of the plan (`block_plan.plan`):
    L3  P → u   [y + i·y' + M]          two values; re-randomised, M uniform modulo Q: u sees no activation
    L4  u → P   [⌊2·Re(…)·f⌋], …        each encrypted afresh; P subtracts what M makes of it
    after the tapped blocks, about a third of them and never two adjacent ones:
    L5  P → u   [R·b_cls - c]           r numbers per sample, re-randomised, flooded below their tenth bit

With quadratic attention (`quadratic_circuit`) only normalised values and weighted sums go through L3 and L4; the
activations between blocks and the scores never do. Of the last block only the class token is computed.

An owner of few samples lets tokens share ciphertexts (`packing`, `grid_circuit`): it takes what moves the fewest bytes.

The taps are fixed in the plan, for every sample and for all time: asking again gives the same numbers again, with other
noise: a sample that fills k slots or batches is read √k finer.

Reveals
-------
owner : per sample and tap r numbers (the class token through a fixed projection of rank r < d), good to about 2^-10;
    the shape of the model and the intervals of its values (`Shape`). Nothing of any other activation. With enough
    samples, an owner can fit a model of its own to these features, as with any service that answers: the budget bounds
    how many it gets.
lying owner : more. What it encrypts at L2 or L4 instead of what it should, it finds again at the next tap, times
    weights of its choice: a few batches read a layer (`test_inference_attacks`). No more than the bits that taps hold,
    22 to 26 for each of r·N coefficients, times the batches of its budget (`lying_owner.exposure`, in the provider's
    results).
provider : how many batches each owner brings (whole ones, of N/2 samples or of N/2 / P), and that it stopped after
    the last tap (L5, code `range`), if no sample's features kept their bounds. Not the samples. Owners
    learn nothing of each other but that; an owner and the provider together hold that owner's data and the model.

Assumes
-------
An owner's samples stay hidden from a provider that lies; it can give wrong features ((a), (b), (c), (e), (f) of the
provider are not all noticed), and learns whether an owner stopped. The model is kept from owners that follow the
protocol: (b) of the owner, at L2 or L4, is not noticed. Nothing ties its answers to what it was sent: they carry
rounding and fresh noise of 2^-20, and lies that hide below the noise of a whole opening show at a tap still
(docs/decisions/0011 has the figures). Ring learning with errors at 128 bits, and circular security: the provider holds
switching keys, encryptions of powers of an owner's key under itself; with P > 1 also of the key with its slots turned,
and of its product with the key.
Masks hide perfectly at L3; of a batch, a coefficient goes
round and spoils the result once in 2^16 batches or less (`Opening.hiding`). Statistical hiding of 2^-40 per coefficient
of the last stretch's noise at L5. What earlier refreshes rounded off is part of the value that is read; the flooding at
L5 is wider than it, but not by 40 bits. With quadratic attention that is about 2^-13 of an activation, so in weak
directions of a tap as much as the flooding.
Masks hide from the owner, too, that values left their intervals: it notices at the taps, whose bounds come from the
calibration. Slots do not mix, so the other samples of the batch are as they should be: it leaves out those beyond a
bound. Samples whose inputs are beyond theirs are left out before anything is encrypted. Only a value that is 2^40 times
too large makes masks go round, and spoils its batch, whose samples are left out together.

Cost
----
See `cost`: per batch and round, 2·KEEP·N residues down for two refreshed values and k'·N up for each (`Opening`);
residues travel without gaps, 28 bits each (26 in the small ring). Once per owner K²·N for each power of its key.
Ciphertexts travel in messages of at most `CHUNK`, of which at most `AHEAD` are on the way: the owner holds one message
at a time, the provider a share of a block that does not grow with the number of tokens (`owner_ckks.shelf`). With
`device="gpu"` the provider computes on a graphics card (`owner_ckks.gpu`): the same messages, so owners do not notice.

References
----------
[BlindFed] double-blind federated adaptation, section 3.2, with blinded refreshes instead of permuted openings.
[GIL09] Gentry's thesis on re-randomisation and circuit privacy. Lines numbered here.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cloister.arrays import F64, U32
from cloister.crypto.entropy import Entropy
from cloister.crypto.owner_ckks import devices
from cloister.crypto.owner_ckks import scheme as block
from cloister.crypto.owner_ckks.devices import Device
from cloister.crypto.owner_ckks.scheme import Opening, OwnerKey, Parameters
from cloister.errors import CloisterError, DataError, ParameterError, ProtocolAbort
from cloister.models.polynomial import Encoder, Shape, check_inputs, hidden, takes, taps_of
from cloister.net.channel import Channel
from cloister.net.wire import message
from cloister.protocols.inference.block_messages import chunks, pairs, parts, powers, together, traffic
from cloister.protocols.inference.block_plan import Tap, circuit_of, flooded, tap_of
from cloister.protocols.inference.block_values import Recipe, Values
from cloister.protocols.inference.packing import Packing, cheapest
from cloister.protocols.inference.query_ledger import Ledger as Ledger
from cloister.study import Party

NAME = "encrypted_inference"
AHEAD = 8  # messages that a provider sends before it waits for an answer
MOST_BEYOND = 0.5  # of samples: with more beyond a bound, it is the batch that is spoilt, or all inputs that are wrong


@dataclass(frozen=True, slots=True)
class Params:  # public
    owners: tuple[Party, ...]
    provider: Party
    shape: Shape
    crypto: Parameters
    budget: int = 1 << 16  # samples per owner, over all runs that share a ledger

    def __post_init__(self) -> None:
        if not self.owners or self.provider in self.owners or len(set(self.owners)) != len(self.owners):
            raise ParameterError("inference needs owners, all different, and a provider apart from them")
        if not self.shape.taps or not self.shape.variances or not self.shape.means:
            raise ParameterError("this model has no taps or was not calibrated; export it with both")


@message("L1")
class Key:  # u → P
    b: U32  # (K, tight)
    seed: bytes
    switching: U32  # (keys, K, K, tight)
    switching_seed: bytes
    batches: int
    tokens: int  # P


@message("L2")
class Inputs:  # u → P
    c0: U32  # (n, K, tight)
    seed: bytes


@message("L3")
class Blinded:  # P → u
    c: U32  # (⌈n/2⌉, 2, KEEP, tight)


@message("L4")
class Fresh:  # u → P
    c0: U32  # (2⌈n/2⌉, k', tight)
    seed: bytes


@message("L5")
class Features:  # P → u
    c: U32  # (r, 2, k, tight)


def ideal(params: Params, inputs: Mapping[Party, Any]) -> dict[Party, F64 | None]:
    """The taps of every sample, to its owner alone."""
    encoder: Encoder = inputs[params.provider].rounded(params.crypto.weight_bits)
    given: dict[Party, F64 | None] = {params.provider: None}
    return given | {u: taps_of(encoder, hidden(encoder, inputs[u])) for u in params.owners}


def roles(params: Params) -> dict[Party, object]:
    return {params.provider: provider} | dict.fromkeys(params.owners, owner)


def cost(params: Params) -> dict[Party, tuple[int, int]]:
    """Messages and payload of one batch per owner, as an owner of one sample packs it."""
    p, s, packed = params.crypto, params.shape, cheapest(params.shape, params.crypto, 1)
    one, planned = p.tight * 4, packed.plan  # bytes of a polynomial at one prime
    trips, sent, back = traffic(planned.openings)
    whole = 1 + packed.inputs + packed.keys * p.count
    up = 1 + len(parts(packed.inputs)) + trips, (whole * p.count + back) * one
    down = (sent + sum(s.rank * 2 * t.primes for _, t in planned.taps)) * one
    n = len(params.owners)
    return {params.provider: (n * (trips + len(planned.taps)), n * down)} | dict.fromkeys(params.owners, up)


# ---- local steps -----------------------------------------------------------------------------------------------------


def read(params: Parameters, x: U32, line: str, who: Party) -> Any:
    try:
        return block.unpack_words(params, x)
    except CloisterError as e:
        raise ProtocolAbort(NAME, line, "malformed", f"from '{who}': {e}") from None


def seed_of(seed: bytes, line: str, who: Party) -> bytes:
    if len(seed) != 32:
        raise ProtocolAbort(NAME, line, "malformed", f"'{who}' sent no seed of 32 bytes")
    return seed


def packing_of(params: Params, key: Key, who: Party) -> Packing:
    """What an owner announced, if there is such a thing, and its keys are those that it takes."""
    try:
        packed = Packing(params.shape, params.crypto, key.tokens)
    except ParameterError as e:
        raise ProtocolAbort(NAME, "L1", "malformed", f"from '{who}': {e}") from None
    if key.batches < 1 or len(key.switching) != packed.keys:
        found = f"{key.batches} batches and {len(key.switching)} switching keys, where it takes {packed.keys}"
        raise ProtocolAbort(NAME, "L1", "malformed", f"'{who}' announces {found}")
    return packed


# ---- roles -----------------------------------------------------------------------------------------------------------


class OwnerSide:
    """The owner's half of a batch: opens, rescales and encrypts what is masked; reads what is meant for it."""

    def __init__(self, ch: Channel, params: Params, key: OwnerKey, entropy: Entropy) -> None:
        self.ch, self.params, self.key, self.entropy = ch, params, key, entropy
        self.beyond: list[Any] = []  # tap by tap, which samples of the batch left its bound

    async def send_key(self, openings: Sequence[Opening], batches: int, tokens: int = 1) -> None:
        """What the provider needs for that plan."""
        key, p, seed = self.key, self.params.crypto, self.entropy.bytes(32)
        switching = block.pack_words(p, key.switching(powers(openings) + 2, seed, self.entropy, tokens))
        mine = Key(block.pack_words(p, key.b), key.seed, switching, seed, batches, tokens)
        await self.ch.send(self.params.provider, mine)  # L1

    async def send_inputs(self, x: F64) -> None:
        """Encrypt slots (n, N/2)."""
        for part in parts(len(x)):
            seed = self.entropy.bytes(32)
            c0 = self.key.encrypt(x[part], seed, self.entropy)
            await self.ch.send(self.params.provider, Inputs(block.pack_words(self.params.crypto, c0), seed))

    async def answer(self, how: Opening) -> None:
        P, p = self.params.provider, self.params.crypto
        for part in chunks(how):
            c = await self.ch.recv(P, Blinded, c=(pairs(part), 2, block.KEEP, p.tight))  # L3
            seed = self.entropy.bytes(32)
            fresh = self.key.refresh(read(p, c.c, "L3", P), how, seed, self.entropy)
            await self.ch.send(P, Fresh(block.pack_words(p, fresh), seed))  # L4

    async def read_tap(self, tap: Tap, packed: Packing, count: int) -> F64:
        P, s, p = self.params.provider, self.params.shape, self.params.crypto
        c = await self.ch.recv(P, Features, c=(s.rank, 2, tap.primes, p.tight))  # L5
        features = packed.read(self.key.read(read(p, c.c, "L5", P), tap.scale, p.slots), count)
        self.beyond.append(~(np.abs(features) <= tap.bound).all(axis=1))  # NaN is not <= anything
        what = f"{s.rank} features of block {tap.block} for {count} samples"
        return self.ch.reveal(features, to=self.ch.me, line="L5", what=what, protocol=NAME)


async def owner(ch: Channel, params: Params, inputs: F64, *, entropy: Entropy) -> F64:
    """The part of u. Returns the taps of its samples, (n, taps, r); NaN for those whose values left their intervals."""
    if not len(inputs):
        raise DataError("there is no sample to ask about")
    check_inputs(params.shape, inputs, MOST_BEYOND)
    good = takes(params.shape, inputs)
    features = np.full((len(inputs), len(params.shape.taps), params.shape.rank), np.nan)
    features[good] = await ask(ch, params, inputs[good], entropy)
    return features


async def ask(ch: Channel, params: Params, inputs: F64, entropy: Entropy) -> F64:
    """All batches of an owner, whose inputs are within their bounds."""
    packed = cheapest(params.shape, params.crypto, len(inputs))
    side, planned = OwnerSide(ch.sub(str(ch.me)), params, OwnerKey(params.crypto, entropy), entropy), packed.plan
    ch.step(f"{len(inputs)} samples, {packed.price(len(inputs))}", protocol=NAME, line="L1")
    await side.send_key(planned.openings, packed.batches(len(inputs)), packed.tokens)  # L1
    features = []
    for start in range(0, len(inputs), packed.samples):
        x = inputs[start : start + packed.samples]
        side.beyond.clear()
        await side.send_inputs(packed.filled(x))  # L2
        read_after, taps = dict(planned.taps), []
        for n, openings in enumerate(planned.rounds):
            for how in openings:
                await side.answer(how)
            if n + 1 in read_after:
                taps.append(await side.read_tap(read_after[n + 1], packed, len(x)))
        beyond = np.any(side.beyond, axis=0)
        beyond |= float(beyond.mean()) > MOST_BEYOND  # then it is the batch that is spoilt
        features.append(np.where(beyond[:, None, None], np.nan, np.stack(taps, axis=1)))
    found = np.concatenate(features)
    if np.isnan(found).all():  # only now: which batch it was is nobody else's business
        raise ProtocolAbort(NAME, "L5", "range", "features beyond their bounds; samples are unlike the model's own")
    return found


class ProviderSide:
    """The provider's half: masks, sends, and takes the masks off again."""

    def __init__(
        self, ch: Channel, params: Params, who: Party, key: Key, entropy: Entropy, device: Device = "cpu"
    ) -> None:
        b = read(params.crypto, key.b, "L1", who)
        seed_of(key.seed, "L1", who)
        self.ch, self.params, self.who, self.entropy = ch, params, who, entropy
        self.ev = devices.evaluator(device, params.crypto, b, key.seed)
        self.ev.accept(read(params.crypto, key.switching, "L1", who), seed_of(key.switching_seed, "L1", who))
        self.pool = self.ev.pool()

    def put(self, words: U32, line: str) -> Any:
        """Residues from the wire, where the evaluator has its arrays."""
        try:
            return self.ev.put(words)
        except CloisterError as e:
            raise ProtocolAbort(NAME, line, "malformed", f"from '{self.who}': {e}") from None

    async def inputs(self, n: int) -> Values:
        p = self.params.crypto
        shelf = self.pool.shelf(n, 2, p.count, p.degree)
        for part in parts(n):
            m = await self.ch.recv(self.who, Inputs, c0=(part.stop - part.start, p.count, p.tight))  # L2
            c0 = self.put(m.c0, "L2")
            shelf.put(part.start, self.ev.expand(c0, seed_of(m.seed, "L2", self.who)))
        return Values(n, 2, p.scale, shelf.read, p.count)

    async def refresh(self, groups: list[tuple[Opening, Recipe]]) -> list[Recipe]:
        p = self.params.crypto
        back: list[Recipe] = []
        ahead: deque[tuple[Opening, slice, bytes, Any]] = deque()

        async def collect() -> None:
            how, part, masks, shelf = ahead.popleft()
            m = await self.ch.recv(self.who, Fresh, c0=(2 * pairs(part), how.back, p.tight))  # L4
            seed = seed_of(m.seed, "L4", self.who)
            fresh = self.ev.unblind(self.put(m.c0, "L4"), seed, how, masks)
            shelf.put(part.start, fresh[: part.stop - part.start])

        for how, recipe in groups:
            shelf = self.pool.shelf(how.count, 2, how.back, p.degree)
            back.append(shelf.read)
            step, some, lo = together(how, self.ev.at_once), None, 0
            for part in chunks(how):
                if some is None or part.start == lo + step:
                    lo = part.start
                    some = recipe(range(lo, min(how.count, lo + step)), how.primes)
                masks = self.entropy.bytes(32)
                sent = self.ev.blind(some[part.start - lo : part.stop - lo], how, masks, self.entropy)
                await self.ch.send(self.who, Blinded(self.ev.host(sent)))  # L3
                ahead.append((how, part, masks, shelf))
                if len(ahead) > AHEAD:
                    await collect()
        while ahead:
            await collect()
        return back

    async def send_tap(self, y: Values, tap: Tap) -> None:
        c = flooded(self.ev, y, tap, self.entropy)
        what = f"{y.n} features of block {tap.block} for a batch"
        self.ch.record_opening(to=self.who, line="L5", what=what, protocol=NAME)
        await self.ch.send(self.who, Features(self.ev.host(c)))  # L5


async def provider(
    ch: Channel,
    params: Params,
    encoder: Encoder,
    ledger: Ledger | None = None,
    device: Device = "cpu",
    *,
    entropy: Entropy,
) -> dict[Party, int]:
    """The part of P, for all owners side by side. Returns how many batches each had."""
    devices.check(device)
    if encoder.shape != params.shape:
        raise ParameterError("the model has another shape than was announced")
    rounded, ledger = encoder.rounded(params.crypto.weight_bits), ledger or Ledger()

    async def serve(u: Party) -> int:
        mine, p, s = ch.sub(str(u)), params.crypto, params.shape
        key = await mine.recv(u, Key, b=(p.count, p.tight), switching=(None, p.count, p.count, p.tight))  # L1
        packed = packing_of(params, key, u)
        many = packed.samples
        ledger.admit(u, key.batches * many, math.ceil(params.budget / many) * many)
        side = ProviderSide(mine, params, u, key, entropy, device)
        for n in range(key.batches):
            kind, openings = circuit_of(s, packed.tokens), packed.plan.openings
            circuit = kind(s, p, side.refresh, rounded, side.ev, openings, side.pool)
            x = await circuit.embed(await side.inputs(packed.inputs))
            for layer in range(s.depth):
                ch.step(
                    f"{u}: batch {n + 1} of {key.batches}, block {layer + 1} of {s.depth}", protocol=NAME, line="L3"
                )
                x = await circuit.block(x, layer, 1 if layer + 1 == s.depth else 0)
                if layer + 1 in s.taps:
                    which = s.taps.index(layer + 1)
                    await side.send_tap(await circuit.tap(x, which), tap_of(s, p, which, packed.tokens))
        return key.batches

    counts = await asyncio.gather(*(serve(u) for u in params.owners))
    return dict(zip(params.owners, counts, strict=True))
