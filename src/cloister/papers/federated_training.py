"""Federated training: sites fit one model together; the coordinator sees sums of updates, and no single one.

    L1   u → S   what the model takes in, names of the labels    no names where the study lists them; has u labels?
    L2   S ⇒ u   the label vocabulary, and who has labels
    L3   u → S   digest of architecture and first weights w_0    S goes on only if all are the same
    L4   u, S    secure sum of n_u           training cells; only if updates are weighted by them
    for rounds t = 0, 1, …:
    L5   S ⇒ u   t, who is there, who trains (C_t), Σ n_u, a hash of θ_t = w_t - w_0
         S → u   θ_t                         to those who train or score
    L6   u, S    secure sum of validation counts at w_t   over all who are there, every `score_every` rounds
    L6b  u, S    pseudo-labels               for cells without a label, if asked for: see `pseudo_labels`
    L7   u       Δ_u = train(w_t) - w_t      local epochs of SGD or Adam; FedProx adds μ/2 ‖w - w_t‖² to the loss
    L8   u, S    secure sum of a_u Δ_u, 1 and a_u times the training loss    u in C_t; a_u = n_u / Σ n or 1; Δ_u clipped
    L9   S       θ_{t+1} = θ_t + c_t Σ a_u Δ_u   c_t = sites that may train / those that did; 1 / |C_t| with a_u = 1
    L10  S ⇒ u   the best θ by the validation metric, or the last, if validation cells are few; the curves
    L11  u, S    all were told the same      (same_view)

⇒ is a broadcast: sites that were told something else, another model or another Σ n_u, cannot finish the next sum, or
L11. C_t follows from the study's seed, from who is there and from who has labels; sites work it out themselves. They
refuse a model that is no number, or further from w_0 than the rounds so far can have moved it.

S never holds w_0, only what was learned on top of it. No sum of weights is opened: where rounds have different sites,
these would subtract to each one's cells. Where all train, c_t = 1 and the mean is the weighted one; where some do, it
is right on average, and no site counts for more than twice the mean. A site whose update is no number adds zeros: it is
told, and S sees that one is missing. Two entries share a 64-bit word of the sum: 4 bytes per parameter, as much as
sending them in the clear. With SCAFFOLD, θ and Δ_u have a second half, the common control variate and what u changes of
it.

With differential privacy, ‖Δ_u‖ is clipped to C, all weights are 1, every site adds Gaussian noise of variance z²C²/m
(m = the fewest survivors that finish a sum) before its vector is masked, and L4, L6 and the loss are left out.

Reveals
-------
coordinator : label names per site (unless the study lists them) and who has labels; the number of training cells of all
    sites; after every round the weighted mean update of that round's sites, how many it is of, their mean training
    loss, and the pooled validation counts (true by predicted label) of all sites; who dropped out, and of such a site
    the number of its validation cells per label. No other number of cells, wherever rounds have different sites.
    With k colluding sites: the same over the other sites. With noise: label names and who has labels, and else only
    noisy mean updates, (ε, δ)-differentially private for a whole site's data.
site : the model at the start of the rounds in which it trains or scores, and in the end; the curves. A model may itself
    tell about the cells it was trained on; only noise bounds that. With two sites in a round, each learns the other's
    update by subtraction. Who has labels, where labels are spread.
malicious coordinator : sums of the updates of a round's sites, as above, at models of its choice that the rounds so far
    could have given. It may call a site dropped that is there: then sums without it, and more than half must be left.
one malicious site : nothing more. Its update is what it says, each entry within the agreed bound.

Assumes
-------
Published mode only (`fine-tune`, `adapt-model`). Hardened modes run `checked_training`: here a malicious coordinator
can have a state evaluated by different sites, and a malicious site can steer the model and read single cells from mean
updates. Otherwise what the secure sum assumes. Sites insist on more than half of all sites being there. Lies that are
not noticed: (b), (c), (f) of the coordinator, a model that is the same for all, possible, and not the mean; (b), (c),
(f) of the site. Colluding sites know their own share of the noise, which then protects the others less: k of m
colluders leave z√((m - k)/m). ε compares a site's data with none (an update of zeros, C away); any other data of that
site may be 2C away, for which ε is that of z/2. It is that of one run: a further run over the same cells spends as much
again, and one without noise that differs by a site tells that site's update.

Cost
----
Per round and training site: 8⌈P/2⌉ bytes up and the secure sum's overhead, 4P bytes down; 8P up with noise.
A score: K² + 2 words for K labels. Rounds: 4 messages up and 5 down per secure sum. One signature at the end.

References
----------
[MMR+17] McMahan et al., AISTATS 2017, algorithm 1 (FedAvg).  [LSZ+20] Li et al., MLSys 2020 (FedProx).
[KKM+20] Karimireddy et al., ICML 2020 (SCAFFOLD, option II).
[FedscGPT], [KAH+24]: federated fine-tuning and FedAvg+XCLP with plain means.  [MRTZ18] DP-FedAvg. Lines numbered here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from cloister.arrays import F64, U64
from cloister.errors import DataError, ParameterError, ProtocolAbort
from cloister.mpc.crypto.agreement import Identity
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.net import wire
from cloister.mpc.net.channel import Channel
from cloister.mpc.sums import consistency_check, secure_sum
from cloister.study import Party
from cloister.workflows.fine_tune import pseudo_labels
from cloister.workflows.fine_tune.training_parts import (
    CURVES,
    Offer,
    State,
    Store,
    Trained,
    better,
    from_curves,
    metrics,
    to_curves,
)
from cloister.workflows.fine_tune.training_terms import (
    COUNTS,
    LARGEST_LOSS,
    NAME,
    Brings,
    Model,
    Params,
    Ready,
    Task,
    Vocabulary,
    Weights,
    check_same,
    check_scores,
    check_task,
    check_total,
    check_vocabulary,
    check_weights,
    choose_clients,
    mean_update,
    pool_of,
    update_words,
    vocabulary,
    weight_of,
)

# ---- roles -----------------------------------------------------------------------------------------------------------


async def site(ch: Channel, params: Params, offer: Offer, *, entropy: Entropy, identity: Identity) -> Trained:
    """Play u. Returns what was learned, with the site's own learner to apply it to."""
    S, notes = params.coordinator, []
    unknown = sorted(set(offer.labels) - set(params.labels)) if params.labels else []
    if unknown:
        raise DataError(
            f"{len(unknown)} label(s) here are not in the study's vocabulary (e.g. '{unknown[0]}'); rename or remove "
            "them, or agree on a longer list of labels"
        )
    if not offer.labels and params.pseudo.source == "none":
        raise DataError("no cell of this site has a label; fine-tuning learns from labelled cells")

    async def add(label: str, who: tuple[Party, ...], x: U64, *, apart: bool = False) -> None:
        sums = params.sum(who, len(x))
        step = ch.sub(label, sums, apart=apart)
        await secure_sum.contributor(step, sums, x, entropy=entropy, identity=identity)

    names = () if params.labels else tuple(sorted(set(offer.labels)))
    await ch.send(S, Brings(offer.shape, names, labelled=bool(offer.labels)))  # L1
    agreed = await ch.recv_broadcast(S, Vocabulary)  # L2
    labels = agreed.labels
    check_vocabulary(params, ch.me, agreed, offer.labels)
    learner = offer.build(labels)
    await ch.send(S, Ready(learner.digest, learner.size))  # L3
    if params.weighting == "cells":
        await add("cells", params.sites, COUNTS.encode(np.array([float(learner.cells)])))  # L4
    before: Task | None = None
    while True:
        task = await ch.recv_broadcast(S, Task)  # L5
        check_task(params, ch.me, task, before, learner.cells, agreed.labelled)
        if task.end:
            break
        before, t = task, task.t
        if ch.me in task.clients or params.scored(t):
            theta = (await ch.recv(S, Weights, theta=(learner.size,))).theta
            check_weights(params, theta, task.theta, t, learner.size, "L5")
        if params.scored(t):
            counts, loss = learner.score(theta)
            loss = min(loss, LARGEST_LOSS * counts.sum()) if math.isfinite(loss) else LARGEST_LOSS * counts.sum()
            await add(f"score/{t}", task.live, COUNTS.encode(np.append(counts.ravel(), loss)))  # L6
        if ch.me in task.clients:
            if params.pseudo.at(t):
                to = (params.pseudo, task.clients, S, labels, learner, theta)
                step = ch.sub(f"pseudo/{t}", apart=True)
                await pseudo_labels.site(step, *to, entropy=entropy, identity=identity)  # L6b
            ch.step(f"training, round {t + 1} of {params.rounds}", protocol=NAME, line="L7")
            delta, loss = learner.train(theta, t, params.rate_at(t))  # L7
            pool = pool_of(params, params.sites, t, agreed.labelled)
            weight = weight_of(params, len(pool), len(task.clients), learner.cells, task.total)
            words, note = update_words(params, len(task.clients), delta, weight, loss, entropy)
            if note:
                notes.append(f"round {t + 1}: {note}")
            await add(f"update/{t}", task.clients, words, apart=True)  # L8
    model = await ch.recv_broadcast(S, Model, theta=(learner.size,), curves=(None, len(CURVES)))  # L10
    check_weights(params, model.theta, wire.digest("theta", model.theta), task.t, learner.size, "L10")
    await consistency_check.site(ch, params.view, identity=identity)  # L11
    return Trained(model.theta, labels, from_curves(model.curves), model.best_round, learner, tuple(notes))


