"""Terms of federated training: parameters, messages and the steps that a party takes by itself.

    vocabulary       L2   the study's labels, or all that the sites have
    choose_clients   L5   who trains in a round, from the public seed
    check_task, check_weights   L5   what a site checks before it follows
    update_words     L8   clip, weight, add noise, encode
    mean_update      L9   decode, divide

Lines are those of `federated_training`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from cloister.arrays import F32, F64, U64
from cloister.cells.names import check_vocabularies
from cloister.errors import ParameterError, ProtocolAbort
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.crypto.fixed_point import FixedPoint
from cloister.mpc.net import wire
from cloister.mpc.net.wire import message
from cloister.mpc.sums import consistency_check, secure_sum
from cloister.mpc.sums import packed_words as lanes
from cloister.study import Party
from cloister.workflows.fine_tune.pseudo_labels import NO_PSEUDO, Pseudo

NAME = "federated_training"
TAIL = FixedPoint(32, 2.0**20, 1 << 10)  # weights and losses
COUNTS = FixedPoint(12, 2.0**40, 1 << 10)  # cells and sums of losses
LARGEST_LOSS = 1e4  # per cell; larger ones are told as this
MOST_CELLS = 2.0**40  # of one site
MOST_SHARE = 2.0  # times the mean number of cells that a site can count for where not all train
METRICS = ("accuracy", "balanced_accuracy", "macro_f1", "loss")


@dataclass(frozen=True, slots=True)
class Params:
    sites: tuple[Party, ...]
    coordinator: Party
    model: str  # architecture and local training, as text: the same at all parties, or the run does not start
    rounds: int = 10
    clients: int = 0  # |C_t|; 0: all
    rate: float = 1e-3
    schedule: str = "constant"  # or "cosine": of the learning rate over the rounds
    weighting: str = "cells"  # or "plain"
    bound: float = 4.0  # of one entry of an update
    labels: tuple[str, ...] = ()  # the vocabulary; empty: the union of the sites' label names
    score_every: int = 1  # 0: never
    metric: str = "accuracy"  # or another of METRICS
    patience: int = 0  # scored rounds without a better one, after which training stops; 0: never
    noise: float = 0.0  # z
    clip: float = 1.0  # C, with noise
    epsilon: float = 0.0  # what the accountant says of all rounds
    delta: float = 0.0
    seed: int = 0
    pseudo: Pseudo = NO_PSEUDO
    decay: int = 0  # rounds after which a cosine schedule ends; 0: with the last round
    min_scored: int = 0  # validation cells of all sites below which no round is chosen by its score: the last is taken
    resume: bool = False  # whether the first task may be of a later round, after a checkpoint

    def __post_init__(self) -> None:
        n = len(self.sites)
        if self.rounds < 1 or self.score_every < 0 or self.patience < 0:
            raise ParameterError(f"training needs at least one round, found {self.rounds}")
        if self.clients and not 2 <= self.clients <= n:
            raise ParameterError(f"expected between 2 and {n} clients a round (0 for all), found {self.clients}")
        if self.weighting not in ("cells", "plain") or self.schedule not in ("constant", "cosine"):
            raise ParameterError("weighting must be cells or plain, schedule constant or cosine")
        if self.decay and (self.schedule != "cosine" or self.decay < self.rounds):
            raise ParameterError("only a cosine has a length of its own, and of no fewer rounds than are trained")
        if self.metric not in METRICS:
            raise ParameterError(f"metric must be one of {', '.join(METRICS)}, found '{self.metric}'")
        if not self.rate > 0 or not self.bound > 0 or self.noise < 0 or not self.clip > 0:
            raise ParameterError("rate, bound and clip must be above 0, noise at least 0")
        if self.noise and (self.weighting != "plain" or self.score_every or self.patience):
            raise ParameterError(
                "with noise, weighting must be plain and score_every and patience 0: counts of cells have no noise"
            )
        if self.noise and self.pseudo.source == "xclp":
            raise ParameterError(
                "the noise covers updates only; pseudo-labels from other sites' cells would go around it"
            )
        if self.patience and not self.score_every:
            raise ParameterError("early stopping needs a score; set score_every")

    @property
    def min_clients(self) -> int:
        return min(self.clients or self.majority, self.majority)

    @property
    def majority(self) -> int:
        return len(self.sites) // 2 + 1

    def rate_at(self, t: int) -> float:
        share = 0.5 * (1 + math.cos(math.pi * t / (self.decay or self.rounds))) if self.schedule == "cosine" else 1.0
        return self.rate * share

    def scored(self, t: int) -> bool:
        return bool(self.score_every) and (t % self.score_every == 0 or t == self.rounds)

    def code(self, clients: int) -> lanes.Code:
        """How an update is written; the same at all who add one up."""
        if self.noise:
            fewest = clients // 2 + 1
            reach = self.clip + 40 * self.noise * self.clip / math.sqrt(fewest)
            return lanes.Code(reach, clients, packed=False)
        return lanes.Code(self.bound, clients)

    def sum(self, contributors: tuple[Party, ...], length: int) -> secure_sum.Params:
        return secure_sum.Params(contributors, self.coordinator, length)

    @property
    def view(self) -> consistency_check.Params:
        return consistency_check.Params(self.sites, self.coordinator)


@message("L1", protocol=NAME)
class Brings:  # u → S
    shape: str
    labels: tuple[str, ...]
    labelled: bool


@message("L2", protocol=NAME)
class Vocabulary:  # S → u
    labels: tuple[str, ...]
    labelled: tuple[Party, ...]  # sites that have labels


@message("L3", protocol=NAME)
class Ready:  # u → S
    digest: bytes
    size: int


@message("L5", protocol=NAME)
class Task:  # S → u
    t: int
    live: tuple[Party, ...]
    clients: tuple[Party, ...]  # empty: nobody trains, the last score or the end
    end: bool  # no further round; the model follows
    total: float  # Σ n_u, of L4
    theta: bytes  # SHA-256 of θ_t, the same for all


@message("L5", protocol=NAME)
class Weights:  # S → u, who trains or scores
    theta: F32  # (P,)


@message("L10", protocol=NAME)
class Model:  # S → u
    theta: F32  # (P,)
    best_round: int
    curves: F64  # (rows, 8), as CURVES; NaN where not measured


# ---- local steps -----------------------------------------------------------------------------------------------------


def vocabulary(params: Params, brought: Mapping[Party, Brings]) -> tuple[str, ...]:
    """L2: the study's labels, or all that occur."""
    if params.labels:
        return params.labels
    check_vocabularies({u: b.labels for u, b in brought.items()}, NAME, "L1")
    found = sorted({name for b in brought.values() for name in b.labels})
    if len(found) < 2:
        raise ProtocolAbort(NAME, "L1", "labels", f"the sites know {len(found)} label(s) together; two are needed")
    return tuple(found)


