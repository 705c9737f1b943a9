import json
import math
import stat
from pathlib import Path

import numpy as np
import pytest
from anndata import AnnData

torch = pytest.importorskip("torch")

from cloister.cells import demo as demo_data  # noqa: E402
from cloister.errors import DataError, ParameterError, ProtocolAbort  # noqa: E402
from cloister.models.classifier import make  # noqa: E402
from cloister.models.learner import Learner, Recipe  # noqa: E402
from cloister.models.linear import hold_out  # noqa: E402
from cloister.models.scgpt import Config, ScGPT  # noqa: E402
from cloister.papers import federated_training  # noqa: E402
from cloister.rehearsal.check_disclosure import check_disclosure  # noqa: E402
from cloister.rehearsal.rehearsal import Fault, rehearse  # noqa: E402
from cloister.workflows.embed import embed  # noqa: E402
from cloister.workflows.fine_tune import checked_training  # noqa: E402
from cloister.workflows.fine_tune import workflow as fine_tune  # noqa: E402
from cloister.workflows.fine_tune.training_parts import Offer  # noqa: E402
from cloister.workflows.saved_models import load_model  # noqa: E402
from cloister.workflows.saved_models.fine_tuned import FineTuned  # noqa: E402

PLAIN = {"algorithm": "scaffold", "weighting": "plain", "optimizer": "sgd", "momentum": 0.0}
SIZE = {"use_rep": "X_pca", "rounds": 4, "lr": 1e-2, "local_epochs": 3, "hidden": (16,), "batch_size": 32}
SIZE["mode"] = "published"
HARDENED = {"use_rep": "X_pca", "rounds": 10, "hidden": (16,), "lr": 0.06}  # the default mode
OPTIONS = {k: v for k, v in SIZE.items() if k != "mode"}


@pytest.fixture(scope="module")
def sites():
    rng = np.random.default_rng(0)
    out = {}
    for name, a in demo_data.demo_sites().items():
        out[name] = a[np.sort(rng.choice(a.n_obs, 150, replace=False))].copy()
    return out


@pytest.fixture(scope="module")
def run(sites):
    return rehearse("fine-tune", sites, **SIZE)


def test_learns_writes_and_says_so(sites, run):
    a = run.data["basel"]
    assert {"predicted", "predicted_confidence"} <= set(a.obs)
    right = np.mean(
        [np.mean(d.obs["predicted"].astype(str) == d.obs["cell_type"].astype(str)) for d in run.data.values()]
    )
    assert right > 0.75
    said = json.loads(a.uns["predicted"])
    assert said["history"][-1]["accuracy"] > said["history"][0]["accuracy"]
    assert said["history"] == run.results["coordinator"]["history"]
    assert said["labels"] == sorted({str(v) for s in sites.values() for v in s.obs["cell_type"]})


def test_equals_plain_federated_averaging(sites):
    """The same learners without any encoding or mask: the secure sum changes nothing but the last digits."""
    options = {**SIZE, "score_every": 0, "validation": 0.0}
    run = rehearse("fine-tune", sites, **options)
    labels = tuple(run.results["basel"]["labels"])
    chosen = fine_tune.in_mode(fine_tune.Options(**{k: v for k, v in options.items() if k != "mode"}), "published")
    offers, found = {}, None
    for name in sorted(sites):
        examples, blueprint, _ = fine_tune.examples_of(sites[name], chosen)
        codes = np.array([labels.index(str(v)) for v in sites[name].obs["cell_type"]])

        def build(labels, examples=examples, blueprint=blueprint, codes=codes, name=name):
            held = hold_out(codes, 0.0, np.random.default_rng(0))
            recipe = Recipe(3, 32, "adam", 0.9, 0.0, 0.0, 0)
            return Learner(
                make(blueprint, labels), len(labels), recipe, examples, codes, held,
                describe=blueprint.describe(labels), site=name,
            )  # fmt: skip

        offers[name] = Offer("", labels, build)
        found = found or build(labels)
    params = federated_training.Params(tuple(sorted(sites)), "coordinator", "", rounds=4, rate=1e-2, labels=labels)
    wanted = found.first.numpy() + federated_training.ideal(params, offers)["basel"]
    mine = torch.cat([p.detach().reshape(-1) for p in run.outcomes["basel"].model.module.parameters()]).numpy()
    np.testing.assert_allclose(mine, wanted, atol=2e-5)  # 2^-27 per round, then Adam from slightly other places