@dataclass(frozen=True)
class Meeting:
    """What L1 to L4 found."""

    labels: tuple[str, ...]
    labelled: frozenset[Party]  # sites that have labels
    first: Ready
    total: float  # Σ n_u
    counted: tuple[Party, ...]  # sites whose cells are in it


async def coordinator(
    ch: Channel, params: Params, store: Store | None = None, *, entropy: Entropy, identity: Identity
) -> Trained:
    """Play S. Sites that drop out are left out of later rounds, as long as more than half are there."""
    met, S = await _meet(ch, params), params.coordinator
    state = _begin(params, met.first, met.labels, store)
    while True:
        t, there = state.t, _live(ch, params)
        stop, scored = t >= params.rounds, params.scored(t)
        if stop and not scored:
            break
        clients = () if stop else choose_clients(params, there, t, met.labelled)
        theta = state.theta.astype(np.float32)
        task = Task(t, there, clients, end=False, total=met.total, theta=wire.digest("theta", theta))
        ch.step(f"round {t + 1} of {params.rounds}" if not stop else "last score", protocol=NAME, line="L5")
        await ch.broadcast(there, task)  # L5
        await ch.scatter(there if scored else clients, Weights(theta))
        row: dict[str, Any] = {"round": t}
        if scored:
            row |= await _score(ch, params, state, there, len(met.labels))  # L6
        if stop:
            state.history.append(row)
            break
        if params.pseudo.at(t):
            to = (params.pseudo, clients, S, met.labels)
            await pseudo_labels.serve(ch.sub(f"pseudo/{t}", apart=True), *to, entropy=entropy, identity=identity)  # L6b
        state.history.append(row | await _average(ch, params, state, task, met))  # L8, L9
        state.t = t + 1
        if store is not None:
            store.save(state)
        if params.patience and state.best_at >= 0 and _stale(state) >= params.patience:
            break
    there = _live(ch, params)
    await ch.broadcast(there, Task(state.t, there, (), end=True, total=met.total, theta=b""))
    chosen, at = (state.best, state.best_at) if state.best_at >= 0 else (state.theta, state.t)
    theta = chosen.astype(np.float32)
    ch.reveal(theta, to=there, line="L10", what=f"the model after {at} rounds" + _budget(params), protocol=NAME)
    await ch.broadcast(there, Model(theta, at, to_curves(state.history)))  # L10
    await consistency_check.coordinator(ch, params.view)  # L11
    return Trained(theta, met.labels, state.history, at)


