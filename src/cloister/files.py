"""Files that appear whole or not at all, and are for their owner's eyes unless said otherwise."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


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
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def write(path: str | Path, content: bytes | str, *, private: bool = True) -> Path:
    """Write a file whole or not at all, and the folders it lies in; returns its path."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path, private=private) as part:
        part.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)
    return path
