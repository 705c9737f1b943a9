import dataclasses
import json
import types

import numpy as np
import pytest

pytest.importorskip("numba")
pytest.importorskip("torch")
pytest.importorskip("anndata")
import anndata
import torch
from encoders import tiny

from cloister import workflows
from cloister.errors import DataError, ParameterError, ProtocolAbort
from cloister.models import polynomial
from cloister.models.adapter import Adapted
from cloister.models.learner import Table
from cloister.papers.baselines.adaptation import without_provider
from cloister.rehearsal.check_disclosure import check_disclosure
from cloister.rehearsal.rehearsal import rehearse
from cloister.study import Party, Step, Study
from cloister.workflows.adapt_model import training
from cloister.workflows.adapt_model import workflow as adapt_model
from cloister.workflows.fine_tune.checked_training import Path as Way

torch.set_num_threads(1)
IMAGES = {"kind": "images", "height": 2, "width": 4, "channels": 1, "patch": 2, "mean": 0.5, "std": 0.5}
CELLS = {"kind": "cells", "genes": ["A", "B", "C"], "target": 100.0, "unit": 5.0}
QUICK = {"exp_degree": 2, "steps": 2, "root_steps": 3}
PUBLISHED = {"ring": "small", "label_key": "kind", "rounds": 6, "lr": 0.1, "local_epochs": 2, "timeout": 300.0}
OPTIONS = PUBLISHED | {"dp_noise": 0.05}  # little: these data sets are small


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    encoder, _ = tiny(tokens=3, inputs=4, depth=1, taps=(1,), rank=4, **QUICK)
    path = tmp_path_factory.mktemp("provider") / "model.npz"
    dataclasses.replace(encoder, card=IMAGES).save(path)
    return path


def images(n, seed, labelled=True):
    """Bright first patch or not: rows of 2 x 4 pixels."""
    rng = np.random.default_rng(seed)
    x = rng.uniform(0, 1, (n, 2, 4))
    bright = np.arange(n) % 2 == 0
    x[:, :, :2] = np.where(bright[:, None, None], 0.7, 0.0) + 0.3 * x[:, :, :2]
    a = anndata.AnnData(x.reshape(n, 8).astype(np.float32))
    if labelled:
        a.obs["kind"] = np.where(bright, "bright", "dark")
    return a


@pytest.mark.slow
def test_the_adapter_of_one_step_is_served_in_the_next_with_a_process_for_each_party(model, tmp_path):
    parties = {Party("hub"): "coordinator", Party("basel"): "site", Party("lugano"): "site"}
    data = {"basel": images(24, 0), "lugano": images(16, 1)}

    def story(name):
        common = {"model": str(model), "ring": "small", "ledger": str(tmp_path / f"{name}.json")}
        taps = {"taps": str(tmp_path / name)}
        ask = {"stage": "ask", "key_added": "asked", **taps, **common}
        adapt = {k: v for k, v in OPTIONS.items() if k not in ("ring", "timeout")} | {
            "stage": "train",
            **taps,
            **common,
        }
        serve = {"adapter": "step:train/adapter.npz", "key_added": "served"} | common
        steps = (
            Step("adapt-model", name="ask", options=ask),
            Step("adapt-model", name="train", options=adapt),
            Step("serve-model", options=serve),
        )
        return Study("story", "", parties, steps=steps, timeout=300.0)

    here, there = rehearse(story("one"), data), rehearse(story("two"), data, processes=True)
    for site, given in data.items():
        served = there.data[site].obs["served"].astype(str).to_numpy()
        assert (served == here.data[site].obs["served"].astype(str).to_numpy()).all()
        assert (served == given.obs["kind"].to_numpy()).mean() >= 0.9