def test_a_run_repeats_to_the_last_bit(sites, run):
    again = rehearse("fine-tune", sites, **SIZE)
    assert again.results["coordinator"]["history"] == run.results["coordinator"]["history"]
    assert again.outcomes["basel"].model.to_bytes() == run.outcomes["lugano"].model.to_bytes()


def test_cells_without_a_label_are_labelled(sites):
    hidden = {p: a.copy() for p, a in sites.items()}
    truth = hidden["vienna"].obs["cell_type"].astype(str).to_numpy()
    hidden["vienna"].obs["cell_type"] = hidden["vienna"].obs["cell_type"].astype(object)
    hidden["vienna"].obs.iloc[40:, hidden["vienna"].obs.columns.get_loc("cell_type")] = np.nan
    run = rehearse("fine-tune", hidden, **SIZE)
    guessed = run.data["vienna"].obs["predicted"].astype(str).to_numpy()
    assert np.mean(guessed[40:] == truth[40:]) > 0.7


@pytest.mark.parametrize(
    "options",
    [
        {"algorithm": "fedprox", "mu": 0.1},
        {"clients_per_round": 2, "schedule": "cosine"},
        {"weighting": "plain", "optimizer": "sgd", "lr": 0.05},
        {"labels": ("none of these",), "metric": "macro_f1", "patience": 1},
        {**PLAIN, "lr": 0.05},
    ],
    ids=["fedprox", "sampled", "plain-sgd", "vocabulary", "scaffold"],
)
def test_variants(sites, options):
    if "labels" in options:
        known = sorted({str(v) for s in sites.values() for v in s.obs["cell_type"]})
        options = {**options, "labels": (*known, *options["labels"])}
    run = rehearse("fine-tune", sites, **{**SIZE, **options})
    assert run.results["coordinator"]["history"][-1]["loss"] < run.results["coordinator"]["history"][0]["loss"]


def test_model_file_and_figures(run, tmp_path):
    (content,) = fine_tune.files(run.outcomes["basel"]).values()
    (tmp_path / "model.npz").write_bytes(content)
    back = FineTuned.load(tmp_path / "model.npz")
    assert list(back.predict(run.data["basel"])) == list(run.data["basel"].obs["predicted"].astype(str))
    assert fine_tune.files(run.outcomes["coordinator"]) == {}
    pytest.importorskip("matplotlib")
    drawn = run.draw()  # as the report takes them
    assert not drawn.note
    titles = [f.title for f in drawn.figures]
    assert titles[:2] == ["Loss over the rounds", "Held-out cells over the rounds"]
    assert [t.partition(",")[0] for t in titles[2:]] == [f"Labels of {s}" for s in ("basel", "lugano", "vienna")]


def test_survives_a_site_that_dies(sites):
    fault = Fault("kill", "lugano", "coordinator", "MaskedInput", nth=3)
    run = rehearse("fine-tune", sites, faults=[fault], timeout=5.0, check=False, **SIZE)
    assert set(run.outcomes) == {"coordinator", "basel", "vienna"}
    assert run.results["basel"]["history"][-2]["clients"] == 2


def test_goes_on_after_the_coordinator_died(sites, run, tmp_path):
    where = str(tmp_path / "kept" / "state.npz")
    fault = Fault("kill", "coordinator", "basel", "Task", nth=2)
    broken = rehearse("fine-tune", sites, faults=[fault], timeout=3.0, check=False, checkpoint=where, **SIZE)
    assert broken.outcomes == {}
    assert stat.S_IMODE(Path(where).stat().st_mode) == 0o600  # a model may tell about the cells it was trained on
    resumed = rehearse("fine-tune", sites, checkpoint=where, **SIZE)
    assert resumed.results["coordinator"]["history"] == run.results["coordinator"]["history"]
    assert resumed.outcomes["basel"].model.to_bytes() == run.outcomes["basel"].model.to_bytes()
    with pytest.raises(ParameterError, match="another training"):
        rehearse("fine-tune", sites, checkpoint=where, **{**SIZE, "lr": 1e-4}, timeout=5.0)
    (tmp_path / "kept" / "state.npz").write_bytes(b"rubbish")
    with pytest.raises(DataError, match="not a checkpoint"):
        rehearse("fine-tune", sites, checkpoint=where, **SIZE, timeout=5.0)


