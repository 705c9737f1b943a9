"""Private slots: clients agree on a seed Ξ and on disjoint row slots through a server that learns neither.

    L1   i → A   n_i                               a fresh Paillier key
    L2   A → i   {j: n_j}
    L3   i → A   H([ξ_i]_j, [N_i]_j for all j)     commitment; ξ_i 256 random bits, N_i rows, [·]_j under n_j
    L4   A → i   {j: commitment of j}
    L5   i → A   [ξ_i]_j, [N_i]_j for all j        checked against L3
    L6   A → i   [Ξ]_i = ⊕_j [ξ_j]_i,  [N]_i = ⊕_j [N_j]_i                                      Algorithm 1, twice
    L7   i → A   N, D, HKDF(Ξ, "confirm")          must be the same at all clients
    L8   A → i   [s_i]_i = ⊕_{j in J} [ξ_j]_i ⊕ ⊕_{j before i} [N_j]_i ⊕ [h + k_i N]_i           Algorithm 2
                                                   J a random non-empty subset, a random order of clients, k_i random,
                                                   h uniform below N and the same for all

Client i then owns places s_i, …, s_i + N_i - 1 (mod N) of a permutation that Ξ gives. Corrected from the paper as
printed: the sum for s_i stops one client short there, so that slots collide; Ξ may be short enough to search.
h and k_i N are ours. Without k_i N the integer s_i tells client i about H and the others' N_j. Without h, H is a sum of
ξ_j that client i knows if J is all clients, itself or all others, and s_i - H mod N is then Σ N_j over those before it.

Reveals
-------
auxiliary : N and D, nothing of Ξ, N_i or s_i. With one client: Ξ, and of EVERY client N_j and its slots, since all ξ_j
    and N_j went to A under that client's key too.
client : Ξ, N, its own start. With m - 1 colluding clients: N_i of the last one, and so its slots.

Assumes
-------
Paillier keys of at least 3072 bits; semi-honest parties; authenticated channels. Nobody drops out: any loss aborts.
Lies that are not noticed: (a), (b), (c), (f) of the auxiliary, slots that collide; (b), (c), (f) of the client.

Cost
----
Per client: 4 messages up, 4 down, 2m encryptions, 3 decryptions. Auxiliary: m encryptions.

References
----------
[MA24] Malpetti, Azzimonti, Global Outlier Detection in a Federated Learning Setting with Isolation Forest, 2024:
Algorithm 1 L1-L6, Algorithm 2 L8. Lines numbered here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from cloister.errors import ParameterError, ProtocolAbort
from cloister.mpc.crypto import paillier
from cloister.mpc.crypto.agreement import bind, hkdf
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.net import wire
from cloister.mpc.net.channel import Channel
from cloister.mpc.net.wire import message
from cloister.study import Party

NAME = "private_slots"
SEED_BITS = 256


@dataclass(frozen=True, slots=True)
class Params:
    sites: tuple[Party, ...]  # the clients
    auxiliary: Party  # A
    key_bits: int = 3072

    def __post_init__(self) -> None:
        if len(set(self.sites)) < 2 or len(set(self.sites)) != len(self.sites) or self.auxiliary in self.sites:
            raise ParameterError(f"private slots need at least two clients, all different; found {len(self.sites)}")


@dataclass(frozen=True, slots=True)
class Slots:
    """What a client takes away."""

    seed: bytes = field(repr=False)
    rows: int  # N
    start: int  # s_i mod N


@dataclass(frozen=True, slots=True)
class Size:
    """What A learns."""

    rows: int
    width: int


@message("L1")
class Key:  # i → A
    n: bytes


@message("L2")
class Keys:  # A → i
    n: dict[Party, bytes]


@message("L3")
class Commitment:  # i → A
    digest: bytes


@message("L4")
class Commitments:  # A → i
    digests: dict[Party, bytes]


@message("L5")
class Encrypted:  # i → A
    seed: dict[Party, bytes]
    rows: dict[Party, bytes]


@message("L6")
class Totals:  # A → i
    seed: bytes
    rows: bytes


@message("L7")
class Agreed:  # i → A
    rows: int
    width: int
    tag: bytes


@message("L8")
class Start:  # A → i
    s: bytes


def ideal(params: Params, xs: Mapping[Party, tuple[int, int]]) -> dict[Party, Size | int]:
    """A learns N and D; of a client's `Slots`, N is fixed and the rest is random, with starts that never overlap."""
    rows = sum(own for own, _ in xs.values())
    return {params.auxiliary: Size(rows, next(width for _, width in xs.values()))} | dict.fromkeys(xs, rows)


def roles(params: Params) -> dict[Party, object]:
    return {params.auxiliary: auxiliary} | dict.fromkeys(params.sites, client)


def cost(params: Params) -> dict[Party, tuple[int, int]]:
    m, n = len(params.sites), params.key_bits // 8
    up = (4, n + 32 + 4 * m * n + 32)
    return {params.auxiliary: (4 * m, m * (m * n + m * 32 + 6 * n))} | dict.fromkeys(params.sites, up)


def commitment(run_id: bytes, i: Party, msg: Encrypted) -> bytes:
    return hashlib.sha256(wire.canonical([run_id, i, msg.seed, msg.rows])).digest()


def _digest_tag(seed: bytes, run_id: bytes) -> bytes:
    return hkdf(seed, bind(NAME, b"confirm", run_id))


