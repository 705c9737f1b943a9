import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest

from cloister.cells import demo as demo_data
from cloister.cells import tables as cells
from cloister.cells.files import read_cells, write_cells
from cloister.cli import main as cli
from cloister.cli.options import as_flags


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sites")
    made = {}
    for site, adata in demo_data.demo_sites().items():
        made[site] = folder / f"{site}.h5ad"
        write_cells(adata, made[site])
    return made


@pytest.fixture
def run(monkeypatch, capsys):
    """Run the command line in this process; returns (exit code, stdout, stderr)."""

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["cloister", *map(str, words)])
        code = 0
        try:
            cli.main()
        except SystemExit as e:
            code = e.code or 0
        text = capsys.readouterr()
        return code, text.out, text.err

    return call


def data_of(files):
    return [word for site, path in files.items() for word in ("--data", f"{site}={path}")]


def test_help_answers_at_once():
    child = subprocess.Popen([sys.executable, "-m", "cloister.cli.main", "--help"], stdout=subprocess.PIPE, text=True)
    with child.stdout:
        told = child.stdout.read()
    _, status, used = os.wait4(child.pid, 0)  # of this child alone: others of earlier tests may end meanwhile
    child.returncode = os.waitstatus_to_exitcode(status)
    assert child.returncode == 0
    assert "rehearse" in told
    assert used.ru_utime + used.ru_stime < 1.5  # of CPU, whoever else computes


def test_help_imports_nothing_heavy():
    heavy = ("anndata", "torch", "scipy", "matplotlib", "nvflare")
    code = f"import sys, cloister.cli.main; print([m for m in {heavy} if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


VERBS = ["explain", "check", "rehearse", "advise", "run", "receipt", "report", "demo", "provision", "site", "doctor"]


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_with_an_example_that_fits_a_screen(run, verb):
    code, out, _ = run(verb, "--help")
    assert code == 0
    assert "Example:" in out
    assert len(out.splitlines()) <= 40


def test_the_first_help_fits_a_screen_and_says_how_to_start(run):
    code, out, _ = run("--help")
    assert code == 0
    assert len(out.splitlines()) <= 40
    assert "cloister demo" in out


def test_explain(run):
    code, out, _ = run("explain")
    assert code == 0
    assert "bin-values" in out
    code, out, _ = run("explain", "bin-values")
    assert code == 0
    for word in ("Reveals", "Assumes", "Cost", "hardened", "published", "--n-bins"):
        assert word in out


def test_explain_unknown_workflow_suggests(run):
    code, _, err = run("explain", "bin-value")
    assert code == 2
    assert "did you mean 'bin-values'?" in err


def test_rehearse_writes_results_receipts_and_report(run, files, tmp_path):
    code, out, err = run("rehearse", "bin-values", *data_of(files), "--out", tmp_path, "--n-bins", "21")
    assert code == 0, err
    assert "basel" in out
    pooled = np.concatenate([v for a in demo_data.demo_sites().values() for v in cells.nonzero_values(a)])
    for site in files:
        adata = read_cells(tmp_path / f"{site}.h5ad")
        edges, found = np.quantile(pooled, np.linspace(0, 1, 20)), adata.uns["cloister"]["bin_edges"]
        np.testing.assert_allclose(found[:-1], edges[:-1])
        assert np.sort(pooled)[-30] <= found[-1] <= np.sort(pooled)[-5]  # an end follows from runs of min_count values
        assert 10 < adata.layers["binned"].max() <= 20
        assert (tmp_path / f"{site}.receipt.json").exists()
    assert (tmp_path / "report.html").stat().st_size > 5000

    code, out, err = run("receipt", tmp_path / "basel.receipt.json")
    assert out.startswith("VALID: ")
    code, out, err = run("receipt", tmp_path / "basel.receipt.json", "--verify")
    assert code == 0, err
    assert out.startswith("VALID: ")
    assert "checked_sum.Masked" in out
    assert "minimum group sizes and limits count cells" in out
    code, out, _ = run("receipt", tmp_path / "basel.h5ad")
    assert code == 0
    assert out.startswith("UNVERIFIED: ")
    assert "bin-values" in out

    raw = json.loads((tmp_path / "basel.receipt.json").read_text())
    raw["entries"][3]["to"] = "elsewhere"
    (tmp_path / "forged.json").write_text(json.dumps(raw))
    for flags in ([], ["--verify"], ["--json"]):
        code, out, err = run("receipt", tmp_path / "forged.json", *flags)
        assert (code, out) == (4, "")
        assert "entry 3" in err


