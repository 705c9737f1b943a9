"""Noisy logistic regression: one classifier of all sites' labelled cells, with noise that hides each donor or site.

    L1   u, S    common genes, common seed, common labels     as in pooled logistic regression; no gene is chosen
    L2   u, S    checked sum of u's donors + noise            N; only where donors are hidden, else N is that of sites
    for rounds t = 0, 1, …:
    L3   u       Δ_d = argmin - θ_t                           of d's own loss + λ/2 ‖W‖² + μ/2 ‖θ - θ_t‖², some steps
                 Δ_d ← Δ_d min(1, C / ‖Δ_d‖)                  d is a donor, or all of u's cells
    L4   u, S    checked sum of Σ_d Δ_d + noise               z²C² / (m - 1) of each of m sites
         u, S    θ_{t+1} = θ_t + Σ Δ_d / N
    L5   u, S    θ ← mean of the points of the second half
    L6   u, S    all sites received the same broadcasts     (same_view)

Nothing else is opened: no mean or variance of a gene, no number of cells, no right answers. Therefore the genes, the
penalty and the number of rounds must be agreed beforehand. Every party computes the points itself; a coordinator cannot
change a sum. The noise is enough even for a site that takes its own share away.

Reveals
-------
coordinator, site : which genes each site measured (coordinator); label names per site (coordinator, unless the study
    lists them); the noisy sums and the model, (ε, δ)-differentially private for all cells of a donor, or of a site,
    against none.
malicious coordinator : the same.
one malicious site : the same, at points it can shift; noise covers any point.
coordinator with k sites : the same with less noise, z √((m - k) / (m - 1)); with all but one, z / √(m - 1).

Assumes
-------
What the checked sum assumes: every site stays to the end. A donor has cells at one site only: one with cells at two
counts twice, and ε is that of z/2. Against other cells instead of none, sums may differ by 2C: ε of z/2 again. It is
that of one run; another spends as much again. The noise is rounded floating point.

Cost
----
Per site and round a checked sum of K(h + 1) words for h genes and K labels.

References
----------
[MRTZ18] McMahan et al., ICLR 2018 (DP-FedAvg, one donor for one user). [LSZ+20] μ. Lines numbered here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import scipy.optimize

from cloister.arrays import F64, U64
from cloister.cells import genes
from cloister.errors import DataError, ParameterError, ProtocolAbort
from cloister.models import logistic
from cloister.models.logistic import Rows
from cloister.mpc.crypto.agreement import Identity
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.crypto.fixed_point import FixedPoint
from cloister.mpc.net.channel import Channel
from cloister.mpc.sums import checked_sum, consistency_check
from cloister.mpc.sums.packed_words import gaussian
from cloister.study import Party
from cloister.workflows.train_classifier import logistic_terms
from cloister.workflows.train_classifier.logistic_terms import Labelled, check_site, chosen_values, label_codes
from cloister.workflows.train_classifier.openings import (
    Openings,
    Start,
    begin_coordinator,
    begin_site,
    code_for,
    start_cost,
    view_of,
)

NAME = "noisy_logistic"
LOCAL_STEPS = 30  # of L-BFGS, for one donor in one round
NEAR = 0.01  # μ
MOST_DONORS = 1 << 17  # of one site


@dataclass(frozen=True, slots=True)
class Params:
    base: logistic_terms.Params  # one penalty, nothing held out
    rounds: int
    noise: float  # z
    clip: float  # C
    epsilon: float  # what the accountant says of all sums
    delta: float
    donors: bool = False  # hide each donor; else each site

    def __post_init__(self) -> None:
        if self.rounds < 1 or not self.noise > 0 or not self.clip > 0:
            raise ParameterError("noise and clip must be above 0, and there must be a round")
        if len(self.base.penalties) != 1 or self.base.held_out or self.base.balance:
            raise ParameterError("with noise, agree on one penalty, hold nothing out, and count all cells alike")

    @property
    def openings(self) -> int:
        return self.rounds + self.donors

    def share(self, sensitivity: float) -> float:
        """Standard deviation of one site's noise: that of all others together is z times the sensitivity."""
        return self.noise * sensitivity / math.sqrt(max(1, len(self.base.sites) - 1))

    def code(self, sensitivity: float) -> FixedPoint:
        n = len(self.base.sites)
        return code_for(self.base, n * (sensitivity * MOST_DONORS + 40 * self.share(sensitivity)))

    @property
    def told(self) -> str:
        who = "donor" if self.donors else "site"
        return f"({self.epsilon:g}, {self.delta:g})-private per {who} over all sums"


