"""Secure sum with dropout: the aggregator learns the sum of the vectors of those who stayed, and no single one.

    L1   u → S   c_pk_u, s_pk_u, σ_u       two fresh X25519 keys; σ_u signs (run, c_pk_u, s_pk_u)
    L2   S ⇒ u   {v: keys of v}            U1 = who answered, |U1| ≥ t; every signature and key is checked
    L3   u → S   {v: e_uv}                 e_uv = AE(KA(c_sk_u, c_pk_v); share_v(s_sk_u) ‖ share_v(b_u)), b_u fresh
    L4   S → u   {v: e_vu}                 U2 = who answered, |U2| ≥ t
    L5   u → S   y_u = x_u + PRG(b_u) + Σ_{v<u} PRG(s_uv) - Σ_{v>u} PRG(s_uv)    mod 2^64
                                           v in U2, s_uv = KA(s_sk_u, s_pk_v)
    L6   S ⇒ u   U3                        who answered, |U3| ≥ t
    L7   u → S   σ'_u                      signs (run, U3): what u was told about the survivors
    L8   S ⇒ u   {v: σ'_v}                 at least t of them, all on the same U3: no split view
    L9   u → S   shares of b_v for v in U3, shares of s_sk_v for v in U2 ∖ U3; once, never both for one v
    L10  S       z = Σ_{u in U3} y_u - Σ_{u in U3} PRG(b_u) ± the pairwise masks that the dropped ones left over;
                 all shares that came must lie on one polynomial
    L11  S ⇒ u   z                         only if `to_all`

With `wide`, the last two words, high and low, are one number modulo 2^128, in every addition above.

⇒ is a broadcast: it enters the transcript, and with it the ids of all later sums of the run. So the survivors of
one sum, and their signatures, are compared by the next. A party that is given the survivors of an earlier sum (`among`)
continues with these alone, so the set can only shrink.

Reveals
-------
aggregator : z, the sum over the survivors, and who they are.
contributor : who takes part and who survived; z if `to_all` (with two contributors: the other's input, by subtraction).
malicious aggregator : the same, over survivors that it chose: at least t, and the same for all of them. It may call a
    contributor dropped that is there; if those inputs were summed before, the difference is that contributor's input.
one malicious contributor : nothing more. It adds any vector: inflated, negated or zero. It may drop out. It cannot have
    another one left out: a contributor that cannot open what it received at L4 ends the sum for all.
aggregator with k contributors : the sum over the other survivors, at least t - k, as long as t > (n + k)/2. With a
    smaller t, contributors that vouch twice at L7 get it two answers, and so single inputs. The default, the smallest
    t > n/2, is for k = 0; `colluders` of the study raises it for all sums, `threshold` for one. With t = n no dropout
    is tolerated, and only the sum of all opens.

Assumes
-------
Contributors know each other's Ed25519 keys (`[keys]` of the study). At least two contributors; with two, see above.
Not detected here, with `to_all`: (a), (b), (c), (f) of the aggregator in `check_lies`, which amount to another z.
A contributor that receives another z than the others notices at the next step of the run, whose id depends on it, or
in `same_view` at its end. Another z for all is noticed with `checked_sum` only.

Cost
----
Per contributor: 5 messages up, 4 down (5 if `to_all`); up 8m + 160(n - 1) + 66n + 192 bytes and framing; 2(n - 1) key
agreements, n expansions of m words. Aggregator: n expansions, and n - d more for each of d dropped.

References
----------
[BIK+17] Bonawitz et al., CCS 2017, fig. 4: AdvertiseKeys L1-2, ShareKeys L3-4, MaskedInputCollection L5-6,
ConsistencyCheck L7-8, Unmasking L9-10; lines numbered here. Security argument: docs/security/secure_sum.md.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from cloister.arrays import U64
from cloister.errors import CloisterError, ParameterError, ProtocolAbort
from cloister.mpc.crypto import shamir
from cloister.mpc.crypto.agreement import Identity, KeyPair, agree, key_pair, seal, unseal
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.crypto.prg import expand
from cloister.mpc.net import wire
from cloister.mpc.net.channel import Channel
from cloister.mpc.net.wire import message
from cloister.mpc.parties import Agreement, Party
from cloister.mpc.sums.retry_without_dropouts import still_there
from cloister.mpc.sums.signatures import check_signed

NAME = "secure_sum"
SHARE = 66  # bytes of one Shamir share
SEALED = 2 * SHARE + 28  # bytes of two shares with nonce and tag


@dataclass(frozen=True, slots=True)
class Params:  # public; hashed into the run id, so a mismatch aborts
    contributors: tuple[Party, ...]  # U
    aggregator: Party  # S
    length: int  # m, words per vector
    threshold: int = 0  # t survivors suffice; 0 means the smallest majority
    to_all: bool = False  # whether the contributors learn z too

    def __post_init__(self) -> None:
        n = len(self.contributors)
        if n < 2 or len(set(self.contributors)) != n or self.aggregator in self.contributors:
            raise ParameterError(f"a secure sum needs at least two contributors, all different; found {n}")
        if self.threshold and not n // 2 < self.threshold <= n:
            raise ParameterError(f"the threshold must be more than half of {n} contributors, found {self.threshold}")
        if self.length < 1:
            raise ParameterError(f"a secure sum needs at least one word per vector, found {self.length}")

    @property
    def t(self) -> int:
        return self.threshold or len(self.contributors) // 2 + 1

    @property
    def colluders(self) -> int:
        """k: contributors that may help a malicious aggregator, and it still gets one answer only; t > (n + k)/2."""
        return 2 * self.t - len(self.contributors) - 1

    def raised(self, agreement: Agreement) -> Params:
        """With the threshold that as many colluders need as were agreed on, if that is larger."""
        return replace(self, threshold=max(self.t, agreement.quorum(len(self.contributors))))

    def point(self, u: Party) -> int:
        return self.contributors.index(u) + 1


@dataclass(frozen=True, slots=True)
class Sum:
    z: U64  # (m,)
    survivors: tuple[Party, ...]  # U3


@message("L1")
class Keys:  # u → S
    c_pk: bytes
    s_pk: bytes
    signature: bytes


@message("L2")
class Roster:  # S → u
    keys: dict[Party, Keys]


@message("L3")
class Shares:  # u → S
    sealed: dict[Party, bytes]


@message("L4")
class SharesFor:  # S → u
    sealed: dict[Party, bytes]


@message("L5")
class MaskedInput:  # u → S
    y: U64  # (m,)


@message("L6")
class Survivors:  # S → u
    parties: tuple[Party, ...]


@message("L7")
class Vouch:  # u → S
    signature: bytes


@message("L8")
class Vouches:  # S → u
    signatures: dict[Party, bytes]


@message("L9")
class Unmask:  # u → S
    seed_shares: dict[Party, bytes]  # of b_v, v in U3
    key_shares: dict[Party, bytes]  # of s_sk_v, v in U2 ∖ U3


@message("L11")
class Total:  # S → u
    z: U64  # (m,)


def ideal(params: Params, xs: Mapping[Party, U64]) -> dict[Party, U64 | None]:
    """What a trusted party would hand to each party, with `xs` the inputs of those who stay."""
    z: U64 = np.sum(np.stack(list(xs.values())), axis=0, dtype=np.uint64)
    given: dict[Party, U64 | None] = {params.aggregator: z}
    return given | dict.fromkeys(xs, z if params.to_all else None)


def roles(params: Params) -> dict[Party, object]:
    return {params.aggregator: aggregator} | dict.fromkeys(params.contributors, contributor)


def cost(params: Params) -> dict[Party, tuple[int, int]]:
    """Messages and payload bytes that each party sends when nobody drops."""
    n, m = len(params.contributors), params.length
    up = (5, 2 * 32 + 64 + SEALED * (n - 1) + 8 * m + 64 + SHARE * n)
    down = n * (n * 128 + SEALED * (n - 1) + n * 64 + (8 * m if params.to_all else 0))
    return {params.aggregator: ((4 + params.to_all) * n, down)} | dict.fromkeys(params.contributors, up)


# ---- local steps -----------------------------------------------------------------------------------------------------


def signed_keys(run_id: bytes, u: Party, c_pk: bytes, s_pk: bytes) -> bytes:
    return wire.canonical([run_id, u, c_pk, s_pk])


def signed_survivors(run_id: bytes, survivors: Iterable[Party]) -> bytes:
    return wire.canonical([run_id, sorted(survivors)])


def check_roster(
    params: Params, ch: Channel, roster: Mapping[Party, Keys], mine: Keys, among: Collection[Party]
) -> None:
    """L2: at least t, known and not dropped before, all signed by their owners, all different, mine unchanged."""
    if not set(roster) <= set(params.contributors) or len(roster) < params.t:
        raise ProtocolAbort(NAME, "L2", "roster", f"{len(roster)} contributors on the list, {params.t} needed")
    if not set(roster) <= set(among):
        raise ProtocolAbort(NAME, "L2", "roster", "a contributor that dropped out of an earlier sum is on the list")
    me = roster.get(ch.me)
    if me is None or (me.c_pk, me.s_pk) != (mine.c_pk, mine.s_pk):
        raise ProtocolAbort(NAME, "L2", "roster", "my own keys came back changed")
    publics = [pk for k in roster.values() for pk in (k.c_pk, k.s_pk)]
    if len(set(publics)) != len(publics):
        raise ProtocolAbort(NAME, "L2", "roster", "the same key stands there twice")
    for v, keys in roster.items():
        data = signed_keys(ch.run_id, v, keys.c_pk, keys.s_pk)
        check_signed(ch, v, f"{NAME}/keys", data, keys.signature, protocol=NAME, line="L2", mine=mine.signature)


def check_survivors(params: Params, me: Party, survivors: tuple[Party, ...], shared: Iterable[Party]) -> None:
    """L6: survivors are those who shared keys, enough of them, each once, me among them."""
    if not set(survivors) <= set(shared) or len(set(survivors)) != len(survivors):
        raise ProtocolAbort(NAME, "L6", "survivors", "the list names a party that did not share its keys, or one twice")
    if len(survivors) < params.t or me not in survivors:
        raise ProtocolAbort(
            NAME, "L6", "survivors", f"{len(survivors)} survivors, {params.t} needed, and I must be one of them"
        )


def pair_context(run_id: bytes, purpose: str) -> bytes:
    return wire.canonical([NAME, purpose, run_id])


def direction(run_id: bytes, u: Party, v: Party) -> bytes:
    """Binds a box of u to v."""
    return wire.canonical([run_id, u, v])


def open_shares(ch: Channel, v: Party, key: bytes, box: bytes) -> tuple[bytes, bytes]:
    """L4: my shares of v's key and of its seed."""
    try:
        opened = unseal(key, box, direction(ch.run_id, v, ch.me))
    except CloisterError:
        raise ProtocolAbort(NAME, "L4", "shares", f"the shares of '{v}' were altered on the way") from None
    return opened[:SHARE], opened[SHARE:]


