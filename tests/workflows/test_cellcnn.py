"""train-cellcnn and predict-cellcnn on generated donors."""

import numpy as np
import pandas as pd
import pytest

from cloister.cells.demo import demo_donors
from cloister.errors import DataError, ParameterError, ProtocolAbort, RefusedError
from cloister.models import cellcnn
from cloister.rehearsal.rehearsal import plan, rehearse, run_parties
from cloister.rehearsal.run import workflow_part
from cloister.study import Party, Study
from cloister.workflows import check_plan
from cloister.workflows.predict_cellcnn import cellcnn_card
from cloister.workflows.train_cellcnn import figures as cellcnn_report
from cloister.workflows.train_cellcnn import workflow as train_cellcnn
from cloister.workflows.train_cellcnn.response import clusters, selected

ad = pytest.importorskip("anndata")
SITES = ("basel", "lugano", "vienna")


def site(seed, donors=4, cells=60, markers=("CD3", "CD16", "CD57"), drop=None):
    """Donors of two classes; in 'case', a third of the cells is high in CD57 and CD16."""
    rng = np.random.default_rng(seed)
    X, donor, condition = [], [], []
    for d in range(donors):
        x = rng.normal(0, 1, (cells, len(markers)))
        if d % 2:
            x[: cells // 3, 1:] += 3.0
        X.append(x)
        donor += [f"d{seed}-{d}"] * cells
        condition += ["case" if d % 2 else "control"] * cells
    names = [f"c{i}" for i in range(donors * cells)]
    obs = pd.DataFrame({"donor": donor, "condition": condition}, index=names)
    made = ad.AnnData(np.concatenate(X).astype(np.float32), obs=obs, var=pd.DataFrame(index=list(markers)))
    return made if drop is None else made[:, [m for m in markers if m != drop]].copy()


def sites(**options):
    return {name: site(i, **options) for i, name in enumerate(SITES)}


COMMON = {"n_filters": 3, "n_cells": 40, "n_inputs": 30, "batch": 16, "learning_rate": 0.3, "min_donors": 2}
HELD = {"hold_out": 2}


def test_the_clear_twin_learns_and_writes_its_results():
    run = rehearse("train-cellcnn", data=sites(), mode="plain", n_steps=40, **COMMON)
    for name in SITES:
        assert run.results[name]["donor_accuracy"] == 1.0
        assert run.results[name]["logits_outside_interval"] <= run.results[name]["logits"]
        assert ("warning" in run.results[name]) == (run.results[name]["logits_outside_interval"] > 0)
        obs = run.data[name].obs
        case = obs["condition"] == "case"
        assert "cellcnn_response" in obs
        assert run.data[name].uns["cloister"]["cellcnn"]["filters"].shape == (3, 3)
        assert case.any()
    again = cellcnn.Model.from_json(run.model.to_json())
    np.testing.assert_array_equal(again.weights.W, run.model.weights.W)
    X, donors, truth = cellcnn_report.donor_means(again, site(9), "donor", "condition")
    assert again.predict(X) == truth
    assert len(donors) == 4


def test_figures_of_an_opened_model():
    pytest.importorskip("matplotlib")
    run = rehearse("train-cellcnn", data=sites(), mode="plain", n_steps=5, **COMMON)
    drawn = cellcnn_report.figures(run.outcomes, train_cellcnn.Options())
    assert [f["title"] for f in drawn[1:3]] == [f"Cells selected by the filter for {c}" for c in ("control", "case")]
    assert [f["title"] for f in drawn[3:]] == [
        f"{x} of the cells selected for control" for x in ("Markers", "Clusters")
    ]
    assert drawn[3]["alt"].startswith("Histograms of 3 standardised markers")
    first = cellcnn_report.figures(run.outcomes, train_cellcnn.Options(positive_class="case"))[1]
    assert first["title"] == "Cells selected by the filter for case"


def test_the_demo_finds_its_planted_cells_and_only_for_the_class_that_has_them():
    """The alphabetically last class, `control`, has almost none of the planted cells: what was reported before."""
    options = {"n_steps": 4, "n_filters": 4, "n_cells": 100, "learning_rate": 0.4, "positive_class": "case"}
    run = rehearse("train-cellcnn", data=demo_donors(), mode="plain", **options)
    tables = [*run.data.values()]
    planted = np.concatenate([(a.obs["population"] == "CD16+_NK_cells").to_numpy() for a in tables])
    found = {c: planted[np.concatenate(selected(tables, c))].mean() for c in ("case", "control")}
    assert found["case"] > 5 * planted.mean()  # 0.45 where 0.065 of all cells are
    assert found["control"] < planted.mean() / 2  # 0.01
    for a in tables:
        assert a.uns["cloister"]["cellcnn"]["positive_class"] == "case"
        np.testing.assert_array_equal(a.obs["cellcnn_response"], a.obsm["cellcnn_responses"][:, 0])
        kinds = a.obs["cellcnn_cluster"]
        np.testing.assert_array_equal(kinds != "", selected([a], "case")[0])
        inside = (a.obs["population"] == "CD16+_NK_cells").groupby(kinds).mean()
        assert inside.drop("").max() > 0.7  # of all selected cells it is 0.45
        assert inside.drop("").min() == 0  # other kinds have clusters of their own


def test_clusters_are_the_dense_parts_whatever_their_density_and_number_of_cells():
    rng = np.random.default_rng(7)
    Z = rng.normal(0, 1, (6000, 8))
    Z[:2000, :2] += 8.0
    Z[2000:2600, 0] -= 9.0
    Z[2000:2600] *= 0.5
    truth = np.repeat([1, 2, 0], [2000, 600, 3400])  # by size
    assert (clusters(Z) == truth).mean() > 0.99
    np.testing.assert_array_equal(clusters(Z[2600:4600]), 0)
    np.testing.assert_array_equal(clusters(Z[:2]), 0)


def test_a_positive_class_that_nobody_has_ends_before_any_training():
    sent = []
    with pytest.raises(ParameterError, match="'positive_class' must be one of case, control"):
        rehearse(
            "train-cellcnn",
            data=sites(),
            mode="plain",
            n_steps=2,
            positive_class="cases",
            on_event=sent.append,
            **COMMON,
        )
    assert not any(e.protocol == "clear_training" for e in sent)


def test_pooled_scaling_or_reference_values():
    options = {"mode": "plain", "n_steps": 3, **COMMON}
    pooled = rehearse("train-cellcnn", data=sites(), **options)
    every = np.concatenate([a.X for a in sites().values()])
    np.testing.assert_allclose(pooled.model.mean, every.mean(0), atol=1e-4)
    fixed = rehearse(
        "train-cellcnn",
        data=sites(),
        scaling="reference",
        reference_mean=(0.0, 0.0, 0.0),
        reference_scale=(1.0, 1.0, 1.0),
        **options,
    )
    assert fixed.model.mean.tolist() == [0.0, 0.0, 0.0]
    assert not any("pooled_scaling" in e.protocol or e.protocol == "secure_sum" for e in fixed.events)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: a[:, :0].copy(), "genes"),
        (lambda a: ad.AnnData(a.X, obs=a.obs[["donor"]], var=a.var), "condition"),
    ],
)
def test_bad_input_is_refused_before_anything_is_sent(change, message):
    data = sites()
    data["vienna"] = change(data["vienna"])
    with pytest.raises(DataError, match=message):
        rehearse("train-cellcnn", data=data, mode="plain", n_steps=2, **COMMON)