def test_budget_of_the_noise(sites):
    pytest.importorskip("opacus", reason="the accountant is an extra")
    options = {**SIZE, "dp_noise": 4.0, "dp_clip": 1.0, "score_every": 0, "weighting": "plain", "validation": 0.0}
    run = rehearse("fine-tune", sites, **options)
    said = run.results["basel"]["privacy"]
    z, rounds, delta = 4.0, 4, 1e-5
    order = np.linspace(1.01, 500, 200_000)  # Renyi bound of the Gaussian mechanism, converted as in [CKS20]
    bound = rounds * order / (2 * z**2) + np.log1p(-1 / order) - (math.log(delta) + np.log(order)) / (order - 1)
    assert bound.min() - 1e-3 <= said["epsilon"] <= bound.min() + 0.05
    opened = [e.name for e, _ in run.receipts["coordinator"].entries if e.kind == "opened"]
    assert any(f"({said['epsilon']:g}, 1e-05)-private per site" in text for text in opened)
    assert "accuracy" not in run.results["basel"]["history"][0]


def test_an_update_that_is_no_number_is_told_to_its_site_alone(sites):
    bad = {p: a.copy() for p, a in sites.items()}
    bad["lugano"].obsm["X_pca"] = bad["lugano"].obsm["X_pca"] * 1e20
    run = rehearse("fine-tune", bad, optimizer="sgd", **SIZE)
    assert "your update was no number" in run.results["lugano"]["notes"][0]
    for other in ("basel", "vienna", "coordinator"):
        assert "notes" not in run.results[other]
    assert run.results["basel"]["history"][-1]["accuracy"] > 0.4


def test_scgpt_with_a_head(sites, tmp_path):
    genes = list(sites["basel"].var_names[:100])
    ScGPT.random(genes, Config(width=16, heads=2, hidden=16, layers=2, max_length=40)).save(tmp_path)
    few = {p: a[:60].copy() for p, a in sites.items()}
    run = rehearse(
        "fine-tune", few, model="scgpt", pretrained=str(tmp_path), tune="last", last_layers=1, rounds=2, lr=3e-3,
        mode="published",
    )  # fmt: skip
    history = run.results["coordinator"]["history"]
    assert history[-1]["loss"] < history[0]["loss"]
    far = {p: a.copy() for p, a in few.items()}
    far["basel"].var_names = [f"X{i}" for i in range(far["basel"].n_vars)]
    with pytest.raises(DataError, match="knows"):
        rehearse("fine-tune", far, model="scgpt", pretrained=str(tmp_path), rounds=1, timeout=10.0)


def hidden_labels(sites, keep=0.1):
    """One cell in ten keeps its label; vienna has none."""
    out = {}
    for p, a in sites.items():
        a = a[:100].copy()
        column = a.obs["cell_type"].astype(str).astype(object)
        column.iloc[np.arange(len(column)) % round(1 / keep) != 0] = np.nan
        if p == "vienna":
            column[:] = np.nan
        a.obs["truth"], a.obs["cell_type"] = a.obs["cell_type"].astype(str), column
        out[p] = a
    return out


@pytest.mark.parametrize(("source", "mode"), [("xclp", "published"), ("network", "hardened"), ("client", "hardened")])
def test_semi_supervised(sites, source, mode):
    few = hidden_labels(sites, keep=0.5)
    size = {**SIZE, "rounds": 3, "mode": mode} | ({"lr": 0.05, "dp_noise": 0.0} if mode == "hardened" else {})
    run = rehearse(
        "fine-tune", few, semi_supervised=True, pseudo_labels=source, bits=512, validation=0.0, score_every=0,
        warm_rounds=1, timeout=120.0, **size,
    )  # fmt: skip
    right = [np.mean(a.obs["predicted"].astype(str) == a.obs["truth"]) for a in run.data.values()]
    assert np.mean(right) > 0.45
    again = rehearse(
        "fine-tune", few, semi_supervised=True, pseudo_labels="network", bits=512, validation=0.0, score_every=0,
        warm_rounds=3, timeout=120.0, **size,
    )  # fmt: skip
    assert again.outcomes["basel"].model.to_bytes() != run.outcomes["basel"].model.to_bytes()  # pseudo-labels count


