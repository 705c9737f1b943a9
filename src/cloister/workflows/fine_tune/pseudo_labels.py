"""Pseudo-labels for a round of federated training: labels spread over a graph of the round's cells (XCLP).

    P1   u       V_u = f(w_t; x)           what the last layer of the current model sees of u's cells
    P2   u, S    label propagation         among the round's sites, on V and the labels they have
    P3   u       label and confidence of each own cell without a label, for this round only

A step of `federated_training`, between its L6 and L7. Nothing is kept from one round to the next.

Reveals
-------
server : in every round what the propagation reveals to it: with `verified_propagation` sizes, with `label_propagation`
    all distances of the round's cells.
site : what the propagation reveals to it in every round: labels and rounded scores of its own cells, sizes of the other
    sites. A site that chooses its vectors can locate cells of others (`verified_propagation`). No budget counts them.
with `balance` (published), everyone : in every round, how many labels of each class the round's sites have together.

Assumes
-------
What the propagation assumes.

References
----------
[SYL24] Scott, Yeo, Lampert, Cross-client label propagation, Algorithm 2, lines 6 and 7.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

from cloister.arrays import F32
from cloister.errors import ParameterError
from cloister.mpc.crypto.agreement import Identity
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.net.channel import Channel
from cloister.study import Party
from cloister.workflows.fine_tune.training_parts import Learner

SOURCES = ("none", "network", "client", "xclp")


@dataclass(frozen=True, slots=True)
class Pseudo:
    """Where labels of unlabelled cells come from; public."""

    source: str = "none"  # "network": the model itself; "client": a graph per site; "xclp": one graph of the round
    warm: int = 0  # rounds on labels alone, before the first pseudo-label
    bits: int = 4096  # L
    n_neighbors: int = 10  # k
    alpha: float = 0.99
    engine: str = "mpc"  # that compares codes: "mpc", "ot" or "he"
    private: bool = True  # `verified_propagation`, or the published `label_propagation`
    power: float = 1.0  # p, of the similarities
    balance: bool = False  # the labels of a class count as one together

    def __post_init__(self) -> None:
        if self.source not in SOURCES or self.warm < 0:
            raise ParameterError(f"pseudo-labels come from {', '.join(SOURCES)}, found '{self.source}'")
        if self.private and self.source == "xclp":
            from cloister.workflows.propagate_labels import verified_propagation

            verified_propagation.check_params(self.params((Party("a"), Party("b")), Party("hub"), ("one", "two")))

    def at(self, t: int) -> bool:
        return self.source != "none" and t >= self.warm

    def protocol(self) -> ModuleType:
        """The propagation; imported only where it is asked for."""
        from cloister.papers import label_propagation
        from cloister.workflows.propagate_labels import verified_propagation

        return verified_propagation if self.private else label_propagation

    def params(self, clients: tuple[Party, ...], server: Party, labels: tuple[str, ...]) -> Any:
        asked = (self.bits, self.n_neighbors, self.alpha, self.engine)
        return self.protocol().Params(clients, server, *asked, classes=labels, balance=self.balance, power=self.power)

    @property
    def form(self) -> dict[str, Any]:
        """Of a graph of one site."""
        return {
            "n_neighbors": self.n_neighbors,
            "alpha": self.alpha,
            "power": self.power,
            "balance": self.balance,
        }


NO_PSEUDO = Pseudo()


async def site(
    ch: Channel,
    pseudo: Pseudo,
    clients: tuple[Party, ...],
    server: Party,
    labels: tuple[str, ...],
    learner: Learner,
    theta: F32,
    *,
    entropy: Entropy,
    identity: Identity,
) -> None:
    """Play u: hand the learner its pseudo-labels of this round."""
    if pseudo.source != "xclp":
        learner.teach_itself(theta, pseudo.source, **pseudo.form)
        return
    vectors, known = learner.embed(theta)  # P1
    names = [labels[code] if code >= 0 else None for code in known]
    params = pseudo.params(clients, server, labels)
    play = pseudo.protocol().site
    found = await play(ch, params, vectors, names, entropy=entropy, identity=identity)  # P2
    place = {name: i for i, name in enumerate(labels)}
    codes = [place[found.classes[i]] if i >= 0 else -1 for i in found.label]
    learner.teach(codes, found.confidence)  # P3


async def serve(
    ch: Channel,
    pseudo: Pseudo,
    clients: tuple[Party, ...],
    server: Party,
    labels: tuple[str, ...],
    *,
    entropy: Entropy,
    identity: Identity,
) -> None:
    """Play S."""
    if pseudo.source == "xclp":
        play = pseudo.protocol().server
        await play(ch, pseudo.params(clients, server, labels), entropy=entropy, identity=identity)  # P2
