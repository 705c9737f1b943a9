"""What samples cost is counted before they are answered, once, and never twice by runs at the same time."""

import errno
import json
import threading

import pytest

from cloister import files
from cloister.errors import DataError, ProtocolAbort
from cloister.study import Party
from cloister.workflows.common.query_ledger import Ledger

ANN, BEN = Party("ann"), Party("ben")


def test_two_runs_that_began_together_do_not_both_spend_the_rest(tmp_path):
    """Both have read the file when it said nothing."""
    one, two = (Ledger(tmp_path / "ledger.json") for _ in range(2))
    one.admit(ANN, 6, 10)
    with pytest.raises(ProtocolAbort) as e:
        two.admit(ANN, 6, 10)
    assert e.value.code == "budget"
    two.admit(BEN, 6, 10)
    one.admit(ANN, 4, 10)
    assert Ledger(tmp_path / "ledger.json").used == {"ann": 10, "ben": 6}


def test_many_at_once_spend_no_more_than_there_is(tmp_path):
    ledgers, refused = [Ledger(tmp_path / "ledger.json") for _ in range(12)], []

    def ask(ledger):
        try:
            ledger.admit(ANN, 2, 10)
        except ProtocolAbort as e:
            refused.append(e.code)

    threads = [threading.Thread(target=ask, args=(ledger,)) for ledger in ledgers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert refused == ["budget"] * 7
    assert json.loads((tmp_path / "ledger.json").read_text()) == {"ann": 10}


def pay(ledger, samples, receipt, *, fails=False, owner=ANN, budget=100):
    with ledger.paid(owner, samples, budget, receipt):
        if fails:
            raise OSError(errno.ENOSPC, "no room")


@pytest.mark.parametrize("kept", [True, False])
def test_a_query_that_was_paid_for_and_could_not_be_put_down_is_not_paid_again(tmp_path, kept):
    path = tmp_path / "ledger.json" if kept else None
    ledger = Ledger(path)

    def counted():
        return (Ledger(path) if kept else ledger).used.get("ann", 0)

    for _ in range(3):
        with pytest.raises(OSError, match="no room"):
            pay(ledger, 4, "one", fails=True)
        assert counted() == 4
    pay(ledger, 4, "one")  # the same: it is put down now, and may be told
    assert counted() == 4
    pay(ledger, 4, "one")  # so a second time costs
    assert counted() == 8
    if kept:
        assert json.loads(path.read_text()) == {"ann": 8}


@pytest.mark.parametrize(("other", "samples", "total"), [("one", 5, 9), ("two", 4, 8), ("two", 0, 4)])
def test_a_receipt_is_for_that_query_only_and_until_the_next(tmp_path, other, samples, total):
    """Nor does it outlive another query that fails on its way: what is owed under a state is not owed by a receipt."""
    ledger = Ledger(tmp_path / "ledger.json")
    with pytest.raises(OSError, match="no room"):
        pay(ledger, 4, "one", fails=True)
    pay(ledger, 3, "ben's", owner=BEN)
    with pytest.raises(OSError, match="no room"):
        pay(ledger, samples, other, fails=True)
    assert ledger.used == {"ann": total, "ben": 3}
    pay(ledger, 4, "one")
    assert ledger.used["ann"] == total + 4
    with pytest.raises(ProtocolAbort):
        pay(ledger, 100, "one")


def test_a_ledger_that_cannot_be_written_counts_nothing_and_admits_nothing(tmp_path, monkeypatch):
    ledger, told = Ledger(tmp_path / "ledger.json"), []
    with monkeypatch.context() as m:
        m.setattr(files, "write", lambda *args: (_ for _ in ()).throw(OSError(errno.ENOSPC, "no room")))
        with pytest.raises(OSError, match="no room"), ledger.paid(ANN, 4, 10, "one"):
            told.append("admitted")
    assert told == []
    assert ledger.used == {}
    (tmp_path / "ledger.json").write_text("[]")
    with pytest.raises(DataError, match="is not a ledger of queries"):
        ledger.admit(ANN, 1, 10)


def test_n9_a_new_name_or_a_new_key_alone_starts_no_new_count(tmp_path):
    path, key, other = tmp_path / "ledger.json", b"k" * 32, b"o" * 32
    Ledger(path, keys={"ann": key}).admit("ann", 8, 10)
    with pytest.raises(ProtocolAbort, match="budget"):
        Ledger(path, keys={"anna": key}).admit("anna", 8, 10)  # the same identity in another study
    with pytest.raises(ProtocolAbort, match="budget"):
        Ledger(path, keys={"ann": other}).admit("ann", 8, 10)  # the same name with a new key
    Ledger(path, keys={"ben": other}).admit("ben", 8, 10)
    Ledger(path, keys={"anna": key}).admit("anna", 2, 10)
    assert Ledger(path).used == {"ann": 8, "anna": 10, "ben": 8, f"key:{key.hex()}": 10, f"key:{other.hex()}": 8}