def test_pseudo_labels_in_the_form_of_the_papers_program(sites):
    """Balanced and sharpened, scaled and weighed: each changes the model, and `balance` adds up its counts."""
    few = {site: a[:50].copy() for site, a in hidden_labels(sites).items()}
    fixed = {"semi_supervised": True, "bits": 256, "weighting": "plain", "validation": 0.0, "score_every": 0}
    fixed |= {**SIZE, "rounds": 1, "local_epochs": 1, "mode": "published", "timeout": 120.0}
    forms = ({}, {"balance": True, "similarity_power": 3.0}, {"scale_confidence": True}, {"class_weights": True})
    runs = [rehearse("fine-tune", few, **fixed, **form) for form in forms]
    assert len({run.outcomes["basel"].model.to_bytes() for run in runs}) == len(forms)
    lines = [[e.protocol for e, _ in run.receipts["coordinator"].entries] for run in runs[:2]]
    assert lines[1].count("secure_sum") > lines[0].count("secure_sum")


def test_training_goes_on_from_a_model_file(sites, run, tmp_path):
    path = run.model.save(tmp_path / "model.npz")
    more = rehearse("fine-tune", sites, init=str(path), **{**SIZE, "rounds": 1})
    before, after = (r.results["coordinator"]["history"] for r in (run, more))
    assert after[0]["accuracy"] == pytest.approx(before[run.results["coordinator"]["best_round"]]["accuracy"])
    assert after[0]["accuracy"] > before[0]["accuracy"] + 0.3
    narrow = {**SIZE, "hidden": (8,), "init": str(path)}
    with pytest.raises(DataError, match="does not fit this model"):
        rehearse("fine-tune", sites, **narrow)


@pytest.mark.slow
def test_semi_supervised_hardened(sites):
    pytest.importorskip("seal", reason="encrypted labels are an extra")
    few = hidden_labels(sites)
    options = {"semi_supervised": True, "bits": 512, "validation": 0.0, "score_every": 0}
    runs = [
        rehearse("fine-tune", few, timeout=300.0, **options, **{**SIZE, "rounds": 6, "lr": 0.03, "mode": mode})
        for mode in ("hardened", "published")
    ]
    right = [np.mean(a.obs["predicted"].astype(str) == a.obs["truth"]) for a in runs[0].data.values()]
    assert np.mean(right) > 0.45


@pytest.mark.parametrize("model", ["cnn", "resnet", "vit"])
def test_images(model):
    rng = np.random.default_rng(0)
    sites = {}
    for name in ("basel", "lugano"):
        y = rng.integers(0, 2, 60)
        x = rng.uniform(0, 60, (60, 16, 16, 1))
        x[y == 1, 4:12, 4:12] += 150
        a = AnnData(x.reshape(60, -1).astype(np.float32))
        a.obs["kind"] = np.where(y, "square", "none")
        sites[name] = a
    run = rehearse(
        "fine-tune", sites, model=model, image_shape=(16, 16, 1), label_key="kind", width=8, rounds=3, lr=1e-2,
        batch_size=16, dropout=0.0, local_epochs=2, timeout=120.0, mode="published",
    )  # fmt: skip
    history = run.results["coordinator"]["history"]
    assert max(row["accuracy"] for row in history) > 0.8


@pytest.mark.parametrize(
    ("change", "options", "kind", "message"),
    [
        (lambda a: a.obs.drop(columns="cell_type", inplace=True), {}, DataError, "'cell_type'] is missing"),
        (lambda a: a.obs.__setitem__("cell_type", np.nan), {}, DataError, "0 labelled"),
        (lambda a: None, {"semi_supervised": True, "bits": 7}, ParameterError, "bits"),
        (lambda a: a.obsm.__delitem__("X_pca"), {}, DataError, "'X_pca'] is missing"),
        (lambda a: None, {"labels": ("x", "y")}, DataError, "not in the study's vocabulary"),
        (lambda a: None, {"labels": ("x", "x")}, ParameterError, "each once"),
        (lambda a: None, {"model": "scgpt"}, ParameterError, "pretrained"),
        (lambda a: None, {"model": "cnn"}, ParameterError, "image_shape"),
        (lambda a: None, {"model": "vit", "image_shape": (8, 8, 3)}, DataError, "192 values"),
        (lambda a: None, {"validation": 1.0}, ParameterError, "validation"),
        (lambda a: None, {"model": "resnet", "image_shape": (8, 9, 1)}, ParameterError, "square"),
        (lambda a: None, {"rotation": 10.0}, ParameterError, "rotation"),
        (lambda a: None, {"tune": "head"}, ParameterError, "with init= the head alone"),
        (lambda a: None, {"tune": "lora", "init": "w.npz"}, ParameterError, "with init= the head alone"),
        (lambda a: None, {"init": "nowhere.npz"}, DataError, "no weight file"),
        (lambda a: None, {"schedule_rounds": 9}, ParameterError, "schedule='cosine'"),
        (lambda a: None, {"schedule": "cosine", "schedule_rounds": 2}, ParameterError, "no fewer rounds"),
        (lambda a: None, {"class_weights": True}, ParameterError, "semi_supervised=True"),
        (lambda a: None, {"semi_supervised": True, "similarity_power": 0.0}, ParameterError, "power"),
        (lambda a: None, {"dp_noise": 1.0}, ParameterError, "score_every=0"),
        (lambda a: None, {"clients_per_round": 7}, ParameterError, "clients"),
        (lambda a: None, {"algorithm": "scaffold"}, ParameterError, "optimizer='sgd'"),
        (lambda a: None, {**PLAIN, "semi_supervised": True}, ParameterError, "neither checkpoint"),
        (lambda a: None, {"model": "forest"}, ParameterError, "model"),
        (lambda a: None, {"optimiser": "adam"}, ParameterError, "optimizer"),
    ],
)
def test_bad_input(sites, change, options, kind, message):
    bad = {p: a.copy() for p, a in sites.items()}
    change(bad["basel"])
    with pytest.raises(kind, match=message):
        rehearse("fine-tune", bad, timeout=5.0, **{**SIZE, **options})


