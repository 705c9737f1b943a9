"""What a killed run left is closed, signed and told; and what is past its time is named."""

import dataclasses
import datetime
import json

import pytest

from cloister.cells.demo import demo_sites
from cloister.cells.files import write_cells
from cloister.cli.doctor import _examine_kit
from cloister.cli.receipt import receipt as show
from cloister.deploy.approval.expiry import overdue
from cloister.deploy.approval.halting import halt
from cloister.deploy.approval.recovery import keep_late, note_begun, recover
from cloister.deploy.kit import Kit
from cloister.deploy.party import Ended, failed, lost
from cloister.errors import DataError, DiskError, ReceiptError, RefusedError
from cloister.mpc.net.journal import SUFFIX, Journal
from cloister.mpc.net.receipts import Entry, Receipt
from cloister.rehearsal.results import load_run
from cloister.study import Study, format_study

pytest.importorskip("nvflare")
from cloister.deploy.provision import provision

PARTIES = {"hub": "coordinator", "basel": "site", "lugano": "site"}
GROUNDS = {"retention": "30 days", "expires": "2099-12-31"}
STUDY = Study("pair", "bin-values", PARTIES, governance=GROUNDS, network={"host": "localhost", "port": 18781})
RUN = "20260131T120000Z-3f2a9c1e"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return provision(STUDY, tmp_path_factory.mktemp("kits"))


@pytest.fixture
def basel(made):
    kit = Kit.open(made["basel"])
    write_cells(demo_sites()["basel"], kit.path / "cells.h5ad")
    policy = kit.policy_file.read_text()
    yield kit
    kit.policy_file.write_text(policy)
    (kit.path / "study.toml").write_text(format_study(kit.study))
    for name in ("approvals.json", "runs.json", "budget.json"):
        (kit.path / "local" / name).unlink(missing_ok=True)
    for file in sorted((kit.path / "results").rglob("*"), reverse=True):
        file.rmdir() if file.is_dir() else file.unlink()


def left_by_kill(kit, folder=RUN):
    """The folder of a run that was killed after two messages."""
    header = {"study": "pair", "study_digest": kit.study.digest.hex(), "party": "basel", "role": "site"}
    header |= {"workflow": "bin-values", "mode": "hardened", "version": "0", "parties": dict(kit.study.parties)}
    header |= {"started": "2026-01-31T12:00:00Z", "parameters": {}, "governance": GROUNDS}
    receipt = Receipt(header, Journal(kit.path / "results" / folder / f"basel{SUFFIX}"))
    for name in ("secure_sum.Keys", "secure_sum.MaskedInput"):
        receipt.add(Entry("sent", "secure_sum", "L1", name, "hub", 100, "ab" * 32, "1"))
    return kit.path / "results" / folder


def test_the_folder_says_aborted_and_verifies(basel, capsys):
    folder = left_by_kill(basel)
    with pytest.raises(ReceiptError, match="chain of 2 entries is whole, but has no end yet"):
        show(folder / f"basel{SUFFIX}", verify=True)
    assert recover(basel) == [folder]
    ended = Ended.load(folder / "outcome.json")
    assert (ended.status, ended.run, ended.party) == ("aborted", "3f2a9c1e", "basel")
    assert "process ended before the run did" in ended.error["text"]
    show(folder / "basel.receipt.json", verify=True, study=basel.path / "study.toml")
    told = capsys.readouterr().out
    assert "aborted: its process ended" in told
    assert "secure_sum.MaskedInput" in told
    assert "secure_sum ran, and reveals" in told
    assert load_run(folder).abort.party == "basel"
    assert not list(folder.glob(f"*{SUFFIX}"))
    assert recover(basel) == []


def test_one_run_at_a_time_and_of_its_steps(basel):
    other = left_by_kill(basel, "20260131T130000Z-aaaaaaaa")
    step = left_by_kill(basel, f"{RUN}/01-shared-pca")
    assert recover(basel, "3f2a9c1e" + "0" * 24) == [step.parent]
    assert (step / "basel.receipt.json").exists()
    assert (step.parent / "outcome.json").exists()
    assert list(other.glob(f"*{SUFFIX}"))


def test_a_run_that_was_killed_before_its_first_message_is_told_too(basel):
    """Whoever waits for the end of that run would wait for ever."""
    recover(basel, "5" * 32)
    (told,) = (basel.path / "results").glob("*-55555555/outcome.json")
    ended = Ended.load(told)
    assert ended.status == "aborted"
    assert "nothing had been sent" in ended.error["text"]
    before = told.read_bytes()
    recover(basel, "5" * 32)
    assert [told] == list((basel.path / "results").glob("*-55555555/outcome.json"))
    assert told.read_bytes() == before


