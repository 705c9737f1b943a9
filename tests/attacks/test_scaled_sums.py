"""Finding F1 against a whole protocol: a malicious coordinator scales checked sums together with their tags.

Every attack runs twice. Against the old step (linear tags, no comparison after the last sum) it succeeds; against the
current one every site aborts with a named code.
"""

import numpy as np
import pytest
import scipy.sparse

from cloister.mpc.crypto import sum_tags
from cloister.mpc.sums import checked_sum, consistency_check
from cloister.study import Party
from cloister.testing import Case, check_no_errors, run_protocol, values
from cloister.workflows.train_classifier import openings, pooled_logistic
from cloister.workflows.train_classifier.logistic_terms import Labelled, Params
from old_steps import linear_sum_tags

HUB, SITES = Party("hub"), tuple(map(Party, ("a", "b", "c")))


def classifier(seed=0, genes=30, kinds=3, cells=80):
    rng = np.random.default_rng(seed)
    rates = rng.gamma(0.6, 2.0, genes) * np.exp(rng.normal(0, 0.5, (kinds, genes)))
    names, inputs = tuple(f"G{i}" for i in range(genes)), {}
    for u in SITES:
        codes = rng.integers(0, kinds, cells)
        x = scipy.sparse.csr_matrix(rng.poisson(rates[codes]).astype(np.float64))
        inputs[u] = (Labelled(names, x, tuple(f"type {k}" for k in codes), np.zeros(cells, bool)),)
    params = Params(SITES, HUB, penalties=(1e-2,), held_out=False, n_top_genes=genes)
    return Case(params, inputs)


class Scaling:
    """The channel of a coordinator that multiplies chosen sums and their tags; `factor(nth, site)` is 1 elsewhere."""

    def __init__(self, ch, factor, tags, seen=None):
        self.ch, self.factor, self.tags = ch, factor, tags
        self.seen = [0] if seen is None else seen

    def __getattr__(self, name):
        return getattr(self.ch, name)

    def sub(self, *args, **more):
        return Scaling(self.ch.sub(*args, **more), self.factor, self.tags, self.seen)

    def reveal(self, x, **what):
        """Follow the attack: go on with what most sites received."""
        x = self.ch.reveal(x, **what)
        if what["protocol"] != checked_sum.NAME:
            return x
        self.seen[0] += 1
        self.true = x
        return self.scaled(x, self.factor(self.seen[0], HUB))

    async def broadcast(self, to, msg):
        if not isinstance(msg, checked_sum.Total):
            return await self.ch.broadcast(to, msg)
        await self.ch.scatter({u: checked_sum.Total(self.scaled(self.true, self.factor(self.seen[0], u))) for u in to})
        self.ch._absorb(self.ch.me, msg)

    def scaled(self, z, factor):
        half, value = self.tags.HALF, (int(z[-2]) << self.tags.HALF) + int(z[-1])
        value = value * factor % self.tags.MODULUS
        tag = np.array([value >> half, value & ((1 << half) - 1)], np.uint64)
        return np.concatenate([z[:-2] * np.uint64(factor % 2**64), tag])


def attack(factor, tags):
    async def coordinator(ch, params):
        return await pooled_logistic.coordinator(Scaling(ch, factor, tags), params)

    return run_protocol(pooled_logistic, classifier(), roles={HUB: coordinator}, timeout=5.0)


def use_linear_tags(patch):
    patch.setattr(checked_sum, "site", linear_sum_tags.site)
    patch.setattr(checked_sum, "coordinator", linear_sum_tags.coordinator)


async def no_comparison(self):
    pass


@pytest.fixture(scope="module")
def honest():
    run = run_protocol(pooled_logistic, classifier())
    check_no_errors(run)
    return values(run)[HUB]


@pytest.mark.parametrize("factor", [0, -1, 2])
def test_sums_scaled_for_all_sites(factor, honest, monkeypatch):
    """All sums after the moments: times 0 the old step gives an all-zero model that says it has converged."""

    def after_moments(nth, site):
        return factor if nth > 1 else 1

    with monkeypatch.context() as old:
        use_linear_tags(old)
        run = attack(after_moments, linear_sum_tags)
        codes = {getattr(e, "code", "") for e in run.errors.values()}
        assert "changed" not in codes  # the tag of every scaled sum is accepted
        if not factor:
            models = [values(run)[u] for u in SITES]
            assert all(m.converged and not m.coefficients.any() for m in models)
            assert honest.coefficients.any()
    run = attack(after_moments, sum_tags)
    assert {run.errors[u].code for u in SITES} == {"changed"}


def test_three_sites_with_three_models(honest, monkeypatch):
    """Another multiple of the last sum for each site."""
    factors = dict(zip((HUB, *SITES), (1, 1, 0, -1), strict=True))

    def in_the_last_sum(nth, site):
        return factors[site] if nth == honest.openings else 1

    with monkeypatch.context() as old:
        use_linear_tags(old)
        old.setattr(openings.Openings, "compare", no_comparison)
        run = attack(in_the_last_sum, linear_sum_tags)
        check_no_errors(run)
        assert len({values(run)[u].centers.tobytes() for u in SITES}) == 3
    with monkeypatch.context() as compared:  # the comparison alone stops it, too
        use_linear_tags(compared)
        run = attack(in_the_last_sum, linear_sum_tags)
        assert not set(SITES) & set(values(run))
        assert {e.protocol for u, e in run.errors.items() if u in SITES and not e.heard} <= {consistency_check.NAME}
    run = attack(in_the_last_sum, sum_tags)
    assert {run.errors[u].code for u in SITES[1:]} == {"changed"}
    assert not set(SITES) & set(values(run))
