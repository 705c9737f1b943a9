"""`cloister site`: a party's service, from the command until Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import NoReturn

from cloister.deploy.approval.recovery import recover
from cloister.deploy.control_socket import take_orders
from cloister.deploy.kit import Kit
from cloister.deploy.logs import log_to, rotate
from cloister.deploy.ready import check_port, check_ready, only_one
from cloister.deploy.service import Service

LINGER = 5.0  # seconds that a service for one run stays after it


class _Stop(Exception):
    """SIGTERM or Ctrl-C."""


def start_party(
    kit_dir: str | Path, beside: Callable[[Service], AbstractContextManager[object]] = nullcontext
) -> NoReturn:
    """Run a party's service until SIGTERM or Ctrl-C; must be called in the main thread, and ends the process.

    `beside` is what goes on as long as the service does, as its page.
    """
    kit = Kit.open(kit_dir)
    check_ready(kit)
    os.umask(0o077)  # logs and results are for their owner
    with only_one(kit):
        hub = kit.role == "coordinator"
        if hub:
            check_port(kit)
        rotate(kit.path / "service.out")
        log_to(kit.path)
        recover(kit)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _on_signal)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a terminal that is closed ends nothing, here and in runs
        service = Service(kit)
        network = f"{kit.study.network.get('host')}:{kit.study.network.get('port')}"
        say(f"{kit.me} ({kit.role}) {'listens at' if hub else 'connects to'} {network}; Ctrl-C stops it")
        say(f"log: {kit.path / 'log.txt'}")
        try:
            with take_orders(service), beside(service):
                service.start()
                while not service.is_over:
                    time.sleep(1.0)
                time.sleep(LINGER)  # for whoever ordered the run
                raise _Stop
        except _Stop:
            say(f"{kit.me} stops")
            service.stop()
    os._exit(0)


def wait_for_stop() -> None:
    """Wait for SIGTERM or Ctrl-C; must be called in the main thread."""
    try:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _on_signal)
        while True:
            signal.pause()
    except _Stop:
        return


def _on_signal(*_: object) -> NoReturn:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    raise _Stop


def say(text: str) -> None:
    with contextlib.suppress(OSError):  # the terminal was closed
        print(text, file=sys.stderr, flush=True)
