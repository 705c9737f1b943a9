"""How good a CellCnn is on held-out donors, sites of one class, presets, and what it is compared with."""

import numpy as np
import pandas as pd
import pytest

from cloister import workflows
from cloister.errors import ParameterError, ProtocolAbort
from cloister.papers.baselines.cellcnn import cellcnn_baselines
from cloister.rehearsal.check_disclosure import check_disclosure
from cloister.rehearsal.rehearsal import rehearse
from cloister.study import Study
from cloister.workflows.train_cellcnn import evaluation
from cloister.workflows.train_cellcnn import workflow as train_cellcnn
from cloister.workflows.train_cellcnn.presets import settled

ad = pytest.importorskip("anndata")
SITES = ("basel", "lugano", "vienna")
MARKERS = ("CD3", "CD16", "CD57")
COMMON = {
    "n_filters": 3,
    "n_cells": 40,
    "n_inputs": 30,
    "batch": 16,
    "learning_rate": 0.3,
    "mode": "plain",
    "min_donors": 2,
}
HELD = {"hold_out": 2}


def site(seed, classes, cells=60):
    """One donor for each entry of `classes`; in a 'case', a third of the cells is high in CD57 and CD16."""
    rng = np.random.default_rng(seed)
    X = rng.normal(0, 1, (len(classes), cells, len(MARKERS)))
    for x, label in zip(X, classes, strict=True):
        if label == "case":
            x[: cells // 3, 1:] += 3.0
        if label == "severe":
            x[: cells // 3, 0] += 4.0
    names = [f"c{i}" for i in range(len(classes) * cells)]
    facts = {"donor": np.repeat([f"d{i}" for i in range(len(classes))], cells), "condition": np.repeat(classes, cells)}
    obs = pd.DataFrame(facts, index=names)
    return ad.AnnData(X.reshape(-1, len(MARKERS)).astype(np.float32), obs=obs, var=pd.DataFrame(index=list(MARKERS)))


def sites(classes=("case", "control") * 2):
    return {name: site(i, list(classes)) for i, name in enumerate(SITES)}


def table(rows):
    return [[v for k, v in row.items() if k != "truth"] for row in rows]


def test_scores_are_those_of_scikit_learn():
    metrics = pytest.importorskip("sklearn.metrics")
    rng = np.random.default_rng(0)
    for classes in (2, 3):
        truth, found = rng.integers(0, classes, (2, 50))
        table = evaluation.table_of(truth, found, classes)
        np.testing.assert_array_equal(table, metrics.confusion_matrix(truth, found))
        how = {"average": "binary", "pos_label": 0} if classes == 2 else {"average": "macro"}
        wanted = metrics.precision_recall_fscore_support(truth, found, **how)[:3]
        mine = evaluation.scores(table, 0)
        np.testing.assert_allclose([mine[k] for k in ("precision", "recall", "f_score")], wanted)
        assert mine["accuracy"] == metrics.accuracy_score(truth, found)


def test_nothing_was_said_and_nothing_is_divided_by_zero():
    assert evaluation.scores(np.zeros((2, 2), np.int64), 1) == dict.fromkeys(
        ("accuracy", "precision", "recall", "f_score"), 0.0
    )
    assert evaluation.scores(np.array([[3, 0], [2, 0]]), 1)["precision"] == 0.0


def test_held_out_donors_are_judged_by_sums_over_all_sites_and_no_sites_own():
    shown = []
    data = sites(("case", "control") * 4)
    run = rehearse("train-cellcnn", data=data, n_steps=40, **HELD, on_event=shown.append, **COMMON)
    found = run.results["coordinator"]
    assert all(run.results[p]["confusion_of_donors"] == found["confusion_of_donors"] for p in SITES)
    donors, inputs = (np.array(table(found[f"confusion_of_{kind}"])) for kind in ("donors", "inputs"))
    np.testing.assert_array_equal(donors.sum(axis=1), 6)  # two of each class at each of three sites
    np.testing.assert_array_equal(inputs.sum(axis=1), 3 * 30)
    of_inputs, of_donors = found["validation"]
    assert (of_inputs["held_out"], of_inputs["count"], of_donors["count"]) == ("inputs", 180, 12)
    assert of_donors["accuracy"] == np.trace(donors) / 12 > 0.9
    assert found["validation_accuracy"] == [of_inputs["accuracy"]]
    tables = [e for e, _ in run.receipts["coordinator"].entries if e.kind == "opened" and "right and wrong" in e.name]
    assert [e.to for e in tables] == [
        "coordinator",
        *SITES,
    ]  # the sum is opened, once to each; a site's own table never
    assert run.receipts["basel"].smallest_group == {"cells": 120, "donors": 2}  # of 60 cells each


def test_a_class_with_too_few_held_out_donors_at_a_site_adds_nothing_to_the_tables():
    x, names = np.random.default_rng(0).normal(0, 1, (70, 3)), np.repeat([f"d{i}" for i in range(7)], 10)
    y = np.repeat([0, 0, 0, 0, 0, 1, 1], 10)
    drawn = {"n_cells": 5, "per": "donor", "n_inputs": 2}
    held = evaluation.Held.of(x, names, y, drawn, train_cellcnn.Thresholds(10, 3), np.random.default_rng(1))
    config = train_cellcnn.cellcnn.Config(markers=3, filters=2, classes=2, batch=4, steps=1)
    model = train_cellcnn.cellcnn.Model(config, MARKERS, ("case", "control"), 0.0, np.zeros(3), np.ones(3))
    model = train_cellcnn.replace(model, weights=train_cellcnn.cellcnn.initial(config))
    whole, part = evaluation.tables_of([model], held), evaluation.contribution_of([model], held)
    assert whole.sum(axis=3).tolist() == [[[10, 4], [5, 2]]]
    assert part.values.sum(axis=3).tolist() == [[[10, 0], [5, 0]]]  # two controls are below min_donors
    assert (part.donors, part.cells, part.withheld) == (5, 50, 1)


def test_a_clinic_and_a_control_cohort_train_together():
    data = {"clinic": site(0, ["case"] * 4), "cohort": site(1, ["control"] * 4)}
    assert train_cellcnn.check(data["clinic"], train_cellcnn.Options())[0].startswith("all donors here are 'case'")
    run = rehearse("train-cellcnn", data=data, n_steps=40, **HELD, positive_class="case", **COMMON)
    assert table(run.results["clinic"]["confusion_of_donors"]) == [[2, 0], [0, 2]]
    new = site(5, ["case", "control"] * 3)
    X = np.stack([run.model.prepare(new.X[(new.obs["donor"] == f"d{i}").to_numpy()]).mean(axis=0) for i in range(6)])
    assert run.model.predict(X) == ["case", "control"] * 3  # what neither could learn alone
    with pytest.raises(ProtocolAbort, match="two classes"):
        rehearse("train-cellcnn", data={p: site(i, ["case"] * 4) for i, p in enumerate(SITES)}, n_steps=2, **COMMON)


@pytest.mark.parametrize(
    ("preset", "classes", "donors", "steps", "total", "n_inputs"),
    [  # [SAV22] supplementary note 3: inputs over all sites, batch over all sites, epochs
        ("cmv", 2, 14, 2 * 2000 // 200 * 20, 200, 2000),
        ("aml", 3, 7, 3 * 1000 // 200 * 20, 200, 1000),
        ("rrms-class", 2, 48, -(-30000 // 64) * 30, 64, 15000),
        ("rrms-donor", 2, 48, -(-480 // 64) * 30, 64, 10),
    ],
)
def test_presets_are_the_papers_whatever_the_number_of_sites(preset, classes, donors, steps, total, n_inputs):
    for n in (2, 4, 6):
        made = settled(train_cellcnn.Options(preset=preset), n, classes, donors)
        assert made.n_steps == steps
        assert made.batch == total // n
        assert made.n_inputs == (n_inputs if preset == "rrms-donor" else n_inputs // n)  # per donor: not divided
    assert settled(train_cellcnn.Options(preset="aml"), 2, 3).n_steps == 300
    local = settled(train_cellcnn.Options(preset="aml", n_local=3), 2, 3)
    assert (local.batch, local.n_steps) == (300, 100)  # three batches before each aggregation
    assert settled(train_cellcnn.Options(preset="rrms-donor"), 4, 2, 48).n_steps == 240


def test_a_preset_that_draws_per_donor_counts_those_of_all_sites_by_a_sum(monkeypatch):
    asked = []
    monkeypatch.setattr(
        train_cellcnn, "train", lambda session, options, model, inputs, k=0: asked.append(model) or model
    )
    data = sites(("case", "control") * 4) | {"vienna": site(2, ["case", "control"] * 5)}
    run = rehearse("train-cellcnn", data=data, preset="rrms-donor", **HELD, min_donors=2, mode="plain")
    assert {m.config.steps for m in asked} == {-(-10 * (4 + 4 + 6) // 64) * 30}  # without those held out
    opened = [e.name for e, _ in run.receipts["coordinator"].entries if e.kind == "opened" and "donors" in e.name]
    assert opened == ["donors to train on, of all sites"] * 4  # to each party
    before = len(asked)
    run = rehearse("train-cellcnn", data=sites(("case", "control", "severe")), preset="aml", mode="plain")
    assert {m.config.steps for m in asked[before:]} == {300}
    assert not any(e.protocol == "pooled_counts" for e in run.events)


def test_baselines_on_the_same_held_out_donors():
    pytest.importorskip("torch")
    data = sites() | {"vienna": site(2, ["case"] * 4)}
    options = {k: v for k, v in COMMON.items() if k != "mode"} | {"n_steps": 40, "positive_class": "case"}
    made = cellcnn_baselines(data, hold_out=1, per="class", **options)
    simple = ("mean expression", "logistic regression", "cluster proportions")
    assert [*made] == ["pooled", *(f"{p} alone" for p in SITES), "pooled, max pooling", *simple]
    for name in ("pooled", "pooled, max pooling", *simple):
        assert made[name]["donors"]["accuracy"] == 1.0, name
    alone = made["vienna alone"]["donors"]  # it has seen no control
    assert alone["recall"] == 1.0
    assert alone["accuracy"] == 3 / 5
    assert all([*made[name]] == ["donors"] for name in simple)
    with pytest.raises(ParameterError, match="held out"):
        cellcnn_baselines(data, **options)


def test_proportions_of_clusters_find_cells_that_do_not_change_the_mean():
    def balanced(seed):
        rng = np.random.default_rng(seed)
        made = site(seed, ["control"] * 8)
        case = np.repeat(np.arange(8) % 2 == 0, 60)
        made.X = rng.normal(0, 0.3, made.shape).astype(np.float32)
        made.X[case, 1] += np.tile([3.0, -3.0, 0.0, 0.0], 120)[: case.sum()]
        made.obs["condition"] = np.where(case, "case", "control")
        return made

    data = {name: balanced(i) for i, name in enumerate(SITES)}
    options = {k: v for k, v in COMMON.items() if k != "mode"} | {"n_steps": 5, "per": "class"}
    made = cellcnn_baselines(data, hold_out=2, max_pooling=False, **options)
    assert made["cluster proportions"]["donors"]["accuracy"] == 1.0
    assert made["mean expression"]["donors"]["accuracy"] < 0.8


def test_what_a_site_contributes_rests_on_enough_donors_whatever_the_others_bring():
    def far(a):
        a = a.copy()
        a.X = a.X * 1e3
        return a

    def one_class(a):
        return a[a.obs["condition"] == "case"].copy()

    options = {k: v for k, v in COMMON.items() if k not in ("mode", "min_donors")}
    options |= {"n_steps": 2, "scaling": "none", "hold_out": 3}
    data = sites(("case", "control") * 6)
    found = check_disclosure("train-cellcnn", data, "basel", attacks=[far, one_class], mode="plain", **options)
    assert found.runs == 3
    assert (found.cells, found.donors) == (180, 3)  # of 60 cells each


def test_an_opened_model_comes_with_a_warning():
    parties = {"hub": "coordinator", "a": "site", "b": "site", "c": "site"}
    keys = {"sample_key": "donor", "target_key": "condition"}
    opened = Study("x", "train-cellcnn", parties, parameters={**keys, "open_model": True})
    assert any("one malicious site can steer the opened weights" in note for note in workflows.warnings_of(opened))
    closed = Study("x", "train-cellcnn", parties, parameters={**keys, "keep": "keys"})
    assert workflows.warnings_of(closed) == []
