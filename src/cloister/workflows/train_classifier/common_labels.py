"""Common labels: the sites find one vocabulary of labels, and whether their embeddings come from one model.

    L1   u → S   digest and width of the embedding (none for genes); names of u's labels, unless the study lists them
    L2   S ⇒ u   digest and width of all; the vocabulary: the study's names, or all that came, in order. S
                 stops where names of two sites differ by blanks or case only, or those of a site are no other's

Reveals
-------
coordinator : digest and width of each site's embedding; the label names of each site, unless the study lists them.
site : the same of all sites together.
malicious coordinator, one malicious site : nothing more.

Assumes
-------
Label names are public. ⇒ is a broadcast: sites that were told different names cannot finish the next step. Lies that
are not noticed here: (a), (b), (c), (d), (f) of the coordinator, who may add a name, and (b), (c) of the site, whose
names are what it says.

Cost
----
Per site: 1 message up with its names, 1 down with all.

References
----------
None; lines numbered here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cloister.cells.names import check_vocabularies
from cloister.errors import DataError, ProtocolAbort
from cloister.mpc.net.channel import Channel
from cloister.mpc.net.wire import message
from cloister.study import Party

NAME = "common_labels"


@dataclass(frozen=True, slots=True)
class Params:
    sites: tuple[Party, ...]
    coordinator: Party
    embedding: str = ""  # its name; empty: genes
    labels: tuple[str, ...] = ()  # the study's vocabulary


@dataclass(frozen=True, slots=True)
class Own:
    """What a site has."""

    space: str  # digest of what made the embedding
    columns: int  # of it
    labels: tuple[str, ...]  # in order, each once


@message("L1")
class Brings:  # u → S
    space: str
    columns: int
    labels: tuple[str, ...]


@message("L2")
class Agreed:  # S ⇒ u
    space: str
    columns: int
    labels: tuple[str, ...]


def ideal(params: Params, xs: Mapping[Party, Own]) -> dict[Party, Agreed]:
    first = next(iter(xs.values()))
    names = params.labels or {name for own in xs.values() for name in own.labels}
    return dict.fromkeys((params.coordinator, *xs), Agreed(first.space, first.columns, tuple(sorted(names))))


def roles(params: Params) -> dict[Party, object]:
    return {params.coordinator: coordinator} | dict.fromkeys(params.sites, site)


def cost(params: Params, up: int = 0, down: int = 0) -> dict[Party, tuple[int, int]]:
    """Messages, and bytes for `up` bytes of a site's names and `down` of all, which are not in `Params`."""
    n = len(params.sites)
    return {params.coordinator: (n, n * down)} | dict.fromkeys(params.sites, (1, up))


def check_own(params: Params, own: Own) -> None:
    """Before anything is sent."""
    unknown = sorted(set(own.labels) - set(params.labels)) if params.labels else []
    if unknown:
        raise DataError(
            f"{len(unknown)} label(s) here are not in the study's vocabulary (e.g. '{unknown[0]}'); rename or remove "
            "them, or agree on a longer list of labels"
        )


def check_one_space(params: Params, brought: Mapping[Party, Brings]) -> None:
    """L1: the minority is named."""
    spaces = [(b.space, b.columns) for b in brought.values()]
    common = max(spaces, key=spaces.count)
    others = sorted(u for u, b in brought.items() if (b.space, b.columns) != common)
    if others:
        which = f"'{params.embedding}' of another model or with other columns"
        raise ProtocolAbort(NAME, "L1", "mismatch", f"{', '.join(others)} came with {which} than the others")


def check_agreed(params: Params, agreed: Agreed, own: Own) -> None:
    """L2: my embedding, and a vocabulary in order that has my labels."""
    if (agreed.space, agreed.columns) != (own.space, own.columns):
        raise ProtocolAbort(NAME, "L2", "mismatch", "the coordinator names another embedding than mine")
    names = agreed.labels
    if not set(own.labels) <= set(names) or list(names) != sorted(set(names)) or len(names) < 2:
        raise ProtocolAbort(NAME, "L2", "labels", "the vocabulary lacks a label of this site, or is not in order")
    if params.labels and names != tuple(sorted(params.labels)):
        raise ProtocolAbort(NAME, "L2", "labels", "the vocabulary is not the one that the study lists")


def brings(params: Params, own: Own) -> Brings:
    return Brings(own.space, own.columns, () if params.labels else own.labels)


async def site(ch: Channel, params: Params, own: Own) -> Agreed:
    """Be u."""
    check_own(params, own)
    await ch.send(params.coordinator, brings(params, own))  # L1
    agreed = await ch.recv_broadcast(params.coordinator, Agreed)  # L2
    check_agreed(params, agreed, own)
    return agreed


async def coordinator(ch: Channel, params: Params) -> Agreed:
    """Be S."""
    brought = await ch.gather(params.sites, Brings)  # L1
    check_one_space(params, brought)
    check_vocabularies({u: b.labels for u, b in brought.items()}, NAME, "L1")
    first = next(iter(brought.values()))
    names = tuple(sorted(params.labels or {name for b in brought.values() for name in b.labels}))
    if len(names) < 2:
        raise ProtocolAbort(NAME, "L1", "labels", f"the sites know {len(names)} label(s) together; two are needed")
    agreed = Agreed(first.space, first.columns, names)
    await ch.broadcast(params.sites, agreed)  # L2
    return agreed
