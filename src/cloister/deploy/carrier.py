"""Carrier: FLARE, in a process that holds no key of ours, no cell, and no path to either.

Of FLARE we use the communicator (`nvflare.fuel.f3`): one TLS connection per site, with its greeting, its heartbeat and
its reconnecting. Nothing of FLARE above it is loaded: no cells and their channels, no jobs, no administration, no
decoder of objects; and the finder below keeps it that way. `cloister.deploy.relay` is what the communicator hands
messages to. The party's service, at the other end of the pipe, holds the keys and believes nothing of what it is told
here (`cloister.deploy.link`).
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
import time
import types
from importlib.abc import MetaPathFinder
from socket import socket
from typing import Any

from cloister.deploy.pipe import LOG, Packet, Pipe

NEEDED = (  # of FLARE, by the communicator itself; a name stands for what is beneath it, too
    "nvflare.apis.fl_constant",
    "nvflare.apis.utils.format_check",
    "nvflare.apis.workspace",
    "nvflare.fuel.common.fqn",
    "nvflare.fuel.f3",
    "nvflare.fuel.hci.security",
    "nvflare.fuel.utils",
    "nvflare.fuel_opt.utils",
    "nvflare.security.logging",
)
LINES = 20  # lines for the log in a minute


class _NothingElse(MetaPathFinder):
    """Refuses to import what of FLARE a carrier does not need, whoever asks."""

    def find_spec(self, name: str, *_: object) -> None:
        inside = any(name == n or name.startswith(f"{n}.") or n.startswith(f"{name}.") for n in NEEDED)
        if name == "grpc" or (name.startswith("nvflare.") and not inside):
            raise ImportError(f"{name} has no business in a carrier")


def load_flare() -> None:
    """Make FLARE's communicator importable without what `import nvflare` loads with it."""
    spec = importlib.util.find_spec("nvflare")
    if spec is None or spec.submodule_search_locations is None:
        raise ImportError("nvflare is not installed; run: pip install 'cloister[flare]'")
    package = types.ModuleType("nvflare")
    package.__path__, package.__spec__ = list(spec.submodule_search_locations), spec
    sys.modules["nvflare"] = package
    sys.meta_path.insert(0, _NothingElse())


class LogToParty(logging.Handler):
    """Lines go to the party, a few in a minute: a carrier has no file to write to."""

    def __init__(self, pipe: Pipe) -> None:
        super().__init__(logging.WARNING)
        self._pipe, self._since, self._lines, self._last = pipe, 0.0, 0, ""

    def emit(self, record: logging.LogRecord) -> None:
        self.tell(record.getMessage())

    def tell(self, line: str) -> None:
        now = time.monotonic()
        if now - self._since > 60.0:
            self._since, self._lines, self._last = now, 0, ""
        if line != self._last and self._lines < LINES:
            self._lines, self._last = self._lines + 1, line
            self._pipe.post(Packet(LOG, data=line.encode(errors="replace")[:500]))


def serve(pipe: Pipe, plan: dict[str, Any], listener: socket | None) -> None:
    """Carry until the party closes its end of the pipe; `plan` says who is who, and where."""
    load_flare()
    from cloister.deploy.relay import Relay

    lines = LogToParty(pipe)
    logging.getLogger().addHandler(lines)
    Relay(pipe, plan, listener, lines.tell).work()
