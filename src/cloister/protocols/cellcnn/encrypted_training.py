"""Encrypted CellCnn training: model, updates and everything between stay encrypted from the first step to the last.

S aggregates and evaluates on ciphertexts; sites hold data, labels and one share each of the key. Per run:

    L1  i → S   which keys i holds from an earlier run, if any
    L2  S → i   whether to go on from a checkpoint, and at which step
        all     otherwise: `collective_key`, `collective_relin`, `collective_rotation`
    L3  S → i   [M]                         the initial model, W₀·V₀ of a public seed, encrypted

and per step, [·] encrypted under the collective key, slots and maps as in `cellcnn_circuit`:

    L4  i → S   [Z_i] = [XᵀE] + [0]         from [M], a batch X and its labels, in the clear at i only; [0] is fresh
        all     refresh ([Σ Z_i]) → [Z], summed over samples and averaged
        S       [Z ⊙ W], [Z ⊙ V]
        all     refresh (these, [A]) → [A'], [W'], [V']     gradient, momentum and update are linear
        S       [W' ⊙ V']
        all     refresh → [M']
    L5  S → i   [M']
        all     every `validate_every` steps: `encrypted_validation` → one number to all

and at the end, only if all agreed to open the model:

        all     refresh ([A]) → every weight several times; `threshold_decrypt` → all sites and S

Reveals
-------
aggregator, holder : nothing about data, labels, gradients or the model beyond `Params`; and if `open_model`: the final
    weights and momenta, to the precision that the flooding leaves; and if `validate_every`: the squared error on all
    sites' held-out inputs together, after so many steps each. n - 1 sites with the aggregator learn no more.

Assumes
-------
Semi-honest parties; all n sites stay to the end (a site that is lost ends the run by name; the run goes on from its
checkpoint, if one was kept). Weights, gradients and logits stay below 2^6, else results are wrong (not revealed).
A site opens only what the last refresh made from the archive that it knows, once, and only with its own consent.

Cost
----
Setup: log2(markers) + 1 switching keys. Per site and step: 4 messages up; one ciphertext and three refresh shares.

References
----------
[SAV22] Sav et al., PriCell, Patterns 2022; supplementary note 4. The factored form is ours: see `cellcnn_circuit`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from cloister.arrays import F64
from cloister.crypto.ckks import scheme as ckks
from cloister.crypto.entropy import Entropy
from cloister.errors import DataError, ParameterError, ProtocolAbort, RefusedError
from cloister.models import cellcnn
from cloister.net import wire
from cloister.net.channel import Channel
from cloister.net.wire import message
from cloister.protocols.cellcnn import encrypted_validation
from cloister.protocols.cellcnn.cellcnn_circuit import VALUE_BITS, Layout, aggregated_product, gradient
from cloister.protocols.cellcnn.key_store import KeyStore
from cloister.protocols.cellcnn.training_keys import Keys, load_keys, make_keys
from cloister.protocols.cellcnn.training_refreshes import opening, refreshes
from cloister.protocols.ckks import collective_refresh, threshold_decrypt
from cloister.protocols.ckks.collective_key import check_holders, read
from cloister.protocols.ckks.collective_refresh import Ledger
from cloister.study import Party

NAME = "encrypted_training"


@dataclass(frozen=True, slots=True)
class Params:  # public
    holders: tuple[Party, ...]
    aggregator: Party  # S
    ckks: ckks.Parameters
    config: cellcnn.Config
    open_model: bool = False
    validate_every: int = 0  # steps; 0: never
    held_out: int = 0  # inputs of each site that validation uses

    def __post_init__(self) -> None:
        check_holders(self.holders, self.aggregator)
        if self.open_model and self.layout.opening_error > 1e-3:
            raise ParameterError(
                f"opening would be exact to {self.layout.opening_error:.1g} only; use a larger scale or fewer steps"
            )

        if self.validate_every:
            self.validation  # noqa: B018 - raises where it does not fit

    @property
    def layout(self) -> Layout:
        return Layout(self.config, self.ckks, len(self.holders))

    @property
    def validation(self) -> encrypted_validation.Params:
        who = (self.holders, self.aggregator, self.ckks)
        return encrypted_validation.Params(*who, self.config, self.held_out)

    def validates(self, step: int) -> bool:
        """Whether the model after that many steps is validated."""
        return self.validate_every > 0 and step % self.validate_every == 0

    @property
    def tag(self) -> bytes:
        """What a checkpoint belongs to."""
        return wire.digest(NAME, self.holders, self.aggregator, self.ckks, self.config)

    @property
    def value_bits(self) -> int:
        return VALUE_BITS if self.ckks.scale_bits > 68 else 3


@message("L1")
class Ready:  # i → S
    keys: bytes  # name of the keys it holds; empty without


@message("L2")
class Start:  # S → i
    step: int
    resumed: bool


@message("L3")
class Model:  # S → i
    c0: tuple[bytes, ...]  # one per class group
    c1: tuple[bytes, ...]


@message("L4")
class Gradient:  # i → S
    c0: tuple[bytes, ...]
    c1: tuple[bytes, ...]


@message("L5")
class NewModel:  # S → i; the second polynomials are the refresh's public ones
    c0: tuple[bytes, ...]


@dataclass
class Trained:
    """What a party takes away."""

    params: Params
    keys: Keys
    model: list[ckks.Cipher]  # [M], one per class group
    weights: cellcnn.Weights | None = None  # if opened
    losses: dict[int, float] = field(default_factory=dict)  # step → squared error on held-out inputs


def ideal(params: Params, inputs: Mapping[Party, tuple[F64, F64]]) -> dict[Party, cellcnn.Weights | None]:
    """The clear twin's weights, if opened; the first two inputs of a site are its batches."""
    w = cellcnn.train(params.config, [inputs[i][:2] for i in params.holders])
    return dict.fromkeys((params.aggregator, *params.holders), w if params.open_model else None)


