"""The encrypted CellCnn step, its local parts: where numbers stand in the slots, and what is computed on them.

Factored: with M = W·V, a party's whole contribution to the gradient is Z = XᵀE (m×o), and ∇W = Z·Vᵀ, ∇V = Wᵀ·Z. One
product of levels per refresh at the aggregator, and no rotation but those that add over markers; everything linear
(sums over samples, filters and classes, momentum, the update itself, replication) happens in the refresh's slot maps.

Slots are (j, c, i): marker j outermost, then class c, then sample or filter i. J is m rounded up to a power of two,
so rotations by R, 2R, 3R, 4R, 8R, ..., with R = slots/J, add over markers and leave the sum everywhere.

    M   (j, c, i) = M[j, c]       for all i        at the top          sites start here
    U   (j, c, i) = U[i, c]       for all j        one prime spent
    Z   (j, c, i) = X[i, j]·E[i, c]                at the base; summed over sites, then over i by the refresh
    W   (j, c, i) = W[j, i]       for all c        V  (j, c, i) = V[i, c]  for all j
    A   all of W, V, v_W, v_V, each once: the archive, never multiplied

A class group that does not fit beside the others gets ciphertexts of its own; so do samples beyond I.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cloister.arrays import F64, I64
from cloister.errors import ParameterError
from cloister.models import cellcnn
from cloister.mpc.crypto.ckks import scheme as ckks
from cloister.mpc.crypto.rns.ring import SIGMA
from cloister.mpc.crypto.rns.slots import SlotMap, make_map
from cloister.mpc.threshold_ckks import collective_range
from cloister.study import Party
from cloister.workflows.train_cellcnn.level_schedule import PRODUCT, QUERY, Ladder, chain

VALUE_BITS = 6  # every slot that is refreshed stays below 64 in absolute value
QUERY_BOUND = 24584.0  # no entry of an encrypted query is larger, whatever the querier does (`oblivious_prediction`)


@dataclass(frozen=True, slots=True)
class Layout:
    """Where everything stands; the same at all parties."""

    config: cellcnn.Config
    ckks: ckks.Parameters
    parties: int

    def __post_init__(self) -> None:
        self.ladder  # noqa: B018 - raises where the parameters are not those of a training
        if self.config.filters > self.R:
            raise ParameterError(slots_missing(self.config, self.ckks.slots))

    @property
    def ladder(self) -> Ladder:
        return Ladder(self.ckks, self.config.interval)

    @property
    def J(self) -> int:
        return 1 << (self.config.markers - 1).bit_length()

    @property
    def R(self) -> int:
        return self.ckks.slots // self.J

    @property
    def O(self) -> int:  # noqa: E743
        """Classes per ciphertext: as few ciphertexts as possible, and room for the filters."""
        n, o = self.config.batch, self.config.classes
        fits = [k for k in range(1, o + 1) if self.R // k >= self.config.filters]
        return min(fits, key=lambda k: (-(-o // k) * -(-n // (self.R // k)), -k))

    @property
    def I(self) -> int:  # noqa: E743
        return self.R // self.O

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        o = self.config.classes
        return tuple(tuple(range(g, min(o, g + self.O))) for g in range(0, o, self.O))

    @property
    def chunks(self) -> int:
        return -(-self.config.batch // self.I)

    @property
    def stages(self) -> tuple[tuple[int, ...], ...]:
        """Rotations that add over markers: four, then four times four, ... (two at last if J is no power of four)."""
        stages, reach = [], 1
        while reach < self.J:
            width = min(4, self.J // reach)
            stages.append(tuple(self.R * reach * i for i in range(1, width)))
            reach *= width
        return tuple(stages)

    @property
    def rotations(self) -> tuple[int, ...]:
        return tuple(steps for stage in self.stages for steps in stage)

    def at(self, j: Any, c: Any, i: Any) -> Any:
        return j * self.R + c * self.I + i

    # ---- the archive -------------------------------------------------------------------------------------------------

    @property
    def numbers(self) -> int:
        """Entries of W, V, v_W and v_V."""
        m, h, o = self.config.markers, self.config.filters, self.config.classes
        return 2 * (m * h + h * o)

    @property
    def archives(self) -> int:
        return -(-self.numbers // self.ckks.slots)

    def offsets(self) -> dict[str, int]:
        m, h, o = self.config.markers, self.config.filters, self.config.classes
        return {"W": 0, "V": m * h, "vW": m * h + h * o, "vV": 2 * m * h + h * o}

    def archive(self, w: cellcnn.Weights) -> list[F64]:
        flat = np.zeros(self.archives * self.ckks.slots)
        flat[: self.numbers] = np.concatenate([w.W.ravel(), w.V.ravel(), w.vW.ravel(), w.vV.ravel()])
        return list(flat.reshape(self.archives, -1))

    def unarchive(self, flat: F64) -> cellcnn.Weights:
        m, h, o = self.config.markers, self.config.filters, self.config.classes
        W, V, vW, vV = np.split(flat[: self.numbers], [m * h, m * h + h * o, 2 * m * h + h * o])
        return cellcnn.Weights(W.reshape(m, h), V.reshape(h, o), vW.reshape(m, h), vV.reshape(h, o))

    # ---- plain vectors -----------------------------------------------------------------------------------------------

    def spread(self, table: F64) -> F64:
        """(j, c, i) from an array that broadcasts to (J, O, I)."""
        out = np.zeros((self.J, self.R))
        full = np.broadcast_to(table, (self.J, self.O, self.I))
        out[:, : self.O * self.I] = full.reshape(self.J, -1)
        return out.ravel()

    def model_slots(self, M: F64, group: Sequence[int]) -> F64:
        table = np.zeros((self.J, self.O, 1))
        table[: self.config.markers, : len(group), 0] = M[:, list(group)]
        return self.spread(table)

    def input_slots(self, X: F64) -> F64:
        """Up to I samples: X[i, j] at (j, every c, i)."""
        table = np.zeros((self.J, 1, self.I))
        table[: X.shape[1], 0, : X.shape[0]] = X.T
        return self.spread(table)

    def filter_slots(self, W: F64) -> F64:
        table = np.zeros((self.J, 1, self.I))
        table[: self.config.markers, 0, : self.config.filters] = W
        return self.spread(table)

    def dense_slots(self, V: F64, group: Sequence[int]) -> F64:
        table = np.zeros((1, self.O, self.I))
        table[0, : len(group), : self.config.filters] = V[:, list(group)].T
        return self.spread(table)

    # ---- the maps of the refreshes -----------------------------------------------------------------------------------

    def maps_of_gradient(self) -> list[SlotMap]:
        """Z summed over samples and averaged, at every filter's place."""
        return self._reduce(
            min(self.I, self.config.batch), np.arange(self.config.filters), 1.0 / (self.config.batch * self.parties)
        )

    def maps_of_product(self) -> list[SlotMap]:
        """W ⊙ V summed over filters, at every sample's place: M."""
        return self._reduce(self.config.filters, np.arange(self.I), 1.0)

    def _reduce(self, width: int, to: I64, weight: float) -> list[SlotMap]:
        maps = []
        for g, group in enumerate(self.groups):
            first = g * self.ckks.slots
            rows = [
                (self.at(j, c, to), first + self.at(j, c, np.arange(width)), weight)
                for j in range(self.config.markers)
                for c in range(len(group))
            ]
            maps.append(make_map(rows, self.ckks.slots, real=True))
        return maps

    def maps_of_update(self) -> list[SlotMap]:
        """From Z⊙W and Z⊙V of every group, and the archive: the new archive, W, and V of every group."""
        S, G, config = self.ckks.slots, len(self.groups), self.config
        m, h, o = config.markers, config.filters, config.classes
        at, archive = self.offsets(), 2 * G * S
        place = {c: (g, k) for g, group in enumerate(self.groups) for k, c in enumerate(group)}
        new: dict[tuple[str, int, int], tuple[I64, F64]] = {}
        for j in range(m):
            for i in range(h):
                sources = [(G + g) * S + self.at(j, k, i) for g, k in place.values()]
                self._momentum(new, "W", (j, i), archive + j * h + i, at, np.array(sources))
        for i in range(h):
            for c in range(o):
                g, k = place[c]
                sources_v = g * S + self.at(np.arange(m), k, i)
                self._momentum(new, "V", (i, c), archive + i * o + c, at, sources_v)
        maps = []
        names = {"W": (m, h), "V": (h, o), "vW": (m, h), "vV": (h, o)}
        flat = [(at[n] + a * shape[1] + b, new[n, a, b]) for n, shape in names.items() for a, b in np.ndindex(shape)]
        for part in range(self.archives):
            rows = [(p - part * S, *entry) for p, entry in flat if part * S <= p < (part + 1) * S]
            maps.append(make_map(rows, S, real=True))
        k_all = np.arange(self.O)
        rows = [(self.at(j, k_all, i), *new["W", j, i]) for j in range(m) for i in range(h)]
        maps.append(make_map(rows, S, real=True))
        for group in self.groups:
            j_all = np.arange(m)
            rows = [(self.at(j_all, k, i), *new["V", i, c]) for k, c in enumerate(group) for i in range(h)]
            maps.append(make_map(rows, S, real=True))
        return maps

    def _momentum(
        self,
        new: dict[tuple[str, int, int], tuple[I64, F64]],
        name: str,
        key: tuple[int, int],
        entry: int,
        at: Mapping[str, int],
        sources: I64,
    ) -> None:
        """Rows for v' = μ·v + η·Σ sources and w' = w - v'."""
        w, v = entry + at[name], entry + at[f"v{name}"]
        mu, eta = self.config.momentum, np.full(len(sources), self.config.learning_rate)
        new[f"v{name}", *key] = np.array([v, *sources]), np.array([mu, *eta])
        new[name, *key] = np.array([w, v, *sources]), np.array([1.0, -mu, *-eta])

    # ---- what is opened: W and V, which the archive begins with, and no momentum -------------------------------------

    @property
    def weights(self) -> int:
        """Entries of W and V."""
        return self.numbers // 2

    @property
    def openings(self) -> int:
        """Ciphertexts of the archive that hold W and V."""
        return -(-self.weights // self.ckks.slots)

    @property
    def copies(self) -> int:
        """How often each number stands in the ciphertext that is opened: their mean undoes part of the flooding."""
        return max(1, self.ckks.slots // self.weights)

    def maps_of_opening(self) -> list[SlotMap]:
        S = self.ckks.slots
        maps = []
        for part in range(self.openings):
            count = min(S, self.weights - part * S)
            rows = [(p + count * np.arange(self.copies), part * S + p, 1.0) for p in range(count)]
            maps.append(make_map(rows, S, real=True))
        return maps

    def mean_of_copies(self, opened: Sequence[F64]) -> F64:
        """W and V, flat."""
        flat = []
        for part, x in enumerate(opened):
            count = min(self.ckks.slots, self.weights - part * self.ckks.slots)
            flat.append(x[: count * self.copies].reshape(self.copies, count).mean(axis=0))
        return np.concatenate(flat)

    def opened_weights(self, flat: F64) -> cellcnn.Weights:
        """From W and V alone: momenta are never opened, and zero here."""
        return self.unarchive(np.concatenate([flat, np.zeros(self.numbers - self.weights)]))

    def functionals(self, openings: int) -> int:
        """Real linear functionals of earlier ciphertexts that all openings under one key depend on, at most.

        W and V, their norm, M, and one validation error for every other opening: see docs/security/threshold_ckks.md.
        """
        return self.weights + 1 + self.config.markers * self.config.classes + openings

    # ---- noise -------------------------------------------------------------------------------------------------------

    @property
    def noise(self) -> float:
        """Standard deviation of the noise that W, V and the momenta carry at the end, per coefficient.

        Each step adds η times the noise of a product summed over markers, to which Z brings its own and that of a fresh
        encryption of zero; momentum adds steps up to 1/(1 - μ), and steps are independent. The start carries the noise
        of the public key; a refresh adds every holder's errors, and roundings.
        """
        c, n = self.config, self.parties * self.config.batch
        one, fresh = ckks.rounding_noise(self.ckks, self.parties), ckks.encryption_noise(self.ckks, self.parties)
        z = math.hypot(self.ladder.z_noise * one, fresh) / math.sqrt(min(n, self.parties * self.I))
        step = c.learning_rate * math.sqrt(max(self.J, c.classes)) * (one + z)
        refresh = math.sqrt(c.steps * self.parties) * 3 * SIGMA / (1 - c.momentum)
        return math.hypot(step * math.sqrt(c.steps) / (1 - c.momentum), refresh)

    @property
    def factor_noise(self) -> float:
        """The same for [W ⊙ V], of which [M] is made."""
        return math.hypot(math.sqrt(2) * self.noise, ckks.rounding_noise(self.ckks, self.parties))

    @property
    def query_noise(self) -> float:
        """The same for the logits of a query: [M]·[X] added over markers, |X| below `QUERY_BOUND`.

        The model of a prediction is sealed (`encrypted_training`): it carries the noise of one refresh alone. Its
        coefficients are not assumed to be small: they passed `collective_range`, whose tolerance is what the noise of
        [X], of two maskers, is multiplied by.
        """
        fresh = 3 * SIGMA * math.sqrt(self.parties)
        largest = self.model_range().tolerance * math.sqrt(self.ckks.degree)  # Euclidean, of one [M]
        masks = math.sqrt(2) * ckks.encryption_noise(self.ckks, self.parties)
        scale = 2.0 ** sum(self.ckks.bits[self.ckks.base : self.ckks.base + QUERY])
        amplified = largest * masks * math.sqrt(self.J) / scale  # coherent over markers
        key = self.key_tolerance * math.sqrt(self.ckks.degree)  # of a product, unless 2^-20 happened
        switching = key * 2.0**collective_range.FACTOR_BITS * math.sqrt(self.J) / scale
        rounding = 2 * ckks.rounding_noise(self.ckks, self.parties)
        return math.sqrt(self.J) * math.hypot(QUERY_BOUND * fresh, rounding, amplified, switching)

    def model_range(self, who: tuple[tuple[Party, ...], Party] | None = None) -> collective_range.Params:
        """The range check of `encrypted_training.range_ciphers`, by parties; without any, for its tolerance."""
        holders, aggregator = who or (tuple(Party(f"site-{i}") for i in range(self.parties)), Party("aggregator"))
        P, count = self.ckks, len(self.groups) + 4
        return collective_range.Params(holders, aggregator, P, self.ladder.query, count, P.scale, self.value_bits)

    @property
    def key_shift(self) -> int:
        """By how many bits ciphertexts of zero are shifted for their range check: to the size of [M] at most."""
        noise = ckks.encryption_noise(self.ckks, self.parties) ** 2 * self.ckks.degree  # Euclidean, of a product
        return max(0, self.ckks.scale_bits + self.value_bits - math.ceil(math.log2(noise)) - 2)

    @property
    def key_tolerance(self) -> float:
        """The largest coefficient of the public key's noise, and of a product of zeros, that may pass."""
        return self.model_range().tolerance / 2.0**self.key_shift

    @property
    def value_bits(self) -> int:
        """Slots of refreshed ciphertexts lie below 2^this."""
        return VALUE_BITS if self.ckks.scale_bits > 68 else 3

    @property
    def opening_error(self) -> float:
        """Standard deviation that the flooding leaves in an opened weight."""
        return self._flood_error(self.noise) / math.sqrt(self.copies)

    @property
    def answer_error(self) -> float:
        """The same for a logit of an encrypted query of ones, which stands J times in its ciphertext; M was sealed."""
        sealed = self._flood_error(self.factor_noise) * math.sqrt(self.config.filters * self.config.markers)
        return math.hypot(self._flood_error(self.query_noise) / math.sqrt(self.J), sealed)

    def _flood_error(self, noise: float) -> float:
        flood = 2.0 ** (ckks.flood_bits(self.ckks, noise) - 1) * math.sqrt(self.parties)
        return flood * math.sqrt(self.ckks.degree) / self.ckks.scale


def slots_missing(config: cellcnn.Config, slots: int) -> str:
    need = config.filters << (config.markers - 1).bit_length()
    degree = 2 << (need - 1).bit_length()
    ring = f"ring degree {degree} would do" if degree <= 32768 else "no ring offered here would do; use fewer"
    return (
        f"{config.filters} filters on {config.markers} markers need {need} slots, the ring has {slots}; {ring},"
        " or use fewer filters or markers"
    )


def choose_ring(config: cellcnn.Config, parties: int) -> ckks.Parameters:
    """The smallest secure ring that opens weights to 2e-6 and answers queries to 4e-3 (one standard deviation)."""
    need = config.filters << (config.markers - 1).bit_length()
    if need > 16384:
        raise ParameterError(slots_missing(config, 16384))
    for scale_bits in (84, 88, 92, 96, 100, 104):
        params = chain(16384, scale_bits=scale_bits, value_bits=VALUE_BITS, parties=parties)
        layout = Layout(config, params, parties)
        if layout.opening_error < 2e-6 and layout.answer_error < 4e-3:
            return params
    raise ParameterError(
        f"{config.steps} steps at learning rate {config.learning_rate:g} and momentum {config.momentum:g} gather more"
        " noise than an opening could hide to three digits; use fewer steps or a smaller learning rate"
    )


@functools.lru_cache(maxsize=4)
def all_maps(layout: Layout) -> dict[str, list[SlotMap]]:
    """Maps of one layout; the parties of a rehearsal share them."""
    return {
        "gradient": layout.maps_of_gradient(),
        "update": layout.maps_of_update(),
        "product": layout.maps_of_product(),
        "opening": layout.maps_of_opening(),
    }


# ---- evaluation ------------------------------------------------------------------------------------------------------


def add_over_markers(c: ckks.Context, layout: Layout, ct: ckks.Cipher, rotation: Mapping[int, Any]) -> ckks.Cipher:
    for stage in layout.stages:
        ct = c.add_rotations(ct, [rotation[steps] for steps in stage])
    return ct


def aggregated_product(c: ckks.Context, x: ckks.Cipher, y: ckks.Cipher, relin: Any) -> ckks.Cipher:
    """Multiply at the aggregator, slot by slot: both at `Ladder.one` primes and scale Δ, the product at the base."""
    return c.times(c.shift(x, _room(c)), y, relin, PRODUCT)


def product_scale(c: ckks.Context) -> float:
    """The scale of an aggregated product: near Δ."""
    return c.params.scale**2 * 2.0 ** _room(c) / c.dropped(c.params.base + PRODUCT, PRODUCT)


def _room(c: ckks.Context) -> int:
    """By how many bits the primes of a product exceed Δ."""
    return round(math.log2(c.dropped(c.params.base + PRODUCT, PRODUCT) / c.params.scale))


def times_x(c: ckks.Context, ct: ckks.Cipher, values: F64, scale: float) -> ckks.Cipher:
    """Times plain values, to that scale, for one prime."""
    k = ct.primes
    return c.times_plain(ct, c.encode(values, k, scale * c.dropped(k, 1) / ct.scale), 1)


def logits(layout: Layout, M: ckks.Cipher, X: F64, rotation: Mapping[int, Any]) -> ckks.Cipher:
    """U of up to I samples, at every marker's place."""
    c, ladder = ckks.context(layout.ckks), layout.ladder
    k_u = ladder.primes[0]
    scale = math.sqrt(2.0**ladder.square_bits * c.dropped(k_u, ladder.spent[0]))
    return add_over_markers(c, layout, times_x(c, c.drop(M, k_u + 1), layout.input_slots(X), scale), rotation)


def gradient(layout: Layout, M: ckks.Cipher, X: F64, Y: F64, relin: Any, rotation: Mapping[int, Any]) -> ckks.Cipher:
    """Z of up to I samples and one class group, at scale Δ; X (k, m), Y (k, classes of the group).

    Stages and scales as in `cellcnn_ladder`.
    """
    c, ladder = ckks.context(layout.ckks), layout.ladder
    (_, _, k_q, _), (d1, d2, d3) = ladder.primes, ladder.spent
    c0, _, c2, _, _ = cellcnn.error_polynomial(layout.config.interval, Y)
    c5, p, q = ladder.quintic

    def by_class(coefficients: F64) -> F64:  # x·c(y) at (j, c, i)
        table = np.zeros((layout.J, layout.O, layout.I))
        table[: X.shape[1], : Y.shape[1], : len(X)] = X.T[:, None, :] * coefficients.T[None]
        return layout.spread(table)

    U = logits(layout, M, X, rotation)
    U2 = c.square(U, relin, d1)
    Q = c.add_plain(c.square(c.add_plain(U2, p), relin, d2), q)
    scale = layout.ckks.scale * c.dropped(k_q, d3) / Q.scale
    factor = times_x(c, c.drop(U, k_q + 1), c5 * layout.input_slots(X), scale)
    Z = c.product(factor, Q, relin)
    low = c.drop(U2, k_q)
    even = c.multiply_plain(low, c.encode(by_class(c2), k_q, Z.scale / low.scale))
    Z = c.add_plain(c.rescale(c.add(Z, even), d3), by_class(c0))
    Z.scale = layout.ckks.scale
    return Z
