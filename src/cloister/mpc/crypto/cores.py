"""Several cores for one party: independent pieces of a computation side by side, with the same result as one by one.

The compiled loops release Python's lock, so threads suffice. As many cores are used as the process may run on, or as
`OMP_NUM_THREADS` says. Parties that share a process, as in a rehearsal, share them. What others compute for a thread
is charged to it: `cpu_seconds` is `time.thread_time()` and what was borrowed.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

A = TypeVar("A")
B = TypeVar("B")
LEAST = 1 << 17  # numbers, below which handing over takes longer than computing
_here = threading.local()


@functools.lru_cache(maxsize=1)
def count() -> int:
    """Cores that one party may use."""
    asked = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    if asked.isdigit() and int(asked) > 0:
        return int(asked)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@functools.lru_cache(maxsize=1)
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(count() - 1, thread_name_prefix="cloister-core")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)  # its threads stay with the parent


def cpu_seconds() -> float:
    """Of the processor, for this thread, by whichever threads."""
    return time.thread_time() + getattr(_here, "borrowed", 0.0)


def each(action: Callable[[A], B], items: Iterable[A]) -> list[B]:
    """`action` of every item, in order; this thread does the first share of them."""
    todo = list(items)
    n = min(count(), len(todo))
    if n < 2 or getattr(_here, "helps", False):
        return [action(item) for item in todo]

    def share(at: int) -> tuple[list[B], float]:
        _here.helps, began = True, time.thread_time()
        return [action(item) for item in todo[at::n]], time.thread_time() - began

    others = [_pool().submit(share, at) for at in range(1, n)]
    _here.helps = True  # what is called from here is not divided once more
    try:
        found = [[action(item) for item in todo[::n]]]
    finally:
        _here.helps = False
        wait(others)  # nobody writes to these arrays any more when this returns, or raises
    for other in others:
        made, spent = other.result()
        found.append(made)
        _here.borrowed = getattr(_here, "borrowed", 0.0) + spent
    return [found[i % n][i // n] for i in range(len(todo))]


def rows(action: Callable[[slice], object], k: int, width: int) -> None:
    """`action` on slices that together are all of k rows of `width` numbers; on all at once where they are few."""
    n = min(count(), k) if k * width >= LEAST else 1
    each(action, [slice(k * i // n, k * (i + 1) // n) for i in range(n)])
