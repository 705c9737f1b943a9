"""Federated k-NN in the clear, Algorithm 2 of the paper: for consortia whose members may see each other's embeddings.

    P1   querier → S → i    Q, the rows to be labelled
    P2   i → S              distances² of its k nearest references to each row of Q, ascending, and their row numbers
    P3   S → i              which of these are among the k nearest of all sites
    P4   i → S              votes per label over the ones that are
    P5   S → querier        the label with most votes, of equal ones the earlier; its votes

Rows are scaled and rounded as in `nearest_labels`, so that all modes decide on the same numbers. Equally distant
references of one site count in the order of their labels, those of different sites in the order of the sites.

Reveals
-------
coordinator : Q; for every query the distances to the k nearest references of each site, with their numbers, from
    which it computes every reference that is near to more queries than it has dimensions, by trilateration; all votes.
site : Q; which of its references are neighbours of which query.
querier : a label and its votes per cell.

Assumes
-------
Everybody trusts everybody with embeddings. Authenticated links. Lies that are not noticed: (a), (b), (c), (f) of the
querier, (a), (b), (c), (f) of the holder and (a), (b), (c), (f) of the coordinator.

Cost
----
Per site: m·d words in, 2·m·k words and m·L votes out. Five messages deep.

References
----------
[000] FedscGPT, Algorithm 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cloister.arrays import I64, U8
from cloister.errors import ParameterError
from cloister.mpc.net.channel import Channel
from cloister.mpc.net.wire import message
from cloister.study import Party
from cloister.workflows.map_labels import nearest_labels
from cloister.workflows.map_labels.nearest_labels import UNKNOWN, Mapped, encode

NAME = "plain_knn"
FAR = np.int64(1 << 62)  # pads a site's list where it has fewer than k references


@dataclass(frozen=True, slots=True)
class Params:  # public; hashed into the run id, so a mismatch aborts
    core: nearest_labels.Params
    coordinator: Party  # S

    def __post_init__(self) -> None:
        if self.coordinator in (self.core.querier, *self.core.sites):
            raise ParameterError("the coordinator of a plain mapping holds no cells")


@message("P1")
class Queries:  # querier → S → i
    q: I64  # (m, d)


@message("P2")
class Nearest:  # i → S
    d2: I64  # (m, k)
    rows: I64  # (m, k)


@message("P3")
class Chosen:  # S → i
    mask: U8  # (m, k)


@message("P4")
class Votes:  # i → S
    votes: I64  # (m, labels)


@message("P5")
class Result:  # S → querier
    labels: I64  # (m,)
    votes: I64  # (m,)


def ideal(params: Params, inputs: Mapping[Party, object]) -> dict[Party, Mapped | None]:
    """What a trusted party would hand to each party, up to ties in distance between sites."""
    return nearest_labels.ideal(params.core, inputs)


def roles(params: Params) -> dict[Party, object]:
    return {params.coordinator: coordinator, params.core.querier: querier} | dict.fromkeys(params.core.sites, holder)


def cost(params: Params) -> dict[Party, tuple[int, int]]:
    """Messages and payload bytes that each party sends."""
    core = params.core
    m, k, c = core.queries, core.k, len(core.sites)
    return {
        params.coordinator: (2 * c + 1, c * (8 * m * core.dims + m * k) + 16 * m),
        core.querier: (1, 8 * m * core.dims),
    } | dict.fromkeys(core.sites, (2, 16 * m * k + 8 * m * len(core.labels)))


# ---- local steps -----------------------------------------------------------------------------------------------------


def nearest(q: I64, r: I64, y: I64, k: int) -> tuple[I64, I64]:
    """P2: squared distances and row numbers of the k nearest, by distance, label, row."""
    order = np.argsort(y, kind="stable")
    columns = r[order]
    distances, rows = np.full((len(q), k), FAR), np.full((len(q), k), -1, np.int64)
    count = min(k, len(r))
    for start in range(0, len(q), 256):
        part = q[start : start + 256]
        d = (part**2).sum(1)[:, None] + (columns**2).sum(1) - 2 * _product(part, columns)
        best = np.argsort(d, axis=1, kind="stable")[:, :count]
        distances[start : start + 256, :count] = np.take_along_axis(d, best, axis=1)
        rows[start : start + 256, :count] = order[best]
    return distances, rows


def _product(q: I64, r: I64) -> I64:
    """Exact: through BLAS where |q · r| stays below 2^53."""
    reach = np.sqrt(float((q.astype(float) ** 2).sum(1).max()) * float((r.astype(float) ** 2).sum(1).max()))
    if reach < 1 << 52:
        return (q.astype(np.float64) @ r.T.astype(np.float64)).astype(np.int64)
    return q @ r.T


def choose(lists: list[I64], k: int) -> list[U8]:
    """P3: which entries of the sites' lists are the k smallest of all, ties in the order of the sites."""
    whole = np.concatenate(lists, axis=1)
    mask = np.zeros(whole.shape, np.uint8)
    np.put_along_axis(mask, np.argsort(whole, axis=1, kind="stable")[:, :k], 1, axis=1)
    return np.split(mask, np.cumsum([x.shape[1] for x in lists])[:-1].tolist(), axis=1)


