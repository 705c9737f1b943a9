"""Files that appear whole or not at all, for their owner's eyes unless said otherwise; held by one run at a time.

`load_arrays` reads archives of arrays that others may have made: sizes are compared before anything is decompressed.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import io
import os
import time
import uuid
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cloister.errors import DataError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


LARGEST_ARRAYS = 1 << 28  # bytes that the arrays of any archive may have together
MOST_EXPANSION = 50  # and bytes for each byte of a larger archive


@contextmanager
def replacing(path: Path, *, private: bool = True) -> Iterator[Path]:
    """An empty file beside `path` to write to. It takes the place of `path` if the block ends well, else it goes.

    A private file can be read by its owner only (0600), from its first byte on.
    """
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex}.part")
    try:
        os.close(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if private else 0o666))
        yield part
        with part.open("rb+") as file:
            os.fsync(file.fileno())
        move(part, path)
    finally:
        part.unlink(missing_ok=True)


def move(part: Path, path: Path) -> None:
    """Let one file take the place of another in its folder. Needs no room, and holds after a power cut."""
    os.replace(part, path)
    if os.name != "posix":
        return
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    except OSError as e:
        if e.errno not in (errno.EINVAL, errno.ENOTSUP):  # some mounted folders know of no such thing
            raise
    finally:
        os.close(folder)


def write(path: str | Path, content: bytes | str, *, private: bool = True) -> Path:
    """Write a file whole or not at all, and the folders it lies in; returns its path."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path, private=private) as part:
        part.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)
    return path


def private_folder(path: Path) -> Path:
    """Make a folder for its owner's eyes (0700), and so those it lies in that are not there yet."""
    for missing in reversed([p for p in (path, *path.parents) if not p.exists()]):
        missing.mkdir(mode=0o700, exist_ok=True)
    return path


def load_arrays(source: str | Path | bytes, where: str | Path = "") -> Any:
    """An opened `.npz`, from a file or its bytes; nothing is unpickled.

    Raises `DataError` where its arrays declare far more bytes than the archive has: reading them would fill the memory.
    `where` names bytes in that message.
    """
    import numpy as np

    data = source if isinstance(source, bytes) else Path(source).read_bytes()
    most = max(LARGEST_ARRAYS, MOST_EXPANSION * len(data))
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        total = sum(_declared(archive, member) for member in archive.infolist())
    if total > most:
        name = where or ("the archive" if isinstance(source, bytes) else source)
        raise DataError(f"{name} has {len(data)} bytes and declares arrays of {total}, more than {most}; do not use it")
    return np.load(io.BytesIO(data), allow_pickle=False)


def _declared(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> int:
    """Bytes of one array: by the archive's directory, or by the array's own header where that claims more."""
    from numpy.lib import format as npy

    if not member.filename.endswith(".npy"):
        return member.file_size
    with archive.open(member) as file:
        read = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
        if (version := npy.read_magic(file)) not in read:
            raise DataError(f"'{member.filename}' is stored in format {version}, which is not read here")
        shape, _, dtype = read[version](file)
    count = dtype.itemsize
    for n in shape:
        count *= int(n)
    return max(member.file_size, count)


# ---- one run at a time -----------------------------------------------------------------------------------------------


@contextmanager
def locked(path: Path, *, wait: float = 0.0) -> Iterator[None]:
    """Hold a file, or a folder and all in it, against other runs; what killed ones left half-written there goes.

    Raises `DataError` if another run has it, after so many seconds. The lock is on a file beside `path`, which stays,
    and ends with the process. Without `fcntl` (Windows) that file is the lock: after a kill, somebody must remove it.
    """
    private_folder(path.parent)
    lock, until = path.with_name(f"{path.name}.lock"), time.monotonic() + wait
    while (held := _take(lock)) is None:
        if time.monotonic() >= until:
            killed = "" if fcntl else f"; if that was killed, remove {lock}"
            raise DataError(f"{path} is in use by another run; start again when that has ended{killed}")
        time.sleep(0.01)
    try:
        clear(path)
        yield
    finally:
        os.close(held)
        if fcntl is None:
            lock.unlink(missing_ok=True)


def _take(lock: Path) -> int | None:
    """An open file that is locked, or None if another has it."""
    try:
        held = os.open(lock, os.O_RDWR | os.O_CREAT | (0 if fcntl else os.O_EXCL), 0o600)
    except FileExistsError:
        return None
    if fcntl:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            os.close(held)
            if not isinstance(e, BlockingIOError):
                raise
            return None
    return held


def clear(path: Path) -> None:
    """Remove what killed runs left half-written of a file, or in a folder; for who holds its lock."""
    with contextlib.suppress(FileNotFoundError):
        for name in (f".{glob.escape(path.name)}.{'?' * 32}.part", f"{glob.escape(path.name)}/.*.{'?' * 32}.part"):
            for part in path.parent.glob(name):
                part.unlink(missing_ok=True)
