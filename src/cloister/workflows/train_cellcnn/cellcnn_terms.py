"""CellCnn terms: the sites learn that they measured the same markers, and which classes there are.

    L1   u → S   marker names, class names
    L2   S → u   markers in common, all classes in order

Reveals
-------
coordinator : the names of every site's markers and classes.
site : the markers in common and all classes.

Assumes
-------
Names are public; no value is sent. A marker that one site lacks ends the run, as does a single class.

Cost
----
Per site: 1 message up, 1 down.

References
----------
None; lines numbered here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from cloister.cells import genes
from cloister.errors import DataError, ProtocolAbort
from cloister.mpc.net.channel import Channel
from cloister.mpc.net.wire import message
from cloister.study import Party

NAME = "cellcnn_terms"


@dataclass(frozen=True, slots=True)
class Params:
    sites: tuple[Party, ...]
    coordinator: Party


@message("L1")
class Names:  # u → S
    markers: tuple[str, ...]
    classes: tuple[str, ...]


@message("L2")
class Agreed:  # S → u
    markers: tuple[str, ...]
    classes: tuple[str, ...]


class Terms(NamedTuple):
    markers: tuple[str, ...]
    classes: tuple[str, ...]


def ideal(params: Params, xs: Mapping[Party, tuple[list[str], list[str]]]) -> dict[Party, Terms]:
    terms = combine({u: Names(tuple(m), tuple(c)) for u, (m, c) in xs.items()})
    return dict.fromkeys((params.coordinator, *params.sites), terms)


def roles(params: Params) -> dict[Party, object]:
    return {params.coordinator: coordinator} | dict.fromkeys(params.sites, site)


def cost(params: Params, names: int = 0) -> dict[Party, tuple[int, int]]:
    n = len(params.sites)
    return {params.coordinator: (n, n * names)} | dict.fromkeys(params.sites, (1, names))


def combine(names: Mapping[Party, Names]) -> Terms:
    """Raise unless all sites have the same markers, and there are two classes."""
    common = tuple(genes.genes_in_common({u: list(m.markers) for u, m in names.items()}))
    for u, m in names.items():
        extra = sorted({genes.plain_name(x) for x in m.markers} - set(common))
        if extra:
            lacking = sorted(v for v, o in names.items() if extra[0] not in {genes.plain_name(x) for x in o.markers})
            raise ProtocolAbort(
                NAME,
                "L1",
                "marker-missing",
                f"'{u}' has the marker '{extra[0]}', which {', '.join(lacking)} lack(s); drop or rename it everywhere",
            )
    classes = tuple(sorted({c for m in names.values() for c in m.classes}))
    if len(classes) < 2:
        raise ProtocolAbort(NAME, "L1", "one-class", f"all donors of all sites are '{classes[0]}'; two classes needed")
    return Terms(common, classes)


async def site(ch: Channel, params: Params, markers: list[str], classes: list[str]) -> Terms:
    if not markers or not classes:
        raise DataError("CellCnn needs at least one marker and one class at every site")
    await ch.send(params.coordinator, Names(tuple(markers), tuple(classes)))  # L1
    agreed = await ch.recv(params.coordinator, Agreed)  # L2
    if not set(classes) <= set(agreed.classes):
        raise ProtocolAbort(NAME, "L2", "classes", "a class of this site is missing from the agreed ones")
    return Terms(agreed.markers, agreed.classes)


async def coordinator(ch: Channel, params: Params) -> Terms:
    terms = combine(await ch.gather(params.sites, Names))  # L1
    await ch.scatter(params.sites, Agreed(terms.markers, terms.classes))  # L2
    return terms