def test_rehearse_json(run, files):
    code, out, err = run("rehearse", "bin-values", *data_of(files), "--json", "--mode", "published")
    assert code == 0, err
    told = json.loads(out)
    assert told["mode"] == "published"
    assert len(told["results"]["basel"]["bin_edges"]) == 50
    assert told["cost"]["basel"]["bytes"] > 0


def test_rehearse_from_a_study_file(run, files, tmp_path):
    study = tmp_path / "study.toml"
    parties = "\n".join(f'{p} = "site"' for p in files)
    head = 'name = "s"\nworkflow = "bin-values"\n'
    grounds = '[governance]\npermit = "EK 7"\n'
    study.write_text(f'{head}[parties]\nhub = "coordinator"\n{parties}\n[parameters]\nn_bins = 11\n{grounds}')
    code, out, err = run("rehearse", "bin-values", study, *data_of(files), "--json", "--out", tmp_path / "results")
    assert code == 0, err
    assert json.loads((tmp_path / "results" / "vienna.receipt.json").read_text())["header"]["governance"]["permit"]
    assert len(json.loads(out)["results"]["vienna"]["bin_edges"]) == 10
    study.write_text(study.read_text().replace("n_bins", "bins"))
    code, _, err = run("rehearse", "bin-values", study, *data_of(files))
    assert code == 1
    assert "did you mean 'n_bins'?" in err
    study.write_text("colluders = 2\n" + study.read_text().replace("bins = 11", "n_bins = 11"))
    code, _, err = run("rehearse", "bin-values", study, *data_of(files))
    assert code == 1
    assert "'colluders' can be 1 at most with 3 sites" in err


def test_two_sites_are_warned(run, files):
    two = dict(list(files.items())[:2])
    code, _, err = run("rehearse", "bin-values", *data_of(two), "--json")
    assert code == 0
    assert "subtract its own input" in err


def bad_files(files, tmp_path):
    """File → the sentence it earns, when it stands in for one site's file."""
    import anndata
    import scipy.sparse as sp

    good = read_cells(files["basel"])

    def variant(name, change):
        adata = good.copy()
        changed = change(adata) or adata
        write_cells(changed, tmp_path / f"{name}.h5ad")
        return tmp_path / f"{name}.h5ad"

    def dense(adata):
        return np.asarray(adata.X.todense() if sp.issparse(adata.X) else adata.X, dtype=np.float32)

    def with_value(value):
        def change(adata):
            x = dense(adata)
            x[0, 0] = value
            adata.X = x

        return change

    def as_log(adata):
        adata.X = np.log1p(dense(adata) * 1.37)

    def renamed(adata):
        adata.var_names = [f"other-{i}" for i in range(adata.n_vars)]

    text = tmp_path / "text.h5ad"
    text.write_text("these are not cells")
    empty = tmp_path / "empty.h5ad"
    anndata.AnnData(np.zeros((0, 3), dtype=np.float32)).write_h5ad(empty)
    return {
        "nan": (variant("nan", with_value(np.nan)), 1, "missing or infinite"),
        "negative": (variant("negative", with_value(-3.0)), 1, "negative"),
        "log": (variant("log", as_log), 4, "same kind of values"),
        "genes": (variant("genes", renamed), 4, "no gene in common"),
        "text": (text, 1, "h5ad"),
        "missing": (tmp_path / "nowhere.h5ad", 1, "nowhere.h5ad"),
        "empty": (empty, 1, "0 cells"),
    }