def test_adapt_and_serve(model, tmp_path):
    data = {"basel": images(24, 0), "lugano": images(16, 1)}
    ledger = tmp_path / "ledger.json"
    run = rehearse("adapt-model", data, model=str(model), ledger=str(ledger), **OPTIONS)
    for site, given in data.items():
        found = run.data[site]
        assert (found.obs["predicted"].astype(str).to_numpy() == given.obs["kind"].to_numpy()).mean() >= 0.9
        # the features are those of the plain encoder; noise of the small ring has a deviation of about 0.02
        encoder = polynomial.Encoder.load(model).rounded(9)
        from cloister.workflows.adapt_model.workflow import inputs_of

        b = polynomial.hidden(encoder, inputs_of(given, IMAGES))
        np.testing.assert_allclose(found.obsm["predicted_features"], polynomial.taps_of(encoder, b)[:, 0], atol=0.3)
    opened = [e for e, _ in run.receipts["basel"].entries if e.kind == "opened" and e.protocol == "encrypted_inference"]
    assert [e.name for e in opened] == ["4 features of block 1 for 24 samples"]
    assert "weights at most: 32 batches" in run.results["coordinator"]["exposure"]  # 65,536 samples by 2048
    run.model.save(tmp_path / "adapter.npz")

    asked = images(10, 2, labelled=False)
    served = rehearse(
        "serve-model", {"vienna": asked}, model=str(model), adapter=str(tmp_path / "adapter.npz"), ring="small",
        timeout=300.0, ledger=str(ledger),
    )  # fmt: skip
    wanted = np.where(np.arange(10) % 2 == 0, "bright", "dark")
    assert (served.data["vienna"].obs["predicted"].astype(str).to_numpy() == wanted).mean() >= 0.9
    (path,) = (tmp_path / "taps").glob("vienna.*.taps.npz")
    # the ledger counts whole batches, over both runs, and the budget ends
    spent = {"adapter": str(tmp_path / "adapter.npz"), "ring": "small", "timeout": 300.0, "budget": 2048}
    spent |= {"model": str(model), "ledger": str(ledger)}
    with pytest.raises(ProtocolAbort) as e:
        rehearse("serve-model", {"vienna": images(10, 3, labelled=False)}, **spent)
    assert e.value.code == "budget"
    # samples that are in the file beside the adapter are not asked again; a lost one stays lost
    assert path.stat().st_mode & 0o077 == path.parent.stat().st_mode & 0o077 == 0
    kept = dict(np.load(path))
    kept["taps"][3] = np.nan
    np.savez(path, **kept)
    again = rehearse("serve-model", {"vienna": images(10, 2, labelled=False)}, **spent)
    assert again.results["coordinator"]["answered"] == {"vienna": 0}
    assert again.results["vienna"]["left_out"] == ["3"]
    found = again.data["vienna"].obs["predicted"].astype(str).to_numpy()
    assert (np.delete(found, 3) == np.delete(wanted, 3)).mean() >= 0.9


def test_a_model_with_quadratic_attention(tmp_path):
    """Images in, labels out, in the long ring; the features are those of the plain student. Few images share slots."""
    encoder, _ = tiny(tokens=3, inputs=4, depth=1, taps=(1,), rank=4, steps=2, root_steps=3, attention="quadratic")
    path = tmp_path / "model.npz"
    dataclasses.replace(encoder, card=IMAGES).save(path)
    with pytest.raises(ParameterError, match="quadratic attention needs the long modulus"):
        rehearse("adapt-model", {"basel": images(12, 0), "lugano": images(12, 1)}, model=str(path), **OPTIONS)
    data = {"basel": images(24, 0), "lugano": images(16, 1)}
    run = rehearse("adapt-model", data, model=str(path), **(OPTIONS | {"ring": "standard"}))
    plain = polynomial.Encoder.load(path).rounded(11)
    for site, given in data.items():
        found = run.data[site]
        b = polynomial.hidden(plain, adapt_model.inputs_of(given, IMAGES))
        np.testing.assert_allclose(found.obsm["predicted_features"], polynomial.taps_of(plain, b)[:, 0], atol=2e-2)
        assert (found.obs["predicted"].astype(str).to_numpy() == given.obs["kind"].to_numpy()).mean() >= 0.9
        assert run.results[site]["budget"]["tokens_in_a_ciphertext"] == 2