def test_a_donor_of_two_classes_is_refused():
    a = site(0)
    a.obs["donor"] = "same"
    with pytest.raises(DataError, match="several classes"):
        train_cellcnn.check(a, train_cellcnn.Options())


def test_one_donor_per_class_is_told():
    notes = train_cellcnn.check(site(0, donors=3), train_cellcnn.Options(per="class"))
    assert sum("one donor" in n for n in notes) == 1
    notes = train_cellcnn.check(site(0, donors=5), train_cellcnn.Options())
    assert [n for n in notes if "class" in n] == [
        "class 'case' has 2 donors here, fewer than a group of min_donors=3: they are not used"
    ]


def test_a_site_of_too_few_donors_or_cells_is_refused_before_anything_is_sent():
    sent = []
    data = sites() | {"vienna": site(2, donors=2)}
    with pytest.raises(DataError, match="no class has min_donors = 2 donors with min_cells = 10 cells at this site"):
        rehearse("train-cellcnn", data=data, mode="plain", n_steps=2, on_event=sent.append, **COMMON)
    assert not any(e.protocol in ("cellcnn_terms", "pooled_scaling", "secure_sum") for e in sent)
    with pytest.raises(DataError, match="9 cells to train on here, fewer than min_cells = 10"):
        train_cellcnn.check(site(0, donors=3, cells=3), train_cellcnn.Options(per="class"))
    with pytest.raises(DataError, match="of 2 donors here"):
        train_cellcnn.check(site(0, donors=8), train_cellcnn.Options(hold_out=3, per="class"))  # two are left
    with pytest.raises(DataError, match="class 'case' has too few donors at this site to hold out 3 of them"):
        train_cellcnn.check(site(0, donors=10), train_cellcnn.Options(hold_out=3))  # one group of five
    train_cellcnn.check(site(0, donors=12), train_cellcnn.Options(hold_out=3))
    train_cellcnn.check(site(0, donors=2), train_cellcnn.Options(scaling="none", per="class"))  # nothing is opened


