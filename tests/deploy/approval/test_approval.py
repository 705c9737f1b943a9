"""Who approved what, on which cells, and when: a run on anything else is refused, with one sentence."""

import dataclasses
import json
import os
import re
import shutil
import stat
import tempfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cloister import governance
from cloister.cells.demo import demo_sites
from cloister.cells.files import read_cells, write_cells
from cloister.cells.fingerprint import fingerprint
from cloister.cli import doctor
from cloister.cli.main import app
from cloister.deploy.approval import approval, own_cells
from cloister.deploy.approval.own_cells import check_approved_cells, open_cells
from cloister.deploy.kit import Kit, check_private
from cloister.errors import DataError, ParameterError, RefusedError, UsageError
from cloister.report.provenance import signed_rows, terms_rows
from cloister.study import Study, format_study

pytest.importorskip("nvflare")
from cloister.deploy.provision import provision

PARTIES = {"hub": "coordinator", "basel": "site", "lugano": "site", "helper": "auxiliary"}
STUDY = Study(
    "pair", "map-labels", PARTIES, parameters={"query": "lugano"}, network={"host": "localhost", "port": 18779}
)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return provision(STUDY, tmp_path_factory.mktemp("kits"))


@pytest.fixture
def basel(made):
    kit = Kit.open(made["basel"])
    before = {f: f.read_text() for f in (kit.policy_file, kit.path / "study.toml")}
    write_cells(demo_sites()["basel"], kit.path / "cells.h5ad")
    yield kit
    for file, text in before.items():
        file.write_text(text)
    (kit.path / "local" / "approvals.json").unlink(missing_ok=True)


def bring(kit):
    """What `Turn` does before the first frame."""
    policy = kit.policy()
    kit.check_approved(policy)
    return check_approved_cells(kit, open_cells(kit, policy))


def test_it_says_who_when_and_on_which_cells(basel):
    entry = basel.approve("Dr. A. Muster, data protection")
    adata = demo_sites()["basel"]
    assert (entry.data.cells, entry.data.genes) == adata.shape
    assert entry.by == "Dr. A. Muster, data protection"
    assert basel.approve().by == entry.user  # the login name, where nobody is named
    file = basel.path / "local" / "approvals.json"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    (kept,) = json.loads(file.read_text()).values()
    assert kept["when"].endswith("Z")
    assert bring(basel) == entry.data
    assert "stamp" not in entry.record  # where the cells lie stays here


def change(name, adata):
    if name == "label":
        adata.obs["cell_type"] = "T"
    elif name == "embedding":
        adata.obsm["X_pca"] = adata.obsm["X_pca"] + 1e-7
    return adata[1:].copy() if name == "one cell fewer" else adata


@pytest.mark.parametrize("name", ["label", "embedding", "one cell fewer"])
def test_other_cells_are_refused_until_they_are_approved(basel, name):
    text = (
        basel.path.joinpath("study.toml").read_text().replace('query = "lugano"', 'query = "lugano"\nuse_rep = "X_pca"')
    )
    basel.path.joinpath("study.toml").write_text(text)
    kit = Kit.open(basel.path)
    kit.approve("Ann")
    bring(kit)
    write_cells(change(name, read_cells(kit.path / "cells.h5ad")), kit.path / "cells.h5ad")
    with pytest.raises(RefusedError, match="not the cells that Ann approved for 'pair' on .*--approve") as e:
        bring(kit)
    assert e.value.code == "refused"  # all that the others hear
    kit.approve("Ann")
    bring(kit)


def test_a_line_written_by_hand_is_no_approval(basel):
    """Before there was a record, three lines in site.toml were enough."""
    text = basel.policy_file.read_text()
    for key, value in basel._asked().items():
        text = text.replace(f"{key} = []", f"{key} = {json.dumps(value)}")
    basel.policy_file.write_text(text)
    with pytest.raises(RefusedError, match="no record of who approved the study"):
        basel.check_approved(basel.policy())


def test_nothing_is_approved_unseen(basel):
    (basel.path / "cells.h5ad").unlink()
    with pytest.raises(DataError, match="does not exist"):
        basel.approve()
    assert not (basel.path / "local" / "approvals.json").exists()
    assert basel.policy().studies == ()


def test_one_line_says_who(basel):
    for by in ("two\nlines", "x" * 201):
        with pytest.raises(ParameterError, match="one line"):
            basel.approve(by)
    assert basel.policy().studies == ()