def test_a_sample_out_of_range_is_named_and_has_no_label(model):
    a = images(5, 0)
    taps = np.zeros((5, 1, 4))
    taps[3] = np.nan
    adapted = types.SimpleNamespace(labels=("bright", "dark"), probabilities=lambda taps: np.tile([0.25, 0.75], (5, 1)))
    adapt_model.write(a, "predicted", adapted, taps)
    assert a.obs["predicted"].isna().tolist() == [False, False, False, True, False]
    assert np.isnan(a.obs["predicted_confidence"]).sum() == 1
    assert adapt_model.beyond(a, taps) == {"left_out": ["3"]}
    assert adapt_model.beyond(a, np.zeros((5, 1, 4))) == {}


def test_wrong_image_size_is_refused_before_anything_is_sent(model):
    wrong = anndata.AnnData(np.random.default_rng(0).uniform(0, 1, (12, 9)).astype(np.float32))
    wrong.obs["kind"] = ["bright", "dark"] * 6
    with pytest.raises(DataError, match=r"takes images of 2 x 4 x 1 \(8 values\), found rows of 9"):
        rehearse("adapt-model", {"basel": wrong, "lugano": images(12, 1)}, model=str(model), **OPTIONS)


def test_a_class_that_no_site_has_is_named(model):
    data, names = {"basel": images(6, 0), "lugano": images(6, 1)}, ("bright", "dark", "grey")
    with pytest.raises(ParameterError, match="no site has a sample labelled 'grey'"):
        rehearse("adapt-model", data, model=str(model), labels=names, mode="published", **PUBLISHED)


@pytest.mark.slow
def test_listed_labels_are_asked_for_by_bits_and_not_by_how_many_sites_have_them(model):
    """Published mode; hardened mode opens nothing about them, since a bit may depend on one sample."""
    data = {"basel": images(2, 0), "lugano": images(2, 1), "chur": images(2, 2)}
    data["chur"].obs["kind"] = "dark"
    options = PUBLISHED | {"rounds": 1, "local_epochs": 1, "validation": 0.0, "mode": "published"}
    run = rehearse("adapt-model", data, model=str(model), labels=("bright", "dark"), **options)
    entries = [e for e, _ in run.receipts["coordinator"].entries]
    before = entries[: next(i for i, e in enumerate(entries) if e.protocol == "permuted_inference")]
    opened = {(e.protocol, e.name) for e in before if e.kind == "opened" and e.to == "basel"}
    assert opened == {("count_tests", "of 2 counts over all sites, which reach 1")}
    assert "secure_sum.Total" not in {e.name for e in before}  # the sum, which told how many sites have each


def test_genes_are_a_fixed_panel():
    from cloister.workflows.adapt_model.workflow import inputs_of

    counts = anndata.AnnData(np.array([[1.0, 2.0, 1.0, 9.0], [0.0, 0.0, 5.0, 1.0]], np.float32))
    counts.var_names = ["C", "A", "B", "other"]
    x = inputs_of(counts, CELLS)
    want = np.log1p(np.array([[2, 1, 1], [0, 5, 0]]) / np.array([[4], [5]]) * 100) / 5
    np.testing.assert_allclose(x[..., 0], want, rtol=1e-6)
    np.testing.assert_allclose(x[..., 1], want**2, rtol=1e-6)
    with pytest.raises(DataError, match=r"1 of the model's 3 genes are not in adata.var_names \(e.g. 'B'\)"):
        inputs_of(counts[:, ["C", "A"]].copy(), CELLS)


def test_bad_options_and_files(model, tmp_path):
    with pytest.raises(ParameterError, match="budget"):
        rehearse("adapt-model", {"basel": images(12, 0), "lugano": images(12, 1)}, model=str(model), budget=0)
    with pytest.raises(DataError, match="there is no model"):
        rehearse("adapt-model", {"basel": images(12, 0), "lugano": images(12, 1)}, model="nowhere.npz", **OPTIONS)
    with pytest.raises(DataError, match="not an adapter"):
        Adapted.load(model)


