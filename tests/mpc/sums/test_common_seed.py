from pathlib import Path

import pytest

from cloister.errors import ParameterError
from cloister.mpc.parties import Party
from cloister.mpc.sums import common_seed
from cloister.rehearsal.rehearsal import Fault
from cloister.testing import (
    Case,
    check_abort,
    check_cost,
    check_no_errors,
    check_vectors,
    check_view,
    run_protocol,
    values,
)

HUB = Party("hub")
VECTORS = Path(__file__).parents[2] / "vectors" / "common_seed.json"


def case(n=3):
    names = tuple(Party(f"site-{i}") for i in range(n))
    return Case(common_seed.Params(names, HUB), {})


def check_same(c, run):
    found = [v for p, v in values(run).items() if p != HUB]
    assert len(found) > len(c.params.sites) // 2
    assert len({v.secret for v in found}) == 1
    assert set(values(run)[HUB]) >= {p for p in values(run) if p != HUB}


@pytest.mark.parametrize("n", [2, 3, 6])
def test_ideal_one_fresh_secret_for_all_sites_and_none_for_the_coordinator(n):
    secrets = []
    for _ in range(2):
        run = run_protocol(common_seed, case(n))
        check_no_errors(run)
        check_same(case(n), run)
        secrets.append(values(run)[Party("site-0")].secret)
    assert len(secrets[0]) == 32
    assert secrets[0] != secrets[1]
    assert secrets[0].hex() not in repr(values(run)[Party("site-0")])


def test_vectors():
    check_vectors(common_seed, case(), VECTORS)


def test_view_and_cost():
    check_view(common_seed, case(), case())
    check_cost(common_seed, case(4))


@pytest.mark.parametrize(
    "kind", ["truncate", *(pytest.param(k, marks=pytest.mark.slow) for k in ("drop", "duplicate", "swap", "kill"))]
)
def test_abort_or_survive(kind):
    c = case()
    names = ("Key", "Parts", "Confirm"), ("Roster", "PartsFor", "Confirms")
    messages = [("site-1", "hub", f"common_seed.{n}") for n in names[0]]
    messages += [("hub", "site-1", f"common_seed.{n}") for n in names[1]]
    assert check_abort(common_seed, c, survived=lambda run: check_same(c, run), kinds=[kind], messages=messages) == 6


def test_a_site_that_dies_is_left_out():
    run = run_protocol(common_seed, case(5), faults=[Fault("kill", "site-3", "hub", "Parts")], timeout=2.0)
    check_no_errors(run)
    assert Party("site-3") not in values(run)[Party("site-0")].present
    check_same(case(5), run)


async def splits_the_list(ch, params):
    """Tells one site that another shared nothing, so that they would hold different seeds."""
    keys = await ch.gather(params.sites, common_seed.Key)
    await ch.broadcast(keys, common_seed.Roster(keys))
    parts = await ch.gather(params.sites, common_seed.Parts)
    first = params.sites[0]
    others = {u: {v: parts[v].sealed[u] for v in parts if v != u} for u in parts}
    others[first].pop(params.sites[-1])
    await ch.scatter({u: common_seed.PartsFor(m) for u, m in others.items()})
    confirms = await ch.gather(params.sites, common_seed.Confirm)
    await ch.broadcast(confirms, common_seed.Confirms(confirms))


async def swaps_a_key(ch, params):
    from cloister.mpc.crypto.agreement import key_pair
    from cloister.mpc.crypto.entropy import Entropy

    keys = await ch.gather(params.sites, common_seed.Key)
    first = params.sites[0]
    mine = common_seed.Key(key_pair(Entropy()).public, keys[first].signature)
    await ch.scatter(keys, common_seed.Roster({**keys, first: mine}))
    await ch.gather(params.sites, common_seed.Parts)


def test_a_lying_coordinator_is_caught():
    run = run_protocol(common_seed, case(), roles={HUB: splits_the_list}, timeout=1.0)
    assert {run.errors[u].code for u in case().params.sites} == {"split-view"}
    run = run_protocol(common_seed, case(), roles={HUB: swaps_a_key}, timeout=1.0)
    assert {run.errors[u].code for u in case().params.sites} == {"roster", "signature"}


def test_bad_parameters():
    with pytest.raises(ParameterError):
        common_seed.Params((Party("a"),), HUB)
