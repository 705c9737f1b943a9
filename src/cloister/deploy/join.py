"""One run from one command: `cloister run WORKFLOW study.toml --as PARTY`, for parties that keep no service running.

A site or auxiliary starts its service, waits until one run has ended, and stops it; the coordinator starts its own,
orders the run, and stops it. A service that is running already is used by the coordinator, and is enough for everyone
else. The service has a session of its own and ends by itself with its run: `detach` leaves it to that, and so does a
terminal that is closed.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from cloister.cells.files import read_cells, write_cells
from cloister.cells.progress import told_to
from cloister.deploy.approval.own_cells import check_approved_cells, open_cells
from cloister.deploy.control_socket import run_study, start_run
from cloister.deploy.course import is_paid
from cloister.deploy.kit import DATA, Kit, Policy
from cloister.deploy.logs import last_event
from cloister.deploy.party import Ended
from cloister.deploy.ready import is_running
from cloister.deploy.service import ONCE
from cloister.errors import DiskError, ParameterError, PeerLost, UsageError, about
from cloister.files import replacing
from cloister.mpc.net.events import Event
from cloister.rehearsal.progress import passes_of
from cloister.rehearsal.results import load_run, step_folder
from cloister.session import Outcome
from cloister.study import Party, Study
from cloister.workflows import check_plan, pipeline

if TYPE_CHECKING:
    from anndata import AnnData

T = TypeVar("T")
Say = Callable[[str], None]
Tell = Callable[[Event], None]


def attend(
    kit_dir: str | Path,
    data: str | Path | None = None,
    *,
    limit: float | None = None,
    say: Say = print,
    on_event: Tell | None = None,
) -> Ended:
    """Take part in the next run of the kit's study, and return how it ended here.

    Parameters
    ----------
    data
        Cells for this run only, instead of those that `local/site.toml` names.
    limit
        Seconds to wait for a run to end; by default the study's `patience`.
    on_event
        Hears now and then how far the run is.
    """
    kit, policy = _ready(kit_dir, data, on_event)
    seen = set(policy.out.glob("*/outcome.json"))
    began, end = time.time(), time.monotonic() + (limit or kit.study.patience)
    with _service(kit, _data(policy)) as service:
        say(f"{kit.me} waits for a run of '{kit.study.name}'")
        while not (new := set(policy.out.glob("*/outcome.json")) - seen):
            if service.poll() is not None:
                raise PeerLost("flare", "-", "lost", f"the service of {kit.me} stopped; see {kit.path / 'log.txt'}")
            if time.monotonic() > end:
                raise PeerLost("flare", "-", "timeout", "no run was started in time")
            if on_event is not None and (event := last_event(kit, began)) is not None:
                on_event(event)
            time.sleep(0.3)
        ended = Ended.load(new.pop())
        time.sleep(2.0)  # let the service tell the coordinator before it goes
    if ended.status != "done" and ended.step:
        say(f"what the steps before {ended.step} gave is in {ended.folder}")
    if ended.status != "done":
        say(f"next: {ended.error['next']}")
    ended.check()
    return ended


def _ready(kit_dir: str | Path, data: str | Path | None, on_event: Tell | None) -> tuple[Kit, Policy]:
    """A site's or auxiliary's kit, if it may take part in a run with these cells; else it raises."""
    kit = Kit.open(kit_dir)
    if kit.role == "coordinator":
        raise UsageError(f"{kit.me} is the coordinator; it starts runs and brings no data")
    policy = kit.policy()
    if data is not None:
        if kit.role != "site":
            raise UsageError(f"{kit.me} is an {kit.role} server; it brings no data")
        policy = replace(policy, data=Path(data).absolute())
    kit.check_approved(policy)
    if not is_paid(kit):
        kit.check_limits(policy)
    pipeline.check_steps(kit.study)
    if kit.role == "site":
        with told_to(passes_of(kit.me, on_event)):
            adata = open_cells(kit, policy)
            with about(str(policy.data)):
                pipeline.check_site(kit.study, kit.me, adata)  # bad cells raise here, before others are asked
            check_approved_cells(kit, adata)
    return kit, policy


def _data(policy: Policy) -> dict[str, str]:
    return {DATA: str(policy.data)} if policy.data else {}


def conduct(
    kit_dir: str | Path,
    *,
    limit: float | None = None,
    say: Say = print,
    on_event: Tell | None = None,
    anew: bool = False,
) -> Ended:
    """Start the coordinator's service unless it runs already, have one run done, and return how it ended."""
    kit = Kit.open(kit_dir)
    if kit.role != "coordinator":
        raise UsageError(f"{kit.me} is a {kit.role}; the coordinator {kit.study.coordinator} starts runs")
    order = functools.partial(run_study, kit_dir, limit=limit, on_status=say, on_event=on_event, anew=anew)
    if is_running(kit):
        return order()
    with _service(kit, {}) as service:
        return _once_it_listens(order, service)


def detach(kit_dir: str | Path, data: str | Path | None = None, *, say: Say = print, anew: bool = False) -> str:
    """Start a run, or at a site wait for one, in a service that ends with it; returns at once, with the run's id."""
    kit = Kit.open(kit_dir)
    look = f"follow it: cloister attach {kit.path}; stop it: cloister cancel {kit.path}"
    if kit.role != "coordinator":
        kit, policy = _ready(kit_dir, data, None)
        _leave(_spawn(kit, _data(policy)))
        say(f"{kit.me} waits for a run of '{kit.study.name}'; {look}")
        return ""
    order = functools.partial(start_run, kit_dir, on_status=say, anew=anew)
    if is_running(kit):
        run = order()
    else:
        service = _spawn(kit, {})
        run = _once_it_listens(order, service)
        _leave(service)
    say(f"run {run} goes on; {look}")
    return run