@pytest.mark.slow
def test_cells_post_norm(tmp_path):
    encoder, _ = tiny("post", tokens=4, inputs=2, depth=2, taps=(2,), rank=4, query=0.15, **QUICK)
    dataclasses.replace(encoder, card=CELLS).save(tmp_path / "cells.npz")

    def cells(n, seed):
        rng = np.random.default_rng(seed)
        which = np.arange(n) % 2
        a = anndata.AnnData(rng.poisson(np.where(which[:, None] == 0, [[8, 2, 4]], [[2, 8, 4]])).astype(np.float32))
        a.var_names = ["A", "B", "C"]
        a.obs["cell_type"] = np.where(which == 0, "T", "B")
        return a

    data = {"basel": cells(30, 0), "lugano": cells(30, 1), "vienna": cells(30, 2)}
    run = rehearse("adapt-model", data, model=str(tmp_path / "cells.npz"), **(OPTIONS | {"label_key": "cell_type"}))
    for site in data:
        right = run.data[site].obs["predicted"].astype(str).to_numpy() == data[site].obs["cell_type"].to_numpy()
        assert right.mean() >= 0.8


@pytest.mark.slow
def test_the_standard_ring(model):
    data = {"basel": images(24, 0), "lugano": images(16, 1)}
    run = rehearse("adapt-model", data, model=str(model), **(OPTIONS | {"ring": "standard"}))
    encoder = polynomial.Encoder.load(model).rounded(13)
    from cloister.workflows.adapt_model.workflow import inputs_of

    for site, given in data.items():
        exact = polynomial.taps_of(encoder, polynomial.hidden(encoder, inputs_of(given, IMAGES)))[:, 0]
        np.testing.assert_allclose(run.data[site].obsm["predicted_features"], exact, atol=1e-2)


@pytest.mark.slow
def test_published(model, tmp_path):
    data = {"basel": images(4, 0), "lugano": images(4, 1)}
    run = rehearse("adapt-model", data, mode="published", model=str(model), **PUBLISHED)
    assert run.data["basel"].obsm["predicted_features"].shape == (4, 8)
    a = run.data["basel"]
    p = run.model.probabilities(a.obsm["predicted_features"].reshape(4, 1, 8))
    own = p[np.arange(4), [run.model.labels.index(v) for v in a.obs["kind"]]]
    assert np.isfinite(own).all()
    assert len(run.results["basel"]["losses"]) == OPTIONS["rounds"] * OPTIONS["local_epochs"]  # a batch each
    run.model.save(tmp_path / "adapter.npz")
    options = {"model": str(model), "adapter": str(tmp_path / "adapter.npz"), "ring": "small", "timeout": 300.0}
    served = rehearse("serve-model", {"vienna": images(3, 2, labelled=False)}, mode="published", **options)
    assert set(served.data["vienna"].obs["predicted"]) <= {"bright", "dark"}
    with pytest.raises(DataError, match="another mode"):
        rehearse("serve-model", {"vienna": images(3, 2, labelled=False)}, **options)
    with pytest.raises(DataError, match="at least two; found one"):
        rehearse("serve-model", {"vienna": images(1, 2, labelled=False)}, mode="published", **options)
    one = {"basel": images(4, 0), "lugano": images(4, 1)[:1].copy()}
    with pytest.raises(DataError, match=r"at least 2|at least two"):
        rehearse("adapt-model", one, mode="published", model=str(model), **PUBLISHED)


def test_it_explains_only_what_it_runs():
    for mode, own, other, summed in (
        ("hardened", "checked_training", "federated_training", "checked_sum"),
        ("published", "federated_training", "checked_training", "secure_sum"),
    ):
        declared = workflows.get("adapt-model").mode(mode).protocols
        assert {own, "model_card", summed} < set(declared)
        assert not {other, "pseudo_labels"} & set(declared)
    assert "count_tests" not in workflows.get("adapt-model").mode("hardened").protocols
    assert "pseudo_labels" in workflows.get("fine-tune").mode("hardened").protocols
    session = types.SimpleNamespace(sites=("a", "b"), coordinator="hub", study=types.SimpleNamespace(seed=0))
    for mode, params_of in (("hardened", training.checked_params), ("published", training.training_params)):
        params = params_of(session, adapt_model.in_mode(adapt_model.Options(), mode), types.SimpleNamespace(digest=""))
        assert params.pseudo.source == "none"


