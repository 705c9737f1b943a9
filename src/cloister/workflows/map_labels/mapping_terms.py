"""Terms of a reference mapping: what everyone has to know before queries and references meet.

    T1   u → S     width of u's rows, their number rounded up, and u's label names where no vocabulary is agreed; S
                   stops where names of two sites differ by blanks or case only, or those of a site are no other's
    T2   S → all   widths and rounded numbers of all, and all label names, sorted; u finds its own among them, and what
                   was told enters the keys of T3
    T3   three     unless a bound is agreed: e = max over u of ⌈4 log2 |longest row of u|⌉, opened to all; bound
                   2^{e/4}; u stops if its own longest row is a thousand times shorter: its cells would be at the origin
    T4   three     [Σ true numbers of references < k], opened to all; if so, everybody refuses

Reveals
-------
coordinator : which label names each site has, if no vocabulary is agreed.
everyone : the width, each party's number of rows rounded up, all label names; how far from the origin the farthest row
    of all parties is, to within 19 percent, unless a bound is agreed, and who stopped since all its own are a thousand
    times nearer; that there are at least k references. A malicious party learns no more. Inputs are not verified: a
    site may submit arbitrary references and labels, and many copies of one, which then outweigh others in a vote.
reference site : besides, the querier's number of cells, rounded up, which its budget for the querier is charged with.
any two computing parties : how far each party's farthest row is from the origin, and its true number of rows.

Assumes
-------
At most one party lies, the coordinator included (`verified`, and the channel's transcript for T2). A study that wants
to show less agrees on a vocabulary, a bound and a coarser rounding.

Cost
----
Two messages and a few hundred bytes per party, and some sixty rounds of a few kilobytes among the three.

References
----------
Ours; the papers leave it open.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from cloister.cells.names import check_vocabularies
from cloister.errors import DataError, ParameterError, ProtocolAbort
from cloister.mpc.crypto import gf64
from cloister.mpc.crypto.agreement import Identity
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.crypto.replicated import Ring, Shared, join
from cloister.mpc.net.channel import Channel
from cloister.mpc.net.wire import message
from cloister.mpc.three_party.verified import Verified, XorShares, planes_of, together
from cloister.mpc.three_party.verified_cost import VerifiedCostModel
from cloister.study import Party

NAME = "mapping_terms"
STEPS = 4  # per power of two
REACH = 1000  # largest exponent, in steps
EXPONENT = Ring.holding(2 * REACH + 1)
COUNT = Ring(48)
COUNT_BITS = 40  # of one site's true number of rows
APART = 1000.0  # longest rows of two owners that differ more are not of one embedding


@dataclass(frozen=True, slots=True)
class Params:  # public; hashed into the run id, so a mismatch aborts
    coordinator: Party  # S
    querier: Party
    sites: tuple[Party, ...]
    computing: tuple[Party, ...]
    k: int
    labels: tuple[str, ...] = ()  # the agreed vocabulary
    bound: float = 0.0  # the agreed largest norm
    listeners: tuple[Party, ...] = ()  # hold nothing and compute nothing, but must know the terms

    def __post_init__(self) -> None:
        if len(self.computing) != 3 or len(set(self.computing)) != 3:
            raise ParameterError(f"three different computing parties are needed, found {', '.join(self.computing)}")
        if not self.sites or self.querier in self.sites:
            raise ParameterError("references come from one or more sites, and not from the querier")
        if self.k < 1 or self.bound < 0:
            raise ParameterError(f"expected at least one neighbour and a bound above 0, found {self.k}, {self.bound}")

    @property
    def owners(self) -> tuple[Party, ...]:
        return (self.querier, *self.sites)

    @property
    def members(self) -> tuple[Party, ...]:
        return tuple(dict.fromkeys((self.coordinator, *self.owners, *self.computing, *self.listeners)))


@dataclass(frozen=True, slots=True)
class LocalInput:
    """What one owner brings: private, but for the rounded number, the width and perhaps the names."""

    width: int
    rows: int  # true number
    rounded: int
    norm: float  # of the longest row
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Terms:
    dims: int
    queries: int
    rows: tuple[int, ...]
    labels: tuple[str, ...]
    bound: float


@message("T1")
class Announcement:  # u → S
    width: int
    rows: int
    names: tuple[str, ...]


@message("T2")
class Announced:  # S → u
    widths: dict[Party, int]
    rows: dict[Party, int]
    names: tuple[str, ...]


def ideal(params: Params, inputs: Mapping[Party, LocalInput]) -> dict[Party, Terms]:
    """What a trusted party would hand to each party."""
    widths = {p: h.width for p, h in inputs.items()}
    names = sorted({n for p in params.sites for n in inputs[p].names})
    said = Announced(widths, {p: h.rounded for p, h in inputs.items()}, tuple(names))
    bound = params.bound or bound_of(max(exponent(inputs[p].norm) for p in params.owners))
    return dict.fromkeys(params.members, terms(params, said, bound))


def roles(params: Params) -> dict[Party, object]:
    return {params.coordinator: coordinator} | {
        p: owner if p in params.owners else helper for p in params.members if p != params.coordinator
    }


def cost(params: Params) -> dict[Party, tuple[int, int]]:
    """Messages and payload bytes that each party sends, names not counted."""
    bill = VerifiedCostModel(params.members, params.computing)
    for p in params.owners:
        bill.send(p, 2)
    others = [p for p in params.members if p != params.coordinator]
    bill.send(params.coordinator, 2 * len(params.owners), len(others))
    bill.meet()
    if not params.bound:
        for p in params.owners:
            bill.input(p, 1, EXPONENT)
        left = len(params.owners)
        bill.bits(left, EXPONENT.bits)
        while left > 1:
            bill.less(-(-(left // 2) // 64), EXPONENT.bits, few_rounds=True)
            bill.gate(-(-(left // 2) // 64) * EXPONENT.bits)
            left -= left // 2
        for p in params.members:
            bill.open_to(p, EXPONENT.bits)
    for p in params.sites:
        bill.input(p, 1, COUNT)
    bill.bits(len(params.sites), COUNT.bits)
    bill.check_zero()
    bill.bits(1, COUNT.bits)
    for p in params.members:
        bill.open_to(p, 1)
    return bill.total()


# ---- local steps -----------------------------------------------------------------------------------------------------


def rounded(n: int, step: int = 0) -> int:
    """Round up: to a multiple of `step`, or by default to the next eighth of its power of two, 64 at least."""
    step = step or max(64, 1 << max(0, n.bit_length() - 3))
    return -(-n // step) * step


def exponent(norm: float) -> int:
    """⌈4 log2 norm⌉, so that norm ≤ bound_of(exponent)."""
    if not math.isfinite(norm):
        raise DataError("the embedding has missing or infinite values; fill them or remove these cells")
    e = -REACH if norm <= bound_of(-REACH) else math.ceil(STEPS * math.log2(norm))
    e += norm > bound_of(e)
    if e > REACH:
        raise DataError(f"the embedding has rows longer than {bound_of(REACH):.0e}; scale it down at all sites")
    return e


def bound_of(e: int) -> float:
    return math.pow(2.0, e / STEPS)


def check_scale(norm: float, bound: float) -> None:
    """T3: coordinates are kept to a fraction of the bound; cells far below it would all be at the origin."""
    if 0 < norm * APART < bound:
        why = (
            f"the farthest cell of all sites is at {bound:.1g}, that of this one at {norm:.1g}: not the same embedding"
        )
        raise ProtocolAbort(NAME, "T3", "norms-apart", f"{why}, or a damaged cell; compare how all sites made it")


def unfit(params: Params, said: Announced) -> tuple[str, str] | None:
    """Why what all announced does not go together, if it does not: a code, and a sentence."""
    if len(set(said.widths.values())) > 1:
        widths = ", ".join(f"{p} {w}" for p, w in sorted(said.widths.items()))
        return "widths", f"embeddings have different widths ({widths}); all sites must use the same one: pass use_rep="
    if not (params.labels or said.names):
        return "no-labels", "no site has a label to offer; name the column with label_key="
    return None


def terms(params: Params, said: Announced, bound: float) -> Terms:
    """T2: check what all announced, and order it."""
    if set(said.widths) != set(params.owners) or set(said.rows) != set(params.owners):
        raise ProtocolAbort(NAME, "T2", "roster", "the coordinator names other owners than the study")
    if (wrong := unfit(params, said)) is not None:  # the coordinator would have said so before
        raise ProtocolAbort(NAME, "T2", *wrong)
    labels = params.labels or said.names
    rows = tuple(said.rows[p] for p in params.sites)
    return Terms(said.widths[params.querier], said.rows[params.querier], rows, labels, bound)


# ---- roles -----------------------------------------------------------------------------------------------------------


async def _computed(
    ch: Channel, params: Params, mine: LocalInput | None, entropy: Entropy, identity: Identity
) -> float:
    """T3, T4, at every member; returns the bound."""
    p0, p1, p2 = params.computing
    trio = await Verified.meet(ch.sub("three"), (p0, p1, p2), params.members, entropy=entropy, identity=identity)
    bound = params.bound
    if not bound:
        exponents = [await _scalar(trio, p, exponent(mine.norm) if mine else 0, EXPONENT) for p in params.owners]
        best = await largest(trio, _joined(exponents)) if trio.rank is not None else None
        what = f"how far the farthest cell of all sites is from the origin, to within {2 ** (1 / STEPS) - 1:.0%}"
        turned = await _to_all(trio, params, best, EXPONENT.bits, "T3", what)
        bound = bound_of(turned - (1 << (EXPONENT.bits - 1)))
        if mine is not None:
            check_scale(mine.norm, bound)
    counts = [await _scalar(trio, p, mine.rows if mine else 0, COUNT) for p in params.sites]
    few = await too_few(trio, _joined(counts), params.k) if trio.rank is not None else None
    if await _to_all(trio, params, few, 1, "T4", "whether there are fewer than k references"):
        raise DataError(f"n_neighbors={params.k} is more than all sites have references together; lower it")
    return bound


def _joined(xs: Sequence[Shared | None]) -> Shared:
    return join([x for x in xs if x is not None], axis=0)


async def largest(trio: Verified, x: Shared) -> XorShares:
    """T3: the largest of n signed words, as planes with the highest bit turned over: a tournament under sharing."""
    count, planes = x.ring.bits, await trio.bits(x)
    top = np.zeros(planes.shape, np.uint64)
    top[-1] = ~np.uint64(0)
    words = (planes ^ trio.public(top)).map(lambda w: gf64.to_words(w)[: x.a.size])
    while len(words) > 1:
        h = len(words) // 2
        one, two = (words[cut].map(lambda w: planes_of(w, count)) for cut in (slice(h), slice(h, 2 * h)))
        best = await trio.choose(await trio.less(one, two, few_rounds=True), two, one)
        words = together([best.map(lambda w, h=h: gf64.to_words(w)[:h]), words[2 * h :]])  # type: ignore[misc]
    return words.map(lambda w: planes_of(w, count))


async def too_few(trio: Verified, counts: Shared, k: int) -> XorShares:
    """T4: whether the sum of all counts is below k; each is a number of rows."""
    high = (await trio.bits(counts))[COUNT_BITS:]
    await trio.check_zero(high, "T4", "a site counts its references as no number of rows, or")
    rest = counts.map(lambda w: w.sum(keepdims=True)) - trio.constant(np.array([k]), COUNT)
    return (await trio.bits(rest))[-1:]


async def _scalar(trio: Verified, owner: Party, value: int, ring: Ring) -> Shared | None:
    own = ring.encode(np.array([value])) if trio.ch.me == owner else None
    return await trio.input(owner, own, (1,), ring)


async def _to_all(trio: Verified, params: Params, x: XorShares | None, rows: int, line: str, what: str) -> int:
    mine = None
    for p in params.members:
        planes = await trio.open_to(x, (rows, 1), to=p, protocol=NAME, line=line, what=what)
        mine = planes if p == trio.ch.me else mine
    if mine is None:
        raise ParameterError(f"'{trio.ch.me}' takes no part in this mapping")
    return int(gf64.to_words(mine)[0])


def check_told(said: Announced, me: Party, mine: LocalInput) -> None:
    """T2: the coordinator repeats what this owner announced."""
    repeated = (said.widths.get(me), said.rows.get(me), set(mine.names) <= set(said.names))
    if repeated != (mine.width, mine.rounded, True):
        raise ProtocolAbort(NAME, "T2", "mismatch", "the coordinator repeats another announcement than was sent")


async def owner(ch: Channel, params: Params, mine: LocalInput, *, entropy: Entropy, identity: Identity) -> Terms:
    """Hold queries or references."""
    if mine.rounded < mine.rows or mine.rows < 1:
        raise DataError(f"expected at least one cell and a number rounded up, found {mine.rows} and {mine.rounded}")
    if not params.bound:
        exponent(mine.norm)  # raises before anything is sent
    await ch.send(params.coordinator, Announcement(mine.width, mine.rounded, mine.names))  # T1
    said = await ch.recv_broadcast(params.coordinator, Announced)  # T2
    check_told(said, ch.me, mine)
    terms(params, said, 1.0)
    return terms(params, said, await _computed(ch, params, mine, entropy, identity))


async def coordinator(ch: Channel, params: Params, *, entropy: Entropy, identity: Identity) -> Terms:
    """S's part; it may be one of the three."""
    all_said = await ch.gather(params.owners, Announcement)  # T1
    check_vocabularies({p: all_said[p].names for p in params.sites}, NAME, "T1")
    names = sorted({n for p in params.sites for n in all_said[p].names})
    said = Announced({p: a.width for p, a in all_said.items()}, {p: a.rows for p, a in all_said.items()}, tuple(names))
    if (wrong := unfit(params, said)) is not None:
        raise ProtocolAbort(NAME, "T1", *wrong)
    await ch.broadcast([p for p in params.members if p != ch.me], said)  # T2
    terms(params, said, 1.0)
    return terms(params, said, await _computed(ch, params, None, entropy, identity))


async def helper(ch: Channel, params: Params, *, entropy: Entropy, identity: Identity) -> Terms:
    """Compute without data, or only listen."""
    said = await ch.recv_broadcast(params.coordinator, Announced)  # T2
    return terms(params, said, await _computed(ch, params, None, entropy, identity))