@pytest.mark.parametrize("name", ["nan", "negative", "log", "genes", "text", "missing", "empty"])
def test_bad_input_is_one_clear_sentence(run, files, tmp_path, name):
    path, code, words = bad_files(files, tmp_path)[name]
    found, out, err = run("rehearse", "bin-values", *data_of({**files, "vienna": path}), "--out", tmp_path / "out")
    assert (found, words in err) == (code, True), err
    assert "Traceback" not in out + err
    assert not list((tmp_path / "out").glob("*.h5ad"))


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["rehearse", "bin-values"], 2, "no data"),
        (["rehearse", "bin-values", "--data", "a"], 2, "site=file"),
        (["rehearse", "bin-values", "--data", "a=x.h5ad", "--data", "a=y.h5ad"], 2, "two sites are called 'a'"),
        (["rehearse", "bin-values", "--data", "a=x.h5ad"], 1, "at least 2 sites"),
        (["rehearse", "bin-values", "--data", "A b=x.h5ad", "--data", "c=y.h5ad"], 1, "not a valid party name"),
        (
            ["rehearse", "bin-values", "--data", "a=x.h5ad", "--data", "b=y.h5ad", "--n-bin", "5"],
            2,
            "did you mean --n-bins?",
        ),
        (
            ["rehearse", "bin-values", "--data", "a=x.h5ad", "--data", "b=y.h5ad", "--n-bins", "two"],
            1,
            "a whole number",
        ),
        (["rehearse", "bin-values", "--data", "a=x.h5ad", "--data", "b=y.h5ad", "--n-bins", "2"], 1, "between 3 and"),
        (["rehearse", "bin-values", "--data", "a=x.h5ad", "--data", "b=y.h5ad", "--mode", "open"], 1, "mode"),
        (["rehearse", "nothing"], 2, "no workflow 'nothing'"),
        (["receipt", "nowhere.json"], 1, "nowhere.json does not exist"),
        (["receipt", __file__], 4, "not a Cloister receipt"),
        (["rehearse"], 2, "see cloister rehearse --help"),
        (["demo", "--cells", "--out", __file__], 2, "is a file; name a folder"),
        (["rehearse", "map-labels", "--data", "a=x.h5ad", "--data", "b=y.h5ad"], 1, "needs the option 'query'"),
        (["reherse"], 2, "Did you mean 'rehearse'?"),
        (["rehearse", "bin-values", "--data", "a=x.h5ad", "--moed", "published"], 2, "did you mean --mode?"),
        (["rehearse", "bin-values", "--dta", "a=x.h5ad"], 2, "did you mean --data?"),
        (["rehearse", "bin-values", "--data", "a=x.h5ad", "--proceses"], 2, "did you mean --processes?"),
        (["check", "a.h5ad", "--fro", "bin-values"], 2, "did you mean --for?"),
        (["check", "a.h5ad", "--n-bins", "5"], 2, "--for WORKFLOW"),
        (["check", "a.h5ad", "--for", "bin-values", "--n-bin", "5"], 2, "did you mean --n-bins?"),
        (["demo", "--ot", "x"], 2, "--out"),
        (["explain", "bin-values", "--mod", "x"], 2, "--mode"),
        (["receipt", "--verfy", "x"], 2, "--verify"),
        (["report", "--outt", "x"], 2, "--out"),
        (["provision", "s.toml", "--oout", "x"], 2, "--out"),
        (["site", "kit", "--aprove"], 2, "--approve"),
        (["run", "bin-values", "s.toml", "--az", "basel"], 2, "--as"),
        (["doctor", "--kitt", "x"], 2, "--kit"),
    ],
)
def test_wrong_usage(run, words, code, says):
    found, out, err = run(*words)
    assert (found, says in out + err) == (code, True), out + err


