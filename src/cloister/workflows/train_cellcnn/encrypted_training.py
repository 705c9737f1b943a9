"""Encrypted CellCnn training: model, updates and everything between stay encrypted from the first step to the last.

S aggregates and evaluates on ciphertexts; sites hold data, labels and one share each of the key. The first site, v, is
the auditor: it does S's work again, from what S hands it, and vouches for it to the others. Per run:

    L1  i → S   which keys i holds from an earlier run, and after which steps it has a checkpoint
    L2  S → i   whether to go on from one, and at which step
        all     otherwise: `collective_key`, `collective_relin`, `collective_rotation`
        all     [M], [W], [V], [A] of a public seed, which everybody makes alike (`encrypt_public`)

and per step, [·] encrypted under the collective key, slots and maps as in `cellcnn_circuit`:

    L3  i → S   [Z_i + K_i] = [XᵀE + K_i] + [0]   from [M], a batch X and its labels, in the clear at i only; [0] is
                                            fresh, K_i a uniform pad, which only i's share of the refresh takes off
    L4  S → v   Σ [Z_i + K_i]
        all     refresh (Σ [Z_i + K_i]) → [Z], summed over samples and averaged
        S, v    [Z ⊙ W], [Z ⊙ V]
        all     refresh (these, [A]) → [A'], [W'], [V']     gradient, momentum and update are linear
        S, v    [W' ⊙ V']
        all     refresh → [M']               after the last step with floods: [M'] is sealed
    L5  S → i   [M']
        i       `collective_audit` of the sums, the refreshes and [M'], before anybody uses it
        all     every `validate_every` steps: `training_check` of all [M'] since the last one (L6), then
                `encrypted_validation` → one number to all

and at the end:

        all     `training_check` of all [M'] since the last one: the copies for all samples are equal, and switching
                keys are right; `collective_range` of [M'], public and relinearisation key
        all     only if all agreed to open the model: the norm of W and V is opened, and no more if it is beyond 64
        all     refresh ([A]) → W and V, several times; `threshold_decrypt` → all sites and S (`training_opening`)

Reveals
-------
aggregator, holder : nothing about data, labels, gradients or the model beyond `Params`; and if `open_model`: the final
    weights W and V, not their momenta, to the precision that the flooding leaves; and if `validate_every`: the squared
    error on all sites' held-out inputs together, after so many steps each. n - 1 sites with the aggregator learn no
    more.
malicious aggregator : no more: every share it gets is masked uniformly, whatever it requests (`collective_refresh`),
    and what it hands out is audited before it is used or opened.
one malicious site : it can steer the model in every step, by its gradient and by its shares of every refresh, and the
    same for all samples. What is opened may then be any function of each other site's inputs. With `per=group`, inputs
    are means of groups of donors, so it rests on a group at least; drawn inputs need a consent. The noise of at most
    `Layout.functionals` combinations of earlier ciphertexts may show in what is opened: a few hundred equations in a
    key of 32,768 unknowns. See docs/security/encrypted_training.md.
A training that diverges shows that it did: before the start where a site's own data would diverge (it stops then, and
    the others see who); before an opening in the numbers of `collective_range` and `equal_copies`; and in one number
    where validation or the norm are opened, and no weight is.

Assumes
-------
Any one party may deviate. An aggregator together with a site that deviates is not caught; if both only share what they
see, they learn nothing. All n sites stay to the end (a site that is lost ends the run by name; the run goes on
from its checkpoint, if one was kept). Weights, gradients and logits stay below 2^6, else results are wrong: a site
whose own data diverge in the clear refuses to begin, and weights whose norm is beyond 64 are not opened.

Cost
----
Setup: log2(markers) + 1 switching keys. Per site and step: one ciphertext and three refresh shares up. The auditor does
the aggregator's work, too.

References
----------
[SAV22] Sav et al., PriCell, Patterns 2022; supplementary note 4. The factored form is ours: see `cellcnn_circuit`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from cloister.arrays import F64, U64
from cloister.disclosure import Contribution
from cloister.errors import DataError, ParameterError, ProtocolAbort, RefusedError
from cloister.models import cellcnn
from cloister.mpc.crypto.ckks import scheme as ckks
from cloister.mpc.crypto.ckks.parameters import MASKED, OPENINGS
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.crypto.rns.ring import SECURE_BITS, Residues
from cloister.mpc.net.channel import Channel
from cloister.mpc.net.wire import message
from cloister.mpc.threshold_ckks import collective_audit, collective_range, collective_refresh, threshold_decrypt
from cloister.mpc.threshold_ckks.collective_audit import AuditLog, Collective
from cloister.mpc.threshold_ckks.collective_key import added, read
from cloister.study import Party
from cloister.workflows.train_cellcnn import encrypted_validation, training_check
from cloister.workflows.train_cellcnn.cellcnn_circuit import Layout
from cloister.workflows.train_cellcnn.key_store import KeyStore
from cloister.workflows.train_cellcnn.training_check import Made, Weighing, check_at_aggregator, check_at_site
from cloister.workflows.train_cellcnn.training_keys import (
    NAME,
    Keys,
    key_costs,
    load_keys,
    make_keys,
    relinearised_zero,
)
from cloister.workflows.train_cellcnn.training_opening import norm_params, open_at_aggregator, open_at_site, part_params
from cloister.workflows.train_cellcnn.training_refreshes import STAGES, refreshes
from cloister.workflows.train_cellcnn.training_state import Losses, State, gradient_ciphers
from cloister.workflows.train_cellcnn.training_terms import Terms

CHECKED = "checked"  # part of a stored state whose model passed its range check


@dataclass(frozen=True, slots=True)
class Params(Terms):  # public
    def __post_init__(self) -> None:
        Collective.__post_init__(self)
        L = self.layout
        if self.open_model and L.opening_error > 1e-3:
            raise ParameterError(f"opening is exact to {L.opening_error:.1g} only; use fewer steps or a larger scale")
        if self.validate_every:
            self.validation  # noqa: B018 - raises where it does not fit
        masked = self.config.steps * (4 * len(L.groups) + L.archives + (1 if self.validate_every else 0))
        opened = 1 + (2 * (self.config.steps // self.validate_every) if self.validate_every else 0)  # each is checked
        if self.open_model:
            masked, opened = masked + 1 + len(L.groups) + L.openings, opened + 1 + L.openings
            norm_params(self)  # raises where it does not fit
            check_functionals(L)
        if (self.open_model or self.validate_every) and training_check.copies(self).tolerance > self.ckks.scale / 8:
            raise ParameterError("copies of the model could not be compared to 1/8 on this ring; use a larger scale")
        if masked > MASKED or opened > OPENINGS:
            raise ParameterError(
                f"{self.config.steps} steps refresh {masked} polynomials and open {opened}; masks and floods hide"
                f" {MASKED} and {OPENINGS} to 2^-40. Use fewer steps, or validate less often"
            )


def check_functionals(layout: Layout) -> None:
    """Raise where the opened numbers are so many that a malicious site's equations in the key weaken the ring."""
    P, most = layout.ckks, SECURE_BITS.get(layout.ckks.degree, 0)
    found = layout.functionals(OPENINGS)
    if sum(P.bits) > most * (P.degree - found) / P.degree:
        raise ParameterError(
            f"opening {layout.weights} weights shows up to {found} combinations of the ciphertexts' noise, too many for"
            f" a ring of degree {P.degree} and {sum(P.bits)} bits; train with open_model=False, or use fewer filters"
        )


