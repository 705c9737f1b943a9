import copy
import hashlib
import json
import stat
import threading
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloister.errors import CloisterError, ReceiptError
from cloister.mpc.crypto.agreement import Identity, check_signature
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.net.receipts import Entry, Receipt
from cloister.session import SIGNED

HEADER = {
    "study": "three-hospitals",
    "party": "basel",
    "parameters": {"n_bins": 51, "layer": None, "weights": [1, 2.5]},
    "reveals": "coordinator : Σ, and who took part",
}
ME = Identity.create(Entropy())


def entry(i=0, **changes):
    fields = {"kind": "sent", "protocol": "secure_sum", "line": f"L{i}", "name": "secure_sum.Keys", "to": "hub"}
    return Entry(**(fields | {"bytes": 100 + i, "sha256": f"{i:064x}"} | changes))


def receipt(n=5):
    made = Receipt(HEADER)
    for i in range(n):
        made.add(entry(i))
    made.add(Entry("opened", "secure_sum", "L10", "sum of 3 vectors", "hub", 0, ""))
    made.close("done", lambda head: (ME.public, ME.sign(SIGNED, head)))
    return made


def verify(found):
    found.check(lambda public, head, signature: check_signature(public, SIGNED, head, signature))


def altered(tmp_path, change):
    """Save a receipt, change the JSON, read it back and check it."""
    path = receipt().save(tmp_path / "receipt.json")
    raw = json.loads(path.read_text())
    before = copy.deepcopy(raw)
    change(raw)
    assert raw != before, "the change must change something"
    path.write_text(json.dumps(raw))
    verify(Receipt.load(path))


def test_a_receipt_that_nobody_touched_is_good(tmp_path):
    made = receipt()
    verify(made)
    found = Receipt.load(made.save(tmp_path / "deep" / "receipt.json"))
    verify(found)
    assert found.to_json() == made.to_json()
    assert (found.head, found.status, found.header) == (made.head, "done", made.header)
    assert found.brief() == made.brief()


def test_the_file_is_for_the_owner_only_and_whole(tmp_path):
    path = tmp_path / "receipt.json"
    receipt().save(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [p.name for p in tmp_path.iterdir()] == ["receipt.json"]
    receipt(2).save(path)
    assert len(json.loads(path.read_text())["entries"]) == 4


FIELDS = ["kind", "protocol", "line", "name", "to", "bytes", "sha256", "scope", "hash"]


@pytest.mark.parametrize("at", [0, 2, 5, 6])
@pytest.mark.parametrize("field", FIELDS)
def test_an_altered_entry_is_detected(tmp_path, at, field):
    def change(raw):
        row = raw["entries"][at]
        row[field] = row[field] + 1 if field == "bytes" else row[field][:-1] + ("0" if row[field][-1:] != "0" else "1")

    with pytest.raises(ReceiptError, match=f"entry {at}"):
        altered(tmp_path, change)


def swap(raw):
    raw["entries"][1], raw["entries"][2] = raw["entries"][2], raw["entries"][1]


def relink(raw):
    """Drop an entry and make the chain fit again: only the signature tells."""
    made = Receipt({k: v for k, v in raw["header"].items() if k != "format"})
    for row in raw["entries"][1:]:
        made.add(Entry(**{k: row[k] for k in FIELDS[:-1]}))
    raw |= {"entries": made.to_json()["entries"], "head": made.head}


def forge(raw):
    relink(raw)
    raw["public"] = Identity.create(Entropy()).public.hex()


CHANGES = {
    "an entry removed in the middle": lambda raw: raw["entries"].pop(2),
    "the first entry removed": lambda raw: raw["entries"].pop(0),
    "the last entry removed": lambda raw: raw["entries"].pop(),
    "the last entry removed and the head set back": lambda raw: raw.update(
        entries=raw["entries"][:-1], head=raw["entries"][-2]["hash"]
    ),
    "no entries": lambda raw: raw.update(entries=[]),
    "an entry added": lambda raw: raw["entries"].insert(2, dict(raw["entries"][2])),
    "an entry added at the end": lambda raw: raw["entries"].append(dict(raw["entries"][-1])),
    "two entries swapped": swap,
    "a field added to an entry": lambda raw: raw["entries"][1].update(note="by the way"),
    "a field added to the file": lambda raw: raw.update(note="by the way"),
    "another header": lambda raw: raw["header"].update(party="lugano"),
    "more header": lambda raw: raw["header"].update(more=1),
    "less header": lambda raw: raw["header"].pop("reveals"),
    "other parameters": lambda raw: raw["header"]["parameters"].update(n_bins=3),
    "a header that is not text": lambda raw: raw["header"].update(party="\ud800"),
    "an entry that is not text": lambda raw: raw["entries"][1].update(name="\ud800"),
    "the head": lambda raw: raw.update(head="0" * 64),
    "no head": lambda raw: raw.update(head=""),
    "the outcome": lambda raw: raw.update(status="aborted: x"),
    "the outcome set back": lambda raw: raw.update(status="running"),
    "the signature": lambda raw: raw.update(signature="00" * 64),
    "a short signature": lambda raw: raw.update(signature=raw["signature"][:-2]),
    "a signature that is not a number": lambda raw: raw.update(signature="no"),
    "no signature": lambda raw: raw.pop("signature"),
    "no public key": lambda raw: raw.pop("public"),
    "neither": lambda raw: (raw.pop("public"), raw.pop("signature")),
    "another public key": lambda raw: raw.update(public=Identity.create(Entropy()).public.hex()),
    "a whole chain made anew": relink,
    "a chain made anew under another key, not signed": forge,
    "another format": lambda raw: raw["header"].update(format="cloister-receipt/9"),
}


@pytest.mark.parametrize("what", CHANGES)
def test_every_other_change_is_detected(tmp_path, what):
    with pytest.raises(CloisterError) as e:
        altered(tmp_path, CHANGES[what])
    assert isinstance(e.value, ReceiptError) or e.value.code == "bad-signature"


def test_the_chain_alone_notices_what_needs_no_signature(tmp_path):
    for what in ("an entry added", "two entries swapped", "another header", "the outcome set back"):
        path = receipt().save(tmp_path / "receipt.json")
        raw = json.loads(path.read_text())
        CHANGES[what](raw)
        path.write_text(json.dumps(raw))
        with pytest.raises(ReceiptError):
            Receipt.load(path).check()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "3",
        "null",
        "[" * 9999,
        '{"header": {}}',
        '{"header": 1, "head": "", "status": "", "entries": []}',
        '{"header": {}, "head": "", "status": "", "entries": [1]}',
        '{"header": {}, "head": "", "entries": []}',
    ],
)
def test_a_file_that_is_no_receipt(tmp_path, text):
    path = tmp_path / "receipt.json"
    path.write_text(text)
    with pytest.raises(ReceiptError, match="receipt"):
        Receipt.load(path)
    with pytest.raises(ReceiptError):
        Receipt.load(tmp_path / "missing.json")


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_one_letter_changed_is_detected(data, tmp_path_factory):
    path = receipt(3).save(tmp_path_factory.mktemp("r") / "receipt.json")
    text = path.read_text()
    at = data.draw(st.integers(0, len(text) - 1))
    letter = data.draw(st.sampled_from("0123456789abcxyz,:{}[] \"'"))
    path.write_text(text[:at] + letter + text[at + 1 :])
    try:
        found = Receipt.load(path)
        verify(found)
    except CloisterError:
        return
    assert found.to_json() == json.loads(text)  # a space for a space, an "a" for the same "a"