def test_a_refusal_is_kept_with_its_name_until_somebody_approves(basel):
    with pytest.raises(ParameterError, match="one line"):
        basel.refuse("two\nlines")
    assert not basel.approvals.path.exists()
    entry = basel.refuse("Dr. A. Muster")
    assert (entry.by, entry.data) == ("Dr. A. Muster", None)
    assert stat.S_IMODE(basel.approvals.path.stat().st_mode) == 0o600
    digest = basel.study.digest.hex()
    by_hand = basel.policy_file.read_text().replace("studies = []", f'studies = ["{digest}"]')
    basel.policy_file.write_text(by_hand)  # a line in site.toml does not overrule it
    with pytest.raises(RefusedError, match=r"'basel' refused 'pair' on .* by Dr\. A\. Muster; to allow it: "):
        bring(basel)
    basel.approve("Bea")
    bring(basel)
    with pytest.raises(UsageError, match="is approved; .* cloister halt"):
        basel.refuse("Dr. A. Muster")
    bring(basel)


def test_a_damaged_record_allows_nothing(basel):
    basel.approve()
    (basel.path / "local" / "approvals.json").write_text("{")
    with pytest.raises(ParameterError, match="nobody knows what was approved"):
        basel.check_approved(basel.policy())


def test_an_auxiliary_approves_without_cells(made):
    helper = Kit.open(made["helper"])
    assert helper.approve().data is None
    helper.check_approved(helper.policy())


def test_a_study_that_has_ended_is_neither_approved_nor_run(basel, monkeypatch):
    over = dataclasses.replace(basel.study, governance={"expires": "2031-01-31"})
    (basel.path / "study.toml").write_text(format_study(over))
    kit = Kit.open(basel.path)
    basel.approve()
    with pytest.raises(RefusedError, match="has not approved the study"):  # other words are another study
        kit.check_approved(kit.policy())
    kit.approve()
    kit.check_approved(kit.policy())
    monkeypatch.setattr(governance, "now", lambda: governance.datetime.date(2031, 2, 1))
    with pytest.raises(RefusedError, match="ended on 2031-01-31"):
        kit.check_approved(kit.policy())
    with pytest.raises(RefusedError, match="ended on 2031-01-31"):
        kit.approve()


def test_a_large_file_is_read_again_only_if_it_was_written_to(basel, monkeypatch):
    monkeypatch.setattr("cloister.cells.files.IN_MEMORY", 0)
    basel.approve()
    counted = []
    hashed = own_cells.fingerprint_of
    monkeypatch.setattr(own_cells, "fingerprint_of", lambda *a: counted.append(1) or hashed(*a))
    bring(basel)
    assert not counted
    (basel.path / "cells.h5ad").touch()
    bring(basel)  # the same cells, looked at again
    assert counted
    adata = demo_sites()["basel"]
    adata.X = adata.X * 2
    write_cells(adata, basel.path / "cells.h5ad")
    with pytest.raises(RefusedError, match="not the cells"):
        bring(basel)


# -- what is approved, and on what terms -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "lists",
    ['studies = [\n    "aa",  # the pilot\n    "bb",\n]', "studies = ['aa', 'bb']", 'studies = [ "aa" , "bb" ]'],
)
def test_approving_keeps_the_layout_of_the_owners_file(basel, lists):
    """A list over several lines was cut in two, and the file could not be read any more."""
    text = basel.policy_file.read_text().replace("studies = []", lists) + "\n# the owner's last words\n"
    basel.policy_file.write_text(text)
    basel.approve("Ann")
    digest = basel.study.digest.hex()
    assert basel.policy().studies == ("aa", "bb", digest)
    basel.withdraw("Ann")
    assert basel.policy().studies == ("aa", "bb")
    now = basel.policy_file.read_text()
    assert now.endswith("\n# the owner's last words\n")
    comments = [line for line in text.splitlines() if line.startswith("#")]
    assert [line for line in now.splitlines() if line.startswith("#")] == comments


def test_approving_adds_lines_that_the_owner_deleted(basel):
    text = basel.policy_file.read_text()
    start, end = text.index("[approve]"), text.index("# Number of runs that may begin")
    basel.policy_file.write_text(text[:start] + text[end:])
    basel.approve()
    basel.check_approved(basel.policy())


