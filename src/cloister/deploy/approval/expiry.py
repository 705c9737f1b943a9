"""Expiry: results that should have been deleted, and keys of a study that has ended."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from pathlib import Path

from cloister import governance
from cloister.deploy.kit import Kit, Policy
from cloister.errors import CloisterError
from cloister.rehearsal.results import load_run

WARN = 30  # days before the end of a study


def overdue(kit: Kit, policy: Policy, today: datetime.date | None = None) -> Iterator[tuple[str, str]]:
    """What is past its time, or soon will be: ("results" | "keys" | "study", a sentence)."""
    today = today or governance.now()
    for folder in sorted(policy.out.iterdir()) if policy.out.is_dir() else ():
        last = _keep_until(folder)
        if last is not None and last < today:
            yield "results", f"{folder} was to be kept until {last}; delete it"
    if (said := kit.study.governance.get("expires")) is None:
        return
    left = (datetime.date.fromisoformat(said) - today).days
    if left < 0:
        keys = ", ".join(f.name for f in (kit.path / "identity.key", *sorted(kit.path.glob("startup/*.key"))))
        yield "study", f"'{kit.study.name}' ended on {said}; nothing of it runs any more"
        yield "keys", f"{keys} in {kit.path} are of a study that ended on {said}; delete them, or agree on a new study"
    elif left <= WARN:
        yield "study", f"'{kit.study.name}' ends in {left} days, on {said}"


def _keep_until(folder: Path) -> datetime.date | None:
    """The last day of a run's folder by the study that it was of; None where nobody said, or it is no run's."""
    try:
        made = datetime.datetime.strptime(folder.name[:8], "%Y%m%d").date()
        found = next(iter((*folder.glob("run.json"), *sorted(folder.glob("*/run.json")))), None)
        return governance.keep_until(load_run(found.parent).study.governance, made) if found is not None else None
    except (ValueError, OSError, CloisterError):
        return None