def test_budgets_are_counted_in_a_file_unless_the_model_is_the_demo(tmp_path):
    from types import SimpleNamespace

    from cloister.cells.demo import demo_encoder
    from cloister.workflows.adapt_model.inference import ledger_of

    def options(model, ledger=None):
        return SimpleNamespace(model=str(model), ledger=ledger)

    ledger_of(options(tmp_path / "m.npz"), {}).admit("basel", 5, 10)
    assert ledger_of(options(tmp_path / "m.npz"), {}).used == {"basel": 5}  # the next run counts on
    assert (tmp_path / "m.npz.ledger.json").exists()
    assert ledger_of(options(tmp_path / "m.npz", str(tmp_path / "other.json")), {}).used == {}
    assert ledger_of(options(demo_encoder()), {}).path is None
    (tmp_path / "link.npz").symlink_to(tmp_path / "m.npz")
    (tmp_path / "link.json").symlink_to(tmp_path / "m.npz.ledger.json")
    for named in (options(tmp_path / "link.npz"), options(tmp_path / "m.npz", str(tmp_path / "link.json"))):
        assert ledger_of(named, {}).used == {"basel": 5}  # a link is no second budget
        ledger_of(named, {}).admit("basel", 1, 10)
        assert (tmp_path / "link.json").is_symlink()
        (tmp_path / "m.npz.ledger.json").write_text('{"basel": 5}')


# ---- training in hardened mode ---------------------------------------------------------------------------------------


def stored(model, folder, data):
    """Put the plain model's taps where `stage=train` finds them, so that nothing has to be encrypted."""
    from cloister.mpc.crypto.owner_ckks import scheme
    from cloister.workflows.adapt_model import model_card
    from cloister.workflows.adapt_model.checkpoint import Taps
    from cloister.workflows.adapt_model.inference import fingerprint

    encoder = polynomial.Encoder.load(model)
    told = model_card.told_by(encoder, scheme.SMALL)
    for site, a in data.items():
        x = adapt_model.inputs_of(a, encoder.card)
        taps = polynomial.taps_of(encoder, polynomial.hidden(encoder, x))
        Taps(folder / f"{site}.taps.npz", fingerprint(x, told, "hardened")).add(taps, None)
    return {"model": str(model), "ring": "small", "label_key": "kind", "stage": "train", "taps": str(folder)}


def test_the_default_adds_noise_for_single_samples_and_still_learns(model, tmp_path):
    data = {"basel": images(200, 0), "lugano": images(160, 1), "vienna": images(12, 2)}
    run = rehearse("adapt-model", data, **stored(model, tmp_path, data))
    for site, a in data.items():
        assert (run.data[site].obs["predicted"].astype(str).to_numpy() == a.obs["kind"].to_numpy()).mean() >= 0.9
    said = run.results["basel"]
    about = "one sample, against that sample contributing nothing"
    assert said["privacy"] == {"epsilon": 6.3, "delta": 1e-5, "protects": about}
    spent = [e.name for e, _ in run.receipts["basel"].entries if e.kind == "spent"]
    assert spent == [f"epsilon 6.3, delta 1e-05, for {about}"]
    assert said["history"] == run.results["coordinator"]["history"]
    assert said["best_round"] == 40  # the last
    assert run.receipts["basel"].smallest_group["cells"] >= 10
    notes = adapt_model.check(data["vienna"], adapt_model.in_mode(adapt_model.Options(label_key="kind"), "hardened"))
    assert "12 labelled samples here are few for dp_noise=5" in notes[1]
    assert len(adapt_model.figures(run.outcomes, None)) == 1  # of accuracy alone
    named = {site: a.copy() for site, a in data.items() if site != "vienna"}
    for a in named.values():
        a.obs["donor"] = [f"d{i % 5}" for i in range(a.n_obs)]
    options = stored(model, tmp_path, named) | {"donor_key": "donor", "rounds": 2}
    run = rehearse("adapt-model", named, **options)
    assert run.results["basel"]["privacy"]["protects"] == "all samples of one donor, against none"
    assert run.receipts["basel"].smallest_group == {"cells": 200, "donors": 5}
    assert all("accuracy" not in row for row in run.results["basel"]["history"])  # a donor has many held-out samples
    named["basel"].obs["donor"] = ["one", "two"] * 100
    with pytest.raises(DataError, match="min_donors = 3"):
        rehearse("adapt-model", named, **options)


