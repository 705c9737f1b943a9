"""Rehearsals of studies of several steps: one result after the other, one page, and what is left when a step fails."""

import json

import numpy as np
import pytest
from anndata import AnnData
from scipy import sparse

import cloister as cl
from cloister.errors import CloisterError, DataError, ParameterError, ProtocolAbort
from cloister.rehearsal.rehearsal import Fault, rehearse, rehearse_steps
from cloister.rehearsal.results import clear_steps, load_runs, save_run, step_folder
from cloister.study import Party, Step, Study, format_study

PARTIES = {Party("hub"): "coordinator", Party("a"): "site", Party("b"): "site", Party("c"): "site"}
BINS = Step("bin-values", options={"n_bins": 8, "min_values": 50})
MORE = Step(
    "bin-values", options={"n_bins": 5, "min_values": 50, "layer": "binned", "key_added": "coarse"}, name="coarse"
)
SPACE = Step("shared-pca", options={"layer": "coarse", "n_components": 3, "n_top_genes": 8})
STORY = Study("story", "", PARTIES, steps=(BINS, MORE), timeout=120.0, seed=5)


def cells(seed, n=50, genes=12):
    rng = np.random.default_rng(seed)
    adata = AnnData(sparse.csr_matrix(rng.poisson(1.5, (n, genes)).astype(np.float32)))
    adata.var_names = [f"g{i}" for i in range(genes)]
    adata.obs_names = [f"c{i}" for i in range(n)]
    return adata


@pytest.fixture
def data():
    return {p: cells(i) for i, p in enumerate("abc")}


def test_each_step_works_on_what_the_one_before_gave_as_if_called_by_hand(data):
    series = cl.rehearse(STORY, data=data)
    assert (series.failed, [*series.runs]) == ("", ["bin-values", "coarse"])
    by_hand = rehearse("bin-values", data, seed=5, **BINS.options).data
    by_hand = rehearse("bin-values", by_hand, seed=5, **MORE.options).data
    for p in data:
        assert np.array_equal(series.data[p].layers["coarse"].toarray(), by_hand[p].layers["coarse"].toarray())
        assert "binned" not in data[p].layers  # copies
        assert "coarse" not in series.runs["bin-values"].data[p].layers  # each run keeps its own
    assert {"hub", "a", "b", "c"} == series.receipts["coarse"].keys() == series.cost["coarse"].keys()
    heads = {r.header["whole_study"] for each in series.receipts.values() for r in each.values()}
    assert len(heads) == 1
    assert "done" in repr(series)


def test_a_step_that_fails_leaves_the_earlier_ones_whole_and_is_named(data, tmp_path):
    last = Step("find-outliers", options={"use_rep": "X_shared_pca"})
    study = Study("story", "", PARTIES, steps=(BINS, MORE, SPACE, last), timeout=3.0)
    saved = []

    def keep(run):
        saved.append(save_run(run, step_folder(tmp_path, run.study)))

    series = rehearse_steps(study, data, faults=[Fault("truncate", "hub", "a", "shared_pca.Components")], on_step=keep)
    assert series.failed == "shared-pca"
    with pytest.raises(ProtocolAbort, match=r"step 3 of 4 \(shared-pca\): "):
        series.check()
    assert set(series.data["a"].layers) >= {"binned", "coarse"}
    assert len(saved) == 3
    one, two, three = load_runs(tmp_path)
    assert (one.abort, two.abort) == (None, None)
    assert three.abort is not None
    assert three.study.place == "step 3 of 4 (shared-pca)"
    page = series.report(tmp_path / "report.html").read_text()
    assert "3 runs: 2 completed, 1 aborted. Not begun: find-outliers." in page
    assert "Step 3 of 4: shared-pca, hardened (aborted)" in page
    clear_steps(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]


def test_what_an_earlier_step_gives_is_looked_at_when_it_is_there(data):
    bad = Step("shared-pca", options={"n_components": 4, "n_top_genes": 8, "layer": "coarse", "kind": "log"})
    study = Study("story", "", PARTIES, steps=(BINS, MORE, bad), timeout=3.0)
    with pytest.raises(DataError, match=r"step 3 of 3 \(shared-pca\): site 'a': expected log values, found counts"):
        rehearse(study, data)


def test_one_page_with_a_part_for_each_step(data, tmp_path):
    series = rehearse(STORY, data)
    page = series.report(tmp_path / "r.html").read_text()
    assert "<h1>story</h1>" in page
    for i, name in enumerate(("bin-values", "coarse: bin-values"), 1):
        assert f"Step {i} of 2: {name}, hardened" in page


def test_processes_give_the_same(data):
    here, there = rehearse(STORY, data), rehearse(STORY, data, processes=True)
    for p in data:
        assert np.array_equal(here.data[p].layers["coarse"].toarray(), there.data[p].layers["coarse"].toarray())


