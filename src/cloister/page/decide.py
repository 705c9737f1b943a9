"""Decisions by a click: the same as on the command line, one at a time, and each leaves a line in the log."""

from __future__ import annotations

import dataclasses
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Mapping

from cloister.deploy.approval.approval import check_name
from cloister.deploy.approval.halting import halt
from cloister.deploy.approval.history import VIA
from cloister.deploy.kit import Kit
from cloister.errors import CloisterError, ParameterError, UsageError
from cloister.page.state import Place

log = logging.getLogger("cloister.deploy")


class Decisions:
    """What the owner of a kit may decide. Each returns a word for what was done, or raises and did nothing."""

    def __init__(self, place: Place) -> None:
        self._place, self._one = place, threading.Lock()

    def approve(self, fields: Mapping[str, str]) -> str:
        """Approve in a process of its own, so that no cell comes into the service's."""
        if fields.get("read") != "yes":
            raise UsageError("nothing was approved: say first that you have read who learns what")
        kit, by = self._asked(fields)
        self._alone()
        try:
            command = [sys.executable, "-m", "cloister.cli.main", "site", str(kit.path), "--approve", f"--by={by}"]
            done = subprocess.run(
                command,
                env={**os.environ, VIA: "page"},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                check=False,
            )
        finally:
            self._one.release()
        if done.returncode:
            raise ParameterError(f"nothing was approved. {' '.join(done.stderr.split())}")
        log.info("page: '%s' approved by %s", kit.study.name, by)
        return "approved"

    def refuse(self, fields: Mapping[str, str]) -> str:
        kit, by = self._asked(fields)
        self._alone()
        try:
            kit.refuse(by)
        finally:
            self._one.release()
        log.info("page: '%s' refused by %s", kit.study.name, by)
        return "refused"

    def halt(self, fields: Mapping[str, str]) -> str:
        """Halt whatever else is going on here; runs are stopped even if the kit can no longer be read."""
        try:
            by = check_name(fields.get("by", ""))
        except ParameterError:
            by = ""
        try:
            halt(self._place.path, by, via="page")
        except CloisterError as e:
            stopped = self._place.end_runs()
            raise ParameterError(f"{stopped} run(s) stopped, but the approval could not be withdrawn: {e}") from None
        return "halted"

    def _asked(self, fields: Mapping[str, str]) -> tuple[Kit, str]:
        """The kit, if its study is the one that was read, and who decides."""
        kit = dataclasses.replace(Kit.open(self._place.path), via="page")
        if kit.role == "coordinator":
            raise UsageError(f"{kit.me} is the coordinator; the other parties decide on its studies")
        if fields.get("study") != kit.study.digest.hex():
            raise UsageError("the study in this kit has changed since it was read; read it again, and decide then")
        return kit, check_name(fields.get("by", ""))

    def _alone(self) -> None:
        if not self._one.acquire(blocking=False):
            raise UsageError("another decision is being carried out; wait for it, and look again")
