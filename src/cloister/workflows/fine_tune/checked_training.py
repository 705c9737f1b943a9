"""Checked training: every site computes the model itself, from checked sums of clipped gradients with noise.

    L1   u → S   kind of input, label names       no names where the study lists them; whether u has labels
    L2   S ⇒ u   the label vocabulary, and which sites have labels
    L3   u → S   digest of architecture and first weights, number P of weights that train
    L4   u, S    common seed Ξ                    of all sites; S does not learn it
    for steps s = 0, 1, …, all sites in each, at the state θ_s that everyone has computed:
    L5   u, S    checked sum of held-out hits     at the first step of a scored round, and after the last step
    L6   u, S    pseudo-labels                    for cells without a label, if enabled: see `pseudo_labels`
    L7   u       g_u = Σ_i ∇ℓ_i min(1, C/‖∇ℓ_i‖) / C    i: own training cells; of donors, Σ_d of the mean over d's cells
         u, S    checked sum of g_u + n_u         n_u ~ N(0, z²/(m - 1)) per entry, m sites
    L8   u, S    θ_{s+1} = θ_s - η a_s            a_s: Adam's direction for g/‖g‖, every entry within ±1
    L9   u, S    all have the same θ              (same_view, bound to a hash of θ)

No party sends a model, a round number or a number of cells. The state is a function of the checked sums, so nobody can
have it evaluated twice, skip a step or choose a far one: no weight moves by more than the sum of the rates. Every sum
is over all sites or the run aborts, so no two sums differ by a site. The length of a sum does not count, so an
excessive one does not weigh on later steps. g_u and n_u do not depend on anything that the others claim.

Noise. One cell changes a sum of L7 by at most 1 in norm, and one of L5 by at most 1, and no cell is in both. Where
donors are named, one donor changes a sum of L7 by at most 1; its held-out cells are not bounded, so L5 is left out. The
noise of the other m - 1 sites together has standard deviation z per entry. So all sums are (ε, δ)-differentially
private for one cell (donor) whatever one malicious party sends, at any states it reaches.

Without noise (z = 0, each site must consent) the sums are exact. Then cells of a label of which the site has fewer than
`min_cells` cells or `min_donors` donors do not train there. That is a minimum group size and not a proof: exact
gradients at states that a malicious site can shift may depend mostly on one cell.

Reveals
-------
coordinator, site : label names per site (coordinator, unless the study lists them) and which sites have labels; names
    carry no noise, and `fine-tune` leaves out those of labels below the thresholds, but for pseudo-labels; which sites
    take part; the sums of L5 and L7, and so the model after every step. With noise these sums are (ε, δ)-differentially
    private for each cell, or for each donor where donors are named, against that cell or donor contributing nothing. A
    donor with many cells is not protected by noise for cells. Without noise: the exact sums; with two sites, each
    learns the other's by subtraction; a sum at some state may reveal single cells.
malicious coordinator : the same. It cannot change a sum, nor have one opened over fewer sites.
one malicious site : the same, at states whose direction it chooses, within the rates. It can make the model useless.
coordinator with k sites : the sums over the other sites, with noise of z √((m - k)/(m - 1)); with all but one site,
    that site's own, with noise of z/√(m - 1).

Assumes
-------
What the checked sum assumes: all sites stay to the end, a site that stops ends the run. Training cells and labels are
unverified inputs. ε is that of one run: another run over the same cells spends as much again; without noise, a run that
differs by a site at the same first weights reveals that site's first gradient. ε treats a cell's replacement by another
cell as two changes. Inputs of a cell are fixed: what else a cell changes before training (an embedding or a scale that
was computed from all cells of the site, the split of cells) is not covered. The noise is rounded floating point.
Pseudo-labels from other cells are not covered by the noise.

Cost
----
Per site and step: a checked sum of P + 1 words for P weights (P with noise); per score, of 2 words with noise, else of
3, or of K² + 1 for K labels. Rounds: 4 messages up and 5 down per sum.

References
----------
[ACG+16] Abadi et al., CCS 2016 (clipping and noise). [KMA+21] Kairouz et al., sections 4.2 and 4.4 (noise under secure
sums). [KB15] Adam. Lines numbered here.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from cloister.arrays import F32, F64, I64, U64, Bits
from cloister.cells.names import check_vocabularies
from cloister.disclosure import Contribution, Rows, Thresholds, join
from cloister.errors import DataError, ParameterError, ProtocolAbort, RefusedError
from cloister.mpc.crypto.agreement import Identity
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.crypto.fixed_point import FixedPoint
from cloister.mpc.net import wire
from cloister.mpc.net.channel import Channel
from cloister.mpc.net.wire import message
from cloister.mpc.sums import checked_sum, common_seed, consistency_check
from cloister.mpc.sums.packed_words import gaussian
from cloister.study import Party
from cloister.workflows.fine_tune import pseudo_labels
from cloister.workflows.fine_tune.pseudo_labels import NO_PSEUDO, Pseudo
from cloister.workflows.fine_tune.training_parts import Learner, Offer, Trained, better, metrics
from cloister.workflows.fine_tune.training_terms import METRICS

NAME = "checked_training"
CONSENT = "exact-updates"
MOST_CELLS = 2.0**24  # of one site
LARGEST_LOSS = 100.0  # of one cell; larger ones count as this
BETA1, BETA2, TINY = 0.9, 0.999, 1e-8  # Adam


@dataclass(frozen=True, slots=True)
class Params:
    sites: tuple[Party, ...]
    coordinator: Party
    model: str  # architecture and loss, as text: the same at all parties, or the run does not start
    rounds: int = 20
    steps: int = 1  # of one round
    rate: float = 3e-2  # η
    schedule: str = "constant"  # or "cosine", "step": of the rate over the rounds
    decay: int = 0  # rounds after which a cosine schedule ends; 0: with the last round
    decay_at: tuple[int, ...] = ()  # rounds from which on a step schedule multiplies the rate by `factor`
    factor: float = 1.0
    weight_decay: float = 0.0  # pulls θ towards zero, the first weights
    labels: tuple[str, ...] = ()  # the vocabulary; empty: the union of the sites' label names
    score_every: int = 1  # rounds; 0: never
    metric: str = "accuracy"
    patience: int = 0
    noise: float = 0.0  # z
    clip: float = 1.0  # C
    epsilon: float = 0.0  # of all sums, by the accountant
    delta: float = 0.0
    unit: str = "cell"  # or "donor": what the noise protects
    pseudo: Pseudo = NO_PSEUDO
    min_scored: int = 0  # held-out cells of all sites below which no round is chosen by its score
    min_cells: int = 10
    min_donors: int = 3

    def __post_init__(self) -> None:
        if len(self.sites) < 2 or self.rounds < 1 or self.steps < 1 or self.score_every < 0 or self.patience < 0:
            raise ParameterError(f"training needs two sites, a round and a step; found {self.rounds} rounds")
        if self.schedule not in ("constant", "cosine", "step") or self.unit not in ("cell", "donor"):
            raise ParameterError("schedule must be constant, cosine or step, unit cell or donor")
        if not 0 < self.factor <= 1 or bool(self.decay_at) != (self.schedule == "step"):
            raise ParameterError("a step schedule needs decay_at, and a factor in (0, 1]; no other schedule has them")
        if self.metric not in METRICS:
            raise ParameterError(f"metric must be one of {', '.join(METRICS)}, found '{self.metric}'")
        if not self.rate > 0 or not self.clip > 0 or self.noise < 0 or self.weight_decay < 0:
            raise ParameterError("rate and clip must be above 0, noise and weight_decay at least 0")
        if self.noise and (self.metric != "accuracy" or self.patience):
            raise ParameterError("with noise the last round is taken: metric must be accuracy and patience 0")
        if self.noise and self.unit == "donor" and self.score_every:
            raise ParameterError("noise for donors does not cover scores, since a donor has many cells: score_every=0")
        if self.noise and self.pseudo.source not in ("none", "network"):
            raise ParameterError(
                f"noise does not cover pseudo-labels that depend on other cells, as those of '{self.pseudo.source}' do"
            )
        if self.patience and not self.score_every:
            raise ParameterError("early stopping needs a score; set score_every")

    @property
    def share(self) -> float:
        """Standard deviation of one site's noise: that of all but one site together is z."""
        return self.noise / math.sqrt(len(self.sites) - 1)

    @property
    def code(self) -> FixedPoint:
        """For sums of clipped gradients, in units of C."""
        return FixedPoint(26, MOST_CELLS + 40 * self.share, len(self.sites))

    @property
    def counts(self) -> FixedPoint:
        """For numbers of cells and sums of losses."""
        return FixedPoint(20, LARGEST_LOSS * MOST_CELLS + 40 * self.share, len(self.sites))

    def rate_at(self, t: int) -> float:
        """The same bits at all parties: the cosine is rounded, powers are products."""
        if self.schedule != "cosine":
            return self.rate * math.prod(self.factor for at in self.decay_at if t >= at)
        return self.rate * round(0.5 * (1 + math.cos(math.pi * t / (self.decay or self.rounds))), 12)

    def scored(self, t: int) -> bool:
        return bool(self.score_every) and (t % self.score_every == 0 or t == self.rounds)

    @property
    def by_label(self) -> bool:
        """Whether scores need counts for each label."""
        return self.metric in ("balanced_accuracy", "macro_f1")

    def score_length(self, labels: int) -> int:
        return 2 if self.noise else labels**2 + 1 if self.by_label else 3

    @property
    def openings(self) -> int:
        """The largest number of sums that one cell is in."""
        return openings(self.rounds, self.steps, self.score_every)

    def sum(self, length: int) -> checked_sum.Params:
        return checked_sum.Params(self.sites, self.coordinator, length)

    @property
    def view(self) -> consistency_check.Params:
        return consistency_check.Params(self.sites, self.coordinator)