def _bytes(x: int) -> bytes:
    return x.to_bytes(-(-x.bit_length() // 8) or 1, "big")


async def client(ch: Channel, params: Params, own: int, width: int, *, entropy: Entropy) -> Slots:
    """Play C_i with N_i = `own` rows of D = `width` columns."""
    A = params.auxiliary
    secret = paillier.generate(params.key_bits)
    await ch.send(A, Key(_bytes(secret.public.n)))  # L1
    roster = (await ch.recv(A, Keys)).n  # L2
    if roster.keys() != set(params.sites) or int.from_bytes(roster[ch.me], "big") != secret.public.n:
        raise ProtocolAbort(NAME, "L2", "roster", "the list of keys is not that of the clients, or mine was changed")
    keys = {j: paillier.PublicKey(int.from_bytes(n, "big")) for j, n in roster.items()}
    if len({k.n for k in keys.values()}) != len(keys):
        raise ProtocolAbort(NAME, "L2", "roster", "the same key stands there twice")
    xi = int.from_bytes(entropy.bytes(SEED_BITS // 8), "big")
    ch.step("encrypting seed and number of rows", protocol=NAME, line="L3")
    msg = Encrypted(
        {j: k.to_bytes(k.encrypt(xi, entropy)) for j, k in keys.items()},
        {j: k.to_bytes(k.encrypt(own, entropy)) for j, k in keys.items()},
    )
    mine = commitment(ch.run_id, ch.me, msg)
    await ch.send(A, Commitment(mine))  # L3
    commitments = (await ch.recv(A, Commitments)).digests  # L4
    if (
        commitments.keys() != set(params.sites)
        or commitments[ch.me] != mine
        or len(set(commitments.values())) != len(commitments)
    ):
        raise ProtocolAbort(NAME, "L4", "commitment", "a commitment is missing, changed or there twice")
    await ch.send(A, msg)  # L5
    totals = await ch.recv(A, Totals)  # L6
    public = secret.public
    total = secret.decrypt(public.from_bytes(totals.seed))
    rows = secret.decrypt(public.from_bytes(totals.rows))
    if not own <= rows < 2**40 or total.bit_length() > SEED_BITS + 16:
        raise ProtocolAbort(NAME, "L6", "malformed", "the sums cannot be those of the clients")
    seed = hkdf(_bytes(total), bind(NAME, b"seed", ch.run_id))
    await ch.send(A, Agreed(rows, width, _digest_tag(seed, ch.run_id)))  # L7
    start = secret.decrypt(public.from_bytes((await ch.recv(A, Start)).s))  # L8
    return Slots(seed, rows, start % rows)


async def auxiliary(ch: Channel, params: Params, *, entropy: Entropy) -> Size:
    """Play A."""
    clients = params.sites
    keys = {j: m.n for j, m in (await ch.gather(clients, Key)).items()}  # L1
    await ch.scatter(clients, Keys(keys))  # L2
    public = {j: paillier.PublicKey(int.from_bytes(n, "big")) for j, n in keys.items()}
    promised = {j: m.digest for j, m in (await ch.gather(clients, Commitment)).items()}  # L3
    await ch.scatter(clients, Commitments(promised))  # L4
    sent = await ch.gather(clients, Encrypted)  # L5
    for j, m in sent.items():
        if m.seed.keys() != set(clients) or m.rows.keys() != set(clients):
            raise ProtocolAbort(NAME, "L5", "malformed", f"'{j}' did not encrypt for everyone")
        if commitment(ch.run_id, j, m) != promised[j]:
            raise ProtocolAbort(NAME, "L5", "commitment", f"'{j}' sent other ciphertexts than it had committed to")
    xi = {(j, i): public[i].from_bytes(sent[j].seed[i]) for j in clients for i in clients}
    count = {(j, i): public[i].from_bytes(sent[j].rows[i]) for j in clients for i in clients}
    await ch.scatter(
        {
            i: Totals(
                k.to_bytes(k.add(xi[j, i] for j in clients)),
                k.to_bytes(k.add(count[j, i] for j in clients)),
            )
            for i, k in public.items()
        }
    )  # L6
    agreed = await ch.gather(clients, Agreed)  # L7
    if len({(m.rows, m.width, m.tag) for m in agreed.values()}) != 1:
        raise ProtocolAbort(NAME, "L7", "mismatch", "the clients do not agree on N, D and Ξ")
    rows, width = agreed[clients[0]].rows, agreed[clients[0]].width
    order = _shuffled(clients, entropy)
    chosen = [j for j in clients if entropy.integer_below(2)] or [clients[entropy.integer_below(len(clients))]]
    starts, h = {}, entropy.integer_below(rows)
    for at, i in enumerate(order):
        k = public[i]
        before = [count[j, i] for j in order[:at]]
        offset = k.encrypt(h + rows * entropy.integer_below(1 << (SEED_BITS + 64)), entropy)  # also fresh randomness
        starts[i] = Start(k.to_bytes(k.add([*(xi[j, i] for j in chosen), *before, offset])))
    await ch.scatter({i: starts[i] for i in clients})  # L8, in an order that says nothing
    return Size(rows, width)


def _shuffled(clients: tuple[Party, ...], entropy: Entropy) -> list[Party]:
    left, order = list(clients), []
    while left:
        order.append(left.pop(entropy.integer_below(len(left))))
    return order