def test_a_sites_own_settings_raise_the_thresholds():
    least = train_cellcnn.Thresholds(10, 5)
    train_cellcnn.check_thresholds(site(0, donors=5), train_cellcnn.Options(), least)
    with pytest.raises(DataError, match="fewer than min_donors = 5"):
        train_cellcnn.check_thresholds(site(0, donors=4), train_cellcnn.Options(), least)
    with pytest.raises(DataError, match="hold_out=3 donors per class are fewer than min_donors = 5"):
        train_cellcnn.check_held_out(train_cellcnn.Options(hold_out=3), least)


def test_a_marker_that_one_site_lacks_is_named():
    data = sites()
    data["vienna"] = site(2, drop="CD16")
    with pytest.raises(ProtocolAbort, match="CD16"):
        rehearse("train-cellcnn", data=data, mode="plain", n_steps=2, **COMMON)


def planned(**options):
    return check_plan(plan("train-cellcnn", SITES, mode=options.pop("mode", "hardened"), options=options))[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "lost"),
        ({"mode": "published"}, "ends by opening"),
        ({"keep": "x", "n_models": 3, "hold_out": 3}, "open_model"),
        ({"keep": "x", "hold_out": 2}, "hold_out=2 donors per class at each site are fewer than min_donors=3"),
        ({"mode": "plain", "n_models": 3}, "hold_out"),
        ({"mode": "plain", "scaling": "reference"}, "reference"),
        (
            {"mode": "published", "validate_every": 2, "hold_out": 1, "open_model": True},
            "'published' has no validation",
        ),
        ({"mode": "plain", "patience": 2}, "validate_every=1"),
        ({"keep": "x", "validate_every": 2}, "hold_out"),
        ({"keep": "x", "hold_out": -1}, "at least 0"),
        ({"mode": "plain", "encrypted": False}, "'encrypted' any more: training in the clear is mode 'plain'"),
    ],
)
def test_options_that_do_not_go_together_or_with_the_mode(options, message):
    with pytest.raises(ParameterError, match=message):
        planned(**options)


def test_best_of_several_models_and_their_consensus():
    options = {"n_models": 5, "n_steps": 40, **HELD, **COMMON}
    run = rehearse("train-cellcnn", data=sites(donors=8), mode="plain", **options)
    found = run.results["basel"]
    assert len(found["validation_accuracy"]) == 5
    assert all(run.results[p]["validation_accuracy"] == found["validation_accuracy"] for p in ("coordinator", *SITES))
    assert max(found["validation_accuracy"]) > 0.95
    assert run.model.config.filters == 3 + int(np.argmax(found["validation_accuracy"]))
    W, V = np.array(found["consensus_filters"]), np.array(found["consensus_dense"])
    assert W.shape[1] == 3
    assert V.shape == (len(W), 2)
    assert len(W) < 3 * 9  # clusters, not a list of all filters
    best = W[(V[:, 0] - V[:, 1]).argmax()]  # classes in order: case, control
    assert abs(best[0]) < max(best[1], best[2])  # CD16 and CD57 are what tells them apart
    opened = [e.name for e, _ in run.receipts["coordinator"].entries if e.kind == "opened"]
    assert any("sum" in name for name in opened)


