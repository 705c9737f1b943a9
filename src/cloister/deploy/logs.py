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
import re
import socket
import struct
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from cloister import files
from cloister.deploy.kit import RUNS, Kit
from cloister.mpc.net.events import Event
from cloister.rehearsal.progress import TASKS, Standing, Watch
from cloister.study import Study

ROUNDS, MOST_ROUNDS = "rounds.json", 100  # in `local`, and of how many studies
MOST, OLD = 5_000_000, 5  # bytes of a log, and how many old ones are kept
FILE = logging.Formatter("%(asctime)s %(process)d %(levelname)s %(message)s")
EVERY, EVERY_LINE = 0.5, 10.0  # seconds between two words in the file of a run, and in the log
HOW, HOWS = "CLOISTER_LOG", ("text", "json", "journal")  # in the environment: how lines are written
RUN = re.compile(r"\brun ([0-9a-f]{8})\b")
CONSOLE = logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S")


def log_to(home: Path) -> None:
    """The service's log."""
    file = logging.handlers.RotatingFileHandler(home / "log.txt", maxBytes=MOST, backupCount=OLD, encoding="utf-8")
    _log(file, home)


def log_beside(home: Path) -> None:
    """The log of a run's process, into the same file, which the service may rotate away."""
    _log(logging.handlers.WatchedFileHandler(home / "log.txt", encoding="utf-8"), home)


def _log(file: logging.Handler, home: Path) -> None:
    how = os.environ.get(HOW, "text")
    console: logging.Handler = logging.StreamHandler(sys.stderr)
    if how == "journal":
        with contextlib.suppress(OSError):
            console = Journald(home.name)
    if not sys.stderr.isatty():  # a terminal is told how far runs are, a pipe only what happened
        console.addFilter(lambda record: not hasattr(record, "progress"))
    lines = JsonLines(home.name) if how == "json" else None
    for handler, form in ((file, FILE), (console, CONSOLE)):
        handler.setFormatter(lines or form)
        logging.getLogger("cloister").addHandler(handler)
    logging.getLogger("cloister").setLevel(logging.INFO)


def fields_of(record: logging.LogRecord, kit: str) -> dict[str, str]:
    """What a line is about, for programs that collect logs."""
    message = record.getMessage()
    run = RUN.search(message)
    return {
        "message": message,
        "level": record.levelname.lower(),
        "kit": kit,
        "process": str(record.process),
        **({"run": run[1]} if run else {}),
        **({"progress": "yes"} if hasattr(record, "progress") else {}),
    }


class JsonLines(logging.Formatter):
    """One JSON object a line: `cloister site KIT --log json`."""

    def __init__(self, kit: str) -> None:
        super().__init__()
        self._kit = kit

    def format(self, record: logging.LogRecord) -> str:
        when = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{record.msecs:03.0f}Z"
        return json.dumps({"time": when, **fields_of(record, self._kit)}, ensure_ascii=False)


class Journald(logging.Handler):
    """Lines with fields, by journald's own protocol: `cloister site KIT --log journal`.

    journalctl CLOISTER_RUN=705d38af
    """

    PRIORITY: Mapping[str, str] = {"debug": "7", "info": "6", "warning": "4", "error": "3", "critical": "2"}

    def __init__(self, kit: str, path: str = "/run/systemd/journal/socket") -> None:
        super().__init__()
        self._kit, self._sock = kit, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._sock.connect(path)

    def emit(self, record: logging.LogRecord) -> None:
        said = fields_of(record, self._kit)
        rows = {"MESSAGE": said["message"], "PRIORITY": self.PRIORITY.get(said["level"], "6")}
        rows |= {"SYSLOG_IDENTIFIER": "cloister", "CLOISTER_KIT": self._kit}
        if "run" in said:
            rows["CLOISTER_RUN"] = said["run"]
        data = b""
        for key, value in rows.items():
            text = value.encode(errors="replace")
            if b"\n" in text:
                data += key.encode() + b"\n" + struct.pack("<Q", len(text)) + text + b"\n"
            else:
                data += key.encode() + b"=" + text + b"\n"
        with contextlib.suppress(OSError):
            self._sock.send(data)

    def close(self) -> None:
        self._sock.close()
        super().close()


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
        self._kit, self._about = kit, 0
        self._part: Study | None = None

    def begin(self, part: Study) -> None:
        """The part of the study that is worked on from now on."""
        self._watch, self._part = Watch(), part
        self._about = _known_rounds(self._kit).get(part.digest.hex(), 0)

    def finish(self, rounds: float) -> None:
        """Keep how many rounds the part took, so that the next run can say how far it is."""
        if self._part is None:
            return
        known = {**_known_rounds(self._kit), self._part.digest.hex(): int(rounds)}
        with contextlib.suppress(OSError):
            files.write(self._kit.path / "local" / ROUNDS, json.dumps(dict([*known.items()][-MOST_ROUNDS:])))

    def __call__(self, event: Event) -> None:
        standing, now = self._watch.hear(event), time.monotonic()
        if self._part is not None:
            standing.step, standing.about = self._part.place, self._about
            standing.task = TASKS.get(self._part.workflow, "")
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


def _known_rounds(kit: Kit) -> dict[str, int]:
    try:
        raw = json.loads((kit.path / "local" / ROUNDS).read_text(encoding="utf-8"))
        return {str(k): int(v) for k, v in raw.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


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
