"""Inputs of donor groups: on how many donors and cells whatever depends on them rests."""

import numpy as np
import pandas as pd
import pytest

from cloister.disclosure import Rows, Thresholds
from cloister.errors import DataError
from cloister.models import cellcnn
from cloister.mpc.sums import pooled_scaling
from cloister.rehearsal.rehearsal import rehearse
from cloister.workflows.train_cellcnn import workflow as train_cellcnn
from cloister.workflows.train_cellcnn.donor_groups import DonorGroups
from cloister.workflows.train_cellcnn.evaluation import Held, contribution_of


def site(counts, seed=0, markers=4):
    """Cells of donors of two classes in turn, in mixed order."""
    rng = np.random.default_rng(seed)
    names = rng.permutation(np.repeat([f"d{i}" for i in range(len(counts))], counts))
    return rng.normal(size=(len(names), markers)), names, {f"d{i}": "ab"[i % 2] for i in range(len(counts))}


def weights(groups, names):
    """Weight of every cell of the site in every input: inputs of unit vectors."""
    rows, _ = groups.rows(names)
    return groups.inputs(np.eye(len(names))[rows])[0]


@pytest.mark.parametrize("counts", [[30] * 14, [20, 400, 25, 31, 90, 1000, 44, 60, 35, 52, 77], [12] * 6])
def test_every_function_of_inputs_rests_on_as_many_donors_and_cells_as_agreed(counts):
    """Leverage of donors and cells in the span of all inputs and of the sums of the pooled scaling."""
    _, names, classes = site(counts)
    groups = DonorGroups.of(classes, names, Thresholds(10, 3))
    W = weights(groups, names)
    rows, _ = groups.rows(names)
    pooled = np.bincount(rows, minlength=len(names)).astype(float)
    both = np.vstack([W, pooled])
    assert np.linalg.matrix_rank(both) == len(groups)  # the scaling adds no combination of its own
    donors = np.array([[w[names == d].sum() for d in groups.donors] for w in W])
    for table, least in ((W, 10), (donors, 3)):
        basis = np.linalg.qr(table.T)[0]
        assert np.square(basis).sum(axis=1).max() <= 1 / least + 1e-12
    for row in donors:  # donors of a group weigh the same
        assert np.ptp(row[row > 0]) < 1e-12
        assert (row > 0).sum() >= 3


def test_a_class_of_too_few_donors_is_left_out_and_a_site_of_too_few_is_refused():
    _, names, classes = site([20] * 5)
    groups = DonorGroups.of(classes, names, Thresholds(10, 3))
    assert groups.left_out() == {"b": 2}
    assert groups.labels == ["a"]
    assert set(groups.rows(names)[0]) == set(np.flatnonzero(np.isin(names, ["d0", "d2", "d4"])))
    _, names, classes = site([20] * 4)
    with pytest.raises(DataError, match="no class has min_donors = 3 donors"):
        DonorGroups.of(classes, names, Thresholds(10, 3)).check()


def test_a_donor_of_few_cells_makes_groups_larger():
    """Four cells of every donor: three donors are twelve cells, fewer than 20."""
    _, names, classes = site([4] * 20)
    assert len(DonorGroups.of(classes, names, Thresholds(10, 3))) == 6
    groups = DonorGroups.of(classes, names, Thresholds(20, 3))
    assert np.bincount(groups.codes).tolist() == [5, 5, 5, 5]


def test_groups_depend_on_names_and_classes_alone():
    _, names, classes = site([30] * 12)
    first = DonorGroups.of(classes, names, Thresholds(10, 3))
    mixed = np.random.default_rng(3).permutation(names)
    again = DonorGroups.of(dict(reversed(classes.items())), mixed, first.thresholds)
    assert again.donors == first.donors
    np.testing.assert_array_equal(again.codes, first.codes)


def test_whole_groups_are_held_out_whatever_the_seed():
    """Else two runs would show the difference of two groups that share most donors."""
    _, names, classes = site([30] * 18)
    groups = DonorGroups.of(classes, names, Thresholds(10, 3))
    whole = {frozenset(np.array(groups.donors)[groups.codes == k]) for k in range(len(groups))}
    for seed in range(20):
        kept = groups.held_out(3, np.random.default_rng(seed))
        for part in (groups.without(kept), groups.among(kept)):
            for k in range(len(part)):
                assert frozenset(np.array(part.donors)[part.codes == k]) in whole
        assert not set(groups.without(kept).donors) & set(kept)
        assert {classes[d] for d in kept} == {"a", "b"}
        rows = groups.without(kept).rows(names)[0]
        np.testing.assert_array_equal(rows, rows[np.isin(rows, groups.rows(names)[0])])
    with pytest.raises(DataError, match="too few donors at this site to hold out 7"):
        groups.held_out(7, np.random.default_rng(0))