def openings(rounds: int, steps: int, score_every: int) -> int:
    """The largest number of sums that one cell is in: a training cell in every step, a held-out cell in every score."""
    scores = len({*range(0, rounds, score_every), rounds}) if score_every else 0
    return max(rounds * steps, scores)


class Gradient(Protocol):
    """`cloister.models.learner.Clipped`, which this is."""

    @property
    def sum(self) -> F64: ...  # (P,), in units of the clipping norm

    @property
    def loss(self) -> float: ...  # summed over cells

    @property
    def cells(self) -> int: ...

    @property
    def donor(self) -> I64 | None: ...  # (cells,), codes

    @property
    def left_out(self) -> int: ...  # cells whose gradient is not finite


class ClippedLearner(Learner, Protocol):
    """A site's model and cells, behind vectors."""

    trainable: int  # P

    def group(self, *, held_out: bool) -> tuple[I64, I64 | None]:
        """Label codes and donors of the cells that train now, pseudo-labels included, or of those held out."""

    def keep_held_out(self, keep: Bits) -> None:
        """Score some of the held-out cells from now on, by mask."""

    def gradient(self, theta: F32, t: int, clip: float, keep: Bits) -> Gradient:
        """Σ of these cells' gradients at w_0 + θ, each clipped to norm `clip`; of donors, of their cells' means."""