def roles(params: Params) -> dict[Party, object]:
    return {params.aggregator: aggregator} | dict.fromkeys(params.holders, holder)


def cost(params: Params) -> dict[Party, tuple[int, int]]:
    """Without a checkpoint."""
    c, P, n, L = ckks.context(params.ckks), params.ckks, len(params.holders), params.layout
    G, steps, base, one = len(L.groups), params.config.steps, c.packed(P.base), c.packed(L.ladder.one)
    top = c.packed(P.top)
    up, down = [(1, 0), (1, top)], [(1, 0), (1, top), (1, 2 * G * top)]
    digits, whole = P.top, c.packed(len(c.primes))
    for sent in (up, down):
        sent.append((2 * digits, 3 * digits * whole))
        sent.append((digits * len(L.rotations), digits * len(L.rotations) * whole))
    inputs = G + (2 * G + L.archives) + G
    outputs = G * one + L.archives * base + (1 + G) * one + G * top
    up.append((steps * 4, steps * (2 * G * base + inputs * base + outputs)))
    down.append((steps * 4 - 1, steps * inputs * base + (steps - 1) * G * top))
    down.append((1, G * top))
    if params.open_model:
        up.append((1 + L.archives, L.archives * base * 3))
        down.append((1 + 2 * L.archives, L.archives * base * 3))
    for p, sent in ((params.holders[0], up), (params.aggregator, down)) if params.validate_every else ():
        messages, size = encrypted_validation.cost(params.validation)[p]
        each, times = 1 if sent is up else n, steps // params.validate_every
        sent.append((times * messages // each, times * size // each))
    total = {True: tuple(map(sum, zip(*up, strict=True))), False: tuple(map(sum, zip(*down, strict=True)))}
    return {params.aggregator: (n * total[False][0], n * total[False][1])} | dict.fromkeys(
        params.holders, (total[True][0], total[True][1])
    )


def check_batches(c: cellcnn.Config, X: F64, Y: F64) -> None:
    if X.shape != (c.steps, c.batch, c.markers) or Y.shape != (c.steps, c.batch, c.classes):
        raise DataError(
            f"expected batches of shape {(c.steps, c.batch, c.markers)} and labels {(c.steps, c.batch, c.classes)},"
            f" found {X.shape} and {Y.shape}"
        )
    if not np.isfinite(X).all() or np.abs(X).max() > 2.0**5:
        raise DataError("a marker's mean lies beyond ±32 or is missing; standardise the markers first")


def check_parts(found: int, wanted: int, line: str) -> None:
    if found != wanted:
        raise ProtocolAbort(NAME, line, "malformed", f"a model of {found} parts, expected {wanted}")


# ---- what was kept ---------------------------------------------------------------------------------------------------


def load_trained(params: Params, store: KeyStore, *, site: bool) -> Trained:
    """An encrypted model from a party's folder, for prediction."""
    step, state = store.get_state(ckks.context(params.ckks), params.tag)
    if step != params.config.steps:
        raise DataError(f"the training in {store!r} stopped after step {step} of {params.config.steps}; let it finish")
    return Trained(params, load_keys(params, store, site=site), state["model"])


# ---- roles -----------------------------------------------------------------------------------------------------------


async def holder(
    ch: Channel,
    params: Params,
    X: F64,
    Y: F64,
    store: KeyStore | None = None,
    held: tuple[F64, F64] | None = None,
    *,
    entropy: Entropy,
    consent: frozenset[str],
) -> Trained:
    """Play a site. X (steps, n, m) and one-hot Y (steps, n, o) are its batches; they never leave it.

    `held` are inputs and labels for validation, if the parties agreed on it.
    """
    if params.open_model and "open-model" not in consent:
        raise RefusedError("this site did not consent to opening the model; allow it, or train with open_model=False")
    check_batches(params.config, X, Y)
    if params.validate_every:
        if held is None:
            raise DataError("validation needs held-out inputs; hold some out, or agree on validate_every=0")
        encrypted_validation.check_samples(params.validation, *held)
    c, P, L, S = ckks.context(params.ckks), params.ckks, params.layout, params.aggregator
    G, top, ledger, todo = len(L.groups), P.top, Ledger(), refreshes(params)
    await ch.send(S, Ready(store.name if store is not None else b""))  # L1
    start = await ch.recv(S, Start)  # L2
    if start.resumed and store is not None:
        keys = load_keys(params, store, site=True)
    elif start.resumed or start.step != 0:
        raise ProtocolAbort(NAME, "L2", "checkpoint", "asked to go on from a checkpoint that this site does not have")
    else:
        keys = await make_keys(ch, params, entropy, ckks.Secret.draw(P, entropy), store)
    secret = keys.secret
    assert secret is not None
    first = await ch.recv(S, Model)  # L3
    check_parts(len(first.c0), G, "L3")
    check_parts(len(first.c1), G, "L3")
    model = [
        c.cipher(np.stack([read(c, c0, top, NAME, "L3", S), read(c, c1, top, NAME, "L3", S)]), P.scale)
        for c0, c1 in zip(first.c0, first.c1, strict=True)
    ]
    archive: list[bytes] = []
    losses: dict[int, float] = {}
    for t in range(start.step, params.config.steps):
        ch.step(f"step {t + 1} of {params.config.steps}: gradient, {top} primes", protocol=NAME, line="L4")
        await ch.send(S, gradient_message(c, L, model, X[t], Y[t], keys, entropy))  # L4
        for name in ("gradient", "update", "product"):
            sub = ch.sub(f"{t}/{name}")
            await collective_refresh.holder(sub, todo[name].params, secret, todo[name].maps, ledger, entropy=entropy)
            if name == "update":
                archive = [c.pack(collective_refresh.common(sub, todo[name].params, a)) for a in range(L.archives)]
                if store is not None:
                    store.put_known(t + 1, archive)
        fresh = await ch.recv(S, NewModel)  # L5
        check_parts(len(fresh.c0), G, "L5")
        model = [
            c.cipher(
                np.stack([read(c, c0, top, NAME, "L5", S), collective_refresh.common(sub, todo["product"].params, g)]),
                P.scale,
            )
            for g, c0 in enumerate(fresh.c0)
        ]
        if params.validates(t + 1) and held is not None:
            sub = ch.sub(f"{t}/validation")
            losses[t + 1] = await encrypted_validation.holder(
                sub, params.validation, model[0], keys, *held, entropy=entropy, consent=consent
            )
    done = Trained(params, keys, model, losses=losses)
    if store is not None:
        store.put_state(c, params.tag, params.config.steps, {"model": model})
    if params.open_model:
        for packed in archive:
            ledger.admit(packed)
        if not archive and store is not None:  # resumed after the last step
            for digest in store.get_known(params.config.steps):
                ledger.admit_digest(digest)
        sub = ch.sub("opening")
        r = todo["opening"]
        await collective_refresh.holder(sub, r.params, secret, r.maps, ledger, entropy=entropy, known=True)
        opened = []
        for a in range(L.archives):
            ledger.admit(c.pack(collective_refresh.common(sub, r.params, a)))
            got = await threshold_decrypt.holder(
                ch.sub(f"open/{a}"), opening(params, a), secret, ledger, entropy=entropy, consent=consent
            )
            assert got is not None
            opened.append(got)
        done.weights = L.unarchive(L.mean_of_copies(opened))
    return done


def gradient_message(
    c: ckks.Context, L: Layout, model: Sequence[ckks.Cipher], X: F64, Y: F64, keys: Keys, entropy: Entropy
) -> Gradient:
    """Z of every class group, added over the chunks of the batch; no two calls give the same polynomials."""
    c0, c1 = [], []
    for M, group in zip(model, L.groups, strict=True):
        total = None
        for at in range(0, len(X), L.I):
            Z = gradient(L, M, X[at : at + L.I], Y[at : at + L.I, list(group)], keys.relin, keys.rotation)
            total = Z if total is None else c.evaluator.add(total, Z)
        raw, _ = c.raw(c.rerandomise(keys.public, total, entropy))
        c0.append(c.pack(raw[0]))
        c1.append(c.pack(raw[1]))
    return Gradient(tuple(c0), tuple(c1))


async def aggregator(ch: Channel, params: Params, store: KeyStore | None = None, *, entropy: Entropy) -> Trained:
    """Play S."""
    c, P, L = ckks.context(params.ckks), params.ckks, params.layout
    G, top, one, todo = len(L.groups), P.top, L.ladder.one, refreshes(params)
    held = {r.keys for r in (await ch.gather(params.holders, Ready)).values()}  # L1
    resumed = store is not None and store.name != b"" and held == {store.name} and store.has_state(params.tag)
    keys: Keys
    if resumed:
        assert store is not None
        step, state = store.get_state(c, params.tag)
        await ch.scatter(params.holders, Start(step, resumed=True))  # L2
        keys = load_keys(params, store, site=False)
    else:
        step = 0
        await ch.scatter(params.holders, Start(0, resumed=False))  # L2
        keys = await make_keys(ch, params, entropy, None, store)
        w = cellcnn.initial(params.config)

        def encrypt(values: F64, k: int) -> ckks.Cipher:
            return c.encrypt(keys.public, values, k, P.scale, entropy)

        state = {
            "model": [encrypt(L.model_slots(w.M, g), top) for g in L.groups],
            "W": [encrypt(L.filter_slots(w.W), one)],
            "V": [encrypt(L.dense_slots(w.V, g), one) for g in L.groups],
            "archive": [encrypt(a, P.base) for a in L.archive(w)],
        }
    raws = [c.raw(ct)[0] for ct in state["model"]]
    await ch.scatter(params.holders, Model(tuple(c.pack(r[0]) for r in raws), tuple(c.pack(r[1]) for r in raws)))  # L3

    async def refresh(label: str, name: str, cts: list[ckks.Cipher]) -> list[ckks.Cipher]:
        return await collective_refresh.aggregator(ch.sub(label), todo[name].params, cts, todo[name].maps)

    losses: dict[int, float] = {}
    for t in range(step, params.config.steps):
        ch.step(f"step {t + 1} of {params.config.steps}: {P.base} primes left, refresh", protocol=NAME, line="L4")
        sums = [np.stack([c.ring.zeros(P.base)] * 2) for _ in L.groups]
        for i, got in (await ch.gather(params.holders, Gradient)).items():  # L4
            if len(got.c0) != G or len(got.c1) != G:
                raise ProtocolAbort(NAME, "L4", "malformed", f"'{i}' sent another number of class groups")
            for total, c0, c1 in zip(sums, got.c0, got.c1, strict=True):
                c.ring.add(total[0], read(c, c0, P.base, NAME, "L4", i))
                c.ring.add(total[1], read(c, c1, P.base, NAME, "L4", i))
        Z = await refresh(f"{t}/gradient", "gradient", [c.cipher(x, P.scale) for x in sums])
        T1 = [aggregated_product(c, z, state["W"][0], keys.relin) for z in Z]
        T2 = [aggregated_product(c, z, v, keys.relin) for z, v in zip(Z, state["V"], strict=True)]
        new = await refresh(f"{t}/update", "update", [*T1, *T2, *state["archive"]])
        archive, W, V = new[: L.archives], new[L.archives], new[L.archives + 1 :]
        product = [aggregated_product(c, W, v, keys.relin) for v in V]
        model = await refresh(f"{t}/product", "product", product)
        state = {"model": model, "W": [W], "V": V, "archive": archive}
        if store is not None:
            store.put_state(c, params.tag, t + 1, state)
        await ch.scatter(params.holders, NewModel(tuple(c.pack(c.raw(ct)[0][0]) for ct in model)))  # L5
        if params.validates(t + 1):
            losses[t + 1] = await encrypted_validation.aggregator(ch.sub(f"{t}/validation"), params.validation)
            ch.step(f"step {t + 1}: squared error {losses[t + 1]:.4f} on held-out inputs", protocol=NAME, line="L5")
    done = Trained(params, keys, state["model"], losses=losses)
    if params.open_model:
        replicated = await refresh("opening", "opening", state["archive"])
        opened = [
            await threshold_decrypt.aggregator(ch.sub(f"open/{a}"), opening(params, a), ct)
            for a, ct in enumerate(replicated)
        ]
        done.weights = L.unarchive(L.mean_of_copies(opened))
    return done
