"""Attacks on groups of similar cells, which all sums of `integrate` are over."""

import numpy as np
import pytest
from tests.old_steps import harmony_groups as old

from cloister import disclosure
from cloister.disclosure import Rows, SimilarGroups, Thresholds
from cloister.errors import DataError
from cloister.models.harmony import Settings, unit
from cloister.study import Party
from cloister.testing import Case, run_protocol
from cloister.workflows.integrate import harmony_steps, pooled_harmony
from cloister.workflows.integrate.harmony_steps import Cells, Params

HUB, SITES = Party("hub"), tuple(map(Party, "abc"))
N, D = 600, 20


def cells(seed=0, n=N):
    """One kind of cells with a few strong directions, as after PCA."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=(n, D)) * np.geomspace(4, 1, D)


def closest(x, u):
    """The largest cosine of a group's mean, from the mean of all, with a direction."""
    groups = Rows(len(x)).similar(x)
    return float((unit(groups.clipped_means(x) - np.median(x, axis=0)) @ u).max())


@pytest.mark.parametrize("distance", [30, 300, 3000])
def test_a_far_cell_does_not_choose_who_is_in_its_group(monkeypatch, distance):
    """Attack: a far cell is the direction of largest variance, so cut after cut leaves it with cells on its side.

    Their mean points to it, although it counts for nothing in this mean.
    """
    gained = {}
    for name in ("old", "new"):
        if name == "old":
            monkeypatch.setattr(disclosure, "_main_direction", old.main_direction)
        else:
            monkeypatch.undo()
        with_it, without = [], []
        for seed in range(20):
            x = cells(seed)
            u = unit(np.random.default_rng(seed + 100).normal(size=(1, D)))[0]
            without.append(closest(np.delete(x, 7, axis=0), u))
            x[7] = distance * u
            with_it.append(closest(x, u))
        gained[name] = np.mean(with_it) - np.mean(without)
    assert gained["old"] > 0.25
    assert gained["new"] < 0.4 * gained["old"]  # what is left: like any cell, it is on the side of each cut it lies on


@pytest.mark.parametrize("distance", [1e3, 1e9, 1e12])
def test_the_distance_of_a_far_cell_is_not_in_the_mean_of_its_group(monkeypatch, distance):
    """Attack: an embedding in which one cell lies 10^9 times as far as others. Ten steps from the mean leave 10^-8."""
    x, u = cells(), unit(np.ones((1, D)))[0]
    x[7] = distance * u
    groups = Rows(N).similar(x)
    k = groups.codes[7]
    away = {"new": groups.clipped_means(x)[k]}
    monkeypatch.setattr(SimilarGroups, "clipped_means", old.clipped_means)
    away["old"] = groups.clipped_means(x)[k]
    rest = x[(groups.codes == k) & (np.arange(N) != 7)]
    spread = float(np.median(np.linalg.norm(rest - rest.mean(axis=0), axis=1)))
    assert np.linalg.norm(away["new"] - rest.mean(axis=0)) < spread
    if distance == 1e12:
        assert np.linalg.norm(away["old"] - rest.mean(axis=0)) > 100 * spread
        assert unit(away["old"][None])[0] @ u > 0.99
    elif distance == 1e3:
        np.testing.assert_allclose(away["old"], away["new"], atol=0.05 * spread)


def test_equal_cells_and_a_far_one_are_grouped_by_what_differs():
    """Where more than half of the cells are equal, the median distance is zero; the others still say how to cut."""
    x = np.zeros((100, 3))
    x[:40] = np.random.default_rng(0).normal([5, 0, 0], 0.3, (40, 3))
    x[0] = [0, 0, 1e6]
    groups = Rows(100).similar(x)
    mixed = [len({bool(i < 40) for i in np.flatnonzero(groups.codes == k) if i}) > 1 for k in range(len(groups))]
    assert sum(mixed) <= 1


def test_a_cell_has_at_most_two_parts_in_m_of_the_clipped_mean():
    """What the clipping costs: half of a group can hold nearly all of its mean. Measured on real cells: 1.2 in m."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(10, D))
    x[:6] = x[0]
    groups = Rows(10).similar(x)
    np.testing.assert_allclose(groups.clipped_means(x)[0], x[0], atol=0.01)  # six equal cells are the mean of ten
    x[5] = rng.normal(size=D)
    assert np.linalg.norm(groups.clipped_means(x)[0] - x[0]) > 0.5  # five are not
    for seed in range(20):
        x = np.random.default_rng(seed).standard_t(1.5, (300, 4))
        groups = Rows(300).similar(x)
        means = groups.clipped_means(x)
        for k in range(len(groups)):
            length = np.linalg.norm(x[groups.codes == k] - means[k], axis=1)
            weight = np.minimum(1, np.sort(length)[len(length) // 2] / length)
            assert weight.max() / weight.sum() < 2 / len(length)


def test_two_runs_that_differ_in_a_cell():
    """Attack: groups that are not in both runs, all of one run less all of the other. Sums of cells give the cell.

    Clipping leaves other rests of all these groups in the difference. This is measured, not a bound.
    """
    read, plain = [], []
    for seed in range(10):
        x = cells(seed)
        both = []
        for rows in (x, np.delete(x, 7, axis=0)):
            groups = Rows(len(rows)).similar(rows)
            both.append([groups.cells @ groups.clipped_means(rows), groups.cells @ groups.means(rows)])
        clipped, whole = (a - b for a, b in zip(*both, strict=True))
        read.append(float(unit(clipped[None])[0] @ unit(x[7:8])[0]))
        plain.append(float(unit(whole[None])[0] @ unit(x[7:8])[0]))
    assert min(plain) > 0.999
    assert np.median(read) < 0.9


def test_no_site_ends_a_run_because_of_where_its_own_part_lies(monkeypatch):
    """Attack: a site lowers the sum of squares, by which others scale their parts. Whose part is beyond ends the run.

    So an abort shows, for one honest site of two, whether its part is larger than a number that the attacker chose.
    """
    rng = np.random.default_rng(0)
    settings = Settings(clusters=3, rounds=1, updates=1, sweeps=1)
    far = {u: 4.0 + 60.0 * (u == "a") for u in SITES}  # site a has larger values than site c
    xs = {u: rng.normal(size=(60 + 10 * i, 4)) + far[u] for i, u in enumerate(SITES)}
    params = Params(SITES, HUB, "X_a", settings)
    case = Case(params, {u: (Cells(x, np.zeros(len(x), np.int64), None, "ab", Thresholds()),) for u, x in xs.items()})
    shown = [harmony_steps.part_of(params, mine, 4).shown for (mine,) in case.inputs.values()]
    energy = sum(float(s.size @ np.square(s.x).sum(axis=1)) for s in shown)  # of an earlier run: groups are the same
    real = harmony_steps.Course.add

    def bent(self, line, what, mine, reach=0.0):
        lies = line == "L2" and len(self.part.cells.x) == 70  # site b
        return (yield from real(self, line, what, mine - [0.0, energy - 1.0] if lies else mine, reach))

    def named():
        run = run_protocol(pooled_harmony, case, timeout=3.0)
        return {u for u in SITES if isinstance(run.errors.get(u), DataError)}

    monkeypatch.setattr(harmony_steps.Course, "add", bent)
    assert named() == set()
    monkeypatch.setattr(pooled_harmony, "encode", old.encode)
    assert named() == {SITES[0]}
