"""Events: what a channel tells a progress bar."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable

from cloister.mpc.parties import Party


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """Something a progress bar may show; all of it public."""

    party: Party
    kind: str  # "sent" | "received" | "opened" | "step"
    protocol: str
    line: str
    name: str
    peer: str
    bytes: int
    total: int  # bytes this party has sent so far
    rounds: int = 0  # how often it has waited for others
    done: int = 0  # of a step that says how far it is
    of: int = 0  # 0: it does not say


def ignore_errors(on_event: Callable[[Event], None] | None) -> Callable[[Event], None]:
    """A listener that stops listening at its first error: no progress bar ends a run between hospitals."""
    listener = [on_event] if on_event is not None else []

    def tell(event: Event) -> None:
        try:
            for each in listener:
                each(event)
        except Exception as e:
            listener.clear()
            logging.getLogger("cloister").warning("progress is no longer shown: %s", type(e).__name__)

    return tell
