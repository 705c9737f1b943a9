from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloister.errors import ProtocolAbort
from cloister.papers import averaged_quantiles
from cloister.papers.averaged_quantiles import Averaged, Local, Params
from cloister.study import Party
from cloister.testing import (
    Case,
    check_abort,
    check_cost,
    check_ideal,
    check_vectors,
    check_view,
    run_protocol,
    same_array,
    values,
)

VECTORS = Path(__file__).parents[1] / "vectors" / "averaged_quantiles.json"
HUB = Party("hub")


def case(n=3, B=10, seed=0, cells=(10, 20, 3, 7, 100)):
    rng = np.random.default_rng(seed)
    sites = tuple(Party(f"site-{i}") for i in range(n))
    inputs = {u: (rng.lognormal(i, 1, 50 + 10 * i), cells[i]) for i, u in enumerate(sites)}
    return Case(Params(sites, HUB, B), inputs)


def by_hand(c):
    """Σ n_u B_u / Σ n_u, written out."""
    top = np.zeros(c.params.n_quantiles)
    for v, n in c.inputs.values():
        top = top + n * np.quantile(v, np.linspace(0, 1, c.params.n_quantiles))
    return top / sum(n for _, n in c.inputs.values())


@settings(max_examples=15, deadline=None)
@given(n=st.integers(1, 5), B=st.integers(2, 60), seed=st.integers(0, 2**20))
def test_ideal(n, B, seed):
    c = case(n, B, seed)
    check_ideal(averaged_quantiles, [c], agree=same_array)
    np.testing.assert_array_equal(averaged_quantiles.ideal(c.params, c.inputs)[HUB], by_hand(c))


def test_it_is_not_the_quantile_of_all_values():
    c = case()
    pooled = np.quantile(np.concatenate([v for v, _ in c.inputs.values()]), np.linspace(0, 1, 10))
    assert np.max(np.abs(by_hand(c) / pooled - 1)) > 0.5


def test_vectors():
    """Inputs without logarithms, so that the bytes are the same on every machine."""
    inputs = {u: (np.arange(1.0, 9.0 + i) / 4, 10 + i) for i, u in enumerate(case().params.sites)}
    check_vectors(averaged_quantiles, Case(case(B=5).params, inputs), VECTORS)


def test_view_does_not_depend_on_the_values():
    first, second = case(seed=1), case(seed=2)
    check_view(averaged_quantiles, first, second)


def test_cost():
    check_cost(averaged_quantiles, case())
    check_cost(averaged_quantiles, case(n=5, B=1000))


def test_abort():
    c = case()

    def survived(run):
        np.testing.assert_array_equal(values(run)[HUB], by_hand(c))

    messages = [("site-1", "hub", "averaged_quantiles.Local"), ("hub", "site-1", "averaged_quantiles.Averaged")]
    messages += [("site-1", "hub", "channel.Hello"), ("hub", "site-1", "channel.Welcome")]
    assert check_abort(averaged_quantiles, c, survived=survived, messages=messages) == 24


def test_the_receipt_says_what_the_coordinator_was_shown():
    run = run_protocol(averaged_quantiles, case())
    for u in case().params.sites:
        opened = [(e.line, e.name, e.to) for e, _ in run.receipts[u].entries if e.kind == "opened"]
        assert opened == [("L1", "my local quantiles", HUB)]


def lies(edges, n_cells):
    async def site(ch, params, *_):
        await ch.send(HUB, Local(edges, n_cells))
        await ch.recv(HUB, Averaged, edges=(params.n_quantiles,))

    return site


@pytest.mark.parametrize(
    ("edges", "n_cells"),
    [
        (np.full(10, np.nan), 5),
        (np.full(10, np.inf), 5),
        (np.ones(10), 0),
        (np.ones(10), -5),
        (np.ones(9), 5),
    ],
)
def test_a_site_that_sends_nonsense_stops_the_run(edges, n_cells):
    c = case()
    run = run_protocol(averaged_quantiles, c, roles={c.params.sites[0]: lies(edges, n_cells)})
    assert run.errors.keys() == {HUB, *c.params.sites}
    assert {e.code for e in run.errors.values()} == {"malformed"}


@pytest.mark.parametrize("edges", [np.full(10, np.nan), np.arange(10.0)[::-1].copy()])
def test_a_coordinator_that_sends_nonsense_is_refused(edges):
    async def hub(ch, params):
        await ch.gather(params.sites, Local, edges=(10,))
        await ch.scatter(params.sites, Averaged(edges))

    run = run_protocol(averaged_quantiles, case(), roles={HUB: hub})
    for u in case().params.sites:
        assert isinstance(run.errors[u], ProtocolAbort)
        assert (run.errors[u].line, run.errors[u].code) == ("L2", "edges")
