"""A walk with wrong things in hand: each is refused in one sentence that names site and file, before anything is sent.

What one file alone can have wrong is also in tests/cells/test_files.py and tests/cli/test_main.py; kits and
certificates are in tests/deploy/test_kit.py, deaths and refusals in tests/walk/test_origin.py and tests/deploy.
"""

from __future__ import annotations

import json
import stat
import sys

import numpy as np
import pytest
from anndata import AnnData

from cloister.cells.files import write_cells
from cloister.cli import main as cli
from cloister.cli.rehearse import _check_free
from cloister.errors import DataError, DiskError, ParameterError, ProtocolAbort
from cloister.rehearsal.record import Drawing
from cloister.rehearsal.rehearsal import rehearse
from cloister.rehearsal.results import save_run
from cloister.rehearsal.run import Run

SITES = ("basel", "geneva", "lugano", "zurich")
GENES = 60
MAPPING = ("--query", "zurich", "--use-rep", "X_pca", "--n-neighbors", "3")


def cells(seed=0, n=30):
    """Two kinds of cells with labels, counts and an embedding that tell them apart."""
    rng = np.random.default_rng(seed)
    kinds = np.arange(n) % 2
    adata = AnnData(rng.poisson(2.0 + kinds[:, None] * (np.arange(GENES) < 10), (n, GENES)).astype(np.float32))
    adata.var_names = [f"GENE{i}" for i in range(GENES)]
    adata.obs_names = [f"c{i}" for i in range(n)]
    adata.obs["cell_type"] = np.where(kinds, "B cell", "T cell")
    adata.obsm["X_pca"] = rng.normal(size=(n, 4)) + 6.0 * kinds[:, None]
    return adata


def sites():
    return {site: cells(i) for i, site in enumerate(SITES)}


def respelt(adata, spell):
    adata.obs["cell_type"] = [spell(name) for name in adata.obs["cell_type"]]


@pytest.fixture
def call(monkeypatch, capsys):
    """Run the command line in this process; returns exit code and all that it said."""

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["cloister", *map(str, words)])
        code = 0
        try:
            cli.main()
        except SystemExit as e:
            code = e.code or 0
        text = capsys.readouterr()
        assert "Traceback" not in text.err
        assert "bug in Cloister" not in text.err
        return code, text.out + text.err

    return call


@pytest.fixture
def walk(call, tmp_path):
    """Change basel's cells, then ask `check` about all files, and rehearse them."""

    def walk(change, *words, workflow="map-labels"):
        made = sites()
        changed = change(made["basel"])
        made["basel"] = made["basel"] if changed is None else changed
        files = {site: tmp_path / f"{site}.h5ad" for site in SITES}
        for site, adata in made.items():
            if isinstance(adata, AnnData):
                write_cells(adata, files[site])
            else:
                files[site].write_bytes(adata)
        checked = call("check", *files.values(), "--for", workflow, *words)
        data = [word for site, file in files.items() for word in ("--data", f"{site}={file}")]
        rehearsed = call("rehearse", workflow, *data, *words, "--out", tmp_path / "out", "--quiet")
        assert not list((tmp_path / "out").glob("*.h5ad"))
        return checked, rehearsed

    return walk


# ---- what one site brings --------------------------------------------------------------------------------------------


def giant(adata):
    adata.obsm["X_pca"][0] = 1e12


def unlabelled(adata):
    del adata.obs["cell_type"]


def without(adata):
    adata.obs["cell_type"] = np.nan


def narrow(adata):
    adata.obsm["X_pca"] = np.full((adata.n_obs, 4), np.nan)


ONE_SITE = {
    "one cell at 1e12": (giant, "times as far from the origin as half of all cells"),
    "no column of labels": (unlabelled, "adata.obs['cell_type'] is missing"),
    "no label": (without, "holds no label"),
    "an embedding without numbers": (narrow, "missing or infinite"),
    "no file of cells": (lambda adata: b"these are no cells", "must be HDF5"),
    "no cell": (lambda adata: adata[:0].copy(), "0 cells"),
}


@pytest.mark.parametrize("what", ONE_SITE)
def test_what_one_site_has_wrong_names_site_and_file(walk, what):
    change, says = ONE_SITE[what]
    checked, rehearsed = walk(change, *MAPPING)
    assert rehearsed[0] == 1
    assert says in rehearsed[1]
    assert "site 'basel'" in rehearsed[1]
    assert "basel.h5ad" in rehearsed[1]
    if what != "no label":  # a file alone does not say whether it offers labels
        assert says in checked[1]
        assert "basel.h5ad" in checked[1]
    assert checked[0] == (0 if what in ("no label", "no column of labels") else 1)


