"""CellCnn: filters over single cells, pooled over a multi-cell input, and a dense layer to the phenotype.

This file is the *clear twin* of the encrypted circuit, in NumPy: the same polynomials in the same order, for choosing
hyperparameters and for tests. `X` holds mean-pooled multi-cell inputs, since pooling, convolution and the identity
activation commute [SAV22].

    U = X·W·V,    ŷ = σ(U),  σ(u) = a0 + a1·u + a3·u³  least squares on [-r, r]
    E = (σ(U) - Y) ⊙ σ'(U)                       mean squared error
    Z = Xᵀ·E / n                                 all that a party contributes; mean over parties
    v_W ← μ·v_W + η·Z·Vᵀ,  v_V ← μ·v_V + η·Wᵀ·Z,   W ← W - v_W,  V ← V - v_V

References
----------
[AC17] Arvaniti, Claassen, Nature Communications 2017 (CellCnn). [SAV22] Sav et al., Patterns 2022 (PriCell).
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cloister.arrays import F64, I64, Array
from cloister.errors import DataError, ParameterError


@dataclass(frozen=True, slots=True)
class Config:
    """What all parties agree on.

    Parameters
    ----------
    markers, filters, classes
        m, h, o.
    batch
        n, multi-cell inputs per party and step.
    steps
        Aggregations.
    learning_rate, momentum
        η and μ.
    interval
        r: the sigmoid is fitted on [-r, r].
    seed
        Of the initial weights, which are public.
    """

    markers: int
    filters: int = 8
    classes: int = 2
    batch: int = 100
    steps: int = 20
    learning_rate: float = 0.05
    momentum: float = 0.9
    interval: float = 3.0
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.markers, self.filters, self.batch, self.steps) < 1 or self.classes < 2:
            raise ParameterError("CellCnn needs markers, filters, a batch, steps, and at least two classes")
        if not 0 <= self.momentum < 1 or not self.learning_rate > 0 or not 0 < self.interval <= 8:
            raise ParameterError("CellCnn needs 0 <= momentum < 1, a learning rate above 0 and an interval up to 8")


@dataclass(frozen=True, eq=False)
class Weights:
    W: F64  # (m, h) filters
    V: F64  # (h, o) dense layer
    vW: F64  # (m, h) momentum
    vV: F64  # (h, o)

    @property
    def M(self) -> F64:
        return self.W @ self.V  # (m, o)


@functools.lru_cache(maxsize=64)
def sigmoid_fit(interval: float) -> tuple[float, float, float]:
    """a0, a1, a3 of the least-squares cubic on [-interval, interval]."""
    u = np.linspace(-interval, interval, 4001)
    (a1, a3), *_ = np.linalg.lstsq(np.stack([u, u**3], axis=1), 1 / (1 + np.exp(-u)) - 0.5, rcond=None)
    return 0.5, float(a1), float(a3)


def error_polynomial(interval: float, Y: F64) -> tuple[F64, float, F64, float, float]:
    """c0, c1, c2, c3, c5 with (σ(u) - y)·σ'(u) = c0 + c1·u + c2·u² + c3·u³ + c5·u⁵; c0 and c2 depend on y."""
    a0, a1, a3 = sigmoid_fit(interval)
    return (a0 - Y) * a1, a1 * a1, 3 * a3 * (a0 - Y), 4 * a1 * a3, 3 * a3 * a3


def initial(config: Config) -> Weights:
    """Glorot-normal weights from the public seed, on a grid on which their products are exact on every machine."""
    rng = np.random.default_rng([config.seed & 0xFFFFFFFF, 0xCE11])
    m, h, o = config.markers, config.filters, config.classes
    W = np.rint(rng.normal(0, math.sqrt(2 / (m + h)), (m, h)) * 2**15) / 2**15
    V = np.rint(rng.normal(0, math.sqrt(2 / (h + o)), (h, o)) * 2**15) / 2**15
    return Weights(W, V, np.zeros((m, h)), np.zeros((h, o)))


def gradient(config: Config, M: F64, X: F64, Y: F64) -> F64:
    """Z = XᵀE/n, (m, o), of one party's batch."""
    c0, c1, c2, c3, c5 = error_polynomial(config.interval, Y)
    U = X @ M  # (n, o)
    E = c0 + c1 * U + c2 * U**2 + c3 * U**3 + c5 * U**5
    return np.asarray(X.T @ E / config.batch)


def update(config: Config, w: Weights, Z: F64) -> Weights:
    """One step of gradient descent with momentum, from the mean Z."""
    vW = config.momentum * w.vW + config.learning_rate * Z @ w.V.T
    vV = config.momentum * w.vV + config.learning_rate * w.W.T @ Z
    return Weights(w.W - vW, w.V - vV, vW, vV)


@dataclass
class Trace:
    """How a clear training went; none of it exists when training is encrypted."""

    loss: list[float] = dataclasses.field(default_factory=list)
    outside: int = 0  # logits beyond the sigmoid's interval
    logits: int = 0


