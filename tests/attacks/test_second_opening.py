"""A malicious coordinator that starts propagation again with sites that have seen no result yet."""

import asyncio

import numpy as np
import pytest

from cloister.errors import ProtocolAbort
from cloister.mpc.sums import retry_without_dropouts
from cloister.mpc.three_party.verified import Open
from cloister.study import Party
from cloister.testing import Case, run_protocol, values
from cloister.workflows.propagate_labels import propagation_terms, verified_propagation
from cloister.workflows.propagate_labels.propagation_terms import Params
from cloister.workflows.propagate_labels.verified_propagation import Progress

HUB = Party("hub")
SITES = tuple(map(Party, ("basel", "geneva", "lugano", "vienna", "zurich")))
REST = SITES[3:]  # they do not compute in the first attempt


def points(per_site=8, d=4, classes=3, **options):
    rng = np.random.default_rng(0)
    inputs = {}
    for u in SITES:
        labels = [f"type {c}" for c in rng.integers(0, classes, per_site)]
        labels[:classes] = [f"type {c}" for c in range(classes)]
        inputs[u] = (rng.normal(size=(per_site, d)), [*labels[:-2], None, None])
    return Case(Params(SITES, HUB, **{"bits": 64, "n_neighbors": 3, **options}), inputs)


def twice(seen):
    """A coordinator that completes a step with all sites, calls it done for three, and repeats it with the others."""

    async def malicious(ch, params, *, entropy, identity):
        roster = await propagation_terms.open_study(ch, params)
        named = await retry_without_dropouts.survivors(ch, roster.sites, propagation_terms.Classes, 2)
        classes, inner = next(iter(named.values())).count, ch.sub("hidden")
        for attempt, sites in enumerate((SITES, REST)):
            await inner.broadcast(sites, retry_without_dropouts.Go(sites, done=False))
            scope, control = retry_without_dropouts._scopes(inner, attempt, sites)
            plan = verified_propagation._plan(params, roster, sites, classes)
            work = verified_propagation._compute(
                scope, plan, None, None, Progress(), entropy=entropy, identity=identity
            )
            seen.append((await asyncio.wait_for(work, 20))[0])
            finished = SITES[:3] if attempt == 0 else REST
            await control.gather(finished, retry_without_dropouts.Report)
            await inner.scatter(finished, retry_without_dropouts.Go(sites, done=True))

    return malicious


def held_back(monkeypatch):
    """The coordinator carries the frames: openings for sites that do not compute are held back in the first attempt."""
    links = verified_propagation.Verified
    make = links._open_outside

    async def late(self, held, size, to):
        if to in REST and set(self.computing) == set(SITES[:3]):
            if held is not None:
                return None  # sent, and never carried on
            if self.ch.me == to:
                await self.links.gather(Open, dict.fromkeys(self.computing, size))
        return await make(self, held, size, to)

    monkeypatch.setattr(links, "_open_outside", late)


@pytest.mark.parametrize("carried", [True, False])
def test_no_site_takes_part_in_two_openings(carried, monkeypatch):
    """With `choose`, two indices, of all sites and of two, would reveal labels by their difference."""
    if not carried:
        held_back(monkeypatch)
    seen = []
    run = run_protocol(verified_propagation, points(choose=True), roles={HUB: twice(seen)}, timeout=10.0)
    assert len(seen) == 1
    repeated = {p for p, e in run.errors.items() if isinstance(e, ProtocolAbort) and e.code == "repeated"}
    assert repeated & set(REST)
    assert not set(values(run)) & set(REST)


def test_sites_do_not_finish_with_results_of_different_lists(monkeypatch):
    held_back(monkeypatch)
    run = run_protocol(verified_propagation, points(), roles={HUB: twice([])}, timeout=10.0)
    assert len({found.sites for p, found in values(run).items() if p != HUB}) <= 1