def test_one_cell_is_enough_to_offer(call, tmp_path):
    made = sites()
    made["basel"] = made["basel"][:1].copy()
    run = rehearse("map-labels", made, mode="plain", query="zurich", use_rep="X_pca", n_neighbors=3)
    assert run.errors == {}


# ---- what the sites have wrong together ------------------------------------------------------------------------------


def far(adata):
    adata.obsm["X_pca"] *= 1e6


TOGETHER = {
    "a blank at the end": (lambda a: respelt(a, lambda name: f"{name} "), "spelling", "differ by blanks or case only"),
    "another case": (lambda a: respelt(a, str.upper), "spelling", "differ by blanks or case only"),
    "another vocabulary": (
        lambda a: respelt(a, lambda n: f"CL:{len(n)}{n[0]}"),
        "foreign-labels",
        "have none in common with those of any other",
    ),
    "another scale": (far, "norms-apart", "times as far from the origin as that of"),
}


@pytest.mark.parametrize("what", ["another case", "another vocabulary", "another scale"])
def test_what_does_not_go_together_is_refused_by_check_and_in_the_run(walk, what):
    change, _, says = TOGETHER[what]
    checked, rehearsed = walk(change, *MAPPING)
    assert checked[0] == 1
    assert says in checked[1]
    assert "basel" in checked[1]
    assert rehearsed[0] == 4
    assert "Traceback" not in rehearsed[1]


@pytest.mark.parametrize("what", [what for what, row in TOGETHER.items() if row[1] != "norms-apart"])
def test_in_a_run_every_party_names_the_site_to_ask(what):
    change, code, says = TOGETHER[what]
    made = sites()
    change(made["basel"])
    run = rehearse("map-labels", made, mode="plain", query="zurich", use_rep="X_pca", n_neighbors=3, check=False)
    assert run.origins == dict.fromkeys(("coordinator", *SITES), ("basel", code))
    assert says in str(run.errors["coordinator"])  # who saw the names tells them; the others hear a word
    assert all("CL:" not in str(e) for p, e in run.errors.items() if p != "coordinator")


@pytest.mark.parametrize(
    ("workflow", "options"),
    [
        ("train-classifier", {"min_cells": 2, "use_rep": "X_pca"}),
        ("propagate-labels", {"use_rep": "X_pca", "n_neighbors": 3}),
        pytest.param("fine-tune", {"use_rep": "X_pca", "rounds": 1}, marks=pytest.mark.slow),
    ],
)
def test_other_workflows_that_collect_labels_refuse_two_spellings(workflow, options):
    made = sites()
    respelt(made["basel"], lambda name: f" {name.lower()}")
    run = rehearse(workflow, made, check=False, **options)
    assert {reason for _, reason in run.origins.values()} == {"spelling"}
    assert {origin for origin, _ in run.origins.values()} == {"basel"}


def test_a_listed_vocabulary_may_be_of_any_spelling_and_disjoint():
    """The way out that the sentence names: whoever lists the labels in the study means them as they are."""
    made = sites()
    respelt(made["basel"], str.upper)
    names = ["B cell", "T cell", "B CELL", "T CELL"]
    run = rehearse("map-labels", made, mode="plain", query="zurich", use_rep="X_pca", n_neighbors=3, labels=names)
    assert run.errors == {}


def test_few_genes_in_common(call, tmp_path):
    """30 of 1767: before, the run went on with what was left."""
    made = {site: cells(i) for i, site in enumerate(SITES)}
    wide = AnnData(np.random.default_rng(3).poisson(2.0, (30, 1767)).astype(np.float32))
    wide.obs_names = made["basel"].obs_names
    for site in SITES[1:]:
        made[site] = wide.copy()
        made[site].var_names = [f"GENE{i}" for i in range(1767)]
    made["basel"] = wide.copy()
    made["basel"].var_names = [f"GENE{i}" if i < 30 else f"ENSG{i:011d}" for i in range(1767)]
    files = {site: tmp_path / f"{site}.h5ad" for site in SITES}
    for site, adata in made.items():
        write_cells(adata, files[site])
    code, told = call("check", *files.values(), "--for", "bin-values", "--min-values", "50")
    assert code == 1
    assert "only 30 of 1767 genes in common" in told
    assert "basel" in told
    run = rehearse("bin-values", made, min_values=50, check=False)
    assert run.origins == dict.fromkeys(("coordinator", *SITES), ("basel", "few-common-genes"))


