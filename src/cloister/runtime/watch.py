"""How far a run is, as its process tells it: in the party's log, and in a file for who waits with `cloister run`.

runs/3f2a9c1e….progress       the last event, as JSON; twice a second at most, and gone when the run has ended
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import time

from cloister.net.channel import Event
from cloister.run.progress import Watch
from cloister.runtime.kit import RUNS, Kit

FILE, LOG = 0.5, 10.0  # seconds between two words in the file, and in the log
PROGRESS = {"progress": True}  # marks lines of the log that no pipe is to get

log = logging.getLogger("cloister.runtime")


class Teller:
    """Takes the events of one run at one party."""

    def __init__(self, kit: Kit, run: str) -> None:
        self._run, self._path = run, kit.path / RUNS / f"{run}.progress"
        self._watch, self._filed, self._logged = Watch(), 0.0, time.monotonic()

    def __call__(self, event: Event) -> None:
        standing, now = self._watch.hear(event), time.monotonic()
        if now - self._logged >= LOG:
            self._logged = now
            log.info("run %s: %s", self._run[:8], standing, extra=PROGRESS)
        if now - self._filed >= FILE:
            self._filed = now
            self._path.parent.mkdir(exist_ok=True)
            part = self._path.with_suffix(".part")
            part.write_text(json.dumps(dataclasses.asdict(event)))
            os.replace(part, self._path)  # not flushed to the disk, as a result is: nobody needs it after a crash

    def end(self) -> None:
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)


def last_event(kit: Kit, since: float = 0.0) -> Event | None:
    """Where the latest run of this kit is; None if none told anything `since`, as one that was killed tells no more."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        times = {p: p.stat().st_mtime for p in (kit.path / RUNS).glob("*.progress")}
        newest = max(times, key=lambda p: times[p], default=None)
        return None if newest is None or times[newest] < since else Event(**json.loads(newest.read_text()))
    return None
