"""What a party does in one run between machines: its part of the workflow, and a folder with what came of it.

    results/20260131T120000Z-3f2a9c1e/
        outcome.json          done, or where and why not, in words
        basel.receipt.journal what was sent so far, while the run goes on (`cloister.mpc.net.journal`)
        run.json, ...         the same files as of a rehearsal, for this party only (`cloister.rehearsal.results`)
        01-shared-pca/, ...   instead of those: one such folder for each step, where the study has several; steps that
                              an earlier run finished (`cloister.deploy.course`) are here, too

The words of an error stay in that folder. The others hear `(protocol, line, code)` from the channel; so does the
coordinator once more at the end, in a signed word.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from cloister import errors, files, workflows
from cloister.deploy.approval.own_cells import check_approved_cells, check_floors, open_cells
from cloister.deploy.course import Course
from cloister.deploy.kit import Kit, Policy
from cloister.deploy.link import Ask, SealedLink
from cloister.deploy.logs import Teller
from cloister.errors import CloisterError, PeerLost, RefusedError
from cloister.mpc.crypto.entropy import Entropy
from cloister.mpc.net.channel import Endpoint
from cloister.mpc.net.journal import SUFFIX
from cloister.mpc.net.mailbox import Mailbox
from cloister.mpc.net.multiplex import Mailboxes, StepLink
from cloister.mpc.net.receipts import Receipt
from cloister.rehearsal.results import save_run, step_folder
from cloister.rehearsal.run import Run, workflow_part
from cloister.session import Outcome, take_part
from cloister.study import Party, Study
from cloister.workflows import pipeline

if TYPE_CHECKING:
    from anndata import AnnData

log = logging.getLogger("cloister.deploy")


@dataclass(frozen=True)
class Ended:
    """How a run ended at one party; `outcome.json` holds the same."""

    run: str
    party: str
    status: Literal["done", "refused", "aborted"]
    folder: str = ""
    error: Mapping[str, Any] = field(default_factory=dict)  # type, text, reason, origin; protocol, line, code
    result: Mapping[str, Any] = field(default_factory=dict)
    cost: Mapping[str, float] = field(default_factory=dict)
    parties: Mapping[str, str] = field(default_factory=dict)  # at the coordinator: how it ended at the others
    step: str = ""  # the one that failed, in words, where the study has several

    @property
    def word(self) -> str:
        """What the coordinator may hear of it: place and code, and where it began if that was at another party."""
        if self.status == "done":
            return self.status
        here = [str(self.error.get(k) or x) for k, x in (("protocol", "local"), ("line", "-"), ("code", "-"))]
        code, origin = str(self.error.get("began", "")), str(self.error.get("origin", ""))
        here[2] = code if here[2] == "-" and code else here[2]
        first = [f"({code} at {origin})"] if origin not in ("", self.party) else []
        return " ".join([self.status, *here, *first, *([f"in {self.step}"] if self.step else [])])

    def save(self, path: Path) -> None:
        """Write it whole or not at all, for the owner only."""
        files.write(path, json.dumps(asdict(self), indent=1, default=_plain))

    def keep(self) -> None:
        """Write it into its folder; a disk that is full is no reason to end a service."""
        try:
            self.save(Path(self.folder) / "outcome.json")
        except OSError as e:
            log.error("%s cannot be written: %s", self.folder, e)

    @classmethod
    def load(cls, path: Path) -> Ended:
        return cls(**json.loads(path.read_text()))

    def check(self) -> None:
        """Raise the error that the run ended with, if it did."""
        if self.status != "done":
            raise errors.from_json(self.error)


def _plain(x: Any) -> Any:
    return x.tolist() if hasattr(x, "tolist") else str(x)


class Turn:
    """One party's turn in one run: the link, from the start; the part, or one after the other, in `take`."""

    def __init__(self, kit: Kit, run: str, ask: Ask, *, anew: bool = False) -> None:
        self.kit, self.run, self.tell = kit, run, Teller(kit, run)
        self.course = Course(kit, run, anew=anew)
        self.mailbox = (
            Mailboxes([part.agreement for part in kit.study.parts], kit.me, room())
            if kit.study.steps
            else Mailbox(kit.me, room())
        )
        self.entropy, self.over = Entropy(), threading.Event()
        self.link = SealedLink(
            kit.study, kit.me, run, kit.identity, self.mailbox, ask, self.entropy, self.course.statement.pack()
        )
        self._met = self._seated = self._opened = False

    def take(self) -> Ended:
        """Run this party's part to its end, and write the results or the error. Never raises."""
        kit, done = self.kit, list[Run]()
        folder, run = results_folder(kit, self.run), Run(kit.study.parts[0])
        try:
            policy = kit.policy()
            self._meet()
            start = self.course.agree(self.link.statements)
            if isinstance(self.mailbox, Mailboxes):
                self.mailbox.begin(min(start + 1, len(kit.study.parts)))
            if start:
                behind = kit.study.parts[start - 1].place
                log.info("run %s continues behind %s, which all have finished", self.run[:8], behind)
            for part in kit.study.parts[start:]:
                run = Run(part)
                self.tell.begin(part)
                with pipeline.named(part):
                    run.outcomes[kit.me] = self._run_part(policy, run, done, folder)
                self.tell.finish(run.outcomes[kit.me].cost.get("rounds", 0))
                done.append(run)
            if start < len(kit.study.parts):
                self._save(run, folder)
            else:
                done = self._restore(start, folder)
            ended = _all_done(self.run, kit.me, folder, done)
        except BaseException as e:
            ended = replace(failed(kit, self.run, e, folder), step=run.study.place)
            self._announce(e, run.study)
            with contextlib.suppress(CloisterError):
                self._save(Run(run.study, errors={kit.me: e}, receipts=run.receipts), folder)
        finally:
            if kit.study.steps:
                self.link.close()  # each step has left it open for the next
            self.course.release()
        self.tell.end()
        ended.keep()
        log.info("run %s %s; see %s", self.run[:8], ended.error.get("text") or ended.status, folder)
        if ended.error:
            log.info("run %s: next: %s", self.run[:8], ended.error["next"])
        self.over.set()
        return ended

    def _restore(self, steps: int, folder: Path) -> list[Run]:
        """The first steps, as earlier runs left them."""
        return [self.course.restore(part, folder) for part in self.kit.study.parts[:steps]]

    def _announce(self, e: BaseException, part: Study) -> None:
        """Have the others learn why this party does not begin, where no session has: by a full disk, for example."""
        if self._seated:
            return  # its session has sent the abort
        with contextlib.suppress(Exception):
            if not self._met:
                self._met = True
                self.link.start()
                self.link.meet()
            link = StepLink(self.link, part.at) if part.at else self.link
            mailbox = self.mailbox.begin(part.at) if isinstance(self.mailbox, Mailboxes) else self.mailbox
            agreement = self.course.agreement(part)
            endpoint = Endpoint(agreement, self.kit.me, link, mailbox, Receipt({}), nonce=self.entropy.bytes)
            endpoint.abort(e)
            endpoint.close()

    def _meet(self) -> None:
        pipeline.check_steps(self.kit.study)
        for note in workflows.warnings_of(self.kit.study):
            log.warning(note)
        self._met = True
        self.link.start()
        if missing := self.link.meet():
            log.warning("%s did not come", ", ".join(missing))

    def _save(self, run: Run, folder: Path) -> None:
        """Write what came of a part; the journal goes when the receipt is there."""
        place = step_folder(folder, run.study)
        save_run(run, place, on_event=self.tell)
        if self.kit.me in run.receipts:
            journal_in(place, self.kit.me).unlink(missing_ok=True)
            if not run.errors:
                self.course.finish(run.study, run, place)

    def _run_part(self, policy: Policy, run: Run, done: list[Run], folder: Path) -> Outcome:
        kit, part = self.kit, run.study
        what, before = f"{part.place}: " if part.place else "", max(0, part.at - 1)
        log.info("run %s of study %r begins: %s%s, %s", self.run[:8], part.name, what, part.workflow, part.mode)

        def cells() -> AnnData | None:
            self._seated = True
            first, own = not self._opened, None
            if first:
                self._opened = True
                kit.check_approved(policy)
                own = open_cells(kit, policy) if kit.role == "site" else None
                if own is not None:
                    check_approved_cells(kit, own)
                done.extend(self._restore(before, folder))
            else:
                self._save(done[-1], folder)  # whole, whatever becomes of this step

            def count(what: Study, more: bool) -> None:  # noqa: FBT001
                if kit.role != "coordinator":
                    step = None if what.digest == kit.study.digest else what
                    kit.count_run(policy, own, step, more=more)

            self.course.begin(part, step_folder(folder, part), count)
            if done:
                if (adata := done[-1].outcomes[kit.me].adata) is not None:
                    check_floors(kit.me, part, policy, adata)
                    kit.admit_step(policy, part, adata)
                return adata
            if own is not None:
                with errors.about(str(policy.data)):
                    pipeline.check_site(kit.study, kit.me, own)
            return own

        def keep(receipt: Receipt) -> None:
            run.receipts[kit.me] = receipt

        self._seated = False  # until the receipt's journal is there
        folders = {one.label: step_folder(folder, one) for one in kit.study.parts[:before]}
        return take_part(
            part,
            kit.me,
            StepLink(self.link, part.at) if part.at else self.link,
            self.mailbox.begin(part.at) if isinstance(self.mailbox, Mailboxes) else self.mailbox,
            cells,
            part=functools.partial(workflow_part, checked=not before, folders=folders),  # the first step's cells were
            reveals=workflows.reveals(part),
            identity=kit.identity,
            entropy=self.entropy,
            on_event=self.tell,
            on_receipt=keep,
            consent=frozenset(policy.consent),
            floors=policy.floors,
            charge=kit.budget(policy).charge_queries if kit.role == "site" else None,
            approval=self._approval(policy, part),
            journal=journal_in(step_folder(folder, part), kit.me),
            agreement=self.course.agreement(part),
        )

    def _approval(self, policy: Policy, part: Study) -> dict[str, Any] | None:
        """What the receipt says about who allowed the run, on what terms, and what all runs on the cells spent."""
        approved = self.kit.approvals.entry(self.kit.study)
        if approved is None:
            return None
        total = self.kit.privacy_total(policy, self.course.due(part))
        return {**approved.record, "terms": self.kit.terms(policy), **total}


