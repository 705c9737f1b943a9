"""Common seed: the sites agree on 32 secret bytes, and each two of them on a key, that the coordinator does not learn.

    L1   u → S   pk_u, σ_u              a fresh X25519 key; σ_u signs (run, pk_u)
    L2   S ⇒ u   {v: keys of v}         who answered, at least t; every signature and key is checked
    L3   u → S   {v: e_uv}              e_uv = AE(KA(sk_u, pk_v); a_u), a_u 32 fresh bytes
    L4   S → u   {v: e_vu}              V = who answered, at least t
    L5   u       Ξ = HKDF(a_v for v in V, in order of names)
         u → S   h_u = HKDF(Ξ, "confirm"), σ'_u signs (run, u, h_u)
    L6   S ⇒ u   {v: h_v, σ'_v}         at least t of them, all the same, every signature checked
    L7   u       k_uv = KA(sk_u, pk_v)  for each v in V; its context differs from that of L3

Reveals
-------
coordinator : who takes part. Together with one site: Ξ.
site : Ξ, k_uv for each other site v, and who takes part. Ξ is uniform as long as one site in V draws its part honestly.
    Of the keys of two other sites it learns nothing.
malicious coordinator : nothing more. It may leave sites out, as long as t remain; two sites that finish hold the same
    Ξ.
one malicious site : nothing more. It may choose its part after it has seen those of the others, and so some bits of Ξ.
    It cannot have another left out: a site that cannot open what it received at L4 has not dropped out, and ends the
    step for all.

Assumes
-------
Sites know each other's Ed25519 keys (`[keys]` of the study). Sites that stop are left out, as long as t remain: a
majority, and more if the study names `colluders`. With `everyone`, t is the number of sites, and a site that stops ends
the step by name. ⇒ is a broadcast: who confirmed is compared by the next step of the run, whose id depends on it.

Cost
----
Per site: 3 messages up, 3 down; up 96 + 60(n - 1) + 96 bytes and framing; n - 1 key agreements, 2n signatures checked.

References
----------
The paper of S4 agrees on Ξ with Paillier ciphertexts (its Algorithm 1); this is the same agreement with authenticated
key exchange, without a second server. Lines numbered here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cloister.errors import CloisterError, ParameterError, ProtocolAbort
from cloister.mpc.crypto.agreement import Identity, agree, bind, hkdf, key_pair, seal, unseal
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.net import wire
from cloister.mpc.net.channel import Channel
from cloister.mpc.net.wire import message
from cloister.mpc.parties import Party
from cloister.mpc.sums.retry_without_dropouts import still_there
from cloister.mpc.sums.signatures import check_signed

NAME = "common_seed"
BOX = 32 + 28  # bytes of one sealed part


@dataclass(frozen=True, slots=True)
class Params:
    sites: tuple[Party, ...]
    coordinator: Party
    everyone: bool = False  # whether a site that stops ends the step; otherwise a majority goes on

    def __post_init__(self) -> None:
        if len(set(self.sites)) < 2 or len(set(self.sites)) != len(self.sites) or self.coordinator in self.sites:
            raise ParameterError(f"a common seed needs at least two sites, all different; found {len(self.sites)}")


@dataclass(frozen=True, slots=True)
class Seed:
    """What a site holds after the agreement: for all masks and keys of one attempt, and no longer."""

    secret: bytes = field(repr=False)  # Ξ
    present: tuple[Party, ...]  # who confirmed it
    pairs: Mapping[Party, bytes] = field(repr=False)  # k_uv: known to this site and v alone


@message("L1")
class Key:  # u → S
    pk: bytes
    signature: bytes


@message("L2")
class Roster:  # S → u
    keys: dict[Party, Key]


@message("L3")
class Parts:  # u → S
    sealed: dict[Party, bytes]


@message("L4")
class PartsFor:  # S → u
    sealed: dict[Party, bytes]


@message("L5")
class Confirm:  # u → S
    tag: bytes
    signature: bytes


@message("L6")
class Confirms:  # S → u
    confirms: dict[Party, Confirm]


def quorum(ch: Channel, params: Params) -> int:
    return len(params.sites) if params.everyone else ch.agreement.quorum(len(params.sites))


def ideal(params: Params, xs: Mapping[Party, None]) -> dict[Party, str | None]:
    """One secret for all sites; nothing for the coordinator."""
    return dict.fromkeys(params.sites, "the same 32 bytes") | {params.coordinator: None}


def roles(params: Params) -> dict[Party, object]:
    return {params.coordinator: coordinator} | dict.fromkeys(params.sites, site)


def cost(params: Params) -> dict[Party, tuple[int, int]]:
    n = len(params.sites)
    up = (3, 96 + BOX * (n - 1) + 96)
    return {params.coordinator: (3 * n, n * (96 * n + BOX * (n - 1) + 96 * n))} | dict.fromkeys(params.sites, up)


def check_roster(params: Params, ch: Channel, roster: Mapping[Party, Key], mine: bytes) -> None:
    t = quorum(ch, params)
    if not set(roster) <= set(params.sites) or len(roster) < t:
        raise ProtocolAbort(NAME, "L2", "roster", f"{len(roster)} sites on the list, {t} needed")
    if ch.me not in roster or roster[ch.me].pk != mine:
        raise ProtocolAbort(NAME, "L2", "roster", "my own key came back changed")
    if len({k.pk for k in roster.values()}) != len(roster):
        raise ProtocolAbort(NAME, "L2", "roster", "the same key stands there twice")
    for v, key in roster.items():
        check_signed(ch, v, NAME, wire.canonical([ch.run_id, v, key.pk]), key.signature, protocol=NAME, line="L2")


def signed_tag(run_id: bytes, u: Party, tag: bytes) -> bytes:
    return wire.canonical([run_id, u, tag])


def check_confirms(params: Params, ch: Channel, confirms: Mapping[Party, Confirm], mine: Confirm) -> None:
    """L6: at least t, me among them, all with my tag, and each signed by the site itself."""
    tags = {c.tag for c in confirms.values()}
    if len(confirms) < quorum(ch, params) or ch.me not in confirms or tags != {mine.tag}:
        raise ProtocolAbort(NAME, "L6", "split-view", "the sites received different lists, and hold different seeds")
    for v, confirm in confirms.items():
        data = signed_tag(ch.run_id, v, confirm.tag)
        check_signed(ch, v, f"{NAME}/confirm", data, confirm.signature, protocol=NAME, line="L6")


async def site(ch: Channel, params: Params, *, entropy: Entropy, identity: Identity) -> Seed:
    S, t = params.coordinator, quorum(ch, params)
    keys = key_pair(entropy)
    await ch.send(S, Key(keys.public, identity.sign(NAME, wire.canonical([ch.run_id, ch.me, keys.public]))))  # L1
    roster = (await ch.recv_broadcast(S, Roster)).keys  # L2
    check_roster(params, ch, roster, keys.public)
    others = [v for v in sorted(roster) if v != ch.me]
    boxes = {v: agree(keys, roster[v].pk, wire.canonical([NAME, ch.run_id])) for v in others}
    mine = entropy.bytes(32)
    sealed = {v: seal(boxes[v], mine, wire.canonical([ch.run_id, ch.me, v]), entropy) for v in others}
    await ch.send(S, Parts(sealed))  # L3
    received = (await ch.recv(S, PartsFor)).sealed  # L4
    if not set(received) <= set(others) or len(received) + 1 < t:
        raise ProtocolAbort(NAME, "L4", "parts", f"parts of {len(received) + 1} sites, {t} needed")
    parts = {ch.me: mine}
    for v, box in received.items():
        try:
            parts[v] = unseal(boxes[v], box, wire.canonical([ch.run_id, v, ch.me]))
        except CloisterError:
            raise ProtocolAbort(NAME, "L4", "parts", f"the part of '{v}' was altered on the way") from None
        if len(parts[v]) != 32:
            raise ProtocolAbort(NAME, "L4", "parts", f"the part of '{v}' does not have 32 bytes")
    secret = hkdf(
        b"".join(parts[v] for v in sorted(parts)), bind(NAME, ch.run_id, *(v.encode() for v in sorted(parts)))
    )
    tag = hkdf(secret, bind(NAME, b"confirm", ch.run_id))
    confirm = Confirm(tag, identity.sign(f"{NAME}/confirm", signed_tag(ch.run_id, ch.me, tag)))
    await ch.send(S, confirm)  # L5
    confirms = (await ch.recv_broadcast(S, Confirms)).confirms  # L6
    if not set(confirms) <= set(parts):
        raise ProtocolAbort(NAME, "L6", "split-view", "a site confirms that has no part in the seed")
    check_confirms(params, ch, confirms, confirm)
    context = wire.canonical([NAME, "pair", ch.run_id])
    pairs = {v: agree(keys, roster[v].pk, context) for v in others if v in confirms}  # L7
    return Seed(secret, tuple(v for v in params.sites if v in confirms), pairs)


async def coordinator(ch: Channel, params: Params) -> tuple[Party, ...]:
    t = None if params.everyone else quorum(ch, params)
    keys = await ch.gather(params.sites, Key, quorum=t)  # L1
    await ch.broadcast(keys, Roster(keys))  # L2
    parts = await ch.gather(keys, Parts, quorum=t)  # L3
    for v, m in parts.items():
        if set(m.sealed) != set(keys) - {v}:
            raise ProtocolAbort(NAME, "L3", "parts", f"'{v}' did not share with everyone on the list")
    await ch.scatter({u: PartsFor({v: parts[v].sealed[u] for v in parts if v != u}) for u in parts})  # L4
    confirms = await ch.gather(parts, Confirm, quorum=t)  # L5
    still_there(ch, parts)
    await ch.broadcast(confirms, Confirms(confirms))  # L6
    return tuple(confirms)
