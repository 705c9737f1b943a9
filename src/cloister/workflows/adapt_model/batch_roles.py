"""The two halves of a batch: what an owner does, and what a provider does. Steps L1 to L5 of `encrypted_inference`."""

from __future__ import annotations

import hmac
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from cloister.arrays import F64, U32
from cloister.errors import CloisterError, ProtocolAbort
from cloister.models.polynomial import Shape
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.crypto.owner_ckks import scheme as block
from cloister.mpc.crypto.owner_ckks.rotations import Turns
from cloister.mpc.crypto.owner_ckks.scheme import Opening, OwnerKey, Parameters
from cloister.mpc.crypto.owner_ckks.smallness_check import LEAF, SALT, SENT, Leaves, cells, opens, shifts, uncover
from cloister.mpc.net.channel import Channel
from cloister.provider.gpu import devices
from cloister.provider.gpu.devices import Device
from cloister.study import Party
from cloister.workflows.adapt_model.answer_integrity import Sums, Tie, Ties, seal
from cloister.workflows.adapt_model.block_circuit import Circuit
from cloister.workflows.adapt_model.block_messages import (
    CONTROLS,
    NAME,
    Blinded,
    Check,
    Features,
    Found,
    Fresh,
    Inputs,
    Key,
    Sealed,
    Shifts,
    chunks,
    pairs,
    parts,
    powers,
    read,
    seed_of,
    together,
)
from cloister.workflows.adapt_model.block_plan import Tap, flooded
from cloister.workflows.adapt_model.block_values import Recipe, Values
from cloister.workflows.adapt_model.checkpoint import Answers
from cloister.workflows.adapt_model.packing import Packing

AHEAD = 8  # messages that a provider sends before it waits for an answer
MOST_BEYOND = 0.5  # of samples: with more beyond a bound, it is the batch that is spoilt, or all inputs that are wrong


class Terms(Protocol):
    """What both halves of a batch need of `encrypted_inference.Params`."""

    @property
    def provider(self) -> Party: ...
    @property
    def shape(self) -> Shape: ...
    @property
    def crypto(self) -> Parameters: ...


class OwnerSide:
    """The owner's half of a batch: opens, rescales and encrypts what is masked; reads what is meant for it."""

    def __init__(
        self, ch: Channel, params: Terms, key: OwnerKey, entropy: Entropy, lose: Callable[[], None] = lambda: None
    ) -> None:
        self.ch, self.params, self.key, self.entropy = ch, params, key, entropy
        self.lose = lose  # key and samples at hand: a provider that lies learns a bit by every check that fails
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

    async def answer(self, how: Opening, controls: int = CONTROLS) -> None:
        P, p = self.params.provider, self.params.crypto
        for part in [*chunks(how), *([slice(0, controls)] if controls else [])]:
            c = await self.ch.recv(P, Blinded, c=(pairs(part), 2, block.KEEP, p.tight))  # L3
            seed = self.entropy.bytes(32)
            fresh = self.key.refresh(read(p, c.c, "L3", P), how, seed, self.entropy)
            await self.ch.send(P, Fresh(block.pack_words(p, fresh), seed))  # L4

    async def batch(self, x: F64, packed: Packing, done: int) -> F64 | None:
        """The taps of one batch, of which so many blocks are done: (n, taps, r), NaN where a bound was left.

        None if answers were not what they should be: the samples are lost, and the key.
        """
        self.beyond.clear()
        planned = packed.plan
        if not done:
            await self.send_inputs(packed.filled(x))  # L2
        first = planned.blocks[done - 1] if done else 0
        taps = [await self.read_tap(tap, packed, len(x)) for at, tap in planned.taps if at <= first]
        for n, openings in enumerate(planned.rounds[first:], first + 1):
            for how in openings:
                await self.answer(how)
            if n in planned.blocks and not await self.agree():
                return None
            taps += [await self.read_tap(tap, packed, len(x)) for at, tap in planned.taps if at == n]
        beyond = np.any(self.beyond, axis=0)
        beyond |= float(beyond.mean()) > MOST_BEYOND  # then it is the batch that is spoilt
        return np.where(beyond[:, None, None], np.nan, np.stack(taps, axis=1))

    async def agree(self) -> bool:
        """Whether the answers of a block were what they should be, as P finds as well."""
        P, p = self.params.provider, self.params.crypto
        c = await self.ch.recv(P, Check, c=(CONTROLS, 2, SENT, p.tight))  # T1
        w = uncover(self.key, read(p, c.c, "T1", P))
        mine = Leaves((cells(w, 0), cells(w, 1)), self.entropy)
        await self.ch.send(P, Sealed(mine.seal))  # T2
        told = await self.ch.recv(P, Shifts, h=(CONTROLS, p.degree))  # T3
        h = told.h & np.uint8(1)
        alike = hmac.compare_digest(c.seal, seal(told.salt, h, cells(w, h)))
        opened = mine.open(h) if alike else (np.empty((0, SALT), np.uint8), np.empty((0, LEAF), np.uint8))
        if not alike:
            self.lose()  # before it is told
        await self.ch.send(P, Found(*opened))  # T4
        return alike

    async def read_tap(self, tap: Tap, packed: Packing, count: int) -> F64:
        P, s, p = self.params.provider, self.params.shape, self.params.crypto
        c = await self.ch.recv(P, Features, c=(s.rank, 2, tap.primes, p.tight))  # L5
        features = packed.read(self.key.read(read(p, c.c, "L5", P), tap.scale, p.slots), count)
        self.beyond.append(~(np.abs(features) <= tap.bound).all(axis=1))  # NaN is not <= anything
        what = f"{s.rank} features of block {tap.block} for {count} samples"
        return self.ch.reveal(features, to=self.ch.me, line="L5", what=what, protocol=NAME)


