"""The modes of the workflows, as `data/modes.toml` declares them: which protocols may run, and who learns what."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

STAYS, TOGETHER = "Stays at its site", "If parties collude"  # rows that every page sets apart
LEAVES = "Leaves its site"  # as shares, masked or encrypted
Rows = tuple[tuple[str, str], ...]  # who, what


@dataclass(frozen=True)
class Mode:
    """One way to run a workflow."""

    protocols: tuple[str, ...]  # the mode's own first, then those that it runs
    learns: Rows = ()  # who learns what, in short
    only_if: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # protocol → options of which one must be set
    auxiliaries: int = 0  # servers beside the coordinator

    def may_run(self, options: Any) -> tuple[str, ...]:
        """The protocols that a run with these options may run."""
        return tuple(p for p in self.protocols if any(_is_set(options, o) for o in self.only_if.get(p, ("",))))


def _is_set(options: Any, condition: str) -> bool:
    """Whether an option is set, or has the value that stands after `=`."""
    name, _, value = condition.partition("=")
    return not name or (str(getattr(options, name)) == value if value else bool(getattr(options, name)))


@functools.cache
def modes_of(workflow: str) -> dict[str, Mode]:
    """Name of a mode → what is declared about it."""
    return {
        name: Mode(
            tuple(one["protocols"]),
            tuple(one["learns"].items()),
            {protocol: tuple(options) for protocol, options in one.get("only-if", {}).items()},
            one.get("auxiliaries", 0),
        )
        for name, one in _declared()[workflow].items()
    }


@functools.cache
def leading() -> frozenset[str]:
    """The protocols that give a mode of some workflow its name in `explain`: each holds the whole of its runs."""
    return frozenset(one["protocols"][0] for modes in _declared().values() for one in modes.values())


@functools.cache
def _declared() -> dict[str, Any]:
    return tomllib.loads((resources.files("cloister") / "data" / "modes.toml").read_text(encoding="utf-8"))
