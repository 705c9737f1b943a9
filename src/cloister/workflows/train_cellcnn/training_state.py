"""What one step of an encrypted training computes locally: a site's gradient, and the state at S and the auditor.

The aggregator computes every `State`, and the auditor does it again; other sites hold [M] alone.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from cloister.arrays import F64, U64
from cloister.models import cellcnn
from cloister.mpc.crypto.ckks import scheme as ckks
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.crypto.rns.ring import Residues
from cloister.mpc.threshold_ckks import collective_refresh
from cloister.workflows.train_cellcnn.cellcnn_circuit import Layout, aggregated_product, gradient
from cloister.workflows.train_cellcnn.key_store import KeyStore
from cloister.workflows.train_cellcnn.training_keys import Keys
from cloister.workflows.train_cellcnn.training_refreshes import Refresh
from cloister.workflows.train_cellcnn.training_terms import Terms


@dataclass
class State:
    """[M], [W], [V] and [A] after a step."""

    model: list[ckks.Cipher]
    W: list[ckks.Cipher]
    V: list[ckks.Cipher]
    archive: list[ckks.Cipher]

    @classmethod
    def initial(cls, params: Terms) -> State:
        """The public initial weights, in ciphertexts that everybody makes alike and that have no noise."""
        c, L, P, w = ckks.context(params.ckks), params.layout, params.ckks, cellcnn.initial(params.config)

        def encrypt(values: F64, k: int) -> ckks.Cipher:
            return c.encrypt_public(values, k, P.scale)

        return cls(
            [encrypt(L.model_slots(w.M, g), P.top) for g in L.groups],
            [encrypt(L.filter_slots(w.W), L.ladder.one)],
            [encrypt(L.dense_slots(w.V, g), L.ladder.one) for g in L.groups],
            [encrypt(values, P.base) for values in L.archive(w)],
        )

    @classmethod
    def after(cls, step: int, params: Terms, store: KeyStore | None) -> State:
        """The initial state, or that of a checkpoint."""
        if step == 0 or store is None:
            return cls.initial(params)
        kept = store.get_state(ckks.context(params.ckks), params.tag, step)
        return cls(kept["model"], *(kept.get(name, []) for name in ("W", "V", "archive")))

    def keep(
        self,
        step: int,
        params: Terms,
        store: KeyStore | None,
        *,
        check: tuple[dict[str, list[ckks.Cipher]], bytes],
        model_only: bool = False,
        checked: bool = False,
    ) -> None:
        """Write a checkpoint, where there is a store; `checked` once [M] passed its range check.

        `check` is what the next check of copies needs, in ciphertexts and in bytes (`training_check`).
        """
        if store is not None:
            rest: dict[str, list[ckks.Cipher]] = {"checked": []} if checked else {}
            if not model_only:
                rest |= {"W": self.W, "V": self.V, "archive": self.archive}
            state = {"model": self.model} | rest | check[0]
            store.put_state(ckks.context(params.ckks), params.tag, step, state, check[1])

    def products(self, c: ckks.Context, Z: Sequence[ckks.Cipher], relin: object) -> list[ckks.Cipher]:
        """[Z ⊙ W], [Z ⊙ V] and [A]: what the update is made of."""
        by_W = [aggregated_product(c, z, self.W[0], relin) for z in Z]
        by_V = [aggregated_product(c, z, v, relin) for z, v in zip(Z, self.V, strict=True)]
        return [*by_W, *by_V, *self.archive]

    def updated(self, new: Sequence[ckks.Cipher]) -> State:
        """After the second refresh; [M] still is the old one."""
        at = len(self.archive)
        return State(self.model, [new[at]], list(new[at + 1 :]), list(new[:at]))

    def factors(self, c: ckks.Context, relin: object) -> list[ckks.Cipher]:
        """[W' ⊙ V'], of which [M'] is made."""
        return [aggregated_product(c, self.W[0], v, relin) for v in self.V]

    def squares(self, c: ckks.Context, relin: object) -> list[ckks.Cipher]:
        """[W ⊙ W] and [V ⊙ V]."""
        return [aggregated_product(c, x, x, relin) for x in (*self.W, *self.V)]


class Losses:
    """Validation errors so far, the same at all parties, and whether they end the training."""

    def __init__(self, params: Terms, store: KeyStore | None, step: int) -> None:
        self._params, self._store = params, store
        self.found = store.losses(params.tag, step) if store is not None and params.patience else {}

    def put(self, step: int, loss: float) -> None:
        self.found[step] = loss
        if self._store is not None and self._params.patience:
            self._store.put_losses(self._params.tag, self.found)

    def due(self, step: int, *, resumed: bool) -> bool:
        """After a step; where a run goes on from a step, not all may have seen its error: it is opened again."""
        return self._params.validates(step) and (not resumed or (step > 0 and self._params.patience > 0))

    def go_on(self, step: int) -> bool:
        return step < self._params.config.steps and not cellcnn.stops(self.found, self._params.patience)


def gradient_ciphers(
    c: ckks.Context,
    L: Layout,
    model: Sequence[ckks.Cipher],
    X: F64,
    Y: F64,
    keys: Keys,
    refresh: Refresh,
    entropy: Entropy,
) -> tuple[list[U64], list[Residues]]:
    """[Z + K] of every class group, added over the chunks of the batch, and the pads K.

    No two calls give the same polynomials. The refresh takes sums over samples, and whoever holds the ciphertext has
    nothing: K is uniform.
    """
    ciphers, pads = [], []
    for M, group in zip(model, L.groups, strict=True):
        parts = (
            gradient(L, M, X[at : at + L.I], Y[at : at + L.I, list(group)], keys.relin, keys.rotation)
            for at in range(0, len(X), L.I)
        )
        raw, _ = c.raw(c.rerandomise(keys.public, functools.reduce(c.add, parts), entropy))
        pads.append(collective_refresh.pad(refresh.params, entropy))
        c.ring.add(raw[0], pads[-1])
        ciphers.append(raw)
    return ciphers, pads
