"""`cloister run` at every party of a study, as real processes on loopback: the README, but between machines."""

import contextlib
import json
import os
import pty
import re
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from federation import free_port

import cloister as cl
from cloister.cells.demo import demo_sites
from cloister.cells.files import read_cells
from cloister.demo import write_sites
from cloister.deploy import join as attending
from cloister.deploy.join import Joined, attend, check_same_study, conduct
from cloister.deploy.kit import Kit
from cloister.deploy.party import Ended
from cloister.deploy.provision import provision
from cloister.errors import DataError, ParameterError, RefusedError, UsageError
from cloister.rehearsal.rehearsal import rehearse
from cloister.rehearsal.results import save_run, step_folder
from cloister.rehearsal.run import Run
from cloister.study import Step, Study, format_study

pytest.importorskip("nvflare")


@pytest.fixture
def consortium(tmp_path):
    port = free_port()
    sites = demo_sites()
    parties = {"hub": "coordinator", **dict.fromkeys(sites, "site")}
    study = Study("demo", "bin-values", parties, timeout=40.0, network={"host": "localhost", "port": port})
    (tmp_path / "study.toml").write_text(format_study(study))
    write_sites(tmp_path / "sites")
    return tmp_path, study, provision(study, tmp_path / "kits")


def read_all(screen, shown):
    """What is written to a terminal, until it is closed."""
    with contextlib.suppress(OSError):
        while more := os.read(screen, 1 << 16):
            shown.append(more)


def test_bin_values_between_processes_equals_the_rehearsal(consortium):
    folder, study, kits = consortium
    for site in study.sites:
        Kit.open(kits[site]).approve(data=folder / "sites" / f"{site}.h5ad")

    def start(party, *more, said=subprocess.PIPE):
        command = [sys.executable, "-m", "cloister.cli.main", "run", "bin-values", "study.toml", "--as", party, *more]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "180", "TERM": "xterm-256color"}
        return subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=said, text=True)

    def from_python(party):
        """The same from a script of the site: `cl.join` gives the session, the workflow's function the results."""
        code = (
            "import json, cloister as cl\n"
            f"adata, session = cl.read_cells('sites/{party}.h5ad'), cl.join('kits/{party}', say=lambda text: None)\n"
            f"done = cl.bin_values(adata, session, copy=True)\n"
            f"assert 'binned' not in adata.layers\n"
            f"cl.write_cells(done, '{party}.h5ad')\n"
            "print(json.dumps({'status': 'done'}))"
        )
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            [sys.executable, "-c", code], cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    last = study.sites[-1]
    first, *others = study.sites[:-1]
    cells = {p: ("--data", f"sites/{p}.h5ad", "--out", f"{p}.h5ad") for p in study.sites}
    running = {p: start(p, "--json", *cells[p]) for p in others}
    screen, terminal = pty.openpty()
    running[first] = start(first, *cells[first], said=terminal)  # a person looks at this one
    os.close(terminal)
    shown = []
    watching = threading.Thread(target=read_all, args=(screen, shown))
    watching.start()
    running[last] = from_python(last)
    running["hub"] = start("hub", "--json")
    told = {}
    try:
        for p, process in running.items():
            out, err = process.communicate(timeout=240)
            assert process.returncode == 0, f"{p}: {out}{err}"
            told[p] = {"status": out.partition(":")[0]} if p == first else json.loads(out)
            assert "rounds" not in (err or "")  # no progress in a pipe
    finally:
        for process in running.values():
            process.kill()
    assert {p: t["status"] for p, t in told.items()} == dict.fromkeys(running, "done")
    watching.join(30)
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", b"".join(shown).decode(errors="replace"))
    assert f"{first} waits for a run" in plain
    assert re.search(rf"{first} +\S+ .*\d+ rounds, [\d.]+ k?B", plain)  # what it does, rounds and bytes
    assert not list(kits[first].glob("runs/*.progress"))
    rehearsed = rehearse("bin-values", demo_sites())
    for site in study.sites:
        found = read_cells(folder / f"{site}.h5ad")
        assert (found.layers["binned"] != rehearsed.data[site].layers["binned"]).nnz == 0
        np.testing.assert_array_equal(
            found.uns["cloister"]["bin_edges"], rehearsed.data[site].uns["cloister"]["bin_edges"]
        )
        assert json.loads(found.uns["cloister"]["bin-values"])["status"] == "done"


