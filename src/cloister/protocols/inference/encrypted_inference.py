"""Encrypted inference: owners learn a few projected features of their samples under a model that stays unseen.

    L1  u → P   b, seed, batches, P     u's public key (b, a), a from the seed; P tokens share a ciphertext
                switching keys          encryptions of s², s³, … under s, with a seed of their own; of turned keys
        P → u   l                       0; of an asking that broke off, the blocks of its next batch that are done: L5
                                        of these comes again as it was, and P goes on behind them (`asking_state`)
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
    how many it gets. After a break it gets the taps again that were sent, the same bits.
lying owner : more. What it encrypts at L2 or L4 instead of what it should, it finds again at the next tap, times
    weights of its choice: a few batches read a layer (`test_inference_attacks`). No more than the bits that taps hold,
    22 to 26 for each of r·N coefficients, times the batches of its budget (`lying_owner.exposure`, in the provider's
    results).
provider : how many batches each owner brings (whole ones, of N/2 samples or of N/2 / P), and that it stopped after
    the last tap (L5, code `range`), if no sample's features kept their bounds; that it asks for the rest of what an
    earlier run began. Not the samples. Owners learn nothing of each other but that; an owner and the provider together
    hold that owner's data and the model.

Assumes
-------
An owner's samples stay hidden from a provider that lies; it can give wrong features ((a), (b), (c), (e), (f) of the
provider are not all noticed), and learns whether an owner stopped. The model is kept from owners that follow the
protocol: (b) of the owner, at L2 or L4, is not noticed. Nothing ties its answers to what it was sent: they carry
rounding and fresh noise of 2^-20, and lies that hide below the noise of a whole opening show at a tap still
(docs/decisions/0011 has the figures). Ring learning with errors at 128 bits, and circular security: the provider holds
switching keys, encryptions of powers of an owner's key under itself; with P > 1 also of the key with its slots turned,
and of its product with the key.
Masks hide perfectly at L3; of a batch, a coefficient goes round and spoils the result once in 2^16 batches or less
(`Opening.hiding`). Statistical hiding of 2^-40 per coefficient of the last stretch's noise at L5. What earlier
refreshes rounded off is part of the value that is read; the flooding at L5 is wider than it, but not by 40 bits. With
quadratic attention that is about 2^-13 of an activation, so in weak directions of a tap as much as the flooding.
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
from pathlib import Path
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
from cloister.protocols.inference.asking_state import Answers, Taps, check_start
from cloister.protocols.inference.block_circuit import Circuit
from cloister.protocols.inference.block_messages import chunks, pairs, parts, powers, read, seed_of, together, traffic
from cloister.protocols.inference.block_plan import Tap, circuit_of, flooded, tap_of
from cloister.protocols.inference.block_values import Recipe, Values
from cloister.protocols.inference.packing import Packing, announced, cheapest
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


@message("L1")
class Start:  # P → u
    block: int


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
    return {params.provider: (n * (1 + trips + len(planned.taps)), n * down)} | dict.fromkeys(params.owners, up)


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

    async def batch(self, x: F64, packed: Packing, done: int) -> F64:
        """The taps of one batch, of which so many blocks are done: (n, taps, r), NaN where a bound was left."""
        self.beyond.clear()
        planned = packed.plan
        if not done:
            await self.send_inputs(packed.filled(x))  # L2
        first = planned.blocks[done - 1] if done else 0
        taps = [await self.read_tap(tap, packed, len(x)) for at, tap in planned.taps if at <= first]
        for n, openings in enumerate(planned.rounds[first:], first + 1):
            for how in openings:
                await self.answer(how)
            taps += [await self.read_tap(tap, packed, len(x)) for at, tap in planned.taps if at == n]
        beyond = np.any(self.beyond, axis=0)
        beyond |= float(beyond.mean()) > MOST_BEYOND  # then it is the batch that is spoilt
        return np.where(beyond[:, None, None], np.nan, np.stack(taps, axis=1))

    async def read_tap(self, tap: Tap, packed: Packing, count: int) -> F64:
        P, s, p = self.params.provider, self.params.shape, self.params.crypto
        c = await self.ch.recv(P, Features, c=(s.rank, 2, tap.primes, p.tight))  # L5
        features = packed.read(self.key.read(read(p, c.c, "L5", P), tap.scale, p.slots), count)
        self.beyond.append(~(np.abs(features) <= tap.bound).all(axis=1))  # NaN is not <= anything
        what = f"{s.rank} features of block {tap.block} for {count} samples"
        return self.ch.reveal(features, to=self.ch.me, line="L5", what=what, protocol=NAME)


async def owner(ch: Channel, params: Params, inputs: F64, kept: Taps | None = None, *, entropy: Entropy) -> F64:
    """The part of u. Returns the taps of its samples, (n, taps, r); NaN for those whose values left their intervals."""
    if not len(inputs):
        raise DataError("there is no sample to ask about")
    check_inputs(params.shape, inputs, MOST_BEYOND)
    good = takes(params.shape, inputs)
    features = np.full((len(inputs), len(params.shape.taps), params.shape.rank), np.nan)
    features[good] = await ask(ch, params, inputs[good], kept or Taps(), entropy)
    return features


async def ask(ch: Channel, params: Params, inputs: F64, kept: Taps, entropy: Entropy) -> F64:
    """All batches of an owner, whose inputs are within their bounds; what is kept is not asked for again."""
    packed = cheapest(params.shape, params.crypto, len(inputs))  # the same again after a break
    key, begun, rest = kept.key(params.crypto, entropy, len(inputs)), kept.begun, inputs[kept.count :]
    side, count = OwnerSide(ch.sub(str(ch.me)), params, key, entropy), packed.batches(len(rest))
    ch.step(f"{len(rest)} samples, {packed.price(len(rest))}", protocol=NAME, line="L1")
    await side.send_key(packed.plan.openings, count, packed.tokens)  # L1
    done = (await side.ch.recv(params.provider, Start)).block  # L1
    check_start(done, params.shape.depth if begun and count else 0)
    for start in range(0, len(rest), packed.samples):
        taps = await side.batch(rest[start : start + packed.samples], packed, 0 if start else done)  # L2 to L5
        kept.add(taps, key if start + packed.samples < len(rest) else None)
    found = np.concatenate(kept.read)
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

    async def make_tap(self, circuit: Circuit, x: Values, tap: Tap) -> U32:
        y = await circuit.tap(x, self.params.shape.taps.index(tap.block))
        made: U32 = self.ev.host(flooded(self.ev, y, tap, self.entropy))
        return made

    async def send_tap(self, c: U32, tap: Tap) -> None:
        what = f"{len(c)} features of block {tap.block} for a batch"
        self.ch.record_opening(to=self.who, line="L5", what=what, protocol=NAME)
        await self.ch.send(self.who, Features(c))  # L5


async def provider(
    ch: Channel,
    params: Params,
    encoder: Encoder,
    ledger: Ledger | None = None,
    device: Device = "cpu",
    folder: Path | None = None,
    *,
    entropy: Entropy,
) -> dict[Party, int]:
    """The part of P, for all owners side by side. Returns how many batches each had; `folder` keeps how far it is."""
    devices.check(device)
    if encoder.shape != params.shape:
        raise ParameterError("the model has another shape than was announced")
    p, s, rounded, ledger = params.crypto, params.shape, encoder.rounded(params.crypto.weight_bits), ledger or Ledger()

    async def serve(u: Party) -> int:
        mine = ch.sub(str(u))
        key = await mine.recv(u, Key, b=(p.count, p.tight), switching=(None, p.count, p.count, p.tight))  # L1
        packed = announced(s, p, key.tokens, len(key.switching), key.batches, u)
        about = key.seed + key.b.tobytes() + repr((s, packed.tokens)).encode()
        (answers, unpaid), many = Answers.of(folder, u, about, key.batches), packed.samples
        ledger.admit(u, unpaid * many, math.ceil(params.budget / many) * many)
        if unpaid:
            answers.start(unpaid)
        side = ProviderSide(mine, params, u, key, entropy, device)
        await mine.send(u, Start(answers.block))  # L1
        for n in range(key.batches):
            await answer(side, answers, packed, key.batches, n)
        return key.batches

    async def answer(side: ProviderSide, answers: Answers, packed: Packing, count: int, n: int) -> None:
        """One batch, from where it is."""
        planned, P = packed.plan, packed.tokens
        circuit = circuit_of(s, P)(s, p, side.refresh, rounded, side.ev, planned.openings, side.pool)
        done = answers.block if n == 0 else 0
        if done:
            for number, words in enumerate(answers.taps):
                await side.send_tap(words, tap_of(s, p, number, P))  # L5, again
            circuit.follow(planned.openings_after(done))
            x = answers.values(side.ev, side.pool, p.degree) if done < s.depth else Values(0, 2, p.scale)
        else:
            inputs = await side.inputs(packed.inputs)  # L2
            if n:
                answers.start(count - n)
            x = await circuit.embed(inputs)
        for layer in range(done, s.depth):
            at, last = f"batch {n + 1} of {count}, block {layer + 1} of {s.depth}", layer + 1 == s.depth
            ch.step(f"{side.who}: {at}", protocol=NAME, line="L3")
            x = await circuit.block(x, layer, 1 if last else 0)
            tapped = [tap_of(s, p, which, P) for which, at in enumerate(s.taps) if at == layer + 1]
            made = [await side.make_tap(circuit, x, tap) for tap in tapped]
            answers.add(layer + 1, None if last else x, side.ev, made)
            for tap, c in zip(tapped, made, strict=True):
                await side.send_tap(c, tap)  # L5

    counts = await asyncio.gather(*(serve(u) for u in params.owners))
    return dict(zip(params.owners, counts, strict=True))
