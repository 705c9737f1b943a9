"""Approval: who allowed which study on which cells, and when. `local/approvals.json` keeps it, one entry for a study.

    {"5c1f…": {"study": "three-hospitals", "by": "Dr. A. Muster", "user": "cloister", "when": "2026-01-31T09:12:44Z",
               "data": {"cells": 430, "donors": 12, "genes": 1767, "matrix": "9f2c…", "read": "77aa…"},
               "terms": {"consent": [], "limits": {"study": 20}, "floors": {"min_cells": 10}, "file": "/srv/c.h5ad"}}}

`local/site.toml` says what may run; this says on what, and `decisions.jsonl` what was decided before. A run on other
cells, of a study without an entry, or of one whose approval was withdrawn, is refused. The entry goes into the
receipt of every run, which the site signs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import pwd
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cloister import files, governance
from cloister.cells.fingerprint import Fingerprint
from cloister.deploy.approval.history import FILE as LOG
from cloister.deploy.approval.history import VIA, History, history, record
from cloister.errors import DataError, ParameterError, ProtocolAbort, RefusedError, UsageError
from cloister.study import Study

FILE = "approvals.json"  # in `local`


class Refusal(RefusedError, ProtocolAbort):
    """A party's policy says no: a `RefusedError` at home, an abort with code `refused` for everyone else."""

    def __init__(self, detail: str) -> None:
        ProtocolAbort.__init__(self, "policy", "-", "refused", detail)


@dataclass(frozen=True)
class Approval:
    """One study, allowed by somebody on these cells."""

    study: str  # its name; the file has it by its digest
    by: str  # who says to have looked
    user: str  # who was logged in
    when: str
    data: Fingerprint | None = None  # None at an auxiliary, which has no cells
    cost: Mapping[str, float] = field(default_factory=dict)  # what one run takes of the budget (budget.py)
    stamp: tuple[Any, ...] = ()  # of a large file, by which it is known without reading it again
    withdrawn: str = ""  # when, and by whom
    refused: bool = False  # whether that was all: it had not been allowed before
    small_change: bool = False  # whether the cells may differ from those of earlier runs in only a few
    machine: str = ""  # where that was; an approval that came with a kit is not one of this machine
    terms: Mapping[str, Any] = field(default_factory=dict)  # consents, limits, thresholds and file as they were then

    @property
    def made_here(self) -> bool:
        """Whether it was recorded on this machine, as far as that can be known."""
        here = this_machine()
        return not here or self.machine == here

    @property
    def record(self) -> dict[str, Any]:
        """What a receipt says about it."""
        data = dataclasses.asdict(self.data) if self.data is not None else None
        allowed: dict[str, Any] = {"small_change": True} if self.small_change else {}
        allowed |= {"terms": dict(self.terms)} if self.terms else {}
        return {"by": self.by, "user": self.user, "when": self.when, **({"data": data} if data else {}), **allowed}


