from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cloister.protocols.sums import checked_sum, secure_sum
from cloister.protocols.sums.checked_sum import Params
from cloister.study import Party
from cloister.testing import (
    Case,
    check_abort,
    check_cost,
    check_ideal,
    check_lies,
    check_vectors,
    check_view,
    run_protocol,
    same_array,
    values,
)

HUB, SITES = Party("hub"), tuple(map(Party, ("a", "b", "c")))
VECTORS = Path(__file__).parents[2] / "vectors" / "checked_sum.json"
SECRET = bytes(range(32))


def case(*rows):
    xs = [np.array(row, dtype=np.int64).view(np.uint64) for row in rows]
    return Case(Params(SITES[: len(xs)], HUB, len(xs[0])), {u: (x, SECRET) for u, x in zip(SITES, xs, strict=False)})


FIRST, TWIN = case([1, 2], [3, -4], [5, 2**60]), case([0, 0], [7, 7], [-1, -1])


def test_ideal():
    check_ideal(checked_sum, [FIRST, TWIN, case([1], [2])], agree=same_array)


def test_vectors():
    check_vectors(checked_sum, FIRST, VECTORS)


def test_view():
    check_view(checked_sum, FIRST, TWIN)


def test_cost():
    check_cost(checked_sum, FIRST)


def test_a_site_that_stops_ends_the_run():
    def survived(run):
        same_array(values(run)[HUB], checked_sum.ideal(FIRST.params, {u: x for u, x in FIRST.inputs.items()})[HUB])

    messages = [("a", "hub", "secure_sum.MaskedInput"), ("hub", "a", "secure_sum.Total")]
    check_abort(checked_sum, FIRST, survived=survived, messages=messages, kinds=["drop", "kill", "truncate"])


class Liar:
    """A channel that tells everybody the same wrong total."""

    def __init__(self, ch, change):
        self.ch, self.change = ch, change

    def __getattr__(self, name):
        return getattr(self.ch, name)

    def _changed(self, msg):
        return secure_sum.Total(self.change(msg.z)) if isinstance(msg, secure_sum.Total) else msg

    async def scatter(self, to, msg=None):
        await self.ch.scatter(to, self._changed(msg))

    async def broadcast(self, to, msg):
        await self.ch.broadcast(to, self._changed(msg))


@pytest.mark.parametrize("change", [1, 2**20, 2**62, 2**63])
def test_a_sum_that_the_coordinator_changed_for_all_is_noticed(change):
    async def coordinator(ch, params):
        return await checked_sum.coordinator(Liar(ch, lambda z: z + np.array([change, 0, 0, 0], np.uint64)), params)

    ended = run_protocol(checked_sum, FIRST, roles={HUB: coordinator}, timeout=5.0)
    assert {ended.errors[u].code for u in SITES} == {"changed"}


def test_the_secure_sum_alone_takes_it():
    """The same lie where sums are not checked: every site goes on with what the coordinator chose."""
    params = secure_sum.Params(SITES, HUB, 2, to_all=True)
    inputs = {u: (x,) for u, (x, _) in FIRST.inputs.items()}

    async def aggregator(ch, params):
        return await secure_sum.aggregator(Liar(ch, lambda z: z + np.array([1000, 0], np.uint64)), params)

    ended = run_protocol(secure_sum, Case(params, inputs), roles={HUB: aggregator}, timeout=5.0)
    assert not ended.errors
    assert {int(values(ended)[u].z[0]) for u in SITES} == {1009}


@pytest.mark.parametrize("told", [lambda opened: None, lambda opened: replace(opened, survivors=SITES[1:])])
def test_a_sum_that_is_not_of_all_sites_is_refused(told, monkeypatch):
    """Whatever the secure sum hands over: here as if it had been opened without a site, or not at all."""
    contribute = secure_sum.contributor

    async def without_one(*args, **kwargs):
        return told(await contribute(*args, **kwargs))

    monkeypatch.setattr(secure_sum, "contributor", without_one)
    ended = run_protocol(checked_sum, FIRST, timeout=5.0)
    assert {ended.errors[u].code for u in SITES} == {"survivors"}


def test_one_liar():
    """Whoever lies in whichever message: a named abort, or the sum with whatever the liar put in itself."""
    xs = {u: x for u, (x, _) in FIRST.inputs.items()}

    def right(lie, ended):
        honest = np.sum([xs[u] for u in SITES if u != lie.liar], axis=0, dtype=np.uint64)
        for value in ended.values():
            if lie.liar == HUB:
                same_array(value, np.sum(list(xs.values()), axis=0, dtype=np.uint64))
            else:
                assert value.shape == honest.shape

    lies = check_lies(checked_sum, [FIRST, TWIN], right=right)
    assert lies.tried > 10
    assert lies.aborted > 5