def add(y: U64, x: U64, *, wide: bool) -> None:
    """Y + x in place; uint64 wraps."""
    y += x
    if wide:
        y[-2:-1] += (y[-1:] < x[-1:]).astype(np.uint64)  # carry


def subtract(y: U64, x: U64, *, wide: bool) -> None:
    """Y - x in place."""
    if wide:
        y[-2:-1] -= (y[-1:] < x[-1:]).astype(np.uint64)  # borrow
    y -= x


def add_pads(y: U64, u: Party, seeds: Mapping[Party, bytes], *, wide: bool) -> None:
    """Add to y the pads that u shares with each v: + where v < u, - where v > u; in place."""
    for v, s_uv in seeds.items():
        (add if v < u else subtract)(y, expand(s_uv, len(y)), wide=wide)


# ---- roles -----------------------------------------------------------------------------------------------------------


async def contributor(
    ch: Channel,
    params: Params,
    x: U64,
    among: tuple[Party, ...] = (),
    *,
    entropy: Entropy,
    identity: Identity,
    wide: bool = False,
) -> Sum | None:
    """Play u. Returns z and the survivors if `to_all`, else nothing."""
    survivors = await contribute(ch, params, x, among, entropy=entropy, identity=identity, wide=wide)
    if not params.to_all:
        return None
    total = await ch.recv_broadcast(params.aggregator, Total, z=(params.length,))  # L11
    return Sum(total.z, survivors)