@message("L1", protocol=NAME)
class Brings:  # u → S
    shape: str
    labels: tuple[str, ...]
    labelled: bool


@message("L2", protocol=NAME)
class Vocabulary:  # S ⇒ u
    labels: tuple[str, ...]
    labelled: tuple[Party, ...]


@message("L3", protocol=NAME)
class Ready:  # u → S
    digest: bytes
    size: int  # P


def roles(params: Params) -> dict[Party, object]:
    return {params.coordinator: coordinator} | dict.fromkeys(params.sites, site)


def ideal(params: Params, xs: Mapping[Party, Offer]) -> dict[Party, F64]:
    """The same steps over all cells in one place, nothing encoded, no noise: θ after the last step."""
    names = {name for offer in xs.values() for name in offer.labels}
    labels = params.labels or tuple(sorted(names))
    learners: dict[Party, Any] = {u: offer.build(labels) for u, offer in xs.items()}
    least = {u: offer.thresholds or params_thresholds(params) for u, offer in xs.items()}
    path = Path.begin(next(iter(learners.values())).trainable)
    for s in range(params.rounds * params.steps):
        g = np.zeros(len(path.theta))
        for u, learner in learners.items():
            keep = large_groups(params, least[u], learner, len(labels), held_out=False)
            g = g + learner.gradient(path.theta.astype(np.float32), s, params.clip, keep).sum
        path.advance(g, params.rate_at(s // params.steps), params.weight_decay)
    return dict.fromkeys((params.coordinator, *xs), path.theta)


def cost(params: Params, size: int, labels: int) -> dict[str, float]:
    """Bytes of one round per site: what the report's curve of bytes is drawn from."""
    u, S = params.sites[0], params.coordinator
    step, score = (checked_sum.cost(params.sum(n)) for n in (step_length(params, size), params.score_length(labels)))
    often = 1 / params.score_every if params.score_every else 0.0
    up, down = (params.steps * step[p][1] + often * score[p][1] for p in (u, S))
    return {"up": up, "down": down / len(params.sites)}


# ---- local steps -----------------------------------------------------------------------------------------------------


@dataclass
class Path:
    """Where training is; every party computes it from the same sums."""

    theta: F64
    m: F64
    v: F64
    s: int = 0
    scale1: float = 1.0  # β1^s
    scale2: float = 1.0  # β2^s

    @classmethod
    def begin(cls, size: int) -> Path:
        return cls(np.zeros(size), np.zeros(size), np.zeros(size))

    def advance(self, g: F64, rate: float, decay: float) -> None:
        """L8: a step of Adam along the sum, whose length does not count; no entry moves by more than the rate.

        Elementary operations only, so that all parties have the same bits.
        """
        length = math.sqrt(math.fsum(np.square(g).tolist()))
        unit = g / length if length > 0 else np.zeros(len(g))
        self.s, self.scale1, self.scale2 = self.s + 1, self.scale1 * BETA1, self.scale2 * BETA2
        self.m = BETA1 * self.m + (1 - BETA1) * unit
        self.v = BETA2 * self.v + (1 - BETA2) * np.square(unit)
        along = self.m / (1 - self.scale1) / (np.sqrt(self.v / (1 - self.scale2)) + TINY)
        self.theta = self.theta - rate * np.clip(along, -1.0, 1.0) - rate * decay * self.theta


def step_length(params: Params, size: int) -> int:
    return size if params.noise else size + 2


def params_thresholds(params: Params) -> Thresholds:
    return Thresholds(params.min_cells, params.min_donors)


def vocabulary(params: Params, brought: Mapping[Party, Brings]) -> tuple[str, ...]:
    """L2: the study's labels, or all that occur."""
    if params.labels:
        return params.labels
    check_vocabularies({u: b.labels for u, b in brought.items()}, NAME, "L1")
    names = sorted({name for b in brought.values() for name in b.labels})
    if len(names) < 2:
        raise ProtocolAbort(NAME, "L1", "labels", f"the sites have {len(names)} label(s) together; two are needed")
    return tuple(names)


def check_consent(noise: float, consent: Collection[str]) -> None:
    """Raise unless there is noise, or this site's own settings allow exact sums."""
    if not noise and CONSENT not in consent:
        raise RefusedError(
            f'this site does not consent to opening sums without noise; set dp_noise, or add "{CONSENT}" to '
            "[approve] consent in local/site.toml"
        )


def check_offer(params: Params, offer: Offer) -> None:
    """Raise a `DataError` before anything is sent if this site's labels do not fit the study."""
    unknown = sorted(set(offer.labels) - set(params.labels)) if params.labels else []
    if unknown:
        raise DataError(
            f"{len(unknown)} label(s) here are not in the study's vocabulary (e.g. '{unknown[0]}'); rename or remove "
            "them, or agree on a longer list of labels"
        )
    if not offer.labels and params.pseudo.source == "none":
        raise DataError("no cell of this site has a label; training needs labelled cells")


def check_vocabulary(params: Params, me: Party, agreed: Vocabulary, mine: Collection[str]) -> None:
    """L2: the study's labels, or all of mine, each once; the sites with labels, me among them if I have some."""
    labels, has = agreed.labels, set(agreed.labelled)
    if not set(mine) <= set(labels) or len(set(labels)) != len(labels) or (params.labels and labels != params.labels):
        raise ProtocolAbort(NAME, "L2", "labels", "the vocabulary lacks a label of this site, or has one twice")
    everyone = params.pseudo.source == "none"
    if not has <= set(params.sites) or (me in has) != bool(mine) or (everyone and has != set(params.sites)):
        raise ProtocolAbort(NAME, "L2", "labels", "the list of sites that have labels is wrong")


def large_groups(params: Params, least: Thresholds, learner: ClippedLearner, labels: int, *, held_out: bool) -> Bits:
    """L5, L7: which cells take part: without noise, those of labels that have enough cells and donors here."""
    codes, donor = learner.group(held_out=held_out)
    if params.noise or (held_out and not params.by_label):
        return np.ones(len(codes), bool)
    return Rows(len(codes), donor, least).open_rows(codes, labels)


def check_cells(least: Thresholds, learner: ClippedLearner) -> None:
    codes, donor = learner.group(held_out=False)
    Rows(len(codes), donor, least).check("labelled training cells")


def gradient_part(params: Params, least: Thresholds, found: Gradient) -> Contribution:
    """L7: a site's sum, over all of its training cells or zero; without noise also its loss and number of cells."""
    rows = Rows(found.cells, found.donor, least)
    loss = min(found.loss, LARGEST_LOSS * found.cells) if math.isfinite(found.loss) else LARGEST_LOSS * found.cells
    return rows.whole(found.sum if params.noise else np.append(found.sum, [loss, found.cells]))


def score_part(params: Params, least: Thresholds, learner: ClippedLearner, theta: F32) -> Contribution:
    """L5: held-out cells that are right and wrong; without noise also their loss, or counts of true by predicted."""
    counts, loss = learner.score(theta)
    codes, donor = learner.group(held_out=True)
    rows, n = Rows(len(codes), donor, least), counts.sum()
    loss = min(loss, LARGEST_LOSS * n) if math.isfinite(loss) else LARGEST_LOSS * n
    right = float(np.trace(counts))
    if params.noise:
        return rows.whole(np.array([right, n - right]))
    if params.by_label:
        return join([rows.grouped(codes, len(counts), counts), rows.whole(np.array([loss]))])
    return rows.whole(np.array([right, n - right, loss]))


def words_of(params: Params, code: FixedPoint, values: F64, entropy: Entropy) -> U64:
    """L5, L7: add this site's share of the noise, encode."""
    noise = gaussian(entropy, len(values), params.share) if params.noise else 0.0
    return code.encode(values + noise)


def scores(params: Params, z: U64, labels: int) -> dict[str, float]:
    """L5: metrics from a sum."""
    x = params.counts.decode(z)
    if params.noise:
        right, cells = float(x[0]), float(x[0] + x[1])
        value = min(1.0, max(0.0, right / cells)) if cells >= 1 else math.nan
        return {"accuracy": value, "cells": max(0, round(cells))}
    if params.by_label:
        confusion = np.maximum(np.rint(x[:-1]), 0.0).reshape(labels, labels)
        return metrics(confusion, float(x[-1]))
    right, wrong, loss = float(np.rint(x[0])), float(np.rint(x[1])), float(x[2])
    n = right + wrong
    if n <= 0:
        return {"accuracy": math.nan, "loss": math.nan, "cells": 0}
    return {"accuracy": right / n, "loss": loss / n, "cells": int(n)}


@dataclass
class Progress:
    """What every party derives from the sums: the state, the curves, the best round."""

    params: Params
    path: Path
    labels: int
    history: list[dict[str, Any]] = field(default_factory=list)
    best: F64 | None = None
    best_at: int = -1
    best_score: float = -math.inf

    @property
    def theta(self) -> F32:
        return self.path.theta.astype(np.float32)

    def note_score(self, t: int, z: U64) -> None:
        found = scores(self.params, z, self.labels)
        self.history.append({"round": t} | found)
        if self.params.noise or found["cells"] < self.params.min_scored:
            return
        value = better(self.params.metric, found)
        if value > self.best_score:
            self.best, self.best_at, self.best_score = self.path.theta.copy(), t, value

    def note_step(self, t: int, z: U64, size: int) -> None:
        row = self.history[-1] if self.history and self.history[-1]["round"] == t else None
        if row is None:
            self.history.append(row := {"round": t})
        row["clients"] = len(self.params.sites)
        x = self.params.code.decode(z)
        if not self.params.noise and x[size + 1] >= 1:
            row["train_loss"] = float(x[size] / x[size + 1])
        self.path.advance(x[:size], self.params.rate_at(t), self.params.weight_decay)

    def stop(self) -> bool:
        """Whether as many scored rounds as `patience` were not better."""
        later = sum(1 for row in self.history if "accuracy" in row and row["round"] > self.best_at)
        return bool(self.params.patience) and self.best_at >= 0 and later >= self.params.patience

    def result(self, t: int) -> tuple[F32, int]:
        if self.best is None:
            return self.theta, t
        return self.best.astype(np.float32), self.best_at


# ---- roles -----------------------------------------------------------------------------------------------------------


async def site(
    ch: Channel, params: Params, offer: Offer, *, entropy: Entropy, identity: Identity, consent: frozenset[str]
) -> Trained:
    """Play u. Returns what was learned, with the site's own learner to apply it to."""
    S, notes = params.coordinator, []
    check_consent(params.noise, consent)
    check_offer(params, offer)
    least = offer.thresholds or params_thresholds(params)
    names = () if params.labels else tuple(sorted(set(offer.labels)))
    await ch.send(S, Brings(offer.shape, names, labelled=bool(offer.labels)))  # L1
    agreed = await ch.recv_broadcast(S, Vocabulary)  # L2
    check_vocabulary(params, ch.me, agreed, offer.labels)
    labels = agreed.labels
    learner: Any = offer.build(labels)
    if params.pseudo.source == "none":
        check_cells(least, learner)
    learner.keep_held_out(large_groups(params, least, learner, len(labels), held_out=True))
    await ch.send(S, Ready(learner.digest, learner.trainable))  # L3
    seeds = common_seed.Params(params.sites, S, everyone=True)
    same = (offer.shape, learner.digest)  # in the id of every later step, so that no two architectures are mixed
    seed = await common_seed.site(ch.sub("seed", (seeds, same)), seeds, entropy=entropy, identity=identity)  # L4
    size, K = learner.trainable, len(labels)
    progress = Progress(params, Path.begin(size), K)

    async def add(label: str, part: Contribution, code: FixedPoint, line: str, what: str) -> U64:
        noisy = part.map(lambda values: words_of(params, code, values, entropy))
        words = ch.contribute(noisy, line=line, what=what, protocol=NAME)
        step = ch.sub(label, (params.sum(len(words)), same))
        z = await checked_sum.site(step, params.sum(len(words)), words, seed)
        return ch.reveal(z, to=ch.me, line=line, what=what + _budget(params), protocol=NAME)

    t = 0
    while True:
        if params.scored(t):
            part = score_part(params, least, learner, progress.theta)
            progress.note_score(t, await add(f"score/{t}", part, params.counts, "L5", f"scores of round {t}"))  # L5
        if t == params.rounds or progress.stop():
            break
        if params.pseudo.at(t):
            to = (params.pseudo, params.sites, S, labels, learner, progress.theta)
            apart = ch.sub(f"pseudo/{t}", same, apart=True)
            await pseudo_labels.site(apart, *to, entropy=entropy, identity=identity)  # L6
        ch.step(f"training, round {t + 1} of {params.rounds}", protocol=NAME, line="L7")
        keep = large_groups(params, least, learner, K, held_out=False)
        if not keep.all():
            notes.append(
                f"{int((~keep).sum())} cells of labels with fewer than {least.min_cells} cells or {least.min_donors} "
                "donors here did not train"
            )
        for i in range(params.steps):
            found = learner.gradient(progress.theta, t * params.steps + i, params.clip, keep)
            if found.left_out:
                notes.append(f"{found.left_out} cells have no finite gradient and were left out")
            part = gradient_part(params, least, found)
            z = await add(f"step/{t}/{i}", part, params.code, "L7", f"gradients of round {t}, step {i}")  # L7
            progress.note_step(t, z, size)  # L8
        t += 1
    theta, at = progress.result(t)
    await consistency_check.site(ch.sub("model", wire.digest("theta", theta)), params.view, identity=identity)  # L9
    return Trained(theta, labels, progress.history, at, learner, tuple(dict.fromkeys(notes)))


async def coordinator(ch: Channel, params: Params, *, entropy: Entropy, identity: Identity) -> Trained:
    """Play S: it adds up, and derives the same model and curves from the same sums."""
    sites, S = params.sites, params.coordinator
    brought = await ch.gather(sites, Brings)  # L1
    check_same({u: b.shape for u, b in brought.items()}, "kind of input", "L1")
    labels = vocabulary(params, brought)
    await ch.broadcast(sites, Vocabulary(labels, tuple(u for u in sites if brought[u].labelled)))  # L2
    ready = await ch.gather(sites, Ready)  # L3
    check_same({u: (r.digest, r.size) for u, r in ready.items()}, "architecture or first weights", "L3")
    size, K = ready[sites[0]].size, len(labels)
    seeds = common_seed.Params(sites, S, everyone=True)
    same = (brought[sites[0]].shape, ready[sites[0]].digest)
    await common_seed.coordinator(ch.sub("seed", (seeds, same)), seeds)  # L4
    progress = Progress(params, Path.begin(size), K)

    async def add(label: str, length: int, line: str, what: str) -> U64:
        z = await checked_sum.coordinator(ch.sub(label, (params.sum(length), same)), params.sum(length))
        return ch.reveal(z, to=ch.me, line=line, what=what + _budget(params), protocol=NAME)

    t = 0
    while True:
        if params.scored(t):
            progress.note_score(t, await add(f"score/{t}", params.score_length(K), "L5", f"scores of round {t}"))  # L5
        if t == params.rounds or progress.stop():
            break
        ch.step(f"round {t + 1} of {params.rounds}", protocol=NAME, line="L7")
        if params.pseudo.at(t):
            to = (params.pseudo, sites, S, labels)
            apart = ch.sub(f"pseudo/{t}", same, apart=True)
            await pseudo_labels.serve(apart, *to, entropy=entropy, identity=identity)  # L6
        for i in range(params.steps):
            what = f"gradients of round {t}, step {i}"
            z = await add(f"step/{t}/{i}", step_length(params, size), "L7", what)  # L7
            progress.note_step(t, z, size)  # L8
        t += 1
    theta, at = progress.result(t)
    await consistency_check.coordinator(ch.sub("model", wire.digest("theta", theta)), params.view)  # L9
    return Trained(theta, labels, progress.history, at)


def check_same(seen: Mapping[Party, Any], what: str, line: str) -> None:
    """Raise unless all sites sent the same; the minority is named."""
    values = list(seen.values())
    common = max(set(values), key=values.count)
    others = sorted(u for u, value in seen.items() if value != common)
    if others:
        raise ProtocolAbort(NAME, line, "mismatch", f"{', '.join(others)} has another {what} than the others")


def _budget(params: Params) -> str:
    return f", ({params.epsilon:g}, {params.delta:g})-private per {params.unit} over all sums" if params.noise else ""