def test_embeddings_of_different_width_are_named(sites):
    bad = {p: a.copy() for p, a in sites.items()}
    bad["lugano"].obsm["X_pca"] = bad["lugano"].obsm["X_pca"][:, :7]
    run = rehearse("fine-tune", bad, timeout=5.0, check=False, **SIZE)
    assert isinstance(run.errors["coordinator"], ProtocolAbort)
    assert "lugano came with another kind of input" in str(run.errors["coordinator"])


# ---- new cells -------------------------------------------------------------------------------------------------------


def test_a_trained_model_labels_and_embeds_new_cells(sites, tmp_path):
    """fine-tune on two sites, then labels and features for a third that took no part, from the model's file."""
    two = {s: sites[s] for s in ("basel", "lugano")}
    run = rehearse("fine-tune", two, features_added="X_tuned", **SIZE)
    model = load_model(run.model.save(tmp_path / "model.npz"))
    assert isinstance(model, FineTuned)
    assert model.digest == run.model.digest
    new = sites["vienna"].copy()
    labels = model.predict(new, key_added="called")
    assert np.mean(labels == new.obs["cell_type"].astype(str).to_numpy()) > 0.6
    np.testing.assert_allclose(model.predict_proba(new).sum(axis=1), 1, atol=1e-5)
    embed(new, tmp_path / "model.npz", key_added="X_tuned")
    assert new.obsm["X_tuned"].shape == (new.n_obs, 16)
    assert new.uns["X_tuned"]["space"] == run.data["basel"].uns["X_tuned"]["space"] == model.digest
    np.testing.assert_allclose(run.data["basel"].obsm["X_tuned"], model.features(sites["basel"]), atol=1e-5)
    mapped = rehearse(
        "map-labels", {**run.data, "vienna": new}, mode="plain", query="vienna", use_rep="X_tuned", n_neighbors=5
    )
    assert mapped.results["vienna"]["accuracy"] > 0.6
    narrow = new.copy()
    narrow.obsm["X_pca"] = narrow.obsm["X_pca"][:, :5]
    with pytest.raises(DataError, match="columns"):
        model.predict(narrow)


def test_bins_feed_training_and_prediction(sites, tmp_path):
    """The story of FedscGPT: shared bins, a shared model on them, labels for cells in the same bins only."""
    binned = rehearse("bin-values", sites, n_bins=21).data
    first = next(iter(binned.values()))
    ScGPT.random([str(g) for g in first.var_names], Config(16, 2, 16, 1, max_length=40, n_bins=21)).save(tmp_path / "c")
    two = {s: binned[s][:60].copy() for s in ("basel", "lugano")}
    options = {"model": "scgpt", "pretrained": str(tmp_path / "c"), "tune": "head", "rounds": 2, "local_epochs": 1}
    options["mode"] = "published"
    run = rehearse("fine-tune", two, layer="binned", binning="none", **options)
    path = run.model.save(tmp_path / "model.npz")
    model = load_model(path, tmp_path / "c")
    new = binned["vienna"][:40].copy()
    assert set(model.predict(new)) <= set(run.model.labels)
    other = rehearse("bin-values", sites, n_bins=11).data["vienna"][:40].copy()
    with pytest.raises(DataError, match="other bin edges than those of training"):
        model.predict(other)
    with pytest.raises(ParameterError, match="pretrained="):
        load_model(path)
    mixed = {"basel": two["basel"], "lugano": rehearse("bin-values", sites, n_bins=11).data["lugano"][:60].copy()}
    with pytest.raises(ProtocolAbort, match="another kind of input"):
        rehearse("fine-tune", mixed, layer="binned", binning="none", **options)