def test_without_noise_it_is_adam_on_clipped_gradients_of_all_samples(model, tmp_path):
    data = {"basel": images(40, 0), "lugano": images(30, 1)}
    options = stored(model, tmp_path, data)
    more = {"dp_noise": 0.0, "validation": 0.0, "rounds": 4, "schedule": "step", "decay_at": (2, 3), "decay": 0.5}
    run = rehearse("adapt-model", data, **options, **more)
    chosen = adapt_model.in_mode(adapt_model.Options(**{k: v for k, v in more.items()}), "hardened")
    learners = []
    for site, a in data.items():
        codes = training.codes_of(a.obs["kind"].tolist(), ("bright", "dark"))
        taps = np.asarray(run.data[site].obsm["predicted_features"]).reshape(len(codes), 1, 4)
        table = Table(torch.as_tensor(taps, dtype=torch.float32))
        learners.append(training.learner_of(chosen, (1, 4), ("bright", "dark"), table, codes, [], site, 0))
    path = Way.begin(learners[0].trainable)
    for t, rate in enumerate((0.03, 0.03, 0.015, 0.0075)):
        g = np.sum([one.gradient(path.theta.astype(np.float32), t, 1.0).sum for one in learners], axis=0)
        path.advance(g, rate, 0.0)
    learners[0].place(path.theta)
    for mine, theirs in zip(learners[0].model.parameters(), run.model.module.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=0)


def one_label(a):
    b = a.copy()
    b.obs["kind"] = "dark"
    return b


@pytest.mark.parametrize("more", [{}, {"dp_noise": 0.0, "metric": "balanced_accuracy"}, {"labels": ("bright", "dark")}])
def test_whatever_others_bring_a_site_adds_sums_over_enough_samples(model, tmp_path, more):
    data = {"basel": images(150, 0), "lugano": images(40, 1), "vienna": images(30, 2)}
    options = stored(model, tmp_path, data) | {"rounds": 3}
    found = check_disclosure("adapt-model", data, "basel", attacks=[one_label], **options, **more)
    assert found.contributions == 2 * (3 + 4)  # steps, scores
    assert found.cells >= 10


# ---- ask once, train often -------------------------------------------------------------------------------------------


def test_taps_are_asked_for_once_and_trained_on_often(model, tmp_path):
    data = {"basel": images(24, 0), "lugano": images(20, 1)}
    for a in data.values():
        a.obs["truth"] = a.obs["kind"].copy()
        a.obs["kind"] = a.obs["kind"].where(np.arange(a.n_obs) % 5 < 3)
    ledger, folder = tmp_path / "ledger.json", tmp_path / "asked"
    common = {"model": str(model), "ledger": str(ledger), "ring": "small", "taps": str(folder), "timeout": 300.0}
    unlabelled = {site: a[:, :].copy() for site, a in data.items()}
    for a in unlabelled.values():
        del a.obs["kind"]
    asked = rehearse("adapt-model", unlabelled, stage="ask", **common)  # without labels
    assert asked.results["basel"]["asked"] == 24
    assert asked.results["coordinator"]["answered"] == {"basel": 1, "lugano": 1}
    assert "checked_training" not in {e.protocol for e, _ in asked.receipts["basel"].entries}
    assert not [e for e, _ in asked.receipts["basel"].entries if e.kind == "spent"]
    counted = ledger.read_text()

    options = OPTIONS | common | {"stage": "train", "budget": 1}  # a budget that is spent long ago
    runs = []
    for more in (
        {"bottleneck": 2},
        {"bottleneck": 0, "schedule": "step", "decay_at": (3, 5), "dp_noise": 0.0, "metric": "balanced_accuracy"},
        {"alpha": 0.5, "patience": 2, "validation": 0.1, "dp_noise": 0.0, "min_cells": 4},
    ):
        runs.append(rehearse("adapt-model", data, **(options | more)))
        sent = {e.protocol for e, _ in runs[-1].receipts["basel"].entries if e.kind == "sent"}
        assert not sent & {"encrypted_inference", "permuted_inference"}
    assert ledger.read_text() == counted
    for site, a in data.items():
        taps = asked.data[site].obsm["predicted_features"]
        for run in runs:
            assert np.array_equal(run.data[site].obsm["predicted_features"], taps)
        found = runs[0].data[site].obs["predicted"].astype(str).to_numpy()
        assert (found == a.obs["truth"].to_numpy()).mean() >= 0.9
    assert (runs[0].model.parameters, runs[1].model.parameters) == (2 * 4 + 2 + 4 * 2 + 4 + 10, 10)
    used = [e.name for e, _ in runs[0].receipts["basel"].entries if e.kind == "used"]
    assert "taps of 24 samples, queried in an earlier run" in used
    both = rehearse("adapt-model", data, **(options | {"stage": "both", "budget": 4096}))  # asks for what is missing
    assert both.results["coordinator"]["answered"] == {"basel": 0, "lugano": 0}
    assert ledger.read_text() == counted

    check_baselines(runs[0], tmp_path)
    changed = {**data, "basel": images(24, 5)}
    with pytest.raises(DataError, match="holds taps of other samples"):
        rehearse("adapt-model", changed, **options)
    with pytest.raises(DataError, match="there is no file of taps .*ask first: stage = 'ask'"):
        rehearse("adapt-model", {**data, "chur": images(12, 7)}, **options)


