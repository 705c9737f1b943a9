"""History: every decision about the studies of a kit, in the order in which they were made (`local/decisions.jsonl`).

    {"when": "2026-01-31T09:12:44Z", "what": "approved", "by": "Dr. A. Muster", "user": "cloister", "how": "page",
     "study": "three-hospitals", "digest": "2ebf…", "on": "430 cells, …", "previous": "9c1f…"}

`approvals.json` holds what counts now, this file what was decided before. Each line contains the SHA-256 of the line
before it, so that a line that was changed or removed in between is noticed. Who can write the file can write all of it
anew; a signed receipt names the approval that its run rested on.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cloister import files

FILE = "decisions.jsonl"  # in `local`
FIRST = "0" * 64
VIA = "CLOISTER_VIA"  # how a command came to be given, if not by hand
MOST = 1 << 24  # bytes that are read


@dataclass(frozen=True)
class Decision:
    when: str
    what: str  # approved, refused, withdrawn
    by: str
    user: str
    how: str
    study: str
    digest: str
    on: str = ""


@dataclass(frozen=True)
class History:
    """The decisions, oldest first, and whether the file is whole."""

    decisions: list[Decision]
    whole: bool


def record(path: Path, decision: Mapping[str, str]) -> None:
    """Add a decision at the end; raises `OSError` if it cannot be kept."""
    with files.locked(path, wait=10.0):
        last = _lines(path)[-1:] or [b""]
        previous = hashlib.sha256(last[0]).hexdigest() if last[0] else FIRST
        line = json.dumps({**decision, "previous": previous}).encode() + b"\n"
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
        try:
            os.write(fd, line)
            os.fsync(fd)
        finally:
            os.close(fd)


def history(path: Path) -> History:
    """What was decided so far; never raises for what the file contains."""
    found, previous, whole = list[Decision](), FIRST, True
    for line in _lines(path):
        try:
            raw = json.loads(line)
            whole = whole and raw.pop("previous") == previous
            found.append(Decision(**{str(k): str(v) for k, v in raw.items()}))
        except (ValueError, TypeError, KeyError, AttributeError):
            whole = False
        previous = hashlib.sha256(line).hexdigest()
    return History(found, whole)


def _lines(path: Path) -> list[bytes]:
    try:
        with open(path, "rb") as f:
            return f.read(MOST).splitlines()
    except FileNotFoundError:
        return []
