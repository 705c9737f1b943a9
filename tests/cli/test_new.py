"""`cloister new study`: what it writes is a study, runs as it stands on small cells, and overwrites nothing."""

import re

import pytest
from typer.testing import CliRunner

import cloister as cl
from cloister.cli.main import app
from cloister.cli.new import TEMPLATES, study_of
from cloister.errors import ParameterError, UsageError
from cloister.study import Study
from cloister.workflows.pipeline import check_steps

CHAIN = ["quality-control", "choose-genes", "shared-pca", "integrate", "cluster-cells", "find-markers", "shared-map"]


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_template_is_a_study_with_these_sites(template):
    assert template in TEMPLATES
    text = study_of(template, ["oslo", "bergen", "tromso", "kiel"])
    assert text.count('= "site"') == 4
    assert "basel = " not in text


def test_atlas_chains_the_pipeline_and_explains_every_step(tmp_path):
    path = tmp_path / "study.toml"
    done = CliRunner().invoke(app, ["new", "study", "--template", "atlas", "--out", str(path)])
    assert done.exit_code == 0, done.output
    assert str(path) in done.output.replace("\n", "")
    study = Study.load(path)
    assert [part.workflow for part, _, _ in check_steps(study)] == CHAIN
    assert sorted(study.sites) == ["basel", "lugano", "vienna"]
    text = path.read_text()
    assert [f"Step {i}" for i in range(1, 8)] == re.findall(r"^# (Step \d)\.", text, flags=re.MULTILINE)
    # an option in a comment is one that the step has
    for part, workflow, _ in check_steps(study):
        block = text.split(f'workflow = "{part.workflow}"')[1].split("[[step]]")[0]
        named = re.findall(r"^# (\w+) = ", block, flags=re.MULTILINE)
        assert {*named} <= {*workflow.options.__dataclass_fields__}


def test_atlas_runs_from_counts_to_a_map(tmp_path):
    pytest.importorskip("umap", reason="the extra `map`")
    text = study_of("atlas", [])
    text = text.replace("n_top_genes = 2000", "n_top_genes = 200").replace("n_components = 50", "n_components = 10")
    (tmp_path / "study.toml").write_text(text)
    cells = cl.demo_cohort(2, 100)
    series = cl.rehearse(tmp_path / "study.toml", data=cells)
    series.check()
    assert [*series.runs] == CHAIN
    names = [set(a.obs["cluster"].cat.categories) for a in series.data.values()]
    assert names[0] == names[1] == names[2]
    assert len(names[0]) > 2
    assert set(series.data["basel"].uns["X_shared_pca"]["genes"]) <= set(
        series.data["basel"].var_names[series.data["basel"].var["highly_variable"]]
    )
    markers = series.data["vienna"].uns["markers"]
    assert {*markers["label"].astype(str)} <= names[0]
    assert len(cl.pl.dotplot(series).axes) == 2
    assert series.data["vienna"].obsm["X_shared_map"].shape[1] == 2


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["new", "study", "--template", "map"], "there is no template 'map'; there is atlas"),
        (["new", "workflow"], "'workflow' cannot be written"),
        (["new", "study", "--site", "oslo", "--site", "oslo"], "name of its own"),
    ],
)
def test_what_cannot_be_written_is_one_sentence(words, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, words)
    assert isinstance(done.exception, UsageError)
    assert says in str(done.exception)
    assert not list(tmp_path.iterdir())


def test_a_file_that_is_there_stays(tmp_path):
    path = tmp_path / "study.toml"
    path.write_text("mine")
    done = CliRunner().invoke(app, ["new", "study", "--out", str(path)])
    assert isinstance(done.exception, UsageError)
    assert path.read_text() == "mine"


@pytest.mark.parametrize("site", ["two words", 'a"b\n[x]', "hub"])
def test_a_site_needs_a_name_that_a_study_takes(site):
    with pytest.raises(ParameterError, match="valid party name|stands twice"):
        study_of("atlas", [site, "oslo", "kiel"])
