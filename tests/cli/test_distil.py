"""`cloister distil`: from a checkpoint and images to the model that is served, or to a refusal that says where."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from cloister.cli.main import main
from cloister.models.polynomial import Encoder, check_inputs, check_ranges, hidden, taps_of
from cloister.models.student import image_inputs

VECTORS = Path(__file__).parents[1] / "vectors"
QUICK = ("--heads", 2, "--epochs", 2, "--tune-epochs", 6, "--rate", 1e-2, "--last-rate", 3e-3, "--validation", 0.3,
         "--quiet")  # fmt: skip


@pytest.fixture
def run(monkeypatch, capsys):
    def call(*words, verb="distil"):
        monkeypatch.setattr(sys, "argv", ["cloister", verb, *map(str, words)])
        with pytest.raises(SystemExit) as end:
            main()
        said = capsys.readouterr()
        return end.value.code, said.out, " ".join(said.err.split())

    return call


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A teacher of timm's with random weights, and images of three kinds."""
    at = tmp_path_factory.mktemp("distil")
    with np.load(VECTORS / "vit_timm.npz") as kept:
        state = {k.removeprefix("state:"): kept[k] for k in kept.files if k.startswith("state:")}
    np.savez(at / "teacher.npz", **state)
    rng = np.random.default_rng(0)
    y = np.arange(90) % 3
    x = 0.8 * rng.uniform(0, 1, (3, 192))[y] + rng.uniform(0, 0.2, (90, 192))
    np.savez(at / "images.npz", X=np.rint(255 * x).astype(np.uint8), y=y, kind=np.array(["a", "b", "c"])[y],
             one=np.full(90, "a"))  # fmt: skip
    return at


def test_a_checkpoint_becomes_a_model_and_a_page(run, folder, tmp_path):
    code, out, err = run(folder / "teacher.npz", folder / "images.npz", "--label-key", "y", *QUICK, "--mean",
                         "0.4,0.5,0.6", "--out", tmp_path / "model.npz", "--json")  # fmt: skip
    assert code == 0, err
    told = json.loads(out)
    before, after = (told["accuracy"][k] for k in ("teacher, as it came", "model that is served"))
    assert before <= 0.75 < after  # random weights; the kinds are easy
    assert list(told["agreement"]) == ["student, before distillation", "student, distilled", "model that is served"]
    encoder = Encoder.load(tmp_path / "model.npz")
    assert encoder.card["mean"] == [0.4, 0.5, 0.6]
    assert encoder.shape.attention == "quadratic"
    with np.load(folder / "images.npz") as kept:
        inputs = image_inputs(kept["X"], json.loads(json.dumps(encoder.card)))
    check_inputs(encoder.shape, inputs)
    check_ranges(encoder, inputs)
    page = (tmp_path / "model.html").read_text()
    for words in ("Stage 1: layers", "Stage 2: prediction", "The teacher, tuned", "Before and after", "attention from"):
        assert words in page
    assert page.count("<img") == 5
    assert "within its intervals" in page
    assert "Refused" not in page


@pytest.mark.slow
def test_from_a_checkpoint_to_labels_of_new_images_under_encryption(run, folder, tmp_path):
    """The commands of the page, one after the other: the provider's, the hospitals', and those of a third one."""
    pytest.importorskip("numba")
    anndata = pytest.importorskip("anndata")
    model, rng = tmp_path / "model.npz", np.random.default_rng(1)
    with np.load(folder / "images.npz") as kept:
        x, kinds = kept["X"], kept["kind"]
    means = np.stack([x[kinds == k].mean(axis=0) for k in "abc"])
    for name, n in (("basel", 30), ("lyon", 24), ("new", 21)):
        y = np.arange(n) % 3
        own = np.clip(np.rint(means[y] + rng.normal(0, 12, (n, 192))), 0, 255).astype(np.uint8)
        np.savez(tmp_path / f"{name}.npz", X=own, **{"truth" if name == "new" else "kind": np.array(list("abc"))[y]})
    words = ("--label-key", "y", *QUICK, "--attention", "taylor", "--degree", 2, "--out", model)
    code, _, err = run(folder / "teacher.npz", folder / "images.npz", *words)
    assert code == 0, err

    def rehearse(workflow, sites, out, *words):
        data = [word for site in sites for word in ("--data", f"{site}={tmp_path / site}.npz")]
        common = ("--model", model, "--out", tmp_path / out, "--timeout", 300, "--quiet")
        code, _, err = run(workflow, *data, *common, *words, verb="rehearse")
        assert code == 0, err

    training = ("--label-key", "kind", "--rounds", 20, "--dp-noise", 0.1)  # few images, so little noise
    rehearse("adapt-model", ("basel", "lyon"), "results", *training)
    rehearse("serve-model", ("new",), "served", "--adapter", tmp_path / "results" / "basel.adapter.npz")
    new, encoder = anndata.read_h5ad(tmp_path / "served" / "new.h5ad"), Encoder.load(model).rounded(13)
    assert (new.obs["predicted"].astype(str) == new.obs["truth"].astype(str)).mean() > 0.9
    plain = taps_of(encoder, hidden(encoder, image_inputs(new.X, encoder.card)))
    np.testing.assert_allclose(np.asarray(new.obsm["predicted_features"]).reshape(plain.shape), plain, atol=1e-2)
    assert plain.std(axis=(0, 1)).max() > 0.6  # so that the tolerance is one
    ledger = json.loads(Path(f"{model}.ledger.json").read_text())
    named = {site: count for site, count in ledger.items() if not site.startswith("key:")}
    assert named == {"basel": 4096, "lyon": 4096, "new": 4096}  # whole batches, over both runs
    assert sorted(ledger.values()) == [4096] * 6  # each also under its key