def test_check_says_what_a_file_holds(run, files):
    code, out, err = run("check", files["basel"], "--for", "bin-values", "--json")
    assert code == 0, err
    assert json.loads(out)[str(files["basel"])]["cells"] == demo_data.demo_sites()["basel"].n_obs
    code, out, _ = run("check", *files.values())
    assert code == 0
    assert "genes in common" in out


def labelled(folder, **names):
    """Files of the demo sites whose labels are written otherwise."""
    for site, adata in demo_data.demo_sites().items():
        column = adata.obs["cell_type"].astype(str)
        adata.obs["cell_type"] = column.replace(names.get(site, {}))
        write_cells(adata, folder / f"{site}.h5ad")
    return [folder / f"{site}.h5ad" for site in demo_data.SITES]


def test_check_compares_labels_and_says_what_to_write(run, tmp_path):
    files = labelled(tmp_path, basel={"T": "T_cells", "plasma": "CD34+ odd"}, vienna={"macrophage": "Macrophages"})
    code, out, err = run("check", *files, "--for", "train-classifier")
    assert code == 1
    assert "2 labels are written in several ways, and a model would learn the site" in err
    assert "'T_cells' at" in err
    assert "consist of the same words" in err
    for line in ('"T_cells" = "T"', '"Macrophages" = "macrophage"', "[labels]", "[ontology]"):
        assert line in out
    assert "at one site only: 'CD34+ odd'" in " ".join(out.split())
    assert "ready" not in out
    code, out, _ = run("check", *files, "--for", "train-classifier", "--json")
    found = json.loads(out)
    assert code == 1
    assert found["suggested_labels"] == {"T_cells": "T", "Macrophages": "macrophage"}
    assert found["labels"]["T_cells"] == {str(files[0]): 19}
    code, out, _ = run("check", *files, "--label-key", "cell_type_fine")
    assert code == 0
    assert "is a kind of" in out
    words = [*files, "--for", "train-classifier", "--labels", "T,T_cells"]
    assert "not in the study's vocabulary" in run("check", *words)[2]


def test_check_uses_the_maps_of_a_study(run, tmp_path):
    files = labelled(tmp_path, basel={"T": "T_cells"})
    study = tmp_path / "study.toml"
    study.write_text(
        'name = "s"\nworkflow = "train-classifier"\n[labels]\n"T_cells" = "T"\n[parties]\nhub = "coordinator"\n'
        'basel = "site"\nlugano = "site"\nvienna = "site"\n'
    )
    assert "renames the label 'T_cells' to 'T' at every site" in run("explain", study)[1]
    code, out, err = run("check", *files, "--for", study)
    assert code == 0, err
    assert "labels renamed: obs['cell_type']: 'T_cells' → 'T'" in " ".join(out.split())


def test_check_reports_all_problems_of_all_files(run, files, tmp_path):
    words = (files["basel"], tmp_path / "nowhere.h5ad", files["lugano"], "--for", "map-labels", "--query", "lugano")
    code, out, err = run("check", *words, "--use-rep", "X_odd")
    assert code == 1
    assert "nowhere.h5ad does not exist" in err
    assert err.count("adata.obsm['X_odd'] is missing; there is 'X_pca'") == 2
    assert "3 problems; not ready for map-labels" in err
    assert "--use-rep X_odd: obsm['X_odd'] is missing" in " ".join(out.split())
    code, out, _ = run("check", files["basel"])
    text = " ".join(out.split())
    assert code == 0
    assert "groups in donor TSP2 (269), TSP1 (211)" in text
    assert "train-cellcnn (obs['condition'] missing)" in text


def test_brackets_are_no_markup(run, files, tmp_path):
    write_cells(read_cells(files["basel"]), tmp_path / "[red]cells.h5ad")
    code, out, err = run("check", tmp_path / "[red]cells.h5ad")
    assert code == 0, err
    assert "[red]cells.h5ad" in out