def roles(params: Params) -> dict[Party, object]:
    return {params.base.coordinator: coordinator} | dict.fromkeys(params.base.sites, site)


def ideal(params: Params, xs: Mapping[Party, Labelled]) -> dict[Party, logistic_terms.Fitted]:
    """The same rounds over all donors in one place, without noise."""
    base = params.base
    common = () if base.embedding else tuple(genes.genes_in_common({u: c.names for u, c in xs.items()}))
    names = base.labels or {name for mine in xs.values() for name in mine.labels if name is not None}
    first = next(iter(xs.values()))
    start = Start(common, tuple(sorted(names)), first.x.shape[1])
    units = [rows for mine in xs.values() for rows in units_of(params, mine, start)]
    n = len([rows for rows in units if len(rows)]) if params.donors else len(xs)
    theta, kept = np.zeros(shape_of(params, start)), list[F64]()
    for _ in range(params.rounds):
        theta = theta + np.sum([update_of(params, rows, theta) for rows in units], axis=0) / max(1, n)
        kept.append(theta)
    model = fitted(params, start, kept, params.openings)
    return dict.fromkeys((base.coordinator, *xs), model)


def cost(params: Params, labels: int, columns: int, up: int = 0, down: int = 0) -> dict[Party, tuple[int, int]]:
    """Messages and bytes, for `up` bytes of a site's gene names and `down` of those in common."""
    base, hub = params.base, params.base.coordinator
    lengths = [1] * params.donors + [labels * (columns + 1)] * params.rounds
    parts = [checked_sum.cost(checked_sum.Params(base.sites, hub, length)) for length in lengths]
    parts += [*start_cost(base, up, down), consistency_check.cost(view_of(base))]
    return {u: (sum(p[u][0] for p in parts), sum(p[u][1] for p in parts)) for u in (hub, *base.sites)}


# ---- local steps -----------------------------------------------------------------------------------------------------


def check_donors(params: Params, mine: Labelled) -> None:
    if params.donors and (mine.donors is None or len(mine.donors) != mine.x.shape[0]):
        raise DataError("noise for donors needs to know whose cell each is; pass donor_key= with a column of obs")


def check_width(params: Params, start: Start) -> None:
    """L1: nothing is chosen by looking at cells, so all genes in common are taken."""
    if len(start.common) > params.base.n_top_genes:
        raise ProtocolAbort(
            NAME,
            "L1",
            "genes",
            f"{len(start.common)} genes in common, more than n_top_genes={params.base.n_top_genes}: with noise none is "
            "chosen by its variance; agree on a panel of genes, or on an embedding",
        )


def shape_of(params: Params, start: Start) -> tuple[int, int]:
    return (start.columns if params.base.embedding else len(start.common)) + 1, len(start.labels)


def units_of(params: Params, mine: Labelled, start: Start) -> Iterator[Rows]:
    """The labelled cells of each donor; or of the whole site, even if there are none."""
    columns = np.arange(shape_of(params, start)[0] - 1)
    x, codes = chosen_values(params.base, mine, start.common, columns), label_codes(mine.labels, start.labels)
    known = np.flatnonzero(codes >= 0)
    groups = [known]
    if params.donors:
        assert mine.donors is not None
        groups = [known[mine.donors[known] == d] for d in np.unique(mine.donors[known])]
    for at in groups:
        yield Rows(x[at], codes[at], np.ones(len(at)))