def test_held_out_donors_are_not_trained_on(monkeypatch):
    seen = []
    drawn = cellcnn.draw_inputs
    monkeypatch.setattr(
        cellcnn, "draw_inputs", lambda x, names, *a, **k: seen.append(set(names)) or drawn(x, names, *a, **k)
    )
    run = rehearse("train-cellcnn", data=sites(donors=8), mode="plain", n_steps=3, per="class", **HELD, **COMMON)
    assert len(run.results["basel"]["validation_accuracy"]) == 1
    assert len(seen) == 6  # twice at each site: for training, then for validation
    assert all(len(s) == 4 for s in seen)  # of eight donors in two classes, two of each are held out
    assert len(set().union(*seen)) == 24
    with pytest.raises(DataError, match="hold out"):
        rehearse("train-cellcnn", data=sites(), mode="plain", n_steps=3, **HELD, **COMMON)


def test_a_site_whose_own_settings_do_not_consent_opens_nothing():
    study = plan("train-cellcnn", SITES, timeout=10, options={"n_steps": 2, "open_model": True, **COMMON})
    consent = {Party("basel"): frozenset({"open-model"}), Party("vienna"): frozenset({"validation"})}
    data = {Party(p): a for p, a in sites().items()}
    run = run_parties(study, dict.fromkeys(study.parties, workflow_part), data, consent=consent)
    assert isinstance(run.errors["vienna"], RefusedError)
    assert "open-model" in str(run.errors["vienna"])
    assert set(run.errors) == set(study.parties)
    sent = [e.name for e, _ in run.receipts["vienna"].entries if e.kind == "sent" and not e.name.startswith("channel.")]
    assert sent == []


def test_local_iterations_add_up_before_an_aggregation():
    """Two batches of eight are one of sixteen: the model is the same to the bit, in as many aggregations."""
    once, twice = (
        rehearse("train-cellcnn", data=sites(), mode="plain", n_steps=3, **COMMON | {"batch": batch, "n_local": local})
        for batch, local in ((16, 1), (8, 2))
    )
    np.testing.assert_array_equal(once.model.weights.W, twice.model.weights.W)
    with pytest.raises(ParameterError, match="n_local"):
        train_cellcnn.Options(n_local=0)


def two(**options):
    return {name: a for name, a in sites(**options).items() if name != "vienna"}


def outside(folder, **options):
    """A study in which vienna, which trained nothing, asks the opened model of the two others."""
    pytest.importorskip("numba")
    rehearse("train-cellcnn", data=two(), mode="plain", n_steps=20, keep=str(folder), **COMMON)
    return {"query": "vienna", "keep": str(folder), "opened": True, "outside": True} | options


def test_who_trained_nothing_asks_an_opened_model(tmp_path):
    options = outside(tmp_path)
    assert not (tmp_path / "vienna").exists()
    run = rehearse("predict-cellcnn", data=sites(), **options)
    rows = run.results["vienna"]["predictions"]
    assert [r["class"] for r in rows] == ["control", "case"] * 2
    assert not (tmp_path / "vienna").exists()
    assert run.results["basel"] == {}


DRAWN = [{"per": "donor"}, {"per": "class"}, {"preset": "rrms-donor"}, {"preset": "cmv"}]


@pytest.mark.parametrize("drawn", DRAWN)
@pytest.mark.parametrize("end", [{"open_model": True}, {"keep": "keys"}])  # queries depend on the weights, too
def test_drawn_inputs_are_trained_on_only_with_a_consent_of_its_own(drawn, end):
    options = {**COMMON, "n_steps": 2, **end, **drawn}
    study = plan("train-cellcnn", SITES, timeout=10, options=options)
    consent = dict.fromkeys(map(Party, SITES), frozenset({"open-model"}))
    data = {Party(p): a for p, a in sites().items()}
    run = run_parties(study, dict.fromkeys(study.parties, workflow_part), data, consent=consent)
    refused = [e for e in run.errors.values() if isinstance(e, RefusedError)]
    assert refused
    assert "donor-inputs" in str(refused[0])
    assert not any(run.results.get(p) for p in SITES)


