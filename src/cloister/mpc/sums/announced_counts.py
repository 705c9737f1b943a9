"""Announced counts: no site may claim more than an agreed share of all cells; a site that does is named.

    C1   u → S   a_u            the cells that u will add to the sum, rounded up by at most 1/64; before the sum
         u, S    N = Σ_u n_u    a checked sum of the caller, in which n_u is one word
    C2   S ⇒ u   V, fit         whether the a_u can give N; V = sites with more than max_share · N cells by their a_u,
                                empty if the a_u do not fit
         u       abort if V is not empty (`claims`), or if the announcements do not fit (`counts`)

Means, variances and gradients over all sites follow whichever site claims nearly all of the cells. A claim of 10^9
cells at a value T shows how many cells of the others exceed T. The bound limits the count that a site claims to what
`max_share` allows. It does not limit the other words of the same sum: a site that claims one cell can still add the
sums of 10^9. The caller has to bound what the sums of N cells can be, and a site can use that bound up alone.

Who learns the counts is a choice. To name a site takes a number for each site. If all sites received these, each would
learn the size of every other one, which no sum reveals with three sites or more. The coordinator suffices: it is honest
where a site is malicious, because one party is. A secure test of the sum without u, for each u, would hide the counts
from the coordinator as well. But then a malicious site could have an honest one named, by what it adds to that test.
Announcements are rounded, so that the exact count, which tells runs apart that differ in few cells, is not sent.

Bound. Let v add c_v and announce a_v. The other sites round up, so the announcements fit only if a_v ≥ c_v - R/64, with
R the cells of the others; v is in V if a_v (1 - 1/64) > max_share · N. With the default 0.9, one of the two ends the
run for every c_v above 0.916 N. A site that announces what it adds, and adds at most max_share · N, is never in V. A
site that announces less than it adds ends the run without being named.

Reveals
-------
coordinator : how many cells each site adds, within 1/64.
site : nothing, if no site is above the bound; otherwise which ones are.
malicious coordinator : the same. It can end the run, and name any site by that.
one malicious site : one bit per run about how the others' counts are rounded. The announcements fit depending on
    Σ_u (a_u - n_u), which N does not determine, and a_v and n_v move the threshold. A site that adds a negative count,
    at least -R/64, lowers N, and so has an honest site named that is within 1/64 of max_share.
coordinator with k sites : the same.

Assumes
-------
N comes from a checked sum: with a sum that the coordinator can change, it can hide an excessive claim. The caller runs
C1 before its first sum, and C2 before it adds anything that depends on N.

Cost
----
Per site: 1 message up, 1 down, a few bytes each.

References
----------
None; lines numbered here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cloister.errors import DataError, ParameterError, ProtocolAbort
from cloister.mpc.net.channel import Channel
from cloister.mpc.net.wire import message
from cloister.mpc.parties import Party

NAME = "announced_counts"
STEPS = 64  # of one power of two: a count is rounded up by at most 1/64
MAX_SHARE = 0.9
MOST = 1 << 40  # cells of one site


@dataclass(frozen=True, slots=True)
class Params:
    sites: tuple[Party, ...]
    coordinator: Party
    max_share: float = MAX_SHARE  # of all cells that one site may claim; 1 disables the bound

    def __post_init__(self) -> None:
        if not 0 < self.max_share <= 1:
            raise ParameterError(f"'max_share' must lie between 0 and 1, found {self.max_share}")
        if self.max_share * len(self.sites) < 1:
            raise ParameterError(f"{len(self.sites)} sites cannot all hold at most {self.max_share:g} of the cells")


@message("C1")
class Count:  # u → S
    cells: int  # a_u


@message("C2")
class Verdict:  # S ⇒ u
    excessive: tuple[Party, ...]  # V
    fit: bool  # whether the announced counts fit the total


# ---- local steps -----------------------------------------------------------------------------------------------------


def step_of(n: int) -> int:
    """The distance between two rounded counts near n."""
    return 1 << max(0, n.bit_length() - STEPS.bit_length())


def rounded_up(n: int) -> int:
    """The smallest rounded count of at least n: exact up to 2 · 64, then 64 steps for every power of two."""
    return -(-n // step_of(n)) * step_of(n)


def least(a: int) -> int:
    """The smallest count that is rounded up to a."""
    return max(0, a - step_of(a - 1) + 1) if a else 0


def excessive(params: Params, total: int, announced: Mapping[Party, int]) -> tuple[Party, ...]:
    """V: sites whose count is above max_share · N, however it was rounded."""
    return tuple(u for u in params.sites if least(announced[u]) > params.max_share * total)


def fits(total: int, announced: Mapping[Party, int]) -> bool:
    """Whether these announcements can be of counts that add up to the total."""
    return sum(map(least, announced.values())) <= total <= sum(announced.values())


# ---- roles -----------------------------------------------------------------------------------------------------------


async def announce(ch: Channel, params: Params, cells: int) -> None:
    """C1 of u, before the sum in which it adds `cells`."""
    if not 0 <= cells <= MOST:
        raise DataError(f"a site has between 0 and 2^40 cells, found {cells}")
    opened = ch.reveal(
        rounded_up(cells), to=params.coordinator, line="C1", what="my number of cells, rounded up", protocol=NAME
    )
    await ch.send(params.coordinator, Count(opened))  # C1


async def gather(ch: Channel, params: Params) -> dict[Party, int]:
    """C1 of S: what each site announced."""
    counts = {u: m.cells for u, m in (await ch.gather(params.sites, Count)).items()}  # C1
    for u, a in counts.items():
        if not 0 <= a <= rounded_up(MOST) or rounded_up(a) != a:
            raise ProtocolAbort(NAME, "C1", "malformed", f"'{u}' announced a number of cells that is not rounded")
    return counts


async def accept(ch: Channel, params: Params, total: int, cells: int) -> None:
    """C2 of u, after the sum: `total` is N as the sum gave it."""
    verdict = await ch.recv_broadcast(params.coordinator, Verdict)  # C2
    if ch.me in verdict.excessive and cells <= params.max_share * total:
        raise ProtocolAbort(NAME, "C2", "verdict", "the coordinator counts more cells of this site than it announced")
    raise_if_bad(params, total, verdict)


async def judge(ch: Channel, params: Params, total: int, announced: Mapping[Party, int]) -> None:
    """C2 of S, after the sum."""
    fit = fits(total, announced)  # otherwise N is not the number of cells, and nobody can be named by it
    verdict = Verdict(excessive(params, total, announced) if fit else (), fit)
    await ch.broadcast(params.sites, verdict)  # C2
    raise_if_bad(params, total, verdict)


def raise_if_bad(params: Params, total: int, verdict: Verdict) -> None:
    if not set(verdict.excessive) <= set(params.sites):
        raise ProtocolAbort(NAME, "C2", "malformed", "a verdict about a party that is not a site")
    if verdict.excessive:
        who = ", ".join(f"'{u}'" for u in verdict.excessive)
        why = f"{who} claims more than max_share={params.max_share:g} of the {total} cells of all sites"
        raise ProtocolAbort(NAME, "C2", "claims", f"{why}; agree on a larger max_share if that is right")
    if not verdict.fit:
        why = f"the announced numbers of cells do not fit the {total} cells of the sum"
        raise ProtocolAbort(NAME, "C2", "counts", f"{why}: a site added another number than it announced")
