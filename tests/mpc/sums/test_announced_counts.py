"""Bounded claims: a site that claims too large a share of all cells is named, and the run ends."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cloister.errors import DataError, ParameterError
from cloister.mpc.parties import Party
from cloister.mpc.sums import announced_counts
from cloister.mpc.sums.announced_counts import MOST, STEPS, Params, excessive, fits, least, rounded_up
from cloister.testing import Case, check_lies, check_no_errors, check_view, run_protocol, values

HUB, SITES = Party("hub"), tuple(map(Party, ("a", "b", "c")))
counts = st.integers(0, MOST)


async def site(ch, params, cells, added, total):
    """A caller: announces, adds up (the test gives the total), and goes on if the claims are accepted."""
    sub = ch.sub("claims", params)
    await announced_counts.announce(sub, params, cells)
    await announced_counts.accept(sub, params, total, cells)
    return total


async def coordinator(ch, params, total):
    sub = ch.sub("claims", params)
    announced = await announced_counts.gather(sub, params)
    await announced_counts.judge(sub, params, total, announced)
    return total


CALLER = SimpleNamespace(
    __name__="announced_counts",
    __doc__=announced_counts.__doc__,
    roles=lambda params: {HUB: coordinator} | dict.fromkeys(SITES, site),
)


def case(*announced, added=None, **options):
    """Sites that announce these numbers, and add them, or others."""
    added = announced if added is None else added
    inputs = {u: (n, x, sum(added)) for u, n, x in zip(SITES, announced, added, strict=True)}
    return Case(Params(SITES, HUB, **options), {HUB: (sum(added),)} | inputs)


@given(counts)
def test_rounding_is_up_by_less_than_one_step(n):
    a = rounded_up(n)
    assert n <= a <= n + n / STEPS
    assert rounded_up(a) == a
    assert least(a) <= n


@given(counts.filter(lambda n: n > 0))
def test_the_smallest_count_behind_a_rounded_one(n):
    a = rounded_up(n)
    assert rounded_up(least(a)) == a
    assert rounded_up(least(a) - 1) < a or not a


@given(st.lists(counts, min_size=3, max_size=3), st.floats(0.34, 1.0))
def test_honest_counts_fit_and_an_honest_site_below_the_bound_is_never_named(ns, share):
    total, announced = sum(ns), {u: rounded_up(n) for u, n in zip(SITES, ns, strict=True)}
    assert fits(total, announced)
    above = {u for u, n in zip(SITES, ns, strict=True) if n > share * total}
    assert set(excessive(Params(SITES, HUB, share), total, announced)) <= above


@given(st.lists(st.integers(50, 10**6), min_size=2, max_size=2), st.integers(10, 10**4), st.data())
def test_no_announcement_hides_an_excessive_claim(others, factor, data):
    """The bound of the docstring, for any announcement: the site is named, or the announcement does not fit."""
    claimed = sum(others) * factor  # a share of at least 10/11; well above the bound from 0.916 / 0.084 on
    total = claimed + sum(others)
    announced = {u: rounded_up(n) for u, n in zip(SITES[1:], others, strict=True)}
    announced[SITES[0]] = rounded_up(data.draw(st.integers(0, 2 * claimed)))
    named = excessive(Params(SITES, HUB), total, announced)
    if claimed > 0.916 * total:
        assert SITES[0] in named or not fits(total, announced)
    assert not set(named) & set(SITES[1:])


def test_claims_below_the_bound_pass():
    for one in (case(100, 200, 300), case(1000, 60, 60), case(0, 5, 5), case(5000, 1, 1, max_share=1.0)):
        run = run_protocol(CALLER, one)
        check_no_errors(run)
        assert set(values(run)) == {HUB, *SITES}


def test_a_site_that_claims_too_much_is_named_at_every_party():
    run = run_protocol(CALLER, case(2 * 10**7, 800, 900), timeout=3.0)
    assert not values(run)
    for party in (HUB, *SITES[1:]):
        assert run.errors[party].code == "claims"
        assert "'a' claims more than max_share=0.9" in str(run.errors[party])


def test_a_claim_that_was_not_announced_ends_the_run():
    """It announces little and adds much: there is no telling who it was, but nothing is computed from the sum."""
    run = run_protocol(CALLER, case(500, 800, 900, added=(2 * 10**7, 800, 900)), timeout=3.0)
    assert not values(run)
    assert {run.errors[p].code for p in (HUB, *SITES)} == {"counts"}


def test_less_added_than_announced_ends_the_run():
    run = run_protocol(CALLER, case(500, 800, 900, added=(-400, 800, 900)), timeout=3.0)
    assert not values(run)
    assert {e.code for e in run.errors.values()} == {"counts"}


def test_a_site_that_adds_a_negative_count_cannot_have_an_honest_one_named():
    """It announces 0 and adds -800: the second site's 900 cells are more than 0.9 of the 200 that the sum gives."""
    run = run_protocol(CALLER, case(0, 900, 100, added=(-800, 900, 100)), timeout=3.0)
    assert {run.errors[p].code for p in (HUB, *SITES[1:])} == {"counts"}


def test_an_honest_site_that_a_coordinator_names_says_so():
    async def malicious(ch, params, total):
        sub = ch.sub("claims", params)
        await announced_counts.gather(sub, params)
        await sub.broadcast(SITES, announced_counts.Verdict((SITES[1],), fit=True))

    run = run_protocol(CALLER, case(100, 200, 300), roles={HUB: malicious}, timeout=3.0)
    assert run.errors[SITES[1]].code == "verdict"
    assert not set(SITES) & set(values(run))


def test_other_verdicts_and_announcements_are_malformed():
    async def of_a_stranger(ch, params, total):
        sub = ch.sub("claims", params)
        await announced_counts.gather(sub, params)
        await sub.broadcast(SITES, announced_counts.Verdict((Party("nobody"),), fit=True))

    run = run_protocol(CALLER, case(100, 200, 300), roles={HUB: of_a_stranger}, timeout=3.0)
    assert {run.errors[u].code for u in SITES} == {"malformed"}

    async def exact(ch, params, cells, added, total):
        await ch.sub("claims", params).send(HUB, announced_counts.Count(1001))
        return total

    run = run_protocol(CALLER, case(100, 200, 300), roles={SITES[0]: exact}, timeout=3.0)
    assert run.errors[HUB].code == "malformed"
    assert "'a'" in str(run.errors[HUB])


def test_nothing_but_rounded_counts_leaves_and_no_site_receives_them():
    run = run_protocol(CALLER, case(1001, 2003, 3005))
    opened = {(e.to, e.name) for u in SITES for e, _ in run.receipts[u].entries if e.kind == "opened"}
    assert opened == {(HUB, "my number of cells, rounded up")}
    check_view(CALLER, case(1001, 2003, 3005), case(1002, 2004, 3006))


def test_one_malicious_party():
    one = case(1000, 1100, 1200)

    def right(lie, ended):
        assert set(ended.values()) <= {3300}

    found = check_lies(CALLER, [one], right=right, full=True, only=lambda lie: lie.letter != "j", timeout=1.0)
    assert found.aborted > 5


@pytest.mark.parametrize("share", [0.0, -1.0, 1.1, 0.3])
def test_bounds_that_no_sites_can_keep(share):
    with pytest.raises(ParameterError):
        Params(SITES, HUB, share)


@pytest.mark.parametrize("cells", [-1, MOST + 1])
def test_impossible_counts_are_not_sent(cells):
    run = run_protocol(CALLER, case(cells, 10, 10), timeout=2.0)
    assert isinstance(run.errors[SITES[0]], DataError)
