"""Point roster: who takes part, how many points of which width everyone holds, and the class names, sealed.

    L1   u → S   n_u, d_u, box_u = AE(k; class names of u)    k from the sites' common seed, which S does not know
    L2   S ⇒ u   {v: n_v, d_v, box_v}                         who answered, at least two; told to all alike
    L3   u       the classes: all names, in order, unless two differ by blanks or case only, or a site's are no other's

Reveals
-------
server : how many points each site holds and how wide they are; the length of its list of class names to the next 1024
    bytes. Together with one site: the names.
site : the same of the others, and which class names each of them brings. No names if they were agreed beforehand.

Assumes
-------
A common seed (`common_seed`). One party may lie: names are sealed, L2 is a broadcast that binds what follows, and what
a site says of its points is its word.

Cost
----
Per site: 1 message up, 1 down; 24 bytes and its sealed names up, everyone's down.

References
----------
[SYL24] line 1 of Algorithm 1; the names are ours to find, since the paper takes the classes as known. Lines numbered
here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from cloister.cells.names import check_vocabularies
from cloister.errors import CloisterError, DataError, ParameterError, ProtocolAbort
from cloister.mpc.crypto.agreement import bind, hkdf, seal, unseal
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.net.channel import Channel
from cloister.mpc.net.wire import message
from cloister.study import Party

NAME = "point_roster"
PAD = 1024
MAX_NAMES = 1 << 20  # bytes of one site's class names


@dataclass(frozen=True, slots=True)
class Params:
    sites: tuple[Party, ...]
    server: Party
    classes: tuple[str, ...] = ()  # agreed beforehand; empty: found together

    def __post_init__(self) -> None:
        if len(self.sites) < 2 or len(set(self.sites)) != len(self.sites) or self.server in self.sites:
            raise ParameterError(f"at least two sites are needed, all different; found {len(self.sites)}")
        if len(set(self.classes)) != len(self.classes) or len(self.classes) == 1:
            raise ParameterError("'classes' must name at least two different classes, or none to find them together")


@dataclass(frozen=True, slots=True)
class Roster:
    sites: tuple[Party, ...]
    sizes: tuple[int, ...]
    classes: tuple[str, ...]  # empty at the server
    width: int = 0  # numbers a point

    def size(self, u: Party) -> int:
        if u not in self.sites:
            raise ProtocolAbort(NAME, "L2", "roster", f"'{u}' takes part, and is not on the list")
        return self.sizes[self.sites.index(u)]


@message("L1")
class Points:  # u → S
    count: int
    width: int
    names: bytes  # sealed


@message("L2")
class AllPoints:  # S → u
    points: dict[Party, Points]


def ideal(params: Params, xs: Mapping[Party, tuple[int, int, tuple[str, ...], bytes]]) -> dict[Party, Roster]:
    sizes = tuple(xs[u][0] for u in params.sites)
    names = params.classes or tuple(sorted({name for x in xs.values() for name in x[2]}))
    width = xs[params.sites[0]][1]
    return dict.fromkeys(params.sites, Roster(params.sites, sizes, names, width)) | {
        params.server: Roster(params.sites, sizes, (), width)
    }


def roles(params: Params) -> dict[Party, object]:
    return {params.server: server} | dict.fromkeys(params.sites, site)


def cost(params: Params) -> dict[Party, tuple[int, int]]:
    """With names below 1024 bytes."""
    m, box = len(params.sites), PAD + 28
    return {params.server: (m, m * m * box)} | dict.fromkeys(params.sites, (1, box))


def pack_names(names: Iterable[str]) -> bytes:
    raw = json.dumps(sorted(set(names)), ensure_ascii=False).encode()
    if len(raw) > MAX_NAMES:
        raise DataError(f"the class names take {len(raw)} bytes, more than {MAX_NAMES}; is this a column of labels?")
    return raw + b" " * (-len(raw) % PAD)


def unpack_names(raw: bytes, v: Party) -> list[str]:
    try:
        names = json.loads(raw)
    except ValueError:
        names = None
    if not isinstance(names, list) or not all(isinstance(n, str) for n in names):
        raise ProtocolAbort(NAME, "L2", "malformed", f"'{v}' sent no list of names")
    return names


def check_widths(points: Mapping[Party, Points]) -> None:
    widths = {v: p.width for v, p in points.items()}
    if len(set(widths.values())) > 1:
        said = ", ".join(f"{w} at '{v}'" for v, w in widths.items())
        raise ProtocolAbort(
            NAME, "L2", "width", f"rows must be equally wide at all sites, found {said}; use one representation for all"
        )
    if any(p.count < 1 or p.width < 1 for p in points.values()):
        raise ProtocolAbort(NAME, "L2", "malformed", "a site without points or with empty rows")


async def site(
    ch: Channel, params: Params, count: int, width: int, names: tuple[str, ...], seed: bytes, *, entropy: Entropy
) -> Roster:
    if params.classes and (strange := sorted(set(names) - set(params.classes))):
        raise DataError(f"the label {strange[0]!r} is not among the agreed classes; add it, or remove these labels")
    key = hkdf(seed, bind(NAME, ch.run_id))

    def owner(v: Party) -> bytes:
        return bind(NAME, ch.run_id, v.encode())

    box = seal(key, pack_names(() if params.classes else names), owner(ch.me), entropy)
    await ch.send(params.server, Points(count, width, box))  # L1
    points = {Party(v): p for v, p in (await ch.recv_broadcast(params.server, AllPoints)).points.items()}  # L2
    if ch.me not in points or not set(points) <= set(params.sites) or len(points) < 2 or points[ch.me].count != count:
        raise ProtocolAbort(NAME, "L2", "roster", f"{len(points)} sites on the list, which must be two or more, and me")
    check_widths(points)
    every: dict[str, list[str]] = {}
    for v, p in points.items():
        try:
            raw = unseal(key, p.names, owner(v))
        except CloisterError:
            raise ProtocolAbort(NAME, "L2", "names", f"the names of '{v}' were altered on the way") from None
        every[v] = unpack_names(raw, v)
    check_vocabularies(every, NAME, "L3")
    all_names = {name for names in every.values() for name in names}
    if not params.classes and len(all_names) < 2:  # L3
        code, said = ("no-labels", "no site has a label") if not all_names else ("one-class", "all labels are the same")
        raise ProtocolAbort(
            NAME, "L3", code, f"{said}, so there is nothing to distinguish; bring labels of two classes"
        )
    sites = tuple(v for v in params.sites if v in points)
    return Roster(sites, tuple(points[v].count for v in sites), params.classes or tuple(sorted(all_names)), width)


async def server(ch: Channel, params: Params) -> Roster:
    here = tuple(u for u in params.sites if not ch.lost(u))
    points = await ch.gather(here, Points, quorum=2)  # L1
    await ch.broadcast(points, AllPoints(points))  # L2
    check_widths(points)
    width = next(iter(points.values())).width
    return Roster(tuple(points), tuple(p.count for p in points.values()), (), width)
