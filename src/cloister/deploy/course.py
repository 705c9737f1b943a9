"""Course: the way of a study through its steps, over as many runs as that takes.

    local/course.json     by the study's digest: the course's id, which steps are finished here and where their results
                          are, what is paid for, and which attempt is under way

A run that broke off is continued by the next one, at the first step that not every party has finished:

    R1  u ⇒ all   course; (run, welcome) of every step that u finished; which steps u answered. Signed with the greeting
    R2  all       k = the longest prefix of finished steps that all parties state alike
    R3  all       discard what there is of step k + 1, and begin it with new session ids, keys and randomness

Every two parties greet each other anew in every run (`cloister.deploy.link`, G1). So R1 needs no message of its own,
and nobody passes on another party's statement. The hash of all statements enters the digest that the parties compare
before the step: a party that states different things to two others ends the run. `welcome` is the hash of the message
by which the parties agreed on the step's first run id, with a nonce of each, so "alike" means in the same session.
Results are known by their hash: a step whose files changed on the disk is not finished.

What counts (`begin`): a course is paid for as a whole when it begins. A step that is begun again is paid for once more,
unless the attempt before sent nothing: what a party did not send cannot have been opened. Its own receipt says whether
it did, because every message stands there before it leaves. So the count of a workflow is the number of times that it
was answered, and the study's that of the step that was answered most often. docs/security/retries.md argues what a
repetition reveals.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from cloister import files
from cloister.cells.files import open_cells
from cloister.deploy.kit import Kit
from cloister.errors import CloisterError, DataError, DiskError, ProtocolAbort
from cloister.mpc.net.channel import NAME as CHANNEL
from cloister.mpc.net.journal import SUFFIX
from cloister.mpc.net.receipts import Receipt
from cloister.mpc.parties import Agreement
from cloister.rehearsal.results import load_run, step_folder
from cloister.rehearsal.run import Run
from cloister.study import Party, Study

FILE = "course.json"  # in `local`
MOST = 20  # courses that are kept, of as many studies
WAIT = 10.0  # seconds for the run before to let go of the file
LONGEST = 1 << 14  # bytes of a statement

log = logging.getLogger("cloister.deploy")


@dataclass(frozen=True)
class Finished:
    """A step that is done here, with its results on disk."""

    run: str  # in which it was done
    welcome: str  # hash of the step's first Welcome; "" at a server that had no part in it
    receipt: str  # last hash of this party's receipt
    output: str  # hash of the folder's files
    folder: str


@dataclass
class State:
    """One party's record of a course."""

    course: str  # the run that began it
    cells: str  # fingerprint of the matrix that was approved; "" where there are none
    paid: list[bool]  # by step: whether one more attempt is paid for
    times: list[int]  # by step: how often it was paid for
    finished: list[Finished] = field(default_factory=list)
    attempt: tuple[int, str] | None = None  # step and folder of what is under way

    @classmethod
    def load(cls, raw: Mapping[str, Any]) -> State:
        attempt = raw["attempt"]
        return cls(
            str(raw["course"]),
            str(raw["cells"]),
            [x is True for x in raw["paid"]],
            [int(x) for x in raw["times"]],
            [Finished(**{key: str(one[key]) for key in Finished.__dataclass_fields__}) for one in raw["finished"]],
            None if attempt is None else (int(attempt[0]), str(attempt[1])),
        )


@dataclass(frozen=True)
class Statement:
    """R1: what a party states to all others about its course."""

    course: str = ""  # "" for none
    steps: tuple[tuple[str, str], ...] = ()  # (run, welcome)
    answered: tuple[bool, ...] = ()  # by step: whether a message of it may have been opened

    def pack(self) -> bytes:
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":")).encode()

    @classmethod
    def read(cls, party: Party, data: bytes) -> Statement:
        try:
            if len(data) > LONGEST:
                raise ValueError(len(data))
            raw = json.loads(data)
            steps = tuple((run, welcome) for run, welcome in raw["steps"])
            answered = tuple(raw["answered"])
            if raw.keys() != set(cls.__dataclass_fields__) or not all(type(x) is bool for x in answered):
                raise ValueError(data)
            if not all(
                isinstance(x, str) and len(x) <= 64 for x in (raw["course"], *(x for one in steps for x in one))
            ):
                raise ValueError(data)
            return cls(raw["course"], steps, answered)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise ProtocolAbort("course", "R1", "malformed", f"'{party}' states no record of finished steps") from None