@message("L1")
class Ready:  # i → S
    keys: bytes  # name of the keys it holds; empty without
    steps: tuple[int, ...]  # after which it has a checkpoint


@message("L2")
class Start:  # S → i
    step: int
    resumed: bool
    check: bool  # whether the check of that step was begun, and is to be finished first


@message("L3")
class Gradient:  # i → S
    c0: tuple[bytes, ...]
    c1: tuple[bytes, ...]


@message("L4")
class Summed:  # S → v
    c0: tuple[bytes, ...]
    c1: tuple[bytes, ...]


@message("L5")
class NewModel:  # S → i; the second polynomials are the refresh's public ones
    c0: tuple[bytes, ...]


@dataclass
class Trained:
    """What a party has at the end."""

    params: Params
    keys: Keys
    model: list[ckks.Cipher]  # [M], one per class group
    weights: cellcnn.Weights | None = None  # if opened
    losses: dict[int, float] = field(default_factory=dict)  # step → squared error on held-out inputs
    step: int = 0  # after which it ended
    checked: bool = False  # whether [M] passed `collective_range`


def ideal(params: Params, inputs: Mapping[Party, tuple[F64, F64]]) -> dict[Party, cellcnn.Weights | None]:
    """The clear twin's weights, if opened; the first two inputs of a site are its batches."""
    w = cellcnn.train(params.config, [inputs[i][:2] for i in params.holders])
    return dict.fromkeys((params.aggregator, *params.holders), w if params.open_model else None)


