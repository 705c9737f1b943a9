"""Secure row sums: each site learns the sum of everybody's matrices at its own rows, and the server learns nothing.

    L1   u → S   pk_u, σ_u                    a fresh X25519 key, signed with the run and the attempt
    L2   S ⇒ u   {v: pk_v, σ_v}               P = who answered
    L3   u       Z̃_u = Z_u + Σ_{v<u} PRG(s_uv) - Σ_{v>u} PRG(s_uv)   mod 2^64, v in P, s_uv = KA(sk_u, pk_v)
         u → S   Z̃_u[R_v] for every v in P, v ≠ u
    L4   S → u   Ẑ[R_u] = Σ_{v≠u} Z̃_v[R_u]   if all of P answered; else again from L1 without those missing,
                                              at most once per site
    L5   u       Z[R_u] = Ẑ[R_u] + Z̃_u[R_u]

The paper lets a client send all rows but its own. After a restart that would open the rows of a client that left:
nobody keeps back its part of them, the masks cancel, and the server reads the sum. So only rows of P are sent.

Reveals
-------
server : who takes part. With k of the sites: the sums at their rows, and so the sum of the others' at those.
site : Z[R_u]. If only two take part: the other's Z at its rows, by subtraction.
malicious server : the same. It may leave sites out; P then only shrinks, and no site sends rows of its own.
one malicious site : Z[R_u] of every attempt that reaches L4, of which there is one.

Assumes
-------
Sites know each other's Ed25519 keys. A restart draws new keys, so that what was sent before is under masks that are
never used again; Z_u itself must be the same in every attempt. Lies that are not noticed: (a), (b), (c), (f) of the
server, and (b), (c), (f) of the site, sums that are not the sums.

Cost
----
Per site and attempt: 2 messages up, 2 down; up 8 C (n - n_u) + 96 bytes and framing; |P| - 1 key agreements and
expansions of n C words.

References
----------
[SYL24] section 3.2, SecureRowSums; restart: section 3.3, Robustness. [BIK+17] the masks. Lines numbered here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np

from cloister.arrays import U64
from cloister.errors import ParameterError, PeerLost, ProtocolAbort
from cloister.mpc.crypto.agreement import Identity, agree, key_pair
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.crypto.prg import expand
from cloister.mpc.net import wire
from cloister.mpc.net.channel import Channel
from cloister.mpc.net.wire import message
from cloister.mpc.sums.signatures import check_signed
from cloister.study import Party

NAME = "row_sums"


@dataclass(frozen=True, slots=True)
class Params:
    sites: tuple[Party, ...]
    sizes: tuple[int, ...]  # rows of each, in this order
    server: Party
    width: int  # C, words per row

    def __post_init__(self) -> None:
        if len(self.sites) < 2 or len(set(self.sites)) != len(self.sites) or self.server in self.sites:
            raise ParameterError(f"row sums need at least two sites, all different; found {len(self.sites)}")
        if len(self.sizes) != len(self.sites) or min(self.sizes) < 1 or self.width < 1:
            raise ParameterError("row sums need at least one row per site and one column")

    @property
    def n(self) -> int:
        return sum(self.sizes)

    def rows(self, u: Party) -> slice:
        i = self.sites.index(u)
        return slice(sum(self.sizes[:i]), sum(self.sizes[: i + 1]))

    def size(self, u: Party) -> int:
        return self.sizes[self.sites.index(u)]


@message("L1")
class Key:  # u → S
    pk: bytes
    signature: bytes


@message("L2")
class Keys:  # S → u
    keys: dict[Party, Key]


@message("L3")
class MaskedRows:  # u → S
    rows: U64  # (Σ_{v in P, v ≠ u} n_v, C)


@message("L4")
class Sums:  # S → u
    rows: U64 | None  # (n_u, C); None: once more


def ideal(params: Params, xs: Mapping[Party, U64]) -> dict[Party, U64 | None]:
    """Every site that stays gets its rows of the sum over those who stay."""
    total: U64 = np.sum(np.stack(list(xs.values())), axis=0, dtype=np.uint64)
    given: dict[Party, U64 | None] = {params.server: None}
    return given | {u: total[params.rows(u)] for u in xs}


def roles(params: Params) -> dict[Party, object]:
    return {params.server: server} | dict.fromkeys(params.sites, site)


def cost(params: Params) -> dict[Party, tuple[int, int]]:
    """Messages and payload bytes that each party sends when nobody drops."""
    m, word = len(params.sites), 8 * params.width
    up = {u: (2, 96 + word * (params.n - params.size(u))) for u in params.sites}
    return {params.server: (2 * m, m * m * 96 + word * params.n)} | up


# ---- local steps -----------------------------------------------------------------------------------------------------


def signed(run_id: bytes, u: Party, pk: bytes) -> bytes:
    return wire.canonical([run_id, u, pk])


def check_keys(
    params: Params, ch: Channel, keys: Mapping[Party, Key], mine: bytes, before: Collection[Party] | None
) -> None:
    """L2: known, all signed by their owners, all different, mine unchanged, somebody besides me; fewer each time."""
    if before is not None and not set(keys) < set(before):
        raise ProtocolAbort(
            NAME, "L2", "restart", "restarted with parties other than the remaining ones, or without a dropout"
        )
    if not set(keys) <= set(params.sites) or len(keys) < 2 or ch.me not in keys or keys[ch.me].pk != mine:
        raise ProtocolAbort(NAME, "L2", "roster", f"{len(keys)} sites on the list, which must be two or more, and me")
    if len({k.pk for k in keys.values()}) != len(keys):
        raise ProtocolAbort(NAME, "L2", "roster", "the same key stands there twice")
    for v, key in keys.items():
        check_signed(ch, v, NAME, signed(ch.run_id, v, key.pk), key.signature, protocol=NAME, line="L2")


def mask(u: Party, z: U64, seeds: Mapping[Party, bytes]) -> U64:
    """L3: + where v < u, - where v > u; uint64 wraps."""
    out = z.copy()
    for v, s_uv in seeds.items():
        pad = expand(s_uv, z.size).reshape(z.shape)
        out = out + pad if v < u else out - pad
    return out


# ---- roles -----------------------------------------------------------------------------------------------------------


async def site(ch: Channel, params: Params, z: U64, *, entropy: Entropy, identity: Identity) -> U64:
    if z.shape != (params.n, params.width) or z.dtype != np.uint64:
        raise ParameterError(f"expected uint64 of shape {(params.n, params.width)}, found {z.dtype} of {z.shape}")
    S, before = params.server, None
    for attempt in range(len(params.sites)):
        turn = ch.sub(f"attempt-{attempt}")
        own = key_pair(entropy)
        await turn.send(S, Key(own.public, identity.sign(NAME, signed(turn.run_id, ch.me, own.public))))  # L1
        keys = (await turn.recv_broadcast(S, Keys)).keys  # L2
        check_keys(params, turn, keys, own.public, before)
        others = [v for v in params.sites if v in keys and v != ch.me]
        context = wire.canonical([NAME, turn.run_id, sorted(keys)])
        z_masked = mask(ch.me, z, {v: agree(own, keys[v].pk, context) for v in others})
        await turn.send(S, MaskedRows(np.concatenate([z_masked[params.rows(v)] for v in others])))  # L3
        sums = (await turn.recv(S, Sums, rows=(params.size(ch.me), params.width))).rows  # L4
        if sums is not None:
            return sums + z_masked[params.rows(ch.me)]  # L5
        before = set(keys)
    raise ProtocolAbort(NAME, "L4", "restart", "more restarts than there are sites")


async def server(ch: Channel, params: Params) -> tuple[Party, ...]:
    """Play S. Returns who took part to the end."""
    sites = params.sites
    for attempt in range(len(params.sites)):
        turn = ch.sub(f"attempt-{attempt}")
        sites = tuple(u for u in sites if not ch.lost(u))
        if len(sites) < 2:
            raise PeerLost(NAME, "L1", "too-few", f"{len(sites)} sites are left, 2 are needed. Start a new run.")
        keys = await turn.gather(sites, Key, quorum=2)  # L1
        await turn.broadcast(keys, Keys(keys))  # L2
        masked = await turn.gather(keys, MaskedRows, quorum=2, rows=(None, params.width))  # L3
        sites = tuple(masked)
        if len(masked) < len(keys):
            await turn.scatter(sites, Sums(None))  # L4, again
            continue
        totals = {u: np.zeros((params.size(u), params.width), np.uint64) for u in sites}
        for v, m in masked.items():
            others = [u for u in params.sites if u in keys and u != v]
            due = sum(map(params.size, others))
            if len(m.rows) != due:
                raise ProtocolAbort(NAME, "L3", "malformed", f"'{v}' sent {len(m.rows)} rows, {due} were due")
            at = 0
            for u in others:
                totals[u] += m.rows[at : at + params.size(u)]
                at += params.size(u)
        for u in sites:
            ch.record_opening(to=u, line="L4", what=f"sum of {len(sites)} sites at its own rows", protocol=NAME)
        await turn.scatter({u: Sums(totals[u]) for u in sites})  # L4
        return sites
    raise ProtocolAbort(NAME, "L4", "restart", "more restarts than there are sites")
