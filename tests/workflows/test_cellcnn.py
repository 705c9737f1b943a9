"""train-cellcnn and predict-cellcnn on generated donors."""

import numpy as np
import pandas as pd
import pytest

from cloister.errors import DataError, ParameterError, ProtocolAbort
from cloister.models import cellcnn
from cloister.rehearsal import rehearse
from cloister.workflows import train_cellcnn

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


COMMON = {"n_filters": 3, "n_cells": 40, "n_inputs": 30, "batch": 16, "learning_rate": 0.3}


def test_the_clear_twin_learns_and_writes_its_results():
    run = rehearse("train-cellcnn", data=sites(), encrypted=False, n_steps=40, **COMMON)
    for name in SITES:
        assert run.results[name]["donor_accuracy"] == 1.0
        assert run.results[name]["logits_outside_interval"] <= run.results[name]["logits"]
        obs = run.data[name].obs
        case = obs["condition"] == "case"
        assert "cellcnn_response" in obs
        assert run.data[name].uns["cloister"]["cellcnn"]["filters"].shape == (3, 3)
        assert case.any()
    again = cellcnn.Model.from_json(run.model.to_json())
    np.testing.assert_array_equal(again.weights.W, run.model.weights.W)
    X, donors, truth = train_cellcnn.donor_means(again, site(9), "donor", "condition")
    assert again.predict(X) == truth
    assert len(donors) == 4


def test_figures_of_an_opened_model():
    pytest.importorskip("matplotlib")
    run = rehearse("train-cellcnn", data=sites(), encrypted=False, n_steps=5, **COMMON)
    drawn = train_cellcnn.figures(run.outcomes, train_cellcnn.Options(encrypted=False))
    assert len(drawn) == 4


def test_pooled_scaling_or_reference_values():
    options = {"encrypted": False, "n_steps": 3, **COMMON}
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
        (lambda a: a[a.obs["condition"] == "case"].copy(), "two classes"),
        (lambda a: a[:, :0].copy(), "genes"),
        (lambda a: ad.AnnData(a.X, obs=a.obs[["donor"]], var=a.var), "condition"),
    ],
)
def test_bad_input_is_refused_before_anything_is_sent(change, message):
    data = sites()
    data["vienna"] = change(data["vienna"])
    with pytest.raises(DataError, match=message):
        rehearse("train-cellcnn", data=data, encrypted=False, n_steps=2, **COMMON)


def test_a_donor_of_two_classes_is_refused():
    a = site(0)
    a.obs["donor"] = "same"
    with pytest.raises(DataError, match="several classes"):
        train_cellcnn.check(a, train_cellcnn.Options(encrypted=False))


def test_one_donor_per_class_is_told():
    notes = train_cellcnn.check(site(0, donors=2), train_cellcnn.Options(encrypted=False))
    assert sum("one donor" in n for n in notes) == 2


def test_a_marker_that_one_site_lacks_is_named():
    data = sites()
    data["vienna"] = site(2, drop="CD16")
    with pytest.raises(ProtocolAbort, match="CD16"):
        rehearse("train-cellcnn", data=data, encrypted=False, n_steps=2, **COMMON)


def test_options():
    with pytest.raises(ParameterError, match="lost"):
        train_cellcnn.Options()
    with pytest.raises(ParameterError, match="reference"):
        train_cellcnn.Options(encrypted=False, scaling="reference")
    preset = train_cellcnn.settled(train_cellcnn.Options(encrypted=False, preset="cmv"), 5)
    assert (preset.n_cells, preset.n_inputs, preset.batch, preset.n_steps) == (200, 400, 40, 400)


@pytest.mark.slow
def test_encrypted_training_then_prediction_both_ways(tmp_path):
    pytest.importorskip("seal")
    options = {"n_steps": 4, "keep": str(tmp_path), "open_model": True, **COMMON}
    run = rehearse("train-cellcnn", data=sites(), timeout=300, **options)
    twin = rehearse("train-cellcnn", data=sites(), encrypted=False, **{**options, "keep": "", "open_model": False})
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
    X, _, _ = train_cellcnn.donor_means(twin.model, sites()["vienna"], "donor")
    scores = cellcnn.sigmoid(twin.model.config, twin.model.logits(X)).max(axis=1)
    for rows in wanted.values():
        np.testing.assert_allclose([r["score"] for r in rows], scores, atol=1e-3)