def test_names_of_labels_get_a_head_of_their_own(run, folder, tmp_path):
    words = (folder / "teacher.npz", folder / "images.npz", "--label-key", "kind", *QUICK[:-1], "--again", 0)
    code, out, err = run(*words, "--out", tmp_path / "model.npz")
    assert code == 0, err
    assert "a new head for 3 labels" in err
    assert "model that is served" in out


def test_without_labels_the_teacher_is_imitated(run, folder, tmp_path):
    code, out, err = run(folder / "teacher.npz", folder / "images.npz", *QUICK, "--out", tmp_path / "m.npz", "--json")
    assert code == 0, err
    told = json.loads(out)
    assert told["accuracy"] == {}
    assert told["agreement"]["model that is served"] > 0.5


def test_a_student_outside_its_intervals_is_refused_with_the_place(run, folder, tmp_path):
    """Scores of one block are large, no penalty: the page says where, and no model is written over an older one."""
    with np.load(folder / "teacher.npz") as kept:
        scale = {"blocks.0.attn.qkv.weight": 0.3, "blocks.1.attn.qkv.weight": 4.0}
        state = {k: kept[k] * scale.get(k, 1.0) for k in kept.files}
    np.savez(tmp_path / "wild.npz", **state)
    (tmp_path / "model.npz").write_bytes(b"older")
    words = (tmp_path / "wild.npz", folder / "images.npz", *QUICK, "--attention", "taylor", "--out",
             tmp_path / "model.npz")  # fmt: skip
    code, _, err = run(*words, "--penalty", 0, "--again", 0)
    assert code == 1
    assert "the student is refused, and no model was written: block 2: " in err
    assert (tmp_path / "model.npz").read_bytes() == b"older"
    page = (tmp_path / "model.html").read_text()
    assert "Refused: " in page
    assert "<strong>outside</strong>" in page


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("--label-key", "none"), 1, "no column 'none'"),
        (("--label-key", "one"), 1, "all images have the label 'a'"),
        (("--mean", "1,2"), 1, "one number or one per channel (3)"),
        (("--std", "a"), 2, "--std is one number, or one per channel"),
        (("--attention", "linear"), 1, "attention is one of taylor, quadratic"),
        (("--degree", "7"), 1, "degree is one of 2, 4, 6"),
        (("--validation", "0"), 1, "validation must be between 0 and 1"),
        (("--epochs", "0"), 1, "epochs, batch-size and rank are at least 1"),
        (("--decay", "2"), 1, "decay is above 0 and at most 1"),
        (("--heads", "3"), 1, "multiple of the number of heads 3"),
        (("--device", "gpu"), 1, "needs an NVIDIA card"),
        (("--out", "nowhere/model.npz"), 2, "must be a file in a folder that is there"),
    ],
)
def test_bad_words_are_answered_in_a_sentence_before_anything_is_trained(
    words, code, said, run, folder, tmp_path, monkeypatch
):
    from cloister.models.student import training

    monkeypatch.setattr(training, "_train", None)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    found, _, err = run(folder / "teacher.npz", folder / "images.npz", *QUICK, *words)
    assert (found, said in err) == (code, True), err
    assert not list(tmp_path.iterdir())


def test_data_and_teachers_that_do_not_fit_are_refused(run, folder, tmp_path):
    np.savez(tmp_path / "grey.npz", X=np.zeros((20, 64)))
    np.savez(tmp_path / "few.npz", X=np.zeros((3, 192)))
    for teacher, data, said in (
        (folder / "teacher.npz", tmp_path / "grey.npz", "images of 8 x 8 x 3 (192 values), found rows of 64"),
        (folder / "teacher.npz", tmp_path / "few.npz", "3 image(s) are too few"),
        (folder / "images.npz", folder / "images.npz", "no ViT of timm, torchvision"),
        (folder / "none.pt", folder / "images.npz", "there is no checkpoint"),
    ):
        code, _, err = run(teacher, data, *QUICK, "--out", tmp_path / "model.npz")
        assert (code, said in err) == (1, True), err
        assert not (tmp_path / "model.npz").exists()
    code, _, err = run(folder / "teacher.npz", folder / "images.npz", *QUICK, "--out", folder / "images.npz")
    assert (code, "is the teacher or the data" in err) == (2, True)