def train(
    config: Config, batches: Sequence[tuple[F64, F64]], *, start: Weights | None = None, trace: Trace | None = None
) -> Weights:
    """Train on every party's (X, Y), each (steps, n, m) and (steps, n, o), as the encrypted circuit would."""
    w = start or initial(config)
    for t in range(config.steps):
        M = w.M
        w = update(config, w, np.mean([gradient(config, M, X[t], Y[t]) for X, Y in batches], axis=0))
        if trace is not None:
            U = [X[t] @ M for X, _ in batches]
            trace.logits += sum(u.size for u in U)
            trace.outside += int(sum((np.abs(u) > config.interval).sum() for u in U))
            trace.loss.append(
                float(
                    np.mean([((sigmoid(config, u) - Y[t]) ** 2).mean() for u, (_, Y) in zip(U, batches, strict=True)])
                )
            )
    return w


def largest(config: Config, X: F64, Y: F64) -> tuple[float, float]:
    """The largest weight or momentum and the largest logit of one party's training alone; ∞ if it diverges."""
    w, weight, logit = initial(config), 0.0, 0.0
    with np.errstate(all="ignore"):
        for t in range(config.steps):
            U = X[t] @ w.M
            w = update(config, w, gradient(config, w.M, X[t], Y[t]))
            if not all(np.isfinite(a).all() for a in (U, w.W, w.V, w.vW, w.vV)):
                return math.inf, math.inf
            logit = max(logit, float(np.abs(U).max()))
            weight = max(weight, *(float(np.abs(a).max()) for a in (w.W, w.V, w.vW, w.vV)))
    return weight, logit


LARGEST_WEIGHT, LARGEST_LOGIT = 32.0, 16.0  # at a site that trains alone in the clear


def check_batches(c: Config, X: F64, Y: F64) -> None:
    if X.shape != (c.steps, c.batch, c.markers) or Y.shape != (c.steps, c.batch, c.classes):
        raise DataError(
            f"expected batches of shape {(c.steps, c.batch, c.markers)} and labels {(c.steps, c.batch, c.classes)},"
            f" found {X.shape} and {Y.shape}"
        )
    if not np.isfinite(X).all() or np.abs(X).max() > 2.0**5:
        raise DataError("a marker's mean lies beyond ±32 or is missing; standardise the markers first")


def check_rate(c: Config, X: F64, Y: F64) -> None:
    """Refuse to begin where this site's own data, trained alone in the clear, would diverge."""
    weight, logit = largest(c, X, Y)
    if not (weight <= LARGEST_WEIGHT and logit <= LARGEST_LOGIT):
        raise ParameterError(
            f"with learning rate {c.learning_rate:g} and momentum {c.momentum:g} the training diverges on this site's"
            " own data; agree on a smaller learning rate. Nothing was sent"
        )


def sigmoid(config: Config, U: F64) -> F64:
    a0, a1, a3 = sigmoid_fit(config.interval)
    return np.asarray(a0 + a1 * U + a3 * U**3)


def squared_error(config: Config, w: Weights, X: F64, Y: F64) -> float:
    """Of the fitted sigmoid, on inputs that were held out."""
    return float(((sigmoid(config, X @ w.M) - Y) ** 2).mean())


def stops(losses: Mapping[int, float], patience: int) -> bool:
    """Whether the last `patience` validations, step → squared error, were no better than one before; 0: never."""
    if not patience or not losses:
        return False
    best = min(sorted(losses), key=lambda step: losses[step])
    return sum(step > best for step in losses) >= patience


def logits(w: Weights, X: F64) -> F64:
    return np.asarray(X @ w.M)


def predict(U: F64) -> I64:
    """The class with the largest logit; the sigmoid is increasing on its interval."""
    return np.asarray(U.argmax(axis=1), np.int64)


def one_hot(y: npt.ArrayLike, classes: int) -> F64:
    return np.eye(classes)[np.asarray(y, np.int64)]


# ---- multi-cell inputs -----------------------------------------------------------------------------------------------


def draw_inputs(
    cells: F64,
    donors: Array,
    labels: I64,
    *,
    n_cells: int,
    per: str,
    n_inputs: int,
    rng: np.random.Generator,
) -> tuple[F64, I64]:
    """Mean-pooled multi-cell inputs: `n_inputs` of `n_cells` cells each, per class or per donor.

    Returns (inputs, m) and their classes. Cells are drawn with replacement.
    """
    X, y = [], []
    for k, rows in draw_rows(donors, labels, n_cells=n_cells, per=per, n_inputs=n_inputs, rng=rng):
        X.append(cells[rows].mean(axis=0))
        y.append(k)
    return np.asarray(X, np.float64), np.asarray(y, np.int64)


def draw_rows(
    donors: Array, labels: I64, *, n_cells: int, per: str, n_inputs: int, rng: np.random.Generator
) -> Iterator[tuple[int, I64]]:
    """The class of every input, and the rows of its cells."""
    groups: list[tuple[int, I64]] = []
    if per == "class":
        groups = [(int(k), np.flatnonzero(labels == k)) for k in np.unique(labels)]
    else:
        groups = [(int(labels[donors == d][0]), np.flatnonzero(donors == d)) for d in np.unique(donors)]
    for k, rows in groups:
        for _ in range(n_inputs):
            yield k, rng.choice(rows, n_cells)