async def contribute(
    ch: Channel,
    params: Params,
    x: U64,
    among: tuple[Party, ...] = (),
    *,
    entropy: Entropy,
    identity: Identity,
    wide: bool = False,
) -> tuple[Party, ...]:
    """L1 to L9 of u. Returns the survivors, as t of them vouched for them; all are `among` those of an earlier sum."""
    if x.shape != (params.length,) or x.dtype != np.uint64:
        raise ParameterError(f"expected {params.length} words of uint64, found {x.dtype} of shape {x.shape}")
    ch.claim(NAME)
    params, S = params.raised(ch.agreement), params.aggregator
    c, s = key_pair(entropy), key_pair(entropy)
    signature = identity.sign(f"{NAME}/keys", signed_keys(ch.run_id, ch.me, c.public, s.public))
    keys = Keys(c.public, s.public, signature)
    await ch.send(S, keys)  # L1
    roster = (await ch.recv_broadcast(S, Roster)).keys  # L2
    check_roster(params, ch, roster, keys, among or params.contributors)

    others = [v for v in sorted(roster) if v != ch.me]
    boxes = {v: agree(c, roster[v].c_pk, pair_context(ch.run_id, "box")) for v in others}
    b = entropy.bytes(32)
    points = [params.point(v) for v in sorted(roster)]
    key_shares = shamir.share(s.private, params.t, points, entropy)
    seed_shares = shamir.share(b, params.t, points, entropy)

    halves = {v: (key_shares[params.point(v)], seed_shares[params.point(v)]) for v in roster}
    sealed = {v: seal(boxes[v], b"".join(halves[v]), direction(ch.run_id, ch.me, v), entropy) for v in others}
    await ch.send(S, Shares(sealed))  # L3
    received = (await ch.recv(S, SharesFor)).sealed  # L4
    if not set(received) <= set(others) or len(received) + 1 < params.t:
        raise ProtocolAbort(NAME, "L4", "shares", f"shares of {len(received) + 1} contributors, {params.t} needed")
    held = {ch.me: halves[ch.me]} | {v: open_shares(ch, v, boxes[v], box) for v, box in received.items()}

    y = x.copy()
    add(y, expand(b, params.length), wide=wide)
    pads = {v: agree(s, roster[v].s_pk, pair_context(ch.run_id, "pad")) for v in received}
    add_pads(y, ch.me, pads, wide=wide)
    await ch.send(S, MaskedInput(y))  # L5

    survivors = (await ch.recv_broadcast(S, Survivors)).parties  # L6
    check_survivors(params, ch.me, survivors, held)
    told = signed_survivors(ch.run_id, survivors)
    mine = identity.sign(f"{NAME}/survivors", told)
    await ch.send(S, Vouch(mine))  # L7
    vouches = (await ch.recv_broadcast(S, Vouches)).signatures  # L8
    if not set(vouches) <= set(survivors) or len(vouches) < params.t:
        raise ProtocolAbort(NAME, "L8", "split-view", f"{len(vouches)} vouch for the survivors, {params.t} needed")
    for v, signature in vouches.items():
        check_signed(ch, v, f"{NAME}/survivors", told, signature, protocol=NAME, line="L8", mine=mine)
    dropped = held.keys() - set(survivors)
    await ch.send(S, Unmask({v: held[v][1] for v in survivors}, {v: held[v][0] for v in dropped}))  # L9
    return survivors