@dataclass(frozen=True, slots=True)
class Sent:
    """A message of an opening that waits for its answer; without a shelf, that with its sums."""

    how: Opening
    part: slice
    masks: bytes = field(repr=False)
    sums: Sums | None
    shelf: Any = None


class ProviderSide:
    """The provider's half: masks, sends, and takes the masks off again."""

    def __init__(
        self,
        ch: Channel,
        params: Terms,
        who: Party,
        key: Key,
        entropy: Entropy,
        device: Device = "cpu",
        *,
        tied: bool = True,
    ) -> None:
        b = read(params.crypto, key.b, "L1", who)
        seed_of(key.seed, "L1", who)
        self.ch, self.params, self.who, self.entropy = ch, params, who, entropy
        self.ev = devices.evaluator(device, params.crypto, b, key.seed)
        switching = read(params.crypto, key.switching, "L1", who), seed_of(key.switching_seed, "L1", who)
        self.ev.accept(*switching)
        self.pool = self.ev.pool()
        self.ties = self.keys = None
        if tied:
            plain = self.ev if device == "cpu" else block.Evaluator(params.crypto, b, key.seed)
            if device != "cpu":
                plain.accept(*switching)
            self.ties, self.keys = Ties(self.ev, plain, entropy), Ties(plain, plain, entropy)

    def put(self, words: U32, line: str) -> Any:
        """Residues from the wire, where the evaluator has its arrays."""
        try:
            return self.ev.put(words)
        except CloisterError as e:
            raise ProtocolAbort(NAME, line, "malformed", f"from '{self.who}': {e}") from None

    async def inputs(self, n: int) -> Values:
        p = self.params.crypto
        shelf = self.pool.shelf(n, 2, p.count, p.degree, fresh=True)
        for part in parts(n):
            m = await self.ch.recv(self.who, Inputs, c0=(part.stop - part.start, p.count, p.tight))  # L2
            c0, seed = self.put(m.c0, "L2"), seed_of(m.seed, "L2", self.who)
            shelf.put(part.start, self.ev.expand(c0, seed), seed)
        return Values(n, 2, p.scale, shelf.read, p.count)

    async def refresh(self, groups: list[tuple[Opening, Recipe]]) -> list[Recipe]:
        back: list[Recipe] = []
        ahead: deque[Sent] = deque()

        async def send(sent: Sent, cts: Any) -> None:
            blinded = self.ev.blind(cts, sent.how, sent.masks, self.entropy)
            await self.ch.send(self.who, Blinded(self.ev.host(blinded)))  # L3
            ahead.append(sent)
            if len(ahead) > AHEAD:
                await self.collect(ahead.popleft())

        for how, recipe in groups:
            shelf = self.pool.shelf(how.count, 2, how.back, self.params.crypto.degree, fresh=True)
            back.append(shelf.read)
            sums = Sums(self.ev, chunks(how), self.entropy) if self.ties else None
            step, some, lo = together(how, self.ev.at_once), None, 0
            for part in chunks(how):
                if some is None or part.start == lo + step:
                    lo = part.start
                    some = recipe(range(lo, min(how.count, lo + step)), how.primes)
                    if sums is not None:
                        sums.add(lo, some)
                sent = Sent(how, part, self.entropy.bytes(32), sums, shelf)
                await send(sent, some[part.start - lo : part.stop - lo])
            if sums is not None:
                await send(Sent(how, slice(0, CONTROLS), self.entropy.bytes(32), sums), sums.controls)
        while ahead:
            await self.collect(ahead.popleft())
        return back

    async def collect(self, sent: Sent) -> None:
        """An answer: onto its shelf, or, if it is one to an opening's sums, against those of the others."""
        how, part = sent.how, sent.part
        m = await self.ch.recv(self.who, Fresh, c0=(2 * pairs(part), how.back, self.params.crypto.tight))  # L4
        seed = seed_of(m.seed, "L4", self.who)
        fresh = self.ev.unblind(self.put(m.c0, "L4"), seed, how, sent.masks)
        if sent.shelf is not None:
            sent.shelf.put(part.start, fresh[: part.stop - part.start], seed)
            if sent.sums is not None:
                sent.sums.answered(part.start, fresh)
        elif sent.sums is not None and self.ties is not None:
            self.ties.add(sent.sums.off(fresh))

    async def check_keys(self, keys: int, tokens: int) -> None:
        """Raise unless the owner's switching keys are what it calls them."""
        if self.keys is None:
            raise RuntimeError("nothing was tied")
        powers = keys - Turns(tokens).count
        self.keys.switch_zeros(powers, tokens)
        if not await self.compare(self.keys, Tie.of_keys(self.params.crypto, powers, tokens)):
            what = f"switching keys of '{self.who}' are not what they should be"
            raise ProtocolAbort(NAME, "T4", "keys", what)

    async def agree(self, openings: Sequence[Opening], answers: Answers) -> bool:
        """Whether the owner's answers to these were what they should be; what is kept says that it is being told."""
        if self.ties is None:
            raise RuntimeError("nothing was tied")
        return await self.compare(self.ties, Tie.of(self.params.crypto, openings), answers)

    async def compare(self, ties: Ties, tie: Tie, answers: Answers | None = None) -> bool:
        p, who, salt = self.params.crypto, self.who, self.entropy.bytes(32)
        sent, masks = ties.open(tie)
        h = shifts(masks)
        z = cells(masks, h)
        await self.ch.send(who, Check(block.pack_words(p, sent), seal(salt, h, z)))  # T1
        theirs = (await self.ch.recv(who, Sealed)).seal  # T2
        if answers is not None:
            answers.compare()
        await self.ch.send(who, Shifts(salt, h))  # T3
        m = await self.ch.recv(who, Found, salts=(None, SALT), others=(None, LEAF))  # T4
        return opens(theirs, (m.salts, m.others), h, z)

    async def make_tap(self, circuit: Circuit, x: Values, tap: Tap) -> U32:
        y = await circuit.tap(x, self.params.shape.taps.index(tap.block))
        made: U32 = self.ev.host(flooded(self.ev, y, tap, self.entropy))
        return made

    async def send_tap(self, c: U32, tap: Tap) -> None:
        what = f"{len(c)} features of block {tap.block} for a batch"
        self.ch.record_opening(to=self.who, line="L5", what=what, protocol=NAME)
        await self.ch.send(self.who, Features(c))  # L5