def test_an_outsider_is_answered_by_nobody_if_one_site_does_not_consent(tmp_path):
    study = plan("predict-cellcnn", SITES, timeout=10, options=outside(tmp_path))
    consent = {Party("basel"): frozenset({"outside-query"}), Party("lugano"): frozenset({"open-model"})}
    data = {Party(p): a for p, a in sites().items()}
    run = run_parties(study, dict.fromkeys(study.parties, workflow_part), data, consent=consent)
    assert isinstance(run.errors["lugano"], RefusedError)
    assert set(run.errors) == set(study.parties)
    sent = [e.name for p in study.parties for e, _ in run.receipts[p].entries if e.kind == "sent"]
    assert not any("private_prediction" in name for name in sent)


def test_an_outsider_that_was_not_agreed_in_the_study_is_refused(tmp_path):
    options = outside(tmp_path, outside=False, query="basel")
    study = plan("predict-cellcnn", SITES, timeout=10, options=options)

    def rogue(session, adata):
        """Asks for the card all the same."""
        return session.run(
            cellcnn_card.querier, cellcnn_card.Params(session.sites[:2], session.coordinator, session.me)
        )

    parts = dict.fromkeys(study.parties, workflow_part) | {Party("vienna"): rogue}
    run = run_parties(study, parts, {Party(p): a for p, a in sites().items()})
    assert "vienna" in run.errors
    assert not any(
        "cellcnn_card" in e.name for p in study.parties for e, _ in run.receipts[p].entries if e.kind == "sent"
    )
    with pytest.raises(ParameterError, match="not a site of the study"):
        check_plan(plan("predict-cellcnn", SITES, options=options | {"query": "geneva", "outside": True}))
    with pytest.raises(ParameterError, match="two sites or more"):
        check_plan(plan("predict-cellcnn", SITES[:2], options=options | {"outside": True}))
    again = {"query": "lugano", "keep": str(tmp_path / "three"), "outside": True}  # who trained is not outside
    rehearse("train-cellcnn", data=sites(), mode="plain", n_steps=1, keep=again["keep"], **COMMON)
    with pytest.raises(DataError, match="that basel, vienna trained together"):
        rehearse("predict-cellcnn", data=sites(), **again)


def refused(folder):
    """Eight donors were answered; three markers allow one, unless every site consents to more."""
    study = plan("predict-cellcnn", SITES[:2], timeout=10, options={"query": "lugano", "keep": str(folder)})
    consent = dict.fromkeys(study.parties, frozenset({"open-model"}))
    run = run_parties(study, dict.fromkeys(study.parties, workflow_part), two(), consent=consent)
    assert isinstance(run.errors["basel"], RefusedError)
    assert "8 donors of the querying site were answered" in str(run.errors["basel"])
    sent = [e.name for e, _ in run.receipts["basel"].entries if e.kind == "sent" and not e.name.startswith("channel.")]
    assert sent == []


@pytest.mark.slow
def test_validation_during_training_then_prediction(tmp_path):
    pytest.importorskip("numba")
    options = {"n_steps": 2, **HELD, **COMMON}
    kept = {"validate_every": 2, "keep": str(tmp_path), "timeout": 300}
    run = rehearse("train-cellcnn", data=two(donors=8), **kept, **options)
    losses = {p: run.results[p]["validation_loss"] for p in ("coordinator", "basel", "lugano")}
    assert all(found.keys() == {"2"} and found == losses["basel"] for found in losses.values())
    assert 0 < losses["basel"]["2"] < 0.3
    assert not run.results["basel"]["opened"]
    asked = rehearse("predict-cellcnn", data=two(), query="lugano", keep=str(tmp_path), timeout=300)
    assert len(asked.results["lugano"]["predictions"]) == 4
    refused(tmp_path)
    outsider = rehearse(
        "predict-cellcnn", data=sites(), query="vienna", outside=True, keep=str(tmp_path), max_donors=4, timeout=300
    )
    assert len(outsider.results["vienna"]["predictions"]) == 4
    assert not (tmp_path / "vienna").exists()