def test_check_matches_genes_as_rehearse_does(call, tmp_path):
    """Ensembl ids with a column of symbols beside symbols: one kind of name by --names, none in common without."""
    one, two = cells(0), cells(1)
    one.var["gene_symbol"] = list(one.var_names)
    one.var_names = [f"ENSG{i:011d}" for i in range(GENES)]
    write_cells(one, tmp_path / "one.h5ad")
    write_cells(two, tmp_path / "two.h5ad")
    words = ("check", tmp_path / "one.h5ad", tmp_path / "two.h5ad", "--for", "shared-pca", "--min-cells", "5")
    code, told = call(*words)
    assert code == 1
    assert "no gene in common" in told
    code, told = call(*words, "--names", "symbol")
    assert code == 0, told
    assert f"{GENES} genes in common" in told


# ---- words, studies, folders -----------------------------------------------------------------------------------------


def test_use_rep_none_is_not_the_usual_embedding():
    with pytest.raises(ParameterError, match="option 'use_rep' cannot be none.*use_rep='X'"):
        rehearse("fine-tune", sites(), use_rep=None)
    with pytest.raises(ParameterError, match="'n_neighbors' cannot be none"):
        rehearse("map-labels", sites(), query="zurich", n_neighbors=None)


STUDY = (
    'name = "s"\nworkflow = "bin-values"\n[parameters]\nmin_values = 50\n[parties]\nhub = "coordinator"\n'
    + "\n".join(f'{site} = "site"' for site in SITES)
)


def test_a_study_names_its_parties(call, tmp_path):
    study = tmp_path / "study.toml"
    study.write_text(STUDY)
    files = {site: tmp_path / f"{site}.h5ad" for site in SITES}
    for site, adata in sites().items():
        write_cells(adata, files[site])
    data = [word for site, file in files.items() for word in ("--data", f"{site}={file}")]
    code, told = call("rehearse", "bin-values", study, *data[:-1], f"bern={files['zurich']}", "--quiet")
    assert code == 1
    assert "'zurich'" in told
    code, told = call("rehearse", "bin-values", study, *data, "--data", f"bern={files['zurich']}")
    assert code == 1
    assert "'bern' is not a site of the study" in told


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (STUDY.replace("workflow", "workflwo").encode(), "workflwo"),
        (STUDY.replace('"coordinator"', '"leader"').encode(), "leader"),
        (STUDY.replace('"s"', '"Zürich"').encode("latin-1"), "study.toml"),
        (b"\x00\xff", "study.toml"),
    ],
    ids=["a key", "a role", "another encoding", "no text"],
)
def test_a_misspelt_study_is_named(call, tmp_path, content, says):
    path = tmp_path / "study.toml"
    path.write_bytes(content)
    code, told = call("rehearse", path, "--data", "basel=x.h5ad")
    assert code == 1
    assert says in told


def test_paths_with_blanks_and_letters_of_all_kinds(call, tmp_path, monkeypatch):
    monkeypatch.setattr(Run, "_draw", lambda _: Drawing())  # figures take a while, and are no part of this
    folder = tmp_path / "Zürich, 2. Versuch (neu)"
    folder.mkdir()
    data = []
    for site, adata in sites().items():
        write_cells(adata, folder / f"{site} cells.h5ad")
        data += ["--data", f"{site}={folder / f'{site} cells.h5ad'}"]
    words = ("rehearse", "bin-values", *data, "--min-values", "50", "--quiet", "--out", folder / "the results")
    code, told = call(*words)
    assert code == 0, told
    report = folder / "the results" / "report.html"
    assert stat.S_IMODE(report.stat().st_mode) == 0o600  # as the figures in it
    before = report.read_bytes()
    code, told = call(*words)
    assert code == 2
    assert "holds the results of an earlier run" in told
    assert report.read_bytes() == before
    _check_free(report.parent, replace=True)


