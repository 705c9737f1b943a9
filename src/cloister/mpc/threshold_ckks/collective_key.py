"""Collective public key: everyone can encrypt, and only all holders together can decrypt.

    L1  i → S   b_i = -a·s_i + e_i      s_i ternary, stays here; a public, expanded from the run id
    L2  S → i   b = Σ b_i               so that b + a·Σ s_i = Σ e_i is small
        i       `collective_audit` of b: nobody uses a key that is not the sum of all shares

Reveals
-------
aggregator, holder : the public key (b, a). The secret Σ s_i exists nowhere; n - 1 holders and the aggregator together
    see the last one's b_i, which is a ring-LWE sample.

Assumes
-------
The aggregator may lie; it is caught before the key is used (`collective_audit`). A holder that sends another share than
b_i has the key that this share belongs to, or makes all that is encrypted unreadable. Ring-LWE at the parameters of
`ckks.Parameters`. The run id mixes nonces of all parties, so nobody chooses a.

Cost
----
Per holder: 1 message up, 1 down, one polynomial over the data primes each, and one audit.

References
----------
[MTBH21] Mouchet et al., PETS 2021, protocol 1 (EncKeyGen); lines numbered here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cloister.arrays import U64
from cloister.errors import ProtocolAbort, WireError
from cloister.mpc.crypto.ckks import scheme as ckks
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.net.channel import Channel
from cloister.mpc.net.wire import message
from cloister.mpc.parties import Party
from cloister.mpc.threshold_ckks import collective_audit
from cloister.mpc.threshold_ckks.collective_audit import AuditLog, Collective

NAME = "collective_key"


@dataclass(frozen=True, slots=True)
class Params(Collective):
    pass


@message("L1")
class KeyShare:  # i → S
    b: bytes


@message("L2")
class Key:  # S → i
    b: bytes


def ideal(params: Params, secrets: Mapping[Party, ckks.Secret]) -> dict[Party, U64]:
    """The sum of the secrets, in NTT form: (b, a) is right if b + a·s is small."""
    c = ckks.context(params.ckks)
    total = c.ring.zeros(params.ckks.top)
    for s in secrets.values():
        c.ring.add(total, s.ntt)
    return dict.fromkeys((*params.holders, params.aggregator), total)


def roles(params: Params) -> dict[Party, object]:
    return {params.aggregator: aggregator} | dict.fromkeys(params.holders, holder)


def cost(params: Params) -> dict[Party, tuple[int, int]]:
    one = ckks.context(params.ckks).packed(params.ckks.top)
    n = len(params.holders)
    sent = {params.aggregator: (n, n * one)} | dict.fromkeys(params.holders, (1, one))
    return added(sent, collective_audit.cost(params.audit, params.ckks.top))


def added(*costs: Mapping[Party, tuple[int, int]]) -> dict[Party, tuple[int, int]]:
    """Messages and payload of several parts together."""
    return {p: (sum(c.get(p, (0, 0))[0] for c in costs), sum(c.get(p, (0, 0))[1] for c in costs)) for p in costs[0]}


def read(c: ckks.Context, data: bytes, k: int, protocol: str, line: str, sender: Party) -> U64:
    """Residues from the wire; whatever is wrong with them aborts by name."""
    try:
        return c.unpack(data, k)
    except WireError as e:
        raise ProtocolAbort(protocol, line, "malformed", f"from '{sender}': {e}") from None


async def holder(ch: Channel, params: Params, secret: ckks.Secret, *, entropy: Entropy) -> ckks.PublicKey:
    c = ckks.context(params.ckks)
    k = params.ckks.top
    a = ckks.common(params.ckks, ch.run_id, "public", k)
    b_i = c.ring.add_product(c.ring.error(entropy.prg(), k), a, secret.ntt, sign=-1)
    await ch.send(params.aggregator, KeyShare(c.pack(b_i)))  # L1
    packed = (await ch.recv(params.aggregator, Key)).b  # L2
    b, book = read(c, packed, k, NAME, "L2", params.aggregator), AuditLog()
    book.sent(b_i)
    book.heard(packed)
    book.total(b)
    await collective_audit.holder(ch.sub("audit"), params.audit, book, entropy=entropy)
    return ckks.PublicKey(b, a)


async def aggregator(ch: Channel, params: Params) -> ckks.PublicKey:
    c = ckks.context(params.ckks)
    k = params.ckks.top
    b = c.ring.zeros(k)
    for i, share in (await ch.gather(params.holders, KeyShare)).items():  # L1
        c.ring.add(b, read(c, share.b, k, NAME, "L1", i))
    await ch.scatter(params.holders, Key(c.pack(b)))  # L2
    return ckks.PublicKey(b, ckks.common(params.ckks, ch.run_id, "public", k))
