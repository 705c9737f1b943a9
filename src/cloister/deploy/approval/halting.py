"""Halt: a party stops what runs at it, and takes back its approval, at once."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from cloister.deploy.control_socket import give_order
from cloister.deploy.kit import Kit
from cloister.deploy.ready import is_running
from cloister.errors import CloisterError, DataError


@dataclass(frozen=True)
class Halted:
    withdrawn: bool  # whether there was an approval to take back
    runs: int  # that were going on
    running: bool  # whether the service was there to be told


def halt(kit_dir: str | Path, by: str = "", via: str = "") -> Halted:
    """Withdraw the approval of the kit's study, then have its service stop every run; returns what that did.

    The approval goes first, so that nothing begins in between. Runs that do not end within seconds are killed.
    """
    kit = replace(Kit.open(kit_dir), via=via)
    withdrawn, failed = False, None
    try:
        withdrawn = kit.withdraw(by) if kit.role != "coordinator" else False
    except CloisterError as e:
        failed = e  # a full disk is no reason to let a run go on
    runs = int(json.loads(give_order(kit, b"halt\n"))["halted"]) if (running := is_running(kit)) else 0
    if failed is not None:
        raise DataError(f"{runs} run(s) were stopped, but the approval is not withdrawn: {failed}")
    return Halted(withdrawn, runs, running)