def test_an_open_receipt_is_running_and_a_closed_one_stays_closed():
    made = Receipt(HEADER)
    made.check()
    made.add(entry())
    made.check()
    assert made.status == "running"
    made.close("aborted: secure_sum L5 timeout")
    made.close("done")
    assert made.status == "aborted: secure_sum L5 timeout"
    assert [e.name for e, _ in made.entries if e.kind == "result"] == [made.status]
    made.check()
    with pytest.raises(ReceiptError, match="not signed"):
        verify(made)


def test_the_chain_is_as_the_docstring_says():
    made = receipt(1)
    link = hashlib.sha256(json.dumps(made.header, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode())
    row = {k: v for k, v in made.to_json()["entries"][0].items() if k != "hash"}
    text = json.dumps(row, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    assert made.entries[0][1] == hashlib.sha256(link.digest() + text).hexdigest()


@pytest.mark.parametrize("text", ["", "Zürich \u2028", 'a "quoted" \\ word', "\x00\n\t\x7f"])
def test_an_entry_is_hashed_as_json_whatever_its_text(text):
    made = Receipt(HEADER)
    before = made.head
    made.add(Entry("opened", text, "L1", f"sum {text}", text, 12, "", scope=text))
    row = {k: v for k, v in made.to_json()["entries"][0].items() if k != "hash"}
    whole = json.dumps(row, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    assert made.head == hashlib.sha256(bytes.fromhex(before) + whole).hexdigest()


@pytest.mark.parametrize("size", ['1,"kind":"sent"', True, 1.0, None])
def test_a_size_that_is_no_whole_number_passes_for_no_other_entry(size):
    with pytest.raises(TypeError):
        Receipt(HEADER).add(entry(bytes=size))


def test_brief_is_json_and_sums_up_per_message():
    made = Receipt(HEADER)
    for i in range(1000):
        made.add(entry(line="L3", bytes=i))
    made.add(entry(line="L3", to="vienna"))
    brief = json.loads(made.brief())
    assert brief["entries"] == 1001
    assert [(r["to"], r["count"], r["bytes"]) for r in brief["summary"]] == [
        ("hub", 1000, 499_500),
        ("vienna", 1, 100),
    ]
    assert (brief["head"], brief["status"], brief["study"]) == (made.head, "running", "three-hospitals")
    assert len(made.brief()) < 2000


def test_entries_have_no_place_for_a_payload():
    assert list(Entry.__dataclass_fields__) == FIELDS[:-1]
    with pytest.raises(AttributeError):
        entry().name = "other"


def test_adding_from_many_threads_keeps_the_chain():
    made = Receipt(HEADER)

    def add():
        for i in range(200):
            made.add(entry(i))

    threads = [threading.Thread(target=add) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(made.entries) == 1600
    made.check()


def test_very_many_messages_cost_half_a_kilobyte_each():
    made = Receipt(HEADER)
    tracemalloc.start()
    try:
        for i in range(5000):
            made.add(entry(line="L3", sha256=f"{i:064x}"))
        assert tracemalloc.get_traced_memory()[0] / 5000 < 512
    finally:
        tracemalloc.stop()
