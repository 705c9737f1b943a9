"""Receipts: what left and what reached this party, and what was opened, in a chain that shows any later change.

Every frame that is sent or received and every value that is opened appends an entry; entry i carries

    hash_i = SHA-256(hash_{i-1} ‖ entry_i)          hash_{-1} = SHA-256(header)

Header and entries are hashed as canonical JSON (RFC 8785), so any language can verify a receipt. The format is on the
page docs/security/receipts.md, and verifiers/receipt.mjs is an independent verifier. Format 2 hashed the header in
Python's own notation of numbers; receipts of that format still verify here.

The last entries name the protocols that ran, each with its `Reveals`, and how the run ended; the party signs the last
hash with its own key. The file on disk (`receipt.json`) keeps every entry; people, and
`adata.uns["cloister"]`, get the entries summed up per message name. Pulses and farewells, which say only that a party
is there or done, are not listed.

Entries hold no value, but the hash of every frame: whoever is shown the whole file can check a guess at what travelled
in the clear (names of genes or labels, numbers of rows). Frames with a key, a mask or a ciphertext cannot be guessed.

Where a run leaves the building, every entry is in a journal on disk before its message leaves (journal.py); `load`
reads that, too.

A broadcast has one more entry ("told"), with a hash of its content that is the same at all who were told the same.
`compare` puts the receipts of two parties side by side and names the first message in which they differ.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rfc8785

from cloister.errors import ReceiptError
from cloister.files import replacing
from cloister.mpc.net.journal import SUFFIX, Journal, read_journal, unique_keys

FORMAT = "cloister-receipt/3"
FORMAT_2 = "cloister-receipt/2"  # read and verified, no longer written
LARGEST = 2**53 - 1  # of the whole numbers that every reader of JSON has exactly
UNDECLARED = "not among the protocols that are declared for this mode; see its file"
AT_HOME = ("used", "contributed", "spent", "written", "ran", "result")  # entries about what does not travel
PARTS = {"header", "entries", "head", "status", "public", "signature"}  # of the file


@dataclass(frozen=True, slots=True)
class Entry:
    kind: str  # "sent" | "received" | "told" | "opened", or one of `AT_HOME`
    protocol: str
    line: str
    name: str  # of the message; what was opened, which cells were used, what a protocol reveals, how it all ended, ...
    to: str  # the other party: whom it went to, or whom it came from
    bytes: int
    sha256: str  # of the frame, or of what was told; empty for what does not travel
    scope: str = ""  # of a message: the path of its sub-protocol


def _first_hash(header: Mapping[str, Any]) -> str:
    """Hash of the header, which every entry builds on."""
    if header.get("format") == FORMAT_2:
        text = json.dumps(header, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    else:
        text = rfc8785.dumps(dict(header))
    return hashlib.sha256(text).hexdigest()


def _portable(x: Any) -> Any:
    """The same value in JSON types; numbers that JSON does not carry exactly become text."""
    if isinstance(x, Mapping):
        return {str(key): _portable(value) for key, value in x.items()}
    if isinstance(x, list | tuple):
        return [_portable(value) for value in x]
    if isinstance(x, int) and not -LARGEST <= x <= LARGEST:
        return str(x)
    if isinstance(x, float) and not math.isfinite(x):
        return str(x)
    return str(x) if isinstance(x, str) else x


def _row(e: Entry) -> dict[str, Any]:
    return {
        "kind": e.kind,
        "protocol": e.protocol,
        "line": e.line,
        "name": e.name,
        "to": e.to,
        "bytes": e.bytes,
        "sha256": e.sha256,
        "scope": e.scope,
    }


def _link(previous: str, e: Entry) -> str:
    if type(e.bytes) is not int or not 0 <= e.bytes <= LARGEST:
        raise TypeError(f"a size must be a whole number from 0 to {LARGEST}")
    texts = map(_quoted, (e.kind, e.line, e.name, e.protocol, e.scope, e.sha256, e.to))
    row = _ROW % (e.bytes, *texts)  # equal to rfc8785.dumps(_row(e)), at a fraction of its time
    return hashlib.sha256(bytes.fromhex(previous) + row.encode()).hexdigest()


_ROW = '{"bytes":%d,"kind":%s,"line":%s,"name":%s,"protocol":%s,"scope":%s,"sha256":%s,"to":%s}'
_SIZES = re.compile(r" \| (cells|donors) (\d+)")  # in the name of a contribution
_quoted = json.JSONEncoder(ensure_ascii=False).encode


class Receipt:
    """The record of one party in one run. Thread-safe; entries can be added, never changed."""

    def __init__(self, header: dict[str, Any], journal: Journal | None = None) -> None:
        self.header: dict[str, Any] = _portable({"format": FORMAT, **header})
        self.entries: list[tuple[Entry, str]] = []
        self.head = _first_hash(self.header)
        self.status = "running"
        self.signature: dict[str, str] = {}
        self._lock, self._journal = threading.Lock(), journal
        if journal is not None:
            journal.write({"header": self.header}, sync=True)

    def add(self, entry: Entry) -> None:
        """Add an entry; where there is a journal, one of a message is on disk when this returns, or it raises."""
        with self._lock:
            head = _link(self.head, entry)
            if self._journal is not None:
                self._journal.write({**_row(entry), "hash": head}, sync=entry.kind == "sent")
            self.head = head
            self.entries.append((entry, head))

    @property
    def protocols(self) -> tuple[str, ...]:
        """The protocols under whose name something travelled or was opened here, in the order of their first entry."""
        entries = [e for e, _ in self.entries if e.kind not in AT_HOME]
        return tuple(dict.fromkeys(e.protocol for e in entries if not e.name.startswith("channel.")))

    def add_reveals(self, ran: Iterable[str], declared: Mapping[str, str]) -> None:
        """Enter every protocol that ran, with its `Reveals`: the declared ones in the order of their declaration."""
        ran = dict.fromkeys(ran)
        for protocol in (*(p for p in declared if p in ran), *(p for p in ran if p not in declared)):
            self.add(Entry("ran", protocol, "", declared.get(protocol, UNDECLARED), "", 0, ""))

    @property
    def reveals(self) -> dict[str, str]:
        """Protocol that ran → what it reveals, in its own words; the mode's own first."""
        return {e.protocol: e.name for e, _ in self.entries if e.kind == "ran"}

    @property
    def smallest_group(self) -> dict[str, int]:
        """Smallest number of this site's own `cells` and `donors` behind any number it added to an opened sum."""
        return smallest_group(e.name for e, _ in list(self.entries) if e.kind == "contributed")

    def close(self, status: str, sign: Callable[[bytes], tuple[bytes, bytes]] | None = None) -> None:
        """End the record with what became of the run; `sign` maps the last hash to (public key, signature)."""
        if self.status != "running":
            return
        self.add(Entry("result", "", "", status, "", 0, ""))
        self.status = status
        if sign is not None:
            public, signature = sign(bytes.fromhex(self.head))
            self.signature = {"public": public.hex(), "signature": signature.hex()}
        if self._journal is not None:
            self._journal.write(self.signature, sync=True)
            self._journal.close()

    def __repr__(self) -> str:
        rows = self.summary()
        sent, opened = ([r for r in rows if r["kind"] == kind] for kind in ("sent", "opened"))
        traffic = f"{sum(r['count'] for r in sent)} messages, {sum(r['bytes'] for r in sent)} bytes sent"
        return (
            f"<Receipt of {self.header.get('party', '?')}: {traffic}, {sum(r['count'] for r in opened)} values opened>"
        )

    def summary(self) -> list[dict[str, Any]]:
        """One row per (kind, message, line, recipient): how many, how many bytes."""
        rows: dict[tuple[str, ...], dict[str, Any]] = {}
        for e, _ in list(self.entries):
            if e.kind == "ran":
                continue
            key = (e.kind, e.protocol, e.line, e.name, e.to)
            row = rows.setdefault(
                key, dict(zip(("kind", "protocol", "line", "name", "to"), key, strict=True), count=0, bytes=0)
            )
            row["count"] += 1
            row["bytes"] += e.bytes
        return list(rows.values())

    def brief(self) -> str:
        """One JSON string for `adata.uns`: everything but the single entries."""
        return json.dumps(
            {
                **self.header,
                "status": self.status,
                "reveals": self.reveals,
                "summary": self.summary(),
                **({"smallest_group": smallest} if (smallest := self.smallest_group) else {}),
                "entries": len(self.entries),
                "head": self.head,
                **self.signature,
            },
            sort_keys=True,
        )

    def to_json(self) -> dict[str, Any]:
        rows = [{**_row(e), "hash": h} for e, h in self.entries]
        return {**self._outside(), "entries": rows}

    def _outside(self) -> dict[str, Any]:
        return {"header": self.header, "head": self.head, "status": self.status, **self.signature}

    def save(self, path: str | Path) -> Path:
        """Write `to_json` for the owner's eyes only, one entry a line; the file appears whole or not at all."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as part, part.open("w", encoding="utf-8") as f:
            f.write(json.dumps(self._outside(), indent=1)[:-2] + ',\n "entries": [')
            comma = "\n  "
            for entry, link in list(self.entries):
                f.write(comma + json.dumps({**_row(entry), "hash": link}))
                comma = ",\n  "
            f.write("\n ]\n}\n")
        return path

    @classmethod
    def load(cls, path: str | Path) -> Receipt:
        """Read a receipt without judging it; `check` does that."""
        try:
            path = Path(path)
            if path.name.endswith(SUFFIX):
                raw = _of_journal(path)
            else:
                raw = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=unique_keys)
            receipt = cls.__new__(cls)
            receipt.header, receipt.head, receipt.status = {**raw["header"]}, str(raw["head"]), str(raw["status"])
            fields = Entry.__dataclass_fields__
            receipt.entries = [(Entry(**{k: r[k] for k in fields}), str(r["hash"])) for r in raw["entries"]]
            receipt.signature = {k: str(raw[k]) for k in ("public", "signature") if k in raw}
            receipt._lock, receipt._journal = threading.Lock(), None
            whole = set(raw) <= PARTS and all(len(r) == len(fields) + 1 for r in raw["entries"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
            raise ReceiptError(f"{path} is not a Cloister receipt ({type(e).__name__}); give a receipt.json") from None
        if not whole:
            raise ReceiptError(f"{path} was altered: it holds fields that no receipt has")
        if receipt.header.get("format") not in (FORMAT, FORMAT_2):
            raise ReceiptError(f"{path} is a receipt of another format; this version reads {FORMAT_2} and {FORMAT}")
        return receipt

    def check(self, check_signature: Callable[[bytes, bytes, bytes], None] | None = None) -> None:
        """Raise `ReceiptError` at the first entry that does not follow from the one before.

        `check_signature(public, head, signature)` raises if the last hash was not signed by that key.
        """
        try:
            previous = _first_hash(self.header)
        except (ValueError, TypeError, RecursionError):
            raise ReceiptError("the header was altered: it is not text") from None
        for i, (entry, claimed) in enumerate(self.entries):
            try:
                previous = _link(previous, entry)
            except (ValueError, TypeError):
                previous = ""
            if previous != claimed:
                raise ReceiptError(f"entry {i} ({entry.name!r}) was altered, or one before it was added or removed")
        if previous != self.head:
            raise ReceiptError("the last hash does not belong to these entries: entries were added or removed")
        last = self.entries[-1][0] if self.entries else None
        if self.status != (last.name if last is not None and last.kind == "result" else "running"):
            raise ReceiptError("the outcome was altered: it is not the one the chain ends with")
        if check_signature is not None:
            if not self.signature:
                raise ReceiptError("the receipt is not signed")
            try:
                public, signature = (bytes.fromhex(self.signature[k]) for k in ("public", "signature"))
            except (KeyError, ValueError):
                raise ReceiptError("the receipt's signature is damaged") from None
            check_signature(public, bytes.fromhex(self.head), signature)


def smallest_group(contributions: Iterable[str]) -> dict[str, int]:
    """The smallest sizes that entries of contributions name."""
    smallest: dict[str, int] = {}
    for text in contributions:
        for name, size in _SIZES.findall(text):
            smallest[name] = min(int(size), smallest.get(name, int(size)))
    return smallest


def _of_journal(path: Path) -> dict[str, Any]:
    """A journal in the form of the file that `save` writes; one without an end is of a run that did not come to it."""
    first, *rows = read_journal(path)
    entries = [row for row in rows if "hash" in row]
    signature = rows[-1] if rows and "signature" in rows[-1] else {}
    header = dict(first["header"])
    head = entries[-1]["hash"] if entries else _first_hash(header)
    ended = entries[-1]["name"] if entries and entries[-1]["kind"] == "result" else "running"
    return {"header": header, "head": head, "status": ended, **signature, "entries": entries}


# ---- two receipts side by side ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Comparison:
    told: int  # broadcasts that both parties were told
    exchanged: int  # messages between the two
    unread: int  # of these, sent by one and never read by the other


def compare(a: Receipt, b: Receipt) -> Comparison:
    """Raise `ReceiptError` at the first message that the receipts of two parties of one run tell differently.

    Broadcasts are matched by scope, name and number, messages between the two by scope and number. A difference is
    named with who told it; the receipt of that party says which of the two is right.
    """
    us, them = (str(r.header.get("party", "?")) for r in (a, b))
    if us == them:
        raise ReceiptError(f"both receipts are of '{us}'; give those of two parties")
    if a.header.get("study_digest") != b.header.get("study_digest"):
        raise ReceiptError("the receipts are of two different studies")
    theirs = _told(b)
    matched = 0
    for key, entry in _told(a).items():
        other = theirs.get(key)
        if other is None:
            continue
        if (entry.to, entry.sha256) != (other.to, other.sha256):
            if entry.name == "channel.Welcome":
                raise ReceiptError(f"the receipts of '{us}' and '{them}' are of two different runs")
            raise ReceiptError(
                f"{entry.protocol} {entry.line}: '{us}' and '{them}' received different broadcasts from '{entry.to}' "
                f"({entry.name}, number {key[2] + 1} in {entry.scope})"
            )
        matched += 1
    if not matched:
        raise ReceiptError("the two parties received no common broadcast: the receipts are not of one run")
    ways = [_matched(a, b, us, them), _matched(b, a, them, us)]
    return Comparison(matched, *(sum(counts) for counts in zip(*ways, strict=True)))


def _told(receipt: Receipt) -> dict[tuple[str, str, int], Entry]:
    """Scope, name and number → broadcast, in the order in which they were told."""
    count: dict[tuple[str, str], int] = {}
    rows: dict[tuple[str, str, int], Entry] = {}
    for entry, _ in receipt.entries:
        if entry.kind == "told":
            at = count.get((entry.scope, entry.name), 0)
            count[entry.scope, entry.name] = at + 1
            rows[entry.scope, entry.name, at] = entry
    return rows


def _matched(sender: Receipt, receiver: Receipt, us: str, them: str) -> tuple[int, int]:
    """Messages that both receipts know, and those that were sent and not read; in each scope they come in order."""
    sent: dict[str, list[Entry]] = {}
    for entry, _ in sender.entries:
        if entry.kind == "sent" and entry.to == them and entry.name != "channel.Abort":
            sent.setdefault(entry.scope, []).append(entry)
    read: dict[str, int] = {}
    for entry, _ in receiver.entries:
        if entry.kind != "received" or entry.to != us:
            continue
        at = read[entry.scope] = read.get(entry.scope, -1) + 1
        known = sent.get(entry.scope, [])
        if at >= len(known) or known[at].sha256 != entry.sha256:
            raise ReceiptError(
                f"{entry.protocol} {entry.line}: '{them}' received another {entry.name} from '{us}' than '{us}' sent "
                f"(number {at + 1} in {entry.scope})"
            )
    total, seen = sum(map(len, sent.values())), sum(at + 1 for at in read.values())
    return total, total - seen
