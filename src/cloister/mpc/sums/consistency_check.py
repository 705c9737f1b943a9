"""Consistency check: before a result counts, the sites verify that all of them received the same broadcasts.

Its name on the wire, in receipts and in `cloister explain` is `same_view`.

    V1   u → S   σ_u        signs the id of this step, which hashes every broadcast that u received in the run
    V2   S → u   {v: σ_v}   at least t of them, mine among them; every one has to fit my own id

Earlier differences stop an earlier step, whose keys and boxes are bound to ids of the same kind. This step is for the
last broadcast of a protocol, the total of its last sum included: nothing else follows that would compare it.

Reveals
-------
coordinator, site : which sites have not dropped out.
malicious coordinator, one malicious site : nothing more. Two sites that finish have received the same broadcasts. The
    coordinator can make any site abort.

Assumes
-------
Sites know each other's Ed25519 keys (`[keys]` of the study). t > n/2, as in the secure sum.

Cost
----
Per site: 1 message up, 1 down; 64 bytes up, 64 n down, and framing.

References
----------
None; lines numbered here. Security argument: docs/security/secure_sum.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cloister.errors import ProtocolAbort
from cloister.mpc.crypto.agreement import Identity
from cloister.mpc.net.channel import Channel
from cloister.mpc.net.wire import message
from cloister.mpc.parties import Party
from cloister.mpc.sums.signatures import check_signed

PROTOCOL = "same_view"

NAME = "same_view"


@dataclass(frozen=True, slots=True)
class Params:
    sites: tuple[Party, ...]
    coordinator: Party


@message("V1")
class Signature:  # u → S
    signature: bytes


@message("V2")
class Signatures:  # S → u
    signatures: dict[Party, bytes]


def ideal(params: Params, xs: Mapping[Party, None]) -> dict[Party, None]:
    """Nothing is computed."""
    return dict.fromkeys((params.coordinator, *params.sites))


def roles(params: Params) -> dict[Party, object]:
    return {params.coordinator: coordinator} | dict.fromkeys(params.sites, site)


def cost(params: Params) -> dict[Party, tuple[int, int]]:
    n = len(params.sites)
    return {params.coordinator: (n, 64 * n * n)} | dict.fromkeys(params.sites, (1, 64))


async def site(ch: Channel, params: Params, *, identity: Identity) -> None:
    step = ch.sub("same-view")
    mine = identity.sign(NAME, step.run_id)
    await step.send(params.coordinator, Signature(mine))  # V1
    signatures = (await step.recv(params.coordinator, Signatures)).signatures  # V2
    t = ch.agreement.quorum(len(params.sites))
    if not set(signatures) <= set(params.sites) or len(signatures) < t or ch.me not in signatures:
        raise ProtocolAbort(NAME, "V2", "split-view", f"{len(signatures)} sites signed, {t} needed, and mine")
    for v, signature in signatures.items():
        check_signed(step, v, NAME, step.run_id, signature, protocol=NAME, line="V2", mine=mine)


async def coordinator(ch: Channel, params: Params) -> tuple[Party, ...]:
    """Play S. Returns who is still there; sites that stopped after their last sum are left out."""
    step = ch.sub("same-view")
    there = [u for u in params.sites if not ch.lost(u)]
    signatures = await step.gather(there, Signature, quorum=ch.agreement.quorum(len(params.sites)))  # V1
    await step.scatter(signatures, Signatures({v: m.signature for v, m in signatures.items()}))  # V2
    return tuple(signatures)