def draw_batches(X: F64, y: I64, config: Config, rng: np.random.Generator) -> tuple[F64, F64]:
    """Batches for every step, epoch after epoch in new order: (steps, n, m) and one-hot (steps, n, o)."""
    order: list[int] = []
    while len(order) < config.steps * config.batch:
        order += rng.permutation(len(X)).tolist()
    at = np.array(order[: config.steps * config.batch]).reshape(config.steps, config.batch)
    return X[at], one_hot(y, config.classes)[at]


# ---- the model as a whole --------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Model:
    """An opened model: how raw cells become inputs, and the weights."""

    config: Config
    markers: tuple[str, ...]
    classes: tuple[str, ...]
    cofactor: float  # of arcsinh(x / cofactor); 0 for none
    mean: F64  # (m,)
    scale: F64  # (m,)
    weights: Weights | None = None
    losses: Mapping[int, float] = dataclasses.field(default_factory=dict)  # of validation, step → squared error
    stopped: int = 0  # the step after which training stopped early
    ring: str = ""  # under which it was trained, in words

    def prepare(self, cells: F64) -> F64:
        return standardise(cells, self.cofactor, self.mean, self.scale)

    def logits(self, X: F64) -> F64:
        """Of mean-pooled inputs in prepared units, (n, m) → (n, o)."""
        if self.weights is None:
            raise ParameterError("this model is encrypted; predict with predict-cellcnn, or open it")
        return logits(self.weights, X)

    def predict(self, X: F64) -> list[str]:
        return [self.classes[k] for k in predict(self.logits(X))]

    def association(self) -> F64:
        """How much each filter speaks for each class: V against the mean of the other classes, (h, o)."""
        assert self.weights is not None
        V = self.weights.V
        return np.asarray(V - (V.sum(axis=1, keepdims=True) - V) / (V.shape[1] - 1))

    def response(self, cells: F64, label: int) -> F64:
        """Filter response of every prepared cell, for the filter that speaks most for that class."""
        assert self.weights is not None
        return np.asarray(cells @ self.weights.W[:, self.association()[:, label].argmax()])

    def to_json(self) -> str:
        plain: dict[str, Any] = {
            "format": "cloister-cellcnn/1",
            "config": dataclasses.asdict(self.config),
            "markers": list(self.markers),
            "classes": list(self.classes),
            "cofactor": self.cofactor,
            "mean": self.mean.tolist(),
            "scale": self.scale.tolist(),
            "stopped": self.stopped,
            "W": None if self.weights is None else self.weights.W.tolist(),
            "V": None if self.weights is None else self.weights.V.tolist(),
        }
        return json.dumps(plain)

    @classmethod
    def from_json(cls, text: str) -> Model:
        try:
            raw = json.loads(text)
            if raw["format"] != "cloister-cellcnn/1":
                raise ValueError
            config = Config(**raw["config"])
            m, h, o = config.markers, config.filters, config.classes
            weights = None
            if raw["W"] is not None:
                W, V = (np.array(raw[k], np.float64).reshape(s) for k, s in (("W", (m, h)), ("V", (h, o))))
                weights = Weights(W, V, np.zeros((m, h)), np.zeros((h, o)))
            mean, scale = (np.array(raw[k], np.float64).reshape(m) for k in ("mean", "scale"))
            names = tuple(raw["markers"]), tuple(raw["classes"])
            made = cls(config, *names, float(raw["cofactor"]), mean, scale, weights)
            return dataclasses.replace(made, stopped=int(raw.get("stopped", 0)))
        except (ValueError, KeyError, TypeError):
            raise ParameterError("this is not a CellCnn model of Cloister; name the model.json of a training") from None


def standardise(cells: F64, cofactor: float, mean: F64, scale: F64) -> F64:
    """Take arcsinh(x / cofactor), then (x - mean) / scale; constant markers become 0."""
    x = np.arcsinh(cells / cofactor) if cofactor else cells
    return np.asarray(np.where(scale > 0, (x - mean) / np.where(scale > 0, scale, 1.0), 0.0))


def consensus_filters(
    models: Sequence[Weights], scores: Sequence[float], *, best: int = 3, threshold: float = 0.2
) -> tuple[F64, F64]:
    """Representative filters of the best models [AC17].

    Filters closer than `threshold` in cosine distance form a cluster; of each, the member nearest to all others stays.
    Returns (filters (k, m), their dense weights (k, o)); clusters of one model alone are kept.
    """
    from scipy.cluster.hierarchy import fcluster, linkage
    from scipy.spatial.distance import pdist, squareform

    chosen = np.argsort(scores)[::-1][:best]
    W = np.concatenate([models[k].W.T for k in chosen])
    V = np.concatenate([models[k].V for k in chosen])
    distance = pdist(W, "cosine")
    cluster = fcluster(linkage(distance, "average"), threshold, "distance")
    square = squareform(distance)
    rows = []
    for k in np.unique(cluster):
        members = np.flatnonzero(cluster == k)
        rows.append(members[square[np.ix_(members, members)].sum(axis=1).argmin()])
    return W[rows], V[rows]
