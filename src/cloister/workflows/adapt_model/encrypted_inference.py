"""Encrypted inference: owners learn a few projected features of their samples under a model that stays unseen.

    L1  u → P   b, seed, batches, P     u's public key (b, a), a from the seed; P tokens share a ciphertext
                switching keys          encryptions of s², s³, … under s, with a seed of their own; of turned keys
        P → u   l                       0; of an asking that broke off, the blocks of its next batch that are done: L5
                                        of these comes again as it was, and P goes on behind them (`asking_state`); or
                                        that this key is not taken up again
    per batch (slot = sample; with P > 1, slot = (token, sample)):
    L2  u → P   [x]                     one ciphertext per input number
    per round of the plan (`block_plan.plan`):
    L3  P → u   [y + i·y' + M]          two values; re-randomised, M uniform modulo Q: u sees no activation
    L4  u → P   [⌊2·Re(…)·f⌋], …        each encrypted afresh; P subtracts what M makes of it
                                        secret sums of the values go along, and come back as the answers' sums, or not
    after every block:
    T1-4        commitments, opened     whether they did (`tied_answers`); if not, u gets no more of this batch
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
    how many it gets. After a break it gets the taps again that were sent, the same bits; for batches of which it was
    told nothing it does not pay again.
malicious owner : taps of inputs of its choice, samples or not. Answers at L4 that are not what they should be end its
    batch before the next tap, unless they are off by little more than honest noise, or by a simple fraction of the
    modulus and luck (`tied_answers`). What passes shows at a tap as a few bits a coefficient, at each T3 its own lies
    as one bit for each of 4·N coefficients. In all no more than the bits that taps and checks hold, times the batches
    of its budget (`lying_owner.exposure`, in the provider's results). Runs side by side get no more than one.
provider : how many batches each owner brings (whole ones, of N/2 samples or of N/2 / P); of each, whether its answers
    were true, and so whether a sample in it is 2^40 times beyond an interval (T4); that it stopped after the last tap
    (L5, code `range`), if no sample's features kept their bounds; that it asks for the rest of what an earlier run
    began. Not the samples. If it lies, it can ask by T1 whether numbers that the owner opens are what it says; the
    first no ends the use of that key, and of the samples that were sent under it and have no taps: it learns after how
    many checks that was, whether of answers or of keys, over all runs with one file of taps. Who asks about the same
    samples without it lets the provider ask anew. Owners learn nothing of each other but that; an owner and the
    provider together hold that owner's data and the model.

Assumes
-------
An owner's samples stay hidden from a provider that lies; it can give wrong features ((a), (b), (c), (e), (f) of the
provider are not all noticed), and learns whether an owner stopped. (b) of the owner is found out at L4, from some
thousand times the noise of an honest answer on (docs/decisions/0011); at L2 it is another sample, and false keys are
found out before the first. Ring learning with errors at 128 bits, and circular security: the provider holds switching
keys, encryptions of powers of an owner's key under itself; with P > 1 also of the key with its slots turned, and of its
product with the key.
Masks hide perfectly at L3; of a batch, a coefficient goes round and spoils the result once in 2^16 batches or less
(`Opening.hiding`). Statistical hiding of 2^-40 per coefficient of the last stretch's noise at L5. What earlier
refreshes rounded off is part of the value that is read; the flooding at L5 is wider than it, but not by 40 bits. With
quadratic attention that is about 2^-13 of an activation, so in weak directions of a tap as much as the flooding.
Masks hide from the owner, too, that values left their intervals: it notices at the taps, whose bounds come from the
calibration. Slots do not mix, so the other samples of the batch are as they should be: it leaves out those beyond a
bound. Samples whose inputs are beyond theirs are left out before anything is encrypted. Only a value that is 2^40 times
too large makes masks go round, and spoils its batch, whose samples are left out together. The owner's key is not used
after that: it goes on with a new one.

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
import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cloister import files
from cloister.arrays import F64
from cloister.errors import DataError, ParameterError, ProtocolAbort
from cloister.models.polynomial import Encoder, Shape, check_inputs, hidden, takes, taps_of
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.crypto.owner_ckks.scheme import Parameters
from cloister.mpc.crypto.owner_ckks.smallness_check import LEAF, SALT, SENT
from cloister.mpc.net.channel import Channel
from cloister.provider.gpu import devices
from cloister.provider.gpu.devices import Device
from cloister.study import Party
from cloister.workflows.adapt_model.batch_roles import MOST_BEYOND, OwnerSide, ProviderSide
from cloister.workflows.adapt_model.block_messages import CONTROLS, NO_MORE, Key, Start, parts, traffic
from cloister.workflows.adapt_model.block_plan import circuit_of, tap_of
from cloister.workflows.adapt_model.block_values import Values
from cloister.workflows.adapt_model.checkpoint import Answers, Taps, check_start
from cloister.workflows.adapt_model.packing import Packing, announced, cheapest
from cloister.workflows.common.query_ledger import Ledger as Ledger

NAME = "encrypted_inference"


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
    whole, checks, compared = 1 + packed.inputs + packed.keys * p.count, s.depth + 1, CONTROLS * p.degree
    messages = 1 + len(parts(packed.inputs)) + trips + 2 * checks
    up = messages, (whole * p.count + back) * one + checks * compared * (SALT + LEAF)
    down = sent + checks * CONTROLS * 2 * SENT + sum(s.rank * 2 * t.primes for _, t in planned.taps)
    n, told = len(params.owners), 1 + trips + 2 * checks + len(planned.taps)
    return {params.provider: (n * told, n * (down * one + checks * compared))} | dict.fromkeys(params.owners, up)


# ---- roles -----------------------------------------------------------------------------------------------------------


async def owner(ch: Channel, params: Params, inputs: F64, kept: Taps | None = None, *, entropy: Entropy) -> F64:
    """The part of u. Returns the taps of its samples, (n, taps, r); NaN for those whose values left their intervals."""
    if not len(inputs):
        raise DataError("there is no sample to ask about")
    check_inputs(params.shape, inputs, MOST_BEYOND)
    good = takes(params.shape, inputs)
    features = np.full((len(inputs), len(params.shape.taps), params.shape.rank), np.nan)
    kept = kept or Taps()
    with kept.held(params.crypto):
        features[good] = await ask(ch, params, inputs[good], kept, entropy)
    return features


async def ask(ch: Channel, params: Params, inputs: F64, kept: Taps, entropy: Entropy) -> F64:
    """All batches of an owner, whose inputs are within their bounds; what is kept is not asked for again."""
    packed = cheapest(params.shape, params.crypto, len(inputs))  # the same again after a break
    left = len(inputs) - kept.count
    ch.step(f"{left} samples, {packed.price(left)}", protocol=NAME, line="L1")
    mine = ch.sub(str(ch.me))
    while await ask_with_one_key(mine, params, inputs, packed, kept, entropy):
        pass  # answers did not add up: a key is not used after that
    found = np.concatenate(kept.read)
    if np.isnan(found).all():  # only now: which batch it was is nobody else's business
        raise ProtocolAbort(
            NAME, "L5", "range", "no features within bounds; samples are unlike the model's own, or a check failed"
        )
    return found


async def ask_with_one_key(
    ch: Channel, params: Params, inputs: F64, packed: Packing, kept: Taps, entropy: Entropy
) -> bool:
    """All batches that are left, or up to one whose answers did not add up; whether some are left then."""
    begun, rest = kept.begun, inputs[kept.count :]
    key = kept.key(params.crypto, entropy, len(inputs))
    side, count = OwnerSide(ch, params, key, entropy, kept.lose), packed.batches(len(rest))
    await side.send_key(packed.plan.openings, count, packed.tokens)  # L1
    done = (await side.ch.recv(params.provider, Start)).block  # L1
    if begun and done == NO_MORE:
        kept.forget()
        what = "the provider cannot resume with the key of the earlier run; start again to query the remaining samples"
        raise ProtocolAbort(NAME, "L1", "state", what)
    check_start(done, params.shape.depth if begun and count else 0)
    if count:
        sent = len(rest[: packed.samples]) if begun else 0  # under this key, perhaps
        kept.stake(nothing(params, sent))
        if not await side.agree():  # T1 to T4
            raise ProtocolAbort(
                NAME, "T3", "keys", f"the provider says that it cannot use these keys; {sent} samples are lost by that"
            )
    for start in range(0, len(rest), packed.samples):
        some, more = rest[start : start + packed.samples], start + packed.samples < len(rest)
        kept.stake(nothing(params, len(some)))
        taps = await side.batch(some, packed, 0 if start else done)  # L2 to L5
        if taps is None:
            return more
        kept.add(taps, key if more else None)
    return False


def nothing(params: Params, count: int) -> F64:
    """What stands for samples that have no features."""
    return np.full((count, len(params.shape.taps), params.shape.rank), np.nan)


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
    """The part of P, for all owners side by side; `folder` keeps how far it is.

    Returns how many batches of each were answered to their end.
    """
    devices.check(device)
    if encoder.shape != params.shape:
        raise ParameterError("the model has another shape than was announced")
    rounded = encoder.rounded(params.crypto.weight_bits)
    serving = Serving(ch, params, rounded, ledger or Ledger(), device, folder, entropy)
    counts = await asyncio.gather(*(serving.all_batches(u) for u in params.owners))
    return dict(zip(params.owners, counts, strict=True))


@dataclass(frozen=True, slots=True)
class Serving:
    """What the provider does for one owner at a time."""

    ch: Channel
    params: Params
    encoder: Encoder
    ledger: Ledger
    device: Device
    folder: Path | None
    entropy: Entropy

    async def all_batches(self, u: Party) -> int:
        """How many came to their end; behind one whose answers did not add up, u goes on with a new key."""
        with contextlib.nullcontext() if self.folder is None else files.locked(self.folder / u):
            answered, left = await self.with_one_key(u, 0)
            while left:
                more, left = await self.with_one_key(u, left)
                answered += more
        return answered

    async def with_one_key(self, u: Party, paid: int) -> tuple[int, int]:
        """Batches that came to their end, and those that are left."""
        mine, p, s = self.ch.sub(str(u)), self.params.crypto, self.params.shape
        key = await mine.recv(u, Key, b=(p.count, p.tight), switching=(None, p.count, p.count, p.tight))  # L1
        packed = announced(s, p, key.tokens, len(key.switching), key.batches, u)
        public, how, many = key.seed + key.b.tobytes(), repr((s, packed.tokens)), packed.samples
        try:
            answers, unpaid = Answers.of(self.folder, u, public, how, key.batches)
        except ProtocolAbort:
            await mine.send(u, Start(NO_MORE))  # L1; other owners hear that the run ends, and keep their keys
            raise
        if paid and key.batches * many != paid:
            what = f"'{u}' goes on with {key.batches * many} samples, {paid} are left"
            raise ProtocolAbort(NAME, "L1", "state", what)
        due, most = 0 if paid else unpaid * many, math.ceil(self.params.budget / many) * many
        with self.ledger.paid(u, due, most, answers.receipt):
            if answers.new:
                answers.start(key.batches)
        side = ProviderSide(mine, self.params, u, key, self.entropy, self.device)
        await mine.send(u, Start(answers.block))  # L1
        if key.batches:
            await side.check_keys(len(key.switching), packed.tokens)
        for n in range(key.batches):
            if not await self.answer(side, answers, packed, key.batches, n):
                return n, (key.batches - n - 1) * many
        return key.batches, 0

    async def answer(self, side: ProviderSide, answers: Answers, packed: Packing, count: int, n: int) -> bool:
        """One batch, from where it is; whether it came to its end."""
        p, s, planned, P = self.params.crypto, self.params.shape, packed.plan, packed.tokens
        circuit = circuit_of(s, P)(s, p, side.refresh, self.encoder, side.ev, planned.openings, side.pool)
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
            where, last = f"batch {n + 1} of {count}, block {layer + 1} of {s.depth}", layer + 1 == s.depth
            self.ch.step(f"{side.who}: {where}", protocol=NAME, line="L3")
            x = await circuit.block(x, layer, 1 if last else 0)
            tapped = [tap_of(s, p, which, P) for which, at in enumerate(s.taps) if at == layer + 1]
            made = [await side.make_tap(circuit, x, tap) for tap in tapped]
            answers.prepare(layer + 1, None if last else x, side.ev, made)
            if not await side.agree(planned.openings_of(layer), answers):
                self.ch.step(
                    f"{side.who}: {where}: answers are not what was sent; it ends here", protocol=NAME, line="T4"
                )
                answers.start(count - n - 1)
                return False
            answers.add()
            for tap, c in zip(tapped, made, strict=True):
                await side.send_tap(c, tap)  # L5
        return True
