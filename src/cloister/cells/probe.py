"""Try an HDF5 file in a process of its own: the C library may crash or hang on a damaged one.

`verdict` hands the file to this very file run as a program, which walks through everything that HDF5 has to parse:
object headers, attributes, indices of chunks, texts, and the numbers of arrays up to 64 MB. Its memory is limited.

A file must be whole by itself. External links, external storage and virtual datasets take values from other files,
which neither an approval nor the stamp of a large file covers; they are refused. All arrays together may declare
`LARGEST` bytes, or `EXPANSION` for each byte of the file.

The child answers one file after
the other and leaves when it has had nothing to do for a while, so that its start is paid for once; if it dies or has
used up its time on the processor, which ends it, the file is damaged, and the next one gets a new child. If it only
gives no answer, the machine or the disk may be busy, and nothing is said about the file. A file that passed is not
tried again while it stays as it is.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import selectors
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

SMALL = 1 << 26  # bytes of an array that are read whole
LARGEST, EXPANSION = 5e8, 200  # bytes that all arrays of a file may declare, and bytes for each byte of a larger file
LINKS, DEPTH = 10**6, 64  # that a file may have
MEMORY = 2e9  # bytes that the child may take for a file, beside 20 for each of its bytes
SECONDS, PER_SECOND = 15.0, 2e7  # of the processor for any file, and bytes that one more second is given for
PATIENCE = 20.0  # seconds of the clock that one of the processor may take
IDLE = 10.0  # seconds without a question after which the child leaves
LEAVING = 10.0  # seconds that it may take to be gone
FINE, DAMAGED, SILENT = "fine", "damaged", "silent"
LINKED, TOO_LARGE = "linked", "large"

_passed: set[tuple[str, int, int, int]] = set()
_lock = threading.Lock()
_child: subprocess.Popen[str] | None = None


def verdict(path: Path) -> str:
    """`FINE` if the file can be parsed without harm, `DAMAGED` if not, `SILENT` if no answer came in time.

    `LINKED` if it takes values from other files, `TOO_LARGE` if it declares far more than it holds.
    """
    path = path.resolve()
    facts = path.stat()
    key = (str(path), facts.st_ino, facts.st_size, facts.st_mtime_ns)
    if key in _passed:
        return FINE
    if "\n" in str(path):
        return FINE  # no such line can be asked; the name is odd, the file may well be fine
    with _lock:
        answer = _ask(str(path), SECONDS + facts.st_size / PER_SECOND)
    if answer == FINE:
        _passed.add(key)
    return answer


def _ask(path: str, seconds: float) -> str:
    for fresh in (False, True):  # a child that left because it was idle is no sign of damage
        if (child := _start(fresh=fresh)) is None:
            continue
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            child.stdin.write(f"{seconds:.0f} {path}\n")
            child.stdin.flush()
        except OSError:
            _end()
            continue
        with selectors.DefaultSelector() as waiting:
            waiting.register(child.stdout, selectors.EVENT_READ)
            spoke = bool(waiting.select(PATIENCE * seconds))
            answer = child.stdout.readline().strip() if spoke else ""
        if answer:
            return answer
        asleep = not fresh and spoke and _left(child)
        _end()
        if not asleep:
            return DAMAGED if spoke else SILENT
    return DAMAGED


def _left(child: subprocess.Popen[str]) -> bool:
    """Whether a child that has closed its end left of its own accord; its pipe closes a moment before it has ended."""
    try:
        return child.wait(LEAVING) == 0
    except subprocess.TimeoutExpired:
        return False


def _start(*, fresh: bool) -> subprocess.Popen[str] | None:
    global _child
    if _child is not None and (fresh or _child.poll() is not None):
        _end()
    if _child is None:
        command = [sys.executable, "-P", "-W", "ignore", __file__]
        _child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
    return _child


@atexit.register
def _end() -> None:
    global _child
    child, _child = _child, None
    if child is None:
        return
    with contextlib.suppress(OSError):
        child.kill()
    child.wait()
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()


# ---- what a file may declare -----------------------------------------------------------------------------------------


class LinkedError(ValueError):
    """Values of another file."""


class TooLargeError(ValueError):
    """More bytes than the file can hold."""


def check_contents(file: Any, size: int) -> None:
    """Raise unless an opened HDF5 file of this size is whole by itself and declares no more than it may.

    Objects that several links name count each time, as a reader reads them each time.
    """
    import h5py

    total, links = 0, 0

    def visit(group: Any, depth: int) -> None:
        nonlocal total, links
        for name in group:
            links += 1
            if links > LINKS or depth > DEPTH:
                raise TooLargeError("links")
            if isinstance(group.get(name, getlink=True), h5py.ExternalLink):
                raise LinkedError("external link")
            item = group[name]
            if isinstance(item, h5py.Group):
                visit(item, depth + 1)
                continue
            if not isinstance(item, h5py.Dataset) or item.shape is None:
                continue
            if item.is_virtual or item.external:
                raise LinkedError("virtual dataset or external storage")
            total += item.nbytes
            if total > max(LARGEST, EXPANSION * size):
                raise TooLargeError("declared")

    visit(file, 0)


# ---- the child -------------------------------------------------------------------------------------------------------


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
        check_contents(file, Path(path).stat().st_size)
        visit("/", file)
        file.visititems(visit)


def limit_processor(seconds: float) -> None:
    """End this process when it has used so much more of the processor; not where the system knows no such limit."""
    try:
        import resource
    except ImportError:
        return
    most = resource.getrlimit(resource.RLIMIT_CPU)[1]
    wanted = math.ceil(time.process_time() + seconds)
    resource.setrlimit(resource.RLIMIT_CPU, (wanted if most == resource.RLIM_INFINITY else min(wanted, most), most))


def limit_memory(size: int) -> None:
    """Let this process take so much more memory than it has now for a file of `size` bytes; 0 lifts the limit."""
    try:
        import resource

        now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except (ImportError, OSError):
        return
    most = resource.getrlimit(resource.RLIMIT_AS)[1]
    wanted = most if size == 0 else now + int(MEMORY) + 20 * size
    resource.setrlimit(
        resource.RLIMIT_AS, (wanted if most == resource.RLIM_INFINITY or size == 0 else min(wanted, most), most)
    )


def serve() -> None:
    """Answer every path that comes in, until none comes any more."""
    import os

    with selectors.DefaultSelector() as waiting:
        waiting.register(sys.stdin, selectors.EVENT_READ)
        while waiting.select(IDLE):
            seconds, _, path = os.fsdecode(sys.stdin.buffer.readline()).rstrip("\n").partition(" ")
            if not path:
                return
            limit_processor(float(seconds))
            try:
                import h5py  # noqa: F401 - before memory is limited

                limit_memory(Path(path).stat().st_size)
                walk(path)
                answer = FINE
            except LinkedError:
                answer = LINKED
            except TooLargeError:
                answer = TOO_LARGE
            except Exception:
                answer = DAMAGED
            limit_memory(0)
            print(answer, flush=True)


if __name__ == "__main__":
    serve()