def test_few_labels_are_learned_from_with_the_defaults(sites):
    """A few labels and no option. The defaults before, one epoch a round at a third of the rate, hardly moved."""
    rng = np.random.default_rng(0)
    hidden, hits = {}, {}
    for s, a in sites.items():
        hidden[s] = a.copy()
        hidden[s].obs["cell_type"] = a.obs["cell_type"].astype(object).where(rng.random(a.n_obs) < 0.15)
    for name, options in {"now": {}, "before": {"local_epochs": 1, "lr": 1e-3}}.items():
        run = rehearse("fine-tune", hidden, mode="published", use_rep="X_pca", **options)
        right = [
            (run.data[s].obs["predicted"].astype(str) == sites[s].obs["cell_type"])[hidden[s].obs["cell_type"].isna()]
            for s in sites
        ]
        hits[name] = float(np.mean(np.concatenate(right)))
    assert hits["now"] > 0.7
    assert hits["now"] > hits["before"] + 0.1


# ---- hardened mode ---------------------------------------------------------------------------------------------------


def right_of(run, sites):
    return np.mean([np.mean(run.data[p].obs["predicted"].astype(str) == a.obs["cell_type"]) for p, a in sites.items()])


@pytest.fixture(scope="module")
def whole():
    return demo_data.demo_sites()


def test_the_default_adds_noise_for_single_cells_and_still_learns(whole):
    run = rehearse("fine-tune", whole, use_rep="X_pca")
    assert right_of(run, whole) > 0.85
    said = json.loads(run.data["basel"].uns["predicted"])
    assert said["privacy"] == {
        "epsilon": 4.28,
        "delta": 1e-5,
        "protects": "one cell, against that cell contributing nothing",
    }
    spent = [e.name for e, _ in run.receipts["basel"].entries if e.kind == "spent"]
    assert spent == ["epsilon 4.28, delta 1e-05, for one cell, against that cell contributing nothing"]
    assert said["best_round"] == 20
    assert said["history"] == run.results["coordinator"]["history"]
    assert run.outcomes["basel"].model.to_bytes() == run.outcomes["lugano"].model.to_bytes()
    assert run.receipts["basel"].smallest_group["cells"] >= 10


def test_without_noise_it_is_adam_on_clipped_gradients_of_all_cells(sites):
    options = {**HARDENED, "dp_noise": 0.0, "validation": 0.0, "min_cells": 1}
    run = rehearse("fine-tune", sites, **options)
    assert right_of(run, sites) > 0.8
    labels = tuple(run.results["basel"]["labels"])
    chosen = fine_tune.in_mode(fine_tune.Options(**options), "hardened")
    learners = {}
    for name, a in sorted(sites.items()):
        examples, blueprint, _ = fine_tune.examples_of(a, chosen)
        codes = np.array([labels.index(str(v)) for v in a.obs["cell_type"]])
        recipe = fine_tune.recipe_of(chosen, 0, 3)
        learners[name] = Learner(
            make(blueprint, labels), len(labels), recipe, examples, codes, [], describe="", site=name
        )
    path = checked_training.Path.begin(next(iter(learners.values())).trainable)
    for t in range(10):
        sums = [one.gradient(path.theta.astype(np.float32), t, 1.0).sum for one in learners.values()]
        path.advance(np.sum(sums, axis=0), 0.06, 0.0)
    found = run.outcomes["basel"].model
    mine = torch.cat([p.detach().reshape(-1) for p in found.module.parameters()]).numpy()
    np.testing.assert_allclose(mine, learners["basel"].first.numpy() + path.theta, atol=1e-4)


