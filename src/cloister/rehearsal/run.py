"""A run and a series of runs: their records, and the page that is written of them; a party's part in one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cloister import workflows
from cloister.errors import PeerLost
from cloister.mpc.net.receipts import Receipt
from cloister.rehearsal.record import Record
from cloister.session import Outcome, Session
from cloister.study import Study
from cloister.workflows.pipeline import named, with_files

if TYPE_CHECKING:
    from anndata import AnnData


def workflow_part(
    session: Session, adata: AnnData | None, *, checked: bool = False, folders: Mapping[str, Path] | None = None
) -> Outcome:
    """The part of a party in its study's workflow; its cells are checked first, unless they were already.

    `folders` holds what earlier steps of the study wrote, by their names.
    """
    workflow, options = workflows.check_plan(session.study)
    options = with_files(options, session.me, folders or {})
    if (privacy := workflow.privacy(options)) and session.role == "site":
        session.note("spent", "epsilon {epsilon:g}, delta {delta:g}, for {protects}".format(**privacy))
    outcome = workflow.part(session, adata, options, checked=checked)
    if outcome.adata is None and session.study.at:
        outcome.adata = adata  # a step that leaves the cells as they are hands them on
    return outcome


@dataclass(repr=False)
class Run(Record):
    """What came of a run, and its page."""

    def report(self, path: str | Path, *, compared: Sequence[Mapping[str, Any]] = ()) -> Path:
        """Write figures and receipts as one self-contained page, with a table of what the result is `compared` with."""
        from cloister.report.page import write_report

        return write_report(path, [self], baselines={self.study.workflow: list(compared)} if compared else None)


@dataclass
class Series:
    """What came of a study of several steps: a run for each that was begun, by the step's name and in their order."""

    study: Study
    runs: dict[str, Run] = field(default_factory=dict)

    def __repr__(self) -> str:
        """One line, for who types `series` in a notebook."""
        ended = f"stopped in {self.failed}" if self.failed else "done"
        return f"<Series of {len(self.study.steps)} steps, {', '.join(self.runs)}: {ended}>"

    @property
    def failed(self) -> str:
        """The step that failed; empty if all were completed."""
        return next((name for name, run in self.runs.items() if not run.whole), "")

    @property
    def data(self) -> dict[str, AnnData]:
        """The sites' cells after the last step that was completed."""
        done = [run for run in self.runs.values() if run.whole]
        return done[-1].data if done else {}

    @property
    def results(self) -> dict[str, dict[str, dict[str, Any]]]:
        return {name: run.results for name, run in self.runs.items()}

    @property
    def receipts(self) -> dict[str, dict[str, Receipt]]:
        """Step → party → receipt."""
        return {name: run.receipts for name, run in self.runs.items()}

    @property
    def cost(self) -> dict[str, dict[str, dict[str, float]]]:
        return {name: run.cost for name, run in self.runs.items()}

    def check(self) -> None:
        """Raise the error that made a step fail, if one did; it names the step."""
        if self.failed:
            run = self.runs[self.failed]
            with named(run.study):
                run.check()
                gone = [p for p in run.study.parties if p not in run.outcomes]
                raise PeerLost("channel", "-", "lost", f"nothing more came from {', '.join(gone)}")

    def report(self, path: str | Path) -> Path:
        """Write one self-contained page with a part for each step."""
        from cloister.report.page import write_report

        return write_report(path, [*self.runs.values()], title=self.study.name)