@pytest.mark.slow
def test_published_training_as_a_workflow(tmp_path):
    pytest.importorskip("numba")
    options = {**COMMON, "n_filters": 2, "batch": 8, "n_steps": 2}
    kept = {"mode": "published", "open_model": True, "keep": str(tmp_path), "timeout": 300}
    run = rehearse("train-cellcnn", data=two(), **kept, **options)
    twin = rehearse("train-cellcnn", data=two(), mode="plain", **options)
    np.testing.assert_allclose(run.model.weights.W, twin.model.weights.W, atol=1e-3)
    np.testing.assert_allclose(run.model.weights.V, twin.model.weights.V, atol=1e-3)
    again = rehearse("train-cellcnn", data=two(), **kept, **options)  # finished: only opened once more
    names = [e.name for e, _ in again.receipts["basel"].entries if e.kind == "sent"]
    assert not any("Packed" in n or "KeyShare" in n for n in names)
    np.testing.assert_allclose(again.model.weights.W, twin.model.weights.W, atol=1e-3)
    asked = {"query": "vienna", "outside": True, "opened": True, "keep": str(tmp_path)}
    assert len(rehearse("predict-cellcnn", data=sites(), **asked).results["vienna"]["predictions"]) == 4


@pytest.mark.slow
def test_encrypted_training_then_prediction_both_ways(tmp_path):
    pytest.importorskip("numba")
    options = {"n_steps": 4, "keep": str(tmp_path), "open_model": True, **COMMON}
    run = rehearse("train-cellcnn", data=sites(), timeout=300, **options)
    parts = [e.name for e, _ in run.receipts["basel"].entries if e.kind == "contributed" and "inputs" in e.name]
    assert parts == ["inputs to train on | cells 120 | donors 2"]  # two donors of 60 cells are behind every input
    twin = rehearse("train-cellcnn", data=sites(), mode="plain", **{**options, "keep": "", "open_model": False})
    np.testing.assert_allclose(run.model.weights.W, twin.model.weights.W, atol=1e-3)
    np.testing.assert_allclose(run.model.weights.V, twin.model.weights.V, atol=1e-3)
    wanted = {}
    for opened in (False, True):
        asked = rehearse(
            "predict-cellcnn", data=sites(), query="vienna", keep=str(tmp_path), opened=opened, timeout=300
        )
        wanted[opened] = asked.results["vienna"]["predictions"]
        assert asked.results["basel"] == {}
        assert set(asked.data["vienna"].obs["predicted"]) <= {"case", "control"}
        assert "predicted" not in asked.data["basel"].obs
    X, _, _ = cellcnn_report.donor_means(twin.model, sites()["vienna"], "donor")
    scores = cellcnn.sigmoid(twin.model.config, twin.model.logits(X)).max(axis=1)
    for rows in wanted.values():
        np.testing.assert_allclose([r["score"] for r in rows], scores, atol=1e-3)


def test_batches_of_few_donors_and_inputs_of_few_cells_are_refused():
    """Whatever the scaling is: a step's gradient can be separated from the others."""
    names = np.repeat(["a", "b", "c"], 20)
    inputs = [np.arange(20) + 20 * d for d in range(3)]
    least = train_cellcnn.Thresholds(10, 3)
    train_cellcnn.check_batches(inputs, names, np.array([[0, 1, 2], [2, 1, 0]]), least)
    with pytest.raises(DataError, match="a batch is based on 2 donors, fewer than min_donors = 3"):
        train_cellcnn.check_batches(inputs, names, np.array([[0, 1, 2], [2, 1, 1]]), least)
    with pytest.raises(DataError, match="the mean of 9 different cells, fewer than min_cells = 10"):
        train_cellcnn.check_batches([*inputs, np.arange(9).repeat(3)], names, np.array([[0, 1, 2]]), least)
    options = {"scaling": "none", "open_model": True, "n_steps": 1, "n_inputs": 4, "batch": 4, "per": "class"}
    with pytest.raises(DataError, match="a batch is based on 2 donors"):
        rehearse("train-cellcnn", data=sites(donors=2), mode="hardened", **options)


def test_a_study_that_opens_tables_of_held_out_donors_says_what_two_tables_show():
    parties = {"hub": "coordinator", **dict.fromkeys(SITES, "site")}
    study = Study("t", "train-cellcnn", parties)
    options = train_cellcnn.Options(open_model=True, hold_out=3, n_models=4)
    (_, note) = train_cellcnn.warnings(study, options)
    assert "can differ by one donor; this study opens 4 table(s)" in note
    assert len(train_cellcnn.warnings(study, train_cellcnn.Options(open_model=True))) == 1