@pytest.mark.parametrize("when", ["before its folder", "between two steps", "in a step", "after its end"])
def test_a_service_that_was_killed_writes_the_outcome_at_its_next_start(basel, when):
    run = "3f2a9c1e" + 24 * "0"
    folder = basel.path / "results" / RUN
    note_begun(basel, run)
    if when == "between two steps":
        (folder / "01-one").mkdir(parents=True)
    elif when == "in a step":
        left_by_kill(basel)
    elif when == "after its end":
        folder.mkdir(parents=True)
        Ended(run, "basel", "done", str(folder)).keep()
    recover(basel)
    (file,) = (basel.path / "results").glob("*-3f2a9c1e/outcome.json")
    ended = Ended.load(file)
    if when == "after its end":
        assert ended.status == "done"
    else:
        assert ended.status == "aborted"
        assert (ended.error["reason"], ended.error["origin"]) == ("lost", "basel")
    assert not any((basel.path / "runs").iterdir())
    recover(basel)
    assert [*(basel.path / "results").glob("*/outcome.json")] == [file]


def test_what_a_full_disk_did_not_take_is_written_with_the_next_run(basel, monkeypatch):
    run = "3f2a9c1e" + 24 * "0"
    note_begun(basel, run)
    folder = basel.path / "results" / RUN
    unsaved = {run: failed(basel, run, DiskError("no space left"), folder), "other": lost("basel", "other", "why")}

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(Ended, "save", full)
        keep_late(basel, unsaved)
    assert [*unsaved] == [run]
    keep_late(basel, unsaved)
    assert unsaved == {}
    assert Ended.load(folder / "outcome.json").error["reason"] == "disk"
    assert not any((basel.path / "runs").iterdir())


def test_a_journal_that_was_altered_is_left_for_people_to_see(basel):
    folder = left_by_kill(basel)
    file = folder / f"basel{SUFFIX}"
    file.write_bytes(file.read_bytes().replace(b'"bytes": 100', b'"bytes": 101', 1))
    recover(basel)
    assert file.exists()
    assert not (folder / "basel.receipt.json").exists()
    assert Ended.load(folder / "outcome.json").status == "aborted"


def test_a_whole_journal_on_a_full_disk_becomes_a_receipt_as_it_is(basel):
    folder = left_by_kill(basel)
    receipt = Receipt.load(folder / f"basel{SUFFIX}")
    receipt.close("aborted: DataError", lambda head: (basel.identity.public, basel.identity.sign("receipt", head)))
    lines = [{"header": receipt.header}, *receipt.to_json()["entries"], receipt.signature]
    (folder / f"basel{SUFFIX}").write_text("".join(json.dumps(line) + "\n" for line in lines))
    recover(basel)
    again = Receipt.load(folder / "basel.receipt.json")
    assert (again.status, again.head) == ("aborted: DataError", receipt.head)
    show(folder / "basel.receipt.json", verify=True)


# -- halt --------------------------------------------------------------------------------------------------------------


def test_halt_withdraws_the_approval_and_says_so(basel):
    basel.approve("Ann")
    basel.check_approved(basel.policy())
    done = halt(basel.path, "Bea")
    assert (done.withdrawn, done.runs, done.running) == (True, 0, False)
    assert basel.policy().studies == ()
    with pytest.raises(RefusedError, match="'basel' withdrew its approval of 'pair' on .* by Bea"):
        basel.check_approved(basel.policy())
    text = basel.policy_file.read_text().replace("studies = []", f'studies = ["{basel.study.digest.hex()}"]')
    basel.policy_file.write_text(text)
    with pytest.raises(RefusedError, match="withdrew"):  # the line alone does not bring it back
        basel.check_approved(basel.policy())
    assert not halt(basel.path).withdrawn
    basel.approve("Ann")
    basel.check_approved(basel.policy())


def test_halt_works_with_a_broken_site_toml_and_says_so_on_a_full_disk(basel, monkeypatch):
    basel.approve("Ann")
    text = basel.policy_file.read_text()

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("cloister.files.replacing", full)
        with pytest.raises(DataError, match=r"0 run\(s\) were stopped, but .*No space left"):
            halt(basel.path)
    basel.check_approved(basel.policy())
    basel.policy_file.write_text("data = ")
    assert halt(basel.path).withdrawn
    basel.policy_file.write_text(text)
    with pytest.raises(RefusedError, match="withdrew"):
        basel.check_approved(basel.policy())


# -- what is past its time ---------------------------------------------------------------------------------------------


def test_results_and_keys_past_their_time_are_named(basel):
    recover(basel) if left_by_kill(basel) else None
    policy, day = basel.policy(), datetime.date.fromisoformat
    assert list(overdue(basel, policy, day("2026-03-02"))) == []
    ((name, what),) = overdue(basel, policy, day("2026-03-03"))
    assert name == "results"
    assert f"{RUN} was to be kept until 2026-03-02; delete it" in what
    names = dict(overdue(basel, policy, day("2100-01-01")))
    assert {*names} == {"results", "study", "keys"}
    assert "identity.key, client.key" in names["keys"]
    assert dict(overdue(basel, policy, day("2099-12-20")))["study"] == "'pair' ends in 11 days, on 2099-12-31"


def test_doctor_says_it(basel):
    left_by_kill(basel)
    recover(basel)
    over = dataclasses.replace(basel.study, governance={"expires": "2026-02-01"})
    (basel.path / "study.toml").write_text(format_study(over))
    found = {f.name: f.detail for f in _examine_kit(basel.path) if f.state == "note"}
    assert "was to be kept until 2026-03-02" in found["results"]
    assert "ended on 2026-02-01" in found["keys"]
    assert "ended on 2026-02-01" in found["approval"] or "has not approved" in found["approval"]
