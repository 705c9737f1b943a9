"""What is sent stands on disk before it leaves: killed, cut off or on a full disk, the journal tells and verifies."""

import json
import signal
import stat
import subprocess
import sys

import pytest

from cloister.errors import DataError, ReceiptError
from cloister.mpc.crypto.agreement import Identity, check_signature
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.net.journal import RESERVE, SUFFIX, Journal
from cloister.mpc.net.receipts import Entry, Receipt
from cloister.session import SIGNED

ENTRY = Entry("sent", "secure_sum", "L3", "secure_sum.MaskedInput", "hub", 812, "ab" * 32, "1")
SENDER = """
import resource, sys
from pathlib import Path
from cloister.mpc.crypto.agreement import Identity
from cloister.mpc.crypto.entropy import Entropy
from cloister.errors import DataError
from cloister.mpc.net.journal import Journal
from cloister.mpc.net.receipts import Entry, Receipt
journal = Journal(Path(sys.argv[1]))
receipt = Receipt({"party": "basel"}, journal)
identity = Identity.create(Entropy())
if sys.argv[2] != "0":
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), int(sys.argv[2])))
sent = 0
try:
    while True:
        receipt.add(Entry("sent", "secure_sum", "L3", "secure_sum.MaskedInput", "hub", sent, "ab" * 32, "1"))
        sent += 1
        print(sent, flush=True)                 # the message leaves
except DataError as e:
    receipt.add(Entry("sent", "local", "-", "channel.Abort", "hub", 40, "cd" * 32))
    journal.begin_end()
    receipt.close("aborted: DataError", lambda head: (identity.public, identity.sign("receipt", head)))
    print(e, flush=True)
"""


def verify(receipt):
    receipt.check(lambda public, head, signature: check_signature(public, SIGNED, head, signature))


def test_a_whole_journal_is_a_receipt(tmp_path):
    path = tmp_path / f"basel{SUFFIX}"
    identity = Identity.create(Entropy())
    journal = Journal(path)
    receipt = Receipt({"party": "basel"}, journal)
    receipt.add(ENTRY)
    assert path.stat().st_size >= RESERVE  # room is there before it is needed
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    journal.begin_end()
    receipt.close("done", lambda head: (identity.public, identity.sign(SIGNED, head)))
    assert path.stat().st_size < 2000
    again = Receipt.load(path)
    verify(again)
    assert (again.status, again.head, again.entries) == ("done", receipt.head, receipt.entries)
    assert json.loads(again.save(tmp_path / "basel.receipt.json").read_text())["head"] == receipt.head


def test_what_was_sent_before_kill_9_is_on_disk(tmp_path):
    path = tmp_path / f"basel{SUFFIX}"
    with subprocess.Popen([sys.executable, "-c", SENDER, str(path), "0"], stdout=subprocess.PIPE, text=True) as child:
        left = 0
        while left < 200:
            left = int(child.stdout.readline())
        child.send_signal(signal.SIGKILL)
        for line in child.stdout:
            left = int(line) if line.endswith("\n") else left
    receipt = Receipt.load(path)
    receipt.check()
    assert receipt.status == "running"
    assert left <= len(receipt.entries) <= left + 1  # one may be written whose message had not left
    with pytest.raises(ReceiptError, match="not signed"):
        verify(receipt)


def test_on_a_full_disk_nothing_more_leaves_and_the_record_has_its_end(tmp_path):
    path = tmp_path / f"basel{SUFFIX}"
    done = subprocess.run(
        [sys.executable, "-c", SENDER, str(path), str(3 * RESERVE)], capture_output=True, text=True, timeout=60
    )
    *numbers, last = done.stdout.splitlines()
    assert "cannot be kept" in last, done.stderr
    assert "nothing more is sent" in last
    receipt = Receipt.load(path)
    verify(receipt)
    sent = [e for e, _ in receipt.entries if e.name == "secure_sum.MaskedInput"]
    assert len(sent) == len(numbers) > 100
    assert receipt.entries[-2][0].name == "channel.Abort"
    assert receipt.status == "aborted: DataError"


def test_a_torn_line_is_left_out_wherever_it_was_cut(tmp_path):
    path = tmp_path / f"basel{SUFFIX}"
    receipt = Receipt({"party": "basel"}, Journal(path))
    receipt.add(ENTRY)
    receipt.add(ENTRY)
    whole = path.read_bytes().rstrip(b"\0")
    last = whole.rindex(b"\n", 0, len(whole) - 1) + 1
    for cut in range(last, len(whole)):
        path.write_bytes(whole[:cut] + bytes(100))
        again = Receipt.load(path)
        again.check()
        assert len(again.entries) == 1


def test_a_changed_journal_does_not_verify(tmp_path):
    path = tmp_path / f"basel{SUFFIX}"
    receipt = Receipt({"party": "basel"}, Journal(path))
    for _ in range(3):
        receipt.add(ENTRY)
    text = path.read_bytes().rstrip(b"\0")
    header, first, second, third, _ = text.split(b"\n")
    for lines in ([header, first, third], [header, second, third], [header, first.replace(b"812", b"811"), second]):
        path.write_bytes(b"\n".join([*lines, b""]))
        with pytest.raises(ReceiptError, match="altered|added or removed"):
            Receipt.load(path).check()


def test_a_folder_that_cannot_be_written_is_named_before_anything_is_sent(tmp_path):
    (tmp_path / "results").write_text("a file")
    with pytest.raises(DataError, match="cannot be kept in .*so nothing more is sent"):
        Journal(tmp_path / "results" / f"basel{SUFFIX}")
    Journal(tmp_path / f"basel{SUFFIX}")
    with pytest.raises(DataError, match="File exists"):  # an earlier record is never written over
        Journal(tmp_path / f"basel{SUFFIX}")
