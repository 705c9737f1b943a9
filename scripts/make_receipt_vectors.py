"""Receipts for other implementations, in tests/vectors/receipts: valid ones, and invalid ones with what is wrong.

    python scripts/make_receipt_vectors.py

`index.json` names each file, whether it is valid, and why not. The keys are fixed and only for these files. Ed25519
signatures are deterministic, so the files are the same at every run. docs/security/receipts.md describes the format.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cloister.mpc.crypto.agreement import Identity
from cloister.mpc.net.receipts import Entry, Receipt, _link
from cloister.session import SIGNED
from cloister.testing import fixed_entropy

FOLDER = Path(__file__).parents[1] / "tests" / "vectors" / "receipts"
KEYS = fixed_entropy("receipt vectors")
ME, OTHER = (Identity.create(KEYS(name)) for name in ("basel", "lugano"))
HEADER = {
    "study": "three-hospitals",
    "study_digest": "11" * 32,
    "party": "basel",
    "role": "site",
    "workflow": "bin-values",
    "mode": "hardened",
    "version": "1.0.0rc1",
    "parameters": {"n_bins": 51},
    "parties": {"hub": "coordinator", "basel": "site", "lugano": "site"},
    "started": "2026-11-19T00:00:00Z",
}


def receipt(header: dict[str, Any], entries: list[Entry], status: str = "done") -> dict[str, Any]:
    made = Receipt(header)
    for entry in entries:
        made.add(entry)
    made.close(status, lambda head: (ME.public, ME.sign(SIGNED, head)))
    return made.to_json()


def some(n: int = 3) -> list[Entry]:
    rows = [
        Entry("sent", "secure_sum", f"L{i}", "secure_sum.Keys", "hub", 100 + i, f"{i:064x}", "sum") for i in range(n)
    ]
    return [*rows, Entry("opened", "secure_sum", "L10", "sum of 3 vectors", "hub", 0, "")]


def valid() -> dict[str, dict[str, Any]]:
    numbers = {"one": 1.0, "large": 1e16, "larger": 1e21, "small": 1e-7, "least": 5e-324, "zero": -0.0, "n": 2**53 - 1}
    texts = {"é": "e\u0301", "\U0001d518": "beyond the plane", "\ufb33": "in it", "\u2028": '"\\/\b\f\n\r\t\u0001\x7f'}
    return {
        "plain": receipt(HEADER, some()),
        "no-messages": receipt(HEADER, []),
        "aborted": receipt(HEADER, some(1), "aborted: secure_sum L4 silent"),
        "numbers": receipt(HEADER | {"parameters": numbers}, some(1)),
        "texts": receipt(
            HEADER | {"parameters": texts}, [Entry("ran", "é", "", "coordinator : Σ\n", "", 0, "", "\U0001d518")]
        ),
        "nested": receipt(
            HEADER | {"parameters": {"b": [[], {}, [None, True, {"z": 1, "a": [0.1]}]], "a": ""}}, some(1)
        ),
    }


def rechained(raw: dict[str, Any]) -> None:
    """Recompute all hashes, as whoever alters a receipt but lacks the key would."""
    made = Receipt({k: v for k, v in raw["header"].items() if k != "format"})
    head = made.head
    for row in raw["entries"]:
        head = row["hash"] = _link(head, Entry(**{k: row[k] for k in Entry.__dataclass_fields__}))
    raw["head"] = head


def invalid() -> dict[str, tuple[str, str]]:
    """Name → (what is wrong, text of the file)."""
    found: dict[str, tuple[str, str]] = {}

    def change(name: str, why: str, do: Callable[[dict[str, Any]], Any], *, chain: bool = False) -> None:
        raw = receipt(HEADER, some())
        before = json.dumps(raw)
        raw = do(raw) or raw
        if chain:
            rechained(raw)
        assert json.dumps(raw) != before, name
        found[name] = (why, json.dumps(raw, indent=1) + "\n")

    def edit(name: str, why: str, key: str, value: Any, *, chain: bool = False) -> None:
        """Set a field of the file, or `header.KEY`, or `0.KEY` of an entry."""

        def do(raw: dict[str, Any]) -> None:
            where, _, last = key.rpartition(".")
            place = raw["entries"][int(where)] if where.isdigit() else raw[where] if where else raw
            place[last] = value

        change(name, why, do, chain=chain)

    fields = {"kind": "received", "protocol": "x", "line": "L99", "name": "x", "to": "lugano", "bytes": 5}
    for field, value in (fields | {"sha256": "ff" * 32, "scope": "other", "hash": "00" * 32}).items():
        edit(f"entry-{field}", f"an entry's {field} was changed", f"1.{field}", value)
    change("entry-removed", "an entry was removed", lambda r: r["entries"].pop(1) and None)
    change("entry-added", "an entry was added twice", lambda r: r["entries"].insert(1, dict(r["entries"][1])))
    change("entries-swapped", "two entries were exchanged", lambda r: r["entries"].insert(0, r["entries"].pop(1)))
    change("end-removed", "the last entry was removed", lambda r: r["entries"].pop() and None)
    edit("rechained", "an entry was changed and all hashes computed again", "0.bytes", 1, chain=True)
    edit("header", "the header was changed", "header.mode", "published")
    edit("header-rechained", "the header was changed and all hashes computed again", "header.mode", "plain", chain=True)
    edit("format", "the format is unknown", "header.format", "cloister-receipt/9")
    edit("status", "the outcome is not the one in the chain", "status", "aborted")
    edit("head", "the last hash was changed", "head", "00" * 32)
    change("unsigned", "the signature is missing", lambda r: {k: r[k] for k in ("header", "head", "status", "entries")})
    edit("signature", "the signature was changed", "signature", "00" * 64)
    edit("signature-short", "the signature is too short", "signature", "00" * 63)
    edit("key", "the public key is another one", "public", OTHER.public.hex())
    head = bytes.fromhex(receipt(HEADER, some())["head"])
    edit("context", "signed for another purpose", "signature", ME.sign("study", head).hex())
    edit("field", "a field that no receipt has", "note", "approved")
    edit("entry-field", "an entry has a field that no receipt has", "0.note", "x")
    change("entry-missing", "an entry lacks a field", lambda r: r["entries"][0].pop("scope") and None)
    edit("size-negative", "a negative size", "0.bytes", -1)
    edit("size-fraction", "a size that is not a whole number", "0.bytes", 100.0)
    edit("size-true", "a size that is not a number", "0.bytes", True)  # noqa: FBT003
    edit("size-large", "a size beyond 2^53 - 1", "0.bytes", 2**53)
    edit("header-large", "a number beyond 2^53 - 1", "header.parameters", {"n_bins": 2**53})
    edit("header-surrogate", "half a surrogate pair", "header.study", "\ud800")
    edit("header-list", "a header that is not an object", "header", [])
    whole = json.dumps(receipt(HEADER, some()), indent=1) + "\n"
    found["unfinished"] = ("the run has not ended", json.dumps(unfinished(), indent=1) + "\n")
    found["repeated-key"] = (
        "a key is repeated",
        whole.replace('"mode": "hardened"', '"mode": "published",\n  "mode": "hardened"'),
    )
    found["repeated-head"] = ("a key is repeated", whole.replace('"head":', '"head": "00",\n "head":'))
    found["infinite"] = ("a number that is not JSON", whole.replace('"n_bins": 51', '"n_bins": Infinity'))
    found["overflow"] = ("a number that is too large", whole.replace('"n_bins": 51', '"n_bins": 1e999'))
    found["cut"] = ("the file was cut off", whole[: len(whole) // 2])
    found["behind"] = ("text behind the end", whole + "{}")
    found["empty"] = ("an empty file", "")
    return found


def unfinished() -> dict[str, Any]:
    made = Receipt(HEADER)
    for entry in some():
        made.add(entry)
    return made.to_json() | {"public": ME.public.hex(), "signature": ME.sign(SIGNED, bytes.fromhex(made.head)).hex()}


def files() -> dict[str, str]:
    made, index = {}, []
    for name, raw in valid().items():
        made[f"valid-{name}.json"] = json.dumps(raw, indent=1) + "\n"
        index.append({"file": f"valid-{name}.json", "valid": True})
    for name, (why, text) in invalid().items():
        made[f"invalid-{name}.json"] = text
        index.append({"file": f"invalid-{name}.json", "valid": False, "reason": why})
    made["index.json"] = json.dumps({"public": ME.public.hex(), "receipts": index}, indent=1) + "\n"
    return made


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, text in files().items():
        (FOLDER / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