def test_a_folder_that_cannot_be_written(tmp_path, monkeypatch):
    from cloister import files

    run = rehearse("bin-values", sites(), min_values=50)

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    (tmp_path / "file").write_text("x")
    with pytest.raises(DataError, match="is a file"):
        save_run(run, tmp_path / "file")
    with pytest.raises(DiskError, match="cannot be written"):
        save_run(run, "/proc/nowhere/out")
    monkeypatch.setattr(files, "write", full)
    with pytest.raises(DiskError, match="No space left on device"):
        save_run(run, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_pickled_array_is_called_that(tmp_path):
    from cloister.cells.files import read_cells

    np.savez(tmp_path / "a.npz", X=np.ones((3, 2)), cell_type=np.array(["T", None, "B"], dtype=object))
    with pytest.raises(DataError, match="a.npz.*'cell_type' is pickled Python"):
        read_cells(tmp_path / "a.npz")


# ---- kits ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def kits(tmp_path_factory):
    from cloister.deploy.provision import provision
    from cloister.study import Study

    parties = {"hub": "coordinator", **dict.fromkeys(SITES, "site")}
    network = {"host": "localhost", "port": 8002}
    study = Study("s", "map-labels", parties, network=network, parameters={"query": "zurich", "use_rep": "X_pca"})
    return provision(study, tmp_path_factory.mktemp("kits") / "ours")


def of_another_authority():
    """A certificate for basel that it made itself."""
    import datetime

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding

    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "basel")])
    made = x509.CertificateBuilder(name, name, key.public_key(), 1, now, now + datetime.timedelta(days=99))
    return made.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM)


def findings(kit):
    from cloister.cli.doctor import _examine_kit

    found = {}
    for f in _examine_kit(kit):
        found.setdefault(f.name, []).append((f.state, f.detail))
    return found


def wrong(kit, name):
    return [detail for state, detail in findings(kit).get(name, []) if state == "wrong"]


def test_doctor_finds_what_is_wrong_with_a_kit(kits, monkeypatch):
    import shutil

    kit = kits["basel"]
    write_cells(cells(), kit / "cells.h5ad")
    assert [
        row for rows in findings(kit).values() for row in rows if row[0] == "wrong" and "carrier" not in row[1]
    ] == []

    own = (kit / "startup" / "client.crt").read_bytes()
    lugano = (kits["lugano"] / "startup" / "client.crt").read_bytes()
    for other, says in ((of_another_authority(), "not issued by the authority"), (lugano, "was issued to lugano")):
        (kit / "startup" / "client.crt").write_bytes(other)
        assert says in wrong(kit, "certificate")[0]
    (kit / "startup" / "client.crt").write_bytes(own)

    adata = cells()
    del adata.obs["cell_type"]
    write_cells(adata, kit / "cells.h5ad")
    (told,) = wrong(kit, "cells")
    assert "adata.obs['cell_type'] is missing" in told
    assert "cells.h5ad" in told
    write_cells(adata, kits["zurich"] / "cells.h5ad")  # who asks needs no labels
    assert wrong(kits["zurich"], "cells") == []

    usage = shutil.disk_usage(kit)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=600_000))
    assert "600" in wrong(kit, "disk")[0]


def test_an_abort_in_json_lists_every_party_with_its_own(call, tmp_path):
    made = sites()
    respelt(made["basel"], str.upper)
    data = []
    for site, adata in made.items():
        write_cells(adata, tmp_path / f"{site}.h5ad")
        data += ["--data", f"{site}={tmp_path / f'{site}.h5ad'}"]
    code, told = call("rehearse", "map-labels", "--mode", "plain", *data, *MAPPING, "--json")
    assert code == 4
    listed = json.JSONDecoder().raw_decode(told)[0]["origins"]
    assert listed == {p: {"origin": "basel", "reason": "spelling"} for p in ("coordinator", *SITES)}


def test_the_old_terms_gave_every_cell_one_label(monkeypatch):
    """One reference at 1e12 and no check: all cells of the query got the same label. Now it is refused at its site."""
    from cloister.workflows.map_labels import mapping_terms

    made = sites()
    giant(made["basel"])
    with pytest.raises(DataError, match="site 'basel'"):
        rehearse("map-labels", made, query="zurich", use_rep="X_pca", n_neighbors=3)
    monkeypatch.setattr(mapping_terms, "APART", float("inf"))
    run = rehearse("map-labels", made, query="zurich", use_rep="X_pca", n_neighbors=3)
    right = made["zurich"].obs["cell_type"].to_numpy()
    found = run.data["zurich"].obs["mapped"].astype(str).to_numpy()
    assert (found == right).mean() < 0.8


def test_norms_apart_is_a_named_abort():
    from cloister.workflows.map_labels import mapping_terms

    mapping_terms.check_scale(1.0, 999.0)
    mapping_terms.check_scale(0.0, 1e9)  # a site of empty rows is not asked
    with pytest.raises(ProtocolAbort) as e:
        mapping_terms.check_scale(1.0, 1001.0)
    assert (e.value.line, e.value.code) == ("T3", "norms-apart")
