"""Common genes: the sites learn which genes all of them measured, and that their values are of one kind.

    L1   u → S   kind of values, gene names
    L2   S ⇒ u   the kind, genes in common   of those who answered, more than half; a tenth of the shortest list or more

At L2 there must be 200 genes or more where a site has 400.

Reveals
-------
coordinator : which genes each site measured, how it names them, and whether it holds counts, log or scaled values.
site : the genes in common, and the kind of values, which is its own.
malicious coordinator, one malicious site : nothing more.

Assumes
-------
Gene names and the kind of values are public. Nothing here is hidden, and no value is sent. ⇒ is a broadcast: sites that
were told different genes cannot finish the next step. Lies that are not noticed here: (a), (b), (c), (d) of the
coordinator, who may leave out a gene or a site, and (b) of the site, whose genes are what it says.

Cost
----
Per site: 1 message up with the names, 1 down with those in common.

References
----------
None; lines numbered here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from cloister.cells import genes
from cloister.errors import DataError, ProtocolAbort, blame
from cloister.mpc.net.channel import Channel
from cloister.mpc.net.wire import message
from cloister.study import Party

NAME = "common_genes"


@dataclass(frozen=True, slots=True)
class Params:
    sites: tuple[Party, ...]
    coordinator: Party


@message("L1")
class Measured:  # u → S
    kind: str  # "counts" | "log" | "scaled"
    names: bytes  # gene names, one a line


@message("L2")
class Common:  # S → u
    kind: str
    names: bytes


class Agreed(NamedTuple):
    kind: str
    names: tuple[str, ...]


def ideal(params: Params, xs: Mapping[Party, tuple[str, list[str]]]) -> dict[Party, Agreed]:
    names = tuple(genes.genes_in_common({u: names for u, (_, names) in xs.items()}))
    return dict.fromkeys((params.coordinator, *xs), Agreed(next(kind for kind, _ in xs.values()), names))


def roles(params: Params) -> dict[Party, object]:
    return {params.coordinator: coordinator} | dict.fromkeys(params.sites, site)


def cost(params: Params, up: int = 0, down: int = 0) -> dict[Party, tuple[int, int]]:
    """Messages, and bytes for `up` bytes of a site's names and `down` of those in common, which are not in `Params`."""
    n = len(params.sites)
    return {params.coordinator: (n, n * down)} | dict.fromkeys(params.sites, (1, up))


def join(names: list[str] | tuple[str, ...]) -> bytes:
    return "\n".join(names).encode()


def split(names: bytes, line: str) -> list[str]:
    try:
        return names.decode().split("\n") if names else []
    except UnicodeDecodeError:
        raise ProtocolAbort(NAME, line, "malformed", "gene names that are not text") from None


async def site(ch: Channel, params: Params, kind: str, names: list[str]) -> Agreed:
    if any("\n" in name for name in names):
        raise DataError("a gene name contains a line break; rename it before the run")
    await ch.send(params.coordinator, Measured(kind, join(names)))  # L1
    common = await ch.recv_broadcast(params.coordinator, Common)  # L2
    if common.kind != kind:
        raise ProtocolAbort(NAME, "L2", "mixed-values", "the coordinator names another kind of values than mine")
    agreed = Agreed(common.kind, tuple(split(common.names, "L2")))
    check_common(agreed.names, names)
    return agreed


def check_common(common: tuple[str, ...], mine: list[str]) -> None:
    """L2: some of my genes, each once."""
    known = {genes.plain_name(name) for name in mine}
    if not common or len(set(common)) != len(common) or not set(common) <= known:
        raise ProtocolAbort(NAME, "L2", "genes", "genes in common that this site does not have, or one of them twice")


async def coordinator(ch: Channel, params: Params) -> Agreed:
    measured = await ch.gather(params.sites, Measured, quorum=len(params.sites) // 2 + 1)  # L1
    kinds = {u: m.kind for u, m in measured.items()}
    if len(set(kinds.values())) > 1:
        found = ", ".join(f"{u}: {kind}" for u, kind in kinds.items())
        raise ProtocolAbort(NAME, "L1", "mixed-values", f"all sites must hold the same kind of values, found {found}")
    try:
        common = tuple(genes.genes_in_common({u: split(m.names, "L1") for u, m in measured.items()}))
    except genes.FewGenes as e:
        few = ProtocolAbort(NAME, "L1", "few-common-genes", str(e))
        blame(few, e.site, few.code)
        raise few from None
    except DataError as e:
        raise ProtocolAbort(NAME, "L1", "no-common-genes", str(e)) from None
    (kind,) = set(kinds.values())
    await ch.broadcast(measured, Common(kind, join(common)))  # L2
    return Agreed(kind, common)