@dataclass(frozen=True)
class Approvals:
    """The approvals of one kit, as they are on disk now."""

    path: Path
    me: str
    via: str = ""  # how decisions come, for the history

    def entry(self, study: Study) -> Approval | None:
        return self._load().get(study.digest.hex())

    def current(self, study: Study) -> Approval:
        """The approval that a run of the study rests on, or the `Refusal` that says why there is none."""
        if governance.expired(study.governance):
            raise Refusal(f"the study '{study.name}' ended on {study.governance['expires']}; agree on a new one")
        found = self.entry(study)
        if found is None:
            raise Refusal(
                f"'{self.me}' has no record of who approved the study {study.digest.hex()[:16]}… and on which cells;"
                " read it, then: cloister site KIT --approve"
            )
        if found.withdrawn:
            did, more = ("refused", "") if found.refused else ("withdrew its approval of", " again")
            raise Refusal(
                f"'{self.me}' {did} '{study.name}' on {found.withdrawn}; to allow it{more}: cloister site KIT --approve"
            )
        if not found.made_here:
            raise Refusal(
                f"the approval of '{study.name}' was not recorded on this machine: it came with the kit, with a backup"
                " or from an earlier version; read the study, then: cloister site KIT --approve"
            )
        return found

    def check_data(self, study: Study, found: Fingerprint) -> None:
        """Raise `Refusal` unless these are the cells that were approved."""
        entry = self.current(study)
        if entry.data is None:
            raise Refusal(f"'{self.me}' approved '{study.name}' without cells; once more: cloister site KIT --approve")
        if difference := entry.data.difference(found):
            raise Refusal(
                f"these are not the cells that {entry.by} approved for '{study.name}' on {entry.when[:10]}"
                f" ({difference}); look at them, then: cloister site KIT --approve"
            )

    def add(
        self,
        study: Study,
        by: str,
        data: Fingerprint | None,
        cost: Mapping[str, float],
        stamp: tuple[Any, ...] = (),
        *,
        small_change: bool = False,
        terms: Mapping[str, Any] | None = None,
    ) -> Approval:
        """Keep that somebody approves the study now."""
        who, now = check_name(by), stamp_now()
        entry = Approval(
            study.name,
            who,
            login(),
            now,
            data,
            cost,
            stamp,
            small_change=small_change,
            machine=this_machine(),
            terms=terms or {},
        )
        self._save({**self._load(), study.digest.hex(): entry})
        self._record("approved", study, who, now, data.words if data is not None else "")
        return entry

    def refuse(self, study: Study, by: str = "") -> Approval:
        """Keep that somebody looked at the study and does not allow it; what was allowed is withdrawn instead."""
        entries, who, now = self._load(), check_name(by), stamp_now()
        before = entries.get(study.digest.hex())
        if before is not None and not before.withdrawn:
            raise UsageError(f"'{study.name}' is approved; to stop it and take the approval back: cloister halt KIT")
        entry = Approval(study.name, who, login(), now, withdrawn=f"{now} by {who}", refused=True)
        self._save({**entries, study.digest.hex(): entry})
        self._record("refused", study, who, now)
        return entry

    def known_consents(self) -> set[str]:
        """Consents that somebody here saw while approving a study."""
        entries = [entry for entry in self._load().values() if entry.made_here]
        return {str(word) for entry in entries for word in entry.terms.get("consent", ())}

    def withdraw(self, study: Study, by: str = "") -> Approval | None:
        """Mark the approval of the study as withdrawn now; None if there was none."""
        entries = self._load()
        entry = entries.get(study.digest.hex())
        if entry is None or entry.withdrawn:
            return None
        who, now = check_name(by), stamp_now()
        gone = dataclasses.replace(entry, withdrawn=f"{now} by {who}")
        self._save({**entries, study.digest.hex(): gone})
        self._record("withdrawn", study, who, now)
        return gone

    @property
    def history(self) -> History:
        """Every decision so far."""
        return history(self.path.with_name(LOG))

    def _record(self, what: str, study: Study, by: str, when: str, on: str = "") -> None:
        how = self.via or os.environ.get(VIA, "command")
        row = {"when": when, "what": what, "by": by, "user": login(), "how": how, "study": study.name}
        try:
            record(self.path.with_name(LOG), {**row, "digest": study.digest.hex(), "on": on})
        except OSError as e:
            raise DataError(f"{self.path.with_name(LOG)} cannot be written ({e.strerror})") from None

    def _save(self, entries: Mapping[str, Approval]) -> None:
        try:
            files.write(self.path, json.dumps({k: dataclasses.asdict(v) for k, v in entries.items()}, indent=1))
        except OSError as e:
            raise DataError(f"{self.path} cannot be written ({e.strerror})") from None

    def _load(self) -> dict[str, Approval]:
        try:
            return {str(k): _read(v) for k, v in json.loads(self.path.read_text(encoding="utf-8")).items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            raise ParameterError(
                f"{self.path} is damaged, so nobody knows what was approved; delete it and approve again"
            ) from None


def _read(raw: Mapping[str, Any]) -> Approval:
    data = Fingerprint.load(raw["data"]) if raw.get("data") is not None else None
    words = {key: str(raw[key]) for key in ("study", "by", "user", "when", "withdrawn")}
    words["machine"] = str(raw.get("machine", ""))
    cost = {str(key): float(value) for key, value in raw["cost"].items()}
    refused, small_change = (raw.get(key, False) is True for key in ("refused", "small_change"))
    stamp = tuple(raw.get("stamp", ()))
    terms = dict(raw.get("terms", {}))
    return Approval(**words, data=data, cost=cost, stamp=stamp, refused=refused, small_change=small_change, terms=terms)


MACHINE = Path("/etc/machine-id")


def this_machine() -> str:
    """A name of this machine that whoever delivers a kit does not know; "" where there is none, as in containers."""
    try:
        made = MACHINE.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""
    return hashlib.sha256(f"cloister approvals {made}".encode()).hexdigest()[:32] if made else ""


def check_name(by: str) -> str:
    """Who decides, as it is kept: the login name if nobody is named. Raises `ParameterError` unless it is one line."""
    if not by.isprintable() or len(by) > 200:
        raise ParameterError(f"who decides must be one line of at most 200 characters, found {by[:40]!r}")
    return by.strip() or login()


def login() -> str:
    with contextlib.suppress(KeyError):
        return pwd.getpwuid(os.getuid()).pw_name
    return f"user {os.getuid()}"


def stamp_now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