async def aggregator(ch: Channel, params: Params, among: tuple[Party, ...] = (), *, wide: bool = False) -> Sum:
    """Play S. Contributors that drop out or stay silent are left out, as long as t remain."""
    params = params.raised(ch.agreement)
    t = params.t
    keys = await ch.gather(among or params.contributors, Keys, quorum=t)  # L1
    await ch.broadcast(keys, Roster(keys))  # L2, to U1
    shares = await ch.gather(keys, Shares, quorum=t)  # L3
    U2 = list(shares)
    for v in U2:
        if set(shares[v].sealed) != set(keys) - {v}:
            raise ProtocolAbort(NAME, "L3", "shares", f"'{v}' did not share with everyone on the list")
    await ch.scatter({u: SharesFor({v: shares[v].sealed[u] for v in U2 if v != u}) for u in U2})  # L4
    masked = await ch.gather(U2, MaskedInput, quorum=t, y=(params.length,))  # L5
    still_there(ch, U2)
    U3 = tuple(masked)
    await ch.broadcast(U3, Survivors(U3))  # L6
    vouches = await ch.gather(U3, Vouch, quorum=t)  # L7
    await ch.broadcast(vouches, Vouches({v: m.signature for v, m in vouches.items()}))  # L8
    answers = await ch.gather(vouches, Unmask, quorum=t)  # L9

    z = np.zeros(params.length, dtype=np.uint64)
    for m in masked.values():  # L10
        add(z, m.y, wide=wide)
    for v in U3:
        subtract(z, expand(_combine(params, answers, v, "seed_shares"), params.length), wide=wide)
    for v in set(U2) - set(U3):
        s_v = KeyPair(_combine(params, answers, v, "key_shares"))
        if s_v.public != keys[v].s_pk:
            raise ProtocolAbort(NAME, "L10", "shares", f"the shares of '{v}' do not give its key")
        pads = {u: agree(s_v, keys[u].s_pk, pair_context(ch.run_id, "pad")) for u in U3}
        add_pads(z, v, pads, wide=wide)  # the pads v would have added cancel those it left in the others' inputs
    to = (ch.me, *U3) if params.to_all else ch.me
    z = ch.reveal(z, to=to, line="L10", what=f"sum of {len(U3)} vectors of {params.length}", protocol=NAME)
    if params.to_all:
        await ch.broadcast(answers, Total(z))  # L11
    return Sum(z, U3)


def _combine(params: Params, answers: Mapping[Party, Unmask], v: Party, field: str) -> bytes:
    shares = {params.point(u): getattr(m, field)[v] for u, m in answers.items() if v in getattr(m, field)}
    if len(shares) < params.t:
        raise ProtocolAbort(NAME, "L9", "shares", f"{len(shares)} shares for '{v}', {params.t} needed")
    try:
        return shamir.combine(shares, params.t, 32)
    except ProtocolAbort as e:
        raise ProtocolAbort(NAME, "L10", "shares", f"the shares for '{v}' do not belong together: {e}") from None