# ---- roles -----------------------------------------------------------------------------------------------------------


async def querier(ch: Channel, params: Params, x: npt.NDArray[np.floating]) -> Mapped:
    core = params.core
    q = nearest_labels.pad(encode(core, x), core.queries)
    await ch.send(params.coordinator, Queries(q))  # P1
    got = await ch.recv(params.coordinator, Result, labels=(core.queries,), votes=(core.queries,))  # P5
    labels, votes = got.labels[: len(x)], got.votes[: len(x)]
    return Mapped(labels, votes if core.share else None)


async def holder(ch: Channel, params: Params, x: npt.NDArray[np.floating], labels: I64) -> None:
    core = params.core
    m, k = core.queries, core.k
    r, y = encode(core, x), np.asarray(labels, np.int64)
    nearest_labels.weights(core, r, y, core.rows[core.sites.index(ch.me)])  # checks the labels
    q = (await ch.recv(params.coordinator, Queries, q=(m, core.dims))).q  # P1
    d2, rows = nearest(q, r, y, k)
    to = params.coordinator
    d2 = ch.reveal(d2, to=to, line="P2", what=f"distances to {k} references per query", protocol=NAME)
    await ch.send(to, Nearest(d2, rows))  # P2
    mask = (await ch.recv(to, Chosen, mask=(m, k))).mask.astype(bool) & (rows >= 0)  # P3
    votes = np.zeros((m, len(core.labels)), np.int64)
    at = np.nonzero(mask)
    np.add.at(votes, (at[0], y[rows[at]]), 1)
    votes = ch.reveal(votes, to=to, line="P4", what="votes per label and query", protocol=NAME)
    await ch.send(to, Votes(votes))  # P4


async def coordinator(ch: Channel, params: Params) -> None:
    core = params.core
    m, k = core.queries, core.k
    queries = await ch.recv(core.querier, Queries, q=(m, core.dims))  # P1
    await ch.scatter(core.sites, queries)
    lists = await ch.gather(core.sites, Nearest, d2=(m, k), rows=(m, k))  # P2
    masks = choose([lists[p].d2 for p in core.sites], k)
    await ch.scatter({p: Chosen(mask) for p, mask in zip(core.sites, masks, strict=True)})  # P3
    votes = await ch.gather(core.sites, Votes, votes=(m, len(core.labels)))  # P4
    total = np.sum([v.votes for v in votes.values()], axis=0)
    labels, top = total.argmax(1), total.max(1)
    if core.threshold:
        far = np.min([lists[p].d2[:, 0] for p in core.sites], axis=0) > int(core.threshold**2 * core.scale**2)
        labels, top = np.where(far, UNKNOWN, labels), np.where(far, 0, top)
    top = top if core.share else np.zeros_like(top)
    await ch.send(core.querier, Result(labels.astype(np.int64), top.astype(np.int64)))  # P5