def check_vocabulary(params: Params, me: Party, agreed: Vocabulary, mine: Collection[str]) -> None:
    """L2: the study's labels, or all of mine, each once; who has labels, me among them if I have."""
    labels = agreed.labels
    if not set(mine) <= set(labels) or len(set(labels)) != len(labels) or (params.labels and labels != params.labels):
        raise ProtocolAbort(NAME, "L2", "labels", "the vocabulary lacks a label of this site, or has one twice")
    everyone = params.pseudo.source == "none"  # a site without labels then takes no part
    has = set(agreed.labelled)
    if not has <= set(params.sites) or (me in has) != bool(mine) or (everyone and has != set(params.sites)):
        raise ProtocolAbort(NAME, "L2", "labels", "the list of sites that have labels is wrong")


def check_same(seen: Mapping[Party, Any], what: str, line: str) -> None:
    """Raise unless all sites said the same; the minority is named."""
    values = list(seen.values())
    common = max(set(values), key=values.count)
    others = sorted(u for u, value in seen.items() if value != common)
    if others:
        raise ProtocolAbort(NAME, line, "mismatch", f"{', '.join(others)} came with another {what} than the others")


def pool_of(params: Params, sites: tuple[Party, ...], t: int, labelled: Collection[Party]) -> tuple[Party, ...]:
    """L5: those of these sites that may train in a round: in one on labels alone, those that have some."""
    have = tuple(u for u in sites if u in labelled)
    return have if not params.pseudo.at(t) and len(have) >= 2 else sites


def weight_of(params: Params, pool: int, clients: int, cells: int, total: float) -> float:
    """L8: a_u, the share of all training cells; held down where not all train, since nobody knows what is missing."""
    if params.weighting == "plain":
        return 1.0
    share = cells / total
    return share if clients == pool else min(share, MOST_SHARE / pool)


def choose_clients(params: Params, live: tuple[Party, ...], t: int, labelled: Collection[Party]) -> tuple[Party, ...]:
    """L5: who trains, drawn from the study's seed.

    With labels at some sites only, a share of the round's sites has labels as of all sites, at least one; rounds on
    labels alone are for sites that have some.
    """
    rng = np.random.default_rng([params.seed & 0xFFFFFFFF, 5, t])
    have = tuple(u for u in live if u in labelled)
    live = pool_of(params, live, t, labelled)
    if not params.clients or params.clients >= len(live):
        return live

    def draw(some: tuple[Party, ...], count: int) -> list[Party]:
        return [some[i] for i in rng.choice(len(some), count, replace=False)]

    rest = tuple(u for u in live if u not in have)
    if not rest or not have:
        return tuple(sorted(draw(live, params.clients)))
    share = params.clients * len(have) / len(live)
    count = int(share) + (t % 2 if share % 1 else 0)  # 2.5 of 5: two and three in turn
    count = min(max(1, params.clients - len(rest), count), len(have))
    return tuple(sorted(draw(have, count) + draw(rest, params.clients - count)))