def _leave(service: subprocess.Popen[bytes]) -> None:
    """Go without it: it ends by itself."""
    service.returncode = 0  # nobody waits for it


def _once_it_listens(order: Callable[[], T], service: subprocess.Popen[bytes]) -> T:
    end = time.monotonic() + 60
    while True:
        try:
            return order()
        except PeerLost as e:  # it takes some seconds until the service listens
            if "does not answer" not in str(e) or time.monotonic() > end or service.poll() is not None:
                raise
            time.sleep(1.0)


def _spawn(kit: Kit, env: dict[str, str]) -> subprocess.Popen[bytes]:
    """A service for one run, in a session of its own."""
    if is_running(kit):
        raise UsageError(f"{kit.me} is running already from {kit.path}; it takes part in runs by itself")
    command = [sys.executable, "-m", "cloister.cli.main", "site", str(kit.path)]
    with open(kit.path / "service.out", "ab") as out:
        return subprocess.Popen(
            command,
            env={**os.environ, **env, ONCE: "1"},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )


@contextlib.contextmanager
def _service(kit: Kit, env: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    service = _spawn(kit, env)
    try:
        yield service
    finally:
        service.send_signal(signal.SIGTERM)
        try:
            service.wait(timeout=20)
        except subprocess.TimeoutExpired:
            service.kill()
            service.wait()


def check_same_study(kit: Kit, study: Study) -> None:
    """Raise unless `study` is what the kit was made for; keys and network stand in the kit's own file."""
    if replace(study, keys=kit.study.keys).digest != kit.study.digest:
        raise ParameterError(
            f"the study differs from the one in {kit.path / 'study.toml'}; agree on one file and hand it to everyone"
        )


def take_away(ended: Ended, path: str | Path) -> Path:
    """Copy a finished run's cells to where the user wants them; whole, or not at all."""
    made = sorted(Path(ended.folder).glob(f"[0-9][0-9]-*/{ended.party}.h5ad"))  # of several steps, the last
    source, path = made[-1] if made else Path(ended.folder) / f"{ended.party}.h5ad", Path(path)
    if not source.exists():
        raise UsageError(f"this run gave no cells; see {ended.folder}")
    try:
        with replacing(path) as part:
            shutil.copyfile(source, part)
    except OSError as e:
        raise DiskError(f"{path} cannot be written ({e.strerror}); the cells are in {source}") from None
    return path


# ---- from Python -----------------------------------------------------------------------------------------------------
#
#     session = cl.join("kits/basel")
#     cl.map_labels(adata, session)       waits for the study's next run, takes part with these cells, writes the labels
#     cl.take_part(adata, session)        the same, whatever the study's workflow is, and for one of several steps
#
# The run happens in the kit's own service: no key and no connection is in the process that calls this.


@dataclass(frozen=True)
class Joined:
    """A site's place in the study of its kit. Every call of a workflow's function with it is one run."""

    kit: Path
    study: Study
    me: Party
    say: Callable[[str], None] = print

    def take_part(self, adata: AnnData) -> Outcome:
        """Take part in the study's next run with these cells."""
        return self._outcome(self.study, self._attend(adata))

    def take_steps(self, adata: AnnData) -> dict[str, Outcome]:
        """Take part in the study's next run with these cells; what came of each step, by its name."""
        home = self._attend(adata)
        return {part.label: self._outcome(part, step_folder(home, part)) for part in self.study.parts}

    def _outcome(self, part: Study, home: Path) -> Outcome:
        outcome = load_run(home).outcomes[self.me]
        if (cells := home / f"{self.me}.h5ad").exists():
            outcome.adata = read_cells(cells)
        workflow, options = check_plan(part)
        if workflow.model is not None and (path := home / f"{self.me}.{workflow.model[0]}").exists():
            outcome.model = workflow.model[1](path, options)
        return outcome

    def _attend(self, adata: AnnData) -> Path:
        with tempfile.TemporaryDirectory(prefix="cloister-") as folder:
            path = Path(folder) / "cells.h5ad"
            write_cells(adata, path, private=True)
            return Path(attend(self.kit, path, say=self.say).folder)


def join(kit: str | Path, *, say: Callable[[str], None] = print) -> Joined:
    """Open a site's kit, for `cl.map_labels(adata, session)` and the like.

    Parameters
    ----------
    kit
        The folder that `cloister provision` made for this site, approved with `cloister site KIT --approve`.
    say
        Gets a line when the site begins to wait for a run.
    """
    opened = Kit.open(kit)
    if opened.role != "site":
        raise UsageError(f"{opened.me} is the study's {opened.role} and brings no cells; start it with: cloister site")
    return Joined(opened.path, opened.study, opened.me, say)


def take_part(adata: AnnData, session: Joined, *, copy: bool = False) -> dict[str, Outcome]:
    """Take part in the next run of a site's study, all its steps one after the other.

    Parameters
    ----------
    adata
        This site's cells. What the steps write is in them at the end, whole or, if one fails, not at all.
    session
        From `cl.join(kit)`; the study says workflows and options.
    copy
        Leave `adata` as it is; the cells after each step are in what is returned.

    Returns
    -------
    Step → its `Outcome` here: `adata`, `result`, `receipt`, `cost`, and `model` where there is one.
    """
    pipeline.check_site(session.study, session.me, adata)
    outcomes = session.take_steps(adata)
    made = [outcome.adata for outcome in outcomes.values() if outcome.adata is not None]
    if made and not copy:
        adata._init_as_actual(made[-1].copy())
    return outcomes