def test_kept_taps_stand_where_their_samples_do(model):
    """A sample beyond what the model takes in was not asked about: the others' taps must not move up."""
    from cloister.workflows.adapt_model.checkpoint import Taps
    from cloister.workflows.adapt_model.inference import all_taps

    s = polynomial.Encoder.load(model).shape
    inputs = np.zeros((3, s.tokens - 1, s.inputs))
    inputs[1, 0, 0] = 1e6
    kept = Taps(read=[np.full((1, 1, 4), 1.0), np.full((1, 1, 4), 2.0)])
    told = types.SimpleNamespace(shape=s)
    found = all_taps(types.SimpleNamespace(mode="hardened"), told, inputs, kept)
    assert found[:, 0, 0].tolist()[::2] == [1.0, 2.0]
    assert np.isnan(found[1]).all()
    kept.read.append(np.full((1, 1, 4), 3.0))
    assert all_taps(types.SimpleNamespace(mode="published"), told, inputs, kept)[:, 0, 0].tolist() == [1.0, 2.0, 3.0]


def check_baselines(run, tmp_path):
    """Alone, together, pooled, linear probing, full fine-tuning: one table of the samples that nobody trained on."""
    import cloister as cl

    table = cl.adaptation_baselines(run, truth_key="truth", fine_tuning_rate=1e-2)
    without = ["no provider, each site alone", "no provider, pooled"]
    assert list(table) == ["each site alone", "together", "pooled", "linear probing", "full fine-tuning", *without]
    asked = {s: run.data[s].obs["kind"].isna().to_numpy() for s in run.data}
    right = [
        (run.data[s].obs["predicted"].astype(str) == run.data[s].obs["truth"].astype(str))[asked[s]] for s in run.data
    ]
    assert table["together"]["accuracy"] == np.concatenate(right).mean()
    assert table["together"]["parameters"] == run.model.parameters
    assert table["full fine-tuning"]["parameters"] > 20 * table["linear probing"]["parameters"]
    assert min(row["accuracy"] for row in table.values()) >= 0.7
    page = run.report(tmp_path / "report.html", compared=list(table.values())).read_text()
    assert "full fine-tuning" in page
    assert table["no provider, pooled"]["parameters"] == 2 * (run.data["basel"].n_vars + 1)
    for row in table.values():
        row["accuracy"] = 0.8
    table["no provider, pooled"]["accuracy"] = 0.79
    table["no provider, each site alone"]["accuracy"] = 0.79
    assert not without_provider(table)
    assert "does not help here" not in run.report(tmp_path / "ahead.html", compared=list(table.values())).read_text()
    table["no provider, each site alone"]["accuracy"] = 0.8
    assert "a site needs nobody for that" in without_provider(table)
    table["no provider, pooled"]["accuracy"] = 0.81
    assert "train-classifier needs no provider" in without_provider(table)
    assert "does not help here" in run.report(tmp_path / "behind.html", compared=list(table.values())).read_text()
    with pytest.raises(ParameterError, match="column of true labels"):
        cl.adaptation_baselines(run, truth_key="kind")


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"stage": "train"}, "stage 'train' needs taps="),
        ({"permutation": "round", "taps": "asked"}, "no taps to store"),
        ({"schedule": "step"}, "needs decay_at="),
        ({"decay_at": (3,)}, "needs decay_at="),
        ({"momentum": 1.0}, "momentum"),
        ({"permutation": "round"}, "is of mode published"),
        ({"clients_per_round": 2}, "'clients_per_round'"),
        ({"clients_per_round": 3, "dp_noise": None, "mode": "published"}, "must be 0 or 2 to 2 sites"),
        ({"optimizer": "sgd"}, "'optimizer'"),
        ({"metric": "macro_f1"}, "'metric'"),
        ({"patience": 2}, "'patience'"),
        ({"min_cells": 0}, "'min_cells'"),
        ({"dp_noise": -1.0}, "'dp_noise'"),
        ({"lr": -1.0}, "'lr'"),
        ({"mode": "published"}, "'dp_noise'"),
        ({"mode": "published", "dp_noise": None, "donor_key": "donor"}, "'donor_key'"),
    ],
)
def test_options_that_do_not_fit_together(model, options, found):
    data = {"basel": images(12, 0), "lugano": images(12, 1)}
    with pytest.raises(ParameterError, match=found):
        rehearse("adapt-model", data, model=str(model), **(OPTIONS | options))