def check_task(
    params: Params, me: Party, task: Task, before: Task | None, cells: int, labelled: Collection[Party]
) -> None:
    """L5: the next round, among those left, with the clients that the study's seed gives, and always the same Σ n_u."""
    allowed = set(before.live if before else params.sites)
    first, last = (0, params.rounds * params.resume) if before is None else (before.t + (not task.end), before.t + 1)
    if not first <= task.t <= last or task.t > params.rounds or not set(task.clients) <= set(task.live) <= allowed:
        raise ProtocolAbort(NAME, "L5", "task", "a round that is out of order, or names parties that are not there")
    if me not in task.live or len(set(task.live)) != len(task.live) or len(task.live) < params.majority:
        raise ProtocolAbort(NAME, "L5", "task", f"{len(task.live)} sites are there, {params.majority} are needed")
    if task.clients and len(set(task.clients)) < params.min_clients:
        raise ProtocolAbort(NAME, "L5", "task", f"{len(task.clients)} sites train, {params.min_clients} are needed")
    over = task.end or task.t == params.rounds
    if task.clients != (() if over else choose_clients(params, task.live, task.t, labelled)):
        raise ProtocolAbort(NAME, "L5", "task", "other sites train than the study's seed says")
    least = cells if params.weighting == "cells" else 1
    if not least <= task.total <= len(params.sites) * MOST_CELLS or (before and task.total != before.total):
        raise ProtocolAbort(NAME, "L5", "task", f"{task.total:g} training cells in all, which cannot be, or not before")


def check_weights(params: Params, theta: F32, digest: bytes, t: int, size: int, line: str) -> None:
    """L5, L10: the θ that all were told of, of the agreed size, and no further away than t updates reach."""
    if len(theta) != size or wire.digest("theta", theta) != digest:
        raise ProtocolAbort(NAME, line, "weights", "another model than the one that all sites received")
    most = MOST_SHARE if params.weighting == "cells" else 1.0
    reach = (t + 1e-3) * params.code(params.min_clients).bound * most
    if not np.all(np.abs(theta) <= reach):  # nor is NaN
        raise ProtocolAbort(NAME, line, "weights", f"a model that {t} rounds of updates cannot have made")


def update_words(
    params: Params, clients: int, delta: F64, weight: float, loss: float, entropy: Entropy
) -> tuple[U64, str]:
    """L8: clip, weight, add noise, encode. Returns the words, and a note for the site if something was changed."""
    note, counts = "", 1.0
    if not np.all(np.isfinite(delta)):
        note = "your update was no number and was left out; lower the learning rate, or look at your cells"
        delta, weight, loss, counts = np.zeros(len(delta)), 0.0, 0.0, 0.0
    if params.noise:
        norm = float(np.linalg.norm(delta))
        delta = delta * min(1.0, params.clip / max(norm, 1e-300))
        sigma = params.noise * params.clip / math.sqrt(clients // 2 + 1)
        delta, loss = delta + lanes.gaussian(entropy, len(delta), sigma), 0.0
        weight = counts = 1.0  # who adds nothing must not be told apart
    else:
        beyond = int(np.count_nonzero(np.abs(delta) > params.bound))
        if beyond:
            note = f"{beyond} entries of your update were clipped to ±{params.bound:g}, the bound of this study"
        delta = np.clip(delta, -params.bound, params.bound) * weight
    body = params.code(clients).encode(delta)
    loss = min(loss, LARGEST_LOSS) if math.isfinite(loss) else LARGEST_LOSS
    return np.concatenate([body, TAIL.encode(np.array([counts, weight * loss]))]), note


def mean_update(params: Params, pool: int, clients: int, size: int, words: U64, survivors: int) -> tuple[F64, float]:
    """L9: Σ a_u Δ_u in proportion to the sites that it is of, and the training loss likewise."""
    count, loss = (float(x) for x in TAIL.decode(words[-2:].copy()))
    total = params.code(clients).decode(words[:-2], size)
    if params.noise:
        count = float(survivors)
    if count == 0:
        return np.zeros(size), math.nan
    reach = count * params.code(clients).bound + clients * params.code(clients).resolution
    if not 0 < count <= survivors + 1e-6 or not 0 <= loss <= survivors * LARGEST_LOSS or np.any(np.abs(total) > reach):
        raise ProtocolAbort(NAME, "L9", "damaged", "a sum that no updates have: a message was damaged, or a site lies")
    scale = 1 / count if params.weighting == "plain" else pool / max(count, clients / 2)
    return total * scale, loss * scale


def check_total(cells: float, line: str, sites: int) -> None:
    """L4, L6: a number of cells, and not what masks that did not cancel leave."""
    if not 0 <= cells <= sites * MOST_CELLS:
        raise ProtocolAbort(NAME, line, "damaged", "a sum that counts no cells: a message was damaged, or a site lies")


def check_scores(confusion: F64, loss: float, sites: int) -> None:
    """L6: counts of cells, and the sum of their losses."""
    check_total(float(np.abs(confusion).max(initial=0.0)), "L6", sites)
    if np.any(confusion < 0) or not 0 <= loss <= LARGEST_LOSS * confusion.sum() + 1:
        raise ProtocolAbort(NAME, "L6", "damaged", "scores that no cells have: a message was damaged, or a site lies")
