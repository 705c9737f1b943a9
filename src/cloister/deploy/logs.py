"""A party's log: `log.txt` in its kit, which rotates, and the console, where the owner sees what matters.

How far a run is goes there, too, and into a file for who waits with `cloister run`:

runs/3f2a9c1e….progress       the last event and where the party stands by all of them, as JSON; twice a second at
                              most, and gone when the run has ended
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import logging.handlers
import os
import sys
import time
from pathlib import Path

from cloister.deploy.kit import RUNS, Kit
from cloister.mpc.net.events import Event
from cloister.rehearsal.progress import Standing, Watch

MOST, OLD = 5_000_000, 5  # bytes of a log, and how many old ones are kept
FILE = logging.Formatter("%(asctime)s %(process)d %(levelname)s %(message)s")
EVERY, EVERY_LINE = 0.5, 10.0  # seconds between two words in the file of a run, and in the log
CONSOLE = logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S")


def log_to(home: Path) -> None:
    """The service's log."""
    file = logging.handlers.RotatingFileHandler(home / "log.txt", maxBytes=MOST, backupCount=OLD, encoding="utf-8")
    _log(file)


def log_beside(home: Path) -> None:
    """The log of a run's process, into the same file, which the service may rotate away."""
    _log(logging.handlers.WatchedFileHandler(home / "log.txt", encoding="utf-8"))


def _log(file: logging.Handler) -> None:
    console = logging.StreamHandler(sys.stderr)
    if not sys.stderr.isatty():  # a terminal is told how far runs are, a pipe only what happened
        console.addFilter(lambda record: not hasattr(record, "progress"))
    for handler, form in ((file, FILE), (console, CONSOLE)):
        handler.setFormatter(form)
        logging.getLogger("cloister").addHandler(handler)
    logging.getLogger("cloister").setLevel(logging.INFO)


def rotate(file: Path) -> None:
    """Move a file that only grows out of the way, once it is large; old ones are numbered."""
    if not file.is_file() or file.stat().st_size < MOST:
        return
    for i in range(OLD - 1, 0, -1):
        old = file.with_name(f"{file.name}.{i}")
        if old.exists():
            os.replace(old, file.with_name(f"{file.name}.{i + 1}"))
    os.replace(file, file.with_name(f"{file.name}.1"))


def clean(text: str, most: int = 300) -> str:
    """What somebody else wrote, fit for a log."""
    return "".join(c if c.isprintable() else "?" for c in text[:most])


# ---- how far a run is ------------------------------------------------------------------------------------------------

PROGRESS = {"progress": True}  # marks lines of the log that no pipe is to get

log = logging.getLogger("cloister.deploy")


class Teller:
    """Takes the events of one run at one party."""

    def __init__(self, kit: Kit, run: str) -> None:
        self._run, self._path = run, kit.path / RUNS / f"{run}.progress"
        self._watch, self._filed, self._logged = Watch(), 0.0, time.monotonic()

    def __call__(self, event: Event) -> None:
        standing, now = self._watch.hear(event), time.monotonic()
        if now - self._logged >= EVERY_LINE:
            self._logged = now
            log.info("run %s: %s", self._run[:8], standing, extra=PROGRESS)
        if now - self._filed >= EVERY:
            self._filed = now
            self._path.parent.mkdir(exist_ok=True)
            part = self._path.with_suffix(".part")
            part.write_text(json.dumps([dataclasses.asdict(event), dataclasses.asdict(standing)]))
            os.replace(part, self._path)  # not flushed to the disk, as a result is: nobody needs it after a crash

    def end(self) -> None:
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)


def last_event(kit: Kit, since: float = 0.0) -> Event | None:
    """Where the latest run of this kit is; None if none told anything `since`, as one that was killed tells no more."""
    with contextlib.suppress(OSError, ValueError, TypeError, LookupError):
        times = {p: p.stat().st_mtime for p in (kit.path / RUNS).glob("*.progress")}
        newest = max(times, key=lambda p: times[p], default=None)
        return None if newest is None or times[newest] < since else Event(**json.loads(newest.read_text())[0])
    return None


def standing_of(kit: Kit, run: str) -> Standing | None:
    """Where this party stands in a run, by its id; None before its first word, and after its last."""
    with contextlib.suppress(OSError, ValueError, TypeError, LookupError):
        return Standing(**json.loads((kit.path / RUNS / f"{run}.progress").read_text())[1])
    return None