def common_prefix(mine: Statement, others: Mapping[Party, Statement], steps: int) -> int | None:
    """R2: how many first steps all have finished in the same sessions; None unless all are in the same course."""
    everyone = [mine, *others.values()]
    if not mine.course or any(one.course != mine.course for one in everyone):
        return None
    for k in range(steps):
        if any(len(one.steps) <= k for one in everyone):
            return k
        if len({one.steps[k][0] for one in everyone}) > 1 or len({one.steps[k][1] for one in everyone} - {""}) > 1:
            return k
    return steps


class Course:
    """One party's course in one run of its study.

    Parameters
    ----------
    anew
        Begin with the first step, whatever is finished; the coordinator decides this.
    """

    def __init__(self, kit: Kit, run: str, *, anew: bool = False) -> None:
        self.kit, self.run, self.parts = kit, run, kit.study.parts
        self._path, self._held = kit.path / "local" / FILE, contextlib.ExitStack()
        self._agreed, self._new = b"", True
        self.repeated = [False] * len(self.parts)  # steps that somebody has answered before
        self._old: State | None = None
        try:
            self._held.enter_context(files.locked(self._path, wait=WAIT))
            self._ours = True
        except (DataError, OSError):
            self._ours = False  # another run of this study is going on, or the disk is full
        self.state = self._first(_cells_of(kit))
        if self._ours and (found := _stored(kit)) is not None:
            self._settle(found)
            self._old = found
            if kit.study.steps and not anew:
                self.state, self._new = replace(found), False
        self.statement = Statement() if self._new else self._state_it()

    def _first(self, cells: str) -> State:
        """The record of a course that begins with this run."""
        return State(self.run, cells, [True] * len(self.parts), [1] * len(self.parts))

    def _settle(self, found: State) -> None:
        """What became of the latest attempt, and which results are still as they were."""
        if found.attempt is not None:
            at, folder = found.attempt
            found.paid[at] = found.paid[at] and not has_sent(Path(folder), self.kit.me)
            found.attempt = None
        for i, one in enumerate(found.finished if self.kit.study.steps else ()):  # one workflow has nothing to continue
            if digest_of(Path(one.folder)) != one.output:
                log.warning("step %d is no longer as it was in %s; it is done again", i + 1, one.folder)
                del found.finished[i:]
                return

    def _state_it(self) -> Statement:
        steps = tuple((one.run, one.welcome) for one in self.state.finished)
        return Statement(self.state.course, steps, tuple(not paid for paid in self.state.paid))

    # -- R2 --------------------------------------------------------------------------------------------------------

    def agree(self, told: Mapping[Party, bytes]) -> int:
        """The number of steps that need not be done again, from the statements of all other parties."""
        if len(told) < len(self.kit.study.parties) - 1:
            return len(self.state.finished)  # somebody is missing, and the step's hello will say who
        others = {p: Statement.read(p, data) for p, data in told.items()}
        start = common_prefix(self.statement, others, len(self.parts))
        if start is None:
            if not self._new and self.state.finished:
                log.warning("not every party continues this study where it broke off; it begins with its first step")
            self.state, self._new = self._first(self.state.cells), True
            return 0
        everyone = [self.statement, *others.values()]
        self.repeated = [any(len(s.answered) > i and s.answered[i] for s in everyone) for i in range(len(self.parts))]
        rows = {**others, self.kit.me: self.statement}
        self._agreed = hashlib.sha256(b"\0".join(p.encode() + rows[p].pack() for p in sorted(rows))).digest()
        return start

    def agreement(self, part: Study) -> Agreement:
        """What the parties of a step compare first. In a repeated step nobody may drop out of a sum.

        A sum over fewer sites than in the first attempt would disclose the difference.
        """
        plain = part.agreement
        if not self._agreed:
            return plain

        def bound(digest: bytes) -> bytes:
            return hashlib.sha256(b"continued" + digest + self._agreed).digest()

        places = {bound(digest): place for digest, place in plain.places.items()}
        colluders = len(plain.sites) if self.repeated[part.at - 1] else plain.colluders
        return replace(plain, digest=bound(plain.digest), places=places, colluders=colluders)

    # -- what counts -----------------------------------------------------------------------------------------------

    def due(self, part: Study) -> Study | None:
        """What an attempt of this step is to be counted as: the whole study, the step alone, or nothing."""
        if self._new:
            old = self._old
            kept = old is not None and not old.finished and all(old.paid) and old.cells == self.state.cells
            return None if kept else self.kit.study
        return None if self.state.paid[_index(part)] else part

    def begin(self, part: Study, folder: Path, count: Callable[[Study, bool], None]) -> None:
        """R3: record an attempt before its first message.

        `count` counts the study or a step, and whether that is one more run of the study; or it raises.
        """
        at, times = _index(part), self.state.times
        if (due := self.due(part)) is not None:
            more = self._new or times[at] == max(times)
            count(due, more)
            times[at] += not self._new
        self._new = False
        self.state.paid[at] = True
        del self.state.finished[at:]
        self.state.attempt = (at, str(folder))
        self._save()

    def finish(self, part: Study, run: Run, folder: Path) -> None:
        """A step is done here, and its results are on disk."""
        receipt = run.receipts[self.kit.me]
        told = (e.sha256 for e, _ in receipt.entries if e.kind == "told" and e.name == f"{CHANNEL}.Welcome")
        output = digest_of(folder) if self.kit.study.steps else ""
        one = Finished(self.run, next(told, ""), receipt.head, output, str(folder))
        self.state.finished = [*self.state.finished[: _index(part)], one]
        self.state.paid[_index(part)], self.state.attempt = False, None
        self._save()

    def restore(self, part: Study, folder: Path) -> Run:
        """A step that was finished in an earlier run; its files are in this run's folder, too."""
        source, place = Path(self.state.finished[_index(part)].folder), step_folder(folder, part)
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copytree(source, place, copy_function=_link)
        except (OSError, shutil.Error) as e:
            raise DiskError(f"{place} cannot be written ({getattr(e, 'strerror', None) or type(e).__name__})") from None
        run = load_run(place)
        outcome = run.outcomes[self.kit.me]
        if (cells := place / f"{self.kit.me}.h5ad").exists():
            outcome.adata = open_cells(cells)
        run.study = part
        return run

    def release(self) -> None:
        """Let the next run have the record."""
        self._held.close()
        self._ours = False

    def _save(self) -> None:
        if not self._ours:
            return
        known = {**_all(self.kit), self.kit.study.digest.hex(): asdict(self.state)}
        try:
            files.write(self._path, json.dumps(dict([*known.items()][-MOST:]), indent=1))
        except OSError as e:
            raise DiskError(f"{self._path} cannot be written ({e.strerror})") from None