def test_an_approval_records_its_terms(basel):
    text = basel.policy_file.read_text().replace("consent = []", 'consent = ["open-model"]')
    basel.policy_file.write_text(text.replace("study = 20", "study = 3"))
    entry = basel.approve("Ann")
    terms = entry.record["terms"]
    assert terms["consent"] == ["open-model"]
    assert terms["limits"]["study"] == 3
    assert terms["floors"] == {"min_cells": 10, "min_donors": 3}
    assert terms["file"] == str(basel.path / "cells.h5ad")
    shown = dict(terms_rows(terms))
    assert shown["Consents"] == "open-model"
    assert shown["Minimum group"] == "10 cells and 3 donors"
    assert shown["File"] == terms["file"]
    assert Kit.open(basel.path).approvals.entry(basel.study).terms == entry.terms
    signed = dict(signed_rows({"approval": entry.record}))
    assert {"Consents", "Runs allowed", "Minimum group", "File", "Approved cells"} <= signed.keys()


def test_doctor_and_approval_name_consents_that_a_kit_came_with(basel):
    assert basel.unseen_consents(basel.policy()) == []
    text = basel.policy_file.read_text().replace("consent = []", 'consent = ["exact-updates", "open-model"]')
    basel.policy_file.write_text(text)
    found = {f.name: f for f in doctor.examine(basel.path)}
    assert found["consent"].state == "note"
    assert "before this approval, and kits are delivered without any: exact-updates, open-model" in (
        found["consent"].detail
    )
    assert "exact-updates, open-model" in found["terms"].detail
    said = CliRunner().invoke(app, ["site", str(basel.path), "--approve", "--by", "Ann"]).output
    assert "kits are delivered without any: exact-updates, open-model" in " ".join(said.split())
    assert basel.unseen_consents(basel.policy()) == []  # somebody has seen them now
    said = CliRunner().invoke(app, ["site", str(basel.path), "--approve", "--by", "Ann"]).output
    assert "delivered without any" not in said


def test_the_space_of_an_embedding_belongs_to_what_was_approved(basel):
    adata = demo_sites()["basel"]
    adata.uns["X_pca"] = {"space": "one"}
    one = fingerprint(adata, ["obsm['X_pca']"])
    adata.uns["X_pca"] = {"space": "two"}
    assert one.difference(fingerprint(adata, ["obsm['X_pca']"])) == "other labels, columns, layers or embeddings"


# ---- what comes with a kit -------------------------------------------------------------------------------------------


def test_an_approval_that_came_with_the_kit_is_none_and_hides_no_consent(tmp_path, monkeypatch):
    """Whoever delivers a kit can write any file in it, but does not know this machine's id."""
    parties = {"hub": "coordinator", "basel": "site", "lugano": "site", "helper": "auxiliary"}
    network = {"host": "localhost", "port": 8002}
    kits = provision(Study("s", "bin-values", parties, network=network), tmp_path / "kits")
    kit = Kit.open(kits["helper"])
    ident = tmp_path / "machine-id"
    monkeypatch.setattr(approval, "MACHINE", ident)
    ident.write_text("of who delivers\n")
    text = kit.policy_file.read_text().replace("consent = []", 'consent = ["open-model"]')
    kit.policy_file.write_text(text)
    kit.approve("Dr. A. Muster")
    kit.check_approved(kit.policy())
    ident.write_text("of the hospital\n")
    with pytest.raises(RefusedError, match="was not recorded on this machine"):
        kit.check_approved(kit.policy())
    assert kit.unseen_consents(kit.policy()) == ["open-model"]
    file = kit.approvals.path
    file.write_text(re.sub(r'"machine": "\w+"', '"machine": ""', file.read_text()))  # as an earlier version
    with pytest.raises(RefusedError, match="was not recorded on this machine"):
        kit.check_approved(kit.policy())
    kit.approve("Dr. A. Muster")
    kit.check_approved(kit.policy())
    assert kit.unseen_consents(kit.policy()) == []
    ident.unlink()  # a container without an id: nothing to compare with
    kit.check_approved(kit.policy())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_a_kit_of_another_user_is_refused():
    folder = Path(tempfile.mkdtemp(prefix="cloister-owner-"))
    folder.chmod(0o755)
    network = {"host": "localhost", "port": 8002}
    study = Study("s", "bin-values", {"hub": "coordinator", "basel": "site"}, network=network)
    kit = provision(study, folder / "kits")["basel"]
    (folder / "kits").chmod(0o755)
    for path in (kit, *kit.rglob("*")):
        os.chown(path, 61201, 61201)

    def checked() -> str:
        os.seteuid(61201)
        try:
            check_private(kit)
        except DataError as e:
            return str(e)
        finally:
            os.seteuid(0)
        return ""

    try:
        assert checked() == ""
        os.chown(kit / "study.toml", 61202, 61202)
        assert "study.toml belongs to user 61202, who could change it" in checked()
        os.chown(kit / "study.toml", 0, 0)
        assert checked() == ""
    finally:
        shutil.rmtree(folder)