def test_the_sums_of_scaling_less_inputs_show_no_outlier():
    """Pooled scaling moves values far beyond the others; a group mean of unmoved ones would show by how much."""
    x, names, classes = site([40] * 6)
    x[np.flatnonzero(names == "d1")[7], 2] = 1e4
    least = Thresholds(10, 3)
    groups = DonorGroups.of(classes, names, least)
    rows, whose = groups.rows(names)
    fence = groups.fence(x, names)
    held = fence.hold(x[rows])
    assert held.max() < 100
    np.testing.assert_array_equal(pooled_scaling.Fence.of(held, Rows(len(rows), whose, least)).hold(held), held)
    means, part = groups.inputs(held)
    np.testing.assert_allclose(means.mean(axis=0), pooled_scaling.fenced_scaling([held], least, [whose]).mean)
    assert (part.cells, part.donors, part.withheld) == (120, 3, 0)


def test_runs_that_hold_out_other_donors_show_the_same_means(monkeypatch):
    """An outlier in a group that one run trains on and another holds out moves no value of the other groups."""
    ad = pytest.importorskip("anndata")
    x, names, classes = site([40] * 24, markers=3)
    x[np.flatnonzero(names == "d1")[:9]] *= 50.0  # fewer cells than min_cells
    obs = pd.DataFrame(
        {"donor": names, "condition": [classes[n] for n in names]}, index=[f"c{i}" for i in range(len(x))]
    )
    data = {
        p: ad.AnnData(x + k, obs=obs, var=pd.DataFrame(index=["A", "B", "C"])) for k, p in enumerate(("u", "v", "w"))
    }
    seen = []
    made = train_cellcnn.of_groups
    monkeypatch.setattr(train_cellcnn, "of_groups", lambda *a: seen.append(made(*a)[0]) or made(*a))
    fixed = {"scaling": "reference", "reference_mean": (0.0,) * 3, "reference_scale": (1.0,) * 3}
    for seed in range(3):
        rehearse("train-cellcnn", data=data, mode="plain", seed=seed, n_steps=1, n_filters=2, hold_out=3, **fixed)
    assert len(seen) == 3 * 3 * 2  # three runs, three sites, to train on and held out
    rows = np.round(np.concatenate(seen), 9)
    assert len(np.unique(rows, axis=0)) == 3 * 8  # eight groups at each site


def seen_batches(x, names, classes, per, steps=40):
    """Inputs that a site may train on, its batches, and its donors' means."""
    config = cellcnn.Config(markers=x.shape[1], filters=2, classes=2, batch=25, steps=steps)
    rng = np.random.default_rng(2)
    if per == "group":
        groups = DonorGroups.of(classes, names, Thresholds(10, 3))
        inputs = groups.inputs(x[groups.rows(names)[0]])[0]
        labels = np.array(["ab".index(c) for c in groups.labels])
    else:
        y = np.array(["ab".index(classes[n]) for n in names])
        inputs, labels = cellcnn.draw_inputs(x, names, y, n_cells=50, per=per, n_inputs=10, rng=rng)
    return config, inputs, cellcnn.draw_batches(inputs, labels, config, rng)


def donors_with_nothing_in_common():
    x, names, classes = site([60] * 12, markers=30)
    donors = sorted(classes)
    return x + 5 * np.eye(12, 30)[[donors.index(n) for n in names]], names, classes


@pytest.mark.parametrize(("per", "low", "high"), [("donor", 0.97, 1.0), ("group", 0.52, 0.64)])
def test_combined_batches_show_a_donor_of_drawn_inputs_and_a_third_of_a_group(per, low, high):
    """The attacker subtracts and scales batch sums of all steps in the last one, at weights near zero."""
    x, names, classes = donors_with_nothing_in_common()
    _, _, (X, Y) = seen_batches(x, names, classes, per)
    sums = np.einsum("tnm,tn->tm", X, 0.5 - Y[..., 1])
    means = np.array([x[names == d].mean(axis=0) for d in sorted(classes)])
    shown = means @ np.linalg.pinv(sums, rcond=1e-9) @ sums  # the nearest combination to each donor's mean
    cosines = (shown * means).sum(axis=1) / np.linalg.norm(shown, axis=1) / np.linalg.norm(means, axis=1)
    assert low < cosines.min()
    assert cosines.max() <= high + 1e-9


def test_gradients_at_any_model_are_combinations_of_group_means():
    """Steering chooses their coefficients, and nothing else: a donor's part is that of its whole group."""
    x, names, classes = donors_with_nothing_in_common()
    config, means, (X, Y) = seen_batches(x, names, classes, "group", steps=1)
    rng, project = np.random.default_rng(5), np.linalg.pinv(means) @ means
    for size in (0.1, 1.0, 10.0, 64.0):
        Z = cellcnn.gradient(config, rng.normal(size=(30, 2)) * size, X[0], Y[0])
        np.testing.assert_allclose(project.T @ Z, Z, atol=1e-9 * np.abs(Z).max())
        assert np.abs(Z).max() > 1e-3


