"""What a party's page tells: read from its kit and its results folder, each time it is asked for.

Nothing here changes anything, and nothing comes from who asks but the name of a run, which must be one that is there.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from cloister import governance
from cloister.deploy.approval.approval import Approval
from cloister.deploy.approval.history import History
from cloister.deploy.control_socket import give_order, status_of
from cloister.deploy.kit import Kit, Policy
from cloister.deploy.party import Ended
from cloister.deploy.service import Service
from cloister.deploy.status import Status, of_service
from cloister.errors import CloisterError
from cloister.page.count import Counter
from cloister.rehearsal.progress import Standing

NAME = re.compile(r"\d{8}T\d{6}Z-[0-9a-f]{8}")  # a run's folder: when it began, and its id
SHOWN = 50  # runs in the list

Stage = Literal["asks", "waits", "approved", "refused", "withdrawn", "ended"]


@dataclass(frozen=True)
class Past:
    """A run that has ended here."""

    name: str
    ended: Ended
    folder: Path

    @property
    def when(self) -> str:
        t = self.name
        return f"{t[:4]}-{t[4:6]}-{t[6:8]} {t[9:11]}:{t[11:13]}:{t[13:15]} UTC"

    @property
    def receipts(self) -> list[Path]:
        """The receipts of this party: one, or one for each step."""
        name = f"{self.ended.party}.receipt.json"
        found = [self.folder / name, *sorted(self.folder.glob(f"[0-9][0-9]-*/{name}"))]
        return [f for f in found if f.is_file() and not f.is_symlink() and not f.parent.is_symlink()]

    @property
    def reportable(self) -> bool:
        """Whether a page can be made of it."""
        return any(True for f in (*self.folder.glob("run.json"), *self.folder.glob("[0-9][0-9]-*/run.json")))


@dataclass(frozen=True)
class Left:
    """How much of something may still be asked for here; `most` is None where there is no limit."""

    what: str
    most: float | None
    spent: float

    @property
    def left(self) -> float | None:
        return None if self.most is None else max(0.0, self.most - self.spent)


@dataclass(frozen=True)
class State:
    """A party as it is now."""

    kit: Kit
    running: dict[str, Standing | None]
    connected: list[str]
    approval: Approval | None
    past: list[Past]  # the latest first
    left: list[Left]
    trouble: str = ""  # why something of this could not be read
    base: str = ""  # what its addresses begin with, on a page of several studies
    serving: bool = True  # whether its service runs
    twice: Mapping[str, tuple[float, str]] = field(default_factory=dict)  # parties that connected twice
    terms: Mapping[str, Any] = field(default_factory=dict)  # on what terms this party takes part now
    unseen: list[str] = field(default_factory=list)  # consents that came with the kit
    cells: str = ""  # how many there are in the file, where nobody has approved them
    history: History = field(default_factory=lambda: History([], whole=True))

    @property
    def stage(self) -> Stage:
        """Where the study of this kit stands here."""
        if self.kit.role == "coordinator":
            return "asks"
        if governance.expired(self.kit.study.governance):
            return "ended"
        if self.approval is None:
            return "waits"
        if self.approval.withdrawn:
            return "refused" if self.approval.refused else "withdrawn"
        return "approved"

    @property
    def mark(self) -> str:
        """Changes when anything but the progress of a run does."""
        told = [self.kit.study.digest.hex(), sorted(self.running), self.stage, repr(self.approval), self.trouble]
        told += [[run.name for run in self.past], repr(self.left), self.connected, [*self.twice], str(self.serving)]
        return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Place:
    """A kit on the page: with its service in this process, or in one of its own."""

    path: Path
    service: Service | None = None
    counter: Counter = field(default_factory=Counter)

    def status(self) -> Status:
        return of_service(self.service) if self.service is not None else status_of(Kit.open(self.path))

    def end_runs(self) -> int:
        """Stop every run, whatever the kit looks like by now."""
        if self.service is not None:
            return self.service.halt()
        return int(json.loads(give_order(Kit.open(self.path), b"halt\n"))["halted"])


def running(place: Place | Service) -> dict[str, Standing | None]:
    """The runs that go on here, and where each stands."""
    return dict(place.status().runs if isinstance(place, Place) else of_service(place).runs)


def snapshot(place: Place, base: str = "") -> State:
    """Everything at once. Raises `CloisterError` if the kit itself cannot be opened."""
    kit, now = Kit.open(place.path), place.status()
    approval, left, trouble, terms, unseen, cells = None, list[Left](), "", dict[str, Any](), list[str](), ""
    out, decisions = kit.path / "results", History([], whole=True)
    try:
        policy = kit.policy()
        out = policy.out
        if kit.role != "coordinator":
            decisions = kit.approvals.history
            terms = kit.terms(policy)
            approval = kit.approvals.entry(kit.study)
            unseen = kit.unseen_consents(policy)
            left = [*_left(kit, policy, approval)]
            if policy.data is not None and (approval is None or approval.data is None):
                cells = place.counter.words(kit.path, policy.data)
    except CloisterError as e:
        trouble = str(e)
    return State(
        kit,
        dict(now.runs),
        sorted(now.connected),
        approval,
        [*past_runs(out)],
        left,
        trouble,
        base,
        now.running,
        now.twice,
        terms,
        unseen,
        cells,
        decisions,
    )


def _left(kit: Kit, policy: Policy, approval: Approval | None) -> Iterator[Left]:
    for key, runs in kit.runs_so_far().items():
        yield Left("runs of this study" if key == "study" else f"runs of {key}", policy.limits.get(key), runs)
    if approval is not None and approval.data is not None:
        budget = kit.budget(policy)
        spent = budget.spent(approval.data.matrix)
        words = {"runs": "runs", "queries": "workflows computed", "epsilon": "ε"}
        total = budget.privacy(approval.data.matrix)
        if total.runs:
            words["epsilon"] = f"ε per {total.unit} at δ = {total.delta:g}, {total.runs} runs with noise together,"
        for key, what in words.items():
            yield Left(f"{what} on these cells, all studies", policy.budget.get(key), spent[key])


def past_runs(out: Path) -> Iterator[Past]:
    """The runs that left word of their end, the latest first; what is no run's folder is passed over."""
    names = [f.name for f in out.iterdir() if NAME.fullmatch(f.name)] if out.is_dir() else []
    for name in sorted(names, reverse=True):
        if (past := find_run(out, name)) is not None:
            yield past


def find_run(out: Path, name: str) -> Past | None:
    """The run of that name; None unless it is the plain name of a folder in `out` itself."""
    folder = out / name
    if not NAME.fullmatch(name) or folder.is_symlink():
        return None
    try:
        return Past(name, Ended.load(folder / "outcome.json"), folder)
    except (OSError, ValueError, TypeError):
        return None