async def _meet(ch: Channel, params: Params) -> Meeting:
    sites = params.sites
    brought = await ch.gather(sites, Brings)  # L1
    check_same({u: b.shape for u, b in brought.items()}, "kind of input", "L1")
    labels = vocabulary(params, brought)
    labelled = tuple(u for u in sites if brought[u].labelled)
    await ch.broadcast(sites, Vocabulary(labels, labelled))  # L2
    ready = await ch.gather(sites, Ready)  # L3
    check_same({u: (r.digest, r.size) for u, r in ready.items()}, "architecture or first weights", "L3")
    total, counted = 1.0, sites
    if params.weighting == "cells":
        cells = await secure_sum.aggregator(ch.sub("cells", params.sum(sites, 1)), params.sum(sites, 1))  # L4
        total, counted = float(COUNTS.decode(cells.z)[0]), tuple(u for u in sites if u in cells.survivors)
        check_total(total, "L4", len(sites))
    return Meeting(labels, frozenset(labelled), ready[sites[0]], max(1.0, total), counted)


def _live(ch: Channel, params: Params) -> tuple[Party, ...]:
    there = tuple(u for u in params.sites if not ch.lost(u))
    if len(there) < params.majority:
        raise ProtocolAbort(NAME, "L5", "too-few", f"{len(there)} sites are left, {params.majority} are needed")
    return there


