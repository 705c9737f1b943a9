"""Where a provider puts ciphertexts between two stretches: in memory up to a limit, in unnamed files beyond.

A block of 65 tokens and 192 features has more ciphertexts than a machine has memory. What lies here is encrypted under
the owner's key; the files have no name and vanish with the process.
"""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, final

import numpy as np

from cloister.arrays import U32

MEMORY = 1 << 30  # bytes of one pool


@final
class Pool:
    """Shelves that share a limit of memory."""

    def __init__(self, memory: int = MEMORY) -> None:
        self.memory, self.used = memory, 0

    def shelf(self, n: int, p: int, k: int, degree: int, *, rarely: bool = False, fresh: bool = False) -> Shelf:
        """What is read `rarely` takes a quarter of the memory at most; `fresh` ciphertexts are kept like others."""
        size = n * p * k * degree * 4
        inside = self.used + size <= self.memory and not (rarely and size > self.memory // 4)
        shelf = Shelf((n, p, k, degree), inside=inside)
        if inside:
            self.used += size
            weakref.finalize(shelf, self._free, size)
        return shelf

    def make_room(self, shelf: Shelf, n: int, k: int, degree: int) -> None:
        """Nothing is put aside here: what does not fit lies in files."""

    def _free(self, size: int) -> None:
        self.used -= size


@final
class Shelf:
    """n ciphertexts (p, k, N), written and read by number."""

    def __init__(self, shape: tuple[int, int, int, int], *, inside: bool) -> None:
        self.shape = shape
        self._one = shape[1] * shape[2] * shape[3] * 4
        self._rows: U32 | None = np.empty(shape, np.uint32) if inside else None
        self._file: Any = None if inside else tempfile.TemporaryFile(buffering=0)  # noqa: SIM115

    def back(self) -> None:
        """It was never put aside."""

    def put(self, start: int, cts: U32, seed: bytes = b"") -> None:
        """Ciphertexts from number `start` on; a card's shelf may keep the seed of c_1 in its place."""
        if self._rows is not None:
            self._rows[start : start + len(cts)] = cts
            return
        raw = np.ascontiguousarray(cts, np.uint32).data.cast("B")
        at, done = start * self._one, 0
        while done < len(raw):
            done += os.pwrite(self._file.fileno(), raw[done:], at + done)

    def read(self, which: Sequence[int], k: int) -> U32:
        """Ciphertexts (len(which), p, k, N) at their first k primes."""
        at = np.asarray(which, np.int64)
        if self._rows is not None:
            if len(at) and (np.diff(at) == 1).all():
                return np.ascontiguousarray(self._rows[at[0] : at[-1] + 1, :, :k])
            return np.ascontiguousarray(self._rows[at, :, :k])
        out = np.empty((len(at), self.shape[1], k, self.shape[3]), np.uint32)
        for s, e in _runs(at):
            raw = np.empty((e - s, *self.shape[1:]), np.uint32)
            view, got, start = raw.data.cast("B"), 0, int(at[s]) * self._one
            while got < len(view):
                n = os.preadv(self._file.fileno(), [view[got:]], start + got)
                if not n:
                    raise ValueError("a ciphertext is read that was never written")
                got += n
            out[s:e] = raw[:, :, :k]
        return out


def _runs(at: Any) -> list[tuple[int, int]]:
    """Stretches of consecutive numbers, at most 256 long."""
    cuts = [0, *(np.flatnonzero(np.diff(at) != 1) + 1), len(at)]
    return [(s, min(e, s + 256)) for a, e in pairwise(cuts) for s in range(int(a), int(e), 256)]
