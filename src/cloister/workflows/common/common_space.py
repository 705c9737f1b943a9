"""Common space: the sites find out whether their embeddings come from one model, before they compare cells in them.

    L1   u → S   digest of what made the embedding: loadings, checkpoint, trained model; empty if nobody wrote it down
    L2   S ⇒ u   the digest of those who answered, more than half

Two embeddings of the same width look alike, and cells of two spaces can be compared without an error, to no purpose.

Reveals
-------
coordinator, site : the digest, which sites of one study share.
malicious coordinator : the same. It can let different spaces pass as one, which gives wrong labels and tells it
    nothing.
one malicious site : the same.

Assumes
-------
The digest is public. A site that wrote down another model's digest beside its embedding is not found out.

Cost
----
Per site: 1 message up, 1 down, of some 64 bytes.

References
----------
None; lines numbered here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cloister.errors import ProtocolAbort
from cloister.mpc.net.channel import Channel
from cloister.mpc.net.wire import message
from cloister.study import Party

NAME = "common_space"


@dataclass(frozen=True, slots=True)
class Params:
    sites: tuple[Party, ...]
    coordinator: Party
    embedding: str  # its name


@message("L1")
class Space:  # u → S
    digest: str


@message("L2")
class Agreed:  # S ⇒ u
    digest: str


def ideal(params: Params, xs: Mapping[Party, str]) -> dict[Party, str]:
    return dict.fromkeys((params.coordinator, *xs), next(iter(xs.values())))


def roles(params: Params) -> dict[Party, object]:
    return {params.coordinator: coordinator} | dict.fromkeys(params.sites, site)


def cost(params: Params, digest: int = 0) -> dict[Party, tuple[int, int]]:
    n = len(params.sites)
    return {params.coordinator: (n, n * digest)} | dict.fromkeys(params.sites, (1, digest))


def check_same(params: Params, spaces: Mapping[Party, str]) -> str:
    """The digest of all; who differs from most is named."""
    digests = list(spaces.values())
    common = max(digests, key=digests.count)
    others = sorted(u for u, digest in spaces.items() if digest != common)
    if others:
        silent = [u for u in others if not spaces[u]]
        how = "does not say what made it" if silent == others else "comes from another model"
        raise ProtocolAbort(
            NAME,
            "L1",
            "other-space",
            f"'{params.embedding}' of {', '.join(others)} {how} than that of the others; embed all cells with the same "
            "loadings or checkpoint",
        )
    return common


async def site(ch: Channel, params: Params, digest: str) -> str:
    await ch.send(params.coordinator, Space(digest))  # L1
    agreed = await ch.recv_broadcast(params.coordinator, Agreed)  # L2
    if agreed.digest != digest:
        raise ProtocolAbort(NAME, "L2", "other-space", f"'{params.embedding}' here comes from another model")
    return digest


async def coordinator(ch: Channel, params: Params) -> str:
    spaces = await ch.gather(params.sites, Space, quorum=len(params.sites) // 2 + 1)  # L1
    digest = check_same(params, {u: s.digest for u, s in spaces.items()})
    await ch.broadcast(spaces, Agreed(digest))  # L2
    return digest
