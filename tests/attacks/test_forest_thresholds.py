"""F2 and F5: one malicious site reads leaf counts and isolated rows of an honest site from the opened forest."""

import numpy as np
import pytest
from tests.old_steps import counted_forest as old

from cloister.mpc.sums import pooled_scaling
from cloister.mpc.sums.pooled_queries import Plain
from cloister.papers.attacks import opened_forest
from cloister.study import Party
from cloister.workflows.find_outliers import counted_forest
from cloister.workflows.find_outliers.counted_forest import Outline, Params

HUB = Party("hub")
SITES = tuple(Party(f"site-{i}") for i in range(3))


def lonely(seed=0):
    """240 rows, forty of them far from the others and from each other."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(240, 4))
    X[:40] += rng.normal(size=(40, 4)) * 5
    return X


class Malicious(Plain):
    """A site without rows adds `answer` to every number; it knows its part, so it has the honest site's alone."""

    def __init__(self, answer):
        super().__init__()
        self.answer, self.honest = answer, []

    async def total(self, parts, length, most, *, line, what):
        pooled, coin = await super().total(parts, length, most, line=line, what=what)
        self.honest.append(pooled)
        return pooled + self.answer, coin


def attacked(X, answer, seed, **options):
    """Ranges of the honest site alone, as the malicious one computes them, and the attack's guesses."""
    params = Params(SITES, HUB, **options)
    scaling = pooled_scaling.fenced_scaling([X], params.thresholds)
    tally, rng = Malicious(answer), np.random.default_rng(seed)
    outline, geometry = counted_forest.grow_plainly(params, scaling, [X], bytes([seed]) * 32, rng, totals=tally)
    ranges = []
    for (nodes, _, _), honest in zip(outline.ranges, tally.honest, strict=True):
        some = honest.reshape(len(nodes), 2, -1) > 0
        ranges.append((nodes, (~some[:, 0]).sum(axis=1), some[:, 1].sum(axis=1)))
    Z = counted_forest.on_scale(params, scaling, X)
    view = opened_forest.view(params, Outline(ranges, outline.depth), geometry.steps, len(Z), Z.shape[1])
    return Z, opened_forest.rebuild(view, most=4000, rng=rng)


def test_old_step_discloses_single_rows():
    """Leaf counts of one to seven rows are opened, most of them of single rows; isolated rows are reconstructed."""
    Z = pooled_scaling.scaling_of(lonely()).apply(lonely())
    rng = np.random.default_rng(0)
    view, counts = old.opened(Z, rng=rng)
    assert ((counts > 0) & (counts < 8)).sum() > 1000
    share, alone = opened_forest.rebuilt(Z, opened_forest.rebuild(view, most=4000, rng=rng), within=0.2)
    assert alone >= 30
    assert share > 0.9


@pytest.mark.parametrize("answer", [0, 1])
def test_new_step_does_not(answer):
    """A site that says yes everywhere, or only subtracts its part, does no better than guesses without a forest."""
    hits, luck = [], []
    for seed in range(2):
        Z, guess = attacked(lonely(), answer, seed)
        hits.append(opened_forest.rebuilt(Z, guess, within=0.2)[0])
        blind = opened_forest.lucky(Z, max(len(guess), 1), np.random.default_rng(1))
        luck.append(opened_forest.rebuilt(Z, blind, within=0.2)[0])
    assert np.mean(hits) <= np.mean(luck) + 0.05