@pytest.mark.parametrize("donors", [False, True])
@pytest.mark.parametrize("layers", ["linear", "any"])
def test_one_cell_or_donor_changes_a_sum_by_at_most_one(sites, donors, layers, monkeypatch):
    """Far cells, and of donors all cells: whatever they are, the part of one has norm at most one."""
    if layers == "any":
        monkeypatch.setattr(Learner, "_only_linear", lambda self: False)
    chosen = fine_tune.in_mode(fine_tune.Options(use_rep="X_pca", hidden=(16,), dropout=0.0), "hardened")
    a = sites["basel"][:60].copy()
    a.obsm["X_pca"][::7] *= 1e3
    examples, blueprint, _ = fine_tune.examples_of(a, chosen)
    labels = tuple(sorted({str(v) for v in a.obs["cell_type"]}))
    codes = np.array([labels.index(str(v)) for v in a.obs["cell_type"]])
    who = np.arange(60) % 5

    def total(codes):
        recipe = fine_tune.recipe_of(chosen, 0, 3)
        one = Learner(
            make(blueprint, labels), len(labels), recipe, examples, codes, [], describe="", site="x",
            donor=who if donors else None,
        )  # fmt: skip
        rng = np.random.default_rng(0)
        return one.gradient(rng.normal(0, 0.3, one.trainable).astype(np.float32), 0, 0.5)

    everyone = total(codes)
    assert everyone.cells == 60
    changes = []
    for unit in range(5):
        without = codes.copy()
        without[who == unit if donors else np.arange(60) == 7 * unit] = -1
        changes.append(np.linalg.norm(everyone.sum - total(without).sum))
    assert max(changes) <= 1 + 1e-5
    assert max(changes) > (0.02 if donors else 0.9)  # far cells are clipped, and to no less


def test_both_ways_to_clip_agree(sites, monkeypatch):
    chosen = fine_tune.in_mode(fine_tune.Options(use_rep="X_pca", hidden=(16, 8), dropout=0.0), "hardened")
    examples, blueprint, _ = fine_tune.examples_of(sites["basel"], chosen)
    codes = np.arange(sites["basel"].n_obs) % 3
    one = Learner(
        make(blueprint, ("a", "b", "c")),
        3,
        fine_tune.recipe_of(chosen, 0, 3),
        examples,
        codes,
        [],
        describe="",
        site="x",
    )
    fast = one.gradient(np.zeros(one.trainable), 0, 1.0)
    monkeypatch.setattr(Learner, "_only_linear", lambda self: False)
    slow = one.gradient(np.zeros(one.trainable), 0, 1.0)
    np.testing.assert_allclose(fast.sum, slow.sum, atol=1e-4)
    assert fast.loss == pytest.approx(slow.loss, rel=1e-5)


@pytest.mark.parametrize("layers", ["linear", "any"])
def test_a_cell_without_a_finite_gradient_counts_as_zero(sites, layers, monkeypatch):
    if layers == "any":
        monkeypatch.setattr(Learner, "_only_linear", lambda self: False)
    chosen = fine_tune.in_mode(fine_tune.Options(use_rep="X_pca", hidden=(16,), dropout=0.0), "hardened")
    a = sites["basel"].copy()
    a.obsm["X_pca"][4] = np.float32(3e38)
    examples, blueprint, _ = fine_tune.examples_of(a, chosen)
    codes = np.arange(a.n_obs) % 3
    found = []
    for four in (1, -1):
        codes[4] = four
        one = Learner(
            make(blueprint, ("a", "b", "c")), 3, fine_tune.recipe_of(chosen, 0, 3), examples, codes, [], describe="",
            site="x",
        )  # fmt: skip
        found.append(one.gradient(np.zeros(one.trainable), 0, 1.0))
    assert [one.left_out for one in found] == [1, 0]
    np.testing.assert_allclose(found[0].sum, found[1].sum, atol=1e-6)
    assert np.isfinite(found[0].loss)


def test_donors_are_the_unit_where_they_are_named(sites):
    named = {p: a.copy() for p, a in sites.items()}
    for a in named.values():
        a.obs["donor"] = [f"d{i % 5}" for i in range(a.n_obs)]
    run = rehearse("fine-tune", named, donor_key="donor", dp_noise=0.05, **HARDENED)
    assert run.results["basel"]["privacy"]["protects"] == "all cells of one donor, against none"
    frequent = named["basel"].obs["cell_type"].value_counts()
    assert run.receipts["basel"].smallest_group == {"cells": int(frequent[frequent >= 10].sum()), "donors": 5}
    assert all("accuracy" not in row for row in run.results["basel"]["history"])  # a donor has many held-out cells
    assert right_of(run, sites) > 0.6
    named["basel"].obs["donor"] = ["one", "two"] * 75
    with pytest.raises(DataError, match="min_donors = 3"):
        rehearse("fine-tune", named, donor_key="donor", timeout=5.0, **HARDENED)


