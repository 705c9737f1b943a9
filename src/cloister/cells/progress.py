"""How far a pass over cells has come, told to whoever listens in this thread, twice a second at most.

with told_to(listener):                    hears listener("reading", "adata.X", 4000, 10000) now and then
pace = Pace("reading", "adata.X")
pace.tell(4000, 10000)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Listener = Callable[[str, str, int, int], None]  # stage ("reading", "writing"), of what, how much is done, of how much

_TELL = 0.5  # seconds between two words
_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)


@contextmanager
def told_to(listener: Listener | None) -> Iterator[None]:
    """Have a listener hear of the passes that begin in this thread meanwhile."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


class Pace:
    """One pass after the other over the same thing. What takes less than half a second is not worth a word."""

    def __init__(self, stage: str, what: str) -> None:
        self._stage, self._what, self._listener = stage, what, _listener.get()
        self._said, self._begun = time.monotonic(), False

    def tell(self, done: int, of: int) -> None:
        if self._listener is None:
            return
        now, ended = time.monotonic(), done >= of
        if now - self._said >= _TELL or (ended and self._begun):
            self._said, self._begun = now, not ended
            self._listener(self._stage, self._what, min(done, of), of)