async def _score(ch: Channel, params: Params, state: State, there: tuple[Party, ...], classes: int) -> dict[str, float]:
    """L6: the metrics of θ_t over all sites; the best θ so far is kept."""
    sums = params.sum(there, classes**2 + 1)
    counted = await secure_sum.aggregator(ch.sub(f"score/{state.t}", sums), sums)
    counts = COUNTS.decode(counted.z)
    confusion = np.rint(counts[:-1]).reshape(classes, classes)
    check_scores(confusion, float(counts[-1]), len(there))
    found = metrics(confusion, float(counts[-1]))
    if found["cells"] >= params.min_scored and better(params.metric, found) > state.best_score:
        state.best, state.best_at, state.best_score = state.theta.copy(), state.t, better(params.metric, found)
    return found


async def _average(ch: Channel, params: Params, state: State, task: Task, met: Meeting) -> dict[str, float]:
    """L8, L9: θ_{t+1}, and what the report says of the round."""
    clients, size = task.clients, met.first.size
    sums = params.sum(clients, params.code(len(clients)).words(size) + 2)
    summed = await secure_sum.aggregator(ch.sub(f"update/{task.t}", sums, apart=True), sums)  # L8
    left = len(summed.survivors)
    pool = len(pool_of(params, met.counted, task.t, met.labelled))
    update, loss = mean_update(params, pool, len(clients), size, summed.z, left)
    what = f"mean update of {left} sites" + _budget(params)
    to = (params.coordinator, *task.live)
    state.theta = state.theta + ch.reveal(update, to=to, line="L9", what=what, protocol=NAME)  # L9
    return {"clients": left} | ({} if math.isnan(loss) or params.noise else {"train_loss": loss})


def _budget(params: Params) -> str:
    return f", ({params.epsilon:g}, {params.delta:g})-private per site over all rounds" if params.noise else ""


def _stale(state: State) -> int:
    """Scored rounds since the best one."""
    return sum(1 for row in state.history if "accuracy" in row and row["round"] > state.best_at)


def _begin(params: Params, first: Ready, labels: tuple[str, ...], store: Store | None) -> State:
    """A new state, or the stored one if it belongs to the same training."""
    fixed = (params.model, params.rounds, params.clients, params.rate, params.schedule, params.weighting, params.bound)
    more = (params.noise, params.clip, params.seed, params.pseudo)
    digest = wire.digest("training", fixed, more, first.digest, labels)
    kept = store.load() if store is not None else None
    if kept is not None and (kept.digest != digest or len(kept.theta) != first.size):
        raise ParameterError("the checkpoint belongs to another training; remove it, or name another place for it")
    zero = np.zeros(first.size)
    return kept or State(digest, 0, zero, zero.copy())


def roles(params: Params) -> dict[Party, object]:
    return {params.coordinator: coordinator} | dict.fromkeys(params.sites, site)


def ideal(params: Params, xs: Mapping[Party, Offer]) -> dict[Party, F64]:
    """Plain FedAvg over the same learners: θ after all rounds, nothing encoded, nothing masked."""
    shared = {name for offer in xs.values() for name in offer.labels}
    labels = params.labels or tuple(sorted(shared))
    learners = {u: offer.build(labels) for u, offer in xs.items()}
    total = sum(learner.cells for learner in learners.values())
    theta = np.zeros(next(iter(learners.values())).size)
    for t in range(params.rounds):
        labelled = [u for u, offer in xs.items() if offer.labels]
        clients, pool = choose_clients(params, tuple(xs), t, labelled), len(pool_of(params, tuple(xs), t, labelled))
        up = np.zeros(len(theta))
        for u in clients:
            delta, _ = learners[u].train(theta.astype(np.float32), t, params.rate_at(t))
            a = weight_of(params, pool, len(clients), learners[u].cells, total)
            up = up + a * np.clip(delta, -params.bound, params.bound)
        theta = theta + up * (1 if params.weighting == "plain" else pool) / len(clients)
    return dict.fromkeys((params.coordinator, *xs), theta)


def cost(params: Params, size: int, labels: int) -> dict[str, float]:
    """Bytes of one round per training site, nobody dropping: what the report's curve of bytes is drawn from."""
    clients = tuple(params.sites[: params.clients or len(params.sites)])
    words = params.code(len(clients)).words(size) + 2
    up = secure_sum.cost(params.sum(clients, words))[clients[0]][1]
    score = secure_sum.cost(params.sum(params.sites, labels**2 + 1))[params.sites[0]][1] if params.score_every else 0
    return {"up": up + score / max(1, params.score_every), "down": 4.0 * size}