def test_the_name_of_a_label_of_one_cell_is_not_sent(whole):
    """Names travel without noise, so a name that one cell has would say that this cell is there."""
    one = {p: a.copy() for p, a in whole.items()}
    one["basel"].obs["cell_type"] = ["rare disease", *one["basel"].obs["cell_type"].astype(str)[1:]]
    run = rehearse("fine-tune", one, **HARDENED)
    assert all("rare disease" not in result["labels"] for result in run.results.values())
    chosen = fine_tune.in_mode(fine_tune.Options(**HARDENED), "hardened")
    assert any("do not train, so their names are not sent" in note for note in fine_tune.check(one["basel"], chosen))
    listed = tuple(sorted({*whole["basel"].obs["cell_type"].astype(str), "rare disease"}))
    everyone = {p: a[a.obs["cell_type"].astype(str).isin(listed)].copy() for p, a in one.items()}
    named = rehearse("fine-tune", everyone, labels=listed, **HARDENED)
    assert named.results["basel"]["labels"] == list(listed)


def test_a_site_that_dies_ends_the_run(sites):
    fault = Fault("kill", "lugano", "coordinator", "Masked", nth=3)
    run = rehearse("fine-tune", sites, faults=[fault], timeout=5.0, check=False, **HARDENED)
    assert run.outcomes == {}


@pytest.mark.parametrize("model", ["vit", "scgpt"])
def test_other_networks_in_hardened_mode(sites, model, tmp_path):
    few = {p: sites[p][:40].copy() for p in ("basel", "lugano")}
    options = {"use_rep": "X_pca", "rounds": 2, "dp_noise": 0.0, "min_cells": 1, "validation": 0.0}
    if model == "vit":
        for a in few.values():
            a._inplace_subset_var(np.arange(256))
        options |= {"model": "vit", "image_shape": (16, 16, 1), "width": 8}
    else:
        genes = list(sites["basel"].var_names[:100])
        ScGPT.random(genes, Config(width=16, heads=2, hidden=16, layers=2, max_length=40)).save(tmp_path)
        options |= {"model": "scgpt", "pretrained": str(tmp_path), "tune": "last", "last_layers": 1}
    run = rehearse("fine-tune", few, timeout=120.0, **options)
    history = run.results["basel"]["history"]
    assert history[1]["train_loss"] < history[0]["train_loss"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"algorithm": "fedprox"}, "'algorithm'"),
        ({"optimizer": "sgd"}, "'optimizer'"),
        ({"weighting": "plain"}, "'weighting'"),
        ({"clients_per_round": 2}, "'clients_per_round'"),
        ({"checkpoint": "x.npz"}, "'checkpoint'"),
        ({"dp_unit": "site"}, "'dp_unit'"),
        ({"dp_unit": "donor"}, "donor_key"),
        ({"model": "cnn", "image_shape": (16, 16, 1)}, "batch normalisation"),
        ({"patience": 2}, "'patience'"),
        ({"metric": "macro_f1"}, "'metric'"),
        ({"semi_supervised": True, "dp_noise": 1.0}, "depend on other cells"),
        ({"dp_noise": -1.0}, "'dp_noise'"),
        ({"mode": "published", "donor_key": "donor"}, "protects whole sites"),
        ({"mode": "published", "dp_noise": 1.0}, "score_every=0"),
    ],
)
def test_options_that_do_not_fit_the_mode(sites, options, message):
    with pytest.raises(ParameterError, match=message):
        rehearse("fine-tune", sites, timeout=5.0, **options)


def far(a):
    """The cells of a site that wants the others' parts to stand out: huge, and all of one label."""
    b = a.copy()
    b.obsm["X_pca"] = b.obsm["X_pca"] * 1e3
    b.obs["cell_type"] = str(b.obs["cell_type"].iloc[0])
    return b


@pytest.mark.parametrize("options", [{}, {"dp_noise": 0.0, "metric": "balanced_accuracy"}, {"donor_key": "donor"}])
def test_whatever_others_bring_a_site_adds_sums_over_enough_cells(whole, options):
    sites = {p: a.copy() for p, a in whole.items()}
    for a in sites.values():
        a.obs["donor"] = [f"d{i % 4}" for i in range(a.n_obs)]
    found = check_disclosure("fine-tune", sites, "basel", attacks=[far], **{**HARDENED, "rounds": 3}, **options)
    assert found.contributions == 2 * (3 + (0 if "donor_key" in options else 4))  # steps, scores
    assert found.cells >= 10
    assert found.donors == (4 if "donor_key" in options else None)