def test_a_study_of_one_workflow_can_be_handed_over_whole(data, tmp_path):
    study = Study("one", "bin-values", PARTIES, parameters=dict(BINS.options))
    run = rehearse(study, data)
    assert run.data["a"].layers["binned"].max() <= 7
    (tmp_path / "study.toml").write_text(format_study(STORY))
    assert [*rehearse(tmp_path / "study.toml", data).runs] == [*rehearse(STORY, data).runs]


def test_cells_are_for_the_sites_of_the_study_and_options_are_its_own(data):
    for wrong, says in (
        ({k: data[k] for k in "ab"}, "no cells for 'c', which is a site"),
        ({**data, "d": data["a"]}, "'d' is not a site of the study 'story'; it has a, b, c"),
    ):
        with pytest.raises(ParameterError, match=says):
            rehearse(STORY, wrong)
    for more in ({"mode": "published"}, {"n_bins": 9}, {"seed": 4}):
        with pytest.raises(ParameterError, match="says its mode, seed, timeout and options itself"):
            rehearse(STORY, data, **more)


def test_the_command_line_tells_the_same_story(data, tmp_path, monkeypatch, capsys):
    from cloister.cells.files import write_cells
    from cloister.cli import main as cli

    monkeypatch.chdir(tmp_path)
    for p, adata in data.items():
        write_cells(adata, tmp_path / f"{p}.h5ad")
    (tmp_path / "study.toml").write_text(format_study(STORY))
    files = [word for p in data for word in ("--data", f"{p}={p}.h5ad")]

    def call(*words):
        monkeypatch.setattr("sys.argv", ["cloister", *words])
        with pytest.raises(SystemExit) as e:
            cli.main()
        return e.value.code, capsys.readouterr()

    code, told = call("explain", "study.toml")
    assert code == 0
    assert "takes layers['binned'] from 'bin-values'" in told.out
    assert STORY.digest.hex() in told.out
    code, told = call("check", "a.h5ad", "b=b.h5ad", "--for", "study.toml")
    assert (code, "ready for study.toml" in told.out) == (0, True)
    code, told = call("check", "elsewhere=b.h5ad", "--for", "study.toml")
    assert (code, "'elsewhere' is not a site of study.toml" in told.err) == (2, True)
    code, told = call("rehearse", "study.toml", *files, "--out", "out")
    assert code == 0
    assert "step 2 of 2 (coarse): bin-values, hardened" in told.out
    assert {p.name for p in (tmp_path / "out").iterdir()} == {
        "01-bin-values", "02-coarse", "report.html",
    }  # fmt: skip
    code, told = call("receipt", "out/02-coarse/a.receipt.json", "--verify")
    assert (code, "step 2 of 2 (coarse), whole study" in told.out) == (0, True)
    code, told = call("receipt", "out/02-coarse/a.receipt.json", "out/01-bin-values/b.receipt.json", "--compare")
    assert (code, "two different studies" in told.err) == (4, True)
    code, told = call("report", "out")
    assert "<h1>story</h1>" in (tmp_path / "out" / "report.html").read_text()
    code, told = call("rehearse", "study.toml", *files, "--json")
    assert [*json.loads(told.out)["steps"]] == ["bin-values", "coarse"]
    for words in (("--mode", "plain"), ("--n-bins", "4"), ("study.toml",)):
        code, told = call("rehearse", "study.toml", *words, *files)
        assert (code, "says its workflow, mode and options itself" in told.err) == (2, True)
    code, told = call("rehearse", "bin-values", "study.toml", *files)
    assert (code, "is a study of 2 steps, not of 'bin-values'" in told.err) == (2, True)
    code, told = call("run", "bin-values", "study.toml", "--as", "a")
    assert (code, "is a study of 2 steps, not of 'bin-values'" in told.err) == (2, True)
    code, told = call("run", "bin-values", "--as", "a")
    assert (code, "which study?" in told.err) == (2, True)


def test_errors_of_the_command_line_leave_what_was_done(data, tmp_path, monkeypatch, capsys):
    from cloister.cells.files import write_cells
    from cloister.cli import main as cli

    bad = Step("shared-pca", options={"n_components": 4, "n_top_genes": 8, "layer": "binned", "kind": "log"})
    (tmp_path / "study.toml").write_text(format_study(Study("story", "", PARTIES, steps=(BINS, bad), timeout=3.0)))
    for p, adata in data.items():
        write_cells(adata, tmp_path / f"{p}.h5ad")
    files = [word for p in data for word in ("--data", f"{p}={tmp_path / p}.h5ad")]
    monkeypatch.setattr(
        "sys.argv", ["cloister", "rehearse", str(tmp_path / "study.toml"), *files, "--out", str(tmp_path / "o")]
    )
    with pytest.raises(SystemExit) as e:
        cli.main()
    assert e.value.code == 1
    assert "step 2 of 2 (shared-pca): site 'a': expected log values" in capsys.readouterr().err
    assert load_runs(tmp_path / "o")[0].abort is None
    assert issubclass(DataError, CloisterError)
