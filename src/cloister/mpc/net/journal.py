"""Journal: a receipt while it grows, on disk before what it tells of has left.

One line of JSON for the header, for every entry, and at the end for the signature. What is about to be sent waits until
its line is on the disk (`fdatasync`), so that neither `kill -9` nor a power cut can lose it. Room is taken ahead of the
text, as zeros: a disk that fills up is noticed before a message leaves, and the lines that end the record still fit.
"""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

from cloister.errors import DiskError

SUFFIX = ".receipt.journal"  # behind a party's name, in the folder of a run
RESERVE = 1 << 16  # bytes kept for how a run ended: aborts, protocols that ran, the signature
AHEAD = 1 << 16  # bytes that are taken at a time


class Journal:
    """A file that only grows, for its owner's eyes. A line that cannot be kept is a `DataError`."""

    def __init__(self, path: Path) -> None:
        self.path, self._at, self._room = path, 0, 0
        self._lock, self._ending = threading.Lock(), False
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError as e:
            raise self._error(e) from None

    def _error(self, e: OSError) -> DiskError:
        why = e.strerror or type(e).__name__
        return DiskError(f"the receipt cannot be kept in {self.path} ({why}), so nothing more is sent")

    def write(self, line: Any, *, sync: bool) -> None:
        """Add a line; with `sync` it is on the disk when this returns."""
        text = json.dumps(line).encode() + b"\n"
        with self._lock:
            try:
                self._make_room(self._at + len(text))
                done = 0
                while done < len(text):
                    done += os.pwrite(self._file, text[done:], self._at + done)
                self._at += len(text)
                if sync:
                    os.fdatasync(self._file)
            except OSError as e:
                self._ending = True  # what is left of the room is for the end
                raise self._error(e) from None

    def _make_room(self, size: int) -> None:
        size += 0 if self._ending else RESERVE
        if size > self._room:
            ahead = size + (0 if self._ending else AHEAD)
            os.posix_fallocate(self._file, 0, ahead)
            self._room = ahead

    def begin_end(self) -> None:
        """From now on the reserve may be used."""
        self._ending = True

    def close(self) -> None:
        """Cut off the room that was not needed."""
        with self._lock:
            if self._file >= 0:
                try:
                    os.ftruncate(self._file, self._at)
                    os.fsync(self._file)
                except OSError as e:
                    raise self._error(e) from None
                finally:
                    os.close(self._file)
                    self._file = -1


def read_journal(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a journal; one that was cut off in the middle of its writing is not among them."""
    *lines, torn = path.read_bytes().rstrip(b"\0").split(b"\n")
    del torn
    return [json.loads(line, object_pairs_hook=unique_keys) for line in lines]


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; one that repeats a key is rejected, because readers differ in which value they take."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is repeated")
    return found