@pytest.mark.slow
def test_the_tutorial_s_study_runs_as_printed(tmp_path):
    """Its study.toml, its kits, and at Vienna the lines of its last section; the others by `cloister run`."""
    page = (Path(__file__).parents[2] / "docs" / "tutorial.md").read_text()
    (toml,) = re.findall(r"^```toml\n(.*?)^```", page, flags=re.DOTALL | re.MULTILINE)
    (script,) = re.findall(r"^```py\n(.*?)^```", page, flags=re.DOTALL | re.MULTILINE)
    toml = toml.replace("8102", str(free_port()))
    (tmp_path / "study.toml").write_text(toml)
    study = Study.load(tmp_path / "study.toml")
    space = rehearse("shared-pca", demo_sites(), n_components=30)
    (tmp_path / "space").mkdir()
    for site, cells in space.data.items():
        cl.write_cells(cells, tmp_path / "space" / f"{site}.h5ad")
    for site, kit in provision(study, tmp_path / "kits").items():
        if study.parties[site] == "site":
            Kit.open(kit).approve(data=tmp_path / "space" / f"{site}.h5ad")
    run = [sys.executable, "-m", "cloister.cli.main", "run", "map-labels", "study.toml", "--json", "--as"]
    others = {p: [*run, p, "--data", f"space/{p}.h5ad"] for p in study.sites if p != "vienna"} | {"hub": [*run, "hub"]}
    at_vienna = script + "\nadata.obs['mapped'].to_csv('mapped.csv')"
    words = {"vienna": [sys.executable, "-c", at_vienna], **others}
    running = {
        p: subprocess.Popen(w, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) for p, w in words.items()
    }
    try:
        for p, process in running.items():
            out, _ = process.communicate(timeout=400)
            assert process.returncode == 0, f"{p}: {out.decode()}"
    finally:
        for process in running.values():
            process.kill()
    options = {"query": "vienna", "use_rep": "X_shared_pca"}
    rehearsed = rehearse("map-labels", space.data, **options).data["vienna"].obs["mapped"]
    mapped = pd.read_csv(tmp_path / "mapped.csv", index_col=0)["mapped"]
    assert list(mapped) == list(rehearsed.astype(str))


def several(study):
    """A space, and a classifier in it: its second step needs what the first one writes, and leaves a model."""
    space = Step("shared-pca", options={"n_components": 5, "n_top_genes": 60})
    labels = Step(
        "train-classifier",
        options={"use_rep": "X_shared_pca", "validation": 0.0, "min_label_cells": 3},
        name="labels",
    )
    return Study("demo", "", study.parties, timeout=40.0, network=study.network, steps=(space, labels))


def check_steps_joined(adata, outcomes, expected, site):
    """What `cl.take_part` gave at a site, beside the rehearsal of the same study."""
    assert [*outcomes] == ["shared-pca", "labels"]
    assert list(adata.obs["predicted"]) == list(expected.data[site].obs["predicted"])
    np.testing.assert_array_equal(adata.obsm["X_shared_pca"], expected.data[site].obsm["X_shared_pca"])
    assert "predicted" not in outcomes["shared-pca"].adata.obs
    assert outcomes["labels"].model.digest == expected.runs["labels"].model.digest
    for name, outcome in outcomes.items():
        outcome.receipt.check()
        assert outcome.receipt.header["step"].endswith(f"({name})")
        assert outcome.cost["bytes"] > 0