def test_an_unfolded_encoder_computes_what_the_exported_one_does():
    from cloister.models.polynomial.unfolded import unfold

    for norm, attention in (("pre", "taylor"), ("post", "taylor"), ("pre", "quadratic")):
        encoder, x = tiny(norm, depth=2, taps=(2,), attention=attention)
        with torch.no_grad():
            found = unfold(encoder, 3).trace(torch.as_tensor(x, dtype=torch.float32)).hidden[-1]
        exact = polynomial.hidden(encoder, x)[-1]
        assert np.abs(found.numpy() - exact).max() < 2e-2 * np.abs(exact).max()  # three steps of division, four of root


def counted(ledger):
    """What a ledger counts by name; it counts the same by key."""
    return {site: n for site, n in json.loads(ledger.read_text()).items() if not site.startswith("key:")}


@pytest.mark.slow
def test_published_mode_asks_again_with_a_new_order_for_every_round_and_gives_the_loss_of_every_batch(model, tmp_path):
    data = {"basel": images(2, 0), "lugano": images(2, 1)}
    ledger = tmp_path / "ledger.json"
    options = PUBLISHED | {"rounds": 2, "local_epochs": 1, "validation": 0.0, "labels": ("bright", "dark")}
    options |= {"model": str(model), "ledger": str(ledger), "mode": "published"}
    run = rehearse("adapt-model", data, permutation="round", **options)
    opened = [
        e.name for e, _ in run.receipts["basel"].entries if e.kind == "opened" and e.protocol == "permuted_inference"
    ]
    assert opened == ["all activations of block 1 for 2 samples"] * 2
    assert counted(ledger) == {"basel": 4, "lugano": 4}  # every round counts
    losses = run.results["basel"]["losses"]
    assert len(losses) == 2  # one batch a round
    assert abs(losses[0] - np.log(2)) < 0.5  # of the first weights: near a guess
    folder = tmp_path / "asked"
    kept = {"taps": str(folder)}
    rehearse("adapt-model", data, stage="ask", **kept, **options)
    trained = rehearse("adapt-model", data, stage="train", **kept, **options)
    assert counted(ledger) == {"basel": 6, "lugano": 6}
    assert trained.data["basel"].obsm["predicted_features"].shape == (2, 8)
    with pytest.raises(DataError, match="holds the taps of these samples already"):
        rehearse("adapt-model", data, stage="ask", **kept, **options)
