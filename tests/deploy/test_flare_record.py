"""Between machines, with real processes: killed, halted and on a full disk, the record of a run stands and verifies."""

from __future__ import annotations

import threading
from pathlib import Path

import anndata as ad
import chat
import numpy as np
import pytest
from federation import PARTIES, Federation

from cloister.cells.files import write_cells
from cloister.deploy.approval.halting import halt
from cloister.errors import PeerLost, ProtocolAbort
from cloister.mpc.crypto.agreement import check_signature
from cloister.mpc.net.receipts import Receipt
from cloister.session import SIGNED

chat.register()
FOREVER = {"rounds": 1_000_000, "pause": 0.01}
FULL = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({0}, {0})); "

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    made = Federation(tmp_path_factory.mktemp("record"), timeout=16.0)
    made.agree()
    made.start(*PARTIES)
    try:
        yield made
    finally:
        made.close()


def run_aside(federation, limit=120.0):
    ends = []

    def go():
        try:
            ends.append(federation.run(limit))
        except Exception as e:
            ends.append(e)

    thread = threading.Thread(target=go)
    thread.start()
    return thread, ends


def begun(federation):
    """A run that goes on until something ends it; both ends of the thread."""
    federation.agree(parameters=FOREVER)
    federation.clear_marks()
    thread, ends = run_aside(federation)
    federation.wait_for_mark("basel", ends)
    return thread, ends


def verified(federation, party):
    """The receipt of the last run at a party, which must be genuine and signed with its key."""
    ended = federation.ended(party)
    receipt = Receipt.load(Path(ended.folder) / f"{party}.receipt.json")
    receipt.check(lambda public, head, signature: check_signature(public, SIGNED, head, signature))
    assert receipt.signature["public"] == federation.study.keys[party].hex()
    assert not list(Path(ended.folder).glob("*.journal"))
    return ended, receipt


def processes_of_runs(federation, party):
    return [p for p in federation.processes(party) if "cloister.deploy.run" in p.cmdline()]


def test_the_approval_and_the_cells_are_in_the_receipt(federation):
    federation.agree(governance={"purpose": "a test", "expires": "2099-01-01"})
    federation.run()
    _, receipt = verified(federation, "basel")
    assert receipt.header["governance"] == {"purpose": "a test", "expires": "2099-01-01"}
    assert receipt.header["approval"]["data"]["cells"] == 5
    assert "5 cells" in [e.name for e, _ in receipt.entries if e.kind == "used"]


def test_other_cells_are_refused(federation):
    study = federation.agree()
    file = federation.kits["lugano"] / "cells.h5ad"
    own = file.read_bytes()
    adata = ad.AnnData(np.ones((7, 60), np.float32))
    write_cells(adata, file)
    try:
        with pytest.raises(ProtocolAbort) as e:
            federation.run()
        assert e.value.code == "refused"
        assert "these are not the cells" in federation.ended("lugano").error["text"]
        assert federation.ended("lugano").status == "refused"
    finally:
        file.write_bytes(own)
    federation.hand_over("lugano", study)
    assert federation.run().status == "done"


def test_kill_9_of_a_run_leaves_a_signed_record(federation):
    thread, ends = begun(federation)
    (process,) = processes_of_runs(federation, "basel")
    process.kill()
    thread.join()
    assert isinstance(ends[0], ProtocolAbort)
    federation.wait_until(lambda: not processes_of_runs(federation, "basel"))
    federation.wait_until(lambda: federation.ended("basel").parties == {})
    ended, receipt = verified(federation, "basel")
    assert ended.status == "aborted"
    assert receipt.status.startswith("aborted: its process ended")
    assert sum(e.name == "chat.Input" for e, _ in receipt.entries) >= 2


def test_kill_9_of_everything_is_told_at_the_next_start(federation):
    thread, _ = begun(federation)
    federation.kill("basel")
    thread.join()
    (journal,) = (federation.kits["basel"] / "results").rglob("*.journal")
    assert Receipt.load(journal).status == "running"
    federation.start("basel")
    federation.wait_until(lambda: not journal.exists())
    _, receipt = verified(federation, "basel")
    assert sum(e.name == "chat.Input" for e, _ in receipt.entries) >= 2
    federation.agree()
    assert federation.run().status == "done"


def test_halt_stops_at_once_and_nothing_begins_again(federation):
    thread, ends = begun(federation)
    done = halt(federation.kits["basel"], "Ann")
    assert (done.withdrawn, done.runs) == (True, 1)
    assert not processes_of_runs(federation, "basel")
    thread.join()
    assert isinstance(ends[0], ProtocolAbort)
    ended, receipt = verified(federation, "basel")
    assert ended.status == "aborted"
    assert "halted" in ended.error["text"]
    assert receipt.status.startswith("aborted: ")
    with pytest.raises(ProtocolAbort) as e:
        federation.run()
    assert e.value.code == "refused"
    assert "withdrew its approval" in federation.ended("basel").error["text"]
    federation.agree()
    assert federation.run().status == "done"


def test_a_site_whose_disk_is_full_is_not_called_done(federation):
    big = ad.AnnData(np.random.default_rng(0).normal(size=(3000, 60)).astype(np.float32))
    big.var_names = [f"GENE{i}" for i in range(60)]
    file = federation.kits["vienna"] / "cells.h5ad"
    own = file.read_bytes()
    write_cells(big, file)
    federation.stop("vienna")
    federation.start("vienna", patch=FULL.format(400_000))
    try:
        federation.agree()
        with pytest.raises(PeerLost, match="everything was computed, but not everyone has a result") as e:
            federation.run()
        assert "vienna: aborted" in str(e.value)
        at_hub = federation.ended("hub")
        assert at_hub.status == "aborted"
        assert at_hub.parties["basel"] == "done"
        ended, receipt = verified(federation, "vienna")
        assert ended.status == "aborted"
        assert "cannot be written" in ended.error["text"]
        assert receipt.status == "done"  # everything had been sent
    finally:
        file.write_bytes(own)
        federation.stop("vienna")
        federation.start("vienna")


def test_where_no_receipt_can_be_kept_nothing_is_sent(federation):
    federation.stop("lugano")
    federation.start("lugano", patch=FULL.format(100_000))
    try:
        federation.agree(parameters={"rounds": 4})
        with pytest.raises(ProtocolAbort):
            federation.run()
        at_home = federation.ended("lugano")
        assert at_home.status == "aborted"
        assert "nothing more is sent" in at_home.error["text"]
    finally:
        federation.stop("lugano")
        federation.start("lugano")