def close_course(kit: Kit) -> None:
    """Every party has its results: the study's next run begins with the first step."""
    with contextlib.suppress(CloisterError, OSError), files.locked(kit.path / "local" / FILE, wait=WAIT):
        known = _all(kit)
        if known.pop(kit.study.digest.hex(), None) is not None:
            files.write(kit.path / "local" / FILE, json.dumps(known, indent=1))


def is_paid(kit: Kit) -> bool:
    """Whether a run may begin here that continues what was counted before."""
    found = _stored(kit)
    return found is not None and any(found.paid)


def has_sent(folder: Path, party: str) -> bool:
    """Whether a party sent anything in a step beyond its hello, by its receipt; if that is not there, it did."""
    for name in (f"{party}{SUFFIX}", f"{party}.receipt.json"):
        if (folder / name).exists():
            try:
                entries = Receipt.load(folder / name).entries
            except CloisterError:
                return True
            return any(e.kind == "sent" and e.protocol != CHANNEL and e.name != f"{CHANNEL}.Abort" for e, _ in entries)
    return True


def digest_of(folder: Path) -> str:
    """One hash of the files in a folder; "" if there is none."""
    whole = hashlib.sha256()
    try:
        for file in sorted(f for f in folder.iterdir() if f.is_file() and f.name != "report.html"):
            with file.open("rb") as f:
                whole.update(f"{file.name}\0{hashlib.file_digest(f, 'sha256').hexdigest()}\n".encode())
    except OSError:
        return ""
    return whole.hexdigest()


def _link(source: str, to: str) -> None:
    try:
        os.link(source, to)
    except OSError:  # another file system
        shutil.copy2(source, to)


def _index(part: Study) -> int:
    return max(0, part.at - 1)


def _cells_of(kit: Kit) -> str:
    try:
        entry = kit.approvals.entry(kit.study)
    except CloisterError:
        return ""
    return entry.data.matrix + entry.data.read if entry is not None and entry.data is not None else ""


def _stored(kit: Kit) -> State | None:
    """The study's course, if it is of the cells that are approved now."""
    try:
        found = State.load(_all(kit)[kit.study.digest.hex()])
    except (KeyError, TypeError, ValueError, IndexError, AttributeError):
        return None
    fits = len(found.paid) == len(found.times) == len(kit.study.parts)
    return found if fits and found.cells == _cells_of(kit) else None


def _all(kit: Kit) -> dict[str, Any]:
    try:
        return dict(json.loads((kit.path / "local" / FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return {}
