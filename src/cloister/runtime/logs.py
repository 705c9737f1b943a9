"""A party's log: `log.txt` in its kit, which rotates, and the console, where the owner sees what matters."""

from __future__ import annotations

import logging
import logging.handlers
import os
import sys
from pathlib import Path

MOST, OLD = 5_000_000, 5  # bytes of a log, and how many old ones are kept
FILE = logging.Formatter("%(asctime)s %(process)d %(levelname)s %(message)s")
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