def update_of(params: Params, rows: Rows, theta: F64) -> F64:
    """L3: Δ_d, clipped; nothing from no cells."""
    if not len(rows):
        return np.zeros_like(theta)
    centre = np.zeros(len(theta) - 1)
    ridge = np.full((len(theta), 1), params.base.penalties[0])
    ridge[-1] = 0.0

    def value(flat: F64) -> tuple[float, F64]:
        at = flat.reshape(theta.shape)
        loss, g = logistic.gradient_sums(rows, at, centre)
        away = at - theta
        f = loss / len(rows) + float((ridge * at**2).sum()) / 2 + NEAR / 2 * float((away**2).sum())
        return f, (g / len(rows) + ridge * at + NEAR * away).ravel()

    found = scipy.optimize.minimize(
        value, theta.ravel(), jac=True, method="L-BFGS-B", options={"maxiter": LOCAL_STEPS}
    ).x.reshape(theta.shape)
    delta: F64 = found - theta
    if not np.all(np.isfinite(delta)):
        return np.zeros_like(theta)
    return delta * min(1.0, params.clip / max(float(np.linalg.norm(delta)), 1e-300))


def noisy_words(params: Params, total: F64, sensitivity: float, entropy: Entropy) -> U64:
    """L2, L4: u's part of a sum, with u's share of the noise."""
    return params.code(sensitivity).encode(total + gaussian(entropy, len(total), params.share(sensitivity)))


def fitted(params: Params, start: Start, points: list[F64], openings: int) -> logistic_terms.Fitted:
    """L5."""
    theta = np.mean(points[len(points) // 2 :], axis=0)
    return logistic_terms.Fitted(
        genes=start.common,
        common=start.common,
        labels=start.labels,
        coefficients=theta[:-1],
        intercept=theta[-1],
        mean=np.zeros(len(theta) - 1),
        penalty=params.base.penalties[0],
        level=0.0,
        converged=True,
        openings=openings,
        cells={},
        left_out=(),
        path=(),
        centers=None,
    )


# ---- roles -----------------------------------------------------------------------------------------------------------


async def follow(openings: Openings, params: Params, start: Start, units: list[Rows]) -> logistic_terms.Fitted:
    """L2 to L6: the same at every party, but that S has no cells and adds nothing."""
    entropy, shape = openings.entropy, shape_of(params, start)
    n = float(len(params.base.sites))

    async def noisy_sum(line: str, what: str, total: F64, sensitivity: float) -> F64:
        def words() -> U64:
            assert entropy is not None
            return noisy_words(params, total, sensitivity, entropy)

        opened = await openings.open(line, f"{what}, {params.told}", len(total), words)
        return openings.decode(params.code(sensitivity), opened, line)

    if params.donors:
        count = np.array([float(len(units))])
        n = max(1.0, float((await noisy_sum("L2", "number of donors with noise", count, 1.0))[0]))  # L2
    theta, points = np.zeros(shape), list[F64]()
    for t in range(params.rounds):
        mine = np.sum([np.zeros(shape), *(update_of(params, rows, theta) for rows in units)], axis=0)  # L3
        what = f"sum of updates with noise, round {t + 1}"
        total = await noisy_sum("L4", what, mine.ravel(), params.clip)  # L4
        theta = theta + total.reshape(shape) / n
        points.append(theta)
    await openings.compare()  # L6
    return fitted(params, start, points, openings.count)  # L5


async def site(
    ch: Channel, params: Params, mine: Labelled, *, entropy: Entropy, identity: Identity
) -> logistic_terms.Fitted:
    """Be u. Returns the classifier."""
    check_site(params.base, mine)
    check_donors(params, mine)
    start = await begin_site(ch, params.base, mine, entropy=entropy, identity=identity)  # L1
    check_width(params, start)
    openings = Openings(ch, NAME, params.base, params.openings, entropy, identity, start.seed)
    return await follow(openings, params, start, list(units_of(params, mine, start)))


async def coordinator(ch: Channel, params: Params) -> logistic_terms.Fitted:
    """Be S: add up, and follow the points."""
    start = await begin_coordinator(ch, params.base)  # L1
    check_width(params, start)
    return await follow(Openings(ch, NAME, params.base, params.openings), params, start, [])