def test_a_cell_that_stands_for_many_counts_once_in_the_range():
    """Three donors of four cells, each 50 times: before, one cell of each could be the end of a range."""
    x, names, classes = site([200] * 9 + [4] * 3, markers=2)
    far = [np.flatnonzero(names == f"d{i}")[0] for i in (9, 10, 11)]
    x[far, 0] = 1e3
    groups = DonorGroups.of(classes, names, Thresholds(10, 3))
    rows, whose = groups.rows(names)
    assert pooled_scaling.Fence.of(x[rows], Rows(len(rows), whose, groups.thresholds)).high[0] == 1e3  # the attack
    assert groups.fence(x, names).high[0] < 10


def cells_at(name, classes, markers=3, each=30):
    """Cells of one site; donors are numbered, and have these classes."""
    rng = np.random.default_rng(len(name))
    names = np.repeat([f"{name}{i:02}" for i in range(len(classes))], each)
    obs = pd.DataFrame(
        {"donor": names, "condition": np.repeat(classes, each)}, index=[f"c{i}" for i in range(len(names))]
    )
    var = pd.DataFrame(index=["A", "B", "C"][:markers])
    return pytest.importorskip("anndata").AnnData(rng.normal(size=(len(names), markers)), obs=obs, var=var)


def test_a_class_of_one_donor_is_not_named_to_the_others():
    data = {p: cells_at(p, [*"aaabbb", *extra]) for p, extra in (("u", ["rare disease"]), ("v", []), ("w", []))}
    run = rehearse("train-cellcnn", data=data, mode="plain", n_steps=1, n_filters=2)
    assert run.outcomes["v"].model.classes == ("a", "b")
    assert run.outcomes["u"].result["donors"] == 7  # at home, with its own class


def test_held_out_inputs_of_few_cells_are_refused():
    """Of one cell each, two models' tables would differ by single cells."""
    data = {p: cells_at(p, [*"aaaaaabbbbbb"]) for p in ("u", "v", "w")}
    with pytest.raises(DataError, match="n_cells=1 cells per held-out input are fewer than min_cells = 10"):
        rehearse("train-cellcnn", data=data, mode="plain", n_steps=1, hold_out=3, n_cells=1)
    rehearse("train-cellcnn", data=data, mode="plain", n_steps=1, hold_out=3, n_cells=10)


class Plane:
    """A model that was steered to one side of a plane across the first marker."""

    config = cellcnn.Config(markers=2, filters=1, classes=2, batch=1, steps=1)

    def __init__(self, at):
        self.at = at

    def logits(self, x):
        return np.stack([np.zeros(len(x)), x[:, 0] - self.at], axis=1)


def test_tables_of_many_steered_models_show_single_held_out_donors():
    """Open: every table rests on min_donors donors, and two tables differ by one."""
    x, names, _ = site([40] * 4, markers=2)
    x[:, 0] += np.array([float(n[1:]) for n in names])
    held = Held.of(
        x,
        names,
        np.zeros(len(names), np.int64),
        {"n_cells": 10, "per": "class", "n_inputs": 5},
        Thresholds(10, 3),
        np.random.default_rng(0),
    )
    planes = np.linspace(-2.0, 5.0, 701)
    tables = contribution_of([Plane(at) for at in planes], held)
    assert tables.donors == 4
    steps = planes[1:][np.diff(tables.values[:, 1, 0, 1]) != 0]
    np.testing.assert_allclose(steps, np.sort(held.donors[:, 0]), atol=0.01)  # the mean of every donor


def test_the_number_of_cells_of_one_donor_changes_the_groups_of_all():
    """Not names and classes alone: so the site compares the groups of runs on other cells (`differencing`)."""
    _, names, _ = site([30] * 12)
    classes = dict.fromkeys(np.unique(names), "a")
    first = DonorGroups.of(classes, names, Thresholds(10, 3))
    gone = np.flatnonzero(names == "d0")[2:]
    fewer = DonorGroups.of(classes, np.delete(names, gone), Thresholds(10, 3))
    assert np.bincount(first.codes).tolist() == [3, 3, 3, 3]
    assert np.bincount(fewer.codes).tolist() == [5, 7]  # two cells of each donor count


@pytest.mark.parametrize(("n", "sizes"), [(3, [3]), (5, [5]), (6, [3, 3]), (8, [3, 5]), (11, [3, 3, 5])])
def test_the_last_group_has_the_donors_that_are_left(n, sizes):
    _, names, _ = site([30] * n)
    groups = DonorGroups.of(dict.fromkeys(np.unique(names), "a"), names, Thresholds(10, 3))
    assert np.bincount(groups.codes).tolist() == sizes