def test_a_study_of_several_steps_from_python(consortium, tmp_path, monkeypatch):
    """The folders that a run leaves are read back step by step, and the cells have what all of them wrote."""
    _, study, _ = consortium
    story = several(study)
    sites = {p: a[:120].copy() for p, a in demo_sites().items()}
    expected = rehearse(story, sites)
    for run in expected.runs.values():
        own = Run(run.study, {"basel": run.outcomes["basel"]}, receipts={"basel": run.receipts["basel"]})
        save_run(own, step_folder(tmp_path / "ended", run.study))
    ended = Ended("r", "basel", "done", str(tmp_path / "ended"))
    monkeypatch.setattr(attending, "attend", lambda kit, data, **more: ended)
    session, kept, adata = Joined(tmp_path, story, "basel"), sites["basel"].copy(), sites["basel"].copy()
    check_steps_joined(adata, cl.take_part(adata, session), expected, "basel")
    assert [*cl.take_part(kept, session, copy=True)] == ["shared-pca", "labels"]
    assert "predicted" not in kept.obs
    with pytest.raises(UsageError, match=r"several steps \(shared-pca, labels\); take part in all: cl.take_part"):
        cl.train_classifier(adata, session)
    del kept.obs["cell_type"]
    few = kept[:10].copy()
    with pytest.raises(DataError, match=r"step 1 of 2 \(shared-pca\): "):  # before anything is started
        cl.take_part(few, session)


@pytest.mark.slow
def test_a_study_of_several_steps_between_processes_equals_the_rehearsal(consortium):
    folder, study, _ = consortium
    story = several(study)
    kits = provision(story, folder / "story")
    (folder / "story.toml").write_text(format_study(story))
    for site in story.sites:
        Kit.open(kits[site]).approve()
    code = (
        "import sys, cloister as cl\n"
        "site = sys.argv[1]\n"
        "adata = cl.read_cells(f'sites/{site}.h5ad')\n"
        "outcomes = cl.take_part(adata, cl.join(f'story/{site}', say=lambda text: None))\n"
        "assert [*outcomes] == ['shared-pca', 'labels'] and outcomes['labels'].model is not None\n"
        "cl.write_cells(adata, f'{site}.h5ad')\n"
    )
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    hub = [sys.executable, "-m", "cloister.cli.main", "run", "story.toml", "--as", "hub", "--kit", str(kits["hub"])]
    words = {p: [sys.executable, "-c", code, p] for p in story.sites} | {"hub": hub}
    running = {
        p: subprocess.Popen(w, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for p, w in words.items()
    }
    try:
        for p, process in running.items():
            out, _ = process.communicate(timeout=400)
            assert process.returncode == 0, f"{p}: {out.decode()}"
    finally:
        for process in running.values():
            process.kill()
    expected = rehearse(story, demo_sites())
    for site in story.sites:
        found = read_cells(folder / f"{site}.h5ad")
        assert list(found.obs["predicted"].astype(str)) == list(expected.data[site].obs["predicted"].astype(str))
        assert {"shared-pca", "labels"} <= set(found.uns["cloister"])


def test_who_may_do_what(consortium):
    folder, study, kits = consortium
    with pytest.raises(RefusedError, match="has not approved the workflow"):
        attend(kits["basel"], folder / "sites" / "basel.h5ad")
    with pytest.raises(UsageError, match="coordinator"):
        attend(kits["hub"])
    with pytest.raises(UsageError, match="hub is the study's coordinator and brings no cells"):
        cl.join(kits["hub"])
    with pytest.raises(UsageError, match="this is a study of 'bin-values', not of 'map-labels'"):
        cl.map_labels(demo_sites()["basel"], cl.join(kits["basel"]))
    with pytest.raises(RefusedError, match="has not approved the workflow"):
        cl.bin_values(demo_sites()["basel"], cl.join(kits["basel"]))
    with pytest.raises(DataError, match="non-zero values, fewer than"):  # before anything is started
        cl.bin_values(demo_sites()["basel"][:1].copy(), cl.join(kits["basel"]))
    with pytest.raises(UsageError, match="the coordinator hub starts runs"):
        conduct(kits["basel"])
    other = Study("demo", "bin-values", study.parties, timeout=40.0, parameters={"n_bins": 7})
    with pytest.raises(ParameterError, match="differs"):
        check_same_study(Kit.open(kits["basel"]), other)