def roles(params: Params) -> dict[Party, object]:
    return {params.aggregator: aggregator} | dict.fromkeys(params.holders, holder)


def cost(params: Params) -> dict[Party, tuple[int, int]]:
    """Without a checkpoint or an early stop."""
    c, P, n, L, todo = ckks.context(params.ckks), params.ckks, len(params.holders), params.layout, refreshes(params)
    G, steps = len(L.groups), params.config.steps
    parts = [dict.fromkeys(params.holders, (1, 0)) | {params.aggregator: (n, 0)}, *key_costs(params)]
    step = [collective_refresh.cost(todo[name].params, audited=False) for name in STAGES]
    sums = 2 * G * c.packed(P.base)
    step.append(dict.fromkeys(params.holders, (1, sums)))
    step.append({params.aggregator: (1 + n - 1, sums + (n - 1) * G * c.packed(P.top))})
    step.append(collective_audit.cost(params.audit, P.top))
    checks = 1 + (steps // params.validate_every if params.validate_every else 0)
    parts += [*step * steps, *[training_check.cost(params)] * checks, collective_range.cost(params.range)]
    if params.open_model:
        parts += [collective_refresh.cost(todo[name].params) for name in ("norm", "opening")]
        parts.append(threshold_decrypt.cost(norm_params(params)))
        parts += [threshold_decrypt.cost(part_params(params, a)) for a in range(L.openings)]
    if params.validate_every:
        parts += [encrypted_validation.cost(params.validation)] * (steps // params.validate_every)
    return added(*parts)


def load_trained(params: Params, store: KeyStore, *, site: bool, stopped: int = 0) -> Trained:
    """An encrypted model from a party's folder, for prediction; `stopped` is the step of an early end."""
    step = stopped or params.config.steps
    state = store.get_state(ckks.context(params.ckks), params.tag, step)
    keys = load_keys(params, store, site=site)
    return Trained(params, keys, state["model"], step=step, checked=CHECKED in state)


def range_ciphers(params: Params, keys: Keys, model: Sequence[ckks.Cipher]) -> list[ckks.Cipher]:
    """What the range check covers: all that [X], [M]·[X] and its relinearisation multiply something secret by.

    The public key is an encryption of zero, too: if it is not, its noise times the randomness of [X] is in the answer.
    Honest plaintexts of both keys' ciphertexts are small. So they are checked as they are and shifted to the size of
    [M]: the first bounds them below what the shift would wrap, the second to `Layout.key_tolerance`.
    """
    c, L = ckks.context(params.ckks), params.layout
    zero = relinearised_zero(params.ckks, keys, model, L.ladder.query)
    public = c.cipher(np.stack([keys.public.b, keys.public.a]), params.ckks.scale)
    cts = [c.drop(ct, L.ladder.query) for ct in (*model, zero, public)]
    return [*cts, c.shift(cts[-2], L.key_shift), c.shift(cts[-1], L.key_shift)]


def check_model(trained: Trained) -> None:
    """Raise unless [M] passed its range check: whatever depends on it may be opened only then."""
    if not trained.checked:
        raise DataError(
            "this encrypted model did not pass a range check at this party: its training broke off, or is of a version"
            " without the check, where one malicious site can recover the key from predictions. Train again"
        )


def read_ciphers(params: Params, got: Gradient | Summed, line: str, sender: Party) -> list[U64]:
    c, G = ckks.context(params.ckks), len(params.layout.groups)
    if len(got.c0) != G or len(got.c1) != G:
        raise ProtocolAbort(NAME, line, "malformed", f"'{sender}' sent another number of class groups")
    pairs = zip(got.c0, got.c1, strict=True)
    return [np.stack([read(c, x, params.ckks.base, NAME, line, sender) for x in pair]) for pair in pairs]


# ---- roles -----------------------------------------------------------------------------------------------------------


async def holder(
    ch: Channel,
    params: Params,
    X: F64 | Contribution,
    Y: F64,
    store: KeyStore | None = None,
    held: tuple[F64 | Contribution, F64] | None = None,
    *,
    entropy: Entropy,
    consent: frozenset[str],
) -> Trained:
    """A site's part. X (steps, n, m) and one-hot Y (steps, n, o) are its batches; they never leave it.

    `held` are inputs and labels for validation, if the parties agreed on it. A malicious site can make any function of
    both be opened: where they are contributions, the receipt records the smallest group behind an input.
    """
    if params.open_model and "open-model" not in consent:
        raise RefusedError("this site did not consent to opening the model; allow it, or train with open_model=False")
    X = contributed(ch, X, "inputs to train on")
    if held is not None:
        held = contributed(ch, held[0], "inputs to validate on"), held[1]
    cellcnn.check_batches(params.config, X, Y)
    cellcnn.check_rate(params.config, X, Y)
    if params.validate_every:
        encrypted_validation.check_consent(consent)
        if held is None:
            raise DataError("validation needs held-out inputs; hold some out, or agree on validate_every=0")
        encrypted_validation.check_samples(params.validation, *held)
    keys, start = await begin(ch, params, store, entropy)
    step = start.step
    site = Site(ch, params, keys, entropy, State.after(step, params, store), store)
    site.made = Made.from_bytes(store.get_extra(params.tag, step) if store is not None and step else b"")
    losses = Losses(params, store, step)

    async def validate(step: int, *, resumed: bool = False) -> None:
        if losses.due(step, resumed=resumed) and held is not None:
            await site.check(f"{step - 1}/check")
            sub, model = ch.sub(f"{step - 1}/validation"), site.state.model[0]
            found = await encrypted_validation.holder(
                sub, params.validation, model, keys, *held, entropy=entropy, consent=consent
            )
            losses.put(step, found)

    if start.check:
        await site.check("resumed/check")
    await validate(step, resumed=True)
    while losses.go_on(step):
        ch.step(f"step {step + 1} of {params.config.steps}: gradient", protocol=NAME, line="L3")
        await site.train(step, X[step], Y[step])
        step += 1
        site.state.keep(step, params, store, check=({}, site.made.to_bytes()), model_only=not site.audits)
        await validate(step)
    await site.check("check")
    await site.check_range()
    site.state.keep(step, params, store, check=({}, b""), model_only=not site.audits, checked=True)
    done = Trained(params, keys, site.state.model, losses=losses.found, step=step, checked=True)
    if params.open_model:
        state = site.state if site.audits else None
        done.weights = await open_at_site(ch, params, keys, state, entropy=entropy, consent=consent)
    return done


def contributed(ch: Channel, X: F64 | Contribution, what: str) -> F64:
    if not isinstance(X, Contribution):
        return X
    return np.asarray(ch.contribute(X, protocol=NAME, line="L3", what=what))


async def begin(ch: Channel, params: Params, store: KeyStore | None, entropy: Entropy) -> tuple[Keys, Start]:
    """L1, L2: keys, and after which step to go on."""
    S = params.aggregator
    steps = resumable(params, store)
    await ch.send(S, Ready(store.name if steps and store is not None else b"", steps))  # L1
    start = await ch.recv_broadcast(S, Start)  # L2
    if not start.resumed and start.step == 0:
        return await make_keys(ch, params, entropy, ckks.Secret.draw(params.ckks, entropy), store), start
    if store is None or not start.resumed or start.step not in steps:
        raise ProtocolAbort(
            NAME, "L2", "checkpoint", "requested to resume from a checkpoint that this site does not have"
        )
    return load_keys(params, store, site=True), start


def resumable(params: Params, store: KeyStore | None) -> tuple[int, ...]:
    """After which steps this party would go on.

    Not before a state whose model passed its range check: weights of one training are opened under one key, and what
    another last step would open would be more functionals of the same key's noise. Nor before one whose seed S has
    sent: a site that knows the weights of earlier steps could shift a repeated step to balance them. Nor, at a site,
    before one whose model it gave a gradient of (`Site.no_way_back`).
    """
    steps = store.steps(params.tag) if store is not None and store.name else ()
    if steps and store is not None:
        last = store.get_state(ckks.context(params.ckks), params.tag, steps[0])
        if CHECKED in last or training_check.REVEALED in last:
            return steps[:1]
    return steps


class Site:
    """One site's part in the steps; the auditor's does the aggregator's work again."""

    def __init__(
        self,
        ch: Channel,
        params: Params,
        keys: Keys,
        entropy: Entropy,
        state: State,
        store: KeyStore | None = None,
    ) -> None:
        self.ch, self.params, self.keys, self.entropy, self.state = ch, params, keys, entropy, state
        self.store = store
        self.c, self.todo, self.book = ckks.context(params.ckks), refreshes(params), AuditLog()
        self.audits = ch.me == params.auditor
        self.made = Made()

    async def train(self, t: int, X: F64, Y: F64) -> None:
        """One step: my gradient, three refreshes, the audit of all of it."""
        c, P, S, relin = self.c, self.params.ckks, self.params.aggregator, self.keys.relin
        L, to = self.params.layout, self.todo["gradient"]
        mine, pads = gradient_ciphers(c, L, self.state.model, X, Y, self.keys, to, self.entropy)
        c0, c1 = (tuple(c.pack(raw[part]) for raw in mine) for part in (0, 1))
        await self.ch.send(S, Gradient(c0, c1))  # L3
        self.book.sent(*(p for raw in mine for p in raw))
        last, stage = self.ch.sub(f"{t}/product"), self.params.last_stage(t)
        if self.audits:
            sums = read_ciphers(self.params, await self.ch.recv(S, Summed), "L4", S)  # L4
            self.book.total(*(p for raw in sums for p in raw))
            cts = [c.cipher(x, P.scale) for x in sums]
            Z = await self.refresh(self.ch.sub(f"{t}/gradient"), "gradient", cts, pads, t)
            new = await self.refresh(self.ch.sub(f"{t}/update"), "update", self.state.products(c, Z, relin))
            self.state = self.state.updated(new)
            self.state.model = await self.refresh(last, stage, self.state.factors(c, relin))
            c0_parts = tuple(c.pack(c.raw(ct)[0][0]) for ct in self.state.model)
        else:
            for name in STAGES[:-1]:
                await self.refresh(self.ch.sub(f"{t}/{name}"), name, None, pads if name == "gradient" else [], t)
            await self.refresh(last, stage, None)
            c0_parts = (await self.ch.recv(S, NewModel)).c0  # L5
            self.state.model = self.new_model(last, c0_parts)
        self.book.heard(*c0_parts)
        await collective_audit.holder(self.ch.sub(f"{t}/audit"), self.params.audit, self.book, entropy=self.entropy)
        self.made.runs.append(last.run_id)

    async def refresh(
        self, ch: Channel, name: str, cts: list[ckks.Cipher] | None, pads: Sequence[Residues] = (), step: int = 0
    ) -> list[ckks.Cipher]:
        r, book, secret = self.todo[name], self.book, self.keys.share

        def requested() -> None:
            if name == "gradient":
                self.no_way_back(step)

        outputs = await collective_refresh.contribute(
            ch, r.params, secret, r.maps, cts, book, entropy=self.entropy, pads=pads, requested=requested
        )
        return outputs or []

    def no_way_back(self, step: int) -> None:
        """Before the gradient of a step is refreshed: the model that it was made of stays as it is.

        From the state before, the step that made this model could run again, with a shift below every tolerance, and
        the auditor could subtract the two gradients of the same batch. All parties have stored this state by now.
        """
        if self.store is not None:
            self.store.forget_before(self.params.tag, step)

    async def check(self, label: str) -> None:
        """All [M] since the last check are alike for all samples, before anything that depends on them is opened."""
        self.keys.spend(1)
        sub, model = self.ch.sub(label), self.state.model
        await check_at_site(sub, self.params, self.keys, model, self.made, entropy=self.entropy)

    async def check_range(self) -> None:
        """After the last step and `check`, which counted both: [M] is in range."""
        second = [ct.polys[1] for ct in range_ciphers(self.params, self.keys, self.state.model)]
        await collective_range.holder(
            self.ch.sub("range"), self.params.range, self.keys.share, self.keys.public, second, entropy=self.entropy
        )

    def new_model(self, ch: Channel, c0_parts: tuple[bytes, ...]) -> list[ckks.Cipher]:
        c, P, S, r = self.c, self.params.ckks, self.params.aggregator, self.todo["product"].params
        if len(c0_parts) != len(self.params.layout.groups):
            raise ProtocolAbort(NAME, "L5", "malformed", f"a model of {len(c0_parts)} parts")
        second = [collective_refresh.common(ch, r, g) for g in range(len(c0_parts))]
        pairs = zip(c0_parts, second, strict=True)
        return [c.cipher(np.stack([read(c, c0, P.top, NAME, "L5", S), c1]), P.scale) for c0, c1 in pairs]


async def aggregator(ch: Channel, params: Params, store: KeyStore | None = None, *, entropy: Entropy) -> Trained:
    """S's part."""
    c, todo = ckks.context(params.ckks), refreshes(params)
    weighing = Weighing(params, entropy)
    keys, step = await begin_all(ch, params, store, weighing, entropy)
    state, losses = State.after(step, params, store), Losses(params, store, step)

    async def refresh(label: str, name: str, cts: list[ckks.Cipher]) -> list[ckks.Cipher]:
        return await collective_refresh.aggregator(ch.sub(label), todo[name].params, cts, todo[name].maps)

    async def check(label: str, step: int) -> None:
        weighing.revealed = True
        if step:
            state.keep(step, params, store, check=weighing.state())
        await check_at_aggregator(ch.sub(label), params, keys, state.model, weighing, entropy=entropy)

    async def validate(step: int, *, resumed: bool = False) -> None:
        if losses.due(step, resumed=resumed):
            await check(f"{step - 1}/check", step)
            sub = ch.sub(f"{step - 1}/validation")
            losses.put(step, loss := await encrypted_validation.aggregator(sub, params.validation))
            ch.step(f"step {step}: squared error {loss:.4f} on held-out inputs", protocol=NAME, line="L5")

    if weighing.revealed:
        await check("resumed/check", step)
    await validate(step, resumed=True)
    while losses.go_on(step):
        ch.step(f"step {step + 1} of {params.config.steps}: refreshes", protocol=NAME, line="L4")
        Z = await refresh(f"{step}/gradient", "gradient", await sum_gradients(ch, params))
        state = state.updated(await refresh(f"{step}/update", "update", state.products(c, Z, keys.relin)))
        state.model = await refresh(f"{step}/product", params.last_stage(step), state.factors(c, keys.relin))
        await ch.scatter(params.holders[1:], NewModel(tuple(c.pack(c.raw(ct)[0][0]) for ct in state.model)))  # L5
        step += 1
        weighing.add(state.model)
        state.keep(step, params, store, check=weighing.state())
        await validate(step)
    await check("check", step)
    cts = range_ciphers(params, keys, state.model)
    await collective_range.aggregator(ch.sub("range"), params.range, keys.public, cts)
    state.keep(step, params, store, check=weighing.state(), checked=True)
    done = Trained(params, keys, state.model, losses=losses.found, step=step, checked=True)
    if params.open_model:
        done.weights = await open_at_aggregator(ch, params, keys, state)
    return done


async def begin_all(
    ch: Channel, params: Params, store: KeyStore | None, weighing: Weighing, entropy: Entropy
) -> tuple[Keys, int]:
    """L1, L2 at S: go on from the last step that everyone has, if all hold the same keys."""
    ready = (await ch.gather(params.holders, Ready)).values()  # L1
    common = set(resumable(params, store))
    if store is not None and {r.keys for r in ready} == {store.name}:
        for r in ready:
            common &= set(r.steps)
    else:
        common = set()
    if common and store is not None:
        step = max(common)
        kept = store.get_state(ckks.context(params.ckks), params.tag, step)
        weighing.load(kept, store.get_extra(params.tag, step))
        await ch.broadcast(params.holders, Start(step, resumed=True, check=weighing.revealed))  # L2
        return load_keys(params, store, site=False), step
    await ch.broadcast(params.holders, Start(0, resumed=False, check=False))  # L2
    return await make_keys(ch, params, entropy, None, store), 0


async def sum_gradients(ch: Channel, params: Params) -> list[ckks.Cipher]:
    """L3, L4: Σ [Z_i], for S and for the auditor."""
    c, P = ckks.context(params.ckks), params.ckks
    sums = [np.stack([c.ring.zeros(P.base)] * 2) for _ in params.layout.groups]
    for i, got in (await ch.gather(params.holders, Gradient)).items():  # L3
        for total, raw in zip(sums, read_ciphers(params, got, "L3", i), strict=True):
            for part in (0, 1):
                c.ring.add(total[part], raw[part])
    c0, c1 = (tuple(c.pack(total[part]) for total in sums) for part in (0, 1))
    await ch.send(params.auditor, Summed(c0, c1))  # L4
    return [c.cipher(total, P.scale) for total in sums]
