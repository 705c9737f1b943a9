"""Try an HDF5 file in a process of its own: the C library may crash or hang on a damaged one.

`check` starts this very file as a program, which walks through everything that HDF5 has to parse: object headers,
attributes, indices of chunks, texts, and the numbers of arrays up to 64 MB. It costs a process's start and a second
reading of small arrays; a file that was tried already is not tried again while it stays as it is.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

SMALL = 1 << 26  # bytes of an array that are read whole
SECONDS, PER_SECOND = 15.0, 2e7  # time for any file, and bytes that one more second is given for
FINE, DAMAGED = 0, 3

_tried: set[tuple[str, int, int, int]] = set()


def check(path: Path) -> bool:
    """Whether the file can be parsed without harm."""
    facts = path.stat()
    key = (str(path.resolve()), facts.st_ino, facts.st_size, facts.st_mtime_ns)
    if key in _tried:
        return True
    limit = SECONDS + facts.st_size / PER_SECOND
    try:
        command = [sys.executable, "-P", "-W", "ignore", __file__, str(path)]
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=limit
        )
    except subprocess.TimeoutExpired:
        return False
    if done.returncode == FINE:
        _tried.add(key)
    return done.returncode == FINE


def walk(path: str) -> None:
    """Parse everything; raises, crashes or hangs where that cannot be done."""
    import h5py

    def visit(name: str, item: Any) -> None:
        for key in item.attrs:
            item.attrs[key]
        if not isinstance(item, h5py.Dataset) or item.shape is None:
            return
        if item.nbytes > max(10**8, 10_000 * item.id.get_storage_size()):
            raise ValueError(f"{name}: {item.nbytes} bytes declared")
        if item.nbytes <= SMALL or item.dtype.hasobject:
            item[()]
        elif item.chunks:
            for i in range(item.id.get_num_chunks()):
                item.id.get_chunk_info(i)
            item[:1]
            item[-1:]

    with h5py.File(path, "r") as file:
        visit("/", file)
        file.visititems(visit)


if __name__ == "__main__":
    try:
        walk(sys.argv[1])
    except Exception:
        sys.exit(DAMAGED)
