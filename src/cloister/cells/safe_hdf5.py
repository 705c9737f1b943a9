"""HDF5 files that may fail to be written: on a full disk the library itself crashes the process when it closes them.

So it never hears of it. It writes through a file object that notes the first error, lets everything after it fall away,
and lets the library close its file in peace; then the error is raised.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal


class PatientFile(io.RawIOBase):
    """A file on disk that takes everything. `error` is the first one, after which nothing more is written."""

    def __init__(self, path: Path, mode: Literal["w", "r+"]) -> None:
        self._file = path.open("w+b" if mode == "w" else "r+b", buffering=0)
        self.error: OSError | None = None
        self._end = self._file.seek(0, io.SEEK_END)  # as far as the library knows
        self._at = 0

    def readable(self) -> bool:
        return True

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._end}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        view[:] = bytes(len(view))  # zeros where nothing could be written
        self._file.seek(self._at)
        done = 0
        while done < len(view) and (more := self._file.readinto(view[done:])):
            done += more
        self._at += len(view)
        return len(view)

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if self.error is None:
            try:
                self._file.seek(self._at)
                done = 0
                while done < len(view):
                    done += self._file.write(view[done:]) or 0
            except OSError as e:
                self.error = e
        self._at += len(view)
        self._end = max(self._end, self._at)
        return len(view)

    def truncate(self, size: int | None = None) -> int:
        self._end = self._at if size is None else size
        if self.error is None:
            try:
                self._file.truncate(self._end)
            except OSError as e:
                self.error = e
        return self._end

    def close(self) -> None:
        self._file.close()
        super().close()


@contextlib.contextmanager
def open_hdf5(path: Path, mode: Literal["w", "r+"]) -> Iterator[Any]:
    """An HDF5 file to write to; an error of the disk is raised at the end of the block, as an `OSError`."""
    import h5py

    patient = PatientFile(path, mode)
    try:
        with h5py.File(patient, mode) as file:
            yield file
    except Exception:
        if patient.error is not None:
            raise patient.error from None
        raise
    finally:
        patient.close()
    if patient.error is not None:
        raise patient.error