def test_doctor_names_the_extra_in_full(run, monkeypatch):
    import importlib.metadata

    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert "pip install 'cloister[he]'" in " ".join(run("doctor")[1].split())


def test_version(run):
    from cloister import __version__

    assert run("--version")[1].strip() == f"cloister {__version__}"


def test_options_are_named_as_they_are_typed():
    words = ["cloister", "rehearse", "map-labels", "--data", "a=b.h5ad"]
    assert as_flags("is missing; name another with use_rep=.", words) == "is missing; name another with --use-rep."
    assert as_flags("n_neighbors=100000 is more than", words) == "--n-neighbors 100000 is more than"
    assert as_flags("--data needs site=file, found 'x=y'", words) == "--data needs site=file, found 'x=y'"
    words = ["cloister", "check", "a.csv", "--for", "find-outliers"]
    assert as_flags("or pass impute='mean'", words) == "or pass --impute 'mean'"
    words = ["cloister", "rehearse", "train-cellcnn"]
    assert as_flags("a folder with keep=, or open_model=true", words) == "a folder with --keep, or --open-model"
    assert as_flags("use_rep=", ["cloister", "doctor"]) == "use_rep="


@pytest.mark.parametrize("workflow", ["train-cellcnn", "predict-cellcnn"])
def test_a_file_is_checked_without_options_of_the_run(run, tmp_path, workflow):
    site = next(iter(demo_data.demo_donors().values()))
    write_cells(site, tmp_path / "cells.h5ad")
    code, out, err = run("check", tmp_path / "cells.h5ad", "--for", workflow)
    assert code == 0, err
    assert "ready for" in out


def test_a_run_tells_its_numbers_and_an_abort_where_its_receipts_are(run, files, tmp_path):
    code, out, err = run("rehearse", "shared-pca", *data_of(files), "--n-components", "2", "--out", tmp_path / "r")
    assert code == 0, err
    assert re.search(r"components of 519 genes hold .* of the variance of 1,349 cells", out)  # genes that sites express
    sites = {p: read_cells(f) for p, f in files.items()}
    sites["basel"].var_names = [f"other{i}" for i in range(sites["basel"].n_vars)]
    write_cells(sites["basel"], tmp_path / "basel.h5ad")
    words = data_of({**files, "basel": tmp_path / "basel.h5ad"})
    code, _, err = run("rehearse", "bin-values", *words, "--out", tmp_path / "s")
    assert code == 4
    assert f"are in {tmp_path / 's'}" in err
    assert "no gene in common" in err


def test_what_is_signed_is_shown_before_anything_runs(run, tmp_path):
    text = (
        'name = "bins"\nworkflow = "bin-values"\n[parties]\nhub = "coordinator"\na = "site"\nb = "site"\n'
        '[governance]\npurpose = "to [know] bins"\npermit = "EK 7"\nexpires = "2020-01-31"\n'
    )
    (tmp_path / "study.toml").write_text(text)
    code, out, _ = run("explain", tmp_path / "study.toml")
    assert code == 0
    assert "Purpose: to [know] bins\nPermit: EK 7\nMay run until: 2020-01-31\n" in out
    (tmp_path / "study.toml").write_text(text.partition("[governance]")[0])
    assert "purpose, legal basis, permit and expiry are not written in it" in run("explain", tmp_path / "study.toml")[1]
    code, _, err = run("site", tmp_path, "--by", "Ann")
    assert code == 2
    assert "--allow-small-change need --approve" in err
    for wrong in (["--approve", "--refuse"], ["--page", "--approve"], ["--page", "--refuse"], ["--port", "8000"]):
        assert run("site", tmp_path, *wrong)[0] == 2
    code, _, err = run("halt", tmp_path)
    assert code == 1
    assert "is not a start-up kit" in err