def journal_in(folder: Path, party: str) -> Path:
    return folder / f"{party}{SUFFIX}"


def _all_done(run: str, me: Party, folder: Path, done: list[Run]) -> Ended:
    """An ending where everything was done: of several steps the results by step, and the costs together."""
    outcomes = {one.study.label: one.outcomes[me] for one in done}
    cost: Counter[str] = Counter()
    for outcome in outcomes.values():
        cost.update(outcome.cost)
    results = {label: o.result for label, o in outcomes.items()}
    result = results if done[0].study.steps else results[done[0].study.label]
    return Ended(run, me, "done", str(folder), {}, result, dict(cost))


def room() -> int:
    """Bytes that the other parties together may make this one hold: 4 GiB, or half of the machine's memory."""
    return min(1 << 32, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2)


def failed(kit: Kit, run: str, e: BaseException, folder: Path) -> Ended:
    """An ending from an error."""
    errors.blame(e, kit.me, errors.code_of(e))
    return Ended(run, kit.me, "refused" if isinstance(e, RefusedError) else "aborted", str(folder), errors.to_json(e))


def results_folder(kit: Kit, run: str) -> Path:
    """Where a run that begins now leaves what comes of it."""
    try:
        out = kit.policy().out
    except CloisterError:  # its error is what will be written there
        out = kit.path / "results"
    return out / f"{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{run[:8]}"


def lost(party: str, run: str, why: str) -> Ended:
    """An ending for a run whose process cannot tell it any more."""
    error = PeerLost("flare", "-", "lost", why)
    errors.blame(error, party, error.code)
    return Ended(run, party, "aborted", "", errors.to_json(error))
